"""The master problem: which fleets can serve the traffic at all, and which of these look best. As in Benders
decomposition the master proposes fleets, the simulator decides, and each fleet that fails returns as a cut.

Sets   k  class of requests (Workload)        j  option: a worker type in a role (mixed, prefill, decode)
Data   r_k    requests of class k in the trace                                           [requests]
       u_kj   least seconds one request of k costs a worker of j                         [s]
              (x_kj = 0 where the KV cache of j cannot hold a request of k)
       m_kj   least KV tokens x seconds that a request of k holds on a worker of j       [token s]
       b_k    bytes of the KV blocks of its prompt                                       [bytes]
       c_j    objective of one worker of j (USD/h, W or GPUs)
       M_j    KV tokens of a worker      H  seconds in which all work must be done           [s]
       B      bytes/s of the link        g  share of requests that may miss the SLO (required_work.py)
       a_yj   use of limit y (GPUs of a kind, power, cost) by one worker; A_y the amount of y
       G_k    GPUs of a node of kind k that is sold whole (solvers/whole_nodes.py), g_j GPUs of a worker
              (in G_k, e_k, y_k, i_k and nodes_k the index k is a kind of node, else a class of requests)
       e_k    price of one of its GPUs that no worker uses
       s_j    share of the whole traffic one worker is expected to serve (from level 0)
       n^q    fleets that failed in simulation
Vars   n_j integer >= 0 workers;   y_k integer >= 0 nodes;   i_k >= 0 GPUs of these without a worker
       x_kj >= 0 requests;   d_k >= 0 requests given up
       z_jt in {0, 1}  1 only if n_j >= t, for each t = n^q_j + 1

  objective     min  sum_j c_j n_j + sum_k e_k i_k
  `find_promising_fleet`   max  mixed + pair,   pair <= sum_prefill s_j n_j,   pair <= sum_decode s_j n_j,
                     mixed = sum_mixed s_j n_j,    sum_j c_j n_j + sum_k e_k i_k <= value to beat
  s.t.  served_k      sum_mixed x_kj + sum_prefill x_kj + d_k = r_k
        handed_k      sum_decode x_kj = sum_prefill x_kj
        given_up      sum_k d_k <= g sum_k r_k
        capacity_j    sum_k u_kj x_kj <= H n_j
        memory_j      sum_k m_kj x_kj <= H M_j n_j
        transfer      sum_prefill b_k x_kj <= B H
        some_worker   sum_j n_j >= 1
        demand        sum_j c_j n_j >= R        (R is a bound that sees bursts, from solvers/demand.py)
        nodes_k       i_k = G_k y_k - sum_{j of k} g_j n_j
        whole_k       sum_{j of k} w_r(g_j) n_j <= k_r y_k   (for rows r of whole_nodes.packing_rows)
        limit_y       sum_j a_yj n_j <= A_y         (of money with sum_k e_k i_k, of a stock with its i_k)
        cut_q         sum_j z_j,t >= 1 over t = n^q_j + 1    (more workers of some option than in fleet q)
        more_j        n_j >= sum_t (t - s) z_jt,   order_j  z_jt <= z_js     (s: the t before, 0 at first)

`bound_objective` holds for every policy, because u and m are under-estimates: step times at their cheapest
rate per token, lengths at the smallest of the class. `bound_objective` solves the row `demand` in a program
of its own, without x. `find_promising_fleet` has no x either; the search for mixed fleets
(search/mixed/mixed_fleets.py) simulates the fleets that it proposes.

The letters of step times (f, a, b, d, e, h; N, D, K) are those of planner/models/latency.py. A TraceLengths
(planner/traffic/workload.py) has the U distinct pairs of prompt and output tokens of a trace, and how many
`requests` have each.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pulp

from planner.domain import COST, GPUS, KV_BLOCK_TOKENS, POWER, ROUNDING, FleetLimit, stock_name
from planner.fleet import Role, WorkerType
from planner.models.latency import StepLatency
from planner.models.speculation import least_token_times
from planner.solvers.backend import run_highs, weighted_sum, whole_value
from planner.solvers.required_work import SloWork
from planner.solvers.whole_nodes import Number, PricedNode, idle_gpus, idle_usd_per_h, node_of, packing_rows
from planner.traffic.workload import TraceLengths, Workload

SOLVER_S = 60.0  # The time limit of one program, several times what any took on an idle machine.
# `find_promising_fleet` may end at a fleet whose share is this close to the largest: the shares are guesses.
PROMISE_GAP_FRAC = 0.01
# The best batch size of a decode worker is searched among this many sizes, which rise geometrically from one
# to all seats. Set by hand, as the result is only a guess.
BATCH_SIZES = 64
Floats = npt.NDArray[np.float64]
_IdleGpus = dict[tuple[int, ...], pulp.LpVariable]  # i_k by the indices of the options on nodes of kind k.


@dataclass(frozen=True, slots=True)
class Option:
    """A worker type in a role, and what one worker adds to the objective (USD/h, W or GPUs).

    `node` is set where money is in the objective and the worker's GPUs are part of a node that is sold whole.
    """

    role: Role
    type: WorkerType
    objective: float
    node: PricedNode | None = None

    @property
    def name(self) -> str:
        """The option's name: its role, then its worker type."""
        return f"{self.role} {self.type.name}"


def gpu_usd_per_h(workers: Iterable[tuple[WorkerType, int]]) -> float:
    """The price of the GPUs of these workers, without idle GPUs of nodes."""
    return sum(worker.price_usd_per_h * count for worker, count in workers)


def paid_usd_per_h(workers: Iterable[tuple[WorkerType, int]]) -> float:
    """The price of these workers. Where nodes are sold whole it includes the idle GPUs of the fewest nodes
    that hold the workers.
    """
    present = [(worker, count) for worker, count in workers if count]
    return gpu_usd_per_h(present) + idle_usd_per_h(
        (node_of(worker.gpu), worker.gpus, count) for worker, count in present
    )


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """What a fleet may use: GPUs by name (None: unlimited), Watts, dollars per hour, GPUs in use in all.

    The stock of "h100-80g" is that of rented GPUs, on the spot market too, and that of "h100-80g@owned" of
    the owned ones. A stock and the limit on dollars also count the idle GPUs of nodes that are sold whole.

    With `by_gpu` several LLMs share nodes. Amounts then count only the GPUs in use of this fleet, without
    those of `other_workers`, which serve the other LLMs. `first_exceeded` also tests whether the stock
    has whole nodes for all of these workers together.
    """

    stock: Mapping[str, int | None]
    power_w: float | None = None
    cost_usd_per_h: float | None = None
    gpus: int | None = None
    by_gpu: bool = False
    other_workers: tuple[tuple[WorkerType, int], ...] = ()

    def rows(self) -> list[tuple[FleetLimit, float]]:
        """Every limit that is set, and its amount."""
        rows = [
            (FleetLimit("stock", gpu), float(count)) for gpu, count in self.stock.items() if count is not None
        ]
        for limit, amount in ((POWER, self.power_w), (COST, self.cost_usd_per_h), (GPUS, self.gpus)):
            if amount is not None:
                rows.append((limit, float(amount)))
        return rows

    def without(self, limit: FleetLimit) -> FleetLimits:
        """The same limits, but for this one."""
        stock = {
            gpu: None if limit == FleetLimit("stock", gpu) else count for gpu, count in self.stock.items()
        }
        return replace(
            self,
            stock=stock,
            power_w=None if limit == POWER else self.power_w,
            cost_usd_per_h=None if limit == COST else self.cost_usd_per_h,
            gpus=None if limit == GPUS else self.gpus,
        )

    def use_per_worker(self, limit: FleetLimit, worker: WorkerType) -> float:
        """a_yj: how much of a limit one worker uses; of the limit on cost the price of its own GPUs."""
        if limit.of == "power":
            return worker.power_w
        if limit.of == "cost":
            return worker.price_usd_per_h
        if limit.of == "stock" and limit.gpu != stock_name(worker.gpu.name):
            return 0.0
        return worker.gpus

    def most_workers(self, worker: WorkerType) -> float:
        """Largest number of workers of one type within every limit (may be infinite)."""
        uses = [(amount, self.use_per_worker(limit, worker)) for limit, amount in self.rows()]
        largest = min((np.floor(amount / use + ROUNDING) for amount, use in uses if use > 0), default=np.inf)
        # `use_per_worker` leaves out idle GPUs of nodes, because their number depends on all workers. So
        # `largest` may take more than a limit, and the count is lowered until it fits with idle GPUs.
        if math.isfinite(largest) and self.node_rows() and node_of(worker.gpu) is not None:
            return float(
                largest_that_fits(int(largest), lambda n: self.first_exceeded([(worker, n)]) is None)
            )
        return float(largest)

    def counts_nodes(self, limit: FleetLimit) -> bool:
        """Whether idle GPUs of whole nodes count for this limit too."""
        return limit.of in ("stock", "cost") and not self.by_gpu

    def node_rows(self) -> list[tuple[FleetLimit, float]]:
        """The `rows` that count idle GPUs of whole nodes."""
        return [(limit, amount) for limit, amount in self.rows() if self.counts_nodes(limit)]

    def used(self, limit: FleetLimit, counts: Sequence[tuple[WorkerType, int]]) -> float:
        """How much of a limit these workers use together."""
        return float(self.used_by_each(limit, [(worker, count) for worker, count in counts if count]))

    def used_by_each(self, limit: FleetLimit, counts: Sequence[tuple[WorkerType, Number]]) -> Number | float:
        """Like `used`, also for n fleets at once: each count is then an array (n,)."""
        uses = [(self.use_per_worker(limit, worker), worker, count) for worker, count in counts]
        used = sum(use * count for use, _, count in uses)
        if not self.counts_nodes(limit):
            return used
        is_cost = limit == COST
        pools = [(node_of(worker.gpu), worker.gpus, count) for use, worker, count in uses if is_cost or use]
        return used + (idle_usd_per_h(pools) if is_cost else idle_gpus(pools))

    def fit_on_nodes(self, counts: Sequence[tuple[WorkerType, Floats]]) -> npt.NDArray[np.bool_]:
        """Whether each of n fleets (n,) is within the limits that count idle GPUs of whole nodes; `counts` as
        for `used_by_each`.
        """
        fits = [
            self.used_by_each(limit, counts) <= amount * (1 + ROUNDING) for limit, amount in self.node_rows()
        ]
        return np.asarray(np.all(np.array(fits, bool), axis=0))

    def first_exceeded(self, counts: Sequence[tuple[WorkerType, int]]) -> FleetLimit | None:
        """A limit that these workers exceed; None if they are within all of them."""
        for limit, amount in self.rows():
            if self.used(limit, counts) > amount * (1 + ROUNDING):
                return limit
        if self.by_gpu:
            # A limit is what `other_workers` leave; with their use it is the limit of all LLMs, which
            # counts whole nodes.
            of_all = FleetLimits(self.stock)
            for limit, amount in of_all.rows():
                amount += sum(
                    self.use_per_worker(limit, worker) * count for worker, count in self.other_workers
                )
                if of_all.used(limit, [*counts, *self.other_workers]) > amount * (1 + ROUNDING):
                    return limit
        return None


def largest_that_fits(most: int, fits: Callable[[int], bool]) -> int:
    """The largest of 0, ..., `most` that fits, by bisection. It takes for granted that 0 fits, and that if a
    count fits, so do all smaller ones.
    """
    fitting, too_large = 0, most + 1
    middle = most  # `most` is tested first: in most cases it fits, and the search ends.
    while too_large - fitting > 1:
        if fits(middle):
            fitting = middle
        else:
            too_large = middle
        middle = (fitting + too_large) // 2
    return fitting


def largest_of_each(least: int, most: Floats, fits: Callable[[Floats], npt.NDArray[np.bool_]]) -> Floats:
    """For each of P options the largest count from `least` to `most` (P,) that fits, by bisection; `least` -
    1 where none fits. If a count in `most` is infinite, no limit is set, and `most` is returned.
    """
    if not np.isfinite(most).all():
        return most
    fitting, too_large = np.full(len(most), least - 1.0), np.maximum(most, least - 1.0) + 1
    while (too_large - fitting > 1).any():
        middle = np.maximum(np.floor((fitting + too_large) / 2), least)
        is_open, middle_fits = too_large - fitting > 1, fits(middle)
        fitting = np.where(is_open & middle_fits, middle, fitting)
        too_large = np.where(is_open & ~middle_fits, middle, too_large)
    return fitting


def cheapest_token_s(latency: StepLatency, most_tokens: int) -> float:
    """Least seconds of dense-layer time per token over steps of at most `most_tokens` tokens: min f(N) / N.
    Since f is piecewise linear, the minimum is at one of its knots or at `most_tokens`.
    """
    tokens = np.unique([t for t in (*latency.knots_tokens, most_tokens) if t <= most_tokens])
    return float((latency.step_s(tokens) / tokens).min())


def step_time_lines(worker: WorkerType, most_tokens: int) -> list[tuple[float, float]]:
    """Lines (alpha, beta), alpha >= 0, with alpha + beta N <= f(N) + h for all steps of N up to `most_tokens`
    tokens: the edges of the lower convex hull of f, its least value, and the steepest line through the
    origin.
    """
    latency = worker.latency
    tokens = np.unique([1.0, *(t for t in latency.knots_tokens if 1 < t < most_tokens), most_tokens])
    hull: list[tuple[float, float]] = []  # Points (N, f(N)), with slopes that rise from left to right.
    for point in zip(tokens.tolist(), latency.step_s(tokens).tolist(), strict=True):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    through_origin = (0.0, cheapest_token_s(latency, most_tokens))
    level_line = (hull[0][1], 0.0)  # At the value of f for one token.
    lines = [through_origin, level_line]
    for left, right in itertools.pairwise(hull):
        beta = _slope(left, right)
        if (alpha := left[1] - beta * left[0]) > 0:
            lines.append((alpha, beta))
    return lines


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    """The slope of the line through two points."""
    return (right[1] - left[1]) / (right[0] - left[0])


def recompute_break_even_tokens(latency: StepLatency, token_s: float) -> float:
    """The context (tokens) from which on decoding a token takes no longer than recomputing all tokens before
    it.

    A preempted request recomputes its whole context c, at `token_s` per token, and gets its next token with
    that: token_s c + a c (c + 1) / 2 + e seconds instead of token_s + b + d c. In small steps another token
    takes no time (token_s = 0), and recomputing is cheaper as long as c is below about 2 d / a.
    """
    # Recomputing less decoding takes quadratic c^2 + linear c + constant seconds.
    quadratic, linear = latency.a_s / 2, token_s + latency.a_s / 2 - latency.d_s
    constant = latency.e_s - latency.b_s - token_s
    if quadratic == 0:
        if linear > 0:
            return max(-constant / linear, 0.0)
        is_never_negative = linear == 0 and constant >= 0
        return 0.0 if is_never_negative else np.inf
    # Beyond its larger root the polynomial is positive, so recomputing takes longer. Without a root it is
    # always positive.
    discriminant = linear * linear - 4 * quadratic * constant
    return 0.0 if discriminant <= 0 else max((np.sqrt(discriminant) - linear) / (2 * quadratic), 0.0)


def attention_s(
    latency: StepLatency, token_s: float, input_tokens: Floats, gaps: Floats, *, is_cached: bool = False
) -> Floats:
    """Least seconds (U,) of the terms b D + d K for the decodes of these requests, if a request may be
    preempted and recompute its context in place of a decode.

    With prefix caches (`is_cached`) a preempted request finds its prompt cached and recomputes what it has
    generated. For a lower bound a gap counts only if recomputing there would take longer than decoding.
    `gaps` (U,) is the number of tokens after the first; `token_s` is what a token costs at least
    (`cheapest_token_s`).
    """
    first: Floats = np.ones_like(gaps)  # The number of the first gap that counts; all later ones count too.
    if is_cached:
        # At the g-th gap at least g tokens are recomputed, with g^2 / 2 pairs. That takes longer than
        # decoding if a g^2 / 2 >= d g for the pairs, and (g - 1) token_s >= b - e for the other terms.
        if latency.a_s > 0:
            least_gap = 2 * latency.d_s / latency.a_s
        else:
            least_gap = np.inf if latency.d_s > 0 else 0.0
        decode_less_prefill_s = latency.b_s - latency.e_s
        if decode_less_prefill_s > 0:
            least_gap = max(least_gap, 1 + decode_less_prefill_s / token_s if token_s > 0 else np.inf)
        first = np.full_like(gaps, max(np.ceil(least_gap), 1.0))
    else:
        is_dearer = input_tokens + 1 >= recompute_break_even_tokens(latency, token_s)
        first = np.where(is_dearer, first, np.inf)
    counted_gaps = np.maximum(gaps - first + 1, 0.0)
    mean_context = input_tokens + (np.minimum(first, gaps) + gaps) / 2
    return np.asarray(counted_gaps * (latency.b_s + latency.d_s * mean_context))


def fits_kv_cache(
    option: Option, input_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike
) -> npt.NDArray[np.bool_]:
    """Whether requests of these lengths fit into a worker's KV cache to their last token. Other requests are
    never sent to it.
    """
    tokens = np.asarray(input_tokens, float) + np.asarray(output_tokens, float)
    return np.asarray(np.ceil(tokens / KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS <= option.type.kv_tokens)


def most_step_tokens(option: Option) -> int:
    """The most tokens of one step of a worker: its token budget (max_num_batched_tokens), or for a worker
    that only decodes the tokens of its seats (max_num_seqs).
    """
    worker = option.type.as_one
    return (
        worker.max_num_seqs * worker.step_tokens if option.role == "decode" else worker.max_num_batched_tokens
    )


def least_seconds(
    option: Option,
    input_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    cached_tokens: npt.ArrayLike = 0.0,
    *,
    is_cached: bool = False,
) -> Floats:
    """u: least seconds of work that requests of these lengths bring to one worker of `option`.

    A step of N tokens costs at least N min f(N)/N; the terms of pairs, sequences, KV tokens and prefills are
    added as they are. On a mixed worker both phases share the token budget; on a decode worker a step has at
    most max_num_seqs tokens and their drafts. A pipeline of pp stages has up to pp steps under way, so a
    step costs the worker 1 / pp of its time. `cached_tokens` of the prompts hit a prefix cache; with
    `is_cached` a preempted request may find its prompt in the cache.
    """
    worker = option.type.as_one  # All data-parallel ranks as one engine (planner/fleet.py).
    latency = least_token_times(worker.latency, worker.speculation)
    # A prompt has n tokens, of which c are cached. An answer of m tokens has m - 1 gaps between them.
    n, gaps = np.asarray(input_tokens, float), np.asarray(output_tokens, float) - 1
    c = np.asarray(cached_tokens, float)
    token_s = cheapest_token_s(latency, most_step_tokens(option))
    prefill_s = token_s * (n - c) + latency.a_s * (n * (n + 1) - c * (c + 1)) / 2 + latency.e_s
    if option.role == "prefill":
        return np.asarray(prefill_s / worker.pp)
    finds_prompt = is_cached and option.role == "mixed"  # Decode workers keep no prefixes.
    decode_s = gaps * token_s + attention_s(latency, token_s, n, gaps, is_cached=finds_prompt)
    return np.asarray((decode_s if option.role == "decode" else prefill_s + decode_s) / worker.pp)


def least_prefill_s(worker: WorkerType, tokens: Floats) -> Floats:
    """Least seconds of consecutive steps that compute this many `tokens` (n,) of a prompt, in chunks of any
    size. Each line of `step_time_lines` is a lower bound, and we take the largest.
    """
    budget, latency = worker.max_num_batched_tokens, worker.latency
    by_line = [
        alpha * np.ceil(tokens / budget) + beta * tokens for alpha, beta in step_time_lines(worker, budget)
    ]
    return np.asarray(np.max(by_line, axis=0) + latency.e_s + latency.a_s * tokens * (tokens + 1) / 2)


def least_token_seconds(
    option: Option,
    input_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    shared_tokens: npt.ArrayLike = 0.0,
    *,
    is_cached: bool = False,
) -> Floats:
    """m: least KV tokens x seconds that requests of these lengths hold on a worker of `option`.

    `shared_tokens` of the prompts may stand in the prefix cache for other requests too, so they are not
    counted. Decode workers have no such cache and hold whole prompts. A gap lasts at least as long as a step
    with one decode, or as one that recomputes a preempted request. With drafts several tokens share the time
    of a step.
    """
    latency = least_token_times(option.type.latency, option.type.speculation)
    n, gaps = np.asarray(input_tokens, float), np.asarray(output_tokens, float) - 1
    own_tokens = n if option.role == "decode" else n - np.asarray(shared_tokens, float)
    if option.role == "prefill":
        # The tokens of a prompt are computed one after the other, so on average half of them are held.
        return np.asarray(own_tokens / 2 * least_prefill_s(option.type, own_tokens) / option.type.pp)
    step_s = latency.step_s(1) + np.zeros_like(n)  # (U,) A step of one token.
    if not is_cached or option.role == "decode":
        is_decoded = n + 1 >= recompute_break_even_tokens(latency, 0.0)
        step_s += np.where(is_decoded, latency.b_s + latency.d_s * (n + 1), 0.0)
    return np.asarray((own_tokens + gaps / 2) * gaps * step_s / option.type.step_tokens)


@lru_cache(maxsize=2048)  # The searches of one question need the same numbers many times.
def least_workers(option: Option, lengths: TraceLengths, slo_work: SloWork) -> int:
    """The fewest workers of one option alone that can do in time, under any policy, the work that the SLO
    requires; at least one.
    """
    return max(int(np.ceil(busy_workers(option, lengths, slo_work) - ROUNDING)), 1)


def busy_workers(option: Option, lengths: TraceLengths, slo_work: SloWork) -> float:
    """How many workers of one option alone the SLO's work (required_work.py) keeps busy, with fractions of a
    worker.

    This is a lower bound: the requests that may be late are taken to be those with the most work, chosen
    anew for prefill, for the whole work and for memory.
    """
    n, output = lengths.input_tokens, lengths.output_tokens

    def least_sum(costs: Floats, share: float) -> float:
        """The sum of the costs (U,) over the cheapest `share` of the requests."""
        order = np.argsort(costs, kind="stable")
        requests = lengths.requests[order]
        served = np.ceil(share * requests.sum() - ROUNDING)
        cheaper_requests = np.cumsum(requests) - requests
        # The `served` cheapest requests are counted: of each pair of lengths as many as the cheaper pairs
        # leave of this number.
        counted = np.clip(served - cheaper_requests, 0, requests)
        return float((costs[order] * counted).sum())

    workers = 0.0
    if slo_work.prefill_frac > 0:
        one_token = np.ones_like(n)  # The work up to the first token, which the prefill generates.
        prefill_s = least_seconds(option, n, one_token, lengths.cached_tokens)
        workers = max(workers, least_sum(prefill_s, slo_work.prefill_frac) / slo_work.prefill_s)
    if slo_work.whole_frac > 0:
        cached = lengths.is_cached
        whole_s = least_seconds(option, n, output, lengths.cached_tokens, is_cached=cached)
        token_seconds = least_token_seconds(option, n, output, lengths.shared_tokens, is_cached=cached)
        token_seconds /= option.type.dp * option.type.kv_tokens
        workers = max(workers, least_sum(whole_s, slo_work.whole_frac) / slo_work.whole_s)
        workers = max(workers, least_sum(token_seconds, slo_work.whole_frac) / slo_work.whole_s)
    return workers


def full_workers(option: Option, lengths: TraceLengths, seconds: float) -> float:
    """How many decode workers generate all tokens in this many seconds if all their seats are always taken.
    It is a guess, not a bound, since all contexts are taken to be the mean one.
    """
    tokens, context = _decoded_tokens(lengths)
    if not tokens:
        return 0.0
    worker_tokens_per_s = _tokens_per_s(option, context, _seats(option, context))
    return tokens / seconds / worker_tokens_per_s


def fewest_decode_workers(option: Option, lengths: TraceLengths, seconds: float) -> float:
    """The fewest decode workers that could have admitted all of these requests after this many seconds.

    Until then each worker generates tokens as fast as at its best batch size. At the end all its seats are
    taken by requests that have not generated a token yet. It is a guess for a pool that is loaded evenly.
    """
    tokens, context = _decoded_tokens(lengths)
    if not tokens:
        return 0.0
    seats = max(_seats(option, context), 1.0)
    most_tokens_per_s = max(
        _tokens_per_s(option, context, batch) for batch in np.geomspace(1.0, seats, BATCH_SIZES)
    )
    gaps = lengths.output_tokens - 1
    # The mean output of a request that has a seat: each request is weighed by its length, because long
    # outputs keep their seats longer.
    seated_tokens = float((lengths.requests * gaps * gaps).sum()) / tokens
    return tokens / (most_tokens_per_s * seconds + seats * seated_tokens)


def _decoded_tokens(lengths: TraceLengths) -> tuple[float, float]:
    """How many tokens decode workers generate, and the mean context (tokens) of these."""
    n, gaps = lengths.input_tokens, lengths.output_tokens - 1
    tokens = float((lengths.requests * gaps).sum())
    contexts_sum = float((lengths.requests * gaps * (n + gaps / 2)).sum())
    return tokens, contexts_sum / max(tokens, 1.0)  # 0 / 1 if nothing is decoded.


def _seats(option: Option, context: float) -> float:
    """How many requests with `context` KV tokens each a worker can run at once: its seats."""
    return min(float(option.type.as_one.max_num_seqs), option.type.dp * option.type.kv_tokens / context)


def _tokens_per_s(option: Option, context: float, requests: float) -> float:
    """Tokens that a worker generates per second if this many requests (at least 1) run on it, each with
    `context` KV tokens.
    """
    worker = option.type.as_one
    # A pipeline has pp steps under way, each with its share of the requests.
    batch = max(requests / worker.pp, 1.0)
    latency = worker.latency
    step_s = float(latency.step_s(batch)) + batch * (latency.b_s + latency.d_s * context)
    return batch * worker.pp / step_s


@dataclass(frozen=True, slots=True, eq=False)
class TrafficLoad:
    """What the traffic demands of any fleet: its requests by class, how much of their work the SLO requires
    by when, and the bytes that a hand-off moves. `is_cached` says that workers have prefix caches.
    """

    workload: Workload
    slo_work: SloWork
    kv_bytes_per_token: float
    link_bytes_per_s: float
    is_cached: bool = False


def bound_objective(
    options: Sequence[Option],
    load: TrafficLoad,
    limits: FleetLimits,
    *,
    at_least: float = 0.0,
    deadline: float = math.inf,
) -> float | None:
    """Least objective that any fleet of these options needs under any policy; None if no fleet is within the
    limits.

    `at_least` is the caller's bound from solvers/demand.py; it is raised to that of whole workers. If the SLO
    requires nothing beyond prefill, decode work does not count. Each run of the solver has SOLVER_S, and all
    end at `deadline` on time.monotonic's clock. If time runs out, the best bound proved so far is returned.
    """

    def left_s() -> float:
        """The time limit of the next run of the solver; 0 or less if the time is over."""
        return min(SOLVER_S, deadline - time.monotonic())

    proved = at_least
    if at_least > 0 and left_s() > 0:
        # The row `demand` is solved without x, which takes little time.
        program = _build_fleet_program("demand", options, limits)
        program.problem += program.workers_cost + program.idle_cost, "objective"
        program.problem += program.workers_cost >= at_least, "demand"
        outcome = run_highs(program.problem, time_limit_s=left_s())
        if outcome.status == "infeasible":
            return None
        proved = max(at_least, outcome.bound or 0.0)
    # The relaxation without integers is solved only if the integer program proved nothing in time.
    for is_integer in (True, False):
        if left_s() <= 0:
            break
        program = _build_fleet_program("bound", options, limits, is_integer=is_integer)
        program.problem += program.workers_cost + program.idle_cost, "objective"
        _add_work_rows(program, options, load)
        # The time may have run out while the program was built.
        outcome = run_highs(program.problem, time_limit_s=max(left_s(), 0.0))
        if outcome.status == "infeasible":
            return None
        if outcome.bound is not None:  # Proved by the solver; rounding leaves it a little below the optimum.
            return max(outcome.bound, proved)
    return proved


def shadow_prices(
    options: Sequence[Option], load: TrafficLoad, limits: FleetLimits, *, time_limit_s: float = SOLVER_S
) -> dict[FleetLimit, float]:
    """How much the bound falls with one GPU, Watt or USD/h more of each limit: the duals of limit_y in
    `bound_objective` without integers and without `demand`. Empty if there are no limits, or no fleet within
    them.
    """
    if not limits.rows():
        return {}
    program = _build_fleet_program("shadow", options, limits, is_integer=False)
    for n_j in program.n:
        # This upper bound follows from the limits, and the solver might give it the dual of a limit.
        n_j.upBound = None
    program.problem += program.workers_cost, "objective"
    _add_work_rows(program, options, load)
    if run_highs(program.problem, time_limit_s=time_limit_s).status != "optimal":
        return {}
    duals = {row.name: row.pi or 0.0 for row in program.problem.constraints()}
    # More of a limit never makes a fleet dearer, so a dual above 0 is rounding. `or 0.0` turns -0.0 into 0.0.
    return {limit: max(-duals[f"limit_{y}"], 0.0) or 0.0 for y, (limit, _) in enumerate(limits.rows())}


def find_promising_fleet(
    options: Sequence[Option],
    shares: Sequence[float],
    limits: FleetLimits,
    *,
    below_value: float | None,
    cuts: Sequence[Sequence[int]],
    count_iterations: Callable[[int], None] = lambda _: None,
) -> tuple[tuple[int, ...], float] | None:
    """The fleet whose value is at most `below_value` (None: any) and that is expected to serve the largest
    share of the traffic, as workers per option, and that share. `shares` are s_j, `cuts` the fleets n^q. None
    if limits and cuts exclude all fleets; an empty fleet with share 0 if time runs out. `count_iterations`
    is told the solver's iterations.
    """
    program = _build_fleet_program("promising", options, limits, cuts)
    problem = program.problem
    pair = problem.add_variable("pair", 0)
    served = list(zip(options, shares, program.n, strict=True))
    share_of_role = {
        role: pulp.lpSum(s * n_j for option, s, n_j in served if option.role == role)
        for role in ("mixed", "prefill", "decode")
    }
    problem += share_of_role["mixed"] + pair, "share"
    problem += pair <= share_of_role["prefill"], "pair_prefill"
    problem += pair <= share_of_role["decode"], "pair_decode"
    if below_value is not None:
        problem += program.workers_cost + program.idle_cost <= below_value, "value_to_beat"
    problem.sense = pulp.LpMaximize
    outcome = run_highs(problem, time_limit_s=SOLVER_S, gap_frac=PROMISE_GAP_FRAC, is_small=True)
    count_iterations(outcome.iterations)
    if outcome.status == "infeasible":
        return None
    if outcome.status not in ("optimal", "feasible"):
        return tuple(0 for _ in options), 0.0
    return tuple(whole_value(n_j) for n_j in program.n), float(pulp.value(problem.objective))


@dataclass(slots=True)
class _FleetProgram:
    """A program over fleets: the variables n_j, and the two parts of the objective, sum_j c_j n_j and
    sum_k e_k i_k. Whoever builds one adds the objective and further rows to `problem`.
    """

    problem: pulp.LpProblem
    n: list[pulp.LpVariable]
    workers_cost: pulp.LpAffineExpression
    idle_cost: pulp.LpAffineExpression


def _build_fleet_program(
    name: str,
    options: Sequence[Option],
    limits: FleetLimits,
    cuts: Sequence[Sequence[int]] = (),
    *,
    is_integer: bool = True,
) -> _FleetProgram:
    """The variables n_j with the rows nodes_k, whole_k, limit_y, cut_q, more_j and order_j.

    Without integers there are no idle GPUs, since fractions of nodes would leave none. In the objective the
    price of idle GPUs is that of `Option.node` (None: the objective is not money); the limit on cost always
    counts dollars.
    """
    problem = pulp.LpProblem(name)
    most = [limits.most_workers(option.type) for option in options]
    n = [
        problem.add_variable(
            f"n_{j}",
            0,
            most[j] if np.isfinite(most[j]) else None,
            cat="Integer" if is_integer else "Continuous",
        )
        for j in range(len(options))
    ]
    nodes = [node_of(option.type.gpu) if is_integer else None for option in options]
    idle_of: _IdleGpus = {}
    for y, (limit, amount) in enumerate(limits.rows()):
        uses = [limits.use_per_worker(limit, option.type) for option in options]
        use = pulp.lpSum(a * n_j for a, n_j in zip(uses, n, strict=True) if a)
        if limits.counts_nodes(limit):
            if limit == COST:
                use = use + _sum_idle_cost(_add_idle_gpus(problem, n, options, nodes, idle_of), nodes)
            else:
                of_stock = [node if a else None for node, a in zip(nodes, uses, strict=True)]
                use = use + pulp.lpSum(_add_idle_gpus(problem, n, options, of_stock, idle_of).values())
        problem += use <= amount, f"limit_{y}"
    _add_cut_rows(problem, n, most, cuts)
    workers_cost = pulp.lpSum(option.objective * n_j for option, n_j in zip(options, n, strict=True))
    idle_cost = pulp.lpSum([])
    if any(option.node is not None for option in options):
        idle_gpus_of_kind = _add_idle_gpus(problem, n, options, nodes, idle_of)
        idle_cost = _sum_idle_cost(idle_gpus_of_kind, [option.node for option in options])
    return _FleetProgram(problem, n, workers_cost, idle_cost)


def _add_cut_rows(
    problem: pulp.LpProblem,
    n: Sequence[pulp.LpVariable],
    most: Sequence[float],
    cuts: Sequence[Sequence[int]],
) -> None:
    """The variables z_jt with the rows more_j, order_j and cut_q. `most` are the largest n_j: a threshold
    above them cannot be reached.
    """
    z: dict[tuple[int, int], pulp.LpVariable] = {}
    for j, n_j in enumerate(n):
        thresholds = sorted({failed[j] + 1 for failed in cuts if failed[j] + 1 <= most[j]})
        for t in thresholds:
            z[j, t] = problem.add_variable(f"z_{j}_{t}", 0, 1, cat="Integer")
        if thresholds:
            steps = [(t - s, z[j, t]) for s, t in itertools.pairwise((0, *thresholds))]
            problem += n_j >= pulp.lpSum(step * z_jt for step, z_jt in steps), f"more_{j}"
        for s, t in itertools.pairwise(thresholds):
            problem += z[j, t] <= z[j, s], f"order_{j}_{t}"
    for q, failed in enumerate(cuts):
        more = [z[j, failed_j + 1] for j, failed_j in enumerate(failed) if (j, failed_j + 1) in z]
        problem += pulp.lpSum(more) >= 1, f"cut_{q}"


def _add_idle_gpus(
    problem: pulp.LpProblem,
    n: Sequence[pulp.LpVariable],
    options: Sequence[Option],
    node_of_option: Sequence[PricedNode | None],
    idle_of: _IdleGpus,
) -> _IdleGpus:
    """For each kind k of node the variable i_k by the indices of the options on such nodes. Those that are
    not in `idle_of` yet are added to it, with y_k and the rows nodes_k and whole_k.
    """
    kinds: dict[str, tuple[PricedNode, list[int]]] = {}
    for j, node in enumerate(node_of_option):
        if node is not None:
            kinds.setdefault(node.kind, (node, []))[1].append(j)
    for node, of_kind in kinds.values():
        if (key := tuple(of_kind)) in idle_of:
            continue
        k = len(idle_of)
        y = problem.add_variable(f"y_{k}", 0, cat="Integer")
        idle_of[key] = idle = problem.add_variable(f"i_{k}", 0)
        used_gpus = pulp.lpSum(options[j].type.gpus * n[j] for j in of_kind)
        problem += idle == node.gpus * y - used_gpus, f"nodes_{k}"  # Nodes of a kind have equally many GPUs.
        sizes = {j: options[j].type.gpus for j in of_kind}
        # The first row counts GPUs, as nodes_k does.
        for r, (weights, per_node) in enumerate(
            packing_rows(node.gpus, tuple(sorted(set(sizes.values()))))[1:]
        ):
            packed = pulp.lpSum(int(weights[size]) * n[j] for j, size in sizes.items() if weights[size])
            problem += packed <= per_node * y, f"whole_{k}_{r}"
    return {tuple(of_kind): idle_of[tuple(of_kind)] for _, of_kind in kinds.values()}


def _sum_idle_cost(
    idle_of: _IdleGpus, node_of_option: Sequence[PricedNode | None]
) -> pulp.LpAffineExpression:
    """sum_k e_k i_k, for the i_k that `_add_idle_gpus` returns. If the options of one kind of node have
    several prices, e_k is the lowest, so that a lower bound stays a bound; without a price e_k is 0.
    """
    terms = []
    for of_kind, idle in idle_of.items():
        nodes = [node_of_option[j] for j in of_kind]
        least_usd_per_h = min((node.idle_usd_per_h for node in nodes if node is not None), default=0.0)
        terms.append(least_usd_per_h * idle)
    return pulp.lpSum(terms)


def _add_work_rows(program: _FleetProgram, options: Sequence[Option], load: TrafficLoad) -> None:
    """The variables x and d, with the rows served_k, handed_k, given_up, capacity_j, memory_j, transfer and
    some_worker.
    """
    problem, n = program.problem, program.n
    workload, slo_work, is_cached = load.workload, load.slo_work, load.is_cached
    classes, numbers = range(len(workload)), range(len(options))  # k and j of the module's docstring.
    inputs, outputs = workload.min_input_tokens, workload.min_output_tokens
    horizon_s, served_frac = slo_work.whole_s, slo_work.whole_frac
    # If the SLO requires nothing beyond prefill, every request ends with its first token.
    if served_frac == 0:
        outputs = np.ones_like(outputs)
        horizon_s, served_frac = slo_work.prefill_s, slo_work.prefill_frac
    given_up_frac = 1.0 - served_frac
    problem += pulp.lpSum(n) >= 1, "some_worker"
    # The most prompt tokens that may hit a prefix cache, and that several requests may share in the KV cache.
    cached, shared = inputs - workload.min_uncached_tokens, inputs - workload.min_own_tokens
    u = np.array([least_seconds(o, inputs, outputs, cached, is_cached=is_cached) for o in options])
    m = np.array([least_token_seconds(o, inputs, outputs, shared, is_cached=is_cached) for o in options])
    # A request of one token ends on its prefill worker, so nothing is handed off.
    b = np.ceil(inputs / KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS * load.kv_bytes_per_token * (outputs > 1)
    # A request must fit with its whole answer, even where the SLO requires only its prefill.
    fits_cache = np.array([fits_kv_cache(o, inputs, workload.min_output_tokens) for o in options])
    x = [
        [problem.add_variable(f"x_{k}_{j}", 0, None if fits_cache[j, k] else 0) for j in numbers]
        for k in classes
    ]
    d = [problem.add_variable(f"d_{k}", 0) for k in classes]
    of_role = {
        role: [j for j in numbers if options[j].role == role] for role in ("mixed", "prefill", "decode")
    }
    for k in classes:
        served = pulp.lpSum(x[k][j] for j in of_role["mixed"] + of_role["prefill"])
        problem += served + d[k] == int(workload.requests[k]), f"served_{k}"
        handed = pulp.lpSum(x[k][j] for j in of_role["decode"]) - pulp.lpSum(
            x[k][j] for j in of_role["prefill"]
        )
        problem += handed == 0, f"handed_{k}"
    problem += pulp.lpSum(d) <= given_up_frac * int(workload.requests.sum()), "given_up"
    for j in numbers:
        # Rows are divided by the horizon, so that the coefficients are workers, not seconds.
        work = weighted_sum((x[k][j], u[j, k] / horizon_s) for k in classes)
        problem += work <= n[j], f"capacity_{j}"
        kv_in_use = weighted_sum(
            (x[k][j], m[j, k] / horizon_s / (options[j].type.dp * options[j].type.kv_tokens)) for k in classes
        )
        problem += kv_in_use <= n[j], f"memory_{j}"
    if of_role["prefill"]:
        moved = weighted_sum(
            (x[k][j], b[k] / load.link_bytes_per_s / horizon_s) for k in classes for j in of_role["prefill"]
        )
        problem += moved <= 1, "transfer"
