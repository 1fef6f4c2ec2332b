"""LLMs of each kind of attention on a real vLLM on the CPU: it starts, answers, and its KV cache holds as
many tokens as ours. Tiny configs, dummy weights. `make test-vllm`
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from shares import some
from tiny_configs import PLAIN

from planner.documents.llm_config import llm_from_config
from planner.models.kv_layout import kv_layout
from profiling.vllm_install import is_installed

if not is_installed():
    pytest.skip("vLLM is not installed (make test-vllm)", allow_module_level=True)

KV_BYTES = 2**30
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixture": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "latent": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "head_dim": None,
        "kv_lora_rank": 512,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
    },
    "five windows to one": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 128,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
    },
    "one window to one": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "head_dim": 64,
        "intermediate_size": 256,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "three states to one": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": 8,
        "shared_expert_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "partial_rotary_factor": 0.25,
    },
}
MIXTURES = ("mixture", "latent", "one window to one", "three states to one")
PROGRAM = """
import json, sys
from profiling.vllm_install import mend_cpu_wheel
mend_cpu_wheel()
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, arguments = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048,
        max_num_seqs=8, max_num_batched_tokens=512, **arguments,
    )
    cache = llm.llm_engine.vllm_config.cache_config
    found = {"blocks": cache.num_gpu_blocks, "block_size": cache.block_size}
    if arguments.get("tensor_parallel_size", 1) == 1:
        asked = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": list(range(3, 103))}], asked, use_tqdm=False)
        found["tokens"] = len(answer.outputs[0].token_ids)
    print("FOUND", json.dumps(found), flush=True)
"""


def booted(folder: Path, name: str, **arguments: Any) -> dict[str, int]:
    config = PLAIN | CONFIGS[name] | (MIXTURE if name in MIXTURES else {})
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "boot.py").write_text(PROGRAM)
    last = str(max(os.sched_getaffinity(0)))
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES // 2**30),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join([last] * arguments.get("tensor_parallel_size", 1)),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # an engine of its own process reads all of vLLM once more: 28 CPU s in place of 12
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if "tensor_parallel_size" in arguments else "0",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    argv = [sys.executable, str(folder / "boot.py"), str(folder), json.dumps(arguments)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=400, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, (done.stdout + done.stderr)[-6000:]
    return dict(json.loads(line.removeprefix("FOUND ")))


@pytest.mark.parametrize("name", some(CONFIGS, 2))
def test_it_boots_and_holds_as_many_tokens_as_ours(tmp_path: Path, name: str) -> None:
    """vLLM's blocks on CPUs are multiples of 32 tokens, latent ones are of 16 where the CPU has no AMX; ours
    are always of 16: so tokens are compared, of layers that look at all of them.
    """
    has_amx = "amx_tile" in Path("/proc/cpuinfo").read_text()
    found = booted(tmp_path, name, block_size=32 if has_amx or name != "latent" else 16)
    assert found["tokens"] == 4
    ours = 16 * (KV_BYTES // kv_layout(llm_from_config(tmp_path), 1).block_bytes)
    assert found["blocks"] * found["block_size"] == pytest.approx(ours, rel=0.01)


@pytest.mark.slow
def test_experts_are_dealt_out_to_two_ranks(tmp_path: Path) -> None:
    """--tensor-parallel-size 2 --enable-expert-parallel; every rank has its own KV cache of the given size.
    It starts; in its first step vllm-cpu 0.32.0 dies of signal 11 with whole experts, so none is taken.
    """
    arguments = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    found = booted(tmp_path, "mixture", block_size=32, distributed_executor_backend="mp", **arguments)
    ours = 16 * (KV_BYTES // kv_layout(llm_from_config(tmp_path), 2).block_bytes)
    assert found["blocks"] * found["block_size"] == pytest.approx(ours, rel=0.01)


RANKS = """
import sys
from profiling.vllm_install import mend_cpu_wheel
mend_cpu_wheel()
from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    folder, *flags = sys.argv[1:]
    sys.argv = ["vllm", "serve", folder, *flags]
    main()
"""


@pytest.mark.slow
def test_data_parallel_ranks_start_with_a_kv_cache_each(tmp_path: Path) -> None:
    """--data-parallel-size 2 --enable-expert-parallel: each rank says how many tokens it holds. As with whole
    experts and TP, vllm-cpu 0.32.0 starts, and dies in its first step; so none is taken.
    """
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | CONFIGS["mixture"] | MIXTURE))
    (tmp_path / "serve.py").write_text(RANKS)
    first, *_, last = sorted(os.sched_getaffinity(0)) * 2
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES // 2**30),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{first}|{last}",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    flags = "--load-format dummy --skip-tokenizer-init --enforce-eager --max-model-len 2048 --max-num-seqs 8"
    flags += " --max-num-batched-tokens 512 --block-size 32 --host 127.0.0.1 --port 0"
    flags += " --data-parallel-size 2 --enable-expert-parallel"
    log = tmp_path / "log"
    argv = [sys.executable, str(tmp_path / "serve.py"), str(tmp_path), *flags.split()]
    with (
        log.open("w") as stream,
        subprocess.Popen(
            argv, env=environment, stdout=stream, stderr=stream, start_new_session=True
        ) as server,
    ):
        try:
            deadline = time.monotonic() + 400
            while "startup complete" not in log.read_text():
                assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
                time.sleep(1)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
    held = re.findall(r"EngineCore_DP(\d).*KV cache size: ([\d,]+) tokens", log.read_text())
    ours = 16 * (KV_BYTES // kv_layout(llm_from_config(tmp_path), 1).block_bytes)
    assert dict(held).keys() == {"0", "1"}
    for _, tokens in held:
        assert int(tokens.replace(",", "")) == pytest.approx(ours, rel=0.01)
