"""The best packings of a moment against every assignment there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planner.solvers import moment_packing
from planner.solvers.moment_packing import largest_load, pack_moment


@pytest.mark.parametrize("seed", range(24))
def test_no_assignment_is_better(seed: int) -> None:
    """Up to 3 workers, 6 requests and 3 resources, workers of one kind or of two."""
    rng = np.random.default_rng(seed)
    workers, requests = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    kind_of = np.sort(rng.integers(0, 2, workers))
    of_kinds = rng.uniform(0.05, 0.75, (2, requests, int(rng.integers(1, 4))))
    u = of_kinds[kind_of]
    everything = [np.array(each) for each in itertools.product(range(workers), repeat=requests)]
    loads = [largest_load(u, each) for each in everything]
    holding = [len(set(each)) for each, load in zip(everything, loads, strict=True) if load <= 1]

    best = pack_moment(u, everything[int(rng.integers(len(everything)))], kind_of)

    assert best.is_least and best.least == pytest.approx(min(loads), abs=1e-9)
    assert best.fewest == min(holding, default=None)
    assert best.fewest_bound == min(holding, default=workers + 1)


def test_two_halves_and_four_quarters_by_hand() -> None:
    """Shares 0.5, 0.5, 0.25 four times are 2 workers full; on three the most even has 0.75 on one."""
    u = np.tile(np.array([0.5, 0.5, 0.25, 0.25, 0.25, 0.25])[:, None], (3, 1, 1))
    best = pack_moment(u, np.array([0, 1, 2, 2, 2, 2]), np.zeros(3, np.int64))
    assert best.fewest == 2 and best.least == pytest.approx(0.75)


def test_what_is_not_proved_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven requests of 0.4 on four workers: the sums allow 3 and 0.7, two fit a worker. By hand that is 4
    and 0.8, and CP-SAT, which is not asked at the end, proves it.
    """
    u = np.full((4, 7, 1), 0.4)
    placed = np.array([0, 0, 1, 1, 2, 2, 3])
    best = pack_moment(u, placed, np.zeros(4, np.int64))
    assert best.fewest == 4 and best.is_fewest
    assert best.least == pytest.approx(0.8) and best.is_least
    monkeypatch.setattr(moment_packing, "MOST_VARIABLES", 0)
    by_hand = pack_moment(u, placed, np.zeros(4, np.int64))
    assert (by_hand.fewest, by_hand.fewest_bound) == (4, 3) and not by_hand.is_fewest
    assert by_hand.least_bound == pytest.approx(0.7) and not by_hand.is_least


def test_no_requests_need_no_workers() -> None:
    best = pack_moment(np.zeros((2, 0, 2)), np.zeros(0, np.int64), np.zeros(2, np.int64))
    assert (best.fewest, best.least, best.is_fewest, best.is_least) == (0, 0.0, True, True)
