"""Several LLMs planned together with the simulator: enumeration, invariances, what binds, what is written."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from plans import CATALOG
from questions import LLM, traffic
from shares import some

from planner.documents.several_llms_question import LlmQuestion, SeveralLlmsQuestion
from planner.documents.task import parse_task
from planner.errors import InfeasibleError, PlannerError
from planner.reports.fact_sentences import fact_sentences_of
from planner.search.evidence.certify import plan
from planner.search.level0.cheapest import CheapestChoice, cheapest_designs
from planner.search.oracle.traffic_request import requested_traffic
from planner.search.problem import build_problem as posing
from planner.search.problem import draws, options
from planner.search.problem.build_problem import build_problem
from planner.search.several import shared_paper as sharing
from planner.search.several.several_llms import _llm_warnings, plan_together
from planner.search.several.shared_plan import SharedPlan
from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import judge_slo
from planner.solvers.master import FleetLimits

Floats = npt.NDArray[np.float64]
SLOS: tuple[dict[str, Any], ...] = (
    {"ttft": {"p90": "1 s"}, "tbt": {"p99": "80 ms"}},
    {"ttft": {"p90": "2 s"}, "tpot": {"p90": "60 ms"}},
    {"ttft": {"p90": "500 ms"}, "tbt": {"p99": "200 ms"}},
)
SINGLY = {"sold_as": {"a100-80g": "gpu", "h100-80g": "gpu"}}  # several LLMs are compared so
TRACES = [traffic(k, requests=80, rate_rps=5.0) for k in range(3)]


def question(
    fleet: dict[str, Any],
    *,
    llms: int = 2,
    rates: tuple[float, ...] = (6.0, 9.0, 4.0),
    runs: int = 1,
    **shared: Any,
) -> SeveralLlmsQuestion:
    parts = tuple(
        LlmQuestion(
            f"llm-{k}",
            parse_task(
                {
                    "safety": "none",
                    "llm": LLM,
                    "slo": SLOS[k],
                    "traffic": {"rate": rates[k], "draws": runs},
                    "fleet": (SINGLY if llms > 1 else {}) | fleet,
                    "engine": "none",
                    **shared,
                },
                CATALOG,
            ),
            TRACES[k],
        )
        for k in range(llms)
    )
    return SeveralLlmsQuestion(parts, (), ())


def together(fleet: dict[str, Any], **asked: Any) -> SharedPlan:
    return plan_together(question(fleet, **asked), CATALOG)


def limits_of(asked: SeveralLlmsQuestion) -> FleetLimits:
    task = asked.entries[0].task
    return FleetLimits(task.stock, task.power_limit_w, task.cost_limit_usd_per_h, task.gpu_limit)


def every_fleet(part: LlmQuestion, limits: FleetLimits) -> Floats:
    """Objective and use of each limit of all fleets of level 0 that hold and alone are within the limits."""
    problem = build_problem(part.task, part.trace, CATALOG)
    mixed, prefill, decode = (
        make(problem.types, part.task.objective)
        for make in (options.mixed_options, options.prefill_options, options.decode_options)
    )
    found = []
    for shape in [*((option,) for option in mixed), *itertools.product(prefill, decode)]:
        ranges = [range(1, int(limits.most_workers(option.type)) + 1) for option in shape]
        for counts in itertools.product(*ranges):
            fleet = tuple(zip(shape, counts, strict=True))
            is_within = limits.first_exceeded([(option.type, n) for option, n in fleet]) is None
            if is_within and problem.oracle.holds(fleet):
                uses = [
                    sum(limits.use_per_worker(name, o.type) * n for o, n in fleet)
                    for name, _ in limits.rows()
                ]
                found.append([sum(o.objective * n for o, n in fleet), *uses])
    return np.unique(np.array(found), axis=0)


def least_by_force(fleets: list[Floats], amounts: list[float], column: int = 0) -> float:
    """The least objective (column 0), or the least of the limit in a column, over all choices of fleets."""
    totals = np.zeros((1, 1 + len(amounts)))
    most = np.array([math.inf, *amounts])
    most[column] = math.inf
    for each in fleets:
        totals = (totals[:, None, :] + each[None, :, :]).reshape(-1, 1 + len(amounts))
        totals = np.unique(totals[(totals <= most * (1 + 1e-9)).all(axis=1)], axis=0)
    return float(totals[:, column].min()) if len(totals) else math.inf


@pytest.fixture
def few_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of one token budget, so that all fleets can be simulated; few further draws of the traffic."""

    def of_one_budget(llm: Any, gpus: Any, catalog: Any, longest: int, engines: options.EngineChoices) -> Any:
        return options.worker_types(llm, gpus, catalog, longest, replace(engines, budgets=(2048,)))

    monkeypatch.setattr(posing, "worker_types", of_one_budget)
    monkeypatch.setattr(draws, "MOST_RUNS", 3)


pytestmark = pytest.mark.usefixtures("few_types")


@pytest.mark.parametrize(
    ("stock", "asked"),
    [
        ({"a100-80g": 16, "h100-80g": 4}, {}),
        ({"a100-80g": 12, "h100-80g": 6}, {"objective": "power"}),
        pytest.param({"a100-80g": 16, "h100-80g": 5}, {"rates": (9.0, 6.0)}, marks=pytest.mark.slow),
        pytest.param({"a100-80g": 12, "h100-80g": 5}, {"objective": "gpus"}, marks=pytest.mark.slow),
        pytest.param(
            {"a100-80g": 12, "h100-80g": 12}, {"limits": {"power": "7.3 kW"}}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"a100-80g": 12, "h100-80g": 8}, {"llms": 3, "limits": {"gpus": 20}}, marks=pytest.mark.slow
        ),
        pytest.param({"a100-80g": 8, "h100-80g": 6}, {}, marks=pytest.mark.slow),
        ({"a100-80g": 10, "h100-80g": 6}, {"limits": {"power": "5.2 kW", "gpus": 10}}),
    ],
)
def test_every_fleet_simulated_gives_the_same_answer(
    stock: dict[str, int], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimum, with and without the fleets that serving one LLM after another finds; where there is none,
    fleets of several worker types per pool, or the least more of each limit that would do."""
    posed = question({"gpus": stock}, **asked)
    limits = limits_of(posed)
    amounts = [amount for _, amount in limits.rows()]
    fleets = [every_fleet(part, limits) for part in posed.entries]
    expected = least_by_force(fleets, amounts)
    if math.isfinite(expected):
        for _ in range(2):
            found = plan_together(posed, CATALOG)
            assert found.is_exact and found.status == "on paper"
            # where all that is cheapest alone fits, nothing was shared and the sum of each alone is a bound
            assert found.level0_bound <= expected * (1 + 1e-9)
            assert found.level0 is None or found.level0_bound == found.level0 == pytest.approx(expected)
            assert found.bound <= found.value <= expected * (1 + 1e-9)
            monkeypatch.setattr(sharing, "_simulate_in_turn", lambda *_: None)
        return
    try:
        found = plan_together(posed, CATALOG)
    except InfeasibleError as error:
        relaxation = error.relaxation
    else:
        assert found.level0 is None
        kept(found, posed)
        return
    wide = FleetLimits(dict.fromkeys(stock, 12), limits.power_w and 2e4, None, limits.gpus and 24)
    fleets = [every_fleet(part, wide) for part in posed.entries]
    for column, (limit, amount) in enumerate(limits.rows(), start=1):
        least = least_by_force(fleets, amounts, column)
        said = f"{limit.name} from {amount:g} to {least:g}"
        assert (said in relaxation) == math.isfinite(least)


def kept(found: SharedPlan, asked: SeveralLlmsQuestion) -> None:
    """Every constraint, from the answer alone: each LLM's SLO in a run of its own, each shared limit."""
    for part in asked.entries:
        answer = found.plans[part.name]
        assert judge_slo(simulate(answer.fleet, answer.trace, limits=answer.slo.limits), answer.slo).holds
        assert answer.slo == part.task.slo and answer.fleet.llm.name == part.task.llm
    task = asked.entries[0].task
    pools = [pool for fleet in found.fleets for pool in fleet.pools]
    for gpu, count in task.stock.items():
        assert count is None or sum(p.count * p.type.gpus for p in pools if p.type.gpu.name == gpu) <= count
    for limit, used in (
        (task.power_limit_w, sum(p.count * p.type.power_w for p in pools)),
        (task.cost_limit_usd_per_h, sum(p.count * p.type.price_usd_per_h for p in pools)),
        (task.gpu_limit, sum(p.count * p.type.gpus for p in pools)),
    ):
        assert limit is None or used <= limit * (1 + 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("shared", some([{"limits": {"power": "16 kW"}}, {"limits": {"gpus": 24}}, {}], 1))
def test_the_answer_keeps_every_constraint(shared: dict[str, Any]) -> None:
    asked = question({"gpus": {"a100-80g": 24, "h100-80g": 8}}, llms=3, **shared)
    found = plan_together(asked, CATALOG)
    kept(found, asked)
    assert found.value == pytest.approx(sum(fleet.price_usd_per_h for fleet in found.fleets))
    assert sum(found.alone.values()) <= found.value * (1 + 1e-9)
    assert found.placement is not None
    placed = sum(len(part.gpus) for node in found.placement.nodes for part in node.parts)
    assert placed == sum(fleet.gpus for fleet in found.fleets)


def test_with_enough_for_all_each_has_its_own_plan() -> None:
    asked = question({"gpus": ["a100-80g", "h100-80g"]})
    found = plan_together(asked, CATALOG)
    for part in asked.entries:
        alone = plan(part.task, part.trace, CATALOG)
        assert found.plans[part.name].fleet == alone.fleet
        assert found.plans[part.name].certificate == alone.certificate
    assert found.is_exact and found.rounds == 0
    assert "no shared limit binds" in fact_sentences_of(found.binding)[0]


def test_one_llm_is_planned_as_it_is_alone() -> None:
    """The same search: the same fleet, certificate and count of simulations."""
    asked = question({"gpus": {"a100-80g": 12, "h100-80g": 8}}, llms=1)
    (part,) = asked.entries
    found, alone = plan_together(asked, CATALOG), plan(part.task, part.trace, CATALOG)
    assert found.plans[part.name].fleet == alone.fleet
    assert found.plans[part.name].certificate == alone.certificate
    assert found.simulations <= alone.certificate.simulations
    assert (found.value, found.bound) == (alone.certificate.value, alone.certificate.bound)


def test_owned_gpus_cost_nothing_in_bounds_too() -> None:
    """The price that breaks ties between owned GPUs made a bound that was above fleets of 0 USD/h."""
    shared = together({"gpus": {"h100-80g": 16}, "owned": {"h100-80g": 16}})
    assert shared.value == shared.level0 == shared.level0_bound == shared.bound == 0.0


def test_the_one_that_loses_least_gives_way() -> None:
    """Both like 4 H100 best, and there are 4. What the other one costs on A100 decides who gets them."""
    fleet = {"gpus": {"a100-80g": 16, "h100-80g": 4}}
    found = together(fleet)
    dearer = [name for name, one in found.plans.items() if one.certificate.value > found.alone[name] + 1e-6]
    assert len(dearer) == 1 and any(
        line.startswith(f"{dearer[0]} gives way") for line in fact_sentences_of(found.binding)
    )
    on_a100 = [
        plan(replace(part.task, stock={"a100-80g": 16}), part.trace, CATALOG).certificate.level0
        for part in question(fleet).entries
    ]
    loses = [cost - alone for cost, alone in zip(on_a100, found.alone.values(), strict=True)]
    assert found.value == pytest.approx(sum(found.alone.values()) + min(loses))


@pytest.mark.slow
def test_twice_the_prices_is_the_same_plan() -> None:
    stock = {"a100-80g": 16, "h100-80g": 4}
    prices = {name: f"{2 * CATALOG.gpu(name).price_usd_per_h} usd/h" for name in stock}
    cheap, dear = together({"gpus": stock}), together({"gpus": stock, "prices": prices})

    def shape(found: SharedPlan) -> list[tuple[str, str, int]]:
        return [(pool.role, pool.type.name, pool.count) for fleet in found.fleets for pool in fleet.pools]

    assert shape(cheap) == shape(dear)
    assert dear.value == pytest.approx(2 * cheap.value)


@pytest.mark.slow
def test_more_stock_never_costs_more() -> None:
    values = [
        together({"gpus": {"a100-80g": a100, "h100-80g": h100}}).level0_bound
        for a100, h100 in ((12, 4), (16, 4), (16, 8))
    ]
    assert values == sorted(values, reverse=True) and values[-1] < values[0]


@pytest.mark.slow
def test_what_a_limit_costs_is_what_planning_with_more_of_it_saves() -> None:
    stock = {"a100-80g": 16, "h100-80g": 4}
    found = together({"gpus": stock})
    (line,) = [line for line in fact_sentences_of(found.binding) if "more h100-80g" in line]
    amount = int(line.partition("(")[2].partition(" ")[0])
    saved = float(line.partition("would save ")[2].partition(" ")[0])
    less, enough = (together({"gpus": stock | {"h100-80g": more}}).level0 for more in (amount - 1, amount))
    assert found.level0 is not None and enough is not None
    assert found.level0 - enough == pytest.approx(saved, rel=1e-3)
    assert less is None or less == pytest.approx(found.level0)  # None: something cheaper was found before it


@pytest.mark.slow
def test_too_little_for_all_names_the_least_more_of_each_limit() -> None:
    """4 A100 and 4 H100 serve each LLM alone. The least more of either GPU is enough, one less is not."""
    stock = {"a100-80g": 4, "h100-80g": 4}
    with pytest.raises(InfeasibleError, match="each LLM can be served alone") as caught:
        together({"gpus": stock})
    assert caught.value.kind == "capacity"
    for gpu in stock:
        assert f"stock of {gpu}" in caught.value.constraint
        needed = int(caught.value.relaxation.partition(f"stock of {gpu} from 4 to ")[2].partition(",")[0])
        together({"gpus": stock | {gpu: needed}})
        with pytest.raises(InfeasibleError):
            together({"gpus": stock | {gpu: needed - 1}})


def test_too_little_for_one_names_it() -> None:
    with pytest.raises(InfeasibleError, match="llm-0, even with all of the fleet for itself: capacity"):
        together({"gpus": {"a100-80g": 2}})


def test_out_of_time_is_no_plan_or_one_with_its_bound() -> None:
    with pytest.raises(PlannerError, match="time limit"):
        plan_together(question({"gpus": {"a100-80g": 16, "h100-80g": 4}}), CATALOG, time_limit_s=0.0)


@pytest.mark.slow
def test_stopped_between_proposals_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first proposal some fleets are known; the optimum lies between them and the bound."""
    monkeypatch.setattr(posing, "worker_types", options.worker_types)
    monkeypatch.setattr(sharing, "_simulate_in_turn", lambda *_: None)
    asked = question({"gpus": {"a100-80g": 24, "h100-80g": 4}}, rates=(9.0, 6.0))
    best = plan_together(asked, CATALOG)

    def stopped(*question: Any, **how: Any) -> CheapestChoice:
        return cheapest_designs(*question, **how | {"out_of_time": lambda: True})

    monkeypatch.setattr(sharing, "cheapest_designs", stopped)
    found = plan_together(asked, CATALOG)
    assert found.status == "best found" and not found.is_exact
    assert best.level0 is not None and found.level0 is not None
    assert best.rounds > 0 and found.level0_bound < best.level0 <= found.level0
    kept(found, asked)


@pytest.mark.long
def test_fleets_hold_on_every_draw_that_is_asked_for() -> None:
    """Three draws of the traffic, each simulated here by itself, where the LLMs compete for 4 H100."""
    asked = question({"gpus": {"a100-80g": 20, "h100-80g": 4}}, runs=3)
    found = plan_together(asked, CATALOG)
    assert any("gives way" in line for line in fact_sentences_of(found.binding))
    for part in asked.entries:
        fleet = found.plans[part.name].fleet
        for seed in range(3):
            trace, _ = requested_traffic(part.trace, part.task, seed=seed)
            assert judge_slo(simulate(fleet, trace, limits=part.task.slo.limits), part.task.slo).holds
    assert found.value >= together({"gpus": {"a100-80g": 20, "h100-80g": 4}}).value * (1 - 1e-9)


@pytest.mark.long
def test_same_question_same_answer() -> None:
    asked = question({"gpus": {"a100-80g": 16, "h100-80g": 4}})
    first, second = (plan_together(asked, CATALOG, seed=3) for _ in range(2))
    assert first.fleets == second.fleets and first.binding == second.binding
    assert (first.rounds, first.simulations) == (second.rounds, second.simulations)


def test_a_warning_of_several_llms_is_there_once() -> None:
    """That no fleet for production was found filled sixteen lines: word for word for each of two LLMs."""
    parts = [cast(Any, SimpleNamespace(name=name)) for name in ("chat", "bots")]
    plans = [cast(Any, SimpleNamespace(warnings=warnings)) for warnings in (("a", "b"), ("b", "c"))]
    found: list[tuple[str, Any]] = [(each.llm, each.warning) for each in _llm_warnings(parts, plans)]
    assert found == [("chat", "a"), ("chat, bots", "b"), ("bots", "c")]
