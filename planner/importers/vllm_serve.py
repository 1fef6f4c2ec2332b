"""Reads results of `vllm bench serve --save-result`, with or without --save-detailed, and summary.json of a
sweep.

In these files, lists per request are in seconds, the summary is in milliseconds. `tpot` is our TPOT: the mean
gap of one request, without the time to its first token. `itl` is a gap between chunks, our TBT. A file has
GPU and tensor parallelism only if the user wrote them with --metadata (gpu=..., tp=...), or if a sweep varied
them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.files.document_values import check_mapping, check_rows, is_number
from planner.importers import foreign_fields
from planner.importers.benchmark_runs import ENGINE_KEYS, MeasuredRun, MeasuredRuns, with_stated_load
from planner.importers.foreign_fields import StatedSetup

# Keys by which such a file is recognised.
MARKS = ("completed", "total_input_tokens", "total_output_tokens", "request_throughput")
# vLLM's names of metrics -> ours.
NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "tbt", "e2el": "e2e"}
_SUMMARY = re.compile(r"(mean|median|p[\d.]+)_(ttft|tpot|itl|e2el)_ms")


def read(paths: Sequence[Path], stated: StatedSetup, catalog: Catalog) -> MeasuredRuns:
    """The runs of results of `vllm bench serve`, one or several in a file, all of one engine. Raises
    InputError for other files, and for runs of different engines.
    """
    documents: list[tuple[str, Mapping[str, Any]]] = []
    files = foreign_fields.file_labels(paths)
    for file, path in zip(files, paths, strict=True):
        document = foreign_fields.read_json(path)
        rows = document if isinstance(document, list) else [document]
        for i, row in enumerate(rows):
            name = file if len(rows) == 1 else f"{file}[{i}]"
            result = check_mapping(row, f"{path}: item {i}")
            # A sweep writes its parameters as the user typed them, perhaps with dashes.
            documents.append((name, {str(key).replace("-", "_"): value for key, value in result.items()}))
    setups = {
        foreign_fields.read_setup(
            stated,
            catalog,
            name,
            llm=row.get("model_id"),
            gpu=row.get("gpu", row.get("hw")),
            tp=row.get("tp", row.get("tensor_parallel_size")),
        )
        for name, row in documents
    }
    if len(setups) != 1:
        if not setups:
            raise InputError("vllm-bench-serve: holds no runs")
        engines = "; ".join(f"{llm} on {tp} x {gpu}" for llm, gpu, tp in sorted(setups))
        raise InputError(
            f"vllm-bench-serve: the runs are of different engines ({engines}); import each apart"
        )
    llm, gpu, tp = setups.pop()
    # A load on the command line replaces that of the file.
    runs = tuple(with_stated_load(_parse_run(name, row), stated) for name, row in documents)
    return MeasuredRuns(llm, gpu, tp, f"vllm bench serve, {foreign_fields.list_files(files)}", runs)


def _parse_run(name: str, row: Mapping[str, Any]) -> MeasuredRun:
    """The run of one result, from the times of its requests if the file has them, else from its means."""
    completed = foreign_fields.read_count(row.get("completed"), f"{name}: completed", least=0)
    if not completed:
        raise InputError(f"{name}: no request completed; there is nothing to import")
    failed = foreign_fields.read_count(row.get("failed") or 0, f"{name}: failed", least=0)
    notes: list[str] = []
    if isinstance(row.get("ttfts"), list) and isinstance(row.get("output_lens"), list):
        read = _from_requests(name, row, failed)
    else:
        # A summary has no lengths but their means, so every request counts as one of the mean lengths.
        input_tokens, output_tokens = (
            foreign_fields.read_number(row.get(key), f"{name}: {key}")
            for key in ("total_input_tokens", "total_output_tokens")
        )
        latency = _summary_latency(row)
        gaps = latency.get("tbt", {})  # A median far below the mean shows that tokens came in bunches.
        remarks = foreign_fields.run_remarks(
            failed=failed, is_summary=True, gap_p50=gaps.get("p50"), gap_mean=gaps.get("mean")
        )
        mean_lengths = (input_tokens / completed,), (output_tokens / completed,)
        read = foreign_fields.ReadRequests(completed, *mean_lengths, latency, remarks=remarks)
    notes += read.remarks
    concurrency, rate_rps, arrival_s = _parse_load(name, row, read.requests, read.start_s, notes)
    engine = {
        key: foreign_fields.read_count(row[key], f"{name}: {key}")
        for key in ENGINE_KEYS
        if row.get(key) not in (None, "")
    }
    return MeasuredRun(
        name=name,
        requests=read.requests,
        input_tokens=read.input_tokens,
        output_tokens=read.output_tokens,
        latency_s=read.latency_s,
        concurrency=concurrency,
        rate_rps=rate_rps,
        arrival_s=arrival_s,
        failed=failed,
        max_num_seqs=engine.get("max_num_seqs"),
        max_num_batched_tokens=engine.get("max_num_batched_tokens"),
        kv_tokens=engine.get("kv_tokens"),
        notes=tuple(notes),
    )


def _parse_load(
    name: str, row: Mapping[str, Any], requests: int, start_s: tuple[float, ...], notes: list[str]
) -> tuple[int | None, float | None, tuple[float, ...]]:
    """The load as (concurrency, rate, start times): concurrency alone for a closed loop; for an open one the
    rate, or `start_s` if starts were recorded. Remarks on features of the load that are not modelled are
    added to `notes`.
    """
    rate = row.get("request_rate")
    rate_rps = math.inf
    if rate not in (None, "inf", math.inf):
        rate_rps = foreign_fields.read_number(rate, f"{name}: request_rate")
    limit = row.get("max_concurrency")
    concurrency = None if limit is None else foreign_fields.read_count(limit, f"{name}: max_concurrency")
    if rate_rps == math.inf:
        return min(concurrency or requests, requests), None, ()  # Without a limit all requests come at once.
    if start_s:  # The recorded starts include the effects of a limit of concurrency and of burstiness.
        return None, None, start_s
    if concurrency is not None:
        notes.append(f"the limit of {concurrency} requests in flight is not modelled beside a rate")
    burstiness = foreign_fields.read_optional(row, "burstiness", name)
    if burstiness is not None and burstiness != 1:
        notes.append(f"burstiness was {burstiness:g}; arrivals are taken for Poisson")
    return None, rate_rps, ()


def _summary_latency(row: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Mean and percentiles [s] by metric, of a result without single requests."""
    latency: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        match = _SUMMARY.fullmatch(key)
        if match and is_number(value) and value > 0:  # vLLM writes 0 for what it did not measure.
            statistic = "p50" if match[1] == "median" else match[1]
            latency.setdefault(NAMES[match[2]], {})[statistic] = float(value) / 1e3
    return latency


def _from_requests(name: str, row: Mapping[str, Any], failed: int) -> foreign_fields.ReadRequests:
    """The requests that finished. `failed` is the file's own count of failures."""
    columns = {
        key: foreign_fields.read_numbers(row[key], f"{name}: {key}")
        for key in ("input_lens", "output_lens", "ttfts", "start_times", "latencies")
        if isinstance(row.get(key), list)
    }
    # An empty column was not recorded. `ttfts` alone stays, because its length is the number of requests.
    columns = {key: values for key, values in columns.items() if values or key == "ttfts"}
    gaps = [
        foreign_fields.read_numbers(item, f"{name}: itls[{i}]")
        for i, item in enumerate(check_rows(row.get("itls"), f"{name}: itls"))
    ]
    n = len(columns["ttfts"])
    lengths_by_key = {key: len(values) for key, values in columns.items()} | {"itls": len(gaps)}
    for key, items in lengths_by_key.items():
        if items != n:
            raise InputError(f"{name}: {key} has {items} items, ttfts has {n}")
    if not {"input_lens", "output_lens"} <= columns.keys():
        raise InputError(f"{name}: input_lens or output_lens is empty; expected one per request")
    errors = row.get("errors")
    # Without usable errors, a request that failed still shows by zeros in its columns.
    request_errors = errors if isinstance(errors, list) and len(errors) == n else [""] * n
    finished = [
        i
        for i in range(n)
        if not request_errors[i]
        and min(columns["ttfts"][i], columns["output_lens"][i], columns["input_lens"][i]) > 0
    ]
    if not finished:
        raise InputError(f"{name}: no request finished; there is nothing to import")
    # The time from the first token of each request to its last.
    decoding_s = [sum(gaps[i]) for i in finished]
    output_tokens = [columns["output_lens"][i] for i in finished]
    ttft_s = [columns["ttfts"][i] for i in finished]
    if "latencies" in columns:
        e2e_s = [columns["latencies"][i] for i in finished]
    else:
        e2e_s = [first_s + rest_s for first_s, rest_s in zip(ttft_s, decoding_s, strict=True)]
    tpot_s = [
        seconds / (tokens - 1)
        for seconds, tokens in zip(decoding_s, output_tokens, strict=True)
        if tokens > 1  # An answer of one token has no gap.
    ]
    every_gap = [gap for i in finished for gap in gaps[i]]
    latency = {
        metric: values
        for metric, values in (
            ("ttft", foreign_fields.mean_and_percentiles(ttft_s)),
            ("tpot", foreign_fields.mean_and_percentiles(tpot_s)),
            ("tbt", foreign_fields.mean_and_percentiles(every_gap)),
            ("e2e", foreign_fields.mean_and_percentiles(e2e_s)),
        )
        if values
    }
    tokens_after_first = sum(tokens - 1 for tokens in output_tokens)
    # `failed`, the file's own count, is 0 where the file has none; requests without output count too.
    remarks = foreign_fields.run_remarks(
        failed=max(failed, n - len(finished)),
        tokens_per_chunk=tokens_after_first / len(every_gap) if every_gap else 1.0,
        gap_p50=float(np.median(every_gap)) if every_gap else None,
        gap_mean=float(np.mean(every_gap)) if every_gap else None,
    )
    recorded_s = columns.get("start_times", [])
    first_s = min((recorded_s[i] for i in finished), default=0.0) if recorded_s else 0.0
    start_s = tuple(recorded_s[i] - first_s for i in finished) if recorded_s else ()
    input_tokens = tuple(columns["input_lens"][i] for i in finished)
    return foreign_fields.ReadRequests(
        len(finished), input_tokens, tuple(output_tokens), latency, start_s, remarks
    )
