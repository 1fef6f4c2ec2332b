"""Several prices of one GPU: by provider and term, where they come from, and how old they are."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import CATALOG

from planner.documents.catalog import read_catalog
from planner.documents.facts import OldPrices, Price
from planner.documents.offers import OLD_DAYS, age_days, first_day, offer_of, parse_offers
from planner.documents.task import PlanQuestion, Spot, parse_task
from planner.errors import CatalogError, InputError
from planner.reports.fact_sentences import fact_sentence
from planner.search.evidence.findings import list_prices, old_price_warnings

OFFERS = """
h100:
  - {provider: acme, term: on-demand, price: 3.00 usd/h, date: 2026-11, source: a list}
  - {provider: acme, term: reserved-1y, price: 2.00 usd/h, date: 2026-11-20, source: a contract}
  - {provider: acme, term: spot, price: 1.00 usd/h, date: 2026-11, source: a list}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prices.yaml").write_text(OFFERS)
    return tmp_path


def asked(catalog: Any = CATALOG, **fleet: Any) -> PlanQuestion:
    return parse_task(
        {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "2 s"}}, "fleet": fleet}, catalog, where="slo.yaml"
    )


def test_a_provider_and_a_term_price_the_gpus_in_stock(folder: Path) -> None:
    """On demand 3.00, reserved 2.00, for the capped row as for its base; reserved GPUs are said to be."""
    mine = read_catalog(folder)
    task = asked(mine, gpus=["h100", "h100@350W"], price_of={"provider": "Acme"})
    assert [gpu.price_usd_per_h for gpu in task.priced_gpus(mine)] == [3.0, 3.0] and not task.reserved
    task = asked(mine, gpus=["h100"], price_of={"provider": "acme", "term": "reserved-1y"})
    assert [gpu.price_usd_per_h for gpu in task.priced_gpus(mine)] == [2.0] and task.reserved == {"h100-80g"}
    (price,) = list_prices(task, mine, task.priced_gpus(mine))
    assert price == Price("h100-80g", 2.0, "acme, reserved-1y: a contract", "2026-11-20")


def test_a_cap_without_a_row_has_the_listed_price_of_its_gpu() -> None:
    """It had no source and no date: the screen said "given", and nobody was warned that it is old."""
    task = asked(gpus=["h100", "h100@400W"])
    uncapped, capped = list_prices(task, CATALOG, task.priced_gpus(CATALOG))
    assert capped == replace(uncapped, gpu="h100-80g@400W") and capped.date


def test_a_price_of_ones_own_comes_before_the_providers(folder: Path) -> None:
    mine = read_catalog(folder)
    task = asked(mine, gpus=["h100"], price_of={"provider": "acme"}, prices={"h100": "9 usd/h"})
    assert [gpu.price_usd_per_h for gpu in task.priced_gpus(mine)] == [9.0]
    (price,) = list_prices(task, mine, task.priced_gpus(mine))
    assert (price.source, price.date) == ("slo.yaml", "")


def test_spot_workers_at_the_providers_spot_price(folder: Path) -> None:
    """They are offered only where somebody says how often they are interrupted."""
    mine = read_catalog(folder)
    assert not asked(mine, gpus=["h100"], price_of={"provider": "acme"}).spot
    terms = {"provider": "acme", "spot_interruptions_per_h": 0.05, "spot_restart": "5 min"}
    assert asked(mine, gpus=["h100"], price_of=terms).spot == {"h100-80g": Spot(1.0, 0.05, 300.0)}
    with pytest.raises(InputError, match=r"spot_interruptions_per_h: coreweave has no spot price"):
        asked(gpus=["h100"], price_of={**terms, "provider": "coreweave"})


def test_gpus_that_a_provider_does_not_rent_are_left_out_or_refused() -> None:
    """Of all GPUs they are left out and named; a GPU that was asked for by name is refused in one line."""
    task = asked(price_of={"provider": "verda"})
    assert "gb200-186g" in task.gpus_not_offered and "gb200-186g" not in task.stock
    assert {"h100-80g", "b300-288g"} <= set(task.stock)
    assert task.prices_usd_per_h["b300-288g"] == 6.99
    message = (
        r"slo.yaml: fleet: price_of: catalogs/gpus.yaml has no price of verda on-demand for gb200-186g, "
        "but of coreweave"
    )
    with pytest.raises(InputError, match=message):
        asked(gpus=["h100", "gb200"], price_of={"provider": "verda"})
    assert (
        "gb200-186g"
        not in asked(gpus={"h100": 8, "gb200": 0}, price_of={"provider": "verda"}).gpus_not_offered
    )
    with pytest.raises(InputError, match="no price of nobody on-demand for"):
        asked(price_of={"provider": "nobody"})
    with pytest.raises(InputError, match=r"price_of: term: .*on-demand, reserved-1y, reserved-3y"):
        asked(price_of={"provider": "verda", "term": "monthly"})


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"provider": "a"}, "expected a list of provider, term, price, date and source"),
        (
            [{"provider": "a", "price": "1 usd/h", "date": "soon", "source": "s"}],
            r"\[0\]: date: expected a date",
        ),
        (
            [{"provider": "a", "price": "1 usd/h", "date": "2026-13", "source": "s"}],
            "expected a date such as",
        ),
        (
            [{"provider": "a", "term": "weekly", "price": "1 usd/h"}],
            "on-demand, reserved-1y, reserved-3y, spot",
        ),
        ([{"provider": "a", "price": "cheap", "date": "2026", "source": "s"}], r"\[0\]: price"),
        (
            [{"provider": "a", "price": "1 usd/h", "date": "2026", "source": "s"}] * 2,
            "a on-demand is given twice",
        ),
        ([{"provider": "a", "price": "1 usd/h", "sauce": "s"}], "sauce"),
    ],
)
def test_a_bad_list_of_prices_is_one_line(written: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_offers(written, "prices.yaml: h100")
    assert str(caught.value).startswith("prices.yaml: h100") and "\n" not in str(caught.value)


def test_prices_of_a_gpu_that_is_no_row_are_refused(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(OFFERS.replace("h100", "h1000"))
    with pytest.raises(CatalogError, match=r"prices.yaml: GPU 'h1000' is not in catalogs/gpus.yaml; nearest"):
        read_catalog(tmp_path)


def test_the_cards_most_rented_have_two_providers_or_more() -> None:
    for name in ("a100-80g", "h100-80g", "h200-141g", "b200-180g", "l40s-48g", "rtx-pro-6000", "mi300x-192g"):
        offers = CATALOG.provenance[name].offers
        assert len({offer.provider for offer in offers}) >= 2, name
        assert all(first_day(offer.date) for offer in offers)
    assert offer_of(CATALOG.provenance["h100-80g@350W"].offers, "verda", "spot") is not None


def test_a_date_is_the_earliest_day_that_it_may_mean() -> None:
    """2025-07 is 1 July: 31 + 31 + 30 + 31 + 20 days before 21 November, and a year of 365."""
    today = datetime.date(2026, 11, 21)
    assert age_days("2025-07", today) == 31 + 31 + 30 + 31 + 20 + 365
    assert (age_days("2026", today), age_days("2026-11-20", today), age_days("long ago", today)) == (
        324,
        1,
        None,
    )


def test_old_prices_are_warned_of_and_prices_of_ones_own_are_not() -> None:
    """On 21 November 2026 the limit of 180 days is 25 May."""
    today = datetime.date(2026, 11, 21)
    listed = [
        Price("old", 1.0, "a list", "2025-07"),
        Price("limit", 1.0, "a list", "2026-05-25"),
        Price("over", 1.0, "a list", "2026-05-24"),
        Price("mine", 1.0, "slo.yaml", ""),
    ]
    (warning,) = old_price_warnings(listed, today)
    assert warning == OldPrices(("old", "over"), "2025-07", 508, OLD_DAYS)
    assert "prices of old, over were listed more than 180 days ago, the oldest 2025-07" in fact_sentence(
        warning
    )
    assert old_price_warnings(listed[1:2] + listed[3:], today) == ()
