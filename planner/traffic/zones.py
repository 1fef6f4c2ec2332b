"""Whether a date names its time zone."""

from __future__ import annotations

import re

# A zone after the ten characters of 2026-11-16; and one after a time of day, wherever that stands.
_ZONE = re.compile(r"(?:[zZ]|[+-]\d\d(?::?\d\d)?)\s*$")
_ZONE_AFTER_TIME = re.compile(r"\d\d:\d\d.*(?:[zZ]|[+-]\d\d(?::?\d\d)?)\s*$|\d{8}T\d+.*[zZ]\s*$")


def says_zone(date: str) -> bool:
    """True for 2026-11-16T18:17:03Z and ...+01:00. The dashes of the day itself do not count as an offset."""
    return bool(_ZONE_AFTER_TIME.search(date) or _ZONE.search(date[10:]))
