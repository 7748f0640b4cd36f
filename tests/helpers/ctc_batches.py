"""Random batches for CTC, and the comparison of its kernels with the reference."""

from typing import Any, NamedTuple

import torch

import partita
from partita.testing import poisoned_memory


class Batch(NamedTuple):
    """The arguments of `ctc_loss`."""

    logits: torch.Tensor
    targets: torch.Tensor
    input_lengths: torch.Tensor
    target_lengths: torch.Tensor
    blank: int = 0

    def to(self, device: str) -> "Batch":
        return Batch(*(t.to(device) for t in self[:4]), self.blank)


def batch_of(
    steps: int,
    N: int,
    classes: int,
    max_target_len: int,
    *,
    device: str = "cpu",
    seed: int = 0,
    scale: float = 1.0,
    holes: float = 0.0,
) -> Batch:
    """Return a random batch. Targets may contain the blank (class C - 2) and repeated labels."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(steps, N, classes, generator=g) * scale
    logits[torch.rand(logits.shape, generator=g) < holes] = -torch.inf
    blank = max(classes - 2, 0)
    logits[..., blank] = logits[..., blank].nan_to_num(neginf=0.0)
    targets = torch.randint(0, classes, (N, max_target_len), generator=g)
    inputs = torch.randint(steps // 2, steps + 1, (N,), generator=g)
    return Batch(
        logits,
        targets,
        inputs,
        torch.randint(max_target_len // 2, max_target_len + 1, (N,), generator=g),
        blank,
    ).to(device)


def results(
    x: Batch,
    backend: str,
    dtype: torch.dtype = torch.float32,
    from_logits: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    """Return the losses with and without a gradient to follow, and the gradient."""
    options["from_logits"] = from_logits
    logits = x.logits.to(dtype).clone().requires_grad_()
    with partita.backend(backend), poisoned_memory():
        losses = partita.ctc_loss(logits, *x[1:], "none", **options)
        weights = torch.linspace(0.5, 2, len(losses), device=losses.device).to(losses.dtype)
        (grad,) = torch.autograd.grad(
            (losses.nan_to_num(nan=torch.nan, posinf=0.0) * weights).sum(), logits
        )
        with torch.no_grad():
            without_grad = partita.ctc_loss(logits, *x[1:], "none", **options)
    return losses.detach(), without_grad, grad


def assert_matches_reference(
    x: Batch, dtype: torch.dtype = torch.float32, from_logits: bool = True, **options: Any
) -> None:
    """Compare the kernels with the reference.

    Posteriors are within 2e-6, or 4e-6 where a weight doubles them, plus an ulp of their dtype.
    Losses are within 2e-6, relative.
    """
    ours, truth = (
        results(x, "triton", dtype, from_logits, **options),
        results(x, "reference", dtype, from_logits, **options),
    )
    tolerance = 2e-6 if dtype.itemsize < 8 else 1e-12
    for a, b in zip(ours, truth, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(
            a,
            b,
            rtol=max(tolerance, 2 * torch.finfo(a.dtype).eps),
            atol=2 * tolerance,
            equal_nan=True,
        )


def assert_alignment_matches(x: Batch, from_logits: bool = True, **options: Any) -> None:
    """Compare the alignment of the kernels with that of the reference."""
    found = []
    for backend in ("triton", "reference"):
        with partita.backend(backend), poisoned_memory():
            found.append(partita.ctc_align(*x, from_logits=from_logits, **options))
    torch.testing.assert_close(found[0].score, found[1].score, rtol=1e-6, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(
        found[0].scores, found[1].scores, rtol=1e-6, atol=2e-6, equal_nan=True
    )
    assert torch.equal(found[0].labels, found[1].labels) and torch.equal(
        found[0].tokens, found[1].tokens
    )


def reduced_loss(
    x: Batch, backend: str, reduction: str, zero_infinity: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reduced loss and its gradient."""
    logits = x.logits.clone().requires_grad_()
    with partita.backend(backend), poisoned_memory():
        loss = partita.ctc_loss(logits, *x[1:], reduction, zero_infinity, from_logits=True)
        return loss.detach(), torch.autograd.grad(loss * 0.7, logits)[0]
