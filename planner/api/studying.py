"""`what_if`, `sensitivity`, `pareto` and `replan`: questions that plan several times on the same traffic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

import pandas as pd

from planner.api import inputs
from planner.api.progress import MaybeProgress, shown_progress
from planner.api.questions import KeysWithoutLimits, TaskDocument, TaskKeys, read_task
from planner.api.results import Result
from planner.documents.catalog import CatalogLike
from planner.documents.facts import Headroom
from planner.documents.fleet_file import fleet_document
from planner.documents.log_columns import log_options_of
from planner.errors import InfeasibleError, InputError
from planner.files.checked_files import (
    YAML_SUFFIXES,
    check_output_directory,
    check_output_file,
    to_yaml,
    write_file,
    write_files,
)
from planner.files.document_values import read_share, refused_value
from planner.fleet import Fleet
from planner.reports.fact_sentences import fact_sentence
from planner.studies import pareto_frontier, pareto_page, replanning
from planner.studies import what_if as what_if_study
from planner.studies.what_if import ChangedQuestion, Study, StudyAnswer
from planner.traffic.trace import spread_stamps
from planner.units import HOUR_S, parse_quantity, show_digits

QuestionLike = TaskDocument | inputs.KeysAndValues | str | Path
REPLAN_NAMES = ("fleet.yaml", "replan.json")  # What `ReplanResult.save` writes into a folder.
PLAN_TIME_LIMIT_S = 120.0  # For each plan; `what_if` and `sensitivity` have an argument for it.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class WhatIfResult(Result):
    """The best fleet before and after a change, and whether the previous fleet still holds.

    `moved` is the changed question with its answer. `before` is None if no fleet keeps the SLO before the
    change. `bounds` are the lower bounds on the cost before and after the change; a question without a fleet
    has none.
    """

    before: StudyAnswer | None
    moved: ChangedQuestion
    bounds: tuple[float, ...]

    @property
    def holds(self) -> bool | None:
        """Whether the fleet from before keeps the SLO of the changed question; None if there was no fleet, or
        if the changed question does not offer its worker types.
        """
        return self.moved.kept

    @property
    def fleet(self) -> Fleet | None:
        """The best fleet after the change, None where there is none."""
        return None if self.moved.answer is None else self.moved.answer.fleet

    def headline(self) -> str:
        if self.before is None:
            before = "no fleet" if self.moved.is_proved_before else "no fleet found"
            after = "a fleet" if self.moved.answer else "none either"
            return f"{self.moved.label}: {before} before, {after} after the change"
        if what_if_study.costs_the_same(self.moved, self.before):
            return f"{self.moved.label}: costs the same"
        return f"{self.moved.label}: {what_if_study.difference_text(self.moved, self.before)}"

    def sentences(self) -> list[str]:
        return [what_if_study.verdict_text(self.moved)]

    def to_dict(self) -> dict[str, Any]:
        """What `plan what-if --json` prints."""
        before, moved = self.before, self.moved
        changed = {
            key: value
            for key, value in what_if_study.change_document(moved, before).items()
            if key != "answer"
        }
        before_document = after_document = None
        if before is not None:
            before_document = what_if_study.study_document(before) | {"bound": self.bounds[0]}
        if moved.answer is not None:
            after_document = what_if_study.study_document(moved.answer) | {"bound": self.bounds[-1]}
        return {"before": before_document, "after": after_document, **changed}

    def to_frame(self) -> pd.DataFrame:
        """Two rows, before and after: fleet, cost, GPUs, and the simulated value of each limit [s]."""
        return _answers_frame({"before": self.before, "after": self.moved.answer})


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SensitivityResult(Result):
    """Whether a plan holds if step times, traffic or prices are off by a share, and the cost of each limit.

    `before` is the plan, `moves` are the changed questions with their answers.
    """

    before: StudyAnswer
    moves: tuple[ChangedQuestion, ...]
    headroom: Headroom

    def headline(self) -> str:
        fleet = what_if_study.study_document(self.before)["fleet"]
        kept_count = sum(moved.kept is True for moved in self.moves)
        return f"{fleet} holds in {kept_count} of {len(self.moves)} changed questions"

    def sentences(self) -> list[str]:
        return [fact_sentence(self.headroom)]

    def to_dict(self) -> dict[str, Any]:
        """What `plan sensitivity --json` prints."""
        return {
            "plan": what_if_study.study_document(self.before),
            "headroom": asdict(self.headroom),
            "changes": [what_if_study.change_document(moved, self.before) for moved in self.moves],
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per change: whether the plan holds, and the best fleet with its cost."""
        return pd.DataFrame(
            [
                {
                    "change": moved.label,
                    "holds": moved.kept,
                    "difference": None if moved.answer is None else moved.answer.value - self.before.value,
                    **_fleet_columns(moved.answer),
                }
                for moved in self.moves
            ]
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ParetoResult(Result):
    """The cheapest fleet at every limit between a loosest and a tightest one."""

    frontier: pareto_frontier.Frontier

    def headline(self) -> str:
        fleets = f"{len(self.frontier.stairs)} fleets over {self.frontier.axis}"
        return f"{fleets}, {pareto_page.question_line(self.frontier)}"

    def sentences(self) -> list[str]:
        return [pareto_page.ended_line(self.frontier)]

    def to_dict(self) -> dict[str, Any]:
        """What `plan pareto --json` prints."""
        return pareto_frontier.frontier_document(self.frontier)

    def to_frame(self) -> pd.DataFrame:
        """One row per fleet: the limit that it holds to, its cost, the fleet."""
        return pd.DataFrame(
            [
                {key: value for key, value in row.items() if key != "answers"}
                for row in self.to_dict()["steps"]
            ]
        )

    def save(self, folder: str | Path) -> tuple[str, ...]:
        """Write pareto.html, pareto.csv, pareto.json and the picture."""
        check_output_directory(Path(folder))
        contents = pareto_page.render_frontier(self.frontier)
        write_files(Path(folder), contents)
        return tuple(contents)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReplanResult(Result):
    """The cheapest way from a running fleet to a fleet that keeps the SLO on today's traffic.

    `drift` is the difference to the traffic for which the running fleet was planned; None if that traffic is
    not known.
    """

    answer: replanning.Replan
    drift: tuple[replanning.TrafficDrift, ...] | None

    @property
    def keeps(self) -> bool:
        """Whether the running fleet holds and stays."""
        return self.answer.keeps_running

    @property
    def fleet(self) -> Fleet:
        """The cheapest fleet to go on with, which may be the running one."""
        return self.answer.best.fleet

    def headline(self) -> str:
        return "keep what runs" if self.keeps else f"change to {self.to_dict()['fleet']}"

    def sentences(self) -> list[str]:
        if self.drift is None:
            return ["what the running fleet was planned on is not known, so no drift is"]
        return [
            f"drift: {row.what} {show_digits(row.before, 4)} -> {show_digits(row.after, 4)}"
            for row in self.drift
            if row.is_drift
        ]

    def to_dict(self) -> dict[str, Any]:
        """What `plan replan --json` prints."""
        return replanning.replan_document(self.answer, self.drift)

    def to_frame(self) -> pd.DataFrame:
        """One row per candidate fleet: its cost, the cost of starts and stops, whether it keeps the SLO."""
        return pd.DataFrame(self.to_dict()["ways"])

    def save(self, path: str | Path) -> tuple[str, ...]:
        """Write the new fleet, fleet.yaml, and the answer, replan.json, into a folder; returns their names. A
        path that ends in .yaml, .yml or .json is a file, for the fleet alone.
        """
        path, fleet_text = Path(path), to_yaml(fleet_document(self.fleet))
        if path.suffix in YAML_SUFFIXES:
            check_output_file(path)
            write_file(path, fleet_text)
            return ()
        check_output_directory(path)
        texts = (fleet_text, json.dumps(self.to_dict(), indent=2) + "\n")
        write_files(path, dict(zip(REPLAN_NAMES, texts, strict=True)))
        return REPLAN_NAMES


def what_if(
    slo: QuestionLike | None = None,
    trace: inputs.TraceLike | None = None,
    changes: Mapping[str, Any] | TaskDocument | None = None,
    *,
    catalog: CatalogLike = None,
    seed: int = 0,
    time_limit_s: float = PLAN_TIME_LIMIT_S,
    progress: MaybeProgress = None,
    **keys: Unpack[TaskKeys],
) -> WhatIfResult:
    """The best fleet before and after a change of the question, on the same traffic.

    `slo` and `keys` are those of `plan`. `changes` are dotted paths of slo.yaml with their values,
    {"slo.ttft.p90": "1 s"}, where None takes a key out; or the whole changed question. If no fleet keeps the
    SLO of the question as it is, `before` is None; if none keeps that of the changed one, `fleet` is None.
    Raises InputError.
    """
    question = read_task(slo, catalog, **keys)
    if not changes:
        raise InputError("changes: missing; say what changes, such as {'slo.ttft.p90': '1 s'}")
    if not isinstance(changes, TaskDocument | Mapping):
        raise refused_value("changes", "expected paths with values, such as {'slo.ttft.p90': '1 s'}", changes)
    changed = changes if isinstance(changes, TaskDocument) else question.replace(changes)
    label = "another question" if isinstance(changes, TaskDocument) else _changes_label(changes)
    study = study_of(question, trace, seed=seed, time_limit_s=time_limit_s, progress=progress)
    return what_if_in(study, question, changed, label)


def what_if_in(study: Study, question: TaskDocument, changed: TaskDocument, label: str) -> WhatIfResult:
    """Like `what_if`, on the traffic of a study. `label` names the change in messages and answers."""
    study.progress(f"planning without {label}")
    before: StudyAnswer | InfeasibleError
    try:
        before = study.answer(question.task())
    except InfeasibleError as error:
        before = error
    moved = what_if_study.answer_change(study, before, changed.task(), label)
    planned = before if isinstance(before, StudyAnswer) else None
    bounds = tuple(study.bound(answer) for answer in (planned, moved.answer) if answer is not None)
    return WhatIfResult(planned, moved, bounds)


def sensitivity(
    slo: QuestionLike | None = None,
    trace: inputs.TraceLike | None = None,
    *,
    by: str | float = "10 %",
    catalog: CatalogLike = None,
    seed: int = 0,
    time_limit_s: float = PLAN_TIME_LIMIT_S,
    progress: MaybeProgress = None,
    **keys: Unpack[TaskKeys],
) -> SensitivityResult:
    """Whether the plan holds if step times, traffic or prices are off by a share, and the cost of each limit.

    `by` is the share, such as "10 %" or 0.1. Raises InputError unless it lies between 0 and 1, both excluded.
    """
    question = read_task(slo, catalog, **keys)
    by_frac = share_of(by, "by")
    study = study_of(question, trace, seed=seed, time_limit_s=time_limit_s, progress=progress)
    return sensitivity_in(study, question, by_frac)


def share_of(by: str | float, where: str) -> float:
    """A share such as "10 %" or 0.1. Raises InputError unless it lies between 0 and 1, both excluded."""
    by_frac = read_share(by, where)
    if not 0 < by_frac < 1:
        raise InputError(f"{where}: expected a share between 0 and 1 such as '10 %', found {by!r}")
    return by_frac


def sensitivity_in(study: Study, question: TaskDocument, by_frac: float) -> SensitivityResult:
    """Like `sensitivity`, on the traffic of a study."""
    before = study.answer(question.task())
    changed = tuple(what_if_study.sensitivity(study, before, by_frac=by_frac))
    return SensitivityResult(before, changed, what_if_study.headroom(study, before))


def pareto(
    slo: QuestionLike | None = None,
    trace: inputs.TraceLike | None = None,
    over: str = "ttft p90",
    *,
    limits: tuple[str | None, str | None] = (None, None),
    points: int | None = None,
    catalog: CatalogLike = None,
    seed: int = 0,
    progress: MaybeProgress = None,
    **keys: Unpack[KeysWithoutLimits],
) -> ParetoResult:
    """The cheapest fleet at every limit: over a line of the SLO ("ttft p90"), "rate", "power" or "cost".

    `limits` are the loosest and the tightest value of `over`, with units; slo.yaml's own key `limits` can
    stand only in `slo`, not among `keys`. `points` is how many steps the answer has at most. Each plan may
    take two minutes.
    """
    # A mapping would be the section `limits` of slo.yaml, which belongs into `slo`.
    given: object = limits
    if isinstance(given, Mapping) or len(limits) != 2:
        expected = "expected the loosest and the tightest, ('2 s', '0.5 s'); those of slo.yaml go into slo"
        raise refused_value("limits", expected, given)
    question = read_task(slo, catalog, **keys)
    study = study_of(question, trace, seed=seed, time_limit_s=PLAN_TIME_LIMIT_S, progress=progress)
    unit = {"power": "w", "cost": "usd_per_h", "rate": "rps"}.get(over, "s")  # A line of the SLO is in s.
    first, last = (None if text is None else parse_quantity(text, unit, where="limits") for text in limits)
    options = {} if points is None else {"points": points}
    frontier = pareto_frontier.find_frontier(study, question.task(), over, first=first, last=last, **options)
    return ParetoResult(frontier)


def replan(
    current: inputs.FleetLike,
    slo: QuestionLike | None = None,
    trace: inputs.TraceLike | None = None,
    *,
    horizon: str = "24 h",
    start_usd: float = replanning.USUAL_START_USD,
    stop_usd: float = replanning.USUAL_STOP_USD,
    catalog: CatalogLike = None,
    seed: int = 0,
    **keys: Unpack[TaskKeys],
) -> ReplanResult:
    """What to change of a running fleet for today's traffic; each worker started or stopped costs `start_usd`
    or `stop_usd`.

    `current` is a fleet, or the folder of a plan, whose requests.csv is the traffic it was planned for.
    """
    question = read_task(slo, catalog, **keys)
    running = inputs.read_fleet(current, question.catalog, slo=question)
    study = study_of(question, trace, seed=seed, time_limit_s=PLAN_TIME_LIMIT_S, progress=None)
    planned_on = (
        inputs.plan_file(current).parent / "requests.csv" if isinstance(current, str | Path) else None
    )
    horizon_h = parse_quantity(horizon, "s", where="horizon") / HOUR_S
    terms = replanning.ReplanTerms(horizon_h, start_usd, stop_usd)
    return replan_in(study, question, running, planned_on, terms)


def replan_in(
    study: Study,
    question: TaskDocument,
    running: Fleet,
    planned_on: Path | None,
    terms: replanning.ReplanTerms,
) -> ReplanResult:
    """Like `replan`, on the traffic of a study.

    `planned_on` is the file with the requests for which the running fleet was planned. Without it the drift
    is not known.
    """
    task = question.task()
    answer = replanning.replan(study, task, running, terms)
    drift = None
    if planned_on is not None and planned_on.exists():
        before = spread_stamps(inputs.read_trace(planned_on), seed=0)
        drift = replanning.compare_traffic(before, study.traffic_request(task).requests)
    return ReplanResult(answer, drift)


def study_of(
    question: TaskDocument,
    trace: inputs.TraceLike | None,
    *,
    seed: int,
    time_limit_s: float,
    progress: MaybeProgress,
) -> Study:
    """A study on the traffic of a question: it plans several questions on this traffic and caches
    simulations. Raises InputError where the traffic cannot be read.
    """
    seed, time_limit_s = inputs.checked_seed(seed), inputs.checked_time_limit(time_limit_s)
    log_options = log_options_of(question.document, question.path)
    requests = inputs.requests_of(trace, question.task().described, seed=seed, log_options=log_options)
    return Study(requests, question.catalog, seed, time_limit_s, shown_progress(progress))


def _changes_label(changes: Mapping[str, Any]) -> str:
    """The changes as text, such as "slo.ttft.p90=1 s, limits="; a removed key has no value."""
    return ", ".join(f"{path}={'' if value is None else value}" for path, value in changes.items())


def _fleet_columns(answer: StudyAnswer | None) -> dict[str, Any]:
    """The cells that describe a fleet; None in each without an answer."""
    if answer is None:
        return {"fleet": None, "gpus": None, "cost_usd_per_h": None}
    document = what_if_study.study_document(answer)
    return {key: document[key] for key in ("fleet", "gpus", "cost_usd_per_h")}


def _answers_frame(answers: Mapping[str, StudyAnswer | None]) -> pd.DataFrame:
    """A row for each question: the fleet of its answer and the simulated value of each limit."""
    rows = []
    for name, answer in answers.items():
        lines = [] if answer is None else answer.verdict.lines
        simulated = {f"{line.limit.name.replace(' ', '_')}_s": line.value_s for line in lines}
        rows.append({"": name, **_fleet_columns(answer), **simulated})  # The first column has no head.
    return pd.DataFrame(rows)
