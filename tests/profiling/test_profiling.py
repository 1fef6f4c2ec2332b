"""The profiler without vLLM and torch: its plan of measurements, its table, its power."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from planner.documents.catalog import read_catalog
from planner.errors import InputError
from planner.models.latency import StepLatency
from planner.models.step_fit import PiecewiseLinearStepLatency
from planner.models.step_tables import COLUMNS, StepShape, read_step_table
from profiling import collectives, design
from profiling.collectives import Collectives
from profiling.config import shard_config
from profiling.design import StepLimits
from profiling.machine import catalog_name, describe_machine
from profiling.measure import Budget, Subject, measure_into, profile, profile_summary
from profiling.meter import StepMeasurement, StepNotRunError, StepRepeats, TimedRun
from profiling.operators import shape_of
from profiling.power_sampling import GpuPower, PowerSampler, open_gpu
from profiling.vllm_install import is_installed

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
LIMITS = StepLimits(step_tokens=2048, sequences=64, context_tokens=8192, kv_tokens=200_000, block_tokens=16)
TRUTH = StepLatency(
    knots_tokens=(1, 64, 2048),
    f_s=(0.008, 0.009, 0.09),
    a_s=2e-9,
    b_s=1e-5,
    d_s=4e-8,
    e_s=1e-4,
    h_s=0.0,
    basis="planted",
)
HEADER = {
    "llm": "tiny",
    "gpu": "none",
    "tp": "1",
    "dtype": "bfloat16",
    "engine": "fake",
    "date": "2026-11-20",
}


class FakeMeter:
    """Times steps by a planted formula, on a clock of its own; disturbed during some of its calls."""

    host_s_meaning = "planted"
    operators: tuple[str, ...] = ()

    def __init__(
        self,
        limits: StepLimits = LIMITS,
        *,
        noise_frac: float = 0.0,
        disturbed: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.limits, self.noise_frac, self.disturbed = limits, noise_frac, disturbed
        self.now_s, self.calls = 0.0, 0
        self.asked: list[StepShape] = []
        self.rng = np.random.default_rng(0)

    def clock(self) -> float:
        return self.now_s

    def measure(self, step: StepShape, *, quick: bool = False) -> StepMeasurement:
        assert self.limits.hold(step)
        self.calls += 1
        self.asked.append(step)
        t_s = float(TRUTH.step_s(*design.step_columns([step])[0]))
        t_s *= 1 + self.noise_frac * self.rng.normal()
        if self.disturbed(self.calls):
            t_s *= 10
        self.now_s += 0.01 + 4 * t_s
        return StepMeasurement(step, t_s, 0.001, 3, 0.01, 0.01 + 4 * t_s, context_tokens=float(step.context))

    def close(self) -> None:
        pass


def rows(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")][1:]


@pytest.mark.parametrize("seed", range(20))
def test_every_planned_step_is_one_the_engine_can_run(seed: int) -> None:
    """Whatever the limits; and a start design has all three kinds in near equal shares."""
    rng = np.random.default_rng(seed)
    limits = StepLimits(
        step_tokens=int(2 ** rng.uniform(4, 14)),
        sequences=int(2 ** rng.uniform(1, 9)),
        context_tokens=int(2 ** rng.uniform(7.5, 16)),
        kv_tokens=int(2 ** rng.uniform(10, 21)),
        block_tokens=int(rng.choice([1, 16, 128])),
    )
    planned = [*design.start_design(limits, 36, seed), *design.candidates(limits, 100, seed)]
    assert all(limits.hold(step) for step in planned)
    kinds = [(step.prompts > 0, step.decodes > 0) for step in design.candidates(limits, 90, seed)]
    assert min(kinds.count(kind) for kind in ((True, False), (False, True), (True, True))) >= 25


def test_the_start_design_holds_the_ends_of_every_range() -> None:
    """So that no later prediction within the limits is an extrapolation in tokens, batch or context."""
    planned = design.start_design(LIMITS, 36, seed=0)
    tokens = [step.prompts * step.new + step.decodes for step in planned]
    assert (min(tokens), max(tokens)) == (1, LIMITS.step_tokens)
    assert max(step.decodes for step in planned) == LIMITS.sequences
    assert max(step.context for step in planned) == LIMITS.context_tokens - design.ROOM_TOKENS
    assert max(step.cached + step.new for step in planned) == LIMITS.context_tokens - 1


def test_the_next_step_is_where_the_fits_disagree() -> None:
    """Decodes were measured at short contexts and with noise, so the slope over KV tokens is hardly known: of
    three candidates that cost about the same the one with many KV tokens tells most.
    """
    rng = np.random.default_rng(1)
    measured = [StepShape(1, n, 0, 0, 0) for n in (1, 8, 32, 128, 256, 512, 1024, 2048)]
    measured += [StepShape(0, 0, 0, d, 40 if d % 3 else 400) for d in (1, 2, 4, 6, 8, 12, 16, 32, 48, 64, 3)]
    X = design.step_columns(measured)
    y = np.asarray(TRUTH.step_s(*X.T)) * (1 + 0.03 * rng.normal(size=len(X)))
    among = [StepShape(1, 300, 0, 0, 0), StepShape(0, 0, 0, 12, 40), StepShape(0, 0, 0, 20, 8000)]
    chosen = design.choose_step(X, y, among, np.random.default_rng(2), repeats=4, overhead_s=1.0)
    assert chosen.step == among[2]
    assert chosen.disagreement_frac == chosen.worst_frac > 0.03


def test_of_two_steps_as_uncertain_the_cheaper_is_measured() -> None:
    """Both rest on the slope over KV tokens, d: uncertain by K d / t, which is 0.68 and 0.53 of d's own
    error, at 30 and 20 ms. Per second 32 decodes tell more; where time costs nothing, 64 do.
    """
    rng = np.random.default_rng(3)
    measured = [StepShape(0, 0, 0, d, 40 if d % 3 else 400) for d in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)]
    X = design.step_columns(measured)
    y = np.asarray(TRUTH.step_s(*X.T)) * (1 + 0.002 * rng.normal(size=len(X)))
    among = [StepShape(0, 0, 0, 64, 8000), StepShape(0, 0, 0, 32, 8000)]
    cheap = design.choose_step(X, y, among, np.random.default_rng(0), repeats=1e6, overhead_s=0.0)
    free = design.choose_step(X, y, among, np.random.default_rng(0), repeats=0.0, overhead_s=1.0)
    assert (cheap.step, free.step) == (among[1], among[0])


@pytest.mark.long
def test_a_profile_recovers_the_planted_step_times(tmp_path: Path) -> None:
    """2 % of noise; a fit to 30 s of measuring predicts unseen steps to 2 %, mixed ones included."""
    meter = FakeMeter(noise_frac=0.02)
    table = measure_into(tmp_path / "t.csv", meter, HEADER, Budget(30, clock=meter.clock))
    fit = PiecewiseLinearStepLatency(beyond="extrapolate").fit(table.X, table.y)
    unseen = design.step_columns(design.candidates(LIMITS, 200, seed=99))
    error = np.abs(fit.predict(unseen) / TRUTH.step_s(*unseen.T) - 1)
    assert error.mean() < 0.02
    assert error[(unseen[:, 2] > 0) & (unseen[:, 4] > 0)].mean() < 0.02


@pytest.mark.long
def test_measuring_ends_with_the_budget(tmp_path: Path) -> None:
    """The last step may start just before the end; nothing here takes longer than 2 s with its tries."""
    meter = FakeMeter(noise_frac=0.05)
    measure_into(tmp_path / "t.csv", meter, HEADER, Budget(20, clock=meter.clock))
    assert 20 <= meter.now_s < 22


def test_no_budget_for_a_single_step_is_an_error(tmp_path: Path) -> None:
    meter = FakeMeter()
    with pytest.raises(InputError, match="spent before the first step"):
        measure_into(tmp_path / "t.csv", meter, HEADER, Budget(0.0, clock=meter.clock))


def test_noiseless_measuring_ends_before_the_budget(tmp_path: Path) -> None:
    """Fits to a formula of their own form agree exactly once every coefficient is seen: of short contexts
    after 40 rows, of longer ones after a thousand."""
    meter = FakeMeter(StepLimits(2048, 16, 1024, 20_000, 16))
    said: list[str] = []
    measure_into(tmp_path / "t.csv", meter, HEADER, Budget(1e5, clock=meter.clock), progress=said.append)
    assert "done early" in said[-1] and meter.now_s < 1e4


def test_the_table_is_a_step_table_with_its_origin(tmp_path: Path) -> None:
    meter = FakeMeter()
    out = tmp_path / "new" / "t.csv"  # the folder is made
    measure_into(out, meter, HEADER, Budget(5, clock=meter.clock))
    table = read_step_table(out)
    assert tuple(table.steps.columns[: len(COLUMNS)]) == COLUMNS
    assert dict(table.about) == HEADER
    assert {"host_s", "spent_s", "repeats", "spread_frac", "power_w"} <= set(table.steps.columns)
    assert table.y == pytest.approx(TRUTH.step_s(*table.X.T), rel=1e-4)
    told = profile_summary(table)
    assert told["steps"] == len(table.steps) and told["host_s_median"] == 0.001


def test_every_row_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    """The tenth call (three references, then a row and a reference each) is interrupted: 3 rows stay."""

    class Interrupted(FakeMeter):
        def measure(self, step: StepShape, *, quick: bool = False) -> StepMeasurement:
            if self.calls == 9:
                raise KeyboardInterrupt
            return super().measure(step, quick=quick)

    meter = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        measure_into(tmp_path / "t.csv", meter, HEADER, Budget(60, clock=meter.clock))
    assert len(rows(tmp_path / "t.csv")) == 3


@pytest.mark.long
def test_a_restart_goes_on_where_the_last_run_ended(tmp_path: Path) -> None:
    """Cut within a line: that row is measured again, no other is, and the seconds spent before count."""
    out = tmp_path / "t.csv"
    first = FakeMeter(noise_frac=0.02)
    measure_into(out, first, HEADER, Budget(10, clock=first.clock))
    kept = rows(out)[:-1]
    out.write_text(out.read_text()[:-7])
    second = FakeMeter(noise_frac=0.02)
    measure_into(out, second, HEADER | {"date": "2026-11-21"}, Budget(20, clock=second.clock))
    after = rows(out)
    assert after[: len(kept)] == kept and len(after) > len(kept) + 3
    steps = read_step_table(out).steps
    assert not steps.duplicated(
        ["n_prefill", "prefill_tokens", "cached_tokens", "n_decode", "kv_tokens"]
    ).any()
    assert second.now_s < 12
    assert "2026-11-21" not in out.read_text()


@pytest.mark.parametrize("key", ["llm", "gpu", "tp", "dtype", "engine"])
def test_a_table_of_another_machine_is_not_continued(tmp_path: Path, key: str) -> None:
    meter, out = FakeMeter(), tmp_path / "t.csv"
    measure_into(out, meter, HEADER, Budget(2, clock=meter.clock))
    with pytest.raises(InputError, match=f"holds steps with {key} .*name another file"):
        measure_into(out, FakeMeter(), HEADER | {key: "other"}, Budget(2))


def test_a_table_of_other_operators_is_not_continued(tmp_path: Path) -> None:
    """An engine that times operators, where the table has totals alone."""
    meter, out = FakeMeter(), tmp_path / "t.csv"
    measure_into(out, meter, HEADER, Budget(2, clock=meter.clock))
    before, other = out.read_text(), FakeMeter()
    other.operators = ("attn", "rest")
    with pytest.raises(InputError, match="holds steps with other operators; name another file"):
        measure_into(out, other, HEADER, Budget(2))
    assert out.read_text() == before


def test_a_file_of_something_else_is_not_appended_to(tmp_path: Path) -> None:
    out = tmp_path / "notes.csv"
    for text in ("a,b\n1,2\n", "a note without a line's end"):
        out.write_text(text)
        with pytest.raises(InputError, match="no table of this profiler"):
            measure_into(out, FakeMeter(), HEADER, Budget(2))
        assert out.read_text() == text


def test_a_profile_ends_where_every_step_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small engine every drawn step may be in the table already."""
    monkeypatch.setattr(design, "candidates", lambda *_: [])
    meter = FakeMeter()
    table = measure_into(tmp_path / "t.csv", meter, HEADER, Budget(1e9, clock=meter.clock))
    assert len(table.steps) == len(design.range_corners(LIMITS))


def test_a_disturbed_step_is_measured_again(tmp_path: Path) -> None:
    """Everything takes ten times as long during calls 10 to 13: two rows and their references. Tries later
    than that are clean, so no row shows it.
    """
    meter = FakeMeter(disturbed=lambda call: 10 <= call <= 13)
    table = measure_into(tmp_path / "t.csv", meter, HEADER, Budget(10, clock=meter.clock))
    assert table.y == pytest.approx(TRUTH.step_s(*table.X.T), rel=1e-4)
    assert meter.calls > 3 + 2 * len(table.steps)


def test_steps_the_engine_refuses_are_left_out(tmp_path: Path) -> None:
    class Picky(FakeMeter):
        def measure(self, step: StepShape, *, quick: bool = False) -> StepMeasurement:
            if step.cached:
                raise StepNotRunError("no")
            return super().measure(step, quick=quick)

    small = StepLimits(step_tokens=64, sequences=4, context_tokens=256, kv_tokens=4096, block_tokens=16)
    meter = Picky(small, noise_frac=0.05)
    with pytest.raises(InputError, match="were refused"):
        measure_into(tmp_path / "t.csv", meter, HEADER, Budget(1e4, clock=meter.clock))
    assert (read_step_table(tmp_path / "t.csv").steps.cached_tokens == 0).all()


def test_a_run_that_was_not_the_step_is_thrown_away() -> None:
    """Wanted: 64 tokens after 128 and a decode at 200. A run of 63 tokens, or at 199, is another step."""
    step = StepShape(1, 64, 128, 1, 200)
    wanted = [(1, 199), (64, 128)]
    repeats = StepRepeats(step)
    repeats.add(TimedRun(((1, 199), (63, 128)), 9.0, 9.0), wanted, 200)
    repeats.add(TimedRun(((1, 198), (64, 128)), 9.0, 9.0), wanted, 200)
    repeats.add(TimedRun(((64, 128),), 9.0, 9.0), wanted, 200)
    with pytest.raises(StepNotRunError):
        repeats.result()
    repeats.add(TimedRun(((1, 199), (64, 128)), 0.5, 0.4), wanted, 200)
    found = repeats.result()
    assert (found.t_s, found.repeats, found.discarded) == (0.5, 1, 3)
    assert found.host_s == pytest.approx(0.1)


def test_one_rank_of_four_has_a_quarter_of_the_heads() -> None:
    """Llama-3.1-70B: 64 heads, 8 KV heads, feed-forward 28672; at TP 16 KV heads are copied, one each."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "num_hidden_layers": 80,
    }
    shard = shard_config(config, 4)
    assert [shard[key] for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")] == [
        16,
        2,
        7168,
    ]
    assert (shard["head_dim"], shard["hidden_size"], shard["num_hidden_layers"]) == (128, 8192, 80)
    assert shard_config(config, 16)["num_key_value_heads"] == 1
    assert config["num_attention_heads"] == 64
    with pytest.raises(InputError, match="must divide the 64 heads"):
        shard_config(config, 3)


def test_the_width_of_opt_is_divided_and_a_missing_size_is_named() -> None:
    """OPT writes ffn_dim: at TP 2 every rank has half of 8192."""
    config = {"num_attention_heads": 32, "hidden_size": 2048, "ffn_dim": 8192, "vocab_size": 50272}
    assert shard_config(config, 2)["ffn_dim"] == 4096
    with pytest.raises(InputError, match="vocab_size is None, must be a whole number"):
        shard_config({**config, "vocab_size": None}, 2)


def test_an_llm_that_cannot_be_divided_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    """GPT-2's config.json has n_embd and n_head: `hidden_size` ended in a KeyError."""
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "n_embd": 768}')
    with pytest.raises(InputError, match="must divide the 0 heads"):
        profile(tmp_path, tmp_path / "t.csv", Subject("torch", tp=2))


@pytest.mark.parametrize(
    ("model_type", "activation", "matrices"),
    [("llama", "silu", 3), ("gemma", "gelu_pytorch_tanh", 3), ("opt", None, 2)],
)
def test_a_gate_is_known_by_the_family(model_type: str, activation: str | None, matrices: int) -> None:
    """Gemma's blocks have gates, with another activation; OPT's have none, and do not name theirs so."""
    config = {
        "model_type": model_type,
        "hidden_act": activation,
        "hidden_size": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "intermediate_size": 100,
        "vocab_size": 1000,
    }
    assert shape_of(config, "config.json").layer_parameters == 4 * 64 * 64 + matrices * 64 * 100


def test_the_rank_that_failed_says_why() -> None:
    """The first of two ranks waits for the other, which has failed."""
    fails = [sys.executable, "-c", "raise SystemExit('no such device')"]
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in (waits, fails)]
    with pytest.raises(InputError, match="between 2 ranks cannot be timed: no such device"):
        collectives._wait_for_ranks(processes)
    assert all(process.poll() is not None for process in processes)


def test_a_gpu_is_known_by_its_drivers_name() -> None:
    catalog = read_catalog()
    assert catalog_name("NVIDIA H100 80GB HBM3", catalog) == "h100-80g"
    assert catalog_name("NVIDIA H200", catalog) == "h200-141g"
    assert catalog_name("Some CPU", catalog) == "Some CPU"
    assert {"machine", "device", "driver", "python"} <= set(describe_machine())


def test_mean_power_is_energy_over_time() -> None:
    """A counter of 100 mJ per call-free millisecond would be 100 W; ours adds 75 J in the block, whatever
    the samples say, and the peak is the largest sample.
    """
    energy_mj, watts_mw = itertools.count(0, 75_000), itertools.cycle([90_000, 110_000])
    nvml = SimpleNamespace(
        nvmlDeviceGetTotalEnergyConsumption=lambda _: next(energy_mj),
        nvmlDeviceGetPowerUsage=lambda _: next(watts_mw),
        NVMLError=RuntimeError,
    )
    before_s = time.monotonic()
    with PowerSampler(GpuPower(nvml, None)) as power:
        inside_s = time.monotonic()
        time.sleep(0.3)
        most_w = 75 / (time.monotonic() - inside_s)
    least_w = 75 / (time.monotonic() - before_s)
    assert power.mean_w is not None and 0.99 * least_w <= power.mean_w <= 1.01 * most_w
    assert power.peak_w == 110
    with PowerSampler(None) as nothing:
        pass
    assert (nothing.mean_w, nothing.peak_w) == (None, None)


def test_clocks_are_told_with_their_most_and_unknown_where_the_driver_hides_them() -> None:
    """NVML numbers its clocks: 1 is the SMs', 2 the memory's."""

    def refuse(*_: object) -> int:
        raise RuntimeError("not supported")

    kinds: dict[str, Any] = {"NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVMLError": RuntimeError}
    now, most = {1: 1755, 2: 3201}, {1: 1980, 2: 3201}
    seen = SimpleNamespace(
        nvmlDeviceGetClockInfo=lambda _, kind: now[kind],
        nvmlDeviceGetMaxClockInfo=lambda _, kind: most[kind],
        **kinds,
    )
    hidden = SimpleNamespace(nvmlDeviceGetClockInfo=refuse, nvmlDeviceGetMaxClockInfo=refuse, **kinds)
    assert GpuPower(seen, None).clocks() == "SM 1755 of 1980 MHz, memory 3201 of 3201 MHz"
    assert GpuPower(hidden, None).clocks() == "unknown"


@pytest.mark.skipif(is_installed(), reason="vLLM is installed")
@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_the_command_says_what_to_install(engine: str, tmp_path: Path) -> None:
    from planner.cli import app

    if engine == "torch" and importlib.util.find_spec("torch") is not None:
        pytest.skip("torch is installed")
    result = CliRunner().invoke(
        app, ["profile", str(TINY), "-o", str(tmp_path / "t.csv"), "--engine", engine]
    )
    assert isinstance(result.exception, InputError)
    assert "pip install" in str(result.exception) and "\n" not in str(result.exception)
    assert not (tmp_path / "t.csv").exists()


def test_all_reduces_between_sizes_and_beyond() -> None:
    """1 token 10 us, 4 tokens 40: 2 tokens 20, 8 tokens (twice the most) 80; two per layer, three layers."""
    found = Collectives("gloo", 2, 128, np.array([1.0, 4.0]), np.array([1e-5, 4e-5]))
    assert [found.once_s(n) for n in (1, 2, 4, 8)] == pytest.approx([1e-5, 2e-5, 4e-5, 8e-5])
    assert found.step_s(3, 2) == pytest.approx(6 * 2e-5)
    assert found.to_csv().splitlines()[1:] == ["128,2,2,0.01", "512,2,2,0.04"]


@pytest.mark.parametrize(("order", "measured"), [(None, 1), ("PCI_BUS_ID", 1), ("FASTEST_FIRST", None)])
def test_the_gpu_whose_power_is_read_is_the_one_that_cuda_uses(
    monkeypatch: pytest.MonkeyPatch, order: str | None, measured: int | None
) -> None:
    """CUDA numbers the fastest GPU 0 unless told otherwise, NVML the first on the bus."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if order is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetPowerUsage=lambda handle: 1000 * handle,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpu = open_gpu()
    assert (None if gpu is None else gpu.handle) == measured
    assert os.environ["CUDA_DEVICE_ORDER"] == (order or "PCI_BUS_ID")
