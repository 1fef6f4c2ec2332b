"""Power: by hand, planted and recovered, bounded by the cap, and the energy of a fleet added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plans import CATALOG, a_plan, a_trace, mixed, pairs

from benchmarks.power_fit import (
    MEASURED_EXPONENT,
    StepPower,
    fit_power,
    fit_rows,
    fit_runs,
    held_out,
    held_out_campaigns,
    ml_energy_rows,
    phases,
    splitwise_cells,
)
from planner.domain import Gpu
from planner.errors import CatalogError, ExtrapolationError, InputError
from planner.fleet import Fleet
from planner.models.llm import Llm
from planner.models.power import Power, cap_gpu, cap_slowdowns, shipped_power, step_utilisations
from planner.simulator import layout
from planner.simulator.energy import ExpectedPower, expected_power, run_load
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation

# 100 bytes/s, 1000 FLOPs/s, 200 W: small enough for a sheet of paper. A layer of 144 weights, a head of 40.
LLM = Llm("paper", layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, ffn=8, vocab=10, context_tokens=64)
GPU = Gpu("paper", 1e3, 100.0, 1000.0, "wire", 10.0, 200.0, 8, 1.0, "paper", "paper")
POWER = Power(0.25, 0.5, 1.0, 1.0, {"paper": 0.125}, 0.2)
PERF_MODEL = Path(__file__).parents[3] / "shared" / "reference" / "splitwise" / "perf_model.csv"
ML_ENERGY = Path(__file__).parents[3] / "shared" / "reference" / "reality" / "ml_energy.jsonl"


def test_a_step_by_hand() -> None:
    """2 tokens in 10 s on 1 GPU: 2 * 144 * 2 = 576 FLOPs of 10,000, (144 + 40) * 2 = 368 bytes and 5 KV
    tokens of 8 bytes of 1000: 0.25 + 0.0576 + 0.5 * 0.408 = 0.5116 of 200 W."""
    compute, memory = step_utilisations(LLM, GPU, 1, 10.0, 2, 5)
    assert (float(compute), float(memory)) == pytest.approx((0.0576, 0.408))
    assert POWER.busy_w(LLM, GPU, 1, 10.0, 2, 5) == pytest.approx(102.32)
    assert POWER.idle_w(GPU) == 25.0
    assert POWER.idle_w(replace(GPU, name="x", base="x")) == 40.0


def test_two_gpus_share_the_work_but_copy_the_one_kv_head() -> None:
    compute, memory = step_utilisations(LLM, GPU, 2, 10.0, 2, 5)
    assert (float(compute), float(memory)) == pytest.approx((0.0288, (368 + 2 * 40) / 2000))


def test_a_cap_holds_whatever_the_load() -> None:
    tight = replace(GPU, name="paper@60W", power_w=60.0, uncapped_w=200.0)
    assert POWER.busy_w(LLM, tight, 1, 0.001, 1000) == 60.0
    assert POWER.busy_w(LLM, GPU, 1, 0.001, 1000) == 200.0
    assert POWER.idle_w(replace(tight, power_w=10.0)) == 10.0


def test_more_load_never_draws_less() -> None:
    grid = np.linspace(0, 1.5, 40)
    for power in (POWER, shipped_power()):
        drawn = power.draw_frac(grid[:, None], grid[None, :])
        assert (np.diff(drawn, axis=0) >= 0).all() and (np.diff(drawn, axis=1) >= 0).all()


@pytest.mark.parametrize("seed", range(10))
def test_planted_coefficients_are_recovered(seed: int) -> None:
    rng = np.random.default_rng(seed)
    floor, compute, memory, top = rng.uniform([0.1, 0.8, 0.3, 0.9], [0.4, 1.5, 0.9, 1.1])
    X = rng.uniform(0, [0.7, 0.8], (80, 2))
    y = np.minimum(floor + X @ [compute, memory], top)
    model = StepPower()
    model.fit(X, y)
    assert model.coef_ == pytest.approx([floor, compute, memory, top], rel=1e-3)
    assert model.predict(X) == pytest.approx(y, rel=1e-3)
    assert model.power({}, 0.1).draw_frac(X[:, 0], X[:, 1]) == pytest.approx(model.predict(X))


def test_a_fit_refuses_what_it_has_not_seen() -> None:
    X, y = np.array([[0.1, 0.1], [0.2, 0.1], [0.1, 0.3], [0.3, 0.3]]), np.array([0.4, 0.5, 0.5, 0.7])
    with pytest.raises(ExtrapolationError, match="measured up to"):
        StepPower().fit(X, y).predict(np.array([[0.5, 0.1]]))
    assert StepPower(beyond="extrapolate").fit(X, y).predict(np.array([[0.5, 0.1]])).shape == (1,)
    with pytest.raises(InputError, match="must be > 0"):
        StepPower().fit(X, np.array([0.4, 0.0, 0.5, 0.7]))
    with pytest.raises(InputError, match="expected compute and memory"):
        StepPower().fit(X[:, :1], y)


@pytest.mark.shared
@pytest.mark.skipif(not PERF_MODEL.exists(), reason="needs ../shared")
def test_the_shipped_figures_are_the_fit_of_splitwises_measurements() -> None:
    """And its errors on an (LLM, TP) it has not seen: below 8 % for prefill peaks, 6 % for decodes."""
    cells = splitwise_cells(PERF_MODEL, CATALOG)
    assert len(cells) == 44
    rows = phases(cells)
    used = fit_rows(rows)
    shipped = shipped_power()
    assert fit_power(rows[used]).coef_ == pytest.approx(
        [shipped.floor_frac, shipped.compute_frac, shipped.memory_frac, shipped.top_frac], abs=1e-4
    )
    error = np.abs(held_out(rows) / rows.frac.to_numpy() - 1)
    for phase, stated in (("prefill", shipped.prefill_mape_frac), ("decode", shipped.decode_mape_frac)):
        assert error[used & (rows.phase == phase).to_numpy()].mean() == pytest.approx(stated, abs=5e-4)


def test_splitwises_own_cells_come_out() -> None:
    """Llama-2-70B on 8 A100: a decode of 44.9 ms drew 0.435 of the limit, a prompt of 512 in 95.7 ms peaked
    at 0.749; on 2 of them 54.8 ms and 0.736 (perf_model.csv)."""
    llm, gpu, power = CATALOG.llm("llama-2-70b"), CATALOG.gpu("a100-80g"), shipped_power()
    assert power.busy_w(llm, gpu, 8, 0.0449, 1, 576) / 400 == pytest.approx(0.435, rel=0.02)
    assert power.busy_w(llm, gpu, 2, 0.0548, 1, 576) / 400 == pytest.approx(0.736, rel=0.02)
    assert power.busy_w(llm, gpu, 8, 0.0957, 512) / 400 == pytest.approx(0.749, rel=0.05)


def test_prefill_draws_more_than_decode_on_every_gpu_with_a_fit() -> None:
    """Insight VI: prefill uses the power budget, decode does not."""
    llm, power = CATALOG.llm("llama-3.1-70b"), shipped_power()
    for name in ("a100-80g", "h100-80g", "h200-141g"):
        gpu = CATALOG.gpu(name)
        latency = CATALOG.step_latency(llm, gpu, 4)
        decode_s = latency.step_s(32, decodes=32, kv_tokens=32 * 1024)
        prefill_s = latency.step_s(2048, pairs=2048 * 2049 / 2, prefills=1)
        decode_w = power.busy_w(llm, gpu, 4, decode_s, 32, 32 * 1024)
        prefill_w = power.busy_w(llm, gpu, 4, prefill_s, 2048)
        assert power.idle_w(gpu) < decode_w < 0.9 * gpu.power_w < prefill_w <= gpu.power_w


# --- caps


@pytest.mark.parametrize("name", ["h100-80g@350W", "h100-80g@450W", "h100-80g@550W"])
def test_the_model_agrees_with_the_catalogs_capped_rows(name: str) -> None:
    """To the four digits of the rows: 1 + 0.3 * (700 - W) / 350 for prefill, 1 for decode."""
    row = CATALOG.gpu(name)
    made = cap_gpu(CATALOG.gpu("h100-80g"), row.power_w)
    assert made.prefill_slowdown == pytest.approx(row.prefill_slowdown, abs=1e-4)
    assert replace(made, prefill_slowdown=row.prefill_slowdown) == row


def test_any_gpu_can_be_capped_and_its_steps_are_slowed() -> None:
    """300 of 400 W: half of the way to 50 %, so prefill x 1.15."""
    gpu = cap_gpu(CATALOG.gpu("a100"), 300)
    assert (gpu.name, gpu.base, gpu.power_w, gpu.board_w) == ("a100-80g@300W", "a100-80g", 300, 400)
    assert [gpu.prefill_slowdown, gpu.decode_slowdown] == pytest.approx([1.15, 1.0])
    llm = CATALOG.llm("llama-3.1-8b")
    slow, fast = CATALOG.step_latency(llm, gpu, 1), CATALOG.step_latency(llm, CATALOG.gpu("a100"), 1)
    assert slow.a_s == pytest.approx(1.15 * fast.a_s) and slow.d_s == fast.d_s
    assert cap_gpu(gpu, 400) == CATALOG.gpu("a100")


def test_a_lower_cap_is_never_faster() -> None:
    slowdowns = np.array([cap_slowdowns(cap) for cap in np.linspace(0.5, 1.0, 51)])
    assert (np.diff(slowdowns, axis=0) <= 0).all() and slowdowns[-1].tolist() == [1.0, 1.0]


def test_a_cap_nobody_measured_is_refused() -> None:
    with pytest.raises(ExtrapolationError, match="known from 50%"):
        cap_slowdowns(0.4)
    with pytest.raises(InputError, match=r"must be in \(0, 1\]"):
        cap_gpu(CATALOG.gpu("a100"), 500)


@pytest.mark.parametrize("change", [{"floor_frac": -0.1}, {"top_frac": 0.1}, {"idle_frac": {"x": -1.0}}])
def test_impossible_shares_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(CatalogError, match="power: no share may be below 0"):
        dataclasses.replace(POWER, **change)  # type: ignore[arg-type]


# --- fleets


def hand_made(runs: Sequence[tuple[float, ...]], window_s: tuple[float, float] = (0.0, 100.0)) -> Simulation:
    table = np.array([(*run, 0) for run in runs], dtype=layout.RUN)
    simulation: Simulation = replace(
        a_plan(mixed(count=2), requests=4).simulation, runs=table, window_s=window_s
    )
    return simulation


def expected(simulation: Simulation, power: Power = POWER) -> ExpectedPower:
    found = expected_power(mixed(count=2), simulation, power)
    assert found is not None
    return found


def test_an_idle_fleet_draws_its_idle_power() -> None:
    """Two workers of 4 H100, a step of nobody's at 200 s, outside the window: 8 * 0.2 * 700 W."""
    found = expected(hand_made([(0, 200.0, 1.0, 0.0, 1, 1, 1, 0, 0)]))
    assert found.mean_w == found.idle_w == pytest.approx(8 * 0.2 * 700)
    assert found.provisioned_w == 8 * 700
    assert found.energy_j == pytest.approx(100 * found.mean_w)


def test_a_worker_that_is_never_idle_draws_no_idle_power() -> None:
    """Ten steps of 0.1 s fill 1 s, but for rounding: sums of tenths end at 0.9999999999999999."""
    runs = [(worker, k / 10, 0.1, 0.0, 1, 1, 1, 0, 0) for worker in (0, 1) for k in range(10)]
    assert expected(hand_made(runs, (0.0, 1.0))).idle_w == 0


def test_runs_count_for_the_seconds_inside_the_window() -> None:
    """Worker 0: a run of 30 s, a third of it before the window. Worker 1: nothing. The gap (prefill_tokens
    NONE) is no engine time. All power at the floor: 0.25 busy, 0.2 idle."""
    flat = replace(POWER, memory_frac=0.0, compute_frac=0.0)
    runs = [(0, 0.0, 3.0, 0.0, 10, 2, 2, 0, 4), (1, 20.0, 50.0, 0.0, 1, 1, 1, -1, 0)]
    found = expected(hand_made(runs, (10.0, 110.0)), flat)
    assert found.worker_w == pytest.approx(np.array([0.2 * 0.25 + 0.8 * 0.2, 0.2]) * 2800)
    assert found.worker_idle_w == pytest.approx(np.array([0.8 * 0.2, 0.2]) * 2800)


def test_a_growing_run_lasts_its_sum_and_reads_its_mean() -> None:
    """3 steps of 1, 2, 3 s, 2 sequences with 5 blocks: 2 s per step, 82 KV tokens each on average."""
    fleet = mixed(count=2)
    found = expected(hand_made([(1, 10.0, 1.0, 1.0, 3, 2, 2, 0, 5)]), POWER)
    gpu = fleet.pools[0].type.gpu
    busy_w = 4 * float(POWER.busy_w(fleet.llm, gpu, 4, 2.0, 2, 82.0))
    assert found.worker_w[1] == pytest.approx(0.06 * busy_w + 0.94 * 0.2 * 2800)


def test_energy_is_shared_among_what_finished_in_the_window() -> None:
    """a_simulation's first three requests finish in time with 1, 2 and 3 tokens; the last was rejected."""
    found = expected(hand_made([(0, 0.0, 1.0, 0.0, 1, 1, 1, 0, 0)]))
    assert (found.requests, found.output_tokens) == (3, 6)
    assert found.request_j == pytest.approx(found.energy_j / 3)
    assert found.thousand_tokens_j == pytest.approx(1000 * found.energy_j / 6)
    nobody = expected(hand_made([(0, 0.0, 1.0, 0.0, 1, 1, 1, 0, 0)], (50.0, 60.0)))
    assert np.isnan(nobody.request_j) and np.isnan(nobody.thousand_tokens_j)


def test_without_recorded_runs_nothing_is_said() -> None:
    assert expected_power(mixed(count=2), hand_made([])) is None


def test_one_request_alone_is_measured_to_its_last_token() -> None:
    fleet = mixed()
    found = expected_power(fleet, simulate(fleet, a_trace(1), record=True))
    assert found is not None and found.requests == 1 and 0 < found.mean_w <= fleet.power_w


@pytest.mark.parametrize("fleet", [pairs(), mixed(), mixed("a100-80g", 2, 3)], ids=["pairs", "mixed", "a100"])
def test_a_simulated_fleet_draws_between_idle_and_provisioned(fleet: Fleet) -> None:
    trace = replace(a_trace(300), arrival_s=np.arange(300) / 20.0)
    simulation = simulate(fleet, trace, record=True)
    found = expected_power(fleet, simulation)
    assert found is not None
    idle_w = sum(p.count * p.type.gpus * shipped_power().idle_w(p.type.gpu) for p in fleet.pools)
    assert idle_w < found.mean_w < found.provisioned_w
    assert 0 <= found.idle_w < found.mean_w
    assert found.requests <= 300 and found.request_j > 0


def test_windows_are_read_once() -> None:
    """52 of gemma-3-27b's 62 layers have windows, in blocks of their own: 160 sequences of 800 tokens read
    800 tokens of all layers each, not 7 times as many. Groups of 10 layers fill the windows' 52 up to 60.
    """
    llm = CATALOG.llm("gemma-3-27b-it")
    worker = replace(mixed("h100-80g", 2).pools[0].type, tp=2).with_llm(llm)
    runs = np.zeros(1, layout.RUN)
    runs["decodes"], runs["steps"] = 160, 1
    runs["blocks"] = 160 * (50 + worker.extra_kv.sequence_blocks(800))
    (kv_tokens,) = run_load(llm, worker, runs, np.ones(1))[2]
    assert 160 * 800 <= kv_tokens < 1.15 * 160 * 800


@pytest.mark.parametrize(("dp", "tp", "copies"), [(1, 8, 8), (8, 1, 1), (2, 4, 4)])
def test_latent_kv_is_read_once_per_gpu_of_its_rank(dp: int, tp: int, copies: int) -> None:
    """100 decodes on each rank of 8 H200: TP copies the latent vectors, ranks do not."""
    llm, gpu = CATALOG.llm("deepseek-ai/DeepSeek-V3"), CATALOG.gpu("h200-141g")
    runs = np.zeros(1, layout.RUN)
    runs["decodes"], runs["steps"], runs["blocks"] = 100, 1, 6400
    kernels = mixed().pools[0].type.latency
    latency = replace(kernels, joint_s=(0.0,) * len(kernels.f_s))
    worker = replace(mixed().pools[0].type, gpu=gpu, tp=tp, latency=latency)
    worker = replace(worker, dp=dp)
    step_s, tokens, kv_tokens = run_load(llm, worker, runs, np.ones(1))
    kv, none = (
        step_utilisations(llm, gpu, worker.gpus, step_s, tokens, read, tp=tp)[1] for read in (kv_tokens, 0.0)
    )
    read_bytes = copies * dp * 6400 * 16 * llm.kv_bytes_per_token
    assert kv - none == pytest.approx(read_bytes / 8 / gpu.bandwidth_bytes_per_s)


def test_prices_and_names_do_not_change_the_power() -> None:
    fleet = mixed()
    trace = a_trace(50)
    dear = replace(fleet.pools[0].type.gpu, price_usd_per_h=99.0)
    other = replace(
        fleet, pools=(replace(fleet.pools[0], name="x", type=replace(fleet.pools[0].type, gpu=dear)),)
    )
    a, b = (expected_power(f, simulate(f, trace, record=True)) for f in (fleet, other))
    assert a is not None and b is not None and a.mean_w == b.mean_w


@pytest.mark.shared
@pytest.mark.skipif(not ML_ENERGY.exists(), reason="needs ../shared")
@pytest.mark.parametrize(("gpu", "unseen_frac"), [("h100-80g", 0.105), ("b200-180g", 0.089)])
def test_the_shipped_figures_are_the_fits_of_ml_energys_watts(gpu: str, unseen_frac: float) -> None:
    """And their error with campaigns (LLM, task) left out whole, as catalogs/power.yaml states it."""
    rows = ml_energy_rows(ML_ENERGY, CATALOG)
    runs = rows[rows.gpu == gpu]
    floor, compute, memory, top = fit_runs(runs).coef_
    of_gpu = (floor, memory, compute, top, MEASURED_EXPONENT)
    assert shipped_power().measured[gpu] == pytest.approx(of_gpu, abs=1e-4)
    error = np.abs(held_out_campaigns(runs) / runs.frac.to_numpy() - 1)
    assert error.mean() == pytest.approx(unseen_frac, abs=5e-4)


def test_a_gpu_with_numbers_of_its_own_draws_by_these() -> None:
    """Floor 0.5 and nothing else of 200 W; the cap holds; another GPU keeps the formula. The root of the
    compute utilisation counts where a GPU says so: 0.1 + 0.5 * 0.25 ^ 0.5.
    """
    power = replace(POWER, measured={"paper": (0.5, 0.0, 0.0, 1.0, 1.0)})
    rooted = replace(POWER, measured={"paper": (0.1, 0.0, 0.5, 1.0, 0.5)}).of_gpu(GPU)
    assert rooted.draw_frac(0.25, 0.7) == pytest.approx(0.35)
    assert power.busy_w(LLM, GPU, 1, 10.0, 2, 5) == 100.0
    assert power.busy_w(LLM, replace(GPU, power_w=60.0, uncapped_w=200.0), 1, 10.0, 2, 5) == 60.0
    assert power.busy_w(LLM, replace(GPU, base="x"), 1, 10.0, 2, 5) == pytest.approx(102.32)
