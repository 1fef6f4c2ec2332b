"""Which fleets need the ordinary part of the kernel alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numba import typeof
from simulations import LLM, make_latency, make_pool, make_trace, prefix_trace

from planner.fleet import Disturbance, Fleet, Policies, Role
from planner.models.kv_offload import KvOffload
from planner.models.lora import Lora, LoraCost, LoraSlots
from planner.simulator import kernel, layout
from planner.simulator.initial_state import elastic_state, fresh_state
from planner.simulator.kernel_variants import for_kernel, for_whole_kernel, is_ordinary

TRACE = make_trace(np.arange(40) * 0.7, [20, 33, 7, 48] * 10, [5, 9, 2, 14] * 10)


def fleet_of(policies: Policies | None = None) -> Fleet:
    roles: tuple[Role, ...] = ("prefill", "decode")
    pools = tuple(make_pool(make_latency(), role=role, count=2, name=role) for role in roles)
    return Fleet(LLM, pools, policies=policies or Policies())


def test_an_ordinary_fleet_does_the_same_in_both_kernels() -> None:
    whole = for_whole_kernel(fresh_state(fleet_of(), TRACE))
    ordinary = for_kernel(fresh_state(fleet_of(), TRACE))
    assert ordinary.has is None and not whole.has.any()
    for state in (whole, ordinary):
        kernel.simulate_events(state, 0, False)
    assert whole.counters[layout.DONE] == len(TRACE)
    for name, array in whole._asdict().items():
        if isinstance(array, np.ndarray) and name not in ("has", *layout.OPTIONAL):
            assert array.tobytes() == getattr(ordinary, name).tobytes(), name


def test_whoever_is_not_ordinary_has_the_same_kernel() -> None:
    """Compiled once, whatever a fleet has of what is optional."""
    prompts = prefix_trace([0.0, 1.0], [[1, 2], [1, 3]])
    cached = Fleet(LLM, (make_pool(make_latency()),), Policies(prefix_cache=True, routing="round-robin"))
    memory = replace(cached.policies, kv_offload=KvOffload(1e9, 1e9, is_shared=False))
    slots = LoraSlots(Lora(1, 8, 2, 2), LoraCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    joint = replace(make_latency(), joint_s=(0.0, 0.0))
    predicted = Policies(routing="best-fit", prediction_buckets=2)
    each = {
        "none": fresh_state(fleet_of(Policies(routing="random")), TRACE),
        "caches": fresh_state(cached, prompts),
        "offload": fresh_state(replace(cached, policies=memory), prompts),
        "dp_ranks": fresh_state(
            fleet_of().with_types(lambda each: replace(each, dp=2, latency=joint)), TRACE
        ),
        "adapters": fresh_state(fleet_of().with_types(lambda each: replace(each, lora=slots)), TRACE),
        "outputs": fresh_state(fleet_of(predicted), TRACE),
    }
    assert all(name == "none" or getattr(state, name) is not None for name, state in each.items())
    compiled_for: Any = typeof
    assert len({str(compiled_for(for_kernel(state))) for state in each.values()}) == 1


@pytest.mark.parametrize(
    "policies",
    [
        Policies(batching="sarathi"),
        Policies(batching="orca"),
        Policies(routing="best-fit"),
        Policies(routing="random"),
        Policies(admission="reserve-dynamic"),
        Policies(pools="flip"),
        Policies(long_prefill_token_threshold=8),
    ],
)
def test_what_few_ask_for_is_not_ordinary(policies: Policies) -> None:
    assert is_ordinary(fresh_state(fleet_of(), TRACE))
    assert not is_ordinary(fresh_state(fleet_of(policies), TRACE))


def test_a_worker_that_goes_down_or_comes_later_is_not_ordinary() -> None:
    down = replace(fleet_of(), disturbances=(Disturbance(1.0, "down", 0),))
    assert not is_ordinary(fresh_state(down, TRACE))
    assert not is_ordinary(elastic_state(fleet_of(), TRACE, (1, 2)))
    assert is_ordinary(elastic_state(fleet_of(), TRACE, (2, 2)))
