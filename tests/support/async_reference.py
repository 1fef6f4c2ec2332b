"""The plain simulator of engines that schedule asynchronously: the next step is formed as one begins.

It is really formed then, and kept until its turn comes; the kernel forms it at its turn, of what was known
then.
Whoever has his last token in the step under way keeps seat and blocks until it ends, unless he is preempted.

A hand-off finds room right after a step has begun or while none runs, with SGLang also as it comes, or none.
The step after the one under way is formed then: so those who were there when that began have the blocks of
all tokens that they will have as it ends, of those who were handed over as many as there were seats. Who
waits there, preempted, goes first.

Routers hear that a request was preempted as the step begins which has no room for it.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

from simulator_reference import BLOCK, WORKER, Reference, Request, Worker, blocks_of

from planner.fleet import Fleet
from planner.traffic.trace import Trace


@dataclass(eq=False)
class Formed:
    """A step: its decodes, the chunks of its prompts, and how long it takes."""

    decoding: list[Request] = field(default_factory=list)
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    step_s: float = 0.0
    ended: list[Request] = field(default_factory=list)  # prompts, with one of the chunks


@dataclass(eq=False)
class Present:
    """Who was on a worker when its step began."""

    running: list[Request]
    ready: deque[Request]
    is_waited: bool  # somebody waits for his prompt to be computed


class AsyncReference(Reference):
    kv_delay_steps = 3

    def __init__(self, fleet: Fleet, trace: Trace, *, closed_loop: int = 0) -> None:
        super().__init__(fleet, trace, closed_loop=closed_loop)
        self.running: dict[int, Formed] = {}  # by worker
        self.prepared: dict[int, Formed | None] = defaultdict(lambda: None)
        self.made: dict[int, int] = defaultdict(int)  # tokens of a request, once the step under way has ended
        self.leaving: set[int] = set()  # requests with their last token here in the step under way
        self.present_at: dict[int, Present] = {}
        self.hidden: dict[int, list[Request]] = defaultdict(list)  # preempted in the step that is prepared
        self.prepared_blocks: dict[int, int] = defaultdict(int)  # by worker, of the step that is prepared
        self.is_preparing = False
        self.unheard: dict[int, list[Request]] = defaultdict(list)  # by worker, who came since it polled
        self.unpolled: dict[int, int] = defaultdict(int)  # by worker, the weights of its steps since then

    def line_up(self, worker: Worker, request: Request) -> None:
        """An engine that polls hears then of who arrives."""
        engine = worker.type.engine
        if engine is not None and engine.poll_steps > 1 and not request.preemptions:
            self.unheard[worker.index].append(request)
        else:
            super().line_up(worker, request)

    def poll(self, worker: Worker, *, is_prepared: bool) -> None:
        """Before a step is formed: a step of prompts weighs 1000, one of decodes 1, and who idles polls."""
        engine = worker.type.engine
        if is_prepared:
            self.unpolled[worker.index] += 1000 if self.running[worker.index].chunks else 1
        if not is_prepared or engine is None or self.unpolled[worker.index] >= engine.poll_steps:
            self.unpolled[worker.index] = 0
            for request in self.unheard.pop(worker.index, []):
                super().line_up(worker, request)

    def start_step(self, worker: Worker, now: float) -> None:
        worker.is_starting = False
        step = self.next_step(worker, now)
        if step is not None:
            heapq.heappush(self.events, (now + step.step_s, WORKER, worker.place))
            self.launch(worker, step, now)
        self.receive_late(worker, now)

    def receive_late(self, worker: Worker, now: float) -> None:
        """Right after a step has begun, or as none does. A hand-off that is pulled needs a seat and a token
        of the step that is prepared then.
        """
        if not self.pulls_kv(worker):
            self.receive(worker, now)
            return
        if worker.step_start_s is None:
            self.note_present(worker)
        step = self.prepared[worker.index] or Formed()
        tokens = len(step.decoding) * self.width(worker) + sum(n for _, n in step.chunks)
        has_seat = len(worker.running) < worker.type.max_num_seqs
        if has_seat and tokens < worker.type.max_num_batched_tokens:
            super().pull(worker, now)

    def pull(self, worker: Worker, now: float) -> None:
        if not self.pulls_kv(worker):
            super().pull(worker, now)

    def next_step(self, worker: Worker, now: float) -> Formed | None:
        """The one that was prepared; where there is none, of all that is known now."""
        step = self.prepared[worker.index]
        for request in self.hidden.pop(worker.index, []):
            request.shown, request.unseen = None, 0
        self.prepared_blocks[worker.index] = 0
        if step is None:
            worker.knows_all = True
            step = self.formed(worker, now, is_prepared=False)
        self.prepared[worker.index] = None
        return step

    def launch(self, worker: Worker, step: Formed, now: float) -> None:
        """The step begins, and the one after it is prepared."""
        self.running[worker.index] = step
        worker.step_start_s, worker.knows_all = now, False
        for request in step.decoding:
            self.advance(worker, request, 1)
        for request, n in step.chunks:
            request.under_way = n
            if math.isnan(request.scheduled_s):
                request.scheduled_s = now
            if self.advance(worker, request, n):
                step.ended.append(request)
        self.note_present(worker)
        self.is_preparing, free = True, worker.free
        self.prepared[worker.index] = self.formed(worker, now, is_prepared=True)
        self.is_preparing = False
        self.prepared_blocks[worker.index] = free - worker.free

    def unseen_blocks(self, worker: Worker) -> int:
        return self.prepared_blocks[worker.index]

    def note_present(self, worker: Worker) -> None:
        self.present_at[worker.index] = Present(
            list(worker.running), deque(worker.ready), bool(worker.waiting)
        )

    def is_kept(self, worker: Worker, request: Request) -> bool:
        return worker.role == "prefill" and self.is_handed_over(worker, request)

    def preempt(self, worker: Worker) -> Request:
        request = self.victim(worker)
        if self.is_preparing and request.shown is None:
            request.shown = request.to_prefill + request.unseen
            self.hidden[worker.index].append(request)
        return super().preempt(worker)

    def has_room(self, worker: Worker, blocks: int) -> bool:
        if worker.step_start_s is None:
            self.note_present(worker)
        present = self.present_at[worker.index]
        if present.is_waited:
            return False
        came = [request for request in worker.ready if request not in present.ready]
        seats = max(worker.type.max_num_seqs - len(present.running), 0)
        for i, request in enumerate([*present.ready, *came]):
            tokens = request.input + request.generated if i < seats else max(request.cached, request.input)
            blocks += blocks_of(tokens) + worker.beside(request)
        for request in present.running:
            tokens = request.input + max(request.generated, self.made[request.index])
            blocks += blocks_of(tokens) + worker.beside(request)
        for request in self.link:
            if request.decode_worker == worker.index:
                blocks += self.moved_blocks(request) + worker.beside(request)
        return blocks <= worker.type.kv_tokens // BLOCK

    def formed(self, worker: Worker, now: float, *, is_prepared: bool) -> Formed | None:
        self.poll(worker, is_prepared=is_prepared)
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

    def is_handed_over(self, worker: Worker, request: Request) -> bool:
        """Whether the KV of a prompt whose last chunk is under way is about to be fetched: it is kept, where
        vLLM may preempt it and then hands over a request without KV."""
        engine = worker.type.engine
        is_first_hidden = engine is not None and engine.first_token == "decode" and not request.generated
        return self.is_leaving(request) and (is_first_hidden or self.made[request.index] < request.output)

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
        for request, n in step.chunks:
            request.under_way = 0
            self.note_unseen(worker, request, n)
            self.computed(worker, request)
        for request in step.decoding:
            self.leaving.discard(request.index)
            self.emit(worker, request, now)
        for request in step.ended:
            self.leaving.discard(request.index)
            request.last_step_s = step_s
            self.emit_of_prompt(worker, request, now)
            if not request.generated:  # Nobody has seen a token.
                self.made[request.index] = 0
            if worker.role == "prefill" and request.status == "unfinished":
                self.hand_off(worker, request, now)
        self.wake(worker, now)
