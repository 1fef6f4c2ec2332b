"""The cost of electricity: `fleet: {electricity: {price: 0.12 usd/kWh, pue: 1.3, of: owned}}`.

Electricity is added to the hourly price of a GPU, as if it always drew its power limit, or its cap
(provisioned power). So the plan never counts less electricity than the fleet draws, and the cost of a fleet
stays a sum over its GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from planner.errors import InputError
from planner.files.document_values import Section, refused_value

Paid = Literal["owned", "all"]
MOST_PUE = 10.0  # Cooling and losses take a share of what GPUs draw, not many times as much.


@dataclass(frozen=True, slots=True)
class Electricity:
    """The price of a kWh, and the PUE (power usage effectiveness): kWh that the site draws per kWh of a GPU.

    `of` says for which GPUs electricity is paid: the owned ones alone, since rents include it, or all.
    """

    usd_per_kwh: float
    pue: float
    of: Paid

    @property
    def gpu_usd_per_kwh(self) -> float:
        """The cost of a kWh that a GPU draws, with what the site draws for cooling and losses."""
        return self.usd_per_kwh * self.pue


def parse_electricity(fleet: Section, owned: Mapping[str, int]) -> Electricity | None:
    """The section `electricity` of `fleet`; None where there is none. Raises InputError."""
    if "electricity" not in fleet:
        return None
    section = fleet.subsection("electricity", ("price", "pue", "of"))
    usd_per_kwh = section.positive("price", "usd_per_kwh")
    if "pue" not in section:
        raise InputError(
            f"{section.path_of('pue')}: is missing; write pue: 1.3 where cooling and losses take 30 % more, "
            "or 1 for the GPUs alone"
        )
    pue = section.number("pue")
    if not 1 <= pue <= MOST_PUE:
        raise refused_value(
            section.path_of("pue"), f"expected 1 (the GPUs alone) to {MOST_PUE:g}", section.get("pue")
        )
    paid_gpus = cast(Paid, section.one_of("of", get_args(Paid), "owned"))
    if paid_gpus == "owned" and "owned" not in fleet:
        raise InputError(
            f"{section.where}: is that of owned GPUs, and fleet: owned names none; name them, or add of: all"
        )
    return Electricity(usd_per_kwh, pue, paid_gpus)
