"""Splitwise's machines and pools (Patel et al. 2024, arXiv:2311.18677), as its public simulator runs them.

A request is a prompt task, which makes the first token, and a token task, which makes the others. Both run on
one machine, or the prompt's KV moves to another in between; both machines are chosen on arrival. A machine
runs one batch of tasks at a time. A batch with a prompt in it runs for one step. A batch of decodes alone
runs until the first of them ends; these steps are computed together, in closed form, and an arrival cuts such
a run after its current step. The next batch takes, in this order: tasks that several batches left out
(ageing), prompts, decodes that were evicted, decodes that run, all others by arrival. A prompt that fills the
token budget therefore evicts every decode. KV is reserved when a task first runs: for the prompt and one
token, then for all tokens to come. Transfers do not wait for each other, unless the link is shared; a
transfer whose target has no room tries again every second.

Pools "splitwise": if a prompt finds only long queues, or its tokens no room, a machine of the other pool
becomes mixed; it returns to its home pool when it has nothing left. After `repurpose_after_s` in the mixed
pool it belongs to the other pool, if its own keeps a machine (section IV-A: machines that stay in the mixed
pool for a considerable time are re-purposed). Whether it has been there so long is checked when a request
arrives.

A machine that goes down loses its KV. Requests that had their KV there, or waited there, start over: the
tokens that have left count as part of the prompt. Requests that only had it as their token machine get
another one at once, and keep their KV on the prompt machine. Requests without a machine wait for one.

Peculiarities of that program are repeated, because its results depend on them. A task's place in the queue is
found by bisection, by (batches that left the task out, arrival), though the queue need not be sorted by that:
the first of the two grows while tasks wait. Ageing counts batches formed, not steps. With routing
"kv-token-jsq" alone, the load of a new request is never added, though it is subtracted at the end, so that
one machine of each pool gets everything. One peculiarity is not repeated: where all memory is reserved by
tasks that wait for more, the program runs for ever, and we reject the requests that can never go on.

Letters: w is a machine, which is a worker and its only lane in layout.py; r is a request, `code` a task.
Locals: `kind` is the record of the machine's type (layout.TYPE), `entity` the number of what has events
(layout.State). "Its tokens" are those after the first. A seat is one of the max_num_seqs places in a batch.
"""

from __future__ import annotations

import numpy as np

from planner.simulator import layout
from planner.simulator.counting import (
    end_batch,
    first_token,
    is_broken,
    record_steps,
    release_next,
    run_s,
    settle_gap,
    single_gap,
    steps_reaching,
)
from planner.simulator.decoding import advance_decodes
from planner.simulator.event_heap import next_arrival, next_time_s, schedule_event, set_time
from planner.simulator.kv_blocks import blocks_of
from planner.simulator.layout import (
    BLOCK,
    DONE,
    DOWN,
    ENTERED,
    IN_SERVICE,
    LINK_SLOW,
    MACHINE,
    NEVER,
    NEXT_DISTURBANCE,
    NONE,
    ONE,
    OUT_OF_SERVICE,
    PENDING,
    SIZE,
    SLOW,
    TASK,
    UNFINISHED,
    UP,
    ZERO,
    State,
)
from planner.simulator.numba_compile import entry_jit, kernel_jit, small_jit
from planner.simulator.pointers import pointer_to
from planner.simulator.request_ends import finish_request, reject_request
from planner.simulator.router_loads import add_load, assign_none, assign_request
from planner.simulator.slots import add_chunk, clear_chunks, refresh_next_finish_step
from planner.simulator.splitwise_pools import (
    ARRIVED,
    COUNTS_ADDED,
    MARKS,
    MIXED_POOL,
    MOVES_MACHINES,
    NEEDS_LONGER_QUEUES,
    PROMPT_POOL,
    RETRYING,
    TOKEN_POOL,
    capacity_tokens,
    enter_pool,
    least_pending,
    least_pending_of_all,
    least_promised,
    leave_pool,
    move_machine,
    open_for_tokens,
    prompt_tokens,
    route_request,
    whole_tokens,
)
from planner.simulator.step_times import step_seconds
from planner.simulator.transfer import transfer_end_s

MAX_SKIPS = 4  # A task that this many batches have left out comes first. Splitwise's program has this value.
RETRY_S = 1.0  # A transfer whose target has no room tries again after this long, as in that program.
FIRST_QUEUE_SPARE = 64  # Places of a queue beyond two batches, set by hand: too short a queue is doubled.

# Indices of a machine's lists (WORKER.head, WORKER.tail). WAITING holds every waiting task; prompts, and
# decodes that were evicted, are in a second list too.
WAITING, PROMPTS, EVICTED = np.int64(0), np.int64(1), np.int64(2)
# Values of TASK.phase: the prompt is not computed; the token task has not run yet; it has run.
PROMPT, FRESH, HAS_RUN = np.int64(0), np.int64(1), np.int64(2)
# Queues (State.queues) hold codes of tasks: 2 r for the prompt of request r, 2 r + 1 for its tokens. So
# `code >> 1` is the request, and `code & 1` is 1 for a token task.


# ------------------------------------------------------------------------------------------ tasks that wait


@small_jit
def _skips_now(state, w, code):
    """How many batches of machine w have left out a task; 0 for tokens whose prompt waits before them.

    While a task waits, TASK.skips is its skips less the batches that its machine had formed when it came.
    `formed` is added here, so each new batch ages all waiting tasks at once.
    """
    task = state.tasks[code >> 1]
    if code & 1 and task.phase == PROMPT:
        return ZERO
    return task.skips + state.machines[w].formed


@small_jit
def _may_overflow(state, tasks):
    """Whether the next event could overflow a queue of this many tasks.

    That event may bring two tasks of a request, and evict as many decodes as a batch has seats, which is the
    length of `picks`.
    """
    return tasks + len(state.picks) + 2 > state.queues.shape[1]


@kernel_jit
def _enqueue_task(state, w, code, skips):
    """Put a task into the queue of machine w, where bisection finds its place by (skips, arrival).

    Marks the queues as too short before the next batch or arrival could overflow this one.
    """
    worker, requests = state.workers[w], state.requests
    arrival_s = requests[code >> 1].arrival_s
    low, high = 0, worker.waiting
    while low < high:
        middle = (low + high) // 2
        other = state.queues[w, middle]
        other_skips = _skips_now(state, w, other)
        if skips < other_skips or (skips == other_skips and arrival_s < requests[other >> 1].arrival_s):
            high = middle
        else:
            low = middle + 1
    for i in range(worker.waiting, low, -1):
        state.queues[w, i] = state.queues[w, i - 1]
    state.queues[w, low] = code
    worker.waiting += 1
    if _may_overflow(state, worker.waiting):
        state.marks[NEEDS_LONGER_QUEUES] = 1


@kernel_jit
def _dequeue_task(state, w, code):
    """Take a task out of the queue of machine w."""
    worker = state.workers[w]
    i = 0
    while state.queues[w, i] != code:
        i += 1
    worker.waiting -= 1
    for j in range(i, worker.waiting):
        state.queues[w, j] = state.queues[w, j + 1]


@kernel_jit
def _insert_in_list(state, w, list_number, r, successor):
    """Put request r into list `list_number` of machine w: before `successor`, at the end if that is NONE."""
    # PROMPTS and EVICTED share the second pair of links, as no request is in both.
    worker, k = state.workers[w], min(list_number, ONE)
    predecessor = worker.tail[list_number] if successor == NONE else state.tasks[successor].previous[k]
    state.tasks[r].next[k], state.tasks[r].previous[k] = successor, predecessor
    if predecessor == NONE:
        worker.head[list_number] = r
    else:
        state.tasks[predecessor].next[k] = r
    if successor == NONE:
        worker.tail[list_number] = r
    else:
        state.tasks[successor].previous[k] = r


@kernel_jit
def _remove_from_list(state, w, list_number, r):
    """Take request r out of list `list_number` of machine w."""
    worker, k = state.workers[w], min(list_number, ONE)
    successor, predecessor = state.tasks[r].next[k], state.tasks[r].previous[k]
    if predecessor == NONE:
        worker.head[list_number] = successor
    else:
        state.tasks[predecessor].next[k] = successor
    if successor == NONE:
        worker.tail[list_number] = predecessor
    else:
        state.tasks[successor].previous[k] = predecessor


@small_jit
def _arrived_before(state, r, other):
    """Whether r arrived before another request; of equal ones, whether its task came to a machine first."""
    arrival_s, other_s = state.requests[r].arrival_s, state.requests[other].arrival_s
    return arrival_s < other_s or (
        arrival_s == other_s and state.tasks[r].arrival_number < state.tasks[other].arrival_number
    )


@kernel_jit
def _add_to_waiting(state, w, r):
    """Put request r among all that wait on machine w, in order of arrival.

    The search begins at that end of the list whose request arrived at a time nearer to that of r.
    """
    worker, arrival_s = state.workers[w], state.requests[r].arrival_s
    successor = worker.head[WAITING]
    if successor != NONE:
        last = worker.tail[WAITING]
        if arrival_s - state.requests[successor].arrival_s < state.requests[last].arrival_s - arrival_s:
            while successor != NONE and _arrived_before(state, successor, r):
                successor = state.tasks[successor].next[0]
        else:
            successor = NONE
            while last != NONE and _arrived_before(state, r, last):
                successor, last = last, state.tasks[last].previous[0]
    _insert_in_list(state, w, WAITING, r, successor)


# --------------------------------------------------------------------------------------------------- batches


@small_jit
def _step_tokens(state, r):
    """Tokens that the task of r computes in one step: its whole prompt, or the next token."""
    return state.requests[r].length_tokens if state.tasks[r].phase == PROMPT else ONE


@kernel_jit
def _tokens_to_reserve(state, r):
    """Tokens of KV that the task of r will reserve when it runs: none once it has run."""
    phase = state.tasks[r].phase
    if phase == PROMPT:
        return prompt_tokens(state, r)
    return whole_tokens(state, r) - prompt_tokens(state, r) if phase == FRESH else ZERO


@small_jit
def _has_memory_for(state, w, code):
    """Whether machine w has memory for a task that has not run: for a prompt, or for the tokens after it."""
    tokens = prompt_tokens(state, code >> 1)
    if code & 1:
        tokens = whole_tokens(state, code >> 1) - tokens
    return state.machines[w].reserved_tokens + tokens <= capacity_tokens(state, w)


@kernel_jit
def _is_batch_full(state, w, r):
    """Whether the batch that is formed has no seat left, or too few tokens, for the task of r.

    An empty batch takes a prompt of any length; else one above the token budget would never run.
    """
    machine, kind = state.machines[w], state.types[state.workers[w].type]
    return machine.batch_tasks == kind.seats or (
        machine.batch_tasks > 0 and machine.batch_tokens + _step_tokens(state, r) > kind.token_budget
    )


@kernel_jit
def _pick_task(state, w, r):
    """Pick the task of r for the batch; False if memory cannot hold it.

    A task that has run (HAS_RUN) still has its KV, so it always fits.
    """
    machine, task = state.machines[w], state.tasks[r]
    need = _tokens_to_reserve(state, r)
    if machine.claimed_tokens + need > capacity_tokens(state, w) and task.phase != HAS_RUN:
        return False
    task.is_picked = 1
    state.picks[machine.picked] = r
    machine.picked += 1
    machine.batch_tasks += 1
    machine.batch_tokens += _step_tokens(state, r)
    machine.claimed_tokens += need
    return True


@kernel_jit
def _select_batch(state, w):
    """Pick the tasks that join the batch of machine w; returns how many of its decodes `stay` in it.

    The groups are aged tasks, prompts, evicted decodes, decodes that run, and all others. Each is taken until
    the batch is full. Among prompts, evicted decodes and the rest, the first task that memory cannot hold
    ends the group; among aged tasks it is passed over.
    """
    worker, machine = state.workers[w], state.machines[w]
    kind, decodes = state.types[worker.type], state.lanes[w].decodes
    machine.picked, machine.batch_tasks, machine.batch_tokens = 0, 0, 0
    machine.claimed_tokens = machine.reserved_tokens
    for i in range(worker.waiting):
        code = state.queues[w, i]
        if _skips_now(state, w, code) < MAX_SKIPS or _is_batch_full(state, w, code >> 1):
            break
        if state.tasks[code >> 1].is_picked == 0:
            _pick_task(state, w, code >> 1)
    for list_number in (PROMPTS, EVICTED):
        r = worker.head[list_number]
        while (
            r != NONE
            and not _is_batch_full(state, w, r)
            and (state.tasks[r].is_picked or _pick_task(state, w, r))
        ):
            r = state.tasks[r].next[1]
    stay = min(decodes, kind.seats - machine.batch_tasks, max(kind.token_budget - machine.batch_tokens, ZERO))
    machine.batch_tasks += stay
    machine.batch_tokens += stay
    # If the budget evicts decodes, none of the other waiting tasks joins either.
    r = worker.head[WAITING] if stay == decodes else NONE
    while r != NONE and (
        state.tasks[r].is_picked or (not _is_batch_full(state, w, r) and _pick_task(state, w, r))
    ):
        r = state.tasks[r].next[0]
    return stay


@kernel_jit
def _evict_decodes(state, w, stay):
    """Evict the decodes of machine w but for the first `stay`; the evicted ones wait, and keep their KV."""
    lane, formed = state.lanes[w], state.machines[w].formed
    for i in range(stay, lane.decodes):
        settle_gap(state, w, i)
        slot = state.slots[w, i]
        r = slot.request
        request, task = state.requests[r], state.tasks[r]
        request.generated_tokens = request.output_tokens - (slot.finish_step - lane.decode_step)
        request.last_token_s = lane.last_token_s
        request.preemptions += 1
        lane.kv_sum -= slot.context_offset + lane.decode_step + 1
        _enqueue_task(state, w, 2 * r + 1, task.skips)
        task.skips -= formed
        task.phase = HAS_RUN
        _insert_in_list(state, w, EVICTED, r, NONE)
        _add_to_waiting(state, w, r)
    lane.decodes = stay
    refresh_next_finish_step(state, w)


@kernel_jit
def _join_batch(state, w, r, time_s):
    """Move the picked task of r from all lists of machine w into its batch."""
    machine, lane = state.machines[w], state.lanes[w]
    request, task = state.requests[r], state.tasks[r]
    task.is_picked = 0
    task.skips += machine.formed
    machine.reserved_tokens += _tokens_to_reserve(state, r)
    _remove_from_list(state, w, WAITING, r)
    if task.phase == PROMPT:
        _dequeue_task(state, w, 2 * r)
        _remove_from_list(state, w, PROMPTS, r)
        if request.scheduled_s < 0.0:
            request.scheduled_s = time_s
        state.chunks[w, lane.prefills].request = r
        add_chunk(lane, ZERO, request.length_tokens)
        return
    _dequeue_task(state, w, 2 * r + 1)
    if task.phase == HAS_RUN:
        _remove_from_list(state, w, EVICTED, r)
    slot = state.slots[w, lane.decodes]
    slot.request = r
    slot.finish_step = lane.decode_step + request.output_tokens - request.generated_tokens
    # The newest token has no KV yet.
    slot.context_offset = request.input_tokens + request.generated_tokens - 1 - lane.decode_step
    slot.settled_step = lane.decode_step
    if lane.decodes == 0:
        lane.next_finish_step = slot.finish_step
        lane.last_token_s, lane.out_of_step = request.last_token_s, 0
    else:
        lane.next_finish_step = min(lane.next_finish_step, slot.finish_step)
        if lane.out_of_step > 0 or request.last_token_s != lane.last_token_s:
            lane.out_of_step += 1
    lane.kv_sum += slot.context_offset + lane.decode_step + 1
    lane.decodes += 1


@kernel_jit
def _start_batch(state, w, time_s):
    """Form the next batch of machine w, whose last one has ended, and run it."""
    worker, lane, machine = state.workers[w], state.lanes[w], state.machines[w]
    kind = state.types[worker.type]
    machine.is_cut = 0
    clear_chunks(lane)
    if worker.head[WAITING] != NONE:
        stay = _select_batch(state, w)
        if stay < lane.decodes:
            _evict_decodes(state, w, stay)
        for i in range(machine.picked):
            _join_batch(state, w, state.picks[i], time_s)
        worker.used_blocks = blocks_of(machine.reserved_tokens)
    machine.formed += 1
    if lane.prefills + lane.decodes == 0:
        lane.run_steps = 0
        schedule_event(state, w, NEVER)
        if worker.running == 0 and machine.pool != machine.home:
            move_machine(state, w, machine.home, time_s)
        return
    lane.is_decoding = 1
    # A machine has no pipeline, so nothing is sent from stage to stage.
    first_s, extra_s, _, growth_s, longest = step_seconds(state, kind, lane)
    lane.run_start_s = time_s
    lane.run_first_s = worker.slow_factor * (first_s + extra_s)
    lane.run_growth_s = worker.slow_factor * growth_s
    lane.run_steps = 1 if lane.prefills > 0 else min(lane.next_finish_step - lane.decode_step, longest)
    schedule_event(state, w, time_s + run_s(lane.run_first_s, lane.run_growth_s, lane.run_steps))


@kernel_jit
def _shorten_run(state, w, time_s):
    """If machine w runs decodes alone, end their run with the step that is in progress."""
    lane, machine = state.lanes[w], state.machines[w]
    if machine.is_cut == 0 and lane.prefills == 0:
        machine.is_cut = 1
        # A step that ends at this very moment is over: the run goes on for one more.
        after_s = np.nextafter(time_s, np.inf)
        steps = steps_reaching(lane.run_start_s, lane.run_first_s, lane.run_growth_s, after_s)
        lane.run_steps = min(lane.run_steps, steps)
        seconds = run_s(lane.run_first_s, lane.run_growth_s, lane.run_steps)
        schedule_event(state, w, lane.run_start_s + seconds)


@kernel_jit
def _add_task(state, w, code, time_s):
    """Put a task into the queue and lists of machine w; True if the machine is idle and has memory for it.

    A busy machine ends its run of decodes early where the task may join them. A prompt may join up to the
    token budget even where no seat is free, as it evicts decodes.
    """
    worker, lane, machine = state.workers[w], state.lanes[w], state.machines[w]
    kind = state.types[worker.type]
    r, is_prompt = code >> 1, code & 1 == 0
    task, tokens = state.tasks[r], ONE
    if is_prompt:
        tokens = state.requests[r].length_tokens
        _insert_in_list(state, w, PROMPTS, r, NONE)
    if task.phase != PROMPT or is_prompt:  # A token task behind its own prompt is in the queue alone.
        worker.running += 1
        task.arrival_number = state.marks[ARRIVED]
        state.marks[ARRIVED] += 1
        task.skips = -machine.formed
        _add_to_waiting(state, w, r)
    _enqueue_task(state, w, code, ZERO)
    running = lane.decodes + lane.prefills
    if running == 0:
        return _has_memory_for(state, w, code)
    joins = running < kind.seats and running + tokens <= kind.token_budget
    if joins or (is_prompt and tokens <= kind.token_budget):
        _shorten_run(state, w, time_s)
    return False


@kernel_jit
def _deliver_task(state, w, code, time_s):
    """Give machine w a task; a prompt is followed by its token task if that runs on w too."""
    while True:  # Once, or twice: for the prompt, then for the token task.
        if _add_task(state, w, code, time_s):
            _start_batch(state, w, time_s)
        request = state.requests[code >> 1]
        tokens_left = request.output_tokens - request.generated_tokens
        if code & 1 or request.decode_worker != w or tokens_left == 1:  # The prompt makes the last token.
            return
        code += 1


@kernel_jit
def _count_decode_steps(state, w, steps, time_s):
    """Count `steps` steps of the batch of machine w that have run, the last of which ended at `time_s`.

    If some decodes had their last token before the run began, the first step is counted alone: its gaps are
    longer than the step.
    """
    lane = state.lanes[w]
    end_batch(state, w, time_s - lane.run_start_s, steps)
    if lane.decodes > 0:
        if steps > 1 and (lane.out_of_step > 0 or lane.last_token_s != lane.run_start_s):
            first_end_s = lane.run_start_s + lane.run_first_s
            advance_decodes(state, w, ONE, first_end_s)
            lane.run_start_s = first_end_s
            lane.run_first_s += lane.run_growth_s
            steps -= 1
        advance_decodes(state, w, steps, time_s)


@kernel_jit
def _finish_batch(state, w, time_s):
    """End the batch of machine w: tokens leave, decodes finish, prompts go on to their tokens."""
    lane = state.lanes[w]
    _count_decode_steps(state, w, lane.run_steps, time_s)
    if lane.decodes > 0:
        if lane.decode_step == lane.next_finish_step:
            _finish_decodes(state, w, time_s)
    elif len(state.runs) > 0:  # A step of prompts alone; `advance_decodes` records those with decodes.
        record_steps(state, w, lane.run_first_s, 0.0, ONE, ZERO)
    for i in range(lane.prefills):
        _end_prompt(state, w, state.chunks[w, i].request, time_s)
    lane.prefills = 0


@kernel_jit
def _finish_decodes(state, w, time_s):
    """Finish the decodes whose last token this was; the others move up to the first slots."""
    lane, slots = state.lanes[w], state.slots
    kept = 0
    for i in range(lane.decodes):
        slot = slots[w, i]
        if slot.finish_step > lane.decode_step:
            if kept < i:
                slots[w, kept] = slot
            kept += 1
            continue
        settle_gap(state, w, i)
        lane.kv_sum -= slot.context_offset + lane.decode_step + 1
        _release_and_finish(state, w, slot.request, time_s)
    lane.decodes = kept
    refresh_next_finish_step(state, w)


@kernel_jit
def _release_and_finish(state, w, r, time_s):
    """Finish request r, which has its last token, and give back its KV on machine w."""
    state.machines[w].reserved_tokens -= whole_tokens(state, r)
    state.machines[w].promised_tokens -= whole_tokens(state, r)
    state.workers[w].running -= 1
    finish_request(state, w, r, time_s)


@kernel_jit
def _end_prompt(state, w, r, time_s):
    """Count the token that the prompt of r makes on machine w; then finish it, decode here or send its KV."""
    request, task = state.requests[r], state.tasks[r]
    if request.generated_tokens == 0:
        first_token(state, r, time_s)
    else:  # It has started over and had its first token before.
        single_gap(state, w, r, time_s)
        request.generated_tokens += 1
        request.last_token_s = time_s
    add_load(state, w, -float(request.length_tokens), 0.0, 0.0)
    task.phase = FRESH
    if request.generated_tokens == request.output_tokens:
        _release_and_finish(state, w, r, time_s)
    elif request.decode_worker == w:
        task.skips = -state.machines[w].formed
        _add_to_waiting(state, w, r)
    else:
        state.workers[w].running -= 1
        request.prefill_step_s = time_s - state.lanes[w].run_start_s
        _send_kv(state, r, time_s)


# ----------------------------------------------------------------------------------- from prompt to tokens


@small_jit
def _target_has_room(state, r):
    """Whether r has a token machine, and this can hold the KV of its prompt now."""
    w = state.requests[r].decode_worker
    if w == NONE:
        return False
    return state.machines[w].reserved_tokens + prompt_tokens(state, r) <= capacity_tokens(state, w)


@kernel_jit
def _send_kv(state, r, time_s):
    """Move the KV of r to its token machine now or, if there is no room, try again after RETRY_S."""
    request, entity = state.requests[r], len(state.workers) + r
    if not _target_has_room(state, r):
        state.marks[RETRYING] += 1
        schedule_event(state, entity, time_s + RETRY_S)
        return
    state.machines[request.decode_worker].reserved_tokens += prompt_tokens(state, r)
    state.tasks[r].is_sent = 1
    schedule_event(state, entity, transfer_end_s(state, r, request.length_tokens / float(BLOCK), time_s))


@kernel_jit
def _release_prompt_kv(state, w, r):
    """Give back the KV of the prompt of r on machine w, from which it has been sent."""
    state.machines[w].reserved_tokens -= prompt_tokens(state, r)
    state.machines[w].promised_tokens -= prompt_tokens(state, r)


@kernel_jit
def _offer_freed_memory(state, w, time_s):
    """Offer memory that was given back on machine w to waiting tasks.

    A busy machine ends its run of decodes early for them. Returns True if it is idle and can start the first.
    """
    worker, lane = state.workers[w], state.lanes[w]
    kind = state.types[worker.type]
    if worker.waiting == 0:
        return False
    running = lane.decodes + lane.prefills
    if running == 0:
        return _has_memory_for(state, w, state.queues[w, 0])
    if running < min(kind.seats, kind.token_budget):
        _shorten_run(state, w, time_s)
    return False


# ------------------------------------------------------------------------------------------------- failures


@kernel_jit
def _stop_machine(state, w, time_s):
    """Stop machine w, which dies, and empty its batch, queue and memory.

    If it ran decodes alone, the tokens of the steps that have ended by now count; a step with a prompt is
    lost.
    """
    worker, lane, machine = state.workers[w], state.lanes[w], state.machines[w]
    worker.status = OUT_OF_SERVICE
    leave_pool(state, w)
    if lane.prefills == 0 and lane.decodes > 0:
        after_s = np.nextafter(time_s, np.inf)  # A step that ends at this very moment has ended.
        done = steps_reaching(lane.run_start_s, lane.run_first_s, lane.run_growth_s, after_s) - 1
        if done > 0:
            done_s = run_s(lane.run_first_s, lane.run_growth_s, done)
            _count_decode_steps(state, w, done, lane.run_start_s + done_s)
    for i in range(lane.decodes):
        settle_gap(state, w, i)
        slot = state.slots[w, i]
        request = state.requests[slot.request]
        request.generated_tokens = request.output_tokens - (slot.finish_step - lane.decode_step)
        # Decodes that are out of step, in the last slots, keep the time of their own last token.
        if i < lane.decodes - lane.out_of_step:
            request.last_token_s = lane.last_token_s
    clear_chunks(lane)
    lane.decodes, lane.out_of_step, lane.kv_sum, lane.run_steps = 0, 0, 0.0, 0
    schedule_event(state, w, NEVER)
    worker.head[:], worker.tail[:] = NONE, NONE
    worker.waiting, worker.running, worker.used_blocks = 0, 0, 0
    machine.reserved_tokens, machine.promised_tokens, machine.is_cut = 0, 0, 0
    assign_none(state, w)


@kernel_jit
def _cancel_transfer(state, r):
    """Cancel the transfer of the KV of r, on its way or still without room.

    True if it was on its way, because then room is reserved for it on the token machine.
    """
    entity, task = len(state.workers) + r, state.tasks[r]
    if state.heap_index[entity] == NONE:
        return False
    schedule_event(state, entity, NEVER)
    was_sent = task.is_sent == 1
    task.is_sent = 0
    if not was_sent:
        state.marks[RETRYING] -= 1
    return was_sent


@kernel_jit
def _restart_request(state, r, w, time_s):
    """Reset request r, which has lost its KV or its place on machine w, so that _place_requests finds
    machines for it.

    If its token machine v is another one, the request no longer counts in v's `promised_tokens` and
    `reserved_tokens`.
    """
    request, task = state.requests[r], state.tasks[r]
    v = request.decode_worker
    was_sent = _cancel_transfer(state, r)
    if v != w and v != NONE:
        state.machines[v].promised_tokens -= whole_tokens(state, r)
        if state.marks[COUNTS_ADDED]:
            assign_request(state, v, r, -1.0)
        if was_sent:
            state.machines[v].reserved_tokens -= prompt_tokens(state, r)
            if _offer_freed_memory(state, v, time_s):
                _start_batch(state, v, time_s)
    request.preemptions += task.phase != PROMPT
    request.length_tokens = request.input_tokens + request.generated_tokens
    request.prefill_worker = request.decode_worker = NONE
    task.phase, task.skips, task.is_picked, task.is_sent = PROMPT, 0, 0, 0


@kernel_jit
def _take_down(state, w, time_s):
    """Let machine w die.

    Requests with KV or a place there start over; those that would have come for their tokens go elsewhere.
    """
    _stop_machine(state, w, time_s)
    for r in range(state.counters[ENTERED]):
        request = state.requests[r]
        if request.status != UNFINISHED or request.prefill_worker == NONE:
            continue  # It is done, or has no machine yet.
        is_moving = state.heap_index[len(state.workers) + r] != NONE
        holder = request.decode_worker  # The machine on which the request has its KV, or waits.
        if state.tasks[r].phase == PROMPT or is_moving:
            holder = request.prefill_worker
        if holder == w:
            _restart_request(state, r, w, time_s)
        elif request.decode_worker == w:
            _cancel_transfer(state, r)
            request.decode_worker = NONE
            if state.tasks[r].phase != PROMPT:  # Without a target it waits and tries again.
                _send_kv(state, r, time_s)
    _place_requests(state, time_s)


@kernel_jit
def _place_requests(state, time_s):
    """Find machines for the requests that have none for their prompt or their tokens, in order of arrival."""
    for r in range(state.counters[ENTERED]):
        request = state.requests[r]
        if request.status == UNFINISHED and request.prefill_worker == NONE:
            if route_request(state, r, time_s):
                _deliver_task(state, request.prefill_worker, 2 * r, time_s)
        elif request.status == UNFINISHED and request.decode_worker == NONE:
            _place_token_task(state, r, time_s)


@kernel_jit
def _place_token_task(state, r, time_s):
    """Find a machine for the tokens of r, whose prompt has one. If there is none, nothing changes."""
    request, whole = state.requests[r], whole_tokens(state, r)
    source = request.prefill_worker
    if state.marks[MOVES_MACHINES]:
        target = open_for_tokens(state, r)
        if target == NONE:
            target = least_promised(state, PROMPT_POOL, whole)
            if target != NONE:
                move_machine(state, target, MIXED_POOL, time_s)
            else:
                target = least_pending_of_all(state, r)
    else:
        target = least_pending(state, TOKEN_POOL, whole, NONE)
    if target == NONE:
        return
    _cancel_transfer(state, r)
    request.decode_worker = target
    state.machines[target].promised_tokens += whole
    if state.marks[COUNTS_ADDED]:
        assign_request(state, target, r, 1.0)
    if target == source:
        # `promised_tokens` has the prompt already, and `whole` counts it again.
        state.machines[source].promised_tokens -= prompt_tokens(state, r)
        _deliver_task(state, source, 2 * r + 1, time_s)
    elif state.tasks[r].phase != PROMPT:
        _send_kv(state, r, time_s)


@kernel_jit
def _apply_disturbance(state, time_s):
    """Apply the disturbance that is due: a machine goes down, comes up or changes speed, or the links do."""
    disturbance = state.disturbances[state.counters[NEXT_DISTURBANCE]]
    state.counters[NEXT_DISTURBANCE] += 1
    following, entity = state.counters[NEXT_DISTURBANCE], len(state.workers) + len(state.requests)
    next_s = state.disturbances[following].time_s if following < len(state.disturbances) else NEVER
    set_time(state, entity, next_s)
    w = disturbance.worker
    if disturbance.kind == LINK_SLOW:
        state.link[0].slow_factor = disturbance.factor
    elif disturbance.kind == SLOW:
        state.workers[w].slow_factor = disturbance.factor
        if state.lanes[w].decodes > 0:
            _shorten_run(state, w, time_s)
    elif disturbance.kind == DOWN and state.workers[w].status == IN_SERVICE:
        _take_down(state, w, time_s)
    elif disturbance.kind == UP and state.workers[w].status == OUT_OF_SERVICE:
        state.workers[w].status = IN_SERVICE
        enter_pool(state, w, state.machines[w].home, time_s)
        _place_requests(state, time_s)


@kernel_jit
def _is_stuck(state):
    """Whether the only events left are transfers that will never find room."""
    if state.counters[PENDING] > state.marks[RETRYING]:
        return False
    for i in range(state.counters[PENDING]):
        if _target_has_room(state, state.heap[i] - len(state.workers)):
            return False
    return True


@kernel_jit
def _reject_unfinished(state):
    """Reject every request that is not done, also those that have not arrived."""
    for r in range(len(state.requests)):
        if state.requests[r].status == UNFINISHED:
            reject_request(state, r)


@entry_jit
def simulate_events(fields, closed_loop, stop_early):
    """Simulate until every request is done; with `stop_early` until a limit is broken.

    True if a queue is about to overflow: lengthen the queues and call it again; it goes on where it stopped.
    """
    state = pointer_to(fields)
    n = len(state.requests)
    machines, marks = len(state.workers), state.marks
    # The numbers of entities with events: below `machines`, a machine whose batch ends; machines + r, the
    # transfer of request r, which ends or tries again; machines + n, the disturbances.
    while state.counters[DONE] < n:
        if marks[NEEDS_LONGER_QUEUES]:
            return True
        time_s, r = next_time_s(state), next_arrival(state)
        if r != NONE:
            time_s = state.requests[r].arrival_s
            if route_request(state, r, time_s):
                _deliver_task(state, state.requests[r].prefill_worker, 2 * r, time_s)
        elif _is_stuck(state):
            _reject_unfinished(state)
        elif state.heap[0] < machines:
            w = state.heap[0]
            _finish_batch(state, w, time_s)
            _start_batch(state, w, time_s)
        elif state.heap[0] == machines + n:
            # A disturbance may put all that is not done, prompts and tokens, into one queue.
            if _may_overflow(state, 2 * (state.counters[ENTERED] - state.counters[DONE])):
                marks[NEEDS_LONGER_QUEUES] = 1
            else:
                _apply_disturbance(state, time_s)
        else:
            r = state.heap[0] - machines
            schedule_event(state, state.heap[0], NEVER)
            if state.tasks[r].is_sent:
                source = state.requests[r].prefill_worker
                _release_prompt_kv(state, source, r)
                _deliver_task(state, state.requests[r].decode_worker, 2 * r + 1, time_s)
                if _offer_freed_memory(state, source, time_s):
                    _start_batch(state, source, time_s)
            else:
                marks[RETRYING] -= 1
                _send_kv(state, r, time_s)
        release_next(state, closed_loop, time_s)
        if stop_early and is_broken(state):
            return False
    return False


def simulate(
    state: State, *, counts_added: bool, moves_machines: bool, closed_loop: int, stop_early: bool
) -> None:
    """Simulate `state`, in place, to its end.

    `counts_added`: the load of new requests counts. `moves_machines`: machines move between pools.
    `closed_loop`: how many requests are under way at once, 0 where they arrive by themselves. `stop_early`:
    stop at a broken limit.
    """
    count, seats = len(state.workers), state.slots.shape[1]
    roles = state.workers["role"]
    home = np.select([roles == layout.PREFILL, roles == layout.DECODE], [PROMPT_POOL, TOKEN_POOL], MIXED_POOL)
    machines = np.zeros(count, dtype=MACHINE)
    machines["home"] = machines["pool"] = home
    pools = np.zeros((3, count), dtype=np.int64)
    for pool in range(3):
        members = np.flatnonzero(home == pool)
        pools[pool, : len(members)] = members
        state.counters[SIZE + pool] = len(members)
    marks = np.zeros(MARKS, dtype=np.int64)
    marks[COUNTS_ADDED], marks[MOVES_MACHINES] = counts_added, moves_machines
    machine_state = state._replace(
        machines=machines,
        tasks=np.zeros(len(state.requests), dtype=TASK),
        queues=np.zeros((count, 2 * seats + FIRST_QUEUE_SPARE), dtype=np.int64),
        picks=np.zeros(seats, dtype=np.int64),
        pools=pools,
        marks=marks,
    )
    while simulate_events(machine_state, closed_loop, stop_early):
        queues = machine_state.queues
        machine_state = machine_state._replace(queues=np.pad(queues, ((0, 0), (0, queues.shape[1]))))
        marks[NEEDS_LONGER_QUEUES] = 0
