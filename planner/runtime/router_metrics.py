"""The router's metrics in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from planner.runtime.connection_limits import Door
from planner.runtime.live_routing import LiveFleet
from planner.runtime.trust import Trust

TTFT_EDGES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, float("inf"))


class WorkerStatus(Protocol):
    """The router's counts of one worker: why it is not started for a while, and how often it was started."""

    name: str
    is_up: bool
    starts: int
    gave_up: str


class RouterCounts(Protocol):
    """What a router counts. `poison` requests are those that workers died of."""

    live: LiveFleet
    door: Door
    is_draining: bool
    in_flight: int
    outcomes: Counter[str]
    ttft_counts: Counter[float]
    ttft_sum_s: float
    retries: int
    poison: int
    trust: Trust

    @property
    def backends(self) -> Sequence[WorkerStatus]: ...


def metrics_text(router: RouterCounts, now_s: float) -> str:
    backends, live_workers, door, trust = router.backends, router.live.workers, router.door, router.trust
    workers, resting = range(len(backends)), trust.resting(now_s)
    names = [backend.name for backend in backends]

    def by_worker(values: Iterable[float]) -> dict[str, float]:
        return dict(zip(names, map(float, values), strict=True))

    lines = [
        *_metric_lines("requests_total", "counter", "Requests by how they ended", "outcome", router.outcomes),
        *_metric_lines("retries_total", "counter", "Tries after a request's first", "", {"": router.retries}),
        *_metric_lines("poison_total", "counter", "Requests that workers died of", "", {"": router.poison}),
        *_metric_lines("in_flight", "gauge", "Requests that have not ended", "", {"": router.in_flight}),
        *_metric_lines("draining", "gauge", "1 while no new request is taken", "", {"": router.is_draining}),
        *_metric_lines("connections", "gauge", "Open connections of clients", "", {"": door.open}),
        *_metric_lines("connections_limit", "gauge", "Most connections of clients", "", {"": door.most}),
        *_metric_lines(
            "connections_ended_total",
            "counter",
            "Connections ended by a limit: all, client or idle",
            "limit",
            door.refused,
        ),
    ]
    for name, kind, about, values in (
        ("up", "gauge", "1 while the worker answers", by_worker(backend.is_up for backend in backends)),
        (
            "given_up",
            "gauge",
            "1 while no start is tried",
            by_worker(bool(backend.gave_up) for backend in backends),
        ),
        (
            "starts_total",
            "counter",
            "Starts of its engine",
            by_worker(backend.starts for backend in backends),
        ),
        (
            "passed_over",
            "gauge",
            "1 while others go first: it failed",
            by_worker(w in resting for w in workers),
        ),
        ("failures_total", "counter", "Tries that failed on it", by_worker(trust.failed[w] for w in workers)),
        (
            "refusals_total",
            "counter",
            "Those of them it refused",
            by_worker(trust.refused[w] for w in workers),
        ),
        ("requests", "gauge", "Requests it has", by_worker(live_workers["assigned"])),
        (
            "pending_prompt_tokens",
            "gauge",
            "Tokens it has to prefill",
            by_worker(live_workers["pending_tokens"]),
        ),
    ):
        lines += _metric_lines(f"worker_{name}", kind, about, "worker", values)
    lines += [
        "# HELP fleetplan_first_byte_seconds Seconds to the first byte of a stream",
        "# TYPE fleetplan_first_byte_seconds histogram",
    ]
    count = 0  # Requests whose first byte came within the edge.
    for edge in TTFT_EDGES_S:
        count += router.ttft_counts[edge]
        le = "+Inf" if edge == float("inf") else f"{edge:g}"
        lines.append(f'fleetplan_first_byte_seconds_bucket{{le="{le}"}} {count}')
    lines += [
        f"fleetplan_first_byte_seconds_sum {router.ttft_sum_s:.6f}",
        f"fleetplan_first_byte_seconds_count {count}",
    ]
    return "\n".join(lines) + "\n"


def _metric_lines(name: str, kind: str, about: str, label: str, values: Mapping[str, float]) -> list[str]:
    """The lines of one metric, with a sample for each value of `label`; without a label one sample."""
    lines = [f"# HELP fleetplan_{name} {about}", f"# TYPE fleetplan_{name} {kind}"]
    for value, number in sorted(values.items()):
        labels = f'{{{label}="{_escaped(value)}"}}' if label else ""
        lines.append(f"fleetplan_{name}{labels} {number:.0f}")
    return lines


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
