"""The target SkyPilot: a SkyServe service, with a rented machine per worker behind SkyServe's load balancer.

A service has one kind of replica, so a fleet of several pools is refused, unless they are the same workers on
owned and rented GPUs.
"""

import shlex

from planner.domain import OWNED, SPOT, Gpu, payment_suffix
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Pool
from planner.manifests import engine_command
from planner.manifests.engine_command import HTTP_PORT
from planner.manifests.kubernetes import Document
from planner.policies import ROUTING, SKYSERVE, find_router_difference

SKYPILOT_VERSION = "0.14.1"
ENGINE = f"SkyPilot {SKYPILOT_VERSION}, vLLM {engine_command.VLLM_VERSION}"
# The load balancer ends answers after this time, chosen by hand. The default of 120 s would cut long answers.
STREAM_TIMEOUT_S = 3600
# A replica's disk has this much for packages and logs, beside the weights; chosen by hand.
SPARE_DISK_BYTES = 100e9

# The names of GPUs to write for SkyPilot, by their `node_selector` in catalogs/gpus.yaml.
# (importers/skypilot.py reads more names, in price lists.)
ACCELERATORS = {
    "NVIDIA-A100-SXM4-40GB": "A100",
    "NVIDIA-A100-SXM4-80GB": "A100-80GB",
    "NVIDIA-H100-80GB-HBM3": "H100",
    "NVIDIA-H200": "H200",
    "NVIDIA-B200": "B200",
    "NVIDIA-B300-SXM6-AC": "B300",
    "NVIDIA-L40S": "L40S",
    "NVIDIA-L4": "L4",
    "NVIDIA-A10": "A10",
    "NVIDIA-A10G": "A10G",
    "Tesla-V100-SXM2-32GB": "V100-32GB",
}


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """The file skypilot.yaml, which `sky serve up` takes."""
    header = "# sky serve up skypilot.yaml --secret HF_TOKEN\n"
    return {"skypilot.yaml": header + to_yaml(document(fleet, max_model_len))}


def steps(fleet: Fleet) -> list[str]:
    """How to deploy the service, as lines of the README."""
    has_owned = any(payment_suffix(pool.type.gpu.name) == OWNED for pool in fleet.running_pools)
    return [
        f"    pip install 'skypilot[CLOUD]=={SKYPILOT_VERSION}' && sky check",
        f"    sky serve up -n {engine_command.llm_label(fleet)} skypilot.yaml --secret HF_TOKEN",
        "",
        "SkyPilot rents where a machine with exactly these GPUs costs least, at that cloud's price, beside a "
        "machine for its controller and load balancer. `infra: aws/us-east-1` under `resources` keeps it to "
        "one place. The address: `sky serve status --endpoint`.",
        *(["Owned GPUs count if `sky check` lists their cluster (Kubernetes or SSH)."] if has_owned else []),
    ]


def routing(fleet: Fleet) -> str:
    """A sentence of the README on what routes requests."""
    return f"SkyServe's load balancer, by {_balancing(fleet)}; it does not look at prefixes."


def document(fleet: Fleet, max_model_len: int) -> Document:
    """The service's task: how many replicas, what each rents, how it is set up and what it runs."""
    pool, replicas = _replicas(fleet)
    engine_command.refuse_several_nodes(fleet, "skypilot")
    engine_command.refuse_offload(fleet, "skypilot")
    engine_command.refuse_adapters(fleet, "skypilot", "adapters must lie on every replica")
    disk_gb = (fleet.llm.weight_bytes + SPARE_DISK_BYTES) / 1e9
    command = shlex.join(["vllm", "serve", *engine_command.engine_args(pool, fleet, max_model_len)])
    return {
        "name": engine_command.llm_label(fleet),
        "service": {
            "replicas": replicas,
            "load_balancing_policy": _balancing(fleet),
            "load_balancer": {"stream_timeout_seconds": STREAM_TIMEOUT_S},
            "readiness_probe": {"path": "/health", "initial_delay_seconds": engine_command.START_S},
        },
        "resources": {
            "accelerators": f"{_accelerator(pool.type.gpu)}:{pool.type.gpus}",
            "ports": HTTP_PORT,
            "disk_size": f"{disk_gb:.0f}GB",
            **({"use_spot": True} if payment_suffix(pool.type.gpu.name) == SPOT else {}),
        },
        "secrets": {"HF_TOKEN": None},
        "setup": "\n".join(_setup_lines(fleet, pool)) + "\n",
        "run": f"source ~/vllm/bin/activate\n{command} --host 0.0.0.0 --port {HTTP_PORT}\n",
    }


def _replicas(fleet: Fleet) -> tuple[Pool, int]:
    """The pool whose workers the replicas are, and their number. Owned GPUs are not told from rented ones:
    SkyPilot takes a machine of the user's own clusters, which cost nothing there, before it rents one.
    """
    pools = fleet.running_pools
    kinds = {(pool.role, pool.type.name.replace(OWNED, "")) for pool in pools}
    if len(kinds) > 1:
        raise InputError("skypilot: a service has one kind of replica, found several pools; take vllm")
    return pools[0], sum(pool.count for pool in pools)


def _setup_lines(fleet: Fleet, pool: Pool) -> list[str]:
    """Shell commands that install vLLM, in an environment separate from SkyPilot's packages, and set the
    power cap.
    """
    lines = [
        "set -e",
        "pip install uv",
        "uv venv --python 3.12 --clear ~/vllm",
        f"uv pip install --python ~/vllm vllm=={engine_command.engine_version(fleet)}",
    ]
    if engine_command.is_capped(pool.type.gpu):
        lines.append(f"sudo nvidia-smi -pl {pool.type.gpu.power_w:g}")
    return lines


def _balancing(fleet: Fleet) -> str:
    """SkyServe's name for the plan's routing, or for the policy in its place."""
    return find_router_difference(ROUTING[fleet.policies.routing], SKYSERVE).name


def _accelerator(gpu: Gpu) -> str:
    """SkyPilot's name for `gpu`. Raises InputError if ACCELERATORS has none."""
    if (name := ACCELERATORS.get(gpu.node_selector)) is None:
        raise InputError(
            f"skypilot: its name of {engine_command.one_line(gpu.name)} is not known here; take vllm or "
            "kubernetes"
        )
    return name
