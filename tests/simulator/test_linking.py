"""Functions that are compiled as one program."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from simulations import one_bad_hour

from planner.simulator import kernel
from planner.simulator.linking import FunctionCompiler, LinkedFunction, LinkedProgram, ProgramCompiler
from planner.simulator.numba_compile import kernel_jit, small_jit
from planner.simulator.replay import simulate

_jit: Any = njit


@small_jit
def _square(x):  # type: ignore[no-untyped-def]
    return x * x


@kernel_jit
def _at(values, i):  # type: ignore[no-untyped-def]
    return _square(values[i])


@_jit(pipeline_class=FunctionCompiler)
def _sum(values, power):  # type: ignore[no-untyped-def]
    total = 0.0
    for i in range(len(values)):
        total += min(_at(values, i), 100.0)
    return total // power


@_jit(pipeline_class=ProgramCompiler)
def _whole(values, power):  # type: ignore[no-untyped-def]
    return _sum(values, power) + _at(values, 0)


def test_a_program_of_three_floors_computes_what_python_does() -> None:
    """1 + 4 + 100 over 2 is 52, and 1. A division by zero is Python's error, from whatever floor."""
    values = np.array([1.0, 2.0, 20.0])
    assert _whole(values, 2) == 53.0
    assert _whole(values, 2.0) == 53.0
    try:
        _whole(values, 0)
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("a division by zero went unseen")


def test_only_the_whole_is_machine_code() -> None:
    assert _whole(np.array([3.0]), 1) == 18.0
    libraries = {f.__name__: [c.library for c in f.overloads.values()] for f in (_square, _at, _sum, _whole)}
    assert all(type(library) is LinkedProgram for library in libraries.pop("_whole"))
    for parts in libraries.values():
        assert parts and all(type(library) is LinkedFunction for library in parts)
        assert all(library.get_pointer_to_function("any") == 0 for library in parts)


def test_all_but_the_whole_is_internal() -> None:
    """LLVM may move what is called once to its caller, and drop it, if nobody outside calls it: also `_sum`
    and `_at`, which the whole itself calls."""
    _whole(np.array([3.0]), 1)
    for compiled in _whole.overloads.values():
        assert all("_whole" in name for name in compiled.library._own_names)


def test_no_index_is_looked_at_for_its_sign() -> None:
    """Numba counts an index below 0 from the end; `values[i]` of the functions here is one read."""
    _whole(np.array([3.0]), 1)
    texts = [str(each.library._final_module) for each in _at.overloads.values()]
    assert texts and not any("icmp slt i64" in text for text in texts)


def test_loading_the_kernel_imports_no_array_functions_of_numba() -> None:
    """Stored code names the modules of all functions in it, and numba.np.arraymath imports scipy.linalg."""
    simulate(*one_bad_hour())
    modules = set()
    for form in kernel.simulate_events.overloads.values():
        # None: compiled in this process, not loaded.
        environments = form.referenced_envs or form._find_referenced_environments()
        modules |= {environment.globals["__name__"] for environment in environments}
    assert "planner.simulator.slots" in modules
    assert not modules & {"numba.np.arraymath", "numba.np.linalg"}
