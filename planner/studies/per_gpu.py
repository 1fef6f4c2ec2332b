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
from planner.documents.task import PlanQuestion
from planner.domain import OWNED, SPOT
from planner.errors import InfeasibleError
from planner.parallel.executors import parallel_width
from planner.search.evidence.alternatives import ONE_GPU
from planner.search.evidence.plan import Plan
from planner.search.level0.owned_gpus import objective_paid
from planner.search.mixed.best_fleet import FleetSearch, best_of, search_policies
from planner.search.oracle.deterministic_parallel import run_each
from planner.search.oracle.fleet_counts import Counts
from planner.search.problem.build_problem import build_problem
from planner.search.problem.plan_problem import Conditions, Problem
from planner.search.problem.stages import Stage
from planner.search.production.three_answers import plan_production
from planner.studies.what_if import Study

MOST_UNASKED = 4  # GPU types answered alone where nobody says whether to: together about as dear as the plan
LEAST_S = 1.0  # for each GPU type


def gpu_types(task: PlanQuestion, study: Study) -> dict[str, dict[str, int | None]]:
    """The stock by GPU type: a power-capped row is of the type of its uncapped one."""
    types: dict[str, dict[str, int | None]] = {}
    for name, count in task.stock.items():
        if count != 0:
            types.setdefault(study.catalog.gpu(name).base, {})[name] = count
    return types


def add_each_gpu(study: Study, task: PlanQuestion, plan: Plan, *, seconds: float) -> Plan:
    """The plan with the best fleet of each GPU type alone among its alternatives, as "only h100-80g".

    They take the place of the cheapest mixed pools of these types. Each has its share of `seconds`; a search
    that did not come to its end says so.
    """
    if plan.throughput is not None:
        task = replace(task, objective="cost", rate_rps=plan.throughput.rate_rps)
    types = gpu_types(task, study)
    share_s = max(seconds / math.ceil(len(types) / parallel_width()), LEAST_S)
    study.progress(Stage(f"{' and '.join(types)}, each alone", "each GPU"))
    for stock in types.values():  # whose traffic is one for all of them
        study.traffic_request(replace(task, stock=stock))
    rows = run_each(lambda name: _plan_on_gpu(study, task, plan, name, types[name], share_s), types)
    answered = {
        f"{gpu}, mixed"
        for row, stock in zip(rows, types.values(), strict=True)
        for gpu in _exhausted_gpus(row, stock)
    }
    cheapest = min((row.objective for row in rows if row.is_priced), default=math.inf)
    kept = [
        row
        for row in plan.alternatives
        if row.label not in answered and not (row.label == ONE_GPU and row.objective >= cheapest * (1 - 1e-9))
    ]
    if plan.certificate.answers:  # which are shown with their fleets
        rows = [row for row in rows if row.fleet is None or row.fleet not in (plan.fleet, plan.on_paper)]
    return replace(plan, alternatives=(*kept, *rows))


def _exhausted_gpus(row: Alternative, stock: Mapping[str, int | None]) -> set[str]:
    """The GPUs whose mixed pools say nothing more; all of them stay where the time did not suffice."""
    if any(isinstance(note, NoneAlone) and not note.is_proved for note in row.notes):
        return set()
    return {gpu + market for gpu in stock for market in ("", SPOT, OWNED)}


def _plan_on_gpu(
    study: Study, task: PlanQuestion, plan: Plan, name: str, stock: Mapping[str, int | None], seconds: float
) -> Alternative:
    label = f"only {name}"
    value = plan.certificate.value
    made = plan.certificate.find_answer("production")
    paper = plan.fleet if made is None else plan.on_paper
    is_for_production = made is not None and task.per_gpu is True
    if (
        not is_for_production
        and paper is not None
        and {pool.type.gpu.base for pool in paper.running_pools} == {name}
    ):
        return Alternative(label, paper, value, (Remarked("is-the-plan"),) if made is None else ())
    alone = replace(task, stock=stock)
    conditions = Conditions(time.monotonic() + seconds, answers=study.answers)
    try:
        problem = build_problem(
            alone,
            study.trace,
            study.catalog,
            seed=study.seed,
            conditions=conditions,
            request=study.traffic_request(alone),
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
    alone_value = objective_paid(problem, fleet)
    if alone_value < against * (1 - 1e-9):
        notes.append(Remarked("cheaper-alone"))
    if is_on_paper:
        notes.append(Remarked("on-paper"))
    return Alternative(label, problem.oracle.fleet(fleet), alone_value, tuple(notes))


def _in_production(problem: Problem, paper: FleetSearch) -> Counts | None:
    """The fleet that passes the test for production; None where none was found that does."""
    try:
        answer = plan_production(problem, paper)
    except InfeasibleError:
        return None
    return answer.best if answer is not None and answer.is_tested else None
