"""A roofline that wins over measured step times is named, and only then."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from plans import mixed

from planner.documents.facts import RooflineWon
from planner.fleet import Fleet
from planner.models.latency import Kind
from planner.search.evidence.findings import roofline_warnings


def of_kind(fleet: Fleet, kind: Kind) -> Fleet:
    pools = (
        replace(each, type=replace(each.type, latency=replace(each.type.latency, kind=kind)))
        for each in fleet.pools
    )
    return replace(fleet, pools=tuple(pools))


def test_a_roofline_that_wins_over_a_measured_gpu_is_named() -> None:
    measured, guessed = of_kind(mixed(), "kernels"), of_kind(mixed(), "roofline")
    both: Any = SimpleNamespace(types=[pool.type for fleet in (measured, guessed) for pool in fleet.pools])
    gpus = tuple(dict.fromkeys(pool.type.gpu.name for pool in guessed.pools))
    assert roofline_warnings(both, guessed) == (RooflineWon(gpus, gpus),)
    assert roofline_warnings(both, measured) == ()
    alone: Any = SimpleNamespace(types=[pool.type for pool in guessed.pools])
    assert roofline_warnings(alone, guessed) == ()
