"""Requests drawn from a description have what was described: rate, lengths, bursts, sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from benchmarks.generated_traffic import lognormal, synthesise
from planner.errors import InputError
from planner.traffic.described import (
    Clients,
    Description,
    Prefixes,
    Sessions,
    check_description,
    draw_requests,
)
from planner.traffic.described_of import described_of
from planner.traffic.lengths import Fixed, LengthHistogram, Lognormal, Percentiles
from planner.traffic.sessions import session_numbers
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace
from planner.traffic.trace_writing import to_jsonl
from planner.traffic.workload import count_dispersion, prefix_sharing

PLAIN = Description((20.0,), 1000.0, Lognormal(1500, 1.0), Lognormal(300, 0.5), gap_cv=1.0)
ALIKE = Clients(count=1, skew=0.0, lengths_frac=0.0)


def draws(description: Description, count: int = 8) -> list[Trace]:
    return [draw_requests(description, seed=seed) for seed in range(count)]


def fano(description: Description, window_s: float) -> float:
    """The mean over draws of variance / mean of counts."""
    found = [count_dispersion(trace.arrival_s, window_s) for trace in draws(description, 12)]
    return float(np.mean([each for each in found if each is not None]))


def test_rate_and_means_are_met() -> None:
    """20,000 requests expected, whose count has a standard deviation of 140; means of lengths within 3 %."""
    for trace in draws(PLAIN, 3):
        assert len(trace) == pytest.approx(20_000, abs=600)
        assert trace.input_tokens.mean() == pytest.approx(1500, rel=0.03)
        assert trace.output_tokens.mean() == pytest.approx(300, rel=0.03)


def test_equal_seeds_draw_equal_requests() -> None:
    draw_requests.cache_clear()
    first = draw_requests(PLAIN, seed=3)
    draw_requests.cache_clear()
    again, other = draw_requests(PLAIN, seed=3), draw_requests(PLAIN, seed=4)
    assert np.array_equal(first.arrival_s, again.arrival_s)
    assert np.array_equal(first.input_tokens, again.input_tokens)
    assert len(other) != len(first) or not np.array_equal(first.arrival_s, other.arrival_s)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_cv_that_is_asked_for(cv: float) -> None:
    for trace in draws(replace(PLAIN, gap_cv=cv), 2):
        gaps_s = np.diff(trace.arrival_s)
        assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.06)


@pytest.mark.long
@pytest.mark.parametrize("asked", [((1.0, 2.0), (10.0, 4.0), (60.0, 12.0)), ((1.0, 12.0), (10.0, 60.0))])
def test_counts_have_the_fano_factors_that_are_asked_for(asked: tuple[tuple[float, float], ...]) -> None:
    """On average over twelve draws, within a fifth."""
    description = replace(PLAIN, rate_rps=(5.0,), duration_s=3600.0, fano=asked)
    for window_s, value in asked:
        assert fano(description, window_s) == pytest.approx(value, rel=0.2)


def test_clients_make_bursts_that_poisson_has_not() -> None:
    """Without anything said of bursts; one client with a CV of 1 is a Poisson process whose rate moves."""
    assert fano(replace(PLAIN, gap_cv=None), 10.0) > 3
    assert fano(PLAIN, 10.0) == pytest.approx(1, abs=0.15)


def test_a_curve_says_how_many_come_in_every_interval() -> None:
    """10, 30 and 20 requests/s for 100 s each, in every draw, be they bursty."""
    description = replace(PLAIN, rate_rps=(10.0, 30.0, 20.0), every_s=100.0, duration_s=300.0, gap_cv=None)
    counts = np.mean(
        [np.histogram(trace.arrival_s, [0, 100, 200, 300])[0] for trace in draws(description, 12)], 0
    )
    assert counts == pytest.approx([1000, 3000, 2000], rel=0.12)


def test_the_busiest_part_of_a_longer_curve_is_drawn() -> None:
    """Two intervals of (5, 20, 30, 5) are 25 requests/s at most; a duration of two laps has the mean, 15."""
    curve = replace(PLAIN, rate_rps=(5.0, 20.0, 30.0, 5.0), every_s=100.0)
    assert replace(curve, duration_s=200.0).mean_rps == pytest.approx(25)
    assert replace(curve, duration_s=800.0).mean_rps == pytest.approx(15)


def test_a_higher_rate_is_more_requests() -> None:
    """Another rate scales the expected count."""
    assert PLAIN.at_rate(5.0).mean_rps == pytest.approx(5)
    bursty = replace(PLAIN, fano=((10.0, 5.0),))
    assert bursty.at_rate(40.0).fano == ((10.0, 9.0),)


@pytest.mark.parametrize("rate_rps", [0.0, -1.0, float("nan"), float("inf")])
def test_another_rate_must_be_above_zero(rate_rps: float) -> None:
    """`plan simulate --rate 0` of described traffic divided by it; -1 asked for "-20 s or more"."""
    with pytest.raises(InputError, match="rate: expected a number of requests/s > 0"):
        PLAIN.at_rate(rate_rps)


def test_fixed_lengths_are_all_alike() -> None:
    trace = draw_requests(replace(PLAIN, input=Fixed(700), output=Fixed(9)), seed=0)
    assert set(trace.input_tokens) == {700} and set(trace.output_tokens) == {9}


def test_a_histogram_is_drawn_as_it_is() -> None:
    """A quarter at most 100 tokens, three quarters in (100, 200]."""
    trace = draw_requests(replace(PLAIN, input=LengthHistogram((0, 100, 200), (1, 3)), clients=ALIKE), seed=0)
    assert (trace.input_tokens <= 100).mean() == pytest.approx(0.25, abs=0.02)
    assert trace.input_tokens.min() >= 1 and trace.input_tokens.max() <= 200


def test_percentiles_and_mean_are_met_at_once() -> None:
    asked = Percentiles((0.5, 0.95), (900, 5000), 1500)
    trace = draw_requests(replace(PLAIN, input=asked), seed=0)
    assert np.percentile(trace.input_tokens, (50, 95)) == pytest.approx([900, 5000], rel=0.06)
    assert trace.input_tokens.mean() == pytest.approx(1500, rel=0.04)
    assert asked.mean_tokens == pytest.approx(1500, rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(1.05, 4.0), min_size=1, max_size=4), st.floats(0.0, 1.0), st.integers(10, 5000))
def test_every_mean_that_is_allowed_is_met(steps: list[float], where: float, first: int) -> None:
    """Whatever the percentiles, a mean between the ends that a refusal names is met, and they stay."""
    fracs = tuple((k + 1) / (len(steps) + 2) for k in range(len(steps) + 1))
    tokens = tuple(float(first * np.prod(steps[:k])) for k in range(len(steps) + 1))
    low, high = 0.99 * tokens[0], tokens[-1] * 1.5
    asked = Percentiles(fracs, tokens, low + where * (high - low))
    try:
        mean = asked.mean_tokens
    except InputError as error:
        assert "allow" in str(error)
        return
    assert mean == pytest.approx(asked.given_mean_tokens, rel=0.01)
    scores = np.array([0.0])
    assert asked.of_scores(scores)[0] >= 1


def test_input_and_output_have_the_rank_correlation() -> None:
    trace = draw_requests(replace(PLAIN, joint=-0.5), seed=0)
    assert spearmanr(trace.input_tokens, trace.output_tokens)[0] == pytest.approx(-0.5, abs=0.03)


def test_a_joint_table_is_met() -> None:
    """Short prompts have short answers in nine of ten requests, long ones long answers."""
    trace = draw_requests(replace(PLAIN, joint_table=((9.0, 1.0), (1.0, 9.0))), seed=0)
    is_long = [each > np.median(each) for each in (trace.input_tokens, trace.output_tokens)]
    assert (is_long[0] == is_long[1]).mean() == pytest.approx(0.9, abs=0.01)
    assert trace.output_tokens.mean() == pytest.approx(300, rel=0.03)


def test_lengths_drift_with_the_curve() -> None:
    """Longer by a standard deviation in the second half."""
    asked = replace(PLAIN, rate_rps=(10.0, 10.5), every_s=500.0, drift=((-0.5, 0.5), ()))
    trace = draw_requests(asked, seed=0)
    late = trace.arrival_s > 500
    assert np.median(trace.input_tokens[late]) > 1.8 * np.median(trace.input_tokens[~late])
    assert trace.input_tokens.mean() == pytest.approx(1500, rel=0.03)


def test_sessions_grow_and_wait() -> None:
    """A turn holds the prompt and the answer of the one before it, and waits for it."""
    asked = replace(PLAIN, rate_rps=(4.0,), duration_s=900.0, sessions=Sessions(4.0, 20.0, 50_000))
    trace = draw_requests(asked, seed=1)
    child, parent = trace.after.T
    assert len(child) > 1000
    assert (trace.input_tokens[child] > trace.input_tokens[parent] + trace.output_tokens[parent]).all()
    assert trace.think_s[child].mean() == pytest.approx(20, rel=0.1)
    assert (trace.input_tokens + trace.output_tokens).max() <= 50_000
    assert trace.rate_rps == pytest.approx(4, rel=0.15)
    turns = np.bincount(session_numbers(trace))
    assert 2 < turns.mean() <= 4.5
    assert prefix_sharing(trace).token_hit_frac > 0.5


def test_long_prompts_have_the_same_blocks_in_a_file(tmp_path: Path) -> None:
    """A file's blocks are joined where the mean prompt has over 256. The drawn ones had 16 tokens for all
    that, so the times of a plan and of its traffic.jsonl differed.
    """
    asked = replace(PLAIN, input=Fixed(9000), duration_s=20.0, sessions=Sessions(3.0, 2.0, 100_000))
    drawn = draw_requests(asked, seed=0)
    (tmp_path / "traffic.jsonl").write_text(to_jsonl(drawn))
    read = read_trace(tmp_path / "traffic.jsonl")
    assert drawn.prefix_block_tokens == read.prefix_block_tokens > 16
    assert prefix_sharing(drawn).token_hit_frac == prefix_sharing(read).token_hit_frac


def test_prefixes_are_shared() -> None:
    """800 of every prompt's tokens are one of five texts; prompts of 1,000 tokens share 80 %."""
    asked = replace(PLAIN, input=Fixed(1000), prefixes=Prefixes(800, 5))
    found = prefix_sharing(draw_requests(asked, seed=0))
    assert found.token_hit_frac == pytest.approx(0.8, abs=0.01)
    assert found.distinct_blocks == 5 * 800 // found.block_tokens


def test_tenants_are_named() -> None:
    trace = draw_requests(replace(PLAIN, tenants=3), seed=0)
    assert trace.tenants == ("tenant-1", "tenant-2", "tenant-3")
    assert set(trace.tenant) == {0, 1, 2}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"duration_s": 0.5}, "expected 20 to .* set duration to .* s or more"),
        ({"duration_s": 1e9}, "expected 20 to .* set duration to .* s or less"),
        ({"fano": ((600.0, 3.0),)}, "more than half"),
        ({"fano": ((10.0, 0.5),)}, "less than 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_description(replace(PLAIN, **changed))  # type: ignore[arg-type]


def test_a_description_of_a_trace_draws_requests_like_it() -> None:
    """Count, means, Fano factor at 10 s of bursty traffic, within what one trace says of them."""
    trace = synthesise(
        8000,
        10.0,
        input_tokens=lognormal(1200, 1.0),
        output_tokens=lognormal(120, 0.8),
        gap_cv=3.0,
        rng=np.random.default_rng(0),
    )
    found = described_of(trace)
    drawn = draw_requests(found, seed=1)
    assert len(drawn) == pytest.approx(8000, rel=0.1)
    assert drawn.input_tokens.mean() == pytest.approx(trace.input_tokens.mean(), rel=0.04)
    assert drawn.output_tokens.mean() == pytest.approx(trace.output_tokens.mean(), rel=0.04)
    own = count_dispersion(trace.arrival_s, 10.0)
    assert own is not None and fano(found, 10.0) == pytest.approx(own, rel=0.4)


def test_too_few_requests_are_not_described() -> None:
    trace = Trace("few", np.arange(5.0), np.full(5, 9), np.full(5, 9))
    with pytest.raises(InputError, match="too few to describe"):
        described_of(trace)


@pytest.mark.parametrize("duration_s", [10.6, 35.4, 100.0003])
def test_every_window_of_a_description_is_counted(duration_s: float) -> None:
    """An even stream has the least Fano factor, 1, in every window, also if the duration is no multiple of
    them; 35.4 / 0.1 is 353.99... in floats. The last request lies within the described duration.
    """
    arrival_s = np.linspace(0.0, duration_s, 500)
    description = described_of(Trace("even", arrival_s, np.arange(1, 501), np.arange(1, 501)))
    assert {factor for _, factor in description.fano} == {1.0}
    assert description.duration_s >= duration_s
