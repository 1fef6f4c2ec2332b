"""Output lengths: buckets, conditional means by hand and by enumeration, accuracies planted and recovered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone

from planner.errors import ExtrapolationError, InputError
from planner.models.output_length import FEATURES, bucket_of, bucket_range, length_features, synthetic_buckets
from planner.models.output_length_fit import BucketClassifier, ConditionalMean, later_accuracy
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"


def a_trace(inputs: np.ndarray, outputs: np.ndarray) -> Trace:
    return Trace("made", np.arange(len(inputs)) / 2.0, inputs.astype(np.int64), outputs.astype(np.int64))


def test_buckets_hold_their_upper_end() -> None:
    """1-200 tokens are bucket 0, 201-400 bucket 1."""
    assert bucket_of([1, 200, 201, 400, 401]).tolist() == [0, 0, 1, 1, 2]
    low, high = bucket_range([0, 2], 100)
    assert (low.tolist(), high.tolist()) == ([1, 201], [100, 300])
    with pytest.raises(InputError, match="must be >= 1"):
        bucket_of([1], 0)


@given(st.integers(1, 10**6), st.integers(1, 5000))
def test_every_length_lies_in_its_bucket(output_tokens: int, bucket_tokens: int) -> None:
    low, high = bucket_range(bucket_of(output_tokens, bucket_tokens), bucket_tokens)
    assert low <= output_tokens <= high


# --- a predictor of given accuracy


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.749, 1.0])
def test_a_synthetic_predictor_is_right_as_often_as_asked(accuracy: float) -> None:
    outputs = np.random.default_rng(1).geometric(0.004, 4001)
    predicted = synthetic_buckets(outputs, accuracy, np.random.default_rng(2))
    assert (predicted == bucket_of(outputs)).sum() == round(accuracy * 4001)
    assert set(predicted.tolist()) <= set(bucket_of(outputs).tolist())


def test_equal_seeds_give_equal_predictions() -> None:
    outputs = np.random.default_rng(1).geometric(0.004, 500)
    first, again, other = (synthetic_buckets(outputs, 0.6, np.random.default_rng(s)) for s in (3, 3, 4))
    assert (first == again).all() and (first != other).any()


def test_wrong_buckets_are_as_common_as_they_are() -> None:
    """60,000 outputs in buckets 0, 1, 2 as 3 : 2 : 1, never right: of those in 0, two thirds are said to be
    in 1 and a third in 2."""
    outputs = np.repeat([100, 300, 500], [30_000, 20_000, 10_000])
    predicted = synthetic_buckets(outputs, 0.0, np.random.default_rng(5))
    assert np.bincount(predicted[:30_000]) / 30_000 == pytest.approx([0, 2 / 3, 1 / 3], abs=0.01)
    assert np.bincount(predicted[50_000:]) / 10_000 == pytest.approx([0.6, 0.4], abs=0.02)


def test_where_all_outputs_share_a_bucket_a_mistake_is_the_next_one() -> None:
    predicted = synthetic_buckets(np.full(10, 50), 0.7, np.random.default_rng(0))
    assert sorted(predicted.tolist()) == [0] * 7 + [1] * 3


def test_an_accuracy_is_a_share() -> None:
    with pytest.raises(InputError, match=r"must be a share in \[0, 1\]"):
        synthetic_buckets([1], 74.9, np.random.default_rng(0))


# --- Aladdin's conditional mean


def test_conditional_mean_by_hand() -> None:
    """Short prompts end at 10, 20 or 60 tokens, long ones at 100 or 300. New: 30 and 200. After 10 tokens the
    short ones left end at 40 on average, after 20 at 60; a short one at 60 is like any: 100 and 300 are left.
    """
    X = np.array([[1.0, 0], [2, 0], [3, 0], [50, 0], [60, 0]])
    model = ConditionalMean(input_buckets=2, beyond="extrapolate")
    model.fit(X[[0, 1, 2, 3, 4, 3]], np.array([10.0, 20, 60, 100, 300, 200]))
    asked = np.array([[2.0, 0], [55, 0], [2, 10], [2, 19], [2, 20], [2, 60], [55, 150], [2, 300]])
    assert model.predict(asked).tolist() == [30, 200, 40, 40, 60, 200, 250, 301]


@pytest.mark.parametrize("seed", range(10))
def test_conditional_mean_is_the_mean_of_what_is_longer(seed: int) -> None:
    """Against the definition, with a loop; one bucket of inputs."""
    rng = np.random.default_rng(seed)
    outputs = rng.integers(1, 50, 200).astype(float)
    X = np.column_stack([rng.integers(1, 1000, 200), np.zeros(200)]).astype(float)
    model = ConditionalMean(input_buckets=1).fit(X, outputs)
    generated = np.arange(int(outputs.max()), dtype=float)
    expected = [outputs[outputs > g].mean() for g in generated]
    assert model.predict(np.column_stack([np.full(len(generated), 7.0), generated])) == pytest.approx(
        expected
    )


@pytest.mark.parametrize("seed", range(10))
def test_the_prediction_exceeds_what_is_there_and_never_falls(seed: int) -> None:
    rng = np.random.default_rng(seed)
    X = np.column_stack([rng.integers(1, 100, 300), np.zeros(300)]).astype(float)
    model = ConditionalMean(input_buckets=1, beyond="extrapolate").fit(
        X, rng.geometric(0.05, 300).astype(float)
    )
    generated = np.arange(200.0)
    told = model.predict(np.column_stack([np.full(200, 50.0), generated]))
    assert (told >= generated + 1).all() and (np.diff(told) >= 0).all()


def test_it_has_no_bias_on_what_it_was_fitted_to() -> None:
    """Aladdin 2.3: errors of a batch cancel."""
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.integers(1, 4000, 2000), np.zeros(2000)]).astype(float)
    y = rng.geometric(1 / (1 + X[:, 0] / 20)).astype(float)
    assert ConditionalMean().fit(X, y).predict(X).sum() == pytest.approx(y.sum())


def test_it_refuses_to_say_what_comes_after_the_longest() -> None:
    model = ConditionalMean(input_buckets=1).fit(np.array([[1.0, 0], [2, 0]]), np.array([5.0, 9.0]))
    with pytest.raises(ExtrapolationError, match="the longest output fitted has 9"):
        model.predict(np.array([[1.0, 9.0]]))
    assert clone(model).get_params() == {"beyond": "raise", "input_buckets": 1}


def test_it_refuses_columns_and_outputs_that_make_no_sense() -> None:
    with pytest.raises(InputError, match="expected input and generated"):
        ConditionalMean().fit(np.ones((3, 1)), np.ones(3))
    with pytest.raises(InputError, match="must be >= 1"):
        ConditionalMean().fit(np.ones((3, 2)), np.zeros(3))


# --- TetriInfer's classifier


def test_a_trace_offers_lengths_time_tenant_and_prefix() -> None:
    """Blocks of 10. The second prompt begins as the first for one block, the third for both of its two, the
    last has none; block 8 after another block is another prefix."""
    arrival_s = np.array([0.0, 1.0, 90_000.0, 90_001.0])
    trace = Trace(
        "made",
        arrival_s,
        np.array([25, 40, 15, 7]),
        np.ones(4, int),
        prefix_offsets=np.array([0, 2, 5, 7, 7]),
        prefix_ids=np.array([7, 8, 7, 9, 8, 7, 9]),
        prefix_block_tokens=10,
        tenant=np.array([0, 1, 0, 1]),
        tenants=("a", "b"),
    )
    assert FEATURES == ("input_tokens", "day_s", "tenant", "first_block", "seen_tokens")
    assert length_features(trace).tolist() == [
        [25, 0, 0, 7, 0],
        [40, 1, 1, 7, 10],
        [15, 3600, 0, 7, 15],
        [7, 3601, 1, -1, 0],
    ]


def test_a_planted_rule_is_learned_and_noise_is_not() -> None:
    """Prompts beyond 1000 tokens have outputs in bucket 2, the others in bucket 0, 3 : 7. In the second trace
    the same outputs are shuffled: no better than the commonest bucket."""
    rng = np.random.default_rng(0)
    inputs = rng.integers(1, 1429, 3000)
    outputs = np.where(inputs > 1000, 500, 100)
    found = later_accuracy(a_trace(inputs, outputs), BucketClassifier(iterations=20))
    assert found.accuracy_frac > 0.99 and found.majority_frac == pytest.approx(0.7, abs=0.04)
    assert (found.fitted, found.later) == (2100, 900)
    blind = later_accuracy(a_trace(inputs, rng.permutation(outputs)), BucketClassifier(iterations=20))
    assert blind.accuracy_frac == pytest.approx(blind.majority_frac, abs=0.03)


def test_only_later_requests_are_judged() -> None:
    """The rule turns round after 70 % of the requests: what was learned is wrong for all that follow."""
    inputs = np.tile([10, 1000], 500)
    later = np.arange(1000) >= 700
    outputs = np.where((inputs > 500) ^ later, 300, 100)
    assert later_accuracy(a_trace(inputs, outputs), BucketClassifier(iterations=20)).accuracy_frac == 0.0


def test_one_bucket_alone_is_always_right() -> None:
    trace = a_trace(np.arange(1, 101), np.full(100, 20))
    assert later_accuracy(trace).accuracy_frac == 1.0
    with pytest.raises(InputError, match="too few to hold some out"):
        later_accuracy(a_trace(np.array([5]), np.array([5])))


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.skipif(not TRACES.exists(), reason="needs ../shared")
def test_the_accuracy_on_azures_conversations_is_what_the_docs_say() -> None:
    found = later_accuracy(read_trace(TRACES / "AzureLLMInferenceTrace_conv.csv"))
    assert found.accuracy_frac == pytest.approx(0.682, abs=0.01)
    assert found.majority_frac == pytest.approx(0.564, abs=0.001)


def test_the_simulators_predictor_does_not_import_scikit_learn() -> None:
    code = (
        "import sys, planner.models.output_length, planner.models.power; sys.exit('sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
