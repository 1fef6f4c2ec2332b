"""Finds the headroom of a fleet: the most traffic, and the longest steps, with which it holds, by bisection.

More traffic is the same requests in less time, so bursts grow too, and nothing is drawn at random. Where
agents begin together, more traffic is more agents instead (`scaling.with_times_the_traffic`).

Bisection assumes that a fleet that holds with more traffic or longer steps also holds with less. With a short
trace a few requests decide, and the assumption may be wrong. So for a short trace smaller shares than the
result are simulated too.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.documents.facts import HEADROOM_MOST_FRAC, HEADROOM_STEP_FRAC, Headroom
from planner.domain import Limit
from planner.search.oracle.deterministic_parallel import run_each
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.verdict_cache import MeasuredHeadroom, VerdictCache
from planner.traffic.scaling import with_times_the_traffic

# A trace with at most this many requests is short. On one of 40 requests bisection once found +36 %, though
# the fleet missed the SLO at +18 %.
SHORT_TRACE_REQUESTS = 1_000
PROBES = 8  # For a short trace, this many shares below the result are simulated too.


def find_headroom(
    oracle: Oracle, counts: Counts, *, least_frac: float = 0.0, before_each: Callable[[], None] = lambda: None
) -> MeasuredHeadroom:
    """The headroom of a fleet on the oracle's traffic as written, without draws and scenarios.

    The caller knows that the fleet holds with `least_frac` more traffic, and with steps longer by that share.
    `before_each` is called before every share that is looked at, and may raise an error to end the bisection.
    """
    as_written, known_headrooms = oracle.as_written(), oracle.cache.headrooms
    # A headroom also depends on the losses that must be survived, and on how pinned prefixes are placed.
    spot = (oracle.least_off_spot, frozenset(oracle.spot.items()))
    losses = (oracle.spare_workers, oracle.spare_nodes, spot)
    query = (*oracle.question_key(), oracle.slo, losses, counts, oracle.places_polished(counts))
    if query in known_headrooms:
        return known_headrooms[query]

    def more_traffic(frac: float) -> tuple[Oracle, Counts]:
        before_each()
        return with_traffic(as_written, frac), counts

    def longer_steps(frac: float) -> tuple[Oracle, Counts]:
        before_each()
        return as_written, _with_steps(counts, frac)

    (traffic_frac, missed_by_traffic), (steps_frac, missed_by_steps) = run_each(
        lambda at_share: most_that_holds(at_share, least_frac), (more_traffic, longer_steps)
    )
    headroom = Headroom(steps_frac=steps_frac, traffic_frac=traffic_frac)
    known_headrooms[query] = MeasuredHeadroom(headroom, missed_by_traffic, missed_by_steps)
    return known_headrooms[query]


def holds_with(oracle: Oracle, counts: Counts, more_frac: float) -> bool:
    """Whether a fleet holds with this share more traffic, and, with the traffic as written, also with steps
    longer by this share.
    """
    as_written = oracle.as_written()
    return with_traffic(as_written, more_frac).holds(counts) and as_written.holds(
        _with_steps(counts, more_frac)
    )


def most_that_holds(
    at_share: Callable[[float], tuple[Oracle, Counts]], least_frac: float = 0.0
) -> tuple[float, tuple[Limit, ...]]:
    """The largest share by which traffic may grow, or steps may be longer, while the fleet holds, at most
    HEADROOM_MOST_FRAC; and the limits that it misses HEADROOM_STEP_FRAC beyond that share.

    `at_share` returns the oracle and the fleet at a share. At `least_frac` the fleet is known to hold.
    """

    def holds(frac: float) -> bool:
        if frac <= least_frac:
            return True
        oracle, counts = at_share(frac)
        return oracle.holds(counts)

    if holds(HEADROOM_MOST_FRAC):
        kept_frac = failed_frac = HEADROOM_MOST_FRAC  # Equal: no share that fails is known.
    else:
        # From 0 and not from `least_frac`, so that the result does not depend on what the caller knows.
        kept_frac, failed_frac = bisect_share(holds, 0.0, HEADROOM_MOST_FRAC)
    if len(at_share(0.0)[0].trace) <= SHORT_TRACE_REQUESTS:
        while (missed_frac := _first_missed(holds, kept_frac)) is not None:
            kept_frac, failed_frac = bisect_share(holds, 0.0, missed_frac)
    if kept_frac == failed_frac:
        return kept_frac, ()
    oracle, counts = at_share(failed_frac)
    failing = oracle.failing_loss(counts)
    if failing is None:  # An oracle with scenarios may fail a fleet for these alone; then no limit is named.
        return kept_frac, ()
    failing_oracle, remaining = failing  # `remaining`: the workers that are left after a loss, if any.
    return kept_frac, tuple(line.limit for line in failing_oracle.judge_whole(remaining).missed)


def bisect_share(holds: Callable[[float], bool], kept_frac: float, failed_frac: float) -> tuple[float, float]:
    """A share at which the fleet holds and a larger one at which it fails, at most HEADROOM_STEP_FRAC apart.
    The fleet is taken to hold at the given `kept_frac` and to fail at `failed_frac`; neither is simulated.
    """
    while failed_frac - kept_frac > HEADROOM_STEP_FRAC:
        middle = (kept_frac + failed_frac) / 2
        kept_frac, failed_frac = (middle, failed_frac) if holds(middle) else (kept_frac, middle)
    return kept_frac, failed_frac


def _first_missed(holds: Callable[[float], bool], kept_frac: float) -> float | None:
    """The smallest of PROBES evenly spaced shares below `kept_frac` at which the fleet fails, if any."""
    shares = (kept_frac * k / (PROBES + 1) for k in range(1, PROBES + 1))
    return next((frac for frac in shares if not holds(frac)), None)


def with_traffic(oracle: Oracle, more_frac: float) -> Oracle:
    """The same oracle for this share more traffic, or for less if `more_frac` is negative.

    Calls with the same share have one cache.
    """
    trace, known_busier = oracle.queried_trace, oracle.cache.busier
    key = (trace, more_frac)
    if key not in known_busier:
        known_busier[key] = (with_times_the_traffic(trace, 1 + more_frac), VerdictCache())
    busier_trace, cache = known_busier[key]
    # The scenario, if the oracle has one, is in `busier_trace` already, and would be simulated in its place.
    return replace(oracle, trace=busier_trace, scenario=None, cache=cache)


def _with_steps(counts: Counts, more_frac: float) -> Counts:
    """The fleet with all steps longer by this share."""
    return tuple(
        (replace(option, type=option.type.with_longer_steps(more_frac)), count) for option, count in counts
    )
