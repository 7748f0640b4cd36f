"""Comparison of a function with its reference, forward and backward, and memory for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import deterministic

from .budget import Error, Scale, ulp_error, worst_finite_ulp

_settings: Any = deterministic  # its one attribute is not declared


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory of PyTorch with NaN, and with the greatest number for integers.

    This holds on all devices and in all threads for `torch.empty`, `empty_like`, `empty_strided`,
    `Tensor.new_empty` and similar functions. A kernel that leaves an element of its output
    unwritten, or reads it before it writes it, shows NaN. It is PyTorch's deterministic mode
    without warnings.

    Source: `torch.utils.deterministic.fill_uninitialized_memory`.

    Example:
        >>> import torch
        >>> from partita.testing import poisoned_memory
        >>> with poisoned_memory():
        ...     torch.empty(2)
        tensor([nan, nan])
    """
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = _settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            _settings.fill_uninitialized_memory = True
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            _settings.fill_uninitialized_memory = fill


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
        """Return whether all errors are within their budgets."""
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
    """Return the inputs with floating tensors as leaves that share memory, or copies in `dtype`."""
    return [
        t.detach().to(dtype or t.dtype).requires_grad_()
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
        for t in inputs
    ]


def upstream_like(results: Sequence[Tensor]) -> list[Tensor]:
    """Return a random upstream gradient for each element."""
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
        function, reference: map `inputs` to a tensor or a tuple of tensors, and are differentiable
            in all floating inputs.
        inputs: tensors and other arguments, which are not changed.

    Returns:
        `Difference(forward, backward)`, with one random upstream gradient for each element of the
        results.

    Raises:
        ValueError: the two have different numbers of results.
        RuntimeError: no floating input, or a result that is not differentiable.

    Example:
        >>> import torch, partita
        >>> from partita.testing import forward_backward_difference, sample_labels
        >>> theirs = torch.nn.functional.cross_entropy
        >>> labelled = sample_labels()
        >>> difference = forward_backward_difference(partita.cross_entropy, theirs, *labelled)
        >>> difference.forward < 1e-6, difference.backward < 1e-6
        (True, True)
    """
    ours, theirs = run(function, leaves(inputs)), run(reference, leaves(inputs))
    return Difference(*(_greatest(a, b) for a, b in zip(ours, theirs, strict=True)))


def _greatest(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the greatest difference, which is NaN if any is; equal infinities do not differ.

    A maximum of Python numbers could pass over a NaN.
    """
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
    """Run a function on poisoned memory, and measure it against its reference in fp64.

    The budget is that of `ulp_error`. The baseline is the reference on the same device, in the
    dtype of the inputs. For fp64, where it would be the truth itself, its error in ulp is measured
    in fp32 on rounded inputs.

    Args:
        function: maps `inputs` to a tensor or a tuple of tensors, and is differentiable in all
            floating inputs.
        reference: the same function in plain PyTorch, for inputs of any floating dtype.
        inputs: tensors and other arguments, which are not changed.
        upstream: the gradient of each result, `[...]` like the result; by default one random number
            for each element.
        scale, grad_scale: the scales of `ulp_error` for results and gradients; one for all, or one
            for each.

    Returns:
        `Errors(forward, backward)`, in ulp.

    Raises:
        ValueError: the two have different numbers or shapes of results.
        RuntimeError: no floating input, or a result that is not differentiable.

    Example:
        >>> import torch, partita
        >>> from partita.testing import contract_errors, sample_rows
        >>> theirs = lambda x: torch.softmax(x, -1)
        >>> contract_errors(partita.softmax, theirs, sample_rows(3, 50), grad_scale=-1).passed
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
    """Return the inputs with fp64 tensors as fp32; the same object where there are none."""
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
