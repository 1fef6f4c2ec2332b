"""Calibration: corrections planted into simulated measurements, and found again within their uncertainty."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from planner.calibrate.measured_runs import (
    FACTOR_PRIOR,
    SIGMA,
    USUAL_STEPS,
    MeasuredEngine,
    add_host_time,
    calibrate_host,
    correct_latency,
    predict_run,
)
from planner.cli import app
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.engine_file import default_engine
from planner.documents.fleet_file import read_fleet
from planner.errors import InputError
from planner.importers import MeasuredRun, MeasuredRuns
from planner.models.latency import Array, StepLatency
from planner.models.step_tables import COLUMNS, StepTable

LLM, GPU = "meta-llama/Llama-3.1-8B", "h100-80g"
SETUP = {"llm": LLM, "gpu": GPU, "tp": "1"}


@pytest.fixture(scope="module")
def known() -> Catalog:
    return read_catalog()


@pytest.fixture(scope="module")
def base(known: Catalog) -> StepLatency:
    return known.step_latency(known.llm(LLM), known.gpu(GPU), 1)


@pytest.fixture(scope="module")
def engine(known: Catalog) -> MeasuredEngine:
    return MeasuredEngine(known.llm(LLM), known.gpu(GPU), 1)


def steps_of(latency: StepLatency, X: Array, noise: Array | None = None) -> StepTable:
    """The steps N, A_p, D, K, P with the times of `latency`."""
    tokens, pairs, decodes, kv_tokens, prefills = X.T
    t_s = latency.step_s(*X.T) * (1.0 if noise is None else noise)
    rows = np.column_stack([prefills, tokens - decodes, 0 * tokens, pairs, decodes, kv_tokens, t_s])
    return StepTable(pd.DataFrame(rows, columns=list(COLUMNS)), SETUP)


def run_of(
    truth: StepLatency,
    engine: MeasuredEngine,
    name: str,
    rng: np.random.Generator,
    *,
    requests: int = 200,
    concurrency: int | None = None,
    rate_rps: float | None = None,
    statistics: tuple[str, ...] = ("mean", "p50", "p90"),
    metrics: tuple[str, ...] = ("ttft", "tpot"),
) -> MeasuredRun:
    """A benchmark of an engine whose steps take what `truth` says."""
    run = MeasuredRun(
        name,
        requests,
        tuple(rng.integers(100, 3000, requests).astype(float).tolist()),
        tuple(rng.integers(20, 300, requests).astype(float).tolist()),
        {metric: dict.fromkeys(statistics, 1.0) for metric in metrics},
        concurrency=concurrency,
        rate_rps=rate_rps,
    )
    return measured(run, engine, truth)


def measured(run: MeasuredRun, engine: MeasuredEngine, truth: StepLatency) -> MeasuredRun:
    latency_s: dict[str, dict[str, float]] = {}
    for (metric, name), value in predict_run(run, engine, truth).items():
        latency_s.setdefault(metric, {})[name] = value
    return replace(run, latency_s=latency_s)


def several(truth: StepLatency, engine: MeasuredEngine, seed: int) -> list[MeasuredRun]:
    rng = np.random.default_rng(seed)
    loads = ((1, None, 30), (8, None, 120), (64, None, 200), (None, 4.0, 120))
    return [
        run_of(truth, engine, f"run {i}", rng, requests=n, concurrency=c, rate_rps=r)
        for i, (c, r, n) in enumerate(loads)
    ]


PLANTED = [(1.2, 0.9, 0.002), (0.8, 1.3, 0.0), (1.0, 1.0, 0.004)]


def test_corrected_by_hand() -> None:
    """f is 10 ms at 1 token, 30 at 1000; compute x2, bandwidth x3: 3 x 10, 3 x 10 + 2 x 20; host 1 + 4."""
    latency = correct_latency(
        StepLatency((1.0, 1000.0), (0.01, 0.03), 1e-9, 1e-6, 1e-8, 1e-4, 0.001, "b"), 2, 3, 0.004
    )
    assert latency.f_s == pytest.approx((0.03, 0.07))
    assert (latency.a_s, latency.b_s, latency.d_s, latency.e_s) == pytest.approx((2e-9, 3e-6, 3e-8, 2e-4))
    assert latency.h_s == pytest.approx(0.005)
    assert latency.basis == "b"


@pytest.mark.parametrize(("compute", "bandwidth", "host_s"), PLANTED)
def test_planted_corrections_are_found_from_steps(
    compute: float, bandwidth: float, host_s: float, base: StepLatency
) -> None:
    truth = correct_latency(base, compute, bandwidth, host_s)
    found = calibrate_host(base, steps=[steps_of(truth, USUAL_STEPS)])
    assert found.compute == pytest.approx(compute, rel=0.02)
    assert found.latency.step_s(*USUAL_STEPS.T) == pytest.approx(truth.step_s(*USUAL_STEPS.T), rel=0.01)
    errors = found.standard_errors
    assert abs(np.log(found.bandwidth / bandwidth)) < 2 * errors[1]
    assert abs(found.host_s - host_s) < 2 * errors[2]
    assert found.after_frac < 0.01 < found.before_frac


@pytest.mark.long
@pytest.mark.parametrize(("compute", "bandwidth", "host_s"), PLANTED)
def test_planted_corrections_are_found_from_runs(
    compute: float, bandwidth: float, host_s: float, base: StepLatency, engine: MeasuredEngine
) -> None:
    """Four runs, closed and open loop, TTFT and TPOT alone: the steps of the true engine come out."""
    truth = correct_latency(base, compute, bandwidth, host_s)
    found = calibrate_host(base, runs=several(truth, engine, 0), engine=engine)
    assert found.compute == pytest.approx(compute, rel=0.03)
    assert found.latency.step_s(*USUAL_STEPS.T) == pytest.approx(truth.step_s(*USUAL_STEPS.T), rel=0.05)
    assert abs(np.log(found.bandwidth / bandwidth)) < 2.5 * found.standard_errors[1]
    assert abs(found.host_s - host_s) < 2.5 * found.standard_errors[2]
    assert found.after_frac < 0.02


def test_nothing_to_correct_leaves_the_fit_alone(base: StepLatency, engine: MeasuredEngine) -> None:
    found = calibrate_host(base, runs=several(base, engine, 1)[:2], engine=engine)
    assert (found.compute, found.bandwidth) == pytest.approx((1.0, 1.0), abs=0.01)
    assert found.host_s == pytest.approx(0.0, abs=1e-4)


def test_what_was_not_measured_stays_and_stays_uncertain(base: StepLatency) -> None:
    """Small decodes say little of prefill: its factor keeps the prior, 1 with an error of 0.3."""
    decodes = USUAL_STEPS[(USUAL_STEPS[:, 4] == 0) & (USUAL_STEPS[:, 2] <= 8)]
    truth = correct_latency(base, 1.5, 1.2, 0.0)
    found = calibrate_host(base, steps=[steps_of(truth, decodes)])
    assert found.compute == pytest.approx(1.0, abs=0.05)
    assert found.standard_errors[0] > 0.8 * FACTOR_PRIOR
    assert found.uncertainty_frac > 0.1
    assert found.latency.step_s(*decodes.T) == pytest.approx(truth.step_s(*decodes.T), rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_standard_errors_cover_the_truth(seed: int, base: StepLatency) -> None:
    """24 steps with 5 % of noise: in log compute the error is that noise over the root of 12 prefills."""
    rng = np.random.default_rng(seed)
    X = np.vstack([USUAL_STEPS] * 3)
    truth = correct_latency(base, 1.3, 1.1, 0.001)
    found = calibrate_host(base, steps=[steps_of(truth, X, np.exp(rng.normal(0, 0.05, len(X))))])
    assert abs(np.log(found.compute / 1.3)) < 3 * found.standard_errors[0]
    assert 0.3 * SIGMA / np.sqrt(12) < found.standard_errors[0] < 3 * SIGMA / np.sqrt(12)
    assert 0.5 * SIGMA < found.uncertainty_frac < 2 * SIGMA


def test_kernel_times_beside_those_of_engines_have_no_host_time(base: StepLatency) -> None:
    """The same steps as kernels and in an engine, whose host takes 3 ms: only h differs."""
    kernels = steps_of(base, USUAL_STEPS)
    kernels = replace(kernels, about={"host_overhead": "not included"})
    whole = steps_of(replace(base, h_s=base.h_s + 3e-3), USUAL_STEPS)
    found = calibrate_host(base, steps=[kernels, whole])
    assert (found.compute, found.bandwidth) == pytest.approx((1, 1), abs=0.01)
    assert found.host_s == pytest.approx(3e-3, rel=0.05) and found.after_frac < 0.01


def test_more_measurements_make_it_surer(base: StepLatency) -> None:
    truth = correct_latency(base, 1.2, 1.1, 0.002)
    rng = np.random.default_rng(0)
    errors = []
    for repeats in (1, 4, 16):
        X = np.vstack([USUAL_STEPS] * repeats)
        table = steps_of(truth, X, np.exp(rng.normal(0, 0.05, len(X))))
        errors.append(calibrate_host(base, steps=[table]).standard_errors[0])
    assert errors[0] > errors[1] > errors[2]


def test_a_batch_latency_alone_moves_the_fit(base: StepLatency, engine: MeasuredEngine) -> None:
    """One number, 20 % above the prediction: the correct_latency fit predicts it much nearer."""
    run = MeasuredRun("batch", 8, (512.0,), (128.0,), {"e2e": {"max": 1.0}}, concurrency=8)
    truth = measured(run, engine, correct_latency(base, 1.2, 1.2, 0.0))
    found = calibrate_host(base, runs=[truth], engine=engine)
    assert abs(found.errors["batch", "e2e max"]) < 0.02
    assert found.before_frac == pytest.approx(np.log(1.2), abs=0.01)


def test_gaps_stand_in_for_tpot(base: StepLatency, engine: MeasuredEngine) -> None:
    """A mean gap counts every gap once, so it lies near TPOT; bucket edges are not used."""
    rng = np.random.default_rng(0)
    run = run_of(base, engine, "a", rng, concurrency=8, statistics=("mean",))
    values = {"ttft": {"mean": 1.0, "p99_at_most": 5.0}, "tbt": {"mean": 1.0, "p99": 3.0}}
    predicted = predict_run(replace(run, latency_s=values), engine, base)
    assert set(predicted) == {("ttft", "mean"), ("tbt", "mean")}
    assert predicted["tbt", "mean"] == pytest.approx(run.latency_s["tpot"]["mean"], rel=0.1)


def test_drawn_lengths_keep_their_mean(base: StepLatency, engine: MeasuredEngine) -> None:
    """TTFT at concurrency 1 is the prefill of the mean prompt, nearly."""
    run = MeasuredRun("a", 100, (1000.0,), (20.0,), {"ttft": {"mean": 1.0}}, concurrency=1)
    equal, drawn = (
        predict_run(replace(run, length_spread_frac=s), engine, base)["ttft", "mean"] for s in (0.0, 0.3)
    )
    assert drawn == pytest.approx(equal, rel=0.03)
    assert drawn != equal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"concurrency": None}, "its load is not known"),
        ({"latency_s": {"queue": {"mean": 1.0}}}, "holds neither TTFT, TPOT nor end-to-end times"),
        ({"output_tokens": (1.0,)}, "tpot was measured, yet every request has one output token"),
        ({"kv_tokens": 160}, "do not fit the 160 KV tokens"),
    ],
)
def test_runs_that_cannot_be_simulated_say_why(
    change: dict[str, object], message: str, base: StepLatency, engine: MeasuredEngine
) -> None:
    run = MeasuredRun(
        "a", 4, (500.0,), (20.0,), {"ttft": {"mean": 0.1}, "tpot": {"mean": 0.01}}, concurrency=2
    )
    with pytest.raises(InputError, match=message):
        calibrate_host(base, runs=[replace(run, **change)], engine=engine)  # type: ignore[arg-type]


def test_nothing_measured_is_refused(base: StepLatency) -> None:
    with pytest.raises(InputError, match="nothing was measured"):
        calibrate_host(base)


# --- from files to a plan's certificate


def test_a_calibrated_fit_tells_the_planner_how_sure_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: StepLatency, engine: MeasuredEngine
) -> None:
    """Steps and runs of one engine -> fit.yaml -> fleet.yaml and catalog, with its standard error."""
    monkeypatch.chdir(tmp_path)
    engine = replace(engine, version=default_engine(read_catalog().engines.values()))
    truth = correct_latency(add_host_time(base, engine), 1.3, 1.1, 0.001)
    Path("steps.csv").write_text(steps_of(truth, USUAL_STEPS).to_csv())
    runs = MeasuredRuns(LLM, GPU, 1, "test", tuple(several(truth, engine, 2)[:2]))
    Path("runs.json").write_text(runs.to_json())
    Path("latency").mkdir()
    result = CliRunner().invoke(
        app, ["calibrate", "steps.csv", "runs.json", "-o", "latency/fit.yaml", "--json"]
    )
    assert result.exit_code == 0
    found = json.loads(result.stdout)["calibration"]
    assert found["compute"] == pytest.approx(1.3, rel=0.03)
    row = yaml.safe_load(Path("latency/fit.yaml").read_text())["fits"][0]
    assert row["uncertainty_frac"] == pytest.approx(found["uncertainty_frac"], abs=1e-4)
    known = read_catalog(tmp_path)
    latency = known.step_latency(known.llm(LLM), known.gpu(GPU), 1)
    assert latency.uncertainty_frac == row["uncertainty_frac"]
    assert "calibrated on 8 steps and 2 runs: compute x1.3" in latency.basis
    assert "standard error" in latency.basis
    Path("fleet.yaml").write_text(f"llm: {LLM}\nworkers: [{{gpu: {GPU}, latency: latency/fit.yaml}}]\n")
    assert read_fleet(Path("fleet.yaml"), read_catalog()).pools[0].type.latency == latency
    # and calibrated once more, from that file: nothing is left to correct
    arguments = ["calibrate", "steps.csv", "--fit", "latency/fit.yaml", "-o", "again.yaml", "--json"]
    found = json.loads(CliRunner().invoke(app, arguments).stdout)["calibration"]
    assert found["compute"] == pytest.approx(1.0, abs=0.02)


def test_the_certificate_names_correction_and_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: StepLatency
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latency").mkdir()
    Path("steps.csv").write_text(steps_of(correct_latency(base, 1.3, 1.1, 0.001), USUAL_STEPS).to_csv())
    Path("slo.yaml").write_text(f"llm: {LLM}\nslo: {{ttft: {{p90: 2 s}}}}\nfleet: {{gpus: {{{GPU}: 1}}}}\n")
    rows = "".join(f"{i},{200 + 10 * (i % 7)},20\n" for i in range(60))
    Path("trace.csv").write_text(f"timestamp,input_tokens,output_tokens\n{rows}")
    invoke = CliRunner().invoke
    assert invoke(app, ["calibrate", "steps.csv", "-o", "latency/fit.yaml"]).exit_code == 0
    arguments = ["--slo", "slo.yaml", "--trace", "trace.csv", "--catalog", ".", "-o", "out"]
    assert invoke(app, arguments).exit_code == 0
    certificate = json.loads(Path("out/certificate.json").read_text())
    assumptions = " ".join(certificate["certificate"]["assumptions"])
    assert "calibrated on 8 steps: compute x1.3, bandwidth x1.1" in assumptions
    assert "standard error" in assumptions
    assert certificate["latency"]["mixed"]["uncertainty_frac"] > 0


def test_measurements_of_two_engines_are_refused(tmp_path: Path, base: StepLatency) -> None:
    table = steps_of(base, USUAL_STEPS)
    paths = []
    for tp in ("1", "2"):
        paths.append(str(tmp_path / f"tp{tp}.csv"))
        Path(paths[-1]).write_text(StepTable(table.steps, {**SETUP, "tp": tp}).to_csv())
    result = CliRunner().invoke(app, ["calibrate", *paths, "-o", str(tmp_path / "fit.yaml")])
    assert "are of different engines" in str(result.exception)
    assert not (tmp_path / "fit.yaml").exists()


def test_a_fit_of_another_engine_is_refused(tmp_path: Path, base: StepLatency) -> None:
    table = tmp_path / "steps.csv"
    table.write_text(StepTable(steps_of(base, USUAL_STEPS).steps, {**SETUP, "tp": "8"}).to_csv())
    fit = Path(__file__).parents[2] / "catalogs" / "latency" / "bloom--h100-80g.yaml"
    out = tmp_path / "fit.yaml"
    result = CliRunner().invoke(app, ["calibrate", str(table), "--fit", str(fit), "-o", str(out)])
    assert f"holds no fit of {LLM} on 8 x {GPU}" in str(result.exception)
