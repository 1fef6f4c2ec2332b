"""`day`: a day of traffic on pools that change, under controllers, beside the best that is possible."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import pandas as pd

from planner.documents.day import USUAL_EVERY_S, DaySection, parse_day
from planner.documents.startup import StartupFacts, read_startup
from planner.documents.task import Task
from planner.domain import SPOT, market_of, row_of
from planner.errors import InputError
from planner.face.inputs import CatalogLike, FleetLike, Section, TraceLike, read_fleet, requests_of
from planner.face.questions import TaskDocument, TaskKeys, read_task
from planner.face.results import Result
from planner.fleet import Fleet, Pool
from planner.io.files import check_output_directory, write_files
from planner.models.startup import StartTime
from planner.search.problem import Progress, silent
from planner.simulator.elastic import ElasticPool
from planner.studies import day_page
from planner.studies.day import DayAnswer, DayQuestion, study_day
from planner.studies.day_manifests import OUTDATED, manifests
from planner.studies.whatif import Study
from planner.traffic.scaling import Asked
from planner.traffic.trace import spread

MOST_TIMES = 2  # of the workers that stand all day: so many a controller may ask for, unless most says else
NOTICE_S = 120.0  # before a spot worker is taken away, as AWS gives; others give 30 s
STATIC_SHARE = 0.4  # of the time for the fleet that stands all day


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DayResult(Result):
    """Every controller's day beside the fleet that stands all day and the optimum."""

    answer: DayAnswer

    @property
    def winner(self) -> str:
        """Of those that miss the fewest windows the cheapest."""
        return self.answer.winner.name

    def headline(self) -> str:
        return day_page.sentence(self.answer)

    def sentences(self) -> list[str]:
        return [*day_page.proof_lines(self.answer), *self.answer.warnings]

    def to_dict(self) -> dict[str, Any]:
        """What `plan day --json` prints."""
        return day_page.to_json(self.answer)

    def to_frame(self) -> pd.DataFrame:
        """A row per controller: cost, windows missed, regret."""
        told = self.to_dict()
        found = [*([told["optimum"]] if told["optimum"] else []), *told["controllers"]]
        names = ("name", "usd", "gpu_hours", "windows", "missed", "regret_usd")
        return pd.DataFrame([{name: each[name] for name in names} for each in found])

    def report(self) -> str:
        """The page day.html."""
        return day_page.render(self.answer)["day.html"]

    def save(self, folder: str | Path) -> tuple[str, ...]:
        """Write day.html, tables and the manifests of the winner into a folder, all or none."""
        check_output_directory(Path(folder))
        written = {**day_page.render(self.answer), **manifests(self.answer)}
        write_files(Path(folder), written, outdated=OUTDATED)
        return tuple(written)


def day(
    slo: TaskDocument | Section | str | Path | None,
    trace: TraceLike | None = None,
    *,
    standing: FleetLike | None = None,
    terms: Mapping[str, Any] | None = None,
    catalog: CatalogLike = None,
    seed: int = 0,
    time_limit_s: float = 120.0,
    progress: Progress = silent,
    **keys: Unpack[TaskKeys],
) -> DayResult:
    """What controllers make of a day of traffic: cost, windows that keep the SLO, regret above the optimum.

    `slo` is the question as for `plan`; its section `day`, or `terms` over it, says how pools may change and
    who decides. Without `standing` the cheapest fleet that stands all day is planned, on paper; its pools are
    what changes. An SLO without `every` is held in windows of ten minutes.

    Raises InputError for what cannot be read or simulated, InfeasibleError if no fleet keeps the promise.
    """
    began = time.monotonic()
    question = read_task(slo, catalog, **keys)
    if question.has_several_llms:
        raise InputError(
            f"{question.path}: llms: `day` takes one LLM; write one of them into a file of its own"
        )
    section = {**(question.document.get("day") or {}), **(terms or {})}
    asked = parse_day(section, f"{question.path}: day")
    task = question.task()
    every_s = task.slo.every_s or USUAL_EVERY_S
    task = replace(task, slo=replace(task.slo, every_s=every_s), safety=None)
    study = Study(
        requests_of(trace, task.described, seed=seed),
        question.catalog,
        seed,
        STATIC_SHARE * time_limit_s,
        progress,
    )
    if standing is None:
        progress("the fleet that stands all day")
        found = study.ask(task)
        fleet, promise, requests = found.fleet, found.problem.slo, found.problem.trace
    else:
        fleet, promise = read_fleet(standing, question.catalog), task.slo
        if task.slowdowns is not None:
            raise InputError(
                f"{question.path}: preset {task.preset}: is relative; with a fleet give limits in seconds"
            )
        requests = Asked(task.rate_rps, task.scale, task.window or "whole", task.described).of(
            spread(study.trace, seed=seed), seed=seed
        )
    facts = read_startup(Path(catalog) if isinstance(catalog, str | Path) else None)
    left_s = max(time_limit_s - (time.monotonic() - began), 1.0)
    answer = study_day(
        DayQuestion(
            fleet=fleet,
            pools=elastic_pools(fleet, asked, task, facts),
            slo=replace(promise, every_s=every_s),
            trace=requests,
            unit_s=asked.billed_s,
            step_s=asked.every_s or every_s,
            train_frac=asked.train_frac,
            missed_usd=asked.missed_usd,
            start_notes=start_notes(fleet, asked, facts),
        ),
        asked.controllers,
        time_limit_s=left_s,
        optimum=asked.optimum,
        progress=progress,
    )
    return DayResult(answer)


def elastic_pools(
    standing: Fleet, asked: DaySection, task: Task, facts: StartupFacts
) -> tuple[ElasticPool, ...]:
    """How each pool of the fleet that stands all day may change; raises InputError for what cannot be."""
    found = []
    for pool in standing.pools:
        gpu = pool.type.gpu.name
        spot = task.spot_terms(pool.type.gpu) if market_of(gpu) == SPOT else None
        most = asked.most or max(MOST_TIMES * pool.count, pool.count + 2)
        if (stock := task.stock.get(row_of(gpu))) is not None:
            most = min(most, stock // pool.type.gpus)
        if not asked.least <= pool.count <= most:
            raise InputError(
                f"day: least {asked.least} and most {most} workers of pool {pool.name}, where {pool.count} "
                "stand all day; widen them"
            )
        start, warm_s = start_of(standing, pool, asked, facts), asked.warm_start_s
        found.append(
            ElasticPool(
                start_s=start.start_s if asked.start_s is None else asked.start_s,
                least=asked.least,
                most=most,
                warm=asked.warm,
                warm_start_s=facts.warm(standing.llm, pool.type).start_s if warm_s is None else warm_s,
                drain_limit_s=asked.drain_limit_s,
                interruptions_per_h=spot.interruptions_per_h if spot else 0.0,
                notice_s=NOTICE_S if spot else 0.0,
            )
        )
    return tuple(found)


def start_of(standing: Fleet, pool: Pool, asked: DaySection, facts: StartupFacts) -> StartTime:
    """What the catalog says of a start of this pool's workers."""
    return facts.start(standing.llm, pool.type, asked.storage, image=asked.image)


def start_notes(standing: Fleet, asked: DaySection, facts: StartupFacts) -> tuple[str, ...]:
    """What the start-up times rest on, and why they are estimates where they are."""
    if asked.start_s is not None:
        return ("start-up times as given",)
    found = []
    for pool in standing.pools:
        start = start_of(standing, pool, asked, facts)
        image = "" if asked.image is None else f", image from {asked.image} {start.image_s:.0f} s"
        why = f"; estimated ({'; '.join(start.estimated)})" if start.estimated else "; measured"
        found.append(
            f"{pool.name} starts in {start.start_s:.0f} s: weights from {asked.storage} {start.load_s:.0f} s"
            f"{image}, engine {start.boot_s + start.compile_s + start.profile_s + start.capture_s:.0f} s{why}"
        )
    return tuple(found)
