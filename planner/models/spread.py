"""How far step times on a cluster may lie from the predicted ones.

The error of a fit on the steps that it was made from says little about other engines, hosts and GPUs. So step
times have a spread: lognormal factors on the time of prefills and of decodes, from comparing predictions with
measured runs of whole campaigns (catalogs/spreads.yaml). The API server's time for a prompt makes up most of
the TTFT of cached prompts, so it has the spread of prefills too, around a median of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from planner.errors import InputError

WITHIN_FRAC = 0.9  # The share of clusters whose factor lies between `low` and `high`.
INTERVAL_SIGMAS = NormalDist().inv_cdf((1 + WITHIN_FRAC) / 2)  # From the median to `low` and to `high`.
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
        """The factor below which 5 % of clusters stay."""
        return self.at_sigmas(-INTERVAL_SIGMAS)

    @property
    def high(self) -> float:
        """The factor that 5 % of clusters exceed."""
        return self.at_sigmas(INTERVAL_SIGMAS)


@dataclass(frozen=True, slots=True)
class StepTimeSpread:
    """The factors on prefills and decodes; `is_own` if they come from this very engine and hardware."""

    prefill: Factor
    decode: Factor
    source: str
    is_own: bool = False

    def front_end_factor(self, prefill_sigmas: float) -> float:
        """The factor on the API server's time if prefills are `prefill_sigmas` standard deviations above the
        median.

        The median of that time is predicted by itself, so the median of prefills does not count.
        """
        return math.exp(prefill_sigmas * self.prefill.log_sd)

    def adapters_factor(self, decode_sigmas: float) -> float:
        """The factor on the time of adapters, most of which reads memory as decodes do, if decodes are
        `decode_sigmas` standard deviations above the median. That time is a roofline, so no median corrects
        it.
        """
        return math.exp(decode_sigmas * self.decode.log_sd)

    @classmethod
    def calibrated(cls, uncertainty_frac: float) -> StepTimeSpread:
        """The spread after a calibration on this very engine: its standard error, on both factors."""
        factor = Factor(1.0, uncertainty_frac)
        return cls(factor, factor, "standard error of its calibration", is_own=True)
