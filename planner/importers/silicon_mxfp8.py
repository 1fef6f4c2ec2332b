"""The time of experts in mxfp4 with activations in mxfp8, from the kernel tables that silicon.py explains.

By default vLLM multiplies mxfp4 in 16 bits on Blackwell; with VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1 it uses
FlashInfer, which multiplies in 8 bits, twice as fast. AIConfigurator measured that kernel only in SGLang.
"""

from typing import Any

from planner.importers.silicon_experts import MsByTokens
from planner.importers.silicon_tables import experts_by_routing, format_tables, interpolate_times, table_times
from planner.models.llm import Llm

SGLANG_VERSION = "0.5.14"  # The version in which the tables were measured.
FORMAT = "w4a8_mxfp4_mxfp8"  # AIConfigurator's name of the format.


def mxfp8_operation_ms(operation: dict[str, Any], system: str, llm: Llm) -> MsByTokens:
    """Milliseconds of N tokens in the experts that `operation` describes, in AIConfigurator's format."""
    fields = operation["Moe"]
    by_routing = format_tables(system, "sglang", SGLANG_VERSION, FORMAT)

    def layer_ms(routing: str) -> MsByTokens:
        """Milliseconds of a layer by its tokens, from the table of this routing."""
        table = by_routing[routing]
        for key in ("topk", "num_experts", "hidden_size", "inter_size", "moe_tp_size", "moe_ep_size"):
            table = table[fields[key]]
        return interpolate_times(table_times(table))

    lacks = f"{llm.name} on {system}: AIConfigurator lacks its experts in {FORMAT}"
    return experts_by_routing(fields, llm, layer_ms, lacks)
