"""`plan allocate`: the cheapest mix of worker types whose sustainable rates are known. Imports within
functions keep other commands fast.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from planner.commands import shared_options
from planner.commands.printed_tables import print_json, print_lines, print_rows


def allocate(
    instance: Annotated[
        Path,
        typer.Argument(readable=False, help="JSON: buckets with rates, types with prices, stock and rates."),
    ],
    json_output: shared_options.JsonOption = False,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", min=0.01, help="Seconds after which the best mix so far is given."),
    ] = 60.0,
) -> None:
    """Find the cheapest mix of worker types that carries all buckets, and each bucket's split.

    Exit code 3: a bucket that no type serves, or too small a stock. 4: not proven cheapest in time.
    """
    from planner.documents.allocation_file import allocation_document, parse_instance
    from planner.files.checked_files import read_json
    from planner.solvers import allocation

    problem = parse_instance(read_json(instance), where=str(instance))
    allocated = allocation.allocate(problem, time_limit_s=time_limit)
    answer = allocation_document(problem, allocated)
    if json_output:
        print_json(answer)
    else:
        _print_mix(answer)
    if not allocated.is_optimal:
        raise typer.Exit(4)


def _print_mix(answer: dict[str, Any]) -> None:
    print_rows([{"type": name, "workers": count} for name, count in answer["counts"].items()], "mix")
    rows = [
        {"bucket": bucket, "split": ", ".join(f"{100 * x:.4g} % {name}" for name, x in share.items())}
        for bucket, share in answer["shares"].items()
    ]
    print_rows(rows, "routing")
    proof = "the cheapest" if answer["status"] == "optimal" else "not proven cheapest"
    print_lines(f"{answer['cost_usd_per_h']:.6g} USD/h, {proof} (bound {answer['bound_usd_per_h']:.6g})")
