"""Oscillations of made-up sizes."""

from __future__ import annotations

import numpy as np
import pytest

from planner.day.controllers.oscillation import Oscillation, find_oscillations


def test_up_and_down_within_a_start() -> None:
    """Pool 0: 2, 4 at 60 s, 3 at 120 s (one of two taken back), 5 at 180 s, 2 at 240 s (two, and the other of
    the first, back), start-up 200 s. Pool 1 grows and shrinks an hour apart."""
    requested_s = np.array([0.0, 60.0, 120.0, 180.0, 240.0, 3840.0])
    asked = np.array([[2, 1], [4, 1], [3, 1], [5, 2], [2, 2], [2, 1]])
    assert find_oscillations(requested_s, asked, [200.0, 200.0]) == (Oscillation(0, 2, 120.0, 4),)
    assert find_oscillations(requested_s, asked, [0.0, 3700.0]) == (Oscillation(1, 1, 3840.0, 1),)


@pytest.mark.parametrize("seed", range(5))
def test_a_pool_that_only_grows_or_only_shrinks_does_not(seed: int) -> None:
    rng = np.random.default_rng(seed)
    asked = np.sort(rng.integers(0, 9, (50, 2)), axis=0)
    requested_s = np.linspace(0.0, 735.0, 50)
    assert find_oscillations(requested_s, asked, [600.0, 600.0]) == ()
    assert find_oscillations(requested_s, asked[::-1], [600.0, 600.0]) == ()
