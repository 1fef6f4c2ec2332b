"""How much of its GPUs a simulated pool uses: time, FLOP, bandwidth, KV cache, and how large its batches are.

These are the replica and hardware metrics of Vidur (Agrawal et al. 2024, arXiv:2405.05465, section 5), over
the measured window. FLOP are counted as 2 per active parameter and token of a step, without those of
attention; bytes are those of weights and KV cache, as in the power model
(`planner.models.power.step_utilisations`). Both are given as shares of the peak of all GPUs over the whole
window, idle time included. The KV cache in use is a mean over the time in which steps ran; the size of
batches is a mean over steps.
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
from planner.simulator.simulation import Floats, Simulation

SUM_TOLERANCE = 1e-12  # More than the relative rounding error of a sum of weights.


@dataclass(frozen=True, slots=True)
class PoolUse:
    """How a pool used its GPUs. If no step ran in the window, shares of KV cache and sizes of batches are
    NaN, and `decodes_most` is 0.
    """

    pool: str
    workers: int
    busy_frac: float  # Share of the window in which steps ran, the mean of workers or of pipeline stages.
    mfu_frac: float  # Model FLOP utilisation: the share of the peak FLOP/s of the GPUs.
    bandwidth_frac: float  # The share of the peak memory bandwidth of the GPUs.
    kv_mean_frac: float  # The share of a rank's KV cache in use: its mean ...
    kv_most_frac: float  # ... and the largest share at the beginning of a run of steps.
    decodes_mean: float  # Decodes in a step of a rank: the mean, ...
    decodes_p99: float  # ... the 99th percentile, ...
    decodes_most: int  # ... and the largest number.
    tokens_mean: float  # The mean of tokens in a step of a rank, of prompts and decodes.


def pool_uses(fleet: Fleet, simulation: Simulation) -> tuple[PoolUse, ...]:
    """How each running pool used its GPUs, in the fleet's order; empty if no steps were recorded."""
    if not len(simulation.runs):
        return ()
    # A run is several steps of one rank in succession; `inside_s` are its seconds in the window. In a
    # pipeline a step counts with the time of one stage, as batches in other stages have runs of their own.
    runs, inside_s, (start_s, end_s) = measured_runs(simulation)
    window_s, uses = end_s - start_s, []
    first = 0  # The number of the pool's first worker in the simulation.
    for pool in fleet.running_pools:
        worker_type, end = pool.type, first + pool.count
        is_of_pool = (runs["worker"] >= first) & (runs["worker"] < end) & (inside_s > 0)
        first = end
        pool_runs, seconds = runs[is_of_pool], inside_s[is_of_pool]
        if not len(pool_runs):
            # No step ran, so all shares of the window are 0, and what is measured over steps is NaN.
            nan = float("nan")
            uses.append(PoolUse(pool.name, pool.count, 0.0, 0.0, 0.0, nan, nan, nan, nan, 0, nan))
            continue
        whole_runs_s = run_seconds(pool_runs)
        step_s, tokens, kv_tokens = run_load(fleet.llm, worker_type, pool_runs, whole_runs_s)
        gpu, gpus = worker_type.gpu, worker_type.gpus
        compute, bandwidth = step_utilisations(
            fleet.llm, gpu, gpus, step_s, tokens, kv_tokens, tp=worker_type.tp
        )
        worker_s = window_s * pool.count * worker_type.dp  # Each rank has runs of its own.
        # `kv_tokens` of a worker type is the cache of one rank, as `blocks` are.
        kv_frac = pool_runs["blocks"] * float(KV_BLOCK_TOKENS) / worker_type.kv_tokens
        # A run that crosses an edge of the window counts with the share of its time inside.
        steps = pool_runs["steps"] * seconds / whole_runs_s
        uses.append(
            PoolUse(
                pool=pool.name,
                workers=pool.count,
                busy_frac=float(seconds.sum() / worker_s),
                mfu_frac=float((compute * seconds).sum() / worker_s),
                bandwidth_frac=float((bandwidth * seconds).sum() / worker_s),
                kv_mean_frac=float(np.average(kv_frac, weights=seconds)),
                kv_most_frac=float(kv_frac.max()),
                decodes_mean=float(np.average(pool_runs["decodes"], weights=steps)),
                decodes_p99=_weighted_percentile(pool_runs["decodes"], steps, 0.99),
                decodes_most=int(pool_runs["decodes"].max()),
                # `tokens` are of all ranks of a worker, taken to have equal loads (`run_load`).
                tokens_mean=float(np.average(tokens, weights=steps)) / worker_type.dp,
            )
        )
    return tuple(uses)


def _weighted_percentile(values: npt.NDArray[np.int64], weights: Floats, percentile_frac: float) -> float:
    """The smallest value with at least this share of all weight at or below it."""
    order = np.argsort(values, kind="stable")
    cumulated = np.cumsum(weights[order])
    # The product may be rounded up, and could then lie above every cumulated weight.
    index = np.searchsorted(cumulated, percentile_frac * cumulated[-1] * (1 - SUM_TOLERANCE))
    return float(values[order[min(index, len(order) - 1)]])
