"""catalogs/spreads.yaml, and the spread that step times carry through fleets and plans."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.fleet_file import fleet_document, fleet_of
from planner.documents.task import parse_task
from planner.errors import CatalogError, InputError
from planner.models.latency import StepLatency
from planner.models.spread import Factor, StepTimeSpread
from planner.search.problem.options import Engines, worker_types

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
    """Floor, sequences and KV by the factor of decodes; what grows with tokens by that of prefills."""
    spread = StepTimeSpread(Factor(2.0, 0.0), Factor(3.0, 0.0), "made up")
    assert STEP.at_spread(1.0, 1.0) == STEP
    moved = replace(STEP, spread=spread).at_spread(0.0, 0.0)
    assert moved.f_s == (6.0, 12.0)
    assert (moved.a_s, moved.b_s, moved.d_s, moved.e_s, moved.m_s) == pytest.approx((0.2, 0.6, 0.9, 0.8, 1.5))


def test_step_times_of_the_catalog_have_the_spread_of_their_kind(catalog: Catalog) -> None:
    llm, fp8 = (
        catalog.llm("llama-3.1-70b"),
        replace(catalog.llm("llama-3.1-70b"), weights="fp8", dtype_bytes=1.0),
    )
    gpu = catalog.gpu("h100-80g")
    kernels = catalog.step_latency(llm, gpu, 4)
    assert kernels.kind == "kernels" and kernels.spread == catalog.spreads["kernels, 16 bit"].spread
    guessed = catalog.step_latency(fp8, catalog.gpu("mi300x"), 4)
    assert guessed.kind == "roofline" and guessed.spread == catalog.spreads["roofline, fp8"].spread
    assert catalog.with_spread(STEP, llm).spread is None  # nobody knows of figures that somebody wrote down


def test_a_calibration_leaves_its_standard_error(catalog: Catalog) -> None:
    latency = catalog.with_spread(
        replace(STEP, uncertainty_frac=0.05, kind="kernels"), catalog.llm("llama-3.1-8b")
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
    types, _ = worker_types(llm, [gpu], catalog, 1000, Engines.of(task))
    latency = catalog.step_latency(llm, gpu, 1)
    assert latency.spread is not None
    assert types[0].latency.d_s == pytest.approx(latency.d_s * latency.spread.decode.high)
    assert types[0].latency.a_s == pytest.approx(latency.a_s * latency.spread.prefill.high)


def test_of_step_times_without_a_spread_no_upper_end_is_known(catalog: Catalog) -> None:
    asked = {"llm": "bigscience/bloom", "slo": {"ttft": {"p90": "2 s"}}, "robust": {"spread": True}}
    gpu = catalog.gpu("h100-80g")
    with pytest.raises(InputError, match="robust: spread: nobody knows how far step times of h100-80g tp8"):
        worker_types(
            catalog.llm("bigscience/bloom"), [gpu], catalog, 1000, Engines.of(parse_task(asked, catalog))
        )


@pytest.mark.parametrize(
    ("row", "median", "p90"),
    [
        ("kernels, fp8", 1.35, 1.81),  # MiniMax-M2.5 on B200
        ("kernels, fp8", 1.52, 2.13),  # ... on H200
        ("kernels, 4 bit", 1.65, 2.12),  # ... in nvfp4 on B200
        ("kernels, 4 bit", 1.50, 2.44),  # Kimi-K2.5 in nvfp4 on B200
        ("kernels, 4 bit", 1.42, 1.79),  # gpt-oss-120b on H100
        ("kernels, 4 bit", 1.43, 1.87),  # ... on H200
    ],
)
def test_prefills_of_mixtures_as_measured_lie_inside_the_spread(
    catalog: Catalog, row: str, median: float, p90: float
) -> None:
    """TTFT measured over predicted, of silicon-sample's furthest campaigns (docs/evidence/accuracy.md).

    Even if prefills made up the whole of TTFT, nine in ten of each campaign are below the upper end.
    """
    prefill = catalog.spreads[row].spread.prefill
    assert prefill.low < median < p90 < prefill.high
