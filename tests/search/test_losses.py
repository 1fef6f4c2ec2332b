"""What a fleet must survive: spare workers, spare nodes, spot workers; robust plans; most traffic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from plans import CATALOG
from questions import question, traffic
from scipy.stats import binom
from shares import some

from planner.documents.task import Spot
from planner.domain import SPOT
from planner.errors import InfeasibleError, InputError
from planner.fleet import Disturbance, Fleet, Policies
from planner.reports.fact_sentences import fact_sentence, fact_sentences_of
from planner.search.evidence import findings
from planner.search.evidence.certify import plan
from planner.search.evidence.plan import Plan
from planner.search.mixed.best_fleet import FleetSearch, find_best_fleet
from planner.search.mixed.policy_search import search_policies
from planner.search.oracle.fleet_counts import objective_of
from planner.search.oracle.fleet_oracle import SPOT_RISK_FRAC, Oracle
from planner.search.oracle.traffic_request import requested_traffic
from planner.search.problem.bill import bill_fleet
from planner.search.problem.build_problem import build_problem
from planner.search.problem.plan_problem import Problem
from planner.search.production import cheapest_kept
from planner.simulator import judge_slo, simulate
from planner.solvers.master import Option
from planner.traffic.trace import Trace

ON_SPOT = {"spot": 1.0, "spot_interruptions_per_h": 0.2, "spot_restart": "10 min"}


@cache
def plain_plan(seed: int = 0) -> Plan:
    """What others are held against: without losses, without insurance."""
    return plan(question(), traffic(seed), CATALOG)


def an_oracle(**losses: Any) -> tuple[Oracle, list[Option]]:
    problem = build_problem(question(), traffic(), CATALOG)
    oracle = Oracle(problem.llm, problem.trace, problem.slo, problem.task.network, Policies(), **losses)
    return oracle, [Option("mixed", worker, 1.0) for worker in problem.types]


def test_a_fleet_may_fail_before_any_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers miss the SLO and two keep it, as where a router prefers a slow one: after a loss the
    fleet holds, and yet it does not. The certificate called such a neighbour a fleet that holds.
    """
    oracle, (option, *_) = an_oracle(spare_workers=1)
    monkeypatch.setattr(Oracle, "_keeps_slo", lambda _, counts: sum(n for _, n in counts) <= 2)
    assert oracle.failing_loss(((option, 2),)) is None and oracle.holds(((option, 2),))
    assert not oracle.holds(((option, 3),))
    assert oracle.failing_loss(((option, 3),)) == (oracle, ((option, 3),))


def test_a_worker_that_is_down_from_the_start_is_not_there() -> None:
    """Four workers of which one is down for the whole window serve every request as three do."""
    found = plain_plan()
    pool = replace(found.fleet.pools[0], count=4, role="mixed")
    four = Fleet(found.fleet.llm, (pool,), disturbances=(Disturbance(0.0, "down", 3),))
    three = Fleet(found.fleet.llm, (replace(pool, count=3),))
    one, other = (simulate(fleet, found.trace) for fleet in (four, three))
    assert one.ttft_s == pytest.approx(other.ttft_s) and one.e2e_s == pytest.approx(other.e2e_s)


def test_a_fleet_must_hold_without_a_loss_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more worker may make a fleet miss its SLO: 1 H100 and 2 pairs did by random routing, none lost."""
    oracle, (option, *_) = an_oracle(spare_workers=1)
    held = {1, 2, 4}
    monkeypatch.setattr(Oracle, "_keeps_slo", lambda _, counts: counts[0][1] in held)
    assert [oracle._survives(((option, count),)) for count in (2, 3, 4, 5)] == [True, False, False, False]


def test_two_spare_workers_or_nodes_may_be_of_two_pools() -> None:
    """Only losses of one pool, and nodes of one GPU, were simulated: without its two decode workers, of two
    types, a fleet for 13.62 USD/h was called enough, where one type of them needs 15.89.
    """
    oracle, options = an_oracle(spare_workers=2)
    first, second = (
        options[0],
        next(option for option in options if option.type.gpu.base != options[0].type.gpu.base),
    )
    counts = ((first, 3), (second, 1))
    assert oracle._losses(counts) == [((first, 1), (second, 1)), ((first, 2), (second, 0))]
    assert oracle._losses(((first, 1),)) == [((first, 0),)]
    on_nodes = replace(oracle, spare_workers=0, spare_nodes=2)
    per_node = [option.type.gpu.gpus_per_node // option.type.gpus for option in (first, second)]
    many = ((first, 20), (second, 20))
    assert ((first, 20 - per_node[0]), (second, 20 - per_node[1])) in on_nodes._losses(many)


def test_two_nodes_may_take_two_workers_that_span_nodes() -> None:
    """Each worker of 16 GPUs is on two nodes of 8. Losing one node of each of two workers stops both, and a
    plan with `spare: 2 nodes` survived the loss of one.
    """
    oracle, (option, *_) = an_oracle(spare_nodes=2)
    wide = replace(option, type=replace(option.type, tp=8, pp=2))
    assert wide.type.gpus == 2 * wide.type.gpu.gpus_per_node
    assert oracle._losses(((wide, 5),)) == [((wide, 3),)]
    assert oracle.workers_left(wide, 5) == 3


@pytest.mark.parametrize("terms", [Spot(1.0, 0.05), Spot(1.0, 2.0, 900.0), Spot(1.0, 30.0, 60.0)])
def test_spot_workers_that_may_be_down_are_a_quantile_of_the_binomial(terms: Spot) -> None:
    """Against scipy's quantile; down for restart / (mean time up + restart) of the time."""
    oracle, options = an_oracle(spot={options_name(): terms})
    option = replace(options[0], type=replace(options[0].type, gpu=CATALOG.gpu(options_name())))
    up_s = 3600 / terms.interruptions_per_h
    for count in (1, 2, 5, 17, 60):
        down = binom.ppf(1 - SPOT_RISK_FRAC, count, terms.restart_s / (up_s + terms.restart_s))
        assert oracle.spot_down(option, count) == down
    assert oracle.spot_down(options[0], 60) == 0


@pytest.mark.parametrize(("off_spot", "least", "left"), [(1, 1, 4), (1, 2, 1), (2, 2, 5)])
def test_without_enough_workers_off_spot_those_on_spot_do_not_count(
    off_spot: int, least: int, left: int
) -> None:
    """Of five spot workers that are down for 1.64 % of the time two may be down (0.1 %), so three are left;
    beside fewer workers off spot than `least_off_spot` none of them counts."""
    terms = Spot(1.0, 0.1, 600.0)
    oracle, options = an_oracle(spot={options_name(): terms}, least_off_spot=least)
    on_spot = replace(options[0], type=replace(options[0].type, gpu=CATALOG.gpu(options_name())))
    (remaining,) = oracle._losses(((options[0], off_spot), (on_spot, 5)))
    assert sum(count for _, count in remaining) == left


def test_a_pool_on_spot_grows_by_workers_that_are_left() -> None:
    """Of three spot workers one may be down, of four and of five two: one worker more gains nothing. A fleet
    of 1 + 3 grew off spot instead, to 6.18 USD/h; 1 + 5 cost 5.89."""
    oracle, options = an_oracle(spot={options_name(): Spot(1.0, 0.1, 600.0)})
    on_spot = replace(options[0], type=replace(options[0].type, gpu=CATALOG.gpu(options_name())))
    assert cheapest_kept._more_workers(oracle, on_spot, 3, 1) == 2
    assert cheapest_kept._more_workers(oracle, options[0], 3, 1) == 1


@pytest.mark.long
def test_a_plan_has_as_many_workers_off_spot_as_requested() -> None:
    """Spot costs a third, so without the floor all workers would be on spot; a floor without a spot price
    bounds nothing, and is refused."""
    prices = {"prices": {"h100-80g": {"on_demand": 3.0} | ON_SPOT}}
    task = question(fleet={"gpus": {"h100-80g": 64}, "least_off_spot": 2} | prices)
    found = plan(task, traffic(requests=300, rate_rps=40.0), CATALOG)
    for role in {pool.role for pool in found.fleet.pools}:
        pools = [pool for pool in found.fleet.pools if pool.role == role]
        assert sum(pool.count for pool in pools if pool.type.gpu.name != options_name()) >= 2
    assert any(pool.type.gpu.name == options_name() for pool in found.fleet.pools)
    with pytest.raises(InputError, match=r"fleet: least_off_spot: .* no GPU has a spot price"):
        question(fleet={"gpus": {"h100-80g": 64}, "least_off_spot": 2})


def options_name() -> str:
    return "h100-80g" + SPOT


@pytest.mark.parametrize("losses", [{}, {"spare_workers": 2}, {"spare_nodes": 1}])
@pytest.mark.parametrize("is_spot", [False, True])
def test_enough_is_the_least_count_of_which_so_many_are_left(losses: dict[str, int], is_spot: bool) -> None:
    oracle, options = an_oracle(spot={options_name(): Spot(1.0, 2.0, 900.0)}, **losses)
    for option in options:
        if is_spot:
            option = replace(option, type=replace(option.type, gpu=CATALOG.gpu(options_name())))
        for least in (1, 3, 10):
            counts = [count for count in range(100) if oracle.workers_left(option, count) >= least]
            assert oracle.workers_needed(option, least) == counts[0]


@pytest.mark.long
@pytest.mark.parametrize("seed", some(range(2), 1))
def test_a_spare_node_covers_whatever_can_lie_on_it(seed: int) -> None:
    """Every way to take workers of at most 8 GPUs of one kind away is simulated from scratch."""
    task = question(spare="1 node")
    found = plan(task, traffic(seed), CATALOG)
    plain = plain_plan(seed)
    assert found.certificate.value > plain.certificate.value
    pools = found.fleet.pools
    for lost in itertools.product(*(range(pool.count + 1) for pool in pools)):
        kinds = {pool.type.gpu.base for pool, n in zip(pools, lost, strict=True) if n}
        gpus = sum(n * pool.type.gpus for pool, n in zip(pools, lost, strict=True))
        if len(kinds) <= 1 and gpus <= 8:
            left = tuple(replace(pool, count=pool.count - n) for pool, n in zip(pools, lost, strict=True))
            fleet = replace(found.fleet, pools=left)
            assert judge_slo(simulate(fleet, found.trace, limits=task.slo.limits), task.slo).holds
    assert all(not neighbour.holds for neighbour in found.certificate.neighbours)


@pytest.mark.long
def test_spot_is_taken_where_it_is_cheap_and_holds_without_those_that_are_down() -> None:
    """At a third of the firm price spot workers win, with spare ones; at the firm price they lose."""
    fleet = {"gpus": {"h100-80g": 64}, "prices": {"h100-80g": {"on_demand": 3.0} | ON_SPOT}}
    task = question(fleet=fleet)
    found = plan(task, traffic(requests=300, rate_rps=40.0), CATALOG)
    assert any(pool.type.gpu.name == options_name() for pool in found.fleet.pools)
    terms = task.spot["h100-80g"]
    left = tuple(
        replace(pool, count=pool.count - int(binom.ppf(1 - SPOT_RISK_FRAC, pool.count, terms.down_frac)))
        if pool.type.gpu.name == options_name()
        else pool
        for pool in found.fleet.pools
    )
    assert sum(pool.count for pool in left) < found.fleet.workers
    simulation = simulate(replace(found.fleet, pools=left), found.trace, limits=task.slo.limits)
    assert judge_slo(simulation, task.slo).holds
    assert any("may be down at once" in line for line in fact_sentences_of(found.certificate.binding))
    assert any("leave together" in line for line in fact_sentences_of(found.certificate.binding))
    assert any("spot market" in line for line in fact_sentences_of(found.warnings))
    dear = {"gpus": {"h100-80g": 64}, "prices": {"h100-80g": {"on_demand": 1.0} | ON_SPOT}}
    firm = plan(question(fleet=dear), traffic(requests=300, rate_rps=40.0), CATALOG)
    assert {pool.type.gpu.name for pool in firm.fleet.pools} == {"h100-80g"}


@pytest.mark.long
def test_spot_and_firm_workers_share_one_stock() -> None:
    fleet = {"gpus": {"h100-80g": 7}, "prices": {"h100-80g": {"on_demand": 3.0} | ON_SPOT}}
    with pytest.raises(InfeasibleError, match="stock of h100-80g from 7"):
        plan(question(fleet=fleet), traffic(requests=300, rate_rps=40.0), CATALOG)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_robust_plan_holds_in_the_worst_corner_and_says_what_that_costs(seed: int) -> None:
    """Simulated again by hand: steps 10 % longer, 10 % more requests/s. The difference to the plain plan is
    the insurance."""
    task = question(robust={"step_times": "10 %", "traffic": "10 %"})
    found, plain = plan(task, traffic(seed), CATALOG), plain_plan(seed)
    more, _ = requested_traffic(
        traffic(seed), replace(question(), rate_rps=1.1 * traffic(seed).rate_rps), seed=0
    )
    assert (found.trace.arrival_s == more.arrival_s).all()
    longer = {
        w.name: w.latency.with_longer_steps(0.1)
        for w in build_problem(question(), traffic(seed), CATALOG).types
    }
    for pool in found.fleet.pools:
        asked = longer[pool.type.name]
        assert pool.type.latency.f_s == pytest.approx(asked.f_s) and pool.type.latency.d_s == asked.d_s
    assert judge_slo(simulate(found.fleet, more, limits=task.slo.limits), task.slo).holds
    assert found.certificate.value >= plain.certificate.value
    (row,) = (row for row in found.alternatives if row.label.startswith("not insured"))
    assert row.objective == pytest.approx(plain.certificate.value)
    insurance = found.certificate.value - plain.certificate.value
    assert any(
        f"this insurance costs {insurance:.4g} USD/h" in line
        for line in fact_sentences_of(found.certificate.binding)
    )


A100: dict[str, Any] = {"slo": {"ttft": {"p90": "500 ms"}}, "fleet": {"gpus": ["a100-80g"]}}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 3))])
@pytest.mark.slow
def test_a_robust_plan_holds_at_every_rate_between(seed: int) -> None:
    """The cheapest fleet that holds at 28.6 requests/s misses at a rate between that and 26: the worst of
    an interval is not its end. The plan holds at all the rates it names, both ends among them."""
    asked: dict[str, Any] = {**A100, "engine": "none"}
    trace = traffic(seed, requests=250)
    task = question(**asked, traffic={"rate": 26}, robust={"traffic": "10 %"})

    def at(rate_rps: float) -> Trace:
        return requested_traffic(trace, question(**asked, traffic={"rate": rate_rps}), seed=0)[0]

    def misses(found: Plan) -> list[float]:
        rates_rps = [26 * (1 + frac) for frac in np.linspace(0.0, 0.1, 41)]
        return [
            rate_rps
            for rate_rps in rates_rps
            if not judge_slo(simulate(found.fleet, at(rate_rps), limits=task.slo.limits), task.slo).holds
        ]

    end, found = (plan(t, trace, CATALOG) for t in (question(**asked, traffic={"rate": 28.6}), task))
    assert misses(end) and max(misses(end)) < 28.6 and not misses(found)
    assert "sampled at 41 rates" in found.traffic_note and "sampled at 41 rates" in str(
        fact_sentences_of(found.certificate.binding)
    )
    (row,) = (row for row in found.alternatives if row.label.startswith("not insured"))
    assert row.objective <= found.certificate.value


@pytest.mark.slow
def test_insurance_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the search for what is expected finds a dearer fleet, that of the robust plan, which holds there
    too, is the answer."""
    task, found = question(robust={"traffic": "5 %"}), []

    def dearer(problem: Problem, start: Sequence[Fleet] = ()) -> list[tuple[Problem, FleetSearch]]:
        ((asked, best),) = search_policies(problem, start)
        found.append((asked, best))
        option, count = best.best[0]
        return [(asked, replace(best, best=((option, count + 9), *best.best[1:]), value=3 * best.value))]

    monkeypatch.setattr(findings, "search_policies", dearer)
    plan_found = plan(task, traffic(), CATALOG)
    assert found
    (row,) = (row for row in plan_found.alternatives if row.label.startswith("not insured"))
    assert row.objective == plan_found.certificate.value and row.fleet is not None
    assert bill_fleet(row.fleet).usd_per_h == pytest.approx(row.objective)
    assert any(
        "this insurance costs 0.00 USD/h (the same)" in line
        for line in fact_sentences_of(plan_found.certificate.binding)
    )


@pytest.mark.long
def test_a_neighbour_that_fails_on_another_draw_is_said_to_fail() -> None:
    """The search asks of few draws; what is said of the plan is asked of all."""
    asked: dict[str, Any] = {**A100, "engine": "none"}
    trace = traffic(requests=250)
    found = plan(question(**asked, traffic={"rate": 26, "draws": 6}), trace, CATALOG)
    task = question(**asked, traffic={"rate": 26})
    for k, neighbour in enumerate(found.certificate.neighbours):
        pools = [replace(pool, count=pool.count - (at == k)) for at, pool in enumerate(found.fleet.pools)]
        fewer = replace(found.fleet, pools=tuple(pool for pool in pools if pool.count))
        kept = [
            judge_slo(
                simulate(fewer, requested_traffic(trace, task, seed=seed)[0], limits=task.slo.limits),
                task.slo,
            ).holds
            for seed in range(6)
        ]
        assert neighbour.holds is all(kept) is False
        assert ("on another draw" in fact_sentence(neighbour)) is kept[0]
        assert "keeps the SLO" not in fact_sentence(neighbour)
    assert len(found.certificate.neighbours) == len(found.fleet.pools)


def test_most_traffic_within_the_limits() -> None:
    """At the rate found 4 GPUs hold; at the refuted one every fleet of level 0 with as many fails,
    simulated one by one."""
    task = question(objective="throughput", limits={"gpus": 4}, fleet={"gpus": ["h100-80g"]})
    found = plan(task, traffic(rate_rps=4.0), CATALOG)
    assert found.throughput is not None and found.verdict.holds and found.fleet.gpus <= 4
    rate_rps, refuted_rps = found.throughput.rate_rps, found.throughput.refuted_rps
    assert refuted_rps is not None and rate_rps < refuted_rps <= 1.011 * rate_rps
    assert found.trace.rate_rps == pytest.approx(rate_rps, rel=0.01)
    beyond = replace(task, objective="gpus", rate_rps=refuted_rps)
    problem = build_problem(beyond, traffic(rate_rps=4.0), CATALOG)
    for worker in problem.types:
        mixed = ((Option("mixed", worker, 1.0), 4 // worker.gpus),)
        assert not problem.oracle.holds(mixed)
    for p, d in itertools.product(problem.types, repeat=2):
        for n_p in range(1, 4):
            n_d = (4 - n_p * p.gpus) // d.gpus
            pair = ((Option("prefill", p, 1.0), n_p), (Option("decode", d, 1.0), n_d))
            assert n_d < 1 or not problem.oracle.holds(pair)


def test_cost_per_million_tokens_by_hand() -> None:
    """USD/h x hours / tokens."""
    found = plain_plan()
    tokens = int(found.trace.input_tokens.sum() + found.trace.output_tokens.sum())
    usd = bill_fleet(found.fleet).usd_per_h * found.trace.duration_s / 3600
    assert found.usd_per_million_tokens == pytest.approx(1e6 * usd / tokens)
    share = found.trace.output_tokens.sum() / tokens
    assert found.usd_per_million_output_tokens == pytest.approx(found.usd_per_million_tokens / share)


@pytest.mark.long
def test_workers_lie_on_the_fewest_nodes() -> None:
    """Every worker once, no node with more than 8 GPUs; as few as the GPUs need, rounded up."""
    found = plan(question(), traffic(rate_rps=40.0), CATALOG)
    assert found.placement is not None
    parts = [part for node in found.placement.nodes for part in node.parts]
    assert len(parts) == found.fleet.workers
    assert all(sum(len(part.gpus) for part in node.parts) <= 8 for node in found.placement.nodes)
    assert len(found.placement.nodes) >= -(-found.fleet.gpus // 8)


def test_a_search_started_from_the_best_fleet_ends_there() -> None:
    problem = build_problem(question(), traffic(), CATALOG)
    found = find_best_fleet(problem)
    again = find_best_fleet(problem, (problem.oracle.fleet(found.best),))
    assert again.value == found.value == pytest.approx(objective_of(again.best))


def test_what_a_limit_must_be_raised_to_is_searched_with_fleets_of_any_settings() -> None:
    """A node of each kind stands the loss of a node: 4.4 kW, where two nodes of one kind take 7 kW."""
    asked = {
        "slo": {"ttft": {"p90": "2 s"}, "tbt": {"p99": "80 ms"}},
        "spare": "1 node",
        "fleet": {"gpus": ["h100-80g", "a100-80g"], "max_num_batched_tokens": 2048},
    }
    trace = traffic(requests=60, rate_rps=1.0)
    with pytest.raises(InfeasibleError, match="Raise power from 2500 to 4400 W"):
        plan(question(limits={"power": "2.5 kW"}, **asked), trace, CATALOG)
    assert plan(question(limits={"power": "4.4 kW"}, **asked), trace, CATALOG).fleet.power_w <= 4400


def test_no_alternative_is_beyond_a_budget_that_the_best_fleet_keeps() -> None:
    """Without the limit one pool of mixed workers would take 6 or 14 GPUs."""
    asked = question(
        slo={"ttft": {"p90": "2 s"}, "tbt": {"p99": "80 ms"}},
        limits={"gpus": 4},
        fleet={"gpus": ["h100-80g", "a100-80g"], "max_num_batched_tokens": 2048},
    )
    found = plan(asked, traffic(requests=60, rate_rps=2.0), CATALOG)
    assert found.fleet.gpus == 4
    assert all(each.fleet is None or each.fleet.gpus <= 4 for each in found.alternatives)
