"""A search that runs out of time, wherever it is: the clock of these tests goes on by one at every look."""

from __future__ import annotations

import time
from itertools import count

import pytest
from plans import CATALOG
from questions import question, traffic

from planner.errors import InfeasibleError
from planner.search.evidence import certify
from planner.search.evidence.plan import Plan
from planner.search.problem.plan_problem import Conditions

TRACE = traffic(requests=120)
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
