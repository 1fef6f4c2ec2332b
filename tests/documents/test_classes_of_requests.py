"""slo: classes: what is read and written again, and what is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulations import make_trace

from planner.documents.catalog import read_catalog
from planner.documents.policy_choices import CHUNK_LIMIT, CHUNK_LIMIT_TOKENS, PolicyChange
from planner.documents.slo import parse_slo, slo_document
from planner.documents.task import parse_task
from planner.domain import Limit, Selector, Slo
from planner.errors import InputError
from planner.traffic.classes import check_classes, check_judged_classes, class_numbers
from planner.traffic.trace import Trace

CHAT, BATCH = Selector("chat", tenants=("chat",)), Selector("batch", tenants=("batch",))
WRITTEN = {
    "chat": {"match": {"tenant": "chat"}, "ttft": {"p90": "500 ms"}, "tbt": {"p99": "100 ms"}},
    "batch": {"match": {"tenant": "batch"}, "deadline": "1 h"},
}


def tenants_trace() -> Trace:
    trace = make_trace([0.0, 1.0, 2.0, 3.0], [10, 20, 30, 40], [5] * 4)
    return replace(trace, tenant=np.array([0, 1, 0, 1]), tenants=("chat", "batch"))


def test_lines_of_classes_are_read_and_written() -> None:
    slo = parse_slo({"classes": WRITTEN}, where="slo")
    assert slo.limits == (
        Limit("ttft", 0.9, 0.5, CHAT),
        Limit("tbt", 0.99, 0.1, CHAT),
        Limit("e2e", 0.99, 3600.0, BATCH),
    )
    assert [limit.name for limit in slo.limits] == ["chat ttft p90", "chat tbt p99", "batch e2e p99"]
    assert parse_slo(slo_document(slo), where="slo") == slo
    lengths = {"from": "1.5k", "to": "2,000"}
    long = {"match": {"input_tokens": lengths, "adapter": ["a", "b"]}, "deadline": {"p95": "60 s"}}
    slo = parse_slo({"ttft": {"p99": "9 s"}, "classes": {"long": long}}, where="slo")
    assert slo.limits[1] == Limit("e2e", 0.95, 60.0, Selector("long", (), ("a", "b"), (), 1500, 2000))
    assert parse_slo(slo_document(slo), where="slo") == slo


def test_how_long_classes_may_wait() -> None:
    """Chat as long as its TTFT, batch a tenth of what is judged: 1,000 s of 10,000, 60 s of 100."""
    slo = parse_slo({"classes": WRITTEN}, where="slo")
    assert [slo.patience_of(each, 10_000.0) for each in (CHAT, BATCH)] == [0.5, 1000.0]
    assert (slo.patience_s(10_000.0), slo.patience_s(100.0)) == (1000.0, 60.0)
    assert (slo.due_s(CHAT), slo.due_s(BATCH)) == (0.5, 3600.0)


def test_with_classes_the_queue_goes_by_deadlines_and_fcfs_is_raced() -> None:
    catalog, question = read_catalog(), {"llm": "llama-3.1-8b", "slo": {"classes": WRITTEN}}
    task = parse_task(question, catalog)
    assert {policies.queue for policies in task.policy_choices()} == {"edf"}
    assert task.policy_choices()[0].due == ((CHAT, 0.5), (BATCH, 3600.0))
    assert PolicyChange("queue", "fcfs") in task.policies.raced_changes
    assert task.policies.is_queue_assumed
    deployed = parse_task(question | {"deploy": {"target": "kubernetes"}}, catalog)
    assert {policies.queue for policies in deployed.policy_choices()} == {"fcfs"}
    assert not any(each.axis == "queue" for each in deployed.policies.raced_changes)
    named = parse_task(question | {"policies": {"queue": "fcfs"}}, catalog)
    assert not named.policies.is_queue_assumed
    assert [policies.due for policies in named.policy_choices()] == [()] * len(named.policy_choices())
    plain = {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "2 s"}}, "policies": {"queue": "edf"}}
    with pytest.raises(InputError, match="goes by the limits of classes, and slo has none"):
        parse_task(plain, catalog)
    raced = parse_task(plain | {"policies": {"queue": "any"}}, catalog).policies.raced_changes
    assert PolicyChange("queue", "sjf") in raced and PolicyChange("queue", "edf") not in raced


def test_a_limit_on_the_tokens_of_a_prompt_is_raced_with_classes_where_vllm_serves_them() -> None:
    catalog, question = read_catalog(), {"llm": "llama-3.1-8b", "slo": {"classes": WRITTEN}}
    limit = PolicyChange(CHUNK_LIMIT, str(CHUNK_LIMIT_TOKENS))

    def raced(**changes: Any) -> tuple[PolicyChange, ...]:
        return parse_task(question | changes, catalog).policies.raced_changes

    assert limit in raced() and limit in raced(deploy={"target": "kubernetes"})
    assert limit not in raced(slo={"ttft": {"p90": "2 s"}})
    assert limit not in raced(engine={"name": "sglang"}) and limit not in raced(policies={CHUNK_LIMIT: 2048})
    assert limit not in raced(policies={CHUNK_LIMIT: 0})
    assert limit not in raced(policies={"batching": "sarathi"})
    assert not raced(policies={"queue": "edf"})  # What is named is searched, and may be exact.


@pytest.mark.parametrize(
    ("classes", "says"),
    [
        ({}, "no class found"),
        ({"chat": {"ttft": {"p90": "1 s"}}}, "chat: match is missing"),
        ({"chat": {"match": {}, "ttft": {"p90": "1 s"}}}, "match: is empty"),
        ({"chat": {"match": {"tenant": "a"}}}, "chat: no limit found"),
        ({"a b": {"match": {"tenant": "a"}, "deadline": "1 h"}}, "expected a name of letters"),
        ({"chat": {"match": {"user": "a"}, "deadline": "1 h"}}, "user"),
        ({"chat": {"match": {"tenant": 1.5}, "deadline": "1 h"}}, "expected a name or a list"),
        ({"chat": {"match": {"tenant": ["a", "a"]}, "deadline": "1 h"}}, "tenant: found one twice in"),
        ({"chat": {"match": {"input_tokens": {"from": 9, "to": 3}}, "deadline": "1 h"}}, "at least from, 9"),
        ({"chat": {"match": {"tenant": "a"}, "deadline": "1 h", "e2e": {"p90": "1 s"}}}, "keep one"),
        ({"chat": {"match": {"tenant": "a"}, "task": {"p90": "1 s"}}}, "is of tasks"),
        (
            {"chat": {"match": {"tenant": "a"}, "tfft": {"p90": "1 s"}}},
            "ttft, tbt, tpot, e2e, match, deadline",
        ),
        ({"chat": {"match": {"tenant": "a"}, "attainment": 0.9}}, "attainment"),
        ({"chat": {"match": {"tenant": "a"}, "deadline": "soon"}}, "deadline"),
    ],
)
def test_classes_that_say_nothing_are_refused(classes: Any, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        parse_slo({"classes": classes}, where="slo")
    assert str(refused.value).startswith("slo: classes") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("selectors", "says"),
    [
        ((CHAT, Selector("x", tenants=("nobody",))), "matches none of the 4 requests .* tenants are 'chat'"),
        ((CHAT, Selector("x", most_tokens=5)), "whose prompts have 10 to 40 tokens"),
        ((CHAT, BATCH, Selector("x", adapters=("a",))), "which names no adapters"),
        (
            (CHAT, Selector("long", least_tokens=30)),
            r"takes 1 request of .* that class chat takes too; .* \(both ends of .* count: \{to: 2000\}",
        ),
        ((CHAT,), r"no class takes 2 of the 4 requests of .* \(the first: 20 tokens, of tenant 'batch'\)"),
    ],
)
def test_a_trace_must_have_each_class_apart(selectors: tuple[Selector, ...], says: str) -> None:
    slo = Slo(tuple(Limit("ttft", 0.9, 1.0, selector) for selector in selectors))
    with pytest.raises(InputError, match=says):
        check_classes(slo, tenants_trace())


def test_a_class_must_have_requests_that_are_judged() -> None:
    """Said: kept, of a class whose requests all arrive in the warm-up, the first twentieth of the trace."""
    trace = replace(tenants_trace(), arrival_s=np.array([0.0, 50.0, 99.0, 100.0]))
    early = Selector("early", most_tokens=10)
    slo = Slo((Limit("ttft", 0.9, 1.0, early), Limit("ttft", 0.9, 9.0)))
    with pytest.raises(InputError, match=r"early: its 1 request of .* in the first 5\.00 s, the warm-up"):
        check_judged_classes(slo, trace)
    check_judged_classes(slo, replace(trace, after=np.array([[1, 0]])))  # Its own time is not known then.


def test_requests_are_numbered_by_class() -> None:
    slo = Slo((Limit("ttft", 0.9, 1.0, CHAT), Limit("ttft", 0.9, 9.0)))
    check_classes(slo, tenants_trace())  # The rest has the line of all requests.
    assert class_numbers(slo.selectors, tenants_trace()).tolist() == [0, -1, 0, -1]
    overlapping = (
        CHAT,
        Selector("any"),
    )  # `policies: due` of a fleet.yaml may overlap; the router takes the first.
    assert class_numbers(overlapping, tenants_trace()).tolist() == [0, 1, 0, 1]
