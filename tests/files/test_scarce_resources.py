"""What is short is told from what is wrong, and drawing is tried in a copy of the process first."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from planner.files.scarce_resources import missing_resource, survives_in_copy


@pytest.mark.parametrize(
    ("error", "want"),
    [
        (MemoryError(), "memory"),
        (OSError(errno.EMFILE, "Too many open files"), "number of open files (ulimit -n)"),
        (OSError(errno.ENOENT, "No such file"), None),
        (RuntimeError("can't start new thread"), "number of threads or the memory (ulimit -u, ulimit -v)"),
        (ImportError("libx.so: failed to map segment from shared object"), "memory"),
        (ValueError("7"), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_what_is_short_is_named(error: BaseException, want: str | None) -> None:
    assert missing_resource(error) == want


def test_work_that_ends_its_process_ends_a_copy_alone() -> None:
    def break_off() -> None:
        os.kill(os.getpid(), signal.SIGTRAP)

    assert survives_in_copy(lambda: None)
    assert not survives_in_copy(break_off)
    assert not survives_in_copy(lambda: 1 / 0)
