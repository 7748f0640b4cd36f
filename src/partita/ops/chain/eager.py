"""The autograd function of log Z in plain eager mode, where small calls wait for the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import register
from ...runtime.autograd import apply_eager
from .autograd import logz_gradient, logz_gradients, rounded_logz


class EagerLogZ(torch.autograd.Function):
    """Log Z of each chain in a dtype, `[N]`, in plain eager mode; its gradient is the marginals.

    A forward pass that has the context takes the host less time than that of `RoundedLogZ`, because
    what the gradient needs is no output. Compilers and function transforms need `RoundedLogZ`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        source: Tensor,
        initial: Tensor,
        final: Tensor,
        lengths: Tensor | None,
        dtype: torch.dtype,
        backend: str,
    ) -> Tensor:
        chain = (scores, source, initial, final, lengths)
        rounded, logz, saved = rounded_logz.eager(*chain, True, dtype, backend)
        ctx.save_for_backward(scores, initial, final, source, lengths, logz, saved)
        ctx.backend = backend
        logz_gradient.serve_eager_backward(ctx, scores.dtype, backend)
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        found = register.eager_gradients(ctx, grads, saved, (0, None, 1, 2))
        if found is not None:
            return found
        return *logz_gradients(ctx, grads[0], saved), None, None


def eager_partition(
    scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return log Z of checked chains without lengths, `[N]`, where a gradient follows."""
    return apply_eager(EagerLogZ, scores, source, initial, final, None, dtype, "auto")
