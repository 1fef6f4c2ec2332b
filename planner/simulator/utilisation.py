"""How much of its GPUs a simulated pool uses: time, FLOP, bandwidth, KV cache, and how large its batches are.

These are the replica and hardware metrics of Vidur (Agrawal et al. 2024, arXiv:2405.05465, section 5), over
the measured window. FLOP are 2 per active parameter and token of a step, without attention's own, and bytes
are weights and KV cache, as the power model has them (`planner.models.power.step_utilisations`); both are
over the peak of all GPUs for the whole window, idle time included. KV in use and batches are means while
steps run, by time and by step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.fleet import Fleet
from planner.models.power import step_utilisations
from planner.simulator.energy import measured_runs, run_load
from planner.simulator.layout import run_seconds
from planner.simulator.replay import Simulation

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Of one pool. NaN where no step ran in the window."""

    pool: str
    workers: int
    busy_frac: float  # of the window, a mean of the workers; of a pipeline a stage
    mfu_frac: float  # model FLOP utilisation
    bandwidth_frac: float
    kv_mean_frac: float
    kv_most_frac: float
    decodes_mean: float  # in a step
    decodes_p99: float
    decodes_most: int
    tokens_mean: float  # in a step, of prompts and decodes


def pool_uses(fleet: Fleet, simulation: Simulation) -> tuple[PoolUse, ...]:
    """Of every running pool, in the fleet's order; nothing unless the simulation has `record=True`."""
    if not len(simulation.runs):
        return ()
    runs, inside_s, (start_s, end_s) = measured_runs(simulation)
    window_s, first, found = end_s - start_s, 0, []
    for pool in fleet.running_pools:
        kind, workers = pool.type, (first, first + pool.count)
        first += pool.count
        own = (runs["worker"] >= workers[0]) & (runs["worker"] < workers[1]) & (inside_s > 0)
        part, seconds = runs[own], inside_s[own]
        if not len(part):
            nan = float("nan")
            found.append(PoolUse(pool.name, pool.count, 0.0, 0.0, 0.0, nan, nan, nan, nan, 0, nan))
            continue
        whole_runs_s = run_seconds(part)
        step_s, tokens, kv_tokens = run_load(kind, part, whole_runs_s)
        compute, bandwidth = step_utilisations(fleet.llm, kind.gpu, kind.gpus, step_s, tokens, kv_tokens)
        whole_s = window_s * pool.count * kind.dp  # ranks have runs of their own
        kv_frac = part["blocks"] * float(KV_BLOCK_TOKENS) / kind.kv_tokens
        steps = part["steps"] * seconds / whole_runs_s
        found.append(
            PoolUse(
                pool=pool.name,
                workers=pool.count,
                busy_frac=float(seconds.sum() / whole_s),
                mfu_frac=float((compute * seconds).sum() / whole_s),
                bandwidth_frac=float((bandwidth * seconds).sum() / whole_s),
                kv_mean_frac=float(np.average(kv_frac, weights=seconds)),
                kv_most_frac=float(kv_frac.max()),
                decodes_mean=float(np.average(part["decodes"], weights=steps)),
                decodes_p99=_percentile(part["decodes"], steps, 0.99),
                decodes_most=int(part["decodes"].max()),
                tokens_mean=float(np.average(tokens, weights=steps)) / kind.dp,
            )
        )
    return tuple(found)


def _percentile(values: npt.NDArray[np.int64], weights: Floats, percentile_frac: float) -> float:
    """Smallest value with at least this share of the weight at or below it."""
    order = np.argsort(values, kind="stable")
    cumulated = np.cumsum(weights[order])
    at = np.searchsorted(cumulated, percentile_frac * cumulated[-1] * (1 - 1e-12))
    return float(values[order[min(at, len(order) - 1)]])
