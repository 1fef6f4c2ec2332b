"""Prices from OpenCost's nodes, by hand arithmetic: what a node cost over its GPU hours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli import app
from planner.documents.catalog import read_catalog
from planner.errors import InputError
from planner.importers.opencost_assets import read_asset_prices


def node(cost: Any, hours: Any, kind: str = "", *, spot: float = 0, label: str = "", **more: Any) -> Any:
    labels = {"nvidia_com_gpu_product": label, "topology_kubernetes_io_region": "eu-west-1"}
    return {
        "type": "Node",
        "nodeType": kind,
        "GPUHours": hours,
        "totalCost": cost,
        "preemptible": spot,
        "labels": labels,
        "properties": {"provider": "AWS"},
        **more,
    }


def write(folder: Path, data: Any) -> Path:
    path = folder / "assets.json"
    path.write_text(json.dumps({"code": 200, "data": data}))
    return path


def read(path: Path, **more: Any) -> dict[tuple[str, str], float]:
    found = read_asset_prices(
        path, read_catalog(), provider=more.pop("provider", None), date="2026-11", **more
    )
    return {(gpu, offer.term): offer.usd_per_h for gpu, each in found.offers.items() for offer in each}


def test_a_gpu_costs_its_nodes_over_their_gpu_hours(tmp_path: Path) -> None:
    """8 H100 for a day by label, a day by instance type; L40S on spot; a disk and a node without GPUs."""
    data = {
        "a": node(400.0, 192, label="NVIDIA-H100-80GB-HBM3"),
        "b": node(368.0, 192, "p5.48xlarge"),
        "c": node(12.0, 40, "g6e.12xlarge", spot=1),
        "d": node(3.0, 0, "m5.large"),
        "e": {"type": "Disk", "totalCost": 9},
    }
    expected = {("h100-80g", "on-demand"): 2.0, ("l40s-48g", "spot"): 0.3}
    assert read(write(tmp_path, data)) == pytest.approx(expected)
    assert read(write(tmp_path, [data, data])) == pytest.approx(expected)
    assert read(write(tmp_path, data), region="eu-west-1") == pytest.approx(expected)


def test_an_answer_on_one_line_may_be_long(tmp_path: Path) -> None:
    """OpenCost writes no line breaks: 5 MB were refused with "expected one request per line"."""
    data = {"a": node(400.0, 192, label="NVIDIA-H100-80GB-HBM3", note="x" * 5_000_000)}
    assert read(write(tmp_path, data))[("h100-80g", "on-demand")] == pytest.approx(400 / 192)


def test_what_is_no_price_is_named(tmp_path: Path) -> None:
    data = {"a": node(8.0, 4, "p5.48xlarge"), "b": node(1.0, 1, "own-machine")}
    found = read_asset_prices(write(tmp_path, data), read_catalog(), provider=None, date="2026-11")
    assert found.left_out == ("1 node: has GPUs that no label and no type of instance names (own-machine)",)
    other = {
        "a": node(8.0, 4, "p5.48xlarge"),
        "b": node(1.0, 1, "p5.48xlarge", properties={"provider": "GCP"}),
    }
    with pytest.raises(InputError, match="nodes of aws, gcp: name all of them with --provider"):
        read(write(tmp_path, other))
    assert read(write(tmp_path, other), provider="ours") == {("h100-80g", "on-demand"): pytest.approx(1.8)}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "expected assets by name"),
        ([3], "expected assets by name"),
        ({"a": node("dear", 4, "p5.48xlarge")}, "data: a: totalCost: expected a number, found 'dear'"),
        ({"a": node(1.0, True, "p5.48xlarge")}, "GPUHours: expected a number"),
        ({}, "holds no paid hours of a known GPU's instances"),
        ({"a": node(1.0, 4, "p5.48xlarge")} | {"region": 1}, ""),
    ],
)
def test_bad_answers_are_refused_in_one_line(data: Any, why: str, tmp_path: Path) -> None:
    path = write(tmp_path, data)
    if not why:
        assert read(path)
        return
    with pytest.raises(InputError) as error:
        read(path)
    assert why in str(error.value) and "\n" not in str(error.value)


def test_the_command_writes_them_as_prices(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": node(16.0, 8, "p5.48xlarge")})
    done = CliRunner().invoke(app, ["catalog", "prices", str(path), "-o", str(tmp_path / "own")])
    assert done.exit_code == 0 and "h100-80g: 2 usd/h" in done.output
    assert "provider: aws" in (tmp_path / "own" / "prices.yaml").read_text()
