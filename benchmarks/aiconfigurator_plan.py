"""Compares AIConfigurator's fleet for the Azure conversation trace with ours, on the same step times.

    python benchmarks/aiconfigurator_plan.py [path/to/AzureLLMInferenceTrace_conv.csv]

Llama-3.1-70B on H100 only, 20 requests/s, limits of 2 s to the first token and 100 ms per output token. The
trace (Azure 2023, CC-BY 4.0) is read from ../shared/data/traces beside the checkout unless a path is given,
and brought to 20 requests/s in both ways: by a faster clock (compress) and by more users (superpose).

AIConfigurator 0.12.0 takes one prompt length and one output length; for the trace's means its `recommend`
answers three TP 4 workers, and its rules for vLLM write the engine flags below. Our fleets come from
`planner.search.evidence.certify.plan`. Every fleet is simulated with the step times of catalogs/latency,
which are fitted to AIConfigurator's own kernel tables. Prints one Markdown table per scaling;
docs/evidence/aiconfigurator.md discusses them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.task import parse_task
from planner.domain import Limit, Slo
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.memory import worker_memory
from planner.reports.fact_sentences import fact_sentence
from planner.reports.words import describe_fleet
from planner.search.evidence.certify import plan
from planner.simulator.measured_values import measured_mask, percentile_s, request_values_s
from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import judge_slo
from planner.traffic.scaling import rescale_trace
from planner.traffic.trace import Trace, measured_window
from planner.traffic.trace_reading import read_trace

AZURE = Path(__file__).parents[2] / "shared" / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv"
LLM, GPU, TP, RATE_RPS = "meta-llama/Llama-3.1-70B", "h100-80g", 4, 20.0
TTFT_S, TPOT_S = 2.0, 0.1
SEEDS = range(5)  # Of superpose.

# AIConfigurator's flags, by generator/rule_plugin/vllm.rule of its version 0.12.0, for the trace's mean
# lengths.
ISL_TOKENS, OSL_TOKENS = 1155, 211
AIC_MAX_NUM_SEQS = 512  # For every batch below 512.
AIC_MAX_NUM_BATCHED_TOKENS = AIC_MAX_NUM_SEQS + ISL_TOKENS + 1500
AIC_MAX_MODEL_LEN = ISL_TOKENS + OSL_TOKENS + 1500

COLUMNS = ("fleet", "GPUs", "USD/h", "both kept", "TTFT mean / p50 / p90 / p99 [s]", "TPOT, the same [ms]")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison; percentiles are over the requests that were served."""

    name: str
    fleet: Fleet
    attainment_frac: float  # Requests within both limits over requests counted.
    ttft_s: tuple[float, ...]  # Mean, p50, p90, p99.
    tpot_s: tuple[float, ...]
    is_steady: bool

    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            f"{self.fleet.gpus}",
            f"{self.fleet.price_usd_per_h:.2f}",
            f"{100 * self.attainment_frac:.1f} %" + ("" if self.is_steady else ", backlog grows"),
            " / ".join(f"{value:.2f}" for value in self.ttft_s),
            " / ".join(f"{1e3 * value:.0f}" for value in self.tpot_s),
        )


def slo_at(percentile_frac: float, ttft_s: float = TTFT_S, tpot_s: float = TPOT_S) -> Slo:
    return Slo((Limit("ttft", percentile_frac, ttft_s), Limit("tpot", percentile_frac, tpot_s)))


SLO = slo_at(0.99)


def aiconfigurator_fleet(catalog: Catalog, workers: int, *, routing: str = "jsq") -> Fleet:
    """Mixed TP 4 workers with the flags of AIConfigurator's vLLM rule, on our step times and KV cache."""
    llm, gpu = catalog.llm(LLM), catalog.gpu(GPU)
    tokens, seqs = AIC_MAX_NUM_BATCHED_TOKENS, AIC_MAX_NUM_SEQS
    kv_tokens = worker_memory(llm, gpu, TP, max_num_batched_tokens=tokens, max_num_seqs=seqs).kv_tokens
    worker = WorkerType(gpu, TP, catalog.step_latency(llm, gpu, TP), kv_tokens, tokens, seqs).with_llm(llm)
    return Fleet(llm, (Pool("mixed", "mixed", worker, workers),), Policies(routing=routing))


def row(name: str, fleet: Fleet, trace: Trace, *, refused: int = 0, slo: Slo = SLO) -> Row:
    """Simulate a fleet; `refused` requests never reached it and count as failures."""
    simulation = simulate(fleet, trace, limits=slo.limits)
    verdict = judge_slo(simulation, slo)
    served = int(measured_mask(simulation).sum())

    def spread_s(metric: str) -> tuple[float, ...]:
        values_s = request_values_s(simulation, "ttft" if metric == "ttft" else "tpot")
        return (float(values_s.mean()), *(percentile_s(values_s, share) for share in (0.5, 0.9, 0.99)))

    attainment = verdict.attainment_frac * served / (served + refused)
    return Row(name, fleet, attainment, spread_s("ttft"), spread_s("tpot"), verdict.is_steady)


def accepted(trace: Trace) -> tuple[Trace, int]:
    """The requests that fit into AIConfigurator's max-model-len, and how many others the window holds."""
    fits = trace.input_tokens + trace.output_tokens <= AIC_MAX_MODEL_LEN
    start_s, end_s = measured_window(trace)
    refused = ~fits & (trace.arrival_s >= start_s) & (trace.arrival_s <= end_s)
    return trace.select(np.flatnonzero(fits)), int(refused.sum())


def planned(catalog: Catalog, trace: Trace, percentile: str) -> tuple[Fleet, str]:
    """Our fleet for both limits at one percentile, and what its certificate says."""
    limits = {"ttft": {percentile: f"{TTFT_S} s"}, "tpot": {percentile: f"{TPOT_S} s"}}
    task = parse_task({"llm": LLM, "slo": limits, "fleet": {"gpus": [GPU]}}, catalog)
    start_s = time.process_time()
    found = plan(task, trace, catalog, time_limit_s=600.0)
    cpu_s = time.process_time() - start_s
    proof = found.certificate
    one_fewer = "; ".join(f"one {item.pool} worker fewer: {fact_sentence(item)}" for item in proof.neighbours)
    budgets = ", ".join(f"{pool.type.max_num_batched_tokens}" for pool in found.fleet.pools)
    return found.fleet, (
        f"{percentile}: {describe_fleet(found.fleet)}, {budgets} tokens per step; {found.status}, level 0 "
        f"{'exact' if proof.level0_exact else 'not exhausted'}, beyond it "
        f"{'exact' if proof.beyond_exact else 'not exhausted'}, bound {proof.bound:.2f} USD/h, "
        f"{proof.simulations} simulations, {cpu_s:.1f} CPU s; {one_fewer}"
    )


def compare(catalog: Catalog, trace: Trace, how: str) -> Fleet:
    """Print the table of one scaling; returns our fleet for p99."""
    short, refused = accepted(trace)
    beyond = 1 - len(short) / len(trace)
    three, four = aiconfigurator_fleet(catalog, 3), aiconfigurator_fleet(catalog, 4)
    rows = [
        row("AIConfigurator, 3 x TP 4, every request admitted", three, trace),
        row("- round robin", aiconfigurator_fleet(catalog, 3, routing="round-robin"), trace),
        row(f"- without the {100 * beyond:.1f} % it refuses", three, short),
        row("- these counted as failures", three, short, refused=refused),
        row("4 x TP 4, same flags", four, trace),
    ]
    notes = []
    for percentile in ("p90", "p99"):
        fleet, note = planned(catalog, trace, percentile)
        rows.append(row(f"ours, both limits at {percentile}", fleet, trace))
        notes.append(note)
    print(f"\n{how}: {len(trace)} requests in {trace.duration_s:.0f} s, {trace.rate_rps:.2f} requests/s\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for line in rows:
        print(f"| {' | '.join(line.cells())} |")
    print()
    for note in notes:
        print(f"- {note}")
    return fleet


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="?", default=AZURE)
    path = parser.parse_args().trace
    if not path.exists():
        print(f"skipped: {path} is missing; give the path of AzureLLMInferenceTrace_conv.csv")
        return
    catalog, trace = read_catalog(), read_trace(path)
    print(
        f"{trace.name}: {len(trace)} requests in {trace.duration_s:.0f} s, {trace.rate_rps:.2f} requests/s, "
        f"mean lengths {trace.input_tokens.mean():.0f} / {trace.output_tokens.mean():.0f} tokens\n"
        f"AIConfigurator's flags: --max-num-seqs {AIC_MAX_NUM_SEQS} "
        f"--max-num-batched-tokens {AIC_MAX_NUM_BATCHED_TOKENS} --max-model-len {AIC_MAX_MODEL_LEN}"
    )
    compare(
        catalog, rescale_trace(trace, RATE_RPS, scale="compress", rng=np.random.default_rng(0)), "compress"
    )
    by_seed = [rescale_trace(trace, RATE_RPS, rng=np.random.default_rng(seed)) for seed in SEEDS]
    ours = compare(catalog, by_seed[0], "superpose, seed 0")
    print(f"\nboth kept on superposed traffic, seeds {SEEDS[0]} to {SEEDS[-1]}:\n")
    for name, fleet in (("AIConfigurator, 3 x TP 4", aiconfigurator_fleet(catalog, 3)), ("ours, p99", ours)):
        kept = [row(name, fleet, traffic).attainment_frac for traffic in by_seed]
        print(f"- {name}: {', '.join(f'{100 * frac:.1f} %' for frac in kept)}")


if __name__ == "__main__":
    main()
