"""Helpers that the autograd functions of all families share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# The dtypes in which PyTorch's results are as exact as those of our ops.
FULL_PRECISION = (torch.float32, torch.float64)


class _FirstDerivative(torch.autograd.Function):
    """A first derivative computed by a kernel, differentiated again through the reference."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        kernel: Callable[..., Tensor],
        reference: Callable[..., Tensor],
        variables: int,
        *tensors: Tensor | None,
    ) -> Tensor:
        return kernel(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.reference, ctx.variables, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        variables, rest = tensors[: ctx.variables], tensors[ctx.variables :]
        vjp = torch.func.vjp(lambda *chosen: ctx.reference(*chosen, *rest), *variables)[1]
        return None, None, None, *vjp(grads[0]), *(None for _ in rest)


def is_double_backward() -> bool:
    """Return whether the derivative that is computed now will be differentiated again."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def first_derivative(
    kernel: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    variables: int,
    *tensors: Tensor | None,
) -> Tensor:
    """Return `kernel(*tensors)`, differentiable in the first `variables` tensors.

    The second derivative is that of `reference`, which takes the same arguments.
    """
    if is_double_backward():
        return _FirstDerivative.apply(kernel, reference, variables, *tensors)
    return kernel(*tensors)


def double_backward(
    function: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    grads: Tensor | Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Return the differentiable gradients of `function(*inputs)` in the wanted inputs.

    Each gradient is taken through its own view of the input. Where one input is a function of
    another, the caller's graph follows that path, so the gradient here does not include it.
    """
    views = [
        tensor.view_as(tensor) if tensor is not None and wants else None
        for tensor, wants in zip(inputs, wanted, strict=True)
    ]
    variables = [view for view in views if view is not None]
    values = [tensor if view is None else view for tensor, view in zip(inputs, views, strict=True)]
    results = iter(
        torch.autograd.grad(
            function(*values), variables, grads, create_graph=True, allow_unused=True
        )
    )
    return tuple(None if view is None else next(results) for view in views)


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raise for tensors with a forward-mode tangent, which would be dropped in silence."""
    if torch.autograd.forward_ad._current_level >= 0:
        for tensor in tensors:
            if (
                tensor is not None
                and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None
            ):
                raise NotImplementedError(
                    "forward-mode differentiation is not there; use reverse mode"
                )


def batch_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Return a tensor of a batching rule of `vmap` with the batch dimension first."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def plain_eager() -> bool:
    """Return whether no compiler, function transform or dispatch mode is active.

    Only then may an autograd function keep state between calls.
    """
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def needs_no_derivative(*tensors: Tensor | None) -> bool:
    """Return whether an op may be called without its autograd function.

    That is so in plain eager mode if none of the tensors needs a gradient. A tensor with a
    forward-mode tangent raises, because the op would drop the tangent.
    """
    if not plain_eager():
        return False
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return False
    refuse_forward_mode(*tensors)
    return True


def native_serves(input: Tensor) -> bool:
    """Return whether a function of PyTorch may replace an op and its derivatives.

    The layout of its results is the op's only for contiguous inputs, and it rounds intermediate
    results of half types. Under transforms and in forward mode the op decides what is refused.
    """
    return (
        input.dtype in FULL_PRECISION
        and input.is_contiguous()
        and plain_eager()
        and torch.autograd.forward_ad._current_level < 0
    )


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return `function.apply(*args)`.

    Without transforms the call bypasses PyTorch's binding of arguments to a signature, which takes
    longer than a small kernel.
    """
    if plain_eager():
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    return function.apply(*args)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast computes in on this device, or None where it is off."""
    kind = device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # autocast does not know "meta"
        return torch.get_autocast_dtype(kind)
    return None


def is_capturing(tensor: Tensor) -> bool:
    """Return whether work on the tensor's device is being captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
