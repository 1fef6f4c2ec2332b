"""The time of gpt-oss's experts in Marlin's kernel, from the kernel tables that silicon.py explains.

On Hopper vLLM computes gpt-oss's experts with Triton by default, and with VLLM_MXFP4_USE_MARLIN=1 with
Marlin, which reads weights faster and multiplies more slowly. AIConfigurator measured Marlin in mxfp4 only
for the experts of Kimi-K3, which are about as wide (3072 by 3584 weights; gpt-oss's are 2880 by 2880). A
kernel takes as long for each weight of an expert if each expert has as many tokens:

    t(N) = t0 + w (t'(N') - t0')      N' = N (k / E) / (k' / E')      w = E h i / (E' h' i')

t are milliseconds of a layer for N tokens, each of which chooses k of E experts of h by i weights; the
symbols of Kimi-K3 have a prime. t0 is the time of launches and of sorting tokens by experts: the least time
of either table.
"""

from collections.abc import Mapping
from typing import Any

from planner.importers.silicon_experts import MsByTokens
from planner.importers.silicon_tables import experts_by_routing, format_tables, interpolate_times, table_times
from planner.models.llm import Llm

VLLM_VERSION = "0.24.0"  # The version in which the tables were measured.
FORMAT = "w4a16_mxfp4"  # AIConfigurator's name of the format.
TOPK, EXPERTS, HIDDEN, WIDTH = 16, 896, 3584, 3072  # k', E', h', i'
SHAPE = ("topk", "num_experts", "hidden_size", "inter_size")  # The keys of a table, the outermost first.


def marlin_operation_ms(operation: dict[str, Any], system: str, llm: Llm) -> MsByTokens:
    """Milliseconds of N tokens in the experts that `operation` describes, in AIConfigurator's format."""
    fields = operation["Moe"]
    by_routing = format_tables(system, "vllm", VLLM_VERSION, FORMAT)
    topk, experts, hidden, width = (fields[key] for key in SHAPE)
    more_tokens = topk / experts / (TOPK / EXPERTS)
    weights_frac = experts * hidden * width / (EXPERTS * HIDDEN * WIDTH)

    def layer_ms(routing: str) -> MsByTokens:
        """Milliseconds of a layer by its tokens, from the table of this routing."""
        own = by_routing[routing][topk][experts][hidden][width]
        marlin = by_routing[routing][TOPK][EXPERTS][HIDDEN][WIDTH]
        own_launches_ms, launches_ms = _least_ms(own), _least_ms(marlin)
        marlin_ms = interpolate_times(table_times(marlin[fields["moe_tp_size"]][fields["moe_ep_size"]]))
        return lambda tokens: (
            own_launches_ms + weights_frac * (marlin_ms(round(tokens * more_tokens)) - launches_ms)
        )

    lacks = f"{llm.name} on {system}: AIConfigurator lacks Marlin's experts in {FORMAT}"
    return experts_by_routing(fields, llm, layer_ms, lacks)


def _least_ms(splits: Mapping[int, Mapping[int, Any]]) -> float:
    """The least time of a table, whose keys are GPUs that share slices, and GPUs that share whole experts."""
    times = (table_times(by_tokens) for by_whole in splits.values() for by_tokens in by_whole.values())
    return min(min(each.values()) for each in times)
