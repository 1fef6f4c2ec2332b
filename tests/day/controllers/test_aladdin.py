"""Aladdin's rule on levels of traffic."""

from __future__ import annotations

import numpy as np
import pytest
from readings import knowledge, per_worker, reading

from planner.day.controllers.aladdin_controller import Aladdin
from planner.day.controllers.knowledge import CapacityTable
from planner.day.controllers.table import parse_controller
from planner.errors import InputError
from planner.simulator.elastic import MetricsReading


def aladdin(**parameters: object) -> Aladdin:
    made = parse_controller("aladdin", parameters)(knowledge(capacity=per_worker(1.0, 2.0)))
    assert isinstance(made, Aladdin)
    made.start([1])
    return made


def beat(minute: int, rate_rps: float, tokens: float = 600.0) -> MetricsReading:
    return reading(
        60.0 * minute,
        interval_s=60.0,
        arrived=[round(60 * rate_rps)],
        input_tokens=[tokens - 100],
        output_tokens=[100.0],
    )


def test_the_rule_at_a_level_and_at_the_next() -> None:
    """2 requests/s per worker: the rule that covers the table is ceil(r / 2) at whole rates. 5 requests/s: 3;
    a step to 11 is a change point of a few heartbeats: 6."""
    controller = aladdin()
    rng = np.random.default_rng(0)
    low = [controller.sizes(beat(k, 5 + rng.normal(0, 0.05)))[0] for k in range(30)]
    high = [controller.sizes(beat(30 + k, 11 + rng.normal(0, 0.05)))[0] for k in range(10)]
    assert low[5:] == [3] * 25
    assert high[1:] == [6] * 9


def test_noise_alone_moves_nothing() -> None:
    controller = aladdin()
    rng = np.random.default_rng(1)
    asked = [controller.sizes(beat(k, 5 + rng.normal(0, 0.3)))[0] for k in range(300)]
    assert set(asked[20:]) == {3}


def test_longer_requests_scale_the_slope() -> None:
    """600 tokens a request, then 1,200: twice the workers per request."""
    controller = aladdin()
    rng = np.random.default_rng(2)
    for k in range(30):
        controller.sizes(beat(k, 8, 600 + rng.normal(0, 3)))
    asked = [controller.sizes(beat(30 + k, 8, 1200 + rng.normal(0, 3)))[0] for k in range(10)]
    assert asked[-1] == 8


def test_a_table_of_one_rate_is_no_rule() -> None:
    table = CapacityTable(np.array([4.0]), np.array([[2]]), "by hand")
    with pytest.raises(InputError, match="controller 'aladdin': the worker rule needs pairs at two rates"):
        parse_controller("aladdin", {})(knowledge(capacity=table))
