"""The plain simulators once more, of engines that serve LoRA adapters.

The scheduler passes over who needs an adapter beyond as many as there are slots. Slots, and what is kept in
the host's memory, are dictionaries from adapters to the number of the step that used them last.
"""

from __future__ import annotations

from async_prefix_reference import AsyncPrefixReference
from async_reference import AsyncReference
from prefix_reference import PrefixReference
from simulator_reference import Reference, Request, Worker

from planner.fleet import Fleet
from planner.simulator.adapter_layout import adapter_numbers
from planner.traffic.trace import Trace


class LoraReference(Reference):
    def __init__(self, fleet: Fleet, trace: Trace, *, closed_loop: int = 0) -> None:
        super().__init__(fleet, trace, closed_loop=closed_loop)
        lora = fleet.lora
        assert lora is not None
        self.adapter: list[int] = adapter_numbers(lora, trace, fleet.policies.seed).tolist()
        last = range(1, lora.adapter_count + 1)
        self.adapter_slots = [
            dict.fromkeys(last[-min(lora.max_loras, lora.adapter_count) :], 0) for _ in self.workers
        ]
        self.kept = [
            dict.fromkeys(last[-min(lora.max_cpu_loras, lora.adapter_count) :], 0) for _ in self.workers
        ]
        self.formed_steps = self.passed_over = self.loads = self.reads = 0

    def in_step(self, worker: Worker) -> set[int]:
        requests = [*worker.decoding, *(request for request, _ in worker.chunks)]
        return {self.adapter[request.index] for request in requests} - {0}

    def first_with_slot(self, worker: Worker, requests: list[Request]) -> Request | None:
        assert worker.type.lora is not None
        used = self.in_step(worker)
        if self.takes_prompts_first(worker):  # Decodes that wait for a step of prompts run with these later.
            decoding = [each for each in worker.running if each.is_prefilled and not self.is_leaving(each)]
            used |= {self.adapter[request.index] for request in decoding} - {0}
        for request in requests:
            adapter = self.adapter[request.index]
            if not adapter or adapter in used or len(used) < worker.type.lora.lora.max_loras:
                self.passed_over += request is not requests[0]
                return request
        return None

    def next_ready(self, worker: Worker) -> Request | None:
        return self.first_with_slot(
            worker, [request for request in worker.ready if self.has_kv(worker, request)]
        )

    def next_waiting(self, worker: Worker) -> Request | None:
        return self.first_with_slot(worker, list(worker.waiting))

    def next_inbound(self, worker: Worker) -> Request | None:
        """vLLM passes over who has no slot in the step that it forms, be its KV there or not."""
        if not self.pulls_kv(worker):
            return super().next_inbound(worker)
        return self.first_with_slot(worker, list(worker.inbound))

    def more_s(self, worker: Worker) -> float:
        assert worker.type.lora is not None
        lora, cost = worker.type.lora.lora, worker.type.lora.cost
        slots, kept, used = self.adapter_slots[worker.index], self.kept[worker.index], self.in_step(worker)
        if not used:
            return 0.0
        self.formed_steps += 1
        seconds = cost.kernels_s + len(used) * cost.read_s
        for places, most, each_s in (
            (kept, lora.max_cpu_loras, cost.disk_s),
            (slots, lora.max_loras, cost.load_s),
        ):
            for adapter in used - places.keys():
                if len(places) == most:
                    oldest = min((use, other) for other, use in places.items() if other not in used)[1]
                    del places[oldest]
                    slots.pop(oldest, None)
                places[adapter] = self.formed_steps
                seconds += each_s
                self.loads += places is slots
                self.reads += places is kept
            places.update(dict.fromkeys(used, self.formed_steps))
        tokens = sum(self.adapter[request.index] > 0 for request in worker.decoding)
        tokens += sum(n for request, n in worker.chunks if self.adapter[request.index])
        return seconds + tokens * cost.token_s + min(tokens * cost.visited_frac, len(used)) * cost.experts_s


class AsyncLoraReference(LoraReference, AsyncReference):
    pass


class PrefixLoraReference(LoraReference, PrefixReference):
    def next_waiting(self, worker: Worker) -> Request | None:
        self.evict(worker)
        return super().next_waiting(worker)


class AsyncPrefixLoraReference(PrefixLoraReference, AsyncPrefixReference):
    pass
