"""How the GPUs of a fleet are paid: the keys `prices`, `sold_as` and `electricity` of fleet.yaml, by GPU.

    prices: {h100-80g: 2.99 usd/h, a100-80g@owned: 0 usd/h}
    sold_as: {h100-80g: node, a100-80g@owned: node}
    electricity: {a100-80g@owned: 0.156 usd/kWh}       # per kWh that the GPU draws, PUE included

Missing values are those of the catalog, which has no electricity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from planner.documents.catalog import SOLD_AS, Catalog
from planner.domain import Gpu
from planner.errors import InputError
from planner.files.document_values import Section, errors_as
from planner.units import show_exactly

KEYS = ("prices", "sold_as", "electricity")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Paid:
    """The values of a file by the name of the GPU: USD/h, whether whole nodes are sold, USD/kWh."""

    prices_usd_per_h: Mapping[str, float]
    sold_whole: Mapping[str, bool]
    energy_usd_per_kwh: Mapping[str, float]

    def paid_gpu(self, gpu: Gpu) -> Gpu:
        """The GPU with these values in place of the catalog's."""
        return replace(
            gpu,
            price_usd_per_h=self.prices_usd_per_h.get(gpu.name, gpu.price_usd_per_h),
            is_sold_whole=self.sold_whole.get(gpu.name, gpu.is_sold_whole),
            energy_usd_per_kwh=self.energy_usd_per_kwh.get(gpu.name, gpu.energy_usd_per_kwh),
        )


def parse_paid(file: Section, catalog: Catalog) -> Paid:
    """Parse the three keys; raises InputError naming the file and the key."""
    prices, sold_as, electricity = map(file.subsection, KEYS)
    return Paid(
        _read_by_gpu(prices, catalog, lambda gpu: prices.at_least(gpu, "usd_per_h")),
        _read_by_gpu(sold_as, catalog, lambda gpu: sold_as.one_of(gpu, SOLD_AS) == "node"),
        _read_by_gpu(electricity, catalog, lambda gpu: electricity.at_least(gpu, "usd_per_kwh")),
    )


def paid_document(gpus: Iterable[Gpu]) -> dict[str, Any]:
    """The keys that `parse_paid` reads; electricity only if it is paid beside the price."""
    gpus = tuple(gpus)
    electricity = {
        gpu.name: show_exactly(gpu.energy_usd_per_kwh, "usd/kWh") for gpu in gpus if gpu.energy_usd_per_kwh
    }
    return {
        "prices": {gpu.name: show_exactly(gpu.price_usd_per_h, "usd/h") for gpu in gpus},
        "sold_as": {gpu.name: "node" if gpu.is_sold_whole else "gpu" for gpu in gpus},
        **({"electricity": electricity} if electricity else {}),
    }


def _read_by_gpu(section: Section, catalog: Catalog, read: Callable[[str], Value]) -> dict[str, Value]:
    """What `read` gives for each key of the section, by the GPU's name in the catalog."""
    values: dict[str, Value] = {}
    for written_name in section.values:
        with errors_as(InputError, section.where):
            values[catalog.gpu(str(written_name)).name] = read(written_name)
    return values
