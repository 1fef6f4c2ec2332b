"""`plan check`: can other commands read these files? Nothing is planned or simulated. Imports within
functions keep other commands fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from planner.commands import shared_options
from planner.commands.printed_tables import print_json, print_lines
from planner.errors import InputError, PlannerError
from planner.units import count_text


def check(
    files: Annotated[
        list[Path], typer.Argument(readable=False, help="slo.yaml, fleet.yaml, plan.yaml or its folder.")
    ],
    catalog: shared_options.CatalogOption = None,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Read questions and fleets as the other commands do, without planning: for editors, hooks and CI."""
    from planner.api.inputs import check_file
    from planner.documents.catalog import read_catalog

    catalog_rows = read_catalog(catalog)
    warnings: dict[str, list[str]] = {}  # Sentences on what is doubtful, of each file that can be read.
    errors: dict[str, str] = {}
    for file in files:
        try:
            warnings[str(file)] = check_file(file, catalog_rows)
        except PlannerError as error:
            errors[str(file)] = error.line
    if json_output:
        print_json({"read": list(warnings), "warnings": warnings, "errors": errors})
    else:
        for name, sentences in warnings.items():
            print_lines("\n".join([f"{name}: ok", *(f"  mind: {sentence}" for sentence in sentences)]))
    if errors:
        *others, last = errors.values()
        if others:  # The last line also has the number of files.
            last += f" ({count_text(len(errors), 'file')} of {len(files)} cannot be read)"
        typer.echo("\n".join(f"plan: {line}" for line in (*others, last)), err=True)
        raise typer.Exit(InputError.exit_code)
