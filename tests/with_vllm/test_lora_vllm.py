"""Slots of adapters on a real vLLM on the CPU: the bytes of its buffers are ours. `make test-vllm`"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shares import some
from tiny_configs import PLAIN

from planner.documents.catalog import read_catalog
from planner.documents.llm_config import llm_from_config
from planner.models.lora import Lora, lora_slots
from profiling.vllm_install import is_installed

if not is_installed():
    pytest.skip("vLLM is not installed (make test-vllm)", allow_module_level=True)

CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mixture": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
PROGRAM = """
import sys
from profiling.vllm_install import mend_cpu_wheel
mend_cpu_wheel()
from vllm import LLM

def buffer_bytes(model):
    found = {}  # stacks may be views of one buffer
    for module in model.modules():
        for name, value in vars(module).items():
            if "lora_a_stacked" in name or "lora_b_stacked" in name:
                for tensor in value if isinstance(value, (tuple, list)) else [value]:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1], load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=512,
        max_num_seqs=4, enable_lora=True, max_loras=3, max_lora_rank=16,
    )
    print("FOUND", llm.apply_model(buffer_bytes)[0], flush=True)
"""


@pytest.mark.parametrize("name", some(CONFIGS, 1))
def test_slots_have_as_many_bytes_as_vllms(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | CONFIGS[name]))
    (tmp_path / "boot.py").write_text(PROGRAM)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    argv = [sys.executable, str(tmp_path / "boot.py"), str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=400, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, (done.stdout + done.stderr)[-6000:]
    slots = lora_slots(Lora(3, 16, 3, 3), llm_from_config(tmp_path), read_catalog().gpu("h100-80g"), 1)
    assert int(line.removeprefix("FOUND ")) == 3 * slots.cost.slot_bytes
