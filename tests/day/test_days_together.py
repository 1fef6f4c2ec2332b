"""The day of several LLMs on one stock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fleetplan
from planner.day import day_api, several_llms_day
from planner.day.day_api import JointDayResult
from planner.day.day_study import DayAnswer, split_training, terms_of
from planner.day.search.several_llms_runs import joint_terms
from planner.documents.several_llms_question import SeveralLlmsQuestion
from planner.errors import InputError, PlannerError
from planner.simulator.elastic import ElasticRun
from planner.traffic.trace import Trace

NAME = "meta-llama/Llama-3.1-8B"
STANDING = {"llm": NAME, "workers": [{"name": "m", "role": "mixed", "gpu": "l40s-48g", "tp": 1, "count": 2}]}
PROMISE = {"ttft": {"p90": "1 s"}, "tbt": {"p95": "100 ms"}, "every": "1 min"}
MINUTES = 6


def question(stock: int = 4) -> dict[str, Any]:
    return {
        "llms": {name: {"llm": NAME, "slo": PROMISE} for name in ("chat", "code")},
        "fleet": {"gpus": {"l40s-48g": stock}},
        "day": {"controllers": {"hpa": {"metric": "concurrency", "target": 8}}, "start": "20 s", "most": 3},
    }


def traffic(*, late: bool, minutes: int = MINUTES) -> pd.DataFrame:
    """Busy for the first half, or for the second: 5 requests/s, else 1."""
    rng = np.random.default_rng(int(late))
    counts = [300 if (k >= minutes // 2) == late else 60 for k in range(minutes)]
    at_s = np.concatenate([60 * k + np.sort(rng.uniform(0, 60, n)) for k, n in enumerate(counts)])
    at_s[-1] = 60.0 * minutes
    lengths = rng.integers(200, 1200, len(at_s)), rng.integers(20, 150, len(at_s))
    return pd.DataFrame({"arrival_s": at_s, "input_tokens": lengths[0], "output_tokens": lengths[1]})


def asked(stock: int = 4, **changes: Any) -> JointDayResult:
    whole = question(stock)
    whole["day"] |= changes
    traces = {"chat": traffic(late=False), "code": traffic(late=True)}
    found = fleetplan.day(whole, traces, standing={"chat": STANDING, "code": STANDING}, time_limit_s=600)
    assert isinstance(found, JointDayResult)
    return found


def test_given_fleets_cost_what_the_question_says_and_what_no_day_heeds_is_said() -> None:
    """10 USD for every GPU hour."""
    whole = question()
    whole["fleet"] |= {"prices": {"l40s-48g": "10 usd/h"}, "sold_as": {"l40s-48g": "gpu"}}
    whole |= {"limits": {"gpus": 6}, "day": {"controllers": ["hpa"], "start": "20 s", "optimum": False}}
    whole["llms"]["chat"]["spare"] = "1 worker"
    traces = {"chat": traffic(late=False), "code": traffic(late=True)}
    answer = fleetplan.day(whole, traces, standing={"chat": STANDING, "code": STANDING}, time_limit_s=30)
    assert isinstance(answer, JointDayResult)
    static = answer.answer.rows[0]
    assert static.usd == pytest.approx(10 * sum(llm_day.gpu_hours for llm_day in static.llm_days))
    warnings = "\n".join(answer.to_dict()["warnings"])
    assert "spare: only the plan" in warnings and "limits: gpus: only the plan" in warnings


def test_fleets_are_planned_in_the_windows_in_which_the_day_judges_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten minutes without `every`. The fleets of several LLMs were planned for the whole traffic at once."""
    windows_s: list[float | None] = []

    def refuse(shared_question: SeveralLlmsQuestion, *_: Any, **__: Any) -> None:
        windows_s.extend(llm_day.task.slo.every_s for llm_day in shared_question.entries)
        raise InputError("enough")

    monkeypatch.setattr(day_api, "plan_together", refuse)
    whole = question()
    whole["llms"]["code"]["slo"] = {"ttft": {"p90": "1 s"}}
    whole["day"]["every"] = "1 min"
    with pytest.raises(InputError, match="enough"):
        fleetplan.day(whole, {"chat": traffic(late=False), "code": traffic(late=True)})
    assert windows_s == [60.0, 600.0]


@pytest.fixture(scope="module")
def found() -> JointDayResult:
    return asked()


def test_the_optimum_is_no_dearer_than_the_cheapest_days_of_each_llm(found: JointDayResult) -> None:
    """If the search for the optimum had found a dear day of one LLM, a controller's day would replace it;
    not where the stock is too small for both.
    """
    answer = found.answer
    assert answer.optimum is not None
    questions = [each.question for each in answer.by_llm.values()]
    terms = joint_terms([terms_of(each) for each in questions], answer.stock, questions[0].step_s)
    best = answer.optimum.day
    dear = replace(best, llm_days=(replace(best.llm_days[0], usd=99.0), *best.llm_days[1:]))
    of_each = several_llms_day._cheapest_of_each(dear, answer.rows, terms)
    assert of_each is not None and of_each.keeps
    for m, llm_day in enumerate(of_each.llm_days):
        assert llm_day.usd == min(
            day.llm_days[m].usd for day in (dear, *answer.rows) if day.llm_days[m].keeps
        )
    assert of_each.usd == pytest.approx(sum(llm_day.usd for llm_day in of_each.llm_days))
    few = replace(terms, stock={"l40s-48g": 1})
    assert several_llms_day._cheapest_of_each(dear, answer.rows, few) is None


def held(runs: list[ElasticRun], at_s: float) -> int:
    return sum(span.requested_s <= at_s < span.gone_s for run in runs for span in run.spans)


def test_all_llms_together_keep_the_stock_at_every_moment(found: JointDayResult) -> None:
    answer = found.answer
    assert answer.optimum is not None and answer.optimum.day.keeps
    for row in (*answer.rows, answer.optimum.day):
        runs = [llm_day.run for llm_day in row.llm_days]
        moments = {span.requested_s for run in runs for span in run.spans}
        assert max(held(runs, at_s) for at_s in moments) <= 4
        assert row.usd == pytest.approx(sum(llm_day.usd for llm_day in row.llm_days))
        assert not row.keeps or row.usd >= answer.optimum.day.usd * (1 - 1e-9)
        assert not row.keeps or row.usd >= answer.optimum.proved_usd * (1 - 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("billing", ["second", "day"])
def test_llms_that_share_a_node_pay_it_once_in_the_bound_too(billing: str) -> None:
    """One node of 8 holds all workers of both LLMs. The bound counted a node for each."""
    whole = question(8)
    whole["fleet"]["sold_as"] = {"l40s-48g": "node"}
    whole["day"] |= {"controllers": "static", "billing": billing}
    traces = {"chat": traffic(late=False, minutes=2), "code": traffic(late=True, minutes=2)}
    both = {"chat": STANDING, "code": STANDING}
    answer = fleetplan.day(whole, traces, standing=both, time_limit_s=60).answer
    assert not isinstance(answer, DayAnswer) and answer.optimum is not None
    assert answer.optimum.proved_usd <= answer.optimum.day.usd <= answer.static.usd
    # One node throughout; the end of so short a day leaves 2 %.
    assert answer.optimum.proved_usd == pytest.approx(answer.optimum.day.usd, rel=0.03)


def test_the_days_of_controllers_stay_where_the_optimum_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were lost with an error that asked for more time."""

    def out_of_time(*_: Any, **__: Any) -> None:
        raise PlannerError("no sequence was found in 1 s")

    monkeypatch.setattr(several_llms_day, "cheapest_day", out_of_time)
    answer = asked().answer
    assert answer.optimum is None and answer.no_optimum == "no sequence was found in 1 s"
    assert [row.name for row in answer.rows] == ["static", "hpa"]


def test_with_gpus_enough_the_optimum_is_that_of_each_alone() -> None:
    """Six GPUs are never short of three each: the joint optimum is the sum of two."""
    both, alone = asked(6, controllers="static").answer, []
    for name, late in (("chat", False), ("code", True)):
        whole = question(6)
        one = whole["llms"][name] | {"fleet": whole["fleet"], "day": whole["day"] | {"controllers": "static"}}
        found = fleetplan.day(one, traffic(late=late), standing=STANDING, time_limit_s=600)
        assert found.answer.optimum is not None and not isinstance(found, JointDayResult)
        alone.append(found.answer.optimum.usd)
    assert both.optimum is not None
    assert both.optimum.day.usd == pytest.approx(sum(alone), rel=2e-3)


def test_one_page_and_tables_of_each(found: JointDayResult, tmp_path: Path) -> None:
    written = found.save(tmp_path)
    assert {"day.html", "day.json", "chat/day.csv", "code/windows.csv"} <= set(written)
    told = json.loads((tmp_path / "day.json").read_text())
    assert told == found.to_dict() and told["winner"] == found.winner
    assert {each["winner"] for each in told["llms"].values()} == {found.winner}
    page = (tmp_path / "day.html").read_text()
    assert "chat over the day" in page and "code over the day" in page
    assert len(found.to_frame()) == 2 * len(told["controllers"])


def one_after_the_other(*, dates: bool, one_file: bool) -> Any:
    """2 requests/s in the first three minutes, and in two minutes after a pause of a minute."""
    whole = question()
    whole["day"] = {"controllers": "static", "start": "2 s", "least": 0, "billing": "day"}
    at_s = np.arange(0.0, 360.0, 0.5)
    rows = pd.DataFrame({"timestamp": at_s + 100, "input_tokens": 300, "output_tokens": 40})
    rows["model"] = np.where(at_s < 240, "chat", "code")
    if dates:
        rows["timestamp"] = pd.Timestamp("2026-11-23 08:00") + pd.to_timedelta(at_s, unit="s")
    rows = rows[(at_s < 180) | (at_s >= 240)]
    traces = {llm: rows[rows["model"] == llm].drop(columns="model") for llm in ("chat", "code")}
    both = {"chat": STANDING, "code": STANDING}
    return fleetplan.day(whole, rows if one_file else traces, standing=both, time_limit_s=600)


@pytest.mark.long
@pytest.mark.parametrize(("dates", "one_file"), [(False, False), (True, False), (True, True)])
def test_llms_that_work_one_after_the_other_share_a_gpu(dates: bool, one_file: bool) -> None:
    """359.5 s. Each LLM's trace was moved to 0, so both worked at once; in one file it was refused that the
    first ends earlier.
    """
    answer = one_after_the_other(dates=dates, one_file=one_file).answer
    assert answer.optimum is not None and answer.optimum.day.most_gpus == {"l40s-48g": 1}
    usd_per_h = answer.by_llm["chat"].question.fleet.pools[0].type.price_usd_per_h
    assert answer.optimum.day.usd == pytest.approx(usd_per_h * 359.5 / 3600)
    assert answer.static.usd == pytest.approx(4 * answer.optimum.day.usd)
    idle = [line for line in answer.warnings if "no request" in line]
    assert [line.split(",")[0] for line in idle] == [
        "chat has no request for 3.0 min before the day ends",
        "code has no request for 4.0 min after the day begins",
    ]
    assert any("the traffic lasts 6.0 min" in line for line in answer.warnings)


def test_training_ends_at_one_moment_for_all_llms() -> None:
    """At 50 s of 100 s. It ended at the middle of each LLM's own traffic: at 40 s, and at 70 s."""
    at_s = (np.arange(0.0, 81.0), np.arange(40.0, 101.0))
    whole = Trace("t", at_s[0], np.full(81, 9), np.full(81, 9))
    for each_s in at_s:
        own = replace(whole.select(np.arange(len(each_s))), arrival_s=each_s)
        train, judged = split_training(own, 0.5, 100.0)
        assert train is not None and train.arrival_s[-1] == 49 and judged.arrival_s[0] == 0


def test_agents_are_refused_before_their_fleets_are_planned() -> None:
    """A column was to be dropped, of described agents too, after all fleets had been planned."""
    limits = {"slo": {"ttft": {"p90": "2 s"}, "every": "5 min"}}
    agents = {"traffic": {"agents": 5, "task": "coding-agent", "duration": "10 min"}}
    chat = {"traffic": {"rate": 1, "task": "chat", "duration": "5 min"}}
    llm = {"llm": "llama-3.1-8b"}
    stages: list[str] = []
    with pytest.raises(InputError, match=r"^described traffic: requests of sessions and agents wait"):
        fleetplan.day(llm | limits | agents, progress=stages.append)
    entries = {"a": llm | limits | chat, "b": llm | limits | agents}
    with pytest.raises(InputError, match=r"^llms: b: described traffic: requests of sessions and agents"):
        fleetplan.day({"llms": entries}, progress=stages.append)
    assert not any("stand" in stage for stage in stages)


def test_what_is_refused() -> None:
    whole, both = question(), {"chat": STANDING, "code": STANDING}
    traces = {"chat": traffic(late=False), "code": traffic(late=True)}
    with pytest.raises(fleetplan.PlannerError, match="a fleet for each of chat, code; found chat"):
        fleetplan.day(whole, traces, standing={"chat": STANDING})
    with pytest.raises(fleetplan.PlannerError, match="stock of l40s-48g: the workers at time zero take more"):
        fleetplan.day(question(3), traces, standing=both)
    with pytest.raises(InputError, match="day: fleets: all takes one LLM"):  # It was passed over in silence.
        asked(fleets="all")
    with pytest.raises(fleetplan.PlannerError, match="trace: missing"):
        one = {"llm": NAME, "slo": PROMISE, "fleet": {"gpus": {"l40s-48g": 4}}}
        fleetplan.day(one, None, standing=STANDING)
