"""The target Kubernetes: per pool a Deployment, a headless Service and a PodDisruptionBudget, and a router.

The router watches pods by label, for which it needs its own Role. Through a Service it could not choose a
worker, because a Service spreads connections blindly. Other targets that run pods use functions of this
module.
"""

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from planner.domain import Gpu
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Pool, Role
from planner.manifests import engine_command, helm_chart, kustomize, kv_store, sglang_engine
from planner.manifests.engine_command import (
    APP,
    HTTP_PORT,
    NIXL_PORT,
    NO_PRIVILEGES,
    PART,
    ROLE,
    SECRET_KEY,
    SECRET_NAME,
    USUAL_SYSCALLS,
)
from planner.units import count_text

Document = dict[str, Any]
# Label of nodes whose GPUs are capped; users set it as the README says. Workers on a capped GPU run only on
# these nodes, and uncapped workers of the same GPU on others. Pods have an annotation of this name as
# information.
POWER_LIMIT = "fleetplan/gpu-power-limit-w"
SECRET = f"kubectl create secret generic {SECRET_NAME} --from-literal={SECRET_KEY}=$HF_TOKEN"
# While a new version rolls out, there are never more workers than the plan has GPUs for.
ONE_AT_A_TIME = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
# Each target has `ENGINE` and `routing`, for its README (manifests/__init__.py).
ENGINE = f"vLLM {engine_command.VLLM_VERSION}"
routing = engine_command.routing_sentence  # A target has `routing`, `render` and `steps` (__init__.py).
# Ranks of a worker communicate through shared memory: 16 GiB suffice, a pod's default of 64 MB does not.
SHM_GIB = 16
STORE_SPARE_GIB = 8  # Memory of the process that owns a store's KV blocks, beside the blocks.
STORE_PROTOCOL = "tcp"  # RDMA needs devices that are not requested here.
# CPUs and memory that a worker requests per GPU, for the GPU's process. One more CPU is for the API server.
CPUS_PER_GPU, MEMORY_PER_GPU_GIB = 2, 8
# Before a worker is told to stop, routers have this time to notice that they must send it no more requests.
LEAVE_S = 10
STOP_S = LEAVE_S + engine_command.DRAIN_S + engine_command.KILL_S
LEAVING: Document = {"preStop": {"exec": {"command": ["sleep", str(LEAVE_S)]}}}
SHM_MOUNT: Document = {"name": "shm", "mountPath": "/dev/shm"}

# Names and values that Kubernetes accepts as labels.
_LABEL_NAME = re.compile(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII
)
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """The files of this target by name: kubernetes.yaml, which has everything to apply; components that
    Kustomize can add; a Helm chart of the same objects; and the Dockerfile of the router's image.
    """
    objects, components = documents(fleet, max_model_len), kustomize.kustomize_files(fleet)
    return {
        "kubernetes.yaml": in_one_file("kubernetes.yaml", fleet, objects),
        **components,
        **helm_chart.chart_files(fleet, objects, components),
        **engine_command.router_image_files(),
    }


def chart_of(fleet: Fleet, files: Mapping[str, str]) -> dict[str, str]:
    """The Helm chart of `files`, made anew after a change of their kubernetes.yaml (scalable_pools.py)."""
    objects = [each for each in yaml.safe_load_all(files["kubernetes.yaml"]) if each is not None]
    chart, path = helm_chart.chart_files(fleet, objects, files), f"{helm_chart.FOLDER}/values.yaml"
    # The old values.yaml may have more comments at its top (manifest_notes.py adds them), so these replace
    # the first line of the new one, which is its only comment.
    comments = [line for line in files[path].splitlines(keepends=True) if line.startswith("#")]
    return chart | {path: "".join(comments) + chart[path].partition("\n")[2]}


def steps(fleet: Fleet) -> list[str]:
    """How to apply kubernetes.yaml, alone or by Kustomize or Helm, as lines of the README."""
    return [
        *engine_command.router_image_steps("kubernetes.yaml"),
        f"    {SECRET}",
        "    kubectl apply -f kubernetes.yaml",
        f"    kubectl port-forward service/{engine_command.llm_label(fleet)}-router {HTTP_PORT}",
        "",
        "Needs the GPU operator (device plugin and feature discovery, which labels the nodes).",
        "",
        "For production: the weights on one volume in place of a download by each worker, and network "
        "policies. An overlay takes what you want of `components`, and `kubectl apply -k prod` applies it:",
        "",
        *kustomize.overlay_lines(fleet),
        "",
        f"`{kustomize.GATEWAY}` (needs the Gateway API) and, for vLLM, `{kustomize.MONITORING}` (needs the "
        "Prometheus operator) can be added there.",
        "",
        *helm_chart.steps(fleet),
    ]


def in_one_file(name: str, fleet: Fleet, documents: list[Document]) -> str:
    """The documents as one file for kubectl, with a comment at the top."""
    llm, gpus = engine_command.one_line(fleet.llm.name), count_text(fleet.gpus, "GPU")
    header = f"# {llm} on {gpus}.   kubectl apply -f {name}\n"
    return header + "---\n".join(map(to_yaml, documents))


def documents(fleet: Fleet, max_model_len: int) -> list[Document]:
    """The Kubernetes objects that deploy the fleet: those of the workers, then those of the router."""
    engine_command.refuse_several_nodes(fleet, "kubernetes")
    pools: list[Document] = []
    for name, pool in zip(engine_command.pool_labels(fleet), fleet.running_pools, strict=True):
        labels = labels_of(fleet, name, pool)
        pools += [
            _deployment(fleet, pool, labels, max_model_len),
            headless(labels),
            disruption_budget(labels),
        ]
    return [*pools, *_store(fleet), *router(fleet)]


def labels_of(fleet: Fleet, name: str, pool: Pool) -> Document:
    """The labels of the pods of pool `name`, by which the router and other objects find them."""
    app = engine_command.llm_label(fleet)
    return {APP: app, PART: f"{app}-{name}", ROLE: f"{pool.role}"}


def node_labels(gpu: Gpu) -> Document:
    """The labels that a node must have: the GPU's, and POWER_LIMIT if its power is capped."""
    key, equals, value = gpu.node_selector.rpartition("=")
    key = key if equals else "nvidia.com/gpu.product"
    if not (_LABEL_NAME.fullmatch(key) and _LABEL_VALUE.fullmatch(value)):
        raise InputError(
            f"GPU {engine_command.one_line(gpu.name)}: node_selector: expected a value of the node label "
            f"nvidia.com/gpu.product, or LABEL=VALUE, found {gpu.node_selector[:200]!r}"
        )
    selector: Document = {key: value}
    if engine_command.is_capped(gpu):
        selector[POWER_LIMIT] = f"{gpu.power_w:g}"
    return selector


def resource_of(gpu: Gpu) -> str:
    """The name by which a pod requests this GPU."""
    return "amd.com/gpu" if engine_command.is_rocm(gpu) else "nvidia.com/gpu"


def escape_variables(args: list[str]) -> list[str]:
    """Arguments with $ doubled: Kubernetes reads $(NAME) as a variable, and $$ as a plain $."""
    return [arg.replace("$", "$$") for arg in args]


def worker_environment(fleet: Fleet, pool: Pool) -> list[Document]:
    """A worker's environment: the token for the hub, if the secret exists, and the address for KV."""
    token = {"name": SECRET_NAME, "key": SECRET_KEY, "optional": True}
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}}, *nixl_environment(fleet, pool)]


def nixl_environment(fleet: Fleet, pool: Pool) -> list[Document]:
    """Variables with the address at which a prefill or decode worker exchanges KV, and others that the
    exchange of this LLM's KV needs; empty for a mixed worker.
    """
    if pool.role == "mixed":
        return []
    return [
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(NIXL_PORT)},
        *(
            {"name": name, "value": value}
            for name, value in engine_command.hand_off_environment(pool, fleet).items()
        ),
    ]


def gpu_tolerations(gpu: Gpu) -> list[Document]:
    """Tolerations of the taint that keeps other pods off nodes with GPUs."""
    return [{"key": resource_of(gpu), "operator": "Exists", "effect": "NoSchedule"}]


def shared_memory(fleet: Fleet, pool: Pool) -> Document:
    """The volume /dev/shm of a pod. It is also where vLLM keeps KV blocks in CPU memory."""
    size_gib = SHM_GIB + _offload_gib(fleet, pool)
    return {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{size_gib}Gi"}}


def _offload_gib(fleet: Fleet, pool: Pool) -> int:
    """CPU memory for a worker's KV blocks [GiB], rounded up."""
    return math.ceil(engine_command.cpu_bytes(pool, fleet) / 2**30)


def with_memory_request(fleet: Fleet, pool: Pool, main: Document) -> Document:
    """The container `main` with a request for the CPU memory of its KV blocks, if it has any.

    For pods that `pod_template` does not make; `pod_template` requests this memory itself (`_with_requests`).
    """
    if not (size_gib := _offload_gib(fleet, pool)):
        return main
    main_resources = main["resources"]
    requests = {**main_resources["requests"], "memory": f"{SHM_GIB + size_gib}Gi"}
    return {**main, "resources": {**main_resources, "requests": requests}}


def _with_requests(fleet: Fleet, pool: Pool, main: Document) -> Document:
    """The container `main` of a worker with requests for CPUs and memory, and without privileges."""
    gpus = pool.type.gpus // engine_command.nodes_of(pool.type)  # GPUs of a pod, which is on one node.
    memory_gib = SHM_GIB + _offload_gib(fleet, pool) + MEMORY_PER_GPU_GIB * gpus
    requests = {"cpu": str(1 + CPUS_PER_GPU * gpus), "memory": f"{memory_gib}Gi"}
    main_resources = main["resources"]
    return {
        **main,
        "resources": {**main_resources, "requests": {**main_resources["requests"], **requests}},
        "securityContext": NO_PRIVILEGES,
    }


def gpu_resources(pool: Pool) -> Document:
    """The GPUs of one pod: a worker's share of one node."""
    gpus = {resource_of(pool.type.gpu): str(pool.type.gpus // engine_command.nodes_of(pool.type))}
    return {"limits": gpus, "requests": dict(gpus)}


def worker_container(fleet: Fleet, pool: Pool, args: list[str]) -> Document:
    """A container with vLLM on HTTP_PORT. `args` are as Kubernetes reads them, after `escape_variables`.
    Kustomize patches the container by name.
    """
    ports = [{"name": "http", "containerPort": HTTP_PORT}]
    if pool.role != "mixed":
        ports.append({"name": "nixl", "containerPort": NIXL_PORT})
    return {
        "name": engine_command.CONTAINER,
        "image": engine_command.engine_image(pool.type),
        "command": ["vllm", "serve"],
        "args": [*args, *engine_command.drain_args(pool.type)],
        "env": worker_environment(fleet, pool),
        "ports": ports,
        "resources": gpu_resources(pool),
        "lifecycle": LEAVING,
        **health_probes(),
        "volumeMounts": [SHM_MOUNT],
    }


def health_probes(*, port: str = "http") -> Document:
    """Health checks: an engine has START_S to start. Later, if they fail for 15 s, Services send the pod no
    requests; after 60 s its engine is restarted.
    """
    health = {"httpGet": {"path": "/health", "port": port}}
    return {
        "startupProbe": {**health, "periodSeconds": 10, "failureThreshold": engine_command.START_S // 10},
        "readinessProbe": {**health, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
    }


def node_affinity(fleet: Fleet, pool: Pool) -> Document:
    """The nodes on which a pod may run: those with its GPU and power cap. If the fleet has the same GPU with
    and without a cap, uncapped pods avoid the capped nodes.
    """
    gpu = pool.type.gpu
    scheduling: Document = {"nodeSelector": node_labels(gpu), "tolerations": gpu_tolerations(gpu)}
    if keeps_off_capped(fleet, pool):
        uncapped = {"matchExpressions": [{"key": POWER_LIMIT, "operator": "DoesNotExist"}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [uncapped]}}
        scheduling["affinity"] = {"nodeAffinity": required}
    return scheduling


def keeps_off_capped(fleet: Fleet, pool: Pool) -> bool:
    """Whether another pool caps the same GPU, so that this pool must avoid capped nodes."""
    gpu = pool.type.gpu
    return not engine_command.is_capped(gpu) and any(
        other.type.gpu.base == gpu.base and engine_command.is_capped(other.type.gpu)
        for other in fleet.running_pools
    )


def pod_template(fleet: Fleet, pool: Pool, labels: Document, main: Document) -> Document:
    """A pod template around the container `main`, with its requests, its nodes and its /dev/shm."""
    metadata: Document = {"labels": labels}
    if engine_command.is_capped(pool.type.gpu):
        metadata["annotations"] = {POWER_LIMIT: f"{pool.type.gpu.power_w:g}"}
    return {
        "metadata": metadata,
        "spec": {
            **node_affinity(fleet, pool),
            "terminationGracePeriodSeconds": STOP_S,
            "automountServiceAccountToken": False,
            "securityContext": USUAL_SYSCALLS,
            "containers": [_with_requests(fleet, pool, main)],
            "volumes": [shared_memory(fleet, pool)],
        },
    }


def _deployment(fleet: Fleet, pool: Pool, labels: Document, max_model_len: int) -> Document:
    """The Deployment of a pool: one pod per worker; pods are replaced one at a time."""
    main = _engine_container(fleet, pool, max_model_len)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": labels[PART], "labels": labels},
        "spec": {
            "replicas": pool.count,
            "selector": {"matchLabels": {APP: labels[APP], PART: labels[PART]}},
            "strategy": ONE_AT_A_TIME,
            # By default a rollout counts as failed after 600 s, in which a large LLM may not have started.
            "progressDeadlineSeconds": engine_command.START_S,
            "template": _with_store(fleet, pool, pod_template(fleet, pool, labels, main)),
        },
    }


def _engine_container(fleet: Fleet, pool: Pool, max_model_len: int) -> Document:
    """The container of vLLM, or of SGLang if the plan was made for it, with the plan's flags."""
    port = ["--port", str(HTTP_PORT)]
    if not sglang_engine.is_sglang(fleet):
        args = [*engine_command.engine_args(pool, fleet, max_model_len), *port]
        return worker_container(fleet, pool, escape_variables(args))
    engine_command.check_name(fleet.llm.name)  # For vLLM `engine_args` checks it.
    longest_tokens = engine_command.served_model_len(fleet, max_model_len)
    args = [*engine_command.to_args(sglang_engine.sglang_flags(pool, fleet, longest_tokens)), *port]
    return worker_container(fleet, pool, escape_variables(args)) | {"command": list(sglang_engine.COMMAND)}


def _store_name(fleet: Fleet) -> str:
    """The name of the KV store's service, after the LLM."""
    return f"{engine_command.llm_label(fleet)}-{kv_store.NAME}"


def _with_store(fleet: Fleet, pool: Pool, template: Document) -> Document:
    """The pod template, with the configuration of the shared store of KV blocks if its pool uses one."""
    if not kv_store.uses_store(fleet, pool):
        return template
    (main,) = template["spec"]["containers"]
    main["env"] = [*main["env"], {"name": kv_store.CONFIG_PATH, "value": f"/etc/mooncake/{kv_store.CONFIG}"}]
    main["volumeMounts"] = [*main["volumeMounts"], {"name": kv_store.NAME, "mountPath": "/etc/mooncake"}]
    template["spec"]["volumes"].append({"name": kv_store.NAME, "configMap": {"name": _store_name(fleet)}})
    return template


def _store(fleet: Fleet) -> list[Document]:
    """The store of KV blocks that workers share: its master and the owner of the memory in one pod."""
    if not (size := kv_store.size_bytes(fleet)):
        return []
    name, app = _store_name(fleet), engine_command.llm_label(fleet)
    labels = {APP: app, PART: name, ROLE: kv_store.NAME}
    metadata = {"name": name, "labels": labels}
    memory = f"{math.ceil(size / 2**30) + STORE_SPARE_GIB}Gi"
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    port = {"name": "master", "containerPort": kv_store.MASTER_PORT}
    master = {
        "name": "master",
        "image": engine_command.IMAGE,
        "command": kv_store.master_args(),
        "ports": [port],
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "8Gi"}},
        "securityContext": NO_PRIVILEGES,
        "readinessProbe": {"tcpSocket": {"port": "master"}, "periodSeconds": 5},
    }
    owner = {
        "name": "owner",
        "image": engine_command.IMAGE,
        "command": kv_store.owner_args(size, "$(POD_IP)", STORE_PROTOCOL),
        "env": [address],
        "resources": {"requests": {"cpu": "4", "memory": memory}, "limits": {"memory": memory}},
        "securityContext": NO_PRIVILEGES,
    }
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": USUAL_SYSCALLS,
        "containers": [master, owner],
    }
    selector = {APP: app, PART: name}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {kv_store.CONFIG: kv_store.store_config(name, STORE_PROTOCOL)},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": selector},
                # By default the new pod starts before the old one ends, and both would need the memory.
                "strategy": {"type": "Recreate"},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"selector": selector, "ports": [{"name": "master", "port": kv_store.MASTER_PORT}]},
        },
    ]


def headless(labels: Document) -> Document:
    """A headless Service: it has no address, but gives every pod of a pool a name in DNS."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": labels[PART], "labels": labels},
        "spec": {
            "clusterIP": "None",
            "selector": {APP: labels[APP], PART: labels[PART]},
            "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http"}],
        },
    }


def disruption_budget(labels: Document) -> Document:
    """A PodDisruptionBudget: drains of nodes stop one worker of a pool at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": labels[PART], "labels": labels},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {APP: labels[APP], PART: labels[PART]}}},
    }


def router(fleet: Fleet) -> list[Document]:
    """The objects of the router (of two, if the fleet has mixed workers and pairs), and of the account with
    which routers watch pods.
    """
    app = engine_command.llm_label(fleet)
    routers = [
        _router_objects(fleet, app, name, roles) for name, roles in engine_command.routers_of(fleet).items()
    ]
    return [*_discovery(app), *itertools.chain(*routers)]


def _discovery(app: str) -> list[Document]:
    name = f"{app}-router"
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    return account_with_role({"name": name, "labels": {APP: app, PART: name}}, [pods])


def account_with_role(metadata: Document, rules: list[Document]) -> list[Document]:
    """A ServiceAccount, with a Role and RoleBinding of the same name that grant it `rules`."""
    rbac, name = "rbac.authorization.k8s.io", metadata["name"]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
        },
    ]


def _router_objects(fleet: Fleet, app: str, router_name: str, roles: tuple[Role, ...]) -> list[Document]:
    """The Deployment and the Service of a router for workers of these roles."""
    name = f"{app}-{router_name}"
    labels = {APP: app, PART: name, ROLE: "router"}
    metadata = {"name": name, "labels": labels}
    args = [
        *engine_command.router_policy_args(fleet, roles),
        "--service-discovery",
        "--service-discovery-namespace",
        "$(POD_NAMESPACE)",
        "--service-discovery-port",
        str(HTTP_PORT),
    ]
    for role in roles:
        flag = "--selector" if role == "mixed" else f"--{role}-selector"
        args += [flag, f"{APP}={app}", f"{ROLE}={role}"]
    command = engine_command.router_command(args)
    container = {
        "name": "router",
        "image": engine_command.ROUTER_IMAGE,
        "command": command[:1],
        "args": command[1:],
        "env": [{"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "resources": {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
        "securityContext": {**NO_PRIVILEGES, "readOnlyRootFilesystem": True},
        "lifecycle": LEAVING,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "startupProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 5, "failureThreshold": 60},
        "readinessProbe": {"httpGet": {"path": "/readiness", "port": "http"}, "periodSeconds": 5},
        "livenessProbe": {"httpGet": {"path": "/liveness", "port": "http"}, "periodSeconds": 10},
    }
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": {APP: app, PART: name}},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "serviceAccountName": f"{app}-router",
                        "terminationGracePeriodSeconds": STOP_S,  # It ends its requests before it stops.
                        "securityContext": {
                            **USUAL_SYSCALLS,
                            "runAsNonRoot": True,
                            "runAsUser": engine_command.ROUTER_USER,
                        },
                        "containers": [container],
                        "volumes": [{"name": "tmp", "emptyDir": {}}],
                    },
                },
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {
                "selector": {APP: app, PART: name},
                "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": "http"}],
            },
        },
    ]
