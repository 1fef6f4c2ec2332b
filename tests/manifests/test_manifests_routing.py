"""What routes in a deployment: the nearest that each target has to the plan, and said."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from manifest_commands import EXAMPLES, FLEETS, composed, documents, each_fleet, each_on_nodes, rendered
from plans import LLM, mixed, pairs

from planner import manifests
from planner.fleet import Fleet, Policies
from planner.manifests import endpoint_picker, engine_command, production_stack, ray_serve
from planner.models.latency import StepLatency
from planner.policies import ROUTING, STACK, find_router_difference

Document = dict[str, Any]


def test_the_routers_container_starts_the_router() -> None:
    for document in documents(rendered(FLEETS["both roles and mixed"])["kubernetes.yaml"]):
        if document["kind"] == "Deployment" and document["metadata"]["labels"]["fleetplan/role"] == "router":
            (container,) = document["spec"]["template"]["spec"]["containers"]
            said = container["args"]
            assert container["command"] == ["vllm-router"]
            assert said[:4] == ["--host", "0.0.0.0", "--port", "8000"]
            namespace = said[said.index("--service-discovery-namespace") + 1]
            assert namespace == f"$({container['env'][0]['name']})"  # as Kubernetes puts it in place


@each_on_nodes
def test_the_router_knows_every_worker(fleet_on_nodes: Fleet) -> None:
    routers = [
        service
        for d in composed(fleet_on_nodes).values()
        for name, service in d["services"].items()
        if name[:6] == "router"
    ]
    command = " ".join(word for router in routers for word in router["command"])
    assert command.count("http://") == fleet_on_nodes.workers
    if fleet_on_nodes.is_disaggregated:
        assert command.count("--prefill ") == sum(
            p.count for p in fleet_on_nodes.pools if p.role == "prefill"
        )
        assert command.count("--decode ") == sum(p.count for p in fleet_on_nodes.pools if p.role == "decode")


@each_fleet
def test_the_routers_own_parser_takes_its_command_lines(fleet: Fleet) -> None:
    router_args = pytest.importorskip(
        "vllm_router.router_args", reason=f"needs {engine_command.ROUTER_PACKAGE}"
    )
    parser = argparse.ArgumentParser(exit_on_error=False)
    router_args.RouterArgs.add_cli_args(parser)
    services = [item for document in composed(fleet).values() for item in document["services"].items()]
    lines = [service["command"] for name, service in services if name.startswith("router")]
    for path in ("kubernetes.yaml", "lws.yaml", "disaggregatedset.yaml"):
        for document in documents(rendered(fleet).get(path, "")):
            is_router = document["metadata"].get("labels", {}).get("fleetplan/role") == "router"
            if document["kind"] == "Deployment" and is_router:
                lines.append(document["spec"]["template"]["spec"]["containers"][0]["args"])
    assert lines
    for line in lines:
        parser.parse_args(line)


def test_one_worker_leaves_the_router_no_choice_of_two() -> None:
    """vllm-router 0.1.17 exits with 'Power-of-two policy for decode requires at least 2 decode workers'."""
    alone = engine_command.router_policy_args(mixed(count=1), ("mixed",))
    assert alone == ["--policy", "round_robin"]
    assert engine_command.router_policy_args(mixed(), ("mixed",)) == ["--policy", "power_of_two"]


def test_pairs_take_turns_at_vllms_router() -> None:
    """Its power_of_two compares the requests that it counts, and of pairs 0.1.17 counts none."""
    args = engine_command.router_policy_args(EXAMPLES["pairs of one gpu"], ("prefill", "decode"))
    assert args[-4:] == ["--prefill-policy", "round_robin", "--decode-policy", "round_robin"]


def test_the_router_has_the_settings_that_were_simulated() -> None:
    """cache-aware is the router's own rule; what stands in for another policy keeps the router's defaults."""
    args = engine_command.router_policy_args(FLEETS["cache-aware"], ("mixed",))
    assert args == [
        "--policy",
        "cache_aware",
        "--cache-threshold",
        "0.3",
        "--balance-abs-threshold",
        "8",
        "--balance-rel-threshold",
        "1.1",
    ]
    assert engine_command.router_policy_args(FLEETS["affinity"], ("mixed",)) == ["--policy", "cache_aware"]
    pairs = engine_command.router_policy_args(FLEETS["pairs with prefix caches"], ("prefill", "decode"))
    assert pairs[pairs.index("--prefill-policy") + 1] == "cache_aware"
    assert pairs[pairs.index("--decode-policy") + 1] == "round_robin"


def test_targets_look_at_prefixes_where_the_plan_does() -> None:
    """And say so where their router cannot."""
    for name, logic, mode in (
        ("cache-aware", "roundrobin", "kv"),
        ("affinity", "prefixaware", "kv"),
        ("mixed", "roundrobin", "least-loaded"),
    ):
        files = rendered(FLEETS[name])
        values = yaml.safe_load(files["production-stack.values.yaml"])
        assert values["routerSpec"]["routingLogic"] == logic
        assert ("hits are not kept" in files["README.md"]) == (name == "cache-aware")
        graph = yaml.safe_load(files["dynamo.yaml"])
        frontend = graph["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]
        assert frontend["args"][:2] == ["--router-mode", mode]
        assert ("The plan counts on no hit" in files["README.md"]) == (name == "mixed")
        assert ("send those beginnings" in files["README.md"]) == (name != "mixed")


def test_a_plan_in_turns_loses_no_hits_on_a_router_that_goes_in_turns() -> None:
    policies = Policies(routing="round-robin", prefix_cache=True)
    assert production_stack.routing(replace(mixed(), policies=policies)) == "its roundrobin."


def test_every_target_says_what_routes_there() -> None:
    """Of every routing that the simulator knows: a sentence that names what the manifest asks for."""
    for routing in ROUTING:
        has_cache = ROUTING[routing].needs_caches
        policies = Policies(routing=routing, prefix_cache=has_cache)
        files = manifests.render(replace(mixed(), policies=policies), 5000).files
        said = dict(re.findall(r"^## ([a-z-]+)$.*?^Routing: (.+?\.)$", files["README.md"], re.M | re.S))
        assert set(said) == set(manifests.TARGETS) - {"disaggregatedset"}
        asked = engine_command.router_policy_args(Fleet(LLM, mixed().pools, policies=policies), ("mixed",))
        assert f"mixed workers by {asked[1]}." in said["kubernetes"]
        graph = yaml.safe_load(files["dynamo.yaml"])
        frontend = graph["spec"]["components"][0]["podTemplate"]["spec"]["containers"][0]
        assert f"in the mode {frontend['args'][1]}" in said["dynamo"]
        scorers = endpoint_picker.profile_plugins(routing)[:-1]
        assert all(scorer in said["llm-d"] for scorer in scorers) and (scorers or "by lot" in said["llm-d"])
        logic = yaml.safe_load(files["production-stack.values.yaml"])["routerSpec"]["routingLogic"]
        assert said["production-stack"].startswith(f"its {logic}")
        is_lacking = find_router_difference(ROUTING[routing], STACK).is_lacking
        assert (f"it has no {routing}" in said["production-stack"]) == is_lacking
        assert f"The simulation routes by {routing};" in files["README.md"]


@pytest.mark.parametrize(
    ("routing", "plugins"),
    [
        ("jsq", ["inflight-load-producer", "token-load-scorer", "max-score-picker"]),
        ("least-outstanding", ["inflight-load-producer", "active-request-scorer", "max-score-picker"]),
        ("random", ["random-picker"]),
        ("prefix-affinity", ["approx-prefix-cache-producer", "prefix-cache-scorer", "max-score-picker"]),
        (
            "e2",
            [
                "approx-prefix-cache-producer",
                "inflight-load-producer",
                "prefix-cache-affinity-filter",
                "token-load-scorer",
                "max-score-picker",
            ],
        ),
    ],
)
def test_the_endpoint_picker_scores_what_the_plan_does(routing: str, plugins: list[str]) -> None:
    config = endpoint_picker.picker_config(
        replace(mixed(), policies=Policies(routing=routing)), is_pair=False
    )
    assert [plugin["type"] for plugin in config["plugins"]] == plugins
    ranked = [plugin["pluginRef"] for plugin in config["schedulingProfiles"][0]["plugins"]]
    assert ranked == [name for name in plugins if not name.endswith("-producer")]


def test_the_endpoint_picker_sends_pairs_to_prefill_and_to_decode() -> None:
    """One profile per role, each with its filter first; every plugin a profile names is configured."""
    fleet = replace(pairs(), policies=Policies(decode_routing="least-outstanding"))
    config = endpoint_picker.picker_config(fleet, is_pair=True)
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


def test_the_endpoint_picker_counts_requests_of_decode_workers() -> None:
    """Tokens of prompts that have no first token yet say nothing of what a decode worker does."""
    profiles = endpoint_picker.picker_config(pairs(), is_pair=True)["schedulingProfiles"]
    scorers = {each["name"]: [plugin["pluginRef"] for plugin in each["plugins"]][1] for each in profiles}
    assert scorers == {"prefill": "token-load-scorer", "decode": "active-request-scorer"}


def test_the_endpoint_picker_is_told_how_fast_the_slowest_workers_prefill() -> None:
    """2 ms per token of a step, nothing for pairs of tokens: 500 tokens/s; the other pool takes 1 ms."""
    flat = StepLatency((1.0, 512.0), (0.002, 1.024), 0.0, 0.0, 0.0, 0.0, 0.0, "by hand")
    pool = mixed().pools[0]
    slow = replace(pool, type=replace(pool.type, latency=flat))
    fast = replace(pool, name="fast", type=replace(pool.type, latency=replace(flat, f_s=(0.001, 0.512))))
    fleet = Fleet(LLM, (fast, slow), policies=Policies(routing="cache-aware", prefix_cache=True))
    told = {
        plugin["type"]: plugin.get("parameters")
        for plugin in endpoint_picker.picker_config(fleet, is_pair=False)["plugins"]
    }
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
