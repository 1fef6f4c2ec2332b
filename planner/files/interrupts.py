"""Lets an interrupted command save its answer so far, and tidy up. Commands register functions for that, and
fleetplan/__main__.py calls `save_and_tidy` before it ends the process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_save_functions: list[Callable[[], str]] = []  # At most one: `saving_on_interrupt` is never nested.
_tidy_functions: list[Callable[[], None]] = []


@contextmanager
def saving_on_interrupt(save: Callable[[], str]) -> Iterator[None]:
    """If an interrupt ends the block, `save_and_tidy` will call `save` once and return its message.

    `save` must be quick and may be called from any thread.
    """
    _save_functions[:] = [save]
    try:
        yield
    except KeyboardInterrupt:  # `save` stays registered for `save_and_tidy`.
        raise
    except BaseException:
        _save_functions.clear()
        raise
    _save_functions.clear()


@contextmanager
def tidy_at_end(tidy: Callable[[], None]) -> Iterator[None]:
    """Call `tidy` at the end of the block, or when an interrupt ends the process inside it."""
    _tidy_functions.append(tidy)
    try:
        yield
    finally:
        _tidy_functions.remove(tidy)
        tidy()


def save_and_tidy() -> str:
    """Call the registered functions. Returns the message of the one that saves; '' without one, or if it
    fails.
    """
    message = ""
    for save in _save_functions:
        with suppress(Exception):
            message = save()
    _save_functions.clear()
    for tidy in reversed(_tidy_functions):
        with suppress(Exception):
            tidy()
    return message
