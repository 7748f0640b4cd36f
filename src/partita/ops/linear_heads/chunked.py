"""Losses from hidden states, one chunk of logits at a time.

A chunk holds the logits of some tokens for all classes, or those of all tokens for some classes.
The full `[M, C]` logits need not exist at once. The loops and the matrix products are the same for
every loss and device. Between the products of a chunk a loss reads its logits and overwrites them
with their gradient; a backend supplies the functions that do this as `ChunkKernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.rows import chunks
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.common import CrossEntropyOptions
from .common import (
    GradientCoefficients,
    Head,
    HeadGradients,
    RowState,
    RowStatistics,
    counted_states,
)
from .plan import CPU_CHUNK_TOKENS, LOSS_CHUNK_TOKENS

Wanted = tuple[bool, bool, bool]  # whether hidden states, matrix and bias need a gradient


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


def gradients_by_class(
    heads: Sequence[Head],
    wanted: Wanted,
    counts: Callable[[], Tensor],
    write_gradient: Callable[..., None],
    saved: Sequence[Tensor],
    saved_classes: int,
    chunk: int,
) -> HeadGradients:
    """Compute the gradients of the first head, one chunk of classes after another.

    Args:
        heads: the heads whose logits the loss reads.
        wanted: which gradients are wanted.
        counts: returns which rows have a gradient, `[M]`.
        write_gradient: takes the classes of a chunk and the logits of each head, and overwrites
            those of the first head with their gradient.
        saved: the saved logits of each head. They are used first, and their memory serves the other
            chunks.
        saved_classes: how many of the last classes are saved.
        chunk: the classes whose logits are computed again together.
    """
    head, (input_grad, weight_grad, bias_grad) = heads[0], wanted
    (M, _), C, accumulator = head.input.shape, len(head.weight), acc_dtype(head.input.dtype)
    result = empty_gradients(*head, *wanted)
    parts = [slice(C - saved_classes, C)] * (saved_classes > 0)
    parts += chunks(C - saved_classes, chunk)
    buffers = saved if saved_classes else [each.buffer(M, min(chunk, C)) for each in heads]
    one_chunk, dinput, states = len(parts) == 1, result.input, head.input
    if input_grad and not one_chunk:
        if dinput.dtype != accumulator:
            dinput = torch.empty_like(head.input, dtype=accumulator)
        dinput.zero_()
    if weight_grad:
        is_free = one_chunk or dinput is not result.input
        states = counted_states(states, counts(), result.input if is_free else states[:0])
    for part in parts:
        if saved_classes and part.stop == C:
            logits = [buffer.view(M, -1)[:, :saved_classes] for buffer in buffers]
        else:
            pairs = zip(heads, buffers, strict=True)
            logits = [each.of_classes(part).logits(buffer) for each, buffer in pairs]
        write_gradient(part, *logits)
        dlogits = logits[0]
        if weight_grad:
            torch.mm(dlogits.T, states, out=result.weight[part])
        if input_grad and one_chunk:
            torch.mm(dlogits, head.weight, out=dinput)
        elif input_grad:
            add_product(dinput, dlogits, head.weight[part])
        if bias_grad:
            result.bias[part] = dlogits.sum(0, dtype=accumulator)
    if dinput is not result.input:
        result.input.copy_(dinput)
    return result


def gradients_by_token(
    heads: Sequence[Head],
    wanted: Wanted,
    counts: Callable[[slice], Tensor],
    write_gradient: Callable[..., None],
    chunk: int,
) -> HeadGradients:
    """Compute the gradients of the first head, one chunk of tokens after another.

    The arguments are those of `gradients_by_class`, for chunks of tokens.
    """
    head, (input_grad, weight_grad, bias_grad) = heads[0], wanted
    (M, _), C, accumulator = head.input.shape, len(head.weight), acc_dtype(head.input.dtype)
    if not head.input.is_cuda and head.input.dtype == accumulator:
        chunk = min(chunk, CPU_CHUNK_TOKENS)
    rounds_sum = weight_grad and chunk < M and head.input.dtype != accumulator
    result = empty_gradients(*head, input_grad, weight_grad and not rounds_sum, bias_grad)
    dweight, dbias = result.weight, None
    if rounds_sum:
        dweight = torch.empty(head.weight.shape, dtype=accumulator, device=head.weight.device)
    if M == 0:
        dweight.zero_()
        result.bias.zero_()
    buffers = [each.buffer(min(chunk, M), C) for each in heads]
    for part in chunks(M, chunk):
        pairs = zip(heads, buffers, strict=True)
        logits = [each.of_tokens(part).logits(buffer) for each, buffer in pairs]
        write_gradient(part, *logits)
        dlogits, dinput = logits[0], result.input[part]
        if weight_grad:
            states = counted_states(head.input[part], counts(part), dinput)
            add_product(dweight, dlogits.T, states, is_first=part.start == 0)
        if input_grad:
            torch.mm(dlogits, head.weight, out=dinput)
        if bias_grad:
            part_dbias = dlogits.sum(0, dtype=accumulator)
            dbias = part_dbias if dbias is None else dbias + part_dbias
        del logits, dlogits
    if dbias is not None:
        result.bias.copy_(dbias)
    if rounds_sum:
        buffers.clear()  # the rounded gradient takes their memory
        result = result._replace(weight=dweight.to(head.weight.dtype))
    return result


def gradients_of_loss(
    head: Head,
    wanted: Wanted,
    target: Tensor,
    ignore_index: int,
    write_gradient: Callable[[Tensor, Tensor], None],
    chunk: int,
) -> HeadGradients:
    """Compute the gradients of a head whose tokens have labels, in chunks of tokens.

    `write_gradient` overwrites the logits of a chunk with their gradient, given its labels.
    """

    def counts(part: slice) -> Tensor:
        return target[part] != ignore_index

    def write_part(part: slice, logits: Tensor) -> None:
        write_gradient(logits, target[part])

    return gradients_by_token([head], wanted, counts, write_part, chunk)


def accumulate_hidden(
    head: Head,
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
    """Return the `RowState` of the logits of a head, and the logits if they are saved.

    The logits are computed for `chunk` classes at a time. They can only be saved when one chunk
    holds all classes; otherwise the second result is empty.
    """
    M, C, target = len(head.input), len(head.weight), target.contiguous()
    tokens = M if save_logits else min(M, LOSS_CHUNK_TOKENS)
    buffer = head.buffer(tokens, min(chunk, C))
    state = first_state(head.input, needs_smoothing, needs_entropy)
    for rows in chunks(M, tokens):
        of_rows, part_state = head.of_tokens(rows), state.part(rows)
        for part in chunks(C, chunk):
            weights = None if class_weight is None else class_weight[part]
            options = (weights, part_state, temperature, softcap)
            logits = of_rows.of_classes(part).logits(buffer)
            accumulate_logits(logits, part.start, target[rows], *options)
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
    options = (class_weight, temperature, softcap, needs_smoothing, needs_entropy)
    state, saved = accumulate_hidden(
        Head(input, weight, bias),
        no_class,
        *options,
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
) -> HeadGradients:
    """Compute the `HeadGradients` from the coefficients of the rows.

    Saved logits are overwritten with their gradient. An empty `saved` means that they were not
    saved; they are then computed again, `chunk` classes at a time.
    """
    coefficients = GradientCoefficients(dlogits_coef, label_coef, log_coef, smoothing_coef)
    target, options = target.contiguous(), (maximum, sumexp, temperature, softcap)

    def write_gradient(part: slice, logits: Tensor) -> None:
        weights = None if class_weight is None else class_weight[part]
        row_factors = (target, weights, coefficients)
        kernels.logits_gradient(logits, part.start, *row_factors, *options, logits)

    heads, wanted = [Head(input, weight, bias)], (input_grad, weight_grad, bias_grad)
    saved_classes = len(weight) if len(saved) else 0
    return gradients_by_class(
        heads, wanted, coefficients.counts, write_gradient, [saved], saved_classes, chunk
    )


def linear_one_pass(
    kernels: ChunkKernels,
    loss_by_token: Callable[..., HeadGradients],
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

    `loss_by_token` is `gradients_of_loss`, or another function with its arguments.

    Each chunk takes three matrix products: its logits, and two from their gradient. A denominator,
    `[]`, divides a sum before the gradients are rounded.
    """
    dtype, loss = acc_dtype(input.dtype), None
    divides = (denominator, ignore_index, len(weight), mean, dtype)
    divisors = kernels.mean_shares(target, class_weight, *divides)
    mean = mean or denominator is not None
    options = CrossEntropyOptions(ignore_index, label_smoothing, softcap, z_loss, mean, dtype)

    def write_gradient(logits: Tensor, labels: Tensor) -> None:
        nonlocal loss
        of_part = kernels.one_pass(logits, labels, class_weight, options, divisors)
        loss = of_part if loss is None else loss + of_part

    head, wanted = Head(input, weight, bias), (input_grad, weight_grad, bias_grad)
    gradients = loss_by_token(head, wanted, target, ignore_index, write_gradient, chunk)
    if loss is None:
        loss = torch.full((), torch.nan if mean else 0.0, dtype=dtype, device=input.device)
    return loss, *gradients
