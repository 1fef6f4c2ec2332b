"""Writes catalogs/latency: the fits of step times that come with the planner.

    python -m profiling.shipped -o catalogs/latency --splitwise perf_model.csv
    python -m profiling.shipped --calibrate        the roofline's efficiencies anew, and its error

Two sources: AIConfigurator's kernel times (planner/imports/silicon.py), and the measurements published with
Splitwise (Patel et al. 2024; data/perf_model.csv of https://github.com/Mutinifni/splitwise-sim, MIT licence).
BLOOM-176B has only the latter; Llama-2-70B has both, and the latter lie under splitwise/, where no lookup by
LLM and GPU finds them: a fleet names the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.fits import fit_document, fit_row
from planner.domain import Gpu, Llm
from planner.errors import PlannerError
from planner.imports.silicon import VERSION, random_steps, silicon_table
from planner.imports.splitwise import HARDWARE, splitwise_table
from planner.io.files import to_yaml, write_files
from planner.models.latency import Array, StepLatency
from planner.models.memory import fits
from planner.models.roofline import CALIBRATED, Efficiency, roofline, transferred
from planner.models.step_fit import (
    Errors,
    PiecewiseLinearStepLatency,
    equal_shares,
    errors_by_regime,
    held_out_errors,
)
from planner.models.tables import StepTable

SILICON_LLMS = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-2-70b-hf",
)
SILICON_GPUS = ("a100-80g", "h100-80g", "h200-141g")
TPS = (1, 2, 4, 8)
LEAST_KV_TOKENS = 4096  # a worker that holds fewer serves nobody
OFF_GRID_STEPS = 900
COMMAND = "python -m profiling.shipped -o catalogs/latency --splitwise perf_model.csv"


def fit(table: StepTable, *, basis: str) -> tuple[StepLatency, dict[str, Errors]]:
    """Fitted to all rows; the errors are those on cells held out in turn."""
    model = PiecewiseLinearStepLatency(basis=basis)
    errors = held_out_errors(model, table.X, table.y)
    latency: StepLatency = model.fit(table.X, table.y).latency_
    return dataclasses.replace(latency, mape_frac=errors["all"].mape_frac), errors


def silicon_file(llm: Llm, gpu: Gpu, *, date: str) -> dict[str, Any]:
    """One fit per TP that fits into memory; "off_grid" is its error on random steps."""
    entries = []
    for tp in TPS:
        if not fits(llm, gpu, tp, least_kv_tokens=LEAST_KV_TOKENS):
            continue
        basis = f"silicon: AIConfigurator {VERSION} kernel times, without host overhead"
        latency, errors = fit(silicon_table(llm, gpu, tp), basis=basis)
        unseen = silicon_table(llm, gpu, tp, random_steps(np.random.default_rng(tp), OFF_GRID_STEPS))
        error = np.abs(latency.step_s(*unseen.X.T) / unseen.y - 1)
        off_grid = Errors(float(error.mean()), float(np.quantile(error, 0.9)), len(error))
        entries.append(fit_row(tp, latency, {**errors, "off_grid": off_grid}))
    source = f"vLLM kernel times in aiconfigurator-core {VERSION} (NVIDIA, Apache-2.0); docs/models.md"
    return document(llm, gpu, source, date, entries)


def splitwise_file(path: Path, llm: Llm, gpu: Gpu, model: str, tps: tuple[int, ...]) -> dict[str, Any]:
    """Fits to measured steps: what the host adds is inside, and cannot be told apart."""
    hardware = HARDWARE[gpu.name]
    basis = f"measured: Splitwise, {model} on {hardware}, host overhead included"
    entries = [fit_row(tp, *fit(splitwise_table(path, model, hardware, tp), basis=basis)) for tp in tps]
    source = "github.com/Mutinifni/splitwise-sim data/perf_model.csv (MIT), Patel et al. 2024; docs/models.md"
    return document(llm, gpu, source, "2023-11", entries)


def derived_file(
    path: Path, llm: Llm, measured: Gpu, asked: Gpu, model: str, tps: tuple[int, ...]
) -> dict[str, Any]:
    """From the TP-8 fit of another GPU, by the ratio of the rooflines. There is nothing to hold out."""
    hardware = HARDWARE[measured.name]
    latency, _ = fit(splitwise_table(path, model, hardware, 8), basis="")
    entries = []
    for tp in tps:
        basis = (
            f"derived: Splitwise's {model} on {hardware} tp8, carried over by the rooflines (no measurement)"
        )
        moved = transferred(latency, roofline(llm, measured, 8), roofline(llm, asked, tp), basis=basis)
        entries.append(fit_row(tp, moved, {}))
    source = "derived from github.com/Mutinifni/splitwise-sim data/perf_model.csv (MIT); docs/models.md"
    return document(llm, asked, source, "2023-11", entries)


def document(llm: Llm, gpu: Gpu, source: str, date: str, fits: list[dict[str, Any]]) -> dict[str, Any]:
    return fit_document(llm.name, gpu.name, fits, source=source, date=date, command=COMMAND)


def shipped(catalog: Catalog, splitwise: Path | None, *, date: str) -> dict[str, dict[str, Any]]:
    """Every file of catalogs/latency by its name."""
    documents = {}
    for llm in map(catalog.llm, SILICON_LLMS):
        for gpu in map(catalog.gpu, SILICON_GPUS):
            documents[f"{llm.name.split('/')[-1].lower()}--{gpu.name}.yaml"] = silicon_file(
                llm, gpu, date=date
            )
    if splitwise is not None:
        bloom, llama = catalog.llm("bigscience/bloom"), catalog.llm("meta-llama/Llama-2-70b-hf")
        for gpu in map(catalog.gpu, HARDWARE):
            documents[f"bloom--{gpu.name}.yaml"] = splitwise_file(splitwise, bloom, gpu, "bloom-176b", (8,))
            documents[f"splitwise/llama-2-70b-hf--{gpu.name}.yaml"] = splitwise_file(
                splitwise, llama, gpu, "llama2-70b", (2, 4, 8)
            )
        h100, h200 = catalog.gpu("h100-80g"), catalog.gpu("h200-141g")
        tps = tuple(tp for tp in TPS if fits(bloom, h200, tp, least_kv_tokens=LEAST_KV_TOKENS))
        documents["bloom--h200-141g.yaml"] = derived_file(splitwise, bloom, h100, h200, "bloom-176b", tps)
    return documents


def calibrate(catalog: Catalog) -> tuple[Efficiency, str]:
    """The efficiencies nearest to all silicon tables (least squares of log errors, each table and each kind
    of step alike), and a report: the error of `CALIBRATED`, and of a calibration that has not seen the GPU.
    """
    tables = [
        (llm, gpu, tp, silicon_table(llm, gpu, tp))
        for llm in map(catalog.llm, SILICON_LLMS)
        for gpu in map(catalog.gpu, SILICON_GPUS)
        for tp in TPS
        if fits(llm, gpu, tp, least_kv_tokens=LEAST_KV_TOKENS)
    ]
    names = [field.name for field in dataclasses.fields(Efficiency)]

    def nearest(others: Sequence[tuple[Llm, Gpu, int, StepTable]]) -> Efficiency:
        def residuals(logs: Array) -> Array:
            efficiency = Efficiency(*np.exp(logs))
            return np.concatenate(
                [
                    np.log(roofline(llm, gpu, tp, efficiency=efficiency).step_s(*table.X.T) / table.y)
                    * equal_shares(table.X)
                    for llm, gpu, tp, table in others
                ]
            )

        start = np.log([getattr(CALIBRATED, name) for name in names])
        return Efficiency(*np.exp(least_squares(residuals, start).x).tolist())

    def report(title: str, efficiency: Efficiency, rows: Sequence[tuple[Llm, Gpu, int, StepTable]]) -> str:
        errors = [
            errors_by_regime(t.X, t.y, roofline(llm, gpu, tp, efficiency=efficiency).step_s(*t.X.T))
            for llm, gpu, tp, t in rows
        ]
        cells = [title]
        for regime in ("all", "prefill", "decode_small", "decode_large", "mixed", "long_context"):
            mape = [100 * e[regime].mape_frac for e in errors if regime in e]
            cells.append(f"{np.mean(mape):.1f} ({np.max(mape):.0f})")
        return "| " + " | ".join(cells) + " |\n"

    lines = report("all", CALIBRATED, tables)
    for name in SILICON_GPUS:
        unseen = [row for row in tables if row[1].name == name]
        lines += report(f"{name}, seen", CALIBRATED, unseen)
        lines += report(f"{name}, unseen", nearest([row for row in tables if row[1].name != name]), unseen)
    return nearest(tables), lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Write catalogs/latency anew.")
    parser.add_argument("-o", dest="out", type=Path, help="directory to write into")
    parser.add_argument(
        "--calibrate", action="store_true", help="print the roofline's efficiencies and errors"
    )
    parser.add_argument("--splitwise", type=Path, help="splitwise-sim's data/perf_model.csv")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="written into the files")
    args = parser.parse_args()
    try:
        if args.calibrate:
            efficiency, lines = calibrate(read_catalog())
            sys.stdout.write(f"{lines}{efficiency}\n")
        if args.out is None:
            return 0
        documents = shipped(read_catalog(), args.splitwise, date=args.date)
        write_files(args.out, {name: to_yaml(document) for name, document in documents.items()})
    except PlannerError as error:
        sys.stderr.write(f"profiling.shipped: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{args.out}: {len(documents)} files\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
