"""What a command still does when it is interrupted: tidy up, and save the answer so far. Commands register
the functions for that, and fleetplan/__main__.py calls `tidy_and_report` before it ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_last_words: list[Callable[[], str]] = []
_tidy_functions: list[Callable[[], None]] = []


@contextmanager
def last_words(save: Callable[[], str]) -> Iterator[None]:
    """If an interrupt ends the block, `tidy_and_report` calls `save` once and gives what it returns.

    `save` must be quick and may be called from any thread.
    """
    _last_words[:] = [save]
    try:
        yield
    except KeyboardInterrupt:  # `save` stays registered for `tidy_and_report`.
        raise
    except BaseException:
        _last_words.clear()
        raise
    _last_words.clear()


@contextmanager
def tidy_at_end(tidy: Callable[[], None]) -> Iterator[None]:
    """Call `tidy` at the end of the block, or when an interrupt ends the process inside it."""
    _tidy_functions.append(tidy)
    try:
        yield
    finally:
        _tidy_functions.remove(tidy)
        tidy()


def tidy_and_report() -> str:
    """Tidy up, and return the last words of the command; '' if there are none or saving fails."""
    message = ""
    for save in _last_words:
        with suppress(Exception):
            message = save()
    _last_words.clear()
    for tidy in reversed(_tidy_functions):
        with suppress(Exception):
            tidy()
    return message
