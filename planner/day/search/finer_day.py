"""A cheaper timetable than the optimum on a grid (day/search/day_optimum.py): sizes change at any moment.

A timetable is a list of lives for each (pool c, k): stretches in which the pool's k-th worker is ready, and
with it those above it that then cost nothing, such as those on the same node, where nodes are sold whole. The
search begins with the lives in the bound's master solution (any_moment_bound.py) and has two steps:

    repair    While a window fails, a life begins earlier, ends later or is added: whichever change saves the
              most late requests per USD.
    shorten   Every life is dropped, shortened or interrupted by a pause, as far as all windows that this
              touches still hold. Workers with the highest k come first, because they are needed the least.

A window is judged on a slice of the day (day/search/day_runs.py) that begins one window earlier; on days of
at most FEW_WINDOWS it begins with the day. The resulting timetable is simulated as a whole day. Windows that
it misses there, because of a queue from further back, are repaired in the whole day: the first missed window
gets the cheapest change with which the day misses fewer windows. A timetable is used only if it then keeps
every window. If the bound's timetable does not, or saves nothing, the sizes of the grid are shortened in the
same way. On days of at most FEW_WINDOWS both are tried, lives then move to where the bill of the whole day is
lower, and the cheaper timetable is used.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.day.search.day_runs import SLICE_WORK, DayRun, DayRuns
from planner.search.oracle.work_clock import is_over
from planner.simulator.slo_verdict import attained_in_windows, in_windows
from planner.solvers.any_moment import LevelStretches, priced_sizes_by_pool, usd_per_h_by_level
from planner.solvers.pool_sizes import Floats, Ints, billed_usd
from planner.units import HOUR_S

Life = tuple[float, float]
"""A stretch of the day [s], from its beginning to its end, in which a worker is ready."""
Lives = dict[tuple[int, int], list[Life]]
"""The lives of each worker (pool c, k) that costs something; k counts the workers of the pool from 1 on.
Workers up to the pool's least, and those above it that cost nothing, are ready all day and have none.
"""

# In a day of so few windows a queue may last all day: windows are simulated from the day's beginning, and a
# change may affect all later windows.
FEW_WINDOWS = 6
# The constants were set by hand. GROW_FRAC to LASTS_FRAC are shares of the length of a window.
GROW_FRAC = 1 / 30  # A repair lengthens a life by this, times one of GROWTHS.
GROWTHS = (1, 3)
# Repairs in the whole day use DAY_GROWTHS, and also change lives up to DAY_RUN_IN_FRAC before the window.
DAY_GROWTHS, DAY_RUN_IN_FRAC = (1, 3, 9, 27), 1.0
NEW_LIFE_FRAC = 1 / 10  # A new life is this long. Pauses are tried at moments this far apart.
EXACT_FRAC = 1 / 120  # Lives are shortened to this precision.
# With more windows than FEW_WINDOWS, a change affects windows that begin up to this long after it.
LASTS_FRAC = 1 / 4
MOST_REPAIRS = 100  # The most changes to keep one window; a window that needs more stays missed.
# The most repairs in the whole day. Few are needed, because most windows were repaired in their slices.
MOST_DAY_REPAIRS = 12
DAY_REPAIRS_FRAC = 0.2  # This share of the work is reserved for repairs in the whole day.
# On days of at most FEW_WINDOWS the ends of lives move by these shares of a window, while the bill falls.
BILL_STEPS_FRAC = (1 / 10, 1 / 30, 1 / 120, 1 / 480)
BILL_MOVES = tuple(itertools.product((-1, 0, 1), repeat=2))  # A life's begin and end move so.
MOST_ROUNDS = 4  # Shortening goes through all lives at most this often.
# The most work for each of the two timetables (the bound's and the grid's): requests simulated, plus
# SLICE_WORK per slice. It takes 15 s or less on an idle core. Days of few windows get less.
MOST_WORK = 25_000_000
MOST_SLICES_PER_WINDOW = 300
SAFE_EXCESS = -0.02  # A window with this `excess` is safe: repairs gain nothing by lowering it further.
LEAST_LATE_FRAC = 1e-3  # `excess` divides by the share of requests that may be late, or by this if that is 0.
LEAST_SAVED_FRAC = 1e-6  # A round of shortening that saves a smaller share of the cost is the last one.
PROGRESS_STEP_FRAC = 0.05  # `progress` gets a line each time that this share of the work is used up.
ROUNDING = 1e-9  # Excesses and costs [USD] that differ by less are equal up to rounding.
ROUNDED_S = 1e-6  # The times of a timetable are rounded to this.
LEAST_SAVED_EXCESS = 1e-12  # A change that lowers the excess by less lowers it by a rounding error.


@dataclass(frozen=True, slots=True, eq=False)
class FinerDay:
    """A day, and the sizes (N, P) from each of `times_s` (N,) on."""

    day: DayRun
    times_s: Floats
    workers: Ints


def finer_day(
    runs: DayRuns,
    bound_lives: LevelStretches,
    grid: Ints,
    grid_usd: float,
    progress: Callable[[str], None] = lambda _: None,
    deadline: float = math.inf,
) -> FinerDay | None:
    """A timetable that keeps every window and is cheaper than the grid's sizes; the bound's is tried first.

    `grid` are the sizes (T, P) on the grid, whose day costs `grid_usd`. None if there is no such timetable.
    From `deadline` on the search's clock (work_clock.py) timetables are not changed any more.
    """
    best: FinerDay | None = None
    for is_of_bound in (True, False):
        if best is not None and runs.window_count > FEW_WINDOWS:
            break
        search = LifeSearch(runs, deadline, progress)
        lives = (
            search.repaired(dict(bound_lives))
            if is_of_bound
            else search.lives_of_sizes(runs.terms.edges_s.tolist(), grid)
        )
        finer = search.repaired_day(search.shortened(lives), grid_usd if best is None else best.day.usd)
        if finer is not None:
            progress(f"the optimum: sizes that change at any moment, {finer.day.usd:.2f} USD in this try")
            best = finer
    return best


class LifeSearch:
    """Changes lives and simulates the windows that this touches, within a limit of work."""

    def __init__(self, runs: DayRuns, deadline: float, progress: Callable[[str], None] = lambda _: None):
        self.runs, self.window_edges_s, self.deadline = runs, runs.window_edges_s.tolist(), deadline
        self.window_s = float(np.diff(runs.window_edges_s).max())
        is_short = runs.window_count <= FEW_WINDOWS
        self.run_in_s = math.inf if is_short else self.window_s
        self.lasts_s = math.inf if is_short else LASTS_FRAC * self.window_s
        self.last_s = float(runs.terms.edges_s[-1])
        # A slice has the requests of two windows.
        usual_work = 2 * len(runs.trace) / max(runs.window_count, 1) + SLICE_WORK
        self.most_work = min(MOST_WORK, MOST_SLICES_PER_WINDOW * runs.window_count * usual_work)
        self.work_left = self.most_work
        self.progress, self.reported_frac = progress, 0.0
        self.sizes = priced_sizes_by_pool(runs.terms)
        # The workers k of each pool that may have lives.
        self.levels = [[size + 1 for size in sizes[:-1]] for sizes in self.sizes]
        pools = range(len(runs.terms.pools))
        self.usd_per_h = [usd_per_h_by_level(runs.terms, c).tolist() for c in pools]
        # A cache of `excess` by window, times and workers of the slice: many slices recur.
        self._excesses: dict[tuple[int, bytes, bytes], float] = {}

    def use_work(self, work: int) -> None:
        """Count simulated requests as work, and report how much of the work is done."""
        self.work_left -= work
        used_frac = min(1 - self.work_left / self.most_work, 1.0)
        if used_frac >= self.reported_frac + PROGRESS_STEP_FRAC:
            self.reported_frac = used_frac
            self.progress(
                "the optimum: sizes that change at any moment, "
                f"{100 * used_frac:.0f} % of the work that they may take"
            )

    def is_over(self, reserved_frac: float = 0.0) -> bool:
        """Whether the work is used up except for `reserved_frac`, or the deadline has passed."""
        return self.work_left < reserved_frac * self.most_work or is_over(self.deadline)

    def lives_of_sizes(self, edges_s: Sequence[float], workers: Ints) -> Lives:
        """The lives of workers (T, P) in steps with these edges (T + 1,), and of those then free of cost."""
        lives = Lives()
        for c, levels in enumerate(self.levels):
            for k in levels:
                steps = np.flatnonzero(workers[:, c] >= k).tolist()
                lives[c, k] = [(edges_s[t], edges_s[t + 1]) for t in steps]
        return self.joined(lives)

    def joined(self, lives: Lives) -> Lives:
        """The lives in order, without empty ones.

        Two lives with no more than a start-up between them become one, and a life that begins within the
        first start-up begins at zero: neither costs more, because a worker is paid from its order on.
        """
        joined = Lives()
        for (c, k), own in lives.items():
            startup_s, merged = self.runs.terms.pools[c].start_s, list[Life]()
            for begin_s, end_s in sorted(own):
                first_s = 0.0 if begin_s < startup_s else begin_s
                last_s = min(end_s, self.last_s)
                if merged and first_s - merged[-1][1] <= startup_s:
                    merged[-1] = merged[-1][0], max(merged[-1][1], last_s)
                elif last_s > first_s:
                    merged.append((first_s, last_s))
            joined[c, k] = merged
        return joined

    def usd(self, lives: Lives) -> float:
        """The cost of the lives [USD] without draining and, by the second, without what is paid all day."""
        if self.runs.terms.is_by_unit:
            return billed_usd(self.runs.terms, self._paid_lives(lives))
        total_usd = 0.0
        for (c, k), own in lives.items():
            startup_s = self.runs.terms.pools[c].start_s
            paid_s = sum(end_s - max(begin_s - startup_s, 0.0) for begin_s, end_s in own)
            total_usd += self.usd_per_h[c][k] * paid_s / HOUR_S
        return total_usd

    def _paid_lives(self, lives: Lives) -> Iterator[tuple[int, float, float]]:
        """(pool, from, to) [s] of paid workers, if the worker that started last is given up first."""
        for c, sizes in enumerate(self.sizes):
            yield from [(c, 0.0, self.last_s)] * sizes[0]
        times_s, workers = self.timetable(lives)
        edges_s = [*times_s.tolist(), self.last_s]
        for (c, k), own in self.lives_of_sizes(edges_s, workers).items():
            for begin_s, end_s in own:
                from_s = max(begin_s - self.runs.terms.pools[c].start_s, 0.0)
                yield from [(c, from_s, end_s)] * self.workers_of(c, k)

    def workers_of(self, c: int, k: int) -> int:
        """How many workers are ready in a life of the k-th one of pool `c`: it, and those that are free."""
        place = bisect.bisect_left(self.sizes[c], k)
        return self.sizes[c][place] - self.sizes[c][place - 1]

    def timetable(self, lives: Lives) -> tuple[Floats, Ints]:
        """Times (N,), the first of which is 0, and the sizes (N, P) from each time on.

        Times are whole microseconds: on a slice's own clock, moments that differ by a rounding error become
        equal, and a timetable refuses equal times.
        """
        lives = {
            key: [(round(begin_s, 6), round(end_s, 6)) for begin_s, end_s in own]
            for key, own in lives.items()
        }
        ends_of_lives = (t for own in lives.values() for life in own for t in life)
        times_s = np.array(sorted({0.0, *(t for t in ends_of_lives if t < self.last_s)}))
        workers = np.tile([sizes[0] for sizes in self.sizes], (len(times_s), 1))
        for (c, k), own in lives.items():
            for begin_s, end_s in own:
                workers[(times_s >= begin_s) & (times_s < end_s), c] += self.workers_of(c, k)
        # The most of a pool is the same in all steps of the grid: row 0 stands for all.
        return times_s, np.minimum(workers, self.runs.terms.most[0])

    def as_day(self, lives: Lives) -> FinerDay:
        """The whole day with these lives."""
        times_s, workers = self.timetable(lives)
        self.use_work(len(self.runs.trace))
        return FinerDay(self.runs.simulate_timetable(times_s, workers), times_s, workers)

    def repaired_day(self, lives: Lives, most_usd: float) -> FinerDay | None:
        """The whole day with these lives, repaired while it misses windows.

        None if it still misses some, needs more GPUs than the stock has, or costs `most_usd` or more.
        """
        finer = self.as_day(lives)
        for _ in range(MOST_DAY_REPAIRS):
            day = finer.day
            if day.holds or day.usd >= most_usd or self.is_over():
                break
            # Where no window is missed, requests pile up at the end.
            window = day.missed[0] if day.missed else self.runs.window_count - 1
            longer = self._with_longer_lives(lives, window, DAY_GROWTHS, DAY_RUN_IN_FRAC * self.window_s)
            for changed in sorted([*longer, self._one_worker_more(lives, window)], key=self.usd):
                repaired = self.as_day(changed)
                if (len(repaired.day.missed), not repaired.day.holds) < (len(day.missed), not day.holds):
                    lives, finer = changed, repaired
                    break
            else:
                break
        if finer.day.holds and self.runs.window_count <= FEW_WINDOWS:
            finer = self._with_lower_bill(lives, finer)
        day = finer.day
        return finer if day.holds and day.fits and day.usd < most_usd else None

    def _with_lower_bill(self, lives: Lives, finer: FinerDay) -> FinerDay:
        """The day of these lives, `finer`, or one with a lower bill whose lives begin or end at other times.

        `usd` does not count draining, nor that the day may end earlier, so a longer life may cost less.
        """
        for step_s in (frac * self.window_s for frac in BILL_STEPS_FRAC):
            while not self.is_over():
                numbers = [(key, i) for key, own in lives.items() for i in range(len(own))]
                for (key, i), (begin_by, end_by) in itertools.product(numbers, BILL_MOVES):
                    begin_s, end_s = lives[key][i]
                    life = max(begin_s + begin_by * step_s, 0.0), min(end_s + end_by * step_s, self.last_s)
                    changed = self.replace_life(lives, key, i, [life])
                    moved = self.as_day(changed)
                    if moved.day.holds and moved.day.fits and moved.day.usd < finer.day.usd * (1 - ROUNDING):
                        lives, finer = changed, moved
                        break
                else:
                    break
        return finer

    def excess(self, lives: Lives, window: int) -> float:
        """How far a window is from holding; below 0 if it holds.

        For a line of the SLO this is (late requests - requests that may be late) / requests that may be late.
        If there are several lines, the largest excess counts.
        """
        # The slice begins earlier, so that the window has the queue that it would have in the day.
        runs, from_s = self.runs, max(self.window_edges_s[window] - self.run_in_s, 0.0)
        to_s = self.window_edges_s[window + 1] + runs.reach_s  # Later sizes no longer affect the window.
        nearby = {
            key: [life for life in own if life[1] > from_s - ROUNDED_S and life[0] < to_s + ROUNDED_S]
            for key, own in lives.items()
        }
        times_s, workers = self.timetable(nearby)
        # The sizes in force at `from_s`, and all later ones.
        first = int(np.searchsorted(times_s, from_s, "right")) - 1
        end = int(np.searchsorted(times_s, to_s))
        slice_times_s = np.append(from_s, times_s[first + 1 : end])
        key = window, slice_times_s.tobytes(), workers[first:end].tobytes()
        if key not in self._excesses:
            self._excesses[key] = self._simulated_excess(window, slice_times_s, workers[first:end])
        return self._excesses[key]

    def _simulated_excess(self, window: int, times_s: Floats, workers: Ints) -> float:
        """The `excess` of a window in the slice with these workers (N, P) from each of `times_s` (N,) on."""
        runs = self.runs
        day_slice = runs.simulate_slice(window, times_s, workers, begins_day=times_s[0] == 0)
        if day_slice is None:  # No request arrives, so none is late.
            return -1.0
        self.use_work(day_slice.requests + SLICE_WORK)
        verdicts = [
            (in_windows(day_slice.run.simulation, k, day_slice.window_s)[0], limit.percentile_frac)
            for k, limit in enumerate(runs.slo.limits)
        ]
        if (attained_frac := runs.slo.attainment_frac) is not None:
            attained = attained_in_windows(day_slice.run.simulation, runs.slo, day_slice.window_s)[0]
            verdicts.append((attained, attained_frac))
        excess = -1.0
        for verdict, needed_frac in verdicts:
            above = (needed_frac - verdict.kept_frac) / max(1 - needed_frac, LEAST_LATE_FRAC)
            # Percentiles of few requests are rounded, so the verdict, not `above`, decides the sign.
            excess = max(excess, min(above, -ROUNDING) if verdict.holds else max(above, ROUNDING))
        return excess

    def repaired(self, lives: Lives) -> Lives:
        """The lives, longer and with more workers until every window holds in its slice."""
        lives = self.joined(lives)
        for window in range(len(self.window_edges_s) - 1):
            for _ in range(MOST_REPAIRS):
                excess = self.excess(lives, window)
                if excess < 0 or self.is_over(DAY_REPAIRS_FRAC):
                    break
                usd, best, best_gain = self.usd(lives), None, 0.0
                for changed in self._with_longer_lives(lives, window):
                    saved = excess - max(self.excess(changed, window), SAFE_EXCESS)
                    saved_per_usd = saved / max(self.usd(changed) - usd, ROUNDING)
                    if saved > LEAST_SAVED_EXCESS and saved_per_usd > best_gain:
                        best, best_gain = changed, saved_per_usd
                # If no single change helps, every pool gets one more worker.
                lives = best or self._one_worker_more(lives, window)
        return lives

    def _with_longer_lives(
        self, lives: Lives, window: int, growths: Sequence[int] = GROWTHS, more_s: float = 0.0
    ) -> Iterator[Lives]:
        """The lives with one change near a window: a life begins earlier, ends later, or is new.

        "Near" reaches from twice the length of a new life, plus `more_s`, before the window to once that
        length after it. A life grows by GROW_FRAC times each of `growths`.
        """
        start_s, end_s = self.window_edges_s[window : window + 2]
        grow_s, new_s = GROW_FRAC * self.window_s, NEW_LIFE_FRAC * self.window_s
        near_s = start_s - 2 * new_s - more_s, end_s + new_s
        for key, own in lives.items():
            for i, (begin_s, until_s) in enumerate(own):
                for by_s in (grow_s * times for times in growths):
                    if near_s[0] < begin_s < near_s[1]:
                        yield self.replace_life(lives, key, i, [(max(begin_s - by_s, 0.0), until_s)])
                    if near_s[0] < until_s < near_s[1]:
                        yield self.replace_life(lives, key, i, [(begin_s, until_s + by_s)])
        for c, levels in enumerate(self.levels):
            for k in levels:
                own = lives.get((c, k), [])
                for at_s in np.arange(start_s, end_s, new_s).tolist():
                    if not any(begin_s <= at_s < until_s for begin_s, until_s in own):
                        yield self.joined(lives | {(c, k): [*own, (at_s, at_s + new_s)]})
                # While worker k has no life, one of a worker above it would give the same timetable.
                if not own:
                    break

    def _one_worker_more(self, lives: Lives, window: int) -> Lives:
        """The lives with one worker more of every pool through a window, where that is allowed."""
        start_s, end_s = self.window_edges_s[window : window + 2]
        life = (max(start_s - NEW_LIFE_FRAC * self.window_s, 0.0), end_s)
        more = dict(lives)
        for c, levels in enumerate(self.levels):
            for k in levels:
                if not any(first <= life[0] and last >= end_s for first, last in lives.get((c, k), [])):
                    more[c, k] = [*lives.get((c, k), []), life]
                    break
        return self.joined(more)

    def replace_life(self, lives: Lives, key: tuple[int, int], i: int, instead: list[Life]) -> Lives:
        """The lives with `instead` in place of life number `i` of one worker."""
        own = lives[key]
        return self.joined(lives | {key: [*own[:i], *instead, *own[i + 1 :]]})

    def holds(self, lives: Lives, from_s: float, to_s: float) -> bool:
        """Whether all windows hold that a change between these times may affect; False once the work is used
        up, except for that reserved for repairs in the whole day.
        """
        if self.is_over(DAY_REPAIRS_FRAC):
            return False
        edges_s = self.window_edges_s
        touched = [
            v
            for v in range(len(edges_s) - 1)
            if edges_s[v + 1] + self.runs.reach_s > from_s and edges_s[v] < to_s + self.lasts_s
        ]
        return all(self.excess(lives, v) < 0 for v in touched)

    def shortened(self, lives: Lives) -> Lives:
        """The lives, shortened, interrupted by a pause or dropped wherever all windows still hold."""
        lives = self.joined(lives)
        for _ in range(MOST_ROUNDS):
            before_usd = self.usd(lives)
            for key in sorted(lives, key=lambda pool_and_k: (-pool_and_k[1], pool_and_k[0])):
                i = 0
                while i < len(lives[key]):
                    begin_s, end_s = lives[key][i]
                    if self.holds(without := self.replace_life(lives, key, i, []), begin_s, end_s):
                        lives = without  # Now the next life has number i.
                        continue
                    for is_end in (True, False):
                        lives = self._with_shorter_life(lives, key, i, is_end=is_end)
                    lives = self._with_pause(lives, key, i)
                    i += 1
            if self.usd(lives) > before_usd * (1 - LEAST_SAVED_FRAC):
                break
        return lives

    def _with_shorter_life(self, lives: Lives, key: tuple[int, int], i: int, *, is_end: bool) -> Lives:
        """The lives with life `i` ending as early (or else beginning as late) as windows allow.

        Windows hold if the life is shortened by `low_s`, and `high_s` is too much. The stride to the next cut
        doubles while windows hold. After the first failure, cuts bisect the interval.
        """
        begin_s, end_s = lives[key][i]
        if not is_end and begin_s <= 0:
            return lives
        best, exact_s = lives, EXACT_FRAC * self.window_s
        low_s, high_s = 0.0, end_s - begin_s
        stride_s = exact_s
        while high_s - low_s > exact_s:
            by_s = low_s + stride_s if low_s + stride_s < high_s else (low_s + high_s) / 2
            life = (begin_s, end_s - by_s) if is_end else (begin_s + by_s, end_s)
            changed = self.replace_life(lives, key, i, [life])
            from_s, to_s = (life[1], end_s) if is_end else (begin_s, life[0])
            if self.holds(changed, from_s, to_s):
                best, low_s, stride_s = changed, by_s, 2 * stride_s
            else:
                high_s = by_s
        return best

    def _with_pause(self, lives: Lives, key: tuple[int, int], i: int) -> Lives:
        """The lives with a pause in life `i`, if windows then still hold.

        The pause is a little longer than a start-up: a worker that starts again is paid from its order on, so
        a shorter pause saves nothing.
        """
        begin_s, end_s = lives[key][i]
        step_s = NEW_LIFE_FRAC * self.window_s
        pause_s, whole_usd = self.runs.terms.pools[key[0]].start_s + step_s / 2, self.usd(lives)
        for at_s in np.arange(begin_s + step_s / 2, end_s - pause_s, step_s).tolist():
            paused = self.replace_life(lives, key, i, [(begin_s, at_s), (at_s + pause_s, end_s)])
            if self.usd(paused) < whole_usd and self.holds(paused, at_s, at_s + pause_s):
                return paused
        return lives
