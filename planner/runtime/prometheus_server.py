"""Asks a Prometheus server for series over HTTP; prometheus_range.py reads its answers."""

from __future__ import annotations

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
MOST_POINTS = 10_000  # Points per series and query; Prometheus refuses more than 11,000.
MOST_BYTES = 512 * 2**20  # The limit of one answer, which then has a few thousand series.


class PrometheusError(InputError):
    """The server gives no answer now; it may answer a later query."""


def query_range(
    url: str, names: Collection[str], *, start_s: float, end_s: float, step_s: float, match: str = ""
) -> tuple[PrometheusSeries, ...]:
    """The series of `names` between two Unix times [s], a sample every `step_s`.

    `match` narrows them, as in PromQL: 'namespace="prod", pod=~"vllm-.*"'. Raises PrometheusError where there
    is no answer in JSON, InputError for an answer that is too large or not of Prometheus' form.
    """
    base = _base_url(url)
    series: list[PrometheusSeries] = []
    for name in names:
        selector = f"{name}{{{match}}}" if match else name
        at_s = start_s
        while at_s <= end_s:
            until_s = min(end_s, at_s + (MOST_POINTS - 1) * step_s)
            parameters = {
                "query": selector,
                "start": f"{at_s:.3f}",
                "end": f"{until_s:.3f}",
                "step": f"{step_s:g}",
            }
            series += parse_answer(_post_query(f"{base}/api/v1/query_range", parameters), f"{url}: {name}")
            at_s = until_s + step_s
    return tuple(series)


def _base_url(url: str) -> str:
    """The address without a slash at its end. Raises InputError for what is no address of a server."""
    parts = split_address(url)
    if parts is None or parts.query or parts.fragment:
        raise InputError(
            f"--prometheus: expected an address such as http://prometheus:9090, found {url[:200]!r}"
        )
    return url.rstrip("/")


def _post_query(url: str, parameters: Mapping[str, str]) -> Any:
    """The answer to a query, parsed from JSON."""
    # A selector may be too long for the URL, so it goes in the body.
    data = urllib.parse.urlencode(parameters).encode()
    request = urllib.request.Request(url, data=data, headers={"Accept": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            raw = answer.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            raw = error.read(MOST_BYTES)
        try:
            message = json.loads(raw)["error"]
        except (ValueError, LookupError, TypeError):
            message = error.reason
        raise PrometheusError(f"{url}: HTTP {error.code}: {' '.join(str(message).split())[:200]}") from None
    except (OSError, HTTPException, ValueError) as error:
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
