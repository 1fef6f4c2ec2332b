"""The decorators with which the simulator's functions are compiled by Numba.

    entry_jit    A function that Python calls. Its machine code is stored on disk (planner.files.code_cache).
    kernel_jit   A function that compiled code alone calls. It becomes part of the entry (linking.py).
    small_jit    The same, copied into its callers.
    where_...    A function that is compiled for some fleets alone, with another in its place for all others.

No compiled function allocates memory, so no references to arrays need to be counted (`_nrt` is False): with
the counters a simulation took four times as long.

The values that an entry closes over are part of the key of its stored code. An engine is made of several
files, with constants of others, so every entry closes over `SOURCES`: after a change in any of these files it
is compiled anew.
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
from planner.simulator.linking import PartCompiler, WholeCompiler

_jit: Any = njit
_INNER: Any = {
    "nogil": True,
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": PartCompiler,
}
kernel_jit = _jit(**_INNER)
small_jit = _jit(**_INNER, forceinline=True)
entry_jit = cached_jit(nogil=True, _nrt=False, no_cfunc_wrapper=True, pipeline_class=WholeCompiler)

_ROOM, _PLANNER = Path(__file__).parent, Path(__file__).parents[1]
# The files outside planner/simulator/ from which compiled functions take constants.
_BELOW = (
    *("fleet.py", "policies.py"),
    *("models/foreign_forms.py", "models/parallelism.py", "models/speculation.py"),
)
_FILES = (*sorted(_ROOM.glob("*.py")), *(_PLANNER / name for name in _BELOW))
# A number of 56 bits that changes with any of these files.
SOURCES = int.from_bytes(hashlib.sha256(b"".join(path.read_bytes() for path in _FILES)).digest()[:7])


def where_cached(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that runs only for fleets with prefix caches; for other fleets `otherwise` runs.

    The first argument of both is the state (`layout.State`).

    Where `State.caches` is None, only `otherwise` is compiled. Elsewhere both are, and `State.has` says when
    the simulation runs which of the two is called.
    """
    return _where("caches", otherwise)


def where_ranked(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """As `where_cached`, for fleets with data-parallel ranks (`State.dp_ranks`)."""
    return _where("dp_ranks", otherwise)


def where_lora(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """As `where_cached`, for fleets with LoRA (`State.adapters`)."""
    return _where("adapters", otherwise)


def where_predicted(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """As `where_cached`, for fleets that predict output lengths from earlier requests (`State.outputs`)."""
    return _where("outputs", otherwise)


def where_offloaded(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """As `where_cached`, for fleets with CPU memory behind their prefix caches (`State.offload`)."""
    return _where("offload", otherwise)


def where_classed(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """As `where_cached`, where limits or the queue go by classes of requests (`State.classes`)."""
    return _where("classes", otherwise)


def where_rare(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that ordinary fleets, which have their own form of the kernel, never need.

    There `otherwise` is compiled: it returns a value of the same type with which nothing happens
    (kernel_variants.py).
    """
    return _where("has", otherwise)


def _where(field: str, otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles a function where `State.<field>` is not None, and `otherwise` elsewhere.

    Numba chooses between them by the type of that field when it compiles a caller (`overload`).
    """
    plain = getattr(otherwise, "py_func", otherwise)

    def decorate(function: Callable[..., Any]) -> Any:
        chosen = _either(OPTIONAL.index(field), function, plain) if field in OPTIONAL else function

        def hook(*arguments: Any) -> Any:
            raise TypeError(f"{function.__name__} can be called by compiled code only")

        @overload(hook, strict=False, jit_options=_INNER)
        def pick(state: Any, *rest: Any) -> Callable[..., Any]:
            fields = state.fields
            field_type = fields.types[fields.fields.index(field)]
            return plain if isinstance(field_type, types.NoneType) else chosen

        return hook

    return decorate


def _either(at: int, function: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function that calls `function` where `State.has[at]` is true, else `otherwise`."""
    one, other = kernel_jit(function), kernel_jit(otherwise)

    def either(state: Any, *rest: Any) -> Any:
        if state.has[at]:
            return one(state, *rest)
        return other(state, *rest)

    return either
