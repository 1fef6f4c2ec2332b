"""Step times: planted coefficients, tables, and the fits that ship."""

import importlib.util
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from plans import CATALOG

from planner.errors import ExtrapolationError, InputError
from planner.files.checked_files import repository_dir
from planner.models.latency import Array, StepLatency, cached_tokens
from planner.models.memory import active_weight_bytes
from planner.models.step_fit import (
    PiecewiseLinearStepLatency,
    cross_validated_errors,
    equal_shares,
    errors_by_regime,
)
from planner.models.step_tables import StepTable, read_step_table

LATENCY = repository_dir("catalogs") / "latency"
FILES = sorted(LATENCY.rglob("*.yaml"))
PLANTED = StepLatency(
    (1.0, 64.0, 256.0, 1024.0, 4096.0),
    (0.01, 0.011, 0.02, 0.03, 0.12),
    2e-9,
    3e-6,
    4e-8,
    5e-4,
    0.0,
    "planted",
)


def fits_in(path: Path) -> list[dict[str, Any]]:
    fits: list[dict[str, Any]] = yaml.safe_load(path.read_text())["fits"]
    return fits


def fits_of(name: str) -> list[dict[str, Any]]:
    return [fit for path in FILES if path.stem == name for fit in fits_in(path)]


HEADER = "n_prefill,prefill_tokens,cached_tokens,prefill_pairs,n_decode,kv_tokens,t_s\n"


def random_steps(rng: np.random.Generator, rows: int) -> Array:
    """N, A_p, D, K, P with every combination of prefills and decodes, and both ends of N."""
    prefills, decodes = rng.integers(0, 4, rows), rng.integers(0, 200, rows)
    decodes = np.where(prefills + decodes == 0, 1, decodes)
    new = prefills * np.exp(rng.uniform(2, 7, rows)).round()
    new[:2], decodes[:2], prefills[:2] = (0, 4096), (1, 0), (0, 1)
    pairs, kv_tokens = new * rng.uniform(500, 3000, rows).round(), decodes * rng.integers(100, 4000, rows)
    return np.column_stack([new + decodes, pairs, decodes, kv_tokens, prefills]).astype(float)


@pytest.mark.parametrize("seed", range(10))
def test_planted_coefficients_are_recovered(seed: int) -> None:
    """No noise, the knots known (f neither convex nor concave): the fit is the plant."""
    X = random_steps(np.random.default_rng(seed), 400)
    fitted = PiecewiseLinearStepLatency(knots_tokens=PLANTED.knots_tokens).fit(X, PLANTED.steps_s(X)).latency_
    assert fitted.knots_tokens == PLANTED.knots_tokens
    assert fitted.f_s == pytest.approx(PLANTED.f_s)
    for name in ("a_s", "b_s", "d_s", "e_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(PLANTED, name)), name


def test_a_prefill_reads_its_cached_tokens_as_a_decode_does() -> None:
    """Two prompts of 5 new tokens after 100 cached ones: 10 * (100 + 3) pairs, and 200 tokens are read."""
    X = np.array([[10.0, 10 * 103.0, 0, 0, 2], [10.0, 10 * 3.0, 0, 0, 2], [4.0, 0, 4, 400, 0]])
    assert cached_tokens(X).tolist() == [200.0, 0.0, 0.0]
    after, alone = PLANTED.steps_s(X)[:2]
    assert after - alone == pytest.approx(1000 * PLANTED.a_s + 200 * PLANTED.d_s)


def test_the_chunks_of_a_prompt_read_what_is_before_them() -> None:
    """2500 tokens in steps of 1000: the second chunk reads 1000 cached tokens, the third 2000."""
    chunks = [(1000, 0), (1000, 1000), (500, 2000)]
    steps_s = [PLANTED.step_s(n, n * (c + (n + 1) / 2), prefills=1, cached=c) for n, c in chunks]
    assert PLANTED.prefill_s(2500, 1000) == pytest.approx(sum(steps_s))


@pytest.mark.parametrize(("planted", "found"), [(0.9, 0.9), (0.31, 0.31), (0.2, 0.0)])
def test_what_decodes_take_longer_beside_prefills_is_told_apart(planted: float, found: float) -> None:
    """m as a share of d; below 0.3 it is taken for what other misfits leave behind, and d is larger."""
    X = random_steps(np.random.default_rng(0), 400)
    plant = replace(PLANTED, m_s=planted * PLANTED.d_s)
    assert plant.step_s(9, 45, 1, 100, 1) - plant.step_s(9, 45, 1, 100) == pytest.approx(
        plant.e_s + 100 * plant.m_s
    )
    fitted = PiecewiseLinearStepLatency(knots_tokens=PLANTED.knots_tokens).fit(X, plant.steps_s(X)).latency_
    assert fitted.m_s == pytest.approx(found * PLANTED.d_s)
    assert (fitted.d_s > 1.01 * PLANTED.d_s) == (found == 0)


@pytest.mark.parametrize("seed", range(10))
def test_a_fit_to_noise_is_monotone_all_the_same(seed: int) -> None:
    """Times drawn without regard to the step: f never falls, no coefficient is negative."""
    rng = np.random.default_rng(seed)
    X = random_steps(rng, 100)
    latency = PiecewiseLinearStepLatency().fit(X, rng.uniform(0.01, 1.0, 100)).latency_
    assert (np.diff(latency.step_s(np.arange(1.0, 9000.0))) >= 0).all()
    assert min(latency.a_s, latency.b_s, latency.d_s, latency.e_s, latency.m_s) >= 0


def test_the_hosts_share_is_set_apart() -> None:
    """2 ms of host overhead in every step: told of it, the fit finds the kernels' f and keeps h = 2 ms."""
    X = random_steps(np.random.default_rng(0), 400)
    model = PiecewiseLinearStepLatency(knots_tokens=PLANTED.knots_tokens, host_s=0.002)
    fitted = model.fit(X, PLANTED.steps_s(X) + 0.002).latency_
    assert fitted.h_s == 0.002
    assert fitted.f_s == pytest.approx(PLANTED.f_s)


def test_errors_are_relative() -> None:
    """Steps of one size that take 1 s and 3 s: least squares on (t - y) / y gives 1.2 s, not the mean, 2 s.
    Minimise (t-1)^2 + (t-3)^2/9: t (1 + 1/9) = 1 + 1/3."""
    X = np.array([[1.0, 0, 1, 1, 0], [1.0, 0, 1, 1, 0], [2.0, 0, 2, 2, 0], [2.0, 0, 2, 2, 0]])
    predicted = PiecewiseLinearStepLatency().fit(X, np.array([1.0, 3.0, 1.0, 3.0])).predict(X)
    assert predicted == pytest.approx(1.2)


def test_each_kind_of_step_weighs_alike() -> None:
    """1 decode, 2 prefills, 4 mixed: squared weights 1, 1/2, 1/4."""
    X = np.array([[1.0, 0, 1, 9, 0]] + 2 * [[8.0, 36, 0, 0, 1]] + 4 * [[9.0, 36, 1, 9, 1]])
    assert equal_shares(X) ** 2 == pytest.approx([1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25])


def test_prediction_beyond_the_profile_is_refused_unless_asked_for() -> None:
    """Beyond the last knot f goes on with its last slope: 0.12 + 4096 * 0.09 / 3072 s for 8192 tokens."""
    X = random_steps(np.random.default_rng(0), 400)
    model = PiecewiseLinearStepLatency(knots_tokens=PLANTED.knots_tokens).fit(X, PLANTED.steps_s(X))
    beyond = np.array([[8192.0, 0.0, 0.0, 0.0, 0.0]])
    with pytest.raises(ExtrapolationError, match="profiled up to"):
        model.predict(beyond)
    assert model.set_params(beyond="extrapolate").predict(beyond) == pytest.approx(0.12 + 4096 * 0.09 / 3072)


def test_knots_without_data_are_dropped() -> None:
    """Steps of 1, 2, 100 and 110 tokens: none from 8 to 64, and 128 lies beyond."""
    X = np.array([[n, 0.0, n, n, 0.0] for n in (1.0, 2.0, 100.0, 110.0)])
    latency = PiecewiseLinearStepLatency().fit(X, np.array([1.0, 1.1, 5.0, 5.5])).latency_
    assert latency.knots_tokens == (1.0, 8.0, 110.0)


def test_context_is_the_longest_of_prompts_and_decodes() -> None:
    """A chunk of 100 after 900 cached tokens ends at 1000; two decodes over 1500 tokens stand at 750."""
    X = np.array([[100.0, 100 * (900 + 50.5), 0, 0, 1], [2.0, 0, 2, 1500, 0], [1.0, 0, 1, 5, 0]])
    assert PiecewiseLinearStepLatency().fit(X, np.ones(3)).latency_.max_context_tokens == pytest.approx(1000)


def test_regimes_by_hand() -> None:
    """A prefill 10 % high, a small decode right, a large one 20 % low, a long mixed step 30 % high."""
    X = np.array([[8.0, 36, 0, 0, 1], [8.0, 0, 8, 80, 0], [9.0, 0, 9, 90, 0], [9.0, 36, 1, 9000, 1]])
    errors = errors_by_regime(X, np.ones(4), np.array([1.1, 1.0, 0.8, 1.3]))
    by_hand = {
        "all": 0.15,
        "prefill": 0.1,
        "decode_small": 0,
        "decode_large": 0.2,
        "mixed": 0.3,
        "long_context": 0.3,
    }
    assert {regime: error.mape_frac for regime, error in errors.items()} == pytest.approx(by_hand)
    assert [error.steps for error in errors.values()] == [4, 1, 1, 1, 1, 1]


def test_repeats_of_a_step_are_held_out_together() -> None:
    """12 sizes 1, 2, 4, ... with a knot and five repeats each; time grows as the square. A fold that kept a
    repeat would know its size; one that did not draws the chord from n/2 to 2n, 1.5 n^2: 50 % off."""
    sizes = tuple(float(2**i) for i in range(12))
    X = np.repeat([[n, 0.0, n, n, 0.0] for n in sizes], 5, axis=0)
    model = PiecewiseLinearStepLatency(knots_tokens=sizes)
    assert model.fit(X, X[:, 0] ** 2).predict(X) == pytest.approx(X[:, 0] ** 2)
    assert cross_validated_errors(model, X, X[:, 0] ** 2)["all"].mape_frac > 0.3


def test_host_share_above_a_step_is_refused() -> None:
    X = random_steps(np.random.default_rng(0), 50)
    with pytest.raises(InputError, match=r"must be > 0\.02"):
        PiecewiseLinearStepLatency(host_s=0.02).fit(X, np.full(50, 0.01))


def test_a_table_is_read_as_the_five_numbers(tmp_path: Path) -> None:
    """A chunk of 4 after 6 cached makes 4 * (6 + 2.5) = 34 pairs; 2 decodes of 5 tokens: N = 6, K = 10."""
    path = tmp_path / "table.csv"
    path.write_text("# llm: tiny\n# gpu: a100-80g\n" + HEADER + "1,4,6,34,2,10,0.5\n")
    table = read_step_table(path)
    assert table.about == {"llm": "tiny", "gpu": "a100-80g"}
    assert table.X.tolist() == [[6.0, 34.0, 2.0, 10.0, 1.0]]
    assert table.y.tolist() == [0.5]
    path.write_text(table.to_csv())
    pd.testing.assert_frame_equal(read_step_table(path).steps, table.steps)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a CSV"),
        (HEADER, "no steps"),
        ("n_prefill,t_s\n1,2\n", "lacks the column"),
        (HEADER + "1,4,0,10,0,0,0.5\n1,4,0,10,0,0,0\n", "step 2: t_s is 0.0: must be a number > 0"),
        (HEADER + "1,4,0,10,0,0,soon\n", "step 1: t_s is soon"),
        (HEADER + "1,4,0,10,0,0,nan\n", "step 1: t_s is nan"),
        (HEADER + "1,4,0,-1,0,0,1\n", "prefill_pairs is -1: must be a number >= 0"),
        (HEADER + "0,0,0,0,0,0,1\n", "without prefill or decode"),
        (HEADER + "0,4,0,10,0,0,1\n", "zero together"),
        (HEADER + "1,4,0,3,0,0,1\n", "attends at least to itself"),
        (HEADER + "0,0,0,0,8,7,1\n", "counts the new token too"),
        (HEADER + "0,0,0,0,1,7,1,2,3\n", "not a CSV"),
    ],
)
def test_a_bad_table_is_refused_with_its_row(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as refusal:
        read_step_table(path)
    assert str(path) in str(refusal.value)


def test_a_table_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_step_table(path)


def latency_of(fit: dict) -> StepLatency:  # type: ignore[type-arg]
    numbers = (
        fit[name] for name in ("a_s", "b_s", "d_s", "e_s", "h_s", "basis", "mape_frac", "max_context_tokens")
    )
    return StepLatency(tuple(fit["knots_tokens"]), tuple(fit["f_s"]), *numbers)


@pytest.mark.long
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_fits_are_sound(path: Path) -> None:
    """Each makes a StepLatency, f goes on rising at its end, silicon is within 8 % of cells not seen."""
    for fit in fits_in(path):
        latency, said = latency_of(fit), f"tp {fit['tp']}"
        assert latency.f_s[-1] > latency.f_s[-2], said
        if latency.basis.startswith("derived"):
            assert latency.mape_frac is None, said
        else:
            assert latency.mape_frac == fit["errors"]["all"]["mape_frac"], said
            assert fit["mape_frac"] < (0.08 if latency.basis.startswith("silicon") else 0.1), said


@pytest.mark.long
@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent == LATENCY], ids=lambda path: path.stem
)
def test_no_shipped_fit_reads_weights_faster_than_memory(path: Path) -> None:
    """A token alone reads its weights at most at the GPU's bandwidth. Qwen3-30B-A3B in fp8 on an L40S had
    3.35 ms for 3.34 GB at 864 GB/s, which are 3.87 ms: kernels were measured on experts in the L2 cache.
    """
    document = yaml.safe_load(path.read_text())
    llm, gpu = CATALOG.llm(document["llm"]), CATALOG.gpu(document["gpu"])
    for fit in document["fits"]:
        if "dp" not in fit:
            step_s = float(latency_of(fit).step_s(1, 0, 1, 0))
            read_s = float(active_weight_bytes(llm)) / (fit["tp"] * gpu.bandwidth_bytes_per_s)
            assert step_s >= read_s * 0.999, f"tp {fit['tp']}"


@pytest.mark.parametrize(
    ("llm", "gpu"),
    [("llama-3.1-70b", gpu) for gpu in ("a100-80g", "h100-80g", "h200-141g")] + [("bloom", "h200-141g")],
)
def test_more_gpus_are_never_slower(llm: str, gpu: str) -> None:
    """Prefill of 2048, and 64 decodes of 1024 tokens each, on every TP that ships."""
    fits = [latency_of(fit) for fit in fits_of(f"{llm}--{gpu}")]
    assert len(fits) >= 2
    for smaller, larger in pairwise(fits):
        assert larger.step_s(2048, 2048 * 2049 / 2, prefills=1) < smaller.step_s(
            2048, 2048 * 2049 / 2, prefills=1
        )
        assert larger.step_s(64, 0, 64, 65536) < smaller.step_s(64, 0, 64, 65536)


def test_splitwise_medians_are_met() -> None:
    """Published for BLOOM-176B on 8 A100: 174 ms to prefill 512, 48.8 ms a token, 57.3 in a batch of 16."""
    (fit,) = (latency_of(fit) for fit in fits_of("bloom--a100-80g"))
    assert fit.step_s(512, 512 * 513 / 2, prefills=1) == pytest.approx(0.174, rel=0.05)
    assert fit.step_s(1, 0, 1, 576) == pytest.approx(0.0488, rel=0.03)
    assert fit.step_s(16, 0, 16, 16 * 576) == pytest.approx(0.0573, rel=0.03)


@pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra 'silicon'"
)
@pytest.mark.parametrize("tp", [4, 8])
def test_recorded_fit_and_error_are_rebuilt_from_the_source(tp: int) -> None:
    """Qwen2.5-72B on H100: the same table, the same coefficients, the same held-out error."""
    from planner.documents.catalog import read_catalog
    from planner.importers.silicon import silicon_table

    catalog = read_catalog()
    table = silicon_table(catalog.llm("qwen2.5-72b"), catalog.gpu("h100-80g"), tp)
    assert isinstance(table, StepTable)
    recorded = next(fit for fit in fits_of("qwen2.5-72b--h100-80g") if fit["tp"] == tp)
    assert not table.reads_cached
    model = PiecewiseLinearStepLatency(reads_cached=False)
    error = cross_validated_errors(model, table.X, table.y)["all"]
    assert error.mape_frac == pytest.approx(recorded["errors"]["all"]["mape_frac"], abs=1e-4)
    assert model.fit(table.X, table.y).latency_.f_s == pytest.approx(recorded["f_s"], rel=1e-5)
