"""Divergences from their definition."""

import torch
from torch import Tensor


def truth(
    logits: Tensor, teacher: Tensor, beta: float, temperature: float = 1.0, softcap: float = 0.0
) -> Tensor:
    """Compute the divergence of each row from its definition in fp64."""
    x, t = logits.double(), teacher.double()
    if softcap:
        x, t = (softcap * (each / softcap).tanh() for each in (x, t))
    logp, logq = (x / temperature).log_softmax(-1), (t / temperature).log_softmax(-1)

    def kl(first: Tensor, second: Tensor) -> Tensor:
        return (first.exp() * torch.where(first == -torch.inf, 0, first - second)).sum(-1)

    if beta == 0:
        return kl(logq, logp)
    if beta == 1:
        return kl(logp, logq)
    mixture = (beta * logq.exp() + (1 - beta) * logp.exp()).log()
    return beta * kl(logq, mixture) + (1 - beta) * kl(logp, mixture)
