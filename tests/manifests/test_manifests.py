"""Manifests: every number of the plan in each, every GPU used once, names and files as they should be."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_commands import (
    EXAMPLES,
    FLEETS,
    Command,
    commands,
    composed,
    documents,
    each_fleet,
    each_on_nodes,
    piped,
    quantised,
    rendered,
    run_script,
    spanning,
    workers_of,
)
from plans import CATALOG, LLM, a_plan, a_pool, mixed, pairs
from typer.testing import CliRunner

from planner import manifests
from planner.cli import app
from planner.documents.task import parse_task
from planner.domain import Selector
from planner.errors import InputError
from planner.files.checked_files import write_files
from planner.fleet import Fleet, Policies, Pool
from planner.manifests import engine_command, kserve, kubernetes
from planner.models.engine import Engine
from planner.policies import HUB_TARGETS
from planner.reports.output import plan_yaml

HYBRIDS = ("Qwen/Qwen3.5-122B-A10B",)  # with states of linear attention
DATA = Path(__file__).parents[1] / "data"
FLAGS: dict[str, Any] = yaml.safe_load((DATA / "vllm_flags.yaml").read_text())["flags"]
RFC1123 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

Document = dict[str, Any]


def test_every_target_writes_what_it_can_and_says_why_not() -> None:
    """Per example plan, the targets that cannot express it: what is not in this table is written."""
    pairs_only, one_pool = "found a mixed one", "found several pools"
    refused = {
        "mixed": {"disaggregatedset": pairs_only},
        "two gpu types": {"disaggregatedset": pairs_only, "skypilot": one_pool},
        "pairs of one gpu": {"skypilot": one_pool},
        "pairs of two gpus": {"skypilot": one_pool},
        "capped and quantised": {"disaggregatedset": pairs_only},
        "two prefill pools": {"kserve": "found 2 and 1", "ray-serve": "found 2 and 1", "skypilot": one_pool},
        "rocm": {
            "disaggregatedset": pairs_only,
            "dynamo": "for NVIDIA GPUs",
            "skypilot": "its name of mi300x-192g is not known",
        },
        "spanning nodes": {
            "disaggregatedset": pairs_only,
            "compose": "take lws",
            "kubernetes": "take lws",
            "llm-d": "take lws",
            "kserve": "take lws",
            "production-stack": "take lws",
            "skypilot": one_pool,
        },
        "two stages on a node": {"disaggregatedset": pairs_only, "llm-d": "too few for pp 2"},
        "both roles and mixed": {
            "disaggregatedset": pairs_only,
            "llm-d": "and this plan has both",
            "ray-serve": "cannot keep a pool off nodes",
            "production-stack": "pairs or mixed pools, found both",
            "skypilot": one_pool,
        },
    }
    for name, expected in refused.items():
        found = manifests.render(FLEETS[name], 5000)
        assert set(found.refused) == set(expected), name
        assert all(part in found.refused[target] for target, part in expected.items())
        assert set(commands(found.files)) == set(manifests.TARGETS) - set(expected)
        for target, why in found.refused.items():
            assert f"- {why}" in found.files["README.md"]
            with pytest.raises(InputError, match=re.escape(why)):
                manifests.render(FLEETS[name], 5000, target)


def test_one_target_alone_writes_its_own_files() -> None:
    every = manifests.render(mixed(), 5000).files
    for target in manifests.TARGETS:
        if target != "disaggregatedset":
            alone = manifests.render(mixed(), 5000, target).files
            readme = alone.pop("README.md")
            assert alone and alone.items() <= every.items()
            assert re.findall(r"^## ([a-z-]+)$", readme, re.M) == [target]


def engines(fleet: Fleet) -> Iterator[tuple[str, Command]]:
    for target, found in commands(rendered(fleet)).items():
        for command in found:
            yield target, command


@each_fleet
def test_every_number_of_the_plan_is_in_every_command(fleet: Fleet) -> None:
    """Per target one engine per pool, each with the pool's settings; a follower has its leader's."""
    for target, found in commands(rendered(fleet)).items():
        told = {
            tuple(
                command.value(flag)
                for flag in (
                    "--tensor-parallel-size",
                    "--pipeline-parallel-size",
                    "--max-num-seqs",
                    "--max-num-batched-tokens",
                    "--max-model-len",
                    "--block-size",
                    "--gpu-memory-utilization",
                    "--kv-cache-dtype",
                )
            )
            for command in found
        }
        planned = {
            (
                str(pool.type.tp),
                str(pool.type.pp),
                str(pool.type.max_num_seqs),
                str(pool.type.max_num_batched_tokens),
                "5120",
                "16",
                "0.9",
                "fp8" if fleet.llm.kv_dtype_bytes == 1 else "auto",
            )
            for pool in fleet.pools
        }
        assert told == planned, target
        assert all("--enable-prefix-caching" in command.args for command in found)


@each_fleet
def test_every_target_starts_the_workers_of_the_plan(fleet: Fleet) -> None:
    """Workers times the GPUs of each is the fleet's GPUs, and each has TP * PP of them."""
    for target, found in commands(rendered(fleet)).items():
        if target == "vllm":
            continue
        serving = [command for command in found if command.workers]
        assert sum(command.workers for command in serving) == fleet.workers, target
        assert sum(command.workers * command.gpus for command in serving) == fleet.gpus, target
        for command in serving:
            tp, pp = (int(command.value(f"--{what}-parallel-size")) for what in ("tensor", "pipeline"))
            ranks = "--data-parallel-size"
            dp = int(command.value(ranks)) if ranks in command.args else 1
            assert command.gpus == tp * pp * dp, target


@each_fleet
def test_flags_are_vllms_with_values_it_takes(fleet: Fleet) -> None:
    """Against the committed list of flags; tests/with_vllm asks vLLM's parser itself."""
    types: dict[str | None, Callable[[str], object]]
    types = {"int": int, "float": float, "json": json.loads, None: str}
    for target, command in engines(fleet):
        words = list(command.args[1:])
        while words:
            flag = words.pop(0)
            assert flag in FLAGS, (target, flag)
            if FLAGS[flag]["values"] != 0:
                value = words.pop(0)
                types[FLAGS[flag].get("type")](value)
                assert value in FLAGS[flag].get("choices", [value])


@pytest.mark.parametrize(
    ("version", "is_async", "flag", "tag"),
    [
        ("0.15.1", True, "--async-scheduling", "v0.15.1"),
        ("0.13", False, "--no-async-scheduling", "v0.13.0"),
        ("0.9.2", False, None, "v0.9.2"),
    ],
)
def test_the_engine_a_plan_names_is_deployed(
    version: str, is_async: bool, flag: str | None, tag: str
) -> None:
    modelled = Engine("vllm", version, is_async)
    fleet = replace(
        mixed(), pools=tuple(replace(p, type=replace(p.type, engine=modelled)) for p in mixed().pools)
    )
    for target, command in engines(fleet):
        if target == "ray-serve":
            continue
        given = {word for word in command.args if word.endswith("async-scheduling")}
        assert given == ({flag} if flag else set()), target
    deployment = kubernetes.documents(fleet, 5000)[0]
    image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == f"vllm/vllm-openai:{tag}"
    files = rendered(fleet)
    assert f"pip install vllm=={tag[1:]}" in files["README.md"]
    assert (
        f"For Ray 2.60.0 with vLLM 0.29.0; the plan was made for vLLM {tag[1:]}, which" in files["README.md"]
    )
    (config,) = (yaml.safe_load(text) for path, text in files.items() if path.endswith(".config.yaml"))
    assert {key for key in config if "async" in key} == ({flag[2:]} if flag else set())
    written = yaml.safe_load(plan_yaml(a_plan(fleet)))["engine"]
    assert (written["version"], written["images"]) == (version, [image])


@pytest.mark.parametrize("target", ["kubernetes", "lws", "llm-d", "compose"])
def test_a_worker_that_is_to_stop_finishes_its_requests(target: str) -> None:
    """vLLM aborts them at once unless it has --shutdown-timeout, which vLLM 0.18 brought."""

    def text_of(version: str) -> str:
        fleet, engine = FLEETS["pairs of one gpu"], Engine("vllm", version, True)
        pools = tuple(replace(p, type=replace(p.type, engine=engine)) for p in fleet.pools)
        files = manifests.render(replace(fleet, pools=pools), 5000, target).files
        return "".join(
            text for path, text in files.items() if path.startswith(target) and "router" not in path
        )

    new, old = text_of("0.18.0"), text_of("0.17.1")
    drains = re.findall(r"- --shutdown-timeout\n\s+- '?(\d+)", new)
    assert len(drains) >= 2 and set(drains) == {"300"} and "shutdown-timeout" not in old
    if target == "compose":
        assert new.count("stop_grace_period: 320s") == len(drains) + 1  # and the router
    else:  # Routers learn of it in the 10 s before, and 20 s are left for the engine's processes.
        pods = 2 if target == "llm-d" else 3  # The router is one of them.
        assert new.count("terminationGracePeriodSeconds: 330") == pods
        assert len(re.findall(r"preStop:\n\s+exec:\n\s+command:\n\s+- sleep\n\s+- '10'", new)) == pods


def test_engines_have_their_time_to_start_and_to_stop() -> None:
    """A rollout counts as failed after 600 s by default; production-stack's chart leaves 30 s to stop."""
    files = rendered(mixed())
    (engine,) = (
        each
        for each in documents(files["kubernetes.yaml"])
        if each["kind"] == "Deployment" and not each["metadata"]["name"].endswith("router")
    )
    assert engine["spec"]["progressDeadlineSeconds"] == 3600
    (model,) = yaml.safe_load(files["production-stack.values.yaml"])["servingEngineSpec"]["modelSpec"]
    assert model["vllmConfig"]["extraArgs"][-2:] == ["--shutdown-timeout", "25"]


def test_a_router_that_is_to_stop_ends_its_requests() -> None:
    """vllm-router 0.1.17 does so when told to stop; Kubernetes killed it after 30 s, Compose after 10."""
    files = rendered(mixed())
    (router,) = (
        each
        for each in documents(files["kubernetes.yaml"])
        if each["metadata"]["name"].endswith("router") and each["kind"] == "Deployment"
    )
    pod = router["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 330 and "preStop" in pod["containers"][0]["lifecycle"]
    (compose,) = documents(files["compose/compose.yaml"])
    assert {each["stop_grace_period"] for each in compose["services"].values()} == {"320s"}


def test_prefill_produces_and_decode_consumes() -> None:
    """`kv_both` is deprecated in every vLLM named here (0.26 to 0.33); both ends agree on the blocks."""
    for target, found in commands(rendered(EXAMPLES["pairs of two gpus"])).items():
        roles = sorted({json.loads(command.value("--kv-transfer-config"))["kv_role"] for command in found})
        assert roles == ["kv_consumer", "kv_producer"], target
        assert len({(c.value("--block-size"), c.value("--kv-cache-dtype")) for c in found}) == 1
    assert not any("--kv-transfer-config" in command.args for _, command in engines(mixed()))


def test_a_worker_that_spans_nodes_is_a_group_of_full_nodes() -> None:
    """TP 8 x PP 2 on nodes of 8: a leader that answers and a headless follower, 8 GPUs each."""
    big, _, small, *_ = documents(rendered(spanning())["lws.yaml"])
    template = big["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2 and small["spec"]["leaderWorkerTemplate"]["size"] == 1
    leader, follower = (template[f"{part}Template"]["spec"]["containers"][0] for part in ("leader", "worker"))
    assert leader["resources"] == follower["resources"]
    assert leader["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    group = ["--nnodes", "2", "--node-rank", "$(LWS_WORKER_INDEX)", "--master-addr", "$(LWS_LEADER_ADDRESS)"]
    drains = ["--shutdown-timeout", "300"]
    assert leader["args"][-8:] == [*group, *drains]
    assert follower["args"][-9:] == [*group, "--headless", *drains]
    assert "startupProbe" in leader and "startupProbe" not in follower
    roles = [
        template[f"{part}Template"]["metadata"]["labels"]["fleetplan/role"] for part in ("leader", "worker")
    ]
    assert roles == ["mixed", "headless"]  # the router looks for mixed


def test_pairs_of_an_llm_with_states_have_the_layout_that_nixl_reads() -> None:
    """vLLM's NixlConnector ends at the start without VLLM_SSM_CONV_STATE_LAYOUT=DS, which is not its
    default."""
    fleets = {name: replace(FLEETS["pairs of one gpu"], llm=CATALOG.llm(name)) for name in HYBRIDS}
    for fleet in (*fleets.values(), FLEETS["pairs of one gpu"]):
        found = manifests.render(fleet, 5000)
        texts: dict[str, str] = {}
        for path, text in found.files.items():
            if not any(
                word in path for word in ("README", "router", "gateway", "kustomization", "components")
            ):
                target = re.split(r"[./]", path)[0]
                texts[target] = texts.get(target, "") + text
        assert {"kubernetes", "lws", "llm-d", "compose", "vllm", "dynamo", "ray-serve"} <= set(texts)
        for target, text in texts.items():
            if target not in ("Chart", "values"):
                has_layout = "VLLM_SSM_CONV_STATE_LAYOUT" in text
                assert has_layout == (fleet.llm.name in HYBRIDS), (target, fleet.llm.name)


def test_pairs_on_several_gpus_need_one_attention_backend() -> None:
    """NIXL's handshake compares them; between AMD and NVIDIA there is none in common."""
    told = "NIXL refuses workers whose attention backends differ"
    assert told in rendered(FLEETS["pairs of two gpus"])["README.md"]
    assert told not in rendered(FLEETS["pairs of one gpu"])["README.md"]
    prefill, decode = FLEETS["pairs of one gpu"].pools
    amd = replace(decode, type=replace(decode.type, gpu=CATALOG.gpu("mi300x-192g")))
    found = manifests.render(replace(FLEETS["pairs of one gpu"], pools=(prefill, amd)), 5000)
    assert set(found.refused) == set(manifests.TARGETS)
    assert "between GPUs of AMD and of NVIDIA" in found.refused["vllm"]


def test_pairs_in_pipelines_are_refused() -> None:
    """vLLM's NixlConnector refuses to start a decode worker of several stages, and to read from a prefill
    worker of several."""
    for pipeline in (0, 1):
        pools = list(pairs().pools)
        pools[pipeline] = replace(pools[pipeline], type=replace(pools[pipeline].type, pp=2))
        found = manifests.render(replace(pairs(), pools=tuple(pools)), 5000)
        assert set(found.refused) == set(manifests.TARGETS)
        assert "hands KV over between workers of one pipeline stage alone, found pp 2" in found.refused["lws"]


def test_a_worker_must_fill_its_nodes() -> None:
    pool = a_pool("odd", "mixed", "h100-80g", 4, 1)
    fleet = Fleet(LLM, (replace(pool, type=replace(pool.type, pp=3)),))
    with pytest.raises(InputError, match="12 GPUs does not fill whole nodes of 8"):
        manifests.render(fleet, 5000, "lws")


def test_quantised_kv_is_asked_for_only_where_the_plan_counts_on_it() -> None:
    """8-bit weights leave KV in 16 bits, unless the plan counts 8; 4 bits vLLM has not."""
    dtypes = {
        kv: engine_command.engine_flags(f.pools[0], f, 5000)["kv-cache-dtype"]
        for kv in (1.0, 2.0)
        for f in [quantised(kv)]
    }
    assert dtypes == {1.0: "fp8", 2.0: "auto"}
    with pytest.raises(InputError, match="in 1 or 2 bytes"):
        manifests.render(quantised(0.5), 5000, "vllm")


def test_llms_with_states_start_with_fewer_sequences_than_pages() -> None:
    """160,000 tokens of Qwen3.5-27B are 204 pages of 784: 183 sequences, as vLLM refuses 256 of them."""
    pool = a_pool("mixed", "mixed", "h100-80g", 1, 1)
    told = {}
    for name in ("qwen3.5-27b", "qwen3-32b"):
        llm = CATALOG.llm(name)
        fleet = Fleet(llm, (replace(pool, type=pool.type.with_llm(llm)),))
        told[name] = engine_command.engine_flags(fleet.pools[0], fleet, 5000)["max-num-seqs"]
    assert told == {"qwen3.5-27b": 183, "qwen3-32b": 256}


@pytest.mark.parametrize(("threshold", "told"), [(0, None), (512, 512), (6000, None)])
def test_a_limit_on_chunks_is_told_where_prompts_can_be_longer(threshold: int, told: int | None) -> None:
    fleet = replace(FLEETS["mixed"], policies=Policies(long_prefill_token_threshold=threshold))
    assert (
        engine_command.engine_flags(fleet.pools[0], fleet, 5000).get("long-prefill-token-threshold") == told
    )


def test_scripts_start_what_the_plan_says(tmp_path: Path) -> None:
    """Run with stand-ins for the programs: the config's path, ports apart, and what the user adds."""
    write_files(tmp_path, rendered(pairs()))
    script = str(tmp_path / "vllm/dec.sh")
    said = run_script('bash "$0" "$@"', script, "3", "--seed", "7", stubs=("vllm",), folder=tmp_path)
    assert said == [
        "serve",
        "--config",
        str(tmp_path / "vllm/dec.config.yaml"),
        "--port",
        "8004",
        "--seed",
        "7",
    ]
    said = run_script(
        'bash "$0"',
        str(tmp_path / "vllm/router.sh"),
        stubs=("vllm-router",),
        folder=tmp_path,
        PREFILL_URLS="http://a:1 http://b:2",
        DECODE_URLS="http://c:3",
    )
    assert said[-6:] == ["--prefill", "http://a:1", "--prefill", "http://b:2", "--decode", "http://c:3"]


def test_kv_blocks_are_fetched_from_an_address_that_other_hosts_reach(tmp_path: Path) -> None:
    """Where /etc/hosts has 127.0.1.1 for the host, as Debian's does, `hostname -i` says that."""
    script = rendered(pairs())["vllm/pre.sh"]
    programs, said = tmp_path / "bin", tmp_path / "said"
    programs.mkdir()
    for name, text in {
        "hostname": '[ "$1" = -I ] && echo "10.1.2.3 172.17.0.1 " || echo 127.0.1.1',
        "vllm": 'printf "%s\\0" "$VLLM_NIXL_SIDE_CHANNEL_HOST" > "$SAID"',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    assert run_script(script, "pre.sh", stubs=(), folder=tmp_path) == ["10.1.2.3"]
    assert said.exists()


def test_amd_hosts_do_not_get_the_vllm_of_pypi() -> None:
    assert "vLLM's build for ROCm" in rendered(FLEETS["rocm"])["README.md"]
    assert "vLLM's build for ROCm" not in rendered(mixed())["README.md"]


def test_the_script_of_a_worker_that_spans_nodes_needs_its_place(tmp_path: Path) -> None:
    write_files(tmp_path, rendered(spanning()))
    script = str(tmp_path / "vllm/big.sh")
    with pytest.raises(subprocess.CalledProcessError):
        run_script('bash "$0"', script, stubs=("vllm",), folder=tmp_path)
    for rank, more in (("0", []), ("1", ["--headless"])):
        said = run_script(
            'bash "$0"', script, stubs=("vllm",), folder=tmp_path, NODE_RANK=rank, MASTER_ADDR="a"
        )
        assert said[-6 - len(more) :] == ["--nnodes", "2", "--node-rank", rank, "--master-addr", "a", *more]


def invoke(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    said = str(result.exception) if isinstance(result.exception, InputError) else result.output
    return result.exit_code, result.stdout, said


def test_a_written_plan_gives_its_manifests_again(tmp_path: Path) -> None:
    plan = a_plan()
    write_files(tmp_path, {"plan.yaml": plan_yaml(plan)})
    code, _, said = invoke("manifests", tmp_path / "plan.yaml", "-o", tmp_path / "again")
    assert code == 0 and "not written: ray-serve" in said
    again = tmp_path / "again"
    written = {str(path.relative_to(again)): path.read_text() for path in again.rglob("*") if path.is_file()}
    assert written == manifests.render(plan.fleet, plan.max_model_len).files


def test_one_target_leaves_the_others_alone(tmp_path: Path) -> None:
    write_files(
        tmp_path, {"plan.yaml": plan_yaml(a_plan()), "m/kserve.yaml": "old", "m/compose/node-9.yaml": "old"}
    )
    code, out, _ = invoke(
        "manifests", tmp_path / "plan.yaml", "--target", "compose", "-o", tmp_path / "m", "--json"
    )
    assert code == 0 and json.loads(out)["refused"] == {}
    assert (tmp_path / "m/kserve.yaml").read_text() == "old"
    assert not (tmp_path / "m/compose/node-9.yaml").exists()
    assert (tmp_path / "m/compose/node-0.yaml").exists()


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        (None, ("--target", "nomad"), "target: no deployment target 'nomad'; there are all, vllm"),
        (
            None,
            ("--target", "helm"),
            "did you mean 'kubernetes'? It brings a Helm chart, in chart/. There are all",
        ),
        (None, ("--target", "ray-serve"), "ray-serve: cannot keep a pool off nodes"),
        ("llm: meta-llama/Llama-3.1-70B\nworkers: [{gpu: h100-80g, tp: 4}]\n", (), "max_model_len: missing"),
        ("slo: {ttft: 1 s}\n", (), "slo"),
        ("a,b\n1,2\n", (), "top level is a str"),
    ],
    ids=["unknown target", "another word", "refused target", "no length", "an slo", "a csv"],
)
def test_what_is_no_plan_ends_in_one_line(
    tmp_path: Path, text: str | None, words: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "plan.yaml").write_text(plan_yaml(a_plan()) if text is None else text)
    code, _, said = invoke("manifests", tmp_path / "plan.yaml", "-o", tmp_path / "m", *words)
    assert code != 0 and expected in said
    assert not (tmp_path / "m").exists()


@each_on_nodes
def test_ports_of_workers_that_share_a_host_differ(fleet_on_nodes: Fleet) -> None:
    for document in composed(fleet_on_nodes).values():
        hosted = [s for s in workers_of(document).values() if s.get("network_mode") == "host"]
        http = [s["command"][s["command"].index("--port") + 1] for s in hosted]
        nixl = [s["environment"].get("VLLM_NIXL_SIDE_CHANNEL_PORT") for s in hosted]
        side = [int(port) for port in nixl if port]
        assert len(set(http)) == len(http)
        assert len(set(side)) == len(side)


@each_on_nodes
def test_names_are_names_to_kubernetes(fleet_on_nodes: Fleet) -> None:
    names = [(d["kind"], d["metadata"]["name"]) for d in kubernetes.documents(fleet_on_nodes, 5000)]
    assert len(set(names)) == len(names)
    assert all(RFC1123.fullmatch(name) for _, name in names)
    services = [name for document in composed(fleet_on_nodes).values() for name in document["services"]]
    assert len(set(services)) == len(services)


@pytest.mark.parametrize(("longest", "served"), [(1, 256), (5000, 5120), (5120, 5120), (200_000, 131_072)])
def test_the_longest_request_fits(longest: int, served: int) -> None:
    """Up to the next 256, never beyond the 131072 tokens of the LLM (the workers hold 160000)."""
    assert engine_command.served_model_len(mixed(), longest) == served


def test_requests_that_no_worker_holds_are_named() -> None:
    assert (
        "Requests of more than 131072 tokens are refused"
        in manifests.render(mixed(), 200_000).files["README.md"]
    )


def test_a_policy_that_no_engine_is_told_of_is_named() -> None:
    """Routing has its place in every router; the simulator's batching is vLLM's own only under that name."""
    readme = rendered(replace(mixed(), policies=Policies("another", routing="round-robin")))["README.md"]
    assert "simulated with batching another; vLLM is not configured so" in readme
    assert "vLLM is not configured" not in rendered(mixed())["README.md"]
    due = ((Selector("chat", tenants=("chat",)), 0.5),)
    readme = rendered(replace(mixed(), policies=Policies(queue="edf", due=due)))["README.md"]
    assert "Selector(" not in readme and "must give its `priority`" in readme


def test_a_power_cap_is_said_and_kept_apart_but_never_set() -> None:
    """The capped pool goes to labelled nodes, the other of the same GPU to nodes without the label."""
    prefill, _, _, decode, *_ = kubernetes.documents(pairs(), 5000)
    capped, free = (d["spec"]["template"] for d in (decode, prefill))
    assert capped["metadata"]["annotations"] == {"fleetplan/gpu-power-limit-w": "350"}
    assert capped["spec"]["nodeSelector"]["fleetplan/gpu-power-limit-w"] == "350"
    terms = free["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert terms["nodeSelectorTerms"][0]["matchExpressions"][0]["operator"] == "DoesNotExist"
    files = rendered(pairs())
    for path in ("README.md", "compose/node-1.yaml", "vllm/dec.sh"):
        assert "nvidia-smi -pl 350" in files[path]


def test_spot_workers_are_rented_on_the_spot_market() -> None:
    """SkyPilot rented them on demand, at the full price, and the README said nothing."""
    asked = {}
    for gpu in ("h100-80g", "h100-80g@spot"):
        fleet = mixed()
        (pool,) = fleet.pools
        named = replace(pool.type.gpu, name=gpu)
        files = rendered(replace(fleet, pools=(replace(pool, type=replace(pool.type, gpu=named)),)))
        asked[gpu] = yaml.safe_load(files["skypilot.yaml"])["resources"].get("use_spot", False)
        assert ("Workers of mixed are on the spot market" in files["README.md"]) == asked[gpu]
    assert asked == {"h100-80g": False, "h100-80g@spot": True}


def test_the_same_workers_on_owned_and_rented_gpus_are_one_skypilot_service() -> None:
    """A plan for SkyPilot that rents beside owned GPUs had no skypilot.yaml."""
    fleet = mixed()
    (pool,) = fleet.pools
    owned = replace(pool.type, gpu=replace(pool.type.gpu, name=f"{pool.type.gpu.name}@owned"))
    files = rendered(replace(fleet, pools=(replace(pool, name="owned", type=owned, count=2), pool)))
    assert yaml.safe_load(files["skypilot.yaml"])["service"]["replicas"] == pool.count + 2
    assert "`sky check` lists their cluster" in files["README.md"]


def test_amd_gpus_get_their_image_resource_and_label() -> None:
    deployment = kubernetes.documents(mixed("mi300x-192g", 2, 1), 5000)[0]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == engine_command.ROCM_IMAGE
    assert pod["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "2"}
    assert all(key.startswith("amd.com/") for key in pod["nodeSelector"])


def test_workers_fill_nodes_without_waste() -> None:
    """4 x 2 and 3 x 1 GPUs of a node with 8: 8 + 3 GPUs, two nodes."""
    fleet = Fleet(LLM, (a_pool("a", "mixed", "h100-80g", 1, 3), a_pool("b", "mixed", "h100-80g", 2, 4)))
    nodes = engine_command.place_on_nodes(fleet)
    assert [sum(len(w.devices) for w in node.workers) for node in nodes] == [8, 3]


def test_llms_whose_names_begin_alike_keep_apart() -> None:
    """All were nvidia-nemotron-3: the second one applied took the first one's Deployments and workers."""

    def fleet_of(llm: str) -> Fleet:
        return replace(mixed(), llm=replace(mixed().llm, name=llm))

    def names_of(llm: str) -> set[str]:
        return {each["metadata"]["name"] for each in documents(rendered(fleet_of(llm))["kubernetes.yaml"])}

    sizes = ("Nano-30B-A3B", "Super-120B-A12B")
    nano, large = (f"nvidia/NVIDIA-Nemotron-3-{size}-NVFP4" for size in sizes)
    assert not names_of(nano) & names_of(large)
    labels = [engine_command.llm_label(fleet_of(llm), length=10) for llm in (nano, large)]
    assert len(set(labels)) == 2 and all(RFC1123.fullmatch(label) and len(label) <= 10 for label in labels)
    assert engine_command.llm_label(fleet_of("meta-llama/Llama-3.1-70B")) == "llama-3-1-70b"


def test_pools_whose_names_differ_by_case_alone_keep_apart() -> None:
    fleet = Fleet(LLM, (a_pool("Pool", "mixed", "h100-80g", 4, 1), a_pool("pool", "mixed", "h100-80g", 4, 1)))
    assert engine_command.pool_labels(fleet) == ["pool", "pool-2"]


def test_kserve_starts_its_own_image_with_what_its_presets_do_not_say() -> None:
    """The preset knows TP alone, runs as no root, and downloads with the token of a service account."""
    account, service = kserve.documents(piped(), 5000)
    assert account["secrets"] == [{"name": "hf-token-secret"}]
    template = service["spec"]["template"]
    assert template["serviceAccountName"] == account["metadata"]["name"]
    main = template["containers"][0]
    assert main["image"] == "ghcr.io/llm-d/llm-d-cuda:v0.9.0"
    assert service["spec"]["parallelism"] == {"tensor": 2}
    extra = {variable["name"]: variable["value"] for variable in main["env"]}["VLLM_ADDITIONAL_ARGS"]
    assert "--pipeline-parallel-size 2" in extra and "--tensor-parallel-size" not in extra
    turns = replace(mixed(), policies=Policies(routing="round-robin"))
    assert "scheduler" not in kserve.documents(turns, 5000)[1]["spec"]["router"]
    rocm = kserve.documents(mixed("mi300x-192g", 2, 1), 5000)[1]["spec"]["template"]["containers"][0]
    assert rocm["image"] == "ghcr.io/llm-d/llm-d-rocm:v0.9.0"


def test_kserves_shell_gives_vllm_the_words_unharmed(tmp_path: Path) -> None:
    """Its presets put VLLM_ADDITIONAL_ARGS into a line that they evaluate once: JSON keeps its quotes."""
    for document in kserve.documents(EXAMPLES["pairs of two gpus"], 5000)[1:]:
        for load in (document["spec"], document["spec"]["prefill"]):
            main = load["template"]["containers"][0]
            extra = {v["name"]: v.get("value") for v in main["env"]}["VLLM_ADDITIONAL_ARGS"]
            said = run_script(
                'eval "exec vllm serve ${VLLM_ADDITIONAL_ARGS}"',
                stubs=("vllm",),
                folder=tmp_path,
                VLLM_ADDITIONAL_ARGS=extra,
            )
            sent = json.loads(said[said.index("--kv-transfer-config") + 1])
            assert sent["kv_connector"] == "NixlConnector" and said[0] == "serve"


def test_every_worker_of_several_gpus_has_shared_memory() -> None:
    """A pod has 64 MB of it by itself; KServe's presets and Dynamo's operator bring their own."""
    pod = kubernetes.documents(mixed(), 5000)[0]["spec"]["template"]["spec"]
    values = yaml.safe_load(rendered(mixed())["llm-d/mixed.values.yaml"])["decode"]
    for volumes, main in (
        (pod["volumes"], pod["containers"][0]),
        (values["volumes"], values["containers"][0]),
    ):
        named = {volume["name"] for volume in volumes if volume["emptyDir"]["medium"] == "Memory"}
        assert {mount["name"] for mount in main["volumeMounts"] if mount["mountPath"] == "/dev/shm"} == named
    stack = yaml.safe_load(rendered(mixed())["production-stack.values.yaml"])
    assert stack["servingEngineSpec"]["modelSpec"][0]["shmSize"] == "16Gi"


@pytest.mark.parametrize("pools", [mixed().pools, spanning().pools, pairs().pools])
def test_names_stay_as_short_as_their_targets_ask(pools: tuple[Pool, ...]) -> None:
    """However long those of LLM and pools are.

    63 letters: production-stack's RELEASE-MODEL-engine-service; the label NAME-999-HASH of LeaderWorkerSet's
    pods, where DisaggregatedSet calls that SET-0-REVISION-ROLE. 45: Dynamo's graph and component together,
    where one of several nodes counts twice, with `-ldr`.
    """
    named = tuple(replace(pool, name=f"{'p' * 60}{number}") for number, pool in enumerate(pools))
    files = manifests.render(Fleet(replace(LLM, name="org/" + "y" * 90), named), 5000).files
    for graph in documents(files["dynamo.yaml"]):
        for component in graph["spec"]["components"]:
            own, is_wide = len(component["name"]), "multinode" in component
            assert len(graph["metadata"]["name"]) + (2 * own + 4 if is_wide else own) <= 45
    for group in documents(files["lws.yaml"]):
        if group["kind"] == "LeaderWorkerSet":
            assert len(group["metadata"]["name"] + "-999-") + 10 <= 63
    if "disaggregatedset.yaml" in files:
        whole = documents(files["disaggregatedset.yaml"])[0]
        for role in whole["spec"]["roles"]:
            assert len(f"{whole['metadata']['name']}-0--{role['name']}-999-") + 8 + 10 <= 63
    if "production-stack.values.yaml" in files:
        found = re.search(r"helm install (\S+) vllm/vllm-stack", files["README.md"])
        assert found is not None
        for model in yaml.safe_load(files["production-stack.values.yaml"])["servingEngineSpec"]["modelSpec"]:
            assert len(f"{found[1]}-{model['name']}-engine-service") <= 63


@pytest.mark.parametrize("gpu", ["gaudi3-128g", "tpu-v6e-32g"])
def test_what_no_image_serves_is_refused_in_one_line(gpu: str) -> None:
    """All targets refuse with one and the same line, and the README says that nothing deploys it."""
    fleet = mixed(gpu, 2, 1)
    found = manifests.render(fleet, 5000)
    assert set(found.files) == {"README.md"} and set(found.refused) == set(manifests.TARGETS)
    assert len(set(found.refused.values())) == 1 and "Nothing here deploys it" in found.files["README.md"]
    with pytest.raises(InputError, match=rf"^kubernetes: {gpu}: no manifest is written"):
        manifests.render(fleet, 5000, "kubernetes")


def planned_with(engine: Engine) -> Fleet:
    plain = mixed(count=2)
    pools = tuple(replace(pool, type=replace(pool.type, engine=engine)) for pool in plain.pools)
    return replace(plain, pools=pools)


def test_sglang_is_deployed_on_kubernetes_alone() -> None:
    """With its own image and flags behind the same router, and without a dashboard of vLLM's metrics."""
    fleet = planned_with(Engine("sglang", "0.5", True, mixed_steps=False))
    found = manifests.render(fleet, 5000)
    assert set(found.refused) == set(manifests.TARGETS) - {"kubernetes"}
    assert "For SGLang 0.5.23." in found.files["README.md"]
    assert not any("monitoring" in path for path in found.files)
    deployment = next(iter(yaml.safe_load_all(found.files["kubernetes.yaml"])))
    (main,) = deployment["spec"]["template"]["spec"]["containers"]
    assert main["image"] == "lmsysorg/sglang:v0.5.23"
    assert main["command"] == ["python3", "-m", "sglang.launch_server"]
    told = dict(zip(main["args"], main["args"][1:], strict=False))
    pool = fleet.pools[0].type
    assert told["--tp-size"] == str(pool.tp) and told["--max-running-requests"] == str(pool.max_num_seqs)
    assert told["--chunked-prefill-size"] == str(pool.max_num_batched_tokens)
    assert told["--context-length"] == "5120" and "--enable-mixed-chunk" not in main["args"]
    assert "--scheduler-recv-interval" not in main["args"]
    polling = planned_with(Engine("sglang", "0.5", True, mixed_steps=False, poll_steps=30))
    written = manifests.render(polling, 5000, "kubernetes").files["kubernetes.yaml"]
    assert "- --scheduler-recv-interval\n        - '30'\n" in written
    mixing = manifests.render(planned_with(Engine("sglang", "0.5", True)), 5000, "kubernetes")
    assert "--enable-mixed-chunk" in mixing.files["kubernetes.yaml"]
    with pytest.raises(
        InputError, match=r"^vllm: starts vLLM, and the plan was made for SGLang; take kubernetes"
    ):
        manifests.render(fleet, 5000, "vllm")
    queued = replace(fleet, policies=replace(fleet.policies, queue="sjf"))
    with pytest.raises(
        InputError, match="kubernetes: manifests for SGLang cannot express the queue sjf; plan without"
    ):
        manifests.render(queued, 5000, "kubernetes")


def test_an_older_sglang_is_deployed_as_the_release_that_is_named() -> None:
    """0.5 is the newest 0.5; of 0.4 no image is known, and that of 0.5 would be another engine."""
    named = manifests.render(planned_with(Engine("sglang", "0.4.6", True)), 5000, "kubernetes")
    assert "lmsysorg/sglang:v0.4.6\n" in named.files["kubernetes.yaml"]
    with pytest.raises(InputError, match=r"no image is known of SGLang 0\.4: write its release"):
        manifests.render(planned_with(Engine("sglang", "0.4", True)), 5000, "kubernetes")


def test_an_engine_without_manifests_is_refused_in_one_line() -> None:
    fleet = planned_with(Engine("trtllm", "1.3", True, is_checked=False))
    found = manifests.render(fleet, 5000)
    assert set(found.files) == {"README.md"} and set(found.refused) == set(manifests.TARGETS)
    with pytest.raises(InputError, match=r"^vllm: the plan was made for TensorRT-LLM, for which no manifest"):
        manifests.render(fleet, 5000, "vllm")


def test_what_is_drafted_is_in_every_command_of_its_pool() -> None:
    """And nothing in those of fleets that draft nothing."""
    fleet = FLEETS["drafting"]
    planned = {
        '{"method":"eagle3","num_speculative_tokens":3,"model":"a/drafter-3"}': True,
        '{"method":"ngram","num_speculative_tokens":2}': False,
    }
    targets = set()
    for target, command in engines(fleet):
        told = json.dumps(json.loads(command.value("--speculative-config")), separators=(",", ":"))
        assert planned[told] is ("--async-scheduling" in command.args), target
        assert planned[told] is ("--no-async-scheduling" not in command.args), target
        targets.add((target, told))
    assert {target for target, _ in targets} == set(commands(rendered(fleet)))
    assert len(targets) == 2 * len(commands(rendered(fleet)))
    assert all("--speculative-config" not in command.args for _, command in engines(FLEETS["mixed"]))


def test_a_drafters_name_that_no_command_line_carries_is_refused() -> None:
    fleet = FLEETS["drafting"]
    kind = fleet.pools[0].type
    assert kind.speculation is not None
    drafts = replace(kind.speculation, model="--trust-remote-code")
    pools = (replace(fleet.pools[0], type=replace(kind, speculation=drafts)),)
    with pytest.raises(InputError, match="expected a name such as"):
        engine_command.engine_flags(pools[0], replace(fleet, pools=pools), 5000)


def test_a_folder_beside_us_is_no_name_of_the_hub() -> None:
    """`llm: mymoe`, the folder of a config.json: targets that load by names of the hub refuse it."""
    fleet = FLEETS["mixed"]
    refused = manifests.find_refused_targets(replace(fleet, llm=replace(fleet.llm, name="mymoe")), 4096)
    for target in ("kserve", "llm-d"):
        assert f"{target}: loads the LLM from the Hugging Face hub, found 'mymoe'" in refused[target]
    named_only = {name for name, why in refused.items() if "from the Hugging Face hub" in why}
    assert named_only == set(HUB_TARGETS)


@pytest.mark.parametrize("target", HUB_TARGETS)
def test_a_target_that_cannot_load_the_llm_is_refused_before_the_search(target: str) -> None:
    """The plan was made, and only its README.md said that there are no manifests for the target."""
    document = {
        "llm": str(DATA.parents[1] / "examples" / "tiny-llm"),
        "slo": {"ttft": {"p90": "1 s"}},
        "deploy": {"target": target},
    }
    with pytest.raises(InputError, match=f"target: {target} loads the LLM from the Hugging Face hub, and"):
        parse_task(document, CATALOG)


def test_the_readme_of_one_target_is_of_that_target() -> None:
    """The folder of KServe said that vllm-router comes with it."""
    readmes = {
        target: manifests.render(mixed(), 5000, target).files["README.md"]
        for target in ("kserve", "kubernetes")
    }
    assert "vllm-router==" not in readmes["kserve"] and "vllm-router==" in readmes["kubernetes"]
    assert "One of the following" not in readmes["kserve"] + readmes["kubernetes"]
