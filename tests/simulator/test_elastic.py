"""Pools that change during a run: against a plain simulator, by hand, and what must not change anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from elastic_reference import ElasticReference, Script
from elastic_runs import simulate_elastic
from ranks_reference import random_ranked_case
from simulations import LLM, make_latency, make_pool, make_trace, prefix_trace, random_case, random_prompts

from planner.errors import InputError
from planner.fleet import Disturbance, Fleet, Network, PinnedPrefix, Policies, Role
from planner.simulator.elastic import (
    LIMBO_PATIENCE_S,
    ElasticFleet,
    ElasticPool,
    ElasticRun,
    MetricsReading,
    simulate_together,
)
from planner.simulator.replay import simulate
from planner.simulator.simulation import STATUS, Simulation
from planner.solvers.master import FleetLimits
from planner.traffic.trace import Trace


class Always:
    """A controller that never changes anything."""

    def __init__(self, every_s: float, lag_s: float = 0.0) -> None:
        self.every_s, self.lag_s = every_s, lag_s

    def start(self, sizes: Sequence[int]) -> None:
        self.now = tuple(sizes)

    def sizes(self, reading: MetricsReading) -> Sequence[int]:
        return self.now


def same_bytes(one: Simulation, other: Simulation) -> None:
    """Every number, to the last bit."""
    for name in Simulation.__dataclass_fields__:
        ours, theirs = getattr(one, name), getattr(other, name)
        if isinstance(ours, np.ndarray):
            assert ours.tobytes() == theirs.tobytes(), name
        else:
            assert ours == theirs, name


def random_change(seed: int, *, dyadic: bool) -> tuple[Fleet, Trace, list[ElasticPool], Script]:
    """A random fleet and trace of `random_case`, with pools that change at random, often too fast.

    With `dyadic` events coincide, and workers of a pool are alike; else there is one of each, and spot
    markets take some away.
    """
    fleet, trace, _, _ = random_case(seed, dyadic=dyadic)
    rng = np.random.default_rng([seed, dyadic, 31])
    span_s = float(trace.arrival_s[-1]) + 5.0

    def number(most: float) -> float:
        value = float(rng.uniform(0, most))
        return round(value * 1024) / 1024 if dyadic else value

    pools = []
    for _ in fleet.pools:
        most = int(rng.integers(1, 4)) if dyadic else 1
        least = int(rng.integers(0, most + 1))
        pools.append(
            ElasticPool(
                start_s=number(span_s / 4),
                least=least,
                most=most,
                warm=int(rng.integers(0, 2)),
                warm_start_s=number(span_s / 20),
                drain_limit_s=float(rng.choice([0.0, number(span_s / 4), math.inf])),
                interruptions_per_h=0.0 if dyadic else float(rng.choice([0.0, 3600 * 0.2 / span_s])),
                notice_s=number(span_s / 8),
                first=int(rng.integers(least, most + 1)),
            )
        )
    table = [[int(rng.integers(0, pool.most + 2)) for pool in pools] for _ in range(20)]
    table.append([pool.most for pool in pools])
    fleet = replace(fleet, policies=replace(fleet.policies, seed=seed))
    return fleet, trace, pools, Script(span_s / 40 + number(span_s / 5), table)


@pytest.mark.parametrize("dyadic", [False, True])
@pytest.mark.parametrize("block", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))])
def test_equals_the_plain_simulator(block: int, dyadic: bool) -> None:
    """30 random cases each: drains, deaths, starts, warm ones, interruptions; P and D apart, or mixed."""
    for seed in range(30 * block, 30 * block + 30):
        fleet, trace, pools, script = random_change(seed, dyadic=dyadic)
        run = simulate_elastic(fleet, trace, pools, script)
        script.start([])
        slow = ElasticReference(fleet, trace, pools, script).run()
        fast = run.simulation
        assert [STATUS[s] for s in fast.status] == [r.status for r in slow.requests], seed
        for what in ("prefill_worker", "decode_worker", "preemptions"):
            np.testing.assert_array_equal(
                getattr(fast, what), [getattr(r, what) for r in slow.requests], err_msg=f"{what} {seed}"
            )
        for what in ("ttft_s", "tpot_s", "tbt_max_s", "e2e_s"):
            np.testing.assert_allclose(
                getattr(fast, what),
                [getattr(r, what) for r in slow.requests],
                1e-9,
                1e-9,
                err_msg=f"{what} {seed}",
            )
        np.testing.assert_array_equal(fast.worker_steps, [w.steps for w in slow.workers])
        np.testing.assert_allclose(fast.worker_busy_s, [w.busy_s for w in slow.workers], 1e-9, 1e-9)
        spans = [
            (s.worker, s.requested_s, s.ready_s, s.given_up_s, s.gone_s, s.was_taken, s.was_stopped)
            for s in run.spans
        ]
        np.testing.assert_allclose(
            np.array(spans, float), np.array(slow.spans, float), 1e-9, 1e-9, err_msg=str(seed)
        )
        check_readings(run, slow)


def check_readings(run: ElasticRun, slow: ElasticReference) -> None:
    """Gauges of every pool, and what finished where nobody lost a worker: else it counts where it was routed
    last."""
    for reading, pools in zip(run.readings, slow.gauges, strict=False):
        gauges = (reading.ready, reading.starting, reading.draining, reading.waiting, reading.running)
        theirs = np.array(pools, float).T
        np.testing.assert_array_equal(np.array(gauges), theirs[:5])
        np.testing.assert_allclose(reading.kv_frac, theirs[5], 1e-9, 1e-9)
        assert (reading.limbo == theirs[6]).all()
        if not run.simulation.preemptions.any():
            np.testing.assert_array_equal(reading.finished, theirs[7])
            np.testing.assert_allclose(reading.tpot_s, theirs[8], 1e-9)


def static_pools(fleet: Fleet) -> list[ElasticPool]:
    return [ElasticPool(1.0, most=pool.count) for pool in fleet.pools]


@pytest.mark.parametrize("seed", range(30))
def test_a_controller_that_never_changes_is_the_static_fleet(seed: int) -> None:
    """To the byte, however often the kernel pauses, runs of steps recorded or not."""
    fleet, trace, limits, _ = random_case(seed, dyadic=seed % 2 == 0)
    rng = np.random.default_rng(seed)
    for record in (False, True):
        run = simulate_elastic(
            fleet,
            trace,
            static_pools(fleet),
            Always(float(rng.uniform(0.01, 2)), float(rng.uniform(0, 3))),
            limits=limits,
            record=record,
        )
        same_bytes(run.simulation, simulate(fleet, trace, limits=limits, record=record))


@pytest.mark.parametrize("seed", range(20))
def test_pauses_change_nothing_where_pools_change(seed: int) -> None:
    """The same decisions with readings at other moments, which are pauses of their own."""
    fleet, trace, pools, script = random_change(seed, dyadic=seed % 2 == 0)
    run = simulate_elastic(fleet, trace, pools, script)
    script.lag_s = 0.37 * script.every_s
    late = simulate_elastic(fleet, trace, pools, script)
    same_bytes(run.simulation, late.simulation)
    assert run.spans == late.spans


def churn(seed: int, count: int) -> tuple[list[ElasticPool], Script]:
    """So many pools that change all the time at first; then all workers are there."""
    rng = np.random.default_rng([seed, 77])
    pools = [
        ElasticPool(
            float(rng.uniform(0, 3)),
            most=3,
            drain_limit_s=float(rng.choice([0.0, 1.0, math.inf])),
            interruptions_per_h=60.0,
            notice_s=1.0,
            first=int(rng.integers(0, 4)),
        )
        for _ in range(count)
    ]
    table = [[int(rng.integers(0, 4)) for _ in pools] for _ in range(40)]
    return pools, Script(float(rng.uniform(0.3, 2)), [*table, [3] * count])


def check_conserved(run: ElasticRun, trace: Trace) -> None:
    """All requests end, and every token is made once."""
    result = run.simulation
    finished = result.status == STATUS.index("finished")
    assert (finished | (result.status == STATUS.index("rejected"))).all()
    if finished.all() and len(result.runs):
        gaps = int((result.runs["steps"] * result.runs["sequences"]).sum())
        assert gaps == (trace.output_tokens - 1).sum()
    for span in run.spans:
        assert 0 <= span.requested_s <= span.ready_s <= span.gone_s <= run.end_s
        assert span.requested_s <= span.given_up_s <= span.gone_s
    by_worker: dict[int, float] = {}
    for span in run.spans:  # in order of requested_s: a number is used by one worker at a time
        assert span.requested_s >= by_worker.get(span.worker, 0.0)
        by_worker[span.worker] = span.gone_s


@pytest.mark.parametrize("seed", range(15))
def test_nothing_is_lost_with_ranks(seed: int) -> None:
    """All ranks of a worker start, drain and die together."""
    fleet, trace, _, _ = random_ranked_case(seed, dyadic=False)
    pools, script = churn(seed, len(fleet.pools))
    check_conserved(simulate_elastic(fleet, trace, pools, script, record=True), trace)


@pytest.mark.parametrize("routing", ["prefix-affinity", "cache-aware", "e2", "round-robin"])
def test_nothing_is_lost_with_prefix_caches(routing: str) -> None:
    rng = np.random.default_rng(5)
    blocks, tokens = random_prompts(rng, 80, 16)
    outputs = rng.integers(1, 20, 80).tolist()
    trace = prefix_trace(np.cumsum(rng.exponential(0.4, 80)).tolist(), blocks, tokens=tokens, outputs=outputs)
    pool = make_pool(make_latency((0.05, 0.4), knots=(1, 64)), count=3, kv_tokens=16 * 60)
    fleet = Fleet(LLM, (pool,), Policies(routing=routing, prefix_cache=True))
    pools, script = churn(3, 1)
    check_conserved(simulate_elastic(fleet, trace, pools, script, record=True), trace)


def one(count: int = 1, seats: int = 8) -> Fleet:
    """Workers whose steps take 1 s, whatever is in them."""
    return Fleet(LLM, (make_pool(make_latency(), count=count, seats=seats),))


def test_prefix_caches_are_empty_after_a_start() -> None:
    """The same 48 tokens again and again, 1 s apart: 32 are found (the last block is computed always), but
    not by the first request of a new life."""
    trace = prefix_trace([0.0, 2.0, 4.0, 14.0, 16.0], [[1, 2, 3]] * 5)
    fleet = replace(one(), policies=Policies(routing="prefix-affinity", prefix_cache=True))
    pools = [ElasticPool(1.0, most=1)]
    run = simulate_elastic(fleet, trace, pools, Script(5.0, [[1], [0], [1]]))
    assert run.simulation.cached_tokens is not None
    hits = run.simulation.cached_tokens.tolist()
    assert hits[0] == hits[3] == 0
    assert hits[1] == hits[2] == hits[4] > 0


def test_a_worker_that_drains_ends_what_it_has() -> None:
    """A (1 in, 10 out) and B (1 in, 3 out) run on workers 0 and 1, from 0 on. At 2 one worker is given up:
    the latest ready, with the highest number, is B's, which ends at 3. C, at 2.5, goes to worker 0."""
    trace = make_trace([0.0, 0.0, 2.5], [1, 1, 1], [10, 3, 1])
    run = simulate_elastic(one(2), trace, [ElasticPool(1.0, most=2)], Script(2.0, [[2], [1]]))
    assert run.simulation.prefill_worker.tolist() == [0, 1, 0]
    assert run.simulation.e2e_s.tolist() == [10.0, 3.0, 1.5]
    lives = [(s.worker, s.given_up_s, s.gone_s, s.was_stopped) for s in run.spans]
    assert lives == [(0, 10.0, 10.0, False), (1, 2.0, 3.0, False)]


def test_a_limit_on_draining_stops_it() -> None:
    """B has made 3 of its 9 tokens when its worker is stopped at 3, 1 s after it was given up. Worker 0 has
    begun its step from 3 on, and computes it again in the next: its fourth token at 5, its last at 10."""
    trace = make_trace([0.0, 0.0], [1, 1], [10, 9])
    pools = [ElasticPool(1.0, most=2, drain_limit_s=1.0)]
    run = simulate_elastic(one(2), trace, pools, Script(2.0, [[2], [1]]))
    assert run.simulation.e2e_s.tolist() == [10.0, 10.0]
    assert run.simulation.preemptions.tolist() == [0, 1]
    assert [(s.gone_s, s.was_stopped) for s in run.spans] == [(10.0, False), (3.0, True)]
    assert run.simulation.worker_tokens.tolist() == [1 + 9 + (4 + 5), 3]


def test_scale_to_zero_and_back() -> None:
    """No worker at 0; A and B, at 1 and 4, wait in limbo. Asked for at 5, ready at 5 + 2: both in the step
    from 7 to 8."""

    class Wakes:
        every_s, lag_s = 5.0, 0.0

        def start(self, sizes: Sequence[int]) -> None:
            self.limbo: list[int] = []

        def sizes(self, reading: MetricsReading) -> Sequence[int]:
            self.limbo.append(reading.limbo)
            return [1 if reading.limbo or reading.running[0] + reading.starting[0] else 0]

    controller = Wakes()
    trace = make_trace([1.0, 4.0, 30.0], [1, 1, 1], [1, 1, 1])
    run = simulate_elastic(one(), trace, [ElasticPool(2.0, first=0)], controller)
    assert run.simulation.ttft_s.tolist() == [7.0, 4.0, 3.0]
    assert controller.limbo == [0, 2, 0, 0, 0, 0, 1]
    assert [(s.requested_s, s.ready_s, s.gone_s) for s in run.spans] == [(5.0, 7.0, 10.0), (30.0, 32.0, 33.0)]


def test_who_finds_no_worker_for_ever_is_left_unfinished() -> None:
    """Nobody ever asks for a worker: an hour and a start after the last arrival the run ends."""
    trace = make_trace([1.0, 4.0], [1, 1], [1, 1])
    run = simulate_elastic(one(), trace, [ElasticPool(2.0, first=0)], Always(15.0))
    assert run.simulation.status.tolist() == [STATUS.index("unfinished")] * 2
    assert not run.simulation.complete and run.spans == ()
    assert 4.0 + LIMBO_PATIENCE_S <= run.end_s <= 4.0 + LIMBO_PATIENCE_S + 2.0 + 2 * 15.0


def test_who_starts_is_given_up_first() -> None:
    """1 worker; 3 asked for at 0, 2 at 10, when numbers 1 and 2 start still: 2 is given up at once. At 20
    number 1 is ready, and the latest: it is given up, idle, and gone."""
    trace = make_trace([0.0, 50.0], [1, 1], [1, 1])
    run = simulate_elastic(one(), trace, [ElasticPool(15.0, most=3)], Script(10.0, [[3], [2], [1]]))
    lives = [(s.worker, s.requested_s, s.ready_s, s.given_up_s, s.gone_s) for s in run.spans]
    assert lives == [(0, 0.0, 0.0, 51.0, 51.0), (1, 0.0, 15.0, 20.0, 20.0), (2, 0.0, 10.0, 10.0, 10.0)]
    assert [r.starting.tolist() for r in run.readings[:3]] == [[0], [2], [0]]


def test_warm_starts() -> None:
    """Of three asked for at one time the first takes 2 s, the others 10 s; another, asked for when the warm
    one is ready, is warm again."""
    trace = make_trace([0.0, 30.0], [1, 1], [1, 1])
    pool = ElasticPool(10.0, most=5, warm=1, warm_start_s=2.0)
    run = simulate_elastic(one(), trace, [pool], Script(4.0, [[4], [5]]))
    assert [s.ready_s for s in run.spans] == [0.0, 2.0, 10.0, 10.0, 6.0]


def test_a_draining_worker_keeps_its_place() -> None:
    """Room for one worker. It drains from 2 on until 10; another, wanted from 4 on, is asked for within a
    second after 10."""
    trace = make_trace([0.0, 11.5], [1, 1], [10, 1])
    run = simulate_elastic(one(), trace, [ElasticPool(1.0, most=1)], Script(2.0, [[1], [0], [1]]))
    first, second = run.spans
    assert (first.given_up_s, first.gone_s) == (2.0, 10.0)
    assert 10.0 <= second.requested_s <= 11.0 and second.worker == 0


def two_pools() -> Fleet:
    """One pool that prefills, one that decodes, of the same GPU."""
    roles: tuple[Role, ...] = ("prefill", "decode")
    return Fleet(LLM, tuple(make_pool(make_latency(), role=role, count=1, name=role) for role in roles))


def test_pools_of_one_gpu_share_its_stock() -> None:
    """Three GPUs; three of each pool are wanted from 0 on: the third goes to the first pool. It gives one up
    at 10 and the other has it, ready 4 s later; the third of that one never comes."""
    trace = make_trace([0.0, 40.0], [1, 1], [2, 2])
    pools = [ElasticPool(4.0, most=3)] * 2
    script = Script(10.0, [[3, 3], [1, 3]])
    (run,) = simulate_together([ElasticFleet(two_pools(), trace, pools, script)], FleetLimits({"paper": 3}))
    lives = sorted((s.pool, s.requested_s, s.ready_s) for s in run.spans)
    assert lives == [(0, 0.0, 0.0), (0, 0.0, 4.0), (1, 0.0, 0.0), (1, 10.0, 14.0)]
    free = simulate_elastic(two_pools(), trace, pools, Script(10.0, [[3, 3], [1, 3]]))
    assert len(free.spans) == 6


def test_a_stock_counts_whole_nodes() -> None:
    """Twelve GPUs in nodes of eight are one node: of three workers of four GPUs that are wanted two come."""
    pool = make_pool(make_latency(), count=1, name="m")
    trace, limits = make_trace([0.0, 40.0], [1, 1], [2, 2]), FleetLimits({"paper": 12})
    for is_sold_whole, workers in ((True, 2), (False, 3)):
        gpu = replace(pool.type.gpu, gpus_per_node=8, is_sold_whole=is_sold_whole)
        fleet = replace(one(), pools=(replace(pool, type=replace(pool.type, gpu=gpu, tp=4)),))
        elastic = ElasticFleet(fleet, trace, [ElasticPool(4.0, most=3)], Script(10.0, [[3]]))
        (run,) = simulate_together([elastic], limits)
        assert len(run.spans) == workers


def test_fleets_side_by_side_share_a_stock() -> None:
    """Three GPUs. The first fleet gives one of two up at 5, where it is busy until 7 s: the second fleet,
    which wants two from 2 on, asks for it within two seconds after 7."""
    long, short = make_trace([0.0, 0.0, 30.0], [1, 1, 1], [10, 7, 1]), make_trace([0.0, 30.0], [1, 1], [1, 1])
    pools = [ElasticPool(1.0, most=2)]
    parts = [
        ElasticFleet(one(2), long, pools, Script(5.0, [[2], [1]])),
        ElasticFleet(one(1), short, pools, Script(2.0, [[1], [2]])),
    ]
    first, second = simulate_together(parts, FleetLimits({"paper": 3}))
    assert [s.gone_s for s in first.spans] == [31.0, 7.0]
    assert second.spans[0].requested_s == 0.0 and 7.0 <= second.spans[1].requested_s <= 9.0
    for part, together in zip(parts, simulate_together(parts), strict=True):
        alone = simulate_elastic(part.fleet, part.trace, part.pools, part.controller)
        same_bytes(alone.simulation, together.simulation)
        assert alone.spans == together.spans
    with pytest.raises(InputError, match="stock of paper: the workers at time zero take more GPUs"):
        simulate_together(parts, FleetLimits({"paper": 2}))


def test_a_worker_that_becomes_ready_later_does_not_hide_an_earlier_pause() -> None:
    """Three GPUs. At 5 the first fleet gives up a worker, busy until 7.5 s, and requests one of another
    kind, ready at 8; its next decision is at 10. The second fleet asks at 6 for the GPU that is given up, and
    has it once it is free.
    """
    other = make_pool(make_latency(), count=0, name="o")
    other = replace(other, type=replace(other.type, gpu=replace(other.type.gpu, name="other")))
    fleet = replace(one(2), pools=(*one(2).pools, other))
    long, short = make_trace([0.0, 0.5, 30.0], [1, 1, 1], [20, 7, 1]), make_trace([0.0, 30.0], [1, 1], [1, 1])
    pools = [ElasticPool(1.0, most=2), ElasticPool(3.0)]
    parts = [
        ElasticFleet(fleet, long, pools, Script(5.0, [[2, 0], [1, 1]])),
        ElasticFleet(one(1), short, pools[:1], Script(2.0, [[1], [1], [1], [2]])),
    ]
    first, second = simulate_together(parts, FleetLimits({"paper": 3}))
    assert [s.gone_s for s in first.spans if s.given_up_s == 5.0] == [7.5]
    assert 7.5 <= second.spans[1].requested_s <= 9.5


def test_who_has_waited_longest_gets_the_gpus_first() -> None:
    """Three GPUs. The second fleet wants another from 2 s on, the first from 3 s on; the third gives its own
    back at 5, when it idles.
    """
    trace, pools = make_trace([0.0, 30.0], [1, 1], [1, 1]), [ElasticPool(1.0, most=2)]
    scripts = (Script(3.0, [[1], [2]]), Script(2.0, [[1], [2]]), Script(5.0, [[1], [0]]))
    runs = simulate_together(
        [ElasticFleet(one(1), trace, pools, each) for each in scripts], FleetLimits({"paper": 3})
    )
    assert [len(run.spans) for run in runs] == [1, 2, 1]
    assert runs[1].spans[1].requested_s == 5.0


def test_a_fleet_without_requests_left_gives_gpus_back_when_they_are_free() -> None:
    """Three GPUs. The first fleet gives one of two up at 5, which is busy until 7 s, when the last of all its
    requests ends: the second fleet had it from 5 s on. It gives the other up at 20 only if it goes on.
    """
    short, long = make_trace([0.0, 0.0], [1, 1], [7, 7]), make_trace([0.0, 60.0], [1, 1], [1, 1])
    pools = [ElasticPool(1.0, most=3)]
    for until_s, last_s in ((0.0, math.inf), (50.0, 20.0)):
        parts = [
            ElasticFleet(one(2), short, pools, Script(5.0, [[2], [1], [1], [1], [0]]), until_s=until_s),
            ElasticFleet(one(1), long, pools, Script(2.0, [[1], [3]])),
        ]
        first, second = simulate_together(parts, FleetLimits({"paper": 3}))
        requested_s = sorted(span.requested_s for span in second.spans)
        assert requested_s[0] == 0.0 and 7.0 <= requested_s[1] <= 9.0
        assert first.end_s == max(7.0, until_s)
        assert requested_s[2:] == ([] if last_s == math.inf else [pytest.approx(last_s, abs=2.0)])
        assert min(span.gone_s for span in first.spans) == 7.0


@pytest.mark.parametrize("seed", range(12))
def test_a_stock_is_never_exceeded(seed: int) -> None:
    """Workers that start and drain count; and nothing is lost for want of a worker."""
    fleet, trace, _, _ = random_ranked_case(seed, dyadic=False)
    pools, script = churn(seed, len(fleet.pools))
    gpus = [pool.type.gpus for pool in fleet.pools]
    first = sum(own * (each.first or 0) for own, each in zip(gpus, pools, strict=True))
    stock = max(first, sum(gpus))
    (run,) = simulate_together([ElasticFleet(fleet, trace, pools, script)], FleetLimits({"paper": stock}))
    for at_s in {span.requested_s for span in run.spans}:
        assert sum(gpus[span.pool] for span in run.spans if span.requested_s <= at_s < span.gone_s) <= stock
    check_conserved(run, trace)


def test_spot_workers_are_taken_with_notice() -> None:
    """Once an hour on average: of 300 workers over an hour about 1 - 1/e are told, seeds give the same, and
    an idle one is gone as it is told."""
    trace = make_trace([0.0, 3600.0], [1, 1], [1, 1])
    pool = ElasticPool(1.0, most=300, interruptions_per_h=1.0, notice_s=30.0)
    fleets = [replace(one(300), policies=Policies(seed=seed)) for seed in (1, 1, 2)]
    runs = [simulate_elastic(fleet, trace, [pool], Always(3600.0)) for fleet in fleets]
    assert runs[0].spans == runs[1].spans != runs[2].spans
    told = sum(span.was_taken for span in runs[0].spans)
    assert abs(told - 300 * (1 - math.exp(-1))) < 4 * math.sqrt(300 * 0.37 * 0.63)
    assert all(span.gone_s == span.given_up_s for span in runs[0].spans)
    busy = make_trace([0.0], [1], [9000])
    pool = ElasticPool(1.0, interruptions_per_h=20.0, notice_s=30.0)
    long = simulate_elastic(one(), busy, [pool], Always(10.0))
    taken = [span for span in long.spans if span.was_taken]
    assert taken and all(span.gone_s - span.given_up_s == pytest.approx(30.0) for span in taken)


def test_a_late_controller_sees_what_was() -> None:
    """Asked every 10 s with readings 4 s old: of 0, 6, 16; none is older than the first."""

    class Sees(Always):
        def start(self, sizes: Sequence[int]) -> None:
            super().start(sizes)
            self.seen: list[tuple[float, float]] = []

        def sizes(self, reading: MetricsReading) -> Sequence[int]:
            self.seen.append((reading.time_s, reading.interval_s))
            return self.now

    sees = Sees(10.0, 4.0)
    run = simulate_elastic(one(), make_trace([0.0, 25.0], [1, 1], [1, 1]), [ElasticPool(1.0)], sees)
    assert sees.seen == [(0.0, 10.0), (6.0, 6.0), (16.0, 10.0)]
    assert run.requested_s.tolist() == [0.0, 10.0, 20.0]
    assert run.requested_sizes.tolist() == [[1], [1], [1]]


def test_a_reading_within_a_run_of_steps() -> None:
    """A (16 in, 40 out), one step a second. At 10 it has 16 + 9 tokens in the cache and computes the next:
    2 blocks of 10; at 20 that is 35 + 1: 3. B (16 in) waits from 9.5 on for the only seat."""
    fleet = Fleet(LLM, (make_pool(make_latency(), seats=1, kv_tokens=160),))
    trace = make_trace([0.0, 9.5], [16, 16], [40, 1])
    run = simulate_elastic(fleet, trace, [ElasticPool(1.0)], Always(10.0))
    at = {reading.time_s: reading for reading in run.readings}
    assert [at[t].kv_frac[0] for t in (10.0, 20.0)] == pytest.approx([0.2, 0.3])
    assert [at[t].waiting[0] for t in (0.0, 10.0, 20.0)] == [0, 1, 1]
    assert [at[t].arrived[0] for t in (0.0, 10.0, 20.0)] == [1, 1, 0]
    assert at[10.0].ttft_s[0] == 1.0
    assert math.isnan(at[20.0].ttft_s[0]) and math.isnan(at[20.0].output_tokens[0])
    assert (at[40.0].finished[0], at[40.0].output_tokens[0], at[40.0].tpot_s[0]) == (1, 40.0, 1.0)


def test_p_and_d_scale_apart() -> None:
    """A block takes 4 s to cross. A (8 in, 3 out) leaves its prefill worker at 1, which is given up at 2 and
    gone at 5, when its KV has left it."""
    fleet = Fleet(
        LLM,
        (make_pool(make_latency(), role="prefill", count=2), make_pool(make_latency(), role="decode")),
        network=Network(64.0, transfer="serialised"),
    )
    pools = [ElasticPool(1.0, most=2), ElasticPool(1.0)]
    script = Script(2.0, [[2, 1], [0, 1], [1, 1]])
    run = simulate_elastic(fleet, make_trace([0.0, 9.0], [8, 8], [3, 1]), pools, script)
    assert run.simulation.e2e_s.tolist() == [7.0, 1.0]
    lives = sorted((s.worker, s.given_up_s, s.gone_s) for s in run.spans)
    assert lives[:2] == [(0, 2.0, 5.0), (1, 2.0, 2.0)]
    reading = run.readings[1]
    assert (reading.finished.tolist(), reading.arrived.tolist()) == ([1, 0], [0, 1])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"policies": Policies(batching="distserve")}, "choose vllm-v1"),
        ({"disturbances": (Disturbance(1.0, "down"),)}, "no fixed numbers"),
        ({"policies": Policies(pools="flip")}, "must be 'static'"),
        ({"pinned": (PinnedPrefix((1,), 16, (0,)),)}, "pinned: .* empty caches"),
    ],
)
def test_what_is_refused(change: dict[str, object], match: str) -> None:
    fleet = replace(one(), **change)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=match):
        simulate_elastic(fleet, make_trace([0.0], [1], [1]), [ElasticPool(1.0)], Always(1.0))


def test_bad_pools_and_controllers_are_refused() -> None:
    trace = make_trace([0.0, 1.0], [1, 1], [1, 1])
    with pytest.raises(InputError, match="0 <= least <= most"):
        ElasticPool(1.0, least=3, most=2)
    with pytest.raises(InputError, match="start_s is -1"):
        ElasticPool(-1.0)
    with pytest.raises(InputError, match="start_s is inf"):
        ElasticPool(math.inf)
    with pytest.raises(InputError, match="3 workers at time zero, must be 0 to 2"):
        simulate_elastic(one(3), trace, [ElasticPool(1.0, most=2)], Always(1.0))
    with pytest.raises(InputError, match="must be those of the fleet: 1"):
        simulate_elastic(one(), trace, [], Always(1.0))
    with pytest.raises(InputError, match="every_s is 0"):
        simulate_elastic(one(), trace, [ElasticPool(1.0)], Always(0.0))
    with pytest.raises(InputError, match="lag_s is -1"):
        simulate_elastic(one(), trace, [ElasticPool(1.0)], Always(1.0, -1.0))
    with pytest.raises(InputError, match="2 sizes, must be one"):
        simulate_elastic(one(), trace, [ElasticPool(1.0)], Script(1.0, [[1, 1]]))
    with pytest.raises(InputError, match="its decision at 0 s is \\[nan\\] workers"):
        simulate_elastic(one(), trace, [ElasticPool(1.0)], Script(1.0, [[math.nan]]))  # type: ignore[list-item]
    waits = replace(trace, after=np.array([[1, 0]]), think_s=np.zeros(2))
    with pytest.raises(InputError, match="column after"):
        simulate_elastic(one(), waits, [ElasticPool(1.0)], Always(1.0))
