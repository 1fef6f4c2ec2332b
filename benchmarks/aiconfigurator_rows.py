"""Our error beside AIConfigurator's on the same measured runs, by LLM and GPU (DIR as for reality.py).

    pip install -e '.[silicon]' aiconfigurator==0.12.0
    python benchmarks/aiconfigurator_rows.py DIR > docs/evidence/aiconfigurator-rows.md

Our predictions are those of `benchmarks/reality.py`. AIConfigurator's are those of `aiconfigurator cli
estimate` for an aggregated worker with the same GPUs, checkpoint and expert parallelism, with its newest
tables for the run's engine. Its input are means of the run: prompt tokens, those of them that are cached,
output tokens, drafts, and requests in flight. It takes no rate of arrival, so for open loops the requests in
flight are the rate times the measured E2E. LLMs that are not in its list are given as a config.json of their
shapes. Experts that it cannot slice are kept whole. A run that it refuses counts for neither of the two, and
is named. Fleets behind a router (llm-d) are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from pathlib import Path

import numpy as np

from benchmarks.reality import BACKENDS, CHECKPOINTS, SOURCES, Engines, LeftOut, Load, Row, Run, found
from planner.documents.catalog import read_catalog

SYSTEMS = {  # Our GPU -> AIConfigurator's name of it.
    "h100-80g": "h100_sxm",
    "h200-141g": "h200_sxm",
    "b200-180g": "b200_sxm",
    "b300-288g": "b300_sxm",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
ALIKE = {  # The run's LLM -> an LLM of AIConfigurator's list with the same shapes and formats.
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.3-70B-Instruct-FP4": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": "Qwen/Qwen3-235B-A22B-FP8",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-ai/DeepSeek-V3",
    "Qwen/Qwen3.5-397B-A17B-FP8": "Qwen/Qwen3.5-397B-A17B",
}
MODES = {  # Formats of LLMs whose entry in ALIKE has 16 bits.
    "nvidia/Llama-3.1-8B-Instruct-FP8": {"gemm_quant_mode": "fp8", "kvcache_quant_mode": "fp8"},
    "nvidia/Llama-3.3-70B-Instruct-FP4": {"gemm_quant_mode": "nvfp4", "kvcache_quant_mode": "fp8"},
    "Qwen/Qwen3.5-397B-A17B-FP8": {"gemm_quant_mode": "fp8_block", "moe_quant_mode": "fp8_block"},
}
# LLMs that are not in AIConfigurator's list: layers, hidden size, heads, KV heads, feed-forward size,
# vocabulary, experts, experts that are active for a token.
LLAMAS = {
    "meta-llama/Llama-2-7b-hf": (32, 4096, 32, 32, 11008, 32000, 0, 0),
    "meta-llama/Llama-2-70b-hf": (80, 8192, 64, 8, 28672, 32000, 0, 0),
    "codellama/CodeLlama-34b-Instruct-hf": (48, 8192, 64, 8, 22016, 32000, 0, 0),
    "mistralai/Mixtral-8x7B-v0.1": (32, 4096, 32, 8, 14336, 32000, 8, 2),
}
FIGURES = (  # Figures of a run in the order of the table; a source has the mean or the median of each.
    ("ttft", "mean"),
    ("ttft", "p50"),
    ("tpot", "mean"),
    ("tpot", "p50"),
    ("itl", "p50"),
    ("e2e", "mean"),
    ("e2e", "p50"),
    ("throughput", "mean"),
)
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E", "throughput": "tokens/s"}
FITTED = {  # Source of runs -> which of our constants were fitted to them.
    "inference-perf": "host time and front end",
    "ml-energy": "host time; what older vLLM takes longer",
    "llmservingsim": "front end; all-reduce of RTX PRO 6000",
    "silicon-sample": "what older vLLM takes longer; medians on Blackwell; the tokeniser",
    "sglang": "launches of latent attention",
}
FLEETS = "llm-d"  # These runs are of several workers behind a router; AIConfigurator estimates one worker.
# From a run and its load to its figures by quantity, in seconds or tokens per second.
Estimate = Callable[[Run, Load], Mapping[str, float]]


@dataclass(frozen=True)
class Pair:
    """One measured figure, with our error and AIConfigurator's as shares of it."""

    run: Run
    quantity: str
    statistic: str
    ours_frac: float
    theirs_frac: float


@dataclass(frozen=True)
class Line:
    """A line of the table: the mean absolute errors of both over the runs of one LLM on one GPU."""

    source: str
    llm: str
    gpu: str
    metric: str
    runs: int
    ours_frac: float
    theirs_frac: float

    @property
    def is_worse(self) -> bool:
        return self.ours_frac > self.theirs_frac

    def cells(self) -> tuple[str, ...]:
        ours, theirs = (f"{100 * each:.1f}" for each in (self.ours_frac, self.theirs_frac))
        verdict = "worse" if self.is_worse else "better"
        return self.source, self.llm, self.gpu, f"{self.runs}", self.metric, ours, theirs, verdict


def _llama_folder(name: str, root: Path) -> str:
    """A folder with the config.json of a Llama of these shapes."""
    layers, hidden, heads, kv_heads, ffn, vocabulary, experts, active = LLAMAS[name]
    folder = root / name.rsplit("/", maxsplit=1)[-1]
    folder.mkdir(exist_ok=True)
    config: dict[str, object] = {
        "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if experts else "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "max_position_embeddings": 16384,
        "torch_dtype": "bfloat16",
    }
    if experts:
        config |= {"num_local_experts": experts, "num_experts_per_tok": active}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def aiconfigurator(root: Path) -> Estimate:
    """AIConfigurator's estimates. `root` is a folder for config.json files. Raises ImportError if
    AIConfigurator is not installed.
    """
    from aiconfigurator.cli.api import cli_estimate
    from aiconfigurator.sdk.perf_database import get_latest_database_version

    logging.disable(logging.WARNING)
    backends = {source: backend for backend, (source, _) in BACKENDS.items()}  # All other sources ran vLLM.
    version = cache(lambda system, backend: get_latest_database_version(system=system, backend=backend))

    def estimate(run: Run, load: Load) -> dict[str, float]:
        checkpoint = CHECKPOINTS.get((run.llm, load.weights), run.llm)
        name = _llama_folder(checkpoint, root) if checkpoint in LLAMAS else ALIKE.get(checkpoint, checkpoint)
        system, backend = SYSTEMS[run.gpu], backends.get(run.source, "vllm")
        ask = partial(
            cli_estimate,
            name,
            system,
            backend_name=backend,
            backend_version=version(system, backend),
            isl=round(load.input_tokens),
            osl=max(round(load.output_tokens), 2),
            prefix=round(load.cached_tokens),
            batch_size=max(round(load.requests / load.ranks), 1),
            tp_size=run.tp,
            attention_dp_size=load.ranks,
            nextn=load.drafts,
            nextn_accepted=load.drafts * load.accepted if load.drafts else None,
            **MODES.get(checkpoint, {}) | ({"kvcache_quant_mode": "fp8"} if load.kv_in_8_bits else {}),
        )
        workers = run.tp * load.ranks
        try:
            answer = ask(moe_ep_size=workers) if load.experts_whole else ask(moe_tp_size=workers)
        except ValueError as error:
            if "Invalid quantized MoE" not in str(error):
                raise
            answer = ask(moe_ep_size=workers)  # It cannot slice these experts.
        return {
            "ttft": float(answer.ttft) / 1e3,
            "tpot": float(answer.tpot) / 1e3,
            "itl": float(answer.tpot) / 1e3,
            "e2e": float(answer.raw["request_latency"]) / 1e3,
            "throughput": float(answer.raw["tokens/s"]),
        }

    return estimate


def pairs(rows: Iterable[Row | LeftOut], estimate: Estimate) -> Iterator[Pair | tuple[Run, str]]:
    """A pair for each figure that both predict; a run with the reason for each that only we predict."""
    answers: dict[tuple[object, ...], Mapping[str, float] | str] = {}
    refused: set[Run] = set()
    for row in rows:
        if isinstance(row, LeftOut) or row.basis == "import" or (row.quantity, row.statistic) not in FIGURES:
            continue
        run, load = row.run, row.run.load
        if run.source == FLEETS:
            continue
        if load is None:
            raise ValueError(f"{run.campaign}, {run.case}: the reader does not say what the engine was given")
        if run.source in ("inference-perf", "llmservingsim") and row.statistic != "mean":
            continue  # These sources have medians of the same figures too; one of both counts.
        key = run.source == "sglang", run.llm, run.gpu, run.tp, load
        if key not in answers:
            try:
                answers[key] = estimate(run, load)
            except Exception as error:  # It is not our code, so any exception may come.
                answers[key] = _reason(error)
        answer = answers[key]
        if isinstance(answer, str):
            if run not in refused:
                refused.add(run)
                yield run, answer
            continue
        theirs = answer[row.quantity] / row.measured - 1
        yield Pair(run, row.quantity, row.statistic, row.error_frac, theirs)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if text.startswith("OOM"):
        return "out of memory, by its account"
    if "config.json" in text:
        return "not among its LLMs"
    return f"{type(error).__name__}: {text[:120]}"


def lines(found_pairs: Iterable[Pair]) -> list[Line]:
    """The lines of the table, sorted by source, LLM, GPU and figure."""
    groups: dict[tuple[str, str, str, str, str], list[Pair]] = defaultdict(list)
    for pair in found_pairs:
        run = pair.run
        weights = (
            f" {run.load.weights}"
            if run.load is not None and run.source in ("silicon-sample", "sglang")
            else ""
        )
        llm = run.llm.split("/")[-1] + weights
        groups[run.source, llm, run.gpu, pair.quantity, pair.statistic].append(pair)
    order = sorted(
        groups, key=lambda key: (SOURCES.index(key[0]), *key[1:3], FIGURES.index((key[3], key[4])))
    )
    return [
        Line(
            *(source, llm, gpu, f"{NAMES[quantity]} {statistic}", len(group)),
            *(
                float(np.mean([abs(getattr(each, of)) for each in group]))
                for of in ("ours_frac", "theirs_frac")
            ),
        )
        for source, llm, gpu, quantity, statistic in order
        if (group := groups[source, llm, gpu, quantity, statistic])
    ]


def print_page(table: Sequence[Line], refused: Sequence[tuple[Run, str]], all_pairs: Sequence[Pair]) -> None:
    runs = len({pair.run for pair in all_pairs})
    worse = [line for line in table if line.is_worse]
    fitted = "; ".join(f"{source}: {what}" for source, what in FITTED.items())
    print(
        f"""# Against AIConfigurator on measured runs

Written by `python benchmarks/aiconfigurator_rows.py DIR` on {date.today()}; the top of that script says what
AIConfigurator 0.12.0 is asked. Errors are mean sizes in % over the runs of one LLM on one GPU, of {runs} runs
that both predict, host-bound and saturated ones included. AIConfigurator is told the requests in flight,
which for open loops were measured.

**{len(table) - len(worse)} of {len(table)} lines are nearer to what was measured than AIConfigurator's,
{len(worse)} are not.** Constants of ours were fitted to some of these runs ({fitted}), to GLM-5 of InferenceX
none; which of them AIConfigurator's were fitted to is not known.
"""
    )
    print("## All runs\n\n| truth | metric | runs | ours | AIConfigurator |\n|---|---|---|---|---|")
    by_metric: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in all_pairs:
        by_metric[pair.run.source, f"{NAMES[pair.quantity]} {pair.statistic}"].append(pair)
    for (source, metric), group in by_metric.items():
        errors = [np.abs([getattr(each, of) for each in group]) for of in ("ours_frac", "theirs_frac")]
        print(
            f"| {source} | {metric} | {len(group)} | {' | '.join(f'{100 * e.mean():.1f}' for e in errors)} |"
        )
    print("\n## Where ours is worse\n")
    head = (
        "| truth | LLM | GPU | runs | metric | ours | AIConfigurator | |\n|---|---|---|---|---|---|---|---|"
    )
    print(head)
    for line in sorted(worse, key=lambda line: line.theirs_frac - line.ours_frac):
        print(f"| {' | '.join(line.cells())} |")
    print(f"\n## Every LLM and GPU\n\n{head}")
    for line in table:
        print(f"| {' | '.join(line.cells())} |")
    print(
        "\n## What AIConfigurator does not answer\n\n"
        "| truth | LLM | GPU | runs | why |\n|---|---|---|---|---|"
    )
    counted = Counter((run.source, run.llm, run.gpu, why) for run, why in refused)
    for (source, llm, gpu, why), n in sorted(counted.items()):
        print(f"| {source} | {llm} | {gpu} | {n} | {why.replace('|', '/')} |")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--only", choices=SOURCES)
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="of silicon-sample every N-th point of a campaign"
    )
    args = parser.parse_args(arguments)
    if not args.folder.is_dir():
        parser.error(f"{args.folder} is no folder")
    with tempfile.TemporaryDirectory() as root:
        try:
            estimate = aiconfigurator(Path(root))
        except ImportError:
            print("AIConfigurator is missing: pip install aiconfigurator==0.12.0", file=sys.stderr)
            return 2
        rows = found(args.folder, Engines(read_catalog(), every=max(args.every, 1)), args.only)
        answers = list(pairs(rows, estimate))
    both = [each for each in answers if isinstance(each, Pair)]
    if not both:
        print(f"{args.folder}: no run that both predict", file=sys.stderr)
        return 2
    print_page(lines(both), [each for each in answers if not isinstance(each, Pair)], both)
    return 0


if __name__ == "__main__":
    sys.exit(main())
