"""What is still done when a command is interrupted, however little time is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_words: list[Callable[[], str]] = []


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


def spoken() -> str:
    """What there is to say at the end, '' where there is nothing or it fails."""
    while _words:
        with suppress(Exception):
            return _words.pop()()
    return ""
