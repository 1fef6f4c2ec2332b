"""The JSON Schema of a type: dataclasses and TypedDicts, as `certificate_document` and answers write them.

A float may be null, because a figure that is not finite is written as null. Further keys are allowed: an
answer may say more in a later version.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from planner.documents.certificate import KINDS, kind_of
from planner.documents.schemas.values import Schema
from planner.domain import FleetLimit, Limit

_PLAIN: Mapping[Any, Schema] = {
    float: {"type": ["number", "null"]},
    int: {"type": "integer"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    types.NoneType: {"type": "null"},
    Any: {},
}


def schema_of(kind: Any) -> Schema:
    """The schema of a type, its parts under `$defs`. Raises TypeError for a type that no answer has."""
    parts: dict[str, Schema] = {}
    schema = _schema(kind, parts)
    return schema | ({"$defs": dict(sorted(parts.items()))} if parts else {})


def _schema(kind: Any, parts: dict[str, Schema]) -> Schema:
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    origin, inner = get_origin(kind), get_args(kind)
    if origin is NotRequired:
        return _schema(inner[0], parts)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (types.UnionType, Union):
        return {"anyOf": [_schema(each, parts) for each in inner]}
    if origin is list or (origin is tuple and inner[-1] is Ellipsis):
        return {"type": "array", "items": _schema(inner[0], parts)}
    if origin is tuple:
        items = [_schema(each, parts) for each in inner]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(inner[1], parts)}
    if dataclasses.is_dataclass(kind) or is_typeddict(kind):
        name = kind.__name__
        if name not in parts:
            parts[name] = {}  # a part may hold itself
            parts[name] = _object(kind, parts)
        return {"$ref": f"#/$defs/{name}"}
    raise TypeError(f"no schema of {kind!r}")


def _object(kind: Any, parts: dict[str, Schema]) -> Schema:
    hints = get_type_hints(kind, include_extras=True)
    required = [key for key, hint in hints.items() if get_origin(hint) is not NotRequired]
    properties = {key: _schema(hint, parts) for key, hint in hints.items()}
    for key, schema in _written_beside(kind).items():
        properties[key] = schema
        required.append(key)
    words = (kind.__doc__ or "").split("\n\n")[0]
    about = (
        {} if words.startswith(f"{kind.__name__}(") or not words else {"description": " ".join(words.split())}
    )
    return {"type": "object", **about, "properties": properties, "required": required}


def _written_beside(kind: Any) -> dict[str, Schema]:
    """What the writer of certificate.json adds to the fields of a class."""
    if kind is Limit:
        return {"name": {"type": "string"}}
    if kind is FleetLimit:
        return {"name": {"type": "string"}, "unit": {"type": "string"}}
    return {}


def fact_schema() -> Schema:
    """A fact of certificate.json: its kind, and the fields of that class."""
    parts: dict[str, Schema] = {}
    kinds: list[Schema] = []
    for name, kind in sorted(KINDS.items()):
        assert name == kind_of(kind)
        reference = _schema(kind, parts)
        kinds.append({"allOf": [{"properties": {"kind": {"const": name}}, "required": ["kind"]}, reference]})
    return {"anyOf": kinds, "$defs": dict(sorted(parts.items()))}
