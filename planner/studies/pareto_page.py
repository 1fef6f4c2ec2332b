"""Writes the frontier of `plan pareto` as a page, a picture, a CSV and JSON."""

import json
import math
from html import escape
from typing import Any

from planner.files.checked_files import csv_text
from planner.reports import charts
from planner.reports.drawing import CaptionedChart, chart_png
from planner.reports.page import chart_html, page_html, section_html, table_html
from planner.reports.words import level0_proof
from planner.studies.pareto_frontier import Frontier, frontier_document
from planner.units import show_s

NAMES = ("pareto.html", "pareto.csv", "pareto.json", "pareto.png")
# A corner is where a fleet stops holding (pareto_frontier.py). If the first plan had no limit, the chart ends
# at this many times the first corner; chosen by hand.
BEYOND_FIRST = 1.05


def render_frontier(frontier: Frontier) -> dict[str, str | bytes]:
    """The four files of NAMES: file name -> content."""
    document = frontier_document(frontier)
    rows = [_csv_row(stair) for stair in document["steps"]]
    # A stair without one of the answers has fewer columns, so the header is the union over all rows.
    columns = list(dict.fromkeys(key for row in rows for key in row))
    caption = f"{frontier.objective} over {frontier.axis}: a dot where each fleet stops holding"
    question_note = "" if frontier.question_limit is None else "; the circle is the limit of slo.yaml"
    figure = CaptionedChart("pareto", draw_frontier(frontier), f"{caption}{question_note}.")
    return {
        "pareto.html": _html(frontier, figure),
        "pareto.csv": csv_text(columns, ([row.get(name, "") for name in columns] for row in rows)),
        "pareto.json": json.dumps(document, indent=2) + "\n",
        "pareto.png": chart_png(figure),
    }


def _html(frontier: Frontier, figure: CaptionedChart) -> str:
    stairs = frontier_table(frontier)
    values = [stair.value for stair in frontier.stairs]
    title = f"What {frontier.axis} costs: {min(values):.6g} to {max(values):.6g} {frontier.objective_unit}"
    cells = [list(stair.values()) for stair in stairs]
    body = (
        f"<header><p class=eyebrow>Frontier of {len(stairs)} fleets</p><h1>{escape(title)}</h1>"
        f"<p class=lead>{escape(question_line(frontier))}.</p></header>"
        + chart_html(figure, wide=True)
        + section_html("Fleet by fleet", table_html(list(stairs[0]), cells, caption="Frontier", numeric=(1,)))
        + f"<p class=note>The staircase ends: {escape(frontier.ended)}.</p>"
    )
    return page_html(
        title, body, "Written by fleetplan. pareto.csv and pareto.json hold the same in plain units."
    )


def draw_frontier(frontier: Frontier) -> Any:
    """The frontier as an Altair chart, with a circle at the question's limit."""
    question_stair = None if frontier.question_limit is None else frontier.best_at(frontier.question_limit)
    return charts.staircase_chart(
        [stair.corner for stair in frontier.stairs],
        [stair.value for stair in frontier.stairs],
        [f"{stair.fleet.gpus} GPUs" for stair in frontier.stairs],
        (f"{frontier.axis} [{frontier.unit}]", f"{frontier.objective} [{frontier.objective_unit}]"),
        starts=_level_starts(frontier),
        requested=None
        if question_stair is None or frontier.question_limit is None
        else (frontier.question_limit, question_stair.value),
    )


def _level_starts(frontier: Frontier) -> list[float]:
    """Where the level line of each stair begins. On the axis of rates that is where its fleet begins to hold.
    On any other axis it is the corner of the stair before, where that stair's cheaper fleet stops holding.
    """
    if frontier.is_rising:
        return [stair.start for stair in frontier.stairs]
    first_corner = frontier.stairs[0].corner
    loosest = frontier.loosest if math.isfinite(frontier.loosest) else BEYOND_FIRST * first_corner
    return [loosest, *(stair.corner for stair in frontier.stairs[:-1])]


def _limit_text(frontier: Frontier, limit: float) -> str:
    """A limit on the axis of the frontier, with its unit, for instance "200 ms"."""
    return show_s(limit) if frontier.unit == "s" else f"{limit:.6g} {frontier.unit}"


def question_line(frontier: Frontier) -> str:
    """The limit at which the frontier begins, and the question's limit."""
    start = (
        f"from {_limit_text(frontier, frontier.loosest)}"
        if math.isfinite(frontier.loosest)
        else "from no limit"
    )
    line = (
        start
        if frontier.question_limit is None
        else f"{start}; the limit of slo.yaml is {_limit_text(frontier, frontier.question_limit)}"
    )
    note = (
        "; each rate draws other requests, so that between the rates that were planned (the first of each "
        "step, and that of slo.yaml) a plan may cost less than the steps say"
    )
    return line + note if frontier.axis == "rate" else line


def ended_line(frontier: Frontier) -> str:
    """Why there is no further fleet."""
    return f"the staircase ends: {frontier.ended}"


def _csv_row(stair: dict[str, Any]) -> dict[str, Any]:
    """A line of pareto.csv from a stair of pareto.json. Each of the three answers has columns such as
    "on_paper_value".
    """
    row = {key: value for key, value in stair.items() if key != "answers"}
    for answer in stair["answers"]:
        name = answer["name"].replace("-", "_")
        row |= {f"{name}_{key}": answer[key] for key in ("value", "kept", "scenario_count")}
    return row


def _answer_cells(stair: dict[str, Any]) -> dict[str, str]:
    """The cost of the cheapest fleet on paper, and in how many scenarios it and the stair's fleet keep the
    SLO.

    A question without safety has neither answer, and then no such cells.
    """
    answers = {answer["name"]: answer for answer in stair["answers"]}
    if not {"on-paper", "production"} <= answers.keys():
        return {}
    paper, production = answers["on-paper"], answers["production"]
    return {
        "on paper": "-" if paper["value"] is None else f"{paper['value']:.6g}",
        "on paper, kept in": f"{paper['kept']} of {paper['scenario_count']}",
        "kept in scenarios": f"{production['kept']} of {production['scenario_count']}",
    }


def frontier_table(frontier: Frontier, *, with_proof: bool = True) -> list[dict[str, str]]:
    """The rows of the table, one per fleet, with every value as text. For a terminal, which is too narrow,
    the column `with_proof` is left out: the value with one type per pool, and how far it is proved.
    """
    stairs = frontier_document(frontier)["steps"]
    has_asked = any(stair["is_asked"] for stair in stairs)
    ends = {"rate, holds from": "holds_from"} if frontier.is_rising else {}
    ends[f"{frontier.axis}, holds to"] = "holds_to"
    return [
        {
            **{column: _limit_text(frontier, stair[key]) for column, key in ends.items()},
            frontier.objective_unit: f"{stair['value']:.6g}",
            "fleet": stair["fleet"],
            **_answer_cells(stair),
            **({"on paper, one type per pool": _level0_text(stair)} if with_proof else {}),
            **({"at the limit of slo.yaml": "*" if stair["is_asked"] else ""} if has_asked else {}),
        }
        for stair in stairs
    ]


def _level0_text(stair: dict[str, Any]) -> str:
    """The objective of level 0's answer at a stair, and how far it is proved."""
    proof = level0_proof(is_exact=stair["level0_exact"], is_exhausted=stair["level0_exhausted"])
    return f"{stair['level0']:.6g}, {proof}"
