"""`plan schema`: the JSON Schemas of files and answers. Imports within functions keep other commands fast."""

from pathlib import Path
from typing import Annotated

import typer

from planner.commands import shared_options
from planner.commands.printed_tables import stdout_console
from planner.documents.catalog import read_catalog
from planner.errors import InputError

ALL = "all"


def write_schema(
    name: Annotated[
        str, typer.Argument(help="slo, fleet, plan, or an answer such as goodput-answer; without, the names.")
    ] = "",
    out: Annotated[
        Path | None, shared_options.out_folder("Folder for NAME.schema.json; without, to stdout.")
    ] = None,
    catalog: shared_options.CatalogOption = None,
) -> None:
    """Print the JSON Schema of slo.yaml, fleet.yaml, plan.yaml or an answer with --json.

    An editor checks and completes a file that begins with
    # yaml-language-server: $schema=slo.schema.json
    """
    from planner.documents.schemas.all_schemas import NAMES, schema_text
    from planner.files.checked_files import check_output_directory, write_files

    if not name:
        stdout_console().print("\n".join((*NAMES, ALL)), markup=False)
        return
    if name not in (*NAMES, ALL):
        raise InputError(f"schema: no schema {name[:100]!r}; there are {', '.join((*NAMES, ALL))}")
    if name == ALL and out is None:
        raise InputError("schema: all need a folder; add -o FOLDER")
    catalog_rows = read_catalog(catalog)  # The schemas list its GPUs, LLMs and rows of tasks.yaml.
    if out is None:
        # The console would wrap long lines.
        print(schema_text(name, catalog_rows), end="")  # noqa: T201
        return
    check_output_directory(out)
    names = NAMES if name == ALL else [name]
    files: dict[str, str | bytes] = {f"{each}.schema.json": schema_text(each, catalog_rows) for each in names}
    write_files(out, files)
    stdout_console().print(f"written to {out}: {', '.join(files)}", markup=False)
