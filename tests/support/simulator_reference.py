"""The simulator once more, as plainly as we can: what the tests hold the compiled kernel against.

One engine step at a time, one Python object per request, every token by itself. It follows the kernel's
docstring, and shares with it only the routing weights, which are data, and the measured window.
Nothing is kept that can be looked up: the load of a worker is summed over its requests each time it is asked.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from reference_routing import Draws, draws

from planner.domain import Limit, allowed_above
from planner.fleet import Fleet, WorkerType
from planner.policies import ROUTING
from planner.traffic.trace import Trace, measured_window

BLOCK = 16
WORKER, LINK = 0, 1  # at equal times in this order, after arrivals


@dataclass(eq=False)
class Request:
    """A request and its tokens. `worker` holds `blocks` of KV for it, with `cached` tokens in them."""

    index: int
    arrival_s: float
    input: int
    output: int
    status: str = "unfinished"
    generated: int = 0
    cached: int = 0
    blocks: int = 0
    beside: int = 0
    is_prefilled: bool = False
    admissions: int = 0
    preemptions: int = 0
    known_step: int = 0  # first of its decode worker that may hold it
    under_way: int = 0  # prompt tokens of a step that has not ended, if they count as cached already
    unseen: int = 0  # computed prompt tokens that the router still takes for pending
    shown: int | None = None  # what routers take for `to_prefill`, where they do not know it yet
    expected: int = 0  # prompt tokens that its router took for cached, until it sees how many are
    queue_key: float = 0.0
    queue_batch: int = 0
    scheduled_s: float = math.nan
    first_token_s: float = math.nan
    last_token_s: float = math.nan
    finish_s: float = math.nan
    last_step_s: float = 0.0  # length of the step that made the first token
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (end_s, gap_s)
    prefill_worker: int = -1
    decode_worker: int = -1

    @property
    def to_prefill(self) -> int:
        return 0 if self.is_prefilled else self.input + self.generated - self.cached

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that routers take for not computed."""
        waiting = self.to_prefill if self.shown is None else self.shown
        return waiting - self.expected + self.under_way + self.unseen

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.finish_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.finish_s - self.first_token_s) / (self.output - 1) if self.output > 1 else math.nan

    @property
    def tbt_max_s(self) -> float:
        is_done = self.status == "finished" and self.output > 1
        return max(gap_s for _, gap_s in self.gaps) if is_done else math.nan


@dataclass(eq=False)
class Worker:
    """An engine. `running` is in order of admission; at most one of them is prefilled in part."""

    index: int
    role: str
    type: WorkerType
    weights: tuple[float, ...]
    free: int  # KV blocks
    place: int = 0  # among all, see line_up_workers
    assigned: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)  # for prefill
    inbound: deque[Request] = field(default_factory=deque)  # for blocks to receive their KV in
    ready: deque[Request] = field(default_factory=deque)  # received, for a seat
    running: list[Request] = field(default_factory=list)
    decoding: list[Request] = field(default_factory=list)  # in the current step
    chunks: list[tuple[Request, int]] = field(default_factory=list)  # in the current step
    step_start_s: float | None = None  # None: idle
    is_starting: bool = False  # its turn comes at this moment
    knows_all: bool = True  # that has come
    busy_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    served_batch: int = 0  # of the prompt admitted last, where prompts are sorted in scheduling batches
    filled_batch: int = 0  # of the prompt that came last, which was the `filled`-th of it
    filled: int = 0

    def fits(self, request: Request) -> bool:
        return self.type.has_room_for(request.input + request.output)

    def is_free_for_prompts(self) -> bool:
        """Whether two steps compute more prompt tokens than are pending."""
        pending = sum(request.pending_tokens for request in self.assigned)
        return pending < 2 * self.type.max_num_batched_tokens

    def beside(self, request: Request) -> int:
        """Blocks that it takes beside those of its tokens."""
        return self.type.extra_kv.growing_blocks(request.input, request.input + request.output)

    def score(self) -> float:
        pending = sum(request.pending_tokens for request in self.assigned)
        kv_tokens = sum(request.input for request in self.assigned)
        return self.weights[0] * pending + self.weights[1] * len(self.assigned) + self.weights[2] * kv_tokens


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


def place_in_line(kind: WorkerType, is_decode: bool) -> tuple[float, ...]:
    """Routers take the first of equal workers: the quick ones come first, then the roomy ones."""
    added_s = ROUTING["jsq"].weights(kind, is_decode)
    return is_decode, *added_s, -(kind.kv_tokens // BLOCK), -kind.max_num_seqs


class Reference:
    """Run it with `Reference(...).run()`, then read `requests` and `workers`."""

    kv_delay_steps = 1  # of engines: so many after the one in which KV arrives go without it

    def __init__(self, fleet: Fleet, trace: Trace, *, closed_loop: int = 0) -> None:
        self.fleet, self.closed_loop = fleet, closed_loop
        self.window_s = (0.0, math.inf) if closed_loop else measured_window(trace)
        columns = trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist()
        self.requests = [Request(i, *row) for i, row in enumerate(zip(*columns, strict=True))]
        self.due_s = [self.due_after_s(trace, i) for i in range(len(trace))]  # if the queue is edf
        self.workers: list[Worker] = []
        for pool in fleet.pools:
            is_decode = pool.role == "decode"
            policy = fleet.policies.decode_routing if is_decode else fleet.policies.routing
            for _ in range(pool.count):
                weights = ROUTING[policy].weights(pool.type, is_decode)
                blocks = pool.type.kv_tokens // BLOCK
                self.workers.append(Worker(len(self.workers), pool.role, pool.type, weights, blocks))
        self.line_up_workers([worker.type for worker in self.workers])
        self.turns = {"front": 0, "back": 0}
        self.draws = Draws(fleet.policies.seed)
        self.events: list[tuple[float, int, int]] = []
        self.arrivals: deque[Request] = deque()
        self.held: deque[Request] = deque()  # at the router, in order of arrival
        self.parents: dict[int, set[int]] = {}  # those still to be finished
        for index, parent in trace.after.tolist():
            self.parents.setdefault(index, set()).add(parent)
        self.think_s = trace.think_s.tolist()
        self.freed: list[tuple[float, int]] = []  # arrivals of those whose parents have finished
        self.link: deque[Request] = deque()
        self.link_free_s = self.link_last_s = -math.inf
        self.event_s = -math.inf  # of the last event that was no arrival
        self.last_end = WORKER, -math.inf  # kind and time of the last end of a step or a transfer
        # A transfer ended with a step, but for rounding; or the kernel simulates on purpose something else.
        self.is_not_compared = False
        self.transfers = self.done = self.released = 0
        self.out_of_step: Request | None = None  # a decode that is preempted from the step that is formed

    def due_after_s(self, trace: Trace, i: int) -> float:
        """Seconds after its arrival at which a request is due: those of its first class, or the longest."""
        for selector, due_s in self.fleet.policies.due:
            is_of_tenant = not selector.tenants or trace.tenants[trace.tenant[i]] in selector.tenants
            tokens, most = int(trace.input_tokens[i]), selector.most_tokens
            if is_of_tenant and selector.least_tokens <= tokens and (most is None or tokens <= most):
                return due_s
        return max((due_s for _, due_s in self.fleet.policies.due), default=0.0)

    def line_up_workers(self, kinds: Sequence[WorkerType]) -> None:
        """Number the workers, of these kinds, as routers look at them and as they act at one moment."""
        self.in_line = sorted(
            self.workers, key=lambda worker: place_in_line(kinds[worker.index], worker.role == "decode")
        )
        for place, worker in enumerate(self.in_line):
            worker.place = place
        self.front = [worker for worker in self.in_line if worker.role != "decode"]
        self.back = [worker for worker in self.in_line if worker.role == "decode"]

    def run(self) -> Self:
        n = len(self.requests)
        if self.closed_loop:
            self.release(0.0)
        else:
            self.arrivals.extend(request for request in self.requests if request.index not in self.parents)
        while self.done < n:
            if self.is_arrival_next():
                request, _ = self.coming()
                if self.freed and request.index == self.freed[0][1]:
                    heapq.heappop(self.freed)
                else:
                    self.arrivals.popleft()
                now = request.arrival_s + self.fleet.front_end_s
                self.arrive(request, now)
            else:
                now, kind, index = heapq.heappop(self.events)
                if kind == LINK or (kind == WORKER and self.in_line[index].step_start_s is not None):
                    self.is_not_compared |= kind != self.last_end[0] and now - self.last_end[1] < 1e-9
                    self.last_end = kind, now
                self.event_s = now
                self.happen(kind, index, now)
            self.send_held(now)
            if self.closed_loop:
                self.release(now)
        return self

    def happen(self, kind: int, index: int, now: float) -> None:
        if kind == LINK:
            self.end_transfer(now)
        elif self.in_line[index].step_start_s is None:
            self.start_step(self.in_line[index], now)
        else:
            self.end_step(self.in_line[index], now)

    def coming(self) -> tuple[Request, bool]:
        """The next arrival, and whether an answer is its cause."""
        if self.freed and not (self.arrivals and self.arrivals[0].arrival_s <= self.freed[0][0]):
            return (
                self.requests[self.freed[0][1]],
                self.freed[0][0] + self.fleet.front_end_s == self.event_s,
            )
        return self.arrivals[0], self.closed_loop > 0

    def is_arrival_next(self) -> bool:
        """At one moment arrivals come first, but for those that an answer caused: a step that starts then
        comes before them, as no client is so quick that its next request is in the step that follows.
        """
        if not self.events or not (self.arrivals or self.freed):
            return bool(self.arrivals or self.freed)
        request, is_caused = self.coming()
        time_s, kind, index = self.events[0]
        workers = self.in_line if kind == WORKER else self.workers
        starts = kind != LINK and workers[index].step_start_s is None
        reaches_s = request.arrival_s + self.fleet.front_end_s
        return reaches_s < time_s or (reaches_s == time_s and not (starts and is_caused))

    def free_children(self, parent: Request, now: float) -> None:
        for index, waits_for in self.parents.items():
            if parent.index in waits_for:
                waits_for.remove(parent.index)
                if not waits_for and self.requests[index].status == "unfinished":
                    child = self.requests[index]
                    child.arrival_s = max(child.arrival_s, now + self.think_s[index])
                    heapq.heappush(self.freed, (child.arrival_s, index))

    def release(self, now: float) -> None:
        """Closed loop: let the next requests arrive in place of those that are done."""
        while self.released < len(self.requests) and self.released - self.done < self.closed_loop:
            self.requests[self.released].arrival_s = now
            self.arrivals.append(self.requests[self.released])
            self.released += 1

    # routing

    def choose(self, side: str, request: Request) -> Worker | None:
        pool = self.front if side == "front" else self.back
        policies = self.fleet.policies
        routing = policies.routing if side == "front" else policies.decode_routing
        if draws(routing):
            fitting = [worker for worker in pool if worker.fits(request)]
            return self.draws.choose(
                routing, fitting, Worker.score, lambda worker: self.has_room_for_all(worker, request)
            )
        if routing == "deferred" and side == "front":
            free = [worker for worker in pool if worker.is_free_for_prompts() and worker.fits(request)]
            return min(free, key=Worker.score, default=None)
        if routing == "round-robin":
            for _ in pool:
                worker = pool[self.turns[side] % len(pool)]
                self.turns[side] += 1
                if worker.fits(request):
                    return worker
            return None
        return min((worker for worker in pool if worker.fits(request)), key=Worker.score, default=None)

    def has_room_for_all(self, worker: Worker, request: Request) -> bool:
        """Whether free blocks of a worker hold the request to its end, as the router knows them."""
        blocks = blocks_of(request.input + request.output)
        blocks += worker.type.extra_kv.sequence_blocks(request.input + request.output)
        return blocks <= worker.free + self.unseen_blocks(worker)

    def unseen_blocks(self, worker: Worker) -> int:
        """Blocks that are taken, of which the router does not know yet."""
        return 0

    def arrive(self, request: Request, now: float) -> None:
        worker = None if self.held else self.choose("front", request)
        if worker is not None:
            self.send(worker, request, now)
        elif self.fleet.policies.routing == "deferred" and any(one.fits(request) for one in self.front):
            self.held.append(request)
        else:
            self.reject(request)

    def send_held(self, now: float) -> None:
        """Send what waits at the router, first come first served, until there is no worker for the next.

        A step that starts at this moment comes before them, as before an arrival that an answer caused.
        """
        if self.events and self.events[0][:2] == (now, WORKER):
            if self.in_line[self.events[0][2]].step_start_s is None:
                return
        while self.held and (worker := self.choose("front", self.held[0])) is not None:
            self.send(worker, self.held.popleft(), now)

    def send(self, worker: Worker, request: Request, now: float) -> None:
        request.prefill_worker = request.decode_worker = worker.index
        worker.assigned.append(request)
        self.line_up(worker, request)
        self.wake(worker, now)

    def line_up(self, worker: Worker, request: Request) -> None:
        """In the order of the queue, of equals as they came; after all that were preempted, which go by their
        priority only if they have one.
        """
        self.rank(worker, request)
        at = len(worker.waiting)
        while at and (self.goes_by_priority() or not worker.waiting[at - 1].preemptions):
            last = worker.waiting[at - 1]
            if (last.queue_batch, last.queue_key, last.arrival_s, last.index) < (
                request.queue_batch,
                request.queue_key,
                request.arrival_s,
                request.index,
            ):
                break
            at -= 1
        worker.waiting.insert(at, request)

    def rank(self, worker: Worker, request: Request) -> None:
        """Its place: the smallest batch goes first, and in it the smallest key."""
        policies = self.fleet.policies
        if policies.queue in ("fcfs", "edf"):
            request.queue_key = request.arrival_s + (self.due_s[request.index] if policies.due else 0.0)
            return
        tokens = {"sjf": request.input, "ljf": -request.input, "srpt": request.input + request.output}
        if policies.queue_batch:
            if worker.filled_batch <= worker.served_batch:  # that batch is begun: nobody joins it
                worker.filled_batch, worker.filled = worker.served_batch + 1, 0
            elif worker.filled == policies.queue_batch:
                worker.filled_batch, worker.filled = worker.filled_batch + 1, 0
            worker.filled += 1
            request.queue_batch = worker.filled_batch
        request.queue_key = float(tokens[policies.queue])
        if not policies.queue_batch and policies.queue_window_s < math.inf:
            longest = max(other.input for other in self.requests)
            request.queue_key = request.arrival_s + policies.queue_window_s * tokens[policies.queue] / longest

    def reject(self, request: Request) -> None:
        request.status = "rejected"
        self.done += 1
        for index, waits_for in self.parents.items():
            if request.index in waits_for and self.requests[index].status == "unfinished":
                self.reject(self.requests[index])

    # one engine step

    def wake(self, worker: Worker, now: float) -> None:
        if worker.step_start_s is None and not worker.is_starting:
            worker.is_starting = True
            heapq.heappush(self.events, (now, WORKER, worker.place))

    def start_step(self, worker: Worker, now: float) -> None:
        worker.is_starting = False
        while self.form_step(worker, now) and not worker.decoding and not worker.chunks:
            worker.knows_all = True  # whoever ran was preempted: a step of nobody looks for KV, too
        if not worker.decoding and not worker.chunks and not worker.knows_all:
            worker.knows_all = True
            while self.form_step(worker, now) and not worker.decoding and not worker.chunks:
                pass
        if worker.decoding or worker.chunks:
            worker.step_start_s = now
            heapq.heappush(self.events, (now + self.step_s(worker), WORKER, worker.place))

    def step_s(self, worker: Worker) -> float:
        """Of the step that was formed, with what the engine's host takes."""
        tokens = len(worker.decoding) + sum(n for _, n in worker.chunks)
        pairs = sum(n * (request.cached + (n + 1) / 2) for request, n in worker.chunks)
        kv_tokens = sum(request.cached + 1 for request in worker.decoding)
        cached = sum(request.cached for request, _ in worker.chunks)
        decodes, prefills = len(worker.decoding), len(worker.chunks)
        of_gpus_s = float(worker.type.latency.step_s(tokens, pairs, decodes, kv_tokens, prefills, cached))
        of_gpus_s += self.more_s(worker)
        engine, sequences = worker.type.engine, len(worker.decoding) + len(worker.chunks)
        if engine is None:
            return of_gpus_s
        host_s, rest_s = (
            part.step_s + part.sequence_s * sequences + part.log2_tp_s * math.log2(worker.type.tp)
            for part in worker.type.host
        )
        if worker.chunks:
            host_s += engine.latent_launch_s * worker.type.launched_layers
        step_s = max(of_gpus_s, host_s) + rest_s if engine.async_scheduling else of_gpus_s + host_s
        return max(step_s, sequences / engine.tokens_per_s)

    def form_step(self, worker: Worker, now: float) -> bool:
        """Decide what the next step runs, as vLLM does: True if somebody found no block."""
        if self.takes_prompts_first(worker) and self.form_prompt_step(worker, now):
            return False
        budget = worker.type.max_num_batched_tokens
        longest = self.fleet.policies.long_prefill_token_threshold
        if not longest or self.present(worker) <= 1:
            longest = budget
        worker.decoding, worker.chunks = [], []
        was_short, budget = self.go_on(worker, longest, budget)
        if not was_short:
            self.admit(worker, now, longest, budget)
        return was_short

    def takes_prompts_first(self, worker: Worker) -> bool:
        engine = worker.type.engine
        return engine is not None and not engine.mixed_steps and worker.role == "mixed"

    def form_prompt_step(self, worker: Worker, now: float) -> bool:
        """As SGLang does: prompts in part, then those that wait. False, and no step, if there are none."""
        budget = worker.type.max_num_batched_tokens
        worker.decoding, worker.chunks = [], []
        for request in list(worker.running):
            if not request.is_prefilled and not self.is_leaving(request):
                n = min(request.to_prefill, budget)
                self.add(worker, request, n, blocks_of(request.cached + n) - blocks_of(request.cached))
                budget -= n
        self.admit(worker, now, budget, budget)
        assert worker.free >= 0 and not worker.decoding
        return bool(worker.chunks)

    def present(self, worker: Worker) -> int:
        return len(worker.running) + len(worker.waiting)

    def go_on(self, worker: Worker, longest: int, budget: int) -> tuple[bool, int]:
        """Whoever runs is in the step: whether somebody found no block, and the tokens that are left."""
        was_short = False
        looked_at: list[Request] = []
        while budget > 0:
            ahead = [request for request in worker.running if request not in looked_at]
            if not ahead:
                break
            request = ahead[0]
            looked_at.append(request)
            if self.is_leaving(request):
                continue
            width = self.width(worker)
            n = width if request.is_prefilled else min(request.to_prefill, longest, budget)
            while (missing := self.missing(worker, request, n)) > worker.free:
                was_short = True
                in_step = dict.fromkeys(worker.decoding, width) | dict(worker.chunks)
                victim = self.preempt(worker)
                if victim is request:
                    return was_short, budget
                if victim in in_step:
                    budget += in_step[victim]
                    worker.decoding = [decode for decode in worker.decoding if decode is not victim]
                    worker.chunks = [chunk for chunk in worker.chunks if chunk[0] is not victim]
            budget -= n
            self.add(worker, request, n, missing)
        return was_short, budget

    def width(self, worker: Worker) -> int:
        """Tokens of a decode in a step."""
        return 1

    def missing(self, worker: Worker, request: Request, n: int) -> int:
        """Blocks that the next n tokens of a request take."""
        return blocks_of(request.cached + n) - blocks_of(request.cached)

    def blocks_to_begin(self, worker: Worker, request: Request) -> int:
        """Blocks that the first step of a request takes, whose KV has come."""
        return blocks_of(request.cached + 1) - request.blocks

    def goes_by_priority(self) -> bool:
        """Whether requests bring a number to the engine: in the orders that are deployed so."""
        policies = self.fleet.policies
        is_known = policies.queue in ("sjf", "ljf", "srpt") and not policies.queue_batch
        return is_known or policies.queue in ("edf", "dlpm-turns")

    def priority(self, request: Request) -> tuple[float, ...]:
        """The smallest goes first."""
        return request.queue_key, request.arrival_s, request.index

    def victim(self, worker: Worker) -> Request:
        """Whom to preempt: the last by priority, or the one admitted last."""
        able = [request for request in worker.running if not self.is_kept(worker, request)]
        return max(able, key=self.priority) if self.goes_by_priority() else able[-1]

    def is_kept(self, worker: Worker, request: Request) -> bool:
        """Whether nobody preempts it."""
        return False

    def admit(self, worker: Worker, now: float, longest: int, budget: int) -> None:
        """Whoever waits is, while there is room."""
        while budget > 0 and len(worker.running) < worker.type.max_num_seqs:
            ready = self.next_ready(worker)
            if ready is not None and budget >= self.width(worker):
                missing = self.blocks_to_begin(worker, ready)
                if missing > worker.free and worker.running:
                    break
                worker.ready.remove(ready)
                worker.running.append(ready)
                if missing > worker.free:
                    self.preempt(worker)
                    continue
                self.add(worker, ready, self.width(worker), missing)
                budget -= self.width(worker)
                continue
            if (first := self.next_waiting(worker) if worker.waiting else None) is None:
                if self.pulls_kv(worker):
                    self.pull(worker, now)
                break
            request = first
            if self.missing_blocks(worker, request) + worker.beside(request) > worker.free:
                break
            worker.waiting.remove(request)
            if not request.preemptions:
                worker.served_batch = request.queue_batch
            worker.free -= worker.beside(request)
            request.beside = worker.beside(request)
            self.take(worker, request)
            budget -= self.seat(worker, request, now, longest, budget)

    def seat(self, worker: Worker, request: Request, now: float, longest: int, budget: int) -> int:
        """The request begins, or goes on, with its prompt: the tokens of it in this step."""
        if math.isnan(request.scheduled_s):
            request.scheduled_s = now
        worker.running.append(request)
        n = min(request.to_prefill, longest, budget)
        self.add(worker, request, n, blocks_of(request.cached + n) - blocks_of(request.cached))
        return n

    def has_kv(self, worker: Worker, request: Request) -> bool:
        """Whether the worker knows of this request's KV."""
        return worker.knows_all or request.known_step <= worker.steps + 1

    def is_leaving(self, request: Request) -> bool:
        """Whether its last token comes with the step under way."""
        return False

    def add(self, worker: Worker, request: Request, n: int, blocks: int) -> None:
        """The next step runs n tokens of a request, which takes so many blocks more."""
        worker.free -= blocks
        request.blocks += blocks
        if request.is_prefilled:
            worker.decoding.append(request)
        else:
            worker.chunks.append((request, n))

    def more_s(self, worker: Worker) -> float:
        """Seconds of the GPUs beside the LLM's own."""
        return 0.0

    def next_ready(self, worker: Worker) -> Request | None:
        """Whose KV has come and is known of."""
        return next((request for request in worker.ready if self.has_kv(worker, request)), None)

    def next_waiting(self, worker: Worker) -> Request | None:
        return worker.waiting[0]

    def missing_blocks(self, worker: Worker, request: Request) -> int:
        return blocks_of(request.to_prefill)

    def take(self, worker: Worker, request: Request) -> None:
        """The request is admitted."""

    def give_back(self, worker: Worker, request: Request) -> None:
        worker.free += request.blocks + request.beside
        request.blocks = request.beside = 0

    def computed(self, worker: Worker, request: Request) -> None:
        """A chunk of the request is."""

    def note_unseen(self, worker: Worker, request: Request, n: int) -> None:
        """Routing pending-tokens sees no chunks, only the first token."""
        if self.fleet.policies.routing == "pending-tokens" and worker.index == request.prefill_worker:
            request.unseen += n

    def preempt(self, worker: Worker) -> Request:
        """Drop a request, which waits before all others, or by its priority. What it had of a prompt in the
        step that is formed is in its blocks, computed or not; a block for its next token is free again.
        """
        request = self.victim(worker)
        worker.running.remove(request)
        request.cached += sum(n for chunk, n in worker.chunks if chunk is request)
        if any(decode is request for decode in worker.decoding):
            new = blocks_of(request.cached + 1) - blocks_of(request.cached)
            request.blocks -= new
            worker.free += new
            self.out_of_step = request
        self.give_back(worker, request)
        self.out_of_step = None
        request.cached = request.unseen = 0
        request.is_prefilled = False
        request.preemptions += 1
        self.line_up_again(worker, request)
        return request

    def line_up_again(self, worker: Worker, request: Request) -> None:
        if self.goes_by_priority():
            self.line_up(worker, request)
        else:
            worker.waiting.appendleft(request)

    def end_step(self, worker: Worker, now: float) -> None:
        assert worker.step_start_s is not None
        step_s = now - worker.step_start_s
        worker.step_start_s = None
        worker.knows_all = worker.type.engine is None  # an idle one looks all the time
        worker.busy_s += step_s
        worker.steps += 1
        worker.tokens += len(worker.decoding) + sum(n for _, n in worker.chunks)
        for request in worker.decoding:
            request.cached += 1
            self.emit(worker, request, now)
        for request, n in worker.chunks:
            request.cached += n
            self.note_unseen(worker, request, n)
            self.computed(worker, request)
            if request.cached == request.input + request.generated:
                request.is_prefilled = True
                request.last_step_s = step_s
                self.emit_of_prompt(worker, request, now)
                if worker.role == "prefill" and request.status == "unfinished":
                    self.hand_off(worker, request, now)
        self.receive(worker, now)
        self.wake(worker, now)

    def emit_of_prompt(self, worker: Worker, request: Request, now: float) -> None:
        """The token that a prompt's last chunk makes; nobody sees the first one of some prefill workers."""
        if self.is_seen(worker, request):
            self.emit(worker, request, now)
        else:
            request.last_token_s, request.unseen = now, 0

    def is_seen(self, worker: Worker, request: Request) -> bool:
        """Whether anybody sees the next token of a request, which this worker makes."""
        engine = worker.type.engine
        is_first_seen = worker.role != "prefill" or engine is None or engine.first_token == "prefill"
        return is_first_seen or request.generated > 0

    def emit(self, worker: Worker, request: Request, now: float) -> None:
        """A token of the request leaves, perhaps its last."""
        if request.generated:
            request.gaps.append((now, now - request.last_token_s))
        else:
            request.first_token_s = now
        request.last_token_s = now
        request.generated += 1
        request.unseen = 0
        if request.generated == request.output:
            request.finish_s, request.status = now, "finished"
            if request in worker.running:
                self.give_back(worker, request)
                worker.running.remove(request)
            else:  # preempted with its last token under way
                worker.waiting.remove(request)
            worker.assigned.remove(request)
            self.done += 1
            self.free_children(request, now)

    # prefill -> decode

    def hand_off(self, worker: Worker, request: Request, now: float) -> None:
        worker.running.remove(request)
        worker.assigned.remove(request)
        target = self.choose("back", request)
        if target is None:
            self.leave_prefill_worker(worker, request)
            self.reject(request)
            return
        request.decode_worker = target.index
        target.assigned.append(request)
        self.line_up_for_kv(target.inbound, request)
        self.receive(target, now)

    def line_up_for_kv(self, queue: deque[Request], request: Request) -> None:
        """Whoever waits for KV, or with it for a seat, does so as it came, or by priority."""
        at = len(queue)
        while at and self.goes_by_priority() and self.priority(queue[at - 1]) > self.priority(request):
            at -= 1
        queue.insert(at, request)

    def pulls_kv(self, worker: Worker) -> bool:
        """vLLM looks at a hand-off as at any request that waits: when it forms a step, if a seat is free."""
        return worker.type.engine is not None and worker.type.engine.name != "sglang"

    def receive(self, worker: Worker, now: float) -> None:
        """Who has come is looked at when a request is handed off and when a step of the decode worker ends,
        or with its next step.
        """
        if not self.pulls_kv(worker):
            self.pull(worker, now)
        elif worker.inbound:
            self.wake(worker, now)

    def pull(self, worker: Worker, now: float) -> None:
        """Reserve blocks for hand-offs, first come first served, and put their transfers on the link."""
        while (request := self.next_inbound(worker)) is not None:
            blocks = self.moved_blocks(request) + worker.beside(request)
            if not self.has_room(worker, blocks):
                break
            worker.inbound.remove(request)
            worker.free -= blocks
            heapq.heappush(self.events, (self.transfer_end_s(request, now), LINK, self.transfers))
            self.transfers += 1
            self.link.append(request)

    def next_inbound(self, worker: Worker) -> Request | None:
        """Who receives its KV next."""
        return worker.inbound[0] if worker.inbound else None

    def moved_blocks(self, request: Request) -> int:
        """KV blocks that are handed over with a request: as many as its tokens take on its prefill worker."""
        return request.blocks

    def leave_prefill_worker(self, worker: Worker, request: Request) -> None:
        """Its blocks there are free; from now on it holds those on its decode worker, as many."""
        worker.free += request.blocks + request.beside

    def has_room(self, worker: Worker, blocks: int) -> bool:
        """Whether a hand-off may take so many."""
        return blocks + self.promised(worker) <= worker.free

    def promised(self, worker: Worker) -> int:
        """KV blocks that prompts in part still need."""
        return sum(
            blocks_of(request.input + request.generated) - request.blocks
            for request in worker.running
            if not request.is_prefilled
        )

    def transfer_end_s(self, request: Request, now: float) -> float:
        """One transfer after the other. Layerwise: all layers but one may cross during the last prefill
        step."""
        network, llm = self.fleet.network, self.fleet.llm
        seconds = self.moved_blocks(request) * (
            BLOCK * llm.kv_bytes_per_token / network.bandwidth_bytes_per_s
        )
        early_s = after_s = 0.0
        if network.transfer == "layerwise":
            after_s = seconds / llm.layers
            if now == request.last_token_s:  # else the decode worker had no room at the time
                early_s = min(request.last_step_s, seconds - after_s)
        start = max(now - early_s, self.link_free_s)
        self.link_free_s = start + seconds
        end = max(self.link_free_s, now + after_s) + network.latency_s
        self.link_last_s = max(self.link_last_s, end)
        return self.link_last_s

    def end_transfer(self, now: float) -> None:
        request = self.link.popleft()
        source, target = self.workers[request.prefill_worker], self.workers[request.decode_worker]
        self.leave_prefill_worker(source, request)
        request.beside = target.beside(request)
        self.line_up_for_kv(target.ready, request)
        request.cached -= not request.generated  # The prompt's last token is computed again.
        request.known_step = 0
        if target.step_start_s is not None:
            request.known_step = target.steps + 2 + self.kv_delay_steps
        self.wake(target, now)
        self.wake(source, now)

    # what is measured

    def gaps(self) -> list[float]:
        """Every gap that ended inside the window, sorted."""
        start, end = self.window_s
        return sorted(
            gap_s for request in self.requests for end_s, gap_s in request.gaps if start <= end_s <= end
        )

    def values(self, metric: str) -> list[float]:
        if metric == "tbt":
            return self.gaps()
        start, end = self.window_s
        inside = [request for request in self.requests if start <= request.arrival_s <= end]
        if metric == "tpot":
            inside = [request for request in inside if request.output > 1]
        values = [float(getattr(request, f"{metric}_s")) for request in inside]
        return [math.inf if math.isnan(value) else value for value in values]

    def violations(self, limits: Sequence[Limit]) -> list[int]:
        return [sum(value > limit.limit_s for value in self.values(limit.metric)) for limit in limits]

    def keeps(self, limit: Limit) -> bool:
        values = self.values(limit.metric)
        return self.violations([limit])[0] <= allowed_above(limit.percentile_frac, len(values))
