"""Shares of service: by hand on tiny runs, and one misbehaving tenant under fcfs and vtc."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from simulations import LLM, make_latency, make_pool, make_trace, prefix_trace

from planner.documents.slo import parse_slo, slo_document
from planner.domain import Limit, ServiceGuarantee, Slo
from planner.errors import InputError
from planner.fleet import Fleet, Policies
from planner.simulator import judge_slo, simulate
from planner.simulator.layout import RUN
from planner.simulator.service_shares import judge_guarantees, tenant_shares
from planner.simulator.simulation import Simulation
from planner.traffic.classes import check_classes, check_judged_classes


def a_run(rows: list[tuple[int, float, float, float, float, int, int]], weights: npt.ArrayLike) -> Simulation:
    """(tenant, arrival, scheduled, first token, end, prompt, output) of each request."""
    tenant, arrival_s, scheduled_s, first_s, end_s, prompt, output = map(np.array, zip(*rows, strict=True))
    n, names = len(rows), tuple("ab"[: len(np.asarray(weights))])
    nothing = np.zeros(n)
    return Simulation(
        arrival_s=arrival_s,
        input_tokens=prompt,
        output_tokens=output,
        queue_s=scheduled_s - arrival_s,
        ttft_s=first_s - arrival_s,
        tpot_s=nothing,
        tbt_max_s=nothing,
        e2e_s=end_s - arrival_s,
        prefill_worker=nothing.astype(np.int64),
        decode_worker=nothing.astype(np.int64),
        preemptions=nothing.astype(np.int64),
        status=nothing.astype(np.int64),
        worker_names=("w",),
        worker_busy_s=np.zeros(1),
        worker_steps=np.zeros(1, np.int64),
        worker_tokens=np.zeros(1),
        window_s=(0.0, 1000.0),
        end_s=1000.0,
        limits=(),
        violations=np.zeros(0, np.int64),
        counted=np.zeros(0, np.int64),
        complete=True,
        runs=np.zeros(0, RUN),
        tenant=tenant,
        tenants=names,
        tenant_weights=np.asarray(weights, float),
        token_weights=(1.0, 2.0),
    )


# a: a prompt of 100 tokens from 0 to 10 s, then output of 1 + 45 tokens until 100 s, with 2 of service each;
# its second request waits from 0 s to 100 s. b: a prompt of 300 tokens from 0 to 100 s, and one token.
ROWS = [
    (0, 0.0, 0.0, 10.0, 100.0, 100, 46),
    (0, 0.0, 100.0, 110.0, 110.0, 500, 1),
    (1, 0.0, 0.0, 100.0, 100.0, 300, 1),
]


def test_two_tenants_by_hand() -> None:
    """a waits from 0 to 100 s: two windows of 50 s. In the first it gets 100 + 2 + 2 x 20 = 142 of service
    and b 150, so 142 / 146; in the second 2 x 25 = 50 and b 150 + 2, so 50 / 101. b never waits.
    """
    of_a, of_b = tenant_shares(a_run(ROWS, [1.0, 1.0]), 50.0)
    assert of_a.windows == 2 and of_a.window_s == (50.0, 100.0)
    assert of_a.share_frac == pytest.approx(50 / 101)
    assert of_b.windows == 0 and math.isnan(of_b.share_frac) and of_b.window_s is None
    [first, _] = tenant_shares(a_run(ROWS, [1.0, 1.0]), 100.0)
    assert first.share_frac == pytest.approx(192 / (494 / 2)) and first.windows == 1
    assert tenant_shares(a_run(ROWS, [1.0, 1.0]), 101.0)[0].windows == 0


def test_weights_move_what_is_fair() -> None:
    """With a third of the weight a's fair share of the second window is 202 / 4, and 50 are 99 % of it."""
    assert tenant_shares(a_run(ROWS, [1.0, 3.0]), 50.0)[0].share_frac == pytest.approx(50 / (202 / 4))


def test_no_more_is_owed_than_waits() -> None:
    """As above, but what waits at 100 s is 10 + 2 of service: a got 192 of 204."""
    rows = [ROWS[0], (0, 0.0, 100.5, 110.0, 110.0, 10, 1), ROWS[2]]
    assert tenant_shares(a_run(rows, [1.0, 1.0]), 100.0)[0].share_frac == pytest.approx(
        (192 + 0) / min(12 + 192, 493.0), rel=0.01
    )


def test_cached_tokens_are_no_service_and_who_is_away_gets_no_share() -> None:
    """b's prompt was cached, so it gets 2 at 100 s; and where b comes after the window all is a's."""
    run = replace(a_run(ROWS, [1.0, 1.0]), cached_tokens=np.array([0, 0, 300]))
    assert tenant_shares(run, 100.0)[0].share_frac > 1
    alone = [*ROWS[:2], (1, 100.0, 100.0, 120.0, 120.0, 300, 1)]
    assert tenant_shares(a_run(alone, [1.0, 1.0]), 100.0)[0].share_frac == pytest.approx(1.0)


def test_a_guarantee_is_of_the_tenant_with_the_least() -> None:
    slo = Slo((), guarantees=(ServiceGuarantee(None, 0.9, 50.0), ServiceGuarantee("b", 1.0, 50.0)))
    each, named = judge_guarantees(a_run(ROWS, [1.0, 1.0]), slo)
    assert (each.least.tenant, each.windows, each.holds) == ("a", 2, False)
    assert (named.least.tenant, named.windows, named.holds) == ("b", 0, True)


PROMPT_S = 64 / 1024


def shares_under(queue: str) -> list[bool]:
    """Whether a fleet of one worker keeps 80 % for each of two tenants. The first asks for half as many
    prompts of 64 tokens as the worker computes, evenly; the second asks for 300 at once.
    """
    arrivals = [(k * 2 * PROMPT_S, 0) for k in range(150)] + [(0.0, 1)] * 300
    arrivals.sort()
    trace = prefix_trace(
        [at_s for at_s, _ in arrivals],
        [[4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3] for k in range(len(arrivals))],
        tenant=[u for _, u in arrivals],
    )
    pool = make_pool(make_latency((1 / 1024, 1.0)), count=1, kv_tokens=16_000, seats=8, budget=64)
    policies = Policies(prefix_cache=True, routing="round-robin", queue=queue)
    limits = (Limit("ttft", 0.5, 1e6),)
    slo = Slo(limits, guarantees=(ServiceGuarantee(None, 0.8, 20 * PROMPT_S),))
    simulation = simulate(Fleet(LLM, (pool,), policies), trace, limits=limits)
    verdict = judge_slo(simulation, slo)
    assert verdict.holds == verdict.guarantees_hold or not verdict.is_steady
    return [line.holds for line in verdict.guarantees]


def test_one_misbehaving_tenant_breaks_the_share_of_others_under_fcfs_and_not_under_vtc() -> None:
    assert shares_under("fcfs") == [False]
    assert shares_under("vtc") == [True]


def test_guarantees_are_read_and_written() -> None:
    document = {"ttft": {"p90": "2 s"}, "tenants": {"each": {"share_frac": 0.9}}}
    slo = parse_slo(document, where="slo")
    assert slo.guarantees == (ServiceGuarantee(None, 0.9),)
    named = parse_slo(
        document | {"tenants": {"gold": {"share_frac": 1, "window": "2 min"}, "each": {"share_frac": 0.5}}},
        where="slo",
    )
    assert named.guarantee_of("gold") == ServiceGuarantee("gold", 1.0, 120.0)
    assert named.guarantee_of("other") == ServiceGuarantee(None, 0.5)
    for each in (slo, named):
        assert parse_slo(slo_document(each), where="slo") == each


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ({"each": {"share_frac": 0}}, r"slo: tenants: each: share_frac: .*above 0"),
        ({"each": {"share_frac": 1.1}}, r"share_frac: expected a number from 0 to 1 such as 0.9"),
        ({"each": {}}, r"share_frac: expected a number from 0 to 1 such as 0.9"),
        ({"each": {"share": 0.9}}, r"tenants: each.*share"),
        ({}, r"tenants: is empty"),
    ],
)
def test_a_guarantee_that_says_nothing_is_refused(tenants: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_slo({"ttft": {"p90": "2 s"}, "tenants": tenants}, where="slo")


def test_tenants_must_be_those_of_the_trace() -> None:
    slo = Slo((Limit("ttft", 0.9, 2.0),), guarantees=(ServiceGuarantee("gold", 0.9),))
    trace = make_trace([0.0, 1.0], [16, 16], [1, 1])
    with pytest.raises(InputError, match=r"slo: tenants: made names no tenants.*add|column tenant"):
        check_classes(slo, trace)
    named = replace(trace, tenant=np.array([0, 1]), tenants=("a", "b"))
    with pytest.raises(InputError, match=r"tenants: .*gold.* has no request in made, whose tenants are .*a"):
        check_classes(slo, named)
    check_classes(replace(slo, guarantees=(ServiceGuarantee(None, 0.9),)), named)


def test_a_window_that_no_trace_fills_is_refused() -> None:
    """A plan said that each tenant gets its share, of 100 s of which no window of 3 h was judged."""
    trace = replace(make_trace(np.arange(101.0), [16] * 101, [1] * 101), tenant=np.arange(101) % 2)
    trace = replace(trace, tenants=("a", "b"))
    limits = (Limit("ttft", 0.9, 2.0),)
    longest = Slo(limits, guarantees=(ServiceGuarantee(None, 0.9, 95.0),))
    check_judged_classes(longest, trace)
    too_long = replace(longest, guarantees=(ServiceGuarantee("a", 0.9, 3 * 3600.0),))
    with pytest.raises(
        InputError, match=r"slo: tenants: a: a window of 3.* is longer than the 95.0* s of made"
    ):
        check_judged_classes(too_long, trace)
