"""The question that one search answers: what stays the same through all of its stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from planner.documents.facts import SloInSeconds
from planner.documents.task import PlanQuestion
from planner.domain import Gpu, Slo
from planner.fleet import Fleet, Policies, WorkerType
from planner.models.llm import Llm
from planner.policies import ROUTING
from planner.search.oracle.deterministic_parallel import effort_spent
from planner.search.oracle.fleet_counts import Counts, is_within
from planner.search.oracle.fleet_oracle import Answers, Oracle
from planner.search.oracle.pinning import Pinning
from planner.search.oracle.scenarios import Scenario, Scenarios
from planner.search.oracle.work_clock import EFFORT_S, is_over
from planner.search.problem.options import OBJECTIVE_UNITS, LeftOut
from planner.search.problem.prefix_hits import PrefixHits
from planner.solvers.master import FleetLimits
from planner.solvers.required_work import SloWork
from planner.traffic.trace import Trace
from planner.traffic.workload import TraceLengths, distinct_lengths

Progress = Callable[[str], None]


def report_nothing(_: str) -> None:
    """A progress reporter that reports nothing."""


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a search has come, in the objective's unit; None where nothing is known yet. `fleet` makes that
    of the best value, which takes time where prefixes are pinned.
    """

    best: float | None
    bound: float | None
    simulations: int
    fleet: Callable[[], Fleet] | None = None


Watch = Callable[[SearchProgress], None]
"""Is told the standing after every simulation, from whichever thread ran it."""


def ignore_progress(_: SearchProgress) -> None:
    """Lets the standings pass."""


OnPaper = Callable[["Problem", Fleet], None]
"""Is told the cheapest fleet on paper, and what it was asked."""


def ignore_paper_answer(_problem: Problem, _fleet: Fleet) -> None:
    """Nobody waits for the answer on paper."""


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """Until when a search may go on, on its own clock (work_clock.py), who is told how far it is, and the
    answers of earlier questions. `on_paper` is told the cheapest fleet on paper before production is
    searched.
    """

    deadline: float = math.inf
    progress: Progress = report_nothing
    watch: Watch = ignore_progress
    answers: Answers = field(default_factory=Answers)
    by_gpu: bool = False  # money counts GPUs in use alone: others pay for what nodes have beside
    on_paper: OnPaper = ignore_paper_answer
    adds_robustness: bool = False  # whether more traffic and fewer workers are simulated too (robustness.py)


@dataclass(frozen=True, slots=True)
class Problem:
    """What stays the same through all stages of one search."""

    task: PlanQuestion
    llm: Llm
    slo: Slo
    slo_reference: SloInSeconds | None  # what a relative SLO became seconds by
    trace: Trace
    traffic_note: str
    longest_tokens: int
    lengths: TraceLengths
    hits: PrefixHits | None  # where prefix caches may be counted on
    gpus: tuple[Gpu, ...]
    types: tuple[WorkerType, ...]  # that hold the longest request: what the search ranges over
    left_out: tuple[LeftOut, ...]
    limits: FleetLimits
    oracle: Oracle
    obliged: SloWork  # under any policy: what bounds and level 0 start from
    deadline: float
    progress: Progress
    watch: Watch
    draws: tuple[Trace, ...] = ()  # beside `trace`, on which the SLO must be kept too
    searched: Scenarios | None = None  # what a search for production sees, where safety is asked for,
    tested: Scenarios | None = None  # and what tests it
    lower: float | None = 0.0  # what any fleet costs at least; None: proved that none is within the limits

    def allows(self, counts: Counts) -> bool:
        """Whether a fleet is within the limits."""
        return is_within(self.limits, counts)

    @property
    def priced(self) -> str:
        """The objective, as options count it."""
        is_by_gpu = self.task.objective == "cost" and self.limits.by_gpu
        return "cost-by-gpu" if is_by_gpu else self.task.objective

    def best_in_words(self, value: float) -> str:
        """The cheapest value found so far, for progress."""
        if not math.isfinite(value):
            return "none found yet"
        return f"best so far {value:,.2f} {OBJECTIVE_UNITS.get(self.task.objective, '')}".rstrip()

    def out_of_time(self) -> bool:
        return is_over(self.deadline)


def with_effort_limit(problem: Problem, most: float) -> Problem:
    """The same question, for which so many more requests may be simulated."""
    return replace(problem, deadline=min(problem.deadline, EFFORT_S * (effort_spent() + most)))


def with_policies(problem: Problem, policies: Policies) -> Problem:
    """The same question to a fleet that works in this way."""
    lengths = problem.lengths
    if policies.prefix_cache and not problem.oracle.policies.prefix_cache:
        assert problem.hits is not None
        lengths = problem.hits.lengths()
    elif problem.oracle.policies.prefix_cache and not policies.prefix_cache:
        lengths = distinct_lengths(problem.trace)
    of_pairs = problem.task.policies_of_pairs(policies)
    pinning = None
    if ROUTING[policies.routing].pins:
        pinning = problem.oracle.pinning or Pinning(problem.trace)
    return replace(
        problem,
        lengths=lengths,
        oracle=replace(problem.oracle, policies=policies, of_pairs=of_pairs, pinning=pinning),
    )


def on_all_draws(problem: Problem) -> Problem:
    """The same question of all draws of the traffic at once; `search_policies` asks for as few as will do."""
    if not problem.draws:
        return problem
    oracle = replace(problem.oracle, draws=problem.draws)
    oracle.verdicts.update({fleet: False for fleet, holds in problem.oracle.verdicts.items() if not holds})
    return replace(problem, oracle=oracle)


def with_search_scenarios(problem: Problem) -> Problem:
    """The same problem in the scenarios that a search sees; the problem itself without `safety`."""
    if problem.task.safety is None or problem.searched is None:
        return problem
    count = problem.searched.count
    scenarios = [problem.searched[i] for i in range(count)]
    return with_scenarios(problem, scenarios, problem.task.safety.most_missed(count))


def with_scenarios(problem: Problem, scenarios: Sequence[Scenario], may_miss: int) -> Problem:
    """The same problem in these scenarios too, of which a fleet may miss `may_miss`."""
    oracle = replace(problem.oracle, scenarios=tuple(scenarios), may_miss=may_miss)
    return replace(problem, oracle=oracle, progress=report_nothing)
