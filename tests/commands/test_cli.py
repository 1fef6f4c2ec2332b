"""The command on the shipped sample: what it writes and says, and that its plan holds when asked again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from sample_plan import COLOURING, SLO, TRACE, sample_plan
from shares import every, some

from fleetplan import __main__
from planner import __version__, cli
from planner.commands.printed_tables import print_json
from planner.errors import InputError
from planner.search.evidence import certify

PATIENCE_S = 600.0  # A busy machine is slow, not wrong.

SMALL_SLO = "llm: llama-3.1-8b\nslo: {ttft: {p90: 2 s}, tbt: {p99: 200 ms}}\nfleet: {gpus: {h100-80g: 4}}\n"
SMALL_TRACE = "timestamp,input_tokens,output_tokens\n" + "".join(
    f"{i / 2},{200 + 10 * (i % 7)},{20 + i % 5}\n" for i in range(60)
)
WRITTEN = {"plan.yaml", "certificate.json", "requests.csv", "report.html", "manifests"}
Run = Callable[..., "Outcome"]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def script(name: str, *arguments: object, **environment: str) -> Outcome:
    """The installed command in a process of its own."""
    command = [str(Path(sys.executable).with_name(name)), *map(str, arguments)]
    kept = {name: value for name, value in os.environ.items() if name not in COLOURING} | environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=kept)
    return Outcome(done.returncode, done.stdout, without_progress(done.stderr))


def without_progress(err: str) -> str:
    """stderr without the lines that a busy machine gets to see: '[  1.4 s] writing the report'."""
    return re.sub(r"^\[ *\d+\.\d s\] .*\n", "", err, flags=re.MULTILINE)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process."""

    for name in COLOURING:
        monkeypatch.delenv(name, raising=False)

    def run_command(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        code = end.value.code or 0
        assert isinstance(code, int)
        return Outcome(code, said.out, without_progress(said.err))

    return run_command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small question."""
    (tmp_path / "slo.yaml").write_text(SMALL_SLO)
    (tmp_path / "trace.csv").write_text(SMALL_TRACE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@dataclass(frozen=True)
class Planned:
    folder: Path
    said: Outcome

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = yaml.safe_load((self.folder / "plan.yaml").read_text())
        return document

    @property
    def bytes(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file()
        }


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """The main job, said as a table."""
    made = sample_plan(tmp_path_factory)
    code, out, err = ((made / name).read_text() for name in ("code", "stdout", "stderr"))
    return Planned(made / "plan" / "out", Outcome(int(code), out, without_progress(err)))


@pytest.fixture(scope="session")
def again(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """The same in another process with other hashes, under the other name, said as JSON."""
    out = tmp_path_factory.mktemp("again") / "out"
    said = script(
        "fleetplan", "--slo", SLO, "--trace", TRACE, "-o", out, "--seed", 0, "--json", PYTHONHASHSEED="2"
    )
    return Planned(out, said)


# ---------------------------------------------------------------- plan


def test_the_command_line_alone_loads_nothing_heavy() -> None:
    """`plan profile` cannot start vLLM's CPU engine where Numba is loaded, and `plan --help` is quick."""
    heavy = ("numba", "pandas", "scipy", "pulp", "sklearn", "altair")
    code = (
        f"import sys, planner.cli, planner.documents.task; print([name for name in {heavy} if name in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "meant"),
    [("--qps", "--rate"), ("--isl=900", "--input"), ("--model", "--llm"), ("--budget", "limits: {cost")],
)
def test_options_of_other_tools_are_answered_by_ours(option: str, meant: str) -> None:
    outcome = script("plan", "--llm", "qwen3-8b", option, "5")
    assert outcome.code == 2 and f"did you mean: {meant}" in outcome.err


def test_a_question_in_options_is_sent_to_plan_where_a_command_reads_slo_yaml() -> None:
    """Typer proposed --slo for --llm, as it is spelt most alike."""
    outcome = script("plan", "goodput", "--llm", "llama-3.1-8b", "--rate", "5")
    said = " ".join(outcome.err.replace("│", " ").split())
    assert (
        outcome.code == 2 and "plan goodput takes its question from --slo: `plan --llm ... -o out/`" in said
    )


def test_a_limit_in_options_is_sent_to_slo_yaml() -> None:
    outcome = script("plan", "simulate", "--fleet", "out/", "--ttft-p95", "1s")
    text = " ".join(outcome.err.replace("│", " ").split())
    assert outcome.code == 2 and "beside llm, slo: {ttft: {p95: 1 s}}" in text


def test_a_folder_for_a_command_that_writes_none_is_answered() -> None:
    """`plan what-if -o out/` was "No such option: -o", without a way to keep the answer or the plan."""
    outcome = script("plan", "what-if", "--slo", "slo.yaml", "-o", "out/")
    text = " ".join(outcome.err.replace("│", " ").split())
    assert outcome.code == 2 and "`--json > FILE` keeps its answer" in text


@pytest.mark.long
@pytest.mark.parametrize("words", ["simulate --fleet out/", "what-if --slo slo.yaml", "day --trace day.csv"])
def test_a_file_without_its_option_is_told_which(words: str) -> None:
    """`plan goodput out/` takes a plan as its argument, `plan simulate` as an option."""
    command, _, file = words.split()
    outcome = script("plan", command, file)
    assert outcome.code == 2 and f"did you mean: plan {words}" in outcome.err


@pytest.mark.long
def test_a_fleet_or_a_folder_without_its_option_is_told_which(tmp_path: Path) -> None:
    """`plan compare a.yaml` was sent to --slo, and `plan what-if out/` only missed --slo."""
    fleet = tmp_path / "a.yaml"
    fleet.write_text("llm: llama-3.1-8b\nworkers:\n  - {gpu: l40s, count: 2}\n")
    (tmp_path / "slo.yaml").touch()
    for file, words in (
        (fleet, ("compare", "--fleet", str(fleet))),
        (tmp_path, ("what-if", "--slo", str(tmp_path / "slo.yaml"))),
        ("out/", ("what-if", "--slo", "slo.yaml")),
        ("out/", ("replan", "--current", "out/")),
    ):
        command, option, path = words
        outcome = script("plan", command, file)
        text = "".join(outcome.err.replace("│", "").split())
        assert outcome.code == 2 and f"didyoumean:plan{command}{option}{path}" in text


def test_the_sample_is_planned_into_one_folder(planned: Planned) -> None:
    assert planned.said.code == 0, planned.said.err
    assert {path.name for path in planned.folder.iterdir()} == WRITTEN
    assert {path.name for path in planned.folder.parent.iterdir()} == {"out"}
    assert planned.document["status"] == "certified"


def test_the_table_names_fleet_price_promise_proof_and_place(planned: Planned) -> None:
    document, said = planned.document, planned.said.out
    said = " ".join(said.split())
    for words in (
        f"{document['bill']['usd_per_h']:.2f} USD/h",
        "Step times estimated, not measured here.",
        "1 decode worker of 2 lost",
        "takes another plan: this one is kept in 42 of 49 scenarios with so much more",
        "with 5 workers (3 prefill + 2 decode), for the same price, the SLO is kept in 7 of the test's first "
        "10 scenarios",
        "10,909 requests in 9.1 min",
        "certified",
        "39.04 USD/h, exactly",
        f"written to {planned.folder}",
        *(pool["gpu"] for pool in document["workers"]),
    ):
        assert words in said
    assert "MISSED" not in said


@pytest.mark.slow
def test_a_promised_attainment_is_shown_where_the_limits_are(run: Run, tmp_path: Path) -> None:
    """An idle fleet keeps both limits for every request; none is complete within a microsecond."""
    slo, trace = tmp_path / "slo.yaml", tmp_path / "trace.csv"
    trace.write_text(SMALL_TRACE)
    slo.write_text(SMALL_SLO.replace("slo: {", "slo: {attainment: 0.9, "))
    assert run("--slo", slo, "--trace", trace, "-o", tmp_path / "out").code == 0
    document = yaml.safe_load((tmp_path / "out" / "plan.yaml").read_text())
    assert document["simulated_attainment_frac"] == 1.0
    said = run("--slo", slo, "--trace", trace, "-o", tmp_path / "out", "--verbose").out
    assert re.search(r"attainment.*90 %.*100 %.*all limits at once.*kept", said)
    slo.write_text(SMALL_SLO.replace("slo: {", "slo: {attainment: 0.9, e2e: {p50: 1 us}, "))
    asked = ("simulate", "--fleet", tmp_path / "out" / "plan.yaml", "--trace", trace, "--slo", slo)
    assert re.search(r"attainment.*90 %.* 0 %.*all limits at once.*MISSED", run(*asked).out)
    assert re.search(r"attainment.*90 %.* 0 %, 0 % at least", run(*asked, "--seeds", 2).out)


@pytest.mark.slow
def test_stderr_holds_progress_alone(planned: Planned, again: Planned) -> None:
    for line in (planned.said.err + again.said.err).splitlines():
        assert line.startswith("[") and " s] " in line


@pytest.mark.slow
def test_equal_seeds_give_equal_bytes_and_json_is_one_object_that_agrees(here: Path, run: Run) -> None:
    """Three kinds of GPU: as a table in this process, as JSON in another with other hashes."""
    slo = SMALL_SLO.replace("h100-80g: 4", "a100-80g: 4, h100-80g: 4, l40s-48g: 4")
    (here / "slo.yaml").write_text(slo)
    line = ("--slo", "slo.yaml", "--trace", "trace.csv", "-o")
    table = Planned(Path("one"), run(*line, "one"))
    outcome = script("fleetplan", *line, "two", "--seed", 0, "--json", PYTHONHASHSEED="2")
    in_json = Planned(Path("two"), outcome)
    assert table.said.code == 0 and table.bytes == in_json.bytes
    said = json.loads(outcome.out)
    certificate = json.loads(in_json.bytes["certificate.json"])
    assert (said["status"], said["directory"]) == ("certified", "two")
    assert said["cost_usd_per_h"] == in_json.document["cost_usd_per_h"]
    assert said["certificate"] == certificate["certificate"]
    assert certificate["certificate"]["level0_exact"]
    assert 0 < certificate["certificate"]["bound"] <= certificate["certificate"]["value"]


@pytest.mark.parametrize("command", ["plan", "what-if", "check"])
def test_with_json_an_error_is_an_object_too(run: Run, command: str) -> None:
    words = {"plan": (), "what-if": ("what-if", "--change", "seed=1"), "check": ("check", "slo.yaml")}[
        command
    ]
    slo = () if command == "check" else ("--slo", "slo.yaml")
    said = run(*words, *slo, "--json")  # There is no slo.yaml here.
    answer = json.loads(said.out)
    assert said.code == 1 and "no such file" in said.err
    if command == "check":
        assert answer["errors"] == {"slo.yaml": "slo.yaml: no such file"}
    else:
        assert answer["status"] == "error" and said.err == f"plan: {answer['message']}\n"


@pytest.mark.slow
def test_so_does_the_sample(planned: Planned, again: Planned) -> None:
    assert planned.bytes == again.bytes


@pytest.mark.slow
def test_another_seed_draws_other_traffic_that_is_kept_too(
    tmp_path: Path, planned: Planned, run: Run
) -> None:
    (tmp_path / "slo.yaml").write_text(SLO.read_text() + "safety: none\n")
    line = ("--slo", tmp_path / "slo.yaml", "--trace", TRACE, "-o", tmp_path / "out")
    outcome = run(*line, "--seed", 5, "--json")
    assert outcome.code == 0
    assert (tmp_path / "out" / "requests.csv").read_bytes() != planned.bytes["requests.csv"]
    assert json.loads(outcome.out)["simulation"]["slo"]["holds"]


@pytest.mark.long
def test_a_plan_replaces_the_one_before_and_leaves_other_files(here: Path, run: Run) -> None:
    (here / "out").mkdir()
    (here / "out" / "plan.yaml").write_text("old")
    (here / "out" / "notes.txt").write_text("mine")
    (here / "out" / "charts").mkdir()
    (here / "out" / "charts" / "mine.png").write_text("mine")
    line = ("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out")
    assert run(*line, "--png").code == 0
    charts = {path.name for path in (here / "out" / "charts").iterdir()}
    assert {"ttft.png", "tbt.png", "busy.png", "demand.png", "mine.png"} <= charts
    assert run(*line).code == 0
    assert {path.name for path in (here / "out").iterdir()} == WRITTEN | {"notes.txt", "charts"}
    assert {path.name for path in (here / "out" / "charts").iterdir()} == {"mine.png"}
    assert yaml.safe_load((here / "out" / "plan.yaml").read_text())["status"] == "certified"


# ---------------------------------------------------------------- the clock


def ticking(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    """The planner's clock stands still for so many looks at it, then all time is over."""
    count = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: 0.0 if next(count) < looks else 1e9)
    for module in ("evidence.certify", "mixed.bounds", "oracle.work_clock"):
        monkeypatch.setattr(f"planner.search.{module}.time", clock)


def test_no_plan_in_time_is_one_clear_line(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ticking(monkeypatch, 1)
    outcome = run("--slo", SLO, "--trace", TRACE, "-o", tmp_path / "out")
    assert (outcome.code, outcome.out) == (4, "")
    assert outcome.err.splitlines()[-1].startswith("plan: no fleet within the limits (stock of a100-80g, ")
    assert outcome.err.splitlines()[-1].endswith("the time limit came first; raise --time-limit")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_plan_cut_short_keeps_the_slo(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = []
    for looks in (1, 2, 3, 5, 8, 13, 21, 34, 55, 10**9):
        out = here / f"out-{looks}"
        with monkeypatch.context() as patch:
            ticking(patch, looks)
            outcome = run("--slo", "slo.yaml", "--trace", "trace.csv", "-o", out, "--json")
        codes.append(outcome.code)
        said = json.loads(outcome.out)
        if said["status"] == "not found":  # the time was over before the first fleet that holds
            assert outcome.code == 4 and not out.exists()
            continue
        is_whole = outcome.code == 0
        assert said["status"] == ("certified" if is_whole else "best found")
        assert said["certificate"]["level0_exact"] or not is_whole  # production may be cut short after it
        assert {path.name for path in out.iterdir()} == WRITTEN
        line = ("simulate", "--fleet", out / "plan.yaml", "--trace", "trace.csv", "--slo", "slo.yaml")
        assert json.loads(run(*line, "--json").out)["slo"]["holds"]
    assert set(codes) == {0, 4} and codes == sorted(codes, reverse=True)


def test_a_table_cut_short_says_so(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for looks in range(1, 40):
        with monkeypatch.context() as patch:
            ticking(patch, looks)
            outcome = run("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out")
        if outcome.code == 4 and outcome.out:  # with less, no fleet is found at all
            break
    assert outcome.code == 4 and "NOT exhausted" in outcome.out
    assert "# best found:" in (here / "out" / "plan.yaml").read_text()


def test_what_was_found_under_assumptions_is_not_called_exact(
    here: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search came to its end, so the exit code is 0; but it left fleets out by assumption."""
    line = ("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out")

    def assumed(*given: Any, **more: Any) -> Any:
        found = plan(*given, **more)
        return replace(found, certificate=replace(found.certificate, level0_exact=False, beyond_exact=True))

    plan = certify.plan
    monkeypatch.setattr(certify, "plan", assumed)
    outcome = run(*line)
    assert outcome.code == 0
    report = re.sub(r"<[^>]*>", " ", (here / "out" / "report.html").read_text())
    for said in (outcome.out, report):
        assert "found by search" in said
        assert not re.search(r"exactly|, exact|proved|no policy whatever", said, flags=re.IGNORECASE)


def test_a_relaxation_cut_short_is_never_called_latency(
    here: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "slo.yaml").write_text(SMALL_SLO + "limits: {power: 300 W}\n")
    codes = set()
    for looks in (1, 2, 3, 4, 6, 10, 10**9):
        with monkeypatch.context() as patch:
            ticking(patch, looks)
            outcome = run("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out", "--json")
        codes.add(outcome.code)
        assert outcome.code in (3, 4) and not (here / "out").exists()
        said = json.loads(outcome.out)
        assert said["kind"] == "capacity"
        assert said["status"] == ("infeasible" if outcome.code == 3 else "not found")
    assert codes == {3, 4}


@pytest.mark.long
def test_the_shortest_time_limit_ends_with_a_plan_or_a_clear_line(tmp_path: Path) -> None:
    """On a real clock either may come first."""
    outcome = script("plan", "--slo", SLO, "--trace", TRACE, "-o", tmp_path / "out", "--time-limit", 0.1)
    assert outcome.code == 4
    if outcome.err.splitlines()[-1].endswith("raise --time-limit"):
        assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- simulate


def test_simulating_the_plan_on_its_requests_repeats_its_numbers(planned: Planned, run: Run) -> None:
    folder = planned.folder
    line = ("simulate", "--fleet", folder / "plan.yaml", "--trace", folder / "requests.csv", "--slo", SLO)
    for more in ((), ("--window", "whole")):
        summary = json.loads(run(*line, "--json", *more).out)
        assert summary["slo"]["holds"] and summary["slo"]["is_steady"]
        assert summary["slo"]["lines"] == planned.document["simulated"]
        assert summary["requests"] == planned.document["traffic"]["requests"]
    said = run(*line)
    assert (said.code, said.err) == (0, "") and "SLO: kept" in said.out


def test_simulating_the_plan_on_the_trace_scales_it_as_the_plan_did(planned: Planned, run: Run) -> None:
    outcome = run(
        "simulate", "--fleet", planned.folder / "plan.yaml", "--trace", TRACE, "--slo", SLO, "--json"
    )
    assert json.loads(outcome.out)["slo"]["lines"] == planned.document["simulated"]


def test_requests_csv_of_simulate_is_the_plans(planned: Planned, run: Run, tmp_path: Path) -> None:
    line = ("simulate", "--fleet", planned.folder / "plan.yaml", "--trace", planned.folder / "requests.csv")
    assert run(*line, "-o", tmp_path / "requests.csv").code == 0
    assert (tmp_path / "requests.csv").read_bytes() == planned.bytes["requests.csv"]


def test_window_whole_replays_a_plan_whose_window_was_cut_out(here: Path, run: Run) -> None:
    """The busiest 10 s of a burst carry more than 6 requests/s, and must not be thinned to 6 again."""
    rows = [i / 2 for i in range(40)] + [20 + i / 10 for i in range(60)] + [26 + i / 2 for i in range(40)]
    (here / "trace.csv").write_text(
        "timestamp,input_tokens,output_tokens\n"
        + "".join(f"{at},{300 + i % 9},20\n" for i, at in enumerate(rows))
    )
    (here / "slo.yaml").write_text(SMALL_SLO + "traffic: {rate: 6, window: busiest 10 s}\n")
    assert run("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out").code == 0
    line = ("simulate", "--fleet", "out/plan.yaml", "--trace", "out/requests.csv", "--slo", "slo.yaml")
    summary = json.loads(run(*line, "--window", "whole", "--json").out)
    document = yaml.safe_load((here / "out" / "plan.yaml").read_text())
    assert document["traffic"]["rate_rps"] > 6.5
    assert summary["requests"] == document["traffic"]["requests"]
    assert summary["slo"]["lines"] == document["simulated"]


def test_rate_window_and_closed_loop_change_what_is_simulated(here: Path, run: Run) -> None:
    (here / "fleet.yaml").write_text("llm: llama-3.1-8b\nworkers: [{gpu: h100-80g}]\n")
    line = ("simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv", "--json")

    def simulated(*more: str) -> dict[str, Any]:
        outcome = run(*line, *more)
        assert (outcome.code, outcome.err) == (0, "")
        summary: dict[str, Any] = json.loads(outcome.out)
        return summary

    assert simulated()["requests"] == 60
    assert simulated("--rate", "4")["requests"] == 118  # 29.5 s
    assert simulated("--rate", "4", "--scale", "compress")["requests"] == 60
    assert simulated("--rate", "1", "--scale", "thin")["requests"] == 30
    assert simulated("--window", "first 10 s")["requests"] == 20
    assert simulated("--closed-loop", "8")["requests_per_s"] > simulated()["requests_per_s"]
    # The title of a table that nobody asked for stood alone.
    assert "step time by operator" not in run(*line[:-1]).out


@pytest.mark.parametrize(
    ("slo", "verdict"), [("tbt: {p99: 80 ms}", "not judged"), ("ttft: {p90: 5 s}, tbt: {p99: 80 ms}", "kept")]
)
def test_a_limit_on_gaps_of_answers_of_one_token_is_not_judged(
    here: Path, run: Run, slo: str, verdict: str
) -> None:
    """Answers of one token have no gap: nothing is held against the limit, which keeps nothing."""
    (here / "slo.yaml").write_text(f"llm: llama-3.1-8b\nslo: {{{slo}}}\n")
    (here / "fleet.yaml").write_text("llm: llama-3.1-8b\nworkers: [{gpu: h100-80g}]\n")
    arrivals = "".join(f"{0.5 * k},400,1\n" for k in range(60))
    (here / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n" + arrivals)
    line = ("simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv", "--slo", "slo.yaml")
    simulated = run(*line)
    assert f"SLO: {verdict}" in simulated.out
    (row,) = [row for row in simulated.out.splitlines() if "TBT p99" in row]
    assert "not judged" in row and "100 %" not in row and "kept" not in row
    document = json.loads(run(*line, "--json").out)["slo"]
    assert document["holds"] and document["is_judged"] is (verdict == "kept")
    assert document["lines"][-1]["judged"] == 0
    seeds = run(*line, "--seeds", "3", "--executor", "serial").out
    assert f"SLO: {verdict}" in seeds and "not judged" in seeds
    compared = run("compare", *line[1:], "--fleet", "again=fleet.yaml").out
    assert verdict in next(row for row in compared.splitlines() if "SLO" in row.split())


def _add_worker_by_hand(planned: Planned, path: Path) -> None:
    """Write plan.yaml with a worker more than was planned."""
    plan = yaml.safe_load((planned.folder / "plan.yaml").read_text())
    plan["workers"][0]["count"] += 1
    path.write_text(yaml.safe_dump(plan))


@pytest.mark.parametrize(
    "line",
    [
        "simulate --fleet PLAN --trace nowhere.csv",
        "compare --fleet again=PLAN --trace nowhere.csv",
        "goodput --fleet PLAN --trace nowhere.csv --slo SLO",
        "replan --slo SLO --current PLAN --trace nowhere.csv",
        "schedule PLAN --demand nowhere.csv",
        "prefixes nowhere.csv --fleet PLAN",
        "day --slo SLO --trace nowhere.csv --fleet PLAN",
        "simulate --fleet PLAN --trace nowhere.csv --slo SLO --autoscale hpa",
        "validate PLAN --trace nowhere.csv -o NEW",
        "serve PLAN --engine rehearsal --api-keys nowhere",
    ],
)
def test_every_command_doubts_a_plan_that_was_changed_by_hand(
    planned: Planned, run: Run, tmp_path: Path, line: str
) -> None:
    """A worker more than was planned: what plan.yaml says of the plan is not true of it."""
    _add_worker_by_hand(planned, tmp_path / "plan.yaml")
    given = {"PLAN": str(tmp_path / "plan.yaml"), "SLO": str(SLO), "NEW": str(tmp_path / "new")}
    for word, value in given.items():
        line = line.replace(word, value)
    outcome = run(*line.split())  # It ends at the file that is missing.
    assert outcome.code == 1 and "nowhere" in outcome.err and "they were changed since" in outcome.err


@pytest.mark.parametrize(
    "command",
    ["simulate --fleet PLAN", "compare --fleet it=PLAN", "day --fleet PLAN", "validate PLAN -o OUT"],
)
def test_a_question_of_another_llm_than_the_fleet_serves_is_doubted(
    planned: Planned, run: Run, tmp_path: Path, command: str
) -> None:
    (tmp_path / "slo.yaml").write_text("llm: Qwen/Qwen3-32B\nslo: {ttft: {p90: 2 s}}\n")
    line = command.replace("PLAN", str(planned.folder)).replace("OUT", str(tmp_path / "out"))
    outcome = run(*line.split(), "--trace", "nowhere.csv", "--slo", str(tmp_path / "slo.yaml"))
    assert outcome.code == 1 and "nowhere" in outcome.err
    assert "and the question is of Qwen/Qwen3-32B" in outcome.err


# ---------------------------------------------------------------- trace and catalog


def test_a_trace_is_described(run: Run) -> None:
    table, document = run("trace", TRACE), json.loads(run("trace", TRACE, "--json").out)
    assert (table.code, table.err) == (0, "")
    assert document["requests"] == 3000 and document["rate_rps"] == pytest.approx(5.5)
    assert "3000" in table.out and "rate_rps" in table.out


@pytest.mark.parametrize(
    ("what", "row"),
    some(
        (("gpus", "h100-80g"), ("llms", "Llama-3.1-8B"), ("slos", "vidur"), ("latency", "a100-80g")),
        3,  # the last reads every fit
    ),
)
def test_the_catalog_is_shown(run: Run, what: str, row: str) -> None:
    table, document = run("catalog", what), json.loads(run("catalog", what, "--json").out)
    assert (table.code, table.err) == (0, "")
    assert list(document) == [what] and row in json.dumps(document)
    assert row in table.out
    for entry in document[what]:
        assert entry["basis"] if what == "latency" else entry["source"] and entry["date"]
    if what == "gpus":
        assert all(entry["price_source"] and entry["price_date"] for entry in document[what])


def test_catalog_alone_shows_gpus_and_a_catalog_of_ones_own_comes_first(here: Path, run: Run) -> None:
    assert run("catalog").out == run("catalog", "gpus").out
    (here / "own").mkdir()
    (here / "own" / "slos.yaml").write_text(
        "mine: {slo: {ttft: {p50: 1 s}}, for: me, source: myself, date: 2025-07-01}\n"
    )
    document = json.loads(run("catalog", "slos", "--catalog", "own", "--json").out)
    assert [entry["preset"] for entry in document["slos"]] == ["mine"]


# ---------------------------------------------------------------- the command itself


def test_version_and_help(run: Run) -> None:
    assert run("--version") == Outcome(0, f"fleetplan {__version__}\n", "")
    for line in ((), ("-h",)):
        outcome = script("plan", *line)
        assert (outcome.code, outcome.err) == (0, "")
        for word in ("--slo", "--trace", "simulate", "catalog"):
            assert word in outcome.out
    for command in ("simulate", "trace", "catalog"):
        assert (run(command, "-h").code, run(command, "--help").code) == (0, 0)


def test_both_names_are_installed_and_neither_is_planner() -> None:
    """`planner` is the package of many others."""
    scripts = {
        point.name: point
        for point in entry_points(group="console_scripts")
        if point.value.startswith("fleetplan.")
    }
    assert set(scripts) == {"plan", "fleetplan"}
    assert all(point.load() is __main__.main for point in scripts.values())
    assert script("fleetplan", "--version") == script("plan", "--version")


def test_no_escape_codes_where_nobody_looks(planned: Planned, run: Run) -> None:
    assert "\x1b" not in planned.said.out + planned.said.err
    for line in (("trace", TRACE), ("catalog", "gpus"), ("-h",), ("--slo",), ("catalog", "x")):
        outcome = run(*line)
        assert "\x1b" not in outcome.out + outcome.err
    outcome = script("plan", "catalog", "x", NO_COLOR="1")
    assert outcome.code == 1 and "\x1b" not in outcome.out + outcome.err


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["table", "json"])
def test_an_answer_that_cannot_be_written_is_one_line(more: tuple[str, ...]) -> None:
    command = [str(Path(sys.executable).with_name("plan")), "catalog", *more]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=PATIENCE_S
        )
    assert done.returncode == 1
    assert done.stderr == "plan: the answer cannot be written to stdout (No space left on device)\n"


START = "import os; os.write(1, b'.'); from fleetplan.__main__ import main; main()"


@pytest.mark.long
@pytest.mark.parametrize("after_s", every(2, [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 1.5]))
def test_an_interrupt_is_one_line_and_leaves_nothing(here: Path, after_s: float) -> None:
    """From the moment that Python has started: while modules load, and while a trace never comes."""
    os.mkfifo("pipe.csv")
    asked = ["--slo", "slo.yaml", "--trace", "pipe.csv", "-o", "out"]
    command = [sys.executable, "-c", START, *asked]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.read(1) == "."
        time.sleep(after_s)
        for _ in range(5):  # a signal that comes just before the read is seen after it only: press again
            running.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = running.communicate(timeout=20)
                break
    assert (running.returncode, out, without_progress(err)) == (130, "", "plan: interrupted\n")
    assert {path.name for path in here.iterdir()} == {"slo.yaml", "trace.csv", "pipe.csv"}


@pytest.mark.long
@pytest.mark.parametrize("after_s", some([1.8, 1.0, 1.4, 2.5], 2))
def test_an_interrupt_of_many_processes_is_one_line(here: Path, after_s: float) -> None:
    """A terminal sends it to all of them: while workers start, and while they work."""
    (here / "fleet.yaml").write_text("llm: llama-3.1-8b\nworkers: [{gpu: h100-80g}]\n")
    asked = ["simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv", "--seeds", "10000"]
    with subprocess.Popen(
        [sys.executable, "-c", START, *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stdout is not None and running.stdout.read(1) == "."
        time.sleep(after_s)
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=PATIENCE_S)
    assert (running.returncode, out, without_progress(err)) == (130, "", "plan: interrupted\n")


@pytest.mark.long
def test_an_interrupt_ends_a_solver_that_does_not_hear_it() -> None:
    """Minutes in one call of a library in C, as a solver or a long simulation may take."""
    code = (
        "import hashlib, os, planner.cli\n"
        "from fleetplan.__main__ import main\n"
        "def command():\n"
        "    os.write(1, b'.')\n"
        "    hashlib.pbkdf2_hmac('sha256', b'x', b'y', 2**31 - 1)\n"
        "planner.cli.main = command\n"
        "main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None and running.stdout.read(1) == "."
        time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=PATIENCE_S)
    assert (running.returncode, err) == (130, "plan: interrupted\n")


def test_an_interrupt_that_python_would_drop_comes_again() -> None:
    """Raised in a destructor it ends nothing: Python writes a traceback and goes on."""
    code = (
        "import signal, sys, time, planner.cli\n"
        "from fleetplan.__main__ import main\n"
        "class Dropped:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "def command():\n"
        "    Dropped()\n"
        "    for _ in range(100): time.sleep(0.1)\n"
        "planner.cli.main = command\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "plan: interrupted\n")


@pytest.mark.parametrize("code", [0, 4])
def test_the_process_ends_without_taking_its_objects_apart(code: int) -> None:
    """What was printed is written, and what was to be done at the end is done, but no destructor runs: for
    the objects of a plan that would take nearly a CPU second.
    """
    text = (
        "import atexit, sys, planner.cli\n"
        "from fleetplan.__main__ import main\n"
        "class Left:\n"
        "    def __del__(self): print('taken apart', flush=True)\n"
        "def command():\n"
        "    sys.left = Left()\n"
        "    atexit.register(lambda: print('at the end'))\n"
        f"    print('printed'); print('on stderr', end='', file=sys.stderr); sys.exit({code})\n"
        "planner.cli.main = command\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "printed\nat the end\n", "on stderr")


@pytest.mark.parametrize(
    "number",
    [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2],
    ids=["stdin", "stdout", "stderr"],
)
def test_a_closed_stream_changes_nothing(here: Path, number: int) -> None:
    """Else the first file that is opened gets its number, a chart's pipe for instance."""
    plan = Path(sys.executable).with_name("plan")
    line = f"exec {plan} --slo slo.yaml --trace trace.csv -o out {number}>&-"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    assert "written to out" in done.stdout or number == 1
    assert {path.name for path in (here / "out").iterdir()} == WRITTEN


@pytest.mark.slow
def test_a_pipe_that_knows_ascii_alone_gets_names_that_are_no_text(here: Path) -> None:
    """A name is bytes; where they are no UTF-8, Python keeps half characters that no file can hold. Colours
    asked for do not move the status line in a log.
    """
    (here / "trace.csv").rename(here / os.fsdecode(b"trace\xff.csv"))
    line = ("--slo", "slo.yaml", "--trace", os.fsdecode(b"trace\xff.csv"), "-o", "out")
    outcome = script("plan", *line, PYTHONIOENCODING="ascii", FORCE_COLOR="1")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.isascii() and "h100-80g" in outcome.out
    assert r"trace\udcff.csv" in re.sub(r"\x1b\[[\d;]*m", "", outcome.out)
    assert r"trace\udcff.csv" in (here / "out" / "report.html").read_text()
    written = (here / "out" / "plan.yaml").read_text()
    assert yaml.load(written, Loader=yaml.SafeLoader)["traffic"]["requests"] == 60  # libyaml knows no halves


@pytest.mark.long
def test_a_terminal_gets_its_cursor_back_after_an_error(here: Path) -> None:
    """The moving status line hides it."""
    (here / "slo.yaml").write_text(SMALL_SLO.replace("2 s", "1 ms"))
    command = [
        str(Path(sys.executable).with_name("plan")),
        "--slo",
        "slo.yaml",
        "--trace",
        "trace.csv",
        "-o",
        "out",
    ]
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    done = subprocess.run(
        command, stdout=slave, stderr=slave, check=False, timeout=PATIENCE_S, env=environment
    )
    os.close(slave)
    seen = os.read(master, 2**16).decode()
    os.close(master)
    assert done.returncode == 3 and "plan: latency" in seen
    assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l") > -1


@pytest.mark.parametrize("usd", ["inf", "1e300"])
@pytest.mark.parametrize("option", ["--stop-cost", "--start-cost"])
def test_a_cost_without_end_is_refused(run: Run, here: Path, option: str, usd: str) -> None:
    """With an infinite one the solver was asked for the impossible, and said so with a traceback."""
    line = ("replan", "--current", "fleet.yaml", "--slo", "slo.yaml", "--trace", "trace.csv", option, usd)
    outcome = run(*line)
    assert outcome.code == 1 and outcome.err.count("\n") == 1
    assert f"plan: {option}: expected USD per worker, 0 to 1e+09, found {float(usd):g}" in outcome.err


def failing(share: int) -> str:
    """The small trace, with no output in one of so many rows."""
    head, *rows = SMALL_TRACE.splitlines()
    cut = (f"{row.rpartition(',')[0]},0" if i % share == 1 else row for i, row in enumerate(rows))
    return "\n".join([head, *cut, ""])


def test_requests_left_out_are_said_before_the_answer(run: Run, here: Path) -> None:
    """6 of 60 cannot be served: on the console first, and in what programs read."""
    (here / "trace.csv").write_text(failing(10))
    (here / "fleet.yaml").write_text("llm: llama-3.1-8b\nworkers: [{gpu: h100-80g}]\n")
    said = "trace.csv: 6 of 60 requests (10.0 %) cannot be served as they stand: 6 rows with no output tokens"
    for line in (
        ("trace", "trace.csv"),
        ("simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv"),
        ("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out"),
    ):
        outcome = run(*line, "--json")
        assert outcome.code == 0 and outcome.err.startswith(f"warning: {said}")
        assert json.loads(outcome.out)["warnings"][0].startswith(said)
    assert said[1:] in (here / "out" / "report.html").read_text()  # it begins a sentence there


@pytest.mark.parametrize(
    "line",
    [
        ("trace", "trace.csv"),
        ("simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv"),
        ("compare", "--fleet", "fleet.yaml", "--trace", "trace.csv"),
        ("goodput", "--fleet", "fleet.yaml", "--trace", "trace.csv", "--slo", "slo.yaml"),
        ("search", "vidur", "--slo", "slo.yaml", "--trace", "trace.csv"),
        ("what-if", "--slo", "slo.yaml", "--trace", "trace.csv", "--change", "slo.ttft.p90=3 s"),
        ("sensitivity", "--slo", "slo.yaml", "--trace", "trace.csv"),
        ("pareto", "--slo", "slo.yaml", "--trace", "trace.csv", "--over", "ttft"),
        ("replan", "--current", "fleet.yaml", "--slo", "slo.yaml", "--trace", "trace.csv"),
        ("validate", "fleet.yaml", "-o", "out", "--trace", "trace.csv"),
        ("prefixes", "trace.csv"),
        ("--slo", "slo.yaml", "--trace", "trace.csv", "-o", "out"),
    ],
    ids=lambda line: line[0],
)
def test_a_trace_of_which_much_is_left_out_is_refused(
    run: Run, here: Path, line: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the requests failed; whoever means the other half says so."""
    (here / "trace.csv").write_text(failing(2))
    (here / "fleet.yaml").write_text("llm: llama-3.1-8b\nworkers: [{gpu: h100-80g}]\n")
    outcome = run(*line)
    assert outcome.code == 1 and outcome.out == ""
    assert "30 of 60 requests (50.0 %) cannot be served" in outcome.err and "--drop-invalid" in outcome.err
    assert not (here / "out").exists()
    said: list[str] = []

    def stop(warnings: Iterable[str]) -> None:
        said.extend(warnings)
        raise InputError("enough")

    for module in ("command_output", "plan_command", "trace_command"):
        monkeypatch.setattr(f"planner.commands.{module}.print_warnings", stop)
    run(*line, "--drop-invalid")
    assert len(said) == 1


def test_a_foreign_planner_is_told_in_one_line(tmp_path: Path) -> None:
    """llm-d-planner has a package `planner` too, and may come first or have been installed over ours."""
    foreign = tmp_path / "planner"
    foreign.mkdir()
    (foreign / "__init__.py").write_text('"""Another project."""\n')
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from fleetplan.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"{foreign}/__init__.py is another project's" in done.stderr and "pipx install" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("command", ["", "simulate", "what-if"])
def test_an_option_of_one_value_given_twice_is_refused(command: str) -> None:
    """Of two traces the last was planned, without a word of the first."""
    outcome = script("plan", *command.split(), "--trace", "a.csv", "--slo", "slo.yaml", "--trace=b.csv")
    text = " ".join(outcome.err.replace("│", "").split())
    assert outcome.code == 2 and "--trace is given twice" in text and "plan trace FILE FILE" in text


def test_an_answer_has_its_own_warnings_and_those_of_the_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    """A day's own list stood in the place of the traffic's."""
    print_json({"a": 1, "warnings": ["own", "both"]}, ["both", "traffic"])
    assert json.loads(capsys.readouterr().out) == {"warnings": ["both", "traffic", "own"], "a": 1}


@pytest.mark.long
@pytest.mark.parametrize("line", ["simulate --fleet PLAN", "compare --fleet it=PLAN"])
def test_what_is_doubted_on_the_console_is_in_the_json(
    planned: Planned, run: Run, tmp_path: Path, line: str
) -> None:
    _add_worker_by_hand(planned, tmp_path / "plan.yaml")
    words = line.replace("PLAN", str(tmp_path / "plan.yaml")).split()
    outcome = run(*words, "--trace", str(TRACE), "--json")
    warnings = json.loads(outcome.out)["warnings"]
    assert any("they were changed since" in warning for warning in warnings)
    assert [f"warning: {each}" for each in warnings] == [
        row for row in outcome.err.splitlines() if row.startswith("warning: ")
    ]
