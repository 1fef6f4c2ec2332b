"""Aladdin's placement: workers that its best fit, JSQ and power of two need for the same promise.

    python benchmarks/papers/aladdin.py

Decode workers behind instant prefill, as in the paper's section 6.4: Llama-2-13B on A100, lengths like
ShareGPT's, Poisson at 10 ... 160 requests/s; the mean gap of a request (ATGT) is at most 50 ms for 99 % of
them. KV caches of 20,000 tokens, which bind, and of the whole A100. Nie et al. 2024
(arXiv:2405.06856, Figure 12): up to 60 % fewer workers than JSQ, up to 49 % fewer than power of two.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from common import CATALOG, log_normal, poisson, worker

from planner.fleet import Fleet, Network, Policies, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.simulator.metrics import value_s
from planner.simulator.replay import Simulation, simulate
from planner.traffic.trace import Trace

LLM = CATALOG.llm("llama-2-13b")
ATGT_S, SHARE, MOST = 0.05, 0.99, 128
ENGINE = worker("llama-2-13b", "a100-80g", 1, budget=2048, seats=256)
INSTANT = replace(
    ENGINE,
    latency=StepLatency((1.0, 2.0), (1e-9, 1e-9), 0, 0, 0, 0, 0, "takes no time"),
    kv_tokens=16 * 10**7,
)
HEADROOMS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)  # of best fit: the paper tunes its theta, too
ROUTING = {
    "jsq": Policies(decode_routing="jsq"),
    "least-outstanding": Policies(decode_routing="least-outstanding"),
    "power-of-two": Policies(decode_routing="power-of-two"),
    "random": Policies(decode_routing="random"),
}


def best_fit(headroom_frac: float) -> Policies:
    """Packs to this share of the KV cache and of the limit."""
    return Policies(
        decode_routing="best-fit",
        tbt_s=ATGT_S * headroom_frac,
        headroom_frac=headroom_frac,
        prediction_accuracy_frac=0.8,
    )


def run(kind: WorkerType, trace: Trace, policies: Policies, count: int) -> Simulation:
    pools = (Pool("p", "prefill", INSTANT, 1), Pool("d", "decode", kind, count))
    return simulate(Fleet(LLM, pools, policies, Network(1e30)), trace)


def holds(result: Simulation) -> bool:
    return value_s(result, "tpot", SHARE) <= ATGT_S


def fewest(kind: WorkerType, trace: Trace, policies: Policies) -> int:
    """By bisection; MOST if even that many do not hold."""
    low, high = 0, MOST
    if not holds(run(kind, trace, policies, high)):
        return MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(run(kind, trace, policies, middle)) else (middle, high)
    return high


def in_use(kind: WorkerType, trace: Trace, policies: Policies, count: int) -> float:
    """Mean number of decode workers that run something."""
    result = run(kind, trace, policies, count)
    return float(result.worker_busy_s[1:].sum() / (result.end_s - trace.arrival_s[0]))


def main() -> None:
    rng = np.random.default_rng(1)
    for name, kind in (("20,000", replace(ENGINE, kv_tokens=20_000)), (f"{ENGINE.kv_tokens:,}", ENGINE)):
        print(
            f"decode workers, {name} KV tokens each: requests/s, best-fit (headroom), "
            f"{', '.join(ROUTING)}; of twice as many in use on average under best-fit, jsq"
        )
        for rate_rps in (10, 20, 40, 80, 160):
            n = int(60 * rate_rps)
            trace = poisson(rate_rps, log_normal(rng, n, 100, 1.2, 2000), log_normal(rng, n, 200, 0.9, 1500))
            packed, headroom_frac = min((fewest(kind, trace, best_fit(h)), -h) for h in HEADROOMS)
            counts = [fewest(kind, trace, policies) for policies in ROUTING.values()]
            twice = 2 * packed
            print(
                f"{rate_rps:6}   {packed:4} ({-headroom_frac:4}) {' '.join(f'{count:6}' for count in counts)}"
                f"     {twice:3}: {in_use(kind, trace, best_fit(-headroom_frac), twice):5.1f} "
                f"{in_use(kind, trace, ROUTING['jsq'], twice):5.1f}"
            )


if __name__ == "__main__":
    main()
