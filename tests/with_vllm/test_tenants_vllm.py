"""Tenants on a real vLLM on the CPU: `plan serve` with the queue dlpm-held, two engines. `make test-vllm`"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import fleet_document
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Network, Policies, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.runtime.launch import WORKER_HEADER
from planner.runtime.live_replay import trace_prompt
from planner.runtime.workers import free_port
from planner.simulator import simulate
from planner.traffic.trace import Trace
from profiling.vllm_install import is_installed

if not is_installed():
    pytest.skip("vLLM is not installed (make test-vllm)", allow_module_level=True)

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
PATIENCE_S = 600
MIXES = 20
FLOOD = 80  # Prompts of the tenant that asks for too much, all at once.
STEP_TOKENS = 512
QUANTUM_TOKENS = 600
SHORTEST_TOKENS = 200
# Prompts of the flood that a worker may begin while another tenant waits: those that the router has sent (two
# steps), a quantum, and one that exceeds it.
MOST_BEFORE = 2 * STEP_TOKENS // SHORTEST_TOKENS + QUANTUM_TOKENS // SHORTEST_TOKENS + 1


def a_mix(seed: int) -> Trace:
    """A flood at 0 s; one to three other tenants ask a few times while it is served."""
    rng = np.random.default_rng(seed)
    others = [u for u in range(1, 1 + rng.integers(1, 4)) for _ in range(rng.integers(1, 4))]
    tenant = np.array([0] * FLOOD + others)
    arrival_s = np.concatenate((np.zeros(FLOOD), rng.uniform(0.05, 0.4, len(others))))
    order = np.argsort(arrival_s, kind="stable")
    return Trace(
        "a flood",
        arrival_s[order],
        rng.integers(SHORTEST_TOKENS, 500, len(tenant)),
        rng.integers(2, 8, len(tenant)),
        tenant=tenant[order],
        tenants=("flood", "a", "b", "c")[: 1 + tenant.max()],
    )


def two_engines(queue: str) -> Fleet:
    latency = StepLatency((1.0, 512.0), (0.005, 0.05), 1e-8, 1e-5, 1e-8, 1e-5, 0.0, "any")
    catalog = read_catalog()
    kind = WorkerType(catalog.gpu("h100-80g"), 1, latency, 64 * 1024, STEP_TOKENS, 32)
    policies = Policies(queue=queue, routing="least-outstanding", quantum_tokens=QUANTUM_TOKENS)
    return Fleet(catalog.llm(str(TINY)), (Pool("mixed", "mixed", kind, 2),), policies, Network(1e9))


@contextmanager
def serving(fleet: Fleet, folder: Path) -> Iterator[str]:
    """The address of `plan serve` with this fleet."""
    folder.mkdir()
    (folder / "fleet.yaml").write_text(to_yaml(fleet_document(fleet) | {"max_model_len": 2048}))
    port = free_port()
    command = [sys.executable, "-m", "planner.cli", "serve", str(folder / "fleet.yaml")]
    command += ["--weights", "dummy", "--port", str(port), "--logs", str(folder / "engines")]
    with (folder / "serve.log").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        asyncio.run(until_up(f"http://127.0.0.1:{port}", process, folder / "serve.log"))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end_s = time.monotonic() + PATIENCE_S
    async with aiohttp.ClientSession() as client:
        while time.monotonic() < end_s and process.poll() is None:
            try:
                async with client.get(f"{url}/health") as answer:
                    if (await answer.json())["up"] == 2:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


async def first_tokens_s(
    trace: Trace, url: str, llm: str, part: int
) -> tuple[list[float], list[float], list[str]]:
    """When each request was sent, when its first token came, and from which worker."""
    sent_s, first_s, workers = [0.0] * len(trace), [0.0] * len(trace), [""] * len(trace)
    start_s = time.monotonic()

    async def one(client: aiohttp.ClientSession, i: int) -> None:
        await asyncio.sleep(start_s + float(trace.arrival_s[i]) - time.monotonic())
        body = {
            "model": llm,
            "prompt": trace_prompt(trace, i, part),
            "max_tokens": int(trace.output_tokens[i]),
            "stream": True,
            "user": trace.tenants[trace.tenant[i]],
            "ignore_eos": True,
        }
        sent_s[i] = time.monotonic()
        async with client.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.content.readany()
            first_s[i], workers[i] = time.monotonic(), answer.headers[WORKER_HEADER]
            await answer.read()

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        await asyncio.gather(*(one(client, i) for i in range(len(trace))))
    return sent_s, first_s, workers


def overtaken_by_flood(trace: Trace, sent_s: list[float], first_s: list[float], workers: list[str]) -> int:
    """The most prompts of the flood that any other request's worker began while that request waited."""
    flood = np.flatnonzero(trace.tenant == 0).tolist()
    return max(
        sum(sent_s[i] < first_s[k] < first_s[i] and workers[k] == workers[i] for k in flood)
        for i in np.flatnonzero(trace.tenant > 0).tolist()
    )


@pytest.mark.slow
def test_a_tenant_that_floods_keeps_others_waiting_no_longer_than_the_bound(
    tmp_path: Path, say: Callable[[str], None]
) -> None:
    """20 mixes of a flood and one to three tenants who ask now and then, on two engines: while one of these
    waits, its worker begins no more of the flood than DLPM at the router allows, as simulated and on vLLM.
    First come, first served it begins most of what it has.
    """
    for queue, mixes in (("dlpm-held", MIXES), ("fcfs", 2)):
        fleet = two_engines(queue)
        with serving(fleet, tmp_path / queue) as url:
            for seed in range(mixes):
                trace = a_mix(seed)
                live = overtaken_by_flood(
                    trace, *asyncio.run(first_tokens_s(trace, url, fleet.llm.name, seed))
                )
                found = simulate(fleet, trace)
                simulated = overtaken_by_flood(
                    trace,
                    found.arrival_s.tolist(),
                    (found.arrival_s + found.ttft_s).tolist(),
                    [str(w) for w in found.prefill_worker],
                )
                say(f"{queue}, mix {seed}: the flood began {live} prompts before, simulated {simulated}")
                if queue == "dlpm-held":
                    assert simulated <= MOST_BEFORE and live <= MOST_BEFORE
                else:
                    assert simulated > 2 * MOST_BEFORE and live > 2 * MOST_BEFORE
