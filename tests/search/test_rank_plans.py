"""Data-parallel ranks in fleet.yaml, slo.yaml, the search, and what deploys a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from manifest_commands import commands
from plans import CATALOG

from planner import manifests
from planner.documents.fleet_file import fleet_document, read_fleet
from planner.documents.task import parse_task
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Pool
from planner.reports.rows import fleet_rows
from planner.search.evidence.certify import plan
from planner.search.level0.level0_search import _bounds_of
from planner.search.prefixes.prefix_placing import prefill_pool
from planner.search.problem.build_problem import build_problem
from planner.search.problem.options import (
    EngineChoices,
    decode_options,
    mixed_options,
    prefill_options,
    worker_types,
)
from planner.search.problem.plan_problem import with_policies
from planner.search.problem.reasons import reason_text
from planner.simulator.replay import simulate
from planner.solvers.demand import least_work, step_lines
from planner.solvers.master import least_seconds, least_workers
from planner.solvers.placement import place_fleet
from planner.solvers.required_work import guess_slo_work
from planner.traffic.trace import Trace
from planner.traffic.workload import TraceLengths, coarser_lengths

MIXTURE = CATALOG.llm("openai/gpt-oss-120b")
H100 = CATALOG.gpu("h100-80g")


def fleet(directory: Path, rows: str, llm: str = MIXTURE.name) -> Fleet:
    path = directory / "fleet.yaml"
    path.write_text(f"llm: {llm}\nworkers:\n  - {{name: w, gpu: h100-80g, {rows}}}\n")
    return read_fleet(path, CATALOG)


def question(**fleet_keys: Any) -> dict[str, Any]:
    return {
        "safety": "none",
        "llm": MIXTURE.name,
        "slo": {"ttft": {"p90": "2 s"}},
        "fleet": {"gpus": ["h100-80g"], **fleet_keys},
    }


def test_the_file_says_it_and_gives_it_back(tmp_path: Path) -> None:
    found = fleet(tmp_path, "tp: 2, dp: 4")
    worker = found.pools[0].type
    assert (worker.dp, worker.ep, worker.gpus, worker.name) == (4, True, 8, "h100-80g tp2 dp4 ep 2048")
    assert worker.kv_tokens > fleet(tmp_path, "tp: 2").pools[0].type.kv_tokens  # fewer experts on each GPU
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(fleet_document(found)))
    assert read_fleet(again, CATALOG) == found
    assert "8 × h100-80g, DP 4, EP" in str(fleet_rows(found))
    assert "4 × h100-80g, PP 2" in str(fleet_rows(fleet(tmp_path, "tp: 2, pp: 2")))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("tp: 4, dp: 3", "dp: 3 ranks of 4 GPUs .*12 GPUs, must be whole nodes of 8"),
        ("tp: 4, dp: 4", "give max_num_batched_tokens: 256 .deepep_low_latency., or take ranks that fit"),
        ("tp: 2, dp: 64", "dp: 64 ranks of 2 GPUs .*128 GPUs, at most 8 nodes of 8 are modelled"),
        ("dp: 2, ep: false", "ep: slices of experts over data-parallel ranks are not modelled"),
        ("dp: 2, pp: 2", "dp 2: is not simulated in pipelines, must be pp 1, found 2"),
        ("dp: 0", "dp: must be a whole number of at least 1"),
        (
            "dp: 2, latency: {knots_tokens: [1, 9], f_s: [1, 2], a_s: 0, b_s: 0, d_s: 0, e_s: 0, h_s: 0}",
            "joint_s",
        ),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(tmp_path: Path, rows: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refusal:
        fleet(tmp_path, rows)
    assert "\n" not in str(refusal.value)


def test_dense_llms_have_no_ranks(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"dp: ranks share experts, and meta-llama/Llama-3\.1-8B has none"):
        fleet(tmp_path, "dp: 2", "meta-llama/Llama-3.1-8B")
    with pytest.raises(InputError, match="dp: ranks share experts"):
        parse_task(question(dp=2) | {"llm": "llama-3.1-8b"}, CATALOG)


def test_kv_offload_beside_ranks_is_refused() -> None:
    policies = {"prefix_cache": True, "kv_offload": {"size": "64 GiB", "bandwidth": "20 GB/s"}}
    with pytest.raises(InputError, match="kv_offload: is not simulated with data-parallel ranks"):
        parse_task(question(dp=[1, 2]) | {"llm": "qwen3-30b-a3b", "policies": policies}, CATALOG)


def test_ranks_alone_behind_a_routing_that_looks_into_workers_are_refused() -> None:
    policies = {"policies": {"prefix_cache": True, "routing": "cache-aware"}}
    with pytest.raises(
        InputError, match=r"cache-aware looks into workers and .*; add 1 to fleet: dp, or jsq to routing"
    ):
        parse_task(question(dp=[2, 4]) | policies, CATALOG)
    assert parse_task(question(dp=[1, 2]) | policies, CATALOG).ranks == (1, 2)


def shared_prompts(n: int = 600) -> Trace:
    """600 prompts of 2,048 tokens within 6 s, of which 1,920 are one of three shared beginnings."""
    rng = np.random.default_rng(4)
    ids = np.concatenate([np.arange(15) + 100 * kind for kind in rng.integers(0, 3, n)])
    return Trace(
        "shared",
        np.sort(rng.uniform(0, 6, n)),
        np.full(n, 2048),
        np.full(n, 24),
        prefix_offsets=np.arange(n + 1) * 15,
        prefix_ids=ids,
        prefix_block_tokens=128,
    )


def gpus_of(fleet: Fleet) -> int:
    return sum(pool.count * pool.type.gpus for pool in fleet.pools)


@pytest.mark.long
def test_ranks_with_prefix_caches_are_planned() -> None:
    """Without dp 1 no routing that looks at caches can be taken, but engines still have their caches. Behind
    a routing that looks into workers only decode workers may have ranks.
    """
    asked = question(dp=[2, 4], max_num_batched_tokens=2048) | {
        "slo": {"ttft": {"p90": "300 ms"}, "tbt": {"p90": "60 ms"}}
    }
    without = plan(parse_task(asked, CATALOG), shared_prompts(), CATALOG)
    cached = plan(
        parse_task(asked | {"policies": {"prefix_cache": True}}, CATALOG), shared_prompts(), CATALOG
    )
    assert cached.fleet.policies.prefix_cache and cached.fleet.policies.routing == "jsq"
    assert all(pool.type.dp > 1 for pool in cached.fleet.pools)
    assert gpus_of(cached.fleet) < gpus_of(without.fleet)
    policies = {"prefix_cache": True, "routing": "cache-aware"}
    asked = question(dp=[1, 2, 4], max_num_batched_tokens=2048)
    problem = build_problem(parse_task(asked | {"policies": policies}, CATALOG), shared_prompts(), CATALOG)
    (choice,) = (each for each in problem.task.policy_choices() if each.prefix_cache)
    behind = with_policies(problem, choice)
    assert {option.role for option in behind.options() if option.type.dp > 1} == {"decode"}
    reasons = " ".join(reason_text(item.because) for item in behind.options_not_simulated())
    assert "dp 2: routing 'cache-aware' looks into workers, and not into their ranks" in reasons


def test_the_first_guess_counts_the_caches_of_all_ranks() -> None:
    """The caches of one rank of each worker were counted, a fourth of those that four ranks have."""
    asked = question(dp=[4], max_num_batched_tokens=2048) | {"policies": {"prefix_cache": True}}
    problem = build_problem(parse_task(asked, CATALOG), shared_prompts(), CATALOG)
    choice = next(each for each in problem.task.policy_choices() if each.prefix_cache)
    problem, seen = with_policies(problem, choice), list[int]()

    def lengths(cache_tokens: int) -> TraceLengths:
        seen.append(cache_tokens)
        return problem.lengths

    hits = cast(Any, SimpleNamespace(lengths=lengths))
    option, guess = mixed_options(problem.types, "cost")[0], guess_slo_work(problem.slo, problem.trace)
    _bounds_of(replace(problem, hits=hits), option, guess)
    workers = least_workers(option, coarser_lengths(problem.lengths), guess)
    assert seen == [workers * 4 * option.type.kv_tokens]


def test_prefixes_are_not_placed_on_workers_with_ranks(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dp 2: prefixes are not placed on workers with data-parallel ranks"):
        prefill_pool(fleet(tmp_path, "dp: 2"))


def test_the_search_takes_the_ranks_it_is_given() -> None:
    assert parse_task(question(), CATALOG).ranks == (1,)
    task = parse_task(question(dp=[1, 2, 8], max_num_batched_tokens=2048), CATALOG)
    types, _ = worker_types(MIXTURE, [H100], CATALOG, 4096, EngineChoices.of(task))
    found = {(worker.tp, worker.dp) for worker in types if worker.dp > 1}
    assert found == {(1, 2), (1, 8), (2, 2), (4, 2)}
    assert all(worker.ep for worker in types if worker.dp > 1)
    only = parse_task(question(dp=2, max_num_batched_tokens=2048), CATALOG)
    types, _ = worker_types(MIXTURE, [H100], CATALOG, 4096, EngineChoices.of(only))
    assert {worker.dp for worker in types} == {2}


@pytest.mark.parametrize("seed", range(6))
def test_no_bound_takes_more_time_than_a_worker_took(seed: int) -> None:
    """Full load from the start, one worker of two or four ranks: it was busy for at least as long as each
    bound on the work of its requests says.
    """
    rng = np.random.default_rng(seed)
    task = parse_task(question(dp=[2, 4], max_num_batched_tokens=int(rng.choice([512, 4096]))), CATALOG)
    types, _ = worker_types(MIXTURE, [H100], CATALOG, 4096, EngineChoices.of(task))
    (option,) = mixed_options([types[int(rng.integers(len(types)))]], "gpus")
    n = 300
    trace = Trace(
        "drawn", np.zeros(n), rng.integers(1, 2000, n), rng.integers(1, int(rng.choice([3, 200])), n)
    )
    alone = Fleet(MIXTURE, (Pool("w", "mixed", option.type, 1),))
    busy_s = float(simulate(alone.without_engine(), trace).worker_busy_s[0])
    inputs, outputs = trace.input_tokens.astype(float), trace.output_tokens.astype(float)
    assert least_seconds(option, inputs, outputs).sum() <= busy_s * (1 + 1e-9)
    for bound in step_lines(option):
        assert sum(part.sum() for part in least_work(option, bound, inputs, outputs)) <= busy_s * (1 + 1e-9)


def wide(directory: Path) -> Fleet:
    """DeepSeek-V3 on 16 ranks: two workers that prefill, three that decode, two nodes each."""
    path = directory / "fleet.yaml"
    path.write_text(
        "llm: deepseek-v3\nworkers:\n"
        "  - {name: p, role: prefill, gpu: h100-80g, dp: 16, count: 2, max_num_batched_tokens: 8192}\n"
        "  - {name: d, role: decode, gpu: h100-80g, dp: 16, count: 3, max_num_batched_tokens: 256}\n"
    )
    return read_fleet(path, CATALOG)


def test_ranks_on_several_nodes_take_whole_nodes(tmp_path: Path) -> None:
    """80 GPUs at 2.99 USD/h, five times two nodes; step times are kernels', by the kind of all-to-all."""
    found = wide(tmp_path)
    prefill, decode = (pool.type for pool in found.pools)
    assert (prefill.all2all, decode.all2all) == ("deepep_high_throughput", "deepep_low_latency")
    assert prefill.latency.kind == decode.latency.kind == "kernels"
    assert prefill.all2all in prefill.latency.basis and decode.all2all in decode.latency.basis
    assert sum(pool.count * pool.type.gpus for pool in found.pools) == 80
    price = sum(pool.count * pool.type.price_usd_per_h for pool in found.pools)
    assert price == pytest.approx(80 * H100.price_usd_per_h)
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(fleet_document(found)))
    assert read_fleet(again, CATALOG) == found
    nodes = place_fleet(found).nodes
    assert len(nodes) == 10 and all(len(part.gpus) == 8 for node in nodes for part in node.parts)
    assert {str(part) for node in nodes for part in node.parts if part.pool == "p"} == {
        f"p-{worker} ranks {ranks}" for worker in (0, 1) for ranks in ("0-7", "8-15")
    }


def test_ranks_on_one_node_are_placed_with_all_their_gpus(tmp_path: Path) -> None:
    (node,) = place_fleet(fleet(tmp_path, "tp: 2, dp: 4")).nodes
    assert [(str(part), len(part.gpus)) for part in node.parts] == [("w-0", 8)]


def test_ranks_on_several_nodes_serve_as_ranks_do(tmp_path: Path) -> None:
    """One request alone, 1,000 tokens in and 3 out, without engines' host times: a rank's own part, and the
    experts' for 1,000 tokens and one of each of 15 idle ranks; then two decodes to 1,001 and 1,002 tokens.
    """
    found = wide(tmp_path).without_engine()
    done = simulate(found, Trace("one", np.array([0.0]), np.array([1000]), np.array([3])))
    prefill, decode = (pool.type.latency for pool in found.pools)
    own_s = float(prefill.of_rank.step_s(1000, pairs=1000 * 1001 / 2, prefills=1))
    assert float(done.ttft_s[0]) == pytest.approx(own_s + float(prefill.joint_experts_s(1015)), rel=1e-6)
    decodes_s = [float(decode.of_rank.step_s(1, decodes=1, kv_tokens=kv)) for kv in (1001, 1002)]
    way_s = float(done.e2e_s[0] - done.ttft_s[0]) - sum(decodes_s) - 2 * float(decode.joint_experts_s(16))
    assert 0 <= way_s < 0.01  # of the KV to the worker that decodes


@pytest.mark.parametrize(("engine", "stages"), [("vllm", {1}), ("none", {1, 2})])
def test_pipelines_hand_nothing_over_on_vllm(engine: str, stages: set[int]) -> None:
    """Its NixlConnector starts no decode worker of several stages, and reads from no such prefill worker."""
    asked = {"llm": "llama-3.1-8b", "fleet": {"gpus": ["h100-80g"], "pp": [1, 2]}, "engine": engine}
    asked |= {"slo": {"ttft": {"p90": "2 s"}}}
    task = parse_task(asked, CATALOG)
    types, _ = worker_types(CATALOG.llm(task.llm), [H100], CATALOG, 4096, EngineChoices.of(task))
    assert {each.type.pp for each in mixed_options(types, "cost")} == {1, 2}
    assert {each.type.pp for each in prefill_options(types, "cost")} == stages
    assert {each.type.pp for each in decode_options(types, "cost")} == stages


def test_a_question_opens_several_nodes_where_one_has_no_room_for_so_many_ranks() -> None:
    deepseek = CATALOG.llm("deepseek-v3")
    asked = question(dp=[8, 16, 32]) | {"llm": deepseek.name}
    types, left = worker_types(
        deepseek, [H100, CATALOG.gpu("l40s-48g")], CATALOG, 4096, EngineChoices.of(parse_task(asked, CATALOG))
    )
    assert {(kind.tp, kind.dp) for kind in types} == {(1, 16), (1, 32), (2, 16), (2, 32), (4, 16)}
    assert all(kind.latency.kind == "kernels" for kind in types)
    budgets = {(kind.max_num_batched_tokens, kind.all2all) for kind in types}
    low, high = "deepep_low_latency", "deepep_high_throughput"
    assert budgets == {(256, low), *((n, high) for n in (512, 1024, 2048, 4096, 8192))}
    assert {each.type.all2all for each in mixed_options(types, "cost")} == {low}
    assert {each.type.all2all for each in decode_options(types, "cost")} == {low}
    assert {each.type.all2all for each in prefill_options(types, "cost")} == {low, high}
    said = {each.name: reason_text(each.because) for each in left}
    assert "needs NVLink" in said["l40s-48g tp1 dp16 ep"]
    assert "at most 8 nodes" in said["h100-80g tp4 dp32 ep"]
    only = parse_task(
        asked | {"fleet": {"gpus": ["h100-80g"], "dp": 16, "max_num_batched_tokens": 2048}}, CATALOG
    )
    types, _ = worker_types(deepseek, [H100], CATALOG, 4096, EngineChoices.of(only))
    assert {kind.all2all for kind in types} == {high}


def test_every_command_says_how_several_nodes_meet(tmp_path: Path) -> None:
    rendered = manifests.render(wide(tmp_path), 4096)
    found = commands(rendered.files)
    assert set(found) == {"vllm", "lws", "disaggregatedset", "llm-d", "dynamo"}
    for target, each in found.items():
        for command in each:
            assert command.value("--data-parallel-size") == "16"
            assert "--enable-expert-parallel" in command.args
            budget = command.value("--max-num-batched-tokens")
            kind = {"256": "deepep_low_latency", "8192": "deepep_high_throughput"}[budget]
            assert command.value("--all2all-backend") == kind
            if target != "dynamo":  # its operator says what is on a node
                assert command.value("--data-parallel-size-local") == "8"
    assert all(command.value("--data-parallel-start-rank") == "8" for command in found["llm-d"])
    assert all("--data-parallel-hybrid-lb" in command.args for command in found["llm-d"])
    assert {command.value("--nnodes") for command in found["lws"]} == {"2"}
    for target in ("compose", "kubernetes", "kserve", "production-stack", "ray-serve"):
        assert "take lws" in rendered.refused[target], target
    assert "meet by DeepEP" in rendered.files["README.md"]


def test_every_command_says_it_and_what_starts_ranks_otherwise_is_refused(tmp_path: Path) -> None:
    rendered = manifests.render(fleet(tmp_path, "tp: 2, dp: 4"), 4096).files
    found = commands(rendered)
    for target, each in found.items():
        for command in each:
            assert command.value("--data-parallel-size") == "4"
            assert command.value("--tensor-parallel-size") == "2"
            assert "--enable-expert-parallel" in command.args
            assert command.gpus in (0, 8), target  # scripts take the GPUs that they are shown
    assert {"vllm", "compose", "kubernetes", "lws", "llm-d"} <= set(found)
    refused = manifests.render(fleet(tmp_path, "tp: 2, dp: 4"), 4096).refused
    for target in ("kserve", "ray-serve", "dynamo"):
        assert "starts data-parallel ranks (dp 4) in a way of its own" in refused[target]
    assert "--data-parallel-size" not in str(manifests.render(fleet(tmp_path, "tp: 2"), 4096).files)


def test_our_router_sees_a_worker_and_leaves_its_ranks_to_it(tmp_path: Path) -> None:
    """Two workers of four ranks: two places to go, each with a rank's room for one request."""
    from planner.runtime.live_routing import LiveFleet

    found = fleet(tmp_path, "tp: 2, dp: 4, count: 2")
    state = LiveFleet(found).state
    assert len(state.workers) == 2 and state.dp_ranks is None
    assert state.types["kv_blocks"].tolist() == [found.pools[0].type.kv_tokens // 16]
