"""Compares the step times that engines logged with the plan's fits, and corrects the fits by these times."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.calibrate.measured_runs import Calibrated, calibrate_host
from planner.fleet import Fleet, WorkerType
from planner.models.correction import CorrectedFormula
from planner.models.latency import DECODES, ON_WALL, PREFILLS, StepLatency
from planner.models.step_fit import errors_by_regime
from planner.models.step_tables import COLUMNS, StepTable, without_next_launch
from planner.runtime.measured_against_simulated import Measurement

Floats = npt.NDArray[np.float64]
LEAST_STEPS = 20  # By fewer steps no fit is corrected: they are too few for medians of similar steps.


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The measured steps of one pool (a table of models/step_tables.py), and its fit's errors on them."""

    pool: str
    table: StepTable
    predicted_s: Floats
    errors: Mapping[str, float]  # Kind of step (step_fit.errors_by_regime) -> mean relative error.
    bias_frac: float  # Predicted over measured seconds, each summed over all steps, minus 1.


def compare_steps(measurement: Measurement, fleet: Fleet, *, on_wall: bool = False) -> list[Steps]:
    """For each pool the steps that its engines logged, from the first request on, and the times that the
    pool's fit predicts for them. Pools without such steps are left out.

    If the log has the engine's own clock, which stands still while other processes have its core, steps are
    timed by that clock, unless `on_wall`.
    """
    parts = measurement.journal.parts  # The parts of the replay between interruptions.
    if not parts:
        return []
    pool_steps = []
    for pool in fleet.running_pools:
        logs = [measurement.logs[name] for name in pool.worker_names if name in measurement.logs]
        frames = []
        for log in logs:
            start_s = parts[0].start_s
            if log.has_own_clock and not on_wall:
                log, start_s = log.on_its_own_clock(start_s)
            steps = log.steps[(log.steps.start_s >= start_s) & (log.steps.t_s > 0)]
            if log.engine.get("async_scheduling") and len(steps):
                steps = _with_launches_apart(steps, pool.type)
            frames.append(steps)
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


def _with_launches_apart(steps: pd.DataFrame, worker: WorkerType) -> pd.DataFrame:
    """The steps of an engine that schedules asynchronously, with the time of a prefill's launch moved to the
    step of that prefill (`without_next_launch` says how).
    """
    has_prefill = (steps.n_prefill > 0).to_numpy()
    # Two steps are adjacent if one starts within a microsecond, the unit of the log, of the other's end.
    adjacent = np.isclose(steps.start_s.to_numpy()[1:], steps.end_s.to_numpy()[:-1], rtol=0, atol=1e-6)
    predicted_s = _predicted_s(worker, StepTable(steps))
    # Whether each step has a prefill that was launched during the adjacent step before; the first has none.
    launched_early = np.r_[False, has_prefill[1:] & adjacent]
    return steps.assign(
        t_s=without_next_launch(steps.t_s.to_numpy(), predicted_s, was_launched_meanwhile=launched_early)
    )


@dataclass(frozen=True, slots=True)
class FitCorrection:
    """A pool's fit, corrected by its measured steps (`_with_median_times`).

    The `held_out` errors show whether a correction also holds for other steps: mean relative errors on the
    second half of the run, without a correction and with one by the first half alone.
    """

    pool: str
    calibrated: Calibrated
    held_out_before_frac: float
    held_out_after_frac: float


def correct_fits(measured_steps: Iterable[Steps], fleet: Fleet) -> list[FitCorrection]:
    """A corrected fit for each pool with at least LEAST_STEPS steps in either half of the run."""
    types = {pool.name: pool.type for pool in fleet.running_pools}
    pool_corrections = []
    for pool_steps in measured_steps:
        frame = pool_steps.table.steps
        if len(frame) < 2 * LEAST_STEPS:
            continue
        is_late = (frame.start_s > frame.start_s.median()).to_numpy()
        early, late = _with_median_times(frame[~is_late]), _with_median_times(frame[is_late])
        worker = types[pool_steps.pool]
        uncorrected = _with_host(worker)
        # A fit calibrated to steps includes the host's time (StepLatency.has_host): none is added.
        by_early = replace(worker, latency=calibrate_host(uncorrected, steps=[early]).latency, form=None)
        before_frac, after_frac = (
            float(np.mean(np.abs(_predicted_s(each_worker, late) / late.y - 1)))
            for each_worker in (worker, by_early)
        )
        by_all = calibrate_host(uncorrected, steps=[_with_median_times(frame)])
        pool_corrections.append(FitCorrection(pool_steps.pool, by_all, before_frac, after_frac))
    return pool_corrections


def fits_by_gpu_and_tp(measured_steps: Iterable[Steps], fleet: Fleet) -> dict[tuple[str, int], StepLatency]:
    """Corrected fits for a catalog, by (GPU, TP).

    Each is the fit of the first pool with this GPU and TP, corrected by the steps of all such pools. Pools
    with pipeline stages (PP) are left out, because a catalog's fit is of one stage.
    """
    groups: dict[tuple[str, int], list[Steps]] = {}
    types = {pool.name: pool.type for pool in fleet.running_pools}
    for pool_steps in measured_steps:
        worker = types[pool_steps.pool]
        if worker.pp == 1 and len(pool_steps.table.y) >= 2 * LEAST_STEPS:
            groups.setdefault((worker.gpu.name, worker.tp), []).append(pool_steps)
    fits = {}
    for key, group in groups.items():
        tables = [_with_median_times(pool_steps.table.steps) for pool_steps in group]
        fits[key] = calibrate_host(_with_host(types[group[0].pool]), steps=tables).latency
    return fits


def _with_median_times(frame: pd.DataFrame) -> StepTable:
    """The steps, each with the median time of similar steps: of as many prefills and decodes, with tokens and
    context within a factor of 1.4 (half a power of 2). The median hides interruptions by other programs of
    the machine.
    """
    similar = [frame[name] for name in ("n_prefill", "n_decode")]
    for name in ("prefill_tokens", "prefill_pairs", "kv_tokens"):
        similar.append(np.round(2 * np.log2(1.0 + frame[name])))
    return StepTable(frame.assign(t_s=frame.t_s.groupby(similar).transform("median"))[[*COLUMNS]])


def with_corrections(fleet: Fleet, fit_corrections: Iterable[FitCorrection]) -> Fleet:
    """The fleet with the corrected fits, which also replace step times from tables (`WorkerType.form`)."""
    return _with_fits(fleet, {each.pool: each.calibrated.latency for each in fit_corrections})


def fleet_as_run(measurement: Measurement, fleet: Fleet) -> Fleet | None:
    """The fleet with fits corrected by the wall-clock time of every step, which includes what other processes
    on the machine took. None if the engines have no clock of their own, because `correct_fits` then uses the
    wall clock already.
    """
    if not any(log.has_own_clock for log in measurement.logs.values()):
        return None
    types = {pool.name: pool.type for pool in fleet.running_pools}
    fits = {}
    for pool_steps in compare_steps(measurement, fleet, on_wall=True):
        if len(pool_steps.table.y) >= LEAST_STEPS:
            fit = calibrate_host(_with_host(types[pool_steps.pool]), steps=[pool_steps.table]).latency
            fits[pool_steps.pool] = replace(fit, basis=fit.basis + ON_WALL)
    return _with_fits(fleet, fits)


def includes_other_processes(fleet: Fleet) -> bool:
    """Whether a fit of the fleet includes what other processes on the machine took (`fleet_as_run`)."""
    return any(pool.type.latency.basis.endswith(ON_WALL) for pool in fleet.running_pools)


def _with_fits(fleet: Fleet, fits: Mapping[str, StepLatency]) -> Fleet:
    """The fleet with these fits of step times, by pool; other pools keep theirs."""
    pools = tuple(
        replace(pool, type=replace(pool.type, latency=fits[pool.name], form=None))
        if pool.name in fits
        else pool
        for pool in fleet.pools
    )
    return replace(fleet, pools=pools)


def _predicted_s(worker: WorkerType, table: StepTable) -> Floats:
    """Step times (n,) as the worker's fit predicts them, with the host's part. Tables of step times
    (`WorkerType.form`), which the simulator would read, are not used; a CorrectedFormula is.
    """
    gpu_s = np.asarray(worker.latency.steps_s(table.X))
    if isinstance(worker.form, CorrectedFormula):
        gpu_s = worker.form.step_s(table.X)
    host, rest = worker.host  # The rest is what asynchronous scheduling does not hide.
    host_step_s, host_sequence_s = host.per_step_s(worker.tp)
    rest_step_s, rest_sequence_s = rest.per_step_s(worker.tp)
    sequences = table.X[:, DECODES] + table.X[:, PREFILLS]
    host_s = host_step_s + host_sequence_s * sequences
    if worker.engine is None or not worker.engine.async_scheduling:
        return gpu_s + host_s
    return np.maximum(gpu_s, host_s) + rest_step_s + rest_sequence_s * sequences


def _with_host(worker: WorkerType) -> StepLatency:
    """The worker type's fit with the host's time added to every step, for a correction by measured steps.

    With asynchronous scheduling only the part of the host's time that it does not hide is added.
    """
    is_async = worker.engine is not None and worker.engine.async_scheduling
    host, rest = worker.host
    step_s, sequence_s = (rest if is_async else host).per_step_s(worker.tp)
    fit = worker.latency
    # h_s is per step; a sequence is one decode (b_s) or one prefill (e_s).
    return replace(fit, h_s=fit.h_s + step_s, b_s=fit.b_s + sequence_s, e_s=fit.e_s + sequence_s)
