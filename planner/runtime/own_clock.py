"""Compares measured with simulated runs on the engines' own clocks, which stand still while the machine runs
other processes.

On a CPU the engines, the router, the client and other processes share the cores, so a step of an engine lasts
longer by the time that the others take. The engine's thread logs a clock that stands still while the thread
waits for a core. `EngineLog.on_its_own_clock` converts all times of the log to that clock. Each engine is
then simulated by itself, with its own requests at the times when they came. This checks batching, queueing
and step times, but not routing. A request of a session also comes at its measured time, and does not wait for
earlier requests, because another engine may have answered these.

If there is a pair of engines, the prefill engine is simulated as one that answers with a single token; TTFT
is judged on it. The decode engine is simulated behind a prefill and a link that take no time. The gaps and
TPOT are judged on it, and as E2E the time from the first step with the request, whose KV was there by then,
to the last token.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from planner.domain import Metric, Slo
from planner.fleet import Fleet, Policies, Pool, Role
from planner.runtime.engine_log import EngineLog, EngineRequest
from planner.runtime.live_replay import Journal, ReplayPart, RequestOutcome
from planner.runtime.measured_against_simulated import Measurement, compare_part, outcomes_of_part
from planner.runtime.prediction_errors import ComparedRun, MeasuredComparison, Tolerances, compare_parts
from planner.runtime.step_fits import includes_other_processes
from planner.search.oracle.fleet_oracle import NO_LINK, instant_worker
from planner.slo_metrics import METRICS

# The metrics that are judged on an engine, by its role.
METRICS_OF_ROLE: dict[Role, tuple[Metric, ...]] = {
    "mixed": tuple(METRICS),
    "prefill": tuple(key for key, row in METRICS.items() if row.obliges == "prefill"),
    "decode": tuple(key for key, row in METRICS.items() if row.obliges != "prefill"),
}
_INSTANT_POOL = "(instant)"  # The pool of a prefill that takes no time; no other pool may have this name.


def compare_undisturbed(
    measurement: Measurement, fleet: Fleet, slo: Slo, tolerances: Tolerances
) -> MeasuredComparison | None:
    """Compare each engine with a simulation of itself.

    None if some engine has no clock of its own, if the fits already include the time that other processes
    took, or if no engine had requests. The SLO is judged only if the fleet has no pairs, because each engine
    of a pair lacks some metrics.
    """
    if includes_other_processes(fleet):
        return None
    pools = fleet.running_pools
    judged_slo = slo if all(pool.role == "mixed" for pool in pools) else Slo(())
    parts = []
    for pool in pools:
        for name in pool.worker_names:
            if name not in measurement.logs or not measurement.logs[name].has_own_clock:
                return None
            for part in measurement.journal.parts:
                if own_run := _as_run_of_its_own(measurement, fleet, pool, name, part):
                    measured_and_simulated = compare_part(*own_run, judged_slo)
                    parts.append(
                        tuple(
                            _with_metrics(side, METRICS_OF_ROLE[pool.role]) for side in measured_and_simulated
                        )
                    )
    return compare_parts(parts, judged_slo, tolerances) if parts else None


def stolen_frac(log: EngineLog, start_s: float) -> float:
    """The share of the engine's step time from `start_s` on in which its thread did not run."""
    steps = log.steps[log.steps.start_s >= start_s]
    return float(1 - (steps.own_end_s - steps.own_start_s).sum() / steps.t_s.sum()) if len(steps) else 0.0


def _as_run_of_its_own(
    measurement: Measurement, fleet: Fleet, pool: Pool, name: str, part: ReplayPart
) -> tuple[Measurement, ReplayPart, Fleet] | None:
    """The engine `name` of a pool with its requests of `part`, as a run of its own; None if it had none."""
    own_outcomes = {
        sent.request: sent
        for sent in outcomes_of_part(measurement, part)
        if name in sent.workers and sent.status == "finished"
    }
    if not own_outcomes:
        return None
    log, start_s = measurement.logs[name].on_its_own_clock(part.start_s)
    worker = f"{pool.name}-0"
    logs = {worker: log}
    # No request waits for another's answer.
    trace = replace(measurement.trace, after=measurement.trace.after[:0])
    workers: tuple[str, ...] = (worker,)
    own_pool = replace(pool, count=1)
    if pool.role == "prefill":  # An engine that answers with one token, the first.
        own_pool = replace(own_pool, role="mixed")
        trace = replace(trace, output_tokens=np.ones_like(trace.output_tokens))
    pools: tuple[Pool, ...] = (own_pool,)
    network, policies = fleet.network, fleet.policies
    if pool.role == "decode":
        instant_name = f"{_INSTANT_POOL}-0"
        pools = (Pool(_INSTANT_POOL, "prefill", instant_worker(pool.type.gpu), 1), own_pool)
        workers = (instant_name, worker)
        network = NO_LINK
        policies = replace(policies, prefix_cache=False, kv_offload=None, routing=Policies().routing)
        logs[instant_name] = EngineLog(log.steps[:0], _instant_prefills(log.requests))
    own_part = ReplayPart(part.part, start_s, tuple(own_outcomes))
    own_sent: dict[int, RequestOutcome] = {
        request: replace(outcome, workers=workers) for request, outcome in own_outcomes.items()
    }
    own_fleet = replace(fleet, pools=pools, policies=policies, network=network)
    return Measurement(own_fleet, trace, Journal((own_part,), own_sent), logs), own_part, own_fleet


def _instant_prefills(requests: Mapping[str, EngineRequest]) -> dict[str, EngineRequest]:
    """The log of an instant prefill engine: a first token comes when the decode engine takes the request."""
    return {
        name: EngineRequest(
            queued_s=request.scheduled_s,
            scheduled_s=request.scheduled_s,
            token_s=np.array([request.scheduled_s]),
            preemptions=0,
            cached_tokens=0,
        )
        for name, request in requests.items()
    }


def _with_metrics(run: ComparedRun, metrics: tuple[Metric, ...]) -> ComparedRun:
    """The run with only these metrics. Other metrics become NaN; without TBT there are no gaps."""
    if len(metrics) == len(METRICS):
        return run
    nothing = np.full(len(run.requests.ttft_s), np.nan)
    columns: dict[str, Any] = {
        f"{name}_s": nothing for name in ("ttft", "tpot", "e2e") if name not in metrics
    }
    has_gaps = "tbt" in metrics
    return ComparedRun(
        requests=replace(run.requests, cached_tokens=None, **columns),
        gap_s=run.gap_s if has_gaps else run.gap_s[:0],
        gap_weight=run.gap_weight if has_gaps else run.gap_weight[:0],
        session=run.session,
    )
