"""The prefill work that prefix caches can save for each request of a trace: for lower bounds, and for first
guesses of worker counts.

With every routing and order a worker computes each distinct block of its requests at least once. Here a block
counts as work only for the first request of the whole trace that has it. So `PrefixHits.lengths` and
`workload` with an infinite cache never overestimate the prefill work of any part of the trace on any worker.
Bounds on memory count only blocks that no other request has, because a block is stored once, however many
requests share it. Where prefixes may be pinned, bounds on work count only those blocks too, because pinned
prefixes are cached before the first request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from planner.traffic.prefixes import Int32Array, block_uses, stack_distances
from planner.traffic.trace import IntArray, Trace
from planner.traffic.workload import TraceLengths, Workload, to_classes


@dataclass(frozen=True, slots=True, eq=False)
class PrefixHits:
    """The uses of blocks in a trace, and how far each is from the use of the same block before.

    For each of the m uses of a block: its request `owner` (m,), its `tokens` (m,), and its stack distance
    `distance` (m,), the distinct blocks used since the use before, which is -1 for the first use.
    `shared_tokens` (n,) counts the tokens of each prompt that are also in an earlier or later prompt.
    """

    trace: Trace
    owner: Int32Array
    tokens: Int32Array
    distance: Int32Array
    shared_tokens: IntArray
    # What `lengths` has computed, by the size of the cache and whether prefixes may be pinned.
    _known: dict[tuple[float, bool], TraceLengths] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, trace: Trace) -> PrefixHits:
        """The uses of blocks in a trace. Raises TraceError if it has no block ids."""
        blocks = block_uses(trace)
        distances = stack_distances(blocks.offsets, blocks.node, len(blocks.parent))
        is_shared = np.bincount(blocks.node)[blocks.node] > 1
        shared = np.bincount(blocks.owner, weights=blocks.tokens * is_shared, minlength=len(trace))
        return cls(trace, blocks.owner, blocks.tokens, distances.distance, shared.astype(np.int64))

    def cached_tokens(self, cache_tokens: float = math.inf) -> IntArray:
        """(n,): the tokens of each prompt that hit in one LRU cache of that size for all requests."""
        is_hit = (self.distance >= 0) & ((self.distance + 1) * self.trace.prefix_block_tokens <= cache_tokens)
        hits = np.bincount(self.owner, weights=self.tokens * is_hit, minlength=len(self.trace))
        return hits.astype(np.int64)

    def lengths(self, cache_tokens: float = math.inf, *, may_pin: bool = False) -> TraceLengths:
        """The distinct lengths of the trace with their cached tokens. The cache's size is rounded to a power
        of two, so that only few sizes are computed. With `may_pin` all shared tokens are cached.
        """
        if not math.isinf(cache_tokens):
            cache_tokens = 2.0 ** round(math.log2(max(cache_tokens, 1.0)))
        key = cache_tokens, may_pin
        if key not in self._known:
            trace = self.trace
            columns = (
                trace.input_tokens,
                trace.output_tokens,
                self.shared_tokens if may_pin else self.cached_tokens(cache_tokens),
                self.shared_tokens,
            )
            rows, requests = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
            inputs, outputs, cached, shared = rows.T.astype(float)
            self._known[key] = TraceLengths(
                inputs, outputs, requests.astype(np.int64), cached, shared, is_cached=True
            )
        return self._known[key]

    def workload(self, *, may_pin: bool = False) -> Workload:
        """The requests in groups of similar lengths and similar hits in an infinite cache. With `may_pin` the
        cache has all shared tokens from the start.
        """
        cached_tokens = self.shared_tokens if may_pin else self.cached_tokens()
        return to_classes(self.trace, cached_tokens=cached_tokens, shared_tokens=self.shared_tokens)
