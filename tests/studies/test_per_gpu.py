"""How many GPUs of each: each answer is that of a plan with this GPU alone, and its fleet holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from plans import CATALOG
from questions import DOCUMENT, question, traffic
from typer.testing import CliRunner

from planner.api.planning import beside_each_gpu, plan_question, read_plan
from planner.cli import app
from planner.documents.facts import NoneAlone, Remarked
from planner.documents.task import PlanQuestion
from planner.errors import InfeasibleError
from planner.fleet import Fleet
from planner.reports.fact_sentences import fact_sentence
from planner.reports.rows import alternative_rows
from planner.search.evidence.certify import plan
from planner.search.evidence.plan import Plan
from planner.search.oracle.traffic_request import requested_traffic
from planner.search.problem.bill import bill_fleet
from planner.simulator import judge_slo, simulate
from planner.studies.per_gpu import add_each_gpu, gpu_types
from planner.studies.what_if import Study
from planner.traffic.trace import Trace

STOCK = {"a100-80g": 64, "h100-80g": 64, "h100-80g@350W": 64, "l4": 64}


@pytest.fixture(scope="module")
def asked() -> PlanQuestion:
    return question(fleet={"gpus": STOCK})


@pytest.fixture(scope="module")
def found(asked: PlanQuestion) -> Plan:
    return beside_each_gpu(Study(traffic(requests=300), CATALOG), asked)


@pytest.mark.slow
def test_each_answer_is_that_of_a_plan_with_this_gpu_alone(asked: PlanQuestion, found: Plan) -> None:
    """From scratch, with nothing remembered; and the fleet keeps the SLO when it is simulated once more."""
    rows = {row.label: row for row in found.alternatives if row.label.startswith("only ")}
    requests, _ = requested_traffic(traffic(requests=300), asked, seed=0)
    for gpu, names in (("a100-80g", ["a100-80g"]), ("h100-80g", ["h100-80g", "h100-80g@350W"])):
        stock = {name: 64 for name in names}
        scratch = plan(replace(asked, stock=stock), traffic(requests=300), CATALOG)
        row = rows[f"only {gpu}"]
        assert row.objective == pytest.approx(scratch.certificate.value) and row.is_priced
        assert row.fleet is not None
        assert {pool.type.gpu.base for pool in row.fleet.running_pools} == {gpu}
        assert bill_fleet(row.fleet).usd_per_h == pytest.approx(row.objective)
        assert judge_slo(simulate(row.fleet, requests, limits=asked.slo.limits), asked.slo).holds


def test_the_plan_is_the_cheapest_of_them_and_no_bound_stands_in_for_a_price(found: Plan) -> None:
    """The plan is of H100 here, so "only h100-80g" is the plan. L4 answers in no fleet: no price, and why."""
    rows = {row.label: row for row in found.alternatives}
    assert not [label for label in rows if label.endswith(", mixed")]
    cheapest = min(row.objective for row in rows.values() if row.is_priced and row.label.startswith("only"))
    assert cheapest == found.certificate.value
    (same,) = [row for row in rows.values() if Remarked("is-the-plan") in row.notes]
    assert same.fleet == found.fleet
    l4 = rows["only l4-24g"]
    assert not l4.is_priced and l4.fleet is None
    (note,) = l4.notes
    assert isinstance(note, NoneAlone) and note.is_proved and note.limits
    shown = {line[0]: line for line in alternative_rows(found)[1]}
    assert (
        shown["only l4-24g"][1:3] == ("none", "–")
        and "no fleet of it keeps the SLO" in shown["only l4-24g"][4]
    )


def test_a_capped_row_is_of_the_type_of_its_uncapped_one(asked: PlanQuestion) -> None:
    types = gpu_types(replace(asked, stock={**STOCK, "b200-180g": 0}), Study(traffic(), CATALOG))
    assert types == {
        "a100-80g": {"a100-80g": 64},
        "h100-80g": {"h100-80g": 64, "h100-80g@350W": 64},
        "l4-24g": {"l4": 64},
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("stock", "per_gpu", "is_answered"),
    [
        (["h100-80g"], None, False),
        (["a100-80g", "h100-80g"], None, True),
        (["a100-80g", "h100-80g"], False, False),
        (["a100-80g", "h100-80g", "h200", "b200", "l40s"], None, False),
        (["a100-80g", "h100-80g", "h200", "b200", "l40s"], True, True),
    ],
)
def test_where_nobody_says_whether_two_to_four_types_are_answered(
    stock: list[str], per_gpu: bool | None, is_answered: bool
) -> None:
    fleet = {"gpus": stock} if per_gpu is None else {"gpus": stock, "per_gpu": per_gpu}
    found = beside_each_gpu(Study(traffic(requests=60, rate_rps=3), CATALOG), question(fleet=fleet))
    labels = [row.label for row in found.alternatives if row.label.startswith("only ")]
    assert len(labels) == (len(stock) if is_answered else 0)


@pytest.mark.slow
def test_those_asked_for_are_planned_for_production_and_none_repeats_an_answer() -> None:
    """A row costs what a plan for production with this GPU alone does; else it is on paper."""
    study, gpus = Study(traffic(requests=60, rate_rps=3), CATALOG), ["a100-80g", "h100-80g"]
    safety = {"kept_in": 0.8}
    found = beside_each_gpu(study, question(fleet={"gpus": gpus, "per_gpu": True}, safety=safety))
    rows = {row.label: row for row in found.alternatives if row.label.startswith("only ")}
    answers = (found.fleet, found.on_paper)
    for gpu in gpus:
        alone = plan_question(study, question(fleet={"gpus": [gpu]}, safety=safety))
        if (row := rows.get(f"only {gpu}")) is None:
            assert alone.fleet in answers
            continue
        assert row.fleet not in answers and Remarked("on-paper") not in row.notes
        made = alone.certificate.find_answer("production")
        assert made is not None and row.objective == pytest.approx(made.value)
    on_paper = beside_each_gpu(study, question(fleet={"gpus": gpus}, safety=safety)).alternatives
    assert all(Remarked("on-paper") in row.notes for row in on_paper if row.is_priced)


@pytest.mark.long
def test_what_is_cheaper_than_the_plan_says_so(asked: PlanQuestion) -> None:
    """A plan that is made dearer than it is: of its alternatives both are cheaper, and say so."""
    study = Study(traffic(), CATALOG)
    plain = plan_question(study, asked)
    dearer = replace(
        plain, certificate=replace(plain.certificate, value=1e6), fleet=_pool_of(plain, "a100-80g")
    )
    rows = {row.label: row for row in add_each_gpu(study, asked, dearer, seconds=60).alternatives}
    assert Remarked("cheaper-alone") in rows["only h100-80g"].notes


def _pool_of(plain: Plan, gpu: str) -> Fleet:
    """The plan's fleet with its GPUs renamed."""
    pools = tuple(
        replace(pool, type=replace(pool.type, gpu=replace(pool.type.gpu, name=gpu, base=gpu)))
        for pool in plain.fleet.pools
    )
    return replace(plain.fleet, pools=pools)


def test_the_command_writes_them_and_reads_them_back(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(
        yaml.safe_dump({**DOCUMENT, "fleet": {"gpus": ["a100-80g", "l4", "h100"]}})
    )
    (tmp_path / "trace.csv").write_text(_csv(traffic(requests=60, rate_rps=3)))
    options = ["--slo", str(tmp_path / "slo.yaml"), "--trace", str(tmp_path / "trace.csv"), "--per-gpu"]
    result = CliRunner().invoke(app, [*options, "-o", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    only = {row["label"]: row for row in answer["alternatives"] if row["label"].startswith("only ")}
    assert set(only) == {"only a100-80g", "only l4-24g", "only h100-80g"}
    again = read_plan(tmp_path / "out")
    assert {row.label for row in again.plan.alternatives} == {row["label"] for row in answer["alternatives"]}
    assert "--per-gpu" in again.command


def _csv(trace: Trace) -> str:
    rows = zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True)
    return "arrival_s,input_tokens,output_tokens\n" + "".join(f"{float(a)!r},{n},{o}\n" for a, n, o in rows)


def test_a_gpu_of_which_one_node_is_beyond_the_budget_is_said_to_be_too_dear() -> None:
    """A node of 8 H100 costs 8 x 2.99 = 23.92 USD/h, of 8 A100 15.12, and the budget is 20: no search."""
    task = question(limits={"cost": "20 usd/h"}, slo={"ttft": {"p90": "9 s"}})
    answer = beside_each_gpu(Study(traffic(requests=100, rate_rps=2), CATALOG), task)
    (row,) = [row for row in answer.alternatives if row.label == "only h100-80g"]
    (note,) = row.notes
    assert fact_sentence(note) == (
        "too dear: one worker costs 23.92 USD/h (1 node of 8 × h100-80g), cost allows 20"
    )
    with pytest.raises(InfeasibleError, match=r"one worker costs 15\.12 USD/h .*, cost allows 15") as error:
        plan(replace(task, cost_limit_usd_per_h=15), traffic(requests=100, rate_rps=2), CATALOG)
    assert error.value.is_proved
