"""Goodput: the highest rate at which a fleet keeps its SLO, by bisection over the rate.

    carries(r)    the fleet keeps the SLO at r requests/s
    goodput       the largest r with carries(r), to within a tolerance

The bisection takes for granted that a fleet that keeps the SLO at a rate keeps it at every lower one.

A rule defines what it means to keep the SLO at a rate. This module has one:

    Steady          the runs of all seeds keep every limit after the warm-up and have no growing backlog
                    (slo_verdict.judge_slo). A run must be at least `residences` times as long as the mean
                    time that a request stays in the fleet; otherwise a longer one replaces it, as far as
                    MOST_REQUESTS and the traffic allow. The reason is that a fleet begins empty: it keeps any
                    SLO until its first requests are old enough to miss it.

The rules of DistServe and Vidur are in benchmarks/distserve_search.py and benchmarks/vidur_search.py.

Runs at different rates serve the same requests, closer together or further apart, so that only the rate
changes the verdict. A run stops as soon as a limit can no longer be kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from planner.domain import Slo
from planner.errors import InputError
from planner.fleet import Fleet
from planner.simulator.layout import FINISHED
from planner.simulator.measured_values import measured_mask
from planner.simulator.replay import RequestRecords, simulate, simulate_if_kept
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import judge_slo
from planner.traffic.trace import Trace, judged_span_s

TOLERANCE_FRAC = 0.02  # The bisection ends when the two rates differ by no more than this share.
# Only rates between these are simulated [requests/s]. At the lowest, one request in three hours, a fleet
# idles; no fleet serves the highest.
LOWEST_RPS, HIGHEST_RPS = 1e-4, 1e6
MOST_REQUESTS = 500_000  # The rule Steady does not double a run beyond this many requests, to bound its time.

Traffic = Callable[[float, int, int], Trace]
"""Returns requests for a rate [requests/s], a least number of requests, and a seed. There may be fewer
requests if the trace from which they come has no more.
"""


class GoodputRule(Protocol):
    """A rule by which a fleet keeps its SLO at a rate or not."""

    def carries(self, fleet: Fleet, rate_rps: float) -> bool:
        """Whether the fleet keeps the SLO at this rate."""
        ...

    def run(self, fleet: Fleet, rate_rps: float) -> Simulation:
        """A simulation of the fleet at this rate that records every gap between tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Goodput:
    """The result of a bisection: the SLO is kept at `rate_rps`, 0 if at no rate, and missed at `fails_rps`,
    infinite if at none. `rates` is how many rates were simulated.
    """

    rate_rps: float
    fails_rps: float
    rates: int


def poisson_traffic(lengths: Trace) -> Traffic:
    """Poisson arrivals of requests that are drawn from a trace. A request keeps its two lengths together."""
    if lengths.after.size:
        raise InputError(
            f"{lengths.name}: requests wait for others (column after), so they cannot be drawn one by one; "
            "replay the trace's own arrivals, or leave the column out"
        )

    def traffic(rate_rps: float, requests: int, seed: int) -> Trace:
        """This number of requests at this rate, with exponential gaps; lengths are drawn from the trace's."""
        rows = np.random.default_rng([seed, 0]).integers(0, len(lengths), requests)
        gaps = np.random.default_rng([seed, 1]).standard_exponential(requests)
        gaps[0] = 0.0
        return replace(lengths.select(rows, arrival_s=np.cumsum(gaps) / rate_rps), name="poisson")

    return traffic


def count_residences(simulation: Simulation) -> float:
    """The length of a run's measured window, as a multiple of the mean time from a request's arrival to its
    last token; 0 if no request was finished.
    """
    e2e_s = simulation.e2e_s[measured_mask(simulation) & (simulation.status == FINISHED)]
    start_s, end_s = simulation.window_s
    return (end_s - start_s) / float(e2e_s.mean()) if len(e2e_s) else 0.0


@dataclass(frozen=True, slots=True)
class Steady:
    """The rule Steady of the module docstring. A rate's first run has `requests` requests; further runs have
    more until one is long enough.
    """

    slo: Slo
    traffic: Traffic
    seeds: int = 3
    requests: int = 2000
    residences: float = 20.0

    def carries(self, fleet: Fleet, rate_rps: float) -> bool:
        """Whether the fleet keeps the SLO at this rate with the traffic of all seeds."""
        return self.first_missed(fleet, rate_rps) is None

    def first_missed(self, fleet: Fleet, rate_rps: float) -> int | None:
        """The first seed with whose traffic the fleet misses the SLO; None if there is no such seed."""
        seeds = range(self.seeds)
        return next((seed for seed in seeds if not self._holds(fleet, rate_rps, seed)), None)

    def run(self, fleet: Fleet, rate_rps: float, seed: int = 0) -> Simulation:
        """A run that is long enough. It records every gap between tokens, so that `judge_slo` can compute
        TBT.
        """

        def simulate_recorded(trace: Trace) -> Simulation:
            limits, every_s = self.slo.limits, self.slo.every_s
            return simulate(fleet, trace, limits=limits, record=True, every_s=every_s)

        long_run = self._long_run(simulate_recorded, rate_rps, seed)
        assert long_run is not None
        return long_run

    def _holds(self, fleet: Fleet, rate_rps: float, seed: int) -> bool:
        """Whether the fleet keeps the SLO in a run that is long enough."""

        def simulate_kept(trace: Trace) -> Simulation | None:
            """The simulation of this trace if the fleet keeps the SLO in it, else None."""
            limits, patience_s = self.slo.limits, self.slo.patience_s(judged_span_s(trace))
            requests, every_s = RequestRecords(trace), self.slo.every_s
            simulation = simulate_if_kept(fleet, trace, limits, requests, every_s, patience_s=patience_s)
            if simulation is None or not judge_slo(simulation, self.slo, with_percentiles=False).holds:
                return None
            return simulation

        return self._long_run(simulate_kept, rate_rps, seed) is not None

    def _long_run(
        self, simulate_trace: Callable[[Trace], Simulation | None], rate_rps: float, seed: int
    ) -> Simulation | None:
        """The first run that is long enough; None as soon as `simulate_trace` returns None for a run."""
        requests = self.requests
        trace = self.traffic(rate_rps, requests, seed)
        while (simulation := simulate_trace(trace)) is not None:
            requests *= 2
            if count_residences(simulation) >= self.residences or requests > MOST_REQUESTS:
                break
            longer = self.traffic(rate_rps, requests, seed)
            if len(longer) == len(trace):  # The traffic has no more requests.
                break
            trace = longer
        return simulation


def find_goodput(
    rule: GoodputRule,
    fleet: Fleet,
    *,
    guess_rps: float = 1.0,
    tolerance_frac: float = TOLERANCE_FRAC,
    lowest_rps: float = LOWEST_RPS,
) -> Goodput:
    """The highest rate at which `fleet` keeps the SLO by `rule`, to a tolerance; 0 below `lowest_rps`."""
    return bisect_highest(
        lambda rate_rps: rule.carries(fleet, rate_rps),
        guess_rps=guess_rps,
        tolerance_frac=tolerance_frac,
        lowest_rps=lowest_rps,
    )


def bisect_highest(
    carries: Callable[[float], bool],
    *,
    guess_rps: float = 1.0,
    tolerance_frac: float = TOLERANCE_FRAC,
    lowest_rps: float = LOWEST_RPS,
) -> Goodput:
    """The highest rate for which `carries` returns True. Beginning with the guess, rates are doubled or
    halved until one holds and one fails. Then their geometric mean is tried, until both are close enough.
    """
    holds_rps, fails_rps = 0.0, math.inf  # The highest rate that holds so far, and the lowest that fails.
    rates, rate_rps = 0, max(guess_rps, lowest_rps)
    while True:
        rates += 1
        if carries(rate_rps):
            holds_rps = rate_rps
        else:
            fails_rps = rate_rps
        if holds_rps > 0 and fails_rps <= holds_rps * (1 + tolerance_frac):
            return Goodput(holds_rps, fails_rps, rates)
        if holds_rps > 0 and fails_rps < math.inf:
            rate_rps = math.sqrt(holds_rps * fails_rps)
        else:
            rate_rps = 2 * holds_rps if holds_rps > 0 else max(fails_rps / 2, lowest_rps)
        # The next rate is out of range, or was tried already.
        if not rate_rps <= HIGHEST_RPS or rate_rps >= fails_rps:
            return Goodput(holds_rps, fails_rps, rates)
