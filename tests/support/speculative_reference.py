"""The plain simulators once more, of engines that draft tokens and check them.

A decode computes 1 + k tokens in a step, and 1 + A of them leave. Like vLLM's scheduler it takes KV blocks
for all that it computes, and for as many more where a drafter writes keys and values of its own; nobody gets
more blocks than there are. Who was handed over has no drafts in the first step.
"""

from __future__ import annotations

import numpy as np
from prefix_reference import PrefixReference
from simulator_reference import Reference, Request, Worker, blocks_of

from planner.fleet import Fleet
from planner.models.speculation import Speculation, SpeculativeSteps
from planner.traffic.trace import Trace

MASK = 2**64 - 1


def unit(seed: int, index: int, tokens: int) -> float:
    """splitmix64 twice, the second time with the count of tokens; the upper 53 bits as a fraction."""
    x = (seed * 0xD1342543DE82EF95 + index) & MASK
    for salt in (0, tokens):
        x = (x + 0x9E3779B97F4A7C15 + salt) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x ^= x >> 31
    return (x >> 11) * 2.0**-53


def accepted(speculation: Speculation, seed: int, index: int, tokens: int) -> int:
    return int((unit(seed, index, tokens) < np.array(speculation.accepted_fracs)).sum())


class SpeculativeReference(Reference):
    def __init__(self, fleet: Fleet, trace: Trace, *, closed_loop: int = 0) -> None:
        super().__init__(fleet, trace, closed_loop=closed_loop)
        self.handed: set[int] = set()  # requests that have not made a step since they were handed over

    def width(self, worker: Worker) -> int:
        return 1 if worker.type.speculation is None else 1 + worker.type.speculation.tokens

    def checked_blocks(self, worker: Worker, request: Request) -> int:
        """That a decode needs in its next step, beyond those it has."""
        speculation = worker.type.speculation
        assert speculation is not None
        reach = request.cached + self.width(worker) + speculation.lookahead_tokens
        needed = min(blocks_of(reach), worker.type.kv_tokens // 16 - request.beside)
        return max(needed - self.held_blocks(request), 0)

    def held_blocks(self, request: Request) -> int:
        """Blocks of its tokens."""
        return request.blocks

    def blocks_to_begin(self, worker: Worker, request: Request) -> int:
        is_plain = worker.type.speculation is None
        return super().blocks_to_begin(worker, request) if is_plain else self.checked_blocks(worker, request)

    def missing(self, worker: Worker, request: Request, n: int) -> int:
        if request.is_prefilled and worker.type.speculation is not None:
            return self.checked_blocks(worker, request)
        return super().missing(worker, request, n)

    def preempt(self, worker: Worker) -> Request:
        request = super().preempt(worker)
        self.handed.discard(request.index)
        return request

    def step_s(self, worker: Worker) -> float:
        speculation = worker.type.speculation
        if speculation is None:
            return super().step_s(worker)
        assert worker.type.engine is None
        tokens = sum(n for _, n in worker.chunks)
        pairs = sum(n * (request.cached + (n + 1) / 2) for request, n in worker.chunks)
        kv_tokens = sum(request.cached + 1 for request in worker.decoding)
        cached = sum(request.cached for request, _ in worker.chunks)
        steps = SpeculativeSteps(worker.type.latency, speculation)
        return steps.step_s(tokens, pairs, len(worker.decoding), kv_tokens, len(worker.chunks), cached)

    def end_step(self, worker: Worker, now: float) -> None:
        speculation = worker.type.speculation
        if speculation is None:
            super().end_step(worker, now)
            return
        decoding, worker.decoding = worker.decoding, []
        worker.tokens += len(decoding) * self.width(worker)
        for request in decoding:
            more = accepted(speculation, self.fleet.policies.seed, request.index, request.generated)
            if request.index in self.handed:
                self.handed.discard(request.index)
                more = 0
            for _ in range(1 + min(more, request.output - request.generated - 1)):
                request.cached += 1
                self.emit(worker, request, now)
        super().end_step(worker, now)

    def end_transfer(self, now: float) -> None:
        self.handed.add(self.link[0].index)
        super().end_transfer(now)


class SpeculativePrefixReference(SpeculativeReference, PrefixReference):
    """With prefix caches, whose last block found vLLM computes again for EAGLE and MTP."""

    def dropped_blocks(self, worker: Worker) -> int:
        speculation = worker.type.speculation
        return int(speculation is not None and speculation.method in ("mtp", "eagle", "eagle3"))

    def held_blocks(self, request: Request) -> int:
        i = request.index
        return request.blocks + len(self.shared[i]) * self.blocks - self.copied[i]

    def give_back(self, worker: Worker, request: Request) -> None:
        """Blocks of drafts are of no use to anybody."""
        self.evict(worker)  # what others took before
        beyond = self.held_blocks(request) - blocks_of(request.cached)
        request.blocks -= beyond
        worker.free += beyond
        super().give_back(worker, request)
