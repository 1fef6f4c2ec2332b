"""A day of several LLMs on one stock: each its pools and its controllers, the stock bound over all of them at
every moment, costs added up.

A controller runs once for each LLM, side by side, and who finds no GPU waits until one is given back. The
optimum is one over all: where LLMs have their peaks at other hours, one takes what the other gives up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.day.controllers.deployment import Deployment
from planner.day.controllers.table import Chosen, parse_controller
from planner.day.day_study import (
    CRON,
    LEAST_OPTIMUM_S,
    OPTIMUM,
    STATIC,
    DayAnswer,
    DayQuestion,
    Optimum,
    Ran,
    deployment_of,
    in_hindsight,
    missed_usd_of,
    split_training,
    summarize_run,
    terms_of,
    tune_controller,
    warnings_of,
)
from planner.day.search.day_optimum import cheapest_day
from planner.day.search.day_runs import DayRuns
from planner.day.search.several_llms_runs import joint_runs, joint_terms
from planner.errors import InfeasibleError, InputError
from planner.search.problem.plan_problem import Progress, report_nothing
from planner.simulator.elastic import ElasticFleet, simulate_together
from planner.solvers.pool_sizes import DayTerms, billed_usd
from planner.traffic.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class JointRan:
    """One controller for all LLMs: what each one's pools did, and what is paid for all, nodes shared."""

    name: str
    parts: tuple[Ran, ...]
    usd: float

    @property
    def missed_windows(self) -> int:
        return sum(part.missed_windows for part in self.parts)

    @property
    def windows(self) -> int:
        return sum(len(part.windows) for part in self.parts)

    @property
    def keeps(self) -> bool:
        return all(part.keeps for part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class JointOptimum:
    """The optimum of all LLMs with the fields of `day.Optimum`; `each` has the part of every LLM."""

    ran: JointRan
    each: tuple[Optimum, ...]
    bound_usd: float
    proved_usd: float
    status: str


@dataclass(frozen=True, slots=True, eq=False)
class JointAnswer:
    """All that ran, the fleets that stand all day first; `each` has the answer of every LLM by its name,
    whose winner is that of all.
    """

    each: Mapping[str, DayAnswer]
    rows: tuple[JointRan, ...]
    optimum: JointOptimum | None
    no_optimum: str
    stock: Mapping[str, int]
    left_out: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def static(self) -> JointRan:
        return self.rows[0]

    @property
    def winner(self) -> JointRan:
        """The day of least cost, in which a missed window of each LLM costs what it does for that LLM."""
        questions = [answer.question for answer in self.each.values()]
        return _best_row(self.rows, questions)

    def regret_usd(self, row: JointRan) -> float | None:
        return None if self.optimum is None else row.usd - self.optimum.ran.usd


def _best_row(rows: Sequence[JointRan], questions: Sequence[DayQuestion]) -> JointRan:
    counts_usd = [missed_usd_of(one, part) for one, part in zip(questions, rows[0].parts, strict=True)]

    def scored(row: JointRan) -> tuple[float, int]:
        missed_usd = sum(usd * part.missed_windows for usd, part in zip(counts_usd, row.parts, strict=True))
        return row.usd + missed_usd, row.missed_windows

    return min(rows, key=scored)


def study_day_together(
    questions: Mapping[str, DayQuestion],
    chosen: Sequence[Chosen],
    *,
    time_limit_s: float = 120.0,
    optimum: bool = True,
    progress: Progress = report_nothing,
) -> JointAnswer:
    """Run what stands all day, every controller and the optimum of all LLMs, whose stock is the first one's.

    Parameters are chosen, where something trains, for each LLM by itself. Raises InputError where the traffic
    cannot be parted as asked, or ends at another time than another's.
    """
    deadline = time.monotonic() + time_limit_s
    names, llm_questions = list(questions), list(questions.values())
    stock = llm_questions[0].stock
    parts = [split_training(one.trace, one.train_frac) for one in llm_questions]
    judged = [replace(one, trace=later) for one, (_, later) in zip(llm_questions, parts, strict=True)]
    terms = joint_terms([terms_of(one) for one in judged], stock, judged[0].step_s)
    progress("how much traffic so many workers carry")
    known = [
        deployment_of(one, later if train is None else train, train)
        for one, (train, later) in zip(llm_questions, parts, strict=True)
    ]
    rows: list[JointRan] = []
    left_out: list[tuple[str, str]] = []
    for each in (parse_controller(STATIC, None), *(one for one in chosen if one.row.name != STATIC)):
        progress(f"{each.row.name}: the day")
        try:
            own = [
                _tune_controller(one, each, deployment, train, rows, m, deadline)
                for m, (one, deployment, (train, _)) in enumerate(
                    zip(llm_questions, known, parts, strict=True)
                )
            ]
            rows.append(_simulate_day(judged, own, known, terms))
        except InputError as error:
            if each.row.name == STATIC:
                raise
            left_out.append((each.row.name, str(error)))
    best_day, why = None, "it was not asked for"
    if optimum:
        progress("the optimum: the cheapest sizes of all pools that keep every window, knowing the traffic")
        try:
            best_day = _find_optimum(judged, rows, terms, deadline, progress)
        except (InputError, InfeasibleError) as error:
            why = str(error)
    winner = _best_row(rows, llm_questions)
    answers = {}
    for m, name in enumerate(names):
        train, later = parts[m]
        own_rows = tuple(replace(row.parts[m], name=row.name) for row in rows)
        answers[name] = DayAnswer(
            llm_questions[m],
            later,
            own_rows,
            None if best_day is None else best_day.each[m],
            why,
            known[m].capacity,
            tuple(left_out),
            warnings_of(train, own_rows),
            winner.name,
        )
    warnings = tuple(dict.fromkeys(line for one in answers.values() for line in one.warnings))
    return JointAnswer(answers, tuple(rows), best_day, why, stock, tuple(left_out), warnings)


def _tune_controller(
    question: DayQuestion,
    chosen: Chosen,
    deployment: Deployment,
    train: Trace | None,
    rows: Sequence[JointRan],
    m: int,
    deadline: float,
) -> tuple[Chosen, int]:
    """A controller with its best settings for one LLM, and the number of settings simulated."""
    if train is None or chosen.row.name == STATIC:
        return chosen, 1
    missed_usd = missed_usd_of(question, rows[0].parts[m])
    return tune_controller(
        replace(question, trace=train), chosen, deployment, missed_usd, deadline, report_nothing
    )


def _simulate_day(
    judged: Sequence[DayQuestion],
    own: Sequence[tuple[Chosen, int]],
    known: Sequence[Deployment],
    terms: DayTerms,
) -> JointRan:
    parts, deployments = [], []
    for one, (chosen, _), deployment in zip(judged, own, known, strict=True):
        if chosen.row.name == CRON and deployment.history is None:
            deployment = in_hindsight(deployment, one.trace)
        deployments.append(deployment)
        limits = one.slo.limits
        parts.append(
            ElasticFleet(one.fleet, one.trace, one.pools, chosen(deployment), limits, one.slo.every_s)
        )
    runs = simulate_together(parts, judged[0].stock)
    name = own[0][0].row.name
    days = [
        replace(
            summarize_run(one, name, run, chosen.parameters()),
            chosen=chosen,
            deployment=deployment,
            settings_count=settings_count,
        )
        for one, run, (chosen, settings_count), deployment in zip(judged, runs, own, deployments, strict=True)
    ]
    return JointRan(name, tuple(days), _paid_usd(days, terms))


def _paid_usd(parts: Sequence[Ran], terms: DayTerms) -> float:
    """The bill of all workers, on nodes that the LLMs share."""
    lives, first = [], 0
    for part in parts:
        lives += [(first + span.pool, span.asked_s, span.gone_s) for span in part.run.spans]
        first += part.run.asked.shape[1]
    return billed_usd(terms, lives)


def _find_optimum(
    judged: Sequence[DayQuestion],
    rows: Sequence[JointRan],
    terms: DayTerms,
    deadline: float,
    progress: Progress,
) -> JointOptimum:
    each = [DayRuns(one.fleet, one.trace, one.slo, one.pools, terms_of(one)) for one in judged]
    runs = joint_runs(each, terms)
    left_s = max(deadline - time.monotonic(), LEAST_OPTIMUM_S)
    cheapest = cheapest_day(runs, time_limit_s=left_s, progress=progress)
    parts = [
        summarize_run(one, OPTIMUM, part.run, {})
        for one, part in zip(judged, cheapest.best.parts, strict=True)
    ]
    best, status, bound_usd = (
        JointRan(OPTIMUM, tuple(parts), cheapest.best.usd),
        cheapest.status,
        cheapest.bound_usd,
    )
    cheaper = min((row for row in rows if row.keeps), key=lambda row: row.usd, default=None)
    if cheaper is not None and cheaper.usd < best.usd:
        renamed = tuple(
            replace(part, name=OPTIMUM, parameters={}, settings_count=1) for part in cheaper.parts
        )
        status = f"what {cheaper.name} did, which changes sizes at other moments than the grid's"
        best, bound_usd = replace(cheaper, name=OPTIMUM, parts=renamed), min(bound_usd, cheaper.usd)
    shares = []
    for part, own, one in zip(best.parts, runs.columns, each, strict=True):
        proved_usd = one.least_paid().usd
        sizes = cheapest.best.workers[:, own.start : own.stop]
        why = f"its part of what is best for all: {status}"
        bound = min(proved_usd, part.usd)
        shares.append(Optimum(part, terms.edges_s, sizes, bound, proved_usd, why))
    return JointOptimum(best, tuple(shares), bound_usd, cheapest.proved_usd, status)
