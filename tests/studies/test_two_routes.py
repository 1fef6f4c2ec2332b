"""One question by two routes has one answer: what-if, pareto, replan, schedule and the first screen against
`plan`. benchmarks/two_routes.py asks more of each.
"""

from __future__ import annotations

import pytest
from two_routes import CHECKS, MORE_SEEDS, more_traffic, two_routes

CHEAP = [("what-if", 2), ("what-if", 7), ("pareto", 2), ("replan", 2), ("replan", 7), ("schedule", 1)]


@pytest.mark.parametrize(("check", "seed"), CHEAP)
def test_a_question_has_one_answer_by_both_routes(check: str, seed: int) -> None:
    assert CHECKS[check](two_routes(seed, is_safe=False)) == []


@pytest.mark.parametrize(
    "seed",
    [seed if k < 4 else pytest.param(seed, marks=pytest.mark.slow) for k, seed in enumerate(MORE_SEEDS)],
)
def test_where_more_traffic_costs_nothing_a_plan_for_it_costs_the_same(seed: int) -> None:
    """On paper and in production by turns: 30 questions in which the screen says so."""
    asked = two_routes(seed, is_safe=seed % 2 == 0)
    assert more_traffic(asked) == []
