"""Where the workers of every pool are, on targets whose pools can be scaled: object, pods and metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.day.autoscaling.autoscaler import Autoscaler, Document, ScaledPool
from planner.errors import InputError
from planner.fleet import Fleet, Pool
from planner.manifests import dynamo, engine_command, kubernetes
from planner.manifests.kubernetes import PART

POOL_LABEL = "fleetplan/pool"  # of pods, where a target has no label of its own that tells pools apart
LLM_D_CHART = "llm-d-modelservice"
CHART_NAME = 55  # letters of a release and its chart that llm-d-modelservice keeps


@dataclass(frozen=True, slots=True)
class ScaleTarget:
    """One pool as others may address it: its /scale is that of `kind` `object_name`; `name` is for objects
    beside it, `label` the pool's own part of that.

    `pods` are labels of its pods that answer GET /metrics on `port`, by `scheme`.
    """

    name: str
    label: str
    scaled: ScaledPool
    pool: Pool
    api_version: str
    kind: str
    object_name: str
    pods: Document
    port: str | int = "http"
    scheme: str = "http"

    @property
    def reference(self) -> Document:
        """For `scaleTargetRef`."""
        return {"apiVersion": self.api_version, "kind": self.kind, "name": self.object_name}


def with_all_pools(fleet: Fleet, autoscaler: Autoscaler) -> Fleet:
    """The fleet as its manifests are first applied, a pool that begins empty with one worker.

    Raises InputError where the pools of the two are not the same.
    """
    scaled = {pool.name: pool for pool in autoscaler.pools}
    known = [pool.name for pool in fleet.pools]
    if len(scaled) != len(autoscaler.pools) or sorted(scaled) != sorted(known):
        named = ", ".join(engine_command.one_line(name)[:60] for name in scaled) or "none"
        raise InputError(
            f"{autoscaler.controller}: expected sizes of every pool of the fleet "
            f"({', '.join(engine_command.one_line(name)[:60] for name in known)}) once, found {named}"
        )
    for pool in fleet.pools:
        if scaled[pool.name].role != pool.role:
            raise InputError(
                f"pool {engine_command.one_line(pool.name)[:100]}: its role is {pool.role}, found "
                f"{scaled[pool.name].role}"
            )
    return replace(
        fleet, pools=tuple(replace(pool, count=max(scaled[pool.name].size, 1)) for pool in fleet.pools)
    )


def kubernetes_target(fleet: Fleet, label: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    labels = kubernetes.labels_of(fleet, label, pool)
    return ScaleTarget(labels[PART], label, scaled, pool, "apps/v1", "Deployment", labels[PART], labels)


def lws_target(fleet: Fleet, label: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    scale_target = kubernetes_target(fleet, label, pool, scaled)
    return replace(scale_target, api_version="leaderworkerset.x-k8s.io/v1", kind="LeaderWorkerSet")


def disaggregatedset_target(fleet: Fleet, label: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    """The set's controller makes a scaler per role that says `scaling: {mode: External}`."""
    scale_target = kubernetes_target(fleet, label, pool, scaled)
    return replace(
        scale_target,
        api_version="disaggregatedset.x-k8s.io/v1",
        kind="DisaggregatedSetRoleScaler",
        object_name=f"{engine_command.llm_label(fleet)}-{label}",
    )


def llm_d_target(fleet: Fleet, label: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    name = f"{engine_command.llm_label(fleet)}-{label}"
    role = "prefill" if pool.role == "prefill" else "decode"
    whole = name if LLM_D_CHART in name else f"{name}-{LLM_D_CHART}"
    deployment = f"{whole[:CHART_NAME].removesuffix('-')}-{role}"
    pods = {"llm-d.ai/model": engine_command.llm_label(fleet), POOL_LABEL: name}
    return ScaleTarget(name, label, scaled, pool, "apps/v1", "Deployment", deployment, pods, "metrics")


def production_stack_target(fleet: Fleet, label: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    release = engine_command.llm_label(fleet)
    pods = {"model": label, "helm-release-name": release}
    deployment = f"{release}-{label}-deployment-vllm"
    return ScaleTarget(
        f"{release}-{label}", label, scaled, pool, "apps/v1", "Deployment", deployment, pods, "container-port"
    )


def kserve_target(fleet: Fleet, label: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    """KServe names the Deployment of a service NAME-kserve, that of its prefill NAME-kserve-prefill."""
    app, services = engine_command.llm_label(fleet), engine_command.services(fleet, "kserve")
    of = next(name for name, pools in services.items() if pool in pools)
    service = app if len(services) == 1 else f"{app}-{of}"
    suffix = "-kserve-prefill" if pool.role == "prefill" else "-kserve"
    name = f"{app}-{label}"
    deployment = f"{service}{suffix}"
    return ScaleTarget(
        name,
        label,
        scaled,
        pool,
        "apps/v1",
        "Deployment",
        deployment,
        {POOL_LABEL: name},
        engine_command.HTTP_PORT,
        "https",
    )


def dynamo_target(fleet: Fleet, label: str, pool: Pool, scaled: ScaledPool) -> ScaleTarget:
    """Dynamo's operator makes an adapter per component that says `scalingAdapter: {}`."""
    graphs = dynamo.graph_pools(fleet)
    graph = next(name for name, own in graphs.items() if (label, pool) in own)
    name = f"{graph}-{label}"
    kind = "DynamoGraphDeploymentScalingAdapter"
    return ScaleTarget(name, label, scaled, pool, "nvidia.com/v1beta1", kind, name, {})
