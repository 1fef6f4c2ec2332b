"""What sliders read: against simulations of each setting by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plans import a_plan

from planner.simulator.replay import simulate
from planner.simulator.slo_verdict import judge_slo
from planner.studies import sliders
from planner.traffic.scaling import rescale_trace


def test_each_setting_is_the_simulation_of_that_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = a_plan()
    monkeypatch.setattr(sliders, "TRAFFIC", (0.5, 1.0, 4.0))
    monkeypatch.setattr(sliders, "STEPS", (1.0, 1.5))
    monkeypatch.setattr(sliders, "LIMITS", (0.01, 1.0))
    found = sliders.simulate_neighbours(plan.fleet, plan.trace, plan.slo, time_limit_s=1e6)
    assert found.is_whole
    own = found.sizes[found.plan]
    for t, traffic in enumerate(sliders.TRAFFIC):
        rate_rps = traffic * plan.trace.rate_rps
        trace = rescale_trace(plan.trace, rate_rps, scale="compress", rng=np.random.default_rng(0))
        for s, steps in enumerate(sliders.STEPS):
            pools = [replace(pool, type=pool.type.with_longer_steps(steps - 1)) for pool in plan.fleet.pools]
            fleet = replace(plan.fleet, pools=tuple(pools))
            for k, factor in enumerate(sliders.LIMITS):
                limits = tuple(replace(limit, limit_s=factor * limit.limit_s) for limit in plan.slo.limits)
                slo = replace(plan.slo, limits=limits, every_s=None)
                verdict = judge_slo(
                    simulate(fleet, trace, limits=limits, record=False), slo, with_percentiles=False
                )
                assert own.holds[t, s, k] == verdict.holds
                assert own.kept_frac[t, s, k].tolist() == [line.kept_frac for line in verdict.lines]
    assert own.holds.any() and not own.holds.all()


def test_without_time_nothing_is_claimed() -> None:
    plan = a_plan()
    found = sliders.simulate_neighbours(plan.fleet, plan.trace, plan.slo, time_limit_s=0.0)
    assert not found.is_whole and not any(size.holds.any() for size in found.sizes)
    assert np.isnan(found.sizes[found.plan].kept_frac).all()
