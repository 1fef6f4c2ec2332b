"""One fleet with pools that change, simulated alone, with every run of steps recorded where that is asked."""

from __future__ import annotations

from collections.abc import Sequence

from planner.domain import Limit
from planner.fleet import Fleet
from planner.simulator import layout
from planner.simulator.elastic import (
    Controller,
    ElasticFleet,
    ElasticPool,
    ElasticRun,
    Stock,
    _ElasticRun,
    run_to_the_end,
    simulate_together,
)
from planner.simulator.initial_state import elastic_state
from planner.simulator.replay import room_for_runs
from planner.traffic.trace import Trace


def simulate_elastic(
    fleet: Fleet,
    trace: Trace,
    pools: Sequence[ElasticPool],
    controller: Controller,
    *,
    limits: Sequence[Limit] = (),
    every_s: float | None = None,
    record: bool = False,
) -> ElasticRun:
    elastic = ElasticFleet(fleet, trace, pools, controller, tuple(limits), every_s)
    if not record:
        return simulate_together([elastic])[0]
    elastic.check()
    # The kernel records runs as far as its arrays have room. If there were more, all is simulated once more.
    runs = room_for_runs(trace)
    while True:
        state = elastic_state(
            elastic.largest_fleet, trace, elastic.first_sizes, limits=limits, every_s=every_s, runs=runs
        )
        run = _ElasticRun(state, elastic, Stock(None))
        run_to_the_end([run])
        needed = int(state.counters[layout.RUNS])  # The run has written into `state`.
        if needed <= runs:
            return run.result()
        runs = needed
