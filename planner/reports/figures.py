"""The charts of a plan, each with its caption: for the report, its PNG files and the browser alike."""

from __future__ import annotations

from planner.domain import Metric
from planner.reports import charts, screen_charts
from planner.reports.drawing import Figure
from planner.search.evidence.plan import Plan
from planner.search.problem.bill import bill_fleet
from planner.slo_metrics import METRICS

ALWAYS: tuple[Metric, ...] = ("ttft", "tbt")
NAMES = (*screen_charts.NAMES, *METRICS, "busy", "alternatives", "cost-and-power")


def every(plan: Plan) -> list[Figure]:
    return [*running(plan), *alternatives(plan)]


def running(plan: Plan) -> list[Figure]:
    """Those of the first screen, then what it does not show."""
    return [*screen_charts.figures(plan), *beside(plan)]


def beside(plan: Plan) -> list[Figure]:
    """What the first screen does not show: the metrics that the SLO has not, and how busy pools are."""
    simulation, limited = plan.simulation, {limit.metric for limit in plan.slo.limits}
    drawn = [
        screen_charts.latency(simulation, metric, (), ", on which the SLO has no limit")
        for metric in ALWAYS
        if metric not in limited
    ]
    values = [figure for figure in drawn if figure is not None]
    if (busy := charts.busy_chart(plan.fleet, simulation)) is not None:
        caption = (
            "Share of the time in which the workers of each pool were in a step, however few requests were "
            "in it: a pool at 100 % is full only where its KV cache is, or requests wait."
        )
        values.append(Figure("busy", busy, caption))
    return values


def alternatives(plan: Plan) -> list[Figure]:
    """What else the fleet could be: as bars of the objective, and by cost and power."""
    certificate = plan.certificate
    others = [a for a in plan.alternatives if a.fleet != plan.fleet]
    bars = [charts.Bar("this plan", plan.value, is_plan=True)]
    bars += [charts.Bar("on paper", certificate.value)] if certificate.answers else []
    where = ", on paper" if certificate.answers else ""
    bars += [charts.Bar(other.label + where, other.objective) for other in others if other.is_priced]
    if len(bars) == 1 + bool(certificate.answers):
        return []
    caption = f"{certificate.unit} of the plan and of the alternatives that were priced."
    values = [Figure("alternatives", charts.bars_chart(bars, certificate.unit), caption)]
    fleets = {"this plan": plan.fleet} | {a.label: a.fleet for a in others if a.fleet is not None}
    dots = {name: (bill_fleet(fleet).usd_per_h, fleet.power_w / 1e3) for name, fleet in fleets.items()}
    if len(set(dots.values())) > 2:
        caption = (
            "The same fleets by cost and provisioned power: the plan is the square; a fleet has a name where "
            "no other is better in both."
        )
        values.append(Figure("cost-and-power", charts.trade_chart(dots, "this plan"), caption))
    return values
