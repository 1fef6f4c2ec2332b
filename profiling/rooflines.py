"""Fits the roofline's efficiencies (catalogs/roofline.yaml) to kernel times, and says how far off they are.

    python -m profiling.rooflines            prints the file, and the errors as a Markdown table
    python -m profiling.rooflines --rows nvfp4   only these rows of the file
    python -m profiling.rooflines --llms     also with every LLM left out in turn (minutes)
    python -m profiling.rooflines --kv       only kv_bandwidth_frac, by chip, for decodes of dense LLMs

One set of efficiencies per row of the file, which is for some formats of weights (ROWS): least squares of log
errors over the tables of AIConfigurator (planner/importers/silicon.py), each table and each kind of step
(prefill, decode, mixed) alike.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from scipy.optimize import least_squares, minimize_scalar

from planner.documents.catalog import Catalog, read_catalog
from planner.domain import Gpu
from planner.errors import InputError, PlannerError
from planner.files.checked_files import to_yaml
from planner.importers.silicon import silicon_table
from planner.importers.silicon_config import INSTALL
from planner.models.latency import PREFILLS, Array
from planner.models.llm import Llm
from planner.models.memory import fits_memory
from planner.models.roofline import roofline
from planner.models.roofline_calibration import Efficiency, calibration_of
from planner.models.step_fit import equal_shares, errors_by_regime

# The LLMs whose kernel times are fitted.
LLMS = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen2.5-72B",
    "mistralai/Mistral-Small-24B-Instruct-2501",
    "codellama/CodeLlama-34b-Instruct-hf",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8",
    "RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8",
    "Qwen/Qwen3-14B-FP8",
    "Qwen/Qwen3-32B-FP8",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3-30B-A3B-FP8",
    "Qwen/Qwen3-235B-A22B-FP8",
    "MiniMaxAI/MiniMax-M2.5",
    "openai/gpt-oss-20b",
    "openai/gpt-oss-120b",
    "moonshotai/Kimi-K2.5",
    "nvidia/Gemma-4-31B-IT-NVFP4",
    "nvidia/Qwen3-235B-A22B-NVFP4",
    "nvidia/MiniMax-M2.5-NVFP4",
    "nvidia/Kimi-K2.5-NVFP4",
)
ROWS = {  # Rows of catalogs/roofline.yaml -> their formats of weights.
    "bf16": ("bf16",),
    "fp8": ("fp8", "fp8-block"),
    "w4a16": ("int4", "int4-g32", "int4-g32z", "mxfp4"),
    "nvfp4": ("nvfp4",),
}
# AIConfigurator also has tables of other GPUs, but they are copies of the B200's and add no measurement.
GPUS = ("a100-80g", "h100-80g", "h200-141g", "b200-180g", "l40s-48g", "rtx-pro-6000")
# A GPU -> the one with the same chip: a GPU is "unseen" only where no table of its chip was fitted.
SAME_CHIP = {"h200-141g": "h100-80g"}
STEPS_PER_TABLE = 250  # So many steps are drawn from each table, to keep the fit short; set by hand.
# The fitted fields of Efficiency, in its units, each with the least and greatest value that a fit may choose,
# set by hand. Shares may be a little over 1. The other two fields are of all-reduces, which
# `profiling.shipped --all-reduce` fits.
BOUNDS = {
    "gemm_frac": (0.2, 1.1),
    "attention_frac": (0.2, 1.0),
    "bandwidth_frac": (0.3, 1.1),
    "kv_bandwidth_frac": (0.4, 1.2),
    "overlap": (1.0, 6.0),
    "layer_s": (1e-6, 2e-4),
    "expert_gemm_frac": (0.1, 1.1),
    "expert_bandwidth_frac": (0.3, 1.2),
    "expert_layer_s": (1e-6, 2e-4),
    "expert_activations": (0.1, 100.0),
}


@dataclass(frozen=True)
class KernelTable:
    """Kernel times of an LLM on `tp` GPUs of a kind: X (n, 5) as `planner.models.latency` defines it, y (n,)
    seconds.
    """

    llm: Llm
    gpu: Gpu
    tp: int
    X: Array
    y: Array

    @property
    def chip(self) -> str:
        """The chip of the GPU; rows of one chip have the same kernels."""
        return SAME_CHIP.get(self.gpu.name, self.gpu.name)

    @property
    def llm_class(self) -> str:
        """The kind of LLM: "dense", or "mixture" if it has experts."""
        return "dense" if self.llm.experts == 1 else "mixture"

    def predicted_s(self, efficiency: Efficiency) -> Array:
        """Seconds (n,) of the table's steps by a roofline with this efficiency."""
        return roofline(self.llm, self.gpu, self.tp, efficiency=efficiency).step_s(*self.X.T)


def read_tables(catalog: Catalog, formats: Sequence[str]) -> list[KernelTable]:
    """Kernel times of LLMS with weights in these formats, on each of GPUS and at each TP degree that holds
    them. Raises InputError if there are none.
    """
    rng = np.random.default_rng(0)
    tables: list[KernelTable] = []
    llms = [llm for llm in map(catalog.llm, LLMS) if llm.weights in formats]
    for llm, gpu, tp in product(llms, map(catalog.gpu, GPUS), (1, 2, 4, 8)):
        if not llm.splits_over(tp) or not fits_memory(llm, gpu, tp):
            continue
        try:
            table = silicon_table(llm, gpu, tp)
        except InputError:  # AIConfigurator has not timed the kernels of this LLM on this GPU.
            continue
        chosen = rng.permutation(len(table.y))[:STEPS_PER_TABLE]
        tables.append(KernelTable(llm, gpu, tp, table.X[chosen], table.y[chosen]))
    if not tables:
        raise InputError(f"no kernel times of weights in {', '.join(formats)}; {INSTALL}")
    return tables


def fit_efficiency(tables: Sequence[KernelTable]) -> Efficiency:
    """The efficiencies with the least squares of log errors on these tables, to three significant digits. In
    w4a16 only the kernels of experts were measured; there the fields of other kernels keep the file's values,
    which are those of bf16.
    """
    current = calibration_of(tables[0].llm, tables[0].gpu).efficiency
    experts_alone = all(table.llm.weights in ROWS["w4a16"] for table in tables)
    names = [name for name in BOUNDS if name.startswith("expert_") or not experts_alone]
    weights = [equal_shares(table.X) for table in tables]

    def residuals(logs: Array) -> Array:
        efficiency = replace(current, **dict(zip(names, np.exp(logs).tolist(), strict=True)))
        return np.concatenate(
            [
                np.log(table.predicted_s(efficiency) / table.y) * w
                for table, w in zip(tables, weights, strict=True)
            ]
        )

    low, high = np.array([BOUNDS[name] for name in names]).T
    # `least_squares` must start strictly between the bounds.
    start = np.clip([getattr(current, name) for name in names], low * 1.01, high * 0.99)
    best = np.exp(least_squares(residuals, np.log(start), bounds=(np.log(low), np.log(high))).x)
    return replace(current, **{name: float(f"{x:.3g}") for name, x in zip(names, best.tolist(), strict=True)})


def fit_kv_fracs(tables: Sequence[KernelTable]) -> dict[str, float]:
    """For each chip the `kv_bandwidth_frac` with the least squares of log errors on steps of decodes alone,
    each table alike; all other efficiencies are the file's.
    """
    fracs = {}
    for chip in dict.fromkeys(table.chip for table in tables):
        of_chip = [table for table in tables if table.chip == chip]

        def mean_square(frac: float, of_chip: Sequence[KernelTable] = of_chip) -> float:
            squares = []
            for table in of_chip:
                efficiency = replace(calibration_of(table.llm, table.gpu).efficiency, kv_bandwidth_frac=frac)
                logs = np.log(table.predicted_s(efficiency) / table.y)
                squares.append(float((logs[table.X[:, PREFILLS] == 0] ** 2).mean()))
            return float(np.mean(squares))

        best = minimize_scalar(mean_square, bounds=BOUNDS["kv_bandwidth_frac"], method="bounded")
        fracs[chip] = float(best.x)
    return fracs


def mean_errors(
    tables: Sequence[KernelTable], efficiency_of: Callable[[KernelTable], Efficiency]
) -> dict[tuple[str, str], list[float]]:
    """The mean relative error of each table, by class of LLM ("dense", "mixture") and kind of step ("all",
    "prefill", "decode").
    """
    errors_by_kind: dict[tuple[str, str], list[float]] = defaultdict(list)
    for table in tables:
        regimes = errors_by_regime(table.X, table.y, table.predicted_s(efficiency_of(table)))
        # The error of decodes is the mean over steps of small and of large batches together.
        decodes = [regimes[name] for name in ("decode_small", "decode_large") if name in regimes]
        errors_by_kind[table.llm_class, "prefill"].append(regimes["prefill"].mape_frac)
        errors_by_kind[table.llm_class, "decode"].append(
            sum(each.mape_frac * each.steps for each in decodes) / sum(each.steps for each in decodes)
        )
        errors_by_kind[table.llm_class, "all"].append(regimes["all"].mape_frac)
    return errors_by_kind


def markdown_row(title: str, errors_by_kind: dict[tuple[str, str], list[float]]) -> str:
    """A row of the Markdown table: mean and, in brackets, largest error over the tables, in percent."""
    cells = [
        f"{100 * np.mean(errors):.1f} ({100 * np.max(errors):.0f})"
        if (errors := errors_by_kind.get((llm_class, kind)))
        else "-"
        for llm_class in ("dense", "mixture")
        for kind in ("all", "prefill", "decode")
    ]
    return f"| {title} | {' | '.join(cells)} |\n"


def calibration_row(
    title: str, tables: Sequence[KernelTable], *, by_llm: bool
) -> tuple[dict[str, object], str]:
    """The row of catalogs/roofline.yaml for these tables, and lines of its errors: over all tables, over each
    GPU's, and over tables predicted by a fit to those of all other chips. `by_llm` adds a line of errors by
    fits to the tables of all other LLMs.
    """
    efficiency = fit_efficiency(tables)
    text = markdown_row(f"{title}, all", mean_errors(tables, lambda _: efficiency))
    for name in dict.fromkeys(table.gpu.name for table in tables):
        of_gpu = [table for table in tables if table.gpu.name == name]
        text += markdown_row(f"{title}, {name}", mean_errors(of_gpu, lambda _: efficiency))
    fit_without = {
        chip: fit_efficiency([t for t in tables if t.chip != chip])
        for chip in {table.chip for table in tables}
    }
    unseen = mean_errors(tables, lambda table: fit_without[table.chip])
    text += markdown_row(f"{title}, GPU unseen", unseen)
    if by_llm:
        fit_without = {
            name: fit_efficiency([t for t in tables if t.llm.name != name])
            for name in {table.llm.name for table in tables}
        }
        errors = mean_errors(tables, lambda table: fit_without[table.llm.name])
        text += markdown_row(f"{title}, LLM unseen", errors)
    unseen_errors = {
        llm_class: {kind: round(float(np.mean(unseen[llm_class, kind])), 3) for kind in ("prefill", "decode")}
        for llm_class in ("dense", "mixture")
        if (llm_class, "prefill") in unseen
    }
    return {name: getattr(efficiency, name) for name in BOUNDS} | {"errors": unseen_errors}, text


def _print_fits(args: argparse.Namespace) -> None:
    """Print the rows of the file and the errors, or with --kv the shares at which decodes read KV."""
    catalog, rows, lines = read_catalog(), {}, ""
    if args.kv:
        for name in args.rows:
            dense = [table for table in read_tables(catalog, ROWS[name]) if table.llm_class == "dense"]
            shares = ", ".join(f"{chip} {frac:.2f}" for chip, frac in fit_kv_fracs(dense).items())
            sys.stdout.write(f"{name}: {shares}\n")
        return
    for name in args.rows:
        rows[name], text = calibration_row(name, read_tables(catalog, ROWS[name]), by_llm=args.llms)
        lines += text
    sys.stdout.write(f"{to_yaml(rows)}\n{lines}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fit the roofline to kernel times.")
    parser.add_argument("--llms", action="store_true", help="leave out every LLM in turn, too")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="only these rows")
    parser.add_argument("--kv", action="store_true", help="only the share at which decodes read KV, by chip")
    try:
        _print_fits(parser.parse_args())
    except PlannerError as error:
        sys.stderr.write(f"profiling.rooflines: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
