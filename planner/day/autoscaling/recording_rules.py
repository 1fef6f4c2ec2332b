"""Our own controllers as recording rules of Prometheus; KEDA follows the last record, a number of workers.

    arrivals   requests/s that came to the LLM in the last minute
    bucket     the mean of arrivals over `bucket_s`
    present    the larger of arrivals and bucket
    season_share  arrivals in the last three buckets, divided by those one season earlier; 1/3 to 3
    expected   the forecast: bucket as it was one season earlier, times season_share; before Prometheus has
               data of a season, the last bucket and its drift from the one before
    rate       the rate [requests/s] that a pool must carry, by controller (below)
    asked      the workers that the controller wants now: those that carry the rate
    held       only where nodes are sold whole: the highest `asked` during `hold_s`, within least and most
    workers    where nodes are sold whole, `held` and more workers on the idle GPUs of these nodes
               (node_filling); otherwise the highest `asked` during `hold_s`

    fleetplan  By rate: the larger of present and expected up to `ahead_s` from now, times 1 + headroom; plus
               (waiting prompts - one per worker) / `drain_s`. Sizes are those of the capacity table at the
               next higher rate; beyond the table its last sizes grow in proportion. By load: see by_load
    forecast   expected `ahead_s` from now, divided by the rate that a worker carries
    aladdin    the mean of arrivals over `learn` times `every_s`; ceil(slope x rate + offset), a line over
               the capacity table

The simulated controllers (planner/day/controllers) have the same rules, but their season is the mean of all
earlier seasons, not the last one alone.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from planner.day.autoscaling import by_load, hpa_object, keda_object, node_filling, prometheus_queries
from planner.day.autoscaling.autoscaler import DAY_S, Autoscaler, Document, WrittenManifests
from planner.day.autoscaling.prometheus_queries import (
    LLM,
    MOST_STEPS,
    llm_series,
    pool_series,
    recording_rule,
)
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.day.controllers.aladdin_controller import AladdinSettings
from planner.day.controllers.forecast import ForecastSettings
from planner.day.controllers.forecasting import LAST_BUCKETS, MOST_SEASON_RATIO
from planner.day.controllers.knowledge import CapacityTable
from planner.day.controllers.planned import FleetplanSettings
from planner.domain import ROUNDING
from planner.errors import InputError
from planner.solvers.worker_rule import fit_worker_rule

# Records of the LLM, as the module's docstring lists them.
ARRIVALS, BUCKET, PRESENT, SHARE = (
    f"fleetplan:{name}" for name in ("arrivals_rps", "bucket_rps", "present_rps", "season_share")
)
# Records of a pool.
EXPECTED, RATE, ASKED, HELD, WORKERS = (
    f"fleetplan:pool_{name}" for name in ("expected_rps", "rps", "asked", "held", "workers")
)
MOST_SEASON_S = 28 * DAY_S  # Four weeks; Prometheus must keep its data for so long.
# Aladdin has no forecast and keeps no size, but its records have buckets and a season, too.
_ALADDIN_S = {"bucket_s": 300.0, "hold_s": 0.0, "season_s": DAY_S}


def write_recording_rules(
    targets: Sequence[ScaleTarget], autoscaler: Autoscaler, app: str
) -> WrittenManifests:
    """The files with the rules, what scrapes their metrics, and ScaledObjects that follow them."""
    hpa_object.refuse_zero(autoscaler, "take cron, or least 1")
    # The controller's settings are in the rules, and the ScaledObject only follows.
    follower = autoscaler.with_settings(keda_object.FOLLOW_EXACTLY)
    objects = [
        keda_object.scaled_object(
            target, follower, [keda_object.prometheus_trigger(pool_series(WORKERS, app, target), 1)]
        )
        for target in targets
    ]
    files = {
        prometheus_queries.MONITORS_FILE: [prometheus_queries.pod_monitor(target) for target in targets],
        prometheus_queries.RULES_FILE: [prometheus_rule(targets, autoscaler, app)],
        keda_object.FILE: objects,
    }
    steps = (
        *prometheus_queries.monitors_step(),
        f"    kubectl apply -f {prometheus_queries.RULES_FILE}   # recording rules, for the Prometheus "
        "operator",
        keda_object.apply_step(),
    )
    return WrittenManifests(files, steps, (*prometheus_queries.monitors_limits(), *_limit_lines(autoscaler)))


def prometheus_rule(targets: Sequence[ScaleTarget], autoscaler: Autoscaler, app: str) -> Document:
    """A PrometheusRule (monitoring.coreos.com/v1), in which each rule may read the records before it."""
    bucket_s, season_s = _bucket_s(autoscaler), _season_s(autoscaler)
    arrivals, bucket = llm_series(ARRIVALS, app), llm_series(BUCKET, app)
    # Means over the last LAST_BUCKETS buckets, now and a season ago; without records they have no value.
    now, season_ago = (
        f"sum(avg_over_time({arrivals}[{LAST_BUCKETS * bucket_s}s]{offset}))"
        for offset in ("", f" offset {season_s}s")
    )
    load_rules = by_load.pool_rules_of(autoscaler)
    llm_exprs = {
        ARRIVALS: prometheus_queries.arrivals_rps(_prefilling_pools(targets)),
        BUCKET: f"sum(avg_over_time({arrivals}[{bucket_s}s]))",
        PRESENT: _larger_of_two_expr(f"sum({arrivals})", f"sum({bucket})"),
        SHARE: f"clamp({now} / {season_ago}, {1 / MOST_SEASON_RATIO:.12g}, {MOST_SEASON_RATIO:.12g})",
    }
    if load_rules:
        llm_exprs |= by_load.length_exprs(load_rules, _pools_by_work(targets))
    records = [recording_rule(name, expr, {LLM: app}) for name, expr in llm_exprs.items()]
    labels = {target.name: {LLM: app, prometheus_queries.POOL: target.name} for target in targets}
    nodes = node_filling.nodes_of(autoscaler)
    for number, target in enumerate(targets):
        for name, expr in _pool_exprs(autoscaler, app, targets, number, load_rules).items():
            records.append(recording_rule(name, expr, labels[target.name]))
        bounded_expr = _bounded_expr(autoscaler, app, target, is_clamped=bool(nodes))
        records.append(recording_rule(HELD if nodes else WORKERS, bounded_expr, labels[target.name]))
    if nodes:
        for target, expr in node_filling.fill_nodes(targets, nodes, app, (HELD, WORKERS)):
            records.append(recording_rule(WORKERS, expr, labels[target.name]))
    group = {"name": f"{app}-workers", "interval": f"{_every_s(autoscaler)}s", "rules": records}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": f"{app}-workers"},
        "spec": {"groups": [group]},
    }


def _pool_exprs(
    autoscaler: Autoscaler,
    app: str,
    targets: Sequence[ScaleTarget],
    number: int,
    load_rules: Sequence[by_load.PoolRule],
) -> dict[str, str]:
    """The expressions of pool `number` by record; the last is ASKED. With `load_rules` the controller
    fleetplan goes by load, without them by rate.
    """
    settings, target = autoscaler.settings, targets[number]
    prefilling = _prefilling_pools(targets)
    rate, expected = (f"sum({pool_series(name, app, target)})" for name in (RATE, EXPECTED))
    expr_by_record = {}
    if isinstance(settings, AladdinSettings):
        learn_s = math.ceil(settings.learn * settings.every_s)
        expr_by_record[RATE] = f"sum(avg_over_time({llm_series(ARRIVALS, app)}[{learn_s}s]))"
        expr_by_record[ASKED] = _workers_by_line(_capacity_table(autoscaler), rate, number)
    elif isinstance(settings, ForecastSettings):
        ahead_s = autoscaler.whole_seconds("ahead_s", settings.ahead_s, least=1, most=DAY_S)
        expr_by_record[EXPECTED] = _expected_rate_expr(autoscaler, app, ahead_s)
        expr_by_record[RATE] = expected
        expr_by_record[ASKED] = _workers_by_rate(autoscaler, rate, number)
    elif load_rules:
        ahead_s = _ahead_s(autoscaler, target)
        # The forecast must cover the time to the next decision. By rate (below) it covers at least a bucket,
        # because rates are means over buckets.
        over_s = max(ahead_s, _every_s(autoscaler))
        expr_by_record[EXPECTED] = _expected_rate_expr(autoscaler, app, ahead_s, over_s=over_s)
        expr_by_record |= by_load.load_exprs(
            autoscaler,
            app,
            target,
            load_rules[number],
            expected,
            _expected_now(autoscaler, app),
            _pools_by_work(targets),
        )
        expr_by_record[ASKED] = by_load.worker_steps_expr(
            load_rules[number], f"sum({pool_series(by_load.LOAD, app, target)})"
        )
    else:
        ahead_s = _ahead_s(autoscaler, target)
        expr_by_record[EXPECTED] = _expected_rate_expr(
            autoscaler, app, ahead_s, over_s=max(ahead_s, _bucket_s(autoscaler))
        )
        expr_by_record[RATE] = _needed_rate_expr(autoscaler, app, target, prefilling)
        expr_by_record[ASKED] = _workers_by_table(_capacity_table(autoscaler), rate, number)
    return expr_by_record


def _prefilling_pools(targets: Sequence[ScaleTarget]) -> list[str]:
    """The names of the pools to which requests come first."""
    return [target.name for target in targets if target.pool.role != "decode"]


def _pools_by_work(targets: Sequence[ScaleTarget]) -> by_load.PoolsByWork:
    """The names of the pools that compute prompts, and of those that make output tokens."""
    decoding = [target.name for target in targets if target.pool.role != "prefill"]
    return by_load.PoolsByWork(_prefilling_pools(targets), decoding)


def _setting_s(autoscaler: Autoscaler, name: str) -> float:
    """A setting of the controller [s]; for Aladdin, where it has none of this name, that of _ALADDIN_S."""
    settings = autoscaler.settings
    return float(getattr(settings, name) if hasattr(settings, name) else _ALADDIN_S[name])


def _every_s(autoscaler: Autoscaler) -> int:
    """The time between two decisions of the controller [s]."""
    every_s: float = autoscaler.settings.every_s
    return math.ceil(every_s)


def _ahead_s(autoscaler: Autoscaler, target: ScaleTarget) -> int:
    """How far fleetplan looks ahead: by default until a worker of the next decision is ready."""
    settings: FleetplanSettings = autoscaler.settings
    ahead_s = target.scaled.start_s + settings.every_s if settings.ahead_s is None else settings.ahead_s
    return autoscaler.whole_seconds("ahead_s", ahead_s, least=1, most=DAY_S)


def _bounded_expr(autoscaler: Autoscaler, app: str, target: ScaleTarget, *, is_clamped: bool) -> str:
    """The highest ASKED during `hold_s`; if `is_clamped`, within least and most, as KEDA does else."""
    controller, asked = autoscaler.controller, pool_series(ASKED, app, target)
    hold_s, every_s = math.ceil(_setting_s(autoscaler, "hold_s")), autoscaler.settings.every_s
    if 0 < hold_s < every_s:
        raise InputError(
            f"{controller}: hold: {hold_s} s, must be 0 or at least the time between decisions, {every_s:g} s"
        )
    highest = f"sum(max_over_time({asked}[{hold_s}s]))" if hold_s else f"sum({asked})"
    return f"clamp({highest}, {target.scaled.least}, {target.scaled.most})" if is_clamped else highest


def _larger_of_two_expr(one: str, other: str) -> str:
    """PromQL for the larger of two vectors without labels; if only one has a value, that one."""
    return f"({one} > {other} or {other} or {one})"


def _bucket_s(autoscaler: Autoscaler) -> int:
    """The length of the buckets of arrivals [s]: at least the time between two decisions."""
    bucket_s = math.ceil(_setting_s(autoscaler, "bucket_s"))
    if bucket_s < (every_s := autoscaler.settings.every_s):
        raise InputError(
            f"{autoscaler.controller}: bucket: {bucket_s} s, must be at least the time between decisions, "
            f"{every_s:g} s"
        )
    return bucket_s


def _season_s(autoscaler: Autoscaler) -> int:
    """The period after which the traffic repeats itself [s], a day by default."""
    season_s = _setting_s(autoscaler, "season_s")
    return autoscaler.whole_seconds("season_s", season_s, least=600, most=MOST_SEASON_S)


def _expected_rate_expr(autoscaler: Autoscaler, app: str, ahead_s: int, over_s: int = 0) -> str:
    """PromQL for the rate expected `ahead_s` from now, or the highest of the `over_s` that end then.

    PromQL's `or` takes the first of three that has a value: season, drift, last bucket.
    """
    bucket_s, season_s = _bucket_s(autoscaler), _season_s(autoscaler)
    # From now back to one season before the forecast time. A bucket's mean stands for the bucket's middle,
    # but is recorded half a bucket later, at its end.
    back_s = season_s - ahead_s - bucket_s // 2
    if back_s <= 0:
        raise InputError(
            f"{autoscaler.controller}: ahead: {ahead_s} s and half a bucket of {bucket_s} s must be below "
            f"a season of {season_s} s"
        )
    bucket = llm_series(BUCKET, app)
    highest = f"max_over_time({bucket}[{over_s}s] offset {back_s}s)"
    season = f"sum({highest})" if over_s else f"sum({bucket} offset {back_s}s)"
    drift = f"(sum({bucket}) - sum({bucket} offset {bucket_s}s)) * {ahead_s / bucket_s:.12g}"
    return (
        f"{season} * sum({llm_series(SHARE, app)}) or clamp_min(sum({bucket}) + {drift}, 0) or sum({bucket})"
    )


def _expected_now(autoscaler: Autoscaler, app: str) -> str:
    """PromQL for the rate that the season predicts for now, or without a season the last bucket's rate."""
    back_s = _season_s(autoscaler) - _bucket_s(autoscaler) // 2
    bucket = llm_series(BUCKET, app)
    return f"sum({bucket} offset {back_s}s) * sum({llm_series(SHARE, app)}) or sum({bucket})"


def _needed_rate_expr(
    autoscaler: Autoscaler, app: str, target: ScaleTarget, prefilling: Sequence[str]
) -> str:
    """The rate that a pool must carry under the controller fleetplan, if it goes by rate."""
    settings: FleetplanSettings = autoscaler.settings
    expected, present = f"sum({pool_series(EXPECTED, app, target)})", f"sum({llm_series(PRESENT, app)})"
    rate = f"{1 + settings.headroom_frac:.12g} * {_larger_of_two_expr(expected, present)}"
    if not (drain_s := math.ceil(settings.drain_s)):
        return rate
    return f"{rate} + clamp_min({prometheus_queries.waiting_beyond_one(prefilling)}, 0) / {drain_s}"


def _workers_by_table(table: CapacityTable, rate: str, number: int) -> str:
    """CapacityTable.sizes_for_rate for one pool, as PromQL: a term for each rate at which the size grows."""
    rates_rps, own = table.rates_rps.tolist(), table.sizes[:, number].tolist()
    steps = [f"{own[0]} * ({rate} > bool 0)"]
    steps += [
        f"{after - before} * ({rate} > bool {edge!r})"
        for edge, (before, after) in zip(rates_rps[:-1], pairwise(own), strict=True)
        if after != before
    ]
    if last := own[-1]:
        # Above the last rate workers grow in proportion to it; `beyond` is the surplus over the last size.
        beyond = f"(ceil({rate} * {last / rates_rps[-1]!r} - {ROUNDING}) - {last})"
        steps.append(f"({rate} > bool {rates_rps[-1]!r}) * {beyond}")
    return " + ".join(steps)


def _workers_by_rate(autoscaler: Autoscaler, rate: str, number: int) -> str:
    """PromQL for the rate divided by one worker's rate: a setting, or by the last row of the table."""
    settings: ForecastSettings = autoscaler.settings
    per_worker_rps = settings.per_worker_rps
    if per_worker_rps is None:
        table = _capacity_table(autoscaler)
        size = int(table.sizes[-1, number])
        # A pool that is empty in the table needs no workers, as if one worker carried any rate.
        per_worker_rps = float(table.rates_rps[-1]) / size if size else math.inf
    return f"ceil({rate} * {1 / per_worker_rps!r} - {ROUNDING})"


def _workers_by_line(table: CapacityTable, rate: str, number: int) -> str:
    """Aladdin's line over the capacity table, as PromQL."""
    line = fit_worker_rule(table.rates_rps.tolist(), table.sizes[:, number].tolist())
    return f"ceil({line.slope_workers_per_rps!r} * {rate} + {line.offset_workers!r} - {ROUNDING})"


def _capacity_table(autoscaler: Autoscaler) -> CapacityTable:
    """The plan's capacity table; a controller that goes by it cannot be made without one."""
    table = autoscaler.knowledge.capacity
    assert table is not None
    if len(table.rates_rps) > MOST_STEPS:
        raise InputError(
            f"{autoscaler.controller}: rates_rps: {len(table.rates_rps)} rates, a rule holds {MOST_STEPS}"
        )
    return table


def _limit_lines(autoscaler: Autoscaler) -> tuple[str, ...]:
    """Lines for README.md: where the rules differ from the simulated controllers."""
    load_rules = by_load.pool_rules_of(autoscaler)
    limit_lines = [
        "vLLM counts what has finished, not what arrives: arrivals are the requests that finished and the "
        f"growth of those in flight, over {prometheus_queries.RATE_S} s. Requests that no worker has yet are "
        "not seen.",
        keda_object.EXACT_LIMIT,
        f"Look at it in Prometheus: {ARRIVALS}, {by_load.LOAD if load_rules else RATE}, {ASKED} and "
        f"{WORKERS} are recorded.",
        *(by_load.limit_lines(autoscaler, load_rules) if load_rules else ()),
        *(node_filling.LIMITS if node_filling.nodes_of(autoscaler) else ()),
    ]
    if autoscaler.controller == "aladdin":
        limit_lines.append(
            "No rule looks for change points or for longer requests: the rate is the mean of the last "
            "heartbeats."
        )
    else:
        limit_lines.append(
            "The season is the last one, and Prometheus must keep its data; before it has a whole season, "
            "the forecast goes by the last bucket and its drift."
        )
    return tuple(limit_lines)
