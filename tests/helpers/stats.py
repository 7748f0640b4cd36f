"""Token statistics in plain PyTorch, and a check of the kernels against them."""

from typing import Any

import torch
from torch import Tensor

import partita
from partita.runtime.dtypes import acc_dtype
from partita.testing.compare import upstream_like

from .rows import check, worst_case
from .terms import token_stats_terms


def plain_token_stats(
    logits: Tensor,
    target: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the differentiable fields of `partita.token_stats`, formed by autograd."""
    x = logits.to(acc_dtype(logits.dtype))
    if softcap is not None:
        x = softcap * (x / softcap).tanh()
    if target is None:
        target, ignore_index = x.argmax(-1), -100
    maximum = x.detach().amax(-1)
    finite = torch.where(maximum.isinf(), 0, maximum)
    x = (x - finite.unsqueeze(-1)) / temperature
    logp = x.log_softmax(-1)
    p = logp.exp()
    not_ignored = target != ignore_index
    logprob = logp.gather(-1, torch.where(not_ignored, target, 0).long().unsqueeze(-1)).squeeze(-1)
    logsumexp = finite / temperature + x.exp().sum(-1).log()
    # A class of probability 0 adds nothing. Its log-probability is infinite, so the product must
    # not see it.
    entropy = -(p * torch.where(p == 0, 0, logp)).sum(-1)
    return torch.where(not_ignored, logprob, 0), logsumexp, entropy


def check_stats(
    logits: Tensor, target: Tensor | None, *, few: bool = False, **options: Any
) -> None:
    """Compare `partita.token_stats` and its gradient with fp64.

    With `few`, the rows are so few that the error's bound is that of the worst case.
    """
    with torch.no_grad():
        upstream = upstream_like(plain_token_stats(logits, target, **options))
    terms = token_stats_terms(logits, target, upstream, **options)
    terms = worst_case(terms, logits.shape[-1]) if few else terms
    check(
        lambda x: partita.token_stats(x, target, **options)[:3],
        lambda x: plain_token_stats(x, target, **options),
        logits,
        upstream=upstream,
        scale=terms.forward,
        grad_scale=terms.backward,
    )
    stats = partita.token_stats(logits, target, **options)
    if options.get("softcap") is None:  # which may round two logits to one number
        assert torch.equal(stats.argmax, logits.argmax(-1))
    assert {field.dtype for field in stats[:3]} == {acc_dtype(logits.dtype)}
