"""How far a fleet holds: the most traffic, and the longest steps, by bisection.

More traffic is the same requests by a faster clock (`compress`), so bursts grow with it and nothing is drawn.
That what holds with more also holds with less is assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.documents.facts import HEADROOM_MOST_FRAC, HEADROOM_STEP_FRAC, Headroom
from planner.domain import Limit
from planner.search.oracle.deterministic_parallel import side_by_side
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import Answers, Ends, Oracle
from planner.traffic.scaling import sped_up


def find_headroom(
    oracle: Oracle, counts: Counts, *, least_frac: float = 0.0, before_each: Callable[[], None] = lambda: None
) -> Ends:
    """Of a fleet that holds: on what the oracle asks, without its draws and scenarios. With `least_frac` more
    traffic, and longer steps, it is known to hold too. `before_each` simulation may raise what ends it.
    """
    alone, known = oracle.as_written(), oracle.answers.ends
    losses = (oracle.spare_workers, oracle.spare_nodes, frozenset(oracle.spot.items()))
    query = (*oracle.of_question(), oracle.slo, losses, counts)
    if query in known:
        return known[query]
    headroom: dict[str, tuple[float, tuple[Limit, ...]]] = {}

    def look(what: str, at: Callable[[float], tuple[Oracle, Counts]]) -> None:
        headroom[what] = most_that_holds(at, least_frac)

    def faster(frac: float) -> tuple[Oracle, Counts]:
        before_each()
        return with_traffic(alone, frac), counts

    def longer(frac: float) -> tuple[Oracle, Counts]:
        before_each()
        return alone, _with_steps(counts, frac)

    side_by_side([lambda: look("traffic", faster), lambda: look("steps", longer)])
    (traffic, by_traffic), (steps, by_steps) = headroom["traffic"], headroom["steps"]
    known[query] = Ends(Headroom(steps, traffic), by_traffic, by_steps)
    return known[query]


def holds_with(oracle: Oracle, counts: Counts, more_frac: float) -> bool:
    """Whether a fleet holds with so much more traffic, and with steps that are so much longer."""
    alone = oracle.as_written()
    return (
        with_traffic(alone, more_frac).holds([counts])[0] and alone.holds([_with_steps(counts, more_frac)])[0]
    )


def most_that_holds(
    at: Callable[[float], tuple[Oracle, Counts]], least_frac: float = 0.0
) -> tuple[float, tuple[Limit, ...]]:
    """The largest share more, up to HEADROOM_MOST_FRAC, with which what is asked `at` it holds, and the
    limits that are missed first beyond; with `least_frac` it is known to hold.
    """

    def holds(frac: float) -> bool:
        if frac <= least_frac:
            return True
        oracle, counts = at(frac)
        return oracle.holds([counts])[0]

    good, bad = 0.0, HEADROOM_MOST_FRAC
    if holds(bad):
        return bad, ()
    while bad - good > HEADROOM_STEP_FRAC:
        middle = (good + bad) / 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    oracle, counts = at(bad)
    failing = oracle.failing_loss(counts)
    if failing is None:
        return good, ()
    return good, tuple(line.limit for line in failing[0].judgement(failing[1]).missed)


def with_traffic(oracle: Oracle, more_frac: float) -> Oracle:
    """The same question of the same requests by a faster clock; a slower one for less than 0. What was asked
    at this speed before is known.
    """
    faster, trace = oracle.answers.faster, oracle.queried_trace
    if (trace, more_frac) not in faster:
        faster[trace, more_frac] = sped_up(trace, 1 + more_frac), Answers()
    trace, answers = faster[trace, more_frac]
    return replace(oracle, trace=trace, scenario=None, answers=answers)


def _with_steps(counts: Counts, more_frac: float) -> Counts:
    return tuple(
        (replace(option, type=option.type.with_longer_steps(more_frac)), count) for option, count in counts
    )
