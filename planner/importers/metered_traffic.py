"""Traffic that is known as figures per interval, not as requests: vLLM's metrics, and bills by the hour.

Both become the section `traffic` of slo.yaml: a curve of rates, and lengths.

A range of Prometheus' samples (prometheus_range.py) holds what finished: `vllm:request_success_total` and the
histograms `vllm:request_prompt_tokens` and `vllm:request_generation_tokens`. Instances are added up. OpenAI's
usage (GET /v1/organization/usage/completions, or the CSV of its page; openai/openai-openapi, schemas
UsageTimeBucket and UsageCompletionsResult) holds requests and tokens per bucket: of lengths the mean alone.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.errors import InputError
from planner.files.checked_files import open_input
from planner.files.document_values import show_value
from planner.files.jsontext import parse_json
from planner.files.text_tables import parse_csv, read_text
from planner.importers.prometheus_range import (
    counter_increase,
    interval_edges,
    interval_histogram,
    mean_gauge,
    read_series,
)
from planner.importers.vllm_metrics import FINISHED, HITS, KV_USE, OUTPUT, PROMPT, QUERIES, WAITING
from planner.units import quantity

Floats = npt.NDArray[np.float64]
PROMETHEUS, USAGE = "prometheus", "openai-usage"
LENGTHS = {"input": PROMPT, "output": OUTPUT}
MOST_UNKNOWN_FRAC = 0.5
LEAST_EVERY_S = 1.0
_SHIFT_FRAC = 0.1  # A note says so if the histogram's mean is further from the counted one.
_WAITED = 1.0  # From so many waiting requests on average in an interval, engines were behind.
_METRIC = re.compile(
    rb'\s*(?:#\s*(?:HELP|TYPE|EOF)|vllm:\w+(?:\{|\s)|\{(?:__name__|[A-Za-z_]\w*)=")|\s*\{\s*"status"\s*:\s*"(?:success|error)"'
    rb'|\s*[\[{]\s*(?:\{\s*)?"(?:metric|resultType)"\s*:'
)
_BUCKETS = re.compile(rb'\s*[\[{].{0,400}?"object"\s*:\s*"(?:page|bucket)"', re.DOTALL)
_USAGE_COLUMNS = ("start_time", "end_time", "num_model_requests", "input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """Rates (N,) [requests/s] of intervals of `every_s`, and what is known of lengths: the value of `input`
    and of `output` in slo.yaml. `facts` are other things that the file says.
    """

    format: str
    rate_rps: Floats
    every_s: float
    lengths: Mapping[str, Mapping[str, Any]]
    mean_tokens: Mapping[str, float]
    facts: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """The section `traffic` of slo.yaml."""
        curve = [_plain(rate) for rate in self.rate_rps]
        return {"rate": {"curve": curve, "every": f"{_plain(self.every_s)} s"}, **self.lengths}

    def yaml(self, source: str) -> str:
        """The description as text for slo.yaml, with its source and the notes as comments."""
        comment_lines = [f"# Described by {source}: plan trace. Goes into slo.yaml, beside llm and slo."]
        comment_lines += [f"# {line}" for line in (*self.warnings, *self.notes)]
        curve = ", ".join(str(_plain(rate)) for rate in self.rate_rps)
        lines = [
            *comment_lines,
            "traffic:",
            f'  rate: {{curve: [{curve}], every: "{_plain(self.every_s)} s"}}',
            *(f"  {name}: {_flow(value)}" for name, value in self.lengths.items()),
        ]
        return "\n".join(lines) + "\n"

    def summary(self) -> dict[str, Any]:
        """What was found, in plain values."""
        return {
            "format": self.format,
            "intervals": len(self.rate_rps),
            "every_s": self.every_s,
            "mean_rps": float(self.rate_rps.mean()),
            "peak_rps": float(self.rate_rps.max()),
            "mean_input_tokens": self.mean_tokens["input"],
            "mean_output_tokens": self.mean_tokens["output"],
            **self.facts,
            "traffic": self.document(),
            "notes": list(self.notes),
        }


def described_traffic(
    files: Sequence[Path], *, every: str = "300 s", format: str | None = None
) -> Described | None:
    """What the files describe; None where they hold requests, or `format` says so.

    Raises InputError for metrics without times (one scrape), without requests, and where most is unknown.
    """
    format_name = format if format in (PROMETHEUS, USAGE) else None if format else _format(files[0])
    if format_name is None:
        return None
    if format_name == USAGE:
        return usage_traffic(files)
    every_s = quantity(every, "s", where="--every")
    if not LEAST_EVERY_S <= every_s <= 86400.0:
        raise InputError(f"--every: expected 1 s to 1 d, found {show_value(every)}")
    return metrics_traffic(files, every_s)


def _format(path: Path) -> str | None:
    """The format of a file, by its first bytes; None for one that is not known. A pipe is never opened for
    this, because it can be read but once.
    """
    if not os.path.isfile(path) or path.suffix in (".parquet", ".pq"):  # noqa: PTH113
        return None
    with open_input(path) as stream:
        head = stream.read(4096).removeprefix(b"\xef\xbb\xbf")
    if _METRIC.match(head):
        return PROMETHEUS
    header = head.split(b"\n", 1)[0].decode(errors="replace").replace('"', "").strip().split(",")
    return USAGE if _BUCKETS.match(head) or set(_USAGE_COLUMNS) <= set(header) else None


# ---------------------------------------------------------------- metrics


def metrics_traffic(files: Sequence[Path], every_s: float) -> Described:
    """Traffic described by samples of vLLM's metrics over a range of time. A counter that falls has begun
    anew, as after a restart. Gaps between samples are filled, and a note names them.
    """
    where = " and ".join(file.name for file in files[:3])
    parts = tuple(f"{name}_{part}" for name in LENGTHS.values() for part in ("bucket", "sum", "count"))
    wanted = {FINISHED, *parts, WAITING, *KV_USE, HITS[0], QUERIES[0]}
    series = read_series(list(files), wanted.__contains__)
    models = sorted({row.label("model_name") for row in series} - {""})
    if len(models) > 1:
        raise InputError(
            f"{where}: metrics of {len(models)} LLMs ({', '.join(models[:4])}), whose lengths differ; "
            "query one, "
            f"for instance {{model_name={models[0]!r}}}"
        )
    requests = [row for row in series if row.name == FINISHED] or [
        row for row in series if row.name == f"{LENGTHS['input']}_count"
    ]
    if not requests:
        raise InputError(
            f"{where}: holds no {FINISHED}; query it, and the buckets, _sum and _count of lengths"
        )
    edges_s = interval_edges(requests, every_s)
    if len(edges_s) < 2:
        raise InputError(
            f"{where}: covers less than one interval of {every_s:g} s; query a longer range, or say "
            "--every 60 s"
        )
    finished = counter_increase(requests, edges_s, gap_s=max(every_s, 300.0))
    warnings: list[str] = []
    notes: list[str] = []
    rate_rps = _filled(finished / every_s, where, warnings)
    if not rate_rps.any():
        raise InputError(f"{where}: no request finished in this time; query another range")
    lengths, means = {}, {}
    for side, name in LENGTHS.items():
        lengths[side], means[side] = _lengths(series, name, edges_s, where, notes)
    facts = _facts(series, edges_s, finished, warnings)
    return Described(PROMETHEUS, rate_rps, every_s, lengths, means, facts, tuple(notes), tuple(warnings))


def _filled(rate_rps: Floats, where: str, warnings: list[str]) -> Floats:
    """Unknown intervals from those beside them."""
    unknown = np.isnan(rate_rps)
    if unknown.mean() > MOST_UNKNOWN_FRAC:
        raise InputError(
            f"{where}: {int(unknown.sum())} of {len(rate_rps)} intervals are unknown, since samples are "
            "too far "
            "apart; query with a shorter step, or say a longer --every"
        )
    if unknown.any():
        known = np.flatnonzero(~unknown)
        first, last = known[0], known[-1]
        rate_rps, unknown = rate_rps[first : last + 1], unknown[first : last + 1]
        known = np.flatnonzero(~unknown)
        if unknown.any():
            warnings.append(
                f"{where}: {int(unknown.sum())} of {len(rate_rps)} intervals have no samples (scrapes are "
                "missing); "
                "their rates are drawn between those beside them"
            )
        rate_rps = np.interp(np.arange(len(rate_rps)), known, rate_rps[known])
    return rate_rps


def _lengths(
    series: Sequence[Any], name: str, edges_s: Floats, where: str, notes: list[str]
) -> tuple[dict[str, Any], float]:
    """The histogram of all intervals together, and the mean that the counted sum has."""
    sampled_histogram = interval_histogram(
        list(series), name, edges_s, gap_s=max(float(edges_s[1] - edges_s[0]), 300.0)
    )
    if sampled_histogram is None:
        raise InputError(f"{where}: holds no {name}_bucket; query it with all of its buckets")
    counts = np.nansum(sampled_histogram.counts, axis=0)
    total, summed = float(np.nansum(sampled_histogram.total)), float(np.nansum(sampled_histogram.sums))
    if not counts.sum() > 0:
        raise InputError(f"{where}: {name} counted no request in this time; query another range")
    upper = sampled_histogram.edges.copy()
    if math.isinf(upper[-1]):
        if len(upper) < 2:
            raise InputError(f"{where}: {name} has no bucket but +Inf; query all of its buckets")
        upper[-1] = 2 * upper[-2]
        if counts[-1] > 0:
            notes.append(
                f"{round(float(counts[-1]))} requests are longer than the last bucket of {name} "
                f"({upper[-2]:g}): taken "
                f"as up to {upper[-1]:g} tokens"
            )
    edges = np.concatenate(([0.0], upper))
    used = np.flatnonzero(counts > 0)
    low, high = int(used[0]), int(used[-1]) + 1
    edges, counts = edges[low : high + 1], counts[low:high]
    middle = float((counts * (edges[1:] + edges[:-1]) / 2).sum() / counts.sum())
    mean = summed / total if total > 0 and summed > 0 else middle
    if abs(middle / mean - 1) > _SHIFT_FRAC:
        notes.append(
            f"the mean of {name} is {mean:.4g} by its sum, {middle:.4g} by the middles of its buckets"
        )
    value = {"edges": [_plain(edge) for edge in edges], "counts": [_plain(count) for count in counts]}
    return {"histogram": value}, mean


def _facts(series: Sequence[Any], edges_s: Floats, finished: Floats, warnings: list[str]) -> dict[str, Any]:
    """Requests, how full the caches were, what they spared, and whether the engines were behind."""
    facts: dict[str, Any] = {"requests": float(np.nansum(finished))}
    aborted = [r for r in series if r.name == FINISHED and r.label("finished_reason") == "abort"]
    if aborted and (count := float(np.nansum(counter_increase(aborted, edges_s)))) > 0:
        facts["aborted_requests"] = count
    waiting = [row for row in series if row.name == WAITING]
    if waiting:
        queue = mean_gauge(waiting, edges_s)
        facts["most_waiting"] = None if np.isnan(queue).all() else float(np.nanmax(queue))
        behind = float(np.mean(queue[~np.isnan(queue)] >= _WAITED)) if not np.isnan(queue).all() else 0.0
        if behind > 0:
            warnings.append(
                f"requests waited in {behind:.0%} of the intervals (up to {facts['most_waiting']:.3g} at a "
                "time): "
                "what finished then is less than what was asked"
            )
    used = next((rows for name in KV_USE if (rows := [r for r in series if r.name == name])), [])
    if used:
        share = mean_gauge(used, edges_s) / len(used)
        facts["most_kv_cache_frac"] = None if np.isnan(share).all() else float(np.nanmax(share))
    hits, queries = (
        float(np.nansum(counter_increase([row for row in series if row.name == name], edges_s)))
        for name in (HITS[0], QUERIES[0])
    )
    if queries > 0:
        facts["prefix_hit_frac"] = hits / queries
        if hits / queries >= 0.01:
            warnings.append(
                f"{hits / queries:.0%} of the prompts' tokens came from prefix caches, which metrics do "
                "not say more "
                "of: the traffic described has no shared prefixes; add prefixes: to it, or give a log"
            )
    return facts


# ---------------------------------------------------------------- OpenAI's usage


def usage_traffic(files: Sequence[Path]) -> Described:
    """Traffic described by buckets of time with their counts of requests and tokens: a curve of rates, and
    mean lengths.
    """
    where = " and ".join(file.name for file in files[:3])
    rows = [row for file in files for row in _usage_rows(file)]
    table = np.array([[row[name] for name in _USAGE_COLUMNS] for row in rows], dtype=float).reshape(-1, 5)
    table = table[table[:, 1] > table[:, 0]]
    if not len(table) or not table[:, 2].sum() > 0:
        raise InputError(f"{where}: holds no request; ask for another time")
    starts, widths = table[:, 0], table[:, 1] - table[:, 0]
    every_s = float(np.median(widths))
    first = float(starts.min())
    places = (starts - first) / every_s
    if (np.abs(widths - every_s) > 1.0).any() or (np.abs(places - np.round(places)) > 1e-3).any():
        raise InputError(f"{where}: buckets have several widths; ask for one bucket_width, better 1m than 1d")
    intervals_count = round(float(places.max())) + 1
    if intervals_count > 100_000:
        raise InputError(f"{where}: spans {intervals_count} buckets, expected at most 100000")
    counts = np.bincount(np.round(places).astype(int), table[:, 2], intervals_count)
    requests = float(table[:, 2].sum())
    means = {"input": float(table[:, 3].sum()) / requests, "output": float(table[:, 4].sum()) / requests}
    if bad := [side for side, mean in means.items() if not mean >= 1]:
        raise InputError(f"{where}: {bad[0]} tokens are fewer than requests; are these embeddings?")
    notes = [f"buckets of {every_s:g} s tell the mean length alone; how lengths spread is assumed"]
    warnings = []
    if every_s > 3600:
        warnings.append(
            f"buckets of {every_s / 3600:g} h hide the busiest hour; export with bucket_width=1h or 1m"
        )
    lengths = {side: {"mean": _plain(mean)} for side, mean in means.items()}
    return Described(
        USAGE,
        counts / every_s,
        every_s,
        lengths,
        means,
        {"requests": requests},
        tuple(notes),
        tuple(warnings),
    )


def _usage_rows(path: Path) -> list[dict[str, float]]:
    text = read_text(path)
    if text.lstrip()[:1] in ("{", "["):
        return list(_usage_of_json(text, path))
    table = parse_csv(text, path, _USAGE_COLUMNS)
    rows = table.to_dict("records")
    return [_usage_row(row, f"{path}, row {k}") for k, row in enumerate(rows, start=1) if _is_given(row)]


def _is_given(row: Mapping[Any, Any]) -> bool:
    """An empty bucket has times alone."""
    value = row.get("num_model_requests")
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _usage_of_json(text: str, path: Path) -> Iterable[dict[str, float]]:
    """Pages, a line each or one over several lines; or a list of buckets."""
    try:
        documents = [parse_json(text, has_nan=True)]
    except ValueError:
        documents = []
        for number, line in enumerate(io.StringIO(text), start=1):
            if line.strip():
                try:
                    documents.append(parse_json(line, has_nan=True))
                except ValueError as error:
                    raise InputError(f"{path}, line {number}: is not JSON ({str(error)[:80]})") from None
    for document in documents:
        buckets = document.get("data") if isinstance(document, dict) and "data" in document else document
        for k, bucket in enumerate(buckets if isinstance(buckets, list) else [buckets]):
            where = f"{path}: data[{k}]"
            results = bucket.get("results", bucket.get("result")) if isinstance(bucket, dict) else None
            if not isinstance(results, list):
                raise InputError(f"{where}: expected a bucket with results, found {show_value(bucket)}")
            for result in results:
                if not isinstance(result, dict):
                    raise InputError(f"{where}: results: expected objects, found {show_value(result)}")
                if "embeddings" not in str(result.get("object", "")):
                    times = {name: bucket.get(name) for name in ("start_time", "end_time")}
                    yield _usage_row({**result, **times}, where)


def _usage_row(row: Mapping[Any, Any], where: str) -> dict[str, float]:
    columns = {}
    for name in _USAGE_COLUMNS:
        value = row.get(name)
        try:
            figure = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            figure = math.nan
        least, most = (946_684_800.0, 4_102_444_800.0) if name.endswith("_time") else (0.0, 1e18)
        if not least <= figure <= most:
            kind = "Unix time in seconds" if name.endswith("_time") else "a number >= 0"
            raise InputError(f"{where}: {name}: expected {kind}, found {show_value(value)}")
        columns[name] = figure
    return columns


def _plain(value: float) -> int | float:
    """Six digits are enough, and a whole number has no point."""
    rounded = float(f"{float(value):.6g}")
    return int(rounded) if rounded.is_integer() else rounded


def _flow(value: Any) -> str:
    """YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(one)}" for key, one in value.items()) + "}"
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
