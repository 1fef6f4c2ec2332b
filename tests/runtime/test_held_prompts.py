"""The queue dlpm-held, whose prompts wait at the router: by hand, against a plain simulator, live as
simulated, and in our router.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from held_reference import AsyncHeldReference, HeldReference
from prefix_cases import compare_prefix_fleet, random_case_without_caches, random_prefix_case
from prefix_reference import PrefixReference
from routed_traces import ARRIVES, FINISHES, IS_ADMITTED, IS_COMPUTED, events_of, prompts_trace
from runtime_fakes import LATENCY, LLM, a_body, engines, is_idle, post, routed, until, worker_type

from planner.fleet import Disturbance, Fleet, Policies, Pool
from planner.models.latency import StepLatency
from planner.runtime.live_routing import LiveFleet
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

STEP = StepLatency((1.0, 2.0), (0.1, 0.1), 0.0, 0.0, 0.0, 0.0, 0.0, "by hand")
HELD = Policies(queue="dlpm-held", quantum_tokens=100)


def of_two_tenants(*tenants: int) -> Trace:
    """Prompts of 100 tokens, all at once, without outputs to speak of."""
    n = len(tenants)
    return Trace(
        "made",
        np.zeros(n),
        np.full(n, 100),
        np.ones(n, np.int64),
        tenant=np.array(tenants),
        tenants=("a", "b"),
    )


def one_worker(policies: Policies = HELD) -> Fleet:
    """Whose steps take 100 tokens and 0.1 s."""
    kind = replace(worker_type(STEP), max_num_batched_tokens=100)
    return Fleet(LLM, (Pool("w", "mixed", kind, 1),), policies)


def test_the_engine_has_two_prompts_and_the_router_chooses_the_others() -> None:
    """Six of tenant a, then two of b. Two of a go to the engine at once. Then b has credit and a has none
    left, so b's are among the next three: a quantum pays for one prompt.
    """
    found = simulate(one_worker(), of_two_tenants(0, 0, 0, 0, 0, 0, 1, 1))
    order = np.argsort(found.ttft_s).tolist()
    assert order[:2] == [0, 1] and set(order[2:5]) == {2, 6, 7}
    assert found.ttft_s[order] == pytest.approx(0.1 * np.arange(1, 9))
    by_arrival = simulate(one_worker(Policies()), of_two_tenants(0, 0, 0, 0, 0, 0, 1, 1))
    assert by_arrival.ttft_s[6:].tolist() == pytest.approx([0.7, 0.8])


def test_what_waits_at_the_router_outlives_the_worker() -> None:
    """It is down from 0.05 to 1 s: all are served then, and every request ends."""
    events = (Disturbance(0.05, "down", 0), Disturbance(1.0, "up", 0))
    found = simulate(replace(one_worker(), disturbances=events), of_two_tenants(0, 0, 0, 1, 1))
    assert not found.status.any()
    assert np.sort(found.ttft_s) == pytest.approx([1.1, 1.2, 1.3, 1.4, 1.5])


def compare_with_plain_simulator(seed: int) -> None:
    """With prefix caches and without; engines step by step, or asynchronous."""
    for make in (random_prefix_case, random_case_without_caches):
        fleet, trace, reference = make(seed)
        held = HeldReference if reference is PrefixReference else AsyncHeldReference
        fleet = replace(fleet, policies=replace(fleet.policies, queue="dlpm-held"))
        plain, _ = compare_prefix_fleet(fleet, trace, held, f"seed {seed} of {make.__name__}")
        assert isinstance(plain, HeldReference)
        assert not any(plain.at_router) and not any(plain.under_way)


@pytest.mark.parametrize("seed", range(8))
def test_equals_the_plain_simulator(seed: int) -> None:
    compare_with_plain_simulator(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8, 60))
def test_more_cases_equal_the_plain_simulator(seed: int) -> None:
    compare_with_plain_simulator(seed)


@pytest.mark.parametrize("routing", ["least-outstanding", "d2lpm"])
def test_a_live_fleet_sends_as_the_simulator(routing: str) -> None:
    """900 prompts at once on five workers of two speeds: told what happens in the simulation, the live fleet
    sends each worker its prompts in the order in which the simulated engine admits them. Most wait at the
    router, and not in the order of arrival."""
    policies = replace(HELD, routing=routing, prefix_cache=True, worker_quantum_tokens=300)
    fast = replace(worker_type(kv_tokens=160_000), max_num_batched_tokens=800, max_num_seqs=4)
    slow = replace(fast, latency=LATENCY.with_longer_steps(0.7))
    fleet = Fleet(LLM, (Pool("a", "mixed", fast, 3), Pool("b", "mixed", slow, 2)), policies)
    trace = prompts_trace(900, 20_000.0, seed=3)
    simulation = simulate(fleet, trace)
    assert not simulation.status.any() and not simulation.preemptions.any()
    sent, most = sent_in_order(fleet, trace, simulation)
    assert most > 100
    start_s, out_of_order = simulation.arrival_s + simulation.queue_s, 0
    for w in range(fleet.workers):
        assert set(sent[w]) == set(np.flatnonzero(simulation.prefill_worker == w).tolist())
        assert (np.diff(start_s[sent[w]]) >= -1e-9).all()
        out_of_order += int((np.diff(sent[w]) < 0).sum())
    assert out_of_order > 20


def sent_in_order(fleet: Fleet, trace: Trace, simulation: Simulation) -> tuple[dict[int, list[int]], int]:
    """The requests that a live fleet sends to each worker, in its order, and how many waited at most."""
    live = LiveFleet(fleet, lengths=(float(trace.input_tokens.mean()), float(trace.output_tokens.mean())))
    for w in range(fleet.workers):
        live.note_up(w)
    seats: dict[int, int] = {}
    request_of: dict[int, int] = {}
    worker_of: dict[int, int] = {}
    sent: dict[int, list[int]] = defaultdict(list)
    most = 0
    told = [(round(time_s, 9), kind, i) for kind, time_s, i in events_of(simulation, admissions=True)]
    for time_s, group in itertools.groupby(sorted(told), key=lambda each: each[0]):
        happens = list(group)
        for _, kind, i in happens:
            outputs = int(trace.output_tokens[i])
            if kind == ARRIVES:
                names = trace.prefix_ids[trace.prefix_offsets[i] : trace.prefix_offsets[i + 1]].tolist()
                seats[i] = live.take_seat(
                    int(trace.input_tokens[i]),
                    outputs,
                    time_s,
                    names=names,
                    tenant=trace.tenants[trace.tenant[i]],
                )
                request_of[seats[i]] = i
                worker = live.send_to_worker(seats[i], time_s)
                assert worker is not None
                worker_of[i] = worker
            elif kind == IS_COMPUTED:
                live.note_computed(seats[i], time_s)
            if kind == FINISHES or (kind == IS_COMPUTED and outputs == 1):
                live.note_left(seats[i], time_s, outputs)
                live.release_seat(seats.pop(i))
        # The simulator's router sends after the step that begins at this moment, with what the step admitted.
        admitted = [i for _, kind, i in happens if kind == IS_ADMITTED]
        later = [i for i in admitted if live.is_held(seats[i])]
        for i in admitted:
            if i not in later:
                live.note_admitted(seats[i], time_s)
        for seat in live.send_held():
            sent[worker_of[request_of[seat]]].append(request_of[seat])
        most = max(most, sum(live.is_held(seat) for seat in seats.values()))
        for i in later:
            live.note_admitted(seats[i], time_s)
    return sent, most


def test_the_router_keeps_all_but_two_prompts_of_an_engine() -> None:
    """Twenty prompts of 500 tokens to an engine that takes 512 in a step: two or three are there, the others
    wait at the router; clients that go away leave nothing behind, and all others are answered."""

    async def run() -> None:
        slow = StepLatency((1.0, 512.0), (0.03, 0.03), 0.0, 0.0, 0.0, 0.0, 0.0, "by hand")
        async with engines(["mixed"], slow) as backends, routed(backends, HELD) as (router, url):
            asked = [asyncio.ensure_future(post(url, a_body(500, 2))) for _ in range(20)]
            await until(lambda: router.in_flight == 20)
            assert len(router.attempts[0]) <= 3 and len(router.held) >= 10
            for gone in asked[:4]:
                gone.cancel()
            assert [status for status, *_ in await asyncio.gather(*asked[4:])] == [200] * 16
            await until(lambda: router.in_flight == 0)
            assert is_idle(router) and not router.held
            assert router.live.state.caches.workers["sent_prompts"].tolist() == [0]

    asyncio.run(run())


def test_prompts_that_wait_for_a_worker_that_goes_down_get_another_one() -> None:
    async def run() -> None:
        slow = StepLatency((1.0, 512.0), (0.03, 0.03), 0.0, 0.0, 0.0, 0.0, 0.0, "by hand")
        async with engines(["mixed"] * 2, slow) as backends, routed(backends, HELD) as (router, url):
            asked = [asyncio.ensure_future(post(url, a_body(500, 2))) for _ in range(20)]
            await until(lambda: len(router.held) >= 10)
            backends[0].is_up = False
            assert [status for status, *_ in await asyncio.gather(*asked)] == [200] * 20
            assert is_idle(router) and not router.held

    asyncio.run(run())
