"""`plan mcp` asked by the SDK's own client over stdin and stdout: the figures of the commands."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli import app
from planner.files.checked_files import to_yaml

mcp = pytest.importorskip("mcp")

QUESTION: dict[str, Any] = {
    "llm": "meta-llama/Llama-3.1-8B",
    "slo": {"ttft": {"p90": "1 s"}, "tbt": {"p99": "100 ms"}},
    "traffic": {"rate": 6, "task": "chat", "duration": "60 s"},
    "fleet": {"gpus": {"h100-80g": 4}},
    "safety": "none",
}
FLEET = {"llm": "llama-3.1-8b", "workers": [{"gpu": "h100-80g", "count": 2}]}
PLAN = [sys.executable, "-m", "fleetplan"]


def printed(*arguments: str) -> Any:
    """What the command prints with --json, without the traffic's warnings."""
    return json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)


async def asked(folder: Path, questions: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The names of tools and resources, and the answer to each question."""
    server = mcp.StdioServerParameters(
        command=PLAN[0], args=[*PLAN[1:], "mcp"], cwd=str(folder), env=dict(os.environ)
    )
    async with mcp.Client(server) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        resources = [str(each.uri) for each in (await client.list_resources()).resources]
        schema = await client.read_resource("schema://slo")
        answers = [await client.call_tool(name, arguments) for name, arguments in questions]
    return {"tools": tools, "resources": resources, "schema": schema, "answers": answers}


def value(answer: Any) -> dict[str, Any]:
    """The object that a tool returned."""
    assert not answer.is_error, answer.content
    document: dict[str, Any] = json.loads(answer.content[0].text)
    return document


def same(answer: dict[str, Any], command: dict[str, Any], keys: set[str]) -> None:
    assert keys <= set(answer) & set(command)
    assert {key: answer[key] for key in keys} == {key: command[key] for key in keys}


@pytest.mark.long
def test_arguments_are_refused_in_our_words(tmp_path: Path) -> None:
    """Missing, unknown and of another kind: one line each, not silence or pydantic's words."""
    questions: list[tuple[str, dict[str, Any]]] = [
        ("plan", {}),
        ("catalog", {"what": "gpus"}),
        ("simulate", {"fleet": 5}),
        ("goodput", {"fleet": FLEET}),
        ("catalog", {"table": "llms", "like": "gpt-5"}),
    ]
    missing, unknown, number, no_slo, no_row = asyncio.run(asked(tmp_path, questions))["answers"]
    texts = [each.content[0].text for each in (missing, unknown, number, no_slo) if each.is_error]
    assert texts[:3] == [
        "plan: slo: is missing; give an object, or the path of a file or folder",
        "catalog: arguments: unknown key 'what'; Valid: table, like",
        "simulate: fleet: expected an object, or the path of a file or folder, found 5",
    ]
    assert "slo: missing" in texts[3]
    assert no_row.is_error and "like: no name of llms has 'gpt-5' in it" in no_row.content[0].text


@pytest.mark.long
def test_a_client_gets_the_figures_of_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slo.yaml").write_text(to_yaml(QUESTION))
    (tmp_path / "fleet.yaml").write_text(to_yaml(FLEET))
    impossible = QUESTION | {"slo": {"ttft": {"p90": "1 ms"}}}
    questions: list[tuple[str, dict[str, Any]]] = [
        ("plan", {"slo": QUESTION, "out": "out"}),  # what do I need for 6 requests a second?
        ("goodput", {"fleet": FLEET, "slo": "slo.yaml"}),  # how much do my GPUs carry?
        ("simulate", {"fleet": FLEET, "slo": QUESTION}),
        ("what_if", {"slo": "slo.yaml", "changes": {"traffic.rate": 40}}),
        ("explain", {"plan": "out"}),  # why not cheaper?
        ("catalog", {"table": "gpus", "like": "h100"}),
        ("plan", {"slo": impossible}),
        ("plan", {"slo": QUESTION | {"trafic": {}}}),
    ]
    told = asyncio.run(asked(tmp_path, questions))
    assert set(told["tools"]) == {"plan", "simulate", "goodput", "what_if", "explain", "catalog"}
    assert "keeps an SLO" in told["tools"]["plan"].description
    assert "schema://plan-answer" in told["resources"]
    assert json.loads(told["schema"].contents[0].text)["title"].startswith("slo.yaml")
    plan, goodput, simulation, moved, why, gpus, infeasible, bad = told["answers"]

    by_command = printed("--slo", "slo.yaml", "-o", "again")
    figures = {"status", "cost_usd_per_h", "gpus", "power_w", "workers", "warnings", "simulation", "slo"}
    same(value(plan), by_command, figures)
    assert (tmp_path / "out" / "plan.yaml").read_text() == (tmp_path / "again" / "plan.yaml").read_text()
    by_command = printed("goodput", "--fleet", "fleet.yaml", "--slo", "slo.yaml")
    same(
        value(goodput), by_command, {"rate_rps", "fails_rps", "gpu_rate_rps", "usd_per_1000_requests", "slo"}
    )
    by_command = printed("simulate", "--fleet", "fleet.yaml", "--slo", "slo.yaml")
    same(value(simulation), by_command, set(by_command) - {"warnings"})
    by_command = printed("what-if", "--slo", "slo.yaml", "--change", "traffic.rate=40")
    same(value(moved), by_command, set(by_command) - {"warnings"})

    assert value(why)["answer"] == value(plan)["answer"] and value(why)["assumes"]
    screen = " ".join(CliRunner().invoke(app, ["--slo", "slo.yaml", "-q"]).stdout.split())
    assert value(why)["why_not_cheaper"] and all(line in screen for line in value(why)["why_not_cheaper"])
    rows = json.loads(gpus.content[0].text)
    rows = rows if isinstance(rows, list) else [json.loads(part.text) for part in gpus.content]
    assert any(row["name"] == "h100-80g" for row in rows)
    assert value(infeasible)["status"] == "infeasible" and "ttft p90" in value(infeasible)["constraint"]
    assert bad.is_error and "did you mean 'traffic'" in bad.content[0].text


@pytest.mark.long
def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "mcp.py").write_text("raise ImportError('not here')\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['plan', 'mcp']; "
    program += "from planner.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "plan: mcp: needs the MCP SDK; pip install 'fleetplan[mcp]'"
