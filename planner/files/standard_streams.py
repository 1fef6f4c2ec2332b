"""The numbers of the standard streams."""

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
    """Give `sys.stdout` a number of its own, and make number 1 stderr.

    HiGHS 1.13 prints a line about itself to stdout in one of a thousand runs, also with its output switched
    off. A program that reads JSON from stdout could not read the answer then.
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
