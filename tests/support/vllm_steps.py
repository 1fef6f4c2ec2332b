"""Drives vLLM's own scheduler, without a model, and writes down every step it forms.

    python tests/support/vllm_steps.py < cases.json > transcripts.json

A transcript is a list of steps, and a step is

    [start_s, end_s, decodes, [[request, tokens, cached before] of each chunk], [request preempted, ...]]

where whoever was preempted was so when it was formed. Cases are made by vllm_cases.py. It is a process of its
own: it needs vLLM and nothing of the planner. Steps take the seconds of the case's formula,

    g = f0 + f1 N + a A_p + b D + d (K + C) + e P,     t = g + h  or, asynchronous,  max(g, h) + r

N tokens, A_p pairs, D decodes with K tokens, P chunks after C cached tokens; h and r = x + y (D + P).

Where KV blocks are offloaded, loads cross one after the other from the start of the step that they are formed
with, and are seen by the worker as it starts a step, asynchronously as the one before begins, by an idle one
at once; stores are done as soon as they are asked for.

An asynchronous engine forms the next step as one begins, and where there was nothing to do once more at its
end, as vLLM's EngineCore.step_with_batch_queue does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLOCK = 16
PAGE_BYTES = 4096  # in which CPU memory is handed out: a block here is less
TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"


def scheduler_of(case: dict[str, Any]) -> Any:
    """vLLM's scheduler, as its own tests make one."""
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        LoRAConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    model = ModelConfig(
        model=str(TINY),
        dtype="float32",
        seed=0,
        skip_tokenizer_init=True,
        max_model_len=case["max_model_len"],
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=case["prefix_cache"])
    config = VllmConfig(
        model_config=model,
        device_config=DeviceConfig("cpu"),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=case["seats"],
            max_num_batched_tokens=case["budget"],
            max_model_len=case["max_model_len"],
            long_prefill_token_threshold=case["long_prefill"],
            enable_chunked_prefill=True,
            policy="priority" if "priority" in case else "fcfs",
            async_scheduling=case["async"],
            is_encoder_decoder=False,
        ),
        lora_config=LoRAConfig(max_loras=case["max_loras"], max_lora_rank=8) if "adapter" in case else None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": case["memory_blocks"] * PAGE_BYTES},
        )
        if "memory_blocks" in case
        else None,
    )
    blocks = case["blocks"] + 1  # one is the null block
    cache.num_gpu_blocks = blocks
    kv_cache = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(
                ["layer"],
                FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32),
            )
        ],
    )
    return (AsyncScheduler if case["async"] else Scheduler)(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


def tokens_of(case: dict[str, Any], r: int) -> list[int]:
    """A prompt: equal ids of blocks, up to a block and it included, are equal tokens."""
    tokens: list[int] = []
    path = 0
    for at, block in enumerate(case["paths"][r]):
        path = hash((path, at, block)) % 10**9
        tokens += [10 + path * BLOCK + i for i in range(BLOCK)]
    own = [10**12 + r * 10**5 + i for i in range(case["input"][r])]
    return (tokens + own[len(tokens) :])[: case["input"][r]]


class Driver:
    """One engine and its requests."""

    def __init__(self, case: dict[str, Any]) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        self.case, self.scheduler = case, scheduler_of(case)
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK, hash_function)
        self.arrived = self.made = 0
        self.decoding: set[int] = set()  # their prompts are computed, in what is formed
        self.preempted: set[int] = set()  # since the last step that was formed
        self.loads: list[tuple[float, int, str]] = []  # under way: end, job, request
        self.free_s = 0.0

    def run(self) -> list[Any]:
        now, steps = 0.0, []
        formed, formed_s, was_idle = None, now, False
        while self.arrived < len(self.case["arrival_s"]) or self.scheduler.has_unfinished_requests():
            output, result, step_s, what = formed or self.form(now)
            self.start_loads(output, now)
            if what is None and formed is None and not was_idle:
                was_idle = True  # what it has been told of meanwhile, or has taken back, may do: once more
            elif what is None and formed is None:
                arrivals = self.case["arrival_s"][self.arrived : self.arrived + 1]
                now = max(now, min([*arrivals, *(end_s for end_s, _, _ in self.loads)]))
                was_idle = False
            else:
                was_idle = False
            seen_s = now if what is None or formed is None else formed_s
            result.kv_connector_output = self.ended(seen_s)
            formed, formed_s = None, now
            if what is not None:
                steps.append([now, now + step_s, *what])
                formed = self.form(now) if self.case["async"] else None
            self.scheduler.update_from_output(output, result)
            now += step_s
        return steps

    def start_loads(self, output: Any, now: float) -> None:
        """With the step."""
        if (told := output.kv_connector_metadata) is None:
            return
        for job, load in told.load_jobs.items():
            self.free_s = max(self.free_s, now) + len(load.dst_spec.block_ids) * self.case["block_s"]
            self.loads.append((self.free_s, job, load.req_id))

    def end_stores(self, output: Any) -> None:
        if (told := output.kv_connector_metadata) is not None and told.store_jobs:
            self.scheduler.connector.update_connector_output(self.ended(-1.0, list(told.store_jobs)))

    def ended(self, now: float, stored: Sequence[int] = ()) -> Any:
        """What the worker tells of transfers."""
        if "memory_blocks" not in self.case:
            return None
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput

        done = [load for load in self.loads if load[0] <= now]
        self.loads = [load for load in self.loads if load[0] > now]
        told = OffloadingWorkerMetadata()
        for job in [*stored, *(job for _, job, _ in done)]:
            told.mark_completed(job)
        return KVConnectorOutput(
            finished_recving={name for _, _, name in done}, kv_connector_worker_meta=told
        )

    def form(self, now: float) -> tuple[Any, Any, float, list[Any] | None]:
        """What vLLM schedules of all it knows by now; None for what if there is nothing to do."""
        while self.arrived < len(self.case["arrival_s"]) and self.case["arrival_s"][self.arrived] <= now:
            self.scheduler.add_request(self.request(self.arrived))
            self.arrived += 1
        requests = dict(self.scheduler.requests)
        before = {name: request.num_preemptions for name, request in requests.items()}
        output = self.scheduler.schedule()
        self.end_stores(output)
        for name, request in requests.items():
            if request.num_preemptions > before[name]:
                self.preempted.add(int(name))
                self.decoding.discard(int(name))
        if output.total_num_scheduled_tokens == 0:
            return output, self.result([], []), 0.0, None
        preempted, self.preempted = sorted(self.preempted), set()
        chunks, decodes, kv_tokens = [], 0, 0
        names = list(output.num_scheduled_tokens)
        for name in names:
            r, n = int(name), output.num_scheduled_tokens[name]
            cached = requests[name].num_computed_tokens - n
            if r in self.decoding:
                decodes += 1
                kv_tokens += cached + 1
                continue
            chunks.append([r, n, cached])
            if not requests[name].is_prefill_chunk:
                self.decoding.add(r)
        tokens = [[] if requests[name].is_prefill_chunk else [self.new_token()] for name in names]
        step_s = self.step_s(chunks, decodes, kv_tokens)
        return output, self.result(names, tokens), step_s, [decodes, sorted(chunks), preempted]

    def request(self, r: int) -> Any:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=str(r),
            prompt_token_ids=tokens_of(self.case, r),
            sampling_params=SamplingParams(ignore_eos=True, max_tokens=self.case["output"][r]),
            pooling_params=None,
            block_hasher=self.hasher,
            lora_request=LoRARequest(f"adapter-{a}", a, "nowhere") if (a := self.adapter(r)) else None,
            arrival_time=self.case["arrival_s"][r]
            + 1e-9 * r,  # Of two that arrive together it is the number.
            priority=self.case["priority"][r] if "priority" in self.case else 0,
        )

    def adapter(self, r: int) -> int:
        """From 1 on; 0 is the LLM alone."""
        return int(self.case["adapter"][r]) if "adapter" in self.case else 0

    def result(self, names: list[str], tokens: list[list[int]]) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=tokens
        )

    def new_token(self) -> int:
        """No other request has it."""
        self.made += 1
        return 2 * 10**15 + self.made

    def step_s(self, chunks: list[list[int]], decodes: int, kv_tokens: int) -> float:
        f0, f1, a, b, d, e, h0, h1, r0, r1 = self.case["seconds"]
        tokens = decodes + sum(n for _, n, _ in chunks)
        pairs = sum(n * (c + (n + 1) / 2) for _, n, c in chunks)
        read = kv_tokens + sum(c for *_, c in chunks)
        gpu_s = f0 + f1 * tokens + a * pairs + b * decodes + d * read + e * len(chunks)
        sequences = decodes + len(chunks)
        host_s, rest_s = h0 + h1 * sequences, r0 + r1 * sequences
        return float(max(gpu_s, host_s) + rest_s if self.case["async"] else gpu_s + host_s)


def main() -> None:
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    json.dump([Driver(case).run() for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
