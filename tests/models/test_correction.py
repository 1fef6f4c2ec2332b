"""The corrected form in the simulator: every step as its formula says; in fit files and fleets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from plans import CATALOG, LLM

from planner.calibrate.fitting import FittedSteps, fit_yaml
from planner.documents.fleet_file import read_fleet
from planner.errors import InputError
from planner.fleet import Fleet, Pool, WorkerType
from planner.models.correction import CorrectedFormula
from planner.models.families.corrected import CorrectedSteps
from planner.models.latency import Array, StepLatency
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

FIVE = StepLatency((1.0, 256.0, 4096.0), (0.01, 0.012, 0.1), 1e-9, 1e-6, 2e-8, 1e-4, 0.0, "five")


def learned(seed: int = 0) -> CorrectedFormula:
    """The form, fitted to 150 steps of every kind whose times no formula has."""
    rng = np.random.default_rng(seed)
    kind, n = rng.integers(0, 3, 150), np.exp(rng.uniform(2, 7, 150)).round()
    decodes = np.where(kind == 0, 0, np.exp(rng.uniform(0, 5, 150)).round())
    prefills = np.where(kind == 1, 0, rng.integers(1, 5, 150))
    X = np.column_stack(
        [
            decodes + prefills * n,
            prefills * n * (n + 1) / 2,
            decodes,
            decodes * rng.integers(9, 8000, 150),
            prefills,
        ]
    )
    waves = 0.1 * np.sin(np.log2(X[:, 0])) + 0.05 * np.cos(np.log2(1 + X[:, 3]))
    return replace(CorrectedSteps().fit(X, FIVE.step_s(*X.T) * np.exp(waves)).form_, h_s=0.001)


def run(form: CorrectedFormula, arrival_s: list[float], prompts: list[int], outputs: list[int]) -> Simulation:
    worker = WorkerType(CATALOG.gpu("h100-80g"), 4, FIVE, 160_000, 8192, 256, form=form)
    trace = Trace("t", np.array(arrival_s), np.array(prompts), np.array(outputs))
    return simulate(Fleet(LLM, (Pool("w", "mixed", worker, 1),)), trace, record=True)


def steps_of(result: Simulation) -> tuple[Array, Array]:
    """Prefill tokens and seconds of every engine step."""
    runs = result.runs[result.runs["prefill_tokens"] >= 0]
    seconds = [r["first_s"] + r["growth_s"] * np.arange(r["steps"]) for r in runs]
    return np.repeat(runs["prefill_tokens"], runs["steps"]), np.concatenate(seconds)


@pytest.mark.parametrize("batch", [1, 7, 40])
@pytest.mark.parametrize("prompt", [11, 150])
def test_every_step_of_a_batch_takes_what_its_formula_says(batch: int, prompt: int) -> None:
    """`batch` equal prompts at once: one step with all of them, exactly; then step j decodes `batch` requests
    of prompt + j tokens. Simulated in runs of many, each of 2999 is within 0.1 %.
    """
    form, j = learned(), np.arange(1.0, 3000.0)
    tokens, seconds = steps_of(run(form, [0.0] * batch, [prompt] * batch, [3000] * batch))
    assert tokens.tolist() == [batch * prompt] + [0] * 2999
    whole = np.array([[batch * prompt, batch * prompt * (prompt + 1) / 2, 0, 0, batch]])
    assert seconds[0] == pytest.approx(form.step_s(whole)[0])
    none = np.zeros(len(j))
    alone = np.column_stack([none + batch, none, none + batch, batch * (prompt + j), none])
    assert seconds[1:] == pytest.approx(form.step_s(alone), rel=0.001)


@pytest.mark.parametrize("batch", [1, 7])
def test_a_context_in_steps_changes_every_64_tokens(batch: int) -> None:
    """Contexts of 151 to 450 count as 192, 256, 320, 384, 448 and 512: six step times, within 0.1 %."""
    form, j = replace(learned(), context_step=64), np.arange(1.0, 301.0)
    seconds = steps_of(run(form, [0.0] * batch, [150] * batch, [301] * batch))[1][1:]
    none = np.zeros(len(j))
    up = np.column_stack([none + batch, none, none + batch, batch * np.ceil((150 + j) / 64) * 64, none])
    assert seconds == pytest.approx(form.step_s(up), rel=0.001)
    assert len(np.unique(seconds)) == 6


def test_runs_are_long_where_the_context_is() -> None:
    """From 8000 tokens on the context has grown by an eighth of a doubling, 9 %, after 720 steps or more."""
    runs = run(learned(), [0.0], [8000], [3000]).runs
    assert len(runs) <= 2 + 3000 / 720 + 1


def test_a_mixed_step_takes_what_its_formula_says() -> None:
    """A request of 300 tokens decodes; another of 500 comes. After m steps, its prefill one, the first
    reads 300 + m tokens with the new one: N = 501, A_p = 500 * 501 / 2, D = 1, K = 300 + m, P = 1.
    """
    form = learned()
    tokens, seconds = steps_of(run(form, [0.0, 1.0], [300, 500], [500, 100]))
    m = int(np.flatnonzero(tokens == 500)[0])
    assert m > 10
    assert seconds[m] == pytest.approx(form.step_s(np.array([[501, 125_250, 1, 300.0 + m, 1]]))[0])


def test_a_fit_file_carries_the_form_to_the_simulator(tmp_path: Path) -> None:
    """Written with seven digits and read by a fleet: step times within 0.001 %. On a power-capped GPU floor,
    b and d are slower by the decode's factor, c and a by the prefill's.
    """
    form, X = learned(), np.array([[501, 125_250, 1, 310.0, 1], [64, 0, 64, 64_000, 0]])
    fitted = FittedSteps(LLM.name, "h100-80g", 4, "made up", FIVE, {}, form=form)
    (tmp_path / "fit.yaml").write_text(fit_yaml(fitted, command="none", date="2026-01-01"))
    capped = next(gpu for gpu in CATALOG.gpus.values() if gpu.base == "h100-80g" != gpu.name)
    (tmp_path / "fleet.yaml").write_text(
        f"llm: {LLM.name}\nworkers:\n  - {{gpu: h100-80g, tp: 4, latency: fit.yaml}}\n"
        f"  - {{gpu: {capped.name}, tp: 4, latency: fit.yaml}}\n"
    )
    read = [pool.type.form for pool in read_fleet(tmp_path / "fleet.yaml", CATALOG).pools]
    assert isinstance(read[0], CorrectedFormula) and isinstance(read[1], CorrectedFormula)
    assert read[0].step_s(X) == pytest.approx(form.step_s(X), rel=1e-5)
    p, d = capped.prefill_slowdown, capped.decode_slowdown
    assert read[1].formula_s == pytest.approx(np.array(read[0].formula_s) * [d, d, p, p, d, d])


@pytest.mark.parametrize(
    ("simulated", "message"),
    [
        ("corrected", "expected form: corrected and its numbers, found 'corrected'"),
        ({"form": "distserve", "threshold": 1}, r"simulated: prefill_s: expected numbers, found None"),
        ({"form": "better"}, "must be one of splitwise-lookup, distserve, corrected, found 'better'"),
        ({"formula_s": [0.1] * 5}, "formula_s must be six numbers >= 0, the first > 0"),
        ({"weights": [0.1]}, "must be equally long lists"),
        ({"context_step": 1.5}, "context_step is 1.5, must be a whole number"),
        ({"tokens": [0.0] * 150}, "a measured step has tokens > 0"),
        ({"anchors": [1]}, "anchors"),
    ],
)
def test_a_form_that_makes_no_sense_is_refused(tmp_path: Path, simulated: object, message: str) -> None:
    fitted = FittedSteps(LLM.name, "h100-80g", 4, "made up", FIVE, {}, form=learned())
    document = yaml.safe_load(fit_yaml(fitted, command="none", date="2026-01-01"))
    row = document["fits"][0]
    is_other = not isinstance(simulated, dict) or "form" in simulated
    row["simulated"] = simulated if is_other else {**row["simulated"], **simulated}  # type: ignore[dict-item]
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump(document))
    path = tmp_path / "fleet.yaml"
    path.write_text(f"llm: {LLM.name}\nworkers:\n  - {{gpu: h100-80g, tp: 4, latency: fit.yaml}}\n")
    with pytest.raises(InputError, match=message):
        read_fleet(path, CATALOG)
