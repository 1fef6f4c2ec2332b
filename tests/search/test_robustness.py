"""How robust a plan is: numbers of workers in proportion, the fewest that hold, turns of prices."""

from __future__ import annotations

import pytest
from plans import CATALOG, a_pool, a_trace, mixed, pairs
from questions import question, traffic

from planner.fleet import Fleet
from planner.reports.fact_sentences import fact_sentences_of
from planner.search.evidence.certify import plan
from planner.search.evidence.findings import one_trace_warnings
from planner.search.evidence.robustness import (
    find_price_turns,
    in_proportion,
    least_in_proportion,
    numbers_beside,
)
from planner.search.problem.bill import bill_fleet
from planner.search.problem.plan_problem import Conditions
from planner.search.problem.stages import Message, Stage, left_s, phase_of
from planner.studies.what_if import Study
from planner.traffic.prefixes import with_longer_prompts


@pytest.mark.parametrize(
    ("planned", "workers", "dealt"),
    [((4, 2), 5, (3, 2)), ((4, 2), 3, (2, 1)), ((4, 2), 8, (5, 3)), ((9, 1), 2, (1, 1)), ((3,), 7, (7,))],
)
def test_workers_are_dealt_out_as_in_the_plan(
    planned: tuple[int, ...], workers: int, dealt: tuple[int, ...]
) -> None:
    """5 of (4, 2): 3.33 and 1.67, the larger remainder gets the worker. No pool is left without one."""
    assert in_proportion(planned, workers) == dealt


def test_two_numbers_below_and_above_in_steps_of_a_tenth() -> None:
    assert numbers_beside((4, 2)) == [(3, 1), (3, 2), (4, 2), (5, 2), (5, 3)]
    assert numbers_beside((40,)) == [(32,), (36,), (40,), (44,), (48,)]
    assert numbers_beside((1,)) == [(1,), (2,), (3,)]


@pytest.mark.parametrize(("needed", "found"), [(4, 10), (10, 10), (13, 13), (23, 23), (31, None)])
def test_the_fewest_workers_that_hold(needed: int, found: int | None) -> None:
    """Of 10 planned; fewer are not tried, nor more than three times as many."""
    counts = least_in_proportion((10,), lambda counts: counts[0] >= needed)
    assert counts == (None if found is None else (found,))


def test_prompts_grow_and_answers_do_not() -> None:
    trace = a_trace(3)
    longer = with_longer_prompts(trace, 0.5)
    assert longer.input_tokens.tolist() == [150, 161, 171]
    assert longer.output_tokens.tolist() == trace.output_tokens.tolist()


def test_the_price_from_which_another_fleet_is_cheaper() -> None:
    """4 x 4 H100 cost 47.84 USD/h and grow by all of that when H100 doubles; 4 x 4 A100 cost more now and do
    not grow: the two bills meet where 47.84 (1 + x) is theirs. More H100 never cost less.
    """
    own = mixed(count=4)
    other = Fleet(own.llm, (a_pool("mixed", "mixed", "a100-80g", 4, 7),))
    theirs, ours = bill_fleet(other).usd_per_h, bill_fleet(own).usd_per_h
    (turn,) = find_price_turns(own, [("A100", other), ("more", mixed(count=6))])
    assert (turn.gpu, turn.instead) == ("h100-80g", "A100")
    assert turn.more_frac == pytest.approx(theirs / ours - 1)


def test_a_fleet_that_is_cheaper_already_is_no_turn_of_prices() -> None:
    """What is cheaper on paper is not kept in production: no rise of prices makes it the plan."""
    assert find_price_turns(pairs(), [("smaller", mixed(count=1))]) == ()


def test_time_left_is_what_the_share_says_and_at_most_the_limit() -> None:
    """Half in 10 s of work leaves 10 s; where the limit leaves 5 s, these."""
    assert left_s(10.0, 0.5, 120.0) == pytest.approx(10.0)
    assert left_s(10.0, 0.5, 5.0) == pytest.approx(5.0)
    assert left_s(10.0, 0.2, 120.0) is None


def test_a_message_has_its_phase_without_the_best_fleet_so_far() -> None:
    stage = Stage("pairs of pools", "pairs", "best so far 3.00 USD/h").with_prefix("8 requests/s found; ")
    assert stage == "8 requests/s found; pairs of pools; best so far 3.00 USD/h"
    assert phase_of(stage) == "8 requests/s found; pairs of pools" and stage.done_frac == 0.08
    assert phase_of(Message("walk")) == phase_of("walk") == "walk"


def test_a_plan_with_a_spare_worker_stands_the_loss_of_any_one() -> None:
    """A worker that is lost is lost alone: the spare one is there, and takes its place."""
    found = plan(
        question(spare=1), traffic(requests=200), CATALOG, conditions=Conditions(adds_robustness=True)
    )
    robustness = found.certificate.robustness
    assert robustness is not None and len(robustness.losses) == len(found.fleet.running_pools)
    assert all(lost.holds for lost in robustness.losses)


@pytest.mark.parametrize(("safety", "warned"), [({"kept_in": 0.9}, 1), ("none", 0)])
def test_futures_of_a_short_trace_are_said_to_be_redrawn_from_it_alone(safety: object, warned: int) -> None:
    """500 requests at 15 a second last about half a minute; without scenarios there is nothing to say."""
    trace = traffic()
    said = fact_sentences_of(one_trace_warnings(Study(trace, CATALOG).problem_of(question(safety=safety))))
    assert len(said) == warned
    assert all("this trace alone, which lasts" in each and "safety: {growth: 20 %}" in each for each in said)
