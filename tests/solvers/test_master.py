"""The master problem against arithmetic by hand, enumeration and its own constraints."""

import itertools
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hand_made import GPU, LATENCY
from shares import some

from planner.domain import Gpu
from planner.fleet import WorkerType
from planner.models.latency import StepLatency
from planner.search.level0 import two_pools
from planner.search.level0.one_pool import BoundedOption, Level0Search, search_one_pool
from planner.search.level0.two_pools import PairSimulations, search_two_pools
from planner.search.oracle.fleet_counts import objective_of
from planner.search.problem.reasons import reason_text
from planner.solvers.master import (
    FleetLimits,
    Option,
    TrafficLoad,
    bound_objective,
    cheapest_token_s,
    find_promising_fleet,
    least_seconds,
    least_workers,
    shadow_prices,
)
from planner.solvers.required_work import SloWork
from planner.traffic.workload import TraceLengths, Workload


def of_gpus(compare: Callable[[object, object], bool], prefill: Option, decode: Option) -> bool:
    return compare(prefill.type.gpu, decode.type.gpu)


def option(
    role: str, price: float, *, gpu: Gpu = GPU, latency: StepLatency = LATENCY, budget: int = 1000
) -> Option:
    worker = WorkerType(replace(gpu, price_usd_per_h=price), 1, latency, 160_000, budget, 256)
    return Option(role, worker, price)  # type: ignore[arg-type]


def one_class(requests: int, input_tokens: int, output_tokens: int) -> Workload:
    return Workload(
        np.array([requests]),
        np.array([input_tokens]),
        np.array([output_tokens]),
        np.array([input_tokens]),
        np.array([input_tokens]),
    )


def test_cheapest_token_is_in_a_full_step() -> None:
    """min f(N)/N: 10 ms / 100 tokens = 0.1 ms, the same as 100 ms / 1000; with 50 tokens at most, 0.2 ms."""
    assert cheapest_token_s(LATENCY, 1000) == pytest.approx(1e-4)
    assert cheapest_token_s(LATENCY, 50) == pytest.approx(2e-4)


def test_least_work_of_a_request_by_hand() -> None:
    """1000 tokens in, 11 out, mixed: prefill 1000 x 0.1 ms; ten gaps at 0.1 ms + 0.01 ms, and the KV reads
    sum_{i=1..10} (1000 + i) x 0.1 us = 10,055 x 0.1 us.
    """
    expected = 0.1 + 10 * (1e-4 + 1e-5) + 10_055e-7
    assert least_seconds(option("mixed", 1.0), 1000, 11) == pytest.approx(expected)
    assert least_seconds(option("prefill", 1.0), 1000, 11) == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(20))
def test_least_work_is_never_above_what_the_steps_take(seed: int) -> None:
    """Any way of cutting a request into steps, shared with whatever, takes at least u."""
    rng = np.random.default_rng(seed)
    n, out = int(rng.integers(1, 3000)), int(rng.integers(1, 50))
    spent_s, left = 0.0, n
    while left:  # chunks of random size beside random other tokens; the request's own share of f by tokens
        chunk = min(left, int(rng.integers(1, 1001)))
        others = int(rng.integers(0, 1001 - chunk))
        share = float(LATENCY.step_s(chunk + others)) * chunk / (chunk + others)
        spent_s, left = spent_s + share, left - chunk
    for i in range(out - 1):
        others = int(rng.integers(0, 1000))
        spent_s += float(LATENCY.step_s(1 + others)) / (1 + others) + LATENCY.b_s + LATENCY.d_s * (n + i + 1)
    assert spent_s >= least_seconds(option("mixed", 1.0), n, out) * (1 - 1e-9)


def test_least_workers_by_hand() -> None:
    """1,000 prompts of 1000 tokens are 100 s of prefill: 10 workers for 10 s, 9 if a tenth may wait."""
    lengths = TraceLengths(np.array([1000.0]), np.array([1.0]), np.array([1000]))
    assert least_workers(option("prefill", 1.0), lengths, SloWork(1.0, 10.0, 0.0, 10.0)) == 10
    assert least_workers(option("prefill", 1.0), lengths, SloWork(0.9, 10.0, 0.0, 10.0)) == 9
    assert least_workers(option("mixed", 1.0), lengths, SloWork(0.5, 10.0, 0.8, 10.0)) == 8


def test_bound_by_hand() -> None:
    """The same work split over a type at 1 USD/h and one twice as fast at 1.5 USD/h: the fast ones carry it,
    10 / 2 x 1.5 = 7.5 USD/h; with stock for two of them, 2 x 1.5 + 6 x 1.
    """
    fast = replace(LATENCY, f_s=(0.005, 0.005, 0.050))
    slow, quick = (
        option("mixed", 1.0),
        option("mixed", 1.5, gpu=replace(GPU, name="q", base="q"), latency=fast),
    )
    work = one_class(1000, 1000, 1)

    def value(stock: dict[str, int | None]) -> float | None:
        return bound_objective(
            [slow, quick], TrafficLoad(work, SloWork(1.0, 10.0, 1.0, 10.0), 1e5, 1e12), FleetLimits(stock)
        )

    assert value({"g": None, "q": None}) == pytest.approx(7.5)
    assert value({"g": None, "q": 2}) == pytest.approx(9.0)
    assert value({"g": 1, "q": 2}) is None


def test_shadow_prices_by_hand() -> None:
    """100 requests of 0.1 s each in 1 s: 10 workers, 4 at 1 USD/h, others at 3. One cheap GPU more saves 2.
    With others of 200 W at 1.5 USD/h and 3 kW, n + m = 10 and 400 n + 200 m <= 3000: a Watt more turns 1/200
    of one worker into a cheaper one.
    """

    def prices(limits: FleetLimits, *others: Option) -> dict[str, float]:
        found = shadow_prices(
            [option("mixed", 1.0), *others],
            TrafficLoad(one_class(100, 1000, 1), SloWork(1.0, 1.0, 1.0, 1.0), 1.0, 1e12),
            limits,
        )
        return {limit.name: price for limit, price in found.items()}

    dear = option("mixed", 3.0, gpu=replace(GPU, name="dear", base="dear"))
    assert prices(FleetLimits({"g": 4, "dear": 50}), dear) == pytest.approx(
        {"stock of g": 2, "stock of dear": 0}
    )
    frugal = option("mixed", 1.5, gpu=replace(GPU, name="frugal", base="frugal", power_w=200.0))
    assert prices(FleetLimits({}, power_w=3000.0), frugal) == pytest.approx({"power": 0.5 / 200})
    assert prices(FleetLimits({"g": 4})) == {}


def test_bound_knows_the_link() -> None:
    """1,000 prompts of 63 blocks, 1,008 tokens, x 1e5 B in 10 s are 10.08 GB/s from prefill to decode."""
    options, work = [option("prefill", 1.0), option("decode", 1.0)], one_class(1000, 1000, 2)

    def value(link_bytes_per_s: float) -> float | None:
        return bound_objective(
            options,
            TrafficLoad(work, SloWork(1.0, 10.0, 1.0, 10.0), 1e5, link_bytes_per_s),
            FleetLimits({"g": None}),
        )

    assert value(10.09e9) is not None and value(10.07e9) is None


@pytest.mark.parametrize("seed", range(15))
def test_promising_is_the_best_fleet_not_excluded(seed: int) -> None:
    """Enumerated: no fleet under the value, in no cut's shadow, is expected to carry (1 %) more."""
    rng = np.random.default_rng(seed)
    prices = [float(price) for price in rng.integers(2, 9, 4)]
    options = [
        option("mixed", prices[0]),
        option("mixed", prices[1], budget=512),
        option("prefill", prices[2]),
        option("decode", prices[3]),
    ]
    shares = rng.uniform(0.1, 0.5, 4)
    below = float(rng.integers(10, 25))
    cuts = [tuple(int(n) for n in rng.integers(0, 4, 4)) for _ in range(rng.integers(0, 6))]

    def carried(n: tuple[int, ...]) -> float:
        return float(shares[:2] @ n[:2] + min(shares[2] * n[2], shares[3] * n[3]))

    fleets = [
        n
        for n in itertools.product(*(range(int(below / o.objective) + 1) for o in options))
        if sum(o.objective * k for o, k in zip(options, n, strict=True)) <= below
        and not any(all(a <= b for a, b in zip(n, cut, strict=True)) for cut in cuts)
    ]
    found = find_promising_fleet(
        options, shares.tolist(), FleetLimits({"g": None}), below_value=below, cuts=cuts
    )
    if not fleets:
        assert found is None
        return
    assert found is not None and found[0] in fleets
    assert found[1] == pytest.approx(carried(found[0]))
    assert found[1] >= max(carried(n) for n in fleets) * 0.99 - 1e-9


@pytest.mark.parametrize("separated", [False, True])
@pytest.mark.parametrize("seed", some(range(40), 14))
def test_level_0_against_enumeration_with_made_up_monotone_verdicts(
    seed: int, separated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools hold above random thresholds, pairs above random staircases; the search finds the cheapest.

    With `separated` decode pools are also asked alone, as where there are very many pairs.
    """
    monkeypatch.setattr(two_pools, "MANY_PAIRS", 0 if separated else 200)
    rng = np.random.default_rng(seed)
    gpus = [replace(GPU, name=f"g{i}", base=f"g{i}") for i in range(3)]
    price = rng.uniform(1, 5, 3)
    mixed = [option("mixed", float(price[i]), gpu=gpus[i]) for i in range(3)]
    prefill = [option("prefill", float(price[i]), gpu=gpus[i]) for i in range(3)]
    decode = [option("decode", float(price[i]), gpu=gpus[i]) for i in range(3)]
    threshold = {o.name: int(rng.integers(3, 15)) for o in mixed}
    lead = {o.name: int(rng.integers(1, 6)) for o in prefill}
    # a pair holds if p >= lead + slope / d, d >= its own least: a falling staircase
    slope = {(p.name, d.name): rng.uniform(0, 12) for p in prefill for d in decode}
    least_d = {o.name: int(rng.integers(1, 5)) for o in decode}
    limits = FleetLimits(
        {gpu.name: (None if rng.random() < 0.7 else int(rng.integers(4, 12))) for gpu in gpus}
    )

    def holds(counts: tuple[tuple[Option, int], ...]) -> bool:
        if len(counts) == 1:
            return counts[0][1] >= threshold[counts[0][0].name]
        (p, n_p), (d, n_d) = counts
        return n_d >= least_d[d.name] and n_p >= lead[p.name] + slope[p.name, d.name] / n_d

    def allowed_counts() -> list[tuple[tuple[Option, int], ...]]:
        one = [((o, n),) for o in mixed for n in range(1, 40)]
        two = [((p, a), (d, b)) for p in prefill for d in decode for a in range(1, 25) for b in range(1, 25)]
        return [
            counts
            for counts in (*one, *two)
            if holds(counts) and limits.first_exceeded([(o.type, n) for o, n in counts]) is None
        ]

    search = Level0Search(limits)
    bounded = {o.name: BoundedOption(o, 1, limits.most_workers(o.type)) for o in (*mixed, *prefill, *decode)}
    if seed % 2:  # guesses, right or wrong
        for name, item in bounded.items():
            busy = int(rng.integers(1, 20)) if item.option.role == "decode" else None
            bounded[name] = replace(item, likely=int(rng.integers(1, 20)), likely_decode=busy)

    def leads(counts: tuple[tuple[Option, int], ...]) -> bool:
        return counts[0][1] >= lead[counts[0][0].name]

    def follows(counts: tuple[tuple[Option, int], ...]) -> bool:
        return counts[0][1] >= least_d[counts[0][0].name]

    search_one_pool([bounded[o.name] for o in mixed], holds, search, lambda: False)
    for compare in (operator.eq, operator.ne):  # pairs of one GPU type, then of two
        search_two_pools(
            [bounded[o.name] for o in prefill],
            [bounded[o.name] for o in decode],
            PairSimulations(holds, leads, follows),
            search,
            lambda: False,
            partial(of_gpus, compare),
        )
    best = min((objective_of(counts) for counts in allowed_counts()), default=np.inf)
    assert search.value == pytest.approx(best)
    if search.best is not None:
        assert holds(search.best)
        assert limits.first_exceeded([(o.type, n) for o, n in search.best]) is None


def test_prefill_counts_that_leaps_passed_over_are_looked_at_once_a_fleet_is_known() -> None:
    """Beside the cheap decode worker 4 prefill workers hold and no other count; leaps ask for 1, 2, 3, 5, 8
    and so on, until there are far too many. Then the dear one holds beside 1: 101, and below that 4 + 1.
    """
    prefill, cheap = option("prefill", 1.0), option("decode", 1.0)
    dear = option("decode", 100.0, gpu=replace(GPU, name="dear", base="dear"))

    def holds(counts: tuple[tuple[Option, int], ...]) -> bool:
        (_, n_p), (d, _) = counts
        return d is dear or n_p == 4

    search = Level0Search(FleetLimits({}))
    front, *back = (BoundedOption(each, 1, np.inf) for each in (prefill, cheap, dear))
    search_two_pools([front], back, PairSimulations(holds), search, lambda: False)
    assert search.value == 5.0 and search.best == ((prefill, 4), (cheap, 1))


def test_an_unlimited_search_states_only_counts_it_has_simulated() -> None:
    """Nothing ever holds: the count that the refutation names is one that was asked for."""
    asked: set[int] = set()

    def never(counts: tuple[tuple[Option, int], ...]) -> bool:
        asked.add(counts[0][1])
        return False

    mixed = option("mixed", 1.0)
    search = Level0Search(FleetLimits({"g": None}))
    search_one_pool([BoundedOption(mixed, 1, np.inf, likely=3)], never, search, lambda: False)
    assert search.best is None and search.most_failed[mixed.name] in asked
    assert reason_text(search.refuted[mixed.name]).startswith(
        f"{search.most_failed[mixed.name]} workers fail"
    )
