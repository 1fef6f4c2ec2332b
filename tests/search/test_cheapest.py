"""Several LLMs on one stock, at the level of the formulation: brute force over abstract oracles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hand_made import GPU, LATENCY
from shares import some

from planner.fleet import Role, WorkerType
from planner.search.level0 import pruning_rules
from planner.search.level0.cheapest import CheapestChoice, SharedLimit, cheapest_designs, shared_limits
from planner.search.level0.designs import DesignPool, FleetDesign, PoolQuestion, record_why_not
from planner.search.level0.one_pool import BoundedOption, Level0Search, least_that_holds
from planner.search.oracle.fleet_counts import Counts
from planner.search.problem.reasons import reason_text
from planner.solvers.master import FleetLimits, Option

MOST = 6  # workers of a pool in the brute force
KINDS = ("a", "b", "c")


def an_option(role: Role, kind: str, price: float, *, tp: int = 1, watts: float = 400.0) -> Option:
    gpu = replace(GPU, name=kind, base=kind, price_usd_per_h=price, power_w=watts)
    worker = WorkerType(gpu, tp, LATENCY, 160_000, 1000, 256)
    return Option(role, worker, worker.price_usd_per_h)


@dataclass(slots=True)
class Truth:
    """A design whose counts hold where they reach one of `corners`, and how often it was asked."""

    options: tuple[Option, ...]
    corners: tuple[tuple[int, ...], ...]
    asked: list[tuple[int, ...]]

    def holds(self, counts: Counts) -> bool:
        vector = tuple(count for _, count in counts)
        self.asked.append(vector)
        return self.reaches(vector)

    def reaches(self, vector: tuple[int, ...]) -> bool:
        return any(all(a <= b for a, b in zip(corner, vector, strict=True)) for corner in self.corners)


@dataclass(slots=True)
class RowsOfTruth(Truth):
    """A pair that holds beside p prefill workers from `corners[k] = (p, d)` on, and beside no other p."""

    def reaches(self, vector: tuple[int, ...]) -> bool:
        return any(vector[0] == p and vector[1] >= d for p, d in self.corners)


def a_pool(option: Option, least: int, alone: Truth | None = None) -> DesignPool:
    item = BoundedOption(option, least, math.inf, least)
    return DesignPool(
        item,
        Level0Search(FleetLimits({})),
        None if alone is None else alone.holds,
        pruning_rules.PREFILL_ALONE,
    )


def a_design(truth: Truth, *pools: DesignPool) -> FleetDesign:
    return FleetDesign(pools, truth.holds, Level0Search(FleetLimits({})))


def instance(
    rng: np.random.Generator, *, rows: bool = False
) -> tuple[list[list[Truth]], list[list[FleetDesign]], FleetLimits]:
    """Two or three LLMs with mixed types and pairs on two or three kinds of GPU, random staircases.

    With `rows` what a pair needs to decode follows no order of its prefill counts.
    """
    kinds = KINDS[: rng.integers(2, 4)]
    price = {kind: float(rng.integers(2, 12)) for kind in kinds}
    watts = {kind: 100.0 * float(rng.integers(2, 9)) for kind in kinds}
    truths: list[list[Truth]] = []
    llms: list[list[FleetDesign]] = []
    for _ in range(rng.integers(2, 4)):
        mine: list[Truth] = []
        designs: list[FleetDesign] = []

        def some(role: Role) -> Option:
            kind = kinds[rng.integers(len(kinds))]
            return an_option(role, kind, price[kind], tp=int(rng.choice([1, 2])), watts=watts[kind])

        for _ in range(rng.integers(1, 3)):
            truth = Truth((some("mixed"),), ((int(rng.integers(1, MOST + 1)),),), [])
            least = int(rng.integers(1, truth.corners[0][0] + 1))
            mine.append(truth)
            designs.append(a_design(truth, a_pool(truth.options[0], least)))
        prefill = some("prefill")
        lead_least = int(rng.integers(1, 4))
        lead = a_pool(prefill, 1, Truth((prefill,), ((lead_least,),), []))
        for _ in range(rng.integers(0, 3)):
            decode = some("decode")
            steps = sorted({int(p) for p in rng.integers(lead_least, MOST + 1, 3)})
            falls = sorted({int(d) for d in rng.integers(1, MOST + 1, len(steps))}, reverse=True)
            truth = Truth((prefill, decode), tuple(zip(steps, falls, strict=False)), [])
            if rows:
                needs = tuple((p, int(rng.integers(1, MOST + 1))) for p in steps)
                truth = RowsOfTruth((prefill, decode), needs, [])
            mine.append(truth)
            designs.append(a_design(truth, lead, a_pool(decode, 1)))
        truths.append(mine)
        llms.append(designs)
    stock = {kind: int(rng.integers(1, 12)) if rng.random() < 0.8 else None for kind in kinds}
    limits = FleetLimits(
        stock,
        power_w=float(rng.integers(10, 60)) * 100 if rng.random() < 0.4 else None,
        cost_usd_per_h=float(rng.integers(15, 90)) if rng.random() < 0.3 else None,
        gpus=int(rng.integers(3, 20)) if rng.random() < 0.4 else None,
    )
    return truths, llms, limits


def least_by_force(
    truths: Sequence[Sequence[Truth]], rows: Sequence[SharedLimit], weigh: Callable[[Option], float]
) -> float:
    """The least weight over every choice of designs and of counts up to MOST that hold, within the limits."""
    totals = np.zeros((1, 1 + len(rows)))
    for mine in truths:
        each = [
            [
                sum(n * f(o) for o, n in zip(t.options, v, strict=True))
                for f in (weigh, *(r.use for r in rows))
            ]
            for t in mine
            for v in itertools.product(range(1, MOST + 1), repeat=len(t.options))
            if t.reaches(v)
        ]
        totals = (totals[:, None, :] + np.array(each)[None, :, :]).reshape(-1, 1 + len(rows))
        totals = totals[(totals[:, 1:] <= [row.amount + 1e-6 for row in rows]).all(axis=1)]
        totals = np.unique(totals, axis=0)
    return float(totals[:, 0].min()) if len(totals) else math.inf


def by_objective(option: Option) -> float:
    return option.objective


@pytest.mark.long
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("seed", some(range(150), 40))
def test_the_master_and_its_cuts_find_what_brute_force_finds(seed: int, rows: bool) -> None:
    """Also where more prefill workers need more decode workers, or none is enough."""
    truths, llms, limits = instance(np.random.default_rng(seed), rows=rows)
    stocked = {gpu: 12 if count is None else count for gpu, count in limits.stock.items()}
    limits = replace(limits, stock=stocked) if rows else limits
    limited = shared_limits(limits)
    found = cheapest_designs(llms, limited)
    expected = least_by_force(truths, limited, by_objective)
    assert found.value == pytest.approx(expected) and found.is_exact
    assert (found.best is None) == math.isinf(expected)
    if found.best is not None:
        assert found.bound == pytest.approx(expected)
        _keeps_all(found, truths, limited)
    for mine in truths:
        for truth in mine:
            assert len(set(truth.asked)) == len(truth.asked)  # nothing is simulated twice

    for row in limited:  # the least of one limit with which the others can be kept, asked of the same designs
        others = [other for other in limited if other is not row]
        again = cheapest_designs(llms, others, weigh=row.use)
        assert again.value == pytest.approx(least_by_force(truths, others, row.use))


def _keeps_all(found: CheapestChoice, truths: Sequence[Sequence[Truth]], rows: Sequence[SharedLimit]) -> None:
    """The constraints, from the answer alone: one design per LLM, counts that hold, every limit."""
    assert found.best is not None
    chosen = [design.counts(vector) for design, vector in found.best]
    assert len(chosen) == len(truths)
    for counts, mine in zip(chosen, truths, strict=True):
        options, vector = tuple(o for o, _ in counts), tuple(n for _, n in counts)
        assert any(truth.options == options and truth.reaches(vector) for truth in mine)
    for row in rows:
        used = sum(row.use(option) * count for counts in chosen for option, count in counts)
        assert used <= row.amount + 1e-6
    assert sum(o.objective * n for counts in chosen for o, n in counts) == pytest.approx(found.value)


@pytest.mark.parametrize("seed", range(20))
def test_more_of_any_limit_never_costs_more(seed: int) -> None:
    _, llms, limits = instance(np.random.default_rng(seed))
    rows = shared_limits(limits)
    before = cheapest_designs(llms, rows).value
    for row in rows:
        more = [replace(other, amount=other.amount * 1.5) if other is row else other for other in rows]
        assert cheapest_designs(llms, more).value <= before * (1 + 1e-9)


def test_one_of_two_gives_way_where_it_is_cheaper() -> None:
    """Both LLMs like 2 of a (4 USD/h each). There are 3 of a. On b the first needs 3 (15), the second 6 (30):
    the first moves, 8 + 15 = 23 instead of 8 + 30."""
    a, b = (an_option("mixed", kind, price) for kind, price in (("a", 4.0), ("b", 5.0)))
    llms = [
        [a_design(Truth((o,), ((n,),), []), a_pool(o, 1)) for o, n in ((a, 2), (b, on_b))] for on_b in (3, 6)
    ]
    found = cheapest_designs(llms, shared_limits(FleetLimits({"a": 3, "b": None})))
    assert found.best is not None and found.value == 23.0
    assert [(s.pools[0].bounded.option.type.gpu.name, v) for s, v in found.best] == [("b", (3,)), ("a", (2,))]
    assert cheapest_designs(llms, shared_limits(FleetLimits({"a": 4, "b": None}))).value == 16.0


def test_nothing_below_a_value_is_said_to_be_nothing() -> None:
    """The optimum costs 16: nothing is below 16, and 16 is found below 17."""
    a = an_option("mixed", "a", 4.0)
    llms = [[a_design(Truth((a,), ((2,),), []), a_pool(a, 1))] for _ in range(2)]
    nothing = cheapest_designs(llms, (), below_value=16.0)
    assert nothing.best is None and nothing.is_exact and nothing.bound == 16.0
    assert cheapest_designs(llms, (), below_value=17.0).value == 16.0


def test_of_almost_free_gpus_without_a_limit_no_more_are_simulated_than_where_a_search_gives_up() -> None:
    """Owned GPUs weigh 1e-5 USD/h, so 594,003 of them are cheaper than the incumbent of 5.94 USD/h. A pair
    with that many workers took 2.57 TiB.
    """
    rented, owned = an_option("mixed", "a", 5.94), an_option("mixed", "b", 1e-5)
    prefill, decode = an_option("prefill", "b", 1e-5), an_option("decode", "b", 1e-5)
    truths = [Truth((rented,), ((1,),), []), Truth((owned,), (), []), Truth((prefill, decode), (), [])]
    pools = [[a_pool(option, 1) for option in truth.options] for truth in truths]
    designs = [a_design(truth, *each) for truth, each in zip(truths, pools, strict=True)]
    found = cheapest_designs([designs], [SharedLimit(None, 1.0, lambda option: option.type.gpu.name == "a")])
    assert found.is_exact and found.value == pytest.approx(5.94)
    most = pools[1][0].bounded.too_many
    assert max(max(vector) for truth in truths for vector in truth.asked) <= most


def test_stopped_by_the_clock_it_claims_no_more_than_it_knows() -> None:
    """Stopped before the first simulation: least counts 1 and 1 of 4 USD/h bound it by 8, no fleet is known.
    Once 3 workers of each are known to hold and 1 to fail, the bound is 16 and the best 24."""
    a = an_option("mixed", "a", 4.0)
    designs = [a_design(Truth((a,), ((2,),), []), a_pool(a, 1)) for _ in range(2)]
    llms = [[design] for design in designs]
    stopped = cheapest_designs(llms, (), out_of_time=lambda: True)
    assert (stopped.best, stopped.bound, stopped.is_exact) == (None, 8.0, False)
    for design in designs:
        design.learn((3,), holds=True)
        design.learn((1,), holds=False)
    stopped = cheapest_designs(llms, (), out_of_time=lambda: True)
    assert (stopped.value, stopped.bound, stopped.is_exact) == (24.0, 16.0, False)


def questions_until_known(pool: DesignPool, least: int, most: int) -> list[int]:
    """The counts that are asked about, up to `most`, until the least that does is known, or none does."""
    asked: list[int] = []
    while not pool.is_known and pool.least <= most:
        question = PoolQuestion.of(pool, most)
        assert pool.learned.failed < question.count < pool.learned.least_holding and question.count <= most
        asked.append(question.count)
        question.answer = question.count >= least
        question.record_answer()
    return asked


def test_a_pool_is_known_after_few_questions_where_the_guess_is_good() -> None:
    option = an_option("decode", "a", 1.0)

    def asked(busy: int | None, least: int, most: int, likely: int = 1) -> list[int]:
        search = Level0Search(FleetLimits({}))
        pool = DesignPool(BoundedOption(option, 1, math.inf, likely, busy), search, lambda counts: True)
        found = questions_until_known(pool, least, most)
        assert pool.learned.least_holding == (least if least <= most else math.inf)
        return found

    assert asked(36, 36, 100) == [36, 35]
    assert asked(36, 37, 100) == [36, 37]
    assert asked(178, 176, 10_000) == [178, 177, 175, 176]
    assert asked(66, 66, 55) == [55]  # so many cannot pay
    assert asked(None, 200, 184, likely=137) == [184]  # one answer rules it out
    rng = np.random.default_rng(0)
    for _ in range(200):
        busy = int(rng.integers(1, 300)) if rng.random() < 0.5 else None
        least, most, likely = (int(each) for each in rng.integers(1, 300, 3))
        assert len(asked(busy, least, most, likely)) <= 2 * math.ceil(math.log2(300))


def test_counts_that_are_taken_to_fail_are_not_asked_about_and_not_called_simulated() -> None:
    option, search = an_option("decode", "a", 1.0), Level0Search(FleetLimits({}))
    pool = DesignPool(
        BoundedOption(option, 1, math.inf, assumed_least=30), search, lambda counts: counts[0][1] >= 40
    )
    pool.assume_few_fail()
    record_why_not(pool.bounded, search)
    assert reason_text(search.refuted[option.name]).endswith("not simulated")
    asked = questions_until_known(pool, 40, 100)
    assert min(asked) >= 30 and pool.least == 40 and search.assumed >= {pruning_rules.SEATS}
    record_why_not(pool.bounded, search)
    assert "fall behind" in reason_text(search.refuted[option.name])


def test_what_was_simulated_is_not_taken_to_fail() -> None:
    option, search = an_option("decode", "a", 1.0), Level0Search(FleetLimits({}))
    pool = DesignPool(BoundedOption(option, 1, math.inf, assumed_least=30), search, lambda counts: True)
    pool.learned.least_holding = 20
    pool.assume_few_fail()
    assert pool.least == 1 and pruning_rules.SEATS not in search.assumed


def test_the_least_count_of_a_row_is_found_from_its_corner_or_from_one_that_holds() -> None:
    item = BoundedOption(an_option("decode", "a", 1.0), 1, math.inf, 40)
    rng = np.random.default_rng(1)
    for _ in range(300):
        truth, least = (int(each) for each in rng.integers(1, 60, 2))
        most = math.inf if rng.random() < 0.3 else int(rng.integers(least, 70))
        near = least if rng.random() < 0.5 else None
        held = max(truth, least) + int(rng.integers(0, 9)) if rng.random() < 0.3 else math.inf
        asked: list[int] = []

        def holds(n: int, truth: int = truth, asked: list[int] = asked) -> bool:
            asked.append(n)
            return n >= truth

        found = least_that_holds(holds, least, most, item, near, held)
        answer = max(truth, least)
        assert found == (answer if answer <= max(most, held if held <= most + 1 else 0) else None)
        assert len(asked) == len(set(asked)) and all(least <= n <= most for n in asked)
        if near is not None and truth <= least < most:
            assert asked == [least]
