"""Compares the KV caches that the planner predicts with those that vLLM logged when it started.

    python benchmarks/kv_capacity.py

benchmarks/kv_capacity.yaml has the logs and their sources. The exit code is 1 if a prediction is more than 8
% off.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from planner.documents.catalog import read_catalog
from planner.domain import KV_BLOCK_TOKENS, Gpu
from planner.models.kv_layout import kv_layout
from planner.models.llm import Llm
from planner.models.memory import Memory, MemorySettings, worker_memory
from planner.models.speculation import Drafter, drafter_of

LOGS = Path(__file__).with_suffix(".yaml")
BOUND_FRAC = 0.08


def logged_kv_tokens(use: Memory, llm: Llm, tp: int, max_model_len: int, max_num_batched_tokens: int) -> int:
    """The tokens that vLLM logs as the size of its KV cache: as many requests of `max_model_len` as fit, each
    with a whole step's tokens in its windows, times their length (vLLM's `_report_kv_cache_config`).
    """
    layout = kv_layout(llm, tp)
    token_blocks = -(-max_model_len // KV_BLOCK_TOKENS)
    window_blocks = layout.extra.window_blocks + -(-max_num_batched_tokens // KV_BLOCK_TOKENS)
    blocks = float(token_blocks) + layout.extra.constant_blocks
    blocks += layout.extra.window_ratio * min(token_blocks, window_blocks)
    blocks += layout.step_blocks_per_token * min(max_num_batched_tokens, max_model_len)
    request_bytes = blocks * KV_BLOCK_TOKENS * use.kv_bytes_per_token
    return math.floor(max(use.kv_bytes, 0.0) / request_bytes * max_model_len)


@dataclass(frozen=True, slots=True)
class LoggedCache:
    """One logged KV cache, and the settings of vLLM that it was logged with."""

    llm: Llm
    gpu: Gpu
    tp: int
    dp: int
    tokens: int
    settings: Mapping[str, Any]
    drafter: Drafter

    @property
    def predicted_tokens(self) -> int:
        use = worker_memory(self.llm, self.gpu, self.tp, dp=self.dp, **self.settings)
        use = self.drafter.add_to_memory(use, self.llm, self.tp)
        length_tokens = self.settings["settings"].max_model_len or self.llm.context_tokens
        return logged_kv_tokens(
            use, self.llm, self.tp, length_tokens, self.settings["max_num_batched_tokens"]
        )

    @property
    def error_frac(self) -> float:
        return self.predicted_tokens / self.tokens - 1


def read_logs(path: Path = LOGS) -> Iterator[LoggedCache]:
    catalog = read_catalog()
    for group in yaml.safe_load(path.read_text()).values():
        for own in group["rows"]:
            row = {**group, **own}
            gpu = catalog.gpu(row["gpu"])
            if "memory_gib" in row:
                gpu = replace(gpu, memory_bytes=row["memory_gib"] * 2**30)
            llm = catalog.llm(row["llm"])
            if row.get("kv_bits") == 8:
                llm = replace(llm, kv_dtype_bytes=1.0)
            settings = {
                "max_num_batched_tokens": row["batched"],
                "max_num_seqs": row["seqs"],
                "settings": MemorySettings(row["version"], row.get("length"), row["util"]),
            }
            drafter = drafter_of(row["draft"], llm) if "draft" in row else Drafter()
            yield LoggedCache(llm, gpu, row["tp"], row.get("dp", 1), row["tokens"], settings, drafter)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("| LLM | GPU | TP | ranks | logged tokens | predicted | error |\n|---|---|---|---|---|---|---|")
    worst_frac = 0.0
    for log in read_logs():
        worst_frac = max(worst_frac, abs(log.error_frac))
        print(
            f"| {log.llm.name} | {log.gpu.name} | {log.tp} | {log.dp} | {log.tokens:,} "
            f"| {log.predicted_tokens:,} | {100 * log.error_frac:+.1f} % |"
        )
    print(f"\nlargest error {100 * worst_frac:.1f} %, bound {100 * BOUND_FRAC:.0f} %")
    return int(worst_frac > BOUND_FRAC)


if __name__ == "__main__":
    sys.exit(main())
