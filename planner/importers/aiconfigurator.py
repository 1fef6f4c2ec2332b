"""Imports from AIConfigurator: kernel times of steps from its package (silicon.py), or measured runs from a
silicon_sample.csv.

A row of that file has the mean TTFT and TPOT of one run: a closed loop, whose requests all have the same
lengths. The file does not say how many requests were sent.
"""

from collections.abc import Sequence
from pathlib import Path

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.files.text_tables import as_floats, read_csv, read_number_column
from planner.importers import foreign_fields
from planner.importers.benchmark_runs import MeasuredRun, MeasuredRuns, with_stated_load
from planner.importers.foreign_fields import StatedSetup
from planner.importers.silicon import SYSTEMS, silicon_table
from planner.models.step_tables import NOT_INCLUDED, StepTable

COLUMNS = (
    "backend",
    "model_path",
    "system",
    "precision",
    "mode",
    "isl",
    "osl",
    "batch_size",
    "tp_size",
    "pp_size",
    "silicon_ttft_ms",
    "silicon_tpot_ms",
)
# A closed loop keeps a number of requests in flight, its concurrency (`batch_size` in the file). Benchmarks
# usually send about this many requests for each of them.
REQUESTS_PER_CONCURRENCY = 10
MOST_CONCURRENCY = 10**5  # Far more than any engine runs at once: more must be a mistake in the file.
MOST_PRECISION_TEXT = 20  # Characters of a precision that a note repeats.


def read(paths: Sequence[Path], stated: StatedSetup, catalog: Catalog) -> StepTable | MeasuredRuns:
    """The runs of a silicon_sample.csv with the `stated` setup. Without a path the result is the kernel times
    of steps.
    """
    if not paths:
        llm, gpu, tp = foreign_fields.read_setup(stated, catalog, "aiconfigurator")
        served = catalog.llm(stated.llm or llm)  # The user may state the path of a config.json.
        if served.heads % tp:
            raise InputError(f"aiconfigurator: --tp {tp} does not divide the heads of {llm}")
        steps = silicon_table(served, catalog.gpu(gpu), tp)
        # `about` becomes the `#` lines of the table's file. This one says that the host's time is not
        # included, so fits add it (StepTable.is_kernel_time).
        return StepTable(steps.steps, {**steps.about, "host_overhead": NOT_INCLUDED})
    if len(paths) != 1:
        raise InputError(f"aiconfigurator: expected one silicon_sample.csv, found {len(paths)} files")
    path = paths[0]
    llm, gpu, tp = foreign_fields.read_setup(stated, catalog, path)
    table = read_csv(path, COLUMNS)
    # Runs of vLLM in which the same workers prefill and decode ("agg"). Those with pipeline stages are left
    # out, because fits are of one stage. A GPU without a name in SYSTEMS matches no row.
    rows = table[
        (table.backend == "vllm")
        & (table["mode"] == "agg")
        & (table.system == SYSTEMS.get(gpu))
        & (as_floats(table.tp_size) == tp)
        & (as_floats(table.pp_size) == 1)
    ]
    catalog_names = {
        name: foreign_fields.find_catalog_llm(str(name), catalog) for name in rows.model_path.unique()
    }
    rows = rows[rows.model_path.map(catalog_names) == llm]
    if rows.empty:
        raise InputError(f"{path}: holds no vLLM runs of {llm} on {tp} x {gpu}; choose another --tp or --gpu")
    number_columns = ("isl", "osl", "batch_size", "silicon_ttft_ms", "silicon_tpot_ms")
    columns = [
        read_number_column(rows, name, path, least=foreign_fields.LEAST_VALUE).tolist()
        for name in number_columns
    ]
    runs = []
    precisions = rows.precision.fillna("").astype(str).tolist()
    for isl, osl, batch_size, ttft_ms, tpot_ms, precision in zip(*columns, precisions, strict=True):
        concurrency = foreign_fields.read_count(batch_size, f"{path}: batch_size", most=MOST_CONCURRENCY)
        notes = [f"{REQUESTS_PER_CONCURRENCY} times as many requests as run at once are assumed"]
        # Runs of all precisions are taken; the note asks the user to compare them with the catalog.
        if precision:
            weights = foreign_fields.one_line(precision)[:MOST_PRECISION_TEXT]
            notes.append(f"weights in {weights}: does the LLM's row say so too?")
        run = MeasuredRun(
            name=f"{isl:g}x{osl:g} c{concurrency}",
            requests=REQUESTS_PER_CONCURRENCY * concurrency,
            input_tokens=(isl,),  # The one length of all requests.
            output_tokens=(osl,),
            latency_s={"ttft": {"mean": ttft_ms / 1e3}, "tpot": {"mean": tpot_ms / 1e3}},
            concurrency=concurrency,
            notes=(*notes, *foreign_fields.run_remarks(is_summary=True)),
        )
        # A concurrency or rate that the user states replaces that of the file. The number of requests stays.
        runs.append(with_stated_load(run, stated))
    return MeasuredRuns(llm, gpu, tp, f"AIConfigurator, {path.name}", tuple(runs))
