"""The plain simulator with workers that start, drain, are taken away and are gone: one event at a time."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from simulator_reference import LINK, WORKER, Reference, Request, Worker, blocks_of

from planner.fleet import Fleet
from planner.simulator.elastic import ElasticPool, MetricsReading
from planner.traffic.trace import Trace

OUTSIDE = 2  # at equal times after workers and the link


class Script:
    """A controller that asks for sizes written down beforehand, and for the last ones from then on."""

    lag_s = 0.0

    def __init__(self, every_s: float, table: Sequence[Sequence[int]]) -> None:
        self.every_s, self.table, self.asked = every_s, table, 0

    def start(self, sizes: Sequence[int]) -> None:
        self.asked = 0

    def sizes(self, reading: MetricsReading) -> Sequence[int]:
        self.asked += 1
        return self.table[min(self.asked, len(self.table)) - 1]


@dataclass(eq=False)
class Life:
    """What a worker is in: off, starting, ready or draining, and since when."""

    phase: str = "off"
    number: int = 0
    requested_s: float = 0.0
    ready_s: float = 0.0
    given_up_s: float = math.inf
    is_warm: bool = False
    was_taken: bool = False


class ElasticReference(Reference):
    """`table` are the sizes asked for every `every_s`; `spans` then lists (worker, asked, ready, given up,
    gone, was taken, was stopped), `gauges` what a reading shows of each pool.
    """

    def __init__(self, fleet: Fleet, trace: Trace, pools: Sequence[ElasticPool], script: Script) -> None:
        room = tuple(replace(pool, count=each.most) for pool, each in zip(fleet.pools, pools, strict=True))
        super().__init__(replace(fleet, pools=room), trace)
        self.pools, self.script, self.seed = pools, script, fleet.policies.seed
        self.sizes = [
            pool.count if each.first is None else each.first
            for pool, each in zip(fleet.pools, pools, strict=True)
        ]
        self.pool_of = [p for p, pool in enumerate(room) for _ in range(pool.count)]
        self.lives = [Life() for _ in self.workers]
        self.epoch = [0] * len(self.workers)
        self.computed_in: dict[int, int] = {}  # epoch of the prefill worker, by request
        self.reserved_in: dict[int, int] = {}
        self.is_first: set[int] = set()  # were preempted where they wait
        self.limbo: list[Request] = []
        self.lost: list[Request] = []
        self.todo: list[Callable[[float], None]] = []
        self.spans: list[tuple[float, ...]] = []
        self.gauges: list[list[tuple[float, ...]]] = []
        self.came: list[set[tuple[int, str]]] = [set() for _ in pools]
        self.fresh: list[list[Request]] = [[] for _ in pools]
        self.wanted = list(self.sizes)
        self.now, self.is_looking = 0.0, False

    def run(self) -> Self:
        for p, size in enumerate(self.sizes):
            for w in self.of_pool(p)[:size]:
                self.lives[w].phase = "ready"
                self.draw(w)
        self.list_pools()
        self.later(0.0, 5, self.decide)
        super().run()
        end_s = max([r.finish_s for r in self.requests if r.status == "finished"] + [self.now])
        end_s = max(end_s, self.requests[-1].arrival_s)
        for w, life in enumerate(self.lives):
            if life.phase != "off":
                self.close(w, end_s, False, given_up_s=end_s if life.phase != "draining" else None)
        self.spans = sorted(
            (
                (w, *(min(time_s, end_s) for time_s in times_s), taken, stopped)
                for w, *times_s, taken, stopped in self.spans
            ),
            key=lambda span: (span[1], span[0]),
        )
        return self

    # events

    def later(self, time_s: float, order: int, what: Callable[[float], None]) -> None:
        if time_s < math.inf:
            self.todo.append(what)
            heapq.heappush(self.events, (time_s, OUTSIDE + order, len(self.todo) - 1))

    def is_arrival_next(self) -> bool:
        if not self.events or not self.arrivals:
            return bool(self.arrivals)
        return self.arrivals[0].arrival_s + self.fleet.front_end_s <= self.events[0][0]

    def happen(self, kind: int, index: int, now: float) -> None:
        if kind < OUTSIDE:
            super().happen(kind, index, now)
        else:
            self.now = now
            self.todo[index](now)
        self.route_lost(now)
        for w, life in enumerate(self.lives):
            if life.phase == "draining" and self.is_empty(self.workers[w]):
                self.close(w, now, False)

    def is_empty(self, worker: Worker) -> bool:
        return not worker.assigned and not worker.running and worker.free == worker.type.kv_tokens // 16

    def of_pool(self, p: int) -> list[int]:
        return [w for w, other in enumerate(self.pool_of) if other == p]

    def list_pools(self) -> None:
        up = [worker for worker in self.in_line if self.lives[worker.index].phase == "ready"]
        self.front = [worker for worker in up if worker.role != "decode"]
        self.back = [worker for worker in up if worker.role == "decode"]

    def meld(self) -> None:
        """Who waits in limbo is routed anew."""
        self.lost, self.limbo = self.lost + self.limbo, []

    # lives

    def draw(self, w: int) -> None:
        per_h, life = self.pools[self.pool_of[w]].interruptions_per_h, self.lives[w]
        if per_h:
            rng, number = np.random.default_rng((self.seed, w, life.number)), life.number
            self.later(
                life.ready_s + rng.exponential(3600 / per_h), 3, lambda now: self.take_away(w, number, now)
            )

    def begin(self, w: int, now: float) -> None:
        pool, life = self.pools[self.pool_of[w]], self.lives[w]
        warm = sum(
            self.lives[v].is_warm and self.lives[v].phase == "starting" for v in self.of_pool(self.pool_of[w])
        )
        life.phase, life.is_warm, life.was_taken = "starting", warm < pool.warm, False
        life.requested_s, life.given_up_s = now, math.inf
        life.ready_s = now + (pool.warm_start_s if life.is_warm else pool.start_s)
        number = life.number
        self.later(life.ready_s, 1, lambda now: self.become_ready(w, number))

    def become_ready(self, w: int, number: int) -> None:
        life = self.lives[w]
        if life.number == number and life.phase == "starting":
            life.phase = "ready"
            self.list_pools()
            self.draw(w)
            self.meld()

    def take_away(self, w: int, number: int, now: float) -> None:
        life = self.lives[w]
        if life.number == number and life.phase in ("ready", "draining"):
            life.was_taken = True
            self.drain(
                w, min(self.pools[self.pool_of[w]].notice_s, self.pools[self.pool_of[w]].drain_limit_s), now
            )

    def drain(self, w: int, limit_s: float, now: float) -> None:
        life, number = self.lives[w], self.lives[w].number
        if life.phase == "ready":
            life.phase, life.given_up_s = "draining", now
            self.list_pools()
        self.later(now + limit_s, 2, lambda now: self.stop(w, number, now))

    def stop(self, w: int, number: int, now: float) -> None:
        if self.lives[w].number == number and self.lives[w].phase == "draining":
            self.close(w, now, True)
            self.die(self.workers[w])

    def close(self, w: int, now: float, was_stopped: bool, given_up_s: float | None = None) -> None:
        life = self.lives[w]
        since_s = life.given_up_s if given_up_s is None else given_up_s
        stopped = was_stopped and not life.was_taken
        self.spans.append((w, life.requested_s, life.ready_s, since_s, now, life.was_taken, stopped))
        life.phase, life.number = "off", life.number + 1

    def decide(self, now: float) -> None:
        self.read()
        wanted = self.script.sizes(None)  # type: ignore[arg-type]
        self.wanted = [min(max(n, pool.least), pool.most) for n, pool in zip(wanted, self.pools, strict=True)]
        self.resize(now)
        self.later(self.script.asked * self.script.every_s, 5, self.decide)

    def resize(self, now: float) -> None:
        is_short = False
        for p, wanted in enumerate(self.wanted):
            lives = [(w, self.lives[w]) for w in self.of_pool(p)]
            alive = sum(life.phase in ("starting", "ready") for _, life in lives)
            while alive < wanted and (off := [w for w, life in lives if life.phase == "off"]):
                self.begin(off[0], now)
                alive += 1
            while alive > wanted:
                starting = [(life.requested_s, w) for w, life in lives if life.phase == "starting"]
                ready = [(life.ready_s, w) for w, life in lives if life.phase == "ready"]
                _, w = max(starting or ready)
                if starting:
                    self.lives[w].given_up_s = self.lives[w].ready_s = now
                    self.close(w, now, False)
                else:
                    self.drain(w, self.pools[p].drain_limit_s, now)
                alive -= 1
            is_short |= alive < wanted
        if is_short and not self.is_looking:
            self.is_looking = True
            self.later(now + 1.0, 4, self.look)

    def look(self, now: float) -> None:
        self.is_looking = False
        self.resize(now)

    # what a reading shows

    def read(self) -> None:
        found = []
        for p in range(len(self.pools)):
            ready = [self.workers[w] for w in self.of_pool(p) if self.lives[w].phase == "ready"]
            running = sum(len(worker.running) for worker in ready)
            blocks = [worker.type.kv_tokens // 16 for worker in ready]
            shares = [1 - worker.free / all_ for worker, all_ in zip(ready, blocks, strict=True)]
            outputs = [r.tpot_s for r in self.fresh[p] if r.output > 1]
            if self.workers[self.of_pool(p)[0]].role == "prefill":
                outputs = []
            phases = [self.lives[w].phase for w in self.of_pool(p)]
            found.append(
                (
                    *(phases.count(phase) for phase in ("ready", "starting", "draining")),
                    sum(len(worker.assigned) for worker in ready) - running,
                    running,
                    float(np.mean(shares)) if shares else math.nan,
                    len(self.limbo),
                    len(self.fresh[p]),
                    float(np.mean(outputs)) if outputs else math.nan,
                )
            )
            self.fresh[p].clear()
        self.gauges.append(found)

    def emit(self, worker: Worker, request: Request, now: float) -> None:
        super().emit(worker, request, now)
        if request.status == "finished" and worker.role != "prefill":
            self.fresh[self.pool_of[worker.index]].append(request)
        if worker.role == "prefill" and request.generated == 1:
            self.fresh[self.pool_of[worker.index]].append(request)

    # routing, and what is lost

    def could_hold(self, side: str, request: Request) -> bool:
        return any(
            worker.fits(request)
            for worker, life in zip(self.workers, self.lives, strict=True)
            if life.phase != "ready" and (worker.role == "decode") == (side == "back")
        )

    def arrive(self, request: Request, now: float) -> None:
        worker = self.choose("front", request)
        if worker is None:
            if self.could_hold("front", request):
                self.limbo.append(request)
            else:
                self.reject(request)
            return
        request.prefill_worker = request.decode_worker = worker.index
        worker.assigned.append(request)
        self.is_first.discard(request.index)
        at = 0
        while at < len(worker.waiting):
            other = worker.waiting[at]
            if other.index not in self.is_first and (other.arrival_s, other.index) > (
                request.arrival_s,
                request.index,
            ):
                break
            at += 1
        worker.waiting.insert(at, request)
        self.wake(worker, now)

    def preempt(self, worker: Worker) -> Request:
        request = super().preempt(worker)
        self.is_first.add(request.index)
        return request

    def hand_off(self, worker: Worker, request: Request, now: float) -> None:
        worker.running.remove(request)
        worker.assigned.remove(request)
        self.computed_in[request.index] = self.epoch[worker.index]
        self.hand_on(request, now)

    def hand_on(self, request: Request, now: float) -> None:
        target = self.choose("back", request)
        if target is None:
            if self.could_hold("back", request):
                self.limbo.append(request)
            else:
                self.workers[request.prefill_worker].free += request.blocks + request.beside
                request.blocks = request.beside = 0
                self.reject(request)
            return
        request.decode_worker = target.index
        target.assigned.append(request)
        self.line_up_for_kv(target.inbound, request)
        self.receive(target, now)

    def pull(self, worker: Worker, now: float) -> None:
        before = list(worker.inbound)
        super().pull(worker, now)
        for request in before:
            if request not in worker.inbound:
                self.reserved_in[request.index] = self.epoch[worker.index]

    def has_lost_kv(self, request: Request) -> bool:
        return self.computed_in[request.index] != self.epoch[request.prefill_worker]

    def end_transfer(self, now: float) -> None:
        request = self.link[0]
        target = self.workers[request.decode_worker]
        is_received = self.reserved_in[request.index] == self.epoch[target.index]
        if not self.has_lost_kv(request) and is_received:
            super().end_transfer(now)
            return
        self.link.popleft()
        if is_received:
            target.free += request.blocks + target.beside(request)
            target.assigned.remove(request)
            self.receive(target, now)
            self.wake(target, now)
        self.lost.append(request)

    def start_over(self, request: Request) -> None:
        request.cached = request.blocks = request.beside = 0
        request.is_prefilled = False
        request.preemptions += 1

    def die(self, worker: Worker) -> None:
        self.epoch[worker.index] += 1
        self.list_pools()
        self.events = [e for e in self.events if e[1] != WORKER or e[2] != worker.place]
        heapq.heapify(self.events)
        worker.step_start_s, worker.is_starting = None, False
        for request in [*worker.running, *worker.ready]:
            self.start_over(request)
            self.lost.append(request)
        self.lost += [*worker.waiting, *worker.inbound]
        for queue in (worker.running, worker.assigned, worker.decoding, worker.chunks):
            queue.clear()
        worker.waiting, worker.ready, worker.inbound = deque(), deque(), deque()
        worker.free = worker.type.kv_tokens // 16
        for other in self.workers:
            for request in [r for r in other.inbound if self.has_lost_kv(r)]:
                other.inbound.remove(request)
                other.assigned.remove(request)
                self.lost.append(request)
            self.receive(other, self.now)
        self.meld()

    def route_lost(self, now: float) -> None:
        while self.lost:
            self.lost.sort(key=lambda request: (request.arrival_s, request.index))
            request = self.lost.pop(0)
            if request.is_prefilled and not self.has_lost_kv(request):
                self.hand_on(request, now)
            else:
                if request.is_prefilled:
                    self.start_over(request)
                self.arrive(request, now)


__all__ = ["LINK", "ElasticReference", "Script", "blocks_of"]
