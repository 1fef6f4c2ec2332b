"""What the engines' steps say of the fits: their errors, and the fits corrected by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.calibrate.measured_runs import Calibrated, calibrate
from planner.fleet import Fleet, WorkerType
from planner.models.correction import CorrectedFormula
from planner.models.latency import ON_WALL, StepLatency
from planner.models.step_fit import errors_by_regime
from planner.models.step_tables import COLUMNS, StepTable
from planner.runtime.measured_against_simulated import Measurement

Floats = npt.NDArray[np.float64]
LEAST_STEPS = 20  # A pool needs so many steps to calibrate its fit.


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Measured steps of one pool: `X`, `y` as in a step table, and the fit's errors on them."""

    pool: str
    table: StepTable
    predicted_s: Floats
    errors: Mapping[str, float]  # Kind of step -> mean relative error.
    bias_frac: float  # Predicted over measured seconds of all steps together, less one.


def compare_steps(run: Measurement, fleet: Fleet, *, on_wall: bool = False) -> list[Steps]:
    """Per pool, every step its engines logged while the traffic ran, against its fit; on the engines' own
    clocks where they keep one, unless `on_wall`."""
    pool_steps = []
    parts = run.journal.parts
    for pool in fleet.running_pools:
        logs = [run.logs[name] for name in pool.worker_names if name in run.logs]
        frames = []
        for log in logs if parts else ():
            start_s = parts[0].start_s
            if log.has_own_clock and not on_wall:
                log, start_s = log.on_its_own_clock(start_s)
            frames.append(log.steps[(log.steps.start_s >= start_s) & (log.steps.t_s > 0)])
        frames = [frame for frame in frames if len(frame)]
        if not frames:
            continue
        table = StepTable(pd.concat(frames, ignore_index=True))
        predicted_s = _predicted_s(pool.type, table)
        errors = {
            kind: error.mape_frac for kind, error in errors_by_regime(table.X, table.y, predicted_s).items()
        }
        bias_frac = float(predicted_s.sum() / table.y.sum() - 1)
        pool_steps.append(Steps(pool.name, table, predicted_s, errors, bias_frac))
    return pool_steps


@dataclass(frozen=True, slots=True)
class FitCorrection:
    """A pool's fit, corrected by its measured steps, each with the median of those that are alike.
    `held_out`: mean relative error of such steps in the second half of the run, before and after a correction
    by those of the first half alone."""

    pool: str
    calibrated: Calibrated
    held_out_before_frac: float
    held_out_after_frac: float


def correct_fits(measured_steps: Iterable[Steps], fleet: Fleet) -> list[FitCorrection]:
    """A corrected fit for each pool with at least LEAST_STEPS steps."""
    types = {pool.name: pool.type for pool in fleet.running_pools}
    pool_corrections = []
    for one in measured_steps:
        frame = one.table.steps
        if len(frame) < 2 * LEAST_STEPS:
            continue
        is_late = (frame.start_s > frame.start_s.median()).to_numpy()
        early, late = _typical(frame[~is_late]), _typical(frame[is_late])
        kind = types[one.pool]
        half = replace(kind, latency=calibrate(_with_host(kind), steps=[early]).latency, form=None)
        before, after = (float(np.mean(np.abs(_predicted_s(t, late) / late.y - 1))) for t in (kind, half))
        whole = calibrate(_with_host(kind), steps=[_typical(frame)])
        pool_corrections.append(FitCorrection(one.pool, whole, before, after))
    return pool_corrections


def fits_by_machine(measured_steps: Iterable[Steps], fleet: Fleet) -> dict[tuple[str, int], StepLatency]:
    """Corrected fits by (GPU, TP), each by the steps of all pools on these together; not with stages (PP)."""
    groups: dict[tuple[str, int], list[Steps]] = {}
    types = {pool.name: pool.type for pool in fleet.running_pools}
    for one in measured_steps:
        kind = types[one.pool]
        if kind.pp == 1 and len(one.table.y) >= 2 * LEAST_STEPS:
            groups.setdefault((kind.gpu.name, kind.tp), []).append(one)
    return {
        key: calibrate(
            _with_host(types[group[0].pool]), steps=[_typical(one.table.steps) for one in group]
        ).latency
        for key, group in groups.items()
    }


def _typical(frame: pd.DataFrame) -> StepTable:
    """The steps with the median time of those that are alike: same prefills and decodes, tokens and context
    within a factor of 1.4. A step that the machine interrupted says nothing about the engine.
    """
    wide = ("prefill_tokens", "prefill_pairs", "kv_tokens")
    alike = [frame[name] for name in ("n_prefill", "n_decode")]
    alike += [np.round(2 * np.log2(1.0 + frame[name])) for name in wide]
    return StepTable(frame.assign(t_s=frame.t_s.groupby(alike).transform("median"))[[*COLUMNS]])


def with_corrections(fleet: Fleet, fit_corrections: Iterable[FitCorrection]) -> Fleet:
    """The fleet with those fits, in place of any other form of step times."""
    return _with_fits(fleet, {one.pool: one.calibrated.latency for one in fit_corrections})


def fleet_as_run(run: Measurement, fleet: Fleet) -> Fleet | None:
    """The fleet with fits corrected by every step as the wall saw it, so that what else runs on the machine
    is in them; None where engines keep no clock of their own: `correct_fits` then already
    uses the wall's."""
    if not any(log.has_own_clock for log in run.logs.values()):
        return None
    fits = {pool.name: _with_host(pool.type) for pool in fleet.running_pools}
    seen = [one for one in compare_steps(run, fleet, on_wall=True) if len(one.table.y) >= LEAST_STEPS]
    corrected_fits = {one.pool: calibrate(fits[one.pool], steps=[one.table]).latency for one in seen}
    return _with_fits(
        fleet, {pool: replace(fit, basis=fit.basis + ON_WALL) for pool, fit in corrected_fits.items()}
    )


def counts_others(fleet: Fleet) -> bool:
    """Whether a fit of the fleet comes from `fleet_as_run`."""
    return any(pool.type.latency.basis.endswith(ON_WALL) for pool in fleet.running_pools)


def _with_fits(fleet: Fleet, fits: Mapping[str, StepLatency]) -> Fleet:
    pools = tuple(
        replace(pool, type=replace(pool.type, latency=fits[pool.name], form=None))
        if pool.name in fits
        else pool
        for pool in fleet.pools
    )
    return replace(fleet, pools=pools)


def _predicted_s(kind: WorkerType, table: StepTable) -> Floats:
    """Predicted step times: the simulator's if they are a formula, else those of the fit beside it."""
    g_s = np.asarray(kind.latency.step_s(*table.X.T))
    if isinstance(kind.form, CorrectedFormula):
        g_s = kind.form.step_s(table.X)
    (host_s, host_each_s), (rest_s, rest_each_s) = (part.per_step_s(kind.tp) for part in kind.host)
    sequences = table.X[:, 2] + table.X[:, 4]
    h_s = host_s + host_each_s * sequences
    if kind.engine is None or not kind.engine.async_scheduling:
        return g_s + h_s
    return np.maximum(g_s, h_s) + rest_s + rest_each_s * sequences


def _with_host(kind: WorkerType) -> StepLatency:
    """The step times of a worker type with the host's part of every step, from which a correction by measured
    steps starts: all of the host's time, or the rest that asynchronous scheduling does not hide.
    """
    is_async = kind.engine is not None and kind.engine.async_scheduling
    step_s, sequence_s = kind.host[is_async].per_step_s(kind.tp)
    fit = kind.latency
    return replace(fit, h_s=fit.h_s + step_s, b_s=fit.b_s + sequence_s, e_s=fit.e_s + sequence_s)
