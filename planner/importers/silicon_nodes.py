"""Experts on several nodes out of AIConfigurator's tables: the way there and back, and the experts' own time.

DeepEP was measured on 2, 4 and 8 nodes of 8 H100 (a 400 Gb/s adapter each) for DeepSeek-V3's shape, with the
experts' kernels beside it, in SGLang 0.5.6 and 0.5.10. vLLM runs the same DeepEP with kernels of the same
kind (DeepGEMM, contiguous and masked). Its own tables have one node, and AIConfigurator answers for several
with these, as estimates; so those of SGLang are read. The tables of H200 are those of H100.

  low latency       tokens of one GPU, to 256; experts in CUDA graphs, each with room for all
  high throughput   at NUM_SMS, which is what DeepEP and vLLM take; experts without CUDA graphs, so none take
                    less than their launches, 0.39 ms a layer
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np

from planner.domain import Gpu
from planner.errors import InputError
from planner.importers.silicon_config import INSTALL, experts_format
from planner.importers.silicon_experts import Milliseconds, experts_ms
from planner.models.all2all import LOW_LATENCY, All2All
from planner.models.llm import Llm
from planner.models.roofline import experts_layers

SYSTEMS = {"h100-80g": "h100_sxm", "h200-141g": "h200_sxm"}
NODES = (2, 4, 8)
WAYS, EXPERTS = "0.5.6.post2", "0.5.10"  # Versions of the tables.
NUM_SMS = 20
DRAWS = "power_law_1.01"
EVEN = "uniform"


def why_not_on_nodes(llm: Llm, gpu: Gpu, nodes: int) -> str:
    """Why there are no kernel times of experts on so many nodes; empty if there are."""
    shape = (llm.hidden, llm.experts_per_token, llm.experts, llm.ffn, experts_format(llm))
    if gpu.name not in SYSTEMS or nodes not in NODES or shape != (7168, 8, 256, 2048, "fp8-block"):
        return (
            "AIConfigurator has experts on several nodes for 2, 4 and 8 nodes of H100 and H200, and for the "
            "shape of DeepSeek-V3's alone"
        )
    return ""


def on_nodes_ms(llm: Llm, gpu: Gpu, gpus: int, kind: All2All) -> Milliseconds:
    """Time of the experts of all layers on this many GPUs [ms], by the number of tokens on all of them, with
    sending tokens to the experts and back.
    """
    nodes = gpus // int(gpu.gpus_per_node)
    if why := why_not_on_nodes(llm, gpu, nodes):
        raise InputError(f"{llm.name} on {nodes} nodes of {gpu.name}: {why}")
    system, layers, is_low = SYSTEMS[gpu.name], experts_layers(llm), kind == LOW_LATENCY
    way_ms = _along(ways_ms(system, nodes, kind))
    even_ms, drawn_ms = (_experts_ms(system, gpus, is_low, draws) for draws in (EVEN, DRAWS))
    if is_low:
        own_ms: Milliseconds = partial(experts_ms, llm.experts_per_token / llm.experts, even_ms, drawn_ms)
    else:

        def own_ms(tokens: int) -> float:
            return max(even_ms(tokens), drawn_ms(tokens))

    return lambda tokens: layers * (way_ms(-(-tokens // gpus)) + own_ms(tokens))


@cache
def ways_ms(system: str, nodes: int, kind: All2All) -> Mapping[int, float]:
    """Milliseconds of one layer there and back, by the tokens of each GPU, as measured on `system`
    (AIConfigurator's name). InputError where AIConfigurator is not installed.
    """
    is_low = kind == LOW_LATENCY
    table = _table(system, WAYS, "_wideep_deepep_ll_data" if is_low else "_wideep_deepep_normal_data")
    measured_ms = table[nodes][7168][8][256]
    us = _latencies(measured_ms if is_low else measured_ms[NUM_SMS])
    return {tokens: each / 1e3 for tokens, each in us.items()}


@cache
def _experts_ms(system: str, gpus: int, is_low: bool, draws: str) -> Milliseconds:
    """Time of the experts of one layer [ms], by the number of tokens on all GPUs."""
    table = _table(system, EXPERTS, "_wideep_generation_moe_data" if is_low else "_wideep_context_moe_data")
    of_format = next(format_table for name, format_table in table.items() if str(name).endswith("fp8_block"))
    return _along(_latencies(of_format[draws][8][256][7168][2048][1][gpus]))


@cache
def _table(system: str, version: str, name: str) -> Mapping[Any, Any]:
    try:
        from aiconfigurator_core.sdk import perf_database
        from aiconfigurator_core.sdk.engine_table_view import fetch_table_view
    except ImportError:
        raise InputError(INSTALL) from None
    database = perf_database.get_database(system, "sglang", version, allow_unlisted_version=True)
    table: Mapping[Any, Any] = fetch_table_view(database, name)
    return table


def _latencies(by_tokens: Mapping[Any, Any]) -> dict[int, float]:
    return {int(tokens): float(row["latency"]) for tokens, row in by_tokens.items()}


def _along(by_tokens: Mapping[int, float]) -> Milliseconds:
    """Time by the number of tokens, on straight lines between the measured sizes, and never less with more
    tokens. The slope of the last two sizes goes on beyond them. Fewer tokens than the smallest size take as
    long as it.
    """
    sizes = np.array(sorted(by_tokens), dtype=float)
    values = np.maximum.accumulate(np.array([by_tokens[int(size)] for size in sizes]))
    slope = (values[-1] - values[-2]) / (sizes[-1] - sizes[-2])

    def milliseconds(tokens: int) -> float:
        return float(np.interp(tokens, sizes, values) + slope * max(tokens - sizes[-1], 0.0))

    return milliseconds
