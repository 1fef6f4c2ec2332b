"""The target llm-d: Helm values of its chart llm-d-modelservice (a release per pool), and of its router's
chart.

The releases share the label llm-d.ai/model, by which llm-d's router finds the pods of all pools. Decode pods
have a routing sidecar on port 8000 in front of vLLM on 8200. We write the command ourselves (`modelCommand:
custom`), because the chart would derive other flags. The chart runs Helm's template engine over the
environment but not over the arguments, so names from a user, which might look like a template, are only in
arguments.

Data-parallel ranks on several nodes are a LeaderWorkerSet (`multinode`) of equal pods: each has a front end
for its own ranks (--data-parallel-hybrid-lb), and a shell computes the number of its first rank, as in
llm-d's guide wide-ep-lws (modelserver/gpu/vllm-deepseek-v4/base/decode.yaml at 034b87d).
"""

from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Pool
from planner.manifests import endpoint_picker, engine_command, kubernetes
from planner.manifests.engine_command import HTTP_PORT, NIXL_PORT
from planner.manifests.kubernetes import Document

CHART_VERSION, ROUTER_VERSION = "v0.4.12", "v0.10.0"
ROUTER_CHART = "oci://ghcr.io/llm-d/charts/llm-d-router-standalone"
# This chart has an InferencePool and an HTTPRoute for a Gateway of the cluster, in place of the router's
# proxy.
GATEWAY_CHART = "oci://ghcr.io/llm-d/charts/llm-d-router-gateway"
GATEWAY_NAME = "inference-gateway"  # The chart's default.
PLUGINS_FILE = "plan.yaml"
ENGINE = (
    f"vLLM {engine_command.VLLM_VERSION}, charts llm-d-modelservice {CHART_VERSION} and "
    f"llm-d-router-standalone {ROUTER_VERSION}"
)
BEHIND_SIDECAR_PORT = 8200  # vLLM's port in pods with a routing sidecar.
SPARE_GIB = 10  # For tokenizer, configuration and rounding; set by hand.
PROXY_PORT = 8081  # The port of the chart's proxy (Envoy), beside the endpoint picker.
# The shell's command in each pod of a worker on several nodes. Kubernetes turns $$ into $, and the shell then
# computes $((...)). "$@" are the container's args; the word before them, `vllm`, is the shell's $0.
_START = 'exec vllm serve "$@" --data-parallel-start-rank $$((LWS_WORKER_INDEX * {ranks}))'


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """llm-d/POOL.values.yaml for every pool, and values of both charts of the router."""
    files = {}
    for name, pool in zip(engine_command.pool_labels(fleet), fleet.running_pools, strict=True):
        release = _release_name(fleet, name)
        header = f"# helm install {release} ... -f {name}.values.yaml   (chart {CHART_VERSION})\n"
        if engine_command.is_capped(pool.type.gpu):
            header += engine_command.power_note(pool.type.gpu) + "\n"
        files[f"llm-d/{name}.values.yaml"] = header + to_yaml(values(fleet, pool, max_model_len))
    release = _release_name(fleet, "router")
    header = f"# helm install {release} ... -f router.values.yaml   (chart {ROUTER_VERSION})\n"
    files["llm-d/router.values.yaml"] = header + to_yaml(router_values(fleet))
    header = f"# helm install {release} ... -f gateway.values.yaml   (chart {ROUTER_VERSION})\n"
    files["llm-d/gateway.values.yaml"] = header + to_yaml(gateway_values(fleet))
    return files


def router_values(fleet: Fleet) -> Document:
    """The values of the router's release: one endpoint picker, because each counts only its own requests."""
    port = {"name": "http", "port": 80, "protocol": "TCP", "targetPort": PROXY_PORT}
    return {"router": {"extraServicePorts": [port], **_picker_values(fleet)}}


def gateway_values(fleet: Fleet) -> Document:
    """The same endpoint picker behind a Gateway: the chart makes the InferencePool and the HTTPRoute."""
    # "0s" is no limit; the chart's default is 300 s.
    route = {"create": True, "inferenceGatewayName": GATEWAY_NAME, "requestTimeout": "0s"}
    return {"router": _picker_values(fleet), "httpRoute": route}


def _picker_values(fleet: Fleet) -> Document:
    """Values for both charts: the endpoint picker, for mixed workers or for pairs, and its pods."""
    picker = endpoint_picker.picker_config(fleet, is_pair=fleet.is_disaggregated)
    return {
        "modelServers": {"matchLabels": {"llm-d.ai/model": engine_command.llm_label(fleet)}},
        "epp": {
            "replicas": 1,
            "pluginsConfigFile": PLUGINS_FILE,
            "pluginsCustomConfig": {PLUGINS_FILE: to_yaml(picker)},
        },
    }


def steps(fleet: Fleet) -> list[str]:
    """The commands that install the releases, for a README."""
    return [
        "    helm repo add llm-d-modelservice https://llm-d-incubation.github.io/llm-d-modelservice/",
        f"    {kubernetes.SECRET}",
        *(
            f"    helm install {_release_name(fleet, name)} llm-d-modelservice/llm-d-modelservice --version "
            f"{CHART_VERSION} -f llm-d/{name}.values.yaml"
            for name in engine_command.pool_labels(fleet)
        ),
        f"    helm install {_release_name(fleet, 'router')} {ROUTER_CHART} --version {ROUTER_VERSION} "
        "-f llm-d/router.values.yaml",
        "",
        "Needs the CRDs of the Gateway API's inference extension. The router's Service answers on port 80. "
        f"Behind a Gateway ({GATEWAY_NAME}, or what you set), in place of the last release:",
        "",
        f"    helm install {_release_name(fleet, 'router')} {GATEWAY_CHART} --version {ROUTER_VERSION} "
        "-f llm-d/gateway.values.yaml   # provider.name=gke or istio there",
    ]


def routing(fleet: Fleet) -> str:
    """A sentence on what routes requests, for a README."""
    return endpoint_picker.routing_text(fleet.policies, is_pair=fleet.is_disaggregated)


def _release_name(fleet: Fleet, name: str) -> str:
    """The name of the Helm release of a pool or of the router: the LLM's label, then `name`."""
    return f"{engine_command.llm_label(fleet)}-{name}"


def values(fleet: Fleet, pool: Pool, max_model_len: int) -> Document:
    """The values of one pool's release. Mixed workers are decode workers of the chart."""
    if len(engine_command.routers_of(fleet)) > 1:
        raise InputError(
            "llm-d: one router of it serves mixed workers or pairs, and this plan has both; take kubernetes"
        )
    name, gpu = engine_command.hub_name(fleet, "llm-d"), pool.type.gpu
    if pool.type.pp > 1:
        raise InputError(
            f"llm-d: its chart gives a worker tp x dp GPUs, too few for pp {pool.type.pp}; take lws"
        )
    nodes = engine_command.nodes_of(pool.type)
    if kubernetes.keeps_off_capped(fleet, pool):
        raise InputError(
            f"llm-d: another pool caps {engine_command.one_line(gpu.base)}, and its chart cannot keep "
            "this pool off the capped nodes; take kubernetes"
        )
    own, other = ("prefill", "decode") if pool.role == "prefill" else ("decode", "prefill")
    workers: Document = {
        "create": True,
        "replicas": pool.count,
        "parallelism": {
            "tensor": pool.type.tp,
            "data": pool.type.dp,
            "dataLocal": engine_command.local_ranks(pool.type),
            "workers": nodes,
        },
        "terminationGracePeriodSeconds": kubernetes.STOP_S,
        "nodeSelector": kubernetes.node_labels(gpu),
        "tolerations": kubernetes.gpu_tolerations(gpu),
        "containers": [kubernetes.with_memory_request(fleet, pool, _engine(fleet, pool, max_model_len))],
        "volumes": [kubernetes.shared_memory(fleet, pool)],
    }
    return {
        "modelArtifacts": {
            "name": name,
            "uri": f"hf://{name}",
            "size": f"{_volume_gib(fleet)}Gi",
            "authSecretName": engine_command.SECRET_NAME,
            "labels": {
                "llm-d.ai/inference-serving": "true",
                "llm-d.ai/model": engine_command.llm_label(fleet),
            },
        },
        "accelerator": {"type": "amd" if engine_command.is_rocm(gpu) else "nvidia"},
        "multinode": nodes > 1,
        "routing": {
            "servicePort": HTTP_PORT,
            "proxy": {
                "enabled": pool.role == "decode",
                "targetPort": BEHIND_SIDECAR_PORT,
                "connector": "nixlv2",
                "secure": False,
            },
        },
        own: workers,
        other: {"create": False},
    }


def _engine(fleet: Fleet, pool: Pool, max_model_len: int) -> Document:
    """The container with vLLM of one worker, on one of the worker's nodes."""
    port = BEHIND_SIDECAR_PORT if pool.role == "decode" else HTTP_PORT
    args = [*engine_command.engine_args(pool, fleet, max_model_len), "--port", str(port)]
    args, command = kubernetes.escape_variables(args), ["vllm", "serve"]
    if engine_command.nodes_of(pool.type) > 1:
        args += ["--data-parallel-hybrid-lb", "--data-parallel-address", "$(LWS_LEADER_ADDRESS)"]
        command = ["sh", "-c", _START.format(ranks=engine_command.local_ranks(pool.type)), "vllm"]
    ports = [{"name": "metrics", "containerPort": port, "protocol": "TCP"}]
    if pool.role != "mixed":
        ports.append({"name": "nixl", "containerPort": NIXL_PORT, "protocol": "TCP"})
    return {
        "name": "vllm",
        "image": engine_command.engine_image(pool.type),
        "modelCommand": "custom",
        "command": command,
        "args": [*args, *engine_command.drain_args(pool.type)],
        "env": kubernetes.nixl_environment(fleet, pool),
        "ports": ports,
        "resources": kubernetes.gpu_resources(pool),
        **kubernetes.health_probes(port="metrics"),
        "volumeMounts": [kubernetes.SHM_MOUNT],
        "mountModelVolume": True,
        "extraConfig": {"lifecycle": kubernetes.LEAVING},
    }


def _volume_gib(fleet: Fleet) -> int:
    """The volume for the checkpoint [GiB]: twice the weights, because some repositories have two formats, and
    SPARE_GIB.
    """
    return SPARE_GIB + round(2 * fleet.llm.weight_bytes / 2**30)
