"""Owned GPUs: they cost nothing, more are rented, and every bound stays a bound."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from plans import CATALOG
from questions import question, traffic

from planner.documents.facts import OwnedUnused
from planner.domain import OWNED, row_of
from planner.errors import InfeasibleError
from planner.reports.output import to_json
from planner.reports.words import answer_sentence
from planner.search.evidence.certify import plan, search_llm
from planner.search.evidence.plan import Plan
from planner.search.level0.owned_gpus import owned_beside
from planner.search.mixed import infeasible
from planner.search.mixed.best_fleet import best_of, find_best_fleet
from planner.search.mixed.bounds import lower_bound
from planner.search.mixed.mixed_fleets import MixedFleets
from planner.search.problem.build_problem import SearchInputs, build_problem
from planner.search.problem.options import option_of
from planner.search.problem.owned_first import objective_paid, owned_first, paid_at_least
from planner.search.problem.plan_problem import Problem
from planner.search.production.production_fleet import find_production_fleet
from planner.search.production.three_answers import with_answers
from planner.solvers.master import Option

H100 = {"h100-80g": 64}
PRICE = CATALOG.gpu("h100-80g").price_usd_per_h


def owned_of(found: Plan) -> int:
    return sum(p.count * p.type.gpus for p in found.fleet.running_pools if p.type.gpu.name.endswith(OWNED))


@pytest.mark.long
def test_what_is_owned_comes_off_the_price_of_the_same_fleet() -> None:
    """18 H100 keep this SLO; with 12 of them owned one node of eight is paid. So it is with 20, of which 18
    were not looked for.
    """
    rented = plan(question(fleet={"gpus": H100}), traffic(rate_rps=40.0), CATALOG)
    found = plan(question(fleet={"gpus": H100, "owned": {"H100": 12}}), traffic(rate_rps=40.0), CATALOG)
    assert owned_of(found) == 12 and found.fleet.gpus == rented.fleet.gpus
    assert found.fleet.price_usd_per_h == pytest.approx(rented.fleet.price_usd_per_h - 12 * PRICE)
    assert found.certificate.value == pytest.approx(8 * PRICE)
    assert found.certificate.bound <= found.certificate.value
    assert "12 GPUs owned, 6 rented" in answer_sentence(found)
    bill = to_json(found)["bill"]
    assert (bill["owned_gpus"], bill["rented_gpus"]) == (12, 6)


def test_no_more_is_rented_than_there_is_beside_what_is_owned() -> None:
    """Of 6 H100 3 are owned, which hold one worker of 2. Four were rented, though 3 are there to rent."""
    fleet = {"gpus": {"h100-80g": 6}, "owned": {"h100-80g": 3}, "sold_as": {"h100-80g": "gpu"}}
    with pytest.raises(InfeasibleError, match="Raise stock of h100-80g from 6 to 7,"):
        plan(question(fleet=fleet), traffic(requests=200, rate_rps=10.0), CATALOG)
    found = plan(
        question(fleet=fleet | {"gpus": {"h100-80g": 7}}), traffic(requests=200, rate_rps=10.0), CATALOG
    )
    assert found.fleet.gpus - owned_of(found) == 4 and found.bill.usd_per_h == pytest.approx(4 * PRICE)


def test_unused_owned_gpus_are_named_where_others_are_rented() -> None:
    """Nothing on the first screen said that GPUs which the user owns do no work."""
    h100s = question(fleet={"gpus": {"h100-80g": 16}, "owned": {"h100-80g": 5}})
    rents = plan(h100s, traffic(requests=300, rate_rps=20.0), CATALOG)
    unused = 5 - owned_of(rents)
    assert rents.bill.rented_gpus and bool(unused) == (OwnedUnused("h100-80g", unused, 5) in rents.warnings)
    # One A100 holds no worker of this LLM.
    a100 = question(fleet={"gpus": {"h100-80g": 16, "a100-80g": 1}, "owned": {"a100-80g": 1}})
    assert OwnedUnused("a100-80g", 1, 1) in plan(a100, traffic(requests=300), CATALOG).warnings
    owned = plan(question(fleet={"gpus": {}, "owned": {"h100-80g": 24}}), traffic(requests=300), CATALOG)
    assert owned_of(owned) < 24 and not any(isinstance(each, OwnedUnused) for each in owned.warnings)


def test_where_all_is_owned_the_fewest_run_and_cost_nothing() -> None:
    """Of 24 owned H100 no more run than would be rented; a GPU that gpus does not name is not rented."""
    task = question(fleet={"gpus": {}, "owned": {"h100-80g": 24}})
    found = plan(task, traffic(requests=300, rate_rps=8.0), CATALOG)
    rented = plan(question(fleet={"gpus": H100}), traffic(requests=300, rate_rps=8.0), CATALOG)
    assert found.fleet.price_usd_per_h == 0 and found.certificate.value == pytest.approx(0, abs=1e-12)
    assert found.fleet.gpus == owned_of(found) == rented.fleet.gpus
    with pytest.raises(InfeasibleError, match="stock of h100-80g@owned from 4"):
        plan(question(fleet={"gpus": {}, "owned": {"h100-80g": 4}}), traffic(rate_rps=40.0), CATALOG)


@pytest.mark.parametrize("stock", [None, 64])
def test_where_gpus_cost_nothing_the_fewest_run(stock: int | None) -> None:
    """With a price of 0 every fleet was the cheapest, so that it had two workers where one kept the SLO."""
    fleet = {"gpus": {"h100-80g": stock} if stock else ["h100-80g"]}
    asked = traffic(requests=300, rate_rps=8.0)
    found = plan(question(fleet=fleet | {"prices": {"h100-80g": 0}}), asked, CATALOG)
    paid = plan(question(fleet=fleet), asked, CATALOG)
    assert found.fleet.gpus == paid.fleet.gpus and found.bill.usd_per_h == 0
    assert found.certificate.value == found.certificate.bound == 0


@pytest.mark.parametrize("stock", (8, 16))
@pytest.mark.long
def test_lifting_the_limits_gives_no_owned_gpus_away(monkeypatch: pytest.MonkeyPatch, stock: int) -> None:
    """They cost nothing: by price the way out of one question was a fleet of 408,000 workers."""
    task = question(fleet={"gpus": {"h100-80g": 8, "a100-80g": stock}, "owned": {"a100-80g": 8}})
    problem = build_problem(task, traffic(rate_rps=40.0), CATALOG)
    lifted = list[tuple[int | None, str]]()

    def note_limits(wider: Problem, *_: object) -> MixedFleets:
        lifted.append((wider.limits.stock["a100-80g@owned"], wider.task.objective))
        return MixedFleets(None, math.inf, 0, is_exact=False, is_exhausted=False, is_hopeless=False)

    monkeypatch.setattr(infeasible, "search_level0", note_limits)
    monkeypatch.setattr(infeasible, "search_mixed_fleets", note_limits)
    assert not infeasible.find_wider_fleets(problem)
    assert lifted and all(owned == 8 or objective == "gpus" for owned, objective in lifted)


@pytest.mark.long
def test_old_gpus_that_are_owned_take_their_share_beside_new_ones_that_are_rented() -> None:
    """The A100 workers alone are far too few; beside them fewer H100 are rented than without."""
    fleet = {"gpus": {"h100-80g": 64}, "owned": {"a100-80g": 24}}
    asked = traffic(rate_rps=38.0, requests=300)
    problem = build_problem(question(fleet=fleet), asked, CATALOG)
    found, rented = (
        find_best_fleet(problem),
        find_best_fleet(build_problem(question(fleet={"gpus": H100}), asked, CATALOG)),
    )
    gpus = {o.type.gpu.name: o.type.gpus * n for o, n in found.best}
    assert 2 <= gpus["a100-80g@owned"] <= 24
    assert objective_paid(problem, found.best) < rented.value - 2 * PRICE


@pytest.mark.parametrize("owned", [1, 5, 8])
def test_the_bound_is_below_every_fleet_that_holds(owned: int) -> None:
    """Brute force: all counts of two H100 options, owned and rented, against the bound in money."""
    task = question(fleet={"gpus": {"h100-80g": 16}, "owned": {"h100-80g": owned}})
    problem = build_problem(task, traffic(rate_rps=10.0), CATALOG)
    found = find_best_fleet(problem)
    lower = lower_bound(problem)
    assert lower is not None and paid_at_least(problem, lower) <= objective_paid(problem, found.best) + 1e-9
    types = [w for w in problem.types if w.tp in (2, 4) and w.max_num_batched_tokens == 1024]
    assert {row_of(w.gpu.name) for w in types} == {"h100-80g"}
    options = [Option("mixed", w, w.price_usd_per_h) for w in types]
    cheapest = min(
        objective_paid(problem, counts)
        for vector in itertools.product(range(5), repeat=len(options))
        if any(vector)
        for counts in [tuple((o, n) for o, n in zip(options, vector, strict=True) if n)]
        if problem.limits.first_exceeded([(o.type, n) for o, n in counts]) is None
        and problem.oracle.holds(counts)
    )
    assert lower <= cheapest + 1e-3 and objective_paid(problem, found.best) <= cheapest + 1e-9


def test_owned_first_changes_no_machine_and_stays_within_the_stock() -> None:
    """Six workers of 4, 10 owned GPUs: two workers are owned, four rented."""
    problem = build_problem(question(fleet={"gpus": H100, "owned": {"h100-80g": 10}}), traffic(), CATALOG)
    worker = next(w for w in problem.types if w.gpu.name == "h100-80g" and w.tp == 4)
    bought = owned_first(problem, ((Option("mixed", worker, worker.price_usd_per_h), 6),))
    assert [(o.type.gpu.name, n) for o, n in bought] == [("h100-80g@owned", 2), ("h100-80g", 4)]
    assert owned_first(problem, bought) == bought
    assert problem.oracle.holds(bought) == problem.oracle.holds(((bought[1][0], 6),))


WIDE = {"ttft": {"p90": "2 s"}, "tbt": {"p99": "200 ms"}}


@pytest.mark.long
def test_production_takes_owned_gpus_that_idle_before_it_rents() -> None:
    """On paper 8 owned H100 are enough. In most scenarios they are not, and owned A100 stand idle."""
    fleet = {"gpus": H100, "owned": {"h100-80g": 8, "a100-80g": 16}, "max_num_batched_tokens": 1024}
    task = question(slo=WIDE, fleet=fleet, safety={"kept_in": 0.9})
    found = plan(task, traffic(rate_rps=30.0, requests=300), CATALOG)
    paper, production = (found.certificate.find_answer(name) for name in ("on-paper", "production"))
    assert paper is not None and production is not None and production.workers != paper.workers
    assert {pool.type.gpu.name for pool in found.fleet.running_pools} == {"h100-80g@owned", "a100-80g@owned"}
    assert found.bill.usd_per_h == production.usd_per_h == production.paid_usd_per_h == 0


@pytest.mark.slow
def test_no_answer_takes_more_than_is_owned() -> None:
    """34 workers of A100 would do, and 16 A100 are owned: the smallest fleet of a row is asked for without
    looking at the stock, and must not come back as an answer.
    """
    fleet = {"gpus": H100, "owned": {"h100-80g": 8, "a100-80g": 16}}
    task = question(fleet=fleet, safety={"kept_in": 0.9})
    found = plan(task, traffic(rate_rps=14.0), CATALOG)
    for answered in found.certificate.answers:
        used: dict[str, int] = {}
        for pool in answered.workers:
            used[pool.gpu] = used.get(pool.gpu, 0) + pool.gpus
        assert used.get("h100-80g@owned", 0) <= 8 and used.get("a100-80g@owned", 0) <= 16


def test_what_a_fleet_leaves_idle_may_be_added_to_it() -> None:
    """6 H100 and 4 of 16 A100 are in use: pools of up to 12 A100, in the roles that the fleet has."""
    fleet = {"gpus": H100, "owned": {"h100-80g": 6, "a100-80g": 16}, "max_num_batched_tokens": 1024}
    problem = build_problem(question(slo=WIDE, fleet=fleet), traffic(rate_rps=26.0, requests=300), CATALOG)
    found = find_best_fleet(problem)
    of = {option.name: option for option in found.level0.options}
    used = ((of["prefill h100-80g@owned tp2 1024"], 3), (of["decode a100-80g@owned tp4 1024"], 1))
    beside = owned_beside(problem, found.level0, used)
    assert [(o.role, o.type.gpu.name) for o, _ in beside] == [
        ("prefill", "a100-80g@owned"),
        ("decode", "a100-80g@owned"),
    ]
    assert all(option.type.gpus * count <= 12 < option.type.gpus * (count + 1) for option, count in beside)


@pytest.mark.slow
def test_a_fleet_that_stands_a_loss_costs_no_more_than_any_near_production() -> None:
    """Brute force: every fleet with up to two workers more or fewer of each machine of production, owned ones
    first, that keeps the SLO after any loss in the scenarios that production was searched in.
    """
    fleet = {"gpus": ["a100-80g", "h100-80g"], "owned": {"a100-80g": 24}}
    slo = {"ttft": {"p90": "2 s"}, "tbt": {"p99": "200 ms"}}
    task = question(fleet=fleet, slo=slo, safety={"kept_in": 0.9})
    asked = traffic(1, requests=300, rate_rps=40.0)
    problem, paper = best_of(search_llm(SearchInputs(task, asked, CATALOG)))
    found = find_production_fleet(problem, paper)
    assert found is not None
    made = with_answers(problem, paper, found)
    assert made.with_loss is not None
    lossy = replace(found.problem.oracle, spare_workers=1)
    workers: dict[tuple[str, str, int], tuple[Option, int]] = {}
    for option, count in found.best:  # owned and rented ones together
        alike = option.role, row_of(option.type.gpu.name), option.type.tp
        workers[alike] = option, workers.get(alike, (option, 0))[1] + count
    near = [
        owned_first(
            problem, tuple((option, n) for (option, _), n in zip(workers.values(), each, strict=True))
        )
        for each in itertools.product(*(range(max(n - 2, 1), n + 3) for _, n in workers.values()))
    ]
    below = 3 * 8 * PRICE  # what five workers of four H100 cost, which stand a loss too
    stand = [
        objective_paid(problem, counts)
        for counts in near
        if objective_paid(problem, counts) < below and problem.allows(counts) and lossy.holds(counts)
    ]
    assert stand and objective_paid(problem, made.with_loss) <= min(stand) + 1e-9
    assert lossy.holds(made.with_loss)


def test_workers_on_idle_rented_gpus_are_no_workers_more() -> None:
    """Three owned workers draw electricity, the fourth rents a node with room for them: all four go there."""
    fleet = {"gpus": H100, "owned": {"h100-80g": 6}, "electricity": {"price": "0.12 usd/kWh", "pue": 1.3}}
    problem = build_problem(question(fleet=fleet), traffic(), CATALOG)
    worker = next(w for w in problem.types if w.gpu.name == "h100-80g" and w.tp == 2)
    assert worker.gpu.is_sold_whole and worker.gpu.gpus_per_node == 8
    bought = owned_first(problem, ((option_of("mixed", worker, problem.option_objective), 4),))
    assert [(o.type.gpu.name, n) for o, n in bought] == [("h100-80g", 4)]
