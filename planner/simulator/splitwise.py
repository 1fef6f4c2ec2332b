"""Splitwise's machines and pools (Patel et al. 2024, arXiv:2311.18677), as its public simulator runs them.

A request is a prompt task, which makes the first token, and a token task, which makes the others. Both run on
one machine, or the prompt's KV moves to another in between; both machines are chosen on arrival. A machine
runs one batch of tasks at a time: a step if there is a prompt in it, else, in closed form, steps until the
first decode is done. What arrives cuts such a run at the end of its step. The next batch is, in this order:
tasks left out of several batches (ageing), prompts, decodes that were evicted, decodes that run, all others
by arrival; a prompt as long as the batch evicts every decode. KV is reserved when a task first runs, for the
prompt and one token, then for all tokens to come. Transfers do not wait for each other, unless the link is
shared; where the target has no room they ask again every second.

Pools "splitwise": a machine of the other pool becomes mixed where a prompt finds only long queues or the
tokens no room, and goes home when it has nothing left.

Habits of that program that are kept, because its results depend on them: the list of tasks that wait is in
order of (batches left out, arrival) as that was when each was put in, by bisection of a list that is no
longer sorted; ageing counts batches formed, not steps. Under routing "kv-token-jsq", and only there: the load
of a new request is never added, though subtracted when it is done, so that one machine of each pool gets
everything. Not kept: what can never go on, because memory is reserved by tasks that wait for more, is
rejected, where the program would turn without end.
"""

from __future__ import annotations

import numpy as np

from planner.simulator import layout
from planner.simulator.agenda import PENDING, schedule
from planner.simulator.compiled import SOURCES, entry_jit, kernel_jit, small_jit
from planner.simulator.counting import (
    count,
    in_window,
    is_broken,
    let_in,
    record_run,
    run_s,
    settle_gap,
    steps_reaching,
)
from planner.simulator.kernel import decoded
from planner.simulator.layout import DONE, MACHINE, NONE, ONE, TASK, TTFT, UNFINISHED, ZERO, State
from planner.simulator.pointers import pointer_to
from planner.simulator.slots import assign, blocks_of, finish, load, reject
from planner.simulator.step_times import step_seconds
from planner.simulator.transfer import transfer_end_s

MAX_SKIPS = 4  # batches a task is left out of before it comes first
PROMPT_QUEUE_TOKENS = 8192.0  # no more prompts than that behind one that waits
RETRY_S = 1.0  # until a transfer asks again for room

WAITING, PROMPTS, EVICTED = np.int64(0), np.int64(1), np.int64(2)  # lists of a machine; the first holds all
PROMPT_POOL, TOKEN_POOL, MIXED_POOL = np.int64(0), np.int64(1), np.int64(2)
PROMPT, FRESH, HAS_RUN = np.int64(0), np.int64(1), np.int64(2)  # phases of a request: prompt, then token task

# of `marks`, after those of the agenda: requests that have arrived, that may arrive, transfers that wait for
# room, queues about to overflow, tasks that came; loads count, machines change pools; sizes of the pools
ENTERED, RELEASED, RETRYING, IS_FULL, ORDER, ADDS, MOVES = range(2, 9)
SIZES = np.int64(9)
MARKS = 12


# ------------------------------------------------------------------------------------------ tasks that wait


@small_jit
def _skips(m, w, code):
    task = m.tasks[code >> 1]
    if code & 1 and task.phase == PROMPT:  # its prompt waits in its stead
        return ZERO
    return task.skips + m.machines[w].batches


@kernel_jit
def _queue(m, w, code, skips):
    """Put a task into the queue, where bisection finds its place by (skips, arrival)."""
    worker, requests = m.workers[w], m.requests
    arrival_s = requests[code >> 1].arrival_s
    low, high = 0, worker.waits
    while low < high:
        middle = (low + high) // 2
        other = m.queues[w, middle]
        other_skips = _skips(m, w, other)
        if skips < other_skips or (skips == other_skips and arrival_s < requests[other >> 1].arrival_s):
            high = middle
        else:
            low = middle + 1
    for i in range(worker.waits, low, -1):
        m.queues[w, i] = m.queues[w, i - 1]
    m.queues[w, low] = code
    worker.waits += 1
    if worker.waits + len(m.picks) + 2 > m.queues.shape[1]:
        m.marks[IS_FULL] = 1


@kernel_jit
def _unqueue(m, w, code):
    worker = m.workers[w]
    i = 0
    while m.queues[w, i] != code:
        i += 1
    worker.waits -= 1
    for j in range(i, worker.waits):
        m.queues[w, j] = m.queues[w, j + 1]


@kernel_jit
def _insert(m, w, which, r, before):
    """Put request r into a list, before `before`, or at its end."""
    worker, k = m.workers[w], min(which, ONE)
    after = worker.tail[which] if before == NONE else m.tasks[before].previous[k]
    m.tasks[r].next[k], m.tasks[r].previous[k] = before, after
    if after == NONE:
        worker.head[which] = r
    else:
        m.tasks[after].next[k] = r
    if before == NONE:
        worker.tail[which] = r
    else:
        m.tasks[before].previous[k] = r


@kernel_jit
def _remove(m, w, which, r):
    worker, k = m.workers[w], min(which, ONE)
    before, after = m.tasks[r].next[k], m.tasks[r].previous[k]
    if after == NONE:
        worker.head[which] = before
    else:
        m.tasks[after].next[k] = before
    if before == NONE:
        worker.tail[which] = after
    else:
        m.tasks[before].previous[k] = after


@small_jit
def _comes_before(m, r, other):
    arrival_s, other_s = m.requests[r].arrival_s, m.requests[other].arrival_s
    return arrival_s < other_s or (arrival_s == other_s and m.tasks[r].order < m.tasks[other].order)


@kernel_jit
def _wait(m, w, r):
    """Put request r among all that wait on machine w, in order of arrival; search from the nearer end."""
    worker, arrival_s = m.workers[w], m.requests[r].arrival_s
    before = worker.head[WAITING]
    if before != NONE:
        last = worker.tail[WAITING]
        if arrival_s - m.requests[before].arrival_s < m.requests[last].arrival_s - arrival_s:
            while before != NONE and _comes_before(m, before, r):
                before = m.tasks[before].next[0]
        else:
            before = NONE
            while last != NONE and _comes_before(m, r, last):
                before, last = last, m.tasks[last].previous[0]
    _insert(m, w, WAITING, r, before)


# --------------------------------------------------------------------------------------------------- batches


@small_jit
def _tokens(m, r):
    return m.requests[r].input if m.tasks[r].phase == PROMPT else ONE


@kernel_jit
def _need(m, r):
    """Tokens of KV that the task of r will reserve when it runs."""
    request, phase = m.requests[r], m.tasks[r].phase
    if phase == PROMPT:
        return request.input + 1
    return request.output - 1 if phase == FRESH else ZERO


@kernel_jit
def _is_full(m, w, r):
    machine, kind = m.machines[w], m.types[m.workers[w].type]
    return machine.tasks == kind.seats or (machine.tasks > 0 and machine.tokens + _tokens(m, r) > kind.budget)


@kernel_jit
def _take(m, w, r):
    """Pick the task of r for the batch, if memory holds it."""
    machine, task = m.machines[w], m.tasks[r]
    need = _need(m, r)
    if machine.claimed + need > machine.capacity and task.phase != HAS_RUN:
        return False
    task.is_picked = 1
    m.picks[machine.picks] = r
    machine.picks += 1
    machine.tasks += 1
    machine.tokens += _tokens(m, r)
    machine.claimed += need
    return True


@kernel_jit
def _select(m, w):
    """Pick who joins the batch of machine w; how many of its decodes stay.

    Every class ends where the batch is full. Prompts, and the others, end at the first that memory cannot
    hold; the aged pass over it.
    """
    worker, machine = m.workers[w], m.machines[w]
    kind, decodes = m.types[worker.type], m.lanes[w].decodes
    machine.picks, machine.tasks, machine.tokens, machine.claimed = 0, 0, 0, machine.held
    for i in range(worker.waits):
        code = m.queues[w, i]
        if _skips(m, w, code) < MAX_SKIPS or _is_full(m, w, code >> 1):
            break
        if m.tasks[code >> 1].is_picked == 0:
            _take(m, w, code >> 1)
    for which in (PROMPTS, EVICTED):
        r = worker.head[which]
        while r != NONE and not _is_full(m, w, r) and (m.tasks[r].is_picked or _take(m, w, r)):
            r = m.tasks[r].next[1]
    stay = min(decodes, kind.seats - machine.tasks, max(kind.budget - machine.tokens, ZERO))
    machine.tasks += stay
    machine.tokens += stay
    r = worker.head[WAITING] if stay == decodes else NONE
    while r != NONE and (m.tasks[r].is_picked or (not _is_full(m, w, r) and _take(m, w, r))):
        r = m.tasks[r].next[0]
    return stay


@kernel_jit
def _evict(m, w, stay):
    """Only the first `stay` decodes go on."""
    lane, batches = m.lanes[w], m.machines[w].batches
    for i in range(stay, lane.decodes):
        settle_gap(m, w, i)
        slot = m.slots[w, i]
        r = slot.request
        request, task = m.requests[r], m.tasks[r]
        request.generated = request.output - (slot.finish - lane.step)
        request.last_token_s = lane.last_token_s
        request.preemptions += 1
        lane.kv_sum -= slot.context + lane.step + 1
        _queue(m, w, 2 * r + 1, task.skips)
        task.skips -= batches
        task.phase = HAS_RUN
        _insert(m, w, EVICTED, r, NONE)
        _wait(m, w, r)
    lane.decodes = stay
    _refresh_next_finish(m, w)


@kernel_jit
def _refresh_next_finish(m, w):
    lane = m.lanes[w]
    lane.next_finish = np.iinfo(np.int64).max
    for slot in range(lane.decodes):
        lane.next_finish = min(lane.next_finish, m.slots[w, slot].finish)


@kernel_jit
def _join(m, w, r, now):
    """The picked task of r leaves all lists and is in the batch."""
    machine, lane = m.machines[w], m.lanes[w]
    request, task = m.requests[r], m.tasks[r]
    task.is_picked = 0
    task.skips += machine.batches
    machine.held += _need(m, r)
    _remove(m, w, WAITING, r)
    if task.phase == PROMPT:
        _unqueue(m, w, 2 * r)
        _remove(m, w, PROMPTS, r)
        request.scheduled_s = now
        m.members[w, lane.members].request = r
        lane.members += 1
        n = request.input
        lane.prefill_tokens += n
        lane.pairs += 0.5 * n * (n + 1)
        lane.squares += float(n) * n
        return
    _unqueue(m, w, 2 * r + 1)
    if task.phase == HAS_RUN:
        _remove(m, w, EVICTED, r)
    slot = m.slots[w, lane.decodes]
    slot.request = r
    slot.finish = lane.step + request.output - request.generated
    slot.context = request.input + request.generated - 1 - lane.step
    slot.since = lane.step
    if lane.decodes == 0:
        lane.next_finish = slot.finish
        lane.last_token_s, lane.late = request.last_token_s, 0
    else:
        lane.next_finish = min(lane.next_finish, slot.finish)
        if lane.late > 0 or request.last_token_s != lane.last_token_s:
            lane.late += 1
    lane.kv_sum += slot.context + lane.step + 1
    lane.decodes += 1


@kernel_jit
def _start(m, w, now):
    """Form the next batch of machine w, whose last one has ended, and run it."""
    worker, lane, machine = m.workers[w], m.lanes[w], m.machines[w]
    kind = m.types[worker.type]
    machine.is_cut = 0
    lane.members, lane.prefill_tokens, lane.pairs, lane.squares = 0, 0, 0.0, 0.0
    if worker.head[WAITING] != NONE:
        stay = _select(m, w)
        if stay < lane.decodes:
            _evict(m, w, stay)
        for i in range(machine.picks):
            _join(m, w, m.picks[i], now)
        worker.used = blocks_of(machine.held)
    machine.batches += 1
    if lane.members + lane.decodes == 0:
        lane.run_steps = 0
        schedule(m, w, np.inf)
        if worker.running == 0 and machine.pool != machine.home:
            _move(m, w, machine.home)
        return
    first, extra, _, growth, longest = step_seconds(
        m, kind, lane.decodes, lane.kv_sum, lane.prefill_tokens, lane.pairs, lane.squares, 0.0, lane.members
    )
    lane.run_start, lane.run_first, lane.run_growth = now, first + extra, growth
    lane.run_steps = 1 if lane.members > 0 else min(lane.next_finish - lane.step, longest)
    schedule(m, w, now + run_s(lane.run_first, growth, lane.run_steps))


@kernel_jit
def _cut(m, w, now):
    """End a batch of decodes alone with the step it is in."""
    lane, machine = m.lanes[w], m.machines[w]
    if machine.is_cut == 0 and lane.members == 0:
        machine.is_cut = 1
        after = np.nextafter(now, np.inf)
        j = steps_reaching(lane.run_start, lane.run_first, lane.run_growth, after)
        lane.run_steps = min(lane.run_steps, j)
        schedule(m, w, lane.run_start + run_s(lane.run_first, lane.run_growth, lane.run_steps))


@kernel_jit
def _arrive(m, w, code, now):
    """A task comes to machine w; True if that is to start now."""
    worker, lane, machine = m.workers[w], m.lanes[w], m.machines[w]
    kind = m.types[worker.type]
    r, is_prompt = code >> 1, code & 1 == 0
    task, tokens = m.tasks[r], ONE
    if is_prompt:
        tokens = m.requests[r].input
        _insert(m, w, PROMPTS, r, NONE)
    if task.phase != PROMPT or is_prompt:
        worker.running += 1
        task.order = m.marks[ORDER]
        m.marks[ORDER] += 1
        task.skips = -machine.batches
        _wait(m, w, r)
    _queue(m, w, code, ZERO)
    running = lane.decodes + lane.members
    if running == 0:
        need = m.requests[r].input + 1 if is_prompt else m.requests[r].output - 1
        return machine.held + need <= machine.capacity
    if (running < kind.seats and running + tokens <= kind.budget) or (is_prompt and tokens <= kind.budget):
        _cut(m, w, now)
    return False


@kernel_jit
def _end(m, w, now):
    """The batch of machine w has run: tokens leave, decodes finish, prompts go on to their tokens."""
    worker, lane = m.workers[w], m.lanes[w]
    steps = lane.run_steps
    worker.busy_s += now - lane.run_start
    worker.steps += steps
    worker.tokens += lane.prefill_tokens
    if lane.decodes > 0:
        if steps > 1 and (lane.late > 0 or lane.last_token_s != lane.run_start):
            first_end = lane.run_start + lane.run_first
            decoded(m, w, ONE, first_end)
            lane.run_start = first_end
            lane.run_first += lane.run_growth
            steps -= 1
        decoded(m, w, steps, now)
        if lane.step == lane.next_finish:
            _finish_decodes(m, w, now)
    elif len(m.runs) > 0:
        record_run(
            m, w, lane.run_start, lane.run_first, 0.0, ONE, ZERO, ZERO, lane.prefill_tokens, worker.used
        )
    for i in range(lane.members):
        _first_token(m, w, m.members[w, i].request, now)
    lane.members = 0


@kernel_jit
def _finish_decodes(m, w, now):
    lane, slots = m.lanes[w], m.slots
    kept = 0
    for i in range(lane.decodes):
        slot = slots[w, i]
        if slot.finish > lane.step:
            if kept < i:
                slots[w, kept] = slot
            kept += 1
            continue
        settle_gap(m, w, i)
        lane.kv_sum -= slot.context + lane.step + 1
        _finish(m, w, slot.request, now)
    lane.decodes = kept
    _refresh_next_finish(m, w)


@kernel_jit
def _finish(m, w, r, now):
    whole = m.requests[r].input + m.requests[r].output
    m.machines[w].held -= whole
    m.machines[w].reserved -= whole
    finish(m, w, r, now)


@kernel_jit
def _first_token(m, w, r, now):
    """The prompt of r is computed."""
    request, task = m.requests[r], m.tasks[r]
    request.first_token_s = request.last_token_s = now
    request.generated = 1
    load(m, w, -float(request.input), 0.0, 0.0)
    if in_window(m, request.arrival_s):
        count(m, TTFT, now - request.arrival_s)
    task.phase = FRESH
    if request.output == 1:
        _finish(m, w, r, now)
    elif request.decode_worker == w:
        task.skips = -m.machines[w].batches
        _wait(m, w, r)
    else:
        m.workers[w].running -= 1
        request.transfer_s = now - m.lanes[w].run_start
        _send(m, r, now)


# ----------------------------------------------------------------------------------- from prompt to tokens


@small_jit
def _has_room(m, r):
    target = m.machines[m.requests[r].decode_worker]
    return target.held + m.requests[r].input + 1 <= target.capacity


@kernel_jit
def _send(m, r, now):
    """Move the KV of r to its token machine, once there is room."""
    request, entity = m.requests[r], len(m.workers) + r
    if not _has_room(m, r):
        m.marks[RETRYING] += 1
        schedule(m, entity, now + RETRY_S)
        return
    m.machines[request.decode_worker].held += request.input + 1
    m.tasks[r].is_sent = 1
    schedule(m, entity, transfer_end_s(m, r, request.input / 16.0, now))


@kernel_jit
def _release(m, w, r):
    """The KV of r has left its prompt machine w."""
    machine, tokens = m.machines[w], m.requests[r].input + 1
    machine.held -= tokens
    machine.reserved -= tokens


@kernel_jit
def _has_room_again(m, w, now):
    """Memory of machine w was given back: cut its batch for those that wait; True if it is to start now."""
    worker, lane, machine = m.workers[w], m.lanes[w], m.machines[w]
    kind = m.types[worker.type]
    if worker.waits == 0:
        return False
    running = lane.decodes + lane.members
    if running == 0:
        code = m.queues[w, 0]
        request = m.requests[code >> 1]
        need = request.output - 1 if code & 1 else request.input + 1
        return machine.held + need <= machine.capacity
    if running < min(kind.seats, kind.budget):
        _cut(m, w, now)
    return False


# ---------------------------------------------------------------------------------------- pools and routing


@kernel_jit
def _move(m, w, pool):
    """Machine w leaves its pool and becomes the last of another."""
    old, place = m.machines[w].pool, 0
    while m.pools[old, place] != w:
        place += 1
    m.marks[SIZES + old] -= 1
    for i in range(place, m.marks[SIZES + old]):
        m.pools[old, i] = m.pools[old, i + 1]
    m.pools[pool, m.marks[SIZES + pool]] = w
    m.marks[SIZES + pool] += 1
    m.machines[w].pool = pool


@kernel_jit
def _least_pending(m, pool, need, best):
    """The machine of `pool` with the smallest score, if that is below the one of machine `best`."""
    for i in range(m.marks[SIZES + pool]):
        w = m.pools[pool, i]
        if (best == NONE or m.score[w] < m.score[best]) and need <= m.machines[w].capacity:
            best = w
    return best


@kernel_jit
def _least_reserved(m, pool, need):
    best = NONE
    for i in range(m.marks[SIZES + pool]):
        w = m.pools[pool, i]
        if (best == NONE or m.machines[w].reserved < m.machines[best].reserved) and (
            need <= m.machines[w].capacity
        ):
            best = w
    return best


@kernel_jit
def _route_moving(m, prompt, whole):
    """Splitwise's mixed pool: machines for a prompt and its tokens; they may change pools for it."""
    source, target = NONE, NONE
    for pool in (PROMPT_POOL, MIXED_POOL):
        if source == NONE:
            w = _least_pending(m, pool, prompt, NONE)
            worker = m.workers[max(w, ZERO)]
            if w != NONE and (
                worker.waits == 0
                or worker.pending_tokens + worker.requests + prompt - 1 <= PROMPT_QUEUE_TOKENS
            ):
                source = w
    for pool in (TOKEN_POOL, MIXED_POOL):
        if target == NONE:
            w = _least_reserved(m, pool, whole)
            if w != NONE and m.machines[w].reserved + whole <= m.machines[w].capacity:
                target = w
    if source == NONE:
        source = _least_pending(m, TOKEN_POOL, prompt, NONE)
        if source != NONE:
            _move(m, source, MIXED_POOL)
    if target == NONE:
        target = _least_reserved(m, PROMPT_POOL, whole)
        if target != NONE:
            _move(m, target, MIXED_POOL)
    if source == NONE or target == NONE:
        source = _least_pending(m, PROMPT_POOL, whole, NONE)
        source = _least_pending(m, MIXED_POOL, whole, source)
        source = _least_pending(m, TOKEN_POOL, whole, source)
        target = source
    return source, target


@kernel_jit
def _route(m, r):
    """Choose the machines of request r, and count its load; False if no machine can hold it."""
    request = m.requests[r]
    prompt, whole = request.input + 1, request.input + request.output
    if m.marks[MOVES]:
        source, target = _route_moving(m, prompt, whole)
    else:
        source = _least_pending(m, PROMPT_POOL, prompt, NONE)
        source = target = _least_pending(m, MIXED_POOL, whole, source)
        if source != NONE and m.machines[source].pool == PROMPT_POOL:
            target = _least_pending(m, TOKEN_POOL, whole, NONE)
    if source == NONE or target == NONE:
        reject(m, r)
        return False
    if request.output == 1:
        target = source
    request.prefill_worker, request.decode_worker = source, target
    if m.marks[ADDS]:
        load(m, source, float(request.input), 0.0, 0.0)
        assign(m, target, r, 1.0)
    if source != target:
        m.machines[source].reserved += prompt
    m.machines[target].reserved += whole
    return True


@kernel_jit
def _is_stuck(m):
    """Nothing will happen but transfers that ask, in vain, for room."""
    if m.marks[PENDING] > m.marks[RETRYING]:
        return False
    for i in range(m.marks[PENDING]):
        if _has_room(m, m.heap[i] - len(m.workers)):
            return False
    return True


@kernel_jit
def _reject_rest(m):
    for r in range(len(m.requests)):
        if m.requests[r].status == UNFINISHED:
            reject(m, r)


def _entry(sources):
    @entry_jit
    def run(fields, closed_loop, stop_early):
        m = pointer_to(fields)
        n = len(m.requests) if sources > 0 else 0  # closed over: `sources` is part of the cache's key
        machines, marks = len(m.workers), m.marks
        while m.counters[DONE] < n:
            if marks[IS_FULL]:
                return True
            w, code, starts, now = NONE, NONE, NONE, np.inf
            if marks[PENDING] > 0:
                now = m.time[m.heap[0]]
            r = marks[ENTERED]
            if r < marks[RELEASED] and m.requests[r].arrival_s <= now:
                now = m.requests[r].arrival_s
                marks[ENTERED] += 1
                if _route(m, r):
                    w, code = m.requests[r].prefill_worker, 2 * r
            elif _is_stuck(m):
                _reject_rest(m)
            elif m.heap[0] < machines:
                starts = m.heap[0]
                _end(m, starts, now)
            else:
                r = m.heap[0] - machines
                schedule(m, m.heap[0], np.inf)
                if m.tasks[r].is_sent:
                    w, code = m.requests[r].decode_worker, 2 * r + 1
                    _release(m, m.requests[r].prefill_worker, r)
                else:
                    marks[RETRYING] -= 1
                    _send(m, r, now)
            while code != NONE or starts != NONE:
                if code != NONE and _arrive(m, w, code, now):
                    starts = w
                if starts != NONE:
                    _start(m, starts, now)
                    starts = NONE
                if code == NONE:
                    break
                request = m.requests[code >> 1]
                if code & 1 == 0 and request.decode_worker == w and request.output > 1:
                    code += 1  # the tokens come to the same machine
                    continue
                if (
                    code & 1
                    and request.prefill_worker != w
                    and _has_room_again(m, request.prefill_worker, now)
                ):
                    starts = request.prefill_worker
                code = NONE
            if closed_loop > 0:
                marks[RELEASED] = let_in(m, marks[RELEASED], closed_loop, now)
            if stop_early and is_broken(m):
                return False
        return False

    return run


run = _entry(SOURCES)
run.__doc__ = """Simulate until every request is done or, with `stop_early`, until a limit can no longer hold.

True if a queue is about to overflow: call it again with longer ones.
"""


def simulate(state: State, *, adds: bool, moves: bool, closed_loop: int, stop_early: bool) -> None:
    """Fill in `state`. `adds`: the load of new requests counts; `moves`: machines move between pools."""
    count, n, seats = len(state.workers), len(state.requests), state.slots.shape[1]
    roles = state.workers["role"]
    home = np.select([roles == layout.PREFILL, roles == layout.DECODE], [PROMPT_POOL, TOKEN_POOL], MIXED_POOL)
    machines = np.zeros(count, dtype=MACHINE)
    machines["capacity"] = state.types["kv_tokens"][state.workers["type"]]
    machines["home"] = machines["pool"] = home
    pools = np.zeros((3, count), dtype=np.int64)
    for pool in range(3):
        members = np.flatnonzero(home == pool)
        pools[pool, : len(members)] = members
    marks = np.zeros(MARKS, dtype=np.int64)
    marks[RELEASED] = min(closed_loop, n) if closed_loop else n
    marks[ADDS], marks[MOVES] = adds, moves
    marks[SIZES:] = np.bincount(home, minlength=3)
    parts = state._replace(
        machines=machines,
        tasks=np.zeros(n, dtype=TASK),
        queues=np.zeros((count, 2 * seats + 64), dtype=np.int64),
        picks=np.zeros(seats, dtype=np.int64),
        pools=pools,
        time=np.zeros(count + n),
        turn=np.zeros(count + n, dtype=np.int64),
        place=np.full(count + n, NONE),
        heap=np.zeros(count + n, dtype=np.int64),
        marks=marks,
    )
    while run(parts, closed_loop, stop_early):
        parts = parts._replace(queues=np.pad(parts.queues, ((0, 0), (0, parts.queues.shape[1]))))
        marks[IS_FULL] = 0
    state.time[:count] = np.where(parts.place[:count] == NONE, np.inf, parts.time[:count])
