"""The plain simulator of prefix caches on engines that schedule asynchronously.

Routers learn as a step begins what it hits, evicts and takes, and whose turn it is, not when it was prepared.
Tenants are charged for a token as its step begins: whoever prepares the next step takes it for done. What
comes while a step runs is lined up when the next one is prepared.

A preempted request leaves no block behind that is full only with the token of the step under way, as that
token is not known (vLLM: AsyncScheduler caches blocks of known tokens, and skips who was preempted).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from async_reference import AsyncReference, Formed
from prefix_reference import Copy, Node, PrefixReference
from simulator_reference import Request, Worker

from planner.fleet import Fleet
from planner.traffic.trace import Trace


class AsyncPrefixReference(AsyncReference, PrefixReference):
    def __init__(self, fleet: Fleet, trace: Trace, *, closed_loop: int = 0) -> None:
        super().__init__(fleet, trace, closed_loop=closed_loop)
        self.preparing = -1  # the worker whose next step is being prepared
        self.untold: dict[int, list[Callable[[], None]]] = defaultdict(list)  # by worker, until a step begins
        self.came: dict[int, list[Request]] = defaultdict(list)  # by worker, not lined up yet
        self.seen: dict[int, tuple[int, list[tuple[Node, int]]]] = {}  # by worker, as its step began
        self.more_users: dict[int, Counter[Copy]] = defaultdict(Counter)  # by worker, in the step prepared
        self.filled: dict[int, set[Node]] = {}  # nodes of a request, once the step under way has ended

    def start_step(self, worker: Worker, now: float) -> None:
        self.now = now
        super().start_step(worker, now)

    def note_present(self, worker: Worker) -> None:
        super().note_present(worker)
        self.seen[worker.index] = super().memory(worker)

    def memory(self, worker: Worker) -> tuple[int, list[tuple[Node, int]]]:
        is_idle = worker.step_start_s is None
        return super().memory(worker) if is_idle else self.seen[worker.index]

    def end_step(self, worker: Worker, now: float) -> None:
        self.now = now
        self.check(worker)
        super().end_step(worker, now)

    def next_step(self, worker: Worker, now: float) -> Formed | None:
        for effect in self.untold.pop(worker.index, []):
            effect()
        self.more_users[worker.index].clear()
        return super().next_step(worker, now)

    def launch(self, worker: Worker, step: Formed, now: float) -> None:
        super().launch(worker, step, now)
        self.prepared_blocks[worker.index] -= self.unseen_copies(worker)

    def unseen_blocks(self, worker: Worker) -> int:
        return super().unseen_blocks(worker) + self.unseen_copies(worker)

    def unseen_copies(self, worker: Worker) -> int:
        """Blocks of copies that have users, less those that have some without the step that is prepared.
        Whoever else used them may have left since.
        """
        changed = self.more_users[worker.index].items()
        return sum(copy.blocks * ((copy.users > 0) - (copy.users > more)) for copy, more in changed)

    def add(self, worker: Worker, request: Request, n: int, blocks: int) -> None:
        before = len(self.shared[request.index])
        super().add(worker, request, n, blocks)
        if self.is_preparing:
            self.more_users[worker.index].update(self.shared[request.index][before:])

    def give_back(self, worker: Worker, request: Request) -> None:
        if self.is_preparing:
            self.more_users[worker.index].subtract(self.shared[request.index])
        super().give_back(worker, request)

    def formed(self, worker: Worker, now: float, *, is_prepared: bool) -> Formed | None:
        came = self.came.pop(worker.index, [])
        for i, request in enumerate(came):
            self.rejoin(worker, request, came[i + 1 :])
        self.preparing = worker.index if is_prepared else -1
        step = super().formed(worker, now, is_prepared=is_prepared)
        self.preparing = -1
        return step

    def tell_router(self, effect: Callable[[], None]) -> None:
        if self.preparing >= 0:
            self.untold[self.preparing].append(effect)
        else:
            effect()

    def join(self, worker: Worker, request: Request) -> None:
        self.came[worker.index].append(request)

    def take(self, worker: Worker, request: Request) -> None:
        if self.is_preparing:
            request.shown = request.to_prefill
            self.hidden[worker.index].append(request)
        super().take(worker, request)
        if self.is_preparing:
            self.more_users[worker.index].update(self.shared[request.index])

    def advance(self, worker: Worker, request: Request, n: int) -> bool:
        is_first = super().advance(worker, request, n)
        self.filled[request.index] = {copy.node for copy in self.shared[request.index]}
        if request.is_prefilled and self.is_seen(worker, request):
            self.charge(worker, request, self.policies.output_weight)
        return is_first

    def charge_token(self, worker: Worker, request: Request) -> None:
        """It was charged as its step began."""

    def computed(self, worker: Worker, request: Request) -> None:
        self.caches[worker.index].known |= self.filled[request.index]
        self.caches[worker.index].heard |= self.filled[request.index]

    def found_again(self, worker: Worker, request: Request) -> int:
        if request is self.out_of_step:  # With the next token, where it is known.
            return request.cached + (not self.is_preparing)
        is_under_way = self.is_preparing and request in self.running[worker.index].decoding
        return request.cached - is_under_way
