"""The error of a result against fp64, and its budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..runtime.dtypes import acc_dtype

Scale = Literal["element", "tensor"] | int | Tensor


@dataclass(frozen=True)
class Error:
    """The worst element of a result.

    Fields:
        ulp: its error in units in the last place; infinite where only one of result and truth is
            NaN or infinite.
        budget: the error that is allowed, in the same units.
        baseline: the worst error of the baseline, in the same units.
        index: its index; empty for a scalar and for an empty tensor.
        got, expected: its value, and the true value.
        passed: whether `ulp` is within `budget`.

    Example:
        >>> import torch
        >>> from partita.testing import ulp_error
        >>> truth = torch.tensor([1.0, 5.0], dtype=torch.float64)
        >>> print(ulp_error(torch.tensor([1.0, 4.0]), truth))
        2.1e+06 ulp at [1] (got 4.0, expected 5.0); budget 2 ulp, the baseline's own error 0 ulp
    """

    ulp: float
    budget: float
    baseline: float
    index: tuple[int, ...]
    got: float
    expected: float

    @property
    def passed(self) -> bool:
        """Return whether `ulp` is within `budget`."""
        return self.ulp <= self.budget

    def __str__(self) -> str:
        where = f"at {list(self.index)} (got {self.got}, expected {self.expected})"
        budget = f"budget {self.budget:.3g} ulp"
        baseline = f"the baseline's own error {self.baseline:.3g} ulp"
        return f"{self.ulp:.3g} ulp {where}; {budget}, {baseline}"


def _ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one unit in the last place of `dtype`.

    Arithmetic in the accumulator may flush numbers below its smallest normal number to zero, so a
    unit is at least that number.
    """
    limits, acc_limits = torch.finfo(dtype), torch.finfo(acc_dtype(dtype))
    smallest = max(limits.smallest_normal * limits.eps, acc_limits.smallest_normal)
    exponent = torch.frexp(magnitude).exponent.double() - 1
    return torch.where(magnitude == 0, smallest, (exponent.exp2() * limits.eps).clamp(min=smallest))


def _units(truth: Tensor, dtype: torch.dtype, scale: Scale) -> Tensor:
    magnitude = torch.where(truth.isfinite(), truth, 0).abs()
    if isinstance(scale, Tensor):
        terms = torch.where(scale.isfinite(), scale.double(), 0).abs()
        terms = terms.to(truth.device).expand_as(truth)
        return torch.maximum(_ulp(magnitude, dtype), _ulp(terms, acc_dtype(dtype)))
    if scale != "element":
        magnitude = magnitude.amax() if scale == "tensor" else magnitude.amax(scale, keepdim=True)
    return _ulp(magnitude, dtype)


def _distance(result: Tensor, truth: Tensor, units: Tensor) -> Tensor:
    rounded = truth.to(result.dtype)
    same = (result == rounded) | (result.isnan() & rounded.isnan())
    apart = torch.where(
        result.isfinite() & rounded.isfinite(), (result.double() - truth).abs() / units, torch.inf
    )
    return torch.where(same & ~rounded.isfinite(), 0, apart)


def worst_finite_ulp(result: Tensor, truth: Tensor, scale: Scale) -> float:
    """Return the worst finite error of a baseline.

    Elements where the baseline is NaN or infinite and the truth is not do not enlarge a budget.
    """
    if not truth.numel():
        return 0.0
    distance = _distance(
        result.detach(), truth.detach(), _units(truth.detach(), result.dtype, scale)
    )
    return float(torch.where(distance.isfinite(), distance, 0).max())


def ulp_error(
    result: Tensor,
    truth: Tensor,
    baseline: Tensor | float | None = None,
    *,
    scale: Scale = "element",
) -> Error:
    """Return the worst error of `result` with a budget of 2 ulp or two times the baseline's error.

    The guarantee of a correct algorithm decides the unit of its error. Each rounding of a term t
    shifts a sum by at most half an ulp of t, however small the sum is where terms cancel. So no
    algorithm bounds the relative error of a difference, and a good one bounds the error over the
    magnitude of its terms. Give the sum of the absolute terms as `scale`; the error is then counted
    in ulp of that sum in the accumulator's dtype or in ulp of the result in its own dtype,
    whichever is larger. `scale="element"` takes the element alone, for positive numbers that are
    formed without cancellation. Where the terms are not known, a dimension as `scale` takes the
    greatest element along it, and `"tensor"` the greatest of all. Both hide errors of much smaller
    elements.

    The baseline's error is a draw from the same distribution as the result's. Its worst element
    counts, so that a lucky element does not shrink the budget. A truth of the result's own dtype
    has an error of its own. The distance of the two is at most the sum of both, so the budget
    doubles.

    Args:
        result: `[...]`, floating dtype.
        truth: `[...]`, fp64, computed from the same inputs.
        baseline: `[...]`, the result of PyTorch from the same inputs on the same device, or its
            worst error in ulp; None to allow 2 ulp.
        scale: `"element"`, `"tensor"`, a dimension, or magnitudes that broadcast to `truth`.

    Returns:
        An `Error` in ulp. Below the smallest normal number of the accumulator's dtype, an ulp is
        that number.

    Raises:
        ValueError: a shape or a dtype that does not fit.

    Source: Higham, Accuracy and stability of numerical algorithms, 2002, chapter 4, for the error
    of a sum.

    Example:
        >>> import torch
        >>> from partita.testing import ulp_error
        >>> x = torch.linspace(-9, 9, 100)
        >>> ulp_error(x.exp(), x.double().exp()).passed
        True
    """
    for name, other in (("result", result), ("baseline", baseline)):
        if isinstance(other, Tensor) and other.shape != truth.shape:
            raise ValueError(
                f"{name}: expected the shape of truth, {list(truth.shape)}, got {list(other.shape)}"
            )
    if truth.dtype != torch.float64:
        raise ValueError(f"truth: expected dtype torch.float64, got {truth.dtype}")
    if not result.is_floating_point():
        raise ValueError(f"result: expected a floating dtype, got {result.dtype}")
    result, truth = result.detach(), truth.detach()
    if not truth.numel():
        return Error(0.0, 2.0, 0.0, (), 0.0, 0.0)
    distance = _distance(result, truth, _units(truth, result.dtype, scale))
    own = (
        worst_finite_ulp(baseline.to(result.dtype), truth, scale)
        if isinstance(baseline, Tensor)
        else baseline or 0.0
    )
    budget = max(2 * own, 2.0) * (2.0 if result.dtype == truth.dtype else 1.0)
    index = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
    return Error(
        float(distance[index]), budget, own, index, float(result[index]), float(truth[index])
    )


def assert_within_budget(
    result: Tensor,
    truth: Tensor,
    baseline: Tensor | float | None = None,
    *,
    scale: Scale = "element",
    name: str = "result",
) -> None:
    """Raise `AssertionError` with the worst element, unless `ulp_error` of the arguments passes.

    Args:
        result, truth, baseline, scale: as in `ulp_error`.
        name: the name of the result in the message.

    Raises:
        AssertionError: the error exceeds the budget.

    Example:
        >>> import torch
        >>> from partita.testing import assert_within_budget
        >>> truth = torch.ones(2, dtype=torch.float64)
        >>> assert_within_budget(torch.tensor([1.0, float("nan")]), truth, name="loss")
        Traceback (most recent call last):
        AssertionError: loss: inf ulp at [1] (got nan, expected 1.0); budget 2 ulp, ...
    """
    error = ulp_error(result, truth, baseline, scale=scale)
    if not error.passed:
        raise AssertionError(f"{name}: {error}")
