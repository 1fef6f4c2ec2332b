"""Queues and routings that count tenants, on traces without block ids: by hand, against the plain simulator
of tests/support/prefix_reference.py, and against first come, first served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prefix_cases import compare_prefix_case, random_case_without_caches, without_block_ids
from simulations import LLM, make_latency, make_pool, make_trace, prefix_trace

from planner.errors import InputError
from planner.fleet import Fleet, Policies
from planner.simulator import simulate
from planner.simulator.tenant_service import tenant_service
from planner.traffic.trace import Trace

A_TIE = 140  # The seed of a case in which a hand-off ends with a step: rounding says which comes first.


def fleet_of_one_seat(**policies: Any) -> Fleet:
    """A worker that computes one prompt of 64 tokens after the other, each in 1/16 s."""
    pool = make_pool(make_latency((1 / 1024, 1.0)), count=1, kv_tokens=16_000, seats=1, budget=64)
    return Fleet(LLM, (pool,), Policies(**policies))


def two_tenants() -> Trace:
    """Eight requests of a, then four of b, all at once: 64 tokens in and one out, a service of 64 + 2."""
    trace = make_trace([0.0] * 12, [64] * 12, [1] * 12)
    return replace(trace, tenant=np.array([0] * 8 + [1] * 4), tenants=("a", "b"))


def served_in_turn(**policies: Any) -> str:
    trace = two_tenants()
    found = simulate(fleet_of_one_seat(**policies), trace)
    return "".join(trace.tenants[u] for u in trace.tenant[np.argsort(found.queue_s, kind="stable")])


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({"queue": "fcfs"}, "aaaaaaaabbbb"),
        # Served by 66 each: 0-0 a, 66-0 b, 66-66 a, ... Of equals the first to arrive is next.
        ({"queue": "vtc"}, "ababababaaaa"),
        # b's 66 count 33: 0-0 a, 66-0 b, 66-33 b, 66-66 a, ...
        ({"queue": "vtc", "tenant_weights": (("b", 2.0),)}, "abbabbaaaaaa"),
        # a's count 22: 0-0 a, 22-0 b, 22-66 a, 44-66 a, 66-66 a, 88-66 b, ...
        ({"queue": "vtc", "tenant_weights": (("a", 3.0),)}, "abaaabaaabab"),
        # Nobody has credit: each gets a quantum of 66, which is one request. Both spent, each gets another.
        ({"queue": "dlpm", "quantum_tokens": 66}, "ababababaaaa"),
        ({"queue": "dlpm", "quantum_tokens": 66, "tenant_weights": (("b", 2.0),)}, "abbabbaaaaaa"),
        # Turns by prompts when they are sent, a quantum of 64: a 0 to 7, b 0 to 3.
        ({"queue": "dlpm-turns", "quantum_tokens": 64}, "ababababaaaa"),
        # b's quantum is 128: turns 0 0 1 1.
        ({"queue": "dlpm-turns", "quantum_tokens": 64, "tenant_weights": (("b", 2.0),)}, "abbabbaaaaaa"),
    ],
)
def test_two_tenants_by_hand(policies: dict[str, Any], said: str) -> None:
    assert served_in_turn(**policies) == said


def test_two_workers_take_turns_for_each_tenant() -> None:
    """a a b b on two workers: round-robin 0 1 0 1, for each tenant by itself too; a b b a is 0 0 1 1."""
    trace = make_trace([0.0, 1.0, 2.0, 3.0], [64] * 4, [1] * 4)
    pool = make_pool(make_latency((1 / 1024, 1.0)), count=2)
    for tenant, workers in (([0, 0, 1, 1], [0, 1, 0, 1]), ([0, 1, 1, 0], [0, 0, 1, 1])):
        named = replace(trace, tenant=np.array(tenant), tenants=("a", "b"))
        found = simulate(Fleet(LLM, (pool,), Policies(routing="tenant-round-robin")), named)
        assert found.prefill_worker.tolist() == workers


@pytest.mark.long
@pytest.mark.parametrize("seed", [seed for seed in range(160) if seed != A_TIE])
def test_equals_the_plain_simulator(seed: int) -> None:
    compare_prefix_case(seed, has_caches=False)


@pytest.mark.parametrize("queue", ["vtc", "dlpm", "dlpm-turns"])
def test_one_tenant_alone_is_served_first_come_first_served(queue: str) -> None:
    """With caches and without engines, and with them. With dlpm-turns not where requests are preempted or
    handed over, as engines go by their numbers then.
    """
    compared = 0
    for seed in range(300, 380):
        fleet, trace, _ = random_case_without_caches(seed)
        alone = replace(trace, tenant=0 * trace.tenant, tenants=("t1",))
        plain, counted = (
            simulate(replace(fleet, policies=replace(fleet.policies, queue=name)), alone)
            for name in ("fcfs", queue)
        )
        hands_over = any(pool.role == "decode" for pool in fleet.pools)
        if queue == "dlpm-turns" and (hands_over or plain.preemptions.any()):
            continue
        np.testing.assert_allclose(counted.e2e_s, plain.e2e_s, rtol=1e-9, atol=1e-9, err_msg=f"seed {seed}")
        compared += 1
    assert compared > 10


def test_block_ids_change_nothing_without_caches() -> None:
    trace = prefix_trace([0.0] * 6, [[1, 1, 1, 1]] * 6, tenant=[0, 0, 0, 0, 1, 1])
    with_ids, without = (
        simulate(fleet_of_one_seat(queue="vtc"), each) for each in (trace, without_block_ids(trace))
    )
    np.testing.assert_array_equal(with_ids.queue_s, without.queue_s)
    assert with_ids.cached_tokens is None
    assert tenant_service(with_ids).tokens_per_s.tolist() == tenant_service(without).tokens_per_s.tolist()


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({"queue": "lpm"}, "queue is 'lpm', which needs prefix_cache: true"),
        ({"queue": "vtc", "routing": "d2lpm"}, "routing is 'd2lpm', which needs prefix_cache: true"),
        ({"queue": "vtc", "pools": "flip"}, "pools is 'flip', must be static with queue vtc"),
        ({"queue": "dlpm", "admission": "reserve-static"}, "must be greedy with queue dlpm"),
        ({"queue": "vtc", "batching": "orca"}, "must be vllm-v1 or sarathi with queue vtc"),
        ({"queue": "vtc", "queue_window_s": 1.0}, "'vtc', which knows no longest_wait"),
        ({"queue": "vtc", "tenant_weights": (("a", 0.0),)}, "tenant_weights: a weighs 0.0, must be > 0"),
        ({"decode_routing": "tenant-round-robin"}, "must not look at tenants"),
    ],
)
def test_what_does_not_go_together_is_one_line(policies: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        simulate(fleet_of_one_seat(**policies), two_tenants())
