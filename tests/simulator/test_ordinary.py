"""Which fleets need the ordinary part of the kernel alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulations import LLM, make_latency, make_pool, make_trace

from planner.fleet import Disturbance, Fleet, Policies, Role
from planner.simulator import kernel, layout
from planner.simulator.ordinary import is_ordinary, narrowed
from planner.simulator.replay import elastic_state, fresh_state

TRACE = make_trace(np.arange(40) * 0.7, [20, 33, 7, 48] * 10, [5, 9, 2, 14] * 10)


def fleet_of(policies: Policies | None = None) -> Fleet:
    roles: tuple[Role, ...] = ("prefill", "decode")
    pools = tuple(make_pool(make_latency(), role=role, count=2, name=role) for role in roles)
    return Fleet(LLM, pools, policies=policies or Policies())


def test_an_ordinary_fleet_does_the_same_in_both_kernels() -> None:
    whole = fresh_state(fleet_of(), TRACE)
    ordinary = narrowed(fresh_state(fleet_of(), TRACE))
    assert ordinary.rare is None and whole.rare is not None
    for state in (whole, ordinary):
        kernel.simulate_events(state, 0, False)
    assert whole.counters[layout.DONE] == len(TRACE)
    for name, array in whole._asdict().items():
        if isinstance(array, np.ndarray) and name != "rare":
            assert array.tobytes() == getattr(ordinary, name).tobytes(), name


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
