"""Dynamo's planner by load, against cases of its own tests of the modes throughput and latency (their longest
context is 4,096 tokens, their KV cache 100,000)."""

from __future__ import annotations

from typing import Any

import pytest
from readings import ENGINE, knowledge, reading

from planner.day.controllers.dynamo_load import DynamoSettings, decode_workers, prefill_workers
from planner.day.controllers.table import parse_controller
from planner.errors import InputError

# mode, queued tokens per worker, workers -> workers
PREFILL = (
    ("throughput", 4096, 1, 2),
    ("throughput", 2048, 2, 2),
    ("throughput", 204, 2, 1),
    ("throughput", 0, 1, 1),
    ("latency", 410, 1, 2),
    ("latency", 0, 2, 1),
    ("latency", 10, 2, 2),
)
# mode, KV tokens in use and queued for, workers -> workers
DECODE = (
    ("throughput", 110_000, 1, 2),
    ("throughput", 40_000, 2, 1),
    ("throughput", 70_000, 2, 2),
    ("throughput", 25_000, 3, 2),
    ("throughput", 50_000, 2, 2),  # The one that stays would be full; Dynamo 1.6.1 keeps both.
    ("throughput", 55_000, 3, 2),
    ("latency", 45_000, 1, 2),
    ("latency", 5_000, 2, 1),
)


@pytest.mark.parametrize(("mode", "queued", "workers", "wanted"), PREFILL)
def test_prefill(mode: str, queued: int, workers: int, wanted: int) -> None:
    assert prefill_workers(DynamoSettings(optimize=mode), queued / 4096, workers) == wanted


@pytest.mark.parametrize(("mode", "kv", "workers", "wanted"), DECODE)
def test_decode(mode: str, kv: int, workers: int, wanted: int) -> None:
    assert decode_workers(DynamoSettings(optimize=mode), kv / 100_000, workers) == wanted


def test_prefill_and_decode_apart() -> None:
    """Eight prompts of 512 tokens are a context of queue: one prefill worker more; KV at 40 % of two decode
    workers: one fewer, but 80 % and 30,000 tokens queued are 110 %."""
    controller = parse_controller("dynamo", {})(knowledge(("prefill", "decode"), engines=(ENGINE, ENGINE)))
    controller.start([1, 2])
    lengths: dict[str, Any] = {"input_tokens": [512.0, 512.0]}
    full = reading(ready=[1, 2], waiting=[8, 0], kv_frac=[0.0, 0.4], **lengths)
    assert controller.sizes(full) == [2, 1]
    controller.start([1, 1])
    lengths = {"input_tokens": [1000.0, 1000.0]}
    assert controller.sizes(reading(ready=[1, 1], waiting=[1, 30], kv_frac=[0.0, 0.8], **lengths)) == [1, 2]


def test_mixed_workers_count_queued_prompts_as_kv() -> None:
    """20,000 in use and 90 prompts of 1,000 tokens: 110 %; lengths stay known while nothing finishes."""
    controller = parse_controller("dynamo", {})(knowledge(engines=(ENGINE,)))
    controller.start([1])
    assert controller.sizes(reading(0.0, waiting=[90], kv_frac=[0.2])) == [1]  # no lengths seen yet
    controller.sizes(reading(5.0, kv_frac=[0.7], input_tokens=[1000.0]))
    assert controller.sizes(reading(10.0, waiting=[90], kv_frac=[0.2])) == [2]


def test_nothing_is_decided_while_a_worker_starts_or_within_the_grace() -> None:
    controller = parse_controller("dynamo", {"grace": "60 s"})(knowledge(engines=(ENGINE,)))
    controller.start([1])
    full: dict[str, Any] = {"kv_frac": [1.1]}
    assert controller.sizes(reading(0.0, ready=[1], **full)) == [2]
    assert controller.sizes(reading(5.0, ready=[1], starting=[1], **full)) == [2]
    assert controller.sizes(reading(50.0, ready=[2], **full)) == [2]
    assert controller.sizes(reading(60.0, ready=[2], **full)) == [3]


def test_thresholds_the_wrong_way_round() -> None:
    with pytest.raises(InputError, match="up thresholds must be above down thresholds"):
        parse_controller("dynamo", {"kv_up": "50 %"})
