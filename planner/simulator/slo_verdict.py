"""Judges a simulation against an SLO: nearest-rank percentiles, attainment, and the backlog test.

The search calls `judge_slo`, and reports show its `Verdict`. The gaps of a simulation are in one of three
places: counted as it ran, against its limits alone (`counted`, `violations`), in its recorded runs
(recorded_gaps.py), or, of long traces, in bins (`gaps`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from planner.domain import BACKLOG_LIMIT_S, STEADY_FRAC, Limit, Slo, allowed_above
from planner.simulator import counting
from planner.simulator.layout import FINISHED, REJECTED
from planner.simulator.measured_values import (
    arrivals_with_value_s,
    measured_mask,
    metric_percentile_s,
    percentile_s,
    request_values_s,
)
from planner.simulator.recorded_gaps import gap_percentile_s, gap_runs_in
from planner.simulator.service_shares import GuaranteeLine, judge_guarantees
from planner.simulator.simulation import Floats, Simulation
from planner.slo_metrics import METRICS
from planner.traffic.trace import last_tenth_s, slo_windows_s, window_numbers


@dataclass(frozen=True, slots=True)
class WindowResult:
    """The result of a limit in the window from `start_s` to `end_s`.

    `value_s` is its percentile, NaN for the attainment, which has none. `kept_frac` is the share of its
    `judged` values within the limit.
    """

    start_s: float
    end_s: float
    value_s: float
    kept_frac: float
    holds: bool
    judged: int

    @property
    def span_s(self) -> tuple[float, float]:
        """The first and the last moment of the window."""
        return self.start_s, self.end_s


@dataclass(frozen=True, slots=True)
class LineVerdict:
    """One limit and what the simulation says of it. `value_s` is NaN where gaps were not recorded.

    `judged` is the number of values that were compared with the limit. A line without any such value holds.

    With `slo: {every: ...}` the line holds only if each window does; `worst` is the window with the largest
    value, None without `every` or where values were left out.
    """

    limit: Limit
    value_s: float
    kept_frac: float
    holds: bool
    judged: int
    worst: WindowResult | None = None

    @property
    def deciding_s(self) -> float:
        """The value that decides whether the line holds: of the worst window, else of the whole."""
        return self.value_s if self.worst is None else self.worst.value_s

    @property
    def deciding_frac(self) -> float:
        """The share within the limit that decides: of the worst window, else of the whole."""
        return self.kept_frac if self.worst is None else self.worst.kept_frac


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the SLO holds in a simulation, and each part of it.

    `attainment_frac` is the share of measured requests that keep every limit at once (for tbt: in their
    longest gap).

    `is_steady` is the backlog test: of the requests that arrived in the last tenth of the window at least
    half (`patient_frac`) waited no longer than `patience_s`, neither for their first token nor between two
    tokens. `patience_s` is the loosest TTFT limit, BACKLOG_LIMIT_S where the SLO has none. A fleet whose
    queue grows, before prefill or before decode, fails the test whatever its percentiles are. Each class of
    requests is tested by itself, with a patience of its own (`Slo.patience_of`). With sessions this test ends
    at the last nominal arrival (the time of arrival if answers took no time), because after it no session
    begins and any queue gets shorter.

    With `slo: {every: ...}` the limits and the attainment are judged in each of the `windows`, the backlog
    over the whole. A fleet that rejects a request does not hold. `attainment_worst` is the window in which
    the smallest share keeps all limits. `guarantees` are those to tenants.
    """

    lines: tuple[LineVerdict, ...]
    attainment_frac: float
    attainment_holds: bool
    is_steady: bool
    rejected: int
    patient_frac: float = 1.0
    patience_s: float = BACKLOG_LIMIT_S
    windows: int = 0
    attainment_worst: WindowResult | None = None
    guarantees: tuple[GuaranteeLine, ...] = ()

    @property
    def missed(self) -> tuple[LineVerdict, ...]:
        """The lines of the limits that do not hold."""
        return tuple(line for line in self.lines if not line.holds)

    @property
    def is_judged(self) -> bool:
        """Whether any value was compared with a limit. Without one the SLO holds, which says nothing."""
        counts = [line.judged for line in self.lines] + [line.windows for line in self.guarantees]
        return any(counts) or not counts

    @property
    def guarantees_hold(self) -> bool:
        """Whether every tenant with a guarantee got its share of service."""
        return all(line.holds for line in self.guarantees)

    @property
    def holds(self) -> bool:
        """Whether the SLO is kept: every line, the guarantees, the attainment and the backlog test, and no
        request was rejected.
        """
        lines_hold = all(line.holds for line in self.lines) and self.guarantees_hold
        return lines_hold and self.attainment_holds and self.is_steady and not self.rejected


def judge_slo(simulation: Simulation, slo: Slo, *, with_percentiles: bool = True) -> Verdict:
    """Judge a simulation, run with `limits=slo.limits`, by the SLO.

    Without `with_percentiles` the percentile of each line is NaN, which is quicker; whether the SLO holds is
    the same. Raises ValueError if the simulation watched other limits. With `every` and limits on tbt it
    needs a simulation with `record=True`, or one that `replay.simulate_if_kept` gave.
    """
    if simulation.limits != slo.limits:
        raise ValueError("judge_slo() needs a simulation that watched the limits of the same SLO")
    edges_s = np.zeros(0) if slo.every_s is None else windows_s(simulation, slo.every_s)
    lines = []
    for k, limit in enumerate(slo.limits):
        # The kernel counts gaps, and stops when a limit on them is broken; other metrics are counted here.
        counted, violations = int(simulation.counted[k]), int(simulation.violations[k])
        if not limit.metric_row.is_of_gaps:  # Requests without a value have an infinite one and violate too.
            values_s = request_values_s(simulation, limit.metric, limit)
            counted, violations = len(values_s), int((values_s > limit.limit_s).sum())
        # A simulation that was stopped early, since its SLO was missed, is not complete.
        holds = violations <= allowed_above(limit.percentile_frac, counted) and simulation.complete
        kept_frac = 1.0 - violations / counted if counted else 1.0
        value = math.nan
        if with_percentiles:
            value = metric_percentile_s(simulation, limit.metric, limit.percentile_frac, limit)
        if slo.every_s is None:
            lines.append(LineVerdict(limit, value, kept_frac, holds, counted))
            continue
        # The line must hold in each window, and over the whole.
        holds &= all(each.holds for each in in_windows(simulation, k, edges_s))
        worst = worst_window(simulation, k, edges_s) if with_percentiles else None
        lines.append(LineVerdict(limit, value, kept_frac, holds, counted, worst))
    needs_attainment = with_percentiles or slo.attainment_frac is not None
    attainment = _attainment(simulation, slo) if needs_attainment else math.nan
    needed_frac = slo.attainment_frac or 0.0
    attained = [] if slo.attainment_frac is None else attained_in_windows(simulation, slo, edges_s)
    patient_frac, patience_s = _last_tenth(simulation, slo)
    return Verdict(
        lines=tuple(lines),
        attainment_frac=attainment,
        attainment_holds=slo.attainment_frac is None
        or (attainment >= needed_frac and all(each.holds for each in attained)),
        is_steady=patient_frac >= STEADY_FRAC,
        rejected=int((simulation.status == REJECTED).sum()),
        patient_frac=patient_frac,
        patience_s=patience_s,
        windows=max(len(edges_s) - 1, 0),
        attainment_worst=min(attained, key=lambda each: each.kept_frac, default=None),
        guarantees=judge_guarantees(simulation, slo),
    )


def windows_s(simulation: Simulation, every_s: float) -> Floats:
    """Edges (V + 1,) of the windows of this length, by nominal arrivals (`slo_windows_s`)."""
    start_s, end_s = simulation.window_s
    return slo_windows_s(simulation.nominal_s, (start_s, min(end_s, simulation.nominal_end_s)), every_s)


def in_windows(simulation: Simulation, k: int, edges_s: Floats) -> list[WindowResult]:
    """The results of limit `k` in each window, without the percentiles."""
    limit, window_count = simulation.limits[k], len(edges_s) - 1
    # Where the kernel counted no gap (`counted`), there are no runs although gaps were recorded.
    has_gap_runs = simulation.gaps is None and (len(simulation.runs) or not simulation.counted[k])
    if not limit.metric_row.is_of_gaps:
        is_above = request_values_s(simulation, limit.metric, limit) > limit.limit_s
        window_of = window_numbers(arrivals_with_value_s(simulation, limit.metric, limit), edges_s)
        counted = np.bincount(window_of, minlength=window_count)
        violations = np.bincount(window_of[is_above], minlength=window_count)
    elif np.array_equal(edges_s, simulation.edges_s):  # The kernel counted gaps in these windows already.
        counted, violations = simulation.counted_in[k], simulation.violations_in[k]
    elif has_gap_runs:
        runs_by_window = gap_runs_in(simulation, edges_s, simulation.class_number(limit))
        counted = np.array([int((runs["steps"] * runs["sequences"]).sum()) for runs in runs_by_window])
        violations = counted - [counting.gaps_at_most(runs, limit.limit_s) for runs in runs_by_window]
    else:
        raise ValueError("gaps of windows need a simulation with record=True")
    return [
        WindowResult(
            float(start_s),
            float(end_s),
            value_s=math.nan,
            kept_frac=1.0 - violated / total if total else 1.0,
            holds=violated <= allowed_above(limit.percentile_frac, total),
            judged=total,
        )
        for start_s, end_s, total, violated in zip(
            edges_s[:-1], edges_s[1:], counted.tolist(), violations.tolist(), strict=True
        )
    ]


def missed_windows(simulation: Simulation, slo: Slo, edges_s: Floats) -> list[int]:
    """The windows between `edges_s` (V + 1,) in which a limit or the attainment is missed."""
    lines = [in_windows(simulation, k, edges_s) for k in range(len(slo.limits))]
    if slo.attainment_frac is not None:
        lines.append(attained_in_windows(simulation, slo, edges_s))
    return [v for v in range(len(edges_s) - 1) if not all(each[v].holds for each in lines)]


def worst_window(simulation: Simulation, k: int, edges_s: Floats) -> WindowResult:
    """The window in which limit `k`'s percentile is largest.

    If several are equal, or gaps were not recorded, it is the window with the smallest share within the
    limit.
    """
    limit, windows = simulation.limits[k], in_windows(simulation, k, edges_s)
    if not limit.metric_row.is_of_gaps:
        request_s = request_values_s(simulation, limit.metric, limit)
        window_of = window_numbers(arrivals_with_value_s(simulation, limit.metric, limit), edges_s)
        ordered_s = request_s[np.argsort(window_of, kind="stable")]
        ends = np.cumsum(np.bincount(window_of, minlength=len(windows)))
        parts_s = np.split(ordered_s, ends[:-1])
        values_s = [percentile_s(part_s, limit.percentile_frac) for part_s in parts_s]
    elif len(simulation.runs) and simulation.gaps is None:
        values_s = [
            gap_percentile_s(runs, limit.percentile_frac)
            for runs in gap_runs_in(simulation, edges_s, simulation.class_number(limit))
        ]
    else:
        return min(windows, key=lambda each: (each.holds, each.kept_frac))  # False comes before True.
    # An empty window has no percentile (NaN). It counts as -1 s, so that it is the worst only if all are
    # empty.
    ranks = [
        (-1.0 if math.isnan(value) else value, -window.kept_frac)
        for value, window in zip(values_s, windows, strict=True)
    ]
    v = max(range(len(windows)), key=lambda window: ranks[window])
    return replace(windows[v], value_s=values_s[v])


def attained_in_windows(simulation: Simulation, slo: Slo, edges_s: Floats) -> list[WindowResult]:
    """The share of requests that keep all limits at once in each window (`slo: attainment` says how many
    must); an empty list without windows.
    """
    if not len(edges_s):
        return []
    window_of = window_numbers(simulation.arrival_s[measured_mask(simulation)], edges_s)
    keeps_limits, windows = _measured_keep_all(simulation, slo), []
    for v, (start_s, end_s) in enumerate(pairwise(edges_s.tolist())):
        is_here = window_of == v
        # Without requests nothing is missed.
        share = float(keeps_limits[is_here].mean()) if is_here.any() else 1.0
        holds = share >= (slo.attainment_frac or 0.0)
        windows.append(WindowResult(start_s, end_s, math.nan, share, holds, int(is_here.sum())))
    return windows


def _attainment(simulation: Simulation, slo: Slo) -> float:
    """The share of measured requests that keep all limits at once; 1 if there are none."""
    kept = _measured_keep_all(simulation, slo)
    return float(kept.mean()) if len(kept) else 1.0


def _measured_keep_all(simulation: Simulation, slo: Slo) -> npt.NDArray[np.bool_]:
    """Which measured requests keep all limits at once."""
    return np.asarray(keeps_all(simulation, slo)[measured_mask(simulation)])


def keeps_all(simulation: Simulation, slo: Slo) -> npt.NDArray[np.bool_]:
    """Which of all requests (n,) are served and keep all limits at once (tbt: in their longest gap)."""
    kept = simulation.status == FINISHED
    for limit in slo.limits:
        is_above = METRICS[limit.metric].values_s(simulation) > limit.limit_s
        kept &= ~(is_above if limit.selector is None else is_above & simulation.limited_requests(limit))
    return np.asarray(kept)


def _last_tenth(simulation: Simulation, slo: Slo) -> tuple[float, float]:
    """The share of the last requests that waited at most `patience_s`, and `patience_s`: of all requests, or
    of the class with the smallest share. The last requests arrived in the last tenth of the window.
    """
    start_s, end_s = simulation.window_s[0], min(simulation.window_s[1], simulation.nominal_end_s)
    last = (simulation.arrival_s >= last_tenth_s(start_s, end_s)) & (simulation.arrival_s <= end_s)
    if not slo.selectors:
        return _patient_share(simulation, last, slo.patience_of(None, end_s - start_s))
    shares = []
    for number, selector in enumerate(slo.selectors):
        is_last_here = last & (simulation.of_class == number)
        shares.append(_patient_share(simulation, is_last_here, slo.patience_of(selector, end_s - start_s)))
    # Requests of no class have the patience of the whole SLO.
    if (of_no_class := last & (simulation.of_class < 0)).any():
        shares.append(_patient_share(simulation, of_no_class, slo.patience_of(None, end_s - start_s)))
    return min(shares)  # By share, then by patience.


def _patient_share(
    simulation: Simulation, last: npt.NDArray[np.bool_], patience_s: float
) -> tuple[float, float]:
    """The share of the requests `last` that waited at most `patience_s` for each token, and `patience_s`."""
    # An answer of one token has no gap, so its longest gap is NaN, which fmax ignores.
    waited_s = np.fmax(simulation.ttft_s[last], simulation.tbt_max_s[last])
    waited_s[simulation.status[last] != FINISHED] = np.inf  # Never served.
    return float((waited_s <= patience_s).mean()) if last.any() else 1.0, patience_s
