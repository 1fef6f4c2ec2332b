"""The Python call `day`: simulates a day of traffic on pools whose sizes a controller changes.

Controllers are compared with each other, with the static fleet, whose sizes never change ("stands all day" in
texts for users), and with the optimum, which knows the whole day beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import pandas as pd

from planner.api.inputs import (
    FleetLike,
    KeysAndValues,
    checked_seed,
    checked_time_limit,
    read_fleet,
    requests_of,
)
from planner.api.planning import TracesLike, questions_of
from planner.api.questions import TaskDocument, TaskKeys, read_task
from planner.api.results import Result
from planner.day import day_page, several_llms_day_page
from planner.day.changing_types import changing_types
from planner.day.day_fleets import GIVEN, ON_PAPER, DayWatch, candidate_fleets, cheapest_fleet, other_queues
from planner.day.day_manifests import OUTDATED, controller_manifests, manifests_of_all
from planner.day.day_settings import (
    ALL_FLEETS,
    CHANGE_TYPES,
    FIXED_TYPES,
    USUAL_EVERY_S,
    DaySection,
    parse_day,
)
from planner.day.day_study import ChangingTypes, DayAnswer, DayQuestion, study_day
from planner.day.several_llms_day import JointAnswer, study_day_together
from planner.day.sleeping_workers import sleeping_questions
from planner.documents.catalog import CatalogLike
from planner.documents.log_columns import log_options_of
from planner.documents.several_llms_question import LlmQuestion
from planner.documents.startup_times import StartupFacts, read_startup
from planner.documents.task import PlanQuestion
from planner.domain import SPOT, Slo, payment_suffix
from planner.errors import InputError
from planner.files.checked_files import check_output_directory, write_files
from planner.fleet import Fleet, Pool
from planner.models.startup import StartTime
from planner.search.oracle.work_clock import USUAL_LIMIT_S, now_s, time_limit
from planner.search.problem.plan_problem import Progress, report_nothing
from planner.search.several.several_llms import plan_together
from planner.simulator.elastic import ElasticPool, refuse_waits
from planner.solvers.master import FleetLimits
from planner.studies.what_if import Study
from planner.traffic.scaling import RateRequest
from planner.traffic.trace import Trace, spread_stamps
from planner.traffic.trace_rows import DATE_S

# Without `most` a pool may grow to this many times its size in the static fleet, and by at least this many
# workers: after a burst, more workers must serve what waited while they started. Set by hand.
MOST_WORKERS_FACTOR, FEWEST_EXTRA_WORKERS = 2, 2
# A spot worker is taken away this long after a notice, as by AWS; other clouds give 30 s.
NOTICE_S = 120.0
# Shares of the work for planning the static fleet, and for its alternatives, set by hand.
STATIC_SHARE, ALTERNATIVES_SHARE = 0.4, 0.2
SHORTEST_LIMIT_S = 1.0  # With several LLMs a search gets at least this long on its clock.
# The origin of fleets that `day` plans, for the reader of its answer.
PAPER_NOTE = (
    "the cheapest on paper for this SLO in each of its windows; `plan` adds a margin and may take another: "
    "for the day of that one give its folder with --fleet"
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DayResult(Result):
    """Every controller's day beside the static fleet and the optimum.

    `is_oracle` is the setting `oracle` of the section `day` (see `day`).
    """

    answer: DayAnswer
    is_oracle: bool = False

    @property
    def winner(self) -> str:
        """The name of the best controller, as the section `day` compares them (`missed`, `missed_window`)."""
        return self.answer.winner.name

    def headline(self) -> str:
        """Which controller to take, and what it costs."""
        return day_page.recommendation_sentence(self.answer)

    def sentences(self) -> list[str]:
        """The bounds on the cost, and warnings."""
        gpu_hours = day_page.least_gpu_hours(self.answer) if self.is_oracle else []
        return [*gpu_hours, *day_page.proof_lines(self.answer), *self.answer.warnings]

    def to_dict(self) -> dict[str, Any]:
        """What `plan day --json` prints."""
        return day_page.to_json(self.answer)

    def to_frame(self) -> pd.DataFrame:
        """A row per controller: cost, windows missed, regret."""
        document = self.to_dict()
        table_rows = [*([document["optimum"]] if document["optimum"] else []), *document["controllers"]]
        names = ("name", "usd", "gpu_hours", "windows", "missed", "regret_usd")
        return pd.DataFrame([{name: each[name] for name in names} for each in table_rows])

    def report(self) -> str:
        """The page day.html."""
        return day_page.render_day(self.answer)["day.html"]

    def save(self, folder: str | Path) -> tuple[str, ...]:
        """Write day.html, tables and the winner's manifests into a folder, all files or none.

        With `oracle` the manifests of all controllers are written. Returns the names of the files.
        """
        check_output_directory(Path(folder))
        written = {**day_page.render_day(self.answer), **controller_manifests(self.answer)}
        if self.is_oracle:
            written |= manifests_of_all(self.answer)
        write_files(Path(folder), written, outdated=OUTDATED)
        return tuple(written)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class JointDayResult(Result):
    """The day of several LLMs on one stock."""

    answer: JointAnswer

    @property
    def winner(self) -> str:
        """The controller with the least cost for all LLMs, its missed windows included."""
        return self.answer.winner.name

    def headline(self) -> str:
        """Which controller to take for all LLMs, and what it costs."""
        return several_llms_day_page.joint_recommendation(self.answer)

    def sentences(self) -> list[str]:
        """The bounds on the cost, and warnings."""
        return [*several_llms_day_page.proof_lines(self.answer), *self.answer.warnings]

    def to_dict(self) -> dict[str, Any]:
        """What `plan day --json` prints."""
        return several_llms_day_page.to_json(self.answer)

    def to_frame(self) -> pd.DataFrame:
        """A row per controller and LLM: cost and windows missed."""
        rows = [
            {
                "name": row.name,
                "llm": llm,
                "usd": llm_day.usd,
                "windows": len(llm_day.windows),
                "missed": llm_day.missed_windows,
            }
            for row in self.answer.rows
            for llm, llm_day in zip(self.answer.by_llm, row.llm_days, strict=True)
        ]
        return pd.DataFrame(rows)

    def report(self) -> str:
        """The page day.html."""
        return several_llms_day_page.render_days(self.answer)["day.html"]

    def save(self, folder: str | Path) -> tuple[str, ...]:
        """Write day.html, day.json, and tables and manifests of each LLM into a folder, all or none."""
        check_output_directory(Path(folder))
        written = several_llms_day_page.render_days(self.answer)
        write_files(Path(folder), written, outdated=tuple(f"*/{path}" for path in OUTDATED))
        return tuple(written)


def day(
    slo: TaskDocument | KeysAndValues | str | Path | None,
    trace: TracesLike = None,
    *,
    standing: FleetLike | Mapping[str, FleetLike] | None = None,
    terms: Mapping[str, Any] | None = None,
    catalog: CatalogLike = None,
    seed: int = 0,
    time_limit_s: float = USUAL_LIMIT_S,
    progress: Progress = report_nothing,
    **keys: Unpack[TaskKeys],
) -> DayResult | JointDayResult:
    """Simulate controllers on a day of traffic: cost, windows that keep the SLO, regret above the optimum.

    `slo` is the question as for `plan`. Its section `day` says how pools may change, and which controllers
    decide; the keys in `terms` replace those of the section. `standing` is the static fleet. Without it the
    cheapest static fleet and its alternatives are planned on paper, and the answer is that of the fleet with
    the cheapest day. An SLO without `every` is judged in windows of ten minutes.

    With `llms` in the question each LLM has its own pools and controllers, on one stock. `trace` is then a
    trace with a column `model`, or maps each entry to its own trace. `standing` is the folder of a plan of
    all, or maps each entry to its fleet.

    If the section has `oracle`, public autoscalers are tuned on the first 70 % of the day and judged on the
    rest; the answer then has the GPU hours of the optimum beside theirs.

    A day may take as much work as a plan (search/oracle/work_clock.py counts it), so that its answer does not
    depend on the machine; `time_limit_s` on the wall clock is a safety net. `progress` may have
    a method `note_day` (`DayWatch`), for the best day of one LLM so far. Raises InputError for what cannot
    be read or simulated, InfeasibleError if no fleet keeps the SLO.
    """
    seed, time_limit_s = checked_seed(seed), checked_time_limit(time_limit_s)
    question = read_task(slo, catalog, **keys)
    day_section = _parse_section(question, terms or {})
    facts = read_startup(Path(catalog) if isinstance(catalog, str | Path) else None)
    with time_limit(time_limit_s) as deadline:
        answer_day = _day_together if question.has_several_llms else _day_of_one_llm
        return answer_day(question, trace, standing, day_section, facts, seed, deadline, progress)


def _day_of_one_llm(
    question: TaskDocument,
    trace: TracesLike,
    standing: FleetLike | Mapping[str, FleetLike] | None,
    day_section: DaySection,
    facts: StartupFacts,
    seed: int,
    deadline: float,
    progress: Progress,
) -> DayResult:
    """`day` for a question of one LLM; `deadline` is on the search's clock (work_clock.py)."""
    watch: DayWatch = getattr(progress, "note_day", report_nothing)
    began, work_s = now_s(), deadline - now_s()
    if isinstance(trace, Mapping):
        raise InputError("trace: found several; give the traffic of one LLM, a file or a DataFrame")
    task = _static_fleet_question(question.task())
    log_options = log_options_of(question.document, question.path)
    study = Study(
        requests_of(trace, task.described, seed=seed, log_options=log_options),
        question.catalog,
        seed=seed,
        time_limit_s=math.inf,  # The caller's time limit on the wall clock is in force already.
        most_work_s=STATIC_SHARE * work_s,
        progress=progress,
    )
    refuse_waits(study.trace)
    if standing is None:
        progress("the fleet that stands all day")
        plan = study.answer(task)
        watch(plan.fleet, None)
        limits, requests = plan.problem.slo, plan.problem.trace
        fleets, note = {ON_PAPER: plan.fleet}, PAPER_NOTE
        if day_section.fleets == ALL_FLEETS:
            until = began + (STATIC_SHARE + ALTERNATIVES_SHARE) * work_s
            fleets = candidate_fleets(study, task, plan, until)
    else:
        fleets, limits, note = {GIVEN: read_fleet(standing, question.catalog, slo=question)}, task.slo, ""
        if task.slowdowns is not None:
            raise InputError(
                f"{question.path}: preset {task.preset}: is relative; with a fleet give limits in seconds"
            )
        requests = RateRequest(task.rate_rps, task.scale, task.window or "whole", task.described).apply_to(
            spread_stamps(study.trace, seed=seed), seed=seed
        )

    if day_section.fleets == ALL_FLEETS:
        fleets |= other_queues(task, fleets)

    def day_of(fleet: Fleet, left_s: float, missed_usd: float | None) -> DayAnswer:
        question = _day_question(fleet, limits, requests, task, day_section, facts, note)
        return study_day(
            question if missed_usd is None else replace(question, missed_usd=missed_usd),
            day_section.controllers,
            most_work_s=left_s,
            optimum=day_section.optimum,
            progress=progress_of_fleet(fleets, fleet, progress),
            watch=(lambda answer: watch(fleet, answer)) if missed_usd is None else report_nothing,
        )

    types_of = _types_search(day_section, fleets, progress)
    return DayResult(cheapest_fleet(fleets, day_of, deadline, types_of, watch), day_section.is_oracle)


def progress_of_fleet(fleets: Mapping[str, Fleet], fleet: Fleet, progress: Progress) -> Progress:
    """`progress` for the day of one fleet; where several are compared, messages begin with its name."""
    if len(fleets) == 1:
        return progress
    number, name = next((k, name) for k, (name, each) in enumerate(fleets.items(), 1) if each is fleet)
    return lambda text: progress(f"fleet {number} of {len(fleets)} ({name}): {text}")


def _types_search(
    day_section: DaySection, fleets: Mapping[str, Fleet], progress: Progress
) -> Callable[[Mapping[str, DayAnswer], float], ChangingTypes] | None:
    """The function that finds the optimum for worker types that change within the day, or None.

    That optimum is searched if the section says so, and by default if the compared fleets differ in their
    worker types.
    """
    if not day_section.optimum or day_section.types == FIXED_TYPES:
        return None
    shapes = {frozenset((pool.role, pool.type) for pool in fleet.pools) for fleet in fleets.values()}
    if day_section.types != CHANGE_TYPES and len(shapes) == 1:
        return None
    return lambda answers, left_s: changing_types(answers, most_work_s=left_s, progress=progress)


def _static_fleet_question(task: PlanQuestion) -> PlanQuestion:
    """The question whose answer is the static fleet. It has the windows by which the day is judged, and no
    safety: the day is simulated on this traffic alone.
    """
    return replace(task, slo=replace(task.slo, every_s=task.slo.every_s or USUAL_EVERY_S), safety=None)


def _parse_section(question: TaskDocument, terms: Mapping[str, Any]) -> DaySection:
    """The section `day`, with the keys in `terms` in place of its own.

    Raises InputError for a setting that needs one LLM in a question of several, or the reverse.
    """
    section = {**(question.document.get("day") or {}), **terms}
    day_section = parse_day(section, f"{question.path}: day")
    if question.has_several_llms and day_section.is_oracle:
        raise InputError("oracle: takes one LLM; leave it out, or give a question of one")
    if question.has_several_llms and section.get("fleets") == ALL_FLEETS:
        raise InputError("day: fleets: all takes one LLM; leave it out, or give a question of one")
    if question.has_several_llms and day_section.types == CHANGE_TYPES:
        raise InputError("day: types: change takes one LLM; leave it out, or give a question of one")
    if day_section.types == CHANGE_TYPES and not day_section.optimum:
        raise InputError("day: types: change asks for an optimum that optimum: false leaves out; drop one")
    if day_section.is_paid_all_day and not question.has_several_llms:
        raise InputError("day: sleep and billing: day take several LLMs (llms); leave them out for one LLM")
    return day_section


def _day_question(
    fleet: Fleet,
    limits: Slo,
    requests: Trace,
    task: PlanQuestion,
    day_section: DaySection,
    facts: StartupFacts,
    fleet_note: str,
) -> DayQuestion:
    """The question of one LLM's day on this fleet; `limits` must have windows."""
    assert limits.every_s is not None
    return DayQuestion(
        fleet=fleet,
        pools=elastic_pools(fleet, day_section, task, facts),
        slo=limits,
        trace=requests,
        unit_s=day_section.billed_s,
        is_paid_all_day=day_section.is_paid_all_day,
        step_s=day_section.every_s or limits.every_s,
        train_frac=day_section.train_frac,
        missed_usd=day_section.missed_usd,
        missed_frac=day_section.missed_frac,
        start_notes=start_notes(fleet, day_section, facts),
        fleet_note=fleet_note,
        stock={gpu: count for gpu, count in task.stock_and_owned.items() if count is not None},
        warnings=_unheeded_warnings(task),
        is_least_given=day_section.is_least_given,
    )


def _unheeded_warnings(task: PlanQuestion) -> tuple[str, ...]:
    """Warnings of settings that hold for the plan of the static fleet, and not for pools that change."""
    limits = {"power": task.power_limit_w, "cost": task.cost_limit_usd_per_h, "gpus": task.gpu_limit}
    warnings = []
    if task.spare_workers or task.spare_nodes:
        warnings.append(
            "spare: only the plan of the fleet that stands all day heeds it; controllers and the optimum "
            "keep their windows without a loss and pay for no spare, so they are cheaper than the same safety"
        )
    if named := [name for name, limit in limits.items() if limit is not None]:
        warnings.append(
            f"limits: {', '.join(named)}: only the plan of the fleet that stands all day heeds them, and "
            "pools that grow may exceed them: give a stock under fleet: gpus, or most"
        )
    return tuple(warnings)


def _day_together(
    question: TaskDocument,
    trace: TracesLike,
    standing: FleetLike | Mapping[str, FleetLike] | None,
    day_section: DaySection,
    facts: StartupFacts,
    seed: int,
    deadline: float,
    progress: Progress,
) -> JointDayResult:
    """`day` for a question of several LLMs; `deadline` is on the search's clock (work_clock.py)."""
    shared_question = questions_of(question, trace, seed=seed)
    static_question = shared_question.with_tasks(_static_fleet_question)
    entries = static_question.entries
    for entry in entries:
        refuse_waits(entry.trace, entry.name)
        if entry.task.slowdowns is not None:
            raise InputError(
                f"{question.path}: llms: {entry.name}: preset {entry.task.preset}: is relative; give limits "
                "in seconds"
            )
    if standing is None:
        progress("the fleets that stand all day")
        shared_plan = plan_together(
            static_question,
            question.catalog,
            seed=seed,
            time_limit_s=math.inf,  # The caller's time limit on the wall clock is in force already.
            most_work_s=STATIC_SHARE * (deadline - now_s()),
            progress=progress,
        )
        fleets = {name: plan.fleet for name, plan in shared_plan.plans.items()}
    else:
        fleets = _fleets_of_llms(standing, [entry.name for entry in entries], question)
    windows_s = {entry.task.slo.every_s for entry in entries}
    if day_section.every_s is None and len(windows_s) > 1:
        intervals_text = ", ".join(f"{each:g} s" for each in sorted(filter(None, windows_s)))
        raise InputError(
            f"{question.path}: day: every: the SLOs have windows of {intervals_text}; name one grid for all"
        )
    questions, note = {}, ""
    if standing is None:
        note = f"{PAPER_NOTE}; fleets of other GPUs and splits are compared for one LLM alone"
    begins_s = _begins_s(entries)
    for entry in entries:
        task = entry.task
        requests = RateRequest(task.rate_rps, task.scale, task.window or "whole").apply_to(
            spread_stamps(entry.trace, seed=seed), seed=seed
        )
        requests = replace(requests, arrival_s=requests.arrival_s + begins_s[entry.name])
        questions[entry.name] = _day_question(
            fleets[entry.name], task.slo, requests, task, day_section, facts, note
        )
    if day_section.sleep_level:
        questions = sleeping_questions(questions, day_section.sleep_level, day_section.storage, facts)
    answer = study_day_together(
        questions,
        day_section.controllers,
        most_work_s=max(deadline - now_s(), SHORTEST_LIMIT_S),
        optimum=day_section.optimum,
        progress=progress,
    )
    return JointDayResult(answer)


def _begins_s(entries: Sequence[LlmQuestion]) -> dict[str, float]:
    """How much later the clock of each LLM's trace begins than the first of all. 0 where they have no common
    clock: some count from 0 and some have dates, or a window or a faster clock makes other times of theirs.
    """
    zeros_s = {each.name: each.trace.clock_zero_s for each in entries}
    known_s = [zero_s for zero_s in zeros_s.values() if zero_s is not None]
    are_moved = any(
        each.task.window not in (None, "whole")
        or (each.task.rate_rps is not None and each.task.scale == "compress")
        for each in entries
    )
    if are_moved or len({zero_s < DATE_S for zero_s in known_s}) > 1:
        return dict.fromkeys(zeros_s, 0.0)
    return {name: 0.0 if zero_s is None else zero_s - min(known_s) for name, zero_s in zeros_s.items()}


def _fleets_of_llms(
    standing: FleetLike | Mapping[str, FleetLike], names: Sequence[str], question: TaskDocument
) -> dict[str, Fleet]:
    """The fleet of each LLM, from a mapping by name or from the folder of a plan for all LLMs."""
    if isinstance(standing, str | Path):
        standing = {name: Path(standing) / name for name in names}
    if not isinstance(standing, Mapping) or set(standing) != set(names):
        standing_text = f"{', '.join(standing)}" if isinstance(standing, Mapping) else type(standing).__name__
        raise InputError(
            f"fleet: with several LLMs, expected the folder of their plan, or a fleet for each of "
            f"{', '.join(names)}; found {standing_text}"
        )
    questions = question.of_each_llm()
    return {
        name: read_fleet(fleet, question.catalog, slo=questions[name]) for name, fleet in standing.items()
    }


def elastic_pools(
    standing: Fleet, day_section: DaySection, task: PlanQuestion, facts: StartupFacts
) -> tuple[ElasticPool, ...]:
    """The bounds in which each pool of the static fleet may change, and its start-up times.

    Raises InputError if a pool's planned size is not within its bounds.
    """
    pools = []
    for pool in standing.pools:
        gpu = pool.type.gpu.name
        spot = task.spot_terms(pool.type.gpu) if payment_suffix(gpu) == SPOT else None
        most = day_section.most or max(MOST_WORKERS_FACTOR * pool.count, pool.count + FEWEST_EXTRA_WORKERS)
        most = int(min(most, FleetLimits(task.stock_and_owned).most_workers(pool.type)))
        if not day_section.least <= pool.count <= most:
            raise InputError(
                f"day: least {day_section.least} and most {most} workers of pool {pool.name}, where "
                f"{pool.count} stand all day; widen them"
            )
        start_s, warm_s = day_section.start_s, day_section.warm_start_s
        if start_s is None:
            start_s = start_of(standing, pool, day_section, facts).start_s
        if warm_s is None:
            warm_s = facts.warm_start_time(standing.llm, pool.type).start_s
        pools.append(
            ElasticPool(
                start_s=start_s,
                least=day_section.least,
                most=most,
                warm=day_section.warm,
                warm_start_s=warm_s,
                drain_limit_s=day_section.drain_limit_s,
                interruptions_per_h=spot.interruptions_per_h if spot else 0.0,
                notice_s=NOTICE_S if spot else 0.0,
            )
        )
    return tuple(pools)


def start_of(standing: Fleet, pool: Pool, day_section: DaySection, facts: StartupFacts) -> StartTime:
    """The start-up time of this pool's workers, and its components, by the catalog."""
    return facts.start_time(standing.llm, pool.type, day_section.storage, image=day_section.image)


def start_notes(standing: Fleet, day_section: DaySection, facts: StartupFacts) -> tuple[str, ...]:
    """A sentence per pool on its start-up time and components; one alone if the section `day` gives it."""
    if day_section.start_s is not None:
        return ("start-up times as given",)
    notes = []
    for pool in standing.pools:
        start = start_of(standing, pool, day_section, facts)
        image = "" if day_section.image is None else f", image from {day_section.image} {start.image_s:.0f} s"
        why = f"; estimated ({'; '.join(start.estimated)})" if start.estimated else "; measured"
        notes.append(
            f"{pool.name} starts in {start.start_s:.0f} s: weights from {day_section.storage} "
            f"{start.load_s:.0f} s{image}, engine "
            f"{start.boot_s + start.compile_s + start.profile_s + start.capture_s:.0f} s{why}"
        )
    return tuple(notes)
