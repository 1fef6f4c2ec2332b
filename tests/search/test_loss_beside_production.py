"""The fleet with a loss where its search gave production another fleet."""

from __future__ import annotations

import random

import pandas as pd
import pytest

import fleetplan
from planner.api.results import PlanResult
from planner.search.production import fleet_with_a_loss

TASKS = 300


def agents_calls(seed: int) -> pd.DataFrame:
    """Tasks of three to nine calls; each prompt holds all that was said before it."""
    rng, begin_s = random.Random(seed), 0.0
    rows: list[dict[str, object]] = []
    for _ in range(TASKS):
        begin_s += rng.expovariate(0.5)
        context = 2500
        for call in range(rng.randint(3, 9)):
            answer = int(rng.lognormvariate(5, 0.5))
            rows.append(
                {
                    "request_id": len(rows),
                    "arrival_s": round(begin_s, 3),
                    "input_tokens": context,
                    "output_tokens": answer,
                    "after": str(len(rows) - 1) if call else "",
                    "think_s": round(rng.expovariate(0.5), 3) if call else 0.0,
                }
            )
            context += answer + rng.randint(200, 1500)
    return pd.DataFrame(rows)


@pytest.mark.long
def test_one_more_worker_on_the_paid_node_is_with_a_loss() -> None:
    """A node of eight H100 is paid whole, so whatever production uses of it, "with a loss" is that node."""
    plan = fleetplan.plan(
        llm="Qwen3-32B",
        slo={"task": {"p90": "1 min"}, "ttft": {"p95": "2 s"}},
        fleet={"gpus": ["h100-80g"]},
        trace=agents_calls(seed=2),
    )
    assert isinstance(plan, PlanResult)
    by_name = {answer.name: answer for answer in plan.plan.certificate.answers}
    production, lossy = by_name["production"], by_name["with-a-loss"]
    assert lossy.paid_usd_per_h == production.paid_usd_per_h == 23.92
    used, used_with_a_loss = (sum(each.gpus for each in answer.workers) for answer in (production, lossy))
    assert used <= used_with_a_loss == 8


def survivors_beside_one_h100() -> list[tuple[str, int]]:
    """The fleet with a loss where production is the one H100 of the stock, beside eight L40S."""
    plan = fleetplan.plan(
        llm="Llama-3.1-8B",
        slo={"ttft": {"p95": "1 s"}, "tpot": {"p95": "50 ms"}},
        traffic={"rate": 10, "task": "lmsys-chat", "duration": "5 min"},
        fleet={"gpus": {"l40s": 8, "h100-80g": 1}, "owned": {"l40s": 8, "h100-80g": 1}}
        | {"electricity": {"price": "0.2 usd/kWh", "pue": 1.4}},
    )
    assert isinstance(plan, PlanResult)
    _, production, lossy = plan.plan.certificate.answers
    assert [each.gpu for each in production.workers] == ["h100-80g@owned"]
    return [(each.gpu, each.count) for each in lossy.workers]


@pytest.mark.long
def test_a_survivor_that_failed_its_test_is_tried_with_other_settings() -> None:
    """Four L40S pass with steps of 512 tokens. With 2,048 and 1,024 they fail, and five were the answer."""
    assert survivors_beside_one_h100() == [("l40s-48g@owned", 4)]


@pytest.mark.long
def test_a_survivor_that_failed_its_tests_is_tried_with_one_more_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no second H100. After two failed tests of four L40S it was "no fleet within the limits was
    found".
    """
    monkeypatch.setattr(fleet_with_a_loss, "with_most_headroom", lambda problem, options, best: best)
    assert survivors_beside_one_h100() == [("l40s-48g@owned", 5)]
