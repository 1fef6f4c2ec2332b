"""Computes what more of each limit that several LLMs share would save, and by how much a limit must be raised
if not all LLMs fit.

A query finds the fleets of all LLMs, with one worker type per pool, that cost least under some limits, or
that use least of one limit. All queries use the same designs (level0/cheapest.py), so each fleet is simulated
once for all of them. The least sufficient amount of a limit takes one query, which minimises the use of that
limit under all other limits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from planner.documents.facts import Binding, MoreSaves, MoreSavesNothing
from planner.domain import COST, GPUS, OWNED, POWER, ROUNDING, FleetLimit
from planner.errors import Change, InfeasibleError, ways_text
from planner.search.level0.cheapest import CheapestChoice, SharedLimit, cheapest_designs
from planner.search.level0.designs import FleetDesign
from planner.search.oracle.fleet_counts import Counts, is_within, workers_of
from planner.search.oracle.work_clock import ended_by
from planner.search.problem.options import OBJECTIVE_UNITS, PRICE_TIES, objective_of_worker
from planner.search.problem.plan_problem import Problem
from planner.solvers.master import FleetLimits
from planner.solvers.whole_nodes import enough_for

CHEAPER_FRAC = 1e-6  # Two costs that differ by a smaller share may differ by rounding errors alone.


@dataclass(frozen=True, slots=True)
class SharedLimitQueries:
    """Queries over the designs of all LLMs (`llms` has those of each LLM). A query ends early when
    `out_of_time`; its answer is then not exact.
    """

    llms: Sequence[Sequence[FleetDesign]]
    out_of_time: Callable[[], bool]
    progress: Callable[[str], None]

    def find_cheapest(self, rows: Sequence[SharedLimit], *, below_value: float) -> CheapestChoice:
        """The fleets of the least objective under these limits, if it is less than `below_value`."""
        return cheapest_designs(
            self.llms, rows, below_value=below_value, out_of_time=self.out_of_time, progress=self.progress
        )

    def find_least(self, rows: Sequence[SharedLimit], row: SharedLimit) -> CheapestChoice:
        """The fleets that use the least of the limit `row` under the limits `rows`."""
        return cheapest_designs(
            self.llms,
            rows,
            weigh=row.use,
            out_of_time=self.out_of_time,
            progress=self.progress,
            unit="" if row.limit is None else row.limit.unit,
        )


def price_limits(
    queries: SharedLimitQueries, rows: Sequence[SharedLimit], best: CheapestChoice, objective: str
) -> tuple[Binding, ...]:
    """For each limit: its least amount that allows cheaper fleets than `best` while the other limits stay,
    and what these fleets save, in the objective's unit.
    """
    bindings: list[Binding] = []
    unit = OBJECTIVE_UNITS[objective]

    def value_of(shared: CheapestChoice) -> float:
        """The objective without the price that breaks ties between GPUs or Watts (`with_price_tie`)."""
        if objective not in PRICE_TIES:
            return shared.value
        return sum(objective_of_worker(option.type, objective) * n for option, n in chosen_workers(shared))

    value = value_of(best)
    below = value if objective in PRICE_TIES else value * (1 - CHEAPER_FRAC)

    for row in rows:
        assert row.limit is not None  # Only a row made within a query has no limit of the question.
        queries.progress(f"what more {row.limit.gpu or row.limit.name} would save")
        others = [other for other in rows if other is not row]
        without = queries.find_cheapest(others, below_value=below)
        if without.best is None:  # Even without this limit no fleets are cheaper.
            bindings.append(MoreSavesNothing(row.limit, is_known=without.is_exact))
            continue
        objective_below = SharedLimit(None, below, lambda option: option.objective)
        least_use = queries.find_least([*others, objective_below], row)
        # If the time ran out before fleets were found, take what the cheapest fleets use. It is enough, and
        # may be too much.
        change = _limit_change(rows, row, without if least_use.best is None else least_use)
        more = replace(row, amount=row.amount + change.enough - change.present)
        raised = queries.find_cheapest([*others, more], below_value=below)
        if raised.best is not None:
            saves, saves_most = value - value_of(raised), value - value_of(without)
            amounts = change.present, change.enough
            bindings.append(
                MoreSaves(row.limit, *amounts, saves, saves_most, unit, is_least=least_use.is_exact)
            )
    return tuple(bindings)


def fit_together(limits: FleetLimits, fleets: Iterable[Counts | None]) -> bool:
    """Whether these fleets are within the limits together. With `by_gpu` they share nodes, else each fleet
    has nodes of its own. None stands for an LLM without a fleet yet.
    """
    known = [counts for counts in fleets if counts is not None]
    if limits.by_gpu:
        return is_within(limits, (pool for counts in known for pool in counts))
    return all(
        sum(limits.used(limit, workers_of(counts)) for counts in known) <= amount * (1 + ROUNDING)
        for limit, amount in limits.rows()
    )


def require_shared_nodes(limits: FleetLimits, llms: int) -> None:
    """Raises InfeasibleError if each of several LLMs has nodes of its own (`by_gpu` is False). The queries
    count nodes that LLMs share, so they cannot say with how much more of a limit such LLMs fit.
    """
    if llms > 1 and not limits.by_gpu:
        raise InfeasibleError(
            "capacity: no fleets of all LLMs, each on nodes of its own, were found within the limits",
            kind="capacity",
            constraint="stock",
            is_proved=False,
        )


def subtract_fleet(limits: FleetLimits, counts: Counts) -> FleetLimits:
    """The limits that a fleet leaves to others. Each amount is first raised by the share ROUNDING, so that a
    fleet that uses all of it leaves 0 and not a little less.
    """
    workers = [(option.type, count) for option, count in counts]
    remaining = {
        limit: amount * (1 + ROUNDING) - limits.used(limit, workers) for limit, amount in limits.rows()
    }
    stock = {
        gpu: None if count is None else max(int(remaining[FleetLimit("stock", gpu)]), 0)
        for gpu, count in limits.stock.items()
    }
    gpus = None if limits.gpus is None else max(int(remaining[GPUS]), 0)
    other_workers = (*limits.other_workers, *workers) if limits.by_gpu else ()
    return FleetLimits(stock, remaining.get(POWER), remaining.get(COST), gpus, limits.by_gpu, other_workers)


def limits_beside(limits: FleetLimits, fleets: Sequence[Counts], k: int) -> FleetLimits:
    """What all fleets but the k-th leave of the limits."""
    others = (*fleets[:k], *fleets[k + 1 :])
    return subtract_fleet(limits, tuple(pool for counts in others for pool in counts))


def serve_in_turn(
    llms: int, limits: FleetLimits, serve: Callable[[int, FleetLimits], Counts | None]
) -> list[Counts] | None:
    """Fleets of `llms` LLMs, served one after another, each within the limits that those before it leave;
    None if no order serves all.

    `serve` returns a fleet of the k-th LLM within the given limits, or None. The orders are the rotations of
    the LLMs: each LLM is served first in one of them.
    """
    for first in range(llms):
        remaining = limits
        fleets: dict[int, Counts] = {}
        for k in (*range(first, llms), *range(first)):
            counts = serve(k, remaining)
            if counts is None or not fit_together(limits, (*fleets.values(), counts)):
                break
            fleets[k] = counts
            remaining = subtract_fleet(remaining, counts)
        else:
            return [fleets[k] for k in range(llms)]
    return None


def problem_within(problem: Problem, remaining: FleetLimits) -> Problem:
    """The same problem within the limits `remaining`, which also replace those of its task."""
    owned = {gpu: remaining.stock[gpu + OWNED] or 0 for gpu in problem.task.owned}
    rented = {gpu: remaining.stock.get(gpu, 0) for gpu in problem.task.stock}
    task = replace(
        problem.task,
        stock={gpu: None if n is None else n + owned.get(gpu, 0) for gpu, n in rented.items()},
        owned=owned,
        power_limit_w=remaining.power_w,
        cost_limit_usd_per_h=remaining.cost_usd_per_h,
        gpu_limit=remaining.gpus,
    )
    return replace(problem, task=task, limits=remaining)


def infeasible_error(
    queries: SharedLimitQueries, rows: Sequence[SharedLimit], *, is_exact: bool, is_proved: bool
) -> InfeasibleError:
    """The error that names the shared limits, and the least increase of each alone with which the LLMs fit.

    `is_exact` says whether the search ended before its time; `is_proved` whether it covered all fleets, and
    not only those with one worker type per pool.
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
    """The least increase of each limit alone with which the LLMs fit; if no single limit is enough, the
    increases of several together. Empty if the time ran out before either was known.
    """
    ways: list[list[Change]] = []
    is_exact = True
    for row in rows:
        assert row.limit is not None
        queries.progress(f"no fleets within the limits; looking for the least {row.limit.name} that would do")
        least_use = queries.find_least([other for other in rows if other is not row], row)
        is_exact &= least_use.is_exact
        if least_use.best is not None:
            ways.append([_limit_change(rows, row, least_use)])
    if not ways and is_exact:  # No single limit is enough, so the cheapest fleets without any limit count.
        unlimited = queries.find_cheapest((), below_value=float("inf"))
        exceeded = [row for row in rows if _amount_used(row, unlimited) > row.amount * (1 + CHEAPER_FRAC)]
        ways.append([_limit_change(rows, row, unlimited) for row in exceeded])
    return ways


def _amount_used(row: SharedLimit, shared: CheapestChoice) -> float:
    """How much of a limit the best fleets of a query use; 0 if it found none."""
    if row.total is not None:
        return row.total(chosen_workers(shared))
    return sum(row.use(option) * count for option, count in chosen_workers(shared))


def chosen_workers(shared: CheapestChoice) -> Counts:
    """The pools of the best fleets of a query, of all LLMs."""
    return tuple(pool for design, vector in shared.best or () for pool in design.counts(vector))


def _limit_change(rows: Sequence[SharedLimit], row: SharedLimit, shared: CheapestChoice) -> Change:
    """The change of the limit `row` of these rows, as slo.yaml writes it, with which the best fleets of a
    query fit.
    """
    assert row.limit is not None
    of_owned = FleetLimit("stock", row.limit.gpu + OWNED)
    owned = next((int(other.amount) for other in rows if other.limit == of_owned), 0)
    enough = enough_for(row.limit, _amount_used(row, shared), workers_of(chosen_workers(shared)), owned)
    return Change(row.limit.name, row.amount + owned, enough, row.limit.unit)
