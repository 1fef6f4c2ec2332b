"""Plain Kubernetes: per pool a Deployment and a headless Service, and a router that finds the pods.

The router watches pods by label (so it needs a Role of its own) rather than a Service's address: a Service
spreads connections blindly, and the plan's routing would be lost.
"""

from __future__ import annotations

from typing import Any

from planner.domain import Fleet, Gpu, Pool, Role
from planner.files import to_yaml
from planner.manifests import engine
from planner.manifests.engine import HTTP_PORT, NIXL_PORT

Document = dict[str, Any]
APP, PART, ROLE = "app.kubernetes.io/name", "app.kubernetes.io/component", "fleetplan/role"
POWER_LIMIT = "fleetplan/gpu-power-limit-w"  # annotation of pods; label of the nodes that have the cap


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """kubernetes.yaml: everything to apply, in one file."""
    about = f"# {fleet.llm.name} on {fleet.gpus} GPUs.   kubectl apply -f kubernetes.yaml\n"
    return {"kubernetes.yaml": about + "---\n".join(map(to_yaml, documents(fleet, max_model_len)))}


def documents(fleet: Fleet, max_model_len: int) -> list[Document]:
    """The objects, workers first."""
    app = engine.llm_label(fleet)
    pools: list[Document] = []
    for name, pool in zip(engine.pool_labels(fleet), engine.running(fleet), strict=True):
        labels = {APP: app, PART: f"{app}-{name}", ROLE: f"{pool.role}"}
        pools += [_workers(fleet, pool, labels, max_model_len), _headless(labels)]
    routers = [_router(fleet, app, name, roles) for name, roles in engine.routers(fleet).items()]
    return [*pools, *_discovery(app), *(document for router in routers for document in router)]


def node_labels(gpu: Gpu) -> Document:
    """What a node must carry: the GPU's label, and our own where its power is capped."""
    key, _, value = gpu.node_selector.rpartition("=")
    selector: Document = {key or "nvidia.com/gpu.product": value}
    if engine.is_capped(gpu):
        selector[POWER_LIMIT] = f"{gpu.power_w:g}"
    return selector


def _workers(fleet: Fleet, pool: Pool, labels: Document, max_model_len: int) -> Document:
    gpu = pool.type.gpu
    resource = "amd.com/gpu" if engine.is_rocm(gpu) else "nvidia.com/gpu"
    health = {"httpGet": {"path": "/health", "port": "http"}}
    environment: list[Document] = [
        {"name": "HF_TOKEN",
         "valueFrom": {"secretKeyRef": {"name": "hf-token-secret", "key": "token", "optional": True}}},
    ]  # fmt: skip
    ports = [{"name": "http", "containerPort": HTTP_PORT}]
    if pool.role != "mixed":
        environment += [
            {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST",
             "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(NIXL_PORT)},
        ]  # fmt: skip
        ports.append({"name": "nixl", "containerPort": NIXL_PORT})
    container: Document = {
        "name": "vllm",
        "image": engine.image(gpu),
        # Kubernetes would expand $(NAME) in an argument
        "args": [arg.replace("$", "$$") for arg in engine.engine_args(pool, fleet, max_model_len)],
        "env": environment,
        "ports": ports,
        "resources": {
            "limits": {resource: str(pool.type.gpus)},
            "requests": {resource: str(pool.type.gpus)},
        },
        "startupProbe": {**health, "periodSeconds": 10, "failureThreshold": engine.START_S // 10},
        "readinessProbe": {**health, "periodSeconds": 5, "failureThreshold": 3},
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod: Document = {
        "metadata": {"labels": labels},
        "spec": {
            "nodeSelector": node_labels(gpu),
            "tolerations": [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}],
            "terminationGracePeriodSeconds": 120,
            "containers": [container],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}],
        },
    }
    if engine.is_capped(gpu):
        pod["metadata"]["annotations"] = {POWER_LIMIT: f"{gpu.power_w:g}"}
    elif any(other.type.gpu.base == gpu.base and engine.is_capped(other.type.gpu) for other in fleet.pools):
        uncapped = {"matchExpressions": [{"key": POWER_LIMIT, "operator": "DoesNotExist"}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [uncapped]}}
        pod["spec"]["affinity"] = {"nodeAffinity": required}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": labels[PART], "labels": labels},
        "spec": {
            "replicas": pool.count,
            "selector": {"matchLabels": {APP: labels[APP], PART: labels[PART]}},
            # no worker more than the plan has GPUs for, even while a new version rolls out
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": pod,
        },
    }


def _headless(labels: Document) -> Document:
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


def _discovery(app: str) -> list[Document]:
    """The right to watch pods, for the routers."""
    name, rbac = f"{app}-router", "rbac.authorization.k8s.io"
    metadata = {"name": name, "labels": {APP: app, PART: name}}
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": [pods]},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
        },
    ]


def _router(fleet: Fleet, app: str, router: str, roles: tuple[Role, ...]) -> list[Document]:
    name = f"{app}-{router}"
    labels = {APP: app, PART: name, ROLE: "router"}
    metadata = {"name": name, "labels": labels}
    args = [
        *engine.router_policy_args(fleet, roles), "--service-discovery",
        "--service-discovery-namespace", '"$POD_NAMESPACE"', "--service-discovery-port", str(HTTP_PORT),
    ]  # fmt: skip
    for role in roles:
        flag = "--selector" if role == "mixed" else f"--{role}-selector"
        args += [flag, f"{APP}={app}", f"{ROLE}={role}"]
    container = {
        "name": "router",
        "image": engine.ROUTER_IMAGE,
        "command": engine.router_command(args),
        "env": [{"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "resources": {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
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
                    "spec": {"serviceAccountName": f"{app}-router", "containers": [container]},
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
