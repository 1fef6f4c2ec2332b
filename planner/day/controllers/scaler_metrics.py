"""The metrics that a scaler may follow, as vLLM exports them, and their values in a simulated reading.

The names are those of vLLM 0.11 to 0.32 (`vllm/v1/metrics/loggers.py`). Requests that wait because a pool has
no worker are counted by the gateway, not by an engine; `Knowledge.limbo_of` has their number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from planner.errors import InputError
from planner.files.document_values import did_you_mean, show_value
from planner.simulator.elastic import MetricsReading


@dataclass(frozen=True, slots=True)
class ScalerMetric:
    """A gauge of a pool: the names under which vLLM exports it, and the usual target per worker."""

    name: str
    exported: tuple[str, ...]
    words: str
    target: float
    total: Callable[[MetricsReading, int], float]  # The sum over the ready workers of a pool.
    is_share: bool = False


def _total_kv(reading: MetricsReading, pool: int) -> float:
    """The sum of the workers' shares; `kv_frac` is their mean, NaN without workers."""
    ready = int(reading.ready[pool])
    return float(reading.kv_frac[pool]) * ready if ready else 0.0


METRICS: Mapping[str, ScalerMetric] = MappingProxyType(
    {
        each.name: each
        for each in (
            ScalerMetric(
                name="queue",
                exported=("vllm:num_requests_waiting",),
                words="prompts that wait for a seat",
                target=5.0,
                total=lambda reading, pool: float(reading.waiting[pool]),
            ),
            ScalerMetric(
                name="running",
                exported=("vllm:num_requests_running",),
                words="requests that hold a seat",
                target=32.0,
                total=lambda reading, pool: float(reading.running[pool]),
            ),
            ScalerMetric(
                name="concurrency",
                exported=("vllm:num_requests_waiting", "vllm:num_requests_running"),
                words="both: all requests at the workers",
                target=32.0,
                total=lambda reading, pool: float(reading.waiting[pool] + reading.running[pool]),
            ),
            ScalerMetric(
                name="kv",
                exported=("vllm:kv_cache_usage_perc",),
                words="share of the KV blocks in use, 0 to 1",
                target=0.7,
                total=_total_kv,
                is_share=True,
            ),
        )
    }
)
_BY_EXPORT = {row.exported[0]: row.name for row in METRICS.values() if len(row.exported) == 1}


def read_metric(value: object, where: str) -> str:
    """Our name of a metric, from our name or the exported one. Raises InputError for other names."""
    if isinstance(value, str) and (value in METRICS or value in _BY_EXPORT):
        return _BY_EXPORT.get(value, value)
    advice = did_you_mean(value, (*METRICS, *_BY_EXPORT))
    metric_words = ", ".join(f"{row.name} ({' + '.join(row.exported)})" for row in METRICS.values())
    raise InputError(f"{where}: no engine exports {show_value(value)}; {advice}Exported: {metric_words}")
