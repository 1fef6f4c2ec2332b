"""guidellm's benchmarks.json: one run per entry of `benchmarks`.

Its inter_token_latency_ms is a request's (last - first) / (n - 1), our tpot; its time_per_output_token_ms
includes the first token and is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.files.document_values import check_mapping, check_rows, is_number
from planner.importers import foreign_fields
from planner.importers.benchmark_runs import MeasuredRun, MeasuredRuns, with_stated_load
from planner.importers.foreign_fields import Facts

MARKS = ("benchmarks",)
METRICS = {
    "ttft": ("time_to_first_token_ms", 1e-3),
    "tpot": ("inter_token_latency_ms", 1e-3),
    "e2e": ("request_latency", 1.0),
}


def read(paths: Sequence[Path], facts: Facts, catalog: Catalog) -> MeasuredRuns:
    runs: list[MeasuredRun] = []
    model_name = None
    files = foreign_fields.file_labels(paths)
    for file, path in zip(files, paths, strict=True):
        document = check_mapping(foreign_fields.read_json(path), path)
        for i, row in enumerate(check_rows(document.get("benchmarks"), f"{path}: benchmarks")):
            where = f"{file}[{i}]"
            benchmark = check_mapping(row, where)
            model_name = model_name or _model(document, benchmark)
            runs.append(with_stated_load(_run(where, benchmark), facts))
    names = foreign_fields.list_first(files)
    llm, gpu, tp = foreign_fields.read_setup(facts, catalog, names, llm=model_name)
    return MeasuredRuns(llm, gpu, tp, f"guidellm, {names}", tuple(runs))


def _model(document: Mapping[str, Any], benchmark: Mapping[str, Any]) -> str | None:
    config = document.get("config")
    spec = config.get("spec") if isinstance(config, Mapping) else None
    for place in (spec, config, document.get("args"), benchmark.get("config")):
        if isinstance(place, Mapping):
            for inner in (place, place.get("backend"), place.get("backend_kwargs")):
                if isinstance(inner, Mapping) and isinstance(name := inner.get("model"), str) and name:
                    return name
    return None


def _run(where: str, benchmark: Mapping[str, Any]) -> MeasuredRun:
    requests = benchmark.get("requests")
    parts = requests if isinstance(requests, Mapping) else {}
    successful = parts.get("successful")
    good = [
        check_mapping(row, f"{where}: requests.successful[{i}]")
        for i, row in enumerate(successful if isinstance(successful, list) else [])
    ]
    errored = parts.get("errored")
    failed = len(errored) if isinstance(errored, list) else 0
    metrics = check_mapping(benchmark.get("metrics", {}), f"{where}: metrics")
    totals = metrics.get("request_totals")
    if isinstance(totals, Mapping) and is_number(totals.get("errored")):
        failed = max(failed, foreign_fields.read_count(totals["errored"], f"{where}: errored", least=0))

    finished = totals.get("successful") if isinstance(totals, Mapping) else None
    # GuideLLM writes at most so many requests as it was told to sample.
    is_sample = isinstance(finished, int) and finished > len(good)
    if good and not is_sample:
        count, lengths, latency, start_s = _detailed(where, good)
    else:
        count, lengths, latency, start_s = _summary(where, metrics)
    if not latency:
        raise InputError(f"{where}: no request succeeded; there is nothing to import")
    concurrency, rate_rps = _load(where, benchmark, count)
    return MeasuredRun(
        where,
        count,
        lengths[0],
        lengths[1],
        latency,
        concurrency,
        rate_rps,
        () if concurrency is not None else start_s,
        failed,
        notes=foreign_fields.run_remarks(failed=failed, is_summary=is_sample or not good),
    )


def _detailed(
    where: str, good: Sequence[Mapping[str, Any]]
) -> tuple[int, foreign_fields.Lengths, dict[str, dict[str, float]], tuple[float, ...]]:
    input_tokens, output_tokens = (
        tuple(
            max(1.0, foreign_fields.read_number(_any(row, keys), f"{where}: request {i}: {keys[0]}"))
            for i, row in enumerate(good)
        )
        for keys in (("prompt_tokens", "input_tokens"), ("output_tokens", "generated_tokens"))
    )
    latency = {}
    for metric, (key, factor) in METRICS.items():
        values = [
            foreign_fields.read_optional(row, key, f"{where}: request {i}") for i, row in enumerate(good)
        ]
        if quantiles := foreign_fields.mean_and_percentiles([value * factor for value in values if value]):
            latency[metric] = quantiles
    starts = [foreign_fields.read_optional(row, "request_start_time", where) for row in good]
    known = [start for start in starts if start is not None]
    first = min(known, default=0.0)
    start_s = tuple(start - first for start in known) if len(known) == len(good) else ()
    return len(good), (input_tokens, output_tokens), latency, start_s


def _summary(
    where: str, metrics: Mapping[str, Any]
) -> tuple[int, foreign_fields.Lengths, dict[str, dict[str, float]], tuple[float, ...]]:
    def of(*keys: str) -> Mapping[str, Any]:
        statistics_row = _any(metrics, keys)
        good = (
            statistics_row.get("successful", statistics_row) if isinstance(statistics_row, Mapping) else None
        )
        return good if isinstance(good, Mapping) else {}

    latency: dict[str, dict[str, float]] = {}
    for metric, (key, factor) in METRICS.items():
        row = of(key)
        percentiles = row.get("percentiles")
        values = {"mean": row.get("mean"), "p50": row.get("median")} | {
            name: value
            for name, value in (percentiles.items() if isinstance(percentiles, Mapping) else ())
            if name in ("p50", "p90", "p95", "p99")
        }
        latencies = {
            name: foreign_fields.read_number(value, f"{where}: {key} {name}") * factor
            for name, value in values.items()
            if value
        }
        if latencies:
            latency[metric] = latencies
    counted = of("request_latency").get("count")
    count = foreign_fields.read_count(counted, f"{where}: request_latency count") if counted else 0
    if not count:
        raise InputError(f"{where}: no request succeeded; there is nothing to import")
    input_tokens, output_tokens = (
        (foreign_fields.read_number(of(*keys).get("mean"), f"{where}: {keys[0]} mean", least=1),)
        for keys in (("prompt_token_count", "prompt_tokens"), ("output_token_count", "output_tokens"))
    )
    return count, (input_tokens, output_tokens), latency, ()


def _load(where: str, benchmark: Mapping[str, Any], requests: int) -> tuple[int | None, float | None]:
    strategy: Any = None
    for key in ("config", "args", "scheduler"):
        place = benchmark.get(key)
        if isinstance(place, Mapping) and isinstance(place.get("strategy"), Mapping):
            strategy = place["strategy"]
            break
    if strategy is None:
        return None, None
    kind = strategy.get("type_", strategy.get("type"))
    if kind == "synchronous":
        return 1, None
    if kind == "concurrent":
        return foreign_fields.read_count(strategy.get("streams"), f"{where}: strategy.streams"), None
    if kind == "throughput":
        most = strategy.get("max_concurrency")
        return foreign_fields.read_count(
            most, f"{where}: strategy.max_concurrency"
        ) if most else requests, None
    if kind in ("constant", "poisson"):
        return None, foreign_fields.read_number(strategy.get("rate"), f"{where}: strategy.rate")
    return None, None


def _any(row: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), None)
