"""The decorators with which the simulator's functions are compiled by Numba.

    entry_jit    A function that Python calls. Its machine code is stored on disk (planner.files.code_cache).
    kernel_jit   A function that compiled code alone calls. It becomes part of the entry (linking.py).
    small_jit    The same, copied into its callers.
    where_has    A function that is compiled for some fleets alone, with another in its place for all others.
    where_rare   The same, for what only fleets out of the ordinary need (kernel_variants.py).

No compiled function allocates memory, so no references to arrays need to be counted (`_nrt` is False): with
the counters a simulation took four times as long.

An engine is made of several files, with constants of others. So the version of an entry's stored code is
`SOURCES`: after a change in any of these files it is compiled anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.extending import overload

from planner.files.code_cache import cached_jit
from planner.simulator.layout import OPTIONAL
from planner.simulator.linking import FunctionCompiler, ProgramCompiler

_ROOM, _PLANNER = Path(__file__).parent, Path(__file__).parents[1]
# The files outside planner/simulator/ from which compiled functions take constants.
_BELOW = (
    *("fleet.py", "policies.py"),
    *("models/foreign_forms.py", "models/parallelism.py", "models/speculation.py"),
)
_FILES = (*sorted(_ROOM.glob("*.py")), *(_PLANNER / name for name in _BELOW))
# A text that changes with any of these files.
SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in _FILES)).hexdigest()

_jit: Any = njit
_INNER: Any = {
    "nogil": True,
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": FunctionCompiler,
}
kernel_jit = _jit(**_INNER)
small_jit = _jit(**_INNER, forceinline=True)
entry_jit = cached_jit(
    version=SOURCES, nogil=True, _nrt=False, no_cfunc_wrapper=True, pipeline_class=ProgramCompiler
)


def where_rare(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that ordinary fleets, which have their own form of the kernel, never need.

    There `otherwise` is compiled: it returns a value of the same type with which nothing happens
    (kernel_variants.py).
    """
    return where_has("has", otherwise)


def where_has(field: str, otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function for fleets that have a `field` of OPTIONAL (layout.py): "caches" are those with
    prefix caches or policies that count tenants. For other fleets `otherwise` runs. The first argument of
    both is the state.

    Where the field is None, only `otherwise` is compiled: Numba chooses by the type of the field when it
    compiles a caller (`overload`). Elsewhere both are, and `State.has` says when the simulation runs which of
    the two is called.
    """
    plain = getattr(otherwise, "py_func", otherwise)

    def decorate(function: Callable[..., Any]) -> Any:
        chosen = _either(OPTIONAL.index(field), function, plain) if field in OPTIONAL else function

        # The name under which compiled callers know the function; `pick` says what is compiled there.
        def hook(*arguments: Any) -> Any:
            raise TypeError(f"{function.__name__} can be called by compiled code only")

        @overload(hook, strict=False, jit_options=_INNER)
        def pick(state: Any, *rest: Any) -> Callable[..., Any]:
            fields = state.fields
            field_type = fields.types[fields.fields.index(field)]
            return plain if isinstance(field_type, types.NoneType) else chosen

        return hook

    return decorate


def _either(index: int, function: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function that calls `function` where `State.has[index]` is true, else `otherwise`."""
    compiled, compiled_otherwise = kernel_jit(function), kernel_jit(otherwise)

    def either(state: Any, *rest: Any) -> Any:
        if state.has[index]:
            return compiled(state, *rest)
        return compiled_otherwise(state, *rest)

    return either
