"""Questions that could be meant otherwise: refused in one line, or a doubt that every answer says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from plans import CATALOG
from simulations import make_trace

from planner.documents.catalog import UNCHECKED_BY_DEFAULT, read_catalog
from planner.documents.llm_config import llm_from_config
from planner.documents.question_warnings import (
    deadline_warnings,
    gap_warnings,
    llm_warnings,
    percentile_warnings,
)
from planner.documents.slo import parse_slo
from planner.documents.task import parse_task
from planner.domain import Limit
from planner.errors import CatalogError, InputError
from planner.files.checked_files import read_yaml, repository_dir
from planner.files.jsontext import parse_json

QUESTION: dict[str, Any] = {
    "llm": "llama-3.1-8b",
    "slo": {"ttft": {"p90": "2 s"}},
    "fleet": {"gpus": {"h100-80g": 6}},
}


def warnings(*, slo: Any = None, **fleet: Any) -> tuple[str, ...]:
    document = QUESTION | {"slo": slo or QUESTION["slo"], "fleet": QUESTION["fleet"] | fleet}
    return parse_task(document, CATALOG).warnings


@pytest.mark.parametrize("gpus", ["any", "ANY", ["any"]])
def test_any_gpu_is_every_gpu_as_on_the_command_line(gpus: Any) -> None:
    task = parse_task(QUESTION | {"fleet": {"gpus": gpus}}, CATALOG)
    assert task == parse_task(QUESTION | {"fleet": {}}, CATALOG) and task.considers_all_gpus


@pytest.mark.parametrize("gpus", [{"any": 4}, ["any", "h100-80g"], {"h100-80g": 2, "Any": None}])
def test_any_gpu_has_no_number_and_stands_alone(gpus: Any) -> None:
    with pytest.raises(InputError, match=r"fleet: gpus: any stands alone, without a number.*limits") as error:
        parse_task(QUESTION | {"fleet": {"gpus": gpus}}, CATALOG)
    assert len(str(error.value)) < 250


def test_a_plain_question_is_not_doubted() -> None:
    assert warnings() == warnings(owned={"h100-80g": 2}, prices={"h100-80g": 2.5}) == ()
    assert warnings(prices={"h100-80g": 12.29}) == ()  # On demand at a hyperscaler, four times a GPU cloud's.
    # The spot price of capped GPUs is not that of their nodes, which uncapped ones may share.
    spot = {"spot": "1 usd/h", "spot_interruptions_per_h": 0.05}
    assert warnings(gpus={"h100-80g@450W": 8}, prices={"h100-80g@450W": spot}) == ()


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"slo": {"ttft": {"p100": "2 s"}}}, "TTFT p100 is the slowest of all requests"),
        ({"slo": {"ttft": {"p50": "3 s", "p90": "2 s"}}}, "TTFT p50 <= 3.00 s says nothing beside TTFT p90"),
        ({"prices": {"h100-80g": 0}}, "h100-80g costs 0 USD/h"),
        (
            {"prices": {"h100-80g": "23.92 usd/h"}},
            r"h100-80g costs 23\.92.* a node of 8 .* write 2\.99 usd/h",
        ),
        (
            {
                "gpus": {"h100-80g": 8},
                "prices": {
                    "h100-80g": {"on_demand": 3, "spot": "23.92 usd/h", "spot_interruptions_per_h": 0.05}
                },
            },
            r"h100-80g costs 23\.92.* a node of 8 .* write 2\.99 usd/h",
        ),
        ({"prices": {"a100-80g": 1}}, "a100-80g is not among gpus .* its price changes nothing"),
        ({"owned": {"a100-80g": 8}}, "a100-80g is not among gpus .* the 8 that you own may be used"),
        (
            {"gpus": {"h100-80g": 8, "h100-80g@450W": 8}, "prices": {"h100-80g@450W": 2}},
            "450W costs 2 USD/h and h100-80g 2.99.* pays the higher price for all .*sold_as: {h100-80g: gpu}",
        ),
        ({"sold_as": {"h100-80g": "node"}}, "no whole number of nodes of 8.* none of those 6 can be rented"),
    ],
)
def test_what_may_be_meant_otherwise_is_said(said: dict[str, Any], meant: str) -> None:
    (found,) = warnings(**said)
    assert re.search(meant, found), found


def test_adapters_without_room_in_a_step_are_said_to_wait() -> None:
    """3 adapters on 2 slots took 52.80 USD/h and on 3 slots 16.00: nothing said that the slots do it."""
    lora = {"max_rank": 16, "adapters": 3}
    (said,) = parse_task(QUESTION | {"lora": lora | {"max_loras": 2}}, CATALOG).warnings
    assert "2 of 3 adapters" in said and "lora.max_loras=3" in said
    assert not parse_task(QUESTION | {"lora": lora | {"max_loras": 3}}, CATALOG).warnings


@pytest.mark.parametrize(
    ("slo", "doubted"),
    [
        ({"ttft": {"p99.9": "2 s"}}, "TTFT p99.9 of 199 requests is the slowest of them.* takes 1,000 "),
        ({"tbt": {"p99.999": "1 s"}}, "TBT p99.999 of 1,791 gaps is the slowest of them.* 100,000 gaps"),
        ({"tpot": {"p99.7": "1 s"}}, "TPOT p99.7 of 199 requests is the slowest of them.* takes 334 "),
        ({"ttft": {"p90": "2 s"}, "attainment": 0.999}, "attainment of 199 requests .* takes 1,000 "),
        ({"ttft": {"p99": "2 s"}, "tbt": {"p99.9": "1 s"}, "tpot": {"p99": "1 s"}}, ""),
        (
            {"classes": {"short": {"match": {"input_tokens": {"to": 4}}, "ttft": {"p90": "2 s"}}}},
            "short TTFT p90 of 4 ",
        ),
    ],
)
def test_a_percentile_that_the_traffic_cannot_tell_is_doubted(slo: Any, doubted: str) -> None:
    """199 requests of 10 tokens have 1,791 gaps; one in 200 may be late of 200 requests or more."""
    tokens = np.arange(1, 200)
    traffic = make_trace(tokens / 1.0, tokens, np.full(199, 10))
    warnings = tuple(percentile_warnings(parse_task(QUESTION | {"slo": slo}, CATALOG).slo, traffic))
    assert [bool(re.search(doubted, each)) for each in warnings] == ([True] if doubted else []), warnings


def test_a_line_of_which_the_traffic_has_no_value_is_doubted() -> None:
    """Answers of one token have no gaps."""
    traffic = make_trace(np.arange(30.0), np.full(30, 9), np.full(30, 1))
    slo = parse_task(QUESTION | {"slo": {"ttft": {"p90": "2 s"}, "tbt": {"p90": "1 s"}}}, CATALOG).slo
    assert [*percentile_warnings(slo, traffic)] == [
        "slo: TBT p90: the traffic has none of its gaps, so any fleet keeps it"
    ]


def test_a_deadline_that_short_traffic_cannot_use_is_said() -> None:
    """An hour of traffic lets its last requests wait a tenth, 6 min, of 30 min, and all of 5 min."""
    traffic = make_trace(np.arange(0.0, 3601.0, 60.0), np.full(61, 9), np.full(61, 3))
    for deadline, doubted in (("30 min", 1), ("5 min", 0)):
        classes: dict[str, Any] = {"batch": {"deadline": deadline}, "chat": {"ttft": {"p90": "2 s"}}}
        each = {name: {"match": {"tenant": name}} | limits for name, limits in classes.items()}
        slo = parse_task(QUESTION | {"slo": {"classes": each}}, CATALOG).slo
        said = [*deadline_warnings(slo, traffic)]
        assert len(said) == doubted
        assert not said or re.search(
            r"may wait about 6.0\d? min of it.*a trace of 5.0\d? h uses it", said[0]
        ), said


def test_a_minute_of_a_deadline_is_not_called_a_tenth_of_short_traffic() -> None:
    """A tenth of 100 s is 10 s, but requests may always wait for a minute (`Slo.patience_of`)."""
    traffic = make_trace(np.arange(0.0, 101.0, 10.0), np.full(11, 9), np.full(11, 3))
    slo = parse_slo(
        {"classes": {"all": {"match": {"input_tokens": {"from": 0}}, "deadline": "1 h"}}}, where="slo"
    )
    (said,) = deadline_warnings(slo, traffic)
    assert "about 60.00 s of it, the longer of a tenth of the traffic and 60 s" in said


@pytest.mark.parametrize(("seconds", "is_doubted"), [(1.0, True), (60.0, False)])
def test_gaps_that_come_after_the_traffic_are_not_kept_in_silence(seconds: float, is_doubted: bool) -> None:
    """Answers of 4 s: of two requests within a second no gap was judged, and 1 ms was called kept."""
    traffic = make_trace(np.linspace(0.0, seconds, 21), np.full(21, 9), np.full(21, 200))
    slo = parse_task(QUESTION | {"slo": {"tbt": {"p99": "1 ms"}, "ttft": {"p90": "1 s"}}}, CATALOG).slo
    assert [("TBT p99: gaps are judged while" in each) for each in gap_warnings(slo, traffic)] == (
        [True] if is_doubted else []
    )


def test_gaps_of_one_class_are_not_doubted_for_those_of_another() -> None:
    """Short prompts have answers of 4 s over a minute, the last and long one has most gaps of all."""
    traffic = make_trace(
        np.linspace(0.0, 60.0, 21), np.r_[np.full(20, 9), 900], np.r_[np.full(20, 200), 9_000]
    )
    for match, doubted in (({"to": 10}, 0), ({"from": 11}, 1)):
        each = {"one": {"match": {"input_tokens": match}, "tbt": {"p99": "1 ms"}}}
        assert len([*gap_warnings(parse_slo({"classes": each}, where="slo"), traffic)]) == doubted


def test_requests_to_several_llms_are_not_one_in_silence() -> None:
    """Unless they are classes of the SLO, which say so."""
    trace = replace(
        make_trace([0.0, 1.0, 2.0], [9, 9, 9], [3, 3, 3]), llm=np.array([0, 0, 1]), llms=("small", "large")
    )
    (said,) = llm_warnings(parse_task(QUESTION, CATALOG).slo, trace)
    assert "requests to 2 LLMs taken as one: 'small' 66.7 %, 'large' 33.3 %" in said
    assert "give each an entry under llms: in slo.yaml, with its name as model, such as model: small" in said
    each = {name: {"match": {"model": name}, "ttft": {"p90": "2 s"}} for name in trace.llms}
    assert not [*llm_warnings(parse_task(QUESTION | {"slo": {"classes": each}}, CATALOG).slo, trace)]


def test_a_percentile_that_lets_most_be_late_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"'p9' lets 91 % of the requests be late; expected p50 .* such as p90"
    ):
        warnings(slo={"ttft": {"p9": "2 s"}})
    with pytest.raises(InputError, match=r"'p0.9' is kept where 0.9 % .* write p90 for 90 %"):
        warnings(slo={"ttft": {"p0.9": "2 s"}})
    with pytest.raises(InputError, match=r"'p0.3' lets 99.7 % .* expected p50 or more"):
        warnings(slo={"ttft": {"p0.3": "2 s"}})  # p30, which would be refused too, is not advised.


@pytest.mark.parametrize(
    "tag", ["!!set {a, b}", "!!binary aGk=", "!!omap [a: 1]", "!own 3", "{1: a, 0x1: b}"]
)
def test_yaml_of_no_plain_kind_is_refused(tmp_path: Path, tag: str) -> None:
    (tmp_path / "a.yaml").write_text(f"a: {tag}\n")
    with pytest.raises(InputError, match=r"a.yaml, line 1: is not valid YAML .(expected a mapping|the key)"):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        (f'{{"a": {"9" * 500}}}', "has 500 digits"),
        ('{"a": ["\\ud800"]}', "half a character"),
        ('{"a": NaN}', "NaN is no number"),
        ("[" * 100_000, "nested too deep|Expecting value"),
    ],
)
def test_json_that_others_read_differently_is_refused(text: str, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        parse_json(text)
    assert parse_json('{"a": "\\ud83d\\ude00", "b": 1}') == {"a": "\U0001f600", "b": 1}


def test_a_key_twice_in_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 32, "num_hidden_layers": 16}')
    with pytest.raises(CatalogError, match="'num_hidden_layers' is given twice"):
        llm_from_config(tmp_path)


def test_a_row_that_does_not_say_it_is_unchecked(tmp_path: Path) -> None:
    rows = yaml.safe_load((repository_dir("catalogs") / "gpus.yaml").read_text())
    row = {key: value for key, value in rows["h200-141g"].items() if key != "unchecked"}
    both = {"a": row | {"aliases": []}, "b": row | {"aliases": [], "unchecked": False}}
    (tmp_path / "gpus.yaml").write_text(yaml.safe_dump(both))
    gpus = read_catalog(tmp_path).gpus
    assert (gpus["a"].unchecked, gpus["b"].unchecked) == (UNCHECKED_BY_DEFAULT, "")


def test_an_estimated_gpu_with_a_remembered_price_is_not_bought_unasked() -> None:
    """Nobody measured Llama 8B on H100 NVL, whose price is in no list; who prices it asks for it."""
    plain = {key: value for key, value in QUESTION.items() if key != "fleet"}
    any_gpu = parse_task(plain, CATALOG)
    assert "h100-nvl-94g" in any_gpu.unchecked_left_out and "h100-nvl-94g" not in any_gpu.stock
    priced = parse_task(plain | {"fleet": {"prices": {"h100-nvl": 2.8}}}, CATALOG)
    assert "h100-nvl-94g" in priced.stock
    assert "h100-80g" in any_gpu.stock


def test_a_metric_without_a_row_is_refused() -> None:
    """Before, it was counted as requests, as E2E is."""
    with pytest.raises(InputError, match="joules: is no metric; must be one of ttft, tbt, tpot, e2e"):
        Limit("joules", 0.9, 1.0)
