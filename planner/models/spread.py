"""How far step times on another cluster may lie from the predicted ones.

The error of a fit on steps of its own campaign says little about other engines, hosts and GPUs. So step times
have a spread: lognormal factors on the time of prefills and of decodes, as found between predictions and
measured runs of whole campaigns (catalogs/spreads.yaml). The API server's time for a prompt varies as
prefills do, around its own median: of prompts that are cached, TTFT is little else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from planner.errors import InputError

WITHIN_FRAC = 0.9  # The share of clusters whose factor lies between `low` and `high`.
INTERVAL_SIGMAS = NormalDist().inv_cdf((1 + WITHIN_FRAC) / 2)  # `low` and `high` lie so far from the median.
MOST_FACTOR = 10.0  # A catalog with a factor beyond this, or below its inverse, is refused as a mistake.


@dataclass(frozen=True, slots=True)
class Factor:
    """The lognormal ratio of measured to predicted times, by median and log standard deviation."""

    median: float
    log_sd: float

    def __post_init__(self) -> None:
        if not 1 / MOST_FACTOR <= self.median <= MOST_FACTOR:
            raise InputError(f"median is {self.median:g}, must be {1 / MOST_FACTOR:g} to {MOST_FACTOR:g}")
        if not 0 <= self.log_sd <= math.log(MOST_FACTOR):
            raise InputError(f"log_sd is {self.log_sd:g}, must be 0 to {math.log(MOST_FACTOR):.2g}")

    def at_sigmas(self, z: float) -> float:
        """The factor `z` standard deviations above the median."""
        return self.median * math.exp(z * self.log_sd)

    @property
    def low(self) -> float:
        """The factor below which those of 5 % of clusters lie."""
        return self.at_sigmas(-INTERVAL_SIGMAS)

    @property
    def high(self) -> float:
        """The factor above which those of 5 % of clusters lie."""
        return self.at_sigmas(INTERVAL_SIGMAS)


@dataclass(frozen=True, slots=True)
class StepTimeSpread:
    """The factors on prefills and decodes; `is_own`: they come from runs of this very engine and hardware."""

    prefill: Factor
    decode: Factor
    source: str
    is_own: bool = False

    def front_end_factor(self, z_prefill: float) -> float:
        """The factor on the API server's time where prefills are `z_prefill` standard deviations late."""
        return math.exp(z_prefill * self.prefill.log_sd)

    @classmethod
    def calibrated(cls, uncertainty_frac: float) -> StepTimeSpread:
        """The spread after a calibration on this very engine: its standard error, on both factors."""
        factor = Factor(1.0, uncertainty_frac)
        return cls(factor, factor, "standard error of its calibration", is_own=True)
