"""Random planning problems so small that every fleet can be simulated."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.generated_traffic import lognormal, synthesise
from planner.documents.catalog import read_catalog
from planner.documents.task import parse_task
from planner.domain import Gpu, Limit, Metric, Slo
from planner.fleet import Policies, WorkerType
from planner.models.latency import StepLatency
from planner.search.oracle.fleet_counts import Counts
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.verdict_cache import VerdictCache
from planner.search.problem.build_problem import build_problem
from planner.search.problem.options import decode_options, mixed_options, prefill_options
from planner.search.problem.plan_problem import Problem
from planner.solvers.master import FleetLimits
from planner.solvers.required_work import compute_slo_work
from planner.traffic.workload import distinct_lengths

MOST = 4  # workers of a GPU


@cache
def _posed() -> Problem:
    """Whatever a problem has beside what is drawn."""
    catalog = read_catalog()
    task = parse_task(
        {"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "1 s"}}, "fleet": {"gpus": ["l4-24g"]}}, catalog
    )
    trace = synthesise(
        20,
        1.0,
        input_tokens=lognormal(100, 1.0),
        output_tokens=lognormal(10, 1.0),
        rng=np.random.default_rng(0),
    )
    return build_problem(task, trace, catalog)


def instance(seed: int) -> Problem:
    """20 to 60 requests, 2 or 3 worker types, up to MOST workers of each, any SLO, sometimes little money."""
    rng = np.random.default_rng(seed)
    types = tuple(_worker(rng, f"g{i}") for i in range(int(rng.integers(2, 4))))
    requests = int(rng.integers(20, 61))
    longest = min(worker.kv_tokens for worker in types)
    trace = synthesise(
        requests,
        float(rng.uniform(5.0, 80.0)),
        input_tokens=lognormal(float(rng.uniform(50, 600)), 1.0),
        output_tokens=lognormal(float(rng.uniform(2, 60)), 1.0),
        gap_cv=float(rng.uniform(0.5, 2.5)),
        rng=rng,
    )
    half = longest // 2
    trace = replace(
        trace,
        input_tokens=np.minimum(trace.input_tokens, half),
        output_tokens=np.minimum(trace.output_tokens, half),
    )
    slo = _slo(rng)
    posed = _posed()
    limits = FleetLimits(
        {worker.gpu.name: MOST * worker.gpus for worker in types},
        cost_usd_per_h=float(rng.uniform(3, 20)) if rng.random() < 0.2 else None,
    )
    oracle = Oracle(posed.llm, trace, slo, posed.task.network, Policies(), cache=VerdictCache())
    return replace(
        posed,
        slo=slo,
        trace=trace,
        lengths=distinct_lengths(trace),
        types=types,
        limits=limits,
        oracle=oracle,
        gpus=tuple(worker.gpu for worker in types),
        slo_work=compute_slo_work(slo, trace),
    )


def _worker(rng: np.random.Generator, name: str) -> WorkerType:
    floor_s, token_s = float(rng.uniform(0.004, 0.03)), float(rng.uniform(2e-5, 3e-4))
    knee = float(rng.integers(16, 200))
    latency = StepLatency(
        (1.0, knee, knee + 1000),
        (floor_s, floor_s, floor_s + 1000 * token_s),
        a_s=float(rng.uniform(0, 1e-7)),
        b_s=float(rng.uniform(0, 3e-5)),
        d_s=float(rng.uniform(0, 2e-7)),
        e_s=float(rng.uniform(0, 1e-3)),
        h_s=float(rng.uniform(0, 2e-3)),
        basis="drawn",
    )
    tp, pp = int(rng.choice([1, 1, 2])), int(rng.choice([1, 1, 1, 2]))
    price = float(rng.uniform(1, 4)) / (tp * pp)
    gpu = Gpu(name, 80e9, 2e12, 3e14, "nvlink", 3e11, 400.0, 8, price, "drawn", name)
    kv_tokens = int(rng.integers(60, 400)) * 16
    return WorkerType(
        gpu, tp, latency, kv_tokens, int(rng.choice([128, 512, 2048])), int(rng.choice([4, 16, 64])), pp
    )


def _slo(rng: np.random.Generator) -> Slo:
    def limit(metric: Metric, low_s: float, high_s: float) -> Limit:
        share = float(rng.choice([0.5, 0.8, 0.9, 0.95]))
        return Limit(metric, share, float(np.exp(rng.uniform(np.log(low_s), np.log(high_s)))))

    kinds = (
        (limit("ttft", 0.05, 2.0), limit("tbt", 0.02, 0.5)),
        (limit("ttft", 0.05, 2.0), limit("tpot", 0.01, 0.2)),
        (limit("e2e", 0.3, 10.0),),
        (limit("ttft", 0.05, 2.0),),
    )
    limits = kinds[int(rng.integers(len(kinds)))]
    return Slo(limits, attainment_frac=float(rng.choice([0.6, 0.9])) if rng.random() < 0.3 else None)


def fleets_of_level0(problem: Problem) -> list[Counts]:
    """Every fleet with one worker type per pool and up to MOST workers in each, within the limits or not."""
    mixed = [(option,) for option in mixed_options(problem.types, "cost")]
    pairs = itertools.product(prefill_options(problem.types, "cost"), decode_options(problem.types, "cost"))
    return [
        tuple(zip(pools, counts, strict=True))
        for pools in (*mixed, *pairs)
        for counts in itertools.product(range(1, MOST + 1), repeat=len(pools))
    ]


def fleets_of_any_mix(problem: Problem) -> Iterator[Counts]:
    """Every fleet of up to three workers of a type in a role and five in all, within the limits or not."""
    makes = (mixed_options, prefill_options, decode_options)
    options = [option for make in makes for option in make(problem.types, "cost")]
    for vector in itertools.product(range(4), repeat=len(options)):
        counts = tuple((option, n) for option, n in zip(options, vector, strict=True) if n)
        roles = {option.role for option, _ in counts}
        if counts and ("prefill" in roles) == ("decode" in roles) and sum(vector) <= 5:
            yield counts


def is_within(problem: Problem, counts: Counts) -> bool:
    return problem.limits.first_exceeded([(option.type, count) for option, count in counts]) is None


def is_monotone(problem: Problem) -> bool:
    """Whether no fleet of level 0 fails that has all the workers of one that holds, here or on TTFT alone."""
    verdicts: dict[tuple[str, ...], dict[tuple[int, ...], bool]] = {}
    for counts in fleets_of_level0(problem):
        names, numbers = tuple(o.name for o, _ in counts), tuple(n for _, n in counts)
        verdicts.setdefault(names, {})[numbers] = problem.oracle.holds(counts)
        prefill, count = counts[0]
        if prefill.role == "prefill":
            leads = problem.oracle.prefill_meets_ttft_alone(((prefill, count),))
            verdicts.setdefault((prefill.name,), {})[count,] = leads
    return not any(
        holds and not larger_holds and all(a <= b for a, b in zip(numbers, larger, strict=True))
        for of_pools in verdicts.values()
        for (numbers, holds), (larger, larger_holds) in itertools.product(of_pools.items(), repeat=2)
    )
