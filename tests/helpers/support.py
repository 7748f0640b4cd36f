"""Recorded supports, and the statistics over them by enumeration."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100


class Recorded(NamedTuple):
    """Labels and what a sampler recorded, as `support_stats` takes them."""

    target: Tensor
    ids: Tensor
    offsets: Tensor


def recorded(rows: int, classes: int, device: str = "cpu", *, empty: bool = True) -> Recorded:
    """Return supports with repeated ids, without the target, of one class, of many, and empty.

    Every fifth row is ignored. With `empty` some rows have no ids.
    """
    g = torch.Generator().manual_seed(rows + classes)
    numbers = torch.randint(0 if empty else 1, 9, (rows,), generator=g)
    numbers[rows // 2] = 150
    if empty:
        numbers[2:4] = 0
    target = torch.randint(classes, (rows,), generator=g)
    offsets = torch.cat([numbers.new_zeros(1), numbers.cumsum(0)])
    ids = torch.randint(classes, (int(offsets[-1]),), generator=g)
    ids[::3] = target.repeat_interleave(numbers)[::3]
    target[1::5] = IGNORED
    return Recorded(*(each.to(device) for each in (target, ids, offsets)))


def enumerated(
    logits: Tensor, given: Recorded, temperature: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probability, entropy and `in_set` of each row from the set of its classes."""
    x = logits.double()
    x = softcap * (x / softcap).tanh() if softcap else x
    fields: tuple[list[Tensor], ...] = ([], [], [])
    lists = given.ids.tensor_split(given.offsets[1:-1].cpu())
    for row, (label, ids) in enumerate(zip(given.target.tolist(), lists, strict=True)):
        of_row = set(ids.tolist())
        if label == IGNORED:
            found = (x.new_zeros(()), x.new_zeros(()), False)
        else:
            classes = sorted(of_row | {label}) if of_row else list(range(x.shape[1]))
            logp = (x[row, classes] / temperature).log_softmax(0)
            entropy = -(logp.exp() * torch.where(logp == -torch.inf, 0, logp)).sum()
            found = (logp[classes.index(label)], entropy, not of_row or label in of_row)
        for field, value in zip(fields, found, strict=True):
            field.append(torch.as_tensor(value, device=x.device))
    return torch.stack(fields[0]), torch.stack(fields[1]), torch.stack(fields[2])


def gradients(found: Sequence[Tensor], leaves: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the gradients of a sum with other factors for each row and field.

    Leaves may be None. The graph is kept for another backward pass.
    """
    fields = [field.flatten() for field in found[:2]]
    factors = torch.linspace(-1, 2, len(fields[0]), dtype=torch.float64).to(fields[0])
    wanted = [leaf for leaf in leaves if leaf is not None]
    return torch.autograd.grad(fields, wanted, [factors, factors.flip(0)], retain_graph=True)
