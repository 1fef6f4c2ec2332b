"""Simulates DistServe's Figure 1 and its placement of OPT-175B (Zhong et al. 2024, arXiv:2401.09670).

    python benchmarks/papers/distserve.py [figure1|opt175|figure8|figure9|figure10|figure11|figure12]

Figures 8 to 12 are in distserve_figures.py.

opt175: Algorithm 2 on 3 nodes of 8 A100-80G, TTFT p90 <= 4 s and TPOT p90 <= 200 ms (the paper's table 1) in
steady state. Step times are rooflines. Prompts and outputs are drawn with ShareGPT's means (755 and 200
tokens), as its data are not shipped. The paper's own placement, prefill tp3 pp3 and decode tp4 pp3, is
simulated too.

figure1: the most requests/s within TTFT p90 <= 0.4 s and TPOT p90 <= 40 ms, with prompts of 512 tokens,
outputs of 64 and Poisson arrivals, for Llama-2-13B (the paper has OPT-13B) on A100-80G. One GPU has both
phases, with vLLM v0's batching as in the paper, and with the chunks of the later vLLM v1; or only prefill; or
only decode, behind prefill that takes no time; or there are pairs of prefill and decode workers. The paper
has 1.6 requests/s with both phases, 5.6 with prefill alone, 10 with decode alone, and 3.3 per GPU for two
prefill and one decode worker.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.papers import distserve_figures as figures
from benchmarks.papers.common import CATALOG, log_normal, most, poisson, worker
from planner.domain import Limit, Slo
from planner.fleet import Fleet, Network, Policies, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.papers import distserve_search as placement
from planner.papers.goodput import find_goodput
from planner.papers.goodput import poisson_traffic as of_lengths
from planner.simulator.measured_values import metric_percentile_s
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
        tpot_s = 0.0 if output_tokens == 1 else metric_percentile_s(result, "tpot", 0.9)
        return metric_percentile_s(result, "ttft", 0.9) <= TTFT_S and tpot_s <= TPOT_S

    return most(holds, 0.1, 200.0)


def opt175() -> None:
    llm, gpu = CATALOG.llm("opt-175b"), CATALOG.gpu("a100-80g")
    rng = np.random.default_rng(0)
    inputs, outputs = log_normal(rng, 20_000, 500, 0.9, 1500), log_normal(rng, 20_000, 135, 0.9, 500)
    lengths = poisson(1.0, inputs, outputs)
    slo = Slo((Limit("ttft", 0.9, 4.0), Limit("tpot", 0.9, 0.2)))
    within = Network(gpu.link_bytes_per_s, is_shared=False)
    setting = placement.ServingSetting(llm, Policies(), within, within)
    types = placement.instance_types(llm, gpu, CATALOG, nodes=3)
    rules = placement.steady_rules(slo, of_lengths(lengths), seeds=1)
    by_degrees = {(kind.tp, kind.pp): kind for kind in types}
    own = placement.pair_fleet(setting, by_degrees[3, 3], by_degrees[4, 3], network=within)
    theirs = find_goodput(rules.whole, own, guess_rps=6.0).rate_rps
    print(f"the paper's tp3 pp3 + tp4 pp3: {theirs / own.gpus:.3f} requests/s and GPU")
    found = placement.low_affinity(
        setting, types, types, 1.0, placement.measured_by(rules.whole), nodes=3
    ).measured[0]
    for row in found[:5]:
        shape = " + ".join(f"tp{pool.type.tp} pp{pool.type.pp}" for pool in row.fleet.pools)
        print(f"{shape}: {row.gpu_rate_rps:.3f}")
    print(f"{len(found)} pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description="DistServe's figures, and its placement of OPT-175B.")
    found = {"figure1": figure1, "opt175": opt175} | {each.__name__: each for each in figures.FIGURES}
    parser.add_argument("what", nargs="?", choices=tuple(found), default="figure1")
    start = time.process_time()
    found[parser.parse_args().what]()
    print(f"{time.process_time() - start:.1f} CPU-s")


def figure1() -> None:
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
