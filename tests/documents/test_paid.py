"""`fleet: electricity`, and commitments under `fleet: prices`: what is read, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import CATALOG, mixed

from planner.documents.catalog import Catalog
from planner.documents.fleet_file import fleet_document, parse_fleet
from planner.documents.offers import ProviderOffer
from planner.documents.task import PlanQuestion, parse_task
from planner.errors import InputError

PAID = {"price": "0.12 usd/kWh", "pue": 1.3}


def task(catalog: Catalog = CATALOG, **fleet: Any) -> PlanQuestion:
    document = {"llm": "llama-3.1-70b", "slo": {"ttft": {"p90": "2 s"}}, "fleet": fleet}
    return parse_task(document, catalog)


def energy(read: PlanQuestion) -> dict[str, float]:
    return {gpu.name: gpu.electricity_usd_per_h for gpu in read.priced_gpus(CATALOG)}


def test_an_owned_gpu_costs_its_electricity_at_its_limit() -> None:
    """700 W x 1.3 x 0.12 USD/kWh = 0.1092 USD/h; of 350 W half; what is rented has it in its price."""
    read = task(gpus={"h100": 64}, owned={"h100": 8}, electricity=PAID)
    assert energy(read) == pytest.approx({"h100-80g@owned": 0.1092, "h100-80g": 0.0})
    capped = task(gpus={}, owned={"h100-80g@350W": 8}, electricity=PAID)
    assert energy(capped) == pytest.approx({"h100-80g@350W@owned": 0.0546})


def test_of_all_it_is_added_to_every_price() -> None:
    """120 USD/MWh are 0.12 USD/kWh; A100 of 400 W: 0.0624 USD/h, on the spot market too."""
    spot = {"on_demand": 2.0, "spot": 1.0, "spot_interruptions_per_h": 0.1}
    paid = {"price": "120 usd/MWh", "pue": 1.3, "of": "all"}
    read = task(gpus={"a100": 64}, prices={"a100": spot}, electricity=paid)
    prices = {gpu.name: gpu.usd_per_h for gpu in read.priced_gpus(CATALOG)}
    assert prices == pytest.approx({"a100-80g": 2.0624, "a100-80g@spot": 1.0624})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"price": 0.12, "pue": 1.3}, "0.12 has no unit; write 0.12 usd/kWh"),
        ({"price": "0 usd/kWh", "pue": 1.3}, "electricity: price"),
        ({"price": "0.12 usd/kWh"}, "pue"),
        ({"price": "0.12 usd/kWh", "pue": 0.9}, "1 .the GPUs alone. to 10"),
        ({"price": "0.12 usd/kWh", "pue": 1.3, "of": "rented"}, "owned, all"),
        ({"price": "0.12 usd/kWh", "pue": 1.3, "kwh": 1}, "kwh"),
        (PAID, "fleet: owned names none; name them, or add of: all"),
    ],
)
def test_what_is_not_said_clearly_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        task(gpus={"h100": 64}, electricity=asked)


def test_a_fleet_file_says_how_its_gpus_are_paid() -> None:
    """Written and read again: the price, whole nodes, electricity; without them the catalog's."""
    fleet = mixed().with_types(
        lambda w: replace(w, gpu=replace(w.gpu, is_sold_whole=False, energy_usd_per_kwh=0.1560001))
    )
    written = fleet_document(fleet)
    assert parse_fleet(written, Path("fleet.yaml"), CATALOG).price_usd_per_h == fleet.price_usd_per_h
    assert not parse_fleet(written, Path("fleet.yaml"), CATALOG).pools[0].type.gpu.is_sold_whole
    plain = {key: each for key, each in written.items() if key not in ("sold_as", "electricity")}
    gpu = parse_fleet(plain, Path("fleet.yaml"), CATALOG).pools[0].type.gpu
    assert gpu.is_sold_whole and gpu.electricity_usd_per_h == 0
    for key, value, said in (("sold_as", "rack", "gpu, node"), ("electricity", 0.1, "has no unit")):
        with pytest.raises(InputError, match=said):
            parse_fleet(written | {key: {"h100-80g": value}}, Path("fleet.yaml"), CATALOG)


def test_own_commitments_stand_beside_the_price_that_is_planned_with() -> None:
    own = {"on_demand": "3 usd/h", "reserved_1y": "2 usd/h", "reserved_3y": "1.5 usd/h"}
    read = task(gpus={"h100": 64, "a100": 8}, prices={"h100": own})
    assert {term: each.usd_per_h for term, each in read.offers_by_term["h100-80g"].items()} == {
        "on-demand": 3.0,
        "reserved-1y": 2.0,
        "reserved-3y": 1.5,
    }
    assert read.prices_usd_per_h == {"h100-80g": 3.0} and set(read.offers_by_term) == {"h100-80g"}
    listed = task(gpus={"h100": 64}, prices={"h100": {"reserved_3y": "1.5 usd/h"}})
    assert not listed.prices_usd_per_h
    assert (
        listed.offers_by_term["h100-80g"]["on-demand"].usd_per_h == CATALOG.gpus["h100-80g"].price_usd_per_h
    )
    with pytest.raises(InputError, match="reserved_1y"):
        task(gpus={"h100": 64}, prices={"h100": {"reserved_1y": "-2 usd/h"}})


def test_offers_of_a_catalog_are_the_cheapest_or_those_of_the_provider_asked_for() -> None:
    offers = tuple(
        ProviderOffer(provider, term, usd_per_h, "2026-01", "")  # type: ignore[arg-type]
        for provider, term, usd_per_h in (
            ("a", "on-demand", 3.0),
            ("a", "reserved-1y", 2.5),
            ("b", "reserved-1y", 2.0),
            ("b", "spot", 1.0),
        )
    )
    row = replace(CATALOG.provenance["h100-80g"], offers=offers)
    catalog = replace(CATALOG, provenance={**CATALOG.provenance, "h100-80g": row})
    any_of = task(catalog, gpus={"h100": 64}).offers_by_term["h100-80g"]
    assert (any_of["reserved-1y"].provider, any_of["on-demand"].provider) == ("b", "list")
    of_a = task(catalog, gpus={"h100": 64}, price_of={"provider": "a"}).offers_by_term["h100-80g"]
    assert {term: each.usd_per_h for term, each in of_a.items()} == {"on-demand": 3.0, "reserved-1y": 2.5}
    assert not task(catalog, gpus={"h100": 64}, prices={"h100": 2.2}).offers_by_term


def test_googles_commitments_are_used_when_google_is_asked_for() -> None:
    """8 H100 of an a3-highgpu-8g cost 61.3837 and 38.8644 USD/h: more than the row costs on demand."""
    assert not task(gpus={"h100": 64}).offers_by_term
    read = task(gpus={"h100": 64}, price_of={"provider": "gcp"})
    found = {term: 8 * each.usd_per_h for term, each in read.offers_by_term["h100-80g"].items()}
    assert found == pytest.approx({"on-demand": 88.49, "reserved-1y": 61.3837, "reserved-3y": 38.8644}, 1e-4)
    bound = task(gpus={"h100": 64}, price_of={"provider": "gcp", "term": "reserved-3y"})
    assert [gpu.price_usd_per_h for gpu in bound.priced_gpus(CATALOG)] == [4.858]


def test_electricity_of_capped_gpus_is_read_back(tmp_path: Path) -> None:
    """Of GPUs that differ by their cap alone one pays electricity and the other none."""
    electricity = {"h100-80g": "0.1 usd/kWh", "h100-80g@350W": "0 usd/kWh"}
    workers = [{"gpu": "h100-80g", "name": "full"}, {"gpu": "h100-80g@350W", "name": "capped"}]
    document = {"llm": "llama-3.1-8b", "workers": workers, "electricity": electricity}
    fleet = parse_fleet(document, tmp_path / "fleet.yaml", CATALOG)
    assert parse_fleet(fleet_document(fleet), tmp_path / "plan.yaml", CATALOG) == fleet
    both = parse_fleet(document | {"electricity": {"h100": "0.1 usd/kWh"}}, tmp_path / "fleet.yaml", CATALOG)
    assert [pool.type.gpu.energy_usd_per_kwh for pool in both.pools] == [0.1, 0.1]


def test_a_provider_that_is_no_text_is_refused() -> None:
    """`provider: yes` ended in an AttributeError."""
    with pytest.raises(InputError, match="price_of: provider: expected text, found True"):
        task(gpus={"h100": 8}, price_of={"provider": True})
