"""`plan compare`: several fleets, or policies, on the same requests."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.commands.common import (
    TRACE_HELP,
    AddressOption,
    CatalogOption,
    DropOption,
    JsonOption,
    PngOption,
    Progress,
    RateOption,
    ScaleOption,
    SeedOption,
    SloOption,
    WindowOption,
    asked_of,
    keep_inputs,
    print_json,
    print_rows,
    read_requests,
    stdout_console,
)
from planner.documents.catalog import Catalog, read_catalog
from planner.errors import InputError
from planner.fleet import Fleet
from planner.io.files import yaml_value

OWN = "own"


def compare(
    trace: Annotated[Path, typer.Option("--trace", readable=False, help=TRACE_HELP)],
    fleet: Annotated[
        list[str], typer.Option("--fleet", help="fleet.yaml or plan.yaml, or NAME=FILE; once per fleet.")
    ],
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policies",
            help="Simulate every fleet so: 'routing=round-robin batching=vllm-v1', or 'own' for its own; "
            "once per variant.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", readable=False, help="Folder for compare.html, compare.csv, compare.json."
        ),
    ] = None,
    slo: SloOption = None,
    rate: RateOption = None,
    scale: ScaleOption = "superpose",
    window: WindowOption = None,
    catalog: CatalogOption = None,
    seed: SeedOption = 0,
    executor: Annotated[
        str, typer.Option("--executor", help="Where the variants are simulated: serial, loky, ray or dask.")
    ] = "serial",
    address: AddressOption = None,
    png: PngOption = False,
    drop_invalid: DropOption = False,
    json_output: JsonOption = False,
) -> None:
    """Simulate several fleets, or one under several policies, on the same requests: one table, one picture.

    With --slo the traffic section of that file applies, unless --rate or --window say otherwise.
    """
    from planner.io import files
    from planner.io.executors import Executor
    from planner.reports.output import pictures
    from planner.studies.compare import NAMES, OUTDATED, Variant, figures, lines, render, to_json, verdict
    from planner.studies.compare import compare as compare_variants

    where = Executor(executor, address)
    paths = [_named(text) for text in fleet]
    if out is not None:
        files.check_output_directory(out)
        keep_inputs([out / name for name in NAMES], slo, trace, *(path for _, path in paths))
    with Progress() as progress:
        known = read_catalog(catalog)
        variants = [
            Variant(f"{name}, {said}" if policies else name, _fleet(path, said, known))
            for (name, path), said in itertools.product(paths, policies or [OWN])
        ]
        promise, asked = asked_of(slo, known, rate=rate, scale=scale, window=window, command="compare")
        requests = asked.of(read_requests(trace, seed=seed, drop_invalid=drop_invalid), seed=seed)
        progress(f"simulating {len(requests)} requests on {len(variants)} variants")
        found = compare_variants(variants, requests, promise, seed=seed, executor=where)
        if out is not None:
            progress("drawing")
            written: dict[str, str | bytes] = {**render(found), **(pictures(figures(found)) if png else {})}
            files.write_files(out, written, outdated=OUTDATED)
    if json_output:
        print_json(to_json(found), requests.warnings)
        return
    names = [variant.name for variant in variants]
    print_rows(
        [{"": label, **dict(zip(names, cells, strict=True))} for label, cells in lines(found)],
        f"{len(requests)} requests of {requests.name}",
    )
    console = stdout_console(soft_wrap=True)
    for sentence in (verdict(found), *(f"mind: {note}" for note in found.notes)):
        console.print(sentence, markup=False)
    if out is not None:
        console.print(f"written to {out}: {', '.join(NAMES)}", markup=False)


def _named(text: str) -> tuple[str, Path]:
    """NAME=FILE, or a file that is named by its own name without the ending."""
    name, equals, path = text.partition("=")
    if not equals or Path(text).exists():
        return Path(text).stem, Path(text)
    if not name.strip() or not path:
        raise InputError(f"--fleet {text}: expected FILE or NAME=FILE")
    return name.strip(), Path(path)


def _fleet(path: Path, said: str, known: Catalog) -> Fleet:
    from planner.documents.fleet import read_fleet

    if said == OWN:
        return read_fleet(path, known)
    try:
        return read_fleet(path, known, policies=_parsed(said))
    except InputError as error:
        raise InputError(f"--policies {said!r}: {error}") from None


def _parsed(said: str) -> dict[str, Any]:
    """'routing=round-robin batching=vllm-v1' as the policies of a fleet file."""
    found: dict[str, Any] = {}
    for word in said.split() or [""]:
        key, equals, value = word.partition("=")
        if not equals or not key or not value or key in found:
            raise InputError(
                f"expected different KEY=VALUE such as routing=round-robin, or {OWN!r}; found {word!r}"
            )
        try:
            found[key] = yaml_value(value)
        except InputError as error:
            raise InputError(f"{key}: {error}") from None
    return found
