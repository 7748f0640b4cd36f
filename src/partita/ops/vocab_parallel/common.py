"""The packed state of a rank's rows, and the functions that the reference and the kernels share.

The functions take the backend's `accumulate_logits` or `logits_gradient` as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype
from ..linear_heads.common import GradientCoefficients, Head, RowState


class PackedState(NamedTuple):
    """The state of rows over this rank's classes, in the memory that the ranks gather.

    Fields:
        packed: `[packed_size, M]`: maximum, sumexp, label logit and number of classes; with
            smoothing also origin, smoothing loss and sum of the class weights; with an entropy also
            sum_x_exp and the bits of the argmax.
        state: views of these rows, and an int64 argmax of its own.
    """

    packed: Tensor
    state: RowState


def packed_size(smoothing: bool, entropy: bool) -> int:
    """Return how many numbers of each row a rank sends."""
    return 4 + 3 * smoothing + 2 * entropy


def integer_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the integer dtype with the size of an accumulator's dtype."""
    return torch.int64 if dtype == torch.float64 else torch.int32


def empty_packed_state(
    like: Tensor,
    classes: int,
    class_weight: Tensor | None,
    smoothing: bool,
    entropy: bool,
    *,
    initialize: bool,
) -> PackedState:
    """Allocate the packed state of the rows of `like`, which are over `classes` classes.

    Without `initialize` the state is uninitialized memory, for kernels that overwrite it with the
    first chunk of classes.
    """
    M = len(like)
    packed = torch.empty(
        (packed_size(smoothing, entropy), M), dtype=acc_dtype(like.dtype), device=like.device
    )
    if initialize:
        packed.zero_()
        packed[0] = packed[2] = -torch.inf
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
        argmax=torch.zeros(M, dtype=torch.int64, device=like.device) if entropy else None,
    )
    return PackedState(packed, state)


def finish_packed_state(x: PackedState, first_class: int) -> Tensor:
    """Write the argmax among all classes into the packed state, and return what is gathered."""
    if x.state.argmax is not None:
        argmax = (x.state.argmax + first_class).to(integer_dtype(x.packed.dtype))
        x.packed[-1] = argmax.view(x.packed.dtype)
    return x.packed


def pack_logits(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    first_class: int,
    temperature: float,
    softcap: float,
    smoothing: bool,
    entropy: bool,
    *,
    accumulate_logits: Callable[..., None],
    overwrites_state: bool,
) -> Tensor:
    """Return the packed state of this rank's logits.

    `target` and `class_weight` are relative to this rank's classes. `overwrites_state` says that
    the backend's `accumulate_logits` writes the state of the first chunk without reading it.
    """
    initialize = not overwrites_state or not logits.numel()
    x = empty_packed_state(
        logits, logits.shape[1], class_weight, smoothing, entropy, initialize=initialize
    )
    if logits.numel():
        accumulate_logits(
            logits, 0, target.contiguous(), class_weight, x.state, temperature, softcap
        )
    return finish_packed_state(x, first_class)


def pack_hidden(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    first_class: int,
    temperature: float,
    softcap: float,
    smoothing: bool,
    entropy: bool,
    chunk: int,
    save_logits: bool,
    *,
    accumulate_hidden: Callable[..., tuple[RowState, Tensor]],
    accumulate_logits: Callable[..., None],
    overwrites_state: bool,
) -> tuple[Tensor, Tensor]:
    """Return the packed state of input weight^T + bias, and the logits if they are to be saved.

    `weight` has this rank's rows of the matrix; `target` and `class_weight` are relative to them.
    """
    initialize = not overwrites_state or not len(weight)
    x = empty_packed_state(
        input, len(weight), class_weight, smoothing, entropy, initialize=initialize
    )
    _, saved_logits = accumulate_hidden(
        Head(input, weight, bias),
        target,
        class_weight,
        temperature,
        softcap,
        smoothing,
        entropy,
        chunk,
        save_logits,
        accumulate_logits=accumulate_logits,
        first_state=lambda *_: x.state,
    )
    return finish_packed_state(x, first_class), saved_logits


def gradient_of_logits(
    dlogits_coef: Tensor,
    label_coef: Tensor,
    log_coef: Tensor | None,
    smoothing_coef: Tensor | None,
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
        coefficients = GradientCoefficients(dlogits_coef, label_coef, log_coef, smoothing_coef)
        of_rows = (target.contiguous(), class_weight, coefficients, maximum, sumexp)
        logits_gradient(logits, 0, *of_rows, temperature, softcap, result)
    return result
