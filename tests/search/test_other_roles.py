"""Cheaper fleets of the machines of a fleet, whose workers have other roles."""

import itertools
import math
from functools import cache

import pytest
from plans import CATALOG
from questions import question, traffic

from planner.search.evidence.certify import search_llm
from planner.search.mixed.best_fleet import FleetSearch, best_of
from planner.search.oracle.fleet_counts import Counts, names_of, objective_of
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.options import hardware_of
from planner.search.problem.plan_problem import Problem
from planner.search.production.like_price import below_like_price
from planner.search.production.other_roles import MOST_WORKERS, fleets_of_other_roles


@cache
def searched() -> tuple[Problem, FleetSearch]:
    """A question with one GPU type, answered on paper."""
    fleet = {"gpus": ["h100-80g"], "max_num_batched_tokens": 2048}
    one_gpu = question(safety={"kept_in": 0.9}, fleet=fleet)
    return best_of(search_llm(SearchInputs(one_gpu, traffic(0), CATALOG)))


def a_fleet(prefill: int, decode: int) -> Counts:
    """Prefill and decode workers of one machine."""
    _, paper = searched()
    of_role = {
        role: next(o for o in paper.level0.options if o.role == role and o.type.tp == 2)
        for role in ("prefill", "decode")
    }
    return (of_role["prefill"], prefill), (of_role["decode"], decode)


def test_every_role_is_given_to_no_more_workers_than_there_are() -> None:
    """By counting: of m mixed, p prefill and d decode workers, with p > 0 where d > 0. Workers cost the same,
    so of five at most those are cheaper that have four or fewer.
    """
    problem, paper = searched()
    best = a_fleet(3, 2)
    fleets = fleets_of_other_roles(problem, paper, best, below_like_price(problem, best))
    expected = [
        (m, p, d)
        for m, p, d in itertools.product(range(5), repeat=3)
        if 0 < m + p + d < 5 and (p > 0) == (d > 0)
    ]
    assert len(fleets) == len(expected) <= 32
    assert len({names_of(counts) for counts in fleets}) == len(fleets)
    for counts in fleets:
        by_role = {option.role: count for option, count in counts}
        assert tuple(by_role.get(role, 0) for role in ("mixed", "prefill", "decode")) in expected
        assert {hardware_of(option) for option, _ in counts} == {hardware_of(best[0][0])}
        assert objective_of(counts) < below_like_price(problem, best)


def test_those_with_fewest_workers_changed_come_first() -> None:
    problem, paper = searched()
    best = a_fleet(3, 2)
    cheaper_fleets = fleets_of_other_roles(problem, paper, best, below_like_price(problem, best))
    counts = [tuple(n for _, n in fleet) for fleet in cheaper_fleets]
    assert set(counts[:2]) == {(2, 2), (3, 1)}  # One worker less, the others as they are.
    assert set(counts[2:4]) == {(2, 1), (1, 2)}  # Two less; then one less and one in another role.
    assert (1, 2, 1) in counts[4:]


@pytest.mark.parametrize(("prefill", "decode"), [(MOST_WORKERS, 1), (1, MOST_WORKERS)])
def test_of_many_workers_none_is_listed(prefill: int, decode: int) -> None:
    problem, paper = searched()
    assert fleets_of_other_roles(problem, paper, a_fleet(prefill, decode), math.inf) == []
