"""`plan pareto`: what each tightening of a limit costs, fleet by fleet."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.catalog import read_catalog
from planner.commands.common import (
    CatalogOption,
    JsonOption,
    Progress,
    SeedOption,
    keep_inputs,
    print_json,
    print_rows,
    stdout_console,
)
from planner.commands.whatif import SloArgument, TimeOption, TraceArgument, study_of
from planner.units import quantity, show_s

if TYPE_CHECKING:
    from planner.pareto import Frontier

NAMES = ("pareto.csv", "pareto.json", "pareto.png")


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
    json_output: JsonOption = False,
) -> None:
    """Cost against a limit: every fleet on the frontier and the exact limit at which it stops holding.

    Over cost, the objective is power (unless it is GPUs).
    """
    from planner import files, pareto
    from planner.slo import read_task

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
        study = study_of(trace, known, seed, time_limit, progress)
        task = read_task(slo, known)
        found = pareto.frontier(study, task, over, first=ends[0], last=ends[1], points=points)
        document = pareto.document(found)
        if out is not None:
            files.write_files(out, dict(zip(NAMES, _files(found, document), strict=True)))
    if json_output:
        print_json(document)
    else:
        _print(found, document)


def _files(found: Frontier, document: dict[str, Any]) -> tuple[str, str, bytes]:
    """CSV, JSON and the picture."""
    from planner.drawing import chart_png

    text = io.StringIO()
    rows = csv.DictWriter(text, list(document["steps"][0]), lineterminator="\n")
    rows.writeheader()
    rows.writerows(document["steps"])
    return text.getvalue(), json.dumps(document, indent=2) + "\n", chart_png(picture(found, document))


def picture(found: Frontier, document: dict[str, Any]) -> Any:
    """The frontier as an Altair chart, with the question's own limit on it."""
    from planner import charts

    asked = None if found.asked is None else found.best_at(found.asked)
    return charts.staircase_chart(
        [step.corner for step in found.steps],
        [step.value for step in found.steps],
        [f"{step['gpus']} GPUs" for step in document["steps"]],
        (f"{found.axis} [{found.unit}]", f"{found.objective} [{found.objective_unit}]"),
        loosest=found.loosest if math.isfinite(found.loosest) else 1.05 * found.steps[0].corner,
        asked=None if asked is None or found.asked is None else (found.asked, asked.value),
    )


def _print(found: Frontier, document: dict[str, Any]) -> None:
    def shown(limit: float) -> str:
        return show_s(limit) if found.unit == "s" else f"{limit:.6g} {found.unit}"

    rows = [
        {
            f"{found.axis}, holds to": shown(step["holds_to"]),
            found.objective_unit: f"{step['value']:.6g}",
            "fleet": step["fleet"],
            "level 0": "exact" if step["level0_exact"] else "NOT exhausted",
            "asked": "*" if step["is_asked"] else "",
        }
        for step in document["steps"]
    ]
    asked = "" if found.asked is None else f"; asked was {shown(found.asked)}"
    start = f"from {shown(found.loosest)}" if math.isfinite(found.loosest) else "from no limit"
    print_rows(rows, f"{start}{asked}")
    stdout_console(soft_wrap=True).print(f"the staircase ends: {document['ended']}", markup=False)
