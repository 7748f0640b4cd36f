"""A function beside its reference: forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .budget import Error, Scale, ulp_error, worst_finite_ulp
from .memory import poisoned_memory


class Difference(NamedTuple):
    """Greatest absolute differences between two functions.

    Fields:
        forward: of the results.
        backward: of the gradients.
    """

    forward: float
    backward: float

    def __str__(self) -> str:
        return f"fwd diff: {self.forward:.2e}\nbwd diff: {self.backward:.2e}"


class Errors(NamedTuple):
    """Errors of a function against fp64, in ulp.

    Fields:
        forward: one `Error` for each floating result.
        backward: one `Error` for each floating input.
        passed: whether all are within their budgets.
    """

    forward: tuple[Error, ...]
    backward: tuple[Error, ...]

    @property
    def passed(self) -> bool:
        """Whether all errors are within their budgets."""
        return all(error.passed for error in (*self.forward, *self.backward))

    def __str__(self) -> str:
        lines = [
            f"{part} {i}: {error}"
            for part in ("forward", "backward")
            for i, error in enumerate(getattr(self, part))
        ]
        return "\n".join(lines)


class Run(NamedTuple):
    results: tuple[Tensor, ...]  # the floating ones
    gradients: tuple[Tensor, ...]  # one for each floating input


def floating(tensors: Sequence[Any]) -> list[Tensor]:
    return [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]


def leaves(inputs: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """The inputs, each floating one a leaf that shares its memory, or a copy in `dtype`."""
    return [
        t.detach().to(dtype or t.dtype).requires_grad_()
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
        for t in inputs
    ]


def upstream_like(results: Sequence[Tensor]) -> list[Tensor]:
    """A factor of its own for each element."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(r.shape, generator=generator).to(r.device, r.dtype) for r in results]


def forward(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    result = function(*inputs)
    return (result,) if isinstance(result, Tensor) else tuple(floating(result))


def run(
    function: Callable[..., Any], inputs: Sequence[Any], upstream: Sequence[Tensor] | None = None
) -> Run:
    results = forward(function, inputs)
    upstream = (
        upstream_like(results)
        if upstream is None
        else [u.to(r.dtype) for u, r in zip(upstream, results, strict=True)]
    )
    return Run(results, torch.autograd.grad(results, floating(inputs), upstream))


def forward_backward_difference(
    function: Callable[..., Any], reference: Callable[..., Any], *inputs: Any
) -> Difference:
    """Greatest differences between two functions, in their results and in their gradients.

    Args:
        function, reference: from `inputs` to a tensor, or a tuple of them; differentiable in every floating input.
        inputs: tensors and other arguments, left as they are.

    Returns:
        `Difference(forward, backward)`, gradients under one random upstream factor for each element of the results.

    Raises:
        ValueError: the two differ in how many results they have.
        RuntimeError: no floating input, or a result that is not differentiable.

    Example:
        >>> import torch, partita
        >>> from partita.testing import forward_backward_difference, sample_labels
        >>> difference = forward_backward_difference(partita.cross_entropy, torch.nn.functional.cross_entropy, *sample_labels())
        >>> difference.forward < 1e-6, difference.backward < 1e-6
        (True, True)
    """
    ours, theirs = run(function, leaves(inputs)), run(reference, leaves(inputs))
    return Difference(*(_greatest(a, b) for a, b in zip(ours, theirs, strict=True)))


def _greatest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """NaN if there is one, which a maximum of Python numbers may pass over; equal infinities do not differ."""
    differences = [torch.zeros(1, dtype=torch.float64)]
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape:
            raise ValueError(
                f"results: expected equal shapes, got {list(a.shape)} and {list(b.shape)}"
            )
        a, b = a.detach().double(), b.detach().double()
        differences.append(torch.where(a == b, 0.0, a - b).abs().flatten().cpu())
    return float(torch.cat(differences).max())


def contract_errors(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    *inputs: Any,
    upstream: Sequence[Tensor] | None = None,
    scale: Scale | Sequence[Scale] = "element",
    grad_scale: Scale | Sequence[Scale] = "tensor",
) -> Errors:
    """Run a function forward and backward on poisoned memory, and measure it against its reference in fp64.

    The budget is that of `ulp_error`; the baseline is the reference on the same device, in the dtype of the inputs. For fp64, where it would
    be the truth itself, its error in ulp is measured in fp32, on the inputs rounded to that.

    Args:
        function: from `inputs` to a tensor, or a tuple of them; differentiable in every floating input.
        reference: the same in plain PyTorch, for inputs of any floating dtype.
        inputs: tensors and other arguments, left as they are.
        upstream: the gradient of each result, `[...]` as that is; by default one random factor for each element.
        scale, grad_scale: of `ulp_error`, for the results and for the gradients; one for all, or one for each.

    Returns:
        `Errors(forward, backward)`.

    Raises:
        ValueError: the two differ in how many results they have, or in their shapes.
        RuntimeError: no floating input, or a result that is not differentiable.

    Example:
        >>> import torch, partita
        >>> from partita.testing import contract_errors, sample_rows
        >>> contract_errors(partita.softmax, lambda x: torch.softmax(x, -1), sample_rows(3, 50), grad_scale=-1).passed
        True
    """
    with poisoned_memory():
        ours = run(function, leaves(inputs), upstream)
    upstream = upstream_like(ours.results) if upstream is None else upstream
    truth = run(reference, leaves(inputs, torch.float64), upstream)
    below = _narrowed(inputs)
    own = run(reference, leaves(below), upstream)
    own_truth = truth if below is inputs else run(reference, leaves(below, torch.float64), upstream)
    return Errors(
        *(
            _errors(*each)
            for each in zip(ours, truth, own, own_truth, (scale, grad_scale), strict=True)
        )
    )


def _narrowed(inputs: Sequence[Any]) -> Sequence[Any]:
    """The inputs, fp64 among them as fp32; the same object where there are none."""
    if all(t.dtype != torch.float64 for t in floating(inputs)):
        return inputs
    return [t.float() if isinstance(t, Tensor) and t.dtype == torch.float64 else t for t in inputs]


def _errors(
    ours: Sequence[Tensor],
    truth: Sequence[Tensor],
    own: Sequence[Tensor],
    own_truth: Sequence[Tensor],
    scale: Scale | Sequence[Scale],
) -> tuple[Error, ...]:
    scales = [scale] * len(ours) if isinstance(scale, str | int | Tensor) else scale
    errors = []
    for result, exact, baseline, baseline_exact, each in zip(
        ours, truth, own, own_truth, scales, strict=True
    ):
        rounded = baseline if result.dtype == torch.float64 else baseline.to(result.dtype)
        errors.append(
            ulp_error(result, exact, worst_finite_ulp(rounded, baseline_exact, each), scale=each)
        )
    return tuple(errors)
