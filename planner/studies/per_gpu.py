"""How many GPUs of each: the best fleet of each GPU type alone, searched for and simulated as the plan is.

What the plan's search simulated is known (`oracle.Answers`). A type of which the cheapest fleet of all is
needs no search. Cheaper fleets of a type are not simulated one by one: nobody calls these rows exact. Beside
a plan for production they are on paper, as each would take about as long as the plan; where `fleet: per_gpu`
asks for them they are planned and tested for production too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

from planner.documents.certificate import Alternative
from planner.documents.facts import NoneAlone, Note, Remarked
from planner.documents.task import Task
from planner.domain import OWNED, SPOT
from planner.errors import InfeasibleError
from planner.io.executors import width
from planner.search.alternatives import ONE_GPU
from planner.search.answers import production
from planner.search.best_fleet import Found, best_of, search_policies
from planner.search.fleets import Counts
from planner.search.owned import paid
from planner.search.plan import Plan
from planner.search.pose import pose
from planner.search.problem import Conditions, Problem
from planner.search.stages import Stage
from planner.search.waves import of_each
from planner.studies.whatif import Study

MOST_UNASKED = 4  # GPU types answered alone where nobody says whether to: together about as dear as the plan
LEAST_S = 1.0  # for each GPU type


def gpu_types(task: Task, study: Study) -> dict[str, dict[str, int | None]]:
    """The stock by GPU type: a power-capped row is of the type of its uncapped one."""
    types: dict[str, dict[str, int | None]] = {}
    for name, count in task.stock.items():
        if count != 0:
            types.setdefault(study.catalog.gpu(name).base, {})[name] = count
    return types


def with_each_gpu(study: Study, task: Task, found: Plan, *, seconds: float) -> Plan:
    """The plan with the best fleet of each GPU type alone among its alternatives, as "only h100-80g".

    They take the place of the cheapest mixed pools of these types. Each has its share of `seconds`; a search
    that did not come to its end says so.
    """
    if found.throughput is not None:
        task = replace(task, objective="cost", rate_rps=found.throughput.rate_rps)
    types = gpu_types(task, study)
    share_s = max(seconds / math.ceil(len(types) / width()), LEAST_S)
    study.progress(Stage(f"{' and '.join(types)}, each alone", "each GPU"))
    for stock in types.values():  # whose traffic is one for all of them
        study.asked(replace(task, stock=stock))
    rows = of_each(lambda name: _alone(study, task, found, name, types[name], share_s), types)
    answered = {
        f"{gpu}, mixed" for row, stock in zip(rows, types.values(), strict=True) for gpu in _names(row, stock)
    }
    cheapest = min((row.objective for row in rows if row.is_priced), default=math.inf)
    kept = [
        row
        for row in found.alternatives
        if row.label not in answered and not (row.label == ONE_GPU and row.objective >= cheapest * (1 - 1e-9))
    ]
    if found.certificate.answers:  # which are shown with their fleets
        rows = [row for row in rows if row.fleet is None or row.fleet not in (found.fleet, found.on_paper)]
    return replace(found, alternatives=(*kept, *rows))


def _names(row: Alternative, stock: Mapping[str, int | None]) -> set[str]:
    """The GPUs whose mixed pools say nothing more; all of them stay where the time did not suffice."""
    if any(isinstance(note, NoneAlone) and not note.is_proved for note in row.notes):
        return set()
    return {gpu + market for gpu in stock for market in ("", SPOT, OWNED)}


def _alone(
    study: Study, task: Task, found: Plan, name: str, stock: Mapping[str, int | None], seconds: float
) -> Alternative:
    label = f"only {name}"
    value = found.certificate.value
    made = found.certificate.answer("production")
    paper = found.fleet if made is None else found.on_paper
    is_for_production = made is not None and task.per_gpu is True
    if (
        not is_for_production
        and paper is not None
        and {pool.type.gpu.base for pool in paper.running} == {name}
    ):
        return Alternative(label, paper, value, (Remarked("is-the-plan"),) if made is None else ())
    alone = replace(task, stock=stock)
    conditions = Conditions(time.monotonic() + seconds, answers=study.answers)
    try:
        problem = pose(
            alone,
            study.trace,
            study.catalog,
            seed=study.seed,
            conditions=conditions,
            asked=study.asked(alone),
        )
        problem, best = best_of(search_policies(problem, walks=False))
    except InfeasibleError as error:
        return Alternative(
            label, None, math.inf, (NoneAlone(error.kind, error.constraints, error.is_proved),)
        )
    notes: list[Note] = []
    if not best.level0.search.is_exhausted:
        notes.append(Remarked("perhaps-not-cheapest"))
    fleet, against, is_on_paper = best.best, value, made is not None
    if made is not None and is_for_production and (counts := _in_production(problem, best)) is not None:
        fleet, against, is_on_paper = counts, made.value or math.inf, False
    alone_value = paid(problem, fleet)
    if alone_value < against * (1 - 1e-9):
        notes.append(Remarked("cheaper-alone"))
    if is_on_paper:
        notes.append(Remarked("on-paper"))
    return Alternative(label, problem.oracle.fleet(fleet), alone_value, tuple(notes))


def _in_production(problem: Problem, paper: Found) -> Counts | None:
    """The fleet that passes the test for production; None where none was found that does."""
    try:
        answer = production(problem, paper)
    except InfeasibleError:
        return None
    return answer.best if answer is not None and answer.is_tested else None
