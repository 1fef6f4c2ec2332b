"""A fleet whose pools change during a run: workers start, become ready, drain and are gone.

At fixed times a controller sees the fleet's metrics and decides how many workers it wants in each pool. A
worker that it requests is paid from that moment on, and takes requests once it is ready. A worker that it
gives up drains: it takes no more requests, ends those it has, and is gone. Requests that it has not ended by
the limit on draining are routed anew and computed again. Prefix caches are empty after a start.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from planner.domain import FleetLimit, Limit
from planner.errors import InputError
from planner.fleet import Fleet, WorkerType
from planner.policies import POOLS, STATIC, STEPWISE
from planner.simulator import kernel, layout, readings
from planner.simulator.initial_state import elastic_state, engine_of
from planner.simulator.kernel_variants import for_whole_kernel
from planner.simulator.layout import State
from planner.simulator.read_results import read_simulation
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace
from planner.units import DAY_S, HOUR_S

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ElasticPool:
    """How one pool of a fleet may change.

    A worker is ready `start_s` after it is requested. A worker that is requested while fewer than `warm`
    others start warm is ready after `warm_start_s`, because its node holds the image and the weights already.
    Until a worker is requested on it, such a node is not paid. A worker is stopped `drain_limit_s` after it
    is given up, even if it still runs requests. Spot workers are interrupted `interruptions_per_h` times per
    hour of a worker, with a notice of `notice_s`.

    `first` workers are there at time zero; None stands for the pool's count in the fleet. The controller gets
    `least` to `most` workers. Draining workers count among the `most`: a worker for which there is no room
    starts once a draining one is gone.
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
        for name in ("warm", "start_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}, must be finite and >= 0")
        if not 0 <= self.least <= self.most or self.most < 1:
            raise InputError(
                f"least {self.least} and most {self.most} workers of a pool: must be 0 <= least <= most, "
                "and most at least 1"
            )


@dataclass(frozen=True, slots=True, eq=False)
class MetricsReading:
    """The metrics of engines and router at `time_s`, and over the `interval_s` before it.

    Arrays (P,) are by pool of the fleet. A mean of nothing is NaN. In a prefill pool a request finishes with
    its first token, and output tokens and TPOT are NaN. In a decode pool hand-offs arrive, and TTFT is NaN. A
    request that has lost its worker counts where it was routed last. The first reading is at time zero, with
    an interval of `every_s`.
    """

    time_s: float
    interval_s: float
    # Workers at `time_s`.
    ready: Ints
    starting: Ints
    draining: Ints
    # On the ready workers at `time_s`.
    waiting: Ints  # Requests that do not run yet: prompts that queue, and hand-offs.
    running: Ints  # Requests that have one of the max_num_seqs places of their engine.
    kv_frac: Floats  # The mean share of KV blocks in use.
    limbo: int  # Requests for which there is no worker at all.
    # Requests in the interval.
    arrived: Ints
    finished: Ints
    input_tokens: Floats  # The mean over the finished ones, as are output tokens and TPOT.
    output_tokens: Floats
    ttft_s: Floats  # The mean over those that got their first token.
    tpot_s: Floats


class Controller(Protocol):
    """Decides every `every_s` seconds, from time zero on, by the metrics as they were `lag_s` before.

    `start` begins a run with these sizes, without memory of an earlier run. `sizes` returns how many workers
    (P,) it wants in each pool, ready and starting ones together; the numbers are kept within the pool's least
    and most.
    """

    every_s: float
    lag_s: float

    def start(self, sizes: Sequence[int]) -> None: ...

    def sizes(self, reading: MetricsReading) -> Sequence[int]: ...


@runtime_checkable
class TimedController(Controller, Protocol):
    """A controller that names the times of its decisions itself, instead of deciding every `every_s`."""

    def next_s(self, time_s: float) -> float:
        """The time of its next decision after `time_s`; infinite if there is none."""


@dataclass(frozen=True, slots=True)
class Span:
    """One life of a worker: when it was requested, ready, given up and gone.

    The notice of a spot interruption counts as giving up. Times after the end of the run are the end of the
    run. Workers that are there at time zero are requested and ready at 0.
    """

    worker: int  # Its number, counted over all pools.
    pool: int
    requested_s: float
    ready_s: float
    given_up_s: float
    gone_s: float
    was_taken: bool = False  # The spot market took it.
    was_stopped: bool = False  # It was stopped at the limit on draining.


@dataclass(frozen=True, slots=True, eq=False)
class ElasticRun:
    """What happened to the requests and the workers, and the D decisions of the controller: at the times
    `requested_s` (D,) it wanted the sizes `requested_sizes` (D, P), kept within least and most. `readings`
    are all metrics that it saw.
    """

    simulation: Simulation
    spans: tuple[Span, ...]
    requested_s: Floats
    requested_sizes: Ints
    readings: tuple[MetricsReading, ...] = ()
    end_s: float = 0.0  # When the run was over.


class StockLimits(Protocol):
    """What the workers of all fleets may take together, as `FleetLimits` says (planner/solvers/master.py)."""

    def first_exceeded(self, counts: Sequence[tuple[WorkerType, int]]) -> FleetLimit | None: ...


class Stock:
    """GPUs that the pools of one fleet, or of several, share; None: as many as they want.

    A worker takes its GPUs when it starts and gives them back when it is gone.
    """

    def __init__(self, limits: StockLimits | None):
        self.limits = limits
        self.workers: Counter[WorkerType] = Counter()  # Workers that are there, by type.
        self.draining: list[_ElasticRun] = []  # The run of each draining worker, one entry for each worker.
        self.waiting: list[_ElasticRun] = []  # Runs that want more GPUs than are free.

    def first_exceeded(self, more: Mapping[WorkerType, int] = MappingProxyType({})) -> FleetLimit | None:
        """The limit that the workers exceed if there are `more`; None if they are within all."""
        if self.limits is None:
            return None
        return self.limits.first_exceeded(list((self.workers + Counter(more)).items()))

    def take(self, worker: WorkerType, workers: int = 1) -> None:
        """Take the GPUs of this many workers; a negative number gives them back."""
        if self.limits is not None:
            self.workers[worker] += workers

    def wake(self, now_s: float) -> None:
        """Let all runs that wait for GPUs look for them again now, since some were given back."""
        woken, self.waiting = self.waiting, []
        for run in woken:
            run.add_event(now_s, _LOOKS_FOR_ROOM)


# A run whose requests have all arrived ends if none finishes for this long plus the time of a start: the
# first number holds if all wait in limbo for a worker, the second if workers are busy. Both are our choice:
# an hour is long for a controller that may still start a worker, a day for the longest request.
LIMBO_PATIENCE_S = HOUR_S
_BUSY_PATIENCE_S = DAY_S
# A run that waits for draining workers to make room looks again after this long: short against any start.
_ROOM_LOOK_S = 1.0
# Which count of readings.py divides each sum to give a mean: the sums of TTFT, of TPOT and of KV shares, then
# the prompt tokens and the output tokens of finished requests.
_DIVISORS = [readings.TTFTS, readings.TPOTS, readings.KV_SHARES, readings.FINISHED_HERE, readings.OUTPUTS]
_OFF, _STARTING, _READY, _DRAINING = range(4)  # Phases of a worker.
# Kinds of events, in the order in which those of one moment happen: a worker becomes ready, is stopped by the
# limit on draining, is interrupted, has become empty after the kernel was done; a run looks for room; the
# metrics are read; the controller decides. All but the first make the kernel pause.
_IS_READY, _IS_STOPPED, _IS_INTERRUPTED, _IS_EMPTY, _LOOKS_FOR_ROOM, _READS_METRICS, _DECIDES = range(7)


def simulate_together(fleets: Sequence[ElasticFleet], limits: StockLimits | None = None) -> list[ElasticRun]:
    """Simulate one fleet or several, each with its own traffic and controller, that share the GPUs within
    `limits`, to the last token.

    If a pool shrinks, its workers that still start are given up first, the latest requested first; then ready
    ones, the latest ready first, and among equals the one with the highest number, as a Kubernetes ReplicaSet
    does. A worker that is gone leaves its number to the next one. Spot interruptions are drawn with the
    fleet's policies.seed, for each worker separately, from the moment it is ready. Requests that find no
    worker wait in limbo as long as one that is off could hold them. They are left unfinished if none finishes
    for LIMBO_PATIENCE_S plus the time of a start after the last arrival.

    All workers together, starting and draining ones included, are within the `limits` at any moment. If
    there are too few GPUs, then within a fleet the pool goes first that has the smallest share of the workers
    it wants, and between fleets the one that has waited longest, since it lacked GPUs or got a worker last.

    Raises InputError for what cannot be simulated so: sessions, other engines than the stepwise one, pools
    that flip.
    """
    shared = Stock(limits)
    for elastic in fleets:
        elastic.check()
    runs = [_ElasticRun(elastic.first_state(), elastic, shared) for elastic in fleets]
    run_to_the_end(runs)
    return [run.result() for run in runs]


def simulate_in_windows(
    fleet: Fleet,
    trace: Trace,
    pools: Sequence[ElasticPool],
    controller: Controller,
    limits: Sequence[Limit],
    edges_s: Floats,
    *,
    until_s: float = 0.0,
) -> ElasticRun:
    """Simulate one fleet as `simulate_together` does, with limits counted from the first to the last of
    `edges_s` (V + 1,), at least until `until_s`.

    They are also counted in each window between two edges (`counted_in` and `violations_in`). Steps are not
    recorded.
    """
    elastic_fleet = ElasticFleet(fleet, trace, pools, controller, tuple(limits), until_s=until_s)
    elastic_fleet.check()
    state = elastic_fleet.first_state()
    state.window[:] = edges_s[0], edges_s[-1]
    in_windows = np.zeros((len(limits), len(edges_s) - 1), layout.LIMIT)
    in_windows[:] = state.limits[:, None]
    run = _ElasticRun(state._replace(edges_s=edges_s, in_windows=in_windows), elastic_fleet, Stock(None))
    run_to_the_end([run])
    return run.result()


@dataclass(frozen=True, slots=True, eq=False)
class ElasticFleet:
    """A fleet with its own traffic and controller, alone or beside others with which it shares GPUs.

    `pools` (P,) say how each pool of the fleet may change. `limits` and `every_s` are those of
    `replay.simulate`, which gives the same result if the controller changes nothing. Until `until_s` the
    controller resizes the fleet even if all of its requests are done, because the GPUs that it gives back may
    be wanted by the other fleets, and are paid no longer.
    """

    fleet: Fleet
    trace: Trace
    pools: Sequence[ElasticPool]
    controller: Controller
    limits: tuple[Limit, ...] = ()
    every_s: float | None = None
    until_s: float = 0.0

    @property
    def largest_fleet(self) -> Fleet:
        """The fleet with as many workers as may ever be there at once; the kernel has records for all."""
        return self.fleet.with_counts(pool.most for pool in self.pools)

    @property
    def first_sizes(self) -> list[int]:
        """Workers of each pool at time zero."""
        return [
            pool.count if elastic.first is None else elastic.first
            for pool, elastic in zip(self.fleet.pools, self.pools, strict=True)
        ]

    def first_state(self) -> State:
        """The kernel's arrays at time zero."""
        return elastic_state(
            self.largest_fleet, self.trace, self.first_sizes, limits=self.limits, every_s=self.every_s
        )

    def check(self) -> None:
        """Raise InputError for what cannot be simulated with pools that change."""
        fleet, pools = self.fleet, self.pools
        if len(pools) != len(fleet.pools):
            raise InputError(f"{len(pools)} pools may change, must be those of the fleet: {len(fleet.pools)}")
        for pool, elastic, first in zip(fleet.pools, pools, self.first_sizes, strict=True):
            if not elastic.least <= first <= elastic.most:
                raise InputError(
                    f"pool {pool.name}: {first} workers at time zero, must be {elastic.least} to "
                    f"{elastic.most}"
                )
        if engine_of(fleet) != STEPWISE:
            raise InputError(
                f"batching {fleet.policies.batching!r}: its engine knows no pools that change; choose vllm-v1"
            )
        refuse_waits(self.trace)
        if fleet.disturbances:
            raise InputError(
                "disturbances: workers of pools that change have no fixed numbers; leave them out, or give "
                "the pools interruptions_per_h"
            )
        if fleet.pinned:
            raise InputError("pinned: workers of pools that change start with empty caches; leave it out")
        if POOLS[name := fleet.policies.pools].code != STATIC:
            raise InputError(f"policies.pools is {name!r}, must be 'static' in a fleet whose pools change")
        name = type(self.controller).__name__
        if not self.controller.every_s > 0:
            raise InputError(f"{name}: every_s is {self.controller.every_s}, must be > 0")
        if not 0 <= self.controller.lag_s < math.inf:
            raise InputError(f"{name}: lag_s is {self.controller.lag_s}, must be finite and >= 0")


def refuse_waits(trace: Trace, llm: str = "") -> None:
    """Raise InputError if requests of the trace wait for others; `llm` is its LLM, if there are several."""
    if trace.after.size:
        place = f"llms: {llm}: {trace.name}" if llm else trace.name
        raise InputError(
            f"{place}: requests of sessions and agents wait for others, which is not simulated with pools "
            "that change; drop the column after, or describe the traffic by its rate. `plan` finds the fleet "
            "that carries them all day"
        )


def run_to_the_end(runs: Sequence[_ElasticRun]) -> None:
    """Advance several runs together, each time the one whose next pause is first, and among those of one
    moment the one that has waited longest for GPUs.

    So GPUs that one run gives back are there for the others from that moment on.
    """
    simulations = [run.simulate_by_pauses() for run in runs]
    for simulation in simulations:
        next(simulation)
    present = list(range(len(runs)))
    while present:
        # A run that waited for GPUs may have been woken: it then pauses sooner than it announced.
        i = min(present, key=lambda k: (runs[k].pause_s(), runs[k].waits_since_s, k))
        if next(simulations[i], None) is None:
            present.remove(i)


@dataclass(slots=True, eq=False)
class _WorkerSlot:
    """A numbered place in a pool, which one worker after the other takes. The fields describe the present
    worker; `lives` is the number of its life.
    """

    number: int
    pool: int
    first_rank: int  # An index into the kernel's workers, of which each is a rank.
    ranks: int
    phase: int = _OFF
    lives: int = 0
    requested_s: float = 0.0
    ready_s: float = 0.0
    given_up_s: float = math.inf
    is_warm: bool = False
    was_taken: bool = False


class _Event(NamedTuple):
    """What is to happen at `time_s`. Events are sorted by time, then kind, then the `order` in which they
    were added. An event about a worker is about one `life` of its slot (`_WorkerSlot`).
    """

    time_s: float
    kind: int
    order: int
    slot: int
    life: int


class _ElasticRun:
    """One simulation: the kernel runs from one pause to the next, at which workers come and go."""

    def __init__(self, state: State, elastic_fleet: ElasticFleet, stock: Stock) -> None:
        """`state` has the kernel's arrays at time zero (`ElasticFleet.first_state`)."""
        fleet, pools, controller = elastic_fleet.largest_fleet, elastic_fleet.pools, elastic_fleet.controller
        self.elastic_fleet, self.fleet = elastic_fleet, fleet
        self.stock, self.types = stock, [pool.type for pool in fleet.pools]
        self.pools, self.controller, self.seed = pools, controller, fleet.policies.seed
        # The controller, if it names the times of its decisions.
        self.timed = controller if isinstance(controller, TimedController) else None
        self.slots: list[_WorkerSlot] = []
        pool_of_worker: list[int] = []
        for p, pool in enumerate(fleet.pools):
            for _ in range(pool.count):
                self.slots.append(_WorkerSlot(len(self.slots), p, len(pool_of_worker), pool.type.dp))
                pool_of_worker += [p] * pool.type.dp
        self.slots_by_pool = [[slot for slot in self.slots if slot.pool == p] for p in range(len(pools))]
        self.state = state._replace(disturbances=np.zeros(0, layout.DISTURBANCE))
        is_prefill = np.array([int(pool.role == "prefill") for pool in fleet.pools])
        self.counting = readings.Counting(state, np.array(pool_of_worker), is_prefill)
        self.events: list[_Event] = []  # A heap; at its events the kernel pauses.
        self.starts: list[_Event] = []  # A heap: when workers will be ready.
        # What the kernel is to carry out until the next pause: (time, kind of disturbance, first rank).
        self.due_disturbances: list[tuple[float, int, int]] = []
        self.spans: list[Span] = []
        self.readings: list[MetricsReading] = []
        self.requested_s: list[float] = []
        self.requested_sizes: list[tuple[int, ...]] = []
        self.wanted: list[int] = []  # (P,) The sizes that the controller decided on last.
        self.events_added = 0
        self.decisions_planned = 0  # For a controller that decides every `every_s` seconds.
        self.now_s = 0.0
        # How many requests are done, and when that number last rose or requests still arrived (`is_stuck`).
        self.done, self.done_s = 0, 0.0
        self.waits_since_s = math.inf  # Since when the run lacks GPUs, or its last start meanwhile.
        self.has_look_planned = False  # Whether an event _LOOKS_FOR_ROOM is under way.
        self.is_done = False  # Whether the kernel has served all requests; it is ahead of `now_s` then.

    # Events.

    def add_event(self, time_s: float, kind: int, slot: int = 0) -> None:
        """Add an event about the present life of a slot; it is ignored if that life is over by then. Events
        that are about no worker have slot 0, which is not read.
        """
        self.events_added += 1
        if time_s < math.inf:
            life = self.slots[slot].lives
            heap = self.starts if kind == _IS_READY else self.events
            heapq.heappush(heap, _Event(time_s, kind, self.events_added, slot, life))

    def add_decision(self, time_s: float) -> None:
        """Add a decision of the controller, and `lag_s` before it the reading that it will see."""
        lag_s = self.controller.lag_s
        if time_s - lag_s > 0.0:  # The reading at time zero is planned when the simulation begins.
            self.add_event(max(time_s - lag_s, self.now_s), _READS_METRICS)
        self.add_event(time_s, _DECIDES)

    def simulate_by_pauses(self) -> Iterator[float]:
        """Simulate from pause to pause. It yields before and after each one, so that other runs may go first;
        what it yields is the time of the next pause.

        Raises InputError if the stock has too few GPUs for the workers at time zero.
        """
        self.wanted = self.elastic_fleet.first_sizes
        for p, size in enumerate(self.wanted):
            self.stock.take(self.types[p], size)
            for slot in self.slots_by_pool[p][:size]:
                slot.phase = _READY
                self.draw_interruption(slot)
        if (limit := self.stock.first_exceeded()) is not None:
            raise InputError(
                f"stock of {limit.gpu}: the workers at time zero take more GPUs than there are; allow more, "
                "or begin with fewer workers"
            )
        self.controller.start(self.wanted)
        self.add_event(0.0, _READS_METRICS)
        self.plan_decisions(-math.inf)
        yield self.pause_s()
        while self.run_to_pause():
            yield self.pause_s()  # Workers that have gone may have made room for runs that waited longer.
            self.carry_out_events()
            if self.is_stuck():
                break
            yield self.pause_s()
        yield from self.wind_down()

    def wind_down(self) -> Iterator[float]:
        """Go on with the lives of workers after the kernel has served all requests, from pause to pause.

        The kernel is ahead of the other runs then: a draining worker is gone, and its GPUs are free, when its
        last request has ended. Controllers go on until `until_s`.
        """
        self.is_done = True
        for slot in self.slots:
            if slot.phase == _DRAINING and self.is_empty(slot):
                self.add_event(self.last_work_s(slot), _IS_EMPTY, slot.number)
        while (pause_s := self.pause_s()) < math.inf:
            yield pause_s
            pause_s = self.pause_s()  # Another run may have woken this one.
            if pause_s >= self.elastic_fleet.until_s and self.events[0].kind != _IS_EMPTY:
                # The controller has nothing to do any more; only the ends of draining workers are still due.
                heapq.heappop(self.events)
                continue
            self.now_s = max(self.now_s, pause_s)
            self.make_ready(self.now_s)
            self.due_disturbances.clear()
            self.carry_out_events()
        self.now_s = max(self.now_s, self.elastic_fleet.until_s)

    def carry_out_events(self) -> None:
        """Carry out what is planned for now, one kind of event after another, up to the next worker that
        becomes ready now, which `run_to_pause` passes on to the kernel.
        """
        kind = self.events[0].kind
        while self.events and self.events[0].time_s <= self.now_s:
            if self.starts and self.starts[0].time_s <= self.now_s:
                break
            if self.events[0].kind != kind and self.due_disturbances:
                break  # The kernel first carries out what has happened, so that later events see it.
            event = heapq.heappop(self.events)
            kind = event.kind
            self.carry_out(event)

    def plan_decisions(self, time_s: float) -> None:
        """Add the decisions after `time_s` up to `lag_s` ahead, as their readings come that much sooner."""
        if self.timed is not None:
            next_s = 0.0 if time_s < 0 else self.timed.next_s(time_s)
            if time_s >= 0 and next_s <= time_s:
                raise InputError(
                    f"{type(self.controller).__name__}: its decision at {time_s:g} s names {next_s:g} s as "
                    "the time of the next one, must be later"
                )
            self.add_decision(next_s)
            return
        every_s, lag_s = self.controller.every_s, self.controller.lag_s
        # The last decision that is planned lies after `time_s` + `lag_s`.
        until_s = max(time_s, 0.0) + lag_s
        while self.decisions_planned == 0 or (self.decisions_planned - 1) * every_s <= until_s:
            self.add_decision(self.decisions_planned * every_s)
            self.decisions_planned += 1

    def pause_s(self) -> float:
        """When the next pause will be.

        A worker that becomes ready before it needs no pause: the kernel carries that out as a disturbance.
        """
        return self.events[0].time_s if self.events else math.inf

    def make_ready(self, until_s: float) -> None:
        """Let the kernel take workers into service that become ready until then."""
        while self.starts and self.starts[0].time_s <= until_s:
            event = heapq.heappop(self.starts)
            slot = self.slots[event.slot]
            if slot.lives == event.life and slot.phase == _STARTING:
                slot.phase = _READY
                self.due_disturbances.append((event.time_s, layout.UP, slot.first_rank))

    def run_to_pause(self) -> bool:
        """Let the kernel run to the next pause. False if the run ends before it."""
        pause_s = self.pause_s()
        self.make_ready(pause_s)
        self.due_disturbances.append((pause_s, layout.PAUSE, 0))
        disturbances = self.state.disturbances
        # One disturbance more, at an infinite time, ends the list. An array that is too short is replaced by
        # one with room for twice as many, so that this seldom happens.
        if len(disturbances) < len(self.due_disturbances) + 1:
            disturbances = np.zeros(2 * len(self.due_disturbances) + 1, layout.DISTURBANCE)
            self.state = self.state._replace(disturbances=disturbances)
        for i, (time_s, kind, worker) in enumerate(self.due_disturbances):
            # The last field is how much slower a worker becomes; none of these kinds reads it.
            disturbances[i] = (time_s, kind, worker, 1.0)
        disturbances[len(self.due_disturbances)]["time_s"] = np.inf
        pause = len(self.due_disturbances) - 1
        self.due_disturbances.clear()
        self.state.counters[layout.NEXT_DISTURBANCE] = 0
        # 0: requests arrive at their own times. False: it does not stop where a limit is broken.
        kernel.simulate_events(for_whole_kernel(self.state), 0, False)
        if self.state.counters[layout.NEXT_DISTURBANCE] <= pause:
            return False  # All requests were done before the pause.
        self.now_s = pause_s
        self.end_drained()
        return True

    def carry_out(self, event: _Event) -> None:
        """Carry out an event; one about a worker that is gone changes nothing."""
        slot, now_s = self.slots[event.slot], self.now_s
        if event.kind == _READS_METRICS:
            self.read_metrics()
        elif event.kind == _DECIDES:
            self.decide_sizes()
        elif event.kind == _LOOKS_FOR_ROOM:
            self.has_look_planned = False
            self.resize_pools()
        elif slot.lives == event.life and slot.phase != _OFF:
            if event.kind == _IS_STOPPED:
                self.remove_worker(slot, now_s, was_stopped=True)
            elif event.kind == _IS_INTERRUPTED:
                slot.was_taken = True
                notice_s = self.pools[slot.pool].notice_s
                self.drain_worker(slot, min(notice_s, self.pools[slot.pool].drain_limit_s))
            elif event.kind == _IS_EMPTY:
                self.remove_worker(slot, now_s)

    def is_stuck(self) -> bool:
        """Whether all requests have arrived and none has finished for very long.

        Then all wait in limbo, or workers are given up before they have computed anything.
        """
        counters = self.state.counters
        if counters[layout.ENTERED] < len(self.state.requests) or counters[layout.DONE] > self.done:
            self.done, self.done_s = int(counters[layout.DONE]), self.now_s
        start_s = max(pool.start_s for pool in self.pools)
        patience_s = LIMBO_PATIENCE_S if counters[layout.PENDING] == 0 else _BUSY_PATIENCE_S
        return self.now_s - self.done_s >= patience_s + start_s

    # Lives of workers.

    def draw_interruption(self, slot: _WorkerSlot) -> None:
        """Draw when the spot market takes this worker, by its number and life."""
        per_h = self.pools[slot.pool].interruptions_per_h
        if per_h > 0:
            rng = np.random.default_rng((self.seed, slot.number, slot.lives))
            taken_s = slot.ready_s + float(rng.exponential(HOUR_S / per_h))
            self.add_event(taken_s, _IS_INTERRUPTED, slot.number)

    def start_worker(self, slot: _WorkerSlot) -> None:
        """Start a worker, warm while fewer than `warm` of its pool start so."""
        pool = self.pools[slot.pool]
        warm_starts = sum(
            other.is_warm for other in self.slots_by_pool[slot.pool] if other.phase == _STARTING
        )
        self.stock.take(self.types[slot.pool])
        slot.phase, slot.is_warm = _STARTING, warm_starts < pool.warm
        slot.requested_s, slot.given_up_s, slot.was_taken = self.now_s, math.inf, False
        slot.ready_s = self.now_s + (pool.warm_start_s if slot.is_warm else pool.start_s)
        self.add_event(slot.ready_s, _IS_READY, slot.number)
        self.draw_interruption(slot)

    def give_up_worker(self, slot: _WorkerSlot) -> None:
        """Give up a worker for the controller: one that starts is gone, one that is ready drains."""
        if slot.phase == _STARTING:
            slot.given_up_s = slot.ready_s = self.now_s
            self.end_life(slot, self.now_s)
        else:
            self.drain_worker(slot, self.pools[slot.pool].drain_limit_s)

    def drain_worker(self, slot: _WorkerSlot, limit_s: float) -> None:
        """Let a worker take no more requests; it is stopped after `limit_s` if it is not empty by then."""
        if slot.phase == _READY:
            slot.phase, slot.given_up_s = _DRAINING, self.now_s
            self.stock.draining.append(self)
            self.stock.wake(self.now_s)
            self.due_disturbances.append((self.now_s, layout.DRAIN, slot.first_rank))
        if self.is_done and self.is_empty(slot):
            self.add_event(self.last_work_s(slot), _IS_EMPTY, slot.number)
        elif self.is_empty(slot):
            self.remove_worker(slot, self.now_s)
        else:
            self.add_event(self.now_s + limit_s, _IS_STOPPED, slot.number)

    def is_empty(self, slot: _WorkerSlot) -> bool:
        """Whether no rank of the worker has a request or KV blocks."""
        workers = self.state.workers[slot.first_rank : slot.first_rank + slot.ranks]
        return not any(worker["assigned"] or worker["running"] or worker["used_blocks"] for worker in workers)

    def end_drained(self) -> None:
        """End workers that drained and became empty since the last pause, at the time they became idle."""
        for slot in self.slots:
            if slot.phase == _DRAINING and self.is_empty(slot):
                workers = self.state.workers[slot.first_rank : slot.first_rank + slot.ranks]
                self.remove_worker(slot, max(slot.given_up_s, float(workers["idle_since_s"].max())))

    def last_work_s(self, slot: _WorkerSlot) -> float:
        """When a worker that was given up served its last request. The run must have served all requests."""
        requests = self.state.requests
        # A request that is not handed off is decoded where it is prefilled.
        prefilled, decoded = requests["prefill_worker"], requests["decode_worker"]
        decoded = np.where(decoded < 0, prefilled, decoded)
        last_s = self.now_s
        # `fmax` passes over times that are NaN.
        for worker, times_s in ((prefilled, requests["first_token_s"]), (decoded, requests["last_token_s"])):
            is_own = (worker >= slot.first_rank) & (worker < slot.first_rank + slot.ranks)
            last_s = float(np.fmax.reduce(times_s[is_own], initial=last_s))
        return last_s

    def remove_worker(self, slot: _WorkerSlot, gone_s: float, was_stopped: bool = False) -> None:
        """Remove a worker; if it `was_stopped`, the kernel routes its requests anew. Its life ended at
        `gone_s`, which is before now if it has drained since the last pause.
        """
        kind = layout.DOWN if was_stopped else layout.GONE
        self.due_disturbances.append((self.now_s, kind, slot.first_rank))
        self.end_life(slot, gone_s, was_stopped)

    def end_life(self, slot: _WorkerSlot, gone_s: float, was_stopped: bool = False) -> None:
        """Note the life of a worker, which is over, give its GPUs back and free its number."""
        self.spans.append(self.span(slot, slot.given_up_s, gone_s, was_stopped))
        if slot.phase == _DRAINING:
            self.stock.draining.remove(self)
        self.stock.take(self.types[slot.pool], -1)
        self.stock.wake(self.now_s)
        slot.phase = _OFF
        slot.lives += 1

    def span(self, slot: _WorkerSlot, given_up_s: float, gone_s: float, was_stopped: bool = False) -> Span:
        """The present life of a slot as a Span; an interruption is not also a stop."""
        return Span(
            slot.number,
            slot.pool,
            slot.requested_s,
            slot.ready_s,
            given_up_s,
            gone_s,
            slot.was_taken,
            was_stopped and not slot.was_taken,
        )

    # What a controller sees and asks for.

    def read_metrics(self) -> None:
        """Note what controllers may see: workers and requests now, and means since the last reading."""
        counting, phases = self.counting, [[slot.phase for slot in pool] for pool in self.slots_by_pool]
        limbo = counting.count(int(self.state.counters[layout.ENTERED]), self.now_s)
        # By figure (rows) and pool (columns). Counts are copied, as the next reading overwrites them.
        counts, sums = counting.counts.T.copy(), counting.sums.T
        totals = np.concatenate((sums, counts[[readings.INPUT, readings.OUTPUT]]))
        divisors = counts[_DIVISORS]
        means = np.divide(totals, divisors, out=np.full(totals.shape, np.nan), where=divisors > 0)
        ttft_s, tpot_s, kv_frac, input_tokens, output_tokens = means
        # Before the first reading there is no interval for a controller that names its times.
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

    def decide_sizes(self) -> None:
        """Let the controller decide by the latest reading at least `lag_s` old and resize the pools."""
        latest_s = self.now_s - self.controller.lag_s
        k = len(self.readings) - 1
        # If the lag is longer than the run so far, the controller sees the first reading.
        while k > 0 and self.readings[k].time_s > latest_s:
            k -= 1
        sizes = self.controller.sizes(self.readings[k])
        if len(sizes) != len(self.pools):
            raise InputError(
                f"{type(self.controller).__name__}: {len(sizes)} sizes, must be one for each of the "
                f"{len(self.pools)} pools"
            )
        if not all(math.isfinite(size) for size in sizes):
            raise InputError(
                f"{type(self.controller).__name__}: its decision at {self.now_s:g} s is {list(sizes)} "
                "workers, must be finite numbers"
            )
        self.wanted = [
            min(max(int(size), pool.least), pool.most) for size, pool in zip(sizes, self.pools, strict=True)
        ]
        self.requested_s.append(self.now_s)
        self.requested_sizes.append(tuple(self.wanted))
        self.resize_pools()
        self.plan_decisions(self.now_s)

    def resize_pools(self) -> None:
        """Start workers or give them up until each pool has as many as wanted, or numbers or GPUs run out."""
        present_counts = []
        for slots, wanted in zip(self.slots_by_pool, self.wanted, strict=True):
            present = [slot for slot in slots if slot.phase in (_STARTING, _READY)]
            for slot in sorted(present, key=_order_of_giving_up)[: max(len(present) - wanted, 0)]:
                self.give_up_worker(slot)
            present_counts.append(min(len(present), wanted))
        lacks_numbers, lacks_gpus, gets_workers = False, False, False
        missing = {p for p, wanted in enumerate(self.wanted) if present_counts[p] < wanted}
        while missing:
            # The pool with the smallest share of the workers it wants comes first.
            p = min(missing, key=lambda p: (present_counts[p] / self.wanted[p], p))
            free_slot = next((slot for slot in self.slots_by_pool[p] if slot.phase == _OFF), None)
            if free_slot is None:  # All numbers are taken, some by workers that drain.
                lacks_numbers = True
                missing.discard(p)
                continue
            if self.stock.first_exceeded({self.types[p]: 1}) is not None:
                lacks_gpus = True
                missing.discard(p)
                continue
            self.start_worker(free_slot)
            gets_workers = True
            present_counts[p] += 1
            if present_counts[p] == self.wanted[p]:
                missing.discard(p)
        if not lacks_gpus:
            self.waits_since_s = math.inf
        elif gets_workers or self.waits_since_s == math.inf:
            self.waits_since_s = self.now_s
        if lacks_gpus and self not in self.stock.waiting:
            self.stock.waiting.append(self)
        if lacks_numbers or (lacks_gpus and self.stock.draining):
            self.look_for_room(self.now_s + _ROOM_LOOK_S)
        # A run sees only at its pauses that its draining workers are gone, so those must pause too.
        for run in self.stock.draining if lacks_gpus else ():
            run.look_for_room(self.now_s + _ROOM_LOOK_S)

    def look_for_room(self, time_s: float) -> None:
        """Pause at `time_s` to resize again, if no such pause is planned yet."""
        if not self.has_look_planned:
            self.has_look_planned = True
            self.add_event(time_s, _LOOKS_FOR_ROOM)

    def result(self) -> ElasticRun:
        """What happened, with the lives of workers that are still there at the end."""
        simulation = read_simulation(
            self.state, self.fleet, self.elastic_fleet.trace, self.elastic_fleet.limits
        )
        end_s = max(simulation.end_s, self.now_s, float(simulation.arrival_s[-1]))
        present = [slot for slot in self.slots if slot.phase != _OFF]
        spans = [*self.spans, *(self.span(slot, slot.given_up_s, end_s) for slot in present)]
        spans.sort(key=lambda span: (span.requested_s, span.worker))
        return ElasticRun(
            simulation=simulation,
            spans=tuple(_clip_span(span, end_s) for span in spans),
            requested_s=np.array(self.requested_s),
            requested_sizes=np.array(self.requested_sizes, np.int64).reshape(-1, len(self.pools)),
            readings=tuple(self.readings),
            end_s=end_s,
        )


def _order_of_giving_up(slot: _WorkerSlot) -> tuple[bool, float, int]:
    """A key to sort workers that start, the latest first, before those that are ready, the latest first."""
    since_s = slot.ready_s if slot.phase == _READY else slot.requested_s
    return slot.phase == _READY, -since_s, -slot.number


def _clip_span(span: Span, end_s: float) -> Span:
    """The same life, with times after the end of the run set to the end."""
    return replace(
        span,
        requested_s=min(span.requested_s, end_s),
        ready_s=min(span.ready_s, end_s),
        given_up_s=min(span.given_up_s, end_s),
        gone_s=min(span.gone_s, end_s),
    )
