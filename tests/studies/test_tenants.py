"""The bill by tenant: equal tenants pay equally, longer ones more, and all of it is paid."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plans import mixed, pairs

from planner.fleet import Fleet
from planner.search.problem.bill import bill_fleet
from planner.simulator.replay import simulate
from planner.studies import tenants
from planner.studies.tenants import tenant_costs, tenant_rows
from planner.traffic.trace import Trace


def two_tenants(factor: int) -> Trace:
    """In turn; the second's prompts are `factor` times as long."""
    i = np.arange(400)
    mine = i % 2
    return Trace(
        "t", i / 4.0, 200 * (1 + mine * (factor - 1)), np.full(400, 20), tenant=mine, tenants=("a", "b")
    )


@pytest.mark.parametrize("fleet", [mixed(), pairs()])
def test_the_bill_is_divided_and_all_of_it_is_paid(fleet: Fleet) -> None:
    same = tenant_costs(simulate(fleet, two_tenants(1)), fleet)
    assert sum(cost.usd_per_h for cost in same) == pytest.approx(bill_fleet(fleet).usd_per_h)
    assert [cost.share_frac for cost in same] == pytest.approx([0.5, 0.5], rel=1e-6)
    longer = tenant_costs(simulate(fleet, two_tenants(5)), fleet)
    assert longer[1].share_frac > 0.53
    assert longer[1].input_tokens == 5 * longer[0].input_tokens
    assert sum(cost.share_frac for cost in longer) == pytest.approx(1)
    assert [row["tenant"] for row in tenant_rows(longer)] == ["b", "a"]


def test_prompts_alone_are_divided_by_tokens_but_for_attention() -> None:
    """One token of output: a mixed pool only prefills; 3 times the prompt is 3 times the work, and more."""
    fleet = mixed()
    trace = two_tenants(3)
    costs = tenant_costs(simulate(fleet, replace(trace, output_tokens=np.ones(400, np.int64))), fleet)
    assert 3.0 <= costs[1].usd_per_h / costs[0].usd_per_h < 3.3


def test_a_rejected_request_makes_no_tokens_cheaper() -> None:
    """The first request of "b" fits no worker: its 10 million tokens made those of "b" cost a hundredth."""
    fleet, trace = mixed(), two_tenants(1)
    long = replace(trace, input_tokens=np.where(np.arange(400) == 1, 10**7, trace.input_tokens))
    usual, cost = (tenant_costs(simulate(fleet, each), fleet)[1] for each in (trace, long))
    assert cost.usd_per_million_tokens == pytest.approx(usual.usd_per_million_tokens, rel=0.02)
    assert cost.input_tokens == usual.input_tokens - 200 + 10**7


def test_no_tenants_no_rows() -> None:
    fleet = mixed()
    trace = replace(two_tenants(1), tenant=np.zeros(400, np.int64), tenants=())
    assert tenant_costs(simulate(fleet, trace), fleet) == ()


def test_work_on_owned_workers_beside_an_idle_pool_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the owned pool, which has no price, works: nobody paid the bill of the idle one."""
    rented = mixed().pools[0]
    gpu = replace(rented.type.gpu, price_usd_per_h=0.0)
    free = replace(rented, name="own", type=replace(rented.type, gpu=gpu))
    fleet = replace(mixed(), pools=(free, rented))
    simulation = simulate(fleet, two_tenants(1))
    work_s = np.ones(len(simulation.tenant))
    monkeypatch.setattr(tenants, "_request_work_s", lambda _, pool, *__: work_s * (pool.name == "own"))
    costs = tenant_costs(simulation, fleet)
    assert [cost.share_frac for cost in costs] == pytest.approx([0.5, 0.5])
    assert sum(cost.usd_per_h for cost in costs) == pytest.approx(bill_fleet(fleet).usd_per_h)


def test_decodes_of_two_ranks_are_in_a_batch_each() -> None:
    """A worker of two ranks decodes as two workers of one do: its decodes counted as one batch of all."""
    fleet = mixed()
    simulation, (pool,) = simulate(fleet, two_tenants(1)), fleet.pools
    first = np.zeros(400, np.int64)  # All requests are served by the first worker of the pool.
    simulation = replace(simulation, prefill_worker=first, decode_worker=first)
    work_s = []
    for workers, dp in ((2, 1), (1, 2)):
        worker = SimpleNamespace(
            latency=pool.type.latency, max_num_batched_tokens=pool.type.max_num_batched_tokens, dp=dp
        )
        alike: Any = SimpleNamespace(type=worker, count=workers)
        work_s.append(tenants._request_work_s(simulation, alike, 0, np.zeros(workers, np.int64)))
        assert float(work_s[-1].min()) > 0
    assert work_s[0] == pytest.approx(work_s[1])
