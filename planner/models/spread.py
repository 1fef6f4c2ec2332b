"""How far step times may be from those of the next cluster.

The error of a fit on steps of its own campaign says little about other engines, hosts and GPUs. So step times
have a spread: factors on the time of prefills and of decodes, lognormal, as they were found between
predictions and measured runs of whole campaigns (catalogs/spreads.yaml).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from planner.errors import InputError

WITHIN_FRAC = 0.9  # of all cases lie between `low` and `high`
Z = NormalDist().inv_cdf((1 + WITHIN_FRAC) / 2)
MOST_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class Factor:
    """What measured times are of predicted ones: lognormal with this median and standard deviation."""

    median: float
    log_sd: float

    def __post_init__(self) -> None:
        if not 1 / MOST_FACTOR <= self.median <= MOST_FACTOR:
            raise InputError(f"median is {self.median:g}, must be {1 / MOST_FACTOR:g} to {MOST_FACTOR:g}")
        if not 0 <= self.log_sd <= math.log(MOST_FACTOR):
            raise InputError(f"log_sd is {self.log_sd:g}, must be 0 to {math.log(MOST_FACTOR):.2g}")

    def at(self, z: float) -> float:
        """The factor `z` standard deviations above the median."""
        return self.median * math.exp(z * self.log_sd)

    @property
    def low(self) -> float:
        """Below lie 5 % of cases."""
        return self.at(-Z)

    @property
    def high(self) -> float:
        """Above lie 5 % of cases."""
        return self.at(Z)


@dataclass(frozen=True, slots=True)
class Spread:
    """Factors on prefills and decodes; `source` says of which runs. `is_own`: of this engine's own runs."""

    prefill: Factor
    decode: Factor
    source: str
    is_own: bool = False

    @classmethod
    def calibrated(cls, uncertainty_frac: float) -> Spread:
        """What a calibration left: its standard error on both."""
        factor = Factor(1.0, uncertainty_frac)
        return cls(factor, factor, "standard error of its calibration", is_own=True)
