"""Makes the traffic of a task: a trace, rescaled and cut, or requests drawn from a description
(planner/traffic/described.py). A task may have several draws, and several rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner.documents.task import PlanQuestion
from planner.errors import InputError
from planner.traffic.described import draw_requests
from planner.traffic.scaling import busiest_at, same_requests, select_window
from planner.traffic.sessions import with_nominal_arrivals
from planner.traffic.trace import Trace, spread_stamps
from planner.units import show_s

# An interval of traffic (`task.robust`) is sampled at as many rates as have about MOST_REQUESTS_OF_RATES
# requests together, but at no fewer than FEWEST_RATES, its ends included, and no more than MOST_RATES. All
# three are set by hand.
MOST_REQUESTS_OF_RATES = 1_000_000
FEWEST_RATES = 5
MOST_RATES = 41


@dataclass(frozen=True, slots=True, eq=False)
class TrafficRequest:
    """What a fleet must serve: requests, a note on how they were made from the trace, and further draws and
    rates of the same traffic, each of which the fleet must serve as well.
    """

    requests: Trace
    note: str
    further: tuple[Trace, ...] = ()

    @classmethod
    def of(cls, trace: Trace, task: PlanQuestion, *, seed: int) -> TrafficRequest:
        """The traffic of a task, from a trace as it was read."""
        requests, note = requested_traffic(trace, task, seed=seed)
        return cls(requests, note, further_traffic(trace, task, requests, seed=seed))


class RequestedTraffic(NamedTuple):
    """Requests that must be served, and a note on how they were made from the trace."""

    requests: Trace
    note: str


def requested_traffic(trace: Trace, task: PlanQuestion, *, seed: int) -> RequestedTraffic:
    """The requests that must be served, and how they were made.

    The seed also spreads the stamps of a coarse clock, as `read_trace(path, seed=None)` leaves them. If the
    task has an interval of traffic (`task.robust`), these are the requests at its upper end;
    `further_traffic` has those at its other rates.
    """
    return _requested_rate(trace, task, task.robust.traffic_frac, seed=seed)


def further_traffic(trace: Trace, task: PlanQuestion, requests: Trace, *, seed: int) -> tuple[Trace, ...]:
    """What a fleet must serve beside `requests`, which is `requested_traffic` with this seed.

    These are `task.draws` draws, each at all `rates_frac`, the highest first. Neighbouring rates that give
    the same requests count once.
    """
    further, last = [], requests
    for number in range(task.draws):
        for frac in reversed(rates_frac(task, requests)):
            is_first = number == 0 and frac == task.robust.traffic_frac
            drawn = requests if is_first else _requested_rate(trace, task, frac, seed=seed + number).requests
            # If the second draw equals the first, the seed changes nothing, and all draws are the same.
            if number == 1 and frac == task.robust.traffic_frac and same_requests(drawn, requests):
                raise InputError(
                    f"traffic: draws: {trace.name} is replayed as it is, so all {task.draws} draws are the "
                    "same; leave draws out, or ask for a rate that is not the trace's"
                )
            if not same_requests(drawn, last):
                further.append(drawn)
            last = drawn
    return tuple(further)


def rates_frac(task: PlanQuestion, requests: Trace) -> tuple[float, ...]:
    """The rates at which an interval of traffic is sampled, evenly from end to end. A rate is given as the
    share by which it is above the expected one.

    The ends alone are not enough: each rate draws other requests, so a fleet that holds at both ends may fail
    between them.
    """
    lowest, highest = task.robust.traffic_from_frac, task.robust.traffic_frac
    if lowest == highest:
        return (highest,)
    points = int(np.clip(MOST_REQUESTS_OF_RATES // len(requests), FEWEST_RATES, MOST_RATES))
    return tuple(np.linspace(lowest, highest, points).tolist())


def _requested_rate(trace: Trace, task: PlanQuestion, more_frac: float, *, seed: int) -> RequestedTraffic:
    """The same as `requested_traffic`, at a rate that lies `more_frac` above the expected one."""
    rate_rps = task.rate_rps
    if task.described is not None:
        rate_rps = (task.described.mean_rps if rate_rps is None else rate_rps) * (1 + more_frac)
        description = task.described.at_rate(rate_rps)
        requests = draw_requests(description, seed=seed)
        # The load of agents is their number: how many requests/s they send depends on the fleet.
        agents = description.agent_count
        load = f"{rate_rps:.4g} requests/s" if agents is None else f"{agents:,} agents"
        note = f"{requests.name} of {load}, drawn by seed {seed}"
    else:
        requests = spread_stamps(trace, seed=seed)
        note = trace.name
        if more_frac:
            rate_rps = (requests.rate_rps if rate_rps is None else rate_rps) * (1 + more_frac)
        if rate_rps is not None:
            note += f", scaled to {rate_rps:g} requests/s ({task.scale})"
    window = task.window or "whole"
    if task.described is None and rate_rps is not None:
        requests = busiest_at(requests, rate_rps, window, scale=task.scale, rng=np.random.default_rng(seed))
    else:
        requests = select_window(requests, window)
    if (robust := task.robust).traffic_frac != robust.traffic_from_frac:
        note += (
            f", up to {100 * robust.traffic_frac:g} % more than expected (robust: sampled at "
            f"{len(rates_frac(task, requests))} rates, this is the highest)"
        )
    elif more_frac:
        note += f", {abs(100 * more_frac):g} % {'more' if more_frac > 0 else 'less'} than expected"
    if requests.after.size:
        # Rescaling and cutting rounds the arrivals, so those within sessions are computed anew.
        requests = with_nominal_arrivals(requests)
    note += f", {task.window or 'whole trace'}: {len(requests):,} requests in {show_s(requests.duration_s)}"
    if requests.after.size:  # The arrivals in a trace of sessions are those without waits for answers.
        note += " (if answers took no time)"
    if not requests.duration_s > 0:
        instant = "one instant, if answers took no time" if requests.after.size else "one instant"
        lengths = f"input: {requests.input_tokens.mean():.0f}, output: {requests.output_tokens.mean():.0f}"
        raise InputError(
            f"{trace.name}: {len(requests)} request(s) at {instant}; a plan needs traffic over time: a "
            "longer trace or window; or leave out --trace and write the rate of such requests: traffic: "
            f"{{rate: 1, {lengths}}} is one in a second"
        )
    return RequestedTraffic(requests, note)
