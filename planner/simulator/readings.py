"""Reads the metrics of a simulated fleet at a moment while the simulation is paused, from the kernel's
arrays: what controllers of autoscaling would read from engines.

Gauges are what is the case at that moment: requests that run, in a seat of their engine (one of its
max_num_seqs places), those that wait for one, and KV blocks in use. All other metrics count what has happened
since the reading before. For these each reading looks at all requests under way, and marks (HAS_ARRIVED,
HAS_FIRST_TOKEN, IS_HANDED_OFF) say what of each request was counted before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.simulator.kv_blocks import blocks_of_run
from planner.simulator.layout import FINISHED, HELD, IN_SERVICE, LEAVING, LIMBO, NONE, UNFINISHED, State
from planner.simulator.numba_compile import entry_jit, kernel_jit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Columns of the counts of each pool. WAITING and RUNNING are gauges. Then come the requests that arrived,
# those that finished, and the prompt and output tokens of the latter. The last four say how many values are
# in the sums of TTFT, TPOT, output tokens and KV shares.
WAITING, RUNNING, ARRIVED, FINISHED_HERE, INPUT, OUTPUT, TTFTS, TPOTS, OUTPUTS, KV_SHARES = range(10)
# Columns of the sums of each pool: seconds of TTFT and TPOT, and the shares of their KV blocks that workers
# use.
TTFT_SUM, TPOT_SUM, KV_SUM = range(3)
COUNTS, SUMS = 10, 3  # How many columns of both kinds there are.
# Indices into `numbers` (`_read_metrics`): how many requests are under way, and how many had arrived at the
# last reading.
UNDER_WAY, SEEN = range(2)
# Bits of a request's mark. Each says what has been counted: its arrival at the first worker, its first token,
# its hand-off.
HAS_ARRIVED, HAS_FIRST_TOKEN, IS_HANDED_OFF = 1, 2, 4


@kernel_jit
def _count_gauges(records, pool_of, results, time_s):
    """Add what the ready workers have at `time_s`: requests with a seat and without one, and KV blocks. The
    tuples are those of `_read_metrics`.
    """
    requests, workers, lanes, types, _ = records
    counts, sums = results
    for w in range(len(workers)):
        worker = workers[w]
        if worker.status != IN_SERVICE:  # Not ready: stopped or starting.
            continue
        p, kind = pool_of[w], types[worker.type]
        # A request with its last token holds a seat until the engine has seen that token. It counts as
        # running until then, but no longer as assigned to the worker.
        leaving, r = 0, worker.head[LEAVING]
        while r != NONE:
            leaving += 1
            r = requests[r].next
        counts[p, RUNNING] += worker.running
        counts[p, WAITING] += int(worker.assigned) - worker.running + leaving
        after_s = np.nextafter(time_s, np.inf)  # So that a step that ends at `time_s` itself has ended.
        blocks = worker.used_blocks + blocks_of_run(kind, lanes[worker.first_lane], after_s)
        sums[p, KV_SUM] += blocks / kind.kv_blocks
        counts[p, KV_SHARES] += 1


@kernel_jit
def _count_request(request, mark, pools, results):
    """Count what has happened to a request since the reading before; returns its mark from now on, whose
    bits say what was counted.
    """
    pool_of, is_prefill = pools
    counts, sums = results
    w, v = request.prefill_worker, request.decode_worker  # Its first worker, and the one that it goes on to.
    if w != NONE and mark & HAS_ARRIVED == 0:
        mark |= HAS_ARRIVED
        counts[pool_of[w], ARRIVED] += 1
    if v != NONE and mark & IS_HANDED_OFF == 0:
        mark |= IS_HANDED_OFF
        counts[pool_of[v], ARRIVED] += 1
    if mark & HAS_FIRST_TOKEN == 0 and not np.isnan(request.first_token_s):
        mark |= HAS_FIRST_TOKEN
        p = pool_of[w]
        counts[p, TTFTS] += 1
        sums[p, TTFT_SUM] += request.first_token_s - request.arrival_s
        # A prefill pool is done with a request at its first token; any other at its end.
        if is_prefill[p]:
            counts[p, FINISHED_HERE] += 1
            counts[p, INPUT] += request.input_tokens
    if request.status == FINISHED:
        p = pool_of[w if v == NONE else v]
        if not is_prefill[p]:
            counts[p, FINISHED_HERE] += 1
            counts[p, INPUT] += request.input_tokens
            counts[p, OUTPUT] += request.output_tokens
            counts[p, OUTPUTS] += 1
            if request.output_tokens > 1:
                counts[p, TPOTS] += 1
                span_s = request.finish_s - request.first_token_s
                sums[p, TPOT_SUM] += span_s / (request.output_tokens - 1)
    return mark


@kernel_jit
def _heap_size(requests, root, scratch):
    """How many requests are in the heap with this root. `scratch` has room for a stack of requests."""
    number, depth = 0, 0
    if root != NONE:
        scratch[0], depth = root, 1
    while depth > 0:
        depth -= 1
        request = requests[scratch[depth]]
        number += 1
        if request.left != NONE:
            scratch[depth] = request.left
            depth += 1
        if request.right != NONE:
            scratch[depth] = request.right
            depth += 1
    return number


@entry_jit
def _read_metrics(records, lists, pools, results, entered, time_s):
    """Fill `results` = (counts (P, COUNTS), sums (P, SUMS)) of P pools, and return how many requests no
    worker has: those in limbo, and those held back (LIMBO and HELD in layout.py). `entered` requests have
    arrived so far.

    `records` are (requests, workers, lanes, types, counters) of the state. `lists` are kept from one reading
    to the next: (requests under way, marks, numbers, scratch). `pools` are (the pool of each worker, 1 for
    each prefill pool).
    """
    requests, counters = records[0], records[4]
    under_way, marks, numbers, scratch = lists
    results[0][:] = 0
    results[1][:] = 0.0
    _count_gauges(records, pools[0], results, time_s)
    last, still_under_way = numbers[UNDER_WAY], 0
    for r in range(numbers[SEEN], entered):
        under_way[last] = r
        last += 1
    for i in range(last):
        r = under_way[i]
        marks[r] = _count_request(requests[r], marks[r], pools, results)
        if requests[r].status == UNFINISHED:
            under_way[still_under_way] = r
            still_under_way += 1
    numbers[UNDER_WAY], numbers[SEEN] = still_under_way, entered
    return _heap_size(requests, counters[LIMBO], scratch) + _heap_size(requests, counters[HELD], scratch)


class Counting:
    """Readings of one simulation. After each, `counts` (P, COUNTS) and `sums` (P, SUMS) of P pools hold the
    gauges at that moment, and what has happened since the reading before.
    """

    def __init__(self, state: State, pool_of: Ints, is_prefill: Ints) -> None:
        """`pool_of` (W,) is the pool of each of the kernel's workers; `is_prefill` (P,) is 1 for prefill
        pools.
        """
        n = len(state.requests)
        self._records = (state.requests, state.workers, state.lanes, state.types, state.counters)
        self._lists = (  # For `_read_metrics`; the stack of `_heap_size` may hold all requests and one more.
            np.zeros(n, np.int64),
            np.zeros(n, np.int64),
            np.zeros(2, np.int64),
            np.zeros(n + 1, np.int64),
        )
        self._pools = (pool_of, is_prefill)
        self.counts = np.zeros((len(is_prefill), COUNTS), np.int64)
        self.sums = np.zeros((len(is_prefill), SUMS))

    def count(self, entered: int, time_s: float) -> int:
        """Read the metrics at `time_s` into `counts` and `sums`, when `entered` requests have arrived.
        Returns how many requests no worker has (`_read_metrics`).
        """
        results = (self.counts, self.sums)
        return int(_read_metrics(self._records, self._lists, self._pools, results, entered, time_s))
