"""The exporter of `plan watch`: gauges that a Prometheus scrapes.

prometheus_client is optional, so it is imported on use.
"""

from planner.errors import InputError
from planner.studies.plan_watch import WatchedPlan
from planner.studies.watch_words import GAUGES, prometheus_samples


class Exporter:
    """Serves /metrics on an address until it is closed.

    Before the first `show`, gauges without labels are NaN and those with labels have no samples.
    """

    def __init__(self, address: str) -> None:
        try:
            from prometheus_client import CollectorRegistry, Gauge, start_http_server
        except ImportError:
            raise InputError(
                "--export needs prometheus_client; install it with pip install 'fleetplan[runtime]'"
            ) from None
        host, port = parse_address(address)
        registry = CollectorRegistry()
        labels = {
            "fleetplan_drifted": ["quantity"],
            "fleetplan_drift_frac": ["quantity"],
            "fleetplan_slo_kept": ["limit"],
        }
        self._gauges = {
            name: Gauge(name, text, labels.get(name, []), registry=registry) for name, text in GAUGES.items()
        }
        for name, gauge in self._gauges.items():
            if name not in labels:
                gauge.set(float("nan"))  # The client would start them at 0, which is a value.
        try:
            self._server, _ = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise InputError(f"--export {address}: cannot be listened on ({error})") from None
        self.port = int(self._server.server_port)  # It is known only now if the address has port 0.

    def show(self, watched: WatchedPlan) -> None:
        """Set the gauges to the values of one comparison; those that it does not have stay as they are."""
        for name, labels, value in prometheus_samples(watched):
            gauge = self._gauges[name]
            (gauge.labels(**labels) if labels else gauge).set(value)

    def close(self) -> None:
        """Stop answering, and free the port."""
        self._server.shutdown()
        self._server.server_close()


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "0.0.0.0:9109", ":9109" or "9109"; without a host only this machine can connect."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise InputError(
            f"--export: expected an address such as :9109 or 0.0.0.0:9109, found {address[:80]!r}"
        )
    return host.strip("[]") or "127.0.0.1", int(port)
