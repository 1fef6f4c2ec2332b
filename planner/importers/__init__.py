"""Reads measurements that were made elsewhere: one module per format.

    read("auto", [Path("result.json")], StatedSetup(gpu="h100-80g", tp=1), read_catalog())

A profile becomes a `StepTable` (times of engine steps), an end-to-end benchmark becomes `MeasuredRuns`
(latencies of requests under a load). `planner.calibrate.fitting` fits step times to a StepTable, and
`planner.calibrate.measured_runs` corrects a fit by either of the two.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.files.text_tables import read_text
from planner.importers import (
    aiconfigurator,
    aiperf,
    foreign_fields,
    generic,
    guidellm,
    inference_perf,
    llmservingsim,
    prometheus_scrape,
    splitwise_tables,
    vidur_tables,
    vllm_latency,
    vllm_serve,
)
from planner.importers.benchmark_runs import MeasuredRun, MeasuredRuns, read_runs
from planner.importers.foreign_fields import StatedSetup
from planner.models.step_tables import StepTable

__all__ = [
    "FORMATS",
    "MeasuredRun",
    "MeasuredRuns",
    "StatedSetup",
    "detect_format",
    "read",
    "read_runs",
    "summarise_import",
]

# The error for a file of unknown format lists at most this many of its keys or columns, in this many
# characters.
MOST_LISTED_NAMES, MOST_LISTED_CHARS = 8, 200
ANY_JSON = "**/*.json"  # The pattern of results to which a tool gives no name of its own.
HEAD_LINES = 200  # Prometheus's text is recognised by these first lines of a file; set by hand.

Reader = Callable[[Sequence[Path], StatedSetup, Catalog], "StepTable | MeasuredRuns"]


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """How a format is read, and how a file of it is recognised.

    A file is of the format if it has all keys or columns of one of the groups in `marks`. If `needs_file` is
    False, `read` also takes an empty list of files: AIConfigurator brings its kernel tables itself. `inside`
    are patterns of the files in a folder of results; the first pattern that matches any file is used.
    """

    read: Reader
    marks: Sequence[Iterable[str]]
    needs_file: bool = True
    inside: tuple[str, ...] = ()


# `detect_format` takes the first row whose marks a file has.
FORMATS: Mapping[str, ForeignFormat] = {
    "splitwise": ForeignFormat(splitwise_tables.read, [splitwise_tables.COLUMNS]),
    "vidur": ForeignFormat(vidur_tables.read, vidur_tables.MARKS),
    "llmservingsim": ForeignFormat(llmservingsim.read, llmservingsim.MARKS),
    "vllm-bench-serve": ForeignFormat(
        vllm_serve.read, [vllm_serve.MARKS], inside=("**/run=*.json", ANY_JSON)
    ),
    "vllm-bench-latency": ForeignFormat(vllm_latency.read, [vllm_latency.MARKS]),
    "guidellm": ForeignFormat(guidellm.read, [guidellm.MARKS], inside=("**/benchmarks.json", ANY_JSON)),
    "aiperf": ForeignFormat(
        aiperf.read, aiperf.MARKS, inside=("**/profile_export_aiperf.json", "**/profile_export.jsonl")
    ),
    "inference-perf": ForeignFormat(
        inference_perf.read, [inference_perf.MARKS], inside=("**/stage_*_lifecycle_metrics.json",)
    ),
    "aiconfigurator": ForeignFormat(aiconfigurator.read, [aiconfigurator.COLUMNS], needs_file=False),
    # Marks of Prometheus' answers in JSON; `_keys_or_columns` recognises its text.
    "prometheus": ForeignFormat(prometheus_scrape.read, [("status", "data"), ("metric", "values")]),
    "csv": ForeignFormat(generic.read, [generic.COLUMNS]),
}


def read(name: str, paths: Sequence[Path], stated: StatedSetup, catalog: Catalog) -> StepTable | MeasuredRuns:
    """Read files of the format `name`; for "auto" it is detected from the first file.

    A folder stands for the results in it, for instance those of a sweep. Raises InputError for an unknown
    format, a missing file, and files that are not of the format.
    """
    if name != "auto" and name not in FORMATS:
        raise InputError(f"import: format {name!r} is not one of auto, {', '.join(FORMATS)}")
    if not paths and (name == "auto" or FORMATS[name].needs_file):
        raise InputError(f"import: format {name} needs a file")
    name = detect_format(paths[0]) if name == "auto" else name
    files: list[Path] = []
    for path in paths:
        files += _result_files(path, name) if path.is_dir() else [path]
    return FORMATS[name].read(files, stated, catalog)


def _result_files(folder: Path, name: str) -> list[Path]:
    """The files of the format `name` that a folder holds. Raises InputError if there are none."""
    for pattern in FORMATS[name].inside:
        if files := sorted(folder.glob(pattern)):
            return files
    raise InputError(f"{folder}: is a folder without results of {name}; name the files")


def summarise_import(measured: StepTable | MeasuredRuns) -> dict[str, Any]:
    """A summary of what was imported, as plain values for JSON and the screen."""
    if isinstance(measured, StepTable):
        note = measured.about.get("note")
        setup = {key: measured.about[key] for key in ("llm", "gpu", "tp", "source") if key in measured.about}
        return {"kind": "step table", **setup, "steps": len(measured.steps), "notes": [note] if note else []}
    return {
        "kind": "measured runs",
        "llm": measured.llm,
        "gpu": measured.gpu,
        "tp": measured.tp,
        "source": measured.source,
        "runs": [f"{run.name}: {run.requests} requests, {run.load}" for run in measured.runs],
        "notes": list(measured.notes),
    }


def detect_format(path: Path) -> str:
    """The format of a file, or of the first result in a folder.

    Raises InputError where it is none of FORMATS.
    """
    if path.is_dir():
        # Names that a tool gives come before ANY_JSON, which fits the files of any tool.
        patterns = [pattern for row in FORMATS.values() for pattern in row.inside if pattern != ANY_JSON]
        for pattern in (*patterns, ANY_JSON):
            if files := sorted(path.glob(pattern)):
                return detect_format(files[0])
        raise InputError(f"{path}: is a folder without results of a format we know; name the files")
    names = _keys_or_columns(read_text(path), path)
    if names is None:
        return "prometheus"
    for name, row in FORMATS.items():
        if any(names.issuperset(marks) for marks in row.marks):
            return name
    listed_names = ", ".join(sorted(names)[:MOST_LISTED_NAMES])
    raise InputError(
        f"{path}: is no format we know (found {listed_names[:MOST_LISTED_CHARS] or 'nothing'}); name one of "
        f"{', '.join(FORMATS)}"
    )


def _keys_or_columns(text: str, path: Path) -> set[str] | None:
    """The keys of a file in JSON, or the columns of a CSV; None for Prometheus' text, which has neither."""
    start = text.lstrip()
    if start.startswith("{__name__="):  # A line of promtool tsdb dump, which also begins like JSON.
        return None
    if start.startswith(("{", "[")):
        try:
            document = foreign_fields.parse_json(text, path)
        except InputError:  # JSON lines: the first one shows the keys.
            document = foreign_fields.parse_json(start.split("\n", 1)[0], path)
        return _top_level_keys(document)
    if any(line.startswith(("# HELP ", "# TYPE ", "vllm:")) for line in start.split("\n")[:HEAD_LINES]):
        return None
    lines = (line for line in start.split("\n") if line.strip() and not line.startswith("#"))
    return {cell.strip().strip('"') for cell in next(lines, "").split(",")}


def _top_level_keys(document: Any) -> set[str]:
    """The keys of a JSON object, or of the first object of a list; empty for any other value."""
    if isinstance(document, list):
        document = document[0] if document else {}
    return {str(key) for key in document} if isinstance(document, dict) else set()
