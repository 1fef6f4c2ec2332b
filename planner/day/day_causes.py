"""Finds why a controller's day costs more than the optimum, and why it misses windows.

A bill is the sum of

    starting   workers that are paid and not ready yet
    draining   workers that were given up and finish their requests
    idle       GPUs without a worker on nodes that are sold whole
    rounding   started units (hours) that are paid to their end
    ready      workers that take requests

The difference between the ready workers of a day and those of the optimum is split, at each moment and for
each pool, into

    kept       workers that the optimum had at some time within the last hour, and does not have now
    unneeded   workers beyond the most that the optimum had within the last hour
    without    workers that the optimum has and this day has not (negative USD)

The first four parts of the bill are compared as they are. So all causes add up to the difference of both
bills. A missed window has one of three causes:

    too few    the controller ordered fewer workers than the optimum has
    too late   it ordered as many, but they were not ready yet
    as many    it had as many on average, but at other moments, or with a queue from the window before
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from planner.day.day_study import ControllerDay, DayAnswer, terms_of, workers_over_time
from planner.simulator.elastic import ElasticRun, Floats
from planner.solvers.pool_sizes import DayTerms, billed_usd
from planner.units import HOUR_S

# Mean numbers of workers in a window that differ by less count as equal; set by hand.
SAME_WORKERS = 0.01
RECENT_S = 3600.0  # The last hour of the docstring above.


@dataclass(frozen=True, slots=True)
class DayCauses:
    """What a day costs above the optimum by cause [USD], and the numbers of its missed windows by cause."""

    starting_usd: float
    draining_usd: float
    idle_usd: float
    rounding_usd: float
    kept_usd: float
    unneeded_usd: float
    without_usd: float
    too_few: tuple[int, ...]
    too_late: tuple[int, ...]
    as_many: tuple[int, ...]

    @property
    def usd(self) -> float:
        """The cost of the day above the optimum's."""
        parts = (self.starting_usd, self.draining_usd, self.idle_usd, self.rounding_usd)
        return sum(parts) + self.kept_usd + self.unneeded_usd + self.without_usd


def find_causes(answer: DayAnswer, row: ControllerDay) -> DayCauses | None:
    """Why a controller's day costs more than the optimum and misses windows; None without an optimum."""
    if answer.optimum is None:
        return None
    # Only the judged part of the trace was simulated in these days.
    terms = terms_of(replace(answer.question, trace=answer.judged))
    optimum = answer.optimum.day
    bill_usd = _bill_parts(terms, row.run) - _bill_parts(terms, optimum.run)
    ready_usd = _compare_ready(terms, row.run, optimum.run)
    by_cause = [*bill_usd.tolist(), *ready_usd.tolist(), *_missed_by_cause(row, optimum)]
    return DayCauses(*by_cause)  # In the order of its fields.


def _bill_parts(terms: DayTerms, run: ElasticRun) -> Floats:
    """The cost of starting workers, draining workers, idle GPUs and rounding up (4,) [USD]."""
    prices, starting_usd, draining_usd, paid_usd = terms.prices(), 0.0, 0.0, 0.0
    lives = [(span.pool, span.requested_s, span.gone_s) for span in run.spans]
    for span in run.spans:
        price_usd_per_s = float(prices[span.pool]) / HOUR_S
        given_up_s = min(span.given_up_s, span.gone_s)
        starting_usd += price_usd_per_s * (min(span.ready_s, given_up_s) - span.requested_s)
        draining_usd += price_usd_per_s * (span.gone_s - given_up_s)
        paid_usd += price_usd_per_s * (span.gone_s - span.requested_s)
    by_second_usd = billed_usd(replace(terms, unit_s=0.0), lives)
    rounding_usd = billed_usd(terms, lives) - by_second_usd
    idle_usd = by_second_usd - paid_usd  # The cost of whole nodes beyond that of their workers.
    return np.array([starting_usd, draining_usd, idle_usd, rounding_usd])


def _ready_changes(run: ElasticRun, pool: int) -> tuple[Floats, npt.NDArray[np.int64]]:
    """The times [s] at which the number of a pool's ready workers changes, and the number from each time on.
    The first time is minus infinity, with 0 workers.
    """
    changes: dict[float, int] = {-np.inf: 0}
    for span in run.spans:
        until_s = min(span.given_up_s, span.gone_s)
        if span.pool == pool and span.ready_s < until_s:
            changes[span.ready_s] = changes.get(span.ready_s, 0) + 1
            changes[until_s] = changes.get(until_s, 0) - 1
    times_s = sorted(changes)
    return np.array(times_s), np.cumsum([changes[time_s] for time_s in times_s])


def _compare_ready(terms: DayTerms, run: ElasticRun, optimum: ElasticRun) -> Floats:
    """The cost of ready workers that were kept, unneeded and done without (3,) [USD]."""
    total_usd = np.zeros(3)
    for pool, price_usd_per_h in enumerate(terms.prices().tolist()):
        own_s, own_ready = _ready_changes(run, pool)
        optimum_s, optimum_ready = _ready_changes(optimum, pool)
        # Between two of these times nothing changes, the most workers of the last hour included.
        times_s = np.unique(np.concatenate((own_s, optimum_s, optimum_s + RECENT_S)))
        times_s = times_s[np.isfinite(times_s)]
        if len(times_s) < 2:  # Neither day had a ready worker in this pool.
            continue
        begins_s = times_s[:-1]
        ready = own_ready[np.searchsorted(own_s, begins_s, "right") - 1]
        end = np.searchsorted(optimum_s, begins_s, "right")
        first = np.searchsorted(optimum_s, begins_s - RECENT_S, "right")
        # Changes `first` to `end - 1` fall into the last hour. Change `first - 1` set the number with which
        # the hour began, so it counts too.
        most_recent = np.array(
            [optimum_ready[max(i - 1, 0) : j].max() for i, j in zip(first, end, strict=True)]
        )
        needed = optimum_ready[end - 1]
        surplus = np.maximum(ready - needed, 0)
        recently_needed = np.minimum(surplus, most_recent - needed)
        worker_usd = price_usd_per_h * np.diff(times_s) / HOUR_S
        total_usd += [
            worker_usd @ recently_needed,
            worker_usd @ (surplus - recently_needed),
            worker_usd @ np.minimum(ready - needed, 0),
        ]
    return total_usd


def _missed_by_cause(
    row: ControllerDay, optimum: ControllerDay
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The numbers of the missed windows by cause, in the order of the module's docstring."""
    pools = row.run.requested_sizes.shape[1]
    # Mean numbers of ready workers, by pool and window.
    ready = workers_over_time(row.run, pools, row.edges_s).ready
    needed = workers_over_time(optimum.run, pools, row.edges_s).ready
    too_few, too_late, as_many = list[int](), list[int](), list[int]()
    for v, window in enumerate(row.windows):
        if window.holds:
            continue
        is_short = ready[:, v] < needed[:, v] - SAME_WORKERS
        # Orders within the window, and the last order before the window, which is in force as it begins.
        last = int(np.searchsorted(row.run.requested_s, window.end_s))
        first = max(int(np.searchsorted(row.run.requested_s, window.start_s, "right")) - 1, 0)
        ordered = row.run.requested_sizes[first : max(last, first + 1)].max(axis=0)
        # `needed` is a mean, orders are whole: only an order below `needed` rounded down is too few.
        is_too_few = is_short & (ordered < np.floor(needed[:, v] + SAME_WORKERS))
        if is_too_few.any():
            too_few.append(v)
        elif is_short.any():
            too_late.append(v)
        else:
            as_many.append(v)
    return tuple(too_few), tuple(too_late), tuple(as_many)


# Headings of `cause_rows`: the controller, its cost above the optimum, then the fields of DayCauses in order.
CAUSE_COLUMNS = (
    *("Controller", "Above the optimum", "Starting", "Draining", "Idle GPUs of nodes"),
    *("Started hours", "Kept after the need", "Never needed", "Done without", "Too few requested"),
    *("Too late", "As many workers"),
)


def cause_rows(answer: DayAnswer, rows: Sequence[ControllerDay]) -> list[tuple[str, ...]]:
    """A row of CAUSE_COLUMNS for each controller: USD, then missed windows. Empty without an optimum."""
    table_rows = []
    for row in rows:
        if (causes := find_causes(answer, row)) is None:
            return []  # No optimum is known.
        by_cause = [getattr(causes, cause.name) for cause in fields(causes)]
        cells = [str(len(value)) if isinstance(value, tuple) else change_text(value) for value in by_cause]
        table_rows.append((row.name, change_text(causes.usd), *cells))
    return table_rows


def change_text(usd: float) -> str:
    """USD with a sign, as in "+1.67"; "0.00" for less than half a cent."""
    return f"{usd:+,.2f}" if abs(usd) >= 0.005 else "0.00"


OWN_CONTROLLER = "fleetplan"  # The controller of this program, beside those of others.


def cause_columns(answer: DayAnswer) -> list[dict[str, str]]:
    """The causes as a table for a terminal, with a row for each cause.

    Its columns are the winner, the controller `fleetplan` and the fleet that stands all day. A cause that
    explains neither cost nor windows has no row.
    """
    shown = dict.fromkeys((answer.winner.name, OWN_CONTROLLER, answer.static.name))
    rows = [row for name in shown for row in answer.rows if row.name == name]
    by_controller = cause_rows(answer, rows)
    # Transposed to a row for each cause, without the row of the controllers' names.
    by_cause = list(zip(CAUSE_COLUMNS, *by_controller, strict=True))[1:]
    head = ("cause", *(row.name for row in rows))
    return [
        dict(zip(head, (cause, *cells), strict=True))
        for cause, *cells in by_cause
        if any(cell not in ("0", "0.00") for cell in cells)
    ]
