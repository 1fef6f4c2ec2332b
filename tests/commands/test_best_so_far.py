"""The best fleet so far, which an interrupt leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plans import CATALOG, mixed
from typer.testing import CliRunner

from planner.cli import app
from planner.commands.plan_command import BestSoFar
from planner.files.interrupts import save_and_tidy
from planner.search.problem.plan_problem import SearchProgress


def test_an_interrupted_plan_names_what_is_paid() -> None:
    """Five workers of 4 H100 are paid as three nodes of 8, which progress says too; 20 GPUs were priced."""
    best_so_far = BestSoFar(None)
    best_so_far.note_progress(SearchProgress(1.0, None, 1, lambda: mixed(count=5)))
    usd_per_h = 24 * CATALOG.gpu("h100-80g").price_usd_per_h
    assert best_so_far.write_fleet().endswith(f", {usd_per_h:.2f} USD/h")


def test_an_interrupted_plan_of_several_llms_says_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "interrupted" alone, where a plan of one LLM names the best fleet so far."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.api.planning.plan", interrupt)
    one = {
        "llm": "llama-3.1-8b",
        "slo": {"ttft": {"p90": "2 s"}},
        "traffic": {"rate": 1, "input": 9, "output": 9},
    }
    document = {"llms": {"a": one, "b": one}, "fleet": {"gpus": {"l40s": 8}}}
    (tmp_path / "slo.yaml").write_text(json.dumps(document))
    run = CliRunner().invoke(app, ["--slo", str(tmp_path / "slo.yaml"), "-o", str(tmp_path / "out"), "-q"])
    assert run.exit_code, run.output
    assert save_and_tidy().startswith("several LLMs have no plan before")
