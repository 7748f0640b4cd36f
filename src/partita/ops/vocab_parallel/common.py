"""The packed state of a rank's rows, and the functions that the reference and the kernels share.

The functions take the backend's `accumulate_logits` or `logits_gradient` as an argument.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype
from ..linear_heads.common import (
    GradientCoefficients,
    Head,
    RowOptions,
    RowState,
    accumulate_hidden,
)


def packed_size(needs_smoothing: bool, needs_entropy: bool) -> int:
    """Return how many numbers of each row a rank sends."""
    return 4 + 3 * needs_smoothing + 2 * needs_entropy


def integer_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the integer dtype with the size of an accumulator's dtype."""
    return torch.int64 if dtype == torch.float64 else torch.int32


def pack_state(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    first_class: int,
    options: RowOptions,
    chunk: int,
    widens: bool,
    save_logits: bool,
    *,
    accumulate_logits: Callable[..., None],
) -> tuple[Tensor, Tensor]:
    """Return the packed state of this rank's rows, and the logits of a head if they are saved.

    The state is `[packed_size, M]`: maximum, sumexp, label logit and number of classes; with
    smoothing also origin, smoothing loss and sum of the class weights; with an entropy also
    sum_x_exp and the bits of the argmax.

    Args:
        input: this rank's logits, `[M, C_local]`, or the hidden states, `[M, H]`.
        weight, bias: this rank's rows of the matrix, and of the bias; None with logits.
        target, class_weight: relative to this rank's classes.
        first_class: this rank's first class among all classes.
        options: the options of the statistics.
        chunk, save_logits: as in `accumulate_hidden`.
        widens: as in `Head`.
        accumulate_logits: the function of the backend.
    """
    M, classes = len(input), input.shape[1] if weight is None else len(weight)
    smoothing, entropy = options.needs_smoothing, options.needs_entropy
    packed = input.new_empty((packed_size(smoothing, entropy), M), dtype=acc_dtype(input.dtype))
    packed[3] = classes
    if smoothing:
        packed[6] = classes if class_weight is None else class_weight.sum(dtype=packed.dtype)
    state = RowState(
        maximum=packed[0],
        sumexp=packed[1],
        label=packed[2],
        origin=packed[4] if smoothing else None,
        smoothing_loss=packed[5] if smoothing else None,
        sum_x_exp=packed[-2] if entropy else None,
        argmax=input.new_empty(M, dtype=torch.int64) if entropy else None,
    )
    if not classes:
        state.clear()
    numbers, saved = (options.temperature, options.softcap), input.new_empty(0)
    if weight is not None:
        head, rest = Head(input, weight, bias, False, widens), (*numbers, chunk, save_logits)
        saved = accumulate_hidden(accumulate_logits, head, target, class_weight, state, *rest)
    elif input.numel():
        accumulate_logits(input, 0, target.contiguous(), class_weight, state, *numbers)
    if state.argmax is not None:
        argmax = (state.argmax + first_class).to(integer_dtype(packed.dtype))
        packed[-1] = argmax.view(packed.dtype)
    return packed, saved


def gradient_of_logits(
    coefficients: GradientCoefficients,
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
    *,
    logits_gradient: Callable[..., None],
) -> Tensor:
    """Return the gradient of this rank's logits from the coefficients of its rows."""
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if logits.numel():
        of_rows = (target.contiguous(), class_weight, coefficients, maximum, sumexp)
        logits_gradient(logits, 0, *of_rows, temperature, softcap, result)
    return result
