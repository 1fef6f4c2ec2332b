"""The report of a plan on described traffic, made again from the plan's files."""

from __future__ import annotations

from pathlib import Path

import pytest

import fleetplan
from planner.api.results import PlanResult
from planner.reports.screen import input_bases


@pytest.mark.long
def test_described_traffic_stays_described(tmp_path: Path) -> None:
    """The plan said "0 of 5 inputs measured", and `plan report` of its folder "1 of 5: measured: traffic"."""
    planned = fleetplan.plan(
        {"ttft": {"p90": "2 s"}},
        llm="llama-3.1-8b",
        traffic={"rate": 2, "input": 500, "output": 50, "duration": "2 min"},
        fleet={"gpus": {"l40s-48g": 2}, "per_gpu": False},
        safety="none",
    )
    assert isinstance(planned, PlanResult)
    planned.save(tmp_path / "out")
    again = fleetplan.read_plan(tmp_path / "out")
    assert isinstance(again, PlanResult)
    assert input_bases(again.plan) == input_bases(planned.plan)
    assert input_bases(again.plan)["traffic"] == "given"
    assert again.plan.agent_figures == planned.plan.agent_figures
