"""Reads a CSV of measured runs that a user wrote, one run per row; the times are means.

The columns; those in brackets may be missing, and `rate` is in requests/s:

    input_tokens,output_tokens,ttft_ms,tpot_ms[,requests][,concurrency|rate]
"""

from collections.abc import Sequence
from pathlib import Path

from planner.documents.catalog import Catalog
from planner.files.text_tables import read_csv, read_number_column
from planner.importers import foreign_fields
from planner.importers.benchmark_runs import MeasuredRun, MeasuredRuns, with_stated_load
from planner.importers.foreign_fields import StatedSetup

COLUMNS = ("input_tokens", "output_tokens", "ttft_ms", "tpot_ms")
# The requests of a run if neither the file nor the user says how many; a note of the run says so.
USUAL_REQUESTS = 200


def read(paths: Sequence[Path], stated: StatedSetup, catalog: Catalog) -> MeasuredRuns:
    """The runs of these files, all of one engine. Raises InputError for values that are missing or <= 0."""
    names = ", ".join(path.name for path in paths)
    llm, gpu, tp = foreign_fields.read_setup(stated, catalog, names)
    runs: list[MeasuredRun] = []
    for path in paths:
        table = read_csv(path, COLUMNS)
        optional = [name for name in ("requests", "concurrency", "rate") if name in table.columns]
        columns = {
            name: read_number_column(table, name, path, least=foreign_fields.LEAST_VALUE)
            for name in (*COLUMNS, *optional)
        }
        for i in range(len(table)):
            row = {name: float(values[i]) for name, values in columns.items()}
            where = f"{path.name}, row {i + 1}"
            notes = foreign_fields.run_remarks(is_summary=True)
            if "requests" not in row and stated.requests is None:
                notes = (*notes, f"{USUAL_REQUESTS} requests are assumed")
            requests, concurrency = stated.requests or row.get("requests", USUAL_REQUESTS), None
            if "concurrency" in row:  # A rate beside it is ignored.
                concurrency = foreign_fields.read_count(row["concurrency"], f"{where}: concurrency")
            run = MeasuredRun(
                name=where,
                requests=foreign_fields.read_count(requests, f"{where}: requests"),
                input_tokens=(row["input_tokens"],),
                output_tokens=(row["output_tokens"],),
                latency_s={"ttft": {"mean": row["ttft_ms"] / 1e3}, "tpot": {"mean": row["tpot_ms"] / 1e3}},
                concurrency=concurrency,
                rate_rps=row.get("rate") if concurrency is None else None,
                notes=notes,
            )
            runs.append(with_stated_load(run, stated))
    return MeasuredRuns(llm, gpu, tp, f"CSV, {names}", tuple(runs))
