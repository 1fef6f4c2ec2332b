"""The comparison on the engines' own clocks, which stand still while the machine is busy with others.

On a CPU, engines, router, client and whatever else runs share the cores, and a step lasts longer by what
the others take. The engine's thread notes for how long it had a core, and `EngineLog.on_its_own_clock`
reads all its times on that clock. Each engine is then simulated by itself with the requests it had, when it
had them: batching, queueing and step times are checked, routing is not. What waits for others comes when it
came: another engine may have answered those.

Of a pair, the prefill engine is one that answers with a single token: it gives the TTFT. The decode engine
stands behind a prefill and a link that take no time, and gives the gaps, TPOT, and as E2E the time from the
step that first had the request, whose KV was there then, to the last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from planner.domain import Metric, Slo
from planner.fleet import Fleet, Policies, Pool, Role, WorkerType
from planner.runtime.engine_log import EngineLog, EngineRequest
from planner.runtime.live_replay import Journal, ReplayPart, Sent
from planner.runtime.measured_against_simulated import (
    MeasuredComparison,
    Measurement,
    Run,
    Tolerances,
    compare_part,
    compare_parts,
    outcomes_of_part,
)
from planner.runtime.step_fits import counts_others
from planner.search.oracle.fleet_oracle import INSTANT, NO_LINK
from planner.slo_metrics import METRICS

GIVES: dict[Role, tuple[Metric, ...]] = {
    "mixed": tuple(METRICS),
    "prefill": tuple(key for key, row in METRICS.items() if row.obliges == "prefill"),
    "decode": tuple(key for key, row in METRICS.items() if row.obliges != "prefill"),
}
_FRONT = "(instant)"  # The pool of a prefill that takes no time; no pool on engines may be called so.


def undisturbed(
    run: Measurement, fleet: Fleet, slo: Slo, tolerances: Tolerances
) -> MeasuredComparison | None:
    """Compare each engine with a simulation of itself. None if engines have no clock of their own, or if the
    fits already include the time that other processes took.

    Limits of the SLO are judged where every engine gives all metrics, that is without pairs.
    """
    if counts_others(fleet):
        return None
    pools = fleet.running_pools
    watched = slo if all(pool.role == "mixed" for pool in pools) else Slo(())
    parts = []
    for pool in pools:
        for name in pool.worker_names:
            if name not in run.logs or not run.logs[name].has_own_clock:
                return None
            for part in run.journal.parts:
                if alone := _alone(run, fleet, pool, name, part):
                    sides = compare_part(*alone, watched)
                    parts.append(tuple(_only(side, GIVES[pool.role]) for side in sides))
    return compare_parts(parts, watched, tolerances) if parts else None


def stolen_frac(log: EngineLog, start_s: float) -> float:
    """Share of its steps' seconds after `start_s` in which the engine's thread did not run."""
    steps = log.steps[log.steps.start_s >= start_s]
    return float(1 - (steps.own_end_s - steps.own_start_s).sum() / steps.t_s.sum()) if len(steps) else 0.0


def _alone(
    run: Measurement, fleet: Fleet, pool: Pool, name: str, part: ReplayPart
) -> tuple[Measurement, ReplayPart, Fleet] | None:
    """One engine with its requests of `part`, as a run of its own; None if it had none."""
    sent = {
        sent.request: sent
        for sent in outcomes_of_part(run, part)
        if name in sent.workers and sent.status == "finished"
    }
    if not sent:
        return None
    log, start_s = run.logs[name].on_its_own_clock(part.start_s)
    here, logs = f"{pool.name}-0", {f"{pool.name}-0": log}
    trace = replace(run.trace, after=run.trace.after[:0])
    workers: tuple[str, ...] = (here,)
    one = replace(pool, count=1)
    if pool.role == "prefill":
        one = replace(one, role="mixed")
        trace = replace(trace, output_tokens=np.ones_like(trace.output_tokens))
    pools: tuple[Pool, ...] = (one,)
    network, policies = fleet.network, fleet.policies
    if pool.role == "decode":
        instant = WorkerType(pool.type.gpu, 1, INSTANT, 10**12, 8192, 256)
        pools, workers = (Pool(_FRONT, "prefill", instant, 1), one), (f"{_FRONT}-0", here)
        network, policies = (
            NO_LINK,
            replace(policies, prefix_cache=False, kv_offload=None, routing=Policies().routing),
        )
        logs[f"{_FRONT}-0"] = EngineLog(log.steps[:0], _at_once(log.requests))
    only = ReplayPart(part.part, start_s, tuple(sent))
    moved: dict[int, Sent] = {request: replace(was, workers=workers) for request, was in sent.items()}
    own_fleet = replace(fleet, pools=pools, policies=policies, network=network)
    return Measurement(own_fleet, trace, Journal((only,), moved), logs), only, own_fleet


def _at_once(requests: Mapping[str, EngineRequest]) -> dict[str, EngineRequest]:
    """Prefills that took no time: each first token comes when the decode engine takes the request up."""
    return {
        name: EngineRequest(one.scheduled_s, one.scheduled_s, np.array([one.scheduled_s]), 0, 0)
        for name, one in requests.items()
    }


def _only(run: Run, metrics: tuple[Metric, ...]) -> Run:
    """The run with nothing said about the other metrics."""
    if len(metrics) == len(METRICS):
        return run
    nothing = np.full(len(run.requests.ttft_s), np.nan)
    columns: dict[str, Any] = {
        f"{name}_s": nothing for name in ("ttft", "tpot", "e2e") if name not in metrics
    }
    has_gaps = "tbt" in metrics
    return Run(
        replace(run.requests, cached_tokens=None, **columns),
        run.gap_s if has_gaps else run.gap_s[:0],
        run.gap_weight if has_gaps else run.gap_weight[:0],
        run.session,
    )
