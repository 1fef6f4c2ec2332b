"""Start-up facts: arithmetic by hand, measured runs, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hand_made import GPU, LATENCY

from planner.documents.catalog import read_catalog
from planner.documents.startup_times import read_startup
from planner.errors import CatalogError
from planner.fleet import WorkerType
from planner.models.llm import Llm
from planner.models.startup import EngineStart, Image, Storage, start_time

LLM = Llm("l", layers=10, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=128, vocab=100, context_tokens=64)
ENGINE = EngineStart("e", "g", (8, 12), 1e6, 5.0, 0.1, 0.5, 0.2, 3.0, 0.05, True, "by hand")
STORAGE = Storage("s", 2e6, True, "by hand")


def worker(gpu: str, tp: int, llm: Llm) -> WorkerType:
    return WorkerType(read_catalog().gpu(gpu), tp, LATENCY, 16000, 512, 8).with_llm(llm)


def test_the_parts_of_a_start() -> None:
    """10 layers: 0.1 + 0.5 s each to trace and compile, 0.05 s to capture; weights at 2 MB/s from the storage
    and 1 MB/s into each GPU."""
    cold = start_time(LLM, 1, ENGINE, STORAGE, image=Image("i", 60.0, 2.0, True, ""), node_s=7.0)
    assert (cold.image_s, cold.boot_s, cold.profile_s) == (30.0, 5.0, 3.0)
    assert [cold.compile_s, cold.capture_s] == pytest.approx([6.0, 0.5])
    assert cold.load_s == pytest.approx(LLM.weight_bytes / 1e6)
    assert cold.start_s == pytest.approx(7 + 30 + 5 + 3 + 6 + 0.5 + LLM.weight_bytes / 1e6)
    assert cold.estimated == ()
    warm = start_time(LLM, 4, ENGINE, STORAGE, is_compiled=True)
    assert warm.load_s == pytest.approx(LLM.weight_bytes / 2e6)
    assert [warm.image_s, warm.compile_s] == pytest.approx([0.0, 3.0])
    assert warm.estimated == ("4 GPUs: measured on one",)
    staged = start_time(LLM, 4, ENGINE, STORAGE, pp=4)
    assert staged.compile_s == pytest.approx(3 * 0.6)
    assert "3 layers: measured with 8 to 12" in staged.estimated


@pytest.mark.parametrize(
    ("llm", "is_warm", "measured_s"),
    [
        ("meta-llama/Llama-2-7b-hf", True, 24.13),
        ("meta-llama/Llama-2-13b-hf", True, 29.48),
        ("meta-llama/Llama-2-7b-hf", False, 47.08),
        ("meta-llama/Llama-2-13b-hf", False, 73.87),
    ],
)
def test_against_starts_of_vllm_on_h100(llm: str, is_warm: bool, measured_s: float) -> None:
    """total_time of upb-cn/vllm-startup-profiler (9ef96f4), figures/figure-10/gpu0, iteration 1 and uncached
    (weights from disk; both Llamas were compiled already). Within 5 %."""
    found = read_catalog().llm(llm)
    kind = worker("h100-nvl-94g", 1, found)
    start = read_startup().start_time(
        found, kind, "page-cache" if is_warm else "local-disk", is_compiled=True
    )
    assert start.estimated == ()
    assert start.start_s == pytest.approx(measured_s, rel=0.05)


def test_a_warm_node_starts_sooner() -> None:
    """Llama-3.1-70B on 4 H100, whose row is of another H100, of one GPU, and of fewer layers."""
    llm = read_catalog().llm("meta-llama/Llama-3.1-70B")
    kind, facts = worker("h100-80g", 4, llm), read_startup()
    cold, warm = (
        facts.start_time(llm, kind, "object-store", image="registry"),
        facts.warm_start_time(llm, kind),
    )
    assert warm.start_s < facts.start_time(llm, kind, "object-store").start_s < cold.start_s
    assert cold.image_s == pytest.approx(10e9 / 37.4e6)
    assert len(warm.estimated) == 3 and len(cold.estimated) == 4


def test_sleeping_workers_wake_by_hand() -> None:
    """Llama-3.1-70B on 4 A100, 35.3 GB each: at 10.9 GB/s and 0.2 s from level 1, at 10 GB/s back there; all
    141 GB at 1.64 GB/s and 0.5 s from level 2."""
    llm = read_catalog().llm("meta-llama/Llama-3.1-70B")
    kind, facts = worker("a100-80g", 4, llm), read_startup()
    per_gpu_gb = llm.weight_bytes / 4 / 1e9
    assert facts.wake_s(llm, kind, 1, "no disk") == pytest.approx(0.2 + per_gpu_gb / 10.9)
    assert facts.fall_asleep_s(llm, kind, 1) == pytest.approx(per_gpu_gb / 10)
    assert facts.wake_s(llm, kind, 2, "nvme-raid0") == pytest.approx(0.5 + 4 * per_gpu_gb / 1.64)
    assert facts.fall_asleep_s(llm, kind, 2) == pytest.approx(0.31)
    with pytest.raises(CatalogError, match="sleep '3'"):
        facts.find_sleep_level(3)


def test_ranks_have_all_weights_but_experts() -> None:
    """Eight ranks of Mixtral: each GPU has an eighth of the experts and all the rest. It had an eighth
    of all, so that such workers woke sooner than they do.
    """
    llm = read_catalog().llm("mistralai/Mixtral-8x7B-v0.1")
    experts_bytes = sum(
        count * llm.bytes_per_weight(weights) for part, weights, count, _ in llm.parts() if part == "experts"
    )
    of_ranks = replace(LATENCY, joint_s=tuple(0.0 for _ in LATENCY.f_s))
    kind, facts = replace(worker("a100-80g", 1, llm), dp=8, ep=True, latency=of_ranks), read_startup()
    gpu_gb = (llm.weight_bytes - 7 / 8 * experts_bytes) / 1e9
    assert facts.wake_s(llm, kind, 1, "no disk") == pytest.approx(0.2 + gpu_gb / 10.9)
    assert facts.fall_asleep_s(llm, kind, 1) == pytest.approx(gpu_gb / 10)
    assert gpu_gb > 1.15 * llm.weight_bytes / 8 / 1e9


def test_a_gpu_without_a_row() -> None:
    """The first row is taken, and said so."""
    llm = read_catalog().llm("meta-llama/Llama-2-13b-hf")
    kind = worker("h100-80g", 1, llm)
    kind = replace(kind, gpu=replace(GPU, name="x1", base="x1"))
    assert read_startup().warm_start_time(llm, kind).estimated == ("x1: measured on h100-nvl-94g",)


def test_unknown_rows_offer_the_nearest() -> None:
    facts, llm = read_startup(), read_catalog().llm("meta-llama/Llama-2-13b-hf")
    kind = worker("h100-80g", 1, llm)
    with pytest.raises(CatalogError, match=r"storage 'objectstore' is not in .*; nearest: object-store"):
        facts.start_time(llm, kind, "objectstore")
    with pytest.raises(CatalogError, match=r"image 'x' .* nearest: registry, secondary-boot-disk"):
        facts.start_time(llm, kind, "object-store", image="x")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("storage: {page-cache: {bandwith: 1 GB/s}}", "did you mean 'bandwidth'"),
        ("storage: {page-cache: {bandwidth: 0 GB/s, source: a, date: b}}", "bandwidth"),
        ("storage: {page-cache: {bandwidth: 1 GB/s, source: a, date: b}}", "must have an engine"),
        ("engine: {e: {gpu: g, layers: [3], source: a, date: b}}", "fewest, most"),
        ("storage: 3", "storage"),
        ("disks: {}", "unknown key 'disks'"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "startup.yaml").write_text(text)
    with pytest.raises(CatalogError, match=match):
        read_startup(tmp_path)
