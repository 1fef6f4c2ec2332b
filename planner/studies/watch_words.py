"""The result of `plan watch` (plan_watch.py) as sentences, as a document, and as Prometheus gauges."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.documents.facts import SpotSpare
from planner.fleet import Fleet
from planner.manifests.monitoring import HEADROOM, HOLDS
from planner.reports.words import describe_fleet, usd_text
from planner.studies.plan_watch import FEWEST_REQUESTS, RECENT_S, LatencyLine, LiveDrift, WatchedPlan
from planner.studies.replanning import Replan
from planner.units import count_text, finite_or_none, show_beside, show_digits, show_s

# The quantities that may drift (plan_watch.Reference.what): the name in sentences, and the unit.
WHAT = {
    "rate": ("traffic", "requests/s"),
    "prompt": ("prompts", "tokens"),
    "output": ("outputs", "tokens"),
    "missed": ("prompt tokens that caches miss", "share"),
}
_UP_AND_DOWN = {"rate": ("more", "less"), "prompt": ("longer", "shorter"), "output": ("longer", "shorter")}
GAUGES: Mapping[str, str] = {
    HOLDS: "1 while the plan holds: no limit missed, and live traffic is not surely more than it carries",
    HEADROOM: "how much more traffic of the present lengths the plan carries, as a share",
    "fleetplan_holds_until_rps": "requests per second up to which the plan keeps its SLO",
    "fleetplan_live_rps": "requests per second that come now",
    "fleetplan_drifted": "1 where a quantity has left what the plan was made for",
    "fleetplan_drift_frac": "a quantity relative to what was planned, minus 1",
    "fleetplan_slo_kept": "1 kept, 0 missed, NaN where the metrics do not say",
    "fleetplan_watched_timestamp_seconds": "end of the last window that was watched",
}


def watch_sentences(watched: WatchedPlan) -> list[str]:
    """The result as sentences, the most important one first."""
    lines = [_headline(watched)]
    lines += [_drift_line(drift) for drift in watched.drifts if drift.is_drift]
    if inside := [_inside_text(drift) for drift in watched.drifts if not drift.is_drift]:
        lines.append(f"still inside: {'; '.join(inside)}")
    lines += [_latency_line(line) for line in watched.latencies]
    planned_hit_frac, live_hit_frac = watched.hit_frac
    if live_hit_frac is not None:
        planned_text = "" if planned_hit_frac is None else f", planned {100 * planned_hit_frac:.0f} %"
        lines.append(f"prefix caches had {100 * live_hit_frac:.0f} % of the prompt tokens{planned_text}")
    lines.append(_load_line(watched))
    return lines


def spot_sentence(spares: Sequence[SpotSpare]) -> str:
    """The sentence that spot workers that may be down are not counted in how far the plan holds."""
    pools = ", ".join(f"{spare.pool}: {spare.down} of {spare.workers}" for spare in spares)
    return f"how far the plan holds is without the spot workers that may be down at once ({pools})"


def _headline(watched: WatchedPlan) -> str:
    """The verdict in one line: missed limits, or else drifts, and up to which rate the plan holds."""
    headroom = watched.headroom
    at_least = "at least " if headroom.is_at_least else ""
    until_rps, now_rps = (show_digits(rps, 3) for rps in (headroom.until_rps, headroom.now_rps))
    until = f"the plan holds until {at_least}{until_rps} requests/s (now {now_rps})"
    if headroom.input_frac or headroom.output_frac:
        until += " at these lengths"
    if watched.is_exceeded is None and not watched.missed_lines:
        until += ": more than it carries, but not for certain"
    elif headroom.headroom_frac < 0:
        until = f"the plan no longer holds: it does until {until_rps} requests/s, now {now_rps}"
    harder = ", ".join(_short_text(drift) for drift in watched.drifts if drift.is_harder)
    easier = ", ".join(_short_text(drift) for drift in watched.drifts if drift.is_drift and not drift.is_up)
    if watched.missed_lines:
        missed = ", ".join(line.limit.label for line in watched.missed_lines)
        if headroom.headroom_frac >= 0:
            until = f"by the simulation {until}, so engines are slower than planned, or some are down"
        return f"the SLO is missed ({missed}){'; drifted: ' + harder if harder else ''}; {until}"
    if harder:
        return f"drifted: {harder}; {until}"
    if easier:
        return f"inside, with less to do than planned: {easier}; {until}"
    return f"still inside the plan; {until}"


def _short_text(drift: LiveDrift) -> str:
    """For instance "12 % more traffic since Tue 2026-11-24 14:05 UTC"."""
    assert drift.since_s is not None  # Callers pass only quantities that have drifted.
    return f"{_change_text(drift)} since {utc_text(drift.since_s)}"


def _change_text(drift: LiveDrift) -> str:
    """How much a quantity has changed, in words."""
    percent = f"{100 * abs(drift.change_frac):.0f} %"
    if drift.what == "missed":
        return f"prefix caches miss {percent} {'more' if drift.change_frac > 0 else 'less'}"
    more_word, less_word = _UP_AND_DOWN[drift.what]
    comparative = less_word if drift.change_frac < 0 else more_word
    if drift.what == "rate":
        return f"{percent} {comparative} traffic"
    return f"{WHAT[drift.what][0]} {percent} {comparative}"


def _drift_line(drift: LiveDrift) -> str:
    """The sentence on a quantity that has drifted."""
    name, unit = WHAT[drift.what]
    assert drift.noticed_s is not None
    return (
        f"{name}: {show_digits(drift.now, 4)} {unit}, planned {show_digits(drift.planned, 4)}"
        f"{_levels_text(drift)}: {_interval_text(drift)}; noticed {utc_text(drift.noticed_s)}"
    )


def _inside_text(drift: LiveDrift) -> str:
    """A quantity that is within the plan, with the drifts that it came back from."""
    name, unit = WHAT[drift.what]
    past = f", drifted {count_text(len(drift.past), 'time')} and came back" if drift.past else ""
    if math.isnan(drift.now):
        return f"{name}: nothing in the last hour"
    planned = f"planned {show_digits(drift.planned, 4)}{_levels_text(drift)}"
    return f"{name} {show_digits(drift.now, 4)} {unit}, {planned} ({_interval_text(drift)}){past}"


def _levels_text(drift: LiveDrift) -> str:
    """Words for the range that the plan expects: ", levels 3 to 5"."""
    return f", levels {show_digits(drift.planned_low, 4)} to {show_digits(drift.planned_high, 4)}"


def _interval_text(drift: LiveDrift) -> str:
    """The 95 % interval of the change from the planned mean."""
    low, high = f"{100 * drift.low_frac:+.0f}", f"{100 * drift.high_frac:+.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _latency_line(line: LatencyLine) -> str:
    """The sentence on one line of the SLO as it is kept now."""
    if line.unknown_because:
        predicted = "" if line.planned_s is None else f"predicted {show_s(line.planned_s)}: "
        limit = f"{line.limit.label} <= {show_s(line.limit.limit_s)}"
        return f"{limit}: {predicted}not known ({line.unknown_because})"
    if not line.requests:
        return f"{line.limit.label}: nothing counted in the last hour"
    between = f"{show_s(line.low_s)} to {show_s(line.high_s) if math.isfinite(line.high_s) else 'more'}"
    verdict = {True: "kept", False: "MISSED", None: "not known"}[line.is_kept]
    planned_text, limit_text = show_beside(line.planned_s, line.limit.limit_s)
    planned = "" if line.planned_s is None else f", predicted {planned_text}"
    why = ""
    if line.is_kept is None:
        is_few = line.requests < FEWEST_REQUESTS
        why = " (too few)" if is_few else " (the limit lies within a bucket)"
    return f"{line.limit.label} <= {limit_text}: {between}{planned}: {verdict}{why}"


def _load_line(watched: WatchedPlan) -> str:
    """The sentence on how busy the engines were in the last hour."""
    live = watched.live
    recent = slice(-max(int(RECENT_S / live.every_s), 1), None)

    def means(values: npt.NDArray[np.float64], words: str) -> list[str]:
        measured = values[recent][np.isfinite(values[recent])]
        return [f"{show_digits(measured.mean(), 3)} {words}"] if measured.size else []

    texts = [
        *means(live.running, "requests running"),
        *means(live.waiting, "waiting"),
        *means(100 * live.kv_use_frac, "% of the KV cache in use"),
    ]
    load = ", ".join(texts) or "the metrics do not say how busy"
    return f"{count_text(live.instances, 'engine')}, last hour: {load}"


def utc_text(t_s: float) -> str:
    """For instance 'Tue 2026-11-24 14:05 UTC'."""
    return datetime.fromtimestamp(t_s, UTC).strftime("%a %Y-%m-%d %H:%M UTC")


def watch_document(watched: WatchedPlan) -> dict[str, Any]:
    """What `plan watch --json` prints; times are Unix [s]."""
    headroom = watched.headroom
    return {
        "status": watched.status,
        "plan_holds": watched.plan_holds,
        "message": watch_sentences(watched)[0],
        "from_s": float(watched.live.edges_s[0]),
        "to_s": float(watched.live.edges_s[-1]),
        "windows": watched.live.windows,
        "holds_until_rps": headroom.until_rps,
        "now_rps": finite_or_none(headroom.now_rps),
        "headroom_traffic_frac": finite_or_none(headroom.headroom_frac),
        "is_at_most_tried": headroom.is_at_least,
        "is_exceeded": watched.is_exceeded,
        "drift": [
            {
                "what": drift.what,
                "planned": drift.planned,
                "planned_levels": [drift.planned_low, drift.planned_high],
                "now": finite_or_none(drift.now),
                "change_frac": finite_or_none(drift.change_frac),
                "interval_95_frac": [finite_or_none(drift.low_frac), finite_or_none(drift.high_frac)],
                "dispersion": drift.dispersion,
                "is_drift": drift.is_drift,
                "is_harder": drift.is_harder,
                "since_s": drift.since_s,
                "noticed_s": drift.noticed_s,
                "past_s": [list(span) for span in drift.past],
            }
            for drift in watched.drifts
        ],
        "slo": [
            {
                "limit": line.limit.name,
                "limit_s": line.limit.limit_s,
                "above_s": finite_or_none(line.low_s),
                "at_most_s": finite_or_none(line.high_s),
                "predicted_s": line.planned_s,
                "requests": line.requests,
                "is_kept": line.is_kept,
                **({"unknown_because": line.unknown_because} if line.unknown_because else {}),
            }
            for line in watched.latencies
        ],
        "hit_frac": {"planned": watched.hit_frac[0], "live": watched.hit_frac[1]},
    }


def prometheus_samples(watched: WatchedPlan) -> list[tuple[str, dict[str, str], float]]:
    """The Prometheus samples of GAUGES: name, labels, value."""
    rows: list[tuple[str, dict[str, str], float]] = [
        (HOLDS, {}, float(watched.plan_holds)),
        (HEADROOM, {}, watched.headroom.headroom_frac),
        ("fleetplan_holds_until_rps", {}, watched.headroom.until_rps),
        ("fleetplan_live_rps", {}, watched.headroom.now_rps),
        ("fleetplan_watched_timestamp_seconds", {}, float(watched.live.edges_s[-1])),
    ]
    for drift in watched.drifts:
        rows.append(("fleetplan_drifted", {"quantity": drift.what}, float(drift.is_drift)))
        rows.append(("fleetplan_drift_frac", {"quantity": drift.what}, drift.change_frac))
    for line in watched.latencies:
        is_kept = math.nan if line.is_kept is None else float(line.is_kept)
        rows.append(("fleetplan_slo_kept", {"limit": line.limit.name}, is_kept))
    return rows


def replan_sentence(replanned: Replan, running: Fleet) -> str:
    """What replanning would change, and what it costs."""
    best = replanned.best
    # A fleet with GPUs that are no longer in stock cannot be kept, so there is no such way and no price.
    staying = next((way for way in replanned.ways if way.label == "keep what runs"), None)
    now = "" if staying is None else f" (now {usd_text(staying.cost_usd_per_h)} per hour)"
    if replanned.keeps_running:
        return (
            f"replanning on this traffic would keep {describe_fleet(running)}, "
            f"{usd_text(best.cost_usd_per_h)} per hour"
        )
    return (
        f"replanning on this traffic: {describe_fleet(best.fleet)}, {usd_text(best.cost_usd_per_h)} per "
        f"hour{now}, and {usd_text(best.migration_usd)} once to start and stop workers"
    )
