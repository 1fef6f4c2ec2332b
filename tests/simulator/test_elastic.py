"""Pools that change during a run: against a plain simulator, by hand, and what must not change anything."""

from __future__ import annotations

import math

import numpy as np
import pytest
from elastic_reference import ElasticReference, Script
from simulations import random_case

from planner.fleet import Fleet
from planner.simulator.elastic import ElasticPool, simulate_elastic
from planner.simulator.replay import STATUS
from planner.traffic.trace import Trace


def random_change(seed: int, *, dyadic: bool) -> tuple[Fleet, Trace, list[ElasticPool], Script]:
    """A random fleet and trace of `random_case`, with pools that change at random, often too fast.

    With `dyadic` events coincide, and workers of a pool are alike; else there is one of each, and spot markets
    take some away.
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
                interruptions_per_h=0.0 if dyadic else float(rng.choice([0.0, 3600 * 0.4 / span_s])),
                notice_s=number(span_s / 8),
                first=int(rng.integers(least, most + 1)),
            )
        )
    table = [[int(rng.integers(0, pool.most + 2)) for pool in pools] for _ in range(20)]
    table.append([pool.most for pool in pools])
    return fleet, trace, pools, Script(span_s / 40 + number(span_s / 5), table)


@pytest.mark.parametrize("dyadic", [False, True])
@pytest.mark.parametrize("block", range(5))
def test_equals_the_plain_simulator(block: int, dyadic: bool) -> None:
    """30 random cases each: drains, deaths, starts, warm ones, interruptions; P and D apart, or mixed."""
    for seed in range(30 * block, 30 * block + 30):
        fleet, trace, pools, script = random_change(seed, dyadic=dyadic)
        run = simulate_elastic(fleet, trace, pools, script, seed=seed)
        script.start([])
        slow = ElasticReference(fleet, trace, pools, script, seed=seed).run()
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
            (s.worker, s.asked_s, s.ready_s, s.given_up_s, s.gone_s, s.was_taken, s.was_stopped)
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
