"""What whole nodes, electricity and commitments cost, by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from plans import CATALOG, LLM, a_pool, mixed, pairs

from planner.documents.offers import ProviderOffer, Term
from planner.domain import COST
from planner.fleet import Fleet
from planner.models.power import shipped_power
from planner.search.evidence.findings import place_workers, used_up_limits
from planner.search.mixed.infeasible import exceeded
from planner.search.oracle.fleet_counts import objective_of
from planner.search.problem.bill import bill_fleet, commitments, paid_whole_usd_per_h
from planner.search.problem.options import option_of
from planner.simulator.energy import ExpectedPower
from planner.solvers.master import FleetLimits, Option
from planner.solvers.whole_nodes import fewest_nodes

H100, A100 = (CATALOG.gpu(name).price_usd_per_h for name in ("h100-80g", "a100-80g"))


def test_idle_gpus_of_a_whole_node_are_paid() -> None:
    """Five workers of 4 H100: 20 GPUs on three nodes of 8, four idle."""
    found = bill_fleet(mixed(count=5))
    assert (found.usd_per_h, found.by_gpu_usd_per_h) == pytest.approx((24 * H100, 20 * H100))
    assert (found.idle_gpus, found.nodes[0].count, found.rented_gpus) == (4, 3, 20)
    full = bill_fleet(mixed(count=4))
    assert full.usd_per_h == pytest.approx(full.by_gpu_usd_per_h) and full.idle_gpus == 0


def test_capped_gpus_share_nodes_and_the_placement_counts() -> None:
    """8 H100 and 12 capped ones fit three nodes; the fewest by GPUs and those of the placement agree."""
    fleet = pairs()
    assert (
        bill_fleet(fleet).usd_per_h
        == bill_fleet(fleet, place_workers(fleet)).usd_per_h
        == pytest.approx(24 * H100)
    )


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
    found = bill_fleet(fleet, place_workers(fleet))
    l40s = 4 * CATALOG.gpu("l40s-48g").price_usd_per_h
    assert found.usd_per_h == pytest.approx(16 * H100 + l40s)
    assert found.by_gpu_usd_per_h == pytest.approx(12 * H100 + l40s)
    assert (found.owned_gpus, found.rented_gpus, found.idle_gpus) == (4, 16, 4)


def test_workers_that_do_not_fit_together_take_more_nodes() -> None:
    """Three workers of 5 GPUs: 15 GPUs would fit two nodes, but no two workers share one. Only the bill of a
    placement knew that; searches took two nodes for enough.
    """
    fleet = mixed(tp=5, count=3)
    assert bill_fleet(fleet, place_workers(fleet)) == bill_fleet(fleet)
    assert bill_fleet(fleet).nodes[0].count == 3
    worker = fleet.pools[0].type
    counts = ((option_of("mixed", worker, "cost"), 3),)
    assert paid_whole_usd_per_h(counts) == bill_fleet(fleet).usd_per_h
    assert objective_of(counts) == pytest.approx(bill_fleet(fleet).usd_per_h, rel=1e-5)


def test_fleets_of_many_counts_pay_only_for_kinds_that_stand() -> None:
    """Capped H100 are dearer here. Without one of them, or without any of the others, a fleet pays what it
    pays by itself: no node at the price of GPUs that it has not."""
    gpu = replace(CATALOG.gpu("h100-80g"), price_usd_per_h=2.0)
    dear = replace(CATALOG.gpu("h100-80g@350W"), price_usd_per_h=3.0, is_sold_whole=gpu.is_sold_whole)
    plain, capped = (replace(a_pool("a", "mixed", gpu.name, 4, 1).type, gpu=each) for each in (gpu, dear))
    limits = FleetLimits({}, cost_usd_per_h=16.0)
    counts = np.array([[1, 0], [0, 1], [2, 0], [1, 1]], dtype=float)
    workers = [(plain, counts[:, 0]), (capped, counts[:, 1])]
    used = limits.used_by_each(COST, workers)
    assert used == pytest.approx([limits.used(COST, [(plain, n), (capped, m)]) for n, m in counts.tolist()])
    assert used == pytest.approx([16.0, 24.0, 16.0, 24.0])
    assert limits.fit_on_nodes(workers).tolist() == [True, False, True, False]


def test_rounding_errors_exceed_no_limit() -> None:
    """Three workers at 2.1 USD/h cost 6.300000000000001 USD/h. A limit of 6.3 allows them: it is neither to
    be raised (the error named a change from 6.3 to 6.3) nor used up by two of them.
    """
    single = a_pool("a", "mixed", "l40s-48g", 1, 1).type
    worker = replace(single, gpu=replace(single.gpu, price_usd_per_h=2.1))
    limits = FleetLimits({}, cost_usd_per_h=6.3)
    assert exceeded(limits, [(worker, 3)]) == ()
    assert [change.limit for change in exceeded(limits, [(worker, 4)])] == [COST.name]
    option = option_of("mixed", worker, "cost")
    assert used_up_limits(limits, ((option, 2),)) == ()
    assert [fact.limit for fact in used_up_limits(limits, ((option, 3),))] == [COST]


def least_packing(node_gpus: int, sizes: tuple[int, ...]) -> int:
    """The fewest nodes for workers of these sizes, by trying all nodes for each, the largest first."""
    best = len(sizes)

    def pack(left: tuple[int, ...], rest: tuple[int, ...]) -> None:
        nonlocal best
        if len(left) >= best:
            return
        if not rest:
            best = len(left)
            return
        for room in {room for room in left if room >= rest[0]}:
            k = left.index(room)
            pack((*left[:k], room - rest[0], *left[k + 1 :]), rest[1:])
        pack((*left, node_gpus - rest[0]), rest[1:])

    pack((), tuple(sorted(sizes, reverse=True)))
    return best


@pytest.mark.parametrize("node_gpus", [4, 8])
def test_nodes_for_workers_of_one_size_are_exact_and_of_several_a_bound(node_gpus: int) -> None:
    equal = of_several = 0
    for sizes in itertools.combinations_with_replacement(range(1, node_gpus + 1), 4):
        packed = least_packing(node_gpus, sizes)
        fewest = fewest_nodes(node_gpus, [(size, sizes.count(size)) for size in set(sizes)])
        assert fewest <= packed and (len(set(sizes)) > 1 or fewest == packed)
        equal, of_several = equal + (fewest == packed), of_several + 1
    assert equal >= 0.99 * of_several


def test_nodes_with_gaps_that_no_worker_fits() -> None:
    """None of 3 GPUs fits beside one of 6: five nodes of 8 for 27 GPUs. Two of 3 GPUs fit beside two of 5."""
    assert fewest_nodes(8, [(3, 1), (6, 4)]) == 5
    assert fewest_nodes(8, [(5, 2), (3, 2)]) == 2
    many = fewest_nodes(8, [(3, np.array([1.0, 2.0])), (6, np.array([4.0, 0.0]))], [3, 6])
    assert np.asarray(many).tolist() == [5.0, 1.0]


def test_counts_cost_what_their_fleet_does() -> None:
    fleet = pairs()
    counts = tuple((Option(p.role, p.type, p.type.price_usd_per_h), p.count) for p in fleet.pools)
    assert paid_whole_usd_per_h(counts) == bill_fleet(fleet).usd_per_h
    singly = fleet.with_types(lambda w: replace(w, gpu=replace(w.gpu, is_sold_whole=False)))
    assert (
        bill_fleet(singly).usd_per_h == pytest.approx(fleet.price_usd_per_h) and not bill_fleet(singly).nodes
    )


def paid_beside(fleet: Fleet, usd_per_kwh: float) -> Fleet:
    return fleet.with_types(lambda w: replace(w, gpu=replace(w.gpu, energy_usd_per_kwh=usd_per_kwh)))


def test_electricity_is_of_gpus_in_use_at_their_limit_and_of_idle_ones_at_rest() -> None:
    """5 workers of 4 H100 at 0.2 USD/kWh: 20 x 0.7 kW; four that idle in the third node draw less."""
    fleet = paid_beside(mixed(count=5), 0.2)
    idle_w = shipped_power().idle_w(fleet.pools[0].type.gpu)
    found = bill_fleet(fleet)
    assert 0 < idle_w < 300
    assert found.electricity_usd_per_h == pytest.approx(20 * 0.7 * 0.2 + 4 * idle_w / 1e3 * 0.2)
    assert found.rent_usd_per_h == pytest.approx(24 * H100)
    assert found.by_gpu_usd_per_h == pytest.approx(20 * (H100 + 0.14)) == pytest.approx(fleet.price_usd_per_h)
    counts = tuple((Option(p.role, p.type, p.type.price_usd_per_h), p.count) for p in fleet.pools)
    assert paid_whole_usd_per_h(counts) == pytest.approx(found.usd_per_h)
    assert bill_fleet(mixed(count=5)).electricity_usd_per_h == 0


def test_expected_electricity_is_of_what_the_simulation_draws() -> None:
    """Two workers of 4 H100, one at 2 kW and one at 1 kW: 3 kW at 0.2 USD/kWh are 0.6 USD/h."""
    watts = np.array([2000.0, 1000.0])
    drawn = ExpectedPower(watts, 0 * watts, 5600.0, (0.0, 1.0), 1, 1, "")
    found = bill_fleet(paid_beside(mixed(count=2), 0.2), power=drawn)
    assert found.expected_electricity_usd_per_h == pytest.approx(0.6)
    assert found.electricity_usd_per_h == pytest.approx(8 * 0.14)


def test_commitments_change_the_rent_alone() -> None:
    """24 rented H100 at 3 USD/h on demand and 2 for a year; 12 owned ones draw 8.4 kW at 0.1 USD/kWh."""
    rented, owned = a_pool("a", "mixed", "h100-80g", 4, 5), a_pool("b", "mixed", "h100-80g@owned", 4, 3)
    own = replace(owned, type=replace(owned.type, gpu=replace(owned.type.gpu, energy_usd_per_kwh=0.1)))
    fleet = Fleet(LLM, (rented, own, a_pool("c", "mixed", "l40s-48g", 4, 1)))
    l40s = 4 * CATALOG.gpu("l40s-48g").price_usd_per_h
    terms: dict[str, dict[Term, ProviderOffer]] = {
        "h100-80g": {
            "on-demand": ProviderOffer("slo.yaml", "on-demand", 3.0, "", ""),
            "reserved-1y": ProviderOffer("slo.yaml", "reserved-1y", 2.0, "", ""),
        }
    }
    on_demand, year = commitments(fleet, None, terms)
    assert (on_demand.term, year.term) == ("on-demand", "reserved-1y")
    assert on_demand.usd_per_h == pytest.approx(72 + 0.84 + l40s)
    assert year.usd_per_h == pytest.approx(48 + 0.84 + l40s)
    assert year.needed_frac == pytest.approx(2 / 3) and on_demand.needed_frac == pytest.approx(1)
    assert year.at_planned == ("l40s-48g",) and year.sources == ("h100-80g: slo.yaml, 2 USD/h",)
    assert commitments(mixed("a100-80g"), None, terms) == ()
