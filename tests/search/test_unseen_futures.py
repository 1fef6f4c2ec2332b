"""The test of a fleet on unseen scenarios asks several at once, and never one that it need not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shares import some

from planner.documents.facts import FewerTested, KeptIn
from planner.documents.safety import Safety
from planner.search.production import scenario_test
from planner.search.production.scenario_test import LEAST_TEST_SCENARIOS, TEST_REQUESTS
from planner.search.production.three_answers import _one_fewer_refused
from planner.solvers.repeats import decide_sequentially


@dataclass
class Outcomes:
    """An oracle whose scenarios are numbers, each kept or not; it notes which it was asked about."""

    kept: list[bool]
    asked: list[int] = field(default_factory=list)
    trace: Any = field(default_factory=lambda: range(TEST_REQUESTS // 60))

    def in_scenario(self, number: int) -> Any:
        self.asked.append(number)
        return SimpleNamespace(holds=lambda _: self.kept[number])


def one_by_one(kept: list[bool], most: int) -> tuple[int, int]:
    """Wald's test between 85 and 95 % as it is defined: kept, and of how many."""
    number = held = 0
    may_pass = decide_sequentially(most, most, 0.85, 0.95) == "holds"
    while number < most and decide_sequentially(held, number, 0.85, 0.95) == "open":
        held += kept[number]
        number += 1
        if may_pass and decide_sequentially(held + most - number, most, 0.85, 0.95) != "holds":
            break
    return held, number


@pytest.mark.parametrize("seed", some(range(60), 20))
def test_it_asks_what_one_by_one_would_and_says_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept = (rng.random(200) < rng.uniform(0.6, 1.0)).tolist()
    oracle: Any = Outcomes(kept)
    most = 60 if seed % 2 else LEAST_TEST_SCENARIOS
    oracle.trace = range(TEST_REQUESTS // most)
    futures: Any = range(1000)
    said = scenario_test.ScenarioTest(oracle, futures, Safety(kept_in_frac=0.9), 0, lambda: False).decide(())
    held, number = one_by_one(kept, most)
    assert said == replace(said, kept=held, scenario_count=number)
    assert sorted(oracle.asked) == list(range(number))


def test_nothing_is_asked_once_the_time_is_over() -> None:
    oracle: Any = Outcomes([True] * 60)
    oracle.trace = range(scenario_test.AT_ONCE_REQUESTS)
    futures: Any = range(60)
    said = scenario_test.ScenarioTest(
        oracle, futures, Safety(kept_in_frac=0.9), 0, lambda: len(oracle.asked) > 5
    ).decide(())
    assert (
        isinstance(said, KeptIn) and said.scenario_count == len(oracle.asked) < 10 and said.decision == "open"
    )


def test_the_fleet_with_a_worker_less_that_fails_is_kept_with_its_result() -> None:
    """Of pools p and d: a prefill worker less keeps 0 scenarios, a decode worker less four of five."""
    prefill, decode = (SimpleNamespace(name=name) for name in ("p", "d"))
    best: Any = ((prefill, 2), (decode, 3))
    oracle: Any = Outcomes(([True] * 4 + [False]) * 12)
    test = scenario_test.ScenarioTest(oracle, range(1000), Safety(kept_in_frac=0.9), 0, lambda: False)  # type: ignore[arg-type]
    fewer = test.decide(((prefill, 2), (decode, 2)))  # type: ignore[arg-type]
    assert fewer.kept > 0 and fewer.decision != "holds"
    oracle.kept = [False] * 60
    test.decide(((prefill, 1), (decode, 3)))  # type: ignore[arg-type]
    oracle.kept = [True] * 60
    passed = test.decide(best)
    trial = scenario_test.FleetTrial(best, passed, None, test)  # type: ignore[arg-type]
    assert _one_fewer_refused(trial) == FewerTested((2, 2), fewer, 0.9)
    assert _one_fewer_refused(replace(trial, best=((prefill, 9), (decode, 9)))) is None  # type: ignore[arg-type]
