"""Makes the capacity table, which some controllers read: rates, and the pool sizes that carry each.

For each of RUNGS rates the table has the cheapest sizes of a fleet's pools that keep the SLO on a sample of
the traffic. The sample is the busiest part of the traffic, brought to the rate by leaving requests out or by
laying copies over it. The table has no times, so it does not tell a controller the future.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from planner.day.controllers.knowledge import CapacityTable, EngineProfile
from planner.domain import Slo
from planner.fleet import Fleet, WorkerType
from planner.simulator.replay import RequestRecords, simulate_if_kept
from planner.simulator.slo_verdict import judge_slo
from planner.traffic.scaling import rescale_trace, select_window
from planner.traffic.trace import Trace, judged_span_s
from planner.units import show_s

# All values were set by hand.
SAMPLE = "busiest 10 min"  # A part of the trace, as `scaling.select_window` reads it.
RUNGS = 12  # Rates of the table, equally spaced. A rate between two has the sizes of the higher one.
ABOVE_FRAC = 0.3  # The highest rate of the table is this share above the highest rate of the traffic.
MANY_SEQUENCES = 64  # The line through decode step times goes through 1 sequence and this many.
LEAST_REQUESTS = 200  # A smaller sample says too little about a percentile, so its rate is left out.


def capacity_table(
    fleet: Fleet, trace: Trace, slo: Slo, *, highest_rps: float, most: Sequence[int]
) -> CapacityTable | None:
    """The table for this fleet's P pools, up to ABOVE_FRAC above `highest_rps`.

    The table ends before the first rate that `most` (P,) workers do not carry. None if no rate gives
    LEAST_REQUESTS, or if `most` workers do not carry the lowest rate that does.
    """
    sample = select_window(trace, SAMPLE)
    rates: list[float] = []
    rows: list[tuple[int, ...]] = []
    for rung in range(1, RUNGS + 1):  # A rung is the number of a rate, from the lowest on.
        rate_rps = highest_rps * (1 + ABOVE_FRAC) * rung / RUNGS
        if rate_rps * sample.duration_s < LEAST_REQUESTS:  # A higher rate may give enough requests.
            continue
        # The rung is the seed that draws which requests are left out or copied, so tables are reproducible.
        traffic = rescale_trace(sample, rate_rps, rng=np.random.default_rng(rung))
        # We assume that a higher rate needs no fewer workers in any pool.
        least = rows[-1] if rows else [1] * len(fleet.pools)
        sizes = least_that_keep(fleet, traffic, slo, least, most)
        if sizes is None:
            break
        rates.append(rate_rps)
        rows.append(sizes)
    how_made = f"the {SAMPLE} of {trace.name} at {len(rates)} rates, least sizes that keep {slo_text(slo)}"
    return CapacityTable(np.array(rates), np.array(rows), how_made) if rates else None


def slo_text(slo: Slo) -> str:
    """The limits of the SLO in a line."""
    return ", ".join(f"{limit.label} <= {show_s(limit.limit_s)}" for limit in slo.limits)


def engine_profile(worker: WorkerType, context_tokens: int) -> EngineProfile:
    """A worker's step times as straight lines through two points each, with the engine's host time added.

    The line of a prompt goes through 1 token and the tokens of a full step, that of a decode step through 1
    and MANY_SEQUENCES sequences on each rank. Data-parallel ranks count as one engine with the memory and the
    sequences of all (`WorkerType.as_one`).
    """
    # Pairs of host time per step, and per sequence of the step.
    host_times_s = [component.per_step_s(worker.tp) for component in worker.host]
    host_step_s = sum(step_s for step_s, _ in host_times_s)
    host_sequence_s = sum(sequence_s for _, sequence_s in host_times_s) / worker.dp
    engine = worker.as_one
    full_tokens = engine.max_num_batched_tokens
    first_s, full_s = (float(engine.latency.prefill_s(n, full_tokens)) for n in (1, full_tokens))
    token_s = (full_s - first_s) / max(full_tokens - 1, 1)
    sequences = min(worker.dp * MANY_SEQUENCES, engine.max_num_seqs)
    # Decode steps without the time to read KV tokens, which is in `decode_s_per_token`.
    alone_s, together_s = (float(engine.latency.step_s(n, decodes=n)) for n in (1, sequences))
    sequence_s = (together_s - alone_s) / max(sequences - 1, 1)
    # A line's value at 0 is its value at 1 less the slope. For the host a prompt alone is one sequence.
    return EngineProfile(
        prefill_s=first_s - token_s + host_step_s + host_sequence_s,
        prefill_s_per_token=token_s,
        decode_s=alone_s - sequence_s + host_step_s,
        decode_s_per_sequence=sequence_s + host_sequence_s,
        decode_s_per_token=engine.latency.d_s,
        seats=engine.max_num_seqs,
        kv_tokens=float(engine.kv_tokens),
        context_tokens=float(context_tokens),
    )


def least_that_keep(
    fleet: Fleet, trace: Trace, slo: Slo, least: Sequence[int], most: Sequence[int]
) -> tuple[int, ...] | None:
    """The cheapest sizes of a fleet's pools that keep the SLO on this trace; None if none do.

    The SLO is judged over the whole trace, because a short sample has too few requests for windows.
    """
    whole_slo, requests = replace(slo, every_s=None), RequestRecords(trace)
    prices = [pool.type.price_usd_per_h for pool in fleet.pools]

    def holds(sizes: Sequence[int]) -> bool:
        # The run is None if it was stopped: a limit was broken, or too many requests waited longer than
        # `patience_s`. A complete run is judged by all lines of the SLO.
        candidate = fleet.with_counts(sizes)
        patience_s = whole_slo.patience_s(judged_span_s(trace))
        run = simulate_if_kept(candidate, trace, whole_slo.limits, requests, patience_s=patience_s)
        return run is not None and judge_slo(run, whole_slo, with_percentiles=False).holds

    return least_sizes(holds, prices, least, most)


def least_sizes(
    holds: Callable[[Sequence[int]], bool], prices: Sequence[float], least: Sequence[int], most: Sequence[int]
) -> tuple[int, ...] | None:
    """The cheapest sizes from `least` to `most` that hold, if more workers never hurt; None if none do.

    First we find the smallest size of each pool by itself, with all other pools at their most: sizes that
    hold are at least these. From these sizes on, all sizes are tried in order of their price.
    """
    if not holds(most):
        return None
    top = tuple(most)
    floor = list(least)  # The size of each pool below which nothing holds.
    for p in range(len(floor)):
        low, high = least[p] - 1, most[p]
        while high - low > 1:  # `high` holds; `low` does not, or is below `least`.
            middle = (low + high) // 2
            sizes = (*top[:p], middle, *top[p + 1 :])
            if middle > 0 and holds(sizes):  # A pool without workers cannot be simulated.
                high = middle
            else:
                low = middle
        floor[p] = high
    queue = [(0.0, tuple(floor))]  # (price, sizes); `floor` is tried first, so its price does not matter.
    seen = {tuple(floor)}
    while queue:
        _, sizes = heapq.heappop(queue)
        if holds(sizes):
            return sizes
        for p in range(len(sizes)):
            more = (*sizes[:p], sizes[p] + 1, *sizes[p + 1 :])
            if more[p] <= most[p] and more not in seen:
                seen.add(more)
                usd = sum(price * n for price, n in zip(prices, more, strict=True))
                heapq.heappush(queue, (usd, more))
    return None
