"""Several LLMs in production on one stock: what is promised of each, held against enumeration and limits."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from functools import cache
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
from planner.search.oracle import work_clock
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.problem.plan_problem import Problem
from planner.search.production import production_fleet
from planner.search.several import several_llms, shared_production
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
    return plan_together(question(SCARCE), CATALOG, time_limit_s=LONG_S)


def how(found: SharedPlan) -> ProductionShared:
    fact = found.in_production[0]
    assert isinstance(fact, ProductionShared)
    return fact


@pytest.mark.slow
def test_with_enough_for_all_each_has_the_fleet_for_production_it_would_have_alone() -> None:
    asked = question(["a100-80g", "h100-80g"])
    found = plan_together(asked, CATALOG, time_limit_s=LONG_S)
    assert how(found).is_each and found.status == "certified"
    for part in asked.parts:
        alone = plan(part.task, part.trace, CATALOG, time_limit_s=LONG_S)
        assert found.plans[part.name].fleet == alone.fleet
        assert found.plans[part.name].certificate.answers == alone.certificate.answers
    for total in found.answers:
        of_each = [one.certificate.find_answer(total.name) for one in found.plans.values()]
        assert total.value == pytest.approx(sum(each.value or 0.0 for each in of_each if each is not None))
    paper, production, loss = (total.value or 0.0 for total in found.answers)
    assert paper <= production <= loss
    assert (found.value, found.value_on_paper) == pytest.approx((production, paper))


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
