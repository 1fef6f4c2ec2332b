"""`plan compare`: simulates several fleets, or one under several policies, on the same requests.

Imports within functions keep other commands fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands import shared_options
from planner.commands.command_output import (
    Progress,
    print_warnings,
    read_requests,
    refuse_to_overwrite,
    traffic_option,
)
from planner.commands.printed_tables import print_json, print_lines, print_markdown, print_rows
from planner.errors import InputError
from planner.files.checked_files import yaml_value
from planner.files.document_values import errors_as

if TYPE_CHECKING:
    from planner.studies.fleet_comparison import FleetComparison

OWN = "own"  # The value of --policies that leaves each fleet the policies of its file.


def compare(
    fleet: Annotated[
        list[str], typer.Option("--fleet", help="fleet.yaml, plan.yaml, or NAME=FILE; once per fleet.")
    ],
    trace: shared_options.TraceOption = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policies",
            help="Simulate every fleet so: 'routing=round-robin batching=vllm-v1', or 'own' for its own; "
            "once per variant.",
        ),
    ] = None,
    out: Annotated[
        Path | None, shared_options.out_folder("Folder for compare.html, compare.csv, compare.json.")
    ] = None,
    slo: shared_options.SloOption = None,
    rate: shared_options.RateOption = None,
    scale: shared_options.ScaleOption = "superpose",
    window: shared_options.WindowOption = None,
    catalog: shared_options.CatalogOption = None,
    seed: shared_options.SeedOption = 0,
    executor: shared_options.ExecutorOption = None,
    address: shared_options.AddressOption = None,
    png: shared_options.PngOption = False,
    drop_invalid: shared_options.DropOption = False,
    quiet: shared_options.QuietOption = False,
    json_output: shared_options.JsonOption = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown, for a comment or a page.")
    ] = False,
) -> None:
    """Simulate several fleets, or one under several policies, on the same requests: one table, one picture.

    With --slo the traffic section of that file applies, unless --rate or --window say otherwise.
    """
    from planner.api.inputs import fleet_file_warnings, read_fleet
    from planner.api.simulating import compare as compare_fleets
    from planner.documents.catalog import read_catalog
    from planner.files.checked_files import check_output_directory
    from planner.parallel.executors import Executor
    from planner.studies.fleet_comparison import NAMES

    named_files = [_name_and_path(text) for text in fleet]
    if out is not None:
        check_output_directory(out)
        refuse_to_overwrite([out / name for name in NAMES], slo, trace, *(path for _, path in named_files))
    with Progress(quiet=quiet) as progress:
        policy_variants = _policy_variants(policies or [])
        rows, traffic = read_catalog(catalog), traffic_option(rate, scale, window)
        warnings = print_warnings(
            sentence
            for _, path in named_files
            for sentence in fleet_file_warnings(path, read_fleet(path, rows, slo=slo), slo=slo, catalog=rows)
        )
        # The unscaled requests: `compare_fleets` scales them by `traffic`, or as slo.yaml says.
        requests = read_requests(
            trace, slo, rows, seed=seed, drop_invalid=drop_invalid, is_rate_given=traffic is not None
        )
        progress(f"simulating {len(named_files) * max(len(policy_variants), 1)} fleets with policies")
        result = compare_fleets(
            named_files,
            requests,
            slo,
            policies=policy_variants or None,
            traffic=traffic,
            catalog=rows,
            seed=seed,
            executor=Executor(executor or "serial", address),
        )
        if out is not None:
            progress("drawing")
            result.save(out, png=png)
    if json_output:
        return print_json(result.to_dict(), warnings + requests.warnings)
    comparison = result.comparison
    _print_table(comparison, markdown=markdown)
    notes = (f"note: {note}" for note in result.sentences())
    written = [] if out is None else [f"written to {out}: {', '.join(NAMES)}"]
    print_lines(result.headline(), *notes, *written)


def _print_table(comparison: FleetComparison, *, markdown: bool) -> None:
    """Print a table with a column for each fleet and a row for each figure."""
    from planner.studies.fleet_comparison import comparison_lines

    names = [row.variant.name for row in comparison.rows]
    rows = [
        {"": label, **dict(zip(names, cells, strict=True))} for label, cells in comparison_lines(comparison)
    ]
    show = print_markdown if markdown else print_rows
    show(rows, f"{len(comparison.requests)} requests of {comparison.requests.name}")


def _policy_variants(texts: list[str]) -> dict[str, dict[str, Any] | None]:
    """For each value of --policies the policies that it sets; None for OWN, which sets none."""
    if len(set(texts)) < len(texts):
        raise InputError("--policies: one is given twice; name each once")
    return {text: None if text == OWN else _parse_policies(text) for text in texts}


def _name_and_path(text: str) -> tuple[str, Path]:
    """The name and the file of a value of --fleet, which is NAME=FILE or FILE (`name_of_file` then makes the
    name). A value that is the path of an existing file is a FILE, even with "=" in it.
    """
    from planner.api.inputs import name_of_file

    name, equals, path = text.partition("=")
    if not equals or Path(text).exists():
        return name_of_file(Path(text)), Path(text)
    if not name.strip() or not path:
        raise InputError(f"--fleet {text}: expected FILE or NAME=FILE")
    return name.strip(), Path(path)


def _parse_policies(text: str) -> dict[str, Any]:
    """Parse 'routing=round-robin batching=vllm-v1' into the section `policies` of a fleet file."""
    policies: dict[str, Any] = {}
    here = f"--policies {text!r}"
    for word in text.split() or [""]:  # An empty text is treated as one empty word, which is refused.
        key, equals, value = word.partition("=")
        if not equals or not key or not value or key in policies:
            raise InputError(
                f"{here}: expected KEY=VALUE such as routing=round-robin, each KEY once, or {OWN!r}; "
                f"found {word!r}"
            )
        with errors_as(InputError, f"{here}: {key}"):
            policies[key] = yaml_value(value)
    return policies
