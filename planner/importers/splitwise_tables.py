"""Imports Splitwise's perf_model.csv: the prompt and token times of batches, by model, hardware and TP.

Splitwise (Patel et al. 2024) is a simulator of prefill and decode pools; its tables were measured with vLLM.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from planner.documents.catalog import Catalog
from planner.errors import CatalogError, InputError
from planner.files.checked_files import open_input
from planner.files.text_tables import read_csv, read_number_column
from planner.importers import foreign_fields
from planner.importers.foreign_fields import StatedSetup
from planner.models.step_tables import COLUMNS as STEP_COLUMNS
from planner.models.step_tables import StepTable

NUMBER_COLUMNS = ("prompt_size", "batch_size", "token_size", "prompt_time", "token_time")
COLUMNS = ("model", "hardware", "tensor_parallel", *NUMBER_COLUMNS)
HARDWARE = {"a100-80g": "a100-80gb", "h100-80g": "h100-80gb"}  # The file's names by the catalog's.
# The smallest batch that does not fit in the KV cache of this many GPUs; `splitwise_table` leaves such
# batches out, whatever the LLM.
LEAST_OVERFULL_BATCH, OVERFULL_TP = 16, 2
# The catalog's names of LLMs by the file's.
MODELS = {"bloom-176b": "bigscience/bloom", "llama2-70b": "meta-llama/Llama-2-70b-hf"}


def read(paths: Sequence[Path], stated: StatedSetup, catalog: Catalog) -> StepTable:
    """The steps of one model on one kind of worker; --llm, --gpu and --tp choose among several."""
    if len(paths) != 1:
        raise InputError(f"splitwise: expected one perf_model.csv, found {len(paths)} files")
    path = paths[0]
    table = read_csv(path, COLUMNS)
    read_number_column(table, "tensor_parallel", path, least=1)
    gpu_of_hardware = {hardware: gpu for gpu, hardware in HARDWARE.items()}

    # A row whose LLM or GPU is not in the catalog may be the requested one too. It is chosen only if no other
    # row has more names of the catalog.
    chosen, available = [], []
    groups = table[["model", "hardware", "tensor_parallel"]].drop_duplicates()
    wanted_llm = catalog.llm(stated.llm).name if stated.llm else None
    wanted_gpu = catalog.gpu(stated.gpu).name if stated.gpu else None
    for model, hardware, degree in groups.itertuples(index=False):
        llm = foreign_fields.find_catalog_llm(MODELS.get(str(model), str(model)), catalog)
        gpu = gpu_of_hardware.get(str(hardware)) or _catalog_gpu(str(hardware), catalog)
        tp = foreign_fields.read_count(degree, f"{path}: tensor_parallel", most=foreign_fields.MAX_TP)
        available.append(f"{model} on {hardware} tp{tp}")
        if (
            (wanted_llm is None or llm in (None, wanted_llm))
            and (wanted_gpu is None or gpu in (None, wanted_gpu))
            and stated.tp in (None, tp)
        ):
            known_names = (wanted_llm is None or llm is not None) + (wanted_gpu is None or gpu is not None)
            chosen.append((known_names, model, hardware, degree, llm, gpu, tp))
    most_known_names = max((known_names for known_names, *_ in chosen), default=0)
    best = [row for row in chosen if row[0] == most_known_names]
    if len(best) != 1:
        raise InputError(
            f"{path}: choose one with --llm, --gpu and --tp: "
            f"{foreign_fields.one_line('; '.join(available))[:600]}"
        )
    _, model, hardware, degree, llm, gpu, tp = best[0]
    rows = table[(table.model == model) & (table.hardware == hardware) & (table.tensor_parallel == degree)]
    for name in NUMBER_COLUMNS:
        # The result is not used: this refuses times of 0.
        read_number_column(rows, name, path, least=foreign_fields.LEAST_VALUE)
    llm_name, gpu_name, tp = foreign_fields.read_setup(
        replace(stated, tp=tp), catalog, path, llm=llm, gpu=gpu
    )
    try:
        steps = splitwise_table(path, str(model), str(hardware), tp).steps
    except (pd.errors.ParserError, pd.errors.EmptyDataError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read ({foreign_fields.one_line(error)[:120]})") from None
    about = {
        "llm": llm_name,
        "gpu": gpu_name,
        "tp": str(tp),
        "source": foreign_fields.one_line(f"splitwise, {path.name}, {model} on {hardware}"),
        "host_overhead": "included",
    }
    return StepTable(steps, about)


def splitwise_table(path: Path, model: str, hardware: str, tp: int) -> StepTable:
    """Steps of Splitwise's runs: `batch_size` prompts prefilled at once, then decoded together.

    `token_time` is the mean over a run's decode steps. During these the context grows from the prompt's
    length by `token_size`, so the mean is the time of the step half way. Batches that ran out of KV cache
    measure preemption, so they are left out.
    """
    with open_input(path) as stream:
        runs = pd.read_csv(stream)
    runs = runs[(runs.model == model) & (runs.hardware == hardware) & (runs.tensor_parallel == tp)]
    if tp == OVERFULL_TP:
        runs = runs[runs.batch_size < LEAST_OVERFULL_BATCH]
    if runs.empty:
        raise InputError(f"{path}: holds no runs of {model} on {tp} x {hardware}")
    batch, prompt = runs.batch_size.to_numpy(float), runs.prompt_size.to_numpy(float)
    zeros = np.zeros(len(runs))
    pairs = batch * prompt * (prompt + 1) / 2  # Each token attends to itself and to those before it.
    context = prompt + runs.token_size.to_numpy(float) / 2
    # The columns are those of STEP_COLUMNS; the file has milliseconds.
    prefills = np.column_stack([batch, batch * prompt, zeros, pairs, zeros, zeros, runs.prompt_time / 1e3])
    decodes = np.column_stack([zeros, zeros, zeros, zeros, batch, batch * context, runs.token_time / 1e3])
    return StepTable(pd.DataFrame(np.vstack([prefills, decodes]), columns=list(STEP_COLUMNS)))


def _catalog_gpu(hardware: str, catalog: Catalog) -> str | None:
    """The catalog's name of the hardware in the file; None if it has none."""
    try:
        return catalog.gpu(hardware).name
    except CatalogError:
        return None
