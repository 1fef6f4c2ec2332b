"""The real profiler against a real vLLM on the CPU, on a tiny model with dummy weights: `make test-vllm`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from planner.models.step_fit import PiecewiseLinearStepLatency, errors_by_regime
from planner.models.step_tables import StepShape, StepTable
from profiling import design, measure
from profiling.measure import Budget, measure_into, profile_summary
from profiling.meter import StepNotRunError, TimedRun
from profiling.vllm_engine import VllmEngine
from profiling.vllm_install import is_cpu_build, is_installed

if not is_installed():
    pytest.skip("vLLM is not installed (make test-vllm)", allow_module_level=True)

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
BUDGET_S = 45.0
HELD_OUT = 16


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    """One thread on one core: OpenMP's barriers take a hundred times as long where a core is shared."""
    if hasattr(os, "sched_getaffinity"):
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(max(os.sched_getaffinity(0))))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    engine = VllmEngine(
        TINY, max_num_batched_tokens=512, max_num_seqs=32, max_model_len=2048, enforce_eager=True
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def table(engine: VllmEngine, tmp_path_factory: pytest.TempPathFactory) -> StepTable:
    out = tmp_path_factory.mktemp("profile") / "table.csv"
    return measure_into(out, engine, {"llm": "tiny", "engine": "vllm"}, Budget(BUDGET_S))


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """To the log of the run, past pytest's capture."""

    def write(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n    {text}")

    return write


@pytest.mark.parametrize(
    "step",
    [
        StepShape(1, 1, 0, 0, 0),
        StepShape(1, 512, 0, 0, 0),
        StepShape(4, 100, 0, 0, 0),
        StepShape(1, 77, 1024, 0, 0),
        StepShape(3, 50, 501, 0, 0),
        StepShape(0, 0, 0, 1, 40),
        StepShape(0, 0, 0, 32, 1000),
        StepShape(1, 200, 300, 31, 700),
        StepShape(2, 64, 0, 5, 129),
    ],
    ids=str,
)
def test_the_engine_runs_the_step_it_was_asked_for(engine: VllmEngine, step: StepShape) -> None:
    """Every repeat, to the token: `measure` compares each with what the scheduler says it scheduled."""
    measured = engine.measure(step)
    assert measured.discarded == 0 and measured.repeats >= 3
    assert 0 < measured.host_s < measured.t_s
    if step.decodes:
        assert measured.context_tokens == pytest.approx(step.context, abs=measured.repeats)
    assert not engine._core.scheduler.has_requests()


def test_a_step_over_the_token_budget_is_not_taken_for_it(engine: VllmEngine) -> None:
    """Two prompts of 400 tokens do not fit into 512: the scheduler cuts the second, and no run is kept."""
    with pytest.raises(StepNotRunError):
        engine.measure(StepShape(2, 400, 0, 0, 0))


def run_after_prefix(engine: VllmEngine, step: StepShape, *, is_hit: bool) -> TimedRun:
    """One prefill of `step` after its prefix has been computed. If `is_hit` the prompt begins with that
    prefix and finds it in the cache. Otherwise another prompt is marked as computed up to there, as `measure`
    does.
    """
    prefix = engine._prompt(step.cached)
    engine._add(prefix, computed=0)
    while engine._core.scheduler.has_unfinished_requests():
        engine._step()
    engine._clear()
    if is_hit:
        engine._add([*prefix, *engine._prompt(step.new)], computed=0)
    else:
        engine._add(engine._prompt(step.cached + step.new), computed=step.cached)
    run = engine._step()
    engine._clear()
    return run


def test_a_prefix_said_to_be_cached_costs_what_a_cached_prefix_costs(
    engine: VllmEngine, say: Callable[[str], None]
) -> None:
    """Against real prefix cache hits, in turns: the scheduler reports the same step, and the times agree."""
    step = StepShape(1, 128, 1024, 0, 0)
    turns = [[run_after_prefix(engine, step, is_hit=is_hit) for is_hit in (True, False)] for _ in range(12)]
    assert all(ran.requests == ((128, 1024),) for turn in turns for ran in turn)
    hit_s, said_s = np.median([[ran.t_s for ran in turn] for turn in turns[2:]], axis=0)
    say(f"128 tokens after 1024 cached ones: {1e3 * hit_s:.2f} ms on a hit, {1e3 * said_s:.2f} ms as said")
    assert 0.5 < said_s / hit_s < 2.0  # 1.0 on a quiet machine


def test_the_profile_predicts_steps_it_has_not_seen(
    engine: VllmEngine, table: StepTable, say: Callable[[str], None]
) -> None:
    """Random steps of all kinds, measured after the profile. A CPU that others use is noisy: a wide bound."""
    fit = PiecewiseLinearStepLatency(beyond="extrapolate").fit(table.X, table.y)
    unseen, quiet_s = [], float(table.steps.reference_s.min())
    for step in design.candidates(engine.limits, HELD_OUT, seed=12345):
        measured, quiet_s = measure._measure_undisturbed(engine, step, quiet_s)
        assert measured.discarded == 0
        unseen.append(measured)
    X = design.step_columns([m.step for m in unseen])
    y = np.array([m.t_s for m in unseen])
    errors = errors_by_regime(X, y, fit.predict(X))
    say(f"profile: {profile_summary(table)}")
    for regime, error in errors.items():
        say(f"held out, {regime}: MAPE {100 * error.mape_frac:.1f} %, {error.steps} steps")
    assert {"prefill", "mixed"} < set(errors)
    assert errors["all"].mape_frac < 0.5
    assert errors["mixed"].mape_frac < 0.5


@pytest.mark.skipif(not is_cpu_build(), reason="of the CPU wheel alone")
def test_beside_numba_the_engine_is_refused_in_one_line() -> None:
    """vLLM 0.32 ends in an AttributeError of llvmlite's there."""
    code = "import numba, pathlib, sys; from profiling.vllm_engine import VllmEngine; "
    code += "VllmEngine(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(TINY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "InputError: vLLM's CPU engine cannot start in a process that has loaded Numba" in done.stderr


def test_the_profile_covers_the_engine(engine: VllmEngine, table: StepTable) -> None:
    """All three kinds, up to the limits; host time within every step; a fit that never falls."""
    steps = table.steps
    mixed = (steps.n_prefill > 0) & (steps.n_decode > 0)
    assert mixed.sum() >= 5 and (steps.n_decode == 0).sum() >= 5 and (steps.n_prefill == 0).sum() >= 5
    assert (steps.prefill_tokens + steps.n_decode).max() == engine.limits.step_tokens
    assert steps.n_decode.max() == engine.limits.sequences
    assert ((steps.host_s > 0) & (steps.host_s < steps.t_s)).all()
    operators = table.operators
    assert operators is not None and list(operators) == [*engine.operators, "all_reduce"]
    assert (operators[["attn_pre_proj", "attn", "mlp_down_proj", "head"]] > 0).all(axis=None)
    assert 0.7 < float(np.median(operators.sum(axis=1) / table.y)) < 1.4  # two timings of the same work
    fit = PiecewiseLinearStepLatency().fit(table.X, table.y).latency_
    assert (np.diff(fit.step_s(np.arange(1, 513.0))) >= 0).all()
