"""A Helm chart of the objects of kubernetes.yaml: templates that are the same for every plan, and values.

Each component of Kustomize (kustomize.py) is a part of the chart that a value enables. The templates are in
chart/, beside this module. From them `helm template` makes the objects of kubernetes.yaml; a test checks this
where helm is installed.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from planner.files.checked_files import to_yaml
from planner.fleet import Fleet
from planner.manifests import engine_command, kustomize

Document = dict[str, Any]
FOLDER = "chart"
CHART_VERSION = "0.1.0"  # Version of the templates.
# Fields of a container and of its pod that have their own values; other fields are in `container` and `pod`.
_OF_CONTAINER = ("image", "args", "env", "resources", "volumeMounts")
_OF_POD = ("containers", "volumes")
# Optional part -> the component of Kustomize, and its files with objects.
_PARTS = {
    "modelCache": (kustomize.CACHE, ("cache.yaml",)),
    "networkPolicy": (kustomize.POLICIES, ("policies.yaml",)),
    "monitoring": (kustomize.MONITORING, ("workers.yaml", "dashboard.yaml")),
    "gateway": (kustomize.GATEWAY, ("gateway.yaml",)),
}
_CLASS = "CLASS-NAME"  # The templates replace it by the part's value className.


def chart_files(fleet: Fleet, objects: Sequence[Document], components: Mapping[str, str]) -> dict[str, str]:
    """The chart's files by path, from the objects of kubernetes.yaml and the files of Kustomize."""
    app = engine_command.llm_label(fleet)
    chart = {
        "apiVersion": "v2",
        "name": app,
        "description": f"Workers and their router for {engine_command.one_line(fleet.llm.name)}",
        "type": "application",
        "version": CHART_VERSION,
        "appVersion": engine_command.engine_version(fleet),
    }
    header = f"# The plan.   helm upgrade --install {app} {FOLDER}\n"
    written = {
        "Chart.yaml": to_yaml(chart),
        "values.yaml": header + to_yaml(values(fleet, objects)),
        **_templates(),
    }
    for part, (folder, names) in _PARTS.items():
        for name in names:
            if (text := components.get(f"{folder}/{name}")) is not None:
                written[f"optional/{part}-{name}"] = _with_class(text)
    return {f"{FOLDER}/{path}": text for path, text in written.items()}


def steps(fleet: Fleet) -> list[str]:
    """How to install it, as lines of the README."""
    return [
        f"Or by Helm, with the plan in {FOLDER}/values.yaml; a next plan is another values.yaml:",
        "",
        f"    helm upgrade --install {engine_command.llm_label(fleet)} {FOLDER} \\",
        f"      --set routers.router.image=REGISTRY/{engine_command.ROUTER_IMAGE} \\",
        "      --set modelCache.enabled=true --set networkPolicy.enabled=true",
        "",
        "`monitoring.enabled` and `gateway.enabled` (with `gateway.className`) are off as well; not beside "
        "kubernetes.yaml: same names.",
    ]


def values(fleet: Fleet, objects: Sequence[Document]) -> Document:
    """values.yaml: pools and routers by name, the optional parts, and objects without a template."""
    app = engine_command.llm_label(fleet)
    deployments = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Deployment"}
    pools, routers = engine_command.pool_labels(fleet), list(engine_command.routers_of(fleet))
    from_templates = {f"{app}-{name}" for name in (*pools, *routers, "router")}
    return {
        "app": app,
        "port": engine_command.HTTP_PORT,
        "pools": {name: _deployment(deployments[f"{app}-{name}"]) for name in pools},
        "routers": {name: _deployment(deployments[f"{app}-{name}"]) for name in routers},
        "imagePullSecrets": [],
        "modelCache": {
            "enabled": False,
            "className": "",
            "folder": kustomize.MODELS,
            "mark": kustomize.mark_of(app),
            "claim": kustomize.claim_of(app),
        },
        "networkPolicy": {"enabled": False},
        "monitoring": {"enabled": False},
        "gateway": {"enabled": False, "className": ""},
        "extraObjects": [each for each in objects if each["metadata"]["name"] not in from_templates],
    }


def _deployment(deployment: Document) -> Document:
    """The values of a pool or router; without `replicas` if an autoscaler sets the count."""
    spec, metadata = deployment["spec"], deployment["spec"]["template"]["metadata"]
    pod = spec["template"]["spec"]
    (main,) = pod["containers"]
    return {
        "role": metadata["labels"][engine_command.ROLE],
        **{key: spec[key] for key in ("replicas", "strategy", "progressDeadlineSeconds") if key in spec},
        "annotations": metadata.get("annotations", {}),
        **{key: main[key] for key in _OF_CONTAINER},
        "extraArgs": [],
        "container": {key: value for key, value in main.items() if key not in _OF_CONTAINER},
        "pod": {key: value for key, value in pod.items() if key not in _OF_POD},
        "volumes": pod["volumes"],
    }


def _with_class(text: str) -> str:
    """The objects of a component, with _CLASS as the class of gateway and storage. (kustomize.py writes
    GATEWAY-CLASS for a gateway, and no class for storage.)
    """
    text = text.replace("GATEWAY-CLASS", _CLASS)
    return text.replace("  accessModes:", f"  storageClassName: {_CLASS}\n  accessModes:")


@cache
def _templates() -> Mapping[str, str]:
    """The files in chart/, path -> text."""
    folder = Path(__file__).with_name(FOLDER)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return MappingProxyType({path.relative_to(folder).as_posix(): path.read_text() for path in paths})
