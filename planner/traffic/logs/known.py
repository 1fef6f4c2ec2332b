"""Tables that known programs write, recognised by their columns; and what each column means.

LiteLLM: table LiteLLM_SpendLogs of schema.prisma (BerriAI/litellm, commit 029f645). Langfuse: observations as
its pages, its API and its blob storage export them (langfuse.com, "Blob storage export field reference"; keys
of `usage_details` that begin with input and output add up, as its server does). Envoy: the access log of
envoyproxy/ai-gateway (commit f3336c5, accesslogs-envoy-proxy-llm.yaml).
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from planner.traffic.logs.log_columns_map import Columns

# Names of the columns that `_langfuse_usage` adds; no program has columns of these names.
_INPUT, _OUTPUT = "input tokens of usage", "output tokens of usage"
_USAGE = ("usageDetails", "usage_details", "usage")  # The first of these columns that a row has is read.


@dataclass(frozen=True, slots=True)
class ProgramTable:
    """A table of a program.

    A file is recognised if it has all columns of one of the sets `marks`. `names_by_role` has the
    names that a role's column may have, the preferred one first. `prepare` computes the columns
    `added_columns` of a row from its columns `read_columns`.
    """

    name: str
    marks: tuple[frozenset[str], ...]
    names_by_role: Mapping[str, tuple[str, ...]]
    units: Mapping[str, str]
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    added_columns: tuple[str, ...] = ()
    read_columns: tuple[str, ...] = ()

    @property
    def format_name(self) -> str:
        """The value of --format for this program: "envoy-ai-gateway" for Envoy AI Gateway."""
        return self.name.lower().replace(" ", "-")

    def columns(self, names: Collection[str]) -> Columns | None:
        """The roles of a table's columns; None for another table."""
        if not any(marks <= set(names) for marks in self.marks):
            return None
        all_names = {*names, *self.added_columns}
        column_by_role = {
            role: next((name for name in role_names if name in all_names), "")
            for role, role_names in self.names_by_role.items()
        }
        if not (column_by_role["input"] and column_by_role["output"]):  # This is no table of requests.
            return None
        return Columns(
            **column_by_role,
            units={role: unit for role, unit in self.units.items() if column_by_role.get(role)},
        )


def _langfuse_usage(row: dict[str, Any]) -> dict[str, Any]:
    """The row with columns for its input and output tokens: sums over the kinds of tokens in its usage
    object. Rows of older versions have columns such as promptTokens in place of this object.
    """
    usage: Any = next((row[name] for name in _USAGE if row.get(name)), None)
    if isinstance(usage, str):
        try:
            usage = json.loads(usage)
        except ValueError:
            usage = None  # The text is cut off or not JSON, so the older columns are used.
    older = {
        "input": row.get("inputUsage", row.get("promptTokens", row.get("prompt_tokens"))),
        "output": row.get("outputUsage", row.get("completionTokens", row.get("completion_tokens"))),
    }
    counts: dict[str, Any] = {}
    for side, name in (("input", _INPUT), ("output", _OUTPUT)):
        kind_counts = [
            value
            for key, value in (usage.items() if isinstance(usage, dict) else ())
            if str(key).startswith(side) and isinstance(value, int | float) and not isinstance(value, bool)
        ]
        counts[name] = sum(kind_counts) if kind_counts else older[side]
    return {**row, **counts}


TABLES = (
    ProgramTable(
        name="LiteLLM",
        marks=(frozenset({"call_type", "startTime", "prompt_tokens", "completion_tokens"}),),
        names_by_role={
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
        units={},
    ),
    ProgramTable(
        name="Langfuse",
        marks=(
            frozenset({"type", "startTime", "traceId"}),
            frozenset({"type", "startTime", "usageDetails"}),
            frozenset({"type", "startTime", "inputUsage", "outputUsage"}),
            frozenset({"type", "start_time", "usage_details"}),
        ),
        names_by_role={
            "arrival": ("startTime", "start_time"),
            "input": (_INPUT,),
            "output": (_OUTPUT,),
            "tenant": ("userId", "user_id"),
            "model": ("providedModelName", "provided_model_name", "model"),
            "status": ("level",),
            "kind": ("type",),
            "request_id": ("id",),
        },
        units={},
        prepare=_langfuse_usage,
        added_columns=(_INPUT, _OUTPUT),
        read_columns=(*_USAGE, "inputUsage", "outputUsage", "promptTokens", "completionTokens"),
    ),
    ProgramTable(
        name="Envoy AI Gateway",
        marks=(
            frozenset(
                {"start_time", "response_code", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"}
            ),
        ),
        names_by_role={
            "arrival": ("start_time",),
            "input": ("gen_ai.usage.input_tokens",),
            "output": ("gen_ai.usage.output_tokens",),
            "model": ("gen_ai.request.model",),
            "status": ("response_code",),
            "kind": ("x-envoy-origin-path", "path"),
            "request_id": ("x-request-id",),
        },
        units={},
    ),
)
