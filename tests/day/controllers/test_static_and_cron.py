"""Sizes that follow nothing but the clock."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from readings import knowledge, per_worker, reading
from simulations import make_trace

from planner.day import day_study
from planner.day.controllers.knowledge import History, Knowledge
from planner.day.controllers.table import ChosenController, parse_controller
from planner.errors import InputError
from planner.units import DAY_S


def test_static_stays_what_it_was_or_what_it_is_told() -> None:
    own = knowledge(("prefill", "decode"), most=5)
    for parameters, sizes in (({}, [2, 4]), ({"workers": 3}, [3, 3]), ({"workers": [1, 9]}, [1, 5])):
        controller = parse_controller("static", parameters)(own)
        controller.start([2, 4])
        assert [controller.sizes(reading(t, ready=[0, 0])) for t in (0.0, 1e5)] == [sizes, sizes]


def test_static_sizes_of_other_pools() -> None:
    with pytest.raises(InputError, match=r"'static': workers: .* 3 numbers, the fleet has 2 pools"):
        parse_controller("static", {"workers": [1, 2, 3]})(knowledge(("prefill", "decode")))


def test_cron_takes_the_most_of_its_windows() -> None:
    windows = [{"from": "08:00", "to": "20:00", "workers": 4}, {"from": "12:00", "to": "14:00", "workers": 7}]
    controller = parse_controller("cron", {"windows": windows})(knowledge(least=2, clock_s=3 * DAY_S))
    assert [controller.sizes(reading(3600.0 * hour))[0] for hour in (7, 8, 12, 14, 20)] == [2, 4, 7, 4, 2]


def test_windows_of_pools_that_are_not_there() -> None:
    windows = [{"from": "08:00", "to": "20:00", "workers": [4, 2]}]
    with pytest.raises(InputError, match=r"'cron': windows: .* 2 pools, the fleet has 1"):
        parse_controller("cron", {"windows": windows})(knowledge())


def test_a_timetable_made_of_two_days() -> None:
    """Two days that end on Wednesday 6:00, hourly 2 requests/s but 9 from 12:00 to 13:00 of the first: five
    workers of 2 from 11:50 to 13:00, one else (two with a headroom of 10 %)."""
    rates = np.full(48, 2.0)
    rates[6] = 9.0  # from Monday 12:00
    known: dict[str, Any] = {
        "history": History(3600.0, rates),
        "capacity": per_worker(1.0, 2.0),
        "clock_s": 2 * DAY_S + 6 * 3600,
    }
    controller = parse_controller("cron", {})(knowledge(**known))
    hours = (5.8, 5.84, 6.9, 7.0, 20.0, 24 + 5.84)
    assert [controller.sizes(reading(3600.0 * hour))[0] for hour in hours] == [1, 5, 5, 1, 1, 5]
    more = parse_controller("cron", {"headroom": "10 %"})(knowledge(**known))
    assert more.sizes(reading(0.0)) == [2]


def test_an_hour_that_no_day_shows_has_the_sizes_of_the_highest() -> None:
    """Twelve hours of 2 and 9 requests/s that end at noon: five workers of 2 in the afternoon."""
    history = History(3600.0, np.array([2.0] * 11 + [9.0]))
    own = knowledge(history=history, capacity=per_worker(1.0, 2.0), clock_s=12 * 3600.0)
    controller = parse_controller("cron", {})(own)
    assert [controller.sizes(reading(3600.0 * hour))[0] for hour in (1, 11, 13, 22.9)] == [5, 5, 1, 5]


def test_a_timetable_of_nothing() -> None:
    with pytest.raises(InputError, match="'cron' needs arrivals of earlier days"):
        parse_controller("cron", {})(knowledge())


def test_a_timetable_of_whole_days_is_open_all_day() -> None:
    """The window began 10 minutes before its end, so the pool had its least size for the rest of the day."""
    own = knowledge(history=History(3600.0, np.full(24, 9.0)), capacity=per_worker(1.0, 2.0))
    controller = parse_controller("cron", {"step": "24 h"})(own)
    assert [controller.sizes(reading(3600.0 * hour))[0] for hour in (0, 12, 23.9)] == [5, 5, 5]


def test_a_timetable_is_tuned_at_the_hours_that_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighteen hours from midnight on, 9 requests/s from 6:00 to 7:00 and 2 else: when its settings are tuned
    on these hours, cron has its five workers at 6:30, not eighteen hours off at 12:30.
    """
    rates = np.full(18, 2.0)
    rates[6] = 9.0
    own = knowledge(history=History(3600.0, rates), capacity=per_worker(1.0, 2.0), clock_s=18 * 3600.0)
    sizes: list[int] = []

    def simulate(_: object, chosen: ChosenController, known: Knowledge) -> None:
        controller = chosen(known)
        sizes.extend(controller.sizes(reading(3600.0 * hour))[0] for hour in (6.5, 12.5))

    monkeypatch.setattr(day_study, "simulate_controller", simulate)
    monkeypatch.setattr(day_study, "score_day", lambda *_: (0.0, 0.0, 0))
    question, terms = cast(day_study.DayQuestion, None), cast(day_study.MissTerms, None)
    day_study.tune_controller(
        question, parse_controller("cron", {}), own, terms, day_study.MOST_VARIANTS, lambda _: None
    )
    assert sizes[:2] == [5, 1]


def test_the_traffic_begins_on_a_monday_for_every_controller() -> None:
    """Traffic of a day, which cron alone took for a Tuesday's."""
    windows = [{"from": "08:00", "to": "20:00", "workers": 4, "days": ["mon"]}]
    cron = parse_controller("cron", {"windows": windows})
    known = day_study.knowledge_of(cron, knowledge(), make_trace([0.0, 0.9 * DAY_S], [10, 10], [2, 2]))
    assert cron(known).sizes(reading(12 * 3600.0)) == [4]
    assert known.history is not None and known.history.rates_rps[0] > 0
