"""LeaderWorkerSet: workers that span nodes (by PP or data-parallel ranks), one group of pods per worker.

Pod 0 of a group answers HTTP for all ranks; the other pods run vLLM with --headless and connect to pod 0 at
LWS_LEADER_ADDRESS. vLLM computes from --node-rank which data-parallel ranks a node has. LWS sets
LWS_LEADER_ADDRESS and LWS_WORKER_INDEX in every container, and Kubernetes puts them into the arguments. The
router and other objects are as on plain Kubernetes (kubernetes.py). Pods with --headless have the role label
`headless`, which no router selects.
"""

from planner.fleet import Fleet, Pool
from planner.manifests import engine_command, kubernetes
from planner.manifests.engine_command import APP, HTTP_PORT, PART, ROLE
from planner.manifests.kubernetes import Document

ENGINE = f"vLLM {engine_command.VLLM_VERSION}, LeaderWorkerSet v1 (LWS 0.9 or newer)"
routing = engine_command.routing_sentence  # A target has `routing`, `render` and `steps` (__init__.py).


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """lws.yaml: everything to apply, in one file."""
    text = kubernetes.in_one_file("lws.yaml", fleet, documents(fleet, max_model_len))
    return {"lws.yaml": text, **engine_command.router_image_files()}


def steps(fleet: Fleet) -> list[str]:
    """How to apply it, as lines of the README."""
    return [
        *engine_command.router_image_steps("lws.yaml"),
        f"    {kubernetes.SECRET}",
        "    kubectl apply -f lws.yaml",
        f"    kubectl port-forward service/{engine_command.llm_label(fleet)}-router {HTTP_PORT}",
        "",
        "Needs the LeaderWorkerSet controller and the GPU operator. Do not apply kubernetes.yaml as",
        "well: its objects have the same names.",
    ]


def documents(fleet: Fleet, max_model_len: int) -> list[Document]:
    """The Kubernetes objects that deploy the fleet: those of the workers, then those of the router."""
    pools: list[Document] = []
    for name, pool in zip(engine_command.pool_labels(fleet), fleet.running_pools, strict=True):
        labels = kubernetes.labels_of(fleet, name, pool)
        worker_set = {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": labels[PART], "labels": labels},
            "spec": group_spec(fleet, pool, labels, max_model_len),
        }
        pools += [worker_set, kubernetes.disruption_budget(labels)]
    return [*pools, *kubernetes.router(fleet)]


def group_spec(fleet: Fleet, pool: Pool, labels: Document, max_model_len: int) -> Document:
    """The spec of a LeaderWorkerSet with one group per worker of `pool`."""
    nodes = engine_command.nodes_of(pool.type)
    args = kubernetes.escape_variables(engine_command.engine_args(pool, fleet, max_model_len))
    template: Document = {"size": nodes, "restartPolicy": "RecreateGroupOnPodRestart"}
    serving_args = [*args, "--port", str(HTTP_PORT)]
    if nodes == 1:
        main = kubernetes.worker_container(fleet, pool, serving_args)
        template["workerTemplate"] = kubernetes.pod_template(fleet, pool, labels, main)
    else:
        group_args = [
            "--nnodes",
            str(nodes),
            "--node-rank",
            "$(LWS_WORKER_INDEX)",
            "--master-addr",
            "$(LWS_LEADER_ADDRESS)",
        ]
        leader = kubernetes.worker_container(fleet, pool, [*serving_args, *group_args])
        follower = kubernetes.worker_container(fleet, pool, [*args, *group_args, "--headless"])
        # Only the leader answers HTTP, so the other pods have neither probes nor ports.
        for http_field in (*kubernetes.health_probes(), "ports"):
            del follower[http_field]
        follower_labels = {APP: labels[APP], PART: labels[PART], ROLE: "headless"}
        template["leaderTemplate"] = kubernetes.pod_template(fleet, pool, labels, leader)
        template["workerTemplate"] = kubernetes.pod_template(fleet, pool, follower_labels, follower)
    return {"replicas": pool.count, "leaderWorkerTemplate": template}
