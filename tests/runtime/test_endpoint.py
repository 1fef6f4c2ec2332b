"""`plan validate --url` against gateways that behave, and against those that do not."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fake_gateway import KEY, MODEL, after, always, gateway
from runtime_fakes import fleet_of, random_trace

from planner import cli
from planner.commands import command_output
from planner.documents.fleet_file import fleet_document
from planner.files.checked_files import to_yaml
from planner.reports.output import requests_csv
from planner.runtime import live_replay, remote_validation, validate
from planner.runtime.analysis import Validation
from planner.runtime.validation_document import validation_document
from planner.runtime.validation_files import render_files

REQUESTS, RATE_RPS = 40, 150.0
BOUNDED_S = 60.0  # for a test that would hang; a busy machine needs some of it
VARIABLE = "A_KEY_OF_A_GATEWAY"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line of an error, without what was told on the way."""
        return self.err.strip().splitlines()[-1]


Run = Callable[..., Outcome]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    trace = random_trace(REQUESTS, RATE_RPS, most=60)
    lines = ["arrival_s,input_tokens,output_tokens"]
    for arrival_s, inputs, outputs in zip(
        trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True
    ):
        lines.append(f"{float(arrival_s)!r},{inputs},{outputs}")
    (tmp_path / "trace.csv").write_text("\n".join([*lines, ""]))
    (tmp_path / "fleet.yaml").write_text(to_yaml(fleet_document(fleet_of(("w", "mixed", 1)))))
    return tmp_path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, with a key; nothing that it says or writes may hold the key. Without
    `page` it draws none."""
    monkeypatch.setattr(live_replay, "LEAD_S", 0.05)
    monkeypatch.setattr(remote_validation, "MOST_WARM_UPS", 1)
    monkeypatch.setenv(VARIABLE, KEY)

    def figures_alone(found: Validation) -> dict[str, str]:
        told = json.dumps(validation_document(found))
        return {"validation.json": told, "requests.csv": requests_csv(found.comparison.measured.requests)}

    def run_command(url: str, *more: str, page: bool = False) -> Outcome:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(validate, "render_files", render_files if page else figures_alone)
        options = ["fleet.yaml", "--trace", "trace.csv", "-o", "out"]
        for name, value in (("--url", url), ("--api-key-env", VARIABLE)):
            options += [] if name in more else [name, value]
        monkeypatch.setattr(sys, "argv", ["plan", "validate", *options, *more])
        start_s = time.monotonic()
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert time.monotonic() - start_s < BOUNDED_S
        said = capfd.readouterr()
        written = [path.read_text() for path in folder.rglob("out/**/*") if path.is_file()]
        assert not [text for text in (said.out, said.err, *written) if KEY in text or KEY[:12] in text]
        return Outcome(int(end.value.code or 0), said.out, said.err)

    return run_command


def refusal(outcome: Outcome) -> str:
    """One line, exit code 1, no traceback."""
    assert outcome.code == 1 and outcome.out == "" and "Traceback" not in outcome.err
    assert outcome.line.startswith("plan: ")
    return outcome.line


def journal_rows(folder: Path, key: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "out" / "journal.jsonl").read_text().splitlines()]
    return [row for row in rows if key in row]


def test_every_request_is_sent_once_and_compared(run: Run, folder: Path) -> None:
    """Token ids of exactly the trace's lengths; one request by which it was probed and one warm-up before."""
    with gateway() as found:
        done = run(found.url, "--json", page=True)
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["finished"] == told["requests"] == REQUESTS and told["times"] == "client"
    assert len(told["errors"]) and told["compared"] > 30
    assert told["endpoint"] | {"round_trip_s": 0} == {
        "url": f"{found.url}/v1",
        "model": MODEL,
        "path": "/completions",
        "prompts": "token ids",
        "fixes_length": True,
        "says_usage": True,
        "tokens_per_word": None,
        "added_tokens": 0.0,
        "round_trip_s": 0,
        "requests_before": 2,
        "answers_without_exact_tokens": 0,
        "lengths": told["endpoint"]["lengths"],
        "engines": None,
    }
    assert told["endpoint"]["lengths"]["prompt_error_frac"] == {"median": 0.0, "largest": 0.0}
    assert len(found.bodies) == REQUESTS + 2 and set(found.keys) == {f"Bearer {KEY}"}
    lines = (folder / "trace.csv").read_text().splitlines()[1:]
    asked = sorted((int(line.split(",")[1]), int(line.split(",")[2])) for line in lines)
    assert sorted(found.served[2:]) == asked
    assert len({json.dumps(body["prompt"][:8]) for body in found.bodies}) == len(found.bodies)
    again = run(found.url, "--json")  # the gateway is gone: nothing is sent, and the answer is the same
    assert json.loads(again.out)["errors"] == told["errors"]
    assert "The endpoint" in (folder / "out" / "report.html").read_text()


def test_quiet_shows_no_progress(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_output, "QUIET_S", -1.0)  # Such short work shows none otherwise.
    with gateway() as found:
        quiet = run(found.url, "-q")
        shutil.rmtree(folder / "out")
        loud = run(found.url)
    assert quiet.code == loud.code == 0 and re.search(r"^\[ +\d", loud.err, re.MULTILINE)
    assert not re.search(r"^\[ +\d", quiet.err, re.MULTILINE) and quiet.out


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"key": "another"}, r"HTTP 401: wrong key .*it refuses the key in \$A_KEY_OF_A_GATEWAY"),
        ({"models": {"data": [{"id": "x"}, {"id": "y"}]}}, "does not serve the plan's LLM .*it has x, y"),
        ({"models": "<html>welcome</html>"}, "expected a list of models in JSON, found '<html>"),
        ({"models": {"data": [{"id": MODEL, "max_model_len": 50}]}}, "at most 50 tokens"),
        ({"behaviour": always("403")}, "HTTP 403"),
        ({"behaviour": always("404"), "models": None}, "takes neither completions nor chat .*HTTP 404"),
        ({"behaviour": always("429")}, r"HTTP 429: .*limits requests, Retry-After: 7"),
        ({"behaviour": always("500")}, "HTTP 500"),
        ({"behaviour": always("503")}, "HTTP 503"),
        ({"behaviour": always("dies")}, "Disconnected|ClientOSError"),
        ({"behaviour": always("dies in the middle")}, "PayloadError|broke off|Disconnected|ClientOSError"),
        ({"behaviour": always("hangs")}, "no answer within 1 s"),
        ({"behaviour": always("no json")}, "no stream came, but text/html"),
        ({"behaviour": always("no json in the stream")}, "JSONDecodeError"),
        ({"behaviour": always("error in the middle")}, "error in the stream: boom"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_measured_is_one_line_before_any_traffic(
    run: Run, how: dict[str, Any], said: str
) -> None:
    with gateway(**how) as found:
        line = refusal(run(found.url, "--timeout", patience_s(said)))
    assert len(found.bodies) <= 9
    assert re.search(said, line), line


def patience_s(said: str) -> str:
    """A second where it is the patience that is to end; on a busy machine a good answer may take one."""
    return "1" if "within 1 s" in said else "30"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("401", "HTTP 401"),
        ("404", "HTTP 404"),
        ("redirect", "redirects are not followed"),
        ("429", r"limits requests: .* got HTTP 429 \(Retry-After: 7\).*--rate"),
        ("500", r"of the last \d+ requests failed, the last with .HTTP 500: you said Bearer \[key\]"),
        ("dies", r"of the last \d+ requests failed"),
        ("dies in the middle", r"of the last \d+ requests failed"),
        ("error in the middle", "error in the stream: boom"),
        ("hangs", "no answer within 1 s"),
        ("no json", "no stream came"),
        ("drips", "no end within 1 s"),
    ],
)
def test_a_gateway_that_goes_wrong_in_the_middle_ends_the_run(
    run: Run, folder: Path, what: str, said: str
) -> None:
    """After ten good requests; those are in the journal."""
    with gateway(key=KEY, behaviour=after(10, what), redirects_to="http://127.0.0.1:9") as found:
        line = refusal(run(found.url, "--timeout", patience_s(said)))
    assert re.search(said, line), line
    assert 8 <= len(journal_rows(folder, "status")) <= REQUESTS


def test_a_run_goes_on_once_its_gateway_is_well(run: Run) -> None:
    """Those that failed have failed; the others are sent as a second part."""
    with gateway(behaviour=after(10, "dies")) as found:
        refusal(run(found.url))
        found.behaviour = always("well")
        done = run(found.url, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["finished"] + told["failed"] + told["rejected"] == told["requests"] == REQUESTS
    assert told["failed"] >= 6 and [part["part"] for part in told["parts"]] == [0, 1]


def test_a_key_follows_to_no_other_host(run: Run) -> None:
    with gateway(key="") as other, gateway(redirects_to=other.url, models="redirect") as found:
        line = refusal(run(found.url))
        assert f"redirects to {other.url}/v1/models" in line and "redirects are not followed" in line
        found.models, found.behaviour = None, always("redirect")
        assert f"redirects to {other.url}/v1/completions" in refusal(run(found.url))
    assert other.keys == [] and other.bodies == []


def test_refusals_that_the_user_wants_to_count_are_outcomes(run: Run) -> None:
    """Every second one gets 429: with --max-failed 1 all are sent, none twice, and half are rejected."""
    with gateway(behaviour=lambda number, _: "429" if number > 2 and number % 2 else "well") as found:
        done = run(found.url, "--json", "--max-failed", "1")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["finished"] == told["rejected"] == REQUESTS // 2 and len(found.bodies) == REQUESTS + 2


def test_no_more_requests_are_sent_than_allowed(run: Run) -> None:
    """Probes and warm-up among them; what was sent is compared. With more allowed the run goes on."""
    most = 12
    with gateway() as found:
        done = run(found.url, "--json", "--max-requests", str(most))
        assert len(found.bodies) == most
        again = run(found.url, "--json", "--max-requests", str(most))
        assert len(found.bodies) == most
        more = run(found.url, "--json", "--max-requests", str(most + 5))
    assert done.code == again.code == more.code == 0, done.err
    told = json.loads(done.out)
    assert told["finished"] == told["requests"] == most - told["endpoint"]["requests_before"]
    assert any("The budget ended the run" in note for note in told["notes"])
    assert most < len(found.bodies) <= most + 5
    assert json.loads(again.out)["errors"] == told["errors"]


def test_no_more_money_is_spent_than_allowed(run: Run) -> None:
    """By the gateway's own count, at 3 and 15 USD per million tokens."""
    with gateway() as found:
        done = run(found.url, "--json", "--max-usd", "0.005", "--usd-per-million", "3,15")
    assert done.code == 0, done.err
    billed_usd = sum(3e-6 * inputs + 15e-6 * outputs for inputs, outputs in found.served)
    assert 0.004 < billed_usd <= 0.005
    assert json.loads(done.out)["finished"] < REQUESTS


def test_a_budget_that_does_not_last_for_the_probes_is_refused(run: Run) -> None:
    with gateway() as found:
        line = refusal(run(found.url, "--max-usd", "0.00001", "--usd-per-million", "3,15"))
        assert "does not last for the requests before the traffic" in line and found.bodies == []
        line = refusal(run(found.url, "--max-requests", "1"))
        assert "does not last for one request of the traffic (1 of at most 1 requests" in line
        assert len(found.bodies) == 1


def words_only(path: str, body: dict[str, Any]) -> bool:
    """A hosted API: no token ids, no parameters but OpenAI's."""
    known = {"model", "stream", "max_tokens", "prompt", "messages", "temperature", "stream_options", "user"}
    plain = (body.get("stream_options") or {}).keys() <= {"include_usage"}
    return not isinstance(body.get("prompt", ""), str) or not body.keys() <= known or not plain


@pytest.mark.parametrize("is_chat", [False, True])
def test_text_is_as_long_as_the_traffic_has_it(run: Run, is_chat: bool) -> None:
    """The gateway counts 1.5 tokens for a word and 9 for its template, and ends answers after 7 tokens: each
    prompt is within a word of the traffic's length where that has more than the template, and the prediction
    is for what came."""

    def refuses(path: str, body: dict[str, Any]) -> bool:
        return words_only(path, body) or (is_chat and "/chat/" not in path)

    with gateway(refuses=refuses, tokens_per_word=1.5, added_tokens=9, most_output_tokens=7) as found:
        done = run(found.url, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    about = told["endpoint"]
    assert about["path"] == ("/chat/completions" if is_chat else "/completions")
    assert about["prompts"] == "text" and not about["fixes_length"]
    assert about["tokens_per_word"] == pytest.approx(1.5) and about["added_tokens"] == pytest.approx(9)
    assert told["finished"] == REQUESTS
    assert about["lengths"]["output_tokens"] == sum(outputs for _, outputs in found.served[-REQUESTS:])
    assert about["lengths"]["output_tokens"] < about["lengths"]["asked_output_tokens"]
    lines = [line.split(",") for line in Path("out/requests.csv").read_text().splitlines()]
    measured = [int(line[lines[0].index("input_tokens")]) for line in lines[1:]]
    traffic = [int(line.split(",")[1]) for line in Path("trace.csv").read_text().splitlines()[1:]]
    assert all(abs(a - b) <= 1.5 for a, b in zip(measured, traffic, strict=True) if b >= 11)
    assert max(measured[k] for k in range(REQUESTS) if traffic[k] < 11) <= 11


def test_an_endpoint_that_counts_nothing_is_measured_and_said_to(run: Run) -> None:
    with gateway(says_usage=False) as found:
        done = run(found.url, "--json")
    told = json.loads(done.out)
    assert told["finished"] == REQUESTS
    assert any("does not say how many tokens" in note for note in told["notes"])


def test_an_interrupt_is_one_line_and_nothing_is_sent_after_it(run: Run, folder: Path) -> None:
    """Its requests come over two seconds: a busy machine falls behind less than that. Once its threads have
    ended, nothing of it is left that could send.
    """
    trace = pd.read_csv(folder / "trace.csv")
    trace.assign(arrival_s=8 * trace.arrival_s).to_csv(folder / "trace.csv", index=False)

    def interrupt(number: int, _: dict[str, Any]) -> str:
        if number == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return "hangs" if number >= 12 else "well"

    with gateway(behaviour=interrupt) as found:
        before = set(threading.enumerate())
        line = refusal(run(found.url))
        for thread in set(threading.enumerate()) - before:
            thread.join(BOUNDED_S)
            assert not thread.is_alive()
        assert not multiprocessing.active_children()
    assert len(found.bodies) < REQUESTS
    assert "interrupted" in line and "the same command goes on" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-usd", "1"), "--max-usd: what tokens cost is not known; give --usd-per-million"),
        (("--usd-per-million", "1"), "--usd-per-million: expected INPUT,OUTPUT such as 0.15,0.6, found '1'"),
        (("--max-requests", "0"), "--max-requests: must be at least 1, found 0"),
        (("--timeout", "nan"), "--timeout: must be at least 0.1, found nan"),
        (("--max-failed", "2"), "--max-failed: must be from 0 to 1, found 2.0"),
        (("--api-key-env", "NOT_THERE_AT_ALL"), "no environment variable 'NOT_THERE_AT_ALL'"),
        (("--engine", "rehearsal"), "--engine rehearsal: --url measures engines that run already"),
        (("--url", "ftp://x"), "--url: expected an address such as https://host/v1, found 'ftp://x'"),
        (("--url", "https://me:pw-123@x"), "a name or password in an address ends up in logs"),
        (("--url", "https://x/v1?key=pw-123"), "without ? and #, found 'https://x/v1'"),
        (("--prometheus", "localhost:9090"), "--prometheus: expected an address"),
    ],
)
def test_options_that_make_no_sense_are_refused(run: Run, options: tuple[str, ...], said: str) -> None:
    outcome = run("http://127.0.0.1:9", *options)
    assert said in refusal(outcome) and "pw-123" not in outcome.err


def test_what_is_for_endpoints_needs_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    asked = ["plan", "validate", "fleet.yaml", "--trace", "trace.csv", "-o", "out", "--max-requests", "5"]
    monkeypatch.setattr(sys, "argv", asked)
    with pytest.raises(SystemExit):
        cli.main()
    assert "max_requests: is about an endpoint; name it with url (--url)" in capsys.readouterr().err


def test_nobody_listens_is_one_line(run: Run) -> None:
    assert "Cannot connect to host 127.0.0.1:9" in refusal(run("http://127.0.0.1:9"))
