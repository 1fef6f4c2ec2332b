"""The measured run against the simulation of the same requests on the same fleet.

What was measured is put into the simulator's own form (`Simulation`), so one set of functions judges both.
Each part of a run that was interrupted is simulated by itself, from an idle fleet, as it was measured.

Times are the engines' own where their step logs are there: from the moment a request reaches the engine to
the moment its tokens are on the host. The simulation then starts each request at that moment too; what lies
outside of the engine (client, router, HTTP) is reported beside it. Without step logs they are the client's.

A pair of prefill and decode workers runs one token more than was asked for: vLLM's decode worker computes
the first token again. Both sides count it: the first token is the prefill worker's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.domain import Fleet, Metric, Slo
from planner.errors import InputError
from planner.manifests.engine import running
from planner.models.calibration import Calibrated, calibrate
from planner.models.latency import StepLatency
from planner.models.step_fit import errors_by_regime
from planner.models.tables import COLUMNS, StepTable
from planner.simulator import Simulation, Verdict, judge, simulate
from planner.simulator.metrics import gaps_s, measured, percentile_s
from planner.simulator.replay import measured_window
from planner.traces import Trace
from planner.units import percentile_name
from runtime.enginelog import EngineLog, Served
from runtime.replay import Journal, Part, Sent

Floats = npt.NDArray[np.float64]
PERCENTILES = (0.5, 0.9, 0.99)
PER_REQUEST = ("arrival_s", "input_tokens", "output_tokens", "queue_s", "ttft_s", "tpot_s", "tbt_max_s",
               "e2e_s", "prefill_worker", "decode_worker", "preemptions", "status")  # fmt: skip
LEAST_STEPS = 20  # of a pool, to calibrate its fit
_NAME = re.compile(r"p(\d+)r(\d+)")


@dataclass(frozen=True, slots=True)
class Tolerances:
    """What counts as agreement: relative errors of percentiles, and of attainment in points."""

    p50_frac: float = 0.05
    p90_frac: float = 0.09
    attainment_frac: float = 0.02

    def of(self, percentile_frac: float) -> float | None:
        """None for percentiles that are shown and not judged: their own scatter is larger."""
        return {0.5: self.p50_frac, 0.9: self.p90_frac}.get(percentile_frac)


# on a machine whose cores engines, router and client share
CPU_TOLERANCES = Tolerances(p50_frac=0.2, p90_frac=0.3, attainment_frac=0.05)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A measured or simulated run: its requests in the simulator's form, and every gap between tokens."""

    requests: Simulation
    gap_s: Floats
    gap_weight: Floats

    def values_s(self, metric: Metric, chosen: npt.NDArray[np.bool_]) -> tuple[Floats, Floats | None]:
        """Of the chosen requests (all gaps for tbt), with weights."""
        if metric == "tbt":
            return self.gap_s, self.gap_weight
        found: Floats = getattr(self.requests, f"{metric}_s")[chosen]
        return found[np.isfinite(found)], None


@dataclass(frozen=True, slots=True)
class Row:
    """A percentile of a metric, predicted and measured; NaN where there is none."""

    metric: Metric
    percentile_frac: float
    predicted_s: float
    measured_s: float
    tolerance_frac: float | None

    @property
    def error_frac(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def holds(self) -> bool:
        """Also where there is nothing to compare, as with gaps of one-token answers."""
        return self.tolerance_frac is None or not abs(self.error_frac) > self.tolerance_frac

    def as_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric, "percentile": percentile_name(self.percentile_frac),
            "predicted_s": self.predicted_s, "measured_s": self.measured_s, "error_frac": self.error_frac,
            "tolerance_frac": self.tolerance_frac, "holds": self.holds,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Measured steps of one pool: `X`, `y` as in a step table, and the fit's errors on them."""

    pool: str
    table: StepTable
    predicted_s: Floats
    errors: Mapping[str, float]  # kind of step -> mean relative error
    bias_frac: float  # of all their seconds together


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Prediction against measurement. `chosen`: requests that count, finished on both sides in the window."""

    predicted: Run
    measured: Run
    chosen: npt.NDArray[np.bool_]
    rows: tuple[Row, ...]
    predicted_verdict: Verdict
    measured_verdict: Verdict
    tolerances: Tolerances

    @property
    def attainment_error_frac(self) -> float:
        return self.predicted_verdict.attainment_frac - self.measured_verdict.attainment_frac

    @property
    def agrees(self) -> bool:
        attainment_holds = abs(self.attainment_error_frac) <= self.tolerances.attainment_frac + 1e-12
        return all(row.holds for row in self.rows) and attainment_holds

    def scatter(self, metric: Metric) -> tuple[Floats, Floats]:
        """(predicted, measured) of each request that counts."""
        name = f"{metric}_s"
        pair = [getattr(run.requests, name)[self.chosen] for run in (self.predicted, self.measured)]
        both = np.isfinite(pair[0]) & np.isfinite(pair[1])
        return pair[0][both], pair[1][both]


@dataclass(frozen=True, slots=True, eq=False)
class Measurement:
    """A whole run as it was: parts, what the client saw, what the engines logged.

    `trace` is what was to be sent; `logs` are keyed by worker, empty where engines keep none.
    """

    fleet: Fleet
    trace: Trace
    journal: Journal
    logs: Mapping[str, EngineLog]

    def served(self) -> dict[tuple[int, int], dict[str, Served]]:
        """(part, request) -> worker -> what its engine logged."""
        found: dict[tuple[int, int], dict[str, Served]] = {}
        for worker, log in self.logs.items():
            for name, served in log.requests.items():
                if match := _NAME.search(name):
                    found.setdefault((int(match[1]), int(match[2])), {})[worker] = served
        return found

    @property
    def is_timed_by_engines(self) -> bool:
        served = self.served()
        finished = [sent for sent in self.journal.sent.values() if sent.status == "finished"]
        return bool(finished) and all(
            set(sent.workers) <= set(served.get((sent.part, sent.request), ())) for sent in finished
        )


def compare(run: Measurement, fleet: Fleet, slo: Slo, tolerances: Tolerances) -> Comparison:
    """Simulate what was sent on `fleet` (the run's own, or one with corrected fits) and compare."""
    parts = [one_part(run, part, fleet, slo) for part in run.journal.parts if outcomes(run, part)]
    if not parts:
        raise InputError("no request has ended: nothing was measured")
    return compared(parts, slo, tolerances)


def compared(parts: Sequence[tuple[Run, ...]], slo: Slo, tolerances: Tolerances) -> Comparison:
    """(predicted, measured) parts, one after the other, as one comparison."""
    predicted, observed = (_joined([part[side] for part in parts]) for side in (0, 1))
    chosen = measured(observed.requests)
    chosen &= (observed.requests.status == 0) & (predicted.requests.status == 0)
    rows = []
    for metric in get_args(Metric):
        (p, p_weight), (m, m_weight) = (side.values_s(metric, chosen) for side in (predicted, observed))
        rows += [
            Row(metric, frac, percentile_s(p, frac, p_weight), percentile_s(m, frac, m_weight),
                tolerances.of(frac))
            for frac in PERCENTILES
        ]  # fmt: skip
    verdicts = [judge(side.requests, slo) for side in (predicted, observed)]
    return Comparison(predicted, observed, chosen, tuple(rows), verdicts[0], verdicts[1], tolerances)


def outcomes(run: Measurement, part: Part) -> list[Sent]:
    """What became of the requests of `part`, as far as they have ended in it."""
    return [
        run.journal.sent[request]
        for request in part.requests
        if request in run.journal.sent and run.journal.sent[request].part == part.part
    ]


def one_part(run: Measurement, part: Part, fleet: Fleet, slo: Slo) -> tuple[Run, Run]:
    """(predicted, measured) of one part, over the requests that have an outcome.

    Requests without one were in flight when it was interrupted: they count as load, sent when they were due.
    """
    served = run.served() if run.is_timed_by_engines else {}
    first_s = float(run.trace.arrival_s[part.requests[0]])
    start_s = np.empty(len(part.requests))
    tokens = run.trace.output_tokens[list(part.requests)].copy()
    for k, request in enumerate(part.requests):
        start_s[k] = float(run.trace.arrival_s[request]) - first_s
        if (sent := run.journal.sent.get(request)) and sent.part == part.part:
            logged = served.get((part.part, request), {})
            start_s[k] = _times(sent, logged, part)[0]
            tokens[k] += len(sent.workers) == 2
    start_s = np.maximum(start_s, 0.0)
    order = np.argsort(start_s, kind="stable")
    asked = run.trace.select(np.array(part.requests)[order], arrival_s=start_s[order])
    asked = replace(asked, output_tokens=tokens[order])
    simulation = simulate(fleet, asked, limits=slo.limits, record=True)
    known = {sent.request: sent for sent in outcomes(run, part)}
    keep = np.array([part.requests[k] in known for k in order])
    ended = [known[part.requests[k]] for k in order if part.requests[k] in known]
    predicted = replace(
        simulation, **{name: getattr(simulation, name)[keep] for name in _columns(simulation)}
    )
    window_s = measured_window(asked)
    observed, gaps = _observed(run, part, predicted, ended, served, slo, window_s)
    return Run(predicted, *gaps_s(simulation)), Run(observed, gaps, np.ones(len(gaps)))


def _times(sent: Sent, logged: Mapping[str, Served], part: Part) -> tuple[float, float, Floats]:
    """(start, scheduled, tokens) of a request in seconds since the part began."""
    if not logged:
        return sent.sent_s, sent.sent_s, np.array(sent.token_s)
    engines = [logged[worker] for worker in sent.workers if worker in logged]
    if not engines:
        return sent.sent_s, sent.sent_s, np.array(sent.token_s)
    token_s = np.concatenate([engine.token_s for engine in engines])
    return engines[0].queued_s - part.start_s, engines[0].scheduled_s - part.start_s, token_s - part.start_s


def _observed(
    run: Measurement,
    part: Part,
    like: Simulation,
    ended: Sequence[Sent],
    served: Mapping[tuple[int, int], Mapping[str, Served]],
    slo: Slo,
    window_s: tuple[float, float],
) -> tuple[Simulation, Floats]:
    """What became of requests, in the simulator's form; the gaps between tokens that ended in the window."""
    n = len(ended)
    values: dict[str, Any] = {
        name: np.full(n, np.nan) for name in ("queue_s", "ttft_s", "tpot_s", "tbt_max_s", "e2e_s")
    }
    numbers = {name: k for k, name in enumerate(like.worker_names)}
    workers = np.full((n, 2), -1)
    preemptions, cached = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    status = np.array([{"finished": 0, "rejected": 1, "failed": 2}[sent.status] for sent in ended])
    all_gaps: list[Floats] = []
    violations = np.zeros(len(slo.limits), dtype=np.int64)
    counted = np.zeros(len(slo.limits), dtype=np.int64)
    for k, sent in enumerate(ended):
        if sent.workers:
            workers[k] = numbers.get(sent.workers[0], -1), numbers.get(sent.workers[-1], -1)
        if sent.status != "finished":
            continue
        logged = served.get((part.part, sent.request), {})
        start_s, scheduled_s, token_s = _times(sent, logged, part)
        gaps = np.diff(token_s)
        values["queue_s"][k] = scheduled_s - start_s
        values["ttft_s"][k], values["e2e_s"][k] = token_s[0] - start_s, token_s[-1] - start_s
        if len(gaps):
            values["tpot_s"][k], values["tbt_max_s"][k] = gaps.mean(), gaps.max()
        preemptions[k] = sum(engine.preemptions for engine in logged.values())
        cached[k] = logged[sent.workers[0]].cached_tokens if sent.workers[0] in logged else 0
        all_gaps.append(gaps[(token_s[1:] >= window_s[0]) & (token_s[1:] <= window_s[1])])
    gap_s = np.concatenate(all_gaps) if all_gaps else np.zeros(0)
    for j, limit in enumerate(slo.limits):
        if limit.metric == "tbt":
            counted[j], violations[j] = len(gap_s), int((gap_s > limit.limit_s).sum())
    logs = [run.logs.get(name) for name in like.worker_names]
    steps = [None if log is None else _steps_of(log, part) for log in logs]
    return (
        replace(
            like, **values, prefill_worker=workers[:, 0], decode_worker=workers[:, 1],
            preemptions=preemptions, cached_tokens=None if like.cached_tokens is None else cached,
            status=status, violations=violations, counted=counted, complete=True,
            runs=like.runs[:0], end_s=max(sent.end_s for sent in ended), window_s=window_s,
            worker_busy_s=np.array([0.0 if s is None else s.t_s.sum() for s in steps]),
            worker_steps=np.array([0 if s is None else len(s) for s in steps]),
            worker_tokens=np.array(
                [0.0 if s is None else float((s.prefill_tokens + s.n_decode).sum()) for s in steps]
            ),
        ),
        gap_s,
    )  # fmt: skip


def _steps_of(log: EngineLog, part: Part) -> pd.DataFrame:
    """Steps after the part began: not those of the warm-up before it."""
    return log.steps[log.steps.start_s >= part.start_s]


def _columns(simulation: Simulation) -> tuple[str, ...]:
    """Names of what it holds per request."""
    return PER_REQUEST if simulation.cached_tokens is None else (*PER_REQUEST, "cached_tokens")


def _joined(runs: Sequence[Run]) -> Run:
    """Parts one after the other."""
    if len(runs) == 1:
        return runs[0]
    shift_s, arrivals = 0.0, []
    for run in runs:
        arrivals.append(run.requests.arrival_s + shift_s)
        shift_s = float(arrivals[-1][-1])
    whole: dict[str, Any] = {
        name: np.concatenate([getattr(run.requests, name) for run in runs])
        for name in _columns(runs[0].requests)
    }
    whole["arrival_s"] = np.concatenate(arrivals)
    last = runs[-1].requests
    totals: dict[str, Any] = {
        name: sum(getattr(run.requests, name) for run in runs)
        for name in ("worker_busy_s", "worker_steps", "worker_tokens", "violations", "counted")
    }
    start_s = float(whole["arrival_s"][0])
    warm_s = min((whole["arrival_s"][-1] - start_s) / 20, 120.0)
    requests = replace(
        last, **whole, **totals, window_s=(start_s + warm_s, float(whole["arrival_s"][-1])),
        complete=all(run.requests.complete for run in runs), runs=last.runs[:0],
    )  # fmt: skip
    return Run(
        requests,
        np.concatenate([run.gap_s for run in runs]),
        np.concatenate([run.gap_weight for run in runs]),
    )


def steps(run: Measurement, fleet: Fleet, *, on_wall: bool = False) -> list[Steps]:
    """Per pool, every step its engines logged while the traffic ran, against its fit; on the engines' own
    clocks where they keep one, unless `on_wall`."""
    found = []
    parts = run.journal.parts
    for pool in running(fleet):
        logs = [
            run.logs[name] for name in (f"{pool.name}-{i}" for i in range(pool.count)) if name in run.logs
        ]
        frames = []
        for log in logs if parts else ():
            start_s = parts[0].start_s
            if log.has_cpu and not on_wall:
                log, start_s = log.on_its_own_clock(start_s)
            frames.append(log.steps[(log.steps.start_s >= start_s) & (log.steps.t_s > 0)])
        frames = [frame for frame in frames if len(frame)]
        if not frames:
            continue
        table = StepTable(pd.concat(frames, ignore_index=True))
        predicted_s = pool.type.latency.step_s(*table.X.T)
        errors = {
            kind: error.mape_frac for kind, error in errors_by_regime(table.X, table.y, predicted_s).items()
        }
        bias_frac = float(predicted_s.sum() / table.y.sum() - 1)
        found.append(Steps(pool.name, table, predicted_s, errors, bias_frac))
    return found


@dataclass(frozen=True, slots=True)
class Correction:
    """A pool's fit, corrected by its measured steps, each with the median of those that are alike.
    `held_out`: mean relative error of such steps in the second half of the run, before and after a correction
    by those of the first half alone."""

    pool: str
    calibrated: Calibrated
    held_out_before_frac: float
    held_out_after_frac: float


def corrections(measured_steps: Iterable[Steps], fleet: Fleet) -> list[Correction]:
    """One per pool with enough steps."""
    fits = {pool.name: pool.type.latency for pool in running(fleet)}
    found = []
    for one in measured_steps:
        frame = one.table.steps
        if len(frame) < 2 * LEAST_STEPS:
            continue
        is_late = (frame.start_s > frame.start_s.median()).to_numpy()
        half = calibrate(fits[one.pool], steps=[_typical(frame[~is_late])]).latency
        before, after = (_mape(fit, _typical(frame[is_late])) for fit in (fits[one.pool], half))
        whole = calibrate(fits[one.pool], steps=[_typical(frame)])
        found.append(Correction(one.pool, whole, before, after))
    return found


def _typical(frame: pd.DataFrame) -> StepTable:
    """The steps with the median time of those that are alike: same prefills and decodes, tokens and context
    within a factor of 1.4. A step that the machine interrupted says nothing about the engine.
    """
    wide = ("prefill_tokens", "prefill_pairs", "kv_tokens")
    alike = [frame[name] for name in ("n_prefill", "n_decode")]
    alike += [np.round(2 * np.log2(1.0 + frame[name])) for name in wide]
    return StepTable(frame.assign(t_s=frame.t_s.groupby(alike).transform("median"))[[*COLUMNS]])


def corrected(fleet: Fleet, found: Iterable[Correction]) -> Fleet:
    """The fleet with those fits, in place of any other form of step times."""
    return _with_fits(fleet, {one.pool: one.calibrated.latency for one in found})


def as_run(run: Measurement, fleet: Fleet) -> Fleet | None:
    """The fleet with fits corrected by every step as the wall saw it, so that what else runs on the machine
    is in them; None where engines keep no clock of their own, whose `corrections` are the wall's already."""
    if not any(log.has_cpu for log in run.logs.values()):
        return None
    fits = {pool.name: pool.type.latency for pool in running(fleet)}
    seen = [one for one in steps(run, fleet, on_wall=True) if len(one.table.y) >= LEAST_STEPS]
    return _with_fits(fleet, {one.pool: calibrate(fits[one.pool], steps=[one.table]).latency for one in seen})


def _with_fits(fleet: Fleet, fits: Mapping[str, StepLatency]) -> Fleet:
    pools = tuple(
        replace(pool, type=replace(pool.type, latency=fits[pool.name], form=None))
        if pool.name in fits
        else pool
        for pool in fleet.pools
    )
    return replace(fleet, pools=pools)


def _mape(latency: StepLatency, table: StepTable) -> float:
    return float(np.mean(np.abs(latency.step_s(*table.X.T) / table.y - 1)))


def outside_s(run: Measurement) -> Floats:
    """Per finished request: seconds from the client's send to the engine's receipt."""
    if not run.is_timed_by_engines:
        return np.zeros(0)
    served, starts = run.served(), {part.part: part.start_s for part in run.journal.parts}
    return np.array(
        [
            served[sent.part, sent.request][sent.workers[0]].queued_s - starts[sent.part] - sent.sent_s
            for sent in run.journal.sent.values()
            if sent.status == "finished"
        ]
    )
