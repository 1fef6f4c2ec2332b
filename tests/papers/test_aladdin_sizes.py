"""Aladdin's equations 1, 5 and 6: coefficients planted and recovered, sizes by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.papers.aladdin_sizes import (
    AladdinGpus,
    AladdinKv,
    decode_times,
    kv_of_requests,
    worker_sizes_of,
)
from planner.documents.catalog import read_catalog
from planner.errors import ExtrapolationError, InfeasibleError
from planner.fleet import WorkerType
from planner.models.latency import StepLatency

GPU = read_catalog().gpu("a100-80g")


def worker(gpus: int, step_s: float, kv_tokens: int) -> WorkerType:
    """A decode iteration takes `step_s`, 0.1 ms per sequence and 1 us per token of context."""
    latency = StepLatency((1.0, 1000.0), (step_s, step_s), 0.0, 1e-4, 1e-6, 0.0, 0.0, "planted")
    return WorkerType(GPU, gpus, latency, kv_tokens, 2048, 256)


def test_eq_1_takes_whole_blocks() -> None:
    """Blocks of 16 tokens: a request has one token per token and half a block more, on average."""
    rng = np.random.default_rng(0)
    kv = kv_of_requests(rng.integers(1, 2000, 20_000), rng.integers(1, 500, 20_000))
    assert kv.h_ == pytest.approx(1.0, abs=3e-3) and 5 < kv.j_ < 9


def test_eq_3_is_recovered() -> None:
    assert decode_times(worker(1, 0.01, 10_000)).decode_ == pytest.approx((0.01, 1e-4, 1e-6))


def test_eq_6_by_hand() -> None:
    """Prompts of 64, outputs of 64: 128 tokens of KV and 96 of context at a time, 0.196 ms per sequence.

    1 GPU: 1280 tokens are 10 sequences, a step of 20 + 1.96 ms, 455.4 tokens/s; the limit of 40 ms holds 102
    sequences, 2551 tokens/s. 4 GPUs: 10,240 tokens are 80 sequences, 5 + 15.68 ms, 967 per GPU; within 40 ms
    178.6 sequences, 1116 per GPU. Between them 20, 10 and 5 ms are k4 / N + c4 with k4 = 20 ms, c4 = 0."""
    rows = [worker(1, 0.02, 1280), worker(2, 0.01, 100), worker(4, 0.005, 10_240)]
    lengths = np.full(50, 64)
    one, four = worker_sizes_of(rows, lengths, lengths, 0.04)  # on two GPUs there is no room for a request
    assert (one.gpus, four.gpus) == (1, 4)
    assert one.batch_by_memory == pytest.approx(10) and four.batch_by_memory == pytest.approx(80)
    assert one.by_memory_tokens_per_s == pytest.approx(10 / 0.02196, rel=1e-6)
    assert one.by_limit_tokens_per_s == pytest.approx(0.02 / 0.000196 / 0.04, rel=1e-6)
    assert four.tokens_per_s == pytest.approx(80 / 0.02068 / 4, rel=1e-6)


def test_a_limit_that_no_worker_keeps_is_refused() -> None:
    lengths = np.full(5, 64)
    with pytest.raises(InfeasibleError, match=r"decodes within 0\.002 s"):
        worker_sizes_of([worker(1, 0.02, 1280)], lengths, lengths, 0.002)


def test_aladdins_kv_and_gpu_forms() -> None:
    """Eq. 1: 3 units a token and 5 beside. Eq. 5: 0.08 / N_g + 0.01."""
    lengths = np.array([[100.0, 0], [100, 50], [1000, 1000]])
    kv = AladdinKv().fit(lengths, 3 * lengths.sum(axis=1) + 5)
    assert kv.predict(np.array([[10.0, 10.0]])) == pytest.approx(65)
    gpus = np.array([[1.0], [2], [4], [8]])
    model = AladdinGpus().fit(gpus, 0.08 / gpus[:, 0] + 0.01)
    assert model.predict(gpus) == pytest.approx([0.09, 0.05, 0.03, 0.02])
    for fitted, beyond in ((kv, [[2000.0, 1.0]]), (model, [[16.0]])):
        with pytest.raises(ExtrapolationError, match="measure"):
            fitted.predict(np.array(beyond))
    assert model.set_params(beyond="extrapolate").predict(np.array([[16.0]])) == pytest.approx(0.015)
