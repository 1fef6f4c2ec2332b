"""Goodput: against planted thresholds, the theory of one queue, and the two rules against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.distserve_search import FirstRequests, highest_on_grid
from planner.domain import Gpu, Limit, Slo
from planner.errors import InputError
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.papers.goodput import Steady, bisect_highest, count_residences, find_goodput, poisson_traffic
from planner.traffic.trace import Trace

GPU = Gpu("paper", 1e3, 100.0, 1000.0, "wire", 10.0, 1.0, 8, 1.0, "paper", "paper")
LLM = Llm("paper", layers=4, hidden=4, heads=2, kv_heads=1, head_dim=1, ffn=8, vocab=10, context_tokens=64)
# every step takes a second, one request at a time: a queue with deterministic service
SERVER = WorkerType(GPU, 1, StepLatency((1.0, 2.0), (1.0, 1.0), 0, 0, 0, 0, 0, "a second"), 1600, 64, 1)
ONE = Fleet(LLM, (Pool("one", "mixed", SERVER, 1),), Policies())
PROMPTS = Trace("prompts", np.arange(10.0), np.full(10, 16), np.ones(10, np.int64))


@pytest.mark.parametrize("threshold", [0.013, 0.9, 1.0, 7.3, 4000.0])
def test_bisection_brackets_the_threshold(threshold: float) -> None:
    found = bisect_highest(lambda rate: rate <= threshold, tolerance_frac=0.01)
    assert found.rate_rps <= threshold < found.fails_rps <= 1.01 * found.rate_rps


def test_a_rate_that_nothing_carries_is_zero_and_one_that_all_do_is_endless() -> None:
    assert bisect_highest(lambda rate: False).rate_rps == 0
    assert bisect_highest(lambda rate: True).fails_rps == math.inf


def test_the_grid_is_that_of_distserve() -> None:
    """[0, 5] halved until 0.25: five rates, the last step 5 / 32. 1.6 lies in [1.5625, 1.71875)."""
    found = highest_on_grid(lambda rate: rate <= 1.6, 5.0, 0.25)
    assert (found.rate_rps, found.fails_rps, found.rates) == (1.5625, 1.71875, 5)


def test_goodput_of_one_server_is_that_of_queueing_theory() -> None:
    """M/D/1 with service 1 s: P(wait <= t) = (1 - rho) exp(rho t) for t <= 1 (Erlang 1909). TTFT P90 <= 1.5 s
    asks (1 - rho) exp(rho / 2) = 0.9, which rho = 0.1758 solves."""
    slo = Slo((Limit("ttft", 0.9, 1.5),))
    rule = Steady(slo, poisson_traffic(PROMPTS), seeds=1, requests=200_000)
    rho = 0.1758
    assert (1 - rho) * math.exp(rho / 2) == pytest.approx(0.9, abs=1e-4)
    assert find_goodput(rule, ONE, guess_rps=0.2, tolerance_frac=0.01).rate_rps == pytest.approx(
        rho, rel=0.03
    )


def test_the_first_requests_flatter_an_overloaded_fleet() -> None:
    """One server, 1.1 requests/s: after 300 requests some 27 wait, so P90 of TTFT is below 40 s though the
    queue never ends growing. In steady state no rate of 1 or more is carried."""
    slo = Slo((Limit("ttft", 0.9, 40.0),))
    assert FirstRequests(slo, poisson_traffic(PROMPTS)).carries(ONE, 1.1)
    steady = Steady(slo, poisson_traffic(PROMPTS), seeds=1)
    assert not steady.carries(ONE, 1.1)
    assert 0.9 < find_goodput(steady, ONE, tolerance_frac=0.01).rate_rps < 1.0


def test_a_run_is_made_longer_until_residences_fit_into_it() -> None:
    """At 1 request/s 10 requests last 9 s; nothing waits long, a residence is a second or two, and 95 % of
    the run counts: 20 residences need 40 requests or more."""
    asked = []

    def traffic(rate_rps: float, requests: int, seed: int) -> Trace:
        asked.append(requests)
        arrival_s = np.arange(requests) / rate_rps
        return Trace("clock", arrival_s, np.full(requests, 16), np.ones(requests, np.int64))

    assert Steady(Slo((Limit("ttft", 0.9, 1.5),)), traffic, seeds=1, requests=10).carries(ONE, 1.0)
    assert asked == [10, 20, 40]


def test_a_trace_that_cannot_be_longer_is_judged_as_it_is() -> None:
    trace = Trace("clock", np.arange(20.0), np.full(20, 16), np.ones(20, np.int64))
    rule = Steady(Slo((Limit("ttft", 0.9, 1.5),)), lambda rate_rps, requests, seed: trace, seeds=1)
    assert rule.carries(ONE, 1.0)
    assert count_residences(rule.run(ONE, 1.0)) == pytest.approx(19 * 0.95)


def test_every_seed_has_to_hold() -> None:
    def traffic(rate_rps: float, requests: int, seed: int) -> Trace:
        gap_s = 0.5 if seed == 2 else 2.0  # the third seed is too fast for the server
        return Trace("clock", np.arange(100.0) * gap_s, np.full(100, 16), np.ones(100, np.int64))

    slo = Slo((Limit("ttft", 0.9, 1.5),))
    assert Steady(slo, traffic, seeds=2).carries(ONE, 1.0)
    assert not Steady(slo, traffic, seeds=3).carries(ONE, 1.0)


def test_a_rejected_request_breaks_the_rule_of_the_first() -> None:
    """One of ten prompts is longer than the KV cache of 1600 tokens; the others keep the P50."""
    lengths = Trace("one too long", np.arange(10.0), np.array([16] * 9 + [2000]), np.ones(10, np.int64))
    slo = Slo((Limit("ttft", 0.5, 5.0),))
    assert FirstRequests(slo, lambda rate_rps, requests, seed: lengths.select(np.arange(9))).carries(ONE, 1)
    assert not FirstRequests(slo, lambda rate_rps, requests, seed: lengths).carries(ONE, 1)


def test_rates_serve_the_same_requests_on_another_clock() -> None:
    lengths = Trace("mixed", np.arange(50.0), np.arange(1, 51), np.arange(51, 101))
    slow, fast = (poisson_traffic(lengths)(rate, 1000, 4) for rate in (1.0, 8.0))
    assert slow.arrival_s == pytest.approx(8 * fast.arrival_s)
    assert (slow.input_tokens == fast.input_tokens).all()
    assert (slow.output_tokens == slow.input_tokens + 50).all()  # the two lengths stay together
    assert slow.rate_rps == pytest.approx(1.0, rel=0.1)


def test_the_first_requests_know_no_gaps() -> None:
    with pytest.raises(InputError, match="no gaps"):
        FirstRequests(Slo((Limit("tbt", 0.9, 1.0),)), poisson_traffic(PROMPTS))
