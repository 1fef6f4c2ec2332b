"""The power that a simulated fleet draws over the measured window: watts of every worker, joules per request.

Energy is the integral of power over the window, idle time included: every run of engine steps at the power of
its load (`planner.models.power`), the rest at the idle power. The load of a run is a mean over its steps. A
record of a run (RUN of planner/simulator/layout.py) has one count of KV blocks for all requests. So the KV
tokens that a step with prefills and decodes is taken to read include those that are being prefilled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.fleet import Fleet, WorkerType
from planner.models.kv_layout import kv_layout
from planner.models.llm import Llm
from planner.models.power import Power, shipped_power
from planner.simulator.layout import run_seconds
from planner.simulator.simulation import Floats, Simulation

LEAST_IDLE_FRAC = 1e-9  # A smaller idle share of the window is rounding: the worker was never idle.
LEAST_WINDOW_S = 1e-9  # A window without length counts as this long, because energy is divided by the length.


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedPower:
    """The mean power of each worker over the measured window (`window_s`, its start and end), of GPUs alone.

    `requests` and `output_tokens` count the requests that finished in the window; all energy of the fleet is
    shared among them.
    """

    worker_w: Floats  # (W,) All GPUs of a worker together.
    worker_idle_w: Floats  # (W,) The part of `worker_w` that is drawn while no step runs.
    provisioned_w: float  # What the data centre must be able to give the fleet (`Fleet.power_w`).
    window_s: tuple[float, float]
    requests: int
    output_tokens: int
    basis: str  # What the fit of the power model was measured on.

    @property
    def mean_w(self) -> float:
        """Mean power of all workers over the measured window [W]."""
        return float(self.worker_w.sum())

    @property
    def idle_w(self) -> float:
        """Power of all workers without work [W]."""
        return float(self.worker_idle_w.sum())

    @property
    def energy_j(self) -> float:
        """Energy of all workers over the measured window [J]."""
        return self.mean_w * (self.window_s[1] - self.window_s[0])

    @property
    def request_j(self) -> float:
        """Energy per request [J]; NaN without requests."""
        return self.energy_j / self.requests if self.requests else float("nan")

    @property
    def thousand_tokens_j(self) -> float:
        """Expected joules per 1000 output tokens; NaN without output."""
        return 1000 * self.energy_j / self.output_tokens if self.output_tokens else float("nan")


def expected_power(fleet: Fleet, simulation: Simulation, power: Power | None = None) -> ExpectedPower | None:
    """The power of `fleet` in its simulation; None if that has no recorded runs (simulated without
    `record=True`). `power` is the model of power, by default the one that is shipped.
    """
    if not len(simulation.runs):
        return None
    power = shipped_power() if power is None else power
    types = [pool.type for pool in fleet.pools for _ in range(pool.count)]
    runs, inside_s, (start_s, end_s) = measured_runs(simulation)
    seconds = run_seconds(runs)
    gpu_w = np.zeros(len(runs))
    # Runs of one worker type are computed together. The type is numbered by the first worker that has it.
    first_of_type = np.array([types.index(worker) for worker in types])
    type_of_run = first_of_type[runs["worker"]]
    for first in np.unique(type_of_run):
        is_of_type, worker = type_of_run == first, types[first]
        load = run_load(fleet.llm, worker, runs[is_of_type], seconds[is_of_type])
        gpu_w[is_of_type] = power.busy_w(fleet.llm, worker.gpu, worker.gpus, *load, tp=worker.tp)

    count, window_s = len(types), end_s - start_s
    # Each data-parallel rank of a worker has runs of its own, on an equal share of the worker's GPUs.
    ranks = np.array([worker.dp for worker in types])
    gpus_per_rank = np.array([worker.gpus for worker in types]) / ranks
    busy_j = np.bincount(runs["worker"], weights=gpu_w * inside_s, minlength=count) * gpus_per_rank
    busy_s = np.bincount(runs["worker"], weights=inside_s, minlength=count) / ranks
    idle_w = np.array([worker.gpus * power.idle_w(worker.gpu) for worker in types])
    idle_frac = 1 - busy_s / window_s
    idle_w *= np.where(idle_frac > LEAST_IDLE_FRAC, idle_frac, 0.0)
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
    """Which recorded runs (R,) are steps of an engine; the others are recorded for gaps of single
    requests, or for the gaps of a class once more.
    """
    return np.asarray((simulation.runs["prefill_tokens"] >= 0) & (simulation.runs["steps"] > 0))


def measured_runs(simulation: Simulation) -> tuple[npt.NDArray[np.void], Floats, tuple[float, float]]:
    """Recorded runs of engine steps (R,), the seconds (R,) of each inside the measured window, and the
    window.

    Of a long trace only some parts were recorded (`simulation.sampled_s`). Their seconds are scaled up to
    stand for the whole window.
    """
    start_s, end_s = simulation.window_s
    if not end_s > start_s:
        # All requests came at once, so the window lasts to their last token.
        end_s = max(simulation.end_s, start_s + LEAST_WINDOW_S)
    runs = simulation.runs[is_engine_step(simulation)]
    starts_s, ends_s = runs["start_s"], runs["start_s"] + run_seconds(runs)
    if not len(simulation.sampled_s):  # The whole trace was recorded.
        return runs, np.clip(ends_s, start_s, end_s) - np.clip(starts_s, start_s, end_s), (start_s, end_s)
    parts_s = np.clip(simulation.sampled_s, start_s, end_s)  # (P, 2): the recorded parts of the window.
    edges_s, lengths_s = parts_s.ravel(), np.diff(parts_s, axis=1).ravel()
    # (2 P,) the recorded seconds before each edge: they grow within a part, not between two parts.
    recorded_s = np.cumsum(np.stack([np.zeros(len(lengths_s)), lengths_s], axis=1).ravel())
    inside_s = np.interp(ends_s, edges_s, recorded_s) - np.interp(starts_s, edges_s, recorded_s)
    return runs, inside_s * ((end_s - start_s) / lengths_s.sum()), (start_s, end_s)


def run_load(
    llm: Llm, worker: WorkerType, runs: npt.NDArray[np.void], seconds: Floats
) -> tuple[Floats, Floats, Floats]:
    """The mean step of each run (R,) of a worker of type `worker`: its seconds, the tokens that it computes,
    and the KV tokens that it reads; tokens of all ranks of the worker. `seconds` (R,) are those of the whole
    runs.

    A KV token stands for the bytes that a token has in all layers.
    """
    steps, sequences = runs["steps"], runs["decodes"]
    # `blocks` are those at the run's first step. Each later step reads one token more of every decode, so the
    # mean step reads (steps - 1) / 2 tokens more of each.
    later_kv_tokens = sequences * (steps - 1) / 2
    first_kv_tokens = runs["blocks"] * _read_tokens_of_block(llm, worker)
    kv_tokens = np.where(sequences > 0, first_kv_tokens + later_kv_tokens, 0.0)
    # A run is of one data-parallel rank. The other ranks are taken to have the same load at that time.
    tokens = worker.dp * (runs["prefill_tokens"] + worker.step_tokens * sequences)
    return seconds / steps, tokens, worker.dp * kv_tokens


def _read_tokens_of_block(llm: Llm, worker: WorkerType) -> float:
    """How many tokens have, in all layers together, as many bytes as a KV block of `worker`.

    In most LLMs that is the number of tokens of a block. But layers with attention windows or states have
    blocks of their own (`extra_kv`), so a block of such an LLM holds 16 tokens of some of its layers alone.
    """
    if not worker.extra_kv.is_any:
        return float(KV_BLOCK_TOKENS)
    copies = max(1.0, worker.tp / llm.kv_heads)  # With more GPUs than KV heads, GPUs hold copies of a head.
    return kv_layout(llm, worker.tp).block_bytes * worker.tp / copies / llm.kv_bytes_per_token
