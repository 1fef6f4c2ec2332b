"""What the engines read and write: records, their fields, and the constants that stand for names.

A worker is one engine. It forms batches on lanes: one lane without pipeline parallelism, `pp` lanes with it,
because that many batches are in flight at once. Each data-parallel rank of an engine is a worker here, with
one lane; the ranks of an engine follow each other, and events are those of the first rank's lane (ranks.py).
A decode sits in a slot of its lane; the part of a prompt that a batch computes is a chunk. A request that
runs holds one of the worker's seats, of which vLLM's max_num_seqs is the number. A batch of decodes alone is
repeated while nothing changes in it: a run of steps. In kernel.py and splitwise.py a lane holds the whole
batch; in distserve.py a lane is one pipeline rank.

Indices: w worker (v the one that decodes, where there are two), l lane, r request, e entry of a cache, u
tenant. In formulas s is a lane's count of decode steps, c the tokens of a request in the KV cache. Fields
named is_... are 0 or 1. A list of requests is a pair of fields, `head` and `tail` (queues.py); a heap of
requests is given by the request at its root. Constants that are passed to compiled functions are numpy
integers: for a Python literal Numba would compile the function once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.models.parallelism import MAX_PP
from planner.models.speculation import MOST_DRAFTS

MIXED, PREFILL, DECODE = np.int64(0), np.int64(1), np.int64(2)  # Values of WORKER.role.
(  # Values of WORKER.status.
    OUT_OF_SERVICE,  # It is down, or has not started yet.
    IN_SERVICE,
    DRAINING,  # It ends its requests and takes no new ones.
    RESTARTING,  # It comes back in the other role.
) = (np.int64(i) for i in range(4))
TTFT, TBT, TPOT, E2E = np.int64(0), np.int64(1), np.int64(2), np.int64(3)  # Values of LIMIT.metric.
FINISHED, REJECTED, UNFINISHED = 0, 1, 2  # Values of REQUEST.status.
NONE = np.int64(-1)  # In place of an index: no request, worker or entry.
NEVER = np.inf  # In place of a time: no such event is due.
# Above every step and every number of a request. If a compiled function called np.iinfo, loading its
# code from disk would import scipy.linalg.
LARGEST = np.int64(np.iinfo(np.int64).max)
ZERO, ONE = np.int64(0), np.int64(1)  # In place of literals, as the docstring says.
BLOCK = KV_BLOCK_TOKENS
# Places in a lane's stack of longest gaps (State.gaps). Set by hand: a full stack is emptied into the
# requests (counting.note_gap).
GAP_DEPTH = 64
GROUP = 16  # Routers look at the workers of a pool in groups of this many (State.lowest). Set by hand.

# The lists of a worker, first in first out.
(
    INBOUND,  # Requests that wait for blocks to receive KV.
    READY,  # Requests whose KV has arrived, and that wait for a seat.
    PARTIAL,  # Prompts that are computed in part.
    UNKNOWN,  # Asynchronous engines: prompts that came after the step in flight had begun.
    LEAVING,  # Asynchronous engines: requests with their last token, which keep seat and blocks for a step.
    RESTING,  # Decodes that the token budget has left out of a step.
    AT_ROUTER,  # Prompts for this worker that the router holds (held_prompts.py).
) = (np.int64(i) for i in range(7))
LISTS = 7

TYPE = np.dtype(
    [
        ("form", "i8"),  # The form of its step times (models/foreign_forms.py).
        # Its numbers, tables and sizes of tables (foreign_forms.Compiled). The lengths are the most that any
        # form has.
        ("numbers", "f8", 12),  # k in step_times.py.
        ("table_at", "i8", 4),  # Where its tables begin in State.tables.
        ("table_width", "i8", 5),  # Compiled.widths
        # Policies, with names as codes of planner/policies.py:
        ("batching", "i8"),
        ("queue_order", "i8"),
        ("queue_window_s", "f8"),  # A prompt may be overtaken by prompts that arrive up to this much later.
        ("queue_longest_tokens", "f8"),  # The longest prompt; shorter ones have a window in proportion.
        ("queue_batch", "i8"),  # Prompts overtake only within scheduling batches of this many; 0: no batches.
        # 1: requests have a priority, as in vLLM, by which they are preempted too (priorities.py).
        ("by_priority", "i8"),
        ("admission", "i8"),
        ("token_budget", "i8"),  # max_num_batched_tokens
        ("long_prefill_tokens", "i8"),  # No chunk is longer, unless one request is alone; 0: no such limit.
        ("seats", "i8"),  # max_num_seqs
        ("kv_blocks", "i8"),
        ("longest_blocks", "i8"),  # Longer requests are rejected.
        ("kv_capacity_tokens", "i8"),  # Read by batchings that count KV in tokens.
        ("decode_batch_tokens", "i8"),  # distserve.py: the most context of a batch of decodes.
        ("watermark_blocks", "i8"),  # Blocks that are left free when a prompt is admitted.
        # Blocks that a request takes at once and keeps; 0: it takes them as needed.
        ("reserved_blocks", "i8"),
        # Beside the blocks of its tokens a sequence takes `constant_blocks`, and `window_ratio` times those
        # of its attention window, at most `window_blocks` (models/kv_layout.py).
        ("constant_blocks", "i8"),
        ("window_ratio", "f8"),
        ("window_blocks", "i8"),
        # Free blocks that a computed token takes, for itself and for sliding windows; 0 if windows do not
        # change what the cache keeps (WorkerType.taken_blocks_per_token).
        ("taken_blocks_per_token", "f8"),
        ("patience_steps", "i8"),  # Batching lightllm: decode steps until new prompts are tried again.
        ("vidur_restarts", "i8"),  # 1: a prompt preempted in part is taken for a whole one, as Vidur does.
        ("pp", "i8"),
        ("lanes", "i8"),
        # Fields that a worker with an `Engine` (models/engine.py) has:
        ("is_async", "i8"),  # 1: the next step is formed while one runs.
        ("prompts_first", "i8"),  # 1: a step is of prompts or of decodes, and prompts go first.
        ("poll_steps", "i8"),  # The engine looks for new requests after this many decode steps (polling.py).
        ("kv_delay_steps", "i8"),  # A request whose KV has arrived joins this many steps later.
        ("pulls_kv", "i8"),  # 1: KV of hand-offs is pulled by steps (transfer.py); 0: it is sent at once.
        ("overlaps", "i8"),  # 1: the host works while the GPUs do.
        ("host_s", "f8", 2),  # Seconds of the host per step, and per sequence in it.
        # Seconds of the host that a step with prompts takes beyond `host_s`, for its launches.
        ("launch_s", "f8"),
        # The part of the host's work that must wait for the GPUs, in seconds like `host_s`.
        ("rest_s", "f8", 2),
        ("token_s", "f8"),  # Seconds of the API server per token. No step is shorter than its tokens' time.
        ("prompt_token_s", "f8"),  # Seconds of the API server to make a token of a prompt's text.
        # Seconds from the end of a prefill until the API server of the decode worker has the request; then it
        # makes tokens of the prompt's text once more.
        ("hand_off_s", "f8"),
        # 1: clients do not get the token that a prefill worker makes; its decode worker makes it again.
        ("discards_token", "i8"),
        # Seconds from the first hand-off between two workers until they are connected; no KV crosses before.
        ("first_hand_off_s", "f8"),
        # Speculative decoding:
        ("accepted", "f8", MOST_DRAFTS),  # accepted[i]: the probability that more than i drafts are accepted.
        ("dropped_blocks", "i8"),  # KV blocks found in a prefix cache that are computed again (caches.py).
        ("lookahead_tokens", "i8"),  # KV slots that a decode keeps beyond the tokens that a step checks.
        ("draw_seed", "i8"),
        # What a pending prompt token, an assigned request, a prompt token of an assigned request and a
        # waiting request each add to the routing score of a worker. A row for the workers of ARRIVAL_POOL and
        # one for those of HAND_OFF_POOL.
        ("routing_weight", "f8", (2, 4)),
    ]
)
WORKER = np.dtype(
    [
        ("type", "i8"),
        ("role", "i8"),
        ("status", "i8"),  # OUT_OF_SERVICE, IN_SERVICE, DRAINING or RESTARTING.
        ("pool_index", "i8"),  # The worker's place in its row of State.pools.
        ("epoch", "i8"),  # How often it went down.
        ("slow_factor", "f8"),  # Every step takes this many times as long.
        ("first_lane", "i8"),
        ("used_blocks", "i8"),  # KV blocks in use or reserved.
        ("running", "i8"),  # Requests that hold a seat.
        ("first_waiting", "i8"),  # The root of the heap of its waiting prompts, or the first of their list.
        ("waiting", "i8"),  # The number of these prompts.
        ("head", "i8", LISTS),
        ("tail", "i8", LISTS),
        # A worker with an `Engine`: when its latest step began. An asynchronous engine forms the next step at
        # that time. NEVER without a step in flight (polling.has_step_in_flight).
        ("formed_s", "f8"),
        ("unpolled", "i8"),  # The weights of its steps since it looked for new requests (polling.py).
        # Asynchronous engines: KV blocks and seats of hand-offs that were given back since `formed_s`. The
        # next step was formed without them.
        ("late_blocks", "i8"),
        ("late_seats", "i8"),
        ("read_s", "f8"),  # When its API server will have made tokens of all prompts sent to it.
        ("awaited_blocks", "i8"),  # KV blocks that the first hand-off that waits for room needs.
        ("stage_free_s", "f8", MAX_PP),  # When each stage of its pipeline is free.
        ("steps_since_prompts", "i8"),  # Batching lightllm: decode steps since it last looked at new prompts.
        ("served_batch", "i8"),  # The scheduling batch (queue_batch) whose prompts are served now.
        ("filled_batch", "i8"),  # The latest scheduling batch.
        ("filled", "i8"),  # How many prompts are in `filled_batch`.
        ("preemptions", "i8"),  # How many there were: without priorities the latest goes first in the queue.
        # What routers see:
        ("pending_tokens", "f8"),  # Prompt tokens that are assigned and not yet prefilled.
        ("assigned", "f8"),  # Requests, from their assignment until they are gone.
        ("assigned_tokens", "f8"),  # The prompt tokens of these requests.
        ("future_tokens", "f8"),  # Their prompt and predicted output tokens, weighted as best-fit does.
        ("heavy", "i8"),  # How many of the assigned requests have a long predicted output.
        # Routing heavy-light: long and other requests, and used KV blocks, in the last report of the worker.
        ("reported_heavy", "i8"),
        ("reported_light", "i8"),
        ("reported_blocks", "i8"),
        # Routing best-fit-rebalanced: how wrong predictions were, Aladdin's l^e and b^e (predictions.py).
        ("error_tokens", "f8"),
        ("error_sequences", "f8"),
        # The least time by which a decode is ahead of the limit per token, for routings that look at it.
        ("least_saved_s", "f8"),
        # Since when it has had no work, for flips and for workers that drain. While it restarts: until when.
        ("idle_since_s", "f8"),
        # Sums since the start of the simulation:
        ("busy_s", "f8"),
        ("steps", "i8"),
        ("dense_tokens", "f8"),  # Tokens through the dense layers.
    ]
)
LANE = np.dtype(
    [
        ("worker", "i8"),
        ("width", "i8"),  # Tokens of a decode in a step: 1, or 1 and its drafts.
        ("decode_step", "i8"),  # Decode steps so far: s.
        ("decodes", "i8"),  # Running decodes, which have the first slots.
        # Of these, in the last slots: those whose own last token came at another time than `last_token_s`.
        ("out_of_step", "i8"),
        ("last_token_s", "f8"),
        ("next_finish_step", "i8"),  # The smallest `finish_step` of the slots.
        ("kv_sum", "f8"),  # The KV tokens that decodes read in the next step, K in models/latency.py.
        ("residue", "i8", BLOCK),  # Decodes by (c - s) mod 16, which tells when they need a block.
        ("coming_blocks", "i8"),  # With drafts: KV blocks that the decodes take in the next step.
        ("gap_depth", "i8"),  # The height of its stack in State.gaps.
        # The step that is being formed or in progress:
        ("prefills", "i8"),  # Chunks.
        ("prefill_tokens", "i8"),
        ("pairs", "f8"),  # The sum of n (c + (n + 1) / 2) over chunks of n tokens.
        ("squares", "f8"),  # The sum of n^2.
        ("cached", "f8"),  # The sum of c, the tokens of a prompt that were cached before its chunk.
        ("cached_64", "f8"),  # The sum of ceil(c / 64): Vidur's tables count in tiles of 64.
        ("is_decoding", "i8"),  # 1: the lane's decodes take part.
        ("stage_s", "f8"),  # Seconds that each stage of the pipeline takes for the step.
        # The current run of equal steps; without steps the lane is idle.
        ("run_start_s", "f8"),
        ("run_first_s", "f8"),  # Seconds of its first step; each further one takes `run_growth_s` more.
        ("run_growth_s", "f8"),
        ("run_steps", "i8"),
    ]
)
SLOT = np.dtype(
    [
        ("request", "i8"),
        ("finish_step", "i8"),  # The `decode_step` at which it is done.
        ("context_offset", "i8"),  # Context less the step's number; constant while it runs.
        ("settled_step", "i8"),  # Gaps of steps after this one are not yet in the request's longest gap.
        ("admission_number", "i8"),
        ("held_blocks", "i8"),  # With drafts: its KV blocks now.
        ("next_blocks", "i8"),  # With drafts: its KV blocks in the next step.
    ]
)
# An entry of a lane's stack of gaps: the longest gap since the step of the entry below, up to this step.
GAP = np.dtype([("step", "i8"), ("gap_s", "f8")])
# `is_last`: it is the last chunk of its prompt.
CHUNK = np.dtype([("request", "i8"), ("tokens", "i8"), ("is_last", "i8")])
REQUEST = np.dtype(
    [
        ("arrival_s", "f8"),
        ("input_tokens", "i8"),
        ("output_tokens", "i8"),
        ("predicted_tokens", "i8"),  # Output tokens, as schedulers predict them.
        ("generated_tokens", "i8"),
        ("computed_tokens", "i8"),  # Prompt tokens in the KV cache, recomputed ones included.
        # Until the request decodes: its tokens to prefill. Then: c, its tokens in the KV cache.
        ("length_tokens", "i8"),
        # Rises with each admission; in distserve.py one number for all that are admitted in one batch.
        ("admission_number", "i8"),
        ("known_s", "f8"),  # Since when its worker could take it into a step.
        ("known_step", "i8"),  # The first step of its decode worker that may include it.
        ("key", "f8"),  # Its place in a heap: smallest first, then by index.
        ("left", "i8"),  # Its two children in that heap.
        ("right", "i8"),
        ("next", "i8"),  # The next request in the list in which it waits.
        ("last_token_s", "f8"),
        ("scheduled_s", "f8"),  # When it was first admitted, -1 before.
        ("first_token_s", "f8"),
        ("finish_s", "f8"),
        ("gap_max_s", "f8"),
        ("predicted_later_tokens", "i8"),  # The next prediction, once it has made `predicted_tokens`.
        ("epoch", "i8"),  # WORKER.epoch of its prefill worker when the prompt was done.
        ("decode_epoch", "i8"),  # WORKER.epoch of its decode worker when that reserved blocks for it.
        ("prefill_step_s", "f8"),  # Seconds of its last prefill step, with which a transfer may overlap.
        ("prefill_worker", "i8"),
        ("decode_worker", "i8"),
        ("preemptions", "i8"),
        # Its computed prompt tokens that the router still takes for pending, as it has seen no token yet.
        ("unseen_tokens", "i8"),
        ("drafted_blocks", "i8"),  # While a step leaves it out: its KV blocks for drafts, beyond its tokens'.
        ("status", "i8"),
    ]
)
AFTER = np.dtype(  # What a request waits for, in traces with sessions.
    [
        # Unfinished requests that it waits for; NONE once its arrival time is known, or it will never arrive.
        ("parents", "i8"),
        ("think_s", "f8"),  # The request arrives this long after the last of its parents has finished.
        ("child", "i8"),  # The request's first child in State.children.
    ]
)
LIMIT = np.dtype(
    [
        ("metric", "i8"),
        ("limit_s", "f8"),
        ("of_class", "i8"),  # The class of requests that it limits, NONE: all requests.
        ("allowed", "i8"),  # The most violations with which it holds.
        ("violations", "i8"),
        ("counted", "i8"),  # The values that were tested against it.
        # TTFT and E2E: requests under way that are above the limit already, but are no `violations` yet.
        ("overdue", "i8"),
        ("overdue_at_s", "f8"),  # The time for which `overdue` is known.
        ("next_overdue", "i8"),  # The first request that may be overdue after that.
    ]
)
REQUEST_CLASS = np.dtype(  # What a request has besides where limits or the queue are of classes.
    [
        ("of_class", "i8"),  # An index into the classes of the limits, NONE: of none.
        ("due_s", "f8"),  # For the queue `edf`: how long after its arrival it is due.
    ]
)
RUN = np.dtype(
    [
        ("worker", "i8"),
        ("start_s", "f8"),
        ("first_s", "f8"),
        ("growth_s", "f8"),
        ("steps", "i8"),
        ("sequences", "i8"),  # Sequences for which each of these steps was a gap.
        ("decodes", "i8"),  # Decodes in each of these steps.
        # NONE: these are no steps of an engine, but gaps of single requests, or those of a class once more.
        ("prefill_tokens", "i8"),
        ("blocks", "i8"),  # KV blocks in use.
        ("of_class", "i8"),  # 0: gaps of all requests; k + 1: once more, the gaps of class k alone.
    ]
)


def run_seconds(runs: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
    """(runs,): the seconds of each of these records RUN, whose step j (from 0) lasts first_s + j growth_s.

    It is summed as in the kernel (counting.run_s), so that both round alike.
    """
    steps = runs["steps"]
    return np.asarray(runs["first_s"] * steps + runs["growth_s"] * (steps * (steps - 1) / 2))


PART = np.dtype(  # A recorded chunk of a prompt or, with no tokens, a preemption.
    [
        ("run", "i8"),  # The index of its step in State.runs, or of the step that is recorded next.
        ("request", "i8"),
        ("tokens", "i8"),
        ("cached_tokens", "i8"),  # Tokens of the prompt that were in the KV cache before the step.
    ]
)
LINK = np.dtype(
    [
        ("block_s", "f8"),  # Seconds that a KV block takes on it.
        ("latency_s", "f8"),  # What every transfer takes in addition.
        ("overlap_frac", "f8"),  # The share of a transfer that may hide behind the last prefill step.
        ("overlap_tokens", "i8"),  # Shorter prompts are sent after that step.
        ("is_shared", "i8"),  # 1: one transfer after the other; 0: all at once.
        ("slow_factor", "f8"),
        ("free_s", "f8"),  # When it has sent all that it was given.
        ("last_s", "f8"),  # When the latest transfer arrives: none arrives before one that was sent earlier.
        ("root", "i8"),  # The root of the heap of requests under way, by the end of their transfer.
    ]
)
# `factor` is the new `slow_factor` of the worker (SLOW) or of the link (LINK_SLOW).
DISTURBANCE = np.dtype([("time_s", "f8"), ("kind", "i8"), ("worker", "i8"), ("factor", "f8")])
# Values of DISTURBANCE.kind. At a PAUSE the kernel returns; called again, it goes on from there.
DOWN, UP, SLOW, LINK_SLOW, DRAIN, GONE, PAUSE = range(7)

RANK = np.dtype(  # More fields of a lane in distserve.py: a pipeline rank. Its three lists are named there.
    [
        ("head", "i8", 3),
        ("tail", "i8", 3),
        ("formed", "i8"),  # Prefill batches so far.
    ]
)
DP_RANK = np.dtype(  # More fields of a worker, in fleets with data-parallel ranks.
    [
        ("first", "i8"),  # The first of the ranks that step together.
        ("count", "i8"),  # The number of these ranks; 1 for a worker without others.
        ("turn", "i8"),  # In the first rank: which rank comes first among equally loaded ones.
        ("goes_on", "i8"),  # 1: the step that was formed may be followed by others like it.
    ]
)
MACHINE = np.dtype(  # More fields of a worker in splitwise.py.
    [
        ("reserved_tokens", "i8"),  # KV tokens that are reserved by tasks that run or have run.
        ("promised_tokens", "i8"),  # KV tokens of the requests that were routed here.
        ("formed", "i8"),  # Batches so far.
        ("is_cut", "i8"),  # 1: its batch of decodes ends with the step that it is in.
        ("home", "i8"),  # The pool to which it belongs.
        ("pool", "i8"),  # The pool in which it is now.
        ("mixed_since_s", "f8"),
        # The batch that is being formed:
        ("picked", "i8"),  # Tasks that are new in it: the first of State.picks.
        ("batch_tasks", "i8"),
        ("batch_tokens", "i8"),
        ("claimed_tokens", "i8"),  # `reserved_tokens`, with the KV that the batch will reserve.
    ]
)
TASK = np.dtype(  # More fields of a request in splitwise.py.
    [
        ("phase", "i8"),  # Where it stands: a constant of splitwise.py.
        # Batches that left it out. While it waits, less `MACHINE.formed`, so that each new batch counts for
        # all that wait at once.
        ("skips", "i8"),
        ("arrival_number", "i8"),  # Its number among those that came to its machine at the same time.
        ("is_picked", "i8"),
        ("is_sent", "i8"),  # 1: its KV is on the way; 0: it waits for room.
        ("next", "i8", 2),  # In the list of all that wait, and in that of prompts or of evicted ones.
        ("previous", "i8", 2),
    ]
)

# Fields of State that are None for fleets that do not need them; `State.has` is in this order.
OPTIONAL = ("caches", "dp_ranks", "adapters", "outputs", "offload", "classes")


def empty_field(kind: npt.DTypeLike, dimensions: int = 1) -> npt.NDArray[Any]:
    """An empty array of this type, for a field that a fleet does not use: Numba needs its type."""
    return np.zeros((0,) * dimensions, kind)


class State(NamedTuple):
    """Everything the engines read and write. W workers, L lanes, n requests, E entities with events.

    The entities are the lanes, then in kernel.py the link, in the other engines the requests, which may be on
    the link; last comes the outside world, whose events are the disturbances.
    """

    types: npt.NDArray[np.void]  # (T,) TYPE
    tables: npt.NDArray[np.float64]  # The tables of step times of all types, one after the other.
    workers: npt.NDArray[np.void]  # (W,) WORKER
    lanes: npt.NDArray[np.void]  # (L,) LANE
    slots: npt.NDArray[np.void]  # (L, seats) SLOT, the running decodes
    gaps: npt.NDArray[np.void]  # (L, GAP_DEPTH) GAP, longest first
    chunks: npt.NDArray[np.void]  # (L, seats) CHUNK, of the step in progress
    requests: npt.NDArray[np.void]  # (n,) REQUEST
    pools: npt.NDArray[np.int64]  # (2, W) workers that take arrivals, and hand-offs; splitwise.py: 3 pools
    order: npt.NDArray[np.int64]  # (W,) the order in which pools list workers (worker_rows)
    score: npt.NDArray[np.float64]  # (W,) routing score of each worker
    lowest: npt.NDArray[np.float64]  # (2, groups) lower bounds on the scores of the workers of a group
    link: npt.NDArray[np.void]  # (...,) LINK: first the whole network's, which has the heap (worker_places)
    disturbances: npt.NDArray[np.void]  # (...,) DISTURBANCE, in order of time
    limits: npt.NDArray[np.void]  # (K,) LIMIT
    policy: npt.NDArray[np.float64]  # (POLICY,) indexed by the constants GAMMA to LATEST_S below
    window: npt.NDArray[np.float64]  # (2,) requests that arrive, and gaps that end, in [start, end] count
    runs: npt.NDArray[np.void]  # (R,) RUN, empty if not recorded
    parts: npt.NDArray[np.void]  # PART, empty if not recorded
    due_s: npt.NDArray[np.float64]  # (E,) when each entity acts next; infinite: it has nothing to do
    sequence: npt.NDArray[np.int64]  # (E,) of entities due at one moment the smallest comes first
    heap: npt.NDArray[np.int64]  # (E,) the entities that are due, by (due_s, sequence): event_heap.py
    heap_index: npt.NDArray[np.int64]  # (E,) each entity's place in `heap`, NONE: it has none
    counters: npt.NDArray[np.int64]  # (COUNTERS,) indexed by the constants SIZE to REFUSED below
    paused: npt.NDArray[np.float64]  # (2,) at a pause: the last event that was not an arrival, and its time
    # Only for distserve.py and splitwise.py:
    ranks: npt.NDArray[np.void] = np.zeros(0, RANK)  # (L,)
    marks: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # Counters of splitwise.py.
    machines: npt.NDArray[np.void] = np.zeros(0, MACHINE)  # (W,)
    tasks: npt.NDArray[np.void] = np.zeros(0, TASK)  # (n,) by request
    # (W, ...) tasks: 2 r for the prompt of request r, 2 r + 1 for its tokens.
    queues: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)
    picks: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # (seats,) requests that are new in a batch
    # For all engines:
    after: npt.NDArray[np.void] = np.zeros(0, AFTER)  # (n + 1,), empty if no request waits for others
    children: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # (e,) requests that wait, by their parent
    place: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # (W,) places of workers; empty if all share a link
    link_between: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)  # (P, P) index into `link`, by place
    # (W, W) met_s[w, v]: since when decode worker v is connected to prefill worker w; infinite: not yet.
    # Empty where first hand-offs take no longer than others.
    met_s: npt.NDArray[np.float64] = np.zeros((0, 0))
    edges_s: npt.NDArray[np.float64] = np.zeros(0)  # (V + 1,) edges of the windows in which limits count too
    in_windows: npt.NDArray[np.void] = np.zeros((0, 0), LIMIT)  # (K, V) the limits there; V = 0: none
    caches: Any = None  # A cache_layout.Caches where workers keep prefixes or policies count tenants.
    dp_ranks: Any = None  # (W,) DP_RANK where workers have data-parallel ranks
    adapters: Any = None  # An adapter_layout.AdapterState where workers serve LoRA.
    outputs: Any = None  # OutputTable (planner.models.output_length) that predictions are read from
    offload: Any = None  # An offload_layout.Offload where CPU memory keeps KV blocks.
    classes: Any = None  # (n,) REQUEST_CLASS where limits or the queue are of classes of requests
    # (OPTIONAL,) which of the fields from `caches` on this fleet uses, where the kernel is compiled with all
    # of them; None for an ordinary fleet (kernel_variants.py).
    has: Any = np.ones(len(OPTIONAL), np.bool_)


# The rows of `pools`: workers that take arrivals, and those that take hand-offs.
ARRIVAL_POOL, HAND_OFF_POOL = np.int64(0), np.int64(1)
# Counters of the rows: add the pool to these numbers for its length, round robin's turn and the routing
# policy. At SIZE + 2 is the length of splitwise.py's mixed pool.
SIZE, TURN, ROUTING = np.int64(0), np.int64(3), np.int64(5)
(
    PENDING,  # Entities in the heap of events.
    SCHEDULED,  # Events so far, in engines where these happen in the order in which they were caused.
    # The next request to arrive at its own time: all before it have arrived, or wait for others (AFTER).
    ENTERED,
    RELEASED,  # Only requests before this one may arrive: all requests, except in a closed loop.
    DONE,  # Requests that are finished or rejected.
    ADMITTED,  # Prompts that were admitted to a batch so far.
    RUNS,  # Runs that were recorded, or would have been with more room.
    PARTS,  # Parts (records of chunks and preemptions), counted in the same way.
    RANDOM_STATE,
    NEXT_DISTURBANCE,
    LIMBO,  # The root of the heap of requests that wait for a worker to come up.
    LOST,  # The root of the heap of requests that have lost their worker and are to be routed.
    FREED,  # The root of the heap of requests whose parents have finished, and that will arrive.
    BROKEN,  # 1: a limit can no longer hold in one of the windows.
    HELD,  # The root of the heap of requests that wait at the router for a free worker.
    IN_DOUBT,  # How many more of the last requests must decode before LATEST_S for the backlog test.
    PREFILLED,  # 1: every prompt arrives computed, on the first worker.
    READING,  # The root of the heap of requests whose prompts API servers tokenize, by when they are done.
    REFUSED,  # Requests that were rejected so far.
    HELD_PROMPTS,  # Prompts that wait at the router, in the workers' lists AT_ROUTER.
) = range(7, 27)
COUNTERS = 27

# The indices of State.policy: parameters of policies, and times that the kernel notes for them.
(
    GAMMA,  # Routing best-fit: the weight of predicted output tokens (Policies.context_weight).
    THETA,  # Routing best-fit: up to this share of a limit workers are filled (Policies.headroom_frac).
    TTFT_S,  # Routing best-fit packs up to these two limits.
    TBT_S,
    FLIP_S,  # Idle seconds before a worker flips (flips.py).
    FRONT_END_S,  # Seconds from a request's arrival until it reaches an engine.
    HEAVY_TOKENS,  # Routing heavy-light: the least tokens of a long output.
    LOAD_PERIOD_S,  # Routing heavy-light: workers report their loads this often.
    HEARD_S,  # The time of their last report.
    PREDICTOR,  # How many times as long the steps of prefill workers are with a predictor.
    HEARTBEAT_S,  # Aladdin's heartbeat (predictions.py).
    NEXT_BEAT_S,  # When the next heartbeat begins.
    LIVE,  # 1: the state is that of a live router (planner/runtime), which simulates nothing.
    RESTART_S,  # Seconds that a flip takes.
    REPURPOSE_S,  # Seconds after which a worker changes its pool for good (flips.py, splitwise_pools.py).
    SHORT_SINCE_S,  # Plus a pool (0 or 1, so index 16 is taken): since when it is short of workers.
) = range(16)
# The last requests, of the backlog test, arrive from LAST_S on. At LATEST_S those that do not decode yet have
# waited too long.
LAST_S, LATEST_S = 17, 18
POLICY = 19
