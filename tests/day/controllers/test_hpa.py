"""The HPA against cases of Kubernetes' own tests (numbers of pkg/controller/podautoscaler at 003e8629 and
00067268), and by hand."""

from __future__ import annotations

import pytest
from readings import knowledge, reading

from planner.day.controllers.hpa import (
    Behaviour,
    Direction,
    HpaSettings,
    ScalingPolicy,
    external_replicas,
    pods_replicas,
)
from planner.day.controllers.table import parse_controller
from planner.simulator.elastic import ElasticPool

# replica_calculator_test.go: metrics of pods, pods without metrics, current, target -> replicas
PODS = {
    "up": ((20, 10, 30), 0, 3, 15, 4),
    "up, an unready pod that sends its metric counts": ((50, 10, 30), 0, 3, 15, 6),
    "up, unready ones too": ((50, 15, 30), 0, 3, 15, 7),
    "one external value": ((8.6,), 0, 1, 4.4, 2),
    "down": ((12, 12, 12, 12, 12), 0, 5, 20, 3),
    "within tolerance": ((20, 21, 21), 0, 3, 20, 3),
    "hot, one missing: as idle it would turn": ((1900,), 1, 2, 1000, 2),
    "cool, one missing: as at the target": ((600,), 1, 2, 1000, 2),
}


@pytest.mark.parametrize("case", PODS)
def test_metrics_of_pods(case: str) -> None:
    each, missing, current, target, replicas = PODS[case]
    assert pods_replicas(each, missing, current, target) == replicas


def test_missing_pods_by_hand() -> None:
    """Two of four at 400 and 95 of 100 x 10: 24.75 %; with the others at the target 62.4 %, times 4, up: 3.
    One ready at 4 times the target, two starting: as idle 4 / 3, times 3: 4, not 4 x 1 = 4 x 3.
    One ready at the target, one starting: since Kubernetes 1.33 nothing changes; it was one of two.
    """
    assert pods_replicas((10,), 1, 2, 10) == 2
    assert pods_replicas((400, 95), 2, 4, 1000) == 3
    assert pods_replicas((40,), 2, 3, 10) == 4


# current, value of the whole pool, target per pod -> replicas
EXTERNAL = (
    (3, 8.6, 2.15, 4),
    (5, 8.6, 2.867, 3),
    (3, 8.6, 2.9, 3),
    (3, 20, 5, 4),
    (5, 6, 2, 3),
    (4, 20.166, 5, 4),
    (10, 11, 1, 10),  # Since 1.33, by isWithin: 1.1 is no more than 1 + 0.1.
    (10, 9, 1, 10),
)


@pytest.mark.parametrize(("current", "total", "target", "replicas"), EXTERNAL)
def test_external_metrics(current: int, total: float, target: float, replicas: int) -> None:
    assert external_replicas(total, current, target) == replicas


def rules(pods: int, pods_s: float, percent: int, percent_s: float, window_s: float = 0.0) -> Direction:
    both = (ScalingPolicy("pods", pods, pods_s), ScalingPolicy("percent", percent, percent_s))
    return Direction(window_s, tuple(each for each in both if each.value))


UP, DOWN = rules(4, 15, 100, 15), rules(0, 0, 100, 15, 300)


def spread(changes: tuple[int, ...], over_s: float) -> list[tuple[float, int]]:
    """Changes in the middle of equal parts of the last `over_s` before time zero."""
    part_s = over_s / max(len(changes), 1)
    return [(-(over_s - part_s * (i + 0.5)), change) for i, change in enumerate(changes)]


# TestScalingWithRules: current, desired, least, most, up, down, added and removed before -> replicas
LIMITED = (
    (5, 7, 3, 8, UP, DOWN, (), (), 7),
    (3, 1, 2, 8, UP, DOWN, (), (), 2),
    (1, 0, 0, 10, UP, DOWN, (), (), 0),
    (20, 1000, 1, 10, UP, DOWN, (), (), 10),
    (100, 1000, 100, 150, UP, DOWN, (), (), 150),
    (3, 1000, 1, 2000, rules(0, 0, 1, 60), DOWN, (), (), 4),
    (10, 50, 1, 1000, UP, DOWN, (), (), 20),
    (10, 500, 1, 1000, rules(100, 60, 100, 60), DOWN, (), (), 110),
    (10, 500, 1, 1000, rules(2, 60, 100, 60), DOWN, (), (), 20),
    (10, 50, 1, 1000, rules(30, 60, 0, 0), DOWN, (), (), 40),
    (10, 50, 1, 1000, rules(0, 0, 200, 60), DOWN, (), (), 30),
    (100, 2, 1, 1000, UP, rules(20, 60, 1, 60), (), (), 80),
    (100, 2, 1, 1000, UP, rules(2, 60, 1, 60), (), (), 98),
    (10, 0, 1, 1000, UP, rules(100, 60, 0, 0), (), (), 1),
    (10, 2, 5, 1000, UP, rules(0, 0, 100, 60), (), (), 5),
    (10, 2, 1, 1000, UP, rules(5, 60, 0, 0), (), (), 5),
    (10, 5, 1, 1000, UP, rules(0, 0, 50, 60), (), (), 5),
    (100, 500, 1, 200, rules(300, 60, 0, 0), DOWN, (1, 5, 9), (), 200),
    (100, 500, 1, 1000, rules(5, 120, 0, 0), DOWN, (1, 5, 9), (), 100),
    (100, 500, 1, 1000, rules(150, 120, 0, 0), DOWN, (1, 5, 9), (), 235),
    (100, 500, 1, 1000, rules(0, 0, 200, 120), DOWN, (1, 5, 9), (), 255),
    (6, 24, 1, 1000, rules(0, 0, 300, 300), DOWN, (4,), (2,), 16),
    (100, 2, 1, 1000, UP, rules(5, 120, 0, 0), (), (1, 5, 9), 100),
    (100, 0, 1, 1000, UP, rules(0, 0, 50, 120), (), (2, 4, 6), 56),
    (10, 1, 1, 1000, UP, rules(0, 0, 50, 180), (2,), (4,), 6),
    (100, 0, 1, 1000, UP, rules(0, 0, 10, 120), (), (10, 10, 10), 100),
    (10, 5, 1, 1000, UP, rules(0, 0, 1000, 120), (), (10, 10, 10), 5),
)


@pytest.mark.parametrize("case", range(len(LIMITED)))
def test_rates_of_change(case: int) -> None:
    current, desired, least, most, up, down, added, removed, replicas = LIMITED[case]
    behaviour = Behaviour(up, down, added=spread(added, 120), removed=spread(removed, 120))
    assert behaviour.limit_change(0.0, current, desired, ElasticPool(0.0, least, most)) == replicas


def test_the_policy_that_changes_most() -> None:
    """Of 2 pods and 50 %: from 1 up to 3, from 5 down to 2."""
    both = (ScalingPolicy("pods", 2, 60), ScalingPolicy("percent", 50, 60))
    behaviour = Behaviour(Direction(300, both), Direction(300, both))
    limits = ElasticPool(0.0, 0, 99)
    assert behaviour.limit_change(0.0, 1, 99, limits) == 3
    assert behaviour.limit_change(0.0, 5, 0, limits) == 2


# TestNormalizeDesiredReplicas: recommendations (seconds ago, replicas), desired -> stabilised, from above
STABILISED = (
    ((), 5, 5),
    (((120, 4), (60, 5)), 3, 5),
    (((120, 1), (60, 2)), 3, 3),
    (((600, 10), (540, 9)), 3, 3),
    (((600, 10), (540, 9), (120, 5), (60, 4)), 3, 5),
)


@pytest.mark.parametrize(("before", "desired", "stabilised"), STABILISED)
def test_stabilisation(before: tuple[tuple[float, int], ...], desired: int, stabilised: int) -> None:
    behaviour = Behaviour(UP, DOWN, [(-ago_s, replicas) for ago_s, replicas in before])
    assert behaviour.stabilise(0.0, 100, desired) == stabilised


def test_going_up_waits_for_the_whole_window() -> None:
    """60 s: 9 is asked for from 0 s on, 4 before; the least of the window is 9 from 60 s on."""
    behaviour = Behaviour(rules(99, 15, 0, 0, 60.0), DOWN, [(-15.0, 4)])
    limits = ElasticPool(0.0, 1, 99)
    seen = [behaviour.decide(15.0 * k, 4, 9, limits) for k in range(5)]
    assert seen == [4, 4, 4, 9, 9]


def test_a_day_of_an_hpa() -> None:
    """Queue of 5 per worker: 40 prompts at 2 workers are 4 times the target, 8 wanted, 4 more at a time; with
    the first two starting the mean is over all. Once empty it goes to one, five minutes after.
    """
    controller = parse_controller("hpa", {"metric": "queue", "target": 5})(knowledge(most=8))
    assert (controller.every_s, controller.lag_s) == (15.0, 15.0)
    controller.start([2])
    assert controller.sizes(reading(0.0, ready=[2], waiting=[40])) == [6]
    assert controller.sizes(reading(15.0, ready=[2], starting=[4], waiting=[45])) == [8]  # 45 / 5 = 9
    idle = [controller.sizes(reading(30.0 + 15 * k, ready=[8]))[0] for k in range(22)]
    assert idle[:18] == [8] * 18 and idle[-1] == 1


def test_starting_workers_hold_a_scale_down_back() -> None:
    """Four at half the target and four starting: (2 + 4) / 8 of the target, 6; without the rule 2."""
    controller = parse_controller("hpa", {"metric": "kv", "target": "80 %", "down_window": "0 s"})(
        knowledge()
    )
    controller.start([8])
    assert controller.sizes(reading(ready=[4], starting=[4], kv_frac=[0.4])) == [6]


def test_an_hpa_keeps_one_worker() -> None:
    """Who would wake an empty pool? No pod sends a metric."""
    controller = parse_controller("hpa", {"down_window": "0 s"})(knowledge(least=0))
    controller.start([3])
    assert [controller.sizes(reading(15.0 * k, ready=[1]))[0] for k in (1, 2, 100)] == [1, 1, 1]


def test_pools_scale_apart_by_metrics_of_their_own() -> None:
    """Prefill by its queue, decode by its KV."""
    chosen = parse_controller(
        "hpa", {"prefill": {"metric": "queue", "target": 2}, "decode": {"metric": "kv"}}
    )
    controller = chosen(knowledge(("prefill", "decode")))
    controller.start([2, 4])
    assert controller.sizes(reading(ready=[2, 4], waiting=[12, 0], kv_frac=[0.0, 0.7])) == [6, 4]
    assert chosen.parameters() == {"prefill": {"target": "2"}, "decode": {"metric": "kv"}}


def test_the_settings_stand_in_their_dataclass() -> None:
    assert HpaSettings().per_worker == 5.0 and HpaSettings(metric="kv").per_worker == 0.7
