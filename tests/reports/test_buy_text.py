"""What a plan tells to buy, in one sentence."""

from __future__ import annotations

import pytest
from plans import LLM, a_pool

from planner.fleet import Fleet, Pool
from planner.reports.screen import bought_text, buy_text
from planner.search.problem.bill import bill_fleet

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
