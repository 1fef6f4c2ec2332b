"""Holds the whole answer of `plan` against every fleet there is, on one random question.

    wrong  (a) a level 0 that is called exact is beaten by a fleet of level 0 that holds
           (b) "no fleet": one holds, of level 0 or of several types; or the relaxation named has no plan
           (c) a lower bound lies above a fleet that holds, under whatever policy
           (d) the plan itself does not hold, or is not within the limits
    and    how far the plan is above the cheapest fleet that was found here

Fleets of level 0 are enumerated, all that are cheaper than what they are held against; of fleets of several
types all with few workers, and a sample of the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from random_questions import Question, types_of

from planner.documents.task import PlanQuestion
from planner.domain import COST, GPUS, POWER, FleetLimit
from planner.errors import Change, InfeasibleError, PlannerError, ways_text
from planner.fleet import Policies, WorkerType
from planner.search.evidence.certify import plan
from planner.search.evidence.plan import Plan
from planner.search.mixed.bounds import lower_bound
from planner.search.oracle.fleet_counts import Counts, objective_of
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.problem.bill import bill_fleet
from planner.search.problem.build_problem import build_problem
from planner.search.problem.options import decode_options, mixed_options, prefill_options
from planner.search.problem.plan_problem import Problem, with_policies
from planner.solvers.master import FleetLimits, Option

MOST = 12  # workers of a pool
CLOSE = 1e-6  # relative; costs are sums of floats
POLICIES: tuple[dict[str, str], ...] = (
    {},
    {"queue": "sjf"},
    {"queue": "srpt"},
    {"queue": "ljf"},
    {"routing": "least-outstanding"},
    {"routing": "round-robin", "decode_routing": "random"},
    {"routing": "power-of-two", "decode_routing": "power-of-two"},
)


@dataclass(slots=True)
class Report:
    """What came out. Values are in the objective's unit, infinite where no fleet was found."""

    seed: int
    kind: str
    said: str = "plan"  # plan, infeasible, not found, refused
    is_exact: bool = False
    value: float = math.inf
    level0: float = math.inf
    bound: float = 0.0
    true_level0: float = math.inf
    true_value: float = math.inf
    simulations: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def level0_dearer_frac(self) -> float:
        """By how much the level 0 that was said is above the true one."""
        return _dearer_frac(self.level0, self.true_level0)

    @property
    def dearer_frac(self) -> float:
        return _dearer_frac(self.value, self.true_value)


def _dearer_frac(said: float, true: float) -> float:
    if math.isinf(said):
        return 0.0 if math.isinf(true) else math.inf
    return max(said / true - 1, 0.0) if true > 0 else 0.0


def check(question: Question, *, most_fleets: int = 20_000, samples: int = 400) -> Report:
    """Plan, then simulate whatever might beat the plan."""
    report = Report(question.seed, question.kind)
    rng = np.random.default_rng([15, question.seed])
    task = question.task
    found: Plan | None = None
    refusal: PlannerError | None = None
    try:
        found = plan(task, question.trace, question.catalog)
    except PlannerError as error:
        refusal = error
        known = {3: "infeasible", 4: "not found in time"}
        report.said = known.get(error.exit_code, "refused")
    except Exception as error:  # our own mistake, whatever it is
        report.said = "crash"
        report.wrong.append(f"(d) plan ends in {type(error).__name__}: {str(error)[:120]}")
    try:
        problem = _problem(task, question)
    except PlannerError as error:
        if type(error) is not type(refusal):
            report.wrong.append(f"plan: {refusal}; without its limits: {error}")
        return report
    own, foreign = _policies(task, found)
    fleets = _Fleets(problem, rng)
    if found is not None:
        _look_at_plan(report, problem, found)
    stated = lower_bound(problem)
    report.bound = max(report.bound, math.inf if stated is None else stated)
    if isinstance(refusal, InfeasibleError) and found is None:
        report.wrong += _relaxed(question, refusal)
    _beat(report, problem, fleets, own, most_fleets, samples)
    _undercut(report, question, problem, fleets, [*own, *foreign], most_fleets // 4, samples // 4)
    if report.said == "refused":
        report.wrong.append(f"(b) refused: {refusal}")
    if report.said == "infeasible" and math.isfinite(report.true_value):
        report.wrong.append(f"(b) '{str(refusal)[:90]}', but a fleet at {report.true_value:.6g} holds")
    if report.is_exact and report.true_level0 < report.level0 * (1 - CLOSE):
        report.wrong.append(f"(a) level 0 is {report.level0:.6g} 'exact', {report.true_level0:.6g} holds")
    return report


def _problem(task: PlanQuestion, question: Question) -> Problem:
    """The question as it is posed; limits that no worker keeps are left to simulations."""
    try:
        return build_problem(task, question.trace, question.catalog)
    except InfeasibleError:
        loose = replace(task, slo=replace(task.slo, limits=(), attainment_frac=None))
        problem = build_problem(loose, question.trace, question.catalog)
        oracle = replace(problem.oracle, slo=task.slo)
        return replace(problem, task=task, slo=task.slo, oracle=oracle)


def _policies(task: PlanQuestion, found: Plan | None) -> tuple[list[Policies], list[Policies]]:
    """Those that may be chosen (caches as they were fitted), and others that a bound must stand."""
    asked = list(task.policy_choices())
    if found is not None and found.fleet.policies.prefix_cache:
        asked = [each for each in asked if not each.prefix_cache] + [found.fleet.policies]
    others = [
        replace(asked[0], queue_window_s=math.inf, **changes)  # type: ignore[arg-type]
        for changes in POLICIES
    ]
    return asked, [each for each in others if each not in asked and not each.prefix_cache]


def _look_at_plan(report: Report, problem: Problem, found: Plan) -> None:
    certificate = found.certificate
    report.is_exact, report.value, report.level0 = (
        certificate.level0_exact,
        certificate.value,
        certificate.level0,
    )
    report.bound = certificate.bound
    asked = with_policies(problem, found.fleet.policies)
    counts = asked.oracle.counts(found.fleet)
    failing = asked.oracle.failing_loss(counts)
    if failing is not None:
        report.wrong.append(f"(d) the plan fails as {_shown(failing[1])}")
    workers = [(pool.type, pool.count) for pool in found.fleet.pools]
    if broken := problem.limits.first_exceeded(workers):
        report.wrong.append(f"(d) the plan breaks the limit on {broken.name}")
    if not found.verdict.holds:
        report.wrong.append("(d) the plan's own verdict does not hold")
    unit = {
        "cost": bill_fleet(found.fleet).usd_per_h,
        "power": found.fleet.power_w,
        "gpus": float(found.fleet.gpus),
    }
    if abs(unit[certificate.objective] - certificate.value) > CLOSE * certificate.value:
        report.wrong.append(f"(d) the plan is worth {unit[certificate.objective]}, said {certificate.value}")
    if certificate.value > certificate.level0 * (1 + CLOSE):
        report.wrong.append(f"(d) the plan at {certificate.value} is above level 0 at {certificate.level0}")


def _shown(counts: Counts) -> str:
    return " + ".join(f"{count} {option.name}" for option, count in counts)


class _Fleets:
    """Which fleets there are, with the option's objective as their value."""

    def __init__(self, problem: Problem, rng: np.random.Generator):
        self.problem, self.rng = problem, rng

    def options(
        self, types: Sequence[WorkerType] | None = None
    ) -> tuple[list[Option], list[Option], list[Option]]:
        kinds = self.problem.types if types is None else types
        wanted = self.problem.task.objective
        return mixed_options(kinds, wanted), prefill_options(kinds, wanted), decode_options(kinds, wanted)

    def of_level0(self, below: float, limits: FleetLimits, options: tuple[list[Option], ...]) -> list[Counts]:
        """All that are cheaper, with up to MOST workers in a pool, the cheapest first."""
        mixed, prefill, decode = options
        fleets: list[Counts] = [
            ((o, n),) for o in mixed for n in range(1, MOST + 1) if objective_of(((o, n),)) < below
        ]
        for p, d in itertools.product(prefill, decode):
            for m, n in itertools.product(range(1, MOST + 1), repeat=2):
                counts = (p, m), (d, n)
                if objective_of(counts) < below:
                    fleets.append(counts)
        return sorted((each for each in fleets if is_within(limits, each)), key=objective_of)

    def small(
        self, below: float, limits: FleetLimits, options: tuple[list[Option], ...], workers: int
    ) -> list[Counts]:
        """All of several types with so few workers."""
        flat = [option for kind in options for option in kind]
        fleets: list[Counts] = []
        for size in range(2, workers + 1):
            for chosen in itertools.combinations_with_replacement(range(len(flat)), size):
                counts = tuple((flat[i], chosen.count(i)) for i in dict.fromkeys(chosen))
                if objective_of(counts) >= below:
                    continue
                if (
                    is_fleet(counts)
                    and len(counts) > 1
                    and not is_level0(counts)
                    and is_within(limits, counts)
                ):
                    fleets.append(counts)
        return fleets

    def sampled(
        self, below: float, limits: FleetLimits, options: tuple[list[Option], ...], samples: int
    ) -> Iterator[Counts]:
        """Of several types: workers drawn until the next would cost too much or break a limit."""
        flat = [option for kind in options for option in kind]
        seen = set()
        for _ in range(samples):
            few = [
                flat[int(i)]
                for i in self.rng.choice(
                    len(flat), min(int(self.rng.integers(2, 5)), len(flat)), replace=False
                )
            ]
            most = below if math.isfinite(below) else math.inf
            ceiling = most * float(self.rng.uniform(0.6, 1.0)) if math.isfinite(most) else most
            counts = dict.fromkeys(few, 0)
            for _ in range(4 * MOST):
                option = few[int(self.rng.integers(len(few)))]
                more = counts | {option: counts[option] + 1}
                wider = tuple((o, n) for o, n in more.items() if n)
                if counts[option] < MOST and objective_of(wider) < ceiling and is_within(limits, wider):
                    counts = more
            chosen = tuple((o, n) for o, n in counts.items() if n)
            key = tuple((o.name, n) for o, n in chosen)
            if len(chosen) > 1 and is_fleet(chosen) and not is_level0(chosen) and key not in seen:
                seen.add(key)
                yield chosen


def is_within(limits: FleetLimits, counts: Counts) -> bool:
    return limits.first_exceeded([(option.type, count) for option, count in counts]) is None


def is_fleet(counts: Counts) -> bool:
    roles = {option.role for option, _ in counts}
    return ("prefill" in roles) == ("decode" in roles)


def is_level0(counts: Counts) -> bool:
    roles = sorted(option.role for option, _ in counts)
    return roles in (["mixed"], ["decode", "prefill"])


def _beat(
    report: Report, problem: Problem, fleets: _Fleets, own: Sequence[Policies], most_fleets: int, samples: int
) -> None:
    """The cheapest fleet of level 0, and of all, that holds under the policies that may be chosen."""
    options = fleets.options()
    oracles = [with_policies(problem, policies).oracle for policies in own]
    report.true_level0, report.true_value = report.level0, report.value
    level0 = fleets.of_level0(report.level0 * (1 - CLOSE), problem.limits, options)
    if len(level0) > most_fleets:
        keep = fleets.rng.choice(len(level0), most_fleets, replace=False)
        level0 = [level0[i] for i in sorted(keep)]
    for counts in level0:
        if _any_holds(oracles, counts):
            report.true_level0 = objective_of(counts)
            break
    report.true_value = min(report.true_value, report.true_level0)
    several = itertools.chain(
        fleets.small(report.true_value * (1 - CLOSE), problem.limits, options, 2),
        fleets.sampled(report.true_value * (1 - CLOSE), problem.limits, options, samples),
    )
    for counts in several:
        if objective_of(counts) < report.true_value * (1 - CLOSE) and _any_holds(oracles, counts):
            report.true_value = objective_of(counts)
    report.simulations += sum(oracle.simulations for oracle in oracles)


def _undercut(
    report: Report,
    question: Question,
    problem: Problem,
    fleets: _Fleets,
    policies: Sequence[Policies],
    most_fleets: int,
    samples: int,
) -> None:
    """A fleet below the bound that holds, under any policy, of any type whose weights fit."""
    if not report.bound > 0 or math.isinf(report.bound):
        if math.isinf(report.bound) and math.isfinite(report.true_value):
            report.wrong.append(
                f"(c) the bound says that none is within the limits, {report.true_value:.6g} holds"
            )
        return
    if report.true_value < report.bound * (1 - CLOSE):
        report.wrong.append(f"(c) the bound is {report.bound:.6g}, {report.true_value:.6g} holds")
        return
    options = fleets.options(types_of(question.document, question.catalog, longest_tokens=1))
    below = report.bound * (1 - CLOSE)
    oracles = [with_policies(problem, each).oracle for each in policies]
    several = fleets.sampled(below, problem.limits, options, samples)
    level0 = fleets.of_level0(below, problem.limits, options)
    if len(level0) > most_fleets:
        level0 = level0[-most_fleets:]
    for counts in itertools.chain(reversed(level0), several):
        if _any_holds(oracles, counts):
            report.wrong.append(
                f"(c) the bound is {report.bound:.6g}, {_shown(counts)} at {objective_of(counts):.6g} holds"
            )
            break
    report.simulations += sum(oracle.simulations for oracle in oracles)


def _any_holds(oracles: Iterable[Oracle], counts: Counts) -> bool:
    return any(oracle.holds(counts) for oracle in oracles)


def _relaxed(question: Question, error: InfeasibleError) -> list[str]:
    """What is wrong with the changes that the error names: each, made, must give a question with a plan."""
    wrong = []
    for way in error.ways:
        task = relaxed(question.task, way)
        if task is None:
            continue
        try:
            plan(task, question.trace, question.catalog)
        except PlannerError as again:
            wrong.append(f"(b) after '{ways_text([way])}': {str(again)[:90]}")
    return wrong


def relaxed(task: PlanQuestion, way: Sequence[Change]) -> PlanQuestion | None:
    """The task with more of these limits: stocks, power, cost and GPUs, or percentiles of the SLO.

    None where nothing changes.
    """
    changed = task
    for change in way:
        enough = change.enough
        if change.unit == "s":
            limits = tuple(
                replace(limit, limit_s=enough) if limit.name == change.limit else limit
                for limit in changed.slo.limits
            )
            changed = replace(changed, slo=replace(changed.slo, limits=limits))
        elif change.limit == POWER.name:
            changed = replace(changed, power_limit_w=enough)
        elif change.limit == COST.name:
            changed = replace(changed, cost_limit_usd_per_h=enough)
        elif change.limit == GPUS.name:
            changed = replace(changed, gpu_limit=round(enough))
        else:
            stock = {
                gpu: round(enough) if FleetLimit("stock", gpu).name == change.limit else count
                for gpu, count in changed.stock.items()
            }
            changed = replace(changed, stock=stock)
    return None if changed == task else changed
