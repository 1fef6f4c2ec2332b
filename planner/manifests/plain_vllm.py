"""vLLM itself, without a cluster: per pool a config file for `vllm serve` and a script for one worker.

The first argument of a script is the number of the worker on its host, 0, 1, ...; the worker's ports follow
from it. Further arguments go to `vllm serve`. CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES on AMD) selects the
worker's GPUs.
"""

import shlex

from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Pool, Role
from planner.manifests import engine_command, kv_store
from planner.manifests.engine_command import HTTP_PORT, NIXL_PORT, NIXL_PORT_STEP

ENGINE = f"vLLM {engine_command.VLLM_VERSION}, {engine_command.ROUTER_PACKAGE}"
routing = engine_command.routing_sentence  # A target has `routing`, `render` and `steps` (__init__.py).
FIRST_PORT = HTTP_PORT + 1  # The router has HTTP_PORT.
# The shell command for this host's address. `hostname -i` may be 127.0.1.1 on Debian and Ubuntu (by
# /etc/hosts), an address that other hosts cannot use.
FIND_ADDRESS = "address=$(hostname -I | cut -d' ' -f1)"
# Placeholders in the config file of the store of KV blocks; a worker's script replaces them.
STORE_ADDRESS, STORE_PROTOCOL = "KV_STORE", "PROTOCOL"


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """The files by name: vllm/POOL.config.yaml and vllm/POOL.sh for every pool, a script for each router, and
    the files of the store of KV blocks if the fleet has one.
    """
    files: dict[str, str] = {}
    for name, pool in zip(engine_command.pool_labels(fleet), fleet.running_pools, strict=True):
        engine_settings = {"model": fleet.llm.name, **engine_command.engine_flags(pool, fleet, max_model_len)}
        # A setting that is off has its own flag, `--no-KEY`.
        engine_settings = dict(
            (f"no-{key}", True) if value is False else (key, value) for key, value in engine_settings.items()
        )
        files[f"vllm/{name}.config.yaml"] = f"# vllm serve --config {name}.config.yaml\n" + to_yaml(
            engine_settings
        )
        files[f"vllm/{name}.sh"] = _worker(fleet, name, pool)
    for name, roles in engine_command.routers_of(fleet).items():
        files[f"vllm/{name}.sh"] = _router(fleet, roles)
    if size := kv_store.size_bytes(fleet):
        files[f"vllm/{kv_store.CONFIG}"] = kv_store.store_config(STORE_ADDRESS, STORE_PROTOCOL)
        files[f"vllm/{kv_store.NAME}.sh"] = _store(size)
    return files


def steps(fleet: Fleet) -> list[str]:
    """How to start the workers and the router, as lines of the folder's README."""
    lines = []
    # Addresses such as 10.0.0.9 are examples for the user to replace.
    packages, store_environment = f"vllm=={engine_command.engine_version(fleet)}", ""
    if kv_store.size_bytes(fleet):
        packages, store_environment = f"{packages} {kv_store.PACKAGE}", "KV_STORE=10.0.0.9 "
        lines += [
            f"First the store of KV blocks, on a host of its own: `pip install {kv_store.PACKAGE}`, and",
            "",
            f"    bash vllm/{kv_store.NAME}.sh   # its address is KV_STORE of the workers",
            "",
            "Without RDMA between the hosts set PROTOCOL=tcp there and for every worker.",
            "",
        ]
    lines += [f"On every host, `pip install {packages}`; then each worker, for instance", ""]
    if rocm_types := [pool.type for pool in fleet.running_pools if engine_command.is_rocm(pool.type.gpu)]:
        image = engine_command.engine_image(rocm_types[0])
        lines[-2:] = [
            f"On hosts with AMD's GPUs, vLLM's build for ROCm (in {image}), as PyPI's vllm is for NVIDIA; on "
            f"others `pip install {packages}`. Then each worker, for instance",
            "",
        ]
    for name, pool in zip(engine_command.pool_labels(fleet), fleet.running_pools, strict=True):
        gpus = pool.type.gpus // engine_command.nodes_of(pool.type)
        devices = ",".join(map(str, range(gpus)))
        visible = "HIP_VISIBLE_DEVICES" if engine_command.is_rocm(pool.type.gpu) else "CUDA_VISIBLE_DEVICES"
        group = "NODE_RANK=0 MASTER_ADDR=10.0.0.1 " if engine_command.nodes_of(pool.type) > 1 else ""
        environment = (
            f"{visible}={devices} {group}{store_environment if kv_store.uses_store(fleet, pool) else ''}"
        )
        lines.append(f"    {environment}bash vllm/{name}.sh 0   # {pool.count} in all")
    lines += [
        "",
        f"Worker N of a host listens on port {FIRST_PORT} + N: count on through all pools of that host. The "
        "routers take the workers' addresses:",
        "",
    ]
    for name, roles in engine_command.routers_of(fleet).items():
        urls = " ".join(f"{role.upper()}_URLS='http://HOST:{FIRST_PORT} ...'" for role in roles)
        lines.append(f"    {urls} bash vllm/{name}.sh")
    worker_options = " ".join(
        f"--workers {shlex.quote(engine_command.one_line(pool.name))}=http://HOST:{FIRST_PORT},..."
        for pool in fleet.running_pools
    )
    lines += [
        "",
        "Or, to route as simulated, the planner's own router, which takes every worker's address:",
        "",
        f"    plan serve plan.yaml {worker_options}",
    ]
    return lines


def _worker(fleet: Fleet, name: str, pool: Pool) -> str:
    """The text of the script that starts one worker of a pool; `name` is the pool's name in files."""
    nodes = engine_command.nodes_of(pool.type)
    gpus = pool.type.gpus // nodes
    lines = [
        "#!/usr/bin/env bash",
        f"# One worker of {name}: {gpus} x {engine_command.one_line(pool.type.gpu.name)}"
        + (f" on each of {nodes} nodes" if nodes > 1 else "")
        + f"; the plan has {pool.count}.",
        f"# bash {name}.sh [NUMBER OF THE WORKER ON THIS HOST] [more flags of vllm serve]",
    ]
    if engine_command.is_capped(pool.type.gpu):
        lines.append(engine_command.power_note(pool.type.gpu))
    lines += [
        "set -euo pipefail",
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
        "number=${1:-0}",
        "shift || true",
    ]
    # Two workers on one host must not listen on the same port, so ports count on with `number`.
    flags = [f'--config "$here/{name}.config.yaml"', f"--port $(({FIRST_PORT} + number))"]
    if pool.role != "mixed":  # The address for the hand-off of KV blocks.
        lines += [
            FIND_ADDRESS,
            'export VLLM_NIXL_SIDE_CHANNEL_HOST="${VLLM_NIXL_SIDE_CHANNEL_HOST:-$address}"',
            f"export VLLM_NIXL_SIDE_CHANNEL_PORT=$(({NIXL_PORT} + {NIXL_PORT_STEP} * number))",
            *(
                f"export {variable}={value}"
                for variable, value in engine_command.hand_off_environment(pool, fleet).items()
            ),
        ]
    if kv_store.uses_store(fleet, pool):
        config_path = "$" + kv_store.CONFIG_PATH  # The variable in the shell's notation.
        lines += [
            f': "${{KV_STORE:?set KV_STORE: the address of the host that runs {kv_store.NAME}.sh}}"',
            f"export {kv_store.CONFIG_PATH}=$(mktemp)",
            f'sed "s/{STORE_ADDRESS}/$KV_STORE/; s/{STORE_PROTOCOL}/${{PROTOCOL:-rdma}}/" '
            f'"$here/{kv_store.CONFIG}" > "{config_path}"',
        ]
    if nodes > 1:
        lines += [
            f': "${{NODE_RANK:?set NODE_RANK: 0 on the first node of the worker, up to {nodes - 1}}}"',
            ': "${MASTER_ADDR:?set MASTER_ADDR: the address of the first node}"',
            "headless=()",
            'if [ "$NODE_RANK" != 0 ]; then headless=(--headless); fi',
        ]
        flags += [
            f"--nnodes {nodes}",
            '--node-rank "$NODE_RANK"',
            '--master-addr "$MASTER_ADDR"',
            '"${headless[@]}"',
        ]
    lines.append(" ".join(["exec vllm serve", *flags, '"$@"']))
    return "\n".join(lines) + "\n"


def _store(size: int) -> str:
    """The text of the script that starts the store of KV blocks with `size` bytes of memory."""
    # Two processes (kv_store.py): the owner has the memory, the master the list of blocks.
    start_owner = " ".join(kv_store.owner_args(size, '"${address}"', '"${PROTOCOL:-rdma}"'))
    lines = [
        "#!/usr/bin/env bash",
        f"# The store of KV blocks that all workers share: {size / 1e9:.4g} GB of this host's memory.",
        "set -euo pipefail",
        FIND_ADDRESS,
        f"{' '.join(kv_store.master_args())} &",
        "trap 'kill $!' EXIT",
        start_owner,
    ]
    return "\n".join(lines) + "\n"


def _router(fleet: Fleet, roles: tuple[Role, ...]) -> str:
    """The text of the script that starts a router in front of workers of these roles."""
    lines = [
        "#!/usr/bin/env bash",
        f"# pip install {engine_command.ROUTER_PACKAGE}; the variables hold the workers' addresses, "
        "spaces between.",
        "set -euo pipefail",
        "urls=()",
    ]
    for role in roles:
        variable = f"{role.upper()}_URLS"
        lines.append(f': "${{{variable}:?set {variable}: the addresses of the {role} workers}}"')
        if role == "mixed":
            lines.append(f"urls+=(--worker-urls ${variable})")
        else:
            lines.append(f'for url in ${variable}; do urls+=(--{role} "$url"); done')
    lines.append(
        f"exec vllm-router {' '.join(engine_command.ROUTER_START)} "
        f"{' '.join(engine_command.router_policy_args(fleet, roles))} "
        '"${urls[@]}" "$@"'
    )
    return "\n".join(lines) + "\n"
