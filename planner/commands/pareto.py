"""`plan pareto`: what each tightening of a limit costs, fleet by fleet."""

from __future__ import annotations

import csv
import io
import json
import math
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands.common import (
    CatalogOption,
    DropOption,
    JsonOption,
    Progress,
    SeedOption,
    keep_inputs,
    print_json,
    print_rows,
    stdout_console,
)
from planner.commands.whatif import SloArgument, TimeOption, TraceArgument, study_of
from planner.documents.catalog import read_catalog
from planner.units import quantity, show_s

if TYPE_CHECKING:
    from planner.reports.drawing import Figure
    from planner.studies.pareto import Frontier

NAMES = ("pareto.html", "pareto.csv", "pareto.json", "pareto.png")


def pareto(
    slo: SloArgument,
    trace: TraceArgument,
    over: Annotated[
        str, typer.Option("--over", help="ttft, tbt, tpot, e2e (or ttft.p90), power, cost, rate.")
    ],
    first: Annotated[
        str | None, typer.Option("--from", help="One end of the range; default: half the question's limit.")
    ] = None,
    last: Annotated[str | None, typer.Option("--to", help="The other end; default: twice as much.")] = None,
    points: Annotated[int, typer.Option("--points", min=1, help="Plans to make at most.")] = 12,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", readable=False, help=f"Folder for {', '.join(NAMES)}.")
    ] = None,
    catalog: CatalogOption = None,
    seed: SeedOption = 0,
    time_limit: TimeOption = 120.0,
    drop_invalid: DropOption = False,
    json_output: JsonOption = False,
) -> None:
    """Cost against a limit: every fleet found on the frontier, and the limit at which it stops holding.

    Over cost, the objective is power (unless it is GPUs).
    """
    from planner.documents.task import read_task
    from planner.io import files
    from planner.studies import pareto

    unit = {"power": "w", "cost": "usd_per_h", "rate": "rps"}.get(over, "s")
    ends = [
        None if text is None else quantity(text, unit, where=name)
        for text, name in ((first, "--from"), (last, "--to"))
    ]
    if out is not None:
        files.check_output_directory(out)
        keep_inputs([out / name for name in NAMES], slo, trace)
    with Progress() as progress:
        known = read_catalog(catalog)
        study = study_of(trace, known, seed, time_limit, progress, drop_invalid=drop_invalid)
        task = read_task(slo, known)
        found = pareto.frontier(study, task, over, first=ends[0], last=ends[1], points=points)
        document = pareto.document(found)
        if out is not None:
            files.write_files(out, dict(zip(NAMES, _files(found, document), strict=True)))
    if json_output:
        print_json(document, study.trace.warnings)
    else:
        _print(found, document)


def _files(found: Frontier, document: dict[str, Any]) -> tuple[str, str, str, bytes]:
    """The page, CSV, JSON and the picture."""
    from planner.reports.drawing import Figure, chart_png

    text = io.StringIO()
    rows = csv.DictWriter(text, list(document["steps"][0]), lineterminator="\n")
    rows.writeheader()
    rows.writerows(document["steps"])
    caption = f"{found.objective} over {found.axis}: a dot where each fleet stops holding"
    asked = "" if found.asked is None else "; the circle is what was asked"
    figure = Figure("pareto", picture(found, document), f"{caption}{asked}.")
    numbers = json.dumps(document, indent=2) + "\n"
    return _html(found, document, figure), text.getvalue(), numbers, chart_png(figure)


def _html(found: Frontier, document: dict[str, Any], figure: Figure) -> str:
    from planner.reports.page import chart, page, section, table

    steps = _steps(found, document)
    values = [step["value"] for step in document["steps"]]
    title = f"What {found.axis} costs: {min(values):.6g} to {max(values):.6g} {found.objective_unit}"
    cells = [list(step.values()) for step in steps]
    body = (
        f"<header><p class=eyebrow>Frontier of {len(steps)} fleets</p><h1>{escape(title)}</h1>"
        f"<p class=lead>{escape(_asked(found))}.</p></header>"
        + chart(figure, wide=True)
        + section("Fleet by fleet", table(list(steps[0]), cells, caption="Frontier", numeric=(1,)))
        + f"<p class=note>The staircase ends: {escape(found.ended)}.</p>"
    )
    return page(title, body, "Written by fleetplan. pareto.csv and pareto.json hold the same in plain units.")


def picture(found: Frontier, document: dict[str, Any]) -> Any:
    """The frontier as an Altair chart, with the question's own limit on it."""
    from planner.reports import charts

    asked = None if found.asked is None else found.best_at(found.asked)
    return charts.staircase_chart(
        [step.corner for step in found.steps],
        [step.value for step in found.steps],
        [f"{step['gpus']} GPUs" for step in document["steps"]],
        (f"{found.axis} [{found.unit}]", f"{found.objective} [{found.objective_unit}]"),
        loosest=found.loosest if math.isfinite(found.loosest) else 1.05 * found.steps[0].corner,
        asked=None if asked is None or found.asked is None else (found.asked, asked.value),
    )


def _shown(found: Frontier, limit: float) -> str:
    return show_s(limit) if found.unit == "s" else f"{limit:.6g} {found.unit}"


def _asked(found: Frontier) -> str:
    start = f"from {_shown(found, found.loosest)}" if math.isfinite(found.loosest) else "from no limit"
    return start if found.asked is None else f"{start}; asked was {_shown(found, found.asked)}"


def _steps(found: Frontier, document: dict[str, Any]) -> list[dict[str, str]]:
    from planner.reports.words import level0_proof

    return [
        {
            f"{found.axis}, holds to": _shown(found, step["holds_to"]),
            found.objective_unit: f"{step['value']:.6g}",
            "fleet": step["fleet"],
            "one type per pool": f"{step['level0']:.6g}, "
            + level0_proof(is_exact=step["level0_exact"], is_exhausted=step["level0_exhausted"]),
            "asked": "*" if step["is_asked"] else "",
        }
        for step in document["steps"]
    ]


def _print(found: Frontier, document: dict[str, Any]) -> None:
    print_rows(list[dict[str, Any]](_steps(found, document)), _asked(found))
    stdout_console(soft_wrap=True).print(f"the staircase ends: {document['ended']}", markup=False)
