"""A store of KV blocks for all workers that prefill (`kv_offload: shared`): Mooncake's, beside vLLM.

The store is two processes of the package mooncake-transfer-engine: mooncake_master has the list of blocks,
and mooncake_client (the owner) has the blocks in its memory. Workers read and write blocks with vLLM's
MooncakeStoreConnector in the mode standalone-store, so they add no memory of their own to the store. Keys are
as in vLLM 0.32 (vllm/distributed/mooncake_store.py, docs/features/mooncake_store_connector_usage.md), options
as in Mooncake's deployment guide.
"""

import json
from typing import Any

from planner.errors import InputError
from planner.fleet import Fleet, Pool

Document = dict[str, Any]
TARGETS = ("vllm", "kubernetes")  # The targets whose manifests start the store.
NAME = "kv-store"
PACKAGE = "mooncake-transfer-engine"
CONFIG, CONFIG_PATH = "kv-store.json", "MOONCAKE_CONFIG_PATH"
MASTER_PORT, OWNER_PORT = 50051, 50052
HANDSHAKE = "P2PHANDSHAKE"  # In place of the address of a metadata server: there is none.


def size_bytes(fleet: Fleet) -> int:
    """The size of the shared KV store; 0 where the fleet has none."""
    offload = fleet.policies.kv_offload
    return int(offload.size_bytes) if offload is not None and offload.is_shared else 0


def uses_store(fleet: Fleet, pool: Pool) -> bool:
    """Whether workers of `pool` use the store: only workers that prefill do."""
    return size_bytes(fleet) > 0 and pool.role != "decode"


def refuse_store(fleet: Fleet, target: str) -> None:
    """Raise InputError if the fleet has a shared store, which the manifests of `target` cannot start."""
    if size_bytes(fleet) and target not in TARGETS:
        raise InputError(
            f"{target}: kv_offload: shared needs the store's own processes, which are not written here; take "
            f"{' or '.join(TARGETS)}"
        )


def connector(fleet: Fleet) -> Document:
    """vLLM's `kv_transfer_config` of workers that use the store.

    If their TP degrees differ, it lists all degrees, so that blocks are split small enough for every worker.
    """
    connector_config: Document = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    degrees = sorted({pool.type.tp for pool in fleet.running_pools if uses_store(fleet, pool)})
    if len(degrees) > 1:
        connector_config["kv_connector_extra_config"] = {
            "enable_store_tp_lcm": True,
            "prefill_tp_sizes": degrees,
        }
    return connector_config


def store_config(master: str, protocol: str) -> str:
    """The JSON file of a worker: `master` is the address of mooncake_master."""
    settings = {
        "mode": "standalone-store",
        "metadata_server": HANDSHAKE,
        "master_server_address": f"{master}:{MASTER_PORT}",
        "global_segment_size": 0,  # The worker's own memory in the store.
        "local_buffer_size": "4GB",  # The value of vLLM's usage guide for Mooncake.
        "protocol": protocol,
        "device_name": "",  # Mooncake finds the network device itself.
    }
    return json.dumps(settings, indent=2) + "\n"


def master_args() -> list[str]:
    """The command that starts the KV store's master, as words."""
    return ["mooncake_master", f"--port={MASTER_PORT}"]


def owner_args(size: int, host: str, protocol: str) -> list[str]:
    """The command that starts the owner on its master's host, with `size` bytes for blocks; `host` is its
    address for workers.
    """
    return [
        "mooncake_client",
        f"--host={host}",
        f"--port={OWNER_PORT}",
        f"--global_segment_size={size}",
        f"--master_server_address=127.0.0.1:{MASTER_PORT}",
        f"--metadata_server={HANDSHAKE}",
        f"--protocol={protocol}",
    ]
