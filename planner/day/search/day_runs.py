"""Simulates a day with sizes that the search for the optimum proposes (planner/day/search/day_optimum.py).

The simulations show which windows of the SLO fail with these sizes. A step is here a stretch of the day with
constant sizes, not an engine's step. Arrays `workers` are (T, P): a row per step, a column per pool.

A whole day is simulated with a timetable of sizes. A slice of the day shows more cheaply that the sizes in
some steps make a window fail. The slice begins some time before the first of these steps, with every pool at
its largest size until then, and ends a little after the window. If more workers and less earlier work never
hurt, a window that fails in the slice also fails in the whole day. A window that holds in the slice may still
fail in the day.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.domain import Slo
from planner.errors import InputError
from planner.fleet import Fleet
from planner.search.oracle.deterministic_parallel import charge_effort
from planner.search.oracle.fleet_oracle import request_effort
from planner.simulator.counted_limits import judged_windows_s
from planner.simulator.elastic import ElasticPool, ElasticRun, Floats, Ints, simulate_in_windows
from planner.simulator.layout import UNFINISHED
from planner.simulator.slo_verdict import judge_slo, missed_windows
from planner.simulator.timetable import Timetable
from planner.solvers.master import Option, gpu_usd_per_h, paid_usd_per_h
from planner.solvers.paid_work import LeastPaid, LeastWorkers, least_paid
from planner.solvers.pool_sizes import DayTerms, PoolTerms, billed_usd, lives_within_stock
from planner.solvers.whole_nodes import node_of
from planner.traffic.trace import Trace, measured_window

# Longer slices find more failures and take longer to simulate; these values were chosen by hand.
# A slice begins this long before its first step, so that its workers are busy by then.
RUN_IN_S = 60.0
# A slice ends this long after the window, plus the largest limit on TTFT or E2E (MOST_REACH_S at most),
# because requests that arrived in the window are still served then.
REACH_S = 10.0
MOST_REACH_S = 120.0

SLICE_WORK = 1000  # The fixed work of a simulation, in requests.
EDGE_S = 1e-6  # Edges of windows and steps that are nearer than this are the same, up to rounding.


@dataclass(frozen=True, slots=True, eq=False)
class DayRun:
    """A day with a sequence of sizes: the run, its bill, and the windows that miss the SLO.

    `holds` says that no window is missed, the backlog does not grow, and every accepted request was served.
    `fits` says that the stock was enough for all workers at every moment, draining ones included. For several
    LLMs `llm_days` has one DayRun per LLM, and `run` is the run of the first LLM.
    """

    workers: Ints
    run: ElasticRun
    usd: float
    missed: tuple[int, ...]
    holds: bool
    fits: bool = True
    llm_days: tuple[DayRun, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class DaySlice:
    """A simulated part of a day. `window_s` (2,) has the edges of its window on the slice's clock."""

    run: ElasticRun
    window_s: Floats
    requests: int


class DayRuns:
    """Simulates `trace` on the pools of `fleet` with given sizes in given steps.

    The fleet's own counts of workers do not matter. JointRuns (several_llms_runs.py) has the same methods for
    several LLMs, and each of its windows belongs to one LLM. `pools` say how each pool may change. Steps have
    the edges `terms.edges_s` (T + 1,), from 0 to the end of the day, the last arrival or later; by default
    a step is a window of the SLO. Raises InputError for pools whose workers are interrupted by chance.
    """

    def __init__(
        self,
        fleet: Fleet,
        trace: Trace,
        slo: Slo,
        pools: Sequence[ElasticPool],
        terms: DayTerms | None = None,
    ):
        for pool, elastic in zip(fleet.pools, pools, strict=True):
            if elastic.interruptions_per_h > 0:
                raise InputError(
                    f"pool {pool.name}: the optimum knows the future, and interruptions of spot workers are "
                    "drawn by chance; leave the price of spot out"
                )
        self.fleet, self.trace, self.slo = fleet, trace, slo
        self.given_pools = tuple(pools)
        self.pools = [_with_equal_starts(each) for each in pools]  # The pools as they are simulated.
        self.window_edges_s = slo_edges_s(trace, slo)
        self.terms = terms or day_terms(fleet, trace, slo, pools)
        # Metrics with `has_queue`, TTFT and E2E, count from the arrival (slo_metrics.py).
        longest_limit_s = max(
            (limit.limit_s for limit in slo.limits if limit.metric_row.has_queue), default=0.0
        )
        self.reach_s = REACH_S + min(longest_limit_s, MOST_REACH_S)
        self._simulated_days: dict[bytes, DayRun] = {}

    @property
    def window_count(self) -> int:
        """How many windows the SLO judges."""
        return len(self.window_edges_s) - 1

    @property
    def request_count(self) -> int:
        """How many requests a simulation of the day has."""
        return len(self.trace)

    def pools_of(self, window: int) -> range:
        """The pools that decide whether a window holds: all pools of the LLM."""
        return range(len(self.fleet.pools))

    def is_first(self, window: int) -> bool:
        """Whether this is the first window of its LLM's traffic."""
        return window == 0

    def own_steps(self, window: int) -> range:
        """The steps that overlap with a window by more than EDGE_S, at least one."""
        start_s, end_s = self.window_edges_s[window], self.window_edges_s[window + 1]
        edges_s = self.terms.edges_s
        first = int(np.searchsorted(edges_s, start_s + EDGE_S, "right")) - 1
        end = int(np.searchsorted(edges_s[:-1], end_s - EDGE_S))
        return range(max(first, 0), max(end, first + 1))

    def later_steps(self, window: int) -> range:
        """The steps after a window that may still decide whether its requests keep their limits."""
        first = self.own_steps(window).stop
        end = int(np.searchsorted(self.terms.edges_s[:-1], self.window_edges_s[window + 1] + self.reach_s))
        return range(first, max(end, first))

    def least_paid(self, *, shares_nodes: bool = False) -> LeastPaid:
        """A lower bound on what any controller pays for this day (solvers/paid_work.py).

        With `shares_nodes` other LLMs have workers on the same nodes, so workers count by the GPU.
        """
        pools = list(zip(self.fleet.pools, self.given_pools, strict=True))
        options = [Option(pool.role, pool.type, pool.type.price_usd_per_h) for pool, _ in pools]
        # For a lower bound the cheapest price and the fastest start of all pools that can prefill are taken.
        prefilling = [(pool, elastic) for pool, elastic in pools if pool.role != "decode"]
        starts_s = [elastic.start_s for _, elastic in prefilling]
        starts_s += [elastic.warm_start_s for _, elastic in prefilling if elastic.warm]
        usd_per_h_of = gpu_usd_per_h if shares_nodes else paid_usd_per_h
        least_workers = LeastWorkers(
            usd_per_h=usd_per_h_of((pool.type, elastic.least) for pool, elastic in pools),
            prefill_usd_per_h=min(usd_per_h_of([(pool.type, 1)]) for pool, _ in prefilling),
            start_s=min(starts_s),
        )
        is_cached = self.fleet.policies.prefix_cache
        return least_paid(
            options,
            self.trace,
            self.slo,
            self.window_edges_s,
            least_workers=least_workers,
            is_cached=is_cached,
        )

    def simulate_day(self, workers: Ints) -> DayRun:
        """Simulate the whole day with these workers (T, P) ready in the steps. Results are cached."""
        key = workers.tobytes()
        if key not in self._simulated_days:
            self._simulated_days[key] = self.simulate_timetable(self.terms.edges_s[:-1], workers)
        return self._simulated_days[key]

    def misses_window(self, workers: Ints, window: int, first: int) -> bool:
        """Whether a window is missed with the most workers before step `first`, then `workers` (T, P)."""
        edges_s = self.terms.edges_s
        end = int(np.searchsorted(edges_s[:-1], self.window_edges_s[window + 1] + self.reach_s))
        times_s, sizes = edges_s[first:end], workers[first:end]
        if first:
            start_s = max(float(edges_s[first]) - RUN_IN_S, 0.0)
            # `most` (T, P) has the same sizes in every step.
            times_s, sizes = np.append(start_s, times_s), np.concatenate((self.terms.most[:1], sizes))
        day_slice = self.simulate_slice(window, times_s, sizes)
        if day_slice is None:  # No request arrives.
            return False
        return bool(missed_windows(day_slice.run.simulation, self.slo, day_slice.window_s))

    def simulate_slice(
        self, window: int, times_s: Floats, workers: Ints, *, begins_day: bool = False
    ) -> DaySlice | None:
        """Simulate the part of the day from `times_s[0]` to a little after a window.

        These workers (N, P) are ready from each of `times_s` (N,) on. The result is None if no request
        arrives in the slice. `begins_day` is for a slice that begins with the day: pools then have the
        start-up times and the most workers of a whole day.
        """
        start_s, last_s = float(times_s[0]), float(self.window_edges_s[window + 1])
        # A slice begins with cold prefix caches, which make more work. So with caches it begins with the day.
        if self.fleet.policies.prefix_cache and start_s > 0:
            times_s, start_s = np.append(0.0, times_s[1:]), 0.0
        arrival_s = self.trace.arrival_s
        first = int(np.searchsorted(arrival_s, start_s))
        end = int(np.searchsorted(arrival_s, last_s + self.reach_s, "right"))
        if end <= first:
            return None
        requests = self.trace.select(np.arange(first, end), arrival_s=arrival_s[first:end] - start_s)
        # The last window includes its end; others end just before the next window begins.
        is_last = window == self.window_count - 1
        end_s = last_s if is_last else math.nextafter(last_s, 0)
        window_s = np.array([self.window_edges_s[window], end_s]) - start_s
        # The given sizes are of ready workers, so workers start at once. Up to twice the most workers may
        # exist, because removed workers drain while others replace them.
        slice_pools = [
            pool if begins_day else replace(pool, start_s=0.0, most=2 * int(most))
            for pool, most in zip(self.pools, self.terms.most[0], strict=True)
        ]
        run = self._simulate(requests, times_s - start_s, workers, slice_pools, window_s)
        return DaySlice(run, window_s, end - first)

    def simulate_timetable(self, times_s: Sequence[float] | Floats, workers: Ints) -> DayRun:
        """Simulate a whole day with these workers (N, P) ready from each of `times_s` (N,) on, from 0 on."""
        until_s = float(self.terms.edges_s[-1])
        run = self._simulate(
            self.trace, np.asarray(times_s), workers, self.pools, self.window_edges_s, until_s=until_s
        )
        return self._judge_day(workers, run)

    def _simulate(
        self,
        trace: Trace,
        times_s: Floats,
        workers: Ints,
        pools: Sequence[ElasticPool],
        edges_s: Floats,
        *,
        until_s: float = 0.0,
    ) -> ElasticRun:
        """Run the fleet with these sizes from each of `times_s` on, at least to `until_s`; `edges_s` are the
        edges of judged windows.
        """
        charge_effort((len(trace) + SLICE_WORK) * request_effort(self.fleet, trace))
        starts_s = [pool.start_s for pool in pools]
        table = Timetable(times_s.tolist(), workers.tolist(), starts_s)
        pools = [replace(pool, first=size) for pool, size in zip(pools, table.sizes_at(0.0), strict=True)]
        return simulate_in_windows(self.fleet, trace, pools, table, self.slo.limits, edges_s, until_s=until_s)

    def _judge_day(self, workers: Ints, run: ElasticRun) -> DayRun:
        """The bill and the verdict of a simulated day."""
        missed = tuple(missed_windows(run.simulation, self.slo, self.window_edges_s))
        is_served = bool((run.simulation.status != UNFINISHED).all())
        holds = not missed and is_served and judge_slo(run.simulation, self.slo, with_percentiles=False).holds
        lives = [(span.pool, span.requested_s, span.gone_s) for span in run.spans]
        fits = lives_within_stock(self.terms, lives)
        return DayRun(workers, run, billed_usd(self.terms, lives), missed, holds, fits)


def _with_equal_starts(pool: ElasticPool) -> ElasticPool:
    """The pool with one start-up time for all workers, as the optimum needs it.

    All workers start warm if all may, otherwise all start cold. A worker that could start warm is then
    ordered earlier than needed, so the bill is not too low.
    """
    start_s = pool.warm_start_s if pool.warm >= pool.most else pool.start_s
    return replace(pool, start_s=start_s, warm=0)


def slo_edges_s(trace: Trace, slo: Slo) -> Floats:
    """The edges (V + 1,) of the SLO's windows, or of the measured window if the SLO has no windows."""
    if slo.every_s is not None:
        return judged_windows_s(trace, slo.every_s)
    return np.array([measured_window(trace)[0], float(trace.arrival_s[-1])])


def step_edges_s(last_s: float, step_s: float) -> Floats:
    """The edges of steps of `step_s` from 0 to `last_s`, where the last one ends."""
    steps = max(math.ceil(last_s / step_s - 1e-9), 1)  # Rounding must not add a step.
    return np.append(np.arange(steps) * step_s, last_s)


def day_terms(
    fleet: Fleet,
    trace: Trace,
    slo: Slo,
    pools: Sequence[ElasticPool],
    *,
    step_s: float | None = None,
    unit_s: float = 0.0,
    stock: Mapping[str, int] | None = None,
    is_paid_all_day: bool = False,
) -> DayTerms:
    """The terms of the master problem for a fleet's pools. Steps last `step_s`; by default they are the SLO's
    windows. `unit_s`, `stock` and `is_paid_all_day` are as in DayTerms.
    """
    if step_s is None:
        # The first step includes the time before the first window, whose requests are not judged.
        edges_s = np.concatenate(([0.0], slo_edges_s(trace, slo)[1:]))
    elif not step_s > 0:
        raise InputError(f"step_s is {step_s}, must be > 0")
    else:
        edges_s = step_edges_s(float(trace.arrival_s[-1]), step_s)
    terms = [
        PoolTerms(
            start_s=_with_equal_starts(elastic).start_s,
            least=elastic.least,
            most=elastic.most,
            usd_per_h=pool.type.price_usd_per_h,
            gpus=pool.type.gpus,
            gpu=pool.type.gpu.name,
            node=node_of(pool.type.gpu),
        )
        for pool, elastic in zip(fleet.pools, pools, strict=True)
    ]
    return DayTerms(edges_s, tuple(terms), unit_s, stock or {}, is_paid_all_day)
