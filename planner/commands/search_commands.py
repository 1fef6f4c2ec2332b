"""`plan goodput` and `plan search`: the highest rate of a fleet, and the papers' searches over fleets.
Imports within functions keep other commands fast.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.commands import shared_options
from planner.commands.command_output import (
    Progress,
    print_warnings,
    read_requests,
    refuse_to_overwrite,
    stopped_after,
)
from planner.commands.printed_tables import print_json, print_mapping, print_rows
from planner.commands.study_options import SloArgument, TraceArgument
from planner.documents.traffic_description import describes_traffic
from planner.errors import InputError
from planner.traffic.scaling import headroom_scale
from planner.units import count_text, show_beside, show_digits

if TYPE_CHECKING:
    from planner.api.simulating import GoodputResult
    from planner.documents.catalog import Catalog
    from planner.traffic.scaling import RateRequest


class Arrivals(StrEnum):
    """When requests arrive: as in the trace, rescaled to a rate, or at random (Poisson)."""

    trace = "trace"
    poisson = "poisson"


class Formulation(StrEnum):
    """The paper whose search of placements is run."""

    distserve = "distserve"
    vidur = "vidur"
    splitwise = "splitwise"


SeedsOption = Annotated[
    int,
    typer.Option(
        "--seeds", min=1, max=1000, help="How many seeds. A rate counts if it holds with each of them."
    ),
]
ToleranceOption = Annotated[
    float,
    typer.Option(
        "--tolerance",
        min=1e-4,
        max=1.0,
        help="How near the rate must be to one that fails, as a share of it.",
    ),
]
TimeOption = Annotated[
    float, typer.Option("--time-limit", min=0.1, help="Seconds after which the search is given up.")
]
USUAL_LIMIT_S = 1800.0  # The default of --time-limit; set by hand.


def find_goodput(
    plan: Annotated[
        Path | None,
        typer.Argument(readable=False, help="plan.yaml or its folder, with its SLO and its traffic."),
    ] = None,
    fleet: Annotated[
        Path | None, typer.Option("--fleet", readable=False, help="fleet.yaml, or a plan.yaml.")
    ] = None,
    slo: shared_options.SloOption = None,
    trace: TraceArgument = None,
    arrivals: Annotated[
        Arrivals,
        typer.Option(
            "--arrivals", help="trace: as in the trace, rescaled; poisson: drawn, with its lengths."
        ),
    ] = Arrivals.trace,
    scale: shared_options.ScaleOption | None = None,
    window: shared_options.WindowOption = None,
    seeds: SeedsOption = 3,
    tolerance: ToleranceOption = 0.02,
    catalog: shared_options.CatalogOption = None,
    drop_invalid: shared_options.DropOption = False,
    time_limit: TimeOption = USUAL_LIMIT_S,
    quiet: shared_options.QuietOption = False,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Find the highest rate at which a fleet keeps an SLO, in steady state.

    Where no SLO or no trace is given, the plan's own counts. The rate in the SLO's traffic section is
    not used. Exit code 3: no rate is kept. 4: not found in time.
    """
    from planner.api.inputs import fleet_file_warnings, is_plan_folder, planned_slo_and_trace, read_fleet
    from planner.api.simulating import goodput
    from planner.documents.catalog import read_catalog

    file = _fleet_or_plan(plan, fleet, slo)
    if arrivals == Arrivals.poisson and window is not None:
        raise InputError("--window: is for --arrivals trace; drop it, or give a trace of that part alone")
    holds_at_rate: dict[float, bool] = {}
    with Progress(quiet=quiet) as progress, stopped_after(time_limit, lambda: _bracket_text(holds_at_rate)):
        catalog_rows = read_catalog(catalog)
        searched_fleet = read_fleet(file, catalog_rows, slo=slo)
        warnings = print_warnings(fleet_file_warnings(file, searched_fleet))
        asked = _asked_traffic(slo, scale, window, catalog_rows)
        traffic = None if scale is None and window is None else asked
        # Whether the requests are the plan's own. The SLO may be the plan's even with other requests.
        is_planned = trace is None and is_plan_folder(file) and (slo is None or not describes_traffic(slo))
        planned = planned_slo_and_trace(file, catalog_rows) if is_planned or slo is None else None
        planned_slo, planned_trace = (None, None) if planned is None else planned
        if is_planned and planned_trace is not None:
            requests = planned_trace
        else:
            requests = read_requests(
                trace, slo, catalog_rows, drop_invalid=drop_invalid, is_rate_given=traffic is not None
            )
        progress(f"searching the goodput of {count_text(searched_fleet.workers, 'worker')}")

        def note_rate(rate_rps: float, holds: bool | None) -> None:
            if holds is None:  # The simulation at this rate begins.
                progress(f"{show_digits(rate_rps, 4)} requests/s")
            else:
                holds_at_rate[rate_rps] = holds

        result = goodput(
            searched_fleet,
            requests,
            planned_slo if slo is None else slo,
            traffic="poisson" if arrivals == Arrivals.poisson else traffic,
            seeds=seeds,
            tolerance_frac=tolerance,
            catalog=catalog_rows,
            watch=note_rate,
        )
    if json_output:
        print_json(result.to_dict(), warnings + requests.warnings)
    else:
        own = headroom_scale(requests) if is_planned else None
        _print_goodput(result, None if arrivals == Arrivals.poisson else asked.scale, own)


def _asked_traffic(slo: Path | None, scale: str | None, window: str | None, catalog: Catalog) -> RateRequest:
    """How the trace is brought to a rate, and its window: by the options, else as the question says."""
    from planner.api.inputs import limits_and_rate
    from planner.traffic.scaling import RateRequest, checked_scale

    asked = RateRequest() if slo is None else limits_and_rate(slo, catalog, command="goodput")[1]
    chosen = asked.scale if scale is None else checked_scale(scale, "--scale")
    return replace(asked, scale=chosen, window=window or asked.window)


def _fleet_or_plan(plan: Path | None, fleet: Path | None, slo: Path | None) -> Path:
    """The file of the fleet: `plan` or `fleet`. Raises InputError where both or neither are given, and for a
    fleet without an SLO.
    """
    from planner.api.inputs import is_plan_folder

    file = plan or fleet
    has_both = plan is not None and fleet is not None
    if file is None or has_both:
        raise InputError("expected PLAN, or --fleet, not both: plan goodput out/plan.yaml")
    if slo is None and not is_plan_folder(file):
        raise InputError(f"--slo is missing, and {file} is no plan: it has no certificate.json beside it")
    return file


def _print_goodput(result: GoodputResult, scale: str | None, own_scale: str | None) -> None:
    """Print the rate and its cost, notes, and the simulated limits at this rate. `scale` says how the trace
    was brought to it (None: Poisson arrivals), `own_scale` how a plan's headroom makes more of its requests.
    """
    more_is = "drawn at random" if scale is None else f"{scale}: {shared_options.SCALES[scale]}"
    document = result.to_dict()
    print_mapping(
        {
            "goodput": f"{show_digits(document['rate_rps'], 4)} requests/s on "
            f"{count_text(document['gpus'], 'GPU')}, {show_digits(document['gpu_rate_rps'], 3)} per GPU; "
            f"kept with each of {count_text(document['seeds'], 'seed')}",
            "more traffic is": more_is,
            "fails at": f"{show_digits(result.fails_rps, 4)} requests/s",
            "cost": f"{show_digits(document['usd_per_1000_requests'], 3)} USD per 1000 requests",
        },
        "",
    )
    for sentence in result.sentences():
        print_mapping({"note": sentence}, "")
    if own_scale is not None and own_scale != scale:
        words = f"{own_scale}: {shared_options.SCALES[own_scale]}"
        print_mapping({"note": f"the plan's headroom is {words}; --scale {own_scale} asks for that"}, "")
    rows = [
        {"metric": limit.label, "limit": limit_text, "simulated": value_text}
        for limit, value_s in result.fleet_goodput.values_s.items()
        for value_text, limit_text in [show_beside(value_s, limit.limit_s)]
    ]
    print_rows(
        rows, f"at {show_digits(document['rate_rps'], 4)} requests/s, {document['requests']:,} requests"
    )


def _bracket_text(holds_at_rate: dict[float, bool]) -> str:
    """The simulated rates between which the goodput lies, for the error of a stopped search."""
    holding_rps = [rate for rate, holds in holds_at_rate.items() if holds]
    failing_rps = [rate for rate, holds in holds_at_rate.items() if not holds]
    parts = [f"{show_digits(max(holding_rps), 4)} requests/s hold"] if holding_rps else []
    parts += [f"{show_digits(min(failing_rps), 4)} do not"] if failing_rps else []
    return f" ({', '.join(parts)})" if parts else ""


def search(
    formulation: Annotated[Formulation, typer.Argument(help="distserve, vidur or splitwise.")],
    slo: SloArgument,
    trace: TraceArgument = None,
    rate: shared_options.RateOption = None,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, help="distserve: an instance may lie on this many nodes.")
    ] = 1,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="vidur: GPUs of the deployment.")] = 8,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", help="vidur: all requests at once; least makespan, the SLO does not count."
        ),
    ] = False,
    seeds: SeedsOption = 1,
    out: Annotated[Path | None, shared_options.out_file("Write the best fleet to this fleet.yaml.")] = None,
    catalog: shared_options.CatalogOption = None,
    seed: shared_options.SeedOption = 0,
    drop_invalid: shared_options.DropOption = False,
    time_limit: TimeOption = USUAL_LIMIT_S,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Search fleets as the papers do, on the planner's fits, and in steady state.

    distserve: Algorithms 1 and 2, and free counts of prefill and decode instances, for the rate asked.
    vidur: requests per dollar over TP x PP x batching x token budget x sequences, with Pareto frontiers;
    with --offline all requests arrive at once, and the time and the bill of the whole trace count.
    splitwise: machines of each design for the rate asked; needs an SLO of slowdowns, `preset: splitwise`.
    With `objective: throughput` and limits of power or cost: the most each design carries within that.
    Arrivals are Poisson, lengths those of the trace. Exit code 4: not found in time.
    """
    from planner.api.questions import read_task
    from planner.documents.catalog import read_catalog
    from planner.documents.fleet_file import fleet_document
    from planner.files.checked_files import check_output_file, to_yaml, write_file
    from planner.papers.searches import PaperQuestion, search_as
    from planner.traffic.trace import spread_stamps

    if offline and (formulation != Formulation.vidur or rate is not None):
        conflict = "--rate" if formulation == Formulation.vidur else formulation.value
        raise InputError(
            f"--offline: is of vidur, with all requests at once, found {conflict}; drop one of them"
        )
    if out is not None:
        check_output_file(out)
        refuse_to_overwrite([out], slo, trace)
    with Progress() as progress, stopped_after(time_limit):
        catalog_rows = read_catalog(catalog)
        task = read_task(slo, catalog_rows).task()
        # Requests with one time stamp (logs in whole seconds) are spread, as `plan` does.
        requests = spread_stamps(
            read_requests(trace, slo, catalog_rows, seed=seed, drop_invalid=drop_invalid), seed=seed
        )
        if rate is not None and task.objective == "throughput":
            raise InputError(f"--rate: objective throughput looks for the rate, found {rate:g}; drop one")
        rate_rps = (task.rate_rps or requests.rate_rps) if rate is None else rate
        progress(f"searching as {formulation.value} does")
        answer = search_as(
            formulation.value,
            PaperQuestion(task, catalog_rows, requests, rate_rps, nodes, gpus, seeds, offline),
        )
    if out is not None:
        if answer.best is None:
            raise InputError(f"{out}: no fleet keeps the SLO, so there is none to write")
        write_file(out, to_yaml(fleet_document(answer.best)))
    if json_output:
        print_json({"formulation": formulation.value} | answer.document, requests.warnings)
    else:
        print_rows(answer.rows, f"{formulation.value}: {task.llm}")
