"""Are parts of the traffic of one kind? Kolmogorov's distance of lengths between quarters."""

from __future__ import annotations

import numpy as np
import pytest

from planner.traffic.kinds import by_chance_frac, distance_frac, quarters_apart
from planner.traffic.trace import Trace


def trace_of(prompts: list[np.ndarray]) -> Trace:
    """One request a second, the same number in each quarter; answers of 10 tokens."""
    tokens = np.concatenate(prompts)
    n = len(tokens)
    return Trace("kinds", np.arange(float(n)) + 50.0, tokens, np.full(n, 10))


def test_the_distance_is_the_largest_share_by_which_two_distributions_differ() -> None:
    """Up to 2 are half of 1, 2, 3, 4 and none of 3, 4, 5, 6."""
    assert distance_frac(np.array([1, 2, 3, 4]), np.array([3, 4, 5, 6])) == 0.5


def test_equal_parts_pass_the_distance_of_chance_so_rarely() -> None:
    """For two samples of 200, sqrt(-ln(0.005) / 2 x 400 / 40,000) = 0.163 at 1 % (Smirnov's table: 0.163)."""
    one = np.arange(200)
    assert by_chance_frac(one, one, 1) == pytest.approx(0.163, abs=5e-4)


def test_quarters_of_one_kind_are_alike() -> None:
    rng = np.random.default_rng(0)
    assert quarters_apart(trace_of([rng.integers(1, 2000, 500) for _ in range(4)])) == (0.0, 0.0)


def test_a_quarter_with_longer_prompts_is_of_another_kind() -> None:
    """300 of its 500 prompts are longer than any before: 60 %."""
    same = np.tile(np.arange(1, 101), 5)
    other = np.where(np.arange(500) < 300, 1000, same)
    prompts, outputs = quarters_apart(trace_of([same, same, same, other]))
    assert prompts == pytest.approx(0.6) and outputs == 0.0
