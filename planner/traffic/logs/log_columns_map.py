"""Which column of a log is what: as somebody says it, or as names, types and values of a sample tell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd

from planner.errors import InputError, TraceError
from planner.files.document_values import nearest_names, show_value
from planner.traffic.logs.times import (
    NS_PER,
    LogClock,
    UnsureError,
    as_numbers,
    guess_form,
    is_day_first,
    is_missing,
    spans_ns,
    unit_of_name,
)

SAME_S = 1.0  # Two times of a request that are closer than this are one time.
_TIMES = ("arrival", "end")
_MOST = 0.5  # of a sample's values fit a role: the others are wrong, not the role
_PROMPT = {"prompt", "input", "context", "prefill", "request"}
_ANSWER = {"completion", "output", "generated", "generation", "decode", "response", "candidates", "answer"}
_LENGTH = {"tokens", "token", "len", "length", "toks", "tok"}
_NOT_LENGTH = {
    *("cached", "cache", "price", "cost", "usd", "max", "limit", "per", "rate", "total", "second", "sec"),
    *("ms", "time", "latency", "chars", "bytes", "reasoning", "accepted", "rejected", "id", "ids", "first"),
    *("audio", "image", "video", "details", "budget", "min", "avg", "mean", "remaining", "creation", "read"),
}
_START = (
    *("arrival", "arrived", "received", "created", "creation", "requested", "submitted"),
    *("start", "started", "begin", "began", "request"),
)
_END = ("end", "ended", "finish", "finished", "completed", "done", "response", "responded", "logged", "stop")
_TIME = {"time", "at", "ts", "timestamp", "date", "datetime", "utc", "on", "unix", "epoch", "local", "clock"}
_TIME |= {"nano", "iso8601", "msec"}
_COUNTED = {"arrival", "arrived", "start", "started", "timestamp", "time", "ts"}  # a clock that counts from 0
_NOT_TIME = {"first", "token", "tokens", "updated", "modified", "expires", "expiry", "zone", "cached", "ttft"}
_SPAN = {"duration", "latency", "elapsed", "took", "runtime", "e2e", "span"}
_SPAN_NAMES = {"request_time", "response_time", "total_time", "processing_time", "time_taken", "wall_time"}
_NOT_SPAN = {"first", "ttft", "queue", "upstream", "token", "tpot", "itl", "prefill", "network", "connect"}
_NAMES: Mapping[str, tuple[str, ...]] = {
    "tenant": (
        *("tenant", "tenant_id", "client", "client_id", "customer", "customer_id", "team_id", "team"),
        *("organization_id", "org_id", "organization", "org", "project_id", "user_id", "user", "userid"),
    ),
    "model": ("model", "model_name", "model_group", "response_model", "request_model", "deployment", "llm"),
    "adapter": ("adapter", "lora_adapter", "lora_name", "lora", "adapter_name"),
    "status": (
        *("status", "status_code", "http_status", "response_code", "response_status", "http_status_code"),
        *("statuscode", "success", "outcome", "result"),
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
    """The columns of a log by what they are, empty where there is none.

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

    def given(self) -> dict[str, str]:
        """Columns by role, without those that are not there."""
        return {role: name for role in ROLES if (name := getattr(self, role))}

    def written(self) -> str:
        """As --map takes it."""
        return ",".join(f"{role}={name}" for role, name in self.document().items())

    def document(self) -> dict[str, str]:
        """As slo.yaml has it, under traffic: map."""
        return {
            role: name + (f":{self.units[role]}" if role in self.units else "")
            for role, name in self.given().items()
        }


ROLES = tuple(each.name for each in fields(Columns) if each.name != "units")


def parse_columns(given: str | Mapping[str, Any], where: str = "--map") -> Columns:
    """`arrival=created_at,input=prompt_tokens,output=completion_tokens:...`, or the same keys with values.

    A time or a duration may say its unit after a colon: `arrival=ts:ms`.
    """
    if isinstance(given, str):
        pairs = [part.partition("=") for part in given.split(",") if part.strip()]
        for role, sign, _ in pairs:
            if not sign:
                raise InputError(
                    f"{where}: expected ROLE=COLUMN,..., found {show_value(role)}; ROLE: {', '.join(ROLES)}"
                )
        names = [role.strip() for role, _, _ in pairs]
        if len(set(names)) < len(names):
            raise InputError(
                f"{where}: {next(n for n in names if names.count(n) > 1)} is given twice; keep one"
            )
        given = {role.strip(): name for role, _, name in pairs}
    column_by_role: dict[str, Any] = {}
    units: dict[str, str] = {}
    for role, value in given.items():
        if role not in ROLES:
            hint = nearest_names(role, ROLES, 1)
            advice = f"did you mean {hint[0]!r}? " if hint else ""
            raise InputError(
                f"{where}: {show_value(role)} is no part of a log; {advice}Valid: {', '.join(ROLES)}"
            )
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{where}: {role}: expected the name of a column, found {show_value(value)}")
        name, unit = _split_unit(value.strip())
        if unit and role not in (*_TIMES, "duration"):
            name, unit = value.strip(), ""
        column_by_role[role] = name
        if unit:
            units[role] = unit
    try:
        return Columns(**column_by_role, units=units)
    except InputError as error:
        raise InputError(str(error).replace("map", where, 1)) from None


def _split_unit(value: str) -> tuple[str, str]:
    """`ts:ms` is the column ts in ms; a colon before anything else belongs to the name."""
    if ":%" in value:
        name, _, pattern = value.partition(":%")
        return name, "%" + pattern
    name, sign, unit = value.rpartition(":")
    return (name, unit) if sign and unit in NS_PER else (value, "")


def words_of(name: str) -> list[str]:
    """`gen_ai.usage.inputTokens` is gen, ai, usage, input, tokens."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])", name)]


def guess_columns(sample: pd.DataFrame, where: str) -> Columns:
    """What the columns of a sample are. Raises UnsureError with the likeliest map where it is not certain."""
    lengths = {role: _lengths(sample, role) for role in ("input", "output")}
    times = dict(_times(sample))
    spans = [name for name in sample.columns if name not in times and _is_span(sample, name)]
    doubts: list[str] = []
    column_by_role = {
        role: _only_column(sample, names, f"{role} tokens", doubts) for role, names in lengths.items()
    }
    arrival, end, duration, units = _time_columns(sample, times, spans, doubts)
    column_by_role |= {"arrival": arrival, "end": end, "duration": duration}
    taken = set(column_by_role.values())
    for role, likely in _NAMES.items():
        column_by_role[role] = _named(sample, role, likely, taken)
    missing = [role for role in ("input", "output") if not column_by_role[role]]
    if not arrival and not (end and duration):
        missing.insert(0, "arrival")
    if missing or doubts:
        raise _unsure_message(sample, column_by_role, units, missing, doubts, where)
    return Columns(**column_by_role, units=units)


def _day_first_column(sample: pd.DataFrame) -> tuple[str, str] | None:
    """A column of dates such as 05.10.2026 09:00, with their form; the user says what is first."""
    for name in sample.columns:
        texts = sample[name].dropna().astype(str)
        if len(texts) and all(is_day_first(text) for text in texts):
            return str(name), guess_form(texts.iloc[0])
    return None


def _unsure_message(
    sample: pd.DataFrame,
    column_by_role: dict[str, str],
    units: Mapping[str, str],
    missing: list[str],
    doubts: list[str],
    where: str,
) -> UnsureError:
    """One line with what was found and the --map to type."""
    names = ", ".join(map(show_value, list(sample.columns)[:16])) or "no column"
    keep = {role: name for role, name in column_by_role.items() if name}
    if "arrival" in missing and keep.get("end"):
        doubts = [*doubts, f"{keep['end']} is when requests ended, and no column says how long they took"]
        keep["arrival"] = keep.pop("end")
        missing = [role for role in missing if role != "arrival"]
    hint = dict.fromkeys(missing, "COLUMN") | keep
    if "arrival" in missing and (dated := _day_first_column(sample)):
        name, form = dated
        hint["arrival"] = f"{name}:{form}"
        doubts = [*doubts, f"{name} holds dates; swap %d and %m if the month comes first"]
    core = [role for role in ("arrival", "end", "duration", "input", "output") if role in hint]
    text = ",".join(f"{role}={hint[role]}{':' + units[role] if role in units else ''}" for role in core)
    quoted = f"'{text}'" if re.search(r"[^\w=,.:@/-]", text) else text
    why = [*doubts, *(f"no column is told as {role}" for role in missing)]
    if {"input", "output"} <= set(missing):
        why.append(
            "a log without token counts tells the rate alone: plan --rate 5 --task chat describes the rest"
        )
    guess = "" if missing else text
    return UnsureError(
        f"{where}: {'; '.join(why)}; found {names}. Say it: plan trace --map {quoted}, or traffic: map in "
        "slo.yaml",
        guess,
    )


def _lengths(sample: pd.DataFrame, role: str) -> list[str]:
    """Columns of whole numbers whose names say tokens of the prompt, or of the answer."""
    length_columns = []
    for name in sample.columns:
        if not names_length(name, role):
            continue
        values = as_numbers(sample[name])
        present = ~is_missing(sample[name])
        if present.any() and np.mean(values[present] == np.floor(values[present])) >= 0.9:
            length_columns.append(name)
    return length_columns


def names_length(name: str, role: str) -> bool:
    """Whether a column's name says tokens of the prompt (role input), or of the answer (output)."""
    own, other = (_PROMPT, _ANSWER) if role == "input" else (_ANSWER, _PROMPT)
    words = [word for word in words_of(name) if word not in ("gen", "ai", "usage", "metadata", "http")]
    meaning_words = set(words) - {"x", "num", "n", "count", "of"}
    in_out = {"in"} if role == "input" else {"out"}
    is_own = meaning_words & own or (meaning_words & in_out and meaning_words & _LENGTH)
    if not is_own or not meaning_words & _LENGTH or meaning_words & _NOT_LENGTH:
        return False
    return not meaning_words & other or _comes_last(words, own, other)


def _comes_last(words: list[str], own: set[str], other: set[str]) -> bool:
    """`response.usage.prompt_tokens` is of the prompt: the word nearest to `tokens` counts."""
    last = [word for word in words if word in own or word in other]
    return bool(last) and last[-1] in own


def _only_column(sample: pd.DataFrame, names: list[str], what: str, doubts: list[str]) -> str:
    """The one column, or the first of several that say the same."""
    if len(names) > 1:
        first = as_numbers(sample[names[0]])
        differ = [
            name for name in names[1:] if not np.array_equal(as_numbers(sample[name]), first, equal_nan=True)
        ]
        if differ:
            doubts.append(f"{' and '.join([names[0], *differ][:4])} may both be {what}")
    return names[0] if names else ""


def _times(sample: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Columns that hold a time of day, and which: start, end, or "" where the name does not say."""
    for name in sample.columns:
        words = words_of(name)
        if set(words) & (_NOT_TIME | _SPAN):
            continue
        if not set(words) & (_TIME | set(_START) | set(_END)):
            continue
        if _clock(sample[name], name) is None:
            continue
        is_start, is_end = set(words) & set(_START), set(words) & set(_END)
        if name in ("time_local", "time_iso8601", "msec"):  # nginx writes a line when the answer has ended
            yield name, "end"
        else:
            yield name, "start" if is_start and not is_end else "end" if is_end and not is_start else ""


def _clock(column: pd.Series[Any], name: str) -> LogClock | None:
    """How the times of a sample are read; None where they are none, or count from zero without a unit."""
    clock = LogClock(name)
    if clock.fitting_frac(column) < _MOST:
        return None
    words = words_of(name)
    is_counted = clock.since_zero and (not set(words) & _COUNTED or "_".join(words) in _SPAN_NAMES)
    return None if is_counted else clock


def _is_span(sample: pd.DataFrame, name: str) -> bool:
    words = set(words_of(name))
    if not (words & _SPAN or "_".join(words_of(name)) in _SPAN_NAMES) or words & _NOT_SPAN:
        return False
    column = sample[name]
    try:
        spans_ns(np.arange(len(column)), column, span_unit(name, sample.columns) or "ms", "row", name)
    except TraceError:
        return False
    return not bool(is_missing(column).all())


def span_unit(name: str, columns: Any) -> str:
    """The unit of a duration where its name, or whose it is, says it: nginx' request_time is in s."""
    if name == "request_time" and {"time_local", "time_iso8601", "msec"} & set(columns):
        return "s"
    if name == "duration" and {"response_flags", "upstream_host"} & set(columns):
        return "ms"  # Envoy's %DURATION%
    return unit_of_name(name) or ""


def _time_columns(
    sample: pd.DataFrame, times: Mapping[str, str], spans: list[str], doubts: list[str]
) -> tuple[str, str, str, dict[str, str]]:
    """The columns of arrival, end and duration, those that are needed, and their units."""
    by = {kind: [name for name, own in times.items() if own == kind] for kind in ("start", "", "end")}
    by["start"].sort(key=lambda name: min(_START.index(word) for word in words_of(name) if word in _START))
    arrivals = by["start"] or by[""]
    if arrivals:
        first = arrivals[0]
        apart = [name for name in arrivals[1:] if _apart_s(sample, first, name) > SAME_S]
        if apart:
            doubts.append(f"{' and '.join([first, *apart][:4])} may both be the arrival")
        return first, "", "", {}
    if not by["end"]:
        return _counter(sample), "", "", {}
    end = by["end"][0]
    if not spans:
        return "", end, "", {}
    unit = span_unit(spans[0], sample.columns)
    carries_unit = bool(np.isnan(as_numbers(sample[spans[0]])).mean() > 0.5)
    if not unit and not carries_unit:
        doubts.append(f"{spans[0]} has no unit")
        unit = "ms" if float(np.nanmedian(as_numbers(sample[spans[0]]))) > 100 else "s"
    return "", end, spans[0], {"duration": unit} if unit and unit_of_name(spans[0]) != unit else {}


def _counter(sample: pd.DataFrame) -> str:
    """A column of numbers that counts from zero, whose unit its name says."""
    named = [name for name in sample.columns if set(words_of(name)) & {"arrival", "arrived", "timestamp"}]
    return next((name for name in named if not np.isnan(as_numbers(sample[name])).all()), "")


def _apart_s(sample: pd.DataFrame, one: str, other: str) -> float:
    """The median distance of two columns of times."""
    apart = []
    clocks = [LogClock(one), LogClock(other)]
    for _, row in sample.iloc[:100].iterrows():
        try:
            at = [clock.ns(np.zeros(1, np.int64), row[[clock.name]], "row")[0] for clock in clocks]
        except InputError:
            continue  # one of the two is missing or wrong here
        apart.append(abs(int(at[0]) - int(at[1])))
    return float(np.median(apart)) / 1e9 if apart else 0.0


def _named(sample: pd.DataFrame, role: str, likely: tuple[str, ...], taken: set[str]) -> str:
    plain = {"_".join(words_of(name)): name for name in reversed(list(sample.columns)) if name not in taken}
    ends = {plain_name.removeprefix("gen_ai_"): name for plain_name, name in plain.items()}
    for known in likely:
        name = plain.get(known) or ends.get(known)
        if name and not is_missing(sample[name]).all() and (role != "status" or tells_status(sample[name])):
            return name
    return ""


_FINE = {
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
_BROKEN = {
    *("failure", "failed", "fail", "error", "errored", "false", "aborted", "abort", "cancelled", "canceled"),
    *("timeout", "timed_out", "rejected", "status_code_error", "exception", "rate_limited", "denied", "0"),
    *("incomplete", "client_closed", "disconnected", "4xx", "5xx", "preempted"),
}


def has_failed(column: pd.Series[Any]) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], list[str]]:
    """Whether each value says that the request failed, and values of which nobody can say it."""
    codes, values = pd.factorize(column.astype(object).where(~is_missing(column), ""))
    of_value, unknown = np.zeros(len(values) + 1, dtype=bool), []
    for k, value in enumerate(values):
        text = str(value).strip().lower()
        number = pd.to_numeric(text, errors="coerce") if text else np.nan
        if 100 <= number < 600:
            of_value[k] = number >= 400
        elif text in _BROKEN or text in ("000", "0.0"):
            of_value[k] = True
        elif text and text not in _FINE:
            unknown.append(str(value))
    return of_value[codes], unknown


def tells_status(column: pd.Series[Any]) -> bool:
    """Whether most of its values say whether a request failed; one that does not is refused later."""
    unknown = has_failed(column)[1]
    return float(column.astype(str).isin(unknown).mean()) <= _MOST


EMBEDDINGS, OTHER_CALLS = "embeddings", "other calls that generate no text"
_OTHER = re.compile(
    r"rerank|moderat|image|speech|audio|transcri|/health|/metrics|/models\b|/tokenize|/detokenize|/version"
    r"|/ping|/score|/classify|/pooling|/files|/batches|favicon|/ready|/live"
)
_SPANS = {"span", "event", "trace", "tool", "retriever", "evaluator", "guardrail", "agent", "chain"}
_OPERATIONS = {"execute_tool", "invoke_agent", "create_agent", "invoke_workflow"}


def other_kind(value: object) -> str:
    """Why a call generates no text; empty for one that does."""
    text = str(value).strip().lower()
    if "embed" in text:
        return EMBEDDINGS
    return OTHER_CALLS if text in _SPANS or text in _OPERATIONS or _OTHER.search(text) else ""
