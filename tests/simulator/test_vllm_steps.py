"""The kernel, step by step, against what vLLM's own scheduler was seen to do: tests/data/vllm_steps.json.

tests/with_vllm/test_scheduler_vllm.py asks vLLM itself, in more cases.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_cases import difference

RECORD = json.loads((Path(__file__).parents[1] / "data" / "vllm_steps.json").read_text())


def seed_of(row: dict[str, Any]) -> str:
    return f"{row['case'].get('queue', 'fcfs')}-{row['case']['seed']}"


@pytest.mark.parametrize("row", RECORD["transcripts"], ids=seed_of)
def test_every_step_is_as_vllm_forms_it(row: dict[str, Any]) -> None:
    assert not difference(row["case"], row["steps"])
