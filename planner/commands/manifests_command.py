"""`plan manifests`: the deployments of a plan that is already written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.commands import shared_options
from planner.commands.command_output import keep_inputs, say_first
from planner.commands.printed_tables import print_json, stdout_console
from planner.documents.catalog import read_catalog
from planner.errors import InputError
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
        bool, typer.Option("--quiet", "-q", help="Tell only what was not written, and warnings.")
    ] = False,
) -> None:
    """Write the deployments of a plan: for one target, or for all that can express it.

    plan manifests out/plan.yaml --target lws -o deploy/
    """
    from planner import manifests
    from planner.api.inputs import fleet_file_doubts, plan_file
    from planner.documents.fleet_file import read_fleet, read_max_model_len, read_routers
    from planner.files import checked_files

    checked_files.check_output_directory(out)
    plan = plan_file(plan)
    fleet = read_fleet(plan, read_catalog(catalog))
    max_model_len = read_max_model_len(plan)
    if max_model_len is None:
        raise InputError(f"{plan}: max_model_len: missing; add the tokens of the longest request to serve")
    under = [manifests.RouterRow(*row) for row in read_routers(plan)]
    if doubts := fleet_file_doubts(plan, fleet):
        say_first(doubts)
        under = []  # They were simulated with other workers.
    rendered = manifests.render(fleet, max_model_len, target, under)
    keep_inputs([out / name for name in rendered.files], plan)
    names = manifests.TARGETS if target == "all" else [target]
    checked_files.write_files(
        out, rendered.files, outdated=[pattern for name in names for pattern in manifests.OUTDATED[name]]
    )
    if json_output:
        written = {
            "files": list(rendered.files),
            "refused": rendered.refused,
            "notes": rendered.notes,
            "warnings": rendered.warnings,
        }
        print_json({"directory": str(out), **written})
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
