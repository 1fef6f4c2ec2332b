"""`plan watch`: compares live metrics with the traffic and latencies that a plan expects."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from planner.api.inputs import KeysAndValues
from planner.api.questions import TaskDocument, read_task
from planner.api.results import Result
from planner.documents.catalog import CatalogLike, read_catalog
from planner.documents.plan_folder import read_written
from planner.errors import InputError
from planner.importers.prometheus_range import PrometheusSeries, read_series
from planner.importers.vllm_metrics import NAMES, LiveTraffic, live_traffic
from planner.reports.words import spot_caveat
from planner.runtime.prometheus_server import query_range
from planner.studies import watch_words
from planner.studies.plan_watch import (
    WINDOW_S,
    PlanExpectations,
    WatchedPlan,
    current_trace,
    read_expectations,
    replan_now,
    watch_windows,
)
from planner.studies.replanning import Replan, replan_document
from planner.studies.what_if import Study
from planner.units import DAY_S, parse_quantity

# If drifted quantities have moved by less than this share since the last search, no new search is made: so
# small a change hardly changes a number of workers.
REPLAN_AGAIN_FRAC = 0.03
LEAST_STEP_S = 1.0  # Servers are scraped less often than this, so shorter windows would have no samples.


@dataclass(frozen=True, slots=True)
class MetricsSource:
    """Where metrics come from (`places`): the address of a Prometheus server, or files of range queries.

    `look_back_s` (`--window`) is how far back to look, `window_s` (`--step`) the length of the windows that
    are tested. `model` is the label model_name, `match` more labels in PromQL, such as 'namespace="prod"'.
    """

    places: Sequence[str]
    look_back_s: float = DAY_S
    window_s: float = WINDOW_S
    model: str | None = None
    match: str = ""

    def __post_init__(self) -> None:
        if not self.places:
            raise InputError("--prometheus: expected an address such as http://prometheus:9090, or files")
        if self.window_s < LEAST_STEP_S:
            raise InputError(f"--step: expected at least {LEAST_STEP_S:g} s, found {self.window_s:g} s")
        if self.look_back_s < 2 * self.window_s:
            raise InputError(
                f"--window: {self.look_back_s:g} s holds fewer than two windows of --step {self.window_s:g} s"
            )
        if self.is_server and len(self.places) > 1:
            raise InputError("--prometheus: expected one address, or files; found an address and others")

    @property
    def is_server(self) -> bool:
        """Whether the metrics come from a server and not from files."""
        return any(place.startswith(("http://", "https://")) for place in self.places)

    def series(self) -> tuple[PrometheusSeries, ...]:
        """The samples of the last `look_back_s`: until now from a server, until the last sample of files."""
        if self.is_server:
            # Both ends are multiples of a window, so that later queries have the same windows.
            end_s = time.time() // self.window_s * self.window_s
            start_s = end_s - self.look_back_s // self.window_s * self.window_s
            return query_range(
                self.places[0], NAMES, start_s=start_s, end_s=end_s, step_s=self.window_s, match=self.match
            )
        if self.match:
            raise InputError(
                "--match: narrows the query to a server, and works with a server only; leave it out"
            )
        all_series = read_series([Path(place) for place in self.places], frozenset(NAMES).__contains__)
        # `read_series` returns at least one series, and each has a sample.
        from_s = max(float(row.t_s[-1]) for row in all_series) - self.look_back_s
        recent = (
            PrometheusSeries(row.name, row.labels, row.t_s[row.t_s >= from_s], row.values[row.t_s >= from_s])
            for row in all_series
        )
        return tuple(row for row in recent if row.t_s.size)

    def live(self, plan: PlanExpectations) -> LiveTraffic:
        """The traffic and latencies that these metrics show, in windows of `window_s`."""
        return live_traffic(
            self.series(),
            every_s=self.window_s,
            model=self.model,
            is_disaggregated=plan.written.fleet.is_disaggregated,
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class WatchResult(Result):
    """How a deployment compares with its plan.

    `replan` is what replanning would change; None unless the question was given and something drifted or the
    SLO is missed. `replanned_for` is the comparison for which it was computed, this or an earlier one.
    """

    plan: PlanExpectations
    watched: WatchedPlan
    replan: Replan | None = None
    replanned_for: WatchedPlan | None = None

    @property
    def status(self) -> str:
        """ "inside", "drifted" (the plan holds or may hold), "outgrown" (it would surely miss the SLO on the
        traffic as it is now) or "missed" (the SLO is missed).
        """
        return self.watched.status

    def headline(self) -> str:
        return watch_words.watch_sentences(self.watched)[0]

    def sentences(self) -> list[str]:
        sentences = watch_words.watch_sentences(self.watched)[1:]
        if spares := self.plan.written.spot_spares:
            sentences.append(watch_words.spot_sentence(spares))
        elif on_spot := spot_caveat(self.plan.written.fleet):
            sentences.append(f"{on_spot}, so the plan may hold less far than this says")
        if self.replan is not None:
            sentences.append(watch_words.replan_sentence(self.replan, self.plan.written.fleet))
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """What `plan watch --json` prints."""
        document = watch_words.watch_document(self.watched)
        if self.replan is None:
            return document
        return document | {"replan": replan_document(self.replan, drift=None)}  # `document` has the drift.

    def to_frame(self) -> pd.DataFrame:
        """One row per quantity that was compared with the plan."""
        names = ["what", "planned", "now", "change_frac", "is_drift", "is_harder", "since_s"]
        return pd.DataFrame(watch_words.watch_document(self.watched)["drift"], columns=names)


def watch(
    plan: str | Path,
    prometheus: str | Path | Sequence[str | Path],
    slo: TaskDocument | KeysAndValues | str | Path | None = None,
    *,
    window: str = "24 h",
    step: str = "1 min",
    model: str | None = None,
    match: str = "",
    catalog: CatalogLike = None,
) -> WatchResult:
    """Compare live metrics of vLLM once with the plan in a folder that `plan -o` or `PlanResult.save` wrote.

    `prometheus` is the address of a server, or files of ranges. `window` is how far back to look, `step` the
    length of the windows that are tested, `model` one of several served names, `match` more labels as in
    PromQL. With `slo`, the plan's question, the result also has what replanning would change. Raises
    InputError where there is nothing to look at.
    """
    places = [prometheus] if isinstance(prometheus, str | Path) else prometheus
    source = MetricsSource(
        places=tuple(map(str, places)),
        look_back_s=parse_quantity(window, "s", where="window"),
        window_s=parse_quantity(step, "s", where="step"),
        model=model,
        match=match,
    )
    catalog_rows = read_catalog(catalog)
    return look_once(read_planned(plan, catalog_rows), source, slo, catalog=catalog_rows)


def read_planned(plan: str | Path, catalog: CatalogLike = None) -> PlanExpectations:
    """The plan in a folder that `plan -o` wrote, with the values to compare live metrics with."""
    return read_expectations(read_written(Path(plan), read_catalog(catalog)))


def look_once(
    plan: PlanExpectations,
    source: MetricsSource,
    slo: TaskDocument | KeysAndValues | str | Path | None = None,
    *,
    catalog: CatalogLike = None,
    progress: Callable[[str], None] = lambda _: None,
    before: WatchResult | None = None,
) -> WatchResult:
    """Compare a deployment once with its plan.

    With `slo`, a drift or a missed SLO starts `plan replan` on the traffic as it is now, as DistServe
    (section 4.3) replans where traffic shifts. The replan of `before`, the previous comparison, is reused
    until a drifted quantity moves by more than REPLAN_AGAIN_FRAC.
    """
    progress("looking at the metrics")
    watched = watch_windows(plan, source.live(plan))
    if slo is None or not (watched.missed_lines or any(row.is_drift for row in watched.drifts)):
        return WatchResult(plan, watched)
    if before is not None and before.replanned_for is not None and _as_before(watched, before.replanned_for):
        return WatchResult(plan, watched, before.replan, before.replanned_for)
    progress("replanning")
    return WatchResult(plan, watched, replan(plan, watched, slo, catalog=catalog), watched)


def _as_before(now: WatchedPlan, before: WatchedPlan) -> bool:
    """Whether the same quantities drifted and the same limits are missed as before, and no drifted quantity
    has moved by more than REPLAN_AGAIN_FRAC since.
    """

    def drifted_values(watched: WatchedPlan) -> dict[str, float]:
        return {row.what: row.now for row in watched.drifts if row.is_drift}

    values, values_before = drifted_values(now), drifted_values(before)
    missed, missed_before = ([line.limit for line in watched.missed_lines] for watched in (now, before))
    return (
        values.keys() == values_before.keys()
        and missed == missed_before
        # Multiplied, not divided: a quantity may have been 0, such as the rate after traffic stopped.
        and all(abs(values[what] - was) <= REPLAN_AGAIN_FRAC * was for what, was in values_before.items())
    )


def replan(
    plan: PlanExpectations,
    watched: WatchedPlan,
    slo: TaskDocument | KeysAndValues | str | Path,
    *,
    catalog: CatalogLike = None,
    horizon_h: float = 24.0,
    time_limit_s: float = 120.0,
) -> Replan:
    """What `plan replan` would change for the present traffic. A cheaper fleet must save the cost of the move
    within `horizon_h`.
    """
    catalog_rows = read_catalog(catalog)
    study = Study(current_trace(plan, watched), catalog_rows, time_limit_s=time_limit_s)
    return replan_now(study, read_task(slo, catalog_rows).task(), plan, horizon_h)
