"""The router's metrics in Prometheus' text format."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from planner.runtime.connection_limits import OpenConnections
from planner.runtime.live_routing import LiveFleet
from planner.runtime.trust import Trust

# Upper edges of the histogram's buckets: those of Prometheus' client libraries, and two for long queues.
TTFT_EDGES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, float("inf"))


class WorkerStatus(Protocol):
    """One worker as the router sees it. `starts` counts the starts of its engine. `gave_up` says why the
    engine is not started for a while; it is empty while a start may be tried.
    """

    name: str
    is_up: bool
    starts: int
    gave_up: str


class RouterCounts(Protocol):
    """What a router counts. `poison` counts requests refused because workers died of them. `ttft_counts`
    counts streams by the bucket of their time to the first byte (TTFT): its upper edge in TTFT_EDGES_S.
    """

    live: LiveFleet
    connections: OpenConnections
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
    """The metrics of the router and its workers in the text format of Prometheus."""
    lines: list[str] = []
    for metric in (*_router_metrics(router), *_worker_metrics(router, now_s)):
        lines += _metric_lines(metric)
    lines += [
        "# HELP fleetplan_first_byte_seconds Seconds to the first byte of a stream",
        "# TYPE fleetplan_first_byte_seconds histogram",
    ]
    within_edge = 0  # Buckets of Prometheus are cumulative.
    for edge in TTFT_EDGES_S:
        within_edge += router.ttft_counts[edge]
        edge_text = "+Inf" if edge == float("inf") else f"{edge:g}"
        lines.append(f'fleetplan_first_byte_seconds_bucket{{le="{edge_text}"}} {within_edge}')
    lines += [
        f"fleetplan_first_byte_seconds_sum {router.ttft_sum_s:.6f}",
        f"fleetplan_first_byte_seconds_count {within_edge}",
    ]
    return "\n".join(lines) + "\n"


class _Metric(NamedTuple):
    """One metric: `samples` has a number for each value of `label`, or one under "" without a label."""

    name: str
    kind: str
    about: str
    samples: Mapping[str, float]
    label: str = ""


def _router_metrics(router: RouterCounts) -> list[_Metric]:
    connections = router.connections
    return [
        _Metric("requests_total", "counter", "Requests by how they ended", router.outcomes, "outcome"),
        _Metric("retries_total", "counter", "Tries after a request's first", {"": router.retries}),
        _Metric("poison_total", "counter", "Requests that workers died of", {"": router.poison}),
        _Metric("in_flight", "gauge", "Requests that have not ended", {"": router.in_flight}),
        _Metric("draining", "gauge", "1 while no new request is taken", {"": router.is_draining}),
        _Metric("connections", "gauge", "Open connections of clients", {"": connections.open}),
        _Metric("connections_limit", "gauge", "Most connections of clients", {"": connections.most}),
        _Metric(
            "connections_ended_total",
            "counter",
            "Connections ended by a limit: all, client or idle",
            connections.refused,
            "limit",
        ),
    ]


def _worker_metrics(router: RouterCounts, now_s: float) -> list[_Metric]:
    """The metrics with a sample for each worker."""
    backends, live_workers, trust = router.backends, router.live.workers, router.trust
    workers, resting = range(len(backends)), trust.resting(now_s)
    names = [backend.name for backend in backends]

    def metric(name: str, kind: str, about: str, values: Iterable[float]) -> _Metric:
        by_worker = dict(zip(names, map(float, values), strict=True))
        return _Metric(f"worker_{name}", kind, about, by_worker, "worker")

    return [
        metric("up", "gauge", "1 while the worker answers", (backend.is_up for backend in backends)),
        metric("given_up", "gauge", "1 while no start is tried", (bool(each.gave_up) for each in backends)),
        metric(
            "starts_total",
            "counter",
            "Starts of the worker's engine",
            (backend.starts for backend in backends),
        ),
        metric("passed_over", "gauge", "1 while others go first: it failed", (w in resting for w in workers)),
        metric(
            "failures_total", "counter", "Tries that failed on the worker", (trust.failed[w] for w in workers)
        ),
        metric(
            "refusals_total",
            "counter",
            "Failed tries that the worker refused",
            (trust.refused[w] for w in workers),
        ),
        metric("requests", "gauge", "Requests on the worker", live_workers["assigned"]),
        metric(
            "pending_prompt_tokens", "gauge", "Prompt tokens not yet computed", live_workers["pending_tokens"]
        ),
    ]


def _metric_lines(metric: _Metric) -> list[str]:
    """A metric in the text format: its help, its type, and a line for each sample."""
    name = f"fleetplan_{metric.name}"
    lines = [f"# HELP {name} {metric.about}", f"# TYPE {name} {metric.kind}"]
    for label_value, number in sorted(metric.samples.items()):
        labels = f'{{{metric.label}="{_escaped(label_value)}"}}' if metric.label else ""
        lines.append(f"{name}{labels} {number:.0f}")
    return lines


def _escaped(value: str) -> str:
    """A label's value with the characters escaped that end it in the text format."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
