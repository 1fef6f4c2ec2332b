"""Adds the best fleet of each GPU type alone to the alternatives of a plan, one row for each type.

These fleets are searched and simulated as for a plan, without the fleets that the plan's search simulated
already (`study.cache` has them). If the plan's own fleet uses one GPU type alone, that type is not
searched. No row claims to be exact, so the cheaper fleets of a type are not simulated one by one. The rows of
a plan for production are fleets on paper, because finding a fleet for production of each type takes about as
long as the plan. With `fleet: per_gpu` in slo.yaml they are fleets for production.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from planner.documents.certificate import Alternative
from planner.documents.facts import NoneAlone, Note, Remarked
from planner.documents.task import PlanQuestion
from planner.domain import OWNED, ROUNDING, SPOT
from planner.errors import InfeasibleError
from planner.search.evidence.alternatives import ONE_GPU, mixed_label
from planner.search.evidence.plan import Plan
from planner.search.mixed.best_fleet import FleetSearch
from planner.search.oracle.deterministic_parallel import AT_ONCE, run_each
from planner.search.oracle.fleet_counts import Counts
from planner.search.problem.owned_first import objective_paid
from planner.search.problem.plan_problem import Problem
from planner.search.problem.stages import Stage
from planner.search.production.three_answers import plan_production
from planner.studies.what_if import Study

# Without `fleet: per_gpu` the types are searched alone only if there are no more than this, because the
# searches of four types take about as long as the plan itself.
MOST_DEFAULT_GPU_TYPES = 4
LEAST_S = 1.0  # The search of each GPU type may take this long, however little time is left.


def gpu_types(task: PlanQuestion, study: Study) -> dict[str, dict[str, int | None]]:
    """For each GPU type the task's stock of this type, without stocks of 0. A GPU with a power cap belongs to
    the type of the GPU without a cap.
    """
    types: dict[str, dict[str, int | None]] = {}
    for name, count in task.stock.items():
        if count != 0:
            types.setdefault(study.catalog.gpu(name).base, {})[name] = count
    return types


def add_each_gpu(study: Study, task: PlanQuestion, plan: Plan, *, seconds: float) -> Plan:
    """The plan with the best fleet of each GPU type alone among its alternatives, as "only h100-80g".

    These rows replace those of the cheapest mixed pools of the same types. The search of each type gets its
    share of `seconds`, and the row says if that was too short.
    """
    if plan.throughput is not None:
        # The plan is for the most traffic within its limits. The rows say what the same traffic costs on each
        # GPU type.
        task = replace(task, objective="cost", rate_rps=plan.throughput.rate_rps)
    types = gpu_types(task, study)
    rounds = math.ceil(len(types) / AT_ONCE)  # `run_each` searches AT_ONCE types at a time.
    share_s = max(seconds / rounds, LEAST_S)
    study.progress(Stage(f"{' and '.join(types)}, each alone", "each GPU"))
    for stock in types.values():
        # Called for its effect: the study remembers the traffic, so that the parallel searches only read it.
        study.traffic_request(replace(task, stock=stock))
    rows = run_each(lambda name: _plan_on_gpu(study, task, plan, name, types[name], share_s), types)
    replaced_labels = {
        mixed_label(gpu)
        for row, stock in zip(rows, types.values(), strict=True)
        for gpu in _answered_gpus(row, stock)
    }
    cheapest = min((row.objective for row in rows if row.is_priced), default=math.inf)
    # ONE_GPU is the row of the cheapest fleet with a single GPU type. It is dropped if a new row is as cheap.
    other_rows = [
        row
        for row in plan.alternatives
        if row.label not in replaced_labels
        and not (row.label == ONE_GPU and row.objective >= cheapest * (1 - ROUNDING))
    ]
    if plan.certificate.answers:
        # The report shows the answers of a plan for production with their fleets; rows need not repeat them.
        rows = [row for row in rows if row.fleet is None or row.fleet not in (plan.fleet, plan.on_paper)]
    return replace(plan, alternatives=(*other_rows, *rows))


def _answered_gpus(row: Alternative, stock: Mapping[str, int | None]) -> set[str]:
    """The GPUs for which `row` replaces the row of their mixed pool: none if its search found no fleet and
    did not prove that there is none.
    """
    if any(isinstance(note, NoneAlone) and not note.is_proved for note in row.notes):
        return set()
    # A GPU's market is a suffix of its name: "h100-80g@spot".
    return {gpu + market for gpu in stock for market in ("", SPOT, OWNED)}


def _plan_on_gpu(
    study: Study, task: PlanQuestion, plan: Plan, name: str, stock: Mapping[str, int | None], seconds: float
) -> Alternative:
    """The row of GPU type `name` with its `stock`: its fleet for production, if slo.yaml wants one and one is
    found; else its fleet on paper; else why there is none. The search takes at most `seconds`.
    """
    label = f"only {name}"
    plan_value = plan.certificate.value
    production_answer = plan.production
    paper_fleet = plan.fleet if production_answer is None else plan.on_paper
    is_for_production = production_answer is not None and task.per_gpu is True
    if (
        not is_for_production
        and paper_fleet is not None
        and {pool.type.gpu.base for pool in paper_fleet.running_pools} == {name}
    ):
        note = Remarked("is-the-plan" if production_answer is None else "on-paper")
        return Alternative(label, paper_fleet, plan_value, (note,))  # No search is needed.
    alone = replace(task, stock=stock)
    try:
        problem, best = study.find_paper_fleet(alone, seconds)
    except InfeasibleError as error:
        why = NoneAlone(error.kind, error.constraints, error.is_proved, error.least_worker)
        return Alternative(label, None, math.inf, (why,))
    notes: list[Note] = []
    if not best.level0.search.is_exhausted:
        notes.append(Remarked("perhaps-not-cheapest"))
    # The row's fleet, the value of the plan with which the fleet is compared, and whether the row must say
    # that the fleet is on paper, because the plan is for production.
    counts, compared_value, is_on_paper = best.best, plan_value, production_answer is not None
    production_counts = _production_counts(problem, best) if is_for_production else None
    if production_answer is not None and production_counts is not None:
        # If the plan found no fleet for production, its answer has no value, and any fleet counts as cheaper.
        counts, compared_value, is_on_paper = production_counts, production_answer.value or math.inf, False
    alone_value = objective_paid(problem, counts)
    if alone_value < compared_value * (1 - ROUNDING):
        notes.append(Remarked("cheaper-alone"))
    if is_on_paper:
        notes.append(Remarked("on-paper"))
    return Alternative(label, problem.oracle.fleet(counts), alone_value, tuple(notes))


def _production_counts(problem: Problem, paper: FleetSearch) -> Counts | None:
    """The fleet for production, searched for from the fleet on paper; None if none was found that passes the
    test in scenarios.
    """
    try:
        answer = plan_production(problem, paper)
    except InfeasibleError:
        return None
    return answer.best if answer is not None and answer.is_passed else None
