"""What older versions of vLLM take longer than the kernels of the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import fleet_of
from planner.models.engine import Engine
from planner.models.older_kernels import longer_layer_s, on_version

CATALOG = read_catalog()
MINIMAX = CATALOG.llm("MiniMaxAI/MiniMax-M2.5")


def vllm(version: str) -> Engine:
    return Engine("vllm", version, async_scheduling=True)


@pytest.mark.parametrize(
    ("version", "layer_us"),
    [
        ("0.11.1", 150),
        ("0.13.2", 150),
        ("0.14", 45),
        ("0.17.1", 45),
        ("0.18.0", 15),
        ("0.19.0", 0),
        ("0.33.0", 0),
    ],
)
def test_a_layer_of_block_fp8_experts_takes_longer_before_0_19(version: str, layer_us: float) -> None:
    assert longer_layer_s(MINIMAX, vllm(version)) == pytest.approx(1e-6 * layer_us)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-30B-A3B", "moonshotai/Kimi-K2.5"])
def test_dense_llms_and_other_formats_do_not(name: str) -> None:
    """A dense one in the same format, and mixtures in 16 and in 4 bits."""
    assert longer_layer_s(CATALOG.llm(name), vllm("0.11.1")) == 0


def test_other_engines_and_no_engine_do_not() -> None:
    assert longer_layer_s(MINIMAX, None) == 0
    assert longer_layer_s(MINIMAX, replace(vllm("0.5"), name="sglang")) == 0


def test_a_step_of_a_fleet_on_an_old_version_takes_longer_by_its_layers() -> None:
    """62 layers at 45 us are 2.79 ms, whatever the batch."""
    worker = {"gpu": "h200-141g", "tp": 4}
    old, new = (
        fleet_of(
            {"llm": MINIMAX.name, "workers": [worker], "engine": {"name": "vllm", "version": version}},
            Path("fleet.yaml"),
            CATALOG,
        )
        .pools[0]
        .type.latency
        for version in ("0.16.0", "0.24.0")
    )
    for tokens in (1, 64, 8192):
        assert old.step_s(tokens) - new.step_s(tokens) == pytest.approx(62 * 45e-6)
    assert "45 us longer per layer of experts, as on vLLM 0.16.0" in old.basis


def test_step_times_that_somebody_gave_stay_as_they_are() -> None:
    latency = replace(CATALOG.step_latency(MINIMAX, CATALOG.gpu("h200-141g"), 4), kind="steps")
    assert on_version(latency, MINIMAX, vllm("0.11.1")) is latency
