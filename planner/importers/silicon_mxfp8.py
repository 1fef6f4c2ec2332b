"""The time of experts in mxfp4 with activations in mxfp8, from the kernel tables that silicon.py explains.

By default vLLM multiplies mxfp4 in 16 bits on Blackwell; with VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1 it has
FlashInfer multiply in 8, on tensor cores twice as fast. AIConfigurator measured that kernel in SGLang alone.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from planner.errors import InputError
from planner.importers.silicon_experts import UNEVEN, MsByTokens, experts_ms
from planner.importers.silicon_nodes import interpolate_times, kernel_table, table_times
from planner.models.llm import Llm

SGLANG_VERSION = "0.5.14"  # In which the tables were measured.
FORMAT = "w4a8_mxfp4_mxfp8"  # AIConfigurator's name.


def mxfp8_operation_ms(operation: dict[str, Any], system: str, llm: Llm) -> MsByTokens:
    """Milliseconds of N tokens in the experts that `operation` describes, in AIConfigurator's format."""
    fields = operation["Moe"]
    tables = kernel_table(system, "sglang", SGLANG_VERSION, "_moe_data")
    by_routing: Mapping[str, Any] = next((tables[name] for name in tables if name.name == FORMAT), {})

    def table_ms(routing: str) -> MsByTokens:
        """Milliseconds of a layer by its tokens, from the table of this routing."""
        table = by_routing[routing]
        for key in ("topk", "num_experts", "hidden_size", "inter_size", "moe_tp_size", "moe_ep_size"):
            table = table[fields[key]]
        layer_ms = interpolate_times(table_times(table))
        return lambda tokens: float(fields["scale_factor"]) * layer_ms(tokens)

    try:
        even_ms, power_law_ms = table_ms("balanced"), table_ms(fields["workload_distribution"])
    except KeyError:
        raise InputError(f"{llm.name} on {system}: AIConfigurator lacks its experts in {FORMAT}") from None
    share = fields["topk"] / fields["num_experts"]
    return partial(experts_ms, share, even_ms, power_law_ms, is_even=llm.name not in UNEVEN)
