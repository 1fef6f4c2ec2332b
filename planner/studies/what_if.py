"""Several questions about one trace: what moves when the question changes, and what each limit costs.

Whatever one search simulated, the next one knows (`oracle.Answers`), and the fleet found before is the first
that others must beat. Of equal offers it stays, so that nothing moves without a reason.

`change_question` edits slo.yaml, `sensitivity` asks the questions around one: step times, traffic and prices
that are wrong by a share, limits that are tighter or looser, more GPUs of each kind. Its differences are
shadow prices by re-solving: exact where the search is, for steps as large as they are. `headroom` is how far
the fleet itself holds.
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
from planner.fleet import Fleet, Policies
from planner.reports.fact_sentences import moved_text
from planner.reports.words import describe
from planner.search.evidence.plan import served_s
from planner.search.mixed.best_fleet import FleetSearch, best_of
from planner.search.mixed.bounds import checked_bound, lower_bound
from planner.search.mixed.infeasible import with_relaxation
from planner.search.mixed.policy_search import search_policies
from planner.search.mixed.router_fit import fitted
from planner.search.oracle.fleet_counts import objective
from planner.search.oracle.fleet_oracle import Answers
from planner.search.oracle.headroom import find_headroom
from planner.search.oracle.stopping import USUAL_LIMIT_S
from planner.search.oracle.traffic_request import TrafficRequest, further_traffic, requested_traffic
from planner.search.oracle.work_clock import ended_by, now_s, time_limit, work_limit_s
from planner.search.problem.bill import bill_fleet
from planner.search.problem.build_problem import build_problem
from planner.search.problem.options import OBJECTIVE_UNITS
from planner.search.problem.owned_first import objective_paid, paid_at_least
from planner.search.problem.plan_problem import (
    Conditions,
    Problem,
    Progress,
    on_all_draws,
    report_nothing,
    with_policies,
    with_search_scenarios,
)
from planner.search.production.three_answers import find_production_fleet, with_answers
from planner.simulator.slo_verdict import Verdict
from planner.traffic.trace import Trace
from planner.units import finite_or_none, show_s

BY_FRAC = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class StudyAnswer:
    """The best fleet for one question, simulated to the end. With safety it has `answers`, as a plan."""

    problem: Problem
    search_result: FleetSearch
    fleet: Fleet
    verdict: Verdict
    served_s: float  # The fleet is paid for this long; see plan.served_s.
    answers: tuple[Answered, ...] = ()

    @property
    def value(self) -> float:
        return objective_paid(self.problem, self.search_result.best)

    @property
    def is_exact(self) -> bool:
        """Whether, on paper, every cheaper fleet of level 0 was simulated or has too few workers: as
        `level0_exact` of a certificate.
        """
        return self.search_result.level0.search.is_exact

    @property
    def is_exhausted(self) -> bool:
        """Whether the search of level 0 came to its end in time."""
        return self.search_result.level0.search.is_exhausted


LEAST_S = 1.0


@dataclass(slots=True, eq=False)
class Study:
    """One trace, and what was learned about it; every question has `time_limit_s`, a plan all of it but the
    `taken_s` of it that reading took and a report will.
    """

    trace: Trace
    catalog: Catalog
    seed: int = 0
    time_limit_s: float = USUAL_LIMIT_S
    progress: Progress = report_nothing
    answers: Answers = field(default_factory=Answers)
    taken_s: float = 0.0
    work_s: float = math.inf  # the most that a question may take on the search's clock
    _requests_by_task: dict[tuple[object, ...], TrafficRequest] = field(default_factory=dict)

    @property
    def work_limit_s(self) -> float:
        """How far the search's clock may go for each question."""
        return min(work_limit_s(self.time_limit_s), self.work_s)

    @property
    def left_s(self) -> float:
        """Of the time limit, for a plan; reading or a report never leave less than a second, or a tenth."""
        least_s = min(max(LEAST_S, 0.1 * self.time_limit_s), self.time_limit_s)
        return max(self.time_limit_s - self.taken_s, least_s)

    def on_part(self, trace: Trace, work_s: float) -> Study:
        """The same study of a part of its trace, where a question may take `work_s` of the search's clock."""
        return replace(self, trace=trace, work_s=work_s, answers=self.answers.fresh(), _requests_by_task={})

    def traffic_request(self, task: PlanQuestion) -> TrafficRequest:
        """The requests that a question is about, scaled once for every traffic."""
        robust = task.robust
        traffic_key = (task.described, task.rate_rps, task.scale, task.window)
        base = (*traffic_key, robust.traffic_frac, robust.traffic_from_frac)
        key = (*base, task.draws)
        if key not in self._requests_by_task:
            known = next((each for one, each in self._requests_by_task.items() if one[:-1] == base), None)
            requests, note = (
                requested_traffic(self.trace, task, seed=self.seed)
                if known is None
                else (known.requests, known.note)  # The same object lets a search reuse its simulations.
            )
            further = further_traffic(self.trace, task, requests, seed=self.seed)
            self._requests_by_task[key] = TrafficRequest(requests, note, further)
        return self._requests_by_task[key]

    @property
    def cached_requests(self) -> int:
        """Requests of all the traffic that is remembered: 24 bytes each, and what was said of them."""
        traces = {
            id(trace): trace
            for each in self._requests_by_task.values()
            for trace in (each.requests, *each.further)
        }
        return sum(map(len, traces.values()))

    def pose(self, task: PlanQuestion) -> Problem:
        if task.objective == "throughput":
            raise InputError("objective: throughput: ask `plan` itself; here, use cost, power or gpus")
        return with_relaxation(lambda: self._build(task, self.work_limit_s))

    def _build(self, task: PlanQuestion, work_s: float) -> Problem:
        return build_problem(
            task,
            self.trace,
            self.catalog,
            seed=self.seed,
            conditions=Conditions(now_s() + work_s, answers=self.answers),
            request=self.traffic_request(task),
        )

    def find_paper_fleet(self, task: PlanQuestion, work_s: float) -> tuple[Problem, FleetSearch]:
        """The cheapest fleet on paper of a search that may take `work_s` of the search's clock. It is never
        called exact, as the cheaper fleets are not simulated one by one.

        Raises InfeasibleError where none is found.
        """
        return best_of(search_policies(self._build(task, work_s), walks=False))

    def ask(self, task: PlanQuestion, start: Sequence[Fleet] = ()) -> StudyAnswer:
        """The best fleet, for production where safety is asked for: that of a plan, as the same functions
        decide, also between fleets at one bill. Those of `start` are tried first.

        Raises what `pose.pose`, `best_fleet.search` and `answers.tried` raise, and OutOfTimeError.
        """
        with time_limit(self.time_limit_s):
            return self._ask(task, start)

    def _ask(self, task: PlanQuestion, start: Sequence[Fleet]) -> StudyAnswer:
        problem, search_result = best_of(search_policies(self.pose(task), start))
        answers: tuple[Answered, ...] = ()
        if task.safety is not None:
            if (made := find_production_fleet(problem, search_result, start)) is None:
                raise OutOfTimeError(
                    f"no fleet for production was found: {ended_by()} came first; raise --time-limit, or "
                    "ask with safety: none"
                )
            whole = with_answers(problem, search_result, made)
            answers = whole.answers
            search_result = replace(search_result, best=whole.best, value=objective(whole.best))
        fleet = problem.oracle.fleet(search_result.best)
        simulation, verdict = problem.oracle.verdict(fleet, record=True)
        return StudyAnswer(
            problem, search_result, fleet, verdict, served_s(problem.trace, simulation), answers
        )

    def bound(self, answer: StudyAnswer) -> float:
        """What any fleet costs at least, under any policy."""
        problem, value = answer.problem, objective(answer.search_result.best)
        return min(paid_at_least(problem, checked_bound(lower_bound(problem), value)), answer.value)


_FACTOR = re.compile(r"\s*[x*×]\s*(\d+(?:\.\d+)?)\s*")
_TIMES = re.compile(r"^\s*(\S+?)\s*[x*×]\s*(\d+(?:\.\d+)?)\s*$")


def change_question(document: Mapping[str, Any], text: str) -> dict[str, Any]:
    """slo.yaml with one key set, "slo.ttft.p90=1 s"; without a value, "limits.cost=", it is taken out.

    "traffic.rate=x2", or "traffic.rate x 2", multiplies the number or quantity that is there.
    """
    path, equals, written = (_TIMES.sub(r"\1=x\2", text) if "=" not in text else text).partition("=")
    if not equals or not all(keys_of(path)):
        raise InputError(f"--change {text!r}: expected KEY=VALUE such as 'slo.ttft.p90=1 s'")
    try:
        factor = _FACTOR.fullmatch(written)
        value = yaml_value(written) if factor is None else multiply_value(document, path, float(factor[1]))
    except InputError as error:
        raise InputError(f"--change {text!r}: {error}") from None
    return with_value(document, path, value, where=f"--change {text!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """A changed question: whether the fleet of before keeps it, and the best fleet now, if there is one.

    `kept` is None where the changed question does not know that fleet's workers. `why` says what stands in
    the way, of the old fleet or of any; `under` names the policies with which its workers keep the question
    where their own are no longer among those that may be chosen.
    """

    label: str
    task: PlanQuestion
    kept: bool | None
    answer: StudyAnswer | None
    why: str = ""
    under: str = ""


def ask_again(study: Study, before: StudyAnswer, task: PlanQuestion, label: str) -> Moved:
    """Answer the changed question, starting the search from the fleet of the question before."""
    study.progress(label)
    try:
        problem = study.pose(task)
    except InfeasibleError as error:
        return Moved(label, task, False, None, str(error))
    fleet = workers_in_question(problem, before.fleet)
    under = None if fleet is None else find_keeping_policies(problem, fleet)
    kept = None if fleet is None else under is not None
    message = ""
    if fleet is not None and under is not None and under != fleet.policies:
        message = name_policies(under, (under, fleet.policies)) or "the longest wait asked for"
    try:
        return Moved(label, task, kept, study.ask(task, (before.fleet,)), under=message)
    except InfeasibleError as error:
        return Moved(label, task, kept, None, str(error), message)


def workers_in_question(problem: Problem, fleet: Fleet) -> Fleet | None:
    """The same workers at this question's step times and prices; None if it does not know one of them."""
    types = {worker.name: worker for worker in problem.types}
    pools = fleet.running_pools
    if any(pool.type.name not in types for pool in pools):
        return None
    known = tuple(replace(pool, type=types[pool.type.name]) for pool in pools)
    return replace(fleet, pools=known, network=problem.task.network)


def is_kept(problem: Problem, fleet: Fleet) -> bool:
    """Whether the workers of a fleet keep the SLO under some allowed policies; see
    `find_keeping_policies`.
    """
    return find_keeping_policies(problem, fleet) is not None


def find_keeping_policies(problem: Problem, fleet: Fleet) -> Policies | None:
    """The policies under which a fleet's workers keep the limits, and the SLO on every draw and rate asked,
    after all losses that must be survived; None if they do under none.

    Its own policies if they may still be chosen, else those that may, in order: no worker moves for them.
    """
    counts = problem.oracle.counts(fleet)
    if not problem.allows(counts):
        return None
    production_problem = with_search_scenarios(on_all_draws(problem))
    choices = problem.task.policy_choices()
    if any(_kind(choice) == _kind(fleet.policies) for choice in choices):
        choices = (fleet.policies,)
    for policies in choices:
        oracle = with_policies(production_problem, policies).oracle
        if policies.prefix_cache and policies != fleet.policies:  # as a search would set its router
            oracle = with_policies(production_problem, fitted(oracle, counts)).oracle
        if oracle.holds([counts])[0]:
            return oracle.policies
    return None


def _kind(policies: Policies) -> tuple[object, ...]:
    """What of policies a question names; the rest is fitted."""
    return policies.prefix_cache, policies.routing, policies.queue, policies.queue_window_s


def sensitivity(study: Study, before: StudyAnswer, *, by_frac: float = BY_FRAC) -> list[Moved]:
    """The questions around one, in order: what may be wrong, then what could be otherwise."""
    changes = (
        *uncertain_changes(before, by_frac),
        *price_changes(before, by_frac),
        *limit_changes(before, by_frac),
    )
    return [ask_again(study, before, task, label) for label, task in changes]


def headroom(study: Study, before: StudyAnswer) -> Headroom:
    """How far the fleet holds, as the plan says it (planner/search/oracle/headroom.py)."""
    study.progress("how far the plan holds")
    return find_headroom(before.problem.oracle, before.search_result.best).headroom


def explain_limits(
    study: Study, task: PlanQuestion, fleet: Fleet, *, by_frac: float = BY_FRAC
) -> tuple[PromisedAt | AskedAgain, ...]:
    """What each limit of the question costs; `fleet` is its plan."""
    before = study.ask(task, (fleet,))
    moves = [
        ask_again(study, before, changed_task, label)
        for label, changed_task in limit_changes(before, by_frac)
    ]
    tight = tuple(
        PromisedAt(line.limit, line.decides[0])
        for line in before.verdict.lines
        if math.isfinite(line.decides[0])
    )
    unit = OBJECTIVE_UNITS[before.problem.task.objective]
    return tight + tuple(
        AskedAgain(
            moved.label,
            before.value,
            None if moved.answer is None else moved.answer.value,
            unit,
            ""
            if moved.answer is None or moved.answer.value == before.value
            else describe(moved.answer.fleet),
        )
        for moved in moves
    )


def uncertain_changes(before: StudyAnswer, by_frac: float) -> Iterator[tuple[str, PlanQuestion]]:
    """Step times and traffic that are wrong by a share; and steps and traffic wrong to the bad side, the
    traffic by anything up to that share.
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
    """The question where steps and traffic are wrong by shares; the traffic by all shares `up_to` it."""
    task, robust = before.problem.task, before.problem.task.robust
    changed = Robust(
        (1 + robust.step_times_frac) * (1 + steps_frac) - 1,
        (1 + robust.traffic_frac) * (1 + traffic_frac) - 1,
        robust.traffic_from_frac if up_to else (1 + robust.traffic_from_frac) * (1 + traffic_frac) - 1,
        robust.spread,
    )
    return replace(task, robust=changed)


def price_changes(before: StudyAnswer, by_frac: float) -> Iterator[tuple[str, PlanQuestion]]:
    """One GPU at a time dearer and cheaper; all at once would change no choice."""
    task = before.problem.task
    firm = {gpu.base: gpu.price_usd_per_h for gpu in before.problem.gpus if gpu.name == gpu.base}
    if len(firm) < 2:
        return
    for name, price in firm.items():
        for label, factor in (("dearer", 1 + by_frac), ("cheaper", 1 - by_frac)):
            changed = {**task.prices_usd_per_h, name: factor * price}
            yield f"{name} {100 * by_frac:g} % {label}", replace(task, prices_usd_per_h=changed)


def limit_changes(before: StudyAnswer, by_frac: float) -> Iterator[tuple[str, PlanQuestion]]:
    """Each limit of the SLO tighter and looser (gaps by 10 ms, others by a share), GPUs for one more of the
    smallest worker of each kind, more power, more money."""
    task, slo = before.problem.task, before.problem.slo
    if task.slowdowns is None:
        for k, limit in enumerate(slo.limits):
            for sign, label in ((-1, "tighter"), (1, "looser")):
                step_s = _step_s(limit, by_frac)
                if limit.limit_s + sign * step_s > 0:
                    moved = replace(limit, limit_s=limit.limit_s + sign * step_s)
                    lines = (*slo.limits[:k], moved, *slo.limits[k + 1 :])
                    yield (
                        f"{limit.name} {show_s(step_s)} {label}",
                        replace(task, slo=replace(slo, limits=lines)),
                    )
    for name, count in task.stock.items():
        sizes = [worker.gpus for worker in before.problem.types if worker.gpu.name == name]
        if count is not None and sizes:
            more = min(sizes)
            label = f"{'one' if more == 1 else more} more {name}"
            yield label, replace(task, stock={**task.stock, name: count + more})
    for what, key in (("power", "power_limit_w"), ("money", "cost_limit_usd_per_h")):
        amount = getattr(task, key)
        if amount is not None:
            changed: dict[str, Any] = {key: amount * (1 + by_frac)}
            yield f"{100 * by_frac:g} % more {what} allowed", replace(task, **changed)


def _step_s(limit: Limit, by_frac: float) -> float:
    """10 ms for gaps between tokens, unless that is much of the limit."""
    share_s = by_frac * limit.limit_s
    return min(0.010, 2 * share_s) if limit.row.is_pace else share_s


def document(answer: StudyAnswer) -> dict[str, Any]:
    """An answer as plain values, for --json."""
    fleet, tokens = answer.fleet, answer.problem.trace
    millions = float(tokens.input_tokens.sum() + tokens.output_tokens.sum()) / 1e6
    return {
        "fleet": describe(fleet),
        "workers": [
            {
                "role": pool.role,
                "gpu": pool.type.gpu.name,
                "tp": pool.type.tp,
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
        "usd_per_million_tokens": bill_fleet(fleet).usd_per_h * answer.served_s / 3600 / millions,
        "power_w": fleet.power_w,
        "gpus": fleet.gpus,
        "slo": [
            {
                "limit": line.limit.name,
                "limit_s": line.limit.limit_s,
                "simulated_s": finite_or_none(line.value_s),
                "kept_frac": line.kept_frac,
            }
            for line in answer.verdict.lines
        ],
        "requests": len(tokens),
        "rate_rps": tokens.rate_rps,
        "answers": [answer_document(each) for each in answer.answers],
    }


def answer_document(answer: Answered) -> dict[str, Any]:
    """One of the three answers as plain values, for --json."""
    kept_in = answer.kept_in
    return {
        "name": answer.name,
        "value": answer.value,
        "cost_usd_per_h": answer.paid_usd_per_h,
        "kept": None if kept_in is None else kept_in.kept,
        "futures": None if kept_in is None else kept_in.futures,
    }


def moved_document(moved: Moved, before: StudyAnswer) -> dict[str, Any]:
    """A changed question as plain values, for --json."""
    return {
        "change": moved.label,
        "kept": moved.kept,
        "kept_under": moved.under or None,
        "difference": None if moved.answer is None else moved.answer.value - before.value,
        "answer": None if moved.answer is None else document(moved.answer),
        "why": moved.why,
    }


def difference(moved: Moved, before: StudyAnswer) -> str:
    """What a change moves, in words: "+2.99 USD/h (+12.5 %)"."""
    value = None if moved.answer is None else moved.answer.value
    return moved_text(before.value, value, OBJECTIVE_UNITS[before.problem.task.objective])


def verdict_text(moved: Moved) -> str:
    """What becomes of the fleet of before."""
    if moved.answer is None:
        return f"after the change no fleet is left: {moved.why}"
    if moved.kept is None:
        return "the fleet of before is not among those that may be used after the change"
    holds = "still holds" if moved.kept else "no longer holds"
    under = f", with {moved.under} in place of its own policies" if moved.under else ""
    return f"the fleet of before {holds} after the change{under}"
