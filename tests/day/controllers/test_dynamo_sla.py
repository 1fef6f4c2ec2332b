"""Dynamo's planner by SLA: cases of its own tests (tests/planner/test_replica_calculation.py at 002a7c3: an
interval of 60 s, prompts of 3,000 tokens, outputs of 150) and arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from readings import ENGINE, knowledge, reading

from planner.day.controllers.dynamo_sla import (
    ForecastLoad,
    count_replicas,
    decode_rps,
    decode_tokens_per_s,
    mixed_rps,
    prefill_rps,
    prefill_tokens_per_s,
)
from planner.day.controllers.table import parse_controller

# requests in 60 s, tokens in and out, prompt and output tokens/s of a worker, correction -> workers
CASES = (
    (10, 3000, 150, 40_000, 10_000, 1.0, 1, 1),
    (500, 3000, 150, 40_000, 1_000, 1.0, 1, 2),
    (10, 3000, 150, 40_000, 10_000, 2.5, 1, 1),
    (20, 3000, 150, 80_000, 20_000, 1.0, 1, 1),
    (100, 3000, 150, 20_000, 2_000, 1.0, 1, 1),
    (2000, 3000, 150, 40_000, 1_000, 2.5, 3, 5),
    (2000, 3000, 150, 40_000, 1_000, 0.5, 2, 5),
)


@pytest.mark.parametrize("case", CASES)
def test_replicas(case: tuple[float, ...]) -> None:
    """The last two by hand: 100,000 prompt tokens/s are 2.5 workers, 1.25 at half; 5,000 tokens/s are 5."""
    requests, tokens_in, tokens_out, prefill, decode, correction, p, d = case
    load = ForecastLoad(requests / 60, tokens_in, tokens_out)
    assert count_replicas(load.rate_rps, prefill_rps(load, prefill, correction)) == p
    assert count_replicas(load.rate_rps, decode_rps(load, decode)) == d


def test_what_a_worker_carries() -> None:
    """1,000 tokens take 0.12 s. At 1,000 tokens of context a sequence adds 0.2 ms to a step of 10: 25 keep
    15 ms, 64 seats keep 100, and none keeps 5: one. Mixed, out 100: 1.2 ms more a sequence, 3 keep 15 ms."""
    assert prefill_tokens_per_s(ENGINE, 1000) == pytest.approx(1000 / 0.12)
    assert decode_tokens_per_s(ENGINE, 1000, 0.015) == pytest.approx(25 / 0.015)
    assert decode_tokens_per_s(ENGINE, 1000, 0.1) == pytest.approx(64 / 0.0228)
    assert decode_tokens_per_s(ENGINE, 1000, 0.005) == pytest.approx(1 / 0.0102)
    assert mixed_rps(ENGINE, ForecastLoad(0, 950, 100), 0.015) == pytest.approx(
        3 / (100 * (0.01 + 3 * 0.00135))
    )


def seen(**given: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "interval_s": 180.0,
        "ready": [1, 2],
        "arrived": [1800, 1800],
        "input_tokens": [950.0, 950.0],
        "output_tokens": [100.0, 100.0],
        "ttft_s": [0.115, float("nan")],
        "tpot_s": [float("nan"), 0.0108],
    }
    return {**usual, **given}


def test_by_hand() -> None:
    """10 requests/s of 950 tokens: 9,500 tokens/s through 950 / 0.115 s are 1.15, two prefill workers, as
    TTFT is what a prompt takes alone. Decode: each of two has 5 x 1.184 s = 5.92 sequences, whose ITL is
    11.18 ms; 10.8 was seen, so 15 ms count as 15.5: 27 sequences, 1,753 tokens/s, one worker for 1,000."""
    own = knowledge(("prefill", "decode"), engines=(ENGINE, ENGINE), ttft_s=0.5, tpot_s=0.015)
    controller = parse_controller("dynamo-sla", {})(own)
    controller.start([1, 2])
    assert controller.sizes(reading(180.0, **seen())) == [2, 1]
    plain = parse_controller("dynamo-sla", {"corrected": False})(own)
    plain.start([1, 2])
    assert plain.sizes(reading(180.0, **seen(ttft_s=[0.01, float("nan")]))) == [2, 1]
    controller.start([1, 2])  # a TTFT of a tenth halves nothing but the prefill load
    assert controller.sizes(reading(180.0, **seen(ttft_s=[0.05, float("nan")]))) == [1, 1]


def test_no_step_without_a_finished_request() -> None:
    own = knowledge(("prefill", "decode"), engines=(ENGINE, ENGINE), tpot_s=0.015)
    controller = parse_controller("dynamo-sla", {})(own)
    controller.start([3, 4])
    assert controller.sizes(reading(180.0, **seen(ttft_s=[float("nan")] * 2))) == [3, 4]
