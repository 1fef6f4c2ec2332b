"""Rescaling and windows of planner/traffic/scaling.py, drawn requests of benchmarks/generated_traffic.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.generated_traffic import empirical, fixed, lognormal, synthesise, uniform
from planner.errors import InputError, TraceError
from planner.traffic.scaling import busiest_at, rescale_trace, same_requests, select_window
from planner.traffic.trace import FloatArray, Trace
from planner.traffic.workload import count_dispersion


def numbered(arrival_s: FloatArray | list[float]) -> Trace:
    """Request i has i + 1 input and 2 i + 1 output tokens and one prefix block, its own number."""
    n = len(arrival_s)
    return Trace(
        "numbered",
        arrival_s=np.asarray(arrival_s, dtype=np.float64),
        input_tokens=np.arange(n) + 1,
        output_tokens=2 * np.arange(n) + 1,
        prefix_offsets=np.arange(n + 1),
        prefix_ids=np.arange(n),
        prefix_block_tokens=16,
    )


def poisson(n: int, seed: int = 0) -> Trace:
    gaps_s = np.random.default_rng(seed).exponential(1.0, n)
    return numbered(np.cumsum(gaps_s) - gaps_s[0])


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ---------------------------------------------------------------- rescale


@pytest.mark.parametrize("how", ["superpose", "compress", "thin"])
def test_the_same_rate_gives_the_same_trace(how: str) -> None:
    """Factor 1 to within 1e-9: not even a copy."""
    trace = poisson(50)
    assert rescale_trace(trace, trace.rate_rps * (1 + 1e-10), scale=how, rng=rng()) is trace  # type: ignore[arg-type]


def test_compress_turns_the_clock() -> None:
    """Four requests in 6 s are 2/3 requests/s; at 2 requests/s all times are a third."""
    trace = rescale_trace(numbered([0.0, 1.0, 2.0, 6.0]), 2.0, scale="compress", rng=rng())
    assert trace.arrival_s == pytest.approx([0.0, 1 / 3, 2 / 3, 2.0])
    assert (trace.rate_rps, trace.input_tokens.tolist()) == (2.0, [1, 2, 3, 4])
    assert trace.notes == ("compress: 0.6667 -> 2 requests/s, clock times 3",)


def test_doubling_superposes_two_whole_copies() -> None:
    """Every request twice; the first copy keeps its times, the second is turned by one shift modulo 6 s."""
    trace = rescale_trace(numbered([0.0, 1.0, 2.0, 6.0]), 4 / 3, rng=rng())
    assert sorted(trace.input_tokens.tolist()) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert trace.duration_s == 6.0
    at = {number: sorted(trace.arrival_s[trace.input_tokens == number].tolist()) for number in (1, 2, 3)}
    shift_s = next(t for t in at[1] if t != 0.0)
    for number, was_s in ((1, 0.0), (2, 1.0), (3, 2.0)):
        assert at[number] == pytest.approx(sorted([was_s, (was_s + shift_s) % 6.0]))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(3, 60), factor=st.floats(0.1, 6.0), seed=st.integers(0, 99))
def test_superpose_conserves_requests_and_rate(n: int, factor: float, seed: int) -> None:
    """round(factor * n) requests in the same duration, each floor or ceil(factor) times, lengths kept."""
    trace = poisson(n, seed)
    requests = round(factor * trace.rate_rps * trace.duration_s)
    if requests < 2:
        return
    scaled = rescale_trace(trace, factor * trace.rate_rps, rng=rng(seed))
    assert len(scaled) == requests
    assert scaled.duration_s == pytest.approx(trace.duration_s)
    assert (scaled.output_tokens == 2 * scaled.input_tokens - 1).all()
    assert (scaled.prefix_ids == scaled.input_tokens - 1).all()
    times = np.bincount(scaled.input_tokens - 1, minlength=n)
    assert times.min() >= requests // n and times.max() <= -(-requests // n)


def test_a_copy_keeps_its_order_around_the_circle() -> None:
    """Tripled: in each copy the numbers rise, but for the one place where the circle closes."""
    trace = rescale_trace(poisson(40), 3 * poisson(40).rate_rps, rng=rng(3))
    whole = trace.select(trace.input_tokens == 1).arrival_s  # where each copy begins
    assert len(whole) == 3
    for begin_s in whole:
        turned_s = (trace.arrival_s - begin_s) % trace.duration_s
        base_s = poisson(40).arrival_s
        # this copy holds every number at its own distance from its first
        for number in range(2, 40):
            gaps = np.abs(turned_s[trace.input_tokens == number] - base_s[number - 1])
            assert gaps.min() < 1e-6


@settings(max_examples=40, deadline=None)
@given(n=st.integers(3, 60), share=st.floats(0.05, 0.99), seed=st.integers(0, 99))
def test_thin_keeps_some_requests_as_they_are(n: int, share: float, seed: int) -> None:
    """A subset in order, at its own times, first and last included."""
    trace = poisson(n, seed)
    requests = round(share * trace.rate_rps * trace.duration_s)
    if requests < 2:
        return
    thinned = rescale_trace(trace, share * trace.rate_rps, scale="thin", rng=rng(seed))
    assert len(thinned) == requests
    assert (thinned.arrival_s == trace.arrival_s[thinned.input_tokens - 1]).all()
    assert (np.diff(thinned.input_tokens) > 0).all()
    assert thinned.duration_s == trace.duration_s


@pytest.mark.parametrize("how", ["superpose", "thin"])
def test_equal_seeds_give_equal_traces(how: str) -> None:
    factor = 2.5 if how == "superpose" else 0.4
    one, two, other = (
        rescale_trace(poisson(200), factor * poisson(200).rate_rps, scale=how, rng=rng(seed))  # type: ignore[arg-type]
        for seed in (1, 1, 2)
    )
    assert (one.arrival_s == two.arrival_s).all() and (one.input_tokens == two.input_tokens).all()
    assert (one.arrival_s != other.arrival_s).any()


def test_users_smooth_what_a_faster_clock_sharpens() -> None:
    """Bursty arrivals, times 5: independent users keep the index of dispersion, a clock lifts it.

    10 s of the fast clock are 50 s of the slow one, and there the dispersion of Gamma gaps of CV 4
    is nearer to its limit, 16.
    """
    trace = synthesise(4000, 1.0, gap_cv=4.0, input_tokens=fixed(1), output_tokens=fixed(1), rng=rng())
    users = rescale_trace(trace, 5 * trace.rate_rps, rng=rng(1))
    clock = rescale_trace(trace, 5 * trace.rate_rps, scale="compress", rng=rng(1))
    before, summed, sharpened = (count_dispersion(t.arrival_s, 10.0) for t in (trace, users, clock))
    assert before and summed and sharpened
    assert summed == pytest.approx(before, rel=0.3)
    assert sharpened > 1.3 * before


@pytest.mark.parametrize(
    ("rate_rps", "how", "message"),
    [
        (0.0, "superpose", "rate: expected a number of requests/s > 0, found 0.0"),
        (float("nan"), "superpose", "rate: expected"),
        (float("inf"), "compress", "rate: expected"),
        (9.0, "thin", "thin cannot raise 0.6667 to 9 requests/s; use superpose or compress"),
        (0.1, "thin", "are 1 requests, expected 2 to"),
        (1e9, "superpose", "expected 2 to 50000000; ask for another rate or window"),
        (1e308, "superpose", "are inf requests, expected 2 to 50000000"),
        (1.0, "stretch", "scale: expected superpose, compress or thin, found 'stretch'"),
    ],
)
def test_rescale_refuses(rate_rps: float, how: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rescale_trace(numbered([0.0, 1.0, 2.0, 6.0]), rate_rps, scale=how, rng=rng())  # type: ignore[arg-type]


def test_requests_that_arrive_at_once_have_no_rate_to_scale() -> None:
    with pytest.raises(TraceError, match="arrive at once"):
        rescale_trace(numbered([5.0, 5.0]), 1.0, rng=rng())


# ---------------------------------------------------------------- windows


def test_the_busiest_window_counts_tokens_not_requests() -> None:
    """Tokens of request i: 3 i + 2 = 2 5 8 11 14. [0, 3) holds 2 + 5 + 8 = 15, [9, 12) holds 11 + 14 = 25."""
    trace = select_window(numbered([0.0, 1.0, 2.0, 9.0, 11.0]), "busiest 3 s")
    assert (trace.arrival_s.tolist(), trace.input_tokens.tolist()) == ([0.0, 2.0], [4, 5])
    assert trace.notes == ("window: busiest 3 s by tokens, from 9 s, 2 of 5 requests",)


def test_a_window_is_open_at_its_end() -> None:
    """[0, 2) holds the arrivals at 0 and 1, not that at 2; counted from the first arrival, here 7 s."""
    trace = select_window(numbered([7.0, 8.0, 9.0, 70.0]), "first 2 s")
    assert (trace.arrival_s.tolist(), trace.input_tokens.tolist()) == ([0.0, 1.0], [1, 2])
    assert len(select_window(numbered([0.0, 1.0, 61.0]), " first  1 min ")) == 2


def test_the_whole_trace_is_itself() -> None:
    trace = numbered([1.0, 2.0])
    assert select_window(trace) is trace
    longer = select_window(trace, "busiest 10 min")
    assert longer.arrival_s.tolist() == [1.0, 2.0]
    assert longer.notes == ("window: busiest 10 min is the whole trace of 1 s",)


@pytest.mark.parametrize("seed", range(10))
def test_no_other_window_is_busier(seed: int) -> None:
    """Brute force over windows that start at any request."""
    trace = poisson(80, seed)
    work = trace.input_tokens + trace.output_tokens
    best = max(work[(trace.arrival_s >= t) & (trace.arrival_s < t + 9.0)].sum() for t in trace.arrival_s)
    busiest = select_window(trace, "busiest 9 s")
    assert (busiest.input_tokens + busiest.output_tokens).sum() == best
    assert busiest.arrival_s[0] == 0.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "window: expected 'whole'"),
        ("last 10 min", "window: expected 'whole', 'first 10 min' or 'busiest 10 min', found 'last 10 min'"),
        ("busiest", "window: expected"),
        ("busiest 10 parsecs", "window: unknown unit 'parsecs'"),
        ("first 0 s", "window: expected a length > 0"),
        ("first -3 s", "window: expected a length > 0"),
        ("first 600", "window: .600. has no unit; write 600 ms or 600 s"),
    ],
)
def test_window_refuses(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        select_window(poisson(5), spec)


# ---------------------------------------------------------------- synthetic traffic


@pytest.mark.parametrize("gap_cv", [0.5, 1.0, 3.0])
def test_synthetic_gaps_have_the_asked_mean_and_cv(gap_cv: float) -> None:
    """40,000 gaps: the mean within 5 standard errors, the CV within 5 %."""
    trace = synthesise(40_000, 8.0, gap_cv=gap_cv, input_tokens=fixed(5), output_tokens=fixed(1), rng=rng(1))
    gaps_s = np.diff(trace.arrival_s)
    assert trace.arrival_s[0] == 0.0
    assert gaps_s.mean() == pytest.approx(1 / 8, rel=5 * gap_cv / 200)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(gap_cv, rel=0.05)


def test_no_variation_is_a_clock() -> None:
    """4 requests/s: a gap of 0.25 s."""
    trace = synthesise(3, 4.0, gap_cv=0, input_tokens=fixed(9), output_tokens=fixed(2), rng=rng())
    assert trace.arrival_s.tolist() == [0.0, 0.25, 0.5]
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([9, 9, 9], [2, 2, 2])


def test_lengths_follow_their_distributions() -> None:
    """100,000 draws of a lognormal with mean 1000 and CV 1.5 have a standard error of 4.7."""
    n = 100_000
    long = lognormal(1000.0, 1.5)(rng(2), n)
    assert long.mean() == pytest.approx(1000, abs=5 * 4.7)
    assert long.std() / long.mean() == pytest.approx(1.5, rel=0.1)
    assert lognormal(2.0, 3.0)(rng(), n).min() == 1
    assert sorted(set(uniform(3, 5)(rng(), n).tolist())) == [3, 4, 5]
    assert set(empirical([7, 9])(rng(), n).tolist()) == {7, 9}


def test_synthetic_traces_follow_the_seed() -> None:
    def make(seed: int) -> Trace:
        return synthesise(
            50, 2.0, input_tokens=lognormal(500, 1), output_tokens=uniform(1, 99), rng=rng(seed)
        )

    assert (make(1).arrival_s == make(1).arrival_s).all()
    assert (make(1).input_tokens == make(1).input_tokens).all()
    assert (make(1).arrival_s != make(2).arrival_s).any()


@pytest.mark.parametrize(
    ("requests", "rate_rps", "gap_cv", "message"),
    [
        (0, 1.0, 1.0, "requests: "),
        (5, 0.0, 1.0, "rate: "),
        (5, 1.0, -1.0, "gap_cv: "),
        (5, 1.0, np.nan, "gap_cv: "),
    ],
)
def test_synthesise_refuses(requests: int, rate_rps: float, gap_cv: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        synthesise(
            requests, rate_rps, gap_cv=gap_cv, input_tokens=fixed(1), output_tokens=fixed(1), rng=rng()
        )


def test_distributions_refuse_lengths_below_one() -> None:
    with pytest.raises(InputError, match="fixed length: expected a number of tokens >= 1, found 0"):
        fixed(0)
    with pytest.raises(InputError, match=r"the highest \(3\) is below the lowest \(4\)"):
        uniform(4, 3)
    with pytest.raises(InputError, match="coefficient of variation >= 0, found -1"):
        lognormal(5.0, -1)
    with pytest.raises(InputError, match="one or more numbers of tokens >= 1"):
        empirical([])


@pytest.mark.parametrize(
    "spec", ["busiest 3 s", "busiest 40 s", "busiest 0.2 s", "busiest 90 s", "first 9 s"]
)
def test_the_busiest_window_of_copies_is_that_of_all_of_them_in_order(spec: str) -> None:
    rng = np.random.default_rng(5)
    for seed in range(6):
        n = int(rng.integers(3, 300))
        arrival_s = np.sort(rng.integers(0, 100, n) if seed % 2 else rng.uniform(0, 100, n)).astype(float)
        trace = replace(
            numbered([0.0, *arrival_s, 100.0]),
            input_tokens=rng.integers(1, 4000, n + 2),
            output_tokens=rng.integers(1, 400, n + 2),
        )
        rate_rps = trace.rate_rps * float(rng.uniform(0.8, 20))
        found = busiest_at(trace, rate_rps, spec, rng=np.random.default_rng(seed))
        asked = select_window(rescale_trace(trace, rate_rps, rng=np.random.default_rng(seed)), spec)
        assert same_requests(found, asked) and found.notes == asked.notes
