"""The papers' instances of an LLM with windows: a sequence takes the KV blocks that it takes elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.documents.task import read_task
from planner.errors import InputError
from planner.models.kv_layout import ExtraKv
from planner.papers import distserve_search, vidur_search
from planner.papers.searches import PaperQuestion, search_as
from planner.traffic.trace import Trace

CATALOG = read_catalog()
LLM = CATALOG.llm("gpt-oss-120b")
GPU = CATALOG.gpu("h200-141g")
WINDOWED = ExtraKv(window_ratio=1.0, window_blocks=9)  # as many layers with windows of 128 tokens as without


def test_of_distserve() -> None:
    types = distserve_search.instance_types(LLM, GPU, CATALOG, nodes=1)
    assert {worker.extra_kv for worker in types} == {WINDOWED}


def test_of_vidur() -> None:
    space = vidur_search.EngineSettingChoices(budgets=(2048,), seats=(64,), pipelines=(1,))
    fleets = vidur_search.configurations(LLM, [GPU], CATALOG, space, total_gpus=8)
    assert {pool.type.extra_kv for fleet in fleets for pool in fleet.pools} == {WINDOWED}


def test_splitwise_refuses_it(tmp_path: Path) -> None:
    task = tmp_path / "slo.yaml"
    task.write_text("llm: gpt-oss-120b\nfleet: {gpus: [h200-141g]}\npreset: splitwise\n")
    trace = Trace("made", np.arange(8.0), np.full(8, 100), np.full(8, 10))
    asked = PaperQuestion(read_task(task, CATALOG), CATALOG, trace, 1.0)
    with pytest.raises(InputError, match="windows or states"):
        search_as("splitwise", asked)
