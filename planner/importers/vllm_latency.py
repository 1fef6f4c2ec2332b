"""Reads `vllm bench latency --output-json`: how long one batch takes, from all prompts sent to the last
token.

The file has {avg_latency, latencies, percentiles} and no lengths, which options give. A latency is that of
the last request of the batch to finish, so it is the largest E2E of a closed loop as large as the batch.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.files.document_values import check_mapping
from planner.importers import foreign_fields
from planner.importers.benchmark_runs import MeasuredRun, MeasuredRuns, with_stated_load
from planner.importers.foreign_fields import StatedSetup

MARKS = ("avg_latency", "latencies")  # Keys by which such a file is recognised.
FEW_ITERATIONS = 3  # With fewer timed batches the run has a note.


def read(paths: Sequence[Path], stated: StatedSetup, catalog: Catalog) -> MeasuredRuns:
    """The runs of these files, all of one engine. Raises InputError where the lengths are not known."""
    llm, gpu, tp = foreign_fields.read_setup(stated, catalog, ", ".join(path.name for path in paths))
    runs = []
    for path in paths:
        document = check_mapping(foreign_fields.read_json(path), path)
        shape = {}  # Requests and tokens of the batch, by key.
        for key, file_key, option in (
            ("requests", "batch_size", "--requests (the batch size)"),
            ("input_tokens", "input_len", "--input-tokens"),
            ("output_tokens", "output_len", "--output-tokens"),
        ):
            value = getattr(stated, key) or document.get(file_key)
            if value is None:
                raise InputError(f"{path}: does not say what was run; add {option}")
            shape[key] = foreign_fields.read_count(value, f"{path}: {file_key}")
        latencies = foreign_fields.read_numbers(document.get("latencies"), f"{path}: latencies")
        if not latencies or not min(latencies) > 0:
            raise InputError(f"{path}: latencies: expected seconds > 0")
        few_note = f"only {len(latencies)} iteration(s) were timed"
        notes = () if len(latencies) >= FEW_ITERATIONS else (few_note,)
        runs.append(
            with_stated_load(
                MeasuredRun(
                    name=path.name,
                    requests=shape["requests"],
                    input_tokens=(shape["input_tokens"],),
                    output_tokens=(shape["output_tokens"],),
                    # Each latency is the largest E2E of one batch; this is the mean over batches.
                    latency_s={"e2e": {"max": float(np.mean(latencies))}},
                    concurrency=shape["requests"],
                    notes=notes,
                ),
                stated,
            )
        )
    return MeasuredRuns(llm, gpu, tp, f"vllm bench latency, {', '.join(p.name for p in paths)}", tuple(runs))
