"""Log-probabilities of given classes from hidden states, one chunk of classes at a time.

The loops are those of `chunked`. Between a chunk's two matrix products, the logits of the ids are
read or their gradient is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..logprobs.common import EntryKernels
from .chunked import ChunkKernels, accumulate_hidden, linear_rows_backward
from .common import RowState


def linear_logprobs(
    kernels: ChunkKernels,
    of_ids: EntryKernels,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
    chunk: int,
    save_logits: bool,
) -> tuple[Tensor, ...]:
    """Return log-probabilities, logits of the ids, maxima and sums, and the saved logits.

    The fields are those of `LogprobRows`. The last result is empty if the logits are not saved.
    """
    M, C = len(input), len(weight)
    no_class = torch.full((M,), -1, dtype=torch.int64, device=input.device)

    def first_state(input: Tensor, *needs: bool) -> RowState:
        # The state of a row's label holds the logits of all ids, for which the loop cuts it too.
        state = kernels.new_state(input, *needs)
        return state._replace(label=state.label.new_zeros(ids.shape))

    def accumulate(
        logits: Tensor, first: int, ids: Tensor, _: Any, state: RowState, *options: float
    ) -> None:
        rows = len(logits)
        unused = state._replace(label=torch.empty_like(state.maximum))
        kernels.accumulate_logits(logits, first, no_class[:rows], None, unused, *options)
        of_ids.gather(logits, first, C, ids, state.label, softcap, ignore_index)

    needs_smoothing, needs_entropy = False, temperature != 1.0  # the kernel's sums need it then
    state, saved = accumulate_hidden(
        input,
        weight,
        bias,
        ids,
        None,
        temperature,
        softcap,
        needs_smoothing,
        needs_entropy,
        chunk,
        save_logits,
        accumulate_logits=accumulate,
        first_state=first_state,
    )
    of_rows = state.maximum, state.sumexp
    found = of_ids.finish(state.label, ids.contiguous(), *of_rows, C, temperature, ignore_index)
    return found, state.label, *of_rows, saved


def linear_logprobs_backward(
    kernels: ChunkKernels,
    of_ids: EntryKernels,
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    entries: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    saved: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
    chunk: int,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    """Compute the `HeadGradients` from the gradient of the log-probabilities."""
    C, grad, ids = len(weight), grad.contiguous(), ids.contiguous()
    entries, maximum, sumexp = entries.contiguous(), maximum.contiguous(), sumexp.contiguous()
    totals, labels = of_ids.totals(grad, ids, C, ignore_index)
    numbers = (temperature, softcap, ignore_index)

    def logits_gradient(logits: Tensor, first: int, *others: Any) -> None:
        kernels.logits_gradient(logits, first, *others)
        of_ids.write(logits, first, C, grad, ids, totals, entries, maximum, sumexp, *numbers)

    return linear_rows_backward(
        kernels._replace(logits_gradient=logits_gradient),
        -totals / temperature,
        totals / temperature,
        None,
        None,
        input,
        weight,
        bias,
        labels,
        None,
        maximum,
        sumexp,
        saved,
        temperature,
        softcap,
        chunk,
        input_grad,
        weight_grad,
        bias_grad,
    )
