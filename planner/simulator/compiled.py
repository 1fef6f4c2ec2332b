"""Numba as the simulator uses it: what starts from Python is cached on disk, what it calls is part of it.

Nothing here allocates, so no array needs a reference counted: without `_nrt` three quarters of the time went
into counters. Inner functions get no wrapper for Python, which halves the time to compile.

Numba looks at one file to see whether its cache is stale, and the kernel has several. What a function closes
over is part of its key, so an entry closes over `SOURCES`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from numba import njit

_jit: Any = njit
kernel_jit = _jit(nogil=True, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
small_jit = _jit(inline="always", _nrt=False)  # a few lines, made part of their callers
entry_jit = _jit(cache=True, nogil=True, _nrt=False)

SOURCES = int.from_bytes(
    hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    ).digest()[:7]
)
