"""Converts quantities as people write them ("200 ms", "50 GB/s", "80 kW") to the library's units, and back.

In the library a quantity has one unit, which the name of its variable says: seconds, bytes, tokens, Watts,
dollars per hour. Only what reads and writes for people (files, command line, reports) converts.
"""

import math
import re
from collections.abc import Mapping
from decimal import ROUND_DOWN, Context, Decimal
from typing import NamedTuple

from planner.errors import InputError

HOUR_S, DAY_S = 3600.0, 86400.0
HOURS_PER_MONTH = 730  # A twelfth of 8,760 hours.
_FACTORS: dict[str, dict[str, float]] = {
    "s": {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "bytes_per_s": {
        "B/s": 1.0,
        "KB/s": 1e3,
        "MB/s": 1e6,
        "GB/s": 1e9,
        "TB/s": 1e12,
        "GiB/s": 2.0**30,
        "Mbit/s": 1e6 / 8,
        "Gbit/s": 1e9 / 8,
        "Mbps": 1e6 / 8,
        "Gbps": 1e9 / 8,
    },
    "bytes": {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30},
    "w": {"W": 1.0, "kW": 1e3, "MW": 1e6},
    "usd_per_h": {
        "usd/h": 1.0,
        "USD/h": 1.0,
        "$/h": 1.0,
        "usd/day": 1 / 24,
        "usd/month": 1 / HOURS_PER_MONTH,
    },
    "usd_per_kwh": {"usd/kWh": 1.0, "USD/kWh": 1.0, "$/kWh": 1.0, "usd/MWh": 1e-3},
    "rps": {
        "rps": 1.0,
        "req/s": 1.0,
        "requests/s": 1.0,
        "/s": 1.0,
        "req/min": 1 / 60,
        "/min": 1 / 60,
        "req/h": 1 / 3600,
        "requests/h": 1 / 3600,
        "/h": 1 / 3600,
    },
}
# For quantities that need a unit: the units that an error suggests.
_SUGGESTED_UNITS = {
    "s": ("ms", "s"),
    "bytes_per_s": ("GB/s",),
    "bytes": ("GB",),
    "w": ("W", "kW"),
    "usd_per_kwh": ("usd/kWh",),
}
# Quantities in the library's units must be below LARGEST and, if not 0, at least LEAST, so that their
# products and quotients stay finite.
LARGEST = 1e18
LEAST = 1e-18
LEAST_MINUTES_S = 120.0  # `show_s` shows durations from here on in minutes, with one decimal.
# How people write thousands of tokens: 1.5k, 1,500.
TOKENS_PATTERN = r"^\s*(\d{1,15}(\.\d{1,3})?\s*[kK]|\d{1,3}(,\d{3}){1,5})\s*$"
_NUMBER = re.compile(r"^\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*$")

_COMMA = re.compile(r"^\s*[+-]?\d+,\d")  # A decimal comma, or a separator of thousands.


def parse_quantity(value: object, unit: str, *, where: str, bare: bool = False) -> float:
    """Read `value` ("200 ms", "2 usd/h", 2) in the library's `unit` ("s", "bytes_per_s", "w", ...).

    Numbers without a unit are accepted for requests/s and USD/h. Seconds, bytes and Watts need their unit,
    because 2000 may mean milliseconds or seconds, and a wrong guess costs a long search. So does the price of
    a kWh, because 12 probably means cents. The number 0 never needs a unit, and with `bare` no number does.
    `where` names the field in the error message.
    """
    factors = _FACTORS[unit]
    example = next(name for name in factors if factors[name] == 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InputError(f"{where}: expected a quantity such as '2 {example}', found {value!r}")
    match = _NUMBER.match(str(value))
    if match is None:
        comma = ", with a comma; write a decimal point" if _COMMA.match(str(value)) else ""
        raise InputError(f"{where}: expected a quantity such as '2 {example}', found {value!r}{comma}")
    number, suffix = float(match[1]), match[2]
    if suffix and suffix not in factors:
        money = "; other currencies are not converted: write the amount in USD" if "usd/" in example else ""
        raise InputError(
            f"{where}: unknown unit {suffix!r} in {value!r}; use one of {', '.join(factors)}{money}"
        )
    if not suffix and number and unit in _SUGGESTED_UNITS and not bare:
        written = " or ".join(f"{match[1]} {each}" for each in _SUGGESTED_UNITS[unit])
        raise InputError(f"{where}: {value!r} has no unit; write {written}")
    number *= factors[suffix] if suffix else 1.0
    if not abs(number) < LARGEST:
        raise InputError(
            f"{where}: {value!r} is too large to be true; expected less than {LARGEST:g} {example}"
        )
    if 0 < abs(number) < LEAST:
        raise InputError(
            f"{where}: {value!r} is too small to be true; expected 0, or {LEAST:g} {example} or more"
        )
    return number


def read_tokens(value: object) -> object:
    """The number of "1.5k" and of "1,500"; any other value is returned as it is, for its reader to check.
    Lists and mappings are read value by value.
    """
    if isinstance(value, Mapping):
        return {key: read_tokens(each) for key, each in value.items()}
    if isinstance(value, list):
        return [read_tokens(each) for each in value]
    if not isinstance(value, str) or not re.match(TOKENS_PATTERN, value):
        return value
    digits = value.strip().replace(",", "").lower()
    return round(1000 * float(digits[:-1])) if digits.endswith("k") else int(digits)


def unit_names(unit: str) -> tuple[str, ...]:
    """The ways to write this unit of the library and its multiples."""
    return tuple(_FACTORS[unit])


def needs_unit(unit: str) -> bool:
    """Whether a number without a unit is refused."""
    return unit in _SUGGESTED_UNITS


# The units that `show_exactly` writes -> their size in the library's unit, and the name of that.
_EXACT_UNITS = {
    "GB/s": (1e9, "B/s"),
    "GB": (1e9, "B"),
    "ms": (1e-3, "s"),
    "s": (1.0, "s"),
    "usd/h": (1.0, "usd/h"),
    "usd/kWh": (1.0, "usd/kWh"),
}


def show_exactly(value: float, unit: str) -> str:
    """The value in `unit` ('50 GB/s') if `parse_quantity` reads exactly the same number from that text, else
    in the library's unit.
    """
    factor, own_unit = _EXACT_UNITS[unit]
    text = shortest_digits(value / factor)
    return f"{text} {unit}" if float(text) * factor == value else f"{value!r} {own_unit}"


def shortest_digits(value: float) -> str:
    """The number with the fewest digits from which the same number is read."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def show_s(seconds: float, more: int = 0) -> str:
    """Write a duration for people: 0.0123 -> '12.3 ms', 1.5 -> '1.50 s', 300 -> '5.0 min', 28,800 -> '8.0 h'.

    NaN becomes '-', and infinity 'never'. `more` is a number of additional digits.
    """
    if not math.isfinite(seconds):
        return "-" if math.isnan(seconds) else "never"
    if seconds < 1.0:
        return f"{seconds * 1e3:.{4 + more}g} ms"
    if seconds < LEAST_MINUTES_S:
        return f"{seconds:.{2 + more}f} s"
    if seconds < 3 * HOUR_S:
        return f"{seconds / 60:.{1 + more}f} min"
    return f"{seconds / HOUR_S:.{1 + more}f} h"


class ShownBeside(NamedTuple):
    """The texts of a value and of its limit."""

    value: str
    limit: str


def show_beside(value_s: float | None, limit_s: float) -> ShownBeside:
    """A duration ('-' for None) and its limit as `show_s` writes them, with enough digits to differ: 2.0004
    and 2 -> '2.0004 s', '2.0000 s'.
    """
    value_s = math.nan if value_s is None else value_s
    pairs = [ShownBeside(show_s(value_s, more), show_s(limit_s, more)) for more in range(10)]
    return next((pair for pair in pairs if pair.value != pair.limit), pairs[0])


def show_error(error_frac: float | None, allowed_frac: float | None) -> str:
    """A relative error as '+1.2 %', with enough digits to differ from the allowed one: 0.0504 and 0.05 ->
    '+5.04 %'. It is '-' for None and for what is not finite.
    """
    if error_frac is None or not math.isfinite(error_frac):
        return "-"
    texts = [f"{100 * error_frac:+z.{digits}f}" for digits in range(1, 10)]  # "z": no -0.0.
    differs = [allowed_frac is None or abs(float(text)) != round(100 * allowed_frac, 9) for text in texts]
    return f"{texts[differs.index(True) if True in differs else 0]} %"


def show_percent(share: float, digits: str = ".1f") -> str:
    """A share as a percentage: 0.4631 -> '46.3 %'. `digits` is a format of Python: '.0f' -> '46 %'."""
    return f"{100 * share:{digits}} %"


def show_share(share: float) -> str:
    """A share as a percentage of four digits, rounded down, so that one below its goal does not read as the
    goal: 0.9 -> '90 %', 0.89998 -> '89.99 %'.
    """
    percent = Decimal(f"{100 * share:.12g}")  # In floating point 100 * 0.57 is a little below 57.
    return f"{Context(prec=4, rounding=ROUND_DOWN).plus(percent).normalize():f} %"


def show_clock(seconds: float) -> str:
    """A moment of a trace for people: 7320 -> '2:02:00'."""
    minutes, rest_s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest_s:02}"


def show_span(seconds: float) -> str:
    """A duration in the largest unit in which it is at least 1 and has at most one decimal: 600 -> '10 min',
    5400 -> '1.5 h', 90 -> '1.5 min'; else in seconds: 100 -> '100 s'.
    """
    for unit, unit_s in (("h", HOUR_S), ("min", 60.0)):
        if seconds >= unit_s and (seconds / unit_s * 10).is_integer():
            return f"{seconds / unit_s:g} {unit}"
    return f"{seconds:g} s"


def percentile_name(percentile_frac: float) -> str:
    """0.9 -> 'p90', 0.999 -> 'p99.9'."""
    return f"p{percentile_frac * 100:.10g}"


def finite_or_none(value: float) -> float | None:
    """The value, or None (null) if it is not finite, because JSON has no such numbers."""
    return value if math.isfinite(value) else None


def count_text(number: int, noun: str) -> str:
    """A number and its noun, with a plural s where needed: "1 worker", "1,024 workers"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def show_digits(value: float, digits: int) -> str:
    """The value with `digits` significant digits, or as a whole number if that has more: "1.234", "15,325",
    not 1.53e+04.
    """
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:,.{digits}g}"


def show_amount(value: float, unit: str) -> str:
    """The value of an objective without its unit: USD/h to the cent, others with six digits, or as a whole
    number if that has more.
    """
    if unit == "USD/h":
        return f"{value:,.2f}"
    return f"{value:,.0f}" if abs(value) >= 999_999.5 else f"{value:,.6g}"  # Above it `g` writes 1e+06.


def show_w(watts: float) -> str:
    """A power for people: 12,345 -> "12.3 kW", 31 -> "31 W"."""
    return f"{watts:,.0f} W" if watts < 999.5 else f"{watts / 1e3:,.1f} kW"


def in_unit(value: float, unit: str) -> str:
    """The value of an objective with its unit: "1,234.50 USD/h", "16 GPUs", "1 GPU"."""
    is_one_gpu = unit == "GPUs" and value == 1
    return f"{show_amount(value, unit)} {'GPU' if is_one_gpu else unit}"
