"""NVIDIA Dynamo: a DynamoGraphDeployment (v1beta1) with a frontend and one component per pool.

Prefill and decode pools are in one graph and mixed pools in another, because a frontend sends either all
requests through prefill workers or none. The operator looks for a container named `main`. With `multinode` it
starts a worker that spans nodes; for data-parallel ranks it adds flags that say which ranks are on a node,
and a front end on each node (deploy/operator/internal/dynamo/backend_vllm.go at 003d1ee).
"""

from planner.errors import InputError
from planner.fleet import Fleet, Pool
from planner.manifests import engine_command, kubernetes
from planner.manifests.kubernetes import Document
from planner.policies import DYNAMO, ROUTING, find_router_difference

DYNAMO_VERSION = "1.6.1"
ENGINE = f"Dynamo {DYNAMO_VERSION} with vLLM 0.31.0"
IMAGE = f"nvcr.io/nvidia/ai-dynamo/vllm-runtime:{DYNAMO_VERSION}"
MAX_COMPONENTS = 25  # The most components of a graph, the frontend included.
# The most letters of the names of a graph and a component together. It is a limit of Grove, NVIDIA's API for
# groups of pods, which Dynamo's operator uses.
MAX_NAMES = 45
COMPONENT_NAME_LETTERS = 12  # Longer names of pools are cut, to leave letters for the graph's name.
# The secret with the hub's token, if the cluster has it.
TOKEN = [{"secretRef": {"name": engine_command.SECRET_NAME, "optional": True}}]


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """dynamo.yaml: everything to apply, in one file."""
    return {"dynamo.yaml": kubernetes.in_one_file("dynamo.yaml", fleet, documents(fleet, max_model_len))}


def steps(fleet: Fleet) -> list[str]:
    """How to apply it, as lines of the README."""
    return [
        f"    {kubernetes.SECRET}",
        "    kubectl apply -f dynamo.yaml",
        "    kubectl get dgd",
        "",
        "Needs Dynamo's operator. Each graph has a frontend of its own.",
    ]


def routing(fleet: Fleet) -> str:
    """A sentence of the README on what routes requests."""
    mode = _router_mode(fleet)
    described = {
        "kv": ", overlap of prefixes and load at its own weights, from its own account of what workers "
        "cache, since they are not set to publish events",
        "least-loaded": ", the fewest requests in flight",
    }
    return f"Dynamo's frontend in the mode {mode}{described.get(mode, '')}."


def documents(fleet: Fleet, max_model_len: int) -> list[Document]:
    """One graph for prefill and decode pools and one for mixed pools, as far as the fleet has them."""
    # Called only to refuse names that need quotes.
    engine_command.plain_name(fleet, "dynamo")
    engine_command.refuse_ranks(fleet, "dynamo", on_nodes=False)
    engine_command.refuse_offload(fleet, "dynamo")
    if len(fleet.running_pools) >= MAX_COMPONENTS:
        raise InputError(
            f"dynamo: a graph holds {MAX_COMPONENTS - 1} pools and a frontend, found "
            f"{len(fleet.running_pools)}"
        )
    graphs = []
    for name, named_pools in graph_pools(fleet).items():
        workers = (_component(fleet, component, pool, max_model_len) for component, pool in named_pools)
        components = [_frontend(fleet), *workers]
        graphs.append(
            {
                "apiVersion": "nvidia.com/v1beta1",
                "kind": "DynamoGraphDeployment",
                "metadata": {"name": name},
                "spec": {"backendFramework": "vllm", "components": components},
            }
        )
    return graphs


def graph_pools(fleet: Fleet) -> dict[str, list[tuple[str, Pool]]]:
    """Name of a graph -> its pools, each with the name of its component."""
    labels = engine_command.pool_labels(fleet, length=COMPONENT_NAME_LETTERS)
    pools = list(zip(labels, fleet.running_pools, strict=True))
    pools_by_graph = {}
    for kind in ("disagg", "agg"):  # Dynamo's words for prefill and decode pools, and for mixed pools.
        if of_kind := [(name, pool) for name, pool in pools if (pool.role == "mixed") == (kind == "agg")]:
            pools_by_graph[_graph_name(fleet, kind, of_kind)] = of_kind
    return pools_by_graph


def _graph_name(fleet: Fleet, kind: str, pools: list[tuple[str, Pool]]) -> str:
    """A graph's name: as many letters of the LLM's name as the components' names leave of MAX_NAMES. A
    component on several nodes counts with its name twice and `-ldr`, as Grove builds names.
    """
    longest = max(
        len(name) if engine_command.nodes_of(pool.type) == 1 else 2 * len(name) + len("-ldr")
        for name, pool in pools
    )
    llm_letters = MAX_NAMES - max(longest, len("frontend")) - len(f"-{kind}")
    return f"{engine_command.llm_label(fleet, length=min(llm_letters, engine_command.LLM_LETTERS))}-{kind}"


def _router_mode(fleet: Fleet) -> str:
    """The frontend's mode for the plan's routing."""
    return find_router_difference(ROUTING[fleet.policies.routing], DYNAMO).name


def _frontend(fleet: Fleet) -> Document:
    """The graph's frontend, which routes."""
    mode = _router_mode(fleet)
    main = {
        "name": "main",
        "image": IMAGE,
        "command": ["python3", "-m", "dynamo.frontend"],
        "args": ["--router-mode", mode, *(["--no-router-kv-events"] if mode == "kv" else [])],
        "envFrom": TOKEN,
    }
    return {
        "name": "frontend",
        "type": "frontend",
        "replicas": 1,
        "podTemplate": {"spec": {"containers": [main]}},
    }


def _component(fleet: Fleet, name: str, pool: Pool, max_model_len: int) -> Document:
    """The workers of one pool as a component of Dynamo's deployment."""
    if engine_command.is_rocm(pool.type.gpu):
        raise InputError(
            f"dynamo: its image {IMAGE} is for NVIDIA GPUs, {name} has "
            f"{engine_command.one_line(pool.type.gpu.name)}"
        )
    engine_command.refuse_adapters(fleet, "dynamo", "loads adapters by its own API")
    engine_settings = engine_command.engine_flags(pool, fleet, max_model_len)
    engine_settings.pop("data-parallel-size-local", None)  # The operator sets it.
    args = ["--model", fleet.llm.name, *engine_command.to_args(engine_settings)]
    if pool.role != "mixed":
        args += ["--disaggregation-mode", pool.role]
    main = {
        "name": "main",
        "image": IMAGE,
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": kubernetes.escape_variables(args),
        "envFrom": TOKEN,
        "resources": kubernetes.gpu_resources(pool),
    }
    if kv_address := kubernetes.nixl_environment(fleet, pool):
        main["env"] = kv_address
    template: Document = {"spec": {**kubernetes.node_affinity(fleet, pool), "containers": [main]}}
    if engine_command.is_capped(pool.type.gpu):
        template["metadata"] = {"annotations": {kubernetes.POWER_LIMIT: f"{pool.type.gpu.power_w:g}"}}
    component: Document = {
        "name": name,
        "type": "worker" if pool.role == "mixed" else pool.role,
        "replicas": pool.count,
        "podTemplate": template,
    }
    if (nodes := engine_command.nodes_of(pool.type)) > 1:
        component["multinode"] = {"nodeCount": nodes}
    return component
