"""A day of traffic on a fleet whose pools change: what each controller costs above the optimum, and what it
misses.

A fleet that stands all day, a timetable and the controllers run on the same requests, beside the cheapest
sequence of pool sizes that keeps the SLO in every window knowing them (planner/search/day.py). What a
controller costs above that, and the windows that it misses, are its regret. With `train_frac` parameters are
chosen on the first part of the traffic, and all are judged on the rest, which nobody has seen but the optimum.

Of the parameters tried those are taken that miss the fewest windows, of these the cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.domain import Slo
from planner.fleet import Fleet
from planner.simulator.elastic import ElasticPool, ElasticRun
from planner.simulator.metrics import in_windows
from planner.simulator.replay import Simulation
from planner.traffic.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kept:
    """What one window of the SLO came to: it holds if every limit does; `short_limit` is the one with the
    fewest values within it, of which `kept_frac` are.
    """

    start_s: float
    end_s: float
    holds: bool
    short_limit: str
    kept_frac: float


@dataclass(frozen=True, slots=True)
class Hurt:
    """What a change of a pool's size did: requests routed anew because their worker stopped, and requests
    late for a limit that arrived while the workers asked for were starting.
    """

    time_s: float
    pool: int
    before: int
    after: int
    rerouted: int
    late: int


def kept_in_windows(simulation: Simulation, slo: Slo, edges_s: Floats) -> tuple[Kept, ...]:
    """Every window between these edges, from a simulation that counted them."""
    by_limit = [in_windows(simulation, k, edges_s) for k in range(len(slo.limits))]
    found = []
    for v in range(len(edges_s) - 1):
        each = [rows[v] for rows in by_limit]
        short = min(range(len(each)), key=lambda k: (each[k].holds, each[k].kept_frac))
        found.append(
            Kept(
                float(edges_s[v]),
                float(edges_s[v + 1]),
                all(row.holds for row in each),
                slo.limits[short].name,
                each[short].kept_frac,
            )
        )
    return tuple(found)


def workers_over_time(run: ElasticRun, pools: int, edges_s: Floats) -> tuple[Floats, Floats]:
    """Workers paid and workers ready, on average in each window: (P, V) each."""
    paid, ready = np.zeros((pools, len(edges_s) - 1)), np.zeros((pools, len(edges_s) - 1))
    lengths_s = np.diff(edges_s)
    for span in run.spans:
        for found, from_s, to_s in (
            (paid, span.asked_s, span.gone_s),
            (ready, span.ready_s, min(span.given_up_s, span.gone_s)),
        ):
            inside_s = np.minimum(to_s, edges_s[1:]) - np.maximum(from_s, edges_s[:-1])
            found[span.pool] += np.clip(inside_s, 0.0, None) / lengths_s
    return paid, ready


def hurt_by_changes(run: ElasticRun, slo: Slo) -> tuple[Hurt, ...]:
    """Every change of a pool's size that the controller asked for, in order of time."""
    simulation, found = run.simulation, []
    late = _late(simulation, slo)
    retried = simulation.preemptions > 0
    for p in range(run.asked.shape[1] if run.asked.ndim == 2 else 0):
        sizes = run.asked[:, p]
        for d in np.flatnonzero(np.diff(sizes)) + 1:
            at_s, before, after = float(run.asked_s[d]), int(sizes[d - 1]), int(sizes[d])
            starting = [span for span in run.spans if span.pool == p and span.asked_s == at_s]
            until_s = max((span.ready_s for span in starting), default=at_s)
            arrived = (simulation.arrival_s >= at_s) & (simulation.arrival_s < until_s)
            stopped = [
                span for span in run.spans if span.pool == p and span.given_up_s == at_s and span.was_stopped
            ]
            rerouted = 0
            for span in stopped:
                mine = (simulation.prefill_worker == span.worker) | (simulation.decode_worker == span.worker)
                rerouted += int((mine & retried & (simulation.arrival_s <= span.gone_s)).sum())
            found.append(Hurt(at_s, p, before, after, rerouted, int((late & arrived).sum())))
    return tuple(sorted(found, key=lambda each: (each.time_s, each.pool)))


def _late(simulation: Simulation, slo: Slo) -> npt.NDArray[np.bool_]:
    """Requests that miss a limit, or were never served (tbt: in their longest gap)."""
    values_s = {
        "ttft": simulation.ttft_s,
        "tpot": simulation.tpot_s,
        "e2e": simulation.e2e_s,
        "tbt": simulation.tbt_max_s,
    }
    late = simulation.status != 0
    for limit in slo.limits:
        late |= values_s[limit.metric] > limit.limit_s
    return np.asarray(late)
