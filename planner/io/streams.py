"""The numbers of the standard streams."""

from __future__ import annotations

import os


def hold_places() -> None:
    """Whoever starts us with a standard stream closed: no file or pipe of ours may get its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, this one
