"""What `plan`, `fleetplan` and `python -m fleetplan` start: an interrupt ends in one line, however early.

Loading the command takes half a second. This module comes before it and loads only what Python itself has
loaded already: not even `signal` and `typing`, which take as long as Python's start.
"""

from __future__ import annotations

import _thread
import atexit
import gc
import os
import sys
import time

from fleetplan import check_planner

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import Any, NoReturn
else:
    import _signal as signal

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and how a service manager ends a program.
_handled: list[int] = []  # Those that this process handles; the others are ignored, and stay so.
_received: list[int] = []  # The interrupts that came; the first one decides the exit code.
_is_reported = False
_ended_with: int | None = None  # The exit code of the command, once it has ended with one.
_began_s = time.monotonic()
# After an interrupt the command has this long to end by itself. A solver's run takes longer than most: Python
# acts on a signal only between two of its own steps, and such a run is one step.
GRACE_S = 3.0
REPEAT_S = 0.05  # An interrupt that a callback swallowed is raised again after this time.

# Linear algebra runs on one thread. What is large here runs on threads of ours; sums would depend on the
# number of cores; and with little memory (ulimit -v) OpenBLAS waits for its buffers for ever.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# While modules are loaded, Python looks for garbage in cycles after this many new objects. Its default of 700
# takes 3 % of a plan's CPU time and finds next to nothing.
LOADING_THRESHOLDS = (10_000, 20, 100)


def main() -> None:
    """Load the command and run it."""
    global _ended_with
    gc.set_threshold(*LOADING_THRESHOLDS)
    atexit.register(_end_process)  # The first function registered is the last to run.
    # Behind & a script's shell has Ctrl-C ignored, and it stays ignored; `kill` ends the command there too.
    default_handlers = (signal.default_int_handler, signal.SIG_DFL)
    _handled.extend(number for number in INTERRUPTS if signal.getsignal(number) in default_handlers)
    handles_interrupts = bool(_handled)
    if handles_interrupts:
        _handle_interrupts(_report_and_exit)
    try:
        check_planner()
    except ImportError as error:
        sys.exit(f"plan: {error}")
    from planner.files.standard_streams import fill_standard_streams

    fill_standard_streams()
    if handles_interrupts:
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # Python writes the number of each signal.
        _thread.start_new_thread(_exit_after_grace, (read,))
    from planner.cli import main as run
    from planner.commands import command_output

    command_output.began_s = _began_s
    sys.unraisablehook = _repeat_interrupt
    try:
        _handle_interrupts(_raise_interrupt)
        # asyncio cancels its task on Ctrl-C where it finds Python's own handler.
        if signal.SIGINT in _handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except BaseException as error:
        if handles_interrupts:
            _handle_interrupts(_report_and_exit)
        if not _is_interrupt(error):
            if isinstance(error, SystemExit) and isinstance(error.code, int | None):
                _ended_with = error.code or 0
            raise
        _report_once()
        sys.exit(_exit_code())
    finally:
        if handles_interrupts:
            _handle_interrupts(_report_and_exit)  # Python takes a while to end, outside of this `try`.


def _handle_interrupts(handler: Callable[..., object] | signal.Handlers) -> None:
    """From now on an interrupt calls `handler`."""
    for number in _handled:
        signal.signal(number, handler)


def _raise_interrupt(number: int, _frame: object) -> NoReturn:
    """Raise KeyboardInterrupt for SIGTERM too, as Python does for Ctrl-C."""
    _received.append(number)
    raise KeyboardInterrupt


def _exit_code() -> int:
    """The exit code that shells give: 130 after SIGINT, 143 after SIGTERM."""
    return 128 + int(_received[0] if _received else signal.SIGINT)


def _report_and_exit(*signal_and_frame: Any) -> NoReturn:
    """Report the interrupt and end at once, where the command has nothing under way that must be undone."""
    _received.extend(signal_and_frame[:1])
    _report_once()
    os._exit(_exit_code())


def _end_process() -> None:
    """The last function of the process. It skips the rest of Python's end, which takes nearly a CPU second
    after a plan: Python takes every module and object apart. After an interrupt it would also give the signal
    its default action again, and pass it on to libraries that it had interrupted.
    """
    _handle_interrupts(signal.SIG_IGN)
    code = _exit_code() if _is_reported else _ended_with
    if code is None:  # Python tells of the error that ended the command.
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # A stream is closed.
        if not _is_reported:
            return
    os._exit(code)


def _exit_after_grace(pipe: int) -> None:
    """Wait for an interrupt, and end the process GRACE_S later if it still runs. Files are not left half
    written: they are written aside and renamed.
    """
    while (number := os.read(pipe, 1)[0]) not in INTERRUPTS:
        pass
    time.sleep(GRACE_S)
    _report_and_exit(number)


def _report_once() -> None:
    """Print one line on the interrupt, with what the command adds to it, such as a plan it has saved."""
    global _is_reported
    if _is_reported:
        return
    _is_reported = True
    interrupts = sys.modules.get("planner.files.interrupts")  # Without it no command has begun.
    addition = interrupts.save_and_tidy() if interrupts is not None else ""
    try:
        os.write(2, f"plan: interrupted{'; ' if addition else ''}{addition}\n".encode(errors="replace"))
    except OSError:  # stderr is closed, so nothing can be reported.
        pass


def _repeat_interrupt(unraisable: Any) -> None:
    """Python drops an interrupt that comes inside a callback, where it cannot be raised. Raise it again soon;
    print whatever else was dropped, as Python does.
    """
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(_interrupt_soon, ())
    else:
        sys.__unraisablehook__(unraisable)


def _interrupt_soon() -> None:
    time.sleep(REPEAT_S)
    _thread.interrupt_main()


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether this error is an interrupt, or was raised because of one: Typer exits with 130, and the import
    of a module fails.
    """
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
