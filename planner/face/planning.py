"""`plan`: from a question and its traffic to a certified plan, for one LLM or for several on one stock."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from planner import __version__
from planner.documents.around import Made
from planner.documents.catalog import Catalog
from planner.documents.reading import reading_of
from planner.documents.task import Task
from planner.documents.together import Question, question_of
from planner.errors import InputError
from planner.face.inputs import CatalogLike, Section, TraceLike, read_catalog, read_trace, requests_of
from planner.face.questions import TaskDocument, TaskKeys, read_task
from planner.face.results import PlanResult, SharedPlanResult
from planner.reports.words import command_line, flags
from planner.search import certify, written_plan
from planner.search.findings import old_prices
from planner.search.long_traces import is_too_long, plan_by_parts
from planner.search.oracle import Answers
from planner.search.plan import Plan
from planner.search.problem import Conditions, OnPaper, Progress, Watch, silent, unheard, unwatched
from planner.search.together import plan_together
from planner.studies import whatif
from planner.studies.per_gpu import MOST_UNASKED, gpu_types, with_each_gpu
from planner.studies.routers import each_under_routers, under_routers, with_each_target
from planner.studies.whatif import Study
from planner.traffic.trace import Trace

TracesLike: TypeAlias = "TraceLike | Mapping[str, TraceLike] | None"


def plan(
    slo: TaskDocument | Question | Section | str | Path | None = None,
    trace: TracesLike = None,
    *,
    catalog: CatalogLike = None,
    seed: int = 0,
    time_limit_s: float = 120.0,
    explain: bool = False,
    prove: bool = False,
    progress: Progress = silent,
    **keys: Unpack[TaskKeys],
) -> PlanResult | SharedPlanResult:
    """The cheapest fleet that keeps a promise on a trace, or on described traffic, with its certificate.

    `slo` is slo.yaml, its keys and values, or its section `slo` alone; `keys` (llm, fleet, traffic,
    objective, limits, ...) take the place of its own. With `llms` all of them are planned on one stock:
    `trace` is then one with a column `model`, or maps each entry to its own. Where `traffic` describes
    requests ({"rate": 30, "input": 1500, "output": 300}) there is no trace.

    `explain` plans again around every limit, and says what each one costs. `prove` simulates every cheaper
    fleet of one worker type per pool. `progress` hears of each stage.

    Raises InputError for what cannot be read, and InfeasibleError if no fleet keeps the promise. After
    `time_limit_s` the best fleet so far is returned, its status "best found".
    """
    if isinstance(slo, Question):
        shared = plan_together(
            slo, read_catalog(catalog), seed=seed, time_limit_s=time_limit_s, progress=progress, around=True
        )
        return SharedPlanResult(each_under_routers(shared, slo))
    question = read_task(slo, catalog, **keys)
    command = _command(question, trace, catalog, seed, time_limit_s, flags(explain=explain, prove=prove))
    if question.has_several_llms:
        for name, is_set in (("explain", explain), ("prove", prove)):
            if is_set:
                raise InputError(f"{name}: is for one LLM; leave it out, or plan each LLM by itself")
        asked = questions_of(question, trace)
        shared = plan_together(
            asked, question.catalog, seed=seed, time_limit_s=time_limit_s, progress=progress, around=True
        )
        return SharedPlanResult(each_under_routers(shared, asked), question, command)
    if isinstance(trace, Mapping):
        raise InputError("trace: found several; give the traffic of one LLM, a file or a DataFrame")
    how = reading_of(question.document, question.path)
    requests = requests_of(trace, question.task().described, seed=seed, how=how)
    study = Study(requests, question.catalog, seed, time_limit_s, progress)
    return replace(answered(question, study, explain=explain, prove=prove), command=command)


def answered(
    question: TaskDocument,
    study: Study,
    *,
    explain: bool = False,
    prove: bool = False,
    watch: Watch = unwatched,
) -> PlanResult:
    """The plan for the question that a document asks of the trace of a study; `watch` hears of each fleet
    that is the best so far."""
    task = question.task()
    if is_too_long(task, study.trace, study.time_limit_s):
        found = _by_parts(task, study, explain=explain, prove=prove, watch=watch)
    else:
        found = beside_each_gpu(study, task, prove=prove, watch=watch)
        found = explained(found, study, task) if explain else found
    if task.prices_targets:

        def planned_for(target: str) -> Plan:
            study.progress(f"a plan for {target}")
            alone = question.replace({"deploy": {"target": target}, "fleet.per_gpu": False})
            anew = replace(study, answers=Answers(decided=study.answers.decided))
            return answered(alone, anew, prove=prove).plan

        found = with_each_target(found, planned_for)
    return PlanResult(found, question)


def _by_parts(task: Task, study: Study, *, explain: bool, prove: bool, watch: Watch) -> Plan:
    """The same of a trace that is too long to be searched whole."""

    def planned_for(trace: Trace, seconds: float) -> Plan:
        answers = Answers(decided=study.answers.decided)
        of_part = Study(trace, study.catalog, study.seed, seconds, study.progress, answers)
        found = beside_each_gpu(of_part, task, prove=prove, watch=watch)
        return explained(found, of_part, task) if explain else found

    limit_s, told = study.time_limit_s, study.progress
    return plan_by_parts(task, study.trace, planned_for, seconds=study.left_s, progress=told, limit_s=limit_s)


def planned(
    study: Study, task: Task, *, prove: bool = False, watch: Watch = unwatched, on_paper: OnPaper = unheard
) -> Plan:
    """The plan for one more question about the trace of a study, with what holds around it. `on_paper` hears
    of the cheapest fleet on paper before production is searched.
    """
    deadline = time.monotonic() + study.left_s
    looks_for_rate = task.objective == "throughput"  # whose many traffics are not worth remembering
    found = certify.plan(
        task,
        study.trace,
        study.catalog,
        seed=study.seed,
        time_limit_s=study.left_s,
        conditions=Conditions(
            progress=study.progress,
            watch=watch,
            answers=Answers(decided=study.answers.decided) if looks_for_rate else study.answers,
            on_paper=on_paper,
            around=True,
        ),
        asked=None if looks_for_rate else study.asked(task),
        prove=prove,
    )
    found = under_routers(found, task.deploy, deadline)
    today = datetime.date.today()
    return replace(
        found,
        warnings=(*found.warnings, *old_prices(found.prices, today)),
        made=Made(today.isoformat(), __version__),
    )


def beside_each_gpu(
    study: Study,
    task: Task,
    *,
    prove: bool = False,
    per_gpu: bool | None = None,
    watch: Watch = unwatched,
    on_paper: OnPaper = unheard,
) -> Plan:
    """The plan, with the best fleet of each GPU type alone where that is asked for (`fleet: per_gpu`), or
    costs little: for two to four types, in what is left of the time.
    """
    began = time.monotonic()
    found = planned(study, task, prove=prove, watch=watch, on_paper=on_paper)
    left_s = study.left_s - (time.monotonic() - began)
    if (per_gpu := task.per_gpu) is None:
        per_gpu = (
            1 < len(gpu_types(task, study)) <= MOST_UNASKED and found.status != "best found" and left_s > 0
        )
    elif per_gpu:
        left_s = study.left_s
    return with_each_gpu(study, task, found, seconds=left_s) if per_gpu else found


def explained(found: Plan, study: Study, task: Task) -> Plan:
    """The plan with what each of its limits costs among what binds."""
    if found.throughput is not None:
        task = replace(task, objective="cost", rate_rps=found.throughput.rate_rps)
    costs = whatif.explain(study, task, found.fleet)
    certificate = replace(found.certificate, binding=(*found.certificate.binding, *costs))
    return replace(found, certificate=certificate)


def read_plan(folder: str | Path, catalog: CatalogLike = None) -> PlanResult:
    """The plan that `plan -o DIR` or `save` wrote, simulated again to see that its figures come out."""
    found, command = written_plan.read_plan(Path(folder), read_catalog(catalog))
    return PlanResult(found, None, command)


def questions_of(question: TaskDocument, trace: TracesLike) -> Question:
    """The question of several LLMs with their traces, those in memory among them."""
    document, own = dict(question.document), dict[str, Trace]()
    if isinstance(trace, Mapping):
        own, trace = {name: read_trace(one) for name, one in trace.items()}, None
    if isinstance(document["llms"], Mapping):
        entries: dict[str, Any] = {}
        for name, entry in document["llms"].items():
            entries[name] = entry
            if not isinstance(entry.get("trace", ""), str):
                own[name] = read_trace(entry["trace"])
                entries[name] = {key: value for key, value in entry.items() if key != "trace"}
        document["llms"] = entries
    common = Path(trace) if isinstance(trace, str | Path) else None if trace is None else read_trace(trace)
    return question_of(document, question.path, common, question.catalog, own=own)


def _command(
    question: TaskDocument,
    trace: TracesLike,
    catalog: CatalogLike,
    seed: int,
    time_limit_s: float,
    options: Sequence[str],
) -> str:
    """The command that makes the same files; none where the question or the traffic is in no file."""
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
