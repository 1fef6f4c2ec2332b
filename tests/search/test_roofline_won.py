"""A roofline that wins over measured step times is named, and only then."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from plans import mixed

from planner.documents.facts import RooflineWon
from planner.fleet import Fleet
from planner.models.latency import Kind
from planner.reports.fact_sentences import fact_sentence
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
    other_gpu = replace(guessed.pools[0].type.gpu, name="b200-180g")
    others = tuple(replace(pool, type=replace(pool.type, gpu=other_gpu)) for pool in guessed.pools)
    on_others = replace(guessed, pools=others)
    assert roofline_warnings(both, on_others) == (RooflineWon(("b200-180g",), ("h100-80g",)),)
    assert roofline_warnings(both, measured) == ()
    alone: Any = SimpleNamespace(types=[pool.type for pool in guessed.pools])
    assert roofline_warnings(alone, guessed) == ()


def test_a_gpu_that_was_measured_in_larger_groups_is_named_with_its_group() -> None:
    """A plan on h100-80g "won over h100-80g": tp1 had no kernels, tp2 and tp4 had."""
    measured = of_kind(mixed(), "kernels").pools[0].type
    guessed = of_kind(mixed(), "roofline")
    alone = tuple(replace(pool, type=replace(pool.type, tp=1)) for pool in guessed.pools)
    both: Any = SimpleNamespace(types=[replace(measured, tp=tp) for tp in (2, 4)])
    (fact,) = roofline_warnings(both, replace(guessed, pools=alone))
    assert fact == RooflineWon(("h100-80g tp1",), ("h100-80g tp2", "h100-80g tp4"))
    assert "over h100-80g tp2, h100-80g tp4, where kernels" in fact_sentence(fact)
