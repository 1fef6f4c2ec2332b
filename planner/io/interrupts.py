"""What is still done when a command is interrupted, however little time is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_words: list[Callable[[], str]] = []
_tidying: list[Callable[[], None]] = []


@contextmanager
def last_words(save: Callable[[], str]) -> Iterator[None]:
    """Where an interrupt ends the block, `save` is called once and what it returns is said. It must be quick,
    and is called from any thread."""
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
def tidied(tidy: Callable[[], None]) -> Iterator[None]:
    """`tidy` is called at the end of the block, and where an interrupt ends the process inside of it."""
    _tidying.append(tidy)
    try:
        yield
    finally:
        _tidying.remove(tidy)
        tidy()


def spoken() -> str:
    """Tidy up; what there is to say at the end, '' where there is nothing or it fails."""
    said = ""
    for save in _words:
        with suppress(Exception):
            said = save()
    _words.clear()
    for tidy in reversed(_tidying):
        with suppress(Exception):
            tidy()
    return said
