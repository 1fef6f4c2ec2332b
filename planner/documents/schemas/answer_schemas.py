"""The JSON Schemas of what commands print with --json (planner/documents/answers.py), and of any dataclass or
TypedDict, as certificate.json and these answers write it.

A float may be null, because figures that are not finite are written as null. Further keys are allowed: a
later version may add some. The first paragraph of a class's docstring is its description.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from planner.documents import answers
from planner.documents.certificate import FACT_KINDS, IN_SENTENCES, Certificate
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


def schema_of(hint: Any) -> Schema:
    """The schema of a type, with classes under `$defs`. Raises TypeError for a type that no answer has."""
    parts: dict[str, Schema] = {}
    schema = _schema_part(hint, parts)
    return schema | ({"$defs": dict(sorted(parts.items()))} if parts else {})


def _schema_part(hint: Any, parts: dict[str, Schema]) -> Schema:
    """The schema of a type. Schemas of classes are added to `parts`, by name, and referred to."""
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    origin, inner = get_origin(hint), get_args(hint)
    if origin is NotRequired:
        return _schema_part(inner[0], parts)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (types.UnionType, Union):
        return {"anyOf": [_schema_part(each, parts) for each in inner]}
    if origin is list or (origin is tuple and inner[-1] is Ellipsis):
        return {"type": "array", "items": _schema_part(inner[0], parts)}
    if origin is tuple:
        items = [_schema_part(each, parts) for each in inner]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin in (dict, Mapping):
        _, value_hint = inner
        return {"type": "object", "additionalProperties": _schema_part(value_hint, parts)}
    if dataclasses.is_dataclass(hint) or is_typeddict(hint):
        name = hint.__name__
        if name not in parts:
            parts[name] = {}  # This ends the recursion for a class that contains itself.
            parts[name] = _object_schema(hint, parts)
        return {"$ref": f"#/$defs/{name}"}
    raise TypeError(f"no schema of {hint!r}")


def _object_schema(record: type, parts: dict[str, Schema]) -> Schema:
    """The schema of a class with fields."""
    hints = get_type_hints(record, include_extras=True)
    required = [key for key, hint in hints.items() if get_origin(hint) is not NotRequired]
    properties = {key: _schema_part(hint, parts) for key, hint in hints.items()}
    for key, schema in _added_keys(record).items():
        properties[key] = schema
        required.append(key)
    words = (record.__doc__ or "").split("\n\n")[0]
    # A dataclass without a docstring gets its signature as one.
    has_docstring = bool(words) and not words.startswith(f"{record.__name__}(")
    about = {"description": " ".join(words.split())} if has_docstring else {}
    return {"type": "object", **about, "properties": properties, "required": required}


def _added_keys(record: type) -> dict[str, Schema]:
    """Keys that planner/documents/certificate.py writes beside the fields of a class."""
    if record is Limit:
        return {"name": {"type": "string"}}
    if record is FleetLimit:
        return {"name": {"type": "string"}, "unit": {"type": "string"}}
    return {}


def fact_schema() -> Schema:
    """A fact of certificate.json: its kind, and the fields of the class of this kind."""
    parts: dict[str, Schema] = {}
    kinds: list[Schema] = []
    for name, fact in sorted(FACT_KINDS.items()):
        reference = _schema_part(fact, parts)
        kinds.append({"allOf": [{"properties": {"kind": {"const": name}}, "required": ["kind"]}, reference]})
    return {"anyOf": kinds, "$defs": dict(sorted(parts.items()))}


ANSWERS: dict[str, Any] = {
    "simulate": answers.SimulationAnswer,
    "goodput": answers.GoodputAnswer,
    "what-if": answers.WhatIfAnswer,
    "compare": answers.CompareAnswer,
    "infeasible": answers.InfeasibleAnswer,
    "error": answers.ErrorAnswer,
}


def answer_schema(name: str) -> Schema:
    """The schema of the answer of the command `name`, or of "infeasible" or "error"."""
    if name == "plan":
        return _plan_answer()
    return schema_of(ANSWERS[name])


def _plan_answer() -> Schema:
    """The schema of a plan, with those of its certificate and of every fact."""
    schema = schema_of(answers.PlanAnswer)
    certificate, fact = schema_of(Certificate), fact_schema()
    parts = schema["$defs"] | certificate["$defs"] | fact.pop("$defs")
    parts["Fact"] = fact
    _adapt_certificate(parts["Certificate"]["properties"])
    plan = parts["PlanAnswer"]["properties"]
    plan["certificate"] = {"$ref": "#/$defs/Certificate"}
    plan["facts"]["additionalProperties"]["items"] = {"$ref": "#/$defs/Fact"}
    return {"$ref": schema["$ref"], "$defs": dict(sorted(parts.items()))}


def _adapt_certificate(certificate: dict[str, Schema]) -> None:
    """Change the schema where `certificate_document` writes sentences, shares and reasons, not fields."""
    sentences: Schema = {"type": "array", "items": {"type": "string"}}
    certificate |= dict.fromkeys(IN_SENTENCES, sentences)
    certificate["refuted"] = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "label": {"type": "string"},
                "reason": {"type": "string"},
                "because": {"$ref": "#/$defs/Fact"},
            },
            "required": ["label", "reason", "because"],
        },
    }
    certificate |= {key: {"type": "number"} for key in ("gap_frac", "level0_gap_frac")}
