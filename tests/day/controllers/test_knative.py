"""Knative's autoscaler against cases of its own tests (numbers of autoscaler_test.go at 98e5ef9)."""

from __future__ import annotations

import pytest
from readings import knowledge, reading

from planner.day.controllers.knative import Knative, KnativeSettings
from planner.day.controllers.table import parse_controller


def scaler(target: float, ready: int = 1, **given: float) -> Knative:
    """With the tests' rates of change of ten."""
    settings = {"max_up_rate": 10.0, "max_down_rate": 10.0, "panic_threshold_frac": 2.0, **given}
    made = Knative(KnativeSettings(target=target, utilization_frac=1.0, **settings), knowledge(least=0), 0)
    made.start(ready)
    made.panic_s, made.panic_size = None, 0
    return made


# target, ready, stable, panic, workers in a panic that began 5 s ago -> workers
SCALED = {
    "nothing seen": (10, 1, 0, 0, 0, 0),
    "stable": (181, 1, 21, 26, 0, 1),
    "up": (10, 1, 50, 49, 0, 5),
    "as it is": (10, 5, 50, 50, 0, 5),
    "up by stable": (10, 1, 50, 10, 0, 5),
    "up by stable, to the limit": (10, 1, 100, 10, 0, 10),
    "panic, stable is larger": (1, 5, 50, 30, 5, 50),
    "panic, stable is smaller": (1, 5, 20, 30, 5, 30),
    "panic doubles": (10, 1, 50, 100, 0, 10),
    "down": (10, 8, 50, 50, 0, 5),
    "one request": (10, 1, 1, 0, 0, 1),
    "limited up": (10, 1, 1000, 1001, 0, 10),
    "limited up again": (10, 10, 1000, 1001, 0, 100),
    "limited down": (10, 100, 1, 1, 0, 10),
    "limited down again": (10, 10, 1, 1, 0, 1),
    "no worker counts as one": (10, 0, 1000, 888, 0, 10),
}


@pytest.mark.parametrize("case", SCALED)
def test_scaled(case: str) -> None:
    target, ready, stable, panic, panicking, workers = SCALED[case]
    made = scaler(target, ready)
    if panicking:
        made.panic_s, made.panic_size = 995.0, panicking
    assert made.workers_for_means(1000.0, ready, stable, panic) == workers


def test_small_rates_of_change_still_move() -> None:
    """1.1 x 2 workers is 3, not 2; 100 / 1.1 is 90."""
    assert scaler(1, 2, max_up_rate=1.1).workers_for_means(0.0, 2, 3, 3.1) == 3
    assert scaler(10, 100, max_down_rate=1.1).workers_for_means(0.0, 100, 1, 1) == 90


def test_panic_ends_a_stable_window_after_the_surge() -> None:
    """TestAutoscalerPanicThenUnPanicScaleDown and TestAutoscalerUnpanicAfterSlowIncrease."""
    made = scaler(10)
    assert made.workers_for_means(0.0, 1, 100, 100) == 10
    assert made.workers_for_means(0.0, 10, 100, 1000) == 100
    assert made.workers_for_means(30.0, 10, 1, 1) == 100
    assert made.workers_for_means(61.0, 10, 1, 1) == 1
    slow = scaler(1, 10)
    assert [
        slow.workers_for_means(0.0, 10, 11, 25),
        slow.workers_for_means(30.0, 40, 30, 41),
        slow.workers_for_means(62.0, 55, 50, 56),
    ] == [25, 41, 50]


def test_panic_is_extended() -> None:
    made = scaler(1, 10)
    assert made.workers_for_means(0.0, 10, 11, 25) == 25
    assert made.workers_for_means(30.0, 40, 30, 80) == 80
    assert made.panic_s == 30.0


def test_down_delay() -> None:
    """TestAutoscalerScaleDownDelay: the most of five minutes."""
    made = scaler(10, panic_threshold_frac=10.0, down_delay_s=300.0)
    told = (
        (2, 40, 4),
        (300, 0, 4),
        (302, 0, 0),
        (540, 40, 4),
        (600, 30, 4),
        (660, 0, 4),
        (840, 0, 3),
        (900, 0, 0),
    )
    for time_s, concurrency, workers in told:
        made.panic_s = None
        assert made.workers_for_means(float(time_s), 4, concurrency, concurrency) == workers, time_s


def test_a_new_autoscaler_keeps_its_workers_for_a_window() -> None:
    """Three idle workers: kept for a stable window in panic, one for the rest, zero 30 s after."""
    controller = parse_controller("knative", {"target": 10})(knowledge(least=0))
    controller.start([3])
    asked = [3]
    for t in range(0, 130, 2):
        asked.append(controller.sizes(reading(float(t), interval_s=2.0, ready=asked[-1:]))[0])
    at = {time_s: asked[1 + time_s // 2] for time_s in (60, 62, 92, 94, 128)}
    assert at == {60: 3, 62: 1, 92: 1, 94: 0, 128: 0}


def test_windows_are_means_of_what_was_seen() -> None:
    """140 requests for the last 6 of 60 s: panic window 140, stable 14; target 10 x 70 %: 20, not 2."""
    controller = parse_controller("knative", {"target": 10})(knowledge())
    controller.start([1])
    for t in range(0, 54, 2):
        controller.sizes(reading(float(t), ready=[1]))
    sizes = [controller.sizes(reading(float(t), ready=[1], running=[140]))[0] for t in (54, 56, 58)]
    assert sizes[-1] == 20


def test_it_wakes_for_a_request_without_worker() -> None:
    controller = parse_controller("knative", {})(knowledge(least=0))
    controller.start([0])
    assert controller.sizes(reading(0.0, ready=[0])) == [0]
    assert controller.sizes(reading(2.0, ready=[0], limbo=1)) == [1]
