"""Which fleets need the ordinary part of the kernel alone.

Most of what the kernel can do few questions ask for: other engines' batching, step times and routing, workers
that go down, change their role or draft. Compiling that takes as long as all the rest, so functions of it
are `where_rare` (compiled.py), and no fleet that is ordinary ever comes where they are called. Whatever is
not known to be ordinary gets the whole kernel.
"""

from __future__ import annotations

import numpy as np

from planner.models.forms import FIVE
from planner.policies import GREEDY, LOWEST_BY_LOT, ROUND_ROBIN, SCORE, SRPT, TWO_BY_REQUESTS, VLLM_V1
from planner.simulator.layout import BACK, FLIP_S, FRONT, LIVE, PAUSE, REPURPOSE_S, ROUTING, State

_ROUTINGS = (SCORE, ROUND_ROBIN, TWO_BY_REQUESTS, LOWEST_BY_LOT)


def narrowed(state: State) -> State:
    """The same arrays, told to be those of an ordinary fleet if they are."""
    return state._replace(rare=None) if is_ordinary(state) else state


def is_ordinary(state: State) -> bool:
    """Whether nothing that is compiled `where_rare` can come to pass from here on."""
    types, counters, policy = state.types, state.counters, state.policy
    with_more = (state.caches, state.dp_ranks, state.adapters, state.outputs, state.offload)
    return (
        all(each is None for each in with_more)
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
