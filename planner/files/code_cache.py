"""A cache on disk for machine code that Numba compiles: a file per function and types of arguments.

With Numba's own cache every run fails if one of its files is damaged, the disk is full or its folder cannot
be written. It also compiles anew for each copy of the same sources, and never deletes a file. Here each file
begins with the digest of the rest, so code in a damaged one is noticed and compiled anew. If nothing can be
written, one warning says so and each run compiles. Writing a file deletes those of other versions of its
source.

The name of a file has digests of what its code depends on: the source file of the function, the version of
all else that it uses, the types, Python, the processor, the level of optimisation, and whether indices are
checked. Each version of Numba has a folder: in __pycache__ beside the source or, if that cannot be written,
in the user's cache folder. NUMBA_CACHE_DIR replaces both.

If several processes need the same code at once, one compiles it and the others wait for its file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import logging
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import compiler, config, serialize
from numba.core.caching import _Cache

from planner.files.checked_files import user_cache

LOG = logging.getLogger("fleetplan.code_cache")
DIGEST_BYTES = 32  # SHA-256.
PATIENCE_S = 120.0  # Several times the longest compilation. A process that waited so long compiles too.
LOOK_AGAIN_S = 0.05  # The time between two attempts to lock, far shorter than any compilation.
# The modules of the simulator's engines: these take 5 to 25 s to compile on an idle machine, all other code
# less than a second.
ENGINES = ("kernel", "distserve", "splitwise")
TURN = ".turn"  # The suffix of the file that a process locks while it is its turn to compile.

# These parts of Numba have no type annotations.
_config: Any = config
_dumps: Any = serialize.dumps
_rebuild: Any = compiler.CompileResult._rebuild


def cached_jit(*, version: str = "", **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with these options, which caches the machine code on disk.

    `version` must change with everything outside the source file that the function depends on: code and
    constants of other files. It must also change with the values that the function closes over.
    """
    jit = numba.njit(**options)

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = jit(function)
        # Code with Numba's runtime needs what Numba declares: without, typed dictionaries end the process.
        dispatcher._cache = CodeCache(function, version, has_runtime=options.get("_nrt", True))
        return dispatcher

    return decorate


class CodeCache(_Cache):
    """The cached code of one function, with the methods that Numba calls. `version` is as in `cached_jit`;
    `has_runtime`: the code may allocate memory (Numba's `_nrt`).
    """

    def __init__(self, function: Callable[..., Any], version: str, *, has_runtime: bool) -> None:
        self._has_runtime = has_runtime
        source = Path(inspect.getfile(function))
        self._digest = hashlib.sha256(source.read_bytes() + version.encode()).hexdigest()[:16]
        self._name = f"{source.stem}.{function.__name__}"
        self._beside = source.parent / "__pycache__"

    @property
    def cache_path(self) -> str:
        """The folder of the files, as a text for Numba."""
        return str(_code_folder(self._beside))

    def enable(self) -> None:
        """Always enabled."""

    def disable(self) -> None:
        """Does nothing: the cache is always enabled."""

    def flush(self) -> None:
        """Does nothing: Numba's `recompile` calls it, then overwrites the files."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for these types. None if it is missing or damaged, which makes Numba compile it."""
        if self._has_runtime:  # Else an eighth of a CPU second is saved.
            target_context.refresh()  # Loads the functions that the code calls, as Numba's own cache does.
        path = self._code_path(sig, target_context.codegen())
        code = _read_code(path)
        if code is None:
            _take_turn(path)
            code = _read_code(path)  # Another process may have written it meanwhile.
            if code is None:
                if self._name.split(".")[0] in ENGINES:
                    LOG.info(
                        "compiling the simulator for such fleets, only the first time: 10 to 30 s, on a busy "
                        "machine a minute or more"
                    )
                return None
            _end_turn(path)
        return _rebuild(target_context, *pickle.loads(code))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Cache the code that Numba has compiled."""
        path = self._code_path(sig, data.target_context.codegen())
        try:
            if not data.library.has_dynamic_globals:  # Code that has them holds addresses of this process.
                self._store_code(path, _dumps(data._reduce()))
        finally:
            _end_turn(path)

    def _store_code(self, path: Path, code: bytes) -> None:
        """Write a file of code, and delete those of other versions of the source."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(path, hashlib.sha256(code).digest() + code)
        except OSError as error:
            _warn_once(str(path.parent), error.strerror or str(error))
            return
        for old in (*path.parent.glob(f"{self._name}-*.code"), *path.parent.glob(f"{self._name}-*{TURN}")):
            if not old.name.startswith(f"{self._name}-{self._digest}-"):
                with contextlib.suppress(OSError):
                    old.unlink()

    def _code_path(self, sig: Any, codegen: Any) -> Path:
        """The file of the code for these types."""
        python = (sys.implementation.cache_tag, sys.abiflags)
        depends_on = (str(sig), codegen.magic_tuple(), python, _config.BOUNDSCHECK, _config.OPT)
        key = hashlib.sha256(repr(depends_on).encode()).hexdigest()[:16]
        return _code_folder(self._beside) / f"{self._name}-{self._digest}-{key}.code"


def _read_code(path: Path) -> bytes | None:
    """The code in a file; None if the file is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


_TURNS: dict[Path, int] = {}  # The locks (file descriptors) of the files that this process compiles.


def _take_turn(path: Path) -> None:
    """Wait while another process compiles this code, then lock its file. A dead process holds no lock.

    If the file system has no locks, or the folder cannot be written, no process waits.
    """
    if path in _TURNS:  # An earlier compilation failed and left the lock to this process.
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(TURN), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return
    deadline_s = time.monotonic() + PATIENCE_S
    try:
        while not _try_lock(lock) and time.monotonic() < deadline_s:
            time.sleep(LOOK_AGAIN_S)
    except BaseException:  # An interrupt must not leave the file open.
        os.close(lock)
        raise
    _TURNS[path] = lock


def _try_lock(lock: int) -> bool:
    """Lock a file without waiting. False if another process has the lock; True if there are no locks here."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _end_turn(path: Path) -> None:
    """Release the lock, so that the processes that wait go on."""
    if (lock := _TURNS.pop(path, None)) is not None:
        with contextlib.suppress(OSError):
            path.with_suffix(TURN).unlink()
        os.close(lock)


def _write_whole(path: Path, content: bytes) -> None:
    """Write the file as a whole or not at all, even if another process writes it at the same time."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _code_folder(beside: Path) -> Path:
    """The folder of cached code. Each version of Numba has its own: environments may share the sources."""
    version = f"numba-{numba.__version__}"
    if _config.CACHE_DIR:
        return Path(_config.CACHE_DIR) / version
    if os.access(beside if beside.exists() else beside.parent, os.W_OK):
        return beside / version
    return (user_cache() or beside) / version


@cache
def _warn_once(folder: str, why: str) -> None:
    """Log that compiled code cannot be written to this folder, and the reason; once for each."""
    LOG.warning(
        "plan: compiled code cannot be kept in %s (%s), so each run compiles anew; make room there, or set "
        "NUMBA_CACHE_DIR to a folder that can be written",
        folder,
        why,
    )
