"""catalogs/kv_tiers.yaml: memory, disks and stores for KV blocks beside the GPUs' memory, with their prices.

tiers = read_kv_tiers()
tiers["cpu-memory"].usd_per_h(256e9)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from planner.errors import CatalogError
from planner.files.checked_files import read_yaml, repository_dir
from planner.files.document_values import Section, errors_as
from planner.units import HOURS_PER_MONTH

FILE = "kv_tiers.yaml"
KEYS = ("kind", "bandwidth", "with_node", "most", "price_per_gb_month", "price_is", "source", "date")
GB = 1e9
Kind = Literal["memory", "disk", "store"]


@dataclass(frozen=True, slots=True)
class KvTier:
    """One row. For kinds `memory` and `disk` the figures are per GPU, for a `store` they are of all of it.
    `free_bytes` come with a node and cost nothing.
    """

    name: str
    kind: Kind
    bandwidth_bytes_per_s: float
    free_bytes: float
    most_bytes: float
    usd_per_gb_month: float
    source: str

    def usd_per_h(self, size_bytes: float) -> float:
        """The price of `size_bytes` of this tier, of which `free_bytes` cost nothing."""
        return max(size_bytes - self.free_bytes, 0.0) / GB * self.usd_per_gb_month / HOURS_PER_MONTH


def read_kv_tiers(directory: Path | None = None) -> Mapping[str, KvTier]:
    """The tiers of `directory` if it has a kv_tiers.yaml, else the shipped ones. Raises CatalogError with
    the file, the row, the key, its value and what is valid.
    """
    path = repository_dir("catalogs") / FILE
    if directory is not None and (directory / FILE).exists():
        path = directory / FILE
    with errors_as(CatalogError, path):
        return {
            str(name): _parse_tier(str(name), Section.from_document(row, f"{path}: {name}", KEYS))
            for name, row in read_yaml(path).items()
        }


def _parse_tier(name: str, row: Section) -> KvTier:
    return KvTier(
        name,
        cast(Kind, row.one_of("kind", get_args(Kind))),
        row.positive("bandwidth", "bytes_per_s"),
        row.at_least("with_node", "bytes"),
        row.positive("most", "bytes"),
        row.number("price_per_gb_month", least=0.0),
        row.plain_text("source"),
    )
