"""How much of `limits` a fleet for production takes, for a plan that is on paper because none within them is
kept in enough scenarios.
"""

from dataclasses import replace

from planner.documents.facts import TooFewKept
from planner.documents.task import PlanQuestion
from planner.errors import InfeasibleError, OutOfTimeError
from planner.search.evidence.plan import Plan
from planner.search.mixed.infeasible import exceeded
from planner.search.oracle.fleet_counts import workers_of
from planner.studies.what_if import Study


def without_limits(task: PlanQuestion) -> PlanQuestion:
    """The question without `limits`; its stock stays."""
    return replace(task, cost_limit_usd_per_h=None, power_limit_w=None, gpu_limit=None)


def say_enough(plan: Plan, study: Study, task: PlanQuestion, work_s: float) -> Plan:
    """The plan, whose warning TooFewKept names limits with which a fleet passes the test; unchanged without
    the warning or `limits`, or if none is found in `work_s` on the search's clock.
    """
    lifted = without_limits(task)
    why = next((each for each in plan.warnings if isinstance(each, TooFewKept)), None)
    if why is None or lifted == task or task.objective == "throughput":
        return plan
    study.progress("none for production; looking for limits that are enough")
    try:
        answer = replace(study, most_work_s=min(study.most_work_s, work_s)).answer(lifted)
    except (InfeasibleError, OutOfTimeError):
        return plan
    limits = replace(
        answer.problem.limits,
        cost_usd_per_h=task.cost_limit_usd_per_h,
        power_w=task.power_limit_w,
        gpus=task.gpu_limit,
    )
    enough = exceeded(limits, workers_of(answer.search_result.best)) if answer.is_passed else ()
    warnings = [replace(each, enough=enough) if each is why else each for each in plan.warnings]
    return replace(plan, warnings=tuple(warnings))
