"""DistServe's simulator once more, as plainly as we can: prefill and decode instances of pipeline ranks.

An instance is a ring of ranks. Each runs one batch at a time: the prefills that wait for it before the
decodes. Rank 0 forms prefill batches; a later rank takes over a prefill batch as it was formed, but decodes
as they come, so that micro-batches which meet in its queue become one. A token of a decode is made when its
batch leaves the last rank; then the request queues at rank 0 for the next.

At equal times arrivals come before all else, then events in the order in which they were caused. A rank that
is woken starts after whatever else was already due at that time. Times in ms, as in the fitted coefficients.
After Zhong et al. 2024, arXiv:2401.09670, and what its public simulator computes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True)
class Coefficients:
    """Time of one rank's batch: (a + b * tokens + c * (squared lengths | sequences)) / pp, and more."""

    prefill: tuple[float, float, float]
    prefill_per_rank_ms: float  # times pp, on every rank
    decode_small: tuple[float, float, float]
    decode_large: tuple[float, float, float]  # from `threshold` sequences on
    threshold: int
    overhead_ms: float  # of the engine, on rank 0
    overhead_ms_per_token: float

    def prefill_ms(self, lengths: Sequence[int], pp: int) -> float:
        a, b, c = self.prefill
        squares = sum(length * length for length in lengths)
        return (a + b * sum(lengths) + c * squares) / pp + self.prefill_per_rank_ms * pp

    def decode_ms(self, contexts: Sequence[int], pp: int) -> float:
        a, b, c = self.decode_small if len(contexts) < self.threshold else self.decode_large
        return (a + b * (sum(contexts) + len(contexts)) + c * len(contexts)) / pp

    def engine_ms(self, tokens: int) -> float:
        return self.overhead_ms + self.overhead_ms_per_token * tokens


@dataclass(frozen=True)
class Placement:
    """Instances and their pipeline depth. No decode instances: prefill and decode share every instance."""

    prefill_instances: int
    prefill_pp: int
    decode_instances: int
    decode_pp: int
    prefill_max_tokens: int  # of one batch
    decode_max_tokens: int  # context, with the new token, of one batch


@dataclass(eq=False)
class Request:
    arrival_ms: float
    input: int
    output: int
    generated: int = 0  # by decode steps: the token of the prefill is not counted
    batch: int = -1  # prefill batch, given by rank 0
    prefill_start_ms: float = math.nan
    prefill_end_ms: float = math.nan
    decode_start_ms: float = math.nan
    finish_ms: float = math.nan

    @property
    def context(self) -> int:
        return self.input + self.generated


@dataclass(eq=False)
class Rank:
    """A tensor-parallel group: one stage of the pipeline of an instance."""

    is_first: bool
    is_last: bool
    is_decoder: bool  # False: hands over what it has prefilled
    pp: tuple[int, int]  # prefill, decode
    next: Rank = field(init=False)
    prefills: deque[Request] = field(default_factory=deque)
    decodes: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    is_prefilling: bool = False
    is_asleep: bool = True

    @property
    def prefill_load(self) -> int:
        return len(self.prefills) + (len(self.running) if self.is_prefilling else 0)

    @property
    def decode_load(self) -> int:
        return len(self.decodes)  # what runs is not counted, so a busy instance looks idle


class DistServe:
    """Run it with `DistServe(...).run()`, then read `requests`."""

    def __init__(self, placement: Placement, coefficients: Coefficients, requests: list[Request]) -> None:
        self.placement, self.coefficients, self.requests = placement, coefficients, requests
        shares = placement.decode_instances == 0
        pp = placement.prefill_pp, placement.prefill_pp if shares else placement.decode_pp
        self.front = [ring(pp[0], pp, is_decoder=shares) for _ in range(placement.prefill_instances)]
        self.back = [ring(pp[1], pp, is_decoder=True) for _ in range(placement.decode_instances)]
        self.events: list[tuple[float, int, Request | Rank]] = []
        self.sequence = self.batches = 0
        if too_long := [r.input for r in requests if r.input > placement.prefill_max_tokens]:
            raise ValueError(f"{len(too_long)} inputs of up to {max(too_long)} tokens fit no prefill batch")

    def run(self) -> Self:
        for request in self.requests:
            self.push(request.arrival_ms, request)
        while self.events:
            now, _, subject = heapq.heappop(self.events)
            if isinstance(subject, Request):
                head = min(self.front, key=lambda rank: rank.prefill_load)
                head.prefills.append(subject)
                self.wake(head, now)
            else:
                if subject.running:
                    self.end_batch(subject, now)
                self.start_batch(subject, now)
        return self

    def push(self, time_ms: float, subject: Request | Rank) -> None:
        heapq.heappush(self.events, (time_ms, self.sequence, subject))
        self.sequence += 1

    def wake(self, rank: Rank, now: float) -> None:
        if rank.is_asleep:
            rank.is_asleep = False
            self.push(now, rank)

    def start_batch(self, rank: Rank, now: float) -> None:
        rank.is_prefilling = bool(rank.prefills)
        if rank.is_prefilling:
            rank.running = self.take_prefills(rank, now)
            lengths = [request.input for request in rank.running]
            took_ms, tokens = self.coefficients.prefill_ms(lengths, rank.pp[0]), sum(lengths)
        elif rank.decodes:
            rank.running = self.take_decodes(rank, now)
            contexts = [request.context for request in rank.running]
            took_ms, tokens = self.coefficients.decode_ms(contexts, rank.pp[1]), sum(contexts)
        else:
            rank.is_asleep = True
            return
        if rank.is_first:
            took_ms += self.coefficients.engine_ms(tokens)
        self.push(now + took_ms, rank)

    def take_prefills(self, rank: Rank, now: float) -> list[Request]:
        batch, room = [], self.placement.prefill_max_tokens
        if not rank.is_first:
            number = rank.prefills[0].batch
            while rank.prefills and rank.prefills[0].batch == number:
                batch.append(rank.prefills.popleft())
            return batch
        while rank.prefills and rank.prefills[0].input <= room:
            request = rank.prefills.popleft()
            room -= request.input
            request.batch, request.prefill_start_ms = self.batches, now
            batch.append(request)
        self.batches += 1
        return batch

    def take_decodes(self, rank: Rank, now: float) -> list[Request]:
        batch, room = [], self.placement.decode_max_tokens
        while rank.decodes and rank.decodes[0].context + 1 <= room:
            request = rank.decodes.popleft()
            room -= request.context + 1
            if math.isnan(request.decode_start_ms):
                request.decode_start_ms = now
            batch.append(request)
        if not batch:
            raise ValueError(f"a context of {rank.decodes[0].context} tokens fits no decode batch")
        return batch

    def end_batch(self, rank: Rank, now: float) -> None:
        batch, rank.running = rank.running, []
        was_prefill, rank.is_prefilling = rank.is_prefilling, False
        for request in batch:
            if not rank.is_last:
                (rank.next.prefills if was_prefill else rank.next.decodes).append(request)
                self.wake(rank.next, now)
                continue
            if was_prefill:
                request.prefill_end_ms = now
            else:
                request.generated += 1
            if request.generated == request.output:
                request.finish_ms = now
            else:
                head = rank.next if rank.is_decoder else min(self.back, key=lambda rank: rank.decode_load)
                head.decodes.append(request)
                self.wake(head, now)


def ring(ranks: int, pp: tuple[int, int], *, is_decoder: bool) -> Rank:
    """An instance, by its rank 0; the last rank's next is rank 0."""
    chain = [Rank(i == 0, i == ranks - 1, is_decoder, pp) for i in range(ranks)]
    for rank, following in zip(chain, chain[1:] + chain[:1], strict=True):
        rank.next = following
    return chain[0]
