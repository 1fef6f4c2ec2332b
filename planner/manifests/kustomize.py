"""A Kustomize base for kubernetes.yaml, and optional components.

The components are a volume for the weights, network policies, monitoring and a gateway. `kubectl apply -f
kubernetes.yaml` or `-k .` applies none of them: an overlay beside the folder names the components that it
wants (`overlay_lines`). Sources: kubectl.docs.kubernetes.io/references/kustomize (components of v1alpha1),
networking.k8s.io/v1, batch/v1; huggingface_hub's environment variables; monitoring.coreos.com/v1
(PodMonitor); gateway.networking.k8s.io/v1 (Gateway, HTTPRoute); Grafana's sidecar for dashboards.
"""

import math
from typing import Any, get_args

from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Role
from planner.manifests import engine_command, monitoring, sglang_engine
from planner.manifests.engine_command import APP, NO_PRIVILEGES, ROLE, SECRET_KEY, SECRET_NAME, USUAL_SYSCALLS
from planner.models.memory import worker_memory

Document = dict[str, Any]
BASE = "kustomization.yaml"
COMPONENTS = "components/"
CACHE, POLICIES = f"{COMPONENTS}model-cache", f"{COMPONENTS}network-policy"
MONITORING, GATEWAY = f"{COMPONENTS}monitoring", f"{COMPONENTS}gateway"
MODELS = "/models"  # Where workers and the download mount the volume.
# The volume has the LLM's weights and other files of checkpoints. A fifth more is for drafters (built in, or
# with their own checkpoint), because a fleet does not know their size.
CACHE_FACTOR, CACHE_SPARE_GIB = 1.2, 10
CACHE_USER = engine_command.ROUTER_USER  # Any user but root.
WORKER_ROLES = get_args(Role)  # The other pods of an LLM are routers, the KV store and the download.
METRICS_NAMESPACE = "monitoring"  # Prometheus usually runs there; the component's header names it.

# The download program. Its arguments are the file that marks its end, then names of checkpoints. A repository
# may have its weights in several formats; if one is safetensors, the others are left out.
DOWNLOAD = """\
import pathlib, sys
from huggingface_hub import list_repo_files, snapshot_download
mark, *names = sys.argv[1:]
for name in names:
    other = ["original/*", "metal/*", "*.pth", "*.gguf", "*.onnx"]
    if any(path.endswith(".safetensors") for path in list_repo_files(name)):
        other += ["*.bin", "*.pt", "*.h5", "*.msgpack"]
    snapshot_download(name, ignore_patterns=other)
pathlib.Path(mark).touch()
"""


def kustomize_files(fleet: Fleet) -> dict[str, str]:
    """The base and its components, path -> text. An LLM given by a path has no download and no volume."""
    app = engine_command.llm_label(fleet)
    base = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["kubernetes.yaml"],
    }
    written = {BASE: "# kubectl apply -k .   the same as -f kubernetes.yaml\n" + to_yaml(base)}
    if names := _checkpoint_names(fleet):
        written |= _cache_files(fleet, app, names)
    return written | _network_files(app) | _monitoring_files(fleet, app) | _gateway_files(fleet, app)


def overlay_lines(fleet: Fleet) -> list[str]:
    """Lines for a README: an overlay with every component that needs no operator. It also puts the registry
    into the name of the router's image, which users build and push.
    """
    components = [*([CACHE] if _checkpoint_names(fleet) else []), POLICIES]
    image = engine_command.ROUTER_IMAGE.partition(":")[0]
    return [
        "    # prod/kustomization.yaml, beside this folder (here `manifests`)",
        "    resources: [../manifests]",
        f"    components: [{', '.join(f'../manifests/{name}' for name in components)}]",
        f"    images: [{{name: {image}, newName: REGISTRY/{image}}}]",
    ]


def _checkpoint_names(fleet: Fleet) -> list[str]:
    """Checkpoints that each worker would download, the LLM's and drafters'; empty if the LLM is a path."""
    try:
        names = [engine_command.hub_name(fleet, "kustomize")]
    except InputError:
        return []
    drafters = [pool.type.speculation for pool in fleet.running_pools]
    return list(dict.fromkeys([*names, *(each.model for each in drafters if each and each.model)]))


def claim_of(app: str) -> str:
    """The name of the claim to the volume with an LLM's weights."""
    return f"{app}-models"


def mark_of(app: str) -> str:
    """The file that the download creates when it is complete."""
    return f"{MODELS}/.{app}-complete"


def _claim_gib(fleet: Fleet) -> int:
    """GiB of the volume for the LLM's weights and the files beside them."""
    gpu = fleet.running_pools[0].type.gpu  # Any pool will do: all serve the same checkpoint.
    weight_bytes = worker_memory(fleet.llm, gpu, 1).weight_bytes  # A worker of TP 1 has all weights.
    return math.ceil(CACHE_FACTOR * weight_bytes / 2**30) + CACHE_SPARE_GIB


def _cache_files(fleet: Fleet, app: str, names: list[str]) -> dict[str, str]:
    """The component with the volume, the job that downloads checkpoints `names`, and the workers' patch."""
    volume, mark = claim_of(app), mark_of(app)
    labels = {APP: app, ROLE: "model-cache"}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": volume, "labels": labels},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": f"{_claim_gib(fleet)}Gi"}},
        },
    }
    component = {
        **_component_document("cache.yaml"),
        "patches": [
            {
                "target": {
                    "kind": "Deployment",
                    "labelSelector": f"{APP}={app},{ROLE} in ({','.join(WORKER_ROLES)})",
                },
                "path": "workers.yaml",
            }
        ],
    }
    header = (
        "# The weights on one volume: a job downloads them once, workers wait for it and read them.\n"
        "# Needs a storage class that many nodes can mount at once (ReadWriteMany): add storageClassName\n"
        "# where it is not the cluster's default.\n"
    )
    job = _download_job(fleet, volume, mark, labels, names)
    return {
        f"{CACHE}/kustomization.yaml": header + to_yaml(component),
        f"{CACHE}/cache.yaml": to_yaml(claim) + "---\n" + to_yaml(job),
        f"{CACHE}/workers.yaml": to_yaml(_worker_patch(fleet, volume, mark)),
    }


def _worker_patch(fleet: Fleet, volume: str, mark: str) -> Document:
    """The patch of each worker's Deployment: wait for the file `mark`, then read the volume offline."""
    mount = {"name": "models", "mountPath": MODELS, "readOnly": True}
    waiting = {
        "name": "wait-for-models",
        "image": _shell_image(fleet),
        "command": ["sh", "-c", f"until [ -e {mark} ]; do sleep 5; done"],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
        "securityContext": NO_PRIVILEGES,
        "volumeMounts": [mount],
    }
    environment = [{"name": "HF_HUB_CACHE", "value": MODELS}, {"name": "HF_HUB_OFFLINE", "value": "1"}]
    claim = {"claimName": volume, "readOnly": True}
    spec = {
        "initContainers": [waiting],
        "containers": [{"name": engine_command.CONTAINER, "env": environment, "volumeMounts": [mount]}],
        "volumes": [{"name": "models", "persistentVolumeClaim": claim}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        # Kustomize requires a name, and ignores it because the patch has a target.
        "metadata": {"name": "workers"},
        "spec": {"template": {"spec": spec}},
    }


def _shell_image(fleet: Fleet) -> str:
    """An image with a shell and huggingface_hub: the first pool's engine image, which nodes pull anyway."""
    return engine_command.engine_image(fleet.running_pools[0].type)


def _download_job(fleet: Fleet, volume: str, mark: str, labels: Document, names: list[str]) -> Document:
    """The job that downloads checkpoints `names` to the volume, then makes the file `mark`."""
    token = {"name": SECRET_NAME, "key": SECRET_KEY, "optional": True}
    container = {
        "name": "download",
        "image": _shell_image(fleet),
        "command": ["python3", "-c", DOWNLOAD, mark, *names],
        "env": [
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}},
            {"name": "HF_HOME", "value": "/tmp/huggingface"},
            {"name": "HF_HUB_CACHE", "value": MODELS},
        ],
        "resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "16Gi"}},
        "securityContext": {**NO_PRIVILEGES, "readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "models", "mountPath": MODELS}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    pod = {
        "restartPolicy": "OnFailure",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": CACHE_USER,
            "fsGroup": CACHE_USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            **USUAL_SYSCALLS,
        },
        "containers": [container],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": volume}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{volume}-download", "labels": labels},
        "spec": {"backoffLimit": 10, "template": {"metadata": {"labels": labels}, "spec": pod}},
    }


def _network_files(app: str) -> dict[str, str]:
    """The component with network policies for routers and for all other pods of this LLM.

    Routers accept connections from their namespace and from Prometheus, on HTTP. Other pods accept
    connections from the LLM's pods on every port (HTTP, exchange of KV blocks, KV store), and from Prometheus
    on HTTP.
    """
    own = {"podSelector": {"matchLabels": {APP: app}}}
    http = [{"protocol": "TCP", "port": engine_command.HTTP_PORT}]
    metrics = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": METRICS_NAMESPACE}}}
    not_router = {"key": ROLE, "operator": "NotIn", "values": ["router"]}
    workers = {"matchLabels": {APP: app}, "matchExpressions": [not_router]}
    router = {"matchLabels": {APP: app, ROLE: "router"}}
    policies = [
        _network_policy(f"{app}-workers", workers, [{"from": [own]}, {"from": [metrics], "ports": http}]),
        _network_policy(f"{app}-router", router, [{"from": [{"podSelector": {}}, metrics], "ports": http}]),
    ]
    header = (
        "# Workers take connections of this LLM's pods, routers those of their namespace, and both those of\n"
        f"# Prometheus in the namespace {METRICS_NAMESPACE}. Add your gateway's to the router's.\n"
        "# Needs a network plugin that enforces policies.\n"
    )
    return {
        f"{POLICIES}/kustomization.yaml": header + to_yaml(_component_document("policies.yaml")),
        f"{POLICIES}/policies.yaml": "---\n".join(map(to_yaml, policies)),
    }


def _monitoring_files(fleet: Fleet, app: str) -> dict[str, str]:
    """The component that makes Prometheus scrape every worker, and gives Grafana a dashboard of vLLM's
    metrics. Empty for SGLang, whose metrics have other names.
    """
    if sglang_engine.is_sglang(fleet):
        return {}
    is_worker = {"key": ROLE, "operator": "In", "values": list(WORKER_ROLES)}
    pods = {"matchLabels": {APP: app}, "matchExpressions": [is_worker]}
    monitor = monitoring.pod_monitor(f"{app}-workers", pods, "http")
    monitor["spec"]["podTargetLabels"] = [APP, ROLE]
    dashboard = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{app}-dashboard", "labels": {"grafana_dashboard": "1"}},
        "data": {"serving.json": monitoring.serving_dashboard(fleet.llm.name, app)},
    }
    header = (
        "# Prometheus scrapes the workers, Grafana shows them. Needs the Prometheus operator, and Grafana's "
        "sidecar for\n# dashboards (kube-prometheus-stack has both). Not beside the PodMonitors of an "
        "autoscaler: each sample would count twice.\n"
    )
    return {
        f"{MONITORING}/kustomization.yaml": header
        + to_yaml(_component_document("workers.yaml", "dashboard.yaml")),
        f"{MONITORING}/workers.yaml": to_yaml(monitor),
        f"{MONITORING}/dashboard.yaml": to_yaml(dashboard),
    }


def _gateway_files(fleet: Fleet, app: str) -> dict[str, str]:
    """The component with a Gateway whose HTTPRoute leads to the router. With two routers
    (`engine_command.routers_of`) each has a route by a prefix of the path, which the route removes.
    """
    names = list(engine_command.routers_of(fleet))
    routes = [_http_route(f"{app}-{name}", app, "" if len(names) == 1 else f"/{name}") for name in names]
    gateway = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": {"name": app},
        "spec": {
            "gatewayClassName": "GATEWAY-CLASS",
            "listeners": [{"name": "http", "protocol": "HTTP", "port": 80}],
        },
    }
    header = (
        "# The Gateway API before the router: set gatewayClassName (`kubectl get gatewayclass`), and a "
        "listener with TLS.\n# The routes set no time limit, as answers take minutes. Add the gateway's "
        "namespace to the router's network policy.\n"
    )
    return {
        f"{GATEWAY}/kustomization.yaml": header + to_yaml(_component_document("gateway.yaml")),
        f"{GATEWAY}/gateway.yaml": "---\n".join(map(to_yaml, [gateway, *routes])),
    }


def _http_route(service: str, gateway: str, prefix: str) -> Document:
    """The route of a gateway to a service, for paths that begin with `prefix` (empty: all paths)."""
    rule: Document = {
        "backendRefs": [{"name": service, "port": engine_command.HTTP_PORT}],
        "timeouts": {"request": "0s"},  # No limit: the default of some gateways is 15 s.
    }
    if prefix:
        rule["matches"] = [{"path": {"type": "PathPrefix", "value": prefix}}]
        rewrite = {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}}
        rule["filters"] = [{"type": "URLRewrite", "urlRewrite": rewrite}]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": service},
        "spec": {"parentRefs": [{"name": gateway}], "rules": [rule]},
    }


def _network_policy(name: str, pods: Document, ingress: list[Document]) -> Document:
    """A policy for connections to these pods."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _component_document(*resources: str) -> Document:
    """A component of Kustomize that consists of these files."""
    return {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "resources": list(resources),
    }
