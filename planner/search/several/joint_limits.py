"""What the limits that several LLMs share cost: what more of each would save, and how much more it takes if
not all LLMs fit within them.

Every query goes to the same designs (level0/cheapest.py), so simulations of one query serve all. The least of
a limit is found by minimising its use under the other limits, which needs no step width and no bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from planner.documents.facts import Binding, MoreSaves, MoreSavesNothing
from planner.domain import COST, GPUS, OWNED, POWER, ROUNDING, FleetLimit
from planner.errors import Change, InfeasibleError, ways_text
from planner.search.level0.cheapest import Cheapest, SharedLimit, Weigh, cheapest
from planner.search.level0.designs import Design
from planner.search.oracle.deterministic_parallel import side_by_side
from planner.search.oracle.fleet_counts import Counts, is_within
from planner.search.oracle.work_clock import ended_by
from planner.search.problem.options import OBJECTIVE_UNITS, whole_gpus
from planner.search.problem.plan_problem import Problem
from planner.solvers.master import FleetLimits

CHEAPER_FRAC = 1e-6  # A saving of a smaller share is rounding, the solver's included.


@dataclass(frozen=True, slots=True)
class SharedLimitQueries:
    """Queries to the designs of all LLMs, as long as there is time."""

    llms: Sequence[Sequence[Design]]
    out_of_time: Callable[[], bool]
    progress: Callable[[str], None]

    def find_cheapest(self, rows: Sequence[SharedLimit], *, below: float) -> Cheapest:
        """The least objective under these limits, if that is below a value."""
        return cheapest(
            self.llms,
            rows,
            below=below,
            run=side_by_side,
            out_of_time=self.out_of_time,
            progress=self.progress,
        )

    def find_least(self, rows: Sequence[SharedLimit], weigh: Weigh) -> Cheapest:
        """The least of another weight of the fleets than the objective."""
        return cheapest(
            self.llms,
            rows,
            weigh=weigh,
            run=side_by_side,
            out_of_time=self.out_of_time,
            progress=self.progress,
        )


def price_limits(
    queries: SharedLimitQueries, rows: Sequence[SharedLimit], value: float, unit: str
) -> tuple[Binding, ...]:
    """For each limit the least increase of it alone that allows fleets below `value`, and what these save. Of
    GPUs, whose values count prices too (`Problem.with_tie_break`), only whole ones are savings.

    This covers fleets with one worker type per pool, as do all queries here.
    """
    bindings: list[Binding] = []
    is_of_gpus = unit == OBJECTIVE_UNITS["gpus"]
    below = whole_gpus(value) if is_of_gpus else value * (1 - CHEAPER_FRAC)

    def saves_at(least: float) -> float:
        return whole_gpus(value) - whole_gpus(least) if is_of_gpus else value - least

    for row in rows:
        assert row.limit is not None
        queries.progress(f"what more {row.limit.gpu or row.limit.name} would save")
        others = [other for other in rows if other is not row]
        lifted = queries.find_cheapest(others, below=below)  # Without this limit: the most that is saved.
        if lifted.best is None:
            bindings.append(MoreSavesNothing(row.limit, is_known=lifted.is_exact))
            continue
        least = queries.find_least(
            [*others, SharedLimit(None, below, lambda option: option.objective)], row.use
        )
        amount = least.value if least.best is not None else _amount_used(row, lifted)
        then = queries.find_cheapest([*others, replace(row, amount=amount)], below=below)
        if then.best is not None:
            saves, saves_most = saves_at(then.value), saves_at(lifted.value)
            bindings.append(
                MoreSaves(row.limit, row.amount, amount, saves, saves_most, unit, is_least=least.is_exact)
            )
    return tuple(bindings)


def fit_together(limits: FleetLimits, fleets: Iterable[Counts | None]) -> bool:
    """Whether these fleets are within the limits together."""
    return is_within(limits, (pool for counts in fleets for pool in counts or ()))


def subtract_fleet(limits: FleetLimits, counts: Counts) -> FleetLimits:
    """What a fleet leaves of the limits. Fractional limits keep a share ROUNDING more, against rounding."""
    workers = [(option.type, count) for option, count in counts]
    left = {limit: amount * (1 + ROUNDING) - limits.used(limit, workers) for limit, amount in limits.rows()}
    stock = {
        gpu: None if count is None else max(int(left[FleetLimit("stock", gpu)]), 0)
        for gpu, count in limits.stock.items()
    }
    gpus = None if limits.gpus is None else max(int(left[GPUS]), 0)
    return FleetLimits(stock, left.get(POWER), left.get(COST), gpus, limits.by_gpu)


def limits_beside(limits: FleetLimits, fleets: Sequence[Counts], k: int) -> FleetLimits:
    """What all fleets but the k-th leave of the limits."""
    return subtract_fleet(
        limits, tuple(each for other, counts in enumerate(fleets) if other != k for each in counts)
    )


def serve_in_turn(
    llms: int, limits: FleetLimits, serve: Callable[[int, FleetLimits], Counts | None]
) -> list[Counts] | None:
    """The fleets of `llms` LLMs, served one after another on what is left, beginning with each LLM until all
    are served once; None where none of these orders serves all.

    `serve` returns a fleet of the k-th LLM within the given limits, or None.
    """
    for first in range(llms):
        left = limits
        taken: dict[int, Counts] = {}
        for k in (*range(first, llms), *range(first)):
            if (counts := serve(k, left)) is None:
                break
            taken[k] = counts
            left = subtract_fleet(left, counts)
        else:
            return [taken[k] for k in range(llms)]
    return None


def problem_within(problem: Problem, left: FleetLimits) -> Problem:
    """The same problem within other limits."""
    task = replace(
        problem.task,
        stock={gpu: left.stock.get(gpu, left.stock.get(gpu + OWNED)) for gpu in problem.task.stock},
        owned={gpu: left.stock[gpu + OWNED] or 0 for gpu in problem.task.owned},
        power_limit_w=left.power_w,
        cost_limit_usd_per_h=left.cost_usd_per_h,
        gpu_limit=left.gpus,
    )
    return replace(problem, task=task, limits=left)


def infeasible_error(
    queries: SharedLimitQueries, rows: Sequence[SharedLimit], *, is_exact: bool, is_proved: bool
) -> InfeasibleError:
    """The error that names the binding limits, and the least increase of each alone that would do.

    Only fleets with one worker type per pool were searched, so infeasibility is seldom proved.
    """
    limits = [row.limit.name for row in rows if row.limit is not None]
    names = ", ".join(limits)
    if not is_exact:
        return InfeasibleError(
            f"no fleets of all LLMs within the limits they share ({names}) were found: {ended_by()} "
            "came first; raise --time-limit",
            kind="capacity",
            constraint=limits,
            relaxation="unknown: raise --time-limit",
            is_proved=False,
        )
    ways = ways_to_fit(queries, rows)
    if not ways:
        return InfeasibleError(
            f"capacity: the LLMs do not fit together within the limits they share ({names}), and the time "
            "limit left no room to find out what would do; raise --time-limit",
            kind="capacity",
            constraint=limits,
            relaxation="unknown: raise --time-limit",
            is_proved=is_proved,
        )
    return InfeasibleError(
        "capacity: each LLM can be served alone, but no fleets of one worker type per pool serve all of them "
        f"within the limits they share. Raise {ways_text(ways)}",
        kind="capacity",
        constraint=[change.limit for way in ways for change in way],
        ways=ways,
        is_proved=is_proved,
    )


def ways_to_fit(queries: SharedLimitQueries, rows: Sequence[SharedLimit]) -> list[list[Change]]:
    """The least increase of each limit alone that would do, or else the increase of all that would do
    together; no ways where that is not known.
    """
    ways: list[list[Change]] = []
    is_exact = True
    for row in rows:
        assert row.limit is not None
        queries.progress(f"infeasible; looking for the least {row.limit.name} that would do")
        cheapest_use = queries.find_least([other for other in rows if other is not row], row.use)
        is_exact &= cheapest_use.is_exact
        if cheapest_use.best is not None:
            ways.append([_limit_change(row, cheapest_use.value)])
    if not ways and is_exact:  # No single limit is enough, so all are lifted.
        free = queries.find_cheapest((), below=float("inf"))
        over = [row for row in rows if _amount_used(row, free) > row.amount * (1 + CHEAPER_FRAC)]
        ways.append([_limit_change(row, _amount_used(row, free)) for row in over])
    return ways


def _amount_used(row: SharedLimit, shared: Cheapest) -> float:
    """How much of a limit the best choice uses, 0 if there is none."""
    chosen = [design.counts(vector) for design, vector in shared.best or ()]
    return sum(row.use(option) * count for counts in chosen for option, count in counts)


def _limit_change(row: SharedLimit, amount: float) -> Change:
    """The change of one limit to `amount`, as an error reports it."""
    assert row.limit is not None
    return Change(row.limit.name, row.amount, amount, row.limit.unit)
