"""A day of traffic on a fleet whose pools change: what each controller costs, and which windows it misses.

The static fleet, which keeps its sizes all day, and the controllers are simulated on the same requests. The
optimum is the cheapest sequence of pool sizes that keeps the SLO in every window, found by a search that
knows all requests in advance (planner/day/search/day_optimum.py). A controller's regret is what it costs
above the optimum. With `train_frac`, parameters are chosen on the first part of the traffic, and all days are
judged on the rest, which only the optimum knows in advance.

The best parameters, and the best controller, have the lowest bill plus the cost of missed windows. By default
a missed window costs what the static fleet pays for a window. With `missed_frac` the best is instead the
cheapest of those that miss no larger share of the windows; where all miss more, the one that misses fewest.

The search for the optimum changes sizes only on a grid of times. A controller may change them at any time. If
its day keeps every window and costs less than what the search found, that day becomes the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from planner.day.controllers.knowledge import CapacityTable, History, Knowledge
from planner.day.controllers.oscillation import Oscillation, find_oscillations
from planner.day.controllers.table import CONTROLLERS, ChosenController, parse_controller, settings_variants
from planner.day.search.any_moment_bound import any_moment_bound
from planner.day.search.capacity import capacity_table, engine_profile
from planner.day.search.causal_bound import CausalBound, causal_bound, reacting_bound
from planner.day.search.day_optimum import cheapest_day
from planner.day.search.day_runs import DayRuns, day_terms, step_edges_s
from planner.day.search.finer_day import finer_day
from planner.day.search.load_rules import fit_load_rules
from planner.domain import OWNED, Slo, payment_suffix
from planner.errors import InputError, PlannerError
from planner.fleet import Fleet
from planner.parallel import executors
from planner.search.oracle.deterministic_parallel import charge_effort
from planner.search.oracle.fleet_oracle import request_effort
from planner.search.oracle.work_clock import EFFORT_S, WORK_S, is_over, is_time_limit_reached, now_s
from planner.search.problem.plan_problem import Progress, report_nothing
from planner.simulator.elastic import ElasticFleet, ElasticPool, ElasticRun, simulate_together
from planner.simulator.layout import FINISHED
from planner.simulator.simulation import Floats, Ints, Simulation
from planner.simulator.slo_verdict import WindowResult, attained_in_windows, in_windows, keeps_all
from planner.solvers.master import FleetLimits
from planner.solvers.pool_sizes import DayTerms, billed_usd
from planner.solvers.whole_nodes import node_of
from planner.traffic.described import Description
from planner.traffic.trace import Trace, window_numbers
from planner.units import DAY_S, HOUR_S, show_s, show_share

STATIC, CRON, OPTIMUM = "static", "cron", "optimum"
# Names for conditions that are no single limit: an SLO's attainment, and that requests are served at all.
ALL_AT_ONCE, SERVED = "all limits at once", "served"
# The values below were set by hand.
BUCKET_S = 300.0  # Controllers see a history of arrivals, counted in buckets of this width.
# The search on the grid for the optimum gets at least this long on the search's clock (work_clock.py).
LEAST_OPTIMUM_S = 20.0
MOST_STEPS = 20_000  # A grid with more steps than this is refused; its search would not end in time.
SHORT_DAY_S = 12 * HOUR_S  # A warning says that shorter traffic is not a day.
WHOLE_ROUNDING = 1e-9  # A number of windows that is below a whole one by at most this counts as whole.
MOST_VARIANTS = 40  # Tuning simulates at most this many settings of one controller.


@dataclass(frozen=True, slots=True, eq=False)
class DayQuestion:
    """The question of a day: a fleet with its static sizes, how its pools may change, the SLO with its
    windows, and the traffic.

    `unit_s` is the unit of billing (0: by the second), `step_s` the length of the steps between which the
    optimum changes sizes, and `stock` has the GPUs that all pools share, as `FleetLimits` counts them.
    """

    fleet: Fleet
    pools: tuple[ElasticPool, ...]
    slo: Slo
    trace: Trace
    unit_s: float
    step_s: float
    train_frac: float = 0.0
    missed_usd: float | None = None  # The cost of a missed window; None: see `MissTerms.of`.
    missed_frac: float | None = None  # The share of windows that may be missed; None: misses cost USD.
    start_notes: tuple[str, ...] = ()  # The sources of the start-up times.
    fleet_note: str = ""  # The origin of the fleet, if it was not given.
    stock: Mapping[str, int] = field(default_factory=dict)
    is_paid_all_day: bool = False  # Whether the peak number of GPUs is paid all day (several LLMs).
    sleep_level: int = 0  # The level of vLLM's sleep mode: 1 or 2, or 0 for workers that start anew.
    sleep_notes: tuple[str, ...] = ()  # What sleeping workers occupy beside GPUs, in sentences.
    warnings: tuple[str, ...] = ()  # What the question asks that the days do not heed, in sentences.
    is_least_given: bool = False  # Whether the question itself says how many workers every pool has at least.
    until_s: float = 0.0  # When the day ends, if later than the last arrival (several LLMs).

    @property
    def optimum_pools(self) -> tuple[ElasticPool, ...]:
        """The least and the most workers of each pool, as the optimum may choose them.

        Unless the question gives the least, a paid pool may be empty beside an owned pool of the same role,
        which costs nothing and keeps its least. Controllers keep the least of every pool: most read only the
        metrics of their own pool, so they would never start a worker in an empty one.
        """
        if self.is_least_given:
            return self.pools
        roles = [pool.role for pool in self.fleet.pools]
        are_owned = [payment_suffix(pool.type.gpu.name) == OWNED for pool in self.fleet.pools]
        rows = list(zip(roles, are_owned, self.pools, strict=True))
        owned_roles = {role for role, is_owned, elastic in rows if is_owned and elastic.least}
        return tuple(
            replace(elastic, least=0) if role in owned_roles and not is_owned else elastic
            for role, is_owned, elastic in rows
        )

    @property
    def window_s(self) -> float:
        """The length of the SLO's windows [s], which every question of a day has."""
        assert self.slo.every_s is not None
        return self.slo.every_s


@dataclass(frozen=True, slots=True)
class WindowVerdict:
    """The verdict of one window of the SLO.

    `holds` is True if every limit and the attainment, if any, are kept, and every request is served.
    `short_limit` names the limit that is kept worst: of the limits that fail, or of all where none fails, the
    one with the smallest share of values within it (`kept_frac`). SERVED counts as a limit that requests
    miss if they are rejected or never finished.
    """

    start_s: float
    end_s: float
    holds: bool
    short_limit: str
    kept_frac: float

    @property
    def kept_text(self) -> str:
        """The share that keeps the short limit, as the end of a sentence."""
        kept = "are served" if self.short_limit == SERVED else f"keep {self.short_limit}"
        return f"{show_share(self.kept_frac)} {kept}"


@dataclass(frozen=True, slots=True)
class ChangeEffect:
    """The effect of one change of a pool's size, from `before` to `after` workers; `pool` is an index.

    `rerouted` bounds from above how many requests lost their worker when it was stopped (`_count_rerouted`).
    `late` requests arrived while new workers were starting, and missed a limit; a request counts only for the
    earliest change whose workers were starting then.
    """

    time_s: float
    pool: int
    before: int
    after: int
    rerouted: int
    late: int


@dataclass(frozen=True, slots=True, eq=False)
class ControllerDay:
    """The simulated day of one controller: its parameters as a document has them, the bill, the verdict of
    every window, and the effects of its changes.

    An oscillation is growth of a pool that was taken back within one start-up time.
    """

    name: str
    parameters: Mapping[str, object]
    run: ElasticRun
    usd: float
    gpu_hours: float
    windows: tuple[WindowVerdict, ...]
    effects: tuple[ChangeEffect, ...]
    oscillations: tuple[Oscillation, ...] = ()
    chosen: ChosenController | None = None  # None for a fixed sequence of sizes.
    knowledge: Knowledge | None = None
    settings_count: int = 1  # The number of settings simulated on the training part.

    @property
    def missed_windows(self) -> int:
        """How many windows miss the SLO."""
        return sum(not each.holds for each in self.windows)

    @property
    def edges_s(self) -> Floats:
        """The edges [s] of the windows, (V + 1,) for V windows."""
        return np.array([*(each.start_s for each in self.windows), self.windows[-1].end_s])

    @property
    def paid_hours(self) -> float:
        """The hours that are billed: from the start of the traffic to the end of its last request."""
        return self.run.end_s / HOUR_S

    @property
    def keeps(self) -> bool:
        """Whether every window holds and every request was served."""
        return not self.missed_windows and self.run.simulation.complete

    @property
    def worst(self) -> WindowVerdict:
        """The window with the lowest `kept_frac`: of those that fail, or of all where none fails."""
        return min(self.windows, key=lambda each: (each.holds, each.kept_frac))


@dataclass(frozen=True, slots=True, eq=False)
class Optimum:
    """The cheapest known sequence of sizes that keeps every window, of P pools in T steps.

    Pools have the `sizes` (T, P) between `edges_s` (T + 1,); where the day of a controller is the optimum,
    these are the best sequence that the search found itself. No sequence on the grid costs less than
    `bound_usd`, and no controller, whenever it changes sizes, less than `proved_usd`. `status` says whether a
    cheaper sequence may exist.

    `causal` bounds the cost of controllers that know only the past, `reacting` that of controllers that also
    know all of a window when it begins; they are None for pools that have too many sizes. `any_moment_usd` is
    a higher bound than `proved_usd`, valid if more workers never hurt; None where it was not computed.
    """

    day: ControllerDay
    edges_s: Floats
    sizes: Ints
    bound_usd: float
    proved_usd: float
    status: str
    causal: CausalBound | None = None
    reacting: CausalBound | None = None
    any_moment_usd: float | None = None

    @property
    def usd(self) -> float:
        """What the optimum's day costs."""
        return self.day.usd


@dataclass(frozen=True, slots=True)
class FleetDay:
    """The costs of the fleet `label`, in words `fleet`: static, under its best controller, at its optimum.

    A cost is None where the day was not simulated, and `why` has the reason.
    """

    label: str
    fleet: str
    standing_usd: float | None = None  # The cost of the static fleet; a key of day.json.
    controller: str = ""  # The best controller; `usd` and `missed` windows are those of its day.
    usd: float | None = None
    missed: int = 0
    optimum_usd: float | None = None
    why: str = ""
    is_chosen: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ChangingTypes:
    """The optimum if worker types, and prefill and decode splits, may change within the day.

    `question` has the pools of all fleets that were compared, each of which may be empty.
    `single_label` is the fleet with the cheapest optimum of its own, which costs `single_usd`. Where
    `optimum` is None, `why` has the reason.
    """

    question: DayQuestion | None = None
    optimum: Optimum | None = None
    single_label: str = ""
    single_usd: float = math.nan
    why: str = ""

    @property
    def saved_usd(self) -> float:
        """What changing types saves against the cheapest single fleet, both with the optimum's sizes."""
        return 0.0 if self.optimum is None else max(self.single_usd - self.optimum.usd, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class DayAnswer:
    """All simulated days on the judged traffic, the static fleet first.

    Where `optimum` is None, `no_optimum` has the reason. `left_out` has the controllers that were not
    simulated, each with its reason.
    """

    question: DayQuestion
    judged: Trace
    rows: tuple[ControllerDay, ...]
    optimum: Optimum | None
    no_optimum: str
    capacity: CapacityTable | None
    left_out: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    winner_name: str | None = None  # None: the best by `score_day`. several_llms_day.py sets it.
    fleets: tuple[FleetDay, ...] = ()  # The alternatives; empty where none was compared.
    types: ChangingTypes | None = None  # None where it was not searched whether types should change.

    @property
    def static(self) -> ControllerDay:
        """The day of the static fleet."""
        return self.rows[0]

    @property
    def missed_usd(self) -> float:
        """The cost that one missed window adds to a day."""
        return self.miss_terms.usd

    @property
    def miss_terms(self) -> MissTerms:
        """How missed windows count in the comparison of these days."""
        return MissTerms.of(self.question, self.static)

    @property
    def winner(self) -> ControllerDay:
        """The best day (`score_day`); of equal ones the first, so the static fleet before any controller."""
        if self.winner_name is not None:
            return next(row for row in self.rows if row.name == self.winner_name)
        return min(self.rows, key=lambda row: score_day(row, self.miss_terms))

    def regret_usd(self, row: ControllerDay) -> float | None:
        """The cost above the optimum; negative for a controller that is cheaper because it misses windows."""
        return None if self.optimum is None else row.usd - self.optimum.usd


def study_day(
    question: DayQuestion,
    chosen: Sequence[ChosenController],
    *,
    most_work_s: float = WORK_S,
    optimum: bool = True,
    progress: Progress = report_nothing,
    watch: Callable[[DayAnswer], None] = report_nothing,
) -> DayAnswer:
    """Simulate the static fleet, every controller and the optimum on the same traffic.

    `most_work_s` of the search's clock (work_clock.py) limits the choice of parameters and the optimum.
    `watch` is called with the answer before the optimum is searched.
    Raises InputError where the traffic cannot be split as `train_frac` says, or is of a kind that changing
    pools cannot serve.
    """
    deadline = now_s() + most_work_s
    progress(f"{len(question.trace):,} requests in {question.trace.duration_s / HOUR_S:.3g} h")
    inputs, days, left_out = run_controllers([question], chosen, deadline, progress)
    (judged_question,), (train,), (knowledge,) = inputs.questions, inputs.trains, inputs.knowledge
    rows = [row for (row,) in days]
    answer = DayAnswer(
        question,
        judged_question.trace,
        tuple(rows),
        None,
        "it was not requested",
        knowledge.capacity,
        left_out,
        warnings_of(question, train, rows),
    )
    watch(answer)
    if optimum:
        best_day, why = None, answer.no_optimum
        progress("the optimum: the cheapest sizes that keep every window, knowing the traffic")
        try:
            best_day = best_sizes(judged_question, rows, deadline=deadline, progress=progress)
        except PlannerError as error:  # No optimum, or no time for it: the controllers' days are an answer.
            why = str(error)
        warnings = warnings_of(question, train, rows)  # Again: a search may have ended by the clock.
        answer = replace(answer, optimum=best_day, no_optimum=why, warnings=warnings)
    return answer


@dataclass(frozen=True, slots=True, eq=False)
class DayInputs:
    """What a process needs to run any controller of a day; tuples have an entry for each LLM.

    The questions have the judged traffic; `trains` is the traffic on which parameters are chosen, if any.
    Tuning may simulate `most_settings` of each controller.
    """

    questions: tuple[DayQuestion, ...]
    trains: tuple[Trace | None, ...]
    knowledge: tuple[Knowledge, ...]
    miss_terms: tuple[MissTerms, ...]
    most_settings: int

    def knowledge_of(self, chosen: ChosenController) -> list[Knowledge]:
        """What this controller may know of each LLM (the function `knowledge_of`)."""
        return [
            knowledge_of(chosen, known, question.trace)
            for known, question in zip(self.knowledge, self.questions, strict=True)
        ]


def run_controllers(
    questions: Sequence[DayQuestion], chosen: Sequence[ChosenController], deadline: float, progress: Progress
) -> tuple[DayInputs, list[list[ControllerDay]], tuple[tuple[str, str], ...]]:
    """Simulate the static fleets, and every controller after it is tuned where traffic trains.

    All LLMs of the questions share one stock. Returns what the controllers were given; a row of days, one for
    each LLM, for every controller, the static fleets first; and the controllers left out with their reasons.
    """
    trains, judged = split_questions(questions)
    progress("how much traffic each number of workers carries")
    # The controllers' tables and rules are made of the traffic that trains, if there is some.
    knowledge = [
        gather_knowledge(question, judged_question.trace if train is None else train, train)
        for question, train, judged_question in zip(questions, trains, judged, strict=True)
    ]
    progress(f"{STATIC}: the day")
    rows = [simulate_controllers(judged, [parse_controller(STATIC, None)] * len(judged), knowledge)]
    inputs = DayInputs(
        tuple(judged),
        tuple(trains),
        tuple(knowledge),
        tuple(map(MissTerms.of, judged, rows[0])),
        _most_settings(judged, trains, len(chosen), deadline - now_s()),
    )
    left_out = list[tuple[str, str]]()
    others = [each for each in chosen if each.row.name != STATIC]  # The static day is in `rows` already.
    for each, (row, why_not) in zip(others, _run_each(inputs, others, progress), strict=True):
        if row is None:
            left_out.append((each.row.name, why_not))
        else:
            rows.append(row)
    charge_effort(sum(_effort_of_days(judged, trains, row) for row in rows))
    return inputs, rows, tuple(left_out)


def _most_settings(
    judged: Sequence[DayQuestion], trains: Sequence[Trace | None], controllers: int, left_s: float
) -> int:
    """How many settings of each controller may be simulated in `left_s` of the search's clock, at least
    one. It is the same in whichever process a controller runs.
    """
    training = sum(
        _day_effort(question, train)
        for question, train in zip(judged, trains, strict=True)
        if train is not None
    )
    most = left_s / (EFFORT_S * max(training * controllers, 1))
    return max(int(min(most, MOST_VARIANTS)), 1)


def _effort_of_days(
    judged: Sequence[DayQuestion], trains: Sequence[Trace | None], row: Sequence[ControllerDay]
) -> int:
    """The effort of a controller's days (one for each LLM), and of its tuning."""
    effort = 0
    for question, train, day in zip(judged, trains, row, strict=True):
        effort += _day_effort(question, question.trace)
        if train is not None:
            effort += day.settings_count * _day_effort(question, train)
    return effort


def _day_effort(question: DayQuestion, trace: Trace) -> int:
    """The effort of simulating these requests once on the question's fleet."""
    return len(trace) * request_effort(question.fleet, trace)


def _run_each(
    inputs: DayInputs, chosen: Sequence[ChosenController], progress: Progress
) -> list[tuple[list[ControllerDay] | None, str]]:
    """For each controller, in order, its days and ""; or None and the reason why they could not run.

    Days run one by one in this process, or in parallel in the processes of an executor.
    """
    if executors.current_crew() is None:
        rows = []
        for k, each in enumerate(chosen, 1):
            progress(f"{each.row.name}: the day ({k} of {len(chosen)} controllers)")
            rows.append(_run_controller(inputs, each, progress))
        return rows
    progress(f"{', '.join(each.row.name for each in chosen)}: the day")
    rows = []
    controller_runs = executors.run_items(_run_to_send, chosen, shared=inputs)
    for each, (row, settings, why_not) in zip(chosen, controller_runs, strict=True):
        if row is not None:
            row = [
                replace(day, chosen=replace(each, **tuned), knowledge=known)
                for day, tuned, known in zip(row, settings, inputs.knowledge_of(each), strict=True)
            ]
        rows.append((row, why_not))
    return rows


def _run_to_send(
    inputs: DayInputs, chosen: ChosenController
) -> tuple[list[ControllerDay] | None, list[dict[str, Any]], str]:
    """What a process of the executor sends back: the days, the tuned settings for each day, and "". Or None,
    no settings, and the reason.

    Days come without the controller and the knowledge, which the caller has already.
    """
    row, why_not = _run_controller(inputs, chosen, report_nothing)
    settings = [
        {"settings": day.chosen.settings, "by_role": day.chosen.by_role} for day in row or () if day.chosen
    ]
    return row and [replace(day, chosen=None, knowledge=None) for day in row], settings, why_not


def _run_controller(
    inputs: DayInputs, chosen: ChosenController, progress: Progress
) -> tuple[list[ControllerDay] | None, str]:
    """The days of one controller, tuned first where traffic trains, and ""; or None and the reason."""
    try:
        tuned = [
            (chosen, 1)
            if train is None
            else tune_controller(
                replace(question, trace=train), chosen, known, terms, inputs.most_settings, progress
            )
            for question, train, known, terms in zip(
                inputs.questions, inputs.trains, inputs.knowledge, inputs.miss_terms, strict=True
            )
        ]
        controllers = [controller for controller, _ in tuned]
        days = simulate_controllers(inputs.questions, controllers, inputs.knowledge_of(chosen))
        return [replace(day, settings_count=n) for day, (_, n) in zip(days, tuned, strict=True)], ""
    except InputError as error:
        return None, str(error)


def best_sizes(
    question: DayQuestion,
    rows: Sequence[ControllerDay],
    *,
    deadline: float = math.inf,
    progress: Progress = report_nothing,
) -> Optimum:
    """The cheapest known sequence of sizes that keeps every window.

    The search on the grid finds one, `finer_day` moves its changes to other moments, and the cheapest
    controller that keeps all windows replaces that sequence if the controller's day costs less.

    The `deadline` is on the search's clock (work_clock.py). Raises InfeasibleError where a window fails with
    the most workers all day.
    """
    fleet, trace, slo, pools = question.fleet, question.trace, question.slo, question.optimum_pools
    terms = terms_of(question)
    runs = DayRuns(fleet, trace, slo, pools, terms)
    cheapest = cheapest_day(runs, deadline=max(deadline, now_s() + LEAST_OPTIMUM_S), progress=progress)
    best, status = summarize_run(question, OPTIMUM, cheapest.best.run, {}), cheapest.status
    controller = min((row for row in rows if row.keeps), key=lambda row: row.usd, default=None)
    bound_usd, edges_s, sizes = cheapest.bound_usd, terms.edges_s, cheapest.best.workers
    bound = any_moment_bound(runs, cheapest.cuts, most_usd=best.usd, deadline=deadline, progress=progress)
    finer = finer_day(runs, bound.lives, sizes, best.usd, progress, deadline)
    if finer is not None:
        status = f"its sizes change at any moment; otherwise {best.usd:,.2f} USD: {status}"
        best = summarize_run(question, OPTIMUM, finer.day.run, {})
        edges_s, sizes = np.append(finer.times_s, terms.edges_s[-1]), finer.workers
    if controller is not None and controller.usd < best.usd:
        best = replace(controller, name=OPTIMUM, parameters={}, settings_count=1)
        status = controller_status(controller.name)
    return Optimum(
        best,
        edges_s,
        sizes,
        min(bound_usd, best.usd),
        cheapest.proved.usd,
        status,
        causal_bound(runs),
        reacting_bound(runs),
        # A day that costs less than this bound refutes its assumption that more workers never hurt.
        bound.usd if bound.usd <= best.usd else cheapest.proved.usd,
    )


def controller_status(name: str) -> str:
    """The status of an optimum that is the day of a controller."""
    return f"the sizes of {name}: none were found that cost less"


def terms_of(question: DayQuestion) -> DayTerms:
    """The windows and the billing terms of the question, as the search for the optimum needs them."""
    terms = day_terms(
        question.fleet,
        question.trace,
        question.slo,
        question.optimum_pools,
        step_s=question.step_s,
        unit_s=question.unit_s,
        stock=question.stock,
        is_paid_all_day=question.is_paid_all_day,
    )
    if question.until_s <= terms.edges_s[-1]:
        return terms
    return replace(terms, edges_s=step_edges_s(question.until_s, question.step_s))


def split_questions(questions: Sequence[DayQuestion]) -> tuple[list[Trace | None], list[DayQuestion]]:
    """For each question the traffic that trains, and the question with only the judged traffic.

    Raises InputError where a grid has too many steps, or traffic cannot be split.
    """
    for question in questions:
        check_step(question)
    parts = [split_training(each.trace, each.train_frac, each.until_s) for each in questions]
    judged = [
        replace(each, trace=later, until_s=(1 - each.train_frac) * each.until_s)
        for each, (_, later) in zip(questions, parts, strict=True)
    ]
    return [train for train, _ in parts], judged


def split_training(trace: Trace, train_frac: float, until_s: float = 0.0) -> tuple[Trace | None, Trace]:
    """Split the trace into the training part (None without one) and the judged part, which starts at 0 s."""
    if not train_frac:
        return None, trace
    cut_s = _training_end_s(trace, train_frac, until_s)
    first = int(np.searchsorted(trace.arrival_s, cut_s))
    if not 0 < first < len(trace):
        raise InputError(
            f"train: {100 * train_frac:g} % of {trace.name} leaves no traffic to "
            f"{'train on' if not first else 'judge by'}; choose another share"
        )
    later = trace.select(np.arange(first, len(trace)))
    return trace.select(np.arange(first)), replace(later, arrival_s=later.arrival_s - cut_s)


def _training_end_s(trace: Trace, train_frac: float, until_s: float) -> float:
    """When the training part ends, and the judged part begins, on the clock of the whole trace: at one moment
    for all LLMs of a day that lasts from 0 to `until_s`.
    """
    if until_s:
        return train_frac * until_s
    return float(trace.arrival_s[0]) + train_frac * trace.duration_s


@dataclass(frozen=True, slots=True)
class MissTerms:
    """How missed windows count where days are compared.

    Without `most_frac` each costs `usd`. With it, a day may miss this share of its windows for nothing, and
    of two days that miss more the one that misses fewer is better.
    """

    usd: float
    most_frac: float | None = None

    @classmethod
    def of(cls, question: DayQuestion, static: ControllerDay) -> MissTerms:
        """The terms of a question; `static` is the day of its static fleet. Unless the question gives the
        cost of a missed window, it is what that fleet pays for a window.
        """
        usd = static.usd / len(static.windows) if question.missed_usd is None else question.missed_usd
        return cls(usd, question.missed_frac)

    def score(self, usd: float, missed: int, windows: int) -> tuple[int, float, int]:
        """The sort key of a day: windows missed above the allowed share, cost [USD], windows missed."""
        if self.most_frac is None:
            missed_usd = self.usd * missed if missed else 0.0  # An infinite price times 0 would be NaN.
            return 0, usd + missed_usd, missed
        allowed = math.floor(self.most_frac * windows + WHOLE_ROUNDING)
        return max(missed - allowed, 0), usd, missed


def score_day(row: ControllerDay, terms: MissTerms) -> tuple[int, float, int]:
    """The sort key of a day (`MissTerms.score`); the day with the smallest key is the best."""
    return terms.score(row.usd, row.missed_windows, len(row.windows))


def simulate_controller(
    question: DayQuestion, chosen: ChosenController, knowledge: Knowledge
) -> ControllerDay:
    """The day of one controller, simulated on the question's traffic."""
    return simulate_controllers([question], [chosen], [knowledge])[0]


def simulate_controllers(
    questions: Sequence[DayQuestion], chosen: Sequence[ChosenController], knowledge: Sequence[Knowledge]
) -> list[ControllerDay]:
    """The day of each LLM under its controller, all simulated at the same time on one stock of GPUs."""
    fleets = [
        ElasticFleet(
            question.fleet,
            question.trace,
            question.pools,
            controller(known),
            question.slo.limits,
            question.slo.every_s,
            question.until_s,
        )
        for question, controller, known in zip(questions, chosen, knowledge, strict=True)
    ]
    runs = simulate_together(fleets, FleetLimits(questions[0].stock))
    return [
        replace(
            summarize_run(question, controller.row.name, run, controller.parameters()),
            chosen=controller,
            knowledge=known,
        )
        for question, controller, known, run in zip(questions, chosen, knowledge, runs, strict=True)
    ]


def summarize_run(
    question: DayQuestion, name: str, run: ElasticRun, parameters: Mapping[str, object]
) -> ControllerDay:
    """Summarize one simulated day under this name: bill, windows, changes of size and oscillations."""
    slo, pools, gpus = question.slo, question.pools, [pool.type.gpus for pool in question.fleet.pools]
    terms = terms_of(question)
    return ControllerDay(
        name,
        dict(parameters),
        run,
        usd=billed_usd(terms, ((span.pool, span.requested_s, span.gone_s) for span in run.spans)),
        gpu_hours=sum(gpus[span.pool] * (span.gone_s - span.requested_s) for span in run.spans) / HOUR_S,
        windows=window_verdicts(run.simulation, slo, run.simulation.edges_s),
        effects=effects_of_changes(run, slo),
        oscillations=find_oscillations(
            run.requested_s, run.requested_sizes, [pool.start_s for pool in pools]
        ),
    )


def tune_controller(
    question: DayQuestion,
    chosen: ChosenController,
    knowledge: Knowledge,
    miss_terms: MissTerms,
    most_settings: int,
    progress: Progress,
) -> tuple[ChosenController, int]:
    """The controller with its best settings on the question's traffic, and the number of settings simulated.

    `question` has the training traffic, and `knowledge` is of the judged day that follows. At the time limit
    on the wall clock the best settings so far are taken.
    """
    # Training begins at 0:00, and the history of the judged day ends where training does.
    history = knowledge.history and replace(knowledge.history, end_s=knowledge.clock_s)
    knowledge = replace(knowledge, clock_s=0.0, history=history)
    best, best_value, settings_count = chosen, (np.inf, np.inf, 0), 0
    for variant in list(settings_variants(chosen))[:most_settings]:
        # The first variant has the settings as given, and is simulated even after the limit. No deadline
        # (inf) on the search's clock: `most_settings` limits the work.
        if settings_count and is_over(math.inf):
            break
        row = simulate_controller(question, variant, knowledge)
        settings_count += 1
        progress(f"{chosen.row.name}: {settings_count} settings tried")
        if (value := score_day(row, miss_terms)) < best_value:
            best, best_value = variant, value
    return best, settings_count


def window_verdicts(simulation: Simulation, slo: Slo, edges_s: Floats) -> tuple[WindowVerdict, ...]:
    """The verdict of every window between these edges, from a simulation that counted per window."""
    by_name = {limit.name: in_windows(simulation, k, edges_s) for k, limit in enumerate(slo.limits)}
    if slo.attainment_frac is not None:
        by_name[ALL_AT_ONCE] = attained_in_windows(simulation, slo, edges_s)
    if (simulation.status != FINISHED).any():
        by_name[SERVED] = _served_in_windows(simulation, edges_s)
    verdicts = []
    for v in range(len(edges_s) - 1):
        in_window = {name: rows[v] for name, rows in by_name.items()}
        short = min(in_window, key=lambda name: (in_window[name].holds, in_window[name].kept_frac))
        holds, kept_frac = all(row.holds for row in in_window.values()), in_window[short].kept_frac
        verdicts.append(WindowVerdict(float(edges_s[v]), float(edges_s[v + 1]), holds, short, kept_frac))
    return tuple(verdicts)


def _served_in_windows(simulation: Simulation, edges_s: Floats) -> list[WindowResult]:
    """The share of requests that are served, by the window in which they arrived. A window holds if all its
    requests are served. A request before the first window counts in the first.
    """
    window_of, windows = window_numbers(simulation.arrival_s, edges_s), []
    for v, (start_s, end_s) in enumerate(pairwise(edges_s.tolist())):
        is_served = simulation.status[window_of == v] == FINISHED
        share = float(is_served.mean()) if len(is_served) else 1.0
        windows.append(WindowResult(start_s, end_s, math.nan, share, bool(is_served.all()), len(is_served)))
    return windows


class WorkersOverTime(NamedTuple):
    """The mean numbers of paid and of ready workers in each window, (pools, windows)."""

    paid: Floats
    ready: Floats


def workers_over_time(run: ElasticRun, pools: int, edges_s: Floats) -> WorkersOverTime:
    """The workers of a run in the windows between these edges."""
    paid, ready = np.zeros((pools, len(edges_s) - 1)), np.zeros((pools, len(edges_s) - 1))
    lengths_s = np.diff(edges_s)
    for span in run.spans:
        for workers, from_s, to_s in (
            (paid, span.requested_s, span.gone_s),
            (ready, span.ready_s, min(span.given_up_s, span.gone_s)),
        ):
            inside_s = np.minimum(to_s, edges_s[1:]) - np.maximum(from_s, edges_s[:-1])
            workers[span.pool] += np.clip(inside_s, 0.0, None) / lengths_s
    return WorkersOverTime(paid, ready)


def effects_of_changes(run: ElasticRun, slo: Slo) -> tuple[ChangeEffect, ...]:
    """The effect of every change of a pool's size by the controller, in order of time."""
    simulation, effects = run.simulation, []
    # Entry i of `late_before`: how many of the first i requests missed a limit.
    late_before = np.concatenate(([0], np.cumsum(~keeps_all(simulation, slo))))
    spans_of_pool = [
        [span for span in run.spans if span.pool == p] for p in range(run.requested_sizes.shape[1])
    ]
    # A request counts for one change only, although workers of several changes may start at the same time:
    # requests before this index have been counted.
    counted = 0
    # Decision d is one whose size of pool p differs from the size in the decision before.
    for before, p in np.argwhere(np.diff(run.requested_sizes, axis=0)).tolist():
        d = before + 1
        sizes, pool_spans, at_s = run.requested_sizes[:, p], spans_of_pool[p], float(run.requested_s[d])
        # `until_s`: when all workers that this change requested are ready.
        until_s = max((span.ready_s for span in pool_spans if span.requested_s == at_s), default=at_s)
        first, last = np.searchsorted(simulation.arrival_s, (at_s, until_s))
        first, counted = max(first, min(counted, last)), max(counted, last)
        stopped = [span for span in pool_spans if span.given_up_s == at_s and span.was_stopped]
        rerouted = _count_rerouted(simulation, np.array([span.gone_s for span in stopped]))
        late = int(late_before[last] - late_before[first])
        effects.append(ChangeEffect(at_s, p, int(sizes[d - 1]), int(sizes[d]), rerouted, late))
    return tuple(sorted(effects, key=lambda each: (each.time_s, each.pool)))


def _count_rerouted(simulation: Simulation, gone_s: Floats) -> int:
    """Count preempted requests that were in flight when a worker stopped (at the times `gone_s`).

    This is an upper bound: another worker may have preempted the request.
    """
    if not len(gone_s):
        return 0
    preempted = np.flatnonzero(simulation.preemptions)
    arrival_s, stops_s = simulation.arrival_s[preempted], np.sort(gone_s)
    end_s = arrival_s + np.nan_to_num(simulation.e2e_s[preempted], nan=np.inf)
    # A worker stopped during a request if fewer stops came before the request's arrival than before its end.
    return int((np.searchsorted(stops_s, end_s) > np.searchsorted(stops_s, arrival_s)).sum())


def _highest_rps(trace: Trace, window_s: float) -> float:
    """The highest request rate [requests/s] in a window of a trace, which is cut into consecutive windows."""
    edges_s = np.arange(trace.arrival_s[0], trace.arrival_s[-1] + window_s, window_s)
    counts = np.histogram(trace.arrival_s, edges_s)[0] if len(edges_s) > 1 else np.array([len(trace)])
    # A trace shorter than a window is one window of its own length; of 1 s at least, to divide by no 0.
    return float(counts.max() / min(window_s, max(trace.duration_s, 1.0)))


def _rate_history(trace: Trace, end_s: float) -> History:
    """The arrival rates of the training part, in whole buckets; the last one ends at `end_s`."""
    buckets = max(int((end_s - float(trace.arrival_s[0])) // BUCKET_S), 1)
    edges_s = end_s - BUCKET_S * np.arange(buckets, -1, -1)
    return History(BUCKET_S, np.histogram(trace.arrival_s, edges_s)[0] / BUCKET_S)


def gather_knowledge(question: DayQuestion, rules_trace: Trace, train: Trace | None) -> Knowledge:
    """What a controller may know: pools, limits, and the traffic before the judged part, if any (`train`).

    Its table of capacity and its rules are made of `rules_trace`. `question` has the whole traffic.
    """

    def tightest_s(*metrics: str) -> float | None:
        limits_s = [limit.limit_s for limit in question.slo.limits if limit.metric in metrics]
        return min(limits_s, default=None)

    # The end of the training part, not its last request, which may be hours earlier.
    train_end_s = (
        0.0 if train is None else _training_end_s(question.trace, question.train_frac, question.until_s)
    )
    longest_tokens = int((rules_trace.input_tokens + rules_trace.output_tokens).max())
    engines = tuple(engine_profile(pool.type, longest_tokens) for pool in question.fleet.pools)
    return Knowledge(
        pools=question.pools,
        roles=tuple(pool.role for pool in question.fleet.pools),
        prices_usd_per_h=tuple(pool.type.price_usd_per_h for pool in question.fleet.pools),
        # The time of day at which judging begins: where training ends, or at midnight.
        clock_s=train_end_s,
        ttft_s=tightest_s("ttft", "e2e"),  # A first token that comes after the limit on E2E is too late.
        tpot_s=tightest_s("tpot", "tbt"),
        capacity=capacity_table(
            question.fleet,
            rules_trace,
            question.slo,
            highest_rps=_highest_rps(rules_trace, question.window_s),
            most=[pool.most for pool in question.pools],
        ),
        engines=engines,
        gpus=tuple(pool.type.gpus for pool in question.fleet.pools),
        nodes=tuple(
            None if (node := node_of(pool.type.gpu)) is None else (node.kind, node.gpus)
            for pool in question.fleet.pools
        ),
        rules=fit_load_rules(
            question.fleet, rules_trace, question.slo, engines, most=[pool.most for pool in question.pools]
        ),
        history=None if train is None else _rate_history(train, train_end_s),
    )


def knowledge_of(chosen: ChosenController, knowledge: Knowledge, judged: Trace) -> Knowledge:
    """What this controller may know: `cron` gets a history of arrivals to make its timetable of.

    Without training traffic, the judged traffic is its own history: it begins at midnight, and the hours
    after its end have no requests.
    """
    if chosen.row.name != CRON or knowledge.history is not None:
        return knowledge
    days = max(int(np.ceil(judged.arrival_s[-1] / DAY_S)), 1)
    edges_s = np.arange(0.0, days * DAY_S + BUCKET_S / 2, BUCKET_S)
    history = History(BUCKET_S, np.histogram(judged.arrival_s, edges_s)[0] / BUCKET_S)
    return replace(knowledge, history=history)


def check_step(question: DayQuestion) -> None:
    """Refuse a grid of too many steps with an InputError."""
    steps = max(float(question.trace.arrival_s[-1]), question.until_s) / question.step_s
    if steps > MOST_STEPS:
        raise InputError(
            f"day: every: {show_s(question.step_s)} makes {steps:,.0f} steps of this traffic; at most "
            f"{MOST_STEPS:,} are searched, so give at least {show_s(steps * question.step_s / MOST_STEPS)}"
        )


def warnings_of(question: DayQuestion, train: Trace | None, rows: Sequence[ControllerDay]) -> tuple[str, ...]:
    """Everything that a reader of the answer should be warned of, in sentences. `rows` are the days."""
    warnings, trace = list(question.warnings), question.trace
    lasts_s = question.until_s or trace.duration_s
    if lasts_s < SHORT_DAY_S:
        remedy, drawn = "give or draw traffic of a whole day", trace.drawn_from
        if isinstance(drawn, Description):
            curve_s = drawn.every_s * len(drawn.rate_rps)
            if drawn.duration_s < curve_s:
                remedy = (
                    f"it is the busiest part of {show_s(curve_s)}: traffic: duration: 24 h draws a whole day"
                )
        warnings.append(
            f"the traffic lasts {show_s(lasts_s)}, not a day: costs are of that time alone, and say "
            f"nothing of other hours; {remedy}"
        )
    learns = any(row.name == CRON or "capacity" in CONTROLLERS[row.name].needs for row in rows)
    if train is None and learns:  # The traffic that judges a controller was also used to set it up.
        warnings.append(
            "nothing trains: cron's timetable and the table of capacity were made of the traffic that "
            "judges them; train on a part of it to see what they do on traffic that they have not seen"
        )
    if is_time_limit_reached():
        warnings.append(
            "the time limit ended a search before its counted work was done, so another run may answer "
            "otherwise; raise --time-limit"
        )
    return tuple(warnings)
