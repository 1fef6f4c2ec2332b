"""The plain simulators of prefix caches with the queue dlpm-held: prompts wait at the router, which sends one
to a worker while that has fewer than two without a first token, or fewer of their tokens than two steps take.
"""

from __future__ import annotations

from async_prefix_reference import AsyncPrefixReference
from prefix_reference import PrefixReference
from simulator_reference import WORKER, Request, Worker

from planner.fleet import Fleet
from planner.traffic.trace import Trace


class HeldReference(PrefixReference):
    def __init__(self, fleet: Fleet, trace: Trace, *, closed_loop: int = 0) -> None:
        super().__init__(fleet, trace, closed_loop=closed_loop)
        self.at_router: list[list[Request]] = [[] for _ in self.workers]
        self.under_way: list[dict[int, int]] = [{} for _ in self.workers]  # tokens of those that were sent

    def send(self, worker: Worker, request: Request, now: float) -> None:
        """To the list of its worker at the router. Tenants that come back keep their debt, but no credit."""
        w, u, ids = worker.index, self.tenant[request.index], self.ids[request.index]
        request.prefill_worker = request.decode_worker = w
        worker.assigned.append(request)
        request.expected = self.believed(worker, request)
        self.caches[w].known |= {ids[: k + 1] for k in range(len(ids))}
        if all(self.tenant[other.index] != u for other in self.at_router[w]):
            self.credit[w][u] = min(self.credit[w][u], 0.0)
        self.at_router[w].append(request)

    def send_held(self, now: float) -> None:
        super().send_held(now)
        if self.events and self.events[0][:2] == (now, WORKER):
            if self.in_line[self.events[0][2]].step_start_s is None:
                return
        for worker in self.workers:
            while self.at_router[worker.index] and not self.has_enough(worker):
                request = self.next_held(worker)
                self.at_router[worker.index].remove(request)
                self.line_up(worker, request)
                self.join(worker, request)
                self.wake(worker, now)

    def has_enough(self, worker: Worker) -> bool:
        sent = self.under_way[worker.index].values()
        return len(sent) >= 2 and sum(sent) >= 2 * worker.type.max_num_batched_tokens

    def next_held(self, worker: Worker) -> Request:
        w, waiting = worker.index, self.at_router[worker.index]
        tenants = {self.tenant[request.index] for request in waiting}
        while all(self.credit[w][u] <= 0 for u in tenants):
            for u in tenants:
                self.credit[w][u] += self.policies.quantum_tokens * self.weights[u]
        able = [request for request in waiting if self.credit[w][self.tenant[request.index]] > 0]
        chosen = max(able, key=lambda request: self.cached_nodes(worker, request))
        missed = chosen.input - self.cached_nodes(worker, chosen) * self.block
        self.credit[w][self.tenant[chosen.index]] -= self.policies.extend_weight * missed
        self.under_way[w][chosen.index] = max(missed, 1)
        return chosen

    def cached_nodes(self, worker: Worker, request: Request) -> int:
        self.evict(worker)
        return len(self.matched(worker, request))

    def rejoin(self, worker: Worker, request: Request, later: object = ()) -> None:
        """Engines count no tenants."""

    def charge(self, worker: Worker, request: Request, service: float) -> None:
        """The router charges."""

    def next_waiting(self, worker: Worker) -> Request | None:
        self.evict(worker)
        return worker.waiting[0]

    def emit_of_prompt(self, worker: Worker, request: Request, now: float) -> None:
        self.under_way[worker.index].pop(request.index, None)
        super().emit_of_prompt(worker, request, now)

    def emit(self, worker: Worker, request: Request, now: float) -> None:
        super().emit(worker, request, now)
        if request.status == "finished":
            service = self.policies.output_weight * request.output
            self.credit[request.prefill_worker][self.tenant[request.index]] -= service


class AsyncHeldReference(HeldReference, AsyncPrefixReference):
    """Routers know what is cached as the step under way began."""

    def __init__(self, fleet: Fleet, trace: Trace, *, closed_loop: int = 0) -> None:
        super().__init__(fleet, trace, closed_loop=closed_loop)
        self.cached: dict[int, list[int]] = {}

    def note_present(self, worker: Worker) -> None:
        super().note_present(worker)
        self.cached[worker.index] = [len(self.matched(worker, request)) for request in self.requests]

    def cached_nodes(self, worker: Worker, request: Request) -> int:
        if worker.step_start_s is None:
            return super().cached_nodes(worker, request)
        return self.cached[worker.index][request.index]
