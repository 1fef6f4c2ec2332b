"""What other kinds of fleets would cost: simpler ones, and each GPU type alone in one mixed pool."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.documents.certificate import Alternative
from planner.documents.facts import NoneUpTo, Note, Remarked
from planner.search.fleets import Counts, largest_below, objective
from planner.search.level0 import Level0
from planner.search.one_pool import least_that_holds
from planner.search.options import breaks_gaps
from planner.search.owned import owned_first, paid
from planner.search.problem import Problem, on_all_draws
from planner.search.stages import Stage
from planner.search.waves import of_each
from planner.solvers.master import Option

# Fleets of one GPU type are looked for up to this many times the plan's value.
ALONE_TIMES = 4.0

# All GPU types alone may simulate this many requests together.
ALONE_REQUESTS = 2_000_000

# Each GPU type may have at least this many simulations of fleets that hold.
ALONE_LEAST = 2

# A simulation that fails counts as this share of one that holds, because it stops early.
ALONE_FAILED = 0.2

_PRICE_STEP = 1.3

ONE_GPU = "one GPU type only"


def alternatives(
    problem: Problem, level0: Level0, best: Counts, value: float, made: Counts = ()
) -> tuple[Alternative, ...]:
    """The best fleet of each simpler kind, and the cheapest mixed pool of each GPU type alone.

    Each row is a fleet that holds, with its price, or says why there is no price. The plan itself is left
    out: `best`, its fleet on paper, and `made`, its fleet for production.
    """
    asked, search = on_all_draws(problem), level0.search
    oracle, rows = asked.oracle, []
    alone = _mixed_alone(asked, level0, best, value)
    is_one_gpu = len({option.type.gpu.name for option, _ in best}) == 1
    is_mixed = all(option.role == "mixed" for option, _ in best)
    kinds: list[tuple[str, Counts | None]] = []
    if not is_one_gpu:
        of_one = [(found.cost, found.counts) for found in alone.values() if found.counts]
        if (counts := level0.one_gpu[0]) and len({option.type.gpu.name for option, _ in counts}) == 1:
            of_one.append((level0.one_gpu[1], counts))
        _, cheapest = min(of_one, key=lambda row: row[0], default=(math.inf, None))
        kinds.append((ONE_GPU, cheapest))
    if not is_mixed:
        _, cheapest = min(
            ((found.cost, found.counts) for found in alone.values()),
            key=lambda row: row[0],
            default=(math.inf, None),
        )
        kinds.append(("mixed pools only", cheapest))
    kinds.append(("one worker type per pool (level 0)", search.best))
    for label, counts in kinds:
        if counts in (best, made):
            continue
        if counts is None:
            rows.append(Alternative(label, None, math.inf, (Remarked("not-searched"),)))
        elif oracle.holds([counts])[0]:
            rows.append(Alternative(label, oracle.fleet(counts), paid(problem, counts)))
        else:
            fails = Remarked("fails-on-other-draw")
            rows.append(Alternative(label, None, paid(problem, counts), (fails,), at_least=True))
    for gpu, found in alone.items():
        label = f"{gpu}, mixed"
        if found.counts is None:
            rows.append(Alternative(label, None, found.least, found.notes, at_least=True))
        elif (counts := owned_first(problem, found.counts)) not in (best, made):
            rows.append(Alternative(label, oracle.fleet(counts), paid(problem, counts), found.notes))
    return tuple(rows)


def as_on_paper(rows: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """The same rows, marked as fleets on paper beside a plan for production."""
    return tuple(replace(row, notes=(*row.notes, Remarked("on-paper"))) for row in rows)


@dataclass(frozen=True, slots=True)
class _Alone:
    """The cheapest mixed pool of one GPU type; without one, a lower bound on its cost and the reason."""

    counts: Counts | None
    cost: float
    least: float
    notes: tuple[Note, ...]


def _mixed_alone(problem: Problem, level0: Level0, best: Counts, value: float) -> dict[str, _Alone]:
    """The cheapest mixed pool of each GPU type, by name, searched in parallel with equal effort."""
    groups: dict[str, list[Option]] = {}
    for option in level0.options:
        if option.role == "mixed":
            groups.setdefault(option.type.gpu.name, []).append(option)
    effort = ALONE_REQUESTS // max(len(groups), 1)

    def of_gpu(options: Sequence[Option]) -> _Alone:
        return _cheapest_mixed(problem, level0, options, best, value, effort)

    problem.progress(Stage("the other GPU types, each alone", "alone"))
    return dict(zip(groups, of_each(of_gpu, groups.values()), strict=True))


def _cheapest_mixed(
    problem: Problem, level0: Level0, options: Sequence[Option], best: Counts, value: float, effort: int
) -> _Alone:
    """The cheapest mixed pool of one of these options, up to ALONE_TIMES the plan's value and `effort`
    requests.

    Where no such pool is known, one option of each worker size is tried at a price that grows until one
    holds; then every option is tried below that price.
    """
    oracle, search = problem.oracle, level0.search
    left = max(effort / (len(problem.trace) + sum(map(len, problem.draws))), ALONE_LEAST)
    failed = {
        option.name: max(search.beyond.get(option.name, 0), level0.bounded[option.name].least - 1)
        for option in options
    }
    counts: Counts | None = None
    ceiling = ALONE_TIMES * value
    notes: tuple[Note, ...] = ()

    def holds(option: Option, count: int) -> bool:
        nonlocal left
        answer = oracle.holds([((option, count),)])[0]
        left -= 1 if answer else ALONE_FAILED
        if not answer:
            failed[option.name] = max(failed[option.name], count)
        return answer

    def most(option: Option, price: float) -> int:
        """The most workers of this option for less than `price`; 0 where all such counts have failed."""
        count = min(level0.bounded[option.name].most, largest_below(option, price))
        return int(count) if failed[option.name] < count < math.inf else 0

    def expected(option: Option) -> tuple[bool, float, int]:
        """Sort key: options whose full step breaks the tightest TBT limit last, then by the likely cost."""
        budget, is_late = option.type.max_num_batched_tokens, breaks_gaps(option.type, problem.slo)
        count = search.smallest.get(option.name, level0.bounded[option.name].likely)
        return is_late and option.name not in search.smallest, objective(((option, count),)), -budget

    def has_stopped() -> bool:
        return left <= 0 or problem.out_of_time()

    ordered = sorted(options, key=expected)
    known = [option for option in ordered if option.name in search.smallest]
    if len(best) == 1 and best[0][0] in options:
        counts, ceiling = best, value
    elif known and not problem.out_of_time() and holds(known[0], count := search.smallest[known[0].name]):
        counts = ((known[0], count),)
        ceiling = objective(counts)
    sizes = {
        (option.type.tp, option.type.pp, option.type.dp): option for option in reversed(ordered)
    }.values()
    price = max(_least(options, failed), search.value if search.is_exhausted else 0.0) * _PRICE_STEP
    while counts is None and price < _PRICE_STEP * ceiling and not has_stopped():
        for option in sizes if price < ceiling else ordered:
            if has_stopped():
                break
            if (count := most(option, min(price, ceiling))) and holds(option, count):
                counts = ((option, count),)
                ceiling = objective(counts)
                break
        price *= _PRICE_STEP
    for option in ordered if counts else ():
        if not (count := most(option, ceiling)):
            continue
        if has_stopped():
            notes = (Remarked("perhaps-not-cheapest"),)
            break
        item = level0.bounded[option.name]
        found = least_that_holds(partial(holds, option), failed[option.name] + 1, count, item)
        if found is not None:
            counts = ((option, found),)
            ceiling = objective(counts)
    if counts is not None:
        return _Alone(counts, ceiling, 0.0, notes)
    least = min(paid(problem, ((option, failed[option.name] + 1),)) for option in options)
    if search.is_exhausted and search.best is not None:
        least = max(least, paid(problem, search.best))
    why = Remarked("effort-ended") if has_stopped() else _none_alone(level0, options, failed)
    return _Alone(None, math.inf, least, (why,))


def _least(options: Sequence[Option], failed: Mapping[str, int]) -> float:
    """The least that one pool of one of these options can cost, given the counts that failed."""
    return min(objective(((option, failed[option.name] + 1),)) for option in options)


def _none_alone(level0: Level0, options: Sequence[Option], failed: Mapping[str, int]) -> Note:
    """The reason why no pool of one GPU type was found."""
    if all(failed[option.name] >= level0.bounded[option.name].most for option in options):
        return Remarked("all-too-few")
    return NoneUpTo(ALONE_TIMES)
