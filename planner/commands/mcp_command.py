"""`plan mcp`: the planner for programs that speak the Model Context Protocol, by the official SDK. Imports
within functions keep other commands fast.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from planner import __version__
from planner.errors import InputError, PlannerError
from planner.files.document_values import refuse_unknown, show_value

NO_VALUE = type(None)
# By annotation of an argument: the valid types of its value, and their name in errors.
ARGUMENT_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "Document": ((dict,), "an object"),
    "Document | str": ((dict, str), "an object, or the path of a file or folder"),
    "Document | str | None": ((dict, str, NO_VALUE), "an object, or the path of a file or folder"),
    "str": ((str,), "a text"),
    "str | None": ((str, NO_VALUE), "the path of a file or folder"),
    "float": ((int, float), "a number"),
    "float | None": ((int, float, NO_VALUE), "a number"),
    "int": ((int,), "a whole number"),
    "bool": ((bool,), "true or false"),
}
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
    server = _server_class(sdk.MCPServer, errors.ToolError, {tool.__name__: tool for tool in TOOLS})(
        "fleetplan", instructions=INSTRUCTIONS, version=__version__, log_level="ERROR"
    )
    for tool in TOOLS:
        server.tool()(_with_one_line(tool, errors.ToolError))
    for name in NAMES:
        resource = server.resource(f"schema://{name}", name=name, mime_type="application/schema+json")
        resource(_schema_reader(name))
    return server


def _server_class(base: Any, error_type: type[Exception], tools: Mapping[str, Callable[..., Any]]) -> Any:
    """The SDK's server with `check_arguments` before each call. The SDK by itself ignores unknown arguments,
    and reports missing ones or wrong types in pydantic's words.
    """

    class CheckingServer(base):  # type: ignore[misc]
        async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
            if name in tools:
                try:
                    check_arguments(tools[name], arguments)
                except InputError as error:
                    raise error_type(f"{name}: {error}") from None
            return await super().call_tool(name, arguments, context)

    return CheckingServer


def check_arguments(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise InputError for an unknown argument, a missing argument, or an argument of a wrong type."""
    parameters = inspect.signature(tool).parameters
    refuse_unknown(arguments, parameters, "arguments")
    for name, parameter in parameters.items():
        allowed, description = ARGUMENT_TYPES[str(parameter.annotation)]
        if name not in arguments:
            if parameter.default is inspect.Parameter.empty:
                raise InputError(f"{name}: is missing; give {description}")
        # In Python a bool is an int, but a client that gives true does not mean 1.
        elif not isinstance(arguments[name], allowed) or (
            isinstance(arguments[name], bool) and bool not in allowed
        ):
            raise InputError(f"{name}: expected {description}, found {show_value(arguments[name])}")


def _schema_reader(name: str) -> Callable[[], str]:

    def read_schema() -> str:
        from planner.documents.catalog import read_catalog
        from planner.documents.schemas.all_schemas import schema_text

        return schema_text(name, read_catalog())

    return read_schema


def _with_one_line(tool: Callable[..., Any], error_type: type[Exception]) -> Callable[..., Any]:
    """The tool with each PlannerError replaced by the protocol's `error_type`, its message in one line."""

    @functools.wraps(tool)
    def answer_in_one_line(*arguments: Any, **options: Any) -> Any:
        try:
            return tool(*arguments, **options)
        except PlannerError as error:
            raise error_type(error.line) from None

    return answer_in_one_line
