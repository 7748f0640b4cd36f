"""Triton's interpreter, without work that it repeats or throws away.

It computes with NumPy, on small blocks here, so that most of its time goes to the types and shapes
of its tensors. What this module changes are no results and no checks of them.
"""

import dataclasses
from typing import Any

from triton.language import core
from triton.runtime import interpreter


def make_interpreter_faster() -> None:
    """Change the interpreter of this process."""
    _patch_language_once_per_launch()
    _skip_sums_for_assertions_that_are_off()
    _share_types_and_shapes()


def _patch_language_once_per_launch() -> None:
    """Let calls of device functions find the language as the launch has left it.

    The interpreter replaces the functions of `triton.language` before a kernel runs, and again at
    each call of a device function, which takes longer than most device functions. Here it does so
    once for each module and launch.
    """
    patch_language = interpreter._patch_lang
    patched: set[str] = set()  # the modules whose functions have been called in this launch

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        """The replacements of one launch, whose end makes the set empty."""

        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module in patched:
            return interpreter._LangPatchScope()
        is_launch = not patched
        patched.add(module)
        found = patch_language(function)
        if is_launch:
            scope = Scope()
            scope._changes = found._changes
            return scope
        return found

    interpreter._patch_lang = patch_once


def _skip_sums_for_assertions_that_are_off() -> None:
    """Compute no integer sum a second time in int64 for an assertion that only debug mode makes."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _share_types_and_shapes() -> None:
    """Construct the type of a block, its shape and its NumPy dtype once for all tensors."""
    construct_block, numpy_dtype = core.block_type.__init__, interpreter._get_np_dtype
    equal = core.tuple.__eq__
    blocks: dict[Any, core.block_type] = {}
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
            self.tensor_shape = core.tuple([core.constexpr(size) for size in self.shape])
            self.tensor_numel = core.constexpr(self.numel)
            blocks[key_of_block(element_ty, shape)] = self

    def construct_tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if type.is_block():
            self.shape, self.numel = type.tensor_shape, type.tensor_numel
        else:
            self.shape, self.numel = scalar_shape, scalar_numel

    def shared_numpy_dtype(type: core.dtype) -> Any:
        name = (type.element_ty if isinstance(type, core.block_type) else type).name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = numpy_dtype(type)
        return numpy_dtypes[name]

    def equal_or_same(self: core.tuple, other: Any) -> core.constexpr:
        return core.constexpr(True) if other is self else equal(self, other)

    core.tuple.__eq__ = equal_or_same
    core.block_type.__new__ = shared_block
    core.block_type.__init__ = construct_block_once
    core.tensor.__init__ = construct_tensor
    interpreter._get_np_dtype = shared_numpy_dtype
