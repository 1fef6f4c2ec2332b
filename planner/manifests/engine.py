"""What every deployment target shares: the engine's command line, the router's, images, names, placement."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from planner.domain import Fleet, Gpu, Pool, Role
from planner.errors import InputError

VLLM_VERSION = "0.33.0"
IMAGE = f"vllm/vllm-openai:v{VLLM_VERSION}"
ROCM_IMAGE = f"vllm/vllm-openai-rocm:v{VLLM_VERSION}"
ROUTER_IMAGE = "python:3.12-slim"
ROUTER_PACKAGE = "vllm-router==0.1.17"
GPU_MEMORY_UTILIZATION = 0.9  # what planner.models.memory assumes

HTTP_PORT = 8000
NIXL_PORT = 5600
NIXL_PORT_STEP = 16  # between workers that share a host's network
START_S = 3600  # a worker may download and load its weights for this long

# Every flag that engine_args and the targets use; tests compare it with vLLM's own list.
FLAGS = (
    "--model",
    "--served-model-name",
    "--port",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--max-model-len",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--gpu-memory-utilization",
    "--kv-transfer-config",
)
_KV_ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
_ROUTER_POLICIES = {"jsq": "power_of_two", "least-outstanding": "power_of_two", "round-robin": "round_robin"}


def engine_args(pool: Pool, fleet: Fleet, max_model_len: int) -> list[str]:
    """Arguments of `vllm serve` for one worker of `pool`; the longest request of the plan fits."""
    engine = pool.type
    args = [
        "--model", fleet.llm.name,
        "--served-model-name", fleet.llm.name,
        "--tensor-parallel-size", str(engine.tp),
        "--max-model-len", str(served_model_len(fleet, max_model_len)),
        "--max-num-seqs", str(engine.max_num_seqs),
        "--max-num-batched-tokens", str(engine.max_num_batched_tokens),
        "--gpu-memory-utilization", f"{GPU_MEMORY_UTILIZATION:g}",
    ]  # fmt: skip
    if engine.pp > 1:
        args += ["--pipeline-parallel-size", str(engine.pp)]
    if pool.role in _KV_ROLES:
        transfer = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[pool.role]}
        args += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    return args


def served_model_len(fleet: Fleet, max_model_len: int) -> int:
    """`max_model_len` rounded up to a multiple of 256, but not beyond what LLM and KV caches hold.

    vLLM refuses to start with a length that its KV cache or the LLM's context cannot hold; the simulator
    rejects the requests beyond it.
    """
    holds = min([fleet.llm.context_tokens, *(pool.type.kv_tokens for pool in running(fleet))])
    return min(-(-max_model_len // 256) * 256, holds)


def running(fleet: Fleet) -> list[Pool]:
    return [pool for pool in fleet.pools if pool.count]


def is_disaggregated(fleet: Fleet) -> bool:
    return any(pool.role == "prefill" for pool in running(fleet))


def routers(fleet: Fleet) -> dict[str, tuple[Role, ...]]:
    """Name -> roles it serves. A fleet of both kinds needs two: vLLM's router does one or the other."""
    roles = {pool.role for pool in running(fleet)}
    if "mixed" not in roles:
        return {"router": ("prefill", "decode")}
    if len(roles) == 1:
        return {"router": ("mixed",)}
    return {"router": ("prefill", "decode"), "router-mixed": ("mixed",)}


def router_policy_args(fleet: Fleet, roles: tuple[Role, ...]) -> list[str]:
    """The router's nearest policies: power of two choices where the simulator joins the shortest queue.

    The router refuses to choose between two where there is one worker; round robin does the same then.
    """

    def nearest(policy: str, role: Role) -> str:
        workers = sum(pool.count for pool in fleet.pools if pool.role == role)
        return _ROUTER_POLICIES.get(policy, "power_of_two") if workers > 1 else "round_robin"

    routing, decode_routing = fleet.policies.routing, fleet.policies.decode_routing
    if "mixed" in roles:
        return ["--policy", nearest(routing, "mixed")]
    front, back = nearest(routing, "prefill"), nearest(decode_routing, "decode")
    return ["--vllm-pd-disaggregation", "--kv-connector", "nixl",
            "--policy", front, "--prefill-policy", front, "--decode-policy", back]  # fmt: skip


def router_command(args: Iterable[str]) -> list[str]:
    """Install the pinned router and start it; `args` are words without spaces or quotes."""
    start = f"--host 0.0.0.0 --port {HTTP_PORT} --worker-startup-timeout-secs {START_S}"
    return ["sh", "-c", f"pip install {ROUTER_PACKAGE} && exec vllm-router {start} {' '.join(args)}"]


def is_rocm(gpu: Gpu) -> bool:
    return gpu.node_selector.startswith("amd.com/")


def image(gpu: Gpu) -> str:
    return ROCM_IMAGE if is_rocm(gpu) else IMAGE


def is_capped(gpu: Gpu) -> bool:
    return gpu.base != gpu.name


def label(text: str, *, length: int = 63) -> str:
    """`text` as an RFC 1123 label that also begins with a letter, as names of services must."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"
    return (name if name[0].isalpha() else f"x{name}")[:length].strip("-")


def llm_label(fleet: Fleet) -> str:
    """For instance llama-3-1-70b: the last part of the LLM's name."""
    return label(fleet.llm.name.rstrip("/").rsplit("/", 1)[-1], length=30)


def pool_labels(fleet: Fleet) -> list[str]:
    """One label per running pool, in order, all different."""
    labels: list[str] = []
    for pool in running(fleet):
        name = stem = label(pool.name, length=24)
        for number in range(2, len(fleet.pools) + 2):
            if name not in (*labels, "router", "router-mixed"):
                break
            name = f"{stem}-{number}"
        labels.append(name)
    return labels


@dataclass(frozen=True, slots=True)
class Placed:
    """One worker on one node: `devices` are GPU indices of that node."""

    name: str
    pool: Pool
    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    gpu: Gpu
    workers: tuple[Placed, ...]


def place(fleet: Fleet) -> list[Node]:
    """Workers onto nodes of one GPU row each, widest first, each on the first node with room.

    Widths that are powers of two fill nodes without waste, so this takes the fewest nodes.
    """
    pools = list(zip(pool_labels(fleet), running(fleet), strict=True))
    nodes: list[Node] = []
    for gpu in dict.fromkeys(pool.type.gpu for _, pool in pools):
        own = sorted(((n, p) for n, p in pools if p.type.gpu == gpu), key=lambda item: -item[1].type.gpus)
        used: list[list[Placed]] = []
        for name, pool in own:
            width = pool.type.gpus
            if width > gpu.gpus_per_node:
                raise InputError(
                    f"{pool.name}: a worker of {width} GPUs does not fit a node of {gpu.gpus_per_node}"
                )
            for number in range(pool.count):
                taken = [sum(len(worker.devices) for worker in node) for node in used]
                at = next((k for k, t in enumerate(taken) if t + width <= gpu.gpus_per_node), len(used))
                first = taken[at] if at < len(used) else 0
                if at == len(used):
                    used.append([])
                devices = tuple(range(first, first + width))
                used[at].append(Placed(f"{name}-{number}", pool, len(nodes) + at, devices))
        nodes += [Node(gpu, tuple(workers)) for workers in used]
    return nodes
