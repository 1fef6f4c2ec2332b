"""`fleet: owned` and `sold_as`: what is read, what is offered, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from planner.documents.catalog import read_catalog
from planner.documents.task import PlanQuestion, parse_task
from planner.errors import InputError, PlannerError

CATALOG = read_catalog()


def task(**fleet: Any) -> PlanQuestion:
    document = {"llm": "llama-3.1-70b", "slo": {"ttft": {"p90": "2 s"}}, "fleet": fleet}
    return parse_task(document, CATALOG)


def offered(read: PlanQuestion) -> dict[str, float]:
    return {gpu.name: gpu.price_usd_per_h for gpu in read.priced_gpus(CATALOG)}


def test_owned_gpus_are_offered_at_nothing_beside_those_for_rent() -> None:
    read = task(gpus={"h100": 32}, owned={"H100": 24}, prices={"h100": 2.0})
    assert offered(read) == {"h100-80g@owned": 0.0, "h100-80g": 2.0}
    assert read.stock_and_owned == {"h100-80g": 8, "h100-80g@owned": 24}


def test_what_gpus_does_not_name_is_not_rented() -> None:
    """All of the stock is owned, so nothing is left to rent, on the spot market neither."""
    spot = {"on_demand": 1.0, "spot": 0.5, "spot_interruptions_per_h": 0.1}
    read = task(gpus={"h100": 8}, owned={"a100": 16}, prices={"a100": spot})
    assert set(offered(read)) == {"h100-80g", "a100-80g@owned"}
    assert read.stock_and_owned == {"h100-80g": 8, "a100-80g@owned": 16}
    assert set(offered(task(gpus={}, owned={"a100": 16}))) == {"a100-80g@owned"}


def test_without_gpus_any_number_may_be_rented_beside() -> None:
    read = task(owned={"a100": 16})
    assert read.stock["a100-80g"] is None and {"a100-80g", "a100-80g@owned", "h100-80g"} <= set(offered(read))
    unchecked = task(owned={"mi300x": 8})
    assert unchecked.stock["mi300x-192g"] == 8 and "mi300x-192g" not in unchecked.unchecked_left_out


def test_an_owned_gpu_needs_no_price_of_a_provider() -> None:
    """Verda has no A100 of 40 GB; eight that are owned are no reason to refuse."""
    read = task(gpus={"h100": 8}, owned={"a100-40g": 8}, price_of={"provider": "verda"})
    assert offered(read) == {"a100-40g@owned": 0.0, "h100-80g": 2.29}


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        ({"gpus": ["h100-80g@spot"]}, r"gpus: .*name h100-80g, .*prices: \{h100-80g: \{spot: 1.2 usd/h"),
        ({"gpus": ["h100"], "prices": {"h100@spot": 1}}, r"prices: h100@spot: .*name h100, "),
        ({"gpus": ["h100"], "owned": {"h100@owned": 8}}, r"owned: h100@owned: .*owned: \{h100: 8"),
    ],
)
def test_a_market_is_no_part_of_a_name_in_slo_yaml(fleet: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        task(**fleet)


def test_a_power_limit_without_a_row_may_be_named() -> None:
    read = task(gpus={"a100@300W": 8}, owned={"a100@300W": 4}, prices={"a100": 2.0})
    assert offered(read) == {"a100-80g@300W@owned": 0.0, "a100-80g@300W": 2.0}


def test_whole_nodes_are_the_catalogs_unless_slo_yaml_says_otherwise() -> None:
    sold = {gpu.name: gpu.is_sold_whole for gpu in task(gpus=["h100", "l40s"]).priced_gpus(CATALOG)}
    assert sold == {"h100-80g": True, "l40s-48g": False}
    fleet = {"gpus": {"h100": 8, "h100@350W": 8, "l40s": None}, "sold_as": {"h100": "gpu", "l40s": "node"}}
    asked = {gpu.name: gpu.is_sold_whole for gpu in task(**fleet).priced_gpus(CATALOG)}
    assert asked == {"h100-80g": False, "h100-80g@350W": False, "l40s-48g": True}


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        ({"gpus": {"h100": 8}, "owned": {"h100": 16}}, "found 8, and 16 are owned"),
        ({"owned": {"h100": 8, "H100-80G": 8}}, "given twice"),
        ({"owned": {"h100": -1}}, "owned: h100"),
        ({"owned": {"h100": 2.5}}, "owned: h100"),
        ({"owned": {"h100": "many"}}, "owned: h100"),
        ({"owned": {"h100": 10**9}}, "at most"),
        ({"owned": {"h1000": 8}}, "not in catalogs"),
        ({"owned": 24}, "owned"),
        ({"gpus": {}, "owned": {}}, "gpus"),
        ({"gpus": {"h100": 0}, "owned": {"h100": 0}}, "stock of every GPU is 0"),
        ({"sold_as": {"h100": "rack"}}, "sold_as: h100"),
        ({"sold_as": {"h100": "node", "H100-80G": "gpu"}}, "given twice"),
    ],
)
def test_what_cannot_be_meant_is_one_line(fleet: dict[str, Any], message: str) -> None:
    with pytest.raises(PlannerError, match=message) as error:
        task(**fleet)
    assert isinstance(error.value, InputError) and "\n" not in str(error.value)
