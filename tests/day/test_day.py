"""The optimum of a day against all sequences of pool sizes, and bounds below it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from elastic_runs import simulate_elastic
from shares import some
from small_days import SmallDay, billed, cheapest_of_all, quick_day, random_day, simulated

from planner.day.search.day_optimum import DayOptimum, cheapest_day
from planner.day.search.day_runs import DayRuns, day_terms
from planner.errors import InfeasibleError, InputError
from planner.simulator.slo_verdict import judge_slo
from planner.simulator.timetable import Timetable


def runs_of(day: SmallDay, *, stock: dict[str, int] | None = None) -> DayRuns:
    terms = day_terms(day.fleet, day.trace, day.slo, day.pools, unit_s=day.unit_s, stock=stock)
    return DayRuns(day.fleet, day.trace, day.slo, day.pools, terms)


def optimum(day: SmallDay) -> DayOptimum:
    return cheapest_day(runs_of(day))


def check(day: SmallDay) -> None:
    """The optimum is that of all sequences; what is claimed without simulating all is no more."""
    least = cheapest_of_all(day)
    if least == np.inf:
        with pytest.raises(InfeasibleError):
            optimum(day)
        return
    found = optimum(day)
    assert found.best.usd == pytest.approx(least, rel=1e-9)
    assert found.is_exact and found.is_optimal
    assert found.proved.usd <= least and found.proved.of_slo_usd <= least
    _, usd, holds = simulated(day, found.best.workers)
    assert holds and usd == pytest.approx(found.best.usd)
    quick = quick_day(runs_of(day))
    assert quick.best.usd >= least * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_one_pool_against_all_sequences(seed: int) -> None:
    check(random_day(seed, disaggregated=False, windows=3, most=3))


@pytest.mark.parametrize("seed", range(4))
def test_prefill_and_decode_against_all_sequences(seed: int) -> None:
    check(random_day(seed, disaggregated=True, windows=3, most=2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_more_of_one_pool_against_all_sequences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    windows = int(rng.integers(3, 7))
    check(random_day(100 + seed, disaggregated=False, windows=windows, most=4 if windows < 5 else 2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_more_pairs_against_all_sequences(seed: int) -> None:
    check(random_day(100 + seed, disaggregated=True, windows=3 + seed % 2, most=2))


@pytest.mark.parametrize("seed", some(range(40), 14))
def test_no_run_costs_less_than_the_proved_bound(seed: int) -> None:
    """Sizes that change at any moment, not on the grid."""
    rng = np.random.default_rng(seed)
    day = random_day(seed, disaggregated=seed % 4 == 0, windows=3, most=3)
    times_s = np.unique(np.concatenate(([0.0], rng.uniform(0, day.trace.arrival_s[-1], 6))))
    sizes = rng.integers([pool.least for pool in day.pools], 4, (len(times_s), len(day.pools)))
    table = Timetable(times_s.tolist(), sizes.tolist(), [pool.start_s for pool in day.pools])
    pools = [replace(pool, first=n) for pool, n in zip(day.pools, table.sizes_at(0.0), strict=True)]
    run = simulate_elastic(day.fleet, day.trace, pools, table, limits=day.slo.limits, record=True)
    if (
        judge_slo(run.simulation, day.slo, with_percentiles=False).holds
        and (run.simulation.status != 2).all()
    ):
        assert runs_of(day).least_paid().usd <= billed(day, run.spans) * (1 + 1e-9)


def test_a_stock_is_kept() -> None:
    """Two of three workers at a time: of the sequences that hold, the cheapest with no more."""
    day = replace(random_day(2, disaggregated=False, windows=3, most=3), unit_s=0.0)
    free = cheapest_day(runs_of(day))
    kept = cheapest_day(runs_of(day, stock={"paper": 2}))
    assert kept.best.workers.max() <= 2 <= free.best.workers.max()
    assert kept.best.usd >= free.best.usd
    with pytest.raises(InfeasibleError, match="within the stock"):
        cheapest_day(runs_of(day, stock={"paper": 0}))


def test_too_few_workers_end_in_one_line() -> None:
    day = random_day(0, disaggregated=False, windows=3, most=3)
    hard = replace(day, slo=replace(day.slo, limits=(replace(day.slo.limits[0], limit_s=1e-6),)))
    with pytest.raises(InfeasibleError, match=r"with the most workers of every pool \(3\) all day long"):
        optimum(hard)


def test_interruptions_by_chance_have_no_optimum() -> None:
    day = random_day(0, disaggregated=False, windows=3, most=3)
    spot = replace(day, pools=(replace(day.pools[0], interruptions_per_h=1.0),))
    with pytest.raises(InputError, match="drawn by chance"):
        runs_of(spot)


@pytest.mark.long
def test_a_grid_finer_than_the_windows_costs_no_more() -> None:
    """Each sequence of the coarse grid is one of the fine."""
    day = replace(random_day(4, disaggregated=False, windows=3, most=3), unit_s=0.0)
    coarse = optimum(day)
    edges_s = day.edges_s
    fine_s = np.sort(np.concatenate((edges_s, (edges_s[1:] + edges_s[:-1]) / 2)))
    terms = replace(runs_of(day).terms, edges_s=fine_s)
    fine = cheapest_day(DayRuns(day.fleet, day.trace, day.slo, day.pools, terms))
    assert fine.is_exact and fine.best.usd <= coarse.best.usd * (1 + 1e-9)
