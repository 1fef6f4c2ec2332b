"""Engines that die, freeze, find their port taken or lose their clients: no request is lost in silence."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from runtime_fakes import LATENCY, MODEL, PATIENCE_S, engines, fleet_of, is_idle, random_trace, until
from shares import some

from planner.documents.fleet_file import fleet_document
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Policies
from planner.runtime import workers
from planner.runtime.connection_limits import listening
from planner.runtime.live_replay import Journal, JournalFile, Sending, replay_trace
from planner.runtime.router import LiveRouter
from planner.runtime.workers import (
    EngineCommand,
    LiveWorker,
    LiveWorkers,
    Patience,
    WorkerPlace,
    place_workers,
    rehearsal_commands,
    run_engines,
)
from planner.traffic.trace import Trace

QUICK = Patience(
    start_s=60.0, stop_s=5.0, health_every_s=0.1, health_timeout_s=0.5, health_failures=3, backoff_s=0.1
)


@dataclass
class Scene:
    """What rages among workers while a trace is replayed: its `url`, and who was in flight at a signal."""

    group: LiveWorkers
    router: LiveRouter
    url: str
    journal: JournalFile
    sent_before: int = 0
    in_flight: int = 0

    async def signal_after(self, requests: int, worker: int, number: int) -> None:
        """Send the signal once so many requests have been sent, and wait until the worker is up again."""
        await until(lambda: len(self.journal.rows("sends")) >= requests)
        hit = self.group.workers[worker]
        assert hit.process is not None
        os.kill(hit.process.pid, number)
        self.sent_before, self.in_flight = len(self.journal.rows("sends")), self.router.in_flight
        await until(lambda: hit.starts > 1 and hit.is_up)

    def sent_later(self) -> list[int]:
        """The requests that were sent after the signal."""
        return [row["sends"] for row in self.journal.rows("sends")[self.sent_before :]]


Chaos = Callable[[Scene], Awaitable[None]]


async def nothing_happens(_: Scene) -> None:
    return


def replayed(
    fleet: Fleet, trace: Trace, folder: Path, chaos: Chaos = nothing_happens
) -> tuple[Journal, list[str], LiveRouter]:
    """Replay `trace` on processes that keep time while `chaos` rages; what became of them."""

    async def run() -> tuple[list[str], LiveRouter]:
        async with run_engines(place_workers(fleet, folder, None), rehearsal_commands(), QUICK) as group:
            router = LiveRouter(group.workers, fleet)
            async with listening(router.app, "127.0.0.1", 0) as url:
                raging = asyncio.ensure_future(chaos(Scene(group, router, url, journal)))
                await replay_trace(trace, range(len(trace)), url, MODEL, journal, Sending(timeout_s=30.0))
                await raging
            pids = [worker.process.pid for worker in group.workers if worker.process]
        assert not any(is_running(pid) for pid in pids)
        return [f"{name} {what}" for _, name, what in group.events], router

    journal = JournalFile(folder / "journal.jsonl", {})
    events, router = asyncio.run(run())
    return journal.read(), events, router


def is_running(pid: int) -> bool:
    """Zombies of somebody else's are not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGKILL, "died (signal 9)"), (signal.SIGSTOP, "/health 3")]
)
def test_a_worker_killed_or_frozen_mid_replay_loses_nothing(number: int, said: str, tmp_path: Path) -> None:
    """Every request finishes, or says why not: those whose stream had begun. The worker is restarted, and
    tokens are complete wherever a request has finished."""
    trace = random_trace(80, 40.0, seed=1)
    scenes: list[Scene] = []

    async def chaos(scene: Scene) -> None:
        scenes.append(scene)
        await scene.signal_after(32, 0, number)

    policies = Policies(routing="d2lpm", prefix_cache=True)
    fleet = fleet_of(("w", "mixed", 2), policies=policies)
    journal, events, router = replayed(fleet, trace, tmp_path, chaos)
    assert not journal.missing(trace) and is_idle(router)
    assert not router.live.caches.entries["refs"].any()
    for sent in journal.outcomes.values():
        if sent.status == "finished":
            assert len(sent.token_s) == trace.output_tokens[sent.request]
        else:
            assert sent.status == "failed" and "w-0" in sent.reason
    assert sum(sent.status != "finished" for sent in journal.outcomes.values()) <= scenes[0].in_flight
    assert any(event.startswith("w-0") and said in event for event in events)
    assert "w-0 up after start 2" in events


def test_a_pair_survives_its_decode_worker(tmp_path: Path) -> None:
    """The only decode worker is killed: what had begun is reported, the rest waits for it and is answered."""
    trace = random_trace(40, 40.0, seed=2)
    scenes: list[Scene] = []

    async def chaos(scene: Scene) -> None:
        scenes.append(scene)
        await scene.signal_after(20, 1, signal.SIGKILL)

    journal, events, router = replayed(
        fleet_of(("p", "prefill", 1), ("d", "decode", 1)), trace, tmp_path, chaos
    )
    assert not journal.missing(trace) and is_idle(router)
    late = scenes[0].sent_later()
    assert late and all(journal.outcomes[request].status == "finished" for request in late)
    assert "d-0 up after start 2" in events


def test_a_port_that_is_taken_costs_one_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody listens on the first port: the engine cannot, and comes up on another one."""
    free = workers.free_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [int(taken.getsockname()[1])]
        monkeypatch.setattr(workers, "free_port", lambda: ports.pop() if ports else free())
        trace = random_trace(5, 50.0)
        journal, events, _ = replayed(fleet_of(("w", "mixed", 1)), trace, tmp_path)
    assert all(sent.status == "finished" for sent in journal.outcomes.values())
    assert events[0].startswith("w-0 did not start") and "w-0 up after start 2" in events


def test_a_foreign_server_on_the_port_is_not_taken_for_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of somebody else is healthy on the first port while ours still loads: it is refused by name,
    and ours serves everything from the second."""
    free, loading = (
        workers.free_port,
        EngineCommand([sys.executable, "-c", "import time; time.sleep(60)"], {}),
    )
    ports: list[int] = []
    monkeypatch.setattr(workers, "free_port", lambda: ports.pop() if ports else free())
    starts = iter([lambda *_: loading])

    def commands(place: WorkerPlace, port: int) -> EngineCommand:
        return next(starts, rehearsal_commands())(place, port)

    async def run() -> tuple[list[str], str]:
        async with engines(["mixed"]) as others:
            ports.append(int(others[0].url.rpartition(":")[2]))
            async with run_engines(
                place_workers(fleet_of(("w", "mixed", 1)), tmp_path, None), commands, QUICK
            ) as group:
                return [what for _, _, what in group.events], group.workers[0].url

    events, url = asyncio.run(run())
    assert events[0].startswith("another server answers on its port") and events[1] == "up after start 2"
    assert url not in events[0]


@pytest.mark.slow
def test_clients_that_leave_at_random_disturb_nobody(tmp_path: Path) -> None:
    """A hundred streams closed after a random time, while the trace runs: all of the trace is answered."""
    trace = random_trace(60, 40.0, seed=3)
    rng = random.Random(5)

    async def one(url: str) -> None:
        await asyncio.sleep(rng.uniform(0.8, 2.5))
        body = {"model": MODEL, "prompt": [5] * 50, "max_tokens": 400, "stream": True}
        timeout = aiohttp.ClientTimeout(total=rng.uniform(0.001, 0.2))
        async with aiohttp.ClientSession(timeout=timeout) as client:
            try:
                async with client.post(f"{url}/v1/completions", json=body) as answer:
                    await answer.read()
            except (TimeoutError, aiohttp.ClientError):
                pass

    async def chaos(scene: Scene) -> None:
        await asyncio.gather(*(one(scene.url) for _ in range(100)))
        await asyncio.sleep(0.3)

    policies = Policies(routing="e2", prefix_cache=True)
    journal, _, router = replayed(fleet_of(("w", "mixed", 2), policies=policies), trace, tmp_path, chaos)
    assert [sent.status for sent in journal.outcomes.values()] == ["finished"] * 60
    assert is_idle(router) and not router.live.caches.entries["refs"].any()


def test_an_engine_that_cannot_start_ends_in_one_line_with_its_last_words(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import sys; sys.exit('no such model: tiny')"]

    async def run() -> None:
        spots = place_workers(fleet_of(("w", "mixed", 1)), tmp_path, None)
        async with run_engines(spots, lambda place, port: EngineCommand(argv, {}), QUICK):
            pass

    with pytest.raises(InputError, match=r"w-0: did not start \(exit code 1\), 2 times.*no such model: tiny"):
        asyncio.run(run())


def test_a_pause_doubles_with_every_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1, 0.2, 0.4 s before the fourth start, then it is given up (4 failures allowed from the start)."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds >= 0.1:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    patience = Patience(
        start_s=5.0, health_every_s=0.1, backoff_s=0.1, longest_backoff_s=0.3, failures_at_start=4
    )
    place = place_workers(fleet_of(("w", "mixed", 1)), tmp_path, None)[0]
    worker = LiveWorker(
        place, lambda *_: EngineCommand([sys.executable, "-c", ""], {}), patience, lambda *_: None
    )
    asyncio.run(worker.run())
    assert pauses == pytest.approx([0.1, 0.2, 0.3])


def test_more_gpus_than_there_are_asks_for_a_slice(tmp_path: Path) -> None:
    fleet = fleet_of(("a", "mixed", 2), ("b", "mixed", 1))
    with pytest.raises(InputError, match=r"needs 3 GPUs, this machine has 2.*--slice"):
        place_workers(fleet, tmp_path, 2)
    assert [place.devices for place in place_workers(fleet, tmp_path, 3)] == [(0,), (1,), (2,)]


@pytest.mark.long
@pytest.mark.parametrize("number", some([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], 1))
def test_no_engine_outlives_plan_serve(number: int, tmp_path: Path) -> None:
    """Asked to stop, interrupted, or killed: a moment later its engines are gone."""
    (tmp_path / "fleet.yaml").write_text(
        to_yaml(fleet_document(fleet_of(("w", "mixed", 2), latency=LATENCY)))
    )
    command = [
        sys.executable,
        "-m",
        "planner.cli",
        "serve",
        "fleet.yaml",
        "--engine",
        "rehearsal",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as plan:
        assert plan.stdout is not None
        said = [plan.stdout.readline(), plan.stdout.readline()]
        assert "http://127.0.0.1" in said[1]
        engines = [int(pid) for pid in Path(f"/proc/{plan.pid}/task/{plan.pid}/children").read_text().split()]
        assert len(engines) == 2 and all(is_running(pid) for pid in engines)
        plan.send_signal(number)
        plan.wait(timeout=PATIENCE_S)
        assert plan.returncode == (-9 if number == signal.SIGKILL else 0)
    deadline_s = time.monotonic() + PATIENCE_S
    while any(is_running(pid) for pid in engines) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in engines)
