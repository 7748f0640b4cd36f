"""Contrastive losses as open_clip writes them, from all logits of all ranks."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def clip_loss(
    images: Tensor, all_images: Tensor, texts: Tensor, all_texts: Tensor, scale: Tensor, rank: int
) -> Tensor:
    """Return `ClipLoss` with `local_loss`: a rank's features against the gathered ones."""
    labels = torch.arange(len(images), device=images.device) + len(images) * rank
    of_images = F.cross_entropy(scale * images @ all_texts.T, labels)
    of_texts = F.cross_entropy(scale * texts @ all_images.T, labels)
    return (of_images + of_texts) / 2


def siglip_loss(
    images: Tensor, all_texts: Sequence[Tensor], scale: Tensor, bias: Tensor, rank: int
) -> Tensor:
    """Return `SigLipLoss`: a rank's images against the texts of one rank after another."""
    loss = images.new_zeros(())
    for other, texts in enumerate(all_texts):
        logits = scale * images @ texts.T + bias
        labels = -torch.ones_like(logits)
        if other == rank:
            labels = labels + 2 * torch.eye(len(images), dtype=logits.dtype, device=logits.device)
        loss = loss - F.logsigmoid(labels * logits).sum() / len(images)
    return loss


def features(
    n: int, D: int, dtype: torch.dtype, device: str, seed: int, near: Tensor | None = None
) -> Tensor:
    """Draw features of length 1, near others if these are given."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=generator, dtype=torch.float64)
    if near is not None:
        x = near.detach().cpu().double() + 0.1 * x
    return F.normalize(x, dim=1).to(device, dtype).requires_grad_()
