"""Resources that the machine, or a limit on the process (ulimit), may refuse: memory, threads, open files."""

import errno
import os
import resource
import signal
import time
from collections.abc import Callable

_MEMORY, _FILES = "memory", "number of open files (ulimit -n)"
_BY_NUMBER = {errno.ENOMEM: _MEMORY, errno.EMFILE: _FILES, errno.ENFILE: _FILES}
_BY_TEXT = {  # By a part of a message of libraries in C and Rust.
    "can't start new thread": "number of threads or the memory (ulimit -u, ulimit -v)",
    "cannot allocate memory": _MEMORY,
    "failed to map segment": _MEMORY,
    "too many open files": _FILES,
}
FEW_FILES = 256  # A process that may open fewer files counts as limited.
MARGIN_BYTES = 2**26  # A trial succeeds only if this much memory (64 MiB) remains free.
PROBE_S = 60.0  # A trial that takes longer counts as failed.


def missing_resource(error: BaseException) -> str | None:
    """The resource whose lack caused the error; None for any other cause."""
    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, OSError) and error.errno in _BY_NUMBER:
        return _BY_NUMBER[error.errno]
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return None
    message = str(error).lower()
    return next((name for part, name in _BY_TEXT.items() if part in message), None)


def is_limited() -> bool:
    """Whether a limit on memory or open files is set for this process."""
    memory, files = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE))
    # A limit below 0 is RLIM_INFINITY.
    return memory != resource.RLIM_INFINITY or 0 <= files < FEW_FILES


def survives_in_copy(work: Callable[[], object]) -> bool:
    """Whether `work` ends without an error in a forked copy of this process, whose stderr is discarded. Some
    libraries end their process if memory or files are short.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            margin = bytearray(MARGIN_BYTES)
            work()
            code = 0 if margin else 1  # Until this use of `margin` its memory stays taken.
        finally:
            os._exit(code)
    until_s = time.monotonic() + PROBE_S
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:  # Process id (0: runs), exit status.
        if time.monotonic() > until_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1]) == 0
