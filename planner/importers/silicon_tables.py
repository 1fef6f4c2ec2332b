"""Tables of measured kernels that AIConfigurator ships, and times of experts from them.

AIConfigurator, which is optional, is imported inside functions. `MsByTokens` is a time in milliseconds as a
function of the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np

from planner.errors import InputError
from planner.importers.silicon_config import INSTALL
from planner.importers.silicon_experts import UNEVEN, MsByTokens, experts_ms
from planner.models.llm import Llm


@cache
def kernel_table(system: str, engine: str, version: str, name: str) -> Mapping[Any, Any]:
    """AIConfigurator's table of this `name` for a version of an engine, with nested keys. Raises InputError
    if AIConfigurator is not installed.
    """
    try:
        from aiconfigurator_core.sdk import perf_database
        from aiconfigurator_core.sdk.engine_table_view import fetch_table_view
    except ImportError:
        raise InputError(INSTALL) from None
    # The tables of these versions are shipped, but are not in AIConfigurator's list of supported versions.
    database = perf_database.get_database(system, engine, version, allow_unlisted_version=True)
    table: Mapping[Any, Any] = fetch_table_view(database, name)
    return table


def format_tables(system: str, engine: str, version: str, name: str) -> Mapping[str, Any]:
    """The tables of experts in the format of this `name` by routing; empty if it was not measured."""
    tables = kernel_table(system, engine, version, "_moe_data")
    return next((tables[each] for each in tables if each.name == name), {})


def experts_by_routing(
    fields: Mapping[str, Any], llm: Llm, layer_ms: Callable[[str], MsByTokens], lacks: str
) -> MsByTokens:
    """Milliseconds of the experts of all layers, which AIConfigurator describes by `fields`. `layer_ms` gives
    those of one layer, from the table of a routing. Raises InputError with the message `lacks` if a table is
    missing.
    """
    try:
        one_layer_ms = layer_ms("balanced"), layer_ms(fields["workload_distribution"])
    except KeyError:
        raise InputError(lacks) from None
    even_ms, power_law_ms = (_of_layers(each, fields["scale_factor"]) for each in one_layer_ms)
    share = fields["topk"] / fields["num_experts"]
    return partial(experts_ms, share, even_ms, power_law_ms, is_even=llm.name not in UNEVEN)


def _of_layers(layer_ms: MsByTokens, layers: float) -> MsByTokens:
    """Milliseconds of all layers by their tokens."""
    return lambda tokens: float(layers * layer_ms(tokens))


def table_times(by_tokens: Mapping[Any, Any]) -> dict[int, float]:
    """The latencies of a table whose only key is the number of tokens, by that number."""
    return {int(tokens): float(row["latency"]) for tokens, row in by_tokens.items()}


def interpolate_times(by_tokens: Mapping[int, float]) -> MsByTokens:
    """Time by the number of tokens: straight lines between the measured sizes, never falling.

    The slope of the last two sizes continues beyond them; below the smallest size the time is constant.
    """
    sizes = np.array(sorted(by_tokens), dtype=float)
    times_ms = np.maximum.accumulate(np.array([by_tokens[int(size)] for size in sizes]))
    slope = (times_ms[-1] - times_ms[-2]) / (sizes[-1] - sizes[-2])

    def milliseconds(tokens: int) -> float:
        return float(np.interp(tokens, sizes, times_ms) + slope * max(tokens - sizes[-1], 0.0))

    return milliseconds
