"""Answers several questions about one trace: how the plan changes with the question, and what each limit
costs.

Searches share their simulations (`verdict_cache.VerdictCache`). A search for a changed question starts from
the fleet of the question before, and keeps that fleet if no other costs less, so that no change is without a
reason.

`change_question` edits slo.yaml. `sensitivity` answers the questions around one: step times, traffic and
prices that are wrong by a share, limits that are tighter or looser, more GPUs of each kind. Each is planned
again, so the differences in cost are as exact as the plans, and hold for changes of just this size.
`headroom` says how much more traffic, or how much longer steps, the fleet itself stands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.documents.catalog import Catalog
from planner.documents.dotted import keys_of, multiply_value, with_value
from planner.documents.facts import Answered, AskedAgain, Headroom, PromisedAt
from planner.documents.policy_choices import name_policies
from planner.documents.task import PlanQuestion, Robust
from planner.domain import Limit
from planner.errors import InfeasibleError, InputError, OutOfTimeError
from planner.files.checked_files import yaml_value
from planner.files.document_values import errors_as
from planner.fleet import Fleet, Policies
from planner.policies import BY_FIELD, ROUTING
from planner.reports.fact_sentences import is_same_value, moved_text
from planner.reports.words import describe_fleet
from planner.search.evidence.plan import served_s
from planner.search.mixed.best_fleet import FleetSearch, best_of
from planner.search.mixed.bounds import checked_bound, lower_bound
from planner.search.mixed.infeasible import no_room_for_one, with_relaxation
from planner.search.mixed.policy_search import search_policies
from planner.search.mixed.router_fit import fit_router
from planner.search.oracle import work_clock
from planner.search.oracle.fleet_counts import objective_of
from planner.search.oracle.headroom import find_headroom
from planner.search.oracle.traffic_request import TrafficRequest, further_traffic, requested_traffic
from planner.search.oracle.verdict_cache import VerdictCache
from planner.search.oracle.work_clock import USUAL_LIMIT_S, ended_by, now_s, time_limit
from planner.search.problem import plan_problem
from planner.search.problem.bill import bill_fleet
from planner.search.problem.build_problem import build_problem
from planner.search.problem.options import OBJECTIVE_UNITS
from planner.search.problem.owned_first import objective_paid, paid_at_least
from planner.search.production.kept_policies import production_of_policies
from planner.search.production.production_fleet import find_production_fleet
from planner.search.production.three_answers import with_answers
from planner.simulator.slo_verdict import Verdict
from planner.traffic.trace import Trace
from planner.units import HOUR_S, finite_or_none, show_s

USUAL_CHANGE_FRAC = 0.1  # The changes of `sensitivity` are this large unless the user names another share.
PACE_MOVE_S = 0.010  # Limits on the time between tokens are moved by this much (`_limit_move_s`).
# However long reading took, a search gets at least LEAST_SEARCH_S and at least this share of the time limit;
# set by hand.
LEAST_SEARCH_S = 1.0
LEAST_SEARCH_FRAC = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class StudyAnswer:
    """The best fleet for one question, simulated to its end.

    With safety, `answers` has the three answers of a plan (on paper, production, with a loss), and
    `is_passed` says whether the fleet passed its test in scenarios that its search had not seen.
    """

    problem: plan_problem.Problem
    search_result: FleetSearch
    fleet: Fleet
    verdict: Verdict
    served_s: float  # The time for which the fleet is paid; see `evidence.plan.served_s`.
    served_tokens: int  # The tokens of prompts and outputs of the requests that finished.
    answers: tuple[Answered, ...] = ()
    is_passed: bool = True

    @property
    def value(self) -> float:
        """The fleet's objective, for instance its bill [USD/h]."""
        return objective_paid(self.problem, self.search_result.best)

    @property
    def is_exact(self) -> bool:
        """Whether every fleet of level 0 that is cheaper on paper was simulated or is too small for the work;
        `level0_exact` of a certificate.
        """
        return self.search_result.level0.search.is_exact

    @property
    def is_exhausted(self) -> bool:
        """Whether the search of level 0 came to its end in time."""
        return self.search_result.level0.search.is_exhausted


@dataclass(slots=True, eq=False)
class Study:
    """One trace and the simulations of it.

    Every question has `time_limit_s`. For a plan, reading the input and writing the report take `taken_s` of
    it.
    """

    trace: Trace
    catalog: Catalog
    seed: int = 0
    time_limit_s: float = USUAL_LIMIT_S
    progress: plan_problem.Progress = plan_problem.report_nothing
    cache: VerdictCache = field(default_factory=VerdictCache)
    taken_s: float = 0.0
    most_work_s: float = math.inf  # A further limit of each question, on the search's clock (work_clock.py).
    _requests_by_task: dict[tuple[object, ...], TrafficRequest] = field(default_factory=dict)

    @property
    def work_limit_s(self) -> float:
        """The limit of each question on the search's clock, from `time_limit_s` and `most_work_s`."""
        return min(work_clock.work_limit_s(self.time_limit_s), self.most_work_s)

    @property
    def left_s(self) -> float:
        """The time limit less `taken_s`, but at least LEAST_SEARCH_S and LEAST_SEARCH_FRAC of the limit, so
        that slow reading does not end a search before it began; never more than the limit.
        """
        least_s = min(max(LEAST_SEARCH_S, LEAST_SEARCH_FRAC * self.time_limit_s), self.time_limit_s)
        return max(self.time_limit_s - self.taken_s, least_s)

    def on_part(self, trace: Trace, work_s: float) -> Study:
        """A study of a part of the trace, with a limit per question of `work_s` on the search's clock. It
        shares no simulations with this study, because they are of other requests.
        """
        cache = self.cache.fresh()
        return replace(self, trace=trace, most_work_s=work_s, cache=cache, _requests_by_task={})

    def traffic_request(self, task: PlanQuestion) -> TrafficRequest:
        """The requests that a question is about, remembered by the parts of the question that
        they depend on.
        """
        traffic_key = (task.described, task.rate_rps, task.scale, task.window)
        key_without_draws = (*traffic_key, task.robust.traffic_frac, task.robust.traffic_from_frac)
        key = (*key_without_draws, task.draws)
        if key not in self._requests_by_task:
            same_traffic = (
                request
                for other_key, request in self._requests_by_task.items()
                if other_key[:-1] == key_without_draws
            )
            # Simulations are cached by the identity of the trace. So questions that differ only in their
            # draws, the last part of a key, use the same trace object.
            if (remembered := next(same_traffic, None)) is not None:
                requests, note = remembered.requests, remembered.note
            else:
                requests, note = requested_traffic(self.trace, task, seed=self.seed)
            further = further_traffic(self.trace, task, requests, seed=self.seed)
            self._requests_by_task[key] = TrafficRequest(requests, note, further)
        return self._requests_by_task[key]

    @property
    def cached_requests(self) -> int:
        """How many requests all remembered traffic has, as a measure of memory: a request takes 24 bytes, and
        more for its simulated times.
        """
        traces = {
            id(trace): trace
            for request in self._requests_by_task.values()
            for trace in (request.requests, *request.further)
        }
        return sum(map(len, traces.values()))

    def problem_of(self, task: PlanQuestion) -> plan_problem.Problem:
        """The problem that a search for this question solves.

        Raises InfeasibleError, with the limit that would have to be relaxed, if no worker type can keep the
        SLO.
        """
        if task.objective == "throughput":
            raise InputError("objective: throughput: ask `plan` itself; here, use cost, power or gpus")
        return with_relaxation(lambda: self._build(task, self.work_limit_s))

    def _build(self, task: PlanQuestion, work_s: float) -> plan_problem.Problem:
        """The problem of this question, whose search may work for `work_s` on its clock."""
        return build_problem(
            task,
            self.trace,
            self.catalog,
            seed=self.seed,
            conditions=plan_problem.Conditions(now_s() + work_s, cache=self.cache),
            request=self.traffic_request(task),
        )

    def find_paper_fleet(self, task: PlanQuestion, work_s: float) -> tuple[plan_problem.Problem, FleetSearch]:
        """The problem, and the cheapest fleet on paper that a search finds in `work_s` on its clock.

        The answer is never exact, because the cheaper fleets are not simulated one by one (`walks=False`).
        Raises InfeasibleError if no fleet is found.
        """
        problem = self._build(task, work_s)
        if (none_fits := no_room_for_one(problem)) is not None:
            raise none_fits
        return best_of(search_policies(problem, walks=False))

    def answer(self, task: PlanQuestion, start: Sequence[Fleet] = ()) -> StudyAnswer:
        """The answer to a question: the fleet that its plan would have, for production if safety is asked
        for. The search simulates the fleets of `start` first.

        Raises InfeasibleError, and OutOfTimeError if no fleet for production is found in time.
        """
        with time_limit(self.time_limit_s):
            return self._answer(task, start)

    def _answer(self, task: PlanQuestion, start: Sequence[Fleet]) -> StudyAnswer:
        """Like `answer`, without a limit on the clock."""
        searched, production = search_policies(self.problem_of(task), start), None
        if task.safety is not None and (task.policies.raced_changes or len(searched) > 1):
            # As in a plan, the best policies are those for which production costs least.
            searched, production = production_of_policies(searched)
        problem, search_result = best_of(searched)
        answers: tuple[Answered, ...] = ()
        is_passed = True
        if task.safety is not None:
            trial = None if production is None else production.trial  # The fleet and its test.
            if production is None or trial is None or start:
                trial = find_production_fleet(problem, search_result, start) or trial
                if trial is None:
                    raise OutOfTimeError(
                        f"no fleet for production was found: {ended_by()} came first; raise --time-limit, or "
                        "ask with safety: none"
                    )
                production = with_answers(problem, search_result, trial)
            answers, is_passed = production.answers, production.is_passed
            search_result = replace(search_result, best=production.best, value=objective_of(production.best))
        fleet = problem.oracle.fleet(search_result.best)
        simulation, verdict = problem.oracle.simulate_and_judge(fleet, record=True)
        return StudyAnswer(
            problem,
            search_result,
            fleet,
            verdict,
            served_s(problem.trace, simulation),
            sum(simulation.served_tokens),
            answers,
            is_passed,
        )

    def bound(self, answer: StudyAnswer) -> float:
        """A cost below which no fleet can keep the SLO, under any policy (mixed/bounds.py)."""
        problem, value = answer.problem, objective_of(answer.search_result.best)
        bound = paid_at_least(problem, checked_bound(lower_bound(problem), value))
        return min(bound, answer.value)  # Rounding may put the bound a little above the fleet's own cost.


# What `change_question` reads: "+30 %", "x1.3" and "traffic.rate x 1.3".
_SIGNED_PERCENT = re.compile(r"\s*[+-]\s*\d+(?:\.\d+)?\s*%\s*")
_FACTOR = re.compile(r"\s*[x*×]\s*(\d+(?:\.\d+)?)\s*")
_KEY_TIMES_FACTOR = re.compile(r"^\s*(\S+?)\s*[x*×]\s*(\d+(?:\.\d+)?)\s*$")


def _times_hint(document: Mapping[str, Any], path: str, written: str) -> str:
    """What to write in place of "+30 %", which may mean the new value or a change of the present value."""
    factor = 1 + float(written.replace(" ", "").rstrip("%")) / 100
    changed = multiply_value(document, path, factor)  # Raises InputError if there is no number at `path`.
    text = written.strip()
    return f"{text} of what is there is {changed}: write {path.strip()}=x{factor:g}, or the value itself"


def _with_listed_price(document: Mapping[str, Any], path: str, catalog: Catalog) -> Mapping[str, Any]:
    """The document with the catalog's price at a path such as fleet.prices.h200 that it leaves out."""
    keys, fleet = keys_of(path), document.get("fleet") or {}
    if len(keys) != 3 or keys[:2] != ["fleet", "prices"] or not isinstance(fleet, Mapping):
        return document
    # With `price_of` in slo.yaml the price is the provider's, not the catalog's.
    if keys[2] in (fleet.get("prices") or {}) or "price_of" in fleet:
        return document
    listed = catalog.gpu(keys[2]).price_usd_per_h
    return with_value(document, path, f"{listed:.10g} usd/h", where=path)


def change_question(document: Mapping[str, Any], text: str, catalog: Catalog | None = None) -> dict[str, Any]:
    """slo.yaml with one key changed. The text "slo.ttft.p90=1 s" sets a key, and "limits.cost=" removes one.

    "traffic.rate=x2", or "traffic.rate x 2", multiplies the number or quantity that is there. If slo.yaml has
    no price of a GPU, the catalog's price is multiplied.
    """
    assignment = text if "=" in text else _KEY_TIMES_FACTOR.sub(r"\1=x\2", text)
    path, equals, written = assignment.partition("=")
    if not equals or not all(keys_of(path)):
        raise InputError(f"--change {text!r}: expected KEY=VALUE such as 'slo.ttft.p90=1 s'")
    with errors_as(InputError, f"--change {text!r}"):
        present = document if catalog is None else _with_listed_price(document, path, catalog)
        if _SIGNED_PERCENT.fullmatch(written):
            raise InputError(_times_hint(present, path, written))
        factor = _FACTOR.fullmatch(written)
        value = yaml_value(written) if factor is None else multiply_value(present, path, float(factor[1]))
    return with_value(document, path, value, where=f"--change {text!r}")


@dataclass(frozen=True, slots=True, eq=False)
class ChangedQuestion:
    """A changed question with two answers: whether the previous fleet (the best one before the change) keeps
    the SLO after the change (`kept`), and the best fleet now (`answer`).

    `kept` is None if the changed question does not offer the worker types of the previous fleet, or if there
    was no fleet before; `why_before` is then the error. `answer` is None if no fleet was found, and `why` is
    then the error; `is_proved` and `is_proved_before` are False where that error proves nothing, as when the
    time was over. `kept_under` names the policies with which the workers of the previous fleet keep the SLO;
    it is empty if these are its own. `value_now` is the objective of the previous fleet at the prices of the
    changed question. `kept_as_written`: the previous fleet is not kept, and only because of its scenarios.
    """

    label: str
    task: PlanQuestion
    kept: bool | None
    answer: StudyAnswer | None
    why: str = ""
    kept_under: str = ""
    value_now: float = math.inf
    why_before: str = ""
    kept_as_written: bool = False
    is_proved: bool = True
    is_proved_before: bool = True

    @property
    def is_previous_cheaper(self) -> bool:
        """Whether the previous fleet keeps the SLO in enough of the search's scenarios and costs less than
        the best fleet now. That is possible because the best fleet must pass a test in further scenarios too.
        """
        if not self.kept or self.answer is None or self.task.safety is None:
            return False
        return self.value_now * self.answer.problem.same_value_factor < self.answer.value


def answer_change(
    study: Study, before: StudyAnswer | InfeasibleError, task: PlanQuestion, label: str
) -> ChangedQuestion:
    """Answer the changed question, starting the search from the previous fleet, if any."""
    study.progress(f"planning with {label}")
    if isinstance(before, InfeasibleError):
        changed = ChangedQuestion(
            label,
            task,
            kept=None,
            answer=None,
            why_before=_reason_of(before),
            is_proved_before=before.is_proved,
        )
        try:
            return replace(changed, answer=study.answer(task))
        except InfeasibleError as error:
            return replace(changed, why=_reason_of(error), is_proved=error.is_proved)
    try:
        problem = study.problem_of(task)
    except InfeasibleError as error:
        # No worker type can keep the SLO now, so the previous fleet cannot either.
        return ChangedQuestion(label, task, kept=False, answer=None, why=_reason_of(error))
    changed = ChangedQuestion(label, task, kept=None, answer=None)
    if (fleet := workers_in_question(problem, before.fleet)) is not None:
        policies = find_keeping_policies(problem, fleet)
        kept_under = ""
        if policies is not None and _named_policies(policies) != _named_policies(fleet.policies):
            # `name_policies` names every difference but that of the longest wait.
            names = name_policies(policies, (policies, fleet.policies))
            kept_under = names or "the longest wait of the question"
        changed = replace(
            changed,
            kept=policies is not None,
            kept_under=kept_under,
            value_now=objective_paid(problem, problem.oracle.counts(fleet)),
            kept_as_written=policies is None and _is_kept_as_written(problem, fleet),
        )
    try:
        return replace(changed, answer=study.answer(task, (before.fleet,)))
    except InfeasibleError as error:
        return replace(changed, why=_reason_of(error), is_proved=error.is_proved)


def _reason_of(error: InfeasibleError) -> str:
    """Why there is no fleet, and what helps. Only the message of too few scenarios (`most_kept`) does not say
    itself what helps.
    """
    return f"{error}; ask for {error.relaxation}" if error.most_kept and error.relaxation else str(error)


def _is_kept_as_written(problem: plan_problem.Problem, fleet: Fleet) -> bool:
    """Whether a fleet is within the limits and keeps the SLO on the traffic and with the step times as they
    are written, on every draw and rate of the question. False without scenarios, and if the question no
    longer allows the fleet's policies.
    """
    counts = problem.oracle.counts(fleet)
    own = _own_policies(problem, fleet)
    if problem.task.safety is None or not problem.allows(counts) or own is None:
        return False
    oracle = plan_problem.with_policies(plan_problem.on_all_draws(problem), own).oracle
    return replace(oracle.as_written(), draws=oracle.draws).holds(counts)  # `as_written` drops the draws.


def _own_policies(problem: plan_problem.Problem, fleet: Fleet) -> Policies | None:
    """The fleet's own policies as the question has them now: with the deadlines of its classes, for example.
    None if the question does not allow them. What a search fits (mixed/router_fit.py) stays the fleet's.
    """
    task, own = problem.task, fleet.policies
    for policies in task.policy_choices():
        for change in task.policies.raced_changes:
            raced = task.changed_policies(policies, change)
            if raced is not None and _value_on(change.axis, raced) == _value_on(change.axis, own):
                policies = raced
        if _named_policies(policies) == _named_policies(own):
            return replace(
                policies, **{name: getattr(own, name) for name in ROUTING[own.routing].setting_grid}
            )
    return None


def workers_in_question(problem: plan_problem.Problem, fleet: Fleet) -> Fleet | None:
    """The same workers at this question's step times and prices; None if it lacks one of their types."""
    types = {worker.name: worker for worker in problem.types}
    pools = fleet.running_pools
    if any(pool.type.name not in types for pool in pools):
        return None
    pools_now = tuple(replace(pool, type=types[pool.type.name]) for pool in pools)
    return replace(fleet, pools=pools_now, network=problem.task.network)


def find_keeping_policies(problem: plan_problem.Problem, fleet: Fleet) -> Policies | None:
    """The first policies with which a fleet's workers are within the limits and keep the SLO: on every draw
    and rate of the question, and after the losses that must be survived. None if there are no such policies.

    If the question still allows the fleet's own policies, only these are simulated. Otherwise all policies
    that it allows are simulated in order: a change of policies moves no worker, so the fleet counts as the
    same.
    """
    counts = problem.oracle.counts(fleet)
    if not problem.allows(counts):
        return None
    production_problem = plan_problem.with_search_scenarios(plan_problem.on_all_draws(problem))
    own = _own_policies(problem, fleet)
    for policies in problem.task.policy_choices() if own is None else (own,):
        oracle = plan_problem.with_policies(production_problem, policies).oracle
        if policies.prefix_cache and own is None:
            # A search would fit the parameters of the router to the fleet (mixed/router_fit.py).
            fitted = fit_router(oracle, counts)
            oracle = plan_problem.with_policies(production_problem, fitted).oracle
        if oracle.holds(counts):
            return oracle.policies
    return None


def _named_policies(policies: Policies) -> tuple[object, ...]:
    """The policies that a question names. Other parameters are fitted or follow from the question, so they do
    not tell policies apart.
    """
    rows = tuple(getattr(policies, axis) for axis in BY_FIELD)
    caches = policies.prefix_cache, policies.kv_offload is None
    settings = policies.queue_window_s, policies.long_prefill_token_threshold
    return *rows, _value_on("prediction", policies), *settings, *caches


def _value_on(axis: str, policies: Policies) -> object:
    """The value that these policies have on an axis (policy_choices.py)."""
    if axis == "prediction":
        return policies.prediction_accuracy_frac, policies.prediction_buckets
    return getattr(policies, axis)


def sensitivity(
    study: Study, before: StudyAnswer, *, by_frac: float = USUAL_CHANGE_FRAC
) -> list[ChangedQuestion]:
    """Answers to the questions around one: step times and traffic first, then prices, then limits."""
    changes = (
        *uncertain_changes(before, by_frac),
        *price_changes(before, by_frac),
        *limit_changes(before, by_frac),
    )
    return [answer_change(study, before, task, label) for label, task in changes]


def headroom(study: Study, before: StudyAnswer) -> Headroom:
    """The headroom of the fleet, as a plan has it (planner/search/oracle/headroom.py)."""
    study.progress("how far the plan holds")
    return find_headroom(before.problem.oracle, before.search_result.best).headroom


def explain_limits(study: Study, task: PlanQuestion, fleet: Fleet) -> tuple[PromisedAt | AskedAgain, ...]:
    """Facts on what each limit of the question costs: the tightest value of it that the plan's `fleet` keeps
    without a change, and the cost of a plan with the limit moved.
    """
    before = study.answer(task, (fleet,))
    moved_limits = limit_changes(before, USUAL_CHANGE_FRAC)
    changes = [answer_change(study, before, moved, label) for label, moved in moved_limits]
    # The fleet would keep a limit as tight as the simulated percentile that decides the line.
    tightest = tuple(
        PromisedAt(line.limit, line.deciding_s)
        for line in before.verdict.lines
        if math.isfinite(line.deciding_s)
    )
    unit = OBJECTIVE_UNITS[before.problem.task.objective]
    costs = []
    for changed in changes:
        value, other_fleet = None, ""
        if changed.answer is not None:
            value = changed.answer.value
            other_fleet = "" if costs_the_same(changed, before) else describe_fleet(changed.answer.fleet)
        costs.append(AskedAgain(changed.label, before.value, value, unit, other_fleet))
    return (*tightest, *costs)


def uncertain_changes(before: StudyAnswer, by_frac: float) -> Iterator[tuple[str, PlanQuestion]]:
    """Questions in which step times or traffic are off by `by_frac` in either direction, each with a label.

    In the last one both are off to the worse side, and the SLO must be kept at every rate from today's to the
    higher one.
    """
    percent = f"{100 * by_frac:g} %"
    for label, steps_frac, traffic_frac in (
        (f"steps take {percent} longer", by_frac, 0.0),
        (f"steps take {percent} less", -by_frac, 0.0),
        (f"{percent} more traffic", 0.0, by_frac),
        (f"{percent} less traffic", 0.0, -by_frac),
    ):
        yield label, _wrong_by(before, steps_frac, traffic_frac)
    both = _wrong_by(before, by_frac, by_frac, up_to=True)
    yield f"steps {percent} longer and up to {percent} more traffic", both


def _wrong_by(
    before: StudyAnswer, steps_frac: float, traffic_frac: float, *, up_to: bool = False
) -> PlanQuestion:
    """The question with steps and traffic off by shares, on top of the shares in its own `robust`.

    With `up_to` the question's lightest traffic stays as it is, so that the SLO must be kept at every rate
    from there to the heaviest.
    """
    task, robust = before.problem.task, before.problem.task.robust
    lightest_frac = (1 + robust.traffic_from_frac) * (1 + traffic_frac) - 1
    changed = Robust(
        step_times_frac=(1 + robust.step_times_frac) * (1 + steps_frac) - 1,
        traffic_frac=(1 + robust.traffic_frac) * (1 + traffic_frac) - 1,
        traffic_from_frac=robust.traffic_from_frac if up_to else lightest_frac,
        spread=robust.spread,
    )
    return replace(task, robust=changed)


def price_changes(before: StudyAnswer, by_frac: float) -> Iterator[tuple[str, PlanQuestion]]:
    """Questions with one GPU type dearer or cheaper; none if there is one type, whose price changes no
    choice.
    """
    task = before.problem.task
    # Spot, owned and power-capped GPUs have the name of their base with a suffix.
    base_prices = {gpu.base: gpu.price_usd_per_h for gpu in before.problem.gpus if gpu.name == gpu.base}
    if len(base_prices) < 2:
        return
    for name, price in base_prices.items():
        for label, factor in (("dearer", 1 + by_frac), ("cheaper", 1 - by_frac)):
            changed = {**task.prices_usd_per_h, name: factor * price}
            yield f"{name} {100 * by_frac:g} % {label}", replace(task, prices_usd_per_h=changed)


def limit_changes(before: StudyAnswer, by_frac: float) -> Iterator[tuple[str, PlanQuestion]]:
    """Questions with one limit moved, each with a label: each limit of the SLO tighter and looser
    (`_limit_move_s`), more GPUs of each kind, more power, more money.

    The added GPUs are enough for one more of the smallest worker on this kind, in whole nodes where these are
    sold.
    """
    task, slo = before.problem.task, before.problem.slo
    if task.slowdowns is None:  # A relative SLO is stated as slowdowns and has no limit in seconds to move.
        for k, limit in enumerate(slo.limits):
            move_s = _limit_move_s(limit, by_frac)
            for sign, label in ((-1, "tighter"), (1, "looser")):
                if limit.limit_s + sign * move_s > 0:
                    moved = replace(limit, limit_s=limit.limit_s + sign * move_s)
                    lines = (*slo.limits[:k], moved, *slo.limits[k + 1 :])
                    yield (
                        f"{limit.label} {show_s(move_s)} {label}",
                        replace(task, slo=replace(slo, limits=lines)),
                    )
    for name, count in task.stock.items():
        workers = [worker for worker in before.problem.types if worker.gpu.name == name]
        if count is not None and workers:
            # The added GPUs are sold as the present ones are. Without `sold_whole` the stock, which changes
            # here, would decide whether whole nodes are sold.
            is_sold_whole = workers[0].gpu.is_sold_whole
            sold_gpus = workers[0].gpu.gpus_per_node if is_sold_whole else 1  # What is sold at a time.
            smallest_gpus = min(worker.gpus for worker in workers)
            more = sold_gpus * math.ceil(smallest_gpus / sold_gpus)
            label = f"{'one' if more == 1 else more} more {name}"
            sold_whole = {**task.sold_whole, name: is_sold_whole}
            yield label, replace(task, stock={**task.stock, name: count + more}, sold_whole=sold_whole)
    if task.power_limit_w is not None:
        more_power = replace(task, power_limit_w=task.power_limit_w * (1 + by_frac))
        yield f"{100 * by_frac:g} % more power allowed", more_power
    if task.cost_limit_usd_per_h is not None:
        more_money = replace(task, cost_limit_usd_per_h=task.cost_limit_usd_per_h * (1 + by_frac))
        yield f"{100 * by_frac:g} % more money allowed", more_money


def _limit_move_s(limit: Limit, by_frac: float) -> float:
    """How far a limit is moved: by the share `by_frac` of itself.

    Limits on the time between tokens are moved by PACE_MOVE_S, a round number that users can judge, but by no
    more than twice that share.
    """
    share_s = by_frac * limit.limit_s
    return min(PACE_MOVE_S, 2 * share_s) if limit.metric_row.is_pace else share_s


def study_document(answer: StudyAnswer) -> dict[str, Any]:
    """An answer as plain values, for --json; the figures are of its fleet on the question's trace."""
    fleet, trace, million_tokens = answer.fleet, answer.problem.trace, answer.served_tokens / 1e6
    return {
        "fleet": describe_fleet(fleet),
        "workers": [
            {
                "role": pool.role,
                "gpu": pool.type.gpu.name,
                "tp": pool.type.tp,
                "pp": pool.type.pp,
                "dp": pool.type.dp,
                "count": pool.count,
                "max_num_batched_tokens": pool.type.max_num_batched_tokens,
            }
            for pool in fleet.pools
            if pool.count
        ],
        "objective": answer.problem.task.objective,
        "value": answer.value,
        "level0_exact": answer.is_exact,
        "level0_exhausted": answer.is_exhausted,
        "cost_usd_per_h": bill_fleet(fleet).usd_per_h,
        "usd_per_million_tokens": bill_fleet(fleet).usd_per_h * answer.served_s / HOUR_S / million_tokens,
        "power_w": fleet.power_w,
        "gpus": fleet.gpus,
        "slo": [
            {
                "limit": line.limit.name,
                "limit_s": line.limit.limit_s,
                "simulated_s": finite_or_none(line.value_s),
                "kept_frac": line.kept_frac,
                "judged": line.judged,
            }
            for line in answer.verdict.lines
        ],
        "requests": len(trace),
        "rate_rps": trace.rate_rps,
        "answers": [answer_document(one_answer) for one_answer in answer.answers],
    }


def answer_document(answer: Answered) -> dict[str, Any]:
    """One of the three answers as plain values, for --json."""
    kept_in = answer.kept_in
    return {
        "name": answer.name,
        "value": answer.value,
        "cost_usd_per_h": answer.paid_usd_per_h,
        "kept": None if kept_in is None else kept_in.kept,
        "scenario_count": None if kept_in is None else kept_in.scenario_count,
    }


def change_document(changed: ChangedQuestion, before: StudyAnswer | None) -> dict[str, Any]:
    """A changed question as plain values, for --json. `difference` is in the unit of the objective; None if
    there is no fleet before or after the change.
    """
    why_before = f"before the change: {changed.why_before}" if changed.why_before else ""
    return {
        "change": changed.label,
        "kept": changed.kept,
        "kept_under": changed.kept_under or None,
        "kept_as_written": changed.kept_as_written,
        "difference": changed.answer.value - before.value if before and changed.answer else None,
        "answer": None if changed.answer is None else study_document(changed.answer),
        "why": "; ".join(filter(None, (why_before, changed.why))),
    }


def difference_text(changed: ChangedQuestion, before: StudyAnswer) -> str:
    """The difference that a change makes to the objective: "+2.99 USD/h (+12.5 %)"."""
    value = None if changed.answer is None else changed.answer.value
    return moved_text(before.value, value, OBJECTIVE_UNITS[before.problem.task.objective])


def costs_the_same(changed: ChangedQuestion, before: StudyAnswer) -> bool:
    """Whether a change leaves the value of the objective as it was, whatever it does to the fleet."""
    return changed.answer is not None and is_same_value(before.value, changed.answer.value)


def fleet_text(answer: StudyAnswer, before: StudyAnswer) -> str:
    """The fleet in words. Its tokens per step are added if nothing else tells it apart from the previous
    fleet.
    """
    text = describe_fleet(answer.fleet)
    tokens, tokens_before = _step_tokens_text(answer.fleet), _step_tokens_text(before.fleet)
    if text != describe_fleet(before.fleet) or tokens == tokens_before:
        return text
    return f"{text} with {tokens} tokens per step instead of {tokens_before}"


def _step_tokens_text(fleet: Fleet) -> str:
    """The tokens per step of each pool, "2,048 and 8,192"."""
    return " and ".join(f"{pool.type.max_num_batched_tokens:,}" for pool in fleet.running_pools)


def verdict_text(changed: ChangedQuestion) -> str:
    """A phrase: whether the previous fleet still keeps the SLO after the change, and whether the best fleet
    now failed its test.
    """
    text = _kept_text(changed)
    if changed.answer is None or changed.answer.is_passed:
        return text
    return f"{text}; the best found then failed its test in scenarios that its search had not seen"


def _kept_text(changed: ChangedQuestion) -> str:
    """The first part of `verdict_text`."""
    if changed.why_before:
        none_before = "there is no fleet" if changed.is_proved_before else "none was found"
        none_after = "none is left either" if changed.is_proved else "none was found"
        after = "after it one is found" if changed.answer else f"after it {none_after}: {changed.why}"
        return f"before the change {none_before}: {changed.why_before}; {after}"
    if changed.answer is None:
        return f"after the change no fleet {'is left' if changed.is_proved else 'was found'}: {changed.why}"
    if changed.kept is None:
        return "the previous fleet is not among those that may be used after the change"
    under = f", with {changed.kept_under} in place of its own policies" if changed.kept_under else ""
    if changed.is_previous_cheaper:
        return (
            f"the previous fleet is kept in enough of the search's scenarios after the change{under}, but it "
            "is not the plan, which is tested on others too"
        )
    if changed.kept_as_written:
        return "the previous fleet holds as written after the change, in too few scenarios"
    holds = "still holds" if changed.kept else "no longer holds"
    return f"the previous fleet {holds} after the change{under}"
