"""Several LLMs in production on one stock: what is promised of each, held against enumeration and limits."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from plans import CATALOG
from questions import LLM, traffic
from shares import some

from planner.documents.facts import NoneTogether, NotCertified, ProductionShared
from planner.documents.several_llms_question import LlmQuestion, SeveralLlmsQuestion
from planner.documents.task import parse_task
from planner.reports.fact_sentences import fact_sentences_of
from planner.search.evidence.certify import plan
from planner.search.mixed import mixed_fleets
from planner.search.mixed.best_fleet import PolicySearch
from planner.search.oracle import work_clock
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.plan_problem import Problem
from planner.search.production import production_fleet, three_answers
from planner.search.production.scenario_test import FleetTrial
from planner.search.several import several_llms, shared_paper, shared_production
from planner.search.several.joint_limits import fit_together
from planner.search.several.several_llms import plan_together
from planner.search.several.shared_plan import SharedPlan
from planner.solvers.master import FleetLimits, Option

SLOS: tuple[dict[str, Any], ...] = (
    {"ttft": {"p90": "1 s"}, "tbt": {"p99": "80 ms"}},
    {"ttft": {"p90": "2 s"}, "tpot": {"p90": "60 ms"}},
)
TRACES = [traffic(k, requests=80, rate_rps=5.0) for k in range(2)]
SINGLY = {"sold_as": {"a100-80g": "gpu", "h100-80g": "gpu"}}  # several LLMs are compared so
LONG_S = 1000.0  # so that no clock decides
SCARCE = {"a100-80g": 20, "h100-80g": 4}


def question(
    gpus: Any, *, safety: tuple[Any, Any] = ({"kept_in": 0.9}, {"kept_in": 0.9}), **shared: Any
) -> SeveralLlmsQuestion:
    parts = tuple(
        LlmQuestion(
            f"llm-{k}",
            parse_task(
                {
                    "llm": LLM,
                    "slo": SLOS[k],
                    "traffic": {"rate": (6.0, 9.0)[k]},
                    "fleet": {"gpus": gpus, "max_num_batched_tokens": 2048, **SINGLY},
                    "engine": "none",
                    "safety": safety[k],
                    **shared,
                },
                CATALOG,
            ),
            TRACES[k],
        )
        for k in range(2)
    )
    return SeveralLlmsQuestion(parts, (), ())


@cache
def scarce() -> SharedPlan:
    return plan_together(question(SCARCE), CATALOG, time_limit_s=LONG_S, adds_robustness=True)


def how(found: SharedPlan) -> ProductionShared:
    fact = found.in_production[0]
    assert isinstance(fact, ProductionShared)
    return fact


@pytest.mark.slow
def test_with_enough_for_all_each_has_the_fleet_for_production_it_would_have_alone() -> None:
    asked = question(["a100-80g", "h100-80g"])
    found = plan_together(asked, CATALOG, time_limit_s=LONG_S)
    assert how(found).is_each and found.status == "certified"
    for part in asked.entries:
        alone = plan(part.task, part.trace, CATALOG, time_limit_s=LONG_S)
        assert found.plans[part.name].fleet == alone.fleet
        assert found.plans[part.name].certificate.answers == alone.certificate.answers
    for total in found.answers:
        of_each = [one.certificate.find_answer(total.name) for one in found.plans.values()]
        assert total.value == pytest.approx(sum(each.value or 0.0 for each in of_each if each is not None))
    paper, production, loss = (total.value or 0.0 for total in found.answers)
    assert paper <= production <= loss
    assert (found.value, found.value_on_paper) == pytest.approx((production, paper))


@pytest.mark.long
def test_each_has_the_policies_with_which_its_production_costs_least() -> None:
    """On paper both routings take the same fleets; in production round-robin, which was taken, needs more."""
    policies = {"routing": ["round-robin", "jsq"]}
    asked = question(["h100-80g"], policies=policies)
    found = plan_together(asked, CATALOG, time_limit_s=LONG_S)
    alone = [plan(part.task, part.trace, CATALOG, time_limit_s=LONG_S) for part in asked.entries]
    assert [each.fleet for each in found.plans.values()] == [each.fleet for each in alone]
    assert found.value == pytest.approx(41.86)


@pytest.mark.slow
def test_no_cheaper_choice_of_one_type_per_pool_keeps_as_many_futures_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All fleets of level 0 within the stock, each as written and in the scenarios that the last joint search
    saw: the scenarios of a test that a fleet failed are among them.
    """
    seen: list[tuple[Problem, Problem, tuple[Option, ...]]] = []
    choose = shared_production._choose_fleets

    def choose_and_note(llms: Any, *args: Any) -> Any:
        # Copies of the oracles, without the verdicts of the search.
        seen[:] = [
            (
                replace(llm.on_paper.problem, oracle=replace(llm.on_paper.problem.oracle)),
                replace(llm.problem, oracle=replace(llm.problem.oracle, until=math.inf)),
                llm.on_paper.alone.level0.options,
            )
            for llm in llms
        ]
        return choose(llms, *args)

    monkeypatch.setattr(shared_production, "_choose_fleets", choose_and_note)
    found = plan_together(question(SCARCE), CATALOG, time_limit_s=LONG_S)
    assert not how(found).is_each and how(found).is_exact and how(found).tries == 1
    held: list[list[tuple[float, int, int]]] = []
    for paper, problem, options in seen:
        of = {role: [o for o in options if o.role == role] for role in ("mixed", "prefill", "decode")}
        rows: list[tuple[float, int, int]] = []
        for shape in [
            *((option,) for option in of["mixed"]),
            *itertools.product(of["prefill"], of["decode"]),
        ]:
            ranges = [range(1, int(problem.limits.most_workers(option.type)) + 1) for option in shape]
            for counts in itertools.product(*ranges):
                fleet = tuple(zip(shape, counts, strict=True))
                value = sum(option.objective * n for option, n in fleet)
                gpus = [sum(o.type.gpus * n for o, n in fleet if o.type.gpu.name == gpu) for gpu in SCARCE]
                is_worse = any(v <= value and a <= gpus[0] and h <= gpus[1] for v, a, h in rows)
                if is_worse or not problem.allows(fleet):
                    continue
                if paper.oracle.holds(fleet) and problem.oracle.holds(fleet):
                    rows.append((value, gpus[0], gpus[1]))
        held.append(rows)
    least = min(
        one[0] + other[0]
        for one, other in itertools.product(*held)
        if one[1] + other[1] <= SCARCE["a100-80g"] and one[2] + other[2] <= SCARCE["h100-80g"]
    )
    assert found.value <= least * 1.01  # Of about equal prices the fleet with the most headroom is taken.


@pytest.mark.long
def test_prefill_pools_that_miss_ttft_alone_are_tried_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule PREFILL_ALONE may be wrong. In the joint search it is made wrong for every prefill pool: the
    answer, which has one, stays.
    """
    fleet = {"gpus": {"a100-80g": 18, "h100-80g": 3}, "max_num_batched_tokens": 2048, **SINGLY}
    parts = []
    for seed, rate_rps, ttft, tbt in ((863, 20.7, "1 s", "80 ms"), (814, 36.6, "500 ms", "40 ms")):
        document = {
            "llm": "meta-llama/Llama-3.1-8B",
            "slo": {"ttft": {"p99": ttft}, "tbt": {"p99": tbt}},
            "traffic": {"rate": rate_rps},
            "fleet": fleet,
            "engine": "none",
            "safety": {"kept_in": 0.9},
        }
        trace = traffic(seed, requests=80, rate_rps=5.0)
        parts.append(LlmQuestion(f"of-{seed}", parse_task(document, CATALOG), trace))
    asked = SeveralLlmsQuestion(tuple(parts), (), ())
    expected = plan_together(asked, CATALOG, time_limit_s=LONG_S)
    choose = shared_production._choose_fleets

    def choose_with_a_wrong_rule(*args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Oracle, "prefill_meets_ttft_alone", lambda self, counts: False)
            return choose(*args)

    monkeypatch.setattr(shared_production, "_choose_fleets", choose_with_a_wrong_rule)
    found = plan_together(asked, CATALOG, time_limit_s=LONG_S)
    assert not how(found).is_each and how(found).is_exact
    assert "prefill" in {pool.role for one in found.plans.values() for pool in one.fleet.pools}
    assert found.value == pytest.approx(expected.value)


@pytest.mark.slow
def test_each_keeps_its_slo_in_enough_futures_and_all_answers_are_within_the_stock() -> None:
    found = scarce()
    assert found.status == "certified"
    for one in found.plans.values():
        made = one.certificate.find_answer("production")
        assert made is not None and made.kept_in is not None and made.kept_in.kept_frac >= 0.9
        assert made.value == pytest.approx(one.fleet.price_usd_per_h) == pytest.approx(one.value)
    for total in found.answers:
        workers = [
            each
            for one in found.plans.values()
            if (answer := one.certificate.find_answer(total.name)) is not None
            for each in answer.workers
        ]
        for gpu, count in SCARCE.items():
            assert sum(each.gpus for each in workers if each.gpu == gpu) <= count
    assert any("gives way" in line for line in fact_sentences_of(found.in_production))


@pytest.mark.slow
def test_other_numbers_of_workers_are_within_what_the_fleets_of_production_leave() -> None:
    """Not within what the fleets on paper left: there llm-0 had no room for its fleet of production."""
    first, second = scarce().plans.values()
    for one, other in ((first, second), (second, first)):
        assert one.certificate.robustness is not None
        rows = one.certificate.robustness.at_workers
        assert tuple(pool.count for pool in one.fleet.pools) in [row.counts for row in rows]
        for row in rows:
            pools = (*one.fleet.with_counts(row.counts).pools, *other.fleet.pools)
            for gpu, count in SCARCE.items():
                assert (
                    sum(pool.count * pool.type.gpus for pool in pools if pool.type.gpu.name == gpu) <= count
                )


@pytest.mark.slow
def test_a_loss_that_the_stock_does_not_allow_names_the_llm() -> None:
    total = next(total for total in scarce().answers if total.name == "with-a-loss")
    assert total.value is None and total.lacks
    for name in total.lacks:
        lossy = scarce().plans[name].certificate.find_answer("with-a-loss")
        assert lossy is not None and lossy.value is None


@pytest.mark.slow
def test_too_little_for_production_is_never_answered_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """On paper both fit 16 A100 and 4 H100 (else that would be said), in production not; with 6 H100 and 16
    A100, as it says, they do.
    """
    monkeypatch.setattr(mixed_fleets, "FIRST_PROPOSALS", 4)
    stock = {"a100-80g": 16, "h100-80g": 4}
    found = plan_together(question(stock), CATALOG, time_limit_s=LONG_S)
    why = why_on_paper(found)
    assert "safety: kept_in: each LLM can be served" in why.reason
    assert "stock of h100-80g from 4 to 6" in why.relaxation
    assert "8 of 4 GPUs (stock of h100-80g)" in why.reason
    used = (
        r"with \d+ of 16 GPUs \(stock of a100-80g\), \d of 4 GPUs \(stock of h100-80g\); none that use more"
    )
    assert re.search(rf"kept by all together is \d+ %, for [\d.]+ USD/h: {used}", why.reason)
    plan_together(question(stock | {"h100-80g": 6}), CATALOG, time_limit_s=LONG_S)


def why_on_paper(found: SharedPlan) -> NoneTogether:
    """Of a plan for which no fleets for production were found: those on paper, and why."""
    assert found.status == "not for production" and found.value == pytest.approx(found.value_on_paper)
    assert all(total.lacks for total in found.answers if total.name == "production")
    reasons = [
        fact for one in found.plans.values() for fact in one.warnings if isinstance(fact, NoneTogether)
    ]
    assert reasons and len(set(reasons)) == 1
    return reasons[0]


@pytest.mark.slow
def test_too_little_for_one_in_production_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mixed_fleets, "FIRST_PROPOSALS", 4
    )  # mixes that are tried where nothing is known to hold
    stock, grown = {"a100-80g": 12, "h100-80g": 4}, {"kept_in": 0.95, "growth": "300 %"}
    found = plan_together(question(stock, safety=("none", grown)), CATALOG, time_limit_s=LONG_S)
    assert re.search(r"llm-\d, even with all .*: safety: kept_in: no fleet", why_on_paper(found).reason)


@pytest.mark.long
def test_an_llm_without_safety_has_what_the_others_leave() -> None:
    found = plan_together(question(SCARCE, safety=("none", {"kept_in": 0.9})), CATALOG, time_limit_s=LONG_S)
    bare, safe = found.plans.values()
    assert (bare.status, safe.status, found.status) == ("on paper", "certified", "not certified")
    assert bare.certificate.answers == () and len(safe.certificate.answers) == 3 and found.answers == ()
    pools = [pool for fleet in found.fleets for pool in fleet.pools]
    limits = FleetLimits(SCARCE, None, None, None)
    assert limits.first_exceeded([(pool.type, pool.count) for pool in pools]) is None
    assert bare.verdict.holds


def test_without_time_for_production_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_llms, "production_or_paper_of_all", lambda *_: None)
    found = plan_together(question(SCARCE), CATALOG, time_limit_s=LONG_S)
    assert found.status == "best found" and found.in_production == () and found.answers == ()
    for one in found.plans.values():
        assert any(isinstance(said, NotCertified) and said.kept_in is None for said in one.warnings)


@pytest.mark.long
@pytest.mark.parametrize("work_s", some([1.5, 4.0], 1))
def test_a_search_that_ends_in_the_middle_answers_with_the_fleets_found(
    monkeypatch: pytest.MonkeyPatch, work_s: float
) -> None:
    """The master went on asking each LLM's oracle, whose time was that of its search alone: a traceback."""
    monkeypatch.setattr(work_clock, "work_limit_s", lambda time_limit_s: work_s)
    answer = plan_together(question({"a100-80g": 16, "h100-80g": 4}), CATALOG, time_limit_s=LONG_S)
    assert answer.status == "best found"


@pytest.mark.long
def test_a_fleet_that_narrowly_fails_its_last_test_grows_where_the_stock_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last test of the first LLM is made to end as one of two LLMs did, 140 kept of 156. The stock has
    room for a worker more beside the other's fleet, and such a fleet passes.
    """
    test = shared_production._test_fleets
    chosen: list[float] = []

    def test_and_fail_one(llms: Any, *args: Any, **keys: Any) -> Any:
        fleets = test(llms, *args, **keys)
        llms[0].kept_in = replace(llms[0].kept_in, kept=140, scenario_count=156, decision="open")
        chosen.append(sum(count for _, count in fleets[0]))
        return fleets

    monkeypatch.setattr(production_fleet, "MOST_TESTS", 1)
    monkeypatch.setattr(shared_production, "_test_fleets", test_and_fail_one)
    found = plan_together(question({"a100-80g": 24, "h100-80g": 6}), CATALOG, time_limit_s=LONG_S)
    assert not how(found).is_each and chosen
    first = found.plans["llm-0"]
    assert sum(pool.count for pool in first.fleet.pools) > chosen[-1]
    assert first.status == "certified"


TWO_NODES = FleetLimits({"a100-80g": 8, "h100-80g": 8}, by_gpu=True)


def on_each_gpu(safety: tuple[Any, Any]) -> tuple[SeveralLlmsQuestion, Problem, Option, Option]:
    """The question of two LLMs, the problem of one, and a worker of half a node on A100 and on H100."""
    asked = question({"a100-80g": 8, "h100-80g": 8}, safety=safety)
    problem = SearchInputs(asked.entries[0].task, asked.entries[0].trace, CATALOG, 0).problem()
    of_4 = {
        option.type.gpu.name: option
        for option in problem.options()
        if option.role == "mixed" and option.type.gpus == 4
    }
    return asked, problem, of_4["a100-80g"], of_4["h100-80g"]


def searched_alone(problem: Problem, best: Counts) -> PolicySearch:
    """A search that found this fleet."""
    result: Any = SimpleNamespace(best=best, value=1.0)
    return PolicySearch(problem, result)


@pytest.mark.parametrize("is_each", [False, True])
def test_llms_without_safety_do_not_take_the_same_gpus_twice(
    monkeypatch: pytest.MonkeyPatch, is_each: bool
) -> None:
    """Both were searched again within what the fleets of before left: each could take the same A100. Where
    each has the fleet it would have alone, that of paper was certified, which may not fit beside the others.
    """
    asked, problem, on_a100, on_h100 = on_each_gpu(("none", "none"))

    def search(problem: Problem, remaining: FleetLimits, start: Any) -> Any:
        workers = (remaining.stock["a100-80g"] or 0) // 4
        best = ((on_a100, workers),) if workers else start
        return [searched_alone(problem, best)]

    monkeypatch.setattr(shared_paper, "search_within", search)
    alone = [searched_alone(problem, ((on_a100, 2),))]
    paper: Any = SimpleNamespace(searched=[alone, alone], left_to_each=(None, None))
    fleets = (((on_h100, 1),), ((on_h100, 1),))
    shared: Any = SimpleNamespace(how_chosen=SimpleNamespace(is_each=is_each), fleets=fleets)
    searched, left = several_llms._searches_for_certificates(paper, shared, asked.entries, TWO_NODES, LONG_S)
    found = [each[0][1].best for each in searched]
    assert found == [((on_a100, 2),), ((on_h100, 1),)] and fit_together(TWO_NODES, found)
    assert None not in left


def test_the_fleet_of_paper_that_each_would_have_alone_is_not_searched_again() -> None:
    asked, problem, on_a100, on_h100 = on_each_gpu(("none", "none"))
    searches = [[searched_alone(problem, ((option, 1),))] for option in (on_a100, on_h100)]
    paper: Any = SimpleNamespace(searched=searches, left_to_each=(None, None))
    fleets = (((on_a100, 1),), ((on_h100, 1),))
    shared: Any = SimpleNamespace(how_chosen=SimpleNamespace(is_each=True), fleets=fleets)
    found = several_llms._searches_for_certificates(paper, shared, asked.entries, TWO_NODES, LONG_S)
    assert found == (searches, [None, None])


def test_a_fleet_with_a_loss_that_becomes_production_fits_beside_production(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first LLM's fleet with a loss is on other GPUs than its production. The second's became production
    where it fitted beside the former alone.
    """
    _, problem, on_a100, on_h100 = on_each_gpu(({"kept_in": 0.9}, {"kept_in": 0.9}))
    limits: list[tuple[FleetLimits, FleetLimits]] = []

    def answers(problem: Problem, paper: Any, trial: FleetTrial) -> Any:
        limits.append((problem.limits, trial.problem.limits))
        return SimpleNamespace(best=((on_h100, 2),), with_loss=((on_a100, 2),))

    monkeypatch.setattr(three_answers, "with_answers", answers)
    on_paper = SimpleNamespace(problem=problem, paper=None)
    llm: Any = SimpleNamespace(test=object(), kept_in=object(), problem=problem, on_paper=on_paper)
    fleets = [((on_h100, 1),), ((on_a100, 1),)]
    shared_production._answer_each([llm, llm], fleets, TWO_NODES, LONG_S)
    left = [tuple(dict(each.stock) for each in pair) for pair in limits]
    assert left == [
        ({"a100-80g": 4, "h100-80g": 8},) * 2,
        ({"a100-80g": 8, "h100-80g": 0}, {"a100-80g": 0, "h100-80g": 8}),
    ]
    trial: Any = SimpleNamespace(problem=problem, best=((on_h100, 2),))
    beside_production = replace(problem, limits=limits[1][0])
    assert three_answers._prefer_fleet_with_loss(beside_production, trial, ((on_h100, 1),)) is trial


def test_losses_have_the_time_that_is_left_where_all_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an LLM survives was looked for in the time of its own search, which was over where the others'
    searches took long: "with a loss" was kept in 0 of 0 scenarios.
    """
    _, problem, on_a100, _ = on_each_gpu(({"kept_in": 0.9}, {"kept_in": 0.9}))
    late = replace(problem, deadline=0.0, oracle=replace(problem.oracle, until=0.0))
    test: Any = SimpleNamespace(out_of_time=lambda: True)
    on_paper: Any = SimpleNamespace(name="llm-0")
    llm = shared_production._LlmProduction(on_paper, late, ((on_a100, 1),), test, kept_in=None)
    monkeypatch.setattr(shared_production, "_plan_alone", lambda *_: llm)
    monkeypatch.setattr(shared_production, "_answer_each", lambda *_: (None,))
    shared_production.share_production([on_paper], TWO_NODES, math.inf, lambda _: None)
    assert not test.out_of_time() and llm.problem.deadline == llm.problem.oracle.until == math.inf
