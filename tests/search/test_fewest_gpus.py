"""The objectives "gpus" and "power": the fewest GPUs or Watts, of as many the cheapest, by brute force."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from instances import fleets_of_any_mix, fleets_of_level0, instance
from plans import CATALOG
from questions import traffic

from planner.documents.task import Objective, parse_task
from planner.errors import InfeasibleError
from planner.reports.words import proof_lines
from planner.search.evidence.certify import plan
from planner.search.level0.level0_search import search_level0
from planner.search.mixed.best_fleet import find_best_fleet
from planner.search.mixed.bounds import checked_bound, lower_bound
from planner.search.oracle.fleet_counts import Counts, objective_of
from planner.search.problem.bill import paid_whole_usd_per_h
from planner.search.problem.options import PRICE_TIES, mixed_options, with_price_tie
from planner.search.problem.owned_first import objective_paid
from planner.search.problem.plan_problem import Problem
from planner.units import in_unit


def for_gpus(seed: int, objective: Objective = "gpus") -> Problem:
    """An instance whose GPUs take one or two for a worker, and are partly sold in nodes of 2 to 4."""
    problem, rng = instance(seed), np.random.default_rng([33, seed])
    gpus = [
        replace(worker.gpu, is_sold_whole=bool(rng.random() < 0.4), gpus_per_node=int(rng.integers(2, 5)))
        for worker in problem.types
    ]
    types = tuple(replace(w, gpu=gpu) for w, gpu in zip(problem.types, gpus, strict=True))
    task = replace(problem.task, objective=objective)
    return replace(problem, task=task, types=types, gpus=tuple(gpus))


def gpus_and_usd(counts: Counts) -> tuple[int, float]:
    gpus = sum(option.type.gpus * count for option, count in counts)
    return gpus, round(paid_whole_usd_per_h(counts), 6)


def watts_and_usd(counts: Counts) -> tuple[float, float]:
    watts = sum(option.type.power_w * count for option, count in counts)
    return watts, round(paid_whole_usd_per_h(counts), 6)


MEASURES = {"gpus": gpus_and_usd, "power": watts_and_usd}


def those_that_hold(problem: Problem, fleets: Iterable[Counts]) -> list[Counts]:
    return [counts for counts in fleets if problem.allows(counts) and problem.oracle.holds(counts)]


@pytest.mark.long
@pytest.mark.parametrize("objective", ["gpus", "power"])
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_level_0_has_the_least_and_of_as_many_the_cheapest(first: int, objective: Objective) -> None:
    """Every count of every pool and pair. A search called exact misses none; ties must have been broken."""
    ties = missed = 0
    measure = MEASURES[objective]
    for seed in range(first, first + 20):
        problem = for_gpus(seed, objective)
        held = those_that_hold(problem, fleets_of_level0(problem))
        level0 = search_level0(problem).search
        if level0.best is None:
            assert not (held and level0.is_exact)
            continue
        best = measure(level0.best)
        least = min(map(measure, held))
        assert best == least or not level0.is_exact
        missed += best != least
        ties += len({usd for value, usd in map(measure, held) if value == least[0]}) > 1
        assert problem.without_tie_break(level0.value) == objective_paid(problem, level0.best) == best[0]
    assert missed <= 1 and ties >= 4


@pytest.mark.parametrize("seed", range(8))
def test_no_mix_has_fewer_gpus_or_is_cheaper_and_the_bound_is_of_gpus_alone(seed: int) -> None:
    problem = for_gpus(seed)
    problem = replace(problem, types=problem.types[-2:], gpus=problem.gpus[-2:])
    held = those_that_hold(problem, fleets_of_any_mix(problem))
    if not held:
        return
    lower, least = lower_bound(problem), min(map(gpus_and_usd, held))
    fleet = find_best_fleet(replace(problem, bound=lower))
    assert checked_bound(lower, fleet.value) <= gpus_and_usd(fleet.best)[0]
    assert lower == pytest.approx(round(lower or 0.0), abs=1e-4)
    if fleet.is_every_mix_simulated:
        assert gpus_and_usd(fleet.best) <= least


def test_no_price_is_worth_a_gpu_in_less_than_ten_thousand() -> None:
    """Of the dearest GPU 10,000 count one GPU more than they are; of a free one none."""
    problem = for_gpus(0)
    (option, *_) = mixed_options(problem.types, "gpus")
    alone = replace(option, type=replace(option.type, tp=1, pp=1), objective=1.0)
    dearest = with_price_tie(alone, "gpus", alone.type.gpu.price_usd_per_h)
    assert objective_of(((dearest, 9_999),)) < 10_000 * (1 + 1e-6) + PRICE_TIES["gpus"] * 9_999 < 10_001.1
    assert with_price_tie(alone, "gpus", 0.0) is alone


@pytest.mark.parametrize("safety", ["none", {"kept_in": 0.9}])
def test_one_gpu_at_86_cents_before_a_node_of_eight_of_which_seven_are_idle(safety: object) -> None:
    """One H100 is sold with its node, 23.92 USD/h; one L40S keeps the SLO too."""
    document = {
        "llm": "llama-3.1-8b",
        "objective": "gpus",
        "safety": safety,
        "slo": {"ttft": {"p90": "1 s"}, "tpot": {"p90": "60 ms"}},
        "fleet": {"gpus": ["h100-80g", "l40s-48g"]},
    }
    task = parse_task(document, CATALOG)
    planned = plan(task, traffic(requests=300, rate_rps=2.0), CATALOG)
    assert planned.fleet.gpus == 1 and planned.bill.usd_per_h == pytest.approx(0.86, abs=0.01)
    certificate = planned.certificate
    assert certificate.value == certificate.level0 == certificate.bound == 1.0
    text = " ".join(proof_lines(planned))
    assert "On paper: 1 GPU." in text and "1 GPUs" not in text


@pytest.mark.long
@pytest.mark.parametrize(("safety", "rate_rps"), [("none", 5.0), ({"kept_in": 0.9}, 4.0)])
def test_of_equal_watts_the_cheapest(safety: object, rate_rps: float) -> None:
    """An H100 capped at 350 W is sold with its node, 23.92 USD/h; an L40S of 350 W keeps the SLO too."""
    document = {
        "llm": "llama-3.1-8b",
        "objective": "power",
        "safety": safety,
        "slo": {"ttft": {"p90": "1 s"}, "tpot": {"p90": "60 ms"}},
        "fleet": {"gpus": ["h100-80g@350W", "l40s-48g"]},
    }
    planned = plan(parse_task(document, CATALOG), traffic(requests=300, rate_rps=rate_rps), CATALOG)
    certificate = planned.certificate
    assert certificate.value == certificate.level0 == certificate.bound == 350.0
    assert planned.bill.usd_per_h == pytest.approx(0.86, abs=0.01)


def test_one_gpu_is_singular_and_prices_are_not() -> None:
    assert [in_unit(1, "GPUs"), in_unit(2, "GPUs"), in_unit(1, "W")] == ["1 GPU", "2 GPUs", "1 W"]
    with pytest.raises(InfeasibleError, match="GPU"):
        find_best_fleet(replace(for_gpus(0), limits=replace(for_gpus(0).limits, gpus=0)))
