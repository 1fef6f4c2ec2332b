"""Foreign formats against arithmetic by hand, and fits of what they hold.

The files in tests/data are made up, small, and as each program writes them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from planner import importers
from planner.calibrate.fitting import fit_table, fit_yaml
from planner.cli import app
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.fleet_file import read_fleet
from planner.errors import InputError, PlannerError
from planner.importers import MeasuredRun, MeasuredRuns, StatedSetup
from planner.importers.benchmark_runs import read_runs
from planner.models.latency import Array, StepLatency
from planner.models.parallelism import tp_s
from planner.models.step_tables import COLUMNS, NOT_INCLUDED, StepTable, read_step_table

DATA = Path(__file__).parents[1] / "data"
LLM = "meta-llama/Llama-3.1-8B"
H100 = StatedSetup(gpu="h100-80g", tp=1)
WHOLE = StatedSetup(llm=LLM, gpu="h100-80g", tp=1)
TRUE = StepLatency(
    (1.0, 64.0, 256.0, 1024.0, 4096.0), (0.01, 0.011, 0.02, 0.03, 0.12), 2e-9, 3e-6, 4e-8, 5e-4, 0.0, "true"
)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return read_catalog()


def runs_of(name: str, facts: StatedSetup, catalog: Catalog, *files: str) -> MeasuredRuns:
    found = importers.read(name, [DATA / file for file in files], facts, catalog)
    assert isinstance(found, MeasuredRuns)
    return found


def steps_of(name: str, facts: StatedSetup, catalog: Catalog, *files: str) -> StepTable:
    found = importers.read(name, [DATA / file for file in files], facts, catalog)
    assert isinstance(found, StepTable)
    return found


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("splitwise.csv", "splitwise"),
        ("vidur_mlp.csv", "vidur"),
        ("vidur_attention.csv", "vidur"),
        ("vidur_all_reduce.csv", "vidur"),
        ("vidur_steps.csv", "vidur"),
        ("llmservingsim_attention.csv", "llmservingsim"),
        ("llmservingsim_dense.csv", "llmservingsim"),
        ("llmservingsim_per_sequence.csv", "llmservingsim"),
        ("llmservingsim_moe.csv", "llmservingsim"),
        ("vllm_serve.json", "vllm-bench-serve"),
        ("vllm_serve_detailed.json", "vllm-bench-serve"),
        ("vllm_latency.json", "vllm-bench-latency"),
        ("guidellm.json", "guidellm"),
        ("aiperf.json", "aiperf"),
        ("aiperf.jsonl", "aiperf"),
        ("inference_perf.json", "inference-perf"),
        ("metrics_after.txt", "prometheus"),
        ("silicon_sample.csv", "aiconfigurator"),
        ("runs.csv", "csv"),
    ],
)
def test_formats_are_told_by_their_content(file: str, name: str) -> None:
    assert importers.detect_format(DATA / file) == name


def test_a_folder_is_known_by_any_name_that_its_tool_gives(tmp_path: Path) -> None:
    """AIPerf's log of single requests alone: "is a folder without results of a format we know"."""
    (tmp_path / "profile_export.jsonl").write_bytes((DATA / "aiperf.jsonl").read_bytes())
    assert importers.detect_format(tmp_path) == "aiperf"


def test_what_is_no_format_of_ours_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"x\.csv: is no format we know \(found a, b\)"):
        importers.detect_format(path)


# --- profiles


def test_splitwise_batches_become_prefills_and_decodes(catalog: Catalog) -> None:
    """Batch 2 of 1024 tokens: 2 x 1024 x 1025 / 2 pairs; half way through 64 tokens each attends to 1056."""
    table = steps_of("splitwise", StatedSetup(gpu="h100-80g"), catalog, "splitwise.csv")
    assert (table.about["llm"], table.about["tp"]) == ("bigscience/bloom", "8")
    assert table.steps.iloc[1].tolist() == [2, 2048, 0, 1049600, 0, 0, 0.25]
    assert table.steps.iloc[3].tolist() == [0, 0, 0, 0, 2, 2112, 0.04]


def test_splitwise_files_of_others_take_names_from_options(catalog: Catalog) -> None:
    table = steps_of("splitwise", StatedSetup(llm=LLM, gpu="a100-80g", tp=2), catalog, "splitwise.csv")
    assert (table.about["llm"], table.about["gpu"]) == (LLM, "a100-80g")
    assert table.y.tolist() == [0.03, 0.01]


def test_splitwise_asks_which_of_several(catalog: Catalog) -> None:
    with pytest.raises(
        InputError, match="choose one with --llm, --gpu and --tp: bloom-176b on h100-80gb tp8"
    ):
        importers.read("splitwise", [DATA / "splitwise.csv"], StatedSetup(), catalog)


def test_vidur_adds_up_a_layer(catalog: Catalog) -> None:
    """Llama-3.1-8B has 32 layers, hidden 4096: 8192 bytes are one token. Prefill of 51: ops half way between
    0.1 and 0.3 ms, two all-reduces of 0.03 + 0.02, attention 0.2, so 32 x 0.5 ms. Four decodes after 99
    cached: 0.106 + 2 (0.0112 + 0.02) + 0.04 = 0.2084.
    """
    files = ("vidur_mlp.csv", "vidur_attention.csv", "vidur_all_reduce.csv")
    table = steps_of("auto", StatedSetup(llm=LLM, gpu="a100-80g", tp=2), catalog, *files)
    assert table.y == pytest.approx([32 * 0.5e-3, 32 * 0.2084e-3])
    assert table.X.tolist() == [[51, 51 * 26, 0, 0, 1], [4, 0, 4, 400, 0]]
    operators = table.operators
    assert operators is not None and operators.sum(axis=1).to_numpy() == pytest.approx(table.y)
    assert operators.attn_prefill.tolist() == pytest.approx([32 * 0.2e-3, 0])
    assert operators.all_reduce.tolist() == pytest.approx([32 * 0.1e-3, 32 * 2 * 0.0312e-3])
    assert table.about["note"].startswith("1 attention row(s) beyond 101 tokens")
    assert table.about["host_overhead"] == NOT_INCLUDED


def test_vidur_profiles_of_several_llms_and_nodes_are_told_apart(tmp_path: Path, catalog: Catalog) -> None:
    """Rows of another LLM, and an all-reduce over two nodes, a hundred times as slow, change nothing; keys
    and values take 0.02 ms per layer to write where that was measured.
    """
    files = []
    for name, columns, twice in (
        ("vidur_mlp.csv", ["n_embd", "n_head", "n_kv_head"], 1.0),
        ("vidur_attention.csv", ["n_embd", "n_q_head", "n_kv_head"], 1.0),
        ("vidur_all_reduce.csv", [], 100.0),
    ):
        mine = pd.read_csv(DATA / name)
        other = mine.copy()
        mine[columns], other[columns] = [4096, 32, 8][: len(columns)], [8192, 64, 8][: len(columns)]
        if "attention" in name:
            mine["time_stats.attn_kv_cache_save.median"] = 0.02
        medians = [str(column) for column in mine.columns if "time_stats" in str(column)]
        other[medians] = twice * mine[medians] + (0.5 if columns else 0.0)
        if not columns:
            other["devices_per_node"] = 1
        files.append(tmp_path / name)
        pd.concat([other, mine]).to_csv(files[-1], index=False)
    facts = StatedSetup(llm=LLM, gpu="a100-80g", tp=2)
    table = importers.read("vidur", files, facts, catalog)
    assert isinstance(table, StepTable)
    assert table.y == pytest.approx([32 * 0.52e-3, 32 * 0.2284e-3])
    with pytest.raises(InputError, match=r"n_embd is 8192, 4096, \S+ has 5120; name the LLM it is of"):
        importers.read("vidur", files, replace(facts, llm="Qwen/Qwen3-32B"), catalog)


LLMSERVINGSIM = tuple(f"llmservingsim_{kind}.csv" for kind in ("attention", "dense", "per_sequence"))


def made_us(steps: pd.DataFrame, moe_us: Array | float = 0.0) -> Array:
    """What the made-up kernels take for these steps of 32 layers, 1 GPU: all of them are linear.

    Per step: embedding 8 us, last norm 2, LM head 100 + S, sampler 5 + S / 2. Per layer: two norms of 1 +
    N / 100, projections of 30 + 0.3 N; attention launches in 4 us and takes 0.5 per prompt token, 0.25 per
    cached one, 0.125 per KV token of decodes, twice that beside prefills. The least launch in the file, of 6
    us, is what several prompts share.
    """
    prompts, decodes = steps.n_prefill.to_numpy(float), steps.n_decode.to_numpy(float)
    tokens, sequences = steps.prefill_tokens + decodes, prompts + decodes
    attention_us = np.where(
        prompts > 0,
        6 - 2 * prompts + 0.5 * steps.prefill_tokens + 0.25 * steps.cached_tokens + 0.25 * steps.kv_tokens,
        4 + 0.125 * steps.kv_tokens,
    )
    layer_us = 2 * (1 + tokens / 100) + 30 + 0.3 * tokens + attention_us + moe_us
    return np.asarray(8 + 2 + 105 + 1.5 * sequences + 32 * layer_us)


def test_llmservingsim_adds_up_its_kernels(catalog: Catalog) -> None:
    """Steps of all three kinds within the sizes that were measured, for instance 128 tokens of prompts."""
    table = steps_of("auto", StatedSetup(llm=LLM, gpu="h100-80g", tp=1), catalog, *LLMSERVINGSIM)
    assert table.y * 1e6 == pytest.approx(made_us(table.steps))
    assert table.is_kernel_time
    assert table.about["note"] == "200 tokens and 16 sequences per step were profiled"
    X = table.X
    assert table.steps.prefill_tokens.max() <= 128 and X[:, 2].max() == 8 and X[:, 4].max() == 8
    assert {tuple(kind) for kind in (X[:, [2, 4]] > 0).tolist()} == {
        (True, False),
        (False, True),
        (True, True),
    }
    fitted = fit_table(table, StatedSetup(), catalog, where="t")
    assert fitted.latency.kind == "kernels"
    # Decodes read a token in 0.125 us a layer, prefills in 0.25: d is of both, d + m of decodes beside them.
    assert 32 * 0.125e-6 < fitted.latency.d_s < 32 * 0.14e-6
    assert fitted.latency.d_s + fitted.latency.m_s == pytest.approx(32 * 0.25e-6, rel=0.02)


def test_llmservingsim_measures_one_gpu_without_all_reduces(catalog: Catalog) -> None:
    """Two per layer are added, as those of the catalog's GPU."""
    llm, gpu = catalog.llm(LLM), catalog.gpu("h100-80g")
    table = steps_of("llmservingsim", StatedSetup(llm=LLM, gpu="h100-80g", tp=2), catalog, *LLMSERVINGSIM)
    added_s = table.y - made_us(table.steps) / 1e6
    assert added_s == pytest.approx(tp_s(llm, gpu, 2, table.X[:, 0]))
    assert table.about["note"].endswith("all-reduces were not: those of h100-80g in the catalog are added")


def test_llmservingsim_mixtures_visit_experts(catalog: Catalog) -> None:
    """Mixtral: 8 (1 - 0.75^N) experts of 5 us each on 50 us, but the file begins with 8 of them; 0.1 us per
    token.
    """
    facts = StatedSetup(llm="mixtral-8x7b", gpu="h200-141g", tp=1)
    table = steps_of("llmservingsim", facts, catalog, *LLMSERVINGSIM, "llmservingsim_moe.csv")
    moe_us = 50 + 5 * 8 + 0.1 * table.X[:, 0]
    assert table.y * 1e6 == pytest.approx(made_us(table.steps, moe_us))


@pytest.mark.parametrize(
    ("files", "llm", "said"),
    [
        (LLMSERVINGSIM[:2], LLM, r"per_sequence\.csv is missing; name all files of the profile"),
        (LLMSERVINGSIM, "mixtral-8x7b", r"moe\.csv is missing"),
        ((*LLMSERVINGSIM, "llmservingsim_moe.csv"), LLM, r"moe\.csv: is of a mixture of experts"),
        ((*LLMSERVINGSIM, "llmservingsim_dense.csv"), LLM, r"is a second dense\.csv, beside"),
    ],
)
def test_llmservingsim_profiles_must_be_whole(
    files: tuple[str, ...], llm: str, said: str, catalog: Catalog
) -> None:
    with pytest.raises(InputError, match=said):
        steps_of("llmservingsim", StatedSetup(llm=llm, gpu="h200-141g", tp=1), catalog, *files)


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ("prefill_chunk > 0", "lacks decodes alone"),
        ("prefill_chunk == 0", "lacks prefills"),
        ("prefill_chunk != 16 or kv_prefill > 0", "lacks rows with prefill_chunk 16, kv_prefill 0 and n_d"),
        ("prefill_chunk == 0 or n_decode == 0", "prefills and decodes together"),
        ("prefill_chunk == 0 or n_decode > 0", "prefill_chunk 16, kv_prefill 0 and n_decode 0"),
    ],
)
def test_llmservingsim_attention_must_be_measured_alone_and_together(
    kept: str, said: str, tmp_path: Path, catalog: Catalog
) -> None:
    path = tmp_path / "attention.csv"
    pd.read_csv(DATA / LLMSERVINGSIM[0]).query(kept).to_csv(path, index=False)
    with pytest.raises(InputError, match=said):
        importers.read(
            "auto",
            [path, *(DATA / file for file in LLMSERVINGSIM[1:])],
            StatedSetup(LLM, "h100-80g", 1),
            catalog,
        )


def test_llmservingsim_names_files_it_does_not_use(catalog: Catalog) -> None:
    facts = StatedSetup(llm=LLM, gpu="h100-80g", tp=1)
    table = steps_of("llmservingsim", facts, catalog, *LLMSERVINGSIM, "runs.csv")
    assert table.about["note"].endswith("; not used: runs.csv")


def test_vidur_profiles_of_prefills_alone_have_no_decodes(tmp_path: Path, catalog: Catalog) -> None:
    """The time in which keys and values are written is none of a whole step."""
    attention = pd.read_csv(DATA / "vidur_attention.csv").drop(columns="time_stats.attn_decode.median")
    attention["time_stats.attn_kv_cache_save.median"] = 0.02
    attention.to_csv(tmp_path / "attention.csv", index=False)
    files = [DATA / "vidur_mlp.csv", tmp_path / "attention.csv", DATA / "vidur_all_reduce.csv"]
    table = importers.read("vidur", files, StatedSetup(llm=LLM, gpu="a100-80g", tp=2), catalog)
    assert isinstance(table, StepTable)
    assert table.y == pytest.approx([32 * 0.52e-3])


def test_vidur_names_the_file_that_is_missing(catalog: Catalog) -> None:
    files = [DATA / "vidur_mlp.csv", DATA / "vidur_attention.csv"]
    with pytest.raises(InputError, match=r"all_reduce\.csv \(tp is 2\) is missing"):
        importers.read("vidur", files, StatedSetup(llm=LLM, gpu="a100-80g", tp=2), catalog)


def test_steps_computed_by_vidur_need_no_options(catalog: Catalog) -> None:
    """Two prompts of 100 after 50: 2 x 100 x (50 + 50.5) pairs."""
    table = steps_of("auto", StatedSetup(), catalog, "vidur_steps.csv")
    assert table.X.tolist() == [[200, 20100, 0, 0, 2], [72, 64 * 32.5, 8, 8000, 1]]
    assert table.y.tolist() == [0.0125, 0.009]


# --- benchmarks


def test_detailed_vllm_runs_keep_requests_and_arrivals(catalog: Catalog) -> None:
    """TPOT of request 0 is (20 + 40) / 2 ms; request 1 has 5 tokens in 3 chunks: 80 / 4 ms. One failed."""
    run = runs_of("auto", StatedSetup(), catalog, "vllm_serve_detailed.json").runs[0]
    assert (run.requests, run.failed) == (3, 1)
    assert run.input_tokens == (100.0, 200.0, 300.0)
    assert run.arrival_s == (0.0, 0.5, 1.25)
    assert run.latency_s["ttft"]["mean"] == pytest.approx(0.2)
    assert run.latency_s["tpot"]["mean"] == pytest.approx((0.03 + 0.02) / 2)
    assert run.latency_s["e2e"]["p50"] == pytest.approx(0.28)
    assert [note.split(":")[0] for note in run.notes] == [
        "1 request(s) failed and are left out",
        "1.50 tokens per chunk",
    ]


def test_summaries_of_vllm_warn_of_bunches(catalog: Catalog) -> None:
    """Median gap 0.5 ms, mean 11.2 ms."""
    run = runs_of("auto", H100, catalog, "vllm_serve.json").runs[0]
    assert (run.concurrency, run.rate_rps, run.input_tokens) == (16, None, (512.0,))
    assert run.latency_s["ttft"] == pytest.approx({"mean": 0.12, "p50": 0.1, "p99": 0.31})
    assert any("in bunches" in note for note in run.notes)
    assert any("only summary statistics" in note for note in run.notes)


def test_the_summary_of_a_sweep_holds_several_runs(tmp_path: Path, catalog: Catalog) -> None:
    row = json.loads((DATA / "vllm_serve.json").read_text())
    path = tmp_path / "summary.json"
    path.write_text(json.dumps([row, row | {"max_concurrency": 4, "max_num_seqs": 64}]))
    found = importers.read("auto", [path], H100, catalog)
    assert isinstance(found, MeasuredRuns)
    assert [(run.concurrency, run.max_num_seqs) for run in found.runs] == [(16, None), (4, 64)]


def test_batch_latency_is_that_of_the_last_request(catalog: Catalog) -> None:
    with pytest.raises(InputError, match="does not say what was run; add --requests"):
        runs_of("auto", WHOLE, catalog, "vllm_latency.json")
    facts = replace(WHOLE, requests=8, input_tokens=32.0, output_tokens=128.0)
    run = runs_of("auto", facts, catalog, "vllm_latency.json").runs[0]
    assert (run.requests, run.concurrency) == (8, 8)
    assert run.latency_s == {"e2e": {"max": pytest.approx(1.3)}}


def test_guidellm_itl_is_our_tpot(catalog: Catalog) -> None:
    first, second = runs_of("auto", H100, catalog, "guidellm.json").runs
    assert (first.concurrency, first.failed, first.arrival_s) == (2, 1, ())
    assert first.latency_s["tpot"]["mean"] == pytest.approx(0.015)
    assert first.latency_s["e2e"]["mean"] == pytest.approx(0.31)
    assert (second.rate_rps, second.requests, second.output_tokens) == (3.5, 50, (64.0,))
    assert second.latency_s["ttft"] == pytest.approx({"mean": 0.04, "p50": 0.038, "p99": 0.09})


def test_guidellm_without_requests_falls_back_to_its_summary(tmp_path: Path, catalog: Catalog) -> None:
    document = json.loads((DATA / "guidellm.json").read_text())
    document["benchmarks"] = document["benchmarks"][1:]
    document["benchmarks"][0]["requests"] = {"successful": 5}
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps(document))
    found = importers.read("auto", [path], H100, catalog)
    assert isinstance(found, MeasuredRuns)
    assert found.runs[0].requests == 50


def test_aiperf_summary_and_records(catalog: Catalog) -> None:
    run = runs_of("auto", H100, catalog, "aiperf.json").runs[0]
    assert (run.requests, run.failed, run.concurrency) == (40, 2, 8)
    assert run.latency_s["tpot"] == pytest.approx({"mean": 0.012, "p50": 0.011, "p99": 0.02})
    run = runs_of("auto", WHOLE, catalog, "aiperf.jsonl").runs[0]
    assert (run.requests, run.failed, run.arrival_s) == (2, 1, (0.0, 0.5))
    assert run.input_tokens == (200.0, 400.0)
    assert run.latency_s["tpot"]["mean"] == pytest.approx(0.012)
    assert run.latency_s["e2e"]["mean"] == pytest.approx(0.31)


def test_aiperf_of_newer_versions_states_its_load_in_phases(tmp_path: Path, catalog: Catalog) -> None:
    """The warm-up's 64 in flight are not the load; several phases that count have no one load."""
    document = json.loads((DATA / "aiperf.json").read_text())
    warmup = {"name": "warmup", "type": "concurrency", "exclude_from_results": True, "concurrency": 64}
    items = {"items": [{"name": "meta-llama/Llama-3.1-8B"}]}
    path = tmp_path / "profile_export_aiperf.json"
    for phases, load in (
        ([{"type": "concurrency", "concurrency": 16}], (16, None)),
        ([{"type": "poisson", "rate": 1.5}], (None, 1.5)),
        ([{"type": "poisson", "rate": 1.5}, {"type": "poisson", "rate": 3.0}], (None, None)),
    ):
        document["input_config"] = {"models": items, "endpoint": {"urls": []}, "phases": [warmup, *phases]}
        path.write_text(json.dumps(document))
        found = importers.read("auto", [tmp_path], H100, catalog)
        assert isinstance(found, MeasuredRuns)
        assert (found.runs[0].concurrency, found.runs[0].rate_rps) == load


def test_inference_perf_counts_in_seconds(tmp_path: Path, catalog: Catalog) -> None:
    """41 sent at 4/s, one failed; TTFT 0.1 s, TPOT 19 ms. A client that kept up with 3 of 4/s sent 3."""
    run = runs_of("auto", WHOLE, catalog, "inference_perf.json").runs[0]
    assert (run.requests, run.failed, run.rate_rps, run.concurrency) == (40, 1, 4.0, None)
    assert (run.input_tokens, run.output_tokens) == ((200.0,), (100.0,))
    assert run.latency_s["ttft"] == pytest.approx(
        {"mean": 0.1, "p50": 0.09, "p90": 0.15, "p99": 0.4, "max": 0.2}
    )
    assert run.latency_s["tpot"]["mean"] == 0.019
    assert any("in bunches" in note for note in run.notes)
    document = json.loads((DATA / "inference_perf.json").read_text())
    good = document["successes"]
    good["prompt_tokens"] = good.pop("prompt_len") | {"total": 8000, "cached": 3200, "uncached": 4800}
    path = tmp_path / "stage_0_lifecycle_metrics.json"
    for load, expected in (
        ({"requested_rate": 4.0, "achieved_rate": 3.0}, (None, 3.0)),
        ({"requested_rate": 4.0, "achieved_rate": 4.0, "concurrency": 8}, (8, None)),
        ({"count": 41}, (None, None)),
    ):
        document["load_summary"] = load
        path.write_text(json.dumps(document))
        found = importers.read("auto", [path], WHOLE, catalog)
        assert isinstance(found, MeasuredRuns)
        assert (found.runs[0].concurrency, found.runs[0].rate_rps) == expected
        assert any("3200 prompt tokens came from the prefix cache" in note for note in found.runs[0].notes)


def test_the_folder_of_a_sweep_becomes_one_runs_json(tmp_path: Path, catalog: Catalog) -> None:
    """As `vllm bench sweep serve` leaves it: per combination its runs, a summary that repeats them, a warm-up
    and a failure. Parameters stand in the runs as they were given, here with dashes.
    """
    row = json.loads((DATA / "vllm_serve.json").read_text())
    for seats in (4, 16):
        folder = tmp_path / f"SERVE--max-num-seqs={seats}"
        folder.mkdir()
        runs = [row | {"max_concurrency": seats, "max-num-seqs": seats, "run_number": n} for n in (0, 1)]
        for n, run in enumerate(runs):
            (folder / f"run={n}.json").write_text(json.dumps(run))
        (folder / "summary.json").write_text(json.dumps(runs))
        (folder / "warmup.json").write_text(json.dumps(row | {"run_number": -1}))
        (folder / "run.failure.json").write_text(json.dumps({"error": "timeout"}))
    found = importers.read("auto", [tmp_path], H100, catalog)
    assert isinstance(found, MeasuredRuns)
    assert [(run.concurrency, run.max_num_seqs) for run in found.runs] == [(16, 16), (16, 16), (4, 4), (4, 4)]
    assert found.runs[0].name == "SERVE--max-num-seqs=16/run=0.json"
    assert len({run.name for run in found.runs}) == 4


def test_a_folder_of_benchmarks_is_read_whole(tmp_path: Path, catalog: Catalog) -> None:
    row = json.loads((DATA / "vllm_serve.json").read_text())
    for seats in (2, 8):
        (tmp_path / f"vllm-infqps-concurrency{seats}.json").write_text(
            json.dumps(row | {"max_concurrency": seats})
        )
    found = importers.read("auto", [tmp_path], H100, catalog)
    assert isinstance(found, MeasuredRuns)
    assert [run.concurrency for run in found.runs] == [2, 8]
    (tmp_path / "empty").mkdir()
    for name in ("auto", "inference-perf", "splitwise"):
        with pytest.raises(InputError, match="is a folder without results of"):
            importers.read(name, [tmp_path / "empty"], H100, catalog)


def test_guidellm_that_kept_some_requests_is_read_by_its_summary(tmp_path: Path, catalog: Catalog) -> None:
    """One request of 50 is in the file: the summary knows all. Newer files name the LLM in config.spec."""
    document = json.loads((DATA / "guidellm.json").read_text())
    kept, whole = document["benchmarks"]
    whole["metrics"]["request_totals"] = {"successful": 50, "errored": 0}
    whole["requests"] = {"successful": kept["requests"]["successful"][:1], "errored": []}
    document |= {"benchmarks": [whole], "config": {"kind": "benchmark", "spec": {"backend": {"model": LLM}}}}
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps(document))
    found = importers.read("auto", [path], H100, catalog)
    assert isinstance(found, MeasuredRuns)
    assert (found.llm, found.runs[0].requests, found.runs[0].output_tokens) == (LLM, 50, (64.0,))


def test_scrapes_give_means_between_them_and_bounds_at_edges(catalog: Catalog) -> None:
    """100 requests more: 12 s of TTFT, 60,000 prompt tokens. 60 of them below 0.1 s, 95 below 0.25 s: the
    99th lies in the bucket without an end, so nothing is said of it.
    """
    facts = replace(H100, duration_s=50.0)
    run = runs_of("prometheus", facts, catalog, "metrics_before.txt", "metrics_after.txt").runs[0]
    assert (run.requests, run.rate_rps, run.kv_tokens) == (100, 2.0, 400000)
    assert run.latency_s["ttft"] == pytest.approx(
        {"mean": 0.12, "p50_at_most": 0.1, "p90_at_most": 0.25, "p95_at_most": 0.25}
    )
    assert run.latency_s["tpot"] == pytest.approx({"mean": 0.012})
    assert (run.input_tokens, run.output_tokens) == ((600.0,), (128.0,))


def test_scrapes_in_the_wrong_order_are_refused(catalog: Catalog) -> None:
    with pytest.raises(InputError, match="fell: the files are in the wrong order"):
        runs_of("prometheus", H100, catalog, "metrics_after.txt", "metrics_before.txt")


def test_a_scrape_alone_does_not_know_its_load(catalog: Catalog) -> None:
    found = runs_of("auto", H100, catalog, "metrics_after.txt")
    assert any("the load is not known" in note for note in found.notes)
    assert found.runs[0].load == "unknown load"


def test_measured_points_of_aiconfigurator(catalog: Catalog) -> None:
    """Of six rows two are vLLM runs of this LLM on four H100."""
    facts = StatedSetup(llm="Qwen/Qwen3-32B", gpu="h100-80g", tp=4, length_spread_frac=0.2)
    found = runs_of("auto", facts, catalog, "silicon_sample.csv")
    assert [run.concurrency for run in found.runs] == [8, 16]
    assert found.runs[0].latency_s == {"ttft": {"mean": 0.126}, "tpot": {"mean": 0.0115}}
    assert found.runs[0].length_spread_frac == 0.2
    with pytest.raises(InputError, match="holds no vLLM runs of Qwen/Qwen3-32B on 8 x h100-80g"):
        runs_of("auto", replace(facts, tp=8), catalog, "silicon_sample.csv")


def test_kernel_times_of_aiconfigurator_come_without_a_file(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(llm: object, gpu: object, tp: int) -> StepTable:
        return StepTable(pd.DataFrame([[1, 8, 0, 36, 0, 0, 0.01]], columns=list(COLUMNS)), {"tp": str(tp)})

    monkeypatch.setattr("planner.importers.aiconfigurator.silicon_table", table)
    found = steps_of("aiconfigurator", WHOLE, catalog)
    assert found.about == {"tp": "1", "host_overhead": NOT_INCLUDED}


def test_rows_of_a_csv_are_runs(catalog: Catalog) -> None:
    found = runs_of("auto", WHOLE, catalog, "runs.csv")
    assert [(run.requests, run.concurrency) for run in found.runs] == [(64, 8), (128, 16)]
    assert found.runs[1].latency_s == {"ttft": {"mean": 0.15}, "tpot": {"mean": 0.011}}


@pytest.mark.parametrize("file", ["vllm_serve.json", "guidellm.json", "runs.csv", "aiperf.jsonl"])
def test_facts_that_are_missing_are_one_line(file: str, catalog: Catalog) -> None:
    with pytest.raises(InputError, match=r"does not say what was measured; add .*--gpu --tp$"):
        importers.read("auto", [DATA / file], StatedSetup(), catalog)


def test_runs_come_back_from_their_file(tmp_path: Path, catalog: Catalog) -> None:
    for file in ("vllm_serve_detailed.json", "guidellm.json", "aiperf.jsonl", "metrics_after.txt"):
        found = runs_of("auto", replace(WHOLE, length_spread_frac=0.1), catalog, file)
        path = tmp_path / "runs.json"
        path.write_text(found.to_json())
        assert read_runs(path) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latency_s": {"ttft": {"mean": 0.0}}}, "ttft mean is 0.0, must be > 0 s"),
        ({"latency_s": {"ttft": {"p101": 0.1}}}, "'p101' is not mean, max or a percentile"),
        ({"latency_s": {}}, "holds no latency"),
        ({"input_tokens": [1, 2, 3]}, "input_tokens has 3 values, must have 1 or 10"),
        ({"rate_rps": 0}, "rate_rps is 0.0, must be finite and > 0"),
        ({"concurrency": 1.5}, "expected a whole number"),
    ],
)
def test_runs_that_make_no_sense_name_the_field(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    run: dict[str, Any] = {
        "name": "a",
        "requests": 10,
        "input_tokens": 5,
        "output_tokens": 5,
        "latency_s": {"ttft": {"mean": 0.1}},
    }
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"llm": LLM, "gpu": "h100-80g", "tp": 1, "runs": [run | change]}))
    with pytest.raises(InputError, match=message):
        read_runs(path)


# --- fit


def true_table(
    rng: np.random.Generator, *, rows: int = 300, about: dict[str, str] | None = None
) -> StepTable:
    """Prefills, decodes and mixed steps with the times of TRUE."""
    kind = np.arange(rows) % 3
    new = np.where(kind == 1, 0, np.rint(np.exp(rng.uniform(2, 8.3, rows))))
    prefills = (new > 0).astype(float)
    decodes = np.where(kind == 0, 0.0, rng.integers(1, 200, rows).astype(float))
    pairs, kv_tokens = new * rng.uniform(500, 5000, rows), decodes * rng.uniform(100, 4000, rows)
    pairs = np.maximum(pairs, new * (new + 1) / 2)
    t_s = TRUE.step_s(new + decodes, pairs, decodes, kv_tokens, prefills)
    steps = np.column_stack([prefills, new, 0 * new, pairs, decodes, kv_tokens, t_s])
    return StepTable(
        pd.DataFrame(steps, columns=list(COLUMNS)), about or {"llm": LLM, "gpu": "h100-80g", "tp": "1"}
    )


def usual_s(latency: StepLatency) -> Array:
    return latency.step_s(np.array([100.0, 512.0, 2000.0, 64.0]), 0.0, np.array([0.0, 0.0, 0.0, 64.0]), 6e4)


def test_fit_recovers_the_times_and_goes_into_a_catalog_and_a_fleet(tmp_path: Path) -> None:
    """Table -> fit -> file -> catalog and fleet.yaml: the same step times everywhere."""
    (tmp_path / "table.csv").write_text(true_table(np.random.default_rng(0)).to_csv())
    fitted = fit_table(read_step_table(tmp_path / "table.csv"), StatedSetup(), read_catalog(), where="t")
    assert usual_s(fitted.latency) == pytest.approx(usual_s(TRUE), rel=0.03)
    assert fitted.errors["all"].mape_frac < 0.03
    (tmp_path / "latency").mkdir()
    for path in (tmp_path / "latency" / "own.yaml", tmp_path / "fit.yaml"):
        path.write_text(fit_yaml(fitted, command="test"))
    known = read_catalog(tmp_path)
    latency = known.step_latency(known.llm(LLM), known.gpu("h100-80g"), 1)
    assert usual_s(latency) == pytest.approx(usual_s(fitted.latency), rel=1e-5)
    assert latency.basis == fitted.latency.basis
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(f"llm: {LLM}\nworkers: [{{gpu: h100-80g, latency: fit.yaml}}]\n")
    assert read_fleet(fleet, read_catalog()).pools[0].type.latency == latency


def test_choosing_among_families_says_what_each_missed_by() -> None:
    """The times are of the five-number form, so some family meets them on held-out steps."""
    table = true_table(np.random.default_rng(0), rows=150)
    fitted = fit_table(table, StatedSetup(), read_catalog(), where="t", choose_family=True)
    assert {"aladdin", "distserve", "splitwise", "five numbers", "vidur"} <= set(fitted.families)
    assert fitted.errors["all"].mape_frac < 0.03
    assert fitted.latency.mape_frac == fitted.errors["all"].mape_frac
    assert any("held-out steps" in note for note in fitted.notes)
    assert set(fitted.as_dict()["families"]) == set(fitted.families)


@pytest.mark.parametrize(("host", "added"), [("included", -0.002), (NOT_INCLUDED, 0.0)])
def test_host_overhead_is_told_apart_or_added(host: str, added: float) -> None:
    """2 ms of every measured step are the host's; kernel times do not have them yet."""
    about = {"llm": LLM, "gpu": "h100-80g", "tp": "1", "host_overhead": host}
    table = true_table(np.random.default_rng(1), about=about)
    fitted = fit_table(table, StatedSetup(), read_catalog(), where="t", host_overhead_s=0.002).latency
    assert fitted.h_s == 0.002
    assert usual_s(fitted) - 0.002 == pytest.approx(usual_s(TRUE) + added, rel=0.04)


@pytest.mark.parametrize(
    ("host_is", "expected_s"), [("step less forward pass", 0.003), ("0: kernels alone", 0)]
)
def test_host_overhead_of_a_profile_is_its_own(host_is: str, expected_s: float) -> None:
    """The median of 2, 3 and 40 ms; kernel times have none, whatever the column says."""
    table = true_table(np.random.default_rng(4))
    steps = table.steps.assign(host_s=np.array([0.002, 0.003, 0.04] * 100))
    about = {
        **table.about,
        "host_s": host_is,
        "engine": "vllm",
        "device": "NVIDIA H100",
        "date": "2026-11-19",
    }
    fitted = fit_table(StepTable(steps, about), StatedSetup(), read_catalog(), where="t.csv")
    assert fitted.latency.h_s == pytest.approx(expected_s)
    assert fitted.source == "t.csv, vllm on NVIDIA H100"
    assert yaml.safe_load(fit_yaml(fitted, command="c"))["date"] == "2026-11-19"


def test_negative_host_overhead_is_refused() -> None:
    with pytest.raises(InputError, match=r"host overhead is -0\.001 s, must be >= 0"):
        fit_table(
            true_table(np.random.default_rng(5)),
            StatedSetup(),
            read_catalog(),
            where="t",
            host_overhead_s=-1e-3,
        )


@pytest.mark.parametrize(
    ("keep", "wanted"),
    [
        (lambda s: s.n_decode == 0, "decodes without prefill at two or more batch sizes"),
        (lambda s: s.n_prefill == 0, "prefills without decodes at three or more prompt lengths"),
        (lambda s: s.index < 9, "1 more distinct steps"),
    ],
)
def test_tables_that_settle_nothing_say_what_to_measure(
    keep: Callable[[pd.DataFrame], pd.Series[bool]], wanted: str
) -> None:
    table = true_table(np.random.default_rng(2))
    table = StepTable(table.steps[keep(table.steps)].reset_index(drop=True), table.about)
    with pytest.raises(InputError, match=f"do not settle the fit; measure {wanted}"):
        fit_table(table, StatedSetup(), read_catalog(), where="t")


# --- the commands


def test_commands_from_a_foreign_file_to_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """import -> fit -> simulate: one request on an idle worker takes TRUE's prefill and decode steps."""
    monkeypatch.chdir(tmp_path)
    rows = ["device,model,tp,kind,n_prefill,chunk,prefix,n_decode,ctx,total_ms"]
    for chunk in (16, 32, 64, 100, 128, 192, 256, 512, 768, 1024, 2048, 4096):
        ms = 1e3 * float(TRUE.step_s(chunk, chunk * (chunk + 1) / 2, prefills=1))
        rows.append(f"h100-80g,{LLM},1,prefill,1,{chunk},0,0,0,{ms!r}")
    for decodes in (1, 8, 64, 128, 256):
        for context in (64, 500, 2000, 4000):
            ms = 1e3 * float(TRUE.step_s(decodes, decodes=decodes, kv_tokens=decodes * context))
            rows.append(f"h100-80g,{LLM},1,decode,0,0,0,{decodes},{context},{ms!r}")
    Path("steps.csv").write_text("\n".join(rows))
    Path("fleet.yaml").write_text(
        f"llm: {LLM}\nworkers: [{{gpu: h100-80g, latency: fit.yaml}}]\nengine: none\n"
    )
    Path("trace.csv").write_text("timestamp,input_tokens,output_tokens\n0,512,11\n100,512,11\n")
    invoke = CliRunner().invoke
    assert invoke(app, ["import", "auto", "steps.csv", "-o", "table.csv"]).exit_code == 0
    result = invoke(app, ["fit", "table.csv", "-o", "fit.yaml", "--json"])
    assert json.loads(result.stdout)["errors"]["all"]["mape_frac"] < 0.05
    again = ["fit", "table.csv", "-o", "other fit.yaml", "--host-overhead", "2 ms"]
    assert invoke(app, again).exit_code == 0
    command = yaml.safe_load(Path("other fit.yaml").read_text())["command"]
    assert shlex.split(command) == ["plan", *again]
    result = invoke(app, ["simulate", "--fleet", "fleet.yaml", "--trace", "trace.csv", "--json"])
    simulated = json.loads(result.stdout)
    prefill_s = float(TRUE.step_s(512, 512 * 513 / 2, prefills=1))
    decode_s = float(TRUE.step_s(1, decodes=1, kv_tokens=518))
    assert simulated["ttft_s"]["mean"] == pytest.approx(prefill_s, rel=0.05)
    assert simulated["tpot_s"]["mean"] == pytest.approx(decode_s, rel=0.05)


def test_import_of_a_benchmark_prints_its_notes(tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    arguments = [
        "import",
        "auto",
        str(DATA / "vllm_serve.json"),
        "-o",
        str(out),
        "--gpu",
        "h100",
        "--tp",
        "1",
    ]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert summary["kind"] == "measured runs"
    assert summary["runs"] == ["vllm_serve.json: 100 requests, concurrency 16"]
    assert len(summary["notes"]) == 2
    assert read_runs(out).gpu == "h100-80g"


@pytest.mark.parametrize(
    "arguments",
    [
        ["import", "nothing", "x.csv"],
        ["import", "auto"],
        ["import", "auto", "absent.json"],
        ["import", "splitwise", "bad.csv"],
        ["import", "vllm-bench-serve", "bad.csv", "--gpu", "h100-80g"],
        ["fit", "bad.csv"],
        ["fit", "bad.csv", "--host-overhead", "soon"],
        ["calibrate", "bad.csv", "--llm", LLM, "--gpu", "h100-80g", "--tp", "1"],
        ["calibrate", "absent.json"],
    ],
)
def test_bad_input_writes_nothing(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text("model,hardware\n1\n")
    result = CliRunner().invoke(app, [*arguments, "-o", "out.file"])
    assert isinstance(result.exception, PlannerError)
    assert "\n" not in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.csv"]


# --- nothing but a PlannerError, whatever the file holds

KEYS = [
    *sorted({key for known in importers.FORMATS.values() for marks in known.marks for key in marks}),
    "ttfts",
    "itls",
    "output_lens",
    "input_lens",
    "start_times",
    "errors",
    "max_concurrency",
    "mean_ttft_ms",
    "requests",
    "successful",
    "config",
    "strategy",
    "type_",
    "streams",
    "request_rate",
    "model_id",
    "metrics",
    "unit",
    "value",
    "avg",
    "time_to_first_token",
    "inter_token_latency",
    "percentiles",
    "runs",
    "latency_s",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**6)
    | st.integers()
    | st.floats()
    | st.sampled_from(["inf", "ms", "concurrent", "h100-80g", LLM, "1", ""])
    | st.text(max_size=4)
)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=30,
)
JSON_FORMATS = ("auto", "vllm-bench-serve", "vllm-bench-latency", "guidellm", "aiperf", "inference-perf")
KNOWN = read_catalog()
ALL = StatedSetup(LLM, "h100-80g", 1, None, None, 8, 10.0, 10.0, 5.0)


def survives(name: str, path: Path, facts: StatedSetup) -> None:
    try:
        importers.read(name, [path], facts, KNOWN)
    except PlannerError:
        pass


@settings(max_examples=40)
@given(content=st.binary(max_size=200), facts=st.sampled_from([ALL, StatedSetup()]))
def test_random_bytes(content: bytes, facts: StatedSetup, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes"
    path.write_bytes(content)
    for name in ("auto", *importers.FORMATS):
        survives(name, path, facts)
    for read in (read_runs, read_step_table):
        try:
            read(path)
        except PlannerError:
            pass


@pytest.mark.long
@settings(max_examples=150)
@given(document=DOCUMENTS)
def test_random_json(document: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "random.json"
    path.write_text(json.dumps(document))
    for name in JSON_FORMATS:
        survives(name, path, ALL)
    try:
        read_runs(path)
    except PlannerError:
        pass


@pytest.mark.long
@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize(
    "file",
    ["vllm_serve.json", "vllm_serve_detailed.json", "guidellm.json", "aiperf.json", "inference_perf.json"],
)
def test_benchmarks_with_a_value_replaced(
    file: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The right keys with wrong values reach deeper than random keys do."""
    document = json.loads((DATA / file).read_text())
    place: Any = document
    for _ in range(data.draw(st.integers(1, 6))):
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
            place[key] = data.draw(DOCUMENTS)
            break
        place = place[key]
    path = tmp_path_factory.getbasetemp() / "replaced.json"
    path.write_text(json.dumps(document))
    survives("auto", path, ALL)


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize(
    "file",
    [
        "splitwise.csv",
        "vidur_steps.csv",
        "silicon_sample.csv",
        "runs.csv",
        "metrics_after.txt",
        "aiperf.jsonl",
        "llmservingsim_attention.csv",
        "llmservingsim_dense.csv",
    ],
)
def test_text_with_a_piece_replaced(
    file: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = (DATA / file).read_text()
    start = data.draw(st.integers(0, len(text) - 1))
    end = min(len(text), start + data.draw(st.integers(0, 12)))
    piece = data.draw(st.sampled_from(["", "-1", "nan", "1e400", ",", '"', "\n", "x", "{", "9" * 30, "0"]))
    path = tmp_path_factory.getbasetemp() / f"replaced-{file}"
    path.write_text(text[:start] + piece + text[end:])
    survives(importers.detect_format(DATA / file), path, ALL)
    survives("auto", path, StatedSetup(gpu="h100-80g"))


def test_deep_json_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    with pytest.raises(InputError, match="is not JSON"):
        importers.detect_format(path)


SHARED = Path(__file__).parents[3] / "shared" / "reference"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the checkout")


@pytest.mark.shared
@needs_shared
@pytest.mark.parametrize("gpu", ["a100-80g", "h100-80g"])
def test_imported_splitwise_fits_are_the_shipped_ones(gpu: str) -> None:
    """Two ways to the same numbers: plan import and plan fit, and profiling.shipped."""
    facts = StatedSetup(llm="bigscience/bloom", gpu=gpu)
    table = importers.read("auto", [SHARED / "splitwise" / "perf_model.csv"], facts, KNOWN)
    assert isinstance(table, StepTable)
    fitted = fit_table(table, facts, KNOWN, where="t").latency
    shipped = KNOWN.step_latency(KNOWN.llm("bigscience/bloom"), KNOWN.gpu(gpu), 8)
    assert fitted.f_s == pytest.approx(shipped.f_s, rel=1e-6)
    assert (fitted.a_s, fitted.b_s, fitted.d_s) == pytest.approx(
        (shipped.a_s, shipped.b_s, shipped.d_s), rel=1e-6
    )
    assert fitted.mape_frac == pytest.approx(shipped.mape_frac, abs=1e-3)


@pytest.mark.shared
@needs_shared
@pytest.mark.parametrize("path", sorted((SHARED / "vidur").glob("oracle_*.csv")), ids=lambda path: path.stem)
def test_steps_of_vidur_are_fitted(path: Path) -> None:
    """577 steps each, computed by Vidur: at most 6 % off on steps held out."""
    llm = "meta-llama/Llama-2-70b-hf" if "70b" in path.stem else LLM  # only 70B is in the catalog
    facts = StatedSetup(llm=llm, gpu=f"{path.stem.split('_')[-3]}-80g")
    table = importers.read("auto", [path], facts, KNOWN)
    assert isinstance(table, StepTable)
    assert len(table.y) == 577
    assert fit_table(table, facts, KNOWN, where="t").errors["all"].mape_frac < 0.06


@pytest.mark.shared
@needs_shared
def test_a_scrape_of_a_real_vllm(catalog: Catalog) -> None:
    """30 requests, 5.63 s of TTFT in all; none waited 0.5 s for its first token."""
    facts = replace(WHOLE, duration_s=30.0)
    found = importers.read("auto", [SHARED / "vllm_cpu" / "metrics_sample.txt"], facts, catalog)
    assert isinstance(found, MeasuredRuns)
    run = found.runs[0]
    assert (run.requests, run.rate_rps) == (30, 1.0)
    assert run.latency_s["ttft"]["mean"] == pytest.approx(5.630633 / 30)
    assert run.latency_s["ttft"]["p99_at_most"] == 0.5
    assert run.latency_s["tpot"]["mean"] == pytest.approx(0.249095 / 30, rel=1e-5)


def test_a_fit_file_is_yaml_of_plain_values() -> None:
    fitted = fit_table(true_table(np.random.default_rng(3)), StatedSetup(), read_catalog(), where="t")
    document = yaml.safe_load(fit_yaml(fitted, command="c", date="2026-11-20"))
    assert list(document) == ["llm", "gpu", "source", "date", "command", "fits"]
    assert "uncertainty_frac" not in document["fits"][0]


def test_a_run_is_checked_when_it_is_made() -> None:
    with pytest.raises(InputError, match="run a: requests is 0"):
        MeasuredRun("a", 0, (1,), (1,), {"ttft": {"mean": 1.0}})
    with pytest.raises(InputError, match="concurrency is 2000000, must be from 1 to 1000000"):
        MeasuredRun("a", 1, (1,), (1,), {"ttft": {"mean": 1.0}}, concurrency=2_000_000)


def test_a_range_of_prometheus_becomes_runs_of_one_engine(tmp_path: Path, catalog: Catalog) -> None:
    """Two engines, 4 and 2 requests/s in all in the first and second hour; prompts half 1-10, half 11-20."""
    t = np.arange(0.0, 7260.0, 60.0)
    done = np.interp(t, [0, 3600, 7200], [0, 7200, 10800])
    rows = []
    for instance in ("a", "b"):
        labels = {"instance": instance, "model_name": LLM}
        for name, values, more in [
            ("vllm:request_success_total", done, {}),
            *_buckets("vllm:request_prompt_tokens", done, {"10": 0.5, "20": 1.0, "+Inf": 1.0}, 10.5),
            *_buckets("vllm:request_generation_tokens", done, {"5": 1.0, "+Inf": 1.0}, 4.0),
            *_buckets("vllm:time_to_first_token_seconds", done, {"0.5": 1.0, "+Inf": 1.0}, 0.25),
        ]:
            values_s = [[float(s), str(float(v))] for s, v in zip(t, values / 2, strict=True)]
            rows.append({"metric": {"__name__": name} | labels | more, "values": values_s})
    path = tmp_path / "range.json"
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": rows}}))
    found = importers.read("auto", [path], H100, catalog)
    assert isinstance(found, MeasuredRuns)
    assert found.llm == LLM
    assert [run.rate_rps for run in found.runs] == [0.5, 1.0]
    assert [run.requests for run in found.runs] == [1800, 2000]
    for run in found.runs:
        assert run.latency_s["ttft"]["mean"] == pytest.approx(0.25)
        assert np.mean(run.input_tokens) == pytest.approx(10.5, abs=0.1)
        assert np.mean(run.output_tokens) == pytest.approx(4, abs=0.1)
        assert np.median(run.input_tokens) == pytest.approx(10.5, abs=1)


def test_an_engine_that_replaces_another_is_no_further_one(tmp_path: Path, catalog: Catalog) -> None:
    """1 request/s on one engine at a time, replaced each hour. All three were counted: 0.33 requests/s."""
    rows = []
    for hour in range(3):
        t = 3600.0 * hour + np.arange(0.0, 3660.0, 60.0)
        done, labels = t - t[0], {"instance": f"pod-{hour}", "model_name": LLM}
        for name, values, more in [
            ("vllm:request_success_total", done, {}),
            *_buckets("vllm:request_prompt_tokens", done, {"20": 1.0, "+Inf": 1.0}, 10.0),
            *_buckets("vllm:request_generation_tokens", done, {"5": 1.0, "+Inf": 1.0}, 4.0),
            *_buckets("vllm:time_to_first_token_seconds", done, {"0.5": 1.0, "+Inf": 1.0}, 0.25),
        ]:
            values_s = [[float(s), str(float(v))] for s, v in zip(t, values, strict=True)]
            rows.append({"metric": {"__name__": name} | labels | more, "values": values_s})
    path = tmp_path / "range.json"
    path.write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": rows}}))
    found = importers.read("auto", [path], H100, catalog)
    assert isinstance(found, MeasuredRuns)
    assert [run.rate_rps for run in found.runs] == pytest.approx([1.0] * 3)


def _buckets(
    name: str, done: Any, share: dict[str, float], mean: float
) -> list[tuple[str, Any, dict[str, str]]]:
    buckets = [(f"{name}_bucket", done * frac, {"le": le}) for le, frac in share.items()]
    return [*buckets, (f"{name}_sum", done * mean, {}), (f"{name}_count", done, {})]
