"""How vLLM's own code groups the layers of an LLM's KV cache, without a model.

    python tests/support/vllm_kv_groups.py < cases.json > groups.json

A case is a list of layers, each {"kind": "full", "latent", "window" or "state", ...}; the answer has the
bytes of a block of the pool and, of each group, its kind, its layers and the tokens of a block. It is a
process of its own: it needs vLLM and nothing of the planner.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
MEMORY_BYTES = 2**44


def config_of(block_tokens: int) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    model = ModelConfig(
        model=str(TINY), dtype="bfloat16", seed=0, skip_tokenizer_init=True, max_model_len=1024
    )
    return VllmConfig(
        model_config=model,
        device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(block_size=block_tokens, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=1024, max_model_len=1024, is_encoder_decoder=False
        ),
    )


def spec_of(layer: dict[str, Any], block_tokens: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    if layer["kind"] == "state":
        return MambaSpec(
            block_size=1024,
            shapes=((layer["bytes"],),),
            dtypes=(torch.uint8,),
            page_size_padded=layer["page_bytes"],
        )
    heads = {"block_size": block_tokens, "num_kv_heads": layer["kv_heads"], "dtype": torch.bfloat16}
    if layer["kind"] == "latent":
        return MLAAttentionSpec(head_size=layer["head_dim"], **heads)
    sizes = {"head_size": layer["head_dim"], "head_size_v": layer["value_dim"], **heads}
    if layer["kind"] == "window":
        return SlidingWindowSpec(sliding_window=layer["window"], **sizes)
    return FullAttentionSpec(**sizes)


def groups_of(case: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

    config = config_of(case["block_tokens"])
    config.cache_config.kv_cache_layout = "LBNHC"  # blocks of a layer one after another, as FlashAttention's
    specs = {
        f"model.layers.{at}.attn": spec_of(layer, case["block_tokens"])
        for at, layer in enumerate(case["layers"])
    }
    groups = get_kv_cache_groups(config, specs)
    pool = get_kv_cache_config_from_groups(config, groups, MEMORY_BYTES)
    kinds = {name: layer["kind"] for name, layer in zip(specs, case["layers"], strict=True)}
    return {
        "block_bytes": MEMORY_BYTES / pool.num_blocks,
        "groups": [
            {
                "kind": kinds[group.layer_names[0]],
                "layers": len(group.layer_names),
                "tokens": group.kv_cache_spec.block_size,
            }
            for group in groups
        ],
    }


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    answers = [groups_of(case) for case in json.load(sys.stdin)]
    sys.stdout.write("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
