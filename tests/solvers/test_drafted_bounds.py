"""Bounds on work where decodes draft: below what a worker takes that accepts every draft."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulations import LLM, make_latency, make_pool, make_trace

from planner.domain import Limit, Slo
from planner.fleet import Fleet, Pool
from planner.models.latency import StepLatency
from planner.models.speculation import Speculation
from planner.search.mixed.bounds import envelopes
from planner.search.problem.idle_limits import requests_to_judge, unreachable_limits
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.solvers.demand import least_work, step_lines
from planner.solvers.master import Option, least_seconds, least_token_seconds
from planner.traffic.trace import Trace

ALL = Speculation("ngram", (1.0, 1.0, 1.0))
TOKENS = make_latency((0.001, 1.0), knots=(1, 1000), b=0.001)  # what counts is how many tokens there are
FLOOR = make_latency((1.0, 1.0))  # a step takes a second
KV = make_latency((0.01, 0.01), a=0.0001, d=0.001)  # reading the cache is nearly all


def full(latency: StepLatency) -> tuple[Pool, Trace, Simulation]:
    """A worker of eight sequences and as many requests at once, so that every step of decodes is full."""
    pool = make_pool(latency, seats=8, kv_tokens=16 * 800)
    pool = replace(pool, type=replace(pool.type, speculation=ALL))
    rng = np.random.default_rng(3)
    trace = make_trace(np.zeros(8), rng.integers(20, 400, 8), rng.integers(40, 200, 8) * 4 + 1)
    return pool, trace, simulate(Fleet(LLM, (pool,)), trace)


@pytest.mark.parametrize(("latency", "is_closer"), [(TOKENS, False), (FLOOR, True), (KV, True)])
def test_least_work_is_below_what_a_worker_takes(latency: StepLatency, is_closer: bool) -> None:
    """Whatever says how many steps there are. Without the drafts two of three would be above."""
    pool, trace, found = full(latency)
    option, plain = (Option("mixed", kind, 1.0) for kind in (pool.type, replace(pool.type, speculation=None)))
    lengths = trace.input_tokens.astype(float), trace.output_tokens.astype(float)
    busy_s = float(found.worker_busy_s[0])
    assert least_seconds(option, *lengths).sum() <= busy_s
    works = [
        [sum(part.sum() for part in least_work(each, bound, *lengths)) for bound in step_lines(each)]
        for each in (option, plain)
    ]
    assert max(works[0]) <= busy_s
    assert bool(max(works[1]) > busy_s) is is_closer


def test_what_a_request_holds_is_below_what_it_held() -> None:
    """KV tokens x seconds, of steps that hold the tokens they check."""
    pool, trace, found = full(FLOOR)
    option, plain = (Option("mixed", kind, 1.0) for kind in (pool.type, replace(pool.type, speculation=None)))
    lengths = trace.input_tokens.astype(float), trace.output_tokens.astype(float)
    steps = (trace.output_tokens - 1) // 4  # each of a second, and from 4 tokens more on to 4 more
    held = trace.input_tokens * steps + 4 * steps * (steps + 1) / 2
    assert (least_token_seconds(option, *lengths) <= held * (1 + 1e-12)).all()
    assert (least_token_seconds(plain, *lengths) > held).all()
    assert found.complete


def test_a_decode_workers_step_has_all_of_its_drafts() -> None:
    """Tokens are cheapest in the fullest steps: eight sequences of four tokens, not eight of one."""
    kind = make_pool(make_latency((1.0, 1.0)), role="decode", seats=8).type
    drafts = replace(kind, speculation=ALL)
    seconds = [float(least_seconds(Option("decode", each, 1.0), 10.0, 33.0)) for each in (kind, drafts)]
    assert seconds == pytest.approx([32 / 8, 32 / 32])


def test_an_envelope_is_at_least_as_good_as_each_draft_length() -> None:
    kind = make_pool(KV, seats=8).type
    options = [
        Option("mixed", replace(kind, speculation=drafts, max_num_seqs=seats), 1.0)
        for drafts, seats in ((None, 8), (Speculation("ngram", (0.1,)), 8), (ALL, 4))
    ]
    (best,) = envelopes(options)
    for option in options:
        assert float(least_seconds(best, 100.0, 50.0)) <= float(least_seconds(option, 100.0, 50.0))


@pytest.mark.parametrize(("percentile_frac", "limit_s", "is_proved"), [(0.9, 0.9, True), (0.75, 0.9, False)])
def test_a_limit_on_gaps_is_out_of_reach_if_fewer_gaps_than_that_are_nothing(
    percentile_frac: float, limit_s: float, is_proved: bool
) -> None:
    """Of four tokens of a step three follow in no time: p75 may be 0, p90 is a step of a second."""
    pool, _, _ = full(FLOOR)
    trace = make_trace(np.arange(100.0) * 100, [10] * 100, [41] * 100)
    slo = Slo((Limit("tbt", percentile_frac, limit_s),))
    assert bool(unreachable_limits(slo, [pool.type], requests_to_judge(slo, trace))) is is_proved
    found = simulate(Fleet(LLM, (pool,)), trace, limits=slo.limits)
    kept = found.violations[0] <= (1 - percentile_frac) * found.counted[0] + 1e-9
    assert bool(kept) is not is_proved


def test_tokens_come_no_quicker_than_all_drafts_of_a_lone_decode_accepted() -> None:
    """Ten steps of a second for forty tokens: 0.25 s per token is reached, and nothing below."""
    pool, _, _ = full(FLOOR)
    trace = make_trace(np.arange(100.0) * 100, [10] * 100, [41] * 100)
    for limit_s, is_proved in ((0.249, True), (0.25, False)):
        slo = Slo((Limit("tpot", 0.9, limit_s),))
        assert bool(unreachable_limits(slo, [pool.type], requests_to_judge(slo, trace))) is is_proved
    found = simulate(Fleet(LLM, (pool,)), trace)
    assert found.tpot_s.max() == pytest.approx(0.25)
