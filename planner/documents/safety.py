"""`safety:` in slo.yaml: in what share of scenarios a fleet must keep the SLO."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.domain import ROUNDING
from planner.errors import InputError
from planner.files.document_values import Section

KEPT_IN_FRAC = 0.9  # The default of `kept_in`.
# Set by hand: who misses every other scenario is unfit, and a test of 99 % already takes hundreds.
LEAST_KEPT_FRAC, MOST_KEPT_FRAC = 0.5, 0.99
MOST_GROWTH_FRAC = 10.0  # Eleven times the traffic; more growth is a typing error.


@dataclass(frozen=True, slots=True)
class Safety:
    """The SLO must be kept in `kept_in_frac` of the scenarios.

    Each scenario has other requests of the same kind, `growth_frac` more of them, step times that differ by
    their spread, and `prefix_drift_frac` of the popularity of prefixes moved to other prefixes
    (search/prefixes/prefix_drift.py).
    """

    kept_in_frac: float = KEPT_IN_FRAC
    growth_frac: float = 0.0
    prefix_drift_frac: float = 0.0

    def most_missed(self, count: int) -> int:
        """The most of `count` scenarios in which a fleet may miss the SLO."""
        return int((1 - self.kept_in_frac) * count + ROUNDING)  # In floats (1 - 0.9) * 30 is below 3.


def strictest_safety(kept_frac: float) -> str:
    """The strictest `safety` of slo.yaml that a fleet meets if it keeps the SLO in this share of scenarios.

    It is the share rounded down to whole percents, or none if `kept_in` may not be so low.
    """
    rounded_frac = int(100 * kept_frac + ROUNDING) / 100
    if rounded_frac < LEAST_KEPT_FRAC:
        return "safety: none"
    return f"safety: {{kept_in: {min(rounded_frac, MOST_KEPT_FRAC):g}}}"


def parse_safety(value: Any, where: str = "safety") -> Safety | None:
    """Read `{kept_in: 0.9, growth: 10 %}`, or `none` (None): plan for the traffic and the step times as they
    are written. Raises InputError for anything else.
    """
    if value == "none":
        return None
    if not isinstance(value, Mapping):
        raise InputError(
            f"{where}: expected none, or a mapping such as {{kept_in: 0.9, growth: 10 %}}, found {value!r}"
        )
    section = Section.from_document(value, where, ("kept_in", "growth", "prefix_drift"))
    kept_in_frac = section.share("kept_in", KEPT_IN_FRAC, example=f"{KEPT_IN_FRAC:g}")
    if not LEAST_KEPT_FRAC <= kept_in_frac <= MOST_KEPT_FRAC:
        raise InputError(
            f"{where}: kept_in: expected {LEAST_KEPT_FRAC:g} to {MOST_KEPT_FRAC:g}, found {kept_in_frac:g}; "
            "`safety: none` plans for the traffic and the step times as they are written"
        )
    growth_frac = section.share("growth", 0.0, most=MOST_GROWTH_FRAC)
    return Safety(kept_in_frac, growth_frac, section.share("prefix_drift", 0.0))
