"""Compares AIConfigurator's fleets of five mixtures of experts with ours, on the same step times.

    python benchmarks/aiconfigurator_mixtures.py [path/to/AzureLLMInferenceTrace_conv.csv]

Azure's conversation trace of 2023 at 20 requests/s on H200, TTFT 1 s, TPOT 50 ms. What AIConfigurator 0.12.0
answers (2026-11-21), to the trace's mean lengths, once for each LLM:

    aiconfigurator cli recommend --model-path LLM --system h200_sxm --backend vllm \\
        --target-request-rate 20 --isl 1155 --osl 211 --ttft 1000 --tpot 50

RECOMMENDED has its first aggregated fleet without data-parallel attention, and the GPUs of its very first
fleet, which has it. Its flags for vLLM are those of benchmarks/aiconfigurator_plan.py. Every fleet is
simulated with the step times of catalogs/latency and the host time of vLLM that plans have by default. Prints
Markdown tables for docs/evidence/aiconfigurator.md.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.aiconfigurator_plan import (
    AIC_MAX_NUM_BATCHED_TOKENS,
    AIC_MAX_NUM_SEQS,
    AZURE,
    Row,
    row,
    slo_at,
)
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.task import PlanQuestion, parse_task
from planner.errors import InfeasibleError
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.memory import worker_memory
from planner.reports.words import describe_fleet
from planner.search.evidence.certify import plan
from planner.traffic.scaling import rescale_trace
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

GPU, RATE_RPS, TTFT_S, TPOT_S = "h200-141g", 20.0, 1.0, 0.05
TIME_LIMIT_S = 120.0
COLUMNS = ("LLM", "fleet", "GPUs", "both kept", "TTFT mean / p50 / p90 / p99 [s]", "TPOT, the same [ms]")


@dataclass(frozen=True, slots=True)
class Recommended:
    """AIConfigurator's fleet: `count` workers of TP `tp`, with whole experts (`ep`) or sliced ones; and the
    GPUs of its first fleet, which has data-parallel attention.
    """

    llm: str
    count: int
    tp: int
    ep: bool
    first_gpus: int

    def fleet(self, catalog: Catalog) -> Fleet:
        llm, gpu, seqs = catalog.llm(self.llm), catalog.gpu(GPU), AIC_MAX_NUM_SEQS
        tokens = AIC_MAX_NUM_BATCHED_TOKENS
        kv_tokens = worker_memory(
            llm, gpu, self.tp, max_num_batched_tokens=tokens, max_num_seqs=seqs
        ).kv_tokens
        latency = catalog.step_latency(llm, gpu, self.tp, ep=self.ep)
        engine = question(catalog, self.llm, "p99").engine
        worker = WorkerType(
            gpu, self.tp, latency, kv_tokens, tokens, seqs, engine=engine, ep=self.ep
        ).with_llm(llm)
        return Fleet(llm, (Pool("mixed", "mixed", worker, self.count),), Policies(routing="jsq"))


RECOMMENDED = (
    Recommended("openai/gpt-oss-120b", 1, 2, False, 2),
    Recommended("Qwen/Qwen3-235B-A22B-FP8", 4, 4, True, 12),
    Recommended("deepseek-ai/DeepSeek-V3", 4, 8, False, 24),
    Recommended("moonshotai/Kimi-K2.5", 4, 8, False, 32),
    Recommended("MiniMaxAI/MiniMax-M2.5", 2, 4, True, 8),
)


def question(catalog: Catalog, llm: str, percentile: str) -> PlanQuestion:
    limits = {"ttft": {percentile: f"{TTFT_S} s"}, "tpot": {percentile: f"{TPOT_S} s"}}
    return parse_task({"llm": llm, "slo": limits, "fleet": {"gpus": [GPU]}}, catalog)


def planned(catalog: Catalog, llm: str, trace: Trace, percentile: str) -> tuple[Fleet | None, str]:
    """Our fleet for both limits at one percentile, None if there is none, and what its certificate says."""
    start_s = time.process_time()
    try:
        found = plan(question(catalog, llm, percentile), trace, catalog, time_limit_s=TIME_LIMIT_S)
    except InfeasibleError as error:
        return None, f"{llm}, {percentile}: {error}"
    cpu_s, proof = time.process_time() - start_s, found.certificate
    budgets = ", ".join(f"{pool.type.max_num_batched_tokens}" for pool in found.fleet.pools)
    return found.fleet, (
        f"{llm}, {percentile}: {describe_fleet(found.fleet)}, {budgets} tokens per step; {found.status}, "
        f"level 0 {'exact' if proof.level0_exact else 'not exhausted'}, bound {proof.bound:.2f} of "
        f"{found.fleet.price_usd_per_h:.2f} USD/h, {cpu_s:.1f} CPU s"
    )


def _workers(fleet: Fleet) -> str:
    roles = {"mixed": "", "prefill": " prefill", "decode": " decode"}
    return " + ".join(
        f"{pool.count} x TP {pool.type.tp}{' EP' * pool.type.ep}{roles[pool.role]}" for pool in fleet.pools
    )


def compare(catalog: Catalog, trace: Trace, how: str) -> None:
    slo, notes = slo_at(0.99, TTFT_S, TPOT_S), []
    print(f"\n{how}: {len(trace)} requests in {trace.duration_s:.0f} s, {trace.rate_rps:.2f} requests/s\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for theirs in RECOMMENDED:
        fleet = theirs.fleet(catalog)
        rows: list[Row] = [row(f"AIConfigurator: {_workers(fleet)}", fleet, trace, slo=slo)]
        for percentile in ("p90", "p99"):
            own, note = planned(catalog, theirs.llm, trace, percentile)
            notes.append(note)
            if own is not None:
                rows.append(row(f"ours, {percentile}: {_workers(own)}", own, trace, slo=slo))
        for line in rows:
            name, gpus, _, *rest = line.cells()
            print(f"| {theirs.llm.split('/')[-1]} | {name} | {gpus} | {' | '.join(rest)} |", flush=True)
    print()
    for note in notes:
        print(f"- {note}")


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
    compare(
        catalog, rescale_trace(trace, RATE_RPS, scale="compress", rng=np.random.default_rng(0)), "compress"
    )
    compare(catalog, rescale_trace(trace, RATE_RPS, rng=np.random.default_rng(0)), "superpose, seed 0")


if __name__ == "__main__":
    main()
