"""Reads the times of a log as nanoseconds since 1970: finds the unit of numbers, and applies the time zone of
dates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.errors import InputError, TraceError
from planner.files.document_values import show_value
from planner.files.text_tables import as_floats
from planner.traffic.trace import FloatArray, IntArray
from planner.traffic.zones import LocalTimes, says_zone
from planner.units import DAY_S

NS_PER = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
# The times of logs are taken to be from 2000 up to 2100 (here as Unix times). A number outside of these years
# is in another unit, or does not count from 1970.
YEAR_2000_S, YEAR_2100_S = 946_684_800.0, 4_102_444_800.0
LONGEST_COUNT_S = 100 * 366 * DAY_S  # A clock with another zero than 1970 has run for 100 years at most.
LONGEST_SPAN_NS = 7 * DAY_S * 1e9  # The duration of a request must be shorter.
SAMPLE_VALUES = 1000  # The unit of a column is chosen by the first values that are not missing, this many.
# Words with which a column's name may say its unit.
_ENDINGS = {
    "s": ("s", "sec", "secs", "second", "seconds"),
    "ms": ("ms", "msec", "millis", "milli", "millisecond", "milliseconds"),
    "us": ("us", "usec", "micros", "micro", "microsecond", "microseconds"),
    "ns": ("ns", "nano", "nanos", "nanosecond", "nanoseconds"),
}
_UNIT_OF = {ending: unit for unit, endings in _ENDINGS.items() for ending in endings}
_DATE = re.compile(r"\s*\d{4}-\d\d-\d\d")  # The beginning of a date in ISO 8601.
# A date whose first number is the day or the month, such as 05.10.2026 09:00 and 10/05/2026 9:00:07 AM.
_LOCAL_DATE = re.compile(
    r"(\d{1,2})([./-])(\d{1,2})\2\d{4}([ T])\d{1,2}:\d\d(:\d\d)?([.,]\d{1,6})?( ?[AaPp][Mm])?"
)
_APACHE = "%d/%b/%Y:%H:%M:%S %z"  # The pattern of strptime for the dates of Apache's logs.
_APACHE_LIKE = re.compile(r"\d\d/[A-Za-z]{3}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}")
_SPAN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s|sec|m|min)\s*")  # A duration that says its unit.
_SPAN_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0}
_EMPTY_TEXTS = ("", " ", "-", "null", "None", "NULL", "\\N")  # PostgreSQL's COPY writes \N.


class UnsureError(TraceError):
    """A file could be read in several ways. `guess` is the --map that reads it in the likeliest way, or "" if
    none is likelier.
    """

    def __init__(self, message: str, guess: str = "") -> None:
        super().__init__(message)
        self.guess = guess


def unit_of_name(name: str) -> str | None:
    """The unit (a key of NS_PER) with which a column's name ends, as in `latency_ms`, `durationMs`, `took
    (s)` and `startTimeUnixNano`; None if it ends with no unit, or is nothing but a unit.
    """
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    last = words[-1].lower() if words else ""
    return _UNIT_OF.get(last) if len(words) > 1 else None


def zone_of(name: str, where: object = "--tz") -> ZoneInfo:
    """The time zone with this name, such as Europe/Berlin or UTC. Raises InputError, which names the option
    or key `where`, if there is none.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InputError(
            f"{where}: expected a time zone such as Europe/Berlin or UTC, found {show_value(name)}"
        ) from None


def as_numbers(column: pd.Series[Any]) -> FloatArray:
    """The values (n,) as float64; NaN for a value that is not a number. True and false are not numbers."""
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iuf":
        return column.to_numpy(dtype=np.float64)
    floats = as_floats(column)
    if column.dtype == object or column.dtype.kind == "b":
        floats = np.where([isinstance(value, bool | np.bool_) for value in column], np.nan, floats)
    return floats


def is_missing(column: pd.Series[Any]) -> npt.NDArray[np.bool_]:
    """Which values (n,) are missing: no value, an empty text, or the dash of access logs."""
    missing: npt.NDArray[np.bool_] = column.isna().to_numpy(dtype=bool)
    if column.dtype.kind not in "iufMb":
        missing = missing | column.isin(_EMPTY_TEXTS).to_numpy(dtype=bool)
    return missing


def with_empty_texts(column: pd.Series[Any]) -> pd.Series[Any]:
    """The values as they are, with an empty text where one is missing. Columns of numbers or of categories
    take no text, so all become columns of objects.
    """
    return column.astype(object).fillna("")


_A_TIME = "a time such as 2026-11-16T18:17:03Z"  # What errors say that they expected.


def _like_first_dates(has_zone: bool) -> str:
    """What errors expect of a date in a column whose first dates have a zone, or have none."""
    return f"a time {'with' if has_zone else 'without'} a zone as before"


@dataclass(slots=True)
class LogClock:
    """How the times of a column are read, which its first values decide.

    `unit` is one of NS_PER, "date", or a pattern of strptime; empty until `choose_unit` finds it. `zone` is
    the time zone of dates that name none. `role` is what a map calls the column, "arrival" or "end".
    `has_offsets` says whether dates name their zone; None until the first are read. `since_zero`: numbers
    count from another zero than 1970. Methods raise TraceError at the first value that does not fit.
    """

    name: str
    unit: str = ""
    zone: str | None = None
    role: str = "arrival"
    has_offsets: bool | None = None
    since_zero: bool = False
    _has_chosen_unit: bool = field(default=False, repr=False)
    _local: LocalTimes | None = field(default=None, repr=False)

    def choose_unit(self, column: pd.Series[Any], where: str) -> None:
        """Set `unit` and `since_zero` by the first values, or by the column's name. Raises UnsureError if
        neither says the unit, or if they contradict each other.
        """
        if self.unit:  # The user or the format has given it.
            self.since_zero = self.unit in NS_PER and self._is_small(column, self.unit)
            return
        if column.dtype.kind == "M" or isinstance(column.dtype, pd.DatetimeTZDtype):
            self.unit = "date"
            return
        sample = column[~is_missing(column)].iloc[:SAMPLE_VALUES]
        if not len(sample):
            raise UnsureError(f"{where}: column {self.name} holds no time", "")
        values = as_numbers(sample)
        if np.isnan(values).mean() >= 0.5:  # Most values are texts.
            self.unit = _date_pattern(sample, where, self.name, self.role)
            return
        # The lower median: unlike a mean of two, it is a value of the column, so that an error can show it.
        middle = float(np.nanpercentile(values, 50, method="lower"))
        named_unit = unit_of_name(self.name)
        for unit, ns in NS_PER.items():
            if YEAR_2000_S <= middle * ns / 1e9 < YEAR_2100_S:
                if named_unit not in (None, unit):
                    raise UnsureError(
                        f"{where}: column {self.name} is named as if in {named_unit}, but its times "
                        f"({middle:.15g}) are {unit} since 1970; say which with --map "
                        f"{self.role}={self.name}:{unit}"
                    )
                self.unit = unit
                return
        # In no unit is the median between 2000 and 2100, so the clock counts from a zero of its own.
        self.since_zero = True
        if named_unit is None and (values != np.floor(values)).any():
            named_unit = "s"  # Programs write all other units as whole numbers.
        if named_unit is None:
            raise UnsureError(
                f"{where}: column {self.name} counts from {values[0]:.15g}, in s, ms, us or ns; say which, "
                f"for instance --map {self.role}={self.name}:s",
                f"{self.role}={self.name}:s",
            )
        self.unit = named_unit

    def fitting_frac(self, column: pd.Series[Any]) -> float:
        """Set `unit` by the first values of a column, and return the share of them that are times in it; 0 if
        most of them are no times.
        """
        sample = column[~is_missing(column)].iloc[:SAMPLE_VALUES]
        if not len(sample):
            return 0.0
        try:
            self.choose_unit(sample, "")
        except TraceError:
            return 0.0
        if self.unit in NS_PER:
            with np.errstate(over="ignore"):  # What overflows is no time.
                seconds = as_numbers(sample) * NS_PER[self.unit] / 1e9
            fits = seconds >= 0 if self.since_zero else (seconds >= YEAR_2000_S) & (seconds < YEAR_2100_S)
        elif sample.dtype.kind == "M" or isinstance(sample.dtype, pd.DatetimeTZDtype):
            return 1.0
        else:
            date_format = "ISO8601" if self.unit == "date" else self.unit
            # Python's logging writes a comma before the fraction of a second.
            text = sample.astype(str).str.strip().str.replace(r",(\d{1,9})$", r".\1", regex=True)
            fits = pd.to_datetime(text, errors="coerce", utc=True, format=date_format).notna().to_numpy()
        return float(np.mean(fits))

    def _is_small(self, column: pd.Series[Any], unit: str) -> bool:
        """Whether most times lie before the year 2000, and so count from another zero than 1970."""
        values = as_numbers(column[~is_missing(column)].iloc[:SAMPLE_VALUES])
        return bool(values.size) and float(np.nanmedian(values)) * NS_PER[unit] / 1e9 < YEAR_2000_S

    def times_ns(self, line: IntArray, column: pd.Series[Any], where: str) -> IntArray:
        """The values as nanoseconds (n,) since 1970, or since the clock's zero. The first call decides the
        unit. For errors, `line` (n,) are the lines of the values in the file, and `where` is the file.
        """
        if not self._has_chosen_unit:
            self.choose_unit(column, f"{where} {line[0]}")
            self._has_chosen_unit = True
        if self.unit not in NS_PER:
            return self._dates_ns(line, column, where)
        unit_ns = NS_PER[self.unit]
        if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iu":
            values = column.to_numpy(dtype=np.float64)
            whole_values: IntArray | None = column.to_numpy(dtype=np.int64)
        else:
            values, whole_values = as_numbers(column), None
        earliest_s, latest_s = (0.0, LONGEST_COUNT_S) if self.since_zero else (YEAR_2000_S, YEAR_2100_S)
        with np.errstate(over="ignore", invalid="ignore"):  # NaN and huge numbers are refused below.
            is_bad = ~((values * unit_ns / 1e9 >= earliest_s) & (values * unit_ns / 1e9 < latest_s))
        expected = (
            f"number of {self.unit} from 0 on" if self.since_zero else f"time in {self.unit} since 1970"
        )
        self._refuse_rows(is_bad, where, line, f"a {expected}", column)
        # Nanoseconds since 1970 need more digits than a float64 has. So whole numbers stay integers, and
        # other numbers are split into a whole part and a fraction.
        if whole_values is not None:
            return whole_values * unit_ns
        whole = np.floor(values)
        fraction_ns = np.rint((values - whole) * unit_ns).astype(np.int64)
        time_ns: IntArray = whole.astype(np.int64) * unit_ns + fraction_ns
        return time_ns

    def _dates_ns(self, line: IntArray, column: pd.Series[Any], where: str) -> IntArray:
        """Dates as nanoseconds (n,) since 1970. Raises TraceError if only some name a zone."""
        dates = self._parse_dates(line, column, where)
        has_offsets = dates.dt.tz is not None
        if self.has_offsets is None:
            self.has_offsets = has_offsets
        elif self.has_offsets != has_offsets:
            self._refuse(where, line[0], _like_first_dates(self.has_offsets), column.iloc[0])
        # A date in another century is taken for a mistake in the log.
        self._refuse_rows(~dates.dt.year.between(2000, 2099).to_numpy(), where, line, _A_TIME, column)
        naive_dates = dates.dt.tz_convert("UTC").dt.tz_localize(None) if has_offsets else dates
        ns = np.asarray(naive_dates.dt.as_unit("ns").to_numpy().astype(np.int64), dtype=np.int64)
        return ns if has_offsets or self.zone is None else self._to_utc_ns(ns, line, column, where)

    def _parse_dates(self, line: IntArray, column: pd.Series[Any], where: str) -> pd.Series[Any]:
        """The values as dates: with a zone (UTC, or the one that all have) if they name one. Raises
        TraceError for other values, and if only some dates name a zone.
        """
        if column.dtype.kind == "M" or isinstance(column.dtype, pd.DatetimeTZDtype):
            return column
        text = column.astype(str) if column.dtype.kind in "iuf" else column
        date_format = "ISO8601" if self.unit == "date" else self.unit
        try:  # This is fast, and enough if nothing is wrong in the column.
            return pd.to_datetime(text, errors="raise", cache=False, format=date_format)
        except (ValueError, TypeError, OverflowError):
            pass
        plain = text.where(text.notna(), "").astype(str).str.strip()
        if self.unit == "date" or ",%f" in self.unit:
            # Some programs write a comma before the fraction of a second; in a file whose columns are
            # separated by ";" it is a point by now.
            plain = plain.str.replace(r",(\d{1,9})\b", r".\1", regex=True)
            date_format = date_format.replace(",%f", ".%f")
        try:
            # Dates of one column may have different zones, so all are converted to UTC.
            dates = pd.to_datetime(plain, errors="coerce", utc=True, cache=False, format=date_format)
        except (ValueError, TypeError, OverflowError):
            self._refuse(where, line[0], self._expected(), column.iloc[0])
        self._refuse_rows(dates.isna().to_numpy(), where, line, self._expected(), column)
        has_zone = np.array([says_zone(date_text) for date_text in plain])
        if self.unit == _APACHE:  # `says_zone` does not know these dates, which always have a zone.
            has_zone[:] = True
        self._refuse_rows(has_zone != has_zone[0], where, line, _like_first_dates(bool(has_zone[0])), column)
        return dates if has_zone[0] else dates.dt.tz_localize(None)

    def _expected(self) -> str:
        """The words of errors for what a value should be: a time, in the user's pattern if there is one."""
        return _A_TIME if self.unit in ("date", _APACHE) else f"a time written as {self.unit}"

    def _to_utc_ns(self, ns: IntArray, line: IntArray, column: pd.Series[Any], where: str) -> IntArray:
        """Local times of `zone` as UTC [ns]. Raises TraceError for a time that the zone leaves out."""
        if self._local is None:
            self._local = LocalTimes(zone_of(str(self.zone)))
        utc_ns, is_left_out = self._local.to_utc_ns(ns)
        self._refuse_rows(is_left_out, where, line, f"a time that there is in {self.zone}", column)
        return utc_ns

    def _refuse_rows(
        self, is_bad: npt.NDArray[np.bool_], where: str, line: IntArray, expected: str, column: pd.Series[Any]
    ) -> None:
        """Raise TraceError with the first row that `is_bad` (n,) marks, if there is one."""
        if is_bad.any():
            row = int(np.argmax(is_bad))
            self._refuse(where, line[row], expected, column.iloc[row])

    def _refuse(self, where: str, line: int, expected: str, bad_value: object) -> None:
        """Raise TraceError for this value, which is in line `line`."""
        raise TraceError(
            f"{where} {line}, column {self.name}: expected {expected}, found {shown_value(bad_value)}"
        )

    def in_words(self) -> str:
        """The unit and zone in words, for the note on how a log's times were read."""
        if self.unit in NS_PER:
            return f"{self.unit} from zero on" if self.since_zero else f"{self.unit} since 1970"
        if self.has_offsets:
            return "dates with a zone"
        return f"dates in {self.zone}" if self.zone else "dates without a zone, taken as UTC"


def shown_value(value: object) -> str:
    """The text for a value of a table in an error message, also for a missing one."""
    is_nothing = value is None or value is pd.NaT or (isinstance(value, float) and np.isnan(value))
    return "nothing or NaN" if is_nothing or value is pd.NA else show_value(value)


def _date_pattern(sample: pd.Series[Any], where: str, name: str, role: str) -> str:
    """The unit of a column of texts: "date" for ISO 8601, or the pattern of Apache's dates. Raises
    UnsureError for other texts.
    """
    texts = sample.astype(str).tolist()
    if np.mean([bool(_DATE.match(text)) for text in texts]) >= 0.5:  # Half is enough, as in `choose_unit`.
        return "date"
    if np.mean([bool(_APACHE_LIKE.fullmatch(text.strip())) for text in texts]) > 0.5:
        return _APACHE
    raise UnsureError(
        f"{where}: column {name} holds {show_value(texts[0])}, which is no number and no date such as "
        "2026-11-16T18:17:03Z; write its form as strptime has it: --map "
        f"'{role}={name}:{guess_pattern(texts[0], month_first=bool(is_month_first(texts)))}'"
    )


def is_local_date(text: str) -> bool:
    """Whether this is a date such as 05.10.2026 09:00, of which the first number is the day or the month."""
    return _LOCAL_DATE.fullmatch(text.strip()) is not None


def is_month_first(texts: Iterable[str]) -> bool | None:
    """Whether the month comes first in these dates. A first or second number above 12 must be a day, which
    decides it; None if there is no such number.
    """
    matches = [match for text in texts if (match := _LOCAL_DATE.fullmatch(text.strip()))]
    if any(int(match[3]) > 12 for match in matches):
        return True
    return False if any(int(match[1]) > 12 for match in matches) else None


def guess_pattern(text: str, *, month_first: bool = False) -> str:
    """The pattern of strptime for a date such as 05.10.2026 09:00:00.036; for any other text an example of a
    pattern.
    """
    match = _LOCAL_DATE.fullmatch(text.strip())
    if match is None:
        return "%d/%m/%Y %H:%M:%S"
    _, sign, _, separator, seconds, fraction, am_pm = match.groups()
    day = f"%m{sign}%d" if month_first else f"%d{sign}%m"
    time = f"{'%I' if am_pm else '%H'}:%M{':%S' if seconds else ''}{'.%f' if fraction else ''}"
    return f"{day}{sign}%Y{separator}{time}{am_pm.replace(am_pm.strip(), '%p') if am_pm else ''}"


def spans_ns(line: IntArray, column: pd.Series[Any], unit: str, where: str, name: str) -> IntArray:
    """Durations (n,) [ns]. Numbers are in `unit`; "" if every value has its own unit (350ms). A missing value
    is 0. Raises TraceError for other values, and for durations of a week and more.
    """
    missing = is_missing(column)
    values = as_numbers(column) * (NS_PER[unit] if unit else np.nan)
    for k in np.flatnonzero(np.isnan(values) & ~missing).tolist():
        match = _SPAN.fullmatch(str(column.iloc[k]))
        values[k] = float(match[1]) * _SPAN_S[match[2]] * 1e9 if match else np.nan
    values[missing] = 0.0
    is_bad = ~((values >= 0) & (values < LONGEST_SPAN_NS))
    if is_bad.any():
        row = int(np.argmax(is_bad))
        raise TraceError(
            f"{where} {line[row]}, column {name}: expected a duration below a week"
            f"{unit and ' in ' + unit}, found {shown_value(column.iloc[row])}"
        )
    return np.rint(values).astype(np.int64)
