"""Another amount of traffic from a trace, a part of it, or traffic made up from distributions.

Three ways to another rate. Each keeps the two lengths of a request together, and the requests of one copy in
their order of arrival (around the circle, where the copy is shifted):

    superpose   more users: copies of the trace, each turned by its own random shift around the trace's
                duration, the last one thinned. A copy keeps its bursts; their sum is smoother, as a sum of
                independent users is. The duration stays.
    compress    a faster or slower clock: arrival / factor. Bursts grow with the rate, the horizon shrinks.
    thin        fewer users: a random part of the requests. The duration stays.

A rate is requests / duration everywhere (`Trace.rate_rps`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from planner.errors import InputError, TraceError
from planner.traces import FloatArray, IntArray, Trace
from planner.units import quantity

Scaling = Literal["superpose", "compress", "thin"]
Lengths = Callable[[np.random.Generator, int], IntArray]
"""Draws the lengths [tokens] of so many requests."""

SAME_FRAC = 1e-9  # factors this near to 1 change nothing
MAX_REQUESTS = 50_000_000


@dataclass(frozen=True, slots=True)
class Asked:
    """Which traffic is meant: a trace at this rate (None: its own), and which part of it."""

    rate_rps: float | None = None
    how: Scaling = "superpose"
    part: str = "whole"

    def of(self, trace: Trace, *, seed: int) -> Trace:
        """The requests meant; the seed draws what `rescale` draws."""
        if self.rate_rps is not None:
            trace = rescale(trace, self.rate_rps, how=self.how, rng=np.random.default_rng(seed))
        return window(trace, self.part)


def same_requests(trace: Trace, other: Trace) -> bool:
    """Whether two draws of traffic are the same requests at the same times."""
    return all(
        np.array_equal(getattr(trace, name), getattr(other, name))
        for name in ("arrival_s", "input_tokens", "output_tokens")
    )


def rescale(trace: Trace, rate_rps: float, *, how: Scaling = "superpose", rng: np.random.Generator) -> Trace:
    """The trace at `rate_rps`, by one of the ways above; itself where it has that rate already.

    The asked rate is met up to one request in the duration: "superpose" leaves its first copy unshifted, and
    thinning keeps the first and the last request. "superpose" below the trace's rate thins.
    Copies keep their prefix ids and tenants: users share system prompts, which favours prefix caches.
    """
    if how not in ("superpose", "compress", "thin"):
        raise InputError(f"scale: expected superpose, compress or thin, found {how!r}")
    if not 0 < rate_rps < np.inf:
        raise InputError(f"rate: expected a number of requests/s > 0, found {rate_rps}")
    if not trace.duration_s > 0:
        raise TraceError(
            f"{trace.name}: all requests arrive at once, so there is no rate to scale to {rate_rps:g} "
            "requests/s; use a longer trace"
        )
    factor = rate_rps / trace.rate_rps
    if abs(factor - 1) <= SAME_FRAC:
        return trace
    if trace.after.size:
        raise TraceError(
            f"{trace.name}: requests wait for others (column after), so their rate is not ours to choose; "
            "leave the rate out, or the column"
        )
    said = f"{how}: {trace.rate_rps:.4g} -> {rate_rps:.4g} requests/s"
    if how == "compress":
        arrival_s = trace.arrival_s / factor
        return replace(trace, arrival_s=arrival_s, notes=(*trace.notes, f"{said}, clock times {factor:.4g}"))
    requests = round(rate_rps * trace.duration_s)
    if not 2 <= requests <= MAX_REQUESTS:
        raise InputError(
            f"rate: {rate_rps:g} requests/s over the {trace.duration_s:.4g} s of {trace.name} are {requests} "
            f"requests, expected 2 to {MAX_REQUESTS}; ask for another rate or window"
        )
    if how == "superpose" and factor > 1:
        return _superpose(trace, requests, said, rng)
    if factor > 1:
        raise InputError(
            f"rate: thin cannot raise {trace.rate_rps:.4g} to {rate_rps:g} requests/s; "
            "use superpose or compress"
        )
    inner = 1 + rng.choice(len(trace) - 2, size=requests - 2, replace=False)
    index = np.sort(np.concatenate(([0], inner, [len(trace) - 1])))
    return replace(
        trace.select(index), notes=(*trace.notes, f"{said}, {requests} of {len(trace)} requests kept")
    )


def _superpose(trace: Trace, requests: int, said: str, rng: np.random.Generator) -> Trace:
    n, start_s, period_s = len(trace), trace.arrival_s[0], trace.duration_s
    whole, rest = divmod(requests, n)
    rows, arrival_s = [np.arange(n)], [trace.arrival_s]
    for copy in range(1, whole + (rest > 0)):
        row = np.arange(n) if copy < whole else np.sort(rng.choice(n, size=rest, replace=False))
        turned_s = (trace.arrival_s[row] - start_s + rng.uniform(0.0, period_s)) % period_s
        rows.append(row)
        arrival_s.append(np.minimum(start_s + turned_s, trace.arrival_s[-1]))
    row, turned_s = np.concatenate(rows), np.concatenate(arrival_s)
    order = np.argsort(turned_s, kind="stable")
    note = f"{said}, {whole} whole copies and {rest} requests of one more, each shifted in a circle"
    if trace.has_prefixes:
        note += "; copies share their prefixes"
    return replace(trace.select(row[order], arrival_s=turned_s[order]), notes=(*trace.notes, note))


def window(trace: Trace, spec: str = "whole") -> Trace:
    """The part of a trace that `spec` names: "whole", "first 10 min" or "busiest 10 min".

    A window holds the arrivals in [start, start + length). The busiest is the earliest of those with the most
    input and output tokens; it starts with a request. Arrivals are counted from the window's start. A window
    longer than the trace is the whole trace.
    """
    if spec.strip() == "whole":
        return trace
    match = re.fullmatch(r"\s*(busiest|first)\s+(.+)", spec)
    if match is None:
        raise InputError(f"window: expected 'whole', 'first 10 min' or 'busiest 10 min', found {spec!r}")
    length_s = quantity(match[2], "s", where="window")
    if length_s <= 0:
        raise InputError(f"window: expected a length > 0, found {match[2]!r}")
    if length_s > trace.duration_s:
        note = f"window: {spec.strip()} is the whole trace of {trace.duration_s:.4g} s"
        return replace(trace, notes=(*trace.notes, note))
    arrival_s = trace.arrival_s
    first = 0
    if match[1] == "busiest":
        tokens = np.concatenate(([0], np.cumsum(trace.input_tokens + trace.output_tokens)))
        ends = np.searchsorted(arrival_s, arrival_s + length_s, side="left")
        first = int(np.argmax(tokens[ends] - tokens[:-1]))
    start_s = float(arrival_s[first])
    end = int(np.searchsorted(arrival_s, start_s + length_s, side="left"))
    # a length below the clock's resolution still holds the request it starts with
    part = trace.select(np.arange(first, max(end, first + 1)))
    measure = " by tokens" if match[1] == "busiest" else ""
    note = f"window: {spec.strip()}{measure}, from {start_s:.6g} s, {len(part)} of {len(trace)} requests"
    return replace(part, arrival_s=part.arrival_s - start_s, notes=(*trace.notes, note))


def synthesise(
    requests: int,
    rate_rps: float,
    *,
    input_tokens: Lengths,
    output_tokens: Lengths,
    gap_cv: float = 1.0,
    rng: np.random.Generator,
    name: str = "synthetic",
) -> Trace:
    """`requests` independent arrivals, the first at 0, with lengths drawn from the two distributions.

    Gaps are Gamma distributed with mean 1 / rate_rps and coefficient of variation `gap_cv`: 1 is a Poisson
    process, more is bursty, 0 is a clock.
    """
    if not 1 <= requests <= MAX_REQUESTS:
        raise InputError(f"requests: expected 1 to {MAX_REQUESTS}, found {requests}")
    if not 0 < rate_rps < np.inf:
        raise InputError(f"rate: expected a number of requests/s > 0, found {rate_rps}")
    if not 0 <= gap_cv <= 100:
        raise InputError(f"gap_cv: expected 0 (a clock) to 100, found {gap_cv}")
    gaps_s = np.full(requests, 1 / rate_rps)
    if gap_cv:
        gaps_s = rng.gamma(gap_cv**-2, gap_cv**2 / rate_rps, requests)
    gaps_s[0] = 0.0
    return Trace(
        name=name,
        arrival_s=np.cumsum(gaps_s),
        input_tokens=input_tokens(rng, requests),
        output_tokens=output_tokens(rng, requests),
        notes=(f"synthetic: {requests} requests, {rate_rps:g} requests/s, Gamma gaps of CV {gap_cv:g}",),
    )


def fixed(tokens: int) -> Lengths:
    """Every request the same."""
    _at_least_one("fixed length", tokens)
    return lambda rng, n: np.full(n, tokens, np.int64)


def uniform(low_tokens: int, high_tokens: int) -> Lengths:
    """Every whole number from low to high, both included, as likely as the next."""
    _at_least_one("lowest length", low_tokens)
    if high_tokens < low_tokens:
        raise InputError(f"uniform lengths: the highest ({high_tokens}) is below the lowest ({low_tokens})")
    return lambda rng, n: rng.integers(low_tokens, high_tokens, n, dtype=np.int64, endpoint=True)


def lognormal(mean_tokens: float, cv: float) -> Lengths:
    """Lognormal with this mean and coefficient of variation, rounded, at least 1."""
    _at_least_one("mean length", mean_tokens)
    if not 0 <= cv < np.inf:
        raise InputError(f"lognormal lengths: expected a coefficient of variation >= 0, found {cv}")
    variance = np.log1p(cv**2)
    mu, sigma = np.log(mean_tokens) - variance / 2, np.sqrt(variance)
    return lambda rng, n: _whole(rng.lognormal(mu, sigma, n))


def empirical(tokens: npt.ArrayLike) -> Lengths:
    """Drawn from observed lengths, with replacement."""
    observed = np.asarray(tokens, dtype=np.float64)
    if not observed.size or not (observed >= 1).all():
        raise InputError("empirical lengths: expected one or more numbers of tokens >= 1")
    return lambda rng, n: _whole(rng.choice(observed, n))


def _whole(tokens: FloatArray) -> IntArray:
    return np.maximum(np.round(tokens), 1).astype(np.int64)


def _at_least_one(what: str, tokens: float) -> None:
    if not 1 <= tokens < np.inf:
        raise InputError(f"{what}: expected a number of tokens >= 1, found {tokens}")
