"""The charts of a plan with their captions, for the report, its PNG files and the browser."""

from planner.documents.slo import MOST_CLASSES
from planner.domain import Metric
from planner.reports import charts, screen_charts
from planner.reports.drawing import CaptionedChart
from planner.search.evidence.plan import Plan
from planner.search.problem.bill import bill_fleet
from planner.slo_metrics import METRICS

ALWAYS: tuple[Metric, ...] = ("ttft", "tbt")  # Metrics that are drawn even if the SLO has no limit on them.
# The names of all charts that a plan may have, here and in screen_charts.py. output.py removes PNG files of
# these names that an earlier plan has left.
NAMES = (
    *screen_charts.NAMES,
    *METRICS,
    *(f"{metric}-class-{k}" for metric in METRICS for k in range(1, MOST_CLASSES + 1)),
    *("busy", "alternatives", "cost-and-power"),
)


def all_figures(plan: Plan) -> list[CaptionedChart]:
    """All charts of a plan, in the order of the report: `running_figures`, then `alternative_figures`."""
    return [*running_figures(plan), *alternative_figures(plan)]


def running_figures(plan: Plan) -> list[CaptionedChart]:
    """The charts of the first screen, then those of `figures_beyond_first_screen`."""
    return [*screen_charts.screen_figures(plan), *figures_beyond_first_screen(plan)]


def figures_beyond_first_screen(plan: Plan) -> list[CaptionedChart]:
    """Charts that the first screen lacks: metrics without a limit in the SLO, and how busy pools are."""
    simulation, limited_metrics = plan.simulation, {limit.metric for limit in plan.slo.limits}
    latencies = [
        screen_charts.latency_figure(simulation, metric, (), ", on which the SLO has no limit", metric)
        for metric in ALWAYS
        if metric not in limited_metrics
    ]
    figures = [figure for figure in latencies if figure is not None]
    if (busy := charts.busy_chart(plan.fleet, simulation)) is not None:
        caption = (
            "Share of the time in which the workers of each pool were in a step, however few requests were "
            "in it: a pool at 100 % is full only where its KV cache is, or requests wait."
        )
        figures.append(CaptionedChart("busy", busy, caption))
    return figures


def alternative_figures(plan: Plan) -> list[CaptionedChart]:
    """Charts of other fleets for the same traffic: their objectives as bars, and their cost and power."""
    certificate = plan.certificate
    others = [alternative for alternative in plan.alternatives if alternative.fleet != plan.fleet]
    priced = [other for other in others if other.is_priced]
    if not priced:
        return []
    bars = [charts.Bar("this plan", plan.value, is_plan=True)]
    # A plan has answers if scenarios were asked for. Then the certificate's value is that of the fleet on
    # paper, to which the alternatives, also on paper, compare.
    bars += [charts.Bar("on paper", certificate.value)] if certificate.answers else []
    suffix = ", on paper" if certificate.answers else ""
    bars += [charts.Bar(other.label + suffix, other.objective) for other in priced]
    caption = f"{certificate.unit} of the plan and of the alternatives that were priced."
    # Bars of equal height say nothing: fleets for the most traffic on given GPUs all cost the same.
    is_varied = len({f"{bar.value:.2f}" for bar in bars}) > 1
    figures = (
        [CaptionedChart("alternatives", charts.bars_chart(bars, certificate.unit), caption)]
        if is_varied
        else []
    )
    fleets = {"this plan": plan.fleet} | {
        alternative.label: alternative.fleet for alternative in others if alternative.fleet is not None
    }
    dots = {name: (bill_fleet(fleet).usd_per_h, fleet.power_w / 1e3) for name, fleet in fleets.items()}
    if len(set(dots.values())) > 2:  # Two dots show no more than two bars.
        caption = (
            "The plan (the square) and the alternatives by cost and provisioned power: a fleet has a name "
            "where no other is better in one and at least as good in the other."
        )
        figures.append(CaptionedChart("cost-and-power", charts.trade_chart(dots, "this plan"), caption))
    return figures
