"""Whether the link between prefill and decode pools carries the KV blocks at all."""

from __future__ import annotations

import numpy as np

from planner.documents.facts import LinkTooSlow
from planner.domain import KV_BLOCK_TOKENS
from planner.search.problem import Problem
from planner.solvers.required_work import steady
from planner.traffic.trace import measured_window


def too_slow(problem: Problem) -> LinkTooSlow | None:
    """Whether the link cannot carry the KV blocks of those requests that the SLO obliges pairs to decode.

    Of all measured ones until their whole work must be done; of half of the last tenth (the backlog test)
    until their second token is due. Those with the fewest blocks are taken.
    """
    trace, bandwidth = problem.trace, problem.task.network.bandwidth_bytes_per_s
    blocks = np.ceil(trace.input_tokens / KV_BLOCK_TOKENS) * (trace.output_tokens > 1)
    needs = [(blocks, int(np.ceil(problem.obliged.whole_frac * len(trace) - 1e-9)), problem.obliged.whole_s)]
    if tested := steady(problem.slo, trace):
        start_s, end_s = tested.window_s
        last = (trace.arrival_s >= start_s) & (trace.arrival_s <= end_s)
        until_s = end_s - start_s + tested.prefill_s + tested.gap_s
        needs.append((blocks[last], int(np.ceil(last.sum() / 2)), until_s))
    for each, least, seconds in needs:
        carried = float(np.partition(each, least - 1)[:least].sum()) if least else 0.0
        bytes_per_s = carried * KV_BLOCK_TOKENS * problem.llm.kv_bytes_per_token / seconds
        if bytes_per_s > bandwidth * (1 + 1e-9):
            return LinkTooSlow(bytes_per_s, bandwidth, earlier=False)
    return None


def falls_behind(problem: Problem) -> LinkTooSlow | None:
    """Whether the link is still busy with earlier hand-offs when the last tenth of the requests hands over.

    Those whose limit on TTFT ends before, and that keep it, are prefilled before any of the last tenth, half
    of which must have a second token soon (the backlog test). Those with the fewest blocks are taken. That
    the link serves in the order of the prefills is an assumption: assumed.LINK.
    """
    trace, network, tested = problem.trace, problem.task.network, steady(problem.slo, problem.trace)
    limits = [limit for limit in problem.slo.limits if limit.metric == "ttft"]
    if not network.is_shared or tested is None or not limits or trace.after.size:
        return None
    start_s, end_s = tested.window_s
    last = (trace.arrival_s >= start_s) & (trace.arrival_s <= end_s)
    if (trace.output_tokens[last] > 1).mean() <= 0.5:
        return None
    from_s, to_s = measured_window(trace)
    measured = (trace.arrival_s >= from_s) & (trace.arrival_s <= to_s)
    until_s = end_s + tested.prefill_s + tested.gap_s - float(trace.arrival_s[0])
    blocks = np.ceil(trace.input_tokens / KV_BLOCK_TOKENS) * (trace.output_tokens > 1)
    for limit in limits:
        before = measured & (trace.arrival_s < start_s - limit.limit_s)
        kept = int(np.ceil(limit.percentile_frac * measured.sum())) - int((measured & ~before).sum())
        if kept <= 0:
            continue
        carried = float(np.partition(blocks[before], kept - 1)[:kept].sum())
        bytes_per_s = carried * KV_BLOCK_TOKENS * problem.llm.kv_bytes_per_token / until_s
        if bytes_per_s > network.bandwidth_bytes_per_s:
            return LinkTooSlow(bytes_per_s, network.bandwidth_bytes_per_s, earlier=True)
    return None
