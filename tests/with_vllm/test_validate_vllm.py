"""`plan validate` on a real vLLM on the CPU: profile, fit, two workers; a pair through NIXL. `make test-vllm`

What is asserted holds on a busy machine too: every request ends, token for token, the engines count what the
trace says, and on their own clocks the prediction is right. How far it was off on the wall is printed; where
the machine was quiet, that is asserted too.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.documents.engine_file import parse_engine
from planner.documents.fits import Split, read_fits
from planner.documents.fleet_file import fleet_document, read_fleet
from planner.domain import Slo
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Network, Policies, Pool, Role, WorkerType
from planner.models.latency import StepLatency
from planner.runtime.analysis import ValidationSetup
from planner.runtime.connection_limits import listening
from planner.runtime.live_replay import unique_prompt
from planner.runtime.router import LiveRouter
from planner.runtime.validate import engine_commands, scrape_counters, traffic_counters
from planner.runtime.workers import CPU_BLOCK_TOKENS, place_workers, run_engines
from planner.simulator import simulate
from planner.traffic.trace import Trace
from profiling.vllm_install import is_installed

if not is_installed():
    pytest.skip("vLLM is not installed (make test-vllm)", allow_module_level=True)

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
LARGER = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "head_dim": 64}
BUDGET_S = 45
LOAD = 0.65  # of the rate that the fleet sustains in simulation
SENDING_S = 40.0  # what a test sends requests for, at the rate that this machine sustains
FEWEST, FIRST, REQUESTS, PAIRED = 20, 80, 120, 40
ATTEMPTS = 3
QUIET = 3.0  # load average: two engines, their servers, router and client
OWN_CLOCK_FRAC = 0.25
SHARED_FRAC = 0.04  # of the engines' steps with other programs in them: the machine is not ours alone
MAX_MODEL_LEN = 2048
KV_TOKENS = 64 * 1024
PAIR_TOKENS = (100, 256, 1000, 1500)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny LLM with eight times the work per token, so that engines take most of the machine: beside
    steps of 6 to 80 ms their API servers, the router and the client need 4 to 7 % of a core each."""
    folder = tmp_path_factory.mktemp("llm")
    config = json.loads((TINY / "config.json").read_text()) | LARGER
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def engine(llm: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkerType:
    return profiled(llm, tmp_path_factory.mktemp("profile"))


def profiled(llm: Path, folder: Path) -> WorkerType:
    """As a short profile found it: steps of one engine on one core, and what is added where each core has
    one. A longer profile where starting took all of it, or most."""
    table, core = str(folder / "table.csv"), str(max(os.sched_getaffinity(0)))
    asked = ["profile", str(llm), "-o", table, "--engine", "vllm", "--eager"]
    asked += ["--max-num-batched-tokens", "512", "--max-num-seqs", "32"]
    asked += ["--max-model-len", str(MAX_MODEL_LEN)]
    fit = ["fit", table, "--llm", str(llm), "--gpu", "h100-80g", "-o", str(folder / "fit.yaml")]
    one_core = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": core}
    done = run_plan(*asked, "--budget", str(BUDGET_S), **one_core)
    if done.returncode or run_plan(*fit).returncode:
        plan(*asked, "--budget", str(5 * BUDGET_S), **one_core)
        plan(*fit)
    catalog = read_catalog(folder)  # with engines.yaml, which the profile wrote
    added = parse_engine({"name": "vllm"}, catalog.engines.values(), "engine")
    latency = read_fits(folder / "fit.yaml")[Split(1, False)]
    gpu = catalog.gpu("h100-80g")  # it is not used
    return WorkerType(gpu, 1, latency, KV_TOKENS, 512, 32, engine=added)


def run_plan(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planner.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | environment,
    )


def plan(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = run_plan(*arguments, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def fleet_of(
    llm: Path, engine: WorkerType, *pools: tuple[str, Role, int], policies: Policies | None = None
) -> Fleet:
    asked = tuple(Pool(name, role, engine, n) for name, role, n in pools)
    return Fleet(read_catalog().llm(str(llm)), asked, policies or Policies(), Network(1e9))


def a_trace(requests: int, rate_rps: float, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / rate_rps, requests))
    return Trace("made up", arrival_s, rng.integers(400, 1200, requests), rng.integers(16, 48, requests))


def paced_trace(fleet: Fleet, most: int, seed: int) -> Trace:
    """At LOAD of what the fleet sustains, and over in about SENDING_S however slow the machine is."""
    rate_rps = LOAD * sustained_rps(fleet)
    return a_trace(int(np.clip(SENDING_S * rate_rps, FEWEST, most)), rate_rps, seed)


def sustained_rps(fleet: Fleet) -> float:
    """Requests per second when all of a long trace is there from the start."""
    trace = a_trace(1000, 1e6, seed=1)
    return len(trace) / simulate(fleet, trace).end_s


def validated(fleet: Path, trace: Trace, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """`plan validate`, with what it found printed."""
    lines = []
    after: dict[int, list[int]] = {}
    for child, parent in trace.after.tolist():
        after.setdefault(child, []).append(parent)
    for i in range(len(trace)):
        ids = trace.prefix_ids[trace.prefix_offsets[i] : trace.prefix_offsets[i + 1]].tolist()
        row = {
            "arrival_s": float(trace.arrival_s[i]),
            "input_tokens": int(trace.input_tokens[i]),
            "output_tokens": int(trace.output_tokens[i]),
        }
        more = {"prefix_block_tokens": trace.prefix_block_tokens, "prefix_ids": ids} if ids else {}
        if after:
            more |= {"request_id": i, "after": after.get(i, []), "think_s": float(trace.think_s[i])}
        lines.append(json.dumps(row | more))
    out.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    done = plan("validate", str(fleet), "--trace", str(out.with_suffix(".jsonl")), "-o", str(out), "--json")
    told: dict[str, Any] = json.loads(done.stdout)
    loads = [load for part in told["parts"] for load in part["load_average"]]
    stolen = ", ".join(f"{100 * frac:.0f} %" for frac in told["stolen_frac"].values())
    say(
        f"{out.name}: {len(trace)} requests at {len(trace) / trace.arrival_s[-1]:.1f}/s; load average "
        f"{min(loads):.1f} to {max(loads):.1f}, others ran in {stolen} of the engines' steps"
    )
    alone, fixed = (
        {(row["metric"], row["percentile"]): f"{100 * row['error_frac']:+.0f} %" for row in told[side] or ()}
        for side in ("errors_undisturbed", "errors_corrected")
    )
    for wall in told["errors"]:
        key = wall["metric"], wall["percentile"]
        if wall["percentile"] != "p99":
            own = "" if key not in alone else f"{alone[key]}, "
            apart = f"; without interruptions {own}corrected {fixed[key]}" if key in fixed else ""
            say(
                f"{' '.join(key)}: predicted {1e3 * wall['predicted_s']:.1f} ms, measured "
                f"{1e3 * wall['measured_s']:.1f} ms: {100 * wall['error_frac']:+.0f} %{apart}"
            )
    say(told["verdict"])
    assert (told["finished"], told["rejected"], told["failed"]) == (len(trace), 0, 0)
    assert told["times"] == "engines' step logs"
    return told


def own_clock_errors(told: Mapping[str, Any], *, percentile: str = "p50") -> dict[str, float]:
    """With fits corrected by the run's own steps."""
    rows = [row for row in told["errors_corrected"] if row["percentile"] == percentile]
    return {row["metric"]: row["error_frac"] for row in rows}


def near_on_own_clock(run: Callable[[Path], dict[str, Any]], folder: Path) -> tuple[dict[str, Any], Path]:
    """The first run whose medians are right on the engines' own clocks, and its folder. Other programs also
    take from an engine what its step log does not show, caches and memory bandwidth: so up to ATTEMPTS runs.
    """
    for attempt in range(ATTEMPTS):
        out = folder / f"run-{attempt}"
        told = run(out)
        worst_frac = max(map(abs, own_clock_errors(told).values()))
        if worst_frac < OWN_CLOCK_FRAC:
            return told, out
    pytest.fail(f"medians up to {100 * worst_frac:.0f} % off on the engines' own clocks, {ATTEMPTS} times")


def test_two_mixed_workers_serve_all_of_the_trace(
    llm: Path, engine: WorkerType, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """Profile, predict, run, correct, predict, run. First up to 80 requests by the profile alone: where
    nobody else uses the machine, medians on the wall are within 25 %; where they are not, again from a new
    profile, since a machine that is shared is faster now and slower then. The steps of that run, as long as
    they took on the wall, correct the fits; with these up to 120 other requests are predicted and sent, open
    loop at 65 % of what the corrected fleet sustains. Each finishes with its length, the engines have counted
    every prompt and output token once, hold as many KV tokens as the plan says and keep none.

    Whatever else the machine does, medians are within 25 % on the engines' own clocks, with fits corrected
    by the run's own steps."""
    for attempt in range(ATTEMPTS):
        folder = tmp_path / f"attempt-{attempt}"
        folder.mkdir()
        worker = profiled(llm, folder) if attempt else engine
        fleet = fleet_of(llm, worker, ("mixed", "mixed", 2))
        (folder / "fleet.yaml").write_text(to_yaml(fleet_document(fleet) | {"max_model_len": MAX_MODEL_LEN}))
        first = paced_trace(fleet, FIRST, seed=2)
        told = validated(folder / "fleet.yaml", first, folder / "first", say)
        medians = {row["metric"]: row["error_frac"] for row in told["errors"] if row["percentile"] == "p50"}
        worst_frac = max(abs(medians[metric]) for metric in ("ttft", "tpot", "e2e"))
        is_shared = max(told["stolen_frac"].values()) >= SHARED_FRAC
        if worst_frac < 0.25 or is_shared or max(told["parts"][0]["load_average"]) >= QUIET:
            break
    else:
        pytest.fail(f"medians up to {100 * worst_frac:.0f} % off, {ATTEMPTS} times")
    assert "synchronous" in " ".join(told["notes"])
    as_run = folder / "first" / "as-run.yaml"
    trace = paced_trace(read_fleet(as_run, read_catalog()), REQUESTS, seed=3)
    told, out = near_on_own_clock(lambda out: validated(as_run, trace, out, say), tmp_path)
    engines = told["parts"][0]["engines"]
    assert sum(engine["prompt_tokens"] for engine in engines) == trace.input_tokens.sum()
    assert sum(engine["generation_tokens"] for engine in engines) == trace.output_tokens.sum()
    assert all(engine["kv_tokens"] == KV_TOKENS for engine in engines)
    assert all(engine["kv_cache_usage_perc"] == 0 for engine in engines)
    assert told["steps"][0]["steps"] > len(trace)
    table = (out / "requests.csv").read_text().splitlines()[1:]
    assert {row.split(",")[5] for row in table} == {"mixed-0", "mixed-1"}
    assert all(0 < float(row.split(",")[8]) <= float(row.split(",")[11]) for row in table)


def shared_trace(requests: int, rate_rps: float) -> Trace:
    """Every prompt begins with one of 6 documents of 4 or 5 blocks, then goes on by itself. The first of each
    comes alone, so that it is computed when the others come."""
    rng = np.random.default_rng(5)
    alone_s, later = 2.0 * np.arange(6), requests - 6
    arrival_s = np.concatenate((alone_s, 12.0 + np.cumsum(rng.exponential(1 / rate_rps, later))))
    documents = [np.arange(10 * k, 10 * k + 4 + k % 2) for k in range(6)]
    chosen = [documents[k] for k in (*range(6), *rng.integers(6, size=later))]
    inputs = np.array([CPU_BLOCK_TOKENS * len(ids) for ids in chosen]) + rng.integers(20, 400, requests)
    return Trace(
        "documents",
        arrival_s,
        inputs,
        rng.integers(4, 16, requests),
        prefix_offsets=np.cumsum([0, *map(len, chosen)]),
        prefix_ids=np.concatenate(chosen),
        prefix_block_tokens=CPU_BLOCK_TOKENS,
    )


@pytest.mark.slow
def test_prompts_hit_the_prefix_cache_as_simulated(
    llm: Path, engine: WorkerType, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """80 prompts over 6 documents on two workers, by prefix-affinity: all but the first of a document go
    where its 4 or 5 blocks are. Tokens found in the cache: as simulated, as the step log says, and as vLLM's
    own counters say."""
    policies = Policies(routing="prefix-affinity", prefix_cache=True)
    fleet = fleet_of(llm, engine, ("mixed", "mixed", 2), policies=policies)
    (tmp_path / "fleet.yaml").write_text(to_yaml(fleet_document(fleet) | {"max_model_len": MAX_MODEL_LEN}))
    trace = shared_trace(80, 8.0)
    told = validated(tmp_path / "fleet.yaml", trace, tmp_path / "out", say)
    hits, engines = told["prefix_hits"], told["parts"][0]["engines"]
    say(f"prefix hits: predicted {hits['predicted_frac']:.4f}, measured {hits['measured_frac']:.4f}")
    blocks = np.diff(trace.prefix_offsets)
    expected = CPU_BLOCK_TOKENS * (blocks.sum() - 3 * 4 - 3 * 5) / trace.input_tokens.sum()
    assert hits["predicted_frac"] == pytest.approx(expected, abs=1e-9)
    assert hits["measured_frac"] == pytest.approx(expected, abs=1e-9)
    queries, found = (sum(one[f"prefix_cache_{name}"] for one in engines) for name in ("queries", "hits"))
    assert queries == trace.input_tokens.sum()
    assert found / queries == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_turns_of_sessions_are_sent_as_the_engines_answer(
    llm: Path, engine: WorkerType, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """12 sessions of three turns on two workers, a second of thinking between two turns: none was sent before
    the one it waits for had been answered and thought about, all finish. On the engines' own clocks, each
    request at its own arrival, medians are within 25 %; sessions' totals, on the wall, are printed."""
    fleet = fleet_of(llm, engine, ("mixed", "mixed", 2))
    (tmp_path / "fleet.yaml").write_text(to_yaml(fleet_document(fleet) | {"max_model_len": MAX_MODEL_LEN}))
    rng = np.random.default_rng(6)
    start_s = np.repeat(np.sort(rng.uniform(0, 12, 12)), 3)
    order = np.argsort(start_s + np.tile(np.arange(3.0), 12), kind="stable")
    place = np.argsort(order)
    after = np.array(sorted(((place[i], place[i - 1]) for i in range(36) if i % 3), key=lambda row: row[1]))
    trace = Trace(
        "turns",
        (start_s + np.tile(np.arange(3.0), 12))[order],
        rng.integers(400, 1200, 36),
        rng.integers(16, 48, 36),
        after=after,
        think_s=np.where(np.isin(np.arange(36), after[:, 0]), 1.0, 0.0),
    )
    told, out = near_on_own_clock(lambda out: validated(tmp_path / "fleet.yaml", trace, out, say), tmp_path)
    lines = (json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines())
    sent = {row["request"]: row for row in lines if "status" in row}
    waits_s = [sent[child]["sent_s"] - sent[parent]["end_s"] for child, parent in after.tolist()]
    assert min(waits_s) > 1 - 1e-5
    assert {row["metric"] for row in told["errors"]} > {"session", "session-served"}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
def test_a_pair_is_predicted_each_engine_on_its_own_clock(
    llm: Path, engine: WorkerType, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """A prefill and a decode worker joined by NIXL: all requests end; on their own clocks, with fits
    corrected by the run's own steps, the medians of both engines are within 25 %."""
    fleet = fleet_of(llm, engine, ("prefill", "prefill", 1), ("decode", "decode", 1))
    (tmp_path / "fleet.yaml").write_text(to_yaml(fleet_document(fleet) | {"max_model_len": MAX_MODEL_LEN}))
    trace = paced_trace(fleet, PAIRED, seed=4)
    told, _ = near_on_own_clock(lambda out: validated(tmp_path / "fleet.yaml", trace, out, say), tmp_path)
    prefill, decode = told["parts"][0]["engines"]
    assert decode["transferred_tokens"] == prefill["prompt_tokens"] == trace.input_tokens.sum()


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
def test_a_pair_through_nixl_says_what_one_engine_says(
    llm: Path, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """A prefill and a decode worker behind our router give the same tokens as the prefill worker alone; the
    decode engine computes no prompt token but the last of each: all KV came over the connector, as many
    bytes as the blocks of the prompts hold."""
    latency = StepLatency((1.0, 512.0), (0.002, 0.02), 1e-8, 1e-5, 1e-8, 1e-5, 0.0, "any")
    engine = WorkerType(read_catalog().gpu("h100-80g"), 1, latency, KV_TOKENS, 512, 32)
    fleet = fleet_of(llm, engine, ("prefill", "prefill", 1), ("decode", "decode", 1))
    trace = a_trace(2, 1.0, seed=0)
    setup = ValidationSetup(fleet, trace, slo=Slo(()), max_model_len=MAX_MODEL_LEN)

    async def ids(client: aiohttp.ClientSession, url: str, tokens: int, *, stream: bool) -> list[int]:
        body = {
            "model": fleet.llm.name,
            "prompt": unique_prompt(tokens, tokens, 0),
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        async with client.post(f"{url}/v1/completions", json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
        events = [json.loads(line) for line in lines]
        return [t for event in events for choice in event["choices"] for t in choice["token_ids"]]

    async def run() -> tuple[list[list[int]], list[list[int]], Sequence[dict[str, Any]]]:
        commands, devices = engine_commands(setup, tmp_path)
        async with run_engines(place_workers(fleet, tmp_path / "engines", devices), commands) as group:
            router = LiveRouter(group.workers, fleet)
            async with listening(router.app, "127.0.0.1", 0) as url, aiohttp.ClientSession() as client:
                before = await scrape_counters(client, group)
                pair = [await ids(client, url, tokens, stream=tokens % 200 == 0) for tokens in PAIR_TOKENS]
                engines = traffic_counters(before, await scrape_counters(client, group))
                alone = [await ids(client, group.workers[0].url, t, stream=False) for t in PAIR_TOKENS]
                assert not router.in_flight and not router.live.workers["assigned"].any()
        return pair, alone, engines

    pair, alone, (prefill, decode) = asyncio.run(run())
    say(f"decode engine: {decode}")
    assert pair == alone and {len(answer) for answer in pair} == {12}
    assert prefill["prompt_tokens"] == decode["prompt_tokens"] == sum(PAIR_TOKENS)
    assert decode["transferred_tokens"] == sum(PAIR_TOKENS)
    blocks = sum(-(-tokens // CPU_BLOCK_TOKENS) for tokens in PAIR_TOKENS)
    assert decode["transferred_bytes"] == blocks * CPU_BLOCK_TOKENS * fleet.llm.kv_bytes_per_token
