"""How the ops of path distributions and their autograd functions are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime.autograd import apply, needs_no_derivative, requires_grad, skip_unused_gradients
from ..runtime.backend import current_backend
from ..runtime.constants import scalar


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd will differentiate a function of the tensors."""
    return torch.is_grad_enabled() and any(map(requires_grad, tensors))


def call(op: Any, function: Any, variables: tuple[Tensor | None, ...], *args: Any) -> Any:
    """Return what an op returns, by its autograd function where a derivative may be taken."""
    if needs_no_derivative(*variables):
        return op(*args)
    return apply(function, *args)


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
