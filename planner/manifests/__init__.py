"""The plan as manifests: one module per target; all take the engine's settings from engine_command.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Protocol

from planner.documents.fleet_file import RouterRow
from planner.domain import SPOT, payment_suffix
from planner.errors import InputError
from planner.fleet import Fleet, Policies
from planner.manifests import (
    compose,
    disaggregatedset,
    dynamo,
    engine_command,
    kserve,
    kubernetes,
    kv_store,
    llm_d,
    lws,
    manifest_notes,
    plain_vllm,
    production_stack,
    ray_serve,
    sglang_engine,
    skyserve,
)
from planner.models.kv_offload import KvOffload
from planner.models.lora import Lora
from planner.policies import QUEUE, ROUTERS_OF, ROUTING, VLLM_ROUTER, advise_target


class DeploymentTarget(Protocol):
    """The interface of a target's module. `ENGINE` names the versions for which it writes manifests."""

    ENGINE: str

    def render(self, fleet: Fleet, max_model_len: int) -> dict[str, str]:
        """Path below manifests/ -> content. Raises InputError where the target cannot express the fleet."""

    def steps(self, fleet: Fleet) -> list[str]:
        """Lines of Markdown: how to deploy the files."""

    def routing(self, fleet: Fleet) -> str:
        """What routes requests there, as the rest of a sentence that begins with "Routing: "."""


TARGETS: dict[str, DeploymentTarget] = {
    "vllm": plain_vllm,
    "compose": compose,
    "kubernetes": kubernetes,
    "lws": lws,
    "disaggregatedset": disaggregatedset,
    "llm-d": llm_d,
    "kserve": kserve,
    "dynamo": dynamo,
    "ray-serve": ray_serve,
    "production-stack": production_stack,
    "skypilot": skyserve,
}
# Targets that make a service, with an address of its own, for each mixed pool and each pair (a prefill pool
# with a decode pool).
APART = ("kserve",)
# Target -> patterns of files that an earlier plan may have left. Files that this plan does not write are
# removed, because someone might start their workers.
OUTDATED: dict[str, tuple[str, ...]] = {
    **{name: (f"{name}.yaml",) for name in TARGETS},
    "vllm": ("vllm/*.config.yaml", "vllm/*.sh", "vllm/kv-store.json"),
    "compose": ("compose/*.yaml", "compose/nodes.env"),
    "kubernetes": (
        "kubernetes.yaml",
        "kustomization.yaml",
        "components/*/*.yaml",
        "chart/*.yaml",
        "chart/*/*.yaml",
    ),
    "llm-d": ("llm-d/*.values.yaml", "llm-d/endpoint-picker.yaml"),  # Earlier versions wrote the second.
    "production-stack": ("production-stack.values.yaml",),
}


@dataclass(frozen=True, slots=True)
class Rendered:
    """`files`: path relative to the manifests folder -> content. `refused`: target -> why it has no files.

    `notes`: target -> sentences on its routing and queueing that were not simulated. `warnings`: target ->
    that the SLO is missed there, or that the plan is for another target.
    """

    files: dict[str, str]
    refused: dict[str, str]
    notes: dict[str, list[str]]
    warnings: dict[str, str] = field(default_factory=dict)


def check_target(target: str) -> None:
    """Raise InputError unless it is a target, or "all"."""
    if target not in (*TARGETS, "all"):
        advice = advise_target(target, TARGETS)
        raise InputError(f"target: no deployment target {target[:100]!r}; {advice} all, {', '.join(TARGETS)}")


def render(
    fleet: Fleet, max_model_len: int, target: str = "all", router_rows: Sequence[RouterRow] = ()
) -> Rendered:
    """The manifests of one target, or of all that can express the fleet, and a README.md.

    `router_rows` are the results of simulations under the targets' routers. Raises InputError if there is no
    such target, or it cannot express the fleet.
    """
    check_target(target)
    if why := engine_command.why_undeployable(fleet):
        if target != "all":
            raise InputError(f"{target}: {why}")
        text = f"# Deploying {engine_command.one_line(fleet.llm.name)}\n\nNothing here deploys it: {why}.\n"
        return Rendered({"README.md": text}, dict.fromkeys(TARGETS, why), {})
    files: dict[str, str] = {}
    refused: dict[str, str] = {}
    notes: dict[str, list[str]] = {}
    warnings: dict[str, str] = {}
    for name in TARGETS if target == "all" else [target]:
        try:
            kv_store.refuse_store(fleet, name)
            sglang_engine.refuse_sglang(fleet, name)
            target_files = _render_target(name, fleet, max_model_len)
            row = next((row for row in router_rows if row.target == name), None)
            target_notes = manifest_notes.routing_notes(fleet, name, is_simulated=row is not None)
        except InputError as error:
            if target != "all":
                raise
            refused[name] = str(error)
        else:
            warning = ""
            if row is not None:
                warning = _missed_warning(row)
            elif target_notes:  # A target that routes as the plan does needs no simulation of its own.
                warning = _other_target_warning(name, router_rows)
            files |= manifest_notes.with_first_line(
                manifest_notes.with_notes(target_files, target_notes), engine_command.one_line(warning)
            )
            notes[name] = target_notes
            if warning:
                warnings[name] = warning
    readme = _write_readme(fleet, max_model_len, notes, refused, warnings, router_rows)
    return Rendered({"README.md": readme, **files}, refused, notes, warnings)


# Each plan is rendered twice: to find which targets can run it, and for the files.
@lru_cache(maxsize=32)
def _render_target(target: str, fleet: Fleet, max_model_len: int) -> Mapping[str, str]:
    """The files of a deployment target, path -> content; read-only, because the result is cached."""
    return MappingProxyType(TARGETS[target].render(fleet, max_model_len))


def services_apart(fleet: Fleet, target: str) -> int:
    """How many services, each with an address, a target makes of a fleet; 1 if one router serves all."""
    return len(engine_command.pool_services(fleet, target)) if target in APART else 1


def find_refused_targets(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """The targets that cannot run the fleet, and why."""
    return render(fleet, max_model_len).refused


def _write_readme(
    fleet: Fleet,
    max_model_len: int,
    notes: dict[str, list[str]],
    refused: dict[str, str],
    warnings: dict[str, str],
    router_rows: Sequence[RouterRow],
) -> str:
    """README.md: how to deploy each target, refused targets, and what differs from the simulation."""
    llm = engine_command.one_line(fleet.llm.name)
    vllm_router = ""
    if any(ROUTERS_OF[name][0] == VLLM_ROUTER for name in notes):
        vllm_router = (
            f"Where a router comes with it, that is {engine_command.ROUTER_PACKAGE} on port "
            f"{engine_command.HTTP_PORT}, with OpenAI's API. "
        )
    missed = [row.target for row in router_rows if row.target in notes and row.kept is False]
    lines = [
        *([f"NOT KEPT on {', '.join(missed)}: see below.", ""] if missed else []),
        f"# Deploying {llm}",
        "",
        *(
            f"- {pool.count} x {engine_command.one_line(pool.name)} ({pool.role}): {pool.type.gpus} x "
            f"{engine_command.one_line(pool.type.gpu.name)} each"
            for pool in fleet.running_pools
        ),
        "",
        f"{'One of the following deploys it. ' if len(notes) > 1 else ''}{vllm_router}Workers load `{llm}` "
        "from the Hugging Face hub (or that path, where it is one); to serve a local copy, mount it and "
        "change the model alone, not `served-model-name`.",
        *_describe_routers([row for row in router_rows if row.target in notes]),
    ]
    for name, note_lines in notes.items():
        target = TARGETS[name]
        versions = f"For {engine_command.versions_sentence(target.ENGINE, fleet)}"
        warning = warnings.get(name, "")
        lines += ["", f"## {name}", "", *([f"**{_table_cell(warning)}**", ""] if warning else []), versions]
        lines += ["", *target.steps(fleet)]
        lines += ["", f"Routing: {' '.join([target.routing(fleet), *note_lines])}"]
    if refused:
        lines += [
            "",
            "## Not written",
            "",
            *(f"- {engine_command.one_line(why)}" for why in refused.values()),
        ]
    lines += _power_cap_lines(fleet) + _difference_lines(fleet, max_model_len)
    return "\n".join(lines) + "\n"


def _missed_warning(row: RouterRow) -> str:
    """The first line of manifests of a target on which the SLO is missed; empty if it is kept or unknown."""
    if row.kept is not False:
        return ""
    return (
        f"NOT KEPT: on {row.target} ({row.router}) this fleet does not keep its SLO "
        f"({row.slo.removesuffix(': not kept')}): plan for it with `plan --target {row.target}`."
    )


def _other_target_warning(target: str, rows: Sequence[RouterRow]) -> str:
    """The first line of manifests for a target whose router was not simulated; empty if no router was."""
    if not rows:
        return ""
    planned_for = ", ".join(row.target for row in rows)
    return (
        f"NOT SIMULATED: this fleet was planned for {planned_for}, and {target} routes otherwise: plan for "
        f"it with `plan --target {target}`."
    )


def _describe_routers(rows: Sequence[RouterRow]) -> list[str]:
    """The lines of README.md on whether the SLO is kept under each target's router; empty without rows."""
    if not rows:
        return []
    return [
        "",
        "## Under each router",
        "",
        "The plan's fleet on its traffic, routed as each target does it:",
        "",
        "| target | router | simulated as | SLO |",
        "| --- | --- | --- | --- |",
        *(
            f"| {' | '.join(map(_table_cell, (row.target, row.router, row.simulated, row.slo)))} |"
            for row in rows
        ),
    ]


def _table_cell(text: str) -> str:
    return engine_command.one_line(text).replace("|", "\\|")


def _power_cap_lines(fleet: Fleet) -> list[str]:
    """The lines of README.md on how to cap the power of GPUs; empty if no GPU is capped."""
    gpus = {pool.type.gpu.name: pool.type.gpu for pool in fleet.running_pools}
    capped = [gpu for gpu in gpus.values() if engine_command.is_capped(gpu)]
    if not capped:
        return []
    return [
        "",
        "## Power caps",
        "",
        "No manifest can set a power cap. On every node of these workers, at every boot:",
        "",
        *(
            f"    sudo nvidia-smi -pl {gpu.power_w:g}; kubectl label node NAME "
            f"{kubernetes.POWER_LIMIT}={gpu.power_w:g}   # {engine_command.one_line(gpu.name)}"
            for gpu in capped
        ),
    ]


# Policies that some target expresses, or that the README explains in a sentence of its own.
_EXPRESSIBLE_POLICIES = (
    "routing",
    "decode_routing",
    "seed",
    "queue",
    "queue_window_s",
    "due",
    "prefix_cache",
    "kv_offload",
)


def _inexpressible_policies(policies: Policies) -> list[str]:
    """The policies that no target expresses, with their values, where they differ from the default.

    Settings of the routing (`setting_grid`) count as expressed where vllm-router has its cache rule.
    """
    default = Policies()
    expressible = (
        (*_EXPRESSIBLE_POLICIES, *ROUTING[policies.routing].setting_grid)
        if engine_command.has_cache_rule(policies)
        else _EXPRESSIBLE_POLICIES
    )
    names = [field.name for field in fields(Policies)]
    changed = [name for name in names if getattr(policies, name) != getattr(default, name)]
    return [f"{name} {getattr(policies, name)}" for name in changed if name not in expressible]


def _cache_notes(fleet: Fleet) -> list[str]:
    """Lines on what a plan that counts on prefix caches needs from routers, and at the start of workers."""
    policies = fleet.policies
    lines = [
        f"- The plan counts on hits of vLLM's prefix caches, found by the routing {policies.routing}. A "
        "target whose text says that its router does not look at prefixes does not keep the plan's SLO."
    ]
    row = ROUTING[policies.routing]
    if engine_command.has_cache_rule(policies):
        lines.append(
            f"- vllm-router's cache_aware is the rule that was simulated, with the settings that did best: a "
            f"match of more than {policies.cache_threshold_frac:g} of a prompt is followed, unless workers "
            f"are more than {policies.balance_requests} requests and {policies.balance_ratio:g} times apart. "
            "It compares characters of the prompts, the simulation blocks of tokens."
        )
    elif row.needs_caches:
        lines.append(
            f"- No router above routes by {policies.routing}; where cache_aware stands in for it, at its "
            "defaults, simulate that before you rely on it: `policies: {prefix_cache: true, routing: "
            "[cache-aware]}` in slo.yaml."
        )
    lines.append(
        "- Caches are cold at the start, as in the simulation, and nothing here warms them: the plan knows "
        "prompts by the trace's block ids alone, not their text. warm-up.json beside plan.yaml says which "
        "request of the trace begins with each; send those beginnings, with max_tokens 1, once the workers "
        "are up (in Compose POOL-N is worker N of its pool; elsewhere to any worker, each once)."
    )
    return lines


def _adapter_notes(lora: Lora) -> str:
    """The note of README.md on where adapters' files must be, and on how requests find them."""
    files_text = (
        "each adapter's files"
        if isinstance(lora.adapters, tuple)
        else (
            f"the files of your adapters, {lora.adapter_count} in all, one NAME=PATH each in place of "
            f"{engine_command.ANY_ADAPTER}"
        )
    )
    return (
        f"- Mount {files_text} below {engine_command.ADAPTERS} on every worker, or change --lora-modules. No "
        "router here sends a request to a worker that has its adapter loaded, nor does the simulation; `plan "
        "serve` takes no adapters."
    )


def _rank_notes(fleet: Fleet) -> str:
    """The note of README.md on data-parallel ranks that are spread over several nodes."""
    speed = fleet.network.bandwidth_bytes_per_s / 1e9
    return (
        "- Ranks on several nodes meet by DeepEP, which the image must have, over a link of "
        f"{speed:g} GB/s of each GPU's own (InfiniBand or RoCE); nothing here asks for its devices, such as "
        "rdma/ib. With llm-d and Dynamo each node has a front end that chooses among its own ranks; with "
        "the others, and in the simulation, one chooses among all."
    )


def _offload_notes(fleet: Fleet, offload: KvOffload) -> str:
    """The note of README.md on KV blocks in CPU memory, or in a store that workers share."""
    if offload.is_shared:
        return (
            f"- Workers that prefill share a store of {offload.size_bytes / 1e9:.4g} GB of KV blocks: "
            "Mooncake's, on a host of its own, which is yours to add and whose price is not in the plan. The "
            f"simulation loads them at {offload.bandwidth_bytes_per_s / 1e9:.4g} GB/s in all, one load after "
            "the other; measure that rate. Images must have mooncake-transfer-engine. In kubernetes.yaml it "
            "speaks TCP: RDMA needs devices such as rdma/ib in its pods and the workers', and `protocol` in "
            "both places."
        )
    sizes = sorted({engine_command.cpu_bytes(pool, fleet) for pool in fleet.running_pools} - {0})
    size_words = " or ".join(f"{size / 1e9:.4g} GB" for size in sizes)
    return (
        f"- Every worker that prefills keeps KV blocks in {size_words} of CPU memory, below /dev/shm: its "
        "host must have as much to spare for each. The simulation loads them at "
        f"{offload.bandwidth_bytes_per_s / 1e9:.4g} GB/s per GPU, as vLLM 0.32 schedules loads; measure that "
        "rate on your hosts. Routers see what is cached on the GPUs alone."
    )


def _backend_notes(fleet: Fleet) -> list[str]:
    """The note of README.md on attention backends; empty unless different GPUs hand KV over."""
    gpus = list(map(engine_command.one_line, engine_command.hand_off_gpus(fleet)))
    if len(gpus) < 2:
        return []
    return [
        "- NIXL refuses workers whose attention backends differ, and then every request fails. vLLM chooses "
        "by GPU (FlashInfer on Blackwell, FlashAttention on older ones, others for KV of 8 bits and latent "
        f"attention): compare what workers on {' and '.join(gpus)} log. Where it differs, give both the same "
        "`--attention-backend`, and measure: the plan's step times are of vLLM's own choice."
    ]


def _difference_lines(fleet: Fleet, max_model_len: int) -> list[str]:
    """The lines of README.md on what differs from the simulation on every target."""
    policies = fleet.policies
    simulated_routing = policies.routing
    if fleet.is_disaggregated:
        simulated_routing += f" to prefill and {policies.decode_routing} to decode"
    lines = [
        "",
        "## What differs from the simulation",
        "",
        f"- The simulation routes by {simulated_routing}; what each target has in its place is said there. "
        "`plan serve` routes as simulated, on one machine or, with --workers, before workers that it did not "
        "start.",
    ]
    if policies.prefix_cache:
        lines += _cache_notes(fleet)
    else:
        lines.append("- The engine's prefix cache stays on. The plan counts on no hit, so it can only help.")
    lines.append(
        "- Nothing here asks for an API key: workers and routers answer whoever reaches them. Keep them in a "
        "private network, behind what asks for keys."
    )
    if inexpressible := _inexpressible_policies(fleet.policies):
        lines.append(f"- The plan was simulated with {', '.join(inexpressible)}; vLLM is not configured so.")
    if QUEUE[fleet.policies.queue].has_rank:
        lines.append(
            f"- Prompts wait in the order {fleet.policies.queue}: the engines run with --scheduling-policy "
            "priority, and whoever sends a request must give its `priority` (smallest first; for sjf the "
            "prompt's tokens, for edf its arrival plus the time of its class in ms). `plan serve` does; the "
            "routers of these manifests do not."
        )
    if QUEUE[fleet.policies.queue].by_turns:
        lines.append(
            f"- Prompts wait in the order {fleet.policies.queue}: the engines run with --scheduling-policy "
            "priority, and `plan serve` numbers the requests; the routers of these manifests cannot."
        )
    if QUEUE[fleet.policies.queue].held_by_router:
        lines.append(
            f"- Prompts wait in the order {fleet.policies.queue}: `plan serve` holds them and sends them in "
            "this order; the routers of these manifests cannot."
        )
    if fleet.llm.dtype_bytes != 2:
        lines.append(
            f"- The plan counts {fleet.llm.dtype_bytes:g} byte(s) per weight: the checkpoint must be of that "
            "precision."
        )
    if len(engine_command.routers_of(fleet)) > 1:
        lines.append(
            "- One router serves the prefill and decode pools, router-mixed (port 8100 in Compose) the mixed "
            "ones. The simulator chooses among all of them; put a balancer in front of the two."
        )
    if spot := [pool.name for pool in fleet.running_pools if payment_suffix(pool.type.gpu.name) == SPOT]:
        lines.append(
            f"- Workers of {', '.join(map(engine_command.one_line, spot))} are on the spot market. "
            "SkyPilot's file asks for spot machines; elsewhere give those pods the label and toleration of "
            "your cloud's spot nodes, and keep the other pods off these."
        )
    if any(pool.type.all2all for pool in fleet.running_pools):
        lines.append(_rank_notes(fleet))
    if fleet.lora is not None:
        lines.append(_adapter_notes(fleet.lora))
    if policies.kv_offload is not None:
        lines.append(_offload_notes(fleet, policies.kv_offload))
    if (served := engine_command.served_model_len(fleet, max_model_len)) < max_model_len:
        lines.append(
            f"- Requests of more than {served} tokens are refused, as in the simulation; the longest has "
            f"{max_model_len}."
        )
    if fleet.is_disaggregated:
        lines += _backend_notes(fleet)
        lines += [
            "- KV blocks move by NIXL. Prefill keeps them for 30 s after the last word of a decode worker "
            "(`kv_lease_duration`). A request whose blocks are gone fails, unless kv-transfer-config has "
            '`"kv_load_failure_policy": "recompute"`: then the decode worker computes its prompt.',
            "- NIXL takes the fastest link UCX finds; set UCX_NET_DEVICES where a node has several. The "
            f"simulation counts on {fleet.network.bandwidth_bytes_per_s / 1e9:g} GB/s: pods and containers "
            "have RDMA only with its devices (such as rdma/ib) and the capability IPC_LOCK, which nothing "
            "here asks for, and TCP without. Measure vllm:nixl_xfer_time_seconds.",
        ]
    return lines
