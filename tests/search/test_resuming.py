"""`plan --resume`: a run that was killed goes on from what it had answer_file, to the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from plans import CATALOG
from questions import DOCUMENT, question, traffic

from planner import cli
from planner.domain import Limit, Slo
from planner.errors import InputError
from planner.search.evidence.certify import plan
from planner.search.oracle import resuming, simulation_queries
from planner.search.oracle.resuming import VerdictFile, question_digest, trace_digest, verdict_name
from planner.search.oracle.verdict_cache import VerdictCache
from planner.search.problem.plan_problem import Conditions
from planner.traffic.trace import Trace

AT_ONCE = "import planner.search.oracle.resuming as r; r.FIRST_WRITE_S = r.WRITE_EVERY_S = 0.0; "
RUN = AT_ONCE + "import sys; from planner.cli import main; main()"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "FIRST_WRITE_S", 0.0)
    monkeypatch.setattr(resuming, "WRITE_EVERY_S", 0.0)


def asked(folder: Path, **changes: object) -> list[str]:
    """The arguments of a run into `folder`."""
    trace = traffic()
    frame = {"arrival_s": trace.arrival_s, "input_tokens": trace.input_tokens}
    pd.DataFrame(frame | {"output_tokens": trace.output_tokens}).to_csv(folder / "t.csv", index=False)
    (folder / "slo.yaml").write_text(yaml.safe_dump(DOCUMENT | {"fleet": {"gpus": ["h100-80g"]}} | changes))
    return ["--slo", str(folder / "slo.yaml"), "--trace", str(folder / "t.csv"), "-o", str(folder / "out")]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def command(*arguments: str) -> int:
    """The exit code of `plan`."""
    before, sys.argv = sys.argv, ["plan", *arguments]
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = before
    return int(ended.value.code or 0)


@pytest.mark.slow
@pytest.mark.parametrize("safety", ["none", {"kept_in": 0.9}])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path, safety: object) -> None:
    """Killed, not interrupted, as soon as it has written what it answer_file; what it leaves is taken up."""
    arguments = asked(tmp_path, safety=safety)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    state, until = tmp_path / "out" / resuming.FILE_NAME, time.monotonic() + 120
    while not state.exists() and run.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    if state.exists():  # else it had come to its end between two looks
        known = json.loads(state.read_text())["known"]
        assert known
        assert command(*arguments, "--resume") == 0
        assert not state.exists()
    resumed = files_of(tmp_path / "out")
    assert command(*arguments) == 0
    again = files_of(tmp_path / "out")
    differing = {name for name in again if again[name] != resumed.get(name)}
    assert not differing


class Ended(Exception):
    """Stands for whatever ends a run."""


@pytest.mark.long
def test_nothing_is_simulated_twice(tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended after twenty, the run that goes on simulates the others alone, and counts them all."""
    task, trace = question(fleet={"gpus": ["h100-80g"]}, safety={"kept_in": 0.9}), traffic(requests=200)
    runs: list[int] = []
    keeps_slo = simulation_queries.keeps_slo

    def counted(*args: object, **kwargs: object) -> object:
        runs.append(1)
        if 0 < stop <= len(runs):  # those beside it too
            raise Ended
        return keeps_slo(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("planner.search.oracle.simulation_queries.keeps_slo", counted)
    stop = 0
    whole = plan(task, trace, CATALOG)
    needed = len(runs)
    assert needed > 25
    runs.clear()
    stop = 20
    first = VerdictFile(tmp_path, "q")
    with pytest.raises(Ended):
        plan(task, trace, CATALOG, conditions=Conditions(cache=VerdictCache(file=first)))
    second = VerdictFile(tmp_path, "q")
    second.load()
    runs.clear()
    stop = 0
    resumed = plan(
        task, traffic(requests=200), CATALOG, conditions=Conditions(cache=VerdictCache(file=second))
    )
    assert second.used_count == 19 and len(runs) == needed - 19
    assert resumed.fleet == whole.fleet
    assert resumed.certificate == whole.certificate


def test_another_question_is_refused_in_one_line(
    tmp_path: Path, at_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """None left, another seed, a damaged one, no folder."""
    arguments = asked(tmp_path)
    assert command(*arguments, "--resume") == 1
    assert "there is no" in capsys.readouterr().err
    (tmp_path / "out").mkdir(exist_ok=True)
    state = tmp_path / "out" / resuming.FILE_NAME
    for text, said in (
        (json.dumps({"question": "another", "known": {}}), "is of another question, trace, seed or version"),
        ("{", "is damaged"),
        (json.dumps({"question": "q", "known": {"a": 3}}), "is damaged"),
    ):
        state.write_text(text)
        assert command(*arguments, "--resume") == 1
        (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
        assert said in line and state.read_text() == text
    assert command(*arguments[:-2], "--resume") == 1
    assert "--resume: name the folder of the run that is to go on with -o" in capsys.readouterr().err


def test_a_question_is_told_by_all_it_depends_on() -> None:
    trace = traffic()
    digest = question_digest(DOCUMENT, trace, 0, False)
    assert digest == question_digest(dict(reversed(DOCUMENT.items())), traffic(), 0, False)
    changed = replace(trace, arrival_s=trace.arrival_s + 1e-9)
    others = [
        question_digest(DOCUMENT | {"objective": "gpus"}, trace, 0, False),
        question_digest(DOCUMENT, changed, 0, False),
        question_digest(DOCUMENT, trace, 1, False),
        question_digest(DOCUMENT, trace, 0, True),
    ]
    assert len({digest, *others}) == 5


def test_traces_are_told_by_their_requests_and_not_by_their_names() -> None:
    trace = traffic()
    assert trace_digest(replace(trace, name="other")) == trace_digest(trace)
    lengths = trace.output_tokens.copy()
    lengths[7] += 1
    assert trace_digest(replace(trace, output_tokens=lengths)) != trace_digest(trace)
    assert trace_digest(replace(trace, tenant=np.zeros(len(trace), np.int64) + 1)) != trace_digest(trace)


def test_what_words_do_not_tell_is_not_kept() -> None:
    """An array that is cut short, or an object without words, might be another one next time."""
    trace, slo = traffic(), Slo((Limit("ttft", 0.9, 1.0),))
    assert verdict_name((1, "a"), trace, slo) is not None
    assert verdict_name((np.arange(5000),), trace, slo) is None
    assert verdict_name((object(),), trace, slo) is None


def test_a_full_disk_ends_no_run(tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise InputError("no space left")

    monkeypatch.setattr(resuming, "write_file", full)
    answer_file = VerdictFile(tmp_path, "q")
    answer_file.add(("a",), traffic(), Slo((Limit("ttft", 0.9, 1.0),)), holds=True, seen=3)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_before_five_minutes(tmp_path: Path) -> None:
    answer_file = VerdictFile(tmp_path, "q")
    answer_file.add(("a",), traffic(), Slo((Limit("ttft", 0.9, 1.0),)), holds=True, seen=3)
    assert not list(tmp_path.iterdir())


def test_a_trace_can_be_forgotten() -> None:
    """Digests are kept for traces that live."""
    trace = traffic()
    trace_digest(trace)
    before = len(resuming._digests)
    del trace
    assert len(resuming._digests) == before - 1
    assert isinstance(traffic(), Trace)
