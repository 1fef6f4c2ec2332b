"""Tokens of images: from a trace's column to the KV cache, steps, answers and back into a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hand_made import GPU, LATENCY
from plans import CATALOG
from questions import question, traffic

from benchmarks.generated_traffic import merged
from planner.errors import InputError
from planner.fleet import Fleet, Pool, WorkerType
from planner.models.llm import Llm
from planner.reports.fact_sentences import fact_sentences_of
from planner.reports.output import requests_csv
from planner.search.evidence.findings import image_warnings
from planner.search.problem.build_problem import build_problem
from planner.simulator.replay import simulate
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace
from planner.traffic.trace_writing import to_jsonl

SEEING = replace(CATALOG.llm("meta-llama/Llama-3.1-8B"), encoder_parameters=3e8)
BLIND = replace(SEEING, encoder_parameters=0.0)


def fleet(llm: Llm = SEEING) -> Fleet:
    worker = WorkerType(GPU, 1, LATENCY, kv_tokens=16 * 100, max_num_batched_tokens=512, max_num_seqs=8)
    return Fleet(llm, (Pool("mixed", "mixed", worker, 1),))


def trace(image_tokens: list[int]) -> Trace:
    n = len(image_tokens)
    told = np.array(image_tokens)
    return Trace("t", np.linspace(0.0, 10.0 * n, n), np.full(n, 100) + told, np.full(n, 3), image_tokens=told)


def columns(of: Trace) -> list[int]:
    assert of.image_tokens is not None
    return [int(tokens) for tokens in of.image_tokens]


def test_images_cost_what_as_much_text_costs() -> None:
    """f(400) = 40 ms from step_times by hand; a prompt of 100 of text and 300 of images is one of 400."""
    seen = simulate(fleet(), trace([0, 300]))
    text = simulate(fleet(BLIND), Trace("t", np.array([0.0, 10.0]), np.array([100, 400]), np.array([3, 3])))
    assert seen.ttft_s.tolist() == text.ttft_s.tolist()
    assert seen.ttft_s[1] == pytest.approx(0.040, rel=0.02)
    assert seen.ttft_s[0] == pytest.approx(0.010, rel=0.02)


@pytest.mark.parametrize("ask", ["simulate", "plan"])
def test_an_llm_without_encoder_refuses_images(ask: str) -> None:
    with pytest.raises(InputError, match=r"image_tokens: 1 request with .* has no encoder"):
        if ask == "simulate":
            simulate(fleet(BLIND), trace([0, 300]))
        else:
            asked = traffic()
            told = np.zeros(len(asked), np.int64)
            told[3] = 1
            build_problem(question(), replace(asked, image_tokens=told), CATALOG)
    assert simulate(fleet(BLIND), trace([0, 0])).complete


def test_an_answer_says_what_it_takes_prompts_for() -> None:
    """600 tokens of images among 800; the mean image of 300 tokens takes 2 x 3e8 x 300 / 3e14 s = 0.6 ms."""
    said = fact_sentences_of(image_warnings(fleet(), replace(trace([0, 0]), image_tokens=None)))
    assert len(said) == 1 and "taken as text" in said[0]
    (told,) = fact_sentences_of(image_warnings(fleet(), trace([300, 300])))
    assert told.startswith("75 %") and "0.6 ms for 300 tokens on one g" in told
    assert not image_warnings(fleet(), trace([0, 0]))
    assert not image_warnings(fleet(BLIND), replace(trace([0]), image_tokens=None))


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_images_survive_a_file(tmp_path: Path, form: str) -> None:
    asked = trace([5, 0, 300])
    text = requests_csv(simulate(fleet(), asked)) if form == "csv" else to_jsonl(asked)
    (tmp_path / "t").write_text(text)
    again = read_trace(tmp_path / "t")
    assert again.image_tokens is not None
    assert again.image_tokens.tolist() == [5, 0, 300]
    assert again.input_tokens.tolist() == [105, 100, 400]
    assert columns(again.select([2])) == [300]


def test_tenants_and_adapters_stand_in_requests_csv(tmp_path: Path) -> None:
    """Without their column the adapters were drawn anew, and tenants were one."""
    asked = replace(trace([0, 0, 0]), tenant=np.array([1, 0, 1]), tenants=("a", 'b, "c"'), image_tokens=None)
    (tmp_path / "t").write_text(requests_csv(simulate(fleet(), asked)))
    again = read_trace(tmp_path / "t")
    assert [again.tenants[tenant] for tenant in again.tenant] == ['b, "c"', "a", 'b, "c"']
    run = replace(simulate(fleet(), asked), adapter=np.array([-1, 0, 1]), adapters=("x", "y"))
    (tmp_path / "t").write_text(requests_csv(run))
    named = read_trace(tmp_path / "t")
    assert named.adapter[0] == -1 and [named.adapters[adapter] for adapter in named.adapter[1:]] == ["x", "y"]


def test_who_does_not_say_has_none_beside_who_does() -> None:
    plain = replace(trace([0]), image_tokens=None)
    assert columns(merged({"a": trace([7]), "b": plain})) == [7, 0]
    assert merged({"a": plain, "b": plain}).image_tokens is None
