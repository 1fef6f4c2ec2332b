"""The optimum over several worker types, and over mixed workers beside prefill and decode ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from elastic_runs import simulate_elastic
from simulations import LLM
from small_days import SmallDay, every_sequence, random_day

import fleetplan
from planner.day import changing_types as types_search
from planner.day import changing_types_page, day_fleets, day_study
from planner.day.changing_types import changing_types
from planner.day.controllers.table import parse_controllers
from planner.day.day_api import DayResult
from planner.day.day_fleets import cheapest_fleet
from planner.day.day_study import ChangingTypes, DayAnswer, DayQuestion, study_day, terms_of
from planner.day.search.day_runs import DayRuns
from planner.day.search.window_cuts import window_cuts
from planner.errors import PlannerError
from planner.fleet import Fleet, Pool
from planner.reports.fact_sentences import SAME_USD
from planner.simulator.slo_verdict import missed_windows
from planner.simulator.timetable import Timetable
from planner.solvers.pool_sizes import ready_workers_at_no_cost

SLOWER_FRAC = 0.5


def slow_pool(pool: Pool, usd_per_h: float) -> Pool:
    """The pool on a GPU whose steps take 1.5 times as long, at another price."""
    gpu = replace(pool.type.gpu, name="slow", price_usd_per_h=usd_per_h)
    latency = pool.type.latency.with_longer_steps(SLOWER_FRAC)
    return replace(pool, name="slow", type=replace(pool.type, gpu=gpu, latency=latency))


def question_of(day: SmallDay, pool: Pool, most: int) -> DayQuestion:
    bounds = replace(day.pools[0], least=1, most=most, first=None)
    fleet = Fleet(LLM, (replace(pool, count=most),), day.fleet.policies)
    step_s = float(day.edges_s[1] - day.edges_s[0])
    return DayQuestion(fleet, (bounds,), day.slo, day.trace, day.unit_s, step_s)


def answers_of(seed: int, *, windows: int = 3, has_slow: bool = True) -> dict[str, DayAnswer]:
    """A random day on at most two fast workers, and on one slow one at 0.25 to 0.6 of their price."""
    day = replace(random_day(seed, disaggregated=False, windows=windows, most=2), unit_s=0.0)
    (fast,) = day.fleet.pools
    usd_per_h = float(np.random.default_rng(seed).uniform(0.25, 0.6))
    questions = {"fast": question_of(day, fast, 2)}
    if has_slow:
        questions["slow"] = question_of(day, slow_pool(fast, usd_per_h), 1)
    return {label: study_day(each, (), most_work_s=60) for label, each in questions.items()}


def cheapest_of_all(question: DayQuestion) -> float:
    """The least bill of all sequences of sizes of all pools that keep every window, each one simulated."""
    terms = terms_of(question)
    runs = DayRuns(question.fleet, question.trace, question.slo, question.pools, terms)
    day = SmallDay(question.fleet, question.trace, question.slo, question.pools, question.unit_s)
    return min(each.usd for each in map(runs.simulate_day, every_sequence(day)) if each.holds)


def check(found: ChangingTypes, answers: dict[str, DayAnswer]) -> None:
    """At most what all sequences on the grid cost at least, and the cheapest single fleet; at least what is
    proved; and as a timetable it keeps every window for this bill.
    """
    question, optimum = found.question, found.optimum
    assert question is not None and optimum is not None
    own = [answer.optimum.usd for answer in answers.values() if answer.optimum is not None]
    assert found.single_usd == min(own)
    assert optimum.usd <= min(cheapest_of_all(question), found.single_usd) * (1 + 1e-9)
    assert optimum.proved_usd <= optimum.bound_usd <= optimum.usd * (1 + 1e-9)
    assert optimum.day.keeps
    starts_s = [pool.start_s for pool in question.pools]
    table = Timetable(optimum.edges_s[:-1].tolist(), optimum.sizes.tolist(), starts_s)
    first = table.sizes_at(0.0)
    pools = [replace(pool, first=size) for pool, size in zip(question.pools, first, strict=True)]
    run = simulate_elastic(
        question.fleet, question.trace, pools, table, limits=question.slo.limits, record=True
    )
    edges_s = DayRuns(question.fleet, question.trace, question.slo, question.pools).window_edges_s
    assert not missed_windows(run.simulation, question.slo, edges_s)
    prices = [pool.type.price_usd_per_h for pool in question.fleet.pools]
    usd = sum(prices[span.pool] * (span.gone_s - span.requested_s) / 3600 for span in run.spans)
    assert usd == pytest.approx(optimum.usd)


def without_other_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types_search, "_other_roles", lambda question: ())


SAVING = (7, 9, 19, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 15, 17, 22)))


@pytest.mark.long
@pytest.mark.parametrize("seed", SAVING)
def test_two_types_that_change_against_all_sequences(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On these days a slow worker beside the fast ones, or in place of one, is cheaper than fast ones."""
    without_other_roles(monkeypatch)
    answers = answers_of(seed)
    found = changing_types(answers, most_work_s=60)
    check(found, answers)
    assert found.saved_usd > 0.01 * found.single_usd
    assert found.optimum is not None and found.question is not None
    assert [pool.type.gpu.name for pool in found.question.fleet.pools] == ["paper", "slow"]
    is_told = found.saved_usd >= SAME_USD  # Less is shown as nothing.
    assert is_told == (changing_types_page.ONE_FLEET in changing_types_page.types_lines(found))
    assert found.optimum.sizes[:, 1].any()


@pytest.mark.slow
@pytest.mark.parametrize("seed", (1, 5, 8, 11, 13, 16, 20, 23))
def test_types_that_need_not_change_against_all_sequences(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On these days one type alone is the cheapest, or nearly: nothing dearer than that may be found."""
    without_other_roles(monkeypatch)
    answers = answers_of(seed)
    check(changing_types(answers, most_work_s=60), answers)


@pytest.mark.parametrize("seed", (5, pytest.param(3, marks=pytest.mark.slow)))
def test_mixed_workers_beside_prefill_and_decode_against_all_sequences(seed: int) -> None:
    """A fleet of mixed workers alone is compared with prefill and decode workers of the same type."""
    answers = answers_of(seed, windows=2, has_slow=False)
    found = changing_types(answers, most_work_s=60)
    assert found.question is not None
    assert [pool.role for pool in found.question.fleet.pools] == ["mixed", "prefill", "decode"]
    check(found, answers)


@pytest.mark.long
@pytest.mark.parametrize("seed", (7, 9))
def test_cuts_of_windows_forbid_no_sequence_that_holds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence is simulated: the workers ready with those that keep all windows keep all cuts."""
    without_other_roles(monkeypatch)
    question = types_search.question_of_all_pools(list(answers_of(seed).values()))
    assert isinstance(question, DayQuestion)
    runs = DayRuns(question.fleet, question.trace, question.slo, question.pools)
    cuts = window_cuts(runs, float("inf"))
    assert cuts and any(len(cut) > 1 for cut in cuts)
    day = SmallDay(question.fleet, question.trace, question.slo, question.pools, 0.0)
    held = 0
    for workers in every_sequence(day):
        if runs.simulate_day(workers).holds:
            held += 1
            ready = ready_workers_at_no_cost(runs.terms, workers)
            assert all(any(ready[t, c] > size for t, c, size in cut) for cut in cuts)
    assert held


def test_workers_given_as_the_least_are_not_exchanged() -> None:
    """`least: 1` keeps a worker of every pool, so there is nothing to choose, and the answer says so."""
    answers = answers_of(5)
    answers = {
        k: replace(each, question=replace(each.question, is_least_given=True)) for k, each in answers.items()
    }
    found = changing_types(answers, most_work_s=10)
    assert found.optimum is None and "least: 1 keeps" in found.why
    assert changing_types_page.types_lines(found)[0].startswith("Worker types that change within the day: no")


@pytest.mark.long
def test_a_search_that_ends_with_nothing_leaves_the_cheapest_fleet_and_what_is_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The single fleets' optima are known before the search, so its end loses neither them nor the bound."""
    answers = answers_of(7)
    whole = changing_types(answers, most_work_s=60)

    def out_of_time(*_: object, **__: object) -> NoReturn:
        raise PlannerError("no sequence was found in 1 s")

    monkeypatch.setattr(types_search, "cheapest_day", out_of_time)
    found = changing_types(answers, most_work_s=1)
    assert found.optimum is not None and whole.optimum is not None
    assert found.optimum.usd == found.single_usd == whole.single_usd and found.optimum.day.keeps
    assert 0 < found.optimum.proved_usd == whole.optimum.proved_usd
    assert "no sequence was found in 1 s" in found.optimum.status
    assert "proved" in changing_types_page.types_lines(found)[0]


@pytest.mark.long
def test_types_are_searched_when_the_days_of_fleets_take_all_of_the_time() -> None:
    """All the work is done before the search begins: there is an answer with a bound all the same."""
    answers = answers_of(7)
    fleets = {label: each.question.fleet for label, each in answers.items()}
    by_fleet = {id(fleets[label]): each for label, each in answers.items()}
    searched: list[ChangingTypes] = []

    def types_of(of_fleets: Mapping[str, DayAnswer], left_s: float) -> ChangingTypes:
        assert left_s > 0
        searched.append(changing_types(of_fleets, most_work_s=left_s))
        return searched[0]

    left_s = iter((1e12, 1e12, 0.0))
    with mock.patch.object(day_fleets, "now_s", lambda: 1e12 - next(left_s)):
        answer = cheapest_fleet(fleets, lambda fleet, *_: by_fleet[id(fleet)], 1e12, types_of)
    assert answer.types is searched[0] and answer.types.optimum is not None
    assert answer.types.optimum.proved_usd > 0


def test_a_day_without_an_optimum_in_time_keeps_its_controllers(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_time(*_: object, **__: object) -> NoReturn:
        raise PlannerError("no sequence was found in 1 s")

    monkeypatch.setattr(day_study, "cheapest_day", out_of_time)
    answer = study_day(answers_of(7)["fast"].question, parse_controllers("hpa"), most_work_s=1)
    assert [row.name for row in answer.rows] == ["static", "hpa"] and answer.optimum is None
    assert "no sequence was found" in answer.no_optimum
    alone = changing_types({"fast": answer}, most_work_s=1)
    assert alone.optimum is None and "fast: no sequence was found" in alone.why


STANDING = {
    "llm": "meta-llama/Llama-3.1-8B",
    "workers": [{"name": "mixed", "role": "mixed", "gpu": "a100-80g", "tp": 1, "count": 2}],
}
SLO: dict[str, Any] = {
    "llm": "meta-llama/Llama-3.1-8B",
    "slo": {"ttft": {"p90": "1 s"}, "tbt": {"p95": "100 ms"}, "every": "1 min"},
    "fleet": {"gpus": {"a100-80g": 8}, "sold_as": {"a100-80g": "gpu"}},
    "day": {"controllers": "hpa", "start": "30 s", "most": 3},
}


def traffic() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    at_s = np.concatenate([60 * k + np.sort(rng.uniform(0, 60, n)) for k, n in enumerate((120, 600, 120))])
    lengths = rng.integers(200, 1500, len(at_s)), rng.integers(20, 100, len(at_s))
    return pd.DataFrame({"arrival_s": at_s, "input_tokens": lengths[0], "output_tokens": lengths[1]})


def test_types_are_a_part_of_the_answer_where_they_are_requested() -> None:
    asked = SLO | {"day": SLO["day"] | {"types": "change"}}
    result = fleetplan.day(asked, traffic(), standing=STANDING, time_limit_s=30)
    assert isinstance(result, DayResult)
    told = result.to_dict()["types"]
    assert told["usd"] <= told["single_fleet_usd"] == result.to_dict()["optimum"]["usd"]
    assert told["saved_usd"] == pytest.approx(told["single_fleet_usd"] - told["usd"]) and told["missed"] == 0
    assert [pool["role"] for pool in told["pools"]] == ["mixed", "prefill", "decode"]
    assert json.dumps(told)
    (first, *_) = changing_types_page.types_lines(result.answer.types)
    assert first in result.sentences() and "within the day" in first
    given = fleetplan.day(SLO, traffic(), standing=STANDING, time_limit_s=30)
    assert given.to_dict()["types"] is None


@pytest.mark.parametrize(
    ("terms", "said"),
    [({"types": "change", "optimum": False}, "asks for an optimum"), ({"types": "chnage"}, "types")],
)
def test_what_is_refused(terms: dict[str, Any], said: str) -> None:
    with pytest.raises(fleetplan.PlannerError, match=said):
        fleetplan.day(SLO, traffic(), standing=STANDING, terms=terms)
