"""Reads requests from OpenTelemetry's spans of generative AI, in OTLP as JSON, one export per line or file.

Attributes are those of the conventions (`gen_ai.usage.input_tokens`; open-telemetry/semantic-conventions,
from 1.27 on) and their older names, which vLLM emits (`gen_ai.usage.prompt_tokens`, span `llm_request`; vLLM
0.32, vllm/tracing/utils.py). Texts of messages are not read. Spans of agents and tools are not requests, but
show which request waits for which (span_waits.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.errors import TraceError
from planner.files.document_values import show_value
from planner.traffic.logs.log_columns_map import Columns
from planner.traffic.logs.span_waits import SERIAL, SpanTree

MARK = "resourceSpans"  # An object with this key is an export of OTLP.
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
# The attributes that may hold a column's value; the first one that a span has is used.
_ATTRIBUTES_BY_COLUMN: Mapping[str, tuple[str, ...]] = {
    "input_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.usage.prompt_tokens"),
    "output_tokens": (
        "gen_ai.usage.output_tokens",
        "gen_ai.usage.completion_tokens",
        "llm.usage.completion_tokens",
    ),
    "tenant": ("enduser.id", "user.id", "tenant.id"),
    "model": ("gen_ai.response.model", "gen_ai.request.model"),
    "operation": ("gen_ai.operation.name", "llm.request.type"),
}
# OpenTelemetry traces that share a value of one of these attributes are turns of one session.
_CONVERSATION = ("gen_ai.conversation.id", "session.id")
# A span with an attribute that begins so is of a model, an agent or a tool.
_MODEL_PREFIXES = ("gen_ai.", "llm.")
_PLAIN_TYPES = ("intValue", "doubleValue", "stringValue", "boolValue")  # OTLP's keys of a value, by its type.
# OTLP's keys of the times of a span [ns since 1970].
_START, _END = "startTimeUnixNano", "endTimeUnixNano"
# Operations of agents and tools. Their spans enclose calls of models and are no requests themselves.
_AGENT_OPERATIONS = {"invoke_agent", "create_agent", "execute_tool", "invoke_workflow"}
_ERROR_CODES = (2, "2", "STATUS_CODE_ERROR")  # Exporters write the status code of an error in these ways.


def span_rows(
    documents: Iterable[tuple[int, Mapping[str, Any]]], path: Path, tree: SpanTree
) -> Iterator[tuple[int, dict[str, Any]]]:
    """A row for each call of a model, with the number of its line. All spans are added to `tree`.

    A gateway's span and the engine's span within it are one request: if the inner span has a number of input
    tokens, the spans around it give no rows.
    """
    calls: list[tuple[int, str, dict[str, Any]]] = []
    parent_of: dict[str, str] = {}
    for number, document in documents:
        where = f"{path}, line {number}"
        for span in _spans_of(document, where):
            span_id, parent = str(span.get("spanId") or ""), str(span.get("parentSpanId") or "")
            if span_id and parent:
                parent_of[span_id] = parent
            trace_id = str(span.get("traceId") or "")
            times = span.get(_START), span.get(_END)
            attributes = _attributes_of(span, where)
            conversation = next((attributes[key] for key in _CONVERSATION if attributes.get(key)), "")
            tree.add(span_id, parent, trace_id, str(conversation), *times)
            row = _call_row(span, attributes)
            if row is not None:
                # By this number `SpanTree.with_waits` finds the call again.
                row[SERIAL] = tree.add_call(span_id, trace_id, *times)
                calls.append((number, span_id, row))
    outer: set[str] = set()  # The spans around a call that has a number of input tokens.
    for _, span_id, row in calls:
        ancestor = parent_of.get(span_id) if row["input_tokens"] is not None else None
        # The ancestors of a span in `outer` are in `outer` already. This also ends a circle of parents.
        while ancestor and ancestor not in outer:
            outer.add(ancestor)
            ancestor = parent_of.get(ancestor)
    # A request may have several answers (vLLM's parameter n), each with a span. These spans have one request
    # id and start, and give one row: the row of the first answer, with the output tokens of all answers, as
    # far as they are known.
    first_answers: dict[tuple[str, str], dict[str, Any]] = {}
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, span_id, row in calls:
        if span_id in outer:
            continue
        key = str(row["request_id"]), str(row["start"])
        first = row if row["request_id"] is None else first_answers.setdefault(key, row)
        if first is row:  # The first answer, or a call without the id of its request.
            rows.append((number, row))
        elif row["output_tokens"] and first["output_tokens"]:
            first["output_tokens"] = _sum_counts(first["output_tokens"], row["output_tokens"])
    yield from rows


def _sum_counts(count: Any, further: Any) -> Any:
    """The sum of two counts, which OTLP writes as texts; only the first if either is not a number."""
    try:
        return int(count) + int(further)
    except (TypeError, ValueError):
        return count


def _spans_of(document: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
    """The spans of one export, of all its resources and scopes."""
    for resource in _objects(document, MARK, where):
        # OTLP before 0.15 (2022) called scopes instrumentation libraries.
        scopes_key = "scopeSpans" if "scopeSpans" in resource else "instrumentationLibrarySpans"
        for scope in _objects(resource, scopes_key, where):
            yield from _objects(scope, "spans", where)


def _objects(document: Mapping[str, Any], key: str, where: str) -> list[Any]:
    """The list of objects under `key`, empty if there is none. Raises TraceError for anything else."""
    items = document.get(key) or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise TraceError(f"{where}: {key}: expected a list of objects, found {show_value(items)}")
    return items


def _attributes_of(span: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The attributes of a span; None for a value that is a list or an object."""
    attributes = {}
    for pair in _objects(span, "attributes", where):
        value = pair.get("value")
        if isinstance(value, dict) and isinstance(pair.get("key"), str):
            attributes[pair["key"]] = next((value[kind] for kind in _PLAIN_TYPES if kind in value), None)
    return attributes


def _call_row(span: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The columns of a call of a model; None for any other span, such as an agent's, which encloses calls."""
    if not any(key.startswith(_MODEL_PREFIXES) for key in attributes):
        return None
    columns = {
        name: next((attributes[key] for key in keys if attributes.get(key) is not None), None)
        for name, keys in _ATTRIBUTES_BY_COLUMN.items()
    }
    if columns["operation"] in _AGENT_OPERATIONS:
        return None
    status = span.get("status")
    is_error = isinstance(status, dict) and status.get("code") in _ERROR_CODES
    # vLLM writes gen_ai.request.id, the conventions have gen_ai.response.id.
    request_id = attributes.get("gen_ai.request.id") or attributes.get("gen_ai.response.id")
    return {
        **columns,
        "start": span.get(_START),
        "status": "error" if is_error else "ok",
        "request_id": request_id or None,
    }
