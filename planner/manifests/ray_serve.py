"""Ray Serve LLM: a serve config with one application per pair of pools or mixed pool.

Each version of Ray comes with a version of vLLM (ENGINE). `engine_kwargs` are vLLM's flags, with underscores
in place of dashes.
"""

import re

from planner.domain import Gpu
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Pool
from planner.manifests import engine_command, kubernetes
from planner.manifests.kubernetes import Document
from planner.policies import RAY_SERVE, ROUTING, Routing, find_router_difference
from planner.units import count_text

RAY_VERSION = "2.60.0"
ENGINE = f"Ray {RAY_VERSION} with vLLM 0.29.0"

# Ray's classes that choose a replica of a deployment. By default Ray draws two replicas at random and takes
# the one with fewer requests.
ROUND_ROBIN = "ray.serve.experimental.round_robin_router:RoundRobinRouter"
PREFIX_AFFINITY = "ray.serve.llm.request_router:PrefixCacheAffinityRouter"
_ROUTER_CLASSES = {path.rpartition(":")[2]: path for path in (ROUND_ROBIN, PREFIX_AFFINITY)}

# Ray's names for GPUs of catalogs/gpus.yaml, by the beginning of their node label; the first match is taken.
_ACCELERATORS = {
    "NVIDIA-A100-SXM4-40GB": "A100-40G",
    "NVIDIA-A100": "A100-80G",
    "NVIDIA-H100": "H100",
    "NVIDIA-H200": "H200",
    "NVIDIA-B200": "B200",
    "NVIDIA-L40S": "L40S",
    "NVIDIA-L4": "L4",
    "NVIDIA-A10G": "A10G",
    "Tesla-V100": "V100",
    "AMD_Instinct_MI300X_OAM": "AMD-Instinct-MI300X-OAM",
}


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """The file ray-serve.yaml, which `serve deploy` takes."""
    llm, gpus = engine_command.one_line(fleet.llm.name), count_text(fleet.gpus, "GPU")
    about = f"# {llm} on {gpus}.   serve deploy ray-serve.yaml\n"
    return {"ray-serve.yaml": about + to_yaml(document(fleet, max_model_len))}


def steps(fleet: Fleet) -> list[str]:
    """How to deploy the config, as lines of the README."""
    lines = [
        f"    pip install 'ray[serve,llm]=={RAY_VERSION}'   # on every node of the Ray cluster",
        "    serve deploy ray-serve.yaml",
        "",
        "Workers have the environment of `ray start` on their node: HF_TOKEN belongs there.",
    ]
    unknown = {pool.type.gpu.name for pool in fleet.running_pools if ray_accelerator(pool.type.gpu) is None}
    if unknown:
        lines += [
            "",
            f"Ray has no name for {', '.join(sorted(map(engine_command.one_line, unknown)))}: any GPU "
            "may be taken.",
        ]
    return lines


def routing(fleet: Fleet) -> str:
    """Ray's rule that routes requests to each pool, as a sentence of the README."""
    router_lines = [
        f"{pool.role} by {find_router_difference(_planned_routing(fleet, pool), RAY_SERVE).name}"
        for pool in fleet.running_pools
    ]
    return f"Ray Serve, {', '.join(dict.fromkeys(router_lines))}."


def document(fleet: Fleet, max_model_len: int) -> Document:
    """The serve config. Several applications share a cluster, so each has its own route prefix."""
    engine_command.refuse_ranks(fleet, "ray-serve")
    engine_command.refuse_offload(fleet, "ray-serve")
    app = engine_command.llm_label(fleet)
    pools_by_service = engine_command.pool_services(fleet, "ray-serve")
    applications = []
    for label, (pool, prefill) in pools_by_service.items():  # A mixed pool, or a decode pool and its prefill.
        name, prefix = (app, "/") if len(pools_by_service) == 1 else (f"{app}-{label}", f"/{label}")
        pool_config = _config(fleet, pool, max_model_len)
        builder = "build_openai_app"
        args: Document = {"llm_configs": [pool_config]}
        if prefill is not None:
            builder = "build_pd_openai_app"
            args = {"prefill_config": _config(fleet, prefill, max_model_len), "decode_config": pool_config}
        applications.append(
            {"name": name, "route_prefix": prefix, "import_path": f"ray.serve.llm:{builder}", "args": args}
        )
    return {"applications": applications}


def ray_accelerator(gpu: Gpu) -> str | None:
    """Ray's name for `gpu`, or None."""
    node_label = gpu.node_selector.rpartition("=")[2]
    matching = (name for start, name in _ACCELERATORS.items() if re.match(rf"{start}\b", node_label))
    return next(matching, None)


def _config(fleet: Fleet, pool: Pool, max_model_len: int) -> Document:
    """Ray's LLMConfig of one pool. Raises InputError for a pool that must avoid capped nodes, and for
    adapters.
    """
    if kubernetes.keeps_off_capped(fleet, pool):
        raise InputError(
            "ray-serve: cannot keep a pool off nodes, and another pool caps "
            f"{engine_command.one_line(pool.type.gpu.base)}; take kubernetes"
        )
    engine_command.refuse_adapters(fleet, "ray-serve", "loads adapters by its own lora_config")
    engine_settings = engine_command.engine_flags(pool, fleet, max_model_len)
    # Without `served-model-name`, which is `model_id` below.
    kwargs = {
        key.replace("-", "_"): value for key, value in engine_settings.items() if key != "served-model-name"
    }
    config: Document = {
        "model_loading_config": {"model_id": fleet.llm.name, "model_source": fleet.llm.name},
        "deployment_config": {"num_replicas": pool.count},
        "engine_kwargs": kwargs,
    }
    if variables := engine_command.hand_off_environment(pool, fleet):
        config["runtime_env"] = {"env_vars": variables}
    if (router := _router(fleet, pool)) is not None:
        config["deployment_config"]["request_router_config"] = router
    if (name := ray_accelerator(pool.type.gpu)) is not None:
        config["accelerator_type"] = name
    return config


def _router(fleet: Fleet, pool: Pool) -> Document | None:
    """Ray's class for the plan's routing to `pool`, or for the nearest rule; None for Ray's default."""
    planned = _planned_routing(fleet, pool)
    ray_rule = find_router_difference(planned, RAY_SERVE)
    if ray_rule.name not in _ROUTER_CLASSES:
        return None
    router: Document = {"request_router_class": _ROUTER_CLASSES[ray_rule.name]}
    if planned.needs_caches and not ray_rule.is_lacking:  # Ray has exactly the planned rule.
        router["request_router_kwargs"] = {
            "imbalanced_threshold": fleet.policies.balance_requests,
            "match_rate_threshold": fleet.policies.cache_threshold_frac,
        }
    return router


def _planned_routing(fleet: Fleet, pool: Pool) -> Routing:
    """The routing by which the plan chooses a worker of `pool`."""
    policies = fleet.policies
    return ROUTING[policies.decode_routing if pool.role == "decode" else policies.routing]
