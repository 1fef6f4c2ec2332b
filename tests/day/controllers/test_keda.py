"""KEDA's way to and from zero, its HPA and its cron windows."""

from __future__ import annotations

import math

import pytest
from readings import knowledge, reading

from planner.day.controllers.keda import Keda, KedaSettings
from planner.day.controllers.table import parse_controller
from planner.day.controllers.windows import Window, read_windows
from planner.errors import InputError


@pytest.mark.parametrize(
    ("size", "waiting", "active_ago_s", "replicas"),
    [
        (10, 0, math.inf, 0),  # never active: TestScaleToMinReplicasWhenNotActive
        (0, 3, math.inf, 1),  # TestScaleFromMinReplicasWhenActive
        (10, 0, 300.0, 10),  # cools down; 0 is the HPA's business, after its own window
        (10, 0, 301.0, 0),
        (0, 0, 10.0, 0),
    ],
)
def test_zero(size: int, waiting: int, active_ago_s: float, replicas: int) -> None:
    """Of at least 0 workers; as in scale_scaledobjects_test.go at 8b4f083. The HPA has just asked for 10."""
    scaler = Keda(KedaSettings(threshold=1.0), knowledge(least=0), 0)
    scaler.start(size)
    scaler.active_s = 1000.0 - active_ago_s
    scaler.behaviour.recommended = [(999.0, size)] if size else []
    assert scaler.decide(reading(1000.0, ready=[size], waiting=[waiting])) == replicas


def test_the_threshold_of_activation_is_above_zero() -> None:
    """It wakes above 2, not at 2; requests that find no worker count."""
    controller = parse_controller("keda", {"activation": 2, "threshold": 5})(knowledge(least=0))
    controller.start([0])
    assert controller.sizes(reading(0.0, ready=[0], limbo=2)) == [0]
    assert controller.sizes(reading(15.0, ready=[0], limbo=3)) == [0]  # it looks every 30 s
    assert controller.sizes(reading(30.0, ready=[0], limbo=3)) == [1]
    assert controller.sizes(reading(45.0, ready=[0], starting=[1], limbo=31)) == [5]  # 7, four at a time


def test_prefill_and_decode_wake_and_sleep_together() -> None:
    controller = parse_controller("keda", {"cooldown": "60 s", "down_window": "0 s"})(
        knowledge(("prefill", "decode"), least=0)
    )
    controller.start([0, 0])
    assert controller.sizes(reading(0.0, ready=[0, 0], limbo=1)) == [1, 1]
    assert controller.sizes(reading(60.0, ready=[1, 1], waiting=[0, 3])) == [1, 1]
    asleep = [controller.sizes(reading(90.0 + 30 * k, ready=[1, 1])) for k in range(4)]
    assert asleep[0] == [1, 1] and asleep[-1] == [0, 0]


def test_idle_at_one_worker_takes_nothing_away() -> None:
    """Of at least none, one worker that idles for a minute: its HPA has removed no pod in that time, so it
    adds four within the minute and not eight."""
    given = {"cooldown": "1 h", "down_window": "0 s", "up_percent": 0, "up_period": "1 min", "threshold": 1}
    controller = parse_controller("keda", given)(knowledge(least=0))
    controller.start([1])
    for k in range(4):
        assert controller.sizes(reading(15.0 * k, ready=[1])) == [1]
    assert controller.sizes(reading(60.0, ready=[1], waiting=[40])) == [5]


def test_cron_windows_of_its_own_tests() -> None:
    """Every even hour 10 workers, else none (validCronMetadata2), as windows; and a whole Thursday."""
    even = read_windows(
        [{"from": f"{hour}:00", "to": f"{hour + 1}:00", "workers": 10} for hour in range(0, 24, 2)], "cron"
    )
    thursday = read_windows([{"from": "0:00", "to": "23:59", "workers": 10, "days": ["thu"]}], "cron")[0]
    for hour in range(168):
        assert any(each.contains(3600.0 * hour + 1) for each in even) == (hour % 2 == 0)
        assert thursday.contains(3600.0 * hour + 1) == (hour // 24 == 3)


def test_a_cron_trigger_is_a_metric_of_the_hpa() -> None:
    """8:00 to 9:00 ten workers: 2, 6, 10 from the beginning of the window; five minutes more at its end."""
    settings = {"cron": [{"from": "08:00", "to": "09:00", "workers": 10}]}
    controller = parse_controller("keda", settings)(knowledge(clock_s=8 * 3600.0 - 30))
    controller.start([2])
    asked = [controller.sizes(reading(15.0 * k, ready=[2]))[0] for k in range(6)]
    assert asked == [2, 2, 6, 10, 10, 10]
    last = [controller.sizes(reading(3600.0 + 15.0 * k, ready=[10]))[0] for k in range(30)]
    assert last[:20] == [10] * 20 and last[-1] == 1


def test_windows_over_midnight_and_the_days_they_begin_on() -> None:
    night = Window(22 * 3600.0, 6 * 3600.0, (3,), days=(4,))  # Friday night
    week = [night.contains(3600.0 * hour) for hour in range(168)]
    assert [hour for hour in range(168) if week[hour]] == list(range(4 * 24 + 22, 5 * 24 + 6))


@pytest.mark.parametrize(
    ("window", "says"),
    [
        ({"from": "8:00", "to": "8:00", "workers": 1}, "the same time"),
        ({"from": "25:00", "to": "8:00", "workers": 1}, "expected a time of day"),
        ({"from": "7:00", "to": "8:00", "workers": -1}, "expected a number of workers"),
        ({"from": "7:00", "to": "8:00"}, "workers is missing"),
        ({"from": "7:00", "to": "8:00", "workers": 2, "days": ["fry"]}, "expected one of mon"),
        ({"from": "7:00", "too": "8:00", "workers": 2}, "did you mean 'to'"),
    ],
)
def test_windows_that_make_no_sense(window: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_windows([window], "slo.yaml: cron")


def test_yaml_reads_half_past_eight_as_a_number() -> None:
    assert read_windows([{"from": 510, "to": 24 * 60, "workers": 1}], "cron")[0].begin_s == 8.5 * 3600


def test_a_window_is_shown_as_a_reader_has_it() -> None:
    rows = [{"from": "8:00", "to": "20:00", "workers": 6, "days": ["mon", "fri"]}]
    assert str(read_windows(rows, "cron")[0]) == "08:00 to 20:00 6 workers on mon, fri"
    assert str(Window(0.0, 24 * 3600.0, (1,))) == "00:00 to 24:00 1 worker"
