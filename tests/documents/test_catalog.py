"""Catalogs: the shipped rows against published figures, and refusal of rows that make no sense."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from shares import some

from planner.documents import catalog as catalog_module
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.fits import Split, read_fits, read_header
from planner.domain import Limit
from planner.errors import CatalogError, InputError
from planner.files.checked_files import repository_dir
from planner.files.document_values import Wording
from planner.models.all2all import Exchange
from planner.models.latency import StepLatency


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return read_catalog()


PUBLISHED = {  # parameters in billions, as on the model cards
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.0,
    "llama-2-70b": 69.0,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 405.9,
    "qwen3-32b": 32.8,
    "qwen-72b": 72.3,
    "mistral-7b": 7.24,
    "mixtral-8x7b": 46.7,
    "opt-13b": 12.9,
    "opt-66b": 65.7,
    "opt-175b": 175.0,
    "bloom-176b": 176.2,
    "codellama-34b": 33.7,
    "yi-34b": 34.4,
    "mistral-small": 23.6,
    "qwen2.5-7b": 7.61,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-30b-a3b": 30.5,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30.5,
    "qwen3-235b-a22b": 235.0,
    "llama-3.1-8b-fp8": 8.03,
    "llama-3.1-70b-fp8": 70.6,
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": 8.03,
    "RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8": 70.6,
    "qwen3-8b-fp8": 8.2,
    "qwen3-14b-fp8": 14.8,
    "qwen3-32b-fp8": 32.8,
    "qwen3-30b-a3b-fp8": 30.5,
    "qwen3-235b-a22b-fp8": 235.0,
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": 235.0,
    "minimax-m2.5": 230.0,
    # without drafting layers; LLMs with eyes: encoders included, as transformers 5 builds them
    "deepseek-v3": 671.0,
    "deepseek-r1": 671.0,
    "deepseek-v3.2": 671.0,
    "deepseek-v4-flash": 284.0,
    "deepseek-v4-pro": 1600.0,
    "deepseek-v3.1-nvfp4": 671.0,
    "deepseek-v3.2-nvfp4": 671.0,
    "deepseek-v4-flash-nvfp4": 284.0,
    "deepseek-v4-pro-nvfp4": 1600.0,
    "kimi-k2": 1040.0,  # arXiv:2507.20534
    "kimi-k2.5": 1040.0,
    "kimi-k2.5-nvfp4": 1040.0,
    "kimi-k2.6-nvfp4": 1040.0,
    "kimi-k3": 2780.0,  # arXiv:2607.24653, table 1
    "glm-5": 744.0,
    "glm-5-fp8": 744.0,
    "glm-5-nvfp4": 744.0,
    "glm-5.1-fp8": 744.0,
    "glm-5.1-nvfp4": 744.0,
    "glm-5.2": 744.0,
    "glm-5.2-fp8": 744.0,
    "glm-5.2-nvfp4": 744.0,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.7,
    "qwen3-coder": 480.0,
    "qwen3-235b-a22b-nvfp4": 235.0,
    "qwen3-vl-2b": 2.128,
    "qwen3-vl-4b": 4.438,
    "qwen3-vl-8b": 8.767,
    "qwen3-vl-32b": 33.36,
    "qwen3-vl-30b-a3b": 31.07,
    "qwen3-vl-235b-a22b": 235.7,
    "qwen3.5-27b": 27.36,
    "qwen3.5-35b-a3b": 35.11,
    "qwen3.5-122b-a10b": 122.6,
    "qwen3.5": 397.0,
    "qwen3.5-122b-a10b-nvfp4": 122.6,
    "qwen3.5-397b-a17b-fp8": 397.0,
    "qwen3.5-397b-a17b-nvfp4": 397.0,
    "qwen3.6-27b-nvfp4": 27.36,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "llama-4-scout": 108.6,
    "llama-4-maverick": 401.6,
    "minimax-m2.7": 230.0,
    "minimax-m2.5-nvfp4": 230.0,
    "minimax-m3": 428.0,
    "minimax-m3-nvfp4": 428.0,
    "gemma-4-26b-a4b": 25.81,
    "gemma-4-26b-a4b-nvfp4": 25.81,
    "gemma-4-31b": 31.27,
    "gemma-4-31b-nvfp4": 31.27,
    "nemotron-3-nano": 31.6,
    "nemotron-3-nano-nvfp4": 31.6,
    "nemotron-3-super": 120.6,
    "nemotron-3-super-fp8": 120.6,
    "nemotron-3-ultra": 550.0,
    "nemotron-3-ultra-nvfp4": 550.0,
    "nemotron-3.5-lightning-nvfp4": 31.6,
    "nemotron-h-56b": 56.3,
    "nemotron-super-49b": 49.9,
    "mixtral-8x22b": 140.6,
    "mimo-7b": 7.62,
    "mimo-v2-flash": 309.0,
    "step-3.7-flash": 198.0,
    "step-3.7-flash-fp8": 198.0,
    "gemma-3-27b": 27.43,
    "phi-4": 14.66,
    "glm-4.5": 355.0,
    "glm-4.5-air": 106.0,
    "qwen3-next": 80.0,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_count(catalog: Catalog, name: str) -> None:
    assert catalog.llm(name).parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


def test_every_llm_row_is_checked_against_a_published_count(catalog: Catalog) -> None:
    assert {catalog.llm(name).name for name in PUBLISHED} == set(catalog.llms)


@pytest.mark.parametrize(
    ("name", "dense_tflops", "fp8_tflops", "memory_bytes", "link_bytes_per_s"),
    [
        ("v5e", 197, None, 16 * 2**30, 400e9 / 2),
        ("v5p", 459, None, 95 * 2**30, 1200e9 / 2),
        ("trillium", 918, None, 32 * 2**30, 800e9 / 2),
        ("ironwood", 2307, 4614, 192 * 2**30, 1200e9 / 2),
    ],
)
def test_tpus_are_as_google_documents_them(
    catalog: Catalog,
    name: str,
    dense_tflops: float,
    fp8_tflops: float | None,
    memory_bytes: int,
    link_bytes_per_s: float,
) -> None:
    """docs.cloud.google.com/tpu/docs, of 2026: per chip; its ICI is given for both directions."""
    gpu = catalog.gpu(name)
    assert gpu.dense_flops_per_s == dense_tflops * 1e12
    assert gpu.fp8_flops_per_s == (fp8_tflops and fp8_tflops * 1e12)
    assert (gpu.memory_bytes, gpu.link_bytes_per_s) == (memory_bytes, link_bytes_per_s)
    assert gpu.unchecked and gpu.gpus_per_node in (4, 8)


def test_kv_bytes_of_llama_3_1_70b(catalog: Catalog) -> None:
    """2 (keys, values) x 80 layers x 8 heads x 128 x 2 bytes = 327,680; BLOOM, MHA: 2 x 70 x 14336 x 2."""
    assert catalog.llm("llama-3.1-70b").kv_bytes_per_token == 327_680
    assert catalog.llm("bloom").kv_bytes_per_token == 4_014_080


@pytest.mark.parametrize(
    ("name", "fp4_flops_per_s", "memory_bytes"),
    [("b200", 9e15, 183359 * 2**20), ("b300", 14e15, 275040 * 2**20), ("gb200", 10e15, 189471 * 2**20)],
)
def test_fp4_and_memory_of_blackwell(
    catalog: Catalog, name: str, fp4_flops_per_s: float, memory_bytes: int
) -> None:
    """Dense fp4 of the data sheets, memory as nvidia-smi reports it (AIConfigurator's system files)."""
    gpu = catalog.gpu(name)
    assert (gpu.fp4_flops_per_s, gpu.memory_bytes) == (fp4_flops_per_s, memory_bytes)
    assert gpu.fp8_flops_per_s == 2 * gpu.dense_flops_per_s and not gpu.unchecked


def test_a_gpu_without_fp4_has_no_rate_of_it(catalog: Catalog) -> None:
    assert catalog.gpu("h100").fp4_flops_per_s is None


def test_units_of_an_h100(catalog: Catalog) -> None:
    """81,559 MiB x 2^20, 3.35 TB/s, 989.4 TFLOP/s dense, 450 GB/s each way, 700 W."""
    gpu = catalog.gpu("h100-80g")
    assert gpu.memory_bytes == 81_559 * 2**20
    assert (gpu.bandwidth_bytes_per_s, gpu.dense_flops_per_s) == (3.35e12, 989.4e12)
    assert (gpu.link_bytes_per_s, gpu.power_w, gpu.gpus_per_node) == (450e9, 700, 8)
    assert (gpu.node_selector, gpu.base) == ("NVIDIA-H100-80GB-HBM3", "h100-80g")


def test_drivers_never_report_less_than_nine_tenths_of_what_vendors_state() -> None:
    """A slip between GB and GiB is 7 %; one between two rows is more."""
    rows = yaml.safe_load((repository_dir("catalogs") / "gpus.yaml").read_text())
    for row in rows.values():
        if "cap_of" not in row:
            stated_gb, reported_mib = (int(row[key].split()[0]) for key in ("memory_vendor", "memory"))
            assert 0.99 < reported_mib * 2**20 / (stated_gb * 1e9) < 1.08


@pytest.mark.parametrize(
    ("cap_w", "slowdown"), [(550, 1 + 0.3 * 150 / 350), (450, 1 + 0.3 * 250 / 350), (350, 1.3)]
)
def test_a_cap_slows_prefill_linearly_and_leaves_the_rest(
    catalog: Catalog, cap_w: int, slowdown: float
) -> None:
    """On the line through (700 W, 1.0) and (350 W, 1.3); tokens, price and memory as uncapped."""
    capped, base = catalog.gpu(f"h100-80g@{cap_w}W"), catalog.gpu("h100-80g")
    assert capped.prefill_slowdown == pytest.approx(slowdown, abs=1e-4)
    assert (capped.power_w, capped.decode_slowdown, capped.base) == (cap_w, 1.0, "h100-80g")
    assert (capped.price_usd_per_h, capped.memory_bytes) == (base.price_usd_per_h, base.memory_bytes)


def test_any_gpu_may_be_named_with_a_power_limit(catalog: Catalog) -> None:
    """300 of an A100's 400 W is half of the way to half the power: prefills take 1.15 times as long."""
    capped = catalog.gpu("A100@300W")
    assert (capped.name, capped.base, capped.power_w, capped.board_w) == (
        *("a100-80g@300W", "a100-80g"),
        *(300.0, 400.0),
    )
    assert capped.prefill_slowdown == pytest.approx(1.15)
    assert catalog.gpus["a100-80g@300W"] == capped and "a100-80g@300W" not in list(catalog.gpus)
    assert catalog.provenance["a100-80g@300W"].offers == catalog.provenance["a100-80g"].offers
    assert catalog.gpu("a100@400w") == catalog.gpu("a100")
    assert catalog.gpu("h100-80g@450W").prefill_slowdown == 1.2143, "a row comes before the model"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100@900W", "h100-80g@900W: expected a limit of 350 to 700 W"),
        ("h100@100W", "expected a limit of 350 to 700 W"),
        ("h100@350W@300W", "is capped already"),
        ("h100@0W", "expected a limit"),
        ("nothing@300W", "not in catalogs/gpus.yaml"),
        ("@300W", "not in catalogs/gpus.yaml"),
    ],
)
def test_a_power_limit_that_nobody_knows_is_refused(catalog: Catalog, name: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        catalog.gpu(name)


def test_every_row_has_a_source_and_a_date(catalog: Catalog) -> None:
    assert set(catalog.provenance) == {*catalog.gpus, *catalog.llms, *catalog.slos}
    assert all(p.source and p.date[:2] == "20" for p in catalog.provenance.values())
    assert all(
        catalog.provenance[gpu].price_source and catalog.provenance[gpu].price_date for gpu in catalog.gpus
    )


@pytest.mark.parametrize(
    ("asked", "found"),
    [("H100", "h100-80g"), ("a100", "a100-80g"), ("h100@350w", "h100-80g@350W"), ("h200", "h200-141g")],
)
def test_aliases_in_any_case(catalog: Catalog, asked: str, found: str) -> None:
    assert catalog.gpu(asked).name == found
    assert catalog.llm("LLAMA-3.1-70B") is catalog.llm("meta-llama/Llama-3.1-70B")


@pytest.mark.parametrize(
    ("short_name", "row"),
    [("qwen3-235b", "Qwen/Qwen3-235B-A22B"), ("Qwen3-30B-FP8", "Qwen/Qwen3-30B-A3B-FP8")],
)
def test_a_mixture_of_experts_may_be_named_without_its_active_parameters(
    catalog: Catalog, short_name: str, row: str
) -> None:
    assert catalog.served_llm(short_name).name == row


def test_an_unknown_name_is_answered_with_the_nearest(catalog: Catalog) -> None:
    with pytest.raises(
        CatalogError, match=r"GPU 'h100-80gg' is not in catalogs/gpus.yaml; nearest: h100-80g"
    ):
        catalog.gpu("h100-80gg")
    with pytest.raises(CatalogError, match=r"LLM 'lama-3.1-70b' .* nearest: meta-llama/Llama-3.1-70B"):
        catalog.llm("lama-3.1-70b")
    with pytest.raises(
        CatalogError, match=r"nearest: meta-llama/Llama-3.3-70B-Instruct, .*encoder of images"
    ):
        catalog.llm("Llama 3.3 71B")
    with pytest.raises(CatalogError, match="no such file or folder"):
        catalog.llm("./nowhere/config.json")
    with pytest.raises(CatalogError, match="is not in catalogs"):
        catalog.llm("x" * 5000)


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA-H100-80GB-HBM3", "H100 80GB"])
def test_a_gpu_may_be_named_as_nvidia_smi_and_kubernetes_name_it(catalog: Catalog, name: str) -> None:
    assert catalog.gpu(name).name == "h100-80g"


@pytest.mark.parametrize("name", ["H100 MIG 1g.10gb", "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "2g.20gb"])
def test_a_slice_of_a_gpu_is_answered_with_how_to_add_it(catalog: Catalog, name: str) -> None:
    with pytest.raises(CatalogError, match=r"a slice \(MIG\) is a row of your own.* gpus_per_node"):
        catalog.gpu(name)


def test_presets_of_the_papers(catalog: Catalog) -> None:
    """Vidur 7.3, DistServe Table 1, Aladdin Table 2, Splitwise Table VI."""
    assert catalog.slos["vidur"].slo.limits == (Limit("ttft", 0.9, 2.0), Limit("tbt", 0.99, 0.2))
    code = catalog.slos["distserve-code-opt-66b"].slo
    assert code.limits == (Limit("ttft", 0.9, 0.125), Limit("tpot", 0.9, 0.2))
    assert code.attainment_frac == 0.9
    assert catalog.slos["aladdin-llama-2-70b-a100"].slo.limits == (
        Limit("ttft", 1.0, 1.6),
        Limit("tpot", 1.0, 0.075),
    )
    splitwise = catalog.slos["splitwise"]
    assert splitwise.slo.limits == () and splitwise.slowdowns is not None
    assert (splitwise.slowdowns.gpu, splitwise.slowdowns.tp) == ("a100-80g", 8)
    factors = {(line.metric, line.percentile_frac): line.factor for line in splitwise.slowdowns.limits}
    assert len(factors) == 9 and factors["ttft", 0.99] == 6 and factors["e2e", 0.5] == 1.25


# --- rows that make no sense

GPU = {
    "memory_vendor": "80 GB",
    "memory": "80 GiB",
    "bandwidth": "2 TB/s",
    "dense_tflops": 312,
    "link": "NVLink 3",
    "link_bandwidth": "300 GB/s",
    "power": "400 W",
    "gpus_per_node": 8,
    "price": "2 usd/h",
    "price_source": "us",
    "price_date": "2026-11",
    "node_selector": "X",
    "source": "us",
    "date": "2026-11-20",
}
LLM = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 128,
    "vocab": 1000,
    "context": 512,
    "source": "us",
    "date": "2026-11-20",
}
SLO = {"slo": {"ttft": {"p90": "2 s"}}, "for": "us", "source": "us", "date": "2026-11-20"}


def write(folder: Path, **files: dict[str, Any]) -> Path:
    for name, rows in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(rows))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": "80 furlongs"}, r"gpus.yaml: mine: memory: unknown unit 'furlongs'"),
        ({"memory": None}, r"gpus.yaml: mine: memory is missing"),
        ({"memory": "-1 GiB"}, r"gpus.yaml: mine: GPU mine: memory_bytes is -1073741824.0, must be > 0"),
        ({"price": "-1 usd/h"}, r"price_usd_per_h is -1.0, must be >= 0"),
        ({"dense_tflops": "312 TFLOP/s"}, r"dense_tflops: expected a number, found '312 TFLOP/s'"),
        ({"dense_tflops": float("nan")}, r"dense_tflops: expected a number, found nan"),
        ({"mixed_kv_bandwidth": "0 TB/s"}, r"mixed_kv_bytes_per_s is 0.0, must be > 0"),
        ({"gpus_per_node": 8.0}, r"gpus_per_node: expected a whole number > 0, found 8.0"),
        ({"gpus_per_node": True}, r"gpus_per_node: expected a whole number > 0, found True"),
        ({"bandwith": "1 TB/s"}, r"gpus.yaml: mine: unknown key 'bandwith'; did you mean 'bandwidth'"),
        ({"source": " "}, r"gpus.yaml: mine: source: expected text"),
        ({"aliases": "h"}, r"aliases: expected a list of names, found 'h'"),
        ({"prefill_slowdown": 1.3}, r"prefill_slowdown: only for a row with cap_of"),
    ],
)
def test_a_bad_gpu_row_names_file_row_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        read_catalog(write(tmp_path, gpus={"mine": {**GPU, **change}}))


@pytest.mark.parametrize(
    ("cap", "message"),
    [
        ({"cap_of": "other"}, r"cap_of: expected the name of an uncapped row of this file, found 'other'"),
        ({"power": "400 W"}, r"power: expected a cap below 400 W, found '400 W'"),
        ({"prefill_slowdown": None}, r"prefill_slowdown is missing"),
        ({"prefill_slowdown": 0.9}, r"a slowdown is below 1"),
        ({"aliases": ["MINE"]}, r"aliases: 'MINE' already names mine"),
    ],
)
def test_a_bad_cap_is_refused(tmp_path: Path, cap: dict[str, Any], message: str) -> None:
    least = {"cap_of": "mine", "power": "200 W", "prefill_slowdown": 1.2, "decode_slowdown": 1.0}
    row = {**least, "source": "us", "date": "2026-11-20", **cap}
    with pytest.raises(CatalogError, match=message):
        read_catalog(write(tmp_path, gpus={"mine": GPU, "mine@200W": row}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, r"llms.yaml: mine: LLM mine: 5 heads do not share 2 KV heads"),
        ({"gated_ffn": "yes"}, r"llms.yaml: mine: gated_ffn: expected true or false, found 'yes'"),
        ({"layers": 0}, r"layers: expected a whole number > 0, found 0"),
        ({"dtype_bytes": 0}, r"dtype_bytes is 0.0, must be > 0"),
        ({"kv_dtype_bytes": 0}, r"kv_dtype_bytes is 0.0, must be > 0"),
        ({"weights": "int3"}, r"weights: expected one of bf16, fp8, fp8-block, .* found 'int3'"),
    ],
)
def test_a_bad_llm_row_names_file_row_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        read_catalog(write(tmp_path, llms={"mine": {**LLM, **change}}))


@pytest.mark.parametrize(
    ("row", "weights", "dtype_bytes"),
    [
        ({}, "bf16", 2.0),
        ({"weights": "fp8-block"}, "fp8-block", 1.0),
        ({"dtype_bytes": 1}, "fp8", 1.0),
        ({"dtype_bytes": 0.5}, "bf16", 0.5),
        ({"weights": "bf16", "dtype_bytes": 1}, "bf16", 1.0),
    ],
)
def test_a_format_of_weights_says_their_bytes(
    tmp_path: Path, row: dict[str, Any], weights: str, dtype_bytes: float
) -> None:
    """Weights of a byte count as fp8 where the row does not say; those of less are multiplied in 16 bits."""
    llm = read_catalog(write(tmp_path, llms={"mine": {**LLM, **row}})).llm("mine")
    assert (llm.weights, llm.dtype_bytes) == (weights, dtype_bytes)


@pytest.mark.parametrize(
    ("all_reduce", "message"),
    [
        ([], r"all_reduce: expected latency and bandwidth by the number of GPUs, found \[\]"),
        ({"two": {"latency": "4 us", "bandwidth": "1 GB/s"}}, r"all_reduce: expected numbers of GPUs, found"),
        ({2: {"latency": "4 us"}}, r"all_reduce.2: bandwidth is missing"),
        ({2: {"latency": "4 us", "bandwidth": "0 GB/s"}}, r"bandwidth"),
        ({1: {"latency": "4 us", "bandwidth": "1 GB/s"}}, r"all_reduce of 1 GPUs: expected two or more"),
    ],
)
def test_a_bad_all_reduce_is_refused(tmp_path: Path, all_reduce: Any, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        read_catalog(write(tmp_path, gpus={"mine": {**GPU, "all_reduce": all_reduce}}))


def test_all_reduces_are_read_by_the_number_of_gpus(tmp_path: Path) -> None:
    row = {**GPU, "fp8_tflops": 2, "all_reduce": {2: {"latency": "4 us", "bandwidth": "120 GB/s"}}}
    gpu = read_catalog(write(tmp_path, gpus={"mine": row})).gpu("mine")
    (measured,) = gpu.all_reduce
    assert (measured.gpus, measured.bytes_per_s, gpu.fp8_flops_per_s) == (2, 120e9, 2e12)
    assert measured.latency_s == pytest.approx(4e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slo": {"ttft": {"p90": "-2 s"}}}, r"slos.yaml: mine: slo: ttft p90: must be > 0"),
        ({"slowdown": {"ttft": {"p90": 2}}}, r"expected one of slo and slowdown, found both"),
        ({"reference": {"gpu": "a", "tp": 8}}, r"reference: only for a row with slowdown"),
        ({"for": None}, r"slos.yaml: mine: for is missing"),
    ],
)
def test_a_bad_preset_names_file_row_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        read_catalog(write(tmp_path, slos={"mine": {**SLO, **change}}))


@pytest.mark.parametrize(
    ("reference", "factor", "message"),
    [
        ({"gpu": "a", "tp": 8}, 0.5, r"slowdown: ttft p90: expected a factor of at least 1, found 0.5"),
        ({"gpu": "a", "tp": 0}, 2, r"reference: tp: expected a whole number >= 1, found 0"),
        ({"gpu": 1, "tp": 8}, 2, r"reference: gpu: expected the name of a GPU, found 1"),
        (None, 2, r"reference: expected keys and values, found None"),
    ],
)
def test_a_bad_slowdown_is_refused(tmp_path: Path, reference: Any, factor: float, message: str) -> None:
    row = {key: value for key, value in SLO.items() if key != "slo"}
    row |= {"slowdown": {"ttft": {"p90": factor}}, "reference": reference}
    with pytest.raises(CatalogError, match=message):
        read_catalog(write(tmp_path, slos={"mine": row}))


def test_a_slowdown_of_tasks_is_refused(tmp_path: Path) -> None:
    """Its limit became 0 s: the idle reference worker's time for a whole task is not known."""
    row = {key: value for key, value in SLO.items() if key != "slo"}
    row |= {"slowdown": {"task": {"p90": 2}}, "reference": {"gpu": "a", "tp": 8}}
    with pytest.raises(CatalogError, match=r"slowdown: unknown key 'task'.*e2e"):
        read_catalog(write(tmp_path, slos={"mine": row}))


def test_files_that_are_no_catalog(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="no such catalog directory"):
        read_catalog(tmp_path / "nowhere")
    with pytest.raises(CatalogError, match=r"holds none of gpus.yaml, llms.yaml, slos.yaml, latency/"):
        read_catalog(tmp_path)
    (tmp_path / "gpus.yaml").write_text("- a\n- b\n")
    with pytest.raises(CatalogError, match=r"gpus.yaml: the top level is a list"):
        read_catalog(tmp_path)
    with pytest.raises(
        CatalogError, match=r"gpus.yaml: mine: expected a name and a mapping of fields, found 3"
    ):
        read_catalog(write(tmp_path, gpus={"mine": 3}))


def test_a_directory_of_ones_own_replaces_single_files(tmp_path: Path, catalog: Catalog) -> None:
    own = read_catalog(write(tmp_path, gpus={"mine": {**GPU, "aliases": ["m"]}}))
    assert list(own.gpus) == ["mine"] and own.gpu("M").memory_bytes == 80 * 2**30
    assert own.llms == catalog.llms and own.slos == catalog.slos


# --- step times

FIT = {
    "tp": 4,
    "knots_tokens": [1, 8192],
    "f_s": [0.010, 0.110],
    "a_s": 1e-9,
    "b_s": 0.0,
    "d_s": 1e-7,
    "e_s": 0.0,
    "h_s": 0.001,
    "basis": "measured by hand",
    "mape_frac": 0.02,
    "max_context_tokens": 9000,
    "errors": {},
}


def with_fits(folder: Path, *fits: dict[str, Any], llm: str = "llama-3.1-70b", gpu: str = "h100") -> Catalog:
    (folder / "latency").mkdir(exist_ok=True)
    head = {"llm": llm, "gpu": gpu, "source": "us", "date": "2026-11-20", "command": "none"}
    text = yaml.safe_dump({**head, "fits": list(fits)}, sort_keys=False)
    (folder / "latency" / f"{llm.replace('/', '-')}--{gpu}.yaml").write_text(text)
    return read_catalog(folder)


def test_a_fit_of_ones_own_comes_before_the_shipped_ones(tmp_path: Path) -> None:
    """f(1) = 10 ms, h = 1 ms: a step of one token takes 11 ms."""
    own = with_fits(tmp_path, FIT)
    latency = own.step_latency(own.llm("llama-3.1-70b"), own.gpu("h100"), 4)
    assert latency.basis == "measured by hand"
    assert latency.step_s(1) == pytest.approx(0.011)


def test_an_llm_without_fits_has_those_of_its_shape_and_format(catalog: Catalog) -> None:
    """Qwen3-30B-A3B of July 2025 is the first one with a longer context; in fp8 it is another LLM."""
    h100 = catalog.gpu("h100")
    of_july = catalog.llm("Qwen/Qwen3-30B-A3B-Instruct-2507")
    assert catalog.step_latency(of_july, h100, 1) == catalog.step_latency(
        catalog.llm("qwen3-30b-a3b"), h100, 1
    )
    assert catalog.step_latency(of_july, h100, 1).kind == "kernels"
    quantised = replace(of_july, name="mine", weights="fp8-block", dtype_bytes=1.0)
    assert catalog.step_latency(quantised, h100, 1) == catalog.step_latency(
        catalog.llm("qwen3-30b-a3b-fp8"), h100, 1
    )
    assert catalog.step_latency(replace(quantised, weights="fp8"), h100, 1).kind == "roofline"


def test_whole_experts_have_a_fit_of_their_own(tmp_path: Path) -> None:
    """f(1) + h = 11 ms with slices, 21 ms with whole experts; of TP 2 there are whole ones alone, of TP 8
    slices alone: the roofline knows neither.
    """
    whole = {**FIT, "ep": True, "f_s": [0.02, 0.1]}
    own = with_fits(tmp_path, FIT, whole, {**whole, "tp": 2}, {**FIT, "tp": 8}, llm="qwen3-30b-a3b", gpu="l4")
    llm, gpu = own.llm("qwen3-30b-a3b"), own.gpu("l4")
    assert own.step_latency(llm, gpu, 4).step_s(1) == pytest.approx(0.011)
    assert own.step_latency(llm, gpu, 4, ep=True).step_s(1) == pytest.approx(0.021)
    assert own.step_latency(llm, gpu, 2).step_s(1) == pytest.approx(0.021)
    assert own.step_latency(llm, gpu, 8).step_s(1) == pytest.approx(0.011)
    assert own.step_latency(llm, gpu, 8, ep=True).kind == "roofline"


def test_a_dense_llm_has_no_experts_to_ask_for(tmp_path: Path) -> None:
    own = with_fits(tmp_path, FIT)
    llm, gpu = own.llm("llama-3.1-70b"), own.gpu("h100")
    assert own.step_latency(llm, gpu, 4, ep=True) == own.step_latency(llm, gpu, 4)


def test_a_capped_gpu_has_its_bases_fit_slowed(tmp_path: Path) -> None:
    """At 350 W the 100 ms that grow with tokens take 130 ms, the floor of 10 ms and 1 ms of host stay."""
    own = with_fits(tmp_path, FIT)
    capped = own.step_latency(own.llm("llama-3.1-70b"), own.gpu("h100@350W"), 4)
    assert capped.step_s(8192) == pytest.approx(0.010 + 0.130 + 0.001)
    assert capped.d_s == 1e-7 and "power cap" in capped.basis


def test_a_fit_measured_under_the_cap_is_not_slowed_again(tmp_path: Path) -> None:
    own = with_fits(tmp_path, {**FIT, "basis": "at 350 W"}, gpu="h100-80g@350W")
    assert own.step_latency(own.llm("llama-3.1-70b"), own.gpu("h100@350W"), 4).basis == "at 350 W"


def test_without_a_fit_the_roofline_answers(catalog: Catalog) -> None:
    latency = catalog.step_latency(catalog.llm("opt-13b"), catalog.gpu("a6000"), 2)
    assert "roofline" in latency.basis
    capped = catalog.step_latency(catalog.llm("opt-13b"), catalog.gpu("h100@350W"), 1)
    uncapped = catalog.step_latency(catalog.llm("opt-13b"), catalog.gpu("h100"), 1)
    assert capped.step_s(8192) > uncapped.step_s(8192)
    assert capped.step_s(1, 0, 1, 1000) >= uncapped.step_s(1, 0, 1, 1000)


def test_only_the_fits_of_the_pair_are_parsed_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latency").mkdir()
    (tmp_path / "latency" / "other.yaml").write_text("llm: opt-13b\ngpu: l4\nfits: [this is { not YAML\n")
    own = with_fits(tmp_path, FIT)
    parsed: list[Path] = []

    def counted(path: Path, wording: Wording) -> dict[Split, StepLatency]:
        parsed.append(path)
        return read_fits(path, wording)

    monkeypatch.setattr(catalog_module, "read_fits", counted)
    for _ in range(3):
        own.step_latency(own.llm("llama-3.1-70b"), own.gpu("h100"), 4)
    assert [path.name for path in parsed if path.parent.parent == tmp_path] == ["llama-3.1-70b--h100.yaml"]
    assert len(parsed) == len(set(parsed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"f_s": [0.1]}, r"tp 4: step latency: 2 knots"),
        ({"f_s": 0.1}, r"tp 4: f_s: expected a list of numbers, found 0.1"),
        ({"d_s": None}, r"tp 4: d_s is missing"),
        ({"d_s": -1.0}, r"must be >= 0"),
        ({"ep": "yes"}, r"fits\[0\]: ep: expected true or false, found 'yes'"),
        ({"tp": "four"}, r"fits\[0\]: tp: expected a whole number > 0, found 'four'"),
        ({"mape": 0.1}, r"tp 4: unknown key 'mape'; did you mean 'mape_frac'"),
    ],
)
def test_a_bad_fit_names_file_row_and_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    own = with_fits(tmp_path, {**FIT, **change})
    with pytest.raises(CatalogError, match=rf"h100.yaml: .*{message}"):
        own.step_latency(own.llm("llama-3.1-70b"), own.gpu("h100"), 4)


def test_fits_given_twice_or_without_a_header_are_refused(tmp_path: Path) -> None:
    own = with_fits(tmp_path, FIT, FIT)
    with pytest.raises(CatalogError, match="tp 4: is given twice"):
        own.step_latency(own.llm("llama-3.1-70b"), own.gpu("h100"), 4)
    (tmp_path / "latency" / "headless.yaml").write_text("fits: []\n")
    own = read_catalog(tmp_path)
    with pytest.raises(CatalogError, match=r"headless.yaml: llm is missing"):
        own.step_latency(own.llm("llama-3.1-70b"), own.gpu("h100"), 4)


def test_a_name_in_a_fit_file_may_hold_the_sign_of_a_comment(tmp_path: Path) -> None:
    """A comment of YAML begins after a space, so `read_header` reads what `read_yaml` does."""
    path = tmp_path / "fit.yaml"
    path.write_text("llm: models/mine#2 # tuned\ngpu: h100-80g\t# SXM\n")
    assert read_header(path) == ("models/mine#2", "h100-80g")
    path.write_text("llm: # none\ngpu: h100-80g\n")
    with pytest.raises(InputError, match="llm is missing"):
        read_header(path)


@pytest.mark.parametrize("part", some(range(6), 1))
def test_every_shipped_fit_can_be_read(catalog: Catalog, part: int) -> None:
    """As it stands in its file, where no median of measured runs is added."""
    catalog = replace(catalog, spreads={})
    for path in catalog.fit_files[part::6]:
        llm, gpu = read_header(path)
        for (tp, ep, dp, kind), fit in read_fits(path).items():
            exchange = Exchange(kind)
            latency = catalog.step_latency(
                catalog.llm(llm), catalog.gpu(gpu), tp, ep=ep, dp=dp, exchange=exchange
            )
            assert replace(latency, spread=None) == fit


def test_a_row_may_say_how_wide_its_kv_cache_is(tmp_path: Path) -> None:
    plain = read_catalog(write(tmp_path, llms={"mine": LLM})).llm("mine")
    rows = {"mine": {**LLM, "dtype_bytes": 1, "kv_dtype_bytes": 2}}
    own = read_catalog(write(tmp_path, llms=rows)).llm("mine")
    assert own.kv_bytes_per_token == plain.kv_bytes_per_token
    assert own.weight_bytes == (plain.weight_bytes + plain.embedding_parameters * 2) / 2


@pytest.mark.parametrize("dtype_bytes", [0.53, 1, 4])
def test_keys_and_values_are_not_as_wide_as_weights(tmp_path: Path, dtype_bytes: float) -> None:
    """2 x 36 layers x 4 heads of 128 in 16 bits are 73,728 bytes per token; 0.53 for both gave 19,538."""
    row = {**LLM, "layers": 36, "heads": 32, "kv_heads": 4, "head_dim": 128, "dtype_bytes": dtype_bytes}
    llm = read_catalog(write(tmp_path, llms={"mine": row})).llm("mine")
    assert llm.kv_bytes_per_token == 73_728


def test_a_capped_row_knows_what_the_board_may_draw(catalog: Catalog) -> None:
    assert catalog.gpu("h100@350W").board_w == catalog.gpu("h100").board_w == 700


TUNED_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_a_config_is_found_by_folder_or_file_and_has_the_fits_of_its_twin(tmp_path: Path) -> None:
    """A fine-tune of Llama-3.1-70B has its shape, so its step times."""
    own = with_fits(tmp_path, FIT)
    file = tmp_path / "tuned" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(TUNED_70B))
    llm = own.llm(str(file.parent))
    assert llm == own.llm(str(file)) and llm.name == str(file.parent) and llm.context_tokens == 8192
    assert own.step_latency(llm, own.gpu("h100"), 4).basis == "measured by hand"
