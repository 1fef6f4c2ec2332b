"""Reads samples of Prometheus over a range of time, and makes numbers per interval of counters, gauges and
histograms.

These formats are read: the matrix that `/api/v1/query_range` and `/api/v1/query?query=name[1h]` answer, and
that `promtool query range -o json` prints; the text of `promtool tsdb dump` (milliseconds) and of `promtool
tsdb dump-openmetrics` (seconds).

A counter that falls was reset to zero. A sample that is not a number marks the end of a series (Prometheus'
staleness marker). The first value of a counter is no increase, as in Prometheus' own increase(). Between
samples that are further apart than `GAP_S` counters are unknown.

Source: prometheus.io/docs/prometheus/latest/querying/api, and prometheus/prometheus, cmd/promtool/tsdb.go.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.errors import InputError
from planner.files.document_values import show_value
from planner.files.text_tables import read_text
from planner.importers.foreign_fields import parse_json

Floats = npt.NDArray[np.float64]
Labels = tuple[tuple[str, str], ...]  # Sorted, without __name__.
NamePredicate = Callable[[str], bool]

GAP_S = 300.0  # A sample holds for this long: Prometheus' lookback.
MOST_SAMPLES = 50_000_000  # More samples are refused: so many take 800 MB of times and values.
_LAST_S = 253402300800.0  # The year 10000: a greater time is not in seconds.
_SAME_S = 1e-6  # An edge no further than this from a sample counts as lying at it.
_WHOLE_TOLERANCE = 1e-9  # A sample nearer than this share of an interval to an edge counts as lying at it.
_MESSAGE_CHARS = 200  # The most characters that are quoted of Prometheus' own error message.
# A label `name="value"`; a line `name{labels} value time`, in which the name may be among the labels.
_LABEL = re.compile(r'\s*([A-Za-z_][\w]*)\s*=\s*"((?:\\.|[^"\\])*)"\s*(?:,|$)')
_LINE = re.compile(r'([A-Za-z_:][\w:]*)?(?:\{((?:[^"{}]|"(?:\\.|[^"\\])*")*)\})?\s+(\S+)\s+(-?[\d.eE+]+)')
_ESCAPES = {"n": "\n", '"': '"', "\\": "\\"}


@dataclass(frozen=True, slots=True, eq=False)
class PrometheusSeries:
    """One series: its name, its other labels, and its samples in order of time.

    `t_s` is Unix time [s], rising; `values` may be NaN (a staleness marker: the series ended there).
    """

    name: str
    labels: Labels
    t_s: Floats
    values: Floats

    def label(self, key: str) -> str:
        """The value of a label; empty if the series lacks it, which is the same to Prometheus."""
        return dict(self.labels).get(key, "")


@dataclass(frozen=True, slots=True, eq=False)
class SampledHistogram:
    """The observations that a histogram counted in each of N intervals, summed over instances (engines).

    `edges` (B,) are upper edges of buckets, rising, the last one infinite; `counts` (N, B) are per bucket,
    not cumulative; `total` (N,) and `sums` (N,) are the increases of `_count` and `_sum`. Unknown numbers are
    NaN.
    """

    edges: Floats
    counts: Floats
    total: Floats
    sums: Floats


def any_name(name: str) -> bool:
    """The NamePredicate that accepts every name."""
    return True


def read_series(paths: Sequence[Path], is_wanted: NamePredicate = any_name) -> tuple[PrometheusSeries, ...]:
    """The series of all files together, sorted by name and labels; only names that `is_wanted` accepts.

    Raises InputError for a file of another format, if no series is left, or if files contradict each other.
    """
    all_series = [series for path in paths for series in parse_series(read_text(path), path, is_wanted)]
    merged = _merge_series(all_series, " and ".join(path.name for path in paths[:3]))
    if not merged:
        raise InputError(
            f"{paths[0] if paths else 'Prometheus'}: holds no samples of the metrics that are needed; "
            "expected vLLM's, for instance vllm:request_success_total"
        )
    return merged


def parse_series(
    text: str, where: object, is_wanted: NamePredicate = any_name
) -> tuple[PrometheusSeries, ...]:
    """The series in a text of one of the formats of the module's docstring; arguments as in `read_series`."""
    start = text.lstrip()  # A line of tsdb dump begins with "{" too, but no quotation mark follows.
    if not start:
        raise InputError(f"{where}: is empty; expected samples of Prometheus")
    if start.startswith("[") or (start.startswith("{") and start[1:].lstrip()[:1] in ('"', "}")):
        return _merge_series(_series_of_json(text, where, is_wanted), where)
    return _merge_series(_series_of_lines(text, where, is_wanted), where)


def parse_answer(document: Any, where: object) -> tuple[PrometheusSeries, ...]:
    """The series of one answer of the API, already parsed from JSON."""
    return _merge_series(list(_series_of_answer(document, where, any_name)), where)


# --- JSON ---


def _series_of_json(text: str, where: object, is_wanted: NamePredicate) -> list[PrometheusSeries]:
    """The series of one answer, of a list of answers or of rows of a matrix, or of an answer per line."""
    try:
        documents = [parse_json(text, where)]
    except InputError:
        lines = [(k, line) for k, line in enumerate(text.split("\n"), start=1) if line.strip()]
        if len(lines) < 2 or not lines[0][1].rstrip().endswith("}"):
            raise  # The text has no answer on each line.
        documents = [parse_json(line, f"{where}, line {k}") for k, line in lines]
    all_series: list[PrometheusSeries] = []
    for document in documents:
        rows = document if isinstance(document, list) else [document]
        for k, row in enumerate(rows):
            row_where = f"{where}: [{k}]" if isinstance(document, list) else where
            if isinstance(row, dict) and "metric" in row:
                all_series += _series_of_row(row, row_where, is_wanted)
            else:
                all_series += _series_of_answer(row, row_where, is_wanted)
    return all_series


def _series_of_answer(document: Any, where: object, is_wanted: NamePredicate) -> Iterable[PrometheusSeries]:
    if not isinstance(document, dict):
        raise InputError(
            f"{where}: expected an answer of /api/v1/query_range, an object, found {show_value(document)}"
        )
    if document.get("status") == "error":
        message = " ".join(str(document.get("error", "")).split())[:_MESSAGE_CHARS]
        raise InputError(f"{where}: Prometheus answered an error: {message or 'without a message'}")
    data = document.get("data", document)
    kind = data.get("resultType") if isinstance(data, dict) else None
    if kind != "matrix":
        raise InputError(
            f"{where}: data.resultType is {show_value(kind)}, expected matrix: ask /api/v1/query_range, or "
            "/api/v1/query for a range such as name[1h]"
        )
    rows = data.get("result")
    if not isinstance(rows, list):
        raise InputError(f"{where}: data.result is {show_value(rows)}, expected a list of series")
    for k, row in enumerate(rows):
        yield from _series_of_row(row, f"{where}: data.result[{k}]", is_wanted)


def _series_of_row(row: Any, where: object, is_wanted: NamePredicate) -> list[PrometheusSeries]:
    """The series of one row of a matrix; none if its name is not wanted."""
    metric = row.get("metric") if isinstance(row, dict) else None
    if not isinstance(metric, dict) or not all(isinstance(value, str) for value in metric.values()):
        raise InputError(f"{where}: metric is {show_value(metric)}, expected an object of labels")
    name = metric.get("__name__", "")
    if not name:
        raise InputError(
            f"{where}: has no __name__, which rate(), sum() and the like take away: query the counters "
            "themselves, for instance vllm:request_success_total"
        )
    if not is_wanted(name):
        return []
    values = row.get("values")
    if values is None and "histograms" in row:
        raise InputError(
            f"{where}: {name} is a native histogram, which is not read; scrape classic ones "
            "(always_scrape_classic_histograms: true)"
        )
    if not isinstance(values, list):
        raise InputError(f"{where}: values is {show_value(values)}, expected a list of [time, value]")
    samples = np.empty((len(values), 2))
    for k, pair in enumerate(values):
        if not isinstance(pair, list) or len(pair) != 2:
            raise InputError(f"{where}: values[{k}] is {show_value(pair)}, expected [time, value]")
        samples[k] = (
            _parse_time_s(pair[0], f"{where}: values[{k}]"),
            _parse_value(pair[1], f"{where}: values[{k}]"),
        )
    return [_sorted_series(name, metric, samples, where)]


# --- lines ---


def _series_of_lines(text: str, where: object, is_wanted: NamePredicate) -> list[PrometheusSeries]:
    """The series of tsdb dump, `{__name__="x", ...} value ms`, or of dump-openmetrics, `x{...} value s`."""
    samples_by_series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    is_dump: bool | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        line_where = f"{where}, line {number}"
        match = _LINE.fullmatch(line)
        if match is None:
            raise InputError(
                f"{line_where}: {show_value(line[:80])} is not a sample with its time, as promtool tsdb dump "
                "and dump-openmetrics write it; a page of /metrics has no times: ask Prometheus, "
                "/api/v1/query_range"
            )
        in_braces = match[1] is None
        if is_dump not in (None, in_braces):
            raise InputError(
                f"{line_where}: mixes lines of tsdb dump and of dump-openmetrics; give two files"
            )
        is_dump = in_braces
        name = match[1] or _dump_name(match[2] or "", line_where)
        if is_wanted(name):
            time_s = _parse_time_s(match[4], line_where, per_s=1000.0 if in_braces else 1.0)
            samples_by_series.setdefault((name, match[2] or ""), []).append(
                (time_s, _parse_value(match[3], line_where))
            )
    return [
        _sorted_series(name, _parse_labels(labels, where), np.array(samples), where)
        for (name, labels), samples in samples_by_series.items()
    ]


def _dump_name(labels: str, where: object) -> str:
    """The name of a series among the labels of a line of tsdb dump."""
    match = re.search(r'(?:^|,\s*)__name__="([^"\\]+)"', labels)
    if match is None:
        raise InputError(f"{where}: has no __name__; expected a line of promtool tsdb dump")
    return match[1]


def _parse_labels(text: str, where: object) -> dict[str, str]:
    """The labels of a series by name, from text such as `a="1",b="2"`; escaped characters are replaced."""
    labels, start = {}, 0
    while start < len(text):
        match = _LABEL.match(text, start)
        if match is None:
            raise InputError(f"{where}: {show_value(text[start : start + 60])} is not a label of a series")
        labels[match[1]] = re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), match[2])
        start = match.end()
    return labels


def _parse_time_s(value: Any, where: object, *, per_s: float = 1.0) -> float:
    """A time in Unix seconds, from one in units of which `per_s` are a second."""
    try:
        time_s = math.nan if isinstance(value, bool) else float(value) / per_s
    except (TypeError, ValueError, OverflowError):
        time_s = math.nan
    if not 0 <= time_s < _LAST_S:
        unit = "milliseconds" if per_s > 1 else "seconds"
        raise InputError(f"{where}: its time is {show_value(value)}, expected Unix time in {unit}")
    return time_s


def _parse_value(value: Any, where: object) -> float:
    """The value of a sample as a float; NaN and infinities are allowed."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where}: {show_value(value)} is not a number") from None


def _sorted_series(name: str, labels: Mapping[str, str], samples: Floats, where: object) -> PrometheusSeries:
    """A series of `samples` (n, 2) of time and value, sorted by time, each time once.

    Raises InputError where one time has two values.
    """
    samples = samples.reshape(-1, 2)
    kept_labels = tuple(sorted((key, value) for key, value in labels.items() if key != "__name__" and value))
    order = np.argsort(samples[:, 0], kind="stable")
    t_s, values = samples[order, 0], samples[order, 1]
    repeats = np.flatnonzero(np.diff(t_s) == 0)
    if repeats.size:
        is_same = (values[repeats] == values[repeats + 1]) | (
            np.isnan(values[repeats]) & np.isnan(values[repeats + 1])
        )
        if not is_same.all():
            time_s = t_s[repeats[np.flatnonzero(~is_same)[0]]]
            raise InputError(f"{where}: {name} has two values at {time_s:.3f}; keep the samples of one")
        kept_rows = np.append(True, np.diff(t_s) > 0)
        t_s, values = t_s[kept_rows], values[kept_rows]
    return PrometheusSeries(name, kept_labels, t_s, values)


def _merge_series(unmerged: Iterable[PrometheusSeries], where: object) -> tuple[PrometheusSeries, ...]:
    """Series of equal name and labels as one, the empty ones left out."""
    series_by_labels: dict[tuple[str, Labels], list[PrometheusSeries]] = {}
    for series in unmerged:
        if series.t_s.size:
            series_by_labels.setdefault((series.name, series.labels), []).append(series)
    merged = []
    for (name, labels), parts in sorted(series_by_labels.items(), key=lambda item: item[0]):
        if len(parts) == 1:
            merged.append(parts[0])
            continue
        samples = np.column_stack(
            [np.concatenate([part.t_s for part in parts]), np.concatenate([part.values for part in parts])]
        )
        merged.append(_sorted_series(name, dict(labels), samples, where))
    if sum(series.t_s.size for series in merged) > MOST_SAMPLES:
        raise InputError(
            f"{where}: more than {MOST_SAMPLES:,} samples; ask for fewer metrics or a longer step"
        )
    return tuple(merged)


# --- per interval ---


def find_series(series: Iterable[PrometheusSeries], *names: str) -> tuple[PrometheusSeries, ...]:
    """The series with the first of `names` that occurs: give newer names of a metric before older ones."""
    all_series = list(series)
    for name in names:
        if matching := tuple(row for row in all_series if row.name == name):
            return matching
    return ()


def interval_edges(series: Iterable[PrometheusSeries], every_s: float) -> Floats:
    """Edges [s] of whole intervals, at multiples of `every_s`, between the first and the last sample."""
    all_series = list(series)
    if not all_series:
        return np.empty(0)
    first, last = min(float(row.t_s[0]) for row in all_series), max(float(row.t_s[-1]) for row in all_series)
    low = math.ceil(first / every_s - _WHOLE_TOLERANCE)
    high = math.floor(last / every_s + _WHOLE_TOLERANCE)
    return np.asarray(np.arange(low, high + 1) * every_s, dtype=float)


def counter_increase(series: Sequence[PrometheusSeries], edges_s: Floats, *, gap_s: float = GAP_S) -> Floats:
    """(N,): the increase of counters in each interval between N + 1 edges, summed over instances.

    Between two samples a counter is assumed to rise evenly. An interval is NaN if a part of it lies in a gap
    of more than `gap_s` between two samples, or outside of all samples.
    """
    edges_s = np.asarray(edges_s, dtype=float)
    total = np.zeros(max(len(edges_s) - 1, 0))
    is_covered = np.zeros(total.shape, dtype=bool)
    first, last = math.inf, -math.inf
    for row in series:
        t_s, values, is_stale = _number_samples(row)
        if len(t_s) < 2:
            continue
        first, last = min(first, float(t_s[0])), max(last, float(t_s[-1]))
        rises = np.diff(values)
        rises = np.where(rises < 0, values[1:], rises)  # A counter that falls was reset to zero.
        rise_since_first = np.append(0.0, np.cumsum(rises))
        # Before the first sample and after the last `np.interp` is constant, so that nothing rises there.
        total += np.diff(np.interp(edges_s, t_s, rise_since_first))
        is_covered |= (edges_s[1:] > t_s[0]) & (edges_s[:-1] < t_s[-1])
        # After a staleness marker there was nothing to count, so that it is no gap.
        gaps = np.flatnonzero((np.diff(t_s) > gap_s) & ~is_stale[:-1])
        for k in gaps:
            total[_overlapping(edges_s, t_s[k], t_s[k + 1])] = np.nan
    is_known = is_covered & (edges_s[:-1] >= first - _SAME_S) & (edges_s[1:] <= last + _SAME_S)
    return np.where(is_known, total, np.nan)


def _overlapping(edges_s: Floats, start_s: float, end_s: float) -> npt.NDArray[np.bool_]:
    """The intervals (N,) that have a part between two times; edges within _SAME_S of a time lie at it."""
    return np.asarray((edges_s[1:] > start_s + _SAME_S) & (edges_s[:-1] < end_s - _SAME_S))


def _number_samples(row: PrometheusSeries) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Times and values of samples that are numbers, and whether a staleness marker follows each."""
    numbers_at = np.flatnonzero(np.isfinite(row.values))
    next_number_at = np.append(numbers_at[1:], len(row.values))
    # If the next number is not the next sample, a marker lies between.
    return row.t_s[numbers_at], row.values[numbers_at], next_number_at - numbers_at > 1


def mean_gauge(series: Sequence[PrometheusSeries], edges_s: Floats, *, gap_s: float = GAP_S) -> Floats:
    """(N,): the mean of a gauge over each interval, summed over its instances; NaN where unknown.

    A sample is valid until the next one, but no longer than `gap_s`. An interval in which for a while no
    sample is valid is unknown, unless the series had ended.
    """
    edges_s = np.asarray(edges_s, dtype=float)
    n = max(len(edges_s) - 1, 0)
    # The integral of the gauge over each interval, and whether any sample is valid within it.
    area, is_covered = np.zeros(n), np.zeros(n, dtype=bool)
    for row in series:
        ends = np.append(row.t_s[1:], np.inf)
        ends = np.minimum(ends, row.t_s + gap_s)
        # The last sample is not valid after its time, as the series may have ended; an only sample is.
        ends[-1] = row.t_s[-1] if len(row.t_s) > 1 else row.t_s[-1] + gap_s
        is_number = np.isfinite(row.values)
        starts, ends, values = row.t_s[is_number], ends[is_number], row.values[is_number]
        if not starts.size:
            continue
        # A span is the time for which a sample is valid. The integral up to an edge is the integral up to the
        # start of the last span that begins before the edge, plus that of this span up to the edge.
        integral_at_start = np.append(0.0, np.cumsum(values * (ends - starts)))
        starts_before = np.searchsorted(starts, edges_s, side="right")
        span = np.maximum(starts_before - 1, 0)
        elapsed_s = np.minimum(edges_s, ends[span]) - starts[span]
        integral = np.where(starts_before > 0, integral_at_start[span] + values[span] * elapsed_s, 0.0)
        area += np.diff(integral)
        is_covered |= (edges_s[1:] > starts[0]) & (edges_s[:-1] < ends[-1])
        for k in np.flatnonzero((np.diff(row.t_s) > gap_s) & is_number[:-1]):
            area[_overlapping(edges_s, row.t_s[k] + gap_s, row.t_s[k + 1])] = np.nan
    return np.where(is_covered, area / np.diff(edges_s), np.nan) if n else area


def interval_histogram(
    series: Sequence[PrometheusSeries], name: str, edges_s: Floats, *, gap_s: float = GAP_S
) -> SampledHistogram | None:
    """The histogram `name` per interval; None where there are no buckets of that name.

    Raises InputError where an edge is no number, and where instances have different edges.
    """
    series_by_edge: dict[float, list[PrometheusSeries]] = {}
    for row in series:
        if row.name == f"{name}_bucket":
            series_by_edge.setdefault(_parse_edge(row.label("le"), name), []).append(row)
    if not series_by_edge:
        return None
    edges = np.array(sorted(series_by_edge))
    # For each edge the instances that have this bucket, as their labels without `le`, the edge.
    instances_with_edge = {
        edge: {tuple(label for label in row.labels if label[0] != "le") for row in rows}
        for edge, rows in series_by_edge.items()
    }
    if any(instances != instances_with_edge[edges[-1]] for instances in instances_with_edge.values()):
        raise InputError(f"{name}: instances have different buckets; watch those of one version of an engine")
    if not math.isinf(edges[-1]):
        raise InputError(f'{name}: has no bucket le="+Inf"; query all of its buckets')
    # A bucket of Prometheus counts all observations up to its edge. Buckets that were scraped at different
    # moments may give a negative difference, which counts as 0.
    cumulative = np.array([counter_increase(series_by_edge[edge], edges_s, gap_s=gap_s) for edge in edges])
    counts = np.maximum(np.diff(cumulative, axis=0, prepend=0.0), 0.0).T
    sums = counter_increase([row for row in series if row.name == f"{name}_sum"], edges_s, gap_s=gap_s)
    return SampledHistogram(edges, counts, cumulative[-1], sums)


def _parse_edge(le: str, name: str) -> float:
    """The upper edge of a bucket from its label `le`."""
    try:
        edge = float(le)
    except ValueError:
        edge = math.nan
    if math.isnan(edge):
        raise InputError(f"{name}: a bucket has le={show_value(le)}, expected a number or +Inf")
    return edge
