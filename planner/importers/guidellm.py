"""Reads guidellm's benchmarks.json: one run per entry of `benchmarks`.

Its inter_token_latency_ms is our TPOT: for an answer of n tokens, the time from the first to the last token
divided by n - 1. Its time_per_output_token_ms includes the first token and is not used.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.files.document_values import check_mapping, check_rows, is_number
from planner.importers import foreign_fields
from planner.importers.benchmark_runs import MeasuredRun, MeasuredRuns, runs_of_files
from planner.importers.foreign_fields import StatedSetup

MARKS = ("benchmarks",)  # Keys by which such a file is recognised.
# Our metrics -> guidellm's name, and the factor from its unit to seconds.
METRICS = {
    "ttft": ("time_to_first_token_ms", 1e-3),
    "tpot": ("inter_token_latency_ms", 1e-3),
    "e2e": ("request_latency", 1.0),
}


def read(paths: Sequence[Path], stated: StatedSetup, catalog: Catalog) -> MeasuredRuns:
    """The runs of these files, all of one engine. Raises InputError for a file that is not guidellm's."""
    return runs_of_files("guidellm", paths, stated, catalog, _parse_file)


def _parse_file(label: str, path: Path) -> tuple[list[MeasuredRun], str | None]:
    """The runs of a file, and the first name of an LLM in it; None if there is none."""
    document = check_mapping(foreign_fields.read_json(path), path)
    rows = {
        f"{label}[{i}]": check_mapping(row, f"{label}[{i}]")
        for i, row in enumerate(check_rows(document.get("benchmarks"), f"{path}: benchmarks"))
    }
    names = filter(None, (_llm_name(document, row) for row in rows.values()))
    return [_parse_run(where, row) for where, row in rows.items()], next(names, None)


def _llm_name(document: Mapping[str, Any], benchmark: Mapping[str, Any]) -> str | None:
    """The name of the LLM, which versions of guidellm write in different places; None without a name."""
    config = document.get("config")
    spec = config.get("spec") if isinstance(config, Mapping) else None
    for outer in (spec, config, document.get("args"), benchmark.get("config")):
        if isinstance(outer, Mapping):
            for inner in (outer, outer.get("backend"), outer.get("backend_kwargs")):
                if isinstance(inner, Mapping) and isinstance(name := inner.get("model"), str) and name:
                    return name
    return None


def _parse_run(where: str, benchmark: Mapping[str, Any]) -> MeasuredRun:
    """One benchmark: from its requests if it lists all of them, otherwise from its statistics."""
    requests = benchmark.get("requests")
    by_outcome = requests if isinstance(requests, Mapping) else {}
    listed = {
        outcome: rows if isinstance(rows := by_outcome.get(outcome), list) else []
        for outcome in ("successful", "errored")
    }
    succeeded = [
        check_mapping(row, f"{where}: requests.successful[{i}]") for i, row in enumerate(listed["successful"])
    ]
    metrics = check_mapping(benchmark.get("metrics", {}), f"{where}: metrics")
    # guidellm may list only a sample of the requests; the totals count all.
    totals = metrics.get("request_totals")
    totals = totals if isinstance(totals, Mapping) else {}
    failed = len(listed["errored"])
    if is_number(totals.get("errored")):
        failed = max(failed, foreign_fields.read_count(totals["errored"], f"{where}: errored", least=0))
    total_succeeded = totals.get("successful")
    is_sample = isinstance(total_succeeded, int) and total_succeeded > len(succeeded)
    is_complete = bool(succeeded) and not is_sample
    read = _from_requests(where, succeeded) if is_complete else _from_statistics(where, metrics)
    if not read.latency_s:
        raise InputError(f"{where}: holds no latency; there is nothing to import")
    concurrency, rate_rps = _parse_load(where, benchmark, read.requests)
    return MeasuredRun(
        name=where,
        requests=read.requests,
        input_tokens=read.input_tokens,
        output_tokens=read.output_tokens,
        latency_s=read.latency_s,
        concurrency=concurrency,
        rate_rps=rate_rps,
        # In a closed loop answers decide when requests arrive, so arrivals are simulated, not replayed.
        arrival_s=() if concurrency is not None else read.start_s,
        failed=failed,
        notes=foreign_fields.run_remarks(failed=failed, is_summary=not is_complete),
    )


def _from_requests(where: str, succeeded: Sequence[Mapping[str, Any]]) -> foreign_fields.ReadRequests:
    """What the rows of the requests that succeeded say."""

    def tokens(*keys: str) -> tuple[float, ...]:
        """The tokens of every request, under the first of `keys` that it has."""
        counts = [
            foreign_fields.read_number(_first_of(row, keys), f"{where}: request {i}: {keys[0]}")
            for i, row in enumerate(succeeded)
        ]
        # A simulated request has at least one token each way, so a count of 0 becomes 1.
        return tuple(max(1.0, count) for count in counts)

    input_tokens = tokens("prompt_tokens", "input_tokens")
    output_tokens = tokens("output_tokens", "generated_tokens")
    latency = {}
    for metric, (key, factor) in METRICS.items():
        values = [
            foreign_fields.read_optional(row, key, f"{where}: request {i}") for i, row in enumerate(succeeded)
        ]
        # 0 stands for a latency that was not measured, such as the gap of an answer of one token.
        if statistics := foreign_fields.mean_and_percentiles([value * factor for value in values if value]):
            latency[metric] = statistics
    starts = [foreign_fields.read_optional(row, "request_start_time", where) for row in succeeded]
    start_times = [start for start in starts if start is not None]
    first = min(start_times, default=0.0)
    start_s = tuple(start - first for start in start_times) if len(start_times) == len(succeeded) else ()
    return foreign_fields.ReadRequests(len(succeeded), input_tokens, output_tokens, latency, start_s)


def _from_statistics(where: str, metrics: Mapping[str, Any]) -> foreign_fields.ReadRequests:
    """Like `_from_requests`, from statistics: without start times, and the only lengths are the means."""

    def statistics_of(*keys: str) -> Mapping[str, Any]:
        """The statistics of the requests that succeeded, under the first of these keys that is there."""
        by_outcome = _first_of(metrics, keys)
        statistics = by_outcome.get("successful", by_outcome) if isinstance(by_outcome, Mapping) else None
        return statistics if isinstance(statistics, Mapping) else {}

    latency: dict[str, dict[str, float]] = {}
    for metric, (key, factor) in METRICS.items():
        row = statistics_of(key)
        values = {"mean": row.get("mean"), "p50": row.get("median")}
        if isinstance(percentiles := row.get("percentiles"), Mapping):
            names = [f"p{percentile}" for percentile in foreign_fields.PERCENTILES]
            values |= {name: percentiles[name] for name in names if name in percentiles}
        latencies = {
            name: foreign_fields.read_number(value, f"{where}: {key} {name}") * factor
            for name, value in values.items()
            if value  # 0 as well as None stands for a latency that was not measured.
        }
        if latencies:
            latency[metric] = latencies
    counted = statistics_of("request_latency").get("count")
    count = foreign_fields.read_count(counted, f"{where}: request_latency count") if counted else 0
    if not count:
        raise InputError(f"{where}: no request succeeded; there is nothing to import")

    def mean_of(*keys: str) -> tuple[float]:
        """The mean length, under the first of these keys that is there."""
        mean = statistics_of(*keys).get("mean")
        return (foreign_fields.read_number(mean, f"{where}: {keys[0]} mean", least=1),)

    input_tokens = mean_of("prompt_token_count", "prompt_tokens")
    output_tokens = mean_of("output_token_count", "output_tokens")
    return foreign_fields.ReadRequests(count, input_tokens, output_tokens, latency)


def _parse_load(where: str, benchmark: Mapping[str, Any], requests: int) -> tuple[int | None, float | None]:
    """The load: (concurrency, None) of a closed loop, (None, rate) of an open one.

    (None, None) for an unknown strategy; then the start times of the requests are the load.
    """
    strategy: Any = None
    for key in ("config", "args", "scheduler"):  # Versions of guidellm differ in the key.
        outer = benchmark.get(key)
        if isinstance(outer, Mapping) and isinstance(outer.get("strategy"), Mapping):
            strategy = outer["strategy"]
            break
    if strategy is None:
        return None, None
    kind = strategy.get("type_", strategy.get("type"))
    if kind == "synchronous":
        return 1, None
    if kind == "concurrent":
        return foreign_fields.read_count(strategy.get("streams"), f"{where}: strategy.streams"), None
    if kind == "throughput":
        # Requests are sent as fast as a limit on concurrency allows; without a limit all at once.
        limit = strategy.get("max_concurrency")
        if not limit:
            return requests, None
        return foreign_fields.read_count(limit, f"{where}: strategy.max_concurrency"), None
    if kind in ("constant", "poisson"):
        return None, foreign_fields.read_number(strategy.get("rate"), f"{where}: strategy.rate")
    return None, None


def _first_of(row: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The value of the first of these keys that has one; versions of guidellm differ in the names."""
    return next((row[key] for key in keys if row.get(key) is not None), None)
