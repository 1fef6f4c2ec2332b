"""What `plan profile` finds of an engine's host, on a real vLLM on the CPU: `make test-vllm`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.calibrate.engine_fit import EngineFit, fit_engine, without_host
from planner.models.latency import Array
from planner.models.step_fit import PiecewiseLinearStepLatency
from planner.models.step_tables import StepTable, read_step_table
from planner.runtime.served import WatchedEngines, watch_engines
from profiling.vllm_install import is_installed

if not is_installed():
    pytest.skip("vLLM is not installed (make test-vllm)", allow_module_level=True)

pytestmark = pytest.mark.slow
TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
ALONE = WatchedEngines(1, max_num_batched_tokens=512, max_num_seqs=32, max_model_len=2048, enforce_eager=True)
BUDGET_S = 45
LEAST_STEPS = 20
SLOW_STEP_S, SLOW_SEQUENCE_S = 40e-3, 1e-3  # far above what other programs do to steps of 2 to 10 ms
ATTEMPTS = 4  # at what is compared on the wall: the machine may be shared


@pytest.fixture(scope="module")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """To the log of the run, past pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(text: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stdout.write(f"\n    {text}; load average {os.getloadavg()[0]:.1f}")

    return write


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> StepTable:
    table = tmp_path_factory.mktemp("profile") / "table.csv"
    asked = ["profile", str(TINY), "-o", str(table), "--steps-only", "--eager"]
    asked += ["--max-num-batched-tokens", "512", "--max-num-seqs", "32", "--max-model-len", "2048"]
    one_core = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0)))}
    for budget_s in (BUDGET_S, 5 * BUDGET_S):  # on a busy machine starting may take all of the first
        command = [sys.executable, "-m", "planner.cli", *asked, "--budget", str(budget_s)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | one_core)
        if done.returncode == 0 and len(read_step_table(table).steps) >= LEAST_STEPS:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    return read_step_table(table)


@pytest.fixture(scope="module")
def watched() -> StepTable:
    return watch_engines(TINY, ALONE)


@pytest.fixture(scope="module")
def found(profile: StepTable, watched: StepTable) -> EngineFit:
    return fit_engine(profile, watched)


def steps_s(profile: StepTable, found: EngineFit, X: Array) -> Array:
    """What the constants say of steps (n, 5), on a clock that leaves out what others take."""
    fit = PiecewiseLinearStepLatency(beyond="extrapolate").fit(profile.X, without_host(profile).y).latency_
    step_s, sequence_s = found.host.per_step_s(1)
    host_s = step_s + sequence_s * (X[:, 2] + X[:, 4]) + found.admission_s * X[:, 4]
    return np.asarray(found.slowdown * fit.step_s(*X.T) + host_s)


def test_a_cpu_schedules_synchronously_and_takes_some_host_time(
    profile: StepTable, found: EngineFit, say: Callable[[str], None]
) -> None:
    """vLLM's CPU platform switches asynchronous scheduling off. On a machine that others use the constants
    fit badly now and then (0.22 beside three other jobs, 0.51 beside a browser): it is watched again."""
    say(f"{found}")
    assert not found.async_scheduling
    assert 1e-4 < found.host.step_s < 5e-3 and found.host.sequence_s < 1e-3
    assert 1e-4 < found.front_end_s < 0.5
    error_frac = found.error_frac
    for _ in range(ATTEMPTS - 1):
        if error_frac >= 0.3:
            error_frac = fit_engine(profile, watch_engines(TINY, ALONE)).error_frac
    assert error_frac < 0.3


def test_another_process_with_other_batches_steps_as_found(
    profile: StepTable, found: EngineFit, say: Callable[[str], None]
) -> None:
    """A second engine at 1, 2, 6 and 20 sequences, where the first was watched at 1, 4, 10 and 32: its steps
    grow with the batch as the constants say. One process is slower than the next on a machine that others use
    (0.6 to 1.4 times was seen), so what all batches have in common is taken out, up to a factor of two."""
    for attempt in range(ATTEMPTS):
        first = found if attempt == 0 else fit_engine(profile, watch_engines(TINY, ALONE))
        other = watch_engines(TINY, replace(ALONE, max_num_seqs=20, seed=7))
        predicted_s = steps_s(profile, first, other.X)
        of_level = [(other.steps.level == level).to_numpy() for level in np.unique(other.steps.level)]
        ratio = np.array([predicted_s[at].mean() / other.steps.own_s[at].mean() for at in of_level])
        common = float(np.exp(np.log(ratio).mean()))
        told = ", ".join(f"{100 * (r / common - 1):+.0f} %" for r in ratio)
        told = f"predicted less measured {told}, beside a factor of {common:.2f} in common"
        say(f"steps of another process: {told}")
        if 0.5 < common < 2 and np.abs(ratio / common - 1).max() < 0.3:
            return
    pytest.fail(f"after {ATTEMPTS} attempts: {told}")


def test_a_slower_scheduler_is_found(
    profile: StepTable, found: EngineFit, monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None]
) -> None:
    """40 ms more per step and 1 ms per sequence: so much longer are the steps that the constants say, of one
    sequence and of 32. A step after a pause also finds cold caches: 1 to 3 ms."""
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    monkeypatch.setenv("SLOW_STEP_S", str(SLOW_STEP_S))
    monkeypatch.setenv("SLOW_SEQUENCE_S", str(SLOW_SEQUENCE_S))
    slowed = replace(ALONE, arguments=("--scheduler-cls", "slow_scheduler.SlowScheduler"))
    decodes = np.array([[1, 0, 1, 100, 0], [32, 0, 32, 3200, 0]], dtype=float)
    expected_s = SLOW_STEP_S + SLOW_SEQUENCE_S * np.array([1, 32])
    for _ in range(ATTEMPTS):
        slow = fit_engine(profile, watch_engines(TINY, slowed))
        longer_s = steps_s(profile, slow, decodes) - steps_s(profile, found, decodes)
        one_ms, all_ms = 1e3 * longer_s
        say(f"{slow}; found {one_ms:.2f} ms for one sequence, {all_ms:.2f} for 32")
        if np.abs(longer_s / expected_s - 1).max() < 0.2:
            return
    pytest.fail(f"after {ATTEMPTS} attempts: {1e3 * longer_s} ms where {1e3 * expected_s} were put in")
