"""`plan day`: a day of traffic on pools that controllers change, compared with the optimum. Imports within
functions keep other commands fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.commands import shared_options
from planner.commands.command_output import (
    Progress,
    at_work,
    print_warnings,
    read_requests,
    refuse_to_overwrite,
    write_best_so_far,
)
from planner.commands.printed_tables import print_json, print_lines, print_rows, print_table
from planner.commands.study_options import SloArgument
from planner.errors import InputError
from planner.search.oracle.work_clock import USUAL_LIMIT_S

if TYPE_CHECKING:
    from planner.day.day_study import DayAnswer
    from planner.day.several_llms_day import JointAnswer
    from planner.fleet import Fleet


StorageOption = Annotated[
    str | None, typer.Option("--storage", help="Where weights lie: a row of catalogs/startup.yaml.")
]
BillingOption = Annotated[
    str | None, typer.Option("--billing", help="second or hour: what is paid once it is begun.")
]
FolderOption = Annotated[
    Path | None, shared_options.out_folder("Folder for day.html, tables, the winner's manifests.")
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        readable=False,
        help="The traffic: a trace, or a log (docs/traces.md); with llms, of entries without one.",
    ),
]
FleetOption = Annotated[
    Path | None,
    typer.Option(
        "--fleet",
        readable=False,
        help="plan.yaml, its folder, or fleet.yaml: what stands all day; with llms their folder.",
    ),
]
TrainOption = Annotated[
    str | None,
    typer.Option("--train", help="'70 %': choose parameters on the first part, judge on the rest."),
]
OracleOption = Annotated[
    bool,
    typer.Option(
        "--oracle",
        help="Tune HPA, KEDA, WVA and Dynamo on 70 %, judge on the rest: least GPU hours, best settings.",
    ),
]

LimitOption = Annotated[
    float,
    typer.Option(
        "--time-limit",
        min=0.1,
        help="Longest time in seconds. As with `plan`, the work is counted and usually ends first.",
    ),
]


def day(
    slo: SloArgument,
    trace: TraceOption = None,
    fleet: FleetOption = None,
    controllers: Annotated[
        str | None, typer.Option("--controllers", help="Their names, 'hpa,keda'; see docs/controllers.md.")
    ] = None,
    every: Annotated[
        str | None, typer.Option("--every", help="The grid from which the optimum starts.")
    ] = None,
    train: TrainOption = None,
    oracle: OracleOption = False,
    start: Annotated[
        str | None,
        typer.Option("--start", help="Time until a worker is ready; default: by the LLM and --storage."),
    ] = None,
    storage: StorageOption = None,
    billing: BillingOption = None,
    out: FolderOption = None,
    catalog: shared_options.CatalogOption = None,
    seed: shared_options.SeedOption = 0,
    time_limit: LimitOption = USUAL_LIMIT_S,
    executor: shared_options.ExecutorOption = None,
    address: shared_options.AddressOption = None,
    drop_invalid: shared_options.DropOption = False,
    quiet: shared_options.QuietOption = False,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Run a day of traffic on a fleet that stands all day, under controllers, and at the optimum.

    Says what each costs, which windows of the SLO it misses, and what is above the optimum. Exit code 3: no
    fleet keeps the SLO. With `llms` in slo.yaml all of them share one stock, and costs are added up.
    """
    from planner.api.inputs import fleet_file_warnings, plan_file, read_fleet
    from planner.day import day_page
    from planner.day.day_api import DayResult
    from planner.day.day_api import day as run_day
    from planner.files.checked_files import check_output_directory
    from planner.files.interrupts import saving_on_interrupt

    if out is not None:
        check_output_directory(out)
        refuse_to_overwrite([out / name for name in day_page.NAMES], slo, trace, fleet)
    terms: dict[str, str | bool | None] = {"controllers": controllers, "every": every, "train": train}
    terms |= {"start": start, "storage": storage, "billing": billing, "oracle": oracle or None}
    warnings: tuple[str, ...] = ()
    with Progress(quiet=quiet) as progress, at_work(executor, address):
        if fleet is not None and plan_file(fleet).is_file():  # For several LLMs `fleet` is a folder of plans.
            standing = read_fleet(fleet, catalog, slo=slo)
            warnings = print_warnings(fleet_file_warnings(fleet, standing, slo=slo, catalog=catalog))
        requests = (
            None
            if trace is None
            else read_requests(trace, slo, catalog, seed=seed, drop_invalid=drop_invalid)
        )
        day_so_far = DaySoFar(progress, out, is_fleet_given=fleet is not None)
        with saving_on_interrupt(day_so_far.write_fleet):
            day_result = run_day(
                slo,
                requests,
                standing=fleet,
                terms={name: value for name, value in terms.items() if value is not None},
                catalog=catalog,
                seed=seed,
                time_limit_s=time_limit,
                progress=day_so_far,
            )
        written = () if out is None else day_result.save(out)
    if json_output:
        print_json(day_result.to_dict(), warnings + (() if requests is None else requests.warnings))
        return
    if isinstance(day_result, DayResult):
        if day_result.is_oracle:
            print_lines(*day_page.least_gpu_hours(day_result.answer))
        print_answer(day_result.answer)
    else:
        print_joint_answer(day_result.answer)
    if written:
        print_lines(f"written to {out}: {len(written)} files; open {out}/day.html")


class DaySoFar:
    """The best fleet so far of a day, and its day; an interrupt writes the fleet into the folder `out`."""

    def __init__(self, progress: Progress, out: Path | None, *, is_fleet_given: bool) -> None:
        self.progress, self.out = progress, out
        self.is_fleet_given = is_fleet_given
        self.fleet: Fleet | None = None
        self.answer: DayAnswer | None = None

    def __call__(self, text: str) -> None:
        self.progress(text)

    def note_day(self, fleet: Fleet, answer: DayAnswer | None) -> None:
        """Remember the fleet, and its day where that is done."""
        self.fleet, self.answer = fleet, answer

    def write_fleet(self) -> str:
        """Write the fleet, unless it was given. Returns sentences on the day, the fleet and the file."""
        from planner.day import day_page
        from planner.reports.words import describe_fleet

        if self.fleet is None:
            return "no day is done yet, so nothing is kept"
        message = f"what stands all day is {describe_fleet(self.fleet)}"
        if self.answer is not None:
            day_text = day_page.recommendation_sentence(self.answer).rstrip(".")
            message = f"the best day so far is of {describe_fleet(self.fleet)}: {day_text}"
        if self.is_fleet_given:
            return f"{message}; nothing is written"
        return write_best_so_far(self.fleet, self.out, message) + (
            "; nothing is written without -o" if self.out is None else ", which --fleet takes"
        )


def run_controller(
    fleet: Path,
    trace: Path | None,
    slo: Path | None,
    controller: str | None,
    start: str | None,
    catalog: Path | None,
    seed: int,
    out: Path | None,
    drop_invalid: bool,
    as_json: bool,
) -> None:
    """`plan simulate --autoscale`: one controller, compared with the static fleet."""
    from planner.api.inputs import fleet_file_warnings, read_fleet
    from planner.day.day_api import DayResult
    from planner.day.day_api import day as run_day
    from planner.files.checked_files import write_file
    from planner.reports.output import requests_csv

    if controller is None:  # `plan simulate` also calls this for --start, which is useless by itself.
        raise InputError("--start: is for --autoscale; name a controller too, or drop it")
    if slo is None:
        raise InputError(
            "--autoscale: needs --slo, and goes with no --seeds, --closed-loop, --rate or --window: slo.yaml "
            "says rate and window"
        )
    terms = {"controllers": controller, "optimum": False} | ({} if start is None else {"start": start})
    with Progress() as progress:
        warnings = print_warnings(
            fleet_file_warnings(fleet, read_fleet(fleet, catalog, slo=slo), slo=slo, catalog=catalog)
        )
        requests = read_requests(trace, slo, catalog, seed=seed, drop_invalid=drop_invalid)
        day_result = run_day(
            slo, requests, standing=fleet, terms=terms, catalog=catalog, seed=seed, progress=progress
        )
        if not isinstance(day_result, DayResult):
            raise InputError(f"{slo}: llms: --autoscale takes one LLM; ask `plan day` for all of them")
        if out is not None:
            # Row 0 is the static fleet, the last row the controller.
            write_file(out, requests_csv(day_result.answer.rows[-1].run.simulation))
    if as_json:
        print_json(day_result.to_dict(), warnings + requests.warnings)
    else:
        print_answer(day_result.answer)


def print_answer(answer: DayAnswer) -> None:
    """Print the day of one LLM: recommendation, bounds, and what each controller costs and why."""
    from planner.day import day_causes, day_page

    print_lines(day_page.recommendation_sentence(answer), style="bold")
    print_lines(
        *day_page.timetable_lines(answer), day_page.standing_line(answer), *day_page.proof_lines(answer)
    )
    head, rows = day_page.day_table(answer)
    print_table(head, rows, "controllers")
    if by_cause := day_causes.cause_columns(answer):
        print_rows(by_cause, "USD above the optimum by cause, and windows missed by cause")
    if answer.fleets:
        fleets = [dict(zip(day_page.FLEETS_HEAD, row, strict=True)) for row in day_page.fleet_rows(answer)]
        print_rows(fleets, "fleets that could stand")
    print_lines(*day_page.settings_lines(answer), *answer.warnings)


def print_joint_answer(answer: JointAnswer) -> None:
    """Print the day of several LLMs that share one stock, with the settings of each."""
    from planner.day import day_page, several_llms_day_page

    print_lines(several_llms_day_page.joint_recommendation(answer), style="bold")
    print_lines(several_llms_day_page.standing_line(answer), *several_llms_day_page.proof_lines(answer))
    head, rows = several_llms_day_page.joint_table(answer)
    print_table(head, rows, "controllers")
    for name, day_answer in answer.by_llm.items():
        notes = day_answer.question.start_notes if day_answer.question.sleep_level else ()
        print_lines(*(f"{name}: {line}" for line in (*notes, *day_page.settings_lines(day_answer))))
    print_lines(*several_llms_day_page.shared_lines(answer), *answer.warnings)
