"""CTC-CRF over the ops of chains: all paths against those that spell the target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import register
from ...runtime.autograd import double_backward, is_double_backward
from ...runtime.dtypes import acc_dtype
from ..chain import autograd as _chain
from . import reference
from .backends import BACKENDS


def loss_of(
    scores: Tensor, source: Tensor, spelt: reference.Lattice, lengths: Tensor, backend: str
) -> Tensor:
    """`reference.crf_loss` on the ops, differentiable any number of times."""
    every = _chain.LogZ.apply(
        scores, source, reference.free(scores), reference.free(scores), lengths, True, backend
    )[0]
    mine = _chain.LogZ.apply(
        reference.at_places(scores, spelt.places), *spelt[1:], lengths, True, backend
    )[0]
    return torch.where(mine == -torch.inf, torch.inf, every - mine)


gradient = register.define(
    "crf_gradient(Tensor grad, Tensor scores, Tensor source, Tensor lengths, Tensor logz, Tensor kept, Tensor marginals, Tensor places, str backend)"
    " -> Tensor",
    lambda grad, scores, *rest: torch.empty(scores.shape, dtype=scores.dtype, device=scores.device),
    backends=BACKENDS,
)


class Loss(torch.autograd.Function):
    """The loss of each sequence, `[N]` fp64; of what is kept for the gradient, the lattice's marginals are in units of `reference.FIXED`."""

    @staticmethod
    def forward(
        scores: Tensor,
        source: Tensor,
        places: Tensor,
        steps: Tensor,
        initial: Tensor,
        final: Tensor,
        lengths: Tensor,
        keep: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        every, kept = _chain.logz(
            scores, source, reference.free(scores), reference.free(scores), lengths, keep, backend
        )
        chosen = reference.at_places(scores, places)
        mine, states = _chain.logz(chosen, steps, initial, final, lengths, keep, backend)
        marginals, dtype = chosen.new_empty(0), acc_dtype(scores.dtype)
        if keep:
            unit = torch.full_like(mine, 2.0 ** reference.FIXED[dtype][1])
            marginals = _chain.logz_gradient(
                unit, chosen, initial, final, steps, lengths, mine, states, dtype, backend
            )[0]
        return torch.where(mine == -torch.inf, torch.inf, every - mine), every, kept, marginals

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, ctx.backend = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * 9
        scores, source, places, steps, initial, final, lengths, losses, every, kept, marginals = (
            ctx.saved_tensors
        )
        if is_double_backward():
            lattice = reference.Lattice(places, steps, initial, final)
            (result,) = double_backward(
                lambda scores: loss_of(scores, source, lattice, lengths, ctx.backend),
                [scores],
                [True],
                grad,
            )
        else:
            grad = torch.where(losses == torch.inf, 0.0, grad)
            result = gradient(
                grad, scores, source, lengths, every, kept, marginals, places, ctx.backend
            )
        return (result, *(None,) * 8)
