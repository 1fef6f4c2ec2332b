"""SGLang in place of vLLM, for mixed workers on plain Kubernetes: its command, its image, and what is
refused.

SGLang's workers have vllm-router too, which needs only their /health: it counts its own requests, since
SGLang 0.5.23 does not answer /get_load. Flags: sglang/srt/arg_groups/fields of 0.5.23 on PyPI (2026-11-26).
"""

from __future__ import annotations

from planner.errors import InputError
from planner.fleet import Fleet, Policies, Pool
from planner.models.engine import Engine
from planner.policies import TARGETS_OF_ENGINE

NAME, TITLE = "sglang", "SGLang"
TARGETS = TARGETS_OF_ENGINE[NAME]
NEWEST = "0.5.23"  # The newest release that was looked at.
COMMAND = ("python3", "-m", "sglang.launch_server")
_KV_DTYPES = {1.0: "fp8_e4m3", 2.0: "auto"}  # SGLang's names by bytes per number of KV.


def serves(fleet: Fleet) -> bool:
    """Whether the plan counts on SGLang."""
    return fleet.engine is not None and fleet.engine.name == NAME


def has_release(engine: Engine) -> bool:
    """Whether `release` is one of this engine's version: not of SGLang 0.4, whose releases are not known."""
    return engine.name != NAME or release(engine.version).startswith(engine.version)


def release(version: str) -> str:
    """The release of a version; NEWEST for its own first two numbers, of which there is no image."""
    return version if version.count(".") > 1 else NEWEST


def image(version: str) -> str:
    """SGLang's image of the release."""
    return f"lmsysorg/sglang:v{release(version)}"


def refuse(fleet: Fleet, target: str) -> None:
    """Raise InputError if the plan counts on SGLang and cannot be written for `target`."""
    if not serves(fleet):
        return
    if target not in TARGETS:
        raise InputError(
            f"{target}: starts vLLM, and the plan counts on {TITLE}; take {' or '.join(TARGETS)}"
        )
    policies, usual = fleet.policies, Policies()
    lacking = [
        (fleet.is_disaggregated, "prefill and decode workers"),
        (any(pool.type.dp > 1 for pool in fleet.running_pools), "data-parallel ranks"),
        (any(pool.type.speculation for pool in fleet.running_pools), "drafts"),
        (
            any(not pool.type.gpu.node_selector.startswith("NVIDIA") for pool in fleet.running_pools),
            "this GPU",
        ),
        (fleet.lora is not None, "adapters"),
        (policies.kv_offload is not None, "KV blocks in CPU memory"),
        (policies.queue != usual.queue, f"the queue {policies.queue}"),
        (
            policies.long_prefill_token_threshold != usual.long_prefill_token_threshold,
            "long_prefill_token_threshold",
        ),
        (fleet.llm.kv_dtype_bytes not in _KV_DTYPES, f"{fleet.llm.kv_dtype_bytes:g} bytes per number of KV"),
    ]
    if missing := [words for is_used, words in lacking if is_used]:
        raise InputError(f"{target}: how {TITLE} is told of {', '.join(missing)} is not written here")


def flags(pool: Pool, fleet: Fleet, longest_tokens: int) -> dict[str, bool | int | str]:
    """Flags of `sglang.launch_server` for one worker of `pool`, without dashes.

    `longest_tokens` are those of the longest request, prompt and output.
    """
    engine = pool.type
    has_mixed_steps = engine.engine is None or engine.engine.mixed_steps
    return {
        "model-path": fleet.llm.name,
        "served-model-name": fleet.llm.name,
        "tp-size": engine.tp,
        "pp-size": engine.pp,
        **({"ep-size": engine.tp} if engine.ep else {}),
        "context-length": longest_tokens,
        "max-running-requests": engine.max_num_seqs,
        "chunked-prefill-size": engine.max_num_batched_tokens,
        "kv-cache-dtype": _KV_DTYPES[fleet.llm.kv_dtype_bytes],
        **({"enable-mixed-chunk": True} if has_mixed_steps else {}),
        "enable-metrics": True,
        "host": "0.0.0.0",
    }
