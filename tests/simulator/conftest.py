"""Whatever a test here simulates, the laws of conservation hold at its end."""

from collections.abc import Iterator
from typing import Any

import pytest
from conservation import check_conservation

from planner.fleet import Fleet
from planner.simulator import elastic, read_results, replay
from planner.simulator.layout import State
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace


@pytest.fixture(autouse=True, scope="package")
def _nothing_is_left() -> Iterator[None]:
    read_simulation = read_results.read_simulation

    def checked_simulation(state: State, fleet: Fleet, trace: Trace, *rest: Any) -> Simulation:
        check_conservation(state, fleet, len(trace))
        return read_simulation(state, fleet, trace, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "read_simulation", checked_simulation)
        patch.setattr(elastic, "read_simulation", checked_simulation)
        yield
