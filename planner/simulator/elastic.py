"""A fleet whose pools change during a run: workers start, are ready, drain and are gone.

A controller is asked for the sizes of all pools at every reading of its metrics. Workers that it asks for are
paid from that moment on and take requests once they are ready; those it gives up take no more requests, end
what they have, and are gone; what they have not ended by the limit on draining is routed anew and computed
again. Prefix caches are empty after a start.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from planner.domain import Limit, row_of
from planner.errors import InputError
from planner.fleet import Fleet, Pool
from planner.policies import POOLS, STATIC, STEPWISE
from planner.simulator import kernel, layout, readings
from planner.simulator.kernel_variants import for_whole_kernel
from planner.simulator.layout import State
from planner.simulator.replay import Simulation, elastic_state, engine_of, results
from planner.traffic.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ElasticPool:
    """How one pool of a fleet may change.

    A worker is ready `start_s` after it is asked for; the first `warm` of those that start at one time after
    `warm_start_s` (nodes that hold the image and the weights, without being paid as workers). `drain_limit_s`
    after it is given up a worker is stopped whatever it runs. Spot workers are told `notice_s` before they
    are taken away, `interruptions_per_h` times per hour of a worker.

    `first` workers are there at time zero; None: as many as the fleet says. There is room for `most`, those
    that drain among them: who is asked for beyond that starts once one of these is gone.
    """

    start_s: float
    least: int = 0
    most: int = 1
    warm: int = 0
    warm_start_s: float = 0.0
    drain_limit_s: float = math.inf
    interruptions_per_h: float = 0.0
    notice_s: float = 0.0
    first: int | None = None

    def __post_init__(self) -> None:
        for name in ("start_s", "warm_start_s", "drain_limit_s", "interruptions_per_h", "notice_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} is {getattr(self, name)}, must be >= 0")
        if not math.isfinite(self.start_s) or self.warm < 0:
            what, found = ("warm", self.warm) if self.warm < 0 else ("start_s", self.start_s)
            raise InputError(f"{what} is {found}, must be finite and >= 0")
        if not 0 <= self.least <= self.most or self.most < 1:
            raise InputError(
                f"least {self.least} and most {self.most} workers of a pool: must be 0 <= least <= most, "
                "and most at least 1"
            )


@dataclass(frozen=True, slots=True, eq=False)
class MetricsReading:
    """What the engines' and the router's metrics say at `time_s`, of the `interval_s` before it; arrays (P,)
    by pool of the fleet. A rate or mean of nothing is NaN.

    `ready`, `starting` and `draining` count workers. Gauges of the ready workers (sums, but for `kv_frac`,
    the mean share of the KV blocks in use): `waiting` prompts in queues, `running` requests that hold a seat.
    `limbo` are requests that found no worker at all. Of the interval: requests that arrived at the pool, mean
    prompt and output tokens of those that finished, mean TTFT of those that had their first token, mean gap
    between tokens (TPOT) of those that finished, requests that finished. In a pool that prefills alone a
    request finishes with its first token, and the output tokens and TPOT are NaN; in one that decodes alone
    hand-offs arrive, and the TTFT is NaN. A request that has lost its worker meanwhile counts where it was
    routed last.

    The first reading is at time zero, and of `every_s`.
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

    def sizes(self, reading: MetricsReading) -> Sequence[int]: ...


@runtime_checkable
class Timed(Controller, Protocol):
    """A controller that names the times at which it is asked, instead of every `every_s` seconds."""

    def next_s(self, time_s: float) -> float:
        """When it is asked next, after `time_s`; infinite: never again."""


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
    readings: tuple[MetricsReading, ...] = ()
    end_s: float = 0.0  # when the last worker was gone, or the run over


class Stock:
    """GPUs by name that pools of one fleet, or of several, share: who starts takes its own, and gives them
    back once it is gone.

    The stock of "h100-80g" counts "h100-80g@spot" and "h100-80g@owned" too, as `master.Limits` says.
    """

    def __init__(self, gpus: Mapping[str, int]):
        self.left = dict(gpus)
        self.draining: list[_Run] = []  # one for each worker who will give its own back
        self.waiting: list[_Run] = []  # runs that want more than is left

    def claims(self, pool: Pool) -> dict[str, int]:
        """What one worker of a pool takes of each."""
        gpu = pool.type.gpu.name
        return {name: pool.type.gpus for name in {gpu, row_of(gpu)} if name in self.left}

    def has(self, claims: Mapping[str, int]) -> bool:
        return all(self.left[name] >= count for name, count in claims.items())

    def take(self, claims: Mapping[str, int], workers: int = 1) -> None:
        """So many workers' GPUs; given back where it is negative."""
        for name, count in claims.items():
            self.left[name] -= workers * count

    def wake(self, now_s: float) -> None:
        """Have everybody who waits look again."""
        woken, self.waiting = self.waiting, []
        for run in woken:
            run.push(now_s, _LOOKS)


LIMBO_PATIENCE_S = 3600.0  # and a start: so long requests wait for a worker after the last one arrived
_PATIENCE_S = 86400.0  # ... for the next of them to finish, where workers are busy
_ROOM_LOOK_S = 1.0  # how often it is looked whether a draining worker has made room for another
# of means, in the order of readings.SUMS, then of prompt and output tokens
_NUMBER_OF = [readings.TTFTS, readings.TPOTS, readings.KV_SHARES, readings.FINISHED_HERE, readings.OUTPUTS]
_OFF, _STARTING, _READY, _DRAINING = range(4)
# what happens at one moment, in this order
_BEGINS, _STOPS, _IS_TAKEN, _LOOKS, _READS, _DECIDES = range(6)


def simulate_elastic(
    fleet: Fleet,
    trace: Trace,
    pools: Sequence[ElasticPool],
    controller: Controller,
    *,
    limits: Sequence[Limit] = (),
    every_s: float | None = None,
    stop_early: bool = False,
    record: bool = False,
) -> ElasticRun:
    """Simulate `trace` on `fleet`, whose pools `controller` resizes, to the last token.

    `pools` (P,) belong to the pools of the fleet, whose counts are those at time zero. Of the workers of a
    pool those are given up first that still start, the latest asked for first; then ready ones, the latest
    ready first, as a Kubernetes ReplicaSet does (by what its pods run it does not ask), and among equals the
    highest number. A worker that is gone leaves its number to the next one. At most `warm` starts at a time
    are warm ones. Spot interruptions are drawn by the fleet's policies.seed, for each life of a number by
    itself, from the moment the worker is ready.

    Requests that find no worker wait in limbo as long as one that is off could hold them; where none of them
    ends for LIMBO_PATIENCE_S and a start after the last arrival they are left unfinished. `limits`,
    `stop_early` and `record` are those of `replay.simulate`, whose result a controller that changes nothing
    gives. Raises InputError for what cannot be simulated so: sessions, other engines than the stepwise one,
    pools that flip.
    """
    _check(fleet, trace, pools)
    _check_controller(controller)
    room, sizes = _room(fleet, pools), _first_sizes(fleet, pools)
    runs = 8 * len(trace) + 1024 if record else 0
    while True:
        state = elastic_state(room, trace, sizes, limits=limits, every_s=every_s, runs=runs)
        run = _Run(state, room, pools, controller, Stock({}))
        to_the_end([run], [sizes], stop_early=stop_early)
        needed = int(state.counters[layout.RUNS])
        if not record or needed <= runs:
            return run.result(results(run.state, room, trace, tuple(limits)))
        runs = needed


def simulate_in_windows(
    fleet: Fleet,
    trace: Trace,
    pools: Sequence[ElasticPool],
    controller: Controller,
    limits: Sequence[Limit],
    edges_s: Floats,
) -> ElasticRun:
    """`simulate_elastic` with the limits counted between the first and the last of `edges_s` (V + 1,), and in
    each of the windows there by itself (`counted_in` and `violations_in`). Nothing is recorded.
    """
    _check(fleet, trace, pools)
    _check_controller(controller)
    room = _room(fleet, pools)
    sizes = _first_sizes(fleet, pools)
    state = elastic_state(room, trace, sizes, limits=limits)
    state.window[:] = edges_s[0], edges_s[-1]
    within = np.zeros((len(limits), len(edges_s) - 1), layout.LIMIT)
    within[:] = state.limits[:, None]
    run = _Run(state._replace(edges_s=edges_s, in_windows=within), room, pools, controller, Stock({}))
    to_the_end([run], [sizes])
    return run.result(results(run.state, room, trace, tuple(limits)))


@dataclass(frozen=True, slots=True, eq=False)
class ElasticFleet:
    """One of several fleets with its own traffic and controller, as in `simulate_elastic`."""

    fleet: Fleet
    trace: Trace
    pools: Sequence[ElasticPool]
    controller: Controller
    limits: tuple[Limit, ...] = ()
    every_s: float | None = None


def simulate_together(parts: Sequence[ElasticFleet], stock: Mapping[str, int]) -> list[ElasticRun]:
    """Fleets, or one, side by side in time, that share nothing but the GPUs in `stock`.

    Of these all pools together never hold more, those that start or drain among them. Where there are too
    few, the pool of a fleet goes first that has the smallest part of what is wanted, and the others wait;
    between fleets, who asked first.
    """
    shared, runs, sizes = Stock(stock), [], []
    for each in parts:
        _check(each.fleet, each.trace, each.pools)
        _check_controller(each.controller)
        room = _room(each.fleet, each.pools)
        sizes.append(_first_sizes(each.fleet, each.pools))
        state = elastic_state(room, each.trace, sizes[-1], limits=each.limits, every_s=each.every_s, runs=0)
        runs.append(_Run(state, room, each.pools, each.controller, shared))
    to_the_end(runs, sizes)
    return [
        run.result(results(run.state, _room(each.fleet, each.pools), each.trace, each.limits))
        for run, each in zip(runs, parts, strict=True)
    ]


def to_the_end(runs: Sequence[_Run], sizes: Sequence[Sequence[int]], *, stop_early: bool = False) -> None:
    """Always let the run go on whose next pause is first: what one gives back, another has from then on."""
    steps = [run.steps(first, stop_early) for run, first in zip(runs, sizes, strict=True)]
    times = [(next(step), i) for i, step in enumerate(steps)]
    heapq.heapify(times)
    while times:
        _, i = heapq.heappop(times)
        if (next_s := next(steps[i], None)) is not None:
            times.append((next_s, i))
        times = [(runs[k].pause_s(), k) for _, k in times]  # who waited may have been woken
        heapq.heapify(times)


def _room(fleet: Fleet, pools: Sequence[ElasticPool]) -> Fleet:
    """The fleet with all the workers that may be there."""
    rooms = zip(fleet.pools, pools, strict=True)
    return replace(fleet, pools=tuple(replace(pool, count=each.most) for pool, each in rooms))


def _first_sizes(fleet: Fleet, pools: Sequence[ElasticPool]) -> list[int]:
    """Workers of each pool at time zero."""
    return [
        pool.count if each.first is None else each.first
        for pool, each in zip(fleet.pools, pools, strict=True)
    ]


def _check(fleet: Fleet, trace: Trace, pools: Sequence[ElasticPool]) -> None:
    """Raise InputError for what cannot be simulated with pools that change."""
    if len(pools) != len(fleet.pools):
        raise InputError(f"{len(pools)} pools may change, must be those of the fleet: {len(fleet.pools)}")
    for pool, each in zip(fleet.pools, pools, strict=True):
        first = pool.count if each.first is None else each.first
        if not each.least <= first <= each.most:
            raise InputError(
                f"pool {pool.name}: {first} workers at time zero, must be {each.least} to {each.most}"
            )
    if engine_of(fleet) != STEPWISE:
        raise InputError(
            f"batching {fleet.policies.batching!r}: its engine knows no pools that change; choose vllm-v1"
        )
    if trace.after.size:
        raise InputError(
            f"{trace.name}: requests wait for others (column after), which is not simulated with pools that "
            "change; drop the column"
        )
    if fleet.disturbances:
        raise InputError(
            "disturbances: workers of pools that change have no fixed numbers; leave them out, or give the "
            "pools interruptions_per_h"
        )
    if POOLS[name := fleet.policies.pools].code != STATIC:
        raise InputError(f"policies.pools is {name!r}, must be 'static' in a fleet whose pools change")


def _check_controller(controller: Controller) -> None:
    name = type(controller).__name__
    if not controller.every_s > 0:
        raise InputError(f"{name}: every_s is {controller.every_s}, must be > 0")
    if not 0 <= controller.lag_s < math.inf:
        raise InputError(f"{name}: lag_s is {controller.lag_s}, must be finite and >= 0")


@dataclass(slots=True, eq=False)
class _Slot:
    """A number for workers, one after the other: the life of the present one."""

    number: int
    pool: int
    first: int  # of the kernel's workers: its first rank
    ranks: int
    phase: int = _OFF
    lives: int = 0
    asked_s: float = 0.0
    ready_s: float = 0.0
    given_up_s: float = math.inf
    is_warm: bool = False
    was_taken: bool = False


class _Run:
    """One simulation: the kernel runs from one pause to the next, at which workers come and go."""

    def __init__(
        self, state: State, fleet: Fleet, pools: Sequence[ElasticPool], controller: Controller, stock: Stock
    ) -> None:
        self.stock, self.claims = stock, [stock.claims(pool) for pool in fleet.pools]
        self.pools, self.controller, self.seed = pools, controller, fleet.policies.seed
        self.timed = controller if isinstance(controller, Timed) else None
        self.slots: list[_Slot] = []
        of_worker: list[int] = []
        for p, pool in enumerate(fleet.pools):
            for _ in range(pool.count):
                self.slots.append(_Slot(len(self.slots), p, len(of_worker), pool.type.dp))
                of_worker += [p] * pool.type.dp
        self.of_pool = [[slot for slot in self.slots if slot.pool == p] for p in range(len(pools))]
        self.state = state._replace(disturbances=np.zeros(0, layout.DISTURBANCE))
        is_prefill = np.array([int(pool.role == "prefill") for pool in fleet.pools])
        is_decode = np.array([pool.role == "decode" for pool in fleet.pools])
        self.roles = is_prefill > 0, is_decode
        self.counting = readings.Counting(state, np.array(of_worker), is_prefill)
        self.events: list[tuple[float, int, int, int, int]] = []  # time, kind, order, slot, life
        self.rows: list[tuple[float, int, int]] = []  # time, kind, worker: for the kernel
        self.spans: list[Span] = []
        self.readings: list[MetricsReading] = []
        self.asked_s: list[float] = []
        self.asked: list[tuple[int, ...]] = []
        self.wanted: list[int] = []
        self.pushed = self.decisions = 0
        self.now_s = 0.0
        self.done, self.done_s = 0, 0.0  # requests that are, and since when no more of them
        self.is_looking = False  # for room

    # what happens when

    def push(self, time_s: float, kind: int, slot: int = 0) -> None:
        self.pushed += 1
        if time_s < math.inf:
            life = self.slots[slot].lives
            heapq.heappush(self.events, (time_s, kind, self.pushed, slot, life))

    def push_decision(self, time_s: float) -> None:
        """The next time at which the controller is asked, and the reading that it will have then."""
        lag_s = self.controller.lag_s
        if time_s - lag_s > 0.0:
            self.push(max(time_s - lag_s, self.now_s), _READS)
        self.push(time_s, _DECIDES)

    def steps(self, sizes: Sequence[int], stop_early: bool) -> Iterator[float]:
        """The run, from pause to pause; it yields when the next one will be. What cannot start within the
        stock raises InputError.
        """
        for p, size in enumerate(sizes):
            self.stock.take(self.claims[p], size)
            for slot in self.of_pool[p][:size]:
                slot.phase = _READY
                self.draw_interruption(slot)
        for name, left in self.stock.left.items():
            if left < 0:
                raise InputError(
                    f"stock of {name}: the workers at time zero take {-left} more GPUs than there are; allow "
                    "more, or begin with fewer workers"
                )
        self.wanted = list(sizes)
        self.controller.start(list(sizes))
        self.push(0.0, _READS)
        self.plan_decisions(-math.inf)
        yield self.pause_s()
        while self.advance(stop_early):
            kind = self.events[0][1]
            while self.events and self.events[0][0] <= self.now_s and self.events[0][1] != _BEGINS:
                if self.events[0][1] != kind and self.rows:
                    break  # the kernel first: what happens next must see what has happened
                _, kind, _, s, life = heapq.heappop(self.events)
                self.happen(kind, s, life)
            if self.is_stuck():
                break
            yield self.pause_s()
        self.see_who_is_gone()

    def plan_decisions(self, time_s: float) -> None:
        """Name the decisions after `time_s` as far ahead as their readings must be known."""
        if self.timed is not None:
            next_s = 0.0 if time_s < 0 else self.timed.next_s(time_s)
            if time_s >= 0 and next_s <= time_s:
                raise InputError(
                    f"{type(self.controller).__name__}: asked at {time_s:g} s, it named {next_s:g} s as the "
                    "next time, must be later"
                )
            self.push_decision(next_s)
            return
        every_s, lag_s = self.controller.every_s, self.controller.lag_s
        while self.decisions == 0 or (self.decisions - 1) * every_s <= max(time_s, 0.0) + lag_s:
            self.push_decision(self.decisions * every_s)
            self.decisions += 1

    def pause_s(self) -> float:
        """When the next pause will be; the kernel is told who is ready until then."""
        while self.events and self.events[0][1] == _BEGINS:
            time_s, _, _, s, life = heapq.heappop(self.events)
            slot = self.slots[s]
            if slot.lives == life and slot.phase == _STARTING:
                slot.phase = _READY
                self.rows.append((time_s, layout.UP, slot.first))
                self.draw_interruption(slot)
        return self.events[0][0] if self.events else math.inf

    def advance(self, stop_early: bool) -> bool:
        """Let the kernel run to the next pause. False where the run is over instead."""
        pause_s = self.pause_s()
        self.rows.append((pause_s, layout.PAUSE, 0))
        rows = self.state.disturbances
        if len(rows) < len(self.rows) + 1:
            rows = np.zeros(2 * len(self.rows) + 1, layout.DISTURBANCE)
            self.state = self.state._replace(disturbances=rows)
        for i, (time_s, kind, worker) in enumerate(self.rows):
            rows[i] = (time_s, kind, worker, 1.0)
        rows[len(self.rows)]["time_s"] = np.inf
        pause = len(self.rows) - 1
        self.rows.clear()
        self.state.counters[layout.NEXT_DISTURBANCE] = 0
        kernel.simulate_events(for_whole_kernel(self.state), 0, stop_early)
        if self.state.counters[layout.NEXT_DISTURBANCE] <= pause:
            return False
        self.now_s = pause_s
        self.see_who_is_gone()
        return True

    def happen(self, kind: int, s: int, life: int) -> None:
        slot, now_s = self.slots[s], self.now_s
        if kind == _READS:
            self.read()
        elif kind == _DECIDES:
            self.decide()
        elif kind == _LOOKS:
            self.is_looking = False
            self.resize()
        elif slot.lives == life and slot.phase != _OFF:
            if kind == _STOPS:
                self.end(slot, now_s, was_stopped=True)
            elif kind == _IS_TAKEN:
                slot.was_taken = True
                notice_s = self.pools[slot.pool].notice_s
                self.drain(slot, min(notice_s, self.pools[slot.pool].drain_limit_s))

    def is_stuck(self) -> bool:
        """Whether all requests have arrived, and nobody has finished one for very long: all wait in limbo, or
        workers go before they have computed anything.
        """
        counters = self.state.counters
        if counters[layout.ENTERED] < len(self.state.requests) or counters[layout.DONE] > self.done:
            self.done, self.done_s = int(counters[layout.DONE]), self.now_s
        start_s = max(pool.start_s for pool in self.pools)
        patience_s = LIMBO_PATIENCE_S if counters[layout.PENDING] == 0 else _PATIENCE_S
        return self.now_s - self.done_s >= patience_s + start_s

    # lives of workers

    def draw_interruption(self, slot: _Slot) -> None:
        per_h = self.pools[slot.pool].interruptions_per_h
        if per_h > 0:
            rng = np.random.default_rng((self.seed, slot.number, slot.lives))
            self.push(slot.ready_s + float(rng.exponential(3600.0 / per_h)), _IS_TAKEN, slot.number)

    def begin(self, slot: _Slot) -> None:
        pool = self.pools[slot.pool]
        warm = sum(each.is_warm for each in self.of_pool[slot.pool] if each.phase == _STARTING)
        self.stock.take(self.claims[slot.pool])
        slot.phase, slot.is_warm = _STARTING, warm < pool.warm
        slot.asked_s, slot.given_up_s, slot.was_taken = self.now_s, math.inf, False
        slot.ready_s = self.now_s + (pool.warm_start_s if slot.is_warm else pool.start_s)
        self.push(slot.ready_s, _BEGINS, slot.number)

    def give_up(self, slot: _Slot) -> None:
        if slot.phase == _STARTING:
            slot.given_up_s = slot.ready_s = self.now_s
            self.close(slot, self.now_s)
        else:
            self.drain(slot, self.pools[slot.pool].drain_limit_s)

    def drain(self, slot: _Slot, limit_s: float) -> None:
        if slot.phase == _READY:
            slot.phase, slot.given_up_s = _DRAINING, self.now_s
            self.stock.draining.append(self)
            self.stock.wake(self.now_s)
            self.rows.append((self.now_s, layout.DRAIN, slot.first))
        if self.is_empty(slot):
            self.end(slot, self.now_s)
        else:
            self.push(self.now_s + limit_s, _STOPS, slot.number)

    def is_empty(self, slot: _Slot) -> bool:
        workers = self.state.workers[slot.first : slot.first + slot.ranks]
        return not any(worker["assigned"] or worker["running"] or worker["used_blocks"] for worker in workers)

    def see_who_is_gone(self) -> None:
        for slot in self.slots:
            if slot.phase == _DRAINING and self.is_empty(slot):
                workers = self.state.workers[slot.first : slot.first + slot.ranks]
                self.end(slot, max(slot.given_up_s, float(workers["idle_since_s"].max())))

    def end(self, slot: _Slot, gone_s: float, was_stopped: bool = False) -> None:
        self.rows.append((self.now_s, layout.DOWN if was_stopped else layout.GONE, slot.first))
        self.close(slot, gone_s, was_stopped)

    def close(self, slot: _Slot, gone_s: float, was_stopped: bool = False) -> None:
        """A life is over: its number is free."""
        self.spans.append(self.span(slot, slot.given_up_s, gone_s, was_stopped))
        if slot.phase == _DRAINING:
            self.stock.draining.remove(self)
        self.stock.take(self.claims[slot.pool], -1)
        self.stock.wake(self.now_s)
        slot.phase = _OFF
        slot.lives += 1

    def span(self, slot: _Slot, given_up_s: float, gone_s: float, was_stopped: bool = False) -> Span:
        return Span(
            slot.number,
            slot.pool,
            slot.asked_s,
            slot.ready_s,
            given_up_s,
            gone_s,
            slot.was_taken,
            was_stopped and not slot.was_taken,
        )

    # what a controller sees and asks for

    def read(self) -> None:
        counting, phases = self.counting, [[slot.phase for slot in pool] for pool in self.of_pool]
        limbo = counting.count(int(self.state.counters[layout.ENTERED]), self.now_s)
        counts, sums = counting.counts.T.copy(), counting.sums.T
        of = np.concatenate((sums, counts[[readings.INPUT, readings.OUTPUT]]))
        number = counts[_NUMBER_OF]
        means = np.divide(of, number, out=np.full(of.shape, np.nan), where=number > 0)
        ttft_s, tpot_s, kv_frac, input_tokens, output_tokens = means
        every_s = self.controller.every_s if self.controller.every_s < math.inf else 0.0
        before_s = self.readings[-1].time_s if self.readings else self.now_s - every_s
        self.readings.append(
            MetricsReading(
                time_s=self.now_s,
                interval_s=self.now_s - before_s,
                ready=np.array([pool.count(_READY) for pool in phases]),
                starting=np.array([pool.count(_STARTING) for pool in phases]),
                draining=np.array([pool.count(_DRAINING) for pool in phases]),
                waiting=counts[readings.WAITING],
                running=counts[readings.RUNNING],
                kv_frac=kv_frac,
                limbo=limbo,
                arrived=counts[readings.ARRIVED],
                finished=counts[readings.FINISHED_HERE],
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
            )
        )

    def decide(self) -> None:
        latest_s = self.now_s - self.controller.lag_s
        k = len(self.readings) - 1
        while k > 0 and self.readings[k].time_s > latest_s:
            k -= 1
        wanted = self.controller.sizes(self.readings[k])
        if len(wanted) != len(self.pools):
            raise InputError(
                f"{type(self.controller).__name__}: {len(wanted)} sizes, must be one for each of the "
                f"{len(self.pools)} pools"
            )
        if not all(math.isfinite(size) for size in wanted):
            raise InputError(
                f"{type(self.controller).__name__}: asked at {self.now_s:g} s, it wants {list(wanted)} "
                "workers, must be finite numbers"
            )
        self.wanted = [
            min(max(int(size), pool.least), pool.most) for size, pool in zip(wanted, self.pools, strict=True)
        ]
        self.asked_s.append(self.now_s)
        self.asked.append(tuple(self.wanted))
        self.resize()
        self.plan_decisions(self.now_s)

    def resize(self) -> None:
        """Start workers, or give them up, until each pool has what is wanted, or the stock is used up."""
        alive = []
        for slots, wanted in zip(self.of_pool, self.wanted, strict=True):
            own = [slot for slot in slots if slot.phase in (_STARTING, _READY)]
            for slot in sorted(own, key=_cheap_to_give_up)[: max(len(own) - wanted, 0)]:
                self.give_up(slot)
            alive.append(min(len(own), wanted))
        is_short, without = False, False
        missing = {p for p, wanted in enumerate(self.wanted) if alive[p] < wanted}
        while missing:
            p = min(missing, key=lambda p: (alive[p] / self.wanted[p], p))
            off = next((slot for slot in self.of_pool[p] if slot.phase == _OFF), None)
            if off is None or not self.stock.has(self.claims[p]):
                is_short, without = is_short or off is None, without or off is not None
                missing.discard(p)
                continue
            self.begin(off)
            alive[p] += 1
            if alive[p] == self.wanted[p]:
                missing.discard(p)
        if without and self not in self.stock.waiting:
            self.stock.waiting.append(self)
        if is_short or (without and self.stock.draining):
            self.look(self.now_s + _ROOM_LOOK_S)
        for run in self.stock.draining if without else ():  # it sees at its pauses who is gone
            run.look(self.now_s + _ROOM_LOOK_S)

    def look(self, time_s: float) -> None:
        """Look then whether there is room."""
        if not self.is_looking:
            self.is_looking = True
            self.push(time_s, _LOOKS)

    def result(self, simulation: Simulation) -> ElasticRun:
        end_s = max(simulation.end_s, self.now_s, float(simulation.arrival_s[-1]))
        spans = [*self.spans, *(self.span(slot, end_s, end_s) for slot in self.slots if slot.phase != _OFF)]
        spans.sort(key=lambda span: (span.asked_s, span.worker))
        return ElasticRun(
            simulation=simulation,
            spans=tuple(_until(span, end_s) for span in spans),
            asked_s=np.array(self.asked_s),
            asked=np.array(self.asked, np.int64).reshape(-1, len(self.pools)),
            readings=tuple(self.readings),
            end_s=end_s,
        )


def _cheap_to_give_up(slot: _Slot) -> tuple[bool, float, int]:
    """Smallest first: those that start, the latest first, then those that are ready, the latest first."""
    since_s = slot.ready_s if slot.phase == _READY else slot.asked_s
    return slot.phase == _READY, -since_s, -slot.number


def _until(span: Span, end_s: float) -> Span:
    """Times after the end are the end."""
    return replace(
        span,
        asked_s=min(span.asked_s, end_s),
        ready_s=min(span.ready_s, end_s),
        given_up_s=min(span.given_up_s, end_s),
        gone_s=min(span.gone_s, end_s),
    )
