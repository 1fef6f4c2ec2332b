"""The question that one search answers: what stays the same through all of its stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from planner.documents.facts import SloInSeconds
from planner.documents.task import PlanQuestion
from planner.domain import ROUNDING, Gpu, Slo
from planner.fleet import Fleet, Policies, WorkerType
from planner.models.llm import Llm
from planner.policies import ROUTING
from planner.search.oracle.deterministic_parallel import effort_spent
from planner.search.oracle.fleet_counts import SAME_PRICE, Counts, is_within
from planner.search.oracle.fleet_oracle import Answers, Oracle
from planner.search.oracle.scenarios import Scenario, Scenarios
from planner.search.oracle.work_clock import EFFORT_S, is_over
from planner.search.prefixes.pinning import Pinning
from planner.search.problem.options import OBJECTIVE_UNITS, LeftOut, gpus_then_price, whole_gpus
from planner.search.problem.prefix_hits import PrefixHits
from planner.solvers.master import FleetLimits, Option
from planner.solvers.required_work import SloWork
from planner.traffic.trace import Trace
from planner.traffic.workload import TraceLengths, distinct_lengths
from planner.units import counted

Progress = Callable[[str], None]
"""Shows a line of text to a person: what the search does now."""


def report_nothing(_: str) -> None:
    """A progress reporter that reports nothing."""


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a search has come, in the objective's unit; None where nothing is known yet. `fleet()` builds
    the fleet whose value is `best`; that takes time where prefixes are pinned.
    """

    best: float | None
    bound: float | None
    simulations: int
    fleet: Callable[[], Fleet] | None = None


Watch = Callable[[SearchProgress], None]
"""Gets a SearchProgress, numbers for a program, after every simulation, in the thread that ran it."""


def ignore_progress(_: SearchProgress) -> None:
    """A `Watch` that does nothing."""


OnPaper = Callable[["Problem", Fleet], None]
"""Gets the cheapest fleet on paper, with the problem that it solves, before production is searched."""


def ignore_paper_answer(_problem: Problem, _fleet: Fleet) -> None:
    """An `OnPaper` that does nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """How long a search may go on, on its own clock (work_clock.py), what it calls as it goes on, and
    `answers`, the simulations of earlier searches, which it need not repeat.
    """

    deadline: float = math.inf
    progress: Progress = report_nothing
    watch: Watch = ignore_progress
    answers: Answers = field(default_factory=Answers)
    by_gpu: bool = False  # Only GPUs in use cost: idle ones of a node are charged to other LLMs.
    on_paper: OnPaper = ignore_paper_answer
    adds_robustness: bool = False  # More traffic and fewer workers are simulated too (robustness.py).


@dataclass(frozen=True, slots=True)
class Problem:
    """What stays the same through all stages of one search."""

    task: PlanQuestion
    llm: Llm
    slo: Slo
    slo_reference: SloInSeconds | None  # What turned a relative SLO into seconds.
    trace: Trace
    traffic_note: str
    longest_tokens: int
    lengths: TraceLengths
    hits: PrefixHits | None  # None: no hits of prefix caches are counted on.
    gpus: tuple[Gpu, ...]
    types: tuple[WorkerType, ...]  # Those that hold the longest request; the search is over these.
    left_out: tuple[LeftOut, ...]
    limits: FleetLimits
    oracle: Oracle
    slo_work: SloWork  # What the SLO requires under any policy; bounds and level 0 start from it.
    deadline: float
    progress: Progress
    watch: Watch
    draws: tuple[Trace, ...] = ()  # The SLO must be kept on these too, beside `trace`.
    searched: Scenarios | None = None  # Production is searched in these; None without `safety`.
    tested: Scenarios | None = None  # Its fleet is tested in these; None without `safety`.
    lower: float | None = 0.0  # Any fleet costs this at least; None: none is within the limits, as proved.

    def allows(self, counts: Counts) -> bool:
        """Whether a fleet is within the limits."""
        return is_within(self.limits, counts)

    @property
    def priced(self) -> str:
        """The objective's name for `option_of`: with `limits.by_gpu` idle GPUs of nodes cost nothing."""
        is_by_gpu = self.task.objective == "cost" and self.limits.by_gpu
        return "cost-by-gpu" if is_by_gpu else self.task.objective

    def with_tie_break(self, option: Option) -> Option:
        """The option as the search weighs it: of fleets of equally many GPUs the cheaper one is better."""
        if self.task.objective != "gpus":
            return option
        dearest_usd_per_h = max(gpu.price_usd_per_h for gpu in self.gpus)
        return gpus_then_price(option, dearest_usd_per_h)

    @property
    def same_value(self) -> float:
        """Values that differ by a smaller factor are of fleets of equal price."""
        return 1 + 2 * ROUNDING if self.task.objective == "gpus" else SAME_PRICE

    def without_tie_break(self, value: float) -> float:
        """A value of the search in the objective's unit: of GPUs their number alone."""
        return whole_gpus(value) if self.task.objective == "gpus" else value

    def best_in_words(self, value: float) -> str:
        """The cheapest value found so far, for progress."""
        if not math.isfinite(value):
            return "none found yet"
        if self.task.objective == "gpus":
            return f"best so far {counted(int(self.without_tie_break(value)), 'GPU')}"
        return f"best so far {value:,.2f} {OBJECTIVE_UNITS.get(self.task.objective, '')}".rstrip()

    def out_of_time(self) -> bool:
        """Whether the deadline has passed, or the time limit on the wall clock."""
        return is_over(self.deadline)


def with_effort_limit(problem: Problem, more_requests: float) -> Problem:
    """The same question, for which so many more requests may be simulated, each EFFORT_S on the clock."""
    return replace(problem, deadline=min(problem.deadline, EFFORT_S * (effort_spent() + more_requests)))


def with_policies(problem: Problem, policies: Policies) -> Problem:
    """The same question under other policies."""
    lengths = problem.lengths
    if policies.prefix_cache and not problem.oracle.policies.prefix_cache:
        # build_problem.py counts hits wherever a policy with caches is offered.
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
    """The same question on all draws of the traffic at once; policy_search.py begins with few of them."""
    if not problem.draws:
        return problem
    oracle = replace(problem.oracle, draws=problem.draws)
    # The new oracle has no verdicts yet. A fleet that fails on one draw fails on all.
    oracle.verdicts.update({fleet: False for fleet, holds in problem.oracle.verdicts.items() if not holds})
    return replace(problem, oracle=oracle)


def with_search_scenarios(problem: Problem) -> Problem:
    """The same problem in the scenarios that a search sees; the problem itself without `safety`."""
    if problem.task.safety is None or problem.searched is None:
        return problem
    count = problem.searched.count
    scenarios = [problem.searched[i] for i in range(count)]  # `Scenarios` draws each when it is asked for.
    return with_scenarios(problem, scenarios, problem.task.safety.most_missed(count))


def with_scenarios(problem: Problem, scenarios: Sequence[Scenario], may_miss: int) -> Problem:
    """The same problem in these scenarios too, of which a fleet may miss `may_miss`."""
    oracle = replace(problem.oracle, scenarios=tuple(scenarios), may_miss=may_miss)
    # Production shows its own progress; lines of each search within it would hide that.
    return replace(problem, oracle=oracle, progress=report_nothing)
