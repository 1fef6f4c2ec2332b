"""What older versions of vLLM add to the kernels of the tables, which are of version 0.24.

Up to 0.18 a layer of experts in fp8 by blocks took longer by the same time at every batch, on H100, H200 and
B200 alike: launches and quantisation that later versions fuse. So it is seconds per layer, and no factor.

    t = g + l layers          l by the version of the engine, layers those with routed experts

Found between predictions and measured runs (docs/evidence/accuracy.md): 77 to 227 us a layer on 0.11 and
0.12 (Qwen3-235B-A22B-FP8 in five places, DeepSeek-V3.1 in one), 37 to 59 on 0.16 and 0.17, 13 to 23 on 0.18
(MiniMax-M2.5), and -19 to 10 on 0.19. The other formats of weights show nothing of the kind.
"""

from __future__ import annotations

from dataclasses import replace

from planner.models.engine import Engine
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.models.roofline import experts_layers

BLOCK_FORMAT = "fp8-block"
# The first version that no longer takes so long, and what versions before it take per layer.
UNTIL_VERSION = (((0, 14), 150e-6), ((0, 18), 45e-6), ((0, 19), 15e-6))


def longer_layer_s(llm: Llm, engine: Engine | None) -> float:
    """Seconds that a layer of experts takes longer on the version of this engine than in the tables."""
    formats = {weights for part, weights, *_ in llm.parts() if part == "experts"}
    if engine is None or engine.name != "vllm" or BLOCK_FORMAT not in formats:
        return 0.0
    version = tuple(int(part) for part in engine.version.split("."))
    return next((layer_s for first, layer_s in UNTIL_VERSION if version < first), 0.0)


def on_version(latency: StepLatency, llm: Llm, engine: Engine | None) -> StepLatency:
    """Step times of kernels or of a roofline as the version of this engine takes them."""
    layer_s = longer_layer_s(llm, engine)
    if engine is None or layer_s == 0 or latency.kind not in ("kernels", "roofline"):
        return latency
    added_s = layer_s * experts_layers(llm)
    basis = (
        f"{latency.basis}; {1e6 * layer_s:.0f} us longer per layer of experts, as on vLLM {engine.version}"
    )
    return replace(latency, f_s=tuple(f_s + added_s for f_s in latency.f_s), basis=basis)
