"""The queue model against cases of it and against a chain solved another way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from readings import ENGINE, knowledge, reading

from planner.day.controllers.table import parse_controller
from planner.day.controllers.wva_queue import QueueModel, QueueTimes, largest_rate_rps, times_of
from planner.errors import InputError

CASES = Path(__file__).parents[3] / "shared" / "reference" / "wva_queue_cases.json"
NAMES = {  # of the cases
    "tput": "throughput_rps",
    "wait": "wait_ms",
    "serv": "serve_ms",
    "in_serv": "in_service",
    "eff_conc": "batch",
    "ttft": "ttft_ms",
    "itl": "itl_ms",
}
# of the same three cases, some figures: N, alpha, beta, gamma, delta, in, out; rate, TTFT, ITL; largest rates
FIRST = QueueTimes(8, 80, 1.0, 0.01, 10.0, 0.001, 100, 10)
THIRD = QueueTimes(64, 640, 6.973, 0.027, 14.9, 0.001, 128, 128)


def test_some_figures() -> None:
    assert QueueModel(FIRST).most_rps == pytest.approx(389.4737, rel=1e-6)
    assert QueueModel(FIRST).least_rps == pytest.approx(0.05211047, rel=1e-6)
    state = QueueModel(THIRD).queue_state_at(50.0)
    assert (state.ttft_ms, state.itl_ms) == pytest.approx((51.6233, 8.477905), rel=1e-5)
    assert largest_rate_rps(FIRST, 60.0, 1.07) == pytest.approx(319.21427, rel=1e-4)
    assert largest_rate_rps(THIRD, 200.0, 8.5) == pytest.approx(50.648701, rel=1e-4)


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(CASES.read_text()) if CASES.exists() else []
    return found


@pytest.mark.skipif(not cases(), reason="the cases are not here")
def test_all_cases() -> None:
    """Rates within 1e-4: the original ends its searches once it is within 1e-6 of the target."""
    for case in cases():
        given = case["params"]
        model = QueueModel(
            QueueTimes(
                int(given["N"]),
                int(given["Q"]),
                given["alpha"],
                given["beta"],
                given["gamma"],
                given["delta"],
                given["tin"],
                given["tout"],
            )
        )
        assert [model.least_rps, model.most_rps] == pytest.approx(case["rate_range"], rel=1e-6)
        for rate, expected in case["analyze"].items():
            state = model.queue_state_at(float(rate))
            for name, field in NAMES.items():
                assert getattr(state, field) == pytest.approx(expected[name], rel=1e-5, abs=1e-6), (
                    rate,
                    name,
                )
        rates, _ = case["size"]
        ttft = model.largest_rate_rps(lambda state: state.ttft_ms, case["slo"]["ttft"])
        itl = model.largest_rate_rps(lambda state: state.itl_ms, case["slo"]["itl"])
        assert (ttft, itl) == pytest.approx((rates["ttft"], rates["itl"]), rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_the_chain_solved_as_linear_equations(seed: int) -> None:
    """Balance of every state, and Little's law."""
    rng = np.random.default_rng(seed)
    times = QueueTimes(
        int(rng.integers(1, 9)), int(rng.integers(0, 20)), *map(float, rng.uniform(0.1, 5, 4)), 20.0, 7.0
    )  # type: ignore[call-arg]
    model = QueueModel(times)
    rate = rng.uniform(0.2, 0.95) * model.most_rps / 1000
    states = times.seats + times.queue + 1
    n = np.minimum(np.arange(states), times.seats)
    served = n / (times.gamma + times.delta * 20.0 * n + 6 * (times.alpha + times.beta * n))
    rates = np.diag(np.full(states - 1, rate), 1) + np.diag(served[1:], -1)
    rates -= np.diag(rates.sum(axis=1))
    share = np.linalg.lstsq(
        np.vstack([rates.T, np.ones(states)]), np.append(np.zeros(states), 1.0), rcond=None
    )[0]
    state = model.queue_state_at(1000 * rate)
    through = rate * (1 - share[-1])
    assert state.throughput_rps == pytest.approx(1000 * through, rel=1e-6)
    assert state.in_service == pytest.approx(share @ n, rel=1e-6)
    assert through * (state.wait_ms + state.serve_ms) == pytest.approx(share @ np.arange(states), rel=1e-6)


def test_targets_that_nothing_keeps() -> None:
    """A prompt alone takes 10.1 ms, a step 1.01 ms."""
    assert largest_rate_rps(FIRST, 5.0, None) == 0.0
    assert largest_rate_rps(FIRST, None, 0.5) == 0.0


def test_replicas() -> None:
    """1.3 rates of a worker in the last minute: two workers; none of no requests; 1.2 times as many: two."""
    own = knowledge(engines=(ENGINE,), ttft_s=0.5, tpot_s=0.015, least=0)
    one_rps = largest_rate_rps(times_of(ENGINE, "mixed", 500, 100), 500, 15)
    settings = {"up_window": "0 s", "down_window": "0 s", "tolerance": "0 %", "optimize": "15 s"}
    controller = parse_controller("wva-queue", settings)(own)
    controller.start([1])
    lengths: dict[str, Any] = {"input_tokens": [500.0], "output_tokens": [100.0]}
    seen = [
        controller.sizes(reading(15.0 * k, ready=[1], arrived=[math.floor(15 * share * one_rps)], **lengths))[
            0
        ]
        for k, share in enumerate((1.3, 2.5, 0.9, 0.0))
    ]
    assert seen == [2, 3, 1, 0]


def test_prefill_and_decode_workers_keep_their_phase() -> None:
    own = knowledge(("prefill", "decode"), engines=(ENGINE, ENGINE), ttft_s=0.5, tpot_s=0.015)
    assert times_of(ENGINE, "prefill", 500, 100).decode_steps == 0.0
    assert times_of(ENGINE, "decode", 500, 100).prefill_ms(8) == 0.0
    controller = parse_controller("wva-queue", {"up_window": "0 s"})(own)
    controller.start([1, 1])
    lengths: dict[str, Any] = {"input_tokens": [500.0, 500.0], "output_tokens": [100.0, 100.0]}
    asked = controller.sizes(reading(ready=[1, 1], arrived=[900, 900], **lengths))
    assert asked[0] > asked[1] > 1


def test_it_needs_step_times() -> None:
    with pytest.raises(InputError, match="'wva-queue' needs step times of the pools' workers"):
        parse_controller("wva-queue", {})(knowledge())
