"""Estimates the hits of prompts in a fleet with pinned prefixes, without a simulation.

The requests are routed once, in their order of arrival. A worker is modelled as a queue of prompts, measured
in seconds, and an LRU cache of whole blocks beside the pinned ones. Routing is `pinned-prefix`: of the
workers with the longest pinned part of a prompt, the one that would finish its prefill first gets it. The
model leaves out steps, preemption, and the time until the blocks of a prompt are computed: later prompts hit
them as soon as the prompt is sent.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.fleet import PinnedPrefix, Pool, Role, WorkerType
from planner.search.prefixes.prefix_placing import PrefixMemory
from planner.solvers.master import Option, cheapest_token_s, least_seconds
from planner.traffic.prefixes import block_uses
from planner.traffic.trace import Trace

MOST_REQUESTS = 50_000  # At most this many requests, the first of a trace, are replayed, to bound the time.
# Decodes take at most this share of a worker's time, so that prompts make progress. Set by hand.
MOST_DECODE_FRAC = 0.9


@dataclass(slots=True)
class _QueuedWorker:
    """One worker: its cache of `blocks` blocks, pinned ones included, and its queue of prompts, which is
    empty at `free_s`.

    A prompt takes `token_s` for each token that misses the cache, and `attention_pair_s` for each pair of
    such a token with itself or one before it. That time is multiplied by `slowdown`, because decodes run at
    the same time. A decode yields a token every `token_gap_s`.
    """

    token_s: float
    attention_pair_s: float
    slowdown: float
    token_gap_s: float
    blocks: int
    pinned: set[int] = field(default_factory=set)
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free_s: float = 0.0
    ends_s: list[float] = field(default_factory=list)  # A heap of the times when requests sent here end.

    def wait_s(self, time_s: float) -> float:
        """How long a new prompt would wait here, as routing `pinned-prefix` estimates it: the time of all
        prompts before it, and the time of one token for each request that has not ended.
        """
        while self.ends_s and self.ends_s[0] <= time_s:
            heapq.heappop(self.ends_s)
        return max(self.free_s - time_s, 0.0) + self.token_s * len(self.ends_s)

    def count_matched(self, path: Sequence[int], pinned_count: int) -> int:
        """How many of a prompt's first blocks this worker has, at least the first `pinned_count`, which are
        pinned here.
        """
        for i in range(pinned_count, len(path)):
            if path[i] not in self.cached and path[i] not in self.pinned:
                return i
        return len(path)

    def queue_prompt(self, path: Sequence[int], hit: int, tokens: int, outputs: int, time_s: float) -> None:
        """Queue a prompt of `tokens` tokens, the first `hit` of them cached, and cache its blocks."""
        missed = tokens - hit
        seconds = self.token_s * missed + self.attention_pair_s * missed * (hit + (missed + 1) / 2)
        self.free_s = max(self.free_s, time_s) + self.slowdown * seconds
        heapq.heappush(self.ends_s, self.free_s + outputs * self.token_gap_s)
        for block in reversed(path):  # The last block of a path is the first to be evicted.
            if block not in self.pinned:
                self.cached[block] = None
                self.cached.move_to_end(block)
        while self.cached and len(self.cached) + len(self.pinned) > self.blocks:
            self.cached.popitem(last=False)


def replayed_hits(
    trace: Trace, pools: Sequence[Pool], memories: Sequence[PrefixMemory], pinned: Sequence[PinnedPrefix]
) -> list[float]:
    """For each pool the share of the input tokens sent to it that hit; 0 for pools without requests, and for
    decode pools.

    `memories[p]` is the memory of a worker of pool p. `pinned` numbers workers in the order of the pools.
    """
    part = trace.select(np.arange(MOST_REQUESTS)) if len(trace) > MOST_REQUESTS else trace
    uses = block_uses(part)
    offsets, nodes = uses.offsets.tolist(), uses.node.tolist()
    workers: list[_QueuedWorker] = []
    pool_of: list[int] = []
    prefilling_count = sum(pool.count for pool in pools if pool.role != "decode")
    for p, (pool, memory) in enumerate(zip(pools, memories, strict=True)):
        workers += [_queued_worker(part, pool, memory, prefilling_count) for _ in range(pool.count)]
        pool_of += [p] * pool.count
    prefilling = [w for w, p in enumerate(pool_of) if pools[p].role != "decode"]
    _pin_prefixes(workers, pinned, part, offsets, nodes)
    sent, hits = [0] * len(pools), [0] * len(pools)
    columns = part.arrival_s.tolist(), part.input_tokens.tolist(), part.output_tokens.tolist()
    for i, (time_s, tokens, outputs) in enumerate(zip(*columns, strict=True)):
        path = nodes[offsets[i] : offsets[i + 1]]
        pinned_blocks = {w: _pinned_blocks(workers[w].pinned, path) for w in prefilling}
        most = max(pinned_blocks.values())
        best, best_s, best_hit = prefilling[0], float("inf"), 0
        for w in prefilling:
            if pinned_blocks[w] == most:
                worker = workers[w]
                # The last token of a prompt is always computed.
                hit = min(worker.count_matched(path, most) * part.prefix_block_tokens, tokens - 1)
                seconds = worker.wait_s(time_s) + worker.token_s * (tokens - hit)
                if seconds < best_s:
                    best, best_s, best_hit = w, seconds, hit
        workers[best].queue_prompt(path, best_hit, tokens, outputs, time_s)
        sent[pool_of[best]] += tokens
        hits[pool_of[best]] += best_hit
    return [pool_hits / max(pool_sent, 1) for pool_hits, pool_sent in zip(hits, sent, strict=True)]


def _queued_worker(trace: Trace, pool: Pool, memory: PrefixMemory, prefilling_count: int) -> _QueuedWorker:
    """An idle worker of this pool, if `prefilling_count` workers of all pools share the prompts."""
    latency, decode_frac, gap_s = pool.type.latency, 0.0, 0.0
    if pool.role == "mixed":
        # Decodes take the time that whole requests need beyond their prefills, divided among all workers.
        decodes_s = _work_s(trace, pool.type, "mixed") - _work_s(trace, pool.type, "prefill")
        decode_frac = min(decodes_s / trace.duration_s / prefilling_count, MOST_DECODE_FRAC)
        # An estimate: a decode reads the KV of a mean prompt, without the answer so far.
        decodes, kv_tokens = memory.sequences, memory.sequences * float(trace.input_tokens.mean())
        gap_s = float(latency.step_s(tokens=decodes, decodes=decodes, kv_tokens=kv_tokens))
    return _QueuedWorker(
        token_s=cheapest_token_s(latency, pool.type.max_num_batched_tokens),
        attention_pair_s=latency.a_s,
        slowdown=1 / (1 - decode_frac),
        token_gap_s=gap_s,
        blocks=memory.lru_tokens // trace.prefix_block_tokens,  # Pinned prefixes are part of this memory.
    )


def _work_s(trace: Trace, worker_type: WorkerType, role: Role) -> float:
    """The least seconds for which all requests keep workers of this type busy in this role."""
    option = Option(role, worker_type, objective=0.0)  # The work does not depend on the objective.
    return float(least_seconds(option, trace.input_tokens, trace.output_tokens).sum())


def _pin_prefixes(
    workers: Sequence[_QueuedWorker],
    pinned: Sequence[PinnedPrefix],
    trace: Trace,
    offsets: Sequence[int],
    nodes: Sequence[int],
) -> None:
    """Add to each worker's pinned blocks the tree nodes of its pinned prefixes; a prefix that the trace does
    not use has none, and cannot hit.
    """
    ids = trace.prefix_ids.tolist()
    first_by_ids = {tuple(ids[first:end]): first for first, end in _first_uses(pinned, ids, offsets)}
    for prefix in pinned:
        first = first_by_ids.get(prefix.block_ids)
        if first is not None:
            for w in prefix.workers:
                workers[w].pinned.update(nodes[first : first + len(prefix.block_ids)])


def _first_uses(
    pinned: Sequence[PinnedPrefix], ids: Sequence[int], offsets: Sequence[int]
) -> list[tuple[int, int]]:
    """The spans (first, end) of `ids` in which each pinned prefix occurs for the first time. `offsets` are
    the starts of the prompts in `ids`.
    """
    pinned_ids = {prefix.block_ids for prefix in pinned}
    lengths = sorted({len(block_ids) for block_ids in pinned_ids})
    spans = []
    for first, end in itertools.pairwise(offsets):
        if not pinned_ids:
            break
        for length in lengths:
            beginning = tuple(ids[first : first + length])
            if first + length <= end and beginning in pinned_ids:
                pinned_ids.discard(beginning)
                spans.append((first, first + length))
    return spans


def _pinned_blocks(pinned: set[int], path: Sequence[int]) -> int:
    """How many of the first blocks of a prompt are pinned here."""
    for i, block in enumerate(path):
        if block not in pinned:
            return i
    return len(path)
