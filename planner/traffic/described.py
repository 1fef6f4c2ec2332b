"""Traffic that nobody has recorded: a description, and requests drawn from it.

    description = Description(rate_rps=(30.0,), duration_s=900.0, input=Lognormal(1500, 1.0), output=...)
    draw(description, seed=0)

Requests come from clients, as ServeGen finds them in production (Xiang et al. 2025, arXiv:2505.09999): a few
send most of the requests, each in bursts of its own (Gamma gaps), at a rate that moves over minutes, and with
lengths of its own. Their sum is burstier than a Poisson process by as much as the largest clients are.

Where it is known how bursty the sum is (`gap_cv`, `fano`), the sum is drawn so: Gamma gaps in the time of a
rate that moves, and clients share these requests. The rate is a product of independent factors, one for each
time scale tau, constant over blocks of tau with a random phase, Gamma distributed with mean 1. With variance
sigma^2 of each, the mean of the product over a window T has the variance

    v(T) = 2 / T^2 * int_0^T (T - x) * (prod_tau (1 + sigma_tau^2 * max(0, 1 - x / tau)) - 1) dx

and the counts of requests in windows T the Fano factor (variance / mean)  F(T) = cv^2 + rate * T * v(T); the
sigmas are fitted to the factors that were asked for.

In any interval of the rate curve the expected number of requests is what the curve says: bursts move requests
within it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.traffic.agents import Agents, draw_agents
from planner.traffic.lengths import Lengths
from planner.traffic.trace import FloatArray, IntArray, Trace, no_edges

MOST_DRAWN = 20_000_000  # One description may draw no more requests than this.
MOST_IDS = 20_000_000  # All drawn prompts together may have no more block ids.
# A client's rate, relative to its mean, has the variance CLIENT_RATE_VAR on each time scale of CLIENT_RATE_S.
CLIENT_RATE_VAR = 0.25
CLIENT_RATE_S = (60.0, 600.0)
MOST_CELLS = 400_000  # of time, in which a rate is constant
CLIENT_CELLS = 5_000
TRIED, TRIED_CELLS = 6, 400_000  # how often factors are moved, and on how many cells they are tried
FINE = 6  # cells in the shortest window of a Fano factor
WARM_TURNS = 5.0  # means of a session's length, before the traffic begins
_EDGE = 1e-9
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Clients:
    """The k-th of `count` clients sends a share of the requests in proportion to k^-skew.

    Gaps between the requests of a client have the coefficient of variation `gap_cv`. The share `lengths_frac`
    of the variance of lengths lies between clients, the rest within each.
    """

    count: int = 100
    skew: float = 1.2
    gap_cv: float = 2.0
    lengths_frac: float = 0.1

    def rate_shares(self) -> FloatArray:
        """(count,), the largest first."""
        weights = np.arange(1.0, self.count + 1) ** -self.skew
        return np.asarray(weights / weights.sum())


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations of `turns` requests on average (geometric), with `think_s` on average (exponential)
    between an answer and the next turn, whose prompt holds all that came before.

    A session ends before a request of more than `most_tokens`.
    """

    turns: float
    think_s: float
    most_tokens: int = 131_072


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A prompt begins with one of `count` texts of `tokens` tokens, the k-th with a frequency of k^-skew."""

    tokens: int
    count: int = 1
    skew: float = 0.0


@dataclass(frozen=True, slots=True)
class Description:
    """Requests as they are known before there is a trace.

    `rate_rps` are requests/s in intervals of `every_s` (one number: always); where `duration_s` is shorter
    than the curve, its busiest part is drawn, where it is longer, the curve begins again. `growth` is a
    factor on all of it. `input` are the prompts' tokens, in sessions those that a turn adds. `joint` is the
    rank correlation of input and output; `joint_table` says more: requests by equal parts of prompts (rows,
    the shortest first) and of outputs. `drift` has, for inputs and for outputs, by how many standard
    deviations of their normal scores lengths of an interval of the curve are longer than all. `fano` are rows
    (window [s], variance / mean of counts). `name` opens notes, `basis` is what was taken for granted.

    `by_tenant` has tenants whose requests differ in kind, each by name with a description of its own. Each is
    drawn by itself, `growth` times as often as it says; `rate_rps` is then the sum of theirs, and of all else
    here `duration_s` alone counts.
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
    most_tokens: int = 0  # Of a prompt and its answer, which are cut to it; 0: no limit.
    name: str = "described traffic"
    basis: tuple[str, ...] = ()

    @property
    def mean_rps(self) -> float:
        """The mean rate over the part of the curve that is drawn, with growth."""
        return float(self.expected_requests(np.array([0.0, self.duration_s])).sum()) / self.duration_s

    def at_rate(self, rate_rps: float) -> Description:
        """The same traffic at another mean rate; its Fano factors follow F(T) at the top of this module."""
        factor = rate_rps / self.mean_rps
        return self if factor == 1 else self._times(factor)

    def _times(self, factor: float) -> Description:
        base = 1.0 if self.gap_cv is None else self.gap_cv**2
        fano = tuple((window_s, base + (value - base) * factor) for window_s, value in self.fano)
        return replace(self, growth=self.growth * factor, fano=fano)

    @property
    def agent_count(self) -> int | None:
        """How many agents work at once, with the growth; None where the traffic is not of agents."""
        return None if self.agents is None else max(round(self.agents.count * self.growth), 1)

    @property
    def is_curve(self) -> bool:
        return len(set(self.rate_rps)) > 1

    def expected_requests(self, edges_s: FloatArray) -> FloatArray:
        """Expected requests between neighbouring `edges_s`, times since the start of what is drawn."""
        within_s = self.every_s * np.arange(len(self.rate_rps) + 1)
        requests = np.concatenate(([0.0], np.cumsum(self.rate_rps))) * self.every_s * self.growth
        laps, rest_s = np.divmod(edges_s + self.from_s(), within_s[-1])
        return np.diff(laps * requests[-1] + np.interp(rest_s, within_s, requests))

    def from_s(self) -> float:
        """Where in the curve the busiest part of `duration_s` begins."""
        intervals = len(self.rate_rps)
        whole = math.ceil(self.duration_s / self.every_s - _EDGE)
        if not self.is_curve or whole >= intervals:
            return 0.0
        sums = np.cumsum(np.concatenate(([0.0], self.rate_rps, self.rate_rps)))
        return self.every_s * int(np.argmax(sums[whole : whole + intervals] - sums[:intervals]))


def fit_context(description: Description, most_tokens: int) -> Description:
    """The same for an LLM that accepts so many tokens: agents compact their contexts before that, sessions
    end, and other requests are cut. The tail of a distribution of which a mean is known is our assumption.
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


def check_description(description: Description) -> None:
    """Raises InputError for a description of which nothing sensible can be drawn."""
    requests = description.mean_rps * description.duration_s
    if not 20 <= requests <= MOST_DRAWN:
        raise InputError(
            f"duration: {description.mean_rps:g} requests/s for {description.duration_s:g} s are "
            f"{requests:.4g} requests, expected 20 to {MOST_DRAWN}; set another duration"
        )
    base = 1.0 if description.gap_cv is None else description.gap_cv**2
    if description.fano:
        least_s = description.every_s if description.is_curve else description.duration_s
        for window_s, value in description.fano:
            if window_s > least_s / 2:
                raise InputError(
                    f"burstiness: fano: {window_s:g} s is more than half of {least_s:g} s, "
                    f"{'an interval of the rate curve' if description.is_curve else 'the duration'}, in "
                    "which the rate is said already; leave it out"
                )
            if value < base:
                raise InputError(
                    f"burstiness: fano: {value:g} at {window_s:g} s is less than {base:g}, which gaps alone "
                    "make (cv, squared); set cv lower"
                )


@lru_cache(maxsize=2)
def draw_requests(description: Description, *, seed: int) -> Trace:
    """Requests of a description; other seeds draw others.

    Raises InputError for what `check_description` refuses.
    """
    check_description(description)
    if description.agents is not None:
        return _draw_agents(description, description.agents, seed)
    return _draw_tenants(description, seed) if description.by_tenant else _draw_clients(description, seed)


def _draw_tenants(description: Description, seed: int) -> Trace:
    """The requests of tenants that differ in kind, in order of arrival."""
    seeds = np.random.SeedSequence([seed, 21]).generate_state(len(description.by_tenant)).tolist()
    drawn = [
        _draw_clients(each.at_rate(each.mean_rps * description.growth), own)
        for (_, each), own in zip(description.by_tenant, seeds, strict=True)
    ]
    arrival_s = np.concatenate([part.arrival_s for part in drawn])
    order = np.argsort(arrival_s, kind="stable")
    return Trace(
        name=description.name,
        arrival_s=arrival_s[order],
        input_tokens=np.concatenate([part.input_tokens for part in drawn])[order],
        output_tokens=np.concatenate([part.output_tokens for part in drawn])[order],
        tenant=np.repeat(np.arange(len(drawn)), [len(part) for part in drawn])[order],
        tenants=tuple(name for name, _ in description.by_tenant),
        notes=(f"drawn from a description, seed {seed}", *description.basis),
        warnings=tuple(
            f"{name}: {line}"
            for (name, _), part in zip(description.by_tenant, drawn, strict=True)
            for line in part.warnings
        ),
        drawn_from=description,
    )


def _draw_clients(description: Description, seed: int) -> Trace:
    """The requests of clients, or of their sessions."""
    rng = np.random.default_rng([seed, 20])
    at_s, client = _arrivals(description, rng)
    inside = at_s >= 0
    if description.sessions is None:
        at_s, client = at_s[inside], client[inside]
        session, turn = np.arange(len(at_s)), np.zeros(len(at_s), np.int64)
        think_s = np.zeros(len(at_s))
    else:
        at_s, client, session, turn, think_s = _turns(description.sessions, at_s, client, rng)
    shares = description.clients.rate_shares()
    added, outputs = _lengths(description, shares, client, at_s, rng)
    prefix = _prefixes(description.prefixes, session, rng)
    shared = 0 if description.prefixes is None else description.prefixes.tokens
    inputs, warnings = added, tuple[str, ...]()
    if description.sessions is None and description.most_tokens:
        inputs, outputs, warnings = _cut_to_fit(inputs, outputs, description.most_tokens)
    if description.sessions is not None:
        inputs = _context_tokens(added, outputs, session, turn) + shared
        fits = inputs + outputs <= description.sessions.most_tokens
        fits &= ~_after_a_long_one(fits, session)
    else:
        fits = np.ones(len(at_s), dtype=bool)
    keep = np.flatnonzero(fits & (at_s >= 0) & (at_s < description.duration_s))
    if len(keep) < 2:
        raise InputError(f"{description.name}: fewer than two requests were drawn; set a longer duration")
    keep = keep[np.argsort(at_s[keep], kind="stable")]
    tenants = tuple(f"tenant-{1 + k}" for k in range(description.tenants)) if description.tenants > 1 else ()
    offsets, ids, block = _blocks(inputs, session, prefix, shared, keep, description.sessions is not None)
    drawn = Trace(
        name=description.name,
        arrival_s=at_s[keep] - at_s[keep[0]],
        input_tokens=inputs[keep],
        output_tokens=outputs[keep],
        prefix_offsets=offsets,
        prefix_ids=ids,
        prefix_block_tokens=block,
        tenant=client[keep] % description.tenants,
        tenants=tenants,
        after=_edges_of_turns(session, turn, keep),
        think_s=think_s[keep],
        notes=(f"drawn from a description, seed {seed}", *description.basis),
        warnings=warnings,
        drawn_from=description,
    )
    return drawn


def _cut_to_fit(
    inputs: IntArray, outputs: IntArray, most_tokens: int
) -> tuple[IntArray, IntArray, tuple[str, ...]]:
    """Prompts and answers of at most `most_tokens` together, the prompts cut first, and a warning of it."""
    cut = int((inputs + outputs > most_tokens).sum())
    if not cut:
        return inputs, outputs, ()
    outputs = np.minimum(outputs, most_tokens - 1)
    warning = (
        f"{cut} of {len(inputs)} requests were drawn with more than the {most_tokens} tokens that the LLM "
        "accepts, and are cut to that; traffic: input: {mean: .., p95: .., max: ..} describes the longest"
    )
    return np.minimum(inputs, most_tokens - outputs), outputs, (warning,)


def _draw_agents(description: Description, agents: Agents, seed: int) -> Trace:
    """Draw the requests of all agents. With growth their number is rounded to a whole one."""
    count = max(round(agents.count * description.growth), 1)
    at_work = replace(agents, count=count)
    lengths = description.input, description.output
    drawn = draw_agents(at_work, lengths, description.duration_s, seed=seed, name=description.name)
    note = (
        f"{count} agents at once, drawn with seed {seed}: {int(drawn.task.max()) + 1} tasks of "
        f"{len(drawn)} requests, in blocks of {drawn.prefix_block_tokens} tokens"
    )
    return replace(drawn, notes=(note, *description.basis), drawn_from=description)


# -- arrivals ----------------------------------------------------------------------------------------------


def _arrivals(description: Description, rng: np.random.Generator) -> tuple[FloatArray, IntArray]:
    """(n,) when requests, or sessions, begin, in any order, and whose they are; sessions before 0 too."""
    warm_s, per_start = 0.0, 1.0
    if (sessions := description.sessions) is not None:
        warm_s, per_start = min(WARM_TURNS * sessions.turns * sessions.think_s, 86_400.0), sessions.turns
    length_s = description.duration_s + warm_s
    has_known_bursts = description.gap_cv is not None or bool(description.fano)
    coarse_s = np.linspace(-warm_s, description.duration_s, _cells(length_s, 5.0, CLIENT_CELLS) + 1)
    shares = _client_rates(description, coarse_s, rng)
    if not has_known_bursts:
        mass = description.expected_requests(coarse_s) / per_start
        mass = mass * _evening_factors(shares.sum(axis=0), mass, description, coarse_s)
        rates = mass * shares
        return _gamma_arrivals(rates, coarse_s, description.clients.gap_cv, rng)
    shortest_s = min((window_s for window_s, _ in description.fano), default=5.0)
    edges_s = np.linspace(
        -warm_s, description.duration_s, _cells(length_s, shortest_s / FINE, MOST_CELLS) + 1
    )
    mass = description.expected_requests(edges_s) / per_start
    bursts = _burst_factors(description, edges_s, rng)
    mass = mass * bursts * _evening_factors(bursts, mass, description, edges_s)
    cv = 1.0 if description.gap_cv is None else description.gap_cv
    at_s, _ = _gamma_arrivals(mass[None, :], edges_s, cv, rng)
    return at_s, _client_of_requests(at_s, shares, coarse_s, rng)


def _cells(length_s: float, cell_s: float, most: int) -> int:
    return int(np.clip(math.ceil(length_s / cell_s), 1, most))


def _evening_factors(
    factor: FloatArray, mass: FloatArray, description: Description, edges_s: FloatArray
) -> FloatArray:
    """(cells,): by what to multiply so that each interval of the curve keeps its expected requests."""
    if not description.is_curve:
        return np.full(len(mass), mass.sum() / (mass * factor).sum())
    middle_s = (edges_s[1:] + edges_s[:-1]) / 2 + description.from_s()
    interval = np.floor(middle_s / description.every_s).astype(np.int64)
    interval -= interval.min()
    before, after = np.bincount(interval, mass), np.bincount(interval, mass * factor)
    return np.divide(before, after, out=np.ones(len(before)), where=after > 0)[interval]


def _client_rates(description: Description, edges_s: FloatArray, rng: np.random.Generator) -> FloatArray:
    """(clients, cells): shares of the clients, each moving over minutes by itself."""
    clients = description.clients
    rates = np.repeat(clients.rate_shares()[:, None], len(edges_s) - 1, axis=1)
    for scale_s in CLIENT_RATE_S:
        blocks = math.ceil((edges_s[-1] - edges_s[0]) / scale_s) + 1
        values = rng.gamma(1 / CLIENT_RATE_VAR, CLIENT_RATE_VAR, (clients.count, blocks))
        phase_s = rng.uniform(0.0, scale_s, clients.count)
        middle_s = (edges_s[1:] + edges_s[:-1]) / 2 - edges_s[0]
        block = ((middle_s[None, :] + phase_s[:, None]) / scale_s).astype(np.int64)
        rates *= np.take_along_axis(values, block, axis=1)
    return rates


def _gamma_arrivals(
    mass: FloatArray, edges_s: FloatArray, cv: float, rng: np.random.Generator
) -> tuple[FloatArray, IntArray]:
    """Gamma gaps of this CV in the time in which a row of `mass` (rows, cells) brings one request a unit."""
    until = np.concatenate((np.zeros((len(mass), 1)), np.cumsum(mass, axis=1)), axis=1)
    ends = until[:, -1]
    before = 10 * max(cv, cv**2)  # Each process begins this many mean gaps before time 0.
    span = ends + before
    counts = np.ceil(span + 6 * cv * np.sqrt(span) + 6 * cv**2 + 10).astype(np.int64)
    owner = np.repeat(np.arange(len(mass)), counts)
    total = int(counts.sum())
    gaps = np.ones(total) if cv == 0 else rng.gamma(cv**-2, cv**2, total)
    first = np.cumsum(counts) - counts
    gaps[first] *= rng.uniform(size=len(mass))
    times = np.cumsum(gaps)
    times -= np.repeat(times[first] - gaps[first], counts) + before
    inside = (times >= 0) & (times < ends[owner])
    times, owner = times[inside], owner[inside]
    # The rows stand one behind the other on one axis, so that one lookup serves all.
    start = np.concatenate(([0.0], np.cumsum(ends)))[:-1]
    flat = (until + start[:, None]).ravel()
    at = np.searchsorted(flat, times + start[owner], side="right") - 1
    cell = np.clip(at - owner * until.shape[1], 0, mass.shape[1] - 1)
    wide = mass[owner, cell]
    part = np.divide(times - until[owner, cell], wide, out=np.zeros(len(times)), where=wide > 0)
    return edges_s[cell] + np.clip(part, 0.0, 1.0) * (edges_s[1] - edges_s[0]), owner


def _client_of_requests(
    at_s: FloatArray, shares: FloatArray, edges_s: FloatArray, rng: np.random.Generator
) -> IntArray:
    """(n,) the client of each request, by the shares (clients, cells) of the moment."""
    clients, cells = shares.shape
    until = np.cumsum(shares, axis=0)
    until /= until[-1]
    flat = (until.T + np.arange(cells)[:, None]).ravel()
    cell = np.clip(((at_s - edges_s[0]) / (edges_s[1] - edges_s[0])).astype(np.int64), 0, cells - 1)
    client_index = np.searchsorted(flat, cell + rng.uniform(size=len(at_s)), side="right") - cell * clients
    return np.asarray(np.clip(client_index, 0, clients - 1), np.int64)


def _burst_factors(description: Description, edges_s: FloatArray, rng: np.random.Generator) -> FloatArray:
    """(cells,) with mean 1: by what the rate is multiplied so that counts have the Fano factors asked for."""
    factors = np.ones(len(edges_s) - 1)
    if not description.fano:
        return factors
    middle_s = (edges_s[1:] + edges_s[:-1]) / 2 - edges_s[0]
    for scale_s, variance in time_scales(description):
        blocks = math.ceil((edges_s[-1] - edges_s[0]) / scale_s) + 1
        values = _gamma_factors(variance, blocks, rng)
        factors *= values[((middle_s + rng.uniform(0.0, scale_s)) / scale_s).astype(np.int64)]
    return factors


def _gamma_factors(variance: float, shape: int | tuple[int, ...], rng: np.random.Generator) -> FloatArray:
    """Factors with mean 1 and this variance."""
    return rng.gamma(1 / variance, variance, shape)


def time_scales(description: Description) -> list[tuple[float, float]]:
    """Time scales tau [s] and the variances sigma^2 of their factors; see the module's docstring."""
    rates = np.array(description.rate_rps) * description.growth
    return _scales(
        description.fano,
        float((rates**2).sum() / rates.sum()),  # Intervals with more requests vary more.
        1.0 if description.gap_cv is None else description.gap_cv**2,
        description.every_s if description.is_curve else description.duration_s,
    )


@lru_cache(maxsize=32)
def _scales(
    fano: tuple[tuple[float, float], ...], rate_rps: float, base: float, evened_s: float
) -> list[tuple[float, float]]:
    """Fitted to the formula of v(T), then, as evening out an interval takes some of it away, moved until the
    evened rate itself has the variances that are asked for.
    """
    windows_s = np.array([window_s for window_s, _ in fano])
    wanted = np.array([max(value - base, 0.0) for _, value in fano]) / (rate_rps * windows_s)
    if not wanted.any():
        return []
    longest_s = min(windows_s.max() * 4, evened_s)
    steps = max(math.ceil(math.log(longest_s / windows_s.min()) / math.log(3)), 1)
    taus_s = np.geomspace(windows_s.min(), longest_s, steps + 1)
    target = wanted
    for _ in range(TRIED):
        fitted = _fit_variances(target, windows_s, taus_s)
        made = _variances_over_windows(fitted, windows_s, taus_s, evened_s)
        target = target * np.clip(np.divide(wanted, made, out=np.ones(len(made)), where=made > 0), 0.5, 2.0)
    return [(float(tau), float(each)) for tau, each in zip(taus_s, fitted, strict=True) if each > 1e-6]


def _fit_variances(wanted: FloatArray, windows_s: FloatArray, taus_s: FloatArray) -> FloatArray:
    """Variances sigma^2 of the factors by which v(T) is nearest to what is wanted."""
    from scipy.optimize import least_squares  # Imported late: it takes a tenth of a second.

    lags = [np.linspace(0.0, window_s, 101) for window_s in windows_s]
    triangles = [np.maximum(0.0, 1 - lag[:, None] / taus_s) for lag in lags]
    weight = 1 / np.maximum(wanted, 1e-3 * wanted.max())

    def residuals(root: FloatArray) -> FloatArray:
        variances = []
        for lag, triangle in zip(lags, triangles, strict=True):
            together = np.prod(1 + root**2 * triangle, axis=1) - 1
            variances.append(2 / lag[-1] ** 2 * np.trapezoid((lag[-1] - lag) * together, lag))
        return np.asarray((np.array(variances) - wanted) * weight)

    start = np.full(len(taus_s), math.sqrt(max(wanted.max() / len(taus_s), 1e-3)))
    return np.asarray(least_squares(residuals, start, max_nfev=100).x ** 2)


def _variances_over_windows(
    sigma2: FloatArray, windows_s: FloatArray, taus_s: FloatArray, evened_s: float
) -> FloatArray:
    """Variances of the evened rate's means over windows, as they come out."""
    rng = np.random.default_rng(0)
    within = int(np.clip(evened_s / windows_s.min() * 2, 8, TRIED_CELLS // 8))
    intervals = TRIED_CELLS // within
    middle_s = (np.arange(within) + 0.5) / within * evened_s
    rate = np.ones((intervals, within))
    for tau_s, variance in zip(taus_s, sigma2, strict=True):
        if variance > 1e-6:
            values = _gamma_factors(variance, (intervals, int(evened_s / tau_s) + 2), rng)
            block = (middle_s + rng.uniform(0, tau_s, (intervals, 1))) / tau_s
            rate *= np.take_along_axis(values, block.astype(np.int64), axis=1)
    mean = rate.mean(axis=1, keepdims=True)
    rate = np.divide(rate, mean, out=np.ones_like(rate), where=mean > 0)
    sums = np.concatenate((np.zeros((intervals, 1)), np.cumsum(rate, axis=1)), axis=1)
    variances_made = []
    for window_s in windows_s:
        cells = max(round(window_s / evened_s * within), 1)
        whole = sums[:, ::cells]
        variances_made.append(float((np.diff(whole, axis=1) / cells).var()))
    return np.array(variances_made)


# -- sessions ----------------------------------------------------------------------------------------------


def _turns(
    sessions: Sessions, start_s: FloatArray, client: IntArray, rng: np.random.Generator
) -> tuple[FloatArray, IntArray, IntArray, IntArray, FloatArray]:
    """The turns of all sessions, one session after the other: nominal arrival [s], client, session, number of
    the turn from 0, and think time before it [s].
    """
    turns = rng.geometric(min(1 / sessions.turns, 1.0), len(start_s))
    session = np.repeat(np.arange(len(start_s)), turns)
    first = np.cumsum(turns) - turns
    turn = np.arange(len(session)) - first[session]
    think_s = rng.exponential(sessions.think_s, len(session)) * (turn > 0)
    since_s = np.cumsum(think_s)
    at_s = start_s[session] + since_s - since_s[first][session]
    return at_s, client[session], session, turn, think_s


def _context_tokens(added: IntArray, outputs: IntArray, session: IntArray, turn: IntArray) -> IntArray:
    """Prompts of turns: all that was said before, and what the turn adds."""
    conversation_tokens = np.cumsum(added + outputs)
    first = np.flatnonzero(turn == 0)
    before = conversation_tokens[first] - (added + outputs)[first]
    return np.asarray(conversation_tokens - outputs - before[session])


def _after_a_long_one(fits: BoolArray, session: IntArray) -> BoolArray:
    """Turns of a session after its first that does not fit."""
    bad = np.cumsum(~fits)
    first = np.concatenate(([0], np.flatnonzero(np.diff(session)) + 1))
    return np.asarray((bad - (bad[first] - ~fits[first])[session - session[0]]) > 0)


def _edges_of_turns(session: IntArray, turn: IntArray, keep: IntArray) -> IntArray:
    """Rows (request, parent) of turns of which the one before is kept too."""
    if not turn.any():
        return no_edges()
    place = np.full(len(session), -1)
    place[keep] = np.arange(len(keep))
    child = np.flatnonzero(turn > 0)
    edges = np.column_stack((place[child], place[child - 1]))
    edges = edges[(edges >= 0).all(axis=1)]
    return edges[np.lexsort((edges[:, 0], edges[:, 1]))]


# -- lengths and prefixes ----------------------------------------------------------------------------------


def _lengths(
    description: Description, shares: FloatArray, client: IntArray, at_s: FloatArray, rng: np.random.Generator
) -> tuple[IntArray, ...]:
    """Tokens of input and output, (n,) each."""
    frac = description.clients.lengths_frac
    first, second = (_normal_scores(frac, shares, client, rng) for _ in range(2))
    if any(description.drift):
        interval = np.floor((at_s + description.from_s()) / description.every_s).astype(np.int64)
        interval %= len(description.rate_rps)
        first, second = (
            _to_normal(scores * math.sqrt(max(1 - float(np.var(drift)), 0.0)) + np.array(drift)[interval])
            if drift
            else scores
            for scores, drift in zip((first, second), description.drift, strict=True)
        )
    if description.joint_table:
        second = _by_table(description.joint_table, first, second)
    elif description.joint:
        pearson = 2 * math.sin(math.pi * description.joint / 6)
        second = pearson * first + math.sqrt(1 - pearson**2) * second
    return tuple(
        lengths.of_scores(_to_normal(scores) if frac or any(description.drift) else scores)
        for lengths, scores in ((description.input, first), (description.output, second))
    )


def _to_normal(scores: FloatArray) -> FloatArray:
    """The same order, normal as a whole: as clients' rates move, those of the moment are not."""
    from scipy.special import ndtri

    rank = np.empty(len(scores))
    rank[np.argsort(scores)] = np.arange(len(scores)) + 0.5
    return np.asarray(ndtri(rank / len(scores)))


def _normal_scores(frac: float, shares: FloatArray, client: IntArray, rng: np.random.Generator) -> FloatArray:
    """Standard normal scores of which a share of the variance is between clients, whatever these are."""
    from scipy.special import ndtr, ndtri

    of_client, own = rng.standard_normal(len(shares)), rng.standard_normal(len(client))
    if not frac or len(shares) == 1:
        return own
    raw = math.sqrt(frac) * of_client[client] + math.sqrt(1 - frac) * own
    grid = np.linspace(-7.0, 7.0, 1401)
    below = ndtr((grid[:, None] - math.sqrt(frac) * of_client) / math.sqrt(1 - frac)) @ shares
    return np.asarray(np.interp(raw, grid, ndtri(np.clip(below, 1e-12, 1 - 1e-12))))


def _by_table(table: tuple[tuple[float, ...], ...], first: FloatArray, second: FloatArray) -> FloatArray:
    """Scores of outputs that stand to the prompts' as the table says; `second` is drawn by itself."""
    from scipy.special import ndtr, ndtri

    joint = np.array(table) + 1e-12
    joint /= joint.sum()
    rows, columns = np.cumsum(joint.sum(axis=1)), np.concatenate(([0.0], np.cumsum(joint.sum(axis=0))))
    row = np.clip(np.searchsorted(rows, ndtr(first)), 0, len(joint) - 1)
    until = np.concatenate((np.zeros((len(joint), 1)), np.cumsum(joint, axis=1)), axis=1)
    until /= until[:, -1:]
    flat = (until + np.arange(len(joint))[:, None]).ravel()
    along = np.clip(ndtr(second), 1e-12, 1 - 1e-12)
    column = np.searchsorted(flat, row + along, side="right") - 1 - row * until.shape[1]
    column = np.clip(column, 0, joint.shape[1] - 1)
    low, high = until[row, column], until[row, column + 1]
    at = columns[column] + (along - low) / (high - low) * (columns[column + 1] - columns[column])
    return np.asarray(ndtri(np.clip(at, 1e-12, 1 - 1e-12)))


def _prefixes(prefixes: Prefixes | None, session: IntArray, rng: np.random.Generator) -> IntArray:
    """(n,) which shared text a prompt begins with."""
    if prefixes is None:
        return np.zeros(len(session), np.int64)
    shares = np.arange(1.0, prefixes.count + 1) ** -prefixes.skew
    chosen = rng.choice(prefixes.count, int(session.max()) + 1, p=shares / shares.sum())
    return chosen[session]


def _blocks(
    inputs: IntArray, session: IntArray, prefix: IntArray, shared: int, keep: IntArray, has_sessions: bool
) -> tuple[IntArray, IntArray, int]:
    """Offsets, ids and size of the blocks of what prompts share: a shared text, and in sessions the rest."""
    if not shared and not has_sessions:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), 0
    tokens = inputs[keep] if has_sessions else np.minimum(inputs[keep], shared)
    block = KV_BLOCK_TOKENS
    while int((tokens // block).sum()) > MOST_IDS:
        block *= 2
    count = tokens // block
    offsets = np.concatenate(([0], np.cumsum(count)))
    number = np.arange(offsets[-1]) - np.repeat(offsets[:-1], count)
    alike = shared // block
    longest = int(count.max()) + 1
    own = (np.repeat(session[keep], count) + 1 + int(prefix.max())) * longest + number
    common = np.repeat(prefix[keep], count) * longest + number
    return offsets, np.where(number < alike, common, own), block
