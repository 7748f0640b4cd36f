"""The packed state of a rank's rows, and the ops that the reference and the kernels share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.checks import NOTHING_IGNORED
from ...runtime.dtypes import acc_dtype, integer_dtype
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


class RankKernels(NamedTuple):
    """The ops on a rank's rows by the `HeadKernels` of one backend."""

    heads: Any

    def parallel_state(
        self,
        input: Tensor,  # this rank's logits, [M, C_local], or the hidden states, [M, H]
        # weight, bias: this rank's rows of the matrix, and of the bias; None with logits
        weight: Tensor | None,
        bias: Tensor | None,
        # low_rank_input, low_rank_weight: as in `Head`, the second with this rank's rows
        low_rank_input: Tensor | None,
        low_rank_weight: Tensor | None,
        # target, class_weight: relative to this rank's classes
        target: Tensor,
        class_weight: Tensor | None,
        first_class: int,  # this rank's first class among all classes
        options: RowOptions,
        # chunk, save_logits: as in `accumulate_hidden`
        chunk: int,
        # invariant, widens: as in `Head`
        invariant: bool,
        widens: bool,
        save_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the packed state of this rank's rows, and the logits of a head if they are saved.

        The state is `[packed_size, M]`: maximum, sumexp, label logit and number of classes; with
        smoothing also origin, smoothing loss and sum of the class weights; with an entropy also
        sum_x_exp and the bits of the argmax.
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
            head = Head(input, weight, bias, low_rank_input, low_rank_weight, invariant, widens)
            rest = (*numbers, chunk, save_logits)
            saved = accumulate_hidden(
                self.heads.accumulate_logits, head, target, class_weight, state, *rest
            )
        elif input.numel():
            self.heads.accumulate_logits(
                input, 0, target.contiguous(), class_weight, state, *numbers
            )
        if state.argmax is not None:
            argmax = (state.argmax + first_class).to(integer_dtype(packed.dtype))
            packed[-1] = argmax.view(packed.dtype)
        return packed, saved

    def parallel_gradient(
        self,
        coefficients: GradientCoefficients,
        logits: Tensor,
        target: Tensor,
        class_weight: Tensor | None,
        maximum: Tensor,
        sumexp: Tensor,
        temperature: float,
        softcap: float,
    ) -> Tensor:
        """Return the gradient of this rank's logits from the coefficients of its rows."""
        result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        if logits.numel():
            of_rows = (target.contiguous(), class_weight, coefficients, maximum, sumexp)
            self.heads.logits_gradient(logits, 0, *of_rows, temperature, softcap, result)
        return result

    def parallel_entries(
        self,
        logits: Tensor,
        ids: Tensor,
        first_class: int,
        classes: int,
        softcap: float,
    ) -> Tensor:
        """Return the soft-capped logits of the ids that are classes of this rank, 0 for others.

        The ids `[M, K]` count from the first of the `classes` of all ranks.
        """
        entries = logits.new_zeros(ids.shape, dtype=acc_dtype(logits.dtype))
        if logits.numel() and ids.numel():
            rest = (ids.contiguous(), entries, softcap, NOTHING_IGNORED)
            self.heads.of_ids.gather(logits, first_class, classes, *rest)
        return entries

    def parallel_entries_gradient(
        self,
        grad: Tensor,
        logits: Tensor,
        ids: Tensor,
        entries: Tensor,
        maximum: Tensor,
        sumexp: Tensor,
        first_class: int,
        classes: int,
        temperature: float,
        softcap: float,
    ) -> Tensor:
        """Return the gradient of this rank's logits from that of the ids' log-probabilities."""
        grad, ids = grad.contiguous(), ids.contiguous()
        totals, labels = self.heads.of_ids.totals(grad, ids, classes, NOTHING_IGNORED)
        on_softmax = -totals / temperature
        coefficients = GradientCoefficients(on_softmax, torch.zeros_like(totals), None, None)
        of_rows, options = (maximum, sumexp), (temperature, softcap)
        result = self.parallel_gradient(coefficients, logits, labels, None, *of_rows, *options)
        if logits.numel() and ids.numel():
            of_ids = (grad, ids, totals, entries.contiguous(), *of_rows, *options, NOTHING_IGNORED)
            self.heads.of_ids.write(result, first_class, classes, *of_ids)
        return result
