"""report.html: one page that answers, then shows why. Self-contained, light and dark, fit to print."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from planner import charts
from planner.curves import distribution
from planner.domain import Fleet, Metric
from planner.drawing import chart_svg
from planner.manifests.engine import VLLM_VERSION, running
from planner.page import bullets, page, section, table
from planner.plan import Plan
from planner.units import show_s
from planner.words import (
    HOURS_PER_MONTH,
    alternative_rows,
    answer,
    counted,
    fleet_rows,
    headline,
    measured_line,
    neighbour_rows,
    node_rows,
    percent,
    percentile_rows,
    policies_line,
    promise,
    proof_lines,
    slo_rows,
)


def render(plan: Plan) -> str:
    """The whole page."""
    title = f"Fleet plan for {plan.fleet.llm.name}"
    body = "\n".join(
        [
            f"<header><p class=eyebrow>Fleet plan · {escape(plan.fleet.llm.name)}</p>",
            f"<h1>{escape(answer(plan))}</h1>",
            f"<p class=lead>{escape(promise(plan))}</p>",
            *(f"<p class=lead><strong>Mind:</strong> {escape(warning)}.</p>" for warning in plan.warnings),
            "</header>",
            _figures(plan),
            section("Fleet", _fleet_table(plan.fleet) + _nodes(plan)),
            section("What was promised, and what the simulation says", _slo_table(plan)),
            section("How it runs", _charts(plan)),
            section("What else it could be", _alternatives(plan)),
            section("What binds", bullets(plan.certificate.binding, "No single limit binds.")),
            section("What was proved, and over what", _proof(plan)),
            section("Where the figures come from", _sources(plan)),
        ]
    )
    return page(
        title,
        body,
        f"Written by fleetplan from a simulation of {counted(len(plan.trace), 'request')}, seed "
        f"{plan.certificate.seed}. plan.yaml runs it again; certificate.json holds what was proved; "
        "manifests/ deploys it.",
    )


def _figures(plan: Plan) -> str:
    return "<dl class=figures>" + "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class=note>{escape(note)}</dd></div>"
        for name, value, note in headline(plan)
    ) + "</dl>"  # fmt: skip


def _fleet_table(fleet: Fleet) -> str:
    return table(*fleet_rows(fleet), numeric=range(2, 10), skip=(3,)) + (
        f"<p class=note>{escape(policies_line(fleet))}</p>"
    )


def _nodes(plan: Plan) -> str:
    if plan.placement is None:
        return ""
    placement = plan.placement
    count = len(placement.nodes)
    fewest = "no placement needs fewer" if count == placement.bound else f"at least {placement.bound}"
    note = f"On {counted(count, 'node')} ({fewest})."
    if placement.cross_frac is not None:
        note += f" {percent(placement.cross_frac)} of the KV blocks go from one node to another."
    rows = table(*node_rows(plan), numeric=(0, 3))
    return f"<div class=below>{rows}</div><p class=note>{escape(note)}</p>"


def _slo_table(plan: Plan) -> str:
    note = f"<p class=note>{escape(measured_line(plan))}</p>"
    percentiles = table(*percentile_rows(plan), numeric=range(1, 5))
    return table(*slo_rows(plan), numeric=range(2, 5)) + note + f"<div class=below>{percentiles}</div>"


def figures(plan: Plan) -> list[tuple[Any, str]]:
    """Altair charts of latencies and load, each with its caption."""
    simulation = plan.simulation
    found: list[tuple[Any, str]] = []
    always: list[Metric] = ["ttft", "tbt"]
    for metric in dict.fromkeys(always + [limit.metric for limit in plan.slo.limits]):
        limits = [limit for limit in plan.slo.limits if limit.metric == metric]
        curve = distribution(simulation, metric, [limit.limit_s for limit in limits])
        name = charts.METRIC_NAMES[metric]
        if len(curve.value_s) < 2:
            continue
        caption = f"Distribution of the {name}"
        if limits:
            shown = " and ".join(f"{limit.name} ≤ {show_s(limit.limit_s)}" for limit in limits)
            caption += f"; the curve passes above the circle where {shown} is kept"
        if curve.every > 1:
            caption += f" (one run of engine steps in {curve.every})"
        found.append((charts.distribution_chart(curve, metric, limits), f"{caption}."))
    busy = charts.busy_chart(plan.fleet, simulation)
    if busy is not None:
        found.append((busy, "How busy the workers of each pool are."))
    found.append((charts.queue_chart(simulation), "Requests in the fleet: in a batch, or waiting for one."))
    return found


def _charts(plan: Plan) -> str:
    return "<div class=charts>" + "".join(
        f'<figure role="img" aria-label="{escape(caption)}">{chart_svg(chart)}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for chart, caption in figures(plan)
    ) + "</div>"  # fmt: skip


def alternatives_chart(plan: Plan) -> tuple[Any, str]:
    """The same as bars, with its caption."""
    certificate = plan.certificate
    bars = [charts.Bar("this plan", certificate.value, is_plan=True)]
    bars += [
        charts.Bar(alternative.label, alternative.objective, at_least=alternative.at_least)
        for alternative in plan.alternatives
        if 0 <= alternative.objective < float("inf") and alternative.fleet != plan.fleet
    ]
    caption = f"{certificate.unit} of the plan (blue) and its alternatives; an open bar is a lower bound."
    return charts.bars_chart(bars, certificate.unit), caption


def _alternatives(plan: Plan) -> str:
    if not plan.alternatives:
        return "<p>No other fleet was compared.</p>"
    chart, caption = alternatives_chart(plan)
    return (
        table(*alternative_rows(plan), numeric=(2, 3))
        + f'<figure class=wide role="img" aria-label="{escape(caption)}">{chart_svg(chart)}'
        + f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _proof(plan: Plan) -> str:
    certificate = plan.certificate
    refuted = table(("Ruled out", "How we know"), [(r.label, r.reason) for r in certificate.refuted])
    return (
        bullets(proof_lines(plan))
        + ("<h3>Neighbours</h3>" + table(*neighbour_rows(plan)) if certificate.neighbours else "")
        + "<h3>Over these fleets</h3>" + _universe(certificate.universe)
        + "<h3>Assuming</h3>" + bullets(certificate.assumptions, "Nothing beyond the simulator's rules.")
        + (f"<details><summary>{counted(len(certificate.refuted), 'kind')} of fleet ruled out</summary>"
           f"{refuted}</details>" if certificate.refuted else "")
    )  # fmt: skip


def _universe(lines: Sequence[str]) -> str:
    if len(lines) <= 8:
        return bullets(lines, "Not stated.")
    return (
        f"<details><summary>{len(lines)} kinds of pool or pair of pools</summary>"
        f"<div class=columns>{bullets(lines)}</div></details>"
    )


def _sources(plan: Plan) -> str:
    rows = []
    for pool in running(plan.fleet):
        latency = pool.type.latency
        guess = latency.mape_frac is None
        error = "no measured error" if latency.mape_frac is None else percent(latency.mape_frac)
        basis = latency.basis
        if guess and "roofline" in basis.lower():
            basis = f"⚠ {basis} (from catalog figures, nothing was profiled)"
        rows.append((pool.name, pool.type.name, basis, error))
    trace = plan.trace
    facts = [
        f"Traffic: {plan.traffic_note}.",
        f"{counted(len(trace), 'request')} over {show_s(trace.duration_s)}, {trace.rate_rps:.3g} requests/s; "
        f"prompts of {trace.input_tokens.mean():,.0f} tokens and answers of "
        f"{trace.output_tokens.mean():,.0f} on average, {plan.max_model_len:,} tokens the longest request.",
        *(f"{note}." if note[-1:] not in ".!?" else note for note in trace.notes),
        *(f"Left out: {counted(rows, 'row')}, {reason}." for reason, rows in trace.dropped.items() if rows),
        f"Prices: {plan.prices_note}. A month is {HOURS_PER_MONTH} hours.",
        f"Engine: vLLM {VLLM_VERSION}.",
        _power(plan),
    ]
    head = ("Pool", "Worker type", "Step times from", "Held-out error")
    return table(head, rows) + bullets(facts)


def _power(plan: Plan) -> str:
    provisioned = f"Power: {plan.fleet.power_w / 1e3:,.1f} kW provisioned is the GPUs' limit"
    power = plan.power
    if power is None:
        return f"{provisioned}, not what they draw."
    energy = ""
    if power.requests:
        request, tokens = (f"{joules:,.0f} J" for joules in (power.request_j, power.thousand_tokens_j))
        energy = f", {request} per request and {tokens} per 1000 output tokens"
    drawn = f"{power.mean_w / 1e3:,.1f} kW in the measured window{energy}"
    return (
        f"{provisioned}; they are expected to draw {drawn}, "
        f"of which {percent(power.idle_w / power.mean_w)} at rest. This is {power.basis}: see "
        "docs/power-and-lengths.md for its error. Hosts, network and cooling come on top."
    )
