"""Whether an SLO is kept, from the kernel's counts, against the judgement of whole simulations."""

from __future__ import annotations

import numpy as np
from simulations import random_case

from planner.domain import Limit, Slo
from planner.search.oracle.simulation_queries import is_decided_by_counts, keeps_slo
from planner.simulator.measured_values import metric_percentile_s
from planner.simulator.replay import RequestRecords, simulate
from planner.simulator.slo_verdict import judge_slo


def test_counts_decide_as_the_judgement_of_a_whole_simulation_does() -> None:
    """Random fleets, engines and policies; limits at a value that the simulation has, or just below it."""
    outcomes = {True: 0, False: 0}
    for seed in range(300):
        fleet, trace, _, closed_loop = random_case(seed, dyadic=False)
        if closed_loop:
            continue
        rng = np.random.default_rng(seed)
        recorded = simulate(fleet, trace, record=True)
        limits = []
        for metric in ("ttft", "tbt", "tpot", "e2e"):
            percentile_frac = float(rng.choice([0.5, 0.9, 0.99]))
            limit_s = metric_percentile_s(recorded, metric, percentile_frac) * float(
                rng.choice([1.0, 1.0, 1.0, 0.999])
            )
            if rng.integers(2) and np.isfinite(limit_s) and limit_s > 0:
                limits.append(Limit(metric, percentile_frac, limit_s))
        slo = Slo(tuple(limits))
        is_kept = keeps_slo(fleet, trace, slo, RequestRecords(trace))
        assert is_kept == judge_slo(simulate(fleet, trace, limits=slo.limits), slo).holds, seed
        outcomes[is_kept] += is_decided_by_counts(fleet, trace, slo)
    assert min(outcomes.values()) > 30, outcomes
