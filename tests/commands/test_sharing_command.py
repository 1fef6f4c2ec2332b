"""Several LLMs at the command line: the question and its mistakes, the split of a trace, what is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from plans import CATALOG

import fleetplan
from planner import cli
from planner.api.results import PlanResult
from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import read_fleet
from planner.documents.safety import Safety
from planner.documents.several_llms_question import SeveralLlmsQuestion, read_question
from planner.errors import InputError
from planner.files import checked_files
from planner.traffic.trace_reading import read_trace

EXAMPLE = checked_files.repository_dir("examples") / "slo-two-llms.yaml"
SMALL = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "2 s"}}}
COLUMNS = {"arrival": "timestamp", "input": "input_tokens", "output": "output_tokens", "model": "Model"}
MAPPED = {**SMALL, "traffic": {"map": COLUMNS}}
OTHER_MAP = {**SMALL, "traffic": {"map": COLUMNS | {"output": "input_tokens"}}}
HEADER = "timestamp,input_tokens,output_tokens"
ROWS = [f"{i / 4},{200 + 10 * (i % 7)},{20 + i % 5}" for i in range(80)]
NAMES = ("plan.yaml", "certificate.json", "report.html")
Run = Callable[..., tuple[int, str, str]]


def as_text(document: dict[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Traces: one of its own for anybody, one of two LLMs, every third row to `coder`."""
    (tmp_path / "own.csv").write_text("\n".join([HEADER, *ROWS]))
    split = [f"{row},{'coder' if i % 3 == 0 else 'Meta-Chat'}" for i, row in enumerate(ROWS)]
    (tmp_path / "both.csv").write_text("\n".join([f"{HEADER},Model", *split]))
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        assert isinstance(end.value.code, int | None)
        return end.value.code or 0, said.out, said.err

    return run_command


def ask(folder: Path, llms: Any, *, trace: str | None = None, **shared: Any) -> SeveralLlmsQuestion:
    path = folder / "slo.yaml"
    path.write_text(as_text({"llms": llms, **shared}))
    return read_question(path, folder / trace if trace else None, CATALOG)


def test_the_example_asks_for_two_llms_with_traces_beside_it() -> None:
    asked = read_question(EXAMPLE, None, CATALOG)
    assert [part.name for part in asked.entries] == ["chat", "code"]
    assert [part.task.llm for part in asked.entries] == ["meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B"]
    assert all(part.task.stock == {"a100-80g": 32, "h100-80g": 6} for part in asked.entries)
    assert [part.trace.name for part in asked.entries] == [
        "azure-conversation-sample.csv",
        "azure-code-sample.csv",
    ]


def test_a_list_is_named_by_its_llms_or_as_it_says(folder: Path) -> None:
    rows = [{**SMALL, "trace": "own.csv"}, {**SMALL, "name": "second", "trace": "own.csv"}]
    assert [part.name for part in ask(folder, rows).entries] == ["llama-3.1-8b", "second"]


def test_one_trace_is_split_by_its_column(folder: Path) -> None:
    """80 rows, 0, 3, ... 78 to coder: 27; the other 53 to Meta-Chat. Times stay those of the one clock."""
    llms = {"coder": SMALL, "chat": {**SMALL, "model": "meta-chat"}}
    asked = ask(folder, llms, trace="both.csv")
    coder, chat = (part.trace for part in asked.entries)
    assert (len(coder), len(chat)) == (27, 53) and asked.notes == ()
    np.testing.assert_allclose(coder.arrival_s, np.arange(0, 80, 3) / 4)
    assert chat.arrival_s[0] == 0.25
    assert coder.notes == ("27 of the 80 requests of both.csv: those to 'coder'",)
    whole = read_trace(folder / "both.csv")
    assert whole.llms == ("coder", "Meta-Chat") and "taken as one" in whole.notes[0]


def test_rows_are_found_by_the_name_of_the_llm_too(folder: Path) -> None:
    """A row that names an alias of the entry's LLM is the entry's."""
    text = (folder / "both.csv").read_text().replace("coder", "meta-llama/Llama-3.1-8B")
    (folder / "both.csv").write_text(text)
    asked = ask(folder, {"mine": SMALL}, trace="both.csv")
    assert len(asked.entries[0].trace) == 27
    assert asked.notes == (
        "53 requests of both.csv to 'Meta-Chat' are not planned: no entry of llms takes them",
    )


def test_one_entry_without_a_trace_takes_all_of_the_common_one(folder: Path) -> None:
    llms = {"a": SMALL, "b": {**SMALL, "trace": "own.csv"}}
    assert len(ask(folder, llms, trace="own.csv").entries[0].trace) == 80


@pytest.mark.parametrize(
    ("llms", "trace", "shared", "said"),
    [
        ({}, None, {}, "llms: expected an entry per LLM"),
        ({"a": 3}, None, {}, "llms: a: expected keys and values"),
        ({"a/b": SMALL}, None, {}, "'a/b' names a folder of the answer"),
        ({"manifests": SMALL}, None, {}, "'manifests' names a folder of the answer"),
        ([SMALL, SMALL], "own.csv", {}, "two entries are named llama-3.1-8b"),
        ({"a": {"slo": SMALL["slo"]}}, "own.csv", {}, "a: llm: expected the name of an LLM, found nothing"),
        ({"a": {**SMALL, "fleet": {}}}, "own.csv", {}, "llms: a: fleet is shared by all LLMs"),
        (
            {"a": {**SMALL, "traffic": {"rate": 1, "task": "chat"}, "trace": "own.csv"}},
            None,
            {},
            "llms: a: traffic: describes its requests; drop trace: and model:",
        ),
        ({"a": {**SMALL, "tracee": "x"}}, "own.csv", {}, "a: unknown key 'tracee'; did you mean 'trace'"),
        ({"a": {**SMALL, "trace": 5}}, "own.csv", {}, "llms: a: trace: expected text, found 5"),
        ({"a": {**SMALL, "trace": "no.csv"}}, None, {}, "no.csv: no such file"),
        ({"a": SMALL}, None, {}, "llms: a: no trace of its own"),
        ({"a": {**SMALL, "trace": "own.csv"}}, "own.csv", {}, "every entry of llms has a trace of its own"),
        ({"a": SMALL, "b": SMALL}, "own.csv", {}, "a and b both take all rows of own.csv"),
        ({"coder": SMALL, "b": {**SMALL, "model": "coder"}}, "both.csv", {}, "both take the rows to 'coder'"),
        ({"x": SMALL}, "both.csv", {}, "no row for 'x': its column `model` holds 'coder', 'Meta-Chat'"),
        ({"x": {**SMALL, "model": "y"}}, "own.csv", {}, "model: own.csv has no column `model`"),
        (
            {"a": {**SMALL, "traffic": {"agents": {"count": 2, "system": 200_000}, "input": 9, "output": 9}}},
            None,
            {},
            "slo.yaml: llms: a: traffic: agents: the system prompt and the repository take 200000 + 0 tokens",
        ),
        ({"coder": MAPPED, "Meta-Chat": OTHER_MAP}, "both.csv", {}, "both.csv is read once, as coder says"),
        ({"a": SMALL}, "own.csv", {"slo": {}}, "slo belongs into each entry of llms"),
        ({"a": SMALL}, "own.csv", {"spares": 1}, "unknown key 'spares'"),
        ({"a": SMALL}, "own.csv", {"safety": 0.9}, "slo.yaml: safety: expected none, or a mapping"),
        ({"a": SMALL}, "own.csv", {"objective": "throughput"}, "throughput raises the rate of one LLM"),
        ({"a": SMALL}, "own.csv", {"fleet": {"gpus": {"h1000": 1}}}, "slo.yaml: GPU 'h1000' is not"),
    ],
)
def test_misuse_ends_in_one_line(
    folder: Path, llms: Any, trace: str | None, shared: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        ask(folder, llms, trace=trace, **shared)
    assert said in str(caught.value)


@pytest.mark.slow
def test_every_llm_gets_a_folder_that_commands_take(folder: Path, run: Run) -> None:
    """One H100 for two LLMs that each want one: one of them goes to the A100."""
    question = {
        "safety": "none",
        "llms": {"coder": SMALL, "chat": {**SMALL, "model": "meta-chat"}},
        "fleet": {
            "gpus": {"h100-80g": 1, "a100-80g": 2},
            "prices": {"h100-80g": "1 usd/h", "a100-80g": "2 usd/h"},
        },
    }
    (folder / "slo.yaml").write_text(as_text(question))
    asked = ("--slo", folder / "slo.yaml", "--trace", folder / "both.csv", "-o", folder / "out")
    code, out, err = run(*asked)
    assert code == 0, err
    said = " ".join(out.split())
    assert "for coder and chat: 3.00 USD/h" in said and "gives way" in said
    document = yaml.safe_load((folder / "out" / "plan.yaml").read_text())
    assert document["cost_usd_per_h"] == 3.0 and document["status"] == "on paper"
    assert document["limits"]["stock of h100-80g"] == {"amount": 1.0, "used": 1.0}
    certificate = json.loads((folder / "out" / "certificate.json").read_text())
    assert certificate["level0_exact"] and certificate["level0_bound"] == certificate["value"] == 3.0
    page = (folder / "out" / "report.html").read_text()
    for name in ("coder", "chat"):
        assert f'href="{name}/report.html"' in page
        place = folder / "out" / name
        assert all((place / file).exists() for file in (*NAMES, "requests.csv", "manifests"))
        assert read_fleet(place / "plan.yaml", read_catalog()).workers == 1
        fleet, trace = place / "plan.yaml", place / "requests.csv"
        assert run("simulate", "--fleet", fleet, "--trace", trace, "--window", "whole")[0] == 0
        assert run("manifests", place / "plan.yaml", "--target", "kubernetes", "-o", folder / "m")[0] == 0
    code, _, err = run("simulate", "--fleet", folder / "out" / "plan.yaml", "--trace", folder / "own.csv")
    assert code == 1 and "sums up the plans of several LLMs; name the plan of one" in err

    code, out, _ = run(*asked, "--json")
    assert code == 0 and json.loads(out) == document | {"directory": str(folder / "out")}


@pytest.mark.long
def test_production_of_each_and_of_all_is_written_and_printed(folder: Path, run: Run) -> None:
    """The same question with its default: each LLM's three answers, and their sums."""
    question = {
        "llms": {"coder": SMALL, "chat": {**SMALL, "model": "meta-chat", "safety": {"kept_in": 0.8}}},
        "fleet": {"gpus": {"h100-80g": 4, "a100-80g": 2}, "max_num_batched_tokens": 2048},
    }
    (folder / "slo.yaml").write_text(as_text(question))
    asked = ("--slo", folder / "slo.yaml", "--trace", folder / "both.csv", "-o", folder / "out")
    code, out, err = run(*asked)
    assert code == 0, err
    said = " ".join(out.split())
    assert "Production" in said and "every LLM has the fleet for production that it would have alone" in said
    document = yaml.safe_load((folder / "out" / "plan.yaml").read_text())
    certificate = json.loads((folder / "out" / "certificate.json").read_text())
    assert document["answers"] == certificate["answers"] != []
    for answer in document["answers"]:
        assert answer["value"] == pytest.approx(sum(answer["llms"].values()))
    for name in ("coder", "chat"):
        own = json.loads((folder / "out" / name / "certificate.json").read_text())
        values = {each["name"]: each["value"] for each in own["certificate"]["answers"]}
        assert values == {each["name"]: each["llms"][name] for each in document["answers"]}
        assert document["llms"][name]["kept_in"]["scenario_count"] > 0
    assert certificate["facts"]["in_production"][0]["kind"] == "production-shared"
    page = (folder / "out" / "report.html").read_text()
    assert "On paper, in production, with a loss" in page


@pytest.mark.parametrize(
    ("own", "beside", "meant"),
    [
        ({}, {}, Safety()),
        ({}, {"safety": "none"}, None),
        ({}, {"safety": {"kept_in": 0.8}}, Safety(0.8)),
        ({"safety": {"kept_in": 0.95}}, {"safety": "none"}, Safety(0.95)),
        ({"safety": "none"}, {}, None),
        ({"robust": {"step_times": "10 %"}}, {"safety": {"kept_in": 0.8}}, None),
    ],
)
def test_safety_is_each_llms_own_or_that_of_all(
    folder: Path, own: dict[str, Any], beside: dict[str, Any], meant: Safety | None
) -> None:
    asked = ask(folder, {"a": {**SMALL, **own}}, trace="own.csv", **beside)
    assert asked.entries[0].task.safety == meant


@pytest.mark.long
def test_llms_on_one_stock_may_each_describe_their_traffic(folder: Path, run: Run) -> None:
    """Each has the requests and the fleet that it would have alone, as the stock is enough for both."""
    entries = {
        "chat": {**SMALL, "traffic": {"rate": 4, "input": 900, "output": 100, "duration": "60 s"}},
        "code": {**SMALL, "traffic": {"rate": 2, "input": 2000, "output": 80, "duration": "60 s"}},
    }
    shared = {"fleet": {"gpus": {"a100-80g": 8}, "sold_as": {"a100-80g": "gpu"}}, "safety": "none"}
    (folder / "slo.yaml").write_text(as_text({"llms": entries, **shared}))
    code, out, err = run("--slo", folder / "slo.yaml", "-o", folder / "out", "--seed", 3, "--json")
    assert code == 0, err
    alone = {name: fleetplan.plan({**entry, **shared}, seed=3) for name, entry in entries.items()}
    assert json.loads(out)["cost_usd_per_h"] == pytest.approx(
        sum(each.cost_usd_per_h for each in alone.values())
    )
    for name, each in alone.items():
        assert isinstance(each, PlanResult)
        rows = read_trace(folder / "out" / name / "requests.csv", seed=None)
        assert rows.input_tokens.tolist() == each.plan.trace.input_tokens.tolist()


def test_too_little_stock_for_both_ends_in_one_line_and_writes_nothing(folder: Path, run: Run) -> None:
    question = {
        "llms": {"coder": SMALL, "chat": {**SMALL, "model": "meta-chat"}},
        "fleet": {"gpus": {"h100-80g": 1}},
    }
    (folder / "slo.yaml").write_text(as_text(question))
    code, _, err = run("--slo", folder / "slo.yaml", "--trace", folder / "both.csv", "-o", folder / "out")
    assert code == 3 and "Raise stock of h100-80g from 1 to 2" in err
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("what-if", "--change", "objective=power"),
        ("sensitivity",),
        ("pareto", "--over", "rate"),
        ("search", "vidur"),
        ("goodput", "--fleet", "FLEET"),
        ("replan", "--current", "FLEET"),
    ],
)
def test_commands_for_one_llm_say_so(folder: Path, run: Run, command: tuple[str, ...]) -> None:
    (folder / "fleet.yaml").write_text("llm: llama-3.1-8b\nworkers: [{gpu: h100-80g}]\n")
    words = [folder / "fleet.yaml" if word == "FLEET" else word for word in command]
    code, _, err = run(*words, "--slo", EXAMPLE, "--trace", folder / "own.csv")
    assert code == 1 and "holds several LLMs (llms:), which `plan --slo FILE -o DIR`, `plan day` and" in err


def test_options_for_one_llm_are_refused(folder: Path, run: Run) -> None:
    code, _, err = run("--slo", EXAMPLE, "-o", folder / "out", "--explain")
    assert code == 1 and "--explain: is for one LLM" in err


def test_inputs_are_not_written_over(folder: Path, run: Run) -> None:
    """The trace of an entry stands where its requests.csv would go."""
    (folder / "out" / "a").mkdir(parents=True)
    (folder / "own.csv").rename(folder / "out" / "a" / "requests.csv")
    (folder / "slo.yaml").write_text(as_text({"llms": {"a": {**SMALL, "trace": "out/a/requests.csv"}}}))
    code, _, err = run("--slo", folder / "slo.yaml", "-o", folder / "out")
    assert code == 1 and "would be written over" in err


def test_several_llms_without_a_folder_are_asked_for_one(run: Run) -> None:
    code, _, err = run("--slo", EXAMPLE)
    assert (code, err) == (2, "plan: -o DIR is missing: several LLMs are planned into a folder\n")
