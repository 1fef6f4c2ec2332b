"""Several LLMs on GPUs that are paid all day, whose workers start or sleep and wake."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from small_days import SmallDay, quick_day, random_day

import fleetplan
from planner.day.day_api import JointDayResult
from planner.day.search.day_optimum import cheapest_day
from planner.day.search.day_runs import DayRuns, day_terms
from planner.day.search.several_llms_runs import JointRuns, joint_terms
from planner.documents.catalog import read_catalog
from planner.errors import InfeasibleError
from planner.simulator.elastic import Span
from planner.solvers.pool_sizes import DayTerms, PoolTerms, billed_usd, cheapest_sizes, cost_usd
from planner.solvers.whole_nodes import PricedNode

NAME = "meta-llama/Llama-3.1-8B"
PROMISE = {"ttft": {"p90": "1 s"}, "tbt": {"p95": "100 ms"}, "every": "1 min"}


def joint_days(seed: int) -> JointRuns:
    """Two LLMs with one pool of one or two workers of a GPU each, and two windows of the same length."""
    days = [random_day(2 * seed + k, disaggregated=False, windows=2, most=2) for k in range(2)]
    window_s = days[0].slo.every_s
    assert window_s is not None
    each = [_runs_of(day, window_s) for day in days]
    return JointRuns(each, joint_terms([runs.terms for runs in each], {}, window_s))


def _runs_of(day: SmallDay, window_s: float) -> DayRuns:
    trace = replace(
        day.trace, arrival_s=day.trace.arrival_s * (2 * window_s / float(day.trace.arrival_s[-1]))
    )
    slo = replace(day.slo, every_s=window_s)
    pools = tuple(replace(pool, least=1, start_s=min(pool.start_s, window_s / 2)) for pool in day.pools)
    terms = day_terms(day.fleet, trace, slo, pools, is_paid_all_day=True)
    return DayRuns(day.fleet, trace, slo, pools, terms)


def most_at_once(spans: Sequence[Span]) -> int:
    """The most GPUs in use, one a worker, at the moments at which workers are asked for."""
    return max(sum(span.requested_s <= one.requested_s < span.gone_s for span in spans) for one in spans)


def bill_by_hand(runs: JointRuns, workers: Any) -> float:
    """1 USD/h for each GPU of the most in use at any moment, all day; infinite if a window is missed."""
    day = runs.simulate_day(workers)
    most = most_at_once([span for llm_day in day.llm_days for span in llm_day.run.spans])
    return most * float(runs.terms.edges_s[-1]) / 3600 if day.holds else math.inf


def test_least_gpus_against_all_sequences() -> None:
    """The optimum is that of all 16 sequences of sizes; no sequence that keeps the SLO is below a bound."""
    kept = 0
    for seed in range(24):
        runs = joint_days(seed)
        steps, pools = runs.terms.shape
        sequences = [
            np.array(sizes, np.int64).reshape(steps, pools)
            for sizes in itertools.product((1, 2), repeat=steps * pools)
        ]
        bills = [bill_by_hand(runs, workers) for workers in sequences]
        least_usd = min(bills)
        if least_usd == math.inf:
            with pytest.raises(InfeasibleError):
                cheapest_day(runs)
            continue
        found = cheapest_day(runs)
        assert found.best.usd == pytest.approx(least_usd, rel=1e-9)
        assert found.best.usd == pytest.approx(bill_by_hand(runs, found.best.workers))
        assert found.proved.usd <= least_usd * (1 + 1e-9) and found.bound_usd <= least_usd * (1 + 1e-9)
        assert quick_day(runs).best.usd >= least_usd * (1 - 1e-9)
        kept += 1
    assert kept > 12


def test_no_timetable_is_below_the_proved_bound() -> None:
    """Sizes that change at random moments; the most GPUs at once of both LLMs, all day."""
    kept = 0
    for seed in range(12):
        runs, rng = joint_days(seed), np.random.default_rng(seed)
        for _ in range(6):
            spans, holds = list[Span](), True
            for own in runs.llm_runs:
                times_s = np.unique([0.0, *rng.uniform(0, float(own.terms.edges_s[-1]), 3)])
                day = own.simulate_timetable(times_s, rng.integers(1, 3, (len(times_s), 1)))
                spans += day.run.spans
                holds = holds and day.holds
            if holds:
                kept += 1
                most_usd_per_h = most_at_once(spans)
                paid_usd = most_usd_per_h * float(runs.terms.edges_s[-1]) / 3600
                assert paid_usd >= runs.least_paid().usd * (1 - 1e-9), seed
    assert kept > 8


def question(**day: Any) -> dict[str, Any]:
    return {
        "llms": {name: {"llm": NAME, "slo": PROMISE} for name in ("chat", "code")},
        "fleet": {"gpus": {"l40s-48g": 6}},
        "day": {"controllers": {"hpa": {"metric": "concurrency", "target": 8}}, "most": 3} | day,
    }


def traffic(*, late: bool) -> pd.DataFrame:
    """Four minutes, busy in the first half or in the second: 5 requests/s, else 1."""
    rng = np.random.default_rng(int(late))
    counts = [300 if (k >= 2) == late else 60 for k in range(4)]
    at_s = np.concatenate([60 * k + np.sort(rng.uniform(0, 60, n)) for k, n in enumerate(counts)])
    at_s[-1] = 240.0
    lengths = rng.integers(200, 1200, len(at_s)), rng.integers(20, 150, len(at_s))
    return pd.DataFrame({"arrival_s": at_s, "input_tokens": lengths[0], "output_tokens": lengths[1]})


GPU_USD_PER_H = read_catalog().gpu("l40s-48g").price_usd_per_h
STANDING = {"llm": NAME, "workers": [{"name": "m", "role": "mixed", "gpu": "l40s-48g", "tp": 1, "count": 2}]}


def test_a_day_of_llms_that_sleep(tmp_path: Path) -> None:
    """16 GB wake at 10.9 GB/s in 1.7 s, after 1.6 s in which the other LLM's fall asleep at 10 GB/s."""
    traces = {"chat": traffic(late=False), "code": traffic(late=True)}
    standing = {"chat": STANDING, "code": STANDING}
    result = fleetplan.day(question(sleep=1), traces, standing=standing, time_limit_s=600)
    assert isinstance(result, JointDayResult)
    answer, optimum = result.answer, result.answer.optimum
    assert optimum is not None and optimum.day.keeps
    for one in answer.by_llm.values():
        assert one.question.pools[0].start_s == pytest.approx(0.2 + 16.06 / 10.9 + 16.06 / 10, rel=0.01)
    for row in (*answer.rows, optimum.day):
        usd_per_h = row.most_gpus["l40s-48g"] * GPU_USD_PER_H
        assert row.usd == pytest.approx(usd_per_h * 240 / 3600)
    assert answer.static.most_gpus == {"l40s-48g": 4} and optimum.day.usd <= answer.static.usd
    assert [row.name for row in answer.on_least_gpus] == ["hpa"]
    assert answer.on_least_gpus[0].most_gpus["l40s-48g"] <= optimum.day.paid_gpus["l40s-48g"]
    written = result.save(tmp_path)
    assert not any("manifests" in path for path in written)
    page = (tmp_path / "day.html").read_text()
    assert "paid all day" in page and "/wake_up" in page and "host memory" in page


@pytest.mark.parametrize(
    ("terms", "error"),
    [
        ({"sleep": 3}, "expected 1 or 2"),
        ({"sleep": 1, "start": "4 min"}, "with sleep they wake"),
        ({"sleep": 1, "billing": "hour"}, "paid all day"),
        ({"sleep": 2, "storage": "tape"}, "tape"),
    ],
)
def test_what_is_refused(terms: dict[str, Any], error: str) -> None:
    traces = {"chat": traffic(late=False), "code": traffic(late=True)}
    with pytest.raises(fleetplan.PlannerError, match=error):
        fleetplan.day(question(**terms), traces, standing={"chat": STANDING, "code": STANDING})


@pytest.mark.parametrize("terms", [{"sleep": 1}, {"billing": "day"}])
def test_one_llm_leaves_gpus_to_nobody(terms: dict[str, Any]) -> None:
    task = {"llm": NAME, "slo": PROMISE, "fleet": {"gpus": {"l40s-48g": 6}}, "day": terms}
    with pytest.raises(fleetplan.PlannerError, match="take several LLMs"):
        fleetplan.day(task, traffic(late=False), standing=STANDING)


def test_whole_nodes_are_paid_all_day() -> None:
    """Workers of 2 GPUs on nodes of 8: one node holds four of them, whatever is idle; five take two nodes."""
    node = PricedNode("n", 8, 3.0, 0.0)
    pool = PoolTerms(0.0, 0, 5, 6.0, gpus=2, gpu="g", node=node)
    day = DayTerms(np.array([0.0, 1800.0, 3600.0]), (pool,), is_paid_all_day=True)
    for sizes, usd in (((0, 1), 24.0), ((4, 1), 24.0), ((5, 0), 48.0)):
        workers = np.array(sizes, np.int64)[:, None]
        lives = [(0, 1800.0 * t, 1800.0 * (t + 1)) for t, size in enumerate(sizes) for _ in range(size)]
        assert cost_usd(day, workers) == billed_usd(day, lives) == pytest.approx(usd)
    assert cheapest_sizes(day, [((0, 0, 3),), ((1, 0, 0),)]).usd == pytest.approx(24.0)
    assert cheapest_sizes(day, [((0, 0, 4),)]).bound_usd == pytest.approx(48.0)
