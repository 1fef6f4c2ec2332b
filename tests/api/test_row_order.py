"""The order in which a question names its GPUs changes no byte of its answer."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from plans import CATALOG
from questions import traffic

import fleetplan
from planner.api.results import PlanResult
from planner.documents.task import parse_task


def asked(**fleet: Any) -> dict[str, Any]:
    slo = {"ttft": {"p90": "600 ms"}, "tpot": {"p90": "40 ms"}}
    return {"llm": "llama-3.1-8b", "slo": slo, "fleet": fleet, "safety": "none"}


@pytest.mark.parametrize(
    "fleet",
    [
        {"gpus": {"l40s-48g": 2, "a100-80g": 2}},
        {"gpus": {"h100": 4, "l40s": 1, "a100-40g": 2}, "sold_as": {"h100": "gpu", "a100-40g": "gpu"}},
        {"gpus": {"h100-80g": 4, "a100-80g": 8}, "owned": {"h100-80g": 2, "a100-80g": 4}},
    ],
)
def test_rows_of_gpus_in_another_order_give_the_same_files(fleet: dict[str, dict[str, Any]]) -> None:
    """Reports, manifests and requests too: they name pools in the order in which GPUs are searched."""
    drawn = traffic(requests=200, rate_rps=6.0)
    requests = pd.DataFrame(
        {
            "arrival_s": drawn.arrival_s,
            "input_tokens": drawn.input_tokens,
            "output_tokens": drawn.output_tokens,
        }
    )
    other_way = {key: dict(reversed(rows.items())) for key, rows in fleet.items()}
    first, second = (fleetplan.plan(asked(**each), requests) for each in (fleet, other_way))
    assert isinstance(first, PlanResult) and isinstance(second, PlanResult)
    assert first.files() == second.files()


def test_gpus_are_in_the_order_of_the_catalog_and_capped_ones_behind_their_row() -> None:
    rows = {"h100@450W": 3, "l40s": 1, "h100": 2, "a100-80g@300W": 1, "a100-80g": None}
    task = parse_task(asked(gpus=rows), CATALOG)
    assert list(task.stock) == ["a100-80g", "a100-80g@300W", "h100-80g", "h100-80g@450W", "l40s-48g"]
    assert task.stock["h100-80g@450W"] == 3 and task.stock["a100-80g"] is None
