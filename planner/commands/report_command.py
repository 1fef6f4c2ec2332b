"""`plan report`: the report of a plan that is already written. Imports within functions keep other commands
fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from planner.commands import shared_options
from planner.commands.command_output import Progress, refuse_to_overwrite
from planner.commands.printed_tables import print_json, stdout_console
from planner.documents.catalog import read_catalog


def write_report(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", readable=False, help="The folder of a plan, or its plan.yaml.")
    ],
    out: Annotated[
        Path | None, shared_options.out_folder("Folder for report.html; without, the plan's own.")
    ] = None,
    png: shared_options.PngOption = False,
    catalog: shared_options.CatalogOption = None,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Simulate a written plan again, see that its figures come out, and draw its report.

    plan report out/ --png
    """
    from planner.files import checked_files
    from planner.reports import figures, output
    from planner.reports.report import render_report
    from planner.search.evidence.written_plan import read_plan

    folder = out or (plan if plan.is_dir() else plan.parent)
    checked_files.check_output_directory(folder)
    refuse_to_overwrite([folder / "report.html"], plan)
    with Progress() as progress:
        plan_read, command = read_plan(plan, read_catalog(catalog))
        progress("drawing")
        pictures = output.chart_pictures(figures.all_figures(plan_read)) if png else {}
        contents: dict[str, str | bytes] = {
            "report.html": render_report(plan_read, command=command),
            **pictures,
        }
        checked_files.write_files(folder, contents)
    if json_output:
        print_json(output.to_json(plan_read) | {"directory": str(folder), "files": list(contents)})
        return
    stdout_console().print(
        f"simulated again, the figures of certificate.json come out; written to {folder}: "
        f"{', '.join(contents)}",
        markup=False,
    )
