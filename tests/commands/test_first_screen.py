"""What the first screen says beside the figures of a plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from planner.commands import first_screen
from planner.commands.first_screen import has_busy_hours
from planner.documents.facts import SpotSpare
from planner.reports.screen import Card, losses_text
from planner.search.evidence.plan import Plan
from planner.traffic.trace import Trace


def hours(*requests: int) -> Trace:
    """A trace with so many requests in each hour, the last of which ends it."""
    arrival_s = np.concatenate([3600.0 * h + np.linspace(0, 3599, n) for h, n in enumerate(requests)])
    ones = np.ones(len(arrival_s), np.int64)
    return Trace(
        "hours", np.append(arrival_s, 3600.0 * len(requests)), np.append(ones, 1), np.append(ones, 1)
    )


def test_a_day_is_proposed_where_some_hours_are_busier() -> None:
    assert has_busy_hours(hours(10, 30, 20, 10))
    assert not has_busy_hours(hours(10, 12, 11, 10))
    assert not has_busy_hours(hours(10, 30))  # Two hours say little of a day.


def test_an_answer_names_its_fleet_or_why_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """What the verdict has is not said again; workers of the plan's fleet stand there once, in its card."""
    card = Card("On paper", "9 USD/h", "3 workers", is_plan=False, difference="1 USD/h less")
    plans = replace(card, name="Production", fleet="4 workers", is_plan=True, has_plans_fleet=True)
    missing = Card("Production", "none", "no fleet was found", is_plan=True)
    first_screen._print_parts("Buy 4 workers.", [[card, plans], [missing]], [], [])
    printed = " ".join(capsys.readouterr().out.split())
    assert "On paper 9 USD/h; 1 USD/h less; 3 workers" in printed
    assert printed.count("4 workers") == 1 and "Production no fleet was found" in printed
    same = replace(plans, name="On paper", is_plan=False)
    first_screen._print_parts("Buy 1 node of 8 × h100-80g.", [[same, plans]], [], [])
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("4 workers") == 1 and "Production 9 USD/h; 1 USD/h less; 4 workers" in printed


def test_why_there_is_no_answer_with_a_loss_stands_beside_the_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A blank line stood between the answers and it, and none after it."""
    card = Card("Production", "9 USD/h", "3 workers", is_plan=True)
    first_screen._print_parts("Buy.", [[card]], [("LLM", "x")], [], losses="stands losses already")
    labels = [line[: first_screen.LABEL].strip() for line in capsys.readouterr().out.splitlines()]
    assert labels == ["Buy.", "", "Production", "With a loss", "", "LLM"]


def test_a_terminal_may_be_narrower_than_a_label(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """15 columns: ValueError, after the whole search."""
    monkeypatch.setenv("COLUMNS", "15")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    first_screen._print_parts("Buy.", [], [("LLM", "llama-3.1-70b")], [])
    assert "llama-3.1-70b" in capsys.readouterr().out


def test_a_plan_with_spot_says_why_no_answer_with_a_loss_is_there() -> None:
    spot = SpotSpare("mixed", 4, 1, 0.001, 0.1, 300.0)

    def losses_of(*answers: str, binding: tuple[SpotSpare, ...] = (spot,), gpu: str = "h100-80g@spot") -> str:
        named = [SimpleNamespace(name=name) for name in answers]
        certificate = SimpleNamespace(binding=binding, answers=named)
        plan = SimpleNamespace(certificate=certificate, prices=[SimpleNamespace(gpu=gpu)])
        return losses_text(cast(Plan, plan))

    said = losses_of("on-paper", "production")
    assert "of 4 spot workers 1 may be down" in said and "production stands losses" in said
    assert not losses_of("on-paper", "production", "with-a-loss")
    assert not losses_of(), "on paper alone there are no answers"
    # With a spot price but no spot worker in the fleet the screen had no word of a loss.
    assert "spare: 1 worker plans" in losses_of("on-paper", "production", binding=())
    assert not losses_of("on-paper", "production", binding=(), gpu="h100-80g")
