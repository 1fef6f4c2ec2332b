"""Reads scrapes of a running vLLM's /metrics: one text, which counts since the server started; or two, whose
differences are taken; or a range of Prometheus' samples (prometheus_runs.py).

Means are differences of sum over differences of count. A histogram tells only in which bucket a percentile
lies: `p99_at_most` is the upper edge of that bucket, which is a bound and no measurement. A scrape has no
time, so the rate needs --duration, or --rate or --concurrency.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.files.text_tables import read_text
from planner.importers import foreign_fields
from planner.importers.benchmark_runs import MeasuredRun, MeasuredRuns, with_stated_load
from planner.importers.foreign_fields import StatedSetup
from planner.importers.prometheus_range import read_series
from planner.importers.prometheus_runs import is_range, runs_of_range
from planner.importers.vllm_metrics import LATENCIES, NAMES, OUTPUT, PROMPT

# The histograms of each metric. Versions of vLLM differ in the names; the first that was counted is taken.
HISTOGRAMS = {**LATENCIES, "queue": ("vllm:request_queue_time_seconds",)}
LENGTHS = (PROMPT, OUTPUT)  # Histograms of tokens.
# A sample `name{labels} value time`, in which labels and time may be missing; and one of its labels.
_SAMPLE = re.compile(r'([A-Za-z_:][\w:]*)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})?\s+(\S+)(?:\s+-?\d+)?\s*')
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:\\.|[^"\\])*)"')

# Values by the name of a sample and, for a bucket of a histogram, its edge; otherwise an empty text.
Samples = dict[tuple[str, str], float]
RANK_TOLERANCE = 1e-9  # A rank above a whole number by no more than this counts as that number.
# A label block_size or num_gpu_blocks with more digits is taken for an error.
MOST_BLOCK_DIGITS, MOST_BLOCKS_DIGITS = 6, 9


def read(paths: Sequence[Path], stated: StatedSetup, catalog: Catalog) -> MeasuredRuns:
    """The run of one scrape or of two, or the runs of a range. Raises InputError for other files."""
    texts = [read_text(path) for path in paths]
    if any(is_range(text) for text in texts):
        series = read_series(paths, frozenset(NAMES).__contains__)
        return runs_of_range(series, list(paths), stated, catalog)
    if not 1 <= len(paths) <= 2:
        raise InputError(f"prometheus: expected one or two scrapes, before and after; found {len(paths)}")
    scrapes = [_scrape(path) for path in paths]
    last, labels = scrapes[-1]
    names = " to ".join(path.name for path in paths)
    notes = []
    if len(scrapes) == 2:
        samples = _growth(scrapes[0][0], last, names)
    else:
        samples = last
        notes.append("one scrape: means since the server started, its warm-up included")
    latency: dict[str, dict[str, float]] = {}
    for metric, histograms in HISTOGRAMS.items():
        counted = (histogram_statistics(samples, histogram) for histogram in histograms)
        if statistics := next(filter(None, counted), None):
            latency[metric] = statistics
    # Lengths of which nothing is known count as one token, the least that a request has.
    mean_input_tokens, mean_output_tokens = (max(_mean(samples, name) or 0.0, 1.0) for name in LENGTHS)
    requests = int(samples.get(("vllm:e2e_request_latency_seconds_count", ""), 0.0))
    if not requests or not latency:
        raise InputError(f"{names}: no request finished; there is nothing to import")
    if preempted := samples.get(("vllm:num_preemptions_total", ""), 0.0):
        notes.append(f"{preempted:g} preemption(s): the KV cache was full at times")
    if cached := samples.get(("vllm:prefix_cache_hits_total", ""), 0.0):
        notes.append(f"{cached:g} prompt tokens came from the prefix cache, which is not simulated")
    rate_rps = requests / stated.duration_s if stated.duration_s else None
    if rate_rps is None and stated.rate_rps is None and stated.concurrency is None:
        notes.append("the load is not known: add --duration, --rate or --concurrency to calibrate with it")
    run = MeasuredRun(
        name=names,
        requests=requests,
        input_tokens=(mean_input_tokens,),
        output_tokens=(mean_output_tokens,),
        latency_s=latency,
        rate_rps=rate_rps,
        kv_tokens=_kv_tokens(labels),
        notes=(*notes, *foreign_fields.run_remarks(is_summary=True)),
    )
    llm, gpu, tp = foreign_fields.read_setup(stated, catalog, names, llm=labels.get("model_name"))
    return MeasuredRuns(llm, gpu, tp, f"vLLM /metrics, {names}", (with_stated_load(run, stated),))


def _growth(before: Samples, after: Samples, names: str) -> Samples:
    """How much each sample grew from one scrape to the next; `names` of the files are for errors."""
    growth = {key: value - before.get(key, 0.0) for key, value in after.items()}
    fallen = [name for (name, _), value in growth.items() if value < 0 and name.startswith("vllm:")]
    if fallen:
        raise InputError(
            f"{names}: {fallen[0]} fell: the files are in the wrong order, or the server restarted"
        )
    return growth


def _scrape(path: Path) -> tuple[Samples, Mapping[str, str]]:
    """The samples, summed over labels such as finished_reason; and the labels that name the LLM and the size
    of its KV cache.
    """
    samples: Samples = {}
    setup_labels: dict[str, str] = {}
    engines: set[tuple[str, str]] = set()  # (engine, LLM) of the histograms.
    for name, labels, value in samples_of(read_text(path), str(path)):
        # A sample `_created` is the time at which a counter began, not a count.
        if not name.startswith("vllm:") or name.endswith("_created"):
            continue
        if "cache_config_info" in name:
            setup_labels |= {key: labels[key] for key in ("block_size", "num_gpu_blocks") if key in labels}
            continue
        if name.endswith(("_bucket", "_count", "_sum")):
            engines.add((labels.get("engine", ""), labels.get("model_name", "")))
        if not 0 <= value < math.inf:
            continue  # A gauge that was never set is NaN.
        key = (name, labels.get("le", "") if name.endswith("_bucket") else "")
        samples[key] = samples.get(key, 0.0) + value
    if not engines:
        raise InputError(f"{path}: holds no vllm: histograms; expected the text of a vLLM's /metrics")
    if len(engines) > 1:
        raise InputError(f"{path}: holds {len(engines)} engines or LLMs; keep the lines of one")
    setup_labels["model_name"] = engines.pop()[1]
    return samples, setup_labels


def samples_of(text: str, name: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Metric, labels and value of each sample in Prometheus' text format; `name` is for errors."""
    for i, line in enumerate(text.split("\n")):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"{name}, line {i + 1}"
        match = _SAMPLE.fullmatch(line)
        if match is None:
            raise InputError(f"{where}: is not a sample of Prometheus' text format: {line[:80]!r}")
        try:
            value = float(match[3])
        except ValueError:
            raise InputError(f"{where}: {match[3][:40]!r} is not a number") from None
        yield match[1], dict(_LABEL.findall(match[2] or "")), value


def _mean(samples: Samples, histogram: str) -> float | None:
    """The mean of a histogram, its sum over its count; None if it counted nothing."""
    count, total = (samples.get((f"{histogram}_{part}", ""), 0.0) for part in ("count", "sum"))
    return total / count if count > 0 and total > 0 else None


def histogram_statistics(samples: Samples, histogram: str) -> dict[str, float]:
    """The mean of a histogram, and the edges below which its percentiles lie; empty without observations."""
    mean = _mean(samples, histogram)
    if mean is None:
        return {}
    count = samples[f"{histogram}_count", ""]
    buckets = []  # (upper edge, number of observations up to it)
    for (name, le), count_to_edge in samples.items():
        if name == f"{histogram}_bucket":
            try:
                buckets.append((float(le), count_to_edge))
            except ValueError:
                raise InputError(f"{histogram}: le={le[:40]!r} is not a number") from None
    statistic_values = {"mean": mean}
    for percent in foreign_fields.PERCENTILES:
        rank = math.ceil(percent / 100 * count - RANK_TOLERANCE)
        edge = min((edge for edge, count_to_edge in buckets if count_to_edge >= rank), default=math.inf)
        if 0 < edge < math.inf:  # The last bucket is open, so its edge bounds nothing.
            statistic_values[f"p{percent}_at_most"] = edge
    return statistic_values


def _kv_tokens(labels: Mapping[str, str]) -> int | None:
    """The tokens of an engine's KV cache; None if the labels lack them or are not plausible."""
    block_tokens, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
    if not (block_tokens.isdecimal() and blocks.isdecimal()):
        return None
    if len(block_tokens) > MOST_BLOCK_DIGITS or len(blocks) > MOST_BLOCKS_DIGITS:
        return None
    return int(block_tokens) * int(blocks) or None
