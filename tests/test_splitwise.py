"""Splitwise's machines and pools in the kernel: against the plain ones, by hand, and what must hold for any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from reference_splitwise import Cluster, Fit, Limits, Lookup, Machine
from reference_splitwise import Request as Plain
from reference_splitwise import Steps as PlainSteps

from benchmarks.peers import splitwise as peer
from benchmarks.peers.compare import BARE_GPU, NO_STEPS, bare_llm, compare
from planner.domain import Disturbance, Fleet, Limit, Network, Policies, Pool, WorkerType
from planner.errors import InputError
from planner.models.forms import SplitwiseLookup, interpolated
from planner.simulator.metrics import gaps_s
from planner.simulator.replay import Simulation, simulate
from planner.traces import Trace

REFERENCE = Path(__file__).parents[2] / "shared" / "reference" / "splitwise"
KNOTS = (1.0, 20.0, 200.0)
ROUTING = {"token_jsq": "token-jsq", "mixed_pool": "token-jsq", "kv_token_jsq": "kv-token-jsq"}
Rows = list[tuple[float, int, int]]


def trace_of(rows: Rows) -> Trace:
    arrival_s, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    return Trace("made", arrival_s.astype(float), inputs.astype(np.int64), outputs.astype(np.int64))


def fleet_of(
    steps: SplitwiseLookup,
    roles: Sequence[str] = ("",),
    policy: str = "token_jsq",
    *,
    kv_tokens: int = 10**6,
    tasks: int = 512,
    tokens: int = 2048,
    bytes_per_s: float = math.inf,
) -> Fleet:
    worker = WorkerType(BARE_GPU, 1, NO_STEPS, kv_tokens, tokens, tasks, form=steps)
    pools = tuple(Pool(f"m{i}", peer.ROLES[role], worker, 1) for i, role in enumerate(roles))
    policies = Policies(
        batching="splitwise", routing=ROUTING[policy], decode_routing=ROUTING[policy],
        pools="splitwise" if policy == "mixed_pool" else "static",
    )  # fmt: skip
    return Fleet(bare_llm(1.0), pools, policies, Network(bytes_per_s, transfer="serialised", is_shared=False))


def plain_steps(steps: SplitwiseLookup) -> PlainSteps:
    def prompt_s(tokens: float) -> float:
        return float(interpolated(np.array([tokens]), steps.knots_tokens, steps.prompt_s)[0])

    def token_s(tokens: float) -> float:
        return float(interpolated(np.array([tokens]), steps.knots_tokens, steps.token_s)[0])

    if len(steps.token_s) == 1:
        return Fit(prompt_s, steps.token_s[0], steps.b_s, steps.d_s)
    return Lookup(prompt_s, token_s)


def plainly(fleet: Fleet, roles: Sequence[str], policy: str, rows: Rows) -> list[Plain] | None:
    """The same cluster in the plain simulator, with memory for a little more than whole tokens; None where
    transfers wait for ever."""
    worker = fleet.pools[0].type
    limits = Limits(4 * worker.kv_tokens + 1, 0, 4, worker.max_num_seqs, worker.max_num_batched_tokens)
    assert isinstance(worker.form, SplitwiseLookup)
    machines = [Machine(i, plain_steps(worker.form), limits, role) for i, role in enumerate(roles)]
    requests = [Plain(*row) for row in rows]
    try:
        Cluster(machines, policy, 4 * fleet.network.bandwidth_bytes_per_s, requests).run()
    except ValueError:
        return None
    return requests


def random_case(seed: int) -> tuple[Fleet, tuple[str, ...], str, Rows]:
    """Small, so that prompts evict decodes, memory is short, transfers wait and pools change."""
    rng = np.random.default_rng(seed)
    policy = str(rng.choice(["token_jsq", "mixed_pool", "mixed_pool", "kv_token_jsq"]))
    roles = ("",) * int(rng.integers(1, 4))
    if policy != "token_jsq":
        roles = ("prompt",) * int(rng.integers(1, 4)) + ("token",) * int(rng.integers(1, 4))
    honest = bool(rng.integers(2))
    steps = SplitwiseLookup(
        KNOTS,
        tuple(np.cumsum(rng.uniform(0.05, 1.0, 3)).tolist()),
        (float(rng.uniform(0.1, 0.3)),) if honest else tuple(rng.uniform(0.1, 0.4, 3).tolist()),
        b_s=float(rng.uniform(0, 0.02)) if honest else 0.0,
        d_s=float(rng.uniform(0, 0.002)) if honest else 0.0,
    )
    n = int(rng.integers(1, 60))
    arrival_s = np.cumsum(rng.exponential(rng.choice([0.05, 0.3, 2.0]), n))
    inputs, outputs = rng.integers(1, int(rng.choice([20, 60])), n), rng.integers(2, 30, n)
    fleet = fleet_of(
        steps, roles, policy,
        kv_tokens=int(rng.choice([90, 150, 400, 10**6])), tasks=int(rng.choice([1, 3, 8, 30])),
        tokens=int(rng.choice([30, 40, 100])), bytes_per_s=float(rng.choice([50.0, 1000.0])),
    )  # fmt: skip
    rows = [(float(t), int(i), int(o)) for t, i, o in zip(arrival_s, inputs, outputs, strict=True)]
    return fleet, roles, policy, rows


def stamps(simulation: Simulation) -> npt.NDArray[np.float64]:
    """(3, n): when the prompt started, when it ended, when the request was done."""
    return np.stack([simulation.queue_s, simulation.ttft_s, simulation.e2e_s]) + simulation.arrival_s


@pytest.mark.parametrize("seed", range(200))
def test_the_kernel_equals_the_plain_machines(seed: int) -> None:
    """Every stamp of every request, to 1e-9 s, and its machines. What the plain one leaves undone is rejected,
    and where it never ends the kernel does."""
    fleet, roles, policy, rows = random_case(seed)
    plain = plainly(fleet, roles, policy, rows)
    simulation = simulate(fleet, trace_of(rows))
    if plain is None:
        assert simulation.complete
        return
    done = np.array([not math.isnan(request.finish_s) for request in plain])
    assert simulation.complete and np.array_equal(simulation.status == 0, done)
    expected = np.array([[r.prompt_start_s, r.first_token_s, r.finish_s] for r in plain]).T
    assert stamps(simulation) == pytest.approx(expected, rel=1e-12, abs=1e-9, nan_ok=True)
    machines = np.array([[r.prompt_machine, r.token_machine] for r in plain]).T
    assert np.array_equal(
        np.stack([simulation.prefill_worker, simulation.decode_worker])[:, done], machines[:, done]
    )
