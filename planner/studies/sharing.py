"""What one fleet for all classes of an SLO saves against a fleet for each class: both are planned.

The fleet of a class is planned for its own requests of the plan's traffic, and for its own lines of the SLO
and those for all requests. Requests of no class get a fleet of their own too, for the lines for all requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.documents.facts import ClassAlone, NotShared, SeparateKept, SharingSaves
from planner.documents.task import PlanQuestion
from planner.domain import Slo
from planner.errors import InfeasibleError, InputError, OutOfTimeError
from planner.search.evidence.plan import Plan
from planner.search.problem.options import OBJECTIVE_UNITS
from planner.studies.enough_limits import without_limits
from planner.studies.what_if import Study
from planner.traffic.classes import class_numbers
from planner.traffic.trace import Trace

# With more classes than this, such as a hundred tenants, no separate fleets are planned: each one costs a
# search. Chosen by hand.
MOST_SEPARATE = 6
NO_CLASS = "other requests"  # The name, in reports, of the requests of no class.


class _ClassQuestion(NamedTuple):
    """The question for a fleet that serves one class alone: its name, its question, its requests."""

    name: str
    task: PlanQuestion
    trace: Trace


def compare_separate_fleets(plan: Plan, study: Study, task: PlanQuestion) -> Plan:
    """The plan with a fact in `certificate.binding`: what sharing saves, or why that is not known.

    The searches for separate fleets share the limit on work of one plan. For two classes of an 8B LLM on two
    GPU types they took half the CPU time of the plan itself: 0.3 of 0.7 s on paper, 1.4 of 2.8 s for
    production (2026-11-25). They are cheaper because the plan also compares orders of the queue, by which
    classes overtake each other.
    """
    class_questions = list(_class_questions(task, plan.trace))
    if len(class_questions) < 2 or task.objective == "throughput":
        return plan
    if len(class_questions) > MOST_SEPARATE:
        return _with_fact(plan, NotShared("", f"of more than {MOST_SEPARATE} classes"))
    if task.described is not None:
        # Scenarios are drawn from the description, which cannot draw the requests of one class alone.
        return _with_fact(plan, NotShared("", "of described traffic"))
    if task.draws > 1:  # The requests of a class are replayed as they are, so they have one draw.
        return _with_fact(plan, NotShared("", "of traffic that is drawn several times"))
    return _with_fact(plan, _compare(plan, study, class_questions))


def _compare(
    plan: Plan, study: Study, class_questions: Sequence[_ClassQuestion]
) -> SharingSaves | SeparateKept | NotShared:
    """What one fleet saves against a fleet per class; NotShared names the first class without a fleet. If the
    plan is on paper because none for production is within `limits`, the fleets per class are planned without.
    """
    fleets: list[ClassAlone] = []
    is_on_paper = plan.production is not None and plan.production.value is None
    for name, asked, trace in class_questions:
        task = without_limits(asked) if is_on_paper else asked
        study.progress(f"a fleet for {name} alone")
        class_study = study.on_part(trace, study.work_limit_s / len(class_questions))
        try:
            answer = class_study.answer(task)
        except (InfeasibleError, OutOfTimeError, InputError):
            # InputError is raised if a class has too few requests.
            return NotShared(name, why="")
        if not answer.is_passed:  # The fleet failed its test in scenarios that its search had not seen.
            return NotShared(name, why="")
        fleets.append(ClassAlone(name, answer.value))
    # All classes have the objective of the plan.
    unit = OBJECTIVE_UNITS[class_questions[0].task.objective]
    if is_on_paper:
        return SeparateKept(tuple(fleets), unit)
    separate_value = sum(fleet.value for fleet in fleets)
    return SharingSaves(plan.value, separate_value - plan.value, tuple(fleets), unit)


def _class_questions(task: PlanQuestion, trace: Trace) -> Iterator[_ClassQuestion]:
    """A question for each class that has requests and limits, and one for the requests of no class.

    `trace` is already scaled and cut to the window, so the questions say neither rate nor window.
    """
    selectors, robust = task.slo.selectors, task.robust
    # The trace has the highest rate of `robust` already. So that rate is no change any more, and the lowest
    # one, (1 + traffic_from_frac) of the written rate, is a negative change of it.
    lowest_frac = (1 + robust.traffic_from_frac) / (1 + robust.traffic_frac) - 1
    robust = replace(robust, traffic_frac=0.0, traffic_from_frac=lowest_frac)
    numbers = class_numbers(selectors, trace)
    for number, selector in ((-1, None), *enumerate(selectors)):  # -1: requests of no class.
        class_requests = np.flatnonzero(numbers == number)
        limits = tuple(limit for limit in task.slo.limits if limit.selector in (None, selector))
        if not class_requests.size or not limits:
            continue
        question = replace(
            task,
            slo=Slo(limits, task.slo.attainment_frac, task.slo.every_s),
            policies=task.policies.without_classes(),
            rate_rps=None,
            described=None,
            window=None,
            robust=robust,
            plans_each_target=False,
        )
        name = NO_CLASS if selector is None else selector.name
        yield _ClassQuestion(name, question, trace.select(class_requests))


def say_not_compared(plan: Plan, task: PlanQuestion, trace: Trace, why: str) -> Plan:
    """The plan with a fact that separate fleets were not compared; unchanged without several classes.

    The report puts `why` after the words "separate fleets": for instance "of LLMs that share GPUs". `trace`
    is the whole traffic of the question; `plan.trace` may be its busiest part.
    """
    if len(list(_class_questions(task, trace))) < 2 or task.objective == "throughput":
        return plan
    return _with_fact(plan, NotShared("", why))


def _with_fact(plan: Plan, fact: SharingSaves | SeparateKept | NotShared) -> Plan:
    """The plan with this fact at the end of `certificate.binding`."""
    certificate = plan.certificate
    return replace(plan, certificate=replace(certificate, binding=(*certificate.binding, fact)))
