"""report.html: one page that answers, then shows why. Self-contained, light and dark, fit to print."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from planner.reports import answer_sentences, figures, rows, screen, screen_page, words
from planner.reports.fact_sentences import percent, sentence, sentences
from planner.reports.page import bullets, chart, charts, page, section, table
from planner.reports.words import counted
from planner.search.evidence.plan import Plan

CHECK = "plan simulate --fleet plan.yaml --trace requests.csv --window whole"


def render(plan: Plan, *, command: str = "") -> str:
    """The whole page; `command` is what made the plan, to be repeated."""
    body = "\n".join(
        [
            f"<header><p class=eyebrow>{escape(_stamp(plan))}</p>",
            screen_page.fragment(plan),
            "</header>",
            *([section("Mind", bullets(_warnings(plan)))] if plan.warnings else []),
            section("Why not cheaper", _alternatives(plan)),
            section("Deployment", _fleet(plan)),
            *([section("What prompts share", _prefixes(plan))] if plan.prefixes else []),
            section("What it costs and draws", _costs(plan)),
            section("Sources and assumptions", _sources(plan)),
            section("Do it again", _again(command)),
            section("Appendix: how it runs, and the proof", _appendix(plan)),
        ]
    )
    return page(
        f"Fleet plan for {plan.fleet.llm.name}",
        body,
        f"Written by fleetplan from a simulation of {counted(len(plan.trace), 'request')}, seed "
        f"{plan.certificate.seed}. plan.yaml runs it again; certificate.json holds what speaks for it; "
        "manifests/ deploys it.",
    )


def _stamp(plan: Plan) -> str:
    """What this page is of, when it was made and by which version."""
    by = f"planned on {plan.made.date} by fleetplan {plan.made.version}" if plan.made else ""
    parts = ("Fleet plan", plan.fleet.llm.name, by, f"seed {plan.certificate.seed}")
    return " · ".join(part for part in parts if part)


def _warnings(plan: Plan) -> list[str]:
    return [f"{text[0].upper()}{text[1:]}." for text in sentences(plan.warnings)]


def _appendix(plan: Plan) -> str:
    parts = (
        ("The SLO, and what the simulation says", _slo(plan)),
        *((("The three answers", _answers(plan)),) if plan.certificate.answers else ()),
        ("What binds", bullets(sentences(plan.certificate.binding), "No single limit binds.")),
        ("How it runs", _running(plan)),
        ("What was found, and what bounds it", _proof(plan)),
    )
    return "".join(f"<h3>{escape(title)}</h3>{body}" for title, body in parts)


def _answers(plan: Plan) -> str:
    values = table(
        *answer_sentences.answer_rows(plan), caption="On paper, in production, with a loss", numeric=(2,)
    )
    return values + "".join(
        f"<p class=note>{escape(line)}</p>" for line in answer_sentences.futures_lines(plan)
    )


def _fleet(plan: Plan) -> str:
    fleet = table(*rows.fleet_rows(plan.fleet), caption="Pools of the fleet", numeric=(2, *range(4, 10)))
    text = f"{fleet}<p class=note>{escape(words.policies_line(plan.fleet))}</p>"
    placement = plan.placement
    if placement is None:
        return text
    count = len(placement.nodes)
    fewest = "no placement needs fewer" if count == placement.bound else f"at least {placement.bound}"
    note = f"On {counted(count, 'node')} ({fewest})."
    if placement.cross_frac is not None:
        note += f" {percent(placement.cross_frac)} of the KV blocks go from one node to another."
    nodes = table(*rows.node_rows(plan), caption="Workers on nodes", numeric=(1, 3))
    return f"{text}<div class=below>{nodes}</div><p class=note>{escape(note)}</p>"


def _costs(plan: Plan) -> str:
    costs = table(*rows.cost_rows(plan), caption="Cost and power", numeric=(1,))
    if not plan.certificate.commitments:
        return costs
    terms = table(*words.commitment_rows(plan), caption="The same fleet by other terms", numeric=(1, 2))
    return f"{costs}<div class=below>{terms}</div>"


def _slo(plan: Plan) -> str:
    kept = table(*rows.slo_rows(plan), caption="Limits and what was simulated", numeric=range(2, 6))
    measured = f"{kept}<p class=note>{escape(words.measured_line(plan))}</p>"
    if plan.certificate.routers:
        routers = table(*rows.router_rows(plan), caption="Under the routers of deployment targets")
        measured += f"<div class=below>{routers}</div>"
    if not plan.certificate.repeats:
        return measured
    return f"{measured}<div class=below>{table(*rows.repeat_rows(plan), caption='Other draws')}</div>"


def _running(plan: Plan) -> str:
    usage = table(*rows.usage_rows(plan), caption="Use of each pool", numeric=range(1, 10))
    percentiles = table(*rows.percentile_rows(plan), caption="Simulated latencies", numeric=range(1, 5))
    tables = "".join(f"<div class=below>{one}</div>" for one in (usage, percentiles))
    return charts(figures.beside(plan)) + tables


def _prefixes(plan: Plan) -> str:
    kept = table(*rows.prefix_rows(plan), caption="Prefixes kept by each pool", numeric=range(1, 7))
    return f"{kept}<p class=note>Each prefix with its workers is in plan.yaml, under prefixes.</p>"


def _alternatives(plan: Plan) -> str:
    text = bullets([f"{line[0].upper()}{line[1:]}." for line in screen.why(plan)])
    if not plan.alternatives:
        return f"{text}<p>No other fleet was compared.</p>"
    drawn = "".join(chart(figure, wide=True) for figure in figures.alternatives(plan))
    compared = table(*rows.alternative_rows(plan), caption="Alternatives", numeric=(2, 3))
    return f"{text}<div class=below>{compared}</div>{drawn}"


def _proof(plan: Plan) -> str:
    certificate = plan.certificate
    neighbours = table(*rows.neighbour_rows(plan), caption="Fleets with one worker fewer")
    ruled_out = [(refuted.label, sentence(refuted.because)) for refuted in certificate.refuted]
    refuted = table(("Ruled out", "How we know"), ruled_out, caption="Fleets ruled out")
    return (
        bullets(words.proof_lines(plan))
        + (f"<h4>Neighbours</h4>{neighbours}" if certificate.neighbours else "")
        + f"<h4>Over these fleets</h4>{_universe(certificate.universe)}"
        + (_folded(f"{counted(len(ruled_out), 'kind')} of fleet ruled out", refuted) if ruled_out else "")
    )


def _universe(lines: Sequence[str]) -> str:
    if len(lines) <= 8:
        return bullets(lines, "Not stated.")
    listed = f"<div class=columns>{bullets(lines)}</div>"
    return _folded(f"{len(lines)} kinds of pool or pair of pools", listed)


def _folded(summary: str, body: str) -> str:
    """What opens on demand, and is not printed."""
    return f"<details><summary>{escape(summary)}, as in certificate.json</summary>{body}</details>"


def _sources(plan: Plan) -> str:
    trace = plan.trace
    notes = [
        *(f"{note}." if note[-1:] not in ".!?" else note for note in trace.notes),
        *(f"Left out: {counted(left, 'row')}, {reason}." for reason, left in trace.dropped.items() if left),
    ]
    assumed = bullets(sentences(plan.certificate.assumptions), "Nothing beyond the simulator's rules.")
    return (
        table(*rows.source_rows(plan), caption="How every figure was obtained")
        + (f"<div class=below>{bullets(notes)}</div>" if notes else "")
        + f"<h3>What is taken for granted</h3>{assumed}"
    )


def _again(command: str) -> str:
    made = (
        f"<p>The plan, from its question and its trace:</p><pre><code>{escape(command)}</code></pre>"
        if command
        else ""
    )
    return (
        f"{made}<p>Its simulation, in the folder of this report; add <code>--slo FILE</code> to judge it:</p>"
        f"<pre><code>{CHECK}</code></pre>"
    )
