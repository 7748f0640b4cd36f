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
from ..cross_entropy.common import CrossEntropyOptions, LossOptions
from .common import (
    GradientCoefficients,
    Head,
    HeadGradients,
    RowOptions,
    RowState,
    RowStatistics,
    Wanted,
    accumulate_hidden,
    counted_states,
)
from .plan import CPU_CHUNK_TOKENS


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


def head_gradients(
    heads: Sequence[Head],
    wanted: Wanted,
    counts: Callable[[slice], Tensor],
    write_gradient: Callable[..., None],
    tokens: int,
    chunk: int,
    saved: Sequence[Tensor] = (),
) -> HeadGradients:
    """Compute the gradients of the first head, one chunk of logits after another.

    Args:
        heads: the heads whose logits the loss reads.
        wanted: which gradients are wanted.
        counts: returns which rows of some tokens have a gradient.
        write_gradient: takes the tokens and the classes of a chunk and the logits of each head, and
            overwrites those of the first head with their gradient.
        tokens, chunk: the tokens and the classes in a chunk. One of them is the number of all.
        saved: the saved logits of each head, for all tokens and some of the last classes, or none.
            They are used first, and their memory serves the other chunks.
    """
    head, (input_grad, weight_grad, bias_grad) = heads[0], wanted
    (M, _), C, accumulator = head.input.shape, len(head.weight), acc_dtype(head.input.dtype)
    buffers = list(saved)
    saved_classes = min(len(buffers[0]) // max(M, 1), C) if buffers else 0  # without padding
    parts = [slice(C - saved_classes, C)] * (saved_classes > 0)
    parts += chunks(C - saved_classes, chunk)
    if not saved_classes:
        buffers = [each.buffer(min(tokens, M), min(chunk, C)) for each in heads]
    one_part, rounds_sum = len(parts) == 1, tokens < M and head.input.dtype != accumulator
    result = empty_gradients(*head, input_grad, weight_grad and not rounds_sum, bias_grad)
    dinput, dweight, dbias = result
    if input_grad and not one_part:
        if dinput.dtype != accumulator:
            dinput = torch.empty_like(dinput, dtype=accumulator)
        dinput.zero_()
    if rounds_sum:
        dbias = torch.empty_like(dbias, dtype=accumulator)
        dweight = torch.empty_like(head.weight if weight_grad else dweight, dtype=accumulator)
    if M == 0:
        dweight.zero_()
        dbias.zero_()
    for rows in chunks(M, tokens):
        states = head.input[rows]
        if weight_grad:
            is_free = one_part or dinput is not result.input
            memory = result.input[rows] if is_free else states[:0]
            states = counted_states(states, counts(rows), memory)
        for part in parts:
            if saved_classes and part.stop == C:
                logits = [buffer.view(M, -1)[:, :saved_classes] for buffer in buffers]
            else:
                pairs = zip(heads, buffers, strict=True)
                logits = [each.part(rows, part).logits(buffer) for each, buffer in pairs]
            write_gradient(rows, part, *logits)
            dlogits, is_first = logits[0], rows.start == 0
            if weight_grad:
                add_product(dweight[part], dlogits.T, states, is_first)
            if input_grad and one_part:
                torch.mm(dlogits, head.weight, out=dinput[rows])
            elif input_grad:
                add_product(dinput, dlogits, head.weight[part])
            if bias_grad:
                sums = dlogits.sum(0, dtype=accumulator)
                dbias[part] = sums if is_first else dbias[part] + sums
            del logits, dlogits
    if dinput is not result.input:
        result.input.copy_(dinput)
    if rounds_sum:
        result.bias.copy_(dbias)
        buffers.clear()  # the rounded gradient takes their memory
        result = result._replace(weight=dweight.to(head.weight.dtype))
    return result


def tokens_at_once(input: Tensor, chunk: int) -> int:
    """Return the tokens in a chunk, fewer on a CPU that adds up the matrix's gradient in place."""
    in_place = not input.is_cuda and input.dtype == acc_dtype(input.dtype)
    return min(chunk, CPU_CHUNK_TOKENS) if in_place else chunk


def linear_rows(
    kernels: ChunkKernels,
    head: Head,
    target: Tensor | None,
    class_weight: Tensor | None,
    options: RowOptions,
    chunk: int,
    save_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the `RowStatistics` of a head, and its logits if they are saved.

    Without a target, which needs the entropy too, the label of a row is its arg-max.
    """
    no_class = target
    if no_class is None:
        no_class = head.input.new_full((len(head.input),), -1, dtype=torch.int64)
    state = kernels.new_state(head.input, options.needs_smoothing, options.needs_entropy)
    rest = (class_weight, state, *options[:2], chunk, save_logits)
    saved = accumulate_hidden(kernels.accumulate_logits, head, no_class, *rest)
    labels = no_class.contiguous()
    if target is None:
        assert state.argmax is not None
        labels = state.argmax
        state = state._replace(label=state.maximum)
    numbers = (len(head.weight), options.temperature, options.ignore_index)
    statistics = kernels.row_statistics(state, labels, class_weight, *numbers)
    return *statistics, saved


def linear_rows_backward(
    kernels: ChunkKernels,
    coefficients: GradientCoefficients,
    head: Head,
    target: Tensor,
    class_weight: Tensor | None,
    maximum: Tensor,
    sumexp: Tensor,
    saved: Tensor,
    temperature: float,
    softcap: float,
    chunk: int,
    wanted: Wanted,
) -> HeadGradients:
    """Compute the `HeadGradients` from the coefficients of the rows.

    Saved logits are overwritten with their gradient. An empty `saved` means that they were not
    saved; they are then computed again, `chunk` classes at a time.
    """
    target, options = target.contiguous(), (maximum, sumexp, temperature, softcap)

    def write_gradient(_: slice, part: slice, logits: Tensor) -> None:
        weights = None if class_weight is None else class_weight[part]
        row_factors = (target, weights, coefficients)
        kernels.logits_gradient(logits, part.start, *row_factors, *options, logits)

    def counts(_: slice) -> Tensor:
        return coefficients.counts()

    return head_gradients([head], wanted, counts, write_gradient, len(target), chunk, [saved])


def linear_one_pass(
    kernels: ChunkKernels,
    packed_gradients: Callable[..., HeadGradients] | None,
    head: Head,
    target: Tensor,
    class_weight: Tensor | None,
    denominator: Tensor | None,
    options: LossOptions,
    chunk: int,
    wanted: Wanted,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the sum or mean of the loss and its `HeadGradients`, `chunk` tokens at a time.

    Each chunk takes three matrix products: its logits, and two from their gradient. A denominator,
    `[]`, divides a sum before the gradients are rounded. `packed_gradients` takes the place of
    `head_gradients` for packed rows.
    """
    (input, weight, _), ignore_index = head, options.ignore_index
    dtype, mean, loss = acc_dtype(input.dtype), options.reduction == "mean", None
    divides = (denominator, ignore_index, len(weight), mean, dtype)
    divisors = kernels.mean_shares(target, class_weight, *divides)
    mean = mean or denominator is not None
    of_chunk = CrossEntropyOptions(*options[:4], mean, dtype)

    def write_gradient(logits: Tensor, labels: Tensor) -> None:
        nonlocal loss
        of_part = kernels.one_pass(logits, labels, class_weight, of_chunk, divisors)
        loss = of_part if loss is None else loss + of_part

    if packed_gradients is not None:
        gradients = packed_gradients(head, wanted, target, ignore_index, write_gradient, chunk)
    else:
        gradients = head_gradients(
            [head],
            wanted,
            lambda rows: target[rows] != ignore_index,
            lambda rows, _, logits: write_gradient(logits, target[rows]),
            tokens_at_once(input, chunk),
            len(weight),
        )
    if loss is None:
        loss = torch.full((), torch.nan if mean else 0.0, dtype=dtype, device=input.device)
    return loss, *gradients
