"""`policies:` of slo.yaml: rows of planner/policies.py as a value, a list or any."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from planner.documents.catalog import read_catalog
from planner.documents.policy_choices import REPURPOSE_AFTER_S, PolicyChange, name_policies
from planner.documents.task import PlanQuestion, parse_task
from planner.errors import InputError
from planner.fleet import Policies
from planner.policies import (
    BY_FIELD,
    QUEUE,
    ROUTING,
    STEPWISE,
    Batching,
    Policy,
    Queue,
    go_together,
    is_deployed,
)

CATALOG = read_catalog()
SPOT_PRICES = {
    "on_demand": "2 usd/h",
    "spot": "1 usd/h",
    "spot_interruptions_per_h": 0.1,
    "spot_restart": "5 min",
}


def task(policies: dict[str, Any], **changes: Any) -> PlanQuestion:
    return parse_task(
        {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "2 s"}}, "policies": policies, **changes}, CATALOG
    )


def rows() -> list[tuple[str, Policy]]:
    return [
        (axis, row)
        for axis, known in BY_FIELD.items()
        for row in known.values()
        if STEPWISE in row.simulators
    ]


@pytest.mark.parametrize(("axis", "row"), rows(), ids=lambda each: getattr(each, "name", each))
def test_every_row_that_engines_step_by_step_have_can_be_named(axis: str, row: Policy) -> None:
    """Those that look at caches with caches; decode workers keep none, and count no tenants."""
    if isinstance(row, Queue) and row.by_deadline:
        return  # It needs classes: test_classes_of_requests.py.
    section: dict[str, Any] = {axis: row.name, "prefix_cache": row.needs_caches}
    if isinstance(row, Batching) and row.needs_reserve:
        section["reserve_tokens"] = 2048
    if axis == "decode_routing" and row.reads_cache_state:
        with pytest.raises(InputError, match=r"decode workers keep none|looks at tenants"):
            task(section)
        return
    choices = task(section).policy_choices()
    assert {getattr(each, axis) for each in choices} >= {row.name}
    assert all(go_together(each) for each in choices)


def test_settings_of_a_fleet_are_settings_of_a_question() -> None:
    section = {
        "queue": "vtc",
        "prefix_cache": True,
        "tenant_weights": {"gold": 2},
        "quantum_tokens": 4000,
        "flip_after": "30 s",
    }
    (found,) = {each for each in task(section).policy_choices() if each.routing == "e2"}
    assert found.tenant_weights == (("gold", 2.0),) and found.quantum_tokens == 4000
    assert found.flip_after_s == 30.0 and found.queue == "vtc"


def test_a_list_is_searched_each_and_any_is_raced() -> None:
    named = task({"queue": ["fcfs", "sjf"], "routing": ["jsq", "round-robin"]})
    assert len(named.policy_choices()) == 4 and not named.policies.raced_changes
    whole = task({"queue": "any", "routing": "any"})
    assert whole.policy_choices() == (Policies(),)
    raced = {(each.axis, each.value) for each in whole.policies.raced_changes}
    assert ("queue", "sjf") in raced and ("routing", "best-fit") in raced
    assert ("queue", "fcfs") not in raced and not any(value == "vtc" for _, value in raced)


def test_research_adds_what_nothing_deploys() -> None:
    """vLLM lacks vtc, and changes no roles."""
    plain = task({"queue": "any", "pools": "any", "prefix_cache": True})
    more = task({"queue": "any", "pools": "any", "prefix_cache": True, "research": True})
    added = {each.value for each in more.policies.raced_changes} - {
        each.value for each in plain.policies.raced_changes
    }
    assert added >= {"vtc", "dlpm", "lpm", "preble", "flip", "repurpose"}
    assert all(is_deployed(BY_FIELD[each.axis][each.value], None) for each in plain.policies.raced_changes)


def test_any_is_what_the_target_has() -> None:
    found = task({"routing": "any", "queue": "any"}, deploy={"target": "llm-d"})
    values = {each.value for each in found.policies.raced_changes}
    assert values == {
        "least-outstanding",
        "pending-tokens",
        "random",
        "least-waiting",
        "sjf",
        "ljf",
        "srpt",
    } - {row.name for row in ROUTING.values() if STEPWISE not in row.simulators}


def test_more_choices_than_are_searched_each_are_raced() -> None:
    """4 x 9 = 36 choices: the first is searched."""
    found = task({"queue": ["sjf", "fcfs", "ljf", "srpt"], "routing": list(ROUTING)[:9]})
    assert [each.queue for each in found.policy_choices()] == ["sjf"]
    assert len(found.policies.raced_changes) == 3 + 8


def test_a_change_takes_what_it_needs_along() -> None:
    """Roles that change go without caches, and are told when to; best-fit keeps the SLO's limits."""
    asked = task({"pools": "any", "routing": "any", "research": True, "prefix_cache": True})
    cached = Policies(routing="e2", prefix_cache=True)
    flipped = asked.changed_policies(Policies(), PolicyChange("pools", "repurpose"))
    assert flipped is not None and flipped.repurpose_after_s == REPURPOSE_AFTER_S
    assert asked.changed_policies(cached, PolicyChange("pools", "flip")) is None
    packed = asked.changed_policies(Policies(), PolicyChange("routing", "best-fit"))
    assert packed is not None and packed.ttft_s == 2.0
    aware = asked.changed_policies(Policies(), PolicyChange("routing", "e2"))
    assert aware is not None and aware.prefix_cache
    assert asked.changed_policies(Policies(), PolicyChange("routing", "jsq")) is None


def test_predictions_are_choices_too() -> None:
    choices = task({"queue": "srpt", "prediction": ["known", "mean", "85 %"]}).policy_choices()
    assert [(each.prediction_buckets, each.prediction_accuracy_frac) for each in choices] == [
        (0, None),
        (10, None),
        (0, 0.85),
    ]


def test_a_question_travels_to_workers() -> None:
    asked = task({"queue": "any"})
    assert pickle.loads(pickle.dumps(asked)) == asked


def test_policies_are_named_by_what_sets_them_apart() -> None:
    """The longest wait with the queue that has it."""
    first, second = Policies(), Policies(queue="sjf", queue_window_s=60.0, prediction_buckets=10)
    assert name_policies(second, (first, second)) == (
        "queue sjf, at most 60 s of waiting, outputs predicted by mean"
    )


@pytest.mark.parametrize(
    ("policies", "target", "message"),
    [
        ({"queue": "lpm"}, None, "queue: lpm looks at prefix caches; add prefix_cache: true"),
        ({"pools": "flip", "queue": "vtc"}, None, "queue vtc, pools flip do not go together; drop"),
        ({"queue": "vtc", "longest_wait": "3 s"}, None, "longest_wait: vtc has no such bound; drop it"),
        ({"queue": ["any", "fcfs"]}, None, "queue: any stands alone"),
        ({"queue": "vtc", "prefix_cache": True}, "llm-d", r"queue: llm-d \(deploy\) lacks vtc, it has fcfs"),
        ({"pools": "flip"}, "kubernetes", r"pools: kubernetes \(deploy\) lacks flip, it has static"),
        ({"routing": "e2", "prefix_cache": True}, "kserve", r"kserve \(deploy\) cannot route by e2"),
        ({"research": True}, None, "research: adds to what `any` stands for, and no policy is any"),
        ({"pools": "flip", "queue": "vtc", "prefix_cache": True}, None, "do not go together"),
        ({"prediction": "oracle"}, None, "prediction: expected one of known, mean, any"),
        ({"tenant_weights": {"gold": 0}}, None, "tenant_weights: gold"),
        ({"admission": "maybe"}, None, "admission: expected one of greedy"),
        ({"pools": "splitwise"}, None, "has splitwise .* no plan; take of static, flip, repurpose"),
    ],
)
def test_what_cannot_be_is_one_clear_line(policies: dict[str, Any], target: str | None, message: str) -> None:
    changes = {} if target is None else {"deploy": {"target": target}}
    with pytest.raises(InputError, match=f"^slo.yaml: policies.*{message}"):
        task(policies, **changes)


def test_any_is_of_one_key() -> None:
    with pytest.raises(
        InputError, match="policies: expected keys and values such as queue: any, found 'any'"
    ):
        parse_task({"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "2 s"}}, "policies": "any"}, CATALOG)


@pytest.mark.parametrize(
    "losses", [{"spare": "1 worker"}, {"spare": "1 node"}, {"fleet": {"prices": {"h100-80g": SPOT_PRICES}}}]
)
def test_pinned_prefixes_are_not_planned_with_losses(losses: dict[str, Any]) -> None:
    """Five workers that pin forty prefixes were said to survive the loss of any: p99 of TTFT went from 0.2 s
    to 3 s where the lost one alone had ten of them, as only their placement anew was simulated.
    """
    pinned = {"prefix_cache": True, "routing": ["e2", "pinned-prefix"]}
    with pytest.raises(InputError, match="routing: pinned-prefix is not planned with spare or spot workers"):
        task(pinned, **losses)
    for section in ({"prefix_cache": True}, {"prefix_cache": True, "routing": "any"}):
        for changes, is_pinned in ((losses, False), ({}, True)):
            found = task(section, **changes).policies
            names = {*found.routings, *(each.value for each in found.raced_changes)}
            assert ("pinned-prefix" in names) == is_pinned and "e2" in names


def test_queues_of_tenants_are_queues_of_the_table() -> None:
    assert {"vtc", "dlpm", "dlpm-held", "dlpm-turns", "preble", "lpm"} <= set(QUEUE)
