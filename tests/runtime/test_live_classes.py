"""Classes of requests on running engines: each request's number, the engines' order, and the comparison."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from runtime_fakes import LATENCY, a_body, a_server, fleet_of, post, routed

from planner.domain import Limit, Selector, Slo
from planner.fleet import Policies
from planner.models.latency import StepLatency
from planner.policies import QUEUE
from planner.runtime.exchange import TENANT_HEADER
from planner.runtime.fake_engine import FakeEngine, _EngineRequest
from planner.runtime.live_replay import Journal, ReplayPart, RequestOutcome
from planner.runtime.live_routing import priority_number
from planner.runtime.measured_against_simulated import Measurement, compare_with_simulation
from planner.runtime.prediction_errors import Tolerances
from planner.traffic.classes import select_requests, takes_request
from planner.traffic.trace import Trace

CHAT, BATCH = Selector("chat", tenants=("chat",)), Selector("batch", tenants=("batch",))


def test_engines_are_told_when_each_class_is_due() -> None:
    """Priorities are in ms: batch, due 100 s after it arrives, comes 99 s after a chat sent at that moment,
    due after 1 s. Who is of no class waits as long as the most patient. A gateway's header names tenants too.
    """
    told: list[int] = []

    async def answered(request: web.Request) -> web.Response:
        told.append((await request.json())["priority"])
        return web.json_response({"choices": [{"text": ""}], "usage": {"completion_tokens": 4}})

    async def run() -> None:
        policies = Policies(queue="edf", due=((CHAT, 1.0), (BATCH, 100.0)))
        async with a_server(answered) as backend, routed([backend], policies) as (router, url):
            for body, headers in (
                ({"user": "batch"}, {}),
                ({"user": "chat"}, {}),
                ({}, {TENANT_HEADER: "chat"}),
                ({"user": "nobody"}, {}),
            ):
                assert (await post(url, a_body(tokens=33, outputs=4) | body, **headers))[0] == 200
            assert not router.live.tenants  # Names are read for the engines; no account is kept of them.

    asyncio.run(run())
    batch, chat, of_header, other = told
    assert batch - chat == pytest.approx(99_000, abs=5_000) and of_header == pytest.approx(chat, abs=5_000)
    assert other == pytest.approx(batch, abs=5_000)


@pytest.mark.parametrize(
    ("match", "taken"),
    [
        ({"tenants": ("chat",)}, [True, True, False, False]),
        ({"tenants": ("chat",), "least_tokens": 20}, [False, True, False, False]),
        ({"tenants": ("chat", "code"), "llms": ("small",)}, [True, False, True, False]),
        ({"adapters": ("tuned",), "llms": ("small",)}, [False, False, True, False]),
        ({"adapters": ("tuned",)}, [False, False, True, True]),
        ({"most_tokens": 0}, [False, False, False, False]),
    ],
)
def test_a_class_takes_the_same_requests_of_a_trace_and_from_a_client(
    match: dict[str, Any], taken: list[bool]
) -> None:
    """All that a class names must match; `to: 0` is a limit too, which no prompt is within."""
    selector, tokens = Selector("one", **match), [10, 20, 30, 40]
    tenants, adapters, llms = ("chat", "code"), ("tuned",), ("small", "large")
    tenant, adapter, llm = [0, 0, 1, 1], [-1, -1, 0, 0], [0, 1, 0, 1]
    trace = Trace(
        "t",
        np.arange(4.0),
        np.array(tokens),
        np.ones(4, np.int64),
        tenants=tenants,
        tenant=np.array(tenant),
        adapters=adapters,
        adapter=np.array(adapter),
        llms=llms,
        llm=np.array(llm),
    )
    assert select_requests(selector, trace).tolist() == taken
    of_clients = [
        takes_request(selector, tokens[i], tenant=tenants[u], adapter=(*adapters, "")[a], llm=llms[m])
        for i, (u, a, m) in enumerate(zip(tenant, adapter, llm, strict=True))
    ]
    assert of_clients == taken
    due = Policies(queue="edf", due=((selector, 1.0), (BATCH, 100.0)))
    if not selector.adapters:  # The router serves no fleets with adapters.
        of_router = [
            priority_number(due, tokens[i], 1, 0.0, 50, tenant=tenants[u], llm=llms[m]) == 1_000
            for i, (u, m) in enumerate(zip(tenant, llm, strict=True))
        ]
        assert of_router == taken


@pytest.mark.parametrize(("by_priority", "order"), [(True, [2, 0, 1]), (False, [0, 1, 2])])
def test_an_engine_that_keeps_time_goes_by_priority(by_priority: bool, order: list[int]) -> None:
    engine = FakeEngine(
        LATENCY,
        kv_tokens=16_000,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        log=None,
        by_priority=by_priority,
    )
    requests = [
        _EngineRequest(str(k), 10, 1, False, priority=priority) for k, priority in enumerate((5, 5, -1))
    ]
    for request in requests:
        engine.add(request)
    taken = []
    while engine.waiting:
        ((request, _),) = engine._schedule()
        taken.append(requests.index(request))
        engine.running.clear()
    assert taken == order


def test_what_follows_a_prompt_of_one_token_is_a_decode() -> None:
    """All its tokens were prefills, for 6 ms each instead of 1 ms; the simulator has one prefill."""
    latency = StepLatency((1, 1000), (1e-3, 1e-3), a_s=0, b_s=0, d_s=0, e_s=5e-3, h_s=0, basis="drawn")
    engine = FakeEngine(latency, kv_tokens=16_000, max_num_seqs=1, max_num_batched_tokens=512, log=None)
    request = _EngineRequest("0", prompt_tokens=1, output_tokens=3, is_transferred=False)
    steps_s = []
    for computed in range(3):
        request.computed = computed
        steps_s.append(engine._step_s([(request, 1)]))
    assert steps_s == pytest.approx([6e-3, 1e-3, 1e-3])


def test_all_queues_by_priority_are_those_that_vllm_is_told_of() -> None:
    assert [name for name, row in QUEUE.items() if row.is_by_priority] == [
        *("sjf", "ljf", "srpt", "edf", "dlpm-turns")
    ]


def test_classes_are_compared_where_requests_are_missing_and_a_run_has_parts() -> None:
    """Of six requests one has no outcome, and a second part begins after three. Chats' TTFTs are 0.1 s, those
    of batch requests 2 s: a limit of 1 s holds for chat alone.
    """
    fleet = fleet_of(("w", "mixed", 1))
    trace = Trace("six", np.arange(6.0) * 10, np.full(6, 10), np.full(6, 2))
    trace = replace(trace, tenant=np.array([0, 1, 0, 1, 0, 1]), tenants=("chat", "batch"))
    journal = Journal(
        (ReplayPart(0, 0.0, (0, 1, 2)), ReplayPart(1, 100.0, (3, 4, 5), first_s=30.0)),
        {
            k: RequestOutcome(
                k, k // 3, at_s, at_s, at_s + 3, "finished", "", ("w-0",), (at_s + wait_s, at_s + 2.5)
            )
            for k in range(5)
            for at_s, wait_s in [(10.0 * (k % 3), 2.0 if k % 2 else 0.1)]
        },
    )
    slo = Slo((Limit("ttft", 0.9, 1.0, CHAT), Limit("ttft", 0.9, 1.0, BATCH), Limit("tbt", 0.5, 1.0, BATCH)))
    found = compare_with_simulation(Measurement(fleet, trace, journal, {}), fleet, slo, Tolerances())
    assert found.measured.requests.of_class.tolist() == [0, 1, 0, 1, 0]
    assert [line.holds for line in found.measured_verdict.lines] == [True, False, True]
    assert all(line.holds for line in found.predicted_verdict.lines)
