"""What whole nodes cost, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import CATALOG, LLM, a_pool, mixed, pairs

from planner.fleet import Fleet
from planner.search.bill import bill, paid_whole_usd_per_h
from planner.search.findings import placement
from planner.solvers.master import Option

H100, A100 = (CATALOG.gpu(name).price_usd_per_h for name in ("h100-80g", "a100-80g"))


def test_idle_gpus_of_a_whole_node_are_paid() -> None:
    """Five workers of 4 H100: 20 GPUs on three nodes of 8, four idle."""
    found = bill(mixed(count=5))
    assert (found.usd_per_h, found.by_gpu_usd_per_h) == pytest.approx((24 * H100, 20 * H100))
    assert (found.idle_gpus, found.nodes[0].count, found.rented_gpus) == (4, 3, 20)
    full = bill(mixed(count=4))
    assert full.usd_per_h == pytest.approx(full.by_gpu_usd_per_h) and full.idle_gpus == 0


def test_capped_gpus_share_nodes_and_the_placement_counts() -> None:
    """8 H100 and 12 capped ones fit three nodes; the fewest by GPUs and those of the placement agree."""
    fleet = pairs()
    assert bill(fleet).usd_per_h == bill(fleet, placement(fleet)).usd_per_h == pytest.approx(24 * H100)


def test_owned_gpus_are_paid_neither_singly_nor_by_the_node() -> None:
    """4 owned H100 beside 12 that are rented, on two nodes of their own; L40S are sold singly."""
    fleet = Fleet(
        LLM,
        (
            a_pool("a", "mixed", "h100-80g@owned", 4, 1),
            a_pool("b", "mixed", "h100-80g", 4, 3),
            a_pool("c", "mixed", "l40s-48g", 4, 1),
        ),
    )
    found = bill(fleet, placement(fleet))
    l40s = 4 * CATALOG.gpu("l40s-48g").price_usd_per_h
    assert found.usd_per_h == pytest.approx(16 * H100 + l40s)
    assert found.by_gpu_usd_per_h == pytest.approx(12 * H100 + l40s)
    assert (found.owned_gpus, found.rented_gpus, found.idle_gpus) == (4, 16, 4)


def test_workers_that_do_not_fit_together_take_more_nodes() -> None:
    """Three workers of 5 GPUs: 15 GPUs would fit two nodes, but no two workers share one."""
    fleet = mixed(tp=5, count=3)
    assert bill(fleet, placement(fleet)).nodes[0].count == 3
    assert bill(fleet).nodes[0].count == 2


def test_counts_cost_what_their_fleet_does() -> None:
    fleet = pairs()
    counts = tuple((Option(p.role, p.type, p.type.price_usd_per_h), p.count) for p in fleet.pools)
    assert paid_whole_usd_per_h(counts) == bill(fleet).usd_per_h
    singly = fleet.with_types(lambda w: replace(w, gpu=replace(w.gpu, is_sold_whole=False)))
    assert bill(singly).usd_per_h == pytest.approx(fleet.price_usd_per_h) and not bill(singly).nodes
