"""`plan pareto`: what each tightening of a limit costs, fleet by fleet. Imports within functions keep other
commands fast.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from planner.commands import shared_options
from planner.commands.command_output import refuse_to_overwrite
from planner.commands.printed_tables import print_json, print_lines, print_rows
from planner.commands.study_options import StudyOptions, with_study_options
from planner.slo_metrics import METRICS
from planner.units import parse_quantity

# The same names as in studies.pareto_page, which is imported late because that takes long.
NAMES = ("pareto.html", "pareto.csv", "pareto.json", "pareto.png")


@with_study_options()
def pareto(
    options: StudyOptions,
    over: Annotated[
        str, typer.Option("--over", help=f"{', '.join(METRICS)} (or ttft.p90), power, cost, rate.")
    ],
    first: Annotated[
        str | None, typer.Option("--from", help="One end of the range; default: half the question's limit.")
    ] = None,
    last: Annotated[str | None, typer.Option("--to", help="The other end; default: twice the limit.")] = None,
    points: Annotated[int, typer.Option("--points", min=1, help="Plans to make at most.")] = 12,
    out: Annotated[Path | None, shared_options.out_folder(f"Folder for {', '.join(NAMES)}.")] = None,
) -> None:
    """Cost against a limit: every fleet found on the frontier, and the limit at which it stops holding.

    With --over cost the fleets of the least power are sought, or of the fewest GPUs if the objective is gpus.
    """
    from planner.api.questions import read_task
    from planner.files import checked_files
    from planner.studies import pareto_frontier, pareto_page

    unit = {"power": "w", "cost": "usd_per_h", "rate": "rps"}.get(over, "s")
    ends = [
        None if text is None else parse_quantity(text, unit, where=name)
        for text, name in ((first, "--from"), (last, "--to"))
    ]
    if out is not None:
        checked_files.check_output_directory(out)
        refuse_to_overwrite([out / name for name in NAMES], options.slo, options.trace)
    with options.at_work() as (progress, catalog):
        study = options.study(catalog, progress)
        # The study has the traffic but not the question, whose limit `find_frontier` changes.
        task = read_task(options.slo, catalog).task()
        frontier = pareto_frontier.find_frontier(
            study, task, over, first=ends[0], last=ends[1], points=points
        )
        document = pareto_frontier.frontier_document(frontier)
        if out is not None:
            checked_files.write_files(out, pareto_page.render_frontier(frontier))
    if options.json_output:
        print_json(document, study.trace.warnings)
    else:
        # `with_proof=False`: without the column on the best fleet with one worker type per pool.
        rows: list[dict[str, Any]] = [*pareto_page.frontier_table(frontier, with_proof=False)]
        print_rows(rows, pareto_page.question_line(frontier))
        print_lines(pareto_page.ended_line(frontier))
