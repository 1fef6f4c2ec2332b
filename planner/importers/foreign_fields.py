"""Functions for importers of benchmark files: they check values, complete a file by facts from the command
line, and compute statistics of latencies.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from planner.documents.catalog import Catalog
from planner.errors import CatalogError, InputError
from planner.files import jsontext
from planner.files.document_values import check_number, check_rows, refused_value
from planner.files.text_tables import read_text
from planner.models.latency import Array

MAX_TP = 1024  # A larger TP is refused as a typing error.
LEAST_VALUE = 1e-9  # Stands for "above 0" in checks of columns, whose limits are inclusive.
PERCENTILES = (50, 90, 95, 99)
_MOST_LISTED = 6  # The most files that a source lists by name.
_ERROR_CHARS = 120  # The most characters that are shown of an error in JSON.
# With more tokens per chunk of an answer than CHUNKED_TOKENS, the engine sent several tokens at once. With a
# median gap below COALESCED_FRAC of the mean gap, tokens reached the client in bunches. Both are set by hand.
CHUNKED_TOKENS, COALESCED_FRAC = 1.01, 0.1


@dataclass(frozen=True, slots=True)
class StatedSetup:
    """Facts that a file may leave out; those that the user states override the file.

    `requests` is how many requests a file of means alone covers. `input_tokens`, `output_tokens` are mean
    lengths, `duration_s` is the time between two scrapes. With `length_spread_frac` s, lengths lay between
    (1 - s) and (1 + s) times their mean.
    """

    llm: str | None = None
    gpu: str | None = None
    tp: int | None = None
    concurrency: int | None = None
    rate_rps: float | None = None
    requests: int | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    duration_s: float | None = None
    length_spread_frac: float | None = None


class ReadRequests(NamedTuple):
    """The requests of a run that succeeded. Tokens have a value for each request, or one mean; `latency_s`
    has statistics by metric, and `start_s` counts from the first start: () if not all are known.
    """

    requests: int
    input_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...]
    latency_s: dict[str, dict[str, float]]
    start_s: tuple[float, ...] = ()
    remarks: tuple[str, ...] = ()


def read_setup(
    stated: StatedSetup,
    catalog: Catalog,
    where: object,
    *,
    llm: object = None,
    gpu: object = None,
    tp: object = None,
) -> tuple[str, str, int]:
    """LLM and GPU, by their names in the catalog, and the degree of tensor parallelism. `llm`, `gpu` and `tp`
    are from the file; the user's values (`stated`) override them.

    Raises InputError, which names every option that is needed, and for names that the catalog does not have.
    """
    setup = {
        "llm": stated.llm or (llm if isinstance(llm, str) else None),
        "gpu": stated.gpu or (gpu if isinstance(gpu, str) else None),
        "tp": stated.tp or (None if tp is None else read_count(tp, f"{where}: tp", most=MAX_TP)),
    }
    if missing := [f"--{name}" for name, value in setup.items() if not value]:
        raise InputError(f"{where}: does not say what was measured; add {' '.join(missing)}")
    try:
        llm_name = catalog.llm(str(setup["llm"])).name
        gpu_name = catalog.gpu(str(setup["gpu"])).name
    except InputError as error:
        raise InputError(f"{where}: {error}; say which it is with --llm and --gpu") from None
    return llm_name, gpu_name, read_count(setup["tp"], "--tp", most=MAX_TP)


def find_catalog_llm(name: str, catalog: Catalog) -> str | None:
    """The catalog's name of an LLM; None where the catalog has no such LLM."""
    try:
        return catalog.llm(name).name
    except (CatalogError, OSError):
        return None


def file_labels(paths: Sequence[Path]) -> list[str]:
    """A label for each file: its name. If two names are equal, the labels are paths below the folder that all
    files share.
    """
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    shared = os.path.commonpath([path.absolute().parent for path in paths])
    return [path.absolute().relative_to(shared).as_posix() for path in paths]


def list_files(files: Sequence[str]) -> str:
    """The first few names for a sentence, and how many more there are."""
    more = len(files) - _MOST_LISTED
    return ", ".join(files[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def parse_json(text: str, where: object) -> Any:
    """A JSON value, in which NaN and Infinity may stand, as other programs write them. Raises InputError."""
    try:
        return jsontext.parse_json(text, has_nan=True)
    except ValueError as error:
        raise InputError(f"{where}: is not JSON ({str(error)[:_ERROR_CHARS]})") from None


def read_json(path: Path) -> Any:
    """The value in a file of JSON, as `parse_json` reads it."""
    return parse_json(read_text(path), path)


def read_number(value: object, where: object, *, least: float = 0.0) -> float:
    """A finite number of at least `least`; also as text, as vLLM's --metadata writes numbers. Raises
    InputError for anything else.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            pass  # The check below refuses the text.
    return check_number(value, where, least=least)


def read_numbers(value: object, where: object) -> list[float]:
    """The list of numbers; raises InputError with the place of what is no number."""
    return [read_number(item, f"{where}[{i}]") for i, item in enumerate(check_rows(value, where))]


def read_count(value: object, where: object, *, least: int = 1, most: int = 10**9) -> int:
    """A whole number from `least` to `most`, also written 32.0 or as text. Raises InputError."""
    checked = read_number(value, where)
    if not checked.is_integer() or not least <= checked <= most:
        raise refused_value(where, f"expected a whole number from {least} to {most}", value)
    return int(checked)


def read_optional(document: Mapping[str, Any], key: str, where: object) -> float | None:
    """The number under a key of a document; None where it is missing or null."""
    value = document.get(key)
    return None if value is None else read_number(value, f"{where}: {key}")


def mean_and_percentiles(values_s: Sequence[float] | Array) -> dict[str, float]:
    """The mean and the PERCENTILES of the times above zero [s], named "mean" and "p99"; empty if there are
    none. Benchmarks write zero for what was not measured.

    Percentiles are NumPy's linear ones, as the benchmarks compute them.
    """
    times_s = np.asarray(values_s, dtype=float)
    times_s = times_s[times_s > 0]
    if not times_s.size:
        return {}
    percentiles = np.percentile(times_s, PERCENTILES)
    return {"mean": float(times_s.mean())} | {
        f"p{percentile}": float(value) for percentile, value in zip(PERCENTILES, percentiles, strict=True)
    }


def read_seconds(value: float | None, unit: str, where: object) -> float | None:
    """`value`, which is in `unit`, in seconds; None if nothing was measured, which benchmarks also write as
    zero. Raises InputError for an unknown unit.
    """
    factors = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0, "us": 1e-6, "ns": 1e-9}
    if unit not in factors:
        raise InputError(f"{where}: unknown unit {unit!r}; expected one of {', '.join(factors)}")
    return value * factors[unit] if value else None


def run_remarks(
    *,
    failed: int = 0,
    is_summary: bool = False,
    tokens_per_chunk: float = 1.0,
    gap_p50: float | None = None,
    gap_mean: float | None = None,
) -> tuple[str, ...]:
    """Remarks for a reader of the imported numbers. `is_summary`: the file has no single requests. `gap_p50`
    and `gap_mean` are of the gaps between tokens, both in the same unit.
    """
    notes = []
    if failed:
        notes.append(f"{failed} request(s) failed and are left out: the engine may have been overloaded")
    if is_summary:
        notes.append("only summary statistics: the lengths of single requests are lost, the mean is used")
    if tokens_per_chunk > CHUNKED_TOKENS:
        notes.append(
            f"{tokens_per_chunk:.2f} tokens per chunk: gaps are between chunks, TPOT stays per token"
        )
    if gap_p50 is not None and gap_mean and gap_p50 < COALESCED_FRAC * gap_mean:
        notes.append(
            "the median gap is below a tenth of the mean: tokens reached the client in bunches, so gap "
            "percentiles say little (the client's machine was busy)"
        )
    return tuple(notes)


def one_line(text: object) -> str:
    """The text with all whitespace as single spaces."""
    return " ".join(str(text).split())
