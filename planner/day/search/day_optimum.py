"""The cheapest sequence of pool sizes that keeps an SLO through a day, with the whole day known beforehand.

The method is logic-based Benders decomposition. The master (solvers/pool_sizes.py) proposes the cheapest
sequence that no cut forbids, the simulator runs the day with it, and each window that fails gives a cut. A
cut is a list of (step, pool, size): in at least one of them the pool must have more workers than `size`.
There are three sources of cuts:

    least      the least size of each pool with which a window holds, with the most workers of all other pools
               and in all other steps
    explained  a window fails with sizes x, and also with the most workers until a few steps before it, and x
               from there on. So these few steps explain the failure. Each size in them is raised as far as
               the window still fails: at least one size must be larger
    excluded   a sequence that was simulated; or a sequence with the same ready workers, because a worker
               stays in gaps shorter than a start-up (`pool_sizes.ready_workers_at_no_cost`)

A sequence that fails is repaired with more workers in the windows that fail, so that a good sequence is known
early. The search ends where the master's bound reaches the best bill. The bound rests on one assumption,
which other modules call MORE too:

    MORE       more workers, and less earlier work, never hurt: cuts forbid sequences that were not simulated

If few sequences cost less than the best, they are all simulated, and nothing is assumed (`is_exact`).

Sizes change only at the moments of a grid. A controller that changes sizes at other moments may cost less,
but not less than `DayOptimum.proved` (solvers/paid_work.py).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn, Protocol

import numpy as np

from planner.day.search.day_runs import DayRun
from planner.errors import InfeasibleError, PlannerError
from planner.search.oracle.work_clock import ended_by, is_over, solver_limit_s
from planner.simulator.elastic import Ints
from planner.solvers import pool_sizes
from planner.solvers.paid_work import LeastPaid
from planner.units import HOUR_S

# The limits on work below let a day of a few hundred thousand requests end within the default time limit.
# The costs of all sequences are computed where a grid has at most this many.
MOST_SEQUENCES = 50_000
# The sequences that cost less than the best are all simulated where there are at most this many.
MOST_CHEAPER = 5_000
# After the first sequence that holds, others of the same cost in the master are simulated, with at most this
# many requests together. Their simulated bills may be lower, because their workers drain faster.
MOST_TIED_REQUESTS = 2_000_000
# The steps that explain a failure begin one of these numbers of steps before the window. The smallest number
# that suffices is taken, because the cut with the fewest steps forbids the most sequences.
LAG_STEPS = (0, 1, 2, 4, 8)
# A repair adds workers from this many steps before the window on: earlier ones hardly help the window.
REPAIR_STEPS = 2
# A sequence is repaired at most this many times; the master then proposes another one.
MOST_REPAIRS = 8
# Where whole hours are paid, gaps between two lives of a worker are filled. Whether that is cheaper depends
# on how long a worker takes to drain, which only the simulation shows, so both of these times are tried.
FILL_DRAINS_S = (30.0, 120.0)
# The bound and the best bill count as equal if they differ by less than this share: twice the share by which
# the master's solver may violate constraints (`pool_sizes.TOLERANCE`).
SAME_FRAC = 2e-6
# Rounding makes two simulated bills, and two costs by `pool_sizes.cost_usd`, differ by at most this.
BILL_ROUNDING_FRAC, COST_ROUNDING_FRAC = 1e-12, 1e-9
# The time limit for one solution of the master on the wall clock: at least and at most.
LEAST_SOLVE_S, LONGEST_SOLVE_S = 1.0, 120.0


class DaySimulations(Protocol):
    """The simulations that the search needs, which day/search/day_runs.py provides.

    `workers` are pool sizes (T, P): of each step of the grid and each pool.
    """

    @property
    def terms(self) -> pool_sizes.DayTerms: ...
    @property
    def window_count(self) -> int: ...
    # The steps that overlap with a window, and the steps after it that may still decide it.
    def own_steps(self, window: int) -> range: ...
    def later_steps(self, window: int) -> range: ...
    # The pools that serve the LLM of a window, and whether no window of this LLM is earlier.
    def pools_of(self, window: int) -> range: ...
    def is_first(self, window: int) -> bool: ...
    @property
    def request_count(self) -> int: ...
    def least_paid(self) -> LeastPaid: ...
    def simulate_day(self, workers: Ints) -> DayRun: ...
    # Whether a window is missed with these workers from step `first` on, and the most until then.
    def misses_window(self, workers: Ints, window: int, first: int) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class DayOptimum:
    """The cheapest sequence found, with its simulated day, and bounds on the cost of others.

    No sequence on this grid costs less than `bound_usd`, which rests on MORE unless `is_exact`: then all
    sequences that cost less were simulated. `proved` bounds every controller, at every moment.
    """

    best: DayRun
    bound_usd: float
    proved: LeastPaid
    is_exact: bool
    cuts: tuple[pool_sizes.Cut, ...]

    @property
    def gap_frac(self) -> float:
        """The largest share of the bill by which another sequence on this grid may cost less."""
        return max(1 - self.bound_usd / self.best.usd, 0.0) if self.best.usd > 0 else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether no other sequence on the grid costs less, up to rounding."""
        return self.gap_frac <= SAME_FRAC

    @property
    def status(self) -> str:
        """What is known of the sequence, in a few words for the report."""
        if not self.is_optimal:
            return (
                "of sizes that change at steps of `every` alone none are known that cost less, and none cost "
                f"over {100 * self.gap_frac:.2g} % less"
            )
        exactly = "" if self.is_exact else ", if more workers never hurt"
        return f"the least of all sizes that change at steps of `every` alone{exactly}"


@dataclass(slots=True, eq=False)
class _DaySearch:
    """The state of the search: cuts, excluded sequences, the best day, and the bound [USD].

    `deadline` is a time of the search's clock (work_clock.py).
    """

    runs: DaySimulations
    deadline: float
    cuts: list[pool_sizes.Cut] = field(default_factory=list)
    excluded: list[Ints] = field(default_factory=list)
    best: DayRun | None = None
    bound_usd: float = 0.0

    @property
    def terms(self) -> pool_sizes.DayTerms:
        """The terms of the day: grid, pools, prices and billing."""
        return self.runs.terms

    def out_of_time(self) -> bool:
        """Whether the deadline has passed."""
        return is_over(self.deadline)

    def simulate_day(self, workers: Ints) -> DayRun:
        """Simulate a day. It becomes `best` if it holds, fits the stock and costs less than `best`."""
        day = self.runs.simulate_day(workers)
        is_allowed = day.fits and pool_sizes.is_within_stock(self.terms, workers)
        if day.holds and is_allowed and day.usd < self.best_usd * (1 - BILL_ROUNDING_FRAC):
            self.best = day
        return day

    @property
    def best_usd(self) -> float:
        """What the best day costs; infinite if none is known."""
        return math.inf if self.best is None else self.best.usd

    def is_closed(self) -> bool:
        """Whether the bound has reached the best bill, so that no cheaper sequence can be found."""
        return self.bound_usd >= self.best_usd * (1 - SAME_FRAC)


def cheapest_day(
    runs: DaySimulations,
    *,
    cuts: Sequence[pool_sizes.Cut] = (),
    known: Sequence[Ints] = (),
    deadline: float = math.inf,
    progress: Callable[[str], None] = lambda _: None,
) -> DayOptimum:
    """Search for the cheapest sequence, until no cheaper one can exist or until the `deadline` on the
    search's clock (work_clock.py).

    The search begins with these `cuts`, and simulates the `known` sequences (T, P) first. If few sequences
    cost less than the best (MOST_SEQUENCES and MOST_CHEAPER), all are simulated at the end. `progress` is
    called with a line of text. Raises InfeasibleError if no sequence was found and either a window fails with
    the most workers of every pool or no sequence keeps all cuts within the stock; PlannerError if none was
    found in time.
    """
    search = _DaySearch(runs, deadline, list(cuts))
    for workers in known:
        search.simulate_day(workers)
    if not search.simulate_day(runs.terms.most).holds:
        # MORE is not always true, so fewer workers may still hold. Cuts rest on MORE, so they are dropped.
        # Simulating all sequences does not.
        search.cuts.clear()
        is_exact = _simulate_all_cheaper(search)
        if search.best is None:
            _raise_most_fails(search)
        return _optimum_of(search, is_exact=is_exact)
    _cut_least_sizes(search)
    if runs.terms.is_by_unit:  # What the least sizes cost in whole units is a first bound.
        search.bound_usd = pool_sizes.units_usd(runs.terms, pool_sizes.least_sizes(runs.terms, search.cuts))
    progress(f"the optimum: {search.bound_usd:.2f} USD or more")
    ties = 0  # Sequences that held. All but the first cost the same in the master (MOST_TIED_REQUESTS).
    while ties * runs.request_count <= MOST_TIED_REQUESTS and (sizes := _next_sequence(search)) is not None:
        day = search.simulate_day(sizes)
        _fill_paid_units(search, sizes)
        failing = f"{len(day.missed)} of {runs.window_count} windows fail"
        best_text = f"to {search.best_usd:.2f} USD" if math.isfinite(search.best_usd) else "USD or more"
        progress(f"the optimum: {search.bound_usd:.2f} {best_text}; of the last sizes {failing}")
        if day.holds:
            search.excluded.append(sizes)
            ties += 1
            continue
        _repair_sequence(search, sizes, _add_cuts(search, sizes, day))
    is_exact = _simulate_all_cheaper(search)
    if search.best is None:
        _raise_none_found(search)
    return _optimum_of(search, is_exact=is_exact)


def _optimum_of(search: _DaySearch, *, is_exact: bool) -> DayOptimum:
    """The result of a search that ended with a best day."""
    proved, best = search.runs.least_paid(), search.best
    assert best is not None
    bound_usd = best.usd if is_exact else min(max(search.bound_usd, proved.usd), best.usd)
    if not is_exact and search.bound_usd > best.usd * (1 + SAME_FRAC):
        bound_usd = proved.usd  # A day that costs less than the bound refutes MORE.
    return DayOptimum(best, bound_usd, proved, is_exact, tuple(search.cuts))


def _next_sequence(search: _DaySearch) -> Ints | None:
    """The cheapest sequence that may hold and was not simulated; None where there is none or no time."""
    while not search.out_of_time() and not search.is_closed():
        limit_s = solver_limit_s(LONGEST_SOLVE_S, LEAST_SOLVE_S)
        solution = pool_sizes.cheapest_sizes(search.terms, search.cuts, search.excluded, time_limit_s=limit_s)
        search.bound_usd = max(search.bound_usd, solution.bound_usd)
        if solution.workers is None:
            return None
        workers = pool_sizes.ready_workers_at_no_cost(search.terms, solution.workers)
        # Both have the same ready workers, so the master need not propose `solution.workers` again.
        if not (workers == solution.workers).all():
            search.excluded.append(solution.workers)
        if not search.is_closed() and not any((workers == each).all() for each in search.excluded):
            return workers
    return None


def _raise_none_found(search: _DaySearch) -> NoReturn:
    """Raise the error that the search found no sequence that holds: InfeasibleError if there is none."""
    if search.bound_usd == math.inf:  # The master has no solution: none in the stock keeps all cuts.
        stock = ", ".join(f"{count} of {gpu}" for gpu, count in search.terms.stock.items())
        raise InfeasibleError(
            f"no sequence of pool sizes keeps the SLO within the stock ({stock}); allow more GPUs, or relax "
            "the SLO",
            kind="capacity",
            constraint="stock",
            relaxation="more GPUs",
        )
    raise PlannerError(
        f"no sequence of pool sizes that holds was found: {ended_by()} came first; raise --time-limit"
    )


def _raise_most_fails(search: _DaySearch) -> NoReturn:
    """Raise the error that not even the most workers hold."""
    day = search.simulate_day(search.terms.most)
    most = ", ".join(str(pool.most) for pool in search.terms.pools)
    what = "requests pile up, or some are never served"
    if day.missed:
        first = day.missed[0] + 1
        what = f"{len(day.missed)} of {search.runs.window_count} windows fail, the first is number {first}"
    raise InfeasibleError(
        f"with the most workers of every pool ({most}) all day long the SLO is missed: "
        f"{what}; allow more workers, or relax the SLO",
        kind="capacity",
        constraint="most",
        relaxation="more workers",
    )


def _cut_least_sizes(search: _DaySearch) -> None:
    """Add the cuts `least` for each window and pool, and simulate the sequence of all least sizes.

    A window of several steps has a cut for all steps together, and a cut for each step alone.
    """
    runs, floor = search.runs, search.terms.least  # The property makes a new array, so it may be changed.
    for c, pool in enumerate(search.terms.pools):
        guess = pool.least  # Neighbouring windows need similar sizes: each search begins at the last result.
        for window in (each for each in range(runs.window_count) if c in runs.pools_of(each)):
            own = runs.own_steps(window)
            single_steps = [range(t, t + 1) for t in own] if len(own) > 1 else []
            for steps in (own, *single_steps):
                if search.out_of_time():
                    return
                least = least_that_holds(
                    partial(misses_with_size, runs, window, steps, c), pool.least, pool.most, guess
                )
                if steps is own:
                    guess = least
                    floor[own.start : own.stop, c] = np.maximum(floor[own.start : own.stop, c], least)
                if least > pool.least:
                    search.cuts.append(tuple((t, c, least - 1) for t in steps))
    floor = pool_sizes.ready_workers_at_no_cost(search.terms, floor)
    day = search.simulate_day(floor)
    if not day.holds:
        _repair_sequence(search, floor, _add_cuts(search, floor, day))


def misses_with_size(runs: DaySimulations, window: int, steps: range, c: int, size: int) -> bool:
    """Whether a window is missed with `size` workers of pool `c` in these steps and the most elsewhere."""
    workers = runs.terms.most  # The property makes a new array, so it may be changed.
    workers[steps.start : steps.stop, c] = size
    return runs.misses_window(workers, window, runs.own_steps(window).start)


def least_that_holds(fails: Callable[[int], bool], low: int, high: int, guess: int) -> int:
    """The least number from `low` to `high` that does not fail; `high` is assumed to hold.

    The search begins just below `guess`, because two tries confirm a right guess, and moves away with
    doubling strides until the least number is enclosed.
    """
    low -= 1  # From here on, sizes up to `low` fail.
    size, stride = min(max(guess - 1, low + 1), high - 1), 1
    while high - low > 1:
        if fails(size):
            low, size = size, size + stride
        else:
            high, size = size, size - stride
        stride *= 2
        if not low < size < high:
            size = (low + high) // 2
    return high


def _first_misses(runs: DaySimulations, missed: Sequence[int]) -> list[int]:
    """The first window of each run of consecutive missed windows. The later windows of a run may be missed
    only because of the first, so they get no cut yet.
    """
    return [window for window in missed if runs.is_first(window) or window - 1 not in missed]


def explain_miss(runs: DaySimulations, workers: Ints, window: int, deadline: float) -> pool_sizes.Cut:
    """The cut of a window that is missed with these workers.

    To forbid as many sequences as possible, each size in the cut is raised to the largest with which the
    window is still missed. After the `deadline` sizes stay as they are; the cut is then valid but weaker.
    """
    terms = runs.terms
    own, later = runs.own_steps(window), runs.later_steps(window)
    starts = sorted({max(own.start - lag, 0) for lag in LAG_STEPS}, reverse=True)
    # The latest start for which the most workers before it, and these workers from then on, miss the window.
    first = next((start for start in starts if runs.misses_window(workers, window, start)), None)
    # Pools of other LLMs do not serve this window, so they have their most workers and are in no cut.
    raised = terms.most
    raised[:, runs.pools_of(window)] = workers[:, runs.pools_of(window)]
    # If the window fails only in the whole day, any step up to its end may be the cause.
    if first is None:
        return _cut_of(terms, raised, range(later.stop))
    raised[later.stop :] = terms.most[later.stop :]
    steps_in_turn = [*range(first, own.start), *later, *own]
    for t, c in itertools.product(steps_in_turn, runs.pools_of(window)):
        size, most = int(raised[t, c]), terms.pools[c].most

        def still_fails(more: int, t: int = t, c: int = c) -> bool:
            raised[t, c] = more  # If the window still fails with `most`, the size stays `most`.
            return runs.misses_window(raised, window, first)

        if is_over(deadline):
            break
        if size < most and not still_fails(most):
            largest_failing = least_that_holds(still_fails, size + 1, most, size + 1) - 1
            raised[t, c] = largest_failing
    # If the window fails with all these sizes raised to the most, only earlier steps can explain it.
    return _cut_of(terms, raised, range(first, later.stop)) or _cut_of(terms, workers, range(later.stop))


def _cut_of(terms: pool_sizes.DayTerms, workers: Ints, steps: range) -> pool_sizes.Cut:
    """The cut that at least one of these sizes must be exceeded, without sizes that are the most already."""
    return tuple(
        (t, c, int(workers[t, c]))
        for t in steps
        for c in range(len(terms.pools))
        if workers[t, c] < terms.pools[c].most
    )


def _add_cuts(search: _DaySearch, workers: Ints, day: DayRun) -> list[tuple[int, pool_sizes.Cut]]:
    """Add the cuts of the windows that are missed with these workers, and return them by window."""
    cuts = [
        (window, explain_miss(search.runs, workers, window, search.deadline))
        for window in _first_misses(search.runs, day.missed)
    ]
    cuts = [(window, cut) for window, cut in cuts if cut]
    search.cuts += [cut for _, cut in cuts]
    # A day may fail without a missed window (backlog, request never served): the sequence is excluded.
    if not cuts:
        search.excluded.append(workers)
    return cuts


def _repair_sequence(search: _DaySearch, workers: Ints, cuts: Sequence[tuple[int, pool_sizes.Cut]]) -> None:
    """Add workers where windows fail until none does, or the sequence costs no less than the best."""
    terms = search.terms
    for _ in range(MOST_REPAIRS):
        workers = workers.copy()
        for window, cut in cuts:
            _repair_window(search, workers, window, cut)
        if not cuts:  # No window is to blame (see `_add_cuts`), so all sizes grow.
            workers = np.minimum(workers + 1, terms.most)
        workers = pool_sizes.ready_workers_at_no_cost(terms, workers)
        if search.out_of_time() or pool_sizes.cost_usd(terms, workers) >= search.best_usd:
            return
        day = search.simulate_day(workers)
        if day.holds:
            return
        cuts = _add_cuts(search, workers, day)


def _repair_window(search: _DaySearch, workers: Ints, window: int, cut: pool_sizes.Cut) -> None:
    """Raise sizes in `workers` until a window holds, in place.

    The sizes of its cut are raised one at a time, the cheapest first. If no single one suffices, all sizes of
    steps near the window are raised by one worker.
    """
    terms = search.terms
    if any(workers[t, c] > size for t, c, size in cut):
        return  # The repair of another window has raised one of these sizes already.
    own = search.runs.own_steps(window)
    nearby = [(t, c, size) for t, c, size in cut if t >= own.start - REPAIR_STEPS] or list(cut)
    hours, pools = np.diff(terms.edges_s) / HOUR_S, terms.pools
    first = max(min(t for t, _, _ in cut), own.start - LAG_STEPS[-1])

    def usd(row: tuple[int, int, int]) -> float:
        """The cost of raising this pool above the size in the cut, during this step."""
        t, c, size = row
        return float((size + 1 - workers[t, c]) * hours[t] * pools[c].usd_per_h)

    # The only size of a cut must be raised in any case, so it needs no try.
    by_cost = sorted(nearby, key=usd) if len(cut) > 1 else []
    for t, c, size in by_cost:
        more = workers.copy()
        more[t, c] = size + 1
        if search.out_of_time():
            return
        if not search.runs.misses_window(more, window, first):
            workers[t, c] = size + 1
            return
    for t, c, size in nearby:
        workers[t, c] = size + 1


def _fill_paid_units(search: _DaySearch, workers: Ints) -> None:
    """Where whole units (hours) are paid, simulate sequences with their gaps filled: a worker stays through a
    gap if one long life costs no more than two lives.

    This is done for `workers`, and for the sequence that would be the cheapest within the cuts if billing
    were by the second.
    """
    if not search.terms.is_by_unit or search.out_of_time():
        return
    by_second = replace(search.terms, unit_s=0.0)
    limit_s = solver_limit_s(LONGEST_SOLVE_S, LEAST_SOLVE_S)
    cheapest = pool_sizes.cheapest_sizes(by_second, search.cuts, time_limit_s=limit_s).workers
    for each in [workers] if cheapest is None else [workers, cheapest]:
        for drain_s in FILL_DRAINS_S:
            more = pool_sizes.ready_workers_at_no_cost(
                search.terms, pool_sizes.fill_paid_units(search.terms, each, drain_s)
            )
            if search.out_of_time():
                return
            day = search.simulate_day(more)
            if not day.holds:
                _repair_sequence(search, more, _add_cuts(search, more, day))


def _simulate_all_cheaper(search: _DaySearch) -> bool:
    """Simulate all sequences that may cost less than the best; True if all were simulated.

    Only the largest of the sequences with the same ready workers is simulated
    (`pool_sizes.ready_workers_at_no_cost`).
    """
    terms = search.terms
    steps, _ = terms.shape
    ranges = [range(pool.least, pool.most + 1) for pool in terms.pools] * steps
    if math.prod(len(each) for each in ranges) > MOST_SEQUENCES:
        return False
    cheaper: dict[bytes, tuple[float, Ints]] = {}
    for each in itertools.product(*ranges):
        workers = np.array(each, np.int64).reshape(terms.shape)
        usd = pool_sizes.cost_usd(terms, workers)
        if (
            usd < search.best_usd * (1 - COST_ROUNDING_FRAC)
            and (pool_sizes.ready_workers_at_no_cost(terms, workers) == workers).all()
        ):
            cheaper[workers.tobytes()] = usd, workers
    if len(cheaper) > MOST_CHEAPER:
        return False
    # The dearest first: they are the likeliest to hold, and each that holds lowers the best bill.
    for usd, workers in sorted(cheaper.values(), key=lambda each: -each[0]):
        if search.out_of_time():
            return False
        is_cheaper = usd < search.best_usd * (1 - COST_ROUNDING_FRAC)
        if is_cheaper and pool_sizes.is_within_stock(terms, workers):
            search.simulate_day(workers)
    return True
