"""`plan simulate`: a fleet on a trace, request by request. Imports within functions keep other commands
fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands import shared_options
from planner.commands.command_output import (
    SLO_MISSED,
    Progress,
    print_warnings,
    read_requests,
    refuse_to_overwrite,
    traffic_option,
)
from planner.commands.day_command import run_controller
from planner.commands.printed_tables import (
    loud_verdict,
    print_json,
    print_mapping,
    print_rows,
    seconds_cell,
    slo_rows,
)
from planner.domain import Slo
from planner.errors import InputError
from planner.files.document_values import show_value
from planner.slo_metrics import latency_columns, metric_label, verdict_word
from planner.units import count_text, show_percent, show_share

if TYPE_CHECKING:
    from planner.api.simulating import SeedsResult, SimulationResult
    from planner.fleet import Fleet
    from planner.traffic.trace import Trace

MOST_TENANTS = 20  # Tenants in the table; --json has all.
AutoscaleOption = Annotated[
    str | None,
    typer.Option("--autoscale", help="Name of a controller that resizes pools: docs/controllers.md."),
]
ClosedLoopOption = Annotated[
    int,
    typer.Option("--closed-loop", min=0, help="Keep this many requests in flight instead of arrival times."),
]
StartOption = Annotated[
    str | None, typer.Option("--start", help="With --autoscale: time until a worker is ready.")
]

ExplainOption = Annotated[
    bool, typer.Option("--explain-routing", help="Compare the routing with the best packing of its requests.")
]
MomentsOption = Annotated[
    int | None, typer.Option("--explain-moments", help="With --explain-routing: at this many moments (20).")
]
OperatorsOption = Annotated[
    bool, typer.Option("--operators", help="Which operators the steps spend their time on.")
]

SeedsOption = Annotated[
    int, typer.Option("--seeds", min=1, max=10_000, help="Simulate this many seeds, from --seed on.")
]


def simulate(
    fleet_file: Annotated[Path, typer.Option("--fleet", readable=False, help="fleet.yaml, or a plan.yaml.")],
    trace: shared_options.TraceOption = None,
    out: Annotated[Path | None, shared_options.out_file("Write one row per request to this CSV.")] = None,
    slo: shared_options.SloOption = None,
    closed_loop: ClosedLoopOption = 0,
    rate: shared_options.RateOption = None,
    scale: shared_options.ScaleOption = "superpose",
    window: shared_options.WindowOption = None,
    catalog: shared_options.CatalogOption = None,
    seed: shared_options.SeedOption = 0,
    autoscale: AutoscaleOption = None,
    start: StartOption = None,
    seeds: SeedsOption = 1,
    executor: shared_options.ExecutorOption = None,
    address: shared_options.AddressOption = None,
    explain_routing: ExplainOption = False,
    explain_moments: MomentsOption = None,
    operators: OperatorsOption = False,
    drop_invalid: shared_options.DropOption = False,
    quiet: shared_options.QuietOption = False,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Simulate a fleet on a trace, request by request, and hold it against an SLO if one is given.

    With --slo the traffic section of that file applies, unless --rate or --window say otherwise: `--window
    whole` takes the trace as it is, such as the requests.csv of a plan. With --seeds every figure comes with
    its 95 % interval, and -o writes the first seed's requests. With --autoscale the counts of the fleet are
    those at the beginning; `plan day` compares controllers. Exit code 5: the SLO is missed, with --seeds by
    one of them.
    """
    from planner.api.inputs import fleet_file_warnings, read_fleet
    from planner.api.simulating import simulate as simulate_fleet
    from planner.documents.catalog import read_catalog
    from planner.documents.question_warnings import slo_and_traffic_warnings
    from planner.files.checked_files import check_output_file
    from planner.parallel.executors import Executor

    runs_on = Executor(executor or "processes", address)
    if seeds == 1 and (executor or address):
        raise InputError("--executor: one seed is simulated here; ask for several with --seeds")
    _needs_one_run({"--operators": operators, "--explain-routing": explain_routing}, seeds, autoscale)
    moments = _moments_to_explain(explain_routing, explain_moments)
    if out is not None:
        check_output_file(out)
        refuse_to_overwrite([out], fleet_file, trace, slo)
    if autoscale is not None or start is not None:
        # A controller excludes several seeds, a closed loop, a rate and a window. With one of these the SLO
        # file is not passed on, so that `run_controller` raises an error that names them all.
        limits = None if seeds > 1 or closed_loop or rate or window else slo
        settings = (autoscale, start, catalog, seed, out, drop_invalid, json_output)
        return run_controller(fleet_file, trace, limits, *settings)
    with Progress(quiet=quiet) as progress:
        all_rows = read_catalog(catalog)
        fleet = read_fleet(fleet_file, all_rows, slo=slo)
        warnings = print_warnings(fleet_file_warnings(fleet_file, fleet, slo=slo, catalog=all_rows))
        traffic = traffic_option(rate, scale, window)
        requests = read_requests(
            trace, slo, all_rows, seed=seed, drop_invalid=drop_invalid, is_rate_given=traffic is not None
        )
        warnings += requests.warnings + _print_unmodelled(fleet, requests)
        seeds_text = "" if seeds == 1 else f"{seeds} seeds of "
        requests_text = seeds_text + count_text(len(requests), "request")
        progress(f"simulating {requests_text} on {count_text(fleet.workers, 'worker')}")
        run = partial(
            simulate_fleet, fleet, requests, slo, traffic=traffic, catalog=all_rows, closed_loop=closed_loop
        )
        result = run(seed=seed) if seeds == 1 else run(seed=range(seed, seed + seeds), executor=runs_on)
        answer = result.to_dict() | _explained(result, moments, operators)
        if result.slo is not None:
            warnings += print_warnings(slo_and_traffic_warnings(result.slo, requests))
        if out is not None:
            result.save(out)
    if json_output:
        print_json(answer, warnings)
    else:
        _print_result(result, answer, range(seed, seed + seeds))
    if result.holds is False:
        raise typer.Exit(SLO_MISSED)


def _print_result(result: SimulationResult | SeedsResult, answer: dict[str, Any], seeds: range) -> None:
    """The tables of one run, or those of several seeds."""
    from planner.api.simulating import SeedsResult
    from planner.reports.words import rejected_text

    workers_text = count_text(result.fleet.workers, "worker")
    if isinstance(result, SeedsResult):
        _print_seeds(answer, result.slo, f"seeds {seeds[0]} to {seeds[-1]} on {workers_text}")
    else:
        title = f"{count_text(answer['requests'], 'request')} on {workers_text}"
        rejected = rejected_text(result.outcome.simulation, result.fleet)
        _print_simulation(answer, result.slo, title, rejected)


def _explained(result: SimulationResult, moments: int, operators: bool) -> dict[str, Any]:
    """The keys that --explain-routing (at `moments` moments; 0: without it) and --operators add."""
    from planner.studies.routing_moments import routing_document

    routing = {"routing": routing_document(result.explain_routing(moments))} if moments else {}
    return routing | ({"operators": result.operator_rows()} if operators else {})


def _print_unmodelled(fleet: Fleet, requests: Trace) -> tuple[str, ...]:
    """Print and return warnings of what a simulation of these requests on this fleet does not model."""
    from planner.reports.fact_sentences import fact_sentences_of
    from planner.reports.words import spot_caveat
    from planner.search.evidence.findings import image_warnings, uncounted_prefix_warnings

    warnings = [spot] if (spot := spot_caveat(fleet)) else []
    if fleet.engine is not None and fleet.engine.is_nearest:
        warnings.append(f"engine {fleet.engine.title}: {fleet.engine.basis}")
    uncounted = [*image_warnings(fleet, requests), *uncounted_prefix_warnings(fleet.policies, requests)]
    return print_warnings([*warnings, *fact_sentences_of(uncounted)])


def _needs_one_run(options: Mapping[str, bool], seeds: int, autoscale: str | None) -> None:
    """Refuse `options`, which explain one run of a fixed fleet, together with --seeds or --autoscale."""
    if seeds == 1 and autoscale is None:
        return
    conflicting = "--seeds" if seeds > 1 else "--autoscale"
    for name, is_given in options.items():
        if is_given:
            raise InputError(f"{name}: looks at one run of a fixed fleet; drop {conflicting}")


def _moments_to_explain(is_explained: bool, moments: int | None) -> int:
    """At how many moments the routing is explained; 0 without --explain-routing."""
    from planner.studies.routing_moments import DEFAULT_MOMENTS, check_moments

    if moments is not None and not is_explained:
        raise InputError("--explain-moments: goes with --explain-routing, which is missing")
    if moments is not None:
        check_moments(moments)
        return moments
    return DEFAULT_MOMENTS if is_explained else 0


def _pool_cells(pool: dict[str, Any]) -> dict[str, str]:
    """A row of the table of pools, from an entry of `pools` in the JSON answer."""

    def percent_of(key: str) -> str:
        return "-" if pool[key] is None else show_percent(pool[key])

    batch = "-" if pool["decodes_mean"] is None else f"{pool['decodes_mean']:.1f} ({pool['decodes_p99']:.0f})"
    return {
        "pool": pool["pool"],
        "in a step": percent_of("busy_frac"),
        "MFU": percent_of("mfu_frac"),
        "bandwidth": percent_of("bandwidth_frac"),
        "KV cache (most)": f"{percent_of('kv_mean_frac')} ({percent_of('kv_most_frac')})",
        "decodes in a step (p99)": batch,
    }


def _operator_cells(row: dict[str, Any]) -> dict[str, str]:
    """A row of the table of operators, from an entry of `operators` in the JSON answer."""
    share_frac, size = row["share_frac"], row["mean_input"]
    return {
        "pool": row["pool"],
        "operator": row["operator"],
        "share of step time": "-" if share_frac is None else show_percent(share_frac),
        "in all": seconds_cell(row["seconds"]),
        "mean input of a step": "-" if size is None else f"{size:,.0f} {row['unit']}",
    }


def _print_simulation(summary: dict[str, Any], slo: Slo | None, title: str, rejected: str) -> None:
    """The tables of one run: latencies, pools, counts, tenants, routing, operators and the SLO."""
    from planner.reports.fact_sentences import backlog_text

    rows = []
    for name in latency_columns():
        if summary[name]:
            rows.append(
                {
                    "metric": metric_label(name.removesuffix("_s")),
                    **{key: seconds_cell(value) for key, value in summary[name].items()},
                }
            )
    print_rows(rows, title)
    print_rows([_pool_cells(pool) for pool in summary["pools"]], "")
    counts = {
        key: summary[key] for key in ("finished", "rejected", "unfinished", "preemptions") if summary[key]
    }
    rates = {
        f"{key} (to the last answer)": round(summary[key], 3)
        for key in ("requests_per_s", "output_tokens_per_s")
        if summary[key]
    }
    watts = {"expected_w": round(summary["power"]["expected_w"], 1)} if summary["power"] else {}
    hit_frac = summary["token_hit_frac"]
    hits = {} if hit_frac is None else {"prompt tokens found cached": show_percent(hit_frac)}
    if (reload_frac := summary["token_reload_frac"]) is not None:
        hits |= {
            "prompt tokens found in CPU memory": show_percent(reload_frac),
            "prompt tokens computed": show_percent(1 - hit_frac - reload_frac),
            "waited for loads": seconds_cell(summary["reload_s"]),
        }
    print_mapping(counts | rates | hits | watts, "")
    if rejected:
        print_mapping({"rejected": rejected}, "")
    if costs := summary.get("tenant_costs"):
        dearest = costs[:MOST_TENANTS]
        print_rows(
            [
                row | {"tenant": _printable(row["tenant"]), "share_frac": show_percent(row["share_frac"])}
                for row in dearest
            ],
            f"cost by tenant, of {len(costs)}",
        )
    if routing := summary.get("routing"):
        _print_routing(routing)
    if operators := summary.get("operators"):
        print_rows([_operator_cells(row) for row in operators], "step time by operator")
    if summary["slo"]:
        lines = slo_rows(summary["slo"], slo)
        print_rows(
            lines, f"SLO: {loud_verdict(verdict_word(summary['slo']['holds'], summary['slo']['is_judged']))}"
        )
        if not summary["slo"]["is_steady"]:
            slo_summary = summary["slo"]
            print_mapping(
                {"steady": f"no: {backlog_text(slo_summary['patient_frac'], slo_summary['patience_s'])}"}, ""
            )


def _print_routing(routing: dict[str, Any]) -> None:
    """The moments as a table, and a sentence per role."""

    def fewest_cell(row: dict[str, Any]) -> str:
        # Without a packing, the solver's bound may still show that all workers are too few.
        if row["fewest"] is None:
            return f"more than {row['workers']}" if row["fewest_bound"] > row["workers"] else "none found"
        return f"{row['fewest']}" if row["is_fewest"] else f"{row['fewest_bound']} to {row['fewest']}"

    def least_load_cell(row: dict[str, Any]) -> str:
        load = show_percent(row["least_load_frac"])
        return load if row["is_least"] else f"{100 * row['least_load_bound_frac']:.1f} to {load}"

    rows = [
        {
            "moment": seconds_cell(row["time_s"]),
            "role": row["role"],
            "requests": row["requests"],
            "workers in use": f"{row['used']} of {row['workers']}",
            "fewest": fewest_cell(row),
            "largest load": show_percent(row["largest_load_frac"]),
            "least": least_load_cell(row),
        }
        for row in routing["moments"]
    ]
    print_rows(rows, "routing, beside the best packing of the same requests")
    for sentence in routing["summary"]:
        print_mapping({"routing": sentence}, "")


def _printable(name: str) -> str:
    """A name from a trace, without control characters for the terminal."""
    return name if name.isprintable() else show_value(name)


def _print_seeds(summary: dict[str, Any], slo: Slo | None, title: str) -> None:
    """Print the mean and interval of each latency over the seeds, the range of each count, and how many seeds
    keep each line of the SLO.
    """
    seeds_count = len(summary["seeds"])
    rows = [
        {"metric": metric_label(name.removesuffix("_s"))}
        | {key: _interval_cell(value) for key, value in summary[name].items()}
        for name in latency_columns()
        if name in summary
    ]
    print_rows(rows, f"{title}: mean ± 95 % interval over the seeds")
    counts = {
        key: f"{summary[key]['least']:.6g} to {summary[key]['most']:.6g}"
        for key in ("requests", "rejected", "unfinished", "preemptions", "output_tokens_per_s", "expected_w")
        if summary[key]["most"]
    }
    print_mapping(counts, "")
    if summary["slo"]:
        lines = [
            {
                "metric": metric_label(line["limit"]),
                "limit": seconds_cell(line["limit_s"]),
                "simulated": _interval_cell(line["simulated_s"]),
                "within": show_share(line["kept_frac"]["mean"]) if line["judged"] else "-",
                "kept by": f"{line['kept_by']} of {seeds_count} seeds" if line["judged"] else "not judged",
            }
            for line in summary["slo"]["lines"]
        ]
        if slo is not None and slo.attainment_frac is not None:
            share = summary["slo"]["attainment_frac"]
            lines.append(
                {
                    "metric": "attainment",
                    "limit": show_percent(slo.attainment_frac, "g"),
                    "simulated": f"{show_share(share['mean'])}, {show_share(share['least'])} at least",
                    "within": "all limits at once",
                    "kept by": "",
                }
            )
        kept_by = f"kept by {summary['slo']['kept_by']} of {seeds_count} seeds"
        print_rows(lines, f"SLO: {kept_by if summary['slo']['is_judged'] else 'not judged'}")
        if summary["slo"]["steady"] < seeds_count:
            print_mapping(
                {"steady": f"{summary['slo']['steady']} of {seeds_count}; the backlog of the others grows"},
                "",
            )
    for note in summary["notes"]:
        print_mapping({"note": note}, "")


def _interval_cell(value: dict[str, float | None]) -> str:
    """The mean ± half of the width of the 95 % interval; `high` is the interval's upper end."""
    if value["mean"] is None or value["high"] is None:
        return "-"
    half_s = value["high"] - value["mean"]
    return f"{seconds_cell(value['mean'])} ± {seconds_cell(float(f'{half_s:.2g}'))}"
