"""Simulates a schedule of workers on its traffic, and repairs it where windows miss the SLO.

The solver (solvers/reserved_schedule.py) chose the workers of each window by the rate that one worker
sustains. Here each LLM's requests are simulated on its workers, which start before their window begins and
drain after it, on the GPUs that all LLMs share. Where a window of the SLO is missed, firm workers (those that
are not on spot GPUs) are added in the windows of the schedule that it overlaps; if it is missed again, also
in the window before them. The added workers are of the type that costs least for the rate that it sustains.
Once every window keeps the SLO, added workers that no window needs are removed, as far as the work allows.
The bill is for the GPUs that workers had in the simulation: the cheapest number reserved, on-demand ones
above it, and spot GPUs.

Indices: c is a worker type of the market (C of them), g a GPU of it (G), t a window of the schedule (T), m an
LLM, v a window of its SLO.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.domain import Slo, row_of
from planner.errors import InputError
from planner.fleet import Fleet, Pool
from planner.search.oracle.deterministic_parallel import charge_effort
from planner.search.oracle.fleet_oracle import request_effort
from planner.search.oracle.work_clock import ended_by, is_over, now_s
from planner.search.problem.plan_problem import Progress, report_nothing
from planner.simulator.elastic import ElasticFleet, ElasticPool, ElasticRun, simulate_together
from planner.simulator.layout import UNFINISHED
from planner.simulator.slo_verdict import missed_windows
from planner.simulator.timetable import Timetable
from planner.solvers.master import FleetLimits
from planner.solvers.reserved_schedule import (
    Demand,
    Market,
    Schedule,
    buy_gpus,
    find_broken_constraint,
    reserved_levels,
)
from planner.traffic.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# The numbers of repairs and their size are our choice: the first few repairs mend most windows.
MOST_REPAIRS = 12  # A schedule is repaired at most this often.
MORE_FRAC = 0.1  # A repair adds this share of the workers of a window, at least one.
# A spot worker is warned this long before it is taken away, as AWS does.
NOTICE_S = 120.0
# A spot worker that was taken away is replaced within this time, which was set by hand.
REPLACE_WITHIN_S = 60.0
# A window that is still missed after this many repairs is left as it is.
MOST_WINDOW_REPAIRS = 3
# A window ends this long before the next one begins, so that it lies in one window of the schedule.
EDGE_S = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledLlm:
    """How one LLM of a schedule is simulated: its requests, its SLO, and the engines of its workers.

    A worker of a schedule may be several engines, such as one for prefill and one for decode (see
    `LlmWorkerType`). `worker_fleets` has for each worker type c that serves the LLM a fleet whose pools
    together make one such worker.
    """

    llm: str
    trace: Trace
    slo: Slo
    worker_fleets: Mapping[int, Fleet]


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleWindows:
    """The windows of one LLM's SLO: how many there are, and which are missed before and after the repairs."""

    llm: str
    windows: int
    missed_before: int
    missed_begin_s: tuple[float, ...]  # When the windows that are still missed begin [s].
    unfinished: int  # The number of unfinished requests.


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedSchedule:
    """The repaired schedule, with the results of its simulation.

    `held_gpus` (G, T) are the mean GPUs of firm workers in each window, including workers that start or
    drain. `cost_before_usd_per_h` is the cost of the schedule before its repair.
    """

    schedule: Schedule
    slo_windows: tuple[ScheduleWindows, ...]
    added_worker_windows: int  # A worker that was added in three windows counts three times.
    cost_before_usd_per_h: float
    reserved_usd_per_h: float
    on_demand_usd_per_h: float
    spot_usd_per_h: float
    reserved_gpus: Ints
    held_gpus: Floats
    spot_workers_taken: int  # The number of spot workers that the market took away.
    why_missed: str  # Why some windows still miss the SLO; empty if none does.

    @property
    def cost_usd_per_h(self) -> float:
        """What reserved, on-demand and spot GPUs cost together."""
        return self.reserved_usd_per_h + self.on_demand_usd_per_h + self.spot_usd_per_h

    @property
    def missed_windows(self) -> int:
        """How many windows of all LLMs still miss their SLO."""
        return sum(len(windows.missed_begin_s) for windows in self.slo_windows)


def simulate_schedule(
    market: Market,
    demand: Demand,
    schedule: Schedule,
    scheduled_llms: Sequence[ScheduledLlm],
    *,
    most_work_s: float = 60.0,
    progress: Progress = report_nothing,
) -> SimulatedSchedule:
    """Simulate a schedule, and repair it until every window keeps the SLO, a limit forbids more workers, or
    the simulations have taken `most_work_s` of the search's clock (work_clock.py). Raises InputError if a
    fleet does not match the worker of the market for which it stands.
    """
    _check_fleets(market, demand, scheduled_llms)
    deadline = now_s() + most_work_s
    rehearsal = _Rehearsal(market, demand, schedule, scheduled_llms)
    firm = schedule.workers.copy()
    runs = first_runs = rehearsal.simulate(firm)
    miss_counts: Counter[tuple[int, int]] = Counter()  # How often each window (m, v) was missed so far.
    why_missed = ""
    for repair in range(MOST_REPAIRS + 1):
        missed = _missed_windows(scheduled_llms, runs)
        repairable = [window for window in missed if miss_counts[window] < MOST_WINDOW_REPAIRS]
        if not repairable:
            why_missed = "more workers do not help" if missed else ""
            break
        if repair == MOST_REPAIRS:
            why_missed = f"the schedule was repaired {repair} times, which is the most"
            break
        if is_over(deadline):
            why_missed = f"{ended_by()} was reached after {repair} repairs"
            break
        progress(f"simulated: {len(missed)} windows miss the SLO")
        miss_counts.update(repairable)
        repaired = rehearsal.add_workers(firm, runs, {window: miss_counts[window] for window in repairable})
        if (repaired == firm).all():
            why_missed = "no limit leaves room for more workers"
            break
        firm = repaired
        runs = rehearsal.simulate(firm)
    if not why_missed:
        firm, runs = rehearsal.remove_unneeded(firm, runs, deadline)
    end_s = demand.rate_rps.shape[1] * demand.window_s
    first_bill, bill = _cheapest_bill(market, first_runs, end_s), _cheapest_bill(market, runs, end_s)
    return SimulatedSchedule(
        # Its `bound_usd_per_h` is 0: the solver's bound is for schedules by rates, not for repaired ones.
        schedule=buy_gpus(market, demand, firm, schedule.spot_workers),
        slo_windows=tuple(_windows_by_llm(scheduled_llms, first_runs, runs)),
        added_worker_windows=int((firm - schedule.workers).sum()),
        cost_before_usd_per_h=first_bill.reserved + first_bill.on_demand + first_bill.spot,
        reserved_usd_per_h=bill.reserved,
        on_demand_usd_per_h=bill.on_demand,
        spot_usd_per_h=bill.spot,
        reserved_gpus=bill.reserved_gpus,
        held_gpus=_mean_by_window(demand, _gpus_over_time(market, runs, end_s, is_spot=False)),
        spot_workers_taken=sum(span.was_taken for llm_run in runs for span in llm_run.run.spans),
        why_missed=why_missed,
    )


def _check_fleets(market: Market, demand: Demand, scheduled_llms: Sequence[ScheduledLlm]) -> None:
    """Raise InputError for fleets that do not match the workers of the market, and for windows of an SLO that
    are longer than those of the schedule.
    """
    for llm in scheduled_llms:
        first = next(iter(llm.worker_fleets.values()))
        for c, worker_fleet in llm.worker_fleets.items():
            worker_type = market.worker_types[c]
            where = f"capacity[{c}] ({worker_type.llm}, {worker_type.name})"
            gpus = sum(pool.count * pool.type.gpus for pool in worker_fleet.pools)
            market_gpus = sum(worker_type.gpu_counts.values())
            if gpus != market_gpus:
                raise InputError(f"{where}: gpus is {market_gpus}, its fleet has {gpus}; make them one")
            if worker_type.other_gpus:  # The worker has several kinds of GPUs.
                for gpu in {pool.type.gpu.name for pool in worker_fleet.pools}:
                    if row_of(gpu) not in worker_type.gpu_counts:
                        raise InputError(f"{where}: its fleet has {row_of(gpu)}, which gpu does not name")
            # With one kind of GPU the fleet may name another GPU; `_pools_of` puts the market's in its place.
            if (worker_fleet.llm, worker_fleet.policies) != (first.llm, first.policies):
                raise InputError(
                    f"{where}: its fleet serves {worker_fleet.llm.name} with policies of its own; all "
                    "workers of an LLM must serve it alike"
                )
        if llm.slo.every_s is not None and llm.slo.every_s > demand.window_s:
            raise InputError(
                f"slo: {llm.llm}: every is {llm.slo.every_s:g} s, must be at most a window of the schedule "
                f"({demand.window_s:g} s)"
            )


class _ReplacingTimetable(Timetable):
    """A timetable that replaces workers within REPLACE_WITHIN_S after they were taken away."""

    def next_s(self, time_s: float) -> float:
        """The next time at which sizes are decided: by the timetable, or to replace workers."""
        return min(super().next_s(time_s), time_s + REPLACE_WITHIN_S)


@dataclass(frozen=True, slots=True, eq=False)
class _ScheduledPool:
    """One pool of an LLM: whether it is on spot GPUs, how it may change, and its `sizes` (T,) in the windows
    of the schedule.
    """

    pool: Pool
    is_spot: bool
    elastic: ElasticPool
    sizes: Ints


@dataclass(frozen=True, slots=True, eq=False)
class _LlmRun:
    """The simulation of one LLM, and its pools, by the numbers that `run` gives them."""

    run: ElasticRun
    pools: tuple[_ScheduledPool, ...]


def _pools_of(market: Market, firm: Ints, spot: Ints, llm: ScheduledLlm) -> Iterator[_ScheduledPool]:
    """The pools of an LLM with these firm and spot workers (C, T). Their GPUs have the names under which the
    market's stock counts them.
    """
    for counts, is_spot in ((firm, False), (spot, True)):
        for c, worker_fleet in llm.worker_fleets.items():
            if not counts[c].any():
                continue
            worker_type = market.worker_types[c]
            offers = {offer.gpu: offer for offer, _ in market.offers_of(worker_type)}
            for pool in worker_fleet.pools:
                # A worker with one kind of GPU has the market's, whatever its fleet names.
                gpu = row_of(pool.type.gpu.name) if worker_type.other_gpus else worker_type.gpu
                offer = offers[gpu]
                sizes = counts[c] * pool.count
                # A market sells GPUs singly; the stock of a plan's question is in whole nodes already.
                gpu_row = replace(pool.type.gpu, name=offer.gpu, is_sold_whole=False)
                worker = replace(pool.type, gpu=gpu_row)
                name = f"{worker_type.name} {pool.name}{' spot' if is_spot else ''}"
                elastic = ElasticPool(
                    start_s=worker_type.start_s,
                    # A pool may be twice its size: workers of one window drain while those of the next start.
                    most=2 * int(sizes.max()),
                    interruptions_per_h=offer.interruptions_per_h if is_spot else 0.0,
                    notice_s=NOTICE_S if is_spot else 0.0,
                )
                # `sizes` say how many workers there are, not the pool's count.
                yield _ScheduledPool(replace(pool, name=name, count=1, type=worker), is_spot, elastic, sizes)


@dataclass(frozen=True, slots=True, eq=False)
class _Rehearsal:
    """The simulations of a schedule, whose firm workers (C, T) change from one to the next."""

    market: Market
    demand: Demand
    schedule: Schedule
    llms: Sequence[ScheduledLlm]

    def simulate(self, firm: Ints) -> list[_LlmRun]:
        """Simulate each LLM with these firm workers and the schedule's spot workers, all on one stock."""
        market, demand = self.market, self.demand
        fleets, pools_by_llm = [], []
        times_s = (np.arange(firm.shape[1]) * demand.window_s).tolist()
        for llm in self.llms:
            pools = tuple(_pools_of(market, firm, self.schedule.spot_workers, llm))
            timetable_type = _ReplacingTimetable if any(pool.is_spot for pool in pools) else Timetable
            sizes = np.array([pool.sizes for pool in pools]).T.tolist()
            timetable = timetable_type(times_s, sizes, [pool.elastic.start_s for pool in pools])
            first_sizes = timetable.sizes_at(0.0)
            elastic = [
                replace(pool.elastic, first=size) for pool, size in zip(pools, first_sizes, strict=True)
            ]
            # All workers serve the LLM alike (`_check_fleets`), so any of their fleets gives the rest.
            fleet = replace(next(iter(llm.worker_fleets.values())), pools=tuple(pool.pool for pool in pools))
            every_s = llm.slo.every_s or demand.window_s
            end_s = firm.shape[1] * demand.window_s
            fleets.append(ElasticFleet(fleet, llm.trace, elastic, timetable, llm.slo.limits, every_s, end_s))
            pools_by_llm.append(pools)
        efforts = (
            len(each.trace) * request_effort(each.fleet, each.trace) for each in fleets if len(each.trace)
        )
        charge_effort(sum(efforts))
        stock = {offer.gpu: offer.stock for offer in market.offers if offer.stock is not None}
        runs = simulate_together(fleets, FleetLimits(stock))
        return [_LlmRun(run, pools) for run, pools in zip(runs, pools_by_llm, strict=True)]

    def add_workers(
        self, firm: Ints, runs: Sequence[_LlmRun], miss_counts: Mapping[tuple[int, int], int]
    ) -> Ints:
        """The firm workers with more of them in the windows (m, v) that are missed, as far as the limits
        allow. `miss_counts` says how often each of these windows was missed by now.
        """
        to_enlarge: set[tuple[int, int]] = set()  # Pairs (m, t): where an LLM gets more workers.
        for (m, v), misses in miss_counts.items():
            edges_s = runs[m].run.simulation.edges_s
            first = int(edges_s[v] // self.demand.window_s)
            last = int((edges_s[v + 1] - EDGE_S) // self.demand.window_s)
            if misses > 1:
                first -= 1  # Requests of the window before may still queue in this one.
            to_enlarge |= {(m, t) for t in range(max(first, 0), min(last, firm.shape[1] - 1) + 1)}
        firm = firm.copy()
        # The budget limits the schedule, not its repair: the cost of the repair is an answer, not an error.
        without_budget = replace(self.market, cost_usd_per_h=None)
        for m, t in sorted(to_enlarge):
            # The cheapest type that may have more workers within the limits gets them.
            for c in sorted(self.llms[m].worker_fleets, key=lambda c: _usd_per_rate(self.market, c)):
                more = firm.copy()
                more[c, t] += max(1, int(MORE_FRAC * firm[c, t]))
                repaired = buy_gpus(self.market, self.demand, more, self.schedule.spot_workers)
                if find_broken_constraint(without_budget, self.demand, repaired) is None:
                    firm = more
                    break
        return firm

    def remove_unneeded(self, firm: Ints, runs: list[_LlmRun], deadline: float) -> tuple[Ints, list[_LlmRun]]:
        """The firm workers without those that were added and that no window needs, with their simulation."""
        for c, t in np.argwhere(firm > self.schedule.workers).tolist():
            while firm[c, t] > self.schedule.workers[c, t] and not is_over(deadline):
                fewer = firm.copy()
                fewer[c, t] -= 1
                trial_runs = self.simulate(fewer)
                if _missed_windows(self.llms, trial_runs):
                    break
                firm, runs = fewer, trial_runs
        return firm, runs


def _missed_windows(scheduled_llms: Sequence[ScheduledLlm], runs: Sequence[_LlmRun]) -> list[tuple[int, int]]:
    """Each window that misses its SLO, or of which a request is never served, as (number of the LLM, number
    of the window).
    """
    missed: list[tuple[int, int]] = []
    for m, (llm, llm_run) in enumerate(zip(scheduled_llms, runs, strict=True)):
        simulation = llm_run.run.simulation
        edges_s, unserved_s = simulation.edges_s, simulation.arrival_s[simulation.status == UNFINISHED]
        of_unserved = np.searchsorted(edges_s, unserved_s, side="right") - 1
        windows = {*missed_windows(simulation, llm.slo, edges_s), *of_unserved.tolist()}
        # An unserved request that arrived after the last edge is in no window.
        missed += [(m, v) for v in sorted(windows) if 0 <= v < len(edges_s) - 1]
    return missed


def _windows_by_llm(
    scheduled_llms: Sequence[ScheduledLlm], first: Sequence[_LlmRun], runs: Sequence[_LlmRun]
) -> Iterator[ScheduleWindows]:
    """The windows of each LLM, missed in the first simulation and in the last."""
    before, after = _missed_windows(scheduled_llms, first), _missed_windows(scheduled_llms, runs)
    for m, (llm, llm_run) in enumerate(zip(scheduled_llms, runs, strict=True)):
        edges_s, status = llm_run.run.simulation.edges_s, llm_run.run.simulation.status
        missed_begin_s = tuple(float(edges_s[v]) for number, v in after if number == m)
        missed_before = sum(number == m for number, _ in before)
        unfinished = int((status == UNFINISHED).sum())
        yield ScheduleWindows(llm.llm, len(edges_s) - 1, missed_before, missed_begin_s, unfinished)


def _usd_per_rate(market: Market, c: int) -> float:
    """The highest price of a firm worker, per request/s that it sustains."""
    worker_type = market.worker_types[c]
    return market.highest_usd_per_h(worker_type) / worker_type.rate_rps


def _gpus_over_time(
    market: Market, runs: Sequence[_LlmRun], end_s: float, *, is_spot: bool
) -> list[tuple[Floats, Floats]]:
    """For each GPU of the market the times (K,) at which its use, by spot or firm workers, changes, and how
    many are in use from then on (K,). Workers that are there when the simulation ends stay until `end_s`.
    """
    by_offer = []
    for offer in market.offers:
        changes = []
        for llm_run in runs:
            for span in llm_run.run.spans:
                pool = llm_run.pools[span.pool]
                if pool.pool.type.gpu.name != offer.gpu or pool.is_spot != is_spot:
                    continue
                gpus = pool.pool.type.gpus
                changes.append((min(span.requested_s, end_s), gpus))
                if span.gone_s < llm_run.run.end_s:
                    changes.append((min(span.gone_s, end_s), -gpus))
        ordered = sorted([(0.0, 0), *changes, (end_s, 0)])
        times_s, gpu_changes = np.array([at_s for at_s, _ in ordered]), [change for _, change in ordered]
        by_offer.append((times_s, np.cumsum(gpu_changes)))
    return by_offer


class _Bill(NamedTuple):
    """The reserved GPUs (G,) of the least bill, and what reserved, on-demand and spot GPUs cost [USD/h]."""

    reserved_gpus: Ints
    reserved: float
    on_demand: float
    spot: float


def _cheapest_bill(market: Market, runs: Sequence[_LlmRun], end_s: float) -> _Bill:
    """The least bill for the GPUs that workers had in the simulation until `end_s`."""
    reserved_gpus = np.zeros(len(market.offers), np.int64)
    reserved_usd_per_h = on_demand_usd_per_h = spot_usd_per_h = 0.0
    firm = _gpus_over_time(market, runs, end_s, is_spot=False)
    spot = _gpus_over_time(market, runs, end_s, is_spot=True)
    for g, offer in enumerate(market.offers):
        times_s, gpus = firm[g]
        time_shares = np.diff(times_s) / end_s
        spot_times_s, spot_gpus = spot[g]
        # Spot GPUs take stock from reserved ones.
        levels = reserved_levels(offer, gpus[:-1], most_spot_gpus=int(spot_gpus.max()))
        bills = [  # For each level what reserved and on-demand GPUs cost.
            (
                (offer.reserved_usd_per_h or 0.0) * level,
                (offer.on_demand_usd_per_h or 0.0) * float(np.maximum(gpus[:-1] - level, 0) @ time_shares),
            )
            for level in levels
        ]
        best = min(range(len(levels)), key=lambda k: sum(bills[k]))
        reserved_gpus[g] = levels[best]
        reserved_usd_per_h += bills[best][0]
        on_demand_usd_per_h += bills[best][1]
        mean_spot_gpus = float(spot_gpus[:-1] @ np.diff(spot_times_s)) / end_s
        spot_usd_per_h += (offer.spot_usd_per_h or 0.0) * mean_spot_gpus
    return _Bill(reserved_gpus, reserved_usd_per_h, on_demand_usd_per_h, spot_usd_per_h)


def _mean_by_window(demand: Demand, gpus_over_time: Sequence[tuple[Floats, Floats]]) -> Floats:
    """Mean GPUs (G, T) in each window."""
    edges_s = np.arange(demand.rate_rps.shape[1] + 1) * demand.window_s
    by_gpu = []
    for times_s, gpus in gpus_over_time:
        gpu_seconds = np.concatenate(([0.0], np.cumsum(gpus[:-1] * np.diff(times_s))))  # Up to each moment.
        by_gpu.append(np.diff(np.interp(edges_s, times_s, gpu_seconds)) / demand.window_s)
    return np.array(by_gpu)
