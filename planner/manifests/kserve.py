"""KServe: an LLMInferenceService per mixed pool or pair (of a decode pool, with the prefill pool inside).

KServe's presets start vLLM on the weights that KServe's storage initializer downloaded, with TP from
`parallelism`; other flags are in VLLM_ADDITIONAL_ARGS, which the preset's script hands to a shell. The
presets require a user other than root. vLLM's own image runs as root, so the engine is llm-d's image, which
the presets also name. The storage initializer gets the hub's token from the secrets of a service account.
"""

import shlex

from planner.fleet import Fleet, Pool
from planner.manifests import endpoint_picker, engine_command, kubernetes
from planner.manifests.kubernetes import Document
from planner.policies import GATEWAY, KSERVE, ROUTING, find_router_difference

KSERVE_VERSION = "0.21.0"
LLM_D_VERSION = "v0.9.0"  # The presets of KSERVE_VERSION have this image.
API_VERSION = "v1alpha2"  # The version of LLMInferenceService in KSERVE_VERSION.
# What the manifests were checked with, for the README. LLM_D_VERSION has this vLLM and this endpoint picker.
ENGINE = (
    f"vLLM 0.26.0 of llm-d {LLM_D_VERSION}, KServe {KSERVE_VERSION} with LLMInferenceService {API_VERSION} "
    "and llm-d's endpoint picker 0.10.0"
)
PROBE_S = 10  # Seconds between two startup probes.
# KServe's presets pass these flags themselves, so they are not among ours.
_FLAGS_OF_PRESETS = ("served-model-name", "tensor-parallel-size")


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """kserve.yaml: everything to apply, in one file."""
    return {"kserve.yaml": kubernetes.in_one_file("kserve.yaml", fleet, documents(fleet, max_model_len))}


def steps(fleet: Fleet) -> list[str]:
    """How to apply it, as lines of the README."""
    lines = [f"    {kubernetes.SECRET}", "    kubectl apply -f kserve.yaml", "    kubectl get llmisvc"]
    if len(engine_command.pool_services(fleet, "kserve")) > 1:
        lines += ["", "Each LLMInferenceService has an address of its own; put a balancer in front of them."]
    return lines


def routing(fleet: Fleet) -> str:
    """A sentence of the README on what routes requests."""
    is_pair = fleet.is_disaggregated
    if _is_left_to_gateway(fleet, is_pair=is_pair):
        return "no scheduler: the gateway spreads requests over the Service's workers, by its own setting."
    return endpoint_picker.routing_text(fleet.policies, is_pair=is_pair)


def documents(fleet: Fleet, max_model_len: int) -> list[Document]:
    """A service account for the hub's token, and an LLMInferenceService per mixed pool or pair of pools."""
    engine_command.refuse_several_nodes(fleet, "kserve")
    engine_command.refuse_ranks(fleet, "kserve")
    engine_command.refuse_offload(fleet, "kserve")
    name, app = engine_command.hub_name(fleet, "kserve"), engine_command.llm_label(fleet)
    pools_by_service = engine_command.pool_services(fleet, "kserve")
    account: Document = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": f"{app}-hub"},
        "secrets": [{"name": engine_command.SECRET_NAME}],
    }
    services: list[Document] = []
    for label, (pool, prefill) in pools_by_service.items():
        spec: Document = {
            "model": {"uri": f"hf://{name}", "name": name},
            **_workload(fleet, pool, max_model_len),
            "router": _router(fleet, is_pair=prefill is not None),
        }
        if prefill is not None:
            spec["prefill"] = _workload(fleet, prefill, max_model_len)
        services.append(
            {
                "apiVersion": f"serving.kserve.io/{API_VERSION}",
                "kind": "LLMInferenceService",
                "metadata": {"name": app if len(pools_by_service) == 1 else f"{app}-{label}"},
                "spec": spec,
            }
        )
    return [account, *services]


def _is_left_to_gateway(fleet: Fleet, *, is_pair: bool) -> bool:
    """Whether the gateway alone routes as the plan does. It cannot route to pairs."""
    return not is_pair and find_router_difference(ROUTING[fleet.policies.routing], KSERVE).name == GATEWAY


def _router(fleet: Fleet, *, is_pair: bool) -> Document:
    """The `router` of an LLMInferenceService, with the endpoint picker and the plan's rule as its scheduler.
    For a plan with round robin there is no scheduler: the gateway does round robin, the picker cannot.
    """
    router: Document = {"route": {}, "gateway": {}}
    if _is_left_to_gateway(fleet, is_pair=is_pair):
        return router
    picker = endpoint_picker.picker_config(fleet, is_pair=is_pair)
    return {"scheduler": {"config": {"inline": picker}}, **router}


def _workload(fleet: Fleet, pool: Pool, max_model_len: int) -> Document:
    """The workers of a pool, for an LLMInferenceService."""
    engine_settings = engine_command.engine_flags(pool, fleet, max_model_len)
    args = engine_command.to_args(
        {key: value for key, value in engine_settings.items() if key not in _FLAGS_OF_PRESETS}
    )
    gpu_maker = "rocm" if engine_command.is_rocm(pool.type.gpu) else "cuda"
    main = {
        "name": "main",
        "image": f"ghcr.io/llm-d/llm-d-{gpu_maker}:{LLM_D_VERSION}",
        "env": [
            *kubernetes.nixl_environment(fleet, pool),
            {"name": "VLLM_ADDITIONAL_ARGS", "value": shlex.join(args)},
        ],
        "resources": kubernetes.gpu_resources(pool),
        "startupProbe": {"periodSeconds": PROBE_S, "failureThreshold": engine_command.START_S // PROBE_S},
    }
    return {
        "replicas": pool.count,
        "parallelism": {"tensor": pool.type.tp},
        "template": {
            **kubernetes.node_affinity(fleet, pool),
            "serviceAccountName": f"{engine_command.llm_label(fleet)}-hub",
            "containers": [main],
        },
    }
