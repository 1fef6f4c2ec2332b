"""Functions that commands share: to read requests, show progress and warnings on stderr, stop in time, and
refuse to overwrite the input. Imports within functions keep other commands fast.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Self

import typer
from rich.console import Console
from rich.markup import escape

from planner.documents.traffic_description import describes_traffic
from planner.errors import InputError, OutOfTimeError
from planner.files.checked_files import is_path
from planner.search.problem.stages import Stage, Urgent, left_s
from planner.traffic.scaling import RateRequest

if TYPE_CHECKING:
    from planner.documents.catalog import Catalog
    from planner.fleet import Fleet
    from planner.traffic.trace import Trace

SLO_MISSED = 5  # The exit code of `simulate` and `validate` where the SLO is missed.
began_s: float | None = None  # When this process began, on time.monotonic's clock; __main__.py sets it.
# The next three are set by hand.
MOST_WALL_PER_CPU = 3.0  # A larger ratio comes from waiting, such as for a cluster, not from other work.
QUIET_S = 1.0  # Work shorter than this shows no progress.
SILENT_S = 10.0  # After this long without a new stage, a line says that the work goes on.
LONGEST_S = 1e8  # Three years; the system's timer accepts no more.


def at_work(executor: str | None, address: str | None) -> AbstractContextManager[None]:
    """A context whose simulations run where --executor and --address say, by default on all cores here."""
    if executor is None and address is None:
        return nullcontext()
    from planner.parallel.executors import Executor, working_on

    return working_on(Executor(executor or "threads", address))


# planner/files/code_cache.py logs here that the simulator is being compiled while a command waits for it.
NOTICES = logging.getLogger("fleetplan.code_cache")


class _NoticeHandler(logging.Handler):
    """Shows log records as progress, each text once. Warnings are printed on stderr, also with --quiet."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self.shown_texts = set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            typer.echo(text, err=True)
        elif text not in self.shown_texts:
            self.shown_texts.add(text)
            self.progress.print_notice(text)


class Progress:
    """Shows the stage of the work on stderr once the work takes longer than QUIET_S, unless `quiet`.

    A search ends after `limit_s`, so the time left is never shown as longer. Where stderr is no terminal, a
    long stage is printed again every SILENT_S, with the share of its work that the search has done.
    """

    def __init__(self, *, quiet: bool = False, limit_s: float = math.inf) -> None:
        self.console = Console(stderr=True, highlight=False, quiet=quiet)
        self.start_s = time.monotonic()
        self.limit_s = limit_s
        self.done_frac = 0.0
        self.status = self.console.status("") if sys.stderr.isatty() and not quiet else None
        self.stage = "at work"  # The last message.
        self.printed_s = self.start_s  # When the last message came.
        # Time spent waiting for code to be compiled, and since when the command waits now. Code is compiled
        # once, so this time is left out of estimates.
        self.waited_s = 0.0
        self.waiting_since_s: float | None = None
        self.printed_percent = 0  # Of the work that a search may take, used.
        # The context of the last message: the work of a search is counted per context.
        self.context = copy_context()
        self.has_ended = threading.Event()
        self.notices = _NoticeHandler(self)

    def __call__(self, message: str) -> None:
        """Show the stage that begins now. An `Urgent` message is printed at once."""
        now_s = time.monotonic()
        elapsed_s = now_s - self.start_s
        if self.waiting_since_s is not None:
            self.waited_s, self.waiting_since_s = self.waited_s + now_s - self.waiting_since_s, None
        text = self._how_far(message, elapsed_s) + message
        self.stage, self.printed_s, self.context = str(message), now_s, copy_context()
        if isinstance(message, Urgent):
            self.console.print(text, markup=False, soft_wrap=True)
        elif self.status is not None:
            self.status.update(escape(text))
            self.status.start()
        elif elapsed_s > QUIET_S:
            self._print_stamped(text)

    def print_notice(self, text: str) -> None:
        """Print a notice at once. The time from here to the next stage counts as waiting (`waited_s`)."""
        self.stage, self.printed_s = text, time.monotonic()
        self.waiting_since_s = self.printed_s
        self._print_stamped(text)

    def print_estimate(self, text: str) -> None:
        """Print an answer that precedes the final one; nothing within QUIET_S of the start, when the final
        answer follows at once.
        """
        if time.monotonic() - self.start_s > QUIET_S:
            self._print_stamped(text)

    def _print_stamped(self, text: str) -> None:
        """Print a line with the seconds since the work began."""
        elapsed_s = time.monotonic() - self.start_s
        self.console.print(f"[{elapsed_s:5.1f} s] {text}", markup=False, soft_wrap=True)

    def taken_s(self) -> float:
        """How long the command has been at work, loading it included."""
        return time.monotonic() - (began_s or self.start_s)

    def wall_per_cpu(self) -> float:
        """Wall-clock seconds per second of CPU time so far: more than 1 if other work shares the cores."""
        if began_s is None:  # The command runs within another program, whose CPU time would count too.
            return 1.0
        return min(max(self.taken_s() / time.process_time(), 1.0), MOST_WALL_PER_CPU)

    def _how_far(self, message: str, elapsed_s: float) -> str:
        """The share done, which never falls, and the time left, as text; empty if the message is no Stage.

        A stage that is shown again takes longer than expected, so its time left would only grow: it is left
        out.
        """
        if not isinstance(message, Stage):
            return ""
        comes_again = message.done_frac <= self.done_frac
        self.done_frac = max(self.done_frac, message.done_frac)
        limit_left_s = max(self.limit_s - elapsed_s, 0.0)
        left = None if comes_again else left_s(elapsed_s - self.waited_s, self.done_frac, limit_left_s)
        about = "" if left is None else f", about {max(round(left), 1)} s left"
        return f"{100 * self.done_frac:.0f} %{about}: "

    def _repeat_stage(self) -> None:
        """Until the end, print that the stage goes on whenever nothing was printed for SILENT_S."""
        while not self.has_ended.wait(max(self.printed_s + SILENT_S - time.monotonic(), 0.01)):
            # A new stage may have been printed during the wait.
            if time.monotonic() >= self.printed_s + SILENT_S:
                self.printed_s = time.monotonic()
                self._print_stamped(f"still: {self.stage}{self._work_text()}")

    def _work_text(self) -> str:
        """The share of its work that the search has done, as text; empty without a time limit, and if it has
        not grown since it was printed.
        """
        from planner.search.oracle.work_clock import now_s, work_limit_s

        if math.isinf(self.limit_s):
            return ""
        used_percent = round(100 * min(self.context.run(now_s) / work_limit_s(self.limit_s), 1.0))
        if used_percent <= self.printed_percent:
            return ""
        self.printed_percent = used_percent
        return f"; {used_percent} % of the work that a plan may take is done"

    def __enter__(self) -> Self:
        NOTICES.addHandler(self.notices)
        NOTICES.setLevel(logging.INFO)
        if self.status is None and not self.console.quiet:
            threading.Thread(target=self._repeat_stage, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        NOTICES.removeHandler(self.notices)
        self.has_ended.set()
        if self.status is not None:
            self.status.stop()  # Also after an error, so that the terminal gets its cursor back.


def read_requests(
    path: Path | None,
    slo: Path | None = None,
    catalog: Catalog | Path | None = None,
    *,
    seed: int = 0,
    drop_invalid: bool = False,
    is_rate_given: bool = False,
) -> Trace:
    """Read the trace at `path`, or draw the traffic that `slo` describes; prints warnings. Equal time stamps
    are not spread yet (trace.spread_stamps).

    With a trace `slo` must describe no traffic, unless --rate or --window are given (`is_rate_given`), which
    replace the traffic section of `slo`. The columns of a log are read as `slo` says. Raises InputError for
    what cannot be read, typer.BadParameter where neither a trace nor a description is given.
    """
    from planner.api.inputs import requests_of
    from planner.api.questions import read_task
    from planner.documents.catalog import read_catalog
    from planner.documents.log_columns import read_log_options

    described = None
    if slo is not None and not (is_rate_given and path is not None) and describes_traffic(slo):
        described = read_task(slo, read_catalog(catalog)).task().described
    if path is None and described is None:
        raise typer.BadParameter(
            "is missing; give the traffic, or describe it in slo.yaml: traffic: {rate: 30, input: 1500, "
            "output: 300}",
            param_hint="--trace",
        )
    log_options = None if path is None else read_log_options(slo)
    requests = requests_of(path, described, seed=seed, drop_invalid=drop_invalid, log_options=log_options)
    print_warnings(requests.warnings)
    return requests


def print_warnings(warnings: Iterable[str]) -> tuple[str, ...]:
    """Print warnings on stderr, before the answer on stdout. Returns them for `print_json`."""
    warning_list = tuple(warnings)
    for warning in warning_list:
        typer.echo(f"warning: {warning}", err=True)
    return warning_list


def refuse_to_overwrite(outputs: Iterable[Path], *inputs: Path | None) -> None:
    """Raise InputError for an output that would overwrite an input, or that is a folder. Inputs of None were
    not given.
    """
    for path in outputs:
        if is_path(str(path)) and path.is_dir():
            raise InputError(
                f"{path}: is a directory, and a file of that name is written; name another place with -o"
            )
        for read in inputs:
            # `samefile` needs both files to exist.
            if read is not None and is_path(str(path)) and is_path(str(read)) and path.samefile(read):
                raise InputError(f"{read}: would be written over; name another place with -o")


@contextmanager
def stopped_after(seconds: float, so_far: Callable[[], str] = lambda: "") -> Iterator[None]:
    """A context that ends after `seconds` with an OutOfTimeError, whose message includes `so_far()`.

    For searches without a time limit of their own. Like that of Ctrl-C, the error comes between two steps of
    Python, so a compiled simulation ends first. Threads other than the main thread have no limit.
    """

    def raise_out_of_time(*_: object) -> None:
        raise OutOfTimeError(f"no answer within {seconds:g} s{so_far()}; raise --time-limit")

    # Python allows signal handlers only in the main thread.
    if threading.current_thread() is not threading.main_thread() or seconds > LONGEST_S:
        yield
        return
    before = signal.signal(signal.SIGALRM, raise_out_of_time)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # Repeats, because a callback may drop the signal.
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def traffic_option(rate: float | None, scale: str, window: str | None) -> RateRequest | None:
    """The traffic that --rate and --window choose; None without either, where the SLO file decides."""
    from planner.traffic.scaling import RateRequest, checked_scale

    known_scale = checked_scale(scale, "--scale")  # Refuses an unknown scale even if it is not used.
    return None if rate is None and window is None else RateRequest(rate, known_scale, window or "whole")


def write_best_so_far(fleet: Fleet, out: Path | None, message: str) -> str:
    """Write the fleet of an interrupted search into `out`, if there is one; the message, with the file."""
    from planner.documents.fleet_file import fleet_document
    from planner.files.checked_files import to_yaml, write_file
    from planner.reports.output import BEST_SO_FAR

    if out is None:
        return message
    head = f"# The search was interrupted; not certified: {message}.\n"
    write_file(out / BEST_SO_FAR, head + to_yaml(fleet_document(fleet)))
    return f"{message}: {out / BEST_SO_FAR}"
