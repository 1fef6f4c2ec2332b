"""Command lines of engine and router, images, names, and the node of each worker: shared by deployment
targets.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.domain import KV_BLOCK_TOKENS, Gpu
from planner.errors import InputError
from planner.fleet import Fleet, Policies, Pool, Role, WorkerType
from planner.manifests import kv_store, sglang_engine
from planner.models.engine import DEPLOYED_VERSION, NAMES
from planner.models.llm import Llm
from planner.models.lora import Lora
from planner.policies import QUEUE, ROUTING, VLLM, VLLM_ROUTER, VLLM_ROUTER_PAIRS, find_router_difference

VLLM_VERSION = DEPLOYED_VERSION
IMAGE = f"vllm/vllm-openai:v{VLLM_VERSION}"
# The first versions of vLLM with --async-scheduling and with --shutdown-timeout.
FIRST_ASYNC, FIRST_DRAINING = (0, 10), (0, 18)
# Node labels of accelerators that neither vLLM's image nor its ROCm image serves.
OTHER_LABELS = ("habana.ai/", "cloud.google.com/gke-tpu")
ROCM_IMAGE = f"vllm/vllm-openai-rocm:v{VLLM_VERSION}"
ROUTER_VERSION = "0.1.17"
ROUTER_PACKAGE = f"vllm-router=={ROUTER_VERSION}"
# The router's project publishes images of nightly builds only, so the manifests bring a Dockerfile for the
# release.
ROUTER_IMAGE = f"vllm-router:{ROUTER_VERSION}"
ROUTER_FOLDER = "router-image"
ROUTER_USER = 10001  # Any user other than root.
ROUTER_DOCKERFILE = f"""\
# The router of these manifests, without root. By digest: --build-arg PYTHON_DIGEST=@sha256:...
#   docker build -t REGISTRY/{ROUTER_IMAGE} {ROUTER_FOLDER} && docker push REGISTRY/{ROUTER_IMAGE}
ARG PYTHON_TAG=3.12-slim-bookworm
ARG PYTHON_DIGEST=

FROM python:${{PYTHON_TAG}}${{PYTHON_DIGEST}} AS build
RUN python -m venv /opt/router && /opt/router/bin/pip install --no-cache-dir {ROUTER_PACKAGE}

FROM python:${{PYTHON_TAG}}${{PYTHON_DIGEST}}
ENV PATH=/opt/router/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1
COPY --from=build /opt/router /opt/router
USER {ROUTER_USER}:{ROUTER_USER}
EXPOSE 8000
ENTRYPOINT ["vllm-router"]
"""
GPU_MEMORY_UTILIZATION = 0.9  # vLLM's share of the memory, which planner.models.memory assumes too.
# An engine has at least this share of the predicted pages (benchmarks/kv_capacity.py).
SURE_PAGES_FRAC = 0.9
# `max-model-len` is rounded up to a multiple of this, so that a slightly longer request still fits.
LENGTH_STEP = 256

ADAPTERS = "/adapters"  # The folder of adapters on every worker.
ANY_ADAPTER = "ADAPTER"  # Stands for the names of adapters where the plan has none.

CONTAINER = "vllm"  # The name of a worker's main container, with SGLang too.
# Labels of pods on Kubernetes: the LLM; its pool, router or other part; and what the pod does.
APP, PART, ROLE = "app.kubernetes.io/name", "app.kubernetes.io/component", "fleetplan/role"
SECRET_NAME, SECRET_KEY = "hf-token-secret", "HF_TOKEN"  # The token for the Hugging Face hub.
NO_PRIVILEGES = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
USUAL_SYSCALLS = {"seccompProfile": {"type": "RuntimeDefault"}}
HTTP_PORT = 8000
NIXL_PORT = 5600  # vLLM's default for the exchange of KV blocks.
NIXL_PORT_STEP = 16  # Ports of workers on one host network are this far apart: each rank takes one.
# vLLM's NixlConnector needs this layout for an LLM with states (Mamba, linear attention).
STATE_LAYOUT = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
START_S = 3600  # A worker may download and load its weights for this long.
# A worker that is told to stop may finish its requests for DRAIN_S, and is killed KILL_S later.
DRAIN_S, KILL_S = 300, 20
ROUTER_START = ("--host", "0.0.0.0", "--port", str(HTTP_PORT), "--worker-startup-timeout-secs", str(START_S))

MOST_NAME_LETTERS = 1000  # A longer name of an LLM is a mistake.
_KV_ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
_KV_DTYPES = {1.0: "fp8", 2.0: "auto", 4.0: "auto"}  # By bytes per number; "auto" is the weights' type.
# OWNER/NAME on Hugging Face. A name without an owner would be a path on the worker.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._/][A-Za-z0-9._/@+-]*")

# Names that manifests give to routers, pairs of pools and the frontend; no pool may have one of them.
RESERVED_LABELS = ("router", "router-mixed", "pair", "frontend")

LABEL_LETTERS = 63  # The most letters of a label of Kubernetes.
# Most letters of the labels of an LLM and of a pool. Helm charts, LeaderWorkerSet (`-GROUP-HASH`) and
# DisaggregatedSet (`-SLICE-REVISION-`) join and extend them, and the result must stay within LABEL_LETTERS.
LLM_LETTERS, POOL_LETTERS = 18, 16
HASH_LETTERS = 4  # Two LLMs get the same hash once in 65,536.

Setting = bool | int | float | str | Mapping[str, Any] | list[str]


def engine_flags(pool: Pool, fleet: Fleet, max_model_len: int) -> dict[str, Setting]:
    """The flags of `vllm serve` for one worker of `pool`, by their long names without dashes.

    All targets take vLLM's settings from here; `sglang_engine.sglang_flags` has those of SGLang.
    """
    check_name(fleet.llm.name)
    worker = pool.type
    flags: dict[str, Setting] = {
        "served-model-name": fleet.llm.name,
        "tensor-parallel-size": worker.tp,
        "pipeline-parallel-size": worker.pp,
        "max-model-len": served_model_len(fleet, max_model_len),
        "max-num-seqs": _most_sequences(worker),
        "max-num-batched-tokens": worker.max_num_batched_tokens,
        "gpu-memory-utilization": GPU_MEMORY_UTILIZATION,
        "block-size": KV_BLOCK_TOKENS,
        "kv-cache-dtype": _kv_cache_dtype(fleet.llm),
        "enable-prefix-caching": True,  # If the plan counts on no hits, caching can only help.
    }
    if not fleet.llm.has_heads_alone:
        del flags["block-size"]  # Kernels of latent attention and of states have block sizes of their own.
    if worker.dp > 1:  # The ranks share a port, and vLLM itself chooses the rank of a request.
        flags["data-parallel-size"] = worker.dp
    if worker.all2all:
        flags["data-parallel-size-local"] = local_ranks(worker)
        flags["all2all-backend"] = worker.all2all
    if worker.ep:
        flags["enable-expert-parallel"] = True
    order = find_router_difference(QUEUE[fleet.policies.queue], VLLM).name
    if order != Policies().queue:  # The default order is vLLM's too, so it needs no flag.
        flags["scheduling-policy"] = order
    # 0 means no threshold, and a threshold above the longest prompt has no effect.
    threshold = fleet.policies.long_prefill_token_threshold
    if 0 < threshold < served_model_len(fleet, max_model_len):
        flags["long-prefill-token-threshold"] = threshold
    if worker.engine is not None and _is_since(FIRST_ASYNC, worker.engine.version):
        flags["async-scheduling"] = worker.engine.async_scheduling
    if (speculation := worker.speculation) is not None:
        check_name(speculation.model or speculation.method)
        flags["speculative-config"] = {
            "method": speculation.method,
            "num_speculative_tokens": speculation.tokens,
            **({} if speculation.model is None else {"model": speculation.model}),
        }
    if worker.lora is not None:
        flags |= _lora_flags(worker.lora.lora)
    if pool.role in _KV_ROLES:
        _check_hand_off(pool, fleet)
        flags["kv-transfer-config"] = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[pool.role]}
    # vLLM takes one connector. To hand KV over and offload it, one connector wraps two others. KV goes either
    # to a shared store or to CPU memory (`KvOffload.worker_bytes`), never to both.
    handing_over = flags.get("kv-transfer-config")
    if kv_store.uses_store(fleet, pool):
        store = kv_store.connector(fleet)
        flags["kv-transfer-config"] = _two_connectors(handing_over, store) if handing_over else store
    if offload_bytes := cpu_bytes(pool, fleet):
        if handing_over is None:
            flags["kv-offloading-size"] = offload_bytes / 2**30  # In GiB.
        else:
            flags["kv-transfer-config"] = _two_connectors(handing_over, _offloading(offload_bytes))
    return flags


def _most_sequences(worker: WorkerType) -> int:
    """The most sequences of a step. For an LLM with states vLLM does not start with more sequences than pages
    of its memory pool (vllm-project/vllm#38270). Each sequence takes at least two pages, so this cap costs
    nothing.
    """
    page_blocks = worker.extra_kv.state_page_blocks
    if not page_blocks:
        return worker.max_num_seqs
    pages = worker.kv_tokens / KV_BLOCK_TOKENS / page_blocks
    return max(min(worker.max_num_seqs, math.floor(SURE_PAGES_FRAC * pages)), 1)


def hand_off_gpus(fleet: Fleet) -> dict[str, Gpu]:
    """The GPUs of workers that hand KV over, by the name of their catalog row without a power cap."""
    return {pool.type.gpu.base: pool.type.gpu for pool in fleet.running_pools if pool.role in _KV_ROLES}


def _check_hand_off(pool: Pool, fleet: Fleet) -> None:
    """Raise InputError for a prefill or decode pool for which vLLM cannot hand KV over."""
    if (stages := pool.type.pp) > 1:
        raise InputError(
            f"{one_line(pool.name)}: vLLM's NixlConnector hands KV over between workers of one pipeline "
            f"stage alone, found pp {stages}; plan without pp, or with mixed workers"
        )
    if len({is_rocm(gpu) for gpu in hand_off_gpus(fleet).values()}) > 1:
        raise InputError(
            f"{one_line(pool.name)}: vLLM hands no KV over between GPUs of AMD and of NVIDIA, which have "
            "different attention backends; plan pairs on one of them, or mixed workers"
        )


def hand_off_environment(pool: Pool, fleet: Fleet) -> dict[str, str]:
    """Variables that a worker needs to hand over the KV of this LLM, beside its own address."""
    return dict(STATE_LAYOUT) if pool.role in _KV_ROLES and fleet.llm.state_bytes else {}


def cpu_bytes(pool: Pool, fleet: Fleet) -> int:
    """CPU memory for KV blocks of one worker of `pool`, for all its GPUs together; 0 for decode workers."""
    offload = fleet.policies.kv_offload
    return 0 if offload is None or pool.role == "decode" else int(offload.worker_bytes(pool.type.tp))


def _offloading(offload_bytes: int) -> Setting:
    """vLLM's connector that keeps KV blocks in CPU memory."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": offload_bytes},
    }


def _two_connectors(handing_over: Setting, offloading: Setting) -> Setting:
    """vLLM's connector that wraps two others: one hands KV over, one offloads it."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [handing_over, offloading]},
    }


def engine_version(fleet: Fleet) -> str:
    """The engine's version in the manifest: the plan's, or vLLM's DEPLOYED_VERSION if the plan has none."""
    if fleet.engine is None:
        return VLLM_VERSION
    release_of = sglang_engine.sglang_release if sglang_engine.is_sglang(fleet) else _release
    return release_of(fleet.engine.version)


def engine_title(fleet: Fleet) -> str:
    """The engine's name and version, for instance "vLLM 0.33.0"."""
    return f"{NAMES['vllm' if fleet.engine is None else fleet.engine.name]} {engine_version(fleet)}"


def versions_sentence(text: str, fleet: Fleet) -> str:
    """A sentence of `text`, which names the versions that a target is written for.

    If `text` has the version of vLLM that manifests use by default, the plan's version replaces it. Otherwise
    the target fixes another version, and the sentence says so.
    """
    fleet_version, usual_version = engine_title(fleet), f"vLLM {VLLM_VERSION}"
    if fleet_version == usual_version or usual_version in text:
        return text.replace(usual_version, fleet_version) + "."
    return f"{text}; the plan was made for {fleet_version}, which this target does not bring."


def _release(version_text: str) -> str:
    """The release of a version: "0.33" is 0.33.0."""
    return version_text if version_text.count(".") > 1 else f"{version_text}.0"


def _is_since(first: tuple[int, int], version_text: str) -> bool:
    """Whether this version is `first` or a later one."""
    return tuple(int(part) for part in version_text.split(".")[:2]) >= first


def drain_args(worker: WorkerType, drain_s: int = DRAIN_S) -> list[str]:
    """Arguments that make a worker finish its requests within `drain_s` when it is told to stop.

    Without them vLLM aborts its requests; versions before FIRST_DRAINING always do. SGLang needs no argument.
    """
    engine = worker.engine
    if engine is not None and (engine.name != "vllm" or not _is_since(FIRST_DRAINING, engine.version)):
        return []
    return ["--shutdown-timeout", str(drain_s)]


def to_args(flags: Mapping[str, Setting]) -> list[str]:
    """An engine's flags as words of a command line."""
    args: list[str] = []
    for key, value in flags.items():
        if isinstance(value, bool):
            args.append(f"--{key}" if value else f"--no-{key}")
        elif isinstance(value, Mapping):
            args += [f"--{key}", json.dumps(value, separators=(",", ":"))]
        elif isinstance(value, list):
            args += [f"--{key}", *value]
        else:
            args += [f"--{key}", f"{value:g}" if isinstance(value, float) else str(value)]
    return args


def engine_args(pool: Pool, fleet: Fleet, max_model_len: int) -> list[str]:
    """The arguments of `vllm serve` for a worker of `pool` and requests of up to `max_model_len` tokens."""
    return [fleet.llm.name, *to_args(engine_flags(pool, fleet, max_model_len))]


def _lora_flags(lora: Lora) -> dict[str, Setting]:
    """Slots for adapters, and the folders where their files must be.

    Where the plan names no adapters, ANY_ADAPTER stands for a name: the user replaces it.
    """
    names = lora.adapters if isinstance(lora.adapters, tuple) else (ANY_ADAPTER,)
    # A `=` would end the name in `NAME=PATH`.
    if refused := [name for name in names if not _PLAIN_NAME.fullmatch(name) or "=" in name]:
        raise InputError(
            f"lora: adapter {refused[0][:100]!r}: expected a name of letters, digits and . _ / @ + - alone"
        )
    return {
        "enable-lora": True,
        "max-loras": lora.max_loras,
        "max-lora-rank": lora.max_rank,
        "max-cpu-loras": lora.max_cpu_loras,
        **({} if lora.targets is None else {"lora-target-modules": list(lora.targets)}),
        "lora-modules": [f"{name}={ADAPTERS}/{name}" for name in names],
    }


def refuse_adapters(fleet: Fleet, target: str, why: str) -> None:
    """Raise InputError with `why` for a fleet with adapters, which `target`'s manifests do not set up."""
    if fleet.lora is not None:
        raise InputError(f"{target}: {why}, which is not written here; take vllm or kubernetes")


def refuse_offload(fleet: Fleet, target: str) -> None:
    """Raise InputError if the fleet offloads KV to CPU memory, which our pods of `target` lack."""
    if fleet.policies.kv_offload is not None:
        raise InputError(
            f"{target}: kv_offload needs shared memory in its pods, which is not written here; take vllm, "
            "compose, kubernetes, lws or llm-d"
        )


def _kv_cache_dtype(llm: Llm) -> str:
    """vLLM's name of the format of keys and values. Raises InputError for formats that it lacks."""
    if llm.kv_dtype_bytes not in _KV_DTYPES:
        raise InputError(
            f"LLM {llm.name}: vLLM keeps keys and values in 1 or 2 bytes, the plan assumes "
            f"{llm.kv_dtype_bytes:g}"
        )
    return _KV_DTYPES[llm.kv_dtype_bytes]


def check_name(name: str) -> None:
    """Raise InputError for a name of an LLM that files or command lines would garble."""
    if (
        not name
        or not name.isprintable()
        or name != name.strip()
        or name.startswith("-")
        or len(name) > MOST_NAME_LETTERS
    ):
        raise InputError(
            f"LLM {name[:200]!r}: expected a name such as meta-llama/Llama-3.1-70B or a path: printable, no "
            "leading dash, no space around it"
        )


def hub_name(fleet: Fleet, target: str) -> str:
    """The LLM's name, by which `target` loads it from the Hugging Face hub. Raises InputError for a name that
    is not OWNER/NAME.
    """
    if not _HUB_NAME.fullmatch(fleet.llm.name):
        raise InputError(
            f"{target}: loads the LLM from the Hugging Face hub, found {fleet.llm.name!r}; expected a name "
            "such as meta-llama/Llama-3.1-70B"
        )
    return fleet.llm.name


def plain_name(fleet: Fleet, target: str) -> str:
    """The LLM's name, which templates of `target` pass on unquoted. Raises InputError if it needs quotes."""
    if not _PLAIN_NAME.fullmatch(fleet.llm.name):
        raise InputError(
            f"{target}: its templates hold only plain names of LLMs (letters, digits and . _ / @ + -), found "
            f"{fleet.llm.name!r}"
        )
    return fleet.llm.name


def one_line(text: str) -> str:
    """`text` on one line, for a comment or a heading."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def served_model_len(fleet: Fleet, max_model_len: int) -> int:
    """`max_model_len` rounded up to a multiple of LENGTH_STEP, but at most the LLM's context and the smallest
    KV cache: with a larger length vLLM does not start, and the simulator rejects longer requests.
    """
    most_tokens = min([fleet.llm.context_tokens, *(pool.type.kv_tokens for pool in fleet.running_pools)])
    return min(math.ceil(max_model_len / LENGTH_STEP) * LENGTH_STEP, most_tokens)


def nodes_of(worker: WorkerType) -> int:
    """Nodes that one worker spans. Raises InputError if it spans several and does not fill them."""
    per_node = worker.gpu.gpus_per_node
    if worker.gpus <= per_node:
        return 1
    if worker.gpus % per_node:
        raise InputError(
            f"{worker.name} pp{worker.pp}: a worker of {worker.gpus} GPUs does not fill whole nodes of "
            f"{per_node}"
        )
    return worker.gpus // per_node


def local_ranks(worker: WorkerType) -> int:
    """How many data-parallel ranks a worker has on each of its nodes."""
    return worker.dp // nodes_of(worker)


def refuse_several_nodes(fleet: Fleet, target: str) -> None:
    """Raise InputError for a worker that spans nodes, which `target` cannot start."""
    for pool in fleet.running_pools:
        if (nodes := nodes_of(pool.type)) > 1:
            raise InputError(
                f"{target}: {one_line(pool.name)}: a worker of {pool.type.gpus} GPUs spans {nodes} nodes; "
                "take lws"
            )


def refuse_ranks(fleet: Fleet, target: str, *, on_nodes: bool = True) -> None:
    """Raise InputError for data-parallel ranks, which `target` starts in a way that is not written here.

    With `on_nodes=False` ranks on several nodes (of a worker with `all2all`) are accepted.
    """
    for pool in fleet.running_pools:
        if pool.type.dp > 1 and (on_nodes or not pool.type.all2all):
            others = "lws or vllm" if pool.type.all2all else "kubernetes, lws or compose"
            raise InputError(
                f"{target}: {one_line(pool.name)}: starts data-parallel ranks (dp {pool.type.dp}) in a way "
                f"of its own, which is not written here; take {others}"
            )


def routers_of(fleet: Fleet) -> dict[str, tuple[Role, ...]]:
    """The routers by name, each with the roles it serves.

    A fleet with mixed workers and pairs needs two routers: vLLM's router serves one or the other.
    """
    roles = {pool.role for pool in fleet.running_pools}
    if "mixed" not in roles:
        return {"router": ("prefill", "decode")}
    if len(roles) == 1:
        return {"router": ("mixed",)}
    return {"router": ("prefill", "decode"), "router-mixed": ("mixed",)}


def pool_services(fleet: Fleet, target: str) -> dict[str, tuple[Pool, Pool | None]]:
    """The services of a target, each of which serves a mixed pool or a pair: name -> (mixed pool, None), or
    (decode pool, prefill pool). Raises InputError for several prefill or decode pools.
    """
    pools = dict(zip(pool_labels(fleet), fleet.running_pools, strict=True))
    pools_by_service: dict[str, tuple[Pool, Pool | None]] = {}
    if fleet.is_disaggregated:
        prefill, decode = (
            [pool for pool in pools.values() if pool.role == role] for role in ("prefill", "decode")
        )
        if len(prefill) > 1 or len(decode) > 1:
            raise InputError(
                f"{target}: serves one prefill and one decode pool together, found {len(prefill)} and "
                f"{len(decode)}; take kubernetes or lws"
            )
        pools_by_service["pair"] = (decode[0], prefill[0])
    return pools_by_service | {name: (pool, None) for name, pool in pools.items() if pool.role == "mixed"}


def count_workers(fleet: Fleet, role: Role) -> int:
    """How many workers of this role the fleet has, over all pools."""
    return sum(pool.count for pool in fleet.pools if pool.role == role)


def router_policy_args(fleet: Fleet, roles: tuple[Role, ...]) -> list[str]:
    """Flags for the policies of vllm-router that are nearest to the plan's.

    With one worker the router refuses policies that compare two workers, so it gets round robin.
    """

    def nearest(policy: str, role: Role) -> str:
        """The router's name for the nearest policy; with one worker all policies are alike."""
        if count_workers(fleet, role) <= 1:
            return "round_robin"
        router = VLLM_ROUTER if role == "mixed" else VLLM_ROUTER_PAIRS
        return find_router_difference(ROUTING[policy], router).name

    routing, decode_routing = fleet.policies.routing, fleet.policies.decode_routing
    if "mixed" in roles:
        front_policy = nearest(routing, "mixed")
        return ["--policy", front_policy, *_cache_settings(fleet, front_policy)]
    front_policy, decode_policy = nearest(routing, "prefill"), nearest(decode_routing, "decode")
    return [
        "--vllm-pd-disaggregation",
        "--kv-connector",
        "nixl",
        "--policy",
        front_policy,
        *_cache_settings(fleet, front_policy),
        "--prefill-policy",
        front_policy,
        "--decode-policy",
        decode_policy,
    ]


def _cache_settings(fleet: Fleet, policy: str) -> list[str]:
    """Flags of vllm-router's cache-aware rule: the plan's settings if the rule was simulated, otherwise none
    (the router's defaults).
    """
    policies = fleet.policies
    if (
        not has_cache_rule(policies)
        or policy != find_router_difference(ROUTING[policies.routing], VLLM_ROUTER).name
    ):
        return []
    return [
        "--cache-threshold",
        f"{policies.cache_threshold_frac:g}",
        "--balance-abs-threshold",
        str(policies.balance_requests),
        "--balance-rel-threshold",
        f"{policies.balance_ratio:g}",
    ]


def has_cache_rule(policies: Policies) -> bool:
    """Whether vllm-router looks at prefix caches by the rule that was simulated."""
    row = ROUTING[policies.routing]
    return row.needs_caches and not find_router_difference(row, VLLM_ROUTER).is_lacking


def routing_sentence(fleet: Fleet) -> str:
    """A sentence of the README on the policies of vllm-router."""
    words = []
    for roles in routers_of(fleet).values():
        args = router_policy_args(fleet, roles)
        if "mixed" in roles:
            words.append(f"mixed workers by {args[args.index('--policy') + 1]}")
        else:
            words += [f"{role} by {args[args.index(f'--{role}-policy') + 1]}" for role in roles]
    return f"vllm-router, {', '.join(words)}."


def router_command(args: Iterable[str]) -> list[str]:
    """The command that starts the router in its image, as words."""
    return ["vllm-router", *ROUTER_START, *args]


def router_image_files() -> dict[str, str]:
    """The Dockerfile of the router's image, for targets that have this router."""
    return {f"{ROUTER_FOLDER}/Dockerfile": ROUTER_DOCKERFILE}


def router_image_steps(file: str) -> list[str]:
    """Lines of the README: build and push the router's image, and put its name into `file`."""
    return [
        f"    docker build -t REGISTRY/{ROUTER_IMAGE} {ROUTER_FOLDER} && docker push REGISTRY/{ROUTER_IMAGE}",
        f"    sed -i 's|image: {ROUTER_IMAGE}|image: REGISTRY/{ROUTER_IMAGE}|' {file}",
    ]


def is_rocm(gpu: Gpu) -> bool:
    """Whether the GPU is AMD's, which needs vLLM's ROCm image."""
    return gpu.node_selector.startswith("amd.com/")


def why_undeployable(fleet: Fleet) -> str:
    """Why no manifest here deploys this fleet; empty if one may."""
    if fleet.engine is not None and fleet.engine.name not in ("vllm", sglang_engine.NAME):
        return f"the plan was made for {NAMES[fleet.engine.name]}, for which no manifest is written"
    if fleet.engine is not None and not sglang_engine.has_release(fleet.engine):
        return (
            f"no image is known of SGLang {fleet.engine.version}: write its release with three numbers under "
            f"engine: version, such as 0.5.9, or leave version out for {sglang_engine.NEWEST}"
        )
    gpus = [pool.type.gpu for pool in fleet.running_pools]
    if others := sorted({gpu.name for gpu in gpus if gpu.node_selector.startswith(OTHER_LABELS)}):
        return (
            f"{', '.join(map(one_line, others))}: no manifest is written for such accelerators; images of "
            "vLLM for NVIDIA and AMD do not run there"
        )
    if fleet.policies.kv_offload is not None and fleet.policies.kv_offload.disk_bytes:
        return (
            "policies.kv_offload: disk: what engines need to keep KV blocks on a disk is not written here; "
            "plan without the disk for what is to be deployed"
        )
    return ""


def why_not_started(fleet: Fleet) -> str:
    """Why `plan validate` and `plan serve` cannot start the fleet's engines; empty if they may."""
    if fleet.engine is not None and fleet.engine.name != "vllm":
        return f"the plan was made for {NAMES[fleet.engine.name]}, and what is started here is vLLM alone"
    return why_undeployable(fleet)


def engine_image(worker: WorkerType) -> str:
    """The image of a worker's engine, in the release for which the plan was made."""
    if worker.engine is not None and worker.engine.name == sglang_engine.NAME:
        return sglang_engine.sglang_image(worker.engine.version)
    usual_image = ROCM_IMAGE if is_rocm(worker.gpu) else IMAGE
    if worker.engine is None:
        return usual_image
    return usual_image.replace(VLLM_VERSION, _release(worker.engine.version))


def is_capped(gpu: Gpu) -> bool:
    """Whether the GPU has a power cap."""
    return gpu.uncapped_w is not None


def power_note(gpu: Gpu) -> str:
    """A comment on what a capped GPU needs: no manifest can set a power cap."""
    return f"# Before: sudo nvidia-smi -pl {gpu.power_w:g} (nothing here sets the power cap)."


def dns_label(text: str, *, length: int = LABEL_LETTERS) -> str:
    """`text` as an RFC 1123 label that begins with a letter, as names of services must."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"
    return (name if name[0].isalpha() else f"x{name}")[:length].strip("-")


def llm_label(fleet: Fleet, *, length: int = LLM_LETTERS) -> str:
    """A label of the LLM's name after the last slash, for instance llama-3-1-70b.

    If it is longer than `length`, it ends in a hash of the name: otherwise LLMs whose names begin alike would
    share objects, and workers, in one cluster.
    """
    label = dns_label(fleet.llm.name.rstrip("/").rsplit("/", 1)[-1], length=MOST_NAME_LETTERS)
    if len(label) <= length:
        return label
    ending = hashlib.sha256(fleet.llm.name.encode()).hexdigest()[:HASH_LETTERS]
    return f"{dns_label(label, length=length - HASH_LETTERS - 1)}-{ending}"


def pool_labels(fleet: Fleet, *, length: int = POOL_LETTERS) -> list[str]:
    """One label per running pool, in order, all different: up to `length` letters, and a number if needed."""
    labels: list[str] = []
    for pool in fleet.running_pools:
        name = stem = dns_label(pool.name, length=length)
        # The loop ends at a free label: there are more numbers here than other pools.
        for number in range(2, len(fleet.pools) + 2):
            if name not in (*labels, *RESERVED_LABELS):
                break
            name = f"{stem}-{number}"
        labels.append(name)
    return labels


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    """One worker on one node; `devices` are indices of the node's GPUs."""

    name: str
    pool: Pool
    node: int
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeployedNode:
    """A node with GPUs of one kind, and the workers that are placed there."""

    gpu: Gpu
    workers: tuple[PlacedWorker, ...]


def place_on_nodes(fleet: Fleet) -> list[DeployedNode]:
    """Place workers, of which none spans nodes, on nodes with one kind of GPU each.

    Workers with more GPUs come first; each goes to the first node with enough free GPUs. Sizes that are
    powers of two fill nodes without gaps, so this takes the fewest nodes.
    """
    pools = list(zip(pool_labels(fleet), fleet.running_pools, strict=True))
    nodes: list[DeployedNode] = []
    for gpu in dict.fromkeys(pool.type.gpu for _, pool in pools):
        pools_on_gpu = [(name, pool) for name, pool in pools if pool.type.gpu == gpu]
        workers_by_node: list[list[PlacedWorker]] = []
        for name, pool in sorted(pools_on_gpu, key=lambda named_pool: -named_pool[1].type.gpus):
            width = pool.type.gpus  # GPUs of a worker.
            for number in range(pool.count):
                taken_gpus = [sum(len(worker.devices) for worker in node) for node in workers_by_node]
                has_room = [taken + width <= gpu.gpus_per_node for taken in taken_gpus]
                if not any(has_room):
                    workers_by_node.append([])
                    taken_gpus.append(0)
                    has_room.append(True)
                k = has_room.index(True)
                devices = tuple(range(taken_gpus[k], taken_gpus[k] + width))
                workers_by_node[k].append(PlacedWorker(f"{name}-{number}", pool, len(nodes) + k, devices))
        nodes += [DeployedNode(gpu, tuple(workers)) for workers in workers_by_node]
    return nodes
