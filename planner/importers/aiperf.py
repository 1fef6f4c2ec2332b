"""Reads results of aiperf: profile_export_aiperf.json (a summary), profile_export.jsonl (a request per line).

Its inter_token_latency is our TPOT: for an answer of n tokens, the time from the first to the last token
divided by n - 1. Every value has its unit beside it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.files.document_values import check_mapping
from planner.files.text_tables import read_text
from planner.importers import foreign_fields
from planner.importers.benchmark_runs import MeasuredRun, MeasuredRuns, runs_of_files
from planner.importers.foreign_fields import StatedSetup

# Keys by which a summary and a file of requests are recognised.
MARKS = (("request_latency", "request_count"), ("metadata", "metrics"))
# aiperf's names of our metrics, and of the lengths of prompts and answers.
NAMES = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}
LENGTHS = ("input_sequence_length", "output_sequence_length")


def read(paths: Sequence[Path], stated: StatedSetup, catalog: Catalog) -> MeasuredRuns:
    """The runs of these files, all of one engine. Raises InputError for a file that is not aiperf's."""
    return runs_of_files("aiperf", paths, stated, catalog, _parse_file)


def _parse_file(label: str, path: Path) -> tuple[list[MeasuredRun], str | None]:
    """The run of a file, and the name of its LLM if it has one."""
    text = read_text(path)
    lines = [line for line in text.split("\n") if line.strip()]
    try:
        first = foreign_fields.parse_json(lines[0], f"{path}, line 1") if lines else None
    except InputError:
        first = None  # The file is one document over several lines.
    if isinstance(first, Mapping) and "metrics" in first:
        return [_run_of_records(label, path, lines)], None
    run, model = _run_of_summary(label, path, check_mapping(foreign_fields.parse_json(text, path), path))
    return [run], model


def _run_of_records(label: str, path: Path, lines: Sequence[str]) -> MeasuredRun:
    """A run from single requests, without the warm-up. The file lacks the load that was configured, so the
    load is the requests' starts; it is unknown if a start is missing.
    """
    values_s: dict[str, list[float]] = {metric: [] for metric in NAMES}
    lengths: tuple[list[float], list[float]] = ([], [])  # Input and output tokens.
    starts_ns: list[float] = []
    failed = 0
    for i, line in enumerate(lines):
        where = f"{path}, line {i + 1}"
        row = check_mapping(foreign_fields.parse_json(line, where), where)
        metadata = check_mapping(row.get("metadata", {}), f"{where}: metadata")
        if metadata.get("benchmark_phase") == "warmup":
            continue
        metrics = check_mapping(row.get("metrics", {}), f"{where}: metrics")
        if row.get("error") or metadata.get("was_cancelled") or not metrics:
            failed += 1
            continue
        for metric, key in NAMES.items():
            if (value := _read_latency(metrics.get(key), "value", f"{where}: {key}")) is not None:
                values_s[metric].append(value)
        for column, key in zip(lengths, LENGTHS, strict=True):
            length = check_mapping(metrics.get(key), f"{where}: {key}").get("value")
            # A simulated request has at least one token each way.
            column.append(max(1.0, foreign_fields.read_number(length, f"{where}: {key}")))
        start = foreign_fields.read_optional(metadata, "request_start_ns", where)
        starts_ns += [] if start is None else [start]
    if not lengths[0]:
        raise InputError(f"{path}: no request succeeded; there is nothing to import")
    has_all_starts = len(starts_ns) == len(lengths[0])
    first_ns = min(starts_ns, default=0.0)
    latencies_s = {metric: foreign_fields.mean_and_percentiles(values) for metric, values in values_s.items()}
    return MeasuredRun(
        label,
        len(lengths[0]),
        tuple(lengths[0]),
        tuple(lengths[1]),
        {metric: statistics for metric, statistics in latencies_s.items() if statistics},
        arrival_s=tuple((start_ns - first_ns) / 1e9 for start_ns in starts_ns) if has_all_starts else (),
        failed=failed,
        notes=foreign_fields.run_remarks(failed=failed),
    )


def _run_of_summary(label: str, path: Path, document: Mapping[str, Any]) -> tuple[MeasuredRun, str | None]:
    """The run of a summary, and the name of its LLM if it has one."""
    latency: dict[str, dict[str, float]] = {}
    for metric, key in NAMES.items():
        row = document.get(key)
        if row is None:
            continue
        key_of_statistic = {"mean": "avg"} | {f"p{p}": f"p{p}" for p in foreign_fields.PERCENTILES}
        latencies = {
            statistic: value
            for statistic, statistic_key in key_of_statistic.items()
            if (value := _read_latency(row, statistic_key, f"{path}: {key}")) is not None
        }
        if latencies:
            latency[metric] = latencies

    def read_average(key: str) -> float:
        row = check_mapping(document.get(key), f"{path}: {key}")
        return foreign_fields.read_number(row.get("avg"), f"{path}: {key}: avg")

    requests = foreign_fields.read_count(read_average("request_count"), f"{path}: request_count", least=0)
    failed = round(read_average("error_request_count")) if document.get("error_request_count") else 0
    if not requests:
        raise InputError(f"{path}: no request succeeded; there is nothing to import")
    config = document.get("input_config")
    model, concurrency, rate = _read_load(config if isinstance(config, Mapping) else {}, str(path))
    # The only length of each kind is the mean of all requests.
    input_tokens, output_tokens = ((max(1.0, read_average(key)),) for key in LENGTHS)
    run = MeasuredRun(
        label,
        requests,
        input_tokens,
        output_tokens,
        latency,
        concurrency,
        rate,
        failed=failed,
        notes=foreign_fields.run_remarks(failed=failed, is_summary=True),
    )
    return run, model


def _read_load(config: Mapping[str, Any], where: str) -> tuple[str | None, int | None, float | None]:
    """LLM, concurrency and rate of a run, each None where it is not known.

    Newer versions (0.10) have the load in `phases`, whose warm-up is left out of the results; older ones have
    it in `loadgen`.
    """
    models, endpoint = config.get("models"), config.get("endpoint")
    newer_names = models.get("items") if isinstance(models, Mapping) else None
    older_names = endpoint.get("model_names") if isinstance(endpoint, Mapping) else None
    first = next(
        (names[0] for names in (newer_names, older_names) if isinstance(names, list) and names), None
    )
    model = first.get("name") if isinstance(first, Mapping) else first  # Newer versions write a mapping.

    phases, load = config.get("phases"), config.get("loadgen")
    if isinstance(phases, list):
        counted = [
            phase for phase in phases if isinstance(phase, Mapping) and not phase.get("exclude_from_results")
        ]
        load = counted[0] if len(counted) == 1 else None  # Several phases have no common load.
    load = load if isinstance(load, Mapping) else {}
    # With a limit on concurrency the run counts as a closed loop, whatever its rate.
    concurrency = load.get("concurrency")
    rate = load.get("rate", load.get("request_rate")) if concurrency is None else None
    return (
        model if isinstance(model, str) else None,
        None if concurrency is None else foreign_fields.read_count(concurrency, f"{where}: concurrency"),
        None if rate is None else foreign_fields.read_number(rate, f"{where}: request_rate"),
    )


def _read_latency(row: object, key: str, where: str) -> float | None:
    """The number under `key` of a row {key: number, unit: ...} in seconds; None where the row is missing or
    nothing was measured.
    """
    if row is None:
        return None
    row = check_mapping(row, where)
    value = row.get(key)
    if value is None:
        return None
    return foreign_fields.read_seconds(
        foreign_fields.read_number(value, f"{where}: {key}"), str(row.get("unit", "ms")), where
    )
