"""The staircase of cost against a limit: against plans made at each limit, and corners asked again."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from plans import CATALOG
from questions import DOCUMENT, traffic
from questions import question as asked
from typer.testing import CliRunner

from planner.cli import app
from planner.documents.safety import Safety
from planner.documents.slo import parse_slo
from planner.errors import InfeasibleError, InputError, OutOfTimeError
from planner.search.problem.bill import bill_fleet
from planner.studies import pareto_frontier
from planner.studies.pareto_frontier import Frontier, FrontierStair, find_frontier, frontier_document
from planner.studies.pareto_page import frontier_table, render_frontier
from planner.studies.what_if import Study, find_keeping_policies, workers_in_question

question = partial(asked, engine="none")  # the fleets that these tests are about


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(traffic(requests=300), CATALOG)


@pytest.fixture(scope="module")
def over_ttft(study: Study) -> Frontier:
    return find_frontier(study, question(), "ttft", first=0.5, last=3.0, points=20)


@pytest.mark.slow
def test_between_two_corners_no_plan_is_cheaper(study: Study) -> None:
    """Plans from scratch on a grid that the staircase never saw cost what it says."""
    over_ttft = find_frontier(study, question(), "ttft", first=0.3, last=3.0, points=20)
    assert len(over_ttft.stairs) >= 2 and all(stair.is_exact for stair in over_ttft.stairs)
    fresh = Study(traffic(requests=300), CATALOG)
    for limit_s in (0.33, 0.5, 0.77, 1.0, 1.4, 2.9):
        slo = parse_slo({"ttft": {"p90": f"{limit_s!r} s"}, "tbt": {"p99": "80 ms"}}, where="")
        stair = over_ttft.best_at(limit_s)
        try:
            value = fresh.answer(replace(question(), slo=slo)).value
        except InfeasibleError:
            assert stair is None
            continue
        assert stair is not None and stair.value == pytest.approx(value), limit_s


@pytest.mark.slow
def test_a_fleet_holds_at_its_corner_and_not_beyond(study: Study, over_ttft: Frontier) -> None:
    for stair in over_ttft.stairs:
        for limit_s, is_held in ((stair.corner, True), (stair.corner * (1 - 3e-6), False)):
            slo = parse_slo({"ttft": {"p90": f"{limit_s!r} s"}, "tbt": {"p99": "80 ms"}}, where="")
            problem = study.problem_of(replace(question(), slo=slo))
            fleet = workers_in_question(problem, stair.fleet)
            assert fleet is not None and (find_keeping_policies(problem, fleet) is not None) == is_held


@pytest.mark.long
def test_values_rise_as_limits_tighten(over_ttft: Frontier) -> None:
    corners, values = zip(*((stair.corner, stair.value) for stair in over_ttft.stairs), strict=True)
    assert list(corners) == sorted(corners, reverse=True) and list(values) == sorted(values)
    assert len(set(values)) == len(values)
    assert (
        over_ttft.question_limit == 1.0
        and over_ttft.best_at(10.0) is None
        and over_ttft.best_at(1e-3) is None
    )


@pytest.mark.slow
def test_power_is_walked_down_to_where_nothing_holds(study: Study) -> None:
    """A plan under each fleet's own Watts finds no cheaper one; below the last, none."""
    found = find_frontier(study, question(), "power", points=20)
    assert "no fleet holds (power binds)" in found.ended
    for stair in found.stairs:
        assert stair.corner == stair.fleet.power_w
        assert study.answer(replace(question(), power_limit_w=stair.corner)).value == pytest.approx(
            stair.value
        )
    with pytest.raises(InfeasibleError):
        study.answer(replace(question(), power_limit_w=found.stairs[-1].corner * 0.999))


@pytest.mark.slow
def test_over_cost_the_objective_is_power(study: Study) -> None:
    found = find_frontier(study, question(), "cost", points=20)
    assert (found.objective, found.objective_unit) == ("power", "W")
    assert bill_fleet(found.stairs[-1].fleet).usd_per_h == pytest.approx(study.answer(question()).value)
    assert [stair.value for stair in found.stairs] == [stair.fleet.power_w for stair in found.stairs]


def test_a_rate_below_the_corner_that_fails_moves_the_corner(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a short trace 7.5 requests/s were carried and 7.2 were not: the corner was 7.5, while `plan` at
    7.2 had a dearer fleet.
    """
    monkeypatch.setattr(pareto_frontier, "workers_in_question", lambda *_: "a fleet")
    kept = lambda rate, _: "fcfs" if rate <= 7.0 or 7.3 <= rate <= 7.5 else None  # noqa: E731
    monkeypatch.setattr(pareto_frontier, "find_keeping_policies", kept)
    monkeypatch.setattr(pareto_frontier, "untimed_test", lambda _: None)
    trace = SimpleNamespace(duration_s=3600.0)
    study = SimpleNamespace(problem_of=lambda task: task.rate_rps, trace=trace)
    walk = pareto_frontier._rate_walk(study, replace(question(), rate_rps=4.0))  # type: ignore[arg-type]
    corner, beyond = walk.corner(SimpleNamespace(fleet=None), 2.0, 8.0)  # type: ignore[arg-type]
    assert 6.9 < corner <= 7.0 < beyond < 7.1


@pytest.mark.long
def test_more_traffic_costs_more_and_each_fleet_carries_its_rate(study: Study) -> None:
    found = find_frontier(study, question(), "rate", first=6.0, last=10.0, points=20)
    assert [stair.corner for stair in found.stairs] == sorted(stair.corner for stair in found.stairs)
    assert [stair.value for stair in found.stairs] == sorted(stair.value for stair in found.stairs)
    for stair in found.stairs:
        problem = study.problem_of(replace(question(), rate_rps=stair.corner))
        fleet = workers_in_question(problem, stair.fleet)
        assert fleet is not None and find_keeping_policies(problem, fleet) is not None
    at = found.best_at(9.0)  # at 9.4 and 10.05 the cheapest of 10 fails: what is drawn there is harder
    assert at is not None
    assert at.value == pytest.approx(study.answer(replace(question(), rate_rps=9.0)).value)


@pytest.mark.slow
def test_with_safety_each_step_has_the_three_answers(study: Study) -> None:
    found = find_frontier(study, replace(question(), safety=Safety()), "ttft", first=1.9, last=2.0, points=1)
    (stair,), (row,) = frontier_document(found)["steps"], frontier_table(found)
    paper, made, lossy = stair["answers"]
    assert [paper["name"], made["name"], lossy["name"]] == ["on-paper", "production", "with-a-loss"]
    assert made["value"] == stair["value"] >= paper["value"]
    assert (
        row["kept in scenarios"] == f"{made['kept']} of {made['scenario_count']}"
        and made["scenario_count"] >= 20
    )
    line = next(csv.DictReader(str(render_frontier(found)["pareto.csv"]).splitlines()))
    assert float(line["on_paper_value"]) == paper["value"] and "answers" not in line
    first = replace(found.stairs[0], answers=found.stairs[0].answers[:2])  # where the time was over
    lines = csv.DictReader(
        str(render_frontier(replace(found, stairs=(first, *found.stairs)))["pareto.csv"]).splitlines()
    )
    assert [line["with_a_loss_value"] for line in lines] == ["", line["with_a_loss_value"]]


def test_corners_that_creep_do_not_use_up_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet for 1 USD/h whose corner lies 0.1 % below each of its plans, and which is planned again there,
    down to 0.8 s; then one for 2. By 0.1 % each, 12 plans come from 1 s to 0.989 s.
    """

    def answer(task: SimpleNamespace, _: object) -> SimpleNamespace:
        name, value = ("small", 1.0) if task.limit_s > 0.8 else ("large", 2.0)
        return SimpleNamespace(fleet=name, value=value, is_passed=True)

    def stair_of(found: SimpleNamespace, start: float, corner: float) -> FrontierStair:
        return FrontierStair(start, corner, found.value, found.fleet, True, True, found.value)

    walk = SimpleNamespace(name="ttft p95", unit="s", question_limit=1.0, low=0.5, high=1.0)
    walk.is_rising, walk.planned_too = False, None
    walk.task = lambda limit_s: SimpleNamespace(objective="cost", limit_s=limit_s)
    walk.corner = lambda found, limit_s, _: (limit_s, limit_s * 0.999)
    walk.holds = lambda *_: True
    monkeypatch.setattr(pareto_frontier, "_axis_walk", lambda *_: walk)
    monkeypatch.setattr(pareto_frontier, "_stair_of", stair_of)
    study = SimpleNamespace(progress=lambda _: None, answer=answer)
    found = find_frontier(study, SimpleNamespace(), "ttft")  # type: ignore[arg-type]
    assert [stair.value for stair in found.stairs] == [1.0, 2.0]
    assert 0.8 < found.stairs[0].corner <= 0.8 / 0.95 and found.stairs[1].corner <= 0.8


def test_a_fleet_that_failed_its_test_is_on_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 0.8 s a fleet for 1 USD/h that fails its test is planned; the step of the fleet for 2 begins
    where the range does. Without that one there is no frontier.
    """

    def corner_of(answer: SimpleNamespace, limit_s: float, _: float) -> tuple[float, float]:
        return limit_s, limit_s * 0.9

    def answer(task: SimpleNamespace, _: object) -> SimpleNamespace:
        is_small = task.limit_s > least_s
        return SimpleNamespace(fleet=is_small, value=1.0 if is_small else 2.0, is_passed=not is_small)

    def stair_of(found: SimpleNamespace, start: float, corner: float) -> FrontierStair:
        return FrontierStair(
            start, corner, found.value, found.fleet, True, True, found.value, is_passed=found.is_passed
        )

    walk = SimpleNamespace(name="ttft p95", unit="s", question_limit=1.0, low=0.5, high=1.0)
    walk.is_rising, walk.planned_too = False, None
    walk.task = lambda limit_s: SimpleNamespace(objective="cost", limit_s=limit_s)
    walk.corner, walk.holds = corner_of, lambda *_: True
    monkeypatch.setattr(pareto_frontier, "_axis_walk", lambda *_: walk)
    monkeypatch.setattr(pareto_frontier, "_stair_of", stair_of)
    study = SimpleNamespace(progress=lambda _: None, answer=answer)
    least_s = 0.8
    found = find_frontier(study, SimpleNamespace(), "ttft")  # type: ignore[arg-type]
    assert {stair.value for stair in found.stairs} == {2.0} and found.stairs[0].start == 1.0
    least_s = 0.0
    with pytest.raises(OutOfTimeError, match="fleets passed its test"):
        find_frontier(study, SimpleNamespace(), "ttft")  # type: ignore[arg-type]


def test_too_few_points_are_said(study: Study) -> None:
    found = find_frontier(study, question(), "ttft", first=0.3, last=3.0, points=1)
    assert len(found.stairs) == 1 and "--points" in found.ended


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("beauty", "--over: expected one of ttft, tbt"),
        ("e2e", r"expected exactly one such limit in the SLO, which has ttft.p90, tbt.p99"),
        ("ttft.p50", "expected exactly one such limit"),
        ("power.p90", "--over: expected one of"),
    ],
)
def test_a_bad_axis_is_refused(study: Study, axis: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_frontier(study, question(), axis)


def test_an_empty_range_is_refused(study: Study) -> None:
    with pytest.raises(InputError, match="range of ttft p90 is empty"):
        find_frontier(study, question(), "ttft", first=1.0, last=1.0)
    with pytest.raises(InputError, match="range of ttft p90 is empty: 0 to 1 s"):  # 0 is no missing limit
        find_frontier(study, question(), "ttft", first=0.0, last=1.0)


@pytest.mark.long
def test_the_command_writes_table_numbers_and_picture(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(yaml.safe_dump(DOCUMENT))
    trace = traffic(requests=200)
    columns = (trace.arrival_s, trace.input_tokens, trace.output_tokens)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = "".join(f"{a},{n},{m}\n" for a, n, m in rows)
    (tmp_path / "trace.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{lines}")
    files = ["--slo", str(tmp_path / "slo.yaml"), "--trace", str(tmp_path / "trace.csv")]
    out = tmp_path / "out"
    said = CliRunner().invoke(app, ["pareto", *files, "--over", "power", "-o", str(out), "--points", "3"])
    assert said.exit_code == 0, said.output
    assert "the staircase ends" in said.stdout
    document = json.loads((out / "pareto.json").read_text())
    table = list(csv.DictReader((out / "pareto.csv").read_text().splitlines()))
    assert [float(row["value"]) for row in table] == [stair["value"] for stair in document["steps"]]
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "pareto.html").read_text()
    for stair in document["steps"]:
        assert f">{escape(stair['fleet'])}</td>" in page
    assert page.count("<div class=still") == 1
