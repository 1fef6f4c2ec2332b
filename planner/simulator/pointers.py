"""A NamedTuple of arrays, handed from one compiled function to the next as one pointer.

For every call Numba takes such a tuple apart into about seven numbers per array. With a pointer, from which
fields are read one by one, the kernels compile in two thirds of the time and run up to 1.5 times as fast.

Where the arrays lie and how long they are never changes behind a pointer. LLVM cannot see that, and would
read it again after every write into an array. So these reads are marked as reads of constant memory.
"""

from __future__ import annotations

import hashlib

from numba.core import cgutils, types
from numba.core.cgutils import ir  # type: ignore[attr-defined]
from numba.core.datamodel import models
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, register_model


class Handle(types.Type):
    """Numba's type of a pointer to a tuple of type `fields`."""

    def __init__(self, fields):
        self.fields = fields
        # Numba's key of stored code has this name, so it is short and does not change between processes.
        super().__init__(name=f"Handle{hashlib.sha1(str(fields).encode()).hexdigest()[:12]}")


def _named(handle, dmm):
    """The tuple's LLVM type, under a name. Written out at each use, it would be most of LLVM's text."""
    named = ir.global_context.get_identified_type(handle.name)
    if named.is_opaque:
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
    """Read the field `name` of the tuple behind the pointer."""
    i = handle.fields.fields.index(name)
    model, place = (
        context.data_model_manager[handle.fields.types[i]],
        cgutils.gep_inbounds(builder, pointer, 0, i),
    )
    if model.get_data_type() == model.get_value_type():  # Arrays are read in one instruction, not in twenty.
        loaded = builder.load(place)
        loaded.set_metadata("tbaa", _constant_tag(builder.module))
        return loaded
    return model.load_from_data_pointer(builder, place)


def _constant_tag(module):
    """LLVM's mark of a read from memory that nobody writes: the last number of a `tbaa` tag says so."""
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
        # An instruction of no code, which seems to use all memory: the reads of constant memory behind its
        # result cannot come before the tuple is stored.
        hides = ir.FunctionType(pointer.type, [pointer.type])
        return builder.asm(hides, "", "=r,0,~{memory}", [pointer], side_effect=True)

    handle = Handle(fields)
    return handle(fields), codegen
