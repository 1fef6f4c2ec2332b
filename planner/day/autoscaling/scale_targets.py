"""How the workers of a pool are addressed on targets whose pools can be scaled: object, pods and metrics."""

from dataclasses import dataclass, replace

from planner.day.autoscaling.autoscaler import Document, ScaledPool
from planner.fleet import Fleet, Pool
from planner.manifests import dynamo, engine_command, kubernetes
from planner.manifests.engine_command import PART

# A label that we give pods, on targets whose own labels do not tell the pools apart.
POOL_LABEL = "fleetplan/pool"
LLM_D_CHART = "llm-d-modelservice"
MOST_CHART_LETTERS = 55  # The chart cuts its full name (release and chart) to this length.


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """A pool as an autoscaler addresses it.

    An autoscaler changes the replica count of the object `object_name` of this `kind`; `scaled` has the sizes
    that it may choose. Further objects that we write for the pool have the `name`, which ends in `pool_name`:
    the pool's name as manifests spell it. `pods` are the labels of the pods that answer GET /metrics on
    `port` by `scheme`.
    """

    name: str
    pool_name: str
    scaled: ScaledPool
    pool: Pool
    object_name: str
    pods: Document
    api_version: str = "apps/v1"
    kind: str = "Deployment"
    port: str | int = "http"
    scheme: str = "http"

    @property
    def reference(self) -> Document:
        """What `scaleTargetRef` of an HPA or ScaledObject names."""
        return {"apiVersion": self.api_version, "kind": self.kind, "name": self.object_name}


def kubernetes_target(fleet: Fleet, pool_name: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    """A Deployment, named by the label PART of the pool's pods (engine_command.py)."""
    labels = kubernetes.labels_of(fleet, pool_name, pool)
    return ScaleTarget(labels[PART], pool_name, scaled, pool, object_name=labels[PART], pods=labels)


def lws_target(fleet: Fleet, pool_name: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    """Like `kubernetes_target`, with a LeaderWorkerSet in place of the Deployment."""
    scale_target = kubernetes_target(fleet, pool_name, pool, scaled)
    return replace(scale_target, api_version="leaderworkerset.x-k8s.io/v1", kind="LeaderWorkerSet")


def disaggregatedset_target(fleet: Fleet, pool_name: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    """The scaler that a DisaggregatedSet's controller makes for a role of `scaling: {mode: External}`."""
    scale_target = kubernetes_target(fleet, pool_name, pool, scaled)
    return replace(
        scale_target,
        api_version="disaggregatedset.x-k8s.io/v1",
        kind="DisaggregatedSetRoleScaler",
        object_name=f"{engine_command.llm_label(fleet)}-{pool_name}",
    )


def llm_d_target(fleet: Fleet, pool_name: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    """The Deployment that llm-d's chart makes of a release for this pool."""
    name = f"{engine_command.llm_label(fleet)}-{pool_name}"
    role = "prefill" if pool.role == "prefill" else "decode"  # Mixed workers count as decode.
    # The chart adds its own name to the release's, unless that contains it.
    full_name = name if LLM_D_CHART in name else f"{name}-{LLM_D_CHART}"
    deployment = f"{full_name[:MOST_CHART_LETTERS].removesuffix('-')}-{role}"
    pods = {"llm-d.ai/model": engine_command.llm_label(fleet), POOL_LABEL: name}
    return ScaleTarget(name, pool_name, scaled, pool, object_name=deployment, pods=pods, port="metrics")


def production_stack_target(fleet: Fleet, pool_name: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    """The Deployment that the production stack's chart makes for this pool."""
    release = engine_command.llm_label(fleet)
    pods = {"model": pool_name, "helm-release-name": release}
    name = f"{release}-{pool_name}"
    deployment = f"{name}-deployment-vllm"  # The chart names it so.
    return ScaleTarget(
        name, pool_name, scaled, pool, object_name=deployment, pods=pods, port="container-port"
    )


def kserve_target(fleet: Fleet, pool_name: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    """KServe names the Deployment of a service NAME-kserve, and that of its prefill NAME-kserve-prefill."""
    app, services = engine_command.llm_label(fleet), engine_command.pool_services(fleet, "kserve")
    service_label = next(name for name, pools in services.items() if pool in pools)
    service = app if len(services) == 1 else f"{app}-{service_label}"
    suffix = "-kserve-prefill" if pool.role == "prefill" else "-kserve"
    name = f"{app}-{pool_name}"
    return ScaleTarget(
        name,
        pool_name,
        scaled,
        pool,
        object_name=f"{service}{suffix}",
        pods={POOL_LABEL: name},
        port=engine_command.HTTP_PORT,
        scheme="https",  # KServe's pods serve TLS, with a certificate of their own.
    )


def dynamo_target(fleet: Fleet, pool_name: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    """The adapter that Dynamo's operator makes for a component with `scalingAdapter: {}`."""
    graphs = dynamo.graph_pools(fleet)
    graph = next(name for name, labelled_pools in graphs.items() if (pool_name, pool) in labelled_pools)
    name = f"{graph}-{pool_name}"
    return ScaleTarget(
        name,
        pool_name,
        scaled,
        pool,
        object_name=name,
        pods={},  # We do not know how to scrape Dynamo's pods (scalable_pools.SCALABLE, is_measured).
        api_version="nvidia.com/v1beta1",
        kind="DynamoGraphDeploymentScalingAdapter",
    )
