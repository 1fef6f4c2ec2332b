"""The choice among families: planted truths are found, folds keep repeats together, falls are counted."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest

from planner.errors import InputError
from planner.models.families.linear_forms import AladdinSteps, DistServeForm
from planner.models.families.rooflines import RooflineSteps
from planner.models.families.splitwise_form import SplitwiseInterpolation
from planner.models.family_choice import (
    choose_step_family,
    default_families,
    find_falls,
    grow_work,
    score_errors,
    to_step_latency,
)
from planner.models.latency import Array, StepLatency
from planner.models.step_fit import Errors, PiecewiseLinearStepLatency
from planner.models.step_tables import COLUMNS, StepTable

SIZES = (64, 256, 512, 1024, 2048, 4096)
LINEAR = StepLatency((1.0, 4096.0), (0.0102, 0.8292), 0.0, 0.0, 4e-8, 0.0, 0.0, "planted")
BENT = StepLatency(
    (1.0, 256.0, 1024.0, 4096.0), (0.02, 0.021, 0.06, 0.5), 2e-9, 3e-6, 4e-8, 5e-4, 0.0, "planted"
)


def a_table(t_s: Any, *, repeats: int = 1, **operators: Any) -> StepTable:
    """Prefills of 1, 2, 4 prompts, decodes of 1 ... 256, and mixed steps of both; t_s(X) are their times."""
    rows = [(p, p * n, 0, p * n * (n + 1) / 2, 0, 0) for p in (1, 2, 4) for n in SIZES if p * n <= 4096]
    rows += [(0, 0, 0, 0, d, d * c) for d in (1, 2, 4, 8, 16, 32, 64, 128, 256) for c in (128, 1024, 4096)]
    rows += [(1, n, 0, n * (n + 1) / 2, d, d * 1024) for n in SIZES[:5] for d in (1, 16, 64, 256)]
    steps = pd.DataFrame(rows * repeats, columns=list(COLUMNS[:-1]))
    table = StepTable(steps.assign(t_s=1.0))
    return StepTable(steps.assign(t_s=t_s(table.X), **{name: f(table.X) for name, f in operators.items()}))


def aladdin_s(X: Array) -> Array:
    prefill = np.where(X[:, 4] > 0, 0.03 + 2e-4 * (X[:, 0] - X[:, 2]), 0.0)
    return np.asarray(prefill + np.where(X[:, 2] > 0, 0.02 + 1e-4 * X[:, 2] + 4e-8 * X[:, 3], 0.0))


def distserve_s(X: Array) -> Array:
    n = X[:, 0] - X[:, 2]
    prefill = np.where(X[:, 4] > 0, 0.02 + 1e-4 * n + 1e-8 * np.maximum(2 * X[:, 1] - n, 0), 0.0)
    large, D, K = X[:, 2] >= 95, X[:, 2], X[:, 3]
    decode = np.where(large, 0.01 + 2e-8 * K + 3e-4 * D, 0.02 + 4e-8 * K + 5e-5 * D)
    return np.asarray(prefill + np.where(D > 0, decode, 0.0))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "t_s"),
    [("aladdin", aladdin_s), ("distserve", distserve_s), ("five numbers", lambda X: BENT.step_s(*X.T))],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_planted_family_is_chosen(name: str, t_s: Any, seed: int) -> None:
    """Times of its own form, no noise. Wider families contain the linear ones: of equals the simplest."""
    chosen = choose_step_family(a_table(t_s), seed=seed)
    assert chosen.family == name
    assert chosen.model.get_params()["beyond"] == "raise"


def test_the_roofline_is_chosen_where_it_is_the_truth() -> None:
    chosen = choose_step_family(a_table(lambda X: 1.2 * BENT.step_s(*X.T)), candidates=default_families(BENT))
    assert chosen.family == "roofline"
    assert chosen.converted is None
    assert chosen.latency.step_s(1000.0) == pytest.approx(1.2 * BENT.step_s(1000.0))
    assert chosen.latency.mape_frac == pytest.approx(0, abs=1e-6)


def test_ours_is_handed_over_exactly_others_with_the_error_of_the_refit() -> None:
    """The five numbers of `latency` are the model's own; Splitwise's are a refit with an error of its own."""
    table = a_table(lambda X: BENT.step_s(*X.T))
    ours = choose_step_family(table, candidates={"five numbers": PiecewiseLinearStepLatency()})
    assert ours.converted is None
    assert ours.latency.f_s == ours.model.latency_.f_s
    splitwise = choose_step_family(table, candidates={"splitwise": SplitwiseInterpolation()})
    assert splitwise.converted is not None
    assert splitwise.latency.mape_frac == splitwise.converted["all"].mape_frac
    assert "refitted" in splitwise.latency.basis


def test_a_family_inside_the_five_numbers_is_converted_without_loss() -> None:
    """Aladdin's with c1 = c3 and k1 = c2 in steps of one kind is f(N) linear and d: the refit finds it."""
    table = a_table(lambda X: LINEAR.step_s(X[:, 0]) + 4e-8 * X[:, 3])
    rows = (table.steps.n_prefill == 0) | (table.steps.n_decode == 0)
    X, y = table.X[rows], table.y[rows]
    latency, is_exact = to_step_latency(AladdinSteps().fit(X, y), X)
    assert not is_exact
    assert latency.step_s(*X.T) == pytest.approx(y, rel=1e-6)


def test_repeats_are_held_out_together() -> None:
    """Times that depend on the step at random: a forest that had seen a repeat would know them to 1 %."""
    t: dict[tuple[float, ...], float] = {}
    rng = np.random.default_rng(0)

    def at_random(X: Array) -> Array:
        return np.array([t.setdefault(tuple(row), rng.uniform(0.01, 0.1)) for row in X.tolist()])

    chosen = choose_step_family(
        a_table(at_random, repeats=3), candidates={"vidur": default_families()["vidur"]}
    )
    assert chosen.errors_by_family["vidur"]["all"].mape_frac > 0.3


def test_equal_seeds_choose_alike_and_other_seeds_other_folds() -> None:
    table = a_table(lambda X: np.hypot(0.02, 1e-4 * X[:, 0]))
    first, same, other = (
        choose_step_family(table, candidates={"a": AladdinSteps()}, seed=s) for s in (1, 1, 2)
    )
    assert first.errors_by_family == same.errors_by_family
    assert first.errors_by_family != other.errors_by_family


def test_operators_reach_vidurs_forest() -> None:
    """A table with operator columns is fitted operator by operator."""
    table = a_table(
        lambda X: 0.02 + 1e-4 * X[:, 0],
        op_mlp_up_proj_s=lambda X: 0.01 + 1e-4 * X[:, 0],
        op_all_reduce_s=lambda X: np.full(len(X), 0.01),
        op_attn_prefill_s=lambda X: 0 * X[:, 0],
        op_attn_decode_s=lambda X: 0 * X[:, 0],
    )
    chosen = choose_step_family(table, candidates={"vidur": default_families()["vidur"]})
    assert sorted(chosen.model.forests_) == ["all_reduce", "mlp_up_proj"]


def test_families_that_cannot_be_fitted_are_named() -> None:
    """A table of mixed steps only: the two-phase families say so, the others compete."""
    table = a_table(lambda X: BENT.step_s(*X.T))
    steps = table.steps[(table.steps.n_prefill > 0) & (table.steps.n_decode > 0)]
    chosen = choose_step_family(
        StepTable(steps.reset_index(drop=True)), candidates=default_families(), folds=4
    )
    assert sorted(chosen.skipped) == ["aladdin", "distserve", "preble", "splitwise"]
    assert "aladdin was not tried" in str(chosen)
    with pytest.raises(InputError, match="no family can be fitted"):
        choose_step_family(StepTable(steps.reset_index(drop=True)), candidates={"aladdin": AladdinSteps()})


def test_too_few_steps_are_refused() -> None:
    table = a_table(lambda X: BENT.step_s(*X.T))
    with pytest.raises(InputError, match="too few to hold out one in 40"):
        choose_step_family(table, folds=40)


def test_a_fall_is_counted_and_measured() -> None:
    """DistServe's two sides with a jump down at 95: 0.02 + 94 * 1e-3 = 114 ms, then 0.01 + 95 * 3e-4 =
    38.5 ms, 66 % less. Aladdin's line has none."""
    X = np.array([[d, 0, d, 100 * d, 0] for d in (1, 10, 30, 60, 90, 100, 110, 120, 150, 190)], float)
    y = np.where(X[:, 2] < 95, 0.02 + 1e-3 * X[:, 2], 0.01 + 3e-4 * X[:, 2])
    (sequences,) = [f for f in find_falls(DistServeForm().fit(X, y), X) if f.growing == "sequences"]
    assert sequences.falling >= 2
    assert 0.4 < sequences.worst_frac < 0.8
    assert all(f.falling == 0 for f in find_falls(AladdinSteps().fit(X, y), X))


def test_grown_steps_by_hand() -> None:
    """Two prompts of 10 after 5 cached, 4 decodes of 25. Doubled: 2 * 20 * (5 + 10.5) pairs, 44 tokens."""
    X = np.array([[24.0, 2 * 10 * (5 + 5.5), 4, 100, 2]])
    assert grow_work(X, "prompt", 2.0).tolist() == [[44, 620, 4, 100, 2]]
    assert grow_work(X, "prefix", 2.0).tolist() == [[24, 420, 4, 100, 2]]
    assert grow_work(X, "sequences", 1.3).tolist() == [[26, 210, 6, 150, 2]]
    assert grow_work(X, "context", 2.0).tolist() == [[24, 210, 4, 200, 2]]


def test_each_regime_counts_alike() -> None:
    """A hundred prefills 10 % off and one decode 2 % off: 6 %; long contexts overlap and do not count."""
    errors = {
        "all": Errors(0.1, 0.1, 101),
        "prefill": Errors(0.1, 0.1, 100),
        "decode_small": Errors(0.02, 0.02, 1),
        "long_context": Errors(0.5, 0.5, 9),
    }
    assert score_errors(errors) == pytest.approx(0.06)


def test_the_refitted_form_is_monotone_whatever_was_chosen() -> None:
    """A forest is not monotone; the five numbers refitted to it are, by construction."""
    rng = np.random.default_rng(0)
    chosen = choose_step_family(
        a_table(lambda X: BENT.step_s(*X.T) * rng.uniform(0.7, 1.3, len(X))),
        candidates={"vidur": default_families()["vidur"]},
    )
    assert any(fall.falling for fall in chosen.falls)
    assert "falls in" in str(chosen)
    X = a_table(aladdin_s).X
    exact = RooflineSteps(chosen.latency, scaled=False).fit(X, np.ones(len(X)))
    assert all(fall.falling == 0 for fall in find_falls(exact, X))


def test_the_command_starts_without_scikit_learn() -> None:
    """It takes most of a second to import, and only fitting needs it."""
    code = "import sys, planner.cli; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_form_for_the_simulator_comes_where_it_beats_five_numbers() -> None:
    """Mixed steps 40 % quicker than five numbers add them up: corrected is 4 % off, its refit 21 %. With the
    times of five numbers themselves nothing is gained, and there is no form.
    """
    tried = {name: default_families()[name] for name in ("five numbers", "corrected")}

    def quick_mixed_s(X: Array) -> Array:
        return np.asarray(BENT.step_s(*X.T) * np.where((X[:, 4] > 0) & (X[:, 2] > 0), 0.6, 1.0))

    quick = choose_step_family(a_table(quick_mixed_s), candidates={"corrected": tried["corrected"]})
    assert quick.form is not None and quick.converted is not None
    assert score_errors(quick.errors_by_family["corrected"]) < score_errors(quick.converted) / 4
    X = a_table(quick_mixed_s).X
    assert quick.form.step_s(X) == pytest.approx(quick.model.predict(X))
    assert choose_step_family(a_table(lambda X: BENT.step_s(*X.T)), candidates=tried).form is None
