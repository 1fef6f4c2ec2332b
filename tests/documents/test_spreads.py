"""catalogs/spreads.yaml, and the spread that step times carry through fleets and plans."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.spreads import Figure, rows_of
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.fleet_file import fleet_document, fleet_of
from planner.documents.task import parse_task
from planner.errors import CatalogError, InputError
from planner.models.latency import StepLatency
from planner.models.spread import Factor, StepTimeSpread
from planner.search.problem.options import EngineChoices, worker_types

FACTORS = "prefill: {median: 1.1, log_sd: 0.2}, decode: {median: 1, log_sd: 0.1}"
ROW = "{kind: kernels, " + FACTORS + ", source: s, date: d}"
STEP = StepLatency((1.0, 100.0), (2.0, 5.0), 0.1, 0.2, 0.3, 0.4, 0.0, "by hand", m_s=0.5)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return read_catalog()


def own(folder: Path, text: str) -> Catalog:
    (folder / "spreads.yaml").write_text(text)
    return read_catalog(folder)


def test_nine_in_ten_lie_between_low_and_high() -> None:
    """1.645 standard deviations of the log to either side of the median."""
    factor = Factor(1.1, 0.2)
    assert factor.low == pytest.approx(1.1 * math.exp(-1.6449 * 0.2), rel=1e-4)
    assert factor.high == pytest.approx(1.1 * math.exp(1.6449 * 0.2), rel=1e-4)


def test_prefills_and_decodes_move_on_their_own() -> None:
    """Steps of up to 512 tokens, sequences and KV by the factor of decodes; what more tokens add by that of
    prefills: f is 2 s at 1 token, 6 s at 512 and 10 s at 1024.
    """
    spread = StepTimeSpread(Factor(2.0, 0.0), Factor(3.0, 0.0), "made up")
    assert STEP.at_spread(1.0, 1.0) == STEP
    step = replace(STEP, knots_tokens=(1.0, 512.0, 1024.0), f_s=(2.0, 6.0, 10.0), spread=spread)
    moved = step.at_spread(0.0, 0.0)
    assert moved.f_s == (6.0, 18.0, 26.0)
    assert (moved.a_s, moved.b_s, moved.d_s, moved.e_s, moved.m_s) == pytest.approx((0.2, 0.6, 0.9, 0.8, 1.5))


@pytest.mark.parametrize("knots", [(1.0, 100.0), (1.0, 512.0), (1.0, 2000.0)])
def test_where_knots_lie_does_not_change_what_moves(knots: tuple[float, float]) -> None:
    """f is 1 s and 10 ms per token: 200 tokens are 3 s, of which all is decodes'; 1512 tokens are 6.12 s of
    decodes and 10 s of prefills.
    """
    f_s = tuple(1 + tokens / 100 for tokens in knots)
    spread = StepTimeSpread(Factor(2.0, 0.0), Factor(3.0, 0.0), "made up")
    moved = replace(STEP, knots_tokens=knots, f_s=f_s, spread=spread).at_spread(0.0, 0.0)
    assert moved.step_s(200) == pytest.approx(3 * 3)
    assert moved.step_s(1512) == pytest.approx(3 * 6.12 + 2 * 10)


def test_experts_of_decode_steps_move_with_decodes() -> None:
    """Of ranks that share experts: g is 1 s up to 512 tokens, and 2 s more at 1024."""
    spread = StepTimeSpread(Factor(2.0, 0.0), Factor(3.0, 0.0), "made up")
    step = replace(
        STEP, knots_tokens=(1.0, 512.0, 1024.0), f_s=(2.0, 6.0, 10.0), joint_s=(1.0, 1.0, 3.0), spread=spread
    )
    assert step.at_spread(0.0, 0.0).joint_s == (3.0, 3.0, 7.0)


def test_step_times_of_the_catalog_have_the_spread_of_their_kind(catalog: Catalog) -> None:
    llm, fp8 = (
        catalog.llm("llama-3.1-70b"),
        replace(catalog.llm("llama-3.1-70b"), weights="fp8", dtype_bytes=1.0),
    )
    gpu = catalog.gpu("h100-80g")
    kernels = catalog.step_latency(llm, gpu, 4)
    assert kernels.kind == "kernels" and kernels.spread == catalog.spreads["kernels, 16 bit, dense"].spread
    guessed = catalog.step_latency(fp8, catalog.gpu("mi300x"), 4)
    assert guessed.kind == "roofline" and guessed.spread == catalog.spreads["roofline, fp8, dense"].spread
    assert (
        catalog.with_spread(STEP, llm, gpu).spread is None
    )  # nobody knows of figures that somebody wrote down


def test_a_calibration_leaves_its_standard_error(catalog: Catalog) -> None:
    latency = catalog.with_spread(
        replace(STEP, uncertainty_frac=0.05, kind="kernels"),
        catalog.llm("llama-3.1-8b"),
        catalog.gpu("h100-80g"),
    )
    assert latency.spread is not None and latency.spread.is_own
    assert latency.spread.decode == Factor(1.0, 0.05)


def test_a_plan_carries_its_spread_to_the_last_bit(catalog: Catalog, tmp_path: Path) -> None:
    """Whatever the catalog says later."""
    document = {"llm": "meta-llama/Llama-3.1-8B", "workers": [{"gpu": "h100-80g"}]}
    fleet = fleet_of(document, Path("fleet.yaml"), catalog)
    assert fleet.pools[0].type.latency.spread is not None
    later = own(tmp_path, f"mine: {ROW}")
    assert fleet_of(fleet_document(fleet), Path("fleet.yaml"), later) == fleet
    assert fleet_of(document, Path("fleet.yaml"), later) != fleet


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (ROW.replace("kernels", "guesses"), "mine: kind: .*found 'guesses'"),
        (ROW.replace("log_sd: 0.2", "log_sd: -1"), "mine: prefill: log_sd is -1, must be 0 to 2.3"),
        (ROW.replace("median: 1.1", "median: 0"), "mine: prefill: median is 0, must be 0.1 to 10"),
        (ROW.replace("decode: {median: 1, log_sd: 0.1}, ", ""), "mine: decode"),
        (ROW.replace("source", "weights: [fp4], source"), "mine: weights: .*found 'fp4'"),
        (ROW.replace("source", "wide: 1, source"), "mine: .*wide"),
        (ROW.replace("source", "gpus: h100-80g, source"), "mine: gpus: expected a list of GPUs"),
        (ROW.replace("source", "engines: sglang, source"), "mine: engines: expected a list of engines"),
    ],
)
def test_a_row_of_ones_own_is_checked(tmp_path: Path, written: str, said: str) -> None:
    with pytest.raises(CatalogError, match=said) as caught:
        own(tmp_path, f"mine: {written}")
    assert "\n" not in str(caught.value)


def test_a_plan_may_be_asked_to_hold_at_the_upper_end(catalog: Catalog) -> None:
    asked = {"llm": "meta-llama/Llama-3.1-8B", "slo": {"ttft": {"p90": "2 s"}}, "robust": {"spread": True}}
    task = parse_task(asked, catalog)
    llm, gpu = catalog.llm("llama-3.1-8b"), catalog.gpu("h100-80g")
    types, _ = worker_types(llm, [gpu], catalog, 1000, EngineChoices.of(task))
    latency = catalog.step_latency(llm, gpu, 1)
    assert latency.spread is not None
    assert types[0].latency.d_s == pytest.approx(latency.d_s * latency.spread.decode.high)
    assert types[0].latency.a_s == pytest.approx(latency.a_s * latency.spread.prefill.high)


def test_of_step_times_without_a_spread_no_upper_end_is_known(catalog: Catalog) -> None:
    asked = {"llm": "bigscience/bloom", "slo": {"ttft": {"p90": "2 s"}}, "robust": {"spread": True}}
    gpu = catalog.gpu("h100-80g")
    with pytest.raises(InputError, match="robust: spread: nobody knows how far step times of h100-80g tp8"):
        worker_types(
            catalog.llm("bigscience/bloom"),
            [gpu],
            catalog,
            1000,
            EngineChoices.of(parse_task(asked, catalog)),
        )


def test_step_times_of_blackwell_are_the_median_of_what_was_measured(catalog: Catalog) -> None:
    """Prefills there took longer than the sums of kernels; decodes did not. What is left of the spread lies
    around them, and the basis says so.
    """
    llm = catalog.llm("llama-3.1-70b")
    row = catalog.spreads["kernels, 16 bit, Blackwell"]
    assert row.spread.prefill.median > 1.2 and row.spread.decode.median == 1.0
    bare = replace(catalog, spreads={}, _fit_paths={}, _fits={})
    for gpu in map(catalog.gpu, ("b200-180g", "b300-288g")):
        latency, sums = catalog.step_latency(llm, gpu, 4), bare.step_latency(llm, gpu, 4)
        assert latency.kind == "kernels" and "the median of runs that others measured" in latency.basis
        assert latency.a_s == pytest.approx(row.spread.prefill.median * sums.a_s)
        assert latency.step_s(64, 0, 64, 6400) == pytest.approx(sums.step_s(64, 0, 64, 6400))
        assert latency.spread is not None and latency.spread.prefill == Factor(1.0, row.spread.prefill.log_sd)
    h100 = catalog.gpu("h100-80g")
    assert replace(catalog.step_latency(llm, h100, 4), spread=None) == bare.step_latency(llm, h100, 4)


def test_step_times_that_a_user_gives_are_not_moved(catalog: Catalog) -> None:
    given = replace(STEP, kind="kernels")
    kept = catalog.with_spread(given, catalog.llm("llama-3.1-70b"), catalog.gpu("b200-180g"))
    assert replace(kept, spread=None) == given
    assert kept.spread == catalog.spreads["kernels, 16 bit, Blackwell"].spread


def test_sglang_has_rows_of_its_own(catalog: Catalog) -> None:
    """Its launches and versions make TTFT on Blackwell far less certain than vLLM's."""
    for gpu, name in (("b200-180g", "kernels, SGLang, Blackwell"), ("h200-141g", "kernels, SGLang")):
        row = catalog.spreads[name].spread
        for engine in ("sglang", "vllm"):
            document = {
                "llm": "deepseek-ai/DeepSeek-V3",
                "engine": engine,
                "workers": [{"gpu": gpu, "tp": 8}],
            }
            spread = fleet_of(document, Path("fleet.yaml"), catalog).pools[0].type.latency.spread
            assert spread is not None
            assert (spread.prefill.log_sd == row.prefill.log_sd) == (engine == "sglang")
    assert catalog.spreads["kernels, SGLang, Blackwell"].spread.prefill.high > 4.5


def test_a_row_of_one_gpu_counts_there_alone(tmp_path: Path) -> None:
    rows = f"mine: {ROW.replace('source', 'gpus: [h200-141g], source')}\nrest: {ROW.replace('1.1', '1')}\n"
    catalog = own(tmp_path, rows)
    llm = catalog.llm("llama-3.1-8b")
    given = replace(STEP, kind="kernels")
    medians = {
        gpu: spread.prefill.median
        for gpu in ("h200-141g", "h100-80g")
        if (spread := catalog.with_spread(given, llm, catalog.gpu(gpu)).spread) is not None
    }
    assert medians == {"h200-141g": 1.1, "h100-80g": 1.0}


@pytest.mark.parametrize(
    ("row", "factor"),
    [
        # of measured over predicted prefills 19 of 20 lie below: benchmarks/spreads.py
        ("kernels, fp8, Blackwell", 2.61),  # MiniMax-M2.5 and Llama-3.1-70B
        ("kernels, 4 bit, Blackwell", 2.22),  # Kimi-K2.5 and MiniMax-M2.5
        ("kernels, fp8, mixtures", 1.60),  # MiniMax-M2.5 and Qwen3-235B
        ("kernels, 4 bit, mixtures", 2.15),  # gpt-oss-120b and Kimi-K2.5 on H200
        ("kernels, 16 bit, dense", 1.48),  # Qwen3-32B and Llama-3.1-70B on Hopper
    ],
)
def test_prefills_as_measured_lie_inside_the_spread(catalog: Catalog, row: str, factor: float) -> None:
    prefill = catalog.spreads[row].spread.prefill
    assert prefill.low < factor < prefill.high


def test_rooflines_have_no_narrower_spread_than_kernels(catalog: Catalog) -> None:
    for name, row in catalog.spreads.items():
        if row.kind == "roofline":
            of_kernels = catalog.spreads[name.replace("roofline", "kernels")].spread
            assert row.spread.prefill.log_sd >= of_kernels.prefill.log_sd
            assert row.spread.decode.log_sd >= of_kernels.decode.log_sd


def test_medians_are_of_the_same_step_times() -> None:
    """What a roofline lacks on Blackwell says nothing of sums of kernels, and a roofline keeps its own
    median where kernels are as wide. Four campaigns each, around 1.2 and 1.6.
    """
    figures = [
        Figure(
            *("silicon-sample", "b200-180g", f"llm {campaign}", metric, kind, "4 bit", True, False),
            math.log(median) * (metric == "ttft") + away,
            *((1.0, 0.0) if metric == "ttft" else (0.0, 1.0)),
        )
        for kind, median in (("kernels", 1.2), ("roofline", 1.6))
        for campaign in range(4)
        for metric in ("ttft", "tpot")
        for away in (-0.1, 0.0, 0.1)
    ]
    rows = rows_of(figures)
    for kind, median in (("kernels", 1.2), ("roofline", 1.6)):
        prefill = rows[f"{kind}, 4 bit, Blackwell"]["prefill"]
        assert prefill == {"median": median, "log_sd": pytest.approx(0.15, abs=0.1)}
