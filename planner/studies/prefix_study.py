"""Finds what the prompts of a trace share and, for a given fleet, which worker should keep which prefix."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.files.checked_files import csv_text
from planner.fleet import Fleet
from planner.reports import prefix_values
from planner.search.prefixes import prefix_placing
from planner.search.prefixes.prefix_placing import PoolPrefixes, PrefixPlan, WarmUp
from planner.simulator.replay import simulate
from planner.traffic.prefixes import PrefixSummary, summarise_prefixes
from planner.traffic.trace import Trace

LEAST_TIME_LEFT_S = 0.1  # A stage that begins after the time limit is given a part of this; chosen by hand.
# The files of `plan prefixes -o DIR`.
NAMES = ("prefixes.json", "hit-curve.csv", "warm-up.json")
# What the hits and loads under `plan` in prefixes.json rest on.
ESTIMATE = "estimated before any simulation"


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPrefixes:
    """Prefixes on the workers of one pool, the prompts that load them, and how few workers with these
    prefixes would carry the load that the pool carries without caches. `simulated` has what each pool's
    caches did in a simulation of the fleet; it is empty if the fleet has no prefix caches.
    """

    plan: PrefixPlan
    prompts: list[WarmUp]
    workers_needed: int
    simulated: tuple[PoolPrefixes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixStudy:
    """What the prompts of `trace` share. `placed` says where a fleet should keep these prefixes; None without
    a fleet.
    """

    trace: Trace
    summary: PrefixSummary
    placed: PlacedPrefixes | None


def study_prefixes(
    requests: Trace,
    fleet: Fleet | None = None,
    *,
    pool: str | None = None,
    seed: int = 0,
    time_limit_s: float = 120.0,
    progress: Callable[[str], None] = lambda _: None,
) -> PrefixStudy:
    """Find what the prompts share, and where `fleet` should keep these prefixes.

    `pool` names the pool that keeps them; it is needed only if several pools prefill. Raises InputError where
    the trace has no block ids, or the fleet no such pool.
    """
    prefill_pool = prefix_placing.prefill_pool(fleet, pool) if fleet is not None else None
    progress(f"reading the prefixes of {len(requests)} requests")
    summary = summarise_prefixes(requests)
    if fleet is None or prefill_pool is None:
        return PrefixStudy(requests, summary, placed=None)
    progress(f"placing prefixes on {prefill_pool.count} workers")
    rng = np.random.default_rng(seed)
    until_s = time.monotonic() + time_limit_s

    def part_of_time_left_s(parts: int) -> float:
        """The remaining time divided by `parts`, but never 0."""
        return max(until_s - time.monotonic(), LEAST_TIME_LEFT_S) / parts

    # The first stage may take half of the time, the second half of what then remains, the last all that is
    # left.
    placement = prefix_placing.plan_prefixes(
        requests, prefill_pool, time_limit_s=part_of_time_left_s(2), rng=rng
    )
    prompts = prefix_placing.warm_up(requests, placement)
    needed = prefix_placing.workers_for_same_load(
        requests, placement, time_limit_s=part_of_time_left_s(2), rng=rng
    )
    simulated: tuple[PoolPrefixes, ...] = ()
    if fleet.policies.prefix_cache:
        progress("simulating the fleet")
        run = simulate(fleet, requests)
        simulated = prefix_placing.pool_prefixes(
            fleet, run, requests, time_limit_s=part_of_time_left_s(1), rng=rng
        )
    return PrefixStudy(requests, summary, PlacedPrefixes(placement, prompts, needed, simulated))


def prefix_document(study: PrefixStudy) -> dict[str, Any]:
    """What `plan prefixes --json` prints."""
    answer: dict[str, Any] = {"trace": study.summary.as_dict(), "notes": list(study.trace.notes)}
    if (placed := study.placed) is not None:
        pool = placed.plan.pool
        answer["plan"] = {
            "basis": ESTIMATE,
            **prefix_values.plan_document(placed.plan, placed.prompts),
            "workers_needed": placed.workers_needed,
            "gpus_saved": (pool.count - placed.workers_needed) * pool.type.gpus,
        }
        answer["simulated"] = {
            prefixes.plan.pool.name: prefix_values.simulated_hits(prefixes) for prefixes in placed.simulated
        }
    return answer


def render_prefixes(study: PrefixStudy) -> dict[str, str | bytes]:
    """The files of `plan prefixes -o DIR`, by their names."""
    files: dict[str, str | bytes] = {
        "prefixes.json": json.dumps(prefix_document(study), indent=2) + "\n",
        "hit-curve.csv": _curve_csv(study.summary),
    }
    if study.placed is not None:
        files["warm-up.json"] = prefix_values.warm_up_json(study.placed.prompts)
    return files


def _curve_csv(summary: PrefixSummary) -> str:
    """The share of tokens found cached by size of the cache, as CSV; inf is an endless cache."""
    rows = [*summary.hit_frac.items(), ("inf", summary.infinite_hit_frac)]
    return csv_text(("cache_tokens", "token_hit_frac"), ((tokens, f"{frac:.6g}") for tokens, frac in rows))
