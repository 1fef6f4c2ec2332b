"""Vidur-Search (Agrawal et al. 2024, arXiv:2405.05465, section 6): the most requests per dollar.

Sets   c   configuration: GPU, tensor x pipeline parallelism, batching, tokens per step, sequences at once
Data   G   GPUs of the deployment;  n_c = floor(G / GPUs of one replica) replicas
       g_c   capacity: the highest rate that n_c replicas serve, by a rule of goodput.py     [requests/s]
       c_c   USD/h of n_c replicas

  max   3600 g_c / c_c       requests per dollar                                             (best)
  and   the configurations that no other beats both in requests per dollar and in a latency  (frontier)

Offline (section 6, last paragraph) all requests arrive at once, no SLO applies, and T_c is the time until n_c
replicas have returned the last token:

  min  T_c                   makespan                                                        (best)
  and  the configurations that no other beats both in T_c and in its bill T_c c_c / 3600     (frontier)

By the rule `goodput.Steady` a rate counts as served only if the SLO is kept. Vidur's own rule
(benchmarks/vidur_search.py) bounds the time until a request is first scheduled, and compares the SLO only
with one run at the capacity.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.catalog import Catalog
from planner.domain import Gpu, Metric
from planner.errors import InputError
from planner.fleet import Fleet, Policies, Pool, WorkerType
from planner.models.llm import Llm
from planner.models.memory import worker_memory
from planner.models.parallelism import MAX_PP, add_pipeline
from planner.papers.goodput import GoodputRule, find_goodput
from planner.search.problem.bill import bill_fleet
from planner.simulator.layout import FINISHED
from planner.simulator.measured_values import metric_percentile_s
from planner.simulator.replay import simulate
from planner.traffic.trace import Trace
from planner.units import HOUR_S

BATCHINGS = ("vllm-v1", "sarathi", "vllm-v0")
# The bisection begins at this share of `most_rps`, the rate that work alone allows; queues and the SLO allow
# less. Set by hand: with a wrong guess the bisection tries a few more rates.
FIRST_RATE_FRAC = 0.1


@dataclass(frozen=True, slots=True)
class SearchedConfiguration:
    """A configuration, its capacity `rate_rps`, and latencies of one run at that rate.

    `values_s` are the percentiles of `search_configurations`' `latencies`, in that order. A configuration
    that serves no rate has a capacity of 0 and latencies of NaN.
    """

    fleet: Fleet
    rate_rps: float
    values_s: tuple[float, ...]

    @property
    def requests_per_usd(self) -> float:
        """Requests that one USD pays for, by which Vidur-Search ranks configurations."""
        return HOUR_S * self.rate_rps / bill_fleet(self.fleet).usd_per_h

    @property
    def name(self) -> str:
        return configuration_name(self.fleet)


@dataclass(frozen=True, slots=True)
class OfflineConfiguration:
    """A configuration and the seconds in which it serves a whole trace whose requests arrive at once;
    infinite if it rejects requests or leaves some unfinished.
    """

    fleet: Fleet
    makespan_s: float

    @property
    def usd(self) -> float:
        """What the fleet costs until the last request of the trace has ended."""
        return bill_fleet(self.fleet).usd_per_h * self.makespan_s / HOUR_S

    @property
    def name(self) -> str:
        return configuration_name(self.fleet)


@dataclass(frozen=True, slots=True)
class EngineSettingChoices:
    """The engine settings among which the search chooses: batching policies, tokens per step (`budgets`),
    sequences that run at once (`seats`), and pipeline stages (`pipelines`).
    """

    batchings: tuple[str, ...] = BATCHINGS
    budgets: tuple[int, ...] = (512, 1024, 2048, 4096)
    seats: tuple[int, ...] = (64, 128, 256)
    pipelines: tuple[int, ...] = (1, 2, 4)


DEFAULT_SPACE = EngineSettingChoices()


def configuration_name(fleet: Fleet) -> str:
    """A configuration's replicas, batching and seats, as in "4 x h100 tp2 vllm-v1 128 seqs"."""
    pool, batching = fleet.pools[0], fleet.policies.batching
    return f"{pool.count} x {pool.type.name} {batching} {pool.type.max_num_seqs} seqs"


def configurations(
    llm: Llm,
    gpus: Iterable[Gpu],
    catalog: Catalog,
    space: EngineSettingChoices = DEFAULT_SPACE,
    *,
    total_gpus: int,
    least_kv_tokens: int = 1,
) -> list[Fleet]:
    """Every configuration that fits `total_gpus` GPUs, as a fleet of as many replicas as fit. Each replica's
    memory holds the weights and a KV cache of at least `least_kv_tokens`, those of the longest request.
    """
    fleets = []
    for gpu in gpus:
        largest_power = int(math.log2(gpu.gpus_per_node))
        for tp in (2**power for power in range(largest_power + 1)):  # Within one node.
            for pp in space.pipelines:
                if tp * pp > total_gpus or llm.heads % tp or pp > min(MAX_PP, llm.layers):
                    continue  # There is no room for one replica, or the LLM cannot be split so.
                latency = add_pipeline(catalog.step_latency(llm, gpu, tp), llm, gpu, tp, pp)
                for budget in space.budgets:
                    for seats in space.seats:
                        kv_tokens = worker_memory(
                            llm, gpu, tp, pp, max_num_batched_tokens=budget, max_num_seqs=seats
                        ).kv_tokens
                        # A step must hold a token of every sequence.
                        if kv_tokens < max(least_kv_tokens, 1) or budget < seats:
                            continue
                        worker = WorkerType(gpu, tp, latency, kv_tokens, budget, seats, pp).with_llm(llm)
                        pool = Pool("mixed", "mixed", worker, total_gpus // worker.gpus)
                        fleets += [Fleet(llm, (pool,), Policies(batching=name)) for name in space.batchings]
    if not fleets:
        raise InputError(
            f"{llm.name}: no configuration holds it on {total_gpus} GPUs; allow more, or larger ones"
        )
    return fleets


def most_rps(fleet: Fleet, lengths: Trace) -> float:
    """About the highest rate [requests/s] that the step times allow, if every request has the mean lengths
    and decode batches are full.
    """
    mean_inputs, mean_outputs = float(lengths.input_tokens.mean()), float(lengths.output_tokens.mean())
    kv_tokens = mean_inputs + mean_outputs / 2  # A sequence has this many halfway through its output.
    rate_rps = 0.0
    for pool in fleet.pools:
        worker = pool.type
        batch = max(1.0, min(worker.max_num_seqs, worker.kv_tokens / kv_tokens))
        prefill_s = float(worker.latency.prefill_s(mean_inputs, worker.max_num_batched_tokens))
        step_s = float(worker.latency.step_s(batch, decodes=batch, kv_tokens=batch * kv_tokens))
        # Prefill gives the first token. Each further one takes a step, which serves `batch` requests at once.
        # Each of the pp stages works on a batch of its own.
        rate_rps += pool.count * worker.pp / (prefill_s + (mean_outputs - 1) * step_s / batch)
    return rate_rps


def search_configurations(
    fleets: Iterable[Fleet],
    rule: GoodputRule,
    lengths: Trace,
    latencies: Sequence[tuple[Metric, float]] = (("ttft", 0.9), ("tbt", 0.99)),
    *,
    tolerance_frac: float = 0.02,
) -> tuple[SearchedConfiguration, ...]:
    """The capacity of every configuration by `rule`, most requests per dollar first.

    `lengths` only give the rate at which the bisection begins; it ends within `tolerance_frac` of the
    capacity. `latencies` are the (metric, percentile) pairs that are reported at the capacity.
    """
    rows = []
    for fleet in fleets:
        capacity = find_goodput(
            rule, fleet, guess_rps=FIRST_RATE_FRAC * most_rps(fleet, lengths), tolerance_frac=tolerance_frac
        )
        values_s: tuple[float, ...] = tuple(math.nan for _ in latencies)
        if capacity.rate_rps:
            run = rule.run(fleet, capacity.rate_rps)
            values_s = tuple(metric_percentile_s(run, metric, percentile) for metric, percentile in latencies)
        rows.append(SearchedConfiguration(fleet, capacity.rate_rps, values_s))
    return tuple(sorted(rows, key=lambda row: (-row.requests_per_usd, row.name)))


def pareto_configurations(
    rows: Iterable[SearchedConfiguration], latency_index: int
) -> tuple[SearchedConfiguration, ...]:
    """The rows that no other beats in both requests per dollar and one of their latencies,
    `values_s[latency_index]`; the most requests per dollar first. Rows that serve no rate are left out.
    """

    def latency_s(row: SearchedConfiguration) -> float:
        return row.values_s[latency_index]

    frontier: list[SearchedConfiguration] = []
    # The rows before have at least as many requests per dollar, so a row must have a lower latency than they.
    for row in sorted(rows, key=lambda row: (-row.requests_per_usd, latency_s(row))):
        if row.rate_rps and (not frontier or latency_s(row) < latency_s(frontier[-1])):
            frontier.append(row)
    return tuple(frontier)


def search_makespans(fleets: Iterable[Fleet], requests: Trace) -> tuple[OfflineConfiguration, ...]:
    """The makespan of every configuration, the shortest first; equal ones in the order of their bills."""
    at_once = replace(requests, arrival_s=np.zeros(len(requests)))
    rows = []
    for fleet in fleets:
        simulation = simulate(fleet, at_once)
        is_served = bool((simulation.status == FINISHED).all())
        rows.append(OfflineConfiguration(fleet, simulation.end_s if is_served else math.inf))
    return tuple(sorted(rows, key=lambda row: (row.makespan_s, row.usd, row.name)))


def pareto_makespans(rows: Iterable[OfflineConfiguration]) -> tuple[OfflineConfiguration, ...]:
    """The rows that no other beats in both makespan and bill, the shortest first. Infinite makespans are
    left out.
    """
    frontier: list[OfflineConfiguration] = []
    # The rows before are at least as fast, so a row must have a lower bill than they.
    for row in sorted(rows, key=lambda row: (row.makespan_s, row.usd)):
        if math.isfinite(row.makespan_s) and (not frontier or row.usd < frontier[-1].usd):
            frontier.append(row)
    return tuple(frontier)
