"""The command line: files in, one library call, files and a short answer out.

stdout carries the answer (a table, or one JSON object with --json), stderr progress and errors. Exit codes:
0 done; 1 bad input or failure; 2 usage; 3 infeasible; 4 plan written but level 0 not exhausted in time.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.table import Table

from planner import __version__
from planner.catalog import Catalog, read_catalog
from planner.errors import InfeasibleError, InputError, PlannerError
from planner.slo import is_path
from planner.units import percentile_name, show_s

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
QUIET_S = 1.0  # work shorter than this is not talked about
LONGEST_MESSAGE = 2000
PIPE_COLUMNS = 500

TRACE_HELP = "The traffic: CSV or JSONL, plain or .gz."
# readable=False: files.py says what is wrong with a file, so that every kind of it ends alike
SloOption = Annotated[Path | None, typer.Option("--slo", readable=False, help="The question: slo.yaml.")]
TraceOption = Annotated[Path | None, typer.Option("--trace", readable=False, help=TRACE_HELP)]
CatalogOption = Annotated[
    Path | None,
    typer.Option(
        "--catalog", readable=False, help="Folder with your own gpus.yaml, llms.yaml, slos.yaml, latency/."
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def main() -> None:
    """Entry point: a PlannerError is one line on stderr and its exit code; anything else is our bug."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show × shows \xd7
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(_say(PlannerError(f"the answer cannot be written to stdout ({error.strerror})")))
    except InfeasibleError as error:
        if "--json" in sys.argv:
            _print_json(
                {
                    "status": "infeasible",
                    "kind": error.kind,
                    "constraint": error.constraint,
                    "relaxation": error.relaxation,
                    "message": str(error),
                }
            )
        sys.exit(_say(error))
    except PlannerError as error:
        sys.exit(_say(error))


def _say(error: PlannerError) -> int:
    message = " ".join(str(error).split())
    if len(message) > LONGEST_MESSAGE:  # it quotes a value that fills a file
        message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 4 :]}"
    print(f"plan: {message}", file=sys.stderr)  # noqa: T201
    return error.exit_code


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    slo: SloOption = None,
    trace: TraceOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", readable=False, help="Folder for the plan and all it needs.")
    ] = None,
    catalog: CatalogOption = None,
    seed: SeedOption = 0,
    time_limit: Annotated[
        float,
        typer.Option("--time-limit", min=0.1, help="Seconds after which the best plan so far is written."),
    ] = 120.0,
    json_output: JsonOption = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Find the cheapest fleet that keeps an SLO on a trace, with a certificate and all it takes to deploy it.

    plan --slo slo.yaml --trace azure.csv -o out/
    """
    if version:
        typer.echo(f"fleetplan {__version__}")
        return
    if context.invoked_subcommand is not None:
        return
    if slo is None and trace is None and out is None:
        typer.echo(context.get_help())
        return
    if slo is None or trace is None or out is None:
        typer.echo("plan: a plan needs all of --slo FILE, --trace FILE and -o DIR; see plan --help", err=True)
        raise typer.Exit(2)

    from planner import files, output, planning
    from planner.slo import read_task
    from planner.traces import read_trace

    files.check_output_directory(out)
    _keep_inputs([out / name for name in output.NAMES], slo, trace)
    with Progress() as progress:
        known = read_catalog(catalog)
        task = read_task(slo, known)
        requests = read_trace(trace, seed=seed)
        progress(f"read {len(requests)} requests from {trace.name}")
        found = planning.plan(task, requests, known, seed=seed, time_limit_s=time_limit, progress=progress)
        progress("writing the report")
        files.write_files(out, output.render(found), outdated=output.OUTDATED)
    if json_output:
        _print_json(output.to_json(found) | {"directory": str(out)})
    else:
        _print_plan(found, out)
    if not found.certificate.level0_exact:
        raise typer.Exit(4)


@app.command()
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
        _keep_inputs([out], fleet, trace, slo)
    with Progress() as progress:
        known = read_catalog(catalog)
        engines = read_fleet(fleet, known)
        task = read_task(slo, known) if slo is not None else None
        if task is not None and task.slowdowns is not None:
            raise InputError(
                f"{slo}: `simulate` needs limits in seconds, found the relative preset {task.preset!r}"
            )
        how = _scaling(scale)
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
        _print_json(summary)
    else:
        _print_simulation(summary, f"{len(requests)} requests on {engines.workers} workers")


@app.command("trace")
def describe_trace(
    trace: Annotated[Path, typer.Argument(readable=False, help="CSV or JSONL, plain or .gz.")],
    seed: SeedOption = 0,
    json_output: JsonOption = False,
) -> None:
    """Describe a trace: counts, lengths, rates, burstiness, prefix sharing, dropped rows by reason."""
    from planner.traces import read_trace
    from planner.workload import describe

    with Progress():
        summary = describe(read_trace(trace, seed=seed)).as_dict()
    if json_output:
        _print_json(summary)
    else:
        _print_mapping(summary, str(trace))


@app.command("catalog")
def show_catalog(
    what: Annotated[str, typer.Argument(help="gpus, llms, slos or latency.")] = "gpus",
    catalog: CatalogOption = None,
    json_output: JsonOption = False,
) -> None:
    """Print what the planner knows: GPUs with prices, LLM shapes, SLO presets, step-time fits."""
    known = read_catalog(catalog)
    tables = {"gpus": _gpu_rows, "llms": _llm_rows, "slos": _slo_rows, "latency": _latency_rows}
    if what not in tables:
        raise InputError(f"catalog: {what!r} is not one of {', '.join(tables)}")
    rows = tables[what](known)
    if json_output:
        if what != "latency":  # a fit says in its basis where it comes from
            rows = [row | _provenance(known, next(iter(row.values()))) for row in rows]
        _print_json({what: rows})
    else:
        _print_rows(rows, what)


class Progress:
    """Tells stages on stderr once the work takes longer than a moment."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.start_s = time.monotonic()
        self.status = self.console.status("") if sys.stderr.isatty() else None

    def __call__(self, message: str) -> None:
        elapsed_s = time.monotonic() - self.start_s
        if self.status is not None:
            self.status.update(message)
            self.status.start()
        elif elapsed_s > QUIET_S:
            self.console.print(f"[{elapsed_s:5.1f} s] {message}", markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is not None:
            self.status.stop()  # also after an error: the terminal gets its cursor back


def _keep_inputs(outputs: Iterable[Path], *inputs: Path | None) -> None:
    """Refuse to write over what is being read."""
    for path in outputs:
        for given in inputs:
            if given is not None and is_path(str(path)) and is_path(str(given)) and path.samefile(given):
                raise InputError(f"{given}: would be written over; name another place with -o")


def _scaling(how: str) -> Any:
    if how not in ("superpose", "compress", "thin"):
        raise InputError(f"--scale: expected superpose, compress or thin, found {how!r}")
    return how


def _console(*, soft_wrap: bool = False) -> Console:
    """Of the terminal's width; a pipe has none, and a name folded to fit one could not be searched for."""
    is_seen = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, soft_wrap=soft_wrap, width=None if is_seen else PIPE_COLUMNS)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))  # noqa: T201


def _print_plan(found: Any, out: Path) -> None:
    from planner.report import answer, promise

    console = _console(soft_wrap=True)
    certificate = found.certificate
    console.print(answer(found), style="bold", markup=False)
    console.print(promise(found), markup=False)
    rows = [
        {
            "pool": pool.name, "role": pool.role, "workers": pool.count,
            "GPU": pool.type.gpu.name, "TP": pool.type.tp, "tokens/step": pool.type.max_num_batched_tokens,
            "USD/h": round(pool.count * pool.type.price_usd_per_h, 2),
        }
        for pool in found.fleet.pools
    ]  # fmt: skip
    _print_rows(rows, "fleet")
    lines = [
        {
            "limit": line.limit.name, "promised": show_s(line.limit.limit_s),
            "simulated": show_s(line.value_s), "within": f"{100 * line.kept_frac:.2f} %",
            "verdict": "kept" if line.holds else "MISSED",
        }
        for line in found.verdict.lines
    ]  # fmt: skip
    _print_rows(lines, "SLO")
    proof = "exact" if certificate.level0_exact else "NOT exhausted"
    console.print(
        f"level 0 (one worker type per pool): {certificate.level0:.6g} {certificate.unit}, {proof}; plan: "
        f"{certificate.value:.6g}; policy-free bound: {certificate.bound:.6g} "
        f"(gap {100 * certificate.gap_frac:.1f} %); {certificate.simulations} simulations",
        markup=False,
    )
    for alternative in found.alternatives:
        least = "at least " if alternative.at_least else ""
        value = (
            f"{least}{alternative.objective:.6g} {certificate.unit}"
            if alternative.objective < float("inf")
            else ""
        )
        console.print(f"  {alternative.label}: {value} ({alternative.note})", markup=False)
    for warning in found.warnings:
        console.print(f"warning: {warning}", markup=False)
    console.print(
        f"written to {out}: plan.yaml, certificate.json, requests.csv, report.html, manifests/", markup=False
    )


def _print_simulation(summary: dict[str, Any], title: str) -> None:
    rows = []
    for name in ("queue_s", "ttft_s", "tbt_s", "tpot_s", "e2e_s"):
        if summary[name]:
            rows.append({"metric": name[:-2], **{key: _cell(value) for key, value in summary[name].items()}})
    _print_rows(rows, title)
    counts = {
        key: summary[key] for key in ("finished", "rejected", "unfinished", "preemptions") if summary[key]
    }
    rates = {key: round(summary[key], 3) for key in ("requests_per_s", "output_tokens_per_s") if summary[key]}
    watts = {"expected_w": round(summary["power"]["expected_w"], 1)} if summary["power"] else {}
    _print_mapping(counts | rates | watts, "")
    if summary["slo"]:
        lines = [
            {
                "limit": line["limit"], "promised": _cell(line["limit_s"]),
                "simulated": _cell(line["simulated_s"]), "within": f"{100 * line['kept_frac']:.2f} %",
                "verdict": "kept" if line["holds"] else "MISSED",
            }
            for line in summary["slo"]["lines"]
        ]  # fmt: skip
        _print_rows(lines, "SLO: " + ("kept" if summary["slo"]["holds"] else "MISSED"))
        if not summary["slo"]["is_steady"]:
            _print_mapping({"steady": "no: the backlog grows"}, "")


def _cell(value: Any) -> str:
    return "-" if value is None else show_s(value)


def _print_mapping(document: dict[str, Any], title: str) -> None:
    table = Table(title=title or None, show_header=False, title_justify="left")
    for key, value in document.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k}: {_short(v)}" for k, v in value.items()) or "-"
        elif isinstance(value, list | tuple):
            value = "\n".join(_short(item) for item in value) or "-"
        table.add_row(str(key), _short(value))
    _console().print(table)


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _print_rows(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for column in rows[0] if rows else ():
        table.add_column(str(column), overflow="fold")
    for row in rows:
        table.add_row(*(_short(value) for value in row.values()))
    _console().print(table)


def _provenance(known: Catalog, name: str) -> dict[str, Any]:
    """Where a row of the catalog comes from."""
    return {key: value for key, value in asdict(known.provenance[name]).items() if value}


def _gpu_rows(known: Catalog) -> list[dict[str, Any]]:
    return [
        {
            "gpu": gpu.name, "USD/h": gpu.price_usd_per_h, "memory GB": round(gpu.memory_bytes / 1e9, 1),
            "GB/s": gpu.bandwidth_bytes_per_s / 1e9, "dense TFLOP/s": gpu.dense_flops_per_s / 1e12,
            "link GB/s": gpu.link_bytes_per_s / 1e9, "W": gpu.power_w, "per node": gpu.gpus_per_node,
            "priced": known.provenance[gpu.name].price_date,
        }
        for gpu in known.gpus.values()
    ]  # fmt: skip


def _llm_rows(known: Catalog) -> list[dict[str, Any]]:
    return [
        {
            "llm": llm.name, "parameters B": round(llm.parameters / 1e9, 2), "layers": llm.layers,
            "hidden": llm.hidden, "heads": llm.heads, "KV heads": llm.kv_heads, "ffn": llm.ffn,
            "vocab": llm.vocab, "context": llm.context_tokens, "experts": llm.experts,
            "KV bytes/token": llm.kv_bytes_per_token,
        }
        for llm in known.llms.values()
    ]  # fmt: skip


def _slo_rows(known: Catalog) -> list[dict[str, Any]]:
    rows = []
    for preset in known.slos.values():
        limits = [f"{limit.name} <= {show_s(limit.limit_s)}" for limit in preset.slo.limits]
        if preset.slowdowns is not None:
            reference = f"{preset.slowdowns.gpu} tp{preset.slowdowns.tp}"
            limits += [
                f"{line.metric} {percentile_name(line.percentile_frac)} <= {line.factor:g} x {reference}"
                for line in preset.slowdowns.limits
            ]
        rows.append(
            {
                "preset": preset.name,
                "limits": "; ".join(limits),
                "served": preset.served,
                "source": preset.source,
            }
        )
    return rows


def _latency_rows(known: Catalog) -> list[dict[str, Any]]:
    rows = []
    for llm in known.llms.values():
        for gpu in known.gpus.values():
            for tp in (tp for tp in (1, 2, 4, 8) if tp <= gpu.gpus_per_node and llm.heads % tp == 0):
                latency = known.latency(llm, gpu, tp)
                if gpu.name != gpu.base or latency.basis.startswith("roofline"):
                    continue
                error = "-" if latency.mape_frac is None else f"{100 * latency.mape_frac:.1f} %"
                rows.append(
                    {
                        "llm": llm.name,
                        "gpu": gpu.name,
                        "tp": tp,
                        "held-out error": error,
                        "basis": latency.basis,
                    }
                )
    return rows


FactLlm = Annotated[str | None, typer.Option("--llm", help="The LLM, where the file does not say it.")]
FactGpu = Annotated[str | None, typer.Option("--gpu", help="The GPU, where the file does not say it.")]
FactTp = Annotated[int | None, typer.Option("--tp", min=1, help="Tensor parallelism, likewise.")]
OutOption = Annotated[Path, typer.Option("--out", "-o", readable=False, help="The file to write.")]


@app.command("import")
def import_measurements(
    format: Annotated[str, typer.Argument(help="auto, or a format of docs/import.md.")],
    out: OutOption,
    measured: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", readable=False, help="What was measured.")
    ] = None,
    llm: FactLlm = None,
    gpu: FactGpu = None,
    tp: FactTp = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests kept in flight.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.0, help="Requests/s that arrived.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of a run; a batch's size.")] = None,
    input_tokens: Annotated[float | None, typer.Option(min=1.0, help="Mean prompt length.")] = None,
    output_tokens: Annotated[float | None, typer.Option(min=1.0, help="Mean output length.")] = None,
    length_spread: Annotated[
        float | None, typer.Option(min=0.0, max=0.99, help="0.2: lengths lay within 20 % of their mean.")
    ] = None,
    duration: Annotated[str | None, typer.Option(help="Time between two scrapes, '10 min'.")] = None,
    catalog: CatalogOption = None,
    json_output: JsonOption = False,
) -> None:
    """Turn a profile into a step table, or an end-to-end benchmark into a runs.json: see fit, calibrate."""
    from planner import files, imports
    from planner.units import quantity

    paths = measured or []
    files.check_output_file(out)
    _keep_inputs([out], *paths)
    duration_s = None if duration is None else quantity(duration, "s", where="--duration")
    facts = imports.Facts(
        llm,
        gpu,
        tp,
        concurrency,
        rate or None,
        requests,
        input_tokens,
        output_tokens,
        duration_s,
        length_spread,
    )
    found = imports.read(format, paths, facts, read_catalog(catalog))
    files.write_file(out, found.to_json() if isinstance(found, imports.MeasuredRuns) else found.to_csv())
    summary = {"file": str(out)} | imports.summary(found)
    if json_output:
        _print_json(summary)
    else:
        _print_mapping({key: value for key, value in summary.items() if value}, "")


@app.command()
def fit(
    table: Annotated[Path, typer.Argument(readable=False, help="A step table, from import or profile.")],
    out: OutOption,
    llm: FactLlm = None,
    gpu: FactGpu = None,
    tp: FactTp = None,
    host_overhead: Annotated[
        str | None,
        typer.Option(help="The engine's own part of each step, '2 ms'; default: what the table measured."),
    ] = None,
    choose: Annotated[
        bool, typer.Option("--choose", help="Try every family of models; take the best on held-out steps.")
    ] = False,
    catalog: CatalogOption = None,
    json_output: JsonOption = False,
) -> None:
    """Fit step times to a step table; the file goes into a catalog's latency/, or beside a fleet.yaml."""
    from planner import files
    from planner.imports import Facts
    from planner.imports.fit import fit_table, fit_yaml
    from planner.models.tables import read_step_table
    from planner.units import quantity

    files.check_output_file(out)
    _keep_inputs([out], table)
    overhead_s = None if host_overhead is None else quantity(host_overhead, "s", where="--host-overhead")
    with Progress():
        fitted = fit_table(
            read_step_table(table), Facts(llm, gpu, tp), read_catalog(catalog), where=str(table),
            host_overhead_s=overhead_s, choose_family=choose,
        )  # fmt: skip
        command = f"plan fit {table} -o {out}" + (" --choose" if choose else "")
        files.write_file(out, fit_yaml(fitted, command=command))
    if json_output:
        _print_json({"file": str(out)} | fitted.as_dict())
    else:
        _print_rows(
            [
                {"steps": regime, "count": e.steps, "mean error": f"{100 * e.mape_frac:.2f} %",
                 "9 in 10 below": f"{100 * e.p90_frac:.2f} %"}
                for regime, e in fitted.errors.items()
            ],
            f"{fitted.llm} on {fitted.tp} x {fitted.gpu}: held-out errors",
        )  # fmt: skip
        if fitted.families:
            _print_rows(
                [
                    {"family": name} | {regime: f"{100 * e.mape_frac:.2f} %" for regime, e in errors.items()}
                    for name, errors in fitted.families.items()
                ],
                "every family, mean error on held-out steps",
            )
        _print_mapping({"written to": str(out), **({"notes": fitted.notes} if fitted.notes else {})}, "")


@app.command()
def calibrate(
    measured: Annotated[
        list[Path], typer.Argument(readable=False, help="Step tables and runs.json of one engine.")
    ],
    out: OutOption,
    base: Annotated[
        Path | None, typer.Option("--fit", readable=False, help="The fit to correct; default: the catalog's.")
    ] = None,
    llm: FactLlm = None,
    gpu: FactGpu = None,
    tp: FactTp = None,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Of the measured engine.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Of the measured engine.")] = 256,
    kv_tokens: Annotated[int | None, typer.Option(min=16, help="Its KV cache, from its log.")] = None,
    catalog: CatalogOption = None,
    json_output: JsonOption = False,
) -> None:
    """Correct a fit by a few measured steps or end-to-end runs, and say how sure the result is."""
    from planner import files
    from planner.imports import Facts
    from planner.imports.fit import calibrate_files, fit_yaml

    files.check_output_file(out)
    _keep_inputs([out], *measured, base)
    with Progress() as progress:
        progress("calibrating")
        fitted, result = calibrate_files(
            measured, Facts(llm, gpu, tp), read_catalog(catalog), base=base,
            settings=(max_num_batched_tokens, max_num_seqs, kv_tokens),
        )  # fmt: skip
        command = " ".join(["plan calibrate", *map(str, measured), "-o", str(out)])
        files.write_file(out, fit_yaml(fitted, command=command))
    if json_output:
        _print_json({"file": str(out)} | fitted.as_dict() | {"calibration": result.as_dict()})
    else:
        summary = result.as_dict()
        errors = [
            {"measured": name, "after": f"{100 * e:+.1f} %"} for name, e in summary.pop("errors").items()
        ]
        if errors:
            _print_rows(errors, "prediction against measurement, corrected")
        _print_mapping({"written to": str(out), **summary, "notes": fitted.notes}, "")


@app.command("profile")
def profile_steps(
    config: Annotated[
        Path, typer.Argument(readable=False, help="A Hugging Face config.json, or its folder.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", readable=False, help="The step table; a run goes on in it.")
    ],
    engine: Annotated[str, typer.Option("--engine", help="vllm, torch (operators alone) or auto.")] = "auto",
    tp: Annotated[int, typer.Option("--tp", min=1, help="Measure one rank's share, on one GPU.")] = 1,
    dtype: Annotated[str, typer.Option("--dtype", help="Of weights and KV cache.")] = "bfloat16",
    gpu: Annotated[str | None, typer.Option("--gpu", help="The catalog's name of this GPU.")] = None,
    budget: Annotated[float, typer.Option("--budget", min=1, help="Seconds to measure for, in all.")] = 600.0,
    max_num_batched_tokens: Annotated[int, typer.Option("--max-num-batched-tokens", min=2)] = 8192,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=2)] = 256,
    max_model_len: Annotated[int, typer.Option("--max-model-len", min=128)] = 32768,
    eager: Annotated[bool, typer.Option("--eager", help="Without compilation and CUDA graphs.")] = False,
    catalog: CatalogOption = None,
    seed: SeedOption = 0,
    json_output: JsonOption = False,
) -> None:
    """Measure step times here: a vLLM engine's with dummy weights, or those of its operators in torch."""
    from profiling.measure import profile, summary

    _keep_inputs([out], config)
    with Progress() as progress:
        table = profile(
            config, out, engine=engine, tp=tp, dtype=dtype, gpu=gpu, budget_s=budget, enforce_eager=eager,
            max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs,
            max_model_len=max_model_len, seed=seed, catalog=read_catalog(catalog), progress=progress,
            command=" ".join(["plan", *sys.argv[1:]]),
        )  # fmt: skip
    found = {"file": str(out)} | summary(table)
    if json_output:
        _print_json(found)
    else:
        _print_mapping(found, "profile")


if __name__ == "__main__":
    main()
