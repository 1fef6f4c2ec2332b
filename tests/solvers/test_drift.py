"""The e-detector: by hand, its mean within the band, and its false alarms counted."""

from __future__ import annotations

import numpy as np
import pytest

from planner.solvers.drift import CLIP_SIGMA, SIZES_SIGMA, Alarm, find_alarms, log_evidence


def test_evidence_by_hand() -> None:
    """x = 0.2 with v = 0.04 is one standard deviation: k - k^2 / 2. A freak of 100 counts as CLIP."""
    found = log_evidence(np.array([0.2, 100.0, np.nan, 1.0]), np.array([0.04, 0.04, 0.04, np.inf]))
    for k, size in enumerate(SIZES_SIGMA):
        assert found[0, k] == pytest.approx(size - size**2 / 2)
        assert found[1, k] == pytest.approx(size * CLIP_SIGMA - size**2 / 2)
    assert (found[2:] == 0).all()


def test_a_shift_is_found_where_it_began_and_its_end_is_seen() -> None:
    """Three standard deviations from window 40 to 60: 2.5 nats a window for k = 1 against log 10^5 = 11.5."""
    x = np.zeros(100)
    x[40:60] = 3.0
    (found,) = find_alarms(x, np.ones(100), threshold=1e5)
    assert found.began == 40
    assert 44 <= found.noticed <= 47
    assert found.ended == 60
    (lasting,) = find_alarms(x[:60], np.ones(60), threshold=1e5)
    assert lasting == Alarm(40, found.noticed, None)


def test_one_freak_window_is_no_drift() -> None:
    x = np.zeros(100)
    x[50] = 1e6
    assert not find_alarms(x, np.ones(100), threshold=1e5)


def test_within_the_band_evidence_has_mean_one_at_most() -> None:
    rng = np.random.default_rng(0)
    mean = np.exp(log_evidence(rng.normal(size=400_000), np.ones(400_000))).mean(axis=0)
    assert (mean <= 1.005).all()


def test_false_alarms_are_as_rare_as_promised() -> None:
    """c = n / alpha with alpha = 20 %: of 200 runs at the band's very edge at most 40, and chance on top."""
    rng = np.random.default_rng(1)
    windows, alpha = 300, 0.2
    false = sum(
        bool(find_alarms(rng.normal(size=windows), np.ones(windows), threshold=windows / alpha))
        for _ in range(200)
    )
    assert false <= 40


def test_runs_in_a_band_and_few_false_alarms_with_heavy_tails() -> None:
    """Student's t with three degrees of freedom, scaled to variance 1: clipping keeps them rare."""
    rng = np.random.default_rng(2)
    false = sum(
        bool(find_alarms(rng.standard_t(3, size=300) / np.sqrt(3), np.ones(300), threshold=300 / 0.2))
        for _ in range(200)
    )
    assert false <= 40
