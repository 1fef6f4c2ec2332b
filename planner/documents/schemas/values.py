"""JSON Schemas of single values as files may hold them: quantities with units, shares, names, sections.

A schema describes the shape of a value. Only the reader of the file checks whether values fit together, or
name a row of a catalog.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from planner.units import TOKENS_PATTERN, needs_unit, unit_names

Schema = dict[str, Any]

_DIGITS = r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
TEXT: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
NUMBERS: Schema = {"type": "array", "items": {"type": "number"}}
ANYTHING: Schema = {}


def with_help(schema: Schema, words: str) -> Schema:
    """The schema with `words`, a sentence for people that editors show."""
    return {"description": words, **schema}


def one_of(names: Iterable[str]) -> Schema:
    """A schema of a text that is one of these names."""
    return {"enum": list(names)}


def text_with_suggestions(names: Iterable[str]) -> Schema:
    """Any text; editors offer these names."""
    return {"anyOf": [{"enum": list(names)}, TEXT]}


def any_of(*schemas: Schema) -> Schema:
    """A schema that any of these schemas may satisfy."""
    return {"anyOf": list(schemas)}


def one_or_list(schema: Schema, *, distinct: bool = False) -> Schema:
    """A schema of one value of `schema`, or of a list of at least one; no value twice if `distinct`."""
    unique = {"uniqueItems": True} if distinct else {}
    return any_of(schema, {"type": "array", "items": schema, "minItems": 1, **unique})


def whole_number_schema(least: int = 1, most: int | None = None) -> Schema:
    """A schema of a whole number between these bounds, which are allowed."""
    return {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})


def number_schema(
    *, least: float | None = None, above: float | None = None, most: float | None = None
) -> Schema:
    """A schema of a number; `least` and `most` are allowed, `above` is not."""
    return (
        {"type": "number"}
        | ({} if least is None else {"minimum": least})
        | ({} if above is None else {"exclusiveMinimum": above})
        | ({} if most is None else {"maximum": most})
    )


def tokens(schema: Schema) -> Schema:
    """A number of tokens by `schema`, or written 1.5k or 1,500."""
    return any_of(schema, {"type": "string", "pattern": TOKENS_PATTERN})


def quantity_schema(unit: str, *, positive: bool = True) -> Schema:
    """A text such as "200 ms", or a bare number where the unit may be left out; 0 never needs a unit."""
    names = "|".join(re.escape(name) for name in sorted(unit_names(unit), key=len, reverse=True))
    optional = "" if needs_unit(unit) else "?"
    # A look-ahead for a digit but 0 before the exponent or unit (which begins with a letter, "/" or "$").
    above_zero = "(?=[^a-zA-Z/$]*[1-9])" if positive else ""
    written: Schema = {
        "type": "string",
        "pattern": rf"^{above_zero}\s*\+?{_DIGITS}\s*({names}){optional}\s*$",
    }
    if needs_unit(unit):
        return written if positive else any_of(written, {"const": 0})
    return any_of(number_schema(above=0) if positive else number_schema(least=0), written)


def share_schema(*, least: float | None = 0, above: float | None = None, most: float = 1.0) -> Schema:
    """A share as a number (0.1) or as a text ("10 %"); the bounds of a text are left to the reader."""
    as_text: Schema = {"type": "string", "pattern": rf"^\s*\+?{_DIGITS}\s*%?\s*$"}
    return any_of(number_schema(least=least, above=above, most=most), as_text)


COUNT, COUNT_OR_0 = whole_number_schema(), whole_number_schema(0)
NUMBER, NUMBER_ABOVE_0 = number_schema(), number_schema(above=0)
NUMBER_FROM_0, NUMBER_FROM_1 = number_schema(least=0), number_schema(least=1)
SECONDS, SECONDS_OR_0 = quantity_schema("s"), quantity_schema("s", positive=False)
PRICE = quantity_schema("usd_per_h", positive=False)
RATE, SPEED = quantity_schema("rps"), quantity_schema("bytes_per_s")
SHARE = share_schema()


def section_schema(
    schemas: Mapping[str, Schema],
    all_keys: Collection[str] | None = None,
    *,
    required: Collection[str] = (),
    patterns: Mapping[str, Schema] | None = None,
) -> Schema:
    """A mapping that may have these keys and no others; null stands for a key that is left out.

    The mapping has `all_keys` in their order; a key without a schema may have any value. `patterns` has
    schemas of further keys, by a regular expression that the key must match.
    """
    keys = schemas if all_keys is None else {key: schemas.get(key, ANYTHING) for key in all_keys}
    document: Schema = {
        "type": "object",
        "properties": {key: schema if key in required else or_null(schema) for key, schema in keys.items()},
        "additionalProperties": False,
    }
    if patterns:
        document["patternProperties"] = dict(patterns)
    if required:
        document["required"] = list(required)
    return document


def by_name(schema: Schema, names: Iterable[str] = ()) -> Schema:
    """A mapping from any names to values of `schema`; editors offer `names`."""
    offered = list(names)
    return {"type": "object", "additionalProperties": schema} | (
        {"propertyNames": text_with_suggestions(offered)} if offered else {}
    )


def or_null(schema: Schema) -> Schema:
    """The schema that also takes null. Null is added within the schema where it has one type, an enum or
    anyOf; otherwise beside it.
    """
    if not schema.keys() - {"description"}:  # A schema without any constraint takes null as it is.
        return schema
    if isinstance(schema.get("type"), str) and "enum" not in schema and "const" not in schema:
        return schema | {"type": [schema["type"], "null"]}
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    if schema.keys() <= {"anyOf", "description"}:
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]}
