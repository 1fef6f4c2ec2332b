"""`simulate`, `compare` and `goodput`: how given fleets serve their traffic, without a search."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, overload

import pandas as pd

from planner.api import inputs
from planner.api.results import Result
from planner.documents.catalog import Catalog, CatalogLike, read_catalog
from planner.domain import Slo
from planner.errors import InputError
from planner.files.checked_files import check_output_directory, check_output_file, write_file, write_files
from planner.files.document_values import errors_as
from planner.fleet import Fleet
from planner.papers.fleet_goodput import FleetGoodput, Watch, fleet_goodput, goodput_document
from planner.papers.goodput import TOLERANCE_FRAC
from planner.parallel.executors import Executor, is_executor_set
from planner.reports import output, words
from planner.reports.simulated_run import SimulatedOutcome, simulate_recorded
from planner.search.oracle.scenarios import Scenarios
from planner.slo_metrics import latency_columns
from planner.studies import fleet_comparison as comparisons
from planner.studies import operator_times, routing_moments, tenants
from planner.studies.fleet_safety import scenarios_for
from planner.studies.seeds import SeedRun, SeedsQuestion, over_seeds, seeds_document
from planner.traffic.classes import check_classes, check_judged_classes
from planner.traffic.scaling import RateRequest
from planner.traffic.trace import Trace, spread_stamps
from planner.units import count_text, show_digits, show_share

Fleets: TypeAlias = (
    "Mapping[str, inputs.FleetLike] | Iterable[inputs.FleetLike | tuple[str, inputs.FleetLike]]"
)


class TrafficKeys(TypedDict, total=False):
    """The keys of `traffic` that may be arguments too, as in a file slo.yaml.

    `rate` is in requests/s, `scale` is the way in which a trace is brought to this rate, and `window` is the
    part of the trace that is simulated.
    """

    rate: float | str
    scale: str
    window: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SimulationResult(Result):
    """One run of a fleet. `closed_loop` is the number of requests in flight; 0 if arrival times decide."""

    fleet: Fleet
    requests: Trace
    slo: Slo | None
    outcome: SimulatedOutcome
    seed: int = 0
    closed_loop: int = 0

    @property
    def holds(self) -> bool | None:
        """Whether the run kept the SLO; None where none was given."""
        return None if self.outcome.verdict is None else self.outcome.verdict.holds

    def headline(self) -> str:
        verdict = {True: "keeps the SLO", False: "MISSES the SLO", None: "no SLO given"}[self.holds]
        if self.holds and self.outcome.verdict is not None and not self.outcome.verdict.is_judged:
            verdict = "the SLO is not judged, no value of it came to be measured,"
        return (
            f"{words.describe_fleet(self.fleet)}: {verdict} on "
            f"{count_text(len(self.requests), 'request')} of {self.requests.name}"
        )

    def sentences(self) -> list[str]:
        verdict = self.outcome.verdict
        lines = [] if verdict is None else verdict.lines
        rejected = words.rejected_text(self.outcome.simulation, self.fleet)
        return [
            *([rejected] if rejected else []),
            *[
                f"{line.limit.label}: {', limit '.join(words.value_and_limit(line))}"
                + (f", {show_share(line.kept_frac)} within" if line.judged else "")
                for line in lines
            ],
        ]

    def to_dict(self) -> dict[str, Any]:
        """What `plan simulate --json` prints."""
        costs = tenants.tenant_costs(self.outcome.simulation, self.fleet)
        return self.outcome.summary() | (
            {"tenant_costs": tenants.tenant_rows(costs)} if len(costs) > 1 else {}
        )

    def explain_routing(
        self, moments: int = routing_moments.DEFAULT_MOMENTS
    ) -> tuple[routing_moments.RoutingMoment, ...]:
        """The workers at `moments` times of the run, beside the best packing of the same requests."""
        return routing_moments.explain_routing(self.fleet, self.outcome.simulation, self.slo, moments)

    def operators(self) -> pd.DataFrame:
        """The operators that the steps spend their time on, one row per pool and operator.

        These are Vidur's operator metrics, as `plan simulate --operators` prints them. The run is simulated
        once more to record them.
        """
        return pd.DataFrame(self.operator_rows())

    def operator_rows(self) -> list[dict[str, Any]]:
        """The rows that `plan simulate --operators --json` has under `operators`."""
        recorded = simulate_recorded(
            self.fleet, self.requests, seed=self.seed, closed_loop=self.closed_loop, record_parts=True
        )
        return operator_times.operator_rows(operator_times.operator_times(self.fleet, recorded.simulation))

    def to_frame(self) -> pd.DataFrame:
        """Percentiles in seconds, one row per metric."""
        summary = self.to_dict()
        return pd.DataFrame(
            [{"metric": name, **summary[name]} for name in latency_columns() if summary[name]]
        )

    def requests_frame(self) -> pd.DataFrame:
        """One row per request: the columns of requests.csv."""
        return pd.read_csv(io.StringIO(output.requests_csv(self.outcome.simulation)))

    def save(self, file: str | Path) -> None:
        """Write requests.csv under this name."""
        _write_csv(Path(file), output.requests_csv(self.outcome.simulation))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SeedsResult(Result):
    """The same fleet under several seeds, in `runs`; figures come with 95 % intervals of their means."""

    fleet: Fleet
    slo: Slo | None
    runs: Sequence[SeedRun]

    @property
    def kept_by(self) -> int | None:
        """How many of the seeds keep the SLO; None where none was given."""
        slo = self.to_dict()["slo"]
        return None if slo is None else int(slo["kept_by"])

    @property
    def holds(self) -> bool | None:
        """Whether all seeds keep the SLO; None where none was given."""
        return None if self.kept_by is None else self.kept_by == len(self.runs)

    def headline(self) -> str:
        verdict_text = (
            "no SLO given"
            if self.kept_by is None
            else f"{self.kept_by} of {len(self.runs)} seeds keep the SLO"
        )
        return f"{words.describe_fleet(self.fleet)}: {verdict_text}"

    def sentences(self) -> list[str]:
        return list(self.to_dict()["notes"])

    def to_dict(self) -> dict[str, Any]:
        """What `plan simulate --seeds N --json` prints."""
        return seeds_document(self.runs)

    def to_frame(self) -> pd.DataFrame:
        """One row per metric and percentile: mean, interval and range over the seeds."""
        document = self.to_dict()
        return pd.DataFrame(
            [
                {"metric": metric, "figure": name, **values}
                for metric in latency_columns()
                if metric in document
                for name, values in document[metric].items()
            ]
        )

    def save(self, file: str | Path) -> None:
        """Write the requests.csv of the first seed under this name."""
        _write_csv(Path(file), self.runs[0].requests_csv)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ComparisonResult(Result):
    """Several fleets, or policies, on the same requests."""

    comparison: comparisons.FleetComparison

    def headline(self) -> str:
        return comparisons.comparison_summary(self.comparison)

    def sentences(self) -> list[str]:
        return list(self.comparison.notes)

    def to_dict(self) -> dict[str, Any]:
        """What `plan compare --json` prints."""
        return comparisons.to_json(self.comparison)

    def to_frame(self) -> pd.DataFrame:
        """The rows of compare.csv."""
        return pd.DataFrame([row.cells() for row in self.comparison.rows])

    def report(self) -> str:
        """The page compare.html."""
        return comparisons.render_comparison(self.comparison)["compare.html"]

    def save(self, folder: str | Path, *, png: bool = False) -> tuple[str, ...]:
        """Write compare.html, compare.csv and compare.json; with `png` the charts as pictures too."""
        check_output_directory(Path(folder))
        drawn = output.chart_pictures(comparisons.draw_latencies(self.comparison)) if png else {}
        written: dict[str, str | bytes] = {**comparisons.render_comparison(self.comparison), **drawn}
        write_files(Path(folder), written, outdated=comparisons.OUTDATED)
        return tuple(written)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class GoodputResult(Result):
    """The highest rate found at which a fleet keeps the SLO in steady state, and the lowest that fails."""

    fleet: Fleet
    fleet_goodput: FleetGoodput

    @property
    def rate_rps(self) -> float:
        """The highest rate found at which the fleet keeps the SLO."""
        return self.fleet_goodput.goodput.rate_rps

    @property
    def fails_rps(self) -> float:
        """The lowest rate found at which the fleet misses the SLO."""
        return self.fleet_goodput.goodput.fails_rps

    def headline(self) -> str:
        return (
            f"{words.describe_fleet(self.fleet)}: {show_digits(self.rate_rps, 4)} requests/s on "
            f"{count_text(self.fleet.gpus, 'GPU')}, {show_digits(self.rate_rps / self.fleet.gpus, 3)} per "
            f"GPU; fails at {show_digits(self.fails_rps, 4)}"
        )

    def sentences(self) -> list[str]:
        # While the first requests come and the last ones leave, a fleet has less to do than in steady state.
        # In a short trace that is a large part of the time.
        short = f"the trace is only {self.fleet_goodput.residences:.1f} mean residences long; it flatters"
        lines = [short] if self.fleet_goodput.is_short else []
        if self.fleet_goodput.kept_above_rps > 0:
            lines.append(
                f"{show_digits(self.fleet_goodput.kept_above_rps, 4)} requests/s are kept all the same: "
                "which requests are judged decides here, more than the rate; a longer trace tells more"
            )
        if spot := words.spot_caveat(self.fleet):
            lines.append(spot)
        return lines

    def to_dict(self) -> dict[str, Any]:
        """What `plan goodput --json` prints."""
        return goodput_document(self.fleet_goodput)

    def to_frame(self) -> pd.DataFrame:
        """The limit and the simulated seconds at that rate, one row per limit."""
        return pd.DataFrame(self.to_dict()["slo"])


@overload
def simulate(
    fleet: inputs.FleetLike,
    trace: inputs.TraceLike | None = None,
    slo: inputs.SloLike = None,
    *,
    traffic: inputs.TrafficLike = None,
    catalog: CatalogLike = None,
    seed: int = 0,
    closed_loop: int = 0,
    executor: Executor | str | None = None,
    **traffic_keys: Unpack[TrafficKeys],
) -> SimulationResult: ...


@overload
def simulate(
    fleet: inputs.FleetLike,
    trace: inputs.TraceLike | None = None,
    slo: inputs.SloLike = None,
    *,
    traffic: inputs.TrafficLike = None,
    catalog: CatalogLike = None,
    seed: Sequence[int],
    closed_loop: int = 0,
    executor: Executor | str | None = None,
    **traffic_keys: Unpack[TrafficKeys],
) -> SeedsResult: ...


def simulate(
    fleet: inputs.FleetLike,
    trace: inputs.TraceLike | None = None,
    slo: inputs.SloLike = None,
    *,
    traffic: inputs.TrafficLike = None,
    catalog: CatalogLike = None,
    seed: int | Sequence[int] = 0,
    closed_loop: int = 0,
    executor: Executor | str | None = None,
    **traffic_keys: Unpack[TrafficKeys],
) -> SimulationResult | SeedsResult:
    """Simulate every request of a trace on a fleet, and judge the run if an SLO is given.

    `traffic` ({"rate": 20, "window": "busiest 10 min"}) says which requests of the trace are simulated and at
    what rate. Its keys may be arguments instead (rate=20). If neither is given and `slo` is a whole question,
    the question's traffic is simulated; of a plan, without `trace`, the traffic and the SLO that it was made
    for. `closed_loop` keeps that many requests in flight in place of arrival times. Several seeds
    (`range(8)`) give every figure with its interval; `executor` says where they run.
    """
    if closed_loop < 0:
        raise InputError(f"closed_loop: must be >= 0, found {closed_loop}")
    seeds = [inputs.checked_seed(each) for each in (seed if isinstance(seed, Iterable) else [seed])]
    first_seed = seeds[0] if seeds else 0
    catalog_rows = read_catalog(catalog)
    fleet_read = inputs.read_fleet(fleet, catalog_rows, slo=slo)
    traffic = _merge_traffic(traffic, traffic_keys)
    judged_slo, rate_request = inputs.limits_and_rate(slo, catalog_rows, traffic=traffic, command="simulate")
    if trace is None and rate_request.described is None:
        if (planned := inputs.planned_slo_and_trace(fleet, catalog_rows)) is not None:
            judged_slo, trace = judged_slo or planned[0], planned[1]
            rate_request = rate_request if traffic is not None else RateRequest()
    whole_trace, rate_request = inputs.requests_and_rate(
        trace, rate_request, is_rate_given=traffic is not None, seed=first_seed
    )
    check_classes(judged_slo or Slo(()), whole_trace)
    if not isinstance(seed, Iterable):
        if executor is not None:
            raise InputError("executor: one seed is simulated here; ask for several, such as seed=range(8)")
        requests = rate_request.apply_to(spread_stamps(whole_trace, seed=first_seed), seed=first_seed)
        check_judged_classes(judged_slo or Slo(()), requests)  # The window may lack a class of the trace.
        simulation = simulate_recorded(
            fleet_read, requests, judged_slo, seed=first_seed, closed_loop=closed_loop
        )
        return SimulationResult(fleet_read, requests, judged_slo, simulation, first_seed, closed_loop)
    question = SeedsQuestion(fleet_read, whole_trace, rate_request, judged_slo, closed_loop)
    chosen_executor = _choose_executor(executor, "processes")
    return SeedsResult(fleet_read, judged_slo, over_seeds(question, seeds, executor=chosen_executor))


def compare(
    fleets: Fleets,
    trace: inputs.TraceLike | None = None,
    slo: inputs.SloLike = None,
    *,
    policies: Mapping[str, inputs.KeysAndValues | None] | None = None,
    traffic: inputs.TrafficLike = None,
    catalog: CatalogLike = None,
    seed: int = 0,
    executor: Executor | str | None = None,
    **traffic_keys: Unpack[TrafficKeys],
) -> ComparisonResult:
    """Simulate several fleets on the same requests; with `policies`, each fleet under each of these.

    `fleets` are named by a mapping, or by their files. `policies` maps a label to keys of the section
    `policies` of a fleet file, as in {"round robin": {"routing": "round-robin"}}; None stands for the fleet's
    own policies. `slo`, `traffic` and its keys are those of `simulate`. If `slo` is a whole question, each
    fleet is simulated in its scenarios too.
    """
    seed, traffic = inputs.checked_seed(seed), _merge_traffic(traffic, traffic_keys)
    catalog_rows = read_catalog(catalog)
    variants = [
        comparisons.Variant(
            f"{name}, {label}" if policies else name,
            _read_under_policies(fleet, catalog_rows, slo, label, changes),
        )
        for name, fleet in inputs.named_fleets(fleets)
        for label, changes in (policies or {"": None}).items()
    ]
    judged_slo, rate_request = inputs.limits_and_rate(slo, catalog_rows, traffic=traffic, command="compare")
    whole_trace, rate_request = inputs.requests_and_rate(
        trace, rate_request, is_rate_given=traffic is not None, seed=seed
    )
    check_classes(judged_slo or Slo(()), whole_trace)
    requests = rate_request.apply_to(spread_stamps(whole_trace, seed=seed), seed=seed)
    chosen_executor = _choose_executor(executor, "serial")
    scenarios = (
        None if judged_slo is None else _scenarios_of(slo, catalog_rows, rate_request, whole_trace, seed)
    )
    return ComparisonResult(
        comparisons.compare_fleets(
            variants, requests, judged_slo, seed=seed, executor=chosen_executor, scenarios=scenarios
        )
    )


def _merge_traffic(traffic: inputs.TrafficLike, traffic_keys: TrafficKeys) -> inputs.TrafficLike:
    """`traffic` with the keys that were given as arguments; InputError if one is given in both places."""
    if not traffic_keys:
        return traffic
    if isinstance(traffic, RateRequest):
        raise InputError(
            f"{', '.join(traffic_keys)}: found beside a RateRequest, which says it; drop one of the two"
        )
    if twice := [key for key in traffic_keys if key in (traffic or {})]:
        raise InputError(f"{twice[0]}: found in traffic and beside it; give it once")
    return {**(traffic or {}), **traffic_keys}


def _choose_executor(executor: Executor | str | None, default: str) -> Executor | None:
    """The given executor, or a new one of the kind `default`; None if `executors.working_on` has set one."""
    if executor is None and is_executor_set():
        return None
    return executor if isinstance(executor, Executor) else Executor(executor or default)


def _scenarios_of(
    slo: inputs.SloLike, catalog: Catalog, rate_request: RateRequest, whole_trace: Trace, seed: int
) -> Scenarios | None:
    """The scenarios of the question, for the traffic that is simulated; None for an SLO of limits alone."""
    if (question := inputs.question_of_one_llm(slo, catalog)) is None:
        return None
    simulated_task = replace(
        question.task(),
        rate_rps=rate_request.rate_rps,
        scale=rate_request.scale,
        window=None if rate_request.window == "whole" else rate_request.window,
        described=rate_request.described,
    )
    return scenarios_for(simulated_task, whole_trace, seed)


def goodput(
    fleet: inputs.FleetLike,
    trace: inputs.TraceLike | None = None,
    slo: inputs.SloLike = None,
    *,
    traffic: inputs.TrafficLike | Literal["poisson"] = None,
    seeds: int = 3,
    tolerance_frac: float = TOLERANCE_FRAC,
    catalog: CatalogLike = None,
    watch: Watch = lambda *_: None,
) -> GoodputResult:
    """The highest rate at which a fleet keeps an SLO in steady state, with every one of `seeds` seeds. If the
    fleet is a plan, or its folder, the plan's SLO and requests are taken where none are given.

    The simulated traffic is the trace brought to that rate, by the scale and window of `traffic`. With
    "poisson" it is Poisson arrivals of requests with the trace's lengths. `tolerance_frac` is how close the
    highest rate that holds and the lowest that fails must be, as a share. `watch` is called twice for each
    rate that is tried: before with the rate and None, and after with the rate and whether it held. Raises
    InfeasibleError where no rate holds, and InputError for what cannot be read or searched.
    """
    if seeds < 1:  # Without a seed every rate would hold, and the search would never end.
        raise InputError(f"seeds: must be >= 1, found {seeds}")
    if not 0 < tolerance_frac <= 1:
        raise InputError(f"tolerance_frac: must be > 0 and at most 1, found {tolerance_frac:g}")
    catalog_rows = read_catalog(catalog)
    if slo is None and (planned := inputs.planned_slo_and_trace(fleet, catalog_rows)) is not None:
        slo, planned_trace = planned
        trace = planned_trace if trace is None else trace
    fleet_read = inputs.read_fleet(fleet, catalog_rows, slo=slo)
    is_poisson = traffic == "poisson"
    judged_slo, rate_request = inputs.limits_and_rate(
        slo, catalog_rows, traffic=None if isinstance(traffic, str) else traffic, command="goodput"
    )
    if judged_slo is None:
        raise InputError("slo: missing; say which limits, such as {'ttft': {'p90': '2 s'}}")
    whole_trace, rate_request = inputs.requests_and_rate(
        trace, rate_request, is_rate_given=not (is_poisson or traffic is None), seed=0
    )
    check_classes(judged_slo, whole_trace)
    steady_rates = fleet_goodput(
        fleet_read,
        whole_trace,
        judged_slo,
        None if is_poisson else rate_request,
        seeds=seeds,
        tolerance_frac=tolerance_frac,
        watch=watch,
    )
    return GoodputResult(fleet_read, steady_rates)


def _read_under_policies(
    fleet: inputs.FleetLike,
    catalog: Catalog,
    slo: inputs.SloLike,
    label: str,
    policies: inputs.KeysAndValues | None,
) -> Fleet:
    """A fleet under one of the policies of `compare`. An InputError names the policies by their `label`."""
    if policies is None:
        return inputs.read_fleet(fleet, catalog, slo=slo)
    with errors_as(InputError, f"--policies {label!r}"):
        return inputs.read_fleet(fleet, catalog, policies=policies, slo=slo)


def _write_csv(file: Path, text: str) -> None:
    """Write a file; InputError if it cannot be written."""
    check_output_file(file)
    write_file(file, text)
