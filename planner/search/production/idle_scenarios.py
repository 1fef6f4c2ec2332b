"""Finds scenarios in which even an idle worker misses a limit because steps take longer there, so that no
fleet keeps the SLO in them.

This comes before any search, so that no time is spent on a question that no fleet can solve. Drawing
the traffic of a scenario takes time. So first the requests of the trace are judged with the step times of
each scenario; the scenario's own traffic is drawn only if these requests come near a limit.
"""

import itertools
from dataclasses import replace

from planner.documents.facts import IdleMisses
from planner.documents.safety import strictest_safety
from planner.domain import Limit, Slo
from planner.errors import InfeasibleError
from planner.fleet import slowed_by_spread
from planner.search.problem.idle_limits import Floor, Judged, requests_to_judge, unreachable_limits
from planner.search.problem.plan_problem import Problem
from planner.search.problem.prefix_hits import PrefixHits
from planner.traffic.trace import Trace
from planner.units import show_beside

# The traffic of a scenario is drawn only if the trace's requests need more than this share of a limit. So the
# percentiles of a scenario are assumed to be longer than those of the trace by less than a third (1 / 0.75).
# In scenarios of 200 requests the 90th percentile of TTFT was up to a fifth longer.
LIKELY_FRAC = 0.75


def find_idle_misses(problem: Problem) -> IdleMisses | None:
    """The limit that idle workers miss in the most scenarios, with the facts for the error. None if they miss
    limits in no more of the search's scenarios than a fleet may miss, and for questions without `safety`.
    """
    if problem.task.safety is None or problem.search_scenarios is None:
        return None
    scenarios = [problem.search_scenarios[i] for i in range(problem.search_scenarios.count)]
    allowed = problem.task.safety.most_missed(len(scenarios))
    tight_slo = replace(
        problem.slo,
        limits=tuple(replace(limit, limit_s=limit.limit_s * LIKELY_FRAC) for limit in problem.slo.limits),
    )
    in_trace = judge_traffic(problem, problem.trace)
    # If no limit is near even with the slowest prefills of all scenarios together with the slowest decodes,
    # the scenarios need not be judged one by one.
    prefill_sigmas, decode_sigmas = zip(*(scenario.step_time_sigmas for scenario in scenarios), strict=True)
    slowest = max(prefill_sigmas), max(decode_sigmas)
    if not _unreachable_limits(problem, tight_slo, slowest, in_trace):
        return None
    likely = [
        scenario
        for scenario in scenarios
        if _unreachable_limits(problem, tight_slo, scenario.step_time_sigmas, in_trace)
    ]
    if len(likely) <= allowed:
        return None
    misses = [
        _unreachable_limits(
            problem, problem.slo, scenario.step_time_sigmas, judge_traffic(problem, scenario.trace)
        )
        for scenario in likely
    ]
    misses = [missed_limits for missed_limits in misses if missed_limits]
    if len(misses) <= allowed:
        return None
    by_limit: dict[Limit, list[Floor]] = {}
    for floor in itertools.chain.from_iterable(misses):
        by_limit.setdefault(floor.limit, []).append(floor)
    most_missed = max(by_limit.values(), key=len)
    highest_first = sorted(most_missed, key=lambda floor: (floor.least_s, floor.worker_type), reverse=True)
    # If the limit were the floor `enough`, only the `allowed` scenarios with higher floors would miss it. If
    # no more than `allowed` scenarios miss this one limit, `enough` is the highest floor of all.
    enough = highest_first[allowed if len(highest_first) > allowed else 0]
    return IdleMisses(
        limit=enough.limit,
        missed=len(misses),
        scenario_count=len(scenarios),
        asked_frac=problem.task.safety.kept_in_frac,
        enough_s=enough.least_s,
        fastest=enough.worker_type,
    )


def judge_traffic(problem: Problem, trace: Trace) -> Judged:
    """The requests of this traffic that the SLO judges, with their shared prefixes if caches are used."""
    hits = None if problem.hits is None else PrefixHits.of(trace)
    return requests_to_judge(problem.slo, trace, None if hits is None else hits.shared_tokens)


def _unreachable_limits(
    problem: Problem, slo: Slo, sigmas: tuple[float, float], requests: Judged
) -> list[Floor]:
    """The limits that no idle worker keeps for these requests, with (prefill, decode) steps that are `sigmas`
    standard deviations of their spread above their medians.
    """
    return unreachable_limits(slo, [slowed_by_spread(worker, *sigmas) for worker in problem.types], requests)


def idle_misses_error(idle: IdleMisses) -> InfeasibleError:
    """The error that even idle workers miss a limit in too many scenarios, with what would help."""
    enough, limit_text = show_beside(idle.enough_s, idle.limit.limit_s)
    limit, or_less_safety = idle.limit, f", or {strictest_safety(1 - idle.missed / idle.scenario_count)}"
    return InfeasibleError(
        f"latency: in {idle.missed} of {idle.scenario_count} scenarios even an idle worker misses "
        f"{limit.label} <= {limit_text}, as steps may take longer than predicted: no "
        f"number of workers keeps it in {100 * idle.asked_frac:g} % of scenarios. Relax it to "
        f"{enough} or more (what {idle.fastest}, the fastest, needs){or_less_safety}, measure "
        "the steps (plan profile), or add a faster GPU",
        kind="latency",
        constraint=limit.name,
        relaxation=f"{limit.name} >= {idle.enough_s:.6g} s{or_less_safety}",
    )
