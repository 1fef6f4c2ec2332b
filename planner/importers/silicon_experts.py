"""The time of the experts of an LLM [ms], from the kernel tables that silicon.py explains."""

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from planner.models.llm import Llm, cuts_blocks
from planner.models.roofline import experts_layers

MsByTokens = Callable[[int], float]  # Milliseconds as a function of the number of tokens.
# A function of AIConfigurator's description of experts, its name for the kind of node, and the LLM.
ExpertsTimes = Callable[[dict[str, Any], str, Llm], MsByTokens]
# Systems whose tables have only experts drawn from a power law, and no even routing.
ONE_ROUTING = ("a100_sxm",)
# LLMs whose tokens do not choose experts evenly: gpt-oss-120b touches as few experts as the tables' power
# law, on real text (ML.ENERGY, H100) and on random tokens (InferenceX, H200). gpt-oss-20b was not measured.
UNEVEN = ("openai/gpt-oss-120b",)
# The tables' entries for whole experts of these shapes (width of the LLM; width, number and number per token
# of its experts) and formats must be of a GPU that computes all experts of a token. For DeepSeek-V3 in nvfp4
# they are 1.6 to 1.8 times as long as those for slices, which have as many bytes; for no other LLM more than
# 1.2 times (Kimi, GLM-5, MiniMax, Qwen3.5). Measured times are those of slices (docs/evidence/accuracy.md),
# so these are read instead. In fp8-block the entries are too long as well (1.5 to 3.3 times), but measured
# times lie nearer to them, so they stay.
ALL_ON_ONE_GPU = ((7168, 2048, 256, 8, "nvfp4"),)
# A step with more tokens must hold prompts: engines decode at most some hundred sequences at once.
MOST_DECODES = 512


def expert_split(width: int, weights: str, tp: int, *, whole: bool | None = None) -> dict[str, int]:
    """How `tp` GPUs share experts: whole ones for each (vLLM's --enable-expert-parallel), or a slice of all.

    By default each GPU has slices, unless they would cut through the blocks by which fp8 weights are scaled.
    """
    if whole is None:
        whole = cuts_blocks(weights, width, tp)
    return {"moe_tp_size": 1, "moe_ep_size": tp} if whole else {"moe_tp_size": tp, "moe_ep_size": 1}


def operation_ms(engine: Any, operation: dict[str, Any], system: str, llm: Llm) -> MsByTokens:
    """Milliseconds of N tokens in the experts that `operation` describes, in AIConfigurator's format."""
    fields = operation["Moe"]
    shape = ("hidden_size", "inter_size", "num_experts", "topk", "quant_mode")
    if tuple(fields[key] for key in shape) in ALL_ON_ONE_GPU:
        gpus = fields["moe_tp_size"] * fields["moe_ep_size"]
        fields = fields | {"moe_tp_size": gpus, "moe_ep_size": 1}  # The entry for slices.
    power_law = fields["workload_distribution"]
    even_ms, power_law_ms = (
        partial(_read_ms, engine, json.dumps([{"Moe": fields | {"workload_distribution": routing}}]))
        for routing in ("balanced", power_law)
    )
    if system in ONE_ROUTING:
        return power_law_ms
    share = fields["topk"] / fields["num_experts"]
    return partial(experts_ms, share, even_ms, power_law_ms, is_even=llm.name not in UNEVEN)


def dispatch_ms(engine: Any, llm: Llm, gpus: int) -> MsByTokens:
    """Milliseconds of the communication around the experts of all layers, which `gpus` GPUs share.

    Every GPU receives the tokens of all others and returns its part of the sums, as vLLM's all-gathers and
    reduce-scatters do. The argument of the returned function is the number of tokens of all GPUs together.
    """
    layers = experts_layers(llm)
    operations = [
        json.dumps(
            [
                {
                    "MoeDispatch": {
                        "name": "dispatch",
                        "scale_factor": float(layers),
                        "hidden_size": llm.hidden,
                        "topk": llm.experts_per_token,
                        "num_experts": llm.experts,
                        "moe_tp_size": 1,
                        "moe_ep_size": gpus,
                        "attention_dp_size": gpus,
                        "pre_dispatch": is_before,
                        "attn_ar_modeled": False,
                        "backend": "vllm",
                        "flavor": "CustomAllReduce",
                        "comm_quant": "half",
                        "moe_quant": "bfloat16",
                        "attn_cp_size": 1,
                        "is_context": True,
                        # AIConfigurator's defaults, which its format requires.
                        "sms": 12,
                        "scale_num_tokens": 1,
                    }
                }
            ]
        )
        for is_before in (True, False)
    ]

    def both_ways_ms(tokens: int) -> float:
        """Milliseconds in which tokens go to their experts and come back."""
        own = -(-tokens // gpus)  # AIConfigurator wants the tokens of one GPU: one prompt, of length `s`.
        return sum(
            float(engine.evaluate_ops_json(each, is_context=True, batch_size=1, s=own)[0][1])
            for each in operations
        )

    return both_ways_ms


def _read_ms(engine: Any, operation: str, tokens: int) -> float:
    """The time [ms] that the engine gives for this operation on a step of `tokens` decodes."""
    return float(engine.evaluate_ops_json(operation, is_context=False, batch_size=tokens, s=1)[0][1])


def experts_ms(
    share: float, even_ms: MsByTokens, power_law_ms: MsByTokens, tokens: int, *, is_even: bool = True
) -> float:
    """Milliseconds of all experts, of which each token visits the share `share`.

    Tokens of many sequences choose experts evenly and independently, so some choose the same expert. In the
    table's even routing no two tokens share an expert before all are in use. So the time of reading weights
    is looked up at the smaller number of tokens that use as many experts in the table, and the computing time
    of the other tokens is added.

    Steps of more than MOST_DECODES tokens hold prompts, which prefer some experts: they take at least the
    power law's time. Smaller steps take at most that time if decodes do not choose evenly (`is_even` False).
    """
    # An expert is idle with the probability (1 - share)^tokens. In the even routing each token uses the share
    # `share` of the experts, and none that another token uses. There `touched` tokens use as many experts.
    touched = (1 - (1 - share) ** tokens) / share
    low = max(int(touched), 1)
    ms = float(np.interp(touched, (low, low + 1), (even_ms(low), even_ms(low + 1))))
    all_touched = math.ceil(1 / share)
    if tokens > all_touched:
        ms += max(even_ms(tokens) - even_ms(all_touched), 0.0)
    if tokens > MOST_DECODES:
        return max(ms, power_law_ms(tokens))
    return ms if is_even else min(ms, power_law_ms(tokens))
