"""CPU memory behind prefix caches once more and plainly: what the tests hold the compiled kernel to.

The memory of a worker is a dictionary of nodes, those used longest ago first; a load is an event. A shared
store is one dictionary that all workers have.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from async_prefix_reference import AsyncPrefixReference
from async_reference import Formed
from prefix_reference import Node, PrefixReference
from simulator_reference import Request, Worker, blocks_of

from planner.domain import KV_BLOCK_TOKENS
from planner.fleet import Fleet
from planner.traffic.trace import Trace

LOAD = -1  # before whatever else happens at a moment


@dataclass(eq=False)
class Load:
    """Nodes that come from CPU memory for a request, which begins with `nodes[0]` of its parents' end."""

    request: Request
    nodes: list[Node]
    tokens: int  # of its prompt that it has then
    spared: int  # of these the load brings
    from_disk: int  # nodes
    end_s: float = math.inf  # until it has begun
    known_step: int | None = None  # None: it has not ended
    is_heard: bool = False  # its worker has formed a step since


class OffloadReference(PrefixReference):
    """Workers that prefill and decode, in batches of vllm-v1, with CPU memory for KV blocks."""

    def __init__(self, fleet: Fleet, trace: Trace) -> None:
        super().__init__(fleet, trace)
        asked = fleet.policies.kv_offload
        assert asked is not None
        self.most = [asked.kv_tokens(fleet.llm, worker.type.tp) // self.block for worker in self.workers]
        self.block_s = [KV_BLOCK_TOKENS * asked.token_s(fleet.llm, worker.type.tp) for worker in self.workers]
        self.kept: list[dict[Node, None]] = [{} for _ in self.workers]
        types = [worker.type for worker in self.workers]
        self.most_in_memory = [asked.memory_tokens(fleet.llm, each.tp) // self.block for each in types]
        self.disk_block_s = [KV_BLOCK_TOKENS * asked.disk_token_s(fleet.llm, each.tp) for each in types]
        self.has_disk = asked.disk_bytes > 0
        self.on_disk: list[set[Node]] = [set() for _ in self.workers]
        self.disk_free_s = [0.0 for _ in self.workers]
        self.disk_tokens = [0 for _ in self.requests]
        self.is_shared = asked.is_shared
        if asked.is_shared:
            self.kept = [self.kept[0]] * len(self.workers)
        self.link_of = [0 if asked.is_shared else w for w in range(len(self.workers))]
        self.loading: list[list[Load]] = [[] for _ in self.workers]
        self.to_start: list[list[Load]] = [[] for _ in self.workers]  # as the step that is prepared begins
        self.computed_then: dict[int, int] = {}  # tokens of a request, once the step under way has ended
        self.free_s = [0.0 for _ in self.workers]
        self.stored = [0 for _ in self.requests]  # nodes up to which a request has offered its own
        self.used_lengths: list[set[int]] = [set() for _ in self.requests]  # lengths of nodes
        self.gone: list[list[Request]] = [[] for _ in self.workers]
        self.loaded_tokens = [-1 for _ in self.requests]
        self.waited_s = [0.0 for _ in self.requests]
        self.loads = self.passed_over = self.refused = self.left_memory = 0

    # loads

    def present(self, worker: Worker) -> int:
        return super().present(worker) + len(self.loading[worker.index])

    def in_memory(self, worker: Worker, request: Request) -> list[Node]:
        """What follows there on what the GPU has. Workers that decode alone have no memory."""
        if worker.role == "decode":
            return []
        ids, kept = self.ids[request.index], self.kept[worker.index]
        copies = self.caches[worker.index].copies
        first = len(self.matched(worker, request))
        if ids[: first + 1] in copies and first < len(ids):
            return []  # but for the last tokens all is on the GPU
        found = []
        for k in range(first, min(len(ids), (request.input + request.generated) // self.block)):
            if ids[: k + 1] not in kept:
                break
            found.append(ids[: k + 1])
        return found

    def is_loaded(self, worker: Worker, load: Load) -> bool:
        """Whether the worker knows that the load has ended, which it does not forget."""
        is_under_way = worker.step_start_s is not None
        return load.known_step is not None and (
            load.is_heard or worker.knows_all or load.known_step <= worker.steps + is_under_way + 1
        )

    def under_way(self, worker: Worker) -> set[Node]:
        loads = self.loading[worker.index]
        return {node for load in loads if not self.is_loaded(worker, load) for node in load.nodes}

    def admit(self, worker: Worker, now: float, longest: int, budget: int) -> None:
        if worker.role == "decode":
            super().admit(worker, now, longest, budget)
            return
        w = worker.index
        for load in list(self.loading[w]):
            request = load.request
            if budget == 0 or len(worker.running) == worker.type.max_num_seqs:
                return
            if not self.is_loaded(worker, load):
                continue
            self.cache_loaded(worker, load)
            have = len(self.shared[request.index]) * self.blocks + request.blocks
            if blocks_of(request.input + request.generated) - have > worker.free:
                return
            self.loading[w].remove(load)
            budget -= self.seat(worker, request, now, longest, budget)
        aside: list[Request] = []
        while budget > 0 and len(worker.running) < worker.type.max_num_seqs and worker.waiting:
            first = self.next_waiting(worker)
            assert first is not None
            request = first
            nodes = self.in_memory(worker, request)
            if not self.is_shared and self.under_way(worker) & set(nodes):
                self.passed_over += 1
                worker.waiting.remove(request)
                aside.append(request)
                continue
            if self.missing_blocks(worker, request) > worker.free:
                break
            if nodes:
                if not self.begin(worker, request, nodes, now):
                    break
                continue
            self.leave_queue(worker, request)
            self.take(worker, request)
            if self.loaded_tokens[request.index] < 0:
                self.loaded_tokens[request.index] = 0
            budget -= self.seat(worker, request, now, longest, budget)
        worker.waiting.extendleft(reversed(aside))

    def begin(self, worker: Worker, request: Request, nodes: list[Node], now: float) -> bool:
        """Start the load; False if those under way need the blocks."""
        w, i = worker.index, request.index
        under_way = [(load.request, load.tokens) for load in self.loading[w]]
        for other in worker.running:
            if not other.is_prefilled:
                in_step = sum(n for chunk, n in worker.chunks if chunk is other)
                under_way.append((other, other.cached + in_step))
        promised = sum(
            blocks_of(other.input + other.generated) - blocks_of(done) for other, done in under_way
        )
        used, tokens = self.hit(worker, request)
        idle = sum(copy.blocks for copy in used if not copy.users)
        if idle + len(nodes) * self.blocks + promised > worker.free:
            return False
        self.leave_queue(worker, request)
        self.take(worker, request)
        assert request.cached == tokens == len(used) * self.block
        request.blocks = len(nodes) * self.blocks
        worker.free -= request.blocks
        self.evict(worker)
        total = tokens + len(nodes) * self.block
        spared = min(total, request.input + request.generated - 1)
        request.cached = spared  # what is still to be computed, for routers
        load = Load(request, nodes, total, spared - tokens, sum(node in self.on_disk[w] for node in nodes))
        self.loading[w].append(load)
        if self.goes_by_priority():
            self.loading[w].sort(key=lambda each: self.priority(each.request))
        self.stored[i] = len(used) + len(nodes)
        self.used_lengths[i] |= set(range(len(used) + 1, self.stored[i] + 1))
        self.loads += 1
        if worker.step_start_s is None:
            self.start_load(worker, load, now)
        else:
            self.to_start[w].append(load)
        return True

    def start_load(self, worker: Worker, load: Load, now: float) -> None:
        """With the step that it was found for: from now on it has the link, after those that have it."""
        w, i = worker.index, load.request.index
        link, blocks = self.link_of[w], len(load.nodes) * self.blocks
        self.free_s[link] = load.end_s = max(self.free_s[link], now) + blocks * self.block_s[w]
        if load.from_disk:
            disk_s = load.from_disk * self.blocks * self.disk_block_s[w]
            self.disk_free_s[w] = max(self.disk_free_s[w], now) + disk_s
            load.end_s = max(load.end_s, self.disk_free_s[w])
        if self.loaded_tokens[i] < 0:
            self.loaded_tokens[i], self.waited_s[i] = load.spared, load.end_s - now
            self.disk_tokens[i] = min(load.from_disk * self.block, load.spared)
        heapq.heappush(self.events, (load.end_s, LOAD, w))

    def leave_queue(self, worker: Worker, request: Request) -> None:
        worker.waiting.remove(request)
        if not request.preemptions:
            worker.served_batch = request.queue_batch

    def cache_loaded(self, worker: Worker, load: Load) -> None:
        """What has come is found by others."""
        request = load.request
        request.cached = load.tokens
        self.add(worker, request, 0, 0)
        worker.chunks.pop()
        request.cached = min(load.tokens, request.input + request.generated - 1)

    def happen(self, kind: int, index: int, now: float) -> None:
        if kind != LOAD:
            super().happen(kind, index, now)
            return
        worker = self.workers[index]
        for load in self.loading[index]:
            if load.end_s == now and load.known_step is None:
                running = worker.step_start_s is not None
                load.known_step = worker.steps + 2 + self.kv_delay_steps if running else 0
        self.wake(worker, now)

    # what is kept

    def form_step(self, worker: Worker, now: float) -> bool:
        for load in self.loading[worker.index]:
            load.is_heard = load.is_heard or self.is_loaded(worker, load)
        was_short = super().form_step(worker, now)
        if not self.is_shared:
            for request, n in worker.chunks:
                self.store(worker, request, request.cached + n)
        for request in self.gone[worker.index]:
            kept, ids = self.kept[worker.index], self.ids[request.index]
            for k in sorted(self.used_lengths[request.index], reverse=True):
                if ids[:k] in kept:
                    del kept[ids[:k]]
                    self.put(worker.index, ids[:k])
        self.gone[worker.index] = []
        return was_short

    def store(self, worker: Worker, request: Request, computed: int) -> None:
        w, i = worker.index, request.index
        if worker.role == "decode":
            return
        kept, ids = self.kept[w], self.ids[i]
        full = min(len(ids), computed // self.block)
        offered = [ids[:k] for k in range(self.stored[i] + 1, full + 1)]
        if not offered:
            return
        self.used_lengths[i] |= set(range(self.stored[i] + 1, full + 1))
        new = [node for node in offered if node not in kept]
        loads = [
            load
            for other in self.workers
            if self.kept[other.index] is kept
            for load in self.loading[other.index]
        ]
        busy = {node for load in loads if not load.is_heard for node in load.nodes} | set(offered)
        able = [node for node in kept if node not in busy]
        excess = max(len(kept) + len(new) - self.most[w], 0)
        # The kernel lets such nodes go and puts them back as the step begins (planner/simulator/offload.py).
        found = {node for load in loads if math.isinf(load.end_s) for node in load.nodes} - set(offered)
        leaving = [node for node in kept if node not in busy or node in found][:excess]
        self.is_not_compared |= len(leaving) == excess and bool(found & set(leaving))
        if excess > len(able):
            self.refused += 1
            return
        for node in able[:excess]:
            del kept[node]
            self.on_disk[w].discard(node)
            self.left_memory += 1
        for node in new:
            self.put(w, node)
        self.stored[i] = full

    def put(self, w: int, node: Node) -> None:
        """The node is the last one used, and in memory; where that is too full others go to the disk."""
        self.kept[w][node] = None
        self.on_disk[w].discard(node)
        in_memory = [each for each in self.kept[w] if each not in self.on_disk[w]]
        if self.has_disk and len(in_memory) > self.most_in_memory[w]:
            self.on_disk[w].add(in_memory[0])

    def end_step(self, worker: Worker, now: float) -> None:
        if self.is_shared:
            for request, n in self.computed_chunks(worker):
                self.store(worker, request, n)
        super().end_step(worker, now)

    def computed_chunks(self, worker: Worker) -> list[tuple[Request, int]]:
        """Prompts of the step that ends, and how many tokens of each there are then."""
        return [(request, request.cached + n) for request, n in worker.chunks]

    def emit(self, worker: Worker, request: Request, now: float) -> None:
        super().emit(worker, request, now)
        if request.status == "finished" and worker.role != "decode":
            self.gone[worker.index].append(request)

    def hand_off(self, worker: Worker, request: Request, now: float) -> None:
        self.gone[worker.index].append(request)
        super().hand_off(worker, request, now)

    def check(self, worker: Worker) -> None:
        """Blocks that wait for a load are somebody's too; no more nodes in memory than there is room for."""
        waiting = [load.request for load in self.loading[worker.index]]
        worker.free += sum(request.blocks for request in waiting)
        super().check(worker)
        worker.free -= sum(request.blocks for request in waiting)
        assert len(self.kept[worker.index]) <= self.most[worker.index]


class AsyncOffloadReference(OffloadReference, AsyncPrefixReference):
    def next_step(self, worker: Worker, now: float) -> Formed | None:
        to_start, self.to_start[worker.index] = self.to_start[worker.index], []
        for load in to_start:
            self.start_load(worker, load, now)
        return super().next_step(worker, now)

    def advance(self, worker: Worker, request: Request, n: int) -> bool:
        is_first = super().advance(worker, request, n)
        self.computed_then[request.index] = request.cached
        return is_first

    def computed_chunks(self, worker: Worker) -> list[tuple[Request, int]]:
        chunks = self.running[worker.index].chunks
        return [(request, self.computed_then[request.index]) for request, _ in chunks]
