"""Plans that count on CPU memory behind prefix caches: certified, and the same when simulated again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from plans import CATALOG

from planner.documents.fleet_file import read_fleet
from planner.documents.task import PlanQuestion, parse_task
from planner.models.kv_offload import KvOffload
from planner.reports.fact_sentences import fact_sentences_of
from planner.reports.output import render
from planner.search.evidence.certify import plan
from planner.search.problem.options import EngineChoices, worker_types
from planner.search.problem.reasons import reason_text
from planner.simulator.replay import simulate
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

OFFLOAD = {"size": "200 GB", "bandwidth": "25 GB/s"}
BLOCKS = 16  # of 256 tokens in a document


def documents(requests: int = 600, rate_rps: float = 7.0) -> Trace:
    """Questions about 80 documents of 4096 tokens: twice what the KV cache of an L40S holds."""
    rng = np.random.default_rng(0)
    about = rng.integers(80, size=requests)
    return Trace(
        name="documents",
        arrival_s=np.cumsum(rng.exponential(1 / rate_rps, requests)),
        input_tokens=np.full(requests, 256 * BLOCKS + 60),
        output_tokens=rng.integers(5, 40, requests),
        prefix_offsets=BLOCKS * np.arange(requests + 1),
        prefix_ids=(1000 * about[:, None] + np.arange(BLOCKS)).ravel(),
        prefix_block_tokens=256,
    )


def question(**policies: object) -> PlanQuestion:
    return parse_task(
        {
            "safety": "none",
            "llm": "meta-llama/Llama-3.1-8B",
            "slo": {"ttft": {"p90": "8 s"}, "tbt": {"p99": "250 ms"}},
            "fleet": {"gpus": ["l40s-48g"], "max_num_batched_tokens": [2048]},
            "policies": {"prefix_cache": True, "routing": ["jsq"], **policies},
        },
        CATALOG,
    )


def test_a_plan_with_cpu_memory_is_certified_cheaper_and_replayed(tmp_path: Path) -> None:
    found, plain = (
        plan(question(**more), documents(), CATALOG, time_limit_s=600)
        for more in ({"kv_offload": OFFLOAD}, {})
    )
    assert found.status == plain.status == "on paper" and found.verdict.holds
    assert found.fleet.policies.kv_offload == KvOffload(200e9, 25e9)
    assert found.certificate.value < plain.certificate.value
    lower = found.certificate.bound
    assert lower is not None and 0 < lower <= found.certificate.value
    told = [line for line in fact_sentences_of(found.certificate.assumptions) if "in CPU memory" in line]
    assert len(told) == 1 and "25 GB/s per GPU, as it was given" in told[0]

    files = render(found)
    for name in ("plan.yaml", "traffic.jsonl"):
        (tmp_path / name).write_text(files[name])
    again = simulate(read_fleet(tmp_path / "plan.yaml", CATALOG), read_trace(tmp_path / "traffic.jsonl"))
    np.testing.assert_allclose(again.ttft_s, found.simulation.ttft_s, rtol=1e-9)
    assert again.token_reload_frac == found.simulation.token_reload_frac and again.reload_s.sum() > 0


def test_workers_that_share_a_store_have_degrees_that_kv_heads_split_over() -> None:
    """Qwen3-30B-A3B has 4 KV heads: blocks of TP 8 are no use to the others."""
    llm, gpu = CATALOG.llm("qwen3-30b-a3b"), CATALOG.gpu("h100-80g")
    for is_shared, degrees in ((False, {1, 2, 4, 8}), (True, {1, 2, 4})):
        asked = question()
        policies = replace(asked.policies, kv_offload=KvOffload(200e9, 25e9, is_shared))
        engines = EngineChoices.of(replace(asked, policies=policies))
        types, left = worker_types(llm, [gpu], CATALOG, 5000, engines)
        assert {each.tp for each in types} == degrees
        assert any("4 KV heads" in reason_text(each.because) for each in left) == is_shared
