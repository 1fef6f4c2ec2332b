"""What a fleet.yaml leaves open is as the question beside it says; what it says itself counts."""

from typing import Any

import pytest

import fleetplan
from planner.api.inputs import read_fleet
from planner.api.results import PlanResult
from planner.errors import InputError
from planner.search.problem.bill import bill_fleet

QUESTION: dict[str, Any] = {
    "llm": "llama-3.1-8b",
    "slo": {"ttft": {"p90": "2 s"}},
    "traffic": {"rate": 2, "input": 500, "output": 50, "duration": "1 min"},
    "fleet": {
        "gpus": {"h100-80g": 8, "a100-80g": 8},
        "owned": {"a100-80g": 8},
        "prices": {"h100-80g": "2 usd/h"},
        "sold_as": {"h100-80g": "gpu"},
        "electricity": {"price": "0.1 usd/kWh", "pue": 1.5},
        "network": {"bandwidth": "7 GB/s"},
    },
    "engine": {"name": "vllm", "version": "0.15.1"},
    "lora": {"max_loras": 2, "max_rank": 16, "adapters": 3},
    "safety": "none",
}
FLEET: dict[str, Any] = {"llm": "llama-3.1-8b", "workers": [{"gpu": "h100-80g", "count": 3}]}


def test_prices_engine_lora_and_network_of_the_question_count() -> None:
    """3 H100 at 2 USD/h, sold singly: 6 USD/h, where the catalog's node of 8 at 2.99 costs 23.92."""
    fleet = read_fleet(FLEET, slo=QUESTION)
    assert bill_fleet(fleet).usd_per_h == pytest.approx(6)
    assert bill_fleet(read_fleet(FLEET)).usd_per_h == pytest.approx(8 * 2.99)
    assert fleet.engine is not None and fleet.engine.version == "0.15.1"
    assert fleet.lora is not None and fleet.lora.max_loras == 2
    assert fleet.network.bandwidth_bytes_per_s == 7e9


def test_owned_gpus_pay_the_electricity_of_the_question() -> None:
    """2 A100 of one's own, 0.4 kW each at 0.1 USD/kWh x 1.5: 0.12 USD/h."""
    owned = {**FLEET, "workers": [{"gpu": "a100-80g@owned", "count": 2}]}
    assert bill_fleet(read_fleet(owned, slo=QUESTION)).usd_per_h == pytest.approx(0.12)


def test_what_the_fleet_says_itself_counts() -> None:
    own = {**FLEET, "prices": {"h100": "3 usd/h"}, "engine": "none", "network": {"bandwidth": "9 GB/s"}}
    fleet = read_fleet(own, slo=QUESTION)
    assert bill_fleet(fleet).usd_per_h == pytest.approx(9)
    assert fleet.engine is None
    assert fleet.network.bandwidth_bytes_per_s == 9e9
    with pytest.raises(InputError, match="prices"):
        read_fleet({**FLEET, "prices": 3}, slo=QUESTION)


def test_limits_alone_and_other_batching_take_nothing() -> None:
    assert bill_fleet(read_fleet(FLEET, slo={"ttft": {"p90": "2 s"}})).usd_per_h == pytest.approx(23.92)
    batching = {**FLEET, "policies": {"batching": "sarathi"}}
    assert read_fleet(batching, slo={**QUESTION, "lora": None}).engine is None


def test_compare_and_simulate_bill_a_fleet_as_the_question_prices_it() -> None:
    """Python's compare gave 3 x 2.99 USD/h, in a node of 8, beside a question at 2 USD/h by the GPU."""
    table = fleetplan.compare({"mine": FLEET}, None, QUESTION).to_frame()
    assert table.cost_usd_per_h.tolist() == [pytest.approx(6)]
    assert fleetplan.simulate(FLEET, None, QUESTION).fleet.price_usd_per_h == pytest.approx(6)


def test_a_plan_keeps_what_it_was_planned_with() -> None:
    plan = fleetplan.plan(QUESTION)
    assert isinstance(plan, PlanResult)
    cheaper = {**QUESTION, "fleet": {**QUESTION["fleet"], "prices": {"h100-80g": "0.1 usd/h"}}}
    assert read_fleet(plan, slo=cheaper).price_usd_per_h == plan.fleet.price_usd_per_h


def test_host_overhead_of_the_question_reaches_every_step() -> None:
    """In place of the engine: without an engine a step takes what its kernels take, and 2 ms more."""
    question = {key: value for key, value in QUESTION.items() if key != "engine"}
    question["fleet"] = {**QUESTION["fleet"], "host_overhead": "2 ms"}
    fleet, bare = read_fleet(FLEET, slo=question), read_fleet({**FLEET, "engine": "none"}, slo=QUESTION)
    assert fleet.engine is None
    longer_s = fleet.pools[0].type.latency.h_s - bare.pools[0].type.latency.h_s
    assert longer_s == pytest.approx(2e-3)
    assert read_fleet({**FLEET, "engine": "none"}, slo=question).pools == bare.pools
    with pytest.raises(InputError, match="host_overhead: engine says what the host takes"):
        read_fleet({**FLEET, "engine": {"name": "vllm"}, "host_overhead": "2 ms"})


def test_a_capped_gpu_is_paid_as_without_its_cap() -> None:
    """A node of 8 capped H100 cost the catalog's 8 x 2.99 USD/h beside `prices: {h100-80g: 2 usd/h}`; on the
    spot market too, where no price of it is written.
    """
    for gpu in ("h100-80g@550W", "h100-80g@spot"):
        capped = {**FLEET, "workers": [{"gpu": gpu, "count": 3}]}
        own = {"prices": {"h100": "2 usd/h"}, "sold_as": {"h100": "gpu"}}
        assert bill_fleet(read_fleet(capped | own)).usd_per_h == pytest.approx(6)
        assert bill_fleet(read_fleet(capped, slo=QUESTION)).usd_per_h == pytest.approx(6)
    stocked = QUESTION["fleet"] | {"gpus": {"h100-80g": 8, "h100-80g@350W": 8, "a100-80g": 8}}
    fleet = FLEET | {"workers": [{"gpu": "h100-80g@350W"}], "prices": {"h100": "3 usd/h"}}
    read = read_fleet(fleet, slo=QUESTION | {"fleet": stocked})
    assert bill_fleet(read).usd_per_h == pytest.approx(3)
    owned = FLEET | {"workers": [{"gpu": "h100-80g@350W@owned"}], "prices": {"h100": "3 usd/h"}}
    assert bill_fleet(read_fleet(owned)).usd_per_h == 0


def test_a_price_by_a_name_and_by_an_alias_is_refused() -> None:
    """The last one counted."""
    with pytest.raises(InputError, match="prices: h100 is h100-80g, which is given twice"):
        read_fleet({**FLEET, "prices": {"h100-80g": "2 usd/h", "h100": "3 usd/h"}})


def test_a_queue_by_deadline_takes_the_times_of_the_classes() -> None:
    """`due` was asked for beside a slo.yaml that has the classes."""
    classes = {
        "chat": {"match": {"input_tokens": {"to": 400}}, "ttft": {"p90": "1 s"}},
        "batch": {"match": {"input_tokens": {"from": 401}}, "deadline": "10 min"},
    }
    by_deadline = {**FLEET, "policies": {"queue": "edf"}}
    due = read_fleet(by_deadline, slo={**QUESTION, "slo": {"classes": classes}}).policies.due
    assert [(selector.name, due_s) for selector, due_s in due] == [("chat", 1.0), ("batch", 600.0)]
    with pytest.raises(InputError, match="add due"):
        read_fleet(by_deadline, slo=QUESTION)
