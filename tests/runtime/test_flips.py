"""TetriInfer's flip live: the simulator's decision, and an engine that restarts in the other role."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from routed_traces import ARRIVES, FINISHES, IS_COMPUTED, events_of
from runtime_fakes import LLM, a_body, engines, fleet_of, is_idle, post, routed, until, worker_type

from planner.errors import InputError
from planner.fleet import Fleet, Network, Policies, Pool, Role
from planner.runtime.live_routing import LiveFleet
from planner.runtime.remote_workers import Remote
from planner.runtime.router import LiveRouter
from planner.runtime.workers import Patience, place_workers, rehearsal_commands, run_engines
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

REPURPOSE = {"pools": "repurpose", "repurpose_after_s": 0.02}
INSTANT = Network(1e30, transfer="serialised", is_shared=False)


def waves(seed: int) -> Trace:
    """Prompts that come in bursts, long outputs in others: now prefill, now decode workers are short."""
    rng = np.random.default_rng(seed)
    starts = np.repeat(np.arange(12) * 2.0, 40)
    is_prompts = np.arange(len(starts)) // 40 % 2 == 0
    inputs = np.where(is_prompts, rng.integers(300, 500, len(starts)), rng.integers(16, 40, len(starts)))
    outputs = np.where(is_prompts, rng.integers(2, 5, len(starts)), rng.integers(100, 200, len(starts)))
    arrival_s = np.sort(starts + rng.uniform(0.0, 0.2, len(starts)))
    return Trace("waves", arrival_s, inputs, outputs)


def turned_as_told(fleet: Fleet, trace: Trace, found: Simulation, restart_s: float) -> tuple[list[int], int]:
    """Tells a live fleet of five workers what happens in the simulation: it must send every request where
    that did, none to a worker that drains. The workers that change roles, which are up again `restart_s`
    later (with nothing left, if that takes time), and after how many events some worker drained."""
    live = LiveFleet(fleet)
    for w in range(5):
        live.note_up(w)
    seats: dict[int, int] = {}
    coming: dict[int, float] = {}
    turned, drained = list[int](), 0
    for kind_of, time_s, i in events_of(found, admissions=False):
        for w in [w for w, at_s in coming.items() if at_s <= time_s]:
            live.note_up(w, coming.pop(w))
        outputs = int(trace.output_tokens[i])
        if kind_of == ARRIVES:
            seats[i] = live.take_seat(int(trace.input_tokens[i]), outputs, time_s)
            assert live.send_to_worker(seats[i], time_s) == found.prefill_worker[i]
        elif kind_of == IS_COMPUTED:
            live.note_computed(seats[i], time_s)
            live.note_left(seats[i], time_s)
            v = live.hand_off(seats[i], time_s)
            assert v == found.decode_worker[i] and v is not None and not live.is_draining[v]
        if kind_of == FINISHES:
            live.note_left(seats[i], time_s, outputs)
            live.release_seat(seats.pop(i))
        drained += int(live.is_draining.any())
        while live.role_changed:
            turned.append(w := live.role_changed.pop())
            assert not live.is_draining[w] and not (restart_s and live.workers["assigned"][w])
            if restart_s:
                coming[w] = time_s + restart_s
    return turned, drained


@pytest.mark.parametrize("restart_s", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_a_live_fleet_flips_as_the_simulator(seed: int, restart_s: float) -> None:
    """Two prefill and three decode workers, idle for 0.4 s: told what happens in the simulation, the live
    fleet sends every request where that did. It is told when a worker is up again, the simulator knows."""
    kind = replace(worker_type(kv_tokens=160_000), max_num_batched_tokens=8192)
    pools = (Pool("p", "prefill", kind, 2), Pool("d", "decode", kind, 3))
    policies = Policies(batching="vllm-v0", pools="flip", flip_after_s=0.4, flip_restart_s=restart_s)
    fleet, trace = Fleet(LLM, pools, policies, INSTANT), waves(seed)
    found = simulate(fleet, trace)
    assert not found.status.any() and not found.preemptions.any()
    assert {w for w in found.prefill_worker.tolist() if w >= 2} or {w for w in found.decode_worker if w < 2}
    turned, _ = turned_as_told(fleet, trace, found, restart_s)
    assert len(turned) >= 2


@pytest.mark.parametrize("restart_s", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_a_live_fleet_repurposes_as_the_simulator(seed: int, restart_s: float) -> None:
    """Two prefill and three decode workers of eight seats. Long prompts leave 8,192 tokens on every prefill
    worker, then decodes fill all seats: whichever is short for 0.3 s gets the least busy worker of the other
    role, which drains first. Told what happens in the simulation, the live fleet sends every request where
    that did, and nothing is sent to a worker that drains."""
    kind = replace(worker_type(kv_tokens=400_000), max_num_batched_tokens=8192, max_num_seqs=8)
    pools = (Pool("p", "prefill", kind, 2), Pool("d", "decode", kind, 3))
    policies = Policies(
        batching="vllm-v0", pools="repurpose", repurpose_after_s=0.3, flip_restart_s=restart_s
    )
    fleet, trace = Fleet(LLM, pools, policies, INSTANT), shifts(seed)
    found = simulate(fleet, trace)
    assert not found.status.any() and not found.preemptions.any()
    turned, drained = turned_as_told(fleet, trace, found, restart_s)
    assert len(turned) >= 2 and drained > 0
    assert set(found.prefill_worker.tolist()) & {2, 3, 4}  # a decode worker has become one


def shifts(seed: int) -> Trace:
    """Four seconds of long prompts with shorter answers, then four of short prompts with longer ones."""
    rng = np.random.default_rng(seed)
    arrival_s = np.sort(rng.uniform(0.0, 8.0, 320))
    is_early = arrival_s < 4.0
    inputs = np.where(is_early, rng.integers(5000, 8000, 320), rng.integers(16, 40, 320))
    outputs = np.where(is_early, rng.integers(60, 120, 320), rng.integers(200, 300, 320))
    return Trace("shifts", arrival_s, inputs, outputs)


def test_without_a_time_nobody_is_repurposed() -> None:
    fleet = fleet_of(("p", "prefill", 1), ("d", "decode", 2), policies=Policies(pools="repurpose"))
    with pytest.raises(InputError, match="pools 'repurpose' needs it, such as 2 min"):
        simulate(fleet, shifts(0))


def test_while_a_worker_restarts_it_is_sent_nothing_and_no_other_flips() -> None:
    """Three decode workers idle for ever, prompts that never end: one turns at the second prompt, and the
    third goes to the only prefill worker; once it is up it takes the next, and then another one turns."""
    policies = Policies(pools="flip", flip_after_s=1.0, flip_restart_s=5.0)
    live = LiveFleet(fleet_of(("p", "prefill", 1), ("d", "decode", 3), policies=policies))
    for w in range(4):
        live.note_up(w, 0.0)
    sent = [live.send_to_worker(live.take_seat(100, 5, t), t) for t in (10.0, 11.0, 12.0)]
    assert (
        sent == [0, 0, 0]
        and live.role_changed == [1]
        and live.roles == ["prefill", "prefill", "decode", "decode"]
    )
    live.note_up(1, 16.0)
    assert live.send_to_worker(live.take_seat(100, 5, 17.0), 17.0) == 1
    assert live.send_to_worker(live.take_seat(100, 5, 18.0), 18.0) in (0, 1)
    assert live.role_changed == [1, 2]


@pytest.mark.parametrize(
    "how", [{"pools": "flip", "flip_after_s": 0.1}, REPURPOSE], ids=["flip", "repurpose"]
)
def test_the_router_has_a_worker_restart_in_the_other_role(how: dict[str, Any]) -> None:
    """One prefill engine at work, two idle decode engines: the second prompt (or 8,192 tokens of them for 20
    ms) turns one of them, which is up again in 0.2 s, and may turn back once there is more to decode. All
    requests are answered, and nothing is left."""

    async def run() -> None:
        policies = Policies(**how, flip_restart_s=0.2)
        roles: list[Role] = ["prefill", "decode", "decode"]
        async with engines(roles) as backends, routed(backends, policies) as (router, url):
            await until(lambda: bool(router.live.is_up.all()))
            await asyncio.sleep(0.15)  # longer than they must be idle
            asked = [asyncio.ensure_future(post(url, a_body(500, 60))) for _ in range(40)]
            assert [status for status, *_ in await asyncio.gather(*asked)] == [200] * 40
            assert sum(backend.turns for backend in backends) >= 1
            await until(lambda: all(backend.is_up for backend in backends))
            assert (await post(url, a_body()))[0] == 200
            assert router.live.roles == [backend.role for backend in backends]
            assert {"prefill", "decode"} == set(router.live.roles)
            assert is_idle(router)

    asyncio.run(run())


def test_engines_that_run_elsewhere_do_not_flip() -> None:
    fleet = fleet_of(("p", "prefill", 1), ("d", "decode", 2), policies=Policies(pools="flip"))
    with pytest.raises(InputError, match="started elsewhere keep their role"):
        LiveRouter([Remote(f"w-{n}", f"http://127.0.0.1:{n}") for n in range(3)], fleet)


def test_an_engine_of_ours_ends_and_starts_again_in_the_other_role(tmp_path: Path) -> None:
    """A process: after `change_role` it has another start, another identity, and the role it was told."""

    async def run() -> None:
        fleet = fleet_of(("p", "prefill", 1), ("d", "decode", 1))
        spots = place_workers(fleet, tmp_path, None)
        async with run_engines(
            spots, rehearsal_commands(), Patience(start_s=60, health_every_s=0.2)
        ) as group:
            worker = group.workers[1]
            before = worker.identity
            worker.change_role("prefill")
            await until(lambda: worker.is_up and worker.identity != before)
            assert worker.is_up and worker.starts == 2 and worker.place.pool.role == "prefill"
            told = [what for _, name, what in group.events if name == worker.name]
            assert told == ["up after start 1", "restarts as a prefill worker", "up after start 2"]

    asyncio.run(run())
