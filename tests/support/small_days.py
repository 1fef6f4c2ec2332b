"""Days of a few windows with one to four workers, on which every sequence of pool sizes can be simulated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
import numpy.typing as npt
from elastic_runs import simulate_elastic
from simulations import LLM, make_latency, make_pool, make_trace

from planner.day.search import day_optimum
from planner.day.search.day_runs import slo_edges_s
from planner.domain import Limit, Slo
from planner.fleet import Fleet, Policies, Role
from planner.simulator.elastic import ElasticPool, ElasticRun, Span
from planner.simulator.slo_verdict import judge_slo
from planner.simulator.timetable import Timetable
from planner.traffic.trace import Trace

Ints = npt.NDArray[np.int64]


def quick_day(runs: day_optimum.DaySimulations) -> day_optimum.DayOptimum:
    """`cheapest_day` without the simulation of all cheaper sequences at its end."""
    with mock.patch.object(day_optimum, "MOST_SEQUENCES", 0):
        return day_optimum.cheapest_day(runs)


@dataclass(frozen=True)
class SmallDay:
    fleet: Fleet
    trace: Trace
    slo: Slo
    pools: tuple[ElasticPool, ...]
    unit_s: float

    @property
    def edges_s(self) -> npt.NDArray[np.float64]:
        """Of the steps: where the SLO's windows end."""
        return np.concatenate(([0.0], slo_edges_s(self.trace, self.slo)[1:]))


def random_day(seed: int, *, disaggregated: bool, windows: int, most: int) -> SmallDay:
    """Each window has a load of its own, up to what the most workers serve."""
    rng = np.random.default_rng([seed, disaggregated])
    latency = make_latency(
        (0.02, 0.02 + rng.uniform(0.02, 0.2)), knots=(1, 256), d=1e-5, b=rng.uniform(0, 5e-3)
    )
    window_s = float(rng.uniform(15, 40))
    roles: tuple[Role, ...] = ("prefill", "decode") if disaggregated else ("mixed",)
    pools = tuple(
        make_pool(latency, role=role, count=1, budget=256, seats=int(rng.choice([4, 8])), name=role)
        for role in roles
    )
    loads = rng.uniform(0.1, 1.0, windows) * most
    arrival_s, at_s = [], 0.0
    for load in loads:
        many = max(int(load * window_s * rng.uniform(4, 9)), 130)
        arrival_s.append(at_s + np.sort(rng.uniform(0, window_s, many)))
        at_s += window_s
    times_s = np.concatenate(arrival_s)
    n = len(times_s)
    trace = make_trace(times_s, rng.integers(1, 200, n), rng.integers(1, int(rng.choice([3, 12, 30])), n))
    limits = (
        Limit("ttft", float(rng.choice([0.5, 0.9, 0.95])), float(rng.uniform(0.3, 3.0))),
        Limit("tbt", 0.99, float(rng.uniform(0.1, 0.6))),
    )
    start_s = float(rng.choice([0.0, 0.3, 1.0, 1.4])) * window_s
    start_s = min(start_s, 0.9 * float(times_s[-1]))
    least = int(rng.integers(0, 2)) if not disaggregated else 1
    elastic = tuple(ElasticPool(start_s=start_s, least=least, most=most, first=most) for _ in roles)
    unit_s = float(rng.choice([0.0, 0.0, 100.0]))
    policies = Policies(routing=str(rng.choice(["jsq", "least-outstanding"])))
    return SmallDay(Fleet(LLM, pools, policies), trace, Slo(limits, every_s=window_s), elastic, unit_s)


def billed(day: SmallDay, spans: Iterable[Span]) -> float:
    """By the second or by units, by hand: one GPU a worker, 1 USD/h."""
    total = 0.0
    for span in spans:
        paid_s = span.gone_s - span.requested_s
        total += math.ceil(paid_s / day.unit_s - 1e-9) * day.unit_s if day.unit_s else paid_s
    return total / 3600


def simulated(day: SmallDay, workers: Ints) -> tuple[ElasticRun, float, bool]:
    """The run of one sequence (T, P), its bill, and whether it keeps the SLO; with every gap recorded."""
    table = Timetable(day.edges_s[:-1].tolist(), workers.tolist(), [pool.start_s for pool in day.pools])
    first = table.sizes_at(0.0)
    pools = [
        ElasticPool(start_s=pool.start_s, least=pool.least, most=pool.most, first=size)
        for pool, size in zip(day.pools, first, strict=True)
    ]
    run = simulate_elastic(day.fleet, day.trace, pools, table, limits=day.slo.limits, record=True)
    holds = (
        judge_slo(run.simulation, day.slo, with_percentiles=False).holds
        and (run.simulation.status != 2).all()
    )
    return run, billed(day, run.spans), bool(holds)


def every_sequence(day: SmallDay) -> Iterator[Ints]:
    """All sequences of sizes (T, P)."""
    ranges = [range(pool.least, pool.most + 1) for pool in day.pools] * (len(day.edges_s) - 1)
    for each in itertools.product(*ranges):
        yield np.array(each, np.int64).reshape(-1, len(day.pools))


def cheapest_of_all(day: SmallDay) -> float:
    """The least bill of all sequences that keep the SLO; infinite if none does."""
    bills = [usd for _, usd, holds in (simulated(day, each) for each in every_sequence(day)) if holds]
    return min(bills, default=math.inf)
