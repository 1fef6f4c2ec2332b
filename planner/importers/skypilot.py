"""Reads GPU prices from SkyPilot's catalog of a cloud.

The catalogs are files of github.com/skypilot-org/skypilot-catalog, catalogs/vN/CLOUD/vms.csv:

    InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice
    gpu_8x_h100_sxm5,H100,8.0,208.0,1800.0,31.92,us-east-1,"{'Gpus': [{'Name': 'H100', ...",

A row's price is that of the whole instance. The price of a GPU is taken from the instances with the most
GPUs, because workers of any TP degree fit on them, and of these from the cheapest region. SkyPilot's names
differ from those of catalogs/gpus.yaml: its A100 has 40 GB, and one name may stand for an SXM and a PCIe
card, which GpuInfo tells apart.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.documents.catalog import Catalog
from planner.documents.offers import ProviderOffer, Term
from planner.errors import InputError
from planner.files.text_tables import read_text_rows
from planner.units import count_text

EXPECTED_FILE = (
    "SkyPilot's catalog of a cloud, such as catalogs/v8/lambda/vms.csv, a bill in FOCUS, or OpenCost's "
    "/assets.json; a price of your own goes into slo.yaml: fleet: {prices: {h100-80g: 2.10 usd/h}}"
)
COLUMNS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region")
# The names of GPUs in catalogs/gpus.yaml by SkyPilot's names, in lower case without dashes.
# manifests/skyserve.py writes some of SkyPilot's.
GPU_NAMES = {
    "a100": "a100-40g",
    "a10080gb": "a100-80g",
    "a10080gbsxm": "a100-80g",
    "h100": "h100-80g",
    "h100sxm": "h100-80g",
    "h100nvl": "h100-nvl-94g",
    "h100pcie": "h100-pcie-80g",
    "h200": "h200-141g",
    "h200sxm": "h200-141g",
    "b200": "b200-180g",
    "b200sxm": "b200-180g",
    "b300": "b300-288g",
    "gb200": "gb200-186g",
    "gb300": "gb300-279g",
    "l40s": "l40s-48g",
    "rtxpro6000": "rtx-pro-6000",
    "rtxpro6000server": "rtx-pro-6000",
    "l4": "l4-24g",
    "a10": "a10-24g",
    "a10g": "a10g-24g",
    "v10032gb": "v100-32g",
    "a6000": "a6000-48g",
    "rtxa6000": "a6000-48g",
    "mi300x": "mi300x-192g",
    "mi325x": "mi325x-256g",
    "mi355x": "mi355x-288g",
    "gaudi3": "gaudi3-128g",
}
# Name of an SXM card -> name of its PCIe card, for which SkyPilot has the same name; empty if
# catalogs/gpus.yaml has no row for the PCIe card.
PCIE_NAMES = {"h100-80g": "h100-pcie-80g", "a100-80g": "", "a100-40g": ""}


@dataclass(frozen=True, slots=True)
class ListedPrices:
    """The prices in a file: its offers by GPU.

    `unknown_gpus` has a line for each GPU that catalogs/gpus.yaml lacks, and `without_price` is the number of
    rows without a price on demand.
    """

    offers: Mapping[str, tuple[ProviderOffer, ...]]
    unknown_gpus: tuple[str, ...]
    without_price: int


@dataclass(frozen=True, slots=True)
class _InstancePrice:
    """One row of the file; `usd_per_h` is the price of one of the instance's GPUs."""

    instance: str
    gpus: float
    usd_per_h: float
    region: str


def read_prices(
    path: Path, catalog: Catalog, *, provider: str, date: str, region: str | None = None
) -> ListedPrices:
    """The prices of one cloud per GPU, on demand and spot; with `region` those of that region alone.

    Raises InputError for a file that is no such catalog, or that has no price of a known GPU.
    """
    rows_by_term: dict[tuple[str, Term], list[_InstancePrice]] = {}
    unknown_gpus: dict[str, int] = {}
    without_price = 0
    for number, row in read_text_rows(path, COLUMNS, EXPECTED_FILE):
        if region is not None and row["Region"].strip() != region:
            continue
        if not (name := row["AcceleratorName"].strip()):
            continue  # The instance has no GPU.
        gpus = _read_price_or_count(row["AcceleratorCount"], f"{path}, line {number}: AcceleratorCount")
        if not gpus:
            raise InputError(f"{path}, line {number}: AcceleratorCount: expected 1 or more, found {gpus}")
        gpu, skip_reason = _catalog_name(name, row.get("GpuInfo") or "", catalog)
        if gpus < 1:  # Azure sells sixths of an A10.
            gpu, skip_reason = None, f"{name}: a part of a GPU, and workers have whole ones"
        if gpu is None:
            unknown_gpus[skip_reason] = unknown_gpus.get(skip_reason, 0) + 1
            continue
        columns: tuple[tuple[Term, str], ...] = (("on-demand", "Price"), ("spot", "SpotPrice"))
        prices = {
            term: _read_price_or_count(row.get(column) or "", f"{path}, line {number}: {column}")
            for term, column in columns
        }
        if prices["on-demand"] is None:  # The instance is sold on spot alone, or not at all.
            without_price += 1
        for term, usd_per_h in prices.items():
            if usd_per_h is not None and usd_per_h > 0:  # A price of 0 means that there is none.
                instance_price = _InstancePrice(row["InstanceType"], gpus, usd_per_h / gpus, row["Region"])
                rows_by_term.setdefault((gpu, term), []).append(instance_price)
    if not rows_by_term:
        in_region = f" in region {region}" if region else ""
        raise InputError(f"{path}: holds no price of a GPU of catalogs/gpus.yaml{in_region}")
    offers: dict[str, tuple[ProviderOffer, ...]] = {}
    for (gpu, term), rows in rows_by_term.items():
        best = min(rows, key=lambda row: (-row.gpus, row.usd_per_h, row.region))
        source = f"SkyPilot catalog {path.name}: {best.instance}, {best.gpus:g} GPUs, {best.region}"
        offers[gpu] = (*offers.get(gpu, ()), ProviderOffer(provider, term, best.usd_per_h, date, source))
    lines = tuple(f"{reason} ({count_text(count, 'row')})" for reason, count in unknown_gpus.items())
    return ListedPrices(offers, lines, without_price)


def _catalog_name(name: str, gpu_info: str, catalog: Catalog) -> tuple[str | None, str]:
    """The name of a GPU in catalogs/gpus.yaml and an empty reason, or None and the reason why it has none.
    `name` is SkyPilot's; `gpu_info` is the row's GpuInfo, which tells a PCIe card.
    """
    catalog_name = GPU_NAMES.get("".join(letter for letter in name.lower() if letter.isalnum()))
    if catalog_name is not None and "pcie" in gpu_info.lower():
        catalog_name, name = PCIE_NAMES.get(catalog_name, catalog_name), f"{name} (PCIe)"
    if catalog_name and catalog_name in catalog.gpus:
        return catalog_name, ""
    return None, f"{name}: no row of catalogs/gpus.yaml is known to be this GPU"


def _read_price_or_count(written: str, where: str) -> float | None:
    """The number in a cell; None for an empty cell. Raises InputError unless it is 0 or more."""
    if not written.strip():
        return None
    try:
        value = float(written)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(f"{where}: expected a number >= 0, found {written[:80]!r}")
    return value
