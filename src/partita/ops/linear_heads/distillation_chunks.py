"""The terms of a distillation loss of two heads, one chunk of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..distillation.common import (
    DistillationKernels,
    DistillationRows,
    TermOptions,
    empty_rows,
)
from .chunked import (
    Buffers,
    accumulate_pairs,
    head_gradients,
    tokens_at_once,
    tokens_of_backward,
)
from .common import Head, HeadGradients, Wanted


class DistillationHeads(NamedTuple):
    """The ops of two heads, on the functions of one backend; see `HeadKernels`."""

    kernels: DistillationKernels

    def accumulate_rows(
        self,
        pairs: Sequence[tuple[Any, ...]],
        target: Tensor | None,
        found: DistillationRows,
        classes: int,
        options: TermOptions,
    ) -> None:
        """Compute the terms of rows from their logits, which come in parts of the classes."""
        for first, *logits in pairs:
            self.kernels.accumulate(*logits, target, found, first, classes, options)
        if options.is_mixed:
            for first, *logits in pairs:
                self.kernels.accumulate_mixture(*logits, found, first, options)

    def accumulate_all(
        self,
        heads: tuple[Head, Head],
        target: Tensor | None,
        options: TermOptions,
        tokens: int,
        saved: int,
    ) -> tuple[DistillationRows, Buffers]:
        """Return the terms of all rows, and the logits of the last `saved` classes."""
        found, classes = empty_rows(heads[0].input), len(heads[0].weight)

        def accumulate(rows: slice, pairs: Sequence[tuple[Any, ...]]) -> None:
            labels = None if target is None else target[rows]
            self.accumulate_rows(pairs, labels, found.part(rows), classes, options)

        return found, accumulate_pairs(heads, accumulate, tokens, saved)

    def linear_distillation(
        self,
        head: Head,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        target: Tensor | None,
        options: TermOptions,
        tokens: int,
        save_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the `DistillationRows` of two heads, and their logits if they are saved.

        The logits of `tokens` tokens exist at once, those of all tokens if they are saved.
        """
        heads = head, Head(teacher_input, teacher_weight, teacher_bias, *head[3:])
        saved = len(head.weight) if save_logits else 0
        found, buffers = self.accumulate_all(heads, target, options, tokens, saved)
        return *found, *buffers

    def linear_distillation_backward(
        self,
        grad: Tensor,
        head: Head,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        target: Tensor | None,
        state: Tensor,
        saved: Tensor,
        teacher_saved: Tensor,
        options: TermOptions,
        chunk: int,
        wanted: Wanted,
    ) -> HeadGradients:
        """Compute the `HeadGradients` from the gradient of the terms, `[M, 5]`.

        Saved logits, those of the last classes, are overwritten. Others are computed again.
        """
        heads = head, Head(teacher_input, teacher_weight, teacher_bias, *head[3:])
        grad, state, classes = grad.contiguous(), state.contiguous(), len(head.weight)

        def write_gradient(rows: slice, part: slice, result: Tensor, *logits: Tensor) -> None:
            labels = None if target is None else target[rows]
            rest = (labels, state[rows], part.start, classes, options)
            self.kernels.gradient(grad[rows], *logits, *rest, result)

        sizes, buffers = (tokens_of_backward(head, saved), chunk), (saved, teacher_saved)
        of_rows = (lambda rows: (grad[rows] != 0).any(1), write_gradient)
        return head_gradients(heads, wanted, *of_rows, *sizes, buffers)

    def linear_distillation_one_pass(
        self,
        head: Head,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        target: Tensor | None,
        factors: Tensor,
        options: TermOptions,
        tokens: int,
        saved: int,
        chunk: int,
        wanted: Wanted,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the `DistillationRows` and the `HeadGradients`.

        Args:
            factors: the derivative of the loss in each term of each row, `[M, 5]`.
            tokens, saved, chunk: as in `DivergencePlan`. A chunk of tokens takes four matrix
                products: its logits under both heads, and two from the gradient.
            The others: as in `linear_distillation_backward`.
        """
        heads = head, Head(teacher_input, teacher_weight, teacher_bias, *head[3:])
        if chunk:
            found, buffers = self.accumulate_all(heads, target, options, tokens, saved)
            teacher = heads[1][:3]
            rest = (target, found.state, *buffers, options, chunk, wanted)
            backward: Callable[..., HeadGradients] = self.linear_distillation_backward
            gradients = backward(factors, head, *teacher, *rest)
            return *found, *gradients
        found, classes = empty_rows(head.input), len(head.weight)

        def write_gradient(rows: slice, _: slice, result: Tensor, *logits: Tensor) -> None:
            part, labels = found.part(rows), None if target is None else target[rows]
            self.accumulate_rows([(0, *logits)], labels, part, classes, options)
            rest = (labels, part.state, 0, classes, options)
            self.kernels.gradient(factors[rows], *logits, *rest, result)

        of_rows = (lambda rows: (factors[rows] != 0).any(1), write_gradient)
        gradients = head_gradients(
            heads, wanted, *of_rows, tokens_at_once(head, tokens), len(head.weight)
        )
        return *found, *gradients
