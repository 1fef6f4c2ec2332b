"""Sets the file descriptors ("numbers") of the standard streams."""

import io
import os
import sys


def fill_standard_streams() -> None:
    """Open standard streams that were closed at the start, so that no other file gets their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # `open` takes the lowest free number, which is this one.


def keep_native_prints_off_stdout() -> None:
    """Move `sys.stdout` to a new number that leads to the same stream, and let number 1 lead to stderr.

    In one of a thousand runs HiGHS 1.13 prints a line about itself to number 1, even with its output switched
    off. That would spoil the JSON on stdout.
    """
    stdout = sys.stdout
    if stdout is not sys.__stdout__ or not isinstance(stdout, io.TextIOWrapper):
        return  # A test has replaced it.
    stdout.flush()
    sys.stdout = open(
        os.dup(1),
        "w",
        buffering=1 if stdout.line_buffering or stdout.write_through else -1,
        encoding=stdout.encoding,
        errors=stdout.errors,
    )
    os.dup2(2, 1)
