"""The parameters of controllers: each is a field of a dataclass, with its unit, default and range.

    class HpaSettings(ControllerSettings):
        tolerance_frac: float = setting(0.1, "no change within this share of the target", most=1.0)

The unit follows from the end of a field's name, which a document leaves out (`tolerance_frac=0.1` is
`tolerance: 10 %`), or else from the type of its default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from planner.errors import InputError
from planner.files import document_values
from planner.units import parse_quantity, shortest_digits, show_span

# The units of parameters: time, share, number, whole number, one of several names, true or false, list.
SECONDS, SHARE, NUMBER, WHOLE, NAME, FLAG, LIST = "s", "share", "number", "whole", "name", "flag", "list"
# The endings of field names that a document leaves out. The first that fits counts: `_per_s` before `_s`.
_ENDINGS = ("_per_s", "_s", "_frac", "_rps", "_tokens")

AnySettings = TypeVar("AnySettings", bound="ControllerSettings")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its `name` in a document, its `field` in the settings, its `unit` (a constant above,
    such as SECONDS), its meaning in `words`, and its range or `choices`. If `parse` is given, it reads the
    value from a document in place of the unit's own reader.

    Where the value is None, the controller computes it from another parameter or from its Knowledge. A
    document writes seconds with a unit ("30 s") and shares as 0.7 or "70 %".
    """

    name: str
    field: str
    unit: str
    words: str
    default: Any
    least: float
    most: float
    choices: tuple[str, ...]
    parse: Callable[[object, str], Any] | None

    @property
    def range(self) -> str:
        """The values that are valid, in words: "0 s to 1 h", "at least 1", "one of queue, kv"."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.unit in (LIST, FLAG):
            return "a list" if self.unit == LIST else "true or false"
        if self.most == float("inf"):
            return f"at least {self.show_value(self.least)}"
        return f"{self.show_value(self.least)} to {self.show_value(self.most)}"

    def show_value(self, value: Any) -> str:
        """A value as a document has it; "-" for none."""
        if value is None or value == ():
            return "-"
        if isinstance(value, tuple):
            return "; ".join(map(str, value))
        if isinstance(value, str | bool):
            return str(value).lower()  # True and False as YAML has them; names are in lower case anyway.
        if self.unit == SECONDS:
            return show_span(value)
        return f"{100 * value:.10g} %" if self.unit == SHARE else shortest_digits(value)

    def read(self, value: object, where: str) -> Any:
        """A document's value in the field's unit; `where` is its place. Raises InputError for a value of
        another kind; `check` refuses values out of range.
        """
        if self.parse is not None:
            return self.parse(value, where)
        if self.unit == SECONDS:
            return parse_quantity(value, "s", where=where)
        if self.unit == SHARE:
            # Some shares may be above 1. They are read without "%" too: 1.5 is 150 %.
            return document_values.read_share(value, where, most=self.most, bare=self.most)
        if self.unit == FLAG:
            return document_values.check_flag(value, where)
        if self.unit == WHOLE:
            return document_values.check_whole_number(value, where, least=int(self.least))
        if self.unit == NAME:
            return document_values.check_text(value, where)
        return document_values.check_number(value, where)

    def check(self, value: Any, where: str) -> None:
        """Raise InputError for a value out of the parameter's range."""
        if value is None or self.unit in (LIST, FLAG):  # These have no range.
            return
        if self.choices:
            if value not in self.choices:
                advice = document_values.did_you_mean(value, self.choices)
                raise InputError(
                    f"{where}: {advice}expected {self.range}, found {document_values.show_value(value)}"
                )
        elif not self.least <= value <= self.most:
            raise InputError(f"{where}: must be {self.range}, found {self.show_value(value)}")


def setting(
    default: Any,
    words: str,
    *,
    least: float = 0.0,
    most: float = float("inf"),
    choices: tuple[str, ...] = (),
    parse: Callable[[object, str], Any] | None = None,
) -> Any:
    """A field of `ControllerSettings`; arguments are those of `Parameter`.

    `parse` takes a document's value, and its place for error messages.
    """
    metadata = {"words": words, "least": least, "most": most, "choices": choices, "parse": parse}
    return dataclasses.field(default=default, metadata=metadata)


def _unit_of(field: dataclasses.Field[Any]) -> str:
    """The unit of a parameter: by the name of its field, or else by the type of its default."""
    if field.name.endswith("_frac"):
        return SHARE
    if field.name.endswith("_s") and not field.name.endswith("_per_s"):
        return SECONDS
    units = {bool: FLAG, int: WHOLE, str: NAME, tuple: LIST}
    return units.get(type(field.default), NUMBER)


def parameters_of(settings: type[ControllerSettings]) -> tuple[Parameter, ...]:
    """The parameters of a controller, in the order of the fields."""
    parameters = []
    for field in dataclasses.fields(settings):
        ending = next((ending for ending in _ENDINGS if field.name.endswith(ending)), "")
        name = field.name.removesuffix(ending)
        parameters.append(
            Parameter(name, field.name, _unit_of(field), default=field.default, **field.metadata)
        )
    return tuple(parameters)


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """The base of all settings. A new object has every value in its range, and passes `check`."""

    def __post_init__(self) -> None:
        for parameter in parameters_of(type(self)):
            parameter.check(getattr(self, parameter.field), parameter.name)
        self.check()

    def check(self) -> None:
        """Raise InputError where values contradict each other."""


def read_settings(
    settings: type[AnySettings], given: Mapping[str, object], where: str, base: AnySettings | None = None
) -> AnySettings:
    """Settings with the values in `given`, by the names of a document. Other parameters have the values in
    `base`, or their defaults without it.

    A value of null counts as not given. Raises InputError, whose message begins with the place `where`.
    """
    by_name = {parameter.name: parameter for parameter in parameters_of(settings)}
    document_values.refuse_unknown(given, by_name, where)
    values = {
        by_name[key].field: by_name[key].read(value, f"{where}: {key}")
        for key, value in given.items()
        if value is not None
    }
    with document_values.errors_as(InputError, where):
        return settings(**values) if base is None else dataclasses.replace(base, **values)
