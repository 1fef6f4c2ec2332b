"""`plan trace`: a log or a trace described, and written as a trace. Imports within functions keep other
commands fast.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from planner.commands import shared_options
from planner.commands.command_output import Progress, print_warnings, refuse_to_overwrite
from planner.commands.printed_tables import print_json, print_lines, print_mapping
from planner.errors import InputError
from planner.units import parse_quantity

if TYPE_CHECKING:
    from planner.importers.metered_traffic import MeteredTraffic
    from planner.traffic.logs.log_reading import LogOptions, ReadTrace
    from planner.traffic.trace import Trace


METRICS = ("prometheus", "openai-usage")  # Values of --format for files that hold no requests.

FilesArgument: TypeAlias = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        readable=False,
        help="A trace, logs of one clock, or a folder of sessions: CSV, JSON, JSONL, Parquet, text.",
    ),
]
DescribeOption: TypeAlias = Annotated[
    bool, typer.Option("--describe", help="Print described traffic that is like the trace, for slo.yaml.")
]
SaltOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--salt", help="With --hash-ids: makes hashes of several files agree; default: a new one, not kept."
    ),
]
EveryOption: TypeAlias = Annotated[
    str, typer.Option("--every", help="For metrics: the step of the curve of rates.")
]
AgentsOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--agents",
        min=1,
        help="Put this many agents to work at once, each on one recorded session after another.",
    ),
]
DurationOption: TypeAlias = Annotated[
    str, typer.Option("--duration", help="With --agents: how long each works, at 20 ms per token.")
]
LongestPauseOption: TypeAlias = Annotated[
    str, typer.Option("--longest-pause", help="With --agents: longer pauses are cut to this.")
]


def summarise_or_convert_trace(
    files: FilesArgument,
    out: Annotated[
        Path | None,
        shared_options.out_file(
            "Write the trace: .csv or .jsonl; for metrics the traffic that they describe: .yaml."
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option("--map", help="Which column is what: arrival=created_at,input=prompt_tokens,output=..."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option("--format", help="The log's format, if not recognised; a wrong one lists all."),
    ] = None,
    timezone: Annotated[
        str | None,
        typer.Option("--tz", help="The zone of dates that name none: Europe/Berlin. Default: UTC."),
    ] = None,
    hash_ids: Annotated[
        bool, typer.Option("--hash-ids", help="Replace names of tenants by salted hashes.")
    ] = False,
    salt: SaltOption = None,
    every: EveryOption = "300 s",
    agents: AgentsOption = None,
    duration: DurationOption = "1 h",
    longest_pause: LongestPauseOption = "10 min",
    wants_description: DescribeOption = False,
    seed: shared_options.SeedOption = 0,
    drop_invalid: shared_options.DropOption = False,
    json_output: shared_options.JsonOption = False,
    quiet: shared_options.QuietOption = False,
) -> None:
    """Describe a trace or a log: counts, lengths, rates, bursts, prefixes, dropped rows by reason.

    plan trace gateway.csv --map arrival=created_at,input=prompt_tokens,output=completion_tokens -o trace.csv

    plan trace sessions/ --agents 50 -o agents.jsonl

    Prompts are never kept. Metrics of Prometheus and an export of OpenAI's usage are no requests; they become
    described traffic: plan trace metrics.json -o slo.yaml.
    """
    from planner.importers.metered_traffic import read_metered_traffic

    if salt is not None and not hash_ids:
        raise InputError("--salt: is for --hash-ids; add that, or drop the salt")
    if out is not None:
        refuse_to_overwrite([out], *files)
    with Progress(quiet=quiet) as progress:
        # --map names columns of requests, so with it files hold no metrics. Metrics have no tenants, rows or
        # dates, so they ignore the options for these.
        metered = read_metered_traffic(files, every=every, format=format) if columns is None else None
        if metered is not None:
            if agents is not None:
                raise InputError("--agents: the files hold metrics and no sessions; drop it")
            _write_metered_traffic(metered, files, out, json_output=json_output)
            return
        if hash_ids and not salt:  # The reader hashes names if it gets a salt.
            salt = secrets.token_hex(16)
        log_options = _log_options(columns, format, timezone, salt)
        log = _read_or_ask(files, log_options, seed=seed, drop_invalid=drop_invalid, may_ask=not json_output)
        if agents is not None:
            log = _put_to_work(log, agents, duration, longest_pause, seed)
        print_warnings(log.trace.warnings)
        progress(f"read {len(log.trace)} requests")
        _write_trace(log, out)
    if wants_description:
        _print_description(log.trace, as_json=json_output)
        return
    _print_summary(log, files, json_output=json_output)


def _log_options(map: str | None, format: str | None, timezone: str | None, salt: str | None) -> LogOptions:
    """The options for reading a log; raises InputError for an unknown value."""
    from planner.traffic.logs.log_columns_map import parse_columns
    from planner.traffic.logs.log_reading import NAMES, LogOptions
    from planner.traffic.logs.times import zone_of

    if timezone is not None:
        zone_of(timezone)  # Raises for an unknown time zone.
    if format in METRICS and map is not None:
        raise InputError(f"--map: {format} holds metrics, which have no columns of requests; drop it")
    if format is not None and format not in NAMES:
        raise InputError(f"--format: expected one of {', '.join((*NAMES, *METRICS))}, found {format!r}")
    column_map = None if map is None else parse_columns(map)
    return LogOptions(column_map, format, timezone, None if salt is None else salt.encode())


def _read_or_ask(
    files: list[Path], log_options: LogOptions, *, seed: int, drop_invalid: bool, may_ask: bool
) -> ReadTrace:
    """Read the files; if their columns are uncertain, ask a person at a terminal to confirm the guess."""
    from planner.traffic.logs.log_columns_map import parse_columns
    from planner.traffic.logs.times import UnsureError
    from planner.traffic.trace_reading import read_files

    try:
        return read_files(files, seed=seed, drop_invalid=drop_invalid, log_options=log_options)
    except UnsureError as error:
        if not (may_ask and error.guess and sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        typer.echo(str(error), err=True)
        if not typer.confirm(f"Read it so: {error.guess}?", err=True):
            raise
        log_options = replace(log_options, columns=parse_columns(error.guess))
        return read_files(files, seed=seed, drop_invalid=drop_invalid, log_options=log_options)


def _put_to_work(log: ReadTrace, agents: int, duration: str, longest_pause: str, seed: int) -> ReadTrace:
    """The requests of this many agents, who work through the sessions of the log."""
    from planner.traffic.recorded_agents import agents_at_once

    requests = agents_at_once(
        log.trace,
        agents,
        duration_s=parse_quantity(duration, "s", where="--duration"),
        longest_pause_s=parse_quantity(longest_pause, "s", where="--longest-pause"),
        seed=seed,
    )
    return replace(log, trace=requests)


def _write_trace(log: ReadTrace, out: Path | None) -> None:
    """Write the trace to `out`, if given, in the format of its ending."""
    from planner.files.checked_files import write_file, write_parts
    from planner.traffic.trace_writing import to_csv, to_jsonl

    if out is None:
        return
    ending = Path(out.name.removesuffix(".gz")).suffix
    if ending not in (".csv", ".jsonl"):
        raise InputError(f"-o {out}: expected a name that ends in .csv or .jsonl")
    if ending == ".jsonl":
        write_file(out, to_jsonl(log.trace, with_llm=True))
    else:
        # `to_csv` yields the text in pieces, and always writes a column for the LLM.
        write_parts(out, to_csv(log.trace))


def _print_summary(log: ReadTrace, files: list[Path], *, json_output: bool) -> None:
    """Print the summary of a trace, and how its log was read."""
    from planner.traffic.workload import summarise_trace

    summary: dict[str, Any] = summarise_trace(log.trace).as_dict()
    if log.format != "trace":
        summary["format"] = log.format
        if log.columns is not None:
            summary["map"] = log.columns.document()
    if json_output:
        print_json(summary, log.trace.warnings)
    else:
        print_mapping(summary, ", ".join(map(str, files)))


def _print_description(requests: Trace, *, as_json: bool) -> None:
    """Print the description that fits a trace, as a section of slo.yaml."""
    from planner.documents.traffic_description import description_document
    from planner.files.checked_files import to_yaml
    from planner.traffic.described_of import described_of

    document = {"traffic": description_document(described_of(requests))}
    if as_json:
        print_json(document, requests.warnings)
    else:
        typer.echo(to_yaml(document), nl=False)


def _write_metered_traffic(
    metered: MeteredTraffic, files: list[Path], out: Path | None, *, json_output: bool
) -> None:
    """Write or print the traffic that metrics describe, as a section of slo.yaml."""
    from planner.files.checked_files import write_file

    print_warnings(metered.warnings)
    text = metered.to_yaml(", ".join(file.name for file in files))
    if out is not None:
        if out.suffix not in (".yaml", ".yml"):
            raise InputError(
                f"-o {out}: metrics are no requests; name a .yaml, for the traffic they describe"
            )
        write_file(out, text)
    if json_output:
        print_json(metered.to_summary(), metered.warnings)
    elif out is None:
        typer.echo(text, nl=False)
    else:
        # Without the key `traffic`, whose histograms would make lines of 500 columns; they are in the file.
        print_mapping({k: v for k, v in metered.to_summary().items() if k != "traffic"}, str(out))
        print_lines(f"next: add llm and slo to {out}, then plan --slo {out}")
