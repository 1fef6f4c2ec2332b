"""Searches that divide by prices refuse GPUs that cost nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.documents.task import read_task
from planner.errors import InputError
from planner.papers.searches import Paper, PaperQuestion, search_as
from planner.traffic.trace import Trace

CATALOG = read_catalog()
SECONDS = "slo: {ttft: {p90: 2 s}, tbt: {p99: 200 ms}}\n"


@pytest.mark.parametrize(
    ("paper", "slo", "is_offline"),
    [
        ("vidur", SECONDS, False),
        ("vidur", SECONDS, True),
        ("splitwise", "preset: splitwise\n", False),
        ("splitwise", "preset: splitwise\nobjective: throughput\nlimits: {cost: 50 usd/h}\n", False),
    ],
)
def test_free_gpus_have_no_requests_per_dollar(
    paper: Paper, slo: str, is_offline: bool, tmp_path: Path
) -> None:
    """ZeroDivisionError."""
    task = tmp_path / "slo.yaml"
    task.write_text(f"llm: llama-3.1-8b\nfleet: {{gpus: {{h100-80g: 8}}, owned: {{h100-80g: 8}}}}\n{slo}")
    trace = Trace("made", np.arange(8.0), np.full(8, 100), np.full(8, 10))
    asked = PaperQuestion(read_task(task, CATALOG), CATALOG, trace, 1.0, is_offline=is_offline)
    with pytest.raises(InputError, match="h100-80g@owned: costs nothing, and "):
        search_as(paper, asked)
