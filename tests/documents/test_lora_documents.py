"""`lora:` of slo.yaml, fleet.yaml and plan.yaml."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import CATALOG

from planner.documents.fleet_file import fleet_document, fleet_of
from planner.documents.lora_settings import lora_document, parse_lora
from planner.documents.task import parse_task
from planner.errors import InputError
from planner.fleet import Fleet
from planner.models.lora import Lora
from planner.models.spread import Factor, StepTimeSpread
from planner.search.problem.options import EngineChoices, worker_types

NAME = "meta-llama/Llama-3.1-8B"
ASKED: dict[str, Any] = {"max_loras": 4, "max_rank": 16, "adapters": 50}


def fleet(lora: object, **worker: Any) -> Fleet:
    document = {"llm": NAME, "workers": [{"gpu": "h100-80g", **worker}], "lora": lora}
    return fleet_of(document, Path("fleet.yaml"), CATALOG)


def test_what_is_said_is_read() -> None:
    assert parse_lora(None, "lora") is None and parse_lora("none", "lora") is None
    assert parse_lora(ASKED, "lora") == Lora(4, 16, 50, 50)
    assert parse_lora(ASKED | {"adapters": 2}, "lora") == Lora(4, 16, 2, 4)  # vLLM wants as many as slots
    full = ASKED | {
        "adapters": ["sales", "support"],
        "max_cpu_loras": 9,
        "targets": ["qkv_proj", "o_proj"],
        "link": "50 GB/s",
        "disk": "2 GB/s",
    }
    found = parse_lora(full, "lora")
    assert found == Lora(4, 16, ("sales", "support"), 9, ("qkv_proj", "o_proj"), 50e9, 2e9)
    assert parse_lora(lora_document(found), "lora") == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_rank": 10}, "max_rank is 10, must be one of 1, 8, 16, 32"),
        ({"max_loras": 0}, "max_loras: .*>= 1, found 0"),
        ({"max_cpu_loras": 3}, "max_cpu_loras is 3, must be at least max_loras \\(4\\)"),
        ({"adapters": []}, "adapters: expected a number, or a list of names"),
        ({"adapters": ["a", "a"]}, "adapters: 'a' is given twice"),
        ({"targets": ["q_proj"]}, "targets: expected all, or a list of qkv_proj"),
        ({"rank": 8}, "rank"),
        ({"link": 20}, "link"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        parse_lora(ASKED | changes, "slo.yaml: lora")
    assert "\n" not in str(error.value) and str(error.value).startswith("slo.yaml: lora")


def test_a_fleet_is_written_and_read_back() -> None:
    found = fleet(ASKED | {"adapters": ["a", "b"]})
    again = fleet_of(fleet_document(found), Path("plan.yaml"), CATALOG)
    assert again == found and again.lora == found.lora
    assert found.pools[0].type.kv_tokens < fleet(None).pools[0].type.kv_tokens
    assert "lora" not in fleet_document(fleet(None))
    assert fleet(ASKED, kv_tokens=1600).pools[0].type.kv_tokens == 1600


def test_workers_that_may_be_chosen_have_slots() -> None:
    """And take as much longer as the rest where step times are (robust)."""
    document = {"llm": NAME, "slo": {"ttft": {"p90": "2 s"}}, "fleet": {"gpus": ["h100-80g"]}, "lora": ASKED}
    task = parse_task(document | {"robust": {"step_times": "10 %"}}, CATALOG)
    plain, _ = worker_types(CATALOG.llm(NAME), [CATALOG.gpu("h100-80g")], CATALOG, 100)
    types, _ = worker_types(
        CATALOG.llm(NAME), [CATALOG.gpu("h100-80g")], CATALOG, 100, EngineChoices.of(task)
    )
    assert {worker.lora and worker.lora.lora.longer_frac for worker in types} == {0.1}
    fewer = [a.kv_tokens - b.kv_tokens for a, b in zip(plain, types, strict=True)]
    assert min(fewer) > 0


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        ({"name": "vllm", "speculative": {"method": "ngram", "tokens": 2, "acceptance": 0.5}}, {}),
        ({"name": "sglang", "latent_launch": "0.1 ms"}, {}),
        ("vllm", {"lora": ASKED}),
    ],
)
def test_longer_steps_of_headroom_are_those_of_robust(engine: Any, changes: dict[str, Any]) -> None:
    """The GPUs' time, the host's, and that of drafts and adapters: all that a step takes."""
    if isinstance(engine, dict) and "speculative" in engine:
        engine["speculative"]["draft_step"] = "1 ms"
    document = {
        "llm": NAME,
        "slo": {"ttft": {"p90": "2 s"}},
        "fleet": {"gpus": ["h100-80g"]},
        "engine": engine,
    }
    types = [
        worker_types(
            CATALOG.llm(NAME),
            [CATALOG.gpu("h100-80g")],
            CATALOG,
            100,
            EngineChoices.of(parse_task(each, CATALOG)),
        )[0]
        for each in (document | changes, document | changes | {"robust": {"step_times": "10 %"}})
    ]
    for plain, robust in zip(*types, strict=True):
        longer = plain.with_longer_steps(0.1)
        assert replace(robust, latency=replace(robust.latency, basis=longer.latency.basis)) == longer
        assert robust.host[0].step_s > plain.host[0].step_s


def test_adapters_take_as_much_longer_as_decodes_at_the_end_of_their_spread() -> None:
    """exp(2 x 0.2) times as long two standard deviations above; a plan.yaml with them is read back."""
    spread = StepTimeSpread(Factor(1.1, 0.1), Factor(1.2, 0.2), "made up")
    found = fleet(ASKED)
    found = found.with_types(lambda each: replace(each, latency=replace(each.latency, spread=spread)))
    late = found.with_step_spread(0.0, 2.0)
    plain, slow = (each.pools[0].type.lora for each in (found, late))
    assert plain is not None and slow is not None
    assert slow.cost.kernels_s == pytest.approx(math.exp(0.4) * plain.cost.kernels_s)
    assert found.with_step_spread(2.0, 0.0).lora == found.lora
    again = fleet_of(fleet_document(late), Path("plan.yaml"), CATALOG)
    assert again.pools[0].type.lora == slow


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fleet": {"pp": [1, 2]}}, "lora: is not simulated in pipelines"),
        (
            {"fleet": {"dp": [1, 2]}, "llm": "openai/gpt-oss-120b"},
            r"lora: is not simulated with data-parallel ranks \(fleet: dp\); drop one of the two",
        ),
        (
            {"engine": {"speculative": {"method": "ngram", "tokens": 2, "acceptance": 0.5}}},
            "lora: is not simulated with engine: speculative",
        ),
    ],
)
def test_what_is_not_simulated_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_task({"llm": NAME, "slo": {"ttft": {"p90": "2 s"}}, "lora": ASKED} | changes, CATALOG)


def test_ranks_with_adapters_are_refused_in_one_line() -> None:
    document = {
        "llm": "openai/gpt-oss-120b",
        "workers": [{"gpu": "h100-80g", "tp": 2, "dp": 2}],
        "lora": ASKED | {"targets": ["qkv_proj"]},
    }
    with pytest.raises(InputError, match="dp: ranks are not simulated with lora; drop one") as refusal:
        fleet_of(document, Path("fleet.yaml"), CATALOG)
    assert "\n" not in str(refusal.value)
    alone = fleet_of({**document, "lora": "none"}, Path("fleet.yaml"), CATALOG)
    assert (alone.pools[0].type.dp, alone.lora) == (2, None)
