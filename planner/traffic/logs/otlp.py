"""Spans of generative AI as OpenTelemetry's collector writes them: OTLP as JSON, one export a line or a file.

Attributes are those of the conventions (`gen_ai.usage.input_tokens`; open-telemetry/semantic-conventions,
1.27 on) and their older names, which vLLM emits (`gen_ai.usage.prompt_tokens`, span `llm_request`; vLLM 0.32,
vllm/tracing/utils.py). Attributes that hold messages are not looked at. Spans of agents and tools are no
requests, but tell who waits for whom (span_waits.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.errors import TraceError
from planner.files.document_values import show_value
from planner.traffic.logs.log_columns_map import Columns
from planner.traffic.logs.span_waits import SERIAL, SpanTree

MARK = "resourceSpans"
COLUMNS = Columns(
    arrival="start",
    input="input_tokens",
    output="output_tokens",
    tenant="tenant",
    model="model",
    status="status",
    kind="operation",
    request_id="request_id",
    units={"arrival": "ns"},
)
_LIKELY: Mapping[str, tuple[str, ...]] = {
    "input_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens"),
    "output_tokens": (
        *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.usage.completion_tokens"),
    ),
    "tenant": ("enduser.id", "user.id", "tenant.id"),
    "model": ("gen_ai.response.model", "gen_ai.request.model"),
    "operation": ("gen_ai.operation.name", "llm.request.type"),
}
_CONVERSATION = ("gen_ai.conversation.id", "session.id")  # whose traces are turns of one session
_OF_MODELS = ("gen_ai.", "llm.")
_SCALARS = ("intValue", "doubleValue", "stringValue", "boolValue")
_END = "endTimeUnixNano"
_PARENTS = {"invoke_agent", "create_agent", "execute_tool", "invoke_workflow"}


def span_rows(
    documents: Iterable[tuple[int, Mapping[str, Any]]], path: Path, tree: SpanTree
) -> Iterator[tuple[int, dict[str, Any]]]:
    """A row for each span of a model. Spans of anything else are passed over; `tree` gets all of them.

    Where a span and one within it both tell tokens (a gateway's and the engine's), they are one request: the
    inner one counts, which carries none of the outer's waits.
    """
    span_list: list[tuple[int, str, dict[str, Any]]] = []
    above: dict[str, str] = {}
    for number, document in documents:
        where = f"{path}, line {number}"
        for span in _spans(document, where):
            span_id, parent = str(span.get("spanId") or ""), str(span.get("parentSpanId") or "")
            if span_id and parent:
                above[span_id] = parent
            trace, times = str(span.get("traceId") or ""), (span.get("startTimeUnixNano"), span.get(_END))
            given = _attributes(span, where)
            conversation = next((given[key] for key in _CONVERSATION if given.get(key)), "")
            tree.add(span_id, parent, trace, str(conversation), *times)
            row = _row(span, given)
            if row is not None:
                row[SERIAL] = tree.add_call(span_id, trace, *times)
                span_list.append((number, span_id, row))
    outer: set[str] = set()
    for _, span_id, row in span_list:
        at = above.get(span_id) if row["input_tokens"] is not None else None
        while at and at not in outer:
            outer.add(at)
            at = above.get(at)
    answers: dict[tuple[str, str], dict[str, Any]] = {}  # a request may have several (vLLM's n), a span each
    inner = [(number, row) for number, span_id, row in span_list if span_id not in outer]
    for _, row in inner:
        if row["request_id"] is not None:
            first = answers.setdefault((str(row["request_id"]), str(row["start"])), row)
            if first is not row and row["output_tokens"] and first["output_tokens"]:
                first["output_tokens"] = _sum(first["output_tokens"], row["output_tokens"])
    for number, row in inner:
        if answers.get((str(row["request_id"]), str(row["start"])), row) is row:
            yield number, row


def _sum(one: Any, other: Any) -> Any:
    """The sum of two counts, which OTLP writes as texts; the first alone where they are no numbers."""
    try:
        return int(one) + int(other)
    except (TypeError, ValueError):
        return one


def _spans(document: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
    for resource in _list(document, MARK, where):
        scopes = "scopeSpans" if "scopeSpans" in resource else "instrumentationLibrarySpans"
        for scope in _list(resource, scopes, where):
            yield from _list(scope, "spans", where)


def _list(document: Mapping[str, Any], key: str, where: str) -> list[Any]:
    items = document.get(key) or []
    if not isinstance(items, list) or not all(isinstance(one, dict) for one in items):
        raise TraceError(f"{where}: {key}: expected a list of objects, found {show_value(items)}")
    return items


def _attributes(span: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The attributes of a span that have one plain value."""
    given = {}
    for pair in _list(span, "attributes", where):
        value = pair.get("value")
        if isinstance(value, dict) and isinstance(pair.get("key"), str):
            given[pair["key"]] = next((value[kind] for kind in _SCALARS if kind in value), None)
    return given


def _row(span: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The columns of a span of a model; None for any other."""
    if not any(key.startswith(_OF_MODELS) for key in given):
        return None
    row_columns = {
        name: next((given[key] for key in keys if given.get(key) is not None), None)
        for name, keys in _LIKELY.items()
    }
    if row_columns["operation"] in _PARENTS:  # of agents: calls of models are spans within
        return None
    code = (span.get("status") or {}).get("code") if isinstance(span.get("status") or {}, dict) else None
    is_error = code in (2, "2", "STATUS_CODE_ERROR")
    request_id = given.get("gen_ai.request.id") or given.get("gen_ai.response.id")
    return {
        **row_columns,
        "start": span.get("startTimeUnixNano"),
        "status": "error" if is_error else "ok",
        "request_id": request_id or None,
    }
