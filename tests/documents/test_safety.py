"""`safety:` in slo.yaml."""

from __future__ import annotations

from typing import Any

import pytest
from plans import CATALOG

from planner.documents.safety import Safety, strictest_safety
from planner.documents.task import parse_task
from planner.errors import InputError

QUESTION: dict[str, Any] = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "1 s"}}}


def test_production_is_the_default() -> None:
    assert parse_task(QUESTION, CATALOG).safety == Safety(0.9, 0.0)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("none", None),
        ({}, Safety()),
        ({"kept_in": 0.95}, Safety(0.95)),
        ({"kept_in": "80 %", "growth": "10 %"}, Safety(0.8, 0.1)),
        ({"prefix_drift": "30 %"}, Safety(0.9, 0.0, 0.3)),
    ],
)
def test_what_is_said_is_meant(said: Any, meant: Safety | None) -> None:
    assert parse_task(QUESTION | {"safety": said}, CATALOG).safety == meant


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("all", "'all'"),
        ({"kept_in": 1.0}, "kept_in"),
        ({"kept_in": 0.2}, "0.2"),
        ({"growth": -0.1}, "growth"),
        ({"growth": 10}, "growth.*write '10 %', found 10"),  # as kept_in: 90
        ({"kept_in": 90}, "kept_in.*write '90 %', found 90"),
        ({"keep_in": 0.9}, "keep_in"),
        ({"prefix_drift": "130 %"}, "prefix_drift"),
        (0.9, "0.9"),
    ],
)
def test_what_cannot_be_meant_is_one_line(said: Any, found: str) -> None:
    with pytest.raises(InputError, match=found) as error:
        parse_task(QUESTION | {"safety": said}, CATALOG)
    assert "safety" in str(error.value) and "\n" not in str(error.value)


def test_a_share_of_scenarios_that_is_none_has_an_example_that_is_one() -> None:
    with pytest.raises(InputError, match=r"such as 0\.9"):
        parse_task(QUESTION | {"safety": {"kept_in": "200 %"}}, CATALOG)


def test_robust_is_another_way_to_say_it() -> None:
    robust = {"robust": {"spread": True}}
    assert parse_task(QUESTION | robust, CATALOG).safety is None
    with pytest.raises(InputError, match="robust"):
        parse_task(QUESTION | robust | {"safety": {"kept_in": 0.9}}, CATALOG)


def test_the_most_traffic_is_looked_for_in_production_too() -> None:
    asked = QUESTION | {"objective": "throughput", "limits": {"gpus": 8}}
    assert parse_task(asked, CATALOG).safety == Safety()
    assert parse_task(asked | {"safety": "none"}, CATALOG).safety is None


@pytest.mark.parametrize(
    ("kept_frac", "written"),
    [(0.3125, "none"), (0.499, "none"), (0.57, "{kept_in: 0.57}"), (0.875, "{kept_in: 0.87}")],
)
def test_a_share_that_is_kept_can_be_asked_for(kept_frac: float, written: str) -> None:
    """`kept_in` below a half is refused, so it is never offered: 10 of 32 scenarios is 0.31."""
    assert strictest_safety(kept_frac) == f"safety: {written}"
