"""Which configs are planned on kernel times: rows, fine-tunes of their shape, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plans import CATALOG

from benchmarks.llm_coverage import configs, planned_on
from planner.documents.llm_config import llm_from_config

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    "name",
    [
        "nemotron-h-56b",
        "nemotron-3-super-fp8",
        "nemotron-3.5-lightning-nvfp4",
        "deepseek-v3.2",
        "glm-5.1-fp8",
    ],
)
def test_what_was_fitted_is_planned_on_kernels(name: str) -> None:
    assert planned_on(CATALOG.llm(name), CATALOG)["b200-180g"]


def test_what_measured_engines_are_far_from_has_the_roofline() -> None:
    """Llama 4, and the shared index of GLM-5.2, which nobody measured, as docs/models.md says."""
    for name in ("llama-4-scout", "glm-5.2-fp8"):
        gpus = planned_on(CATALOG.llm(name), CATALOG)
        assert gpus and not any(gpus.values())


def test_a_fine_tune_shares_fits_and_another_size_does_not(tmp_path: Path) -> None:
    (tmp_path / "me--tuned_config.json").write_text(json.dumps({**QWEN3_8B, "max_position_embeddings": 8192}))
    (tmp_path / "me--wider_config.json").write_text(json.dumps({**QWEN3_8B, "intermediate_size": 12544}))
    found = {name: planned_on(llm_from_config(folder), CATALOG) for name, folder in configs(tmp_path)}
    assert list(found) == ["me/tuned", "me/wider"]
    assert found["me/tuned"]["h100-80g"] and not any(found["me/wider"].values())
