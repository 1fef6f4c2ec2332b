"""Timetables made by chance against the optimum of a day: none that keeps every window may cost less.

`python benchmarks/five_days.py TRACES --timetables 500` makes them and prints what `attack` returns. Most are
the optimum's with changes moved, a worker less for a while, or a worker's time taken from one stretch and
given to the next; the others have sizes for stretches of the day that are drawn around what windows need, or
drawn at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from planner.day.day_study import DayAnswer, Optimum, terms_of
from planner.day.search.day_runs import DayRuns
from planner.domain import ROUNDING
from planner.simulator.elastic import Floats, Ints

APART_S = 1e-3  # Changes nearer than this are one.


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Sizes (N, P) from each of `times_s` (N,) on, the first of which is 0."""

    times_s: Floats
    sizes: Ints

    def with_stretch(self, from_s: float, to_s: float, pool: int, by: int) -> Sizes:
        """These sizes with `by` workers more of a pool in a stretch of the day."""
        times_s = np.unique(np.concatenate((self.times_s, [max(from_s, 0.0), to_s])))
        sizes = self.sizes[np.searchsorted(self.times_s, times_s, "right") - 1].copy()
        sizes[(times_s >= from_s) & (times_s < to_s), pool] += by
        return Sizes(times_s, sizes)


def _moved(rng: np.random.Generator, best: Sizes, window_s: float) -> Sizes:
    """One to four changes at other moments."""
    times_s = best.times_s.copy()
    for k in rng.integers(1, max(len(times_s), 2), int(rng.integers(1, 5))):
        if k < len(times_s):
            times_s[k] = max(times_s[k] + rng.normal(0, window_s / 8), APART_S)
    order = np.argsort(times_s, kind="stable")
    return Sizes(times_s[order], best.sizes[order])


def _less(rng: np.random.Generator, best: Sizes, window_s: float) -> Sizes:
    """One to three times a worker less in a stretch."""
    for _ in range(int(rng.integers(1, 4))):
        from_s = rng.uniform(0, best.times_s[-1] + window_s)
        pool = int(rng.integers(best.sizes.shape[1]))
        best = best.with_stretch(from_s, from_s + rng.exponential(window_s / 4), pool, -1)
    return best


def _shifted(rng: np.random.Generator, best: Sizes, window_s: float) -> Sizes:
    """A worker less in a stretch, and one more for a shorter time before or after it."""
    from_s, long_s = rng.uniform(0, best.times_s[-1] + window_s), rng.exponential(window_s / 2)
    short_s, pool = long_s * rng.uniform(0.1, 1.0), int(rng.integers(best.sizes.shape[1]))
    less = best.with_stretch(from_s, from_s + long_s, pool, -1)
    more_s = from_s - short_s if rng.random() < 0.5 else from_s + long_s
    return less.with_stretch(max(more_s, 0.0), max(more_s, 0.0) + short_s, pool, 1)


def _by_needs(rng: np.random.Generator, needs: Ints, edges_s: Floats) -> Sizes:
    """Stretches of one to twelve windows with the most that their windows need, one less, or one more."""
    starts = np.unique(np.concatenate(([0], rng.integers(0, len(needs), rng.integers(3, len(needs))))))
    ends = [*starts[1:].tolist(), len(needs)]
    sizes = np.array([needs[a:b].max(axis=0) for a, b in zip(starts.tolist(), ends, strict=True)])
    times_s = np.where(starts == 0, 0.0, edges_s[starts] - rng.uniform(0, 60))
    return Sizes(times_s, sizes + rng.choice([-1, 0, 0, 0, 1], (len(sizes), 1)))


def attack(answer: DayAnswer, *, count: int, seed: int) -> str:
    """How many of `count` timetables keep every window of the judged day, and how much the cheapest costs
    beside the optimum and its bounds, in a sentence.
    """
    assert answer.optimum is not None
    found, rng, question = answer.optimum, np.random.default_rng(seed), replace(answer.question, until_s=0.0)
    question = replace(question, trace=answer.judged)
    runs = DayRuns(question.fleet, question.trace, question.slo, question.optimum_pools, terms_of(question))
    best, window_s = Sizes(found.edges_s[:-1], found.sizes), question.window_s
    costs_usd = []
    for make in _makers(found, best, runs.window_edges_s, window_s, count):
        drawn = make(rng)
        is_new = np.append(True, np.diff(drawn.times_s) > APART_S)
        least, most = ([getattr(pool, name) for pool in question.optimum_pools] for name in ("least", "most"))
        day = runs.simulate_timetable(drawn.times_s[is_new], np.clip(drawn.sizes[is_new], least, most))
        if day.holds and day.fits:
            costs_usd.append(day.usd)
    bounds_usd = {
        "the optimum": found.usd,
        "what is proved if more workers never hurt": found.any_moment_usd or found.proved_usd,
        "what is proved": found.proved_usd,
    }
    below = [
        f"{sum(cost < usd * (1 - ROUNDING) for cost in costs_usd)} cost less than {name}, {usd:,.4f} USD"
        for name, usd in bounds_usd.items()
    ]
    least_usd = min(costs_usd, default=np.nan)
    keep = f"{count} timetables: {len(costs_usd)} keep every window, the cheapest for {least_usd:,.4f} USD"
    return "; ".join([keep, *below])


def _makers(
    found: Optimum, best: Sizes, edges_s: Floats, window_s: float, count: int
) -> list[Callable[[np.random.Generator], Sizes]]:
    """What draws each timetable: three in four change the optimum."""
    makers: list[Callable[[np.random.Generator], Sizes]] = [
        lambda rng: _moved(rng, best, window_s),
        lambda rng: _less(rng, best, window_s),
        lambda rng: _shifted(rng, best, window_s),
    ]
    if found.causal is not None:
        needs = found.causal.needs
        makers.append(lambda rng: _by_needs(rng, needs, edges_s))
    return [makers[k % len(makers)] for k in range(count)]
