"""Facts and their words: each kind has a sentence, and comes out of the file as it went in."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from planner.documents import facts
from planner.documents.certificate import FACT_KINDS, dataclass_of, fact_document
from planner.domain import COST, GPUS, POWER, FleetLimit, Limit
from planner.policies import QUEUE, ROUTING
from planner.reports.fact_sentences import fact_sentence, moved_text
from planner.reports.output import plain_value
from planner.solvers.repeats import Interval
from planner.units import show_beside, show_digits, show_error, show_share

KNOWN: dict[Any, Any] = {
    float: 0.25,
    int: 3,
    str: "x",
    bool: True,
    Limit: Limit("ttft", 0.9, 2.0),
    FleetLimit: FleetLimit("stock", "h100-80g"),
    Interval: Interval(0.5, 0.1, 0.4, 0.6),
}


def example(hint: Any, pick: int = 0) -> Any:
    """A value of a field; of several possible ones that at `pick`."""
    if hint in KNOWN:
        return KNOWN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return inner[pick % len(inner)]
    if origin is tuple:
        return (example(inner[0], pick), example(inner[0], pick))
    if origin in (Mapping, dict):
        return {"ttft p90": example(inner[1], pick)}
    if origin is types.UnionType:
        return None if inner[pick % len(inner)] is type(None) else example(inner[pick % len(inner)], pick)
    return made(hint, pick)


NAMES: dict[type, dict[str, tuple[str, ...]]] = {
    facts.EngineSettings: {"queue": tuple(QUEUE), "routing": tuple(ROUTING)}
}


def made(kind: type, pick: int) -> Any:
    chosen = {name: each[pick % len(each)] for name, each in NAMES.get(kind, {}).items()}
    hints = get_type_hints(kind)
    values = {each.name: example(hints[each.name], pick) for each in dataclasses.fields(kind)}
    return kind(**(values | chosen))


@pytest.mark.parametrize("kind", FACT_KINDS)
def test_every_fact_has_words_and_is_read_as_it_was_written(kind: str) -> None:
    """Every name that a fact may have, and every field that may be missing."""
    for pick in range(20):
        fact = made(FACT_KINDS[kind], pick)
        said = fact_sentence(fact)
        assert said and said == said.strip() and not said.endswith(".") and "object at" not in said
        document = json.loads(json.dumps(plain_value(fact_document(fact)), allow_nan=False))
        assert document["kind"] == kind
        again = dataclass_of(FACT_KINDS[kind], document, kind)
        assert again == fact and fact_sentence(again) == said


def test_a_percentile_that_is_never_reached_is_null_in_the_file() -> None:
    at = facts.At(KNOWN[Limit], math.inf, 0.0)
    missed = facts.Neighbour("pool", "h100-80g tp1 2048", False, facts.Outcome((at,)))
    document = json.loads(json.dumps(plain_value(fact_document(missed)), allow_nan=False))
    assert document["outcome"]["missed"][0]["value_s"] is None
    assert dataclass_of(facts.Neighbour, document, "neighbour") == missed


def test_a_limit_on_the_fleet_has_one_name_and_a_unit() -> None:
    limits = (FleetLimit("stock", "h100-80g"), POWER, COST, GPUS)
    assert [(limit.name, limit.unit) for limit in limits] == [
        ("stock of h100-80g", "GPUs"),
        ("power", "W"),
        ("cost", "USD/h"),
        ("GPUs", "GPUs"),
    ]


def test_what_shortcuts_failed_in_tests_is_counted_in_words() -> None:
    tested = (facts.RuleTest(11, 511, most_requests=400), facts.RuleTest(0, 135, least_requests=400))
    said = fact_sentence(facts.Assumed("more-mixed", 1, 7, tested))
    assert said == (
        "assumed: one mixed pool: what holds with n workers holds with n + 1 (on this traffic false in 1 of "
        "7 comparisons; hid a cheaper fleet in 11 of 511 tests with up to 400 requests, 0 of 135 with more)"
    )
    said = fact_sentence(facts.Assumed("seats", 0, 0, (facts.RuleTest(0, 197, of_pools=True),)))
    assert said.endswith("(false of 0 of 197 pools in tests)")


def test_cheaper_fleets_of_which_none_was_simulated_are_not_said_to_miss() -> None:
    """Of 26,099 cheaper fleets 0 were simulated, "and each misses the SLO" stood there."""
    none = facts.CheaperMiss(0.01, 67, 6, 26_099, 0, False)
    assert "not simulated" in fact_sentence(none) and "misses" not in fact_sentence(none)
    some = facts.CheaperMiss(0.01, 67, 6, 26_099, 20, False)
    assert "20 of 26,099 were simulated, and each misses" in fact_sentence(some)


def test_digits_are_shown_without_an_exponent() -> None:
    """A mean prompt of 15,325 tokens read 1.532e+04."""
    shown = [show_digits(value, 4) for value in (15_325.4, 9_999.6, 9_999.4, 1_234.0, 0.01234567, 0.0)]
    assert shown == ["15,325", "10,000", "9,999", "1,234", "0.01235", "0"]
    assert show_digits(1250.0, 3) == "1,250" and show_digits(-99.96, 3) == "-100"


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.9, "90 %"), (0.89998, "89.99 %"), (0.999999, "99.99 %"), (0.57, "57 %"), (0.0123456, "1.234 %")],
)
def test_a_share_below_its_goal_does_not_read_as_the_goal(share: float, shown: str) -> None:
    """89.998 % of 90 % read "90 %"; 100 x 0.57 is 56.99999999999999."""
    assert show_share(share) == shown


def test_a_latency_beside_its_limit_has_the_digits_that_tell_them_apart() -> None:
    """2.0004 s of at most 2 s read "2.00 s" beside "2.00 s", with the verdict that it is missed."""
    assert show_beside(2.0004, 2.0) == ("2.0004 s", "2.0000 s")
    assert show_beside(131.0, 130.0) == ("2.18 min", "2.17 min")
    assert show_beside(0.5, 0.2) == ("500 ms", "200 ms") and show_beside(2.0, 2.0) == ("2.00 s", "2.00 s")
    assert show_beside(math.inf, 2.0) == ("never", "2.00 s") and show_beside(math.nan, 2.0)[0] == "-"
    missed = facts.At(Limit("ttft", 0.9, 2.0), 2.0004, 0.89998)
    said = fact_sentence(facts.Outcome((missed,)))
    assert said == "TTFT p90 is 2.0004 s, 89.99 % within 2.0000 s (90 % needed)"


@pytest.mark.parametrize(
    ("planned", "value", "unit", "said"),
    [
        (23.92, 26.91, "USD/h", "+2.99 USD/h (+12.5 %)"),
        (95_680.0, 119_600.0, "USD/h", "+23,920.00 USD/h (+25.0 %)"),  # it was +2.392e+04
        (2.0e6, 750_000.0, "W", "-1,250,000 W (-62.5 %)"),  # -1.25e+06
        (9.0, 8.0, "GPUs", "-1 GPU (-11.1 %)"),
        (1000.0, 1000.1, "USD/h", "+0.10 USD/h"),  # (+0.0 %)
        (10.0, 10.003, "USD/h", "more by under 0.01 USD/h"),
        (0.0, 2.5, "USD/h", "+2.50 USD/h"),
        (0.0, 0.0, "USD/h", "the same"),
        (1.0, None, "USD/h", "no fleet"),
    ],
)
def test_a_move_is_told_without_exponents_and_zeros(
    planned: float, value: float | None, unit: str, said: str
) -> None:
    assert moved_text(planned, value, unit) == said


def test_an_error_beside_what_is_allowed_reads_as_larger() -> None:
    """5.04 % read as "+5.0 %" beside "5 %"."""
    assert show_error(0.0504, 0.05) == "+5.04 %" and show_error(-0.10001, 0.1) == "-10.001 %"
    assert show_error(0.05, 0.05) == "+5.0 %" and show_error(0.0123, None) == "+1.2 %"
    assert show_error(-1e-9, None) == "+0.0 %" and show_error(float("nan"), 0.05) == "-"
