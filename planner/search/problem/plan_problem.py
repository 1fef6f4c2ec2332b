"""`Problem`: the question that a search answers, in the form that all stages of the search read.

A stage that changes the question (more draws, other policies, scenarios) makes a copy with the functions at
the end of this module.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from planner.documents import facts
from planner.documents.task import PlanQuestion
from planner.domain import ROUNDING, Gpu, Slo
from planner.errors import InputError
from planner.fleet import Fleet, Policies, Role, WorkerType
from planner.models.llm import Llm
from planner.policies import ROUTING
from planner.search.oracle.deterministic_parallel import effort_spent
from planner.search.oracle.fleet_counts import SAME_PRICE, Counts, is_within
from planner.search.oracle.fleet_oracle import Oracle, instant_beside
from planner.search.oracle.scenarios import Scenario, Scenarios
from planner.search.oracle.verdict_cache import VerdictCache
from planner.search.oracle.work_clock import EFFORT_S, is_over
from planner.search.prefixes.pinning import Pinning
from planner.search.problem.options import (
    OBJECTIVE_UNITS,
    PRICE_TIES,
    OptionLeftOut,
    decode_options,
    mixed_options,
    prefill_options,
    with_price_tie,
    without_price_tie,
)
from planner.search.problem.prefix_hits import PrefixHits
from planner.simulator.policy_checks import check_policies
from planner.solvers.master import FleetLimits, Option
from planner.solvers.required_work import SloWork
from planner.traffic.trace import Trace
from planner.traffic.workload import TraceLengths, distinct_lengths
from planner.units import count_text

Progress = Callable[[str], None]
"""Shows a line of text to a person: what the search does now."""


def report_nothing(*_: object) -> None:
    """A reporter that reports nothing."""


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """How far a search has come: the best value and the lower bound, in the objective's unit, None if not
    known yet. `fleet()` builds the fleet whose value is `best`, which takes time if prefixes are pinned.
    """

    best: float | None
    bound: float | None
    simulations: int
    fleet: Callable[[], Fleet] | None = None


Watch = Callable[[SearchProgress], None]
"""Is called with a SearchProgress after every simulation, in the thread that ran it."""


OnPaper = Callable[["Problem", Fleet], None]
"""Is called with a problem and its cheapest fleet on paper, before production is searched."""


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """The conditions of a search beside its question: its deadline on the search's clock (work_clock.py), the
    functions that it calls to report, and `cache`, the simulations of earlier searches, which it need not
    repeat.
    """

    deadline: float = math.inf
    progress: Progress = report_nothing
    watch: Watch = report_nothing
    cache: VerdictCache = field(default_factory=VerdictCache)
    by_gpu: bool = False  # Only GPUs in use cost; idle ones of a node are shared with other LLMs.
    on_paper: OnPaper = report_nothing
    adds_robustness: bool = False  # More traffic and fewer workers are simulated too (robustness.py).


@dataclass(frozen=True, slots=True)
class Problem:
    """A question in the form that all stages of a search use: the options, the limits, the traffic, and the
    oracle that simulates fleets.
    """

    task: PlanQuestion
    llm: Llm
    slo: Slo
    # The idle worker whose latencies turned the factors of a relative SLO into seconds; None if limits were
    # given in seconds.
    slo_reference: facts.SloInSeconds | None
    trace: Trace
    traffic_note: str  # The trace in words: its name, how it was scaled, which part was taken.
    longest_tokens: int  # Prompt and output of the longest request.
    lengths: TraceLengths  # Of the trace; under policies with prefix caches also what caches spare.
    hits: PrefixHits | None  # None if the question offers no prefix caches.
    gpus: tuple[Gpu, ...]
    types: tuple[WorkerType, ...]  # Worker types that hold the longest request; the search is over these.
    left_out: tuple[OptionLeftOut, ...]
    limits: FleetLimits
    oracle: Oracle
    slo_work: SloWork  # What the SLO requires under any policy; bounds and level 0 start from it.
    deadline: float
    progress: Progress
    watch: Watch
    draws: tuple[Trace, ...] = ()  # Further traffic on which the SLO must be kept.
    # The scenarios in which production is searched and tested; None without `safety`.
    search_scenarios: Scenarios | None = None
    test_scenarios: Scenarios | None = None
    # A lower bound on the value of every fleet; None if no fleet can be within the limits.
    bound: float | None = 0.0

    def allows(self, counts: Counts) -> bool:
        """Whether a fleet is within the limits."""
        return is_within(self.limits, counts)

    @property
    def option_objective(self) -> str:
        """The objective's name for `option_of`: with `limits.by_gpu` idle GPUs of nodes cost nothing."""
        is_by_gpu = self.task.objective == "cost" and self.limits.by_gpu
        return "cost-by-gpu" if is_by_gpu else self.task.objective

    def with_tie_break(self, option: Option) -> Option:
        """With the objectives "gpus" and "power", the option with a small part of its price added, so that of
        fleets with equally many GPUs or Watts the cheapest is found; with others the option itself.
        """
        dearest_usd_per_h = max(gpu.price_usd_per_h for gpu in self.gpus)
        return with_price_tie(option, self.task.objective, dearest_usd_per_h)

    @property
    def same_value_factor(self) -> float:
        """Two values count as equal if one is less than this factor times the other."""
        # Where the price is a part of the value (`with_tie_break`), equal values differ by rounding.
        return 1 + 2 * ROUNDING if self.task.objective in PRICE_TIES else SAME_PRICE

    def why_not_simulated(self, option: Option) -> str:
        """Why workers of this option are not simulated with the problem's policies; empty if they are."""
        counts: Counts = ((option, 1),)
        if option.role != "mixed":  # Beside a worker that nothing is wrong with.
            role: Role = "decode" if option.role == "prefill" else "prefill"
            counts += ((replace(option, role=role, type=instant_beside(option.type)), 1),)
        try:
            check_policies(self.oracle.fleet(counts, with_pins=False))
        except InputError as error:
            return str(error)
        return ""

    def can_simulate(self, options: Iterable[Option]) -> bool:
        """Whether workers of all these options are simulated with the problem's policies."""
        return not any(map(self.why_not_simulated, options))

    def _all_options(self) -> list[Option]:
        """The worker types in each role: mixed, then prefill, then decode."""
        return [
            self.with_tie_break(option)
            for options_in_role in (mixed_options, prefill_options, decode_options)
            for option in options_in_role(self.types, self.option_objective)
        ]

    def options(self) -> list[Option]:
        """The worker types in each role that are simulated with the problem's policies: a search simulates
        no others, and checks no fleet of its own again.
        """
        return [option for option in self._all_options() if self.can_simulate([option])]

    def options_not_simulated(self) -> tuple[OptionLeftOut, ...]:
        """The other worker types, those with one reason together."""
        names = defaultdict[str, list[str]](list)
        for option in self._all_options():
            if why := self.why_not_simulated(option):
                names[re.sub(r"^(mixed|pre|dec): ", "", why)].append(option.role)
        return tuple(
            OptionLeftOut(
                " and ".join(
                    count_text(count, f"{role} worker type") for role, count in Counter(roles).items()
                ),
                facts.NotSimulatedWith(why),
            )
            for why, roles in names.items()
        )

    def without_tie_break(self, value: float) -> float:
        """A value of the search in the objective's unit: if that is GPUs or Watts, their number without the
        price that breaks ties.
        """
        return without_price_tie(value, self.task.objective)

    def best_in_words(self, value: float) -> str:
        """A progress message about the best value found so far."""
        if not math.isfinite(value):
            return "none found yet"
        if self.task.objective == "gpus":
            return f"best so far {count_text(int(self.without_tie_break(value)), 'GPU')}"
        value = self.without_tie_break(value)
        return f"best so far {value:,.2f} {OBJECTIVE_UNITS.get(self.task.objective, '')}".rstrip()

    def out_of_time(self) -> bool:
        """Whether the deadline has passed, or the time limit on the wall clock."""
        return is_over(self.deadline)


def refuted_below(problem: Problem, value: float) -> Problem:
    """The same problem, in which all fleets with a lower objective than `value` count as failing."""
    return replace(problem, oracle=replace(problem.oracle, refuted_below=value * (1 - ROUNDING)))


def with_effort_limit(problem: Problem, more_requests: float) -> Problem:
    """The same question with a deadline after `more_requests` more simulated requests, each of which takes
    EFFORT_S on the search's clock.
    """
    return replace(problem, deadline=min(problem.deadline, EFFORT_S * (effort_spent() + more_requests)))


def with_policies(problem: Problem, policies: Policies) -> Problem:
    """The same question under other policies."""
    lengths, pins = problem.lengths, ROUTING[policies.routing].pins
    if policies.prefix_cache:
        # build_problem.py computes hits whenever a policy with caches is offered.
        assert problem.hits is not None
        lengths = problem.hits.lengths(may_pin=pins)
    elif problem.oracle.policies.prefix_cache:
        lengths = distinct_lengths(problem.trace)
    of_pairs = problem.task.policies_of_pairs(policies)  # None if pairs have the policies of mixed workers.
    pinning = None
    if pins:
        pinning = problem.oracle.pinning or Pinning(problem.trace)
    oracle = replace(problem.oracle, policies=policies, of_pairs=of_pairs, pinning=pinning)
    return replace(problem, lengths=lengths, oracle=oracle)


def on_all_draws(problem: Problem) -> Problem:
    """The same question on all draws of the traffic; policy_search.py begins with few of them."""
    if not problem.draws:
        return problem
    oracle = replace(problem.oracle, draws=problem.draws)
    # The new oracle has no verdicts yet. A fleet must keep the SLO on every draw, so fleets that failed on
    # few draws need not be simulated again.
    oracle.verdicts.update({fleet: False for fleet, holds in problem.oracle.verdicts.items() if not holds})
    return replace(problem, oracle=oracle)


def with_search_scenarios(problem: Problem) -> Problem:
    """The same problem in the scenarios that a search sees; the problem itself without `safety`."""
    if problem.task.safety is None or problem.search_scenarios is None:
        return problem
    count = problem.search_scenarios.count
    scenarios = [problem.search_scenarios[i] for i in range(count)]
    return with_scenarios(problem, scenarios, problem.task.safety.most_missed(count))


def with_scenarios(problem: Problem, scenarios: Sequence[Scenario], may_miss: int) -> Problem:
    """The same problem, in which a fleet must also keep the SLO in these scenarios, except for `may_miss`."""
    # `infers_kept` spares simulations: more workers than those of a fleet that holds are taken to hold too.
    oracle = replace(problem.oracle, scenarios=tuple(scenarios), may_miss=may_miss, infers_kept=True)
    # Production reports its own progress. It runs many searches, whose messages would only be in the way.
    return replace(problem, oracle=oracle, progress=report_nothing)
