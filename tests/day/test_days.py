"""`fleetplan.day` and the commands over it: what is given back, written and refused."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from plans import CATALOG

import fleetplan
from planner import cli
from planner.day import day_page, day_study
from planner.day.day_api import DayResult, elastic_pools, progress_of_fleet
from planner.day.day_fleets import ON_PAPER, cheapest_fleet
from planner.day.day_settings import parse_day
from planner.day.day_study import DayAnswer, DayQuestion
from planner.documents.fleet_file import fleet_of
from planner.documents.startup_times import read_startup
from planner.documents.task import parse_task
from planner.fleet import Fleet
from planner.search.problem.bill import bill_fleet
from planner.traffic.described import Description, draw_requests
from planner.traffic.lengths import Lognormal

STANDING = {
    "llm": "meta-llama/Llama-3.1-8B",
    "workers": [{"name": "mixed", "role": "mixed", "gpu": "a100-80g", "tp": 1, "count": 2}],
}
SLO: dict[str, Any] = {
    "llm": "meta-llama/Llama-3.1-8B",
    "slo": {"ttft": {"p90": "1 s"}, "tbt": {"p95": "100 ms"}, "every": "1 min"},
    "fleet": {"gpus": {"a100-80g": 8}},
    "day": {"controllers": {"hpa": {"metric": "concurrency", "target": 8}}, "start": "30 s", "most": 4},
}


def traffic(minutes: int = 8) -> pd.DataFrame:
    """2 and 12 requests/s, every other minute."""
    rng = np.random.default_rng(0)
    counts = [120 if k % 2 else 720 for k in range(minutes)]
    at_s = np.concatenate([60 * k + np.sort(rng.uniform(0, 60, n)) for k, n in enumerate(counts)])
    lengths = rng.integers(200, 1500, len(at_s)), rng.integers(20, 200, len(at_s))
    return pd.DataFrame({"arrival_s": at_s, "input_tokens": lengths[0], "output_tokens": lengths[1]})


@pytest.fixture(scope="module")
def found() -> DayResult:
    result = fleetplan.day(SLO, traffic(4), standing=STANDING)
    assert isinstance(result, DayResult)
    return result


@pytest.mark.slow
def test_a_row_for_each_and_the_optimum(found: DayResult) -> None:
    table = found.to_frame()
    assert table["name"].tolist() == ["optimum", "static", "hpa"]
    assert table["usd"][0] == table["usd"].where(table["missed"] == 0).min()
    assert found.winner in ("static", "hpa") and found.headline().startswith(found.winner)


@pytest.mark.long
def test_what_stands_has_the_price_of_a_plan(found: DayResult) -> None:
    """`plan day` divided the bill, which runs to the last answer, by the time to the last arrival."""
    day = found.to_dict()
    static = next(each for each in day["controllers"] if each["name"] == "static")
    listed_usd_per_h = bill_fleet(found.answer.question.fleet).usd_per_h
    assert day["standing_usd_per_h"] == pytest.approx(listed_usd_per_h)
    assert static["usd"] / static["paid_hours"] == pytest.approx(listed_usd_per_h)
    table = {row[0]: row for row in day_page.day_table(found.answer)[1]}
    assert table["static"][2] == f"{listed_usd_per_h:,.2f}"
    assert f"{listed_usd_per_h:,.2f} USD per hour" in day_page.standing_line(found.answer)
    assert any("not a day" in warning for warning in day["warnings"])


def test_a_day_of_a_described_week_says_how_to_draw_it() -> None:
    """Of a week 28 minutes were drawn, and the warning said neither that nor what draws a day."""
    week = Description(
        tuple(np.linspace(1.0, 6.0, 168).tolist()),
        300.0,
        Lognormal(800, 1.0),
        Lognormal(200, 1.0),
        every_s=3600.0,
    )
    question = SimpleNamespace(warnings=(), trace=draw_requests(week, seed=0), until_s=0.0)
    (warning,) = day_study.warnings_of(cast(DayQuestion, question), None, ())
    assert "it is the busiest part of 168.0 h: traffic: duration: 24 h draws a whole day" in warning


def test_what_is_saved(found: DayResult, tmp_path: Path) -> None:
    """Again for another winner: no manifest of the first is left."""
    written = found.save(tmp_path)
    assert {"day.html", "day.csv", "windows.csv", "events.csv", "day.json"} < set(written)
    assert json.loads((tmp_path / "day.json").read_text()) == found.to_dict()
    for usd in (0.0, 1e9):
        question = replace(found.answer.question, missed_usd=usd)
        again = DayResult(replace(found.answer, question=question))
        kept = {name for name in again.save(tmp_path) if name.startswith("manifests/")}
        there = {str(p.relative_to(tmp_path)) for p in (tmp_path / "manifests").rglob("*") if p.is_file()}
        assert there == kept


@pytest.mark.slow
def test_fleets_that_could_stand_are_compared() -> None:
    """Of two GPUs: each fleet's day is run, and that of the cheapest is told, which no other is below."""
    whole = SLO | {"fleet": {"gpus": {"l40s": 6, "a10g": 8}}}
    whole["day"] = SLO["day"] | {"optimum": False}
    result = fleetplan.day(whole, traffic(4))
    assert isinstance(result, DayResult)
    rows, answer = result.to_dict()["fleets"], result.answer
    assert len(rows) >= 2 and sum(row["is_chosen"] for row in rows) == 1
    chosen = next(row for row in rows if row["is_chosen"])
    assert chosen["usd"] == answer.winner.usd and chosen["standing_usd"] == answer.static.usd
    assert {row["fleet"].count("l40s") for row in rows} == {0, 1}
    alone = fleetplan.day(whole | {"day": whole["day"] | {"fleets": "plan"}}, traffic(4))
    assert alone.to_dict()["fleets"] == [] and "Fleets that could stand" in result.report()
    one = next(row for row in rows if row["label"] == "the fleet on paper")
    assert one["standing_usd"] == pytest.approx(alone.answer.static.usd)


def test_progress_of_several_fleets_names_the_fleet() -> None:
    """The same twelve lines came once for every fleet, without a word of which."""
    told: list[str] = []
    first, second = (fleet_of(STANDING, Path("fleet.yaml"), CATALOG) for _ in range(2))
    fleets = {"the fleet on paper": first, "l40s, mixed": second}
    progress_of_fleet(fleets, second, told.append)("static: the day")
    progress_of_fleet({"alone": first}, first, told.append)("static: the day")
    assert told == ["fleet 2 of 2 (l40s, mixed): static: the day", "static: the day"]


def test_a_fleet_chosen_by_its_day_is_not_called_the_cheapest_on_paper(found: DayResult) -> None:
    """12.72 USD/h was "the cheapest on paper" beside a plan on paper for 12.61: its day was the cheaper."""
    question = replace(found.answer.question, fleet_note="the cheapest on paper")
    first = replace(found.answer, question=question)
    cheaper = replace(first, rows=tuple(replace(row, usd=row.usd / 2) for row in first.rows))
    other = replace(question.fleet, pools=question.fleet.pools[:1])
    fleets = {ON_PAPER: question.fleet, "only a100-80g": other}
    for answers, note in (
        ((first, cheaper), "only a100-80g: the cheapest day of 2 fleets"),
        ((cheaper, first), "the cheapest on paper"),
    ):
        days = dict(zip(map(id, fleets.values()), answers, strict=True))
        chosen = cheapest_fleet(fleets, partial(_day_of, days), time.monotonic() + 60)
        assert day_page.standing_line(chosen).endswith(f"; {note}.")


def _day_of(days: dict[int, DayAnswer], fleet: Fleet, _: float, missed_usd: float | None) -> DayAnswer:
    answer = days[id(fleet)]
    if missed_usd is None:
        return answer
    return replace(answer, question=replace(answer.question, missed_usd=missed_usd))


def test_a_missed_window_costs_as_much_for_every_fleet(found: DayResult) -> None:
    """The second fleet stands for 0.3 of the first one's price, so at its own price of a window a controller
    for 0.1 that misses half of them won: 0.1 + 0.5 x 0.3 < 0.3. At the first one's price it is 0.6.
    """
    windows = tuple(replace(each, holds=True) for each in found.answer.static.windows)
    half = len(windows) // 2
    missing = (*(replace(each, holds=False) for each in windows[:half]), *windows[half:])
    static = replace(found.answer.static, windows=windows)
    first = replace(found.answer, rows=(static,))
    cheap = replace(static, usd=0.3 * static.usd)
    second = replace(first, rows=(cheap, replace(cheap, name="hpa", usd=0.1 * static.usd, windows=missing)))
    assert second.winner.name == "hpa"
    fleets = {"first": first.question.fleet, "second": replace(first.question.fleet)}
    days = {id(fleets["first"]): first, id(fleets["second"]): second}
    row = cheapest_fleet(fleets, partial(_day_of, days), time.monotonic() + 60).fleets[1]
    assert (row.controller, row.missed, row.is_chosen) == ("static", 0, True)


def test_orders_of_the_queue_are_tried_over_the_day() -> None:
    """Each that `policies` names has its day, the same as alone; with `fleets: plan` there is no other."""
    both = SLO | {"policies": {"queue": ["fcfs", "sjf"]}, "day": SLO["day"] | {"optimum": False}}
    result = fleetplan.day(both, traffic(4), standing=STANDING)
    assert isinstance(result, DayResult)
    rows = {row["label"]: row for row in result.to_dict()["fleets"]}
    assert list(rows) == ["the fleet given", "the fleet given, sjf"]
    assert "shortest prompt first" in rows["the fleet given, sjf"]["fleet"]
    alone = fleetplan.day(
        SLO | {"day": both["day"]}, traffic(4), standing=STANDING | {"policies": {"queue": "sjf"}}
    )
    assert alone.answer.winner.usd == pytest.approx(rows["the fleet given, sjf"]["usd"])
    assert alone.answer.winner.missed_windows == rows["the fleet given, sjf"]["missed"]
    only = fleetplan.day(both | {"day": both["day"] | {"fleets": "plan"}}, traffic(4), standing=STANDING)
    assert only.to_dict()["fleets"] == []


def test_one_controller_by_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same as `day` without the optimum; requests.csv is of the controller's run."""
    (tmp_path / "slo.yaml").write_text(json.dumps(SLO))
    (tmp_path / "fleet.yaml").write_text(json.dumps(STANDING))
    traffic().to_csv(tmp_path / "t.csv", index=False)
    files = (
        "--slo",
        tmp_path / "slo.yaml",
        "--trace",
        tmp_path / "t.csv",
        "--fleet",
        tmp_path / "fleet.yaml",
    )
    told = run(capsys, "simulate", *files, "--autoscale", "hpa", "-o", tmp_path / "out.csv", "--json")
    answer = json.loads(told)
    assert [each["name"] for each in answer["controllers"]] == ["static", "hpa"] and answer["optimum"] is None
    assert len(pd.read_csv(tmp_path / "out.csv")) == len(traffic())


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"controllers": "hpq"}, "did you mean 'hpa'"),
        ({"controllers": {"hpa": {"metric": "gpu"}}}, "metric"),
        ({"least": 3, "most": 2}, "must be at least least"),
        ({"start": "10 d"}, "start"),
        ({"storage": "tape"}, "storage"),
        ({"train": "100 %"}, "5 % to 95 %"),
        ({"every": "0 s"}, "every"),
        ({"every": "1 ms"}, "20,000 are searched"),
        ({"missed_window": -1}, "missed_window"),
        ({"missed": "120 %"}, "missed"),
        ({"missed": "1 %", "missed_window": 2}, "missed_window would"),
        ({"controler": "hpa"}, "controllers"),
        ({"least": 3, "most": 8}, "widen"),
    ],
)
def test_what_is_refused(terms: dict[str, Any], said: str) -> None:
    section = {**SLO["day"], **terms}
    if "storage" in terms:
        section.pop("start")
    with pytest.raises(fleetplan.PlannerError, match=said):
        fleetplan.day({**SLO, "day": section}, traffic(2), standing=STANDING)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    before, sys.argv = sys.argv, ["plan", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as end:
            cli.main()
    finally:
        sys.argv = before
    said = capsys.readouterr()
    assert not end.value.code, said.err
    return said.out


@pytest.mark.parametrize(("gpu", "most"), (("a100-80g@owned", 2), ("a100-80g", 3)))
def test_a_pool_on_owned_gpus_grows_to_what_is_owned(gpu: str, most: int) -> None:
    """Two are owned of a stock of 64, so a pool of one may grow to two; one that is rented to three times
    its size. The owned pool had the stock of all as its limit.
    """
    document = SLO | {"fleet": {"gpus": {"a100-80g": 64}, "owned": {"a100-80g": 2}}}
    task = parse_task({key: value for key, value in document.items() if key != "day"}, CATALOG)
    worker = STANDING["workers"][0] | {"count": 1}  # type: ignore[operator]
    fleet = fleetplan.read_fleet(STANDING | {"workers": [worker]})
    pool = fleet.pools[0]
    fleet = replace(
        fleet, pools=(replace(pool, type=replace(pool.type, gpu=replace(pool.type.gpu, name=gpu))),)
    )
    (elastic,) = elastic_pools(fleet, parse_day({}, "day"), task, read_startup())
    assert elastic.most == most


def test_a_pool_grows_to_whole_nodes() -> None:
    """Twelve GPUs in nodes of eight are one node, as for `plan`: two workers of four GPUs, not three."""
    fleet_terms = {"gpus": {"a100-80g": 12}, "sold_as": {"a100-80g": "node"}}
    task = parse_task({**{k: v for k, v in SLO.items() if k != "day"}, "fleet": fleet_terms}, CATALOG)
    worker = STANDING["workers"][0] | {"count": 1, "tp": 4}  # type: ignore[operator]
    fleet = fleet_of(STANDING | {"workers": [worker], "sold_as": {"a100-80g": "node"}}, Path("f"), CATALOG)
    (elastic,) = elastic_pools(fleet, parse_day({}, "day"), task, read_startup())
    assert elastic.most == 2


def test_a_described_day_needs_no_trace() -> None:
    """`plan day` refused what `plan` draws: traffic of slo.yaml, here five minutes at 1, then at 2 rps."""
    answer = fleetplan.day(
        {"ttft": {"p95": "1 s"}, "every": "5 min"},
        llm="llama-3.1-8b",
        traffic={"rate": {"curve": [1, 2], "every": "5 min"}, "input": 300, "output": 30},
        fleet={"gpus": ["l40s"]},
        day={"controllers": ["hpa"], "optimum": False, "fleets": "plan"},
    )
    assert isinstance(answer, DayResult)
    assert [row.name for row in answer.answer.rows] == ["static", "hpa"]
