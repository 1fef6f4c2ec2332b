"""`plan trace` and what slo.yaml keeps of it: files in, files out, one line where something is unclear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from log_samples import REQUESTS, SAMPLES, date
from typer.testing import CliRunner

from planner.cli import app
from planner.commands.command_output import read_requests
from planner.documents.catalog import read_catalog
from planner.documents.log_columns import read_log_options
from planner.documents.task import read_task
from planner.errors import InputError
from planner.traffic.sessions import session_numbers
from planner.traffic.trace_reading import read_trace

RUN = CliRunner()


def sample(tmp_path: Path, kind: str) -> Path:
    name, make = SAMPLES[kind]
    (tmp_path / name).write_bytes(make())
    return tmp_path / name


def plan(*words: object) -> tuple[int, str]:
    found = RUN.invoke(app, list(map(str, words)), catch_exceptions=True)
    if isinstance(found.exception, InputError):
        return 1, str(found.exception)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout


def test_a_log_is_described_and_written(tmp_path: Path) -> None:
    """The map that was guessed is in the answer, and reads the file again."""
    log, out = sample(tmp_path, "gateway CSV"), tmp_path / "trace.csv"
    code, text = plan("trace", log, "-o", out, "--json")
    found = json.loads(text)
    assert (code, found["requests"], found["format"]) == (0, len(REQUESTS), "columns")
    assert found["map"]["arrival"] == "created_at"
    assert len(read_trace(out, seed=None)) == len(REQUESTS)
    given = ",".join(f"{role}={name}" for role, name in found["map"].items())
    assert json.loads(plan("trace", log, "--map", given, "--json")[1])["requests"] == len(REQUESTS)


def test_a_trace_is_written_as_json_lines_too(tmp_path: Path) -> None:
    log, out = sample(tmp_path, "Envoy JSON"), tmp_path / "trace.jsonl.gz"
    assert plan("trace", log, "-o", out)[0] == 0
    assert read_trace(out, seed=None).llms == ("m",)


def test_recorded_sessions_become_agents_at_once(tmp_path: Path) -> None:
    requests = [{"t": 9.0 * i, "in": 64 * (i + 1), "out": 50, "hash_ids": [*range(i + 1)]} for i in range(5)]
    (tmp_path / "corpus").mkdir()
    for name in ("a", "b"):
        session = {"id": name, "block_size": 64, "requests": requests}
        (tmp_path / "corpus" / f"{name}.json").write_text(json.dumps(session, indent=1))
    out = tmp_path / "agents.jsonl"
    words = ("--agents", 3, "--duration", "2 min", "-o", out, "--json")
    code, text = plan("trace", tmp_path / "corpus", *words)
    assert code == 0 and json.loads(text)["name"] == "3 agents of corpus"
    assert len(np.unique(session_numbers(read_trace(out)))) == 3
    code, text = plan("trace", sample(tmp_path, "gateway CSV"), "--agents", 3)
    assert code == 1 and "has no sessions" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--map", "arrival=nope,input=prompt_tokens,output=completion_tokens"), "has no column 'nope'"),
        (("--tz", "Mars/Base"), "--tz: expected a time zone"),
        (("--format", "morse"), "--format: expected one of columns, vllm, otlp"),
        (
            ("--format", "prometheus", "--map", "arrival=a,input=b,output=c"),
            "--map: prometheus holds metrics",
        ),
        (("--format", "litellm"), "is not in the format litellm"),
        (("--salt", "x"), "--salt: is for --hash-ids"),
        (("-o", "trace.txt"), "ends in .csv or .jsonl"),
    ],
)
def test_options_that_do_not_fit_end_in_one_line(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    code, text = plan("trace", sample(tmp_path, "gateway CSV"), *words)
    assert code == 1
    assert message in text


def test_what_is_unsure_names_the_map_to_type(tmp_path: Path) -> None:
    """Typed as it stands, it reads the file."""
    log = tmp_path / "log.csv"
    log.write_text(f"done_at,took,prompt_tokens,completion_tokens\n{date(1)},0.5,5,3\n{date(2)},0.25,5,3\n")
    code, text = plan("trace", log)
    assert code == 1
    given = text.split("--map ")[1].split(", or ")[0]
    assert given == "end=done_at,duration=took:s,input=prompt_tokens,output=completion_tokens"
    assert json.loads(plan("trace", log, "--map", given, "--json")[1])["duration_s"] == 1.25


def test_metrics_are_described_for_slo_yaml(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "metric": {"__name__": f"vllm:{name}", **dict(labels)},
            "values": [[1_767_607_200 + 60 * k, str(rate * 60 * k)] for k in range(21)],
        }
        for name, labels, rate in (
            ("request_success_total", {}, 2.0),
            *(
                (f"request_{side}_tokens_bucket", {"le": le}, 2.0)
                for side in ("prompt", "generation")
                for le in ("50", "+Inf")
            ),
        )
    ]
    file, out = tmp_path / "range.json", tmp_path / "slo.yaml"
    file.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": rows}}))
    code, told = plan("trace", file, "-o", out, "--every", "10 min")[:2]
    assert code == 0 and "next: add llm and slo to" in told
    assert yaml.safe_load(out.read_text())["traffic"] == {
        "rate": {"curve": [2, 2], "every": "600 s"},
        "input": {"histogram": {"edges": [0, 50], "counts": [2400]}},
        "output": {"histogram": {"edges": [0, 50], "counts": [2400]}},
    }


def test_slo_yaml_keeps_the_map(tmp_path: Path) -> None:
    """A file that no guess could read is read by a command that has the slo.yaml."""
    log, slo = tmp_path / "log.csv", tmp_path / "slo.yaml"
    log.write_text("a,b,c\n" + "".join(f"{k},{100 + k},5\n" for k in range(20)))
    slo.write_text(
        yaml.safe_dump(
            {
                "llm": "meta-llama/Llama-3.1-8B",
                "slo": {"ttft": {"p90": "2 s"}},
                "traffic": {"map": {"arrival": "a:s", "input": "b", "output": "c"}, "timezone": "UTC"},
                "fleet": {"gpus": {"a100-80g": 2}},
                "safety": "none",
            }
        )
    )
    assert len(read_requests(log, drop_invalid=False, slo=slo)) == 20
    assert read_task(slo, read_catalog()).llm == "meta-llama/Llama-3.1-8B"
    with pytest.raises(InputError, match="no column could be read as arrival"):
        read_requests(log, drop_invalid=False)


@pytest.mark.parametrize(
    ("traffic", "message"),
    [
        ({"map": {"arrival": "a", "input": "b"}}, "traffic: map: output is missing"),
        ({"map": {"arival": "a", "input": "b", "output": "c"}}, "did you mean 'arrival'"),
        ({"map": "a"}, "traffic: map: expected keys and values"),
        ({"timezone": "Mars/Base"}, "traffic: timezone: expected a time zone"),
        ({"format": "morse"}, "traffic: format: expected one of columns"),
    ],
)
def test_keys_of_slo_yaml_are_checked(tmp_path: Path, traffic: object, message: str) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text(yaml.safe_dump({"traffic": traffic}))
    with pytest.raises(InputError, match=message):
        read_log_options(slo)
