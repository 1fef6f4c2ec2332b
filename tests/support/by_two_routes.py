"""One question by two routes: `plan what-if`, `pareto`, `replan` and `schedule` against `plan`, and the first
screen's word on 20 % more traffic against a plan for so much of it.

Each check draws a small random question (random_questions.py; as many GPUs as it takes, no limits on the
fleet), asks both routes and says in words what differs: empty where they agree. Where there is nothing to
compare it raises InfeasibleError or OutOfTimeError, or, of traffic that cannot be drawn anew, InputError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import yaml
from random_questions import Question, question

from planner.api.scheduling import solve_schedule
from planner.documents.markets import parse_market
from planner.documents.planned_market import schedule_document
from planner.documents.task import PlanQuestion, parse_task
from planner.errors import InfeasibleError, PlannerError
from planner.reports import screen
from planner.reports.output import plan_yaml
from planner.search.evidence import certify
from planner.search.evidence.plan import Plan
from planner.search.problem.bill import bill_fleet
from planner.search.problem.plan_problem import Conditions, with_policies
from planner.search.production.scenario_test import untimed_test
from planner.solvers.reserved_schedule import Demand
from planner.studies.pareto_frontier import find_frontier
from planner.studies.replanning import ReplanTerms, replan
from planner.studies.what_if import Study, answer_change, change_question


class NoPriceError(PlannerError):
    """The first screen shows no price of more traffic."""


KINDS = ("hand-off", "bursts", "mixed", "spare", "percentile", "small", "order")
REQUESTS = (20, 100)
MOST_GPUS = 2
SAME_FRAC = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class TwoRoutes:
    """A question with its slo.yaml; `is_safe`: planned for production, else on paper."""

    drawn: Question
    document: Mapping[str, Any]
    is_safe: bool
    rng: np.random.Generator

    def task(self, *changes: str) -> PlanQuestion:
        document = dict(self.document)
        for text in changes:
            document = change_question(document, text)
        return parse_task(document, self.drawn.catalog)

    def study(self) -> Study:
        return Study(self.drawn.trace, self.drawn.catalog, time_limit_s=math.inf)

    def plan(self, *changes: str, robustness: bool = False) -> Plan:
        """As the command `plan` makes it, with what nobody planned before."""
        return certify.plan(
            self.task(*changes),
            self.drawn.trace,
            self.drawn.catalog,
            time_limit_s=math.inf,
            conditions=Conditions(adds_robustness=robustness),
        )

    def value(self, *changes: str) -> float:
        return self.plan(*changes).value

    @property
    def rate_rps(self) -> float:
        return self.drawn.trace.rate_rps


def two_routes(seed: int, *, is_safe: bool) -> TwoRoutes:
    drawn = question(seed, KINDS[seed % len(KINDS)], REQUESTS)
    document = {key: value for key, value in drawn.document.items() if key not in ("limits", "safety")}
    used = [option.type.gpu.name for option, _ in drawn.drawn]
    gpus = list(dict.fromkeys([*used, *document["fleet"]["gpus"]]))[:MOST_GPUS]
    document["fleet"] = {**document["fleet"], "gpus": dict.fromkeys(gpus)}
    if not is_safe:
        document["safety"] = "none"
    return TwoRoutes(drawn, document, is_safe, np.random.default_rng([33, seed]))


def what_if(asked: TwoRoutes) -> list[str]:
    """A changed question, from the plan of before, against a plan of the changed one."""
    metric, lines = next((key, each) for key, each in asked.document["slo"].items() if isinstance(each, dict))
    percentile, limit = next(iter(lines.items()))
    seconds = float(limit.split()[0])
    rate = f"traffic.rate={asked.rate_rps * asked.rng.uniform(0.8, 1.3):.6g}"
    changes = [
        f"slo.{metric}.{percentile}={seconds * asked.rng.uniform(0.8, 1.3):.6g} s",
        rate,
        "spare=1 worker",
        *(["safety.growth=20 %", "safety.kept_in=0.8"] if asked.is_safe else []),
    ]
    text = str(asked.rng.choice(changes))
    study = asked.study()
    before, task = study.answer(asked.task()), asked.task(text)
    moved = answer_change(study, before, task, text)
    wrong = _same("what-if, before", before.value, lambda: asked.plan().value)
    return wrong + _same(
        f"what-if {text}",
        None if moved.answer is None else moved.answer.value,
        lambda: asked.plan(text).value,
    )


def pareto(asked: TwoRoutes) -> list[str]:
    """A frontier at the question's limit and at one that it was not asked about, against plans for these.

    Between the rates that a frontier plans, other requests are drawn, so that a plan there may cost less.
    """
    metric, lines = next((key, each) for key, each in asked.document["slo"].items() if isinstance(each, dict))
    percentile, limit = next(iter(lines.items()))
    if asked.rng.random() < 0.5:
        found = find_frontier(asked.study(), asked.task(), "rate", points=6)
        key, name, unit = "traffic.rate", asked.rate_rps, ""
    else:
        found = find_frontier(asked.study(), asked.task(), f"{metric}.{percentile}", points=6)
        key, name, unit = f"slo.{metric}.{percentile}", float(limit.split()[0]), " s"
    wrong = []
    for factor in (1.0, asked.rng.uniform(0.6, 1.9)):
        limit = name * factor
        beyond = found.stairs[-1].corner
        if "plans were made" in found.ended and (limit > beyond if found.is_rising else limit < beyond):
            continue  # nobody walked so far
        step = found.best_at(limit)
        text = f"{key}={limit!r}{unit}"
        value = None if step is None else step.value
        is_most = found.is_rising and factor != 1.0
        wrong += _same(f"pareto at {text}", value, partial(asked.value, text), is_most=is_most)
    return wrong


def replanned(asked: TwoRoutes) -> list[str]:
    """From another fleet, where starts and stops cost nothing, against a plan: what runs may be of other
    settings than a plan mixes, so that less is wrong only where every mix was simulated.
    """
    made, study = asked.plan(), asked.study()
    running = study.problem_of(asked.task()).oracle.fleet(asked.drawn.drawn)
    free = replan(study, asked.task(), running, ReplanTerms(1.0, 0.0, 0.0))
    (scratch,) = [way for way in free.ways if way.label == "plan from scratch"]
    wrong = _same("replan, from scratch", scratch.cost_usd_per_h, lambda: bill_fleet(made.fleet).usd_per_h)
    if made.certificate.beyond_exact or free.best.cost_usd_per_h > bill_fleet(made.fleet).usd_per_h:
        wrong += _same(
            "replan at no cost", free.best.cost_usd_per_h, lambda: bill_fleet(made.fleet).usd_per_h
        )
    dear = replan(asked.study(), asked.task(), made.fleet, ReplanTerms(1.0, 5.0, 5.0))
    if not dear.keeps_running:
        wrong.append(f"replan: the plan's own fleet is not kept: {dear.best.fleet}")
    return wrong


def scheduled(asked: TwoRoutes) -> list[str]:
    """One window of the plan's traffic, bought by the hour, against the plan; and of twice as much."""
    made, wrong = asked.plan(), list[str]()
    market = parse_market(schedule_document([(_written(made), asked.task())], asked.drawn.catalog))
    by_gpu_usd_per_h = made.fleet.price_usd_per_h  # a schedule counts GPUs in use, and says so
    for times in (1, 2):
        rate_rps = np.array([[made.trace.rate_rps * times]])
        answer = solve_schedule(market, Demand((made.fleet.llm.name,), rate_rps, 3600.0), 0.0, 60.0)
        usd_per_h, wanted = answer.schedule.cost_usd_per_h, times * by_gpu_usd_per_h
        if not math.isclose(usd_per_h, wanted, rel_tol=SAME_FRAC):
            wrong.append(f"schedule of {times} x the traffic: {usd_per_h:.6g}, plan: {wanted:.6g}")
    return wrong


def _written(made: Plan) -> dict[str, Any]:
    written: dict[str, Any] = yaml.safe_load(plan_yaml(made))
    return written | {"rate_rps": written["traffic"]["rate_rps"]}


def more_traffic(asked: TwoRoutes) -> list[str]:
    """Where the first screen says that 20 % more traffic costs nothing, a plan with `safety: growth` costs
    no more, and its test of this fleet counts as many kept scenarios. Where it says that it is carried, on
    paper, a plan at that rate by a faster clock costs no more.
    """
    made = asked.plan(robustness=True)
    name = screen.more_traffic_name(screen.growth_frac_of(made))
    (shown,) = [each for each in screen.key_figures(made) if each.name == name]
    if shown.value == "carried":
        paid_usd_per_h = made.bill.usd_per_h
        more = asked.plan(f"traffic={{rate: {1.2 * made.trace.rate_rps!r}, scale: compress}}")
        is_more = more.bill.usd_per_h > paid_usd_per_h * (1 + SAME_FRAC)
        return [f"carried for {paid_usd_per_h}, plan: {more.bill.usd_per_h}"] if is_more else []
    if shown.value not in screen.NOTHING_EXTRA.values():
        raise NoPriceError
    more = asked.plan("safety.growth=20 %")
    wrong = _same("20 % more traffic", made.value, lambda: more.value, is_most=True)
    robustness = made.certificate.robustness
    assert robustness is not None and robustness.more_traffic is not None
    # Of several policies the plan has chosen some.
    problem = asked.study().problem_of(asked.task("safety.growth=20 %"))
    problem = with_policies(problem, made.fleet.policies)
    test = untimed_test(problem)
    assert test is not None
    kept_in = test.decide(problem.oracle.counts(made.fleet))
    kept = robustness.more_traffic.kept, robustness.more_traffic.scenario_count
    if kept != (kept_in.kept, kept_in.scenario_count):
        wrong.append(f"kept in {kept}, test of such a plan: {kept_in}")
    return wrong


def _same(
    what: str, value: float | None, planned: Callable[[], float], *, is_most: bool = False
) -> list[str]:
    """What differs; with `is_most` a plan may cost less than `value`."""
    try:
        wanted: float | None = planned()
    except InfeasibleError:
        wanted = None
    if value is None or wanted is None:
        return [] if value is wanted else [f"{what}: {value}, plan: {wanted}"]
    if math.isclose(value, wanted, rel_tol=SAME_FRAC) or (is_most and wanted < value):
        return []
    return [f"{what}: {value:.6g}, plan: {wanted:.6g}"]


CHECKS: dict[str, Callable[[TwoRoutes], list[str]]] = {
    "what-if": what_if,
    "pareto": pareto,
    "replan": replanned,
    "schedule": scheduled,
    "more-traffic": more_traffic,
}
