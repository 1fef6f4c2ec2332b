"""Controllers of ours as recording rules of Prometheus, whose last answer is a number of workers for KEDA.

    arrivals   requests/s that came to the LLM in the last minute
    bucket     their mean over `bucket_s`
    expected   bucket a season before the time that is looked at, times what came in the last three buckets
               over what came in those a season ago (a third to three); until Prometheus has seen a season the
               last bucket, and its drift from the one before
    rate       what a pool must carry; by controller, below
    asked      the workers that carry it
    workers    the most that was asked for during `hold_s`

    fleetplan  by rate: the highest of arrivals, bucket and expected up to `ahead_s` from now, times
               1 + headroom, and what serves the prompts that wait, but for one per worker, within `drain_s`;
               the sizes of the capacity table at the least rate that is as high, beyond it the last ones in
               proportion. By load: see by_load. Where nodes are sold whole, `held` is within least and most,
               and workers fill the idle GPUs (nodes)
    forecast   expected `ahead_s` from now, through what a worker carries
    aladdin    the mean of arrivals over `learn` heartbeats; ceil(slope x rate + offset), a line over the
               capacity table

As planner/day/controllers has them, except that the season is the last one and not the mean of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from planner.day.autoscaling import by_load, hpa_object, keda_object, node_filling, prometheus_queries
from planner.day.autoscaling.autoscaler import DAY_S, Autoscaler, Document, WrittenManifests
from planner.day.autoscaling.by_load import EVERY_S
from planner.day.autoscaling.records import LLM, MOST_STEPS, ROUNDING, llm_series, pool_series, recording_rule
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.errors import InputError
from planner.solvers.worker_rule import fit_worker_rule

# Records of the whole LLM.
ARRIVALS, BUCKET, PRESENT, SHARE = (
    f"fleetplan:{name}" for name in ("arrivals_rps", "bucket_rps", "present_rps", "season_share")
)
# Records of one pool.
EXPECTED, RATE, ASKED, HELD, WORKERS = (
    f"fleetplan:pool_{name}" for name in ("expected_rps", "rps", "asked", "held", "workers")
)
BUCKET_S, AHEAD_S, LEARN = 300, 300, 5
HOLD_S = {"fleetplan": 600, "forecast": 300, "aladdin": 0}
LAST_BUCKETS, UNLIKE = 3, 3.0
MOST_S = 28 * DAY_S
RULES: dict[str, float] = {  # The HPA behind KEDA follows at once.
    **keda_object.FOLLOW_EXACTLY,
    "up_pods": 0,
    "up_percent": 0,
    "down_pods": 0,
    "down_percent": 0,
}


def write_recording_rules(
    places: Sequence[ScaleTarget], autoscaler: Autoscaler, app: str
) -> WrittenManifests:
    """The rules, and ScaledObjects that follow them."""
    hpa_object.refuse_zero(autoscaler, "take cron, or least 1")
    followed = keda_object.with_defaults(Autoscaler(autoscaler.controller, {}, autoscaler.pools), RULES)
    objects = [
        keda_object.scaled_object(
            place, followed, [keda_object.prometheus_trigger(pool_series(WORKERS, app, place), 1)]
        )
        for place in places
    ]
    files = {
        prometheus_queries.MONITORS_FILE: [prometheus_queries.pod_monitor(place) for place in places],
        prometheus_queries.RULES_FILE: [prometheus_rule(places, autoscaler, app)],
        keda_object.FILE: objects,
    }
    steps = (
        *prometheus_queries.monitors_step(),
        f"    kubectl apply -f {prometheus_queries.RULES_FILE}   # recording rules, for the Prometheus "
        "operator",
        keda_object.apply_step(),
    )
    return WrittenManifests(files, steps, (*prometheus_queries.monitors_limits(), *_limits(autoscaler)))


def prometheus_rule(places: Sequence[ScaleTarget], autoscaler: Autoscaler, app: str) -> Document:
    """A PrometheusRule (monitoring.coreos.com/v1); each rule reads those before it."""
    every_s = autoscaler.read_seconds("every_s", EVERY_S, least=1, most=3600)
    bucket_s, season_s = _bucket_s(autoscaler), _season_s(autoscaler)
    arrivals, bucket = llm_series(ARRIVALS, app), llm_series(BUCKET, app)
    now, then = (
        f"sum(avg_over_time({arrivals}[{LAST_BUCKETS * bucket_s}s]{offset}))"
        for offset in ("", f" offset {season_s}s")
    )
    front = [place.name for place in places if place.pool.role != "decode"]
    loads = by_load.rules_of(autoscaler, len(places))
    of_all = {
        ARRIVALS: prometheus_queries.arrivals_rps(front),
        BUCKET: f"sum(avg_over_time({arrivals}[{bucket_s}s]))",
        PRESENT: _larger_of_two_expr(f"sum({arrivals})", f"sum({bucket})"),
        SHARE: f"clamp({now} / {then}, {1 / UNLIKE:.12g}, {UNLIKE:.12g})",
    }
    if loads:
        of_all |= by_load.length_rules(loads, front, [p.name for p in places if p.pool.role != "prefill"])
    records = [recording_rule(name, expr, {LLM: app}) for name, expr in of_all.items()]
    labels = {place.name: {LLM: app, prometheus_queries.POOL: place.name} for place in places}
    of_nodes = node_filling.nodes_of(autoscaler, len(places))
    for number, place in enumerate(places):
        for name, expr in _of_pool(autoscaler, app, places, number, loads).items():
            records.append(recording_rule(name, expr, labels[place.name]))
        bounded_expr = _bounded_expr(autoscaler, app, place, is_within=bool(of_nodes))
        records.append(recording_rule(HELD if of_nodes else WORKERS, bounded_expr, labels[place.name]))
    if of_nodes:
        for place, expr in node_filling.fill_nodes(places, of_nodes, app, (HELD, WORKERS)):
            records.append(recording_rule(WORKERS, expr, labels[place.name]))
    group = {"name": f"{app}-workers", "interval": f"{every_s}s", "rules": records}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": f"{app}-workers"},
        "spec": {"groups": [group]},
    }


def _of_pool(
    autoscaler: Autoscaler,
    app: str,
    places: Sequence[ScaleTarget],
    number: int,
    loads: Sequence[by_load.PoolRule],
) -> dict[str, str]:
    """The rules of one pool up to the workers that are asked for, by name."""
    controller, place, at = autoscaler.controller, places[number], (number, len(places))
    front = [each.name for each in places if each.pool.role != "decode"]
    rate, expected = (f"sum({pool_series(name, app, place)})" for name in (RATE, EXPECTED))
    expr_by_record = {}
    if controller == "aladdin":
        learn_s = math.ceil(
            autoscaler.read_number("learn", LEARN) * autoscaler.read_number("every_s", EVERY_S)
        )
        expr_by_record[RATE] = f"sum(avg_over_time({llm_series(ARRIVALS, app)}[{max(learn_s, 1)}s]))"
        expr_by_record[ASKED] = _by_line(autoscaler, rate, *at)
    elif controller == "forecast":
        ahead_s = autoscaler.read_seconds("ahead_s", AHEAD_S, least=1, most=DAY_S)
        expr_by_record[EXPECTED] = _expected_rate_expr(autoscaler, app, ahead_s)
        expr_by_record[RATE] = expected
        expr_by_record[ASKED] = _by_worker(autoscaler, rate, *at)
    elif loads:
        ahead_s, every_s = (
            _ahead_s(autoscaler, place),
            autoscaler.read_seconds("every_s", EVERY_S, least=1, most=3600),
        )
        expr_by_record[EXPECTED] = _expected_rate_expr(autoscaler, app, ahead_s, over_s=max(ahead_s, every_s))
        back = [each.name for each in places if each.pool.role != "prefill"]
        expected_now = _expected_now(autoscaler, app)
        expr_by_record |= by_load.load_rules(
            autoscaler, app, place, loads[number], expected, expected_now, front, back
        )
        expr_by_record[ASKED] = by_load.worker_steps_expr(
            loads[number], f"sum({pool_series(by_load.LOAD, app, place)})"
        )
    else:
        ahead_s = _ahead_s(autoscaler, place)
        expr_by_record[EXPECTED] = _expected_rate_expr(
            autoscaler, app, ahead_s, over_s=max(ahead_s, _bucket_s(autoscaler))
        )
        expr_by_record[RATE] = _needed_workers_expr(autoscaler, app, place, front)
        expr_by_record[ASKED] = _by_table(autoscaler, rate, *at)
    return expr_by_record


def _ahead_s(autoscaler: Autoscaler, place: ScaleTarget) -> int:
    start_s = place.scaled.start_s + autoscaler.read_number("every_s", EVERY_S)
    return autoscaler.read_seconds("ahead_s", start_s, least=1, most=DAY_S)


def _bounded_expr(autoscaler: Autoscaler, app: str, place: ScaleTarget, *, is_within: bool) -> str:
    """The most that was asked for during `hold_s`, within least and most where KEDA does not see to that."""
    controller, wanted_series = autoscaler.controller, pool_series(ASKED, app, place)
    hold_s = autoscaler.read_seconds("hold_s", HOLD_S[controller], least=0, most=DAY_S)
    if 0 < hold_s < (every_s := autoscaler.read_number("every_s", EVERY_S)):
        raise InputError(
            f"{controller}: hold: {hold_s} s, must be 0 or hold a look, which is every {every_s:g} s"
        )
    bounded_expr = f"sum(max_over_time({wanted_series}[{hold_s}s]))" if hold_s else f"sum({wanted_series})"
    return f"clamp({bounded_expr}, {place.scaled.least}, {place.scaled.most})" if is_within else bounded_expr


def _larger_of_two_expr(one: str, other: str) -> str:
    """The larger of two vectors without labels, the one that there is where one is missing."""
    return f"({one} > {other} or {other} or {one})"


def _bucket_s(autoscaler: Autoscaler) -> int:
    bucket_s = autoscaler.read_seconds("bucket_s", BUCKET_S, least=10, most=7200)
    if bucket_s < (every_s := autoscaler.read_number("every_s", EVERY_S)):
        raise InputError(
            f"{autoscaler.controller}: bucket: {bucket_s} s, must hold a look, which is every {every_s:g} s"
        )
    return bucket_s


def _season_s(autoscaler: Autoscaler) -> int:
    return autoscaler.read_seconds("season_s", DAY_S, least=600, most=MOST_S)


def _expected_rate_expr(autoscaler: Autoscaler, app: str, ahead_s: int, over_s: int = 0) -> str:
    """The rate expected `ahead_s` from now, or the highest of the `over_s` until then."""
    bucket_s, season_s = _bucket_s(autoscaler), _season_s(autoscaler)
    back_s = season_s - ahead_s - bucket_s // 2  # The mean of a bucket is recorded at its end.
    if back_s <= 0:
        raise InputError(
            f"{autoscaler.controller}: ahead: {ahead_s} s and half a bucket of {bucket_s} s must be below "
            f"a season of {season_s} s"
        )
    bucket = llm_series(BUCKET, app)
    seen = f"max_over_time({bucket}[{over_s}s] offset {back_s}s)"
    season = f"sum({seen})" if over_s else f"sum({bucket} offset {back_s}s)"
    drift = f"(sum({bucket}) - sum({bucket} offset {bucket_s}s)) * {ahead_s / bucket_s:.12g}"
    return (
        f"{season} * sum({llm_series(SHARE, app)}) or clamp_min(sum({bucket}) + {drift}, 0) or sum({bucket})"
    )


def _expected_now(autoscaler: Autoscaler, app: str) -> str:
    """What the same forecast says of now."""
    back_s = _season_s(autoscaler) - _bucket_s(autoscaler) // 2
    bucket = llm_series(BUCKET, app)
    return f"sum({bucket} offset {back_s}s) * sum({llm_series(SHARE, app)}) or sum({bucket})"


def _needed_workers_expr(autoscaler: Autoscaler, app: str, place: ScaleTarget, front: Sequence[str]) -> str:
    headroom, present = by_load.headroom_factor(autoscaler), f"sum({llm_series(PRESENT, app)})"
    rate = f"{headroom:.12g} * {_larger_of_two_expr(f'sum({pool_series(EXPECTED, app, place)})', present)}"
    if not (drain_s := by_load.drain_of(autoscaler)):
        return rate
    return f"{rate} + clamp_min({prometheus_queries.waiting_beyond_one(front)}, 0) / {drain_s}"


def _by_table(autoscaler: Autoscaler, rate: str, number: int, pools: int) -> str:
    rates_rps, sizes = write_capacity_table(autoscaler, pools)
    own = [row[number] for row in sizes]
    steps = [f"{own[0]} * ({rate} > bool 0)"]
    steps += [
        f"{after - before} * ({rate} > bool {edge!r})"
        for edge, (before, after) in zip(rates_rps, pairwise(own), strict=False)
        if after != before
    ]
    if last := own[-1]:
        beyond = f"(ceil({rate} * {last / rates_rps[-1]!r} - {ROUNDING}) - {last})"
        steps.append(f"({rate} > bool {rates_rps[-1]!r}) * {beyond}")
    return " + ".join(steps)


def _by_worker(autoscaler: Autoscaler, rate: str, number: int, pools: int) -> str:
    if autoscaler.parameters.get("per_worker_rps") is not None:
        per_worker_rps = autoscaler.read_number("per_worker_rps", 1.0)
    else:
        rates_rps, sizes = write_capacity_table(autoscaler, pools)
        per_worker_rps = rates_rps[-1] / sizes[-1][number] if sizes[-1][number] else math.inf
    if per_worker_rps <= 0:
        raise InputError(f"{autoscaler.controller}: per_worker_rps: {per_worker_rps:g}, must be > 0")
    return f"ceil({rate} * {1 / per_worker_rps!r} - {ROUNDING})"


def _by_line(autoscaler: Autoscaler, rate: str, number: int, pools: int) -> str:
    rates_rps, sizes = write_capacity_table(autoscaler, pools)
    line = fit_worker_rule(rates_rps, [row[number] for row in sizes], covers=True)
    return f"ceil({line.slope_workers_per_rps!r} * {rate} + {line.offset_workers!r} - {ROUNDING})"


def write_capacity_table(autoscaler: Autoscaler, pools: int) -> tuple[list[float], list[list[int]]]:
    """`rates_rps` (R,), rising, and `sizes` (R, P), in the order of the fleet's pools."""
    rates: Any = autoscaler.parameters.get("rates_rps")
    sizes: Any = autoscaler.parameters.get("sizes")
    if rates is None or sizes is None or not len(rates) or len(rates) != len(sizes):
        raise InputError(
            f"{autoscaler.controller}: expected the plan's capacity table: rates_rps and as many rows of "
            "sizes"
        )
    if len(rates) > MOST_STEPS:
        raise InputError(f"{autoscaler.controller}: rates_rps: {len(rates)} rates, a rule holds {MOST_STEPS}")
    rate_list, rows = [float(rate) for rate in rates], [[int(size) for size in row] for row in sizes]
    if not rate_list[0] > 0 or any(not after > before for before, after in pairwise(rate_list)):
        raise InputError(f"{autoscaler.controller}: rates_rps: must rise from above 0, found {rate_list[:8]}")
    if any(len(row) != pools for row in rows):
        raise InputError(f"{autoscaler.controller}: sizes: expected {pools} in each row, one per pool")
    return rate_list, rows


def _limits(autoscaler: Autoscaler) -> tuple[str, ...]:
    loads = by_load.rules_of(autoscaler, len(autoscaler.pools))
    limit_lines = [
        "vLLM counts what has finished, not what arrives: arrivals are ends and the growth of what is in "
        f"flight, over {prometheus_queries.RATE_S} s. Requests that no worker has yet are not seen.",
        keda_object.EXACT_LIMIT,
        f"Look at it in Prometheus: {ARRIVALS}, {by_load.LOAD if loads else RATE}, {ASKED} and {WORKERS} are "
        "recorded.",
        *(by_load.limit_lines(autoscaler, loads) if loads else ()),
        *(node_filling.LIMITS if node_filling.nodes_of(autoscaler, len(autoscaler.pools)) else ()),
    ]
    if autoscaler.controller == "aladdin":
        limit_lines.append(
            "No rule looks for change points or for longer requests: the rate is the mean of the last "
            "heartbeats."
        )
    else:
        limit_lines.append(
            "The season is the last one, and Prometheus must keep it; until then it goes by the last bucket "
            "and its drift."
        )
    return tuple(limit_lines)
