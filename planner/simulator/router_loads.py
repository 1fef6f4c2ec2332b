"""The load of each worker as routers see it: pending prompt tokens, assigned requests and their prompts.

Whatever changes a load renews the worker's routing score (`state.score`). Letters: w is a worker, or a rank
of one (ranks.py), r a request.
"""

from __future__ import annotations

import numpy as np

from planner.policies import LOWEST_BY_LOT
from planner.simulator.layout import ARRIVAL_POOL, DECODE, GAMMA, GROUP, HAND_OFF_POOL, HEAVY_TOKENS, ROUTING
from planner.simulator.numba_compile import kernel_jit, small_jit, where_has
from planner.simulator.predictions import forget_errors


@small_jit
def _routing_score(weight, worker):
    """The load of a worker as one number; `weight` is a row of TYPE.routing_weight (layout.py)."""
    return (
        weight[0] * worker.pending_tokens
        + weight[1] * worker.assigned
        + weight[2] * worker.assigned_tokens
        + weight[3] * worker.waiting
    )


@kernel_jit
def _add_load_alone(state, w, pending_tokens, requests, prompt_tokens):
    """`add_load` for a worker with one rank.

    Routers look for the lowest score among groups of GROUP workers: `lowest` bounds the scores of a group
    from below, and the router renews it when a score has risen.
    """
    worker = state.workers[w]
    worker.pending_tokens += pending_tokens
    worker.assigned += requests
    worker.assigned_tokens += prompt_tokens
    pool, group = HAND_OFF_POOL if worker.role == DECODE else ARRIVAL_POOL, worker.pool_index // GROUP
    state.score[w] = _routing_score(state.types[worker.type].routing_weight[pool], worker)
    state.lowest[pool, group] = min(state.lowest[pool, group], state.score[w])


@where_has("dp_ranks", _add_load_alone)
def add_load(state, w, pending_tokens, requests, prompt_tokens):
    """Add to the load of rank w that the router sees: pending prompt tokens, requests, their prompt tokens.

    The router scores a worker with several ranks by the sum of their loads; that sum stands in the `score` of
    its first rank.
    """
    ranks = state.dp_ranks[w]
    if ranks.count == 1:
        _add_load_alone(state, w, pending_tokens, requests, prompt_tokens)
        return
    worker = state.workers[w]
    worker.pending_tokens += pending_tokens
    worker.assigned += requests
    worker.assigned_tokens += prompt_tokens
    first = ranks.first
    pool = HAND_OFF_POOL if worker.role == DECODE else ARRIVAL_POOL
    group = state.workers[first].pool_index // GROUP
    weight, score = state.types[worker.type].routing_weight[pool], 0.0
    for v in range(first, first + ranks.count):
        score += _routing_score(weight, state.workers[v])
    state.score[first] = score
    state.lowest[pool, group] = min(state.lowest[pool, group], score)


@kernel_jit
def report_computed(state, w, r, tokens):
    """Let the router know that rank w has computed `tokens` tokens of the prompt of request r.

    A router that goes by pending tokens (LOWEST_BY_LOT, planner/policies.py) learns of them only with the
    first token (`report_token`).
    """
    # `counters[ROUTING + ARRIVAL_POOL]` holds the routing policy of prefills.
    if state.counters[ROUTING + ARRIVAL_POOL] == LOWEST_BY_LOT and state.requests[r].prefill_worker == w:
        state.requests[r].unseen_tokens += tokens
    else:
        add_load(state, w, -float(tokens), 0.0, 0.0)


@kernel_jit
def report_token(state, r):
    """Let the router see a token of request r: the tokens of its prompt are not pending any more."""
    request = state.requests[r]
    if request.unseen_tokens > 0:
        add_load(state, request.prefill_worker, -float(request.unseen_tokens), 0.0, 0.0)
        request.unseen_tokens = 0


@kernel_jit
def assign_request(state, w, r, sign):
    """Assign request r to worker w (sign 1.0), or take the assignment back (-1.0)."""
    request = state.requests[r]
    add_load(state, w, 0.0, sign, sign * request.input_tokens)
    # Routing heavy-light counts requests with long outputs; best-fit weighs predicted outputs by gamma.
    state.workers[w].heavy += np.int64(sign) * (request.predicted_tokens > state.policy[HEAVY_TOKENS])
    weighted_tokens = request.input_tokens + state.policy[GAMMA] * request.predicted_tokens
    state.workers[w].future_tokens += sign * weighted_tokens


@kernel_jit
def assign_none(state, w):
    """Take back all assignments to worker w; its load and prediction errors are reset to 0."""
    worker = state.workers[w]
    worker.pending_tokens, worker.assigned, worker.assigned_tokens, worker.future_tokens = 0.0, 0.0, 0.0, 0.0
    worker.heavy = 0
    forget_errors(worker)
    add_load(state, w, 0.0, 0.0, 0.0)  # Adds nothing, but renews the router's score.
