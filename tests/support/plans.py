"""Small plans by hand for the tests of what is written: no solver and, unless asked for, no simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.documents.catalog import read_catalog
from planner.documents.certificate import Alternative, Certificate
from planner.documents.facts import (
    Assumption,
    At,
    LimitBinds,
    Neighbour,
    NoneUpTo,
    NoRoomForKv,
    Outcome,
    Price,
    Refuted,
    Remarked,
)
from planner.documents.robustness_facts import (
    AtWorkers,
    FleetRobustness,
    HeadroomFact,
    MoreTraffic,
    PriceTurn,
    Share,
    WorkerLoss,
)
from planner.domain import Limit, Slo
from planner.fleet import Fleet, Pool, Role, WorkerType
from planner.search.evidence.plan import Plan
from planner.simulator import layout
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import judge_slo
from planner.traffic.trace import Trace

CATALOG = read_catalog()
LLM = CATALOG.llm("meta-llama/Llama-3.1-70B")
LIMITS = (Limit("ttft", 0.9, 2.0), Limit("tbt", 0.99, 0.2))


def a_pool(name: str, role: Role, gpu: str, tp: int, count: int, *, tokens: int = 2048) -> Pool:
    on = CATALOG.gpu(gpu)
    return Pool(
        name, role, WorkerType(on, tp, CATALOG.step_latency(LLM, on, tp), 160_000, tokens, 256), count
    )


def pairs() -> Fleet:
    """4 x 2 H100 prefill, 3 x 4 capped H100 decode: 20 GPUs on one and two nodes of 8."""
    pools = (
        a_pool("pre", "prefill", "h100-80g", 2, 4),
        a_pool("dec", "decode", "h100-80g@350W", 4, 3, tokens=512),
    )
    return Fleet(LLM, pools)


def mixed(gpu: str = "h100-80g", tp: int = 4, count: int = 2) -> Fleet:
    return Fleet(LLM, (a_pool("mixed", "mixed", gpu, tp, count),))


def a_trace(requests: int, name: str = "trace.csv") -> Trace:
    i = np.arange(requests)
    return Trace(name, i / 3.0, 100 + 7 * (i % 50), 1 + i % 40)


def a_simulation(fleet: Fleet, trace: Trace) -> Simulation:
    """Every fifth request waits 1 s, the others do not; every gap lasts 50 ms; the last one is rejected."""
    n = len(trace)
    i = np.arange(n)
    last = i == n - 1
    names = tuple(f"{pool.name}-{k}" for pool in fleet.pools for k in range(pool.count))
    front = sum(pool.count for pool in fleet.pools if pool.role != "decode")
    back = range(front, len(names)) if front < len(names) else range(front)
    queue_s = np.where(last, np.nan, np.where(i % 5 == 4, 1.0, 0.0))
    ttft_s = queue_s + 0.25
    gaps = trace.output_tokens - 1
    runs = np.zeros(n - 1, dtype=layout.RUN)
    runs["worker"], runs["start_s"], runs["first_s"] = i[:-1] % len(names), trace.arrival_s[:-1], 0.05
    runs["steps"], runs["sequences"] = gaps[:-1], 1
    return Simulation(
        arrival_s=trace.arrival_s,
        input_tokens=trace.input_tokens,
        output_tokens=trace.output_tokens,
        queue_s=queue_s,
        ttft_s=ttft_s,
        tpot_s=np.where(gaps > 0, 0.05, np.nan) + 0 * queue_s,
        tbt_max_s=np.where(gaps > 0, 0.05, np.nan) + 0 * queue_s,
        e2e_s=ttft_s + 0.05 * gaps,
        prefill_worker=np.where(last, -1, i % front),
        decode_worker=np.where(last, -1, np.array(back)[i % len(back)]),
        preemptions=np.zeros(n, dtype=np.int64),
        status=np.where(last, 1, 0),
        worker_names=names,
        worker_busy_s=np.full(len(names), 10.0),
        worker_steps=np.full(len(names), 200),
        worker_tokens=np.full(len(names), 5000.0),
        window_s=(0.0, float(trace.arrival_s[-1])),
        end_s=float(trace.arrival_s[-1]) + 3.0,
        limits=LIMITS,
        violations=np.array([1, 0]),
        counted=np.array([n, int(gaps[:-1].sum())]),
        complete=True,
        runs=runs,
    )


def a_robustness() -> FleetRobustness:
    """Of `pairs`: 6 workers are too few; a fifth more traffic is kept in 12 of 18 scenarios; the loss of
    a decode worker breaks it.
    """

    def at(counts: tuple[int, ...], kept: int, needed_frac: float) -> AtWorkers:
        return AtWorkers(
            counts,
            kept,
            (Share(LIMITS[0], 0.2, needed_frac, 0.95, 1.0), Share(LIMITS[1], 0.99, 0.99, 1.0, 1.0)),
        )

    return FleetRobustness(
        scenario_count=10,
        may_miss=1,
        pools=("pre", "dec"),
        at_workers=(at((4, 2), 6, 0.4), at((4, 3), 9, 0.92), at((5, 3), 10, 1.0)),
        more_traffic=MoreTraffic(False, 12, 18),
        holds=(
            HeadroomFact("traffic", 0.12, (LIMITS[0],)),
            HeadroomFact("steps", 0.09, (LIMITS[0],)),
            HeadroomFact("prompts", 1.0, ()),
        ),
        losses=(WorkerLoss("pre", 4, True, ()), WorkerLoss("dec", 3, False, (LIMITS[1],))),
        prices=(PriceTurn("h100-80g", 0.26, "runner-up"),),
        simulations=80,
    )


def a_plan(fleet: Fleet | None = None, *, requests: int = 200, note: str = "trace.csv, whole trace") -> Plan:
    fleet = fleet or pairs()
    trace = a_trace(requests)
    simulation = a_simulation(fleet, trace)
    slo = Slo(LIMITS, attainment_frac=0.8)
    price = fleet.price_usd_per_h
    return Plan(
        status="certified",
        fleet=fleet,
        slo=slo,
        trace=replace(trace, notes=("a note on the trace",), dropped={"blank line": 3}),
        traffic_note=note,
        simulation=simulation,
        # one request of the made-up run is rejected, and the plan is to hold all the same
        verdict=replace(judge_slo(simulation, slo), rejected=0),
        certificate=Certificate(
            objective="cost",
            unit="USD/h",
            value=price,
            bound=price * 0.8,
            level0=price,
            level0_exact=True,
            beyond_exact=False,
            universe=("GPUs h100-80g, h100-80g@350W",),
            refuted=(Refuted("a100-80g tp2", NoRoomForKv()),),
            neighbours=(Neighbour("pre", "h100-80g tp2 2048", False, Outcome((At(LIMITS[0], 2.4, 0.84),))),),
            binding=(LimitBinds(LIMITS[0], "pre", "h100-80g tp2 2048", 2.4, 5.98, "USD/h"),),
            assumptions=(Assumption("monotonicity"),),
            simulations=40,
            cuts=6,
            seed=7,
        ),
        alternatives=(
            Alternative("runner-up", mixed(count=6), price * 1.1),
            Alternative("no caps", None, price * 1.05, (NoneUpTo(1.05),), at_least=True),
            Alternative("no fleet", None, float("inf"), (Remarked("not-searched"),)),
        ),
        max_model_len=1300,
        prices=(Price("h100-80g", 2.99, "catalogs/gpus.yaml", "2025-07"),),
    )
