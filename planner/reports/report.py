"""Renders report.html: the first screen with the answer, why the plan is not cheaper, details.

`numeric` are the columns of a table, from 0 on, that are aligned right (page.py).
"""

from collections.abc import Iterable, Sequence
from html import escape

from planner.policies import counts_tenants
from planner.reports import answer_sentences, figures, rows, screen, screen_page, words
from planner.reports.fact_sentences import capitalise_first, fact_sentence, fact_sentences_of
from planner.reports.page import (
    chart_html,
    charts_html,
    folded_section,
    list_html,
    page_html,
    section_html,
    table_html,
)
from planner.reports.prefix_values import keep_alive_text
from planner.search.evidence.plan import Plan
from planner.units import count_text, show_share

LONGEST_OPEN_LIST = 8  # A list with more lines is folded; chosen by hand.


def render_report(plan: Plan, *, command: str = "") -> str:
    """The whole page. The page shows `command`, the command line of the plan, unless it is empty."""
    body = "\n".join(
        [
            f"<header><p class=eyebrow>{escape(_title_line(plan))}</p>",
            screen_page.first_screen_html(plan),
            "</header>",
            *([section_html("Mind", _bullets_of(fact_sentences_of(plan.warnings)))] if plan.warnings else []),
            section_html(screen.why_title(plan), _why_not_cheaper(plan)),
            folded_section("Deployment", _fleet_section(plan)),
            *([folded_section("What prompts share", _prefixes_section(plan))] if plan.prefixes else []),
            folded_section("What it costs and draws", _costs_section(plan)),
            folded_section("Sources and assumptions", _sources_section(plan)),
            folded_section("Do it again", _commands_section(plan, command)),
            folded_section("Appendix: how it runs, and the proof", _appendix_section(plan)),
        ]
    )
    return page_html(
        f"Fleet plan for {plan.fleet.llm.name}",
        body,
        f"Written by fleetplan from a simulation of {count_text(len(plan.trace), 'request')}, seed "
        f"{plan.certificate.seed}. plan.yaml runs it again; certificate.json holds what speaks for it; "
        "manifests/ deploys it.",
    )


def _bullets_of(texts: Iterable[str]) -> str:
    """A list of these texts as whole sentences."""
    return list_html(f"{capitalise_first(text)}." for text in texts)


def _title_line(plan: Plan) -> str:
    """The line above the headline: LLM, date, version and seed."""
    planned_by = f"planned on {plan.made.date} by fleetplan {plan.made.version}" if plan.made else ""
    parts = ("Fleet plan", plan.fleet.llm.name, planned_by, f"seed {plan.certificate.seed}")
    return " · ".join(part for part in parts if part)


def _appendix_section(plan: Plan) -> str:
    """The appendix: all other tables and charts, each with a heading."""
    parts = (
        ("The SLO, and what the simulation says", _slo_section(plan)),
        *([("The three answers", _answers_section(plan))] if plan.certificate.answers else []),
        ("What binds", list_html(words.binding_lines(plan), "No single limit binds.")),
        ("How it runs", _running_section(plan)),
        ("What was found, and what bounds it", _proof_section(plan)),
    )
    return "".join(f"<h3>{escape(title)}</h3>{body}" for title, body in parts)


def _answers_section(plan: Plan) -> str:
    answer_table = table_html(
        *answer_sentences.answer_rows(plan), caption="On paper, in production, with a loss", numeric=(2,)
    )
    return answer_table + "".join(
        f"<p class=note>{escape(line)}</p>" for line in answer_sentences.scenario_lines(plan)
    )


def _fleet_section(plan: Plan) -> str:
    pools = table_html(*rows.fleet_rows(plan.fleet), caption="Pools of the fleet", numeric=(2, *range(4, 10)))
    text = f"{pools}<p class=note>{escape(words.policies_line(plan.fleet))}</p>"
    placement = plan.placement
    if placement is None:
        return text
    node_count = len(placement.nodes)
    fewest = "no placement needs fewer" if node_count == placement.bound else f"at least {placement.bound}"
    note = f"On {count_text(node_count, 'node')} ({fewest})."
    if placement.cross_frac is not None:
        note += f" {show_share(placement.cross_frac)} of the KV blocks go from one node to another."
    nodes = table_html(*rows.node_rows(plan), caption="Workers on nodes", numeric=(1, 3))
    return f"{text}<div class=below>{nodes}</div><p class=note>{escape(note)}</p>"


def _costs_section(plan: Plan) -> str:
    """Cost and power, and the bill of the same fleet by other terms of payment."""
    costs = table_html(*rows.cost_rows(plan), caption="Cost and power", numeric=(1,))
    if not plan.certificate.commitments:
        return costs
    terms = table_html(*words.commitment_rows(plan), caption="The same fleet by other terms", numeric=(1, 2))
    return f"{costs}<div class=below>{terms}</div>"


def _slo_section(plan: Plan) -> str:
    """The limits with the simulated values, also under other routers and on other draws of the traffic."""
    limits = table_html(*rows.slo_rows(plan), caption="Limits and what was simulated", numeric=range(2, 6))
    blocks = f"{limits}<p class=note>{escape(words.measured_line(plan))}</p>"
    if plan.certificate.routers:
        routers = table_html(*rows.router_rows(plan), caption="Under the routers of deployment targets")
        blocks += f"<div class=below>{routers}</div>"
    if not plan.certificate.repeats:
        return blocks
    return f"{blocks}<div class=below>{table_html(*rows.repeat_rows(plan), caption='Other draws')}</div>"


def _running_section(plan: Plan) -> str:
    """How busy the pools are, and the percentiles of all metrics."""
    usage = table_html(*rows.usage_rows(plan), caption="Use of each pool", numeric=range(1, 10))
    percentiles = table_html(*rows.percentile_rows(plan), caption="Simulated latencies", numeric=range(1, 5))
    tables = "".join(f"<div class=below>{block}</div>" for block in (usage, percentiles))
    return charts_html(figures.figures_beyond_first_screen(plan)) + tables


def _prefixes_section(plan: Plan) -> str:
    """The prefixes that each pool keeps, and how the router keeps pinned ones in vLLM's caches."""
    prefix_table = table_html(
        *rows.prefix_rows(plan), caption="Prefixes kept by each pool", numeric=range(1, 7)
    )
    keep_alives = "".join(
        f" {escape(pool.plan.pool.name)}: {escape(keep_alive_text(pool.keep_alive))}."
        for pool in plan.prefixes
        if pool.keep_alive is not None
    )
    note = f"Each prefix with its workers is in plan.yaml, under prefixes.{keep_alives}"
    return f"{prefix_table}<p class=note>{note}</p>"


def _why_not_cheaper(plan: Plan) -> str:
    """Why no cheaper fleet holds, and the alternatives to the plan."""
    reasons = _bullets_of(screen.why_nothing_cheaper(plan))
    if not plan.alternatives:
        return f"{reasons}<p>No other fleet was compared.</p>"
    charts = "".join(chart_html(figure, wide=True) for figure in figures.alternative_figures(plan))
    compared = table_html(*rows.alternative_rows(plan), caption="Alternatives", numeric=(2, 3))
    return f"{reasons}<div class=below>{compared}</div>{charts}"


def _proof_section(plan: Plan) -> str:
    """What was proved, over which fleets, and which kinds of fleet were ruled out (`refuted`)."""
    certificate = plan.certificate
    neighbours = table_html(*rows.neighbour_rows(plan), caption="Fleets with one worker fewer")
    ruled_out = [(each.label, fact_sentence(each.because)) for each in certificate.refuted]
    # Proofs are about the fleet on paper. A plan without the three answers is that fleet.
    of_paper = " of the fleet on paper" if certificate.answers else ""
    ruled_out_table = table_html(("Ruled out", "How we know"), ruled_out, caption="Fleets ruled out")
    return (
        list_html(words.proof_lines(plan))
        + (f"<h4>Neighbours{of_paper}</h4>{neighbours}" if certificate.neighbours else "")
        + f"<h4>Over these fleets</h4>{_fleets_searched(certificate.universe)}"
        + (
            _folded_block(f"{count_text(len(ruled_out), 'kind')} of fleet ruled out", ruled_out_table)
            if ruled_out
            else ""
        )
    )


def _fleets_searched(lines: Sequence[str]) -> str:
    """The list of the fleets that were searched, folded if it is long."""
    if len(lines) <= LONGEST_OPEN_LIST:
        return list_html(lines, "Not stated.")
    listed = f"<div class=columns>{list_html(lines)}</div>"
    return _folded_block(f"{len(lines)} kinds of pool or pair of pools", listed)


def _folded_block(summary: str, body: str) -> str:
    """A block that opens on a click. A printed page shows only the summary, which names certificate.json."""
    return f"<details><summary>{escape(summary)}, as in certificate.json</summary>{body}</details>"


def _sources_section(plan: Plan) -> str:
    trace = plan.trace
    notes = [
        *(f"{note}." if note[-1:] not in ".!?" else note for note in trace.notes),
        *(
            f"Left out: {count_text(left_out, 'row')}, {reason}."
            for reason, left_out in trace.dropped.items()
            if left_out
        ),
    ]
    assumed = list_html(
        fact_sentences_of(plan.certificate.assumptions), "Nothing beyond the simulator's rules."
    )
    return (
        table_html(*rows.source_rows(plan), caption="How every figure was obtained")
        + (f"<div class=below>{list_html(notes)}</div>" if notes else "")
        + f"<h3>What is taken for granted</h3>{assumed}"
    )


def traffic_name(plan: Plan) -> str:
    """The file from which the traffic can be simulated again. requests.csv has no columns for waits, shared
    prefixes and LLMs, so for traffic with these, with adapters, and where tenants count there is also
    traffic.jsonl.
    """
    needs_more_columns = (
        plan.trace.after.size
        or plan.fleet.policies.prefix_cache
        or plan.trace.adapters
        or plan.slo.guarantees
        or counts_tenants(plan.fleet.policies)
        or any(selector.tenants or selector.llms for selector in plan.slo.selectors)
    )
    return "traffic.jsonl" if needs_more_columns else "requests.csv"


def simulate_command(plan: Plan) -> str:
    """The command line that simulates the plan again, in its folder. The file has the plan's rate and window
    already: `--window whole` keeps the traffic section of a slo.yaml from being applied to it once more.
    """
    seed = f" --seed {plan.certificate.seed}" if plan.certificate.seed else ""
    return f"plan simulate --fleet plan.yaml --trace {traffic_name(plan)} --window whole{seed}"


def _commands_section(plan: Plan, command: str) -> str:
    """The commands that make the plan again and simulate it."""
    plan_again = (
        f"<p>The plan, from its question and its trace:</p><pre><code>{escape(command)}</code></pre>"
        if command
        else ""
    )
    return (
        f"{plan_again}<p>Its simulation, in the folder of this report; add <code>--slo FILE</code> to judge "
        f"it:</p><pre><code>{simulate_command(plan)}</code></pre>"
    )
