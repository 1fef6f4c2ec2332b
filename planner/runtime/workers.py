"""Keeps the workers of a plan running on this machine: one engine process for each, on a port of its own,
which is watched, and started again when it fails.

A worker that exits, or whose /health does not answer three times in a row, is killed with all its children
and started again on another port, after a pause that doubles with every failure. A worker that fails too
often in a row is not started for a while, and never again if it has never been up, because then its settings
are wrong. Every start of an engine has an identity, which is in all its answers, so that another server on
the same port is not taken for this engine. Each engine is a session of its own, so Ctrl-C in the terminal
reaches only this process, which stops the engines. If this process is killed, the kernel ends them
(planner/runtime/launch.py).
"""

import asyncio
import glob
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import aiohttp

from planner.errors import InputError
from planner.fleet import Fleet, Pool, Role
from planner.manifests import engine_command, kv_store
from planner.runtime import launch

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # The names of pools that may be part of the name of a file.
LOG = logging.getLogger("fleetplan.workers")
STEADY_S = 60.0  # Once a worker has been up for this time, its earlier failures do not count any more.
# A starting engine is asked for its health ten times as often, and every LONGEST_START_POLL_S at least.
START_POLL_FRAC, LONGEST_START_POLL_S = 0.1, 0.25
LAST_LINES = 3  # Lines at the end of a log that a message quotes.
LAST_BYTES = 65_536  # The last lines are looked for in this many bytes at the end of the log.
UP = "up after start {}"  # The event of an engine that has come up, with the number of its start.
FIRST_START = UP.format(1)
EVENTS = 10_000  # A fleet's workers together remember this many of their latest events.
# vLLM on a CPU needs a KV space (VLLM_CPU_KVCACHE_SPACE) this much larger than its blocks; by trial.
KV_MARGIN = 1.25
CPU_BLOCK_TOKENS = 128  # vLLM's own default on a CPU; its attention there needs multiples of 32.


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits on a worker's starts, health checks and failures, set by hand."""

    start_s: float = engine_command.START_S  # An engine must be healthy within this time of its start.
    stop_s: float = 15.0  # An engine that does not end by itself within this time is killed.
    health_every_s: float = 2.0  # The time between two health checks.
    health_timeout_s: float = 5.0  # A busy engine answers within this time.
    health_failures: int = 3  # After this many checks in a row without an answer the engine counts as down.
    backoff_s: float = 1.0  # The pause after the first failure; it doubles with each further one.
    longest_backoff_s: float = 30.0  # No pause is longer.
    failures: int = 5  # After this many failures in a row the worker is given up.
    cool_down_s: float = 300.0  # Time before a worker that was given up is tried again.
    # One failure may be a port that was taken; more are a mistake in the settings.
    failures_at_start: int = 2


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where one worker runs: the numbers of its `devices` on this machine, and its `folder` for logs.

    With `log_bytes` its log and its step log stay below this many bytes each: the newest lines are kept, and
    the step log of one start before.
    """

    name: str
    pool: Pool
    devices: tuple[int, ...]
    folder: Path
    log_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """A process to start; `environment` comes on top of ours."""

    argv: Sequence[str]
    environment: Mapping[str, str]


# A function of a place and a port; it returns the process that starts an engine there.
Commands = Callable[[WorkerPlace, int], EngineCommand]


def place_workers(
    fleet: Fleet, folder: Path, gpu_count: int | None, *, log_bytes: int = 0
) -> list[WorkerPlace]:
    """Give the workers of `fleet` this machine's GPUs in order; without GPUs (None) they share its CPU cores.

    `folder` and `log_bytes` are those of `WorkerPlace`. Raises InputError if the GPUs are too few.
    """
    next_device, places = 0, []
    for pool in fleet.running_pools:
        if not _NAME.fullmatch(pool.name):
            raise InputError(
                f"pool {pool.name[:80]!r}: its logs bear its name; use up to 64 letters, digits, - and _"
            )
        for name in pool.worker_names:
            end_device = next_device + pool.type.gpus
            if gpu_count is not None and end_device > gpu_count:
                raise InputError(
                    f"the fleet needs {fleet.gpus} GPUs, this machine has {gpu_count}; validate a slice of "
                    "it with --slice, one worker of each type with its share of the traffic"
                )
            devices = tuple(range(next_device, end_device))
            places.append(WorkerPlace(name, pool, devices, folder, log_bytes))
            next_device = end_device
    return places


def free_port() -> int:
    """A port on which nobody listens now.

    If it is taken before an engine binds it, that start fails, and the next one gets another port.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LiveWorker:
    """One engine and what the router needs of it; `run` keeps it alive until it is cancelled."""

    can_change_role = True  # This process starts the engine itself (`router.Backend`).

    def __init__(
        self, place: WorkerPlace, commands: Commands, patience: Patience, note: Callable[[str, str], None]
    ):
        """`note` is called with the worker's name and what happened to it."""
        self.place, self.commands, self.patience, self.note = place, commands, patience, note
        self.name = place.name
        self.is_up = False
        self.url = ""
        self.identity = ""  # The identity of this start, which is in all its answers.
        self.foreign_server = ""  # A sentence, once another server without this identity answers on its port.
        self.starts = 0  # How often the engine was started.
        self.gave_up = ""  # Why the engine is not started again, or not for a while; empty where it is.
        self.start_settled = asyncio.Event()  # Set once the engine is up for the first time, or given up.
        self.role_requested = asyncio.Event()  # Set when `change_role` gives the place another role.
        self.process: asyncio.subprocess.Process | None = None

    def change_role(self, role: Role) -> None:
        """Have `run` stop the engine and start it again in this role; returns at once."""
        self.place = replace(self.place, pool=replace(self.place.pool, role=role))
        self.role_requested.set()

    @property
    def log(self) -> Path:
        """The file of the engine's output."""
        return self.place.folder / f"{self.place.name}.log"

    async def run(self) -> None:
        """Start the engine, and again when it fails, until this is cancelled or the worker is given up."""
        failures = 0
        try:
            while True:
                reason = await self._start()
                if not reason:  # The process runs.
                    reason = await self._until_up()
                if not reason:  # The engine is healthy.
                    up_s = time.monotonic()
                    self.is_up = True
                    self.start_settled.set()
                    self.note(self.place.name, UP.format(self.starts))
                    reason = await self._until_down()
                    self.is_up = False
                    if not reason:
                        self.note(self.place.name, f"restarts as a {self.place.pool.role} worker")
                        await self._stop()
                        continue
                    failures = failures if time.monotonic() - up_s < STEADY_S else 0
                await self._kill()
                failures += 1
                self.note(self.place.name, reason)
                allowed_failures = (
                    self.patience.failures if self.start_settled.is_set() else self.patience.failures_at_start
                )
                if failures >= allowed_failures:
                    self.gave_up = f"{reason}, {failures} times in a row{self._log_end()}"
                    if not self.start_settled.is_set():
                        self.note(self.place.name, "given up")
                        self.start_settled.set()
                        return
                    wait_s = self.patience.cool_down_s
                    self.note(
                        self.place.name, f"given up for {wait_s:g} s: {reason}, {failures} times in a row"
                    )
                    await asyncio.sleep(wait_s)
                    # After the pause the worker gets one try: one more failure gives it up again.
                    failures, self.gave_up = allowed_failures - 1, ""
                    continue
                pause_s = self.patience.backoff_s * 2 ** (failures - 1)
                await asyncio.sleep(min(pause_s, self.patience.longest_backoff_s))
        finally:
            self.is_up = False
            await self._stop()

    async def _start(self) -> str:
        """Start the engine's process; returns the reason if that fails, else an empty text."""
        self.starts += 1
        self.role_requested.clear()
        try:
            port = free_port()
            self.url, self.foreign_server = f"http://127.0.0.1:{port}", ""
            self.identity = secrets.token_hex(16)
            command = self.commands(self.place, port)
            environment = {name: value for name, value in os.environ.items() if name != launch.API_KEYS}
            environment |= {**command.environment, **self._step_log()}
            environment |= {launch.PARENT: str(os.getpid()), launch.IDENTITY: self.identity}
            with self._opened_log() as output:
                self.process = await asyncio.create_subprocess_exec(
                    *command.argv,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            self.process = None
            return f"cannot be started ({error.strerror or error})"
        return ""

    def _opened_log(self) -> IO[bytes]:
        """The log, or the null device if the log cannot be opened: a worker runs without one too."""
        try:
            return self.log.open("ab")
        except OSError:
            return Path(os.devnull).open("ab")

    def _step_log(self) -> dict[str, str]:
        """The environment that names the step log of this start.

        With `log_bytes` all earlier step logs but the latest are removed.
        """
        path = self.place.folder / f"{self.place.name}.{time.time_ns()}.steps.jsonl"
        if not self.place.log_bytes:
            return {launch.STEP_LOG: str(path)}
        step_logs = sorted(self.place.folder.glob(f"{glob.escape(self.place.name)}.*.steps.jsonl*"))
        for old_log in step_logs[:-1]:
            with suppress(OSError):
                old_log.unlink()
        return {launch.STEP_LOG: str(path), launch.STEP_LOG_BYTES: str(self.place.log_bytes)}

    def _shorten_log(self) -> None:
        """Once the log has half of `log_bytes`, copy it to a file (.1) beside it and empty it.

        It is emptied in place, because the engine keeps it open and appends to it.
        """
        with suppress(OSError):
            if 0 < self.place.log_bytes // 2 <= self.log.stat().st_size:
                shutil.copyfile(self.log, self.log.with_name(self.log.name + ".1"))
                os.truncate(self.log, 0)

    async def _until_up(self) -> str:
        """Wait until the engine is healthy; returns the reason if it never is, else an empty text."""
        deadline_s = time.monotonic() + self.patience.start_s
        async with self._client() as client:
            while time.monotonic() < deadline_s:
                if self._exit_code is not None:
                    return f"did not start ({_exit_text(self._exit_code)})"
                if await self._is_healthy(client):
                    return ""
                if self.foreign_server:
                    return self.foreign_server
                poll_s = START_POLL_FRAC * self.patience.health_every_s
                await asyncio.sleep(min(poll_s, LONGEST_START_POLL_S))
        return f"did not answer /health within {self.patience.start_s:g} s"

    async def _until_down(self) -> str:
        """Wait until the engine can no longer serve, and return the reason; an empty text if it is to serve
        in another role.
        """
        misses = 0
        assert self.process is not None
        exit_task = asyncio.ensure_future(self.process.wait())
        role_task = asyncio.ensure_future(self.role_requested.wait())
        try:
            async with self._client() as client:
                while True:
                    await asyncio.wait(
                        [exit_task, role_task],
                        timeout=self.patience.health_every_s,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    if role_task.done():
                        return ""
                    if exit_task.done():
                        return f"died ({_exit_text(exit_task.result())})"
                    misses = 0 if await self._is_healthy(client) else misses + 1
                    self._shorten_log()
                    if self.foreign_server:
                        return self.foreign_server
                    if misses >= self.patience.health_failures:
                        return f"did not answer /health {misses} times"
        finally:
            exit_task.cancel()
            role_task.cancel()

    @property
    def _exit_code(self) -> int | None:
        """The exit code of the engine's process; None while it runs, and before its start."""
        return None if self.process is None else self.process.returncode

    def _client(self) -> aiohttp.ClientSession:
        """An HTTP client for health checks."""
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.patience.health_timeout_s))

    async def _is_healthy(self, client: aiohttp.ClientSession) -> bool:
        """Whether the engine of this start answers /health; notes a foreign server on its port."""
        try:
            async with client.get(self.url + "/health", allow_redirects=False) as answer:
                if answer.headers.get(launch.IDENTITY_HEADER) != self.identity:
                    self.foreign_server = (
                        f"another server answers on its port ({self.url}), not the engine started there"
                    )
                return answer.status == 200 and not self.foreign_server
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _stop(self) -> None:
        """Ask the engine to end. When its first process has ended, or `stop_s` is over, kill what is left."""
        if self.process is not None and self._exit_code is None:
            self._signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), self.patience.stop_s)
        await self._kill()

    async def _kill(self) -> None:
        """Kill the whole session, because the core of an engine may outlive the server that started it."""
        self._signal(signal.SIGKILL)
        if self.process is not None:
            await self.process.wait()

    def _signal(self, number: int) -> None:
        """Send a signal to all processes of the engine's session."""
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def _log_end(self) -> str:
        """The last lines of the log as the end of a message; empty if there are none."""
        try:
            with self.log.open("rb") as stream:
                stream.seek(max(self.log.stat().st_size - LAST_BYTES, 0))
                text = stream.read().decode(errors="replace")
        except OSError:
            return ""
        lines = [line for line in text.splitlines() if line.strip()]
        return f"; {self.log} ends: {' | '.join(lines[-LAST_LINES:])}" if lines else ""


@dataclass
class LiveWorkers:
    """All workers of a fleet. An event is (seconds since the start, worker, what happened)."""

    workers: list[LiveWorker]
    start_s: float = field(default_factory=time.monotonic)
    events: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=EVENTS))

    def note(self, name: str, event: str) -> None:
        """Remember and log what happened to a worker."""
        self.events.append((round(time.monotonic() - self.start_s, 3), name, event))
        level = logging.INFO if event == FIRST_START else logging.WARNING
        LOG.log(level, "worker %s: %s", name, event)


@asynccontextmanager
async def run_engines(
    places: Sequence[WorkerPlace], commands: Commands, patience: Patience | None = None
) -> AsyncIterator[LiveWorkers]:
    """Start all engines, wait until each is up, and stop them when the block ends, also by an error.

    Raises InputError for an engine that cannot be started, with the last lines of its log.
    """
    group = LiveWorkers([])
    for place in places:
        place.folder.mkdir(parents=True, exist_ok=True)
        group.workers.append(LiveWorker(place, commands, patience or Patience(), group.note))
    tasks = [asyncio.ensure_future(worker.run()) for worker in group.workers]
    try:
        for worker in group.workers:
            await worker.start_settled.wait()
            if worker.gave_up:
                raise InputError(f"{worker.place.name}: {worker.gave_up}")
        yield group
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.shield(asyncio.gather(*tasks, return_exceptions=True))


def _exit_text(code: int) -> str:
    """An exit code of a process in words: 'signal 9' for -9, 'exit code 1' for 1."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def vllm_commands(
    fleet: Fleet, max_model_len: int, *, model: str, is_dummy: bool, is_cpu: bool, devices: Sequence[str]
) -> Commands:
    """Commands that start `vllm serve` on a loopback port, with the arguments that manifests have
    (planner/manifests/engine_command.py).

    `model` is a folder with a config.json if weights are dummies, else the name or folder by which vLLM finds
    them. `devices` are GPUs, or CPU cores. On a CPU an engine also gets eager mode, one core per rank, and
    the plan's number of KV blocks, which no GPU memory limits there. Raises InputError for workers that share
    a KV store, because no store is started here.
    """
    if kv_store.size_bytes(fleet):
        raise InputError(
            "policies.kv_offload: shared: the store is not started here; start it and the workers by the "
            "manifests for vllm or kubernetes, and name the workers by --workers"
        )

    def command(place: WorkerPlace, port: int) -> EngineCommand:
        """The command that starts vLLM at this place and port."""
        settings = engine_command.engine_flags(place.pool, fleet, max_model_len)
        environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1"}
        arguments: list[str] = [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--disable-uvicorn-access-log",
            "--middleware",
            "planner.runtime.launch.WithIdentity",
        ]
        if is_dummy:
            arguments += ["--load-format", "dummy", "--skip-tokenizer-init"]
            environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if "kv-transfer-config" in settings:
            environment |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                **engine_command.hand_off_environment(place.pool, fleet),
            }
        if is_cpu:
            settings, cpu_environment = _on_cpu(settings, place, fleet, devices)
            environment |= cpu_environment
            arguments.append("--enforce-eager")
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[number] for number in place.devices)
        argv = [
            sys.executable,
            "-m",
            "planner.runtime.launch",
            "serve",
            model,
            *engine_command.to_args(settings),
            *arguments,
        ]
        return EngineCommand(argv, environment)

    return command


def _on_cpu(
    settings: dict[str, engine_command.Setting], place: WorkerPlace, fleet: Fleet, cores: Sequence[str]
) -> tuple[dict[str, engine_command.Setting], dict[str, str]]:
    """The settings and further environment of an engine that runs on CPU cores in place of GPUs."""
    kv_tokens = place.pool.type.kv_tokens
    # The plan's number of KV blocks stands in for the limit that GPU memory would set.
    settings = {
        **settings,
        "block-size": CPU_BLOCK_TOKENS,
        "num-gpu-blocks-override": kv_tokens // CPU_BLOCK_TOKENS + 1,  # vLLM keeps one block for itself.
    }
    if isinstance(transfer := settings.get("kv-transfer-config"), Mapping):
        settings["kv-transfer-config"] = {**transfer, "kv_buffer_device": "cpu"}
    worker_cores = [cores[device % len(cores)] for device in place.devices]
    kv_gib = -(-int(KV_MARGIN * kv_tokens * fleet.llm.kv_bytes_per_token) // 2**30)  # Rounded up.
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(worker_cores),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(max(kv_gib, 1)),
    }
    if place.pool.type.gpus == 1:
        # A single rank runs in the engine core's own process: a worker process would poll shared memory all
        # the time. Then the step log also has the CPU time of steps.
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", launch.STEP_CPU: "1"}
    return settings, environment


def rehearsal_commands(*, prefix_cache: bool = False, by_priority: bool = False) -> Commands:
    """Commands for fake engines (fake_engine.py), whose steps take what each pool's fit predicts.

    With `by_priority` they queue as vLLM with `--scheduling-policy priority`.
    """

    def command(place: WorkerPlace, port: int) -> EngineCommand:
        """The command that starts the fake engine at this place and port."""
        worker_type = place.pool.type
        settings: dict[str, Any] = {
            "kv_tokens": worker_type.kv_tokens,
            "max_num_seqs": worker_type.max_num_seqs,
            "max_num_batched_tokens": worker_type.max_num_batched_tokens,
            "latency": asdict(worker_type.latency),
            "prefix_cache": prefix_cache and place.pool.role != "decode",
            "by_priority": by_priority,
        }
        argv = [
            sys.executable,
            "-m",
            "planner.runtime.fake_engine",
            "--port",
            str(port),
            json.dumps(settings),
        ]
        return EngineCommand(argv, {})

    return command


def model_folder(config: Path, folder: Path) -> str:
    """Copy `config`, a config.json or a folder with one, into a folder of its own; returns that folder.

    vLLM serves an LLM of dummy weights from it. Raises InputError if there is no config.json.
    """
    file = config / "config.json" if config.is_dir() else config
    if not file.is_file():
        raise InputError(f"{file}: no such file; expected a Hugging Face config.json")
    target = folder / "model"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target / "config.json")
    return str(target)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use: those in CUDA_VISIBLE_DEVICES, else the numbers of all GPUs."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [device.strip() for device in visible.split(",") if device.strip()]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(device) for device in range(count)]
