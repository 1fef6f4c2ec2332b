"""Simulates Splitwise's Figures 4, 14 to 17 and 20, its batch job and its tables of designs, on Splitwise's
own step times.

    python benchmarks/papers/splitwise.py WHAT PROFILES TRACES [--honest]

PROFILES and TRACES are as in benchmarks/splitwise_provisioning.py, which also has the requests, machines and
prices. KV moves layer by layer over 400 Gbit/s per machine (200 if one of the two has A100); prompts below
512 tokens move after their prefill, as in the paper's section IV-C. (Its public simulator always moves KV
after the prefill.) Iso-power clusters have the same power, iso-cost clusters the same price.

figure4   the share of time in which a machine's batches hold at most so many active tokens, 2 requests/s
figure14  the time that a pair of machines adds to a lone request, by its prompt, with KV after the prefill
and
          layer by layer; on the code trace, one request at a time, also the time added to the second token
          and to the whole request (Figure 15)
figure16  latencies by load on the paper's iso-power clusters
figure17  as figure4 on iso-power clusters, conversation, 70 and 130 requests/s, by pool
figure20  conversation on the clusters found for code; Llama-70B on those found for BLOOM-176B
repurpose one workload, then the other, on the cluster found for the first: latencies of the last eight
          minutes, with machines that join the other pool after a minute in the mixed pool, and without
engines   the same with vLLM's batching, whose engines restart to change their role
batch     no limits on latency: requests/s per USD at a load that no cluster can follow
tables    iso-power, iso-cost and iso-throughput designs for conversation and code: requests/s, cost and power
          relative to the paper's baselines
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import splitwise_provisioning as provisioning
from benchmarks.papers.common import CATALOG, worker
from benchmarks.peers import splitwise as peer
from benchmarks.peers.compare import BARE_GPU, NO_STEPS, bare_llm
from benchmarks.splitwise_provisioning import DESIGNS, HARDWARE, POWER, USD_PER_H, made_up, on_a100, show
from planner.documents.catalog import read_catalog
from planner.fleet import Fleet, Network, Policies, Pool, WorkerType
from planner.papers.splitwise_search import (
    MachineDesign,
    TimesAlone,
    even_splits,
    find_cheapest_splits,
    keeps_slowdowns,
)
from planner.simulator.layout import run_seconds
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

LAYERS = {"bloom-176b": 70, "llama2-70b": 80}
ACTIVE_TOKENS = (1, 5, 15, 20, 50, 100, 500, 2000)
# Machines for prompts and for tokens: iso-power clusters for conversation, of the paper's Figure 16b.
CLUSTERS = {"Baseline-H100": (40, 0), "HH": (25, 15)}
# The same for both workloads, of the paper's section VI-B.
ISO_POWER = {
    "code": {"Baseline-A100": (70, 0), "Baseline-H100": (40, 0), "AA": (55, 15), "HH": (35, 5)},
    "conv": {"Baseline-A100": (70, 0), "Baseline-H100": (40, 0), "HA": (25, 26), "HH": (25, 15)},
}
TOLERANCE_FRAC = 0.02


@dataclass(frozen=True)
class Given:
    """The files of measured step times and traces, and the settings of a run; `honest` takes decode times
    that are fitted to the measurements, in place of those of splitwise-sim.
    """

    profiles: Path
    traces: Path
    honest: bool
    model: str = "bloom-176b"
    repurpose_after_s: float = np.inf


def machine(given: Given, kind: str) -> WorkerType:
    steps_of = peer.honest_steps if given.honest else peer.lookup_steps
    weights_bytes, kv_bytes = peer.MODELS[given.model]
    kv_tokens = (peer.GPUS * peer.GPU_BYTES - weights_bytes) // kv_bytes
    form = steps_of(given.profiles, given.model, HARDWARE[kind], peer.GPUS)
    return WorkerType(BARE_GPU, 1, NO_STEPS, kv_tokens, peer.MAX_TOKENS, peer.MAX_TASKS, form=form)


def cluster(given: Given, name: str, counts: tuple[int, int]) -> Fleet:
    prompt, token = DESIGNS[name]
    types = [machine(given, kind) for kind in (prompt, token) if kind]
    bandwidth = 25e9 if "A" in (prompt, token) else 50e9
    network = Network(bandwidth, transfer="layerwise", layerwise_tokens=512, is_shared=False)
    layers = LAYERS[given.model]
    llm = replace(bare_llm(peer.MODELS[given.model][1] / layers), layers=layers)
    fleet = MachineDesign(name, types[0], types[1] if token else None).fleet(llm, network, *counts)
    if not token:
        return fleet
    return replace(fleet, policies=replace(fleet.policies, repurpose_after_s=given.repurpose_after_s))


def active_tokens(simulation: Simulation, workers: Sequence[int]) -> npt.NDArray[np.float64]:
    """The shares of the busy seconds of these machines in batches of at most each of ACTIVE_TOKENS."""
    runs = simulation.runs[(simulation.runs["prefill_tokens"] >= 0) & (simulation.runs["steps"] > 0)]
    runs = runs[np.isin(runs["worker"], workers)]
    seconds, tokens = run_seconds(runs), runs["decodes"] + runs["prefill_tokens"]
    shares = [float(seconds[tokens <= most].sum() / seconds.sum()) for most in ACTIVE_TOKENS]
    return np.asarray(shares)


def print_shares(title: str, rows: Mapping[str, npt.NDArray[np.float64]]) -> None:
    print(f"{title}: % of the time at most so many active tokens")
    print(" " * 26 + "".join(f"{tokens:7d}" for tokens in ACTIVE_TOKENS))
    for name, shares in rows.items():
        print(f"{name:26}" + "".join(f"{100 * share:7.1f}" for share in shares))


def figure4(given: Given) -> None:
    rows = {}
    for model in LAYERS:
        for workload in ("code", "conv"):
            of = replace(given, model=model)
            fleet = cluster(of, "Baseline-H100", (1, 0))
            result = simulate(fleet, made_up(given.traces, workload, 2.0, 0, 10.0), record=True)
            rows[f"{model} {workload}"] = active_tokens(result, [0])
    print_shares("Figure 4, one DGX-H100, 2 requests/s", rows)


def paired(given: Given, name: str, transfer: str) -> Fleet:
    """A prompt machine and a token machine; KV moves by the paper's rule, or all of it after the prefill."""
    fleet = cluster(given, name, (1, 1))
    if transfer == "serialised":
        return replace(fleet, network=replace(fleet.network, transfer="serialised"))
    return fleet


def apart(inputs: npt.NDArray[np.int64], outputs: npt.NDArray[np.int64]) -> Trace:
    """Requests so far apart that each is served alone."""
    return Trace("alone", 1000 * np.arange(len(inputs), dtype=np.float64), inputs, outputs)


def figure14(given: Given) -> None:
    prompts = np.array([128, 256, 512, 1024, 1536, 2048])
    sizes = apart(prompts, np.full(len(prompts), 2))
    drawn = made_up(given.traces, "code", 2.0, 0)
    code = apart(drawn.input_tokens, np.maximum(drawn.output_tokens, 2))
    for model in LAYERS:
        of = replace(given, model=model)
        for name, base in (("AA", "Baseline-A100"), ("HH", "Baseline-H100")):
            alone = [simulate(cluster(of, base, (1, 0)), trace) for trace in (sizes, code)]
            for transfer in ("serialised", "layerwise"):
                found = [simulate(paired(of, name, transfer), trace) for trace in (sizes, code)]
                added_s, of_code_s = (each.e2e_s - one.e2e_s for each, one in zip(found, alone, strict=True))
                rows = [f"{n}: {1e3 * t:.1f}" for n, t in zip(prompts, added_s, strict=True)]
                print(
                    f"{model} {name} {transfer:10} {', '.join(rows)} ms, at most "
                    f"{(added_s / alone[0].ttft_s).max():.1%} of a prompt's time; code: E2E "
                    f"{of_code_s.sum() / alone[1].e2e_s.sum():+.2%}, second token "
                    f"{(of_code_s / alone[1].tpot_s).mean():+.1%}"
                )


def figure16(given: Given) -> None:
    for workload, clusters in ISO_POWER.items():
        for rate_rps in (40.0, 70.0, 100.0, 130.0):
            trace, rows = made_up(given.traces, workload, rate_rps, 0), []
            for name, counts in clusters.items():
                found = simulate(cluster(given, name, counts), trace)
                values = [np.nanquantile(each, 0.9) for each in (found.ttft_s, found.tpot_s, found.e2e_s)]
                rows.append(f"{name} {values[0]:.2f} {1e3 * values[1]:.0f} {values[2]:.1f}")
            print(f"{workload} {rate_rps:3.0f}/s: P90 of TTFT [s], TBT [ms], E2E [s]: {'; '.join(rows)}")


def figure17(given: Given) -> None:
    for rate_rps in (70.0, 130.0):
        rows = {}
        for name, (p, t) in CLUSTERS.items():
            fleet = cluster(given, name, (p, t))
            result = simulate(fleet, made_up(given.traces, "conv", rate_rps, 0), record=True)
            busy = result.worker_busy_s / result.end_s
            for pool, workers in (("prompt" if t else "all", range(p)), ("token", range(p, p + t))):
                if len(workers):
                    label = f"{name} {pool}, busy {100 * busy[list(workers)].mean():.0f} %"
                    rows[label] = active_tokens(result, workers)
        print_shares(f"Figure 17, conversation, {rate_rps:g} requests/s", rows)


@cache
def holds(given: Given, name: str, counts: tuple[int, int], workload: str, rate_rps: float) -> bool:
    trace = made_up(given.traces, workload, rate_rps, 0)
    alone = provisioning.on_a100 if given.model == "bloom-176b" else partial(on_a100_of, given.model)
    preset = read_catalog().slos["splitwise"].slowdowns
    assert preset is not None
    return keeps_slowdowns(cluster(given, name, counts), trace, preset.limits, alone(given.profiles)(trace))


def on_a100_of(model: str, profiles: Path) -> TimesAlone:
    """The reference of another LLM: `provisioning.on_a100` is BLOOM's."""
    before, provisioning.MODEL = provisioning.MODEL, model
    try:
        return on_a100(profiles)
    finally:
        provisioning.MODEL = before


def most(
    given: Given, name: str, splits: Sequence[tuple[int, int]], workload: str, grid_rps: float
) -> tuple[float, tuple[int, int]]:
    """The highest rate of the grid that one of the splits carries, and that split."""
    best, chosen = 0.0, splits[0]
    for counts in splits:
        while holds(given, name, counts, workload, best + grid_rps):
            best, chosen = best + grid_rps, counts
    return best, chosen


def price(name: str, table: Mapping[str, float]) -> list[float]:
    return [table[kind] for kind in DESIGNS[name] if kind]


def spent(name: str, counts: tuple[int, int], table: Mapping[str, float]) -> float:
    return sum(cost * count for cost, count in zip(price(name, table), counts, strict=False))


def iso(
    given: Given, workload: str, table: Mapping[str, float], grid_rps: float
) -> dict[str, tuple[Any, ...]]:
    """The rate that each design carries with the power or price (`table`) of 40 DGX-H100, and its counts."""
    return {
        name: most(given, name, even_splits(40 * table["H"], price(name, table), most=16), workload, grid_rps)
        for name in DESIGNS
    }


def holds_at_70(given: Given, name: str, workload: str, p: int, t: int) -> bool:
    return holds(given, name, (p, t), workload, 70.0)


def tables(given: Given) -> None:
    for workload in ("conv", "code"):
        for title, table in (("iso-power", POWER), ("iso-cost", USD_PER_H)):
            found = iso(given, workload, table, 5.0)
            print(f"{workload}, {title}: requests/s (over Baseline-A100, -H100), cost, power")
            for name, (rate_rps, counts) in found.items():
                over = [rate_rps / found[base][0] for base in ("Baseline-A100", "Baseline-H100")]
                print(
                    f"  {name:14}{rate_rps:6g} ({over[0]:.2f}, {over[1]:.2f}), {show(counts)}, "
                    f"{spent(name, counts, USD_PER_H):.0f} USD/h, {spent(name, counts, POWER):.0f}"
                )
        for title, table in (("least cost", USD_PER_H), ("least power", POWER)):
            print(f"{workload}, iso-throughput, 70 requests/s: {title} (over Baseline-H100)")
            values = {}
            for name in DESIGNS:
                costs = price(name, table)
                found_here = find_cheapest_splits(
                    partial(holds_at_70, given, name, workload),
                    costs[0],
                    costs[-1],
                    most=160,
                    splits=len(costs) > 1,
                )
                values[name] = found_here.value, found_here.counts[0]
            for name, (value, counts) in values.items():
                print(f"  {name:14}{value:8.1f} ({value / values['Baseline-H100'][0]:.2f}), {show(counts)}")


def figure20(given: Given) -> None:
    code, conversation = (iso(given, workload, POWER, 5.0) for workload in ("code", "conv"))
    print(
        "Figure 20a, conversation on iso-power clusters found for code: requests/s, repurposed, of their own"
    )
    for name, (own_rps, _) in conversation.items():
        rate_rps, _ = most(given, name, [code[name][1]], "conv", 5.0)
        moving = replace(given, repurpose_after_s=60.0)
        repurposed_rps, _ = most(moving, name, [code[name][1]], "conv", 5.0)
        print(f"  {name:14}{rate_rps:6g}, {repurposed_rps:g} of {own_rps:g}, {show(code[name][1])}")
    llama = replace(given, model="llama2-70b")
    print(
        "Figure 20b, conversation: Llama-70B on iso-power clusters found for BLOOM-176B: requests/s of each"
    )
    for name, (bloom_rps, counts) in conversation.items():
        rate_rps, _ = most(llama, name, [counts], "conv", 5.0)
        print(f"  {name:14}{rate_rps:6g}, BLOOM {bloom_rps:g}, {show(counts)}")


def shifted(given: Given, workloads: Sequence[str], rates_rps: Sequence[float], half_s: float) -> Trace:
    """One workload, then the other, each for so long."""
    halves = [
        made_up(given.traces, workload, rate_rps, 0, half_s / 60)
        for workload, rate_rps in zip(workloads, rates_rps, strict=True)
    ]
    input_tokens, output_tokens = (
        np.concatenate([getattr(half, name) for half in halves]) for name in ("input_tokens", "output_tokens")
    )
    arrival_s = np.concatenate([half_s * i + half.arrival_s for i, half in enumerate(halves)])
    return Trace(" then ".join(workloads), arrival_s, input_tokens, output_tokens)


def repurpose(given: Given) -> None:
    """HH, whose machines are alike, on its cluster for the first workload and on that for the second."""
    for first, second in (("conv", "code"), ("code", "conv")):
        trace = shifted(given, (first, second), (90.0, 90.0), 600.0)
        late = trace.arrival_s > 720.0
        print(f"{trace.name}, 90 requests/s, ten minutes each; P90 of the last eight, P99 of longest gaps")
        for name, counts, after_s in (
            (f"for {first}", ISO_POWER[first]["HH"], np.inf),
            ("  repurposed after 60 s", ISO_POWER[first]["HH"], 60.0),
            (f"for {second}", ISO_POWER[second]["HH"], np.inf),
        ):
            found = simulate(cluster(replace(given, repurpose_after_s=after_s), "HH", counts), trace)
            ttft_s, tpot_s, e2e_s = (
                np.nanquantile(each[late], 0.9) for each in (found.ttft_s, found.tpot_s, found.e2e_s)
            )
            gap_s = np.nanquantile(found.tbt_max_s[late], 0.99)
            print(
                f"  {name:24} {show(counts)}: TTFT {ttft_s:.2f} s, TBT {1e3 * tpot_s:.0f} ms, "
                f"E2E {e2e_s:.1f} s, gaps {1e3 * gap_s:.0f} ms"
            )


def engines(given: Given) -> None:
    """Llama-3.1-70B on vLLM's batching, eight engines of four H100, which restart in a minute."""
    trace = shifted(given, ("conv", "code"), (30.0, 20.0), 900.0)
    late = trace.arrival_s > 1200.0
    kind = worker("llama-3.1-70b", "h100-80g", 4, budget=8192)
    print("conv, 30 requests/s, then code, 20, a quarter of an hour each; P90 of the last ten minutes")
    for name, (p, d), policies in (
        ("static", (3, 5), Policies()),
        ("flip, idle for 60 s", (3, 5), Policies(pools="flip", flip_restart_s=60.0)),
        ("repurpose, 60 s", (3, 5), Policies(pools="repurpose", repurpose_after_s=60.0, flip_restart_s=60.0)),
        ("repurpose, 10 s", (3, 5), Policies(pools="repurpose", repurpose_after_s=10.0, flip_restart_s=60.0)),
        ("static", (6, 2), Policies()),
    ):
        pools = (Pool("p", "prefill", kind, p), Pool("d", "decode", kind, d))
        found = simulate(Fleet(CATALOG.llm("llama-3.1-70b"), pools, policies, Network(50e9)), trace)
        ttft_s, tpot_s, e2e_s = (
            np.nanquantile(each[late], 0.9) for each in (found.ttft_s, found.tpot_s, found.e2e_s)
        )
        print(f"  {name:20} {p}P+{d}D: TTFT {ttft_s:.2f} s, TPOT {1e3 * tpot_s:.0f} ms, E2E {e2e_s:.1f} s")


def batch(given: Given) -> None:
    """Two minutes of 400 requests/s, served until the last is done. The rate is that of the middle 80 % of
    requests.
    """
    print("batch job, conversation, 400 requests/s for 2 minutes: requests/s done, per USD")
    found = iso(given, "conv", POWER, 5.0)
    for name, (_, counts) in found.items():
        result = simulate(cluster(given, name, counts), made_up(given.traces, "conv", 400.0, 0))
        done_s = np.sort((result.arrival_s + result.e2e_s)[result.status == 0])
        middle = slice(len(done_s) // 10, 9 * len(done_s) // 10)  # Without the start and the end of the run.
        rate_rps = (middle.stop - middle.start) / (done_s[middle.stop - 1] - done_s[middle.start])
        per_usd = rate_rps / spent(name, counts, USD_PER_H)
        print(f"  {name:14}{rate_rps:7.1f}, {per_usd:.3f} requests/s per USD/h, {show(counts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Splitwise's figures on its own step times.")
    commands = {
        one.__name__: one
        for one in (figure4, figure14, figure16, figure17, figure20, repurpose, engines, batch, tables)
    }
    parser.add_argument("what", choices=tuple(commands))
    parser.add_argument("profiles", type=Path)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--honest", action="store_true", help="decode times fitted to the measurements")
    arguments = parser.parse_args()
    start = time.process_time()
    commands[arguments.what](Given(arguments.profiles, arguments.traces, arguments.honest))
    print(f"{time.process_time() - start:.1f} CPU-s")


if __name__ == "__main__":
    main()
