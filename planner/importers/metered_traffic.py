"""Reads traffic that was recorded as numbers per interval instead of single requests: vLLM's metrics, and
OpenAI's usage.

Both become the section `traffic` of slo.yaml: a curve of rates, and lengths.

Prometheus' samples over a range of time (prometheus_range.py) count finished requests:
`vllm:request_success_total` and the histograms `vllm:request_prompt_tokens` and
`vllm:request_generation_tokens`. Instances are added up. OpenAI's usage (GET
/v1/organization/usage/completions, or the CSV of its page; openai/openai-openapi, schemas UsageTimeBucket and
UsageCompletionsResult) has requests and tokens per bucket, from which only mean lengths follow.
"""

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
    PrometheusSeries,
    counter_increase,
    interval_edges,
    interval_histogram,
    mean_gauge,
    read_series,
)
from planner.importers.vllm_metrics import (
    FINISHED,
    HITS,
    KV_USE,
    OUTPUT,
    PROMPT,
    QUERIES,
    WAITING,
    prefill_series,
)
from planner.traffic.logs.times import YEAR_2000_S, YEAR_2100_S
from planner.units import DAY_S, HOUR_S, count_text, parse_quantity, show_digits

Floats = npt.NDArray[np.float64]
PROMETHEUS, USAGE = "prometheus", "openai-usage"
LENGTHS = {"input": PROMPT, "output": OUTPUT}  # vLLM's histogram of each length in slo.yaml.
# Traffic with a larger share of intervals without samples is refused: most of the curve would be a guess.
MOST_UNKNOWN_FRAC = 0.5
LEAST_EVERY_S = 1.0  # Prometheus does not scrape more often.
LEAST_GAP_S = 300.0  # Counters are interpolated over gaps up to this, or up to the interval if it is longer.
MOST_USAGE_BUCKETS = 100_000  # 69 days of minutes; more would be a typing error in a time.
SHOWN_HITS_FRAC = 0.01  # A warning comes if at least this share of prompt tokens hit prefix caches.
MOST_FIGURE = 1e18  # A larger count of requests or tokens is refused.
MOST_FILES_NAMED, MOST_LLMS_NAMED = 3, 4  # Errors name no more files, and no more LLMs, than these.
# Buckets of OpenAI's usage must have one width, to within WIDTH_TOLERANCE_S, and begin at multiples of it, to
# within PLACE_TOLERANCE_FRAC of it.
WIDTH_TOLERANCE_S, PLACE_TOLERANCE_FRAC = 1.0, 1e-3
# A histogram gives two means: by the middles of its buckets, and by its sum. If they differ by more than this
# share, requests are shifted within buckets to reach the mean by the sum, and a note says so.
_SHIFT_FRAC = 0.02
# If this many requests or more waited on average in an interval, engines did not keep up. Set by hand.
_BEHIND_WAITING = 1.0
HEAD_BYTES = 4096  # The beginning of a file that tells its format.
# Beginnings of Prometheus' formats: the text format, a dump of promtool, the API's JSON.
_METRIC = re.compile(
    rb'\s*(?:#\s*(?:HELP|TYPE|EOF)|vllm:\w+(?:\{|\s)|\{(?:__name__|[A-Za-z_]\w*)=")|\s*\{\s*"status"\s*:\s*"(?:success|error)"'
    rb'|\s*[\[{]\s*(?:\{\s*)?"(?:metric|resultType)"\s*:'
)
# The beginning of OpenAI's usage as JSON: a page of buckets, or a bucket.
_BUCKETS = re.compile(rb'\s*[\[{].{0,400}?"object"\s*:\s*"(?:page|bucket)"', re.DOTALL)
_USAGE_COLUMNS = ("start_time", "end_time", "num_model_requests", "input_tokens", "output_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class MeteredTraffic:
    """Traffic described by numbers per interval.

    `rate_rps` (N,) are request rates of intervals of `every_s`; `lengths` are the values of `input` and
    `output` in slo.yaml, `mean_tokens` their means. `facts` are other numbers of the file, for `plan trace`
    to print.
    """

    format: str
    rate_rps: Floats
    every_s: float
    lengths: Mapping[str, Mapping[str, Any]]
    mean_tokens: Mapping[str, float]
    facts: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """The rate curve and the lengths as the section `traffic` of slo.yaml."""
        curve = [_six_digits(rate) for rate in self.rate_rps]
        return {"rate": {"curve": curve, "every": f"{_six_digits(self.every_s)} s"}, **self.lengths}

    def to_yaml(self, source: str) -> str:
        """The description as text for slo.yaml, with its source and the notes as comments."""
        comment_lines = [f"# Described by {source}: plan trace. Goes into slo.yaml, beside llm and slo."]
        comment_lines += [f"# {line}" for line in (*self.warnings, *self.notes)]
        curve = ", ".join(str(_six_digits(rate)) for rate in self.rate_rps)
        lines = [
            *comment_lines,
            "traffic:",
            f'  rate: {{curve: [{curve}], every: "{_six_digits(self.every_s)} s"}}',
            *(f"  {name}: {_inline_yaml(value)}" for name, value in self.lengths.items()),
        ]
        return "\n".join(lines) + "\n"

    def to_summary(self) -> dict[str, Any]:
        """What `plan trace` prints, as plain values."""
        return {
            "format": self.format,
            "intervals": len(self.rate_rps),
            "every_s": self.every_s,
            "mean_rps": float(self.rate_rps.mean()),
            "peak_rps": float(self.rate_rps.max()),
            "mean_input_tokens": self.mean_tokens["input"],
            "mean_output_tokens": self.mean_tokens["output"],
            **self.facts,
            "traffic": self.to_document(),
            "notes": list(self.notes),
        }


def read_metered_traffic(
    files: Sequence[Path], *, every: str = "300 s", format: str | None = None
) -> MeteredTraffic | None:
    """The traffic that files of numbers per interval describe; None for files of single requests. `format`
    names the files' format; without it the beginning of the first file tells. `every` is the length of an
    interval of metrics.

    Raises InputError for metrics without times (one scrape), without requests, or mostly unknown.
    """
    format_name = format or _detect_format(files[0])
    if format_name not in (PROMETHEUS, USAGE):
        return None
    if format_name == USAGE:
        return usage_traffic(files)
    every_s = parse_quantity(every, "s", where="--every")
    if not LEAST_EVERY_S <= every_s <= DAY_S:
        raise InputError(f"--every: expected 1 s to 1 d, found {show_value(every)}")
    return metrics_traffic(files, every_s)


def _detect_format(path: Path) -> str | None:
    """The format by a file's first bytes; None if unknown, or for a pipe, which can be read only once."""
    # Path.is_file raises OSError for a name that is too long, for which the reader of logs has a message.
    if not os.path.isfile(path) or path.suffix in (".parquet", ".pq"):  # noqa: PTH113
        return None
    with open_input(path) as stream:
        head = stream.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf")
    if _METRIC.match(head):
        return PROMETHEUS
    header = head.split(b"\n", 1)[0].decode(errors="replace").replace('"', "").strip().split(",")
    return USAGE if _BUCKETS.match(head) or set(_USAGE_COLUMNS) <= set(header) else None


# ---------------------------------------------------------------- metrics


def metrics_traffic(files: Sequence[Path], every_s: float) -> MeteredTraffic:
    """Traffic from samples of vLLM's metrics over a range of time.

    Intervals without samples are filled, with a warning.
    """
    where = " and ".join(file.name for file in files[:MOST_FILES_NAMED])
    parts = tuple(f"{name}_{part}" for name in LENGTHS.values() for part in ("bucket", "sum", "count"))
    needed_names = {FINISHED, *parts, WAITING, *KV_USE, HITS[0], QUERIES[0]}
    series = read_series(list(files), needed_names.__contains__)
    models = sorted({row.label("model_name") for row in series} - {""})
    if len(models) > 1:
        raise InputError(
            f"{where}: metrics of {len(models)} LLMs ({', '.join(models[:MOST_LLMS_NAMED])}), whose lengths "
            f"differ; query one, for instance {{model_name={models[0]!r}}}"
        )
    requests = [row for row in series if row.name == FINISHED]
    if not requests:  # The histogram of prompts counts finished requests too.
        requests = [row for row in series if row.name == f"{LENGTHS['input']}_count"]
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
    gap_s = max(every_s, LEAST_GAP_S)
    warnings: list[str] = []
    if prefill := prefill_series(series, edges_s):
        engines = count_text(len({row.labels for row in prefill if row.name == f"{OUTPUT}_sum"}), "engine")
        warnings.append(
            f"{where}: {engines} with answers of one token are taken for prefill workers and left out, as "
            "decode workers count their requests too"
        )
        requests = [row for row in requests if row not in prefill]
    finished = counter_increase(requests, edges_s, gap_s=gap_s)
    notes: list[str] = []
    rate_rps = _fill_unknown(finished / every_s, where, warnings)
    if not rate_rps.any():
        raise InputError(f"{where}: no request finished in this time; query another range")
    lengths, means = {}, {}
    for side, name in LENGTHS.items():
        lengths[side], means[side] = _length_histogram(
            [row for row in series if row not in prefill], name, edges_s, gap_s, where, notes
        )
    facts = _other_facts(series, edges_s, gap_s, finished, warnings)
    return MeteredTraffic(PROMETHEUS, rate_rps, every_s, lengths, means, facts, tuple(notes), tuple(warnings))


def _fill_unknown(rate_rps: Floats, where: str, warnings: list[str]) -> Floats:
    """The rates with unknown (NaN) intervals filled by interpolation, and a warning on them. Unknown
    intervals at both ends are cut off. Raises InputError if too many are unknown.
    """
    unknown = np.isnan(rate_rps)
    if unknown.mean() > MOST_UNKNOWN_FRAC:
        raise InputError(
            f"{where}: {int(unknown.sum())} of {len(rate_rps)} intervals are unknown, since samples are too "
            "far apart; query with a shorter step, or say a longer --every"
        )
    if unknown.any():
        known_indices = np.flatnonzero(~unknown)
        first, last = known_indices[0], known_indices[-1]
        rate_rps, unknown = rate_rps[first : last + 1], unknown[first : last + 1]
        known_indices = np.flatnonzero(~unknown)
        if unknown.any():
            warnings.append(
                f"{where}: {int(unknown.sum())} of {len(rate_rps)} intervals have no samples (scrapes are "
                "missing); their rates are drawn between those beside them"
            )
        rate_rps = np.interp(np.arange(len(rate_rps)), known_indices, rate_rps[known_indices])
    return rate_rps


def _length_histogram(
    series: Sequence[PrometheusSeries], name: str, edges_s: Floats, gap_s: float, where: str, notes: list[str]
) -> tuple[dict[str, Any], float]:
    """The histogram of all intervals together, for slo.yaml, and its mean [tokens], by the counted sum if
    there is one. Changes to the histogram are added to `notes`. Raises InputError if buckets or requests are
    missing.
    """
    sampled_histogram = interval_histogram(list(series), name, edges_s, gap_s=gap_s)
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
        upper[-1] = 2 * upper[-2]  # The open bucket needs some end, set by hand; a note says so.
        if counts[-1] > 0:
            notes.append(
                f"{round(float(counts[-1]))} requests are longer than the last bucket of {name} "
                f"({upper[-2]:g}): taken as up to {upper[-1]:g} tokens"
            )
    edges = np.concatenate(([0.0], upper))
    filled_buckets = np.flatnonzero(counts > 0)
    low, high = int(filled_buckets[0]), int(filled_buckets[-1]) + 1
    edges, counts = edges[low : high + 1], counts[low:high]
    middle_mean = float((counts * (edges[1:] + edges[:-1]) / 2).sum() / counts.sum())
    mean = summed / total if total > 0 and summed > 0 else middle_mean
    if abs(middle_mean / mean - 1) > _SHIFT_FRAC:
        edges, counts = _with_mean(edges, counts, mean)
        written_mean = float((counts * (edges[1:] + edges[:-1]) / 2).sum() / counts.sum())
        notes.append(
            f"the mean of {name} is {show_digits(mean, 4)} by its sum, {show_digits(middle_mean, 4)} by the "
            f"middles of its buckets; what is written has {show_digits(written_mean, 4)}"
        )
    return {"histogram": {"edges": [*map(_six_digits, edges)], "counts": [*map(_six_digits, counts)]}}, mean


def _with_mean(edges: Floats, counts: Floats, mean: float) -> tuple[Floats, Floats]:
    """Edges and counts of the histogram with every bucket cut into halves, so that it has this mean.

    In every bucket the lower half gets the same share w of its c requests, so that
    sum c (middle + (1/2 - w) width / 2) = mean sum c. A mean that would need w < 0 or w > 1 is not reached.
    """
    middles, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    shift = float((counts * middles).sum() / counts.sum()) - mean
    lower_frac = min(max(0.5 + shift * counts.sum() / (counts * widths / 2).sum(), 0.0), 1.0)
    halved_counts = np.column_stack((lower_frac * counts, (1 - lower_frac) * counts)).ravel()
    return np.sort(np.concatenate((edges, middles))), halved_counts


def _other_facts(
    series: Sequence[PrometheusSeries], edges_s: Floats, gap_s: float, finished: Floats, warnings: list[str]
) -> dict[str, Any]:
    """Numbers beside rates and lengths: requests, use and hits of caches, waiting requests. Adds to
    `warnings` if engines did not keep up, or prompts shared prefixes. A sample is valid for at most `gap_s`.
    """
    facts: dict[str, Any] = {"requests": float(np.nansum(finished))}
    aborted = [row for row in series if row.name == FINISHED and row.label("finished_reason") == "abort"]
    if aborted and (count := float(np.nansum(counter_increase(aborted, edges_s, gap_s=gap_s)))) > 0:
        facts["aborted_requests"] = count
    waiting = [row for row in series if row.name == WAITING]
    if waiting:
        queue = mean_gauge(waiting, edges_s, gap_s=gap_s)
        known_waiting = queue[~np.isnan(queue)]
        facts["most_waiting"] = float(known_waiting.max()) if known_waiting.size else None
        behind_frac = float(np.mean(known_waiting >= _BEHIND_WAITING)) if known_waiting.size else 0.0
        if behind_frac > 0:
            warnings.append(
                f"requests waited in {behind_frac:.0%} of the intervals (up to "
                f"{show_digits(facts['most_waiting'], 3)} at a time): fewer requests finished then than "
                "arrived"
            )
    by_name = [[row for row in series if row.name == name] for name in KV_USE]
    kv_use = next((rows for rows in by_name if rows), [])  # Versions of vLLM differ in the name.
    if kv_use:
        kv_frac = mean_gauge(kv_use, edges_s, gap_s=gap_s) / len(kv_use)  # `mean_gauge` adds up instances.
        facts["most_kv_cache_frac"] = None if np.isnan(kv_frac).all() else float(np.nanmax(kv_frac))

    def total_of(name: str) -> float:
        rows = [row for row in series if row.name == name]
        return float(np.nansum(counter_increase(rows, edges_s, gap_s=gap_s)))

    hits, queries = total_of(HITS[0]), total_of(QUERIES[0])
    if queries > 0:
        facts["prefix_hit_frac"] = hits / queries
        if hits / queries >= SHOWN_HITS_FRAC:
            warnings.append(
                f"{hits / queries:.0%} of the prompts' tokens came from prefix caches, which metrics do not "
                "say more of: the traffic described has no shared prefixes; add prefixes: to it, or give a "
                "log"
            )
    return facts


# ---------------------------------------------------------------- OpenAI's usage


def usage_traffic(files: Sequence[Path]) -> MeteredTraffic:
    """Traffic from OpenAI's buckets of time with counts of requests and tokens.

    It has a curve of rates, and mean lengths. Buckets that are missing had no requests.
    """
    where = " and ".join(file.name for file in files[:MOST_FILES_NAMED])
    rows = [row for file in files for row in _usage_rows(file)]
    table = np.array([[row[name] for name in _USAGE_COLUMNS] for row in rows], dtype=float)
    table = table.reshape(-1, len(_USAGE_COLUMNS))
    table = table[table[:, 1] > table[:, 0]]  # Buckets without a width have no rate.
    starts_s, ends_s, bucket_requests, input_tokens, output_tokens = table.T
    requests = float(bucket_requests.sum())
    if not requests > 0:
        raise InputError(f"{where}: holds no request; ask for another time")
    widths_s = ends_s - starts_s
    every_s = float(np.median(widths_s))
    places = (starts_s - starts_s.min()) / every_s  # The number of each bucket from the first, fractional.
    has_other_width = np.abs(widths_s - every_s) > WIDTH_TOLERANCE_S
    is_misplaced = np.abs(places - np.round(places)) > PLACE_TOLERANCE_FRAC
    if has_other_width.any() or is_misplaced.any():
        raise InputError(f"{where}: buckets have several widths; ask for one bucket_width, better 1m than 1d")
    intervals = round(float(places.max())) + 1
    if intervals > MOST_USAGE_BUCKETS:
        raise InputError(f"{where}: spans {intervals} buckets, expected at most {MOST_USAGE_BUCKETS}")
    counts = np.bincount(np.round(places).astype(int), bucket_requests, intervals)
    means = {"input": float(input_tokens.sum()) / requests, "output": float(output_tokens.sum()) / requests}
    if bad := [side for side, mean in means.items() if not mean >= 1]:
        raise InputError(f"{where}: {bad[0]} tokens are fewer than requests; are these embeddings?")
    notes = [f"buckets of {every_s:g} s tell the mean length alone; how lengths spread is assumed"]
    warnings = []
    if len(models := sorted({str(row["model"]) for row in rows if row["num_model_requests"]} - {""})) > 1:
        warnings.append(
            f"the usage of {len(models)} models ({', '.join(map(show_value, models[:MOST_LLMS_NAMED]))}) is "
            "added up, and their lengths are averaged; where an LLM shall serve one of them, export that one"
        )
    if every_s > HOUR_S:
        warnings.append(
            f"buckets of {every_s / HOUR_S:g} h hide the busiest hour; export with bucket_width=1h or 1m"
        )
    lengths = {side: {"mean": _six_digits(mean)} for side, mean in means.items()}
    return MeteredTraffic(
        USAGE,
        counts / every_s,
        every_s,
        lengths,
        means,
        {"requests": requests},
        tuple(notes),
        tuple(warnings),
    )


def _usage_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON or CSV file, each with _USAGE_COLUMNS and `model`. Raises InputError."""
    text = read_text(path)
    if text.lstrip()[:1] in ("{", "["):
        return list(_usage_of_json(text, path))
    table = parse_csv(text, path, _USAGE_COLUMNS)
    rows = table.to_dict("records")
    return [_usage_row(row, f"{path}, row {k}") for k, row in enumerate(rows, start=1) if _has_counts(row)]


def _has_counts(row: Mapping[Any, Any]) -> bool:
    """Whether a row of the CSV has counts; the row of an empty bucket has only times."""
    value = row.get("num_model_requests")
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _usage_of_json(text: str, path: Path) -> Iterable[dict[str, Any]]:
    """The rows of one page, of a page per line, or of a list of buckets."""
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


def _usage_row(row: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """The _USAGE_COLUMNS of a row as numbers, and its `model`, an empty text if it names none. Raises
    InputError for columns that are no numbers.
    """
    model = row.get("model")
    columns: dict[str, Any] = {"model": model if isinstance(model, str) else ""}
    for name in _USAGE_COLUMNS:
        value = row.get(name)
        try:
            figure = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            figure = math.nan
        least, most = (YEAR_2000_S, YEAR_2100_S) if name.endswith("_time") else (0.0, MOST_FIGURE)
        if not least <= figure <= most:
            kind = "Unix time in seconds" if name.endswith("_time") else "a number >= 0"
            raise InputError(f"{where}: {name}: expected {kind}, found {show_value(value)}")
        columns[name] = figure
    return columns


def _six_digits(value: float) -> int | float:
    """Six significant digits, as an int if it is whole, for short files."""
    rounded = float(f"{float(value):.6g}")
    return int(rounded) if rounded.is_integer() else rounded


def _inline_yaml(value: Any) -> str:
    """The value as YAML in flow style, {key: [1, 2]}, so that a section takes one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_inline_yaml(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
