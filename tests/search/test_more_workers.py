"""In scenarios, more workers are taken to keep what fewer keep (more_workers.py)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from plans import CATALOG
from questions import question, traffic

from planner.search.evidence.certify import search_llm
from planner.search.mixed.best_fleet import FleetSearch, best_of
from planner.search.oracle.deterministic_parallel import run_wave
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.more_workers import KeptFleets, may_take_for_granted
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.plan_problem import Problem, with_search_scenarios
from planner.search.production import cheapest_kept
from planner.search.production.cheapest_kept import find_cheapest_kept
from planner.search.production.scenario_test import untimed_test

QUESTION = {"safety": {"kept_in": 0.9}, "fleet": {"gpus": ["h100-80g"], "max_num_batched_tokens": 2048}}


@cache
def searched(requests: int) -> tuple[Problem, FleetSearch]:
    return best_of(search_llm(SearchInputs(question(**QUESTION), traffic(requests=requests), CATALOG)))


def kept_and_larger(requests: int) -> tuple[Problem, Counts, Counts]:
    """A problem in scenarios, a fleet that keeps enough of them, and that fleet with a worker more."""
    problem, paper = searched(requests)
    in_scenarios, best = find_cheapest_kept(with_search_scenarios(problem), paper)
    assert best is not None
    ((option, count), *others) = best
    return in_scenarios, best, ((option, count + 1), *others)


def test_search_simulates_no_larger_fleet_where_a_smaller_one_holds() -> None:
    """The larger fleet costs no simulation in any scenario that the smaller one keeps."""
    problem, best, larger = kept_and_larger(1_500)
    oracles = [problem.oracle.scenario_oracle(i) for i in range(len(problem.oracle.scenarios))]
    kept = [oracle for oracle in oracles if oracle.holds(best)]
    before = [oracle.simulations for oracle in kept]
    assert all(oracle.holds(larger) for oracle in kept) and kept
    assert [oracle.simulations for oracle in kept] == before


def test_short_traces_are_simulated() -> None:
    problem, best, larger = kept_and_larger(500)
    kept = next(o for o in map(problem.oracle.scenario_oracle, range(32)) if o.holds(best))
    before = kept.simulations
    kept.holds(larger)
    assert kept.simulations == before + 1


def test_a_test_simulates_every_fleet() -> None:
    """In the scenarios of a search, which take the larger fleet for kept, a test simulates it."""
    problem, best, larger = kept_and_larger(1_500)
    test = untimed_test(searched(1_500)[0])
    assert test is not None and not test.oracle.infers_kept
    scenario = problem.oracle.scenarios[-1]
    oracle = test.oracle.in_scenario(scenario)
    assert problem.oracle.in_scenario(scenario).holds(best) and not oracle.infers_kept
    oracle.holds(larger)
    assert oracle.simulations == 1 and oracle.effort() > 0


def test_production_with_one_more_worker_of_each_kind_is_not_simulated_for_a_loss() -> None:
    """Any loss leaves all workers of production, so nothing is simulated where production holds."""
    test = untimed_test(searched(1_500)[0])
    _, best, _ = kept_and_larger(1_500)
    larger = tuple((option, count + 1) for option, count in best)
    assert test is not None
    number = next(k for k in range(32) if test.oracle.in_scenario(test.scenarios[k]).holds(best))
    after_a_loss = test.after_a_loss().oracle.in_scenario(test.scenarios[number])
    assert after_a_loss.holds(larger) and not after_a_loss.effort()


@pytest.mark.parametrize("seed", range(2))
def test_what_is_taken_for_granted_is_so(seed: int) -> None:
    """Every fleet with up to two workers more, simulated where the smaller one holds."""
    problem, best, _ = kept_and_larger(1_500)
    rng = np.random.default_rng(seed)
    for i in rng.permutation(len(problem.oracle.scenarios))[:6]:
        oracle = problem.oracle.scenario_oracle(int(i)).as_written(
            scenario=problem.oracle.scenarios[i],
            step_time_sigmas=problem.oracle.scenarios[i].step_time_sigmas,
        )
        if oracle.holds(best):
            more = rng.integers(0, 3, len(best)).tolist()
            assert oracle.holds(tuple((o, n + m) for (o, n), m in zip(best, more, strict=True)))


def test_caches_and_sessions_are_not_taken_for_granted() -> None:
    problem, _ = searched(1_500)
    oracle = problem.oracle
    assert may_take_for_granted(oracle.trace, oracle.policies, oracle.network)
    cached = replace(oracle.policies, prefix_cache=True)
    assert not may_take_for_granted(oracle.trace, cached, oracle.network)
    after = replace(oracle.trace, after=np.array([[1, 0]]))  # Request 1 waits for request 0.
    assert not may_take_for_granted(after, oracle.policies, oracle.network)


def test_tasks_of_a_wave_do_not_see_what_others_learn() -> None:
    """The second task asks after the first has learned; it knows only what was learned before the wave, or by
    itself. After the wave all is known, also within a later wave.
    """
    kept, seen = KeptFleets(), []
    kept.add("before", (1,))

    def learn() -> None:
        kept.add("in the wave", (2, 1))
        seen.append(("own", kept.has_smaller("in the wave", (2, 2))))

    def look() -> None:
        seen.append(("other's", kept.has_smaller("in the wave", (2, 2))))
        seen.append(("before", kept.has_smaller("before", (1,))))
        run_wave([lambda: seen.append(("inner", kept.has_smaller("before", (2,)))), lambda: None])

    # Once the first ended, so that the order is that of the list on any number of cores.
    run_wave([lambda: (learn(), look()) and None, look])  # type: ignore[func-returns-value]
    outcomes = {name: {holds for each, holds in seen if each == name} for name, _ in seen}
    assert outcomes["own"] == {True} and outcomes["before"] == {True} and outcomes["inner"] == {True}
    assert outcomes["other's"] == {True, False}
    seen.clear()
    run_wave([look, look])
    assert ("other's", False) not in seen
    assert kept.has_smaller("in the wave", (3, 1)) and not kept.has_smaller("in the wave", (3, 0))


def test_growth_skips_only_pools_that_cannot_gain_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plain rule: simulate all, take the first of the largest gains."""
    rng, skipped = np.random.default_rng(0), 0
    for _ in range(300):
        kept = rng.integers(0, 7, rng.integers(2, 5)).tolist()
        prices = rng.choice([1.0, 2.0, 3.0, 6.0], len(kept)).tolist()
        simulated: list[int] = []

        def keep(_: Oracle, k: int, __: object, kept: list[int] = kept, log: list[int] = simulated) -> range:
            log.append(k)
            return range(kept[k])

        monkeypatch.setattr(cheapest_kept, "_kept_scenarios", keep)
        gains = [n / price for n, price in zip(kept, prices, strict=True)]
        expected = int(np.argmax(gains)) if max(gains) else None
        best: object = cheapest_kept._best_gain(None, range(len(kept)), prices, range(6))  # type: ignore[arg-type]
        assert best == expected
        skipped += len(kept) - len(simulated)
    assert skipped > 30
