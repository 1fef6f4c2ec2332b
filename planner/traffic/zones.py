"""Whether a date says its time zone."""

from __future__ import annotations

import re

_ZONE = re.compile(r"(?:[zZ]|[+-]\d\d(?::?\d\d)?)\s*$")
_OFFSET = re.compile(r"\d\d:\d\d.*(?:[zZ]|[+-]\d\d(?::?\d\d)?)\s*$|\d{8}T\d+.*[zZ]\s*$")


def says_zone(date: str) -> bool:
    """2026-11-16T18:17:03Z and ...+01:00 do; the dashes of the day are none."""
    return bool(_OFFSET.search(date) or _ZONE.search(date[10:]))
