"""What the kernel reads and writes: records, their fields, and the constants that stand for names.

A worker is one engine. It forms batches on lanes: one lane without pipeline parallelism, `pp` of them or
more with it, because that many batches are in flight at once. A decode sits in a slot of its lane.

Names: w worker, l lane, r request, s a lane's count of decode steps, c tokens of a request in the KV cache.
Constants that are passed to compiled functions are numpy integers: for a Python literal Numba would compile
the function once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.fleet import MAX_PP

MIXED, PREFILL, DECODE = np.int64(0), np.int64(1), np.int64(2)  # roles
TTFT, TBT, TPOT, E2E = np.int64(0), np.int64(1), np.int64(2), np.int64(3)
FINISHED, REJECTED, UNFINISHED = 0, 1, 2
NONE = np.int64(-1)
ZERO, ONE = np.int64(0), np.int64(1)
BLOCK = 16
GAP_DEPTH = 64
GROUP = 16  # workers of a pool that the router looks at together

# lists of a worker, first in first out: for blocks to receive KV, for a seat, prompts computed in part
INBOUND, READY, PARTIAL = np.int64(0), np.int64(1), np.int64(2)

TYPE = np.dtype(
    [
        ("form", "i8"),
        ("k", "f8", 12),  # its numbers
        ("at", "i8", 4),  # where its tables begin in State.tables
        ("width", "i8", 5),  # and how long a row of them is
        ("batching", "i8"),
        ("order", "i8"),
        ("order_window_s", "f8"),  # a prompt is overtaken only by what arrives this much later
        ("order_tokens", "f8"),  # of the longest prompt: only it may wait so long
        ("order_batch", "i8"),  # ... or by prompts of its own scheduling batch; 0: no such batches
        ("admission", "i8"),
        ("budget", "i8"),  # max_num_batched_tokens
        ("seats", "i8"),  # max_num_seqs
        ("blocks", "i8"),  # KV blocks
        ("holds", "i8"),  # blocks of the longest request it takes
        ("kv_tokens", "i8"),  # where KV is counted in tokens
        ("decode_tokens", "i8"),  # distserve: context of a batch of decodes
        ("watermark", "i8"),  # of them left free when a prompt is admitted
        ("reserved", "i8"),  # blocks that every request takes at once and keeps; 0: blocks as they are needed
        ("patience", "i8"),  # lightllm: decode steps until new prompts are tried again
        ("restarts", "i8"),  # 1: a prompt preempted in part is taken for a whole one, as Vidur does
        ("pp", "i8"),
        ("lanes", "i8"),
        # routing score per pending prompt token, request, KV token, waiting request: front, back
        ("weight", "f8", (2, 4)),
    ]
)
WORKER = np.dtype(
    [
        ("type", "i8"),
        ("role", "i8"),
        ("is_up", "i8"),
        ("seat", "i8"),  # its place in its pool
        ("epoch", "i8"),  # how often it went down
        ("slow", "f8"),  # every step takes this many times as long
        ("lane", "i8"),  # the first of its lanes
        ("used", "i8"),  # KV blocks in use or reserved
        ("running", "i8"),  # requests that hold a seat
        ("waiting", "i8"),  # root of the heap of prompts
        ("waits", "i8"),  # how many
        ("head", "i8", 3),
        ("tail", "i8", 3),
        ("stage_free_s", "f8", MAX_PP),
        ("tried", "i8"),  # lightllm: decode steps since new prompts were last tried
        ("served_batch", "i8"),  # of prompts, for order_batch
        ("filled_batch", "i8"),
        ("filled", "i8"),
        ("preempted", "i8"),  # how often: the latest goes to the front
        # what the router sees
        ("pending_tokens", "f8"),  # prompt tokens assigned and not yet prefilled
        ("requests", "f8"),  # assigned and not yet gone
        ("kv_tokens", "f8"),  # prompt tokens of those
        ("future_tokens", "f8"),  # prompt and predicted output tokens of those, weighted as best-fit does
        ("idle_since_s", "f8"),
        # totals
        ("busy_s", "f8"),
        ("steps", "i8"),
        ("tokens", "f8"),  # through the dense layers
    ]
)
LANE = np.dtype(
    [
        ("worker", "i8"),
        ("step", "i8"),  # decode steps done
        ("decodes", "i8"),  # running decodes: the first slots
        ("late", "i8"),  # how many of the last slots had their last token at another time than the rest
        ("last_token_s", "f8"),  # of the rest
        ("next_finish", "i8"),  # smallest `finish` of the slots
        ("kv_sum", "f8"),  # K of the next step
        ("residue", "i8", BLOCK),  # decodes by (c - s) mod 16: who needs a block next
        ("gaps", "i8"),  # depth of the stack of longest gaps
        # the step being formed, or in progress
        ("members", "i8"),  # prefill chunks
        ("prefill_tokens", "i8"),
        ("pairs", "f8"),  # sum n (c + (n + 1) / 2)
        ("squares", "f8"),  # sum n^2
        ("cached_64", "f8"),  # sum ceil(c / 64)
        ("decoding", "i8"),  # 1: its decodes take part
        ("stage_s", "f8"),
        # the current run of equal steps; no steps: idle
        ("run_start", "f8"),
        ("run_first", "f8"),
        ("run_growth", "f8"),
        ("run_steps", "i8"),
    ]
)
SLOT = np.dtype(
    [
        ("request", "i8"),
        ("finish", "i8"),  # value of `step` at which it is done
        ("context", "i8"),  # c - s, constant while it runs
        ("since", "i8"),  # gaps of steps after this one are not yet in the request's longest gap
        ("order", "i8"),  # of admission
    ]
)
GAP = np.dtype([("step", "i8"), ("gap_s", "f8")])  # longest gap up to this step and after the entry below
MEMBER = np.dtype([("request", "i8"), ("tokens", "i8"), ("is_last", "i8")])  # is_last: of its prompt
REQUEST = np.dtype(
    [
        ("arrival_s", "f8"),
        ("input", "i8"),
        ("output", "i8"),
        ("predicted", "i8"),  # output tokens as the schedulers believe
        ("generated", "i8"),
        ("computed", "i8"),  # prompt tokens (recomputed ones included) in the KV cache
        ("length", "i8"),  # tokens to prefill
        ("order", "i8"),
        ("key", "f8"),  # place in a heap: smallest first, then by index
        ("left", "i8"),
        ("right", "i8"),
        ("next", "i8"),  # in the list it waits in
        ("last_token_s", "f8"),
        ("scheduled_s", "f8"),
        ("first_token_s", "f8"),
        ("finish_s", "f8"),
        ("gap_max_s", "f8"),
        ("predicted_later", "i8"),  # ... once it has made as many
        ("epoch", "i8"),  # of its prefill worker when the prompt was done
        ("epoch_back", "i8"),  # of its decode worker when that reserved blocks
        ("transfer_s", "f8"),  # of the last prefill step, to overlap with; then the end of the transfer
        ("prefill_worker", "i8"),
        ("decode_worker", "i8"),
        ("preemptions", "i8"),
        ("status", "i8"),
    ]
)
WAIT = np.dtype(  # of a request, where any waits for others
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
        ("allowed", "i8"),  # violations that still pass
        ("violations", "i8"),
        ("counted", "i8"),
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
    ]
)
LINK = np.dtype(
    [
        ("block_s", "f8"),
        ("latency_s", "f8"),
        ("overlap_frac", "f8"),  # of a transfer that may hide behind the last prefill step
        ("overlap_tokens", "i8"),  # prompts shorter than this are sent after it
        ("is_shared", "i8"),  # one transfer after the other, or all at once
        ("slow", "f8"),
        ("free_s", "f8"),
        ("last_s", "f8"),
        ("root", "i8"),  # heap of requests under way, by end of transfer
    ]
)
EVENT = np.dtype([("time_s", "f8"), ("kind", "i8"), ("worker", "i8"), ("factor", "f8")])
DOWN, UP, SLOW, LINK_SLOW = range(4)  # kinds of events


RANK = np.dtype(  # of a pipeline (ring.py)
    [
        ("head", "i8", 3),
        ("tail", "i8", 3),
        ("formed", "i8"),  # prefill batches
        # the batch that runs
        ("is_prefill", "i8"),
        ("size", "i8"),
        ("tokens", "i8"),  # of prompts
        ("start_s", "f8"),
    ]
)
MACHINE = np.dtype(  # (splitwise.py)
    [
        ("capacity", "i8"),  # tokens of KV
        ("held", "i8"),  # of them reserved by tasks that run or have run
        ("reserved", "i8"),  # of them promised to requests routed here
        ("batches", "i8"),  # formed
        ("is_cut", "i8"),
        ("home", "i8"),  # pool
        ("pool", "i8"),
        # the batch being formed
        ("picks", "i8"),  # tasks that are new in it
        ("tasks", "i8"),
        ("tokens", "i8"),
        ("claimed", "i8"),  # tokens of KV, with what it will reserve
    ]
)
TASK = np.dtype(
    [
        ("phase", "i8"),
        ("skips", "i8"),  # batches left out of; less `batches` of its machine while it waits
        ("order", "i8"),  # among the arrivals of its machine at the same time
        ("is_picked", "i8"),
        ("is_sent", "i8"),  # its KV is on the way; else it asks for room
        ("next", "i8", 2),  # in the list of all that wait, in that of prompts or evicted
        ("previous", "i8", 2),
    ]
)


class State(NamedTuple):
    """Everything the kernels read and write. W workers, L lanes, n requests."""

    types: npt.NDArray[np.void]  # (T,) TYPE
    tables: npt.NDArray[np.float64]  # of all types, one after the other
    workers: npt.NDArray[np.void]  # (W,) WORKER
    lanes: npt.NDArray[np.void]  # (L,) LANE
    slots: npt.NDArray[np.void]  # (L, seats) SLOT, the running decodes
    gaps: npt.NDArray[np.void]  # (L, GAP_DEPTH) GAP, longest first
    members: npt.NDArray[np.void]  # (L, seats) MEMBER
    requests: npt.NDArray[np.void]  # (n,) REQUEST
    pools: npt.NDArray[np.int64]  # (2, W) workers that take arrivals, and hand-offs
    score: npt.NDArray[np.float64]  # (W,) routing score of each worker
    lowest: npt.NDArray[np.float64]  # (2, ...) no score of a group of a pool is below this
    link: npt.NDArray[np.void]  # (1,) LINK
    events: npt.NDArray[np.void]  # (E,) EVENT, in order of time
    limits: npt.NDArray[np.void]  # (K,) LIMIT
    policy: npt.NDArray[np.float64]  # (POLICY,) numbers of the policies, see below
    window: npt.NDArray[np.float64]  # (2,) requests arriving, and gaps ending, in [start, end] count
    runs: npt.NDArray[np.void]  # (R,) RUN, empty if not recorded
    time: npt.NDArray[np.float64]  # (L + 2,) next event of each lane, of the link, of `events`
    heap: npt.NDArray[np.int64]  # (L + 2,) indexed binary heap over `time`
    place: npt.NDArray[np.int64]  # (L + 2,) heap position of each
    counters: npt.NDArray[np.int64]  # (COUNTERS,) see below
    # of ring.py and splitwise.py, where `time`, `heap`, `place` are by entity: lanes, requests on the link
    turn: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # (L + n,) among the events of one moment
    marks: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # counters of their own
    ranks: npt.NDArray[np.void] = np.zeros(0, RANK)  # (L,)
    machines: npt.NDArray[np.void] = np.zeros(0, MACHINE)  # (W,)
    tasks: npt.NDArray[np.void] = np.zeros(0, TASK)  # (n,) by request
    queues: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)  # (W, ...) tasks: 2 request, 1 more for tokens
    picks: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # (seats,) requests new in a batch
    waits: npt.NDArray[np.void] = np.zeros(0, WAIT)  # (n + 1,), empty where nobody waits for others
    children: npt.NDArray[np.int64] = np.zeros(0, np.int64)  # (e,) requests that do, by parent
    caches: Any = None  # cache_layout.Caches where workers keep prefixes


# counters; FRONT and BACK also name the two rows of `pools`, whose lengths follow
FRONT, BACK = np.int64(0), np.int64(1)
SIZE, TURN, ROUTING = np.int64(0), np.int64(2), np.int64(4)  # + FRONT or BACK
ADMITTED, DONE, RUNS, RANDOM_STATE, NEXT_EVENT, LIMBO, LOST, FREED, ENTERED = 6, 7, 8, 9, 10, 11, 12, 13, 14
COUNTERS = 15

# numbers of the policies: best-fit's gamma and theta and the limits it packs to; idle seconds before a flip
GAMMA, THETA, TTFT_S, TBT_S, FLIP_S = range(5)
POLICY = 5
