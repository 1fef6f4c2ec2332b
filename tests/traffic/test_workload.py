"""Summary and request classes of planner/traffic/workload.py, and the sample traces that come with us."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import TraceError
from planner.files.checked_files import repository_dir
from planner.traffic import workload as workload_module
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace
from planner.traffic.workload import (
    Workload,
    count_dispersion,
    peak_rps,
    prefix_sharing,
    summarise_trace,
    to_classes,
)

SHARED = Path(__file__).parents[3] / "shared" / "data" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the checkout")


def lengths(inputs: list[int], outputs: list[int]) -> Trace:
    """One request per second."""
    return Trace("lengths", np.arange(len(inputs), dtype=np.float64), np.array(inputs), np.array(outputs))


# ---------------------------------------------------------------- describe


def test_summary_of_a_small_trace() -> None:
    """Arrivals 0 1 2 4: 4 requests in 4 s; gaps 1 1 2 have mean 4/3 and variance 2/9, CV sqrt(2)/4."""
    trace = Trace(
        "small",
        np.array([0.0, 1.0, 2.0, 4.0]),
        np.array([10, 20, 30, 100]),
        np.array([1, 1, 1, 5]),
        dropped={"no input tokens": 3},
        notes=("as read",),
    )
    summary = summarise_trace(trace)
    assert (summary.requests, summary.duration_s, summary.rate_rps) == (4, 4.0, 1.0)
    assert summary.gap_cv == pytest.approx(2**0.5 / 4)
    assert (summary.input_tokens.mean, summary.input_tokens.p50, summary.input_tokens.max) == (
        40.0,
        25.0,
        100.0,
    )
    assert summary.peak_rps == {1: 1.0, 10: None, 60: None, 600: None}
    assert (summary.dropped, summary.notes, summary.prefixes) == ({"no input tokens": 3}, ("as read",), None)


def test_peaks_slide_over_the_trace() -> None:
    """Five requests in [8, 18) make 0.5 requests/s, though no aligned window of 10 s holds over four."""
    arrival_s = np.array([0.0, 8.0, 9.0, 11.0, 12.0, 17.9, 18.0, 30.0])
    assert peak_rps(arrival_s, 10.0) == 0.5
    assert peak_rps(arrival_s, 31.0) is None


def test_dispersion_counts_whole_windows() -> None:
    """Windows of 1 s from 5 s hold 3, 0, 1: mean 4/3, variance (9 + 0 + 1)/3 - 16/9 = 14/9, ratio 7/6.

    The arrival at 8.5 s lies in a window that the trace does not fill.
    """
    assert count_dispersion(np.array([5.0, 5.1, 5.2, 7.0, 8.5]), 1.0) == pytest.approx(7 / 6)
    assert count_dispersion(np.array([5.0, 6.9]), 1.0) is None


def test_poisson_counts_have_dispersion_one() -> None:
    """100,000 arrivals in windows of 10: 10,000 windows, standard error sqrt(2 / 10,000) = 0.014."""
    arrival_s = np.cumsum(np.random.default_rng(0).exponential(1.0, 100_000))
    assert count_dispersion(arrival_s, 10.0) == pytest.approx(1.0, abs=0.07)


@pytest.mark.parametrize("arrival_s", [[3.0], [3.0, 3.0], [0.0, 1e-300], [0.0, 3e9]])
def test_any_trace_has_a_summary_that_json_can_hold(arrival_s: list[float]) -> None:
    """One request, two at once, two nearly at once, two that are a century apart."""
    n = len(arrival_s)
    trace = Trace("odd", np.array(arrival_s), np.full(n, 5), np.full(n, 5))
    plain = json.loads(json.dumps(summarise_trace(trace).as_dict(), allow_nan=False))
    assert plain["requests"] == n
    assert set(plain["peak_rps"]) == {"1 s", "10 s", "60 s", "600 s"}
    assert (plain["rate_rps"] is None) == (trace.duration_s == 0)


def test_sessions_are_counted_with_their_turns_and_pauses() -> None:
    """1 and 2 wait for 0, 4 for 3; 5 is alone. Sessions of 3 and 2; pauses of 1, 3 and 2 s."""
    trace = Trace(
        "turns",
        np.arange(6.0),
        np.full(6, 10),
        np.full(6, 5),
        after=np.array([[1, 0], [2, 0], [4, 3]]),
        think_s=np.array([0.0, 1.0, 3.0, 0.0, 2.0, 0.0]),
    )
    found = summarise_trace(trace).sessions
    assert found is not None and (found.sessions, found.waiting) == (2, 3)
    assert (found.turns.mean, found.turns.max, found.think_s.p50, found.think_s.max) == (2.5, 3.0, 2.0, 3.0)
    assert summarise_trace(trace.select(np.array([0, 3, 5]))).sessions is None


def with_blocks(inputs: list[int], blocks: list[list[int]], block_tokens: int) -> Trace:
    n = len(inputs)
    return Trace(
        "blocks",
        np.arange(n, dtype=np.float64),
        np.array(inputs),
        np.ones(n, np.int64),
        prefix_offsets=np.cumsum([0, *map(len, blocks)]),
        prefix_ids=np.array([block for one in blocks for block in one]),
        prefix_block_tokens=block_tokens,
    )


def test_prefix_ratios_by_hand() -> None:
    """Blocks of 10: prompts of 25 (a b c), 30 (a b d), 25 (e b f), 5 (g).

    Hits: a b of the second, 2 of 10 blocks and 20 of 85 tokens. The third's b was seen, not its e before it.
    Per request 0, 20/30, 0, 0: mean 1/6. Shared with any other: a b, a b and b, 10 tokens each: 50 of 85.
    """
    trace = with_blocks([25, 30, 25, 5], [[1, 2, 3], [1, 2, 4], [5, 2, 6], [7]], 10)
    sharing = prefix_sharing(trace)
    assert (sharing.blocks, sharing.distinct_blocks, sharing.block_tokens) == (10, 7, 10)
    assert sharing.block_hit_frac == pytest.approx(2 / 10)
    assert sharing.token_hit_frac == pytest.approx(20 / 85)
    assert sharing.request_hit_frac == pytest.approx(1 / 6)
    assert sharing.shared_token_frac == pytest.approx(50 / 85)
    assert summarise_trace(trace).prefixes == sharing


def test_a_full_repeat_hits_no_more_than_its_input() -> None:
    """The last block holds 5 of 10 tokens: the second prompt of 15 is all hits, 15 of 30 tokens.

    The third names no blocks, and a block twice in one prompt is no hit: 2 of 6 blocks.
    """
    sharing = prefix_sharing(with_blocks([15, 15, 9, 20], [[1, 2], [1, 2], [], [3, 3]], 10))
    assert sharing.token_hit_frac == pytest.approx(15 / 59)
    assert sharing.block_hit_frac == pytest.approx(2 / 6)


@pytest.mark.parametrize("seed", range(20))
def test_prefix_ratios_match_a_plain_loop(seed: int) -> None:
    """A set of seen blocks, request by request."""
    rng = np.random.default_rng(seed)
    blocks = [rng.integers(0, 6, rng.integers(0, 5)).tolist() for _ in range(30)]
    inputs = [max(1, 10 * len(one) - int(rng.integers(0, 10))) for one in blocks]
    seen: set[int] = set()
    hits = hit_tokens = 0
    for size, one in zip(inputs, blocks, strict=True):
        lead = next((i for i, block in enumerate(one) if block not in seen), len(one))
        hits, hit_tokens = hits + lead, hit_tokens + min(size, 10 * lead)
        seen.update(one)
    sharing = prefix_sharing(with_blocks(inputs, blocks, 10))
    assert sharing.block_hit_frac == pytest.approx(hits / sum(map(len, blocks)))
    assert sharing.token_hit_frac == pytest.approx(hit_tokens / sum(inputs))


# ---------------------------------------------------------------- classes


def classes(trace: Trace, inputs: int, outputs: int) -> Workload:
    """`to_classes` with other numbers of parts."""
    with mock.patch.multiple(workload_module, INPUT_PARTS=inputs, OUTPUT_PARTS=outputs):
        return to_classes(trace)


def test_classes_by_hand() -> None:
    """Inputs 1 2 | 8 9 cut in the middle, each part by output: 4 classes of one request."""
    workload = classes(lengths([1, 8, 2, 9], [50, 7, 40, 6]), inputs=2, outputs=2)
    assert workload.min_input_tokens.tolist() == [2, 1, 9, 8]
    assert workload.min_output_tokens.tolist() == [40, 50, 6, 7]


def test_minima_are_taken_for_each_length_alone() -> None:
    """(10, 5) and (20, 3) in one class: no request is as small as (10, 3)."""
    workload = classes(lengths([10, 20], [5, 3]), inputs=1, outputs=1)
    assert (workload.min_input_tokens.tolist(), workload.min_output_tokens.tolist()) == ([10], [3])


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=2, max_size=80)


@settings(max_examples=80, deadline=None)
@given(pairs=LENGTHS, inputs=st.integers(1, 6), outputs=st.integers(1, 4))
def test_every_request_is_in_one_class(pairs: list[tuple[int, int]], inputs: int, outputs: int) -> None:
    """No class is empty, every request is at least as long as the minima of some class."""
    trace = lengths([i for i, _ in pairs], [o for _, o in pairs])
    workload = classes(trace, inputs, outputs)
    assert 1 <= len(workload) <= inputs * outputs
    assert (workload.requests > 0).all() and workload.requests.sum() == len(trace)
    assert workload.min_input_tokens.min() == trace.input_tokens.min()
    assert workload.min_output_tokens.min() == trace.output_tokens.min()
    minima = list(zip(workload.min_input_tokens, workload.min_output_tokens, strict=True))
    assert all(any(i >= least_in and o >= least_out for least_in, least_out in minima) for i, o in pairs)


def test_classes_refuse_nonsense() -> None:
    with pytest.raises(TraceError, match="arrive at once"):
        to_classes(lengths([1], [1]))


# ---------------------------------------------------------------- the samples and the published traces


@pytest.mark.parametrize(
    ("name", "rate_rps", "mean_input", "p50_input", "mean_output", "p50_output", "least_gap_cv"),
    [("conversation", 5.5, 1155, 1020, 211, 129, 1.0), ("code", 2.6, 2048, 1500, 28, 13, 5.0)],
)
def test_samples_have_the_published_shape(
    name: str,
    rate_rps: float,
    mean_input: float,
    p50_input: float,
    mean_output: float,
    p50_output: float,
    least_gap_cv: float,
) -> None:
    """Within 5 % of the figures Azure published; code comes in bursts."""
    summary = summarise_trace(read_trace(repository_dir("examples") / "traces" / f"azure-{name}-sample.csv"))
    assert summary.rate_rps == pytest.approx(rate_rps, rel=1e-3)
    assert summary.input_tokens.mean == pytest.approx(mean_input, rel=0.05)
    assert summary.input_tokens.p50 == pytest.approx(p50_input, rel=0.05)
    assert summary.output_tokens.mean == pytest.approx(mean_output, rel=0.05)
    assert summary.output_tokens.p50 == pytest.approx(p50_output, rel=0.05)
    assert summary.gap_cv is not None and summary.gap_cv > least_gap_cv
    assert (summary.dropped, summary.notes) == ({}, ())


def test_samples_are_what_their_script_writes() -> None:
    """Equal seeds, equal files, byte for byte."""
    examples = repository_dir("examples")
    samples = runpy.run_path(str(examples / "make_samples.py"))["samples"]()
    assert len(samples) == 4
    for name, content in samples.items():
        assert (examples / "traces" / name).read_bytes() == content.encode()


@pytest.mark.shared
@needs_shared
@pytest.mark.parametrize(("sample", "published"), [("conversation", "conv"), ("code", "code")])
def test_samples_lie_within_a_tenth_of_the_published_percentiles(sample: str, published: str) -> None:
    """p10, p15 ... p95, p99 of both lengths."""
    ours = read_trace(repository_dir("examples") / "traces" / f"azure-{sample}-sample.csv")
    theirs = read_trace(SHARED / f"AzureLLMInferenceTrace_{published}.csv")
    percentiles = [*range(10, 100, 5), 99]
    for a, b in ((ours.input_tokens, theirs.input_tokens), (ours.output_tokens, theirs.output_tokens)):
        assert np.percentile(a, percentiles) == pytest.approx(np.percentile(b, percentiles), rel=0.1)
    rows = set(zip(theirs.input_tokens.tolist(), theirs.output_tokens.tolist(), strict=True))
    same = sum(
        row in rows for row in zip(ours.input_tokens.tolist(), ours.output_tokens.tolist(), strict=True)
    )
    assert same < len(ours) / 2  # pairs of lengths are not copied


@pytest.mark.shared
@needs_shared
@pytest.mark.parametrize(
    ("name", "token_hits", "request_hits", "shared_tokens"),
    [("conversation", 0.374, 0.409, 0.530), ("synthetic", 0.651, 0.432, 0.803)],
)
def test_prefix_sharing_of_mooncake(
    name: str, token_hits: float, request_hits: float, shared_tokens: float
) -> None:
    """Measured on these files by others (reference/prefix_and_fairness.md); the paper says 0.40 and 0.66."""
    sharing = summarise_trace(read_trace(SHARED / f"mooncake_{name}_trace.jsonl.gz")).prefixes
    assert sharing is not None
    assert sharing.token_hit_frac == pytest.approx(token_hits, abs=0.001)
    assert sharing.request_hit_frac == pytest.approx(request_hits, abs=0.001)
    assert sharing.shared_token_frac == pytest.approx(shared_tokens, abs=0.001)
