"""Measured runs: the results of end-to-end benchmarks of one engine, in one form for all programs.

    {"llm": "meta-llama/Llama-3.1-8B", "gpu": "h100-80g", "tp": 1, "source": "vllm bench serve, a.json",
     "runs": [{"name": "a.json", "requests": 500, "concurrency": 32,
               "input_tokens": [812, ...], "output_tokens": [200, ...],
               "latency_s": {"ttft": {"mean": 0.21, "p99": 0.60}, "tpot": {"mean": 0.012}}}]}

There is one length per request, or a single mean. From a mean, lengths are drawn evenly in [1 - s, 1 + s]
times the mean, with s = `length_spread_frac`: equal lengths would keep requests in step with each other,
which is rare in real runs. The load is `concurrency` (closed loop), `rate_rps` (open loop, Poisson) or
`arrival_s` (open loop, as recorded); a run without any of these is read, but cannot be simulated. Metrics are
those of the glossary, and `queue`, the time before a request is scheduled. Statistics are mean, max and
percentiles (p99). A percentile from a histogram is known only up to the edge of its bucket: p99_at_most.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.files.document_values import check_mapping, check_rows, errors_as
from planner.importers import foreign_fields

METRICS = ("ttft", "tpot", "tbt", "e2e", "queue")
# What a run may state about its engine: two settings of vLLM, and the tokens that its KV cache holds.
ENGINE_KEYS = ("max_num_seqs", "max_num_batched_tokens", "kv_tokens")
# Values above these three are refused as typing errors, or as values in another unit.
MAX_REQUESTS = 10**6
MAX_TOKENS = 10**7  # The most tokens of one request.
MAX_LATENCY_S = 1e9
_STATISTIC = re.compile(r"mean|max|p(\d{1,2}(\.\d{1,4})?|100)(_at_most)?")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One benchmark of one engine; the module's docstring explains the fields. `requests` counts the requests
    that were answered, `failed` all others. Raises InputError for impossible values.
    """

    name: str
    requests: int
    input_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...]
    latency_s: Mapping[str, Mapping[str, float]]
    concurrency: int | None = None
    rate_rps: float | None = None
    arrival_s: tuple[float, ...] = ()
    failed: int = 0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_tokens: int | None = None
    notes: tuple[str, ...] = ()
    length_spread_frac: float = 0.0

    def __post_init__(self) -> None:
        where = f"run {self.name}"
        if not 1 <= self.requests <= MAX_REQUESTS:
            raise InputError(f"{where}: requests is {self.requests}, must be from 1 to {MAX_REQUESTS}")
        for key in ("input_tokens", "output_tokens"):
            values = getattr(self, key)
            if len(values) not in (1, self.requests):
                raise InputError(f"{where}: {key} has {len(values)} values, must have 1 or {self.requests}")
            if not all(1 <= value <= MAX_TOKENS for value in values):
                raise InputError(f"{where}: {key} must be from 1 to {MAX_TOKENS} tokens")
        if not 0 <= self.length_spread_frac < 1:
            raise InputError(
                f"{where}: length_spread_frac is {self.length_spread_frac}, must be >= 0 and below 1"
            )
        if self.arrival_s and len(self.arrival_s) != self.requests:
            raise InputError(f"{where}: arrival_s has {len(self.arrival_s)} values, not {self.requests}")
        if not all(0 <= value < math.inf for value in self.arrival_s):
            raise InputError(f"{where}: arrival_s must be finite and >= 0")
        if self.concurrency is not None and not 1 <= self.concurrency <= MAX_REQUESTS:
            raise InputError(f"{where}: concurrency is {self.concurrency}, must be from 1 to {MAX_REQUESTS}")
        if self.rate_rps is not None and not 0 < self.rate_rps < math.inf:
            raise InputError(f"{where}: rate_rps is {self.rate_rps}, must be finite and > 0")
        if not any(self.latency_s.values()):
            raise InputError(f"{where}: holds no latency; expected one of {', '.join(METRICS)}")
        for metric, statistics in self.latency_s.items():
            if metric not in METRICS:
                raise InputError(f"{where}: {metric!r} is not one of {', '.join(METRICS)}")
            for name, value in statistics.items():
                if not _STATISTIC.fullmatch(name):
                    raise InputError(f"{where}: {metric}: {name!r} is not mean, max or a percentile (p99)")
                if not 0 < value < MAX_LATENCY_S:
                    raise InputError(f"{where}: {metric} {name} is {value}, must be > 0 s and below 1e9 s")

    @property
    def load(self) -> str:
        """The load in words: 'concurrency 32', '4 req/s'."""
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        if self.arrival_s:
            return "recorded arrivals"
        return "unknown load" if self.rate_rps is None else f"{self.rate_rps:g} req/s"

    def as_dict(self) -> dict[str, Any]:
        """The run as plain values for JSON, without keys for unknown values."""
        document: dict[str, Any] = {
            "name": self.name,
            "requests": self.requests,
            "failed": self.failed,
            "concurrency": self.concurrency,
            "rate_rps": self.rate_rps,
            "length_spread_frac": self.length_spread_frac or None,
            **{key: getattr(self, key) for key in ENGINE_KEYS},
            "latency_s": {metric: dict(values) for metric, values in self.latency_s.items() if values},
            "input_tokens": _plain_lengths(self.input_tokens),
            "output_tokens": _plain_lengths(self.output_tokens),
            "arrival_s": list(self.arrival_s) or None,
            "notes": list(self.notes) or None,
        }
        return {key: value for key, value in document.items() if value is not None}


@dataclass(frozen=True, slots=True)
class MeasuredRuns:
    """Runs of one LLM on one kind of engine. `source` names the program and the files that they are from."""

    llm: str
    gpu: str
    tp: int
    source: str
    runs: tuple[MeasuredRun, ...]

    def __post_init__(self) -> None:
        if not self.runs:
            raise InputError(f"{self.source}: holds no runs")

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks of all runs, each once, with the names of its runs unless all runs have it."""
        runs_by_note: dict[str, list[str]] = {}
        for run in self.runs:
            for note in run.notes:
                runs_by_note.setdefault(note, []).append(run.name)
        return tuple(
            note if len(names) == len(self.runs) else f"{note} ({', '.join(names)})"
            for note, names in runs_by_note.items()
        )

    def to_json(self) -> str:
        """The runs as the text of a file that `read_runs` reads."""
        document = {
            "llm": self.llm,
            "gpu": self.gpu,
            "tp": self.tp,
            "source": self.source,
            "runs": [run.as_dict() for run in self.runs],
        }
        return json.dumps(document, allow_nan=False, ensure_ascii=False) + "\n"


def with_stated_load(run: MeasuredRun, stated: foreign_fields.StatedSetup) -> MeasuredRun:
    """The run with the load and the spread of lengths that the user states, in place of those of its file."""
    if stated.length_spread_frac is not None:
        run = replace(run, length_spread_frac=stated.length_spread_frac)
    if stated.concurrency is not None:
        return replace(run, concurrency=stated.concurrency, rate_rps=None, arrival_s=())
    if stated.rate_rps is not None:
        return replace(run, concurrency=None, rate_rps=stated.rate_rps, arrival_s=())
    return run


def runs_of_files(
    program: str,
    paths: Sequence[Path],
    stated: foreign_fields.StatedSetup,
    catalog: Catalog,
    parse: Callable[[str, Path], tuple[Sequence[MeasuredRun], str | None]],
) -> MeasuredRuns:
    """The runs of a program's files, all of one engine. `parse` takes a file's label and path; it returns the
    file's runs, and the name of their LLM, or None if the file has none. The first file with a name decides.
    """
    runs: list[MeasuredRun] = []
    model_name = None
    labels = foreign_fields.file_labels(paths)
    for label, path in zip(labels, paths, strict=True):
        runs_of_file, model_of_file = parse(label, path)
        runs += [with_stated_load(run, stated) for run in runs_of_file]
        model_name = model_name or model_of_file
    names = foreign_fields.list_files(labels)
    llm, gpu, tp = foreign_fields.read_setup(stated, catalog, names, llm=model_name)
    return MeasuredRuns(llm, gpu, tp, f"{program}, {names}", tuple(runs))


def read_runs(path: Path) -> MeasuredRuns:
    """Read a runs.json; raises InputError naming the file and the field."""
    return parse_runs(foreign_fields.read_json(path), path)


def parse_runs(document: Any, path: Path) -> MeasuredRuns:
    """The runs in a document that `MeasuredRuns.to_json` wrote. Raises InputError for another one."""
    document = check_mapping(document, path)
    names = {key: document.get(key) for key in ("llm", "gpu")}
    for key, name in names.items():
        if not isinstance(name, str) or not name:
            raise InputError(f"{path}: {key}: expected a name, found {name!r}")
    runs = []
    for i, row in enumerate(check_rows(document.get("runs"), f"{path}: runs")):
        where = f"{path}: runs[{i}]"
        row = check_mapping(row, where)
        with errors_as(InputError, where):
            runs.append(_parse_run(row, where))
    tp = foreign_fields.read_count(document.get("tp"), f"{path}: tp", most=foreign_fields.MAX_TP)
    source = foreign_fields.one_line(document.get("source", path))
    return MeasuredRuns(str(names["llm"]), str(names["gpu"]), tp, source, tuple(runs))


def _parse_run(row: Mapping[str, Any], where: str) -> MeasuredRun:
    """One entry of `runs`, with every number checked; what it leaves out is None or empty."""
    latency_s: dict[str, dict[str, float]] = {}
    for metric, values in check_mapping(row.get("latency_s"), f"{where}: latency_s").items():
        statistics = check_mapping(values, f"{where}: {metric}")
        latency_s[str(metric)] = {
            str(name): foreign_fields.read_number(value, f"{where}: {metric} {name}")
            for name, value in statistics.items()
        }
    whole_numbers = {
        key: None if row.get(key) is None else foreign_fields.read_count(row[key], f"{where}: {key}")
        for key in ("concurrency", *ENGINE_KEYS)
    }
    arrival_s: tuple[float, ...] = ()
    if row.get("arrival_s") is not None:
        arrival_s = tuple(foreign_fields.read_numbers(row["arrival_s"], f"{where}: arrival_s"))
    return MeasuredRun(
        name=foreign_fields.one_line(row.get("name", where)),
        requests=foreign_fields.read_count(row.get("requests"), f"{where}: requests"),
        input_tokens=_parse_lengths(row.get("input_tokens"), f"{where}: input_tokens"),
        output_tokens=_parse_lengths(row.get("output_tokens"), f"{where}: output_tokens"),
        latency_s=latency_s,
        rate_rps=foreign_fields.read_optional(row, "rate_rps", where),
        arrival_s=arrival_s,
        failed=foreign_fields.read_count(row.get("failed", 0), f"{where}: failed", least=0),
        length_spread_frac=foreign_fields.read_optional(row, "length_spread_frac", where) or 0.0,
        notes=tuple(
            foreign_fields.one_line(note) for note in check_rows(row.get("notes", []), f"{where}: notes")
        ),
        **whole_numbers,
    )


def _parse_lengths(value: object, where: str) -> tuple[float, ...]:
    """The lengths of all requests from a list, or their mean from a number."""
    if isinstance(value, list):
        return tuple(foreign_fields.read_numbers(value, where))
    return (foreign_fields.read_number(value, where),)


def _plain_lengths(lengths: tuple[float, ...]) -> float | list[float]:
    """The lengths for JSON: whole ones as integers, a single one without a list."""
    numbers = [int(length) if float(length).is_integer() else length for length in lengths]
    return numbers if len(numbers) > 1 else numbers[0]
