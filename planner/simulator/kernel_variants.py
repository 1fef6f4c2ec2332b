"""The two forms in which the kernel is compiled, and which of them a fleet needs.

Most of what the kernel can do is needed by few questions: batching, step times and routing of other engines;
workers that go down, change their role or use speculative decoding; and the OPTIONAL fields of the state
(layout.py). To compile it takes several times as long as to compile all the rest. So functions for it are
marked `where_rare` or `where_has` (numba_compile.py), and the form for ordinary fleets is compiled without
them. All other fleets share one form, the whole kernel, in which a field that the fleet does not use is an
empty array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.models.foreign_forms import FIVE_NUMBERS
from planner.models.output_length import NO_OUTPUTS
from planner.policies import GREEDY, LOWEST_BY_LOT, ROUND_ROBIN, SCORE, SRPT, TWO_BY_REQUESTS, VLLM_V1
from planner.simulator.adapter_layout import NO_ADAPTERS
from planner.simulator.cache_layout import NO_CACHES
from planner.simulator.layout import (
    ARRIVAL_POOL,
    DP_RANK,
    FLIP_S,
    HAND_OFF_POOL,
    IN_SERVICE,
    LIVE,
    NEVER,
    OPTIONAL,
    PAUSE,
    REPURPOSE_S,
    REQUEST_CLASS,
    ROUTING,
    State,
    empty_field,
)
from planner.simulator.offload_layout import NO_OFFLOAD

# The routing policies that the form for ordinary fleets is compiled with.
_ORDINARY_ROUTINGS = (SCORE, ROUND_ROBIN, TWO_BY_REQUESTS, LOWEST_BY_LOT)
# What the whole kernel gets for each of the OPTIONAL fields if the fleet does not use it.
_EMPTY_FIELDS: dict[str, Any] = {
    "caches": NO_CACHES,
    "dp_ranks": empty_field(DP_RANK),
    "adapters": NO_ADAPTERS,
    "outputs": NO_OUTPUTS,
    "offload": NO_OFFLOAD,
    "classes": empty_field(REQUEST_CLASS),
}


def for_kernel(state: State) -> State:
    """The same state as an argument of the kernel. Its types decide which form runs: `has` is None for the
    form for ordinary fleets.
    """
    return state._replace(has=None) if is_ordinary(state) else for_whole_kernel(state)


def for_whole_kernel(state: State) -> State:
    """The same state for the whole kernel, with empty arrays for what the fleet does not have; `has` says
    which of the OPTIONAL fields it does have.

    A simulation that is paused while workers come and go needs this form from its first pause to its last,
    even if the state looks ordinary at one of them: requests may be held or lost.
    """
    absent = {name: _EMPTY_FIELDS[name] for name in OPTIONAL if getattr(state, name) is None}
    return state._replace(has=np.array([name not in absent for name in OPTIONAL]), **absent)


def is_ordinary(state: State) -> bool:
    """Whether the simulation can go on from this state without any function that only the whole kernel
    has.
    """
    types, counters, policy = state.types, state.counters, state.policy
    return (
        all(getattr(state, name) is None for name in OPTIONAL)
        and counters[ROUTING + ARRIVAL_POOL] in _ORDINARY_ROUTINGS
        and counters[ROUTING + HAND_OFF_POOL] in _ORDINARY_ROUTINGS
        and policy[FLIP_S] == policy[REPURPOSE_S] == NEVER
        and policy[LIVE] == 0.0
        and len(state.parts) == 0
        and bool((types["form"] == FIVE_NUMBERS).all())
        and bool((types["batching"] == VLLM_V1).all())
        and bool((types["admission"] == GREEDY).all())
        # Queues up to SRPT go by a fixed rank of each prompt (planner/policies.py).
        and bool((types["queue_order"] <= SRPT).all())
        and not types["long_prefill_tokens"].any()
        and bool((types["poll_steps"] <= 1).all())  # Engines look for new requests after every step.
        and bool((state.lanes["width"] == 1).all())  # A decode makes one token in a step.
        and bool((state.workers["status"] == IN_SERVICE).all())
        and bool((state.disturbances["kind"] == PAUSE).all())
    )
