"""SkyPilot's catalog of a cloud: whose GPU a name is, and what one of them costs. The files are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from plans import CATALOG
from typer.testing import CliRunner

from planner.cli import app
from planner.documents.catalog import read_catalog
from planner.documents.task import parse_task
from planner.errors import InputError
from planner.importers.skypilot import GPU_NAMES, PCIE_NAMES, read_prices
from planner.manifests.skyserve import ACCELERATORS

HEAD = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice\n"
ROWS = """cpu_4x,,,4.0,16.0,0.2,here,,
one_h100,H100,1.0,26,225,4.00,here,"{'Gpus': [{'Name': 'H100'}]}",
eight_h100,H100,8.0,208,1800,31.92,here,"{'Gpus': [{'Name': 'H100'}]}",12.00
eight_h100,H100,8.0,208,1800,28.00,there,"{'Gpus': [{'Name': 'H100'}]}",16.00
pcie,H100,2.0,52,450,5.00,here,"{'Gpus': [{'Name': 'H100 PCIe'}]}",
old,A100,8,96,800,10.32,here,,
eighty,A100-80GB,8,96,800,15.12,here,,
small,T4,1,4,16,0.50,here,,
small,T4,4,16,64,2.00,there,,
none,L40S,4,16,64,,here,,
"""


def written(folder: Path, text: str = HEAD + ROWS) -> Path:
    cloud = folder / "somecloud"
    cloud.mkdir(exist_ok=True)
    (cloud / "vms.csv").write_text(text)
    return cloud / "vms.csv"


def test_one_gpu_of_the_largest_instance_in_its_cheapest_region(tmp_path: Path) -> None:
    """8 H100 for 31.92 here, 28.00 there: 3.50 each; spot 12.00 and 16.00: 1.50. SkyPilot's A100: 40 GB."""
    found = read_prices(written(tmp_path), CATALOG, provider="somecloud", date="2026-11")
    asked = {
        (gpu, offer.term): (offer.usd_per_h, offer.source)
        for gpu, each in found.offers.items()
        for offer in each
    }
    assert {key: price for key, (price, _) in asked.items()} == pytest.approx(
        {
            ("h100-80g", "on-demand"): 3.5,
            ("h100-80g", "spot"): 1.5,
            ("h100-pcie-80g", "on-demand"): 2.5,
            ("a100-40g", "on-demand"): 1.29,
            ("a100-80g", "on-demand"): 1.89,
        }
    )
    assert asked["h100-80g", "on-demand"][1].endswith("eight_h100, 8 GPUs, there")
    assert found.unknown_gpus == ("T4: no row of catalogs/gpus.yaml is known to be this GPU (2 rows)",)
    assert found.without_price == 1  # L40S


def test_a_region_alone(tmp_path: Path) -> None:
    found = read_prices(written(tmp_path), CATALOG, provider="x", date="2026", region="here")
    assert found.offers["h100-80g"][0].usd_per_h == pytest.approx(31.92 / 8)
    with pytest.raises(InputError, match=r"holds no price of a GPU of catalogs/gpus\.yaml in region nowhere"):
        read_prices(written(tmp_path), CATALOG, provider="x", date="2026", region="nowhere")


def test_every_name_leads_to_a_row() -> None:
    assert {*GPU_NAMES.values(), *filter(None, PCIE_NAMES.values())} <= set(CATALOG.gpus)


def test_manifests_ask_for_the_gpus_whose_prices_are_read() -> None:
    for label, name in ACCELERATORS.items():
        gpu = GPU_NAMES[name.lower().replace("-", "")]
        assert CATALOG.gpus[gpu].node_selector == label, name


def test_a_card_on_pcie_that_is_no_row_is_named(tmp_path: Path) -> None:
    """RunPod's A100-80GB is the PCIe card, of which gpus.yaml has none: it is not the SXM one."""
    row = "a,A100-80GB,1,8,117,1.39,here,\"{'Gpus': [{'Name': 'A100 PCIe'}]}\",\nb,L4,1,8,50,0.44,here,,\n"
    found = read_prices(written(tmp_path, HEAD + row), CATALOG, provider="x", date="2026")
    assert set(found.offers) == {"l4-24g"}
    assert found.unknown_gpus == (
        "A100-80GB (PCIe): no row of catalogs/gpus.yaml is known to be this GPU (1 row)",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a,b\n1,2\n",
            r"no column InstanceType, AcceleratorName, .*; expected SkyPilot's catalog.*: fleet: {prices: ",
        ),
        (HEAD + "a,H100,8,1,1,cheap,here,,\n", r"line 2: Price: expected a number >= 0, found 'cheap'"),
        (HEAD + "a,H100,0,1,1,3,here,,\n", r"line 2: AcceleratorCount: expected 1 or more, found 0"),
        (HEAD + "a,H100,8,1,1,-3,here,,\n", r"line 2: Price: expected a number >= 0, found '-3'"),
        (HEAD, "holds no price of a GPU"),
        ("", "no column InstanceType"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_prices(written(tmp_path, text), CATALOG, provider="x", date="2026")
    assert "\n" not in str(caught.value)


def test_the_command_writes_a_catalog_whose_prices_a_question_takes(tmp_path: Path) -> None:
    """`plan catalog prices` -> prices.yaml -> `fleet: {price_of: {provider: somecloud}}`: 3.50 USD/h."""
    out = tmp_path / "own"
    result = CliRunner().invoke(app, ["catalog", "prices", str(written(tmp_path)), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert (
        "fleet: {price_of: {provider: somecloud}}" in result.stdout and "h100-80g: 3.5 usd/h" in result.stdout
    )
    mine = read_catalog(out)
    document = {
        "llm": "llama-3.1-8b",
        "slo": {"ttft": {"p90": "2 s"}},
        "fleet": {"gpus": ["h100"], "price_of": {"provider": "somecloud"}},
    }
    (gpu,) = parse_task(document, mine).priced_gpus(mine)
    assert gpu.price_usd_per_h == pytest.approx(3.5)
    shipped = {(o.provider, o.term) for o in CATALOG.provenance["h100-80g"].offers}
    assert shipped < {(o.provider, o.term) for o in mine.provenance["h100-80g"].offers}
    answer = CliRunner().invoke(app, ["catalog", "prices", str(written(tmp_path)), "--json"])
    assert yaml.safe_load((out / "prices.yaml").read_text()) == json.loads(answer.stdout)["prices"]


def test_the_prices_of_other_providers_stay(tmp_path: Path) -> None:
    """The list of a second provider was written over that of the first."""
    out, file = tmp_path / "own", str(written(tmp_path))
    for provider in ("first", "second", "second"):
        arguments = ["catalog", "prices", file, "--provider", provider, "-o", str(out)]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    own = yaml.safe_load((out / "prices.yaml").read_text())
    terms = {
        provider: [row["term"] for row in own["h100-80g"] if row["provider"] == provider]
        for provider in ("first", "second")
    }
    assert terms["first"] == terms["second"] and len(terms["first"]) == len(set(terms["first"]))
    assert {row["provider"] for row in own["h100-80g"]} == {"first", "second"}


def test_parts_of_a_gpu_are_left_out(tmp_path: Path) -> None:
    """Azure's list has sixths of an A10; the whole file was refused for them."""
    path = tmp_path / "azure.csv"
    path.write_text(HEAD + "a,A10,0.167,6,55,0.45,here,,\nb,H100,1,40,320,7,here,,\n")
    found = read_prices(path, CATALOG, provider="azure", date="2026-11-29")
    assert list(found.offers) == ["h100-80g"]
    assert any("A10: a part of a GPU" in line for line in found.unknown_gpus)
