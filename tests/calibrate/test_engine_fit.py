"""Constants of an engine, planted into steps of a profile and of a watch, and found again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.engines import Points
from planner.calibrate.engine_fit import fit_engine
from planner.calibrate.fitting import fit_table
from planner.documents.catalog import read_catalog
from planner.documents.engine_file import parse_engine
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Pool, WorkerType
from planner.importers import StatedSetup
from planner.models.latency import ON_WALL, Array, StepLatency
from planner.models.step_fit import least_absolute
from planner.models.step_tables import COLUMNS, StepTable
from planner.runtime.step_fits import includes_other_processes

DEVICE = StepLatency((1.0, 512.0), (2e-3, 40e-3), 1e-8, 5e-5, 1e-8, 0.0, 0.0, "planted")
OWN_S, OWN_SEQUENCE_S = 0.8e-3, 20e-6
ABOUT = {
    "version": "0.32.0",
    "async_scheduling": "false",
    "engines": "2",
    "spare_cores": "0",
    "servers_step_s": "0.001",
    "servers_token_s": "0.0001",
    "front_end_s": "0.006",
    "load_average": "0.5",
    "date": "2026-11-21",
}


def frame(n: int, seed: int) -> pd.DataFrame:
    """Steps of one to 32 decodes, a third of them with a prompt, a third prompts alone."""
    rng = np.random.default_rng(seed)
    kind = np.arange(n) % 3
    new = np.where(kind == 0, 0, rng.integers(8, 480, n))
    decodes = np.where(kind == 2, 0, rng.choice([1, 4, 10, 32], n))
    kv = decodes * rng.integers(50, 1500, n)
    columns = [new > 0, new, 0 * new, new * (new + 1) / 2, decodes, kv, np.ones(n)]
    return pd.DataFrame(dict(zip(COLUMNS, columns, strict=True))).astype(float)


def sequences(X: Array) -> Array:
    return np.asarray(X[:, 2] + X[:, 4])


def a_profile() -> StepTable:
    X = StepTable(frame(300, 1)).X
    host_s = OWN_S + OWN_SEQUENCE_S * sequences(X)
    return StepTable(frame(300, 1).assign(t_s=DEVICE.step_s(*X.T) + host_s, host_s=host_s))


def a_watch(seconds: Callable[[Array], Array], *, on_cpu: bool, **about: str) -> StepTable:
    steps = frame(900, 2)
    X = StepTable(steps).X
    t_s = seconds(X)
    level = np.choose(np.arange(900) % 4, [1, 4, 10, 32])
    own_s = t_s if on_cpu else np.nan
    return StepTable(steps.assign(t_s=2 * t_s, own_s=own_s, level=level, server="w-0"), ABOUT | about)


def test_on_a_cpu_slowdown_host_and_admission_are_found_and_the_servers_added() -> None:
    """1.2 (g + p) + 0.5 ms + 30 us S + 1.5 ms P by the engine's own clock, whatever the wall says; no core is
    spare, so 1 ms per step and 0.1 ms per sequence of the servers come on top."""

    def seconds(X: Array) -> Array:
        S = sequences(X)
        own_s = OWN_S + OWN_SEQUENCE_S * S
        return np.asarray(1.2 * (DEVICE.step_s(*X.T) + own_s) + 0.5e-3 + 30e-6 * S + 1.5e-3 * X[:, 4])

    found = fit_engine(a_profile(), a_watch(seconds, on_cpu=True))
    assert not found.async_scheduling and found.rest.step_s == 0
    assert found.slowdown == pytest.approx(1.2, rel=0.01)
    assert found.admission_s == pytest.approx(1.5e-3, rel=0.05)
    assert found.host.step_s == pytest.approx(1.2 * OWN_S + 0.5e-3 + 1e-3, rel=0.03)
    assert found.host.sequence_s == pytest.approx(1.2 * OWN_SEQUENCE_S + 30e-6 + 100e-6, rel=0.03)
    assert found.error_frac < 0.02
    alone = fit_engine(a_profile(), a_watch(seconds, on_cpu=True, spare_cores="1"))
    assert found.host.step_s - alone.host.step_s == pytest.approx(1e-3)
    assert found.shares_cores and not alone.shares_cores


def test_a_gpu_that_waits_for_its_host_has_no_slowdown() -> None:
    """Synchronous, on the wall: g + p + 0.7 ms + 40 us S."""
    found = fit_engine(
        a_profile(),
        a_watch(
            lambda X: (DEVICE.step_s(*X.T) + OWN_S + 0.7e-3 + (OWN_SEQUENCE_S + 40e-6) * sequences(X)) / 2,
            on_cpu=False,
        ),
    )
    assert found.slowdown == 1
    assert found.host.step_s == pytest.approx(OWN_S + 0.7e-3, rel=0.02)
    assert found.host.sequence_s == pytest.approx(OWN_SEQUENCE_S + 40e-6, rel=0.02)


def test_asynchronous_scheduling_hides_the_host_and_leaves_a_rest() -> None:
    """max(g, p) + 0.3 ms + 7 us S: the host is the profile's, the rest what was watched."""

    def seconds(X: Array) -> Array:
        S = sequences(X)
        hidden_s = np.maximum(DEVICE.step_s(*X.T), OWN_S + OWN_SEQUENCE_S * S)
        return np.asarray((hidden_s + 0.3e-3 + 7e-6 * S) / 2)

    rows = list(read_catalog().engines.values())
    found = fit_engine(a_profile(), a_watch(seconds, on_cpu=False, async_scheduling="true"), rows)
    nearest = min(rows, key=lambda row: row.version_distance("0.32.0"))
    assert found.async_scheduling
    assert found.host.step_s == pytest.approx(OWN_S, rel=0.01)
    assert found.rest.step_s == pytest.approx(0.3e-3, rel=0.03)
    assert found.rest.sequence_s == pytest.approx(7e-6, rel=0.05)
    assert (found.host.log2_tp_s, found.rest.log2_tp_s) == (nearest.host.log2_tp_s, nearest.rest.log2_tp_s)


def test_the_launch_of_a_prefill_counts_as_its_own_time() -> None:
    """max(g, p) + 0.3 ms + 7 us S again, but the tokens of a step are read 2 ms before the prefill after it
    ends, since that was launched in between: its time stands in the row before.
    """

    def truth_s(X: Array) -> Array:
        S = sequences(X)
        return np.asarray(np.maximum(DEVICE.step_s(*X.T), OWN_S + OWN_SEQUENCE_S * S) + 0.3e-3 + 7e-6 * S)

    # Four decodes, then a prompt beside decodes, at one level.
    is_prompt = np.arange(900) % 5 == 4
    steps = frame(2700, 2)
    decodes, prompts = steps[steps.n_prefill == 0], steps[(steps.n_prefill > 0) & (steps.n_decode > 0)]
    mixed = decodes.iloc[:900].reset_index(drop=True)
    mixed[is_prompt] = prompts.iloc[: is_prompt.sum()].to_numpy()
    true_s = truth_s(StepTable(mixed).X)
    end_s = np.cumsum(true_s)
    read_s = np.where(np.roll(is_prompt, -1), np.roll(end_s, -1) - 2e-3, end_s)
    read_s[-1] = end_s[-1]
    seen_s = np.diff(read_s, prepend=0.0)
    watched = StepTable(
        mixed.assign(t_s=seen_s, own_s=np.nan, level=4, server="w-0"), ABOUT | {"async_scheduling": "true"}
    )
    found = fit_engine(a_profile(), watched)
    assert found.rest.step_s == pytest.approx(0.3e-3, rel=0.2)
    assert found.admission_s == pytest.approx(0.0, abs=0.3e-3)


def test_its_row_is_read_as_an_engine_of_that_version(tmp_path: Path) -> None:
    watched = a_watch(lambda X: DEVICE.step_s(*X.T) + 5e-3, on_cpu=True, spare_cores="2")
    row = fit_engine(a_profile(), watched).row(source="here", date="2026-11-21")
    (tmp_path / "engines.yaml").write_text(to_yaml({"vllm-0.32": row}))
    engine = parse_engine({"version": "0.32.1"}, read_catalog(tmp_path).engines.values(), "engine")
    assert engine is not None
    assert not engine.is_nearest and not engine.async_scheduling
    assert engine.front_end_s == pytest.approx(6e-3)
    assert engine.host.step_s == pytest.approx(5e-3, rel=0.05)


def test_a_fit_of_such_a_profile_leaves_the_host_to_the_engine() -> None:
    """Device seconds x 1.1 and 2 ms per prompt; without the line `engines` the host stays in, told apart."""
    profile = a_profile()
    facts = StatedSetup("meta-llama/Llama-3.1-8B", "h100-80g", 1)
    about = {"engines": "engines.yaml", "slowdown": "1.1", "admission_s": "0.002", "shares_cores": "true"}
    fitted = fit_table(StepTable(profile.steps, about), facts, read_catalog(), where="table.csv")
    X = profile.X
    expected_s = 1.1 * DEVICE.step_s(*X.T) + 2e-3 * X[:, 4]
    assert fitted.latency.step_s(*X.T) == pytest.approx(expected_s, rel=0.02)
    assert fitted.latency.basis.endswith(ON_WALL)
    chosen = fit_table(
        StepTable(profile.steps, about), facts, read_catalog(), where="table.csv", choose_family=True
    )
    catalog = read_catalog()
    worker = WorkerType(catalog.gpu("h100-80g"), 1, chosen.latency, 64 * 1024, 512, 32)
    assert includes_other_processes(
        Fleet(catalog.llm("meta-llama/Llama-3.1-8B"), (Pool("mixed", "mixed", worker, 1),))
    )
    assert not fitted.latency.has_host and any("engines.yaml" in note for note in fitted.notes)
    with_host = fit_table(StepTable(profile.steps), facts, read_catalog(), where="table.csv")
    assert any("asynchronous scheduling would hide it" in note for note in with_host.notes)
    whole = with_host.latency
    assert whole.has_host and whole.step_s(*X.T) == pytest.approx(profile.y, rel=0.02)
    with pytest.raises(InputError, match=r"table\.csv: # slowdown: expected a number, found 'fast'"):
        odd = StepTable(profile.steps, about | {"slowdown": "fast"})
        fit_table(odd, facts, read_catalog(), where="table.csv")


def test_a_profile_without_host_times_says_so() -> None:
    bare = StepTable(a_profile().steps.drop(columns="host_s"))
    with pytest.raises(InputError, match="no host_s"):
        fit_engine(bare, a_watch(lambda X: DEVICE.step_s(*X.T), on_cpu=True))


def test_the_least_sum_of_absolute_errors_ignores_an_outlier() -> None:
    """Ten points on 2 + 3 x, one of which is 100 too high."""
    x = np.arange(10.0)
    y = 2 + 3 * x + np.where(x == 5, 100, 0)
    assert least_absolute(np.column_stack([np.ones(10), x]), y, scale=np.ones(10)) == pytest.approx([2, 3])


def test_constants_of_published_runs_are_judged_on_campaigns_left_out() -> None:
    """Host 0.5 ms + 40 us D + 0.2 ms log2 TP planted into three campaigns. One has ten times the runs, and is
    10 % off: it counts no more than each of the others, and is found out when it is left out."""
    rng = np.random.default_rng(0)
    group = np.repeat(["a", "b", "c"], [6, 6, 60])
    columns = np.column_stack([np.ones(72), rng.uniform(8, 512, 72), rng.integers(0, 4, 72)])
    g_s = rng.uniform(10e-3, 40e-3, 72)
    measured_s = g_s + columns @ [0.5e-3, 40e-6, 0.2e-3]
    points = Points(np.where(group == "c", 1.1, 1.0) * measured_s, g_s, columns, group)
    assert points.fitted() == pytest.approx([0.5e-3, 40e-6, 0.2e-3], rel=1e-3)
    assert points.unseen_errors()[group == "c"] == pytest.approx(1 / 1.1 - 1, abs=1e-3)
