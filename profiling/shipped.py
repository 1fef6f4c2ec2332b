"""Writes catalogs/latency: the fits of step times that come with the planner.

    python -m profiling.shipped -o catalogs/latency --splitwise perf_model.csv
    python -m profiling.shipped --all-reduce       `all_reduce` of the GPUs in catalogs/gpus.yaml

Two sources: AIConfigurator's kernel times (planner/importers/silicon.py), and the measurements published with
Splitwise (Patel et al. 2024; data/perf_model.csv of https://github.com/Mutinifni/splitwise-sim, MIT licence).
BLOOM-176B has only fits of Splitwise's; Llama-2-70B has fits of both, of which Splitwise's lie under
splitwise/. Fits with kernels that vLLM does not choose by itself lie under mxfp8/ and marlin/
(planner/importers/silicon_mxfp8.py, silicon_marlin.py), those with keys and values in 8 bits, where the
checkpoint has 16, under kv8/. No lookup by LLM and GPU finds files in these four folders: a fleet names them.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.fits import fit_document, fit_row
from planner.domain import Gpu
from planner.errors import PlannerError
from planner.files.checked_files import repository_dir, to_yaml, write_files
from planner.importers.silicon import SYSTEMS, Kernels
from planner.importers.silicon_config import config_folder
from planner.importers.silicon_fits import TPS, file_name, fit_kernels, silicon_fits
from planner.importers.silicon_marlin import marlin_operation_ms
from planner.importers.silicon_mxfp8 import mxfp8_operation_ms
from planner.importers.splitwise_tables import HARDWARE, splitwise_table
from planner.models.latency import Array
from planner.models.llm import Llm
from planner.models.memory import fits_memory
from planner.models.parallelism import ACTIVATION_BYTES
from planner.models.roofline import roofline, transfer_fit

# The LLMs with fits to AIConfigurator's kernel times. KEPT_LLMS are the first four.
SILICON_LLMS = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-2-70b-hf",
    "codellama/CodeLlama-34b-Instruct-hf",
    "01-ai/Yi-34B",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mistral-Small-24B-Instruct-2501",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen2.5-32B",
    "Qwen/Qwen2.5-72B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3-235B-A22B-FP8",
    "meta-llama/Llama-3.1-8B-FP8",
    "meta-llama/Llama-3.1-70B-FP8",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8",
    "RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8",
    "Qwen/Qwen3-8B-FP8",
    "Qwen/Qwen3-14B-FP8",
    "Qwen/Qwen3-32B-FP8",
    "Qwen/Qwen3-30B-A3B-FP8",
    "MiniMaxAI/MiniMax-M2.5",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3.2",
    "deepseek-ai/DeepSeek-V4-Flash",
    "deepseek-ai/DeepSeek-V4-Pro",
    "google/gemma-4-26B-A4B",
    "meta-llama/Llama-3.1-405B",
    "MiniMaxAI/MiniMax-M3",
    "mistralai/Mixtral-8x22B-v0.1",
    "moonshotai/Kimi-K2-Instruct",
    "moonshotai/Kimi-K2.5",
    "nvidia/DeepSeek-V3.1-NVFP4",
    "nvidia/DeepSeek-V3.2-NVFP4",
    "nvidia/DeepSeek-V4-Flash-NVFP4",
    "nvidia/DeepSeek-V4-Pro-NVFP4",
    "nvidia/Gemma-4-26B-A4B-NVFP4",
    "nvidia/GLM-5-NVFP4",
    "nvidia/GLM-5.1-NVFP4",
    "nvidia/Gemma-4-31B-IT-NVFP4",
    "nvidia/Kimi-K2.5-NVFP4",
    "nvidia/Kimi-K2.6-NVFP4",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
    "nvidia/MiniMax-M2.5-NVFP4",
    "nvidia/MiniMax-M3-NVFP4",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4",
    "nvidia/Nemotron-H-56B-Base-8K",
    "nvidia/Qwen3-235B-A22B-NVFP4",
    "nvidia/Qwen3.5-122B-A10B-NVFP4",
    "nvidia/Qwen3.5-397B-A17B-NVFP4",
    "openai/gpt-oss-120b",
    "openai/gpt-oss-20b",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    "Qwen/Qwen3-VL-4B-Instruct",
    "Qwen/Qwen3.5-122B-A10B",
    "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3.5-397B-A17B",
    "Qwen/Qwen3.5-397B-A17B-FP8",
    "XiaomiMiMo/MiMo-7B-Base",
    "XiaomiMiMo/MiMo-V2-Flash",
    "moonshotai/Kimi-K3",
    "zai-org/GLM-5",
    "zai-org/GLM-5-FP8",
)
# Some LLMs are not in the list above because measured engines are far from sums of their kernels, and near to
# the roofline. LLMs without grouped heads, such as Llama-2-7B: by the tables the attention of decodes takes
# 1.2 times the measured time, by the roofline 1.0 times. Llama-4: vLLM 0.11 takes 1.5 times the tables' time
# on H100, and 1.0 times the roofline's. The two pairs of LLM and GPU below are left out for the same reason:
# the tables' time is 1.4 times that of vLLM 0.11, the roofline's 1.2 times.
LEFT_OUT = {("openai/gpt-oss-20b", "b200-180g"), ("openai/gpt-oss-120b", "b200-180g")}
# LLMs and GPUs whose fits with experts that multiply in mxfp8 lie under mxfp8/.
MXFP8_LLMS, MXFP8_GPUS = ("openai/gpt-oss-120b", "openai/gpt-oss-20b"), ("b200-180g",)
# The same for experts in Marlin's kernel, under marlin/.
MARLIN_LLMS, MARLIN_GPUS = ("openai/gpt-oss-120b",), ("h200-141g",)
# LLMs and GPUs whose fits with keys and values in 8 bits lie under kv8/: as InferenceX serves them.
KV8_LLMS = ("deepseek-ai/DeepSeek-V3", "zai-org/GLM-5-FP8", "Qwen/Qwen3.5-397B-A17B-FP8")
KV8_GPUS = ("h200-141g", "b200-180g", "b300-288g")
CONFIGS = repository_dir("benchmarks") / "configs"  # config.json of LLMs of which AIConfigurator has no copy.
# The fits of these LLMs on these GPUs stay as they were on 2026-11-20: plans in the docs and tests
# rest on them, and new fits would differ by 0.1 to 3 %.
KEPT_LLMS, KEPT_GPUS = SILICON_LLMS[:4], ("a100-80g", "h100-80g", "h200-141g")
COMMAND = "python -m profiling.shipped -o catalogs/latency --splitwise perf_model.csv"
SPLITWISE_DATE = "2023-11"  # When its measurements were published.
MEASURED_TP = 8  # The TP degree of the Splitwise fit from which `derived_file` derives those of other GPUs.
ALL_REDUCE_POWERS = 16  # `fit_all_reduces` fits payloads of 2^0 to 2^15 tokens, which are 8 KiB to 256 MiB.
FIRST_LATENCY_S, FIRST_BYTES_PER_S = 5e-6, 1e11  # Its search begins here; set by hand.
LOOSE_FRAC = 0.2  # Times that are more than about this share off the fit weigh less; set by hand.


def splitwise_file(path: Path, llm: Llm, gpu: Gpu, model: str, tps: tuple[int, ...]) -> dict[str, Any]:
    """The file of fits to Splitwise's measured steps on this GPU, one fit for each TP degree.

    `path` is Splitwise's table, and `model` its name of the LLM. The host's time is part of the measured
    steps, and cannot be told apart.
    """
    hardware = HARDWARE[gpu.name]
    basis = f"measured: Splitwise, {model} on {hardware}, host overhead included"
    entries = [
        fit_row(tp, *fit_kernels(splitwise_table(path, model, hardware, tp), basis=basis, kind="steps"))
        for tp in tps
    ]
    source = "github.com/Mutinifni/splitwise-sim data/perf_model.csv (MIT), Patel et al. 2024; docs/models.md"
    return _document(llm, gpu, source, SPLITWISE_DATE, entries)


def derived_file(
    path: Path, llm: Llm, measured: Gpu, target: Gpu, model: str, tps: tuple[int, ...]
) -> dict[str, Any]:
    """The file of fits on the GPU `target`, one for each TP degree: the fit of the GPU `measured` at
    MEASURED_TP times the ratio of the GPUs' rooflines. Nothing was measured on `target`: no row has errors.
    """
    hardware = HARDWARE[measured.name]
    table = splitwise_table(path, model, hardware, MEASURED_TP)
    # This fit is not written to a file, so it needs no basis: the derived fits below have one.
    latency, _ = fit_kernels(table, basis="", kind="steps")
    entries = []
    for tp in tps:
        basis = (
            f"derived: Splitwise's {model} on {hardware} tp8, carried over by the rooflines (no measurement)"
        )
        measured_roofline, target_roofline = roofline(llm, measured, MEASURED_TP), roofline(llm, target, tp)
        derived = transfer_fit(latency, measured_roofline, target_roofline, basis=basis)
        entries.append(fit_row(tp, derived, {}))
    source = "derived from github.com/Mutinifni/splitwise-sim data/perf_model.csv (MIT); docs/models.md"
    return _document(llm, target, source, SPLITWISE_DATE, entries)


def _document(llm: Llm, gpu: Gpu, source: str, date: str, fits: list[dict[str, Any]]) -> dict[str, Any]:
    """The file of fits of one LLM on one GPU, with the command that makes it."""
    return fit_document(llm.name, gpu.name, fits, source=source, date=date, command=COMMAND)


def _own_folder(llm: Llm) -> Path | None:
    """The folder with the LLM's config.json; None where AIConfigurator has a copy or needs none."""
    is_ours = (CONFIGS / f"{llm.name.replace('/', '--')}.json").exists()
    return CONFIGS if is_ours and config_folder(llm) is None else None


def shipped_documents(catalog: Catalog, splitwise: Path | None, *, date: str) -> dict[str, dict[str, Any]]:
    """Every file of catalogs/latency by its name, except those of KEPT_LLMS on KEPT_GPUS. `splitwise` is the
    path of Splitwise's table; without it the files that rest on this table are left out.
    """
    documents = {}
    for llm, gpu in product(map(catalog.llm, SILICON_LLMS), map(catalog.gpu, SYSTEMS)):
        if (llm.name in KEPT_LLMS and gpu.name in KEPT_GPUS) or (llm.name, gpu.name) in LEFT_OUT:
            continue
        fitted = silicon_fits(llm, gpu, date=date, command=COMMAND, folder=_own_folder(llm))
        if fitted.document is not None:
            documents[file_name(llm, gpu)] = fitted.document
    for llm, gpu in product(map(catalog.llm, KV8_LLMS), map(catalog.gpu, KV8_GPUS)):
        in_8_bits = replace(llm, kv_dtype_bytes=1.0)
        fitted = silicon_fits(in_8_bits, gpu, date=date, command=COMMAND, folder=_own_folder(llm))
        if fitted.document is not None:
            documents[f"kv8/{file_name(llm, gpu)}"] = fitted.document
    for folder, experts_of, names, gpu_names in (
        ("mxfp8", mxfp8_operation_ms, MXFP8_LLMS, MXFP8_GPUS),
        ("marlin", marlin_operation_ms, MARLIN_LLMS, MARLIN_GPUS),
    ):
        for llm, gpu in product(map(catalog.llm, names), map(catalog.gpu, gpu_names)):
            fitted = silicon_fits(llm, gpu, date=date, command=COMMAND, experts_of=experts_of)
            assert fitted.document is not None
            documents[f"{folder}/{file_name(llm, gpu)}"] = fitted.document
    if splitwise is not None:
        bloom, llama = catalog.llm("bigscience/bloom"), catalog.llm("meta-llama/Llama-2-70b-hf")
        for gpu in map(catalog.gpu, HARDWARE):
            documents[f"bloom--{gpu.name}.yaml"] = splitwise_file(splitwise, bloom, gpu, "bloom-176b", (8,))
            documents[f"splitwise/llama-2-70b-hf--{gpu.name}.yaml"] = splitwise_file(
                splitwise, llama, gpu, "llama2-70b", (2, 4, 8)
            )
        h100, h200 = catalog.gpu("h100-80g"), catalog.gpu("h200-141g")
        tps = tuple(tp for tp in TPS if fits_memory(bloom, h200, tp))
        documents["bloom--h200-141g.yaml"] = derived_file(splitwise, bloom, h100, h200, "bloom-176b", tps)
    return documents


def fit_all_reduces(catalog: Catalog) -> str:
    """The text of `all_reduce` for the rows of catalogs/gpus.yaml. For each GPU and TP degree it has the
    latency and the bandwidth that are nearest to the kernel times in relative terms, and as a comment how far
    off they are in the mean.
    """
    text = ""
    llm = catalog.llm("meta-llama/Llama-3.1-8B")  # Any LLM will do: times depend on bytes alone.
    tokens = 2 ** np.arange(ALL_REDUCE_POWERS)
    payload_bytes = tokens * llm.hidden * ACTIVATION_BYTES
    for gpu in SYSTEMS:
        text += f"{gpu}:\n  all_reduce:\n"
        for tp in TPS[1:]:  # One GPU alone reduces nothing.
            kernels = Kernels(llm, catalog.gpu(gpu), tp)
            measured_s = np.array([kernels.all_reduce_s(n) for n in tokens.tolist()])

            def log_ratios(logs: Array, measured_s: Array = measured_s) -> Array:
                """Logarithms of fitted over measured times, for the logarithms of a latency [s] and a
                bandwidth [bytes/s].
                """
                latency_s, bytes_per_s = np.exp(logs)
                return np.asarray(np.log((latency_s + payload_bytes / bytes_per_s) / measured_s))

            first = np.log([FIRST_LATENCY_S, FIRST_BYTES_PER_S])
            best = least_squares(log_ratios, first, loss="soft_l1", f_scale=LOOSE_FRAC).x
            latency_us, gb_per_s = np.exp(best) * (1e6, 1e-9)
            off_percent = 100 * np.abs(np.expm1(log_ratios(best))).mean()
            text += (
                f"    {tp}: {{latency: {latency_us:.2g} us, bandwidth: {gb_per_s:.3g} GB/s}}"
                f"  # {off_percent:.0f} %\n"
            )
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description="Write catalogs/latency anew.")
    parser.add_argument("-o", dest="out", type=Path, help="directory to write into")
    parser.add_argument("--all-reduce", action="store_true", help="print all_reduce of the GPUs' rows")
    parser.add_argument("--splitwise", type=Path, help="splitwise-sim's data/perf_model.csv")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="written into the files")
    args = parser.parse_args()
    if args.out is None and not args.all_reduce:
        parser.error("give -o, --all-reduce or both")
    try:
        if args.all_reduce:
            sys.stdout.write(fit_all_reduces(read_catalog()))
        if args.out is None:
            return 0
        documents = shipped_documents(read_catalog(), args.splitwise, date=args.date)
        write_files(args.out, {name: to_yaml(document) for name, document in documents.items()})
    except PlannerError as error:
        sys.stderr.write(f"profiling.shipped: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{args.out}: {len(documents)} files\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
