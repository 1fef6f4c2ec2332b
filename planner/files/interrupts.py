"""What a command still does when it is interrupted: tidy up, and save what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_words: list[Callable[[], str]] = []
_tidying: list[Callable[[], None]] = []


@contextmanager
def last_words(save: Callable[[], str]) -> Iterator[None]:
    """If an interrupt ends the block, call `save` once and print what it returns. `save` must be quick and
    may be called from any thread."""
    _words[:] = [save]
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException:
        _words.clear()
        raise
    _words.clear()


@contextmanager
def tidy_at_end(tidy: Callable[[], None]) -> Iterator[None]:
    """Call `tidy` at the end of the block, or when an interrupt ends the process inside it."""
    _tidying.append(tidy)
    try:
        yield
    finally:
        _tidying.remove(tidy)
        tidy()


def tidy_and_report() -> str:
    """Tidy up, and return the last words of the command; '' if there are none or saving fails."""
    message = ""
    for save in _words:
        with suppress(Exception):
            message = save()
    _words.clear()
    for tidy in reversed(_tidying):
        with suppress(Exception):
            tidy()
    return message
