"""Computes what one fleet for all classes of an SLO saves against a fleet for each class, by planning both.

The fleet of a class is planned for its own requests of the plan's traffic, and for its own lines of the SLO
and those for all requests. Requests of no class get a fleet of their own too, for the lines for all requests.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.documents.facts import ClassAlone, NotShared, SharingSaves
from planner.documents.task import PlanQuestion
from planner.domain import Slo
from planner.errors import InfeasibleError, InputError, OutOfTimeError
from planner.search.evidence.plan import Plan
from planner.search.problem.options import OBJECTIVE_UNITS
from planner.studies.what_if import Study
from planner.traffic.classes import class_numbers
from planner.traffic.trace import Trace

# If there are more classes, such as a hundred tenants, no separate fleets are planned; chosen by hand.
MOST_SEPARATE = 6
REST = "other requests"  # The name of the requests of no class.


def compare_separate_fleets(plan: Plan, study: Study, task: PlanQuestion) -> Plan:
    """The plan with a fact in `certificate.binding`: what sharing saves, or why that is not known.

    Each class gets an equal share of the work that a plan may take. This is cheap: two classes of an 8B LLM
    on two GPU types took half the CPU time of the plan (0.3 and 0.7 s on paper, 1.4 and 2.8 s for production;
    2026-11-25), because no orders of the queue are compared.
    """
    class_questions = list(_classes_alone(task, plan.trace))
    if len(class_questions) < 2 or task.objective == "throughput":
        return plan
    fact: SharingSaves | NotShared
    if len(class_questions) > MOST_SEPARATE:
        fact = NotShared(name="", why=f"of more than {MOST_SEPARATE} classes")
    elif task.described is not None:
        # Scenarios are drawn from the description, which cannot draw the requests of one class alone.
        fact = NotShared(name="", why="of described traffic")
    elif task.draws > 1:  # The requests of a class are replayed as they are, so they have one draw.
        fact = NotShared(name="", why="of traffic that is drawn several times")
    else:
        fact = _compare(plan, study, class_questions)
    return _with_fact(plan, fact)


def say_not_compared(plan: Plan, task: PlanQuestion, trace: Trace, why: str) -> Plan:
    """The plan with a fact that separate fleets were not compared; unchanged without several classes.

    The report puts `why` after the words "separate fleets": for instance "of LLMs that share GPUs". `trace`
    is the whole traffic of the question; `plan.trace` may be its busiest part.
    """
    if len(list(_classes_alone(task, trace))) < 2 or task.objective == "throughput":
        return plan
    return _with_fact(plan, NotShared(name="", why=why))


def _with_fact(plan: Plan, fact: SharingSaves | NotShared) -> Plan:
    """The plan with this fact at the end of `certificate.binding`."""
    certificate = plan.certificate
    return replace(plan, certificate=replace(certificate, binding=(*certificate.binding, fact)))


def _compare(
    plan: Plan, study: Study, class_questions: list[tuple[str, PlanQuestion, Trace]]
) -> SharingSaves | NotShared:
    """What one fleet saves against a fleet per class; NotShared names the first class without a fleet."""
    fleets: list[ClassAlone] = []
    for name, task, trace in class_questions:
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
    separate_value = sum(fleet.value for fleet in fleets)
    _, first_task, _ = class_questions[0]  # All classes have the objective of the plan.
    unit = OBJECTIVE_UNITS[first_task.objective]
    return SharingSaves(plan.value, separate_value - plan.value, tuple(fleets), unit)


def _classes_alone(task: PlanQuestion, trace: Trace) -> Iterator[tuple[str, PlanQuestion, Trace]]:
    """The name, the question and the requests of each class that has requests and limits, and of the requests
    of no class. The requests are already scaled and cut to the window.
    """
    selectors, robust = task.slo.selectors, task.robust
    # The trace already has the highest rate of `robust`; relative to it the lowest rate is a negative change.
    lowest_frac = (1 + robust.traffic_from_frac) / (1 + robust.traffic_frac) - 1
    robust = replace(robust, traffic_frac=0.0, traffic_from_frac=lowest_frac)
    numbers = class_numbers(selectors, trace)
    for number, selector in ((-1, None), *enumerate(selectors)):  # -1: requests of no class.
        class_requests = np.flatnonzero(numbers == number)
        limits = tuple(limit for limit in task.slo.limits if limit.selector in (None, selector))
        if not class_requests.size or not limits:
            continue
        slo = Slo(limits, task.slo.attainment_frac, task.slo.every_s)
        question = replace(
            task,
            slo=slo,
            policies=task.policies.without_classes(),
            rate_rps=None,
            described=None,
            window=None,
            robust=robust,
            plans_each_target=False,
        )
        yield (REST if selector is None else selector.name), question, trace.select(class_requests)
