"""The JSON Schemas: current, of every key that is read, and agreeing with the readers on what tests parse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import fleetplan
from planner.api.results import PlanResult
from planner.documents import fits, task
from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import FLEET_KEYS, PLAN_KEYS, WORKER_KEYS
from planner.documents.policy_choices import KEYS as POLICY_CHOICES
from planner.documents.policy_settings import POLICY_KEYS
from planner.documents.schemas.all_schemas import NAMES, named_schema, schema_text
from planner.documents.schemas.slo_schema import question_keys
from planner.errors import InfeasibleError, InputError
from planner.files.checked_files import repository_dir

ROOT = Path(__file__).parents[2]
CATALOG = read_catalog()
LINE = re.compile(r"# yaml-language-server: \$schema=(\S+)\n")
# What a message says of a value with a wrong key, type, unit or word; all else needs other keys or a catalog.
SHAPE = re.compile(
    r"unknown key|has no unit|unknown unit|expected (keys and values|one of|text|true or false|a list|"
    r"a quantity|a percentile|a whole number)|must be (one of|true or false|a whole number of at least)"
)
# They look like the others: counts that are held against another count, and forms of other programs.
ELSEWHERE = re.compile(r"found 8, and 16 are owned|threshold: must be a whole number of decodes")

WITH_DOCUMENTS = (
    *("slo", "fleetfile", "safety", "speculative_documents", "lora_documents", "kv_offload_documents"),
    *("owned_stock", "engine_rows", "paid"),
)


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(named_schema(name, CATALOG))


def faults(name: str, document: Any) -> list[str]:
    """What a schema finds wrong; keys are text, as JSON has them."""
    found = validator(name).iter_errors(json.loads(json.dumps(document)))
    return [f"{'.'.join(map(str, error.path))}: {error.message[:200]}" for error in found]


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_current(name: str) -> None:
    """Else: plan schema all -o schemas"""
    validator(name).check_schema(validator(name).schema)
    assert (ROOT / "schemas" / f"{name}.schema.json").read_text() == schema_text(name, CATALOG)


def test_every_key_that_is_read_has_its_values() -> None:
    """A key that a reader takes and no schema describes would be open to anything."""
    parts = question_keys(CATALOG)
    fleet, plan = named_schema("fleet", CATALOG), named_schema("plan", CATALOG)
    worker = fleet["properties"]["workers"]["items"]
    rows = {
        "slo.yaml": (parts, task.KEYS),
        "traffic": (parts["traffic"]["properties"], task.TRAFFIC_KEYS),
        "fleet": (parts["fleet"]["properties"], task.FLEET_KEYS),
        "policies": (parts["policies"]["properties"], POLICY_CHOICES),
        "limits": (parts["limits"]["properties"], task.LIMIT_KEYS),
        "robust": (parts["robust"]["properties"], task.ROBUST_KEYS),
        "day": (parts["day"]["properties"], tuple(parts["day"]["properties"])),
        "fleet.yaml": (fleet["properties"], FLEET_KEYS),
        "workers": (worker["properties"], WORKER_KEYS),
        "policies of a fleet": (fleet["properties"]["policies"]["properties"], POLICY_KEYS),
        "fits": (worker["properties"]["latency"]["anyOf"][1]["properties"], fits.FIT_KEYS),
    }
    for where, (described, read) in rows.items():
        assert set(described) == set(read), where
        assert [key for key in read if not described[key]] == [], f"{where}: nothing is said of these"
    assert set(plan["properties"]) == {*FLEET_KEYS, *PLAN_KEYS}


@pytest.mark.parametrize(
    "path", sorted(repository_dir("examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_examples_name_their_schema_and_keep_it(path: Path) -> None:
    named = LINE.match(path.read_text())
    assert named, "the first line tells editors which schema to take"
    file = (path.parent / named[1]).resolve()
    assert file.parent == ROOT / "schemas" and file.exists()
    assert faults(file.name.removesuffix(".schema.json"), yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        ({"llm": "x", "slo": {"ttft": {"p90": "2 s"}}, "trafic": {}}, "slo"),
        ({"llm": "x", "slo": {"ttft": {"p90": 2}}}, "slo"),
        ({"llm": "x", "slo": {"ttft": {"p9": "2 s"}}}, "slo"),
        ({"llm": "x", "slo": {"ttft": {"p90": "0 s"}}}, "slo"),
        ({"llm": "x"}, "slo"),
        ({"llms": {"a": {"llm": "x"}}}, "slo"),
        ({"llms": {"a": {"llm": "x", "preset": "vidur"}}, "traffic": {"rate": 3}}, "slo"),
        ({"llm": "x", "workers": []}, "fleet"),
        ({"llm": "x", "workers": [{"gpu": "h100-80g", "cout": 3}]}, "fleet"),
        ({"llm": "x", "workers": [{"gpu": "h100-80g"}], "policies": {"routing": "best"}}, "fleet"),
        ({"llm": "x", "workers": [{"gpu": "h100-80g"}]}, "plan"),
    ],
)
def test_a_wrong_shape_is_refused(document: dict[str, Any], kind: str) -> None:
    assert faults(kind, document)


@pytest.mark.parametrize("more", [(), pytest.param(("planfile",), marks=pytest.mark.slow)])
def test_schemas_and_readers_agree_on_all_documents_of_tests(more: tuple[str, ...], tmp_path: Path) -> None:
    """Whatever those tests parse: no schema refuses what its reader takes, and each refuses what has a
    wrong key, type, unit or word.
    """
    written = tmp_path / "documents.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "document_recorder", "-p", "no:cacheprovider"]
        + [str(Path(__file__).with_name(f"test_{name}.py")) for name in (*WITH_DOCUMENTS, *more)],
        cwd=ROOT,
        env=os.environ | {"DOCUMENTS_OF_TESTS": str(written)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    lines = [json.loads(line) for line in sorted(set(written.read_text().splitlines()))]
    refused = []
    for kind, document, message in lines:
        found = faults("plan" if kind == "fleet" and "status" in document else kind, document)
        assert message is not None or not found, (document, found)
        if message is not None and SHAPE.search(message) and not ELSEWHERE.search(message):
            assert found, (document, message)
            refused.append(message)
    assert len(lines) > 200 and len(refused) > 50, (len(lines), len(refused))


def test_answers_have_their_schemas() -> None:
    """Of one small plan: what the commands print with --json, and no key beside those of the schema."""
    trace = ROOT / "examples" / "traces" / "azure-conversation-sample.csv"
    question: dict[str, Any] = {
        "llm": "llama-3.1-8b",
        "slo": {"ttft": {"p90": "2 s"}, "tbt": {"p99": "100 ms"}},
        "traffic": {"rate": 4, "window": "busiest 2 min"},
        "fleet": {"gpus": {"h100-80g": 4}},
        "safety": "none",
    }
    plan = fleetplan.plan(question, trace)
    assert isinstance(plan, PlanResult)
    answers = {
        "plan-answer": plan.to_dict(),
        "simulate-answer": fleetplan.simulate(plan, trace, question).to_dict(),
        "goodput-answer": fleetplan.goodput(plan, trace, question, seeds=1, tolerance_frac=0.5).to_dict(),
        "compare-answer": fleetplan.compare({"a": plan}, trace, question).to_dict(),
    }
    for name, answer in answers.items():
        assert faults(name, answer) == [], name
        schema = validator(name).schema
        known = schema["$defs"][schema["$ref"].rpartition("/")[2]]["properties"]
        assert set(answer) <= set(known), name
    with pytest.raises(InfeasibleError) as error:
        fleetplan.plan(question | {"slo": {"ttft": {"p90": "1 ms"}}}, trace)
    assert faults("infeasible-answer", error.value.to_dict()) == []
    with pytest.raises(InputError) as bad_input:
        fleetplan.plan(question | {"llm": "nope"}, trace)
    assert faults("error-answer", bad_input.value.to_dict()) == []
