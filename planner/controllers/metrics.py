"""The metrics that a scaler may follow, as vLLM exports them, and what a reading says of them.

Names after vLLM 0.11 to 0.19 (`vllm/v1/metrics/loggers.py`). What waits without any worker is counted by the
gateway, not by an engine; it stands with the queue of the pools at the front.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from planner.errors import InputError
from planner.io.values import nearest, shown
from planner.simulator.elastic import Reading


@dataclass(frozen=True, slots=True)
class Metric:
    """One gauge of a pool: the names it is exported under, what it counts, a usual target per worker."""

    name: str
    exported: tuple[str, ...]
    words: str
    target: float
    total: Callable[[Reading, int], float]  # over the ready workers of a pool
    is_share: bool = False


def _kv(reading: Reading, pool: int) -> float:
    ready = int(reading.ready[pool])
    return float(reading.kv_frac[pool]) * ready if ready else 0.0


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        each.name: each
        for each in (
            Metric(
                "queue",
                ("vllm:num_requests_waiting",),
                "prompts that wait for a seat",
                5.0,
                lambda reading, pool: float(reading.waiting[pool]),
            ),
            Metric(
                "running",
                ("vllm:num_requests_running",),
                "requests that hold a seat",
                32.0,
                lambda reading, pool: float(reading.running[pool]),
            ),
            Metric(
                "concurrency",
                ("vllm:num_requests_waiting", "vllm:num_requests_running"),
                "both: all requests at the workers",
                32.0,
                lambda reading, pool: float(reading.waiting[pool] + reading.running[pool]),
            ),
            Metric(
                "kv",
                ("vllm:kv_cache_usage_perc",),
                "share of the KV blocks in use, 0 to 1",
                0.7,
                _kv,
                is_share=True,
            ),
        )
    }
)
_BY_EXPORT = {row.exported[0]: row.name for row in METRICS.values() if len(row.exported) == 1}


def read_metric(value: object, where: str) -> str:
    """A metric's name, ours or the exported one; raises InputError for what no engine exports."""
    if isinstance(value, str) and (value in METRICS or value in _BY_EXPORT):
        return _BY_EXPORT.get(value, value)
    known = (*METRICS, *_BY_EXPORT)
    hint = nearest(value, known, 1)
    advice = f"did you mean {hint[0]!r}? " if hint else ""
    told = ", ".join(f"{row.name} ({' + '.join(row.exported)})" for row in METRICS.values())
    raise InputError(f"{where}: no engine exports {shown(value)}; {advice}Exported: {told}")
