"""Every batching policy, with pipelines, preemption and several replicas, against the plain simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference_batching import Request, Settings, Step
from reference_batching import simulate as plainly
from shares import some
from simulations import GPU, LLM, make_latency, make_trace

from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

POLICIES = ("sarathi", "vllm-v0", "orca", "faster-transformer", "lightllm")


def random_case(seed: int, batching: str) -> tuple[Fleet, Trace, Settings]:
    """A few dozen requests on one to three replicas, often short of KV, sometimes with pipeline stages."""
    rng = np.random.default_rng([seed, POLICIES.index(batching)])
    n = int(rng.integers(5, 40))
    trace = make_trace(
        np.cumsum(rng.exponential(rng.choice([0.3, 2.0, 10.0]), n)),
        rng.integers(1, rng.choice([30, 120]), n),
        rng.integers(1, rng.choice([4, 60]), n),
    )
    longest = int((trace.input_tokens + trace.output_tokens).max())
    blocks = int(np.ceil(longest / 16 * rng.choice([1.2, 2.0, 8.0]))) + 2
    pp = 1 if batching in ("lightllm", "faster-transformer") else int(rng.choice([1, 1, 2, 3]))
    seats = int(rng.choice([2, 4, 8])) if pp == 1 else 64 * pp  # the plain one divides them by the stages
    reserve = (
        longest if batching == "faster-transformer" or (batching == "orca" and rng.random() < 0.5) else 0
    )
    budget = max(int(rng.choice([16, 64, 256])), seats // pp if batching == "sarathi" else longest)
    latency = make_latency(
        (0.5, 0.5, 1.5), knots=(1, 16, 128), a=1e-4, b=0.01, d=float(rng.choice([0.0, 1e-3])), e=0.05, h=0.1
    )
    watermark_frac = float(rng.choice([0.0, 0.1]))
    policies = Policies(
        batching=batching,
        routing="round-robin",
        reserve_tokens=reserve,
        watermark_frac=watermark_frac,
        patience_steps=3,
        vidur_restarts=bool(rng.random() < 0.5),
    )
    worker = WorkerType(GPU, 1, latency, blocks * 16, max(budget, seats), seats, pp)
    settings = Settings(
        blocks=blocks,
        max_num_seqs=seats,
        token_budget=max(budget, seats),
        watermark_frac=watermark_frac,
        reserve_tokens=reserve,
        max_waiting_steps=3,
        stages=pp,
        vidur_restarts=policies.vidur_restarts,
    )
    return Fleet(LLM, (Pool("w", "mixed", worker, int(rng.integers(1, 4))),), policies), trace, settings


def seconds(latency: StepLatency, step: Step) -> float:
    pairs = sum(n * (before + (n + 1) / 2) for n, before in step.chunks)
    cached, decodes, kv_tokens = (
        sum(before for _, before in step.chunks),
        len(step.contexts),
        sum(step.contexts),
    )
    return float(latency.step_s(step.tokens, pairs, decodes, kv_tokens, len(step.chunks), cached))


def run_plainly(fleet: Fleet, trace: Trace, settings: Settings) -> list[Request]:
    requests = [
        Request(i, float(at), int(prompt), int(output))
        for i, (at, prompt, output) in enumerate(
            zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True)
        )
    ]
    pool = fleet.pools[0]
    plainly(
        requests,
        fleet.policies.batching,
        settings,
        lambda step: seconds(pool.type.latency, step),
        replicas=pool.count,
    )
    return requests


def assert_equal(result: Simulation, requests: list[Request]) -> None:
    assert result.ttft_s == pytest.approx([request.ttft_s for request in requests], rel=1e-9)
    assert result.e2e_s == pytest.approx([request.e2e_s for request in requests], rel=1e-9)
    assert result.preemptions.tolist() == [request.restarts for request in requests]
    queued = [request.scheduled_s - request.arrival_s for request in requests]
    assert result.queue_s == pytest.approx(queued, rel=1e-9, abs=1e-9)
    longest = [max(np.diff(request.token_s)) if len(request.token_s) > 1 else np.nan for request in requests]
    several = result.output_tokens > 1
    assert result.tbt_max_s[several] == pytest.approx(np.array(longest)[several], rel=1e-9)


@pytest.mark.parametrize("batching", POLICIES)
@pytest.mark.parametrize("seed", some(range(60), 20))
def test_kernel_equals_the_plain_policies(seed: int, batching: str) -> None:
    """Times of every request, preemptions and longest gaps; TTFT counts from the first time a prompt ends."""
    fleet, trace, settings = random_case(seed, batching)
    requests = run_plainly(fleet, trace, settings)
    assert_equal(simulate(fleet, trace), requests)


def test_random_cases_reach_the_corners() -> None:
    """Preemption, several stages, several replicas and waiting occur in the cases above."""
    seen = {"preempted": 0, "stages": 0, "replicas": 0}
    for batching in POLICIES:
        for seed in range(60):
            fleet, trace, _ = random_case(seed, batching)
            result = simulate(fleet, trace)
            seen["preempted"] += int(result.preemptions.sum())
            seen["stages"] += fleet.pools[0].type.pp > 1
            seen["replicas"] += fleet.pools[0].count > 1
    assert min(seen.values()) >= 20, seen


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    """vLLM v1, two stages of 1 s (2 s a step), budget 8: a prompt of 16 is two chunks, and the second is on
    the first stage while the first is on the second: 3 s instead of 4. Sarathi waits: 4 s."""
    worker = WorkerType(GPU, 1, make_latency((2.0, 2.0)), 16 * 100, 8, 4, 2)
    fleet = Fleet(LLM, (Pool("w", "mixed", worker, 1),))
    trace = make_trace([0.0], [16], [1])
    assert simulate(fleet, trace).ttft_s.tolist() == [3.0]
    waits = replace(fleet, policies=Policies(batching="sarathi"))
    assert simulate(waits, trace).ttft_s.tolist() == [4.0]
