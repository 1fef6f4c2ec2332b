"""The tables of docs/policies.md, made of the rows of planner/policies.py: run this file to print them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from planner.policies import ADMISSION, BATCHING, POOLS, QUEUE, ROUTERS, ROUTING, VLLM, Policy, answer

ENGINE_NAMES = {"stepwise": "step by step", "distserve": "distserve", "splitwise": "splitwise"}
SHOWN = ("vllm-router", "endpoint-picker", "dynamo", "ray-serve", "production-stack")


def tables() -> str:
    """Markdown: one table per kind."""
    parts = [
        _table(["batching", "what it does", "prefix caches"], _batching()),
        _table(["queue", "which prompt is next", "in a plan", "vLLM is told"], _queues()),
        _table(["admission", "a sequence may start"], _plain(ADMISSION.values())),
        _table(["pools", "what it does"], _plain(POOLS.values())),
        _table(["routing", "which worker", "in a plan", "batching"], _routings()),
        _table(["routing", *(f"{ROUTERS[name].title}" for name in SHOWN)], _targets()),
    ]
    return "\n\n".join(parts)


def _table(head: list[str], rows: Iterator[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _name(row: Policy) -> str:
    is_usual = row.is_default and not row.needs_caches
    return f"**`{row.name}`**" if is_usual else f"`{row.name}`"


def _in_plans(row: Policy) -> str:
    if not row.is_planned:
        return "no"
    return "with prefix caches" if row.needs_caches else "yes"


def _batching() -> Iterator[list[str]]:
    for row in BATCHING.values():
        yield [_name(row), row.words, "yes" if row.with_caches else "no"]


def _queues() -> Iterator[list[str]]:
    for row in QUEUE.values():
        told = answer(row, VLLM)
        yield [_name(row), row.words, _in_plans(row), "-" if told.is_lacking else f"`{told.name}`"]


def _plain(rows: Iterable[Policy]) -> Iterator[list[str]]:
    for row in rows:
        yield [_name(row), row.words]


def _routings() -> Iterator[list[str]]:
    for row in ROUTING.values():
        yield [_name(row), row.words, _in_plans(row), ", ".join(ENGINE_NAMES[name] for name in row.engines)]


def _targets() -> Iterator[list[str]]:
    for row in ROUTING.values():
        told = [answer(row, router) for router in SHOWN]
        yield [_name(row), *(f"({each.name})" if each.is_lacking else f"`{each.name}`" for each in told)]


if __name__ == "__main__":
    sys.stdout.write(tables() + "\n")
