"""Aladdin's worker: how many GPUs it has (Nie et al. 2024, arXiv:2405.06856, section 4.1).

Sets   N   GPUs of a worker, by tensor parallelism
Data   kv(l)     KV cache of a request with l tokens:  h l + j                 (eq. 1)  [tokens]
       t_d(b, l) decode iteration of b requests:  k2 l + c2 b + c3             (eq. 3)  [s]
       t(N)      the same at a given batch on N GPUs:  k4 / N + c4             (eq. 5)  [s]
       m_r       mean of kv at the end of a request;  M_N  KV cache of a worker         [tokens]
       T         limit on the time per token                                            [s]

  max   T_max(N) = min( M_N / (N m_r t(N)),  B / (N T) ),    t_d(B, l) = T    (eq. 6)  [tokens/s and GPU]

Where memory binds the batch is M_N / m_r, where the limit does it is B. The paper adds to eq. 5 what an
all-reduce takes, c (N - 1) / N = c - c / N, which leaves its form as it is. All coefficients are learned,
from the step times of workers and from the blocks that requests take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import ExtrapolationError, InfeasibleError, InputError
from planner.fleet import WorkerType
from planner.models.families.linear_forms import AladdinSteps
from planner.models.families.step_family import fit_nonnegative
from planner.models.latency import Array

# Decode steps of these batches and contexts are what eq. 3 is fitted to.
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS_TOKENS = (64, 256, 1024, 2048)


class AladdinKv(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Eq. 1.   X (n, 2): input and output tokens of a request so far.   y (n,): its KV cache, in any unit."""

    def __init__(self, *, beyond: str = "raise") -> None:
        self.beyond = beyond

    def fit(self, X: Array, y: Array) -> Self:
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        self.j_, self.h_ = fit_nonnegative(np.column_stack([np.ones(len(X)), X.sum(axis=1)]), y)
        self.tokens_max_ = X.sum(axis=1).max()
        return self

    def predict(self, X: Array) -> Array:
        check_is_fitted(self)
        tokens = validate_data(self, X, reset=False, dtype=np.float64).sum(axis=1)
        if self.beyond == "raise" and (tokens > self.tokens_max_).any():
            raise ExtrapolationError(
                f"KV cache of {tokens.max():g} tokens asked for, measured up to {self.tokens_max_:g}; "
                "measure further, or fit with beyond='extrapolate'"
            )
        return np.asarray(self.j_ + self.h_ * tokens)


class AladdinGpus(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Eq. 5.   X (n, 1): GPUs of a worker, N_g.   y (n,): compute time of one step [s]."""

    def __init__(self, *, beyond: str = "raise") -> None:
        self.beyond = beyond

    def fit(self, X: Array, y: Array) -> Self:
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        if not (X > 0).all():
            raise InputError(f"GPUs of a worker: {X.min():g}, must be > 0")
        self.c4_s_, self.k4_s_ = fit_nonnegative(np.column_stack([np.ones(len(X)), 1 / X[:, 0]]), y)
        self.gpus_min_, self.gpus_max_ = X.min(), X.max()
        return self

    def predict(self, X: Array) -> Array:
        check_is_fitted(self)
        gpus = validate_data(self, X, reset=False, dtype=np.float64)[:, 0]
        outside = (gpus < self.gpus_min_) | (gpus > self.gpus_max_)
        if self.beyond == "raise" and outside.any():
            raise ExtrapolationError(
                f"asked for {gpus[outside][0]:g} GPUs per worker, measured {self.gpus_min_:g} to "
                f"{self.gpus_max_:g}; measure further, or fit with beyond='extrapolate'"
            )
        return np.asarray(self.c4_s_ + self.k4_s_ / gpus)


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """A worker of `gpus` GPUs: its batch and tokens/s per GPU as memory and as the TPOT limit bound them."""

    gpus: int
    batch_by_memory: float
    batch_by_limit: float
    by_memory_tokens_per_s: float
    by_limit_tokens_per_s: float

    @property
    def tokens_per_s(self) -> float:
        return min(self.by_memory_tokens_per_s, self.by_limit_tokens_per_s)


def kv_of_requests(input_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike) -> AladdinKv:
    """Eq. 1, learned from the whole blocks that requests take [tokens]."""
    lengths = np.array([input_tokens, output_tokens], float).T
    blocks = np.ceil(lengths.sum(axis=1) / KV_BLOCK_TOKENS)
    return AladdinKv(beyond="extrapolate").fit(lengths, KV_BLOCK_TOKENS * blocks)


def decode_times(worker: WorkerType) -> AladdinSteps:
    """Eq. 3, learned from the step times of a worker over `BATCHES` and `CONTEXTS_TOKENS`."""
    batch, context = (grid.ravel() for grid in np.meshgrid(BATCHES, CONTEXTS_TOKENS))
    nothing = np.zeros_like(batch)  # These steps have no prefill.
    X = np.column_stack([batch, nothing, batch, batch * context, nothing]).astype(float)
    return AladdinSteps(beyond="extrapolate").fit(X, worker.latency.step_s(*X.T))


def worker_sizes_of(
    workers: Sequence[WorkerType], input_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike, tpot_s: float
) -> tuple[WorkerSize, ...]:
    """Eq. 6 for workers of one GPU type, by number of GPUs; those without room for a request are left out.

    A request's context is its prompt and half of its output, on average. Raises InfeasibleError if no worker
    can decode within the limit.
    """
    kv = kv_of_requests(input_tokens, output_tokens)
    request_tokens = float(kv.predict(np.array([input_tokens, output_tokens], float).T).mean())
    context_tokens = float(np.mean(np.asarray(input_tokens)) + np.mean(np.asarray(output_tokens)) / 2)
    large_enough = sorted((w for w in workers if w.kv_tokens >= request_tokens), key=lambda w: w.gpus)
    times = {worker.gpus: decode_times(worker) for worker in large_enough}
    worker_sizes = []
    for worker in large_enough:
        batch = worker.kv_tokens / request_tokens
        c3_s, c2_s, k2_s = times[worker.gpus].decode_
        time_by_gpus = AladdinGpus().fit(
            np.array([[gpus] for gpus in times], float),
            np.array([_decode_s(each, batch, context_tokens) for each in times.values()]),
        )
        step_s = float(time_by_gpus.predict(np.array([[worker.gpus]], float))[0])
        batch_by_limit = (tpot_s - c3_s) / (c2_s + k2_s * context_tokens)
        if batch_by_limit >= 1:
            worker_sizes.append(
                WorkerSize(
                    worker.gpus,
                    batch,
                    batch_by_limit,
                    by_memory_tokens_per_s=batch / step_s / worker.gpus,
                    by_limit_tokens_per_s=batch_by_limit / tpot_s / worker.gpus,
                )
            )
    if not worker_sizes:
        raise InfeasibleError(
            f"no worker has room for a request of {request_tokens:.0f} tokens and decodes within "
            f"{tpot_s:g} s; allow more time or more GPUs",
            kind="latency",
            constraint="tpot",
            relaxation="more time, or more GPUs per worker",
        )
    return tuple(worker_sizes)


def _decode_s(step: AladdinSteps, batch: float, context_tokens: float) -> float:
    return float(step.predict(np.array([[batch, 0.0, batch, batch * context_tokens, 0.0]]))[0])
