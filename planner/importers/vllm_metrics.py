"""Traffic and latencies of a running deployment per window of time, from vLLM's metrics.

vLLM counts a request when it finishes. The arrivals of a window are its finished requests plus the rise of
the number in flight (running or waiting). A prefill and a decode worker both count each request that they
share, the prefill worker after one token. So TTFT is taken from prefill workers, everything else from decode
workers: there a request arrives once it is handed over.

Source: vllm, docs/usage/metrics.md and vllm/v1/metrics/loggers.py (0.11 to 0.32). If versions have different
names for a metric, the newer name comes first below.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import InputError
from planner.importers.prometheus_range import (
    Floats,
    PrometheusSeries,
    SampledHistogram,
    counter_increase,
    find_series,
    interval_edges,
    interval_histogram,
    mean_gauge,
)

FINISHED = "vllm:request_success_total"
PROMPT, OUTPUT = "vllm:request_prompt_tokens", "vllm:request_generation_tokens"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
PREEMPTED = "vllm:num_preemptions_total"
LATENCIES: Mapping[str, tuple[str, ...]] = {
    "ttft": ("vllm:time_to_first_token_seconds",),
    "tpot": ("vllm:request_time_per_output_token_seconds",),
    "tbt": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "e2e": ("vllm:e2e_request_latency_seconds",),
}
_HISTOGRAMS = (PROMPT, OUTPUT, *(name for names in LATENCIES.values() for name in names))
# The series that this module reads.
NAMES = (
    *(FINISHED, RUNNING, WAITING, PREEMPTED, *KV_USE, *HITS, *QUERIES),
    *(f"{name}_{part}" for name in _HISTOGRAMS for part in ("bucket", "count", "sum")),
)
# All answers of a prefill worker have one token. An engine whose mean is below this, half way to two tokens,
# is taken for such a worker.
_PREFILL_TOKENS = 1.5


@dataclass(frozen=True, slots=True, eq=False)
class LiveTraffic:
    """The load and the latencies of a deployment in N windows between `edges_s` (N + 1,), Unix time [s].

    Arrays are (N,), NaN if unknown. `arrived` and `finished` are numbers of requests, `input_tokens` and
    `output_tokens` sums over finished requests. Prefix caches looked up `queried_tokens` and had `hit_tokens`
    of them. `kv_use_frac` is the mean over workers, `running` and `waiting` are requests in all workers, and
    `preempted` counts preemptions. `latency` has the histograms by the keys of LATENCIES, `lengths` has those
    of tokens by "prompt" and "output"; a key without samples is left out. `instances` is the number of
    engines with samples, `engines` the mean number of those at once in each window.
    """

    edges_s: Floats
    arrived: Floats
    finished: Floats
    input_tokens: Floats
    output_tokens: Floats
    queried_tokens: Floats
    hit_tokens: Floats
    kv_use_frac: Floats
    running: Floats
    waiting: Floats
    preempted: Floats
    latency: Mapping[str, SampledHistogram]
    lengths: Mapping[str, SampledHistogram]
    model: str
    instances: int
    engines: Floats

    @property
    def windows(self) -> int:
        """How many windows were sampled."""
        return len(self.edges_s) - 1

    @property
    def every_s(self) -> float:
        """The length of a window [s]."""
        return float(self.edges_s[1] - self.edges_s[0])


def live_traffic(
    series: Sequence[PrometheusSeries],
    *,
    every_s: float = 60.0,
    model: str | None = None,
    is_disaggregated: bool = False,
) -> LiveTraffic:
    """The load and the latencies of a deployment in windows of `every_s`.

    `model` is the label model_name of the LLM, or None if there is only one. `is_disaggregated`: the fleet
    has prefill and decode workers.

    Raises InputError if the series do not have `model`; if it is None and they are of several LLMs; if the
    metrics that count requests are missing; and if no window is whole.
    """
    series, model = _select_model(series, model)
    finished = find_series(series, FINISHED)
    if not finished:
        known_names = ", ".join(sorted({row.name for row in series})[:4])
        raise InputError(
            f"Prometheus: {FINISHED} is missing (found {known_names}); is this a vLLM's /metrics?"
        )
    edges_s = interval_edges(finished, every_s)
    if len(edges_s) < 2:
        raise InputError(
            f"Prometheus: the samples cover no whole window of {every_s:g} s; ask for a longer range"
        )
    prefill = _prefill_instances(series, edges_s) if is_disaggregated else frozenset()
    serving = [row for row in series if _instance_of(row) not in prefill]
    first_token_series = [row for row in series if _instance_of(row) in prefill] or serving

    def increase_of(*names: str) -> Floats:
        """The increase of the first of `names` that occurs."""
        return counter_increase(find_series(serving, *names), edges_s)

    finished_requests = increase_of(FINISHED)
    if not np.isfinite(finished_requests).any():
        raise InputError(f"Prometheus: {FINISHED} has gaps in every window of {every_s:g} s")
    kv_use = find_series(serving, *KV_USE)
    workers = _engines_at_once(kv_use, edges_s)
    level = {name: find_series(serving, name) for name in (RUNNING, WAITING)}
    return LiveTraffic(
        edges_s=edges_s,
        arrived=np.maximum(
            finished_requests + sum(_rise_of_level(level[name], edges_s) for name in level), 0.0
        ),
        finished=finished_requests,
        input_tokens=increase_of(f"{PROMPT}_sum"),
        output_tokens=increase_of(f"{OUTPUT}_sum"),
        queried_tokens=increase_of(*QUERIES),
        hit_tokens=increase_of(*HITS),
        # `mean_gauge` adds instances up; an instance that exists for half of a window adds half its value.
        kv_use_frac=mean_gauge(kv_use, edges_s) / np.where(workers > 0, workers, 1.0),
        running=mean_gauge(level[RUNNING], edges_s),
        waiting=mean_gauge(level[WAITING], edges_s),
        preempted=increase_of(PREEMPTED),
        latency=_interval_histograms(LATENCIES, {"ttft": first_token_series}, serving, edges_s),
        lengths=_interval_histograms({"prompt": (PROMPT,), "output": (OUTPUT,)}, {}, serving, edges_s),
        model=model,
        instances=len({_instance_of(row) for row in finished}),
        engines=_engines_at_once(finished, edges_s),
    )


def _select_model(
    series: Sequence[PrometheusSeries], model: str | None
) -> tuple[Sequence[PrometheusSeries], str]:
    """The series of one LLM, and its label model_name, empty if there is none."""
    models = sorted({row.label("model_name") for row in series if row.name == FINISHED})
    if model is not None and model in models:
        return [row for row in series if row.label("model_name") == model], model
    if len(models) > 1 or (model is not None and models):
        model_words = "" if model is None else f", none of them {model!r}"
        raise InputError(
            f"Prometheus: model_name is {', '.join(models)[:200]}{model_words}; name one with --model"
        )
    # Without FINISHED there are no `models`, and `live_traffic` refuses the metrics.
    return series, models[0] if models else ""


def _instance_of(row: PrometheusSeries) -> tuple[str, ...]:
    """The labels that identify the engine of a series."""
    return tuple(row.label(key) for key in ("instance", "pod", "engine"))


def _engines_at_once(series: Iterable[PrometheusSeries], edges_s: Floats) -> Floats:
    """The mean number of engines in each window (N,), each from its first sample to its last: the engine that
    replaces another has labels of its own.
    """
    spans_s: dict[tuple[str, ...], tuple[float, float]] = {}
    for row in series:
        t_s = row.t_s[np.isfinite(row.values)]
        if t_s.size:
            first_s, last_s = spans_s.get(_instance_of(row), (math.inf, -math.inf))
            spans_s[_instance_of(row)] = min(first_s, float(t_s[0])), max(last_s, float(t_s[-1]))
    engines = np.zeros(max(len(edges_s) - 1, 0))
    for first_s, last_s in spans_s.values():
        overlap_s = np.minimum(edges_s[1:], last_s) - np.maximum(edges_s[:-1], first_s)
        engines += np.maximum(overlap_s, 0.0) / np.diff(edges_s)
    return engines


def prefill_series(series: Sequence[PrometheusSeries], edges_s: Floats) -> frozenset[PrometheusSeries]:
    """The series of prefill workers, whose requests decode workers count once more. None if all engines that
    finished requests look like prefill workers: their answers are merely short.
    """
    prefill = _prefill_instances(series, edges_s)
    counts = [row for row in series if row.name == FINISHED and _instance_of(row) not in prefill]
    has_decodes = bool(counts) and bool(np.nansum(counter_increase(counts, edges_s)) > 0)
    return frozenset(row for row in series if has_decodes and _instance_of(row) in prefill)


def _prefill_instances(series: Iterable[PrometheusSeries], edges_s: Floats) -> frozenset[tuple[str, ...]]:
    """Prefill workers: engines whose answers have about one token on average."""
    rise_by_instance: dict[tuple[str, ...], dict[str, float]] = {}
    whole_range_s = edges_s[[0, -1]]
    for row in series:
        if row.name in (f"{OUTPUT}_sum", f"{OUTPUT}_count"):
            # Gaps between samples do not matter over the whole range: a counter keeps what it counted.
            rise = float(np.nan_to_num(counter_increase([row], whole_range_s, gap_s=math.inf))[0])
            rise_by_name = rise_by_instance.setdefault(_instance_of(row), {})
            rise_by_name[row.name] = rise_by_name.get(row.name, 0.0) + rise
    return frozenset(
        instance
        for instance, rise_by_name in rise_by_instance.items()
        if 0
        < rise_by_name.get(f"{OUTPUT}_sum", 0.0)
        < _PREFILL_TOKENS * rise_by_name.get(f"{OUTPUT}_count", 0.0)
    )


def _rise_of_level(series: Sequence[PrometheusSeries], edges_s: Floats) -> Floats:
    """The rise of a gauge in each window (N,), summed over instances.

    Where samples are missing it is 0; the window in which they return has the whole rise since the last
    sample.
    """
    total = np.zeros(len(edges_s) - 1)
    for row in series:
        is_number = np.isfinite(row.values)
        if is_number.sum() > 1:
            t_s, values = row.t_s[is_number], row.values[is_number]
            # From the last sample before an edge, or else the first, to the last before the next edge.
            total += np.diff(values[np.maximum(np.searchsorted(t_s, edges_s, side="right") - 1, 0)])
    return total


def _interval_histograms(
    names: Mapping[str, tuple[str, ...]],
    series_of: Mapping[str, Sequence[PrometheusSeries]],
    serving: Sequence[PrometheusSeries],
    edges_s: Floats,
) -> dict[str, SampledHistogram]:
    """For each key, the histogram of its first name with samples, in `series_of[key]` or `serving`."""
    histograms: dict[str, SampledHistogram] = {}
    for key, candidates in names.items():
        for name in candidates:
            histogram = interval_histogram(series_of.get(key, serving), name, edges_s)
            # Later names are read too, to refuse faulty buckets, but not used.
            if histogram is not None and key not in histograms:
                histograms[key] = histogram
    return histograms
