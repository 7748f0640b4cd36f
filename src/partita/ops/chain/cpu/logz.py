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
    LOWEST,
    as_steps,
    empty_batch,
    fill_nan,
    finish_row,
    row_at,
    row_to_write,
)
from ....primitives.cpu.jit import jit
from ....primitives.cpu.math import exp, exp_floor, log
from ....runtime.dtypes import acc_dtype
from ....runtime.register import resolved
from .steps import (
    add_source_values,
    chain_batch,
    edge_posteriors,
    edge_terms,
    load_edges,
    logz_at_end,
    posterior_offsets,
    repeat_past_length,
    run,
    sum_by_source,
)


@jit(nogil=True)
def chain_forward_kernel(chains: Any, batch: Any, alpha: Any, logz: Any) -> None:
    """Compute log Z of each chain, and alpha, `[R, N, C]`, where step t has row t mod R.

    R is 2, or the number of steps + 1. Alpha does not change past a length.
    """
    K, C, rows = batch.edges.K, batch.initial.shape[1], len(alpha)
    scores, sources = batch.scores, batch.edges.sources
    for n in chains:
        buffer, length = np.empty(C * K, scores.numbers.dtype), batch.lengths[n]
        terms, max_term, sum_exp = np.empty((K, C)), np.empty(C), np.empty(C)
        for c in range(C):  # an assignment of slices takes seconds to compile
            alpha[0, n, c] = batch.initial[n, c]
        for t in range(length):
            now, after = (t, t + 1) if rows > 2 else (t % 2, (t + 1) % 2)
            row, next_row = load_edges(scores, t, n, K, buffer), row_at(scores, t + 1, n)
            edge_terms(row, sources, alpha[now, n], terms, max_term, next_row)
            next_alpha = alpha[after, n]
            for c in range(C):
                sum_exp[c] = 0.0
            for k in range(K):
                for c in range(C):
                    sum_exp[c] += exp_floor(terms[k, c] - max_term[c])
            for c in range(C):
                value = max_term[c] + log(sum_exp[c])
                next_alpha[c] = -INF if value == LOWEST else value
        logz[n] = logz_at_end(alpha[length % rows, n], batch.final[n])
        repeat_past_length(alpha, n, length)


@jit(nogil=True)
def chain_backward_kernel(
    chains: Any,
    batch: Any,
    grad_output: Any,
    alpha: Any,
    logz: Any,
    d_scores: Any,
    d_initial: Any,
    d_final: Any,
) -> None:
    """Compute the posteriors of edges `[T, N, C * K]` and of first and last states, `[N, C]`.

    They are multiplied by the gradient of each chain. Edges past a length have 0.
    """
    edges, C = batch.edges, d_final.shape[1]
    for n in chains:
        buffer = np.empty(C * edges.K, batch.scores.numbers.dtype)
        found, d_buffer = np.empty(C * edges.K), np.empty(C * edges.K, d_scores.numbers.dtype)
        posterior, offset = np.empty(C), np.empty(C)
        length = batch.lengths[n]
        for c in range(C):
            p = 0.0 if logz[n] == -INF else exp(alpha[length, n, c] + batch.final[n, c] - logz[n])
            posterior[c] = p
            d_final[n, c] = p * grad_output[n]
        for t in range(length - 1, -1, -1):
            row = load_edges(batch.scores, t, n, edges.K, buffer)
            posterior_offsets(posterior, alpha[t + 1, n], offset)
            next_alpha = alpha[max(t - 1, 0), n]
            add_source_values(edges.sources, alpha[t, n], offset, found, row, next_alpha)
            d_row = row_to_write(d_scores, t, n, d_buffer)
            edge_posteriors(row, edges.sources, found, grad_output[n], d_row)
            finish_row(d_scores, t, n, d_row)
            sum_by_source(edges, found, posterior)
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
    batch, invalid = chain_batch(scores, source, initial, final, lengths)
    alpha = empty_batch((scores.shape[0] + 1 if save else 2, *scores.shape[1:3]))
    logz = torch.empty(len(initial), dtype=torch.float64, device="cpu")
    run(chain_forward_kernel, batch, alpha.numpy(), logz.numpy())
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
    batch, invalid = chain_batch(scores, source, initial, final, lengths)
    failed, d_scores = logz.isnan(), empty_batch(scores.shape, dtype)
    steps = torch.from_numpy(batch.lengths).masked_fill(invalid, len(scores))
    d_initial, d_final = (
        torch.empty(t.shape, dtype=torch.float64, device="cpu") for t in (initial, final)
    )
    run(
        chain_backward_kernel,
        batch,
        resolved(grad_output).double().masked_fill(failed, torch.nan).numpy(),
        saved.numpy(),
        logz.contiguous().numpy(),
        as_steps(d_scores),
        d_initial.numpy(),
        d_final.numpy(),
    )
    fill_nan(d_scores, failed, steps)
    return d_scores, d_initial.to(initial.dtype), d_final.to(final.dtype)
