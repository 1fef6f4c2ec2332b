"""Shared by all commands: options, progress and warnings on stderr, tables and JSON on stdout."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from planner.documents.traffic_description import describes_traffic
from planner.domain import Slo
from planner.errors import InputError, OutOfTimeError
from planner.files.checked_files import is_path
from planner.search.problem.stages import Stage, Urgent, left_s
from planner.traffic.scaling import RateRequest
from planner.units import counted, show_clock, show_s

if TYPE_CHECKING:
    from planner.documents.catalog import Catalog
    from planner.traffic.trace import Trace

QUIET_S = 1.0  # Work shorter than this shows no progress.
SILENT_S = 20.0  # After this long without a new stage, a line says that the work goes on.
PIPE_COLUMNS = 500  # Wide enough that no name is folded in a file or a pipe.
LONGEST_S = 1e8  # Three years; the system's timer takes no more.

TRACE_HELP = "The traffic: a trace, or a log (docs/traces.md); .gz too."


def out_file(help: str) -> Any:
    """The option -o of a command that writes one file."""
    return typer.Option("--out", "-o", parser=_file_path, metavar="FILE", help=help)


def _file_path(text: str) -> Path:
    """The path of a file; refuses `folder/`, whose slash a Path would forget."""
    if os.path.basename(text) in ("", ".", ".."):  # noqa: PTH119
        raise InputError(f"-o {text!r}: names a folder, and one file is written; name that file")
    return Path(text)


def folder_or_csv(text: str) -> Path:
    """The value of -o: a file if it ends in .csv, else a folder."""
    return _file_path(text) if Path(text).suffix == ".csv" else Path(text)


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
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of everything random.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
OutOption = Annotated[Path, out_file("The file to write.")]
PngOption = Annotated[
    bool, typer.Option("--png", help="Also every chart of the report as a picture, in charts/.")
]
RateOption = Annotated[
    float | None, typer.Option("--rate", help="Rescale the trace to this many requests/s.")
]
ScaleOption = Annotated[str, typer.Option("--scale", help="How: superpose, compress or thin.")]
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


def at_work(executor: str | None, address: str | None) -> AbstractContextManager[None]:
    """A context whose simulations run where --executor and --address say, by default on all cores here."""
    if executor is None and address is None:
        return nullcontext()
    from planner.parallel.executors import Executor, working_on

    return working_on(Executor(executor or "threads", address))


MOST_WALL_PER_CPU = 3.0  # A higher ratio comes from waiting, as for a cluster, and not from other work.
began_s: float | None = None  # When the process began that runs this one command, on time.monotonic's clock.


class Progress:
    """Shows the stage of the work on stderr once it takes longer than QUIET_S, unless `quiet`.

    The time left is shown as at most `limit_s`, when a search ends. Where stderr is no terminal, a stage
    that lasts is printed again after SILENT_S.
    """

    def __init__(self, *, quiet: bool = False, limit_s: float = math.inf) -> None:
        self.console = Console(stderr=True, highlight=False, quiet=quiet)
        self.start_s = time.monotonic()
        self.limit_s = limit_s
        self.done_frac = 0.0
        self.status = self.console.status("") if sys.stderr.isatty() and not quiet else None
        self.stage = "at work"  # What the last line was about.
        self.spoken_s = self.start_s
        self.has_ended = threading.Event()

    def __call__(self, message: str) -> None:
        elapsed_s = time.monotonic() - self.start_s
        text = self._how_far(message, elapsed_s) + message
        self.stage, self.spoken_s = str(message), time.monotonic()
        if isinstance(message, Urgent):
            self.console.print(text, markup=False, soft_wrap=True)
        elif self.status is not None:
            self.status.update(escape(text))
            self.status.start()
        elif elapsed_s > QUIET_S:
            self.console.print(f"[{elapsed_s:5.1f} s] {text}", markup=False, soft_wrap=True)

    def taken_s(self) -> float:
        """How long the command has been at work, loading it included."""
        return time.monotonic() - (began_s or self.start_s)

    def wall_per_cpu(self) -> float:
        """Wall-clock seconds per second of CPU time so far: more than 1 if other work shares the cores."""
        return (
            1.0 if began_s is None else min(max(self.taken_s() / time.process_time(), 1.0), MOST_WALL_PER_CPU)
        )

    def _how_far(self, message: str, elapsed_s: float) -> str:
        """The share done, which never falls, and the time left, as text; empty if the message has none."""
        if not isinstance(message, Stage):
            return ""
        self.done_frac = max(self.done_frac, message.done_frac)
        left = left_s(elapsed_s, self.done_frac, self.limit_s)
        about = "" if left is None else f", about {max(round(left), 1)} s left"
        return f"{100 * self.done_frac:.0f} %{about}: "

    def _repeat_stage(self) -> None:
        """Print that the stage goes on whenever nothing was printed for SILENT_S, until the end."""
        while not self.has_ended.wait(max(self.spoken_s + SILENT_S - time.monotonic(), 0.01)):
            if time.monotonic() >= self.spoken_s + SILENT_S:
                self.spoken_s = time.monotonic()
                elapsed_s = self.spoken_s - self.start_s
                self.console.print(f"[{elapsed_s:5.1f} s] still: {self.stage}", markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self.status is None and not self.console.quiet:
            threading.Thread(target=self._repeat_stage, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.has_ended.set()
        if self.status is not None:
            self.status.stop()  # After an error too, so that the terminal gets its cursor back.


def read_requests(
    path: Path | None,
    slo: Path | None = None,
    known: Catalog | Path | None = None,
    *,
    seed: int = 0,
    drop_invalid: bool = False,
    is_given: bool = False,
) -> Trace:
    """Read the trace, or draw the traffic that `slo` describes; prints warnings. Coarse stamps are not
    spread.

    With a trace `slo` must describe no traffic, unless --rate or --window are given (`is_given`), which
    replace its traffic section. The columns of a log are read as `slo` says.
    """
    from planner.api.inputs import read_catalog, requests_of
    from planner.api.questions import read_task
    from planner.documents.log_columns import read_reading

    described = None
    if slo is not None and not (is_given and path is not None) and describes_traffic(slo):
        described = read_task(slo, read_catalog(known)).task().described
    if path is None and described is None:
        raise typer.BadParameter(
            "is missing; give the traffic, or describe it in slo.yaml: traffic: {rate: 30, input: 1500, "
            "output: 300}",
            param_hint="--trace",
        )
    columns = None if path is None else read_reading(slo)
    requests = requests_of(path, described, seed=seed, drop_invalid=drop_invalid, how=columns)
    say_first(requests.warnings)
    return requests


def say_first(warnings: Iterable[str]) -> None:
    """Print warnings on stderr, before the answer on stdout, which may be JSON."""
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def keep_inputs(outputs: Iterable[Path], *inputs: Path | None) -> None:
    """Refuse outputs that would overwrite an input, or whose name a folder has."""
    for path in outputs:
        if is_path(str(path)) and path.is_dir():
            raise InputError(
                f"{path}: is a directory, and a file of that name is written; name another place with -o"
            )
        for given in inputs:
            if given is not None and is_path(str(path)) and is_path(str(given)) and path.samefile(given):
                raise InputError(f"{given}: would be written over; name another place with -o")


@contextmanager
def stopped_after(seconds: float, so_far: Callable[[], str]) -> Iterator[None]:
    """A context that ends after `seconds` with an OutOfTimeError, whose message includes `so_far()`.

    For searches without a time limit of their own. Like Ctrl-C it acts between two steps of Python, so that a
    compiled simulation ends first, and only in the main thread; in others there is no limit.
    """

    def raise_out_of_time(*_: object) -> None:
        raise OutOfTimeError(f"no answer within {seconds:g} s{so_far()}; raise --time-limit")

    # Python allows signal handlers in the main thread alone.
    if threading.current_thread() is not threading.main_thread() or seconds > LONGEST_S:
        yield
        return
    before = signal.signal(signal.SIGALRM, raise_out_of_time)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # It repeats, because a callback may drop the signal.
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def traffic_option(rate: float | None, scale: str, window: str | None) -> RateRequest | None:
    """The traffic that --rate and --window choose; None without either, where the SLO file decides."""
    from planner.api.inputs import scaling
    from planner.traffic.scaling import RateRequest

    method = scaling(scale, "--scale")  # Raises for an unknown one, even if it is not used.
    return None if rate is None and window is None else RateRequest(rate, method, window or "whole")


def stdout_console(*, soft_wrap: bool = False) -> Console:
    """A console as wide as the terminal; in a pipe so wide that no name is folded, which grep would miss."""
    is_seen = sys.stdout.isatty() or "COLUMNS" in os.environ  # Whoever sets COLUMNS wants that width.
    return Console(highlight=False, soft_wrap=soft_wrap, width=None if is_seen else PIPE_COLUMNS)


def print_json(document: Any, warnings: Iterable[str] = ()) -> None:
    """Print a document, with the key `warnings` in front if there are any (those of the traffic)."""
    if warning_list := list(warnings):
        document = {"warnings": warning_list, **document}
    print(json.dumps(document, indent=2, allow_nan=False))  # noqa: T201


def print_rows(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for column in rows[0] if rows else ():
        table.add_column(str(column), overflow="fold")
    for row in rows:
        table.add_row(*(short_text(value) for value in row.values()))
    stdout_console().print(table)


def print_markdown(rows: list[dict[str, Any]], title: str) -> None:
    """The same as a table of Markdown below its title, the first column in bold."""
    console = stdout_console(soft_wrap=True)
    names = list(rows[0]) if rows else []

    def line(cells: Iterable[Any]) -> str:
        texts = [" ".join(short_text(cell).split()).replace("|", r"\|") for cell in cells]
        return f"| {' | '.join(texts)} |"

    lines = [f"{title}:", "", line(names), "|---" * len(names) + "|"]
    lines += [line([f"**{label}**", *cells]) for label, *cells in (row.values() for row in rows)]
    console.print("\n".join(lines), end="\n\n", markup=False)


def print_mapping(document: dict[str, Any], title: str) -> None:
    """Print a table with a row for each key; nested values are shortened to one cell."""
    table = Table(title=title or None, show_header=False, title_justify="left")
    for key, value in document.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k}: {short_text(v)}" for k, v in value.items()) or "-"
        elif isinstance(value, list | tuple):
            value = "\n".join(short_text(item) for item in value) or "-"
        table.add_row(str(key), short_text(value))
    stdout_console().print(table)


def short_text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def slo_rows(verdict: dict[str, Any], slo: Slo | None) -> list[dict[str, Any]]:
    """The table of an SLO, from a document of `verdict_document`: a row for each limit, for `attainment` and
    for each guarantee to tenants. If windows are judged, a row below each shows the worst of them.
    """
    rows: list[dict[str, Any]] = []

    def add_row(*cells: str) -> None:
        rows.append(dict(zip(("metric", "limit", "simulated", "within", "verdict"), cells, strict=True)))

    windows_count = verdict.get("windows", 0)
    for line in verdict["lines"]:
        add_row(
            line["limit"],
            seconds_cell(line["limit_s"]),
            seconds_cell(line["simulated_s"]),
            f"{100 * line['kept_frac']:.2f} %",
            _verdict_word(line["holds"]),
        )
        if worst := line.get("worst_window"):
            value, share = seconds_cell(worst.get("simulated_s")), f"{100 * worst['kept_frac']:.2f} %"
            add_row(window_text(worst, windows_count), "", value, share, "")
    if slo is not None and slo.attainment_frac is not None:
        add_row(
            "attainment",
            f"{100 * slo.attainment_frac:g} %",
            f"{100 * verdict['attainment_frac']:.2f} %",
            "all limits at once",
            _verdict_word(verdict["attainment_holds"]),
        )
        if worst := verdict.get("attainment_worst_window"):
            add_row(window_text(worst, windows_count), "", f"{100 * worst['kept_frac']:.2f} %", "", "")
    for promised in verdict.get("tenants", ()):
        share, windows = promised["share_frac"], counted(promised["windows"], "window")
        got = "-" if share is None else f"{100 * share:.1f} %"
        whose = "nobody waited so long" if share is None else f"{promised['tenant']}, of {windows}"
        add_row(
            promised["guarantee"],
            f"{100 * promised['needed_frac']:g} %",
            got,
            whose,
            _verdict_word(promised["holds"]),
        )
    return rows


def _verdict_word(holds: bool) -> str:
    return "kept" if holds else "MISSED"


def window_text(worst: dict[str, Any], windows_count: int) -> str:
    """The label of the worst window of an SLO."""
    return (
        f"  worst of {windows_count} windows: {show_clock(worst['start_s'])} to {show_clock(worst['end_s'])}"
    )


def seconds_cell(value: Any) -> str:
    return "-" if value is None else show_s(value)
