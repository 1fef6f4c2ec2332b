"""The cheapest fleet that keeps the SLO in most futures: a chance constraint, by scenarios.

    S futures are drawn (futures.py), of which a fleet must keep the SLO in `need`, and on what is written too
    rank them by how hard they are for the cheapest fleet on paper
    binding = {the `need`-th easiest}
    repeat  search for the cheapest fleet that holds in all of `binding`
            simulate it in all S; enough kept: done; else add the easiest missed one that must be kept too
    then    an easier binding set, and one worker fewer, as long as enough is kept

Which futures may be missed is thus chosen by rank, not by enumeration: a fleet of another kind may find other
futures hard. Fresh futures test the answer (answers.py); if it fails they join the S, and the search begins
again. `need` is one more than the share asked for: the cheapest of many fleets that pass on S futures passes
on fewer of others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.documents.safety import Safety
from planner.search.best_fleet import Found, search_again
from planner.search.fleets import Counts, named, objective
from planner.search.futures import Future
from planner.search.oracle import Oracle, side_by_side
from planner.search.problem import Problem, silent
from planner.traffic.trace import Trace

SEARCH_REQUESTS = 1_000_000  # of all futures that a search sees; simulated for every fleet in question,
SEARCH_LEAST, SEARCH_MOST = 20, 32  # within these
STEP = 30  # a pool grows by one worker for each so many
ROUNDS = 4  # of binding futures


@dataclass(slots=True, eq=False)
class Chance:
    """Whether fleets keep the SLO in `need` of these futures, and on what `oracle` asks."""

    oracle: Oracle
    futures: list[Future]
    need: int
    order: list[int] = field(default_factory=list)  # the easiest first
    _asked: list[Oracle] = field(default_factory=list)
    _said: dict[tuple[object, ...], list[bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = self.order or list(range(len(self.futures)))
        self._asked = [in_future(self.oracle, future) for future in self.futures]

    @property
    def allowed(self) -> int:
        """How many may be missed."""
        return len(self.futures) - self.need

    def kept(self, counts: Counts) -> list[bool]:
        """In which futures; all are simulated."""
        key = named(counts)
        if key not in self._said:
            said = [False] * len(self.futures)

            def look(part: Sequence[int]) -> None:
                for i in part:
                    said[i] = self._asked[i].holds([counts])[0]

            everyone = range(len(self.futures))
            side_by_side([lambda part=part: look(part) for part in (everyone[::2], everyone[1::2])])  # type: ignore[misc]
            self._said[key] = said
        return self._said[key]

    def keeps(self, counts: Counts, future: int) -> bool:
        return self._asked[future].holds([counts])[0]

    def holds(self, counts: Counts) -> bool:
        """Stops where too many are missed; the hardest come first."""
        if not self.oracle.holds([counts])[0]:
            return False
        if (key := named(counts)) in self._said:
            return sum(self._said[key]) >= self.need
        missed = 0
        for i in reversed(self.order):
            missed += not self._asked[i].holds([counts])[0]
            if missed > self.allowed:
                return False
        return True


def in_future(oracle: Oracle, future: Future) -> Oracle:
    """The same question in a future."""
    return replace(oracle, trace=future.trace, z=future.z, draws=(), futures=())


def needed(safety: Safety, count: int) -> int:
    return min(math.ceil(safety.kept_in_frac * count - 1e-9) + 1, count)


def futures_count(trace: Trace) -> int:
    return int(np.clip(SEARCH_REQUESTS // len(trace), SEARCH_LEAST, SEARCH_MOST))


def cheapest_kept(problem: Problem, paper: Found, chance: Chance) -> Counts | None:
    """The cheapest fleet found that holds by `chance`; None if none was found."""
    best = _grown(problem, paper.best, chance)
    if best is not None and objective(best) <= paper.value * (1 + 1e-9):
        return best
    return cheaper_kept(problem, paper, chance, best)


def cheaper_kept(problem: Problem, paper: Found, chance: Chance, best: Counts | None) -> Counts | None:
    """The cheapest fleet found that holds by `chance`, `best` where none is cheaper."""
    binding = [chance.order[chance.need - 1]]
    for _ in range(ROUNDS):
        found = _searched(problem, paper, chance, binding, best)
        if found is None or (best is not None and objective(found) >= objective(best) * (1 - 1e-9)):
            break
        if chance.holds(found):
            best = found
            break
        kept = chance.kept(found)
        missed = [i for i in chance.order if not kept[i]]
        binding.append(missed[len(missed) - chance.allowed - 1])
    return None if best is None else _stripped(best, chance)


def _grown(problem: Problem, paper: Counts, chance: Chance) -> Counts | None:
    """The paper's fleet with workers added until enough is kept; `chance` learns how hard its futures are.

    Each time to the pool that keeps most futures more for its price. None where that leaves the limits.
    """
    counts, order = paper, []
    left = list(range(len(chance.futures)))
    while True:
        kept = [i for i in left if chance.keeps(counts, i)]
        order += kept
        left = [i for i in left if i not in kept]
        if len(left) <= chance.allowed and chance.oracle.holds([counts])[0]:
            chance.order = [*order, *left]
            return counts
        grown = [_more(counts, [k]) for k in range(len(counts))]
        grown = [each for each in grown if within(problem, each)]
        if len(grown) > 1:
            won = [
                sum(chance.keeps(each, i) for i in left) / (objective(each) - objective(counts) + 1e-9)
                for each in grown
            ]
            grown = [_more(counts, range(len(counts)))] if not any(won) else [grown[int(np.argmax(won))]]
        if not grown or not within(problem, grown[0]):
            chance.order = [*order, *left]
            return None
        counts = grown[0]


def _more(counts: Counts, pools: Iterable[int]) -> Counts:
    """So many workers more in these pools that it is felt: one of up to thirty, each time."""
    return tuple(
        (option, count + (max(round(count / STEP), 1) if k in pools else 0))
        for k, (option, count) in enumerate(counts)
    )


def within(problem: Problem, counts: Counts) -> bool:
    return problem.limits.broken([(option.type, count) for option, count in counts]) is None


def _searched(
    problem: Problem, paper: Found, chance: Chance, binding: Sequence[int], best: Counts | None
) -> Counts | None:
    """The cheapest fleet that holds in these futures; None if none was found."""
    oracle = replace(chance.oracle, futures=tuple(chance.futures[i] for i in binding))
    roles = [option.role for option, _ in paper.best]
    start = [] if best is None else [oracle.fleet(best)]
    return search_again(
        replace(problem, oracle=oracle, progress=silent), start, is_mixed=len(set(roles)) < len(roles)
    )


def least_kept(problem: Problem, paper: Found, chance: Chance) -> Counts:
    """The fleet within the limits that was found to keep the SLO in most futures, where none keeps enough."""
    best, low, high = paper.best, sum(chance.kept(paper.best)), chance.need
    while high - low > 1 and not problem.out_of_time():
        need = (low + high) // 2
        weaker = replace(chance, need=need)
        found = cheapest_kept(problem, paper, weaker)
        if found is None:
            high = need
        else:
            best, low = found, max(need, sum(chance.kept(found)))
    return best


def _stripped(counts: Counts, chance: Chance) -> Counts:
    """Take workers away, the dearest first, while enough is kept."""
    for option in sorted((option for option, _ in counts), key=lambda each: (-each.objective, each.name)):
        while True:
            fewer = tuple((each, count - (each is option)) for each, count in counts)
            fewer = tuple((each, count) for each, count in fewer if count)
            if not fewer or not any(each is option for each, _ in counts) or not chance.holds(fewer):
                break
            counts = fewer
    return counts
