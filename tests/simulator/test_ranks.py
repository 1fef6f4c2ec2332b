"""Data-parallel ranks: the compiled kernel against plain simulators, and arithmetic by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from prefix_cases import compare_prefix_fleet, random_ranked_prefix_case
from ranks_reference import AsyncRanks, Ranks, SyncRanks, random_ranked_case
from shares import some
from simulations import LLM, beside, compare, make_latency, make_pool, make_trace, mixed

from planner.errors import InputError
from planner.fleet import Disturbance, Fleet, Policies
from planner.models.engine import Engine, HostTime
from planner.models.latency import StepLatency
from planner.models.lora import Lora, LoraCost, LoraSlots
from planner.simulator.replay import simulate

# a second, and a 16th of a second per token of all ranks
STEP = replace(make_latency((1.0, 65.0), knots=(0, 1024)), joint_s=(0.0, 64.0))


def with_ranks(fleet: Fleet, dp: int) -> Fleet:
    return fleet.with_types(lambda worker: replace(worker, dp=dp))


def with_engine(fleet: Fleet, seed: int, *, async_scheduling: bool) -> Fleet:
    rng = np.random.default_rng([seed, 77])
    host, rest = (HostTime(rng.uniform(0, 0.2), rng.uniform(0, 0.01), 0.1) for _ in range(2))
    ceiling = float(rng.choice([math.inf, 20.0]))
    front_end_s = float(rng.uniform(0.001, 0.3))
    engine = Engine("vllm", "0", async_scheduling, host, rest, front_end_s, tokens_per_s=ceiling)
    return fleet.with_types(lambda worker: replace(worker, engine=engine))


@pytest.mark.parametrize("seed", some(range(100), 34))
def test_kernel_equals_the_plain_simulator(seed: int) -> None:
    """Every request's times, worker, preemptions; every gap; violations; busy time, steps and tokens."""
    compare(*random_ranked_case(seed, dyadic=False), reference=Ranks)


@pytest.mark.parametrize("queue", ["sjf", "ljf", "srpt"])
def test_ranks_preempt_by_priority_each_among_its_own(queue: str) -> None:
    """Twelve random fleets each."""
    preemptions = 0
    for seed in range(12):
        fleet, trace, limits, closed_loop = random_ranked_case(seed, dyadic=False)
        fleet = replace(fleet, policies=replace(fleet.policies, queue=queue))
        found, _ = compare(fleet, trace, limits, closed_loop, reference=Ranks)
        preemptions += int(found.preemptions.sum())
    assert preemptions > 10


@pytest.mark.parametrize("seed", some(range(80), 27))
def test_kernel_equals_the_plain_simulator_where_events_coincide(seed: int) -> None:
    compare(*random_ranked_case(seed, dyadic=True), reference=Ranks)


@pytest.mark.parametrize("seed", some(range(60), 20))
def test_synchronous_engines_agree_with_the_plain_simulator(seed: int) -> None:
    fleet, trace, limits, closed_loop = random_ranked_case(seed, dyadic=False)
    compare(with_engine(fleet, seed, async_scheduling=False), trace, limits, closed_loop, SyncRanks)


@pytest.mark.parametrize("seed", some(range(100), 34))
def test_asynchronous_engines_agree_with_the_plain_simulator(seed: int) -> None:
    """But for what tests/simulator/test_engine.py leaves out of workers of one rank too."""
    fleet, trace, limits, closed_loop = random_ranked_case(seed, dyadic=False)
    roomy = tuple(
        replace(pool, type=replace(pool.type, kv_tokens=16_000)) if pool.role == "decode" else pool
        for pool in fleet.pools
    )
    routing = fleet.policies.routing
    if routing == "jsq" and any(pool.type.kv_tokens < 16_000 for pool in roomy):
        routing = "least-outstanding"
    fleet = replace(fleet, pools=roomy, policies=replace(fleet.policies, routing=routing))
    fleet = with_engine(fleet, seed, async_scheduling=True)
    compare(fleet, trace, limits, closed_loop, AsyncRanks)
    if seed % 3 == 0 and routing != "jsq":
        compare(beside(fleet, seed), trace, limits, closed_loop, AsyncRanks)


@pytest.mark.parametrize("seed", [10, 187, 194, *some(range(60), 20)])
def test_ranks_with_prefix_caches_agree_with_the_plain_simulator(seed: int) -> None:
    """Each rank caches what it computed. Of 10, 187 and 194 a router hears of evictions late while a rank
    takes part in steps with an empty batch.
    """
    compare_prefix_fleet(*random_ranked_prefix_case(seed), f"seed {seed}")


def test_ranks_wait_for_the_slowest_and_share_the_experts() -> None:
    """Two prompts at once, of 16 and 32 tokens, on two ranks: 1 s and 48 / 16 s for the tokens of both. Then
    two decodes: 1 s and 2 / 16 s. When the first has gone, the empty rank counts as one token.
    """
    found = simulate(with_ranks(mixed(STEP), 2), make_trace([0, 0], [16, 32], [2, 3]))
    assert found.ttft_s.tolist() == [4.0, 4.0]
    assert found.e2e_s.tolist() == [4.0 + 1.125, 4.0 + 1.125 + 1.125]


def test_each_rank_has_seats_and_a_cache_of_its_own() -> None:
    """One seat a rank: of three requests the third waits until the first two are done, as both are at once.
    A request that no rank holds is turned away, though two would.
    """
    fleet = with_ranks(mixed(STEP, seats=1, kv_tokens=64), 2)
    found = simulate(fleet, make_trace([0, 0, 0], [16, 16, 16], [1, 1, 1]))
    assert found.queue_s.tolist() == [0.0, 0.0, 3.0]  # 1 + 32 / 16
    assert simulate(fleet, make_trace([0], [60], [5])).status.tolist() == [1]


def test_a_request_that_comes_to_an_empty_rank_is_in_the_next_step() -> None:
    """An asynchronous engine has prepared the next step of the rank that is busy, and none of the other."""
    fleet = mixed(replace(STEP, f_s=(1.0, 1.0), joint_s=(0.0, 0.0)))
    engine = Engine("vllm", "0.19.0", async_scheduling=True)
    busy = fleet.with_types(lambda worker: replace(worker, engine=engine))
    trace = make_trace([0, 2.5], [4, 4], [20, 2])
    assert simulate(busy, trace).ttft_s.tolist() == [1.0, 2.5]
    assert simulate(with_ranks(busy, 2), trace).ttft_s.tolist() == [1.0, 1.5]


def test_the_rank_with_the_fewest_requests_takes_the_next_and_equals_take_turns() -> None:
    """Six at once on three ranks of two seats: all are in the first step."""
    fleet = with_ranks(mixed(STEP, seats=2), 3)
    found = simulate(fleet, make_trace([0] * 6, [1] * 6, [1] * 6))
    assert found.queue_s.tolist() == [0.0] * 6
    assert (found.prefill_worker == 0).all()
    assert found.worker_names == ("w-0",)
    assert found.worker_tokens.tolist() == [6.0]


@pytest.mark.parametrize("routing", ["power-of-two-requests", "pending-tokens"])
def test_routers_that_draw_see_the_sum_of_a_workers_ranks(routing: str) -> None:
    """Two workers of two ranks: of four requests each takes two, one on each rank."""
    fleet = with_ranks(Fleet(LLM, (make_pool(STEP, count=2),), Policies(routing=routing)), 2)
    sent = simulate(fleet, make_trace(np.arange(4) * 1e-3, [16] * 4, [50] * 4)).prefill_worker
    assert sorted(sent.tolist()) == [0, 0, 1, 1]


def test_a_worker_goes_down_with_all_of_its_ranks() -> None:
    """At 1.5 s, in the second step; the other worker computes all anew: 4 prompts of 1 + 1 tokens."""
    fleet = with_ranks(Fleet(LLM, (make_pool(STEP, count=2),)), 2)
    trace = make_trace([0] * 4, [1] * 4, [9] * 4)
    alive = simulate(fleet, trace)
    assert alive.preemptions.sum() == 0
    assert sorted(alive.prefill_worker.tolist()) == [0, 0, 1, 1]
    found = simulate(replace(fleet, disturbances=(Disturbance(1.5, "down", 0),)), trace)
    assert (found.decode_worker == 1).all()
    assert found.preemptions.sum() == 2
    assert (found.status == 0).all()
    back = (Disturbance(1.5, "down", 1), Disturbance(2.0, "up", 1), Disturbance(3.0, "slow", 1, 2.0))
    assert (simulate(replace(fleet, disturbances=back), trace).status == 0).all()


def test_a_worker_without_ranks_beside_some_with_is_as_alone() -> None:
    """The second pool has no room for any of these requests."""
    trace = make_trace([0, 0.5, 0.5, 7], [9, 30, 13, 18], [20, 12, 9, 30])
    alone = simulate(mixed(STEP), trace)
    ranks = with_ranks(Fleet(LLM, (make_pool(STEP, kv_tokens=16, name="v"),)), 2)
    found = simulate(Fleet(LLM, (*ranks.pools, make_pool(STEP))), trace)
    assert found.e2e_s.tolist() == alone.e2e_s.tolist()
    assert found.worker_busy_s.tolist() == [0.0, *alone.worker_busy_s.tolist()]


def refused(fleet: Fleet, words: str) -> None:
    with pytest.raises(InputError, match=words):
        simulate(fleet, make_trace([0], [4], [1]))


def test_what_is_not_simulated_of_ranks_is_refused() -> None:
    fleet = with_ranks(mixed(STEP), 2)
    refused(replace(fleet, policies=Policies(batching="sarathi")), "dp 2: needs batching vllm-v1")
    refused(replace(fleet, policies=Policies(routing="power-of-two")), "looks into workers")
    refused(replace(fleet, policies=Policies(admission="reserve-static")), "needs admission greedy")
    slots = LoraSlots(Lora(1, 8, 1, 1), LoraCost(*[0.0] * 8))
    served = fleet.with_types(lambda worker: replace(worker, lora=slots))
    refused(served, "lora: is not simulated with data-parallel ranks, must be dp 1, found 2")
    with pytest.raises(InputError, match="not simulated in pipelines"):
        fleet.with_types(lambda worker: replace(worker, pp=2))
    with pytest.raises(InputError, match="which part is of all ranks' tokens"):
        fleet.with_types(lambda worker: replace(worker, latency=make_latency()))


@pytest.mark.parametrize(
    ("joint_s", "words"),
    [((0.5,), "one per knot"), ((0.5, 0.25), "never fall"), ((1.0, 1.0), "less joint_s")],
)
def test_a_part_of_all_ranks_that_is_more_than_the_step_is_refused(
    joint_s: tuple[float, ...], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        StepLatency((1.0, 2.0), (1.0, 2.0), 0, 0, 0, 0, 0, "by hand", joint_s=joint_s)
