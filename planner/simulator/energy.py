"""The power that a simulated fleet draws: Watts of every worker, Joules per request, over the measured
window.

Energy is the integral over the window, idle time included: every run of engine steps at the power of its load
(`planner.models.power`), the rest at the idle power. The load of a run is a mean over its steps. Runs do not
tell prompts apart, so the KV tokens of a step with prefills and decodes include those that are being
prefilled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.fleet import Fleet, WorkerType
from planner.models.llm import Llm
from planner.models.power import Power, shipped_power
from planner.simulator.layout import run_seconds
from planner.simulator.simulation import Simulation

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedPower:
    """Means over the measured window, GPUs only; NaN per request and token where none was finished in it.

    `requests` and `output_tokens` are those of the requests that finished in the window; all energy of the
    fleet is shared among them.
    """

    worker_w: Floats  # (W,) all GPUs of a worker together
    worker_idle_w: Floats  # (W,) The part of it that is drawn while no step runs.
    provisioned_w: float
    window_s: tuple[float, float]
    requests: int
    output_tokens: int
    basis: str

    @property
    def mean_w(self) -> float:
        return float(self.worker_w.sum())

    @property
    def idle_w(self) -> float:
        return float(self.worker_idle_w.sum())

    @property
    def energy_j(self) -> float:
        return self.mean_w * (self.window_s[1] - self.window_s[0])

    @property
    def request_j(self) -> float:
        return self.energy_j / self.requests if self.requests else float("nan")

    @property
    def thousand_tokens_j(self) -> float:
        """Per 1000 output tokens."""
        return 1000 * self.energy_j / self.output_tokens if self.output_tokens else float("nan")


def expected_power(fleet: Fleet, simulation: Simulation, power: Power | None = None) -> ExpectedPower | None:
    """Power of `fleet` in its simulation, which needs `record=True`; None if it has no runs."""
    if not len(simulation.runs):
        return None
    power = shipped_power() if power is None else power
    types = [pool.type for pool in fleet.pools for _ in range(pool.count)]
    runs, inside_s, (start_s, end_s) = measured_runs(simulation)
    seconds = run_seconds(runs)
    gpu_w = np.zeros(len(runs))
    # The first worker of the same type stands for it.
    owner = np.array([types.index(worker) for worker in types])[runs["worker"]]
    for first in np.unique(owner):
        of_type = owner == first
        gpu_w[of_type] = run_w(fleet.llm, types[first], runs[of_type], seconds[of_type], power)

    count, window_s = len(types), end_s - start_s
    # GPUs of a rank, as each has its own runs.
    gpus = np.array([worker.gpus / worker.dp for worker in types])
    busy_j = np.bincount(runs["worker"], weights=gpu_w * inside_s, minlength=count) * gpus
    busy_s = np.bincount(runs["worker"], weights=inside_s, minlength=count) / [worker.dp for worker in types]
    idle_w = np.array([worker.gpus * power.idle_w(worker.gpu) for worker in types])
    idle_w *= np.maximum(1 - busy_s / window_s, 0.0)  # Never below 0 by rounding.
    finish_s = simulation.arrival_s + simulation.e2e_s
    finished = (finish_s >= start_s) & (finish_s <= end_s)
    return ExpectedPower(
        worker_w=busy_j / window_s + idle_w,
        worker_idle_w=idle_w,
        provisioned_w=fleet.power_w,
        window_s=(start_s, end_s),
        requests=int(finished.sum()),
        output_tokens=int(simulation.output_tokens.sum(where=finished)),
        basis=power.basis,
    )


def is_engine_step(simulation: Simulation) -> npt.NDArray[np.bool_]:
    """(R,) which recorded runs are steps of an engine; the others are gaps of single requests."""
    return np.asarray((simulation.runs["prefill_tokens"] >= 0) & (simulation.runs["steps"] > 0))


def measured_runs(simulation: Simulation) -> tuple[npt.NDArray[np.void], Floats, tuple[float, float]]:
    """Recorded runs of engine steps (R,), the seconds (R,) of each inside the measured window, and the
    window.

    Of a long trace only parts were recorded. Their seconds are scaled up to stand for the whole window.
    """
    start_s, end_s = simulation.window_s
    if not end_s > start_s:
        end_s = max(simulation.end_s, start_s + 1e-9)  # All requests came at once: up to the last token.
    runs = simulation.runs[is_engine_step(simulation)]
    starts_s, ends_s = runs["start_s"], runs["start_s"] + run_seconds(runs)
    if not len(simulation.sampled_s):
        return runs, np.clip(ends_s, start_s, end_s) - np.clip(starts_s, start_s, end_s), (start_s, end_s)
    parts_s = np.clip(simulation.sampled_s, start_s, end_s)
    edges_s, lengths_s = parts_s.ravel(), np.diff(parts_s, axis=1).ravel()
    # Edges and lengths of the recorded parts: seconds recorded up to each edge.
    elapsed_s = np.cumsum(np.stack([np.zeros(len(lengths_s)), lengths_s], axis=1).ravel())
    inside_s = np.interp(ends_s, edges_s, elapsed_s) - np.interp(starts_s, edges_s, elapsed_s)
    return runs, inside_s * ((end_s - start_s) / lengths_s.sum()), (start_s, end_s)


def run_load(
    worker: WorkerType, runs: npt.NDArray[np.void], seconds: Floats
) -> tuple[Floats, Floats, Floats]:
    """Mean seconds, tokens and KV tokens read of a step of `worker` in each of its runs."""
    steps, sequences = runs["steps"], runs["decodes"]
    kv_tokens = np.where(
        # Over the run a decode has (steps - 1) / 2 tokens more on average than at its beginning.
        sequences > 0,
        runs["blocks"] * float(KV_BLOCK_TOKENS) + sequences * (steps - 1) / 2,
        0.0,
    )
    # The other ranks of the worker are taken to have as much.
    tokens = worker.dp * (runs["prefill_tokens"] + worker.step_tokens * sequences)
    return seconds / steps, tokens, worker.dp * kv_tokens


def run_w(llm: Llm, worker: WorkerType, runs: npt.NDArray[np.void], seconds: Floats, power: Power) -> Floats:
    """Mean Watts of one GPU of `worker` in each of its runs."""
    return power.busy_w(llm, worker.gpu, worker.gpus, *run_load(worker, runs, seconds))
