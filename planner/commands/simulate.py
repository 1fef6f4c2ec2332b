"""`plan simulate`: a fleet on a trace, request by request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from planner.catalog import read_catalog
from planner.commands.common import (
    TRACE_HELP,
    CatalogOption,
    JsonOption,
    Progress,
    SeedOption,
    SloOption,
    keep_inputs,
    print_json,
    print_mapping,
    print_rows,
    scaling,
    seconds_cell,
)
from planner.errors import InputError


def simulate(
    fleet: Annotated[Path, typer.Option("--fleet", readable=False, help="fleet.yaml, or a plan.yaml.")],
    trace: Annotated[Path, typer.Option("--trace", readable=False, help=TRACE_HELP)],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", readable=False, help="Write one row per request to this CSV."),
    ] = None,
    slo: SloOption = None,
    closed_loop: Annotated[
        int,
        typer.Option(
            "--closed-loop", min=0, help="Keep this many requests in flight instead of arrival times."
        ),
    ] = 0,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Rescale the trace to this many requests/s.")
    ] = None,
    scale: Annotated[str, typer.Option("--scale", help="How: superpose, compress or thin.")] = "superpose",
    window: Annotated[
        str | None, typer.Option("--window", help="Part of the trace: whole, 'busiest 10 min'.")
    ] = None,
    catalog: CatalogOption = None,
    seed: SeedOption = 0,
    json_output: JsonOption = False,
) -> None:
    """Simulate a fleet on a trace, request by request, and hold it against an SLO if one is given.

    With --slo the traffic section of that file applies, unless --rate or --window say otherwise: `--window
    whole` takes the trace as it is, such as the requests.csv of a plan.
    """
    import numpy as np

    from planner import files, output
    from planner.domain import Slo
    from planner.fleetfile import read_fleet
    from planner.planning import asked_traffic
    from planner.simulator import judge
    from planner.simulator import simulate as run
    from planner.simulator.energy import expected_power
    from planner.slo import read_task
    from planner.traces import read_trace
    from planner.traffic import rescale
    from planner.traffic import window as part_of

    if out is not None:
        files.check_output_file(out)
        keep_inputs([out], fleet, trace, slo)
    with Progress() as progress:
        known = read_catalog(catalog)
        engines = read_fleet(fleet, known)
        task = read_task(slo, known) if slo is not None else None
        if task is not None and task.slowdowns is not None:
            raise InputError(
                f"{slo}: `simulate` needs limits in seconds, found the relative preset {task.preset!r}"
            )
        how = scaling(scale)
        requests = read_trace(trace, seed=seed)
        if task is not None and rate is None and window is None:
            requests, _ = asked_traffic(requests, task, seed=seed)
        else:
            if rate is not None:
                requests = rescale(requests, rate, how=how, rng=np.random.default_rng(seed))
            requests = part_of(requests, "whole" if window is None else window)
        progress(f"simulating {len(requests)} requests on {engines.workers} workers")
        promise = task.slo if task is not None else Slo(())
        simulation = run(engines, requests, limits=promise.limits, record=True, closed_loop=closed_loop)
        verdict = judge(simulation, promise) if task is not None else None
        power = expected_power(engines, simulation)
    if out is not None:
        files.write_file(out, output.requests_csv(simulation))
    summary = output.simulation_summary(simulation, verdict) | {"power": output.power_document(power)}
    if json_output:
        print_json(summary)
    else:
        _print_simulation(summary, f"{len(requests)} requests on {engines.workers} workers")


def _print_simulation(summary: dict[str, Any], title: str) -> None:
    rows = []
    for name in ("queue_s", "ttft_s", "tbt_s", "tpot_s", "e2e_s"):
        if summary[name]:
            rows.append(
                {"metric": name[:-2], **{key: seconds_cell(value) for key, value in summary[name].items()}}
            )
    print_rows(rows, title)
    counts = {
        key: summary[key] for key in ("finished", "rejected", "unfinished", "preemptions") if summary[key]
    }
    rates = {key: round(summary[key], 3) for key in ("requests_per_s", "output_tokens_per_s") if summary[key]}
    watts = {"expected_w": round(summary["power"]["expected_w"], 1)} if summary["power"] else {}
    print_mapping(counts | rates | watts, "")
    if summary["slo"]:
        lines = [
            {
                "limit": line["limit"], "promised": seconds_cell(line["limit_s"]),
                "simulated": seconds_cell(line["simulated_s"]), "within": f"{100 * line['kept_frac']:.2f} %",
                "verdict": "kept" if line["holds"] else "MISSED",
            }
            for line in summary["slo"]["lines"]
        ]  # fmt: skip
        print_rows(lines, "SLO: " + ("kept" if summary["slo"]["holds"] else "MISSED"))
        if not summary["slo"]["is_steady"]:
            print_mapping({"steady": "no: the backlog grows"}, "")
