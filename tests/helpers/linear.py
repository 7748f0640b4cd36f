"""Batches for losses from hidden states, and the comparison with the composition in fp64."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from helpers.rows import upstream
from torch import Tensor

import partita
from partita.ops.linear_heads.plan import ROW_WORDS
from partita.testing import poisoned_memory

TOKENS, HIDDEN, CLASSES = 40, 24, 333
PLANS = ("small", "fast", "lean")  # the keys of `budgets`


class Batch(NamedTuple):
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None


def batch_of(
    tokens: int = TOKENS,
    classes: int = CLASSES,
    *,
    hidden: int = HIDDEN,
    bias: bool = False,
    weighted: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Batch:
    """Return a random batch, in which every seventh token is ignored."""
    g = torch.Generator().manual_seed(tokens + classes)
    numbers = [
        torch.randn(*size, generator=g)
        for size in ((tokens, hidden), (classes, hidden), (classes,))
    ]
    target = torch.randint(classes, (tokens,), generator=g)
    target[::7] = -100
    class_weight = torch.rand(classes, generator=g)
    class_weight[:2] = 0.0
    states, matrix, offset = (number.to(dtype).to(device) for number in numbers)
    return Batch(
        states,
        0.5 * matrix,
        offset if bias else None,
        target.to(device),
        class_weight.to(dtype).to(device) if weighted else None,
    )


def budgets(x: Batch) -> dict[str, int | None]:
    """Return a budget for each way to compute the loss.

    With `small` PyTorch's linear layer computes all logits; with `fast` the budget suffices for
    one chunk of all logits and no more; with `lean` for chunks of classes, of which the last is
    short.
    """
    (tokens, hidden), item = x.input.shape, x.input.dtype.itemsize
    row_bytes = ROW_WORDS * 4 * tokens + max(item, 4) * tokens * hidden
    all_at_once = partita.linear_cross_entropy_plan(tokens, hidden, len(x.weight), x.input.dtype)
    return {
        "small": None,
        "fast": all_at_once.workspace_bytes,
        "lean": tokens * 128 * item + row_bytes,
    }


def leaves_of(x: Batch, dtype: torch.dtype | None = None) -> Batch:
    """Return the batch with hidden states, matrix and bias as leaves, also in another dtype."""
    head = (t if t is None else t.detach().to(dtype or t.dtype) for t in x[:3])
    return Batch(*(t if t is None else t.requires_grad_() for t in head), *x[3:])


def plain(x: Batch, **options: Any) -> Tensor:
    """Compute the loss from the logits with the reference."""
    with partita.backend("reference"):
        return partita.cross_entropy(
            F.linear(x.input, x.weight, x.bias), x.target, x.class_weight, **options
        )


def ours(x: Batch, memory_budget: int | None = None, **options: Any) -> Tensor:
    """Compute the loss from the hidden states."""
    return partita.linear_cross_entropy(
        x.input,
        x.weight,
        x.target,
        linear_bias=x.bias,
        weight=x.class_weight,
        memory_budget=memory_budget,
        **options,
    )


def results(
    f: Callable[[Batch], Tensor], x: Batch, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the loss and its gradients, for an upstream gradient that is not 1."""
    leaves = [
        None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in x[:3]
    ]
    class_weight = (
        None if x.class_weight is None else x.class_weight.to(dtype or x.class_weight.dtype)
    )
    with poisoned_memory():
        loss = f(Batch(*leaves, x.target, class_weight))
        wanted = [leaf for leaf in leaves if leaf is not None]
        return [loss.detach(), *torch.autograd.grad(loss, wanted, upstream(loss))]


def assert_as_good(
    found: Sequence[Tensor],
    theirs: Sequence[Tensor],
    truth: Sequence[Tensor],
    dtype: torch.dtype,
    ulps: float = 4.0,
) -> None:
    """Assert that errors are at most twice PyTorch's in the same dtype.

    Errors of a few units in the last place of the greatest element are allowed too.
    """
    for result, other, right in zip(found, theirs, truth, strict=True):
        assert result.shape == right.shape
        assert torch.equal(result.isnan(), right.isnan())
        if right.numel():
            size = right.nan_to_num().abs().max()
            differences = ((t.double() - right).nan_to_num() for t in (result, other))
            error, allowed = (difference.abs().max() for difference in differences)
            assert error <= 2 * allowed + ulps * torch.finfo(dtype).eps * size


def check(x: Batch, budget: int | None, *, ulps: float = 4.0, **options: Any) -> None:
    """Compare loss and gradients with those of the composition in fp64, as `assert_as_good`."""
    f = lambda x: plain(x, **options)  # noqa: E731
    found = results(lambda x: ours(x, budget, **options), x)
    assert_as_good(found, results(f, x), results(f, x, torch.float64), x.input.dtype, ulps)
