"""Helpers that the autograd functions of all families share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import private_names

Gradients = TypeVar("Gradients", Tensor, tuple[Tensor, ...])


class _FirstDerivative(torch.autograd.Function):
    """A first derivative computed by a kernel, differentiated again through the reference."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        kernel: Callable[..., Gradients],
        reference: Callable[..., Gradients],
        variables: int,
        *tensors: Tensor | None,
    ) -> Gradients:
        return kernel(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        _, ctx.reference, ctx.variables, *tensors = inputs
        ctx.is_single = isinstance(output, Tensor)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        tensors = saved_tensors(ctx)
        variables, rest = tensors[: ctx.variables], tensors[ctx.variables :]
        vjp = torch.func.vjp(lambda *chosen: ctx.reference(*chosen, *rest), *variables)[1]
        results = vjp(grads[0] if ctx.is_single else grads)
        return None, None, None, *results, *(None for _ in rest)


def is_traced() -> bool:
    """Return whether a compiler or a tracer follows the call, for which tensors have no values."""
    return torch.compiler.is_compiling() or private_names.is_tracing()


def top_transform() -> Any:
    """Return the innermost function transform that is active, or None."""
    if torch.compiler.is_compiling():
        return None
    return private_names.peek_interpreter_stack()


def is_traced_transform() -> bool:
    """Return whether a compiler traces a function transform in which the call is."""
    return torch.compiler.is_compiling() and private_names.has_traced_level()


def is_vmapped() -> bool:
    """Return whether the innermost active function transform is `vmap`."""
    top = top_transform()
    return top is not None and private_names.is_vmap(top)


def is_batched_gradient(*grads: Tensor | None) -> bool:
    """Return whether `torch.autograd.grad` with `is_grads_batched` gives gradients a dimension.

    This batch is older than the function transforms: only the tensor knows of it.
    """
    if torch.compiler.is_compiling():
        return False
    is_batched = private_names.is_legacy_batchedtensor
    for grad in grads:  # noqa: SIM110 - a generator costs more than these calls
        if grad is not None and is_batched(grad):
            return True
    return False


def for_gradients(op: Any, *grads: Tensor | None) -> Callable[..., Any]:
    """Return the op that takes these gradients.

    Batched ones go through PyTorch's dispatcher, which calls the op for each of them.
    """
    return op.dispatched if is_batched_gradient(*grads) else op


def is_batched(tensor: Tensor) -> bool:
    """Return whether `vmap` gives the tensor a batch dimension, so that it has no one value."""
    if top_transform() is None:
        return False
    return private_names.at_some_level(tensor, private_names.is_batchedtensor)


def requires_grad(tensor: Tensor | None) -> bool:
    """Return whether autograd follows the tensor, in or outside of the active transforms.

    The attribute of a tensor inside of `vmap` is False even if the tensor outside needs a gradient.
    A compiler that traces a transform does not know it, so there each tensor does.
    """
    if tensor is None or tensor.requires_grad or is_traced_transform():
        return tensor is not None
    if top_transform() is None:
        return False
    return private_names.at_some_level(tensor, lambda inner: inner.requires_grad)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd will differentiate a function of the tensors."""
    return torch.is_grad_enabled() and any(map(requires_grad, tensors))


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """Return the saved tensors of an autograd function.

    After `torch.func.vjp` has returned, they are wrappers of a transform that has ended. Kernels
    and autograd functions need the tensors inside of these.
    """
    return without_wrappers(ctx.saved_tensors)


def spend(ctx: Any, *saved: Tensor) -> tuple[Tensor, ...] | None:
    """Return saved tensors for the first backward pass to write over, and None for later ones.

    The context's `is_spent` says whether they were written over. These writes are no new version
    of the saved tensors: a later pass asks for them all, and computes again what is spent.
    """
    if ctx.is_spent:
        return None
    ctx.is_spent = True
    return tuple(tensor.data for tensor in saved)


def without_wrappers(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return saved tensors, each without the wrapper of a transform that has ended."""
    if torch.compiler.is_compiling():
        return tensors
    unwrap = private_names.unwrap_if_dead
    return tuple(None if tensor is None else unwrap(tensor) for tensor in tensors)


def needed_gradients(ctx: Any, *inputs: Any) -> tuple[bool, ...]:
    """Return for each of the first inputs of an autograd function whether its gradient is needed.

    A compiler does not know it inside of a function transform that it traces, so there all are.
    """
    all_are = is_traced_transform()
    return tuple(
        x is not None and (need or all_are)
        for x, need in zip(inputs, ctx.needs_input_grad, strict=False)
    )


def skip_unused_gradients(ctx: Any) -> None:
    """Leave gradients of unused outputs None, which saves the memory of zeros.

    Under `vmap` they are zeros, because a generated batching rule takes no None.
    """
    if not is_vmapped():
        ctx.set_materialize_grads(False)


def sum_of_gradients(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the gradient of a result that is returned twice; None where neither was used."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def is_double_backward(*tensors: Tensor | None) -> bool:
    """Return whether the derivative that is computed now will be differentiated again.

    If the tensors are given that it depends on, one of them must be followed by autograd.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not tensors or any(map(requires_grad, tensors))


def first_derivative(
    kernel: Callable[..., Gradients],
    reference: Callable[..., Gradients],
    variables: int,
    *tensors: Tensor | None,
) -> Gradients:
    """Return `kernel(*tensors)`, differentiable in the first `variables` tensors.

    The second derivative is that of `reference`, which takes the same arguments. Both return one
    tensor or a tuple of them.
    """
    if not is_double_backward(*tensors[:variables]):
        return kernel(*tensors)
    if is_vmapped() or is_batched_gradient(*tensors[:variables]):
        # PyTorch loses the derivative of a function that is applied to batched gradients.
        return reference(*tensors)
    return _FirstDerivative.apply(kernel, reference, variables, *tensors)


def takes(op: Any, *more: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give the `forward` of an autograd function, which takes `*args`, its parameters.

    They are those of an op, and more after them. Dynamo counts them to find out whether the first
    argument is a context.
    """
    kind, names = inspect.Parameter.POSITIONAL_ONLY, (*op.parameters, *more)
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def with_signature(forward: Callable[..., Any]) -> Callable[..., Any]:
        forward.__signature__ = signature  # type: ignore[attr-defined]
        return forward

    return with_signature


@dataclass(eq=False)
class DifferentiableOp:
    """An op on rows that is differentiable in its first tensor."""

    op: Any  # the op. Its last argument is the backend.
    # The op of the gradient. It takes the gradients of the differentiable results, the saved
    # tensors and options, and the backend.
    backward: Any
    # The same in plain PyTorch, without the backend. It is differentiated again in the gradients
    # and in the first saved tensor.
    reference: Callable[..., Tensor]
    # Returns tensors and options to save from the op's arguments and its results.
    saves: Callable[[tuple[Any, ...], Any], tuple[Sequence[Tensor], Sequence[Any]]]
    results: int = 1  # how many of the results are differentiable, from the first on

    def __call__(self, first: Tensor, second: Any, *rest: Any) -> Any:
        if needs_no_derivative(first):
            return self.op(first, second, *rest)
        return apply(RowsFunction, self, first, second, rest)


# Dynamo counts the parameters of `forward`, so this one has a fixed number of them.
class RowsFunction(torch.autograd.Function):
    """The autograd function of a `DifferentiableOp`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: DifferentiableOp, first: Tensor, second: Any, rest: tuple[Any, ...]) -> Any:
        return rows.op(first, second, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.rows, first, second, rest = inputs
        tensors, options = ctx.rows.saves((first, second, *rest), output)
        ctx.options = (*options, rest[-1])
        if isinstance(output, tuple):
            if plain_eager():  # Zeros for results that nobody uses would cost a launch each.
                ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*output[ctx.rows.results :])
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        rows, options, tensors = ctx.rows, ctx.options, saved_tensors(ctx)
        first, *others = grads[: rows.results]
        if first is None:
            given = [grad for grad in others if grad is not None]
            if not given:
                return None, None, None, None
            first = torch.zeros_like(given[0])
        op = for_gradients(rows.backward, first, *others)
        if not is_double_backward():
            return None, op(first, *others, *tensors, *options), None, None
        others = [torch.zeros_like(first) if grad is None else grad for grad in others]
        gradient = first_derivative(
            lambda *tensors: op(*tensors, *options),
            lambda *tensors: rows.reference(*tensors, *options[:-1]),
            rows.results + 1,
            first,
            *others,
            *tensors,
        )
        return None, gradient, None, None


def double_backward(
    function: Callable[..., Any],  # returns a tensor, or a sequence of them
    inputs: Sequence[Tensor | None],  # its arguments
    wanted: Sequence[bool],  # whether the gradient of each input is wanted
    grads: Any,  # the gradients of what the function returns, in the same structure
) -> tuple[Tensor | None, ...]:
    """Return the differentiable gradients of `function(*inputs)` in the wanted inputs.

    Each gradient is taken through its own view of the input. Where one input is a function of
    another, the caller's graph follows that path, so the gradient here does not include it.
    """
    chosen = [i for i, wants in enumerate(wanted) if wants and inputs[i] is not None]

    def of_chosen(*values: Tensor) -> Any:
        each = list(inputs)
        for i, value in zip(chosen, values, strict=True):
            each[i] = value
        return function(*each)

    variables: list[Any] = [inputs[i] for i in chosen]
    if not chosen:
        results: Any = ()
    elif top_transform() is None:
        variables = [variable.view_as(variable) for variable in variables]
        results = torch.autograd.grad(
            of_chosen(*variables), variables, grads, create_graph=True, allow_unused=True
        )
    else:
        results = torch.func.vjp(of_chosen, *variables)[1](grads)
    found = dict(zip(chosen, results, strict=True))
    return tuple(found.get(i) for i in range(len(inputs)))


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raise for tensors with a forward-mode tangent, which would be dropped in silence."""
    if private_names.may_have_tangents():
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


def all_at_once(op: Callable[..., Any], info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    """Serve a batch of `vmap` by one call with the batch dimension first, as a batching rule.

    This is for ops on rows, whose tensors may have any leading dimensions.
    """
    results = op(
        *(
            batch_first(arg, dim, info.batch_size) if isinstance(arg, Tensor) else arg
            for arg, dim in zip(args, in_dims, strict=True)
        )
    )
    return results, 0 if isinstance(results, Tensor) else (0,) * len(results)


def one_by_one(op: Callable[..., Any], info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    """Serve a batch of `vmap` by one call of the op for each element, as a batching rule.

    Each element has the bits that a call of its own gives.
    """
    if not info.batch_size:
        raise NotImplementedError("vmap: expected a batch of at least one element, got none")
    results = [
        op(
            *(
                arg.select(dim, i) if isinstance(dim, int) else arg
                for arg, dim in zip(args, in_dims, strict=True)
            )
        )
        for i in range(info.batch_size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    fields = tuple(torch.stack(field) for field in zip(*results, strict=True))
    return fields, (0,) * len(fields)


def plain_eager() -> bool:
    """Return whether no compiler, function transform or dispatch mode is active.

    Only then may an autograd function keep state between calls.
    """
    if torch.compiler.is_compiling():
        return False
    return (
        private_names.peek_interpreter_stack() is None
        and private_names.len_torch_dispatch_stack() == 0
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
        input.dtype in (torch.float32, torch.float64)
        and input.is_contiguous()
        and plain_eager()
        and not private_names.may_have_tangents()
    )


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return `function.apply(*args)`.

    Without transforms the call bypasses PyTorch's binding of arguments to a signature, which takes
    longer than a small kernel.
    """
    if not plain_eager():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def call(op: Any, function: Any, variables: tuple[Tensor | None, ...], *args: Any) -> Any:
    """Return what an op returns, by its autograd function where a derivative may be taken."""
    if needs_no_derivative(*variables):
        return op(*args)
    return apply(function, *args)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast computes in on this device, or None where it is off."""
    kind = device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # autocast does not know "meta"
        return torch.get_autocast_dtype(kind)
    return None


def is_capturing(tensor: Tensor) -> bool:
    """Return whether work on the tensor's device is being captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def check_inplace(logits: Tensor) -> None:
    """Raise unless a gradient may be written over the memory of the logits."""
    base = private_names.base_of(logits)
    if logits.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        raise RuntimeError(
            "inplace: expected logits that were computed from something, got a leaf, whose values"
            " would be lost"
        )
    last_offset = 0
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride <= last_offset:
            raise ValueError(
                "inplace: expected logits whose elements each have their own memory, got a tensor"
                " that is expanded or overlaps itself"
            )
        last_offset += stride * (size - 1)
