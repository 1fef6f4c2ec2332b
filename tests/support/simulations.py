"""Small fleets and traces by hand or by chance, and the two simulators held against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from simulator_reference import Reference

from planner.domain import Gpu, Limit, Metric
from planner.fleet import Fleet, Network, Policies, Pool, Role, WorkerType
from planner.models.kv_layout import ExtraKv
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.simulator.recorded_gaps import gaps_s
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

ROUTING = ("jsq", "least-outstanding", "round-robin")


GPU = Gpu("paper", 1e3, 100.0, 1000.0, "wire", 10.0, 1.0, 8, 1.0, "paper", "paper")


# 2 * 4 layers * 1 head * 1 * 2 bytes: 16 bytes per token, 256 bytes per block of KV
LLM = Llm("paper", layers=4, hidden=4, heads=2, kv_heads=1, head_dim=1, ffn=8, vocab=10, context_tokens=64)


def make_trace(arrival_s: npt.ArrayLike, input_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike) -> Trace:
    return Trace(
        "made",
        np.asarray(arrival_s, dtype=float),
        np.asarray(input_tokens, dtype=np.int64),
        np.asarray(output_tokens, dtype=np.int64),
    )


def random_prompts(rng: np.random.Generator, n: int, block: int) -> tuple[list[list[int]], list[int]]:
    """Blocks of `n` prompts that begin in a random tree, and their tokens: one in two ends within a block."""
    paths: list[list[int]] = [[]]
    for _ in range(40):
        above = paths[rng.integers(len(paths))]
        paths.append([*above, int(rng.integers(3))])
    blocks = [paths[rng.integers(1, len(paths))] + [100 + int(rng.integers(9))] for _ in range(n)]
    tokens = [len(ids) * block - int(rng.integers(block)) * int(rng.integers(2)) for ids in blocks]
    return blocks, tokens


def prefix_trace(
    arrival_s: list[float],
    blocks: list[list[int]],
    *,
    tokens: list[int] | None = None,
    outputs: list[int] | None = None,
    tenant: list[int] | None = None,
    block: int = 16,
) -> Trace:
    """Prompts of these blocks; `tokens` where they do not fill them."""
    n = len(arrival_s)
    counts = [len(ids) for ids in blocks]
    return Trace(
        name="made",
        arrival_s=np.array(arrival_s, float),
        input_tokens=np.array(tokens or [count * block for count in counts]),
        output_tokens=np.array(outputs or [1] * n),
        prefix_offsets=np.concatenate(([0], np.cumsum(counts))),
        prefix_ids=np.array([one for ids in blocks for one in ids], np.int64),
        prefix_block_tokens=block,
        tenant=np.array(tenant or [0] * n),
        tenants=tuple(f"t{u}" for u in range(max(tenant or [0]) + 1)),
    )


def make_latency(
    f_s: Sequence[float] = (1.0, 1.0),
    *,
    knots: Sequence[float] = (1, 1024),
    a: float = 0.0,
    b: float = 0.0,
    d: float = 0.0,
    e: float = 0.0,
    h: float = 0.0,
    m: float = 0.0,
) -> StepLatency:
    return StepLatency(tuple(knots), tuple(f_s), a, b, d, e, h, "by hand", m_s=m)


def make_pool(
    latency: StepLatency,
    *,
    role: Role = "mixed",
    count: int = 1,
    kv_tokens: int = 16 * 1000,
    budget: int = 512,
    seats: int = 8,
    name: str = "w",
) -> Pool:
    return Pool(name, role, WorkerType(GPU, 1, latency, kv_tokens, budget, seats), count)


def random_case(seed: int, *, dyadic: bool) -> tuple[Fleet, Trace, tuple[Limit, ...], int]:
    """A small fleet, trace, limits and closed-loop count.

    With `dyadic` times are multiples of 2^-10 s, sums are exact, workers come in identical pairs, and events
    coincide; else numbers are continuous and no worker is like another, so that no two events do.
    """
    rng = np.random.default_rng([seed, dyadic])

    def number(low: float, high: float) -> float:
        value = rng.uniform(low, high)
        return round(value * 1024) / 1024 if dyadic else value

    def pool(role: Role, index: int) -> Pool:
        seats = int(rng.choice([1, 2, 3, 8, 32]))
        budget = max(seats, int(rng.choice([4, 16, 50, 512])))
        knots = np.sort(rng.choice(np.array([1, 2, 4, 8, 16, 32, 64, 128]), 3, replace=False))
        f_s = number(0.01, 0.1) + np.cumsum([0.0, *(number(0, 0.1) * np.diff(knots))])
        coefficients = {name: number(0, 0.02) * rng.integers(2) for name in "abdeh"}
        coefficients["m"] = coefficients["d"] * (seed % 2)
        kv_tokens = 16 * int(rng.choice([5, 7, 10, 16, 1000]))
        count = int(rng.integers(1, 4)) if dyadic else 1
        latency = make_latency(f_s.tolist(), knots=knots.tolist(), **coefficients)
        return make_pool(
            latency, role=role, count=count, kv_tokens=kv_tokens, budget=budget, seats=seats, name=f"w{index}"
        )

    kind = rng.integers(4)  # two in four are disaggregated, one of them with mixed workers too
    roles: list[Role] = []
    if kind in (0, 1, 3):
        roles += ["mixed"] * int(rng.integers(1, 4))
    if kind >= 2:
        roles += ["prefill"] * int(rng.integers(1, 3))
        roles += ["decode"] * int(rng.integers(1, 3))
    transfer: Literal["serialised", "layerwise"] = "serialised" if rng.integers(2) else "layerwise"
    fleet = Fleet(
        LLM,
        tuple(pool(role, i) for i, role in enumerate(roles)),
        Policies(routing=str(rng.choice(ROUTING)), decode_routing=str(rng.choice(ROUTING))),
        Network(2.0 ** rng.integers(8, 18) * (1 if dyadic else rng.uniform(1, 2)), number(0, 0.1), transfer),
    )
    n = int(rng.integers(5, 60))
    gaps_s = [number(0, 2.0 ** -rng.integers(0, 6)) * (rng.uniform() < 0.8) for _ in range(n)]
    longest = int(rng.choice([3, 20, 70]))
    trace = make_trace(
        np.cumsum(gaps_s), rng.integers(1, longest + 1, n), rng.integers(1, int(rng.choice([2, 20, 60])), n)
    )
    metrics: tuple[Metric, ...] = ("ttft", "tbt", "tpot", "e2e", "tbt")
    limits = tuple(
        Limit(metric, float(rng.uniform(0.3, 1)), 0.02 * 500 ** rng.uniform()) for metric in metrics
    )
    return fleet, trace, limits, int(rng.integers(1, 12)) if rng.uniform() < 0.2 else 0


def beside(fleet: Fleet, seed: int) -> Fleet:
    """The same fleet where sequences take windows and states of the KV cache beside their tokens."""
    rng = np.random.default_rng([seed, 5])

    def drawn() -> ExtraKv:
        ratio = float(rng.choice([0.0, 0.5, 1.0, 2.6]))
        return ExtraKv(int(rng.integers(0, 4)), ratio, int(rng.integers(1, 4)) if ratio else 0)

    pools = tuple(replace(pool, type=replace(pool.type, extra_kv=drawn())) for pool in fleet.pools)
    return replace(fleet, pools=pools)


def compare(
    fleet: Fleet,
    trace: Trace,
    limits: tuple[Limit, ...],
    closed_loop: int,
    reference: type[Reference] = Reference,
) -> tuple[Simulation, Reference]:
    """Every number of the two simulators, held against each other."""
    fast = simulate(fleet, trace, limits=limits, record=True, closed_loop=closed_loop)
    slow = reference(fleet, trace, closed_loop=closed_loop).run()

    def same(ours: npt.ArrayLike, theirs: npt.ArrayLike, what: str) -> None:
        np.testing.assert_allclose(
            np.asarray(ours, float), np.asarray(theirs, float), rtol=1e-9, atol=1e-9, err_msg=what
        )

    assert [("finished", "rejected")[s] for s in fast.status] == [r.status for r in slow.requests]
    for what in ("prefill_worker", "decode_worker", "preemptions"):
        np.testing.assert_array_equal(
            getattr(fast, what), [getattr(r, what) for r in slow.requests], err_msg=what
        )
    for what in ("arrival_s", "ttft_s", "tpot_s", "tbt_max_s", "e2e_s"):
        same(getattr(fast, what), [getattr(r, what) for r in slow.requests], what)
    same(fast.queue_s, [r.scheduled_s - r.arrival_s for r in slow.requests], "queue_s")
    same(fast.worker_busy_s, [w.busy_s for w in slow.workers], "busy_s")
    np.testing.assert_array_equal(fast.worker_steps, [w.steps for w in slow.workers])
    np.testing.assert_array_equal(fast.worker_tokens, [w.tokens for w in slow.workers])
    values, weights = gaps_s(fast)
    same(np.sort(np.repeat(values, weights.astype(int))), slow.gaps(), "gaps")
    assert fast.violations.tolist() == slow.violations(limits)
    assert fast.counted.tolist() == [len(slow.values(limit.metric)) for limit in limits]
    assert fast.complete
    return fast, slow


def mixed(latency: StepLatency, *, budget: int = 512, seats: int = 8, kv_tokens: int = 16000) -> Fleet:
    return Fleet(LLM, (make_pool(latency, budget=budget, seats=seats, kv_tokens=kv_tokens),))


def one_bad_hour() -> tuple[Fleet, Trace]:
    """One seat that serves a request of one token in 1 s; five hours of a request every 10 s, but in the
    third hour five at a time every 50 s, which wait 1, 2, 3, 4 and 5 s for their token."""
    calm = np.arange(0, 3600, 10.0)
    crowded = np.repeat(np.arange(0, 3600, 50.0), 5)
    arrival_s = np.concatenate([hour * 3600 + (crowded if hour == 2 else calm) for hour in range(5)])
    ones = np.ones(len(arrival_s), int)
    return mixed(make_latency(), seats=1), make_trace(arrival_s, ones, ones)
