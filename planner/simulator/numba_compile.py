"""Numba as the simulator uses it: what starts from Python is kept on disk (planner.files.code_cache), what it
calls is part of it (linking.py).

Nothing here allocates, so no array needs a reference counted: without `_nrt` three quarters of the time went
into counters. Inner functions get no wrapper for Python.

What a function closes over is part of the key under which its code is kept. The engines have several files,
with constants from below them, so an entry closes over `SOURCES`.
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
small_jit = _jit(**_INNER, forceinline=True)  # a few lines, made part of their callers
entry_jit = cached_jit(nogil=True, _nrt=False, no_cfunc_wrapper=True, pipeline_class=WholeCompiler)

_ROOM, _PLANNER = Path(__file__).parent, Path(__file__).parents[1]
_BELOW = (
    *("fleet.py", "policies.py"),
    *("models/foreign_forms.py", "models/parallelism.py", "models/speculation.py"),
)
_FILES = (*sorted(_ROOM.glob("*.py")), *(_PLANNER / name for name in _BELOW))
SOURCES = int.from_bytes(hashlib.sha256(b"".join(path.read_bytes() for path in _FILES)).digest()[:7])


def where_cached(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """A function for fleets with prefix caches (`State.caches`) alone; for others it is `otherwise`. The
    first argument of both is the state.

    Where `caches` is None only `otherwise` is compiled, elsewhere both, and `State.has` says which is meant.
    """
    return _where("caches", otherwise)


def where_ranked(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """The same of fleets with data-parallel ranks (`State.dp_ranks`)."""
    return _where("dp_ranks", otherwise)


def where_lora(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """The same for fleets with LoRA (`State.adapters`)."""
    return _where("adapters", otherwise)


def where_predicted(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """The same for fleets whose outputs are predicted from others' (`State.outputs`)."""
    return _where("outputs", otherwise)


def where_offloaded(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """The same for fleets with CPU memory behind prefix caches (`State.offload`)."""
    return _where("offload", otherwise)


def where_classed(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """The same where limits or the queue are of classes of requests (`State.classes`)."""
    return _where("classes", otherwise)


def where_rare(otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """A function for all but ordinary fleets (kernel_variants.py): these never come where it is called, and
    `otherwise` only has to give what no event follows from.
    """
    return _where("has", otherwise)


def _where(field: str, otherwise: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    plain = getattr(otherwise, "py_func", otherwise)

    def decorate(function: Callable[..., Any]) -> Any:
        chosen = _either(OPTIONAL.index(field), function, plain) if field in OPTIONAL else function

        def hook(*arguments: Any) -> Any:
            raise TypeError(f"{function.__name__} is for compiled code alone")

        @overload(hook, strict=False, jit_options=_INNER)
        def pick(state: Any, *rest: Any) -> Callable[..., Any]:
            fields = state.fields
            found = fields.types[fields.fields.index(field)]
            return plain if isinstance(found, types.NoneType) else chosen

        return hook

    return decorate


def _either(at: int, function: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Both, of which `State.has[at]` says which is meant."""
    one, other = kernel_jit(function), kernel_jit(otherwise)

    def either(state: Any, *rest: Any) -> Any:
        if state.has[at]:
            return one(state, *rest)
        return other(state, *rest)

    return either
