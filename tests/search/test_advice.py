"""What the message of an infeasible question names is enough: asked with that, there is a plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from instances import instance

import fleetplan
from planner.errors import Change, InfeasibleError
from planner.fleet import Fleet
from planner.search.level0.level0_search import Level0
from planner.search.mixed import best_fleet
from planner.search.mixed.best_fleet import FleetSearch, find_best_fleet
from planner.search.mixed.mixed_fleets import MixedFleets
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.problem.plan_problem import Problem


@pytest.mark.parametrize(
    "value",
    [1234.5612, 22.6604, 0.123456111, 99999.91, 16.0, 5.16 * (1 + 1e-14), 0.0, 999_999.4, 2_345_678.4, 5e6],
)
def test_a_limit_as_it_is_written_is_never_less_than_what_is_needed(value: float) -> None:
    said = str(Change("cost", 2e6, value, "USD/h"))
    (text,) = re.findall(r"from 2000000 to ([\d.]+) USD/h", said)
    assert value * (1 - 1e-9) <= float(text) <= value * (1 + 1e-5)


def with_stock(problem: Problem, count: int | None) -> Problem:
    stock = dict.fromkeys(problem.limits.stock, count)
    return replace(problem, limits=replace(problem.limits, stock=stock, cost_usd_per_h=None))


def found_by(problem: Problem) -> FleetSearch | None:
    try:
        return find_best_fleet(problem)
    except InfeasibleError:
        return None


def test_a_fleet_within_the_limits_that_only_a_search_beyond_them_finds_is_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search within the limits is made to miss all that it is not told to begin with."""
    problem = next(each for seed in range(20) if found_by(each := with_stock(instance(seed), 4)) is not None)
    usual = best_fleet._search

    def blind(
        asked: Problem, start: Sequence[Fleet], **keys: bool
    ) -> tuple[FleetSearch | None, Level0, MixedFleets]:
        result, level0, mixed = usual(asked, start, **keys)
        if start:
            return result, level0, mixed
        search_result = replace(level0.search, best=None, is_exhausted=False)
        nothing = replace(mixed, best=None, is_exact=False, is_exhausted=False, is_hopeless=False)
        return None, replace(level0, search=search_result), nothing

    monkeypatch.setattr(best_fleet, "_search", blind)
    seen = find_best_fleet(problem)
    assert problem.allows(seen.best) and problem.oracle.holds(seen.best)
    with pytest.raises(InfeasibleError) as caught:
        find_best_fleet(with_stock(problem, 0))
    assert caught.value.ways


def test_where_nothing_is_proved_the_message_names_what_a_fleet_was_found_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = next(
        each
        for seed in range(20)
        if found_by(each := with_stock(instance(seed), 1)) is None and found_by(with_stock(each, 8))
    )
    usual = best_fleet._search

    def undecided(
        asked: Problem, start: Sequence[Fleet], **keys: bool
    ) -> tuple[FleetSearch | None, Level0, MixedFleets]:
        result, level0, mixed = usual(asked, start, **keys)
        search_result = replace(level0.search, is_exhausted=False)
        return result, replace(level0, search=search_result), replace(mixed, is_exact=False)

    monkeypatch.setattr(best_fleet, "_search", undecided)
    with pytest.raises(InfeasibleError, match=r"raise stock of .*, with which a fleet was found") as caught:
        find_best_fleet(problem)
    assert caught.value.exit_code == 4 and caught.value.relaxation.startswith("stock of")


QUESTIONS: list[dict[str, Any]] = [
    {
        "llm": "llama-3.1-8b",
        "traffic": {"rate": 1.78, "input": 2481, "output": 140, "duration": "161 s"},
        "fleet": {"gpus": {"l4-24g": 1}},
        "slo": {"ttft": {"p90": "688 ms"}, "tbt": {"p99": "177 ms"}},
        "objective": "gpus",
        "safety": "none",
    }
]


@pytest.mark.slow
@pytest.mark.parametrize("document", QUESTIONS)
def test_the_stock_that_is_named_is_planned(document: dict[str, Any]) -> None:
    """Nine L4 held in a search without limits; the search with nine had found none."""
    with pytest.raises(InfeasibleError) as caught:
        fleetplan.plan(document)
    ((change,),) = caught.value.ways
    more = document | {"fleet": {"gpus": {"l4-24g": round(change.enough)}}}
    assert fleetplan.plan(more).to_dict()["gpus"] == change.enough


def test_a_question_far_beyond_its_stock_is_refused_by_the_bound_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """3,000 requests/s on 16 H100: to simulate fleets that are large enough took minutes."""
    monkeypatch.setattr(Oracle, "holds", lambda *_: pytest.fail("no fleet is simulated"))
    with pytest.raises(
        InfeasibleError, match=r"takes [\d,]+ GPUs, .* allow 16\. .*objective throughput"
    ) as caught:
        fleetplan.plan(
            {"ttft": {"p95": "1 s"}, "tpot": {"p95": "50 ms"}},
            llm="llama-3.1-70b",
            traffic={"rate": 3000, "task": "chat", "duration": "20 s"},
            fleet={"gpus": {"h100-80g": 16}},
        )
    assert (caught.value.kind, caught.value.constraint) == ("capacity", "stock of h100-80g")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("llm", "gpu", "rate", "lengths", "slo"),
    [
        # Idle workers miss the limit.
        ("llama-3.1-8b", "a100-80g", 1, (4000, 200), {"ttft": {"p90": "50 ms"}, "tbt": {"p95": "15 ms"}}),
        # Idle workers keep both limits, and the stock is too small for them at this rate.
        ("llama-3.1-8b", "l40s-48g", 10, (500, 500), {"ttft": {"p90": "90 ms"}, "tpot": {"p95": "25 ms"}}),
    ],
)
def test_a_limit_that_is_named_is_nearly_the_least(
    llm: str, gpu: str, rate: float, lengths: tuple[int, int], slo: dict[str, dict[str, str]]
) -> None:
    """With what is named there is a plan, and with 3 % less there is none."""
    traffic = {"rate": rate, "input": lengths[0], "output": lengths[1], "duration": "120 s"}
    document = {"llm": llm, "traffic": traffic, "fleet": {"gpus": {gpu: 8}}, "slo": slo, "safety": "none"}
    with pytest.raises(InfeasibleError) as caught:
        fleetplan.plan(document)
    of_slo = [way for way in caught.value.ways if all(change.unit == "s" for change in way)]
    assert of_slo
    for way in of_slo:

        def question(factor: float, way: Sequence[Change] = way) -> dict[str, Any]:
            looser = {metric: dict(line) for metric, line in slo.items()}
            for change in way:
                metric, percentile = change.limit.split()
                looser[metric][percentile] = f"{change.enough * factor * 1e3:.9g} ms"
            return document | {"slo": looser}

        assert fleetplan.plan(question(1.0)).to_dict()["status"]
        with pytest.raises(InfeasibleError):
            fleetplan.plan(question(0.97))
        assert all(1.0 < change.enough / change.none_below <= 1.0201 for change in way)
