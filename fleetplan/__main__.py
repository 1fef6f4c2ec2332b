"""What `plan`, `fleetplan` and `python -m fleetplan` start: an interrupt ends in one line, however early.

Loading the command takes half a second. This module comes before it and loads only what Python itself has
loaded already: not even `signal` and `typing`, which take as long as Python's start.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import time

from fleetplan import check_planner

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, NoReturn
else:
    import _signal as signal

INTERRUPTED = 130  # 128 + SIGINT, as shells count
_silent = [True]  # until the interrupt has been said
_began_s = time.monotonic()
PATIENCE_S = 3.0  # Python hears of an interrupt between two of its steps, a solver's run may be one of them


def main() -> None:
    """Load the command and run it."""
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup and & have it ignored
    if is_heard:
        signal.signal(signal.SIGINT, _leave)
        atexit.register(_end)  # runs after all others, as the first to be registered
    try:
        check_planner()
    except ImportError as error:
        sys.exit(f"plan: {error}")
    from planner.io.streams import hold_places

    hold_places()
    if is_heard:
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        _thread.start_new_thread(_watch, (read,))
    from planner.cli import main as run
    from planner.commands import common

    common.began_s = _began_s
    sys.unraisablehook = _again
    try:
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except BaseException as error:
        if is_heard:
            signal.signal(signal.SIGINT, _leave)
        if not _is_interrupt(error):
            raise
        _say()
        sys.exit(INTERRUPTED)
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, _leave)  # Python's own end takes time too, and nothing is around it


def _leave(*_: object) -> NoReturn:
    """Where nothing is under way that would have to be put back."""
    _say()
    os._exit(INTERRUPTED)


def _end() -> None:
    """All is done. Python would give the signal back now, and send it where a library's code that it ran from
    text had been interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not _silent:
        try:
            sys.stdout.flush()
        except (OSError, ValueError):  # it is closed
            pass
        os._exit(INTERRUPTED)


def _watch(pipe: int) -> None:
    """Ends what does not end itself soon after an interrupt: files are written whole or not at all."""
    while signal.SIGINT not in os.read(pipe, 1):
        pass
    time.sleep(PATIENCE_S)
    _leave()


def _say() -> None:
    """Once, with what the command has to say."""
    while _silent:
        _silent.pop()
        known = sys.modules.get("planner.io.interrupts")
        words = known.spoken() if known is not None else ""
        try:
            os.write(2, f"plan: interrupted{'; ' if words else ''}{words}\n".encode(errors="replace"))
        except OSError:  # stderr is closed
            pass


def _again(found: Any) -> None:
    """An interrupt inside a callback cannot be raised there, and Python drops it: let it come again."""
    if issubclass(found.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(_interrupt_soon, ())
    else:
        sys.__unraisablehook__(found)


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
