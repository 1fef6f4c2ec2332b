"""Checks values of documents that people write. An error says where, what is valid and what was found.

    limits = Section.from_document(document.get("limits"), "slo.yaml: limits", ("power", "gpus"))
    power_w, gpus = limits.positive("power", "w", default=None), limits.whole_number("gpus", default=8)

`where` is the place of a value, such as "slo.yaml: limits: power". A function `check_...` returns the value
unchanged, `read_...` converts it (planner/units.py has the units); both raise InputError. A `Section` does
the same for the values of a mapping, by their keys.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

from planner.errors import InputError
from planner.units import LARGEST, parse_quantity

LARGEST_COUNT = 10**12  # The largest count that is accepted; products of larger ones overflow 64 bits.
MOST_SHOWN_CHARS = 60  # An error message shows at most this many characters of a value.
# A known name is suggested for an unknown one if difflib finds them at least so alike. Set by hand.
LEAST_LIKENESS = 0.5

Read = TypeVar("Read")
Default = TypeVar("Default")


@dataclass(frozen=True, slots=True)
class Wording:
    """How the errors of one kind of document say what is valid.

    {} stands for the bound or the names. If `missing` is empty, a missing key is checked as null.
    """

    one_of: str = "expected one of {}"
    flag: str = "expected true or false"
    whole: str = "expected a whole number >= {}"
    most: str = "expected at most {}"
    number: str = "expected a number"
    numbers: str = "expected a list of numbers"
    least: str = "must be >= {:g}"
    missing: str = "is missing; add it"


PLAIN = Wording()


class _Required(Enum):
    """The type of "no default", for which None will not do: it is the default of some keys."""

    TOKEN = "no default"


_REQUIRED = _Required.TOKEN


def refused_value(where: object, valid: str, value: object) -> InputError:
    """The InputError for a value that is not valid; `valid` says what would be, as in "must be > 0"."""
    return InputError(f"{where}: {valid}, found {show_value(value)}")


def show_value(value: object) -> str:
    """A value for an error message: its text on one line, cut short."""
    # The repr of a NumPy scalar would show its type, so `item` makes a plain value of it (not of arrays).
    item = getattr(value, "item", None)
    text = repr(item() if item is not None and not hasattr(value, "__len__") else value)
    return text if len(text) <= MOST_SHOWN_CHARS else f"{text[: MOST_SHOWN_CHARS - 3]}..."


def with_place(error: InputError, where: object) -> str:
    """The error's message, with the place before it unless it begins with the place."""
    return str(error) if str(error).startswith(str(where)) else f"{where}: {error}"


@contextmanager
def errors_as(kind: type[InputError], where: object = "") -> Iterator[None]:
    """Raise every InputError of the block as this kind of error, with the place before its message."""
    try:
        yield
    except InputError as error:
        raise kind(with_place(error, where)) from None


def nearest_names(name: object, known: Collection[str], count: int = 3) -> list[str]:
    """The known names most like `name`, in any case; for error messages."""
    lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(str(name).lower(), lower, n=count, cutoff=LEAST_LIKENESS)
    return [lower[match] for match in near]


def list_first(names: Sequence[str], most: int) -> str:
    """The first `most` names, then dots if there are more; for error messages."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def did_you_mean(
    name: object, known: Collection[str], shown: Mapping[str, str] = MappingProxyType({})
) -> str:
    """A question such as "did you mean 'gpus'? ", with the known name that is most like `name`; empty if none
    is alike.

    `shown` has texts to show in place of known names: `{"gpus": "fleet: gpus"}`.
    """
    nearest = nearest_names(name, known, 1)
    return f"did you mean {shown.get(nearest[0], nearest[0])!r}? " if nearest else ""


def refuse_unknown(
    document: Mapping[Any, Any],
    known: Collection[str],
    where: str,
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Raise InputError at the first key that is not in `known`, naming the nearest that is.

    `elsewhere` has keys that belong to another place or have another name: `{"gpus": "fleet: gpus"}`.
    """
    for key in document:
        if key not in known:
            places = {**(elsewhere or {}), **{name: name for name in known}}
            raise InputError(
                f"{where}: unknown key {str(key)!r}; {did_you_mean(key, places, places)}Valid: "
                f"{', '.join(known)}"
            )


def check_mapping(value: object, where: object, such_as: str = "") -> Mapping[str, Any]:
    """The value, checked to be a mapping; `such_as` is an example for the error."""
    if not isinstance(value, Mapping):
        example = f" such as {such_as}" if such_as else ""
        raise refused_value(where, f"expected keys and values{example}", value)
    return value


def check_rows(value: object, where: object, of: str = "", *, least: int = 0) -> list[Any]:
    """The value, checked to be a list of at least `least` entries; `of` names the entries in the error."""
    if not isinstance(value, list) or len(value) < least:
        of_entries = f" of {of}" if of else ""
        raise refused_value(where, f"expected a list{of_entries}", value)
    return value


def check_one_of(value: object, known: Collection[str], where: object, wording: Wording = PLAIN) -> str:
    """The value, checked to be one of the `known` texts."""
    if not isinstance(value, str) or value not in known:
        raise refused_value(where, wording.one_of.format(", ".join(known)), value)
    return value


def check_flag(value: object, where: object, wording: Wording = PLAIN) -> bool:
    """The value, checked to be true or false."""
    if not isinstance(value, bool):
        raise refused_value(where, wording.flag, value)
    return value


def check_text(value: object, where: object) -> str:
    """The value, checked to be text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise refused_value(where, "expected text", value)
    return value


def check_plain_text(value: object, where: object) -> str:
    """The value as text. It may be a number or a date, which YAML does not read as text."""
    if isinstance(value, Mapping | list | bool) or value is None or not str(value).strip():
        raise refused_value(where, "expected text", value)
    return str(value).strip()


def is_number(value: object) -> bool:
    """Whether the value is a finite number below LARGEST; true and false are no numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def check_number(
    value: object,
    where: object,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    wording: Wording = PLAIN,
) -> float:
    """The value as a float, checked to be a number within its bounds."""
    if not (isinstance(value, int | float) and is_number(value) and value >= least and value > above):
        bound = ""
        if above > -math.inf:
            bound = f" > {above:g}"
        elif least > -math.inf:
            bound = f" >= {least:g}"
        raise refused_value(where, wording.number + bound, value)
    return float(value)


def check_numbers(value: object, where: object, wording: Wording = PLAIN) -> tuple[float, ...]:
    """The value, checked to be a list of numbers without units."""
    if not isinstance(value, list):
        raise refused_value(where, wording.numbers, value)
    return tuple(check_number(item, where, wording=wording) for item in value)


def check_whole_number(
    value: object, where: object, *, least: int = 1, most: int = LARGEST_COUNT, wording: Wording = PLAIN
) -> int:
    """The value, checked to be a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refused_value(where, wording.whole.format(least), value)
    if value > most:
        raise refused_value(where, wording.most.format(most), value)
    return value


def read_share(
    value: object, where: object, *, most: float = 1.0, bare: float = 1.0, example: str = "0.1"
) -> float:
    """A share from 0 to `most`, written 0.1 or "10 %"; errors show `example`.

    A number above `bare` needs its %, even if `most` allows it: a bare 10 may mean 10 % or tenfold.
    """
    text = str(value).strip()
    is_percent = text.endswith("%")
    try:
        if isinstance(value, bool):
            raise ValueError
        frac = float(text.removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        frac = float("nan")
    expected = f"expected a number from 0 to {min(most, 1.0):g} such as {example}"
    if not is_percent and bare < frac <= 100:  # Probably a percentage whose sign is missing.
        meant = f"'{frac:g} %'" if frac <= 100 * most else "a share"
        raise refused_value(where, f"{expected}, or a percentage; write {meant}", value)
    if not 0 <= frac <= most:
        if most > 1:
            expected = expected.replace(" to 1 ", f" to {most:g} ")
        raise refused_value(where, expected, value)
    return frac


def read_at_least(
    value: object, unit: str, where: str, *, least: float = 0.0, bare: bool = False, wording: Wording = PLAIN
) -> float:
    """A quantity in the library's `unit`, at least `least`. `bare` allows a number without a unit. Raises
    InputError.
    """
    amount = parse_quantity(value, unit, where=where, bare=bare)
    if amount < least:
        raise refused_value(where, wording.least.format(least), value)
    return amount


def read_positive(value: object, unit: str, where: str) -> float:
    """A quantity in `unit`. Raises InputError unless it is above 0."""
    amount = parse_quantity(value, unit, where=where)
    if amount <= 0:
        raise refused_value(where, "must be > 0", value)
    return amount


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping of a document, and its place.

    A method is named after what it expects under a key, and raises InputError for anything else. A key with
    null counts as missing. A key that is read without a default must be there.
    """

    values: Mapping[str, Any]
    where: str
    wording: Wording = PLAIN

    @classmethod
    def from_document(
        cls,
        document: object,
        where: object,
        known: Collection[str] | None = None,
        *,
        wording: Wording = PLAIN,
        such_as: str = "",
        elsewhere: Mapping[str, str] | None = None,
    ) -> Section:
        """The section of a mapping, empty for None. Raises InputError for a key that is not `known`;
        `elsewhere` is as in `refuse_unknown`.
        """
        values = {} if document is None else check_mapping(document, where, such_as)
        if known is not None:
            refuse_unknown(values, known, str(where), elsewhere)
        return cls({key: value for key, value in values.items() if value is not None}, str(where), wording)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, default: Any = None) -> Any:
        """The unchecked value of a key."""
        return self.values.get(key, default)

    def path_of(self, key: object) -> str:
        """The place of a key's value, for messages."""
        return f"{self.where}: {key}"

    def error(self, key: object, message: str) -> InputError:
        """The InputError with the place of a key's value before `message`."""
        return InputError(f"{self.path_of(key)}: {message}")

    def refused(self, key: object, valid: str, value: object) -> InputError:
        """The InputError for the value of a key, as `refused_value` words it."""
        return refused_value(self.path_of(key), valid, value)

    def get_required(self, key: str) -> Any:
        """The unchecked value of a key that must be there. If the wording has no text for missing keys, a
        missing one is None.
        """
        if key not in self.values and self.wording.missing:
            raise InputError(f"{self.path_of(key)} {self.wording.missing}")
        return self.values.get(key)

    def subsection(
        self,
        key: str,
        known: Collection[str] | None = None,
        such_as: str = "",
        elsewhere: Mapping[str, str] | None = None,
    ) -> Section:
        """The mapping under a key, empty if it is missing; arguments are as in `from_document`."""
        return Section.from_document(
            self.get(key),
            self.path_of(key),
            known,
            wording=self.wording,
            such_as=such_as,
            elsewhere=elsewhere,
        )

    def one_of(
        self, key: str, known: Collection[str], default: Default | _Required = _REQUIRED
    ) -> str | Default:
        """The text under `key`, which must be one of `known`."""
        return self.read(key, lambda value, where: check_one_of(value, known, where, self.wording), default)

    def flag(self, key: str, default: Default | _Required = _REQUIRED) -> bool | Default:
        """True or false under `key`. Raises InputError for another value."""
        return self.read(key, lambda value, where: check_flag(value, where, self.wording), default)

    def text(self, key: str, default: Default | _Required = _REQUIRED) -> str | Default:
        """The text under `key`. Raises InputError for blank text, and for a value of another type."""
        return self.read(key, check_text, default)

    def plain_text(self, key: str, default: Default | _Required = _REQUIRED) -> str | Default:
        """The text under `key`, as `check_plain_text` takes it: also a number or a date."""
        return self.read(key, check_plain_text, default)

    def number(
        self,
        key: str,
        default: Default | _Required = _REQUIRED,
        *,
        least: float = -math.inf,
        above: float = -math.inf,
    ) -> float | Default:
        """The number under `key` without a unit, at least `least` and above `above`. Raises InputError."""
        return self.read(
            key,
            lambda value, where: check_number(value, where, least=least, above=above, wording=self.wording),
            default,
        )

    def numbers(self, key: str, default: Default | _Required = _REQUIRED) -> tuple[float, ...] | Default:
        """The list of numbers under `key`, as a tuple. Raises InputError for another value."""
        return self.read(key, lambda value, where: check_numbers(value, where, self.wording), default)

    def whole_number(
        self, key: str, default: Default | _Required = _REQUIRED, *, least: int = 1, most: int = LARGEST_COUNT
    ) -> int | Default:
        """The whole number under `key`, from `least` to `most`. Raises InputError."""
        return self.read(
            key,
            lambda value, where: check_whole_number(
                value, where, least=least, most=most, wording=self.wording
            ),
            default,
        )

    def share(
        self,
        key: str,
        default: Default | _Required = _REQUIRED,
        *,
        most: float = 1.0,
        bare: float = 1.0,
        example: str = "0.1",
    ) -> float | Default:
        """The share under `key`, as `read_share` reads it. Raises InputError."""

        def read(value: object, where: object) -> float:
            return read_share(value, where, most=most, bare=bare, example=example)

        return self.read(key, read, default)

    def quantity(self, key: str, unit: str, default: Default | _Required = _REQUIRED) -> float | Default:
        """The quantity under `key` in the library's `unit`, of any sign. Raises InputError."""
        return self.read(key, lambda value, where: parse_quantity(value, unit, where=where), default)

    def at_least(
        self,
        key: str,
        unit: str,
        default: Default | _Required = _REQUIRED,
        *,
        least: float = 0.0,
        bare: bool = False,
    ) -> float | Default:
        """The quantity under `key` in the library's `unit`, at least `least`. Raises InputError."""
        return self.read(
            key,
            lambda value, where: read_at_least(
                value, unit, where, least=least, bare=bare, wording=self.wording
            ),
            default,
        )

    def positive(self, key: str, unit: str, default: Default | _Required = _REQUIRED) -> float | Default:
        """The quantity under `key` in the library's `unit`, above 0. Raises InputError."""
        return self.read(key, lambda value, where: read_positive(value, unit, where), default)

    def read(
        self, key: str, parse: Callable[[object, str], Read], default: Default | _Required = _REQUIRED
    ) -> Read | Default:
        """What `parse` returns for the value under `key` and its place."""
        if key not in self.values and not isinstance(default, _Required):
            return default
        return parse(self.get_required(key), self.path_of(key))
