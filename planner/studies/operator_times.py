"""Computes how much time the steps of a simulated run spend on each operator, and the size of its inputs.

These are the operator metrics of Vidur (Agrawal et al. 2024, arXiv:2405.05465, section 5). An operator is a
term of the step time (models/latency.py), added up over the recorded steps of a pool:

  dense layers        f(N) - g(N)      projections, the MLP, collectives; size: tokens of a step
  experts             g(N)             only where ranks share experts; size: tokens of all ranks
  prefill attention   a A_p + e P      size: query-key pairs
  decode attention    b D + (d + m) K  size: KV tokens read
  host and waits      what remains     the engine's host, transfers between stages, ranks that wait

The letters are those of models/latency.py. The KV tokens of a step are computed from its KV blocks, as if the
last block of each sequence were half full.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.fleet import Fleet, Pool
from planner.reports.output import plain_value
from planner.simulator.energy import is_engine_step, measured_runs
from planner.simulator.layout import run_seconds
from planner.simulator.simulation import Floats, Simulation


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """The time of an operator in a pool's steps in the measured window: `seconds`, and their share of the
    time of all steps. `mean_input` is the operator's mean input, in `unit`, over the steps that run it; NaN
    for an operator without inputs.
    """

    pool: str
    operator: str
    seconds: float
    share_frac: float
    mean_input: float
    unit: str


def operator_times(fleet: Fleet, simulation: Simulation) -> tuple[OperatorTime, ...]:
    """The operators of each running pool, in the order of the module's docstring.

    `simulation` must have been made with `record_parts=True`. Raises InputError for step times that are not a
    sum of operators.
    """
    for pool in fleet.running_pools:
        _check_terms(pool)
    if not len(simulation.runs):
        return ()
    is_step = is_engine_step(simulation)
    runs, inside_s, _ = measured_runs(simulation)
    chunks = _ChunkSums.of(simulation, is_step)
    rows, first = [], 0
    for pool in fleet.running_pools:
        end = first + pool.count
        is_of_pool = (runs["worker"] >= first) & (runs["worker"] < end) & (inside_s > 0)
        rows += _pool_rows(pool, runs[is_of_pool], inside_s[is_of_pool], chunks.of_runs(is_of_pool))
        first = end
    return tuple(rows)


def operator_rows(times: tuple[OperatorTime, ...]) -> list[dict[str, Any]]:
    """What `plan simulate --operators --json` has under `operators`."""
    return [plain_value(asdict(time)) for time in times]


def _check_terms(pool: Pool) -> None:
    """Refuse a pool whose step times are not a sum of operators."""
    worker = pool.type
    if worker.form or worker.speculation:
        obstacle = "step times of another program" if worker.form else "drafts"
        raise InputError(
            f"operators: pool {pool.name} has {obstacle}, which are not a sum of operators; "
            "simulate it without --operators"
        )


@dataclass(frozen=True, slots=True)
class _ChunkSums:
    """Sums over the prompt chunks of each recorded run of steps (R,): query-key pairs, the number of chunks,
    and KV tokens.
    """

    pairs: Floats
    prefills: Floats
    kv_tokens: Floats

    @classmethod
    def of(cls, simulation: Simulation, is_step: npt.NDArray[np.bool_]) -> _ChunkSums:
        """The sums of all recorded runs that are steps (`is_step`); chunks name their run by its index."""
        chunks = simulation.parts[simulation.parts["tokens"] > 0]
        new, cached = chunks["tokens"], chunks["cached_tokens"]

        def sum_by_run(values: Floats) -> Floats:
            """The sum over the chunks of each run that is a step."""
            sums = np.bincount(chunks["run"], weights=values, minlength=len(is_step))
            return sums[: len(is_step)][is_step].astype(float)

        return cls(
            sum_by_run(new * (cached + (new + 1) / 2)),
            sum_by_run(np.ones(len(new))),
            sum_by_run(new + cached),
        )

    def of_runs(self, runs: npt.NDArray[np.bool_]) -> _ChunkSums:
        """The sums of these steps alone."""
        return _ChunkSums(self.pairs[runs], self.prefills[runs], self.kv_tokens[runs])


def _pool_rows(
    pool: Pool, runs: npt.NDArray[np.void], inside_s: Floats, chunks: _ChunkSums
) -> list[OperatorTime]:
    """The operators of one pool over its runs of equal steps (R,). `inside_s` (R,) is the time of each run
    inside the window.
    """
    worker, latency = pool.type, pool.type.latency
    # A run that crosses an edge of the window counts with the share of its steps inside.
    steps = runs["steps"] * inside_s / run_seconds(runs)
    decodes = runs["decodes"].astype(float)
    tokens = decodes + runs["prefill_tokens"]
    # A run of equal steps records the blocks of its first step. In each later step a decode reads one token
    # more.
    first_kv_tokens = (
        runs["blocks"] * float(KV_BLOCK_TOKENS) - decodes * KV_BLOCK_TOKENS / 2 - chunks.kv_tokens
    )
    more_kv_tokens = decodes * (runs["steps"] - 1) / 2  # The mean of these more tokens over the run's steps.
    kv_tokens = np.where(decodes > 0, np.maximum(first_kv_tokens, 0.0) + more_kv_tokens, 0.0)
    # f(N) of the docstring. It includes the experts' time for the worker's own tokens only; experts that
    # ranks share compute the tokens of all ranks.
    layers_s = np.asarray(latency.step_s(tokens)) - latency.h_s
    own_experts_s = experts_s = np.zeros(len(runs))
    if latency.joint_s:
        own_experts_s, experts_s = (
            latency.joint_experts_s(tokens),
            latency.joint_experts_s(worker.dp * tokens),
        )
    mixed_s = latency.m_s * (chunks.prefills > 0)  # Steps with prefills read KV tokens more slowly.
    terms: list[tuple[str, Floats, Floats, str]] = [
        ("dense layers", layers_s - own_experts_s, tokens, "tokens"),
        ("experts", experts_s, worker.dp * tokens, "tokens"),
        (
            "prefill attention",
            latency.a_s * chunks.pairs + latency.e_s * chunks.prefills,
            chunks.pairs,
            "query-key pairs",
        ),
        (
            "decode attention",
            latency.b_s * decodes + (latency.d_s + mixed_s) * kv_tokens,
            kv_tokens,
            "KV tokens",
        ),
    ]
    busy_s = remaining_s = float(inside_s.sum())
    rows = []
    for name, step_s, size, unit in terms:
        # `step_s` is for all layers. The pp pipeline stages work at the same time, each on its layers.
        term_s = float((step_s * steps).sum()) / worker.pp
        remaining_s -= term_s
        if term_s > 0:
            has_input = steps * (size > 0)
            mean_input = float(np.average(size, weights=has_input)) if has_input.any() else math.nan
            rows.append(OperatorTime(pool.name, name, term_s, term_s / busy_s, mean_input, unit))
    remaining_frac = remaining_s / busy_s if busy_s else math.nan
    return [*rows, OperatorTime(pool.name, "host and waits", remaining_s, remaining_frac, math.nan, "")]
