"""planner/policies.py is the one table: whole, asked by all others, and the one the docs print."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from plans import LLM, a_pool, mixed, pairs
from policy_tables import tables

from planner import manifests
from planner.documents.fleet_file import RouterRow
from planner.errors import InputError
from planner.fleet import Fleet, Policies
from planner.manifests.manifest_notes import routing_notes
from planner.policies import (
    BY_FIELD,
    ENDPOINT_PICKER_DECODE,
    KSERVE,
    OURS,
    QUEUE,
    ROUTERS,
    ROUTERS_OF,
    ROUTING,
    RULES,
    SCORE,
    TABLE,
    VLLM,
    VLLM_ROUTER_PAIRS,
    Queue,
    Routing,
    find_deployed_routing,
    find_router_difference,
)
from planner.runtime.live_routing import LiveFleet

ROOT = Path(__file__).parents[1]
ROUTED = [row for row in TABLE if isinstance(row, Queue | Routing)]


def test_a_kind_has_each_name_once_and_each_number_once_but_for_scores() -> None:
    names = Counter((row.kind, row.name) for row in TABLE)
    assert max(names.values()) == 1
    codes = Counter(
        (row.kind, row.code) for row in TABLE if not (isinstance(row, Routing) and row.code == SCORE)
    )
    assert max(codes.values()) == 1
    assert {row.kind for row in TABLE} == set(BY_FIELD) - {"decode_routing"}
    assert all(row.words and not row.words.endswith(".") for row in TABLE)


def test_what_a_fleet_does_by_itself_is_what_the_table_says() -> None:
    for name, rows in BY_FIELD.items():
        usual = [row.name for row in rows.values() if row.is_default and not row.needs_caches]
        assert usual == [getattr(Policies(), name)]


def test_compiled_code_tells_by_the_number_who_looks_at_caches_or_tenants() -> None:
    for rows in (QUEUE, ROUTING):
        looking = [row.code for row in rows.values() if row.reads_cache_state]
        assert min(looking) > max(row.code for row in rows.values() if not row.reads_cache_state)


@pytest.mark.parametrize("row", ROUTED, ids=lambda row: f"{row.kind} {row.name}")
def test_every_router_has_an_answer(row: Queue | Routing) -> None:
    """A name for what it does, and whether that is what was simulated."""
    routers = {VLLM, OURS} if isinstance(row, Queue) else set(ROUTERS) - {VLLM}
    for router in routers:
        said = find_router_difference(row, router)
        assert said.name or (said.is_lacking and router == OURS)
        assert not (said.is_lacking and said.differs)
    assert set(row.at) <= set(ROUTERS)
    assert all(found in ROUTERS for pair in ROUTERS_OF.values() for found in pair)
    assert set(ROUTERS_OF) == set(manifests.TARGETS)


@pytest.mark.parametrize("target", ROUTERS_OF)
@pytest.mark.parametrize("routing", [row.name for row in ROUTING.values() if row.is_planned])
def test_what_is_deployed_is_simulated_and_deployed_as_it_is(routing: str, target: str) -> None:
    """Planned with what stands for a target's router, a plan is deployed by just that: the router is told the
    same. Whatever a router may be told is simulated by a rule of its own.
    """
    asked = Policies(routing=routing, prefix_cache=ROUTING[routing].needs_caches)
    for is_pair in (False, True):
        once = find_deployed_routing(asked, target, is_pair=is_pair)
        again = find_deployed_routing(once.policies, target, is_pair=is_pair)
        assert (again.policies, again.rule_names) == (once.policies, once.rule_names)
        assert not ROUTING[once.policies.decode_routing].needs_caches
        assert len(once.rule_names) == 1 + is_pair


def test_a_router_of_mixed_workers_does_not_differ_by_how_it_counts_hand_offs() -> None:
    """Its fleet has none: the README of the manifests named a decode worker that was not there."""
    mixed, pair = (find_deployed_routing(Policies(), "llm-d", is_pair=is_pair) for is_pair in (False, True))
    assert mixed.rule_names[0] == pair.rule_names[0] == "token-load-scorer"
    assert not any("hand-offs" in text for text in mixed.differs)
    assert any("hand-offs" in text for text in pair.differs)


def test_every_name_that_a_router_is_told_has_a_rule_and_no_rule_is_idle() -> None:
    told = {
        (router, find_router_difference(row, router).name)
        for router in set(itertools.chain(*ROUTERS_OF.values()))
        for row in ROUTING.values()
    }
    rules = {(router, name) for router, named in RULES.items() for name in named}
    assert told <= rules
    never = {(ENDPOINT_PICKER_DECODE, name) for name in RULES[ENDPOINT_PICKER_DECODE]}
    assert rules - told <= never | {(VLLM_ROUTER_PAIRS, "power_of_two")}
    assert {rule.routing for named in RULES.values() for rule in named.values()} <= set(ROUTING)


def pools_of(kind: str) -> Fleet:
    if kind == "pairs":
        two = a_pool("pre", "prefill", "h100-80g", 2, 2), a_pool("dec", "decode", "h100-80g", 2, 2)
        return Fleet(LLM, two)
    return mixed()


@pytest.mark.parametrize("kind", ["mixed", "pairs"])
@pytest.mark.parametrize("routing", ROUTING)
def test_no_target_routes_by_something_else_in_silence(kind: str, routing: str) -> None:
    """What a target lacks stands in README.md, in the notes, and in the file that sets its router up."""
    row = ROUTING[routing]
    policies = Policies(routing=routing, prefix_cache=row.needs_caches)
    found = manifests.render(replace(pools_of(kind), policies=policies), 5000)
    said = dict(re.findall(r"^## ([a-z-]+)$.*?^Routing: (.+?)$", found.files["README.md"], re.M | re.S))
    assert set(found.notes) | set(found.refused) == set(manifests.TARGETS)
    for target, notes in found.notes.items():
        router = ROUTERS_OF[target][kind == "pairs"]
        told = find_router_difference(row, router)
        lacks = f"{ROUTERS[router].title} lacks {routing} ({row.words}): {told.name} is in its place"
        assert any(note.startswith(lacks) for note in notes) == told.is_lacking
        of_target = {path: text for path, text in found.files.items() if path.startswith(target)}
        for note in notes:
            assert note in said[target]
            assert any(f"# {note}\n" in text for text in of_target.values())
        if told.differs:
            assert any(told.differs in note for note in notes)


def test_one_worker_leaves_no_choice_and_so_no_note() -> None:
    found = manifests.render(mixed(count=1), 5000)
    assert set(itertools.chain(*found.notes.values())) == set()


def test_a_frontend_with_one_rule_says_so_of_hand_offs() -> None:
    """Dynamo routes to decode workers as to prefill workers."""
    policies = Policies(routing="round-robin", decode_routing="random")
    fleet = replace(pairs(), policies=policies)
    replaced = "Dynamo's frontend lacks random (a worker drawn at random): round-robin is in its place, and "
    assert routing_notes(fleet, "dynamo") == [
        f"{replaced}plan.yaml says under `routers` whether the SLO is kept so."
    ]
    # There is no plan.yaml beside a fleet.yaml, and its routers were not simulated.
    notes = manifests.render(fleet, 5000, "dynamo").notes["dynamo"]
    assert notes == [f"{replaced}whether an SLO is kept so was not simulated."]


def test_files_of_another_target_than_the_plan_is_for_say_so_first() -> None:
    """Only the target of `plan --target` is simulated; the others' files pointed to missing results."""
    fleet = replace(mixed(count=2), policies=Policies(routing="pending-tokens"))
    row = RouterRow("llm-d", "llm-d's endpoint picker", "pending-tokens", "kept", kept=True)
    rendered = manifests.render(fleet, 5000, router_rows=[row])
    told = (
        "NOT SIMULATED: this fleet was planned for llm-d, and kubernetes routes otherwise: plan for it with"
    )
    assert rendered.files["kubernetes.yaml"].startswith(f"# {told}")
    assert f"**{told}" in rendered.files["README.md"] and rendered.warnings["kubernetes"].startswith(told)
    assert "whether an SLO is kept so was not simulated." in rendered.notes["kubernetes"][0]
    assert "llm-d" not in rendered.warnings and "NOT SIM" not in rendered.files["llm-d/router.values.yaml"]


@pytest.mark.parametrize("queue", QUEUE)
def test_an_order_of_prompts_that_vllm_lacks_is_not_called_priority(queue: str) -> None:
    """It was: engines ran by priority for lpm too, which `plan serve` refuses to send."""
    policies = Policies(queue=queue, prefix_cache=QUEUE[queue].needs_caches)
    found = manifests.render(replace(mixed(), policies=policies), 5000, "vllm")
    told = find_router_difference(QUEUE[queue], VLLM)
    settings = found.files["vllm/mixed.config.yaml"]
    assert ("scheduling-policy: priority" in settings) == (QUEUE[queue].has_rank or QUEUE[queue].by_turns)
    assert ("scheduling-policy" in settings) == (told.name != "fcfs")
    lacks = f"vLLM lacks {queue} ({QUEUE[queue].words}): fcfs is in its place"
    assert any(lacks in note for note in found.notes["vllm"]) == told.is_lacking


@pytest.mark.parametrize("routing", ROUTING)
def test_our_router_has_what_the_table_says(routing: str) -> None:
    row = ROUTING[routing]
    fleet = replace(mixed(), policies=Policies(routing=routing, prefix_cache=row.needs_caches))
    if find_router_difference(row, OURS).is_lacking:
        with pytest.raises(InputError, match="which needs batching"):
            LiveFleet(fleet)
    else:
        LiveFleet(fleet)


def test_kserve_leaves_turns_to_its_gateway() -> None:
    """All else it routes as llm-d does."""
    own = [row.name for row in ROUTING.values() if KSERVE in row.at]
    assert own == ["power-of-two-requests", "round-robin"]


# names that are words of their own, or names of formats, step times and papers too
ORDINARY = {"static", "random", "greedy", "splitwise", "distserve", "preble", "flip", "sarathi", "orca"}
# defaults, the table, the papers' own setups
OWN_SETUPS = ("planner/fleet.py", "planner/policies.py", "planner/papers/")


def modules() -> Iterator[Path]:
    for folder in ("planner", "ui", "profiling"):
        yield from (ROOT / folder).rglob("*.py")


@pytest.mark.long
def test_no_other_module_knows_a_policy_by_name() -> None:
    """But where it is asked for by name: what shortest prompts first would save, examples in messages."""
    names = {row.name for row in TABLE} - ORDINARY
    known = {
        (path, node.value)
        for path in (str(module.relative_to(ROOT)) for module in modules())
        if not path.startswith(OWN_SETUPS)
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert known <= {
        ("planner/search/evidence/findings.py", "sjf"),
        ("planner/search/oracle/fleet_oracle.py", "jsq"),
    }


def test_the_docs_print_the_table() -> None:
    """python tests/support/policy_tables.py prints it."""
    written = (ROOT / "docs" / "tables" / "policies.md").read_text()
    assert tables() in written
