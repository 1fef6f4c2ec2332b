"""`plan schedule`: reserved, on-demand and spot workers per window for demand that changes over the week.
Imports within functions keep other commands fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.commands import shared_options
from planner.commands.command_output import Progress, print_warnings, read_requests, refuse_to_overwrite
from planner.commands.printed_tables import print_json, print_lines, print_table
from planner.errors import InputError
from planner.units import parse_quantity

if TYPE_CHECKING:
    from planner.reports.schedule_page import ScheduleAnswer


LEAST_WINDOW_S = 1.0  # A shorter window is refused as a typing error; set by hand.
GAP_LEFT_OPEN = 4  # The exit code if time ran out before the cost was within --gap of the bound.

MarketArgument = Annotated[
    Path,
    typer.Argument(
        readable=False, help="schedule.yaml: prices, capacity, limits; or plan.yaml, or its folder."
    ),
]
DemandOption = Annotated[
    Path | None,
    typer.Option("--demand", readable=False, help="CSV: a row per window, a column of requests/s per LLM."),
]
TraceOption = Annotated[
    list[str] | None, typer.Option("--trace", help="LLM=FILE, once per LLM, in place of --demand.")
]
QuestionOption = Annotated[
    Path | None,
    typer.Option("--slo", readable=False, help="With plan.yaml its question, for its stock and its limits."),
]
WindowOption = Annotated[str, typer.Option("--window", help="Length of a window.")]
GapOption = Annotated[
    float, typer.Option("--gap", min=0.0, max=1.0, help="Stop this close to the bound, as a share.")
]
TimeLimitOption = Annotated[
    float, typer.Option("--time-limit", min=0.1, help="Seconds after which the best schedule is given.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        parser=shared_options.folder_or_file(".csv"),
        metavar="DIR|FILE.csv",
        help="Folder for schedule.html (charts), .csv and .json; or FILE.csv, for the workers alone.",
    ),
]


def schedule(
    market: MarketArgument,
    demand: DemandOption = None,
    trace: TraceOption = None,
    slo: QuestionOption = None,
    window: WindowOption = "1 h",
    gap: GapOption = 0.005,
    time_limit: TimeLimitOption = 60.0,
    out: OutOption = None,
    catalog: shared_options.CatalogOption = None,
    seed: shared_options.SeedOption = 0,
    drop_invalid: shared_options.DropOption = False,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Schedule workers over a day or a week: reserved for the base, on demand and spot for the rest.

    Of plan.yaml the fleet is scheduled, at its prices: in the smallest equal parts that it has.

    Compares with a fleet for the peak and with Aladdin's linear rule. With --trace, and in schedule.yaml a
    fleet for each worker type and the SLO of each LLM, the hours are simulated and repaired. Exit code 3: a
    limit is too tight. 4: the gap was not closed in time.
    """
    from planner.api.inputs import fleet_file_warnings, read_fleet
    from planner.api.scheduling import read_market
    from planner.api.scheduling import schedule as schedule_workers
    from planner.documents.planned_market import is_plan_file
    from planner.files.checked_files import check_output_directory, check_output_file
    from planner.reports.schedule_page import NAMES

    window_s = parse_quantity(window, "s", where="--window")
    if window_s < LEAST_WINDOW_S:
        raise InputError(f"--window: expected at least 1 s, found {window!r}")
    if (demand is None) == (not trace):
        raise InputError(
            "the demand is missing: give --demand FILE, or --trace LLM=FILE for every LLM, not both"
        )
    paths = _files_by_llm(trace or [])
    is_csv = out is not None and out.suffix == ".csv"
    if out is not None:
        (check_output_file if is_csv else check_output_directory)(out)
        refuse_to_overwrite(
            [out] if is_csv else [out / name for name in NAMES], market, demand, slo, *paths.values()
        )
    with Progress() as progress:
        market_terms = read_market(market, slo=slo, catalog=catalog)
        traces = {llm: read_requests(path, drop_invalid=drop_invalid) for llm, path in paths.items()}
        is_plan = is_plan_file(market)
        sentences = fleet_file_warnings(market, read_fleet(market, catalog)) if is_plan else ()
        fleet_warnings = print_warnings(sentences)
        warnings = [*fleet_warnings] + [line for read in traces.values() for line in read.warnings]
        answer = schedule_workers(
            market_terms,
            demand or traces,
            window=window,
            gap_frac=gap,
            time_limit_s=time_limit,
            catalog=catalog,
            seed=seed,
            progress=progress,
        )
        if out is not None:
            progress("drawing the charts")
            answer.save(out)
    if json_output:
        print_json(answer.to_dict(), [*filter(None, [market_terms.note]), *warnings])
    else:
        _print_answer(answer.answer)
        if out is not None:
            print_lines(f"written to {out}" + ("" if is_csv else f": {', '.join(NAMES)}"))
    if not answer.is_optimal:
        raise typer.Exit(GAP_LEFT_OPEN)


def _files_by_llm(traces: list[str]) -> dict[str, Path]:
    """The trace files by LLM, from texts such as chat=chat.csv. Raises InputError for any other text, and for
    an LLM with two files.
    """
    file_by_llm: dict[str, Path] = {}
    for text in traces:
        llm, _, file = text.partition("=")
        if not (llm and file):
            raise InputError(f"--trace: expected LLM=FILE, found {text!r}")
        if llm in file_by_llm:
            raise InputError(
                f"--trace: {llm} is given twice, {file_by_llm[llm]} and {file}; `plan trace FILE FILE -o "
                "all.csv` joins files of one log"
            )
        file_by_llm[llm] = Path(file)
    return file_by_llm


def _print_answer(answer: ScheduleAnswer) -> None:
    """Print GPUs, workers, the cost with its bound, the cost of other schedules, and the simulation."""
    from planner.reports import schedule_page

    windows = answer.demand.rate_rps.shape[1]
    gpu_head, gpu_rows = schedule_page.gpu_rows(answer)
    print_table(gpu_head, gpu_rows, "GPUs")
    worker_head, worker_rows = schedule_page.worker_rows(answer)
    print_table(worker_head, worker_rows, f"workers over {windows} windows")
    cheapest = answer.schedule
    print_lines(
        f"{cheapest.cost_usd_per_h:.2f} USD/h on average, bound {cheapest.bound_usd_per_h:.2f} "
        f"(gap {100 * cheapest.gap_frac:.2f} %)"
    )
    print_lines(*schedule_page.compared_lines(answer), *schedule_page.simulated_lines(answer))
