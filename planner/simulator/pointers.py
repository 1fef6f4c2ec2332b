"""Hands a NamedTuple of arrays, such as the simulator's State, from one compiled function to the next as one
pointer. A function reads its fields through the pointer as it would read those of the tuple:
`state.requests`.

For every call Numba takes such a tuple apart into about seven numbers per array. With a pointer, from which
fields are read one by one, the kernels compile in two thirds of the time and run up to 1.5 times as fast.

While a simulation runs, the addresses and the lengths of the arrays do not change; only what is in the arrays
does. LLVM cannot see that, and would read addresses and lengths again after every write into an array. So
these reads are marked as reads of constant memory.

Most functions here are hooks of Numba, with the names and arguments that Numba asks for.
"""

from __future__ import annotations

import hashlib

from numba.core import cgutils, types
from numba.core.cgutils import ir  # type: ignore[attr-defined]
from numba.core.datamodel import models
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, register_model


class Handle(types.Type):
    """Numba's type of a pointer to a tuple of the (Numba) type `fields`."""

    def __init__(self, fields):
        self.fields = fields
        # The name is a part of Numba's key of stored code. So it must be short, and the same in each process.
        super().__init__(name=f"Handle{hashlib.sha1(str(fields).encode()).hexdigest()[:12]}")


def _named(handle, dmm):
    """The tuple's type in LLVM, under a name, because the text of LLVM would mostly repeat it otherwise.
    `dmm` is Numba's manager of data models, which knows how a type lies in memory.
    """
    named = ir.global_context.get_identified_type(handle.name)
    if named.is_opaque:  # The name is new: it has no fields yet.
        named.set_body(*dmm[handle.fields].get_data_type().elements)
    return named


@register_model(Handle)
class _HandleModel(models.PrimitiveModel):
    """A handle is a pointer in LLVM."""

    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _named(fe_type, dmm).as_pointer())


@infer_getattr
class _HandleAttribute(AttributeTemplate):
    """A field of a handle has the type of that field of the tuple."""

    key = Handle

    def generic_resolve(self, handle, name):
        return handle.fields.types[handle.fields.fields.index(name)]


@lower_getattr_generic(Handle)
def _read(context, builder, handle, pointer, name):
    """The instructions that read the field `name` of the tuple behind the pointer."""
    i = handle.fields.fields.index(name)
    model = context.data_model_manager[handle.fields.types[i]]
    place = cgutils.gep_inbounds(builder, pointer, 0, i)
    # Numba's own way to read an array takes twenty instructions. If the field has the same form in memory as
    # in registers, one will do.
    if model.get_data_type() == model.get_value_type():
        loaded = builder.load(place)
        loaded.set_metadata("tbaa", _constant_tag(builder.module))
        return loaded
    return model.load_from_data_pointer(builder, place)


def _constant_tag(module):
    """LLVM's mark of a read from memory that nobody writes, a tag of type-based alias analysis (`tbaa`). The
    1 at its end says that the memory is constant.
    """
    zero, one = (ir.Constant(ir.IntType(64), number) for number in (0, 1))
    kind = module.add_metadata(["field of a state", module.add_metadata(["states"]), zero])
    return module.add_metadata([kind, kind, zero, one])


@intrinsic
def pointer_to(typing_context, fields):
    """A pointer to a copy of the tuple `fields`, on the stack of the calling function, while that runs."""

    def codegen(context, builder, signature, arguments):
        model = context.data_model_manager[fields]
        place = cgutils.alloca_once(builder, model.get_data_type())
        builder.store(model.as_data(builder, arguments[0]), place)
        pointer = builder.bitcast(place, _named(handle, context.data_model_manager).as_pointer())
        # Assembler without any code, which LLVM must take for a function that uses all memory. So LLVM cannot
        # move reads through its result, although they are marked as constant, before the tuple is stored.
        hides = ir.FunctionType(pointer.type, [pointer.type])
        return builder.asm(hides, "", "=r,0,~{memory}", [pointer], side_effect=True)

    handle = Handle(fields)
    return handle(fields), codegen
