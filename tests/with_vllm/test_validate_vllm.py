"""`plan validate` on a real vLLM on the CPU: profile, fit, two workers; a pair through NIXL. `make test-vllm`

What is asserted holds on a busy machine too: every request ends, token for token, and the engines count what
the trace says. How far the prediction was off is printed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from planner.catalog import read_catalog
from planner.domain import Fleet, Network, Policies, Pool, Role, Slo, WorkerType
from planner.files import to_yaml
from planner.models.latency import StepLatency
from planner.models.step_fit import PiecewiseLinearStepLatency
from planner.models.tables import read_step_table
from planner.output import fleet_document
from planner.simulator import simulate
from planner.traces import Trace
from profiling.vllm_install import is_installed
from runtime.replay import prompt
from runtime.router import Router, listening
from runtime.validate import Wanted, counted, engine_commands, scrape
from runtime.workers import CPU_BLOCK_TOKENS, places, started

if not is_installed():
    pytest.skip("vLLM is not installed (make test-vllm)", allow_module_level=True)

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
BUDGET_S = 40
LOAD = 0.6  # of the rate that the fleet sustains in simulation
REQUESTS = 120
MAX_MODEL_LEN = 2048
KV_TOKENS = 64 * 1024
PAIR_TOKENS = (100, 256, 1000, 1500)


@pytest.fixture(scope="module")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """To the log of the run, past pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(text: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stdout.write(f"\n    {text}")

    return write


@pytest.fixture(scope="module")
def latency(tmp_path_factory: pytest.TempPathFactory) -> StepLatency:
    """The fit of a short profile of one engine on one core."""
    table = tmp_path_factory.mktemp("profile") / "table.csv"
    core = str(max(os.sched_getaffinity(0)))
    plan("profile", str(TINY), "-o", str(table), "--engine", "vllm", "--budget", str(BUDGET_S),
         "--max-num-batched-tokens", "512", "--max-num-seqs", "32", "--max-model-len", str(MAX_MODEL_LEN),
         "--eager", OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND=core)  # fmt: skip
    steps = read_step_table(table)
    return PiecewiseLinearStepLatency(beyond="extrapolate").fit(steps.X, steps.y).latency_


def plan(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", *arguments], capture_output=True, text=True, timeout=500,
        env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def fleet_of(latency: StepLatency, *pools: tuple[str, Role, int]) -> Fleet:
    catalog = read_catalog()
    engine = WorkerType(catalog.gpu("h100-80g"), 1, latency, KV_TOKENS, 512, 32)  # the GPU is not used
    llm = catalog.llm(str(TINY))
    return Fleet(llm, tuple(Pool(name, role, engine, n) for name, role, n in pools), Policies(), Network(1e9))


def a_trace(requests: int, rate_rps: float, seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / rate_rps, requests))
    return Trace("made up", arrival_s, rng.integers(400, 1800, requests), rng.integers(4, 24, requests))


def sustained_rps(fleet: Fleet) -> float:
    """Requests per second when all of a long trace is there from the start."""
    trace = a_trace(1000, 1e6, seed=1)
    return len(trace) / simulate(fleet, trace).end_s


def test_two_mixed_workers_serve_all_of_the_trace(
    latency: StepLatency, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """120 requests at 60 % of the sustained rate, open loop: each finishes with its length, the two engines
    have counted every prompt and output token once, hold as many KV tokens as the plan says and keep none.
    Predicted against measured is printed. Asserted is only that on the engines' own clocks, with fits
    corrected by the run's own steps, the median of end-to-end times is right within 30 %."""
    fleet = fleet_of(latency, ("mixed", "mixed", 2))
    rate_rps = LOAD * sustained_rps(fleet)
    trace = a_trace(REQUESTS, rate_rps, seed=2)
    (tmp_path / "fleet.yaml").write_text(to_yaml(fleet_document(fleet) | {"max_model_len": MAX_MODEL_LEN}))
    lines = zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True)
    (tmp_path / "trace.csv").write_text(
        "arrival_s,input_tokens,output_tokens\n" + "".join(f"{a:.6f},{i},{o}\n" for a, i, o in lines)
    )
    out = tmp_path / "out"
    files = [str(tmp_path / "fleet.yaml"), "--trace", str(tmp_path / "trace.csv"), "-o", str(out)]
    done = plan("validate", *files, "--json")
    told: dict[str, Any] = json.loads(done.stdout)
    loads = [load for part in told["parts"] for load in part["load_average"]]
    say(f"{rate_rps:.1f} requests/s on two workers, load average {min(loads):.1f} to {max(loads):.1f}")
    columns = [told[name] for name in ("errors", "errors_undisturbed", "errors_corrected")]
    for rows in zip(*columns, strict=True):
        row, errors = rows[0], [f"{100 * row['error_frac']:+.0f} %" for row in rows]
        if row["percentile"] != "p99":
            say(f"{row['metric']} {row['percentile']}: predicted {1e3 * row['predicted_s']:.1f} ms, measured "
                f"{1e3 * row['measured_s']:.1f} ms: {errors[0]}, without interruptions {errors[1]}, and "
                f"corrected fits {errors[2]}")  # fmt: skip
    say(told["verdict"])
    assert (told["finished"], told["rejected"], told["failed"]) == (REQUESTS, 0, 0)
    assert told["times"] == "engines' step logs"
    engines = told["parts"][0]["engines"]
    assert sum(engine["prompt_tokens"] for engine in engines) == trace.input_tokens.sum()
    assert sum(engine["generation_tokens"] for engine in engines) == trace.output_tokens.sum()
    assert all(engine["kv_tokens"] == KV_TOKENS for engine in engines)
    assert all(engine["kv_cache_usage_perc"] == 0 for engine in engines)
    assert told["steps"][0]["steps"] > REQUESTS
    fixed = {(row["metric"], row["percentile"]): row for row in told["errors_corrected"]}
    assert abs(fixed["e2e", "p50"]["error_frac"]) < 0.3
    table = (out / "requests.csv").read_text().splitlines()[1:]
    assert {row.split(",")[5] for row in table} == {"mixed-0", "mixed-1"}
    assert all(0 < float(row.split(",")[8]) <= float(row.split(",")[11]) for row in table)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
def test_a_pair_through_nixl_says_what_one_engine_says(tmp_path: Path, say: Callable[[str], None]) -> None:
    """A prefill and a decode worker behind our router give the same tokens as the prefill worker alone; the
    decode engine computes no prompt token but the last of each: all KV came over the connector, as many
    bytes as the blocks of the prompts hold."""
    latency = StepLatency((1.0, 512.0), (0.002, 0.02), 1e-8, 1e-5, 1e-8, 1e-5, 0.0, "any")
    fleet = fleet_of(latency, ("prefill", "prefill", 1), ("decode", "decode", 1))
    trace = a_trace(2, 1.0, seed=0)
    wanted = Wanted(fleet, trace, slo=Slo(()), max_model_len=MAX_MODEL_LEN)

    async def ids(client: aiohttp.ClientSession, url: str, tokens: int, *, stream: bool) -> list[int]:
        body = {
            "model": fleet.llm.name, "prompt": prompt(tokens, tokens, 0), "max_tokens": 12, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "stream": stream,
        }  # fmt: skip
        async with client.post(f"{url}/v1/completions", json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
        events = [json.loads(line) for line in lines]
        return [t for event in events for choice in event["choices"] for t in choice["token_ids"]]

    async def run() -> tuple[list[list[int]], list[list[int]], Sequence[dict[str, Any]]]:
        commands, devices = engine_commands(wanted, tmp_path)
        async with started(places(fleet, tmp_path / "engines", devices), commands) as group:
            router = Router(group.workers, fleet.llm.name, fleet.policies)
            async with listening(router.app, "127.0.0.1", 0) as url, aiohttp.ClientSession() as client:
                before = await scrape(client, group)
                pair = [await ids(client, url, tokens, stream=tokens % 200 == 0) for tokens in PAIR_TOKENS]
                engines = counted(before, await scrape(client, group))
                alone = [await ids(client, group.workers[0].url, t, stream=False) for t in PAIR_TOKENS]
                assert not router.in_flight and not any(worker.load.requests for worker in group.workers)
        return pair, alone, engines

    pair, alone, (prefill, decode) = asyncio.run(run())
    say(f"decode engine: {decode}")
    assert pair == alone and {len(answer) for answer in pair} == {12}
    assert prefill["prompt_tokens"] == decode["prompt_tokens"] == sum(PAIR_TOKENS)
    assert decode["transferred_tokens"] == sum(PAIR_TOKENS)
    blocks = sum(-(-tokens // CPU_BLOCK_TOKENS) for tokens in PAIR_TOKENS)
    assert decode["transferred_bytes"] == blocks * CPU_BLOCK_TOKENS * fleet.llm.kv_bytes_per_token
