"""CTC-CRF over the ops of chains: all paths against those that spell the target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _chain
from ._autograd import capturing, plain_eager
from .reference import crf as reference
from .reference.softmax import accumulator

# Marginals are summed as integers of this type, in units of 2 to the minus that: in any order the same bits, and they cannot drift.
_FIXED = {torch.float32: (torch.int32, 30), torch.float64: (torch.int64, 60)}
_SLAB = 2**22  # marginals that are subtracted at a time

_tables: dict[tuple[Any, ...], Tensor] = {}


def _table(make: Callable[..., Tensor], device: torch.device, *sizes: int) -> Tensor:
    """`make(*sizes, device)`, the same tensor each time, as its transposed table is kept with it."""
    key = (make.__name__, device.type, device.index, *sizes)
    found = _tables.get(key)
    if found is None:
        if not plain_eager():
            return make(*sizes, device)
        with torch.inference_mode(False):
            found = make(*sizes, device)
        if not capturing(found):
            _tables[key] = found
    return found


def kmers(n_base: int, state_len: int, device: torch.device) -> Tensor:
    return _table(reference.kmers, device, n_base, state_len)


def ladder(states: int, device: torch.device) -> Tensor:
    return _table(reference.ladder, device, states)


def _free(scores: Tensor) -> Tensor:
    """The scores of ends where all are free, `[N, C]`."""
    return torch.zeros((1, 1), dtype=accumulator(scores.dtype), device=scores.device).expand(scores.shape[1:3])


def loss_of(scores: Tensor, source: Tensor, spelt: reference.Lattice, lengths: Tensor, backend: str) -> Tensor:
    """`reference.crf_loss` on the ops, differentiable any number of times."""
    every = _chain.LogZ.apply(scores, source, _free(scores), _free(scores), lengths, True, backend)[0]
    mine = _chain.LogZ.apply(reference.at_places(scores, spelt.places), *spelt[1:], lengths, True, backend)[0]
    return torch.where(mine == -torch.inf, torch.inf, every - mine)


def subtract(d_scores: Tensor, marginals: Tensor, places: Tensor, factor: Tensor) -> None:
    """Takes `factor[n] · marginals[t, n]` away from `d_scores[t, n]`, `[T, N, C, A]` contiguous, at `places[n]`, of which some are equal.

    The places are sorted once. The sum over a run of equal ones is a difference of cumulative sums, and each of the run writes the same result.
    """
    fixed = _FIXED[marginals.dtype][0]
    flat, marginals, places = d_scores.flatten(2), marginals.flatten(2), places.flatten(1)
    place, order = places.sort(1)
    order = torch.nn.functional.pad(order, (1, 0), value=1)  # nothing moves into the first state: a 0 before all sums
    first, behind = (torch.searchsorted(place, place, right=right) for right in (False, True))
    steps = len(flat)
    slab = max(steps if torch.compiler.is_compiling() else _SLAB // max(places.numel(), 1), 1)
    for t in range(0, steps, slab):
        part = flat[t : t + slab]
        ranked, at, below, above = (index.expand(len(part), -1, -1) for index in (order, place, first, behind))
        sums = marginals[t : t + slab].gather(2, ranked).round_().to(fixed).cumsum(2, dtype=fixed)
        total = sums.gather(2, above).sub_(sums.gather(2, below))
        part.scatter_(2, at, part.gather(2, at).sub_(total * factor[:, None]))


class Loss(torch.autograd.Function):
    """The loss of each sequence, `[N]` fp64; of what is kept for the gradient, the lattice's marginals are in units of `_FIXED`."""

    @staticmethod
    def forward(
        scores: Tensor, source: Tensor, places: Tensor, steps: Tensor, initial: Tensor, final: Tensor, lengths: Tensor, keep: bool, backend: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        every, kept = _chain.logz(scores, source, _free(scores), _free(scores), lengths, keep, backend)
        chosen = reference.at_places(scores, places)
        mine, states = _chain.logz(chosen, steps, initial, final, lengths, keep, backend)
        marginals, dtype = chosen.new_empty(0), accumulator(scores.dtype)
        if keep:
            unit = torch.full_like(mine, 2.0 ** _FIXED[dtype][1])
            marginals = _chain.logz_gradient(unit, chosen, initial, final, steps, lengths, mine, states, dtype, backend)[0]
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
        scores, source, places, steps, initial, final, lengths, losses, every, kept, marginals = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            again = loss_of(scores, source, reference.Lattice(places, steps, initial, final), lengths, ctx.backend)
            (result,) = torch.autograd.grad(again, scores, grad, create_graph=True)
        else:
            dtype = accumulator(scores.dtype)  # half types are rounded once, after the subtraction
            grad = torch.where(losses == torch.inf, 0.0, grad)
            free = _free(scores), _free(scores)
            result = _chain.logz_gradient(grad, scores, *free, source, lengths, every, kept, dtype, ctx.backend)[0]
            subtract(result, marginals, places, (grad * 2.0 ** -_FIXED[dtype][1]).to(dtype))
            result = result.to(scores.dtype)
        return (result, *(None,) * 8)
