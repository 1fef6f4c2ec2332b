"""`plan lengths`: shares and errors by hand arithmetic, and what it prints for slo.yaml."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from planner import cli
from planner.documents.catalog import read_catalog
from planner.documents.task import parse_task


def trace_of(path: Path, requests: int) -> Path:
    """Short prompts get 50 tokens and long ones 450, in turn."""
    rows = [f"{k},{1000 if k % 2 else 10},{450 if k % 2 else 50}" for k in range(requests)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows, ""]))
    return path


def told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *more: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["plan", "lengths", *more])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_lengths_that_prompts_tell_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bucket is right where the commonest would be for half; the mean of all is 200 tokens off, that of
    such prompts nothing.
    """
    file = str(trace_of(tmp_path / "t.csv", 400))
    code, out, _ = told(capsys, monkeypatch, file, "--json")
    document = json.loads(out)
    trees, commonest, mean, plain = document["predictors"]
    assert code == 0 and (document["fitted_requests"], document["later_requests"]) == (280, 120)
    assert trees["right_frac"] == trees["within_one_frac"] == 1.0 and commonest["right_frac"] == 0.5
    assert mean["mean_error_tokens"] == pytest.approx(0) and plain["mean_error_tokens"] == pytest.approx(200)
    assert "more than" in document["note"] and "no more" not in document["note"]
    code, out, _ = told(capsys, monkeypatch, file)
    written = yaml.safe_load(out.splitlines()[-1])
    assert code == 0 and written == document["slo"]
    question = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "1 s"}}} | written
    choices = parse_task(question, read_catalog()).policy_choices()
    assert {each.prediction_accuracy_frac for each in choices} == {None, 1.0}


def test_too_few_requests_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = told(capsys, monkeypatch, str(trace_of(tmp_path / "t.csv", 99)))
    assert code == 1 and not out
    assert "found 99 requests, expected 100 or more" in err and err.count("\n") == 1
