"""SGLang in place of vLLM, for mixed workers on plain Kubernetes: its command, its image, and refused
settings.

vllm-router is in front of SGLang's workers too. It needs only their /health, and balances by its own count of
requests, because SGLang 0.5.23 does not answer /get_load. SGLang itself chooses its share of memory, which
planner/models/memory.py computes. The prefix cache is on by default; if the plan expects no hits, the cache
can only help. Flags: sglang/srt/arg_groups/fields of 0.5.23 on PyPI (2026-11-26).
"""

from planner.errors import InputError
from planner.fleet import Fleet, Policies, Pool
from planner.models.engine import Engine
from planner.policies import TARGETS_OF_ENGINE

NAME, TITLE = "sglang", "SGLang"
TARGETS = TARGETS_OF_ENGINE[NAME]
NEWEST = "0.5.23"  # The newest release that was checked.
COMMAND = ("python3", "-m", "sglang.launch_server")
_KV_DTYPES = {1.0: "fp8_e4m3", 2.0: "auto"}  # SGLang's names by bytes per number of KV.


def is_sglang(fleet: Fleet) -> bool:
    """Whether the plan was made for SGLang."""
    return fleet.engine is not None and fleet.engine.name == NAME


def has_release(engine: Engine) -> bool:
    """Whether `sglang_release` finds a release of this engine's version. It does not for SGLang 0.4, for
    example: a version without three numbers gets NEWEST.
    """
    return engine.name != NAME or sglang_release(engine.version).startswith(engine.version)


def sglang_release(version: str) -> str:
    """The release of a version: the version itself if it has three numbers, otherwise NEWEST."""
    return version if version.count(".") > 1 else NEWEST


def sglang_image(version: str) -> str:
    """The container image of the release that runs this version of SGLang."""
    return f"lmsysorg/sglang:v{sglang_release(version)}"


def refuse_sglang(fleet: Fleet, target: str) -> None:
    """Raise InputError if the plan was made for SGLang and cannot be written for `target`."""
    if not is_sglang(fleet):
        return
    if target not in TARGETS:
        raise InputError(
            f"{target}: starts vLLM, and the plan was made for {TITLE}; take {' or '.join(TARGETS)}"
        )
    policies, usual = fleet.policies, Policies()
    # Settings that no flag of `sglang_flags` expresses: whether the fleet uses the setting, and its name.
    not_written = [
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
    if used := [words for is_used, words in not_written if is_used]:
        raise InputError(
            f"{target}: manifests for {TITLE} cannot express {', '.join(used)}; plan without, or for vLLM"
        )


def sglang_flags(pool: Pool, fleet: Fleet, longest_tokens: int) -> dict[str, bool | int | str]:
    """Flags of `sglang.launch_server` for one worker of `pool`, without dashes.

    `longest_tokens` are the prompt and output tokens of the longest request.
    """
    worker = pool.type
    # For `engine: none` the simulation has mixed steps, as vLLM has.
    has_mixed_steps = worker.engine is None or worker.engine.mixed_steps
    poll_steps = 1 if worker.engine is None else worker.engine.poll_steps
    return {
        "model-path": fleet.llm.name,
        "served-model-name": fleet.llm.name,
        "tp-size": worker.tp,
        "pp-size": worker.pp,
        **({"ep-size": worker.tp} if worker.ep else {}),
        "context-length": longest_tokens,
        "max-running-requests": worker.max_num_seqs,
        "chunked-prefill-size": worker.max_num_batched_tokens,
        "kv-cache-dtype": _KV_DTYPES[fleet.llm.kv_dtype_bytes],
        **({"enable-mixed-chunk": True} if has_mixed_steps else {}),
        **({"scheduler-recv-interval": poll_steps} if poll_steps > 1 else {}),
        "enable-metrics": True,
        "host": "0.0.0.0",
    }
