"""The column of a log for each role (arrival, input tokens, ...): as a user maps them (`parse_columns`), or
guessed from the names, types and values of a sample (`guess_columns`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd

from planner.errors import InputError, TraceError
from planner.files.document_values import did_you_mean, show_value
from planner.traffic.csv_tables import without_thousands
from planner.traffic.logs.times import (
    NS_PER,
    LogClock,
    UnsureError,
    as_numbers,
    guess_pattern,
    is_local_date,
    is_missing,
    is_month_first,
    spans_ns,
    unit_of_name,
    with_empty_texts,
)

SAME_S = 1.0  # Two columns of times whose median distance is less hold the same time.
_TIME_ROLES = ("arrival", "end")  # The roles that are times.
# A column has a role if at least this share of a sample's values fit it. The other values are then errors.
_FITTING_FRAC = 0.5
_WHOLE_FRAC = 0.9  # A column of lengths has at least this share of whole numbers.
_LISTED_COLUMNS = 16  # An error names at most this many columns.
_COMPARED_ROWS = 100  # Rows in which two columns of times are compared.
# Durations without a unit are taken to be in ms if their median is above this: in s it is almost 2 minutes.
_LIKELY_MS = 100
_NAMED_COLUMNS = 4  # A message names at most this many columns.
# Words in a column's name (`words_of`) that speak for a role, or against it (_NOT_..._WORDS). Long sets are
# written as tuples, several words on a line.
_PROMPT_WORDS = {"prompt", "input", "context", "prefill", "request"}
_ANSWER_WORDS = {
    *("completion", "output", "generated", "generation"),
    *("decode", "response", "candidates", "answer"),
}
_LENGTH_WORDS = {"tokens", "token", "len", "length", "toks", "tok"}
_NOT_LENGTH_WORDS = {
    *("cached", "cache", "price", "cost", "usd", "max", "limit", "per", "rate", "total", "second", "sec"),
    *("ms", "time", "latency", "chars", "bytes", "reasoning", "accepted", "rejected", "id", "ids", "first"),
    *("audio", "image", "video", "details", "budget", "min", "avg", "mean", "remaining", "creation", "read"),
}
_START_WORDS = (
    *("arrival", "arrived", "received", "created", "creation", "requested", "submitted"),
    *("start", "started", "begin", "began", "request"),
)
# Words for the time of an answer's last token, at which most programs write the request's line.
_END_WORDS = (
    *("end", "ended", "finish", "finished", "completed"),
    *("done", "response", "responded", "logged", "stop"),
)
_TIME_WORDS = {
    *("time", "at", "ts", "timestamp", "date", "datetime", "utc", "on", "unix", "epoch", "local", "clock"),
    *("nano", "iso8601", "msec"),
}
# Small numbers may be durations, or times of a clock that counts from 0. With one of these words in the
# column's name they are times.
_ZERO_CLOCK_WORDS = {"arrival", "arrived", "start", "started", "timestamp", "time", "ts"}
_NOT_TIME_WORDS = {
    *("first", "token", "tokens", "updated", "modified"),
    *("expires", "expiry", "zone", "cached", "ttft"),
    # Ids of ten and more digits are in the range of times since 1970.
    *("id", "ids", "uuid", "hash"),
}
# In this module a span is a duration (how long a request took), not a span of OpenTelemetry as in otlp.py.
_SPAN_WORDS = {"duration", "latency", "elapsed", "took", "runtime", "e2e", "span"}
_SPAN_NAMES = {"request_time", "response_time", "total_time", "processing_time", "time_taken", "wall_time"}
_NOT_SPAN_WORDS = {
    *("first", "ttft", "queue", "upstream", "token"),
    *("tpot", "itl", "prefill", "network", "connect"),
}
# The likely names of the other roles, as their words joined by "_", the likeliest first.
_LIKELY_NAMES: Mapping[str, tuple[str, ...]] = {
    "tenant": (
        *("tenant", "tenant_id", "client", "client_id", "customer", "customer_id", "team_id", "team"),
        *("organization_id", "org_id", "organization", "org", "project_id", "user_id", "user", "userid"),
    ),
    "model": ("model", "model_name", "model_group", "response_model", "request_model", "deployment", "llm"),
    "adapter": ("adapter", "lora_adapter", "lora_name", "lora", "adapter_name"),
    "status": (
        *("status", "status_code", "http_status", "response_code", "response_status", "http_status_code"),
        *("statuscode", "success", "outcome", "result", "http", "http_code"),
    ),
    "kind": (
        *("call_type", "endpoint", "operation", "operation_name", "request_type", "path", "request_path"),
        *("uri", "url", "request_uri", "route", "api", "request"),
    ),
    "request_id": ("request_id", "req_id", "requestid", "x_request_id", "call_id", "completion_id"),
    "cache_hit": ("cache_hit", "from_cache", "is_cached", "served_from_cache"),
}


@dataclass(frozen=True, slots=True)
class Columns:
    """The name of a log's column for each role, empty where there is none.

    Either `arrival` is there, or `end` and `duration`: a request arrives its duration before its end.
    `status` tells requests that failed, `kind` those that generate no text (embeddings), `cache_hit` answers
    of a gateway's cache; rows with the same `request_id` are one request. `units` has a unit by role: s, ms,
    us, ns, or a pattern of strptime.
    """

    arrival: str = ""
    end: str = ""
    duration: str = ""
    input: str = ""
    output: str = ""
    tenant: str = ""
    model: str = ""
    adapter: str = ""
    status: str = ""
    kind: str = ""
    request_id: str = ""
    cache_hit: str = ""
    units: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if missing := [role for role in ("input", "output") if not getattr(self, role)]:
            raise InputError(f"map: {missing[0]} is missing; say which column has {missing[0]} tokens")
        if not self.arrival and not (self.end and self.duration):
            raise InputError(
                "map: arrival is missing; say arrival=COLUMN, or both end=COLUMN,duration=COLUMN"
            )

    def by_role(self) -> dict[str, str]:
        """Columns by role, without those that are not there."""
        return {role: name for role in ROLES if (name := getattr(self, role))}

    def map_text(self) -> str:
        """What a user would write after --map for these columns."""
        return ",".join(f"{role}={name}" for role, name in self.document().items())

    def document(self) -> dict[str, str]:
        """The mapping that slo.yaml has under traffic: map."""
        return {
            role: name + (f":{self.units[role]}" if role in self.units else "")
            for role, name in self.by_role().items()
        }


ROLES = tuple(each.name for each in fields(Columns) if each.name != "units")


def parse_columns(written: str | Mapping[str, Any], where: str = "--map") -> Columns:
    """`arrival=created_at,input=prompt_tokens,output=completion_tokens:...`, or the same keys with values.

    A time or a duration may say its unit after a colon: `arrival=ts:ms`.
    """
    if isinstance(written, str):
        pairs = [part.partition("=") for part in _split_map(written) if part.strip()]
        for role, sign, _ in pairs:
            if not sign:
                raise InputError(
                    f"{where}: expected ROLE=COLUMN,..., found {show_value(role)}; ROLE: {', '.join(ROLES)}"
                )
        names = [role.strip() for role, _, _ in pairs]
        if len(set(names)) < len(names):
            raise InputError(
                f"{where}: {next(role for role in names if names.count(role) > 1)} is given twice; keep one"
            )
        written = {role.strip(): name for role, _, name in pairs}
    column_by_role: dict[str, Any] = {}
    units: dict[str, str] = {}
    for role, value in written.items():
        if role not in ROLES:
            raise InputError(
                f"{where}: {show_value(role)} is no part of a log; {did_you_mean(role, ROLES)}Valid: "
                f"{', '.join(ROLES)}"
            )
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{where}: {role}: expected the name of a column, found {show_value(value)}")
        name, unit = _split_unit(value.strip())
        if unit and role not in (*_TIME_ROLES, "duration"):
            # No other role has a unit, so the colon is in the name.
            name, unit = value.strip(), ""
        column_by_role[role] = name
        if unit:
            units[role] = unit
    try:
        return Columns(**column_by_role, units=units)
    except InputError as error:  # The message says "map:", where the user wrote `where`.
        raise InputError(str(error).replace("map", where, 1)) from None


def _split_map(text: str) -> list[str]:
    """The parts of `a=x,b=y`; a comma inside a pattern of strptime, as in `arrival=at:%S,%f`, ends none."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and ":%" in parts[-1] and part.strip() and "=" not in part:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _split_unit(value: str) -> tuple[str, str]:
    """Name and unit: `ts:ms` is the column ts in ms. A colon before anything else belongs to the name."""
    if ":%" in value:  # A pattern of strptime may have colons itself.
        name, _, pattern = value.partition(":%")
        return name, "%" + pattern
    name, sign, unit = value.rpartition(":")
    return (name, unit) if sign and unit in NS_PER else (value, "")


def words_of(name: str) -> list[str]:
    """The words of a column's name: gen, ai, usage, input, tokens for `gen_ai.usage.inputTokens`."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])", name)]


def guess_columns(sample: pd.DataFrame, where: str) -> Columns:
    """The roles of a sample's columns. Raises UnsureError, with the likeliest map, where one is uncertain."""
    lengths = {role: _length_columns(sample, role) for role in ("input", "output")}
    times = dict(_clock_columns(sample))
    spans = [name for name in sample.columns if name not in times and _is_span(sample, name)]
    ambiguities: list[str] = []  # The guesses below add sentences. With any, the map is not used.
    column_by_role = {
        role: _only_column(sample, names, f"{role} tokens", ambiguities) for role, names in lengths.items()
    }
    arrival, end, duration, units = _time_columns(sample, times, spans, ambiguities)
    column_by_role |= {"arrival": arrival, "end": end, "duration": duration}
    taken = set(column_by_role.values())  # A column has one role.
    for role, likely in _LIKELY_NAMES.items():
        column_by_role[role] = _column_named(sample, role, likely, taken)
    if not column_by_role["request_id"] and _has_answer_ids(sample):
        column_by_role["request_id"] = "id"
    missing = [role for role in ("input", "output") if not column_by_role[role]]
    if not arrival and not (end and duration):
        missing.insert(0, "arrival")
    if missing or ambiguities:
        raise _unsure_error(sample, column_by_role, units, missing, ambiguities, where)
    return Columns(**column_by_role, units=units)


def _has_answer_ids(sample: pd.DataFrame) -> bool:
    """Whether a column `id` has the ids of answers that servers with OpenAI's API give (chatcmpl-9f3)."""
    ids = sample["id"].dropna().astype(str) if "id" in sample else pd.Series(dtype=str)
    return bool(len(ids) and ids.str.fullmatch("(chat)?cmpl-.+").all())


def _local_date_column(sample: pd.DataFrame) -> tuple[str, str, bool] | None:
    """The first column of dates such as 05.10.2026 09:00, their strptime pattern, and whether some number
    above 12 tells day and month apart. If none does, the pattern has the day first, and may be wrong.
    """
    for name in sample.columns:
        texts = sample[name].dropna().astype(str).tolist()
        if texts and all(is_local_date(text) for text in texts):
            month_first = is_month_first(texts)
            return str(name), guess_pattern(texts[0], month_first=bool(month_first)), month_first is not None
    return None


def _grouped_error(grouped: list[str], where: str) -> UnsureError:
    """The error for columns of lengths such as 1,096."""
    return UnsureError(
        f"{where}: {' and '.join(map(show_value, grouped))} may hold thousands separators: write 1096 in "
        "the log, not 1,096 or 1.096",
        "",
    )


def _dated_roles(sample: pd.DataFrame, name: str, pattern: str) -> dict[str, str]:
    """By role, what a suggested map says of the column `name`, which holds dates of this strptime pattern.

    The dates are arrivals, unless the name says end and another column has durations: then they are the
    ends, and that column has the role duration.
    """
    span = next((str(each) for each in sample.columns if _is_span(sample, each)), "")
    if not span or not set(words_of(name)) & set(_END_WORDS):
        return {"arrival": f"{name}:{pattern}"}
    unit = "" if unit_of_name(span) else f":{span_unit(span, sample.columns) or 's'}"
    return {"end": f"{name}:{pattern}", "duration": f"{span}{unit}"}


def _unnamed_clock_column(sample: pd.DataFrame) -> str:
    """The only column of dates, such as 2026-10-05T09:00:00Z; empty if there is none, or more than one.
    Called if no name says that its column is a time. Numbers may be anything, so they do not count.
    """
    dated = [
        name
        for name in sample.columns
        if np.isnan(as_numbers(sample[name])).all()
        and not is_missing(sample[name]).all()
        and _holds_times(sample[name], name)
    ]
    return dated[0] if len(dated) == 1 else ""


def _unsure_error(
    sample: pd.DataFrame,
    column_by_role: dict[str, str],
    units: Mapping[str, str],
    missing: list[str],
    ambiguities: list[str],
    where: str,
) -> UnsureError:
    """The error for a map that is uncertain: one line with the log's columns and the --map to type, in which
    COLUMN stands for what is missing.
    """
    # No map helps where numbers have thousands separators.
    if grouped := [name for role in missing for name in _grouped_length_columns(sample, role)]:
        return _grouped_error(grouped, where)
    names = ", ".join(map(show_value, list(sample.columns)[:_LISTED_COLUMNS])) or "no column"
    likely = {role: name for role, name in column_by_role.items() if name}
    # The suggested map takes ends for arrivals if there is nothing better, and the message says so.
    if "arrival" in missing and likely.get("end"):
        ambiguity = f"{likely['end']} is when requests ended, and no column says how long they took"
        ambiguities = [*ambiguities, ambiguity]
        likely["arrival"] = likely.pop("end")
        missing = [role for role in missing if role != "arrival"]
    columns = dict.fromkeys(missing, "COLUMN") | likely
    dated = _local_date_column(sample) if "arrival" in missing else None
    if dated:
        name, pattern, is_certain = dated
        columns |= _dated_roles(sample, name, pattern)
        if "end" in columns:  # End and duration give the arrival.
            del columns["arrival"]
            missing = [role for role in missing if role != "arrival"]
        swap = "" if is_certain else "; swap %d and %m if the month comes first"
        ambiguities = [*ambiguities, f"{name} holds dates{swap}"]
    elif "arrival" in missing and (name := _unnamed_clock_column(sample)):
        columns["arrival"] = name
        ambiguity = f"{name} holds dates, and its name does not say whether requests arrived then"
        ambiguities = [*ambiguities, ambiguity]
    # The order in which the map is suggested.
    roles = [
        role for role in ("arrival", "end", "duration", "input", "output", *_LIKELY_NAMES) if role in columns
    ]
    text = ",".join(f"{role}={columns[role]}{':' + units[role] if role in units else ''}" for role in roles)
    quoted = f"'{text}'" if re.search(r"[^\w=,.:@/-]", text) else text
    # An ambiguity already names the column of dates, so that the arrival is not said to be unreadable.
    unread = [role for role in missing if role != "arrival" or not dated]
    why = [*ambiguities, *(f"no column could be read as {role}" for role in unread)]
    if {"input", "output"} <= set(missing):
        why.append(
            "a log without token counts tells the rate alone: plan --rate 5 --task chat describes the rest"
        )
    guess = "" if missing else text
    return UnsureError(
        f"{where}: {'; '.join(why)}; found {names}. Say it: plan trace FILE -o trace.csv --map {quoted}, or "
        "traffic: map in slo.yaml",
        guess,
    )


def _length_columns(sample: pd.DataFrame, role: str) -> list[str]:
    """Columns of whole numbers whose names say tokens of the prompt, or of the answer."""
    length_columns = []
    for name in sample.columns:
        if not names_length(name, role):
            continue
        texts = without_thousands([str(value).strip() for value in with_empty_texts(sample[name])])
        column = sample[name] if texts is None else pd.Series(texts, dtype=object)
        values = as_numbers(column)
        present = ~is_missing(column)
        if present.any() and np.mean(values[present] == np.floor(values[present])) >= _WHOLE_FRAC:
            length_columns.append(name)
    return length_columns


# Numbers that may be grouped in thousands. In a file whose columns are separated by ";" a comma was read as a
# decimal point, so 1,096 is 1.096 here.
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:[.,' ]\d{3})+")


def _grouped_length_columns(sample: pd.DataFrame, role: str) -> list[str]:
    """Columns whose names say the role's tokens, and in which some number looks like 1,096."""
    if role not in ("input", "output"):
        return []
    return [
        str(name)
        for name in sample.columns
        if names_length(name, role)
        and any(_GROUPED.fullmatch(value.strip()) for value in sample[name].dropna().astype(str))
    ]


def names_length(name: str, role: str) -> bool:
    """Whether a column's name says tokens of the prompt (role input), or of the answer (output)."""
    own_words, other_words = (
        (_PROMPT_WORDS, _ANSWER_WORDS) if role == "input" else (_ANSWER_WORDS, _PROMPT_WORDS)
    )
    # Prefixes of OpenTelemetry and the like say nothing about the role, and fillers (num, of) nothing at all.
    words = [word for word in words_of(name) if word not in ("gen", "ai", "usage", "metadata", "http")]
    meaning_words = set(words) - {"x", "num", "n", "count", "of"}
    if not meaning_words & _LENGTH_WORDS or meaning_words & _NOT_LENGTH_WORDS:
        return False
    if not meaning_words & (own_words | ({"in"} if role == "input" else {"out"})):
        return False
    return not meaning_words & other_words or _comes_last(words, own_words, other_words)


def _comes_last(words: list[str], own_words: set[str], other_words: set[str]) -> bool:
    """Whether the last word for prompt or answer is in `own_words`, as in `response.usage.prompt_tokens`."""
    sides = [word for word in words if word in own_words or word in other_words]
    return bool(sides) and sides[-1] in own_words


def _only_column(sample: pd.DataFrame, names: list[str], meaning: str, ambiguities: list[str]) -> str:
    """The first of these columns, empty if there is none; an ambiguity is added if their values differ."""
    if len(names) > 1:
        first = as_numbers(sample[names[0]])
        differ = [
            name for name in names[1:] if not np.array_equal(as_numbers(sample[name]), first, equal_nan=True)
        ]
        if differ:
            ambiguities.append(f"{' and '.join([names[0], *differ][:_NAMED_COLUMNS])} may both be {meaning}")
    return names[0] if names else ""


def _clock_columns(sample: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Columns of times of a clock, each with "start" or "end", or "" if its name says neither or both."""
    for name in sample.columns:
        words = set(words_of(name))
        # Times to the first token, and durations, are not times of a clock.
        if words & (_NOT_TIME_WORDS | _SPAN_WORDS):
            continue
        if not words & (_TIME_WORDS | set(_START_WORDS) | set(_END_WORDS)):
            continue
        if not _holds_times(sample[name], name):
            continue
        is_start, is_end = bool(words & set(_START_WORDS)), bool(words & set(_END_WORDS))
        if name in ("time_local", "time_iso8601", "msec"):  # Nginx writes a line when the answer has ended.
            yield name, "end"
        elif is_start == is_end:  # The name has words of both, or of neither.
            yield name, ""
        else:
            yield name, "start" if is_start else "end"


def _holds_times(column: pd.Series[Any], name: str) -> bool:
    """Whether the column holds times of a clock. Its name decides for small numbers (perhaps durations)."""
    clock = LogClock(name)
    if clock.fitting_frac(column) < _FITTING_FRAC:
        return False
    words = words_of(name)
    return not clock.since_zero or (
        bool(set(words) & _ZERO_CLOCK_WORDS) and "_".join(words) not in _SPAN_NAMES
    )


def _is_span(sample: pd.DataFrame, name: str) -> bool:
    """Whether the column holds durations, by its name and its values."""
    words = set(words_of(name))
    if not (words & _SPAN_WORDS or "_".join(words_of(name)) in _SPAN_NAMES) or words & _NOT_SPAN_WORDS:
        return False
    column = sample[name]
    try:
        # Any unit will do: the values only have to be readable as durations.
        spans_ns(np.arange(len(column)), column, span_unit(name, sample.columns) or "ms", "row", name)
    except TraceError:
        return False
    return not bool(is_missing(column).all())


def span_unit(name: str, columns: Any) -> str:
    """The unit of a column of durations; empty where neither its name nor the program that wrote the log
    tells it. Nginx and Envoy are known by their other columns.
    """
    if name == "request_time" and {"time_local", "time_iso8601", "msec"} & set(columns):
        return "s"  # Nginx writes seconds.
    if name == "duration" and {"response_flags", "upstream_host"} & set(columns):
        return "ms"  # Envoy's %DURATION% is in milliseconds.
    return unit_of_name(name) or ""


def _time_columns(
    sample: pd.DataFrame, times: Mapping[str, str], spans: list[str], ambiguities: list[str]
) -> tuple[str, str, str, dict[str, str]]:
    """The columns of arrival, end and duration, "" for one that is missing or not needed, and their units. An
    arrival alone is enough; without one, an end and a duration are needed. `times` are the columns of times
    with "start", "end" or "" (`_clock_columns`), and `spans` those of durations.
    """
    starts, others, ends = (
        [name for name, time_kind in times.items() if time_kind == kind] for kind in ("start", "", "end")
    )
    # The likeliest start comes first: _START_WORDS is sorted by likelihood.
    starts.sort(
        key=lambda name: min(_START_WORDS.index(word) for word in words_of(name) if word in _START_WORDS)
    )
    arrivals = starts or others
    if arrivals:
        first = arrivals[0]
        apart = [name for name in arrivals[1:] if _apart_s(sample, first, name) > SAME_S]
        if apart:
            ambiguities.append(f"{' and '.join([first, *apart][:_NAMED_COLUMNS])} may both be the arrival")
        return first, "", "", {}
    if not ends:
        return _numeric_arrival(sample), "", "", {}
    end = ends[0]
    if not spans:
        return "", end, "", {}
    unit = span_unit(spans[0], sample.columns)
    numbers = as_numbers(sample[spans[0]])
    # Values such as "1.5s" are no numbers, and say their own unit. Most values must be such.
    values_have_units = bool(np.isnan(numbers).mean() > 0.5)
    if not unit and not values_have_units:
        ambiguities.append(f"{spans[0]} has no unit")
        unit = "ms" if float(np.nanmedian(numbers)) > _LIKELY_MS else "s"
    # Where the column's name says its unit, the map need not.
    return "", end, spans[0], {"duration": unit} if unit and unit_of_name(spans[0]) != unit else {}


def _numeric_arrival(sample: pd.DataFrame) -> str:
    """A column of numbers whose name says arrival; empty if there is none. No unit makes times of its numbers
    (`_clock_columns` left it out), so reading it asks the user for the unit (`LogClock.choose_unit`).
    """
    named = [name for name in sample.columns if set(words_of(name)) & {"arrival", "arrived", "timestamp"}]
    return next((name for name in named if not np.isnan(as_numbers(sample[name])).all()), "")


def _apart_s(sample: pd.DataFrame, first_name: str, second_name: str) -> float:
    """The median distance of two columns of times [s]; 0 where no row has both."""
    distances_ns = []
    clocks = [LogClock(first_name), LogClock(second_name)]
    for _, row in sample.iloc[:_COMPARED_ROWS].iterrows():
        try:
            times_ns = [
                clock.times_ns(np.zeros(1, np.int64), row[[clock.name]], "row")[0] for clock in clocks
            ]
        except InputError:
            continue  # One of the two times is missing or wrong in this row.
        distances_ns.append(abs(int(times_ns[0]) - int(times_ns[1])))
    return float(np.median(distances_ns)) / NS_PER["s"] if distances_ns else 0.0


def unmapped_status(sample: pd.DataFrame, columns: Columns) -> str:
    """The column by which some requests failed, if a user's map names no status; empty if there is none."""
    if columns.status:
        return ""
    name = _column_named(sample, "status", _LIKELY_NAMES["status"], set(columns.by_role().values()))
    return name if name and has_failed(sample[name])[0].any() else ""


def _column_named(sample: pd.DataFrame, role: str, likely: tuple[str, ...], taken: set[str]) -> str:
    """The first column that has a likely name, with or without gen_ai in front, and holds values; empty if
    there is none. If columns have equal words, the first in the log counts, hence `reversed`.
    """
    by_words = {
        "_".join(words_of(name)): name for name in reversed(list(sample.columns)) if name not in taken
    }
    without_prefix = {words.removeprefix("gen_ai_"): name for words, name in by_words.items()}
    for likely_name in likely:
        name = by_words.get(likely_name) or without_prefix.get(likely_name)
        # A status whose values are unknown is not used.
        if name and not is_missing(sample[name]).all() and (role != "status" or tells_status(sample[name])):
            return name
    return ""


# Values of a status that say that the request was answered, and those that say that it was not.
_ANSWERED = {
    *(
        "success",
        "successful",
        "succeeded",
        "ok",
        "okay",
        "complete",
        "completed",
        "done",
        "finished",
        "true",
    ),
    *("stop", "length", "eos", "status_code_ok", "status_code_unset", "unset", "default", "served", "2xx"),
    *("tool_calls", "end_turn", "max_tokens", "streaming_complete", "1"),
}
_FAILED = {
    *("failure", "failed", "fail", "error", "errored", "false", "aborted", "abort", "cancelled", "canceled"),
    *("timeout", "timed_out", "rejected", "status_code_error", "exception", "rate_limited", "denied", "0"),
    *("incomplete", "client_closed", "disconnected", "4xx", "5xx", "preempted"),
}


def has_failed(column: pd.Series[Any]) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], list[str]]:
    """(n,): whether each value says that the request failed; and the different values that are unknown. A
    missing value counts as not failed.
    """
    codes, values = pd.factorize(column.astype(object).where(~is_missing(column), ""))
    # The last place (index -1) is for the code -1, which pandas gives to values that it takes for missing.
    failed_by_code, unknown = np.zeros(len(values) + 1, dtype=bool), []
    for code, value in enumerate(values):
        text = str(value).strip().lower()
        number = pd.to_numeric(text, errors="coerce") if text else np.nan
        if 100 <= number < 600:  # A status of HTTP, where 400 and above are errors.
            failed_by_code[code] = number >= 400
        elif text in _FAILED or text in ("000", "0.0"):  # A status of 0 says that there was no answer.
            failed_by_code[code] = True
        elif text and text not in _ANSWERED:
            unknown.append(str(value))
    return failed_by_code[codes], unknown


def tells_status(column: pd.Series[Any]) -> bool:
    """Whether at least _FITTING_FRAC of the values are known values of a status."""
    unknown = has_failed(column)[1]
    return float(column.astype(str).isin(unknown).mean()) <= 1 - _FITTING_FRAC


# Reasons for which calls are left out, as `Trace.dropped` names them.
EMBEDDINGS, OTHER_CALLS = "embeddings", "other calls that generate no text"
# Parts of paths and of kinds of calls that generate no text.
_NO_TEXT = re.compile(
    r"rerank|moderat|image|speech|audio|transcri|/health|/metrics|/models\b|/tokenize|/detokenize|/version"
    r"|/ping|/score|/classify|/pooling|/files|/batches|favicon|/ready|/live"
)
# Kinds of observations in logs of Langfuse. Its generations are of no kind listed here.
_SPAN_KINDS = {"span", "event", "trace", "tool", "retriever", "evaluator", "guardrail", "agent", "chain"}
# Operations of OpenTelemetry that enclose calls of an LLM, which have rows of their own.
_OPERATIONS = {"execute_tool", "invoke_agent", "create_agent", "invoke_workflow"}


def no_text_reason(value: object) -> str:
    """Why a call of this kind or path generates no text, for `Trace.dropped`; empty for one that does."""
    text = str(value).strip().lower()
    if "embed" in text:
        return EMBEDDINGS
    return OTHER_CALLS if text in _SPAN_KINDS or text in _OPERATIONS or _NO_TEXT.search(text) else ""
