"""Values out of a document that somebody wrote, checked: an error says where, what was found, what to do.

`where` leads to the value, as in "slo.yaml: limits: power".
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from planner.errors import InputError
from planner.units import quantity

MOST = 10**12  # of whole numbers that count something; beyond, 64 bits overflow where they are multiplied


def nearest(name: object, known: Collection[str], count: int = 3) -> list[str]:
    """The known names most like `name`, whatever its case; for error messages."""
    lower = {candidate.lower(): candidate for candidate in known}
    return [lower[hit] for hit in difflib.get_close_matches(str(name).lower(), lower, n=count, cutoff=0.5)]


def refuse_unknown(document: Mapping[Any, Any], known: Collection[str], where: str) -> None:
    """Raise InputError at the first key that is not in `known`, naming the nearest that is."""
    for key in document:
        if key not in known:
            hint = nearest(key, known, 1)
            advice = f"did you mean {hint[0]!r}? " if hint else ""
            raise InputError(f"{where}: unknown key {str(key)!r}; {advice}Valid: {', '.join(known)}")


def subsection(document: Mapping[str, Any], name: str, known: tuple[str, ...], where: str) -> dict[str, Any]:
    """A part of slo.yaml, empty if it is missing or null; keys without a value count as missing."""
    if document.get(name) is None:
        return {}
    section = mapping(document[name], f"{where}: {name}")
    refuse_unknown(section, known, f"{where}: {name}")
    return {key: value for key, value in section.items() if value is not None}


def mapping(document: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(document, Mapping):
        raise InputError(f"{where}: expected keys and values, found {document!r}")
    return document


def one_of(value: object, known: tuple[str, ...], where: str) -> str:
    if not isinstance(value, str) or value not in known:
        raise InputError(f"{where}: expected one of {', '.join(known)}, found {value!r}")
    return value


def at_least_0(value: object, unit: str, where: str, *, bare: bool = False) -> float:
    number = quantity(value, unit, where=where, bare=bare)
    if number < 0:
        raise InputError(f"{where}: must be >= 0, found {value!r}")
    return number


def share(value: object, where: str, *, most: float = 1.0) -> float:
    """0.1 or "10 %"."""
    text = str(value).strip()
    is_percent = text.endswith("%")
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(text.removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        number = float("nan")
    if not 0 <= number <= most:
        raise InputError(f"{where}: expected a number from 0 to {most:g} such as 0.1, found {value!r}")
    return number


def positive(value: object, unit: str, where: str) -> float:
    number = quantity(value, unit, where=where)
    if number <= 0:
        raise InputError(f"{where}: must be > 0, found {value!r}")
    return number


def whole(value: object, where: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{where}: expected a whole number >= {least}, found {value!r}")
    if value > MOST:
        raise InputError(f"{where}: expected at most {MOST}, found {value!r}")
    return value


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
