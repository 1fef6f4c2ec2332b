"""`plan`: from a question and its traffic to a certified plan, for one LLM or for several on one stock."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from planner import __version__
from planner.api.inputs import (
    KeysAndValues,
    TraceLike,
    checked_seed,
    checked_time_limit,
    read_trace,
    requests_of,
)
from planner.api.progress import MaybeProgress, shown_progress
from planner.api.questions import TaskDocument, TaskKeys, read_task
from planner.api.results import PlanResult, SharedPlanResult
from planner.documents.catalog import Catalog, CatalogLike, read_catalog
from planner.documents.log_columns import log_options_of
from planner.documents.robustness_facts import PlanOrigin
from planner.documents.several_llms_question import SeveralLlmsQuestion, question_of
from planner.documents.task import PlanQuestion
from planner.errors import InputError
from planner.reports.words import command_line, option_flags
from planner.search.evidence import certify, written_plan
from planner.search.evidence.findings import clock_warnings, old_price_warnings
from planner.search.evidence.long_traces import is_too_long, plan_by_parts
from planner.search.evidence.plan import Plan
from planner.search.oracle.work_clock import USUAL_LIMIT_S, is_over, now_s, time_limit
from planner.search.problem.plan_problem import Conditions, OnPaper, Watch, report_nothing
from planner.search.several.several_llms import plan_together
from planner.search.several.shared_plan import SharedPlan
from planner.studies import what_if
from planner.studies.enough_limits import say_enough
from planner.studies.per_gpu import MOST_DEFAULT_GPU_TYPES, add_each_gpu, gpu_types
from planner.studies.routers import plan_each_target, simulate_routers, simulate_routers_of_each
from planner.studies.sharing import compare_separate_fleets, say_not_compared
from planner.studies.what_if import Study
from planner.traffic.trace import Trace

TracesLike: TypeAlias = "TraceLike | Mapping[str, TraceLike] | None"


def plan(
    slo: TaskDocument | SeveralLlmsQuestion | KeysAndValues | str | Path | None = None,
    trace: TracesLike = None,
    *,
    catalog: CatalogLike = None,
    seed: int = 0,
    time_limit_s: float = USUAL_LIMIT_S,
    explain: bool = False,
    prove: bool = False,
    progress: MaybeProgress = None,
    **keys: Unpack[TaskKeys],
) -> PlanResult | SharedPlanResult:
    """The cheapest fleet that keeps an SLO on a trace, or on described traffic, with its certificate.

    `slo` is the file slo.yaml, a mapping of its keys, or its section `slo` alone; `keys` (llm, fleet,
    traffic, objective, limits, ...) replace the same keys in it. With the key `llms` all LLMs named there are
    planned on one stock. `trace` is then a trace with a column `model`, or maps each entry to its own trace.
    If `traffic` describes requests ({"rate": 30, "input": 1500, "output": 300}) there is no trace.

    `explain` plans again around every limit, to find what each one costs. `prove` simulates every cheaper
    fleet of one worker type per pool. `progress` is called with a text for each stage; without it a notebook
    shows the stages.

    Raises InputError for a question or trace that cannot be read, and InfeasibleError if no fleet keeps the
    SLO. A plan may take a limited amount of work (search/oracle/work_clock.py counts it), and `time_limit_s`
    of wall time. If one is used up, the best fleet so far is returned, with the status "best found".
    """
    seed, time_limit_s = checked_seed(seed), checked_time_limit(time_limit_s)
    report = shown_progress(progress)

    def plan_llms(questions: SeveralLlmsQuestion, catalog_rows: Catalog) -> SharedPlan:
        shared = plan_together(
            questions,
            catalog_rows,
            seed=seed,
            time_limit_s=time_limit_s,
            progress=report,
            adds_robustness=True,
        )
        shared = _say_classes_not_compared(simulate_routers_of_each(shared, questions), questions)
        prices = dict.fromkeys(price for plan in shared.plans.values() for price in plan.prices)
        old_prices = old_price_warnings(list(prices), datetime.date.today())
        return replace(shared, warnings=(*shared.warnings, *clock_warnings(), *old_prices))

    if isinstance(slo, SeveralLlmsQuestion):
        return SharedPlanResult(plan_llms(slo, read_catalog(catalog)))
    question = read_task(slo, catalog, **keys)
    command = _equivalent_command(
        question, trace, catalog, seed, time_limit_s, option_flags(explain=explain, prove=prove)
    )
    if question.has_several_llms:
        for name, is_set in (("explain", explain), ("prove", prove)):
            if is_set:
                raise InputError(f"{name}: is for one LLM; leave it out, or plan each LLM by itself")
        shared = plan_llms(questions_of(question, trace, seed=seed), question.catalog)
        return SharedPlanResult(shared, question, command)
    if isinstance(trace, Mapping):
        raise InputError("trace: found several; give the traffic of one LLM, a file or a DataFrame")
    log_options = log_options_of(question.document, question.path)
    requests = requests_of(trace, question.task().described, seed=seed, log_options=log_options)
    study = Study(requests, question.catalog, seed, time_limit_s, report)
    return replace(answer_question(question, study, explain=explain, prove=prove), command=command)


def _say_classes_not_compared(shared_plan: SharedPlan, question: SeveralLlmsQuestion) -> SharedPlan:
    """The plans of several LLMs, each noting that no separate fleets for its classes were planned."""
    why = "of one LLM among several"  # The report puts this after the words "separate fleets" (`NotShared`).
    plans = {
        entry.name: say_not_compared(shared_plan.plans[entry.name], entry.task, entry.trace, why)
        for entry in question.entries
    }
    return replace(shared_plan, plans=plans)


def answer_question(
    question: TaskDocument,
    study: Study,
    *,
    explain: bool = False,
    prove: bool = False,
    watch: Watch = report_nothing,
    on_paper: OnPaper = report_nothing,
) -> PlanResult:
    """The plan for `question` on the trace of `study`; if the question asks so, with a plan for each target.

    `watch` is called with each new best fleet, `on_paper` with the cheapest fleet on paper, before the search
    for a fleet for production.
    """
    task = question.task()
    if is_too_long(task, study.trace, study.work_limit_s):
        answer = _by_parts(task, study, explain=explain, prove=prove, watch=watch, on_paper=on_paper)
    else:
        answer = beside_each_gpu(study, task, prove=prove, watch=watch, on_paper=on_paper)
        answer = compare_separate_fleets(answer, study, task)
        answer = explain_plan(answer, study, task) if explain else answer
    if task.plans_each_target:

        def plan_target(target: str) -> Plan:
            study.progress(f"a plan for {target}")
            alone = question.replace({"deploy": {"target": target}, "fleet.per_gpu": False})
            # Cached simulations have the first plan's routing, so this plan begins with an empty cache.
            own_study = replace(study, cache=study.cache.fresh())
            return answer_question(alone, own_study, prove=prove).plan

        answer = plan_each_target(answer, plan_target)
    return PlanResult(answer, question)


def _by_parts(
    task: PlanQuestion, study: Study, *, explain: bool, prove: bool, watch: Watch, on_paper: OnPaper
) -> Plan:
    """The plan for a trace that is too long to be searched whole: it is searched on the busiest part."""

    def plan_part(trace: Trace, work_s: float) -> Plan:
        part_study = study.on_part(trace, work_s)
        part_plan = beside_each_gpu(part_study, task, prove=prove, watch=watch, on_paper=on_paper)
        return explain_plan(part_plan, part_study, task) if explain else part_plan

    with time_limit(study.left_s):
        answer = plan_by_parts(
            task, study.trace, plan_part, seconds=study.work_limit_s, progress=study.progress
        )
    # Each class is busiest in another part of the trace. So separate fleets that are planned for this part
    # cannot be compared with the fleet for all classes.
    return say_not_compared(answer, task, study.trace, "of traffic that is planned by its busiest part")


def plan_question(
    study: Study,
    task: PlanQuestion,
    *,
    prove: bool = False,
    watch: Watch = report_nothing,
    on_paper: OnPaper = report_nothing,
) -> Plan:
    """The plan for a question about the trace of a study, with tests of its robustness: more traffic, longer
    steps, lost workers. `watch` and `on_paper` are as in `answer_question`.
    """
    deadline = now_s() + study.work_limit_s
    # The search for a rate simulates each traffic only once, so its answers and requests are not cached.
    looks_for_rate = task.objective == "throughput"
    certified_plan = certify.plan(
        task,
        study.trace,
        study.catalog,
        seed=study.seed,
        time_limit_s=study.left_s,
        conditions=Conditions(
            deadline,
            progress=study.progress,
            watch=watch,
            cache=study.cache.fresh() if looks_for_rate else study.cache,
            on_paper=on_paper,
            adds_robustness=True,
        ),
        traffic_request=None if looks_for_rate else study.traffic_request(task),
        prove=prove,
    )
    certified_plan = simulate_routers(
        certified_plan, task.deploy, deadline, bring_priority=not task.policies.is_queue_assumed
    )
    today = datetime.date.today()
    prices = old_price_warnings(certified_plan.prices, today)
    return replace(
        certified_plan,
        warnings=(*certified_plan.warnings, *clock_warnings(), *prices),
        made=PlanOrigin(today.isoformat(), __version__),
    )


def beside_each_gpu(
    study: Study,
    task: PlanQuestion,
    *,
    prove: bool = False,
    watch: Watch = report_nothing,
    on_paper: OnPaper = report_nothing,
) -> Plan:
    """The plan, beside the best fleet of each GPU type alone.

    With `fleet: per_gpu: true` each type's fleets are planned in a time limit of their own. By default they
    are planned only where this costs little: for two to four GPU types, in the time that the plan has left.
    """
    with time_limit(study.left_s):
        deadline = now_s() + study.work_limit_s
        answer = plan_question(study, task, prove=prove, watch=watch, on_paper=on_paper)
        answer = say_enough(answer, study, task, deadline - now_s())
        is_cheap = 1 < len(gpu_types(task, study)) <= MOST_DEFAULT_GPU_TYPES and answer.status != "best found"
        if task.per_gpu is None and is_cheap and not is_over(deadline):
            return add_each_gpu(study, task, answer, seconds=deadline - now_s())
    if not task.per_gpu:
        return answer
    with time_limit(study.left_s):
        return add_each_gpu(study, task, answer, seconds=study.work_limit_s)


def explain_plan(plan: Plan, study: Study, task: PlanQuestion) -> Plan:
    """The plan, whose certificate then says what each of the question's limits costs."""
    # With the objective throughput, the cost of limits is that at the rate that was found.
    if plan.throughput is not None:
        task = replace(task, objective="cost", rate_rps=plan.throughput.rate_rps)
    costs = what_if.explain_limits(study, task, plan.fleet)
    certificate = replace(plan.certificate, binding=(*plan.certificate.binding, *costs))
    return replace(plan, certificate=certificate)


def read_plan(folder: str | Path, catalog: CatalogLike = None) -> PlanResult:
    """The plan that `plan -o DIR` or `save` wrote, simulated again to check its figures."""
    written, command = written_plan.read_plan(Path(folder), read_catalog(catalog))
    return PlanResult(written, None, command)


def questions_of(question: TaskDocument, trace: TracesLike, *, seed: int = 0) -> SeveralLlmsQuestion:
    """The question of several LLMs with their traces, which may be DataFrames."""
    document = dict(question.document)
    own_traces: dict[str, Trace] = {}
    if isinstance(trace, Mapping):
        own_traces, trace = {name: read_trace(each) for name, each in trace.items()}, None
    if isinstance(document["llms"], Mapping):
        entries: dict[str, Any] = {}
        for name, entry in document["llms"].items():
            entries[name] = entry
            if not isinstance(entry.get("trace", ""), str):  # A DataFrame in place of a file's name.
                own_traces[name] = read_trace(entry["trace"])
                entries[name] = {key: value for key, value in entry.items() if key != "trace"}
        document["llms"] = entries
    common: Path | Trace | None = None
    if isinstance(trace, str | Path):
        common = Path(trace)
    elif trace is not None:
        common = read_trace(trace)
    return question_of(document, question.path, common, question.catalog, traces=own_traces, seed=seed)


def _equivalent_command(
    question: TaskDocument,
    trace: TracesLike,
    catalog: CatalogLike,
    seed: int,
    time_limit_s: float,
    options: Sequence[str],
) -> str:
    """The command line that writes the same files; empty if question, traffic or catalog is in no file."""
    if not question.is_as_read or not isinstance(trace, str | Path | None) or isinstance(catalog, Catalog):
        return ""
    return command_line(
        question.path,
        None if trace is None else Path(trace),
        None if catalog is None else Path(catalog),
        seed=seed,
        time_limit_s=time_limit_s,
        flags=options,
    )
