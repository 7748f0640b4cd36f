"""Losses from hidden states, one chunk of logits at a time.

A chunk holds the logits of some tokens for all classes, or those of all tokens for some classes.
The full `[M, C]` logits need not exist at once. The loops and the matrix products are the same on
every device; a backend supplies the functions that read and write a chunk as `ChunkKernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.rows import chunks
from ...runtime.dtypes import acc_dtype
from .common import (
    GradientCoefficients,
    HeadGradients,
    RowState,
    RowStatistics,
    counted_states,
)
from .plan import CPU_CHUNK_TOKENS, LOSS_CHUNK_TOKENS, padded_width


class ChunkKernels(NamedTuple):
    """The functions of one backend that work on a chunk of logits.

    Fields:
        new_state: returns a `RowState` for as many rows as its first argument has.
        accumulate_logits: updates a `RowState` in place with the classes of a chunk.
        row_statistics: returns the `RowStatistics` of a `RowState` that has seen all classes.
        logits_gradient: writes the gradient of a chunk's logits.
        one_pass: returns a chunk's loss and overwrites the logits with their gradient.
        mean_shares: returns what the loss and the z-loss of a row are divided by in a mean, or in
            a sum with a denominator.
    """

    new_state: Callable[..., RowState]
    accumulate_logits: Callable[..., None]
    row_statistics: Callable[..., RowStatistics]
    logits_gradient: Callable[..., None]
    one_pass: Callable[..., Tensor]
    mean_shares: Callable[..., Tensor | None]


def logits_buffer(input: Tensor, rows: int, classes: int) -> Tensor:
    """Return memory for `rows` padded rows of logits, flat."""
    return input.new_empty(rows * padded_width(classes))


def product(input: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Compute the logits of some tokens and classes in the buffer."""
    rows, classes = len(input), len(weight)
    padded = buffer[: rows * padded_width(classes)].view(rows, padded_width(classes))
    if padded.device.type == "cpu":
        # On a CPU with AMX the next product reads the padding (PyTorch 2.13). Uninitialized memory
        # may be NaN there, and 0 times NaN is NaN.
        padded[:, classes:].zero_()
    logits = padded[:, :classes]
    if bias is None:
        return torch.mm(input, weight.T, out=logits)
    return torch.addmm(bias, input, weight.T, out=logits)


def add_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool = False) -> None:
    """Add `a @ b` to `total`, with sums in the dtype of `total`; the first product replaces it."""
    widens = a.is_cuda and a.dtype != total.dtype
    if widens and is_first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    elif widens:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif is_first:
        torch.mm(a.to(total.dtype), b.to(total.dtype), out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def empty_gradients(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> HeadGradients:
    """Return memory for the gradients; those that are not wanted are empty."""
    wanted = (
        (input, input_grad),
        (weight, weight_grad),
        (input if bias is None else bias, bias_grad),
    )
    return HeadGradients(
        *(
            torch.empty(tensor.shape if wants else (0,), dtype=tensor.dtype, device=tensor.device)
            for tensor, wants in wanted
        )
    )


def accumulate_hidden(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    temperature: float,
    softcap: float,
    needs_smoothing: bool,
    needs_entropy: bool,
    chunk: int,
    save_logits: bool,
    *,
    accumulate_logits: Callable[..., None],
    first_state: Callable[..., RowState],
) -> tuple[RowState, Tensor]:
    """Return the `RowState` of `input @ weight.T + bias`, and its logits if they are saved.

    The logits are computed for `chunk` classes at a time. They can only be saved when one chunk
    holds all classes; otherwise the second result is empty.
    """
    (M, _), C, target = input.shape, len(weight), target.contiguous()
    chunk_tokens = M if save_logits else min(M, LOSS_CHUNK_TOKENS)
    buffer = logits_buffer(input, chunk_tokens, min(chunk, C))
    state = first_state(input, needs_smoothing, needs_entropy)
    for rows in chunks(M, chunk_tokens):
        fields = (None if field is None else field[rows] for field in state)
        chunk_state = RowState(*fields)  # type: ignore[arg-type]
        for part in chunks(C, chunk):
            part_bias = None if bias is None else bias[part]
            logits = product(input[rows], weight[part], part_bias, buffer)
            part_class_weight = None if class_weight is None else class_weight[part]
            accumulate_logits(
                logits,
                part.start,
                target[rows],
                part_class_weight,
                chunk_state,
                temperature,
                softcap,
            )
    return state, buffer if save_logits else buffer.new_empty(0)


def linear_rows(
    kernels: ChunkKernels,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    class_weight: Tensor | None,
    temperature: float,
    softcap: float,
    ignore_index: int,
    needs_smoothing: bool,
    needs_entropy: bool,
    chunk: int,
    save_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the `RowStatistics` of `input @ weight.T + bias`, and its logits if they are saved.

    Without a target, which needs the entropy too, the label of a row is its arg-max.
    """
    no_class = input.new_full((len(input),), -1, dtype=torch.int64) if target is None else target
    state, saved = accumulate_hidden(
        input,
        weight,
        bias,
        no_class,
        class_weight,
        temperature,
        softcap,
        needs_smoothing,
        needs_entropy,
        chunk,
        save_logits,
        accumulate_logits=kernels.accumulate_logits,
        first_state=kernels.new_state,
    )
    labels = no_class.contiguous()
    if target is None:
        assert state.argmax is not None
        labels = state.argmax
        state = state._replace(label=state.maximum)
    statistics = kernels.row_statistics(
        state, labels, class_weight, len(weight), temperature, ignore_index
    )
    return *statistics, saved


def linear_rows_backward(
    kernels: ChunkKernels,
    dlogits_coef: Tensor,
    label_coef: Tensor,
    log_coef: Tensor | None,
    smoothing_coef: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    maximum: Tensor,
    sumexp: Tensor,
    saved: Tensor,
    temperature: float,
    softcap: float,
    chunk: int,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
    *,
    counts: Tensor | None = None,
) -> HeadGradients:
    """Compute the `HeadGradients` from the coefficients of the rows.

    Saved logits are overwritten with their gradient. An empty `saved` means that they were not
    saved; they are then computed again, `chunk` classes at a time. `counts` says which rows have a
    gradient, `[M]`; None for those that have a coefficient.
    """
    C, accumulator = len(weight), acc_dtype(input.dtype)
    result = empty_gradients(input, weight, bias, input_grad, weight_grad, bias_grad)
    buffer = saved if len(saved) else logits_buffer(input, len(input), min(chunk, C))
    one_chunk, target = chunk >= C > 0, target.contiguous()
    if one_chunk or input.dtype == accumulator or not input_grad:
        dinput = result.input
    else:
        dinput = torch.empty_like(input, dtype=accumulator)
    if input_grad and not one_chunk:
        dinput.zero_()
    coefficients = GradientCoefficients(dlogits_coef, label_coef, log_coef, smoothing_coef)
    states = input
    if weight_grad:
        counts = coefficients.counts() if counts is None else counts
        is_free = one_chunk or dinput is not result.input
        states = counted_states(input, counts, result.input if is_free else input[:0])
    for part in chunks(C, chunk):
        if len(saved):
            logits = buffer.view(len(input), -1)[:, :C]
        else:
            logits = product(input, weight[part], None if bias is None else bias[part], buffer)
        kernels.logits_gradient(
            logits,
            part.start,
            target,
            None if class_weight is None else class_weight[part],
            coefficients,
            maximum,
            sumexp,
            temperature,
            softcap,
            logits,
        )
        if weight_grad:
            torch.mm(logits.T, states, out=result.weight[part])
        if input_grad and one_chunk:
            torch.mm(logits, weight, out=dinput)
        elif input_grad:
            add_product(dinput, logits, weight[part])
        if bias_grad:
            result.bias[part] = logits.sum(0, dtype=accumulator)
    if dinput is not result.input:
        result.input.copy_(dinput)
    return result


def linear_one_pass(
    kernels: ChunkKernels,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    mean: bool,
    chunk: int,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the sum or mean of the loss and its `HeadGradients`, `chunk` tokens at a time.

    Each chunk takes three matrix products: its logits, and two from their gradient. A denominator,
    `[]`, divides a sum before the gradients are rounded.
    """
    (M, _), C, accumulator = input.shape, len(weight), acc_dtype(input.dtype)
    if not input.is_cuda and input.dtype == accumulator:
        chunk = min(chunk, CPU_CHUNK_TOKENS)
    one_chunk = chunk >= M
    rounds_sum = weight_grad and not one_chunk and input.dtype != accumulator
    has_result = weight_grad and not rounds_sum
    result = empty_gradients(input, weight, bias, input_grad, has_result, bias_grad)
    dweight, dbias, loss = result.weight, None, None
    if rounds_sum:
        dweight = torch.empty(weight.shape, dtype=accumulator, device=weight.device)
    buffer = logits_buffer(input, min(chunk, M), C)
    divisors = kernels.mean_shares(
        target, class_weight, denominator, ignore_index, C, mean, accumulator
    )
    mean = mean or denominator is not None
    for part in chunks(M, chunk):
        logits = product(input[part], weight, bias, buffer)
        part_loss = kernels.one_pass(
            logits,
            target[part],
            class_weight,
            ignore_index,
            label_smoothing,
            softcap,
            z_loss,
            mean,
            divisors,
        )
        loss = part_loss if loss is None else loss + part_loss
        dinput = result.input[part]
        if weight_grad:
            states = counted_states(input[part], target[part] != ignore_index, dinput)
            add_product(dweight, logits.T, states, is_first=part.start == 0)
        if input_grad:
            torch.mm(logits, weight, out=dinput)
        if bias_grad:
            part_dbias = logits.sum(0, dtype=accumulator)
            dbias = part_dbias if dbias is None else dbias + part_dbias
        del logits
    if loss is None:
        nothing = torch.nan if mean else 0.0
        loss = torch.full((), nothing, dtype=accumulator, device=input.device)
        dweight.zero_()
        result.bias.zero_()
    if dbias is not None:
        result.bias.copy_(dbias)
    if rounds_sum:
        del buffer  # the rounded gradient takes its memory
        result = result._replace(weight=dweight.to(weight.dtype))
    return loss, *result
