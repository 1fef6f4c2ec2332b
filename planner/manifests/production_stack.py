"""The target vLLM production-stack: values of its Helm chart vllm-stack, an entry of modelSpec per pool.

The chart labels pods by their pool. Its router gets the names of the prefill pools and of the decode pools,
and passes the KV connector's parameters from a prefill worker to a decode worker.
"""

from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Pool
from planner.manifests import engine_command, kubernetes
from planner.manifests.kubernetes import Document
from planner.policies import ROUTING, STACK, STACK_PAIRS, RouterDifference, find_router_difference

CHART_VERSION = "0.1.12"
ENGINE = f"vLLM {engine_command.VLLM_VERSION}, chart vllm-stack {CHART_VERSION}"
# The chart requires requests for CPUs and memory. vLLM mostly waits on GPUs, so these only keep a pod off a
# crowded node.
CPUS, MEMORY = 8, "32Gi"
GARBLED_FROM = 10**6  # From here on Helm prints numbers as 1e+06, which vLLM does not accept.
# Pods of the chart have Kubernetes' default of 30 s to stop; the engine gets this much of it for its
# requests.
DRAIN_S = 25
# Flags for which the chart has a value; other flags go into extraArgs.
_CHART_VALUES = {
    "tensor-parallel-size": "tensorParallelSize",
    "max-model-len": "maxModelLen",
    "max-num-seqs": "maxNumSeqs",
    "gpu-memory-utilization": "gpuMemoryUtilization",
    "enable-prefix-caching": "enablePrefixCaching",
}


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """The file production-stack.values.yaml: the values of the chart."""
    header = f"# helm install ... -f production-stack.values.yaml   (chart {CHART_VERSION})\n"
    return {"production-stack.values.yaml": header + to_yaml(values(fleet, max_model_len))}


def steps(fleet: Fleet) -> list[str]:
    """How to install the chart with these values, as lines of the README."""
    return [
        "    helm repo add vllm https://vllm-project.github.io/production-stack",
        f"    {kubernetes.SECRET}",
        f"    helm install {engine_command.llm_label(fleet)} vllm/vllm-stack --version {CHART_VERSION} "
        "-f production-stack.values.yaml",
        "",
        "The router's image is the chart's, by the tag `latest`: pin it with routerSpec.tag. Its pods have "
        f"30 s to stop, so requests that take longer than {DRAIN_S} s are aborted then. A rollout may be "
        "called failed by its progressDeadlineSeconds, for which it has no value, while a large LLM starts.",
    ]


def routing(fleet: Fleet) -> str:
    """The end of the README's line "Routing: ...": the rule of the chart's router, and its shortcomings."""
    rule, policies = _router_rule(fleet), fleet.policies
    if fleet.is_disaggregated:
        effect = ", which takes prefill and decode workers in turns"
    elif ROUTING[policies.routing].needs_caches and not rule.is_lacking:
        effect = ", which follows the longest match, whatever the load"
    else:
        effect = ""
    if rule.is_lacking:
        effect += f"; it has no {policies.routing}"
        effect += ", so the plan's hits are not kept" if policies.prefix_cache else ""
    return f"its {rule.name}{effect}."


def values(fleet: Fleet, max_model_len: int) -> Document:
    """The values of the chart for this fleet. Raises InputError for a fleet that its router cannot serve."""
    engine_command.refuse_several_nodes(fleet, "production-stack")
    if len(engine_command.routers_of(fleet)) > 1:  # Mixed workers, and pairs of prefill and decode workers.
        raise InputError(
            "production-stack: its router serves pairs or mixed pools, found both; take kubernetes"
        )
    probe = {"initialDelaySeconds": 15, "periodSeconds": 10, "failureThreshold": engine_command.START_S // 10}
    # The tolerations depend only on the resource, so one GPU per resource suffices.
    gpu_of_resource = {kubernetes.resource_of(pool.type.gpu): pool.type.gpu for pool in fleet.running_pools}
    models = [
        _model(fleet, name, pool, max_model_len)
        for name, pool in zip(engine_command.pool_labels(fleet), fleet.running_pools, strict=True)
    ]
    return {
        "servingEngineSpec": {
            "runtimeClassName": "",  # The chart's default, "nvidia", is not a class of every cluster.
            "strategy": kubernetes.ONE_AT_A_TIME,
            "startupProbe": {**probe, "httpGet": {"path": "/health", "port": engine_command.HTTP_PORT}},
            "tolerations": [
                each for gpu in gpu_of_resource.values() for each in kubernetes.gpu_tolerations(gpu)
            ],
            "modelSpec": models,
        },
        "routerSpec": {
            "enableRouter": True,
            "replicaCount": 1,
            "routingLogic": _router_rule(fleet).name,
            "extraArgs": _roles(fleet),
        },
    }


def _roles(fleet: Fleet) -> list[str]:
    """The router's arguments with the names of the prefill pools and of the decode pools."""
    words: list[str] = []
    for role in ("prefill", "decode"):
        pools = zip(engine_command.pool_labels(fleet), fleet.running_pools, strict=True)
        if names := [name for name, pool in pools if pool.role == role]:
            words += [f"--{role}-model-labels", ",".join(names)]
    return words


def _router_rule(fleet: Fleet) -> RouterDifference:
    """The rule of the chart's router in place of the plan's routing."""
    router = STACK_PAIRS if fleet.is_disaggregated else STACK
    return find_router_difference(ROUTING[fleet.policies.routing], router)


def _model(fleet: Fleet, name: str, pool: Pool, max_model_len: int) -> Document:
    """The entry of modelSpec for pool `name`."""
    gpu = pool.type.gpu
    engine_command.refuse_offload(fleet, "production-stack")
    engine_settings = engine_command.engine_flags(pool, fleet, max_model_len)
    if engine_command.served_model_len(fleet, max_model_len) >= GARBLED_FROM:
        raise InputError(
            f"production-stack: Helm garbles max-model-len {engine_settings['max-model-len']} (1e+06); "
            "take kubernetes"
        )
    extra = {key: value for key, value in engine_settings.items() if key not in _CHART_VALUES}
    repository, _, tag = engine_command.engine_image(pool.type).rpartition(":")
    labels = kubernetes.node_labels(gpu)
    expressions: list[Document] = [{"key": k, "operator": "In", "values": [v]} for k, v in labels.items()]
    if kubernetes.keeps_off_capped(fleet, pool):
        expressions.append({"key": kubernetes.POWER_LIMIT, "operator": "DoesNotExist"})
    model: Document = {
        "name": name,
        "repository": repository,
        "tag": tag,
        "modelURL": engine_command.plain_name(fleet, "production-stack"),
        "replicaCount": pool.count,
        "requestCPU": CPUS,
        "requestMemory": MEMORY,
        "requestGPU": pool.type.gpus,
        "requestGPUType": kubernetes.resource_of(gpu),
        "shmSize": f"{kubernetes.SHM_GIB}Gi",
        "hf_token": {"secretName": engine_command.SECRET_NAME, "secretKey": engine_command.SECRET_KEY},
        "vllmConfig": {
            **{value: engine_settings[key] for key, value in _CHART_VALUES.items()},
            "extraArgs": [*engine_command.to_args(extra), *engine_command.drain_args(pool.type, DRAIN_S)],
        },
        "env": kubernetes.nixl_environment(fleet, pool),
        "nodeSelectorTerms": [{"matchExpressions": expressions}],
    }
    if engine_command.is_capped(gpu):
        model["podAnnotations"] = {kubernetes.POWER_LIMIT: f"{gpu.power_w:g}"}
    return model
