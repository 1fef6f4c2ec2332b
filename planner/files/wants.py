"""Resources that the machine or a limit on the process (ulimit) refuses: memory, threads, open files."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable

_MEMORY, _FILES = "memory", "number of open files (ulimit -n)"
_BY_NUMBER = {errno.ENOMEM: _MEMORY, errno.EMFILE: _FILES, errno.ENFILE: _FILES}
_BY_TEXT = {  # parts of messages of libraries in C and Rust
    "can't start new thread": "number of threads or the memory (ulimit -u, ulimit -v)",
    "cannot allocate memory": _MEMORY,
    "failed to map segment": _MEMORY,
    "too many open files": _FILES,
}
FEW_FILES = 256  # a process that may open fewer files counts as limited
MARGIN_BYTES = 2**26  # memory that must still be free after the trial
PROBE_S = 60.0


def missing_resource(error: BaseException) -> str | None:
    """The resource whose lack caused the error; None for any other cause."""
    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, OSError) and error.errno in _BY_NUMBER:
        return _BY_NUMBER[error.errno]
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return None
    text = str(error).lower()
    return next((want for part, want in _BY_TEXT.items() if part in text), None)


def is_limited() -> bool:
    """Whether a limit on memory or open files is set for this process."""
    memory, files = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE))
    return memory != resource.RLIM_INFINITY or 0 <= files < FEW_FILES


def survives_in_copy(work: Callable[[], object]) -> bool:
    """Whether `work` ends well in a forked copy of this process, whose stderr is discarded. Some libraries
    end the process if memory or files are short, so they are tried out in a copy.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            margin = bytearray(MARGIN_BYTES)
            work()
            code = 0 if margin else 1
        finally:
            os._exit(code)
    until_s = time.monotonic() + PROBE_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until_s:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return False
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1]) == 0
