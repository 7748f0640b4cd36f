"""Autograd functions of plain eager mode, whose forward and backward pass are one C call each.

A small call takes the GPU a few microseconds. The graph of gradients, the interpreter and the
launches take the host several times as long, and the backward pass runs in another thread, whose
caches are cold. So the C module does all that is ours: it finds the recorded programs, calls the
autograd function, runs the programs, and saves tensors for the backward pass.

Python serves the first calls, which are recorded, and every call that is not replayed. Compilers
and function transforms need other autograd functions, which have `setup_context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from . import launcher
from .autograd import apply_eager
from .register import Op


class Link(NamedTuple):
    """What a backward pass needs beside the saved tensors, the same for equal calls.

    Fields:
        options: the arguments of the gradient's op after the gradients and the saved tensors.
        positions: for each input of the autograd function the number of the result of the
            gradient's op that is its gradient, or None where it needs none.
        constants: the arguments of the op that are no tensors.
        block: the C module stores several results in one tensor of bytes, the last that it saves.
            For each saved tensor this has its offset there, size, stride and dtype, and two numbers
            of the dtype; None for a tensor of its own. It is None where nothing lies in a block.
    """

    options: tuple[Any, ...]
    positions: tuple[int | None, ...]
    constants: tuple[Any, ...]
    block: tuple[tuple[Any, ...] | None, ...] | None


class EagerFunction(torch.autograd.Function):
    """Base of an autograd function that is one op, and whose gradient is one op.

    Its inputs are the tensors that may need a gradient. In calls that Python serves, the tuple of
    all arguments of the op follows. The context has the `Link` as `link`.

    Class attributes:
        op, gradient: the ops. Without `gradient` the forward pass computes the gradient as well.
        scale: the op that multiplies that gradient, the context's `result`, in place; its arguments
            are this tensor, the gradient of the value and the backend.
        inputs: the positions of the arguments that may need a gradient; None is no input.
        values: the numbers of the results that the function returns, a tuple if there are several.
        without_gradient: which of the values have no gradient.
        saved: what is saved for the backward pass, in the order in which `gradient` takes it:
            arguments by their position, and results by `~` their number.
        num_tensors: how many of the saved tensors `gradient` takes; None for all.
        num_grads: how many gradients of values it takes first.
        gradients: for each of the inputs the number of its gradient among the results.
        save_flag: the position of the argument that says whether a gradient follows, or None.
        attribute: the number of a result that the context has as `result`, or None.
        materializes: whether gradients that are not there are zeros instead of None.
    """

    op: ClassVar[Op]
    gradient: ClassVar[Op | None] = None
    scale: ClassVar[Op | None] = None
    inputs: ClassVar[tuple[int, ...]]
    values: ClassVar[tuple[int, ...]] = (0,)
    without_gradient: ClassVar[tuple[int, ...]] = ()
    saved: ClassVar[tuple[int, ...]]
    num_tensors: ClassVar[int | None] = None
    num_grads: ClassVar[int] = 1
    gradients: ClassVar[tuple[int, ...]] = (0,)
    save_flag: ClassVar[int | None] = None
    attribute: ClassVar[int | None] = None
    materializes: ClassVar[bool] = True

    @staticmethod
    def options(args: tuple[Any, ...], needed: Sequence[bool]) -> tuple[Any, ...]:
        """Return the options of a `Link`.

        Args:
            args: the arguments of the op.
            needed: which of the inputs need a gradient.
        """
        raise NotImplementedError

    @staticmethod
    def differentiate(ctx: Any, grads: tuple[Any, ...], saved: Any) -> Any:
        """Return the results of the gradient's op, which may be differentiated again.

        Args:
            ctx: the context.
            grads: the gradients of the values, None where one is not there.
            saved: the saved tensors. With `scale` it is the key of a scaling that is not recorded,
                or None.
        """
        raise NotImplementedError

    @classmethod
    def link(cls, args: tuple[Any, ...], needs_grad: tuple[bool, ...], block: Any = None) -> Link:
        """Return the link of calls with these arguments."""
        numbers = [
            number
            for number, i in zip(cls.gradients, cls.inputs, strict=True)
            if isinstance(args[i], Tensor)
        ]
        needed = needs_grad[: len(numbers)]
        positions = [number if need else None for number, need in zip(numbers, needed, strict=True)]
        others = (None,) * (len(needs_grad) - len(numbers))
        constants = tuple(arg for arg in args if not isinstance(arg, Tensor))
        return Link(cls.options(args, needed), (*positions, *others), constants, block)

    @classmethod
    def run(cls, *args: Any) -> Any:
        """Return the values of a call in plain eager mode, with a graph of gradients."""
        if (flag := cls.save_flag) is not None:
            args = (*args[:flag], True, *args[flag + 1 :])
        inputs = [args[i] for i in cls.inputs if isinstance(args[i], Tensor)]
        return apply_eager(cls, *inputs, args)

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        cls, args = ctx._forward_cls, inputs[-1]
        results = cls.op(*args)
        results = (results,) if isinstance(results, Tensor) else results
        ctx.link = cls.link(args, ctx.needs_input_grad)
        ctx.save_for_backward(*(results[~i] if i < 0 else args[i] for i in cls.saved))
        ctx.set_materialize_grads(cls.materializes)
        if cls.attribute is not None:
            ctx.result = results[cls.attribute]
        values = tuple(results[i] for i in cls.values)
        ctx.mark_non_differentiable(*(values[i] for i in cls.without_gradient))
        return values if len(values) > 1 else values[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return run_backward(ctx, grads, None)


def run_backward(ctx: Any, grads: tuple[Any, ...], saved: Any) -> tuple[Any, ...]:
    """Return the gradients of the inputs of an eager function.

    Args:
        ctx: the context.
        grads: the gradients of the values.
        saved: the saved tensors; None if the context has not been asked for them. With `scale` it
            is the key of a scaling that is not recorded, or None.
    """
    positions = ctx.link.positions
    for grad in grads:
        if grad is not None:
            break
    else:
        return (None,) * len(positions)
    function: type[EagerFunction] = ctx._forward_cls
    if function.gradient is not None:
        saved = ctx.saved_tensors if saved is None else saved
        if ctx.link.block is not None:
            saved = without_block(saved, ctx.link.block)
    results = function.differentiate(ctx, grads, saved)
    results = (results,) if isinstance(results, Tensor) else results
    return tuple(None if position is None else results[position] for position in positions)


def without_block(saved: tuple[Any, ...], parts: Sequence[Any]) -> tuple[Any, ...]:
    """Return the saved tensors one by one, given the parts of the last one; see `Link`."""
    *others, block = saved
    rest = iter(others)

    def view(offset: int, size: Any, stride: Any, dtype: torch.dtype, *_: int) -> Tensor:
        return block[offset:].view(dtype).as_strided(size, stride)

    return tuple(next(rest) if part is None else view(*part) for part in parts)


class EagerCall:
    """The calls of an op in plain eager mode on a GPU.

    Args:
        op: the op.
        function: its autograd function, or None if the op has no gradient.
    """

    def __init__(self, op: Op, function: type[EagerFunction] | None = None) -> None:
        self._op, self._function = op, function
        self._replay: Any = None

    def find(self, *args: Any) -> Any:
        """Return the value of a call that is replayed, or None for any other.

        The arguments need no checks, because a call is only equal to one whose arguments have
        passed them. The last of them is the default backend, "auto".
        """
        if torch.compiler.is_compiling():
            return None
        replay = self._replay or self._connect(args[0])
        found = None if replay is None else replay(*args)
        return None if found is NotImplemented else found

    def __call__(self, *args: Any) -> Any:
        """Return the value of a call whose arguments were checked.

        It is None where another path than that of plain eager mode on a GPU has to serve the call.
        """
        if torch.compiler.is_compiling():
            return None
        replay = self._replay or self._connect(args[0])
        found = None if replay is None else replay.serve(*args)
        if found is not NotImplemented:
            return found
        function = self._function
        if function is None or not torch.is_grad_enabled():
            return None
        inputs = (args[i] for i in function.inputs)
        if not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return None
        return function.run(*args)

    def _connect(self, first: Any) -> Any:
        """Return the C module's form of the calls, or None without the module or a GPU."""
        if not isinstance(first, Tensor) or not first.is_cuda:
            return None
        module = launcher.module()
        if module is not None and (self._function is None or has_contexts(self._function)):
            self._replay = connect(module, self._op, self._function)
        return self._replay


def has_contexts(function: type[EagerFunction]) -> bool:
    """Return whether this PyTorch has what the C module sets in contexts of autograd functions."""
    names = ("needs_input_grad", "saved_tensors", "to_save", "materialize_grads")
    base = torch._C._FunctionBase
    return hasattr(function, "_backward_cls") and all(hasattr(base, name) for name in names)


def connect(module: Any, op: Op, function: type[EagerFunction] | None) -> Any:
    """Return the C module's form of the calls of an op, and let it serve the autograd function."""
    if function is None:
        functions, positions = (None, None, None, None), ((), (), (), ())
        options = (0, 0, -1, -1, True, False)
        return module.EagerCall(op.replay(), None, None, functions, *positions, *options)
    gradient, saved = function.gradient or function.scale, function.saved
    call = module.EagerCall(
        op.replay(),
        None if gradient is None else gradient.replay(),
        super(torch.autograd.Function, function).apply,  # type: ignore[misc]
        (function.link, op._record, EagerFunction.forward, run_backward),
        function.inputs,
        function.values,
        saved,
        function.without_gradient,
        function.num_grads,
        len(saved) if function.num_tensors is None else function.num_tensors,
        -1 if function.save_flag is None else function.save_flag,
        -1 if function.attribute is None else function.attribute,
        function.materializes,
        function.scale is not None,
    )
    function.forward = staticmethod(call.forward)  # type: ignore[method-assign]
    # PyTorch's method of a context would run Python before it calls `backward`.
    function._backward_cls.apply = call.method  # type: ignore[attr-defined]
    return call
