"""A fleet whose pools change during a run: workers start, are ready, drain and are gone.

A controller is asked for the sizes of all pools at every reading of its metrics. Workers that it asks for are
paid from that moment on and take requests once they are ready; those it gives up take no more requests, end
what they have, and are gone; what they have not ended by the limit on draining is routed anew and computed
again. Prefix caches are empty after a start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from planner.simulator.replay import Simulation

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ElasticPool:
    """How one pool of a fleet may change.

    A worker is ready `start_s` after it is asked for; the first `warm` of those that start at one time after
    `warm_start_s` (nodes that hold the image and the weights, without being paid as workers). `drain_limit_s`
    after it is given up a worker is stopped whatever it runs. Spot workers are told `notice_s` before they
    are taken away, `interruptions_per_h` times per hour of a worker.
    """

    start_s: float
    least: int = 0
    most: int = 1
    warm: int = 0
    warm_start_s: float = 0.0
    drain_limit_s: float = math.inf
    interruptions_per_h: float = 0.0
    notice_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What the engines' and the router's metrics say at `time_s`, of the `interval_s` before it; arrays (P,)
    by pool of the fleet. A rate or mean of nothing is NaN.

    `ready`, `starting` and `draining` count workers. Gauges of the ready workers (sums, but for `kv_frac`,
    the mean share of the KV blocks in use): `waiting` prompts in queues, `running` requests that hold a seat.
    `limbo` are requests that found no worker at all. Of the interval: requests that arrived at the pool, mean
    prompt and output tokens of those that finished, mean TTFT, mean gap between tokens (TPOT), requests that
    finished.
    """

    time_s: float
    interval_s: float
    ready: Ints
    starting: Ints
    draining: Ints
    waiting: Ints
    running: Ints
    kv_frac: Floats
    limbo: int
    arrived: Ints
    finished: Ints
    input_tokens: Floats
    output_tokens: Floats
    ttft_s: Floats
    tpot_s: Floats


class Controller(Protocol):
    """Asked every `every_s` seconds, from time zero on; it sees the reading of `lag_s` before.

    `start` forgets all that was seen; `sizes` (P,) are the workers it wants in each pool, ready and starting
    ones together. The runner holds them within least and most.
    """

    every_s: float
    lag_s: float

    def start(self, sizes: Sequence[int]) -> None: ...

    def sizes(self, reading: Reading) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Span:
    """One life of a worker: asked for, ready, given up (or told that it will be taken away) and gone; times
    after the end of the run are the end of the run. Workers there at the beginning are asked for at 0 and
    ready at 0.
    """

    worker: int  # over all pools
    pool: int
    asked_s: float
    ready_s: float
    given_up_s: float
    gone_s: float
    was_taken: bool = False  # by the spot market
    was_stopped: bool = False  # by the limit on draining


@dataclass(frozen=True, slots=True, eq=False)
class ElasticRun:
    """What happened to the requests, the workers, and what the controller asked for: times (D,), sizes
    (D, P) as held within least and most, and the readings it had.
    """

    simulation: Simulation
    spans: tuple[Span, ...]
    asked_s: Floats
    asked: Ints
    readings: tuple[Reading, ...] = ()
