"""The numbers of the standard streams."""

from __future__ import annotations

import os


def fill_standard_streams() -> None:
    """Open standard streams that were closed at the start, so that no other file gets their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It takes the lowest free number, which is this one.
