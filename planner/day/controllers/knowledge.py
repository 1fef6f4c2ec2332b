"""What a controller may know before the day begins, and calculations that several controllers use."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.domain import ROUNDING
from planner.errors import InputError
from planner.fleet import Role
from planner.simulator.elastic import ElasticPool, Floats, Ints, MetricsReading
from planner.solvers.whole_nodes import uneven_sizes

RATE_TOLERANCE_FRAC = 1e-12  # A rate above one of the table by at most this share counts as equal.

MIXED: Role = "mixed"
PREFILL: Role = "prefill"
DECODE: Role = "decode"


@dataclass(frozen=True, slots=True, eq=False)
class CapacityTable:
    """The least sizes of the P pools, `sizes` (R, P), that keep the SLO at the R steady rates `rates_rps`.

    Rates rise, and no size falls from one rate to the next. `how_made` says which traffic was simulated.
    Raises InputError for other tables.
    """

    rates_rps: Floats
    sizes: Ints
    how_made: str

    def __post_init__(self) -> None:
        rates, sizes = self.rates_rps, self.sizes
        if len(rates) == 0 or sizes.shape[0] != len(rates) or rates[0] <= 0 or (np.diff(rates) <= 0).any():
            raise InputError(
                f"capacity table: expected rates that rise from above 0 and sizes for each of them, "
                f"found {len(rates)} rates and {sizes.shape[0]} rows of sizes"
            )
        if (sizes < 0).any() or (np.diff(sizes, axis=0) < 0).any():
            raise InputError("capacity table: a higher rate may not need fewer workers of a pool")

    def sizes_for_rate(self, rate_rps: float) -> Ints:
        """The sizes (P,) of the lowest rate in the table that is at least `rate_rps`.

        Beyond the table the last sizes grow in proportion.
        """
        if rate_rps <= 0:
            return np.zeros(self.sizes.shape[1], dtype=np.int64)
        # RATE_TOLERANCE_FRAC and ROUNDING are for rounding errors: a rate of the table must not get the next
        # row, and a size beyond the table must not be rounded up to one worker more.
        row = int(np.searchsorted(self.rates_rps, rate_rps * (1 - RATE_TOLERANCE_FRAC)))
        if row < len(self.rates_rps):
            sizes: Ints = self.sizes[row]
        else:
            sizes = np.ceil(self.sizes[-1] * (rate_rps / self.rates_rps[-1]) - ROUNDING).astype(np.int64)
        return sizes


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """Linear step times of a pool's workers, for wva_queue.py, dynamo_load.py, dynamo_sla.py and planned.py.

    Alone, a prompt of x tokens takes `prefill_s + prefill_s_per_token x`. A decode step of n sequences with
    c tokens of context each takes `decode_s + decode_s_per_sequence n + decode_s_per_token n c`.
    """

    prefill_s: float
    prefill_s_per_token: float
    decode_s: float
    decode_s_per_sequence: float
    decode_s_per_token: float
    seats: int  # The most sequences of a batch.
    kv_tokens: float  # The tokens that a worker's KV cache holds.
    context_tokens: float  # The tokens of the longest request, prompt and output.

    def work_s(self, role: Role, input_tokens: float, output_tokens: float) -> float:
        """The time that one more request of these lengths adds to the steps of a worker of this role [s]."""
        context = input_tokens + output_tokens / 2  # The mean context over the request's output tokens.
        decode_s = output_tokens * (self.decode_s_per_sequence + self.decode_s_per_token * context)
        prefill_s = self.prefill_s_per_token * input_tokens
        return (0.0 if role == DECODE else prefill_s) + (0.0 if role == PREFILL else decode_s)

    def ttft_s(self, input_tokens: float) -> float:
        """The time of a prompt of this length alone, without a queue [s]."""
        return self.prefill_s + self.prefill_s_per_token * input_tokens

    def itl_s(self, sequences: float, context_tokens: float) -> float:
        """The time of a decode step, which is the gap between two tokens (inter-token latency) [s]."""
        per_sequence_s = self.decode_s_per_sequence + self.decode_s_per_token * context_tokens
        return self.decode_s + per_sequence_s * sequences

    def most_sequences(self, context_tokens: float) -> int:
        """The number of sequences with this many tokens that seats and the KV cache hold, at least one."""
        return max(1, min(self.seats, int(self.kv_tokens / max(context_tokens, 1.0))))


@dataclass(frozen=True, slots=True)
class LoadRule:
    """The workers that a pool needs for the load of a window: one, and one more above each of `edges`.

    A window of `window_s` is cut into spans of `span_s`. The work of a span is the seconds of
    `EngineProfile.work_s` that arrive per second, so a long request counts more than a short one. The load of
    the window is the `PEAK_FRAC` quantile over its spans, so that bursts count. Above `highest`, the largest
    load of the traffic that the rule was fitted on, workers grow in proportion. `needs` are the least workers
    that each window of that traffic needed, ascending; () if unknown.
    """

    edges: tuple[float, ...]  # In rising order.
    highest: float
    span_s: float
    window_s: float
    needs: tuple[int, ...] = ()

    def with_floor(self, covered_frac: float) -> LoadRule:
        """The rule with a floor at any load: workers that suffice in this share of the windows of `needs`."""
        if covered_frac <= 0 or not self.needs:
            return self
        covered_windows = max(least_whole(covered_frac * len(self.needs)), 1)
        floor = self.needs[covered_windows - 1]
        # Any load is above an edge at 0, so the first `floor - 1` edges at 0 give `floor` workers.
        return replace(self, edges=(0.0,) * (floor - 1) + self.edges[floor - 1 :])

    def workers_for_load(self, load: float) -> int:
        """The workers for a load [s/s]; 0 without load."""
        if load <= 0:
            return 0
        if load > self.highest:
            return least_whole(self.workers_for_load(self.highest) * load / self.highest)
        return 1 + bisect.bisect_left(self.edges, load)


# The load of a window is this quantile over its spans, set by hand: maxima are chance, means hide bursts.
PEAK_FRAC = 0.95


def peak_load(work_per_s: Floats) -> float:
    """The load of a window [s/s], from the work that arrived per second in each span; 0 without spans."""
    return float(np.quantile(work_per_s, PEAK_FRAC)) if len(work_per_s) else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Arrival rates [requests/s] in buckets of `bucket_s`. The last bucket ends `end_s` after the run begins:
    0 for earlier days, more if the history is the traffic of the run itself.
    """

    bucket_s: float
    rates_rps: Floats
    end_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Knowledge:
    """What a controller may know before the day: the pools, and facts from the plan, None or () if unknown.

    Tuples have one entry per pool, except `front`: the pools that requests reach first, all but decode pools.
    The run begins at `clock_s`, in seconds since Monday 0:00. `ttft_s` and `tpot_s` are limits of the SLO.
    `nodes` has the kind and the GPUs of each pool's node, None for a pool whose nodes are not sold whole.
    """

    pools: tuple[ElasticPool, ...]
    roles: tuple[Role, ...]
    prices_usd_per_h: tuple[float, ...] = ()
    clock_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    capacity: CapacityTable | None = None
    engines: tuple[EngineProfile, ...] = ()
    history: History | None = None
    rules: tuple[LoadRule, ...] = ()
    gpus: tuple[int, ...] = ()  # GPUs of a worker.
    nodes: tuple[tuple[str, int] | None, ...] = ()
    front: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if len(self.roles) != len(self.pools) or not self.pools:
            raise InputError(
                f"controllers: {len(self.pools)} pools and {len(self.roles)} roles, one for each"
            )
        if self.capacity is not None and self.capacity.sizes.shape[1] != len(self.pools):
            raise InputError(
                f"capacity table: has sizes of {self.capacity.sizes.shape[1]} pools, "
                f"the fleet has {len(self.pools)}"
            )
        object.__setattr__(self, "front", tuple(i for i, role in enumerate(self.roles) if role != DECODE))

    def pools_of_role(self, role: Role) -> tuple[int, ...]:
        """The numbers of the pools of a role."""
        return tuple(i for i, pool_role in enumerate(self.roles) if pool_role == role)

    def price_of(self, pool: int) -> float:
        """The price of a worker [USD/h]; 1 for all pools where prices are not known."""
        return self.prices_usd_per_h[pool] if self.prices_usd_per_h else 1.0

    def rate_rps(self, reading: MetricsReading) -> float:
        """Requests/s that came to the fleet during the reading's interval.

        Requests in limbo wait for a pool to get a worker, so they have not arrived at a pool yet. Some may
        have come in earlier intervals: so we take the larger of both numbers, not their sum.
        """
        arrived = sum(int(reading.arrived[i]) for i in self.front)
        return max(arrived, reading.limbo) / reading.interval_s

    def bounded_sizes(self, sizes: Sequence[float]) -> list[int]:
        """The sizes (P,), clamped to the least and the most workers of their pools.

        Prefill workers are useless without decode workers, and the reverse: if one role has workers and the
        other has none, the other's first pool gets one.
        """
        bounded = [
            min(max(int(size), pool.least), pool.most) for size, pool in zip(sizes, self.pools, strict=True)
        ]
        prefill, decode = self.pools_of_role(PREFILL), self.pools_of_role(DECODE)
        if prefill and decode and any(bounded[i] for i in (*prefill, *decode)):
            for pools in (prefill, decode):
                if not any(bounded[i] for i in pools):
                    bounded[pools[0]] = 1
        return bounded

    def fill_nodes(self, sizes: Sequence[int]) -> list[int]:
        """The sizes (P,) with more workers on the idle GPUs of nodes that are sold, and paid, whole.

        Front pools come first; an empty pool stays empty. Pools that share nodes in which their workers leave
        gaps (3 or 5 of 8 GPUs) stay as they are, because their idle GPUs may not be in one node.
        """
        filled_sizes = [int(size) for size in sizes]
        for node in dict.fromkeys(node for node in self.nodes if node is not None):
            on_node = [i for i, node_of_pool in enumerate(self.nodes) if node_of_pool == node]
            _, node_gpus = node
            if uneven_sizes(node_gpus, (self.gpus[i] for i in on_node)):
                if len(on_node) == 1:
                    (i,) = on_node
                    more_workers = -filled_sizes[i] % (node_gpus // self.gpus[i])
                    filled_sizes[i] += min(more_workers, self.pools[i].most - filled_sizes[i])
                continue
            # GPUs that are missing to the next multiple of `node_gpus`.
            idle_gpus = -sum(filled_sizes[i] * self.gpus[i] for i in on_node) % node_gpus
            for i in sorted(on_node, key=lambda i: i not in self.front):
                more_workers = min(idle_gpus // self.gpus[i], self.pools[i].most - filled_sizes[i])
                if filled_sizes[i]:
                    filled_sizes[i] += more_workers
                    idle_gpus -= more_workers * self.gpus[i]
        return filled_sizes

    def limbo_of(self, reading: MetricsReading, pool: int) -> int:
        """The requests in limbo that wait for this pool: all, or 0 for a decode pool."""
        return reading.limbo if pool in self.front else 0

    def require_facts(self, controller: str, *facts: str) -> None:
        """Raise InputError unless these facts, which are fields of this class, are known."""
        for fact in facts:
            if getattr(self, fact) in (None, ()):
                remedy = _REMEDIES.get(fact, "or give it")
                raise InputError(
                    f"controller {controller!r} needs {_FACTS[fact]}, which this run does not have; leave "
                    f"the controller out, {remedy}"
                )


# The names of facts in errors of `require_facts`.
_FACTS = {
    "capacity": "the plan's table of least sizes per rate",
    "engines": "step times of the pools' workers",
    "ttft_s": "a limit on TTFT (slo: ttft)",
    "tpot_s": "a limit on the time between tokens (slo: tbt or tpot)",
    "history": "arrivals of earlier days",
    "rules": "the plan's rules of workers per load",
}

# How to get facts that a user cannot simply give.
_REMEDIES = {
    "capacity": "or give traffic of over 200 requests in its busiest 10 min (each rate of the table is "
    "tested on 200) and, under day: most, workers that carry it"
}


def is_before_traffic(reading: MetricsReading) -> bool:
    """Whether this is the first reading of a run, before any request."""
    if reading.time_s > 0 or reading.limbo:
        return False
    # A pool without workers has NaN for its share of KV.
    gauges = (reading.arrived, reading.waiting, reading.running, np.nan_to_num(reading.kv_frac))
    return not any(gauge.any() for gauge in gauges)


def mean_of(numbers: Floats, pools: Sequence[int]) -> float:
    """The mean over `pools` without NaN; NaN if all are NaN."""
    known_values = [float(numbers[i]) for i in pools if not math.isnan(numbers[i])]
    return sum(known_values) / len(known_values) if known_values else math.nan


def mean_lengths(reading: MetricsReading) -> tuple[float, float]:
    """The mean tokens of prompts and of outputs over all pools; NaN where no request has ended."""
    pools = range(len(reading.ready))
    return mean_of(reading.input_tokens, pools), mean_of(reading.output_tokens, pools)


def least_whole(value: float) -> int:
    """The value rounded up, but down if it is above a whole number only by a rounding error."""
    return math.ceil(value - ROUNDING)


class RecentMaximum:
    """The largest size that was decided for each pool during the last `hold_s`."""

    def __init__(self, hold_s: float) -> None:
        self.hold_s = hold_s
        self.sizes_at: deque[tuple[float, list[int]]] = deque()

    def add(self, time_s: float, sizes: list[int]) -> list[int]:
        """Add a decision; returns the largest sizes (P,) of the last `hold_s`, this decision included."""
        self.sizes_at.append((time_s, sizes))
        # The latest decision stays even if `hold_s` is 0.
        while self.sizes_at[0][0] <= time_s - self.hold_s and len(self.sizes_at) > 1:
            self.sizes_at.popleft()
        sizes_of_pools = zip(*(sizes for _, sizes in self.sizes_at), strict=True)
        return [max(sizes) for sizes in sizes_of_pools]
