"""Scenarios in which even an idle worker misses a limit, because steps take longer there: no fleet keeps
these.

The check comes before any search, so that nobody waits for what no fleet can do. The requests as they are
written are checked first: the traffic of a scenario is drawn only where those come near a limit.
"""

from __future__ import annotations

from dataclasses import replace

from planner.documents.facts import IdleMisses
from planner.domain import Limit, Slo
from planner.errors import InfeasibleError
from planner.fleet import slowed_by_spread
from planner.search.problem.options import Judged, judged, unreachable
from planner.search.problem.plan_problem import Problem
from planner.search.problem.prefix_hits import PrefixHits
from planner.traffic.trace import Trace
from planner.units import show_s

# Scenarios are drawn only where the written requests need more than this share of a limit. The percentiles of
# scenarios differ by less than the rest from those of the written requests.
LIKELY_FRAC = 0.9

UnreachableLimits = list[tuple[Limit, float, str]]
"""Limits that are out of reach, each with the seconds that the fastest idle worker needs, and its type."""


def find_idle_misses(problem: Problem) -> IdleMisses | None:
    """The limit that idle workers miss in the most scenarios, where they miss some limit in more of the
    search's scenarios than a fleet may; None otherwise, and without `safety`.
    """
    if problem.task.safety is None or problem.searched is None:
        return None
    scenarios = [problem.searched[i] for i in range(problem.searched.count)]
    allowed = problem.task.safety.most_missed(len(scenarios))
    tight = replace(
        problem.slo,
        limits=tuple(replace(each, limit_s=each.limit_s * LIKELY_FRAC) for each in problem.slo.limits),
    )
    written = judge_traffic(problem, problem.trace)
    slowest = max(scenario.z[0] for scenario in scenarios), max(scenario.z[1] for scenario in scenarios)
    if not _unreachable_limits(problem, tight, slowest, written):
        return None
    likely = [scenario for scenario in scenarios if _unreachable_limits(problem, tight, scenario.z, written)]
    if len(likely) <= allowed:
        return None
    floors = [
        _unreachable_limits(problem, problem.slo, scenario.z, judge_traffic(problem, scenario.trace))
        for scenario in likely
    ]
    floors = [each for each in floors if each]
    if len(floors) <= allowed:
        return None
    by_limit: dict[Limit, list[tuple[float, str]]] = {}
    for each in floors:
        for limit, least_s, fastest in each:
            by_limit.setdefault(limit, []).append((least_s, fastest))
    limit, needed = max(by_limit.items(), key=lambda row: len(row[1]))
    needed.sort(reverse=True)
    enough_s, fastest = needed[allowed if len(needed) > allowed else 0]
    return IdleMisses(limit, len(floors), len(scenarios), problem.task.safety.kept_in_frac, enough_s, fastest)


def judge_traffic(problem: Problem, trace: Trace) -> Judged:
    """The requests of this traffic that the SLO counts, with shared prefixes where caches are used."""
    hits = None if problem.hits is None else PrefixHits.of(trace)
    return judged(problem.slo, trace, None if hits is None else hits.shared_tokens)


def _unreachable_limits(problem: Problem, slo: Slo, z: tuple[float, float], of: Judged) -> UnreachableLimits:
    """The limits that no idle worker keeps with steps `z` standard deviations above their medians."""
    return unreachable(slo, [slowed_by_spread(worker, *z) for worker in problem.types], of)


def idle_misses_error(idle: IdleMisses) -> InfeasibleError:
    """The idle misses as an error that says what would help."""
    limit, share = idle.limit, int(100 * (1 - idle.missed / idle.futures)) / 100
    lower = f", or safety: {{kept_in: {share:g}}}" if share > 0 else ""
    return InfeasibleError(
        f"latency: in {idle.missed} of {idle.futures} scenarios even an idle worker misses {limit.name} <= "
        f"{show_s(limit.limit_s)}, as steps may take longer than predicted: no number of workers keeps it in "
        f"{100 * idle.asked_frac:g} % of scenarios. Relax it to {show_s(idle.enough_s)} or more (what "
        f"{idle.fastest}, the fastest, needs){lower}, measure the steps (plan profile), or add a faster GPU",
        kind="latency",
        constraint=limit.name,
        relaxation=f"{limit.name} >= {idle.enough_s:.6g} s{lower}",
    )
