"""Options that several commands share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.domain import MOST_SEED
from planner.errors import InputError
from planner.units import parse_quantity

TRACE_HELP = "The traffic: a trace, or a log (docs/traces.md); .gz too."


def out_file(help: str) -> Any:
    """The option -o of a command that writes one file."""
    return typer.Option("--out", "-o", parser=_file_path, metavar="FILE", help=help)


def _file_path(text: str) -> Path:
    """The path of a file; refuses `folder/`, which a Path would read as a file `folder`."""
    if os.path.basename(text) in ("", ".", ".."):  # noqa: PTH119
        raise InputError(f"-o {text!r}: names a folder, and one file is written; name that file")
    return Path(text)


def out_folder(help: str) -> Any:
    """The option -o of a command that writes files into a folder."""
    return typer.Option("--out", "-o", readable=False, help=help)


def folder_or_file(*suffixes: str) -> Callable[[str], Path]:
    """A parser of the value of -o: a file if it ends in one of `suffixes`, else a folder."""
    return lambda text: _file_path(text) if Path(text).suffix in suffixes else Path(text)


# With readable=False checked_files.py reports every fault of a file in the same way.
SloOption = Annotated[Path | None, typer.Option("--slo", readable=False, help="The question: slo.yaml.")]
TraceOption = Annotated[Path | None, typer.Option("--trace", readable=False, help=TRACE_HELP)]
CatalogOption = Annotated[
    Path | None,
    typer.Option(
        "--catalog", readable=False, help="Folder with your own gpus.yaml, llms.yaml, slos.yaml, latency/."
    ),
]
DropOption = Annotated[
    bool,
    typer.Option(
        "--drop-invalid",
        help="Leave out requests without input or output tokens even where they are more than 20 %.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=MOST_SEED, help="Seed of everything random.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
OutOption = Annotated[Path, out_file("The file to write.")]
PngOption = Annotated[
    bool, typer.Option("--png", help="Also every chart of the report as a picture, in charts/.")
]


def _rate_rps(text: str) -> float:
    """A rate in requests/s, with or without a unit, as in slo.yaml."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return parse_quantity(text, "rps", where="--rate")
    except InputError as error:
        raise typer.BadParameter(str(error).removeprefix("--rate: ")) from None


RateOption = Annotated[
    float | None,
    typer.Option(
        "--rate", parser=_rate_rps, metavar="RATE", help="Rescale the trace to this many requests/s."
    ),
]
# How traffic is brought to another rate (`scaling.Scaling`), in words.
SCALES = {"superpose": "more users", "compress": "the same requests in less time", "thin": "fewer requests"}
ScaleOption = Annotated[
    str,
    typer.Option(
        "--scale",
        help=f"How: superpose ({SCALES['superpose']}), compress ({SCALES['compress']}, as a plan's headroom "
        "counts) or thin.",
    ),
]
WindowOption = Annotated[
    str | None, typer.Option("--window", help="Part of the trace: whole, 'busiest 10 min'.")
]
ExecutorOption = Annotated[
    str | None,
    typer.Option("--executor", help="Where it simulates: threads[:N], processes[:N], ray, dask or serial."),
]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", help="Of the cluster: auto or ray://host:10001, tcp://host:8786 for dask."),
]
