"""`plan mcp`: the planner for programs that speak the Model Context Protocol, by the official SDK."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from planner import __version__
from planner.errors import InputError, PlannerError

INSTRUCTIONS = (
    "Capacity planning for LLM serving. `plan` finds the cheapest fleet that keeps an SLO, `goodput` how "
    "much a fleet carries, `simulate` what traffic meets on it, `what_if` what a change moves, `explain` "
    "why a written plan is as it is, `catalog` which GPUs, LLMs and tasks are known. Limits carry units "
    "('2 s'). Deploy the answer named production, not the one on paper, and repeat every warning."
)


def serve_mcp() -> None:
    """Answer an MCP client over stdin and stdout: tools plan, simulate, goodput, what_if, explain, catalog.

    Needs the package's extra named mcp. Resources schema://slo and the like are the JSON Schemas.
    """
    build_server().run("stdio")


def build_server() -> Any:
    """The server with its tools and resources. Raises InputError without the extra."""
    from planner.api.mcp_tools import TOOLS
    from planner.documents.schemas.all_schemas import NAMES

    try:
        sdk = importlib.import_module("mcp.server.mcpserver")
        errors = importlib.import_module("mcp.server.mcpserver.exceptions")
    except ImportError:
        raise InputError("mcp: needs the MCP SDK; pip install 'fleetplan[mcp]'") from None
    server = sdk.MCPServer("fleetplan", instructions=INSTRUCTIONS, version=__version__, log_level="ERROR")
    for tool in TOOLS:
        server.tool()(_with_one_line(tool, errors.ToolError))
    for name in NAMES:
        resource = server.resource(f"schema://{name}", name=name, mime_type="application/schema+json")
        resource(_schema_reader(name))
    return server


def _schema_reader(name: str) -> Callable[[], str]:
    """A function that gives the schema of this name when a client asks for it."""

    def read_schema() -> str:
        from planner.documents.catalog import read_catalog
        from planner.documents.schemas.all_schemas import schema_text

        return schema_text(name, read_catalog())

    return read_schema


def _with_one_line(tool: Callable[..., Any], error: type[Exception]) -> Callable[..., Any]:
    """The tool with each PlannerError replaced by the protocol's `error`, its message in one line."""

    @functools.wraps(tool)
    def answer_in_one_line(*arguments: Any, **options: Any) -> Any:
        try:
            return tool(*arguments, **options)
        except PlannerError as bad:
            raise error(" ".join(str(bad).split())) from None

    return answer_in_one_line
