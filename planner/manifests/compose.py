"""Docker Compose: one service per worker, one file per node, and a router in front.

Services are written in full, without YAML anchors: an `environment` in a service would replace all of the
anchor's, also the Hugging Face token. On one node the workers reach each other by service name. Over several
nodes they use the hosts' networks, because NIXL (which moves KV blocks) listens on ports of its own choice.
The nodes' addresses are then in NODE_0, NODE_1 ... in the environment (or in nodes.env).
"""

from typing import Any

from planner.files.checked_files import to_yaml
from planner.fleet import Fleet
from planner.manifests import engine_command
from planner.manifests.engine_command import HTTP_PORT, NIXL_PORT, NIXL_PORT_STEP, DeployedNode, PlacedWorker

Document = dict[str, Any]
ENGINE = f"vLLM {engine_command.VLLM_VERSION}, the Compose specification"
routing = engine_command.routing_sentence  # A target has `routing`, `render` and `steps` (__init__.py).
# Workers and routers that are told to stop have this time to end their requests.
STOP_GRACE = f"{engine_command.DRAIN_S + engine_command.KILL_S}s"
ROUTER_PORT_STEP = 100  # Distance of the ports of a fleet's two routers; chosen by hand.
HF_HOME = "/hf-cache"  # A folder of the container that does not depend on the image's user.


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """compose/compose.yaml, or compose/node-0.yaml ... with router.yaml and nodes.env."""
    engine_command.refuse_several_nodes(fleet, "compose")  # No worker may span nodes.
    files = {f"compose/{path}": text for path, text in _files(fleet, max_model_len).items()}
    return files | engine_command.router_image_files()


def steps(fleet: Fleet) -> list[str]:
    """How to start these files, as lines of the README."""
    node_count = len(engine_command.place_on_nodes(fleet))
    if node_count == 1:
        return ["    HF_TOKEN=... docker compose -f compose/compose.yaml up -d"]
    return [
        f"{node_count} nodes: fill in compose/nodes.env, copy the folder to each, and there (here node 0)",
        "",
        "    HF_TOKEN=... docker compose --env-file compose/nodes.env -f compose/node-0.yaml up -d",
        "",
        "then, on any host that reaches them,",
        "",
        "    docker compose --env-file compose/nodes.env -f compose/router.yaml up -d",
    ]


def _files(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """Texts of files by name: compose.yaml for one node; for several nodes node-0.yaml ..., router.yaml (the
    routers) and nodes.env (addresses).
    """
    nodes = engine_command.place_on_nodes(fleet)
    name = engine_command.llm_label(fleet)
    if len(nodes) == 1:
        services = _services(fleet, nodes[0], max_model_len, shared_network=False)
        urls = {worker.name: f"http://{worker.name}:{HTTP_PORT}" for worker in nodes[0].workers}
        healthy = {worker: {"condition": "service_healthy"} for worker in urls}
        services |= {
            router: service | {"depends_on": healthy}
            for router, service in _routers(fleet, nodes, urls).items()
        }
        return {"compose.yaml": _file(_about(nodes[0]), name, services)}
    files = {}
    urls = {}  # The URL of each worker, by the worker's name.
    for index, node in enumerate(nodes):
        services = _services(fleet, node, max_model_len, shared_network=True)
        files[f"node-{index}.yaml"] = _file(_about(node), f"{name}-node-{index}", services)
        for slot, worker in enumerate(node.workers):
            urls[worker.name] = f"http://{_address(index)}:{_port(slot)}"
    about = "The router; start it on any host that reaches the nodes."
    files["router.yaml"] = _file(about, f"{name}-router", _routers(fleet, nodes, urls), has_weights=False)
    addresses = ["# The address of each node, as the other nodes reach it."]
    for index, node in enumerate(nodes):
        addresses += [f"# {_node_text(node)}", f"NODE_{index}="]
    files["nodes.env"] = "\n".join(addresses) + "\n"
    return files


def _file(about: str, name: str, services: Document, *, has_weights: bool = True) -> str:
    """A compose file with a comment at its head."""
    document: Document = {"name": name, "services": services}
    if has_weights:  # The folder into which workers load weights; they share it, and routers have none.
        document["volumes"] = {"hf-cache": {}}
    return f"# {about}\n" + to_yaml(document)


def _about(node: DeployedNode) -> str:
    """The comment at the head of a node's file: its GPUs, its workers, and their power cap."""
    workers = ", ".join(worker.name for worker in node.workers)
    about = f"A node with {_node_text(node)}: {workers}."
    return f"{about}\n{engine_command.power_note(node.gpu)}" if engine_command.is_capped(node.gpu) else about


def _node_text(node: DeployedNode) -> str:
    """The GPUs of a node, "8 x h100-80g"."""
    return f"{node.gpu.gpus_per_node} x {engine_command.one_line(node.gpu.base)}"


def _port(slot: int) -> int:
    """The port of a node's worker on the host's network, where a router may have HTTP_PORT."""
    return HTTP_PORT + 1 + slot


def _address(node: int) -> str:
    """The variable with a node's address; if it is empty, Compose stops with the text after `?`."""
    return f"${{NODE_{node}:?set NODE_{node} in nodes.env}}"


def _services(fleet: Fleet, node: DeployedNode, max_model_len: int, *, shared_network: bool) -> Document:
    """The services of a node's workers, by name. With `shared_network` they use the network of their host."""
    return {
        worker.name: _service(fleet, worker, slot, max_model_len, shared_network=shared_network)
        for slot, worker in enumerate(node.workers)
    }


def _service(
    fleet: Fleet, worker: PlacedWorker, slot: int, max_model_len: int, *, shared_network: bool
) -> Document:
    """The service of one worker; `slot` counts the workers of its node."""
    gpu = worker.pool.type.gpu
    port = _port(slot) if shared_network else HTTP_PORT
    args = [
        *engine_command.engine_args(worker.pool, fleet, max_model_len),
        "--port",
        str(port),
        *engine_command.drain_args(worker.pool.type),
    ]
    environment = {"HF_TOKEN": "${HF_TOKEN:-}", "HF_HOME": HF_HOME}
    if worker.pool.role != "mixed":
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = _address(worker.node) if shared_network else worker.name
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(NIXL_PORT + NIXL_PORT_STEP * slot)
        environment |= engine_command.hand_off_environment(worker.pool, fleet)
    service: Document = {
        "image": engine_command.engine_image(worker.pool.type),
        "entrypoint": ["vllm", "serve"],
        "command": [arg.replace("$", "$$") for arg in args],  # Compose reads a single $ as a variable.
        "environment": environment,
        "ipc": "host",  # Ranks of a worker talk through shared memory (kubernetes.SHM_GIB).
        "volumes": [f"hf-cache:{HF_HOME}"],
        "restart": "unless-stopped",
        "stop_grace_period": STOP_GRACE,
        "healthcheck": {
            "test": ["CMD", "curl", "-sf", f"http://localhost:{port}/health"],
            # Three missed checks, 10 s apart, make a worker unhealthy; chosen by hand.
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{engine_command.START_S}s",
        },
    }
    if shared_network:
        service["network_mode"] = "host"
    devices = [str(device) for device in worker.devices]
    if engine_command.is_rocm(gpu):
        # The container gets all AMD GPUs of the node; the variable selects the worker's own. `service` refers
        # to `environment`, so it gets the variable too.
        environment["HIP_VISIBLE_DEVICES"] = ",".join(devices)
        service |= {
            "devices": ["/dev/kfd", "/dev/dri"],
            "group_add": ["video"],
            "security_opt": ["seccomp=unconfined"],
        }
    else:
        reservation = {"driver": "nvidia", "device_ids": devices, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [reservation]}}}
    return service


def _routers(fleet: Fleet, nodes: list[DeployedNode], urls: dict[str, str]) -> Document:
    """The services of the routers, by name; `urls` are the workers' URLs, by name."""
    workers = [worker for node in nodes for worker in node.workers]
    services: Document = {}
    for number, (name, roles) in enumerate(engine_command.routers_of(fleet).items()):
        args = engine_command.router_policy_args(fleet, roles)
        for role in roles:
            role_urls = [urls[worker.name] for worker in workers if worker.pool.role == role]
            # vLLM's router takes mixed workers as one list, but one flag for each prefill or decode worker.
            if role == "mixed":
                args += ["--worker-urls", *role_urls]
            else:
                args += [word for url in role_urls for word in (f"--{role}", url)]
        program, *program_args = engine_command.router_command(args)
        services[name] = {
            "image": engine_command.ROUTER_IMAGE,
            "build": f"../{engine_command.ROUTER_FOLDER}",
            "entrypoint": [program],
            "command": program_args,
            "read_only": True,
            "tmpfs": ["/tmp"],  # The only folder that stays writable.
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "ports": [f"{HTTP_PORT + ROUTER_PORT_STEP * number}:{HTTP_PORT}"],
            "restart": "unless-stopped",
            "stop_grace_period": STOP_GRACE,
        }
    return services
