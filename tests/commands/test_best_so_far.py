"""The best fleet so far, which an interrupt leaves."""

from __future__ import annotations

from plans import CATALOG, mixed

from planner.commands.plan_command import BestSoFar
from planner.search.problem.plan_problem import SearchProgress


def test_an_interrupted_plan_names_what_is_paid() -> None:
    """Five workers of 4 H100 are paid as three nodes of 8, which progress says too; 20 GPUs were priced."""
    best_so_far = BestSoFar(None)
    best_so_far.note_progress(SearchProgress(1.0, None, 1, lambda: mixed(count=5)))
    usd_per_h = 24 * CATALOG.gpu("h100-80g").price_usd_per_h
    assert best_so_far.write_fleet().endswith(f", {usd_per_h:.2f} USD/h")
