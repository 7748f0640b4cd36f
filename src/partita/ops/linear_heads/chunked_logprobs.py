"""Log-probabilities of given classes, and of the most probable ones, from hidden states.

The loops over given classes are those of `chunked`. Between a chunk's two matrix products, the
logits of the ids are read or their gradient is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import chunks
from ..logprobs.common import (
    EntryKernels,
    TopKRows,
    new_rest,
    other_classes,
    topk_fake,
    with_ids,
    with_rest,
)
from .chunked import ChunkKernels, head_gradients
from .common import (
    GradientCoefficients,
    Head,
    HeadGradients,
    RowState,
    Wanted,
    accumulate_hidden,
)
from .plan import padded_width


def linear_logprobs(
    kernels: ChunkKernels,
    of_ids: EntryKernels,
    head: Head,
    ids: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
    needs_rest: bool,
    chunk: int,
    save_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `LogprobRows`, and the saved logits.

    The last result is empty if the logits are not saved.
    """
    input, C = head.input, len(head.weight)
    no_class = torch.full((len(input),), -1, dtype=torch.int64, device=input.device)
    rest = new_rest(input, [len(input)])
    needs_smoothing, needs_entropy = False, temperature != 1.0  # the kernel's sums need it then
    state = kernels.new_state(input, needs_smoothing, needs_entropy)
    # The fields of a row's label and origin hold the logits of all ids and the statistics of the
    # rest, so that the loop cuts them into chunks too.
    state = state._replace(label=state.label.new_zeros(ids.shape), origin=rest)

    def accumulate(
        logits: Tensor, first: int, ids: Tensor, _: Any, state: RowState, *options: float
    ) -> None:
        of_ids.gather(logits, first, C, ids, state.label, softcap, ignore_index)
        if needs_rest:
            of_ids.accumulate_rest(logits, first, ids, state.origin, *options)
            return
        rows = len(logits)
        unused = state._replace(label=torch.empty_like(state.maximum), origin=None)
        kernels.accumulate_logits(logits, first, no_class[:rows], None, unused, *options)

    numbers = (temperature, softcap, chunk, save_logits)
    saved = accumulate_hidden(accumulate, head, ids, None, state, *numbers)
    of_rows, of_ids_too = (state.maximum, state.sumexp), (C, temperature, ignore_index)
    if needs_rest:
        of_rows = with_ids(rest, state.label, ids, *of_ids_too)
    found = of_ids.finish(state.label, ids.contiguous(), *of_rows, *of_ids_too)
    if needs_rest:
        found = with_rest(found, rest, *of_rows, temperature)
    return found, state.label, *of_rows, rest if needs_rest else rest[:, :0].clone(), saved


def linear_logprobs_backward(
    kernels: ChunkKernels,
    of_ids: EntryKernels,
    grad: Tensor,
    head: Head,
    ids: Tensor,
    entries: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    rest: Tensor,
    saved: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
    chunk: int,
    wanted: Wanted,
) -> HeadGradients:
    """Compute the `HeadGradients` from the gradient of the log-probabilities."""
    C, K, ids = len(head.weight), ids.shape[1], ids.contiguous()
    on_ids, on_rest = grad[:, :K].contiguous(), grad[:, K:]
    entries, maximum, sumexp = entries.contiguous(), maximum.contiguous(), sumexp.contiguous()
    totals, labels = of_ids.totals(on_ids, ids, C, ignore_index)
    if rest.shape[1]:
        totals = totals + on_rest[:, 0]
    others = other_classes(grad, totals, maximum, sumexp, rest, temperature)
    counts = ((on_ids != 0) & (ids != ignore_index)).any(1) | (on_rest != 0).any(1)
    coefficients = GradientCoefficients(
        others.factor / temperature, torch.zeros_like(others.factor), None, None
    )
    of_others = (labels.contiguous(), None, coefficients, others.maximum, others.sumexp)
    of_entries = (on_ids, ids, totals, entries, maximum, sumexp)
    numbers = (temperature, softcap)

    def write_gradient(_: slice, part: slice, logits: Tensor) -> None:
        kernels.logits_gradient(logits, part.start, *of_others, *numbers, logits)
        of_ids.write(logits, part.start, C, *of_entries, *numbers, ignore_index)

    sizes = (len(ids), chunk)
    return head_gradients([head], wanted, lambda _: counts, write_gradient, *sizes, [saved])


def linear_topk_logprobs(
    topk_of_rows: Callable[..., None],
    head: Head,
    k: int,
    temperature: float,
    softcap: float,
    tokens: int,
    save_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the `TopKRows` of a head, and its logits if they are saved.

    The logits of `tokens` tokens exist at once, or of all if they are saved. The last result is
    empty otherwise. `topk_of_rows` writes the results of a chunk.
    """
    M, C = len(head.input), len(head.weight)
    found = topk_fake(head.input, k)
    buffer = head.buffer(M if save_logits else min(tokens, M), C)
    for rows in chunks(M, tokens):
        memory = buffer[rows.start * padded_width(C) :] if save_logits else buffer
        logits = head.part(rows, slice(C)).logits(memory)
        part = TopKRows(*(field[rows] for field in found))
        topk_of_rows(logits, k, temperature, softcap, part)
    return *found, buffer if save_logits else buffer.new_empty(0)
