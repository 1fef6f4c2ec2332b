"""`vllm bench latency --output-json`: how long one batch takes, from all prompts sent to the last token.

The file holds {avg_latency, latencies, percentiles} and no lengths: they are given by options. The time is
that of the last request of the batch to finish, `e2e max` of a closed loop as large as the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.imports import fields
from planner.imports.fields import Facts
from planner.imports.runs import MeasuredRun, MeasuredRuns, loaded
from planner.io.values import mapping

MARKS = ("avg_latency", "latencies")


def read(paths: Sequence[Path], facts: Facts, catalog: Catalog) -> MeasuredRuns:
    llm, gpu, tp = fields.setup(facts, catalog, ", ".join(path.name for path in paths))
    runs = []
    for path in paths:
        document = mapping(fields.read_json(path), path)
        shape = {}
        for key, own, option in (
            ("requests", "batch_size", "--requests (the batch size)"),
            ("input_tokens", "input_len", "--input-tokens"),
            ("output_tokens", "output_len", "--output-tokens"),
        ):
            value = getattr(facts, key) or document.get(own)
            if value is None:
                raise InputError(f"{path}: does not say what was run; add {option}")
            shape[key] = fields.count(value, f"{path}: {own}")
        latencies = fields.numbers(document.get("latencies"), f"{path}: latencies")
        if not latencies or not min(latencies) > 0:
            raise InputError(f"{path}: latencies: expected seconds > 0")
        notes = () if len(latencies) >= 3 else (f"only {len(latencies)} iteration(s) were timed",)
        runs.append(
            loaded(
                MeasuredRun(
                    path.name,
                    shape["requests"],
                    (shape["input_tokens"],),
                    (shape["output_tokens"],),
                    {"e2e": {"max": float(np.mean(latencies))}},
                    concurrency=shape["requests"],
                    notes=notes,
                ),
                facts,
            )
        )
    return MeasuredRuns(llm, gpu, tp, f"vllm bench latency, {', '.join(p.name for p in paths)}", tuple(runs))
