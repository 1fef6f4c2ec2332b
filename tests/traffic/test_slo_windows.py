"""Windows in which an SLO is judged: fixed, from the start of what is measured, of enough requests each."""

from __future__ import annotations

import numpy as np
import pytest

from planner.traffic import trace as traces
from planner.traffic.trace import WINDOW_REQUESTS, slo_windows_s


@pytest.mark.parametrize(
    ("end_s", "expected_s"),
    [
        (3000.0, [0, 600, 1200, 1800, 2400, 3000]),
        (2999.0, [0, 600, 1200, 1800, 2400, 2999]),
        (2700.0, [0, 600, 1200, 1800, 2400, 2700]),
        (2690.0, [0, 600, 1200, 1800, 2690]),
        (850.0, [0, 850]),
        (200.0, [0, 200]),
    ],
)
def test_an_end_shorter_than_half_a_window_joins_the_one_before(
    end_s: float, expected_s: list[float]
) -> None:
    """Windows of ten minutes, one request a second."""
    assert slo_windows_s(np.arange(end_s + 1), (0.0, end_s), 600.0).tolist() == expected_s


def test_windows_begin_with_what_is_measured() -> None:
    """The warm-up takes 120 s of the hour: 58 minutes are five windows of ten minutes and one of eight."""
    edges_s = slo_windows_s(np.arange(3601.0), (120.0, 3600.0), 600.0)
    assert edges_s.tolist() == [120, 720, 1320, 1920, 2520, 3120, 3600]


def test_windows_of_few_requests_join_those_that_follow() -> None:
    """Per window of 10 s: 99, 1, 100, 0, 250, 30 arrivals. 99 + 1 make 100, nothing and 250 are one, and the
    30 at the end join the 250."""
    counts = (99, 1, 100, 0, 250, 30)
    assert WINDOW_REQUESTS == 100
    arrival_s = np.concatenate([10 * k + np.arange(n) * 10 / (n + 1) for k, n in enumerate(counts)])
    edges_s = slo_windows_s(arrival_s, (0.0, 60.0), 10.0)
    assert edges_s.tolist() == [0, 20, 30, 60]


def test_few_requests_are_one_window() -> None:
    assert slo_windows_s(np.arange(50.0), (2.0, 49.0), 5.0).tolist() == [2, 49]
    assert slo_windows_s(np.zeros(1), (0.0, 0.0), 5.0).tolist() == [0, 0]


def test_a_tiny_window_costs_no_more_than_there_are_requests() -> None:
    """A microsecond in a day: 8.64e10 windows, of which 40 have 100 requests."""
    edges_s = slo_windows_s(np.linspace(0, 86400.0, 4000), (0.0, 86400.0), 1e-6)
    assert len(edges_s) == 41


@pytest.mark.parametrize("seed", range(20))
def test_every_window_has_enough_requests_and_its_length_at_least(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "WINDOW_REQUESTS", 5)
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(rng.choice([0.1, 3.0], 200)))
    window_s, every_s = (float(arrival_s[10]), float(arrival_s[-1])), float(rng.uniform(1, 40))
    edges_s = slo_windows_s(arrival_s, window_s, every_s)
    assert (edges_s[0], edges_s[-1]) == window_s
    inner = (edges_s[1:-1] - edges_s[0]) / every_s
    assert np.allclose(inner, np.round(inner)) and (np.diff(edges_s) > every_s / 2 - 1e-9).all()
    inside_s = arrival_s[10:]
    of = np.clip(np.searchsorted(edges_s, inside_s, "right") - 1, 0, len(edges_s) - 2)
    assert np.bincount(of).min() >= 5
