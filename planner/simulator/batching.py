"""Which requests are in the next step of a lane, by batching policy.

A lane (`layout.LANE`) runs one step at a time; a worker has one lane, or with pipeline parallelism one per
stage. A chunk is the part of a prompt that one step computes. The token budget of a step is
max_num_batched_tokens. Requests wait in the worker's queue for their prefill, in the list PARTIAL while their
prompt is computed in part, in READY when their KV has come from a prefill worker, and in LOADING
(offload_layout.py) while their KV is loaded from CPU memory. Other lists (layout.py): RESTING has
decodes that a step leaves out, LEAVING requests that have ended and UNKNOWN prompts that the engine does not
know of yet. A request that runs holds one of the max_num_seqs seats of its worker. Asynchronous engines form
a step while the one before runs, so blocks and seats that are given back meanwhile come late (`late_blocks`,
`late_seats`).

Arguments that many functions share: w is a worker, l a lane and r a request (layout.py); `longest` is the
most tokens of a chunk, `step_blocks` the KV blocks that the decodes take in the step that is formed, `budget`
what is left of its token budget. Locals: `kind` is the record of the worker's type (layout.TYPE), n the
tokens of a chunk, c the tokens of its prompt before it. A node of a prefix is one of the prefix tree
(caches.py), no machine.

vllm-v1             Chunked prefill, as Sarathi proposed it. First come the running requests in order of
                    admission: decodes, and prompts computed in part. Then come prompts that wait, in chunks
                    of what is left of the token budget. A prompt is admitted where all of it would fit into
                    the KV cache, but takes the blocks of each chunk when that chunk is computed. A request
                    that finds no block preempts the one admitted last, or the one of largest priority
                    (priorities.py), and that step admits none. Where the length of chunks is limited
                    (`long_prefill_tokens`), several prompts are under way, and a step may leave out decodes
                    that were admitted after them. Engines that take prompts first (SGLang) leave all decodes
                    of a mixed worker out of every step with prompts.
sarathi             Agrawal et al. 2024, as Vidur has it: every decode, then prompts. It differs from vllm-v1
                    in four things. A prompt takes the blocks for all of it when it is admitted. A block must
                    be free for every decode, whether this step needs it or not. Prompts leave a watermark of
                    blocks free. A preempted request may come back at once.
vllm-v0             Whole prompts first, while their number times the longest of them is within the budget;
                    the decodes wait. A prompt longer than the budget goes alone. A step that admits no prompt
                    is of decodes.
orca                Yu et al. 2022: every decode and, in the same step, whole prompts. With reserved blocks a
                    request takes all of its blocks at once, as in the paper; without, KV is paged (Orca+).
faster-transformer  Requests are batched once: a step computes all prompts, then all of them decode until the
                    last one is done.
lightllm            A step is of prompts or of decodes, and KV is counted in tokens. Prompts are tried when
                    nothing runs, and after every `patience_steps` steps of decodes. A prompt enters while the
                    prompts are within the budget and the peak of KV, if all requests run to their predicted
                    ends together, stays below the capacity.
"""

from __future__ import annotations

import numpy as np

from planner.policies import (
    FASTER_TRANSFORMER,
    GREEDY,
    LIGHTLLM,
    ORCA,
    RESERVE_DYNAMIC,
    SARATHI,
    VLLM_V0,
    VLLM_V1,
)
from planner.simulator.adapters import (
    adapters_s,
    has_slot,
    is_loading,
    next_with_slot,
    note_admitted,
    note_running,
    passes_over,
    put_back,
)
from planner.simulator.cache_layout import TREE_NODE_BLOCKS
from planner.simulator.caches import (
    cached_tree_nodes,
    evict_idle,
    keep_prefix,
    note_taken_blocks,
    read_due_notices,
    release_late,
    shared_blocks,
    take_prefix,
)
from planner.simulator.counting import run_s
from planner.simulator.event_heap import set_time
from planner.simulator.kv_blocks import (
    blocks_of,
    blocks_of_steps,
    blocks_to_begin,
    cached_on_arrival,
    foreseen_blocks,
    request_blocks,
    seat_blocks,
    steps_with_blocks,
    uncomputed_blocks,
)
from planner.simulator.layout import (
    ADMITTED,
    BLOCK,
    INBOUND,
    LEAVING,
    MIXED,
    NEVER,
    NONE,
    ONE,
    PARTIAL,
    PREDICTOR,
    PREFILL,
    READY,
    RESTING,
    UNKNOWN,
    ZERO,
)
from planner.simulator.numba_compile import kernel_jit, small_jit, where_has, where_rare
from planner.simulator.offload import (
    begin_load,
    hold_tree_nodes,
    is_loaded,
    is_loading_kv,
    loading_count,
    next_load_s,
    nodes_to_load,
    note_ended_loads,
    note_no_load,
    pass_over,
    put_aside_back,
    store_step,
)
from planner.simulator.offload_layout import LOADING
from planner.simulator.polling import end_at_poll, has_step_in_flight, polls_now
from planner.simulator.priorities import line_up_for_kv, schedule_by_priority
from planner.simulator.queue_orders import (
    TOKENS_BOUND,
    count_waiting,
    enqueue_request,
    leave_queue,
    may_reorder,
    note_admission,
)
from planner.simulator.queues import append_to_list, pop_first, remove_from_list
from planner.simulator.router_loads import add_load
from planner.simulator.slots import (
    add_chunk,
    clear_chunks,
    free_leaving_requests,
    join_lane,
    latest_in,
    latest_slot,
    preempt_decode,
    preempt_waiting,
    rest_decode,
    take_out,
)
from planner.simulator.step_times import UNBOUNDED, engine_seconds
from planner.simulator.transfer import begin_pulls


@kernel_jit
def start_step(state, l, time_s):
    """Form the next step, or run of equal steps, on the idle lane l, if there is something to do."""
    w = state.lanes[l].worker
    worker = state.workers[w]
    is_vllm = state.types[worker.type].batching == VLLM_V1
    preemptions_before = preemptions = worker.preemptions
    is_idle = _form_step(state, l, time_s, preemptions_before)
    while is_idle and is_vllm and (has_step_in_flight(worker) or worker.preemptions > preemptions):
        # vLLM tried to form this step while the one before ran, and found nothing to do. It tries again now
        # that it knows of all requests that have come and of all blocks that were given back. It also tries
        # again after a preemption: the preempted request may fit into the next attempt.
        worker.formed_s = NEVER
        worker.late_blocks, worker.late_seats = ZERO, ZERO
        release_late(state, w)
        free_leaving_requests(state, w)
        preemptions = worker.preemptions
        is_idle = _form_step(state, l, time_s, preemptions_before)
    free_leaving_requests(state, w)  # After the step is formed, which could not have these seats yet.


@kernel_jit
def _form_step(state, l, time_s, preemptions):
    """Form the next step of lane l from the requests that its engine knows of, and launch it.

    True if there is no work; then nothing is launched. `preemptions` is WORKER.preemptions as it was before
    the first attempt to form this step.
    """
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    kind = state.types[worker.type]
    clear_chunks(lane)
    lane.is_decoding = 1
    note_ended_loads(state, lane.worker, time_s)
    if kind.is_async and polls_now(state, lane.worker):
        while worker.head[UNKNOWN] != NONE and is_known(state, worker, worker.head[UNKNOWN]):
            enqueue_request(state, lane.worker, pop_first(state.requests, worker, UNKNOWN))
    # FasterTransformer keeps a batch on its lane to the batch's end.
    if kind.lanes > 1 and kind.batching != FASTER_TRANSFORMER:
        _gather_decodes(state, l)
    if kind.batching == VLLM_V1:
        has_preempted = _form_vllm_step(state, l, time_s)
    else:
        has_preempted = _form_other_step(state, l, time_s)
    store_step(state, l, time_s)
    if lane.prefills == 0 and (lane.decodes == 0 or lane.is_decoding == 0):
        lane.run_steps = 0
        set_time(state, l, next_load_s(state, lane.worker, time_s))  # The lane is idle until a load ends.
        if worker.running == 0:
            worker.idle_since_s = time_s
        return True
    # Similar steps are simulated as one run, unless the next may have other requests: after a preemption; if
    # TetriInfer's admission (RESERVE_DYNAMIC) may find room after any step; if the engine will know of more
    # requests, seats or blocks at the next step.
    goes_on = not has_preempted and worker.preemptions == preemptions
    if kind.admission == RESERVE_DYNAMIC and (worker.first_waiting != NONE or worker.head[INBOUND] != NONE):
        goes_on = False
    if goes_on and kind.kv_delay_steps > 0 and _is_next_fuller(state, worker):
        goes_on = False
    if kind.is_async and worker.head[INBOUND] != NONE:
        # The step after this run is formed before the run's last step has ended. If hand-offs may wait then
        # for tokens of the budget or for an adapter's slot, the run is this one step.
        goes_on = goes_on and not passes_over(state) and lane.decodes * lane.width < kind.token_budget
    _launch_step(state, l, time_s, goes_on)
    worker.late_blocks, worker.late_seats = ZERO, ZERO
    release_late(state, lane.worker)
    return False


@where_rare(lambda state, l, time_s: False)
def _form_other_step(state, l, time_s):
    """Form a step by a policy other than vllm-v1; True if a request was preempted."""
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    kind = state.types[worker.type]
    has_preempted = False
    while True:
        seat_ready(state, l)
        if kind.batching == VLLM_V0 or kind.batching == LIGHTLLM:
            _admit_prompts_first(state, l, time_s)
            lane.is_decoding = lane.prefills == 0
        if not lane.is_decoding or not _secure_decode_blocks(state, l):
            break
        has_preempted = True
        if worker.running > 0:
            break  # Otherwise all were preempted, and requests that wait can take their seats and blocks.
    if kind.batching == SARATHI:
        _add_chunks(state, l, time_s, UNBOUNDED, True)
    elif kind.batching == ORCA or kind.batching == FASTER_TRANSFORMER:
        _admit_whole_prompts(state, l, time_s)
    return has_preempted


@small_jit
def is_known(state, worker, r):
    """Whether request r had reached `worker` when it formed the next step (layout.WORKER.formed_s)."""
    return state.requests[r].known_s <= worker.formed_s


@small_jit
def _has_kv(state, worker, r):
    """Whether `worker` knows by its next step that it has the KV of request r. An engine without a step in
    flight knows of all KV that has arrived.
    """
    return state.requests[r].known_step <= worker.steps + 1 or not has_step_in_flight(worker)


@small_jit
def _is_next_fuller(state, worker):
    """Whether a request cannot be in the next step of `worker` but may be in the one after.

    The engine does not know of it yet, or seats and blocks for it are given back too late.
    """
    r = worker.head[READY]
    has_waiting = worker.first_waiting != NONE or r != NONE
    # A later request of READY may go first if the list is in order of priority, or if requests without a slot
    # for their adapter are passed over.
    if r != NONE and (passes_over(state) or state.types[worker.type].by_priority > 0):
        while r != NONE and _has_kv(state, worker, r):
            r = state.requests[r].next
    lacks_kv = r != NONE and not _has_kv(state, worker, r)
    gives_back_late = worker.head[LEAVING] != NONE or worker.late_blocks + worker.late_seats > 0
    # A run of an engine that polls ends where it looks for requests (`end_at_poll`).
    has_unknown = worker.head[UNKNOWN] != NONE and state.types[worker.type].poll_steps <= 1
    return has_unknown or lacks_kv or (has_waiting and gives_back_late)


@kernel_jit
def _gather_decodes(state, l):
    """Move the decodes of other lanes to lane l, if those lanes are idle or compute prompts alone."""
    worker = state.workers[state.lanes[l].worker]
    for other in range(worker.first_lane, worker.first_lane + state.types[worker.type].lanes):
        if other != l and (state.lanes[other].run_steps == 0 or state.lanes[other].is_decoding == 0):
            while state.lanes[other].decodes > 0:
                join_lane(state, l, take_out(state, other, state.lanes[other].decodes - 1))


@kernel_jit
def _take_chunk(state, l, r, n, step_blocks, time_s):
    """Put a chunk, the next n tokens of the prompt of request r, into the next step of lane l.

    True if tokens of the prompt are left for later steps.
    """
    lane, request = state.lanes[l], state.requests[r]
    worker = state.workers[lane.worker]
    c = request.computed_tokens
    request.computed_tokens = c + n
    if state.types[worker.type].batching == VLLM_V1:  # With others `admit_request` has counted all blocks.
        worker.used_blocks += blocks_of(c + n) - blocks_of(c)
    evict_idle(state, lane.worker, step_blocks, time_s)
    note_taken_blocks(state, lane.worker, n)
    read_due_notices(state, time_s)
    keep_prefix(state, lane.worker, r)
    chunk = state.chunks[l, lane.prefills]
    chunk.request, chunk.tokens, chunk.is_last = r, n, request.computed_tokens == request.length_tokens
    add_chunk(lane, c, n)
    return chunk.is_last == 0


@kernel_jit
def can_admit(state, l, r, step_blocks, time_s):
    """Whether the worker has KV blocks for all of request r, and its admission policy lets r in."""
    lane = state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    if kind.reserved_blocks > 0:
        return worker.used_blocks + kind.reserved_blocks <= kind.kv_blocks
    blocks = blocks_of(state.requests[r].length_tokens) + seat_blocks(state, w, r)
    free = kind.kv_blocks - worker.used_blocks - worker.late_blocks - step_blocks - kind.watermark_blocks
    # Shared blocks take long to count, so they are counted only where they matter.
    if blocks > free and blocks - shared_blocks(state, w, r) > free:
        return False
    return kind.admission == GREEDY or foreseen_blocks(state, lane.worker, r, time_s) <= kind.kv_blocks


@where_has("caches", lambda state, w, r, time_s: None)
def _use_prefix(state, w, r, time_s):
    """Let request r use what worker w has cached of its prompt."""
    hit = take_prefix(state, w, r, time_s)
    # The router had counted `expected_tokens` as cached. If fewer are, the others are pending work too.
    add_load(state, w, float(state.caches.prompts[r].expected_tokens - hit), 0.0, 0.0)
    note_admission(state, w, r)


@kernel_jit
def admit_request(state, w, r, time_s):
    """Give request r, the first in the queue, its seat and its blocks.

    With vllm-v1 it takes only the blocks that are cached now, and the others chunk by chunk (`_take_chunk`).
    """
    worker, request = state.workers[w], state.requests[r]
    kind = state.types[worker.type]
    _take_from_queue(state, w, r, time_s)
    note_no_load(state, r)  # Requests that are loaded are seated by `_seat_loaded`.
    if kind.batching != VLLM_V1:
        cached_blocks = request.computed_tokens // BLOCK  # `take_prefix` has counted them.
        worker.used_blocks += request_blocks(state, w, request.length_tokens) - cached_blocks
    worker.used_blocks += seat_blocks(state, w, r)
    _take_seat(state, w, r, time_s)


@kernel_jit
def _take_from_queue(state, w, r, time_s):
    """Take request r out of the queue of worker w; it uses what the worker has cached of its prompt."""
    worker, request = state.workers[w], state.requests[r]
    # The keys of scheduling batch b are b * TOKENS_BOUND and more (`enqueue_request`). Preempted requests are
    # in no batch: their keys are below 0.
    if state.types[worker.type].queue_batch > 0 and request.key >= 0.0:
        worker.served_batch = int(request.key // TOKENS_BOUND)
    leave_queue(state, w, r)
    worker.waiting -= 1
    count_waiting(state, w, r, -1)
    _use_prefix(state, w, r, time_s)


@kernel_jit
def _take_seat(state, w, r, time_s):
    """Let request r run on worker w from now on.

    The request with the largest admission number is preempted first: with vllm-v0 the last to arrive, with
    all other policies the last to be admitted.
    """
    worker, request = state.workers[w], state.requests[r]
    worker.running += 1
    state.counters[ADMITTED] += 1
    is_v0 = state.types[worker.type].batching == VLLM_V0
    request.admission_number = r if is_v0 else state.counters[ADMITTED]
    if request.scheduled_s < 0.0:
        request.scheduled_s = time_s


@kernel_jit
def seat_ready(state, l):
    """Let sequences whose KV has arrived (READY) join the decodes of lane l while seats are free."""
    worker = state.workers[state.lanes[l].worker]
    while worker.head[READY] != NONE and worker.running < state.types[worker.type].seats:
        seat_request(state, l, pop_first(state.requests, worker, READY))


@kernel_jit
def seat_request(state, l, r):
    """Let sequence r, whose KV is on the worker, join the decodes of lane l.

    If nobody has seen a token of it, its first step computes the last token of its prompt again. Then that
    token does not count as cached, and the sequence has no last token yet (`last_token_s` is NaN).
    """
    w, request = state.lanes[l].worker, state.requests[r]
    if request.generated_tokens == 0:
        blocks = request_blocks(state, w, request.length_tokens)
        request.length_tokens, request.last_token_s = cached_on_arrival(request), np.nan
        state.workers[w].used_blocks -= blocks - request_blocks(state, w, request.length_tokens)
    state.workers[w].running += 1
    state.counters[ADMITTED] += 1
    state.requests[r].admission_number = state.counters[ADMITTED]
    join_lane(state, l, r)


@kernel_jit
def _form_vllm_step(state, l, time_s):
    """Form a step as vLLM v1 does: of the running requests in order of admission, then of those that wait.
    True if one was preempted.
    """
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    kind = state.types[worker.type]
    while worker.head[RESTING] != NONE:
        join_lane(state, l, pop_first(state.requests, worker, RESTING))
    if _forms_prompt_step(state, l, time_s):
        return False
    longest = UNBOUNDED
    present = worker.running + worker.late_seats + worker.waiting + loading_count(state, lane.worker)
    if kind.long_prefill_tokens > 0 and present > 1:  # Chunks are not limited for a request that is alone.
        longest = kind.long_prefill_tokens
        _rest_decodes(state, l, longest)
    has_preempted = False
    coming = blocks_of_steps(lane, ONE)
    # Whether blocks are short takes long to count. It is counted only if prompts are computed in part, or if
    # the decodes alone need too many.
    if worker.head[PARTIAL] != NONE or worker.used_blocks + worker.late_blocks + coming > kind.kv_blocks:
        if kind.by_priority > 0 and _is_short(state, l, longest):
            schedule_by_priority(state, l, longest, time_s)
            _add_scheduled_chunks(state, l, time_s)
            return True
        has_preempted = _make_room(state, l, longest, time_s)
    _add_chunks(state, l, time_s, longest, not has_preempted)
    return has_preempted


@kernel_jit
def _forms_prompt_step(state, l, time_s):
    """Form a step of prompts alone, in which the decodes wait, on a mixed worker whose engine takes prompts
    first. False, and nothing is formed, on all others and where no prompt can be computed.

    All blocks of a prompt were free when it was admitted, and no decode takes any before its last chunk.
    """
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    if state.types[worker.type].prompts_first == 0 or worker.role != MIXED:
        return False
    lane.is_decoding = 0
    _add_chunks(state, l, time_s, UNBOUNDED, True)
    if lane.prefills == 0:
        lane.is_decoding = 1
    return lane.prefills > 0


@kernel_jit
def _add_chunks(state, l, time_s, longest, may_admit):
    """Fill what the decodes leave of the token budget with chunks of prompts, for vllm-v1 and sarathi.

    Prompts computed in part come first; then, if the step `may_admit` requests, those that wait.
    """
    lane = state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    spent = ZERO
    step_blocks = blocks_of_steps(lane, ONE) * lane.is_decoding  # Waiting decodes take no blocks.
    evict_idle(state, w, step_blocks, time_s)
    # The list is rebuilt: a prompt that is not complete after this step goes back into it.
    following, worker.head[PARTIAL] = worker.head[PARTIAL], NONE
    while following != NONE:
        r = following
        following = state.requests[r].next
        n = _chunk_tokens(state, l, r, longest, spent)
        spent += n
        if n == 0 or _take_chunk(state, l, r, n, step_blocks, time_s):
            # Sarathi cuts a prompt only where the token budget ends, so no token is left for waiting prompts.
            may_admit = may_admit and kind.batching != SARATHI
            if n == 0 or kind.batching == VLLM_V1:  # With Sarathi `kernel._end_chunk` puts it back.
                append_to_list(state.requests, worker, PARTIAL, r)
    if not may_admit:
        return
    budget = kind.token_budget - lane.decodes * lane.is_decoding * lane.width - spent
    note_running(state, l)  # Note the LoRA adapters of the step so far.
    if worker.head[READY] != NONE and kind.batching == VLLM_V1 and lane.is_decoding:
        budget = _seat_handed_over(state, l, budget)
        step_blocks = blocks_of_steps(lane, ONE)
        # Evict now: the requests that have ended give their blocks back only after this step is formed.
        evict_idle(state, w, step_blocks, time_s)
    budget = _seat_loaded(state, l, longest, step_blocks, budget, time_s)
    r = ZERO  # NONE at the end if the loop ends for want of requests, not of seats, tokens or blocks.
    while budget > 0 and worker.running + worker.late_seats < kind.seats:
        r = next_with_slot(state, w)
        nodes = nodes_to_load(state, w, r)
        if nodes == NONE:  # Nodes of r's prefix are being loaded for another request.
            pass_over(state, w, r)
            continue
        if r == NONE or not can_admit(state, l, r, step_blocks, time_s):
            break
        if nodes > 0:
            if not _load_prefix(state, l, r, nodes, step_blocks, time_s):
                break
            continue
        admit_request(state, w, r, time_s)
        note_admitted(state, r)
        n = min(state.requests[r].length_tokens - state.requests[r].computed_tokens, longest, budget)
        budget -= n
        if _take_chunk(state, l, r, n, step_blocks, time_s) and kind.batching == VLLM_V1:
            append_to_list(state.requests, worker, PARTIAL, r)
    # Requests without a slot for their adapter, and those that were passed over, wait where they were.
    put_back(state, w)
    put_aside_back(state, w)
    if r == NONE and kind.pulls_kv and not kind.is_async:
        begin_pulls(state, w, time_s)


@where_has("offload", lambda state, l, r, nodes, step_blocks, time_s: False)
def _load_prefix(state, l, r, nodes, step_blocks, time_s):
    """Begin to load the next `nodes` nodes of the prefix of request r from CPU memory.

    r, which was the first in the queue, leaves it. False, and nothing happens, where prompts under way need
    the blocks.
    """
    w = state.lanes[l].worker
    worker, caches = state.workers[w], state.caches
    kind = state.types[worker.type]
    promised = uncomputed_blocks(state, worker.head[PARTIAL])
    promised += uncomputed_blocks(state, state.offload.memories[w].head[LOADING])
    blocks = (cached_tree_nodes(state, w, r) + nodes) * caches.numbers[TREE_NODE_BLOCKS]
    blocks -= shared_blocks(state, w, r)
    if blocks + promised > kind.kv_blocks - worker.used_blocks - worker.late_blocks - step_blocks:
        return False
    if not hold_tree_nodes(state, w, r, nodes, time_s):
        return False
    _take_from_queue(state, w, r, time_s)
    loaded_tokens = begin_load(state, w, r, nodes, time_s)
    line_up_for_kv(state, w, state.offload.memories[w], LOADING, r)
    add_load(state, w, -float(loaded_tokens), 0.0, 0.0)  # They are not computed, so not pending.
    worker.used_blocks += nodes * caches.numbers[TREE_NODE_BLOCKS]
    evict_idle(state, w, step_blocks, time_s)
    return True


@where_has("offload", lambda state, l, longest, step_blocks, budget, time_s: budget)
def _seat_loaded(state, l, longest, step_blocks, budget, time_s):
    """Seat the requests whose load from CPU memory has ended, before those of the queue.

    Returns what they leave of the token budget: 0 where one of them finds too few blocks, so that no other is
    seated after it.
    """
    w = state.lanes[l].worker
    worker, memory = state.workers[w], state.offload.memories[w]
    kind = state.types[worker.type]
    following, memory.head[LOADING] = memory.head[LOADING], NONE
    while following != NONE:
        r = following
        request = state.requests[r]
        following = request.next
        gets_seat = budget > 0 and worker.running + worker.late_seats < kind.seats and is_loaded(state, w, r)
        if gets_seat:
            keep_prefix(state, w, r)
            need = blocks_of(request.length_tokens) - blocks_of(request.computed_tokens)
            if need > kind.kv_blocks - worker.used_blocks - worker.late_blocks - step_blocks:
                gets_seat, budget = False, ZERO
        if not gets_seat:
            append_to_list(state.requests, memory, LOADING, r)
            continue
        # Where the whole prompt was loaded, its last token is computed again to make the first one.
        request.computed_tokens = min(request.computed_tokens, request.length_tokens - 1)
        _take_seat(state, w, r, time_s)
        n = min(request.length_tokens - request.computed_tokens, longest, budget)
        budget -= n
        if _take_chunk(state, l, r, n, step_blocks, time_s):
            append_to_list(state.requests, worker, PARTIAL, r)
    return budget


@kernel_jit
def _add_scheduled_chunks(state, l, time_s):
    """Put the chunks that `schedule_by_priority` has chosen for prompts computed in part into the step."""
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    step_blocks = blocks_of_steps(lane, ONE)
    evict_idle(state, lane.worker, step_blocks, time_s)
    following, worker.head[PARTIAL] = worker.head[PARTIAL], NONE
    row = ZERO
    while following != NONE:
        r = following
        following = state.requests[r].next
        n = np.int64(state.chunks[l, row].tokens)  # Read before `_take_chunk` writes this row or one before.
        row += 1
        if n == 0 or _take_chunk(state, l, r, n, step_blocks, time_s):
            append_to_list(state.requests, worker, PARTIAL, r)


@kernel_jit
def _next_handed_over(state, w):
    """The first request of READY that may be in the next step of worker w, which must know of its KV and have
    a slot for its adapter. NONE if there is none.
    """
    worker = state.workers[w]
    r = worker.head[READY]
    while r != NONE:
        if _has_kv(state, worker, r):
            if has_slot(state, w, r):
                return r
        elif state.types[worker.type].by_priority == 0:
            return NONE  # READY is in the order in which KV came.
        r = state.requests[r].next
    return NONE


@kernel_jit
def _seat_handed_over(state, l, budget):
    """Let sequences whose KV has arrived from a prefill worker join the decodes, before prompts.

    Returns what they leave of the token budget: 0 where one finds no block while others run, so that no other
    is seated after it. Where nothing else runs that could give blocks back, the sequence is preempted, and
    its prompt is computed anew.
    """
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    kind = state.types[worker.type]
    while (
        budget >= lane.width
        and worker.head[READY] != NONE
        and worker.running + worker.late_seats < kind.seats
    ):
        r = _next_handed_over(state, lane.worker)
        if r == NONE:
            break
        coming = blocks_of_steps(lane, ONE) + blocks_to_begin(state, lane.worker, r)
        is_short = worker.used_blocks + worker.late_blocks + coming > kind.kv_blocks
        if is_short and worker.running > 0:
            return ZERO
        remove_from_list(state.requests, worker, READY, r)
        seat_request(state, l, r)
        if is_short:
            preempt_decode(state, l, lane.decodes - 1, False)
        else:
            budget -= lane.width
            note_admitted(state, r)
    return budget


@kernel_jit
def _chunk_tokens(state, l, r, longest, spent):
    """How many tokens the next step computes of r, a prompt computed in part.

    At most as many as the token budget leaves after `spent` tokens for the prompts before r, and the tokens
    of the decodes. Where the length of chunks is limited, decodes that were admitted after r come after it.
    """
    lane, request = state.lanes[l], state.requests[r]
    kind = state.types[state.workers[lane.worker].type]
    decodes = np.int64(lane.decodes * lane.is_decoding)
    if kind.long_prefill_tokens > 0:
        for slot in range(lane.decodes):
            decodes -= state.slots[l, slot].admission_number > request.admission_number
    budget = max(kind.token_budget - decodes * lane.width - spent, ZERO)
    return min(request.length_tokens - request.computed_tokens, longest, budget)


@where_rare(lambda state, l, longest: None)
def _rest_decodes(state, l, longest):
    """Leave decodes out of this step while the token budget is too small for them and for the prompts that
    are computed in part. Those that were admitted last are left out first.
    """
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    spent, r = ZERO, worker.head[PARTIAL]
    while r != NONE:
        spent += _chunk_tokens(state, l, r, longest, spent)
        r = state.requests[r].next
    while lane.decodes * lane.width + spent > state.types[worker.type].token_budget:
        rest_decode(state, l, latest_slot(state, l))


@kernel_jit
def _coming_blocks(state, l, longest):
    """KV blocks that all running requests take in the next step."""
    lane = state.lanes[l]
    blocks, spent, r = blocks_of_steps(lane, ONE), ZERO, state.workers[lane.worker].head[PARTIAL]
    while r != NONE:
        n, c = _chunk_tokens(state, l, r, longest, spent), state.requests[r].computed_tokens
        spent += n
        blocks += blocks_of(c + n) - blocks_of(c)
        r = state.requests[r].next
    return blocks


@kernel_jit
def _is_short(state, l, longest):
    """Whether the running requests need more KV blocks for the next step than the worker has."""
    worker = state.workers[state.lanes[l].worker]
    blocks = worker.used_blocks + worker.late_blocks + _coming_blocks(state, l, longest)
    return blocks > state.types[worker.type].kv_blocks


@kernel_jit
def _blocks_until_short(state, l, longest):
    """KV blocks that the running requests take in the next step until one of them finds too few free.

    Prompts and decodes take blocks in the order of their admission. If all find enough, the result is what
    all of them take. This many blocks are evicted from the prefix cache before a request is preempted.
    """
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    free = state.types[worker.type].kv_blocks - worker.used_blocks - worker.late_blocks
    taken, spent, r = ZERO, ZERO, worker.head[PARTIAL]
    while r != NONE:
        request = state.requests[r]
        needed = taken  # Blocks for all that were admitted before r: here prompts, then decodes.
        for slot in range(lane.decodes):
            entry = state.slots[l, slot]
            if entry.admission_number < request.admission_number:
                if lane.width > 1:
                    needed += entry.next_blocks - entry.held_blocks
                else:
                    needed += (entry.context_offset + lane.decode_step) % BLOCK == 0
        n, c = _chunk_tokens(state, l, r, longest, spent), request.computed_tokens
        spent += n
        chunk_blocks = blocks_of(c + n) - blocks_of(c)
        taken += chunk_blocks
        if needed + chunk_blocks > free:
            return needed
        r = request.next
    return taken + blocks_of_steps(lane, ONE)


@kernel_jit
def _make_room(state, l, longest, time_s):
    """Preempt requests, the last admitted first, until the others find their blocks for the next step.

    True if any was preempted.
    """
    lane = state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    is_preempted = False
    while True:
        coming = _coming_blocks(state, l, longest)
        if worker.used_blocks + worker.late_blocks + coming <= kind.kv_blocks:
            return is_preempted
        evict_idle(state, w, _blocks_until_short(state, l, longest), time_s)
        if not _preempt_latest(state, l):
            return is_preempted
        is_preempted = True


@kernel_jit
def _preempt_latest(state, l):
    """Preempt the request admitted last; False if none runs."""
    w = state.lanes[l].worker
    latest, slot, list_number = NONE, NONE, NONE  # Without a list number the latest is a decode in a slot.
    if state.lanes[l].decodes > 0:
        slot = latest_slot(state, l)
        latest = state.slots[l, slot].request
    for other_list in (PARTIAL, RESTING, LEAVING):
        r = latest_in(state, w, other_list)
        if r != NONE and (
            latest == NONE or state.requests[r].admission_number > state.requests[latest].admission_number
        ):
            latest, list_number = r, other_list
    if latest == NONE:
        return False
    if list_number == NONE:
        preempt_decode(state, l, slot, False)
    else:
        preempt_waiting(state, w, list_number, latest)
    return True


@kernel_jit
def _secure_decode_blocks(state, l):
    """Take a block for each decode that needs one, in order of admission: for every policy but vllm-v1.

    Where no block is free, preempt the request admitted last until one is. True if any was preempted.
    """
    lane = state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    if kind.batching == LIGHTLLM:
        return _secure_tokens(state, l)
    if kind.reserved_blocks > 0 or kind.kv_blocks - worker.used_blocks >= lane.decodes:
        return False
    # `served` is the admission number of the decode that was served last.
    served, taken, is_preempted = NONE, 0, False
    while True:
        slot = NONE  # Becomes the slot of the first decode that was admitted after `served`.
        for other in range(lane.decodes):
            if state.slots[l, other].admission_number > served and (
                slot == NONE or state.slots[l, other].admission_number < state.slots[l, slot].admission_number
            ):
                slot = other
        if slot == NONE:
            return is_preempted
        served = state.slots[l, slot].admission_number
        needs_block = (state.slots[l, slot].context_offset + lane.decode_step) % BLOCK == 0
        # A block must be free for every decode, whether it needs one or not.
        while worker.used_blocks + taken >= kind.kv_blocks:
            is_preempted = True
            latest, r = latest_slot(state, l), latest_in(state, w, PARTIAL)
            if r != NONE and state.requests[r].admission_number > state.slots[l, latest].admission_number:
                preempt_waiting(state, w, PARTIAL, r)
                continue
            is_itself = state.slots[l, latest].admission_number == served
            preempt_decode(state, l, latest, False)
            if is_itself:
                needs_block = False
                break
        if needs_block:
            taken += 1


@kernel_jit
def _secure_tokens(state, l):
    """Preempt the request admitted last while the next step does not fit into lightllm's KV cache.

    It happens if outputs are longer than predicted. True if any was preempted.
    """
    lane = state.lanes[l]
    capacity_tokens = state.types[state.workers[lane.worker].type].kv_blocks * BLOCK
    is_preempted = False
    while lane.decodes > 1 and lane.kv_sum > capacity_tokens:
        preempt_decode(state, l, latest_slot(state, l), False)
        is_preempted = True
    return is_preempted


@kernel_jit
def _admit_prompts_first(state, l, time_s):
    """Admit whole prompts as vLLM v0 and LightLLM do: if any can be admitted, they are the step, and the
    decodes wait.
    """
    lane = state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    is_lightllm = kind.batching == LIGHTLLM
    if is_lightllm:
        if lane.decodes > 0 and worker.steps_since_prompts < kind.patience_steps:
            return
        worker.steps_since_prompts = 0
    longest_prompt, tokens = ZERO, ZERO
    while worker.running < kind.seats:
        r = worker.first_waiting
        if r == NONE:
            return
        length = state.requests[r].length_tokens
        longest_prompt = max(longest_prompt, length)
        tokens += length
        # vLLM v0 counts every prompt of the step as long as the longest.
        step_tokens = tokens if is_lightllm else (lane.prefills + 1) * longest_prompt
        if lane.prefills > 0 and step_tokens > kind.token_budget:
            return
        if is_lightllm:
            if worker.running > 0 and _peak_tokens(state, l, r) >= kind.kv_blocks * BLOCK:
                return
        elif not can_admit(state, l, r, ZERO, time_s):
            return
        admit_request(state, w, r, time_s)
        _take_chunk(state, l, r, length - state.requests[r].computed_tokens, ZERO, time_s)


@kernel_jit
def _admit_whole_prompts(state, l, time_s):
    """Admit whole prompts: for Orca beside the decodes, while the step keeps to the budget; for
    FasterTransformer if no request decodes, as many as find a seat and KV.
    """
    lane = state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    is_faster_transformer = kind.batching == FASTER_TRANSFORMER
    if is_faster_transformer and lane.decodes > 0:
        return
    budget = kind.token_budget - lane.decodes
    while worker.running < kind.seats:
        r = worker.first_waiting
        if r == NONE or not can_admit(state, l, r, blocks_of_steps(lane, ONE), time_s):
            return
        length = state.requests[r].length_tokens
        # A prompt above the budget goes alone.
        if not is_faster_transformer and length > budget and lane.decodes + lane.prefills > 0:
            return
        admit_request(state, w, r, time_s)
        _take_chunk(state, l, r, length - state.requests[r].computed_tokens, ZERO, time_s)
        budget -= length


@kernel_jit
def _predicted_tokens(state, l, i):
    """(KV tokens after the next step, KV tokens predicted to come after that) of the i-th request of lane l.

    Decodes come first, then chunks. A request that ends with n output tokens has n - 1 of them in the KV
    cache, as nothing reads the last one. The next step adds one to a decode, and the first one to a prompt.
    """
    lane = state.lanes[l]
    if i < lane.decodes:
        request = state.requests[state.slots[l, i].request]
        c = state.slots[l, i].context_offset + lane.decode_step
        generated = request.output_tokens - (state.slots[l, i].finish_step - lane.decode_step)
        return c + 1, max(request.predicted_tokens - generated - 1, ZERO)
    request = state.requests[state.chunks[l, i - lane.decodes].request]
    return request.length_tokens + 1, max(request.predicted_tokens - request.generated_tokens - 2, ZERO)


@kernel_jit
def _peak_tokens(state, l, r):
    """The largest number of KV tokens at any time if request r joins lane l and outputs are as predicted.

    With (h_i, f_i) what `_predicted_tokens` gives for the i-th request, in order of falling f, the result is
    the largest of h_1 + .. + h_i + i f_i: when the i-th request ends, those before it have grown by f_i too.
    """
    lane, request = state.lanes[l], state.requests[r]
    peak = 0
    new_now = request.length_tokens + 1  # As for a chunk in `_predicted_tokens`.
    new_to_come = max(request.predicted_tokens - request.generated_tokens - 2, ZERO)
    count = lane.decodes + lane.prefills
    for i in range(count + 1):
        to_come = new_to_come
        if i < count:
            _, to_come = _predicted_tokens(state, l, i)
        total, sequences = 0, 0
        for j in range(count + 1):
            other_now, other_to_come = new_now, new_to_come
            if j < count:
                other_now, other_to_come = _predicted_tokens(state, l, j)
            if other_to_come >= to_come:
                total += other_now
                sequences += 1
        peak = max(peak, total + sequences * to_come)
    return peak


@small_jit
def run_length(state, l, time_s, goes_on):
    """How many steps may be simulated at once as one run: the one that was formed, and others like it.

    A run lasts until a decode ends or blocks run out. It is one step where a request may join after any step
    (`goes_on` is False), and where not all decodes had their last token now, so that their first gaps differ.
    """
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    kind = state.types[worker.type]
    goes_on = goes_on and lane.width == 1 and not may_reorder(state, lane.worker)
    if not goes_on or lane.out_of_step > 0 or lane.prefills > 0 or lane.last_token_s != time_s:
        return ONE
    steps = lane.next_finish_step - lane.decode_step
    free = kind.kv_blocks - worker.used_blocks
    if kind.batching == VLLM_V1:
        steps = min(steps, steps_with_blocks(lane, free))
    elif kind.batching == LIGHTLLM:
        # `kv_sum` grows by a token per decode and step; the first step fits (`_secure_tokens`).
        steps = min(steps, (kind.kv_blocks * BLOCK - int(lane.kv_sum)) // lane.decodes + 1)
        if worker.waiting > 0:
            steps = min(steps, kind.patience_steps - worker.steps_since_prompts)
    elif kind.reserved_blocks == 0 and free >= lane.decodes:
        # A block must be free for every decode when a step starts.
        steps = min(steps, steps_with_blocks(lane, free - lane.decodes) + 1)
    elif kind.reserved_blocks == 0:
        # Fewer blocks are free, so `_secure_decode_blocks` looks again when a decode needs one.
        steps = min(steps, steps_with_blocks(lane, ZERO))
    return end_at_poll(state, lane.worker, max(steps, ONE))


@small_jit
def step_time_factor(state, w):
    """The factor on the step times of worker w. A predictor of output lengths runs on prefill workers and
    makes their steps longer; without one its factor is 1.
    """
    worker = state.workers[w]
    return worker.slow_factor * state.policy[PREDICTOR] if worker.role == PREFILL else worker.slow_factor


@kernel_jit
def _launch_step_alone(state, l, time_s, goes_on):
    """Start the step formed on lane l. With `goes_on`, similar steps after it are simulated in its run."""
    lane = state.lanes[l]
    w = lane.worker
    worker = state.workers[w]
    kind = state.types[worker.type]
    stage_s, extra_s, send_s, growth_s, most_steps = engine_seconds(state, kind, lane, adapters_s(state, l))
    slow = step_time_factor(state, w)
    if slow != 1.0:
        stage_s, extra_s, send_s, growth_s = stage_s * slow, extra_s * slow, send_s * slow, growth_s * slow
    lane.run_start_s = time_s
    lane.stage_s = stage_s + extra_s / kind.pp  # Only the first stage takes `extra_s`: this is the mean.
    lane.run_steps = 1
    if kind.lanes == 1:
        lane.run_first_s, lane.run_growth_s = stage_s + extra_s, growth_s
        # A step that loads adapters is longer than those after it; a load of KV may end after any step.
        goes_on = goes_on and not is_loading(state) and not is_loading_kv(state, w)
        lane.run_steps = max(min(run_length(state, l, time_s, goes_on), most_steps), 1)
        set_time(state, l, time_s + run_s(lane.run_first_s, lane.run_growth_s, lane.run_steps))
        return
    if lane.decodes * lane.is_decoding > 0 and kind.reserved_blocks == 0:
        worker.used_blocks += blocks_of_steps(lane, 1)
        evict_idle(state, w, ZERO, time_s)
    # The batch goes through the stages of the pipeline, each of which may still be busy with another batch.
    end_s = time_s
    for i in range(kind.pp):
        end_s = max(end_s, worker.stage_free_s[i]) + stage_s + (extra_s if i == 0 else 0.0)
        if i < kind.pp - 1:
            end_s += send_s
        worker.stage_free_s[i] = end_s
    lane.run_first_s, lane.run_growth_s = end_s - time_s, 0.0
    set_time(state, l, end_s)


@where_has("dp_ranks", _launch_step_alone)
def _launch_step(state, l, time_s, goes_on):
    """Start the step that was formed on lane l.

    The data-parallel ranks of an engine start together (joint_steps.py), so such a rank only notes that its
    step is ready.
    """
    w = state.lanes[l].worker
    if state.dp_ranks[w].count == 1:
        _launch_step_alone(state, l, time_s, goes_on)
        return
    state.lanes[l].run_steps = 1
    state.dp_ranks[w].goes_on = goes_on
