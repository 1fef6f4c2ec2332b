"""`plan manifests`: the deployments of a plan that is already written. Imports within functions keep other
commands fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from planner.commands import shared_options
from planner.commands.command_output import print_warnings, refuse_to_overwrite
from planner.commands.printed_tables import print_json, stdout_console
from planner.policies import ROUTERS_OF


def write_manifests(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", readable=False, help="plan.yaml or its folder, or a fleet.yaml.")
    ],
    out: Annotated[Path, shared_options.out_folder("Folder for the manifests.")],
    target: Annotated[
        str, typer.Option("--target", help=f"{', '.join(ROUTERS_OF)}; or all that can express the plan.")
    ] = "all",
    catalog: shared_options.CatalogOption = None,
    json_output: shared_options.JsonOption = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show only what was not written, and warnings.")
    ] = False,
) -> None:
    """Write the deployments of a plan: for one target, or for all that can express it.

    plan manifests out/plan.yaml --target lws -o deploy/
    """
    from planner.api.inputs import plan_file
    from planner.api.manifesting import manifests
    from planner.files.checked_files import check_output_directory

    check_output_directory(out)
    plan = plan_file(plan)
    result = manifests(plan, target, catalog=catalog)
    if result.plan_warnings:
        print_warnings(list(result.plan_warnings))
    rendered = result.rendered
    refuse_to_overwrite([out / name for name in rendered.files], plan)
    result.save(out)
    if json_output:
        print_json({"directory": str(out), **result.to_dict()})
        return
    console = stdout_console()
    for why in dict.fromkeys(rendered.refused.values()):
        console.print(f"not written: {why}", markup=False)
    for warning in rendered.warnings.values():
        console.print(f"WARNING: {warning}", markup=False)
    if quiet:
        return
    for note in dict.fromkeys(note for note_list in rendered.notes.values() for note in note_list):
        console.print(f"note: {note}", markup=False)
    console.print(f"written to {out}: {', '.join(rendered.files)}", markup=False)
