"""Electricity as a part of the cost: the same as a higher price, and every bound stays a bound."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from plans import CATALOG
from questions import question, traffic

from planner.documents.task import parse_task
from planner.domain import OWNED
from planner.errors import InputError
from planner.files.checked_files import write_files
from planner.reports import output
from planner.reports.output import to_json
from planner.reports.report import render_report
from planner.search.evidence.certify import plan
from planner.search.evidence.written_plan import read_plan
from planner.search.mixed.best_fleet import find_best_fleet
from planner.search.mixed.bounds import lower_bound
from planner.search.problem.build_problem import build_problem
from planner.search.problem.owned_first import objective_paid, owned_first, paid_at_least
from planner.solvers.master import Option

H100 = {"h100-80g": 64}
PAID = {"price": "0.12 usd/kWh", "pue": 1.3}


@pytest.mark.slow
def test_electricity_of_all_is_a_higher_price() -> None:
    """0.7 kW x 0.156 USD/kWh = 0.1092 USD/h on H100 of 3, 0.4 x 0.156 = 0.0624 on A100 of 1.9."""
    gpus, asked = ["a100-80g", "h100-80g"], traffic(rate_rps=10.0)
    singly = {"gpus": gpus, "sold_as": {"a100-80g": "gpu", "h100-80g": "gpu"}}  # GPUs that idle draw less
    beside = {"prices": {"h100-80g": 3.0, "a100-80g": 1.9}, "electricity": PAID | {"of": "all"}}
    within = {"prices": {"h100-80g": 3.1092, "a100-80g": 1.9624}}
    problems = [build_problem(question(fleet=singly | each), asked, CATALOG) for each in (beside, within)]
    bounds = [lower_bound(problem) for problem in problems]
    found = [find_best_fleet(problem) for problem in problems]
    assert bounds[0] == pytest.approx(bounds[1])
    assert found[0].value == pytest.approx(found[1].value)
    assert [(o.name, n) for o, n in found[0].best] == [(o.name, n) for o, n in found[1].best]


def test_the_bound_is_below_every_fleet_that_holds() -> None:
    """Brute force: all counts of two H100 options, owned and rented, with the electricity of owned ones."""
    fleet = {"gpus": {"h100-80g": 16}, "owned": {"h100-80g": 5}, "electricity": PAID}
    problem = build_problem(question(fleet=fleet), traffic(rate_rps=10.0), CATALOG)
    found, lower = find_best_fleet(problem), lower_bound(problem)
    assert lower is not None and paid_at_least(problem, lower) == lower
    types = [w for w in problem.types if w.tp in (2, 4) and w.max_num_batched_tokens == 1024]
    options = [Option("mixed", w, w.price_usd_per_h) for w in types]
    assert {o.type.gpu.name for o in options} == {"h100-80g", "h100-80g" + OWNED}
    cheapest = min(
        objective_paid(problem, counts)
        for vector in itertools.product(range(5), repeat=len(options))
        if any(vector)
        for counts in [tuple((o, n) for o, n in zip(options, vector, strict=True) if n)]
        if problem.allows(counts) and problem.oracle.holds(counts)
    )
    assert lower <= cheapest + 1e-9 and objective_paid(problem, found.best) <= cheapest + 1e-9
    assert objective_paid(problem, found.best) == pytest.approx(found.value)


@pytest.mark.long
def test_a_plan_says_what_of_its_cost_is_electricity_and_what_commitments_save(tmp_path: Path) -> None:
    """12 owned H100 at their limit: 12 x 0.1092 = 1.31 USD/h; six are rented on one node of eight."""
    prices = {"h100-80g": {"on_demand": "3 usd/h", "reserved_1y": "2 usd/h"}}
    fleet = {"gpus": H100, "owned": {"h100-80g": 12}, "electricity": PAID, "prices": prices}
    engine = {"name": "vllm", "first_token": "prefill"}
    found = plan(question(fleet=fleet, engine=engine), traffic(rate_rps=40.0), CATALOG)
    document = to_json(found)
    assert document["bill"]["electricity_usd_per_h"] == pytest.approx(12 * 0.1092)
    assert 0.3 < document["bill"]["expected_electricity_usd_per_h"] / (12 * 0.1092) <= 1
    assert document["bill"]["usd_per_h"] == pytest.approx(8 * 3 + 12 * 0.1092)
    assert document["cost_usd_per_h"] == document["bill"]["usd_per_h"]
    assert found.certificate.bound <= found.certificate.value == document["bill"]["usd_per_h"]
    assert document["certificate"]["commitments"][1]["usd_per_h"] == pytest.approx(8 * 2 + 12 * 0.1092)
    tokens = found.trace.input_tokens.sum() + found.trace.output_tokens.sum()
    paid_usd = document["bill"]["usd_per_h"] * found.trace.duration_s / 3600
    assert document["usd_per_million"]["tokens"] == pytest.approx(paid_usd / tokens * 1e6)
    said = [fact for fact in document["facts"]["assumptions"] if fact["kind"] == "electricity-counted"]
    assert said == [{"kind": "electricity-counted", "usd_per_kwh": 0.12, "pue": 1.3, "of": "owned"}]
    write_files(tmp_path, output.render(found))
    again, _ = read_plan(tmp_path, CATALOG)
    written = [(each.term, each.sources, each.at_planned) for each in again.certificate.commitments]
    assert written == [(c.term, c.sources, c.at_planned) for c in found.certificate.commitments]
    assert again.certificate.commitments[1].needed_frac == pytest.approx(2 / 3)
    assert again.bill.electricity_usd_per_h == pytest.approx(found.bill.electricity_usd_per_h)
    assert again.bill.usd_per_h == pytest.approx(found.bill.usd_per_h)
    page = render_report(found)
    assert "electricity of owned GPUs" in page and "The same fleet by other terms" in page


def test_an_owned_gpu_that_draws_more_than_a_rented_one_costs_is_not_taken_first() -> None:
    """At 10 USD/kWh an owned H100 draws 9.10 USD/h, a rented one costs 3 with its electricity."""
    dear = {"price": "10 usd/kWh", "pue": 1.3}
    fleet = {"gpus": H100, "owned": {"h100-80g": 8}, "electricity": dear}
    problem = build_problem(question(fleet=fleet), traffic(rate_rps=8.0), CATALOG)
    found = find_best_fleet(problem)
    assert {o.type.gpu.name for o, _ in found.best} == {"h100-80g"}
    assert owned_first(problem, found.best) == found.best
    assert objective_paid(problem, found.best) == pytest.approx(found.value)


def test_a_price_of_electricity_without_pue_is_answered_with_one() -> None:
    document = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "1 s"}}}
    fleet = {"electricity": {"price": "0.2 usd/kWh"}}
    with pytest.raises(InputError, match=r"electricity: pue: is missing; write pue: 1.3"):
        parse_task(document | {"fleet": fleet}, CATALOG)
