"""What vLLM exports on /metrics, with the same names, labels and buckets, for engines that compute nothing
and stand in for vLLM where there are no GPUs (fake_engine.py).

Source: vllm, vllm/v1/metrics/loggers.py (0.32).
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_GAPS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    80.0,
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
# 1, 2, 5, 10, ... 500,000 tokens. vLLM's end at its max_model_len; buckets above it stay empty.
_LENGTHS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_LABELS = ("engine", "model_name")
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "ttft": ("time_to_first_token_seconds", _TTFT_S),
    "tbt": ("inter_token_latency_seconds", _GAPS_S),
    "tpot": ("request_time_per_output_token_seconds", _GAPS_S),
    "e2e": ("e2e_request_latency_seconds", _REQUEST_S),
    "queue": ("request_queue_time_seconds", _REQUEST_S),
    "prompt": ("request_prompt_tokens", _LENGTHS),
    "output": ("request_generation_tokens", _LENGTHS),
}
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")


class EngineMetrics:
    """Histograms, counters and gauges of one engine; `model` is the label model_name."""

    def __init__(self, model: str, *, block_tokens: int, blocks: int) -> None:
        self._registry = CollectorRegistry()
        labels = {"engine": "0", "model_name": model}
        self._histograms = {
            key: Histogram(f"vllm:{name}", name, _LABELS, registry=self._registry, buckets=edges).labels(
                **labels
            )
            for key, (name, edges) in _HISTOGRAMS.items()
        }
        self._gauges = {
            name: Gauge(f"vllm:{name}", name, _LABELS, registry=self._registry).labels(**labels)
            for name in _GAUGES
        }
        self._counters = {
            name: Counter(f"vllm:{name}", name, _LABELS, registry=self._registry).labels(**labels)
            for name in _COUNTERS
        }
        self._exported_totals = dict.fromkeys(_COUNTERS, 0.0)
        success = Counter(
            "vllm:request_success", "finished", (*_LABELS, "finished_reason"), registry=self._registry
        )
        # A fake engine always writes as many tokens as `max_tokens` allows.
        self._success = success.labels(**labels, finished_reason="length")
        info = Gauge(
            "vllm:cache_config_info", "info", ("block_size", "num_gpu_blocks"), registry=self._registry
        )
        info.labels(block_size=str(block_tokens), num_gpu_blocks=str(blocks)).set(1)

    def observe(self, key: str, value: float) -> None:
        """A value for the histogram `key`: ttft, tbt, tpot, e2e, queue [s]; prompt, output [tokens]."""
        self._histograms[key].observe(value)

    def count_finished(self) -> None:
        self._success.inc()

    def text(self, *, levels: Mapping[str, float], totals: Mapping[str, int]) -> str:
        """Prometheus' text format; `levels` are gauges' values, `totals` the counters' since the start."""
        for name, level in levels.items():
            self._gauges[name].set(level)
        for name, total in totals.items():
            self._counters[name].inc(total - self._exported_totals[name])
            self._exported_totals[name] = total
        return generate_latest(self._registry).decode()
