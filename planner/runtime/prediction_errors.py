"""How far the prediction of a run was from its measurement: percentiles, times of sessions, verdicts.

Both are of the simulator's own form (`Simulation`), so the same functions judge both.
measured_against_simulated.py makes the two from a run's journal and logs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.domain import Metric, Slo
from planner.runtime.live_replay import Status
from planner.simulator import Simulation, Verdict, judge_slo
from planner.simulator.measured_values import measured_mask, percentile_s
from planner.simulator.simulation import Floats, Ints
from planner.slo_metrics import METRICS
from planner.traffic.trace import warm_up_s
from planner.units import percentile_name

PERCENTILES = (0.5, 0.9, 0.99)
SESSION_METRICS = ("session", "session-served")  # The two times of a session by `session_times_s`.
# Arrays of every Simulation with a value per request; `per_request_columns` adds those that only some have.
PER_REQUEST = (
    *("arrival_s", "input_tokens", "output_tokens", "queue_s", "ttft_s", "tpot_s", "tbt_max_s"),
    *("e2e_s", "prefill_worker", "decode_worker", "preemptions", "status"),
)
# Numbers of simulation.STATUS for a replay's outcomes: unsent counts as rejected, failed as unfinished.
STATUS_OF: Mapping[Status, int] = {"finished": 0, "rejected": 1, "failed": 2, "unsent": 1}


def compare_parts(
    parts: Sequence[tuple[ComparedRun, ...]], slo: Slo, tolerances: Tolerances
) -> MeasuredComparison:
    """Join the (predicted, measured) parts one after the other, and compare them as one run."""
    predicted, measured = map(_join_parts, zip(*parts, strict=True))
    finished = STATUS_OF["finished"]
    chosen = measured_mask(measured.requests)
    chosen &= (measured.requests.status == finished) & (predicted.requests.status == finished)
    # By the name of a row: on each side the values and their weights.
    values: dict[str, list[tuple[Floats, Floats | None]]] = {
        metric: [side.values_s(metric, chosen) for side in (predicted, measured)]
        for metric, row in METRICS.items()
        if not row.is_of_agents  # Metrics of agents are of whole tasks, which a measured run does not mark.
    }
    if (measured.session >= 0).any():
        session_times = [side.sessions_s(chosen) for side in (predicted, measured)]
        values |= {name: [(times[name], None) for times in session_times] for name in SESSION_METRICS}
    rows = []
    for name, sides in values.items():
        for frac in PERCENTILES:
            predicted_s, measured_s = (percentile_s(times_s, frac, weight) for times_s, weight in sides)
            rows.append(PercentileRow(name, frac, predicted_s, measured_s, tolerances.tolerance_of(frac)))
    # A measured run is not judged by windows, nor by guarantees of service to tenants: engines do not say
    # when they began to serve a request.
    judged_slo = replace(slo, every_s=None, guarantees=())
    verdicts = [judge_slo(side.requests, judged_slo) for side in (predicted, measured)]
    return MeasuredComparison(predicted, measured, chosen, tuple(rows), verdicts[0], verdicts[1], tolerances)


@dataclass(frozen=True, slots=True)
class Tolerances:
    """The largest errors that count as agreement.

    They are relative for percentiles, and a difference of two shares for attainment. The defaults were set by
    hand.
    """

    p50_frac: float = 0.05
    p90_frac: float = 0.09
    attainment_frac: float = 0.02

    def tolerance_of(self, percentile_frac: float) -> float | None:
        """The tolerance of a percentile; None for p99, which scatters too much to be judged."""
        return {0.5: self.p50_frac, 0.9: self.p90_frac}.get(percentile_frac)


# Engines on a CPU share its cores with router and client, so times are less repeatable. Set by hand.
CPU_TOLERANCES = Tolerances(p50_frac=0.2, p90_frac=0.3, attainment_frac=0.05)


@dataclass(frozen=True, slots=True, eq=False)
class ComparedRun:
    """A measured or simulated run: its requests in the simulator's form, and every gap between tokens.

    `gap_weight` counts equal gaps, which a simulation records once. `session` is the number of each request's
    session; -1 for a request without a session, or if the run lacks requests of the session.
    """

    requests: Simulation
    gap_s: Floats
    gap_weight: Floats
    session: Ints

    def values_s(self, metric: Metric, chosen: npt.NDArray[np.bool_]) -> tuple[Floats, Floats | None]:
        """Values of a metric over the chosen requests (for tbt over all gaps), and their weights."""
        if METRICS[metric].is_of_gaps:
            return self.gap_s, self.gap_weight
        values_s = METRICS[metric].values_s(self.requests)[chosen]
        return values_s[np.isfinite(values_s)], None

    def sessions_s(self, chosen: npt.NDArray[np.bool_]) -> dict[str, Floats]:
        """The times of the sessions of which all requests are chosen, by the names in SESSION_METRICS."""
        whole = chosen & (self.session >= 0) & ~np.isin(self.session, self.session[~chosen])
        arrival_s, e2e_s = self.requests.arrival_s[whole], self.requests.e2e_s[whole]
        return dict(
            zip(
                SESSION_METRICS,
                session_times_s(self.session[whole], arrival_s, arrival_s + e2e_s),
                strict=True,
            )
        )


@dataclass(frozen=True, slots=True)
class PercentileRow:
    """A percentile of a metric, or of the times of sessions, predicted and measured; NaN without values."""

    metric: str
    percentile_frac: float
    predicted_s: float
    measured_s: float
    tolerance_frac: float | None

    @property
    def error_frac(self) -> float:
        """Predicted over measured, minus 1.

        It is infinite if 0 was measured and more was predicted, and NaN without values.
        """
        if self.measured_s == 0:
            return math.inf if self.predicted_s > 0 else 0.0
        return self.predicted_s / self.measured_s - 1

    @property
    def is_judged(self) -> bool:
        """Whether the row counts for agreement.

        It does not without a tolerance or without values (for instance the gaps of answers of one token).
        """
        return self.tolerance_frac is not None and not math.isnan(self.error_frac)

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance; True for a row that is not judged (its error is NaN)."""
        return self.tolerance_frac is None or not abs(self.error_frac) > self.tolerance_frac

    def as_dict(self) -> dict[str, Any]:
        """The row as plain values, for validation.json."""
        return {
            "metric": self.metric,
            "percentile": percentile_name(self.percentile_frac),
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "error_frac": self.error_frac,
            "tolerance_frac": self.tolerance_frac,
            "holds": self.holds,
        }


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredComparison:
    """A predicted and a measured run, the rows that compare them, and the verdict of the SLO on each.

    `chosen` are the requests that count: those of the measured window that finished on both sides.
    """

    predicted: ComparedRun
    measured: ComparedRun
    chosen: npt.NDArray[np.bool_]
    rows: tuple[PercentileRow, ...]
    predicted_verdict: Verdict
    measured_verdict: Verdict
    tolerances: Tolerances

    @property
    def attainment_error_frac(self) -> float:
        """The predicted attainment less the measured one."""
        return self.predicted_verdict.attainment_frac - self.measured_verdict.attainment_frac

    @property
    def attainment_agrees(self) -> bool:
        """Whether measured and predicted attainment differ by no more than the tolerance."""
        rounding = 1e-12  # A difference of exactly the tolerance counts as agreement.
        return abs(self.attainment_error_frac) <= self.tolerances.attainment_frac + rounding

    @property
    def judged_rows(self) -> tuple[PercentileRow, ...]:
        """The rows that have a tolerance, which decide whether the prediction was right."""
        return tuple(row for row in self.rows if row.is_judged)

    @property
    def agrees(self) -> bool:
        """Whether all judged rows and attainment are within tolerance; False if nothing could be compared."""
        return (
            bool(self.judged_rows) and all(row.holds for row in self.judged_rows) and self.attainment_agrees
        )

    def scatter(self, metric: Metric) -> tuple[Floats, Floats]:
        """The predicted and the measured values of a metric, for each request that counts."""
        values_s = METRICS[metric].values_s
        predicted_s, measured_s = (
            values_s(run.requests)[self.chosen] for run in (self.predicted, self.measured)
        )
        is_in_both = np.isfinite(predicted_s) & np.isfinite(measured_s)
        return predicted_s[is_in_both], measured_s[is_in_both]


def _join_parts(parts: Sequence[ComparedRun]) -> ComparedRun:
    """Join the parts of a run without pauses: each begins at the last arrival of the part before."""
    if len(parts) == 1:
        return parts[0]
    shift_s, arrivals = 0.0, []
    for part in parts:
        arrivals.append(part.requests.arrival_s + shift_s)
        shift_s = float(arrivals[-1].max())
    whole: dict[str, Any] = {
        name: np.concatenate([getattr(part.requests, name) for part in parts])
        for name in per_request_columns(parts[0].requests)
    }
    whole["arrival_s"] = np.concatenate(arrivals)
    last = parts[-1].requests
    totals: dict[str, Any] = {
        name: sum(getattr(part.requests, name) for part in parts)
        for name in ("worker_busy_s", "worker_steps", "worker_tokens", "violations", "counted")
    }
    start_s, end_s = float(whole["arrival_s"].min()), float(whole["arrival_s"].max())
    requests = replace(
        last,
        **whole,
        **totals,
        window_s=(start_s + warm_up_s(end_s - start_s), end_s),
        complete=all(part.requests.complete for part in parts),
        runs=last.runs[:0],  # Steps of single parts cannot be joined, and nothing here reads them.
        nominal_end_s=np.inf,  # The arrivals of parts are shifted, so that no nominal end fits them.
    )
    return ComparedRun(
        requests,
        np.concatenate([part.gap_s for part in parts]),
        np.concatenate([part.gap_weight for part in parts]),
        np.concatenate([part.session for part in parts]),
    )


def per_request_columns(simulation: Simulation) -> tuple[str, ...]:
    reports_hits, has_classes = simulation.cached_tokens is not None, simulation.of_class.size > 0
    return (
        *PER_REQUEST,
        *(["cached_tokens"] if reports_hits else ()),
        *(["of_class"] if has_classes else ()),
    )


def session_times_s(session: Ints, arrival_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """The total and the served time of each session, in the order of their numbers.

    The total time is from the arrival of the first request to the end of the last, with the user's thinking.
    The served time is the part of it in which at least one request of the session had arrived and not ended.
    """
    order = np.lexsort((arrival_s, session))
    firsts = np.flatnonzero(np.diff(session[order], prepend=-1))  # Where a session begins in this order.
    groups = zip(np.split(arrival_s[order], firsts[1:]), np.split(end_s[order], firsts[1:]), strict=True)
    total, served = [], []
    for begin, end in groups if len(order) else ():
        latest_end = np.maximum.accumulate(end)
        # The time of a request counts from here on: before it, an earlier request of the session was served.
        uncovered = np.maximum(begin, np.concatenate(([begin[0]], latest_end[:-1])))
        total.append(latest_end[-1] - begin[0])
        served.append(np.maximum(end - uncovered, 0.0).sum())
    return np.array(total), np.array(served)
