"""What a plan tells to buy, in one sentence."""

from __future__ import annotations

import pytest
from plans import LLM, a_pool

from planner.fleet import Fleet, Pool
from planner.reports.fact_sentences import relative_cost_text
from planner.reports.rows import _margin_text
from planner.reports.screen import against_text, bought_text, buy_text
from planner.search.problem.bill import bill_fleet
from planner.units import show_digits, show_w

OWNED = a_pool("own", "mixed", "l40s-48g@owned", 4, 2)
RENTED = a_pool("rent", "mixed", "l40s-48g", 1, 3)


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ((OWNED, RENTED), "Use 8 × l40s-48g that you own and buy 3 × l40s-48g: 2.58 USD/h"),
        ((OWNED,), "Use 8 × l40s-48g that you own: 0.00 USD/h"),
        ((RENTED,), "Buy 3 × l40s-48g: 2.58 USD/h"),
    ],
)
def test_owned_gpus_are_used_and_others_bought(pools: tuple[Pool, ...], said: str) -> None:
    """It said "Buy 8 × l40s-48g that you own and 3 × l40s-48g". An L40S is 0.86 USD/h."""
    fleet = Fleet(LLM, pools)
    assert buy_text(fleet, bill_fleet(fleet)).startswith(said)


def test_of_several_llms_owned_gpus_are_named_last() -> None:
    fleet = Fleet(LLM, (OWNED, RENTED))
    assert bought_text(fleet, bill_fleet(fleet)) == "3 × l40s-48g and 8 × l40s-48g that you own"


def test_small_differences_are_not_zero_percent() -> None:
    """They read "0.08 USD/h more (+0 %)", "+0.0 %", and a missed limit "0 % over"."""
    assert against_text(24.0, 23.92) == "0.08 USD/h more"
    assert against_text(23.92, 47.84) == "23.92 USD/h less (-50 %)"
    assert relative_cost_text(1000.3, 1000) == "more by under 0.1 %"
    assert relative_cost_text(1012, 1000) == "+1.2 %"
    assert _margin_text(2.006, 2.0) == "less than 1\u00a0% over"
    assert _margin_text(1.5, 2.0) == "25\u00a0% below"


def test_large_and_small_figures_are_written_out() -> None:
    """Few tokens on a node read "6.64e+03 USD per million tokens", and an L4 "0.0 kW expected"."""
    assert [show_digits(value, 3) for value in (0.0427, 12.34, 999.6, 6644.4)] == [
        "0.0427",
        "12.3",
        "1,000",
        "6,644",
    ]
    assert [show_w(watts) for watts in (31.2, 999.7, 12_345)] == ["31 W", "1.0 kW", "12.3 kW"]
