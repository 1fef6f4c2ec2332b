"""The frontier of `pareto` as a page, a picture, a CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from html import escape
from typing import Any

from planner.reports import charts
from planner.reports.drawing import Figure, chart_png
from planner.reports.page import chart, page, section, table
from planner.reports.words import level0_proof
from planner.studies.pareto import Frontier, document
from planner.units import show_s

NAMES = ("pareto.html", "pareto.csv", "pareto.json", "pareto.png")


def render(found: Frontier) -> dict[str, str | bytes]:
    """The page, CSV, JSON and the picture, by their names."""
    told, text = document(found), io.StringIO()
    flat = [_flat(step) for step in told["steps"]]
    columns = list(dict.fromkeys(key for line in flat for key in line))  # a step may lack an answer
    lines = csv.DictWriter(text, columns, lineterminator="\n")
    lines.writeheader()
    lines.writerows(flat)
    caption = f"{found.objective} over {found.axis}: a dot where each fleet stops holding"
    asked = "" if found.asked is None else "; the circle is what was asked"
    figure = Figure("pareto", picture(found), f"{caption}{asked}.")
    numbers = json.dumps(told, indent=2) + "\n"
    return dict(zip(NAMES, (_html(found, figure), text.getvalue(), numbers, chart_png(figure)), strict=True))


def _html(found: Frontier, figure: Figure) -> str:
    steps = rows(found)
    values = [step.value for step in found.steps]
    title = f"What {found.axis} costs: {min(values):.6g} to {max(values):.6g} {found.objective_unit}"
    cells = [list(step.values()) for step in steps]
    body = (
        f"<header><p class=eyebrow>Frontier of {len(steps)} fleets</p><h1>{escape(title)}</h1>"
        f"<p class=lead>{escape(asked_line(found))}.</p></header>"
        + chart(figure, wide=True)
        + section("Fleet by fleet", table(list(steps[0]), cells, caption="Frontier", numeric=(1,)))
        + f"<p class=note>The staircase ends: {escape(found.ended)}.</p>"
    )
    return page(title, body, "Written by fleetplan. pareto.csv and pareto.json hold the same in plain units.")


def picture(found: Frontier) -> Any:
    """The frontier as an Altair chart, with the question's own limit on it."""
    asked = None if found.asked is None else found.best_at(found.asked)
    return charts.staircase_chart(
        [step.corner for step in found.steps],
        [step.value for step in found.steps],
        [f"{step.fleet.gpus} GPUs" for step in found.steps],
        (f"{found.axis} [{found.unit}]", f"{found.objective} [{found.objective_unit}]"),
        loosest=found.loosest if math.isfinite(found.loosest) else 1.05 * found.steps[0].corner,
        asked=None if asked is None or found.asked is None else (found.asked, asked.value),
    )


def _shown(found: Frontier, limit: float) -> str:
    return show_s(limit) if found.unit == "s" else f"{limit:.6g} {found.unit}"


def asked_line(found: Frontier) -> str:
    """Where the frontier begins, and what was asked."""
    start = f"from {_shown(found, found.loosest)}" if math.isfinite(found.loosest) else "from no limit"
    said = start if found.asked is None else f"{start}; asked was {_shown(found, found.asked)}"
    anew = "; each rate draws other requests, so that a plan at one rate may cost less than the steps say"
    return said + anew if found.axis == "rate" else said


def ended_line(found: Frontier) -> str:
    """Why there is no further fleet."""
    return f"the staircase ends: {found.ended}"


def _flat(step: dict[str, Any]) -> dict[str, Any]:
    """A line of pareto.csv: each answer's price and scenarios in columns of their own."""
    answers = {each["name"].replace("-", "_"): each for each in step["answers"]}
    return {key: value for key, value in step.items() if key != "answers"} | {
        f"{name}_{key}": each[key] for name, each in answers.items() for key in ("value", "kept", "futures")
    }


def _answer_cells(step: dict[str, Any]) -> dict[str, str]:
    """The cost of the cheapest fleet on paper, and the scenarios that it and the step's fleet keep."""
    answers = {each["name"]: each for each in step["answers"]}
    if not {"on-paper", "production"} <= answers.keys():
        return {}
    paper, made = answers["on-paper"], answers["production"]
    return {
        "on paper": "-" if paper["value"] is None else f"{paper['value']:.6g}",
        "on paper, kept in": f"{paper['kept']} of {paper['futures']}",
        "kept in scenarios": f"{made['kept']} of {made['futures']}",
    }


def rows(found: Frontier) -> list[dict[str, str]]:
    """The rows of the table, one per fleet, with every value as text."""
    return [
        {
            f"{found.axis}, holds to": _shown(found, step["holds_to"]),
            found.objective_unit: f"{step['value']:.6g}",
            "fleet": step["fleet"],
            **_answer_cells(step),
            "one type per pool": f"{step['level0']:.6g}, "
            + level0_proof(is_exact=step["level0_exact"], is_exhausted=step["level0_exhausted"]),
            "asked": "*" if step["is_asked"] else "",
        }
        for step in document(found)["steps"]
    ]
