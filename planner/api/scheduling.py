"""The function `schedule` of `import fleetplan`: how many workers each window of a day or a week gets, on
reserved, on-demand and spot GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from planner.api.inputs import (
    KeysAndValues,
    TraceLike,
    checked_seed,
    checked_time_limit,
    read_fleet,
    read_trace,
)
from planner.api.questions import read_task
from planner.api.results import Result
from planner.documents import markets, planned_market
from planner.documents.catalog import CatalogLike, read_catalog
from planner.errors import InputError
from planner.files.checked_files import check_output_directory, check_output_file, write_file, write_files
from planner.reports import schedule_page
from planner.search.oracle.work_clock import USUAL_LIMIT_S, WORK_S, time_limit
from planner.search.problem.plan_problem import Progress, report_nothing
from planner.search.schedules.scheduled import ScheduledLlm, SimulatedSchedule, simulate_schedule
from planner.solvers import reserved_schedule as solver
from planner.solvers.reserved_schedule import Demand, Market
from planner.traffic.trace import Trace, spread_stamps
from planner.units import count_text, parse_quantity

MarketLike: TypeAlias = "Market | KeysAndValues | str | Path"
DemandLike: TypeAlias = "Demand | pd.DataFrame | str | Path | Mapping[str, TraceLike]"
PEAK_LIMIT_S = 20.0  # The time limit for planning the fleet for the peak. Set by hand.
LEAST_WINDOW_S = 1.0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScheduleResult(Result):
    """A schedule, compared with a fleet for the peak and with Aladdin's linear rule: workers in proportion to
    requests/s, plus a constant (solvers/reserved_schedule.py).
    """

    answer: schedule_page.ScheduleAnswer

    @property
    def cost_usd_per_h(self) -> float:
        """The mean cost over all windows [USD/h]."""
        return self.answer.schedule.cost_usd_per_h

    @property
    def bound_usd_per_h(self) -> float:
        """A lower bound on the mean cost of any schedule [USD/h]."""
        return self.answer.schedule.bound_usd_per_h

    @property
    def simulated(self) -> SimulatedSchedule | None:
        """The schedule as it was simulated and repaired; None where it was not (`answer.not_simulated`)."""
        return self.answer.simulated

    @property
    def is_optimal(self) -> bool:
        """Whether cost and bound came within `gap_frac` of each other in time."""
        return self.answer.is_optimal

    def headline(self) -> str:
        return schedule_page.cost_sentence(self.answer)

    def sentences(self) -> list[str]:
        lines = [*schedule_page.compared_lines(self.answer), *schedule_page.simulated_lines(self.answer)]
        return [schedule_page.proof_line(self.answer), *lines]

    def to_dict(self) -> dict[str, Any]:
        """What `plan schedule --json` prints."""
        return schedule_page.to_json(self.answer)

    def to_frame(self) -> pd.DataFrame:
        """The workers as schedule.csv has them, one row per window and kind of worker: `firm` are reserved or
        on demand.
        """
        to_run = self.answer.to_run
        rows = [
            {"window": window, "llm": worker_type.llm, "worker": worker_type.name, "firm": firm, "spot": spot}
            for c, worker_type in enumerate(self.answer.market.worker_types)
            for window, (firm, spot) in enumerate(zip(to_run.workers[c], to_run.spot_workers[c], strict=True))
        ]
        return pd.DataFrame(rows).sort_values("window", kind="stable", ignore_index=True)

    def report(self) -> str:
        """The page schedule.html."""
        return schedule_page.render(self.answer)["schedule.html"]

    def save(self, place: str | Path) -> tuple[str, ...]:
        """Write schedule.html, schedule.csv and schedule.json into a folder; or the workers to FILE.csv."""
        path = Path(place)
        if path.suffix == ".csv":
            check_output_file(path)
            write_file(path, schedule_page.to_csv(self.answer))
            return (path.name,)
        check_output_directory(path)
        written = schedule_page.render(self.answer)
        write_files(path, written)
        return tuple(written)


def schedule(
    market: MarketLike,
    demand: DemandLike,
    *,
    window: str = "1 h",
    gap_frac: float = 0.005,
    time_limit_s: float = 60.0,
    catalog: CatalogLike = None,
    seed: int = 0,
    progress: Progress = report_nothing,
) -> ScheduleResult:
    """The workers of each window for a changing demand: reserved for its base, on demand and spot above it.

    `market` is what may be bought: schedule.yaml or its keys and values, or plan.yaml. `read_market` also
    takes a plan's slo.yaml, for its stock and limits. `demand` is a CSV or a DataFrame with a row per window
    and a column of requests/s per LLM, or maps each LLM to a trace.

    If the demand has traces, and the market a `fleet` for each worker type in use and an SLO for each LLM,
    the schedule is simulated over its windows, and repaired where a window misses its SLO. Otherwise the
    answer says why not.

    Raises InfeasibleError where a limit is too tight. After `time_limit_s` the best schedule so far is taken;
    its simulations may take as long again on the search's clock (work_clock.py).
    """
    seed, time_limit_s = checked_seed(seed), checked_time_limit(time_limit_s)
    window_s = parse_quantity(window, "s", where="window")
    if window_s < LEAST_WINDOW_S:
        raise InputError(f"window: expected at least 1 s, found {window!r}")
    market_read = read_market(market, catalog=catalog)
    traces: dict[str, Trace] = {}
    if isinstance(demand, Mapping):
        if not demand:
            raise InputError("demand: names no LLM; give a trace for each, such as {'chat': 'chat.csv'}")
        traces = {llm: spread_stamps(read_trace(trace), seed=seed) for llm, trace in demand.items()}
    # `read_demand` leaves stamps that are already spread as they are.
    demand_by_window = read_demand(traces or demand, window_s, seed)
    served_names = _served_names(market_read, demand_by_window, catalog)
    llms = tuple(served_names[llm] for llm in demand_by_window.llms)
    demand_by_window = replace(demand_by_window, llms=llms)
    traces = {served_names[llm]: trace for llm, trace in traces.items()}
    progress(
        f"scheduling {count_text(len(demand_by_window.llms), 'LLM')} over "
        f"{count_text(demand_by_window.rate_rps.shape[1], 'window')}"
    )
    answer = solve_schedule(market_read, demand_by_window, gap_frac, time_limit_s)
    if why := not_simulated(answer, traces):
        return ScheduleResult(replace(answer, not_simulated=why))
    served = [_llm_to_simulate(answer, llm, traces[llm], catalog) for llm in demand_by_window.llms]
    # A safety net on the wall clock; it exceeds the search's limit by the same factor as a plan's does.
    with time_limit(time_limit_s * USUAL_LIMIT_S / WORK_S):
        simulated_schedule = simulate_schedule(
            market_read,
            demand_by_window,
            answer.schedule,
            served,
            most_work_s=time_limit_s,
            progress=progress,
        )
    return ScheduleResult(replace(answer, simulated=simulated_schedule, not_simulated=""))


def _served_names(market: Market, demand: Demand, catalog: CatalogLike) -> dict[str, str]:
    """For each LLM of the demand its name in the market.

    A short name of the catalog stands for its row, as in slo.yaml. A name that is no row, such as "chat",
    stands for the workers' LLM if workers and demand have one LLM each and the workers' LLM is a row. Any
    other name stays unchanged, and the solver refuses it.
    """
    served = {worker_type.llm for worker_type in market.worker_types}
    if served.issuperset(demand.llms):
        return {llm: llm for llm in demand.llms}
    catalog_rows = read_catalog(catalog)
    (served_llm, *other_served), (demanded_llm, *other_demanded) = served, demand.llms
    is_one = not other_served and not other_demanded
    if is_one and catalog_rows.has_llm(served_llm) and not catalog_rows.has_llm(demanded_llm):
        return {demanded_llm: served_llm}
    rows = {llm: catalog_rows.served_llm(llm).name for llm in demand.llms if catalog_rows.has_llm(llm)}
    # A name that the market has stays; any other becomes its row's name, if the market has that.
    names = {llm: rows[llm] if llm not in served and rows.get(llm) in served else llm for llm in demand.llms}
    # Two LLMs of the demand must not become one.
    return names if len(set(names.values())) == len(names) else {llm: llm for llm in demand.llms}


def not_simulated(answer: schedule_page.ScheduleAnswer, traces: Mapping[str, Trace]) -> str:
    """Why a schedule cannot be simulated; empty where it can."""
    market = answer.market
    if not traces:
        return "the demand is rates, not requests; give a trace per LLM"
    for type_number in schedule_page.types_in_use(answer):
        if market.worker_types[type_number].fleet is None:
            return f"capacity[{type_number}] names no fleet: the plan.yaml whose pools one such worker is"
    without_slo = [llm for llm in answer.demand.llms if llm not in market.slos]
    return f"slo: says nothing of {', '.join(without_slo)}" if without_slo else ""


def _llm_to_simulate(
    answer: schedule_page.ScheduleAnswer, llm: str, trace: Trace, catalog: CatalogLike
) -> ScheduledLlm:
    """What the simulation of one LLM needs: its fleets, and its requests up to the end of the last window."""
    catalog_rows, market, demand = read_catalog(catalog), answer.market, answer.demand
    worker_fleets = {}  # By type number: the fleet whose pools together are one worker of the schedule.
    for type_number in schedule_page.types_in_use(answer):
        worker_type = market.worker_types[type_number]
        if worker_type.llm == llm and worker_type.fleet is not None:
            worker_fleets[type_number] = read_fleet(worker_type.fleet, catalog_rows)
    windows = demand.rate_rps.shape[1]
    in_windows = np.flatnonzero(trace.arrival_s < windows * demand.window_s)
    return ScheduledLlm(llm, trace.select(in_windows), market.slos[llm], worker_fleets)


def solve_schedule(
    market: Market, demand: Demand, gap_frac: float, time_limit_s: float
) -> schedule_page.ScheduleAnswer:
    """The schedule, with the fleet for the peak and the linear rule to compare with. Nothing is simulated.
    Raises InfeasibleError where a limit is too tight.
    """
    cheapest = solver.schedule(market, demand, gap_frac=gap_frac, time_limit_s=time_limit_s)
    others = {
        "peak": solver.schedule_at_peak(market, demand, time_limit_s=min(PEAK_LIMIT_S, time_limit_s)),
        "linear rule": solver.schedule_by_rule(market, demand),
    }
    return schedule_page.ScheduleAnswer(market, demand, cheapest, others, gap_frac)


def read_market(market: MarketLike, *, slo: str | Path | None = None, catalog: CatalogLike = None) -> Market:
    """The market of a schedule.yaml, or of a plan.yaml.

    A plan's market is its fleet at its prices, within the stock and limits of the file `slo`. Raises
    InputError where `slo` is given and the market is no plan's.
    """
    if isinstance(market, Market):
        return market
    catalog_rows = read_catalog(catalog)
    if isinstance(market, Mapping):
        by_hand = markets.parse_market(market)
    else:
        task = None if slo is None else read_task(Path(slo), catalog_rows).task()
        planned = planned_market.read_planned(Path(market), catalog_rows, task)
        if planned is not None:
            caveat = planned_market.schedule_caveat(Path(market), has_question=slo is not None)
            return replace(planned, note=caveat)
        if slo is not None:
            raise InputError(
                f"{market}: is no plan for one LLM, so slo.yaml says nothing of it; leave out --slo"
            )
        by_hand = markets.read_market(Path(market))
    return replace(by_hand, note=planned_market.counted_singly_caveat(by_hand, catalog_rows))


def read_demand(demand: DemandLike, window_s: float, seed: int) -> Demand:
    """The demand from any of its forms; equal time stamps of traces are spread by the seed."""
    if isinstance(demand, Demand):
        return demand
    if isinstance(demand, pd.DataFrame):
        table = demand.reset_index(drop=True)
        return markets.demand_of_table(table, Path("demand"), window_s=window_s)
    if isinstance(demand, Mapping):
        traces = {llm: spread_stamps(read_trace(trace), seed=seed) for llm, trace in demand.items()}
        return markets.demand_of(traces, window_s=window_s)
    return markets.read_demand(Path(demand), window_s=window_s)
