"""Divergences from the hidden states of two heads, one chunk of logits at a time.

A chunk has the logits of both heads, for some tokens and all classes or for all tokens and some
classes. A backend supplies the functions that read and write a chunk as `DivergenceKernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.rows import chunks
from ...runtime.dtypes import acc_dtype
from ..divergence.common import DivergenceKernels, DivergenceRows, DivergenceState
from .chunked import add_product, empty_gradients, logits_buffer, product
from .common import HeadGradients, counted_states
from .plan import CPU_CHUNK_TOKENS, padded_width


class Head(NamedTuple):
    """Hidden states and the matrix of the vocabulary.

    Fields:
        input: hidden states, `[M, H]`.
        weight: the matrix, `[C, H]`.
        bias: its bias, `[C]`, or None.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None

    def buffer(self, tokens: int, classes: int) -> Tensor:
        """Return memory for logits."""
        return logits_buffer(self.input, tokens, classes)

    def logits(self, rows: slice, part: slice, buffer: Tensor) -> Tensor:
        """Compute the logits of some tokens and classes in the buffer."""
        bias = None if self.bias is None else self.bias[part]
        return product(self.input[rows], self.weight[part], bias, buffer)


class DivergenceNumbers(NamedTuple):
    """The options of a divergence; see `divergence`. No soft-capping is 0."""

    beta: float
    temperature: float
    softcap: float


Buffers = tuple[Tensor, Tensor]  # memory of the logits of student and teacher


def _accumulate_rows(
    kernels: DivergenceKernels,
    pairs: list[tuple[int, Tensor, Tensor]],
    state: DivergenceState,
    numbers: DivergenceNumbers,
) -> None:
    """Compute the divergences of rows from their logits, which come in parts of the classes."""
    for first, logits, teacher_logits in pairs:
        kernels.accumulate(logits, teacher_logits, state, first, *numbers)
    if 0 < numbers.beta < 1:
        for first, logits, teacher_logits in pairs:
            kernels.accumulate_mixture(logits, teacher_logits, state, first, *numbers)


def _accumulate_all(
    kernels: DivergenceKernels,
    heads: tuple[Head, Head],
    numbers: DivergenceNumbers,
    tokens: int,
    saved: int,
) -> tuple[DivergenceState, Buffers]:
    """Return the state of all rows, and the logits of the last `saved` classes."""
    (M, _), C = heads[0].input.shape, len(heads[0].weight)
    state = kernels.new_state(heads[0].input)
    parts = [part for part in (slice(0, C - saved), slice(C - saved, C)) if part.start < part.stop]
    of_saved = heads[0].buffer(M, saved), heads[1].buffer(M, saved)
    of_others = tuple(head.buffer(min(tokens, M), C - saved) for head in heads)
    for rows in chunks(M, tokens):
        offset = rows.start * padded_width(saved)
        pairs = []
        for part in parts:
            is_saved = part.stop - part.start == saved and part.stop == C
            memory = [buffer[offset:] for buffer in of_saved] if is_saved else of_others
            logits = [h.logits(rows, part, b) for h, b in zip(heads, memory, strict=True)]
            pairs.append((part.start, logits[0], logits[1]))
        _accumulate_rows(kernels, pairs, state.part(rows), numbers)
    return state, of_saved


def linear_divergence(
    kernels: DivergenceKernels,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    beta: float,
    temperature: float,
    softcap: float,
    tokens: int,
    save_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the `DivergenceRows` of two heads, and their logits if they are saved, else nothing.

    The logits of `tokens` tokens exist at once, those of all tokens if they are saved.
    """
    heads = Head(input, weight, bias), Head(teacher_input, teacher_weight, teacher_bias)
    numbers = DivergenceNumbers(beta, temperature, softcap)
    saved = len(weight) if save_logits else 0
    state, buffers = _accumulate_all(kernels, heads, numbers, tokens, saved)
    return *state.rows, *buffers


def _gradients_by_class(
    kernels: DivergenceKernels,
    grad: Tensor,
    heads: tuple[Head, Head],
    rows: DivergenceRows,
    buffers: Buffers,
    numbers: DivergenceNumbers,
    saved: int,
    chunk: int,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> HeadGradients:
    """Compute the gradients of the student's head, one chunk of classes after another.

    The buffers have the logits of the last `saved` classes. They are used first, and their memory
    serves the other chunks.
    """
    student, teacher = heads
    (M, _), C, accumulator = (
        student.input.shape,
        len(student.weight),
        acc_dtype(student.input.dtype),
    )
    result = empty_gradients(*student, input_grad, weight_grad, bias_grad)
    parts = [slice(C - saved, C)] * (saved > 0) + list(chunks(C - saved, chunk))
    if not saved:
        buffers = student.buffer(M, min(chunk, C)), teacher.buffer(M, min(chunk, C))
    dinput = result.input
    if input_grad and len(parts) != 1:
        dinput = torch.zeros_like(student.input, dtype=accumulator)
    states = student.input
    if weight_grad:
        states = counted_states(states, grad != 0, result.input)
    for part in parts:
        if saved and part.stop == C:
            logits, teacher_logits = (buffer.view(M, -1)[:, :saved] for buffer in buffers)
        else:
            logits = student.logits(slice(None), part, buffers[0])
            teacher_logits = teacher.logits(slice(None), part, buffers[1])
        kernels.gradient(grad, logits, teacher_logits, rows, *numbers, logits)
        if weight_grad:
            torch.mm(logits.T, states, out=result.weight[part])
        if input_grad and len(parts) == 1:
            torch.mm(logits, student.weight, out=dinput)
        elif input_grad:
            add_product(dinput, logits, student.weight[part])
        if bias_grad:
            result.bias[part] = logits.sum(0, dtype=accumulator)
    if dinput is not result.input:
        result.input.copy_(dinput)
    return result


def linear_divergence_backward(
    kernels: DivergenceKernels,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    student: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    teacher_maximum: Tensor,
    teacher_sumexp: Tensor,
    saved: Tensor,
    teacher_saved: Tensor,
    beta: float,
    temperature: float,
    softcap: float,
    chunk: int,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the `HeadGradients` from the gradient of the rows' divergences.

    Saved logits are overwritten. Without them the logits are computed again.
    """
    heads = Head(input, weight, bias), Head(teacher_input, teacher_weight, teacher_bias)
    statistics = (student, maximum, sumexp, teacher_maximum, teacher_sumexp)
    rows = DivergenceRows(grad, *(field.contiguous() for field in statistics))
    return _gradients_by_class(
        kernels,
        grad.contiguous(),
        heads,
        rows,
        (saved, teacher_saved),
        DivergenceNumbers(beta, temperature, softcap),
        len(weight) if len(saved) else 0,
        chunk,
        input_grad,
        weight_grad,
        bias_grad,
    )


def linear_divergence_one_pass(
    kernels: DivergenceKernels,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    factors: Tensor,
    beta: float,
    temperature: float,
    softcap: float,
    tokens: int,
    saved: int,
    chunk: int,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the divergence of each row, and the `HeadGradients` of their sum with the factors.

    Args:
        factors: the factor of each row, `[M]`.
        tokens, saved, chunk: as in `DivergencePlan`.
        The others: as in `linear_divergence_backward`.
    """
    heads = Head(input, weight, bias), Head(teacher_input, teacher_weight, teacher_bias)
    numbers = DivergenceNumbers(beta, temperature, softcap)
    wanted = (input_grad, weight_grad, bias_grad)
    if not chunk:
        return _gradients_by_token(kernels, heads, factors, numbers, tokens, *wanted)
    state, buffers = _accumulate_all(kernels, heads, numbers, tokens, saved)
    rows = state.rows
    gradients = _gradients_by_class(
        kernels, factors, heads, rows, buffers, numbers, saved, chunk, *wanted
    )
    return rows.loss, *gradients


def _gradients_by_token(
    kernels: DivergenceKernels,
    heads: tuple[Head, Head],
    factors: Tensor,
    numbers: DivergenceNumbers,
    tokens: int,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the divergences and the gradients, one chunk of tokens after another.

    Each chunk takes four matrix products: its logits under both heads, and two from the gradient.
    """
    student = heads[0]
    (M, _), C, accumulator = (
        student.input.shape,
        len(student.weight),
        acc_dtype(student.input.dtype),
    )
    if not student.input.is_cuda and student.input.dtype == accumulator:
        tokens = min(tokens, CPU_CHUNK_TOKENS)
    rounds_sum = weight_grad and tokens < M and student.input.dtype != accumulator
    has_result = weight_grad and not rounds_sum
    result = empty_gradients(*student, input_grad, has_result, bias_grad)
    dweight = result.weight
    if rounds_sum:
        shape, device = student.weight.shape, student.weight.device
        dweight = torch.empty(shape, dtype=accumulator, device=device)
    elif M == 0:
        dweight.zero_()
    buffers = [head.buffer(min(tokens, M), C) for head in heads]
    state, all_classes = kernels.new_state(student.input), slice(0, C)
    dbias = result.bias.new_zeros(result.bias.shape, dtype=accumulator)
    for part in chunks(M, tokens):
        x, t = (h.logits(part, all_classes, b) for h, b in zip(heads, buffers, strict=True))
        of_part = state.part(part)
        _accumulate_rows(kernels, [(0, x, t)], of_part, numbers)
        kernels.gradient(factors[part], x, t, of_part.rows, *numbers, x)
        dinput = result.input[part]
        if weight_grad:
            states = counted_states(student.input[part], factors[part] != 0, dinput)
            add_product(dweight, x.T, states, is_first=part.start == 0)
        if input_grad:
            torch.mm(x, student.weight, out=dinput)
        if bias_grad:
            dbias += x.sum(0, dtype=accumulator)
        del x, t
    result.bias.copy_(dbias)
    if rounds_sum:
        buffers.clear()  # the rounded gradient takes their memory
        result = result._replace(weight=dweight.to(student.weight.dtype))
    return state.rows.loss, *result
