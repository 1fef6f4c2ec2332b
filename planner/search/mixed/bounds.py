"""The lower bound over all fleets, and what more of each limit would lower it by."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from planner.domain import FleetLimit
from planner.errors import BoundError
from planner.search.oracle.work_clock import wall_deadline_s
from planner.search.problem.options import decode_options, mixed_options, prefill_options, split
from planner.search.problem.plan_problem import Problem
from planner.solvers import master
from planner.solvers.demand import demand_bound
from planner.solvers.master import Option, TrafficLoad, bound
from planner.solvers.required_work import find_backlog_deadlines, find_deadlines
from planner.traffic.workload import to_classes

BOUND_SHARE = 0.25  # The bound may take this part of the time that is left: the search needs the rest.
SHADOW_S = 20.0  # The prices of all limits together may take so long.
SOLVER_FRAC = 1e-6  # By rounding of the solver the bound may lie above a fleet's value by this share.


def lower_bound(problem: Problem) -> float | None:
    """What any fleet within the limits costs at least, whatever its policy; None if no fleet is within them.

    The bound ranges over all worker types that hold the weights, those too that are too small for the longest
    request: where a percentile allows it, a fleet may turn that request away. Computing the bound takes at
    most BOUND_SHARE of the time that is left; where this runs out, the bound is lower.
    """
    options, in_bursts = _all_envelopes(problem), 0.0
    deadline = wall_deadline_s(problem.deadline, BOUND_SHARE)
    if problem.hits is None:  # With prefix caches nobody knows what a single request costs.
        slo, trace = problem.slo, problem.trace
        obligations = [
            deadlines
            for deadlines in (find_deadlines(slo, trace), find_backlog_deadlines(slo, trace))
            if deadlines is not None
        ]
        in_bursts = demand_bound(options, trace, problem.lengths, obligations, deadline).least_objective
    if time.monotonic() > deadline:
        return in_bursts
    return bound(options, _load(problem), problem.limits, at_least=in_bursts, deadline=deadline)


def _load(problem: Problem) -> TrafficLoad:
    """What the traffic demands of any fleet, as the master problem takes it."""
    network = problem.task.network
    return TrafficLoad(
        workload=problem.hits.classes() if problem.hits else to_classes(problem.trace),
        slo_work=problem.slo_work,
        kv_bytes_per_token=problem.llm.kv_bytes_per_token,
        # With a topology each node has a link of its own (fleet.Network): no link that all share is a limit.
        link_bytes_per_s=math.inf if network.topology else network.bandwidth_bytes_per_s,
        is_cached=problem.hits is not None,
    )


def checked_bound(lower: float | None, value: float) -> float:
    """The bound, checked against a fleet that holds and has this value: raises BoundError if the bound is
    above it. `lower` None says that no fleet is within the limits, which this fleet disproves.
    """
    if lower is None or lower > value * (1 + SOLVER_FRAC):
        claim = "no fleet is within the limits" if lower is None else f"no fleet costs less than {lower:.6g}"
        raise BoundError(
            f"internal error: the lower bound says that {claim}, and a fleet of {value:.6g} keeps the SLO. "
            "The bound is wrong, so no certificate is written. Please report it with the trace and slo.yaml"
        )
    return min(lower, value)


def shadow_prices(problem: Problem) -> dict[FleetLimit, float]:
    """How much one more GPU, Watt or USD/h of each limit lowers the bound, without bursts and with fractions
    of workers. Empty where there is no time left to compute it.
    """
    left_s = wall_deadline_s(problem.deadline) - time.monotonic()
    if left_s <= 0 or not problem.limits.rows():
        return {}
    return master.shadow_prices(
        _all_envelopes(problem), _load(problem), problem.limits, time_limit_s=min(left_s, SHADOW_S)
    )


def _all_envelopes(problem: Problem) -> list[Option]:
    """The options of the bound: `envelopes` of every worker type that holds the weights, in every role."""
    priced = problem.priced
    types = (*problem.types, *(worker for item in problem.left_out for worker in item.workers))
    return envelopes(
        [*mixed_options(types, priced), *prefill_options(types, priced), *decode_options(types, priced)]
    )


def envelopes(options: Sequence[Option]) -> list[Option]:
    """One option per role and way to split the LLM that is at least as good as each of its engine settings.

    The largest budget has the least time per token, min f(N)/N, which is over more N then; so do the most
    sequences, and the most drafts, all of which a bound takes for accepted. The most KV tokens come from the
    smallest budget.
    """
    groups: dict[tuple[object, ...], list[Option]] = {}
    for option in options:
        groups.setdefault((option.role, split(option.type)), []).append(option)
    best_options = []
    for alike in groups.values():
        types = [option.type for option in alike]
        best_type = replace(
            types[0],
            max_num_batched_tokens=max(each.max_num_batched_tokens for each in types),
            max_num_seqs=max(each.max_num_seqs for each in types),
            kv_tokens=max(each.kv_tokens for each in types),
            speculation=max(
                (each.speculation for each in types),
                key=lambda speculation: 0 if speculation is None else speculation.tokens,
            ),
        )
        best_options.append(replace(alike[0], type=best_type))
    return best_options
