"""Data-parallel ranks in fleet.yaml, slo.yaml, the search, and what deploys a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifest_commands import commands
from plans import CATALOG

from planner import manifests
from planner.documents.fleet import fleet_document, read_fleet
from planner.documents.task import parse_task
from planner.errors import InputError
from planner.fleet import Fleet, Pool
from planner.io.files import to_yaml
from planner.reports.rows import fleet_rows
from planner.search.options import Engines, mixed_options, worker_types
from planner.simulator.replay import simulate
from planner.solvers.demand import bounds_of, least_work
from planner.solvers.master import least_seconds
from planner.traffic.trace import Trace

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


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("tp: 4, dp: 4", "dp: 4 ranks of 4 GPUs are more than a node has"),
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
    with pytest.raises(InputError, match="dp: is not planned with prefix caches"):
        parse_task(question(dp=2) | {"policies": {"prefix_cache": True}}, CATALOG)


def test_the_search_takes_the_ranks_it_is_given() -> None:
    assert parse_task(question(), CATALOG).ranks == (1,)
    task = parse_task(question(dp=[1, 2, 8], max_num_batched_tokens=2048), CATALOG)
    types, _ = worker_types(MIXTURE, [H100], CATALOG, 4096, Engines.of(task))
    found = {(worker.tp, worker.dp) for worker in types if worker.dp > 1}
    assert found == {(1, 2), (1, 8), (2, 2), (4, 2)}
    assert all(worker.ep for worker in types if worker.dp > 1)
    only = parse_task(question(dp=2, max_num_batched_tokens=2048), CATALOG)
    types, _ = worker_types(MIXTURE, [H100], CATALOG, 4096, Engines.of(only))
    assert {worker.dp for worker in types} == {2}


@pytest.mark.parametrize("seed", range(6))
def test_no_bound_takes_more_time_than_a_worker_took(seed: int) -> None:
    """Full load from the start, one worker of two or four ranks: it was busy for at least as long as each
    bound on the work of its requests says.
    """
    rng = np.random.default_rng(seed)
    task = parse_task(question(dp=[2, 4], max_num_batched_tokens=int(rng.choice([512, 4096]))), CATALOG)
    types, _ = worker_types(MIXTURE, [H100], CATALOG, 4096, Engines.of(task))
    (option,) = mixed_options([types[int(rng.integers(len(types)))]], "gpus")
    n = 300
    trace = Trace(
        "drawn", np.zeros(n), rng.integers(1, 2000, n), rng.integers(1, int(rng.choice([3, 200])), n)
    )
    alone = Fleet(MIXTURE, (Pool("w", "mixed", option.type, 1),))
    busy_s = float(simulate(alone.without_engine(), trace).worker_busy_s[0])
    inputs, outputs = trace.input_tokens.astype(float), trace.output_tokens.astype(float)
    assert least_seconds(option, inputs, outputs).sum() <= busy_s * (1 + 1e-9)
    for bound in bounds_of(option):
        assert sum(part.sum() for part in least_work(option, bound, inputs, outputs)) <= busy_s * (1 + 1e-9)


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
    from planner.runtime.routing import LiveFleet

    found = fleet(tmp_path, "tp: 2, dp: 4, count: 2")
    state = LiveFleet(found).state
    assert len(state.workers) == 2 and state.dp_ranks is None
    assert state.types["kv_blocks"].tolist() == [found.pools[0].type.kv_tokens // 16]
