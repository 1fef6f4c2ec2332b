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
from planner.solvers.required_work import find_deadlines, steady_work
from planner.traffic.workload import to_classes

BOUND_SHARE = 0.25  # of the time that is left: the search needs the rest

SHADOW_S = 20.0  # for the prices of all limits


def lower_bound(problem: Problem) -> float | None:
    """What any fleet within the limits costs at least, whatever its policy; None if no fleet is within them.

    It ranges over all worker types that hold the weights, those too that are too small for the longest
    request: a fleet may turn that away, where a percentile allows it. It takes BOUND_SHARE of the time that
    is left at most; where that runs out, it is lower.
    """
    envelopes, in_bursts = _any_fleet(problem), 0.0
    deadline = wall_deadline_s(problem.deadline, BOUND_SHARE)
    if problem.hits is None:
        slo, trace = problem.slo, problem.trace
        dues = [each for each in (find_deadlines(slo, trace), steady_work(slo, trace)) if each is not None]
        in_bursts = demand_bound(envelopes, trace, problem.lengths, dues, deadline).least_objective
    if time.monotonic() > deadline:
        return in_bursts
    return bound(envelopes, _load(problem), problem.limits, at_least=in_bursts, deadline=deadline)


def _load(problem: Problem) -> TrafficLoad:
    network = problem.task.network
    return TrafficLoad(
        problem.hits.classes() if problem.hits else to_classes(problem.trace),
        problem.obliged,
        problem.llm.kv_bytes_per_token,
        math.inf if network.topology else network.bandwidth_bytes_per_s,  # a link of each node is no limit
        is_cached=problem.hits is not None,
    )


def checked_bound(lower: float | None, value: float) -> float:
    """The bound that may stand beside a fleet of this value that holds; raises BoundError if it is above.

    None is the bound of "no fleet is within the limits".
    """
    if lower is None or lower > value * (1 + 1e-6):
        claim = "no fleet is within the limits" if lower is None else f"no fleet costs less than {lower:.6g}"
        raise BoundError(
            f"internal error: the lower bound says that {claim}, and a fleet of {value:.6g} keeps the SLO. "
            "The bound is wrong, so no certificate is written. Please report it with the trace and slo.yaml"
        )
    return min(lower, value)  # above by no more than the solver rounds


def shadow_prices(problem: Problem) -> dict[FleetLimit, float]:
    """How much one more GPU, Watt or USD/h of each limit lowers the bound, without bursts and with fractions
    of workers. Empty where there is no time left to compute it.
    """
    left_s = wall_deadline_s(problem.deadline) - time.monotonic()
    if left_s <= 0 or not problem.limits.rows():
        return {}
    return master.shadow_prices(
        _any_fleet(problem), _load(problem), problem.limits, time_limit_s=min(left_s, SHADOW_S)
    )


def _any_fleet(problem: Problem) -> list[Option]:
    """The options of the bound: every worker type that holds the weights, in every role."""
    wanted = problem.priced
    types = (*problem.types, *(worker for item in problem.left_out for worker in item.workers))
    return envelopes(
        [*mixed_options(types, wanted), *prefill_options(types, wanted), *decode_options(types, wanted)]
    )


def envelopes(options: Sequence[Option]) -> list[Option]:
    """One option per role and way to split the LLM that is at least as good as each of its engine settings.

    The largest budget has the least u, min f(N)/N being over more N, and so have the most sequences, and the
    most drafts, of which a bound takes all for accepted; the most KV tokens are the smallest's.
    """
    groups: dict[tuple[object, ...], list[Option]] = {}
    for option in options:
        groups.setdefault((option.role, split(option.type)), []).append(option)
    return [
        replace(
            alike[0],
            type=replace(
                alike[0].type,
                max_num_batched_tokens=max(option.type.max_num_batched_tokens for option in alike),
                max_num_seqs=max(option.type.max_num_seqs for option in alike),
                kv_tokens=max(option.type.kv_tokens for option in alike),
                speculation=max(
                    (option.type.speculation for option in alike),
                    key=lambda each: 0 if each is None else each.tokens,
                ),
            ),
        )
        for alike in groups.values()
    ]
