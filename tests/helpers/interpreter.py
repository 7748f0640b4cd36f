"""Triton's interpreter, without work that it repeats or throws away.

It computes with NumPy, on small blocks here, so that most of its time goes to the types and shapes
of its tensors. What this module changes are no results and no checks of them.
"""

import dataclasses
from typing import Any

from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

KNOWN_OPERANDS = 4096  # pairs of operands that are remembered, as loops have many numbers
SHARED_ELEMENTS = 1024  # of the largest constant that is shared


def make_interpreter_faster() -> None:
    """Change the interpreter of this process."""
    _call_builtins_directly()
    _patch_language_once_per_launch()
    _skip_sums_for_assertions_that_are_off()
    _share_types_and_shapes()
    _check_operands_once()


def _call_builtins_directly() -> None:
    """Call a function of the language without two others around it, which pass `_semantic` on."""
    semantic = TritonSemantic(interpreter.interpreter_builder)
    replacements: dict[Any, Any] = {}

    def replacement(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if member not in replacements:
            replacements[member] = replacement(member)
        scope.set_attr(owner, name, replacements[member])

    interpreter._patch_attr = patch_attribute


def _patch_language_once_per_launch() -> None:
    """Let calls of device functions find the language as the launch has left it.

    The interpreter looks for the functions of `triton.language` and replaces them before a kernel
    runs, and again at each call of a device function, which takes longer than most device
    functions. Here it replaces them once for each launch, and looks for them once.
    """
    patch_language = interpreter._patch_lang
    languages_of_modules: dict[str, frozenset[str]] = {}
    patched: set[frozenset[str]] = set()  # what this launch has patched
    changes: dict[frozenset[str], list[tuple[Any, str, Any]]] = {}

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        """The replacements of one launch, whose end makes the set empty."""

        def restore(self) -> None:
            patched.clear()
            super().restore()

    def languages_of(names: dict[str, Any]) -> frozenset[str]:
        known = (value for value in names.values() if value is language or value is core)
        return frozenset(module.__name__ for module in known)

    def patch_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module not in languages_of_modules:
            languages_of_modules[module] = languages_of(function.__globals__)
        languages = languages_of_modules[module]
        if languages in patched:
            return interpreter._LangPatchScope()
        is_launch = not patched
        patched.add(languages)
        if not is_launch:
            return patch_language(function)
        scope = Scope()
        if languages in changes:
            for owner, name, value in changes[languages]:
                scope.set_attr(owner, name, value)
            return scope
        scope._changes = patch_language(function)._changes
        found = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
        changes[languages] = found
        return scope

    interpreter._patch_lang = patch_once


def _skip_sums_for_assertions_that_are_off() -> None:
    """Compute no integer sum a second time in int64 for an assertion that only debug mode makes."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _share_types_and_shapes() -> None:
    """Construct the type of a block, its shape and its NumPy dtype once for all tensors."""
    construct_block, numpy_dtype = core.block_type.__init__, interpreter._get_np_dtype
    equal_blocks, broadcast = core.block_type.__eq__, TritonSemantic.broadcast_impl_value
    blocks: dict[Any, core.block_type] = {}
    shapes: dict[tuple[int, ...], tuple[core.tuple, core.constexpr]] = {}
    numpy_dtypes: dict[str, Any] = {}
    scalar_shape, scalar_numel = core.tuple([]), core.constexpr(1)

    def key_of_block(element_ty: Any, shape: Any) -> tuple[Any, ...]:
        sizes = shape.value if isinstance(shape, core.constexpr) else shape
        return element_ty.name, *(
            size.value if isinstance(size, core.constexpr) else size for size in sizes
        )

    def shared_block(cls: type, element_ty: Any, shape: Any) -> core.block_type:
        found = blocks.get(key_of_block(element_ty, shape))
        return object.__new__(cls) if found is None else found

    def construct_block_once(self: core.block_type, element_ty: Any, shape: Any) -> None:
        if not hasattr(self, "tensor_shape"):
            construct_block(self, element_ty, shape)
            key = key_of_block(element_ty, shape)
            if key[1:] not in shapes:
                sizes = core.tuple([core.constexpr(size) for size in self.shape])
                shapes[key[1:]] = sizes, core.constexpr(self.numel)
            self.tensor_shape, self.tensor_numel = shapes[key[1:]]
            self.blocks_of_this_shape = {}
            blocks[key] = self

    def with_element_type(self: core.block_type, scalar_ty: core.dtype) -> core.block_type:
        found = self.blocks_of_this_shape
        if scalar_ty.name not in found:
            found[scalar_ty.name] = core.block_type(scalar_ty, self.shape)
        return found[scalar_ty.name]

    def construct_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            self.shape, self.numel = type.tensor_shape, type.tensor_numel
        else:
            self.shape, self.numel = scalar_shape, scalar_numel

    def broadcast_unequal_shapes(self: Any, lhs: core.tensor, rhs: core.tensor) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def shared_numpy_dtype(type: core.dtype) -> Any:
        name = (type.element_ty if isinstance(type, core.block_type) else type).name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = numpy_dtype(type)
        return numpy_dtypes[name]

    core.block_type.__new__ = shared_block
    core.block_type.__init__ = construct_block_once
    core.block_type.__eq__ = lambda self, other: other is self or equal_blocks(self, other)
    core.block_type.with_element_ty = with_element_type
    core.block_type.to_ir = lambda self, builder: self
    core.tensor.__init__ = construct_tensor
    TritonSemantic.broadcast_impl_value = broadcast_unequal_shapes
    interpreter._get_np_dtype = shared_numpy_dtype


def _check_operands_once() -> None:
    """Compare the types of operands once for each pair, and share the blocks of constants.

    Otherwise each operation compares the types of its operands anew, and makes a block of each
    number. A block that is shared cannot be written.
    """
    check, unwrap = TritonSemantic.binary_op_type_checking_impl, core._unwrap_if_constexpr
    equal_dtypes = core.dtype.__eq__
    numbers = {bool, int, float}
    unwrapped = {core.tensor, core.dtype, *numbers, str, type(None)}
    # What takes the place of each operand: a constant, or None for the operand itself.
    known: dict[tuple[Any, ...], tuple[core.tensor | None, ...]] = {}

    def checked(self: Any, lhs: Any, rhs: Any, *flags: bool, **named_flags: bool) -> Any:
        kinds = []
        for operand in (lhs, rhs):
            if type(operand) is core.tensor:
                kinds.append(operand.type.name)
            elif type(operand) in numbers:
                kinds.append(repr(operand))  # as 0.0 equals -0.0, and True equals 1
            else:
                return check(self, lhs, rhs, *flags, **named_flags)
        key = (*kinds, *flags, *named_flags.items())
        if key in known:
            left, right = known[key]
            return lhs if left is None else left, rhs if right is None else right
        results = check(self, lhs, rhs, *flags, **named_flags)
        places = []
        for operand, result in zip((lhs, rhs), results, strict=True):
            if result is operand:
                places.append(None)
            elif type(operand) in numbers and result.handle.data.size <= SHARED_ELEMENTS:
                result.handle.data.setflags(write=False)
                places.append(result)
        if len(places) == 2:
            if len(known) == KNOWN_OPERANDS:
                known.clear()
            known[key] = tuple(places)
        return results

    def equal_or_same(self: core.dtype, other: object) -> bool:
        return self is other or equal_dtypes(self, other)

    TritonSemantic.binary_op_type_checking_impl = checked
    core._unwrap_if_constexpr = lambda value: value if type(value) in unwrapped else unwrap(value)
    core.dtype.__eq__ = equal_or_same
