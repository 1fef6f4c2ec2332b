"""Tests whether the link between prefill and decode pools is too slow for the KV blocks, with any pools.

Both tests use what the backlog test (planner/simulator/slo_verdict.py) requires: half of the requests in the
last tenth of the window must have their second token soon after their arrival.
"""

import numpy as np
import numpy.typing as npt

from planner.documents.facts import LinkTooSlow
from planner.domain import KV_BLOCK_TOKENS, ROUNDING, STEADY_FRAC
from planner.search.problem.plan_problem import Problem
from planner.solvers.required_work import find_backlog_deadlines, find_deadlines


def link_too_slow(problem: Problem) -> LinkTooSlow | None:
    """The finding that the link cannot transfer the KV blocks of all requests that the SLO requires to be
    decoded in time; None if it can.

    Two sets of requests are tested: those of the whole trace that must be served, and half of the last tenth
    up to the deadline of their second token.
    """
    trace, bandwidth = problem.trace, problem.task.network.bandwidth_bytes_per_s
    if problem.task.network.topology is not None:  # With a topology there is no single link.
        return None
    work = problem.slo_work
    whole_count = int(np.ceil(work.whole_frac * len(trace) - ROUNDING))
    # Sets of requests, how many of each must have handed over, and within how many seconds.
    needs = [(np.ones(len(trace), bool), whole_count, work.whole_s)]
    if backlog := find_backlog_deadlines(problem.slo, trace):
        last = backlog.arrives(trace)
        within_s = backlog.window_s[1] - backlog.window_s[0] + backlog.prefill_s + backlog.gap_s
        needs.append((last, int(np.ceil(last.sum() * STEADY_FRAC)), within_s))
    for requests, least, within_s in needs:
        bytes_per_s = _least_bytes(problem, requests, least) / within_s
        if bytes_per_s > bandwidth * (1 + ROUNDING):
            return LinkTooSlow(bytes_per_s, bandwidth, earlier=False)
    return None


def link_falls_behind(problem: Problem) -> LinkTooSlow | None:
    """The finding that the link is still busy with earlier hand-offs when the last tenth of the requests
    hands over; None if it is not.

    Requests whose TTFT is due before the last tenth arrives, and that keep this limit, are prefilled before
    all of the last tenth. The link is assumed to transfer in the order of the prefills (pruning_rules.LINK).
    """
    trace, network = problem.trace, problem.task.network
    backlog = find_backlog_deadlines(problem.slo, trace)
    limits = [limit for limit in problem.slo.limits if limit.metric == "ttft" and limit.selector is None]
    if not network.is_shared or network.topology is not None or backlog is None or not limits:
        return None
    if (trace.output_tokens[backlog.arrives(trace)] > 1).mean() <= STEADY_FRAC:
        return None  # Half of the last tenth have no second token, so the backlog test needs no hand-off.
    start_s, end_s = backlog.window_s
    measured = find_deadlines(problem.slo, trace).arrives(trace)
    within_s = end_s + backlog.prefill_s + backlog.gap_s - float(trace.arrival_s[0])
    for limit in limits:
        before = measured & (trace.arrival_s < start_s - limit.limit_s)
        # So many of the requests `before` must keep the limit even if all later requests keep it.
        must_keep = int(np.ceil(limit.percentile_frac * measured.sum())) - int((measured & ~before).sum())
        bytes_per_s = _least_bytes(problem, before, must_keep) / within_s
        if bytes_per_s > network.bandwidth_bytes_per_s:
            return LinkTooSlow(bytes_per_s, network.bandwidth_bytes_per_s, earlier=True)
    return None


def _least_bytes(problem: Problem, requests: npt.NDArray[np.bool_], least: int) -> float:
    """The fewest bytes that `least` of these requests hand over."""
    if least <= 0:
        return 0.0
    trace = problem.trace
    blocks = (np.ceil(trace.input_tokens / KV_BLOCK_TOKENS) * (trace.output_tokens > 1))[requests]
    fewest_blocks = float(np.partition(blocks, least - 1)[:least].sum())
    return fewest_blocks * KV_BLOCK_TOKENS * problem.llm.kv_bytes_per_token
