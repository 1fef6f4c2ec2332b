"""Simulates, before a search for traffic of agents, whether fleets with about a worker for each agent keep
the SLO.

The number of agents that work at once is given, so with a worker for each agent hardly a request waits. If
all such fleets miss the SLO, a search would take all of its time and end without a fleet. So the question
ends here, with an error that names limits which the nearest of these fleets would keep. Nothing proves that
no other fleet keeps the SLO, so the error does not claim a proof.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.errors import Change, InfeasibleError
from planner.fleet import Policies, WorkerType
from planner.search.level0.level0_search import can_hand_off
from planner.search.mixed.least_limits import rounded_up, with_limits
from planner.search.oracle.fleet_counts import Counts
from planner.search.problem.idle_limits import floor_s
from planner.search.problem.options import decode_options, mixed_options, prefill_options, split_of
from planner.search.problem.plan_problem import Problem, with_policies
from planner.search.problem.reasons import also_left_out
from planner.simulator.slo_verdict import LineVerdict, Verdict
from planner.units import show_beside, show_s, show_share

# The counts of workers that are simulated, per agent. Half a worker is among them because every worker's
# prefix cache begins without the system prompt, so that fewer workers than agents may do better.
WORKERS_PER_AGENT = (1.0, 2.0, 0.5)
# Routers that go by prefix matches are simulated with the policies' own settings, and with settings that
# follow a match only if it is more than these shares of the prompt. Half of a coding agent's prompt is the
# system prompt that all agents share, and nine tenths are in its own earlier turns. So a router that follows
# only matches with an agent's own turns spreads the agents evenly.
THRESHOLDS_FRAC = (0.65, 0.8, 0.9)
MOST_TYPES = 4  # This many of the fastest ways to split the LLM over GPUs are simulated. Set by hand.


@dataclass(frozen=True, slots=True)
class NearFleet:
    """A fleet that misses the SLO, the problem with its policies, and its verdict."""

    problem: Problem
    counts: Counts
    verdict: Verdict

    @property
    def excess(self) -> float:
        """How far the fleet is from the SLO: the sum of log(value / limit) over missed lines. It is infinite
        where too many requests are never served, and 0 where only the attainment is missed.
        """
        return sum(math.log(line.deciding_s / line.limit.limit_s) for line in self.verdict.missed)


def find_reachable_fleet(problem: Problem) -> tuple[Problem, Counts] | None:
    """The first fleet with about a worker for each agent that keeps the SLO, and the problem with its
    policies. The fleet may exceed the limits on money, power and stock; it only shows that a search is worth
    while.

    None if the time ends first, or if all such fleets fail for reasons that fleets of other types may not
    have: the backlog test, a tenant's guarantee, or requests that are too long for a worker. Raises
    InfeasibleError, with what the nearest fleet keeps, if none keeps the SLO and one misses a line of it or
    the attainment.
    """
    misses: list[NearFleet] = []
    judges_gaps = any(limit.metric_row.is_of_gaps for limit in problem.slo.limits)
    variants = [with_policies(problem, policies) for policies in _router_settings(problem.oracle.policies)]
    for counts, variant in itertools.product(_candidates(problem), variants):
        if problem.out_of_time():
            problem.progress("the time ended before every fleet with about a worker per agent was simulated")
            return None
        _, verdict = variant.oracle.simulate_and_judge(variant.oracle.fleet(counts), record=judges_gaps)
        if verdict.holds:
            return variant, counts
        if verdict.missed or not verdict.attainment_holds:
            misses.append(NearFleet(variant, counts, verdict))
    if not misses:
        problem.progress("fleets with about a worker per agent keep the limits and miss the SLO all the same")
        return None
    raise _out_of_reach(problem, misses)


def _router_settings(policies: Policies) -> list[Policies]:
    """The policies as they are, and with the default `balance_requests` and each of THRESHOLDS_FRAC. Equal
    policies are returned once.
    """
    by_match = replace(policies, balance_requests=Policies().balance_requests)
    others = [replace(by_match, cache_threshold_frac=threshold) for threshold in THRESHOLDS_FRAC]
    return list(dict.fromkeys((policies, *others)))


def _candidates(problem: Problem) -> Iterator[Counts]:
    """The fleets to simulate. For each of the fastest ways to split the LLM over GPUs, mixed workers with the
    largest token budget of a step. Where gaps between tokens are limited, also mixed workers with the
    smallest, and a prefill and a decode worker for each agent: no prompt delays a decode worker's tokens.
    """
    description = problem.task.described
    assert description is not None and description.agents is not None
    agents = description.agents.count
    by_split: dict[object, list[WorkerType]] = {}
    for worker in sorted(problem.types, key=lambda worker: -worker.max_num_batched_tokens):
        by_split.setdefault(split_of(worker), []).append(worker)

    def largest_share(worker: WorkerType) -> float:
        """The largest share of a limit that a request takes on an idle worker; small for fast workers."""
        limits = problem.slo.limits
        return max(floor_s(limit, worker, problem.lengths) / limit.limit_s for limit in limits)

    fastest = sorted(by_split.values(), key=lambda workers: largest_share(workers[0]))
    limits_gaps = any(limit.metric_row.is_of_decodes for limit in problem.slo.limits)
    for workers in fastest[:MOST_TYPES]:
        # Their token budgets fall from the first to the last. A single worker type counts once.
        simulated_types = list(dict.fromkeys((workers[0], workers[-1]))) if limits_gaps else workers[:1]
        for option in mixed_options(simulated_types, problem.task.objective):
            if not problem.can_simulate([option]):
                continue
            most = problem.limits.most_workers(option.type)
            for per_agent in WORKERS_PER_AGENT:
                yield ((option, max(math.ceil(per_agent * agents), 1)),)
            if 1 <= most < agents:  # The largest fleet within the limits, if these allow no worker per agent.
                yield ((option, int(most)),)
    if limits_gaps and can_hand_off(problem):
        for workers in fastest[:MOST_TYPES]:
            prefills = prefill_options(workers[:1], problem.task.objective)
            decodes = decode_options(workers, problem.task.objective)
            if prefills and decodes and problem.can_simulate((prefills[0], decodes[0])):
                yield (prefills[0], agents), (decodes[0], agents)


def _attained_text(line: LineVerdict) -> str:
    """What a fleet attains of a line that it misses. The percentile is infinite where too many requests are
    never served, and then no limit is loose enough.
    """
    if math.isfinite(line.deciding_s):
        return f"{line.limit.label} of {show_beside(line.deciding_s, line.limit.limit_s).value}"
    return f"{show_share(line.deciding_frac)} within the limit on {line.limit.label}, the rest never served"


def _out_of_reach(problem: Problem, misses: list[NearFleet]) -> InfeasibleError:
    """The error that none of these fleets keeps the SLO, with the limits that the nearest fleet would keep:
    the nearest of the fleets within the question's limits on money, power and stock, or else of all.
    """
    allowed = [near for near in misses if problem.allows(near.counts)]
    nearest = min(allowed or misses, key=lambda near: near.excess)
    missed, misses_attainment = nearest.verdict.missed, not nearest.verdict.attainment_holds
    fleet_text = " and ".join(
        f"{count} x {option.type.name}" + ("" if option.role == "mixed" else f" for {option.role}")
        for option, count in nearest.counts
    )
    attained = [_attained_text(line) for line in missed]
    limits = [f"{line.limit.label} <= {show_s(line.limit.limit_s)}" for line in missed]
    if misses_attainment:
        attained.append(f"{show_share(nearest.verdict.attainment_frac)} of requests that keep all limits")
        limits.append(f"attainment {100 * (problem.slo.attainment_frac or 1.0):g} %")
    slo_text, attained_text = " and ".join(limits), " and ".join(attained)
    relaxed_s = {
        line.limit.name: rounded_up(line.deciding_s) for line in missed if math.isfinite(line.deciding_s)
    }
    # Whether the nearest fleet keeps the SLO with these limits in place of those that it misses. A fleet that
    # exceeds the question's other limits does not help, nor do looser limits if only the attainment is
    # missed.
    is_kept = (
        bool(allowed and missed)
        and len(relaxed_s) == len(missed)
        and with_limits(nearest.problem, relaxed_s).oracle.holds(nearest.counts)
    )
    relaxation, ways = "relax the SLO", []
    if is_kept:
        enough = " and ".join(f"{name} to {show_s(limit_s)}" for name, limit_s in relaxed_s.items())
        relaxation = f"relax {enough}, with which a fleet was found"
        ways = [
            Change(line.limit.name, line.limit.limit_s, relaxed_s[line.limit.name], "s") for line in missed
        ]
    fleets = len({near.counts for near in misses})
    return InfeasibleError(
        f"latency: no fleet was found that keeps {slo_text}: {fleets} with up to two workers for each agent "
        f"were simulated, and the nearest, {fleet_text}, has {attained_text}. More workers do not "
        f"cure that; {relaxation}, or add a faster GPU{also_left_out(problem.task.unchecked_left_out)}",
        kind="latency",
        constraint=[*(line.limit.name for line in missed), *(["attainment"] if misses_attainment else [])],
        relaxation="" if is_kept else f"unknown: {relaxation}",  # By default that of `ways`.
        ways=[ways] if is_kept else [],
        is_proved=False,
    )
