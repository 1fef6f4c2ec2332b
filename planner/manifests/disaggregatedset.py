"""The target DisaggregatedSet (of LWS): prefill and decode pools as roles of one object, rolled out together.

llm-d's guide to disaggregation has this form beside its Helm charts. Every pool is a role with a spec of
LeaderWorkerSet (lws.py); the router is that of plain Kubernetes (kubernetes.py).
"""

from planner.errors import InputError
from planner.fleet import Fleet
from planner.manifests import engine_command, kubernetes, lws
from planner.manifests.engine_command import APP, HTTP_PORT, PART
from planner.manifests.kubernetes import Document

ENGINE = f"vLLM {engine_command.VLLM_VERSION}, DisaggregatedSet v1 (LWS 0.9 or newer)"
routing = engine_command.routing_sentence  # A target has `routing`, `render` and `steps` (__init__.py).
MAX_ROLES = 10  # A DisaggregatedSet holds no more.


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """disaggregatedset.yaml: everything to apply, in one file."""
    name = "disaggregatedset.yaml"
    text = kubernetes.in_one_file(name, fleet, documents(fleet, max_model_len))
    return {name: text, **engine_command.router_image_files()}


def steps(fleet: Fleet) -> list[str]:
    """How to apply it, as lines of the README."""
    return [
        *engine_command.router_image_steps("disaggregatedset.yaml"),
        f"    {kubernetes.SECRET}",
        "    kubectl apply -f disaggregatedset.yaml",
        f"    kubectl port-forward service/{engine_command.llm_label(fleet)}-router {HTTP_PORT}",
        "",
        "Needs the LeaderWorkerSet controller, installed with `--set enableDisaggregatedSet=true`, and the "
        "GPU operator. Not beside kubernetes.yaml or lws.yaml: same names.",
    ]


def documents(fleet: Fleet, max_model_len: int) -> list[Document]:
    """The Kubernetes objects that deploy the fleet: those of the workers, then those of the router."""
    pools = fleet.running_pools
    if any(pool.role == "mixed" for pool in pools):
        raise InputError("disaggregatedset: holds prefill and decode pools only, found a mixed one; take lws")
    if len(pools) > MAX_ROLES:
        raise InputError(f"disaggregatedset: holds at most {MAX_ROLES} pools, found {len(pools)}; take lws")
    app = engine_command.llm_label(fleet)
    roles: list[Document] = []
    budgets: list[Document] = []
    for name, pool in zip(engine_command.pool_labels(fleet), pools, strict=True):
        labels = kubernetes.labels_of(fleet, name, pool)
        roles.append({"name": name, "spec": lws.group_spec(fleet, pool, labels, max_model_len)})
        budgets.append(kubernetes.disruption_budget(labels))
    document = {
        "apiVersion": "disaggregatedset.x-k8s.io/v1",
        "kind": "DisaggregatedSet",
        "metadata": {"name": app, "labels": {APP: app, PART: app}},
        "spec": {"roles": roles},
    }
    return [document, *budgets, *kubernetes.router(fleet)]
