"""Asks a Prometheus server for series over HTTP; prometheus_range.py reads its answers."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Mapping
from http.client import HTTPException
from typing import Any

from planner.errors import InputError
from planner.importers.prometheus_range import PrometheusSeries, parse_answer
from planner.runtime.addresses import split_address

TIMEOUT_S = 60.0  # A query of a long range takes Prometheus some time.
MOST_POINTS = 10_000  # The most samples of a series in one query; Prometheus refuses more than 11,000.
MOST_BYTES = 512 * 2**20  # The most bytes of one answer: those of a few thousand series of MOST_POINTS.
MOST_CHARACTERS = 200  # Error messages show this many characters of the address or of the server's message.


class PrometheusError(InputError):
    """The server gives no answer now; it may answer a later query."""


def query_range(
    url: str, names: Collection[str], *, start_s: float, end_s: float, step_s: float, match: str = ""
) -> tuple[PrometheusSeries, ...]:
    """The series of the metrics `names` between two Unix times [s], both included: a sample every `step_s`.

    Only series whose labels `match` are returned; it is written as in PromQL: 'namespace="prod",
    pod=~"vllm-.*"'. Raises PrometheusError where there is no answer in JSON, InputError for an answer that is
    too large or not of Prometheus' form.
    """
    base = _base_url(url)
    series: list[PrometheusSeries] = []
    for name in names:
        selector = f"{name}{{{match}}}" if match else name
        # The time is cut into pieces of at most MOST_POINTS samples. A query includes both of its ends, so
        # the next piece begins one step after the end of this one.
        piece_start_s = start_s
        while piece_start_s <= end_s:
            piece_end_s = min(end_s, piece_start_s + (MOST_POINTS - 1) * step_s)
            parameters = {
                "query": selector,
                "start": f"{piece_start_s:.3f}",
                "end": f"{piece_end_s:.3f}",
                "step": f"{step_s:g}",
            }
            series += parse_answer(_post_query(f"{base}/api/v1/query_range", parameters), f"{url}: {name}")
            piece_start_s = piece_end_s + step_s
    return tuple(series)


def _base_url(url: str) -> str:
    """The address without a slash at its end, so that a path can be appended.

    Raises InputError for text that is no http address, or one with a query or a fragment.
    """
    parts = split_address(url)
    if parts is None or parts.query or parts.fragment:
        raise InputError(
            "--prometheus: expected an address such as http://prometheus:9090, found "
            f"{url[:MOST_CHARACTERS]!r}"
        )
    return url.rstrip("/")


def _post_query(url: str, parameters: Mapping[str, str]) -> Any:
    """The answer to a query, parsed. Raises PrometheusError if no JSON, InputError beyond MOST_BYTES."""
    # A selector may be too long for the URL, so the parameters go in the body.
    data = urllib.parse.urlencode(parameters).encode()
    request = urllib.request.Request(url, data=data, headers={"Accept": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            raw = answer.read(MOST_BYTES + 1)  # One byte more shows that an answer is too large.
    except urllib.error.HTTPError as error:
        # Prometheus says in the body what was wrong with a query; a proxy in between sends no such JSON.
        with error:
            raw = error.read(MOST_BYTES)
        try:
            message = json.loads(raw)["error"]
        except (ValueError, LookupError, TypeError):
            message = error.reason
        in_one_line = " ".join(str(message).split())
        raise PrometheusError(f"{url}: HTTP {error.code}: {in_one_line[:MOST_CHARACTERS]}") from None
    except (OSError, HTTPException, ValueError) as error:  # ValueError: no server can have this host name.
        reason = getattr(error, "reason", error)
        raise PrometheusError(f"{url}: no answer ({reason}); is this a Prometheus?") from None
    if len(raw) > MOST_BYTES:
        raise InputError(
            f"{url}: an answer is larger than {MOST_BYTES // 2**20} MiB; ask for a shorter --window"
        )
    try:
        return json.loads(raw)
    except ValueError:
        raise PrometheusError(f"{url}: the answer is not JSON; is this a Prometheus?") from None
