"""Experts on several nodes by AIConfigurator's tables: the time of their kernels, and of sending tokens to
them and back.

DeepEP, which carries the tokens (planner/models/all2all.py), was measured on 2, 4 and 8 nodes of 8 H100 (a
400 Gb/s adapter each) for DeepSeek-V3's shape, and the experts' kernels too, in SGLang 0.5.6 and 0.5.10. vLLM
runs the same DeepEP with kernels of the same kind (DeepGEMM, contiguous and masked). AIConfigurator's tables
of vLLM have one node only; for several it estimates vLLM by the tables of SGLang, which are read here. For
H200 it ships H100's numbers.

  low latency       decodes, up to all2all.MOST_LOW_LATENCY_TOKENS of a GPU; experts in CUDA graphs, where
                    each expert has room for all tokens
  high throughput   prefills, on NUM_SMS SMs, as many as DeepEP and vLLM take; experts without CUDA graphs, so
                    no measured layer takes less than the launches of its kernels, 0.39 ms
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

from planner.domain import Gpu
from planner.errors import InputError
from planner.importers.silicon_config import experts_format
from planner.importers.silicon_experts import MsByTokens, experts_ms
from planner.importers.silicon_tables import interpolate_times, kernel_table, table_times
from planner.models.all2all import LOW_LATENCY, All2All
from planner.models.llm import Llm
from planner.models.roofline import experts_layers

# The GPUs with tables of several nodes, and AIConfigurator's names of their systems.
NODE_SYSTEMS = {"h100-80g": "h100_sxm", "h200-141g": "h200_sxm"}
NODES = (2, 4, 8)
# Versions of SGLang in which the tables of DeepEP and of the experts were measured.
DEEPEP_VERSION, EXPERTS_VERSION = "0.5.6.post2", "0.5.10"
NUM_SMS = 20  # See "high throughput" above.
# The tables are of DeepSeek-V3's shape: hidden size, experts per token, experts, an expert's width, format.
HIDDEN, TOPK, EXPERTS, WIDTH, FORMAT = 7168, 8, 256, 2048, "fp8-block"
TP = 1  # In the tables each GPU has whole experts.
# The tables' names for how tokens choose experts: some more often than others, or all equally often.
POWER_LAW = "power_law_1.01"
EVEN = "uniform"


def why_not_on_nodes(llm: Llm, gpu: Gpu, nodes: int) -> str:
    """Why there are no kernel times of experts on this many nodes; empty if there are."""
    shape = (llm.hidden, llm.experts_per_token, llm.experts, llm.ffn, experts_format(llm))
    has_tables = shape == (HIDDEN, TOPK, EXPERTS, WIDTH, FORMAT)
    if gpu.name not in NODE_SYSTEMS or nodes not in NODES or not has_tables:
        return (
            "AIConfigurator has experts on several nodes only for 2, 4 and 8 nodes of H100 and H200, and "
            "only for experts of DeepSeek-V3's shape"
        )
    return ""


def on_nodes_ms(llm: Llm, gpu: Gpu, gpus: int, kind: All2All) -> MsByTokens:
    """Time of all layers' experts on GPUs that fill whole nodes [ms], by the tokens on all of these GPUs.

    It includes the time of tokens on their way to the experts and back.
    """
    nodes = gpus // gpu.gpus_per_node
    if why := why_not_on_nodes(llm, gpu, nodes):
        raise InputError(f"{llm.name} on {nodes} nodes of {gpu.name}: {why}")
    system, layers = NODE_SYSTEMS[gpu.name], experts_layers(llm)
    is_low = kind == LOW_LATENCY
    exchange_ms = interpolate_times(measured_exchange_ms(system, nodes, kind))
    even_ms, uneven_ms = (_experts_ms(system, gpus, is_low, routing) for routing in (EVEN, POWER_LAW))
    if is_low:
        # Decodes are of many sequences, which choose experts evenly. `experts_ms` takes the uneven times for
        # steps that are so large that they hold prompts.
        compute_ms: MsByTokens = partial(experts_ms, llm.experts_per_token / llm.experts, even_ms, uneven_ms)
    else:

        def compute_ms(tokens: int) -> float:
            return max(even_ms(tokens), uneven_ms(tokens))  # Prompts prefer some experts.

    def layers_ms(tokens: int) -> float:
        tokens_of_gpu = -(-tokens // gpus)
        return layers * (exchange_ms(tokens_of_gpu) + compute_ms(tokens))

    return layers_ms


@cache
def measured_exchange_ms(system: str, nodes: int, kind: All2All) -> Mapping[int, float]:
    """Milliseconds that tokens of one layer take to the experts and back, by the tokens of each GPU, as
    measured on `system` (AIConfigurator's name). Raises InputError if AIConfigurator is not installed.
    """
    is_low = kind == LOW_LATENCY
    table = kernel_table(
        system, "sglang", DEEPEP_VERSION, "_wideep_deepep_ll_data" if is_low else "_wideep_deepep_normal_data"
    )
    shape_table = table[nodes][HIDDEN][TOPK][EXPERTS]
    measured_us = table_times(shape_table if is_low else shape_table[NUM_SMS])  # DeepEP's tables are in us.
    return {tokens: exchange_us / 1e3 for tokens, exchange_us in measured_us.items()}


@cache
def _experts_ms(system: str, gpus: int, is_low: bool, routing: str) -> MsByTokens:
    """Time of a layer's experts [ms] by the tokens on all GPUs; `routing` is EVEN or POWER_LAW."""
    table = kernel_table(
        system,
        "sglang",
        EXPERTS_VERSION,
        "_wideep_generation_moe_data" if is_low else "_wideep_context_moe_data",
    )
    # FORMAT is "fp8_block" in the tables, behind a prefix.
    of_format = next(format_table for name, format_table in table.items() if str(name).endswith("fp8_block"))
    return interpolate_times(table_times(of_format[routing][TOPK][EXPERTS][HIDDEN][WIDTH][TP][gpus]))
