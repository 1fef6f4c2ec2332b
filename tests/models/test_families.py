"""The families of step times: planted coefficients, rules by hand, refusal, and the published data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from planner import importers
from planner.documents.catalog import read_catalog
from planner.errors import ExtrapolationError, InputError
from planner.importers import StatedSetup
from planner.importers.splitwise_tables import splitwise_table
from planner.models.correction import step_covariance, uncorrected_s
from planner.models.families.corrected import CorrectedSteps, informative_rows
from planner.models.families.linear_forms import AladdinSteps, DistServeForm, PrebleSteps
from planner.models.families.rooflines import RooflineSteps
from planner.models.families.splitwise_form import SplitwiseInterpolation
from planner.models.families.vidur_forest import VidurForest, equivalent_prefill_tokens
from planner.models.family_choice import default_families
from planner.models.latency import Array, StepLatency
from planner.models.step_tables import StepTable

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
SHAPE = StepLatency((1.0, 256.0, 4096.0), (0.01, 0.012, 0.1), 1e-9, 1e-6, 2e-8, 1e-4, 0.0, "shape")
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="no shared data beside the checkout")


def prefills(rng: np.random.Generator, rows: int) -> Array:
    """Batches of 1 to 8 prompts of one length each, nothing cached."""
    batch, n = rng.integers(1, 9, rows), np.exp(rng.uniform(3, 8, rows)).round()
    none = np.zeros(rows)
    return np.column_stack([batch * n, batch * n * (n + 1) / 2, none, none, batch])


def decodes(rng: np.random.Generator, rows: int, most: int = 200) -> Array:
    batch, context = rng.integers(1, most, rows), rng.integers(50, 8000, rows)
    none = np.zeros(rows)
    return np.column_stack([batch, none, batch, batch * context, none]).astype(float)


def both(seed: int) -> Array:
    rng = np.random.default_rng(seed)
    return np.vstack([prefills(rng, 60), decodes(rng, 80)])


def mixed(X: Array) -> Array:
    """Every prefill of `both` with a decode of it."""
    return np.asarray(X[:60] + X[60:120])


@pytest.mark.parametrize("seed", range(3))
def test_aladdins_coefficients_are_recovered(seed: int) -> None:
    """t_pre = 2e-4 sum l + 0.01; t_dec = 3e-8 K + 1e-4 b + 0.02."""
    X = both(seed)
    y = np.where(X[:, 4] > 0, 0.01 + 2e-4 * X[:, 0], 0.02 + 1e-4 * X[:, 2] + 3e-8 * X[:, 3])
    model = AladdinSteps().fit(X, y)
    assert model.prefill_ == pytest.approx([0.01, 2e-4])
    assert model.decode_ == pytest.approx([0.02, 1e-4, 3e-8])


@pytest.mark.parametrize("seed", range(3))
def test_distserves_coefficients_are_recovered_on_both_sides_of_the_split(seed: int) -> None:
    X = both(seed)
    n = X[:, 0] / np.maximum(X[:, 4], 1)
    prefill = 0.018 + 1e-4 * X[:, 0] + 7e-9 * X[:, 4] * n**2
    small, large = 0.02 + 6e-7 * X[:, 3] + 4e-5 * X[:, 2], 0.007 + 5e-7 * X[:, 3] + 1.6e-4 * X[:, 2]
    decode = np.where(X[:, 2] < 95, small, large)
    model = DistServeForm().fit(X, np.where(X[:, 4] > 0, prefill, decode))
    assert model.prefill_ == pytest.approx([0.018, 1e-4, 7e-9])
    assert model.decode_ == pytest.approx(np.array([[0.02, 6e-7, 4e-5], [0.007, 5e-7, 1.6e-4]]))


def test_distserve_without_large_batches_uses_the_small_ones() -> None:
    X = decodes(np.random.default_rng(0), 40, most=60)
    model = DistServeForm(beyond="extrapolate").fit(X, 0.02 + 1e-4 * X[:, 2])
    assert model.predict(np.array([[128.0, 0, 128, 128, 0]])) == pytest.approx(0.0328)


def test_prebles_regression_is_recovered() -> None:
    X = both(0)
    model = PrebleSteps().fit(X, np.where(X[:, 4] > 0, 0.01 + 2e-4 * X[:, 0], 0.02 + 3e-8 * X[:, 3]))
    assert [*model.prefill_, *model.decode_] == pytest.approx([0.01, 2e-4, 0.02, 3e-8])


def test_a_mixed_step_is_a_prefill_and_a_decode() -> None:
    """0.01 + 100 * 1e-4 for 100 new tokens, 0.02 + 3 * 1e-3 for 3 decodes: 43 ms."""
    X = both(0)
    y = np.where(X[:, 4] > 0, 0.01 + 1e-4 * X[:, 0], 0.02 + 1e-3 * X[:, 2])
    model = AladdinSteps().fit(X, y)
    assert model.predict(np.array([[103.0, 5050, 3, 300, 1]])) == pytest.approx(0.043)


def test_a_phase_without_rows_is_refused() -> None:
    X = decodes(np.random.default_rng(0), 20)
    with pytest.raises(ExtrapolationError, match="a prefill step, fitted on none"):
        AladdinSteps(beyond="extrapolate").fit(X, X[:, 2]).predict(np.array([[8.0, 36, 0, 0, 1]]))
    with pytest.raises(InputError, match="mixed steps only"):
        AladdinSteps().fit(np.array([[9.0, 36, 1, 9, 1]] * 3), np.ones(3))


def test_splitwise_is_linear_between_medians() -> None:
    """Prompts of 100 tokens take 1, 1, 9 s, of 300 3 s: medians 1 and 3; 200 take 2. Two decodes: 0.15."""
    X = np.array(
        [[100.0, 5050, 0, 0, 1]] * 3 + [[300.0, 45150, 0, 0, 1]] + [[1.0, 0, 1, 50, 0], [3, 0, 3, 150, 0]]
    )
    model = SplitwiseInterpolation().fit(X, np.array([1.0, 1, 9, 3, 0.1, 0.2]))
    asked = np.array([[100.0, 0, 0, 0, 1], [200, 0, 0, 0, 1], [2, 0, 2, 100, 0]])
    assert model.predict(asked) == pytest.approx([1, 2, 0.15])
    outside = SplitwiseInterpolation(beyond="extrapolate").fit(X, np.array([1.0, 1, 9, 3, 0.1, 0.2]))
    assert outside.predict(np.array([[500.0, 0, 0, 0, 1], [5, 0, 5, 100, 0]])) == pytest.approx([5, 0.3])


def test_a_batch_of_prefills_counts_as_one_of_root_sum_of_squares() -> None:
    """Prompts of 300 and 400 tokens make 45,150 + 80,200 pairs: one of 500. 100 new after 150 cached make
    100 * (150 + 50.5) pairs: 100 * (100 + 300) = 40,000, so 200, as 250^2 - 150^2 = 200^2."""
    X = np.array([[700.0, 45150 + 80200, 0, 0, 2], [100, 20050, 0, 0, 1], [5, 0, 5, 500, 0]])
    assert equivalent_prefill_tokens(X) == pytest.approx([500, 200, 0])


def test_vidurs_forests_learn_operators_where_the_table_has_them() -> None:
    """Each operator depends on a variable of its own, so mixed steps follow from prefills and decodes alone,
    within what forests can do (5 %). A forest of the total has not seen such steps, and is further off."""
    X = both(1)
    token, communication = 0.01 + 1e-5 * X[:, 0], 1e-3 + 1e-6 * X[:, 0]
    parts = pd.DataFrame(
        {
            "mlp_up_proj": token,
            "all_reduce": communication,
            "attn_prefill": 2e-9 * X[:, 1],
            "attn_decode": 3e-8 * X[:, 3],
        }
    )
    y = parts.sum(axis=1).to_numpy()
    asked = mixed(X)
    t = 0.011 + 1.1e-5 * asked[:, 0] + 2e-9 * asked[:, 1] + 3e-8 * asked[:, 3]
    model = VidurForest(trees=20, beyond="extrapolate")
    errors = [
        np.abs(fit.predict(asked) / t - 1).mean()
        for fit in (model.fit(X, y), VidurForest(trees=20, beyond="extrapolate").fit(X, y, parts))
    ]
    assert sorted(model.forests_) == ["total"]
    assert errors[1] < 0.05 < errors[0]
    with pytest.raises(InputError, match="lacks attn_decode; needs"):
        model.fit(X, y, parts.drop(columns="attn_decode"))


def test_an_engines_one_attention_stands_for_both() -> None:
    """vLLM has one kernel for prefills and decodes, and a rest: both depend on all of the step, and their sum
    is the step again on rows that were fitted."""
    X = both(1)
    parts = pd.DataFrame(
        {
            "attn": 2e-9 * X[:, 1] + 3e-8 * X[:, 3] + 1e-4,
            "mlp_up_proj": 1e-5 * X[:, 0],
            "rest": 1e-3 + 1e-6 * X[:, 2],
        }
    )
    y = parts.sum(axis=1).to_numpy()
    found = VidurForest(trees=20).fit(X, y, parts).predict(X)
    assert np.abs(found / y - 1).mean() < 0.05


def test_vidurs_forest_is_reproducible() -> None:
    X = both(0)
    first, second = (VidurForest(trees=5, seed=7).fit(X, 0.01 + X[:, 0] * 1e-5).predict(X) for _ in range(2))
    assert (first == second).all()


def test_the_rooflines_scales_are_recovered_and_are_a_step_latency() -> None:
    """Planted: 5 ms, f x 2, a x 3, b and d x 1.5, e x 1."""
    X = np.vstack([both(0), mixed(both(0))])
    X = X[X[:, 0] <= 4096]
    f = SHAPE.step_s(X[:, 0])
    y = 0.005 + 2 * f + 3 * SHAPE.a_s * X[:, 1] + 1.5 * (1e-6 * X[:, 2] + 2e-8 * X[:, 3]) + 1e-4 * X[:, 4]
    model = RooflineSteps(SHAPE).fit(X, y)
    assert model.scales_ == pytest.approx([0.005, 2, 3, 1.5, 1])
    assert model.latency_ is not None
    assert model.latency_.step_s(*X.T) == pytest.approx(model.predict(X))
    assert RooflineSteps(SHAPE, scaled=False).fit(X, y).predict(X) == pytest.approx(SHAPE.step_s(*X.T))


def test_the_corrected_formula_is_recovered_where_nothing_needs_correcting() -> None:
    """Times of the formula itself: coefficients within 3 %, unseen steps within 1 %."""
    X, unseen = np.vstack([both(0), mixed(both(0))]), np.vstack([both(1), mixed(both(1))])
    formula = np.array([0.02, 0.005, 5e-5, 2e-9, 1e-5, 4e-8])
    model = CorrectedSteps(beyond="extrapolate").fit(X, uncorrected_s(X, formula))
    assert np.array(model.form_.formula_s) == pytest.approx(formula, rel=0.03)
    assert model.predict(unseen) == pytest.approx(uncorrected_s(unseen, formula), rel=0.01)


def test_the_correction_follows_what_the_formula_cannot() -> None:
    """Prefills above 2048 tokens 40 % slower: sizes that were left out are found within 10 % even so."""
    sizes = np.array([2.0**k for k in range(6, 15)])
    X = np.column_stack([sizes, sizes * (sizes + 1) / 2, 0 * sizes, 0 * sizes, sizes > 0])
    y = np.hypot(0.02, 1e-4 * sizes) * np.where(sizes > 2048, 1.4, 1.0)
    seen = sizes != 8192
    model = CorrectedSteps().fit(X[seen], y[seen])
    assert model.predict(X[~seen]) == pytest.approx(y[~seen], rel=0.1)
    assert model.predict(X[seen]) == pytest.approx(y[seen], rel=0.03)


def test_covariance_is_one_valid_kernel() -> None:
    """Symmetric, 1 + w on the diagonal, no negative eigenvalue: otherwise there is no such process."""
    z = np.random.default_rng(0).uniform(0, 10, (60, 7))
    k = step_covariance(z, z)
    assert np.diag(k) == pytest.approx(1.25)
    assert np.allclose(k, k.T) and np.linalg.eigvalsh(k).min() > -1e-9


def test_informative_steps_are_spread_and_know_no_times() -> None:
    """Of 100 prefills in ten far-apart sizes, ten picks take each size once."""
    sizes = np.repeat([2.0**k for k in range(4, 14)], 10)
    X = np.column_stack([sizes, sizes * (sizes + 1) / 2, 0 * sizes, 0 * sizes, sizes > 0])
    assert len(set(sizes[informative_rows(X, 10)])) == 10
    with pytest.raises(InputError, match="must be 1 to 100"):
        informative_rows(X, 101)


def test_many_steps_are_fitted_on_the_most_informative() -> None:
    X = np.vstack([both(seed) for seed in range(15)])
    model = CorrectedSteps(most_anchors=50).fit(X, SHAPE.step_s(*X.T))
    assert len(model.form_.weights) == 50
    assert model.predict(X) == pytest.approx(SHAPE.step_s(*X.T), rel=0.25)


@pytest.mark.parametrize("name", default_families(SHAPE))
def test_every_family_refuses_to_leave_its_profile(name: str) -> None:
    X = both(0)
    model = default_families(SHAPE)[name].fit(X, SHAPE.step_s(*X.T))
    beyond = X.max(axis=0, keepdims=True) * [[2, 2, 0, 0, 1]]
    with pytest.raises(ExtrapolationError, match="profiled up to"):
        model.predict(beyond)
    assert np.isfinite(model.set_params(beyond="extrapolate").predict(beyond)).all()


@pytest.mark.parametrize("name", default_families(SHAPE))
def test_every_family_refuses_times_and_columns_that_make_no_sense(name: str) -> None:
    X = both(0)
    with pytest.raises(InputError, match="must be > 0"):
        default_families(SHAPE)[name].fit(X, np.zeros(len(X)))
    with pytest.raises(InputError, match="must be the 5"):
        default_families(SHAPE)[name].fit(X[:, :4], np.ones(len(X)))


@pytest.mark.parametrize("name", ["preble", "aladdin", "roofline", "five numbers"])
@pytest.mark.parametrize("seed", range(3))
def test_linear_families_are_monotone_even_on_noise(name: str, seed: int) -> None:
    """Times drawn without regard to the step: more tokens, sequences or context never take less."""
    X, rng = both(seed), np.random.default_rng(seed)
    model = (
        default_families(SHAPE)[name].fit(X, rng.uniform(0.01, 1.0, len(X))).set_params(beyond="extrapolate")
    )
    t = model.predict(X)
    for growth in ([1, 1.3, 0, 0, 0], [0, 0, 0, 1.3, 0]):
        assert (model.predict(X * (1 + np.array(growth) * (X[:, 2:3] == 0))) >= t - 1e-12).all()
    more = X + (X[:, 2:3] > 0) * np.array([1, 0, 1, 1, 0])
    assert (model.predict(more) >= t - 1e-12).all()


# --- published data -----------------------------------------------------------------------------

SPLITWISE = [
    ("bloom-176b", "a100-80gb", 8),
    ("bloom-176b", "h100-80gb", 8),
    ("llama2-70b", "a100-80gb", 4),
    ("llama2-70b", "a100-80gb", 8),
    ("llama2-70b", "h100-80gb", 4),
    ("llama2-70b", "h100-80gb", 8),
]


def relative_error(model: Any, X: Array, y: Array, seen: Array, asked: Array) -> Array:
    return np.asarray(np.abs(model.fit(X[seen], y[seen]).predict(X[asked]) / y[asked] - 1))


@pytest.mark.shared
@needs_reference
def test_splitwise_cells_that_were_not_seen() -> None:
    """The target, over the six tables: decode <= 2.2 %, prefill <= 4 %; no table beyond 2.7 and 4.5 %. A cell
    is (prompt, batch, output): its prefills and its decodes are left out together."""
    model, errors = CorrectedSteps(beyond="extrapolate"), []
    for names in SPLITWISE:
        table = splitwise_table(REFERENCE / "splitwise" / "perf_model.csv", *names)
        X, y = table.X, table.y
        runs = len(X) // 2
        cell, error = (
            np.tile(np.unique(X[runs:], axis=0, return_inverse=True)[1].ravel(), 2),
            np.empty(len(y)),
        )
        for c in np.unique(cell):
            error[cell == c] = relative_error(model, X, y, cell != c, cell == c)
        errors.append([error[:runs].mean(), error[runs:].mean()])
    assert len(np.unique(cell)) == 19
    assert (np.mean(errors, axis=0) <= [0.04, 0.0225]).all()
    assert (np.max(errors, axis=0) <= [0.045, 0.027]).all()


@pytest.mark.shared
@needs_reference
def test_splitwise_random_split() -> None:
    """The paper's claim, 80:20: below 3 % for both, over the six tables; Llama on 8 H100, whose repeats alone
    lie 2.9 % from their medians, is the one table above it."""
    model, errors = CorrectedSteps(beyond="extrapolate"), []
    for names in SPLITWISE:
        table = splitwise_table(REFERENCE / "splitwise" / "perf_model.csv", *names)
        for seed in range(5):
            asked = np.zeros(len(table.y), dtype=bool)
            asked[np.random.default_rng(seed).permutation(len(asked))[: len(asked) // 5]] = True
            error = relative_error(model, table.X, table.y, ~asked, asked)
            prefill = table.X[asked, 2] == 0
            errors.append([error[prefill].mean(), error[~prefill].mean()])
    assert (np.mean(errors, axis=0) < 0.03).all()
    by_table = np.array(errors).reshape(6, 5, 2).mean(axis=1)
    assert (by_table < [0.035, 0.03]).all()


@pytest.mark.shared
@needs_reference
@pytest.mark.parametrize(
    "name",
    [
        "aic_a100_llama-2-70b_tp4",
        "aic_h100_llama-2-70b_tp2",
        "aic_h100_llama-2-7b_tp1",
        "vidur_a100_llama-2-70b_tp2",
        "vidur_sampled_a100_llama-2-7b_tp1",
    ],
)
def test_step_oracles_from_a_tenth_of_their_rows(name: str) -> None:
    """MAPE <= 3 % and nineteen in twenty within 10 % on 520 steps, from 57 chosen by their inputs."""
    rows = pd.read_csv(REFERENCE / "vidur" / f"oracle_{name}.csv")
    new = rows.n_prefill * rows.chunk
    X = np.column_stack(
        [
            new + rows.n_decode,
            new * (rows.prefix + (rows.chunk + 1) / 2),
            rows.n_decode,
            rows.n_decode * rows.ctx,
            rows.n_prefill,
        ]
    ).astype(float)
    seen = np.zeros(len(X), dtype=bool)
    seen[informative_rows(X, len(X) // 10)] = True
    model = CorrectedSteps(beyond="extrapolate")
    error = relative_error(model, X, rows.total_ms.to_numpy(float) / 1e3, seen, ~seen)
    assert error.mean() <= 0.03
    assert np.quantile(error, 0.95) <= 0.10


@pytest.mark.shared
@needs_reference
def test_splitwise_sims_knots_are_the_medians_of_its_measurements() -> None:
    """perf_knots.csv is what the simulator reads."""
    knots = pd.read_csv(REFERENCE / "splitwise" / "perf_knots.csv")
    rows = knots[
        (knots.model == "bloom-176b") & (knots.hardware == "h100-80gb") & (knots.tensor_parallel == 8)
    ]
    table = splitwise_table(REFERENCE / "splitwise" / "perf_model.csv", "bloom-176b", "h100-80gb", 8)
    own = SplitwiseInterpolation().fit(table.X, table.y)
    assert own.prompt_[1] == pytest.approx(rows.prompt_time_s.to_numpy(float))


@pytest.mark.shared
@needs_reference
@pytest.mark.parametrize("tp", [2, 4])
def test_operators_of_vidurs_own_profile_add_up_to_steps_held_aside(tp: int) -> None:
    """A forest per operator from a tenth of the steps; the totals of the other 520, which no fit has seen,
    are at most 5 % off. With TP the all-reduce is one of the operators.
    """
    path = REFERENCE / "vidur" / f"oracle_{'vidur' if tp == 2 else 'aic'}_a100_llama-2-70b_tp{tp}.csv"
    facts = StatedSetup(llm="meta-llama/Llama-2-70b-hf", gpu="a100-80g")
    table = importers.read("vidur", [path], facts, read_catalog())
    assert isinstance(table, StepTable)
    operators = table.operators
    assert operators is not None and (operators.all_reduce > 0).all()
    assert operators.sum(axis=1).to_numpy() == pytest.approx(table.y, rel=1e-4)
    seen = np.zeros(len(table.y), dtype=bool)
    seen[informative_rows(table.X, len(table.y) // 10)] = True
    model = VidurForest(beyond="extrapolate").fit(table.X[seen], np.ones(seen.sum()), operators[seen])
    assert np.abs(model.predict(table.X[~seen]) / table.y[~seen] - 1).mean() < 0.05
