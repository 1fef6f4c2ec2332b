"""The decorators with which the simulator's functions are compiled by Numba.

    entry_jit    A function that Python calls, an "entry". Its machine code is stored on disk (code_cache.py).
    kernel_jit   A function that only compiled code calls. It becomes part of the entry (linking.py).
    small_jit    As kernel_jit, but copied into its callers.
    where_has    A function that is compiled only for fleets that need it; for all others another function,
                 the decorator's argument, takes its place.
    where_rare   As where_has, for what only fleets out of the ordinary need (kernel_variants.py).

No compiled function allocates memory, so references to arrays need not be counted (`_nrt`, Numba's runtime
for that, is off): with the counters a simulation took four times as long.

An entry is compiled from many files of this folder, with constants of others. So its stored code is marked
with SOURCES, a digest of all these files, and compiled anew after a change in any of them.
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
    *("domain.py", "policies.py"),
    *("models/foreign_forms.py", "models/parallelism.py", "models/speculation.py"),
)
_FILES = (*sorted(_ROOM.glob("*.py")), *(_PLANNER / name for name in _BELOW))
SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in _FILES)).hexdigest()

_jit: Any = njit  # Without the types that Numba declares, which do not know the options below.
_INNER: Any = {  # Options of functions that only compiled code calls: they need no wrappers for others.
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
    """Decorate a function that ordinary fleets never need.

    In the form of the kernel for ordinary fleets (kernel_variants.py) `otherwise` is compiled in its place.
    It must take the same arguments, and return a value of the same type with which nothing happens.
    """
    return where_has("has", otherwise)


def where_has(field: str, otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function for fleets whose state has a `field` of OPTIONAL (layout.py). For example, fleets
    with prefix caches, or with policies that count tenants, have "caches". For other fleets `otherwise` runs.
    The first argument of both is the state.

    In the kernel's form for ordinary fleets the field is None, and only `otherwise` is compiled: Numba
    chooses by the type of the field when it compiles a caller (`overload`). In the whole kernel both are
    compiled, and while a simulation runs `State.has` says which of them is called.
    """
    # `otherwise` may be compiled already; `overload` takes the function as it was written.
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
    """A function, to be compiled, that calls `function` where `State.has[index]` is true, else
    `otherwise`.
    """
    compiled, compiled_otherwise = kernel_jit(function), kernel_jit(otherwise)

    def either(state: Any, *rest: Any) -> Any:
        if state.has[index]:
            return compiled(state, *rest)
        return compiled_otherwise(state, *rest)

    return either
