"""D2LPM against VTC, Preble and round robin + LPM where one client misbehaves.

    python benchmarks/papers/d2lpm.py

Llama-3.1-8B on four A100, the catalog's step times; four clients that send programs at the same rate for two
minutes, more than the fleet carries. S1: the first one's programs are larger (trees of 340 requests in place
of 30, judges of 16 dimensions in place of 2), or it asks four times as often (QA). S2: its prompts are
longer. VTC has round robin per client. Latency: of a program to its end, of QA to the first token.

Cao et al. 2025, Figure 7: D2LPM carries up to 2.87 times what VTC does and up to 2.22 times what round robin
with LPM does; Jain's index (over service while all clients are active) is highest with VTC, then D2LPM,
Preble, LPM; with Preble the well-behaved wait up to 7.18 times as long as with D2LPM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from common import CATALOG, worker

from planner.fleet import Fleet, Policies, Pool
from planner.simulator.metrics import tenant_service
from planner.simulator.replay import Simulation, simulate
from planner.traffic.generate import judges, merged, preble, tree_of_thoughts
from planner.traffic.trace import Trace

LLM, GPU, WORKERS, CLIENTS, SECONDS = "meta-llama/Llama-3.1-8B", "a100-80g", 4, 4, 120.0
SCHEDULERS = {
    "round robin, lpm": Policies(prefix_cache=True, routing="round-robin", queue="lpm"),
    "e2, preble": Policies(prefix_cache=True, routing="e2", queue="preble"),
    "vtc": Policies(prefix_cache=True, routing="tenant-round-robin", queue="vtc"),
    "d2lpm": Policies(
        prefix_cache=True, routing="d2lpm", queue="dlpm", quantum_tokens=2000, worker_quantum_tokens=20_000
    ),
}
Floats = npt.NDArray[np.float64]


def trees(rng: np.random.Generator, rate_rps: float, case: str) -> Trace:
    question = (2000, 200) if case == "S2" else (500, 100)
    return tree_of_thoughts(
        round(rate_rps * SECONDS),
        rate_rps,
        branches=4 if case == "S1" else 2,
        question_tokens=question,
        rng=rng,
    )


def judged(rng: np.random.Generator, rate_rps: float, case: str) -> Trace:
    article = (1400, 200) if case == "S2" else (800, 200)
    return judges(
        round(rate_rps * SECONDS),
        rate_rps,
        dimensions=16 if case == "S1" else 2,
        article_tokens=article,
        rng=rng,
    )


def documents(rng: np.random.Generator, rate_rps: float, case: str) -> Trace:
    """S2: every prompt twice as long."""
    rate_rps *= 4 if case == "S1" else 1
    trace = preble("loogle", round(rate_rps * SECONDS), rate_rps, rng=rng)
    if case != "S2":
        return trace
    twice = (2 * trace.prefix_ids[:, None] + np.arange(2)).ravel()
    return replace(
        trace, input_tokens=2 * trace.input_tokens, prefix_ids=twice, prefix_offsets=2 * trace.prefix_offsets
    )


Make = Callable[[np.random.Generator, float, str], Trace]
# what a client asks, how many times a second, whether the end of a program counts or a first token
WORKLOADS: dict[str, tuple[Make, float, bool]] = {
    "QA": (documents, 3.0, False),
    "tree of thoughts": (trees, 1.5, True),
    "judge": (judged, 6.0, True),
}


def traffic(make: Make, rate_rps: float, case: str) -> Trace:
    clients = {0: case}
    return merged(
        {f"client {u}": make(np.random.default_rng(u), rate_rps, clients.get(u, "")) for u in range(CLIENTS)}
    )


def programs_s(trace: Trace, found: Simulation) -> tuple[Floats, npt.NDArray[np.int64]]:
    """From a program's arrival to its last answer, and whose it is. Its requests share an `arrival_s`."""
    _, program = np.unique(np.column_stack((trace.tenant, trace.arrival_s)), axis=0, return_inverse=True)
    end_s, tenant = np.zeros(program.max() + 1), np.zeros(program.max() + 1, np.int64)
    np.maximum.at(end_s, program, found.arrival_s + found.e2e_s)
    start_s = np.full(len(end_s), np.inf)
    np.minimum.at(start_s, program, trace.arrival_s)
    tenant[program] = trace.tenant
    return end_s - start_s, tenant


def main() -> None:
    pool = Pool("w", "mixed", worker(LLM, GPU, 1, budget=2048), WORKERS)
    for workload, (make, rate_rps, is_program) in WORKLOADS.items():
        for case in ("S1", "S2"):
            trace = traffic(make, rate_rps, case)
            for name, policies in SCHEDULERS.items():
                found = simulate(Fleet(CATALOG.llm(LLM), (pool,), policies), trace)
                waits_s, tenant = programs_s(trace, found) if is_program else (found.ttft_s, trace.tenant)
                p50_s, p99_s = np.quantile(waits_s[tenant > 0], (0.5, 0.99))
                tokens_per_s = (trace.input_tokens + trace.output_tokens).sum() / found.end_s
                service = tenant_service(found)
                shown = ", ".join(f"{rate:,.0f}" for rate in service.tokens_per_s)
                print(
                    f"{workload:16} {case} {name:16} hit {found.token_hit_frac:.2f} "
                    f"{tokens_per_s:8,.0f} tokens/s  Jain {service.jain_index:.3f}  "
                    f"others p50 {p50_s:6.1f} p99 {p99_s:6.1f} s  ({shown})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
