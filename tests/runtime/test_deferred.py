"""Routing that holds requests back until a worker is free: by hand, live as simulated, and in our router."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from routed_traces import ARRIVES, FINISHES, IS_ADMITTED, IS_COMPUTED, events_of, prompts_trace
from runtime_fakes import LATENCY, LLM, a_body, engines, fleet_of, is_idle, post, routed, until, worker_type

from planner.fleet import Disturbance, Fleet, Policies, Pool
from planner.models.latency import StepLatency
from planner.runtime.live_routing import LiveFleet
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

STEP = StepLatency((1.0, 2.0), (0.1, 0.1), 0.0, 0.0, 0.0, 0.0, 0.0, "by hand")
DEFERRED = Policies(routing="deferred")


def two(routing: str, workers: int = 2) -> Fleet:
    kind = replace(worker_type(STEP), max_num_batched_tokens=100)
    return Fleet(LLM, (Pool("w", "mixed", kind, workers),), Policies(routing=routing))


def at_once(*prompts: int) -> Trace:
    return Trace("made", np.zeros(len(prompts)), np.array(prompts), np.ones(len(prompts), np.int64))


def test_nobody_is_bound_to_a_worker_behind_a_long_prompt() -> None:
    """Steps of 100 tokens and 0.1 s; prompts of 500, 100, 100, 100 at once. By requests in flight the third
    goes behind the first, and waits 0.6 s. Held back: the first worker has 500 tokens, more than two steps,
    so the others go to the second, the last once that has one left to compute, at 0.1 s."""
    early = simulate(two("least-outstanding"), at_once(500, 100, 100, 100))
    assert early.prefill_worker.tolist() == [0, 1, 0, 1]
    assert early.ttft_s == pytest.approx([0.5, 0.1, 0.6, 0.2])
    late = simulate(two("deferred"), at_once(500, 100, 100, 100))
    assert late.prefill_worker.tolist() == [0, 1, 1, 1]
    assert late.ttft_s == pytest.approx([0.5, 0.1, 0.2, 0.3])


def test_who_came_first_goes_first_and_one_worker_serves_as_any_queue() -> None:
    """Ten prompts of half a step to four, on one worker: the times of a worker that queues them itself."""
    prompts = at_once(*range(50, 450, 40))
    late, early = (simulate(two(routing, 1), prompts) for routing in ("deferred", "jsq"))
    assert late.ttft_s == pytest.approx(early.ttft_s)
    assert (np.diff(late.ttft_s) >= 0).all()


def test_what_waits_at_the_router_outlives_the_workers() -> None:
    """Both go down at 0.05 s, and one comes back at 1 s: all five are served then, in their order."""
    events = (*tuple(Disturbance(0.05, "down", w) for w in (0, 1)), Disturbance(1.0, "up", 0))
    found = simulate(replace(two("deferred"), disturbances=events), at_once(100, 100, 100, 100, 100))
    assert not found.status.any()
    assert found.ttft_s == pytest.approx([1.1, 1.2, 1.3, 1.4, 1.5])


def test_who_waits_for_a_worker_that_is_down_keeps_no_others_waiting() -> None:
    """The first two fill the large worker, so the third, which fits there alone, waits at the router, and the
    fourth behind it. At 0.05 s the large worker goes down until 1 s: then the small one gets the fourth.
    """
    fleet = two("deferred")
    large = fleet.pools[0]
    small = replace(large, name="s", count=1, type=replace(large.type, kv_tokens=160))
    events = (Disturbance(0.05, "down", 0), Disturbance(1.0, "up", 0))
    fleet = replace(fleet, pools=(replace(large, count=1), small), disturbances=events)
    found = simulate(fleet, at_once(500, 150, 500, 100))
    assert found.prefill_worker.tolist() == [0, 1, 0, 1]
    assert found.ttft_s[3] < 0.5


@pytest.mark.long
@pytest.mark.parametrize("shape", ["mixed", "pairs", "pairs that end together"])
def test_a_live_fleet_holds_back_and_sends_as_the_simulator(shape: str) -> None:
    """400 prompts of up to a step on workers of two speeds, more than they take at once: told what happened
    in the simulation, and asked again after that, the live fleet sends every one of them where the simulation
    did, and hands it to the same decode worker. Prompts are computed whole, as a router sees nothing of their
    chunks; of pairs each in a step of its own (more than half of one), or several in one, which are handed
    over in their order in the step, as an engine gives their answers."""
    together = shape == "pairs that end together"
    fast = replace(worker_type(kv_tokens=160_000), max_num_batched_tokens=600 if together else 192)
    slow = replace(fast, latency=LATENCY.with_longer_steps(0.7))
    pools = (
        (Pool("a", "mixed", fast, 3), Pool("b", "mixed", slow, 2))
        if shape == "mixed"
        else (Pool("p", "prefill", fast, 2), Pool("q", "prefill", slow, 1), Pool("d", "decode", fast, 3))
    )
    policies = Policies(batching="vllm-v0", routing="deferred", decode_routing="deferred")
    fleet = Fleet(LLM, pools, policies)
    trace = prompts_trace(400, 9000.0 if together else 3000.0, least_blocks=6 if shape == "pairs" else 3)
    if shape == "pairs":
        assert 2 * trace.input_tokens.min() > fast.max_num_batched_tokens
    simulation = simulate(fleet, trace)
    assert not simulation.status.any() and not simulation.preemptions.any()
    if together:
        ends_s = np.round(simulation.arrival_s + simulation.ttft_s, 9)
        assert (np.unique(ends_s, return_counts=True)[1] > 1).sum() > 50
    front, back, most = sent(fleet, trace, simulation)
    assert most > 10
    assert front == simulation.prefill_worker.tolist()
    decodes = np.flatnonzero(trace.output_tokens > (0 if shape == "mixed" else 1))
    assert [back[i] for i in decodes] == simulation.decode_worker[decodes].tolist()
    assert len({back[i] for i in decodes}) == (5 if shape == "mixed" else 3)


def in_steps(simulation: Simulation) -> list[tuple[int, float, int]]:
    """What happens; what ends with one step at one time, and prompts there by arrival."""
    told = [(round(time_s, 9), kind, i) for kind, time_s, i in events_of(simulation, admissions=True)]
    return [(kind, time_s, i) for time_s, kind, i in sorted(told)]


def sent(
    fleet: Fleet, trace: Trace, simulation: Simulation
) -> tuple[list[int | None], list[int | None], int]:
    """Where a live fleet sends prompts and decodes, and how many waited at most."""
    live = LiveFleet(fleet, lengths=(float(trace.input_tokens.mean()), float(trace.output_tokens.mean())))
    for w in range(fleet.workers):
        live.note_up(w)
    seats: dict[int, int] = {}
    held, most = deque[int](), 0
    front: list[int | None] = [None] * len(trace)
    back = list(front)

    def send_held(time_s: float) -> None:
        while held and (w := live.send_to_worker(seats[held[0]], time_s)) is not None:
            front[held[0]] = back[held[0]] = w
            held.popleft()

    for time_s, group in itertools.groupby(in_steps(simulation), key=lambda each: each[1]):
        happens = list(group)
        for kind, _, i in happens:
            outputs = int(trace.output_tokens[i])
            if kind == ARRIVES:
                names = trace.prefix_ids[trace.prefix_offsets[i] : trace.prefix_offsets[i + 1]].tolist()
                seats[i] = live.take_seat(int(trace.input_tokens[i]), outputs, time_s, names=names)
                held.append(i)
            elif kind == IS_COMPUTED:
                live.note_computed(seats[i], time_s)
                if live.roles[front[i] or 0] == "prefill" and outputs > 1:
                    live.note_left(seats[i], time_s)
                    back[i] = live.hand_off(seats[i], time_s)
            if kind == FINISHES or (kind == IS_COMPUTED and outputs == 1):
                live.note_left(seats[i], time_s, outputs)
                live.release_seat(seats.pop(i))
        send_held(time_s)
        most = max(most, len(held))
        assert all(live.is_held_back(seats[i]) for i in held)
        for kind, _, i in happens:
            if kind == IS_ADMITTED:
                live.note_admitted(seats[i], time_s)
    return front, back, most


def test_the_router_keeps_requests_until_a_worker_is_free() -> None:
    """Twenty prompts of 500 tokens to two engines that take 512 in a step: more wait at the router than are
    sent, all are answered, and nothing is left; where no worker is up they are refused after a while."""

    async def run() -> None:
        slow = StepLatency((1.0, 512.0), (0.03, 0.03), 0.0, 0.0, 0.0, 0.0, 0.0, "by hand")
        async with engines(["mixed"] * 2, slow) as backends, routed(backends, DEFERRED) as (router, url):
            asked = [asyncio.ensure_future(post(url, a_body(500, 2))) for _ in range(20)]
            await until(lambda: router.in_flight == 20)
            assert len(router.held_back) >= 10
            assert router.live.workers["pending_tokens"].max() < 2 * 512 + 500
            assert [status for status, *_ in await asyncio.gather(*asked)] == [200] * 20
            assert is_idle(router) and not router.held_back
            backends[0].is_up = backends[1].is_up = False
            assert (await post(url, a_body()))[0] == 503
            assert not router.held_back

    asyncio.run(run())


def test_a_fleet_that_holds_nothing_back_has_no_line() -> None:
    live = LiveFleet(fleet_of(("w", "mixed", 1)))
    seat = live.take_seat(100, 1, 0.0)
    assert live.send_to_worker(seat, 0.0) is None  # it is not up
    assert not live.is_held_back(seat)
