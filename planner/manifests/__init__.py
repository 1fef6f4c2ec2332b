"""The plan as deployments: one renderer per target over the command lines of engine.py."""

from __future__ import annotations

from planner.domain import Fleet
from planner.manifests import compose, engine, kubernetes


def render(fleet: Fleet, max_model_len: int) -> dict[str, str]:
    """Path relative to the manifests folder -> content, for every target, and a README.md."""
    composed = compose.render(fleet, max_model_len)
    return {
        "README.md": _readme(fleet, max_model_len, sorted(composed)),
        **{f"compose/{path}": text for path, text in composed.items()},
        **kubernetes.render(fleet, max_model_len),
    }


def _readme(fleet: Fleet, max_model_len: int, composed: list[str]) -> str:
    app = engine.llm_label(fleet)
    lines = [
        f"# Deploying {fleet.llm.name}",
        "",
        *(
            f"- {pool.count} x {pool.name} ({pool.role}): {pool.type.gpus} x {pool.type.gpu.name} each"
            for pool in engine.running(fleet)
        ),
        "",
        f"Engines are vLLM {engine.VLLM_VERSION}; the router is {engine.ROUTER_PACKAGE} and listens on port "
        f"{engine.HTTP_PORT}, with OpenAI's API. Workers load `{fleet.llm.name}` from the Hugging Face hub; "
        "to serve a local copy, mount it and change `--model` alone.",
        "",
        "## Kubernetes",
        "",
        "    kubectl create secret generic hf-token-secret --from-literal=token=$HF_TOKEN",
        "    kubectl apply -f kubernetes.yaml",
        f"    kubectl port-forward service/{app}-router {engine.HTTP_PORT}",
        "",
        "Needs the GPU operator (device plugin and feature discovery, which labels the nodes).",
        "",
        "## Docker Compose",
        "",
    ]
    if composed == ["compose.yaml"]:
        lines.append("    HF_TOKEN=... docker compose -f compose/compose.yaml up -d")
    else:
        nodes = sum(path.startswith("node-") for path in composed)
        lines += [
            f"{nodes} nodes: fill in compose/nodes.env, copy the folder to each, and there (here node 0)",
            "",
            "    HF_TOKEN=... docker compose --env-file compose/nodes.env -f compose/node-0.yaml up -d",
            "",
            "then, on any host that reaches them,",
            "",
            "    docker compose --env-file compose/nodes.env -f compose/router.yaml up -d",
        ]
    lines += _capped(fleet)
    lines += [
        "",
        "## What differs from the simulation",
        "",
        "- The router has no join-the-shortest-queue by tokens; its nearest policy, power of two, stands in.",
        "- vLLM's prefix cache stays on. The plan counts on no hit, so it can only help.",
    ]
    if len(engine.routers(fleet)) > 1:
        lines.append(
            "- One router serves the prefill and decode pools, router-mixed (port 8100 in Compose) the mixed "
            "ones. The simulator chooses among all of them; put a balancer in front of the two."
        )
    if (served := engine.served_model_len(fleet, max_model_len)) < max_model_len:
        lines.append(
            f"- Requests of more than {served} tokens are refused, as in the simulation; the longest has "
            f"{max_model_len}."
        )
    if engine.is_disaggregated(fleet):
        lines += [
            "- KV blocks move by NIXL. Prefill keeps them for 30 s (`kv_lease_duration`): a request that "
            "waits longer for a decode worker is prefilled again.",
            "- NIXL takes the fastest link UCX finds; set UCX_NET_DEVICES where a node has several.",
        ]
    return "\n".join(lines) + "\n"


def _capped(fleet: Fleet) -> list[str]:
    gpus = {pool.type.gpu.name: pool.type.gpu for pool in engine.running(fleet)}
    capped = [gpu for gpu in gpus.values() if engine.is_capped(gpu)]
    if not capped:
        return []
    return [
        "",
        "## Power caps",
        "",
        "No manifest can set a power cap. On every node of these workers, at every boot:",
        "",
        *(
            f"    sudo nvidia-smi -pl {gpu.power_w:g}; "
            f"kubectl label node NAME {kubernetes.POWER_LIMIT}={gpu.power_w:g}   # {gpu.name}"
            for gpu in capped
        ),
    ]
