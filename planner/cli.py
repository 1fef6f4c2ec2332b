"""The command line: files in, one library call, files and a short answer out.

stdout carries the answer (a table, or one JSON object with --json), stderr progress and errors. Exit codes:
0 done; 1 bad input or failure; 2 usage; 3 infeasible; 4 not finished in time: a plan is written but level 0
not exhausted, or nothing was found; 5 validation ran and the engines missed the SLO; 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner import __version__
from planner.commands import facts, measurements
from planner.commands import validate as validation
from planner.commands.allocate import allocate
from planner.commands.common import (
    CatalogOption,
    DropOption,
    JsonOption,
    PngOption,
    Progress,
    SeedOption,
    SloOption,
    TraceOption,
    attainment_rows,
    keep_inputs,
    print_json,
    print_rows,
    read_requests,
    stdout_console,
)
from planner.commands.compare import compare
from planner.commands.manifests import write_manifests
from planner.commands.pareto import pareto
from planner.commands.prefixes import plan_prefixes
from planner.commands.replan import replan
from planner.commands.reporting import write_report
from planner.commands.schedule import schedule
from planner.commands.search import find_goodput, search
from planner.commands.sharing import plan_together
from planner.commands.simulate import simulate
from planner.commands.ui import show_ui
from planner.commands.whatif import sensitivity, what_if
from planner.documents.catalog import read_catalog
from planner.documents.task import has_several_llms
from planner.errors import InfeasibleError, InputError, PlannerError
from planner.io.streams import hold_places
from planner.units import show_s

if TYPE_CHECKING:
    from planner.documents.task import Task
    from planner.plan import Plan
    from planner.studies.whatif import Study

LONGEST_MESSAGE = 2000

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in (
    ("what-if", what_if),
    ("sensitivity", sensitivity),
    ("pareto", pareto),
    ("replan", replan),
    ("simulate", simulate),
    ("goodput", find_goodput),
    ("search", search),
    ("compare", compare),
    ("manifests", write_manifests),
    ("report", write_report),
    ("allocate", allocate),
    ("schedule", schedule),
    ("trace", facts.describe_trace),
    ("prefixes", plan_prefixes),
    ("catalog", facts.show_catalog),
    ("import", measurements.import_measurements),
    ("fit", measurements.fit),
    ("calibrate", measurements.calibrate),
    ("profile", measurements.profile_steps),
    ("validate", validation.validate),
    ("serve", validation.serve),
    ("ui", show_ui),
):
    app.command(_name)(_command)


def main() -> None:
    """Entry point: a PlannerError is one line on stderr and its exit code; anything else is our bug."""
    _fill_closed_streams()
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
            print_json(
                {
                    "status": "infeasible" if error.is_proved else "not found",
                    "kind": error.kind,
                    "constraint": error.constraint,
                    "relaxation": error.relaxation,
                    "message": str(error),
                }
            )
        sys.exit(_say(error))
    except PlannerError as error:
        sys.exit(_say(error))
    except MemoryError as error:
        why = f" ({error})" if str(error) else ""
        sys.exit(_say(PlannerError(f"the memory of this machine does not suffice{why}; ask for less")))


def _fill_closed_streams() -> None:
    """Whoever starts us with a standard stream closed: no other file may get its number, nor print() fail."""
    hold_places()
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")


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
        typer.Option(
            "--time-limit",
            min=0.1,
            help="Seconds after which the best plan so far is written; --explain: of each plan.",
        ),
    ] = 120.0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Plan again around every limit: what does each one cost?")
    ] = False,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove", help="Simulate every cheaper fleet of one worker type per pool, however many."
        ),
    ] = False,
    drop_invalid: DropOption = False,
    png: PngOption = False,
    json_output: JsonOption = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Find the cheapest fleet that keeps an SLO on a trace, with a certificate and all it takes to deploy it.

    plan --slo slo.yaml --trace azure.csv -o out/

    With several LLMs in slo.yaml (llms:) all of them are planned on one stock, each with a trace of its own.
    """
    if version:
        typer.echo(f"fleetplan {__version__}")
        return
    if context.invoked_subcommand is not None:
        return
    if slo is None and trace is None and out is None:
        typer.echo(context.get_help())
        return
    is_shared = slo is not None and out is not None and has_several_llms(slo)
    if slo is None or out is None or (trace is None and not is_shared):
        typer.echo("plan: a plan needs all of --slo FILE, --trace FILE and -o DIR; see plan --help", err=True)
        raise typer.Exit(2)
    if is_shared:
        if explain:
            raise InputError(
                "--explain: is for one LLM; what more of a shared limit saves is said without it"
            )
        if prove:
            raise InputError("--prove: is for one LLM; leave it out, or plan each LLM by itself")
        plan_together(
            slo,
            trace,
            out,
            catalog=catalog,
            seed=seed,
            time_limit_s=time_limit,
            png=png,
            drop_invalid=drop_invalid,
            json_output=json_output,
        )
        return
    assert trace is not None

    from planner.documents.task import read_task
    from planner.io import files
    from planner.reports import figures, output
    from planner.reports.words import command_line
    from planner.search import certify
    from planner.search.oracle import Answers
    from planner.studies.whatif import Study

    files.check_output_directory(out)
    keep_inputs([out / name for name in output.NAMES], slo, trace)
    with Progress() as progress:
        known = read_catalog(catalog)
        task = read_task(slo, known)
        requests = read_requests(trace, seed=None, drop_invalid=drop_invalid)
        progress(f"read {len(requests)} requests from {trace.name}")
        answers = Answers()
        found = certify.plan(
            task,
            requests,
            known,
            seed=seed,
            time_limit_s=time_limit,
            progress=progress,
            answers=answers,
            prove=prove,
        )
        if explain:
            found = _explained(found, task, Study(requests, known, seed, time_limit, progress, answers))
        progress("writing the report")
        command = command_line(
            slo,
            trace,
            catalog,
            seed=seed,
            time_limit_s=time_limit,
            explain=explain,
            prove=prove,
            drop_invalid=drop_invalid,
        )
        pictures = output.pictures(figures.every(found)) if png else {}
        written: dict[str, str | bytes] = {**output.render(found, command=command), **pictures}
        files.write_files(out, written, outdated=output.OUTDATED)
    if json_output:
        print_json(output.to_json(found) | {"directory": str(out)})
    else:
        _print_plan(found, out, written, explain=explain)
    if found.status != "certified":
        raise typer.Exit(4)


def _explained(found: Plan, task: Task, study: Study) -> Plan:
    """The plan with what each of its limits costs among what binds."""
    from planner.studies import whatif

    if found.throughput is not None:
        task = replace(task, objective="cost", rate_rps=found.throughput.rate_rps)
    sentences = whatif.explain(study, task, found.fleet)
    certificate = replace(found.certificate, binding=(*found.certificate.binding, *sentences))
    return replace(found, certificate=certificate)


def _print_plan(found: Any, out: Path, written: Iterable[str], *, explain: bool) -> None:
    from planner.reports.words import answer, excluded_text, level0_proof, promise, unpriced

    console = stdout_console(soft_wrap=True)
    certificate = found.certificate
    console.print(answer(found), style="bold", markup=False)
    console.print(promise(found), markup=False)
    rows = [
        {
            "pool": pool.name,
            "role": pool.role,
            "workers": pool.count,
            "GPU": pool.type.gpu.name,
            "TP": pool.type.tp,
            "PP": pool.type.pp,
            "tokens/step": pool.type.max_num_batched_tokens,
            "USD/h": round(pool.count * pool.type.price_usd_per_h, 2),
        }
        for pool in found.fleet.pools
    ]
    print_rows(rows, "fleet")
    lines = [
        {
            "limit": line.limit.name,
            "promised": show_s(line.limit.limit_s),
            "simulated": show_s(line.value_s),
            "within": f"{100 * line.kept_frac:.2f} %",
            "verdict": "kept" if line.holds else "MISSED",
        }
        for line in found.verdict.lines
    ]
    lines += attainment_rows(found.slo, found.verdict.attainment_frac)
    print_rows(lines, "SLO")
    proof = level0_proof(is_exact=certificate.level0_exact, is_exhausted=certificate.level0_exhausted)
    is_found = math.isfinite(certificate.level0)
    level0 = f"{certificate.level0:.6g} {certificate.unit}, {proof}" if is_found else "none found"
    console.print(
        f"level 0 (one worker type per pool): {level0}; plan: "
        f"{certificate.value:.6g}; policy-free bound: {certificate.bound:.6g} "
        f"(gap {100 * certificate.gap_frac:.1f} %); {certificate.simulations} simulations",
        markup=False,
    )
    if not certificate.level0_exact:
        fails = excluded_text(certificate.cheaper, certificate.cheaper_simulated)
        console.print(f"  {fails}; --prove simulates the others", markup=False)
        for sentence in certificate.assumed:
            console.print(f"  {sentence}", markup=False)
    for alternative in found.alternatives:
        value = unpriced(alternative, certificate.unit) or (
            f"{alternative.objective:.6g} {certificate.unit} ({alternative.note})"
        )
        console.print(f"  {alternative.label}: {value}", markup=False)
    for pool in found.prefixes:
        hits = (pool.simulated_hit_frac, pool.plan.hit_frac, pool.possible_hit_frac)
        simulated, planned, possible = (f"{100 * share:.1f} %" for share in hits)
        console.print(
            f"prefix caches of {pool.plan.pool.name}: {simulated} of input tokens hit in simulation, "
            f"{planned} planned, once warm, {possible} possible from cold",
            markup=False,
        )
    if found.throughput is not None:
        console.print(
            f"most traffic: {found.throughput.rate_rps:g} requests/s; of level 0 none was found that carries "
            f"{found.throughput.refuted_rps:g}",
            markup=False,
        )
    count = 0 if found.placement is None else len(found.placement.nodes)
    nodes = f"; {count} node{'' if count == 1 else 's'}" if count else ""
    console.print(
        f"{found.usd_per_million_tokens:.3g} USD per million tokens, "
        f"{found.usd_per_million_output_tokens:.3g} per million of output{nodes}",
        markup=False,
    )
    for repeats in certificate.repeats:
        if repeats.kept == repeats.runs or repeats.decision == "holds":  # else it is among the warnings
            console.print(repeats.sentence(), markup=False)
    if explain:
        print_rows([{"what binds, and what limits cost": line} for line in certificate.binding], "")
    for warning in found.warnings:
        console.print(f"warning: {warning}", markup=False)
    names = dict.fromkeys(f"{head}{slash}" for head, slash, _ in (name.partition("/") for name in written))
    console.print(f"written to {out}: {', '.join(names)}", markup=False)


if __name__ == "__main__":
    main()
