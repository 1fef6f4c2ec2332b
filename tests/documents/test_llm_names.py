"""Names of LLMs as people write them, and the checkpoint that is served."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.documents.catalog import read_catalog
from planner.errors import CatalogError

CATALOG = read_catalog()


@pytest.mark.parametrize(
    ("name", "row", "checkpoint"),
    [
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        ("llama-3.3-70b-instruct", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.3-70B-Instruct"),
        ("llama-3.3-70b", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.3-70B-Instruct"),
        ("llama 3.3 70B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.3-70B-Instruct"),
        ("Llama-3.3-70B FP8", "meta-llama/Llama-3.1-70B-FP8", "nvidia/Llama-3.3-70B-Instruct-FP8"),
        ("deepseek-v3.1", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.1"),
        ("llama-3.1-70b", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B"),
        ("META-LLAMA/llama-3.1-8b", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("qwen3-32b", "Qwen/Qwen3-32B", "Qwen/Qwen3-32B"),
    ],
)
def test_a_short_name_is_its_row_and_serves_its_checkpoint(name: str, row: str, checkpoint: str) -> None:
    served = CATALOG.served_llm(name)
    assert (CATALOG.llm(name).name, served.name) == (row, checkpoint)
    assert CATALOG.has_fit(served, CATALOG.gpu("h100"))  # step times are the row's


def test_every_checkpoint_is_read_back_from_a_plan() -> None:
    for alias in CATALOG.llm_aliases:
        served = CATALOG.served_llm(alias)
        assert CATALOG.served_llm(served.name) == served


def test_a_name_of_the_hub_is_fetched_where_the_package_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
        '"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, '
        '"max_position_embeddings": 512, "torch_dtype": "bfloat16"}'
    )

    def download(name: str, file: str) -> str:
        if (name, file) != ("me/tiny", "config.json"):
            raise OSError("no such checkpoint")
        return str(config)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    assert (CATALOG.served_llm("me/tiny").name, CATALOG.llm("me/tiny").hidden) == ("me/tiny", 64)
    with pytest.raises(CatalogError, match=r"lists all .*config.json.*fleetplan\[hub\]"):
        CATALOG.llm("me/none")
