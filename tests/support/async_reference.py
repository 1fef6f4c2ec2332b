"""The plain simulator of engines that schedule asynchronously: the next step is formed as one begins.

It is really formed then, and kept until its turn comes; the kernel forms it at its turn, of what was known
then.
Whoever has his last token in the step under way keeps seat and blocks until it ends, unless he is preempted.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass, field

from simulator_reference import WORKER, Reference, Request, Worker

from planner.fleet import Fleet
from planner.traffic.trace import Trace


@dataclass(eq=False)
class Formed:
    """A step: its decodes, the chunks of its prompts, and how long it takes."""

    decoding: list[Request] = field(default_factory=list)
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    step_s: float = 0.0
    ended: list[Request] = field(default_factory=list)  # prompts, with one of the chunks


class AsyncReference(Reference):
    kv_delay_steps = 3

    def __init__(self, fleet: Fleet, trace: Trace, *, closed_loop: int = 0) -> None:
        super().__init__(fleet, trace, closed_loop=closed_loop)
        self.running: dict[int, Formed] = {}  # by worker
        self.prepared: dict[int, Formed | None] = defaultdict(lambda: None)
        self.made: dict[int, int] = defaultdict(int)  # tokens of a request, once the step under way has ended
        self.leaving: set[int] = set()  # requests with their last token here in the step under way

    def start_step(self, worker: Worker, now: float) -> None:
        worker.is_starting = False
        step = self.prepared[worker.index]
        if step is None:
            worker.knows_all = True
            step = self.formed(worker, now, is_prepared=False)
        self.prepared[worker.index] = None
        if step is None:
            return
        self.running[worker.index] = step
        worker.step_start_s, worker.knows_all = now, False
        heapq.heappush(self.events, (now + step.step_s, WORKER, worker.place))
        for request in step.decoding:
            self.advance(worker, request, 1)
        for request, n in step.chunks:
            request.under_way = n
            if math.isnan(request.scheduled_s):
                request.scheduled_s = now
            if self.advance(worker, request, n):
                step.ended.append(request)
        self.prepared[worker.index] = self.formed(worker, now, is_prepared=True)

    def formed(self, worker: Worker, now: float, *, is_prepared: bool) -> Formed | None:
        unseen = [request for request in worker.waiting if math.isnan(request.scheduled_s)]
        while self.form_step(worker, now) and not is_prepared and not worker.decoding and not worker.chunks:
            pass
        for request in unseen:
            request.scheduled_s = math.nan  # until the step begins
        if not worker.decoding and not worker.chunks:
            return None
        return Formed(worker.decoding, worker.chunks, self.step_s(worker))

    def has_kv(self, worker: Worker, request: Request) -> bool:
        is_under_way = worker.step_start_s is not None
        return worker.knows_all or request.known_step <= worker.steps + is_under_way + 1

    def is_leaving(self, request: Request) -> bool:
        return request.index in self.leaving

    def advance(self, worker: Worker, request: Request, n: int) -> bool:
        """What the scheduler takes for done; True if it makes a token."""
        request.cached += n
        known = request.input + max(request.generated, self.made[request.index])
        if not request.is_prefilled and request.cached < known:
            return False
        is_first = not request.is_prefilled
        request.is_prefilled = True
        self.made[request.index] = max(request.generated, self.made[request.index]) + 1
        if self.made[request.index] == request.output or worker.role == "prefill":
            self.leaving.add(request.index)
        return is_first

    def end_step(self, worker: Worker, now: float) -> None:
        assert worker.step_start_s is not None
        step = self.running[worker.index]
        step_s = now - worker.step_start_s
        worker.step_start_s = None
        worker.busy_s += step_s
        worker.steps += 1
        worker.tokens += len(step.decoding) + sum(n for _, n in step.chunks)
        for request, _ in step.chunks:
            request.under_way = 0
        for request in step.decoding:
            self.leaving.discard(request.index)
            self.emit(worker, request, now)
        for request in step.ended:
            self.leaving.discard(request.index)
            request.last_step_s = step_s
            self.emit(worker, request, now)
            if worker.role == "prefill" and request.status == "unfinished":
                self.hand_off(worker, request, now)
        self.receive(worker, now)
        self.wake(worker, now)
