"""search/prefixes/prefix_placing.py and `plan prefixes` on traffic made for them; trace formats with
prefixes.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.generated_traffic import merged, preble
from planner.cli import app
from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import read_fleet
from planner.errors import InputError, TraceError
from planner.fleet import Fleet, Pool
from planner.search.prefixes.prefix_placing import (
    memory_for_prefixes,
    plan_prefixes,
    prefill_pool,
    stable_traffic,
    warm_up,
    workers_for_same_load,
)
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

SAMPLE = Path(__file__).parents[2] / "examples" / "traces" / "shared-prefixes-sample.jsonl"
FLEET = "llm: meta-llama/Llama-3.1-70B\nworkers: [{name: web, gpu: h100-80g, tp: 4, count: 4}]\n"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    path = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    path.write_text(FLEET)
    return read_fleet(path, read_catalog())


@pytest.fixture(scope="module")
def pool(fleet: Fleet) -> Pool:
    return prefill_pool(fleet)


@pytest.fixture(scope="module")
def sample() -> Trace:
    return read_trace(SAMPLE)


def two_tools() -> Trace:
    """One request per second, in turn for two tools: blocks 0 (all), 1-2 or 3, and one of its own."""
    prompts = [[0, 1, 2, 10 + i] if i % 2 else [0, 3, 10 + i] for i in range(101)]
    counts = [len(prompt) for prompt in prompts]
    return Trace(
        name="tools",
        arrival_s=np.arange(101.0),
        input_tokens=np.array([100 * count for count in counts]),
        output_tokens=np.full(101, 20),
        prefix_offsets=np.concatenate(([0], np.cumsum(counts))),
        prefix_ids=np.concatenate(prompts),
        prefix_block_tokens=100,
    )


def test_stable_prefixes_by_hand(pool: Pool) -> None:
    """Node 0 is empty, then {0}, {3}, {1, 2}: 101, 51 and 50 requests in 100 s; what is left never recurs."""
    traffic = stable_traffic(two_tools(), pool)
    demand = traffic.demand
    assert demand.parent.tolist() == [-1, 0, 1, 1]
    assert demand.tokens.tolist() == [0, 100, 100, 200]
    assert demand.rate_rps.tolist() == [0.0, 0.0, 0.51, 0.50]
    assert traffic.sessions.saved_s_per_s == (0.0,)
    assert traffic.session_hits.infinite_frac == 0


def test_with_room_for_all_every_stable_token_hits(pool: Pool) -> None:
    """Of 51 x 300 + 50 x 400 tokens 51 x 200 + 50 x 300 are stable; the longest prefixes are warmed up."""
    trace = two_tools()
    plan = plan_prefixes(trace, pool, time_limit_s=60.0, rng=np.random.default_rng(0))
    assert plan.stable_hit_frac == pytest.approx((51 * 200 + 50 * 300) / (51 * 300 + 50 * 400))
    assert plan.session_hit_frac == 0
    assert 0 < plan.prefill_saved_frac < plan.stable_hit_frac + 0.01  # later tokens cost more
    assert plan.replication.largest_load < plan.uncached_load
    warmed = {prompt.block_ids for prompt in warm_up(trace, plan)}
    assert warmed == {(0, 3), (0, 1, 2)}


def test_what_recurs_only_for_a_while_is_left_to_sessions(pool: Pool) -> None:
    """Agents: every run ends, so no prefix is stable, yet most tokens hit in what memory is left."""
    trace = preble("embodied", 600, 2.0, rng=np.random.default_rng(0), block_tokens=64)
    plan = plan_prefixes(trace, pool, time_limit_s=60.0, rng=np.random.default_rng(0))
    assert len(plan.traffic.demand) == 1
    assert plan.stable_hit_frac == 0
    assert plan.session_hit_frac > 0.9
    assert plan.replication.session_tokens.tolist() == [plan.memory_tokens] * 4


def test_session_savings_never_exceed_all_prefill_work(pool: Pool, sample: Trace) -> None:
    traffic = stable_traffic(sample, pool)
    stable_s = float(traffic.demand.subtree_sum(traffic.demand.rate_rps) @ traffic.demand.prefill_s)
    assert 0 < traffic.sessions.saved_s_per_s[-1]
    assert stable_s + traffic.sessions.saved_s_per_s[-1] < traffic.prefill_s


def test_fewer_workers_carry_the_same_load_only_if_caches_save_work(pool: Pool, sample: Trace) -> None:
    """Traffic thirty times as dense on four workers, and the same with every id made unique."""
    dense = replace(sample, arrival_s=sample.arrival_s / 30)
    plan = plan_prefixes(dense, pool, time_limit_s=60.0, rng=np.random.default_rng(0))
    rng = np.random.default_rng(0)
    assert workers_for_same_load(dense, plan, time_limit_s=60.0, rng=rng) < 4
    unique = replace(dense, prefix_ids=np.arange(len(dense.prefix_ids)))
    plain = plan_prefixes(unique, pool, time_limit_s=60.0, rng=np.random.default_rng(0))
    assert workers_for_same_load(unique, plain, time_limit_s=60.0, rng=rng) == 4
    assert plain.replication.largest_load == pytest.approx(plain.uncached_load)
    assert warm_up(unique, plain) == []


def test_running_requests_leave_less_room_the_fewer_workers_there_are(pool: Pool, sample: Trace) -> None:
    dense = replace(sample, arrival_s=sample.arrival_s / 100)
    memory = [memory_for_prefixes(dense, pool, workers).placed_tokens for workers in (8, 4, 2, 1)]
    assert all(0 <= b <= a < pool.type.kv_tokens for a, b in pairwise(memory)) and memory[-1] < memory[0]
    assert all(tokens % 16 == 0 for tokens in memory)
    tiny = replace(pool, type=replace(pool.type, kv_tokens=2048))
    assert memory_for_prefixes(sample, tiny).placed_tokens == 0


def test_which_pool_prefills(fleet: Fleet, pool: Pool) -> None:
    both = replace(fleet, pools=(pool, replace(pool, name="batch")))
    assert prefill_pool(both, "batch").name == "batch"
    with pytest.raises(
        InputError, match="several pools that prefill; expected one of web, batch with --pool"
    ):
        prefill_pool(both)
    with pytest.raises(InputError, match="no pool named 'x' prefills"):
        prefill_pool(fleet, "x")


def test_requests_all_at_once_have_no_rates(pool: Pool) -> None:
    at_once = replace(two_tools(), arrival_s=np.zeros(101))
    with pytest.raises(TraceError, match="all requests arrive at once"):
        stable_traffic(at_once, pool)


# ---------------------------------------------------------------- the command


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["prefixes", *arguments], catch_exceptions=False, env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_command_describes_a_trace() -> None:
    text = run(str(SAMPLE))
    assert "blocks that hit (Mooncake)" in text and "another request has too (Preble)" in text
    assert "warm-up" not in text
    document = json.loads(run(str(SAMPLE), "--json"))
    assert "plan" not in document
    assert document["trace"]["infinite_hit_frac"] == pytest.approx(0.812, abs=1e-3)


def test_command_places_prefixes_and_writes_files(tmp_path: Path) -> None:
    """Equal seeds, equal files; the answer on stdout is the file's."""
    (tmp_path / "fleet.yaml").write_text(FLEET)
    arguments = (str(SAMPLE), "--fleet", str(tmp_path / "fleet.yaml"), "-o")
    text = run(*arguments, str(tmp_path / "a"))
    assert "estimated before any simulation" in text and "stable prefixes on 4 workers of web" in text
    document = json.loads(run(*arguments, str(tmp_path / "b"), "--json"))
    for name in ("prefixes.json", "hit-curve.csv", "warm-up.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert json.loads((tmp_path / "b" / "prefixes.json").read_text()) == document
    plan = document["plan"]
    assert plan["hit_frac"] == pytest.approx(plan["stable_hit_frac"] + plan["session_hit_frac"])
    assert plan["nodes"][0]["replicas"] == len(plan["nodes"][0]["workers"]) > 0
    prompts = json.loads((tmp_path / "a" / "warm-up.json").read_text())
    assert {prompt["worker"] for prompt in prompts} == set(plan["warm_up_tokens"])
    last = (tmp_path / "a" / "hit-curve.csv").read_text().splitlines()[-1]
    assert last == f"inf,{document['trace']['infinite_hit_frac']:.6g}"


def test_command_refuses_a_trace_without_ids() -> None:
    plain = SAMPLE.with_name("azure-code-sample.csv")
    with pytest.raises(TraceError, match="has no block ids"):
        CliRunner().invoke(app, ["prefixes", str(plain)], catch_exceptions=False)


# ---------------------------------------------------------------- readers


RAGPULSE = (
    '{"timestamp": "82", "input_length": 59, "output_length": 9, "hash_ids": {"sys_prompt": [1, 2], '
    '"passages_ids": [7], "history": [], "web_search": [], "user_input": [9]}, "session_id": "a"}\n'
    '{"timestamp": "90", "input_length": 50, "output_length": 9, "hash_ids": {"sys_prompt": [1, 2], '
    '"passages_ids": [8], "history": [], "web_search": [], "user_input": [9]}, "session_id": "b"}\n'
)


def test_ragpulse_texts_become_blocks_of_16_tokens(tmp_path: Path) -> None:
    """System prompt 20 + 15 tokens: blocks 0 and 1 end within it, block 2 ends at token 48 in the passages.

    Prompts of 59 and 50 tokens: four blocks each, the last one part filled and (as it says 9 too) not shared.
    """
    (tmp_path / "0_trace.jsonl.gz").write_bytes(gzip.compress(RAGPULSE.encode()))
    (tmp_path / "1_sys_prompt.jsonl").write_text(
        '{"sys_prompt_id": 1, "token_length": 20}\n{"sys_prompt_id": 2, "token_length": 15}\n'
    )
    (tmp_path / "2_rest.jsonl").write_text("".join(f'{{"id": {i}, "token_length": 14}}\n' for i in (7, 8, 9)))
    trace = read_trace(tmp_path / "0_trace.jsonl.gz")
    assert trace.arrival_s.tolist() == [0, 8]
    assert (trace.prefix_block_tokens, trace.prefix_offsets.tolist()) == (16, [0, 4, 8])
    first, second = trace.prefix_ids[:4].tolist(), trace.prefix_ids[4:].tolist()
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])


def test_ragpulse_without_its_lengths_says_so(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(RAGPULSE)
    trace = read_trace(tmp_path / "t.jsonl")
    assert not trace.has_prefixes
    assert "its texts have any length, and no file beside the trace says which" in trace.notes[0]


def test_ragpulse_with_wrong_lengths_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(RAGPULSE)
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"id": 1, "token_length": 20}\n')
    with pytest.raises(
        TraceError, match=r"request 1, column hash_ids: expected texts whose tokens .* text 2"
    ):
        read_trace(tmp_path / "t.jsonl")
    lengths.write_text('{"id": 1, "token_length": 20}\n{"id": 2}\n')
    with pytest.raises(TraceError, match="line 2: expected a text's number and its tokens"):
        read_trace(tmp_path / "t.jsonl")


def test_a_trace_may_state_its_block(tmp_path: Path) -> None:
    """300 tokens are 3 blocks of 128; a fourth id is beyond the prompt and left out."""
    path = tmp_path / "t.jsonl"
    row = '{"timestamp": 0, "input_tokens": 300, "output_tokens": 1, "prefix_ids": [1, 2, 3, 4], '
    path.write_text(row + '"prefix_block_tokens": 128}\n')
    trace = read_trace(path)
    assert (trace.prefix_block_tokens, trace.prefix_ids.tolist()) == (128, [1, 2, 3])
    for bad in ('"prefix_block_tokens": 0.5}\n', '"prefix_block_tokens": "x"}\n'):
        path.write_text(row + bad)
        with pytest.raises(TraceError, match="column prefix_block_tokens: expected one whole number"):
            read_trace(path)
    path.write_text(row + '"prefix_block_tokens": 128}\n' + row + '"prefix_block_tokens": 64}\n')
    with pytest.raises(
        TraceError, match="expected one whole number of tokens >= 1 in all rows with ids, found '128', '64'"
    ):
        read_trace(path)


def test_sample_trace_holds_both_kinds_of_prefixes(pool: Pool, sample: Trace) -> None:
    """Tools recur throughout, runs of agents do not; the file is what its generators made."""
    assert sample.tenants == ("tools", "agents")
    rng = np.random.default_rng(0)
    parts = {
        name: preble(workload, 40, 1.0, rng=rng)
        for name, workload in (("tools", "toolbench"), ("agents", "embodied"))
    }
    assert merged(parts).tenants == sample.tenants
    traffic = stable_traffic(sample, pool)
    assert len(traffic.demand) > 10
    assert traffic.session_hits.infinite_frac > 0.2
