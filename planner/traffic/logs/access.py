"""Reads access logs that are text: nginx's and Apache's combined format, and Envoy's default format.

These formats have no token counts. The configuration of the proxy must add them as further fields, in nginx:

    log_format tokens '$remote_addr - $remote_user [$time_local] "$request" $status $body_bytes_sent '
        '"$http_referer" "$http_user_agent" rt=$request_time in=$upstream_http_x_prompt_tokens '
        'out=$upstream_http_x_completion_tokens';

A field `name=value` becomes a column of that name; a short name in _FULL_NAMES is replaced by the full one
(`in` by `input_tokens`). The first seven fields of a line get the names in _NAMES. Each further field without
a name becomes a column named by the field's number, as in `--map input=10,output=11,duration=12:s`. Fields
are counted from 1 as awk does, except that a text in quotes or brackets is one field.

The time in a line of nginx is the end of the answer (nginx.org, ngx_http_log_module). Envoy's START_TIME is
the arrival of the request (envoyproxy.io, "Access logging"). `guess_columns` tells them apart by their names.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from planner.errors import TraceError
from planner.files.document_values import show_value
from planner.traffic.logs.log_columns_map import Columns, guess_columns

# One field of a line. Its groups: quoted, bracketed, key and value of key="value", plain.
_FIELD = re.compile(r'"((?:[^"\\]|\\.)*)"|\[([^\]]*)\]|([A-Za-z][\w.-]*)="((?:[^"\\]|\\.)*)"|(\S+)')
# The beginning of a line in each format; further fields may follow. The combined format begins with the
# address and ends with status and bytes; the group is the user's name, which may have spaces.
COMBINED = re.compile(
    rb'\S+ \S+ (.{0,200}?)\[\d\d/[A-Za-z]{3}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}\] "(?:[^"\\]|\\.)*" '
    rb"\d{3} (?:\d+|-)"
)
ENVOY = re.compile(rb'\[\d{4}-\d\d-\d\dT[\d:.]+Z\] "(?:[^"\\]|\\.)*" \d{1,3} \S+ ')
# A plain field that is `name=value`.
_NAMED = re.compile(r"([A-Za-z][\w.-]*)=(.*)")
# The names of the first fields of a line, by format.
_NAMES = {
    "combined": ("remote_addr", "ident", "remote_user", "time_local", "request", "status", "body_bytes_sent"),
    "envoy": (
        "start_time",
        "request",
        "response_code",
        "response_flags",
        "bytes_received",
        "bytes_sent",
        "duration",
    ),
}
# Short names of fields, as in the example above -> the names by which guess_columns recognises their roles.
_FULL_NAMES = {
    "rt": "request_time",
    "in": "input_tokens",
    "out": "output_tokens",
    "prompt": "prompt_tokens",
    "completion": "completion_tokens",
}
MOST_CHARACTERS = 2000  # A value, such as a long path, is cut after this many characters.


def kind_of(lines: Iterable[bytes]) -> str:
    """The format of most lines of a sample, "combined" or "envoy"; "" if most are of neither."""
    lines_with_text = [line for line in lines if line.strip()]
    for name, pattern in (("combined", COMBINED), ("envoy", ENVOY)):
        matches = sum(bool(pattern.match(line)) for line in lines_with_text)
        if matches > len(lines_with_text) / 2:
            return name
    return ""


def access_rows(
    log_format: str, lines: Iterable[tuple[int, bytes]], path: Path
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each line, and its fields by name or number. A field that is "-" or empty is None; a
    blank line has no fields. `log_format` is a result of `kind_of`. Raises TraceError for a line of another
    format.
    """
    pattern = COMBINED if log_format == "combined" else ENVOY
    names = _NAMES[log_format]
    for number, raw in lines:
        if not raw.strip():
            yield number, {}
            continue
        if not (match := pattern.match(raw)):
            raise TraceError(
                f"{path}, line {number}: is no line of an access log like those before it: "
                f"{show_value(raw.strip()[:40].decode(errors='replace'))}"
            )
        if log_format == "combined":  # In quotes a user's name is one field, whatever is in it.
            user = match[1].strip(b' "').replace(b'"', b"'")
            raw = raw[: match.start(1)] + b'"' + user + b'" ' + raw[match.end(1) :]
        yield number, _row(raw.decode(errors="replace"), names)


def _row(line: str, names: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a line by name; the first ones are named by `names`, unless they name themselves. If
    there is a field "request", its path is added as "path".
    """
    row: dict[str, Any] = {}
    for field_number, match in enumerate(_FIELD.finditer(line), start=1):
        quoted, bracketed, key, key_value, plain = match.groups()
        value = next(text for text in (quoted, bracketed, key_value, plain) if text is not None)
        if key is None and plain is not None and (named := _NAMED.fullmatch(plain)):
            key, value = named[1], named[2]
        if key:
            name = _FULL_NAMES.get(key, key)
        else:
            name = names[field_number - 1] if field_number <= len(names) else str(field_number)
        row[name] = None if value in ("-", "") else value[:MOST_CHARACTERS]
    if request := row.get("request"):
        # In "POST /v1/chat/completions HTTP/1.1" the path is the second word; a single word is a path.
        words = str(request).split()
        row["path"] = words[1] if len(words) > 1 else request
    return row


def columns_of(log_format: str, sample: pd.DataFrame, where: str) -> Columns:
    """The roles of the fields: guessed from a sample of rows, except for the status and the path, which the
    format defines; the path shows requests that generate no text. No field is the tenant, because addresses
    and users of an access log do not count as tenants. `where` is the place that errors name.
    """
    column_map = guess_columns(sample, where)
    status = "status" if log_format == "combined" else "response_code"
    return replace(column_map, status=status, kind="path", tenant="")
