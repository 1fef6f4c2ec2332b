"""Applies events of a real fleet to the simulator's state, with the simulator's own compiled functions.

The router (live_routing.py) sees when requests come, begin to be answered and end, and when workers go down.
It calls `note_event` for each event, which calls those functions of the simulator that choose a worker and
keep account of its load and cache. The fields of the state are those of planner/simulator/layout.py.

Letters: r is the seat of a request, its row in the state's tables, from `take_seat` until another request
gets the seat; w is a worker, v one that decodes. The field `status` of a request is its stage, one of those
below.
"""

import numpy as np

from planner.policies import REBALANCED
from planner.simulator.cache_layout import FIRST_ROUTED, TREE_NODE_TOKENS
from planner.simulator.caches import (
    empty_cache,
    evict_idle,
    find_entry,
    forget_routed,
    keep_prefix,
    lose_prefix,
    release_prefix,
    show_prefix,
    take_prefix,
)
from planner.simulator.flips import flip_if_due
from planner.simulator.held_prompts import hold_prompt, note_first_token, remove_held, send_next_held
from planner.simulator.kv_blocks import blocks_of, request_blocks, seat_blocks
from planner.simulator.layout import ARRIVAL_POOL, BLOCK, HAND_OFF_POOL, NONE, ROUTING, TBT_S, ZERO
from planner.simulator.numba_compile import entry_jit, kernel_jit, small_jit, where_has
from planner.simulator.pointers import pointer_to
from planner.simulator.predictions import note_end, predicted_at_first, renew_if_outlived
from planner.simulator.prefix_routing import expected_tokens, route_by_prefix
from planner.simulator.queue_orders import assign_turn, begin_turn, charge_output
from planner.simulator.router_loads import add_load, assign_none, assign_request
from planner.simulator.routing import choose_worker, holds_back, set_pools

# Stages of a request. Their order counts: code below compares them.
(
    FREE,  # The seat has no request.
    GONE,  # The request has ended; the window of the routing policy e2 still has its prefix.
    SEATED,  # It is on no worker.
    HELD,  # It has a worker that is to compute its prompt, but waits at the router (held_prompts.py).
    ROUTED,  # It was sent to that worker.
    ADMITTED,  # That worker's engine has taken it into its batch.
    COMPUTED,  # Its prompt is computed.
    DECODING,  # It is on its decode worker.
) = (np.int64(stage) for stage in range(8))
# Kinds of events, for `note_event`. "It" is the request on the seat.
(
    SEND,  # A worker is to be chosen for its prompt.
    HAND_OFF,  # A worker is to be chosen for its decode.
    ADMIT,  # Its engine has admitted it.
    COMPUTE,  # Its prompt is computed.
    GROW,  # More of its output has come.
    LEAVE,  # It has left its worker.
    GO_DOWN,  # A worker has lost its cache.
    FORGET,  # The window of the routing policy e2 gives up requests.
    IS_HELD_BACK,  # A question: does the policy hold the request back?
    SEND_HELD,  # A question: which request that waits for a worker at the router is sent now?
) = range(10)


@small_jit
def _worker_of(state, r):
    """The worker that request r is on: its decode worker, once it decodes."""
    request = state.requests[r]
    return request.decode_worker if request.status == DECODING else request.prefill_worker


@small_jit
def _is_on_same_start(state, r):
    """Whether the worker of request r has not restarted since the request was sent there."""
    return state.workers[_worker_of(state, r)].epoch == state.requests[r].epoch


@where_has("caches", lambda state, r, start, depth, tenant: None)
def _new_prompt(state, r, start, depth, tenant):
    """Reset the record of the prompt on seat r, whose `depth` nodes are in the path table from `start` on.

    Like all functions here under `where_has("caches", ...)`, it runs for fleets with prefix caches; for
    others the lambda in the decorator runs.
    """
    prompt = state.caches.prompts[r]
    prompt.start, prompt.tenant = start, tenant
    prompt.depth = min(depth, state.requests[r].input_tokens // state.caches.numbers[TREE_NODE_TOKENS])
    prompt.used_tree_nodes, prompt.shown_tree_nodes, prompt.own_blocks, prompt.left = 0, 0, 0, NONE
    prompt.expected_tokens, prompt.hit_tokens, prompt.group = 0, NONE, 0
    prompt.worker, prompt.next, prompt.prefix, prompt.queue_s = NONE, NONE, NONE, -1.0


@where_has("caches", lambda state, w, r, time_s: ZERO)
def _take_prefix(state, w, r, time_s):
    """Take the cached prefix of request r and return its tokens, as `batching.admit_request` does.

    Tokens that were expected in the cache and are not there become load of the worker.
    """
    hit = take_prefix(state, w, r, time_s)
    # Like all calls of `add_load` here, this one changes only the pending prompt tokens, its first number.
    add_load(state, w, float(state.caches.prompts[r].expected_tokens - hit), 0.0, 0.0)
    return hit


@where_has("caches", lambda state, w, r, time_s: time_s)
def _admitted_s(state, w, r, time_s):
    """When request r was admitted, as if its worker had computed nothing else until `time_s`."""
    missed = state.requests[r].length_tokens - state.caches.prompts[r].expected_tokens
    return max(time_s - missed * state.caches.workers[w].token_s, state.requests[r].arrival_s)


@kernel_jit
def _admit_request(state, r, time_s):
    """Note that request r is admitted to its engine's batch.

    From now on its blocks count as cached for others, because real engines do not report the chunks of a
    prompt. If more blocks are in use than the worker has, nothing of the request counts as cached: the engine
    will recompute some requests and does not report which.
    """
    request = state.requests[r]
    w = request.prefill_worker
    worker = state.workers[w]
    request.status, request.scheduled_s = ADMITTED, time_s
    hit = _take_prefix(state, w, r, time_s)
    begin_turn(state, w, r)
    worker.used_blocks += request_blocks(state, w, request.length_tokens) - hit // BLOCK
    worker.used_blocks += seat_blocks(state, w, r)
    evict_idle(state, w, ZERO, time_s)
    if worker.used_blocks <= state.types[worker.type].kv_blocks:
        request.computed_tokens = request.length_tokens
        keep_prefix(state, w, r)
    # Above, the whole prompt counted as computed, because `keep_prefix` caches computed tokens alone.
    request.computed_tokens = hit


@where_has("caches", lambda state, limit: None)
def _forget_window(state, limit):
    """Take the oldest `limit` requests, or all there are, out of e2's window."""
    caches = state.caches
    while limit > 0 and caches.numbers[FIRST_ROUTED] != NONE:
        forget_routed(state)
        limit -= 1


@kernel_jit
def _set_least_saved(state, time_s):
    """Set `least_saved_s` of each worker: the least number of seconds by which one of its answers is ahead of
    the policy's TBT. The simulator's `routing._update_saved_s` does so from simulated times.
    """
    for worker in state.workers:
        worker.least_saved_s = np.inf
    for r in range(len(state.requests)):
        request = state.requests[r]
        if (request.status == COMPUTED or request.status == DECODING) and _is_on_same_start(state, r):
            tokens = max(request.length_tokens - request.input_tokens, 1)
            saved_s = state.policy[TBT_S] * tokens - (time_s - request.first_token_s)
            worker = state.workers[_worker_of(state, r)]
            worker.least_saved_s = min(worker.least_saved_s, saved_s)


@kernel_jit
def _send_request(state, r, time_s):
    """Choose the worker that takes request r and send it there; NONE if it fits on no worker that is up."""
    set_pools(state)
    flip_if_due(state, ARRIVAL_POOL, time_s)
    if state.counters[ROUTING + ARRIVAL_POOL] == REBALANCED:
        _set_least_saved(state, time_s)
    w = route_by_prefix(state, r, time_s)
    if w != NONE:
        request = state.requests[r]
        request.prefill_worker, request.status, request.epoch = w, ROUTED, state.workers[w].epoch
        assign_request(state, w, r, 1.0)
        add_load(state, w, float(request.length_tokens - expected_tokens(state, r)), 0.0, 0.0)
        assign_turn(state, w, r)
        if hold_prompt(state, w, r):
            request.status = HELD
    return w


@where_has("caches", lambda state, w: NONE)
def _send_held(state, w):
    """The request that the router sends to worker w now; NONE if none waits for w, or none is due."""
    r = send_next_held(state, w)
    if r != NONE:
        state.requests[r].status = ROUTED
    return r


@kernel_jit
def _hand_off(state, r, time_s):
    """Choose the worker that decodes request r and send it there; NONE if it fits on no worker that is up."""
    set_pools(state)
    flip_if_due(state, HAND_OFF_POOL, time_s)
    v = choose_worker(state, HAND_OFF_POOL, r, time_s)
    if v != NONE:
        request = state.requests[r]
        request.decode_worker, request.status, request.epoch = v, DECODING, state.workers[v].epoch
        assign_request(state, v, r, 1.0)
        blocks = request_blocks(state, v, request.length_tokens) + seat_blocks(state, v, r)
        state.workers[v].used_blocks += blocks
    return v


@kernel_jit
def _end_prompt(state, r, time_s):
    """Note that the prompt of request r is computed; it is admitted first if no admission was reported."""
    request = state.requests[r]
    w = request.prefill_worker
    if request.status == ROUTED:
        _admit_request(state, r, _admitted_s(state, w, r, time_s))
    if request.status == ADMITTED:
        add_load(state, w, -float(request.length_tokens - request.computed_tokens), 0.0, 0.0)
        request.status, request.first_token_s = COMPUTED, time_s
        request.computed_tokens = request.length_tokens
        note_first_token(state, w, r)
        show_prefix(state, w, r)


@kernel_jit
def _grow_output(state, r, tokens, time_s):
    request, w = state.requests[r], _worker_of(state, r)
    blocks_before = blocks_of(request.length_tokens)
    state.workers[w].used_blocks += blocks_of(request.input_tokens + tokens) - blocks_before
    request.length_tokens = request.input_tokens + tokens
    renew_if_outlived(state, w, r, tokens)
    if request.status != DECODING:
        evict_idle(state, w, ZERO, time_s)


@small_jit
def _cached_tokens(request, tokens):
    """Tokens whose KV a worker holds after this many tokens of output: all but the last one.

    0 if the request left before its prompt was computed.
    """
    if request.status != COMPUTED:
        return ZERO
    return max(request.length_tokens, request.input_tokens + tokens) - (tokens > 0)


@kernel_jit
def _leave_worker(state, r, tokens, time_s):
    """Take request r off its worker, which it has left after `tokens` tokens of output, finished or not."""
    request, w = state.requests[r], _worker_of(state, r)
    if request.status == HELD:
        remove_held(state, w, r)
    if tokens > 0:
        # The tenant is charged for the tokens that came, which may be fewer than the request's limit.
        limit_tokens, request.output_tokens = request.output_tokens, tokens
        charge_output(state, r)
        request.output_tokens = limit_tokens
    if not _is_on_same_start(state, r):
        lose_prefix(state, r)
    else:
        note_first_token(state, w, r)
        if request.status == HELD or request.status == ROUTED:
            add_load(state, w, -float(request.length_tokens - expected_tokens(state, r)), 0.0, 0.0)
        elif request.status == ADMITTED:
            add_load(state, w, -float(request.length_tokens - request.computed_tokens), 0.0, 0.0)
        assign_request(state, w, r, -1.0)
        if state.workers[w].assigned == 0.0:
            state.workers[w].idle_since_s = time_s
        note_end(state, w, r, tokens)
        if request.status > ROUTED:
            blocks = request_blocks(state, w, request.length_tokens) + seat_blocks(state, w, r)
            state.workers[w].used_blocks -= blocks
        if request.status == ADMITTED or request.status == COMPUTED:
            release_prefix(state, w, r, _cached_tokens(request, tokens), False)
    request.status, request.length_tokens, request.computed_tokens = SEATED, request.input_tokens, 0


@kernel_jit
def _empty_worker(state, w, time_s):
    """Note that worker w has lost its cache and its requests; a LEAVE follows for each of these requests."""
    worker = state.workers[w]
    worker.epoch += 1
    empty_cache(state, w, time_s)
    worker.used_blocks = 0
    assign_none(state, w)


@kernel_jit
def _is_held_by_none(state, node):
    """Whether no worker holds a node of the prefix tree, as far as the router knows (`caches.holders`)."""
    for word in state.caches.holders[node]:
        if word != 0:
            return False
    return True


@kernel_jit
def _forget_if_only_believed(state, node):
    """Remove a node from workers that are only believed to hold it.

    Returns False, and changes nothing, if a worker has an entry of the node (simulator/caches.py).
    """
    caches = state.caches
    for w in range(len(state.workers)):
        e = find_entry(state, w, node)
        if e != NONE:
            return False
    for w in range(len(state.workers)):
        bit = np.uint64(1) << np.uint64(w % 64)
        caches.workers[w].known_tree_nodes -= (caches.holders[node, w // 64] & bit) != 0
    caches.holders[node, :] = 0
    return True


@entry_jit
def take_seat(fields, r, time_s, inputs, outputs, tenant, start, depth):
    """Give seat r to a request; its prompt's nodes are `depth` rows of the path table from `start` on."""
    state = pointer_to(fields)
    request = state.requests[r]
    request.arrival_s = time_s
    request.input_tokens, request.length_tokens, request.computed_tokens = inputs, inputs, 0
    request.output_tokens = outputs
    request.predicted_tokens = request.predicted_later_tokens = predicted_at_first(state, r)
    request.prefill_worker, request.decode_worker, request.status = NONE, NONE, SEATED
    _new_prompt(state, r, start, depth, tenant)


@entry_jit
def note_event(fields, event, r, number, time_s):
    """Apply an event of the request on seat r, or of a worker.

    `number` is the worker for GO_DOWN and SEND_HELD, how many requests to give up for FORGET, and for GROW
    and LEAVE the tokens of output so far. Returns the worker that SEND or HAND_OFF chose, for IS_HELD_BACK
    whether the policy holds the request back, and for SEND_HELD the request.
    """
    state = pointer_to(fields)
    if event == SEND:
        return _send_request(state, r, time_s)
    if event == HAND_OFF:
        return _hand_off(state, r, time_s)
    if event == IS_HELD_BACK:
        set_pools(state)
        return np.int64(holds_back(state, ARRIVAL_POOL, r))
    if event == SEND_HELD:
        return _send_held(state, number)
    if event == GO_DOWN:
        _empty_worker(state, number, time_s)
    elif event == FORGET:
        _forget_window(state, number)
    elif state.requests[r].status > SEATED:
        if event == LEAVE:
            _leave_worker(state, r, number, time_s)
        elif _is_on_same_start(state, r):
            if event == COMPUTE:
                _end_prompt(state, r, time_s)
            elif event == GROW and state.requests[r].status >= COMPUTED:
                _grow_output(state, r, number, time_s)
            elif event == ADMIT and state.requests[r].status == ROUTED:
                _admit_request(state, r, time_s)
    return NONE


@entry_jit
def sweep_nodes(fields, users, touched, first, end, forgets, free_nodes):
    """Write unused nodes from `first` up to `end` into `free_nodes`; returns how many.

    A node is unused if no request and no worker has it. `users` counts the requests that have each node; -1
    marks nodes that are free already. With `forgets` 1 a node that workers are only believed to have also
    becomes unused, unless it was `touched` since the last sweep; with 2 in any case.
    """
    state = pointer_to(fields)
    count = 0
    for node in range(first, end):
        may_forget = forgets > 1 or (forgets == 1 and touched[node] == 0)
        if users[node] == 0 and (
            _is_held_by_none(state, node) or (may_forget and _forget_if_only_believed(state, node))
        ):
            free_nodes[count] = node
            count += 1
        touched[node] = 0
    return count
