"""Shares of peaks that fit kernel times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.errors import InputError
from planner.models.roofline import roofline
from planner.models.roofline_calibration import calibration_of
from profiling import rooflines, shipped
from profiling.rooflines import KernelTable, fit_kv_fracs

CATALOG = read_catalog()


def kernels(gpu_name: str, frac: float) -> KernelTable:
    """Decodes that read KV at `frac` of the bandwidth, and a prompt that takes three times its roofline."""
    llm, gpu = CATALOG.llm("llama-3.1-8b"), CATALOG.gpu(gpu_name)
    efficiency = replace(calibration_of(llm, gpu).efficiency, kv_bandwidth_frac=frac)
    steps = np.array([[8, 0, 8, 8e4, 0], [64, 0, 64, 2e5, 0], [256, 32896, 0, 0, 1]])
    seconds = roofline(llm, gpu, 1, efficiency=efficiency).step_s(*steps.T) * [1, 1, 3]
    return KernelTable(llm, gpu, 1, steps, seconds)


def test_the_share_at_which_decodes_read_kv_is_recovered_by_chip() -> None:
    """H200 has H100's chip, and both read at 0.95; prompts play no part."""
    tables = [kernels("h100-80g", 0.95), kernels("h200-141g", 0.95), kernels("a100-80g", 0.65)]
    assert fit_kv_fracs(tables) == pytest.approx({"h100-80g": 0.95, "a100-80g": 0.65}, rel=1e-3)


def test_without_aiconfigurator_the_tool_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """IndexError: list index out of range."""

    def lacking(*_: object) -> None:
        raise InputError("no kernels")

    monkeypatch.setattr(rooflines, "silicon_table", lacking)
    monkeypatch.setattr("sys.argv", ["rooflines", "--rows", "nvfp4"])
    assert rooflines.main() == 1
    assert "rooflines: no kernel times of weights in nvfp4; " in capsys.readouterr().err


def test_without_an_option_nothing_could_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with exit code 0 and without a word."""
    monkeypatch.setattr("sys.argv", ["shipped"])
    with pytest.raises(SystemExit, match="2"):
        shipped.main()
