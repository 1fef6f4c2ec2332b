"""What agents can have at best, simulated before a search: fleets with about a worker for each agent.

How many agents work at once is given, so with a worker for each of them hardly a request waits. Where all
such fleets miss the SLO, a search would end without a fleet after all of its work. So the question ends here,
with the limits that the nearest of these fleets keeps. No bound proves that there is no other fleet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from planner.errors import Change, InfeasibleError
from planner.fleet import WorkerType
from planner.search.mixed.infeasible import rounded_up, with_limits
from planner.search.oracle.fleet_counts import Counts
from planner.search.problem.idle_limits import floor_s
from planner.search.problem.options import mixed_options, split
from planner.search.problem.plan_problem import Problem
from planner.search.problem.reasons import also_left_out
from planner.simulator.slo_verdict import Line
from planner.units import show_s

# With more workers each cache is colder, as it begins without the system prompt: so fewer may do better.
WORKERS_PER_AGENT = (1.0, 0.5, 0.25, 2.0)
MOST_TYPES = 4  # Of so many ways to split the LLM over GPUs fleets are simulated, the fastest ones.


@dataclass(frozen=True, slots=True)
class NearFleet:
    """A fleet that misses the SLO, and the lines of its verdict."""

    counts: Counts
    lines: tuple[Line, ...]

    @property
    def excess(self) -> float:
        """By how much its limits are exceeded: the logarithm of all factors together."""
        return sum(math.log(line.decides[0] / line.limit.limit_s) for line in self.lines if not line.holds)


def find_reachable_fleet(problem: Problem) -> Counts | None:
    """The first fleet with about a worker for each agent that keeps the SLO, within the limits or beyond.

    Raises InfeasibleError where none does, with what the nearest one keeps.
    """
    near: list[NearFleet] = []
    has_gaps = any(limit.metric_row.is_of_gaps for limit in problem.slo.limits)
    for counts in _candidates(problem):
        if problem.out_of_time():
            return None
        _, verdict = problem.oracle.verdict(problem.oracle.fleet(counts), record=has_gaps)
        if verdict.holds:
            return counts
        if verdict.missed:
            near.append(NearFleet(counts, verdict.lines))
    if not near:
        return None
    raise _out_of_reach(problem, near)


def _candidates(problem: Problem) -> Iterator[Counts]:
    """Fleets of the fastest worker types; of each way to split the LLM that with the largest steps, and where
    gaps between tokens are limited that with the smallest.
    """
    description = problem.task.described
    assert description is not None and description.agents is not None
    agents = description.agents.count
    by_split: dict[object, list[WorkerType]] = {}
    for worker in sorted(problem.types, key=lambda worker: -worker.max_num_batched_tokens):
        by_split.setdefault(split(worker), []).append(worker)

    def tightness(worker: WorkerType) -> float:
        """The largest share of a limit that an idle worker takes."""
        limits = problem.slo.limits
        return max(floor_s(limit, worker, problem.lengths) / limit.limit_s for limit in limits)

    fastest = sorted((workers for workers in by_split.values()), key=lambda workers: tightness(workers[0]))
    is_of_gaps = any(limit.metric_row.is_of_decodes for limit in problem.slo.limits)
    for workers in fastest[:MOST_TYPES]:
        ends = dict.fromkeys((workers[0], workers[-1]) if is_of_gaps else workers[:1])
        for option in mixed_options(list(ends), problem.task.objective):
            most = problem.limits.most_workers(option.type)
            for per_agent in WORKERS_PER_AGENT:
                yield ((option, max(math.ceil(per_agent * agents), 1)),)
            if 1 <= most < agents:  # The most that there are: what it keeps is what may be asked for.
                yield ((option, int(most)),)


def _out_of_reach(problem: Problem, near: list[NearFleet]) -> InfeasibleError:
    """That none of these fleets keeps the SLO, and with which limits the nearest of them keeps it; of those
    within the limits of the question, where there are any.
    """
    allowed = [each for each in near if problem.allows(each.counts)]
    first = min(allowed or near, key=lambda each: each.excess)
    missed = [line for line in first.lines if not line.holds]
    ((option, count),) = first.counts
    best = " and ".join(f"{line.limit.name} of {show_s(line.decides[0])}" for line in missed)
    asked = " and ".join(f"{line.limit.name} <= {show_s(line.limit.limit_s)}" for line in missed)
    relaxed_s = {line.limit.name: rounded_up(line.decides[0]) for line in missed}
    is_kept = bool(allowed) and with_limits(problem, relaxed_s).oracle.holds([first.counts])[0]
    enough = " and ".join(f"{name} to {show_s(limit_s)}" for name, limit_s in relaxed_s.items())
    help_ = f"relax {enough}, with which a fleet was found" if is_kept else "relax the SLO"
    changes = [
        Change(line.limit.name, line.limit.limit_s, relaxed_s[line.limit.name], "s") for line in missed
    ]
    return InfeasibleError(
        f"latency: no fleet was found that keeps {asked}: {len(near)} with up to two workers for each agent "
        f"were simulated, and the nearest, {count} x {option.type.name}, has {best}. More workers do not "
        f"cure that; {help_}, or add a faster GPU{also_left_out(problem.task.unchecked_left_out)}",
        kind="latency",
        constraint=[line.limit.name for line in missed],
        relaxation="" if is_kept else f"unknown: {help_}",
        ways=[changes] if is_kept else [],
        is_proved=False,
    )
