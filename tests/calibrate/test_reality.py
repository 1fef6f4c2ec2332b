"""benchmarks/reality.py on small made-up runs: a catalog whose every step takes 10 ms, so that hand
arithmetic says what is predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import reality
from benchmarks.reality import Engines, LeftOut, Row
from planner.documents.catalog import read_catalog

SHARED = Path(__file__).parents[3] / "shared" / "reference" / "reality"
STEP_S = 0.01
LLM = "meta-llama/Llama-3.1-8B"
QUANTILES = {"median": 1.0, "p75": 1.0, "p90": 1.0, "p95": 1.0, "p99": 1.0}
FIT = f"""
llm: {LLM}
gpu: h100-80g
source: made up
date: '2026-11-20'
fits:
- {{tp: 1, knots_tokens: [1.0, 32768.0], f_s: [{STEP_S}, {STEP_S}], a_s: 0.0, b_s: 0.0, d_s: 0.0, e_s: 0.0,
   h_s: 0.0, basis: made up}}
"""


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    """Llama-3.1-8B on one H100, where a step takes 10 ms whatever is in it."""
    folder = tmp_path / "catalog" / "latency"
    folder.mkdir(parents=True)
    (folder / "fit.yaml").write_text(FIT)
    return Engines(read_catalog(folder.parent), modelled=False)


def rows_of(found: reality.Found) -> dict[tuple[str, str], Row]:
    rows = list(found)
    assert all(isinstance(row, Row) for row in rows), rows
    return {(row.quantity, row.statistic): row for row in rows if isinstance(row, Row)}


def why(found: reality.Found) -> list[str]:
    rows = list(found)
    assert all(isinstance(row, LeftOut) for row in rows), rows
    return [row.why for row in rows if isinstance(row, LeftOut)]


@pytest.mark.parametrize(
    ("source", "ran", "asked"),
    [
        ("inference-perf", "vLLM 0.15.1", ("0.15.1", True, 3.7 * 1e-3)),
        ("ml-energy", "vLLM 0.11.1", ("0.11.1", False, 7.2 * 1e-3)),
        ("llmservingsim", "vLLM 0.19.0", ("0.19.0", True, 0.0)),
        ("silicon-sample", "vLLM of an unstated version", ("0.33.0", True, 3.7 * 1e-3)),
    ],
)
def test_the_engine_that_ran_is_modelled(
    engines: Engines, source: str, ran: str, asked: tuple[str, bool, float]
) -> None:
    run = reality.Run(source, "c", "", LLM, "h100-80g", 1, ran)
    assert engines.fleet(run, {}).engine is None
    found = replace(engines, modelled=True).fleet(run, {}).engine
    told = found and (found.version, found.async_scheduling, found.front_end_s)
    assert told == asked


# --- inference-perf


def stage(failed: int = 0) -> dict[str, Any]:
    """40 requests in 40 s; 20 ms to the first token, 20 ms per token: 10 ms per chunk, two chunks each."""
    return {
        "requested_rate": 1.0,
        "sent": 40,
        "failed": failed,
        "ttft_s": {"mean": 0.02} | {key: 0.02 for key in QUANTILES},
        "tpot_s": {"mean": 0.01} | {key: 0.01 for key in QUANTILES},
        "itl_s": {"mean": 0.01, "median": 0.0, "p75": 0.02, "p90": 0.02, "p95": 0.02, "p99": 0.02},
        "e2e_s": {"mean": 0.22} | {key: 0.22 for key in QUANTILES},
        "prompt_tokens": {"mean": 64.0, "min": 64.0, "median": 64.0, "max": 64.0},
        "output_tokens": {"mean": 9.0},
    }


def inference_perf(folder: Path, *, llm: str = LLM, gpu: str = "h100-80g", failed: int = 0) -> Path:
    path = folder / "inference_perf_made_up.json"
    document = {
        "engine": {
            "model": llm,
            "tensor_parallelism": 1,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 128,
        },
        "gpu": gpu,
        "vllm": "0.15.1",
        "data": {
            "shared_prefix": {
                "num_unique_system_prompts": 2,
                "num_users_per_system_prompt": 2,
                "output_len": 11,
                "question_len": 32,
                "system_prompt_len": 32,
            }
        },
        "load": {"stages": [{"duration": 40, "rate": 1}, {"duration": 40, "rate": 1}]},
        "stages": [stage(), stage(failed)],
    }
    path.write_text(json.dumps({"made-up": document}))
    return path


def test_a_stage_is_held_against_its_means_and_percentiles(tmp_path: Path, engines: Engines) -> None:
    """10 ms to each of 11 tokens against 20: half of E2E's 220 ms, and of every gap. A request that finds
    another's step running waits up to 10 ms more, which few of one per second do."""
    found = list(reality.inference_perf(inference_perf(tmp_path), engines))
    assert {row.run.case for row in found} == {"1/s"} and len(found) == 2 * (3 * 4 + 2)
    rows = rows_of(iter(found[:14]))
    assert rows["ttft", "p50"].predicted == pytest.approx(STEP_S)
    assert rows["ttft", "p50"].error_frac == pytest.approx(-0.5)
    assert rows["tpot", "mean"].measured == pytest.approx((0.22 - 0.02) / 10)
    assert rows["tpot", "p90"].measured == pytest.approx(0.02)
    assert rows["tpot", "mean"].predicted == pytest.approx(STEP_S)
    assert rows["e2e", "p50"].predicted == pytest.approx(11 * STEP_S)
    assert rows["itl", "p50"].error_frac == pytest.approx(-0.5)
    assert rows["ttft", "p50"].run.engine == "vLLM 0.15.1" and rows["ttft", "p50"].basis == "fit"


def test_prompts_are_found_cached_after_the_first_round(tmp_path: Path) -> None:
    """4 users in 2 groups: 4 blocks of 16 tokens, the first 2 shared within a group: 2 x 2 + 4 x 2 ids."""
    document = json.loads(inference_perf(tmp_path).read_text())["made-up"]
    trace, stage_of, starts_s = reality.shared_prompts(document)
    assert len(trace) == 80 and stage_of.sum() == 40 and starts_s == [0.0, 100.0, 200.0]
    assert len(set(trace.prefix_ids.tolist())) == 12
    ids = trace.prefix_ids.reshape(80, 4)
    assert (ids[4] == ids[0]).all() and (ids[1, :2] == ids[0, :2]).all() and (ids[1, 2:] != ids[0, 2:]).all()
    assert (ids[2, :2] != ids[0, :2]).all()


def test_an_overloaded_stage_is_named_and_left_out(tmp_path: Path, engines: Engines) -> None:
    found = list(reality.inference_perf(inference_perf(tmp_path, failed=10), engines))
    (left,) = [each for each in found if isinstance(each, LeftOut)]
    assert "overloaded: 10 of 40 requests failed" in left.why and left.run.regime == "overloaded"


@pytest.mark.parametrize(
    ("llm", "gpu", "said"),
    [
        ("nobody/has-it", "h100-80g", "nobody/has-it: neither in the catalog nor in benchmarks/configs"),
        (LLM, "abacus", "gpu: GPU 'abacus' is not in catalogs/gpus.yaml"),
        ("deepseek-ai/DeepSeek-V3.1", "h100-80g", "deepseek-ai/DeepSeek-V3.1 does not fit 1 x h100-80g"),
    ],
)
def test_what_the_planner_refuses_is_named(
    tmp_path: Path, engines: Engines, llm: str, gpu: str, said: str
) -> None:
    """Once for each stage."""
    reasons = why(reality.inference_perf(inference_perf(tmp_path, llm=llm, gpu=gpu), engines))
    assert len(reasons) == 2 and all(reason.startswith(said) for reason in reasons)


def test_lengths_have_the_quantiles_they_were_given() -> None:
    lengths = reality.spread_lengths(
        {"min": 0.0, "p10": 10.0, "median": 50.0, "max": 100.0, "mean": 1.0}, 100
    )
    assert lengths[0] == 1 and lengths[49] == 50 and lengths[-1] == 100


# --- ML.ENERGY


def ml_energy(folder: Path, **changed: Any) -> Path:
    path = folder / "ml_energy.jsonl"
    point = {
        "llm": LLM,
        "task": "gpqa",
        "weights": "bfloat16",
        "gpu_model": "H100",
        "num_gpus": 1,
        "max_num_seqs": 4,
        "avg_output_len": 100.0,
        "avg_power_watts": 600.0,
        "median_itl_ms": 20.0,
        "p90_itl_ms": 20.0,
        "p99_itl_ms": 40.0,
        "output_throughput_tokens_per_sec": 200.0,
        "parallelization": {"tensor_parallel": 1, "expert_parallel": 1, "data_parallel": 1},
    }
    path.write_text(json.dumps(point | changed) + "\n")
    return path


def test_full_seats_give_a_token_each_per_step(tmp_path: Path, engines: Engines) -> None:
    """4 seats, 10 ms: gaps of 10 ms against 20, 400 tokens/s against 200. 600 of 700 W: not host-bound."""
    rows = rows_of(reality.ml_energy(ml_energy(tmp_path), {}, engines))
    assert rows["itl", "p50"].error_frac == pytest.approx(-0.5)
    assert rows["itl", "p99"].error_frac == pytest.approx(-0.75)
    assert rows["throughput", "mean"].predicted == pytest.approx(400, rel=0.01)
    assert rows["power", "mean"].measured == 600
    assert rows["itl", "p50"].run.regime == ""


@pytest.mark.parametrize(
    ("changed", "repeats"),
    [
        ({"llm": "openai/gpt-oss-120b", "num_gpus": 2, "max_num_seqs": 512}, 4),
        ({"llm": "openai/gpt-oss-120b", "num_gpus": 2, "max_num_seqs": 600}, 4),  # As with 512 seats.
        ({"llm": "nobody/has-it", "max_num_seqs": 200}, 3),  # 594 requests, more than twice as many as seats.
    ],
)
def test_runs_of_many_seats_repeat_their_prompts(
    tmp_path: Path, changed: dict[str, Any], repeats: int
) -> None:
    assert reality.repeats_of(json.loads(ml_energy(tmp_path, **changed).read_text())) == repeats


def test_the_window_is_when_all_seats_are_taken(tmp_path: Path, engines: Engines) -> None:
    """198 requests of 100 tokens on 4 seats, steps of 10 ms: it begins with the first tokens, and ends when
    193 have finished, in the 49th round of a second.
    """
    point = json.loads(ml_energy(tmp_path).read_text())
    run = reality.Run("ml-energy", "", "", LLM, "h100-80g", 1, "")
    fleet = engines.fleet(run, {"max_num_seqs": 4}, cache=True)
    start_s, end_s = reality.all_at_once(fleet, point, {}).window_s
    assert start_s < 0.1 and end_s == pytest.approx(49, rel=0.02)


def test_gpus_that_draw_little_wait_for_their_host(tmp_path: Path, engines: Engines) -> None:
    """300 W are less than 60 % of 700."""
    rows = rows_of(reality.ml_energy(ml_energy(tmp_path, avg_power_watts=300.0), {}, engines))
    assert {row.run.regime for row in rows.values()} == {"host-bound"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weights": "int3"}, "weights in int3 are not modelled"),
        ({"task": "video"}, "task video: nothing says how long its prompts are"),
        (
            {"num_gpus": 2, "parallelization": {"data_parallel": 2}},
            "data-parallel groups: whether they share",
        ),
        ({"weights": "fp8", "llm": "Qwen/Qwen3-8B"}, "Qwen/Qwen3-8B: its config.json has no fp8 weights"),
    ],
)
def test_points_that_cannot_be_said_are_named(
    tmp_path: Path, engines: Engines, changed: dict[str, Any], said: str
) -> None:
    (reason,) = why(reality.ml_energy(ml_energy(tmp_path, **changed), {}, engines))
    assert reason.startswith(said)


def test_outputs_follow_the_histogram() -> None:
    """All of them in the second of two bins."""
    rng = np.random.default_rng(0)
    lengths = reality.drawn({"bins": [1.0, 10.0, 20.0], "counts": [0, 5]}, 1000, rng)
    assert lengths.min() >= 10 and lengths.max() <= 20 and lengths.mean() == pytest.approx(15, abs=0.5)


# --- logs of requests


def request_log(folder: Path, gpu: str = "h100-80g") -> None:
    """Two requests, a minute apart: 20 ms to the first token, then 20 ms for each of four more. The engine
    notes the second one 5 ms late; its clock and the client's are a second apart.
    """
    log = [
        {
            "input_toks": 100,
            "output_toks": 5,
            "arrival_time": at - 1,
            "queued_ts": at + (0.005 if at > 1000 else 0),
            "first_token_ts": at + 0.02,
            "last_token_ts": at + 0.1,
        }
        for at in (1060.0, 1000.0)
    ]
    settings = {
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
    }
    (folder / f"{gpu}--x.requests.jsonl").write_text("\n".join(map(json.dumps, log)))
    meta = {"model": LLM, "vllm_version": "0.19.0", "engine_kwargs": settings}
    (folder / f"{gpu}--x.meta.json").write_text(json.dumps(meta))


def test_every_request_is_replayed_from_the_moment_it_was_sent(tmp_path: Path, engines: Engines) -> None:
    request_log(tmp_path)
    rows = rows_of(reality.request_logs(tmp_path, engines))
    for quantity, predicted in (("ttft", STEP_S), ("tpot", STEP_S), ("e2e", 5 * STEP_S)):
        for name in ("mean", "p50", "p90", "p99"):
            assert rows[quantity, name].predicted == pytest.approx(predicted)
            assert rows[quantity, name].error_frac == pytest.approx(-0.5)


def test_profiles_beside_a_run_are_imported(tmp_path: Path, engines: Engines) -> None:
    """100 tokens in a step of the made-up kernels of tests/importers: less than 3 ms, where ours take 10."""
    request_log(tmp_path)
    for kind in ("attention", "dense", "per_sequence"):
        made = Path(__file__).parents[1] / "data" / f"llmservingsim_{kind}.csv"
        (tmp_path / f"h100-80g--x--tp1--{kind}.csv").write_text(made.read_text())
    (tmp_path / "h100-80g--x--tp2--dense.csv").write_text("of another degree")
    rows = [row for row in reality.request_logs(tmp_path, engines) if isinstance(row, Row)]
    ttft_s = {row.basis: row.predicted for row in rows if (row.quantity, row.statistic) == ("ttft", "p50")}
    assert ttft_s["fit"] == pytest.approx(STEP_S)
    assert 0.001 < ttft_s["import"] < 0.004
    verdicts = {each["over"]: each["rows"] for each in reality.judged(rows, [])}
    assert verdicts == {"its profiles imported": 1, "ours": 1, "ours, DP 2": 0}


# --- points of the wheel


def silicon(folder: Path, *points: dict[str, str]) -> Path:
    fields = {
        "id": "a",
        "silicon_data_source": "2026-01-01.csv",
        "backend": "vllm",
        "backend_version": "0.12.0",
        "model_path": LLM,
        "system": "h100_sxm",
        "mode": "agg",
        "isl": "100",
        "osl": "10",
        "gemm_quant_mode": "",
        "moe_tp_size": "1",
        "moe_ep_size": "1",
        "attention_dp_size": "1",
        "batch_size": "1.0",
        "tp_size": "1.0",
        "silicon_ttft_ms": "20",
        "silicon_tpot_ms": "5",
    }
    lines = [",".join(fields)] + [",".join((fields | point).values()) for point in points]
    path = folder / "silicon_sample.csv"
    path.write_text("\n".join(lines))
    return path


def test_points_of_the_wheel_are_closed_loops(tmp_path: Path, engines: Engines) -> None:
    """One client: 10 ms to the first token against 20, 10 ms per token against 5."""
    rows = rows_of(reality.silicon_sample(silicon(tmp_path, {}, {"backend": "trtllm"}), engines))
    assert rows["ttft", "mean"].error_frac == pytest.approx(-0.5)
    assert rows["tpot", "mean"].error_frac == pytest.approx(1.0)
    assert rows["ttft", "mean"].run.campaign == f"InferenceX, {LLM}, h100-80g, 16 bit"


def test_points_whose_host_takes_longer_than_the_gpus_are_host_bound(
    tmp_path: Path, engines: Engines
) -> None:
    """Steps of 10 ms; the host takes 0.82 ms and 37 us a sequence: 8.2 ms with 200 clients, 11.9 with 300."""
    point = {"backend_version": "0.16.0", "silicon_ttft_ms": "20000", "silicon_tpot_ms": "20"}
    path = silicon(tmp_path, point | {"batch_size": "200"}, point | {"batch_size": "300"})
    found = reality.silicon_sample(path, replace(engines, modelled=True))
    assert [each.run.regime for each in found if isinstance(each, Row)] == [
        "",
        "",
        "host-bound",
        "host-bound",
    ]


def test_sglang_has_one_budget_whoever_ran_it() -> None:
    """The authors' --max-prefill-tokens is below the LLM's context, so SGLang's own chunks of 8192 count."""
    run = reality.Run("sglang", f"{reality.AUTHORS}, x", "1", LLM, "h200-141g", 1, "SGLang 0.5.6.post2")
    for length in (1000, 4000, 8000):
        assert reality._point_settings(run, length, 8)["max_num_batched_tokens"] == 8192


def test_kv_has_8_bits_where_the_scripts_say_so(tmp_path: Path, engines: Engines) -> None:
    """Half the bytes: twice the tokens fit, and a step takes what the fits with KV in 8 bits say."""
    run = reality.Run("sglang", "InferenceX, x", "1", "zhipuai/GLM-5", "b200-180g", 8, "SGLang 0.5.9")
    qwen = replace(run, llm="Qwen/Qwen3.5-397B-A17B")
    served = {
        each: reality._has_kv_in_8_bits(each, weights)
        for each, weights in (
            (run, "fp8"),
            (replace(run, gpu="h200-141g"), "fp8"),
            (replace(qwen, gpu="h200-141g"), "fp8"),
            (qwen, ""),
            (replace(run, campaign=f"{reality.AUTHORS}, x"), "fp8"),
        )
    }
    assert list(served.values()) == [True, False, True, False, False]
    shipped = Engines(read_catalog())
    wide, narrow = (
        shipped.fleet(qwen, {}, weights="fp8", kv_in_8_bits=each).pools[0].type for each in (False, True)
    )
    assert narrow.kv_tokens == pytest.approx(2 * wide.kv_tokens, rel=0.02)
    decodes = {"decodes": 64, "kv_tokens": 64 * 8192}
    assert narrow.latency.kind == "kernels"
    assert narrow.latency.step_s(64, **decodes) < wide.latency.step_s(64, **decodes)


def test_a_measurement_counts_once(tmp_path: Path, engines: Engines) -> None:
    """The same figures under another id, LLM and version; other clients are another measurement."""
    again = {"id": "b", "model_path": "meta-llama/Llama-3.1-70B", "backend_version": "0.19.0"}
    path = silicon(tmp_path, {}, again, {"id": "c", "batch_size": "2"}, {"id": "d", "mode": "disagg"})
    found = list(reality.silicon_sample(path, engines))
    assert [each.run.case for each in found if isinstance(each, Row)] == ["a", "a", "c", "c"]
    left = {each.run.case: each.why for each in found if isinstance(each, LeftOut)}
    assert left["b"] == "the same measurement is in the file already"
    assert left["d"].startswith("disaggregated")


def test_gpus_that_count_twice_count_once(tmp_path: Path, engines: Engines) -> None:
    """Three spellings of 4 clients on 4 GPUs with whole experts, one with rounded times; then 2 of SGLang."""
    mixture = {"model_path": "mistralai/Mixtral-8x7B-v0.1"}
    times = mixture | {"silicon_ttft_ms": "20.001", "silicon_tpot_ms": "5.002"}
    spelled = {"tp_size": "4.0", "moe_ep_size": "4.0", "batch_size": "4.0", "attention_dp_size": "1.0"}
    ranks = {"tp_size": "4.0", "moe_ep_size": "16.0", "batch_size": "1.0", "attention_dp_size": "4.0"}
    rounded = mixture | {"silicon_ttft_ms": "20.00", "silicon_tpot_ms": "5.00"}
    product = mixture | {"backend": "sglang", "tp_size": "4.0", "moe_tp_size": "2.0", "moe_ep_size": "2.0"}
    path = silicon(tmp_path, ranks | times, spelled | times, spelled | rounded, product)
    found = list(reality.silicon_sample(path, engines))
    assert [each.why for each in found if isinstance(each, LeftOut)] == [reality.SAME_AGAIN] * 2
    runs = [each.run for each in found if isinstance(each, Row) and each.quantity == "tpot"]
    assert [(run.tp, run.load and run.load.requests) for run in runs] == [(4, 4.0), (2, 1.0)]
    assert all(run.load is not None and run.load.experts_whole for run in runs)


def test_runs_whose_engine_had_drafts_are_left_out(tmp_path: Path, engines: Engines) -> None:
    """DeepSeek-R1 on 8 B200: the lines of the database had none, those of other files had MTP."""
    point = {
        "backend": "sglang",
        "model_path": "deepseek-ai/DeepSeek-R1",
        "system": "b200_sxm",
        "gemm_quant_mode": "fp8",
        "backend_version": "0.5.9",
        "tp_size": "8.0",
    }
    path = silicon(tmp_path, point, point | {"silicon_data_source": "db-dump/2026-04-27", "isl": "101"})
    left = [each.why for each in reality.silicon_sample(path, engines) if isinstance(each, LeftOut)]
    assert left[0] == reality.DRAFTS_UNTOLD and reality.DRAFTS_UNTOLD not in left[1:]


def test_a_campaign_whose_prompts_were_cached_is_left_out_whole(tmp_path: Path, engines: Engines) -> None:
    """SGLang on B200, whose TTFT is not compared: the point that could be computed was not counted."""
    point = {"backend": "sglang", "system": "b200_sxm", "backend_version": "0.5.6"}
    cached = point | {"id": "cached", "silicon_ttft_ms": "0.1", "silicon_tpot_ms": "0.1"}
    found = list(reality.silicon_sample(silicon(tmp_path, cached, point | {"id": "other"}), engines))
    assert [each.run.case for each in found if isinstance(each, LeftOut)] == ["cached", "other"]
    assert len(found) == 2


def test_only_every_so_many_th_point_of_a_campaign_may_be_asked_for(tmp_path: Path, engines: Engines) -> None:
    """Of four of one LLM and two of another GPU the second and the fourth, and the second."""
    points = [{"id": str(n), "batch_size": str(n + 1)} for n in range(4)]
    points += [{"id": f"other {n}", "batch_size": str(n + 1), "system": "h200_sxm"} for n in range(2)]
    found = reality.silicon_sample(silicon(tmp_path, *points), replace(engines, every=2))
    cases = [each.run.case for each in found if isinstance(each, Row) and each.quantity == "tpot"]
    assert cases == ["1", "3", "other 1"]


# --- InferenceX's files


def inferencex(folder: Path, **changed: Any) -> Path:
    """Four clients that send eight prompts of 100 tokens for 11: 20 ms to the first, 10 to each other."""
    figures = {f"{p}_{key}": 0.01 for p in ("median", "p99") for key in ("ttft", "tpot")}
    point = {
        "file": "a_tp1_conc4.json",
        "model_id": LLM,
        "max_concurrency": 4,
        "num_prompts": 8,
        "total_input_tokens": 800,
        "total_output_tokens": 88,
        "output_throughput": 88 / 0.24,
        **figures,
        "median_e2el": 0.12,
        "p99_e2el": 0.24,
        **changed,
    }
    path = folder / "inferencex_a.jsonl"
    path.write_text(json.dumps(point) + "\n")
    return path


def test_a_file_of_inferencex_is_a_closed_loop(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests at once, twice: 88 tokens in 240 ms."""
    monkeypatch.setattr(reality, "INFERENCEX_GPU", "h100-80g")
    rows = rows_of(reality.inferencex(inferencex(tmp_path), engines))
    assert rows["e2e", "p50"].error_frac == pytest.approx(0)
    assert rows["e2e", "p99"].error_frac == pytest.approx(-0.5)
    assert rows["throughput", "mean"].error_frac == pytest.approx(0)
    assert {row.run.regime for row in rows.values()} == {""}
    waiting = inferencex(tmp_path, median_ttft=0.1)
    assert {row.run.regime for row in rows_of(reality.inferencex(waiting, engines)).values()} == {"saturated"}


def test_a_run_finds_the_prompts_that_the_run_before_sent(tmp_path: Path) -> None:
    """8 prompts after the first 4 of them, sent by 2 clients: 4 of 8 are in the cache of one server."""
    path = inferencex(tmp_path, total_input_tokens=1024)
    fewer = {"max_concurrency": 2, "num_prompts": 4, "total_input_tokens": 512, "total_output_tokens": 44}
    point = json.loads(path.read_text())
    points = [point | fewer, point]
    assert reality._requests_before(points[1], points) == 4
    assert reality._requests_before(points[0], points) == 0
    trace = reality._one_seed(4, 8, 128, 11)
    assert len(trace) == 12 and trace.prefix_ids is not None
    assert (trace.prefix_ids[: 4 * 8] == trace.prefix_ids[4 * 8 : 8 * 8]).all()


# --- bounds and the page


def test_the_share_left_out_comes_first_and_repeats_are_no_loss(
    tmp_path: Path, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    """One point is replayed, its copy is not, and one has weights that nobody has: one of two is lost."""
    unknown = {"id": "3", "gemm_quant_mode": "fp6", "silicon_tpot_ms": "6"}
    path = silicon(tmp_path, {"id": "1"}, {"id": "2"}, unknown)
    found = list(reality.silicon_sample(path, engines))
    rows = [each for each in found if isinstance(each, Row)]
    reality.print_page(rows, [each for each in found if isinstance(each, LeftOut)], [])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("Left out: 1 of 2 runs (50 %), and 1 lines that repeat one. Of the 1 replayed")


def test_a_run_is_cold_whose_like_has_its_first_tokens_far_sooner() -> None:
    """4 s of TTFT beside 1 s, at the same time per token; 2 s are no compilation, nor are steps twice as
    long.
    """
    like = {
        **{
            "model_path": LLM,
            "gemm_quant_mode": "",
            "backend": "sglang",
            "system": "b200_sxm",
            "mode": "agg",
        },
        **{"isl": "8", "osl": "8", "tp_size": "1", "moe_tp_size": "1", "moe_ep_size": "1", "batch_size": "4"},
    }
    times_ms = {"a": (1000, 10), "b": (2000, 10), "c": (4000, 10), "d": (4000, 21)}
    points = [
        like | {"id": name, "silicon_ttft_ms": str(ttft_ms), "silicon_tpot_ms": str(tpot_ms)}
        for name, (ttft_ms, tpot_ms) in times_ms.items()
    ]
    assert reality._cold_points(points) == {"c"}
    assert not reality._cold_points([points[2] | {"osl": "9"}, points[0]])


def test_sessions_are_counted_as_left_out(tmp_path: Path) -> None:
    point = {"run": "agents", "llm": LLM, "gpu": "H100", "engine": "vllm", "rate": 3}
    (tmp_path / "b.runs.json").write_text(json.dumps([point]))
    assert [each.run.source for each in reality.unread(tmp_path)] == ["sessions"]


def test_a_ladder_begins_each_stage_with_the_same_prompts_when_the_one_before_has_ended() -> None:
    """Stages of 2 requests after a warm-up of 750: prompts 0 and 1 again, of 3 blocks, 2 of a group's."""
    shared = {"groups": 4, "prompts_per_group": 2, "system_tokens": 32, "question_tokens": 16}
    point = {"rate": 2.0, "duration_s": 1, "shared_prefix": shared, "input_tokens": 50, "output_tokens": 5}
    trace, stage_of = reality.ladder([point, point])
    assert np.bincount(stage_of).tolist() == [750, 2, 2]
    assert trace.prefix_ids is not None
    blocks = trace.prefix_ids.reshape(-1, 3)
    assert (blocks[:2] == blocks[750:752]).all() and (blocks[:2] == blocks[752:]).all()
    starts_s = [trace.arrival_s[stage_of == k][0] for k in (1, 2)]
    assert (
        starts_s[1] - trace.arrival_s[751] > reality.LLMD_GAP_S / 2 and (np.diff(trace.arrival_s) > 0).all()
    )


def test_shares_inside_shorter_and_longer_than_the_spread_are_told(
    tmp_path: Path, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    """10 ms are predicted, 5 measured: inside 4 to 6, shorter than 8 to 12, longer than 1 to 2."""
    row = rows_of(reality.silicon_sample(silicon(tmp_path, {}), engines))["tpot", "mean"]
    bounds = ((0.004, 0.006), (0.008, 0.012), (0.008, 0.012), (0.001, 0.002))
    reality.print_inside([replace(row, bounds=each) for each in bounds])
    assert "| h100-80g | fit | 4 | - | 100; 25 / 50 / 25 |" in capsys.readouterr().out


def test_bounds_reach_as_far_on_each_side_as_the_step_times_of_that_side_move_them() -> None:
    """Longer prefills and decodes make 1 s x2 and x3, shorter ones a half and 1: up exp(hypot(ln 2, ln 3)),
    down a half.
    """
    low, high = reality.bounds_of(1.0, [2.0, 0.5, 3.0, 1.0])
    assert low == pytest.approx(0.5)
    assert high == pytest.approx(np.exp(np.hypot(np.log(2), np.log(3))))


def test_tails_that_a_limit_decides_are_listed_whatever_was_measured(
    tmp_path: Path, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bounds of 0.1 and 2 s are 20 times apart. The other stage, of 0.1 and 0.4 s, is 50 % off."""
    row = rows_of(reality.silicon_sample(silicon(tmp_path, {}), engines))["tpot", "mean"]
    near = replace(row, quantity="ttft", statistic="p99", predicted=1.0, measured=0.2, bounds=(0.1, 2.0))
    other = replace(near, predicted=0.3, bounds=(0.1, 0.4))
    assert reality.at_limit([near, other, replace(near, statistic="p50")]) == [near]
    reality.print_at_limit([near, other])
    page = capsys.readouterr().out
    assert "| 1 | 0.1 | 2 | 0.2 |" in page and "the 1 others are 50.0 % off" in page


def test_bounds_are_held_against_every_run_of_their_kind(tmp_path: Path, engines: Engines) -> None:
    """-50 % on every ITL: size and bias are both 50 %. Throughput is twice what was measured."""
    rows = [row for row in reality.ml_energy(ml_energy(tmp_path), {}, engines) if isinstance(row, Row)]
    verdicts = {(each["quantity"], each["over"]): each for each in reality.judged(rows, [])}
    assert len(verdicts) == 5
    for quantity in ("itl p50", "itl p50, bias"):
        verdict = verdicts[quantity, "H100, LLMs with fits"]
        assert verdict["error_frac"] == pytest.approx(0.5) and not verdict["holds"]
    nothing = verdicts["itl p50", "B200, not host-bound"]
    assert nothing["rows"] == 0 and nothing["error_frac"] is None and not nothing["holds"]


def test_the_command_prints_rows_and_says_what_it_missed(
    tmp_path: Path, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    request_log(tmp_path)
    request_log(tmp_path, "abacus")
    known = ["--catalog", str(tmp_path / "catalog"), "--engine", "none"]
    command = [str(tmp_path), "--only", "llmservingsim", *known]
    assert reality.main([*command, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert len(document["rows"]) == 12 and document["rows"][0]["gpu"] == "h100-80g"
    assert [each["gpu"] for each in document["left_out"]] == ["abacus"]
    assert [bound["holds"] for bound in document["bounds"]] == [False] * 8
    assert reality.main(command) == 1
    page = capsys.readouterr().out
    assert "| llmservingsim | ours | ttft mean | 1 | 50.0 % | 6 % | missed |" in page
    assert "| llmservingsim | its profiles imported | ttft mean | 0 | - | 6 % | missed |" in page
    assert "| llmservingsim | Llama-3.1-8B | h100-80g | fit | 1 | 50 / 50 / 50 / 50 (-50) | 50 / 50" in page
    assert "| llmservingsim | meta-llama/Llama-3.1-8B | abacus | 1 | gpu: GPU 'abacus' is not in" in page


def test_a_folder_without_runs_is_an_error(tmp_path: Path) -> None:
    assert reality.main([str(tmp_path), "--only", "ml-energy"]) == 2


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the checkout")
def test_no_run_of_the_shared_data_is_skipped_in_silence() -> None:
    """Each of the three logs of requests is replayed or named."""
    found = list(reality.request_logs(SHARED, Engines(read_catalog())))
    assert len({each.run for each in found}) == len(list(SHARED.rglob("*.requests.jsonl"))) == 3
