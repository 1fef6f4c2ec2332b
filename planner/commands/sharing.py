"""`plan` for several LLMs on one stock: what --slo with `llms:` asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from planner.commands.common import Progress, keep_inputs, print_json, print_rows, say_first, stdout_console
from planner.documents.catalog import read_catalog

if TYPE_CHECKING:
    from planner.search.together import SharedPlan


def plan_together(
    slo: Path,
    trace: Path | None,
    out: Path,
    *,
    catalog: Path | None,
    seed: int,
    time_limit_s: float,
    png: bool,
    json_output: bool,
    drop_invalid: bool = False,
) -> None:
    """Plan all LLMs of `slo` together and write a folder for each; exit code 4 if not exhausted in time."""
    from planner.documents.together import read_question
    from planner.io import files
    from planner.reports.together import NAMES, outdated, render, summary
    from planner.reports.words import command_line
    from planner.search import together

    files.check_output_directory(out)
    with Progress() as progress:
        known = read_catalog(catalog)
        question = read_question(slo, trace, known, drop_invalid=drop_invalid)
        say_first(dict.fromkeys(line for part in question.parts for line in part.trace.warnings))
        folders = (out, *(out / part.name for part in question.parts))
        for given in (slo, *question.files):
            keep_inputs([folder / name for folder in folders for name in (*NAMES, "requests.csv")], given)
        for part in question.parts:
            progress(f"{part.name}: {len(part.trace)} requests of {part.trace.name}")
        found = together.plan_together(
            question, known, seed=seed, time_limit_s=time_limit_s, progress=progress
        )
        progress("writing the reports")
        command = command_line(
            slo, trace, catalog, seed=seed, time_limit_s=time_limit_s, drop_invalid=drop_invalid
        )
        files.write_files(out, render(found, command=command, png=png), outdated=outdated(found))
    if json_output:
        print_json(summary(found) | {"directory": str(out)})
    else:
        _print(found, out)
    if not found.is_exhausted:
        raise typer.Exit(4)


def _print(found: SharedPlan, out: Path) -> None:
    from planner.reports.facts import sentences
    from planner.reports.together import answer, fleet_rows, limit_rows, proof_lines

    console = stdout_console(soft_wrap=True)
    console.print(answer(found), style="bold", markup=False)
    for title, (head, rows) in (("fleets", fleet_rows(found)), ("shared limits", limit_rows(found))):
        if rows:
            print_rows([dict(zip(head, row, strict=True)) for row in rows], title)
    for line in (*sentences(found.binding), *proof_lines(found)):
        console.print(line, markup=False)
    for said in sentences(found.warnings):
        console.print(f"warning: {said}", markup=False)
    folders = ", ".join(f"{name}/" for name in found.plans)
    console.print(
        f"written to {out}: plan.yaml, certificate.json, report.html; a whole plan each in {folders}",
        markup=False,
    )
