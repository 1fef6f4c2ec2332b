"""Compares D2LPM with VTC, Preble and round robin + LPM for traffic in which one client asks for too much.

    python benchmarks/papers/d2lpm.py [figure7 | figure1 | figure4 | figure8 to figure12]

Llama-3.1-8B on four A100 with the catalog's step times. Four clients send programs at the same rate for two
minutes, together more than the fleet carries. In case S1 the first client's programs are larger (trees of 340
requests in place of 30, judges of 16 dimensions in place of 2), or it asks four times as often (QA). In case
S2 its prompts are longer. VTC is run with round robin per client. The latency of a program is until its end,
that of QA until the first token.

Cao et al. 2025, Figure 7: D2LPM carries up to 2.87 times what VTC does and up to 2.22 times what round robin
with LPM does; Jain's index (over service while all clients are active) is highest with VTC, then D2LPM,
Preble, LPM; with Preble the well-behaved wait up to 7.18 times as long as with D2LPM.

The paper's other figures are of A10G with Llama-3.2-3B; here A10G has Llama-3.1-8B too. Their traffic is
drawn: Figure 1, one GPU: a larger quantum gives throughput, up to LPM's, and costs fairness. Figure 8:
conversations of four clients on four GPUs; 2 and 3 ask for too much, 2 for the first half of the time: LPM
starves 0 and 1, VTC has 2 and 3 wait up to 80 s, D2LPM serves all but 3 soon. Figure 9: trees of three
branches, client 0 with longer questions: D2LPM is done first, then VTC, LPM, Preble; service is shared
evenly. Figure 10: a larger quantum of workers gives throughput, and costs little fairness (Jain .855 to .83).
Figure 11, one GPU, 5 to 50 clients who ask for the same in all: DLPM's service rate is LPM's, VTC's is lower.
Figure 12, one GPU, clients of different kinds: with LPM trees delay all others; DLPM is done first, VTC is
fairer. Figure 4 is of a global scheduler for which all workers wait: matching and synchronising take about 40
% of a decode step with 8 workers. No worker waits for our router; the script prints its time per request, by
the number of workers and of waiting requests.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from benchmarks.generated_traffic import judges, merged, preble, tree_of_thoughts
from benchmarks.papers.common import CATALOG, worker
from planner.domain import KV_BLOCK_TOKENS
from planner.fleet import Fleet, Policies, Pool
from planner.runtime.live_routing import LiveFleet
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.simulator.tenant_service import tenant_service
from planner.traffic.trace import Trace

LLM, GPU, WORKERS, CLIENTS, SECONDS = "meta-llama/Llama-3.1-8B", "a100-80g", 4, 4, 120.0
D2LPM = Policies(
    prefix_cache=True, routing="d2lpm", queue="dlpm", quantum_tokens=2000, worker_quantum_tokens=20_000
)
SCHEDULERS = {
    "round robin, lpm": Policies(prefix_cache=True, routing="round-robin", queue="lpm"),
    "e2, preble": Policies(prefix_cache=True, routing="e2", queue="preble"),
    "vtc": Policies(prefix_cache=True, routing="tenant-round-robin", queue="vtc"),
    "d2lpm": D2LPM,
    "d2lpm by numbers": replace(D2LPM, queue="dlpm-turns"),
    "d2lpm at the router": replace(D2LPM, queue="dlpm-held"),
}
# Policies for one GPU, where there is nothing to route. "By numbers" needs a routing that looks at caches,
# because the numbers of prompts depend on what the router has sent.
ALONE = {
    "lpm": SCHEDULERS["round robin, lpm"],
    "vtc": replace(SCHEDULERS["vtc"], routing="round-robin"),
    "dlpm": replace(SCHEDULERS["d2lpm"], routing="round-robin"),
    "dlpm by numbers": replace(
        SCHEDULERS["d2lpm by numbers"], routing="prefix-affinity", quantum_tokens=8000
    ),
    "dlpm at the router": replace(SCHEDULERS["d2lpm at the router"], routing="round-robin"),
}
SMALL = "a10g-24g"
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
# A client's traffic, how many programs or questions it sends per second, and whether the latency is that of
# whole programs (else that of first tokens).
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
    """The time of each program from its arrival to its last answer [s], and its tenant. The requests of a
    program have the same `arrival_s` in the trace.
    """
    _, program = np.unique(np.column_stack((trace.tenant, trace.arrival_s)), axis=0, return_inverse=True)
    end_s, tenant = np.zeros(program.max() + 1), np.zeros(program.max() + 1, np.int64)
    np.maximum.at(end_s, program, found.arrival_s + found.e2e_s)
    start_s = np.full(len(end_s), np.inf)
    np.minimum.at(start_s, program, trace.arrival_s)
    tenant[program] = trace.tenant
    return end_s - start_s, tenant


def run(trace: Trace, policies: Policies, gpu: str = GPU, workers: int = WORKERS) -> Simulation:
    pool = Pool("w", "mixed", worker(LLM, gpu, 1, budget=2048), workers)
    return simulate(Fleet(CATALOG.llm(LLM), (pool,), policies), trace)


def tokens_per_s(trace: Trace, found: Simulation) -> float:
    return float((trace.input_tokens + trace.output_tokens).sum() / found.end_s)


def show(label: str, trace: Trace, found: Simulation, waits_s: Floats, tenant: npt.NDArray[np.int64]) -> None:
    """Prints the hits, tokens/s, the end of the run, Jain's index, and the mean of `waits_s` of each
    client.
    """
    means = ", ".join(f"{waits_s[tenant == u].mean():.1f}" for u in range(len(trace.tenants)))
    print(
        f"{label:34} hit {found.token_hit_frac:.2f} {tokens_per_s(trace, found):8,.0f} tokens/s, "
        f"done at {found.end_s:4.0f} s, Jain {tenant_service(found).jain_index:.3f}, waits {means} s",
        flush=True,
    )


def figure7() -> None:
    for workload, (make, rate_rps, is_program) in WORKLOADS.items():
        for case in ("S1", "S2"):
            trace = traffic(make, rate_rps, case)
            for name, policies in SCHEDULERS.items():
                found = run(trace, policies)
                waits_s, tenant = programs_s(trace, found) if is_program else (found.ttft_s, trace.tenant)
                p50_s, p99_s = np.quantile(waits_s[tenant > 0], (0.5, 0.99))
                service = tenant_service(found)
                shown = ", ".join(f"{rate:,.0f}" for rate in service.tokens_per_s)
                print(
                    f"{workload:16} {case} {name:16} hit {found.token_hit_frac:.2f} "
                    f"{tokens_per_s(trace, found):8,.0f} tokens/s  Jain {service.jain_index:.3f}  "
                    f"others p50 {p50_s:6.1f} p99 {p99_s:6.1f} s  ({shown})",
                    flush=True,
                )


def figure1() -> None:
    """One GPU, two clients with trees, one of which has more branches."""
    trace = merged(
        {
            f"client {u}": tree_of_thoughts(40, 0.5, branches=branches, rng=np.random.default_rng(u))
            for u, branches in enumerate((4, 2))
        }
    )
    rows = [(name, policies) for name, policies in ALONE.items() if name in ("lpm", "vtc")]
    for quantum in (500, 2000, 8000, 32_000, 128_000):
        rows.append((f"dlpm, quantum {quantum:,}", replace(ALONE["dlpm"], quantum_tokens=quantum)))
    for name, policies in rows:
        found = run(trace, policies, SMALL, 1)
        show(name, trace, found, *programs_s(trace, found))


def figure4() -> None:
    """CPU time of a decision, matched with every worker's cache, in the code that routes real engines."""
    trace = trees(np.random.default_rng(0), 1.0, "S2")
    ids, ends = trace.prefix_ids.tolist(), trace.prefix_offsets.tolist()
    blocks = trace.prefix_block_tokens // KV_BLOCK_TOKENS
    for workers in (1, 2, 4, 8, 16, 32):
        pool = Pool("w", "mixed", worker(LLM, GPU, 1, budget=2048), workers)
        live = LiveFleet(Fleet(CATALOG.llm(LLM), (pool,), replace(SCHEDULERS["d2lpm"], queue="fcfs")))
        for w in range(workers):
            live.note_up(w)
        asked = [
            (int(n), [blocks * name + k for name in ids[first:end] for k in range(blocks)])
            for n, first, end in zip(trace.input_tokens, ends[:-1], ends[1:], strict=True)
        ]
        start_s, parts_us = time.process_time(), []
        for i, (tokens, names) in enumerate(asked):
            live.send_to_worker(live.take_seat(tokens, 16, i * 1e-4, names=names), i * 1e-4)
            if i + 1 in (100, 1000, len(asked)):
                parts_us.append(f"{1e6 * (time.process_time() - start_s) / (i + 1):.0f}")
        shown = ", ".join(parts_us)
        print(f"{workers:2} workers: {shown} us per request of the first 100, 1,000, {len(asked):,} waiting")


def conversations(rng: np.random.Generator, count: int, start_s: Floats) -> Trace:
    """One to six turns of 20 to 200 tokens after a text of 200 that all share, answers of 50 to 350; the next
    turn comes 5 s after an answer, on average.
    """
    turns = rng.integers(1, 7, count)
    ids: list[npt.NDArray[np.int64]] = []
    inputs: list[int] = []
    outputs: list[int] = []
    arrivals: list[float] = []
    edges: list[tuple[int, int]] = []
    thinks_s: list[float] = []
    for k in range(count):
        length = 200
        for turn in range(turns[k]):
            length += int(rng.integers(20, 201))
            if turn > 0:
                edges.append((len(inputs), len(inputs) - 1))
            own = np.arange(12, -(-length // 16)) + 10_000 * (k + 1)
            # A last block that is not full has an id of its own, as the next turn fills it with other text.
            own[-1] += 5_000 * (length % 16 > 0)
            ids.append(np.concatenate((np.arange(12), own)))
            inputs.append(length)
            outputs.append(int(rng.integers(50, 351)))
            arrivals.append(start_s[k] + 1e-6 * turn)
            thinks_s.append(float(rng.exponential(5.0)) if turn > 0 else 0.0)
            length += outputs[-1]
    made = Trace(
        "conversations",
        np.array(arrivals),
        np.array(inputs),
        np.array(outputs),
        prefix_offsets=np.concatenate(([0], np.cumsum([len(one) for one in ids]))),
        prefix_ids=np.concatenate(ids),
        prefix_block_tokens=16,
        after=np.array(sorted(edges, key=lambda edge: edge[1])),
        think_s=np.array(thinks_s),
    )
    order = np.argsort(made.arrival_s, kind="stable")
    return made.select(order, arrival_s=made.arrival_s[order])


def figure8() -> None:
    """Clients 0 and 1 begin 0.15 conversations/s; 3 begins 2, 2 too until 150 s, then 0.15."""
    parts = {}
    for u, (early_rps, late_rps) in enumerate(((0.15, 0.15), (0.15, 0.15), (2.0, 0.15), (2.0, 2.0))):
        rng = np.random.default_rng(u)
        starts = [rng.uniform(0, 150, round(150 * early_rps)), rng.uniform(150, 300, round(150 * late_rps))]
        start_s = np.sort(np.concatenate(starts))
        parts[f"client {u}"] = conversations(rng, len(start_s), start_s)
    trace = merged(parts)
    for name, policies in SCHEDULERS.items():
        found = run(trace, policies, SMALL)
        is_late = trace.arrival_s > 150
        for label, chosen in (("first half", ~is_late), ("second half", is_late)):
            show(f"{name}, {label}", trace, found, found.ttft_s[chosen], trace.tenant[chosen])


def figure9() -> None:
    """Three clients with 30 trees of three branches, 120 requests each; those of client 0 are longer."""
    trace = merged(
        {
            f"client {u}": tree_of_thoughts(
                30,
                0.5,
                branches=3,
                question_tokens=(2000, 200) if u == 0 else (500, 100),
                rng=np.random.default_rng(u),
            )
            for u in range(3)
        }
    )
    for name, policies in SCHEDULERS.items():
        found = run(trace, policies, SMALL)
        show(name, trace, found, found.ttft_s, trace.tenant)


def figure10() -> None:
    trace = traffic(trees, 1.5, "S1")
    for quantum in (500, 2000, 5000, 10_000, 20_000, 40_000):
        found = run(trace, replace(SCHEDULERS["d2lpm"], worker_quantum_tokens=quantum))
        show(f"worker quantum {quantum:,}", trace, found, *programs_s(trace, found))


def figure11() -> None:
    """5 requests/s in all about documents of toolbench's lengths, of which each client has its own."""
    for clients in (5, 10, 20, 50):
        rngs = [np.random.default_rng(u) for u in range(clients)]
        each, rate_rps = 1500 // clients, 5.0 / clients
        made = [preble("toolbench", each, rate_rps, rng=rng) for rng in rngs]
        trace = merged({f"client {u}": one for u, one in enumerate(made)})
        for name, policies in ALONE.items():
            found = run(trace, policies, SMALL, 1)
            print(
                f"{clients:2} clients, {name:16} hit {found.token_hit_frac:.2f} "
                f"{tokens_per_s(trace, found):8,.0f} tokens/s",
                flush=True,
            )


def figure12() -> None:
    """A client each with trees, articles to judge, tools, conversations."""
    rng = [np.random.default_rng(u) for u in range(4)]
    trace = merged(
        {
            "trees": tree_of_thoughts(24, 0.2, branches=4, rng=rng[0]),
            "judges": judges(60, 0.5, dimensions=4, rng=rng[1]),
            "tools": preble("toolbench", 240, 2.0, rng=rng[2]),
            "conversations": conversations(rng[3], 120, np.sort(rng[3].uniform(0, 120, 120))),
        }
    )
    for name, policies in ALONE.items():
        found = run(trace, policies, SMALL, 1)
        show(name, trace, found, found.ttft_s, trace.tenant)


FIGURES: tuple[Callable[[], None], ...] = (
    figure7,
    figure1,
    figure4,
    figure8,
    figure9,
    figure10,
    figure11,
    figure12,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    figures = {each.__name__: each for each in FIGURES}
    parser.add_argument("figure", nargs="?", choices=list(figures), default="figure7")
    figures[parser.parse_args().figure]()


if __name__ == "__main__":
    main()
