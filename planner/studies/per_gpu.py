"""How many GPUs of each: the best fleet of each GPU type alone, searched for and simulated as the plan is.

What the plan's search simulated is known (`oracle.Answers`). A type of which the cheapest fleet of all is
needs no search. Cheaper fleets of a type are not simulated one by one: nobody calls these rows exact.
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
from planner.search.alternatives import ONE_GPU, as_on_paper
from planner.search.best_fleet import best_of, search_policies
from planner.search.owned import paid
from planner.search.plan import Plan
from planner.search.pose import pose
from planner.search.problem import Conditions
from planner.search.stages import Stage
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
    deadline = time.monotonic() + seconds
    rows = []
    for k, (name, stock) in enumerate(types.items()):
        study.progress(Stage(f"{name} alone", "each GPU"))
        share_s = max((deadline - time.monotonic()) / (len(types) - k), LEAST_S)
        rows.append(_alone(study, task, found, name, stock, share_s))
    answered = {
        f"{gpu}, mixed" for row, stock in zip(rows, types.values(), strict=True) for gpu in _names(row, stock)
    }
    cheapest = min((row.objective for row in rows if row.is_priced), default=math.inf)
    kept = [
        row
        for row in found.alternatives
        if row.label not in answered and not (row.label == ONE_GPU and row.objective >= cheapest * (1 - 1e-9))
    ]
    if found.certificate.answers:
        rows = list(as_on_paper(rows))
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
    is_plan = not found.certificate.answers
    paper = found.fleet if is_plan else found.on_paper
    if paper is not None and {pool.type.gpu.base for pool in paper.running} == {name}:
        return Alternative(label, paper, value, (Remarked("is-the-plan"),) if is_plan else ())
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
    alone_value = paid(problem, best.best)
    if alone_value < value * (1 - 1e-9):
        notes.append(Remarked("cheaper-alone"))
    return Alternative(label, problem.oracle.fleet(best.best), alone_value, tuple(notes))
