"""Which of its two forms the kernel is compiled in for a fleet.

Most of what the kernel can do few questions ask for: other engines' batching, step times and routing,
workers that go down, change their role or draft, and what is OPTIONAL in the state. Compiling that takes
several times as long as all the rest, so functions of it are `where_rare` (numba_compile.py), and no fleet
that is ordinary ever comes where they are called. Whatever is not known to be ordinary gets the whole
kernel, the same for all: what its fleet does not have is there as arrays of nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.models.foreign_forms import FIVE
from planner.models.output_length import NO_OUTPUTS
from planner.policies import GREEDY, LOWEST_BY_LOT, ROUND_ROBIN, SCORE, SRPT, TWO_BY_REQUESTS, VLLM_V1
from planner.simulator.adapter_layout import NO_ADAPTERS
from planner.simulator.cache_layout import NO_CACHES
from planner.simulator.layout import (
    BACK,
    DP_RANK,
    FLIP_S,
    FRONT,
    LIVE,
    OPTIONAL,
    PAUSE,
    REPURPOSE_S,
    REQUEST_CLASS,
    ROUTING,
    State,
    nothing,
)
from planner.simulator.offload_layout import NO_OFFLOAD

_ROUTINGS = (SCORE, ROUND_ROBIN, TWO_BY_REQUESTS, LOWEST_BY_LOT)
_NOTHING = dict(
    zip(
        OPTIONAL,
        (NO_CACHES, nothing(DP_RANK), NO_ADAPTERS, NO_OUTPUTS, NO_OFFLOAD, nothing(REQUEST_CLASS)),
        strict=True,
    )
)


def for_kernel(state: State) -> State:
    """The same arrays, as the form of the kernel that the fleet needs takes them."""
    return state._replace(has=None) if is_ordinary(state) else for_whole_kernel(state)


def for_whole_kernel(state: State) -> State:
    """With arrays of nothing for what the fleet does not have. A run whose workers come and go needs it from
    its first pause to its last, whatever it looks like at one of them: requests may be held or lost.
    """
    absent: dict[str, Any] = {name: empty for name, empty in _NOTHING.items() if getattr(state, name) is None}
    return state._replace(has=np.array([name not in absent for name in OPTIONAL]), **absent)


def is_ordinary(state: State) -> bool:
    """Whether nothing that is compiled `where_rare` can come to pass from here on."""
    types, counters, policy = state.types, state.counters, state.policy
    return (
        all(getattr(state, name) is None for name in OPTIONAL)
        and counters[ROUTING + FRONT] in _ROUTINGS
        and counters[ROUTING + BACK] in _ROUTINGS
        and policy[FLIP_S] == policy[REPURPOSE_S] == np.inf
        and policy[LIVE] == 0.0
        and len(state.parts) == 0
        and bool((types["form"] == FIVE).all())
        and bool((types["batching"] == VLLM_V1).all())
        and bool((types["admission"] == GREEDY).all())
        and bool((types["queue_order"] <= SRPT).all())
        and not types["long_prefill_tokens"].any()
        and bool((state.lanes["width"] == 1).all())
        and bool((state.workers["is_up"] == 1).all())
        and bool((state.disturbances["kind"] == PAUSE).all())
    )
