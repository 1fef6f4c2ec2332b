"""The queue dlpm-held: the router holds the prompts of each worker and sends them by dlpm (queue_orders.py).

An engine serves prompts as they come, and dlpm would choose anew whenever the engine has room: with what is
cached by then, and with the credit that tenants have by then. So the router chooses as late as it can. An
engine has SENT_PROMPTS prompts without a first token, or prompts for SENT_STEPS steps, whichever is more: one
is being computed, and the next one is there when that step ends. All others wait at the router.

The router knows of a prompt's end when its first token is out. It charges the tenant for the tokens of a
prompt that are not cached when it sends the prompt, and for the output when that is complete. Letters: w is a
worker, r a request.
"""

from __future__ import annotations

from planner.policies import DLPM_HELD
from planner.simulator.cache_layout import EXTEND_WEIGHT, TREE_NODE_TOKENS
from planner.simulator.caches import cached_tree_nodes
from planner.simulator.layout import AT_ROUTER, HELD_PROMPTS, NONE, ZERO
from planner.simulator.numba_compile import kernel_jit, where_has
from planner.simulator.queue_orders import charge_tenant, count_waiting_prompt, refill_credit
from planner.simulator.queues import append_to_list, remove_from_list

SENT_PROMPTS, SENT_STEPS = 2, 2  # One is being computed, and one is next.


@where_has("caches", lambda state, w, r: False)
def hold_prompt(state, w, r):
    """Let request r, which was routed to worker w, wait at the router; False if the queue holds none."""
    worker = state.workers[w]
    if state.types[worker.type].queue_order != DLPM_HELD:
        return False
    count_waiting_prompt(state, w, r)
    state.caches.prompts[r].sent_tokens = 0
    append_to_list(state.requests, worker, AT_ROUTER, r)
    state.counters[HELD_PROMPTS] += 1
    return True


@where_has("caches", lambda state, w, r: None)
def remove_held(state, w, r):
    """Take request r, which waits at the router for worker w, out of the router's list."""
    remove_from_list(state.requests, state.workers[w], AT_ROUTER, r)
    state.caches.tenants[w, state.caches.prompts[r].tenant].waiting -= 1
    state.counters[HELD_PROMPTS] -= 1


@where_has("caches", lambda state, w: NONE)
def pop_held(state, w):
    """Take the first request that waits at the router for worker w out of the list; NONE if none waits."""
    r = state.workers[w].head[AT_ROUTER]
    if r != NONE:
        remove_held(state, w, r)
    return r


@kernel_jit
def is_held_prompt_due(state, w):
    """Whether the router sends worker w a prompt now: one waits, and the worker has too few to go on with."""
    cache, kind = state.caches.workers[w], state.types[state.workers[w].type]
    has_enough = cache.sent_prompts >= SENT_PROMPTS and cache.sent_tokens >= SENT_STEPS * kind.token_budget
    return state.workers[w].head[AT_ROUTER] != NONE and not has_enough


@kernel_jit
def send_next_held(state, w):
    """The prompt that the router sends to worker w now, taken out of the list, its tenant charged; NONE if
    none is due.
    """
    if not is_held_prompt_due(state, w):
        return NONE
    refill_credit(state, w)
    caches = state.caches
    # Of the tenants with credit the prompt with the most cached nodes, of equals the first to arrive.
    best, most, r = NONE, NONE, state.workers[w].head[AT_ROUTER]
    while r != NONE:
        if caches.tenants[w, caches.prompts[r].tenant].credit > 0.0:
            nodes = cached_tree_nodes(state, w, r)
            if nodes > most:
                best, most = r, nodes
        r = state.requests[r].next
    remove_held(state, w, best)
    cache, prompt = caches.workers[w], caches.prompts[best]
    cache.served_tenant = prompt.tenant
    missed_tokens = state.requests[best].length_tokens - most * caches.numbers[TREE_NODE_TOKENS]
    charge_tenant(state, w, prompt.tenant, caches.settings[EXTEND_WEIGHT] * missed_tokens)
    prompt.sent_tokens = max(missed_tokens, 1)  # A whole prompt is never cached, but 0 means "not sent".
    cache.sent_prompts += 1
    cache.sent_tokens += prompt.sent_tokens
    cache.ever_sent += 1.0
    prompt.place = cache.ever_sent
    return best


@where_has("caches", lambda state, w, r: None)
def note_first_token(state, w, r):
    """The first token of request r is out on worker w, or r has left it: the router may send another one."""
    cache, prompt = state.caches.workers[w], state.caches.prompts[r]
    if prompt.sent_tokens > 0:
        cache.sent_prompts -= 1
        cache.sent_tokens -= prompt.sent_tokens
        prompt.sent_tokens = ZERO
