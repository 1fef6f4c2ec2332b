"""Splitwise's provisioning: against brute force on made-up staircases, by hand, and against its simulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from shares import some

from benchmarks import splitwise_provisioning as benchmark
from benchmarks.peers.compare import BARE_GPU, NO_STEPS, bare_llm
from benchmarks.splitwise_provisioning import most_throughput
from planner.documents.catalog import read_catalog
from planner.documents.slo import Slowdown
from planner.errors import InputError
from planner.fleet import Network, WorkerType
from planner.models.foreign_forms import SplitwiseLookup
from planner.models.latency import StepLatency
from planner.papers.splitwise_search import (
    MachineDesign,
    alone_on,
    even_splits,
    find_cheapest_splits,
    keeps_slowdowns,
    slowdowns,
    splits_within,
)
from planner.simulator.replay import simulate
from planner.traffic.trace import Trace

SHARED = Path(__file__).parents[3] / "shared"
MOST = 15


def staircase(rng: np.random.Generator) -> Callable[[int, int], bool]:
    """Cells that hold: for each t at least so many p, falling in t; sometimes none at all."""
    least = np.sort(rng.integers(1, MOST + 4, MOST))[::-1]
    return lambda p, t: bool(p >= least[t - 1])


@pytest.mark.parametrize("seed", some(range(200), 50))
def test_the_cheapest_corner_is_that_of_all_cells(seed: int) -> None:
    """All p x t up to 15 x 15; ties too, of each cost the cells with the least p for their t."""
    rng = np.random.default_rng(seed)
    holds = staircase(rng)
    costs = [float(c) for c in rng.integers(1, 5, 2)] if seed % 2 else list(rng.uniform(0.5, 3, 2))
    cells = [(p, t) for p in range(1, MOST + 1) for t in range(1, MOST + 1) if holds(p, t)]
    found = find_cheapest_splits(holds, *costs, most=MOST)
    if not cells:
        assert (found.value, found.counts) == (math.inf, ())
        return
    value = min(p * costs[0] + t * costs[1] for p, t in cells)
    assert found.value == pytest.approx(value)
    assert set(found.counts) == {
        (p, t) for p, t in cells if p * costs[0] + t * costs[1] == pytest.approx(value)
    }
    assert found.simulations < len(cells) + MOST


@pytest.mark.parametrize("seed", some(range(50), 15))
def test_the_highest_rate_is_that_of_all_splits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    splits = [(int(p), int(t)) for p, t in rng.integers(1, 20, (12, 2))]
    carried = {split: float(rng.integers(0, 9)) * 10 for split in splits}
    rates = [10.0 * k for k in range(1, 9)]
    found = most_throughput(splits, rates, lambda p, t, rate: rate <= carried[p, t])
    best = min(max(carried.values()), 80.0)
    assert found.value == best
    assert set(found.counts) == ({s for s in splits if carried[s] >= best} if best else set())


def test_splits_of_the_paper_fit_its_power() -> None:
    """Forty DGX-H100 are 1760: 25 with 26 A100 of 24.8 make 1744.8, 35 with 8 1738.4, 25 with 21 capped ones
    of 30.8 1746.8, 25 with 15 H100 1760."""
    assert {(25, 26), (35, 8)} <= set(splits_within(1760, 44, 24.8, step=5))
    assert (25, 21) in splits_within(1760, 44, 30.8, step=5)
    assert splits_within(1760, 44, 44)[24] == (25, 15)
    assert all(t >= 1 and 44 * (p + 1) + 44 * t > 1760 for p, t in splits_within(1760, 44, 44))


def test_a_budget_is_split_over_all_its_range() -> None:
    """10 in machines of 2 and 1: 1 + 8 to 4 + 2; two are both ends. Of one kind all in one pool."""
    assert even_splits(10, [2.0, 1.0], most=9) == splits_within(10, 2, 1) == [(1, 8), (2, 6), (3, 4), (4, 2)]
    assert even_splits(10, [2.0, 1.0], most=2) == [(1, 8), (4, 2)]
    assert even_splits(10, [3.0], most=9) == [(3, 0)]
    assert even_splits(2, [3.0], most=9) == even_splits(2, [2.0, 1.0], most=9) == []


STEPS = SplitwiseLookup((1.0, 2.0), (1.0, 1.0), (0.1, 0.1))  # a prompt takes a second, a decode 0.1 s
MACHINE = WorkerType(BARE_GPU, 1, NO_STEPS, 10**6, 2048, 512, form=STEPS)
ONE = MachineDesign("one", MACHINE, None).fleet(bare_llm(1.0), Network(), 1, 0)
APART = Trace("apart", np.array([0.0, 10.0]), np.array([5, 5]), np.array([5, 5]))


def test_slowdowns_are_over_the_request_alone() -> None:
    """Prompt 1 s, four decodes 0.4 s: TTFT 1, E2E 1.4, TBT (their way) 0.4 / 5. Alone half of each: all 2."""
    alone = {"ttft": np.full(2, 0.5), "tbt": np.full(2, 0.04), "e2e": np.full(2, 0.7)}
    found = slowdowns(simulate(ONE, APART), alone)
    assert all(values == pytest.approx([2.0, 2.0]) for values in found.values())


def test_a_request_alone_on_the_reference_has_no_slowdown() -> None:
    """f(N) = 0.1 + N / 100, 1 ms a pair, 20 ms a decode, 3 ms a KV token, 50 ms a prefill."""
    latency = StepLatency((1.0, 101.0), (0.11, 1.11), 0.001, 0.02, 0.003, 0.05, 0.0, "made up")
    machine = replace(MACHINE, latency=latency, form=None)
    trace = Trace("apart", np.array([0.0, 50.0, 99.0]), np.array([5, 40, 7]), np.array([9, 2, 30]))
    fleet = MachineDesign("one", machine, None).fleet(bare_llm(1.0), Network(), 1, 0)
    found = slowdowns(simulate(fleet, trace), alone_on(machine, trace))
    assert all(values == pytest.approx([1.0] * 3) for values in found.values())


@pytest.mark.parametrize(("factor", "kept"), [(2.01, True), (1.99, False)])
@pytest.mark.parametrize("metric", ["ttft", "tbt", "e2e"])
def test_each_limit_can_break_the_promise(metric: str, factor: float, kept: bool) -> None:
    alone = {"ttft": np.full(2, 0.5), "tbt": np.full(2, 0.04), "e2e": np.full(2, 0.7)}
    limits = [Slowdown("ttft", 0.5, 9.0), Slowdown(metric, 0.9, factor)]
    assert keeps_slowdowns(ONE, APART, limits, alone) is kept


def test_a_metric_without_a_reference_is_refused() -> None:
    with pytest.raises(InputError, match="the reference has ttft, but not tpot"):
        keeps_slowdowns(ONE, APART, [Slowdown("tpot", 0.5, 2.0)], {"ttft": np.ones(2)})


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the checkout")
@pytest.mark.parametrize(
    ("name", "honest", "machines", "counts"),
    [
        ("HH", False, 29, {(28, 1), (27, 2), (26, 3), (25, 4), (24, 5), (23, 6)}),
        ("HH", True, 30, {(29, 1), (28, 2), (27, 3), (26, 4), (25, 5), (24, 6)}),
        ("HA", False, 30, None),
        ("HHcap", False, 29, None),
        ("AA", False, 60, None),
        ("Baseline-H100", False, 52, None),
        ("Baseline-A100", False, 118, None),
    ],
)
def test_code_at_70_requests_per_s_needs_what_their_grid_says(
    name: str, honest: bool, machines: int, counts: set[tuple[int, int]] | None
) -> None:
    """Their simulator's optimum over a 39 x 39 grid, on the same requests; HH with all six ties."""
    profiles, traces = SHARED / "reference" / "splitwise", SHARED / "data" / "traces"
    trace = benchmark.made_up(traces, "code", 70.0, 0)
    assert len(trace) == 8378
    alone_s = benchmark.on_a100(profiles)(trace)
    preset = read_catalog().slos["splitwise"].slowdowns
    assert preset is not None
    prompt, token = benchmark.DESIGNS[name]
    kinds = {kind: benchmark.machine(profiles, kind, honest=honest) for kind in (prompt, token) if kind}
    design = MachineDesign(name, kinds[prompt], kinds[token] if token else None)

    def holds(p: int, t: int) -> bool:
        fleet = design.fleet(bare_llm(4_014_080), benchmark.NETWORK, p, t)
        return keeps_slowdowns(fleet, trace, preset.limits, alone_s)

    found = find_cheapest_splits(holds, 1.0, 1.0, most=160, splits=token is not None)
    assert found.value == machines
    assert counts is None or set(found.counts) == counts
