"""Forecasts of planted rates, and the two controllers that go by them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from readings import ENGINE, knowledge, per_worker, reading

from planner.day.controllers.forecasting import RateForecast
from planner.day.controllers.knowledge import History, LoadRule
from planner.day.controllers.table import parse_controller
from planner.units import DAY_S


def curve(time_s: float) -> float:
    """10 requests/s, 6 more at 18:00, 6 fewer at 6:00."""
    return 10 - 6 * math.sin(2 * math.pi * time_s / DAY_S)


HISTORY = History(300.0, np.array([curve(300.0 * k + 150) for k in range(288)]))


def test_a_season_is_recovered() -> None:
    """The same day again, and one with a third more: within 2 % an hour ahead, all day."""
    for more in (1.0, 4 / 3):
        forecast = RateForecast(300.0, DAY_S, knowledge(history=HISTORY))
        for minute in range(1, 1440):
            forecast.add(60.0 * minute, 60.0, more * curve(60.0 * minute - 30))
            if minute > 30:
                ahead_s = 60.0 * minute + 3600
                assert forecast.rate_at(ahead_s) == pytest.approx(more * curve(ahead_s), rel=0.02)


def test_without_a_season_the_drift_goes_on() -> None:
    """6 requests/s and 0.6 more every minute: 12 seen last, 5 min of drift further half a bucket behind."""
    forecast = RateForecast(300.0, DAY_S, knowledge())
    assert forecast.rate_at(60.0) == 0.0
    for minute in range(1, 11):
        forecast.add(60.0 * minute, 60.0, 6 + 0.6 * minute)
    assert forecast.mean_rps(300.0) == pytest.approx(10.8)
    assert forecast.rate_at(900.0) == pytest.approx(10.8 + 3.0)
    assert forecast.rate_at(1e6) > 0


def test_a_falling_rate_stops_at_zero() -> None:
    forecast = RateForecast(300.0, DAY_S, knowledge())
    for minute in range(1, 11):
        forecast.add(60.0 * minute, 60.0, max(10.0 - minute, 0.0))
    assert forecast.rate_at(3600.0) == 0.0


def test_a_day_unlike_all_others_is_not_believed_without_end() -> None:
    """A hundred times the season: three times."""
    forecast = RateForecast(300.0, DAY_S, knowledge(history=HISTORY))
    for minute in range(1, 31):
        forecast.add(60.0 * minute, 60.0, 1000.0)
    assert forecast.rate_at(3600.0) == pytest.approx(3 * curve(3600.0), rel=0.02)


def run(name: str, parameters: dict[str, object], rates: list[float], **known: Any) -> list[int]:
    """Sizes of one pool at these rates, a minute each; 2 requests/s a worker by the table."""
    controller = parse_controller(name, parameters)(knowledge(capacity=per_worker(1.0, 2.0), **known))
    controller.start([1])
    asked = []
    for k, rate in enumerate(rates):
        seen = reading(60.0 * (k + 1), interval_s=60.0, arrived=[round(60 * rate)], ready=[1])
        asked.append(controller.sizes(seen)[0])
    return asked


def test_forecast_by_hand() -> None:
    """Steady 7 requests/s: 3.5, four workers of 2; 7 / 3.5 where that is given: two."""
    assert run("forecast", {}, [7.0] * 20)[-1] == 4
    assert run("forecast", {"per_worker": 3.5}, [7.0] * 20)[-1] == 2


def test_ours_sees_the_start_up_ahead() -> None:
    """The season climbs from 6 to 16 requests/s half an hour from the beginning; workers take 20 minutes:
    nine (10 % over 16 is 17.6, 2 each) are asked for before the climb, not after."""
    rates = np.full(288, 6.0)
    rates[6:] = 16.0
    history = History(300.0, rates)
    asked = run("fleetplan", {}, [6.0] * 29, history=history, start_s=1200.0)
    assert asked[0] == 4 and asked[7] == 4
    assert asked[10] == asked[-1] == 9
    late = run("fleetplan", {"ahead": "60 s"}, [6.0] * 29, history=history, start_s=1200.0)
    assert late[24] == 4


def test_ours_holds_before_it_shrinks_and_serves_what_waits() -> None:
    """8 requests/s, then 2: five workers, in the end two (2.2 is 1.1 of 2); ten minutes of hold after the
    mean falls. 241 prompts that wait at one worker add 4 requests/s."""
    asked = run("fleetplan", {"hold": "10 min"}, [8.0] * 20 + [2.0] * 40)
    assert asked[19] == 5 and asked[28] == 5 and asked[-1] == 2
    parameters = {"headroom": "0 %", "drain": "1 min"}
    controller = parse_controller("fleetplan", parameters)(knowledge(capacity=per_worker(1.0, 2.0)))
    controller.start([1])
    seen = reading(60.0, interval_s=60.0, arrived=[120], waiting=[241], ready=[1])
    assert controller.sizes(seen) == [3]


def test_pools_follow_their_own_start_up_and_their_own_column() -> None:
    """Prefill 4, decode 2 requests/s a worker: 8.8 requests/s are 3 and 5."""
    own = knowledge(("prefill", "decode"), capacity=per_worker(0.4, 4.0, 2.0, rows=40))
    controller = parse_controller("fleetplan", {})(own)
    controller.start([1, 1])
    assert controller.sizes(reading(60.0, interval_s=60.0, arrived=[480, 470], ready=[1, 1])) == [3, 5]


def test_a_floor_is_what_so_many_windows_needed() -> None:
    """Of ten windows nine needed 3 workers at most, one 5: with a floor of 90 % any load has 3, from 1.5 on
    4; with 100 % any load has 5, beyond 2 in proportion. Without requests nobody is needed."""
    rule = LoadRule((0.5, 1.0, 1.5), 2.0, 15.0, 180.0, needs=(1, 1, 1, 2, 2, 2, 3, 3, 3, 5))
    loads = (0.0, 0.1, 0.6, 1.6, 2.0, 4.0)
    assert [rule.with_floor(0.9).workers_for_load(load) for load in loads] == [0, 3, 3, 4, 4, 8]
    assert [rule.with_floor(1.0).workers_for_load(load) for load in loads] == [0, 5, 5, 5, 5, 10]
    assert rule.with_floor(0.0) is rule
    assert rule.with_floor(0.01).edges == rule.edges
    own = knowledge(("mixed",), engines=(ENGINE,), rules=(rule,))
    for share, workers in (("0 %", 1), ("90 %", 3)):
        controller = parse_controller("fleetplan", {"floor": share, "headroom": "0 %", "hold": "0 s"})(own)
        controller.start([1])
        seen = reading(15.0, arrived=[1], input_tokens=[100.0], output_tokens=[10.0], ready=[1])
        assert controller.sizes(seen) == [workers]


def test_by_load_counts_lengths_and_bursts() -> None:
    """A request of 500 and 100 tokens adds 0.05 + 100 x (0.1 + 0.055 ms) = 65.5 ms: 10 a second are 0.655 s
    of work a second. From 0.5 on two workers, from 1 on three, beyond 2 in proportion. Twice the prompt: 1.2.
    Thrice the rate in one of twelve spans: the 95th percentile is 0.45 of the way there, 1.24."""
    rule = LoadRule((0.5, 1.0), 2.0, 15.0, 180.0)
    assert [rule.workers_for_load(load) for load in (0.0, 0.5, 0.6, 1.0, 1.1, 2.0, 4.0)] == [
        0,
        1,
        2,
        2,
        3,
        3,
        6,
    ]
    own = knowledge(engines=(ENGINE,), rules=(rule,))
    assert ENGINE.work_s("mixed", 500, 100) == pytest.approx(0.0655)

    def asked(rates: list[float], prompt: float) -> int:
        controller = parse_controller("fleetplan", {"headroom": "0 %", "hold": "0 s"})(own)
        controller.start([1])
        for k, rate in enumerate(rates):
            tokens = {"input_tokens": [prompt], "output_tokens": [100.0]}
            sizes = controller.sizes(reading(15.0 * (k + 1), ready=[1], arrived=[round(15 * rate)], **tokens))
        return int(sizes[0])

    assert asked([10.0] * 12, 500) == 2
    assert asked([10.0] * 12, 1000) == 3
    assert asked([10.0] * 11 + [30.0], 500) == 3


def test_a_window_of_one_span_is_the_last_one_at_every_look() -> None:
    """10 requests/s are 0.655 s of work a second. Three minutes later the load has them all, and a minute
    after they end two thirds, 0.437. It changed every three minutes alone: one worker for up to six.
    """
    own = knowledge(engines=(ENGINE,), rules=(LoadRule((0.5,), 2.0, 180.0, 180.0),))
    controller = parse_controller("fleetplan", {"headroom": "0 %", "hold": "0 s", "ahead": "0 s"})(own)
    controller.start([1])
    sizes, tokens = [], {"input_tokens": [500.0], "output_tokens": [100.0]}
    for k, arrived in enumerate([1] * 5 + [150] * 13 + [1] * 5):
        sizes.append(controller.sizes(reading(15.0 * (k + 1), ready=[1], arrived=[arrived], **tokens))[0])
    assert sizes == [1] * 14 + [2] * 6 + [1] * 3


def test_by_load_without_rules_is_by_rate() -> None:
    assert (
        run("fleetplan", {"by": "load"}, [8.0] * 5) == run("fleetplan", {"by": "rate"}, [8.0] * 5) == [5] * 5
    )
