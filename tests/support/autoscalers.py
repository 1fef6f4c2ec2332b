"""Autoscalers by hand for every controller that has a manifest, and what is written of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from manifest_commands import EXAMPLES, documents
from plans import a_pool, mixed

from planner import manifests
from planner.day import autoscaling
from planner.day.autoscaling import Autoscaler, ScaledPool
from planner.day.controllers import table
from planner.day.controllers.knowledge import CapacityTable, Knowledge
from planner.fleet import Fleet, Role
from planner.simulator.elastic import ElasticPool

TIMETABLE = ((0, 2), (6 * 3600 + 1800, 4), (22 * 3600, 2))
PAIRS = Fleet(
    mixed().llm, (a_pool("pre", "prefill", "h100-80g", 2, 4), a_pool("dec", "decode", "h100-80g", 4, 3))
)
FLEETS = {"mixed": EXAMPLES["mixed"], "two mixed pools": EXAMPLES["two gpu types"], "pairs": PAIRS}


def autoscaler(
    fleet: Fleet,
    controller: str,
    /,
    *,
    by_role: Mapping[Role, Mapping[str, Any]] | None = None,
    rates_rps: Sequence[float] = (1.0, 2.5, 5.0),
    sizes: Sequence[Sequence[int]] | None = None,
    timetable: tuple[tuple[int, int], ...] = TIMETABLE,
    least: int = 1,
    **settings: Any,
) -> Autoscaler:
    """1 to 9 workers in each pool, 2 at the beginning, and a timetable. `settings` are named as their fields;
    the capacity table has these sizes at `rates_rps`.
    """
    rows = [[size] * len(fleet.pools) for size in (1, 2, 5)] if sizes is None else sizes
    row = table.CONTROLLERS[controller]
    for_all = row.settings(**settings)
    knowledge = Knowledge(
        tuple(ElasticPool(120.0, least=least, most=9) for _ in fleet.pools),
        tuple(pool.role for pool in fleet.pools),
        capacity=CapacityTable(np.array(rates_rps), np.array(rows), "by hand"),
        ttft_s=2.0,
        tpot_s=0.2,
    )
    of_roles = {role: replace(for_all, **own) for role, own in (by_role or {}).items()}
    pools = tuple(
        ScaledPool(pool.name, pool.role, least, 9, 2, timetable, start_s=120.0, drain_s=90.0)
        for pool in fleet.pools
    )
    return Autoscaler(table.ChosenController(row, for_all, of_roles), knowledge, pools)


def parameters_for(controller: str, target: str) -> dict[str, Any]:
    """The least that the controller must be told: Ray Serve follows concurrency alone."""
    is_by_metric = target == "ray-serve" and controller in ("hpa", "keda")
    return {"metric": "concurrency"} if is_by_metric else {}


def is_possible(fleet: Fleet, controller: str, target: str) -> bool:
    """What neither the target nor the controller can do with that fleet."""
    roles = {pool.role for pool in fleet.pools}
    if target == "disaggregatedset":
        return "mixed" not in roles
    if target == "skypilot":
        return roles == {"mixed"} and len(fleet.pools) == 1
    if controller == "knative" and target == "kserve":
        return roles == {"mixed"}
    return controller not in ("dynamo", "dynamo-sla") or roles != {"mixed"} or len(fleet.pools) == 1


@functools.cache
def written(fleet: str, controller: str, target: str) -> dict[str, str]:
    """The files of one pair."""
    given = FLEETS[fleet]
    timetable = () if target == "ray-serve" else TIMETABLE
    told = autoscaler(given, controller, timetable=timetable, **parameters_for(controller, target))
    return autoscaling.render(given, 5000, target, told)


@functools.cache
def own_files(fleet: str, target: str) -> dict[str, str]:
    """The target's own, without a controller."""
    return manifests.render(FLEETS[fleet], 5000, target).files


def objects(files: dict[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """Path and document of everything in YAML, apart from the chart, which holds the same objects."""
    return [
        (path, document)
        for path, text in files.items()
        if path.endswith(".yaml") and not path.startswith("chart/")
        for document in documents(text)
    ]


CASES = [
    (fleet, controller, target)
    for controller, targets in autoscaling.PAIRS.items()
    for target in targets
    for fleet in FLEETS
    if is_possible(FLEETS[fleet], controller, target)
    and (fleet != "two mixed pools" or controller in ("hpa", "cron"))  # the others name pools as these do
]
