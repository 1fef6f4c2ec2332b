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

HEARD = (signal.SIGINT, signal.SIGTERM)  # Ctrl-C, and how a service manager or a scheduler ends a program
_came: list[int] = []  # those of them that came, the first of which decides the exit code
_silent = [True]  # True until the interrupt has been reported.
_began_s = time.monotonic()
PATIENCE_S = 3.0  # Python hears of an interrupt between two of its steps, a solver's run may be one of them


# Linear algebra runs on one thread: what is large here runs on threads of ours, sums would depend on the
# number of cores, and with little memory (ulimit -v) OpenBLAS waits for its buffers for ever.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Python looks for garbage in cycles after so many new objects, 700 by default: 3 % of a plan's CPU time, in
# which it finds next to nothing.
GARBAGE_AFTER = (10_000, 20, 100)


def main() -> None:
    """Load the command and run it."""
    gc.set_threshold(*GARBAGE_AFTER)
    ordinary = (signal.default_int_handler, signal.SIG_DFL)  # nohup and & have them ignored
    is_heard = all(signal.getsignal(number) in ordinary for number in HEARD)
    if is_heard:
        _hear(_leave)
        atexit.register(_end)  # runs after all others, as the first to be registered
    try:
        check_planner()
    except ImportError as error:
        sys.exit(f"plan: {error}")
    from planner.files.standard_streams import fill_standard_streams

    fill_standard_streams()
    if is_heard:
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        _thread.start_new_thread(_watch, (read,))
    from planner.cli import main as run
    from planner.commands import command_output

    command_output.began_s = _began_s
    sys.unraisablehook = _again
    try:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, _raise)
        run()
    except BaseException as error:
        if is_heard:
            _hear(_leave)
        if not _is_interrupt(error):
            raise
        _say()
        sys.exit(_exit_code())
    finally:
        if is_heard:
            _hear(_leave)  # Python's own end takes time too, and nothing is around it


def _hear(act: Callable[..., object] | signal.Handlers) -> None:
    """From now on, an interrupt (Ctrl-C, or a signal of HEARD) calls `act`."""
    for number in HEARD:
        signal.signal(number, act)


def _raise(number: int, _frame: object) -> NoReturn:
    """As Python does of Ctrl-C."""
    _came.append(number)
    raise KeyboardInterrupt


def _exit_code() -> int:
    """As shells count: 130 after SIGINT, 143 after SIGTERM."""
    return 128 + int(_came[0] if _came else signal.SIGINT)


def _leave(*came: Any) -> NoReturn:
    """Where nothing is under way that would have to be put back."""
    _came.extend(came[:1])
    _say()
    os._exit(_exit_code())


def _end() -> None:
    """All is done. Python would give the signal back now, and send it where a library's code that it ran from
    text had been interrupted."""
    _hear(signal.SIG_IGN)
    if not _silent:
        try:
            sys.stdout.flush()
        except (OSError, ValueError):  # stdout is closed.
            pass
        os._exit(_exit_code())


def _watch(pipe: int) -> None:
    """Ends what does not end itself soon after an interrupt: files are written whole or not at all."""
    while (number := os.read(pipe, 1)[0]) not in HEARD:
        pass
    time.sleep(PATIENCE_S)
    _leave(number)


def _say() -> None:
    """Once, with what the command has to say."""
    while _silent:
        _silent.pop()
        known = sys.modules.get("planner.files.interrupts")
        words = known.tidy_and_report() if known is not None else ""
        try:
            os.write(2, f"plan: interrupted{'; ' if words else ''}{words}\n".encode(errors="replace"))
        except OSError:  # stderr is closed, so nothing can be reported.
            pass


def _again(unraisable: Any) -> None:
    """An interrupt inside a callback cannot be raised there, and Python drops it: let it come again."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(_interrupt_soon, ())
    else:
        sys.__unraisablehook__(unraisable)


def _interrupt_soon() -> None:
    time.sleep(0.05)
    _thread.interrupt_main()


def _is_interrupt(error: BaseException | None) -> bool:
    """Itself, or what a library made of it: typer leaves with 130, a module cannot be imported."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
