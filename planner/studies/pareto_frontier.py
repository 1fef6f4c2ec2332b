"""Finds the frontier of cost against one limit: every fleet on it, and the limit at which the fleet stops
holding.

The question is planned with the loosest limit of the range. The fleet of this plan holds down to a limit that
is called its corner. The question is planned again just beyond the corner, and so on (the epsilon-constraint
method). There is no grid: each stair takes one plan, and no stair between two plans is missed.
The frontier is as exact as its plans are.

With scenarios a corner may come too early: a fleet that fails a test there may pass the later test of the
next plan (production_fleet.py). If the plan beyond a fleet's corner is the same fleet again, the next plan is
made further on, by up to WIDEST_STRIDE_FRAC; the corner is then known to that share. A fleet that failed its
test is on no stair: the stair of the next fleet begins where the failed fleet was planned.

    ttft, tbt, tpot, e2e   The corner is the simulated percentile of the fleet, if the fleet holds with this
                           limit (backlog test, attainment, losses); else a bisection finds the corner, to
                           CORNER_FRAC.
    power, cost            The corner is the fleet's power (at its cap) or its cost.
    rate                   The corner is the rate up to which the fleet carries every rate. Each rate draws
                           other requests of the trace, and on a short trace the requests of a lower rate
                           may be harder. So a stair begins where its plan was made, and the question's own
                           rate is planned too. If a stair has at most MOST_DRAWS different draws, every one
                           is simulated. Otherwise the corner is bisected, to RATE_FRAC, and the rates of
                           PROBED_BELOW_FRACS below it are simulated.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from planner.documents.facts import Answered
from planner.documents.task import PlanQuestion
from planner.domain import ROUNDING
from planner.errors import InfeasibleError, InputError, OutOfTimeError
from planner.fleet import Fleet
from planner.reports.words import describe_fleet
from planner.search.problem.bill import bill_fleet
from planner.search.problem.options import OBJECTIVE_UNITS
from planner.search.problem.owned_first import objective_paid
from planner.search.problem.plan_problem import on_all_draws, with_search_scenarios
from planner.search.production.scenario_test import is_test_passed, untimed_test
from planner.slo_metrics import METRICS
from planner.studies.what_if import (
    Study,
    StudyAnswer,
    answer_document,
    find_keeping_policies,
    workers_in_question,
)
from planner.units import finite_or_none, show_digits

UNITS = {"power": "W", "cost": "USD/h", "rate": "requests/s"}
# Numbers without a reason beside them were chosen by hand.
CORNER_FRAC = 1e-3  # A bisected limit in seconds is exact to this share of it.
# A bisected rate is exact to this share of it: every trial draws and simulates other requests.
RATE_FRAC = 5e-3
# A fleet must also carry the rates that are this far below a bisected corner of rates.
PROBED_BELOW_FRACS = (0.01, 0.02, 0.03, 0.045, 0.065, 0.09, 0.13, 0.2)
# A rate times the duration is rounded to a number of requests, so all rates up to this many requests above a
# whole number give the same draw. At one half exactly the number could be rounded up.
ALMOST_HALF = 0.5 - 1e-6
# If there are at most this many draws between two rates, each is simulated. From half to twice its rate a
# trace of 130 requests has about 200.
MOST_DRAWS = 200
NEXT_FRAC = 1e-6  # The next plan is made this far beyond an exact corner.
# While the same fleet is planned again beyond its corner, the next plan is made further on by the first
# share, which doubles each time, up to the widest.
FIRST_STRIDE_FRAC = 0.002
WIDEST_STRIDE_FRAC = 0.05
# The range of power [W] or cost [USD/h] ends at this amount, with which no fleet holds. It is not 0, which
# would mean that there is no limit.
LEAST_AMOUNT = 1e-9


@dataclass(frozen=True, slots=True)
class FrontierStair:
    """A level line of the frontier: a fleet that holds from the limit `start` to the tighter limit `corner`,
    and is optimal where its plan was made: just beyond the corner of the looser stair, or at the question's
    own rate.
    """

    start: float
    corner: float
    value: float
    fleet: Fleet
    is_exact: bool  # Whether the answer of level 0 (one worker type per pool) is proved to be optimal.
    is_exhausted: bool  # Whether the search of level 0 ended before its time limit.
    level0: float  # The objective of level 0's answer; a fleet of several types may have a better one.
    answers: tuple[Answered, ...] = ()  # The three answers; empty with `safety: none`.
    is_passed: bool = True  # Whether the fleet passed its test in scenarios; on a frontier every fleet did.


@dataclass(frozen=True, slots=True)
class Frontier:
    """The stairs from loose to tight.

    `question_limit` is the limit of the question, or None if it has none; `loosest` is infinite if the first
    plan had no such limit.
    """

    axis: str  # The limit that moves, such as "ttft p90" or "power".
    unit: str
    objective: str
    objective_unit: str
    stairs: tuple[FrontierStair, ...]
    loosest: float
    question_limit: float | None
    is_rising: bool  # Whether the cost rises with the limit, which is so for rates.
    ended: str  # The reason why no further stair follows.

    def best_at(self, limit: float) -> FrontierStair | None:
        """The best fleet at a limit; None if it is looser than `loosest`, or tighter than every corner."""
        # A rate is tighter when it is higher, other limits when lower. `sign * limit` falls in both cases.
        sign = -1 if self.is_rising else 1
        within = [
            stair
            for stair in self.stairs
            if sign * stair.corner <= sign * limit * (1 + sign * ROUNDING)
            and sign * limit <= sign * stair.start * (1 + sign * ROUNDING)
        ]
        return min(within, key=lambda stair: stair.value, default=None)


def find_frontier(
    study: Study,
    task: PlanQuestion,
    axis: str,
    *,
    first: float | None = None,
    last: float | None = None,
    points: int = 12,
) -> Frontier:
    """Walk from the looser to the tighter of the limits `first` and `last`, with at most `points` plans.

    By default the range is from half to twice the question's limit; for power and cost it begins without a
    limit and ends where no fleet holds. `axis` is a metric, one of UNITS, or a limit such as "ttft.p90" if
    the SLO has several of a metric. Raises InfeasibleError if no fleet holds at the loosest limit, and
    OutOfTimeError if no fleet passed its test.
    """
    walk = _axis_walk(study, task, axis)
    low, high = sorted((walk.low if first is None else first, walk.high if last is None else last))
    if not 0 < low < high:
        raise InputError(f"the range of {walk.name} is empty: {low:g} to {high:g} {walk.unit}")
    sign = -1 if walk.is_rising else 1  # `sign * limit` falls as the limit gets tighter, also for rates.
    # The next plan is made at `limit`, its stair begins at `start`, and `beyond` is the first limit beyond
    # all corners so far.
    loosest, tightest = (low, high) if walk.is_rising else (high, low)
    objective = walk.task(loosest).objective
    unit = OBJECTIVE_UNITS[objective]
    limit = start = beyond = loosest
    stairs: list[FrontierStair] = []
    answer: StudyAnswer | None = None
    stride_frac = 0.0  # How far beyond a fleet's last plan the next plan is made, as a share of the limit.
    ended = f"{points} plans were made; allow more --points to see tighter limits"
    for number in range(points):
        so_far = f"; the last fleet is {show_digits(stairs[-1].value, 4)} {unit}" if stairs else ""
        at_limit = f"{walk.name} {show_digits(limit, 4)} {walk.unit}"
        study.progress(f"plan {number + 1} of at most {points}: {at_limit}{so_far}")
        try:
            answer = study.answer(walk.task(limit), () if answer is None else (answer.fleet,))
        except InfeasibleError as error:
            if not stairs:
                raise
            if walk.planned_too is not None and limit < walk.planned_too <= high:
                # The question's own rate draws other requests, which may be easier.
                limit = start = beyond = walk.planned_too
                continue
            ended = f"beyond {stairs[-1].corner:.6g} {walk.unit} no fleet holds ({error.constraint} binds)"
            break
        # If this plan is at `planned_too`, inside the last stair, only a cheaper fleet begins a stair there.
        if limit == beyond or answer.value < stairs[-1].value * (1 - ROUNDING):
            corner, next_limit = walk.corner(answer, limit, tightest)
            if stairs and limit == beyond and answer.fleet == stairs[-1].fleet:
                stride_frac = min(2 * stride_frac, WIDEST_STRIDE_FRAC)
                next_limit = _further(next_limit, limit * (1 - sign * stride_frac), tightest, sign)
            elif not stairs or answer.value > stairs[-1].value * (1 + ROUNDING):
                stride_frac = FIRST_STRIDE_FRAC / 2  # It is doubled before it is used.
            beyond = min(beyond, next_limit, key=lambda at: sign * at)
            stairs.append(_stair_of(answer, _first_start(walk.holds, stairs, answer, limit, start), corner))
        if walk.planned_too is not None and limit < walk.planned_too < min(beyond, high):
            limit = start = walk.planned_too
            continue
        limit, start = beyond, min((stair.corner for stair in stairs), key=lambda corner: sign * corner)
        if sign * limit < sign * tightest:
            ended = "the range from --from to --to ends here"
            break
    return Frontier(
        walk.name,
        walk.unit,
        objective,
        unit,
        _stairs_of_frontier(stairs, sign),
        loosest,
        walk.question_limit,
        walk.is_rising,
        ended,
    )


def _first_start(
    holds: Callable[[StudyAnswer, float, float], bool],
    stairs: Sequence[FrontierStair],
    answer: StudyAnswer,
    limit: float,
    start: float,
) -> float:
    """Where the stair of a fleet planned at `limit` begins: at `start`, or earlier, where earlier fleets
    failed their tests or cost no less and this fleet holds too. Searches need not be exact, so a later plan
    may find a better fleet for the limits of earlier plans.
    """
    for stair in reversed(stairs):
        is_dearer = stair.is_passed and answer.value > stair.value * (1 + ROUNDING)
        if is_dearer or not holds(answer, stair.start, limit):
            break
        start = stair.start
    return start


def _further(limit: float, other: float, tightest: float, sign: int) -> float:
    """The tighter of `limit` and `other`, where `other` is at most as tight as the range allows."""
    other = max(other, tightest, key=lambda at: sign * at)
    return min(limit, other, key=lambda at: sign * at)


def _stair_of(answer: StudyAnswer, start: float, corner: float) -> FrontierStair:
    """The stair of the answer's fleet, from `start` to `corner`."""
    level0_search = answer.search_result.level0.search  # `value` is infinite if it has no best fleet.
    level0 = (
        level0_search.value
        if level0_search.best is None
        else objective_paid(answer.problem, level0_search.best)
    )
    return FrontierStair(
        start=start,
        corner=corner,
        value=answer.value,
        fleet=answer.fleet,
        is_exact=answer.is_exact,
        is_exhausted=answer.is_exhausted,
        level0=level0,
        answers=answer.answers,
        is_passed=answer.is_passed,
    )


def _stairs_of_frontier(stairs: list[FrontierStair], sign: int) -> tuple[FrontierStair, ...]:
    """The stairs whose fleets passed their tests, without the stairs that a later stair beats: its fleet
    holds wherever the other fleet does, and costs no more. That happens because searches need not be exact.
    """
    passed = [stair for stair in stairs if stair.is_passed]
    if not passed:
        raise OutOfTimeError(
            f"none of {len(stairs)} fleets passed its test in scenarios that the search had not seen; allow "
            "more --points, raise --time-limit, or ask with safety: none"
        )
    return tuple(
        stair
        for k, stair in enumerate(passed)
        if not any(
            other.value <= stair.value * (1 + ROUNDING)
            and sign * other.start >= sign * stair.start
            and sign * other.corner <= sign * stair.corner
            for other in passed[k + 1 :]
        )
    )


@dataclass(frozen=True, slots=True)
class _Walk:
    """The functions and the default range with which `find_frontier` walks along an axis.

    `task(limit)` gives the question with the limit of the axis at this value. `corner(answer, limit,
    tightest)` gives the corner of the fleet planned at `limit`, and the next limit to plan at. `low` and
    `high` bound the range. `holds(answer, start, limit)` says whether the fleet planned at `limit` also holds
    at every limit from `start` on. At `planned_too`, if there is one, a plan is made even inside a stair.
    """

    name: str
    unit: str
    question_limit: float | None
    low: float
    high: float
    task: Callable[[float], PlanQuestion]
    corner: Callable[[StudyAnswer, float, float], tuple[float, float]]
    holds: Callable[[StudyAnswer, float, float], bool] = lambda *_: True  # A looser limit is never harder.
    is_rising: bool = False
    planned_too: float | None = None


def _axis_walk(study: Study, task: PlanQuestion, axis: str) -> _Walk:
    """The walk along an axis as `find_frontier` names it; InputError for another name."""
    metric, _, percentile = axis.replace(" ", ".").partition(".")  # A limit is "ttft.p90" or "ttft p90".
    if metric not in METRICS and (percentile or metric not in UNITS):
        axes = ", ".join((*METRICS, *UNITS))
        raise InputError(f"--over: expected one of {axes}, or a limit as ttft.p90, found {axis!r}")
    if metric == "power":
        return _amount_walk(task, "power", "power_limit_w", lambda fleet: fleet.power_w)
    if metric == "cost":
        # A plan for the lowest cost is the same under every limit on cost, so power is minimised instead.
        objective = "power" if task.objective == "cost" else task.objective
        return _amount_walk(
            replace(task, objective=objective),
            "cost",
            "cost_limit_usd_per_h",
            lambda fleet: bill_fleet(fleet).usd_per_h,
        )
    if metric == "rate":
        return _rate_walk(study, task)
    return _latency_walk(task, metric, percentile)


def _latency_walk(task: PlanQuestion, metric: str, percentile: str) -> _Walk:
    """The walk over a limit of the SLO, in seconds."""
    if task.slowdowns is not None:
        raise InputError(f"--over {metric}: the relative preset {task.preset!r} has no limits in seconds")
    matching = [
        (index, limit)
        for index, limit in enumerate(task.slo.limits)
        if limit.metric == metric and (not percentile or limit.name == f"{metric} {percentile}")
    ]
    if len(matching) != 1:
        names = ", ".join(limit.name.replace(" ", ".") for limit in task.slo.limits)
        raise InputError(f"--over {metric}: expected exactly one such limit in the SLO, which has {names}")
    ((index, limit),) = matching

    def question_at(limit_s: float) -> PlanQuestion:
        limits = list(task.slo.limits)
        limits[index] = replace(limit, limit_s=limit_s)
        return replace(task, slo=replace(task.slo, limits=tuple(limits)))

    def corner(answer: StudyAnswer, at_s: float, tightest_s: float) -> tuple[float, float]:
        """The tightest limit that the answer's fleet keeps, which is its corner, and the next limit to plan
        at.
        """
        simulated_s = answer.verdict.lines[index].deciding_s * (1 + ROUNDING)
        if math.isnan(simulated_s):
            # No value of this metric occurred (for instance no gap between tokens), so any limit is kept.
            return tightest_s, tightest_s * (1 - NEXT_FRAC)
        oracle = with_search_scenarios(on_all_draws(answer.problem)).oracle
        counts, test = oracle.counts(answer.fleet), untimed_test(answer.problem)

        def keeps(limit_s: float) -> bool:
            """Whether the fleet keeps the SLO with this limit, in production also in its scenarios."""
            slo = question_at(limit_s).slo
            if not replace(oracle, slo=slo).holds(counts):
                return False
            # A plan for production must also pass the test in scenarios that its search did not see.
            return test is None or is_test_passed(test.with_slo(slo).decide(counts), test.safety)

        if keeps(min(simulated_s, at_s)):
            return simulated_s, simulated_s * (1 - NEXT_FRAC)
        return _bisect_corner(keeps, at_s, simulated_s, CORNER_FRAC)

    return _Walk(limit.name, "s", limit.limit_s, limit.limit_s / 2, 2 * limit.limit_s, question_at, corner)


def _amount_walk(task: PlanQuestion, name: str, key: str, amount_of: Callable[[Fleet], float]) -> _Walk:
    """The walk over power or cost.

    `key` is the field of this limit in the question, and `amount_of` gives the power or the cost of a fleet.
    """

    def question_at(amount: float) -> PlanQuestion:
        limit: dict[str, Any] = {key: amount if math.isfinite(amount) else None}
        return replace(task, **limit)

    def corner(answer: StudyAnswer, _: float, __: float) -> tuple[float, float]:
        """The power or cost of the answer's fleet, and the next limit, just below."""
        amount = amount_of(answer.fleet)
        return amount, amount * (1 - NEXT_FRAC)

    return _Walk(name, UNITS[name], getattr(task, key), LEAST_AMOUNT, math.inf, question_at, corner)


def _rate_walk(study: Study, task: PlanQuestion) -> _Walk:
    """The walk over the request rate. Below a corner lower rates are simulated too, because each rate draws
    other requests.
    """
    # For described traffic the rate is that of the description, because the drawn requests have a slightly
    # different one.
    if task.rate_rps is not None:
        requested_rate_rps = task.rate_rps
    elif task.described is not None:
        requested_rate_rps = task.described.mean_rps
    else:
        requested_rate_rps = study.traffic_request(task).requests.rate_rps

    def question_at(rate_rps: float) -> PlanQuestion:
        return replace(task, rate_rps=rate_rps)

    def carries(answer: StudyAnswer, rate_rps: float) -> bool:
        """Whether the fleet keeps the SLO on the traffic of this rate; for production it must also pass the
        test in scenarios that its search did not see.
        """
        problem = study.problem_of(question_at(rate_rps))
        fleet = workers_in_question(problem, answer.fleet)
        policies = None if fleet is None else find_keeping_policies(problem, fleet)
        if fleet is None or policies is None:
            return False
        if (test := untimed_test(problem)) is None:
            return True
        return is_test_passed(test.with_policies(policies).decide(problem.oracle.counts(fleet)), test.safety)

    def probed_rps(low_rps: float, high_rps: float) -> tuple[bool, list[float]]:
        """Whether every draw of requests between two rates is simulated, and the rates to simulate, in order.

        If every draw is simulated, each rate is the highest rate with its draw.
        """
        if task.described is None and task.scale != "compress":
            duration_s = study.trace.duration_s
            low, high = round(low_rps * duration_s), round(high_rps * duration_s)
            if high - low <= MOST_DRAWS:
                draws = range(low + 1, high + 1)
                return True, [min((requests + ALMOST_HALF) / duration_s, high_rps) for requests in draws]
        below_rps = [high_rps * (1 - frac) for frac in PROBED_BELOW_FRACS]
        return False, sorted([*below_rps, min(requested_rate_rps, high_rps)])

    def missed_between(answer: StudyAnswer, low_rps: float, high_rps: float) -> float | None:
        """The lowest probed rate between two rates that the fleet does not carry; None if it carries all."""
        _, rates_rps = probed_rps(low_rps, high_rps)
        return next((rate for rate in rates_rps if rate > low_rps and not carries(answer, rate)), None)

    def corner(answer: StudyAnswer, at_rps: float, most_rps: float) -> tuple[float, float]:
        """The rate up to which the fleet carries every rate, and the next rate to plan at."""
        are_all_draws, rates_rps = probed_rps(at_rps, most_rps)
        if are_all_draws:
            if (missed_rps := missed_between(answer, at_rps, most_rps)) is None:
                return most_rps, most_rps * (1 + RATE_FRAC)
            return max([at_rps, *(rate for rate in rates_rps if rate < missed_rps)]), missed_rps
        # The fleet carries the rate `good`; `bad` is a rate beyond it.
        good, bad = most_rps, most_rps * (1 + RATE_FRAC)
        if not carries(answer, most_rps):
            good, bad = _bisect_corner(partial(carries, answer), at_rps, most_rps, RATE_FRAC)
        while (missed_rps := missed_between(answer, at_rps, good)) is not None:
            good, bad = _bisect_corner(partial(carries, answer), at_rps, missed_rps, RATE_FRAC)
        return good, bad

    return _Walk(
        "rate",
        UNITS["rate"],
        requested_rate_rps,
        requested_rate_rps / 2,
        2 * requested_rate_rps,
        question_at,
        corner,
        lambda answer, low_rps, high_rps: missed_between(answer, low_rps, high_rps) is None,
        is_rising=True,
        planned_too=requested_rate_rps,
    )


def _bisect_corner(
    keeps: Callable[[float], bool], good: float, bad: float, frac: float
) -> tuple[float, float]:
    """The value nearest to `bad` that keeps the SLO, and a value that misses it, at most a share `frac`
    apart.

    `good` is assumed to keep the SLO and `bad` to miss it.
    """
    while abs(good - bad) > frac * abs(good):
        middle = math.sqrt(good * bad)  # The geometric mean, as the precision is relative.
        if keeps(middle):
            good = middle
        else:
            bad = middle
    return good, bad


def frontier_document(frontier: Frontier) -> dict[str, Any]:
    """The frontier as pareto.json has it."""
    return {
        "over": frontier.axis,
        "unit": frontier.unit,
        "objective": frontier.objective,
        "objective_unit": frontier.objective_unit,
        "loosest": finite_or_none(frontier.loosest),
        "asked": frontier.question_limit,
        "ended": frontier.ended,
        "steps": [
            {
                **({"holds_from": stair.start} if frontier.is_rising else {}),
                "holds_to": stair.corner,
                "value": stair.value,
                "fleet": describe_fleet(stair.fleet),
                "cost_usd_per_h": bill_fleet(stair.fleet).usd_per_h,
                "power_w": stair.fleet.power_w,
                "gpus": stair.fleet.gpus,
                "level0": stair.level0,
                "level0_exact": stair.is_exact,
                "level0_exhausted": stair.is_exhausted,
                "is_asked": frontier.question_limit is not None
                and stair == frontier.best_at(frontier.question_limit),
                "answers": [answer_document(answer) for answer in stair.answers],
            }
            for stair in frontier.stairs
        ],
    }
