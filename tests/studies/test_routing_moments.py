"""The routing beside the best packing: moments by hand, both kinds of fleet, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plans import LIMITS, mixed, pairs
from typer.testing import CliRunner

from planner.cli import app
from planner.domain import Limit, Slo
from planner.errors import InputError
from planner.fleet import Fleet
from planner.simulator.replay import simulate
from planner.studies.routing_moments import explain_routing, routing_sentences
from planner.traffic.trace import Trace

SLO = Slo(LIMITS)


def a_burst(requests: int, output_tokens: int = 400) -> Trace:
    """So many prompts of 1600 tokens at once, and one more a second later that is the end of the trace."""
    arrival_s = np.array([0.0] * requests + [1.0])
    n = len(arrival_s)
    return Trace("burst", arrival_s, np.full(n, 1600), np.full(n, output_tokens))


def test_one_request_on_each_worker_fits_one_worker() -> None:
    """Two requests on two of the mixed workers: one worker could hold both. Each has 100 blocks of prompt and
    at most one of output of 10,000, and seats of 256, so the largest load is that of a request alone or that
    of its part of a step; two on one worker would be fuller.
    """
    fleet = mixed()
    [moment] = explain_routing(fleet, simulate(fleet, a_burst(2), record=True), None, 1)
    assert (moment.time_s, moment.role, moment.requests, moment.used) == (0.5, "mixed", 2, 2)
    assert moment.best.fewest == 1 and moment.best.is_fewest
    assert moment.largest == pytest.approx(101 / 10_000, rel=0.02)
    assert moment.best.least == pytest.approx(moment.largest) and moment.best.is_least


def test_round_robin_is_found_out() -> None:
    """Long and short prompts in turn on two workers: round robin gives one worker all four long ones of 200
    blocks and some output, where two long and two short ones are possible.
    """
    fleet = mixed()
    fleet = replace(
        fleet,
        pools=(replace(fleet.pools[0], count=2),),
        policies=replace(fleet.policies, routing="round-robin"),
    )
    trace = a_burst(8)
    trace = replace(
        trace, arrival_s=np.array([0.0] * 8 + [4.0]), input_tokens=np.array([3200, 160] * 4 + [160])
    )
    explained = explain_routing(fleet, simulate(fleet, trace, record=True), None, 1)
    assert explained[0].largest == pytest.approx(4 * 201 / 10_000, rel=0.04)
    assert explained[0].best.least == pytest.approx((2 * 201 + 2 * 11) / 10_000, rel=0.1)
    more = explained[0].largest / explained[0].best.least - 1
    assert f"{100 * more:.0f} % fuller than in the most even packing" in routing_sentences(explained)[0]


@pytest.mark.long
@pytest.mark.parametrize("fleet", [mixed(), pairs()])
def test_every_role_at_every_moment(fleet: Fleet) -> None:
    """No packing is fuller than the routing, or on more workers where the routing keeps the limits."""
    trace = Trace("t", np.arange(60) / 6.0, np.full(60, 1500), np.full(60, 200))
    simulation = simulate(fleet, trace, limits=SLO.limits, record=True)
    explained = explain_routing(fleet, simulation, SLO, 5)
    roles = {pool.role for pool in fleet.pools}
    assert len(explained) == 5 * len(roles) and {each.role for each in explained} == roles
    assert any(each.requests for each in explained)
    for each in explained:
        assert each.best.least <= each.largest * (1 + 1e-9)
        if each.largest <= 1 and each.best.fewest is not None:
            assert each.best.fewest <= each.used


def test_what_cannot_be_explained_is_refused(tmp_path: Path) -> None:
    fleet, trace = mixed(), a_burst(2)
    simulation = simulate(fleet, trace, record=True)
    with pytest.raises(InputError, match=r"explain-moments: found 0, must be 1 to 1000"):
        explain_routing(fleet, simulation, None, 0)
    with pytest.raises(InputError, match=r"keep their role, found pools: flip"):
        explain_routing(replace(fleet, policies=replace(fleet.policies, pools="flip")), simulation, None, 1)
    with pytest.raises(InputError, match=r"takes .* without requests, more than the limit of 1 ms"):
        explain_routing(fleet, simulation, Slo((Limit("tbt", 0.99, 1e-3),)), 1)
    for options, message in (
        (["--explain-moments", "3"], "goes with --explain-routing"),
        (["--explain-routing", "--seeds", "2"], "drop --seeds"),
        (["--explain-routing", "--autoscale", "hpa"], "drop --autoscale"),
    ):
        result = CliRunner().invoke(app, ["simulate", "--fleet", str(tmp_path / "f.yaml"), *options])
        assert isinstance(result.exception, InputError) and message in str(result.exception)
