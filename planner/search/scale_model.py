"""A scale model of a large question: one request in so many, served by one worker in so many of each pool.

Production simulates every fleet in dozens of futures, so a search that may cost MOST_SEARCH requests would
see little of a question with hundreds of thousands. Behind a balancing router a pool of hundreds of workers
is much like one of dozens with as much work for each, which waits a little longer: the sum of more users is
smoother. So a fleet that keeps the SLO in the model mostly keeps it at full size too, with a few workers to
spare. That is not taken on trust: what the model finds is tested at full size, in futures that no search has
seen (answers.py).

Where requests share prefixes, or adapters, a part of them finds less in a cache, and there is no model.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.search.fleets import Counts
from planner.search.futures import one_of
from planner.search.problem import Problem
from planner.search.production import in_most

FULL_REQUESTS = 200_000  # with fewer the question itself is searched
MODEL_REQUESTS = 50_000  # that a model has at least,
MODEL_WORKERS = 16  # and in each pool of the fleet on paper


def scale_model(problem: Problem, paper: Counts) -> Problem:
    """The model of a question whose cheapest fleet on paper is known; itself where it is none too large."""
    many = min(len(problem.trace) // MODEL_REQUESTS, *(count // MODEL_WORKERS for _, count in paper))
    shares = problem.trace.has_prefixes or problem.trace.adapters
    if many < 2 or len(problem.trace) <= FULL_REQUESTS or shares or problem.draws:
        return problem
    assert problem.searched is not None and problem.tested is not None
    return replace(
        problem,
        oracle=replace(
            problem.oracle, trace=one_of(problem.trace, many, np.random.default_rng(0)), one_in=many
        ),
        searched=problem.searched.one_of(many),
        tested=problem.tested.one_of(many),
    )


def at_full_size(problem: Problem, modelled: Problem) -> Problem:
    """The question itself in the futures that its model is asked of, in their order."""
    if modelled.oracle.one_in == problem.oracle.one_in:
        return modelled
    kinds = {futures.kind: futures for futures in (problem.searched, problem.tested) if futures is not None}
    futures = [kinds[future.futures.kind][future.number] for future in modelled.oracle.futures]
    whole = replace(problem, oracle=replace(problem.oracle, until=modelled.oracle.until))
    return in_most(whole, futures, modelled.oracle.may_miss)
