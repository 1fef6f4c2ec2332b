"""Prints docs/tables/policies.md from the rows of planner/policies.py: run this file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from planner.policies import (
    ADMISSION,
    BATCHING,
    POOLS,
    QUEUE,
    ROUTERS,
    ROUTING,
    RULES,
    STEPWISE,
    VLLM,
    Policy,
    find_router_difference,
    is_deployed,
)

ENGINE_NAMES = {"stepwise": "step by step", "distserve": "distserve", "splitwise": "splitwise"}
SHOWN = ("vllm-router", "endpoint-picker", "dynamo", "ray-serve", "production-stack", "skyserve")
OTHERS = {  # than what routes to mixed workers
    "vllm-router pairs": "vllm-router, of pairs",
    "endpoint-picker decode": "llm-d's endpoint picker, of decode workers",
    "production-stack pairs": "production-stack, of pairs",
}


def tables() -> str:
    """Markdown: one table per kind."""
    parts = [
        _table(["batching", "what it does", "prefix caches"], _batching()),
        _table(["queue", "which prompt is next", "in a plan", "vLLM is told"], _queues()),
        _table(["admission", "a sequence may start"], _plain(ADMISSION.values())),
        _table(["pools", "what it does"], _plain(POOLS.values())),
        _table(["routing", "which worker", "in a plan", "batching"], _routings()),
        _table(["routing", *(f"{ROUTERS[name].title}" for name in SHOWN)], _targets(SHOWN)),
        _table(["routing", *OTHERS.values()], _targets(tuple(OTHERS))),
        _table(["router", "told", "simulated as", "where it differs"], _rules()),
    ]
    return "\n\n".join(parts)


def _table(head: list[str], rows: Iterator[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _name(row: Policy) -> str:
    is_usual = row.is_default and not row.needs_caches
    return f"**`{row.name}`**" if is_usual else f"`{row.name}`"


def _in_plans(row: Policy) -> str:
    """Whether `policies: any` has it behind `plan serve`, or only who names it."""
    if STEPWISE not in row.simulators:
        return "no"
    return "yes" if is_deployed(row, None) else "by name"


def _batching() -> Iterator[list[str]]:
    for row in BATCHING.values():
        yield [_name(row), row.words, "yes" if row.with_caches else "no"]


def _queues() -> Iterator[list[str]]:
    for row in QUEUE.values():
        told = find_router_difference(row, VLLM)
        yield [_name(row), row.words, _in_plans(row), "-" if told.is_lacking else f"`{told.name}`"]


def _plain(rows: Iterable[Policy]) -> Iterator[list[str]]:
    for row in rows:
        yield [_name(row), row.words]


def _routings() -> Iterator[list[str]]:
    for row in ROUTING.values():
        yield [
            _name(row),
            row.words,
            _in_plans(row),
            ", ".join(ENGINE_NAMES[name] for name in row.simulators),
        ]


def _targets(routers: tuple[str, ...]) -> Iterator[list[str]]:
    for row in ROUTING.values():
        told = [find_router_difference(row, router) for router in routers]
        yield [_name(row), *(f"({each.name})" if each.is_lacking else f"`{each.name}`" for each in told)]


def _rules() -> Iterator[list[str]]:
    """What each router can be told, the routers of one title together."""
    seen = set()
    for name, rules in RULES.items():
        for told, rule in rules.items():
            row = (OTHERS.get(name, ROUTERS[name].title), told, rule)
            key = (ROUTERS[name].title, told, rule.routing, rule.differs, tuple(rule.settings))
            if key in seen or (ROUTERS[name].like and told in RULES[ROUTERS[name].like or ""]):
                continue
            seen.add(key)
            settings = ", ".join(f"{field} {value:g}" for field, value in rule.settings.items())
            yield [row[0], told, f"`{rule.routing}`{settings and f' ({settings})'}", rule.differs]


if __name__ == "__main__":
    sys.stdout.write(tables() + "\n")
