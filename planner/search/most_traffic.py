"""The most traffic that the limits allow, for the objective throughput: on paper, then in production.

In production a rate counts where a fleet is found that keeps the SLO in enough of the futures that a search
sees (production.py). What is drawn depends on the rate, and the search for production may simulate so much
and no more, so no rate is refuted for good there. Futures that it has not seen test the fleet (certify.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from planner.documents.catalog import Catalog
from planner.documents.certificate import Throughput
from planner.documents.task import Task
from planner.errors import InfeasibleError, PlannerError
from planner.fleet import Fleet, Policies
from planner.search.asked import asked_traffic
from planner.search.level0 import search_level0
from planner.search.pose import pose
from planner.search.problem import Conditions, Problem, on_all_draws, with_policies
from planner.search.production import MOST_SEARCH, in_most, in_production, limited
from planner.traffic.scaling import same_requests
from planner.traffic.trace import Trace

RATE_STEP_FRAC = 0.01  # how near the refuted rate is to the most traffic that is carried

KEPT_STEP_FRAC = 0.02  # the same in production
FIRST_FRAC = 0.8  # of the most traffic on paper: the rate that is looked at first
LESS_FRAC = 0.03  # less traffic, where a fleet fails its test

_FEWEST_REQUESTS = 20  # a trace thinned further says nothing


def most_traffic(
    task: Task, trace: Trace, catalog: Catalog, *, seed: int, conditions: Conditions
) -> Throughput:
    """The most requests per second that a fleet of level 0 within the limits carries, to RATE_STEP_FRAC.

    A rate is refuted by the exhausted search of level 0 at it, and then so are all higher ones: more traffic
    is never easier to carry, an assumption beside monotonicity in the workers. A fleet carries a rate if it
    keeps the SLO on every draw of it that the task asks for.
    """

    quiet = Conditions(conditions.deadline, answers=conditions.answers)

    def carries(rate_rps: float) -> bool:
        at = at_rate(task, trace, rate_rps, seed)
        conditions.progress(f"most traffic: {rate_rps:g} requests/s")
        problem = on_all_draws(pose(at, trace, catalog, seed=seed, conditions=quiet))
        searched = [
            search_level0(with_policies(problem, policies), any_will_do=True).search
            for policies in task.policies()
        ]
        if any(search.best is not None for search in searched):
            return True
        if not all(search.is_exhausted for search in searched):
            raise _out_of_time()
        return False

    rate_rps = float(f"{trace.rate_rps:.3g}")
    holds, failed = (0.0, rate_rps) if not carries(rate_rps) else (rate_rps, math.inf)
    while not holds:
        if failed * trace.duration_s < 2 * _FEWEST_REQUESTS:
            raise _infeasible_at_any_rate(task, failed)
        if carries(failed / 2):
            holds = failed / 2
        else:
            failed /= 2
    while math.isinf(failed):
        if carries(2 * holds):
            holds *= 2
        else:
            failed = 2 * holds
    while failed > holds * (1 + RATE_STEP_FRAC):
        middle = float(f"{math.sqrt(holds * failed):.4g}")
        if not holds < middle < failed:
            break
        if carries(middle):
            holds = middle
        else:
            failed = middle
    return Throughput(holds, failed)


def most_kept(
    task: Task, trace: Trace, catalog: Catalog, on_paper: Throughput, *, seed: int, conditions: Conditions
) -> Throughput:
    """The most requests per second at which a fleet of level 0 within the limits was found that keeps the SLO
    in enough of the futures that a search sees, to KEPT_STEP_FRAC, or as far as the time goes.

    Raises InfeasibleError where there is none at any rate, PlannerError where the time ends before one.
    """
    quiet, known = Conditions(conditions.deadline), dict[Policies, list[Fleet]]()

    def out_of_time() -> bool:
        return time.monotonic() > conditions.deadline

    def carries(rate_rps: float) -> bool:
        conditions.progress(f"most traffic in production: {rate_rps:g} requests/s")
        at = at_rate(task, trace, rate_rps, seed)
        problem = on_all_draws(pose(at, trace, catalog, seed=seed, conditions=quiet))
        for policies in task.policies():
            asked = limited(_slowest_first(in_production(with_policies(problem, policies))), MOST_SEARCH)
            start = known.setdefault(policies, [])
            best = search_level0(asked, start, walks=False, any_will_do=True).search.best
            if best is not None:
                start.insert(0, asked.oracle.fleet(best))
                return True
        return False

    holds, failed = 0.0, on_paper.refuted_rps
    while failed > holds * (1 + KEPT_STEP_FRAC):
        first = FIRST_FRAC * (on_paper.rate_rps if failed == on_paper.refuted_rps else failed)
        middle = float(f"{math.sqrt(holds * failed) if holds else first:.4g}")
        if not holds < middle < failed or (holds and out_of_time()):
            break
        if middle * trace.duration_s < _FEWEST_REQUESTS:
            raise _infeasible_at_any_rate(task, failed)
        if carries(middle):
            holds = middle
        elif out_of_time():
            if not holds:
                raise _out_of_time()
            break
        else:
            failed = middle
    return Throughput(holds, failed, on_paper.rate_rps, on_paper.refuted_rps)


def _slowest_first(problem: Problem) -> Problem:
    """Futures with the longest steps first: what misses many is soon found to."""
    oracle = problem.oracle
    futures = sorted(oracle.futures, key=lambda future: -sum(future.z))
    return in_most(problem, futures, oracle.may_miss)


def falling(found: Throughput) -> Iterator[Throughput]:
    """The most traffic, then less and less, where the fleet of the one before fails its test."""
    while True:
        yield found
        less = float(f"{found.rate_rps * (1 - LESS_FRAC):.4g}")
        found = replace(found, rate_rps=less, refuted_rps=found.rate_rps)


def _out_of_time() -> PlannerError:
    return PlannerError("the most traffic was not found within the time limit; raise --time-limit")


def at_rate(task: Task, trace: Trace, rate_rps: float, seed: int) -> Task:
    """The cheapest fleet for a rate; of one draw where, so near to the trace's own rate, there is but one."""
    at = replace(task, objective="cost", rate_rps=rate_rps)
    if task.draws > 1 and task.scale != "compress":
        first, second = (asked_traffic(trace, at, seed=seed + k)[0] for k in (0, 1))
        return replace(at, draws=1) if same_requests(first, second) else at
    return at


def _infeasible_at_any_rate(task: Task, rate_rps: float) -> InfeasibleError:
    return InfeasibleError(
        f"capacity: no fleet within the limits keeps the SLO even at {rate_rps:.3g} requests/s"
        f"{'' if task.safety is None else ' in enough futures'}; raise limits or stock, or relax the SLO",
        kind="capacity",
        constraint="limits",
        relaxation="more of what limits: and fleet: gpus allow",
    )
