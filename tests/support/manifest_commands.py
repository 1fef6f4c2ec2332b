"""Renders small fleets, and reads the engines' command lines back as each target hands them to vLLM."""

from __future__ import annotations

import functools
import json
import os
import shlex
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from plans import CATALOG, LLM, a_pool, mixed, pairs

from planner import manifests
from planner.fleet import Fleet, Policies, Pool, Role, WorkerType
from planner.models.all2all import Exchange, all2all_of
from planner.models.engine import Engine
from planner.models.llm import Llm
from planner.models.lora import Lora, lora_slots
from planner.models.speculation import Speculation

Document = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MIXTURE = CATALOG.llm("qwen3-30b-a3b")
LWS_VALUES = {"$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "leader.example"}


def _llm(name: str, **changes: Any) -> Llm:
    return replace(LLM, name=name, **changes)


def _wide(pool: Pool, *, tp: int, pp: int) -> Pool:
    return replace(pool, type=replace(pool.type, tp=tp, pp=pp))


def quantised(kv_dtype_bytes: float = 1.0) -> Fleet:
    """Weights and KV of one byte, power-capped GPUs."""
    llm = _llm("RedHatAI/Meta-Llama-3.1-70B-FP8", dtype_bytes=1.0, kv_dtype_bytes=kv_dtype_bytes)
    return Fleet(llm, (a_pool("capped", "mixed", "h100-80g@350W", 2, 3),))


def spanning() -> Fleet:
    """Workers of TP 8 and PP 2 over two nodes of eight, and of PP 2 within a node."""
    pool = a_pool("big", "mixed", "h100-80g", 8, 2)
    return Fleet(LLM, (_wide(pool, tp=8, pp=2), _wide(replace(pool, name="small"), tp=2, pp=2)))


def ranks_on_nodes() -> Fleet:
    """A mixture with 16 ranks on two nodes each: two workers that prefill, one that decodes."""
    pools = []
    for name, role, count, tokens in (("pre", "prefill", 2, 8192), ("dec", "decode", 1, 256)):
        on = CATALOG.gpu("h100-80g")
        exchange = Exchange(all2all_of(16, 8, tokens))
        latency = CATALOG.step_latency(MIXTURE, on, 1, dp=16, exchange=exchange)
        kind = WorkerType(on, 1, latency, 60_000, tokens, 128, ep=True, dp=16)
        pools.append(Pool(name, cast(Role, role), kind.with_llm(MIXTURE), count))
    return Fleet(MIXTURE, tuple(pools))


def piped() -> Fleet:
    """TP 2 and PP 2 on the GPUs of one node."""
    return Fleet(LLM, (_wide(a_pool("piped", "mixed", "h100-80g", 2, 2), tp=2, pp=2),))


def drafting() -> Fleet:
    """Mixed workers that draft with a checkpoint of its own, and others that look drafts up."""
    engine = Engine("vllm", "0.33.0", async_scheduling=True)
    pools = (a_pool("own", "mixed", "h100-80g", 4, 2), a_pool("looked-up", "mixed", "a100-80g", 4, 1))
    kinds = (
        (Speculation("eagle3", (0.8, 0.7, 0.6), 0.03, model="a/drafter-3"), engine),
        (Speculation("ngram", (0.5, 0.5)), replace(engine, async_scheduling=False)),
    )
    return Fleet(
        LLM,
        tuple(
            replace(pool, type=replace(pool.type, speculation=drafts, engine=each))
            for pool, (drafts, each) in zip(pools, kinds, strict=True)
        ),
    )


def serving(lora: Lora) -> Fleet:
    """Two mixed workers with slots for adapters."""
    fleet = mixed()
    (pool,) = fleet.pools
    kind = replace(pool.type, lora=lora_slots(lora, LLM, pool.type.gpu, pool.type.tp))
    return replace(fleet, pools=(replace(pool, type=kind),))


# the five example plans
EXAMPLES: dict[str, Fleet] = {
    "mixed": Fleet(LLM, (a_pool("mixed", "mixed", "h100-80g", 4, 2),)),
    "two gpu types": Fleet(
        LLM, (a_pool("h", "mixed", "h100-80g", 4, 3), a_pool("a", "mixed", "a100-80g", 4, 2))
    ),
    "pairs of one gpu": Fleet(
        LLM, (a_pool("p", "prefill", "h100-80g", 2, 2), a_pool("y", "decode", "h100-80g", 4, 1))
    ),
    "pairs of two gpus": Fleet(
        LLM,
        (a_pool("pre", "prefill", "h100-80g", 2, 4), a_pool("dec", "decode", "a100-80g", 8, 3, tokens=512)),
    ),
    "capped and quantised": quantised(),
}


FLEETS = {
    **EXAMPLES,
    "pairs, one capped": pairs(),
    "three nodes": mixed(tp=8, count=3),
    "rocm": mixed("mi300x-192g", 2, 5),
    "both roles and mixed": replace(
        pairs(), pools=(*pairs().pools, a_pool("Extra_Mixed pool!", "mixed", "a100-80g", 4, 1))
    ),
    "two prefill pools": Fleet(
        LLM,
        (
            a_pool("p1", "prefill", "h100-80g", 2, 2),
            a_pool("p2", "prefill", "a100-80g", 4, 1),
            a_pool("d", "decode", "h100-80g", 4, 1),
        ),
    ),
    "spanning nodes": spanning(),
    "ranks on several nodes": ranks_on_nodes(),
    "two stages on a node": piped(),
    "cache-aware": replace(
        mixed(),
        policies=Policies(prefix_cache=True, routing="cache-aware", balance_requests=8, balance_ratio=1.1),
    ),
    "pairs with prefix caches": replace(pairs(), policies=Policies(prefix_cache=True, routing="e2")),
    "drafting": drafting(),
    "affinity": replace(mixed(count=2), policies=Policies(prefix_cache=True, routing="prefix-affinity")),
}


@functools.cache
def rendered(fleet: Fleet) -> dict[str, str]:
    return manifests.render(fleet, 5000).files


def composed(fleet: Fleet) -> dict[str, Document]:
    return {
        path: yaml.load(text, Loader=LOADER)
        for path, text in rendered(fleet).items()
        if path.startswith("compose/") and path.endswith(".yaml")
    }


def workers_of(document: Document) -> dict[str, Document]:
    return {name: service for name, service in document["services"].items() if service.get("entrypoint")}


@dataclass(frozen=True, slots=True)
class Command:
    """One engine: what follows `vllm serve`, GPUs of one worker, and workers."""

    file: str
    args: tuple[str, ...]
    gpus: int
    workers: int

    def value(self, flag: str) -> str:
        return self.args[self.args.index(flag) + 1]


def commands(files: Mapping[str, str]) -> dict[str, list[Command]]:
    """Target -> its engines, with every escape of the target undone."""
    found: dict[str, list[Command]] = {}
    for path, text in files.items():
        reader = _READERS.get(path.split("/")[0].split(".")[0])
        if reader is not None:
            target, read = reader
            found.setdefault(target, []).extend(replace(command, file=path) for command in read(path, text))
    return found


def documents(text: str) -> list[Document]:
    return [document for document in yaml.load_all(text, Loader=LOADER) if document is not None]


def gpus_of(container: Document) -> int:
    return sum(int(n) for name, n in container["resources"]["limits"].items() if name.endswith(".com/gpu"))


def _kubernetes(path: str, text: str) -> list[Command]:
    found = []
    for document in documents(text):
        role = document["metadata"].get("labels", {}).get("fleetplan/role")
        if document["kind"] == "Deployment" and role not in ("router", "kv-store"):
            main = document["spec"]["template"]["spec"]["containers"][0]
            found.append(_of_container(main, gpus_of(main), document["spec"]["replicas"]))
        elif document["kind"] == "LeaderWorkerSet":
            found += _of_group(document["spec"])
        elif document["kind"] == "DisaggregatedSet":
            for role in document["spec"]["roles"]:
                found += _of_group(role["spec"])
    return found


def _of_group(spec: Document) -> list[Command]:
    template, size = spec["leaderWorkerTemplate"], spec["leaderWorkerTemplate"]["size"]
    follower = template["workerTemplate"]["spec"]["containers"][0]
    if "leaderTemplate" not in template:
        assert size == 1
        return [_of_container(follower, gpus_of(follower), spec["replicas"])]
    leader = template["leaderTemplate"]["spec"]["containers"][0]
    gpus = gpus_of(leader) + (size - 1) * gpus_of(follower)
    return [_of_container(leader, gpus, spec["replicas"]), _of_container(follower, 0, 0)]


def _of_container(container: Document, gpus: int, workers: int) -> Command:
    args = tuple(expand(arg) for arg in container["args"])
    if container["command"] == ["vllm", "serve"]:
        return Command("", args, gpus, workers)
    shell, flag, script, name = container["command"]  # of one that counts its first rank
    assert (shell, flag, name) == ("sh", "-c", "vllm")
    said = run_shell(expand(script), args)
    assert said[0] == "serve"
    return Command("", tuple(said[1:]), gpus, workers)


def run_shell(script: str, words: tuple[str, ...]) -> list[str]:
    """The words that `vllm` gets of a shell, in the second pod of a group."""
    stub = 'vllm() { printf "%s\\0" "$@"; }; ' + script.removeprefix("exec ")
    environment = {"PATH": os.environ["PATH"], "LWS_WORKER_INDEX": "1"}
    found = subprocess.run(
        ["sh", "-c", stub, "vllm", *words], env=environment, check=True, capture_output=True, text=True
    )
    return found.stdout.split("\0")[:-1]


def expand(arg: str) -> str:
    """As Kubernetes does: $$ is a dollar, $(NAME) the variable's value."""
    parts = arg.split("$$")
    for name, value in LWS_VALUES.items():
        parts = [part.replace(name, value) for part in parts]
    assert not any("$(" in part for part in parts)
    return "$".join(parts)


def _compose(path: str, text: str) -> list[Command]:
    if not path.endswith(".yaml"):
        return []
    found = []
    for service in yaml.load(text, Loader=LOADER)["services"].values():
        if service.get("entrypoint") == ["vllm", "serve"]:  # not a router
            args = tuple(arg.replace("$$", "$") for arg in service["command"])
            found.append(Command("", args, len(devices_of(service)), 1))
    return found


def devices_of(service: Document) -> list[str]:
    if "HIP_VISIBLE_DEVICES" in service["environment"]:
        return str(service["environment"]["HIP_VISIBLE_DEVICES"]).split(",")
    ids: list[str] = service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
    return ids


def _vllm(path: str, text: str) -> list[Command]:
    """As `vllm serve --config` reads it: a true flag alone, a list as words, a mapping as JSON, the rest as
    text.
    """
    if not path.endswith(".config.yaml"):
        return []
    told = yaml.load(text, Loader=LOADER)
    args: list[str] = [told.pop("model")]
    assert isinstance(args[0], str)
    for key, value in told.items():
        args.append(f"--{key}")
        if isinstance(value, list):
            args += map(str, value)
        elif value is not True:
            args.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return [Command("", tuple(args), 0, 0)]  # how many, the script and the README say


def _kserve(path: str, text: str) -> list[Command]:
    """As the script of KServe's presets starts vLLM: it knows TP, and nothing of PP."""
    found = []
    for document in documents(text):
        if document["kind"] == "ServiceAccount":
            continue
        spec, name = document["spec"], document["spec"]["model"]["name"]
        assert spec["model"]["uri"] == f"hf://{name}"
        for load in (spec, spec.get("prefill")):
            if load is not None:
                main = load["template"]["containers"][0]
                extra = next(v["value"] for v in main["env"] if v["name"] == "VLLM_ADDITIONAL_ARGS")
                args = [
                    name,
                    "--served-model-name",
                    name,
                    "--tensor-parallel-size",
                    str(load["parallelism"]["tensor"]),
                    *shlex.split(extra),
                ]
                found.append(Command("", tuple(args), gpus_of(main), load["replicas"]))
    return found


def _dynamo(path: str, text: str) -> list[Command]:
    found = []
    for document in documents(text):
        for component in document["spec"]["components"]:
            main = component["podTemplate"]["spec"]["containers"][0]
            if component["type"] == "frontend":
                continue
            args = [expand(arg) for arg in main["args"]]
            if "--disaggregation-mode" in args:
                at = args.index("--disaggregation-mode")
                assert args[at + 1] == component["type"]
                del args[at : at + 2]
            assert args[0] == "--model"
            nodes = component.get("multinode", {"nodeCount": 1})["nodeCount"]
            found.append(Command("", tuple(args[1:]), nodes * gpus_of(main), component["replicas"]))
    return found


def _ray(path: str, text: str) -> list[Command]:
    found = []
    for application in yaml.load(text, Loader=LOADER)["applications"]:
        args = application["args"]
        for config in args.get("llm_configs") or [args["prefill_config"], args["decode_config"]]:
            told, model = config["engine_kwargs"], config["model_loading_config"]
            words: list[str] = [model["model_source"], "--served-model-name", model["model_id"]]
            for key, value in told.items():
                words.append(("--no-" if value is False else "--") + key.replace("_", "-"))
                if not isinstance(value, bool):
                    words.append(json.dumps(value) if isinstance(value, dict) else str(value))
            gpus = told["tensor_parallel_size"] * told["pipeline_parallel_size"]
            found.append(Command("", tuple(words), gpus, config["deployment_config"]["num_replicas"]))
    return found


def _llm_d(path: str, text: str) -> list[Command]:
    values = yaml.load(text, Loader=LOADER)
    if path in ("llm-d/router.values.yaml", "llm-d/gateway.values.yaml"):
        return []
    made = [values[role] for role in ("prefill", "decode") if values[role]["create"]]
    assert len(made) == 1
    main, pods = made[0]["containers"][0], made[0]["parallelism"]["workers"]
    assert values["multinode"] == (pods > 1)
    return [_of_container(main, pods * gpus_of(main), made[0]["replicas"])]


def _production_stack(path: str, text: str) -> list[Command]:
    """The flags that the chart's template of the engine's Deployment makes of these values."""
    found = []
    for model in yaml.load(text, Loader=LOADER)["servingEngineSpec"]["modelSpec"]:
        told = model["vllmConfig"]
        args = [
            model["modelURL"],
            "--max-model-len",
            str(told["maxModelLen"]),
            "--tensor-parallel-size",
            str(told["tensorParallelSize"]),
            "--max-num-seqs",
            str(told["maxNumSeqs"]),
            "--gpu-memory-utilization",
            str(told["gpuMemoryUtilization"]),
            *told["extraArgs"],
            f"--{'' if told['enablePrefixCaching'] else 'no-'}enable-prefix-caching",
        ]
        found.append(Command("", tuple(args), model["requestGPU"], model["replicaCount"]))
    return found


def _skypilot(path: str, text: str) -> list[Command]:
    task = yaml.load(text, Loader=LOADER)
    words = shlex.split(task["run"].splitlines()[-1])
    assert words[:2] == ["vllm", "serve"] and words[-4:] == ["--host", "0.0.0.0", "--port", "8000"]
    gpus = int(task["resources"]["accelerators"].partition(":")[2])
    return [Command("", tuple(words[2:-4]), gpus, task["service"]["replicas"])]


_READERS = {
    "kubernetes": ("kubernetes", _kubernetes),
    "lws": ("lws", _kubernetes),
    "disaggregatedset": ("disaggregatedset", _kubernetes),
    "compose": ("compose", _compose),
    "vllm": ("vllm", _vllm),
    "kserve": ("kserve", _kserve),
    "dynamo": ("dynamo", _dynamo),
    "ray-serve": ("ray-serve", _ray),
    "llm-d": ("llm-d", _llm_d),
    "production-stack": ("production-stack", _production_stack),
    "skypilot": ("skypilot", _skypilot),
}


def run_script(script: str, *words: str, stubs: tuple[str, ...], folder: Path, **variables: str) -> list[str]:
    """Run `script` with programs named `stubs` in the place of the real ones; the words the last one got."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in stubs:
        stub = programs / name
        stub.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > "$SAID"\n')
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    said = folder / "said"
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SAID": str(said), **variables}
    subprocess.run(["bash", "-c", script, *words], env=environment, check=True, timeout=30)
    return said.read_text().split("\0")[:-1]


each_fleet = pytest.mark.parametrize("fleet", list(FLEETS.values()), ids=list(FLEETS))
_ON_NODES = {name: fleet for name, fleet in FLEETS.items() if fleet not in (spanning(), ranks_on_nodes())}
each_on_nodes = pytest.mark.parametrize("fleet_on_nodes", list(_ON_NODES.values()), ids=list(_ON_NODES))
