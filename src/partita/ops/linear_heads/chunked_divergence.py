"""Divergences from the hidden states of two heads, one chunk of logits at a time.

A chunk has the logits of both heads, for some tokens and all classes or for all tokens and some
classes. A backend supplies the functions that read and write a chunk as `DivergenceKernels`.
"""

from __future__ import annotations

from torch import Tensor

from ...primitives.rows import chunks
from ..divergence.common import DivergenceKernels, DivergenceRows, DivergenceState
from .chunked import head_gradients, tokens_at_once
from .common import Head, HeadGradients, Wanted
from .plan import padded_width

Numbers = tuple[float, float, float]  # beta, temperature, and the soft-cap or 0
Buffers = tuple[Tensor, Tensor]  # memory of the logits of student and teacher


def _accumulate_rows(
    kernels: DivergenceKernels,
    pairs: list[tuple[int, Tensor, Tensor]],
    state: DivergenceState,
    numbers: Numbers,
) -> None:
    """Compute the divergences of rows from their logits, which come in parts of the classes."""
    for first, logits, teacher_logits in pairs:
        kernels.accumulate(logits, teacher_logits, state, first, *numbers)
    if 0 < numbers[0] < 1:
        for first, logits, teacher_logits in pairs:
            kernels.accumulate_mixture(logits, teacher_logits, state, first, *numbers)


def _accumulate_all(
    kernels: DivergenceKernels,
    heads: tuple[Head, Head],
    numbers: Numbers,
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
            student, teacher = (
                head.part(rows, part).logits(buffer)
                for head, buffer in zip(heads, memory, strict=True)
            )
            pairs.append((part.start, student, teacher))
        _accumulate_rows(kernels, pairs, state.part(rows), numbers)
    return state, of_saved


def linear_divergence(
    kernels: DivergenceKernels,
    head: Head,
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
    heads = head, Head(teacher_input, teacher_weight, teacher_bias)
    numbers = (beta, temperature, softcap)
    saved = len(head.weight) if save_logits else 0
    state, buffers = _accumulate_all(kernels, heads, numbers, tokens, saved)
    return *state.rows, *buffers


def linear_divergence_backward(
    kernels: DivergenceKernels,
    grad: Tensor,
    head: Head,
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
    wanted: Wanted,
) -> HeadGradients:
    """Compute the `HeadGradients` from the gradient of the rows' divergences.

    Saved logits, which are those of the last classes, are overwritten. Others are computed again.
    """
    heads = head, Head(teacher_input, teacher_weight, teacher_bias)
    statistics = (student, maximum, sumexp, teacher_maximum, teacher_sumexp)
    rows = DivergenceRows(grad, *(field.contiguous() for field in statistics))
    numbers = (beta, temperature, softcap)
    grad, sizes = grad.contiguous(), (len(grad), chunk)

    def write_gradient(_: slice, part: slice, logits: Tensor, teacher_logits: Tensor) -> None:
        kernels.gradient(grad, logits, teacher_logits, rows, *numbers, logits)

    buffers = (saved, teacher_saved)
    return head_gradients(heads, wanted, lambda _: grad != 0, write_gradient, *sizes, buffers)


def linear_divergence_one_pass(
    kernels: DivergenceKernels,
    head: Head,
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
    wanted: Wanted,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the divergence of each row, and the `HeadGradients` of their sum with the factors.

    Args:
        factors: the factor of each row, `[M]`.
        tokens, saved, chunk: as in `DivergencePlan`. A chunk of tokens takes four matrix products:
            its logits under both heads, and two from the gradient.
        The others: as in `linear_divergence_backward`.
    """
    heads = head, Head(teacher_input, teacher_weight, teacher_bias)
    numbers = (beta, temperature, softcap)
    if chunk:
        state, buffers = _accumulate_all(kernels, heads, numbers, tokens, saved)
        gradients = linear_divergence_backward(
            kernels,
            factors,
            head,
            *heads[1],
            *state.rows[1:],
            *buffers,
            *numbers,
            chunk,
            wanted,
        )
        return state.rows.loss, *gradients
    state = kernels.new_state(head.input)

    def write_gradient(rows: slice, _: slice, logits: Tensor, teacher_logits: Tensor) -> None:
        part = state.part(rows)
        _accumulate_rows(kernels, [(0, logits, teacher_logits)], part, numbers)
        kernels.gradient(factors[rows], logits, teacher_logits, part.rows, *numbers, logits)

    chunk_sizes = (tokens_at_once(head.input, tokens), len(head.weight))
    gradients = head_gradients(
        heads, wanted, lambda rows: factors[rows] != 0, write_gradient, *chunk_sizes
    )
    return state.rows.loss, *gradients
