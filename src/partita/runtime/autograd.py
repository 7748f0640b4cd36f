"""What the ops' autograd functions share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _Gradient(torch.autograd.Function):
    """A first derivative computed by a kernel, whose own derivatives are those of its reference."""

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
        pull_back = torch.func.vjp(lambda *chosen: ctx.reference(*chosen, *rest), *variables)[1]
        return None, None, None, *pull_back(grads[0]), *(None for _ in rest)


def is_double_backward() -> bool:
    """Whether a derivative is to be differentiated again."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def first_derivative(
    kernel: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    variables: int,
    *tensors: Tensor | None,
) -> Tensor:
    """`kernel(*tensors)`, differentiable again in the first `variables` tensors through `reference`, of the same arguments."""
    if is_double_backward():
        return _Gradient.apply(kernel, reference, variables, *tensors)
    return kernel(*tensors)


def double_backward(
    function: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    wanted: Sequence[bool],
    grads: Tensor | Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradients of `function(*inputs)` in the wanted ones, to be differentiated again. Each is taken through a view of its own: what leads from one
    input to another, where that is a function of it, is the caller's to follow."""
    chosen = [tensor is not None and wants for tensor, wants in zip(inputs, wanted, strict=True)]
    own = [
        tensor.view_as(tensor) if held else tensor
        for tensor, held in zip(inputs, chosen, strict=True)
    ]  # type: ignore[union-attr, arg-type]
    variables = [tensor for tensor, held in zip(own, chosen, strict=True) if held]
    found = iter(
        torch.autograd.grad(function(*own), variables, grads, create_graph=True, allow_unused=True)
    )  # type: ignore[arg-type]
    return tuple(next(found) if held else None for held in chosen)


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Of what runs past autograd: there is no forward mode, and a tangent must not be dropped in silence."""
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
    """A tensor that vmap hands to a batching rule, with the batch in front."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def plain_eager() -> bool:
    """True outside of compilation, function transforms and dispatch modes: there, an autograd function may keep state between calls."""
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`; where nothing transforms, past the binding of arguments to a signature, which takes longer than a small kernel."""
    if plain_eager():
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    return function.apply(*args)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on this kind of device, where it is on."""
    kind = device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # which has no autocast to ask for
        return torch.get_autocast_dtype(kind)
    return None


def is_capturing(tensor: Tensor) -> bool:
    """Whether what is made now on the tensor's device belongs to a graph that is being captured."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
