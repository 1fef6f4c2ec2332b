"""What the engines read and write: records, their fields, and the constants that stand for names.

A worker is one engine. It forms batches on lanes: one lane without pipeline parallelism, `pp` of them or
more with it, because that many batches are in flight at once. Each data-parallel rank of an engine is a
worker here, with one lane; the ranks of an engine follow each other, and events are of the first one's lane
(ranks.py). A decode sits in a slot of its lane, a part of
a prompt that the batch computes is a chunk. A batch of decodes alone is repeated: a run of equal steps. In
kernel.py and splitwise.py a lane holds the whole batch; in distserve.py lane l is the l-th rank.

Indices: w worker (v the one that decodes, where there are two), l lane, r request, e entry of a cache, u
tenant. In formulas s is a lane's count of decode steps, c the tokens of a request in the KV cache.
Constants that are passed to compiled functions are numpy integers: for a Python literal Numba would compile
the function once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.models.parallelism import MAX_PP
from planner.models.speculation import MOST_DRAFTS

MIXED, PREFILL, DECODE = np.int64(0), np.int64(1), np.int64(2)  # roles
TTFT, TBT, TPOT, E2E = np.int64(0), np.int64(1), np.int64(2), np.int64(3)
FINISHED, REJECTED, UNFINISHED = 0, 1, 2
NONE = np.int64(-1)
ZERO, ONE = np.int64(0), np.int64(1)
BLOCK = 16
GAP_DEPTH = 64
GROUP = 16  # workers of a pool that the router looks at together

# lists of a worker, first in first out: for blocks to receive KV, for a seat, prompts computed in part
# of an asynchronous engine: prompts that came after the step in flight began, and who had his last token in
# it and keeps seat and blocks until the next is formed; decodes that the token budget has left out of a step
INBOUND, READY, PARTIAL, UNKNOWN, LEAVING, RESTING = (np.int64(i) for i in range(6))
LISTS = 6

TYPE = np.dtype(
    [
        ("form", "i8"),
        ("numbers", "f8", 12),
        ("table_at", "i8", 4),  # where its tables begin in State.tables
        ("table_width", "i8", 5),  # and how long a row of them is
        ("batching", "i8"),
        ("queue_order", "i8"),
        ("queue_window_s", "f8"),  # a prompt is overtaken only by what arrives this much later
        ("queue_longest_tokens", "f8"),  # of the longest prompt: only it may wait so long
        ("queue_batch", "i8"),  # ... or by prompts of its own scheduling batch; 0: no such batches
        ("admission", "i8"),
        ("token_budget", "i8"),  # max_num_batched_tokens
        ("long_prefill_tokens", "i8"),  # no chunk is longer unless a request is alone; 0: no such limit
        ("seats", "i8"),  # max_num_seqs
        ("kv_blocks", "i8"),
        ("longest_blocks", "i8"),  # of the longest request it takes
        ("kv_capacity_tokens", "i8"),  # where KV is counted in tokens
        ("decode_batch_tokens", "i8"),  # distserve: context of a batch of decodes
        ("watermark_blocks", "i8"),  # left free when a prompt is admitted
        ("reserved_blocks", "i8"),  # that every request takes at once and keeps; 0: blocks as they are needed
        # beside the blocks of its tokens a sequence takes so many, and window_ratio times those of a window
        ("constant_blocks", "i8"),
        ("window_ratio", "f8"),
        ("window_blocks", "i8"),
        ("recycled_blocks", "f8"),  # that the windows of each computed token take and give back
        ("patience_steps", "i8"),  # lightllm: decode steps until new prompts are tried again
        ("vidur_restarts", "i8"),  # 1: a prompt preempted in part is taken for a whole one, as Vidur does
        ("pp", "i8"),
        ("lanes", "i8"),
        ("is_async", "i8"),  # 1: the next step is formed while one runs
        # of an engine: so many steps after the one in which KV arrives go without it
        ("kv_delay_steps", "i8"),
        ("overlaps", "i8"),  # 1: the host works while the GPUs do
        ("host_s", "f8", 2),  # of the engine's host, per step and per sequence in it
        ("rest_s", "f8", 2),  # ... that no asynchronous step hides
        ("token_s", "f8"),  # that its API server takes to pass a token on: no step is shorter than its tokens
        ("prompt_token_s", "f8"),  # that its API server takes to make a token of a prompt's text
        # of speculative decoding: how likely i drafts or more are accepted, KV slots it keeps beyond the
        # tokens it checks, and what the draws begin with
        ("accepted", "f8", MOST_DRAFTS),
        ("lookahead_tokens", "i8"),
        ("draw_seed", "i8"),
        # score per pending prompt token, request, prompt token of a request, waiting request: front, back
        ("routing_weight", "f8", (2, 4)),
    ]
)
WORKER = np.dtype(
    [
        ("type", "i8"),
        ("role", "i8"),
        ("is_up", "i8"),  # 0 down, 1 up, 2 draining: it ends what it has, and nothing new comes
        ("pool_index", "i8"),  # where it is in its row of State.pools
        ("epoch", "i8"),  # how often it went down
        ("slow_factor", "f8"),  # every step takes this many times as long
        ("first_lane", "i8"),
        ("used_blocks", "i8"),  # of its KV, in use or reserved
        ("running", "i8"),  # requests that hold a seat
        ("first_waiting", "i8"),  # of the prompts: the root of their heap, or the first of their list
        ("waiting", "i8"),  # how many
        ("head", "i8", LISTS),
        ("tail", "i8", LISTS),
        # of an engine: when the step before the next one began, infinite where none runs; of an asynchronous
        # one the blocks and seats of hand-offs given back since: the next step was formed without them
        ("formed_s", "f8"),
        ("late_blocks", "i8"),
        ("late_seats", "i8"),
        ("read_s", "f8"),  # when its API server will have made tokens of all prompts sent to it
        ("asked_blocks", "i8"),  # of its KV, by the first of the hand-offs for which there was no room
        ("stage_free_s", "f8", MAX_PP),
        ("tried_steps", "i8"),  # lightllm: decode steps since new prompts were last tried
        ("served_batch", "i8"),  # of prompts, for queue_batch
        ("filled_batch", "i8"),  # the last one, and how many prompts are in it
        ("filled", "i8"),
        ("preemptions", "i8"),  # the request of the latest goes to the front
        # what the router sees
        ("pending_tokens", "f8"),  # prompt tokens assigned and not yet prefilled
        ("assigned", "f8"),  # requests, until they are gone
        ("assigned_tokens", "f8"),  # prompt tokens of those
        ("future_tokens", "f8"),  # prompt and predicted output tokens of those, weighted as best-fit does
        ("heavy", "i8"),  # of the assigned ones, with a long output as predicted
        ("told_heavy", "i8"),  # heavy-light: as it was last heard, with the rest, and the KV blocks in use
        ("told_light", "i8"),
        ("told_blocks", "i8"),
        # ... and, for best-fit-rebalanced, by how much predictions were wrong: Aladdin's l^e and b^e
        ("error_tokens", "f8"),
        ("error_sequences", "f8"),
        # ... and the least that one of its decodes is ahead of the limit per token, where anybody looks
        ("least_saved_s", "f8"),
        ("idle_since_s", "f8"),
        # totals
        ("busy_s", "f8"),
        ("steps", "i8"),
        ("dense_tokens", "f8"),  # through the dense layers
    ]
)
LANE = np.dtype(
    [
        ("worker", "i8"),
        ("width", "i8"),  # tokens that a decode has in a step: 1, or 1 and its drafts
        ("decode_step", "i8"),  # how many are done: s
        ("decodes", "i8"),  # running decodes: the first slots
        (
            "late_decodes",
            "i8",
        ),  # how many of the last slots had their last token at another time than the rest
        ("last_token_s", "f8"),  # of the rest
        ("next_finish_step", "i8"),  # the smallest of the slots
        ("kv_sum", "f8"),  # K of the next step
        ("residue", "i8", BLOCK),  # decodes by (c - s) mod 16: who needs a block next
        ("coming_blocks", "i8"),  # where decodes draft: KV blocks that they take in the next step
        ("gap_depth", "i8"),  # of its stack in State.gaps
        # the step being formed, or in progress
        ("prefills", "i8"),  # chunks
        ("prefill_tokens", "i8"),
        ("pairs", "f8"),  # sum n (c + (n + 1) / 2) over chunks of n tokens
        ("squares", "f8"),  # sum n^2
        ("cached_64", "f8"),  # sum ceil(c / 64)
        ("is_decoding", "i8"),  # 1: its decodes take part
        ("stage_s", "f8"),
        # the current run of equal steps; no steps: idle
        ("run_start_s", "f8"),
        ("run_first_s", "f8"),
        ("run_growth_s", "f8"),
        ("run_steps", "i8"),
    ]
)
SLOT = np.dtype(
    [
        ("request", "i8"),
        ("finish_step", "i8"),  # the `decode_step` at which it is done
        ("context_offset", "i8"),  # c - s, constant while it runs
        ("settled_step", "i8"),  # gaps of steps after this one are not yet in the request's longest gap
        ("admission_number", "i8"),
        # where decodes draft: the KV blocks it has, and will have in the next step
        ("held_blocks", "i8"),
        ("next_blocks", "i8"),
    ]
)
GAP = np.dtype([("step", "i8"), ("gap_s", "f8")])  # longest gap up to this step and after the entry below
CHUNK = np.dtype([("request", "i8"), ("tokens", "i8"), ("is_last", "i8")])  # is_last: of its prompt
REQUEST = np.dtype(
    [
        ("arrival_s", "f8"),
        ("input_tokens", "i8"),
        ("output_tokens", "i8"),
        ("predicted_tokens", "i8"),  # of output, as the schedulers believe
        ("generated_tokens", "i8"),
        ("computed_tokens", "i8"),  # of the prompt (recomputed ones included) in the KV cache
        ("length_tokens", "i8"),  # to prefill; later in the KV cache: c
        ("admission_number", "i8"),  # rises; distserve: one for all that are admitted in one batch
        ("known_s", "f8"),  # since when its worker could take it into a step
        ("known_step", "i8"),  # first of its decode worker that may hold it
        ("key", "f8"),  # place in a heap: smallest first, then by index
        ("left", "i8"),
        ("right", "i8"),
        ("next", "i8"),  # in the list it waits in
        ("last_token_s", "f8"),
        ("scheduled_s", "f8"),
        ("first_token_s", "f8"),
        ("finish_s", "f8"),
        ("gap_max_s", "f8"),
        ("predicted_later_tokens", "i8"),  # ... once it has made as many
        ("epoch", "i8"),  # of its prefill worker when the prompt was done
        ("epoch_back", "i8"),  # of its decode worker when that reserved blocks
        ("prefill_step_s", "f8"),  # seconds of its last prefill step, which a transfer may overlap with
        ("prefill_worker", "i8"),
        ("decode_worker", "i8"),
        ("preemptions", "i8"),
        ("status", "i8"),
    ]
)
AFTER = np.dtype(  # of a request, where any waits for others
    [
        ("parents", "i8"),  # that have not finished; NONE once it will arrive, or never will
        ("think_s", "f8"),  # so long after the last of them it arrives
        ("child", "i8"),  # the first of its children in State.children
    ]
)
LIMIT = np.dtype(
    [
        ("metric", "i8"),
        ("limit_s", "f8"),
        ("of_class", "i8"),  # that it is of, NONE: of all requests
        ("allowed", "i8"),  # violations that still pass
        ("violations", "i8"),
        ("counted", "i8"),
        # on ttft and e2e: what is late already and not among the violations yet, up to which time that is
        # known, and the first request that may be late after it
        ("late", "i8"),
        ("seen_s", "f8"),
        ("seen", "i8"),
    ]
)
REQUEST_CLASS = np.dtype(  # of a request, where limits or the queue are of classes
    [
        ("of_class", "i8"),  # among those of the limits, NONE: of none
        ("due_s", "f8"),  # how long after its arrival, for the queue `edf`
    ]
)
RUN = np.dtype(
    [
        ("worker", "i8"),
        ("start_s", "f8"),
        ("first_s", "f8"),
        ("growth_s", "f8"),
        ("steps", "i8"),
        ("sequences", "i8"),  # that saw these steps as gaps
        ("decodes", "i8"),  # in each of these steps
        ("prefill_tokens", "i8"),  # NONE: gaps, not steps of an engine
        ("blocks", "i8"),  # KV blocks in use
        ("of_class", "i8"),  # 0: of all requests; else 1 more than a class, whose gaps these are once more
    ]
)


def run_seconds(runs: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
    """Seconds of runs: the j-th of their steps lasts first + j growth. Added up as in the kernel."""
    steps = runs["steps"]
    return np.asarray(runs["first_s"] * steps + runs["growth_s"] * (steps * (steps - 1) / 2))


PART = np.dtype(  # a chunk of a prompt, or, of no tokens, a preemption
    [
        ("run", "i8"),  # index of its step in State.runs, or of the one that is recorded next
        ("request", "i8"),
        ("tokens", "i8"),
        ("cached_tokens", "i8"),  # of the prompt, before the step
    ]
)
LINK = np.dtype(
    [
        ("block_s", "f8"),
        ("latency_s", "f8"),
        ("overlap_frac", "f8"),  # of a transfer that may hide behind the last prefill step
        ("overlap_tokens", "i8"),  # prompts shorter than this are sent after it
        ("is_shared", "i8"),  # one transfer after the other, or all at once
        ("slow_factor", "f8"),
        ("free_s", "f8"),
        ("last_s", "f8"),
        ("root", "i8"),  # heap of requests under way, by end of transfer
    ]
)
DISTURBANCE = np.dtype([("time_s", "f8"), ("kind", "i8"), ("worker", "i8"), ("factor", "f8")])
# kinds of disturbances; at a PAUSE the kernel returns, and goes on where it was when it is called again
DOWN, UP, SLOW, LINK_SLOW, DRAIN, GONE, PAUSE = range(7)
DRAINING, TURNING = np.int64(2), np.int64(3)  # a worker; TURNING: it restarts in the other role

RANK = np.dtype(  # what a lane is in distserve.py besides
    [
        ("head", "i8", 3),
        ("tail", "i8", 3),
        ("formed", "i8"),  # prefill batches
    ]
)
DP_RANK = np.dtype(  # what a worker is besides, in fleets with data-parallel ranks
    [
        ("first", "i8"),  # of the ranks that step together
        ("count", "i8"),  # ... how many; the worker alone: 1
        ("turn", "i8"),  # of the first one: the rank that comes first among equally loaded ones
        ("goes_on", "i8"),  # 1: the step that was formed may be followed by others like it
    ]
)
MACHINE = np.dtype(  # what a worker is in splitwise.py besides
    [
        ("held_tokens", "i8"),  # of KV reserved by tasks that run or have run
        ("promised_tokens", "i8"),  # of KV, to requests routed here
        ("formed", "i8"),  # batches
        ("is_cut", "i8"),
        ("home", "i8"),  # pool
        ("pool", "i8"),
        ("mixed_since_s", "f8"),
        # the batch being formed
        ("picked", "i8"),  # tasks that are new in it: the first of State.picks
        ("batch_tasks", "i8"),
        ("batch_tokens", "i8"),
        ("claimed_tokens", "i8"),  # of KV held, with what the batch will reserve
    ]
)
TASK = np.dtype(  # what a request is in splitwise.py besides
    [
        ("phase", "i8"),
        ("skips", "i8"),  # batches left out of; less `formed` of its machine while it waits
        ("arrival_number", "i8"),  # among those that came to its machine at the same time
        ("is_picked", "i8"),
        ("is_sent", "i8"),  # its KV is on the way; else it asks for room
        ("next", "i8", 2),  # in the list of all that wait, in that of prompts or evicted
        ("previous", "i8", 2),
    ]
)


OPTIONAL = ("caches", "dp_ranks", "adapters", "outputs", "offload", "classes")  # fields of State


def nothing(kind: npt.DTypeLike, dimensions: int = 1) -> npt.NDArray[Any]:
    """An array of what a fleet does not have, of the type that it would be."""
    return np.zeros((0,) * dimensions, kind)


class State(NamedTuple):
    """Everything the engines read and write. W workers, L lanes, n requests, E entities with events.

    The entities are the lanes, then in kernel.py the link and the outside world, in the other engines the
    requests, which may be on the link, and the outside world.
    """

    types: npt.NDArray[np.void]  # (T,) TYPE
    tables: npt.NDArray[np.float64]  # of all types, one after the other
    workers: npt.NDArray[np.void]  # (W,) WORKER
    lanes: npt.NDArray[np.void]  # (L,) LANE
    slots: npt.NDArray[np.void]  # (L, seats) SLOT, the running decodes
    gaps: npt.NDArray[np.void]  # (L, GAP_DEPTH) GAP, longest first
    chunks: npt.NDArray[np.void]  # (L, seats) CHUNK, of the step in progress
    requests: npt.NDArray[np.void]  # (n,) REQUEST
    pools: npt.NDArray[np.int64]  # (2, W) workers that take arrivals, and hand-offs; splitwise.py: 3 pools
    order: npt.NDArray[np.int64]  # (W,) workers, the quick ones first (replay._in_line): so pools list them
    score: npt.NDArray[np.float64]  # (W,) routing score of each worker
    lowest: npt.NDArray[np.float64]  # (2, ...) no score of a group of a pool is below this
    link: npt.NDArray[np.void]  # (...,) LINK: of the whole network, which keeps the heap; places.rows
    disturbances: npt.NDArray[np.void]  # (...,) DISTURBANCE, in order of time
    limits: npt.NDArray[np.void]  # (K,) LIMIT
    policy: npt.NDArray[np.float64]  # (POLICY,) numbers of the policies, see below
    window: npt.NDArray[np.float64]  # (2,) requests arriving, and gaps ending, in [start, end] count
    runs: npt.NDArray[np.void]  # (R,) RUN, empty if not recorded
    parts: npt.NDArray[np.void]  # PART, empty if not recorded
    due_s: npt.NDArray[np.float64]  # (E,) when each entity acts next; infinite: it has nothing to do
    sequence: npt.NDArray[np.int64]  # (E,) who of those due at one moment comes first
    heap: npt.NDArray[np.int64]  # (E,) those that are due, by (due_s, sequence): event_heap.py
    heap_index: npt.NDArray[np.int64]  # (E,) where in it each is, NONE: it is not
    counters: npt.NDArray[np.int64]  # (COUNTERS,) see below
    paused: npt.NDArray[np.float64]  # (2,) the last event that was no arrival before a pause, and its time
    # of distserve.py and splitwise.py alone
    ranks: npt.NDArray[np.void] = np.zeros(0, RANK)  # (L,)
    marks: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # counters of splitwise.py
    machines: npt.NDArray[np.void] = np.zeros(0, MACHINE)  # (W,)
    tasks: npt.NDArray[np.void] = np.zeros(0, TASK)  # (n,) by request
    queues: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)  # (W, ...) tasks: 2 request, 1 more for tokens
    picks: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # (seats,) requests new in a batch
    after: npt.NDArray[np.void] = np.zeros(0, AFTER)  # (n + 1,), empty where nobody waits for others
    children: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # (e,) requests that do, by parent
    place: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # (W,) where workers lie; empty: nobody asks
    link_between: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)  # (P, P) index into `link`, by place
    edges_s: npt.NDArray[np.float64] = np.zeros(0)  # (V + 1,) of the windows in which limits are held too
    in_windows: npt.NDArray[np.void] = np.zeros((0, 0), LIMIT)  # (K, V), V = 0: over the whole alone
    caches: Any = None  # cache_layout.Caches where workers keep prefixes
    dp_ranks: Any = None  # (W,) DP_RANK where workers have data-parallel ranks
    adapters: Any = None  # adapter_layout.Adapters where workers serve LoRA
    outputs: Any = None  # OutputTable (planner.models.output_length) that predictions are read from
    offload: Any = None  # offload_layout.Offload where CPU memory keeps KV blocks
    classes: Any = None  # (n,) REQUEST_CLASS where limits or the queue are of classes of requests
    # (OPTIONAL,) which of those that are not None are there; None for an ordinary fleet (kernel_variants.py)
    has: Any = np.ones(len(OPTIONAL), np.bool_)


# counters; FRONT and BACK also name the rows of `pools`, whose lengths, a third one included, come first
FRONT, BACK = np.int64(0), np.int64(1)
SIZE, TURN, ROUTING = np.int64(0), np.int64(3), np.int64(5)  # + FRONT or BACK; TURN: of round robin
(
    PENDING,  # entities in the heap of events
    SCHEDULED,  # events so far, where they happen in the order in which they were caused
    ENTERED,  # requests that have arrived
    RELEASED,  # requests that may arrive: all but in a closed loop
    DONE,  # requests that are finished or rejected
    ADMITTED,  # prompts to a batch so far
    RUNS,  # recorded, or that would be were there room
    PARTS,  # the same
    RANDOM_STATE,
    NEXT_DISTURBANCE,
    LIMBO,  # root of the heap of requests that wait for a worker to come up
    LOST,  # ... of those that have lost theirs and are to be routed
    FREED,  # ... of those that waited for others and will arrive
    BROKEN,  # 1: a limit can no longer hold in one of the windows
    HELD,  # root of the heap of requests that wait at the router for a worker to be free for them
    IN_DOUBT,  # how many more of the last requests must decode before LATEST_S for the backlog test
    PREFILLED,  # 1: every prompt arrives computed, on the first worker
    READING,  # root of the heap of requests whose prompts API servers make tokens of, by when they are done
) = range(7, 25)
COUNTERS = 25

# numbers of the policies: best-fit's gamma and theta and the limits it packs to; idle seconds before a flip;
# seconds from a request's arrival until it reaches an engine; heavy-light's tokens, period, and when it last
# heard of loads; how many times as long the steps of prefill workers are for the predictor; Aladdin's
# heartbeat, and when the next begins; 1: of a router, which simulates nothing (planner/runtime); seconds
# that a flip takes; in Splitwise's mixed pool until a machine changes its own; since when the pool of
# arrivals, and that of hand-offs, is short of workers (+ FRONT or BACK); who arrives from LAST_S on is one of
# the last requests, and LATEST_S is when too many of them that do not decode yet have waited too long
GAMMA, THETA, TTFT_S, TBT_S, FLIP_S, FRONT_END_S, HEAVY_TOKENS, LOAD_PERIOD_S, HEARD_S, PREDICTOR = range(10)
HEARTBEAT_S, NEXT_BEAT_S, LIVE, RESTART_S, REPURPOSE_S, SHORT_SINCE_S = range(10, 16)
LAST_S, LATEST_S = 17, 18
POLICY = 19
