"""Batching policies once more, as plainly as we can: what the tests hold the compiled kernel against.

One step at a time, lists and loops only. `simulate` runs replicas that know nothing of each other; request i
goes to replica i mod n (round robin). A policy forms micro-batches; everything else is common:

- A request holds KV in blocks. `processed` are its tokens known so far: the prefilled part of its prompt and,
  once that is whole, every token generated. The step that ends a prompt makes the next token; every decode
  makes one. It is done when `processed` is prompt + output, and then frees its blocks.
- A decode attends to `processed` tokens, its own included, and needs blocks for as many.
- Pipeline: up to `stages` micro-batches are in flight, first in, first out, each stage taking an equal share
  of the step's time, all but the last `send_s` more to send. A request in flight cannot be scheduled. Tokens
  leave, and blocks are freed, when the last stage ends.
- Whatever happens at one moment (arrivals, ends) happens before anything is scheduled then. A replica forms a
  micro-batch as soon as fewer than `stages` are in flight, even while its first stage is still busy.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt


@dataclass(eq=False)
class Request:
    """`prompt` and `output` are what a scheduler sees: a restart turns generated tokens into prompt."""

    index: int
    arrival_s: float
    prompt: int
    output: int
    processed: int = 0
    is_prefilled: bool = False
    restarts: int = 0
    scheduled_s: float = math.nan
    token_s: list[float] = field(default_factory=list)  # when each token left

    @property
    def is_done(self) -> bool:
        return self.processed == self.prompt + self.output

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.token_s[-1] - self.arrival_s


@dataclass(frozen=True)
class Step:
    """What one step computes."""

    chunks: tuple[tuple[int, int], ...]  # (new tokens, tokens in KV before them) of each prefill
    contexts: tuple[int, ...]  # tokens that each decode attends to, its own included

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.chunks) + len(self.contexts)


StepTime = Callable[[Step], float]
Batch = list[tuple[Request, int]]  # requests and how many tokens of each the step computes


@dataclass(frozen=True)
class Settings:
    """`token_budget` None: as many as there are."""

    blocks: int
    block_size: int = 16
    max_num_seqs: int = 128  # on a replica, over all micro-batches
    token_budget: int | None = None
    watermark_frac: float = 0.01  # of the blocks stay free when a request is admitted
    reserve_tokens: int = 0  # orca, faster-transformer: KV kept per request from the start; 0: orca grows it
    max_waiting_steps: int = 10  # lightllm
    stages: int = 1
    vidur_restarts: bool = False  # see Policy.preempt

    @property
    def watermark(self) -> int:
        return int(self.watermark_frac * self.blocks)

    @property
    def seats(self) -> int:
        """Requests in a micro-batch."""
        return self.max_num_seqs // self.stages


class Policy:
    """Requests of one replica: `waiting` without KV, `resting` with KV but not in flight, in order."""

    default_token_budget: int | None = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.budget = settings.token_budget or self.default_token_budget or 10**9
        self.waiting: deque[Request] = deque()
        self.resting: list[Request] = []
        self.held: dict[Request, int] = {}  # blocks
        self.free = settings.blocks

    def form(self) -> Batch:
        """The next micro-batch; empty if there is none."""
        raise NotImplementedError

    def end(self, batch: Batch) -> None:
        for request, _ in batch:
            if request.is_done:
                self.free += self.held.pop(request)
            else:
                self.resting.append(request)

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_size)

    def admits(self, request: Request) -> bool:
        """Whether a seat and blocks for the whole prompt are free, the watermark left over."""
        left = self.free - self.blocks_of(request.prompt)
        return len(self.held) < self.settings.max_num_seqs and left >= self.settings.watermark

    def admit(self, blocks: int) -> Request:
        request = self.waiting.popleft()
        self.held[request] = blocks
        self.free -= blocks
        return request

    def decodes(self, request: Request) -> bool:
        """Give `request` room for a decode. One block must be free, needed or not: until it is, the last of
        the resting is preempted, in the end `request` itself (False).
        """
        while self.free < 1:
            victim = self.resting.pop() if self.resting else request
            self.preempt(victim)
            if victim is request:
                return False
        if request.processed > self.held[request] * self.settings.block_size:
            self.held[request] += 1
            self.free -= 1
        return True

    def preempt(self, request: Request) -> None:
        """Recompute: back to the head of the queue, what was generated now being part of the prompt.

        Vidur takes what was *processed* for the prompt. Half a prompt, then, is a whole one, whose end makes
        the "first token", and the rest is decoded token by token. Only with `vidur_restarts` do we.
        """
        self.free += self.held.pop(request)
        if request.is_prefilled or self.settings.vidur_restarts:
            request.output += request.prompt - request.processed
            request.prompt = request.processed
        request.processed = 0
        request.is_prefilled = False
        request.restarts += 1
        self.waiting.appendleft(request)


class Sarathi(Policy):
    """Decodes first, in the order of `resting`, one token each out of the budget of the step; then prompts in
    part, in order; then new requests first come first served, all in chunks of what is left of the budget.
    A prompt takes its blocks when admitted. Whatever found no budget rests on, in order of arrival, before
    what comes out of the step: decodes, prompts in part, new ones, in this order.
    """

    default_token_budget = 512

    def form(self) -> Batch:
        batch: Batch = []
        partial: list[Request] = []
        skipped: list[Request] = []
        budget = self.budget
        while self.resting and len(batch) < self.settings.seats:
            request = self.resting.pop(0)
            if not request.is_prefilled:
                partial.append(request)
            elif self.decodes(request):
                batch.append((request, 1))
                budget -= 1
        for request in partial:
            if budget > 0:
                batch.append((request, min(request.prompt - request.processed, budget)))
                budget -= batch[-1][1]
            else:
                skipped.append(request)
        self.resting = sorted(skipped + self.resting, key=lambda request: request.arrival_s)
        while self.waiting and budget > 0 and len(batch) < self.settings.seats:
            if not self.admits(self.waiting[0]):
                break
            request = self.admit(self.blocks_of(self.waiting[0].prompt))
            batch.append((request, min(request.prompt, budget)))
            budget -= batch[-1][1]
        return batch


class VllmV0(Policy):
    """Whole prompts before all else, first come first served, as long as requests x longest prompt keeps to
    the budget; if none can be admitted, a decode of everything resting, in order of arrival.
    """

    default_token_budget = 4096

    def form(self) -> Batch:
        batch: Batch = []
        longest = 0
        while self.waiting and len(batch) < self.settings.seats and self.admits(self.waiting[0]):
            longest = max(longest, self.waiting[0].prompt)
            if (len(batch) + 1) * longest > self.budget:
                break
            request = self.admit(self.blocks_of(self.waiting[0].prompt))
            batch.append((request, request.prompt))
        if batch:
            return batch
        self.resting.sort(key=lambda request: request.arrival_s)
        while self.resting and len(batch) < self.settings.seats:
            request = self.resting.pop(0)
            if self.decodes(request):
                batch.append((request, 1))
        return batch


class Orca(Policy):
    """All decodes, in the order of `resting`, and in the same step whole prompts, first come first served,
    while tokens of the step keep to the budget. KV is paged (Orca+); with `reserve_tokens` every request
    takes so many at once, without watermark, and never grows (Orca, and Vidur's).
    """

    def form(self) -> Batch:
        batch: Batch = []
        reserved = self.blocks_of(self.settings.reserve_tokens)
        while self.resting and len(batch) < self.settings.seats:
            request = self.resting.pop(0)
            if reserved or self.decodes(request):
                batch.append((request, 1))
        budget = self.budget - len(batch)
        while self.waiting and len(batch) < self.settings.seats and self.waiting[0].prompt <= budget:
            if not (self._reserves(reserved) if reserved else self.admits(self.waiting[0])):
                break
            request = self.admit(reserved or self.blocks_of(self.waiting[0].prompt))
            batch.append((request, request.prompt))
            budget -= request.prompt
        return batch

    def _reserves(self, blocks: int) -> bool:
        return len(self.held) < self.settings.max_num_seqs and self.free >= blocks


class FasterTransformer(Policy):
    """Requests are batched once: as many as wait, have a seat and find `reserve_tokens` of KV each. All
    prompts are one step, then all decode until the last is done; those done before compute no more, but keep
    seats and KV. With stages, a resting group goes on before a new one is made, first in, first out.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if not settings.reserve_tokens:
            raise ValueError("faster-transformer reserves KV per request: set reserve_tokens")
        self.groups: deque[list[Request]] = deque()  # resting
        self.in_flight: deque[list[Request]] = deque()

    def form(self) -> Batch:
        blocks = self.blocks_of(self.settings.reserve_tokens)
        group = self.groups.popleft() if self.groups else []
        if not group:
            while self.waiting and len(group) < self.settings.seats and self.free >= blocks:
                group.append(self.admit(blocks))
        if group:
            self.in_flight.append(group)
        return [(r, 1 if r.is_prefilled else r.prompt) for r in group if not r.is_done]

    def end(self, batch: Batch) -> None:
        group = self.in_flight.popleft()
        if all(request.is_done for request in group):
            self.free += sum(self.held.pop(request) for request in group)
        else:
            self.groups.append(group)


class LightLlm(Policy):
    """Prompts and decodes in steps of their own, KV counted in tokens. New requests, first come first served,
    are tried when nothing runs, and after every `max_waiting_steps` decodes; they enter while prompts keep to
    the budget and the peak of KV stays below the capacity. Running requests' outputs are known: with tokens
    held h_i and tokens to come l_i, sorted by l downwards, the peak is the largest h_1 + .. + h_i + i l_i
    (a prompt's first token counts as held). So nothing is ever preempted. One stage only.
    """

    default_token_budget = 4096

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if settings.stages > 1:
            raise ValueError("lightllm has no pipeline stages")
        self.decode_steps = 0  # since new requests were last tried

    def form(self) -> Batch:
        if not self.resting or self.decode_steps >= self.settings.max_waiting_steps:
            self.decode_steps = 0
            batch = self._prompts()
            if batch or not self.resting:
                return batch
        self.decode_steps += 1
        batch = [(request, 1) for request in self.resting]
        self.resting = []
        return batch

    def _prompts(self) -> Batch:
        batch: Batch = []
        budget = self.budget
        ahead = [(r.processed, r.prompt + r.output - r.processed - 1) for r in self.resting]
        while self.waiting and len(self.held) < self.settings.max_num_seqs:
            request = self.waiting[0]
            ahead.append((request.prompt + 1, max(request.output - 2, 0)))
            capacity = self.settings.blocks * self.settings.block_size
            if request.prompt > budget or self._peak(ahead) >= capacity:
                break
            batch.append((self.admit(0), request.prompt))
            budget -= request.prompt
        return batch

    @staticmethod
    def _peak(ahead: list[tuple[int, int]]) -> int:
        held = peak = 0
        for i, (has, left) in enumerate(sorted(ahead, key=lambda pair: -pair[1]), start=1):
            held += has
            peak = max(peak, held + i * left)
        return peak


POLICIES: dict[str, type[Policy]] = {
    "sarathi": Sarathi,
    "vllm-v0": VllmV0,
    "orca": Orca,
    "faster-transformer": FasterTransformer,
    "lightllm": LightLlm,
}


class Replica:
    """A policy in front of a pipeline."""

    def __init__(self, policy: Policy, step_s: StepTime, send_s: StepTime) -> None:
        self.policy, self.step_s, self.send_s = policy, step_s, send_s
        self.stage_free_s = [0.0] * policy.settings.stages
        self.in_flight = 0
        self.steps: list[tuple[float, float, Step]] = []  # formed, end, what

    def schedule(self, now: float) -> list[tuple[float, Batch]]:
        """Micro-batches that start now, with the times at which they end."""
        started = []
        while self.in_flight < len(self.stage_free_s) and (batch := self.policy.form()):
            self.in_flight += 1
            started.append((self._end_s(batch, now), batch))
        return started

    def _end_s(self, batch: Batch, now: float) -> float:
        for request, _ in batch:
            if math.isnan(request.scheduled_s):
                request.scheduled_s = now
        step = Step(
            tuple((n, request.processed) for request, n in batch if not request.is_prefilled),
            tuple(request.processed for request, _ in batch if request.is_prefilled),
        )
        stages = len(self.stage_free_s)
        share_s, send_s = self.step_s(step) / stages, self.send_s(step)
        end_s = now
        for i in range(stages):
            end_s = max(end_s, self.stage_free_s[i]) + share_s + (send_s if i < stages - 1 else 0.0)
            self.stage_free_s[i] = end_s
        self.steps.append((now, end_s, step))
        return end_s

    def end(self, batch: Batch, now: float) -> None:
        self.in_flight -= 1
        for request, n in batch:
            request.processed += n
            if request.is_prefilled:
                request.token_s.append(now)
            elif request.processed == request.prompt:
                request.is_prefilled = True
                request.processed += 1
                request.token_s.append(now)
        self.policy.end(batch)


def simulate(
    requests: Sequence[Request],
    policy: str,
    settings: Settings,
    step_s: StepTime,
    *,
    replicas: int = 1,
    send_s: StepTime = lambda step: 0.0,
) -> list[Replica]:
    """Fills in the requests, which are in order of arrival; RuntimeError if some can never be scheduled."""
    fleet = [Replica(POLICIES[policy](settings), step_s, send_s) for _ in range(replicas)]
    numbers = count()
    events: list[tuple[float, int, int, Batch]] = [  # when, number, replica, what ends (first: what arrives)
        (request.arrival_s, next(numbers), i % replicas, [(request, 0)]) for i, request in enumerate(requests)
    ]
    heapq.heapify(events)
    while events:
        now = events[0][0]
        touched = set()
        while events and events[0][0] == now:
            _, number, at, batch = heapq.heappop(events)
            touched.add(at)
            if number < len(requests):
                fleet[at].policy.waiting.append(batch[0][0])
            else:
                fleet[at].end(batch, now)
        for at in sorted(touched):
            for end_s, batch in fleet[at].schedule(now):
                heapq.heappush(events, (end_s, next(numbers), at, batch))
    stuck = [request.index for request in requests if not request.is_done]
    if stuck:
        raise RuntimeError(f"{policy}: {len(stuck)} requests can never be scheduled, the first is {stuck[0]}")
    return fleet


@dataclass(frozen=True)
class VidurTables:
    """Vidur's step time [ms] of one (GPU, LLM, TP). Beyond the tables: IndexError.

    `linear_ms` over eights of tokens; `prefill_ms` over 64s of KV before the chunks (each rounded up) and the
    one chunk with as many squared tokens; `decode_ms` over decodes and 64s of their mean context. `over` is
    what more than one prefill, and more than one decode, cost on top.
    """

    linear_ms: list[float]
    prefill_ms: list[list[float]]
    decode_ms: list[list[float]]
    over: tuple[float, float]

    @classmethod
    def read(cls, path: Path, layers: int) -> Self:
        """Attention is stored as float32, of numbers that are `layers` times a short decimal. The shortest
        decimal that rounds to what is stored is taken: 1e-9 s off per request, where the stored numbers are
        4e-7 s off and more so the longer the run.
        """
        with np.load(path) as tables:
            prefill_ms, decode_ms = (
                _unrounded(tables[f"{name}_attn_ms"], layers).tolist() for name in ("prefill", "decode")
            )
            prefill_over, decode_over = tables["over"].tolist()
            return cls(tables["linear_ms"].tolist(), prefill_ms, decode_ms, (prefill_over, decode_over))

    def __call__(self, step: Step) -> float:
        ms = self.linear_ms[-(-step.tokens // 8)]
        if step.chunks:
            cached = sum(-(-before // 64) for _, before in step.chunks)
            chunk = round(math.sqrt(sum(new * new for new, _ in step.chunks)))
            ms += self.prefill_ms[cached][chunk] * (1 + self.over[0] * (len(step.chunks) > 1))
        if n := len(step.contexts):
            ms += self.decode_ms[n][-(-(sum(step.contexts) // n) // 64)] * (1 + self.over[1] * (n > 1))
        return ms * 1e-3


def _unrounded(stored: npt.NDArray[np.float32], layers: int) -> npt.NDArray[np.float64]:
    exact = stored.astype(np.float64)
    for decimals in range(8, 1, -1):
        short = np.round(stored.astype(np.float64) / layers, decimals) * layers
        exact = np.where(short.astype(np.float32) == stored, short, exact)
    return exact
