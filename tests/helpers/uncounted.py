"""Rows that do not count: whatever they hold, they contribute nothing."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

FILLS = (torch.nan, torch.inf, -torch.inf, 1e38)


def derivatives(f: Callable[..., Any], tensors: Mapping[str, Tensor], second: bool) -> list[Any]:
    """Return the results of f, their gradients, and second derivatives, by the tensor's name.

    A name that ends in an underscore is that of a tensor without a gradient.
    """
    leaves = {
        name: tensor.detach().clone().requires_grad_(not name.endswith("_"))
        for name, tensor in tensors.items()
    }
    inputs = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    found = f(**leaves)
    found = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator().manual_seed(0)

    def like(tensors: Any) -> list[Tensor]:
        return [torch.randn(t.shape, generator=generator).to(t) for t in tensors]

    grads = torch.autograd.grad(found, list(inputs.values()), like(found), create_graph=second)
    results = [dict(enumerate(found)), dict(zip(inputs, grads, strict=True))]
    if second:
        more = torch.autograd.grad(grads, list(inputs.values()), like(grads))
        results.append(dict(zip(inputs, more, strict=True)))
    return results


def check_uncounted_rows(
    f: Callable[..., Any], uncounted: Tensor, *, second: bool = True, **tensors: Tensor
) -> None:
    """Assert that rows which do not count change no bit and get no gradient.

    Args:
        f: the function, whose results do not depend on these rows.
        uncounted: which rows do not count, `[M]`.
        second: whether f can be differentiated two times.
        tensors: the arguments of f; those with M rows are filled with NaN and others.
    """
    rows = {name for name, tensor in tensors.items() if len(tensor) == len(uncounted)}
    usual = derivatives(f, tensors, second)
    for fill in FILLS:
        filled = {
            name: torch.where(
                uncounted.view(-1, *(1,) * (tensor.ndim - 1)), torch.tensor(fill).to(tensor), tensor
            )
            if name in rows
            else tensor
            for name, tensor in tensors.items()
        }
        values, *of_inputs = derivatives(f, filled, second)
        for i, value in values.items():
            assert torch.equal(value, usual[0][i]), (fill, i)
        for order, (found, expected) in enumerate(zip(of_inputs, usual[1:], strict=True), 1):
            for name, grad in found.items():
                right = expected[name]
                if name in rows:
                    assert not grad[uncounted].count_nonzero(), (fill, order, name)
                    grad, right = grad[~uncounted], right[~uncounted]
                assert right.isfinite().all() and torch.equal(grad, right), (fill, order, name)
