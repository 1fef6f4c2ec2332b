"""Compile a program of many functions as one: LLVM optimises it once, and machine code is made once.

Numba optimises every function together with all that it calls and makes machine code of both; the compilation
of the function's caller does all of this work again. With functions twelve calls deep most of the time goes
into code that nobody runs. Here the compilation of an inner function ends with LLVM's representation, as it
was lowered. The function that Python calls links all of these, and only this program is optimised. Numba's
hook for that is a compiler class of one's own (`pipeline_class`).

What linking saves was measured on 2026-11-23 on one core: the first simulation of an ordinary fleet takes
12.5 CPU seconds linked and 22.6 with plain `njit`, that of a fleet with prefix caches 39.6 and 125.8. Later
runs are about equally quick (4.4 and 4.8 ms a simulation of the samples). Without linking, whoever first
plans with prefix caches would wait a minute and a half longer.
"""

from __future__ import annotations

import gc

from numba import _dynfunc  # type: ignore[attr-defined]
from numba.core import compiler, typed_passes, types, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.np import arrayobj


class LinkedFunction(JITCodeLibrary):
    """LLVM's representation of one inner function, without those that it calls.

    The methods replace those of Numba's library, which would link and optimise here.
    """

    def add_llvm_module(self, ll_module):
        ll_module.data_layout = self._codegen._data_layout
        self._final_module.link_in(ll_module)

    def add_linking_library(self, library):
        self._linking_libraries.append(library)

    def finalize(self):
        self._finalized = True


class LinkedProgram(JITCodeLibrary):
    """A function that Python calls, linked with all that it calls, directly or not."""

    def add_linking_library(self, library):
        self._linking_libraries.append(library)

    def finalize(self):
        libraries = dict.fromkeys(self._linking_libraries)
        for library in (todo := list(libraries)):  # The list grows while it is walked.
            if isinstance(library, LinkedFunction):
                todo += [other for other in library._linking_libraries if other not in libraries]
                libraries.update(dict.fromkeys(todo))
        self._linking_libraries = list(libraries)
        self._own_names = {
            function.name for function in self._final_module.functions if not function.is_declaration
        }
        super().finalize()

    def _optimize_final_module(self):
        """Mark what was linked in as internal, then optimise.

        LLVM then knows that nobody outside calls these functions, and moves one that is called once to its
        caller. That takes 8 % off a simulation's time (2026-11-26).
        """
        for function in self._final_module.functions:
            if not function.is_declaration and function.name not in self._own_names:
                function.linkage = "internal"
        super()._optimize_final_module()


class _ChooseLibrary(LoweringPass):
    """Lower into a library of `library_class` in place of Numba's own."""

    library_class: type[JITCodeLibrary]

    def __init__(self):
        LoweringPass.__init__(self)

    def run_pass(self, state):
        state.library = self.library_class(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        state.flags.no_compile = self.library_class is LinkedFunction
        return True


@register_pass(mutates_CFG=False, analysis_only=False)
class _ChooseFunction(_ChooseLibrary):
    _name = "choose_function"
    library_class = LinkedFunction


@register_pass(mutates_CFG=False, analysis_only=False)
class _ChooseProgram(_ChooseLibrary):
    _name = "choose_program"
    library_class = LinkedProgram


@register_pass(mutates_CFG=False, analysis_only=False)
class _AnnounceFunction(LoweringPass):
    """Make an inner function known to the functions that call it, as lowering does with compiled ones."""

    _name = "announce_function"

    def __init__(self):
        LoweringPass.__init__(self)

    def run_pass(self, state):
        lowered = state["cr"]
        fndesc, env = lowered.fndesc, lowered.env
        name = _dynfunc.make_function(fndesc.lookup_module(), fndesc.qualname, "", 0, env, (state.library,))
        state.targetctx.insert_user_function(name, fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=name)
        return True


def _plain_index(context, builder, index_type, index, size):
    """An index as it is; Numba's own function counts one below 0 from the array's end."""
    return context.cast(builder, index, index_type, types.intp if index_type.signed else types.uintp)


@register_pass(mutates_CFG=False, analysis_only=False)
class _LowerPlainIndices(typed_passes.NativeLowering):
    """Lower with indices as they are: no function of the simulator counts from the end of an array.

    Looking at every index for its sign took a fifth of a simulation's time (2026-11-26). With
    NUMBA_BOUNDSCHECK an index below 0 is refused. Numba compiles one function at a time, so nothing else is
    lowered meanwhile.
    """

    _name = "native_lowering_plain"

    def __init__(self):
        typed_passes.NativeLowering.__init__(self)

    def run_pass(self, state):
        counted_from_end = arrayobj.fix_integer_index
        arrayobj.fix_integer_index = _plain_index
        try:
            return super().run_pass(state)
        finally:
            arrayobj.fix_integer_index = counted_from_end


# These passes serve closures, `with`, literals, array expressions and branches on types, which no function of
# the simulator has.
UNUSED = (
    untyped_passes.WithLifting,
    untyped_passes.InlineClosureLikes,
    untyped_passes.DeadBranchPrune,
    untyped_passes.RewriteDynamicRaises,
    untyped_passes.MakeFunctionToJitFunction,
    untyped_passes.InlineInlinables,
    untyped_passes.FindLiterallyCalls,
    untyped_passes.LiteralUnroll,
    untyped_passes.LiteralPropagationSubPipelinePass,
    typed_passes.InlineOverloads,
    typed_passes.NopythonRewrites,
    typed_passes.DumpParforDiagnostics,
)


def _passes(state):
    """Numba's passes without those in UNUSED, and with plain indices."""
    passes = compiler.DefaultPassBuilder.define_nopython_pipeline(state)
    passes.passes = [
        (_LowerPlainIndices, row[1]) if row[0] is typed_passes.NativeLowering else row
        for row in passes.passes
        if row[0] not in UNUSED
    ]
    return passes


class FunctionCompiler(compiler.CompilerBase):
    """Compiles functions that only compiled functions call."""

    def define_pipelines(self):
        passes = _passes(self.state)
        passes.add_pass_after(_AnnounceFunction, _LowerPlainIndices)
        passes.add_pass_after(_ChooseFunction, typed_passes.IRLegalization)
        passes.finalize()
        return [passes]


class ProgramCompiler(compiler.CompilerBase):
    """Compiles functions that Python calls.

    Python's search for garbage is off meanwhile: it took a tenth of the time.
    """

    def compile_extra(self, func):
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            return super().compile_extra(func)
        finally:
            if is_collecting:
                gc.enable()

    def define_pipelines(self):
        passes = _passes(self.state)
        passes.add_pass_after(_ChooseProgram, typed_passes.IRLegalization)
        passes.finalize()
        return [passes]
