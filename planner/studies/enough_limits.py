"""How much of `limits`, or of the stock, a fleet for production takes, for a plan that is on paper because no
fleet within them is kept in enough scenarios.
"""

from dataclasses import replace

from planner.documents.facts import TooFewKept
from planner.documents.task import PlanQuestion
from planner.errors import InfeasibleError, OutOfTimeError
from planner.search.evidence.plan import Plan
from planner.search.mixed.infeasible import exceeded
from planner.search.oracle.fleet_counts import workers_of
from planner.search.oracle.work_clock import is_over, now_s
from planner.studies.what_if import Study


def without_limits(task: PlanQuestion) -> PlanQuestion:
    """The question without `limits`; its stock stays."""
    return replace(task, cost_limit_usd_per_h=None, power_limit_w=None, gpu_limit=None)


def say_enough(plan: Plan, study: Study, task: PlanQuestion, work_s: float) -> Plan:
    """The plan, whose warning TooFewKept names limits with which a fleet passes the test: first without
    `limits`, then with as many GPUs as it takes. Unchanged without the warning, with the objective
    throughput, or if no such fleet is found in `work_s` on the search's clock.
    """
    why = next((each for each in plan.warnings if isinstance(each, TooFewKept)), None)
    if why is None or task.objective == "throughput":
        return plan
    deadline, unlimited = now_s() + work_s, without_limits(task)
    for lifted, what in (
        (unlimited, "limits"),
        (replace(unlimited, stock=dict.fromkeys(task.stock)), "stock"),
    ):
        if lifted == task or is_over(deadline):
            continue
        study.progress(f"none for production; looking for {what} enough")
        try:
            answer = replace(study, most_work_s=min(study.most_work_s, deadline - now_s())).answer(lifted)
        except (InfeasibleError, OutOfTimeError):
            continue
        if answer.is_passed:
            enough = exceeded(study.problem_of(task).limits, workers_of(answer.search_result.best))
            warnings = [replace(each, enough=enough) if each is why else each for each in plan.warnings]
            return replace(plan, warnings=tuple(warnings))
    return plan
