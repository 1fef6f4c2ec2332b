"""A plan finds the fleet and the queue that keep what tenants are promised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fleetplan
from planner.api.results import PlanResult
from planner.documents.facts import Cautioned
from planner.errors import InputError
from planner.reports.fact_sentences import fact_sentence
from planner.traffic.trace import Trace


def one_floods() -> Trace:
    """`good` sends a prompt a second for five minutes; `bad` sends 250 within two seconds."""
    rng = np.random.default_rng(0)
    rows = [(float(at_s), 0) for at_s in range(300)] + [(60 + rng.uniform(0, 2), 1) for _ in range(250)]
    rows.sort()
    n, blocks = len(rows), 100
    return Trace(
        "flood",
        np.array([at_s for at_s, _ in rows]),
        np.full(n, 16 * blocks),
        np.full(n, 20),
        prefix_offsets=np.arange(n + 1) * blocks,
        prefix_ids=np.arange(n * blocks),
        prefix_block_tokens=16,
        tenant=np.array([tenant for _, tenant in rows]),
        tenants=("good", "bad"),
    )


def a_question(slo: dict[str, Any], **sections: object) -> dict[str, Any]:
    policies = {"prefix_cache": True, "queue": ["fcfs", "vtc", "dlpm"]}
    return {
        "llm": "meta-llama/Llama-3.1-8B",
        "slo": {"ttft": {"p50": "60 s"}} | slo,
        "fleet": {"gpus": {"a100-80g": 4}},
        "safety": "none",
        "policies": policies,
        **sections,
    }


@pytest.mark.long
def test_a_plan_takes_the_queue_that_keeps_a_tenants_share() -> None:
    """One GPU does for the limits, first come, first served, but `good` loses its share there."""
    trace = one_floods()
    without = fleetplan.plan(a_question({}), trace)
    promised = fleetplan.plan(a_question({"tenants": {"good": {"share_frac": 0.8, "window": "10 s"}}}), trace)
    assert isinstance(without, PlanResult) and isinstance(promised, PlanResult)
    assert without.plan.fleet.policies.queue == "fcfs"
    assert promised.plan.fleet.policies.queue in ("vtc", "dlpm")
    assert promised.plan.fleet.gpus == without.plan.fleet.gpus == 1
    assert all(line.holds for line in promised.plan.verdict.guarantees)


def test_an_ordinary_trace_with_tenants_is_planned_by_vtc() -> None:
    """Without block ids it was refused: "vtc looks at prefix caches"."""
    flood = one_floods()
    trace = replace(flood, prefix_offsets=0 * flood.prefix_offsets, prefix_ids=flood.prefix_ids[:0])
    slo = {"tenants": {"good": {"share_frac": 0.8, "window": "10 s"}}}
    found = fleetplan.plan(a_question(slo, policies={"queue": ["fcfs", "vtc"]}), trace)
    assert isinstance(found, PlanResult)
    assert found.plan.fleet.policies.queue == "vtc" and not found.plan.fleet.policies.prefix_cache
    assert found.plan.fleet.gpus == 1


@pytest.mark.long
def test_a_share_for_tenants_tries_the_queue_of_plan_serve_that_keeps_it() -> None:
    """Without a named queue only fcfs was searched: two GPUs."""
    flood = one_floods()
    trace = replace(flood, prefix_offsets=0 * flood.prefix_offsets, prefix_ids=flood.prefix_ids[:0])
    slo = {"tenants": {"good": {"share_frac": 0.8, "window": "10 s"}}}
    found = fleetplan.plan(a_question(slo, policies={}), trace)
    assert isinstance(found, PlanResult)
    assert found.plan.fleet.policies.queue in ("dlpm-turns", "dlpm-held") and found.plan.fleet.gpus == 1
    # No router of a target gives this order: they were simulated with it, and said to keep the share.
    routers = found.plan.certificate.routers
    assert routers and not any(row.keeps for row in routers)
    assert all(any("nothing there gives the order dlpm" in text for text in row.differs) for row in routers)
    fcfs = fleetplan.plan(a_question(slo, policies={"queue": "fcfs"}), trace)
    assert isinstance(fcfs, PlanResult) and fcfs.plan.fleet.gpus == 2
    target = fleetplan.plan(a_question(slo, policies={}, deploy={"target": "kubernetes"}), trace)
    assert isinstance(target, PlanResult) and target.plan.fleet.policies.queue == "fcfs"
    said = Cautioned("no-queue-by-tenants")
    assert said in target.plan.warnings and said not in found.plan.warnings
    assert "goes by tenants" in fact_sentence(said)


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({"queue": ["fcfs", "vtc"]}, "queue: vtc counts tenants, and bare names none; add a column tenant"),
        (
            {"routing": "tenant-round-robin"},
            "routing: tenant-round-robin counts tenants, and bare names none",
        ),
        ({"queue": "fcfs", "tenant_weights": {"a": 2}}, "tenant_weights names 'a', must be tenants of the"),
    ],
)
def test_tenants_that_no_request_names_are_one_line(policies: dict[str, Any], said: str) -> None:
    bare = Trace("bare", np.arange(4.0), np.full(4, 500), np.full(4, 20))
    with pytest.raises(InputError, match=said):
        fleetplan.plan(a_question({}, policies=policies), bare)


def test_a_target_without_the_queue_says_so() -> None:
    question = a_question({"tenants": {"each": {"share_frac": 0.8}}}, deploy={"target": "kubernetes"})
    with pytest.raises(InputError, match=r"queue: kubernetes \(deploy\) lacks vtc, it has fcfs"):
        fleetplan.plan(question, one_floods())


def test_a_plan_with_a_share_for_tenants_writes_who_they_are() -> None:
    """requests.csv has no column for tenants, so `plan simulate` refused the plan's own traffic."""
    n = 80
    trace = Trace("two", np.arange(n, dtype=np.float64), np.full(n, 500), np.full(n, 20))
    trace = replace(trace, tenant=np.arange(n) % 2, tenants=("a", "b"))
    question = a_question({"tenants": {"each": {"share_frac": 0.5}}}, policies={})
    assert '"tenant": "b"' in fleetplan.plan(question, trace).files(pages=False)["traffic.jsonl"]
