"""A scale model of a large problem: 1 in `downscale` requests, served by 1 in `downscale` workers.

Production simulates every fleet in dozens of scenarios, and its search may simulate a limited number of
requests (cheapest_kept.py: 8 million). With hundreds of thousands of requests per scenario that is enough for
a few fleets only. Behind a balancing router a pool of hundreds of workers behaves much like one of dozens
with as much work for each worker; in the smaller pool requests wait a little longer, because its load varies
more. So a fleet that keeps the SLO in the model usually keeps it at full size, with a few workers to spare.
Every fleet from the model is still tested at full size, in scenarios that no search has seen
(scenario_test.py).

No model is built if requests share prefixes or adapters, because a sample of requests finds less in the
caches; nor if the SLO must be kept on several draws of the traffic, because each draw would need a model.
"""

from dataclasses import replace

import numpy as np

from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.scenarios import thin_trace
from planner.search.problem.plan_problem import Problem, with_scenarios

# A problem with at most this many requests needs no model: MOST_SEARCH_REQUESTS of cheapest_kept.py are then
# 40 simulations.
FULL_REQUESTS = 200_000
# A model has at least this many requests, so that percentiles of rare waits are over many of them.
LEAST_MODEL_REQUESTS = 50_000
# Each pool of the fleet on paper has at least this many workers in the model: a smaller pool waits longer.
LEAST_MODEL_WORKERS = 16
# The model's sample of requests is drawn with a fixed seed: the same question gives the same plan.
MODEL_SEED = 0


def build_scale_model(problem: Problem, paper: Counts) -> Problem:
    """The model of a problem whose fleet on paper is `paper`; the problem itself if it needs none."""
    downscale = min(
        len(problem.trace) // LEAST_MODEL_REQUESTS, *(count // LEAST_MODEL_WORKERS for _, count in paper)
    )
    has_shared_work = problem.trace.has_prefixes or problem.trace.adapters
    if downscale < 2 or len(problem.trace) <= FULL_REQUESTS or has_shared_work or problem.draws:
        return problem
    # A question with production has scenarios for the search and for the test.
    assert problem.search_scenarios is not None and problem.test_scenarios is not None
    # Only what is simulated shrinks, traffic here and workers in the oracle: `problem.trace` stays, because
    # answers and reports are about the whole.
    return replace(
        problem,
        oracle=replace(
            problem.oracle,
            trace=thin_trace(problem.trace, downscale, np.random.default_rng(MODEL_SEED)),
            downscale=downscale,
        ),
        search_scenarios=problem.search_scenarios.thinned(downscale),
        test_scenarios=problem.test_scenarios.thinned(downscale),
    )


def restore_full_size(problem: Problem, modelled: Problem) -> Problem:
    """The problem at full size in the scenarios of its model, in the same order."""
    if modelled.oracle.downscale == problem.oracle.downscale:
        return modelled
    # A scenario of the model is found again at full size by its kind and number.
    full_by_kind = {
        full.kind: full for full in (problem.search_scenarios, problem.test_scenarios) if full is not None
    }
    scenarios = [
        full_by_kind[scenario.source.kind][scenario.number] for scenario in modelled.oracle.scenarios
    ]
    # The next search has the deadline of the model's search.
    full_size = replace(problem, oracle=replace(problem.oracle, until=modelled.oracle.until))
    return with_scenarios(full_size, scenarios, modelled.oracle.may_miss)
