"""The plain simulators with data-parallel ranks: workers of several schedulers that step together."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np
from async_prefix_reference import AsyncPrefixReference
from async_reference import AsyncReference, Formed
from prefix_reference import PrefixReference
from simulations import random_case
from simulator_reference import WORKER, Reference, Request, Worker

from planner.domain import Limit
from planner.fleet import Fleet, Pool
from planner.policies import ROUTING
from planner.traffic.trace import Trace


def ranked(fleet: Fleet, seed: int, *, dyadic: bool, least: int = 1) -> Fleet:
    """The same fleet, its workers of one to three ranks each, and some share of each step of all ranks."""
    rng = np.random.default_rng([seed, 17])

    def number(high: float) -> float:
        value = rng.uniform(0, high)
        return round(value * 1024) / 1024 if dyadic else float(value)

    def change(pool: Pool) -> Pool:
        latency = pool.type.latency
        rises = [number(0.05) * gap for gap in np.diff(latency.knots_tokens)]
        joint = number(0.1) + np.cumsum([0.0, *rises])
        latency = replace(
            latency, f_s=tuple((np.array(latency.f_s) + joint).tolist()), joint_s=tuple(joint.tolist())
        )
        return replace(pool, type=replace(pool.type, latency=latency, dp=int(rng.integers(least, 4))))

    return replace(fleet, pools=tuple(change(pool) for pool in fleet.pools))


def random_ranked_case(seed: int, *, dyadic: bool) -> tuple[Fleet, Trace, tuple[Limit, ...], int]:
    """`random_case` with ranks: at least one pool has some."""
    fleet, trace, limits, closed_loop = random_case(seed, dyadic=dyadic)
    found = ranked(fleet, seed, dyadic=dyadic)
    if all(pool.type.dp == 1 for pool in found.pools):
        found = ranked(fleet, seed, dyadic=dyadic, least=2)
    return found, trace, limits, closed_loop


class RankBatch(NamedTuple):
    """What a rank computes in a step, and its seconds on the GPUs without the experts."""

    rank: Worker
    own_s: float
    tokens: int
    sequences: int
    has_prompt: bool


class Ranks(Reference):
    """`workers` are ranks while it runs; then what each worker did."""

    def __init__(self, fleet: Fleet, trace: Trace, *, closed_loop: int = 0) -> None:
        self.dp = [pool.type.dp for pool in fleet.pools for _ in range(pool.count)]
        apart = tuple(
            replace(pool, type=replace(pool.type, dp=1), count=pool.count * pool.type.dp)
            for pool in fleet.pools
        )
        super().__init__(replace(fleet, pools=apart), trace, closed_loop=closed_loop)
        kinds = [pool.type for pool in fleet.pools for _ in range(pool.count * pool.type.dp)]
        self.line_up_workers(kinds)
        for rank, kind in zip(self.workers, kinds, strict=True):
            is_decode = rank.role == "decode"
            policy = fleet.policies.decode_routing if is_decode else fleet.policies.routing
            rank.weights = ROUTING[policy].weights(kind, is_decode)
        ranks = iter(self.workers)
        self.groups = [[next(ranks) for _ in range(dp)] for dp in self.dp]
        self.group_of = {rank.index: group for group in self.groups for rank in group}
        self.rank_turn = {group[0].index: 0 for group in self.groups}

    def run(self) -> Self:
        super().run()
        number = {rank.index: k for k, group in enumerate(self.groups) for rank in group} | {-1: -1}
        for request in self.requests:
            request.prefill_worker = number[request.prefill_worker]
            request.decode_worker = number[request.decode_worker]
        for group in self.groups:
            group[0].tokens = sum(rank.tokens for rank in group)
        self.workers = [group[0] for group in self.groups]
        return self

    def choose(self, side: str, request: Request) -> Worker | None:
        groups = [group for group in self.groups if (group[0].role == "decode") == (side == "back")]
        groups.sort(key=lambda group: group[0].place)
        policies = self.fleet.policies
        fitting = [group for group in groups if group[0].fits(request)]
        if not fitting:
            self.turns[side] += len(groups)
            return None
        if ROUTING[policies.routing if side == "front" else policies.decode_routing].name == "round-robin":
            while True:
                group = groups[self.turns[side] % len(groups)]
                self.turns[side] += 1
                if group in fitting:
                    break
        else:
            group = min(fitting, key=lambda group: sum(rank.score() for rank in group))
        turn = self.rank_turn[group[0].index]
        self.rank_turn[group[0].index] += 1
        ranks = [group[(turn + i) % len(group)] for i in range(len(group))]
        return min(ranks, key=lambda rank: len(rank.assigned))

    def wake(self, worker: Worker, now: float) -> None:
        super().wake(self.group_of[worker.index][0], now)

    def own_s(self, worker: Worker) -> float:
        """Of the step that the rank has formed, on its GPUs, without what all ranks have together."""
        tokens = len(worker.decoding) + sum(n for _, n in worker.chunks)
        pairs = sum(n * (request.cached + (n + 1) / 2) for request, n in worker.chunks)
        kv_tokens = sum(request.cached + 1 for request in worker.decoding)
        cached = sum(request.cached for request, _ in worker.chunks)
        latency, decodes, prefills = worker.type.latency, len(worker.decoding), len(worker.chunks)
        own_s = latency.step_s(tokens, pairs, decodes, kv_tokens, prefills, cached)
        return float(own_s - latency.joint_experts_s(tokens))

    def together_s(self, ranks: Sequence[RankBatch], empty: int) -> float:
        """Seconds of a step of all ranks, of which `empty` more have nothing to do."""
        kind = ranks[0].rank.type
        tokens = sum(batch.tokens for batch in ranks) + empty
        of_gpus_s = max(batch.own_s for batch in ranks) + float(kind.latency.joint_experts_s(tokens))
        engine = kind.engine
        if engine is None:
            return of_gpus_s
        longest_s = 0.0
        for batch in ranks:
            sequences = batch.sequences
            host_s, rest_s = (
                part.step_s + part.sequence_s * sequences + part.log2_tp_s * math.log2(kind.tp)
                for part in kind.host
            )
            host_s += engine.latent_launch_s * kind.launched_layers * batch.has_prompt
            step_s = max(of_gpus_s, host_s) + rest_s if engine.async_scheduling else of_gpus_s + host_s
            longest_s = max(longest_s, step_s, sequences / engine.tokens_per_s)
        return longest_s

    def start_step(self, worker: Worker, now: float) -> None:
        group = self.group_of[worker.index]
        worker.is_starting = False
        busy = []
        for rank in group:
            while self.form_step(rank, now) and not rank.decoding and not rank.chunks:
                rank.knows_all = True  # whoever ran was preempted
            if not rank.decoding and not rank.chunks and not rank.knows_all:
                rank.knows_all = True
                while self.form_step(rank, now) and not rank.decoding and not rank.chunks:
                    pass
            if rank.decoding or rank.chunks:
                tokens = len(rank.decoding) + sum(n for _, n in rank.chunks)
                sequences = len(rank.decoding) + len(rank.chunks)
                busy.append(RankBatch(rank, self.own_s(rank), tokens, sequences, bool(rank.chunks)))
        if busy:
            self.begin(group, now, self.together_s(busy, len(group) - len(busy)))

    def begin(self, group: Sequence[Worker], now: float, step_s: float) -> None:
        for rank in group:
            rank.step_start_s = now
        heapq.heappush(self.events, (now + step_s, WORKER, group[0].place))

    def end_step(self, worker: Worker, now: float) -> None:
        for rank in self.group_of[worker.index]:
            if self.has_batch(rank):
                super().end_step(rank, now)
                continue
            assert rank.step_start_s is not None
            rank.busy_s += now - rank.step_start_s
            rank.steps += 1
            rank.step_start_s = None

    def has_batch(self, rank: Worker) -> bool:
        return bool(rank.decoding or rank.chunks)

    def has_ranks(self, side: str) -> bool:
        """Whether a worker that takes arrivals ("front") or hand-offs has more than one rank."""
        workers = self.front if side == "front" else self.back
        return any(len(self.group_of[worker.index]) > 1 for worker in workers)


class SyncRanks(Ranks):
    """... of an engine that schedules a step when it has seen the last one's tokens."""

    def end_transfer(self, now: float) -> None:
        request = self.link[0]
        target = self.workers[request.decode_worker]
        is_empty = target.step_start_s is not None and not self.has_batch(target)
        super().end_transfer(now)
        if is_empty:
            request.known_step = 0  # it looks all the time


class AsyncRanks(Ranks, AsyncReference):
    """... of an engine that forms the next step as one begins."""

    def start_step(self, worker: Worker, now: float) -> None:
        group = self.group_of[worker.index]
        worker.is_starting = False
        steps: list[tuple[Worker, Formed]] = []
        for rank in group:
            step = self.next_step(rank, now)
            self.running.pop(rank.index, None)
            if step is not None:
                steps.append((rank, step))
        if steps:
            busy = [
                RankBatch(
                    *(rank, step.step_s, self.tokens_of(step)),
                    sequences=len(step.decoding) + len(step.chunks),
                    has_prompt=bool(step.chunks),
                )
                for rank, step in steps
            ]
            self.begin(group, now, self.together_s(busy, len(group) - len(busy)))
            for rank in group:
                self.note_present(rank)
            for rank, step in steps:
                self.launch(rank, step, now)
        for rank in group:
            self.receive_late(rank, now)

    def step_s(self, worker: Worker) -> float:
        return self.own_s(worker)

    def tokens_of(self, step: Formed) -> int:
        return len(step.decoding) + sum(n for _, n in step.chunks)

    def has_batch(self, rank: Worker) -> bool:
        return rank.index in self.running

    def end_transfer(self, now: float) -> None:
        request = self.link[0]
        target = self.workers[request.decode_worker]
        is_empty = target.step_start_s is not None and not self.has_batch(target)
        super().end_transfer(now)
        if is_empty:
            request.known_step = 0  # it looks all the time

    def end_step(self, worker: Worker, now: float) -> None:
        for rank in self.group_of[worker.index]:
            if self.has_batch(rank):
                AsyncReference.end_step(self, rank, now)
                continue
            assert rank.step_start_s is not None
            rank.busy_s += now - rank.step_start_s
            rank.steps += 1
            rank.step_start_s = None


class CachedRanks(Ranks, PrefixReference):
    """... whose ranks have prefix caches of their own."""

    def start_step(self, worker: Worker, now: float) -> None:
        self.now = now
        super().start_step(worker, now)

    def choose(self, side: str, request: Request) -> Worker | None:
        if side == "front":
            self.read_notices()
        if not self.has_ranks(side):
            return PrefixReference.choose(self, side, request)
        return super().choose(side, request)


class PrefixRanks(CachedRanks, SyncRanks):
    """... of an engine that schedules a step when it has seen the last one's tokens."""


class AsyncPrefixRanks(CachedRanks, AsyncRanks, AsyncPrefixReference):
    """... of an engine that forms the next step as one begins."""

    def end_step(self, worker: Worker, now: float) -> None:
        self.now = now
        for rank in self.group_of[worker.index]:
            if self.has_batch(rank):
                self.check(rank)
        super().end_step(worker, now)
