"""Whether a date names its time zone."""

import re

_OFFSET = r"(?:[zZ]|[+-]\d\d(?::?\d\d)?)\s*$"  # Z, +01, +0100 or +01:00 at the end.
_ZONE_AFTER_TIME = re.compile(rf"\d\d:\d\d.*{_OFFSET}|\d{{8}}T\d+.*[zZ]\s*$")  # Or 20261116T181703Z.


def says_zone(date: str) -> bool:
    """True for 2026-11-16T18:17:03Z and ...+01:00. The dashes of the day, ten characters, are no offset."""
    return bool(_ZONE_AFTER_TIME.search(date) or re.search(_OFFSET, date[10:]))
