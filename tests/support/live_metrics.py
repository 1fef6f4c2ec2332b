"""What vLLM engines would have exported while a simulation ran, as Prometheus answers a range."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.simulator.simulation import Simulation

TTFT_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
E2E_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
LENGTHS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))

Values = npt.NDArray[Any]
Row = tuple[str, dict[str, str], Values]
EPOCH_S = 1_800_000_000.0  # a Friday in January 2027, at 08:00 UTC


def answer(times_s: Values, rows: Iterable[Row]) -> dict[str, Any]:
    """One answer of /api/v1/query_range."""
    result = [
        {
            "metric": {"__name__": name} | labels,
            "values": [[float(t), repr(float(v))] for t, v in zip(times_s, values, strict=True)],
        }
        for name, labels, values in rows
    ]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def exported(
    simulation: Simulation, *, step_s: float = 60.0, start_s: float = EPOCH_S, engines: int = 2
) -> dict[str, Any]:
    """Counters, histograms and gauges of `engines` instances, request by request in turn."""
    finish_s = simulation.arrival_s + simulation.e2e_s
    times_s = np.arange(0.0, float(np.nanmax(finish_s)) + step_s, step_s)
    rows: list[Row] = []
    for engine in range(engines):
        mine = np.arange(len(finish_s)) % engines == engine
        labels = {"instance": f"vllm-{engine}:8000", "model_name": "served", "engine": "0"}
        rows += _engine(simulation, finish_s, mine, times_s, labels)
    return answer(times_s + start_s, rows)


def _engine(
    simulation: Simulation, finish_s: Values, mine: Values, times_s: Values, labels: dict[str, str]
) -> list[Row]:
    done_s = finish_s[mine]

    def upto(at_s: Values, weights: Values | None = None) -> Values:
        order = np.argsort(at_s, kind="stable")
        heights = np.append(0.0, np.cumsum(np.ones(len(at_s)) if weights is None else weights[order]))
        return np.asarray(heights[np.searchsorted(at_s[order], times_s, side="right")])

    def histogram(name: str, at_s: Values, values: Values, edges: Sequence[float]) -> list[Row]:
        known = np.isfinite(values)
        at_s, values = at_s[known], values[known]
        found: list[Row] = [
            (f"{name}_bucket", labels | {"le": f"{edge:g}"}, upto(at_s[values <= edge])) for edge in edges
        ]
        found.append((f"{name}_bucket", labels | {"le": "+Inf"}, upto(at_s)))
        found.append((f"{name}_sum", labels, upto(at_s, values.astype(float))))
        return [*found, (f"{name}_count", labels, upto(at_s))]

    arrived, first = upto(simulation.arrival_s[mine]), simulation.ttft_s[mine]
    read: Callable[[str], Values] = lambda name: np.asarray(getattr(simulation, name))[mine]  # noqa: E731
    rows = [
        ("vllm:request_success_total", labels | {"finished_reason": "length"}, upto(done_s)),
        ("vllm:num_requests_running", labels, arrived - upto(done_s)),
        ("vllm:num_requests_waiting", labels, np.zeros(len(times_s))),
        ("vllm:kv_cache_usage_perc", labels, np.full(len(times_s), 0.25)),
    ]
    rows += histogram("vllm:request_prompt_tokens", done_s, read("input_tokens"), LENGTHS)
    rows += histogram("vllm:request_generation_tokens", done_s, read("output_tokens"), LENGTHS)
    rows += histogram("vllm:time_to_first_token_seconds", simulation.arrival_s[mine] + first, first, TTFT_S)
    tpot = "vllm:request_time_per_output_token_seconds"
    rows += histogram(tpot, done_s, read("tpot_s"), TPOT_S)
    return rows + histogram("vllm:e2e_request_latency_seconds", done_s, read("e2e_s"), E2E_S)
