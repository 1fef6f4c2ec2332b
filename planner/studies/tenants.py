"""Computes what each tenant of a trace costs on a fleet, from a simulation of this trace.

The bill is divided among the pools by their prices, and a pool's share among the tenants by the worker
seconds that their requests take. A prompt takes its tokens' share of a step with a full token budget, and the
time of its attention. A token of output takes its share of a step with the mean number of decodes, and the
time to read its KV cache. Prompt tokens that a prefix cache has take no time. Idle time is paid in the same
shares.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.fleet import Fleet, Pool
from planner.search.problem.bill import bill_fleet
from planner.simulator.layout import FINISHED
from planner.simulator.simulation import Floats, Simulation
from planner.units import HOUR_S

LEAST_SPAN_S = 1e-9  # A time of 0 counts as this long, because work is divided by it.


@dataclass(frozen=True, slots=True)
class TenantCost:
    """A tenant's requests and tokens in the whole trace, and its share of the bill.

    The cost per million tokens counts tokens of prompts and of outputs, of requests that finished.
    """

    tenant: str
    requests: int
    input_tokens: int
    output_tokens: int
    share_frac: float
    usd_per_h: float
    usd_per_million_tokens: float


def tenant_costs(simulation: Simulation, fleet: Fleet) -> tuple[TenantCost, ...]:
    """One row per tenant, in the trace's order; empty if the trace names no tenant."""
    if not simulation.tenants:
        return ()
    pool_of_worker = np.repeat(np.arange(len(fleet.pools)), [pool.count for pool in fleet.pools])
    shares = np.zeros(len(simulation.tenants))
    fleet_usd_per_h = bill_fleet(fleet).usd_per_h
    prices = np.array([pool.count * pool.type.price_usd_per_h for pool in fleet.pools])
    gpus = np.array([pool.count * pool.type.gpus for pool in fleet.pools], dtype=float)
    tenant_s_by_pool = [
        np.bincount(
            simulation.tenant,
            weights=_request_work_s(simulation, pool, pool_number, pool_of_worker),
            minlength=len(shares),
        )
        for pool_number, pool in enumerate(fleet.pools)
    ]
    # Only pools with work divide the bill: what an idle pool costs is divided in the same shares.
    worked = [number for number, tenant_s in enumerate(tenant_s_by_pool) if tenant_s.sum() > 0]
    # Owned GPUs may have no price; if only such pools have work, GPUs stand for prices.
    weights = prices if prices[worked].sum() > 0 else gpus
    used_weight = weights[worked].sum()
    for number in worked:
        tenant_s = tenant_s_by_pool[number]
        shares += weights[number] / used_weight * tenant_s / tenant_s.sum()
    hours = _span_s(simulation) / HOUR_S
    costs, is_finished = [], simulation.status == FINISHED
    for tenant_number, name in enumerate(simulation.tenants):
        is_own = simulation.tenant == tenant_number
        inputs = int(simulation.input_tokens[is_own].sum())
        outputs = int(simulation.output_tokens[is_own].sum())
        share_frac = float(shares[tenant_number])
        usd_per_h = fleet_usd_per_h * share_frac
        served_tokens = (simulation.input_tokens + simulation.output_tokens)[is_own & is_finished].sum()
        per_million = 1e6 * usd_per_h * hours / max(int(served_tokens), 1)
        costs.append(TenantCost(name, int(is_own.sum()), inputs, outputs, share_frac, usd_per_h, per_million))
    return tuple(costs)


def _span_s(simulation: Simulation) -> float:
    """Time from the first arrival to the end, at least LEAST_SPAN_S."""
    return max(float(simulation.end_s - simulation.arrival_s[0]), LEAST_SPAN_S)


def _request_work_s(
    simulation: Simulation, pool: Pool, pool_number: int, pool_of_worker: npt.NDArray[np.int64]
) -> Floats:
    """The worker seconds that each request takes in its pool (n,), as the module's docstring counts
    them; 0 for a request that used no worker of the pool. `pool_of_worker` has the pool's number for each
    worker.
    """
    step_s, budget = pool.type.latency.step_s, pool.type.max_num_batched_tokens
    cached = (
        np.zeros(len(simulation.tenant)) if simulation.cached_tokens is None else simulation.cached_tokens
    )
    # An engine computes at least the last token of a prompt, even if all of the prompt is cached.
    tokens = np.maximum(simulation.input_tokens - cached, 1).astype(float)
    full_step_s = float(step_s(budget))  # Without attention, which takes the time of `pairs`.
    # Each new token attends to the cached ones, to the new ones before it and to itself.
    pairs = tokens * cached + tokens * (tokens + 1) / 2
    prefill_s = tokens * full_step_s / budget + (step_s(budget, pairs=pairs) - full_step_s)
    decoded_tokens = simulation.output_tokens - 1.0  # The prefill makes the first token.
    decoding_s = np.nan_to_num(simulation.e2e_s - simulation.ttft_s)  # NaN where a request never ended.
    decoded = _in_pool(simulation.decode_worker, pool_number, pool_of_worker)
    # The mean number of decodes on a rank, by Little's law; at least 1, as a decode is in its own batch.
    ranks = max(pool.count, 1) * pool.type.dp
    batch = max(float(decoding_s[decoded].sum()) / (_span_s(simulation) * ranks), 1.0)
    without_kv_s = float(step_s(batch, decodes=batch))
    mean_context = simulation.input_tokens + simulation.output_tokens / 2  # An output grows as it is written.
    kv_read_s = step_s(batch, decodes=batch, kv_tokens=mean_context) - without_kv_s
    decode_s = decoded_tokens * (without_kv_s / batch + kv_read_s)
    prefilled = _in_pool(simulation.prefill_worker, pool_number, pool_of_worker)
    return np.asarray(np.where(prefilled, prefill_s, 0.0) + np.where(decoded, decode_s, 0.0))


def _in_pool(
    worker: npt.NDArray[np.int64], pool_number: int, pool_of_worker: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """(n,): whether each `worker` (n,) is of this pool; a worker out of range stands for none."""
    has_worker = (worker >= 0) & (worker < len(pool_of_worker))
    return np.asarray(has_worker & (pool_of_worker[np.where(has_worker, worker, 0)] == pool_number))


def tenant_rows(costs: tuple[TenantCost, ...]) -> list[dict[str, Any]]:
    """The tenants as `plan simulate --json` prints them, the most expensive first."""
    return [asdict(cost) for cost in sorted(costs, key=lambda cost: -cost.usd_per_h)]
