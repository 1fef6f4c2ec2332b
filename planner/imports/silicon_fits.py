"""Fits of step times to AIConfigurator's kernel tables: files as in catalogs/latency."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.documents.fits import fit_document, fit_row
from planner.domain import Gpu
from planner.errors import InputError
from planner.imports.silicon import VERSION, is_whole, random_steps, silicon_table, uncovered
from planner.models.latency import Kind, StepLatency
from planner.models.llm import Llm
from planner.models.memory import fits
from planner.models.step_fit import Errors, PiecewiseLinearStepLatency, held_out_errors
from planner.models.tables import StepTable

TPS = (1, 2, 4, 8)
LEAST_KV_TOKENS = 4096  # a worker that holds fewer serves nobody
OFF_GRID_STEPS = 900
WORST_MAPE_FRAC = 0.08  # a fit that misses its own table by more is not written: the roofline is as good
SOURCE = f"vLLM kernel times in aiconfigurator-core {VERSION} (NVIDIA, Apache-2.0); docs/models.md"
BASIS = f"silicon: AIConfigurator {VERSION} kernel times, without host overhead"


@dataclass(frozen=True)
class Fitted:
    """A file of fits, None if nothing could be fitted, and why each of the others could not."""

    document: dict[str, Any] | None
    left_out: tuple[str, ...]


def fit(table: StepTable, *, basis: str, kind: Kind) -> tuple[StepLatency, dict[str, Errors]]:
    """Fitted to all rows; the errors are those on cells held out in turn."""
    model = PiecewiseLinearStepLatency(basis=basis)
    errors = held_out_errors(model, table.X, table.y)
    latency: StepLatency = model.fit(table.X, table.y).latency_
    return dataclasses.replace(latency, mape_frac=errors["all"].mape_frac, kind=kind), errors


def silicon_fits(
    llm: Llm, gpu: Gpu, tps: Iterable[int] = TPS, *, date: str, command: str, folder: Path | None = None
) -> Fitted:
    """A fit per TP that fits into memory, has kernels and follows them; of a mixture one with slices of all
    experts and one with whole experts. `folder` as in `silicon_table`.
    """
    if why := uncovered(llm, gpu, folder):
        return Fitted(None, (f"{llm.name} on {gpu.name}: {why}",))
    rows, left_out = [], []
    for tp in tps:
        if not llm.splits_over(tp) or not fits(llm, gpu, tp, least_kv_tokens=LEAST_KV_TOKENS):
            left_out.append(f"{llm.name} on {gpu.name} tp{tp}: does not fit into memory, or not its heads")
            continue
        for ep in _splits(llm, tp):
            try:
                rows.append(_fitted_row(llm, gpu, tp, ep, folder))
            except InputError as error:
                left_out.append(str(error))
    if not rows:
        return Fitted(None, tuple(left_out))
    document = fit_document(llm.name, gpu.name, rows, source=SOURCE, date=date, command=command)
    return Fitted(document, tuple(left_out))


def file_name(llm: Llm, gpu: Gpu) -> str:
    return f"{llm.name.split('/')[-1].lower()}--{gpu.name}.yaml"


def _splits(llm: Llm, tp: int) -> Sequence[bool]:
    """Ways to share experts."""
    if not llm.is_mixture or tp == 1:
        return (False,)
    return (True,) if is_whole(llm, tp) else (False, True)


def _fitted_row(llm: Llm, gpu: Gpu, tp: int, ep: bool, folder: Path | None) -> dict[str, Any]:
    """One fit; "off_grid" is its error on random steps."""
    basis = BASIS + ", whole experts per GPU" * ep
    latency, errors = fit(silicon_table(llm, gpu, tp, ep=ep, folder=folder), basis=basis, kind="kernels")
    if errors["all"].mape_frac > WORST_MAPE_FRAC:
        raise InputError(
            f"{llm.name} on {gpu.name} tp{tp}{' ep' * ep}: the fit misses its kernel times by "
            f"{100 * errors['all'].mape_frac:.0f} %, more than {100 * WORST_MAPE_FRAC:.0f} %"
        )
    steps = random_steps(np.random.default_rng(tp), OFF_GRID_STEPS)
    unseen = silicon_table(llm, gpu, tp, steps, ep=ep, folder=folder)
    error = np.abs(latency.step_s(*unseen.X.T) / unseen.y - 1)
    off_grid = Errors(float(error.mean()), float(np.quantile(error, 0.9)), len(error))
    return fit_row(tp, latency, {"all": errors["all"], "off_grid": off_grid}, ep=ep)
