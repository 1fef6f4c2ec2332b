"""Routing policies that go by what each worker has cached of the prompt.

A node is a few KV blocks of a prompt (cache_layout.py). The match of a worker is how many nodes of the
prompt's beginning it has. For a prompt of d nodes and W workers a policy takes about d W / 64 + W steps; e2
takes more where it divides subtrees, or weighs what a worker would evict. A policy takes the worker with

prefix-affinity: the longest match, among equals the lowest score.
min-ttft: the least seconds of what is pending there and of the prefill of what is missed (Mooncake, Dynamo).
cache-aware (SGLang): the longest match if it is more than a share of the prompt, otherwise the smallest
    cache; the fewest requests while workers differ in requests by more than a number and a ratio.
e2 (Preble, Srivatsa et al. 2024): if more is cached than missed, the least load among the longest matches,
    otherwise one that mostly decodes, otherwise the least load among all. The load of a worker is in seconds.
    It adds prefill and decode of what was routed there in the last window (outputs as long as finished ones
    on average), the prefill of what is missed, and the worth of the nodes that must leave (their prefill
    times the share of requests that begin with them). While loads are too far apart, prompts for the heaviest
    worker go to the lightest. Otherwise a prefix whose requests wait longer and longer is replicated to the
    least loaded worker, which gets a part, by load, of the subtrees that follow the prefix; requests of no
    such subtree go to the worker with the least load that has the prefix.
e2-dynamic (Appendix G there, which leaves the rule open): as e2, but more than 1 - u / 2 of a prompt must be
    cached for the longest match to count, where workers were busy for a share u of the window.
d2lpm (Cao et al. 2025): the fewest requests among the longest matches with credit for the tenant, otherwise
    among all with credit; a tenant without any credit gets quanta on every worker until it has some.
pinned-prefix: as min-ttft, among the workers where the longest pinned prefix of the prompt is pinned; among
    all where none of those is up and can hold the request.
tenant-round-robin: the next worker in turn, for each tenant by itself.

All policies see caches as the router knows them (caches.py): min-ttft and pinned-prefix know what was
computed, and the others take for cached what they have sent. tenant-round-robin looks at no cache and needs
none. Letters: w is a worker, l its first lane (a batch of a worker, layout.py), r the request that is routed,
q an earlier request, in e2's window.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from planner.policies import (
    AFFINITY,
    BEST_FIT,
    CACHE_AWARE,
    D2LPM,
    DEFERRED,
    E2,
    E2_DYNAMIC,
    MIN_TTFT,
    PINNED,
    REBALANCED,
    TENANT_TURNS,
    TURNS,
)
from planner.simulator.cache_layout import (
    BALANCE_RATIO,
    BALANCE_REQUESTS,
    DECODE_FRAC,
    EXTEND_WEIGHT,
    FIRST_ROUTED,
    MATCH_FRAC,
    REPLICATE_RATIO,
    TREE_NODE_BLOCKS,
    TREE_NODE_TOKENS,
    WINDOW_S,
    WORKER_QUANTUM_TOKENS,
)
from planner.simulator.caches import (
    cacheable_tree_nodes,
    move_e2_window,
    promise_prompt,
    read_notices,
    remember_routed,
    tree_node_at,
    worker_bit,
)
from planner.simulator.decoding import evict_for_run
from planner.simulator.kv_blocks import blocks_of, blocks_of_run, steps_done
from planner.simulator.layout import ARRIVAL_POOL, IN_SERVICE, NONE, ONE, ROUTING, SIZE, ZERO
from planner.simulator.numba_compile import kernel_jit, small_jit, where_has
from planner.simulator.routing import choose_worker, fits_worker
from planner.simulator.step_times import UNBOUNDED


@intrinsic
def _lowest_bit(typing_context, word):
    """The index of the lowest bit set in a word that is not 0: one machine instruction."""

    def codegen(context, builder, signature, arguments):
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.int64(types.uint64), codegen


@where_has("caches", lambda state, r, time_s: choose_worker(state, ARRIVAL_POOL, r, time_s))
def route_by_prefix(state, r, time_s):
    """The worker for request r, which has nothing computed; NONE if it fits on none.

    Routers that count a prompt as cached when they send it do so here; others learn when it is computed.
    """
    caches, policy = state.caches, state.counters[ROUTING + ARRIVAL_POOL]
    read_notices(state, time_s, ZERO)
    _match_nodes(state, r)
    if _hears_evictions(state, policy) and _evict_for_runs(state, time_s):
        read_notices(state, time_s, ZERO)
        _match_nodes(state, r)
    if policy < AFFINITY:  # Policies with lower codes do not look at caches.
        w = choose_worker(state, ARRIVAL_POOL, r, time_s)
    elif policy == CACHE_AWARE:
        w = _cache_aware_worker(state, r)
    elif policy == E2 or policy == E2_DYNAMIC:
        w = _e2_worker(state, r, time_s)
    elif policy == D2LPM:
        w = _d2lpm_worker(state, r)
    elif policy == TENANT_TURNS:
        w = _tenants_turn(state, r)
    elif policy == PINNED:
        w = _pinned_worker(state, r)
    else:
        w = _least_score(state, r, policy == MIN_TTFT)
    if w != NONE:
        caches.prompts[r].expected_tokens = caches.match[w] * caches.numbers[TREE_NODE_TOKENS]
        # The policies that go by what they sent: prefix-affinity, cache-aware, e2, d2lpm, e2-dynamic.
        if policy == AFFINITY or CACHE_AWARE <= policy <= D2LPM or policy == E2_DYNAMIC:
            promise_prompt(state, w, r)
    return w


@small_jit
def _hears_evictions(state, policy):
    """Whether a routing policy depends on what is evicted during runs of decode steps.

    It does if it looks at caches, or at pending prompt tokens, which leave out the tokens that the router
    took to be cached. Places of dlpm-turns depend on the tokens taken to be cached too.
    """
    by_turns = state.types[0].queue_order == TURNS
    if policy >= AFFINITY:
        return policy != CACHE_AWARE and (policy != TENANT_TURNS or by_turns)
    by_tokens = state.types[0].routing_weight[ARRIVAL_POOL, 0] > 0.0  # Index 0: the weight of pending tokens.
    return by_turns or by_tokens or policy == DEFERRED or policy == BEST_FIT or policy == REBALANCED


@kernel_jit
def _evict_for_runs(state, time_s):
    """Evict idle entries for the blocks that runs of decode steps have taken by `time_s`, on workers with a
    match. True if any was evicted.

    Otherwise routers would hear of these evictions only when the run ends (`decoding.advance_decodes`).
    """
    is_any = False
    for w in range(len(state.workers)):
        if state.caches.match[w] > 0:
            is_any |= evict_for_worker(state, w, time_s)
    return is_any


@kernel_jit
def evict_for_worker(state, w, time_s):
    """Evict idle entries of worker w for what its run of decode steps has taken by `time_s`. True if any was
    evicted.
    """
    if state.lanes[state.workers[w].first_lane].run_steps <= 1:
        return False
    idle_blocks = state.caches.workers[w].idle_blocks
    _evict_for_run(state, w, _taken_blocks(state, w, time_s), time_s)
    return state.caches.workers[w].idle_blocks < idle_blocks


@kernel_jit
def _evict_for_run(state, w, taken_blocks, time_s):
    """Evict idle entries of worker w for the blocks that its run has taken by `time_s`."""
    l = state.workers[w].first_lane
    evict_for_run(state, l, steps_done(state.lanes[l], time_s) + 1, taken_blocks, time_s)


@small_jit
def _taken_blocks(state, w, time_s):
    """KV blocks that the run of worker w has taken by `time_s`, which `used_blocks` does not count yet."""
    worker = state.workers[w]
    return blocks_of_run(state.types[worker.type], state.lanes[worker.first_lane], time_s)


@where_has("caches", lambda state, r: ZERO)
def expected_tokens(state, r):
    """Tokens of request r that the router believes its worker to have."""
    return state.caches.prompts[r].expected_tokens


@kernel_jit
def _match_nodes(state, r):
    """Set `match` to how many nodes of request r each worker has.

    The loop goes down the prompt's path while any worker has all nodes so far. A word of `alive` has a bit
    for each of 64 workers, which is set while the worker has all nodes; if it goes out at node i, the match
    is i.
    """
    caches = state.caches
    alive, match, words = caches.alive, caches.match, len(caches.alive)
    match[:] = 0
    nodes = cacheable_tree_nodes(state, r)
    for i in range(nodes + 1):
        is_any = False
        for k in range(words):
            having = caches.holders[tree_node_at(state, r, i), k] if i < nodes else np.uint64(0)
            if i > 0:
                having &= alive[k]
                gone = alive[k] & ~having
                while gone != 0:
                    match[64 * k + _lowest_bit(gone)] = i
                    gone &= gone - np.uint64(1)
            alive[k] = having
            is_any |= having != 0
        if not is_any:
            return


@small_jit
def _needed_blocks(state, r):
    """KV blocks of request r with its whole output."""
    return blocks_of(state.requests[r].input_tokens + state.requests[r].output_tokens)


@small_jit
def _missed_tokens(state, w, r):
    """Prompt tokens of request r that worker w would compute, by its match."""
    return state.requests[r].length_tokens - state.caches.match[w] * state.caches.numbers[TREE_NODE_TOKENS]


@kernel_jit
def _least_score(state, r, by_seconds):
    """The worker with the longest match, among equals the lowest score (prefix-affinity), or, `by_seconds`,
    with the least seconds of pending work and missed prefill (min-ttft). NONE if no worker can hold the
    request.
    """
    caches, need = state.caches, _needed_blocks(state, r)
    best, best_match, best_s = NONE, NONE, np.inf
    for i in range(state.counters[SIZE + ARRIVAL_POOL]):
        w = state.pools[ARRIVAL_POOL, i]
        if not fits_worker(state, w, need):
            continue
        seconds, match = state.score[w], caches.match[w]
        if by_seconds:
            seconds += _missed_tokens(state, w, r) * caches.workers[w].token_s
            match = ZERO
        if match > best_match or (match == best_match and seconds < best_s):
            best, best_match, best_s = w, match, seconds
    return best


@kernel_jit
def _pinned_worker(state, r):
    """By pinned-prefix: the worker with the least seconds, of those where the longest pinned prefix of
    request r is pinned, or of all workers if none of those can hold the request.
    """
    caches, need = state.caches, _needed_blocks(state, r)
    last = NONE  # The deepest node of the prompt that is pinned on any worker.
    nodes = cacheable_tree_nodes(state, r) if len(caches.pinned) > 0 else ZERO
    for i in range(nodes):
        node, is_any = tree_node_at(state, r, i), False
        for word in caches.pinned[node]:
            is_any |= word != 0
        if not is_any:
            break
        last = node
    if last == NONE:
        return _least_score(state, r, True)
    best, best_s = NONE, np.inf
    for i in range(state.counters[SIZE + ARRIVAL_POOL]):
        w = state.pools[ARRIVAL_POOL, i]
        is_pinned = (caches.pinned[last, w // 64] & worker_bit(w)) != 0
        if not is_pinned or not fits_worker(state, w, need):
            continue
        seconds = state.score[w] + _missed_tokens(state, w, r) * caches.workers[w].token_s
        if seconds < best_s:
            best, best_s = w, seconds
    return best if best != NONE else _least_score(state, r, True)


@kernel_jit
def _cache_aware_worker(state, r):
    """By cache-aware: the worker with the fewest requests while workers differ too much in requests, else
    that with the longest match or, if the match is too short, with the smallest cache. NONE if no worker can
    hold the request.
    """
    caches, need = state.caches, _needed_blocks(state, r)
    most, fewest, fewest_nodes = -np.inf, np.inf, UNBOUNDED
    idlest, smallest, longest = NONE, NONE, NONE  # Workers: fewest requests, smallest cache, longest match.
    for i in range(state.counters[SIZE + ARRIVAL_POOL]):
        w = state.pools[ARRIVAL_POOL, i]
        requests = state.workers[w].assigned
        most, fewest = max(most, requests), min(fewest, requests)
        if not fits_worker(state, w, need):
            continue
        if idlest == NONE or requests < state.workers[idlest].assigned:
            idlest = w
        if caches.workers[w].known_tree_nodes < fewest_nodes:
            smallest, fewest_nodes = w, caches.workers[w].known_tree_nodes
        if longest == NONE or caches.match[w] > caches.match[longest]:
            longest = w
    if longest == NONE:
        return NONE
    if most - fewest > caches.settings[BALANCE_REQUESTS] and most > caches.settings[BALANCE_RATIO] * fewest:
        return idlest
    is_long_enough = (
        caches.match[longest] * caches.numbers[TREE_NODE_TOKENS]
        > caches.settings[MATCH_FRAC] * state.requests[r].length_tokens
    )
    return longest if is_long_enough else smallest


@kernel_jit
def _e2_worker(state, r, time_s):
    """By e2 or e2-dynamic, as the module's docstring says: the worker for request r, which is added to the
    window. NONE if no worker can hold it.
    """
    caches, need, request = state.caches, _needed_blocks(state, r), state.requests[r]
    move_e2_window(state, time_s)
    _expect_decodes(state)
    longest_match = NONE  # In nodes.
    # The workers with the most and the fewest seconds of work in the window, and the one that decodes for the
    # largest share of them, if that is more than DECODE_FRAC.
    heaviest, most_s, lightest, fewest_s = NONE, -1.0, NONE, np.inf
    decoding, most_frac = NONE, caches.settings[DECODE_FRAC]
    for i in range(state.counters[SIZE + ARRIVAL_POOL]):
        w = state.pools[ARRIVAL_POOL, i]
        if not fits_worker(state, w, need):
            continue
        longest_match = max(longest_match, caches.match[w])
        cache = caches.workers[w]
        window_s = cache.prefill_s + cache.decode_s
        if window_s > most_s:
            heaviest, most_s = w, window_s
        if window_s < fewest_s:
            lightest, fewest_s = w, window_s
        if cache.decode_s > most_frac * window_s:
            decoding, most_frac = w, cache.decode_s / window_s
    if longest_match == NONE:
        return NONE
    if longest_match * caches.numbers[TREE_NODE_TOKENS] > _least_frac(state, time_s) * request.length_tokens:
        shared = _prefix_nodes(state, r, longest_match)
        chosen = _subtree_home(state, r, longest_match)
        if chosen == NONE:
            # All workers that have a replicated prefix are equally good: a longer match counts no more.
            least_match = shared if _is_replicated(state, r, shared) else longest_match
            chosen = _least_load(state, r, least_match, time_s)
        if chosen == heaviest and most_s > caches.settings[BALANCE_RATIO] * fewest_s:
            chosen = lightest
        elif _waits_longer(state, r, shared, time_s):
            other = _least_load(state, r, ZERO, time_s)
            if caches.match[other] < shared:
                chosen = other
                caches.prefixes[tree_node_at(state, r, shared - 1)].replicated_s = time_s
                _split_subtrees(state, r, shared, other)
    elif decoding != NONE:
        chosen = decoding
    else:
        chosen = _least_load(state, r, ZERO, time_s)
    prefill_s = _missed_tokens(state, chosen, r) * caches.workers[chosen].token_s
    remember_routed(state, chosen, r, time_s, prefill_s)
    return chosen


@kernel_jit
def _least_frac(state, time_s):
    """The longest match counts if more than this share of the prompt is cached: 1/2 in e2.

    In e2-dynamic it is 1 - u / 2, where workers were busy for a share u of the window.
    """
    caches, busy_s = state.caches, 0.0
    first = caches.numbers[FIRST_ROUTED]
    if state.counters[ROUTING + ARRIVAL_POOL] == E2 or first == NONE:
        return 0.5
    size = state.counters[SIZE + ARRIVAL_POOL]
    for i in range(size):
        cache = caches.workers[state.pools[ARRIVAL_POOL, i]]
        busy_s += cache.prefill_s + cache.decode_s
    all_s = size * (time_s - caches.prompts[first].routed_s)
    return 1.0 - min(busy_s, all_s) / all_s / 2.0 if all_s > 0.0 else 0.5


@kernel_jit
def _expect_decodes(state):
    """Estimate the decode seconds (`decode_s`) of e2's window on each worker.

    Each request counts with the mean output of those that have finished on its worker; where none has, with
    the mean of all workers.
    """
    caches = state.caches
    finished, tokens = ZERO, ZERO
    for w in range(len(state.workers)):
        finished += caches.workers[w].finished
        tokens += caches.workers[w].output_tokens
    for w in range(len(state.workers)):
        cache = caches.workers[w]
        mean = tokens / max(finished, ONE)
        if cache.finished > 0:
            mean = cache.output_tokens / cache.finished
        cache.decode_s = cache.routed * mean * cache.output_s


@kernel_jit
def _subtree_home(state, r, longest_match):
    """The worker that was given a subtree of the prompt, within the `longest_match` nodes that any worker
    has, and still has the prefix that the subtree follows; that of the deepest such subtree. NONE if there is
    none, or if the worker cannot take the request.
    """
    caches, need = state.caches, _needed_blocks(state, r)
    for i in range(min(longest_match, caches.prompts[r].depth - 1), 0, -1):
        home = caches.prefixes[tree_node_at(state, r, i)].home
        if home != NONE and caches.match[home] >= i:
            can_take = state.workers[home].status == IN_SERVICE and fits_worker(state, home, need)
            return home if can_take else NONE
    return NONE


@kernel_jit
def _split_subtrees(state, r, nodes, newest):
    """Divide the subtrees that follow the first `nodes` nodes of request r among the workers that have these
    nodes and `newest`, which is given them now.

    A subtree has the load of the requests of e2's window whose prompts begin with it. In order of time,
    subtrees stay at their worker until its load comes to an equal part; the others go to `newest`. Each of
    the three loops goes through the window: it clears the loads of subtrees, adds them up, then assigns the
    subtrees. A negative `load_s` marks a subtree that is assigned.
    """
    caches = state.caches
    prefix, workers, load_s = tree_node_at(state, r, nodes - 1), ONE, 0.0
    for w in range(len(state.workers)):
        caches.workers[w].split_s = 0.0
        workers += caches.match[w] >= nodes
    q = caches.numbers[FIRST_ROUTED]
    while q != NONE:
        if _is_below(state, q, nodes, prefix):
            caches.prefixes[tree_node_at(state, q, nodes)].load_s = 0.0
        q = caches.prompts[q].next
    q = caches.numbers[FIRST_ROUTED]
    while q != NONE:
        if _is_below(state, q, nodes, prefix):
            cache = caches.workers[caches.prompts[q].worker]
            own_s = caches.prompts[q].prefill_s + cache.decode_s / cache.routed
            caches.prefixes[tree_node_at(state, q, nodes)].load_s += own_s
            load_s += own_s
        q = caches.prompts[q].next
    q = caches.numbers[FIRST_ROUTED]
    while q != NONE:
        if _is_below(state, q, nodes, prefix):
            subtree = caches.prefixes[tree_node_at(state, q, nodes)]
            if subtree.load_s >= 0.0:
                home = subtree.home if subtree.home != NONE else caches.prompts[q].worker
                # A subtree may go over the equal part with at most half of its load.
                is_full = caches.workers[home].split_s + subtree.load_s / 2 > load_s / workers
                if is_full or caches.match[home] < nodes:
                    home = newest
                subtree.home = home
                caches.workers[home].split_s += subtree.load_s
                subtree.load_s = -1.0
        q = caches.prompts[q].next


@small_jit
def _is_below(state, q, nodes, prefix):
    """Whether the first `nodes` nodes of request q end with node `prefix`, and more nodes follow."""
    return state.caches.prompts[q].depth > nodes and tree_node_at(state, q, nodes - 1) == prefix


@kernel_jit
def _prefix_nodes(state, r, most):
    """The length, in nodes, of the deepest prefix of request r, of `most` nodes at most, whose waits are
    counted or that was replicated.
    """
    for i in range(most - 1, -1, -1):
        prefix = state.caches.prefixes[tree_node_at(state, r, i)]
        if prefix.wait_count[0] + prefix.wait_count[1] > 0 or prefix.replicated_s > -np.inf:
            return i + 1
    return ZERO


@small_jit
def _is_replicated(state, r, nodes):
    """Whether the prefix of the first `nodes` nodes of request r was ever replicated."""
    return nodes > 0 and state.caches.prefixes[tree_node_at(state, r, nodes - 1)].replicated_s > -np.inf


@kernel_jit
def _waits_longer(state, r, nodes, time_s):
    """Whether the mean wait of the second half of the window is at least REPLICATE_RATIO times that of the
    first, and the prefix was not replicated within the window.
    """
    if nodes == 0:
        return False
    caches = state.caches
    prefix = caches.prefixes[tree_node_at(state, r, nodes - 1)]
    if prefix.wait_count[0] == 0 or prefix.wait_count[1] == 0 or prefix.wait_s[1] <= 0.0:
        return False
    # Each mean is multiplied by both counts, which spares the divisions.
    before_s, now_s = prefix.wait_s[0] * prefix.wait_count[1], prefix.wait_s[1] * prefix.wait_count[0]
    was_replicated = time_s - prefix.replicated_s < caches.settings[WINDOW_S]
    return now_s >= caches.settings[REPLICATE_RATIO] * before_s and not was_replicated


@kernel_jit
def _least_load(state, r, least_match, time_s):
    """The worker with the least load, request r included, of those that have `least_match` of its nodes."""
    caches, need = state.caches, _needed_blocks(state, r)
    chosen, least_s = NONE, np.inf
    for i in range(state.counters[SIZE + ARRIVAL_POOL]):
        w = state.pools[ARRIVAL_POOL, i]
        if caches.match[w] < least_match or not fits_worker(state, w, need):
            continue
        cache = caches.workers[w]
        load_s = cache.prefill_s + cache.decode_s + _missed_tokens(state, w, r) * cache.token_s
        if load_s < least_s:  # Evictions take long to add up, and can only make the load larger.
            load_s += _eviction_s(state, w, r, least_s - load_s, time_s)
            if load_s < least_s:
                chosen, least_s = w, load_s
    return chosen


@kernel_jit
def _eviction_s(state, w, r, most_s, time_s):
    """The worth [s] of the nodes that worker w would evict for request r, per request of e2's window; the sum
    ends once it reaches `most_s`. A node of which another copy stays is worth nothing.
    """
    caches, worker = state.caches, state.workers[w]
    cache, node_blocks = caches.workers[w], caches.numbers[TREE_NODE_BLOCKS]
    if cache.routed == 0:
        return 0.0
    taken = _taken_blocks(state, w, time_s)
    _evict_for_run(state, w, taken, time_s)
    taken += worker.late_blocks
    free = state.types[worker.type].kv_blocks - worker.used_blocks - taken - cache.idle_blocks
    missing = blocks_of(state.requests[r].length_tokens) - caches.match[w] * node_blocks - free
    node_s = caches.numbers[TREE_NODE_TOKENS] * cache.token_s / cache.routed
    seconds, e = 0.0, cache.oldest
    while missing > 0 and e != NONE and seconds < most_s:
        # If a node has several copies, `window_uses` is counted in the first, which has a twin.
        if caches.entries[e].twin == NONE:
            seconds += caches.entries[e].window_uses * node_s
        missing -= caches.entries[e].blocks
        e = np.int64(caches.entries[e].newer)
    return seconds


@kernel_jit
def _d2lpm_worker(state, r):
    """By d2lpm: of the workers on which the tenant of request r has credit, the one with the fewest requests
    among the longest matches, else among all. The tenant pays for the missed tokens from its credit there.
    NONE if no worker can hold the request.
    """
    caches, need = state.caches, _needed_blocks(state, r)
    credit = caches.worker_credit[caches.prompts[r].tenant]
    weight = caches.weights[caches.prompts[r].tenant]
    quantum = caches.settings[WORKER_QUANTUM_TOKENS] * weight
    longest_match, most = NONE, -np.inf  # The longest match in nodes, and the most credit.
    for i in range(state.counters[SIZE + ARRIVAL_POOL]):
        w = state.pools[ARRIVAL_POOL, i]
        if fits_worker(state, w, need):
            longest_match = max(longest_match, caches.match[w])
            most = max(most, credit[w])
    if longest_match == NONE:
        return NONE
    # Each worker gets as many quanta as give the tenant credit on some worker. Rounding may leave this credit
    # at 0; then one more round follows.
    while most <= 0.0:
        quanta = np.floor(-most / quantum) + 1.0
        most += quanta * quantum
        for w in range(len(credit)):
            credit[w] += quanta * quantum
    best, has_best_longest = NONE, False
    for i in range(state.counters[SIZE + ARRIVAL_POOL]):
        w = state.pools[ARRIVAL_POOL, i]
        if credit[w] <= 0.0 or not fits_worker(state, w, need):
            continue
        has_longest = caches.match[w] == longest_match
        is_fewer = best == NONE or state.workers[w].assigned < state.workers[best].assigned
        if has_longest > has_best_longest or (has_longest == has_best_longest and is_fewer):
            best, has_best_longest = w, has_longest
    credit[best] -= caches.settings[EXTEND_WEIGHT] * _missed_tokens(state, best, r)
    return best


@kernel_jit
def _tenants_turn(state, r):
    """By tenant-round-robin: the next worker in its tenant's turn that can hold r; NONE if none can."""
    caches, need, size = state.caches, _needed_blocks(state, r), state.counters[SIZE + ARRIVAL_POOL]
    tenant = caches.prompts[r].tenant
    for _ in range(size):
        w = state.pools[ARRIVAL_POOL, caches.tenant_turns[tenant] % size]
        caches.tenant_turns[tenant] += 1
        if fits_worker(state, w, need):
            return w
    return NONE
