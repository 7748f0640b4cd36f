"""The registered op of CTC-CRF and its autograd function, on top of the ops of chains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import register
from ...runtime.autograd import double_backward, is_double_backward
from ...runtime.dtypes import acc_dtype
from ..chain import autograd as _chain
from .backends import BACKENDS
from .common import FIXED_POINT, CRFLattice, lattice_scores, zero_ends

gradient = register.define(
    "crf_gradient(Tensor grad, Tensor scores, Tensor source, Tensor lengths, Tensor logz,"
    " Tensor saved, Tensor marginals, Tensor edge_index, str backend) -> Tensor",
    lambda grad, scores, *rest: torch.empty(scores.shape, dtype=scores.dtype, device=scores.device),
    backends=BACKENDS,
)


def losses_of(
    scores: Tensor, source: Tensor, lattice: CRFLattice, lengths: Tensor, backend: str
) -> Tensor:
    """Return the losses, `[N]` fp64, through the ops of chains.

    The result is differentiable any number of times.
    """
    ends, chosen = zero_ends(scores), lattice_scores(scores, lattice.edge_index)
    logz_den = _chain.LogZ.apply(scores, source, ends, ends, lengths, True, backend)[0]
    logz_num = _chain.LogZ.apply(chosen, *lattice[1:], lengths, True, backend)[0]
    return torch.where(logz_num == -torch.inf, torch.inf, logz_den - logz_num)


class CRFLossFunction(torch.autograd.Function):
    """The CTC-CRF loss of each sequence, `[N]` fp64.

    The other outputs serve the gradient: log Z of all paths, the states that its scan saved, and
    the marginals of the target lattice in units of `FIXED_POINT`.
    """

    @staticmethod
    def forward(
        scores: Tensor,
        source: Tensor,
        edge_index: Tensor,
        lattice_source: Tensor,
        initial: Tensor,
        final: Tensor,
        lengths: Tensor,
        save: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ends, dtype = zero_ends(scores), acc_dtype(scores.dtype)
        logz_den, saved = _chain.logz(scores, source, ends, ends, lengths, save, backend)
        chosen = lattice_scores(scores, edge_index)
        logz_num, states = _chain.logz(
            chosen, lattice_source, initial, final, lengths, save, backend
        )
        marginals = chosen.new_empty(0)
        if save:
            unit = torch.full_like(logz_num, 2.0 ** FIXED_POINT[dtype][1])
            chain = (chosen, initial, final, lattice_source, lengths, logz_num, states)
            marginals = _chain.logz_gradient(unit, *chain, dtype, backend)[0]
        losses = torch.where(logz_num == -torch.inf, torch.inf, logz_den - logz_num)
        return losses, logz_den, saved, marginals

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
        scores, source, *lattice, lengths = ctx.saved_tensors[:7]
        losses, logz_den, saved, marginals = ctx.saved_tensors[7:]
        if is_double_backward():
            (result,) = double_backward(
                lambda x: losses_of(x, source, CRFLattice(*lattice), lengths, ctx.backend),
                [scores],
                [True],
                grad,
            )
        else:
            grad = torch.where(losses == torch.inf, 0.0, grad)
            chain = (scores, source, lengths, logz_den, saved)
            result = gradient(grad, *chain, marginals, lattice[0], ctx.backend)
        return (result, *(None,) * 8)
