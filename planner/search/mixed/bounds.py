"""The lower bound on the value of all fleets, and how far it falls if a limit is raised.

A fleet's value is its objective: USD/h, GPUs or Watts. The model is docs/formulations.md's, "Lower bound".
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from planner.domain import FleetLimit
from planner.errors import BoundError
from planner.search.oracle.work_clock import wall_deadline_s
from planner.search.problem.options import decode_options, mixed_options, prefill_options, split_of
from planner.search.problem.plan_problem import Problem
from planner.solvers import master
from planner.solvers.demand import demand_bound
from planner.solvers.master import Option, TrafficLoad
from planner.solvers.required_work import find_backlog_deadlines, find_deadlines
from planner.traffic.workload import to_classes

# All three are set by hand.
BOUND_TIME_FRAC = 0.25  # The bound may take this share of the time that is left, so that the search has some.
SHADOW_S = 20.0  # The time limit for the shadow prices of all limits together.
SOLVER_FRAC = 1e-6  # Rounding errors of the solver may put the bound above a fleet's value by this share.


def lower_bound(problem: Problem) -> float | None:
    """A lower bound on the value of every fleet within the limits, whatever its policies; None if no fleet is
    within the limits.

    The bound covers all worker types that hold the weights, even those too small for the longest request: if
    a percentile allows it, a fleet may reject that request. Computing the bound takes at most BOUND_TIME_FRAC
    of the remaining time; if that runs out, the bound is lower.
    """
    options, burst_bound = _all_envelopes(problem), 0.0
    deadline = wall_deadline_s(problem.deadline, BOUND_TIME_FRAC)
    # `demand_bound` is about bursts, and counts the work of single requests. With prefix caches the work of a
    # request is not known: it depends on the requests before.
    if problem.hits is None:
        slo, trace = problem.slo, problem.trace
        # By when the work of requests must be done: for the SLO, and for the test of the simulator that the
        # backlog does not grow (required_work.py).
        obligations = [find_deadlines(slo, trace)]
        if (backlog := find_backlog_deadlines(slo, trace)) is not None:
            obligations.append(backlog)
        burst_bound = demand_bound(options, trace, problem.lengths, obligations, deadline)
    if time.monotonic() > deadline:
        return burst_bound
    return master.bound_objective(
        options, _load(problem), problem.limits, at_least=burst_bound, deadline=deadline
    )


def _load(problem: Problem) -> TrafficLoad:
    """The work and KV transfers that the traffic requires of any fleet, for the linear program over fleets
    (solvers/master.py).
    """
    hits, network = problem.hits, problem.task.network
    # If prefixes may be pinned in caches, shared tokens count as cached from the start.
    may_pin = problem.task.policies.may_pin
    return TrafficLoad(
        workload=to_classes(problem.trace) if hits is None else hits.workload(may_pin=may_pin),
        slo_work=problem.slo_work,
        kv_bytes_per_token=problem.llm.kv_bytes_per_token,
        # With a topology each node has a link of its own (fleet.Network): no link that all share is a limit.
        link_bytes_per_s=math.inf if network.topology else network.bandwidth_bytes_per_s,
        is_cached=hits is not None,
    )


def checked_bound(lower: float | None, value: float) -> float:
    """The bound `lower`, checked against the `value` of a fleet that holds. Raises BoundError if the bound is
    above this value, or if it is None, because then it claims that no fleet is within the limits.
    """
    if lower is None or lower > value * (1 + SOLVER_FRAC):
        claim = "no fleet is within the limits" if lower is None else f"no fleet costs less than {lower:.6g}"
        raise BoundError(
            f"internal error: the lower bound says that {claim}, and a fleet of {value:.6g} keeps the SLO. "
            "The bound is wrong, so no certificate is written. Please report it with the trace and slo.yaml"
        )
    return min(lower, value)  # The bound may still be above the value by SOLVER_FRAC.


def shadow_prices(problem: Problem) -> dict[FleetLimit, float]:
    """By how much one more GPU, Watt or USD/h of each limit would lower the bound, computed without bursts
    and with fractional workers. Empty if there is no time left.
    """
    left_s = wall_deadline_s(problem.deadline) - time.monotonic()
    if left_s <= 0 or not problem.limits.rows():
        return {}
    return master.shadow_prices(
        _all_envelopes(problem), _load(problem), problem.limits, time_limit_s=min(left_s, SHADOW_S)
    )


def _all_envelopes(problem: Problem) -> list[Option]:
    """The envelopes of every worker type that holds the weights, in every role: the options of the bound."""
    # `left_out` are the types that are too small for the longest request (problem/plan_problem.py).
    types = (*problem.types, *(worker for item in problem.left_out for worker in item.workers))
    return envelopes(
        [
            option
            for options_in_role in (mixed_options, prefill_options, decode_options)
            for option in options_in_role(types, problem.option_objective)
        ]
    )


def envelopes(options: Sequence[Option]) -> list[Option]:
    """One option (an envelope) for each combination of role, split of the LLM over GPUs, and step times. It
    is at least as good as every real option of the combination, so a bound computed with envelopes holds for
    all engine settings.

    An envelope has the best value of each setting, though no engine has all of them at once:

        token budget    the largest: with more step sizes N to choose from, the least time per token,
                        min f(N) / N for steps that take f(N) s, can only be shorter
        sequences       the most, for the same reason: more numbers of decodes to choose from
        drafted tokens  the most, as a bound takes all of them to be accepted
        KV tokens       the most; the smallest token budget leaves so many
        extra KV        the fewest blocks that a sequence takes beside those of its tokens; the fewest drafted
                        tokens need so few

    Options with equal role and split have the same GPU, power cap and price (`split_of`), but not always the
    same step times: seats and drafts decide up to which size steps are captured in CUDA graphs, and budgets
    decide which all-to-all runs between nodes.
    """
    groups: dict[tuple[object, ...], list[Option]] = {}
    for option in options:
        key = option.role, split_of(option.type), option.type.latency
        groups.setdefault(key, []).append(option)
    best_options = []
    for alike in groups.values():
        types = [option.type for option in alike]
        best_type = replace(
            types[0],
            max_num_batched_tokens=max(worker.max_num_batched_tokens for worker in types),
            max_num_seqs=max(worker.max_num_seqs for worker in types),
            kv_tokens=max(worker.kv_tokens for worker in types),
            extra_kv=min((worker.extra_kv for worker in types), key=lambda extra: extra.constant_blocks),
            speculation=max(
                (worker.speculation for worker in types),
                key=lambda speculation: 0 if speculation is None else speculation.tokens,
            ),
        )
        best_options.append(replace(alike[0], type=best_type))
    return best_options
