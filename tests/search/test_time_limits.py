"""A search that runs out of time, wherever it is: the clock of these tests goes on by one at every look."""

from __future__ import annotations

import math
import time
from itertools import count

import pytest
from plans import CATALOG
from questions import question, traffic

from planner.documents.facts import LeftOut, NotSimulated, WorstHour
from planner.errors import InfeasibleError
from planner.search.evidence import certify, findings
from planner.search.evidence.plan import Plan
from planner.search.problem.plan_problem import Conditions

TRACE = traffic(requests=60)
ASKED = {
    "production": question(fleet={"gpus": ["h100-80g", "a100-80g"]}, safety={"kept_in": 0.8}),
    "on paper": question(fleet={"gpus": ["h100-80g", "a100-80g"]}),
}
FEW = (0.02, 0.6)  # of the looks that the whole plan takes
MANY = (0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def plan_within(name: str, looks: float) -> Plan:
    """The plan where the clock may be looked at so often."""
    conditions = Conditions(adds_robustness=True)
    return certify.plan(ASKED[name], TRACE, CATALOG, time_limit_s=looks, conditions=conditions)


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("production", FEW),
        pytest.param("production", MANY, marks=pytest.mark.slow),
        pytest.param("on paper", MANY, marks=pytest.mark.slow),
    ],
)
def test_wherever_the_time_ends_there_is_a_plan_or_one_line(
    name: str, shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    whole = plan_within(name, 1e9)
    looks = next(ticks)
    found: list[Plan] = []
    for share in shares:
        try:
            plan = plan_within(name, share * looks)
        except InfeasibleError as error:
            assert not error.is_proved and "the time limit came first" in str(error)
            assert not found  # what has found a fleet finds it with more time too
            continue
        found.append(plan)
        robustness = plan.certificate.robustness
        assert plan.verdict.holds and robustness is not None
        if plan.fleet != whole.fleet:
            assert plan.status == "best found"
        if plan.status == "best found":
            assert robustness.left_out
    assert found and any(plan.status == "best found" for plan in found)


def test_worst_hour_left_without_a_price_is_in_the_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time ends right before the hours are priced, as the last evidence of all."""
    allows = findings.EvidenceClock.allows

    def ends_before_hours(clock: findings.EvidenceClock, what: LeftOut) -> bool:
        clock.deadline = -math.inf if what == "hours" else math.inf
        return allows(clock, what)

    monkeypatch.setattr(findings.EvidenceClock, "allows", ends_before_hours)
    monkeypatch.setattr(findings, "list_warnings", lambda *_: (WorstHour(()),))
    warnings = certify.plan(ASKED["on paper"], TRACE, CATALOG).warnings
    assert NotSimulated(("hours",)) in warnings


def test_prefixes_have_only_the_time_that_placing_workers_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placing the workers on nodes takes all of the time, so there is none to place prefixes."""
    left_s = 100.0

    def place_until_the_end(*_: object) -> None:
        nonlocal left_s
        left_s = 0.0

    monkeypatch.setattr(findings, "place_workers", place_until_the_end)
    monkeypatch.setattr(certify, "wall_deadline_s", lambda _: time.monotonic() + left_s)
    monkeypatch.setattr(certify, "pool_prefixes", lambda *_, **__: pytest.fail("no time is left"))
    assert certify.plan(ASKED["on paper"], TRACE, CATALOG).prefixes == ()
