"""DistServe's Figure 1: one A100 for both phases, or for one of them.

    python benchmarks/papers/distserve.py

512 tokens in and 64 out, Poisson, Llama-2-13B (their 13B is OPT) on A100-80G: the most requests/s within
TTFT p90 <= 0.4 s and TPOT p90 <= 40 ms. Colocated under vLLM v0, as they had it, and under the chunks of
vLLM v1, which is younger; a prefill worker alone; a decode worker behind instant prefill; two of the former
with one of the latter. Zhong et al. 2024 (arXiv:2401.09670): 1.6 colocated, 5.6 and 10 alone, 3.3 per GPU
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from common import CATALOG, most, poisson, worker

from planner.fleet import Fleet, Network, Policies, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.simulator.metrics import value_s
from planner.simulator.replay import simulate

LLM = CATALOG.llm("llama-2-13b")
ENGINE = worker("llama-2-13b", "a100-80g", 1, budget=2048)
INSTANT = replace(
    ENGINE,
    latency=StepLatency((1.0, 2.0), (1e-9, 1e-9), 0, 0, 0, 0, 0, "takes no time"),
    kv_tokens=16 * 10**6,
)
NETWORK = Network(300e9)  # NVLink of one node
TTFT_S, TPOT_S, REQUESTS = 0.4, 0.04, 4000


def goodput_rps(
    pools: Sequence[tuple[str, WorkerType, int]], batching: str, output_tokens: int = 64
) -> float:
    rows = tuple(Pool(role, role, kind, count) for role, kind, count in pools)  # type: ignore[arg-type]
    fleet = Fleet(LLM, rows, Policies(batching=batching), NETWORK)

    def holds(rate_rps: float) -> bool:
        n = int(max(REQUESTS, 120 * rate_rps))
        trace = poisson(rate_rps, np.full(n, 512), np.full(n, output_tokens))
        result = simulate(fleet, trace)
        tpot_s = 0.0 if output_tokens == 1 else value_s(result, "tpot", 0.9)
        return value_s(result, "ttft", 0.9) <= TTFT_S and tpot_s <= TPOT_S

    return most(holds, 0.1, 200.0)


def main() -> None:
    mixed = [("mixed", ENGINE, 1)]
    rows = (
        ("colocated, vLLM v0", goodput_rps(mixed, "vllm-v0"), 1),
        ("colocated, vLLM v1, budget 2048", goodput_rps(mixed, "vllm-v1"), 1),
        (
            "colocated, vLLM v1, budget 512",
            goodput_rps([("mixed", replace(ENGINE, max_num_batched_tokens=512), 1)], "vllm-v1"),
            1,
        ),
        ("prefill alone", goodput_rps(mixed, "vllm-v0", 1), 1),
        ("decode alone", goodput_rps([("prefill", INSTANT, 1), ("decode", ENGINE, 1)], "vllm-v0"), 1),
        ("1 prefill, 1 decode", goodput_rps([("prefill", ENGINE, 1), ("decode", ENGINE, 1)], "vllm-v0"), 2),
        ("2 prefill, 1 decode", goodput_rps([("prefill", ENGINE, 2), ("decode", ENGINE, 1)], "vllm-v0"), 3),
    )
    print("requests/s within TTFT p90 0.4 s and TPOT p90 40 ms          in all  per GPU")
    for name, rps, gpus in rows:
        print(f"{name:58} {rps:8.2f} {rps / gpus:8.2f}")


if __name__ == "__main__":
    main()
