"""Makes a timetable cheaper by exchanging workers of one pool for workers of another.

A timetable is a list of lives: stretches in which the k-th worker of pool c is ready (finer_day.py). Lives of
the dearest pools come first. A life is tried whole, then in halves, quarters and so on down to a window:
workers of another pool replace it if they cost less and all windows of that time are still kept.
Adjacent stretches of one worker become one life. Then all lives are shortened, and the whole day is simulated
and repaired, as in finer_day.py.
"""

import math
from collections.abc import Sequence

from planner.day.search.day_runs import DayRuns
from planner.day.search.finer_day import FinerDay, Life, LifeSearch, Lives
from planner.simulator.elastic import Ints
from planner.solvers.pool_sizes import lives_within_stock

# Set by hand: at most this many workers take the place of one.
MOST_FOR_ONE = 3
LEAST_SAVED_FRAC = 1e-9  # A smaller saving, as a share of the cost, is a rounding error.


def exchanged_day(
    runs: DayRuns, edges_s: Sequence[float], workers: Ints, most_usd: float, deadline: float = math.inf
) -> FinerDay | None:
    """A timetable that keeps every window for less than `most_usd`, from these workers (N, P) in N steps.

    None if there is no such timetable, or if bills are by whole units of more than a minute. From `deadline`
    on the search's clock (work_clock.py) timetables are not changed any more.
    """
    if runs.terms.is_by_unit:
        return None
    exchange = _Exchange(LifeSearch(runs, deadline))
    lives = exchange.exchanged(exchange.search.lives_of_sizes(edges_s, workers))
    return exchange.search.repaired_day(exchange.search.shortened(lives), most_usd)


class _Exchange:
    """Exchanges lives within the limit of work of a search."""

    def __init__(self, search: LifeSearch):
        self.search, self.terms = search, search.runs.terms

    def exchanged(self, lives: Lives) -> Lives:
        """The lives, exchanged whole or in parts wherever that is cheaper and keeps all windows."""
        prices = self.search.usd_per_h

        def dearest_first(key: tuple[int, int]) -> tuple[float, int, int]:
            c, k = key
            return -prices[c][k], c, -k

        for c, k in sorted(lives, key=dearest_first):
            for life in list(lives[c, k]):
                lives = self._exchange_part(lives, (c, k), life)
        return lives

    def _exchange_part(self, lives: Lives, key: tuple[int, int], part: Life) -> Lives:
        """The lives with this part of a life exchanged; if that fails, with its halves tried separately."""
        if self.search.is_over():
            return lives
        usd = self.search.usd(lives)
        for tried in sorted(self._candidates(lives, key, part), key=self.search.usd):
            if self.search.usd(tried) > usd * (1 - LEAST_SAVED_FRAC):
                break
            if self.search.holds(tried, *part):
                return tried
        begin_s, end_s = part
        if end_s - begin_s < 2 * self.search.window_s:
            return lives
        middle_s = (begin_s + end_s) / 2
        lives = self._exchange_part(lives, key, (begin_s, middle_s))
        return self._exchange_part(lives, key, (middle_s, end_s))

    def _candidates(self, lives: Lives, key: tuple[int, int], part: Life) -> list[Lives]:
        """The lives with one to MOST_FOR_ONE workers of each other pool in place of this part of a life."""
        without, (begin_s, end_s) = dict(lives), part
        without[key] = []
        for first_s, last_s in lives[key]:
            before, after = (first_s, min(last_s, begin_s)), (max(first_s, end_s), last_s)
            without[key] += [(from_s, to_s) for from_s, to_s in (before, after) if to_s > from_s]
        candidates: list[Lives] = []
        for c in range(len(self.terms.pools)):
            added = without
            for _ in range(MOST_FOR_ONE if c != key[0] else 0):
                more = self._one_more(added, c, part)
                if more is None:
                    break
                added = more
                joined = self.search.joined(added)
                if self._fits(joined):
                    candidates.append(joined)
        return candidates

    def _one_more(self, lives: Lives, c: int, part: Life) -> Lives | None:
        """The lives with one worker more of pool `c` in this part of the day; None if it has the most."""
        begin_s, end_s = part
        for k in self.search.levels[c]:
            own = lives.get((c, k), [])
            if all(last_s <= begin_s or first_s >= end_s for first_s, last_s in own):
                return lives | {(c, k): [*own, part]}
        return None

    def _fits(self, lives: Lives) -> bool:
        """Whether the stock has GPUs for these lives, with start-ups, and for the least size of each pool."""
        search, all_lives = self.search, list[tuple[int, float, float]]()
        for c, sizes in enumerate(search.sizes):
            all_lives += [(c, 0.0, search.last_s)] * sizes[0]  # The least size comes first.
        for (c, k), own in lives.items():
            start_s = self.terms.pools[c].start_s
            for first_s, end_s in own:
                all_lives += [(c, max(first_s - start_s, 0.0), end_s)] * search.workers_of(c, k)
        return lives_within_stock(self.terms, all_lives)
