"""From plan.yaml to a schedule: the equal parts of its fleet, at its prices, in its stock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from planner.cli import app
from planner.documents.catalog import read_catalog
from planner.documents.markets import parse_market
from planner.documents.offers import offer_of
from planner.documents.planned_market import (
    counted_singly_caveat,
    offer_documents,
    read_planned,
    schedule_caveat,
    schedule_document,
)
from planner.documents.task import parse_task, read_task
from planner.errors import InfeasibleError, InputError
from planner.solvers.reserved_schedule import Demand, schedule

CATALOG = read_catalog()
LLM = "meta-llama/Llama-3.1-70B"
PLAN: dict[str, Any] = {
    "status": "certified",
    "llm": LLM,
    "cost_usd_per_h": 40.0,
    "gpus": 16,
    "traffic": {"rate_rps": 20.0},
    "workers": [
        {"name": "pre", "role": "prefill", "count": 4, "tp": 2, "gpu": "h100-80g"},
        {"name": "dec", "role": "decode", "count": 2, "tp": 4, "gpu": "a100-80g"},
    ],
    "prices": {"h100-80g": "3 usd/h", "a100-80g": "2 usd/h"},
}
SLO = f"""
llm: {LLM}
slo: {{ttft: {{p90: 2 s}}}}
fleet: {{gpus: {{h100-80g: 10, a100-80g: 64}}, prices: {{h100-80g: 3 usd/h, a100-80g: 2 usd/h}}}}
safety: none
limits: {{power: 80 kW}}
"""
DEMAND = f"window,{LLM}\n0,10\n1,20\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    (tmp_path / "slo.yaml").write_text(SLO)
    (tmp_path / "demand.csv").write_text(DEMAND)
    return tmp_path


def asked(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["schedule", *map(str, arguments)])


def test_a_plan_on_spot_is_said_to_be_scheduled_off_it(folder: Path) -> None:
    """The workers of a plan at 0.80 USD/h on spot were scheduled at 1.89 on demand, without a word."""
    on_spot = [worker | {"gpu": f"{worker['gpu']}@spot"} for worker in PLAN["workers"]]
    said = "its spot workers are scheduled on demand"
    assert said not in schedule_caveat(folder)
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN | {"workers": on_spot}))
    assert said in schedule_caveat(folder)


def test_a_schedule_by_hand_says_that_it_counts_gpus_singly() -> None:
    """H100 are sold by nodes of eight, which workers of 16 fill, L40S singly; owned nodes are paid."""
    by_hand: dict[str, Any] = {
        "gpus": {"h100-80g": {"on_demand": "3 usd/h"}, "l40s-48g": {"on_demand": "1 usd/h"}},
        "capacity": [
            {"llm": "chat", "worker": gpu, "gpu": gpu, "gpus": 4, "rate": "2 req/s"}
            for gpu in ("h100-80g", "l40s-48g")
        ],
    }
    said = counted_singly_caveat(parse_market(by_hand), CATALOG)
    assert "h100-80g by 8" in said and "l40s" not in said
    by_hand["capacity"][0]["gpus"] = 16
    assert not counted_singly_caveat(parse_market(by_hand), CATALOG)
    by_hand["capacity"][0]["gpus"] = 4
    by_hand["gpus"]["h100-80g"] = {"owned": 8}
    assert not counted_singly_caveat(parse_market(by_hand), CATALOG)


PRICED = SLO.replace("h100-80g: 3 usd/h", "h100-80g: {on_demand: 5 usd/h, reserved: 3 usd/h}")


def test_a_reserved_price_is_paid_all_the_time_and_that_on_demand_by_the_hour(folder: Path) -> None:
    """A part has 4 H100. One part is kept all the time, the second for one hour of four: reserved it costs
    12 USD/h, on demand 20 / 4 = 5 on average. All four hours were paid as if reserved.
    """
    (folder / "slo.yaml").write_text(PRICED)
    market = read_planned(folder, CATALOG, read_task(folder / "slo.yaml", CATALOG))
    assert market is not None
    offers = {offer.gpu: (offer.reserved_usd_per_h, offer.on_demand_usd_per_h) for offer in market.offers}
    assert offers == {"h100-80g": (3.0, 5.0), "a100-80g": (None, 2.0)}
    bought = schedule(market, Demand((LLM,), np.array([[10.0, 10.0, 10.0, 20.0]]), 3600.0), gap_frac=0.0)
    # 4 A100 at 2 USD/h, 5 / 4 of the time; starts of the second part take 5 min.
    assert bought.cost_usd_per_h == pytest.approx((12 + 5 + 8 + 2) + (20 + 8) / 12 / 4, abs=0.01)


def test_a_commitment_of_a_provider_has_its_price_on_demand_beside_it() -> None:
    """GCP reserves an H100 for a year and rents it by the hour; only the first was offered to schedules."""
    gpus = {"gpus": {"h100-80g": 16}, "price_of": {"provider": "gcp", "term": "reserved-1y"}}
    task = parse_task({"llm": LLM, "slo": {"ttft": {"p90": "2 s"}}, "fleet": gpus}, CATALOG)
    plan = PLAN | {"workers": [PLAN["workers"][0]], "gpus": 8, "cost_usd_per_h": 61.3848}
    offer = offer_documents(plan, CATALOG.gpu("h100-80g"), task)["h100-80g"]
    on_demand = offer_of(CATALOG.provenance["h100-80g"].offers, "gcp", "on-demand")
    assert on_demand is not None and offer["on_demand"] == f"{on_demand.usd_per_h:.12g} usd/h"
    assert offer["reserved"] == "7.6731 usd/h" and offer["stock"] == 16


def test_a_stock_is_of_whole_nodes() -> None:
    """Twelve H100 in nodes of eight are one node, as for `plan`; of six beside eight that are owned none."""
    for stock, owned, usable in ((12, 0, 8), (14, 8, 8)):
        fleet = {"gpus": {"h100-80g": stock}, "owned": {"h100-80g": owned}, "sold_as": {"h100-80g": "node"}}
        task = parse_task({"llm": LLM, "slo": {"ttft": {"p90": "2 s"}}, "fleet": fleet}, CATALOG)
        plan = PLAN | {"workers": [PLAN["workers"][0]], "gpus": 8, "cost_usd_per_h": 61.3848}
        assert offer_documents(plan, CATALOG.gpu("h100-80g"), task)["h100-80g"]["stock"] == usable


def test_gpus_that_stay_free_beside_uneven_workers_are_no_stock() -> None:
    """Two workers of three GPUs fit on a node of eight: five were scheduled on two nodes. Four owned GPUs
    count singly, and a worker of twelve has whole nodes.
    """
    for stock, owned, tp, usable in ((16, 0, 3, 12), (20, 4, 3, 16), (16, 0, 4, 16), (16, 0, 12, 16)):
        fleet = {"gpus": {"h100-80g": stock}, "owned": {"h100-80g": owned}, "sold_as": {"h100-80g": "node"}}
        task = parse_task({"llm": LLM, "slo": {"ttft": {"p90": "2 s"}}, "fleet": fleet}, CATALOG)
        plan = PLAN | {"workers": [PLAN["workers"][0] | {"tp": tp}], "gpus": 4 * tp}
        assert offer_documents(plan, CATALOG.gpu("h100-80g"), task)["h100-80g"]["stock"] == usable


def test_a_limit_on_gpus_is_of_all_kinds_together() -> None:
    """A part has 4 H100 and 4 A100. Of 20 GPUs two parts are made, not five with 20 of each kind."""
    fleet = {"gpus": {"h100-80g": 64, "a100-80g": 64}}
    task = parse_task(yaml.safe_load(SLO) | {"fleet": fleet, "limits": {"gpus": 20}}, CATALOG)
    for gpu in ("h100-80g", "a100-80g"):
        assert offer_documents(PLAN, CATALOG.gpu(gpu), task)[gpu]["stock"] == 8


@pytest.mark.parametrize(("stock", "mean_usd_per_h"), [(16, 12 + 8 / 4), (4, None)])
def test_rented_gpus_with_a_reserved_price_alone_are_paid_all_the_time_beside_owned_ones(
    stock: int, mean_usd_per_h: float | None
) -> None:
    """Of the two parts of 4 H100 one is owned. The second, in use for one hour of four, costs 12 USD/h all
    the time; it was rented by the hour at the reserved price. Four A100 are rented for it by the hour.
    """
    fleet = yaml.safe_load(SLO)["fleet"] | {
        "gpus": {"h100-80g": stock, "a100-80g": 16},
        "owned": {"h100-80g": 4, "a100-80g": 4},
        "prices": {"h100-80g": {"reserved": "3 usd/h"}, "a100-80g": "2 usd/h"},
    }
    task = parse_task(yaml.safe_load(SLO) | {"fleet": fleet}, CATALOG)
    market = parse_market(schedule_document([(PLAN | {"rate_rps": 20.0}, task)], CATALOG))
    demand = Demand((LLM,), np.array([[10.0, 10.0, 10.0, 20.0]]), 3600.0)
    if mean_usd_per_h is None:
        with pytest.raises(InfeasibleError):
            schedule(market, demand, gap_frac=0.0)
        return
    bought = schedule(market, demand, gap_frac=0.0)
    # The owned part is started, which takes 5 min of rented A100.
    assert bought.cost_usd_per_h == pytest.approx(mean_usd_per_h + 8 / 12 / 4, abs=0.01)


def test_without_its_question_the_terms_of_a_plans_prices_are_said_to_be_unknown(folder: Path) -> None:
    """A plan at a reserved price saved 32 % of it in hours in which a reserved GPU is paid too."""
    said = "a reserved price stays reserved"
    assert said in schedule_caveat(folder)
    assert said not in schedule_caveat(folder, has_question=True)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_plan_is_scheduled_in_its_equal_parts(folder: Path, *, is_folder: bool) -> None:
    """2 prefill workers of 2 H100 at 3 USD/h and a decode worker of 4 A100 at 2 carry 10 requests/s: 20 USD/h
    in the first hour, 40 in the second.
    """
    plan = folder if is_folder else folder / "plan.yaml"
    found = asked(plan, "--demand", folder / "demand.csv", "--json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    assert told["workers"][0]["worker"] == "2 prefill of 2 × h100-80g + 1 decode of 4 × a100-80g"
    assert told["workers"][0]["firm"] == [1, 2]
    assert told["cost_usd_per_h"] >= 30.0  # and starts
    assert any("were not simulated" in line for line in told["warnings"])


def test_with_its_question_a_plan_keeps_to_its_stock(folder: Path) -> None:
    """Three parts need 12 H100 of 10."""
    (folder / "demand.csv").write_text(DEMAND.replace("20", "30"))
    arguments = (folder, "--demand", folder / "demand.csv")
    assert asked(*arguments).exit_code == 0
    found = asked(*arguments, "--slo", folder / "slo.yaml")
    assert isinstance(found.exception, InfeasibleError) and "h100-80g" in str(found.exception)


def test_a_plan_is_as_the_page_makes_schedule_yaml_of_it(folder: Path) -> None:
    market = read_planned(folder, CATALOG)
    assert market is not None
    assert schedule_document([(PLAN | {"rate_rps": 20.0}, None)], CATALOG)["gpus"]["h100-80g"] == {
        "on_demand": "3 usd/h"
    }
    assert market.worker_types[0].gpu_counts == {"h100-80g": 4, "a100-80g": 4}
    assert {offer.gpu: offer.on_demand_usd_per_h for offer in market.offers} == {"a100-80g": 2, "h100-80g": 3}


def test_the_plans_own_traffic_takes_the_plans_own_fleet() -> None:
    """10 requests/s in three parts are 3.3333 each to four digits, of which the schedule would need four."""
    pools = [{"name": "mixed", "role": "mixed", "count": 3, "tp": 4, "gpu": "h100-80g"}]
    plan = PLAN | {"workers": pools, "gpus": 12, "cost_usd_per_h": 36.0, "rate_rps": 10.0}
    market = parse_market(schedule_document([(plan, None)], CATALOG))
    found = schedule(market, Demand((LLM,), np.array([[10.0, 20.0]]), 3600.0), gap_frac=0.0)
    assert found.workers.tolist() == [[3, 6]]


def test_every_rank_of_a_worker_is_a_gpu() -> None:
    """Two workers of 1 x 8 ranks are 16 GPUs for 10 requests/s; they were scheduled, and paid, as two."""
    pools = [{"name": "mixed", "role": "mixed", "count": 2, "tp": 1, "dp": 8, "gpu": "h100-80g"}]
    plan = PLAN | {"workers": pools, "gpus": 16, "cost_usd_per_h": 48.0, "rate_rps": 10.0}
    market = parse_market(schedule_document([(plan, None)], CATALOG))
    assert market.worker_types[0].gpu_counts == {"h100-80g": 8}


def test_owned_workers_cost_their_electricity_and_others_their_rent() -> None:
    """Three owned workers and one rented of the same type: each of the four is a part of the fleet. 0.7 kW at
    0.1 USD/kWh are 0.07 USD/h; the mean of owned and rented was the price of any number.
    """
    worker = {"role": "mixed", "tp": 1, "max_num_seqs": 256}
    pools = [
        {"name": "own", "count": 3, "gpu": "h100-80g@owned", **worker},
        {"name": "rent", "count": 1, "gpu": "h100-80g", **worker},
    ]
    paid = {"prices": {"h100-80g": "3 usd/h"}, "electricity": {"h100-80g@owned": "0.1 usd/kWh"}}
    plan = PLAN | paid | {"workers": pools, "gpus": 4, "cost_usd_per_h": 3.21, "rate_rps": 8.0}
    market = parse_market(schedule_document([(plan, None)], CATALOG))
    (offer,) = market.offers
    assert (offer.on_demand_usd_per_h, offer.reserved_usd_per_h, offer.most_reserved) == (3.0, 0.07, 3)
    assert market.worker_types[0].rate_rps == 2.0


def test_rented_gpus_of_several_kinds_cost_their_electricity_too() -> None:
    """0.1 USD/kWh for all GPUs: 3 USD/h and 0.7 kW are 3.07, 2 USD/h and 0.4 kW are 2.04."""
    pools = [
        {"name": "pre", "role": "prefill", "tp": 1, "count": 1, "gpu": "h100-80g"},
        {"name": "dec", "role": "decode", "tp": 1, "count": 1, "gpu": "a100-80g"},
    ]
    each = {"h100-80g": "0.1 usd/kWh", "a100-80g": "0.1 usd/kWh"}
    paid = {"prices": {"h100-80g": "3 usd/h", "a100-80g": "2 usd/h"}, "electricity": each}
    plan = PLAN | paid | {"workers": pools, "gpus": 2, "cost_usd_per_h": 5.11, "rate_rps": 1.0}
    market = parse_market(schedule_document([(plan, None)], CATALOG))
    prices = {offer.gpu: offer.on_demand_usd_per_h for offer in market.offers}
    assert prices == {"h100-80g": pytest.approx(3.07), "a100-80g": pytest.approx(2.04)}


def test_a_plan_carries_the_rate_that_was_asked_for(folder: Path) -> None:
    """20 requests/s were asked for, and 19.6 drawn: 20 take the plan's fleet, not one part more."""
    traffic = {"rate_rps": 19.6, "requested_rps": 20.0}
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN | {"traffic": traffic}))
    market = read_planned(folder, CATALOG)
    assert market is not None and market.worker_types[0].rate_rps == 10.0


@pytest.mark.parametrize(
    ("rate_rps", "of_one"),
    [(24.9999333342, "12.5 req/s"), (10.00002, "5.00001 req/s"), (0.0246913578, "0.0123457 req/s")],
)
def test_a_rate_has_six_digits_and_the_workers_carry_the_plan(rate_rps: float, of_one: str) -> None:
    """Each of two workers carries half the plan's rate, to six digits and not less."""
    (row,) = schedule_document([(PLAN | {"rate_rps": rate_rps}, None)], CATALOG)["capacity"]
    assert row["rate"] == of_one


def test_a_question_of_another_llm_and_a_broken_plan_are_one_line(folder: Path) -> None:
    (folder / "slo.yaml").write_text(SLO.replace(LLM, "qwen3-32b"))
    found = asked(folder, "--demand", folder / "demand.csv", "--slo", folder / "slo.yaml")
    assert isinstance(found.exception, InputError) and f"is a plan of {LLM}" in str(found.exception)
    (folder / "plan.yaml").write_text(yaml.safe_dump(PLAN | {"workers": [{"count": 2}]}))
    with pytest.raises(InputError, match=r"plan\.yaml: is no plan as"):
        read_planned(folder, CATALOG)
