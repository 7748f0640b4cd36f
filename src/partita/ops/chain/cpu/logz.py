"""Log Z of linear chains, means over their paths, and gradients, in parallel over the batch.

Alpha runs forwards in fp64, and the posterior runs backwards from it. The posterior of an edge is
the posterior of the state that it enters, times the edge's share in the sum that entered that
state. The posteriors of every step are divided by their sum, so no error adds up over the steps,
and there is no beta.

For a mean, alpha is scanned together with the mean of the values over the paths into each state,
and the posterior together with the mean over the rest of the paths from each state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import (
    INF,
    LOWEST,
    as_array,
    as_steps,
    empty_batch,
    fill_nan,
    finish_row,
    row_at,
    row_to_write,
)
from ....primitives.cpu.jit import jit
from ....primitives.cpu.logits import fill_row
from ....primitives.cpu.math import exp, exp_floor, log
from ....runtime.dtypes import acc_dtype
from ....runtime.register import resolved
from ..common import ChainPotentials, ChainValues
from .steps import (
    NO_COUNTS,
    ChainBatch,
    Gradients,
    add_emissions,
    add_scaled,
    add_source_values,
    add_target_values,
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
    share_of_one,
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
        scale_states(posterior, share_of_one(posterior), posterior)
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
            share = share_of_one(posterior)
            if share != 1.0:
                scale_states(posterior, share, posterior)
                scale_states(found, share, found)
                scale_states(d_row, share, d_row)
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
            fill_row(d_row, 0.0)
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


@jit
def alpha_and_mean_step(
    terms: Any, max_term: Any, values: Any, sum_exp: Any, alpha: Any, mean: Any
) -> None:
    """Compute alpha after a step, and the mean of the values `[K, C]`; a weight of 0 adds 0."""
    for c in range(len(alpha)):
        sum_exp[c], mean[c] = 0.0, 0.0
    for k in range(len(terms)):
        for c in range(len(alpha)):
            weight = exp(terms[k, c] - max_term[c])
            sum_exp[c] += weight
            mean[c] += 0.0 if weight == 0.0 else weight * values[k, c]
    for c in range(len(alpha)):
        value = max_term[c] + log(sum_exp[c])
        alpha[c] = -INF if value == LOWEST else value
        mean[c] = 0.0 if sum_exp[c] == 0.0 else mean[c] / sum_exp[c]


@jit(nogil=True)
def chain_expectation_forward_kernel(
    chains: Any, batch: Any, values: Any, mean_of_chain: Any, logz_of_chain: Any, saved: Any
) -> None:
    """Compute the mean and log Z of each chain, and alpha and the mean into each state.

    The values are a batch with values instead of scores. What is saved is `[2, R, N, C]`, where
    step t has row t mod R. R is 2, or the number of steps + 1.
    """
    K, C, rows = batch.edges.K, batch.initial.shape[1], saved.shape[1]
    scores, dense, sources = batch.scores, batch.edges.dense, batch.edges.sources
    for n in chains:
        buffer = np.empty(C * K, scores.numbers.dtype)
        value_buffer = np.empty(C * K, values.scores.numbers.dtype)
        terms, value_terms = np.empty((K, C)), np.empty((K, C))
        max_term, sum_exp, unused = np.empty(C), np.empty(C), np.empty(C)
        length = batch.lengths[n]
        for c in range(C):
            saved[0, 0, n, c], saved[1, 0, n, c] = batch.initial[n, c], values.initial[n, c]
        for t in range(length):
            now, after = (t, t + 1) if rows > 2 else (t % 2, (t + 1) % 2)
            row, next_row = load_edges(scores, t, n, K, buffer), row_at(scores, t + 1, n)
            edge_terms(row, dense, sources, saved[0, now, n], terms, max_term, next_row)
            value_row = load_edges(values.scores, t, n, K, value_buffer)
            next_row = row_at(values.scores, t + 1, n)
            edge_terms(value_row, dense, sources, saved[1, now, n], value_terms, unused, next_row)
            alpha, mean = saved[0, after, n], saved[1, after, n]
            alpha_and_mean_step(terms, max_term, value_terms, sum_exp, alpha, mean)
            if dense:
                add_emissions(batch.emissions, t, n, alpha)
                add_emissions(values.emissions, t, n, mean)
        alpha, mean = saved[0, length % rows, n], saved[1, length % rows, n]
        logz, total = logz_at_end(alpha, batch.final[n]), 0.0
        for c in range(C if logz != -INF else 0):
            p = exp(alpha[c] + batch.final[n, c] - logz)
            total += 0.0 if p == 0.0 else p * (mean[c] + values.final[n, c])
        logz_of_chain[n], mean_of_chain[n] = logz, total


@jit(inline="always")
def covariance(posterior: float, difference: float) -> float:
    """Return the product, which is 0 where the posterior is 0 for any difference."""
    return 0.0 if posterior == 0.0 else posterior * difference


@jit
def covariances(
    posterior: Any, grad: float, into: Any, shift: Any, onwards: Any, result: Any
) -> None:
    """Write the derivatives of the posteriors of states, from the means of both parts of a path."""
    for c in range(len(posterior)):
        result[c] = covariance(posterior[c] * grad, into[c] + shift[c] + onwards[c])


@jit(nogil=True)
def chain_expectation_backward_kernel(
    groups: Any,
    batch: Any,
    values: Any,
    means: Any,
    logz_of_chain: Any,
    saved: Any,
    grad_output: Any,
    d_scores: Any,
    gradients: Any,
) -> None:
    """Compute the gradients of the mean.

    Those in the edges of sparse chains are `[T, N, C * K]`. For the rest see `Gradients`.
    """
    edges, states, counts, C = batch.edges, gradients.states, gradients.counts, batch.final.shape[1]
    size, count = C * edges.K, counts.shape[1] if len(counts) else len(grad_output)
    for n in sequences_of(groups, count, len(grad_output)):
        buffer = np.empty(size, batch.scores.numbers.dtype)
        value_buffer = np.empty(size, values.scores.numbers.dtype)
        d_score_row, unscaled = np.empty(size, d_scores.dtype), np.empty(size)
        edge_posterior, edge_mean_from = np.empty(size), np.empty(size)
        edge_mean_into, mean_from = np.empty(size), np.empty(C)
        posterior, offset = np.empty(C), np.empty(C)
        shift, grad = np.full(C, -means[n]), grad_output[n]
        length, logz = batch.lengths[n], logz_of_chain[n]
        zero_rows(d_scores, n, length)
        zero_rows(states, n, length + 1)
        for c in range(C):
            p = 0.0 if logz == -INF else exp(saved[0, length, n, c] + batch.final[n, c] - logz)
            posterior[c], mean_from[c] = p, values.final[n, c]
        last = states[length if edges.dense else 1, n]
        covariances(posterior, grad, saved[1, length, n], shift, mean_from, last)
        for t in range(length - 1, -1, -1):
            row = load_edges(batch.scores, t, n, edges.K, buffer)
            value_row = load_edges(values.scores, t, n, edges.K, value_buffer)
            d_score_row = d_scores[t, n] if len(d_scores) else d_score_row
            alpha, next_alpha = saved[0, t, n], saved[0, max(t - 1, 0), n]
            mean_into, next_mean_into = saved[1, t, n], saved[1, max(t - 1, 0), n]
            posterior_offsets(posterior, saved[0, t + 1, n], offset)
            if edges.dense:
                add_emissions(batch.emissions, t, n, offset)
                add_emissions(values.emissions, t, n, mean_from)
            add_source_values(edges, alpha, offset, edge_posterior, row, next_alpha)
            edge_posteriors(row, edges.sources, edge_posterior, 1.0, unscaled)
            add_source_values(edges, mean_into, shift, edge_mean_into, value_row, next_mean_into)
            add_target_values(edges, value_row, mean_from, edge_mean_from)
            for e in range(size):
                p, mean = edge_posterior[e], edge_mean_from[e]
                d_score_row[e] = covariance(p * grad, edge_mean_into[e] + mean)
                edge_mean_from[e] = covariance(p, mean)
            sum_by_source(edges, edge_posterior, posterior)
            sum_by_source(edges, edge_mean_from, mean_from)
            for c in range(C):
                mean_from[c] = 0.0 if posterior[c] == 0.0 else mean_from[c] / posterior[c]
            if edges.dense:
                covariances(posterior, grad, mean_into, shift, mean_from, states[t, n])
                if len(counts):
                    add_scaled(d_score_row, 1.0, counts[min(t, len(counts) - 1), n % count])
        covariances(posterior, grad, saved[1, 0, n], shift, mean_from, states[0, n])


def values_of(batch: ChainBatch, values: ChainValues) -> ChainBatch:
    """Return the values of a sparse chain as kernels take them, instead of the scores."""
    edges, first, last = values
    return batch._replace(scores=as_steps(edges), initial=as_array(first), final=as_array(last))


def chain_expectation(
    chain: ChainPotentials, values: ChainValues, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and log Z, and alpha and the mean into each state, `[2, T + 1, N, C]`."""
    batch, invalid = chain_batch(chain)
    T, N, C, _ = chain.scores.shape
    saved = empty_batch((2, T + 1 if save else 2, N, C))
    mean, logz = (torch.empty(N, dtype=torch.float64, device="cpu") for _ in range(2))
    results = (x.numpy() for x in (mean, logz, saved))
    run(chain_expectation_forward_kernel, batch, values_of(batch, values), *results)
    return (
        mean.masked_fill_(invalid, torch.nan),
        logz.masked_fill_(invalid, torch.nan),
        saved if save else saved.new_empty(0),
    )


def chain_expectation_gradient(
    grad_output: Tensor,
    chain: ChainPotentials,
    values: ChainValues,
    mean: Tensor,
    logz: Tensor,
    saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the mean in scores, initial and final."""
    batch, invalid = chain_batch(chain)
    failed = logz.isnan()
    steps = torch.from_numpy(batch.lengths).masked_fill(invalid, len(chain.scores))
    dtype = torch.promote_types(chain.scores.dtype, torch.float32)
    d_scores = empty_batch(chain.scores.shape, dtype)
    d_ends = torch.empty((2, *chain.final.shape), dtype=torch.float64, device="cpu")
    run(
        chain_expectation_backward_kernel,
        batch,
        values_of(batch, values),
        *(as_array(mean), as_array(logz), saved.numpy()),
        resolved(grad_output).double().masked_fill(failed, torch.nan).numpy(),
        d_scores.flatten(2).numpy(),
        Gradients(d_ends.numpy(), NO_COUNTS),
    )
    fill_nan(d_scores, failed, steps)
    # Results of an op may not share memory.
    d_initial, d_final = d_ends
    return (
        d_scores.to(chain.scores.dtype),
        d_initial.to(chain.initial.dtype, copy=True),
        d_final.to(chain.final.dtype, copy=True),
    )
