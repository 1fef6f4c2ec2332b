"""Explains why no fleet was found: which limits bind, and the smallest relaxation with which a fleet holds
(keeps the SLO in its simulation).

"Limits" are those of the SLO [s] in the first half of this module, and those of the fleet (stock, money,
power) from `infeasible` on. Looser limits of the SLO that are kept: least_limits.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.documents.task import Objective
from planner.domain import COST, GPUS, OWNED, POWER, ROUNDING, FleetLimit, row_of
from planner.errors import Change, InfeasibleError, LeastWorker, ways_text
from planner.fleet import WorkerType
from planner.search.level0.level0_search import Level0, search_level0
from planner.search.mixed.bounds import lower_bound
from planner.search.mixed.least_limits import (
    MOST_RELAXED,
    all_floors,
    find_attained_limits,
    find_least_limits,
    floors_to_relax,
    rounded_up,
    ways_of_limits_text,
)
from planner.search.mixed.mixed_fleets import MixedFleets, search_mixed_fleets
from planner.search.oracle.fleet_counts import Counts, workers_of
from planner.search.oracle.work_clock import ended_by, is_time_limit_reached
from planner.search.problem.build_problem import OutOfReachError
from planner.search.problem.idle_limits import Floor, requests_to_judge, unreachable_limits
from planner.search.problem.plan_problem import Problem
from planner.search.problem.prefix_hits import PrefixHits
from planner.search.problem.reasons import also_left_out, reason_text
from planner.solvers.master import FleetLimits
from planner.solvers.whole_nodes import enough_for, node_of
from planner.units import HOURS_PER_MONTH, count_text, show_amount, show_beside, show_s

# Numbers for which no measurement is named are set by hand.
# Looser limits of the SLO that a fleet keeps are looked for only on traffic of at most this many requests.
# They took 5 CPU seconds on 10,000 requests of agents.
MOST_PROBED_REQUESTS = 50_000
MOST_REASONS = 3  # If the search proved nothing, the error names this many reasons for which fleets failed.
# If the bound on the work is this many times a limit, the error names the bound, and no fleet is searched
# that would be enough: that took minutes for 900,000 requests that need 40 times the 16 GPUs in stock.
FAR_BEYOND = 4.0


def _fleet_found_text(problem: Problem) -> str:
    """The end of a sentence that proposes changes: that a fleet was found with them. Scenarios were not
    simulated, so production may need more.
    """
    on_paper = "" if problem.task.safety is None else " on paper; production may take more"
    return f", with which a fleet was found{on_paper}"


def _per_month_text(ways: Sequence[Sequence[Change]]) -> str:
    """The present budget and the one that would be enough, per month, because users often think in months.
    Empty unless the budget is all that changes.
    """
    changes = [change for way in ways for change in way]
    if len(changes) != 1 or changes[0].unit != "USD/h":
        return ""
    present, enough = changes[0].present * HOURS_PER_MONTH, math.ceil(changes[0].enough * HOURS_PER_MONTH)
    return f" (from {present:,.0f} to {enough:,} USD per month)"


def with_relaxation(build: Callable[[], Problem]) -> Problem:
    """The problem that `build` makes. If `build` finds limits of the SLO out of reach, the error raised here
    also proposes limits that a fleet keeps.
    """
    try:
        return build()
    except OutOfReachError as error:
        raise out_of_reach(error.problem, error.floors) from None


def out_of_reach(problem: Problem, floors: Sequence[Floor]) -> InfeasibleError:
    """The error that no fleet keeps these limits, with how far they must be relaxed for a fleet to be found.

    `floors` has each limit with its floor and the name of the fastest worker type. A floor within its limit
    means that all fleets within the limits were simulated and miss it.
    """
    limit, least_s, name = floors[0]
    least_text, limit_text = show_beside(least_s, limit.limit_s)
    also = (
        f" (also out of reach: {', '.join(floor.limit.name for floor in floors[1:])})" if floors[1:] else ""
    )
    ways = find_least_limits(problem, floors)
    least = show_s(rounded_up(floors[0].missed_s))
    relaxation_text = (
        f"relax {ways_of_limits_text(ways)}{_fleet_found_text(problem)}"
        if ways
        else f"relax {limit.label} to {least} or more ({_far_more_text(problem)})"
    )
    why = (
        f"is below what any worker can do even when idle: the fastest ({name}) needs {least_text}{also}"
        if least_s > limit.limit_s
        else f"is kept by none of the fleets within the limits, all of which were simulated{also}"
    )
    return InfeasibleError(
        f"latency: {limit.label} <= {limit_text} {why}. No number of workers cures that; {relaxation_text}, "
        f"or add a faster GPU{_with_caches_text(problem)}{_none_fits_text(problem)}"
        f"{also_left_out(problem.task.unchecked_left_out)}",
        kind="latency",
        constraint=limit.name,
        relaxation="" if ways else f"{limit.name} > {least_s:.6g} s, how much more is unknown",
        ways=ways,
    )


def _far_more_text(problem: Problem) -> str:
    """A clause: no fleet was found even with much looser limits, within the limits on the fleet that it
    names.
    """
    names = ", ".join(limit.name for limit, _ in problem.limits.rows())
    also = f" within the limits on {names}, so raise these too" if names else ""
    return f"no fleet was found at {MOST_RELAXED:g} times that{also}"


def _with_caches_text(problem: Problem) -> str:
    """If idle workers keep the limits with prefix caches, a clause that names the key for such caches."""
    if problem.task.policies.prefix_cache or not problem.trace.has_prefixes:
        return ""
    cached = requests_to_judge(problem.slo, problem.trace, PrefixHits.of(problem.trace).shared_tokens)
    if unreachable_limits(problem.slo, problem.types, cached):
        return ""
    return "; many prompts begin alike, so policies: {prefix_cache: true} may keep it"


def _none_fits_text(problem: Problem) -> str:
    """If not even one worker is within the limits, a sentence that names the smallest worker: relaxing the
    SLO alone would not help then.
    """
    if any(problem.limits.most_workers(worker) >= 1 for worker in problem.types):
        return ""
    smallest = min(problem.types, key=lambda worker: worker.gpus)
    limits = ", ".join(
        f"{limit.name} {show_amount(amount, limit.unit)}{'' if limit.unit == 'GPUs' else f' {limit.unit}'}"
        for limit, amount in problem.limits.rows()
    )
    return (
        f". Within the limits ({limits}) there is no room for a worker either: the smallest that holds "
        f"{problem.llm.name} takes {smallest.gpus} × {smallest.gpu.name}"
    )


def _least_worker(problem: Problem) -> LeastWorker | None:
    """The worker that takes least of a limit in which no worker has room; None without such a limit."""
    for limit, amount in problem.limits.rows():
        uses = [(problem.limits.used(limit, [(worker, 1)]), worker) for worker in problem.types]
        used, worker = min(uses, key=lambda use: (use[0], use[1].gpus))
        if used > amount * (1 + ROUNDING):
            paid, node = f"{worker.gpus} × {worker.gpu.name}", node_of(worker.gpu)
            if node is not None and problem.limits.counts_nodes(limit):
                nodes = count_text(math.ceil(worker.gpus / node.gpus), "node")
                paid = f"{nodes} of {node.gpus} × {worker.gpu.name}"
            return LeastWorker(paid, Change(limit.name, amount, used, limit.unit))
    return None


def no_room_for_one(problem: Problem) -> InfeasibleError | None:
    """The error of a question with a limit in which no worker has room, found without a search."""
    least = _least_worker(problem)
    if least is None:
        return None
    change = least.change
    return InfeasibleError(
        f"capacity: no worker is within the limits: {least}",
        kind="capacity",
        constraint=change.limit,
        relaxation=f"{change.limit} >= {change.enough:.6g} {change.unit}, how much more is unknown",
        least_worker=least,
    )


def infeasible(
    problem: Problem, level0: Level0, mixed: MixedFleets, wider_fleets: Sequence[Counts]
) -> InfeasibleError:
    """The error that no fleet holds: what binds, the smallest relaxation, and whether it is proved.

    `wider_fleets` (of `find_wider_fleets`) keep the SLO and exceed the limits, so the error can name limits
    with which there is a plan. The error is proved if the bound over all fleets exceeds the limits; otherwise
    it rests on searches that came to their end.
    """
    rows = problem.limits.rows()
    names = ", ".join(limit.name for limit, _ in rows)
    least = _least_worker(problem)
    # `bounds.lower_bound` found that no fleet is within the limits.
    is_proved = problem.bound is None or least is not None
    has_ended = level0.search.is_exhausted and (
        mixed.is_exact
        # If losses must be survived, the end of the search for mixed fleets shows nothing: its master ignores
        # losses.
        or ((mixed.is_exhausted or mixed.is_hopeless) and not problem.oracle.has_losses)
    )
    ways = [exceeded(problem.limits, workers_of(counts)) for counts in wider_fleets]
    if not (ways and (is_proved or has_ended)):
        if ways or problem.out_of_time() or not (is_proved or mixed.is_exact):
            return _undecided(problem, level0, names, ways)
        # No limit on the fleet helps, so it is the SLO that is out of reach.
        return out_of_reach(problem, floors_to_relax(problem))
    simulated = problem.oracle.simulations
    if least is not None:
        reason = str(least)
    elif is_proved:
        reason = "not even the least work that the SLO obliges fits within the limits"
    elif mixed.is_exact:
        reason = "every fleet was simulated"
    elif simulated == 1:
        reason = "the only fleet that was simulated misses it"
    else:
        reason = (
            f"all {simulated} fleets that were simulated miss it, of one worker type per pool and of several"
        )
    looser, or_relax = _looser_limits(problem)
    return InfeasibleError(
        f"capacity: no fleet within the limits keeps the SLO ({reason}). Raise {ways_text(ways)}"
        f"{_per_month_text(ways)}{or_relax}{_fleet_found_text(problem)}{_carried_text(problem)}"
        f"{also_left_out(problem.task.unchecked_left_out)}",
        kind="capacity",
        constraint=[change.limit for way in ways for change in way],
        ways=[*ways, *looser],
    )


def _looser_limits(problem: Problem) -> tuple[list[list[Change]], str]:
    """The least limits of the SLO, each relaxed alone, that a fleet within the limits keeps, and the end of a
    sentence that names them. Both are empty if there is no time to search them.
    """
    if problem.out_of_time() or len(problem.trace) > MOST_PROBED_REQUESTS:
        return [], ""
    ways = find_least_limits(problem, all_floors(problem), together=False)
    return ways, f", or within the limits relax {ways_of_limits_text(ways)}" if ways else ""


def far_beyond(problem: Problem) -> InfeasibleError | None:
    """The error of a question whose limits are far too tight: by the bound alone every fleet needs FAR_BEYOND
    times a limit or more.

    None for all other questions; their error, if no fleet is found, names a relaxation with which a fleet
    holds. None too if the trace is so short that fleets for such a relaxation are quickly simulated.
    """
    # A bound that is a number leaves open whether a fleet is within the limits.
    if problem.bound is not None or len(problem.trace) <= MOST_PROBED_REQUESTS:
        return None
    limits = problem.limits
    unlimited = FleetLimits(dict.fromkeys(limits.stock), by_gpu=limits.by_gpu)
    gpus_in_stock = sum(count or 0 for count in limits.stock.values())
    is_stock_limited = None not in limits.stock.values()
    amounts: list[tuple[FleetLimit, float | None, Objective]] = [
        (GPUS, gpus_in_stock if is_stock_limited else limits.gpus, "gpus"),
        (POWER, limits.power_w, "power"),
        (COST, limits.cost_usd_per_h, "cost"),
    ]
    for limit, amount, objective in amounts:
        if amount is None:
            continue
        lifted = replace(problem, limits=unlimited, task=replace(problem.task, objective=objective))
        least = lower_bound(lifted) or 0.0
        if least >= FAR_BEYOND * amount:
            unit = f" {limit.unit}"
            return InfeasibleError(
                "capacity: no fleet within the limits keeps the SLO: even the least work that it obliges "
                f"takes {least:,.0f}{unit}, of which the limits allow {amount:,.0f}. Raise the limits, or "
                f"lower the rate{_carried_text(problem)}",
                kind="capacity",
                constraint=[each.name for each, _ in limits.rows()],
                relaxation=f"{limit.name} >= {least:.6g}{unit}, how much more is unknown",
            )
    return None


def _carried_text(problem: Problem) -> str:
    """A hint that another objective finds how much traffic the limits carry, unless the plan has it."""
    if problem.task.objective == "throughput":
        return ""
    return "; objective throughput, without a rate, finds how much traffic the limits carry"


def _undecided(
    problem: Problem, level0: Level0, names: str, ways: Sequence[tuple[Change, ...]]
) -> InfeasibleError:
    """The error if neither a fleet nor a proof that there is none was found. `ways` are changes of the limits
    with which a fleet was found.
    """
    within = f"within the limits ({names}) " if names else ""
    relaxed: list[list[Change]] = []
    if problem.out_of_time():
        why, help_ = f"{ended_by()} came first", "raise --time-limit"
        if not ways and not is_time_limit_reached() and len(problem.trace) <= MOST_PROBED_REQUESTS:
            if relaxed := find_attained_limits(problem):
                help_ += f", or relax {ways_of_limits_text(relaxed)}{_fleet_found_text(problem)}"
    else:
        first = list(level0.search.refuted.items())[:MOST_REASONS]
        failing = "; ".join(f"{name}: {reason_text(because)}" for name, because in first)
        why = f"nothing proves that there is none ({failing})"
        help_ = "relax a limit of the SLO, add a faster GPU" + (" or raise the limits" if names else "")
    if ways:
        relaxed, or_relax = _looser_limits(problem)
        help_ = f"raise {ways_text(ways)}{or_relax}{_fleet_found_text(problem)}"
        ways = [*ways, *map(tuple, relaxed)]
    else:
        ways = [tuple(way) for way in relaxed]
    simulations = problem.oracle.simulations
    simulated = f"{simulations} were simulated, and " if simulations else ""
    return InfeasibleError(
        f"no fleet {within}was found that keeps the SLO: {simulated}{why}; {help_}"
        f"{also_left_out(problem.task.unchecked_left_out)}",
        kind="capacity" if names else "latency",
        constraint=[limit.name for limit, _ in problem.limits.rows()]
        or [limit.name for limit in problem.slo.limits],
        relaxation="" if ways else f"unknown: {help_}",
        ways=ways,
        is_proved=False,
    )


def find_wider_fleets(problem: Problem) -> list[Counts]:
    """Fleets that keep the SLO and exceed the limits, for a question that has no fleet within them. For each
    limit, the search lifts that limit alone and looks for the fleet that needs least of it. If this finds no
    fleet, all limits are lifted together.

    A search with other limits takes another path, so it may find a fleet within the limits after all, which
    is then the only one returned. The search with all limits lifted comes first, unless a bound proves that
    no fleet is within the limits: users often raise their limits to those that an earlier error named, and
    that search finds the named fleet again.
    """
    limits, is_proved = problem.limits, problem.bound is None
    singles = [
        (limits.without(limit), limit) for limit, _ in limits.rows() if not _is_rented_too(limit, problem)
    ]
    # Owned GPUs cost next to nothing: without a limit a fleet would take any number of them. So their number
    # stays limited where more of the same GPU can be rented; otherwise a fleet with the fewest GPUs is
    # sought.
    stock = {
        gpu: count if gpu.endswith(OWNED) and row_of(gpu) in limits.stock else None
        for gpu, count in limits.stock.items()
    }
    unlimited = FleetLimits(stock, by_gpu=limits.by_gpu)
    has_endless_owned = any(gpu.endswith(OWNED) and count is None for gpu, count in stock.items())
    least_of = GPUS if has_endless_owned else COST
    several = [(unlimited, least_of)] if len(limits.rows()) > 1 else []
    beyond_one: list[Counts] = []
    beyond_all: list[Counts] = []
    for lifted, limit in (*singles, *several) if is_proved else (*several, *singles):
        if (lifted is unlimited and beyond_one) or problem.out_of_time():
            break
        problem.progress("no fleet within the limits; looking for the smallest relaxation")
        objective: Objective = limit.of if limit.of in ("power", "cost") else "gpus"
        wider = replace(problem, limits=lifted, task=replace(problem.task, objective=objective))
        best = search_mixed_fleets(wider, search_level0(wider)).best
        if best is not None and problem.allows(best):
            return [best]
        if best is not None:
            (beyond_all if lifted is unlimited else beyond_one).append(best)
    return beyond_one or beyond_all


def _is_rented_too(limit: FleetLimit, problem: Problem) -> bool:
    """Whether the limit counts owned GPUs of which more may be rented, so that these are what binds."""
    return limit.gpu.endswith(OWNED) and row_of(limit.gpu) in problem.limits.stock


def exceeded(limits: FleetLimits, workers: Sequence[tuple[WorkerType, int]]) -> tuple[Change, ...]:
    """The limits that these workers exceed, each with how much of it is enough for them."""
    uses = [(limit, amount, limits.used(limit, workers)) for limit, amount in limits.rows()]
    return tuple(
        Change(limit.name, amount + owned, enough_for(limit, used, workers, owned), limit.unit)
        for limit, amount, used in uses
        for owned in [limits.stock.get(limit.gpu + OWNED) or 0]
        if used > amount * (1 + ROUNDING)
    )
