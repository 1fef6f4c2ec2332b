"""What other kinds of fleets would cost: simpler ones, and each GPU type alone in one mixed pool."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.documents.certificate import Alternative
from planner.documents.facts import NoneUpTo, Note, Remarked
from planner.search.level0.level0_search import Level0
from planner.search.level0.one_pool import PRICE_GROWTH, BoundedOption, least_that_holds
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
    pools = [pool.counts for pool in alone.values() if pool.counts]
    if not is_one_gpu:
        one_gpu = level0.one_gpu or ()  # Of several GPU types if the search began with such a fleet.
        is_one = len({option.type.gpu.name for option, _ in one_gpu}) == 1
        fleets = [*pools, one_gpu] if is_one and problem.allows(one_gpu) else pools
        kinds.append((ONE_GPU, min(fleets, key=objective_of, default=None)))
    if not is_mixed:
        kinds.append(("mixed pools only", min(pools, key=objective_of, default=None)))
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
    """The cheapest mixed pool of one GPU type (`counts`). If none was found: `least`, which such a pool costs
    at least, and the reason in `notes`.
    """

    counts: Counts | None
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


@dataclass(slots=True)
class _PoolSearch:
    """A search for the cheapest mixed pool of one option. `options` are in the order in which they are tried.

    `most_failed` and `most` are by the option's name: the largest count known to fail, and the most workers
    that are allowed. `counts` is the cheapest pool found so far; only pools below the price `ceiling` are
    simulated. A simulation that holds takes 1 of `simulations_left`.
    """

    problem: Problem
    options: Sequence[Option]
    most_failed: dict[str, int]
    most: Mapping[str, float]
    simulations_left: float
    ceiling: float
    counts: Counts | None = None

    def has_stopped(self) -> bool:
        """Whether the effort or the time is used up."""
        return self.simulations_left <= 0 or self.problem.out_of_time()

    def check_holds(self, option: Option, count: int) -> bool:
        """Whether this many workers hold; then they are the cheapest pool so far."""
        pool = ((option, count),)
        holds = self.problem.oracle.holds(pool)
        self.simulations_left -= 1 if holds else FAILED_SHARE
        if holds:
            self.counts, self.ceiling = pool, objective_of(pool)
        else:
            self.most_failed[option.name] = max(self.most_failed[option.name], count)
        return holds

    def most_below(self, option: Option, price: float) -> int:
        """The most workers of this option for less than `price`; 0 if this many have failed."""
        count = min(self.most[option.name], largest_below(option, price))
        return int(count) if self.most_failed[option.name] < count < math.inf else 0

    def find_any(self, least: float) -> None:
        """Find some pool that holds, if none is known. One option of each worker size (TP, PP, DP) is
        simulated up to a price that grows from `least` on; at the last price, the ceiling, all options are.
        """
        # The first option of each size: later entries of a dict replace earlier ones, hence `reversed`.
        one_per_size = {hardware_of(option): option for option in reversed(self.options)}.values()
        price = least * PRICE_GROWTH
        while self.counts is None and price < PRICE_GROWTH * self.ceiling and not self.has_stopped():
            for option in one_per_size if price < self.ceiling else self.options:
                if self.has_stopped():
                    break
                count = self.most_below(option, min(price, self.ceiling))
                if count and self.check_holds(option, count):
                    break
            price *= PRICE_GROWTH

    def find_cheapest(self, bounds: Mapping[str, BoundedOption]) -> bool:
        """Search every option below the price of the known pool. Returns whether all were searched."""
        for option in self.options:
            if not (count := self.most_below(option, self.ceiling)):
                continue
            if self.has_stopped():
                return False
            least, bounded = self.most_failed[option.name] + 1, bounds[option.name]
            least_that_holds(partial(self.check_holds, option), least, count, bounded)
        return True


def _cheapest_mixed(
    problem: Problem, level0: Level0, options: Sequence[Option], best: Counts, value: float, effort: int
) -> _GpuTypeAlone:
    """The cheapest mixed pool of one of these options, within ALONE_TIMES the plan's value and `effort`."""
    level0_search, bounds = level0.search, level0.bounded
    search = _PoolSearch(
        problem,
        options=sorted(options, key=partial(_search_order, problem, level0)),
        most_failed={
            option.name: max(level0_search.most_failed.get(option.name, 0), bounds[option.name].least - 1)
            for option in options
        },
        # `level0` may be a search without budgets. Its counts then exceed what the budgets allow.
        most={
            option.name: min(bounds[option.name].most, problem.limits.most_workers(option.type))
            for option in options
        },
        simulations_left=max(
            effort / sum(map(len, (problem.trace, *problem.draws))), ALONE_LEAST_SIMULATIONS
        ),
        ceiling=ALONE_TIMES * value,
    )
    # The first option of which level 0 knows a count that holds.
    known = (
        (option, level0_search.least_holding[option.name])
        for option in search.options
        if option.name in level0_search.least_holding
        and level0_search.least_holding[option.name] <= search.most[option.name]
    )
    if len(best) == 1 and best[0][0] in options:  # The plan is such a pool itself.
        search.counts, search.ceiling = best, value
    elif not search.has_stopped() and (first := next(known, None)):
        search.check_holds(*first)
    # A pool needs more workers than the largest count that failed, and costs no less than the best fleet of
    # an exhausted search.
    least = min(objective_of(((option, search.most_failed[option.name] + 1),)) for option in options)
    search.find_any(max(least, level0_search.value if level0_search.is_exhausted else 0.0))
    if search.counts is not None:
        notes = () if search.find_cheapest(bounds) else (Remarked("perhaps-not-cheapest"),)
        return _GpuTypeAlone(search.counts, 0.0, notes)
    failed = search.most_failed
    least = min(objective_paid(problem, ((option, failed[option.name] + 1),)) for option in options)
    if level0_search.is_exhausted and level0_search.best is not None:
        least = max(least, objective_paid(problem, level0_search.best))
    why: Note = NoneUpTo(ALONE_TIMES)
    if search.has_stopped():
        why = Remarked("effort-ended")
    elif all(failed[option.name] >= search.most[option.name] for option in options):
        why = Remarked("all-too-few")
    return _GpuTypeAlone(None, least, (why,))


def _search_order(problem: Problem, level0: Level0, option: Option) -> tuple[bool, float, int]:
    """A key that sorts options by their likely cost. Those whose full step breaks the tightest limit on gaps
    come last, unless a count of them is known to hold.
    """
    least_holding = level0.search.least_holding
    is_late = option.name not in least_holding and breaks_gaps(option.type, problem.slo)
    count = least_holding.get(option.name, level0.bounded[option.name].likely)
    return is_late, objective_of(((option, count),)), -option.type.max_num_batched_tokens
