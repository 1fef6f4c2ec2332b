"""`plan watch`: does the plan still hold? Imports within functions keep other commands fast."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands import shared_options
from planner.commands.command_output import Progress
from planner.commands.printed_tables import print_json, print_lines
from planner.errors import InputError
from planner.units import parse_quantity

if TYPE_CHECKING:
    from planner.api.watch_api import MetricsSource, WatchResult
    from planner.studies.plan_watch import PlanExpectations

EXIT_CODES = {  # By `WatchResult.status`.
    "inside": 0,  # No drift, or a drift to less work.
    "drifted": 6,  # A drift to more work, which the plan's fleet carries or may carry.
    "outgrown": 5,  # A drift to more work than the plan's fleet can carry.
    "missed": 5,  # A limit of the SLO is missed now.
}
LEAST_EVERY_S = 1.0  # Querying more often would load the server and give no new samples.
NEW_FLEET = "replanned-fleet.yaml"


# With readable=False checked_files.py reports every fault of a file in the same way.
def watch(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", readable=False, help="plan.yaml, or its folder.")],
    prometheus: Annotated[
        list[str],
        typer.Option(
            "--prometheus", help="Address of a Prometheus, or files with answers of its query_range."
        ),
    ],
    slo: shared_options.SloOption = None,
    once: Annotated[
        bool, typer.Option("--once", help="Look once, as always at files; the exit code says how it stands.")
    ] = False,
    every: Annotated[str, typer.Option("--every", help="Time between two looks.")] = "5 min",
    window: Annotated[
        str, typer.Option("--window", help="Range to look at, back from now or from the end of the files.")
    ] = "24 h",
    step: Annotated[
        str, typer.Option("--step", help="Length of the intervals into which that range is cut.")
    ] = "1 min",
    model: Annotated[
        str | None, typer.Option("--model", help="Of several served models: the label model_name.")
    ] = None,
    match: Annotated[
        str, typer.Option("--match", help="Labels to ask for, as in PromQL: 'namespace=\"prod\"'.")
    ] = "",
    export: Annotated[
        str | None,
        typer.Option(
            "--export", help="Serve gauges for Prometheus: ':9109' to this machine, '0.0.0.0:9109' to all."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        shared_options.out_folder(
            "Folder for alert rules, a dashboard, watch.json and, with --slo, replanned-fleet.yaml."
        ),
    ] = None,
    catalog: shared_options.CatalogOption = None,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Hold live metrics of vLLM against a plan: what drifted, since when, and how far the plan still holds.

    With --slo (the question that the plan answers) a drift starts a new search, which says what it would
    change; with --out its fleet is written as replanned-fleet.yaml. Exit code of --once: 0 inside the plan,
    or with less to do; 6 drifted, while the plan holds or may hold; 5 the SLO is missed, or traffic is surely
    more than the plan carries.
    """
    from planner.api.watch_api import MetricsSource, read_planned
    from planner.files.checked_files import check_output_directory

    if out is not None:
        check_output_directory(out)
    every_s = parse_quantity(every, "s", where="--every")
    if every_s < LEAST_EVERY_S:
        raise InputError(f"--every: expected at least {LEAST_EVERY_S:g} s, found {every!r}")
    source = MetricsSource(
        tuple(prometheus),
        parse_quantity(window, "s", where="--window"),
        parse_quantity(step, "s", where="--step"),
        model,
        match,
    )
    if export is not None and (once or not source.is_server):
        raise InputError(
            "--export: goes with looking again and again at a server; leave --once and files out"
        )
    with Progress() as progress:
        progress("reading the plan")
        expected = read_planned(plan, catalog)
    if once or not source.is_server:
        result = _look_once(expected, source, slo, catalog=catalog, out=out, json_output=json_output)
        raise typer.Exit(EXIT_CODES[result.status])
    _look_repeatedly(
        expected, source, slo, every_s, export, catalog=catalog, out=out, json_output=json_output
    )


def _look_repeatedly(
    expected: PlanExpectations,
    source: MetricsSource,
    slo: Path | None,
    every_s: float,
    export: str | None,
    **options: Any,
) -> None:
    """Look every `every_s` seconds until the process ends. `options` are those of `_look_once`."""
    from planner.runtime.prometheus_server import PrometheusError
    from planner.runtime.watch_exporter import Exporter

    exporter = None if export is None else Exporter(export)
    next_s, result = time.monotonic(), None
    while True:
        try:
            result = _look_once(expected, source, slo, is_line=True, before=result, **options)
            if exporter is not None:
                exporter.show(result.watched)
        # The server may answer next time. Any other error ends the watch, such as answers without a whole
        # window of samples.
        except PrometheusError as error:
            typer.echo(f"plan: {error}", err=True)
        # If a look took longer than --every, the next look begins at once, and missed looks are skipped.
        next_s = max(next_s + every_s, time.monotonic())
        time.sleep(max(next_s - time.monotonic(), 0.0))


def _look_once(
    expected: PlanExpectations,
    source: MetricsSource,
    slo: Path | None,
    *,
    catalog: Path | None,
    out: Path | None,
    json_output: bool,
    is_line: bool = False,
    before: WatchResult | None = None,
) -> WatchResult:
    """Compare metrics with the plan once, print the result, write files.

    `is_line`: JSON on one line. `before` is the previous result, whose replan is reused if little has changed
    (`watch_api.look_once`).
    """
    from planner.api import watch_api
    from planner.documents.fleet_file import fleet_document
    from planner.files import checked_files
    from planner.manifests import monitoring

    with Progress() as progress:
        result = watch_api.look_once(expected, source, slo, catalog=catalog, progress=progress, before=before)
    document = result.to_dict()
    if out is not None:
        contents = {"watch.json": json.dumps(document, indent=2, allow_nan=False) + "\n"}
        # `keeps_running`: the search found that the running fleet holds and should stay.
        if result.replan is not None and not result.replan.keeps_running:
            contents[NEW_FLEET] = checked_files.to_yaml(fleet_document(result.replan.best.fleet))
        contents |= monitoring.watch_files(expected.written.fleet.llm.name)
        # `outdated`: a fleet of an earlier look is removed if this look writes none.
        checked_files.write_files(out, contents, outdated=[NEW_FLEET])
    if json_output and is_line:
        print(json.dumps(document, allow_nan=False), flush=True)  # noqa: T201
    elif json_output:
        print_json(document)
    else:
        print_lines(result.headline(), style="bold")
        print_lines(*result.sentences())
    return result
