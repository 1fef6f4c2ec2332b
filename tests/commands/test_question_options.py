"""Options in place of slo.yaml: which GPUs are compared, how many there are; changes that multiply."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli import app
from planner.commands.described_command import errors_of_options, parse_stock, question_document
from planner.documents.catalog import read_catalog
from planner.documents.task import parse_task
from planner.errors import InputError
from planner.studies.what_if import change_question

ROOT = Path(__file__).parents[2]


def document_of(**given: str) -> dict[str, Any]:
    options = {"llm": "llama-3.1-8b", "rate": "2", "ttft-p95": "1s", **given}
    return question_document(options, has_trace=False)


def test_gpus_without_names_are_those_of_slo_yaml() -> None:
    """One question has one answer: whole nodes are compared on the command line as they are in a file."""
    assert "fleet" not in document_of(task="chat")


def test_traffic_without_lengths_is_said_by_its_option() -> None:
    with pytest.raises(InputError, match=r"--output: is missing.* --task chat"):
        document_of(input="300")


def test_agents_without_a_task_are_answered_in_options() -> None:
    """The message proposed `input: 300`, a key of slo.yaml, to who had written options; then --input alone,
    after which it asked for --output.
    """
    tokens = "tokens such as --input 300 --output 150; tasks: coding-agent"
    with pytest.raises(InputError, match=f"^--input: is missing; give --task NAME, or {tokens}$"):
        with errors_of_options():
            question = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "1 s"}}, "traffic": {"agents": 30}}
            parse_task(question, read_catalog())


def test_gpus_that_name_none_are_refused() -> None:
    """A comma alone was taken as any GPU."""
    with pytest.raises(InputError, match=r"--gpus ',': names no GPU"):
        parse_stock(",")


@pytest.mark.parametrize("text", ["any:4", "any,h100", "h100:2,any:2"])
def test_any_gpu_takes_no_number(text: str) -> None:
    with pytest.raises(InputError, match="any stands alone, without a number") as error:
        parse_stock(text)
    assert len(str(error.value)) < 200


def test_a_file_in_place_of_a_command_is_said_to_be_one() -> None:
    for name, option in (("slo.yaml", "--slo"), ("trace.csv", "--trace")):
        result = CliRunner().invoke(app, [name])
        assert result.exit_code == 2
        assert f"did you mean: plan {option} {name}" in " ".join(result.output.replace("│", " ").split())


def test_gpus_have_counts_or_not() -> None:
    assert parse_stock("h100:16, l40s:8") == {"h100": 16, "l40s": 8}
    assert parse_stock("h100,h100-80g@350W") == ["h100", "h100-80g@350W"]
    assert parse_stock(" Any ") == []
    with pytest.raises(InputError, match="for every GPU"):
        parse_stock("h100:16,l40s")
    with pytest.raises(InputError, match="'x' is no number of GPUs; write h100:16"):
        parse_stock("h100:x")
    with pytest.raises(InputError, match=r"'9{50,}\.\.\. is no number of GPUs; write h100:16"):
        parse_stock(f"h100:{'9' * 5000}")  # Python reads no int of so many digits.
    with pytest.raises(InputError, match="h100 is given twice; give the sum"):
        parse_stock("h100:16,h100:4")
    for text in ("4xH100", "h100x4", "4 x h100"):
        with pytest.raises(InputError, match="write h100:4 for"):
            parse_stock(text)
    assert parse_stock("rtx4090") == ["rtx4090"]


@pytest.mark.parametrize("change", ["traffic.rate=x2", "traffic.rate x 2", "traffic.rate = * 2"])
def test_a_change_may_multiply(change: str) -> None:
    assert change_question({"traffic": {"rate": 3}}, change) == {"traffic": {"rate": 6.0}}


@pytest.mark.parametrize(
    ("slo", "change", "changed"),
    [
        ({"ttft": {"p90": "400 ms"}}, "slo.ttft.p90=x2", {"ttft": {"p90": "800 ms"}}),
        ({"ttft_p90": "2 s"}, "slo.ttft.p90=x1.5", {"ttft_p90": "3 s"}),
        ({"ttft_p90": "2 s"}, "slo.ttft.p90=1 s", {"ttft_p90": "1 s"}),
        ({"ttft_p99.9": "0.2s"}, "slo.ttft.p99.9 x 10", {"ttft_p99.9": "2 s"}),
        ({"ttft_p90": "2 s", "tbt_p99": "1 s"}, "slo.ttft.p90=", {"tbt_p99": "1 s"}),
    ],
)
def test_a_limit_is_changed_as_it_is_written(slo: Any, change: str, changed: Any) -> None:
    """Both ways to write a line of the SLO are read by the same path, with their units."""
    assert change_question({"slo": slo}, change) == {"slo": changed}


def test_a_factor_needs_a_number() -> None:
    with pytest.raises(
        InputError, match=r"multiplies a number, but traffic.rate is not there; its traffic has"
    ):
        change_question({}, "traffic.rate x 2")
    with pytest.raises(InputError, match="but llm is 'a'"):
        change_question({"llm": "a"}, "llm=x2")


def test_agents_ask_a_question_that_can_be_read() -> None:
    """The routing was written as its number: every `plan --agents` ended in an error."""
    llm = "Qwen/Qwen3-30B-A3B-Instruct-2507"
    options = {"llm": llm, "task": "coding-agent", "gpus": "h100", "agents": "20", "ttft-p95": "5s"}
    question = parse_task(question_document(options, has_trace=False), read_catalog())
    assert [choice.routing for choice in question.policy_choices()] == ["cache-aware"]


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("gpus", "fleet: gpus"),
        ("prices", "fleet: prices"),
        ("rate", "traffic: rate"),
        ("ttft", "slo: ttft"),
        ("model", "llm"),
        ("budget", "limits: cost"),
        ("gpu", "fleet: gpus"),
        ("autoscaling", "day: controllers, for plan day"),
        ("fleets", "fleet"),
    ],
)
def test_a_key_at_the_top_is_told_where_it_belongs(key: str, place: str) -> None:
    document = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p95": "1 s"}}, key: 3}
    with pytest.raises(InputError, match=f"unknown key '{key}'; did you mean '{place}'"):
        parse_task(document, read_catalog())


def test_another_word_for_a_metric_is_understood() -> None:
    with pytest.raises(InputError, match="unknown key 'itl'; did you mean 'tbt'"):
        parse_task({"llm": "llama-3.1-8b", "slo": {"itl": {"p95": "1 s"}}}, read_catalog())


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("traffic", "rps", "rate"),
        ("traffic", "output_tokens", "output"),
        ("traffic", "concurrency", "agents: NUMBER"),
        ("traffic", "users", "rate: requests/s of all of them"),
        ("fleet", "tp", "tp of a worker in fleet.yaml"),
        ("limits", "budget", "cost"),
        ("slo", "throughput", "objective: throughput, the most traffic that keeps the SLO"),
    ],
)
def test_another_word_for_a_key_is_understood(section: str, key: str, meant: str) -> None:
    """ "Did you mean 'draws'?" was said of `traffic: rps`, 'pp' of `fleet: tp`, and nothing of the others."""
    document = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p95": "1 s"}}, section: {key: 3}}
    with pytest.raises(InputError, match=f"{section}: unknown key '{key}'; did you mean '{meant}"):
        parse_task(document, read_catalog())


def test_a_price_among_the_stock_is_told_its_place() -> None:
    """The answer was "expected a whole number >= 0, found {'count': 16, ...}"."""
    gpus = {"h100": {"count": 16, "price": "2 usd/h"}}
    document = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p95": "1 s"}}, "fleet": {"gpus": gpus}}
    with pytest.raises(
        InputError, match=r"under fleet: owned: \{h100: 8\}, a price under fleet: prices: \{h100: 2 usd/h\}"
    ):
        parse_task(document, read_catalog())


def test_another_word_for_a_command_is_understood() -> None:
    for word, meant in (
        ("deploy", "manifests"),
        ("plan", "--slo slo.yaml"),
        ("describe", "trace FILE --desc"),
    ):
        result = CliRunner().invoke(app, [word])
        said = " ".join(result.output.replace("│", " ").split())
        assert result.exit_code == 2 and f"did you mean: plan {meant}" in said


def test_a_folder_that_manifests_serve_is_warned_of() -> None:
    """`vllm serve tiny-llm` in a pod would look for a path, or a model, that is not there."""
    slo = {"slo": {"ttft": {"p95": "1 s"}}}
    folder = str(ROOT / "examples" / "tiny-llm")
    (doubt,) = parse_task({"llm": folder, **slo}, read_catalog()).warnings
    assert f"manifests serve {folder}" in doubt
    assert not parse_task({"llm": "llama-3.1-8b", **slo}, read_catalog()).warnings


@pytest.mark.parametrize(
    ("key", "place"), [("spot", "prices: {GPU"), ("power", "limits: power"), ("stock", "gpus: {GPU")]
)
def test_keys_that_newcomers_write_under_fleet_are_answered_by_ours(key: str, place: str) -> None:
    with pytest.raises(InputError, match=f"fleet: unknown key '{key}'; did you mean '{place}"):
        parse_task(
            {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "1 s"}}, "fleet": {key: 1}}, read_catalog()
        )


def test_adapters_under_traffic_are_answered_by_the_section_of_lora() -> None:
    """ "did you mean 'rate'?" was the answer."""
    with pytest.raises(InputError, match=r"traffic: unknown key 'adapters'; did you mean 'lora: {max_loras"):
        parse_task(
            {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "1 s"}}, "traffic": {"adapters": 20}},
            read_catalog(),
        )
