"""The rows of a CSV by columns, some MiB at a time, every line accounted for."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from planner.errors import TraceError
from planner.io import csvlines


def columns(
    path: Path,
    stream: io.BufferedReader,
    at: int,
    names: Sequence[str],
    wanted: Collection[str],
    figures: Collection[str],
    *,
    as_text: Collection[str] = (),
) -> Iterator[tuple[csvlines.Block, dict[str, pd.Series[Any]]]]:
    """The columns `wanted` of the rows below the header `names` in line `at`, each block with its lines.

    `figures` are columns of numbers or dates, which tell a row from a part of one; those `as_text` are not
    made numbers. Raises TraceError naming the lines that are no rows of such a table.
    """
    own = [f"c{i}" for i in range(len(names) + 1)]  # and one more, where a field too many is seen
    places = {name: own[names.index(name)] for name in wanted}
    numbers = [names.index(name) for name in figures]
    header = ",".join(own).encode() + b"\n"
    for block in csvlines.blocks(path, stream, at + 1, columns=names, figures=numbers):
        here = block.starts
        try:
            table = pd.read_csv(
                io.BytesIO(header + block.text),
                usecols=[*places.values(), own[-1]],
                dtype={places[name]: object for name in as_text},
                index_col=False,
                skip_blank_lines=False,
                keep_default_na=False,
                na_values=[""],
                low_memory=False,
            )
        except (ValueError, OverflowError) as error:  # ParserError is a ValueError
            reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. ")
            where = f"{path}, lines {here[0]} to {here[-1]}"
            raise TraceError(f"{where}: is not a table of {len(names)} columns ({reason})") from None
        if len(table) != len(here):
            raise TraceError(
                f"{path}, lines {here[0]} to {here[-1]}: hold {len(here)} rows, but {len(table)} are read; "
                "a line holds a carriage return (\\r) of its own: take it out"
            )
        if (extra := np.flatnonzero(table[own[-1]].notna())).size:
            raise TraceError(
                f"{path}, line {here[extra[0]]}: has more than the {len(names)} fields of the header; "
                "write numbers without thousands separators"
            )
        yield block, {name: table[place] for name, place in places.items()}
