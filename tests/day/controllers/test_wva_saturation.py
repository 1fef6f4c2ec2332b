"""llm-d's autoscaler by saturation, against cases of its own tests (analyzer_test.go at b08b1c7)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from readings import knowledge, reading

from planner.day.controllers.knowledge import MIXED, Knowledge
from planner.day.controllers.table import parse_controller
from planner.day.controllers.wva import ReplicaLoad, Wva, WvaSettings, scaling_direction
from planner.errors import InputError
from planner.simulator.elastic import ElasticPool

# (KV in use, waiting) of each worker -> one more, none, one fewer
DIRECTIONS = {
    "little KV to spare": (((0.75, 2), (0.76, 2)), 1),
    "little queue to spare": (((0.5, 3), (0.5, 3)), 1),
    "healthy, but not for one fewer": (((0.5, 1), (0.5, 1)), 0),
    "one fewer is enough": (((0.2, 1), (0.3, 1), (0.25, 1)), -1),
    "one fewer is too few": (((0.7, 2), (0.75, 2)), 1),
    "the only one": (((0.5, 2),), 0),
    "all saturated": (((0.85, 2), (0.5, 6), (0.9, 7)), 1),
    "two of three saturated, one at its edge": (((0.85, 2), (0.5, 6), (0.6, 2)), 0),
    "no worker": ((), 0),
}


@pytest.mark.parametrize("case", DIRECTIONS)
def test_direction(case: str) -> None:
    workers, change = DIRECTIONS[case]
    assert scaling_direction(WvaSettings(), [ReplicaLoad(*each) for each in workers]) == change


def variants(*prices: float, most: int = 9) -> Knowledge:
    pools = tuple(ElasticPool(120.0, least=1, most=most) for _ in prices)
    return Knowledge(pools, (MIXED,) * len(prices), prices_usd_per_h=prices)


QUICK = {"up_window": "0 s", "down_window": "0 s", "tolerance": "0 %"}


def test_the_cheapest_grows_and_the_dearest_shrinks() -> None:
    """Prices 20, 5, 15, two workers each: TestCalculatesaturationTargets."""
    controller = parse_controller("wva", QUICK)(variants(20, 5, 15))
    controller.start([2, 2, 2])
    full = reading(0.0, ready=[2, 2, 2], kv_frac=[0.75] * 3)
    assert controller.sizes(full) == [2, 3, 2]
    controller.start([2, 2, 2])
    assert controller.sizes(reading(0.0, ready=[2, 2, 2], kv_frac=[0.2] * 3)) == [1, 2, 2]


def test_nothing_is_decided_while_a_worker_starts() -> None:
    """Prices 20 and 5: three replicas of which two send metrics."""
    controller = parse_controller("wva", QUICK)(variants(20, 5))
    controller.start([3, 2])
    assert controller.sizes(reading(0.0, ready=[2, 2], starting=[1, 0], kv_frac=[0.9, 0.9])) == [3, 2]
    assert controller.sizes(reading(60.0, ready=[3, 2], kv_frac=[0.9, 0.9])) == [3, 3]


def test_it_decides_every_minute_and_its_hpa_waits_for_four() -> None:
    """Full from the beginning: one more wanted at once, asked for once the least of four minutes is 3."""
    controller = parse_controller("wva", {})(variants(5))
    controller.start([2])
    asked = [controller.sizes(reading(15.0 * k, ready=[2], kv_frac=[0.8]))[0] for k in range(20)]
    assert asked == [2] * 16 + [3] * 4
    settled = [controller.sizes(reading(300.0 + 15.0 * k, ready=[3], kv_frac=[0.1]))[0] for k in range(21)]
    assert settled == [3] * 15 + [2] * 6


def test_tolerance_holds_the_eleventh_worker() -> None:
    """Ten wanted of eleven is within 10 %: the HPA stays, and so does what waits for it."""
    controller = parse_controller("wva", {"down_window": "0 s"})(variants(5, most=20))
    controller.start([11])
    asked = [controller.sizes(reading(60.0 * k, ready=[11], kv_frac=[0.1]))[0] for k in range(10)]
    assert asked == [11] * 10


def test_nor_is_the_eleventh_worker_started() -> None:
    """Eleven wanted of ten: 1.1 is within 10 % since Kubernetes 1.33."""
    controller = parse_controller("wva", {"up_window": "0 s"})(variants(5, most=20))
    controller.start([10])
    assert [controller.sizes(reading(60.0 * k, ready=[10], kv_frac=[0.9])) for k in range(5)] == [[10]] * 5


def test_the_highest_of_the_last_minute_counts() -> None:
    """72 % of the KV cache 15 s ago leaves less than 10 % to spare; a minute ago it is forgotten, and so are
    readings with another number of workers."""
    sizes = []
    for ago_s, workers_then in ((15.0, 2), (60.0, 2), (15.0, 1)):
        settings = WvaSettings(up_window_s=0.0, down_window_s=0.0, tolerance_frac=0.0)
        controller = Wva(settings, variants(5))
        controller.start([workers_then])
        controller.due_s = 100.0
        controller.sizes(reading(100.0 - ago_s, ready=[workers_then], kv_frac=[0.72]))
        controller.current = controller.wanted = [2]
        sizes.append(controller.sizes(reading(100.0, ready=[2], kv_frac=[0.5])))
    assert sizes == [[3], [2], [2]]


def test_at_the_most_workers_it_wants_one_more_and_stays() -> None:
    """Its HPA gives it three of the four that it wants: as these differ, nothing is decided any more."""
    controller = parse_controller("wva", QUICK)(variants(5, most=3))
    controller.start([3])
    assert controller.sizes(reading(0.0, ready=[3], kv_frac=[0.9])) == [3]
    assert [controller.sizes(reading(60.0 * k, ready=[3], kv_frac=[0.0])) for k in range(2, 5)] == [[3]] * 3


def test_a_pool_without_workers_sends_no_metrics_and_does_not_grow() -> None:
    own = variants(5, 20)
    own = replace(own, pools=tuple(replace(pool, least=0) for pool in own.pools))
    controller = parse_controller("wva", QUICK)(own)
    controller.start([0, 2])
    assert controller.sizes(reading(0.0, ready=[0, 2], kv_frac=[math.nan, 0.9])) == [0, 3]


def test_from_zero() -> None:
    controller = parse_controller("wva", QUICK)(knowledge(least=0))
    controller.start([0])
    assert controller.sizes(reading(0.0, ready=[0])) == [0]
    assert controller.sizes(reading(60.0, ready=[0], limbo=1)) == [1]


def test_contradicting_thresholds() -> None:
    with pytest.raises(InputError, match=r"kv_spare: 0\.5 is above kv_threshold, 0\.4"):
        parse_controller("wva", {"kv_threshold": "40 %", "kv_spare": "50 %"}, "slo.yaml")
