"""What each tenant of a trace costs on a fleet.

The bill is divided among the pools by their prices, and a pool's part among tenants by the seconds of its
workers that their requests take. A prompt takes its tokens' share of a full step, and its attention; a token
of output takes its share of a step with as many decodes as ran on average, and what it reads of the KV cache.
Prompt tokens that a prefix cache had take nothing. What stands idle is paid by all in the same proportion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.fleet import Fleet, Pool
from planner.search.problem.bill import bill_fleet
from planner.simulator.simulation import Simulation

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TenantCost:
    """A tenant's requests and tokens, and its part of the bill; over the whole trace."""

    tenant: str
    requests: int
    input_tokens: int
    output_tokens: int
    share_frac: float
    usd_per_h: float
    usd_per_million_tokens: float


def tenant_costs(simulation: Simulation, fleet: Fleet) -> tuple[TenantCost, ...]:
    """Costs in the order of the trace's tenants; empty where it names none."""
    if not simulation.tenants:
        return ()
    pool_of = np.repeat(np.arange(len(fleet.pools)), [pool.count for pool in fleet.pools])
    shares, total = np.zeros(len(simulation.tenants)), bill_fleet(fleet).usd_per_h
    prices = np.array([pool.count * pool.type.price_usd_per_h for pool in fleet.pools])
    gpus = np.array([pool.count * pool.type.gpus for pool in fleet.pools], dtype=float)
    weights = prices if prices.sum() > 0 else gpus
    used = 0.0
    for number, pool in enumerate(fleet.pools):
        work_s = _work_s(simulation, pool, number, pool_of)
        per_tenant = np.bincount(simulation.tenant, weights=work_s, minlength=len(shares))
        if per_tenant.sum() > 0:
            shares += weights[number] * per_tenant / per_tenant.sum()
            used += weights[number]
    shares = shares / used if used else shares
    hours = max(float(simulation.end_s - simulation.arrival_s[0]), 1e-9) / 3600
    costs = []
    for u, name in enumerate(simulation.tenants):
        mine = simulation.tenant == u
        inputs, outputs = (int(n[mine].sum()) for n in (simulation.input_tokens, simulation.output_tokens))
        usd = total * float(shares[u])
        per_million = 1e6 * usd * hours / max(inputs + outputs, 1)
        costs.append(TenantCost(name, int(mine.sum()), inputs, outputs, float(shares[u]), usd, per_million))
    return tuple(costs)


def _work_s(simulation: Simulation, pool: Pool, number: int, pool_of: npt.NDArray[np.int64]) -> Floats:
    """Seconds of the pool's workers that each request takes (n,)."""
    step_s, budget = pool.type.latency.step_s, pool.type.max_num_batched_tokens
    cached = (
        np.zeros(len(simulation.tenant)) if simulation.cached_tokens is None else simulation.cached_tokens
    )
    tokens = np.maximum(simulation.input_tokens - cached, 1).astype(float)
    full_s = float(step_s(budget))
    pairs = tokens * cached + tokens * (tokens + 1) / 2
    prefill_s = tokens * full_s / budget + (step_s(budget, pairs) - full_s)
    gaps = simulation.output_tokens - 1.0
    decoding_s = np.nan_to_num(simulation.e2e_s - simulation.ttft_s)
    here = _in_pool(simulation.decode_worker, number, pool_of)
    span_s = max(float(simulation.end_s - simulation.arrival_s[0]), 1e-9)
    batch = max(float(decoding_s[here].sum()) / (span_s * max(pool.count, 1)), 1.0)
    alone_s = float(step_s(batch, 0.0, batch))
    context = simulation.input_tokens + simulation.output_tokens / 2
    reads_s = step_s(batch, 0.0, batch, context) - alone_s
    decode_s = gaps * (alone_s / batch + reads_s)
    prefilled = _in_pool(simulation.prefill_worker, number, pool_of)
    return np.asarray(np.where(prefilled, prefill_s, 0.0) + np.where(here, decode_s, 0.0))


def _in_pool(
    worker: npt.NDArray[np.int64], number: int, pool_of: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    known = (worker >= 0) & (worker < len(pool_of))
    return np.asarray(known & (pool_of[np.where(known, worker, 0)] == number))


def tenant_rows(costs: tuple[TenantCost, ...]) -> list[dict[str, Any]]:
    """The tenants as `plan simulate --json` prints them, the most expensive first."""
    return [
        {
            "tenant": cost.tenant,
            "requests": cost.requests,
            "input_tokens": cost.input_tokens,
            "output_tokens": cost.output_tokens,
            "share_frac": cost.share_frac,
            "usd_per_h": cost.usd_per_h,
            "usd_per_million_tokens": cost.usd_per_million_tokens,
        }
        for cost in sorted(costs, key=lambda cost: -cost.usd_per_h)
    ]
