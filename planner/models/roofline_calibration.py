"""catalogs/roofline.yaml: which shares of a GPU's peaks kernels reach, and how far estimates were off.

The file has a row for each format in which weights are multiplied. `planner/models/roofline.py` makes step
times of a row, and `planner/models/lora.py` the time that adapters add.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from planner.domain import Gpu
from planner.errors import CatalogError
from planner.files.checked_files import read_yaml, repository_dir
from planner.models.llm import WEIGHT_BYTES, Llm
from planner.models.parallelism import ALL_REDUCE_S, LINK_FRAC


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the catalog's peaks that kernels reach; one set per format of weights, for every GPU and LLM.

    `overlap` p says how reading and computing overlap: together they take (read^p + compute^p)^(1/p) seconds,
    the sum at 1. `layer_s` and `expert_layer_s` are the fixed times per layer. `expert_activations` is the
    number of vectors of the hidden width that a token moves for each expert that it visits. The kernels of
    routed experts have shares of their own of the same peaks.
    """

    gemm_frac: float
    attention_frac: float
    bandwidth_frac: float
    kv_bandwidth_frac: float
    link_frac: float = LINK_FRAC
    overlap: float = 1.0
    layer_s: float = 0.0
    all_reduce_s: float = ALL_REDUCE_S
    expert_gemm_frac: float = 1.0
    expert_bandwidth_frac: float = 1.0
    expert_layer_s: float = 0.0
    expert_activations: float = 0.0


ROWS = ("bf16", "fp8", "w4a16", "nvfp4")  # The formats in catalogs/roofline.yaml that are multiplied.
# Formats that GPUs multiply at their 8-bit or 4-bit rate, if they have one. Others are multiplied in 16 bits.
MULTIPLIED_IN_8_BITS = ("fp8", "fp8-block", "mxfp8", "int8")
MULTIPLIED_IN_4_BITS = ("nvfp4",)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A row of catalogs/roofline.yaml: the efficiencies that fit measured kernel times best, and their
    errors.

    Errors are on GPUs that took no part in the calibration, by structure of LLM: "dense" or "mixture".
    """

    efficiency: Efficiency
    prefill_mape_frac: Mapping[str, float]
    decode_mape_frac: Mapping[str, float]


def calibration_of(llm: Llm, gpu: Gpu) -> Calibration:
    """The calibration of the format in which this GPU multiplies this LLM's weights."""
    return _read_calibrations()[_multiplied_format(llm.weights, gpu)]


@cache
def _read_calibrations() -> dict[str, Calibration]:
    """All rows of catalogs/roofline.yaml by name. Raises CatalogError for a file without them."""
    path = repository_dir("catalogs") / "roofline.yaml"
    field_names = {field.name for field in fields(Efficiency)}

    def calibration(values: Mapping[str, Any]) -> Calibration:
        efficiency = Efficiency(**{key: float(value) for key, value in values.items() if key in field_names})
        errors = values["errors"]
        prefill = {structure: float(error_fracs["prefill"]) for structure, error_fracs in errors.items()}
        decode = {structure: float(error_fracs["decode"]) for structure, error_fracs in errors.items()}
        return Calibration(efficiency, prefill, decode)

    document = read_yaml(path)
    try:
        return {name: calibration(document[name]) for name in ROWS}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CatalogError(
            f"{path}: {error!r}; expected rows {', '.join(ROWS)} of numbers, with errors"
        ) from None


def _multiplied_format(weights: str, gpu: Gpu) -> str:
    """Which of ROWS a GPU multiplies weights of this format in."""
    if weights in MULTIPLIED_IN_8_BITS and gpu.fp8_flops_per_s:
        return "fp8"
    if weights in MULTIPLIED_IN_4_BITS and gpu.fp4_flops_per_s:
        return "nvfp4"
    return "w4a16" if WEIGHT_BYTES[weights] < 1 else "bf16"  # w4a16: read as 4 bits, multiplied in 16.


def flops_rate(weights: str, gpu: Gpu) -> float:
    """FLOP/s at which a GPU multiplies weights of this format."""
    rates = {"fp8": gpu.fp8_flops_per_s, "nvfp4": gpu.fp4_flops_per_s}
    return rates.get(_multiplied_format(weights, gpu)) or gpu.dense_flops_per_s
