"""One value of a document by its dotted path: `slo.ttft.p90` is the key p90 in ttft in slo."""

import copy
import re
from collections.abc import Mapping
from typing import Any

from planner.errors import InputError
from planner.slo_metrics import METRICS

_DOT = re.compile(r"\.(?!\d)")  # A dot before a digit belongs to a number, as in p99.9.
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([^\W\d]\S*|%|/\S+)\s*")  # 200 ms, 10 %, 4/s


def keys_of(path: str) -> list[str]:
    """The keys of a path, the outermost first; a missing name is an empty key."""
    return [key.strip() for key in _DOT.split(path.strip())]


def spelled_keys(document: Mapping[str, Any], path: str) -> list[str]:
    """The keys of a path as this document spells them.

    For instance `slo.ttft.p90` has the keys `slo` and `ttft_p90` in a document with `slo: {ttft_p90: 2 s}`.
    """
    keys = keys_of(path)
    if len(keys) == 3 and keys[0] == "slo" and keys[1] in METRICS:
        flat, lines = "_".join(keys[1:]), document.get("slo")
        if isinstance(lines, Mapping) and flat in lines:
            return ["slo", flat]
    return keys


def with_value(document: Mapping[str, Any], path: str, value: Any, *, where: str) -> dict[str, Any]:
    """A copy of the document with this value at `path`, or without the key if the value is None.

    Missing sections are added. Raises InputError, whose message begins with `where`, if the path leads
    through a value that has no keys.
    """
    keys = spelled_keys(document, path)
    changed = copy.deepcopy(dict(document))
    section: dict[str, Any] = changed
    for depth, key in enumerate(keys[:-1]):
        inner = section.get(key)
        # A list of names, as in `fleet: {gpus: [a100-80g, h100-80g]}`, becomes keys.
        if isinstance(inner, list):
            inner = dict.fromkeys(map(str, inner))
        if inner is not None and not isinstance(inner, dict):
            here = ".".join(keys[: depth + 1])
            raise InputError(f"{where}: {here} is {inner!r} and has no {keys[depth + 1]!r} in it")
        section[key] = dict(inner or {})
        section = section[key]
    if value is None:
        section.pop(keys[-1], None)
    else:
        section[keys[-1]] = value
    return changed


def multiply_value(document: Mapping[str, Any], path: str, factor: float) -> float | str:
    """The number at `path`, or a quantity such as "2 s", times `factor`; InputError for anything else."""
    value: Any = document
    for key in spelled_keys(document, path):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, str) and (quantity := _QUANTITY.fullmatch(value)):
        return f"{float(quantity[1]) * factor:.10g} {quantity[2]}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        value_text = "is not there" if value is None else f"is {value!r}"
        if path.strip() == "traffic.rate" and value is None:
            value_text += "; its traffic has the trace's own rate, which `plan trace FILE` prints"
        raise InputError(f"x{factor:g} multiplies a number, but {path.strip()} {value_text}")
    return value * factor
