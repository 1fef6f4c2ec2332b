"""Solves the model of reserved_schedule.py window by window, at prices for what the windows have in common.

Two things tie the windows to each other: GPUs that are reserved for all windows, and workers that start
because the window before has fewer. Without these ties every window is a small integer program, which is
solved in milliseconds.

relaxation   The model without integers, tightened by mixed-integer rounding (Nemhauser, Wolsey: Integer and
             Combinatorial Optimization, 1988, II.1.7). Let z_j be the workers of kind j, f_j the rate of one,
             and b the needed rate. From sum_j f_j z_j >= b with whole z >= 0 follows, for every divisor d:
                 sum_j (floor(f_j/d) + min(frac(f_j/d) / frac(b/d), 1)) z_j >= ceil(b/d)
             Such rows for the divisors of `_divisors` are added and the relaxation is solved again, as long
             as the solution violates some of them (at most ROUNDING_ROUNDS times).
prices       The duals of the relaxation: pi_gt is the price of a reserved GPU g in window t, and sum_t pi_gt
             its price in all of them; mu_kt is the worth of a worker of kind k that is already there when
             window t begins, at most the cost of its start.
bound        By Lagrange's relaxation: the windows are cut into parts of L windows. Each part chooses, at
             these prices, reserved GPUs of its own and how many workers are there before it. The optima of
             the parts sum up to no more than the optimum of the model.
schedule     The reserved GPUs are those of the relaxation, rounded. Windows are solved in order: each starts
             from the workers of the one before it, and the workers that it leaves to the next are worth mu.
             Then 2 L windows at a time are solved again, with the windows on both sides fixed.

L is 1, 2, 4, ... until bound and schedule are near enough. At L = T the only part is the whole model.

Letters: K kinds of workers, G of GPUs, T windows, R rows of a window.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import sparse

from planner.domain import ROUNDING
from planner.solvers.backend import Point, Program, minimise_program, solve_relaxation

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# These numbers decide how near bound and schedule come to each other, and how long that takes; any numbers
# give a valid bound and schedule. They were set by hand.
ROUNDING_ROUNDS = 8  # The relaxation is tightened at most this often.
ROWS_PER_ROUND = 3  # In each round it gets at most this many rows per LLM and window.
LEAST_VIOLATION = 1e-3  # A row is added if the solution is farther than this from satisfying it.
DIVISOR_PARTS = 8  # The divisors d are the rates divided by 1 to this number, and differences of rates.
SAME_RATE_FRAC = 1e-3  # Two rates that differ by less make no divisor of their own.
LEAST_FRACTION = 1e-4  # If the fraction of b/d is below this, b/d counts as whole.
PART_GAP_SHARE = 0.04  # Parts of the windows are solved to this share of the gap that the caller allows.
RATE_TOLERANCE = 5e-7  # Needed rates are lowered by this share, so that rounding errors refuse no exact fit.
LEAST_NORM = 1e-9  # Stands for the norm of a row of zeros, so that no row is divided by 0.


@dataclass(frozen=True, slots=True, eq=False)
class Cover:
    """The rates that an LLM needs: sum_j rate_j z_jt >= needed_t in every window t. Its n kinds of workers j
    are the `columns` of the model.
    """

    columns: npt.NDArray[np.intp]
    rate_rps: Floats  # (n,)
    needed_rps: Floats  # (T,)


@dataclass(frozen=True, slots=True, eq=False)
class SchedulePrices:
    """`reserved` is pi (G, T), the price of a reserved GPU in a window; `present` is mu (K, T), the worth of
    a worker that is already there when the window begins.
    """

    reserved: Floats
    present: Floats


class WindowsModel:
    """The model in arrays. A window has K columns for its workers and G for its on-demand GPUs; the G columns
    for the reserved GPUs are shared by all windows.

    `rows` (R, K + 2 G) >= `least` (R,) hold in every window, beside the covers. `cost` (K + G,) is that of a
    worker or an on-demand GPU in a window, `reserved_cost` (G,) that of a reserved GPU in all windows,
    `start_cost` (K,) that of a start. `most` (K + 2 G,) are upper limits.
    """

    def __init__(
        self,
        covers: Sequence[Cover],
        rows: Floats,
        least: Floats,
        cost: Floats,
        reserved_cost: Floats,
        start_cost: Floats,
        most: Floats,
        windows: int,
    ) -> None:
        self.covers, self.cost, self.reserved_cost = covers, cost, reserved_cost
        self.start_cost, self.most, self.windows = start_cost, most, windows
        # Counts of columns: K, the K + G that each window has for itself, and the G that all windows share.
        self.kinds, self.local, self.shared = len(start_cost), len(cost), len(reserved_cost)
        # For each window its rows, as pairs: the factors (K + 2 G,), and the least that they must reach.
        self.rows = [list(zip(rows, least.tolist(), strict=True)) for _ in range(self.windows)]
        for cover in covers:
            for t, needed_rps in enumerate(cover.needed_rps):
                if needed_rps > 0:
                    # A worker counts for at most the whole need, which tightens the relaxation.
                    shares = np.minimum(cover.rate_rps / needed_rps, 1.0)
                    self._add_row(t, cover, shares, 1 - RATE_TOLERANCE)

    def _add_row(self, t: int, cover: Cover, factors: Floats, least: float) -> None:
        """Add a row to window t: the workers of the cover's kinds, times `factors` (n,), sum up to `least` or
        more.
        """
        row = np.zeros(len(self.most))
        row[cover.columns] = factors
        self.rows[t].append((row, least))

    def program(
        self,
        part: Sequence[int],
        prices: SchedulePrices,
        *,
        before: Ints | None = None,
        after: Ints | None = None,
        reserved: Ints | None = None,
    ) -> Program:
        """The integer program of the consecutive windows `part`; if these are all windows, the first follows
        the last. The counts (K,) before and after the part, and the reserved GPUs (G,), are fixed where they
        are given, else free at their prices.

        Columns: workers and on-demand GPUs window by window, starts into each window and into the one after,
        reserved GPUs. Rows: those of the windows in order, then those of the starts.
        """
        length, local, kinds = len(part), self.local, self.kinds
        is_ring = length == self.windows  # The part is all windows.
        rows_of_window = [np.array([row for row, _ in self.rows[t]]) for t in part]
        least = [amount for t in part for _, amount in self.rows[t]]
        cost = np.tile(self.cost, (length, 1))
        # Starts into a window are at least its workers less those before it: start_t - z_t + z_(t-1) >= 0.
        changes = sparse.diags([-1.0, 1.0], [0, -1], shape=(length + 1, length), format="lil")
        least_started = np.zeros((length + 1, kinds))
        if is_ring:
            changes[0, length - 1] += 1.0
        elif before is None:  # Each worker is taken over from the window before, at its worth.
            cost[0, :kinds] += prices.present[:, part[0]]
        else:
            least_started[0] = -before
        if after is not None:
            least_started[-1] = after
        elif not is_ring:  # What each worker is worth to the window after.
            cost[-1, :kinds] -= prices.present[:, (part[-1] + 1) % self.windows]
        # At a free end of the part there are no rows of starts: the prices have the worth of its workers.
        is_tied = np.ones((length + 1, kinds), bool)
        is_tied[0], is_tied[-1] = is_ring or before is not None, after is not None
        # Columns: workers and GPUs on demand by window | starts | reserved GPUs, which all windows share.
        in_windows = sparse.block_diag([rows[:, :local] for rows in rows_of_window])
        of_reserved = sparse.csr_matrix(np.vstack([rows[:, local:] for rows in rows_of_window]))
        of_changes = sparse.kron(changes, sparse.eye(kinds, local))
        matrix = sparse.bmat(
            [[in_windows, None, of_reserved], [of_changes, sparse.eye(least_started.size), None]],
            format="csr",
        )
        low = np.zeros(matrix.shape[1])
        high = np.concatenate(
            (np.tile(self.most[:local], length), np.tile(self.most[:kinds], length + 1), self.most[local:])
        )
        if reserved is not None:
            low[-self.shared :] = high[-self.shared :] = reserved
        is_row = np.concatenate((np.ones(len(least), bool), is_tied.ravel()))
        return Program(
            cost=np.concatenate(
                (
                    cost.ravel(),
                    np.tile(self.start_cost, length + 1),
                    prices.reserved[:, list(part)].sum(axis=1),
                )
            ),
            matrix=matrix[is_row],
            least=np.concatenate((least, least_started.ravel()))[is_row],
            low=low,
            high=high,
            is_integer=np.concatenate(
                (
                    np.tile(np.arange(local) < kinds, length),
                    np.zeros(least_started.size, bool),  # Starts are whole where workers are.
                    np.ones(self.shared, bool),
                )
            ),
        )

    def split(self, x: Floats, length: int) -> tuple[Floats, Floats]:
        """Workers (K, length) and reserved GPUs (G,) of a solution for `length` windows."""
        local = x[: length * self.local].reshape(length, -1)
        return local[:, : self.kinds].T, x[-self.shared :]

    def true_prices(self) -> SchedulePrices:
        """The prices of all windows together: what a reserved GPU costs is spread evenly over them."""
        even = np.repeat(self.reserved_cost[:, None] / self.windows, self.windows, axis=1)
        return SchedulePrices(even, np.zeros((self.kinds, self.windows)))

    def prices(self, duals: Floats) -> SchedulePrices:
        """Prices from the dual values of the program of all windows.

        If the windows' prices of a reserved GPU do not sum up to its cost, the difference is spread evenly
        over the windows. `present` is kept between 0 and the cost of a start. The program of a part has no
        rows for starts at its free ends, and its optimum is a bound only at such prices.
        """
        ends = np.cumsum([len(rows) for rows in self.rows])
        duals_by_window = np.split(duals[: ends[-1]], ends[:-1])
        reserved_by_window = []
        for window_duals, rows in zip(duals_by_window, self.rows, strict=True):
            use_of_reserved = np.array([row[-self.shared :] for row, _ in rows])
            reserved_by_window.append(window_duals @ use_of_reserved)
        reserved = np.column_stack(reserved_by_window)
        reserved += (self.reserved_cost - reserved.sum(axis=1))[:, None] / self.windows
        present = duals[ends[-1] :].reshape(self.windows, self.kinds).T
        return SchedulePrices(reserved, np.clip(present, 0.0, self.start_cost[:, None]))

    def tighten(self, workers: Floats) -> bool:
        """Add the rounded covers that the solution `workers` (K, T) violates most, at most ROWS_PER_ROUND per
        cover and window; returns whether any was added.
        """
        any_added = False
        for cover in self.covers:
            rounded = [_round_cover(cover, divisor) for divisor in _divisors(cover.rate_rps)]
            rows, least = np.array([row for row, _ in rounded]), np.array([amount for _, amount in rounded])
            # For each divisor d and window t: what the solution reaches, and its distance from the row.
            reached = np.einsum("dtn,nt->dt", rows, workers[cover.columns])
            missing = (least - reached) / np.linalg.norm(rows, axis=2).clip(LEAST_NORM)
            for t in range(self.windows):
                for d in np.argsort(-missing[:, t], kind="stable")[:ROWS_PER_ROUND]:
                    if missing[d, t] > LEAST_VIOLATION:
                        self._add_row(t, cover, rows[d, t], float(least[d, t]))
                        any_added = True
        return any_added


def _divisors(rates: Floats) -> list[float]:
    """The divisors d [requests/s] by which a cover is rounded: its workers' rates divided by 1 to
    DIVISOR_PARTS, and the differences of two rates.
    """
    distinct = sorted({float(rate) for rate in rates if rate > 0})
    pairs = itertools.combinations(distinct, 2)
    differences = {more - less for less, more in pairs if more - less > SAME_RATE_FRAC * more}
    return sorted({rate / n for rate in distinct for n in range(1, DIVISOR_PARTS + 1)} | differences)


def _round_cover(cover: Cover, divisor: float) -> tuple[Floats, Floats]:
    """Rows (T, n) and the amounts (T,) that they must reach, by the formula of mixed-integer rounding above.
    In windows where b / d is whole, rounding gains nothing; there the row is all zeros and its amount 0.
    """
    needed = cover.needed_rps * (1 - RATE_TOLERANCE) / divisor  # b / d
    needed_fraction = needed - np.floor(needed)
    whole = np.floor(cover.rate_rps / divisor + ROUNDING)  # floor(f_j / d)
    fraction = np.clip(cover.rate_rps / divisor - whole, 0.0, 1.0)
    is_useful = needed_fraction > LEAST_FRACTION
    rows = whole + np.minimum(fraction / np.where(is_useful, needed_fraction, 1.0)[:, None], 1.0)
    return np.where(is_useful[:, None], rows, 0.0), np.where(is_useful, np.ceil(needed), 0.0)


Proposal = tuple[Ints, Ints]
"""Workers (K, T) of all windows or (K, L) of a part, and reserved GPUs (G,)."""


def search_schedule(
    model: WindowsModel, cost_of: Callable[[Ints], float], gap_frac: float, budget: float, deadline: float
) -> tuple[float, Ints | None]:
    """A lower bound on the cost, infinite if there is no schedule; and the counts (K, T) of workers of the
    best schedule found, None if none was found.

    `cost_of` gives the cost of such counts, in the unit of the model's costs. It is infinite if they violate
    a constraint that ties several windows, which `model` leaves out. The search ends when a schedule within
    the `budget` costs at most `gap_frac` more than the bound, when the bound exceeds the budget, or at
    `deadline`, a time of `time.monotonic` [s].
    """
    bound, relaxed_reserved, prices = solve_windows_relaxation(model, deadline)
    parts = _PricedParts(model, prices, PART_GAP_SHARE * gap_frac, deadline)
    best: Proposal | None = None
    cost = math.inf

    def keep_if_cheaper(proposal: Proposal | None) -> None:
        nonlocal best, cost
        if proposal is not None and (value := cost_of(proposal[0])) < cost:
            best, cost = proposal, value

    def is_done() -> bool:
        is_closed = best is not None and cost <= budget and bound >= cost * (1 - gap_frac - ROUNDING)
        return is_closed or bound > budget or bound == math.inf or time.monotonic() > deadline

    if relaxed_reserved is not None:
        for proposal in parts.first_schedules(relaxed_reserved):
            keep_if_cheaper(proposal)
            if best is not None:
                break
    length = 1
    while not is_done():
        parts_bound, solutions = parts.solve_parts_apart(length)
        bound = max(bound, parts_bound)
        if length == model.windows:  # The only part is the whole model.
            keep_if_cheaper(solutions[0] if solutions else None)
            break
        if best is not None and not is_done():
            keep_if_cheaper(parts.improve_parts(2 * length, best))
        length = min(2 * length, model.windows)
    return bound, None if best is None else best[0]


def solve_windows_relaxation(
    model: WindowsModel, deadline: float
) -> tuple[float, Floats | None, SchedulePrices]:
    """Solve the relaxation, and tighten it while that changes its solution.

    Returns its bound, minus infinity if nothing was proved; its reserved GPUs (G,); and the prices. If the
    first relaxation has no solution, or none before `deadline`, these are None and `true_prices`.
    """
    prices, reserved, bound = model.true_prices(), None, -math.inf
    for _ in range(ROUNDING_ROUNDS):
        program = model.program(range(model.windows), model.true_prices())
        point = solve_relaxation(program, time_limit_s=deadline - time.monotonic())
        bound = max(bound, point.bound)
        if point.x is None or point.duals is None:
            break
        workers, reserved = model.split(point.x, model.windows)
        prices = model.prices(point.duals)
        if not model.tighten(workers):
            break
    return bound, reserved, prices


@dataclass(frozen=True, slots=True, eq=False)
class _PricedParts:
    """Solves parts of the windows at these prices, each to `gap_frac` of its own optimum. `deadline` is a
    time of `time.monotonic` [s].
    """

    model: WindowsModel
    prices: SchedulePrices
    gap_frac: float
    deadline: float

    def first_schedules(self, relaxed_reserved: Floats) -> Iterator[Proposal | None]:
        """A schedule with the relaxation's reserved GPUs, rounded; then a schedule that reserves only GPUs
        that are not sold on demand. None in place of a schedule that was not found.
        """
        is_on_demand = self.model.most[self.model.kinds : self.model.local] > 0
        needed = np.zeros(len(relaxed_reserved), np.int64)
        # A GPU that is not sold on demand must be reserved: as many as any window takes when it is solved
        # alone.
        if not is_on_demand.all():
            _, solutions = self.solve_parts_apart(1)
            needed = np.max([needed, *(reserved for _, reserved in solutions)], axis=0)
        rounded = np.round(relaxed_reserved).astype(np.int64)
        yield self.schedule_in_order(np.where(is_on_demand, rounded, needed))
        yield self.schedule_in_order(np.where(is_on_demand, 0, needed))

    def solve_parts_apart(self, length: int) -> tuple[float, list[Proposal]]:
        """Solve parts of `length` windows, each by itself, at the prices. Returns the sum of their bounds,
        which is a bound for all windows, and their solutions; an empty list if one of them has no solution.
        """
        bound = 0.0
        proposals: list[Proposal] = []
        windows_of_parts = self._windows_of_parts(length)
        for part in windows_of_parts:
            point = self._solve(self.model.program(part, self.prices))
            bound += point.bound
            # Infinity: this part, and so the model, has no solution. Minus infinity: nothing was proved in
            # time.
            if not math.isfinite(bound):
                break
            if point.x is not None:
                workers, reserved = self.model.split(np.round(point.x), len(part))
                proposals.append((workers.astype(np.int64), reserved.astype(np.int64)))
        return bound, proposals if len(proposals) == len(windows_of_parts) else []

    def schedule_in_order(self, reserved: Ints) -> Proposal | None:
        """A schedule with these reserved GPUs (G,), solved window after window. Each window starts from the
        counts of the one before, and the last is followed by the first. None if a window was not solved.
        """
        model = self.model
        counts = np.zeros((model.kinds, model.windows), np.int64)
        for t in range(model.windows):
            before = counts[:, t - 1] if t > 0 else None
            after = counts[:, 0] if t == model.windows - 1 else None
            program = model.program([t], self.prices, before=before, after=after, reserved=reserved)
            point = self._solve(program)
            if point.x is None:
                return None
            counts[:, [t]] = model.split(point.x, 1)[0]
        return counts, reserved

    def improve_parts(self, length: int, best: Proposal) -> Proposal | None:
        """The schedule `best` with parts of `length` windows solved again, one after the other, each between
        fixed counts on both sides. If a part is not solved, it and those after it stay as they are.
        None if `length` is all windows or more.
        """
        model, counts, reserved = self.model, best[0].copy(), best[1]
        if length >= model.windows:
            return None
        # Parts are shifted by half their length. So the step from the last window to the first, where
        # `schedule_in_order` chose last, is usually inside a part.
        for part in self._windows_of_parts(length, first=length // 2):
            before, after = counts[:, part[0] - 1], counts[:, (part[-1] + 1) % model.windows]
            program = model.program(part, self.prices, before=before, after=after, reserved=reserved)
            point = self._solve(program)
            if point.x is None:
                break
            counts[:, part] = model.split(point.x, len(part))[0]
        return counts, reserved

    def _windows_of_parts(self, length: int, first: int = 0) -> list[list[int]]:
        """All windows in parts of `length`, beginning with window `first`; after the last window comes window
        0. The last part may be shorter.
        """
        windows = self.model.windows
        order = [(first + t) % windows for t in range(windows)]
        return [order[i : i + length] for i in range(0, windows, length)]

    def _solve(self, program: Program) -> Point:
        """Solve a program to `gap_frac`, or until the deadline."""
        return minimise_program(
            program, time_limit_s=self.deadline - time.monotonic(), gap_frac=self.gap_frac
        )
