"""Watts of a GPU at a step's load, and what a power cap costs in time.

    share of the board's limit = min( top, floor + m * memory utilisation + c * compute utilisation ^ x )

    memory utilisation    bytes a step reads (weights, KV cache) / (its seconds * GPUs * bandwidth)
    compute utilisation   2 * parameters * tokens of a step      / (its seconds * GPUs * 16-bit FLOP/s)

A GPU without a step draws its idle share, a capped GPU never more than its cap. Decodes are bound by memory
and draw little, prefills are bound by compute and draw up to the limit (Splitwise, Fig. 8). The numbers are
fitted to Splitwise's measurements on A100, where x is 1, and to ML.ENERGY's on H100 and B200, where it is 0.5
(catalogs/power.yaml, made by `benchmarks/power_fit.py`): small batches keep tensor cores busy with padding,
and close to the limit clocks fall. Any other GPU has A100's shares of its own limit, which we have not
measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import cast

import numpy as np

from planner.domain import Gpu
from planner.errors import CatalogError, ExtrapolationError, InputError
from planner.files.checked_files import read_yaml, repository_dir
from planner.models.latency import Array
from planner.models.llm import Llm
from planner.models.memory import active_weight_bytes

BASIS = (
    "a model fitted to measurements on A100 (Splitwise), H100 and B200 (ML.ENERGY), carried over to other "
    "GPUs as shares of their limit"
)

# In Splitwise (arXiv 2311.18677, III-F, Fig. 9) a cap slows prefills, and decodes only below 50 %. The factor
# is splitwise-sim's (h100-80gb-pcap = h100-80gb x 1.300, 350 of 700 W); interpolating linearly is our choice.
LOWEST_CAP_FRAC = 0.5
PREFILL_SLOWDOWN_AT_LOWEST = 1.3

_Curve = tuple[float, float, float, float, float]  # floor, m, c, top and x of the formula above.


@dataclass(frozen=True, slots=True)
class Power:
    """The numbers of the formula above, all as shares of a board's limit.

    `idle_frac` is by GPU name, `other_idle_frac` for all other GPUs. `prefill_mape_frac` and
    `decode_mape_frac` are the held-out errors of prefill peaks and decode means. `measured` has floor,
    memory, compute, top and exponent of GPUs with numbers of their own.
    """

    floor_frac: float
    memory_frac: float
    compute_frac: float
    top_frac: float
    idle_frac: Mapping[str, float]
    other_idle_frac: float
    basis: str = BASIS
    prefill_mape_frac: float | None = None
    decode_mape_frac: float | None = None
    measured: Mapping[str, _Curve] = field(default_factory=dict)
    compute_exponent: float = 1.0

    def __post_init__(self) -> None:
        shares = (self.floor_frac, self.memory_frac, self.compute_frac, self.other_idle_frac)
        if min([*shares, *self.idle_frac.values()]) < 0 or not self.top_frac >= self.floor_frac:
            raise CatalogError("power: no share may be below 0, and top not below floor")

    def draw_frac(self, compute_utilisation: float | Array, memory_utilisation: float | Array) -> Array:
        """The share of the board's limit that a step draws; it never falls with either utilisation."""
        uncapped_frac = (
            self.floor_frac
            + self.memory_frac * np.asarray(memory_utilisation)
            + self.compute_frac * np.asarray(compute_utilisation) ** self.compute_exponent
        )
        return np.asarray(np.minimum(uncapped_frac, self.top_frac))

    def busy_w(
        self,
        llm: Llm,
        gpu: Gpu,
        gpus: int,
        step_s: float | Array,
        tokens: float | Array,
        kv_tokens: float | Array = 0.0,
        *,
        tp: int | None = None,
    ) -> Array:
        """Watts of one of `gpus` GPUs during a step of N tokens whose decodes attend to K tokens."""
        utilisations = step_utilisations(llm, gpu, gpus, step_s, tokens, kv_tokens, tp=tp)
        share = self.of_gpu(gpu).draw_frac(*utilisations)
        return np.asarray(np.minimum(share * gpu.board_w, gpu.power_w))

    def of_gpu(self, gpu: Gpu) -> Power:
        """This model with the numbers of a GPU, if it has its own."""
        if gpu.base not in self.measured:
            return self
        floor, memory, compute, top, exponent = self.measured[gpu.base]
        return replace(
            self,
            floor_frac=floor,
            memory_frac=memory,
            compute_frac=compute,
            top_frac=top,
            compute_exponent=exponent,
            measured={},
        )

    def idle_w(self, gpu: Gpu) -> float:
        """Watts of a GPU that holds an engine and runs no step."""
        share = self.idle_frac.get(gpu.base, self.other_idle_frac)
        return min(share * gpu.board_w, gpu.power_w)  # A capped GPU draws no more than its cap.


def step_utilisations(
    llm: Llm,
    gpu: Gpu,
    gpus: int,
    step_s: float | Array,
    tokens: float | Array,
    kv_tokens: float | Array = 0.0,
    *,
    tp: int | None = None,
) -> tuple[Array, Array]:
    """Utilisation of compute and of memory bandwidth, as the module's docstring defines them, in a step of N
    tokens.

    The decodes of the step attend to K tokens (`kv_tokens`). The KV of a token is read by `tp` GPUs, by
    default by all; GPUs of another rank or pipeline stage do not read it.
    """
    gpu_seconds = np.maximum(np.asarray(step_s, dtype=float) * gpus, 1e-12)  # Nothing is divided by 0.
    # With more GPUs than KV heads every GPU reads a copy of one.
    kv_copies = max(1.0, (gpus if tp is None else tp) / llm.kv_heads)
    kv_bytes = np.asarray(kv_tokens) * llm.kv_bytes_per_token * kv_copies
    flops = 2 * llm.active_parameters * np.asarray(tokens, dtype=float)
    read_bytes = active_weight_bytes(llm, tokens) + kv_bytes
    return flops / gpu_seconds / gpu.dense_flops_per_s, read_bytes / gpu_seconds / gpu.bandwidth_bytes_per_s


@cache
def shipped_power() -> Power:
    """The power model whose constants were fitted and are kept in catalogs/power.yaml."""
    path = repository_dir("catalogs") / "power.yaml"
    document = read_yaml(path)
    try:
        floor, memory, compute, top, other_idle, prefill, decode = (float(document[key]) for key in _FIELDS)
        idle = {str(name): float(row["frac"]) for name, row in document["idle"].items()}
        measured = {
            str(name): cast(_Curve, tuple(float(row[key]) for key in (*_FIELDS[:4], "compute_exponent")))
            for name, row in document["measured"].items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CatalogError(f"{path}: {error}; expected {', '.join(_FIELDS)}, measured and idle") from None
    return Power(floor, memory, compute, top, idle, other_idle, BASIS, prefill, decode, measured)


_FIELDS = (
    "floor_frac",
    "memory_frac",
    "compute_frac",
    "top_frac",
    "other_idle_frac",
    "prefill_mape_frac",
    "decode_mape_frac",
)


def cap_slowdowns(cap_frac: float) -> tuple[float, float]:
    """Factors (>= 1) on prefills (compute-bound) and decodes (memory-bound) of a GPU capped to a share of its
    limit.

    Raises ExtrapolationError for less than half, as there are no measurements.
    """
    if not 0 < cap_frac <= 1:
        raise InputError(f"power cap is {cap_frac:g} of the GPU's limit, must be in (0, 1]")
    if cap_frac < LOWEST_CAP_FRAC:
        raise ExtrapolationError(
            f"power cap is {cap_frac:.0%} of the GPU's limit; slowdowns are known from {LOWEST_CAP_FRAC:.0%} "
            "on. Cap less, or measure it and write a row with cap_of into gpus.yaml"
        )
    depth_frac = (1 - cap_frac) / (1 - LOWEST_CAP_FRAC)  # 0 without a cap, 1 at the lowest.
    return 1 + (PREFILL_SLOWDOWN_AT_LOWEST - 1) * depth_frac, 1.0  # Decodes lose nothing down to half.


def cap_gpu(gpu: Gpu, power_w: float) -> Gpu:
    """`gpu` under a power limit of this many Watts, as a catalog row "gpu@350W" would have it."""
    prefill, decode = cap_slowdowns(power_w / gpu.board_w)
    if power_w == gpu.board_w:  # A cap at the board's own limit is none.
        return replace(
            gpu, name=gpu.base, power_w=power_w, uncapped_w=None, prefill_slowdown=1.0, decode_slowdown=1.0
        )
    return replace(
        gpu,
        name=f"{gpu.base}@{power_w:g}W",
        power_w=power_w,
        uncapped_w=gpu.board_w,
        prefill_slowdown=prefill,
        decode_slowdown=decode,
    )
