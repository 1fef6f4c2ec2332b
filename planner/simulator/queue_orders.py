"""The queue of prompts on a worker: where a prompt is put, and which one is next.

For policies that depend on the prefix cache or on tenants the queue is a list of all waiting prompts, which
is searched each time. The queue of any other policy is a heap (queues.py), whose order is by a number, the
key (`sorts_by_key`). In fleets without `caches` the function in the brackets of `where_has` runs
(numba_compile.py). vtc, dlpm and dlpm-turns can be used without prefix caches too: then no prompt is cached,
and of equals the first to arrive is next.

lpm (SGLang): first the prompt with the longest cached prefix; of equal ones the first to arrive.

vtc (Sheng et al. 2024): first the prompts of the tenant that the worker has served least. A tenant that comes
back after a pause counts as served no less than the least served tenant that waits.

dlpm (Cao et al. 2025): lpm among the prompts of tenants with credit. Service uses up credit. When no tenant
that waits has any, each of them gets a quantum of it. A tenant that comes back keeps its debt, but no credit.

dlpm-turns: dlpm for engines that take a number with each request (vLLM's priority). The number is the
tenant's turn: how many quanta of its work were sent before, or the turn that the worker serves now if that is
later, because turns are not saved up. Within a turn the prompt with the longest cached prefix goes first, as
the router knew the cache. Outputs are charged when they are complete.

dlpm-held: dlpm at the router, for engines that serve prompts as they come (held_prompts.py).

preble (Srivatsa et al. 2024): P groups by the cached share of the prompt. In a round each group, the one with
the largest share first, may send one prompt more than the group with the next smaller share.

Service is the computed tokens of prompts (cached ones are free) and the tokens of output, each kind with its
weight (`extend_weight`, `output_weight`). vtc divides it by the tenant's weight; for dlpm and dlpm-turns that
weight multiplies the quantum. vtc and dlpm charge output when a run of decode steps ends (decoding.py says
what runs and lanes are), or when a request arrives in the middle of a run. Preempted requests go before all
others: their key is negative; with dlpm-turns they keep their number. Letters: w is a worker, r a request, u
a tenant, l a lane.
"""

from __future__ import annotations

import numpy as np

from planner.policies import D2LPM, DLPM, DLPM_HELD, EDF, FCFS, LJF, LPM, PREBLE, SJF, TURNS, VTC
from planner.simulator.cache_layout import EXTEND_WEIGHT, OUTPUT_WEIGHT, QUANTUM_TOKENS, TREE_NODE_TOKENS
from planner.simulator.caches import cached_tree_nodes, note_output
from planner.simulator.counting import steps_reaching
from planner.simulator.layout import ARRIVAL_POOL, NONE, ROUTING
from planner.simulator.numba_compile import kernel_jit, small_jit, where_has
from planner.simulator.queues import insert_in_heap, remove_root

TURN_TOKENS = 2.0**22  # The places of a turn (`assign_turn`): more than any prompt has tokens.
# More tokens than any request has. Queues sort by (scheduling batch, tokens) in one number
# (`enqueue_request`): batch * TOKENS_BOUND + tokens keeps all keys of a batch below those of the next.
TOKENS_BOUND = 1e9


@kernel_jit
def enqueue_request(state, w, r):
    """Let request r wait for its prefill on worker w, in the order of the queue policy."""
    worker, request = state.workers[w], state.requests[r]
    kind = state.types[worker.type]
    worker.waiting += 1
    count_waiting(state, w, r, 1)  # Counts requests by adapter.
    if not sorts_by_key(kind.queue_order):
        line_up(state, w, r, False)  # False: at the end of its queue.
        return
    # The orders sjf, ljf and srpt (codes between FCFS and EDF) may sort inside scheduling batches, which are
    # served in turn.
    if kind.queue_batch > 0 and FCFS < kind.queue_order < EDF:
        # Batches fill in order of arrival: a new one begins when the last is being served, or is full.
        if worker.filled_batch <= worker.served_batch:
            worker.filled_batch, worker.filled = worker.served_batch + 1, 0
        elif worker.filled == kind.queue_batch:
            worker.filled_batch, worker.filled = worker.filled_batch + 1, 0
        worker.filled += 1
        key = worker.filled_batch * TOKENS_BOUND + _ranked_tokens(kind, request)
    else:
        key = priority_of(state, w, r)
    worker.first_waiting = insert_in_heap(state.requests, worker.first_waiting, r, key)


@kernel_jit
def enqueue_preempted(state, w, r):
    """Let request r, which was preempted, wait before all others, also those preempted earlier. Where engines
    go by priority, it waits in the order of priorities instead.
    """
    worker = state.workers[w]
    worker.preemptions += 1
    if state.types[worker.type].by_priority > 0:
        enqueue_request(state, w, r)
        return
    worker.waiting += 1
    count_waiting(state, w, r, 1)
    if not sorts_by_key(state.types[worker.type].queue_order):
        line_up(state, w, r, True)  # True: at the front.
        return
    # Below the keys of all requests that were not preempted, and of all that were preempted earlier.
    key = -TOKENS_BOUND * TOKENS_BOUND * worker.preemptions
    worker.first_waiting = insert_in_heap(state.requests, worker.first_waiting, r, key)


@kernel_jit
def priority_of(state, w, r):
    """The number by which worker w sorts request r in its queue, smallest first; with TYPE.by_priority it is
    vLLM's priority. Scheduling batches, and orders that look at caches, have no such number.
    """
    request, kind = state.requests[r], state.types[state.workers[w].type]
    if kind.queue_order == FCFS:
        return request.arrival_s
    if kind.queue_order == EDF:
        return request.arrival_s + _due_s(state, r)
    if kind.queue_order >= DLPM_HELD:  # dlpm-held or dlpm-turns: others from here on have no such number.
        return _place_of(state, r)
    tokens = _ranked_tokens(kind, request)
    # A prompt may be overtaken only by those that arrive within its window (TYPE.queue_window_s).
    if kind.queue_window_s < np.inf:
        return request.arrival_s + kind.queue_window_s * tokens / kind.queue_longest_tokens
    return tokens


@small_jit
def _ranked_tokens(kind, request):
    """The tokens by which the orders sjf, ljf and srpt sort, smallest first."""
    tokens = float(request.input_tokens)
    if kind.queue_order == LJF:
        return TOKENS_BOUND - tokens
    return tokens if kind.queue_order == SJF else tokens + request.predicted_tokens  # Else srpt.


@where_has("classes", lambda state, r: 0.0)
def _due_s(state, r):
    """Seconds after its arrival at which request r is due, for the queue edf."""
    return state.classes[r].due_s


@where_has("caches", lambda state, r: 0.0)
def _place_of(state, r):
    """The number that the router gave request r, for the queues dlpm-turns and dlpm-held."""
    return state.caches.prompts[r].place


@small_jit
def sorts_by_key(order):
    """Whether queue policy `order` keeps its prompts in a heap: the codes of planner/policies.py say so."""
    return order <= DLPM_HELD


@small_jit
def _uses_turns(state, w):
    """Whether worker w serves prompts by dlpm-turns."""
    return state.types[state.workers[w].type].queue_order == TURNS


@where_has("caches", lambda state, w, r: None)
def assign_turn(state, w, r):
    """Give request r, sent to worker w, its place in dlpm-turns: by turn, then by longest cached prefix."""
    if not _uses_turns(state, w):
        return
    caches = state.caches
    prompt = caches.prompts[r]
    tenant = caches.tenants[w, prompt.tenant]
    quantum = caches.settings[QUANTUM_TOKENS] * caches.weights[prompt.tenant]
    # Turns that have begun without the tenant count as used by it: they are not saved up.
    tenant.sent = max(tenant.sent, caches.workers[w].turn * quantum)
    turn = np.floor(tenant.sent / quantum)
    # `expected_tokens`: what the router took to be cached on worker w when it chose w.
    tenant.sent += caches.settings[EXTEND_WEIGHT] * (state.requests[r].length_tokens - prompt.expected_tokens)
    # The places of a turn go from turn * TURN_TOKENS to (turn + 1) * TURN_TOKENS - 1. The longer the cached
    # prefix, the smaller the place.
    prompt.place = (turn + 1.0) * TURN_TOKENS - 1.0 - min(prompt.expected_tokens, TURN_TOKENS - 1.0)


@where_has("caches", lambda state, w, r: None)
def begin_turn(state, w, r):
    """Begin the turn of request r, which worker w admits: no later request gets an earlier turn."""
    if _uses_turns(state, w):
        cache = state.caches.workers[w]
        cache.turn = max(cache.turn, np.floor(state.caches.prompts[r].place / TURN_TOKENS))


@where_has("caches", lambda state, w, r, is_first: None)
def line_up(state, w, r, is_first):
    """Put request r at the end of worker w's list of waiting prompts, or before all others (`is_first`)."""
    worker, request = state.workers[w], state.requests[r]
    cache = state.caches.workers[w]
    count_waiting_prompt(state, w, r)
    request.key = -1.0 if is_first else request.arrival_s
    request.left, request.right = NONE, NONE
    if worker.first_waiting == NONE:
        worker.first_waiting, cache.last_waiting = r, r
    elif is_first:
        request.right = worker.first_waiting
        state.requests[worker.first_waiting].left = r
        worker.first_waiting = r
    else:
        request.left = cache.last_waiting
        state.requests[cache.last_waiting].right = r
        cache.last_waiting = r


@kernel_jit
def count_waiting_prompt(state, w, r):
    """Count request r among those of its tenant that wait on worker w.

    A tenant of which none waited loses its credit, and counts as served no less than the waiting tenant with
    the least service: pauses are not saved up. If no tenant waits, the service of the one that was served
    last counts instead.
    """
    tenants = state.caches.tenants
    u = state.caches.prompts[r].tenant
    tenant = tenants[w, u]
    if tenant.waiting == 0:
        tenant.credit = min(tenant.credit, 0.0)
        least = np.inf
        for other in range(tenants.shape[1]):
            if tenants[w, other].waiting > 0:
                least = min(least, tenants[w, other].served)
        last_tenant = state.caches.workers[w].served_tenant
        if least == np.inf and last_tenant != NONE:
            least = tenants[w, last_tenant].served
        if least < np.inf:
            tenant.served = max(tenant.served, least)
    tenant.waiting += 1


@where_has("adapters", lambda state, w, r, by: None)
def count_waiting(state, w, r, by):
    """Add `by` to the requests that wait on worker w for the adapter of request r."""
    state.adapters.waiting[w, state.adapters.adapter_of[r]] += by


def _leave_plain_queue(state, w, r):
    """`leave_queue` in fleets without caches, where all queues are heaps."""
    worker = state.workers[w]
    worker.first_waiting = remove_root(state.requests, r)


@where_has("caches", _leave_plain_queue)
def leave_queue(state, w, r):
    """Take request r, which is next on worker w, out of the queue."""
    worker, request = state.workers[w], state.requests[r]
    cache, prompt = state.caches.workers[w], state.caches.prompts[r]
    order = state.types[worker.type].queue_order
    if sorts_by_key(order):
        worker.first_waiting = remove_root(state.requests, r)
        return
    if request.left == NONE:
        worker.first_waiting = request.right
    else:
        state.requests[request.left].right = request.right
    if request.right == NONE:
        cache.last_waiting = request.left
    else:
        state.requests[request.right].left = request.left
    state.caches.tenants[w, prompt.tenant].waiting -= 1
    cache.served_tenant = prompt.tenant
    if order == PREBLE and request.key >= 0.0:
        state.caches.group_left[w, prompt.group] -= 1


@where_has("caches", lambda state, w: False)
def may_reorder(state, w):
    """Whether a step of decodes may change which prompt of worker w is next, and one of the worker's
    max_num_seqs places is free for a prompt.
    """
    worker = state.workers[w]
    kind = state.types[worker.type]
    return not sorts_by_key(kind.queue_order) and worker.waiting > 0 and worker.running < kind.seats


@where_has("caches", lambda state, w: state.workers[w].first_waiting)
def next_waiting(state, w):
    """The request whose prompt worker w computes next; NONE if none waits."""
    worker = state.workers[w]
    first, order = worker.first_waiting, state.types[worker.type].queue_order
    if first == NONE or sorts_by_key(order) or state.requests[first].key < 0.0:
        return first
    if order == PREBLE:
        return _next_by_group(state, w)
    if order == DLPM:
        refill_credit(state, w)
    # The best prompt has the `most` cached nodes or, for vtc and dlpm-turns, the `least` service or place.
    # `most` begins at NONE, which is -1, so that a prompt with 0 cached nodes beats it.
    best, most, least, arrival_s = NONE, NONE, np.inf, np.inf
    r = first
    while r != NONE:
        tenant = state.caches.tenants[w, state.caches.prompts[r].tenant]
        if order == VTC:
            if tenant.served < least:
                best, least = r, tenant.served
        elif order == TURNS:
            place = state.caches.prompts[r].place
            # If places are equal, the first to arrive; a preempted one stands behind later ones in the list.
            if place < least or (place == least and state.requests[r].arrival_s < arrival_s):
                best, least, arrival_s = r, place, state.requests[r].arrival_s
        elif order == LPM or tenant.credit > 0.0:
            nodes = cached_tree_nodes(state, w, r)
            if nodes > most:
                best, most = r, nodes
        r = state.requests[r].right
    return best


@kernel_jit
def refill_credit(state, w):
    """If no waiting tenant has credit, give each the same number of quanta: the fewest that give one credit.

    The second round of the loop finds the credit and returns, unless rounding has left no tenant with any.
    """
    tenants, quantum = state.caches.tenants, state.caches.settings[QUANTUM_TOKENS]
    while True:
        quanta = np.inf
        for u in range(tenants.shape[1]):
            if tenants[w, u].waiting > 0:
                if tenants[w, u].credit > 0.0:
                    return
                debt = -tenants[w, u].credit / (quantum * state.caches.weights[u])
                quanta = min(quanta, np.floor(debt) + 1.0)
        for u in range(tenants.shape[1]):
            if tenants[w, u].waiting > 0:
                tenants[w, u].credit += quanta * quantum * state.caches.weights[u]


@kernel_jit
def _next_by_group(state, w):
    """The next request by preble: the first one of the best group that may still send in this round.

    Group 0 has the smallest cached share, the last group is the best. If no group with a waiting prompt may
    send any more, a new round begins.
    """
    caches = state.caches
    # The first prompt of each group, and how many prompts each group may still send in this round.
    firsts, may_send = caches.firsts, caches.group_left
    groups = len(firsts)
    firsts[:] = NONE
    r = state.workers[w].first_waiting
    while r != NONE:
        cached = cached_tree_nodes(state, w, r) * caches.numbers[TREE_NODE_TOKENS]
        group = min(groups * cached // state.requests[r].length_tokens, groups - 1)
        caches.prompts[r].group = group
        if firsts[group] == NONE:
            firsts[group] = r
        r = state.requests[r].right
    while True:
        for group in range(groups - 1, -1, -1):
            if firsts[group] != NONE and may_send[w, group] > 0:
                return firsts[group]
        for group in range(groups):
            may_send[w, group] = group + 1


@small_jit
def _charges_service(state, w):
    """Whether worker w charges service to tenants as it is given: with vtc and dlpm. (dlpm-turns charges when
    requests are sent, and when they are finished.)
    """
    order = state.types[state.workers[w].type].queue_order
    return order == VTC or order == DLPM


@kernel_jit
def charge_tenant(state, w, u, service):
    """Charge tenant u for a service on worker w, in weighted tokens before the tenant's own weight."""
    tenant = state.caches.tenants[w, u]
    tenant.served += service / state.caches.weights[u]
    tenant.credit -= service  # Not divided: `refill_credit` has the weight in its quanta.


@kernel_jit
def note_admission(state, w, r):
    """Request r is admitted on worker w: with dlpm-turns its turn begins; with vtc and dlpm its tenant is
    charged for the prompt tokens that are not cached.
    """
    begin_turn(state, w, r)
    if _charges_service(state, w):
        missed = state.requests[r].length_tokens - state.requests[r].computed_tokens
        charge_tenant(state, w, state.caches.prompts[r].tenant, state.caches.settings[EXTEND_WEIGHT] * missed)


@where_has("caches", lambda state, w, r: None)
def charge_token(state, w, r):
    """Charge the tenant of request r for a token outside of runs: its first, the first after a preemption, or
    one of speculative decoding.
    """
    if _charges_service(state, w):
        charge_tenant(state, w, state.caches.prompts[r].tenant, state.caches.settings[OUTPUT_WEIGHT])


@where_has("caches", lambda state, l, steps: None)
def charge_tokens(state, l, steps):
    """The run of lane l ends after `steps` steps: charge those of its tokens that were not charged yet."""
    if _charges_service(state, state.lanes[l].worker):
        _charge_up_to(state, l, steps)
        state.caches.charged[l] = 0


@where_has("caches", lambda state, w, time_s: None)
def charge_running(state, w, time_s):
    """A request arrives on worker w in the middle of its runs: charge their tokens so far."""
    if not _charges_service(state, w):
        return
    worker = state.workers[w]
    for l in range(worker.first_lane, worker.first_lane + state.types[worker.type].lanes):
        lane = state.lanes[l]
        if lane.run_steps > 1:
            # So many steps have ended: those before the first one that ends at `time_s` or later.
            steps = steps_reaching(lane.run_start_s, lane.run_first_s, lane.run_growth_s, time_s) - 1
            _charge_up_to(state, l, steps)


@kernel_jit
def _charge_up_to(state, l, steps):
    """Charge the tokens of the first `steps` steps of the run of lane l, except those charged before."""
    lane, caches = state.lanes[l], state.caches
    service = caches.settings[OUTPUT_WEIGHT] * (steps - caches.charged[l])
    caches.charged[l] = steps
    for slot in range(lane.decodes):
        charge_tenant(state, lane.worker, caches.prompts[state.slots[l, slot].request].tenant, service)


@where_has("caches", lambda state, r: None)
def charge_output(state, r):
    """Request r is finished: charge its output for routing d2lpm and the queues dlpm-turns and dlpm-held, and
    note the output's length in e2's window (cache_layout.py).
    """
    caches = state.caches
    note_output(state, r)
    w, u = state.requests[r].prefill_worker, caches.prompts[r].tenant
    service = caches.settings[OUTPUT_WEIGHT] * state.requests[r].output_tokens
    if state.counters[ROUTING + ARRIVAL_POOL] == D2LPM:  # The routing of arrivals (layout.py).
        caches.worker_credit[u, w] -= service
    if _uses_turns(state, w):
        caches.tenants[w, u].sent += service
    elif state.types[state.workers[w].type].queue_order == DLPM_HELD:
        charge_tenant(state, w, u, service)
