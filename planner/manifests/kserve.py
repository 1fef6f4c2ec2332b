"""KServe: an LLMInferenceService per mixed pool or pair of pools (the decode pool, the prefill pool inside).

KServe starts vLLM itself, with TP and PP from `parallelism`; the other flags come in VLLM_ADDITIONAL_ARGS,
which its container hands to a shell. Its own scheduler routes, by what the plan's policy is nearest to.
"""

from __future__ import annotations

import shlex

from planner.domain import Fleet, Pool
from planner.manifests import engine, kubernetes
from planner.manifests.kubernetes import Document

ENGINE = f"vLLM {engine.VLLM_VERSION}, KServe with LLMInferenceService v1alpha2 (0.21)"
SHORTEST_QUEUE: Document = {
    "apiVersion": "inference.networking.x-k8s.io/v1alpha1",
    "kind": "EndpointPickerConfig",
    "plugins": [{"type": "single-profile-handler"}, {"type": "queue-scorer"}, {"type": "max-score-picker"}],
    "schedulingProfiles": [
        {"name": "default",
         "plugins": [{"pluginRef": "queue-scorer", "weight": 1}, {"pluginRef": "max-score-picker"}]}
    ],
}  # fmt: skip
_KSERVE_TELLS = ("served-model-name", "tensor-parallel-size", "pipeline-parallel-size")


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """kserve.yaml: everything to apply, in one file."""
    return {"kserve.yaml": kubernetes.in_one_file("kserve.yaml", fleet, documents(fleet, max_model_len))}


def steps(fleet: Fleet) -> list[str]:
    """How to apply it."""
    lines = [f"    {kubernetes.SECRET}", "    kubectl apply -f kserve.yaml", "    kubectl get llmisvc"]
    if len(engine.services(fleet, "kserve")) > 1:
        lines += ["", "Each service has an address of its own; put a balancer in front of them."]
    return lines


def documents(fleet: Fleet, max_model_len: int) -> list[Document]:
    """One LLMInferenceService per service."""
    engine.on_one_node(fleet, "kserve")
    name, app = engine.hub_name(fleet, "kserve"), engine.llm_label(fleet)
    found = engine.services(fleet, "kserve")
    services: list[Document] = []
    for label, (pool, prefill) in found.items():
        spec: Document = {
            "model": {"uri": f"hf://{name}", "name": name},
            **_workload(fleet, pool, max_model_len),
            "router": _router(fleet, is_pair=prefill is not None),
        }
        if prefill is not None:
            spec["prefill"] = _workload(fleet, prefill, max_model_len)
        services.append(
            {
                "apiVersion": "serving.kserve.io/v1alpha2",
                "kind": "LLMInferenceService",
                "metadata": {"name": app if len(found) == 1 else f"{app}-{label}"},
                "spec": spec,
            }
        )
    return services


def _router(fleet: Fleet, *, is_pair: bool) -> Document:
    """KServe's default scores queues and prefixes, for pairs and for plans with prefix caches; without them
    a mixed pool is told to look at queues alone. Round robin needs no scheduler: that is what a Service does.
    """
    router: Document = {"route": {}, "gateway": {}}
    if is_pair or fleet.policies.prefix_cache:
        return {"scheduler": {}, **router}
    if fleet.policies.routing == "round-robin":
        return router
    return {"scheduler": {"config": {"inline": SHORTEST_QUEUE}}, **router}


def _workload(fleet: Fleet, pool: Pool, max_model_len: int) -> Document:
    told = engine.settings(pool, fleet, max_model_len)
    args = engine.to_args({key: value for key, value in told.items() if key not in _KSERVE_TELLS})
    main = {
        "name": "main",
        "image": engine.image(pool.type.gpu),
        "env": [
            *kubernetes.environment(pool),
            {"name": "VLLM_ADDITIONAL_ARGS", "value": shlex.join(args)},
        ],
        "resources": kubernetes.resources(pool),
    }
    return {
        "replicas": pool.count,
        "parallelism": {"tensor": pool.type.tp, "pipeline": pool.type.pp},
        "template": {**kubernetes.placement(fleet, pool), "containers": [main]},
    }
