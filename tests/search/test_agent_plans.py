"""Plans for agents: limits on turns and tasks are kept, bounded and reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plans import CATALOG

import fleetplan
from planner.api.results import PlanResult
from planner.errors import InfeasibleError
from planner.simulator.slo_verdict import measured

AGENTS = {
    "agents": {"count": 12, "turns": 4, "tool": "2 s", "idle": "5 s", "system": 1600, "most_tokens": 20000},
    "input": 800,
    "output": 150,
    "duration": "600 s",
}
QUESTION: dict[str, Any] = {
    "llm": "llama-3.1-70b",
    "traffic": AGENTS,
    "fleet": {"gpus": ["h100-80g"], "max_num_batched_tokens": 2048},
    "policies": {"prefix_cache": True, "routing": ["cache-aware"]},
    "safety": "none",
    "catalog": CATALOG,
}


def test_a_limit_on_tasks_is_judged_over_tasks() -> None:
    """The percentile is that of last end less first arrival of each task, recomputed from the requests."""
    found = fleetplan.plan({"task": {"p90": "60 s"}, "turn": {"p90": "30 s"}}, **QUESTION)
    assert isinstance(found, PlanResult)
    simulation, trace = found.plan.simulation, found.plan.trace
    inside, ends_s = measured(simulation), simulation.arrival_s + simulation.e2e_s
    times_s = []
    for task in np.unique(trace.task).tolist():
        own = np.flatnonzero(trace.task == task)
        if inside[own[-1]]:
            times_s.append(float(ends_s[own].max() - simulation.arrival_s[own].min()))
    nearest = np.sort(times_s)[int(np.ceil(0.9 * len(times_s))) - 1]
    line = next(line for line in found.plan.verdict.lines if line.limit.metric == "task")
    assert line.value_s == pytest.approx(nearest) and line.holds
    assert found.to_dict()["simulation"]["task_s"]["p90"] == pytest.approx(nearest)


@pytest.mark.slow
def test_a_task_that_no_idle_worker_ends_in_time_is_out_of_reach() -> None:
    with pytest.raises(InfeasibleError, match=r"latency: task p90 <= 1\.00 s is below"):
        fleetplan.plan({"task": {"p90": "1 s"}}, **QUESTION)
