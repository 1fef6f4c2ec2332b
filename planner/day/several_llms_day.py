"""Simulates a day of several LLMs that share one stock of GPUs.

Each LLM has its own pools and its own controller; all controllers run at the same time. At no moment do the
workers of all LLMs take more GPUs than the stock has: a worker that finds no free GPU waits for one. There is
one bill and one optimum for all LLMs: where their peaks come at different hours, one LLM takes the GPUs that
another gives back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.day.controllers.table import ChosenController
from planner.day.day_study import (
    LEAST_OPTIMUM_S,
    OPTIMUM,
    ControllerDay,
    DayAnswer,
    DayQuestion,
    MissTerms,
    Optimum,
    controller_status,
    run_controllers,
    score_day,
    simulate_controllers,
    split_questions,
    summarize_run,
    terms_of,
    warnings_of,
)
from planner.day.search.day_optimum import cheapest_day
from planner.day.search.day_runs import DayRuns
from planner.day.search.several_llms_runs import JointRuns, joint_terms
from planner.domain import stock_name
from planner.errors import PlannerError
from planner.search.oracle.work_clock import WORK_S, now_s
from planner.search.problem.plan_problem import Progress, report_nothing
from planner.solvers.pool_sizes import DayTerms, billed_usd, most_gpus_in_use, most_paid_gpus
from planner.units import show_s

# An LLM without requests for more than a step and this share of the day, at its begin or end, is named.
LONG_IDLE_FRAC = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class JointDay:
    """The day of all LLMs under one controller: the day of each in `llm_days`, and the bill for all.

    The bill counts whole nodes once, which the LLMs share.
    """

    name: str
    llm_days: tuple[ControllerDay, ...]
    usd: float
    most_gpus: Mapping[str, int]  # The most GPUs in use at once, by type.
    # The most GPUs paid at once, by type; where only whole nodes are sold, all GPUs of these nodes.
    paid_gpus: Mapping[str, int]

    @property
    def missed_windows(self) -> int:
        """How many windows of all LLMs miss their SLO."""
        return sum(llm_day.missed_windows for llm_day in self.llm_days)

    @property
    def windows(self) -> int:
        """How many windows all LLMs have."""
        return sum(len(llm_day.windows) for llm_day in self.llm_days)

    @property
    def keeps(self) -> bool:
        """Whether every LLM keeps all of its windows."""
        return all(llm_day.keeps for llm_day in self.llm_days)


@dataclass(frozen=True, slots=True, eq=False)
class JointOptimum:
    """The optimum of all LLMs, with fields as in `day_study.Optimum`; `llm_days` has that of each LLM."""

    day: JointDay
    llm_days: tuple[Optimum, ...]
    bound_usd: float
    proved_usd: float
    status: str


@dataclass(frozen=True, slots=True, eq=False)
class JointAnswer:
    """The days of all controllers in `rows`, the static fleets first.

    `by_llm` has the answer of every LLM by its name; its winner is the controller that is best for all LLMs
    together. `no_optimum` is the reason why there is no optimum. `left_out` has the controllers that could
    not run, with the reason.
    """

    by_llm: Mapping[str, DayAnswer]
    rows: tuple[JointDay, ...]
    optimum: JointOptimum | None
    no_optimum: str
    stock: Mapping[str, int]
    left_out: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    # Where GPUs are paid all day: the controllers once more, with only the GPUs that the optimum pays for.
    on_least_gpus: tuple[JointDay, ...] = ()

    @property
    def static(self) -> JointDay:
        """The day of the fleets that keep their sizes."""
        return self.rows[0]

    @property
    def winner(self) -> JointDay:
        """The best day; each LLM's missed windows count by that LLM's own terms."""
        questions = [answer.question for answer in self.by_llm.values()]
        return _best_row(self.rows, questions)

    def regret_usd(self, row: JointDay) -> float | None:
        """The cost of a day above the optimum; None without an optimum."""
        return None if self.optimum is None else row.usd - self.optimum.day.usd


def _best_row(rows: Sequence[JointDay], questions: Sequence[DayQuestion]) -> JointDay:
    """The best day: each LLM's day is scored by `score_day`, and the scores are added up."""
    miss_terms = [
        MissTerms.of(question, llm_day) for question, llm_day in zip(questions, rows[0].llm_days, strict=True)
    ]

    def score(row: JointDay) -> tuple[int, float, int]:
        scores = [score_day(llm_day, terms) for llm_day, terms in zip(row.llm_days, miss_terms, strict=True)]
        too_many, usd, missed = (sum(column) for column in zip(*scores, strict=True))
        # The common bill replaces the bills of single LLMs, which count shared nodes more than once.
        return int(too_many), usd + row.usd - sum(llm_day.usd for llm_day in row.llm_days), int(missed)

    return min(rows, key=score)


def study_day_together(
    questions: Mapping[str, DayQuestion],
    chosen: Sequence[ChosenController],
    *,
    most_work_s: float = WORK_S,
    optimum: bool = True,
    progress: Progress = report_nothing,
) -> JointAnswer:
    """Simulate the static fleets and every controller, and find the optimum of all LLMs.

    All questions have the same stock. Where a question has training traffic, parameters are tuned for each
    LLM by itself; `most_work_s` of the search's clock (work_clock.py) limits tuning and the optimum. The day
    lasts from 0 to the last arrival of all. Raises InputError where traffic cannot be split as asked.
    """
    deadline = now_s() + most_work_s
    until_s = max(float(question.trace.arrival_s[-1]) for question in questions.values())
    questions = {llm: replace(question, until_s=until_s) for llm, question in questions.items()}
    llm_questions = list(questions.values())
    stock = llm_questions[0].stock
    _, judged = split_questions(llm_questions)
    terms = joint_terms([terms_of(question) for question in judged], stock, judged[0].step_s)
    inputs, days, left_out = run_controllers(llm_questions, chosen, deadline, progress)
    rows = [_joint_day(day[0].name, day, terms) for day in days]
    best_day, no_optimum = None, "it was not requested"
    if optimum:
        progress("the optimum: the cheapest sizes of all pools that keep every window, knowing the traffic")
        try:
            best_day = _find_optimum(judged, rows, terms, deadline, progress)
        except PlannerError as error:  # No optimum, or no time for it: the controllers' days are an answer.
            no_optimum = str(error)
    on_least_gpus = list[JointDay]()
    if best_day is not None and terms.is_paid_all_day:
        limited = _limit_to_paid_gpus(best_day, judged)
        # The first row is the static fleet, whose sizes a limit cannot change.
        for row in rows[1:]:
            controllers = [llm_day.chosen for llm_day in row.llm_days if llm_day.chosen is not None]
            limited_days = simulate_controllers(limited, controllers, inputs.knowledge_of(controllers[0]))
            on_least_gpus.append(_joint_day(row.name, limited_days, terms))
    winner = _best_row(rows, llm_questions)
    answers = {}
    for llm_index, (llm, question) in enumerate(questions.items()):
        own_rows = tuple(row.llm_days[llm_index] for row in rows)
        answers[llm] = DayAnswer(
            question=question,
            judged=judged[llm_index].trace,
            rows=own_rows,
            optimum=None if best_day is None else best_day.llm_days[llm_index],
            no_optimum=no_optimum,
            capacity=inputs.knowledge[llm_index].capacity,
            left_out=left_out,
            warnings=warnings_of(question, inputs.trains[llm_index], own_rows),
            winner_name=winner.name,
        )
    idle = [line for llm, question in questions.items() for line in _idle_warnings(llm, question)]
    warnings = dict.fromkeys((*idle, *(line for answer in answers.values() for line in answer.warnings)))
    return JointAnswer(
        by_llm=answers,
        rows=tuple(rows),
        optimum=best_day,
        no_optimum=no_optimum,
        stock=stock,
        left_out=left_out,
        warnings=tuple(warnings),
        on_least_gpus=tuple(on_least_gpus),
    )


def _idle_warnings(llm: str, question: DayQuestion) -> list[str]:
    """A warning of a long time without requests of an LLM before its first or after its last."""
    first_s, last_s = float(question.trace.arrival_s[0]), float(question.trace.arrival_s[-1])
    idle = (("after the day begins", first_s), ("before the day ends", question.until_s - last_s))
    return [
        f"{llm} has no request for {show_s(idle_s)} {when}, by the clocks of its trace and the others'"
        for when, idle_s in idle
        if idle_s > max(question.step_s, LONG_IDLE_FRAC * question.until_s)
    ]


def _limit_to_paid_gpus(optimum: JointOptimum, judged: Sequence[DayQuestion]) -> list[DayQuestion]:
    """The questions with only the GPUs that the optimum pays for. Days begin with the optimum's sizes."""
    limited = []
    for question, llm_day in zip(judged, optimum.llm_days, strict=True):
        run = llm_day.day.run
        initial_sizes = [
            sum(span.pool == p and span.ready_s <= 0 for span in run.spans)
            for p in range(len(question.pools))
        ]
        pools = [
            replace(pool, first=first) for pool, first in zip(question.pools, initial_sizes, strict=True)
        ]
        limited.append(replace(question, pools=tuple(pools), stock=dict(optimum.day.paid_gpus)))
    return limited


def _joint_day(name: str, llm_days: Sequence[ControllerDay], terms: DayTerms) -> JointDay:
    """The day of all LLMs, with the bill of all workers on nodes that they share."""
    # `terms` has the pools of all LLMs one after another.
    lives, first_pool = [], 0
    for llm_day in llm_days:
        lives += [(first_pool + span.pool, span.requested_s, span.gone_s) for span in llm_day.run.spans]
        first_pool += llm_day.run.requested_sizes.shape[1]
    gpus = dict.fromkeys(stock_name(pool.gpu) for pool in terms.pools)
    most_gpus = {gpu: most_gpus_in_use(terms, lives, terms.pools_on_gpu(gpu)) for gpu in gpus}
    paid_gpus = {gpu: most_paid_gpus(terms, lives, terms.pools_on_gpu(gpu)) for gpu in gpus}
    return JointDay(name, tuple(llm_days), billed_usd(terms, lives), most_gpus, paid_gpus)


def _find_optimum(
    judged: Sequence[DayQuestion],
    rows: Sequence[JointDay],
    terms: DayTerms,
    deadline: float,
    progress: Progress,
) -> JointOptimum:
    """The cheapest known day of all LLMs together: the cheapest on the grid, or the day of a controller,
    which may change sizes between the moments of the grid and so cost less.
    """
    llm_runs = [
        DayRuns(question.fleet, question.trace, question.slo, question.optimum_pools, terms_of(question))
        for question in judged
    ]
    runs = JointRuns(llm_runs, terms)
    cheapest = cheapest_day(runs, deadline=max(deadline, now_s() + LEAST_OPTIMUM_S), progress=progress)
    llm_days = [
        summarize_run(question, OPTIMUM, llm_day.run, {})
        for question, llm_day in zip(judged, cheapest.best.llm_days, strict=True)
    ]
    best = _joint_day(OPTIMUM, llm_days, terms)
    status, bound_usd = cheapest.status, cheapest.bound_usd
    described_days = [(row, controller_status(row.name)) for row in rows if row.keeps]
    if (of_each := _cheapest_of_each(best, rows, terms)) is not None:
        described_days.append(
            (
                of_each,
                "for each LLM the cheaper of a controller's day and sizes that change at steps of `every`",
            )
        )
    cheapest_row, words = min(described_days, key=lambda described: described[0].usd, default=(best, ""))
    if cheapest_row.usd < best.usd:
        renamed = tuple(
            replace(llm_day, name=OPTIMUM, parameters={}, settings_count=1)
            for llm_day in cheapest_row.llm_days
        )
        status = words
        best, bound_usd = (
            replace(cheapest_row, name=OPTIMUM, llm_days=renamed),
            min(bound_usd, cheapest_row.usd),
        )
    llm_optima = []
    for llm_day, columns, own_runs in zip(best.llm_days, runs.columns, llm_runs, strict=True):
        proved_usd = own_runs.least_paid().usd
        llm_optima.append(
            Optimum(
                day=llm_day,
                edges_s=terms.edges_s,
                sizes=cheapest.best.workers[:, columns.start : columns.stop],
                bound_usd=min(proved_usd, llm_day.usd),
                proved_usd=proved_usd,
                status=f"its part of what is best for all: {status}",
            )
        )
    return JointOptimum(best, tuple(llm_optima), bound_usd, cheapest.proved.usd, status)


def _cheapest_of_each(best: JointDay, rows: Sequence[JointDay], terms: DayTerms) -> JointDay | None:
    """The day in which each LLM has its cheapest day among `best` and `rows` that keeps its windows.

    None if these days need more GPUs together than there are, or if no day keeps the windows of some LLM.
    """
    keeping_days = [
        [day.llm_days[llm_index] for day in (best, *rows) if day.llm_days[llm_index].keeps]
        for llm_index in range(len(best.llm_days))
    ]
    if not all(keeping_days):
        return None
    days = [min(llm_days, key=lambda llm_day: llm_day.usd) for llm_days in keeping_days]
    of_each = _joint_day(OPTIMUM, days, terms)
    is_within = all(count <= terms.stock.get(gpu, count) for gpu, count in of_each.paid_gpus.items())
    return of_each if is_within else None
