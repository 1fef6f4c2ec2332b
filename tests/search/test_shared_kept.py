"""The largest share of scenarios that several LLMs keep together, where each scenario kept takes a GPU
more.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planner.search.several import shared_kept
from planner.search.several.shared_kept import find_common_share


def problem(kept_in_frac: float | None, futures: int = 4) -> Any:
    """Of `futures` scenarios n workers keep n - 1."""
    safety = None if kept_in_frac is None else SimpleNamespace(kept_in_frac=kept_in_frac)
    oracle = SimpleNamespace(
        scenarios=() if safety is None else tuple(range(futures)),
        missed_count=lambda counts, most: max(futures - (counts[0][1] - 1), 0),
    )
    return SimpleNamespace(task=SimpleNamespace(safety=safety), oracle=oracle, gpus=None)


def shared(monkeypatch: pytest.MonkeyPatch, asked: list[Any], gpus: int, on_paper: list[int]) -> Any:
    """With so many GPUs for all."""

    def in_most(question: Any, futures: Any, may_miss: int) -> Any:
        needed = len(futures) - may_miss + 1 if futures else 1
        return SimpleNamespace(needed=needed, gpus=question.gpus)

    def in_turn(llms: int, limits: int, serve: Any) -> Any:
        fleets = []
        for k in range(llms):
            if (counts := serve(k, limits)) is None:
                return None
            fleets.append(counts)
            limits -= counts[0][1]
        return fleets

    monkeypatch.setattr(shared_kept, "with_scenarios", in_most)
    monkeypatch.setattr(shared_kept, "serve_in_turn", in_turn)
    monkeypatch.setattr(
        shared_kept,
        "problem_within",
        lambda one, left: SimpleNamespace(task=one.task, oracle=one.oracle, gpus=left),
    )
    monkeypatch.setattr(shared_kept, "with_search_limit", lambda one, most: one)
    monkeypatch.setattr(shared_kept, "owned_first", lambda one, counts: counts)
    monkeypatch.setattr(
        shared_kept,
        "find_fleet_quickly",
        lambda one, start, is_mixed: None if one.needed > one.gpus else (("worker", one.needed),),
    )
    fleets: Any = [(("worker", count),) for count in on_paper]
    limits: Any = gpus
    return find_common_share(asked, fleets, limits, lambda: False)


def test_eight_gpus_keep_three_of_four_futures_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four each take ten GPUs, three each take eight."""
    found = shared(monkeypatch, [problem(1.0), problem(1.0)], 8, [1, 1])
    assert found.kept_frac == 0.75 and [counts[0][1] for counts in found.fleets] == [4, 4]
    assert found.relaxation == "safety: {kept_in: 0.75}"


def test_an_llm_takes_no_more_than_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second asks for one of two scenarios, two GPUs, or for none, one: seven or eight are left of
    nine.
    """
    found = shared(monkeypatch, [problem(1.0, 8), problem(0.5, 2)], 9, [1, 2])
    assert found.kept_frac == 0.75 and [counts[0][1] for counts in found.fleets] == [7, 2]
    found = shared(monkeypatch, [problem(1.0, 8), problem(None)], 9, [1, 1])
    assert found.kept_frac == 0.875 and [counts[0][1] for counts in found.fleets] == [8, 1]


def test_where_nothing_more_fits_it_is_what_the_fleets_on_paper_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shared(monkeypatch, [problem(1.0), problem(1.0)], 4, [2, 2])
    assert found.kept_frac == 0.25 and [counts[0][1] for counts in found.fleets] == [2, 2]
