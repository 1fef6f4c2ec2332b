"""Tables that programs write: told by their columns, read by the meaning those have.

LiteLLM: table LiteLLM_SpendLogs of schema.prisma (BerriAI/litellm, commit 029f645). Langfuse: observations as
its pages, its API and its blob storage export them (langfuse.com, "Blob storage export field reference"; keys
of `usage_details` that begin with input and output add up, as its server does). Envoy: the access log of
envoyproxy/ai-gateway (commit f3336c5, accesslogs-envoy-proxy-llm.yaml).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from planner.traffic.logs.log_columns_map import Columns

_INPUT, _OUTPUT = "input tokens of usage", "output tokens of usage"
_USAGE = ("usageDetails", "usage_details", "usage")


@dataclass(frozen=True, slots=True)
class Known:
    """A table of a program: `marks` are columns it must have; `likely` are the names that a role may have.

    `prepare` makes the columns of a row that the file does not have as such.
    """

    name: str
    marks: tuple[frozenset[str], ...]
    likely: Mapping[str, tuple[str, ...]]
    units: Mapping[str, str]
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    made: tuple[str, ...] = ()  # Columns that `prepare` makes.
    reads: tuple[str, ...] = ()  # Columns that `prepare` needs.

    def columns(self, names: Collection[str]) -> Columns | None:
        """What the columns of a table are; None where it is not such a table."""
        if not any(marks <= set(names) for marks in self.marks):
            return None
        there = {*names, *self.made}
        column_by_role = {
            role: next((name for name in likely if name in there), "") for role, likely in self.likely.items()
        }
        if not (column_by_role["input"] and column_by_role["output"]):
            return None
        return Columns(
            **column_by_role,
            units={role: unit for role, unit in self.units.items() if column_by_role.get(role)},
        )


def _langfuse_usage(row: dict[str, Any]) -> dict[str, Any]:
    """Tokens in and out, of objects whose keys are kinds of tokens; older rows have promptTokens."""
    usage: Any = next((row[name] for name in _USAGE if row.get(name)), None)
    if isinstance(usage, str):
        try:
            usage = json.loads(usage)
        except ValueError:
            usage = None
    older = {
        "input": row.get("inputUsage", row.get("promptTokens", row.get("prompt_tokens"))),
        "output": row.get("outputUsage", row.get("completionTokens", row.get("completion_tokens"))),
    }
    made: dict[str, Any] = {}
    for side, name in (("input", _INPUT), ("output", _OUTPUT)):
        parts = [
            value
            for key, value in (usage.items() if isinstance(usage, dict) else ())
            if str(key).startswith(side) and isinstance(value, int | float) and not isinstance(value, bool)
        ]
        made[name] = sum(parts) if parts else older[side]
    return {**row, **made}


TABLES = (
    Known(
        "LiteLLM",
        (frozenset({"call_type", "startTime", "prompt_tokens", "completion_tokens"}),),
        {
            "arrival": ("startTime",),
            "input": ("prompt_tokens",),
            "output": ("completion_tokens",),
            "tenant": ("team_id", "end_user", "user", "api_key"),
            "model": ("model_group", "model"),
            "status": ("status",),
            "kind": ("call_type",),
            "request_id": ("request_id",),
            "cache_hit": ("cache_hit",),
        },
        {},
    ),
    Known(
        "Langfuse",
        (
            frozenset({"type", "startTime", "traceId"}),
            frozenset({"type", "startTime", "usageDetails"}),
            frozenset({"type", "startTime", "inputUsage", "outputUsage"}),
            frozenset({"type", "start_time", "usage_details"}),
        ),
        {
            "arrival": ("startTime", "start_time"),
            "input": (_INPUT,),
            "output": (_OUTPUT,),
            "tenant": ("userId", "user_id"),
            "model": ("providedModelName", "provided_model_name", "model"),
            "status": ("level",),
            "kind": ("type",),
            "request_id": ("id",),
        },
        {},
        _langfuse_usage,
        (_INPUT, _OUTPUT),
        (*_USAGE, "inputUsage", "outputUsage", "promptTokens", "completionTokens"),
    ),
    Known(
        "Envoy AI Gateway",
        (
            frozenset(
                {"start_time", "response_code", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"}
            ),
        ),
        {
            "arrival": ("start_time",),
            "input": ("gen_ai.usage.input_tokens",),
            "output": ("gen_ai.usage.output_tokens",),
            "model": ("gen_ai.request.model",),
            "status": ("response_code",),
            "kind": ("x-envoy-origin-path", "path"),
            "request_id": ("x-request-id",),
        },
        {},
    ),
)
