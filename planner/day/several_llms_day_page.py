"""Renders a day of several LLMs: day.html and day.json of all LLMs, and for each LLM a folder of tables and
manifests. planner/day/day_page.py renders the days of single LLMs.
"""

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from planner.day import day_causes, day_page
from planner.day.day_manifests import controller_manifests
from planner.day.several_llms_day import JointAnswer, JointDay
from planner.reports import charts
from planner.reports.drawing import CaptionedChart
from planner.reports.page import (
    charts_html,
    figures_html,
    inline_html,
    list_html,
    page_html,
    section_html,
    table_html,
)
from planner.reports.words import Rows, describe_fleet, usd_text
from planner.solvers.master import paid_usd_per_h
from planner.units import count_text


def render_days(answer: JointAnswer) -> dict[str, str]:
    """The files that `plan day -o DIR` writes: path relative to DIR -> content."""
    answer_json = json.dumps(to_json(answer), indent=2, allow_nan=False) + "\n"
    files = {"day.html": _html_page(answer), "day.json": answer_json}
    for name, llm_answer in answer.by_llm.items():
        of_llm = {
            path: text for path, text in day_page.render_day(llm_answer).items() if path.endswith(".csv")
        }
        if not llm_answer.question.sleep_level:  # Manifests start pods; none let engines sleep.
            of_llm |= controller_manifests(llm_answer)
        files |= {f"{name}/{path}": text for path, text in of_llm.items()}
    return files


def joint_recommendation(answer: JointAnswer) -> str:
    """Which controller to use for all LLMs, what it costs, and how far this is above the optimum."""
    best, regret = answer.winner, answer.regret_usd(answer.winner)
    windows = "keeps every window" if best.keeps else f"misses {_missed_text(best)}"
    above = day_page.above_text(regret, None if answer.optimum is None else answer.optimum.day.usd)
    return (
        f"{best.name} {windows} of {count_text(len(answer.by_llm), 'LLM')} and costs "
        f"{usd_text(best.usd)}{above}."
    )


def proof_lines(answer: JointAnswer) -> list[str]:
    """Sentences on the optimum of all LLMs, and on the bound on its cost."""
    optimum = answer.optimum
    if optimum is None:
        return [f"No optimum: {answer.no_optimum}."]
    return [
        f"Optimum of all LLMs, the cheapest that keeps every window, for who knows the traffic before: "
        f"{usd_text(optimum.day.usd)}; {optimum.status}.",
        f"Proved: nothing that keeps every window costs less than {usd_text(optimum.proved_usd)}.",
    ]


def standing_line(answer: JointAnswer) -> str:
    """A sentence on the static fleets: their price per hour, as in a plan, and where they come from."""
    question_of = {name: llm_answer.question for name, llm_answer in answer.by_llm.items()}
    pools = [pool for question in question_of.values() for pool in question.fleet.pools]
    usd_per_h = paid_usd_per_h((pool.type, pool.count) for pool in pools)
    fleets = "; ".join(f"{name}: {describe_fleet(question.fleet)}" for name, question in question_of.items())
    fleet_note = next(iter(question_of.values())).fleet_note  # All LLMs have the same note.
    note = f"; {fleet_note}" if fleet_note else ""
    return f"All workers all day (static): {fleets}; {usd_text(usd_per_h)} per hour in all{note}."


# The page has this sentence where GPUs are paid all day.
PAID_ALL_DAY = (
    "GPUs (or whole nodes) are paid all day: as many as are in use at once at most, waking ones too"
)


def shared_lines(answer: JointAnswer) -> list[str]:
    """Sentences on what all LLMs share, where they apply: that GPUs are paid all day, how many windows the
    controllers miss on the optimum's GPUs, and what sleeping takes.
    """
    question = next(iter(answer.by_llm.values())).question  # All LLMs have the same terms.
    lines = [PAID_ALL_DAY] if question.is_paid_all_day else []
    if answer.on_least_gpus and answer.optimum is not None:
        missed = ", ".join(f"{row.name} {row.missed_windows}" for row in answer.on_least_gpus)
        lines.append(
            f"windows missed with no more than the {gpus_text(answer.optimum.day.paid_gpus)} that the "
            f"optimum pays, of {answer.optimum.day.windows}: {missed}"
        )
    return [*lines, *question.sleep_notes]


def gpus_text(counts: Mapping[str, int]) -> str:
    """GPUs by name as text, such as "14 a100-80g + 6 h100-80g"."""
    return " + ".join(f"{count} {gpu}" for gpu, count in counts.items())


def joint_table(answer: JointAnswer) -> Rows:
    """A row for the optimum, then one for every controller, by missed windows and then by cost.

    Columns: the totals over all LLMs, then for each LLM its cost on nodes of its own, and its missed windows.
    """
    names = list(answer.by_llm)
    head = (
        "Controller",
        "USD",
        "GPUs at most",
        "Windows kept",
        "Above the optimum",
        *(f"{name} alone: USD, missed" for name in names),
    )
    by_missed = sorted(answer.rows, key=lambda row: (row.missed_windows, row.usd))
    days = [*([answer.optimum.day] if answer.optimum else []), *by_missed]
    table_rows = []
    for row in days:
        regret = answer.regret_usd(row)
        above = "-"
        if regret is not None and answer.optimum is not None:
            percent = day_page.signed_percent_text(regret, answer.optimum.day.usd)
            above = f"{day_causes.change_text(regret)} USD ({percent})"
        by_llm = [f"{llm_day.usd:,.2f}, {llm_day.missed_windows}" for llm_day in row.llm_days]
        table_rows.append(
            (
                row.name,
                f"{row.usd:,.2f}",
                gpus_text(row.most_gpus),
                f"{row.windows - row.missed_windows} of {row.windows}",
                above,
                *by_llm,
            )
        )
    return head, table_rows


def _missed_text(row: JointDay) -> str:
    """How many windows a day misses, such as "2 windows of 144"."""
    return f"{count_text(row.missed_windows, 'window')} of {row.windows}"


def to_json(answer: JointAnswer) -> dict[str, Any]:
    """What `plan day --json` prints for several LLMs; `llms` has the object of each LLM."""
    optimum, llms = answer.optimum, answer.by_llm
    return {
        "winner": answer.winner.name,
        "stock": dict(answer.stock),
        "controllers": [
            {
                "name": row.name,
                "usd": row.usd,
                "most_gpus": dict(row.most_gpus),
                "windows": row.windows,
                "missed": row.missed_windows,
                "regret_usd": answer.regret_usd(row),
                "usd_by_llm": {llm: day.usd for llm, day in zip(llms, row.llm_days, strict=True)},
                "missed_by_llm": {
                    llm: day.missed_windows for llm, day in zip(llms, row.llm_days, strict=True)
                },
            }
            for row in answer.rows
        ],
        "optimum": None
        if optimum is None
        else {
            "usd": optimum.day.usd,
            "most_gpus": dict(optimum.day.most_gpus),
            "status": optimum.status,
            "bound_if_more_never_hurt_usd": optimum.bound_usd,
            "proved_usd": optimum.proved_usd,
        },
        "missed_on_least_gpus": {row.name: row.missed_windows for row in answer.on_least_gpus},
        "llms": {name: day_page.to_json(llm_answer) for name, llm_answer in answer.by_llm.items()},
        "left_out": [{"controller": name, "why": why} for name, why in answer.left_out],
        "warnings": list(answer.warnings),
    }


def _html_page(answer: JointAnswer) -> str:
    best, static = answer.winner, answer.static
    cells = [
        (best.name, usd_text(best.usd), f"{_missed_text(best)} missed"),
        ("Standing all day", usd_text(static.usd), f"{_missed_text(static)} missed"),
    ]
    if answer.optimum is not None:
        cells.append(("Optimum", usd_text(answer.optimum.day.usd), "knowing the traffic: no controllers can"))
    head, table_rows = joint_table(answer)
    bars = [charts.Bar(row.name, row.usd, is_plan=row is best) for row in answer.rows]
    if answer.optimum is not None:
        bars.insert(0, charts.Bar("optimum", answer.optimum.day.usd))
        bars.insert(0, charts.Bar("proved bound", answer.optimum.proved_usd, at_least=True))
    costs = [
        CaptionedChart("costs", charts.bars_chart(bars, "USD"), "What all of the traffic costs under each.")
    ]
    shared = [
        f"no more than {count} GPUs of {gpu} for all LLMs together, at any moment"
        for gpu, count in answer.stock.items()
    ]
    sections = [
        f"<header><p class=eyebrow>A day of {escape(', '.join(answer.by_llm))}</p>",
        f"<h1>{inline_html(joint_recommendation(answer))}</h1>",
        f"<p class=lead>{inline_html(' '.join(proof_lines(answer)))}</p></header>",
        list_html(answer.warnings) if answer.warnings else "",
        figures_html(cells),
        section_html("Controllers", table_html(head, table_rows, caption="Controllers", numeric=(1,))),
        section_html("Costs", charts_html(costs)),
    ]
    for name, llm_answer in answer.by_llm.items():
        # All charts share one page, so the names of figures contain their LLM.
        figures = [
            CaptionedChart(f"{name}-{figure.name}", figure.chart, f"{name}: {figure.caption}")
            for figure in day_page.draw_day(llm_answer)
        ]
        sections += [
            section_html(f"{name} over the day", charts_html(figures)),
            section_html(
                f"Windows of {name} that {best.name} misses",
                list_html(day_page.missed_lines(llm_answer.winner), "None."),
            ),
            section_html(f"Settings of {name}", list_html(day_page.settings_lines(llm_answer))),
            section_html(f"What {name} rests on", list_html(day_page.basis_lines(llm_answer))),
        ]
    shared = shared or ["no GPU is short: the stock has no limit"]
    shared += shared_lines(answer)
    sections.append(
        section_html("What they share", list_html([*shared, standing_line(answer).removesuffix(".")]))
    )
    return page_html(
        "A day of several LLMs", "\n".join(sections), "Written by fleetplan. day.json holds the same."
    )
