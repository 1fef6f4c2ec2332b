"""The most traffic that the limits allow, for the objective throughput."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.documents.catalog import Catalog
from planner.documents.certificate import Throughput
from planner.documents.task import Task
from planner.errors import InfeasibleError, PlannerError
from planner.search.asked import asked_traffic
from planner.search.level0 import search_level0
from planner.search.pose import pose
from planner.search.problem import Conditions, on_all_draws, with_policies
from planner.traffic.scaling import same_requests
from planner.traffic.trace import Trace

RATE_STEP_FRAC = 0.01  # how near the refuted rate is to the most traffic that is carried

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
            raise PlannerError("the most traffic was not found within the time limit; raise --time-limit")
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


def at_rate(task: Task, trace: Trace, rate_rps: float, seed: int) -> Task:
    """The cheapest fleet for a rate; of one draw where, so near to the trace's own rate, there is but one."""
    at = replace(task, objective="cost", rate_rps=rate_rps)
    if task.draws > 1 and task.scale != "compress":
        first, second = (asked_traffic(trace, at, seed=seed + k)[0] for k in (0, 1))
        return replace(at, draws=1) if same_requests(first, second) else at
    return at


def _infeasible_at_any_rate(task: Task, rate_rps: float) -> InfeasibleError:
    return InfeasibleError(
        f"capacity: no fleet within the limits keeps the SLO even at {rate_rps:.3g} requests/s; raise limits "
        "or stock, or relax the SLO",
        kind="capacity",
        constraint="limits",
        relaxation="more of what limits: and fleet: gpus allow",
    )
