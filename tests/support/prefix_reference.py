"""Prefix caches, and what looks at them, once more and plainly: what the tests hold the compiled kernel to.

A node is the tuple of block ids up to it. Whatever can be looked up is counted anew each time.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby, takewhile

from simulator_reference import BLOCK, Reference, Request, Worker, blocks_of

from planner.fleet import Fleet
from planner.policies import ROUTING
from planner.simulator.cache_layout import output_token_s, prefill_token_s
from planner.traffic.trace import Trace

Node = tuple[int, ...]
PLAIN_QUEUES = ("fcfs", "sjf", "ljf", "srpt", "edf")  # that look at neither caches nor tenants
TELLS = ("prefix-affinity", "cache-aware", "e2", "e2-dynamic", "d2lpm")  # take for cached what they have sent


@dataclass(eq=False)
class Copy:
    """KV blocks that stay together: of a node, or, without one, all the other full ones of a request."""

    blocks: int
    node: Node = ()
    users: int = 0


class Cache:
    """Of one worker: the copies of every node, the oldest of which is found, and all copies without users,
    longest unused first. `known` is what a router that TELLS believes, `heard` what others have heard.
    """

    def __init__(self) -> None:
        self.copies: dict[Node, list[Copy]] = {}
        self.idle: list[Copy] = []
        self.there: set[Node] = set()  # has a copy, as far as whoever asks now can know
        self.known: set[Node] = set()
        self.heard: set[Node] = set()


@dataclass
class Routed:
    """A request in e2's window."""

    time_s: float
    worker: int
    request: int
    prefill_s: float
    output: int | None = None  # once it has finished
    prefix: Node | None = None
    wait_s: float | None = None


class PrefixReference(Reference):
    """Batches of vllm-v1. Workers that decode alone have no nodes: all full blocks of a request there are of
    no node, so that it finds them again after a preemption, and nobody else does. Without caches there are no
    nodes and nothing is found again: what is left are the counters of tenants.
    """

    def __init__(self, fleet: Fleet, trace: Trace, *, closed_loop: int = 0) -> None:
        super().__init__(fleet, trace, closed_loop=closed_loop)
        self.policies = fleet.policies
        self.block = trace.prefix_block_tokens if self.policies.prefix_cache else BLOCK
        self.blocks = self.block // BLOCK
        # Without caches no prompt has a node.
        offsets = trace.prefix_offsets if self.policies.prefix_cache else [0] * (len(trace) + 1)
        self.ids = [
            tuple(trace.prefix_ids[start:end].tolist())[: tokens // self.block]
            for start, end, tokens in zip(offsets, offsets[1:], trace.input_tokens.tolist(), strict=False)
        ]
        self.tenant = trace.tenant.tolist()
        tenants = range(max(len(trace.tenants), 1))
        weights = dict(self.policies.tenant_weights)
        self.weights = [weights.get(name, 1.0) for name in trace.tenants or ("",)]
        self.caches = [Cache() for _ in self.workers]
        self.shared: list[list[Copy]] = [[] for _ in self.requests]
        self.copied = [0 for _ in self.requests]  # blocks of `shared` of which it has copies of its own
        self.left: list[Copy | None] = [None for _ in self.requests]  # of preempted requests
        self.first_hit = [-1 for _ in self.requests]
        self.was_preempted: set[int] = set()
        self.served = [[0.0 for _ in tenants] for _ in self.workers]
        self.credit = [[0.0 for _ in tenants] for _ in self.workers]
        self.last_tenant: list[int | None] = [None for _ in self.workers]
        self.slots = [[0] * self.policies.priority_groups for _ in self.workers]
        self.deficit = [[0.0 for _ in self.workers] for _ in tenants]
        self.window: list[Routed] = []
        self.replicated_s: dict[Node, float] = {}
        self.home: dict[Node, int] = {}
        self.place: dict[int, tuple[float, int]] = {}  # turn and tokens that are not known to be cached
        self.turn_of = [0.0 for _ in self.workers]  # the latest of which a prompt was admitted
        self.sent = [[0.0 for _ in tenants] for _ in self.workers]
        self.turn = [0 for _ in tenants]
        self.is_told = self.policies.routing in TELLS
        self.context = float((trace.input_tokens + trace.output_tokens / 2).mean())
        self.events_of_service: list[tuple[float, int, float]] = []  # time, tenant, service
        self.now = 0.0
        self.notices: list[tuple[float, Cache, Node]] = []  # of evictions, under way to the router
        self.pinned: list[set[Node]] = [set() for _ in self.workers]
        present = {ids[: k + 1] for ids in self.ids for k in range(len(ids))}
        for pin in fleet.pinned:
            for w, k in itertools.product(pin.workers, range(len(pin.block_ids))):
                node = pin.block_ids[: k + 1]
                if node in present and node not in self.pinned[w]:
                    self.pinned[w].add(node)
                    self.caches[w].copies[node] = [Copy(self.blocks, node, users=1)]
                    self.caches[w].heard.add(node)
                    self.caches[w].there.add(node)
                    self.workers[w].free -= self.blocks

    # caches

    def nodes(self, request: Request) -> list[Node]:
        """That a cache may spare it: all but the last token."""
        ids = self.ids[request.index]
        most = min(len(ids), (request.input + request.generated - 1) // self.block)
        return [ids[: k + 1] for k in range(most)]

    def matched(self, worker: Worker, request: Request) -> list[Node]:
        copies = self.caches[worker.index].copies
        return [node for node in self.nodes(request) if node in copies]

    def path(self, worker: Worker, request: Request) -> Node:
        """The deepest node that the worker may keep of a request."""
        return () if worker.role == "decode" else self.ids[request.index]

    def hit(self, worker: Worker, request: Request) -> tuple[list[Copy], int]:
        """What a request may use, and how many of its tokens that spares: never the last block of 16, nor,
        with drafts that need the hidden states before it, the last one that is there.
        """
        copies, ids = self.caches[worker.index].copies, self.ids[request.index]
        used = [copies[node][0] for node in self.matched(worker, request)]
        tokens, length = len(used) * self.block, request.input + request.generated
        if tokens + self.block == length == len(ids) * self.block and self.blocks > 1 and ids in copies:
            used, tokens = [*used, copies[ids][0]], length - BLOCK
        if tokens and not self.found_behind(worker, request):
            tokens -= self.dropped_blocks(worker) * BLOCK
        return used[: -(-tokens // self.block)], tokens

    def dropped_blocks(self, worker: Worker) -> int:
        """Blocks that are there and computed once more."""
        return 0

    def found_behind(self, worker: Worker, request: Request) -> int:
        """Blocks that a preempted request has left and finds, behind all of its nodes."""
        left, nodes = self.left[request.index], self.matched(worker, request)
        if left not in self.caches[worker.index].idle or len(nodes) < len(self.path(worker, request)):
            return 0
        assert left is not None
        rest = request.input + request.generated - 1 - len(nodes) * self.block
        return max(min(left.blocks, rest // BLOCK), 0)

    def believed(self, worker: Worker, request: Request) -> int:
        """Tokens that the router takes for cached."""
        cache = self.caches[worker.index]
        known = cache.known if self.is_told else cache.heard
        return len(list(takewhile(lambda node: node in known, self.nodes(request)))) * self.block

    def missing_blocks(self, worker: Worker, request: Request) -> int:
        used, tokens = self.hit(worker, request)
        mine = len(used) * self.blocks - tokens // BLOCK  # of the last node
        in_use = sum(copy.users > 0 for copy in used) * self.blocks - (mine if used and used[-1].users else 0)
        return blocks_of(request.input + request.generated) - in_use

    def take(self, worker: Worker, request: Request) -> None:
        cache, i = self.caches[worker.index], request.index
        matched = self.matched(worker, request)
        behind = self.found_behind(worker, request)
        self.shared[i], request.cached = self.hit(worker, request)
        again = len(self.shared[i]) * self.blocks - request.cached // BLOCK  # blocks of the last one
        self.copied[i] = again if again and self.shared[i][-1].users else 0
        request.blocks -= again - self.copied[i]
        worker.free += again - self.copied[i]
        for copy in self.shared[i]:
            if not copy.users:
                cache.idle.remove(copy)
                worker.free -= copy.blocks
            copy.users += 1
        left = self.left[i]
        is_whole = len(self.shared[i]) == len(self.path(worker, request)) == len(matched) and not again
        if left in cache.idle and is_whole:
            assert left is not None
            cache.idle.remove(left)
            blocks = behind - (behind > 0) * self.dropped_blocks(worker)
            request.blocks = blocks
            worker.free -= blocks
            request.cached += blocks * BLOCK
        self.left[i] = None
        self.tell_router(partial(self.see_admitted, worker, request, is_first=self.first_hit[i] < 0))
        if self.first_hit[i] < 0:
            self.first_hit[i] = request.cached
        self.evict(worker)
        self.last_tenant[worker.index] = self.tenant[i]
        if self.policies.queue == "preble" and i not in self.was_preempted:
            self.slots[worker.index][self.group(worker, request, len(matched))] -= 1
        self.was_preempted.discard(i)
        self.charge(worker, request, self.policies.extend_weight * request.to_prefill)

    def see_admitted(self, worker: Worker, request: Request, *, is_first: bool) -> None:
        """The router sees what the request hits, its turn, and how long it has waited."""
        i = request.index
        request.expected = 0
        if i in self.place:
            self.turn_of[worker.index] = max(self.turn_of[worker.index], self.place[i][0])
        for row in self.window:
            if is_first and row.request == i:
                row.wait_s = self.now - request.arrival_s

    def tell_router(self, effect: Callable[[], None]) -> None:
        """The router learns of it now."""
        effect()

    def add(self, worker: Worker, request: Request, n: int, blocks: int) -> None:
        """Full blocks are found from now on, by who is admitted into the same step too."""
        super().add(worker, request, n, blocks)
        self.evict(worker)
        cache, shared = self.caches[worker.index], self.shared[request.index]
        ids = self.path(worker, request)
        for k in range(len(shared), min(len(ids), (request.cached + n) // self.block)):
            copy = Copy(self.blocks, ids[: k + 1], users=1)
            request.blocks -= self.blocks
            cache.copies.setdefault(copy.node, []).append(copy)
            self.tell_router(partial(self.see_cached, cache, copy.node))
            shared.append(copy)

    def computed(self, worker: Worker, request: Request) -> None:
        nodes = {copy.node for copy in self.shared[request.index]}
        self.caches[worker.index].known |= nodes
        self.caches[worker.index].heard |= nodes

    def give_back(self, worker: Worker, request: Request) -> None:
        self.evict(worker)
        cache, i = self.caches[worker.index], request.index
        full = self.found_again(worker, request) // BLOCK if self.policies.prefix_cache else 0
        own = min(request.blocks - blocks_of(request.cached) + full, full)
        if own > 0:
            left = self.left[i] = Copy(own)
            cache.idle.append(left)
        super().give_back(worker, request)
        for copy in reversed(self.shared[i]):
            copy.users -= 1
            if not copy.users:
                worker.free += self.blocks
                cache.idle.append(copy)
        self.shared[i], self.copied[i] = [], 0

    def moved_blocks(self, request: Request) -> int:
        return blocks_of(request.cached)

    def leave_prefill_worker(self, worker: Worker, request: Request) -> None:
        blocks = self.moved_blocks(request)
        self.give_back(worker, request)
        request.blocks = blocks

    def found_again(self, worker: Worker, request: Request) -> int:
        """Tokens whose full blocks stay in the cache when the request leaves: the next one too, if it was in
        the step that is formed.
        """
        return request.cached + (request is self.out_of_step)

    def evict(self, worker: Worker) -> None:
        cache = self.caches[worker.index]
        while (excess := sum(copy.blocks for copy in cache.idle) - worker.free) > 0:
            oldest = cache.idle[0]
            if not oldest.node and oldest.blocks > excess:
                oldest.blocks -= excess
                return
            cache.idle.remove(oldest)
            if oldest.node:
                cache.copies[oldest.node].remove(oldest)
                if not cache.copies[oldest.node]:
                    del cache.copies[oldest.node]
                    self.tell_router(partial(self.see_evicted, cache, oldest.node))

    def see_cached(self, cache: Cache, node: Node) -> None:
        self.read_notices()
        cache.there.add(node)

    def see_evicted(self, cache: Cache, node: Node) -> None:
        self.read_notices()
        cache.there.discard(node)
        if self.policies.eviction_notice_s:
            self.notices.append((self.now + self.policies.eviction_notice_s, cache, node))
        else:
            self.forget(cache, node)

    def read_notices(self) -> None:
        """The router hears of a node that was evicted some time ago, unless it is there again as it hears.
        So it reads before any node comes or goes.
        """
        come = [notice for notice in self.notices if notice[0] <= self.now]
        self.notices = [notice for notice in self.notices if notice[0] > self.now]
        for _, cache, node in come:
            if node not in cache.there:
                self.forget(cache, node)

    def forget(self, cache: Cache, node: Node) -> None:
        cache.heard.discard(node)
        if self.policies.routing != "cache-aware":
            cache.known.discard(node)

    def check(self, worker: Worker) -> None:
        """Every block is counted once, parents are there before their children."""
        cache = self.caches[worker.index]
        copies = [copy for node in cache.copies.values() for copy in node]
        in_use = sum(copy.users > 0 for copy in copies) * self.blocks
        private = sum(request.blocks + request.beside for request in [*worker.running, *worker.ready])
        handed_over = [*self.link, *(request for target in self.back for request in target.inbound)]
        for request in handed_over:
            if request.prefill_worker == worker.index:
                private += request.blocks + request.beside
        for request in self.link:
            if request.decode_worker == worker.index:
                private += self.moved_blocks(request) + worker.beside(request)
        assert worker.free + in_use + private == worker.type.kv_tokens // BLOCK
        assert all(node[:-1] in cache.copies for node in cache.copies if len(node) > 1)

    # who is next

    def happen(self, kind: int, index: int, now: float) -> None:
        self.now = now
        super().happen(kind, index, now)

    def arrive(self, request: Request, now: float) -> None:
        self.now = now
        super().arrive(request, now)

    def send(self, worker: Worker, request: Request, now: float) -> None:
        request.expected = self.believed(worker, request)
        super().send(worker, request, now)
        ids = self.ids[request.index]
        self.caches[worker.index].known |= {ids[: k + 1] for k in range(len(ids))}
        self.join(worker, request)
        if self.policies.queue == "dlpm-turns":
            self.give_number(worker, request)

    def give_number(self, worker: Worker, request: Request) -> None:
        w, u, expected = worker.index, self.tenant[request.index], request.expected
        quantum = self.policies.quantum_tokens * self.weights[u]
        before = max(self.sent[w][u], self.turn_of[w] * quantum)
        self.place[request.index] = before // quantum, -expected
        self.sent[w][u] = before + self.policies.extend_weight * (request.input - expected)

    def line_up(self, worker: Worker, request: Request) -> None:
        if self.policies.queue in PLAIN_QUEUES:
            super().line_up(worker, request)
        else:  # as they came
            worker.waiting.append(request)

    def priority(self, request: Request) -> tuple[float, ...]:
        if self.policies.queue != "dlpm-turns":
            return super().priority(request)
        return *self.place[request.index], request.arrival_s, request.index

    def preempt(self, worker: Worker) -> Request:
        request = super().preempt(worker)
        self.was_preempted.add(request.index)
        self.rejoin(worker, request)
        return request

    def join(self, worker: Worker, request: Request) -> None:
        """The engine learns of a request that was sent."""
        self.rejoin(worker, request)

    def rejoin(self, worker: Worker, request: Request, later: Sequence[Request] = ()) -> None:
        """The request waits from now on, before those that came `later`."""
        w, u = worker.index, self.tenant[request.index]
        ahead = (other for other in worker.waiting if other is not request and other not in later)
        others = {self.tenant[other.index] for other in ahead}
        if u in others:
            return
        self.credit[w][u] = min(self.credit[w][u], 0.0)
        last = self.last_tenant[w]
        least = min((self.served[w][v] for v in others), default=None)
        if least is None and last is not None:
            least = self.served[w][last]
        if least is not None:
            self.served[w][u] = max(self.served[w][u], least)

    def charge(self, worker: Worker, request: Request, service: float) -> None:
        u = self.tenant[request.index]
        self.served[worker.index][u] += service / self.weights[u]
        self.credit[worker.index][u] -= service
        self.events_of_service.append((self.now, u, service))

    def start_step(self, worker: Worker, now: float) -> None:
        self.now = now
        super().start_step(worker, now)

    def end_step(self, worker: Worker, now: float) -> None:
        self.now = now
        self.check(worker)
        super().end_step(worker, now)
        self.check(worker)

    def charge_token(self, worker: Worker, request: Request) -> None:
        self.charge(worker, request, self.policies.output_weight)

    def emit(self, worker: Worker, request: Request, now: float) -> None:
        self.charge_token(worker, request)
        super().emit(worker, request, now)
        if request.status == "finished":
            u = self.tenant[request.index]
            self.deficit[u][request.prefill_worker] -= self.policies.output_weight * request.output
            self.sent[request.prefill_worker][u] += self.policies.output_weight * request.output
            for row in self.window:
                if row.request == request.index:
                    row.output = request.output

    def next_waiting(self, worker: Worker) -> Request | None:
        self.evict(worker)
        waiting, w, queue = worker.waiting, worker.index, self.policies.queue
        if queue == "dlpm-turns":
            return min(waiting, key=self.priority)
        if queue in PLAIN_QUEUES or waiting[0].index in self.was_preempted:
            return waiting[0]
        if queue == "lpm":
            return max(waiting, key=lambda request: len(self.matched(worker, request)))
        tenants = {self.tenant[request.index] for request in waiting}
        if queue == "vtc":
            return min(waiting, key=lambda request: self.served[w][self.tenant[request.index]])
        if queue == "dlpm":
            while all(self.credit[w][u] <= 0 for u in tenants):
                for u in tenants:
                    self.credit[w][u] += self.policies.quantum_tokens * self.weights[u]
            able = [request for request in waiting if self.credit[w][self.tenant[request.index]] > 0]
            return max(able, key=lambda request: len(self.matched(worker, request)))
        groups = [self.group(worker, request, len(self.matched(worker, request))) for request in waiting]
        while True:
            for group in sorted(set(groups), reverse=True):
                if self.slots[w][group] > 0:
                    return waiting[groups.index(group)]
            self.slots[w] = [group + 1 for group in range(self.policies.priority_groups)]

    def group(self, worker: Worker, request: Request, matched: int) -> int:
        return self.policies.priority_groups * matched * self.block // (request.input + request.generated)

    # routing

    def choose(self, side: str, request: Request) -> Worker | None:
        if side == "front":
            self.read_notices()
        able = [worker for worker in self.front if worker.fits(request)]
        name = self.policies.routing
        if side == "back" or not ROUTING[name].reads_cache_state or not able:
            return super().choose(side, request)
        if name == "tenant-round-robin":
            return self.in_turn(self.tenant[request.index], request)
        match = {worker.index: self.believed(worker, request) for worker in able}
        token_s = {worker.index: prefill_token_s(worker.type) for worker in able}
        queue_s = {worker.index: token_s[worker.index] * self.pending(worker) for worker in able}

        def waits_s(worker: Worker) -> float:
            return queue_s[worker.index] + token_s[worker.index] * (request.input - match[worker.index])

        if name == "prefix-affinity":
            return min(able, key=lambda worker: (-match[worker.index], queue_s[worker.index]))
        if name == "min-ttft":
            return min(able, key=waits_s)
        if name == "pinned-prefix":
            depths = [node for node in self.nodes(request) if any(node in held for held in self.pinned)]
            near = [worker for worker in able if depths and depths[-1] in self.pinned[worker.index]]
            able = near or able
            return min(able, key=waits_s)
        if name == "cache-aware":
            return self.cache_aware(able, match, request)
        return self.d2lpm(able, match, request) if name == "d2lpm" else self.e2(able, match, request)

    def in_turn(self, tenant: int, request: Request) -> Worker:
        while True:
            worker = self.front[self.turn[tenant] % len(self.front)]
            self.turn[tenant] += 1
            if worker.fits(request):
                return worker

    def pending(self, worker: Worker) -> int:
        return sum(request.pending_tokens for request in worker.assigned) + len(worker.assigned)

    def cache_aware(self, able: list[Worker], match: dict[int, int], request: Request) -> Worker:
        policies, loads = self.policies, [len(worker.assigned) for worker in self.front]
        if max(loads) - min(loads) > policies.balance_requests and max(loads) > policies.balance_ratio * min(
            loads
        ):
            return min(able, key=lambda worker: len(worker.assigned))
        nearest = max(able, key=lambda worker: match[worker.index])
        if match[nearest.index] > policies.cache_threshold_frac * request.input:
            return nearest
        return min(able, key=lambda worker: len(self.caches[worker.index].known))

    def e2(self, able: list[Worker], match: dict[int, int], request: Request) -> Worker:
        policies, tokens = self.policies, request.input
        self.window = [row for row in self.window if row.time_s >= self.now - policies.share_window_s]
        longest = max(match.values())
        token_s = [prefill_token_s(worker.type) for worker in self.workers]
        decodes_s = self.decodes_s()
        past_s = {
            worker.index: sum(row.prefill_s for row in self.window if row.worker == worker.index)
            + decodes_s[worker.index]
            for worker in able
        }

        def load_s(worker: Worker) -> float:
            w = worker.index
            shares = self.shares(w)
            many = sum(row.worker == w for row in self.window)
            free, idle = self.memory(worker)
            missing = blocks_of(tokens) - match[w] // BLOCK
            missing -= free - sum(blocks for _, blocks in idle)
            node_s = self.block * token_s[w] / many if many else 0.0
            lost_s = 0.0
            for node, blocks in idle:
                if missing > 0:
                    lost_s += shares[node] * node_s
                    missing -= blocks
            return past_s[w] + (tokens - match[w]) * token_s[w] + lost_s

        heaviest, lightest = max(past_s, key=past_s.__getitem__), min(past_s, key=past_s.__getitem__)
        least_frac = 0.5
        if policies.routing == "e2-dynamic" and self.window:
            all_s = len(self.front) * (self.now - self.window[0].time_s)
            busy_s = sum(
                sum(row.prefill_s for row in self.window if row.worker == worker.index)
                + decodes_s[worker.index]
                for worker in self.front
            )
            least_frac = 1.0 - min(busy_s, all_s) / all_s / 2.0 if all_s > 0 else 0.5
        if longest > least_frac * tokens:
            prefix = self.counted_prefix(request, longest)
            need = len(prefix) * self.block if prefix in self.replicated_s else longest
            home = self.home_of(request, match, longest)
            near = [worker for worker in able if match[worker.index] >= need]
            chosen = min(near, key=load_s) if home is None else self.workers[home]
            if chosen.index == heaviest and past_s[heaviest] > policies.balance_ratio * past_s[lightest]:
                chosen = self.workers[lightest]
            elif self.waits_longer(prefix):
                other = min(able, key=load_s)
                if match[other.index] < len(prefix) * self.block:
                    chosen, self.replicated_s[prefix] = other, self.now
                    self.split(prefix, match, other.index, decodes_s)
        else:
            decode_frac = {w: decodes_s[w] / past_s[w] if past_s[w] else 0.0 for w in past_s}
            most = max(decode_frac.values())
            if most > policies.explore_decode_frac:
                chosen = next(worker for worker in able if decode_frac[worker.index] == most)
            else:
                chosen = min(able, key=load_s)
        prefill_s = (tokens - match[chosen.index]) * token_s[chosen.index]
        self.window.append(Routed(self.now, chosen.index, request.index, prefill_s))
        self.window[-1].prefix = self.key_portion(chosen.index, request)
        return chosen

    def memory(self, worker: Worker) -> tuple[int, list[tuple[Node, int]]]:
        """The free blocks, and the copies without users, as the router knows them: the blocks of each, with
        the node that goes with it, () if another copy stays.
        """
        cache = self.caches[worker.index]
        is_last = [len(cache.copies.get(copy.node, ())) == 1 for copy in cache.idle]
        last = [copy.node if alone else () for copy, alone in zip(cache.idle, is_last, strict=True)]
        return worker.free, [(node, copy.blocks) for node, copy in zip(last, cache.idle, strict=True)]

    def shares(self, w: int) -> Counter[Node]:
        """How many requests of e2's window went to worker w with each node."""
        return Counter(
            self.ids[row.request][: k + 1]
            for row in self.window
            if row.worker == w
            for k in range(len(self.ids[row.request]))
        )

    def key_portion(self, w: int, request: Request) -> Node | None:
        """The deepest run of nodes that others share too and that is longer than all before it."""
        ids, shares = self.ids[request.index], self.shares(w)
        prefix, end = None, 0
        for many, run in groupby(shares[ids[: k + 1]] for k in range(len(ids))):
            start, end = end, end + len(list(run))
            if many > 1 and end - start > start:
                prefix = ids[:end]
        return prefix

    def counted_prefix(self, request: Request, longest: int) -> Node:
        """The deepest of the cached nodes that is the end of somebody's key portion and whose waits are known
        or who was replicated; () if there is none.
        """
        known = {row.prefix for row in self.window if row.wait_s is not None} | set(self.replicated_s)
        nodes = [node for node in self.nodes(request)[: longest // self.block] if node in known]
        return nodes[-1] if nodes else ()

    def waits_longer(self, prefix: Node) -> bool:
        half_s = self.now - self.policies.share_window_s / 2
        rows = [row for row in self.window if row.prefix == prefix and row.wait_s is not None]
        before = [row.wait_s or 0.0 for row in rows if row.time_s < half_s]
        now = [row.wait_s or 0.0 for row in rows if row.time_s >= half_s]
        if not before or not now or not sum(now):
            return False
        if self.now - self.replicated_s.get(prefix, -math.inf) < self.policies.share_window_s:
            return False
        return sum(now) * len(before) >= self.policies.replicate_ratio * sum(before) * len(now)

    def decodes_s(self) -> list[float]:
        """Of every worker: its requests of the window, as long as those that have finished, on average."""
        everywhere = [row.output for row in self.window if row.output is not None]
        seconds = []
        for worker in self.workers:
            rows = [row for row in self.window if row.worker == worker.index]
            done = [row.output for row in rows if row.output is not None] or everywhere
            output_s = output_token_s(worker.type, self.context, self.policies.decode_batch)
            seconds.append(len(rows) * (sum(done) / max(len(done), 1)) * output_s)
        return seconds

    def home_of(self, request: Request, match: dict[int, int], longest: int) -> int | None:
        ids = self.ids[request.index]
        for k in range(min(longest // self.block, len(ids) - 1), 0, -1):
            home = self.home.get(ids[: k + 1])
            if home is not None and match.get(home, -1) >= k * self.block:
                return home
        return None

    def split(self, prefix: Node, match: dict[int, int], newest: int, decodes_s: list[float]) -> None:
        """The subtrees below a prefix, in order of time: who has the prefix keeps an equal part of them."""
        have = {w for w, tokens in match.items() if tokens >= len(prefix) * self.block}
        many = Counter(row.worker for row in self.window)
        load_s: dict[Node, float] = {}
        first: dict[Node, int] = {}
        for row in self.window:
            ids = self.ids[row.request]
            if len(ids) > len(prefix) and ids[: len(prefix)] == prefix:
                below = ids[: len(prefix) + 1]
                own_s = row.prefill_s + decodes_s[row.worker] / many[row.worker]
                load_s[below] = load_s.get(below, 0.0) + own_s
                first.setdefault(below, row.worker)
        part_s = sum(load_s.values()) / (len(have) + 1)
        given_s = [0.0 for _ in self.workers]
        for below, worker in first.items():
            w = self.home.get(below, worker)
            if w not in have or given_s[w] + load_s[below] / 2 > part_s:
                w = newest
            self.home[below] = w
            given_s[w] += load_s[below]

    def d2lpm(self, able: list[Worker], match: dict[int, int], request: Request) -> Worker:
        u = self.tenant[request.index]
        credit = self.deficit[u]
        for _ in count():
            if any(credit[worker.index] > 0 for worker in able):
                break
            for w in range(len(credit)):
                credit[w] += self.policies.worker_quantum_tokens * self.weights[u]
        longest = max(match.values())
        in_credit = [worker for worker in able if credit[worker.index] > 0]
        near = [worker for worker in in_credit if match[worker.index] == longest]
        chosen = min(near or in_credit, key=lambda worker: len(worker.assigned))
        missed = request.input - match[chosen.index]
        credit[chosen.index] -= self.policies.extend_weight * missed
        return chosen
