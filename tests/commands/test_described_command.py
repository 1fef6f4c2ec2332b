"""Traffic without a file: options, slo.yaml that describes it, `plan init`, `plan trace --describe`."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import fleetplan
from planner import cli
from planner.errors import InputError
from planner.search.oracle.scenarios import Scenarios, drawn_by

TRACE = Path(__file__).parents[2] / "examples" / "traces" / "azure-conversation-sample.csv"
QUESTION = "--llm llama-3.1-8b --ttft-p90 1s --tpot-p99 100ms --gpus a100-80g --safety none".split()
TRAFFIC = "--rate 5 --input 800 --output 150 --duration 100s".split()
DESCRIBED = """
llm: llama-3.1-8b
slo: {ttft: {p90: 1 s}, tbt: {p99: 100 ms}}
traffic: {rate: 5, duration: 100 s, task: chat}
fleet: {gpus: [a100-80g]}
safety: none
"""
FLEET = "llm: llama-3.1-8b\nworkers: [{gpu: a100-80g, count: 2}]\n"
PROGRESS = re.compile(r"\[ *\d+\.\d s\] ")  # of work that takes long on a busy machine
Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Plan:
    """The command in a folder with slo.yaml, which describes its traffic, and fleet.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("slo.yaml").write_text(DESCRIBED)
    Path("fleet.yaml").write_text(FLEET)

    def run(*arguments: object, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plan", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


def test_options_make_a_plan_without_a_file(plan: Plan) -> None:
    code, out, _ = plan(*QUESTION, *TRAFFIC)
    assert code == 0 and "USD/h" in out
    assert {path.name for path in Path().iterdir()} == {"slo.yaml", "fleet.yaml"}


@pytest.mark.long
def test_options_write_the_question_beside_the_answer(plan: Plan) -> None:
    code, out, _ = plan(*QUESTION, *TRAFFIC, "-o", "out")
    assert code == 0 and "slo.yaml" in out
    written = yaml.safe_load(Path("out/slo.yaml").read_text())
    assert written["traffic"] == {"rate": 5, "input": 800, "output": 150, "duration": "100 s"}
    command = json.loads(Path("out/certificate.json").read_text())["command"]
    assert "--rate 5" in command and "--slo" not in command
    first = Path("out/plan.yaml").read_text()
    code, _, _ = plan("--slo", "out/slo.yaml", "-o", "again")
    assert code == 0 and Path("again/plan.yaml").read_text() == first


def test_options_may_ask_about_a_trace(plan: Plan) -> None:
    code, out, _ = plan(*QUESTION, "--trace", TRACE, "--rate", 5, "--json")
    assert code == 0 and json.loads(out)["status"] == "on paper"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([*QUESTION, "--rate", "5", "--input", "800"], "output: is missing"),
        ([*QUESTION, "--rate", "0", "--input", "8", "--output", "8"], "must be > 0"),
        ([*QUESTION, "--rate", "5", "--task", "chatt"], "did you mean 'chat'"),
        ([*QUESTION, "--agents", "9", "--task", "agent"], "There is coding-agent for agents"),
        (
            [*QUESTION, "--rate", "5", "--task", "chat", "--target", "k8s"],
            "plan: --target: no deployment target 'k8s'; did you mean 'kubernetes'?",
        ),
        (
            [*QUESTION, "--rate", "5", "--task", "chat", "--target", "slurm"],
            "'slurm'; did you mean 'vllm'? It brings a script for each pool, which srun can start",
        ),
        (
            [*QUESTION, "--rate", "5", "--task", "chat", "--tpot-p95", "2"],
            "plan: --tpot-p95: '2' has no unit",
        ),
        ([*QUESTION, "--rate", "5", "--input", "1kb", "--output", "9"], "plan: --input: "),
        (["--slo", "nowhere.yaml"], "plan: nowhere.yaml: no such file"),
        ([*QUESTION, "--input", "5"], "--rate: is missing"),
        (["--rate", "5", "--input", "5", "--output", "5"], "--llm: is missing"),
        (["--llm", "llama-3.1-8b", "--rate", "5", "--task", "chat"], "no limit of any kind"),
        (["--slo", "slo.yaml", "--rate", "5"], "in place of slo.yaml"),
        (["--slo", "slo.yaml", "--trace", str(TRACE), "-o", "out"], "give one of the two"),
        ([*QUESTION, "--trace", str(TRACE), "--task", "chat"], "drop one of the two"),
        (["simulate", "--fleet", "fleet.yaml", "--slo", "slo.yaml", "--trace", str(TRACE)], "one of the two"),
    ],
)
def test_what_cannot_be_asked_is_one_line(plan: Plan, options: list[str], said: str) -> None:
    code, _, err = plan(*options)
    lines = [line for line in err.splitlines() if not PROGRESS.match(line)]
    assert code == 1 and len(lines) == 1 and said in lines[0]


def test_a_question_of_a_file_needs_no_folder_either(plan: Plan) -> None:
    code, out, _ = plan("--slo", "slo.yaml")
    assert code == 0 and "add -o DIR to write the plan" in " ".join(out.split())


def test_without_a_trace_and_a_description_the_usage_is_wrong(plan: Plan) -> None:
    code, _, err = plan("simulate", "--fleet", "fleet.yaml")
    assert code == 2 and "--trace" in err


def is_missed(simulated: str) -> bool:
    """Whether the SLO is missed, by one of the seeds if there are several."""
    slo, runs = json.loads(simulated)["slo"], json.loads(simulated).get("seeds", [])
    return slo["kept_by"] < len(runs) if runs else not slo["holds"]


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "--fleet", "fleet.yaml"],
        ["simulate", "--fleet", "fleet.yaml", "--rate", 3, "--window", "first 1 min"],
        ["simulate", "--fleet", "fleet.yaml", "--seeds", 3, "--executor", "serial"],
        ["compare", "--fleet", "fleet.yaml"],
        ["sensitivity"],
        ["what-if", "--change", "traffic.rate=20"],
        ["pareto", "--over", "ttft", "--points", 2],
        ["replan", "--current", "fleet.yaml"],
    ],
)
def test_every_command_draws_what_is_described(plan: Plan, command: list[object]) -> None:
    code, out, err = plan(*command, "--slo", "slo.yaml", "--json")
    assert code == (5 if command[0] == "simulate" and is_missed(out) else 0), err
    assert json.loads(out)


@pytest.mark.long
def test_the_requests_of_a_plan_are_simulated_as_they_are(plan: Plan) -> None:
    """With --window whole the section traffic does not count, be it a description."""
    code, _, _ = plan("--slo", "slo.yaml", "-o", "out")
    assert code == 0
    again = ("--trace", "out/requests.csv", "--window", "whole", "--slo", "slo.yaml", "--json")
    code, out, _ = plan("simulate", "--fleet", "out/plan.yaml", *again)
    assert code == 0 and json.loads(out)["slo"]["holds"]
    asked = [
        plan("goodput", *words, "--seeds", 1, "--json")
        for words in (("out",), ("--fleet", "out/plan.yaml", *again))
    ]
    assert asked[0][:2] == asked[1][:2] and asked[0][0] == 0


def test_futures_are_drawn_from_the_description() -> None:
    """Other requests in each, and with the growth that is asked for: 10 % more of 5/s."""
    document: dict[str, Any] = yaml.safe_load(DESCRIBED) | {"safety": {"growth": "10 %"}}
    document["traffic"]["duration"] = "1000 s"
    task = fleetplan.read_task(document).task()
    trace = fleetplan.read_task(document).task().described
    assert trace is not None
    futures = Scenarios(task, None, 0, 1, 4)  # type: ignore[arg-type]
    assert drawn_by(task, None) == "description"  # type: ignore[arg-type]
    first, second = futures[0].trace, futures[1].trace
    assert len(first) != len(second) or (first.arrival_s != second.arrival_s).any()
    mean = sum(len(futures[number].trace) for number in range(20)) / 20
    assert mean == pytest.approx(5500, rel=0.06)


@pytest.mark.long
def test_a_plan_for_production_says_how_futures_were_drawn(plan: Plan) -> None:
    """From Python, where there is no trace either."""
    found = fleetplan.plan(yaml.safe_load(DESCRIBED.replace("safety: none", "safety: {kept_in: 0.8}")))
    assert "other draws of what is described" in found.report()


def test_both_a_trace_and_a_description_are_refused() -> None:
    with pytest.raises(InputError, match="give one of the two"):
        fleetplan.plan(yaml.safe_load(DESCRIBED), fleetplan.read_trace(TRACE))


def test_init_asks_and_writes(plan: Plan) -> None:
    code, out, _ = plan(
        "init",
        "-o",
        "mine.yaml",
        typed="llama-3.1-8b\n5 1500 300\nttft p95 800ms, tpot p95 50 ms\nh100-80g\nnone\n",
    )
    assert code == 0 and "mine.yaml" in out
    written = yaml.safe_load(Path("mine.yaml").read_text())
    assert written == {
        "llm": "llama-3.1-8b",
        "traffic": {"rate": 5, "input": 1500, "output": 300},
        "slo": {"ttft": {"p95": "800 ms"}, "tpot": {"p95": "50 ms"}},
        "fleet": {"gpus": ["h100-80g"]},
        "safety": "none",
    }


def test_init_has_usual_answers(plan: Plan) -> None:
    code, _, _ = plan("init", "-o", "mine.yaml", typed="\n" * 5)
    assert code == 0
    assert fleetplan.read_task("mine.yaml").task().described is not None


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("", "the input has ended"),
        ("llama-3.1-8b\n", "the input has ended"),
        ("no-such-llm\n", "no-such-llm"),
        ("llama-3.1-8b\n5 chatt\n", "did you mean 'chat'"),
        ("llama-3.1-8b\nmuch\n", "expected '10 chat'"),
        ("llama-3.1-8b\n5 chat\nfast\n", "expected limits such as"),
        ("llama-3.1-8b\n5 chat\n\nh900\n", "h900"),
        ("llama-3.1-8b\n5 chat\n\n\n2\n", "kept_in"),
    ],
)
def test_init_refuses_what_it_cannot_use(plan: Plan, typed: str, said: str) -> None:
    code, _, err = plan("init", "-o", "mine.yaml", typed=typed)
    assert code == 1 and said in err.splitlines()[-1] and not Path("mine.yaml").exists()


def test_init_writes_over_nothing(plan: Plan) -> None:
    code, _, err = plan("init", typed="\n" * 5)
    assert code == 1 and "is there already" in err and Path("slo.yaml").read_text() == DESCRIBED


def test_a_trace_is_described_as_slo_yaml_has_it(plan: Plan) -> None:
    code, out, _ = plan("trace", TRACE, "--describe")
    assert code == 0
    Path("fitted.yaml").write_text(DESCRIBED.replace("traffic: {rate: 5, duration: 100 s, task: chat}", out))
    code, out, _ = plan("simulate", "--fleet", "fleet.yaml", "--slo", "fitted.yaml", "--json")
    assert code == (5 if is_missed(out) else 0) and json.loads(out)["requests"] > 1000


def test_tasks_are_listed(plan: Plan) -> None:
    code, out, _ = plan("catalog", "tasks", "--json")
    assert code == 0
    assert {"chat", "code-completion", "rag", "summarising", "reasoning", "agents"} <= {
        row["task"] for row in json.loads(out)["tasks"]
    }


@pytest.mark.parametrize("duration", ["", ", duration: 3 min"])
def test_a_fleet_is_not_simulated_at_a_rate_that_the_question_looks_for(plan: Plan, duration: str) -> None:
    """It was simulated at the 5 requests/s from which the search begins, whatever its plan carries; later
    only where the question named a duration.
    """
    traffic = f"traffic: {{input: 800, output: 150{duration}}}\n"
    sought = "llm: llama-3.1-8b\nslo: {ttft: {p90: 1 s}}\n" + traffic
    Path("sought.yaml").write_text(sought + "objective: throughput\nlimits: {gpus: 2}\n")
    Path("fleet.yaml").write_text(FLEET)
    simulate = ["simulate", "--fleet", "fleet.yaml", "--slo", "sought.yaml"]
    code, _, err = plan(*simulate)
    assert code == 1 and "has no rate, which objective throughput looks for" in err
    code, out, _ = plan(*simulate, "--rate", 2, "--json")
    assert code == 0 and json.loads(out)["requests"] > (200 if duration else 7_000)


def test_a_fleet_is_simulated_at_the_rate_that_the_question_names(plan: Plan) -> None:
    """Under objective throughput it was refused: "traffic: has no rate"."""
    Path("fleet.yaml").write_text(FLEET)
    described = DESCRIBED.replace(", duration: 100 s", "")
    Path("named.yaml").write_text(described + "objective: throughput\nlimits: {gpus: 2}\n")
    code, out, err = plan("simulate", "--fleet", "fleet.yaml", "--slo", "named.yaml", "--json")
    assert code == (5 if is_missed(out) else 0), err
    assert json.loads(out)["requests"] > 7_000
