"""Functions that the autograd functions of path distributions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..runtime.autograd import (
    apply,
    call,
    double_backward,
    for_gradients,
    is_batched_gradient,
    is_double_backward,
    is_vmapped,
    needs_gradient,
    requires_grad,
    skip_unused_gradients,
)
from ..runtime.backend import current_backend
from ..runtime.constants import scalar


def ones(scores: Tensor) -> Tensor:
    """Return the gradient of Σ log Z in each sequence's log Z, `[N]` fp64."""
    return scalar(1.0, torch.float64, scores.device).expand(scores.shape[1])


def refuse_kernels(name: str) -> None:
    """Raise where a backend was chosen by name that has no kernel for a quantity."""
    backend = current_backend()
    if backend in ("triton", "numba"):
        raise RuntimeError(
            f"backend {backend!r}: {name} has no kernel;"
            " it runs in PyTorch (backend 'auto' or 'reference')"
        )


def log_partitions_of(op: Any, function: Any, potentials: Any) -> tuple[Tensor, Tensor]:
    """Return log Z of each sequence, `[N]`, in fp64 and in the dtype of results.

    Args:
        op, function: the op of log Z, and its autograd function.
        potentials: those of a `PathDistribution`.
    """
    args = (*potentials, needs_gradient(*potentials.variables), current_backend())
    fp64, rounded, _ = call(op, function, potentials.variables, *args)
    return fp64, rounded


def best_paths_of(
    op: Any, specification: Callable[..., Any], check: Callable[..., None], potentials: Any, k: int
) -> tuple[Tensor, ...]:
    """Return the fields of the k best paths: by the op on a CPU, in plain PyTorch elsewhere.

    There `check`, given the first potential and the lengths, raises for wrong lengths.
    """
    backend = current_backend()
    if potentials[0].is_cpu and backend != "triton":
        return op(*potentials, k, backend)
    refuse_kernels("nbest")
    check(potentials[0], potentials.lengths)
    return specification(potentials, k)


def save_log_partition(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep the tensors of log Z, the backend, fp64 log Z and what the op saves for its gradient.

    The inputs end with whether the op saves, and with the backend.
    """
    *tensors, _, ctx.backend = inputs
    fp64, _, saved = output
    ctx.mark_non_differentiable(saved)
    # Zeros for the gradient of `saved` would take as much memory as `saved`.
    skip_unused_gradients(ctx)
    ctx.save_for_backward(*tensors, fp64, saved)


def gradients(
    op: Any,
    function: Any,
    log_partition: Callable[..., Tensor],
    variables: tuple[Tensor | None, ...],
    grad_output: Tensor,
    *args: Any,
) -> tuple[Tensor | None, ...]:
    """Return the gradient of log Z, `op(grad_output, *args)`, which may be differentiated again.

    Args:
        op, function: the op of the gradient, and its autograd function.
        log_partition: log Z of the variables in plain PyTorch.
        variables: the differentiable tensors.
        grad_output: the gradient of each log Z, `[N]`.
        args: the other arguments of the op.
    """
    results: tuple[Tensor | None, ...]
    if not is_double_backward(grad_output, *variables):
        results = for_gradients(op, grad_output)(grad_output, *args)
    elif is_vmapped() or is_batched_gradient(grad_output):
        # PyTorch loses the derivative of a function that is applied to batched gradients.
        needed = [requires_grad(variable) for variable in variables]
        results = double_backward(log_partition, variables, needed, grad_output.double())
    else:
        results = apply(function, grad_output, *args)
    return results


def on_path(
    grad_output: Tensor, index: Tensor, elsewhere: Tensor, size: int, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the best scores in the scores that a path passes, `[..., N, size]`.

    Args:
        grad_output: the gradient of the best score of each sequence, `[N]`.
        index: which of the scores the path passes, `[..., N]`; -1 for none.
        elsewhere: the gradient of the other scores, `[..., N]`, and of all where there is no path.
        size, dtype: those of the scores.
    """
    result = elsewhere.to(dtype)[..., None].expand(*index.shape, size)
    if not size:
        return result
    values = torch.where(index >= 0, grad_output, elsewhere).to(dtype)
    return result.scatter(-1, index.clamp(min=0)[..., None], values[..., None])


def off_path(score: Tensor, lengths: Tensor, T: int, first: int) -> Tensor:
    """Return the gradient of the best scores in the scores off the path, `[T, N]`.

    It is 0, or NaN for a sequence whose best score `[N]` is NaN, up to its length if that is valid,
    which is `first` at least.
    """
    step = torch.arange(T, device=score.device)[:, None]
    counts = (step < lengths) | (lengths < first) | (lengths > T)
    return torch.where(counts & score.isnan(), torch.nan, 0.0)
