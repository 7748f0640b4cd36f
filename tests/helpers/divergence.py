"""Divergences from their definition."""

from torch import Tensor

from partita.testing.samples import in_torch


def truth(
    logits: Tensor, teacher: Tensor, beta: float, temperature: float = 1.0, softcap: float = 0.0
) -> Tensor:
    """Compute the divergence of each row in fp64."""
    options = {"beta": beta, "temperature": temperature, "softcap": softcap or None}
    return in_torch.divergence(logits.double(), teacher.double(), reduction="none", **options)
