"""What other kinds of fleets would cost: simpler ones, and each GPU type alone in one mixed pool."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.documents.certificate import Alternative
from planner.documents.facts import NoneUpTo, Note, Remarked
from planner.search.level0.level0_search import Level0
from planner.search.level0.one_pool import PRICE_GROWTH, least_that_holds
from planner.search.oracle.deterministic_parallel import run_each
from planner.search.oracle.fleet_counts import Counts, largest_below, objective_of
from planner.search.problem.options import breaks_gaps, hardware_of
from planner.search.problem.owned_first import objective_paid, owned_first
from planner.search.problem.plan_problem import Problem, on_all_draws
from planner.search.problem.stages import Stage
from planner.solvers.master import Option

# The numbers below are set by hand.

# Fleets of one GPU type are searched up to this many times the plan's value. Nobody would take a dearer one.
ALONE_TIMES = 4.0

# All GPU types alone may simulate this many requests together.
ALONE_REQUESTS = 2_000_000

# Each GPU type may at least have this many simulations of fleets that hold, however long the trace is.
ALONE_LEAST_SIMULATIONS = 2

# A simulation that fails counts as this share of one that holds, because it stops early.
FAILED_SHARE = 0.2

ONE_GPU = "one GPU type only"


def mixed_label(gpu: str) -> str:
    """The label of the row for the cheapest pool of mixed workers on this GPU."""
    return f"{gpu}, mixed"


def find_alternatives(
    problem: Problem, level0: Level0, best: Counts, value: float, production: Counts = ()
) -> tuple[Alternative, ...]:
    """The best fleet of each simpler kind, and the cheapest mixed pool of each GPU type alone.

    Each row is a fleet that holds, with its price, or says why there is no price. The plan itself is left
    out: `best`, its fleet on paper, and `production`, its fleet for production.
    """
    on_every_draw, search = on_all_draws(problem), level0.search
    oracle, rows = on_every_draw.oracle, []
    alone = _cheapest_by_gpu(on_every_draw, level0, best, value)
    is_one_gpu = len({option.type.gpu.name for option, _ in best}) == 1
    is_mixed = all(option.role == "mixed" for option, _ in best)
    # Kinds that are simpler than the plan, each with the best known fleet of the kind.
    kinds: list[tuple[str, Counts | None]] = []
    if not is_one_gpu:
        cost_of = {pool.counts: pool.cost for pool in alone.values() if pool.counts}
        level0_counts, level0_cost = level0.one_gpu
        is_one = level0_counts and len({option.type.gpu.name for option, _ in level0_counts}) == 1
        if level0_counts and is_one and problem.allows(level0_counts):
            cost_of.setdefault(level0_counts, level0_cost)
        kinds.append((ONE_GPU, min(cost_of, key=cost_of.__getitem__, default=None)))
    if not is_mixed:
        cheapest = min(alone.values(), key=lambda pool: pool.cost, default=None)
        kinds.append(("mixed pools only", None if cheapest is None else cheapest.counts))
    kinds.append(("one worker type per pool (level 0)", search.best))
    for label, counts in kinds:
        if counts in (best, production):
            continue
        if counts is None or not problem.allows(counts):
            rows.append(Alternative(label, None, math.inf, (Remarked("not-searched"),)))
        elif oracle.holds(counts):
            rows.append(Alternative(label, oracle.fleet(counts), objective_paid(problem, counts)))
        else:
            fails = Remarked("fails-on-other-draw")
            rows.append(Alternative(label, None, objective_paid(problem, counts), (fails,), at_least=True))
    for gpu, pool in alone.items():
        label = mixed_label(gpu)
        if pool.counts is None:
            rows.append(Alternative(label, None, pool.least, pool.notes, at_least=True))
        elif (counts := owned_first(problem, pool.counts)) not in (best, production):
            rows.append(Alternative(label, oracle.fleet(counts), objective_paid(problem, counts), pool.notes))
    return tuple(rows)


def mark_on_paper(rows: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """The same rows, marked as fleets on paper beside a plan for production."""
    return tuple(replace(row, notes=(*row.notes, Remarked("on-paper"))) for row in rows)


@dataclass(frozen=True, slots=True)
class _GpuTypeAlone:
    """The cheapest mixed pool of one GPU type (`counts`) and its `cost`. If none was found: `least`, which
    such a pool costs at least, and the reason in `notes`.
    """

    counts: Counts | None
    cost: float
    least: float
    notes: tuple[Note, ...]


def _cheapest_by_gpu(
    problem: Problem, level0: Level0, best: Counts, value: float
) -> dict[str, _GpuTypeAlone]:
    """The cheapest mixed pool of each GPU type, by name, searched in parallel with equal effort."""
    groups: dict[str, list[Option]] = {}
    for option in level0.options:
        if option.role == "mixed":
            groups.setdefault(option.type.gpu.name, []).append(option)
    effort = ALONE_REQUESTS // max(len(groups), 1)

    def cheapest_of(options: Sequence[Option]) -> _GpuTypeAlone:
        return _cheapest_mixed(problem, level0, options, best, value, effort)

    problem.progress(Stage("the other GPU types, each alone", "other GPUs"))
    return dict(zip(groups, run_each(cheapest_of, groups.values()), strict=True))


def _known_ranges(
    problem: Problem, level0: Level0, options: Sequence[Option]
) -> tuple[dict[str, int], dict[str, float]]:
    """The most workers known to fail, and the most that are allowed, by the option's name."""
    most_failed = {
        option.name: max(level0.search.most_failed.get(option.name, 0), level0.bounded[option.name].least - 1)
        for option in options
    }
    # `level0` may be a search without budgets. Its counts then exceed what the budgets allow.
    most = {
        option.name: min(level0.bounded[option.name].most, problem.limits.most_workers(option.type))
        for option in options
    }
    return most_failed, most


def _cheapest_mixed(
    problem: Problem, level0: Level0, options: Sequence[Option], best: Counts, value: float, effort: int
) -> _GpuTypeAlone:
    """The cheapest mixed pool of one of these options, within ALONE_TIMES the plan's value and `effort`.

    If no such pool is known, one option of each worker size (TP, PP, DP) is simulated up to a price that
    grows until one holds. Then every option is searched below the price of that pool.
    """
    oracle, search = problem.oracle, level0.search
    simulations_left = max(effort / sum(map(len, (problem.trace, *problem.draws))), ALONE_LEAST_SIMULATIONS)
    # By option: the largest count known to fail, and the most workers that may be used.
    most_failed, most = _known_ranges(problem, level0, options)
    counts = None
    notes: tuple[Note, ...] = ()
    ceiling = ALONE_TIMES * value  # The search is below this price.

    def check_holds(option: Option, count: int) -> bool:
        nonlocal simulations_left
        answer = oracle.holds(((option, count),))
        simulations_left -= 1 if answer else FAILED_SHARE
        if not answer:
            most_failed[option.name] = max(most_failed[option.name], count)
        return answer

    def most_below(option: Option, price: float) -> int:
        """The most workers of this option for less than `price`; 0 if this many have failed."""
        count = min(most[option.name], largest_below(option, price))
        return int(count) if most_failed[option.name] < count < math.inf else 0

    def has_stopped() -> bool:
        return simulations_left <= 0 or problem.out_of_time()

    ordered = sorted(options, key=partial(_search_order, problem, level0))
    known_to_hold = [  # The options of which level 0 knows a count that holds.
        option
        for option in ordered
        if option.name in search.least_holding and search.least_holding[option.name] <= most[option.name]
    ]
    is_own_type = all(option in options for option, _ in best)
    if len(best) == 1 and is_own_type:  # The plan is such a pool itself.
        counts, ceiling = best, value
    elif known_to_hold and not has_stopped():
        first = known_to_hold[0]
        if check_holds(first, count := search.least_holding[first.name]):
            counts = ((first, count),)
            ceiling = objective_of(counts)
    # The first option of each worker size: later entries of a dict replace earlier ones, hence `reversed`.
    one_per_size = {hardware_of(option): option for option in reversed(ordered)}.values()
    # A pool needs more workers than the largest count that failed, and costs no less than the best fleet of
    # an exhausted search. So the price begins above the larger of these two costs.
    least = min(objective_of(((option, most_failed[option.name] + 1),)) for option in options)
    price = max(least, search.value if search.is_exhausted else 0.0) * PRICE_GROWTH
    while counts is None and price < PRICE_GROWTH * ceiling and not has_stopped():
        # At the last price, the ceiling, all options are simulated.
        for option in one_per_size if price < ceiling else ordered:
            if has_stopped():
                break
            if (count := most_below(option, min(price, ceiling))) and check_holds(option, count):
                counts = ((option, count),)
                ceiling = objective_of(counts)
                break
        price *= PRICE_GROWTH
    for option in ordered if counts else ():
        if not (count := most_below(option, ceiling)):
            continue
        if has_stopped():
            notes = (Remarked("perhaps-not-cheapest"),)
            break
        bounded = level0.bounded[option.name]
        fewest = least_that_holds(partial(check_holds, option), most_failed[option.name] + 1, count, bounded)
        if fewest is not None:
            counts = ((option, fewest),)
            ceiling = objective_of(counts)
    if counts is not None:
        return _GpuTypeAlone(counts, ceiling, 0.0, notes)
    least = min(objective_paid(problem, ((option, most_failed[option.name] + 1),)) for option in options)
    if search.is_exhausted and search.best is not None:
        least = max(least, objective_paid(problem, search.best))
    why = Remarked("effort-ended") if has_stopped() else _why_none(most, options, most_failed)
    return _GpuTypeAlone(None, math.inf, least, (why,))


def _search_order(problem: Problem, level0: Level0, option: Option) -> tuple[bool, float, int]:
    """A key that sorts options by their likely cost. Those whose full step breaks the tightest limit on gaps
    come last, unless a count of them is known to hold.
    """
    least_holding = level0.search.least_holding
    is_late = option.name not in least_holding and breaks_gaps(option.type, problem.slo)
    count = least_holding.get(option.name, level0.bounded[option.name].likely)
    return is_late, objective_of(((option, count),)), -option.type.max_num_batched_tokens


def _why_none(most: Mapping[str, float], options: Sequence[Option], failed: Mapping[str, int]) -> Note:
    """The reason why no pool of one GPU type was found."""
    if all(failed[option.name] >= most[option.name] for option in options):
        return Remarked("all-too-few")
    return NoneUpTo(ALONE_TIMES)
