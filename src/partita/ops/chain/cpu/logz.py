"""Log Z of sparse linear chains and its gradient, in parallel over the batch.

Alpha runs forwards in fp64, and the posterior runs backwards from it. The posterior of an edge is
the posterior of the state that it enters, times the edge's share in the sum that entered that
state. The posteriors of every step are divided by their sum, so no error adds up over the steps,
and there is no beta.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import (
    INF,
    as_array,
    as_steps,
    empty_batch,
    fill_nan,
    finish_row,
    row_at,
    row_to_write,
    run_over_batch,
)
from ....primitives.cpu.jit import jit
from ....primitives.cpu.math import exp
from ....runtime.dtypes import acc_dtype
from ....runtime.register import resolved
from .steps import (
    add_source_values,
    alpha_step,
    chain_batch,
    edge_posteriors,
    load_edges,
    logz_at_end,
    posterior_offsets,
    repeat_past_length,
    sum_by_source,
)


@jit(nogil=True)
def chain_forward_kernel(
    chains: Any,
    batch: Any,
    scores: Any,
    initial: Any,
    final: Any,
    alpha: Any,
    save: bool,
    logz: Any,
) -> None:
    """Compute log Z of each chain, and alpha.

    With `save`, alpha is `[T + 1, N, C]` and does not change past a length. Otherwise it is
    `[2, N, C]`, for two steps in turn.
    """
    C = initial.shape[1]
    for n in chains:
        buffer = np.empty(C * batch.K, scores.numbers.dtype)
        terms, max_term, sum_exp = np.empty((batch.K, C)), np.empty(C), np.empty(C)
        for c in range(C):  # an assignment of slices takes seconds to compile
            alpha[0, n, c] = initial[n, c]
        for t in range(batch.lengths[n]):
            now, after = (t, t + 1) if save else (t % 2, (t + 1) % 2)
            row, next_row = load_edges(scores, t, n, batch.K, buffer), row_at(scores, t + 1, n)
            alpha_step(
                row,
                batch.sources,
                alpha[now, n],
                terms,
                max_term,
                sum_exp,
                alpha[after, n],
                next_row,
            )
        logz[n] = logz_at_end(
            alpha[batch.lengths[n] if save else batch.lengths[n] % 2, n], final[n]
        )
        if save:
            repeat_past_length(alpha, n, batch.lengths[n])


@jit(nogil=True)
def chain_backward_kernel(
    chains: Any,
    batch: Any,
    scores: Any,
    grad_output: Any,
    final: Any,
    alpha: Any,
    logz: Any,
    d_scores: Any,
    d_initial: Any,
    d_final: Any,
) -> None:
    """Compute the posteriors of edges `[T, N, C * K]` and of first and last states, `[N, C]`.

    They are multiplied by the gradient of each chain. Edges past a length have 0.
    """
    C = final.shape[1]
    for n in chains:
        buffer = np.empty(C * batch.K, scores.numbers.dtype)
        edges, d_buffer = np.empty(C * batch.K), np.empty(C * batch.K, d_scores.numbers.dtype)
        posterior, offset = np.empty(C), np.empty(C)
        length = batch.lengths[n]
        for c in range(C):
            p = 0.0 if logz[n] == -INF else exp(alpha[length, n, c] + final[n, c] - logz[n])
            posterior[c] = p
            d_final[n, c] = p * grad_output[n]
        for t in range(length - 1, -1, -1):
            row = load_edges(scores, t, n, batch.K, buffer)
            posterior_offsets(posterior, alpha[t + 1, n], offset)
            next_alpha = alpha[max(t - 1, 0), n]
            add_source_values(batch.sources, alpha[t, n], offset, edges, row, next_alpha)
            d_row = row_to_write(d_scores, t, n, d_buffer)
            edge_posteriors(row, batch.sources, edges, grad_output[n], d_row)
            finish_row(d_scores, t, n, d_row)
            sum_by_source(batch, edges, posterior)
        for c in range(C):
            d_initial[n, c] = posterior[c] * grad_output[n]
        for t in range(length, len(alpha) - 1):
            d_row = row_to_write(d_scores, t, n, d_buffer)
            d_row[:] = 0.0
            finish_row(d_scores, t, n, d_row)


def chain_logz(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and alpha `[T + 1, N, C]` to `save`."""
    batch, invalid = chain_batch(scores, source, lengths)
    alpha = empty_batch((scores.shape[0] + 1 if save else 2, *scores.shape[1:3]))
    logz = torch.empty(len(initial), dtype=torch.float64, device="cpu")
    run_over_batch(
        chain_forward_kernel,
        batch,
        as_steps(scores),
        as_array(initial),
        as_array(final),
        alpha.numpy(),
        save,
        logz.numpy(),
    )
    logz = logz.masked_fill_(invalid, torch.nan)
    rounded = logz.to(acc_dtype(scores.dtype), copy=True)
    return logz, rounded, alpha if save else alpha.new_empty(0)


def chain_gradient(
    grad_output: Tensor,
    scores: Tensor,
    initial: Tensor,
    final: Tensor,
    source: Tensor,
    lengths: Tensor | None,
    logz: Tensor,
    saved: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of log Z in scores (in `dtype`), initial and final."""
    (batch, invalid), failed = chain_batch(scores, source, lengths), logz.isnan()
    steps = torch.from_numpy(batch.lengths).masked_fill(invalid, len(scores))
    d_scores = empty_batch(scores.shape, dtype)
    d_initial, d_final = (
        torch.empty(t.shape, dtype=torch.float64, device="cpu") for t in (initial, final)
    )
    run_over_batch(
        chain_backward_kernel,
        batch,
        as_steps(scores),
        resolved(grad_output).double().masked_fill(failed, torch.nan).numpy(),
        as_array(final),
        saved.numpy(),
        logz.contiguous().numpy(),
        as_steps(d_scores),
        d_initial.numpy(),
        d_final.numpy(),
    )
    fill_nan(d_scores, failed, steps)
    return d_scores, d_initial.to(initial.dtype), d_final.to(final.dtype)
