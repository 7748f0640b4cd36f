"""Log Z of linear chains and its gradient, in parallel over the batch.

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
from ..common import ChainPotentials
from .steps import (
    NO_COUNTS,
    Gradients,
    add_emissions,
    add_scaled,
    add_source_values,
    chain_batch,
    edge_posteriors,
    edge_terms,
    load_edges,
    logz_at_end,
    posterior_offsets,
    repeat_past_length,
    run,
    scale_states,
    sequences_of,
    sum_by_source,
    zero_rows,
)


@jit(nogil=True)
def chain_forward_kernel(chains: Any, batch: Any, alpha: Any, logz: Any) -> None:
    """Compute log Z of each chain, and alpha, `[R, N, C]`, where step t has row t mod R.

    R is 2, or the number of steps + 1. Alpha does not change past a length.
    """
    K, C, rows = batch.edges.K, batch.initial.shape[1], len(alpha)
    scores, dense, sources = batch.scores, batch.edges.dense, batch.edges.sources
    for n in chains:
        buffer, length = np.empty(C * K, scores.numbers.dtype), batch.lengths[n]
        terms, max_term, sum_exp = np.empty((K, C)), np.empty(C), np.empty(C)
        for c in range(C):  # an assignment of slices takes seconds to compile
            alpha[0, n, c] = batch.initial[n, c]
        for t in range(length):
            now, after = (t, t + 1) if rows > 2 else (t % 2, (t + 1) % 2)
            row, next_row = load_edges(scores, t, n, K, buffer), row_at(scores, t + 1, n)
            edge_terms(row, dense, sources, alpha[now, n], terms, max_term, next_row)
            next_alpha = alpha[after, n]
            for c in range(C):
                sum_exp[c] = 0.0
            for k in range(K):
                for c in range(C):
                    sum_exp[c] += exp_floor(terms[k, c] - max_term[c])
            for c in range(C):
                value = max_term[c] + log(sum_exp[c])
                next_alpha[c] = -INF if value == LOWEST else value
            if dense:
                add_emissions(batch.emissions, t, n, next_alpha)
        logz[n] = logz_at_end(alpha[length % rows, n], batch.final[n])
        repeat_past_length(alpha, n, length)


@jit(nogil=True)
def chain_backward_kernel(
    groups: Any,
    batch: Any,
    grad_output: Any,
    alpha: Any,
    logz: Any,
    d_scores: Any,
    gradients: Any,
) -> None:
    """Compute the posteriors of edges and of states, times the gradient of each chain.

    Those of the edges of sparse chains are `Steps` `[T, N, C * K]`, 0 past a length. For the rest
    see `Gradients`.
    """
    edges, states, counts, C = batch.edges, gradients.states, gradients.counts, batch.final.shape[1]
    count = counts.shape[1] if len(counts) else len(logz)
    for n in sequences_of(groups, count, len(logz)):
        buffer = np.empty(C * edges.K, batch.scores.numbers.dtype)
        found, d_buffer = np.empty(C * edges.K), np.empty(C * edges.K, d_scores.numbers.dtype)
        posterior, offset, d_row = np.empty(C), np.empty(C), d_buffer
        length, grad = batch.lengths[n], grad_output[n]
        for c in range(C):
            p = 0.0 if logz[n] == -INF else exp(alpha[length, n, c] + batch.final[n, c] - logz[n])
            posterior[c] = p
        scale_states(posterior, grad, states[length if edges.dense else 1, n])
        for t in range(length - 1, -1, -1):
            row = load_edges(batch.scores, t, n, edges.K, buffer)
            posterior_offsets(posterior, alpha[t + 1, n], offset)
            if edges.dense:
                add_emissions(batch.emissions, t, n, offset)
            next_alpha = alpha[max(t - 1, 0), n]
            add_source_values(edges, alpha[t, n], offset, found, row, next_alpha)
            if not edges.dense:
                d_row = row_to_write(d_scores, t, n, d_buffer)
            edge_posteriors(row, edges.sources, found, grad, d_row)
            sum_by_source(edges, found, posterior)
            if not edges.dense:
                finish_row(d_scores, t, n, d_row)
            else:
                scale_states(posterior, grad, states[t, n])
                if len(counts):
                    add_scaled(found, grad, counts[min(t, len(counts) - 1), n % count])
        scale_states(posterior, grad, states[0, n])
        zero_rows(states, n, length + 1 if edges.dense else 2)
        for t in range(length, 0 if edges.dense else len(alpha) - 1):
            d_row = row_to_write(d_scores, t, n, d_buffer)
            d_row[:] = 0.0
            finish_row(d_scores, t, n, d_row)


def chain_logz(chain: ChainPotentials, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and alpha `[T + 1, N, C]` to `save`."""
    batch, invalid = chain_batch(chain)
    T, N, C, _ = chain.scores.shape
    alpha = empty_batch((T + 1 if save else 2, N, C))
    logz = torch.empty(N, dtype=torch.float64, device="cpu")
    run(chain_forward_kernel, batch, alpha.numpy(), logz.numpy())
    logz = logz.masked_fill_(invalid, torch.nan)
    rounded = logz.to(acc_dtype(chain.scores.dtype), copy=True)
    return logz, rounded, alpha if save else alpha.new_empty(0)


def chain_gradient(
    grad_output: Tensor,
    chain: ChainPotentials,
    logz: Tensor,
    saved: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of log Z in scores (in `dtype`), initial and final."""
    batch, invalid = chain_batch(chain)
    failed, d_scores = logz.isnan(), empty_batch(chain.scores.shape, dtype)
    steps = torch.from_numpy(batch.lengths).masked_fill(invalid, len(chain.scores))
    d_ends = torch.empty((2, *chain.initial.shape), dtype=torch.float64, device="cpu")
    run(
        chain_backward_kernel,
        batch,
        resolved(grad_output).double().masked_fill(failed, torch.nan).numpy(),
        saved.numpy(),
        logz.contiguous().numpy(),
        as_steps(d_scores),
        Gradients(d_ends.numpy(), NO_COUNTS),
    )
    fill_nan(d_scores, failed, steps)
    # Results of an op may not share memory.
    d_initial, d_final = d_ends
    return (
        d_scores,
        d_initial.to(chain.initial.dtype, copy=True),
        d_final.to(chain.final.dtype, copy=True),
    )
