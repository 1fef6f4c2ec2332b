"""Controllers of our own as rules of Prometheus: sizes by a table of rates, which KEDA asks for.

    arrivals   requests/s that came to the LLM in the last minute
    planned    the higher of arrivals now and those expected `horizon_s` ahead, times 1 + headroom
    workers    of a pool: what the table has for the least rate that is as high as planned; beyond the
               table, its last sizes in proportion

Expected is what came a season ago at that time, and what came more now than a season ago; arrivals now, until
Prometheus has seen a season. Every rule is a recording rule, so that each may be looked at. Aladdin's
rule, workers = ceil(slope x rate + offset), takes the table's place where `slope` is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from planner.errors import InputError
from planner.manifests.autoscaling import hpa, keda, prometheus
from planner.manifests.autoscaling.autoscaler import DAY_S, Autoscaler, Document, Written
from planner.manifests.autoscaling.places import Place

ARRIVALS, PLANNED, WORKERS = "fleetplan:arrivals_rps", "fleetplan:planned_rps", "fleetplan:workers"
LLM = "fleetplan_llm"
EVERY_S = 30
MOST_ROWS = 200


def write(places: Sequence[Place], autoscaler: Autoscaler, app: str) -> Written:
    """The rules, and ScaledObjects that follow them."""
    hpa.refuse_zero(autoscaler, "take cron, or least 1")
    hold_s = autoscaler.seconds("hold_s", 300, least=0, most=hpa.MOST_WINDOW_S)
    rules: dict[str, float] = {
        "up_window_s": 0,
        "up_pods": 0,
        "up_percent": 0,
        "down_window_s": hold_s,
        "down_percent": 0,
    }
    held = keda.told(autoscaler, rules)
    objects = [
        keda.scaled_object(
            place, held, [keda.prometheus_trigger(f'{WORKERS}{{{prometheus.POOL}="{place.name}"}}', 1)]
        )
        for place in places
    ]
    files = {
        prometheus.MONITORS_FILE: [prometheus.monitor(place) for place in places],
        prometheus.RULES_FILE: [rule(places, autoscaler, app)],
        keda.FILE: objects,
    }
    steps = (
        *prometheus.monitors_step(),
        f"    kubectl apply -f {prometheus.RULES_FILE}   # recording rules, for the Prometheus operator",
        keda.apply_step(),
    )
    return Written(files, steps, (*prometheus.monitors_limits(), *_limits(autoscaler)))


def rule(places: Sequence[Place], autoscaler: Autoscaler, app: str) -> Document:
    """A PrometheusRule (monitoring.coreos.com/v1) with all recording rules, in the order in which they read
    each other."""
    front = [place.name for place in places if place.pool.role != "decode"]
    only = f'{{{LLM}="{app}"}}'
    recorded: list[Document] = [
        {"record": ARRIVALS, "expr": prometheus.arrivals_rps(front), "labels": {LLM: app}},
        {"record": PLANNED, "expr": planned(f"{ARRIVALS}{only}", autoscaler)},
    ]
    for number, place in enumerate(places):
        recorded.append(
            {
                "record": WORKERS,
                "expr": workers(f"{PLANNED}{only}", autoscaler, number, len(places)),
                "labels": {prometheus.POOL: place.name},
            }
        )
    every_s = autoscaler.seconds("every_s", EVERY_S, least=1, most=3600)
    group = {"name": f"{app}-workers", "interval": f"{every_s}s", "rules": recorded}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": f"{app}-workers"},
        "spec": {"groups": [group]},
    }


def planned(arrivals: str, autoscaler: Autoscaler) -> str:
    """The rate that is planned for, in terms of that of arrivals."""
    headroom = 1 + autoscaler.number("headroom_frac", 0.0)
    if headroom <= 0:
        raise InputError(f"{autoscaler.controller}: headroom: {headroom - 1:g}, must be above -1")
    season_s = autoscaler.seconds("season_s", DAY_S, least=60, most=28 * DAY_S)
    horizon_s = autoscaler.seconds("horizon_s", 0, least=0, most=DAY_S)
    if horizon_s >= season_s:
        raise InputError(
            f"{autoscaler.controller}: horizon: {horizon_s} s, must be less than a season of {season_s} s"
        )
    expected = f"{arrivals} offset {season_s - horizon_s}s + ({arrivals} - {arrivals} offset {season_s}s)"
    return f"{headroom:.12g} * (({expected} > {arrivals}) or {arrivals})"


def workers(rate: str, autoscaler: Autoscaler, number: int, pools: int) -> str:
    """Of pool `number`, in terms of the rate that is planned for."""
    if "slope" in autoscaler.parameters:
        slope = _row(autoscaler, "slope", pools)[number]
        offset = _row(autoscaler, "offset", pools)[number]
        return f"ceil({slope:.12g} * {rate} + {offset:.12g})"
    rates_rps, sizes = table(autoscaler, pools)
    own = [row[number] for row in sizes]
    steps = [f"{rate} * 0 + {own[0]}"]
    for edge, (before, after) in zip(rates_rps, pairwise(own), strict=False):
        if after != before:
            steps.append(f"{after - before} * ({rate} > bool {edge:.12g})")
    last, edge = own[-1], rates_rps[-1]
    if last:
        beyond = f"(ceil({rate} * {last / edge:.12g}) - {last})"
        steps.append(f"({rate} > bool {edge:.12g}) * {beyond}")
    return " + ".join(steps)


def table(autoscaler: Autoscaler, pools: int) -> tuple[list[float], list[list[int]]]:
    """`rates_rps` (R,), rising, and `sizes` (R, P), which do not fall, in the order of the pools."""
    rates: Any = autoscaler.parameters.get("rates_rps")
    sizes: Any = autoscaler.parameters.get("sizes")
    if rates is None or sizes is None or not len(rates) or len(rates) != len(sizes):
        raise InputError(
            f"{autoscaler.controller}: expected the capacity table: rates_rps and as many rows of sizes"
        )
    if len(rates) > MOST_ROWS:
        raise InputError(f"{autoscaler.controller}: rates_rps: {len(rates)} rates, a rule holds {MOST_ROWS}")
    found, rows = [float(rate) for rate in rates], [[int(size) for size in row] for row in sizes]
    if found[0] <= 0 or any(after <= before for before, after in pairwise(found)):
        raise InputError(f"{autoscaler.controller}: rates_rps: must rise from above 0, found {found[:8]}")
    if any(len(row) != pools for row in rows):
        raise InputError(f"{autoscaler.controller}: sizes: expected {pools} in each row, one per pool")
    return found, rows


def _row(autoscaler: Autoscaler, name: str, pools: int) -> list[float]:
    values: Any = autoscaler.parameters.get(name)
    row = [float(value) for value in values] if isinstance(values, (list, tuple)) else []
    if len(row) != pools:
        raise InputError(
            f"{autoscaler.controller}: {name}: expected {pools} numbers, one per pool, found {values!r}"
        )
    return row


def _limits(autoscaler: Autoscaler) -> tuple[str, ...]:
    found = [
        "vLLM counts what has finished, not what arrives: arrivals are ends and the growth of what is in "
        f"flight, over {prometheus.RATE_S} s. Requests that no worker has yet are not seen.",
        f"Look at it: {ARRIVALS}, {PLANNED} and {WORKERS} in Prometheus.",
    ]
    if "slope" not in autoscaler.parameters:
        found.append(
            "Until Prometheus has kept a season of arrivals it goes by those of now; it must keep that long."
        )
    return tuple(found)
