"""`plan prefixes` of traffic that slo.yaml describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli import app
from planner.errors import InputError

QUESTION = """
llm: llama-3.1-8b
slo: {ttft: {p90: 1 s}}
traffic: {rate: 5, input: {fixed: 128}, output: {fixed: 8}, duration: 100 s%s}
"""


def write_question(folder: Path, more: str = "") -> Path:
    path = folder / "slo.yaml"
    path.write_text(QUESTION % more)
    return path


def test_described_prefixes_are_measured_as_those_of_a_trace(tmp_path: Path) -> None:
    """Half of each prompt, 64 of 128 tokens, is one of two texts: all but the first request of each hit."""
    path = write_question(tmp_path, ", prefixes: {shared: 64, count: 2}")
    outcome = CliRunner().invoke(app, ["prefixes", "--slo", str(path), "--json"])
    document = json.loads(outcome.stdout)["trace"]
    requests = document["requests"]
    assert requests > 100
    assert document["sharing"]["token_hit_frac"] == pytest.approx(0.5 * (requests - 2) / requests)


def test_what_describes_no_prefixes_or_is_no_trace_is_answered_with_what_to_write(tmp_path: Path) -> None:
    path = write_question(tmp_path)
    for arguments, message in (
        (["--slo", str(path)], r"describes no prefixes; write, for instance, prefixes: {shared"),
        ([str(path)], r"is no trace; did you mean: plan prefixes --slo"),
        ([], r"give a trace, or --slo FILE that describes prefixes, or --tree"),
    ):
        with pytest.raises(InputError, match=message):
            CliRunner().invoke(app, ["prefixes", *arguments], catch_exceptions=False)
