"""The cheapest sequence of pool sizes under cuts, against hand arithmetic and all sequences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from shares import some

from planner.errors import InputError
from planner.solvers.pool_sizes import (
    DayTerms,
    PoolTerms,
    billed_usd,
    cheapest_sizes,
    cost_usd,
    count_paid_workers,
    fill_paid_units,
    is_within_stock,
    lives_within_stock,
    most_gpus_in_use,
    most_paid_gpus,
    possible_worker_lives,
    ready_workers_at_no_cost,
    units_usd,
)
from planner.solvers.whole_nodes import PricedNode

NODE = PricedNode("card", 3, 1.0, 0.0)


def hours(
    *sizes: int, start_h: float = 0.0, unit_h: float = 0.0, most: int = 4
) -> tuple[DayTerms, np.ndarray]:
    """Steps of an hour, one pool at 1 USD/h, and these sizes in them."""
    day = DayTerms(
        np.arange(0, 3600.0 * len(sizes) + 1, 3600.0),
        (PoolTerms(3600 * start_h, 0, most, 1.0),),
        3600 * unit_h,
    )
    return day, np.array(sizes, np.int64)[:, None]


def test_a_worker_is_paid_from_when_it_is_asked_for() -> None:
    """One all of three hours, a second in the last, asked for half an hour before: 3 + 1 + 0.5."""
    day, workers = hours(1, 1, 2, start_h=0.5)
    assert cost_usd(day, workers) == pytest.approx(4.5)


def test_a_start_may_take_longer_than_a_step() -> None:
    """Asked for 1.5 h before the third hour: 3 + 1 + 1.5."""
    day, workers = hours(1, 1, 2, start_h=1.5)
    assert cost_usd(day, workers) == pytest.approx(5.5)


def test_who_is_needed_before_it_could_start_is_there_from_the_beginning() -> None:
    """A start takes two hours: the second worker of the second hour is paid and ready in the first too."""
    day, workers = hours(1, 2, 1, start_h=2.0)
    assert cost_usd(day, workers) == pytest.approx(5.0)
    assert ready_workers_at_no_cost(day, workers)[:, 0].tolist() == [2, 2, 1]


def test_a_valley_no_longer_than_a_start_is_filled() -> None:
    day, workers = hours(2, 1, 2, 0, 0, 2, start_h=1.0)
    assert ready_workers_at_no_cost(day, workers)[:, 0].tolist() == [2, 2, 2, 0, 0, 2]
    assert (
        cost_usd(day, workers)
        == cost_usd(day, ready_workers_at_no_cost(day, workers))
        == pytest.approx(6 + 2 + 2)
    )


def test_a_worker_is_kept_where_that_is_cheaper_than_a_start() -> None:
    """A valley of one hour, starts of an hour and a half: 3 x 2; of two hours 2 x 2 + 2 x 1.5 less 3.5."""
    day, _ = hours(0, 0, 0, 0, 0, start_h=1.5)
    cuts = [((0, 0, 1),), ((2, 0, 1),)]
    assert cheapest_sizes(day, cuts).usd == pytest.approx(6.0)
    cuts = [((0, 0, 1),), ((4, 0, 1),)]
    assert cheapest_sizes(day, cuts).usd == pytest.approx(2 + 2 * 2.5)


def test_started_hours_are_paid_whole() -> None:
    """A worker for the first 90 minutes of three hours and for the last half hour: kept all the time it costs
    3, given up and started anew 2 + 1; with a start of 10 minutes the first costs 3, the second 2 + 1."""
    day = DayTerms(np.arange(0, 12600, 1800.0), (PoolTerms(600.0, 0, 2, 1.0),), unit_s=3600.0)
    cuts = [((t, 0, 0),) for t in (0, 1, 2, 5)]
    found = cheapest_sizes(day, cuts)
    assert found.usd == pytest.approx(3.0) == found.bound_usd and found.workers is not None
    assert units_usd(day, found.workers) == pytest.approx(3.0)
    assert billed_usd(day, [(0, 0.0, 5400.0), (0, 8400.0, 10800.0)]) == pytest.approx(3.0)
    assert (1, 1, range(1, 2)) in possible_worker_lives(
        day, 600.0
    )  # asked for at 20 min, paid until 80: ready for one step


def test_a_paid_hour_is_used() -> None:
    """Two hours of two half hours: needed in the first, second and fourth half; valleys are free."""
    day = DayTerms(np.arange(0, 9000, 1800.0), (PoolTerms(0.0, 0, 2, 1.0),), unit_s=3600.0)
    needed = np.array([1, 0, 0, 1])[:, None]
    assert units_usd(day, needed) == 2.0
    assert (
        fill_paid_units(day, needed).sum() == 4
    )  # one life of two hours is as cheap as two of one, and starts less
    assert units_usd(day, np.array([0, 1, 1, 1])[:, None]) == 2.0


def test_idle_gpus_of_whole_nodes_are_paid() -> None:
    """A worker of two GPUs on nodes of three: 3 USD/h for one, 6 for two."""
    pool = PoolTerms(0.0, 0, 3, 2.0, 2, "card", NODE)
    day = DayTerms(np.array([0.0, 3600.0, 7200.0]), (pool,))
    assert cost_usd(day, np.array([[1], [2]])) == pytest.approx(3 + 6)
    assert cheapest_sizes(day, [((0, 0, 0),), ((1, 0, 1),)]).usd == pytest.approx(9)
    assert billed_usd(day, [(0, 0.0, 7200.0), (0, 3600.0, 7200.0)]) == pytest.approx(9)


def test_of_whole_nodes_the_hours_of_a_node_are_paid() -> None:
    """Nodes of three GPUs, 3 USD/h. Two workers of one GPU, one for the first half hour and one for the
    second, are one node for an hour; one worker for half an hour too. Beside each other for 90 minutes three
    workers of two GPUs are three nodes, two hours each.
    """
    pools = (PoolTerms(0.0, 0, 3, 1.0, 1, "card", NODE), PoolTerms(0.0, 0, 3, 2.0, 2, "card", NODE))
    day = DayTerms(np.arange(0, 9000, 1800.0), pools, unit_s=3600.0)
    assert billed_usd(day, [(0, 0.0, 1800.0), (0, 1800.0, 3600.0)]) == pytest.approx(3.0)
    assert billed_usd(day, [(0, 0.0, 1800.0)]) == pytest.approx(3.0)
    assert billed_usd(day, [(1, 0.0, 5400.0)] * 3) == pytest.approx(18.0)
    halves = np.array([[1, 0], [1, 0], [0, 0], [0, 0]])
    assert (
        units_usd(day, halves) == pytest.approx(3.0) == cheapest_sizes(day, [((0, 0, 0),), ((1, 0, 0),)]).usd
    )


@pytest.mark.parametrize("is_paid_all_day", [False, True])
def test_a_worker_is_never_cut_over_two_nodes(is_paid_all_day: bool) -> None:
    """Three workers of five GPUs take three nodes of eight, as in a plan. Two were billed, less than the
    bound by the pool's least workers.
    """
    pool = PoolTerms(0.0, 0, 4, 5.0, 5, "card", PricedNode("card", 8, 1.0, 0.0))
    day = DayTerms(np.array([0.0, 3600.0]), (pool,), is_paid_all_day=is_paid_all_day)
    lives = [(0, 0.0, 3600.0)] * 3
    assert billed_usd(day, lives) == pytest.approx(24.0) == cost_usd(day, np.array([[3]]))
    assert cheapest_sizes(day, [((0, 0, 2),)]).usd == pytest.approx(24.0)
    assert most_paid_gpus(day, lives, [0]) == 24


def test_nodes_of_two_markets_are_filled_each_by_itself() -> None:
    """One GPU on a node of three that is rented, one on a spot node: six are paid where two are in use."""
    spot = PoolTerms(0.0, 0, 3, 0.5, 1, "card@spot", PricedNode("card@spot", 3, 0.5, 0.0))
    day = DayTerms(np.array([0.0, 3600.0]), (PoolTerms(0.0, 0, 3, 1.0, 1, "card", NODE), spot))
    lives = [(0, 0.0, 3600.0), (1, 0.0, 3600.0)]
    assert most_gpus_in_use(day, lives, [0, 1]) == 2 and most_paid_gpus(day, lives, [0, 1]) == 6
    assert billed_usd(day, lives) == pytest.approx(3 + 1.5)
    assert most_paid_gpus(day, [(0, 0.0, 1800.0), (1, 1800.0, 3600.0)], [0, 1]) == 3


def test_a_stock_counts_whole_nodes() -> None:
    """A rented and a spot node of three are more than a stock of five, though two GPUs are in use."""
    spot = PoolTerms(0.0, 0, 3, 0.5, 1, "card@spot", PricedNode("card@spot", 3, 0.5, 0.0))
    pools = (PoolTerms(0.0, 0, 3, 1.0, 1, "card", NODE), spot)
    for stock, fits in ((5, False), (6, True)):
        day = DayTerms(np.array([0.0, 3600.0]), pools, stock={"card": stock})
        assert is_within_stock(day, np.array([[1, 1]])) == fits
        assert lives_within_stock(day, [(0, 0.0, 3600.0), (1, 0.0, 3600.0)]) == fits
        assert (cheapest_sizes(day, [((0, 0, 0),), ((0, 1, 0),)]).workers is not None) == fits


def random_terms(rng: np.random.Generator) -> tuple[DayTerms, list[tuple[tuple[int, int, int], ...]]]:
    steps, pools = int(rng.integers(3, 6)), int(rng.integers(1, 3))
    edges_s = np.concatenate(([0.0], np.cumsum(rng.uniform(50, 150, steps))))
    most = 2 if pools == 2 else 3
    terms = []
    for _ in range(pools):
        start_s, whole = float(rng.choice([0, 30, 100, 140])), bool(rng.random() < 0.3)
        usd_per_h = 2 * NODE.gpu_usd_per_h if whole else float(rng.uniform(1, 4))
        terms.append(PoolTerms(start_s, 0, most, usd_per_h, 2, "card", NODE if whole else None))
    cuts = [
        tuple((int(rng.integers(steps)), int(rng.integers(pools)), int(rng.integers(2))) for _ in range(many))
        for many in rng.integers(1, 4, 6)
    ]
    stock = {"card": 6} if rng.random() < 0.3 else {}
    return DayTerms(edges_s, tuple(terms), stock=stock), cuts


@pytest.mark.long
@pytest.mark.parametrize("seed", some(range(20), 3))
def test_the_cheapest_of_all_sequences(seed: int) -> None:
    """Those that were seen are left out: the first, then the second best."""
    day, cuts = random_terms(np.random.default_rng(seed))
    ranges = [range(pool.least, pool.most + 1) for pool in day.pools] * day.shape[0]
    bills = sorted(
        (cost_usd(day, workers), workers.tobytes())
        for workers in (np.array(each).reshape(day.shape) for each in itertools.product(*ranges))
        if all(any(workers[t, c] > size for t, c, size in cut) for cut in cuts)
        and is_within_stock(day, workers)
    )
    found = cheapest_sizes(day, cuts)
    if not bills:
        assert found.workers is None and found.bound_usd == math.inf
        return
    assert found.usd == pytest.approx(bills[0][0]) and found.bound_usd <= bills[0][0] * (1 + 1e-9)
    assert found.workers is not None
    assert cost_usd(day, found.workers) == pytest.approx(found.usd)
    again = cheapest_sizes(day, cuts, [found.workers])
    assert again.usd == pytest.approx(bills[1][0]) and again.workers is not None
    assert not np.array_equal(again.workers, found.workers)


@pytest.mark.parametrize("seed", range(10))
def test_whole_units_never_cost_less_than_the_model_says(seed: int) -> None:
    """Last in, first out, by hand: the n-th worker lives while n are asked for."""
    rng = np.random.default_rng(seed)
    edges_s = np.concatenate(([0.0], np.cumsum(rng.uniform(500, 2500, 5))))
    day = DayTerms(edges_s, (PoolTerms(float(rng.choice([0, 300, 1500])), 0, 3, 1.0),), unit_s=3600.0)
    workers = rng.integers(0, 4, (5, 1))
    paid, cells_s = count_paid_workers(day, workers)[:, 0], day.cells_s()
    spans = []
    for n in range(1, 4):
        on = np.concatenate(([False], paid >= n, [False]))
        begins, ends = np.flatnonzero(on[1:] & ~on[:-1]), np.flatnonzero(on[:-1] & ~on[1:])
        spans += [(0, float(cells_s[a]), float(cells_s[b])) for a, b in zip(begins, ends, strict=True)]
    cuts = [((t, 0, int(size) - 1),) for t, size in enumerate(workers[:, 0]) if size]
    bill = billed_usd(day, spans)
    assert cheapest_sizes(day, cuts).usd <= bill * (1 + 1e-9)
    assert units_usd(day, workers) <= bill * (1 + 1e-9)
    assert (fill_paid_units(day, workers) >= workers).all()
    assert units_usd(day, fill_paid_units(day, workers)) == pytest.approx(units_usd(day, workers))


def split_into_runs(steps: list[int]) -> Iterator[list[list[int]]]:
    """All ways to cut a rising list into runs."""
    for cuts in itertools.product((False, True), repeat=max(len(steps) - 1, 0)):
        runs: list[list[int]] = [[step] for step in steps[:1]]
        for step, is_cut in zip(steps[1:], cuts, strict=True):
            if is_cut:
                runs.append([step])
            else:
                runs[-1].append(step)
        yield runs


def cheapest_bill(day: DayTerms, workers: np.ndarray) -> float:
    """The cheapest bill of one pool by brute force: all lives of the n-th worker that cover its steps."""
    total = 0.0
    for n in range(1, int(workers.max()) + 1):
        bills = []
        for runs in split_into_runs([t for t in range(len(workers)) if workers[t, 0] >= n]):
            spans_s = [
                (max(float(day.edges_s[run[0]]) - day.pools[0].start_s, 0.0), float(day.edges_s[run[-1] + 1]))
                for run in runs
            ]
            bills.append(billed_usd(day, [(0, *span_s) for span_s in spans_s]))
        total += min(bills)
    return total


@pytest.mark.parametrize("unit_s", [120.0, 3600.0, 86400.0])
@pytest.mark.parametrize("seed", some(range(12), 3))
def test_lives_a_little_longer_than_whole_units_begin_another(seed: int, unit_s: float) -> None:
    """Lengths of steps in whole and half units, less or more by a rounding error, by milliseconds, or by
    two millionths of a unit. Sizes, bills and the optimum agree with brute force over lives and sequences.
    """
    rng = np.random.default_rng(seed)
    near_s = rng.choice([0.0, 1e-10, -1e-10, 1e-3, -1e-3, 5e-7 * unit_s, 2e-6 * unit_s], 4)
    edges_s = np.concatenate(([0.0], np.cumsum(unit_s * rng.choice([0.5, 1.0, 2.0], 4) + near_s)))
    day = DayTerms(edges_s, (PoolTerms(float(rng.choice([0.0, unit_s / 2])), 0, 2, 1.0),), unit_s=unit_s)
    needed = rng.integers(0, 3, (4, 1))
    sequences = (np.array(sizes)[:, None] for sizes in itertools.product(range(3), repeat=4))
    best = min(cheapest_bill(day, workers) for workers in sequences if (workers >= needed).all())
    assert units_usd(day, needed) == pytest.approx(best, rel=1e-12)
    sizes = cheapest_sizes(day, [((t, 0, int(size) - 1),) for t, size in enumerate(needed[:, 0]) if size])
    assert sizes.usd == pytest.approx(best, rel=1e-9) and sizes.workers is not None


def test_a_day_a_little_longer_than_its_units_has_an_optimum() -> None:
    """A worker that is needed all of an hour and 2 ms is paid for two hours."""
    day = DayTerms(np.array([0.0, 3600.002]), (PoolTerms(0.0, 0, 2, 1.0),), unit_s=3600.0)
    assert cheapest_sizes(day, [((0, 0, 0),)]).usd == pytest.approx(2.0)


def test_bad_terms_end_in_one_line() -> None:
    pool = PoolTerms(0.0, 0, 2, 1.0)
    with pytest.raises(InputError, match="least is 3 and most 2"):
        PoolTerms(0.0, 3, 2, 1.0)
    with pytest.raises(InputError, match="start_s is -1"):
        PoolTerms(-1.0, 0, 2, 1.0)
    with pytest.raises(InputError, match="rising from 0"):
        DayTerms(np.array([1.0, 2.0]), (pool,))
    with pytest.raises(InputError, match="a start-up takes 20 s, and the day ends after 10 s"):
        DayTerms(np.array([0.0, 10.0]), (PoolTerms(20.0, 0, 2, 1.0),))
    with pytest.raises(InputError, match="nothing is billed by units"):
        units_usd(DayTerms(np.array([0.0, 10.0]), (pool,)), np.array([[1]]))
