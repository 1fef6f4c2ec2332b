"""inference-perf (kubernetes-sigs): stage_N_lifecycle_metrics.json, one run per stage of its load.

Times are in seconds. Its time_per_output_token is a request's (last - first) / (n - 1), our tpot, and its
inter_token_latency a gap between tokens. The file names neither LLM nor GPU. A summary_lifecycle_metrics.json
mixes all stages, so it has no load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.imports import fields
from planner.imports.fields import Facts
from planner.imports.runs import MeasuredRun, MeasuredRuns, loaded
from planner.io.values import mapping

MARKS = ("load_summary", "successes", "failures")
METRICS = {
    "ttft": "time_to_first_token",
    "tpot": "time_per_output_token",
    "tbt": "inter_token_latency",
    "e2e": "request_latency",
}
STATISTICS = {"mean": "mean", "max": "max", "median": "p50"} | {f"p{p}": f"p{p}" for p in fields.PERCENTILES}
BEHIND_FRAC = 0.05  # a load generator that sent so much less than asked did not keep up


def read(paths: Sequence[Path], facts: Facts, catalog: Catalog) -> MeasuredRuns:
    names = fields.names(paths)
    runs = tuple(
        loaded(_run(name, mapping(fields.read_json(path), path)), facts)
        for name, path in zip(names, paths, strict=True)
    )
    listed = fields.listed(names)
    llm, gpu, tp = fields.setup(facts, catalog, listed)
    return MeasuredRuns(llm, gpu, tp, f"inference-perf, {listed}", runs)


def _run(name: str, document: Mapping[str, Any]) -> MeasuredRun:
    good = mapping(document.get("successes"), f"{name}: successes")
    times = mapping(good.get("latency"), f"{name}: successes.latency")
    latency: dict[str, dict[str, float]] = {}
    for metric, key in METRICS.items():
        row = mapping(times.get(key) or {}, f"{name}: {key}")
        found = {
            ours: fields.number(row[theirs], f"{name}: {key} {theirs}")
            for theirs, ours in STATISTICS.items()
            if row.get(theirs)
        }
        if found:
            latency[metric] = found
    requests = fields.count(good.get("count"), f"{name}: successes.count", least=0)
    if not requests or not latency:
        raise InputError(f"{name}: no request succeeded; there is nothing to import")
    failures = mapping(document.get("failures") or {}, f"{name}: failures")
    failed = fields.count(failures.get("count") or 0, f"{name}: failures.count", least=0)
    gaps = latency.get("tbt", {})
    notes = list(
        fields.remarks(failed=failed, is_summary=True, gap_p50=gaps.get("p50"), gap_mean=gaps.get("mean"))
    )
    if cached := fields.optional(_prompts(name, good), "cached", f"{name}: prompt_tokens"):
        notes.append(f"{cached:g} prompt tokens came from the prefix cache, which is not simulated")
    concurrency, rate_rps = _load(name, document, notes)
    return MeasuredRun(
        name,
        requests,
        (_mean(name, _prompts(name, good), "prompt_tokens"),),
        (_mean(name, good.get("output_tokens") or good.get("output_len"), "output_tokens"),),
        latency,
        concurrency,
        rate_rps,
        failed=failed,
        notes=tuple(notes),
    )


def _load(name: str, document: Mapping[str, Any], notes: list[str]) -> tuple[int | None, float | None]:
    load = mapping(document.get("load_summary") or {}, f"{name}: load_summary")
    if (seats := load.get("concurrency")) is not None:
        return fields.count(seats, f"{name}: load_summary.concurrency"), None
    asked, sent = (
        fields.optional(load, f"{key}_rate", f"{name}: load_summary") for key in ("requested", "achieved")
    )
    if not asked:
        notes.append("the load is not known: give the files of single stages, or --rate or --concurrency")
        return None, None
    if sent and sent < (1 - BEHIND_FRAC) * asked:
        notes.append(f"asked for {asked:g} requests/s, the client sent {sent:.3g}; the latter counts")
        return None, sent
    return None, asked


def _prompts(name: str, good: Mapping[str, Any]) -> Mapping[str, Any]:
    row = good.get("prompt_tokens") or good.get("prompt_len")  # the older name
    return mapping(row, f"{name}: prompt_tokens")


def _mean(name: str, row: object, key: str) -> float:
    mean = mapping(row, f"{name}: {key}").get("mean")
    return fields.number(mean, f"{name}: {key}: mean", least=1)
