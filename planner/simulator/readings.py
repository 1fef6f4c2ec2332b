"""What the metrics of a fleet say at one moment, counted from the kernel's arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.simulator.layout import FINISHED, HELD, LEAVING, LIMBO, NONE, UNFINISHED, State
from planner.simulator.numba_compile import SOURCES, entry_jit, kernel_jit
from planner.simulator.slots import blocks_of_run

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# counts and sums of a pool: gauges, then what an interval has seen
WAITING, RUNNING, ARRIVED, FINISHED_HERE, INPUT, OUTPUT, TTFTS, TPOTS, OUTPUTS, KV_SHARES = range(10)
TTFT_SUM, TPOT_SUM, KV_SUM = range(3)
COUNTS, SUMS = 10, 3
OPEN, SEEN = range(2)  # numbers: requests under way, and how many have arrived up to the last reading
CAME, BEGAN, HANDED = 1, 2, 4  # marks of a request: what has been counted of it


@kernel_jit
def _gauges(records, pool_of, results, time_s):
    """What the ready workers have at this moment: prompts that wait, seats, KV blocks."""
    requests, workers, lanes, types = records[0], records[1], records[2], records[3]
    counts, sums = results
    for w in range(len(workers)):
        worker = workers[w]
        if worker.is_up != 1:
            continue
        p, kind = pool_of[w], types[worker.type]
        leaving, r = 0, worker.head[LEAVING]
        while r != NONE:
            leaving += 1
            r = requests[r].next
        counts[p, RUNNING] += worker.running
        counts[p, WAITING] += int(worker.assigned) - worker.running + leaving
        blocks = worker.used_blocks + blocks_of_run(
            kind, lanes[worker.first_lane], np.nextafter(time_s, np.inf)
        )
        sums[p, KV_SUM] += blocks / kind.kv_blocks
        counts[p, KV_SHARES] += 1


@kernel_jit
def _see(request, mark, pools, results):
    """Count what has happened to a request since it was last looked at: its mark from now on."""
    pool_of, is_prefill = pools
    counts, sums = results
    w, v = request.prefill_worker, request.decode_worker
    if w != NONE and mark & CAME == 0:
        mark |= CAME
        counts[pool_of[w], ARRIVED] += 1
    if v != NONE and mark & HANDED == 0:
        mark |= HANDED
        counts[pool_of[v], ARRIVED] += 1
    if mark & BEGAN == 0 and not np.isnan(request.first_token_s):
        mark |= BEGAN
        p = pool_of[w]
        counts[p, TTFTS] += 1
        sums[p, TTFT_SUM] += request.first_token_s - request.arrival_s
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
def _in_heap(requests, root, scratch):
    """How many requests are in a heap."""
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


def _entry(sources):
    @entry_jit
    def read(records, lists, pools, results, entered, time_s):
        """Fill `results` = (counts, sums) by pool, and return how many requests are in limbo.

        `records` are (requests, workers, lanes, types, counters) of the state, `lists` what is remembered
        from one reading to the next: (requests under way, marks, numbers, scratch), `pools` (pool of each
        worker, 1 where a pool prefills alone).
        """
        requests, counters = records[0], records[4]
        under_way, marks, numbers, scratch = lists
        results[0][:] = 0 * sources  # closed over: part of the cache's key
        results[1][:] = 0.0
        _gauges(records, pools[0], results, time_s)
        last, kept = numbers[OPEN], 0
        for r in range(numbers[SEEN], entered):
            under_way[last] = r
            last += 1
        for i in range(last):
            r = under_way[i]
            marks[r] = _see(requests[r], marks[r], pools, results)
            if requests[r].status == UNFINISHED:
                under_way[kept] = r
                kept += 1
        numbers[OPEN], numbers[SEEN] = kept, entered
        return _in_heap(requests, counters[LIMBO], scratch) + _in_heap(requests, counters[HELD], scratch)

    return read


_read = _entry(SOURCES)


class Counting:
    """Readings of one run: gauges at a moment, and what has happened since the reading before."""

    def __init__(self, state: State, pool_of: Ints, is_prefill: Ints) -> None:
        """`pool_of` (W,) each of the kernel's workers, `is_prefill` (P,) 1 where a pool prefills alone."""
        n = len(state.requests)
        self._records = (state.requests, state.workers, state.lanes, state.types, state.counters)
        self._lists = (
            np.zeros(n, np.int64),
            np.zeros(n, np.int64),
            np.zeros(2, np.int64),
            np.zeros(n + 1, np.int64),
        )
        self._pools = (pool_of, is_prefill)
        self.counts = np.zeros((len(is_prefill), COUNTS), np.int64)
        self.sums = np.zeros((len(is_prefill), SUMS))

    def count(self, entered: int, time_s: float) -> int:
        """Fill `counts` and `sums` (P, ...), when so many requests have arrived; returns those in limbo."""
        results = (self.counts, self.sums)
        return int(_read(self._records, self._lists, self._pools, results, entered, time_s))
