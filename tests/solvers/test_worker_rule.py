"""The linear rule and its change points against planted ones."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from planner.errors import InputError
from planner.solvers.worker_rule import SeriesLevel, WorkerRule, fit_worker_rule


def change_points(
    values: Sequence[float] | npt.NDArray[np.float64], learn: int = 20
) -> list[tuple[int, int]]:
    """Where the level shifts: (index where the shift began, index where it was noticed)."""
    spans: list[tuple[int, int]] = []
    level = SeriesLevel(learn)
    for i, value in enumerate(np.asarray(values, float).tolist()):
        if (ago := level.add(value)) is not None:
            spans.append((i - ago, i))
            level = SeriesLevel(learn)
            level.add(value)  # From here on it is surely the new level.
    return spans


@pytest.mark.parametrize("seed", range(10))
def test_a_planted_rule_is_recovered(seed: int) -> None:
    """N = ceil(k r + c) at 300 rates: slope within 1 %, offset within a tenth of a worker."""
    rng = np.random.default_rng(seed)
    planted = WorkerRule(rng.uniform(0.2, 2), rng.uniform(-2, 4))
    rate = rng.uniform(10, 200, 300)
    found = fit_worker_rule(rate, planted.workers(rate))
    assert found.slope_workers_per_rps == pytest.approx(planted.slope_workers_per_rps, rel=0.01)
    assert found.offset_workers == pytest.approx(planted.offset_workers, abs=0.3)
    assert np.abs(found.workers(rate) - planted.workers(rate)).max() <= 1


def test_the_rule_gives_no_fewer_workers_than_any_pair() -> None:
    rng = np.random.default_rng(0)
    rate = rng.uniform(1, 50, 100)
    needed = np.ceil(0.4 * rate + 3 * np.sqrt(rate))
    rule = fit_worker_rule(rate, needed)
    assert (rule.workers(rate) >= needed).all()


def test_the_rule_by_hand() -> None:
    """2 r + 1: 1 worker at 0, 3.0 at 1 request/s, 3.2 at 1.1."""
    rule = WorkerRule(2.0, 1.0)
    assert rule.workers([0.0, 1.0, 1.1]).tolist() == [1, 3, 4]


def test_counts_that_fall_with_the_rate_make_a_level_rule() -> None:
    """5 workers at 10 requests/s, 3 at 20: five are enough at both; the falling line's 7 at rate 0 is not."""
    rule = fit_worker_rule([10, 20], [5, 3])
    assert rule.slope_workers_per_rps == 0 and rule.workers([10, 20]).tolist() == [5, 5]


def test_one_rate_is_no_line() -> None:
    with pytest.raises(InputError, match="pairs at two rates above 0, found 1"):
        fit_worker_rule([0, 6, 6], [1, 2, 3])


def test_planted_shifts_are_noticed_soon_and_rarely_others() -> None:
    """Levels 10, 13, 9 with noise of one, 60 times: the shifts at 150 and 300, of 3 and 4 sigma, are noticed
    within 15 beats and dated to within 20; at most one series in seven shows any other."""
    rng = np.random.default_rng(0)
    others = 0
    for _ in range(60):
        found = change_points(np.repeat([10.0, 13.0, 9.0], 150) + rng.normal(0, 1, 450))
        for planted in (150, 300):
            assert any(abs(began - planted) <= 20 and planted <= at <= planted + 15 for began, at in found)
        others += len(found) > 2
    assert others <= 60 / 7


def test_a_steady_series_raises_few_alarms() -> None:
    """Page's test at 0.5 and 8 sigma: Siegmund's formula gives 9,550 beats between alarms; <= 4 in 20,000."""
    rng = np.random.default_rng(1)
    assert sum(len(change_points(rng.normal(5, 2, 5000))) for _ in range(4)) <= 4


def test_a_constant_series_shifts_at_its_step() -> None:
    assert change_points([1.0] * 30 + [2.0] * 30) == [(30, 30)]
