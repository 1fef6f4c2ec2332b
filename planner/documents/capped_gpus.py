"""GPUs under a power limit for which gpus.yaml has no row: "a100-80g@300W" is an A100 limited to 300 W.

Power and slowdowns are those of planner/models/power.py; price, memory and links are the GPU's own.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.domain import Gpu
from planner.errors import CatalogError
from planner.models.power import LOWEST_CAP_FRAC, cap_gpu

_CAPPED_NAME = re.compile(r"(?P<gpu>.+)@(?P<watts>\d+(\.\d+)?)w", re.IGNORECASE)


def split_cap(name: str) -> tuple[str, float] | None:
    """The GPU and the Watts of a name such as "a100-80g@300W"; None for any other name."""
    if (match := _CAPPED_NAME.fullmatch(name)) is None:
        return None
    return match["gpu"], float(match["watts"])


def capped(gpu: Gpu, power_w: float) -> Gpu:
    """The GPU under this limit. Raises CatalogError if the GPU is capped already, or if the limit is above
    its power, or so low that nothing tells how much slower steps are.
    """
    if gpu.uncapped_w is not None:
        raise CatalogError(f"GPU {gpu.name}@{power_w:g}W: {gpu.name} is capped already; cap {gpu.base}")
    least_w = LOWEST_CAP_FRAC * gpu.power_w
    if not least_w <= power_w <= gpu.power_w:
        raise CatalogError(
            f"GPU {gpu.name}@{power_w:g}W: expected a limit of {least_w:g} to {gpu.power_w:g} W; how much "
            f"slower steps are below {100 * LOWEST_CAP_FRAC:g} % of the power is not known: measure it and "
            "write a row with cap_of into gpus.yaml"
        )
    return cap_gpu(gpu, power_w)


def _split_known(rows: Mapping[str, object], name: str) -> tuple[str, float]:
    """The row's name and the cap [W] of a GPU; KeyError unless the name is `<row>@<watts>W`."""
    if (parts := split_cap(name)) is None or parts[0] not in rows:
        raise KeyError(name)
    return parts


class GpuRows(dict[str, Gpu]):
    """GPUs by the names of their rows. Looking up a capped GPU that has no row computes it from its uncapped
    row. It does not become a row: iteration and `in` see only rows.
    """

    def __missing__(self, name: str) -> Gpu:
        row, power_w = _split_known(self, name)
        return capped(self[row], power_w)


_SOURCE = (
    "the row of the uncapped GPU, with prefills slower as Splitwise (arXiv 2311.18677) has them at half the "
    "power, and in proportion between half and full power; not measured"
)


class ProvenanceRows(dict[str, Any]):
    """Where rows come from, by their names: a `Provenance` each, with source, prices and offers. It is typed
    Any because catalog.py, which has the class, imports this module. A capped GPU without a row has the
    prices and offers of its uncapped row.
    """

    def __missing__(self, name: str) -> Any:
        row, _ = _split_known(self, name)
        return replace(self[row], source=_SOURCE, aliases=())
