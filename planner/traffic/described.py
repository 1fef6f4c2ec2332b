"""Traffic without a trace: a description, and requests drawn from it.

    description = Description(rate_rps=(30.0,), duration_s=900.0, input=Lognormal(1500, 1.0), output=...)
    draw_requests(description, seed=0)

Requests come from clients, as ServeGen finds them in production (Xiang et al. 2025, arXiv:2505.09999): a few
clients send most of the requests. Each client sends in bursts of its own (Gamma gaps), at a rate that moves
over minutes, and with lengths of its own. So the bursts of the largest clients make the sum burstier than a
Poisson process.

If the burstiness of the sum is given (`gap_cv`, `fano`), the arrivals of the sum are drawn first and then
dealt out to the clients. The sum's gaps are Gamma distributed with a coefficient of variation cv = `gap_cv`,
on a clock that ticks once per expected request. The rate is a product of independent factors, one for each
time scale tau, and so moves over time. Each factor is constant over blocks of tau, which begin at a random
phase; it is Gamma distributed, with mean 1 and variance sigma_tau^2. The mean of the product over a window T
has the variance

    v(T) = 2 / T^2 * int_0^T (T - x) * (prod_tau (1 + sigma_tau^2 * max(0, 1 - x / tau)) - 1) dx

and the counts of requests in windows T have the Fano factor (variance / mean)  F(T) = cv^2 + rate * T * v(T).
The sigmas are fitted to the factors that are given in `fano`.

Bursts only move requests within an interval of the rate curve. So after bursts are drawn, the rate of each
interval is scaled to the number of requests that the curve says (`_curve_corrections`).

SciPy is imported within the functions that use it, because the import takes a tenth of a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS, ROUNDING
from planner.errors import InputError
from planner.traffic.agents import Agents, draw_agents
from planner.traffic.lengths import Lengths
from planner.traffic.trace import (
    MOST_MEAN_IDS,
    FloatArray,
    IntArray,
    Trace,
    index_ranges,
    no_edges,
    sort_waits,
)
from planner.units import DAY_S

# The most requests of one description, and the most block ids of all its prompts together.
MOST_DRAWN = 20_000_000
MOST_IDS = 20_000_000
# A client's rate, relative to its mean, has the variance CLIENT_RATE_VAR on each time scale of CLIENT_RATE_S;
# both are set by hand. If burstiness is given, these rates only decide which client sends a request.
CLIENT_RATE_VAR = 0.25
CLIENT_RATE_S = (60.0, 600.0)
# Time is cut into cells in which a rate is constant. The rates of clients have at most CLIENT_CELLS cells,
# each of at least CLIENT_CELL_S: one matrix holds all clients and cells.
CLIENT_CELLS, CLIENT_CELL_S = 5_000, 5.0
MOST_BURST_CELLS = 400_000  # Bursts of the sum have finer cells, at most this many: a few MB of memory.
# The shortest window of a Fano factor has this many cells, so that it can hold bursts shorter than itself.
CELLS_PER_WINDOW = 6
# The sigmas are corrected in FIT_ROUNDS rounds; each measures a rate that is drawn on FIT_CELLS cells.
FIT_ROUNDS, FIT_CELLS = 6, 400_000
LEAST_VARIANCE = 1e-6  # Factors with at most this variance are left out.
# Sessions begin to be drawn WARM_SESSIONS mean session lengths before time 0, but at most LONGEST_WARM_S, so
# that as many are under way at time 0 as later: few sessions last longer than five times the mean.
WARM_SESSIONS, LONGEST_WARM_S = 5.0, DAY_S
# Without a duration traffic lasts about USUAL_REQUESTS at its busiest rate, within these two bounds.
USUAL_REQUESTS, USUAL_LEAST_S, USUAL_MOST_S = 10_000, 300.0, 3600.0
LEAST_DRAWN = 20  # Fewer requests say nothing about percentiles.
# Each kind of draw seeds its generator with a number of its own and the user's seed, so that two kinds never
# draw the same random numbers.
CLIENT_STREAM, TENANT_STREAM = 20, 21
# Probabilities stay this far from 0 and 1, because normal scores are infinite there.
_TINY_FRAC = 1e-12
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Clients:
    """The k-th of `count` clients sends a share of the requests in proportion to k^-skew.

    Gaps between the requests of a client have the coefficient of variation `gap_cv`. `lengths_frac` is the
    share of the variance of lengths that lies between the means of clients.
    """

    count: int = 100
    skew: float = 1.2
    gap_cv: float = 2.0
    lengths_frac: float = 0.1

    def rate_shares(self) -> FloatArray:
        """(count,): the share of the requests that each client sends, the largest first."""
        weights = np.arange(1.0, self.count + 1) ** -self.skew
        return np.asarray(weights / weights.sum())


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations of `turns` requests on average (geometric). Between an answer and the next turn lie
    `think_s` on average (exponential). The prompt of a turn holds all earlier prompts and answers; a session
    ends before a prompt and its answer would exceed `most_tokens`.
    """

    turns: float
    think_s: float
    most_tokens: int = 131_072


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A prompt begins with one of `count` texts of `tokens` tokens, the k-th in proportion to k^-skew."""

    tokens: int
    count: int = 1
    skew: float = 0.0


@dataclass(frozen=True, slots=True)
class WrittenDescription:
    """The part of a description that the files of a plan keep: how many agents work at once, None if the
    traffic is not of agents.
    """

    agent_count: int | None


@dataclass(frozen=True, slots=True)
class Description:
    """Traffic without a trace: rates, lengths, bursts and sharing, from which requests are drawn.

    `rate_rps` are requests/s in intervals of `every_s`; one number is a constant rate. If `duration_s` is
    shorter than this curve, the curve's busiest part is drawn; if it is longer, the curve begins again.
    `growth` is a factor on all rates. `input` are the tokens of prompts, or in sessions the tokens that a
    turn adds.

    `joint` is the rank correlation of input and output. A `joint_table` replaces it: counts of requests by
    classes of input (rows, the shortest first) and of output (columns). `drift` has two rows, for inputs and
    outputs: by how many standard deviations (of normal scores) the lengths in each interval of the curve lie
    above the mean. `fano` are rows (window [s], variance / mean of counts).

    `name` is the trace's name, `basis` the assumptions that its notes list.

    `is_rate_assumed`: the question names no rate, as the objective throughput looks for it.
    `has_usual_duration`: at another rate the duration is the usual one of that rate (usual_duration_s). This
    is set with objective throughput if the question names no duration.

    `by_tenant` has tenants whose requests differ in kind: names, each with a description of its own. Each
    tenant is drawn by itself, at `growth` times its rate. Then `rate_rps` is the sum of their rates,
    `duration_s` holds for all, and the other fields are not used. `tenants` is the number of tenants whose
    requests are alike.
    """

    rate_rps: tuple[float, ...]
    duration_s: float
    input: Lengths
    output: Lengths
    every_s: float = 3600.0
    growth: float = 1.0
    joint: float = 0.0
    joint_table: tuple[tuple[float, ...], ...] = ()
    drift: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    gap_cv: float | None = None
    fano: tuple[tuple[float, float], ...] = ()
    clients: Clients = Clients()
    sessions: Sessions | None = None
    prefixes: Prefixes | None = None
    agents: Agents | None = None  # In place of arrivals at a rate; `input` is then what a turn adds.
    tenants: int = 1
    by_tenant: tuple[tuple[str, Description], ...] = ()
    is_rate_assumed: bool = False
    has_usual_duration: bool = False
    most_tokens: int = 0  # A prompt and its answer are cut to this many tokens together; 0: no limit.
    name: str = "described traffic"
    basis: tuple[str, ...] = ()

    @property
    def mean_rps(self) -> float:
        """The mean rate over the part of the curve that is drawn, with growth."""
        return float(self.expected_requests(np.array([0.0, self.duration_s])).sum()) / self.duration_s

    def at_rate(self, rate_rps: float) -> Description:
        """The same traffic at another mean rate; Fano factors change as F(T) in the module's docstring."""
        check_rate(rate_rps)
        factor = rate_rps / self.mean_rps
        if factor == 1:
            return self
        scaled = self._scaled_by(factor)
        return replace(scaled, duration_s=usual_duration_s(rate_rps)) if self.has_usual_duration else scaled

    def _scaled_by(self, factor: float) -> Description:
        """The same traffic at `factor` times the rate; F(T) - cv^2 is proportional to the rate."""
        squared_cv = self.squared_gap_cv
        fano = tuple((window_s, squared_cv + (value - squared_cv) * factor) for window_s, value in self.fano)
        return replace(self, growth=self.growth * factor, fano=fano)

    @property
    def squared_gap_cv(self) -> float:
        """cv^2 in the module's docstring; that of a Poisson process, 1, if no `gap_cv` is given."""
        return 1.0 if self.gap_cv is None else self.gap_cv**2

    @property
    def agent_count(self) -> int | None:
        """How many agents work at once, with growth; None if the traffic is not of agents."""
        return None if self.agents is None else max(round(self.agents.count * self.growth), 1)

    @property
    def is_curve(self) -> bool:
        """Whether the rate changes over time."""
        return len(set(self.rate_rps)) > 1

    def expected_requests(self, edges_s: FloatArray) -> FloatArray:
        """Expected requests between neighbouring `edges_s`, times since the start of what is drawn."""
        # The edges of the curve's intervals, and the requests expected until each edge.
        within_s = self.every_s * np.arange(len(self.rate_rps) + 1)
        requests = np.concatenate(([0.0], np.cumsum(self.rate_rps))) * self.every_s * self.growth
        laps, rest_s = np.divmod(edges_s + self.from_s(), within_s[-1])
        return np.diff(laps * requests[-1] + np.interp(rest_s, within_s, requests))

    def from_s(self) -> float:
        """When the part of the curve that is drawn begins, in seconds from the start of the curve.

        If the curve is longer than `duration_s`, its busiest part that begins with an interval is drawn.
        """
        intervals = len(self.rate_rps)
        drawn = math.ceil(self.duration_s / self.every_s - ROUNDING)  # The number of intervals to draw.
        if not self.is_curve or drawn >= intervals:
            return 0.0
        # The curve stands twice in a row, since the busiest part may run past its end.
        sums = np.cumsum(np.concatenate(([0.0], self.rate_rps, self.rate_rps)))
        return self.every_s * int(np.argmax(sums[drawn : drawn + intervals] - sums[:intervals]))


def fit_context(description: Description, most_tokens: int) -> Description:
    """The same traffic for an LLM that accepts `most_tokens`.

    Agents compact their contexts, and sessions end, before they exceed that. Other requests are cut rather
    than refused: if only a mean length is given, the longest requests come from an assumed distribution.
    """
    sessions, agents, basis = description.sessions, description.agents, description.basis
    if sessions is not None and sessions.most_tokens > most_tokens:
        sessions = replace(sessions, most_tokens=most_tokens)
    if agents is not None and agents.most_tokens > most_tokens:
        agents = replace(agents, most_tokens=most_tokens)
        basis = (*basis, f"agents compact contexts of more than {most_tokens} tokens, the LLM's most")
    by_tenant = tuple((name, fit_context(each, most_tokens)) for name, each in description.by_tenant)
    return replace(
        description,
        sessions=sessions,
        agents=agents,
        by_tenant=by_tenant,
        most_tokens=most_tokens,
        basis=basis,
    )


def check_rate(rate_rps: float) -> None:
    """Raise InputError unless the rate [requests/s] is a number above 0."""
    if not 0 < rate_rps < math.inf:
        raise InputError(f"rate: expected a number of requests/s > 0, found {rate_rps}")


def check_description(description: Description) -> None:
    """Raise InputError for too few or too many requests, or for Fano factors that no bursts can have.

    No bursts can have a Fano factor below that of the gaps alone. The rate fixes the count of each interval
    of a curve (with a constant rate: of the whole duration), so windows may be at most half as long.
    """
    requests = description.mean_rps * description.duration_s
    if not LEAST_DRAWN <= requests <= MOST_DRAWN:
        are_too_few = requests < LEAST_DRAWN
        enough_s = (LEAST_DRAWN if are_too_few else MOST_DRAWN) / description.mean_rps
        raise InputError(
            f"duration: {description.mean_rps:g} requests/s for {description.duration_s:.10g} s are "
            f"{requests:.4g} requests, expected {LEAST_DRAWN} to {MOST_DRAWN}; set "
            f"duration to {enough_s:.6g} s or {'more' if are_too_few else 'less'}"
        )
    squared_cv = description.squared_gap_cv
    if description.fano:
        least_s = description.every_s if description.is_curve else description.duration_s
        for window_s, value in description.fano:
            if window_s > least_s / 2:
                raise InputError(
                    f"burstiness: fano: {window_s:g} s is more than half of {least_s:g} s, "
                    f"{'an interval of the rate curve' if description.is_curve else 'the duration'}, in "
                    "which the rate is given already; leave it out"
                )
            if value < squared_cv:
                raise InputError(
                    f"burstiness: fano: {value:g} at {window_s:g} s is less than {squared_cv:g}, which "
                    "gaps alone make (cv, squared); set cv lower"
                )


def usual_duration_s(rate_rps: float) -> float:
    """How long traffic of this rate [requests/s] lasts if the question names no duration [s]."""
    return math.ceil(min(max(USUAL_REQUESTS / rate_rps, USUAL_LEAST_S), USUAL_MOST_S))


@lru_cache(maxsize=2)
def draw_requests(description: Description, *, seed: int) -> Trace:
    """The requests of a description, drawn with this seed.

    Raises InputError for what `check_description` refuses.
    """
    check_description(description)
    if description.agents is not None:
        return _draw_agents(description, description.agents, seed)
    return _draw_tenants(description, seed) if description.by_tenant else _draw_clients(description, seed)


def _draw_tenants(description: Description, seed: int) -> Trace:
    """The requests of tenants that differ in kind, in order of arrival. Growth is a factor on all rates."""
    seeds = np.random.SeedSequence([seed, TENANT_STREAM]).generate_state(len(description.by_tenant)).tolist()
    drawn = [
        _draw_clients(each.at_rate(each.mean_rps * description.growth), tenant_seed)
        for (_, each), tenant_seed in zip(description.by_tenant, seeds, strict=True)
    ]
    arrival_s = np.concatenate([tenant_trace.arrival_s for tenant_trace in drawn])
    order = np.argsort(arrival_s, kind="stable")
    return Trace(
        name=description.name,
        arrival_s=arrival_s[order],
        input_tokens=np.concatenate([tenant_trace.input_tokens for tenant_trace in drawn])[order],
        output_tokens=np.concatenate([tenant_trace.output_tokens for tenant_trace in drawn])[order],
        tenant=np.repeat(np.arange(len(drawn)), [len(tenant_trace) for tenant_trace in drawn])[order],
        tenants=tuple(name for name, _ in description.by_tenant),
        notes=(f"drawn from a description, seed {seed}", *description.basis),
        warnings=tuple(
            f"{name}: {line}"
            for (name, _), tenant_trace in zip(description.by_tenant, drawn, strict=True)
            for line in tenant_trace.warnings
        ),
        drawn_from=description,
    )


def _draw_clients(description: Description, seed: int) -> Trace:
    """The requests of clients that are all of one kind, or the turns of the sessions that they begin."""
    rng = np.random.default_rng([seed, CLIENT_STREAM])
    at_s, client = _draw_arrivals(description, rng)
    starts_inside = at_s >= 0
    if description.sessions is None:
        at_s, client = at_s[starts_inside], client[starts_inside]
        session, turn = np.arange(len(at_s)), np.zeros(len(at_s), np.int64)
        think_s = np.zeros(len(at_s))
    else:
        at_s, client, session, turn, think_s = _draw_turns(description.sessions, at_s, client, rng)
    shares = description.clients.rate_shares()
    added, outputs = _draw_lengths(description, shares, client, at_s, rng)
    prefix = _draw_prefixes(description.prefixes, session, rng)
    shared = 0 if description.prefixes is None else description.prefixes.tokens
    warnings: tuple[str, ...] = ()
    if description.sessions is None:
        inputs = added  # Without sessions these are the whole prompts.
        if description.most_tokens:
            inputs, outputs, warnings = _cut_to_fit(inputs, outputs, description.most_tokens)
        fits = np.ones(len(at_s), dtype=bool)
    else:
        # The prompt of a turn is the whole conversation before it, and the shared text once.
        inputs = _context_tokens(added, outputs, session, turn) + shared
        fits = inputs + outputs <= description.sessions.most_tokens
        # A session ends before its first turn that is too long, so later turns are dropped too.
        fits &= ~_is_from_long_turn(fits, session)
    # Turns before time 0 belong to sessions that began before it.
    keep = np.flatnonzero(fits & (at_s >= 0) & (at_s < description.duration_s))
    if len(keep) < 2:
        raise InputError(f"{description.name}: fewer than two requests were drawn; set a longer duration")
    keep = keep[np.argsort(at_s[keep], kind="stable")]
    tenants = tuple(f"tenant-{1 + k}" for k in range(description.tenants)) if description.tenants > 1 else ()
    offsets, ids, block = _prompt_blocks(
        inputs, session, prefix, shared, keep, description.sessions is not None
    )
    return Trace(
        name=description.name,
        arrival_s=at_s[keep] - at_s[keep[0]],
        input_tokens=inputs[keep],
        output_tokens=outputs[keep],
        prefix_offsets=offsets,
        prefix_ids=ids,
        prefix_block_tokens=block,
        # The k-th client belongs to tenant k modulo their number.
        tenant=client[keep] % description.tenants,
        tenants=tenants,
        after=_edges_of_turns(session, turn, keep),
        think_s=think_s[keep],
        notes=(f"drawn from a description, seed {seed}", *description.basis),
        warnings=warnings,
        drawn_from=description,
    )


def _cut_to_fit(
    inputs: IntArray, outputs: IntArray, most_tokens: int
) -> tuple[IntArray, IntArray, tuple[str, ...]]:
    """Inputs and outputs (n,) that are at most `most_tokens` together, and a warning if any was cut.

    The prompt is cut; the answer only where it leaves no token to the prompt.
    """
    cut = int((inputs + outputs > most_tokens).sum())
    if not cut:
        return inputs, outputs, ()
    outputs = np.minimum(outputs, most_tokens - 1)  # A prompt keeps one token at least.
    warning = (
        f"{cut} of {len(inputs)} requests were drawn with more than the {most_tokens} tokens that the LLM "
        "accepts, and are cut to that; traffic: input: {mean: .., p95: .., max: ..} describes the longest"
    )
    return np.minimum(inputs, most_tokens - outputs), outputs, (warning,)


def _draw_agents(description: Description, agents: Agents, seed: int) -> Trace:
    """Draw the requests of all agents, of whom there are `description.agent_count`."""
    count = description.agent_count
    assert count is not None
    grown = replace(agents, count=count)
    lengths = description.input, description.output
    drawn = draw_agents(grown, lengths, description.duration_s, seed=seed, name=description.name)
    note = (
        f"{count} agents at once, drawn with seed {seed}: {int(drawn.task.max()) + 1} tasks of "
        f"{len(drawn)} requests, in blocks of {drawn.prefix_block_tokens} tokens"
    )
    return replace(drawn, notes=(note, *description.basis), drawn_from=description)


# -- arrivals ----------------------------------------------------------------------------------------------


def _draw_arrivals(description: Description, rng: np.random.Generator) -> tuple[FloatArray, IntArray]:
    """When requests or sessions begin (n,), unordered and some before time 0, and their clients (n,)."""
    # Each arrival drawn here starts a session of `per_start` requests, or is a single request.
    warm_s, per_start = 0.0, 1.0
    if (sessions := description.sessions) is not None:
        warm_s = min(WARM_SESSIONS * sessions.turns * sessions.think_s, LONGEST_WARM_S)
        per_start = sessions.turns
    length_s = description.duration_s + warm_s
    has_known_bursts = description.gap_cv is not None or bool(description.fano)
    coarse_cells = _cell_count(length_s, CLIENT_CELL_S, CLIENT_CELLS)
    coarse_s = np.linspace(-warm_s, description.duration_s, coarse_cells + 1)
    shares = _client_rates(description, coarse_s, rng)  # (clients, cells)
    if not has_known_bursts:  # Each client has arrivals of its own.
        expected = description.expected_requests(coarse_s) / per_start
        expected = expected * _curve_corrections(shares.sum(axis=0), expected, description, coarse_s)
        return _gamma_arrivals(expected * shares, coarse_s, description.clients.gap_cv, rng)
    # The sum of all clients is drawn, and then dealt out among them.
    shortest_s = min((window_s for window_s, _ in description.fano), default=CLIENT_CELL_S)
    edges_s = np.linspace(
        -warm_s,
        description.duration_s,
        _cell_count(length_s, shortest_s / CELLS_PER_WINDOW, MOST_BURST_CELLS) + 1,
    )
    expected = description.expected_requests(edges_s) / per_start
    bursts = _burst_factors(description, edges_s, rng)
    expected = expected * bursts * _curve_corrections(bursts, expected, description, edges_s)
    cv = 1.0 if description.gap_cv is None else description.gap_cv
    at_s, _ = _gamma_arrivals(expected[None, :], edges_s, cv, rng)  # One process, so one row.
    return at_s, _client_of_requests(at_s, shares, coarse_s, rng)


def _cell_count(length_s: float, cell_s: float, most: int) -> int:
    """How many cells of `cell_s` seconds there are in `length_s`, from 1 to `most`."""
    return int(np.clip(math.ceil(length_s / cell_s), 1, most))


def _curve_corrections(
    factor: FloatArray, expected: FloatArray, description: Description, edges_s: FloatArray
) -> FloatArray:
    """(cells,): what to multiply `expected * factor` by, so that each interval of the curve expects as many
    requests as with `expected` alone; with a constant rate one number for the whole duration.
    """
    if not description.is_curve:
        return np.full(len(expected), expected.sum() / (expected * factor).sum())
    middle_s = (edges_s[1:] + edges_s[:-1]) / 2 + description.from_s()
    interval = np.floor(middle_s / description.every_s).astype(np.int64)
    interval -= interval.min()  # With sessions the cells begin before time 0.
    by_curve, with_factor = np.bincount(interval, expected), np.bincount(interval, expected * factor)
    # A sum of 0 cannot be scaled, so such an interval keeps the factor 1.
    return np.divide(by_curve, with_factor, out=np.ones(len(by_curve)), where=with_factor > 0)[interval]


def _client_rates(description: Description, edges_s: FloatArray, rng: np.random.Generator) -> FloatArray:
    """(clients, cells): the rate of each client as a share of the mean rate of all. Each share moves over
    minutes by itself, so the sum over clients is not 1 in every cell.
    """
    clients = description.clients
    rates = np.repeat(clients.rate_shares()[:, None], len(edges_s) - 1, axis=1)
    for scale_s in CLIENT_RATE_S:
        blocks = math.ceil((edges_s[-1] - edges_s[0]) / scale_s) + 1  # One more, as the phase is random.
        values = _gamma_factors(CLIENT_RATE_VAR, (clients.count, blocks), rng)
        phase_s = rng.uniform(0.0, scale_s, clients.count)
        middle_s = (edges_s[1:] + edges_s[:-1]) / 2 - edges_s[0]
        block = ((middle_s[None, :] + phase_s[:, None]) / scale_s).astype(np.int64)
        rates *= np.take_along_axis(values, block, axis=1)
    return rates


def _gamma_arrivals(
    expected: FloatArray, edges_s: FloatArray, cv: float, rng: np.random.Generator
) -> tuple[FloatArray, IntArray]:
    """Arrival times (n,) and rows (n,) of processes whose gaps are Gamma distributed with this CV, one
    process for each row. `expected` (rows, cells) are the requests expected of it in each cell.

    Gaps are drawn with mean 1 on an axis that counts the requests expected so far, and are then mapped to
    time.
    """
    # Requests expected until each edge of the cells, by row: (rows, cells + 1).
    expected_until = np.concatenate((np.zeros((len(expected), 1)), np.cumsum(expected, axis=1)), axis=1)
    ends = expected_until[:, -1]
    # Each process begins this many mean gaps before 0 (set by hand): long enough that 0 falls into a gap like
    # any other.
    lead = 10 * max(cv, cv**2)
    span = ends + lead
    # So many gaps that they do not run out: six standard deviations above the expected number, and some more
    # for short spans.
    counts = np.ceil(span + 6 * cv * np.sqrt(span) + 6 * cv**2 + 10).astype(np.int64)
    row = np.repeat(np.arange(len(expected)), counts)
    total = int(counts.sum())
    gaps = np.ones(total) if cv == 0 else rng.gamma(cv**-2, cv**2, total)
    first = np.cumsum(counts) - counts
    # Each process begins at a random point of its first gap, so that they do not begin together.
    gaps[first] *= rng.uniform(size=len(expected))
    times = np.cumsum(gaps)
    # The sum runs over all rows, so each row subtracts the sum of the rows before it.
    times -= np.repeat(times[first] - gaps[first], counts) + lead
    inside = (times >= 0) & (times < ends[row])
    times, row = times[inside], row[inside]
    # The rows are laid one behind the other on one axis, so that one lookup finds the cells of all.
    row_start = np.concatenate(([0.0], np.cumsum(ends)))[:-1]
    all_edges = (expected_until + row_start[:, None]).ravel()
    edge_before = np.searchsorted(all_edges, times + row_start[row], side="right") - 1
    # Rounding may find an edge of a neighbouring row, hence the clip.
    cell = np.clip(edge_before - row * expected_until.shape[1], 0, expected.shape[1] - 1)
    in_cell = expected[row, cell]
    cell_frac = np.divide(
        times - expected_until[row, cell], in_cell, out=np.zeros(len(times)), where=in_cell > 0
    )
    return edges_s[cell] + np.clip(cell_frac, 0.0, 1.0) * (edges_s[1] - edges_s[0]), row


def _client_of_requests(
    at_s: FloatArray, shares: FloatArray, edges_s: FloatArray, rng: np.random.Generator
) -> IntArray:
    """(n,): the client of each request, drawn with the probabilities that `shares` (clients, cells) gives for
    the cell of time in which the request arrives.
    """
    clients, cells = shares.shape
    cumulative = np.cumsum(shares, axis=0)
    cumulative /= cumulative[-1]
    # One lookup serves all cells: cell c has its clients' cumulative shares in [c, c + 1].
    all_edges = (cumulative.T + np.arange(cells)[:, None]).ravel()
    cell = np.clip(((at_s - edges_s[0]) / (edges_s[1] - edges_s[0])).astype(np.int64), 0, cells - 1)
    drawn = np.searchsorted(all_edges, cell + rng.uniform(size=len(at_s)), side="right")
    # A sum of shares may round below 1, hence the clip.
    return np.asarray(np.clip(drawn - cell * clients, 0, clients - 1), np.int64)


def _burst_factors(description: Description, edges_s: FloatArray, rng: np.random.Generator) -> FloatArray:
    """(cells,): factors of the rate, with mean 1, that give counts the described Fano factors."""
    factors = np.ones(len(edges_s) - 1)
    if not description.fano:
        return factors
    middle_s = (edges_s[1:] + edges_s[:-1]) / 2 - edges_s[0]
    for scale_s, variance in time_scales(description):
        blocks = math.ceil((edges_s[-1] - edges_s[0]) / scale_s) + 1  # One more, as the phase is random.
        values = _gamma_factors(variance, blocks, rng)
        factors *= values[((middle_s + rng.uniform(0.0, scale_s)) / scale_s).astype(np.int64)]
    return factors


def _gamma_factors(variance: float, shape: int | tuple[int, ...], rng: np.random.Generator) -> FloatArray:
    """Factors with mean 1 and this variance, from the Gamma distribution."""
    return rng.gamma(1 / variance, variance, shape)


def time_scales(description: Description) -> list[tuple[float, float]]:
    """Time scales tau [s] and the variances sigma^2 of their factors; see the module's docstring."""
    rates = np.array(description.rate_rps) * description.growth
    return _fit_scales(
        description.fano,
        # Over the windows of all intervals both the variance and the mean of counts are sums, so this is the
        # rate in F(T).
        float((rates**2).sum() / rates.sum()),
        description.squared_gap_cv,
        description.every_s if description.is_curve else description.duration_s,
    )


@lru_cache(maxsize=32)
def _fit_scales(
    fano: tuple[tuple[float, float], ...], rate_rps: float, squared_cv: float, evened_s: float
) -> list[tuple[float, float]]:
    """The scales and variances of `time_scales`, fitted to the formula of v(T); `squared_cv` is cv^2.

    `_curve_corrections` fixes the requests of each interval of `evened_s`, which takes away some variance. So
    the target of the fit is raised until a rate that was drawn and corrected has the variances of `fano`.
    """
    windows_s = np.array([window_s for window_s, _ in fano])
    fano_variances = np.array([max(value - squared_cv, 0.0) for _, value in fano]) / (rate_rps * windows_s)
    if not fano_variances.any():
        return []
    # Each scale is about 3 times the one before, from the shortest window to four times the longest, but at
    # most `evened_s`.
    longest_s = min(windows_s.max() * 4, evened_s)
    steps = max(math.ceil(math.log(longest_s / windows_s.min()) / math.log(3)), 1)
    taus_s = np.geomspace(windows_s.min(), longest_s, steps + 1)
    target = fano_variances
    for _ in range(FIT_ROUNDS):
        fitted = _fit_variances(target, windows_s, taus_s)
        reached = _variances_over_windows(fitted, windows_s, taus_s, evened_s)
        # The target changes by the factor that is missing; at most by 2 in a round, which keeps the fit
        # stable.
        missing = np.divide(fano_variances, reached, out=np.ones(len(reached)), where=reached > 0)
        target = target * np.clip(missing, 0.5, 2.0)
    pairs = zip(taus_s, fitted, strict=True)
    return [(float(tau_s), float(variance)) for tau_s, variance in pairs if variance > LEAST_VARIANCE]


def _fit_variances(target_variances: FloatArray, windows_s: FloatArray, taus_s: FloatArray) -> FloatArray:
    """The variances sigma^2 of the factors with which v(T) is nearest to these targets, in least squares."""
    from scipy.optimize import least_squares

    # v(T) is an integral over lags, here over 100 intervals, a number set by hand.
    lags = [np.linspace(0.0, window_s, 101) for window_s in windows_s]
    triangles = [np.maximum(0.0, 1 - lag[:, None] / taus_s) for lag in lags]
    # Errors are relative to the target, or to a thousandth of the largest target if that is more.
    weight = 1 / np.maximum(target_variances, 1e-3 * target_variances.max())

    def residuals(sigma: FloatArray) -> FloatArray:
        variances = []
        for lag, triangle in zip(lags, triangles, strict=True):
            covariance = np.prod(1 + sigma**2 * triangle, axis=1) - 1
            variances.append(2 / lag[-1] ** 2 * np.trapezoid((lag[-1] - lag) * covariance, lag))
        return np.asarray((np.array(variances) - target_variances) * weight)

    # All sigmas start equal, and above 0, where the gradient vanishes. The limit on evaluations is set by
    # hand.
    start = np.full(len(taus_s), math.sqrt(max(target_variances.max() / len(taus_s), 1e-3)))
    return np.asarray(least_squares(residuals, start, max_nfev=100).x ** 2)


def _variances_over_windows(
    sigma2: FloatArray, windows_s: FloatArray, taus_s: FloatArray, evened_s: float
) -> FloatArray:
    """The v(T) of a rate that was drawn, and scaled to the same mean in each interval of `evened_s`."""
    rng = np.random.default_rng(0)  # A fixed seed: the fit must not depend on the user's.
    # An interval has two cells for each of the shortest windows that it holds, but 8 cells at least, and at
    # most an eighth of FIT_CELLS, so that there are 8 intervals or more.
    interval_cells = int(np.clip(evened_s / windows_s.min() * 2, 8, FIT_CELLS // 8))
    intervals = FIT_CELLS // interval_cells
    middle_s = (np.arange(interval_cells) + 0.5) / interval_cells * evened_s
    rate = np.ones((intervals, interval_cells))
    for tau_s, variance in zip(taus_s, sigma2, strict=True):
        if variance > LEAST_VARIANCE:
            values = _gamma_factors(variance, (intervals, int(evened_s / tau_s) + 2), rng)
            block = (middle_s + rng.uniform(0, tau_s, (intervals, 1))) / tau_s  # Each row has its own phase.
            rate *= np.take_along_axis(values, block.astype(np.int64), axis=1)
    mean = rate.mean(axis=1, keepdims=True)
    rate = np.divide(rate, mean, out=np.ones_like(rate), where=mean > 0)
    sums = np.concatenate((np.zeros((intervals, 1)), np.cumsum(rate, axis=1)), axis=1)
    variances = []
    for window_s in windows_s:
        cells = max(round(window_s / evened_s * interval_cells), 1)
        sums_at_windows = sums[:, ::cells]
        variances.append(float((np.diff(sums_at_windows, axis=1) / cells).var()))
    return np.array(variances)


# -- sessions ----------------------------------------------------------------------------------------------


def _draw_turns(
    sessions: Sessions, start_s: FloatArray, client: IntArray, rng: np.random.Generator
) -> tuple[FloatArray, IntArray, IntArray, IntArray, FloatArray]:
    """The turns of all sessions, one session after the other, as columns (n,): nominal arrival [s] (as if
    answers took no time), client, session, number of the turn from 0, and think time before it [s].
    """
    turns = rng.geometric(min(1 / sessions.turns, 1.0), len(start_s))  # A mean below one turn counts as one.
    session = np.repeat(np.arange(len(start_s)), turns)
    first = np.cumsum(turns) - turns
    turn = np.arange(len(session)) - first[session]
    think_s = rng.exponential(sessions.think_s, len(session)) * (turn > 0)
    since_s = np.cumsum(think_s)
    at_s = start_s[session] + since_s - since_s[first][session]
    return at_s, client[session], session, turn, think_s


def _context_tokens(added: IntArray, outputs: IntArray, session: IntArray, turn: IntArray) -> IntArray:
    """(n,): the prompt of each turn: earlier prompts and answers, and what it adds. The rows of a session are
    adjacent.
    """
    # The sum runs over all sessions, so each session subtracts the sum of those before it.
    tokens_so_far = np.cumsum(added + outputs)
    first = np.flatnonzero(turn == 0)
    before_session = tokens_so_far[first] - (added + outputs)[first]
    return np.asarray(tokens_so_far - outputs - before_session[session])


def _is_from_long_turn(fits: BoolArray, session: IntArray) -> BoolArray:
    """(n,): whether the turn, or an earlier one of its session, does not fit. The rows of a session are
    adjacent.
    """
    # The count runs over all sessions, so each session subtracts the count of those before it. Sessions are
    # numbered one by one from `session[0]`.
    too_long = np.cumsum(~fits)
    first = np.concatenate(([0], np.flatnonzero(np.diff(session)) + 1))
    before_session: IntArray = too_long[first] - ~fits[first]
    return np.asarray((too_long - before_session[session - session[0]]) > 0)


def _edges_of_turns(session: IntArray, turn: IntArray, keep: IntArray) -> IntArray:
    """Rows (request, parent): each kept turn waits for the one before it, if that is kept too."""
    if not turn.any():
        return no_edges()
    row_of = np.full(len(session), -1)  # Position among the kept turns; -1 for others.
    row_of[keep] = np.arange(len(keep))
    child = np.flatnonzero(turn > 0)
    edges = np.column_stack((row_of[child], row_of[child - 1]))
    edges = edges[(edges >= 0).all(axis=1)]
    return sort_waits(edges)


# -- lengths and prefixes ----------------------------------------------------------------------------------


def _with_drift(scores: FloatArray, drift: Sequence[float], interval: IntArray) -> FloatArray:
    """Normal scores (n,), moved by the `drift` of each request's interval; the same scores if `drift` is
    empty.

    The drift adds variance between intervals. The same amount is taken from the variance within intervals, so
    that the variance of all scores stays 1.
    """
    if not drift:
        return scores
    within = scores * math.sqrt(max(1 - float(np.var(drift)), 0.0))
    return _to_normal(within + np.array(drift)[interval])


def _draw_lengths(
    description: Description, shares: FloatArray, client: IntArray, at_s: FloatArray, rng: np.random.Generator
) -> tuple[IntArray, ...]:
    """Tokens of input and of output, (n,) each. We draw a standard normal score for each length; the length
    has the same percentile in its own distribution (lengths.py).
    """
    frac = description.clients.lengths_frac
    first, second = (_normal_scores(frac, shares, client, rng) for _ in range(2))
    if any(description.drift):
        interval = np.floor((at_s + description.from_s()) / description.every_s).astype(np.int64)
        interval %= len(description.rate_rps)
        input_drift, output_drift = description.drift
        first = _with_drift(first, input_drift, interval)
        second = _with_drift(second, output_drift, interval)
    if description.joint_table:
        second = _scores_by_table(description.joint_table, first, second)
    elif description.joint:
        # `joint` is Spearman's rank correlation; two normal scores have it at this correlation of Pearson.
        pearson = 2 * math.sin(math.pi * description.joint / 6)
        second = pearson * first + math.sqrt(1 - pearson**2) * second
    # With clients that are alike and no drift, scores are standard normal already.
    return tuple(
        lengths.of_scores(_to_normal(scores) if frac or any(description.drift) else scores)
        for lengths, scores in ((description.input, first), (description.output, second))
    )


def _to_normal(scores: FloatArray) -> FloatArray:
    """Scores (n,) of the same ranks that are standard normal as a whole. Scores that differ by client are
    normal only if each client sends exactly its share, but the rates of clients move.
    """
    from scipy.special import ndtri

    rank = np.empty(len(scores))
    rank[np.argsort(scores)] = np.arange(len(scores)) + 0.5
    return np.asarray(ndtri(rank / len(scores)))


def _normal_scores(frac: float, shares: FloatArray, client: IntArray, rng: np.random.Generator) -> FloatArray:
    """(n,): standard normal scores with a share `frac` of their variance between clients."""
    from scipy.special import ndtr, ndtri

    of_client, of_request = rng.standard_normal(len(shares)), rng.standard_normal(len(client))
    if not frac or len(shares) == 1:
        return of_request
    raw = math.sqrt(frac) * of_client[client] + math.sqrt(1 - frac) * of_request
    # `raw` is a mixture over clients, which is not normal as a whole. `below` is its distribution function,
    # on a grid of steps of 0.01 that holds all scores but about three in 10^12.
    grid = np.linspace(-7.0, 7.0, 1401)
    below = ndtr((grid[:, None] - math.sqrt(frac) * of_client) / math.sqrt(1 - frac)) @ shares
    return np.asarray(np.interp(raw, grid, ndtri(np.clip(below, _TINY_FRAC, 1 - _TINY_FRAC))))


def _scores_by_table(
    table: tuple[tuple[float, ...], ...], first: FloatArray, second: FloatArray
) -> FloatArray:
    """Scores (n,) of outputs that have, with the scores `first` (n,) of prompts, the joint distribution of
    the table. They are made from the scores `second` (n,), which are independent of `first`.
    """
    from scipy.special import ndtr, ndtri

    joint = np.array(table) + _TINY_FRAC  # An empty row would divide by 0.
    joint /= joint.sum()
    # The row of a request is where its prompt's percentile falls. Its column is drawn with the probabilities
    # of that row, and its output's percentile lies within the column.
    row_ends = np.cumsum(joint.sum(axis=1))
    column_edges = np.concatenate(([0.0], np.cumsum(joint.sum(axis=0))))
    row = np.clip(np.searchsorted(row_ends, ndtr(first)), 0, len(joint) - 1)
    cumulative = np.concatenate((np.zeros((len(joint), 1)), np.cumsum(joint, axis=1)), axis=1)
    cumulative /= cumulative[:, -1:]
    # One lookup serves all rows: row r has its columns' cumulative shares in [r, r + 1].
    all_edges = (cumulative + np.arange(len(joint))[:, None]).ravel()
    drawn = np.clip(ndtr(second), _TINY_FRAC, 1 - _TINY_FRAC)
    column = np.searchsorted(all_edges, row + drawn, side="right") - 1 - row * cumulative.shape[1]
    column = np.clip(column, 0, joint.shape[1] - 1)
    low, high = cumulative[row, column], cumulative[row, column + 1]
    within_column = (drawn - low) / (high - low)
    widths = np.diff(column_edges)
    quantile_frac = column_edges[column] + within_column * widths[column]
    return np.asarray(ndtri(np.clip(quantile_frac, _TINY_FRAC, 1 - _TINY_FRAC)))


def _draw_prefixes(prefixes: Prefixes | None, session: IntArray, rng: np.random.Generator) -> IntArray:
    """(n,): the index of the shared text with which each prompt begins, the same within a session."""
    if prefixes is None:
        return np.zeros(len(session), np.int64)
    shares = np.arange(1.0, prefixes.count + 1) ** -prefixes.skew
    chosen = rng.choice(prefixes.count, int(session.max()) + 1, p=shares / shares.sum())
    return chosen[session]


def _prompt_blocks(
    inputs: IntArray,
    session: IntArray,
    prefix: IntArray,
    shared_tokens: int,
    keep: IntArray,
    has_sessions: bool,
) -> tuple[IntArray, IntArray, int]:
    """Offsets (kept requests + 1,), ids and size in tokens of the prompt blocks that requests may share:
    blocks of a shared text (`shared_tokens` long), and in sessions all other blocks too. Blocks are made
    larger until there are at most MOST_IDS ids, and at most MOST_MEAN_IDS in the mean prompt, as in traces
    from files.
    """
    if not shared_tokens and not has_sessions:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), 0
    tokens = inputs[keep] if has_sessions else np.minimum(inputs[keep], shared_tokens)
    block_tokens = KV_BLOCK_TOKENS
    while int((tokens // block_tokens).sum()) > min(MOST_IDS, MOST_MEAN_IDS * len(keep)):
        block_tokens *= 2
    count = tokens // block_tokens
    offsets = np.concatenate(([0], np.cumsum(count)))
    place = index_ranges(np.zeros_like(count), count)
    shared_blocks = shared_tokens // block_tokens
    longest = int(count.max()) + 1
    # Each text and each session has a range of `longest` ids; the ranges of texts come first.
    session_ids = (np.repeat(session[keep], count) + 1 + int(prefix.max())) * longest + place
    text_ids = np.repeat(prefix[keep], count) * longest + place
    return offsets, np.where(place < shared_blocks, text_ids, session_ids), block_tokens
