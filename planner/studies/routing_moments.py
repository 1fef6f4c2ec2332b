"""Measures how far a routing is from the best packing of the requests that it placed, at moments of a
simulated run.

The moments are spread evenly over the time of arrivals. For each role all requests in service count: a
request is in service from the time when a worker first schedules it until the worker is done with it. It
takes these shares of a worker's resources (solvers/moment_packing.py):

  KV blocks   of its prompt and of its output so far; a prefix that prompts share counts in each of them
  seats       one of the worker's max_num_seqs places in the batch
  decode      its part of a step, decode_s + context_token_s context, over the limit on TBT or TPOT less the
              time of an idle step
  prompt      seconds of its prompt tokens still to compute, over the limit on TTFT

The shares of decodes and prompts are Aladdin's constraints b and c (Nie et al. 2024, arXiv:2405.06856). They
count only if the SLO has such a limit for all requests; the tightest is taken if there are several. The best
packing knows what the router cannot know: how long each output has become. It may also move requests between
moments, which no router can do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.domain import KV_BLOCK_TOKENS, Slo
from planner.errors import InputError
from planner.fleet import Fleet, Pool
from planner.policies import POOLS, STATIC, TIES_BY
from planner.simulator.layout import UNFINISHED
from planner.simulator.simulation import Floats, Ints, Simulation
from planner.solvers.moment_packing import BestPacking, largest_load, pack_moment
from planner.units import count_text, show_s

# How many moments are explained unless the user says otherwise, and the most that a user may ask for, because
# a solver packs each. Chosen by hand.
DEFAULT_MOMENTS, MOST_MOMENTS = 20, 1000
NOT_ZERO_S = 1e-12  # A divisor is at least this, because a prompt may take no time.


@dataclass(frozen=True, slots=True)
class RoutingMoment:
    """The load of a role's workers at one moment, and the best packing of the same requests.

    `requests` were in service on `used` of the role's `workers`. `largest` is the largest share in use of any
    resource of one worker; it may exceed 1, because routers ignore these limits.
    """

    time_s: float
    role: str
    requests: int
    workers: int
    used: int
    largest: float
    best: BestPacking


def explain_routing(
    fleet: Fleet, simulation: Simulation, slo: Slo | None, moments: int
) -> tuple[RoutingMoment, ...]:
    """The load of each role's workers at this many moments, in the order of time.

    Raises InputError if workers may change their role, or if a limit is shorter than an idle step.
    """
    check_moments(moments)
    if POOLS[fleet.policies.pools].code != STATIC:
        raise InputError(
            f"explain-routing: packs workers that keep their role, found pools: {fleet.policies.pools}; "
            "take pools: static"
        )
    pool_of_worker = np.repeat(np.arange(len(fleet.pools)), [pool.count for pool in fleet.pools])
    roles = list(dict.fromkeys(pool.role for pool in fleet.running_pools))
    # The numbers of each role's workers.
    members = {
        role: np.flatnonzero([fleet.pools[number].role == role for number in pool_of_worker])
        for role in roles
    }
    capacities = [_WorkerCapacity.of_pool(pool, slo) for pool in fleet.pools]
    first_arrival_s = float(simulation.arrival_s.min())
    last_s = float(simulation.arrival_s.max())
    if last_s <= first_arrival_s:  # All arrivals of a closed loop may come at once.
        last_s = float(simulation.end_s)
    explained = []
    for moment in range(moments):
        # The middle of each of `moments` equal parts of the time of arrivals.
        time_s = first_arrival_s + (moment + 0.5) / moments * (last_s - first_arrival_s)
        for role in roles:
            requests = _find_in_service(simulation, role, members[role], time_s)
            # u (workers, J, R): what request j would take of resource r on a worker.
            u = np.stack([capacities[pool_of_worker[w]].shares(requests) for w in members[role]])
            # (J,): the index in `members` of the worker that serves each request.
            worker_of = np.searchsorted(members[role], requests.worker)
            explained.append(
                RoutingMoment(
                    time_s=time_s,
                    role=role,
                    requests=len(worker_of),
                    workers=len(members[role]),
                    used=len(np.unique(worker_of)),
                    largest=largest_load(u, worker_of),
                    best=pack_moment(u, worker_of, pool_of_worker[members[role]]),
                )
            )
    return tuple(explained)


def check_moments(moments: int) -> None:
    """Raise InputError unless the number of moments is from 1 to MOST_MOMENTS."""
    if not 1 <= moments <= MOST_MOMENTS:
        raise InputError(f"explain-moments: found {moments}, must be 1 to {MOST_MOMENTS}")


@dataclass(frozen=True, slots=True, eq=False)
class _InService:
    """Requests (J,) in service: their worker, prompt tokens still to compute, and tokens of context."""

    worker: Ints
    left_tokens: Floats
    context_tokens: Ints


def _find_in_service(simulation: Simulation, role: str, members: Ints, time_s: float) -> _InService:
    """The requests in service at this time on the workers `members`, which are those of the role."""
    first_token_s = simulation.arrival_s + simulation.ttft_s
    start_s, end_s = simulation.arrival_s + simulation.queue_s, simulation.arrival_s + simulation.e2e_s
    worker = simulation.prefill_worker
    # A prefill worker is done with a request at its first token, and a decode worker begins then.
    if role == "prefill":
        end_s = first_token_s
    elif role == "decode":
        start_s, worker = first_token_s, simulation.decode_worker
    # A request that the simulation left unfinished has no end.
    still_runs = np.isnan(end_s) & (simulation.status == UNFINISHED)
    is_in_service = (start_s <= time_s) & ((end_s > time_s) | still_runs) & np.isin(worker, members)
    served = np.flatnonzero(is_in_service)
    begun_s, first_s = (simulation.arrival_s + simulation.queue_s)[served], first_token_s[served]
    # A prompt is taken to be computed evenly until its first token, and not at all without a first token
    # (NaN).
    computing_s = np.maximum(first_s - begun_s, NOT_ZERO_S)
    done_frac = np.clip(np.nan_to_num((time_s - begun_s) / computing_s), 0.0, 1.0)
    prompt = simulation.input_tokens[served]
    cached = 0 if simulation.cached_tokens is None else simulation.cached_tokens[served]
    # Outputs are taken to grow evenly too, by a token in each mean gap (TPOT) after the first token.
    decoded = np.floor(np.nan_to_num((time_s - first_s) / simulation.tpot_s[served]))
    output = np.where(time_s >= first_s, 1 + np.maximum(decoded, 0), 0).astype(np.int64)
    context = prompt + np.minimum(output, simulation.output_tokens[served])
    return _InService(worker[served], (prompt - cached) * (1.0 - done_frac), context)


@dataclass(frozen=True, slots=True)
class _WorkerCapacity:
    """The capacity of one worker, and what a request takes of it.

    `decode_s` and `context_token_s` are the parts of a step's time for a decode and for each token of its
    context; `token_s` is the time of a prompt token. `step_limit_s` is the limit on the time per output token
    less an idle step, and `prompt_limit_s` that on TTFT; None if the SLO has no such limit.
    """

    kv_blocks: float
    seats: int
    decode_s: float
    token_s: float
    context_token_s: float
    step_limit_s: float | None
    prompt_limit_s: float | None

    @classmethod
    def of_pool(cls, pool: Pool, slo: Slo | None) -> _WorkerCapacity:
        """The capacity of a worker of this pool, under the tightest limits of the SLO."""
        worker = pool.type.as_one  # Data-parallel ranks together count as one worker.
        # What the estimates of a router (policies.TIES_BY) take for a prompt token, for a decode and for a
        # token of its context.
        token_s = TIES_BY.weights(worker, False).prompt_token
        of_decode = TIES_BY.weights(worker, True)
        decode_s, context_token_s = of_decode.request, of_decode.kv_token
        step_limit_s = _tightest_s(slo, ("tbt", "tpot")) if pool.role != "prefill" else None
        prompt_limit_s = _tightest_s(slo, ("ttft",)) if pool.role != "decode" else None
        if step_limit_s is not None:
            idle_s = float(worker.latency.step_s(1, decodes=1)) - decode_s
            if step_limit_s <= idle_s:
                raise InputError(
                    f"explain-routing: a step of {worker.name} takes {show_s(idle_s)} without requests, "
                    f"more than the limit of {show_s(step_limit_s)} per token; relax it, or leave the SLO out"
                )
            step_limit_s -= idle_s  # What remains is for the decodes' parts of the step.
        return cls(
            kv_blocks=worker.kv_tokens // KV_BLOCK_TOKENS,
            seats=worker.max_num_seqs,
            decode_s=decode_s,
            token_s=token_s,
            context_token_s=context_token_s,
            step_limit_s=step_limit_s,
            prompt_limit_s=prompt_limit_s,
        )

    def shares(self, requests: _InService) -> Floats:
        """The share of each resource that each request takes, (J, R)."""
        rows = [
            np.ceil(requests.context_tokens / KV_BLOCK_TOKENS) / self.kv_blocks,
            np.full(len(requests.worker), 1 / self.seats),
        ]
        if self.step_limit_s is not None:
            is_decode = requests.left_tokens <= 0
            decode_step_s = self.decode_s + self.context_token_s * requests.context_tokens
            rows.append(np.where(is_decode, decode_step_s / self.step_limit_s, 0.0))
        if self.prompt_limit_s is not None:
            rows.append(self.token_s * requests.left_tokens / self.prompt_limit_s)
        return np.stack(rows, axis=1)


def _tightest_s(slo: Slo | None, metrics: Sequence[str]) -> float | None:
    """The shortest limit of the SLO on one of these metrics that is for all requests; None if it has none."""
    limits = () if slo is None else slo.limits
    return min(
        (limit.limit_s for limit in limits if limit.metric in metrics and limit.selector is None),
        default=None,
    )


def routing_document(explained: Iterable[RoutingMoment]) -> dict[str, Any]:
    """What `plan simulate --explain-routing --json` has under `routing`."""
    return {
        "moments": [
            {
                "time_s": moment.time_s,
                "role": moment.role,
                "requests": moment.requests,
                "workers": moment.workers,
                "used": moment.used,
                "fewest": moment.best.fewest,
                "fewest_bound": moment.best.fewest_bound,
                "largest_load_frac": moment.largest,
                "least_load_frac": moment.best.least,
                "least_load_bound_frac": moment.best.least_bound,
                "is_fewest": moment.best.is_fewest,
                "is_least": moment.best.is_least,
            }
            for moment in explained
        ],
        "summary": routing_sentences(tuple(explained)),
    }


def routing_sentences(explained: Sequence[RoutingMoment]) -> list[str]:
    """One sentence per role, over the moments at which it had requests."""
    return [
        _role_sentence(role, [moment for moment in explained if moment.role == role and moment.requests])
        for role in dict.fromkeys(moment.role for moment in explained)
    ]


def _role_sentence(role: str, moments: Sequence[RoutingMoment]) -> str:
    """How the workers of a role were used, beside the best packings; all `moments` have requests."""
    if not moments:
        return f"{role}: no request was in service at any of the moments."
    moments_text = count_text(len(moments), "moment")
    within_limits = [moment for moment in moments if moment.best.fewest is not None]
    # The share by which the fullest worker was fuller than in the best packing found.
    excess_frac = [moment.largest / moment.best.least - 1 for moment in moments]
    worst = max(range(len(moments)), key=excess_frac.__getitem__)
    unproved = sum(not (moment.best.is_fewest and moment.best.is_least) for moment in moments)
    parts = [
        f"{role}: at {moments_text} with requests {np.mean([moment.used for moment in moments]):.1f} of "
        f"{moments[0].workers} workers were in use on average"
    ]
    if within_limits:
        fewest = np.mean([float(moment.best.fewest or 0) for moment in within_limits])
        is_everywhere = len(within_limits) == len(moments)
        where = "" if is_everywhere else f" at the {len(within_limits)} where any packing found does"
        parts.append(f"{fewest:.1f} hold the same requests within the limits{where}")
    else:
        parts.append("no packing found keeps the limits")
    text = "; ".join(parts) + (
        f". The fullest worker was {100 * np.mean(excess_frac):.0f} % fuller than in the most even packing "
        f"found, {100 * excess_frac[worst]:.0f} % at most (at {show_s(moments[worst].time_s)})."
    )
    if unproved:
        text += f" At {unproved} of them the solver stopped early: read its figures as bounds."
    return text
