"""Compares rules for the number of workers of a pool on days that they were not fitted to: cost by the share
of windows missed, beside lower bounds.

    python benchmarks/staffing.py TRACES [--before 3] [--days 4,14]

Days are drawn from ServeGen's three curves, as the day "chat-1" of benchmarks/five_days.py. Rules are fitted
to the `--before` days before each day. Simulations only find the least number of workers that each window of
ten minutes needs. Each kind of rule has a parameter from few workers to many. A rule decides every 15 s by
the work that arrived until then, and a worker is ready after a start-up. A window is missed if it has too few
workers during a tenth of it.

constant   so many workers that a share of the windows of the days before had enough
load       fleetplan's rule by load, with a headroom
floor      the same without headroom, and never fewer than constant
hour       as constant, from windows at the same time of the day, up to an hour before and after
forest     a random forest on 19 figures: the work of the last 10, 30, 60 and 120 min, and the needs at that
           time of the days before. It takes the number of workers with the least expected cost of workers and
           missed windows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.ndimage import maximum_filter1d, minimum_filter1d
from sklearn.ensemble import RandomForestClassifier

from benchmarks.five_days import SMALL, SMALL_SLO, curve_day
from planner.api.inputs import read_fleet
from planner.api.questions import read_task
from planner.day.search.capacity import engine_profile
from planner.day.search.causal_bound import CausalBound, causal_bound
from planner.day.search.day_runs import DayRuns
from planner.day.search.load_rules import _fit_rule
from planner.simulator.elastic import ElasticPool
from planner.units import HOUR_S

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
CURVES = ("small", "large", "mid")
MEAN_RPS = 3.0
# A worker's start-up, the time between decisions, the length of a window [s], and the most workers.
START_S, SPAN_S, WINDOW_S, MOST = 325.0, 15.0, 600.0, 10
SPANS = round(WINDOW_S / SPAN_S)
LATE_SPANS = round(START_S / SPAN_S) + 2  # A start-up, the age of metrics, and the time between decisions.
SHORT_FRAC = 0.1  # A window is missed if more than this share of it has too few workers.
# The parameters of the rules.
SHARES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 1.0)
HEADROOMS = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)
MISS_COSTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)  # In workers for a window.
AROUND_WINDOWS = 6  # An hour.
MISSED_FRACS = (0.01, 0.02, 0.05, 0.1)


@dataclass(frozen=True, slots=True, eq=False)
class SpanDay:
    """The work that came in every span [s/s], and the least workers of every window."""

    work: Floats
    needs: Ints


@cache
def span_day(traces: Path, curve: str, number: int) -> SpanDay:
    trace = curve_day(traces, curve, day=number, mean_rps=MEAN_RPS)
    question = read_task(SMALL_SLO)
    fleet, slo = read_fleet(SMALL, question.catalog), question.task().slo
    runs = DayRuns(fleet, trace, slo, [ElasticPool(START_S, least=1, most=MOST)])
    bound = causal_bound(runs)
    assert bound is not None
    engine = engine_profile(fleet.pools[0].type, int((trace.input_tokens + trace.output_tokens).max()))
    lengths = zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    work_s = [engine.work_s("mixed", prompt, output) for prompt, output in lengths]
    spans = len(bound.needs) * SPANS
    span_of_request = (trace.arrival_s // SPAN_S).astype(int)
    work = np.bincount(span_of_request, work_s, minlength=spans)[:spans] / SPAN_S
    return SpanDay(work, np.minimum(bound.needs[:, 0], MOST))


def past_maximum(numbers: Ints, spans: int) -> Ints:
    """At each span the largest of the last `spans` numbers."""
    return np.asarray(maximum_filter1d(numbers, spans, origin=(spans - 1) // 2))


def played(ordered: Ints, day: SpanDay) -> tuple[float, int]:
    """The mean workers paid in each window, summed over the day, and the windows missed. A worker is ready if
    it was ordered during all of the last LATE_SPANS.
    """
    ready = minimum_filter1d(ordered, LATE_SPANS, origin=(LATE_SPANS - 1) // 2).reshape(-1, SPANS)
    missed = (ready < day.needs[:, None]).mean(axis=1) > SHORT_FRAC
    return float(ordered.sum()) / SPANS, int(missed.sum())


def window_loads(work: Floats) -> Floats:
    """At each span the 95th percentile of the work in the last window."""
    before = np.concatenate((np.full(SPANS - 1, work[:SPANS].mean()), work))
    return np.asarray(np.quantile(np.lib.stride_tricks.sliding_window_view(before, SPANS), 0.95, axis=1))


def needs_around(earlier: Sequence[SpanDay], windows: int, around: int = AROUND_WINDOWS) -> Ints:
    """For each window of a day the needs at that time of earlier days, neighbours included (windows, N)."""
    places = np.arange(windows)[:, None] + np.arange(-around, around + 1)
    return np.concatenate([day.needs[places % len(day.needs)] for day in earlier], axis=1)


def rules(earlier: Sequence[SpanDay], day: SpanDay) -> Iterator[tuple[str, Ints]]:
    """The orders (spans,) of every rule on a day, by kind, from few workers to many."""
    windows, needs = len(day.needs), np.concatenate([each.needs for each in earlier])
    own_loads = np.concatenate(
        [window_loads(each.work)[np.arange(1, len(each.needs) + 1) * SPANS - 1] for each in earlier]
    )
    _, rule = _fit_rule(own_loads, needs, SPAN_S, WINDOW_S)
    loads = window_loads(day.work)

    def by_load(headroom: float) -> Ints:
        sizes = [rule.workers_for_load(load) for load in (loads * (1 + headroom)).tolist()]
        return past_maximum(np.clip(sizes, 1, MOST), 4)

    around = needs_around(earlier, windows)
    for share in SHARES:
        floor = int(np.quantile(needs, share, method="inverted_cdf"))
        yield "constant", np.full(len(day.work), floor)
        yield "floor", np.maximum(by_load(0.0), floor)
        hourly = np.quantile(around, share, axis=1, method="inverted_cdf").astype(int)
        ahead = np.roll(np.repeat(hourly, SPANS), -LATE_SPANS)  # Ordered so much earlier.
        yield "hour", np.maximum(np.repeat(hourly, SPANS), ahead)
    for headroom in HEADROOMS:
        yield "load", by_load(headroom)
    others = [[*earlier[:i], *earlier[i + 1 :]] for i in range(len(earlier))] if len(earlier) > 1 else []
    if others:
        columns = [figures(each, rest) for each, rest in zip(earlier, others, strict=True)]
        forest = RandomForestClassifier(300, min_samples_leaf=8, max_features=0.5, random_state=0)
        forest.fit(np.concatenate(columns), needs)
        exceeded = 1 - np.cumsum(forest.predict_proba(figures(day, earlier)), axis=1)
        for cost in MISS_COSTS:
            best = forest.classes_[np.argmin(forest.classes_ + cost * exceeded, axis=1)]
            # A window's workers are ordered a start-up before it begins.
            ordered = np.repeat(best, SPANS)
            yield "forest", np.maximum(ordered, np.append(ordered[LATE_SPANS:], ordered[-LATE_SPANS:]))


def figures(day: SpanDay, earlier: Sequence[SpanDay]) -> Floats:
    """What is known of each window when its workers are ordered (windows, figures)."""
    around = needs_around(earlier, len(day.needs))
    rows = []
    for v in range(len(day.needs)):
        end = max(v * SPANS - LATE_SPANS, 1)
        row = [around[v].mean(), around[v].max(), np.quantile(around[v], 0.8)]
        for windows in (1, 3, 6, 12):
            work = day.work[max(end - windows * SPANS, 0) : end]
            row += [work.mean(), work.std(), work.max(), float(np.quantile(work, 0.95))]
        rows.append(row)
    return np.array(rows)


def cost_at(points: Sequence[tuple[float, float]], missed_frac: float) -> float:
    """The cost of a kind of rule at a share of windows missed, interpolated between its points (share, cost);
    NaN outside of them.
    """
    ordered = sorted(points)
    shares, costs = zip(*ordered, strict=True)
    return float(np.interp(missed_frac, shares, costs, left=np.nan, right=np.nan))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path)
    parser.add_argument("--before", type=int, default=3)
    parser.add_argument(
        "--days", default="4,14", help="the first day that judges, and the one after the last"
    )
    options = parser.parse_args()
    first, end = map(int, options.days.split(","))
    heads = " | ".join(f"{100 * share:g} % missed" for share in MISSED_FRACS)
    print(f"curve | rule | {heads}: workers paid, of the least of each window")
    for curve in CURVES:
        costs: dict[tuple[str, int], list[float]] = {}
        missed: dict[tuple[str, int], int] = {}
        bounds: dict[str, list[list[float]]] = {"told": [], "learns": []}
        count = 0
        for number in range(first, end):
            day = span_day(options.traces, curve, number)
            earlier = [span_day(options.traces, curve, number - k) for k in range(options.before, 0, -1)]
            count += len(day.needs)
            knobs: dict[str, int] = {}
            for kind, ordered in rules(earlier, day):
                key = (kind, knobs.setdefault(kind, 0))
                knobs[kind] += 1
                paid, short = played(ordered, day)
                costs.setdefault(key, []).append(paid / float(day.needs.sum()))
                missed[key] = missed.get(key, 0) + short
            for name, numbers in day_bounds(day).items():
                bounds[name].append(numbers)
        for kind in dict.fromkeys(kind for kind, _ in costs):
            points = [(missed[key] / count, float(np.mean(costs[key]))) for key in costs if key[0] == kind]
            print(curve, kind, *(f"{cost_at(points, share):.2f}" for share in MISSED_FRACS), sep=" | ")
        for name, rows in bounds.items():
            print(curve, name, *(f"{cost:.2f}" for cost in np.mean(rows, axis=0)), sep=" | ", flush=True)


def day_bounds(day: SpanDay) -> Mapping[str, list[float]]:
    """Lower bounds on the cost of any rule: of one that knows each hour's needs beforehand ("told"), and of
    one that learns them from the hour's windows ("learns").
    """
    lengths_s = np.full(len(day.needs), WINDOW_S)
    bound = CausalBound(day.needs[:, None], lengths_s, (1,), lambda sizes: 3600 / WINDOW_S * sum(sizes))
    fracs = [share * len(day.needs) for share in MISSED_FRACS]
    least = float(day.needs.sum())
    return {
        "told": [bound.least_usd(each, HOUR_S) / least for each in fracs],
        "learns": [(bound.least_usd_of_unknown_blocks(each, HOUR_S) or np.nan) / least for each in fracs],
    }


if __name__ == "__main__":
    main()
