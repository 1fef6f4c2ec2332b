"""Autoscalers by hand for every controller that has a manifest, and what is written of them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from manifest_commands import EXAMPLES, documents
from plans import a_pool, mixed

from planner import manifests
from planner.day import autoscaling
from planner.day.autoscaling import Autoscaler, ScaledPool
from planner.fleet import Fleet

TIMETABLE = ((0, 2), (6 * 3600 + 1800, 4), (22 * 3600, 2))
PAIRS = Fleet(
    mixed().llm, (a_pool("pre", "prefill", "h100-80g", 2, 4), a_pool("dec", "decode", "h100-80g", 4, 3))
)
FLEETS = {"mixed": EXAMPLES["mixed"], "two mixed pools": EXAMPLES["two gpu types"], "pairs": PAIRS}


def autoscaler(fleet: Fleet, controller: str, /, **parameters: Any) -> Autoscaler:
    """1 to 9 workers in each pool, 2 at the beginning, and a timetable."""
    pools = tuple(ScaledPool(pool.name, pool.role, 1, 9, 2, TIMETABLE, start_s=120.0) for pool in fleet.pools)
    return Autoscaler(controller, parameters, pools)


def with_least(given: Autoscaler, least: int) -> Autoscaler:
    return replace(given, pools=tuple(replace(pool, least=least) for pool in given.pools))


def parameters_for(fleet: Fleet, controller: str, target: str) -> dict[str, Any]:
    """The least that the controller must be told."""
    pools = len(fleet.pools)
    if controller in ("fleetplan", "forecast", "aladdin"):
        return {"rates_rps": [1.0, 2.5, 5.0], "sizes": [[1] * pools, [2] * pools, [5] * pools]}
    if controller == "dynamo-sla":
        return {"ttft_s": 2.0, "tpot_s": 0.2}
    return {"metric": "concurrency"} if target == "ray-serve" and controller != "knative" else {}


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
    told = autoscaler(given, controller, **parameters_for(given, controller, target))
    if target == "ray-serve":
        told = replace(told, pools=tuple(replace(pool, timetable=()) for pool in told.pools))
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
