"""Semirings: the sums and products that combine the scores of the paths of a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


# A semiring is a tuple, because Dynamo refuses an instance of another class as a default argument.
class Semiring(NamedTuple):
    """A way to combine the scores of a path (`mul`) and of paths that meet (`sum`).

    Fields:
        zero: the score of no path: `sum` ignores it, `mul` keeps it.
        one: the score of the empty path: `mul` ignores it.
        mul: `(a, b) -> Tensor`, of broadcast shapes.
        sum: `(x, dim) -> Tensor`, without that dimension.
        dsum: `(x, dim) -> Tensor` of the shape of x, the derivative of `sum`; None if autograd may
            differentiate `sum` itself.

    `Log` and `Max` have kernels; any other semiring runs in plain PyTorch, in fp64 inside.

    Source: Goodman, Semiring parsing, 1999.

    Example:
        >>> import torch
        >>> from partita import Semiring, dense_source, logz
        >>> number = Semiring(zero=0.0, one=1.0, mul=torch.mul, sum=torch.sum)
        >>> # The number of paths of 3 steps over 2 states:
        >>> logz(torch.ones(3, 1, 2, 2), dense_source(2), semiring=number)
        tensor([16.])
    """

    zero: float
    one: float
    mul: Callable[[Tensor, Tensor], Tensor]
    sum: Callable[[Tensor, int], Tensor]
    dsum: Callable[[Tensor, int], Tensor] | None = None


def _log_sum(x: Tensor, dim: int) -> Tensor:
    """Return log Σ exp(x), which is -inf where all terms are -inf or there are none."""
    if not x.shape[dim]:
        return x.sum(dim) - torch.inf
    shift = x.detach().amax(dim, keepdim=True)
    shift = shift.masked_fill(shift == -torch.inf, 0.0)
    total = (x - shift).exp().sum(dim)
    empty = total == 0
    return torch.where(empty, -torch.inf, total.masked_fill(empty, 1.0).log() + shift.squeeze(dim))


def log_dsum(x: Tensor, dim: int) -> Tensor:
    """Return the softmax of x, which is 0 where all terms are -inf.

    It is no difference from the log-sum-exp, because that has no digits left for the number of
    terms if they are huge.
    """
    if not x.shape[dim]:
        return x.exp()
    shift = x.detach().amax(dim, keepdim=True)
    weights = (x - shift.masked_fill(shift == -torch.inf, 0.0)).exp()
    total = weights.sum(dim, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def draw(terms: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index into each row of `[S, N, K]` with probabilities proportional to exp(terms).

    Each draw takes a uniform number, `[S, N]`. Rows without an entry give 0.
    """
    if not terms.shape[-1]:
        return torch.zeros_like(uniform, dtype=torch.int64)
    weights = log_dsum(terms, -1)
    cumulative = weights.cumsum(-1)
    index = (cumulative <= uniform[..., None] * cumulative[..., -1:]).sum(-1)
    # A product that rounds up to the total would pass the last index with a positive weight.
    possible = (weights > 0) * torch.arange(weights.shape[-1], device=weights.device)
    return torch.minimum(index, possible.amax(-1))


def _max_sum(x: Tensor, dim: int) -> Tensor:
    """Return the maximum; its derivative goes to the first of equal terms."""
    if not x.shape[dim]:
        return x.sum(dim) - torch.inf
    return x.gather(dim, x.argmax(dim, keepdim=True)).squeeze(dim)


def max_dsum(x: Tensor, dim: int) -> Tensor:
    """Return the indicator of the first maximum, which is 0 where all terms are -inf."""
    if not x.shape[dim]:
        return torch.zeros_like(x)
    best = x.argmax(dim, keepdim=True)
    return torch.zeros_like(x).scatter(dim, best, (x.gather(dim, best) != -torch.inf).to(x.dtype))


Log = Semiring(-torch.inf, 0.0, torch.add, _log_sum, log_dsum)
"""Log-sum-exp and +: the sum over all paths is log Z in nats, and its gradient the marginals."""
Max = Semiring(-torch.inf, 0.0, torch.add, _max_sum, max_dsum)
"""Max and +: the sum over all paths is the best score.

Its gradient is the indicator of one best path, the one that `Chain.viterbi` returns.
"""


class _Sum(torch.autograd.Function):
    """The sum of a semiring that has its own derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int, semiring: Semiring) -> Tensor:
        return semiring.sum(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.dim, ctx.semiring = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return grads[0].unsqueeze(ctx.dim) * ctx.semiring.dsum(x, ctx.dim), None, None


def differentiable(semiring: Semiring) -> Semiring:
    """Return the semiring with a sum whose derivative is `dsum`, if there is one."""
    if semiring.dsum is None or semiring in (Log, Max):
        return semiring
    return Semiring(
        semiring.zero, semiring.one, semiring.mul, lambda x, dim: _Sum.apply(x, dim, semiring)
    )
