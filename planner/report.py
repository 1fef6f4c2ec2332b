"""report.html: one page that answers, then shows why. Self-contained, light and dark, fit to print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from planner import charts
from planner.domain import SPOT, Fleet, Limit, Metric, Pool
from planner.manifests.engine import VLLM_VERSION, is_capped, running
from planner.plan import Alternative, Plan
from planner.simulator.metrics import Line, measured
from planner.simulator.replay import spared
from planner.units import percentile_name, show_s

Floats = npt.NDArray[np.float64]
Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""A table of text: its head and its lines."""

HOURS_PER_MONTH = 730
PERCENTILES = (0.5, 0.9, 0.99)
WHAT = {
    "ttft": "of requests get their first token within",
    "tbt": "of the gaps between tokens are at most",
    "tpot": "of requests have a mean gap between tokens of at most",
    "e2e": "of requests are complete within",
}


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
            _section("Fleet", _fleet_table(plan.fleet) + _nodes(plan)),
            _section("What was promised, and what the simulation says", _slo_table(plan)),
            _section("How it runs", _charts(plan)),
            _section("What else it could be", _alternatives(plan)),
            _section("What binds", _bullets(plan.certificate.binding, "No single limit binds.")),
            _section("What was proved, and over what", _proof(plan)),
            _section("Where the figures come from", _sources(plan)),
        ]
    )
    return page(
        title,
        body,
        f"Written by fleetplan from a simulation of {_count(len(plan.trace), 'request')}, seed "
        f"{plan.certificate.seed}. plan.yaml runs it again; certificate.json holds what was proved; "
        "manifests/ deploys it.",
    )


def page(title: str, body: str, footer: str) -> str:
    """A self-contained HTML page in the report's style; `body` is HTML, the others are text."""
    return (
        f'<!doctype html>\n<html lang=en>\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n"
        f"<footer>{escape(footer)}</footer>\n</main>\n</body>\n</html>\n"
    )


def answer(plan: Plan) -> str:
    """The plan in one sentence."""
    fleet = plan.fleet
    month = fleet.price_usd_per_h * HOURS_PER_MONTH
    carried = f"{plan.throughput.rate_rps:g} requests/s on " if plan.throughput else ""
    price = f"{_usd(fleet.price_usd_per_h)} per hour, about {month:,.0f} USD per month"
    return f"{carried}{describe(fleet)}: {price}."


def describe(fleet: Fleet) -> str:
    """For instance '4 prefill workers of 2 × h100-80g and 3 decode workers of 8 × a100-80g'."""
    return _and([_describe_pool(pool) for pool in running(fleet)])


def promise(plan: Plan) -> str:
    """Whether the simulated fleet keeps the SLO, in a sentence."""
    limits = _and([_limit(limit) for limit in plan.slo.limits])
    if plan.slo.attainment_frac is not None:
        limits += f", and {_percent(plan.slo.attainment_frac)} of requests keep all of that at once"
    if plan.verdict.holds:
        return f"In the simulation of {plan.traffic_note}, it keeps the promise: {limits}."
    return f"In the simulation of {plan.traffic_note}, it does NOT keep the promise: {limits}."


def spread(values_s: Floats, weights: Floats | None = None) -> dict[str, float]:
    """Mean and nearest-rank percentiles of values, each seen `weights` times.

    NaN (it never happened) and infinity count as longer than anything, and are left out of the mean.
    """
    values_s = np.nan_to_num(values_s, nan=np.inf)
    order = np.argsort(values_s)
    values_s = values_s[order]
    seen = np.ones(len(values_s)) if weights is None else weights[order]
    total = np.cumsum(seen)
    happened = int(np.searchsorted(values_s, np.inf))
    mean = float(values_s[:happened] @ seen[:happened] / total[happened - 1]) if happened else float("nan")
    found = {"mean": mean}
    for percentile_frac in PERCENTILES:
        name = percentile_name(percentile_frac)
        if not len(total):
            found[name] = float("nan")
            continue
        rank = total[-1] - spared(percentile_frac, int(total[-1]))
        found[name] = float(values_s[int(np.searchsorted(total, max(rank, 1)))])
    return found


def _describe_pool(pool: Pool) -> str:
    role = "" if pool.role == "mixed" else f"{pool.role} "
    return f"{_count(pool.count, f'{role}worker')} of {pool.type.gpus} × {pool.type.gpu.name}"


def _limit(limit: Limit) -> str:
    return f"{_percent(limit.percentile_frac)} {WHAT[limit.metric]} {show_s(limit.limit_s)}"


def headline(plan: Plan) -> list[tuple[str, str, str]]:
    """The figures one asks for first: name, value, note."""
    fleet, certificate, power = plan.fleet, plan.certificate, plan.power
    if certificate.level0_exact and certificate.beyond_exact:
        proved, over = "proved cheapest", "over every fleet of the universe"
    elif certificate.level0_exact:
        proved, over = "proved", "best with one worker type per pool"
    else:
        proved, over = "not closed", f"gap to the bound {_percent(certificate.gap_frac)}"
    month_usd = fleet.price_usd_per_h * HOURS_PER_MONTH
    return [
        ("Cost", _usd(fleet.price_usd_per_h) + "/h",
         f"{month_usd:,.0f} USD per month, {plan.usd_per_million_tokens:.3g} per million tokens"),
        ("GPUs", str(fleet.gpus), _count(fleet.workers, "worker")),
        ("Power", f"{fleet.power_w / 1e3:,.1f} kW",
         "provisioned, GPUs only" + (f"; {power.mean_w / 1e3:,.1f} kW expected" if power else "")),
        ("Promise", "kept" if plan.verdict.holds else "missed",
         f"{_percent(plan.verdict.attainment_frac)} of requests keep all limits"),
        ("Certificate", proved, over),
    ]  # fmt: skip


def _figures(plan: Plan) -> str:
    return "<dl class=figures>" + "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class=note>{escape(note)}</dd></div>"
        for name, value, note in headline(plan)
    ) + "</dl>"  # fmt: skip


def fleet_rows(fleet: Fleet) -> Rows:
    """A line per pool."""
    rows: list[tuple[str, ...]] = [
        (
            pool.name, pool.role, str(pool.count), f"{pool.type.gpus} × {pool.type.gpu.name}",
            f"{pool.count * pool.type.gpus}", f"{pool.type.max_num_batched_tokens:,}",
            f"{pool.type.max_num_seqs:,}", f"{pool.type.kv_tokens:,}",
            f"{pool.count * pool.type.power_w / 1e3:,.1f}", f"{pool.count * pool.type.price_usd_per_h:,.2f}",
        )
        for pool in running(fleet)
    ]  # fmt: skip
    head = (
        "Pool",
        "Role",
        "Workers",
        "Each",
        "GPUs",
        "Tokens per step",
        "Sequences",
        "KV tokens",
        "kW",
        "USD/h",
    )
    return head, rows


def _fleet_table(fleet: Fleet) -> str:
    return table(*fleet_rows(fleet), numeric=range(2, 10), skip=(3,)) + (
        f"<p class=note>{escape(policies_line(fleet))}</p>"
    )


def policies_line(fleet: Fleet) -> str:
    """How the fleet batches and routes, and what its power caps mean."""
    policies, network = fleet.policies, fleet.network
    text = f"Batching {policies.batching}; requests are routed by {policies.routing}"
    if any(pool.role == "prefill" for pool in running(fleet)):
        text += (
            f", hand-offs to decode workers by {policies.decode_routing}; KV blocks move at "
            f"{network.bandwidth_bytes_per_s / 1e9:g} GB/s, {network.transfer}"
        )
    capped = {pool.type.gpu.name: pool.type.gpu for pool in running(fleet) if is_capped(pool.type.gpu)}
    return f"{text}." + "".join(
        f" {name} means nvidia-smi -pl {gpu.power_w:g} on its nodes." for name, gpu in capped.items()
    )


def slo_rows(plan: Plan) -> Rows:
    """A line per promise: what was asked, what the simulation says, the verdict."""
    rows: list[tuple[str, ...]] = [
        (
            _limit(line.limit), line.limit.name, show_s(line.limit.limit_s), _value(line),
            _percent(line.kept_frac), _verdict_word(line.holds),
        )
        for line in plan.verdict.lines
    ]  # fmt: skip
    verdict = plan.verdict
    if plan.slo.attainment_frac is not None:
        needed, found = _percent(plan.slo.attainment_frac), _percent(verdict.attainment_frac)
        rows.append(
            (f"{needed} of requests keep all limits at once", "attainment", needed, found, found,
             _verdict_word(verdict.attainment_holds))
        )  # fmt: skip
    return ("Promise", "Name", "Limit", "Simulated", "Kept by", "Verdict"), rows


def node_rows(plan: Plan) -> Rows:
    """Nodes that hold the same, and what each of them holds."""
    alike: dict[tuple[str, str], int] = {}
    idle: dict[tuple[str, str], int] = {}
    gpus_per_node = {pool.type.gpu.base: int(pool.type.gpu.gpus_per_node) for pool in plan.fleet.pools}
    for node in plan.placement.nodes if plan.placement else ():
        held: dict[str, int] = {}
        for part in node.parts:
            whole = "" if part.last - part.first + 1 == part.pp else f", stages {part.first} to {part.last}"
            held[part.pool + whole] = held.get(part.pool + whole, 0) + 1
        key = (node.kind, ", ".join(f"{count} × {name}" for name, count in held.items()))
        alike[key] = alike.get(key, 0) + 1
        used = sum(len(part.gpus) for part in node.parts)
        idle[key] = gpus_per_node[node.kind.removesuffix(SPOT)] - used
    rows: list[tuple[str, ...]] = [
        (f"{count}", kind, held, f"{idle[kind, held]}") for (kind, held), count in alike.items()
    ]
    return ("Nodes", "Of", "Workers on each", "GPUs idle on each"), rows


def _nodes(plan: Plan) -> str:
    if plan.placement is None:
        return ""
    placement = plan.placement
    count = len(placement.nodes)
    fewest = "no placement needs fewer" if count == placement.bound else f"at least {placement.bound}"
    note = f"On {_count(count, 'node')} ({fewest})."
    if placement.cross_frac is not None:
        note += f" {_percent(placement.cross_frac)} of the KV blocks go from one node to another."
    rows = table(*node_rows(plan), numeric=(0, 3))
    return f"<div class=below>{rows}</div><p class=note>{escape(note)}</p>"


def _slo_table(plan: Plan) -> str:
    note = f"<p class=note>{escape(measured_line(plan))}</p>"
    percentiles = table(*percentile_rows(plan), numeric=range(1, 5))
    return table(*slo_rows(plan), numeric=range(2, 5)) + note + f"<div class=below>{percentiles}</div>"


def measured_line(plan: Plan) -> str:
    """Whether the queue grows, who was turned away, and when was measured."""
    verdict = plan.verdict
    steady = (
        "The queue does not grow: the last requests of the run are served as promptly as the first."
        if verdict.is_steady
        else "The queue grows until the end of the run, so the fleet is saturated whatever its percentiles."
    )
    rejected = f" {_count(verdict.rejected, 'request')} did not fit any worker." if verdict.rejected else ""
    start_s, end_s = plan.simulation.window_s
    window = f" Measured from {show_s(start_s)} to {show_s(end_s)} of the trace, after the warm-up."
    return steady + rejected + window


def percentile_rows(plan: Plan) -> Rows:
    """Every metric's spread, whether promised or not."""
    simulation = plan.simulation
    inside = measured(simulation)
    several = inside & (simulation.output_tokens > 1)
    gaps, seen, every = charts.sampled_gaps_s(simulation)
    about = "≈ " if every > 1 else ""
    spreads = (
        ("Queue", "", spread(simulation.queue_s[inside])),
        ("Time to first token", "", spread(simulation.ttft_s[inside])),
        ("Gap between tokens", about, spread(gaps, seen)),
        ("Mean gap of a request", "", spread(simulation.tpot_s[several])),
        ("End-to-end time", "", spread(simulation.e2e_s[inside])),
    )
    head = ("Simulated", "Mean", *(percentile_name(p) for p in PERCENTILES))
    rows = [
        (name, *(f"{mark}{_seconds(seconds)}" for seconds in found.values())) for name, mark, found in spreads
    ]
    return head, rows


def _value(line: Line) -> str:
    return _seconds(line.value_s) if line.value_s == line.value_s else "not recorded"


def _seconds(seconds: float) -> str:
    return "never" if seconds == float("inf") else show_s(seconds)


def _verdict_word(holds: bool) -> str:
    return "✓\u00a0kept" if holds else "✗\u00a0missed"


def figures(plan: Plan) -> list[tuple[Any, str]]:
    """Altair charts of latencies and load, each with its caption."""
    simulation = plan.simulation
    found: list[tuple[Any, str]] = []
    always: list[Metric] = ["ttft", "tbt"]
    for metric in dict.fromkeys(always + [limit.metric for limit in plan.slo.limits]):
        limits = [limit for limit in plan.slo.limits if limit.metric == metric]
        curve = charts.distribution(simulation, metric, [limit.limit_s for limit in limits])
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
        f'<figure role="img" aria-label="{escape(caption)}">{charts.chart_svg(chart)}'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for chart, caption in figures(plan)
    ) + "</div>"  # fmt: skip


def alternative_rows(plan: Plan) -> Rows:
    """The plan and what else it could be."""
    certificate = plan.certificate
    head = ("Alternative", "Fleet", certificate.unit, "Against the plan", "Note")
    rows: list[tuple[str, ...]] = [
        ("This plan", describe(plan.fleet), _amount(certificate.value, certificate.unit), "", "")
    ]
    rows += [
        (
            alternative.label,
            _fleet_of(alternative),
            _objective(alternative, certificate.unit),
            _difference(alternative, certificate.value),
            alternative.note,
        )
        for alternative in plan.alternatives
    ]
    return head, rows


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
        + f'<figure class=wide role="img" aria-label="{escape(caption)}">{charts.chart_svg(chart)}'
        + f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _fleet_of(alternative: Alternative) -> str:
    if alternative.fleet is not None:
        return describe(alternative.fleet)
    return "none for less" if alternative.at_least else "none"


def _objective(alternative: Alternative, unit: str) -> str:
    if not abs(alternative.objective) < float("inf"):
        return "–"
    return f"{'≥ ' if alternative.at_least else ''}{_amount(alternative.objective, unit)}"


def _difference(alternative: Alternative, value: float) -> str:
    if not abs(alternative.objective) < float("inf") or not value:
        return "–"
    more = alternative.objective / value - 1
    if abs(more) < 5e-4:
        return "no less" if alternative.at_least else "the same"
    return f"{'at least ' if alternative.at_least else ''}{more:+.1%}".replace("%", " %")


def proof_lines(plan: Plan) -> list[str]:
    """What was found, what was proved over what, and by how many simulations."""
    certificate = plan.certificate
    unit = certificate.unit
    value, level0, bound = (
        _amount(v, unit) for v in (certificate.value, certificate.level0, certificate.bound)
    )
    lines = [
        f"Plan: {value} {unit}. Status: {plan.status}.",
        f"Fleets with one worker type per pool: the best is {level0} {unit}, "
        + (
            "exactly: every cheaper one was simulated and fails, or cannot hold by a valid bound."
            if certificate.level0_exact
            else "as far as the search came; it was not exhausted in time."
        ),
        "Fleets of several types per pool: "
        + ("exhausted too, none is better." if certificate.beyond_exact else "searched, not exhausted."),
    ]
    if plan.throughput:
        lines.append(
            f"Most traffic within the limits: {plan.throughput.rate_rps:g} requests/s. At "
            f"{plan.throughput.refuted_rps:g} no fleet with one worker type per pool holds; that more "
            "traffic is never easier to carry is assumed. All else is about the cheapest fleet at this rate."
        )
    if certificate.level0_gap_frac > 0:
        lines.append(
            f"The plan saves {_percent(certificate.level0_gap_frac)} against the best of one type per pool."
        )
    lines += [
        f"No policy whatever serves this traffic for less than {bound} {unit}: a gap of "
        f"{_percent(certificate.gap_frac)} to the plan.",
        f"{_count(certificate.simulations, 'simulation')}, {_count(certificate.cuts, 'cut')}, seed "
        f"{certificate.seed}.",
    ]
    return lines


def neighbour_rows(plan: Plan) -> Rows:
    """Every fleet with one worker fewer, and why it fails."""
    head = ("One worker fewer of", "Type", "Holds", "Why")
    return head, [
        (n.pool, n.worker_type, "still holds" if n.holds else "✗\u00a0fails", n.reason)
        for n in plan.certificate.neighbours
    ]


def _proof(plan: Plan) -> str:
    certificate = plan.certificate
    refuted = table(("Ruled out", "How we know"), [(r.label, r.reason) for r in certificate.refuted])
    return (
        _bullets(proof_lines(plan))
        + ("<h3>Neighbours</h3>" + table(*neighbour_rows(plan)) if certificate.neighbours else "")
        + "<h3>Over these fleets</h3>" + _universe(certificate.universe)
        + "<h3>Assuming</h3>" + _bullets(certificate.assumptions, "Nothing beyond the simulator's rules.")
        + (f"<details><summary>{_count(len(certificate.refuted), 'kind')} of fleet ruled out</summary>"
           f"{refuted}</details>" if certificate.refuted else "")
    )  # fmt: skip


def _universe(lines: Sequence[str]) -> str:
    if len(lines) <= 8:
        return _bullets(lines, "Not stated.")
    return (
        f"<details><summary>{len(lines)} kinds of pool or pair of pools</summary>"
        f"<div class=columns>{_bullets(lines)}</div></details>"
    )


def _sources(plan: Plan) -> str:
    rows = []
    for pool in running(plan.fleet):
        latency = pool.type.latency
        guess = latency.mape_frac is None
        error = "no measured error" if latency.mape_frac is None else _percent(latency.mape_frac)
        basis = latency.basis
        if guess and "roofline" in basis.lower():
            basis = f"⚠ {basis} (from catalog figures, nothing was profiled)"
        rows.append((pool.name, pool.type.name, basis, error))
    trace = plan.trace
    facts = [
        f"Traffic: {plan.traffic_note}.",
        f"{_count(len(trace), 'request')} over {show_s(trace.duration_s)}, {trace.rate_rps:.3g} requests/s; "
        f"prompts of {trace.input_tokens.mean():,.0f} tokens and answers of "
        f"{trace.output_tokens.mean():,.0f} on average, {plan.max_model_len:,} tokens the longest request.",
        *(f"{note}." if note[-1:] not in ".!?" else note for note in trace.notes),
        *(f"Left out: {_count(count, 'row')}, {reason}." for reason, count in trace.dropped.items() if count),
        f"Prices: {plan.prices_note}. A month is {HOURS_PER_MONTH} hours.",
        f"Engine: vLLM {VLLM_VERSION}.",
        _power(plan),
    ]
    head = ("Pool", "Worker type", "Step times from", "Held-out error")
    return table(head, rows) + _bullets(facts)


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
        f"of which {_percent(power.idle_w / power.mean_w)} at rest. This is {power.basis}: see "
        "docs/power-and-lengths.md for its error. Hosts, network and cooling come on top."
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Iterable[int] = (),
    skip: Iterable[int] = (),
) -> str:
    """An HTML table of text; the columns `numeric` without `skip` are set to the right."""
    right = set(numeric) - set(skip)

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if k in right else ''}>{escape(text)}</{tag}>" for k, text in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f"<div class=scroll><table>{top}<tbody>{body}</tbody></table></div>"


def _bullets(lines: Iterable[str], otherwise: str = "") -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else f"<p>{escape(otherwise)}</p>"


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _percent(share: float) -> str:
    """0.9 -> '90 %', 0.9987 -> '99.87 %'; never rounds up to 100 %."""
    if share == share and share < 1 and f"{share * 100:.4g}" == "100":
        return "> 99.99 %"
    return f"{share * 100:.4g} %"


def _usd(dollars: float) -> str:
    return f"{dollars:,.2f} USD"


def _amount(value: float, unit: str) -> str:
    return f"{value:,.2f}" if unit == "USD/h" else f"{value:,.6g}"


_STYLE = """
:root{color-scheme:light dark;--page:#fff;--card:#f6f7f9;--ink:#1c2430;--muted:#5d6876;--soft:#a3adb8;
--grid:#dfe3e8;--blue:#0072b2;--vermillion:#d55e00;--green:#009e73;--purple:#aa4499}
@media (prefers-color-scheme:dark){:root{--page:#12161c;--card:#1a2029;--ink:#e6eaf0;--muted:#98a4b3;
--soft:#66727f;--grid:#323b47;--blue:#56b4e9;--vermillion:#f0883e;--green:#3fc79a;--purple:#e08fd0}}
@media print{:root{--page:#fff;--card:#f6f7f9;--ink:#1c2430;--muted:#5d6876;--soft:#a3adb8;
--grid:#dfe3e8;--blue:#0072b2;
--vermillion:#d55e00;--green:#009e73;--purple:#aa4499}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;-webkit-print-color-adjust:exact;
print-color-adjust:exact}
main{max-width:1000px;margin:0 auto;padding:48px 28px 40px}
.eyebrow{margin:0 0 10px;color:var(--muted);font-size:14px;letter-spacing:.02em}
h1{margin:0 0 14px;font-size:29px;line-height:1.25;font-weight:650;letter-spacing:-.01em;text-wrap:balance}
.lead{margin:0;max-width:70ch;font-size:17px}
h2{margin:44px 0 14px;font-size:19px;font-weight:650}
h3{margin:24px 0 6px;font-size:15px;font-weight:650}
p,ul{max-width:78ch}
ul{margin:0;padding-left:20px}li{margin:5px 0}
.figures{display:flex;flex-wrap:wrap;gap:1px;margin:30px 0 0;
background:var(--grid);border:1px solid var(--grid);border-radius:8px;overflow:hidden}
.figures div{flex:1 1 150px;background:var(--card);padding:14px 16px}
dt{color:var(--muted);font-size:13px}dd{margin:2px 0 0;font-size:21px;font-weight:650;
font-variant-numeric:tabular-nums}
dd.note,.note,figcaption{color:var(--muted);font-size:13.5px;font-weight:400}
.note{margin:10px 0 0}
.below{margin-top:26px}.scroll{overflow-x:auto}
table{width:100%;border-collapse:collapse;font-size:14.5px;line-height:1.4}
th{color:var(--muted);font-weight:500;font-size:13px;text-align:left;vertical-align:bottom}
th,td{padding:8px 14px 8px 0;border-bottom:1px solid var(--grid);vertical-align:top}
th:last-child,td:last-child{padding-right:0}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(430px,100%),1fr));gap:26px 30px}
figure{margin:0;break-inside:avoid}figure svg{display:block;width:100%;height:auto;max-width:620px}
figure.wide{margin-top:22px}figure.wide svg{max-width:860px}
figcaption{margin-top:6px}
.columns{columns:17em auto;font-size:13.5px}details{margin-top:8px}summary{cursor:pointer;color:var(--muted)}
footer{margin-top:52px;padding-top:16px;border-top:1px solid var(--grid);color:var(--muted);font-size:13.5px}
tr,h2,h3{break-inside:avoid}h2,h3{break-after:avoid}
@media print{body{font-size:11pt}main{max-width:none;padding:0}h2{margin-top:26px}
details::details-content{content-visibility:visible;display:block}.scroll{overflow:visible}
.charts{grid-template-columns:1fr 1fr}table{font-size:9pt;break-inside:avoid}details table{break-inside:auto}
.figures div{flex-basis:100px;padding:9px 11px}dd{font-size:13pt}}
@media (max-width:600px){main{padding:28px 18px}h1{font-size:23px}}
"""
