"""The ops of dense linear chains on the CPU.

Log Z and its gradient run in linear arithmetic where the transitions allow it. The kernels of
sparse chains serve the rest: for them a sequence of T tokens is a chain of T - 1 steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import (
    as_array,
    as_steps,
    empty_batch,
    fill_nan,
    run_over_sequences,
)
from ....runtime.dtypes import acc_dtype
from ...chain.cpu.logz import (
    chain_backward_kernel,
    chain_expectation_backward_kernel,
    chain_expectation_forward_kernel,
    chain_forward_kernel,
)
from ...chain.cpu.paths import best_paths, chain_sample_kernel
from ...chain.cpu.steps import (
    ChainBatch,
    Edges,
    Gradients,
    lengths_of,
    lengths_of_groups,
    no_emissions,
    run,
)
from ..common import LinearChainPotentials, LinearChainValues, is_constant
from .scans import dense_arrays, forward_kernel, gradient_kernel, join_kernel

MAX_SPAN = 300.0  # nats; a state that underflows is then improbable by e**-100
MAX_GROUPS = 64  # sums over the sequences that run side by side
FP64: Any = {"dtype": torch.float64, "device": "cpu"}
NO_ROWS = np.empty((0, 0, 0))


def is_linear(transitions: Tensor) -> bool:
    """Return whether the transitions are constant and span few enough nats.

    Nothing else may decide: the bits of a sequence do not depend on the scores of others.
    """
    if transitions.ndim > 2 or not transitions.numel():
        return False
    low, high = transitions.detach().aminmax()
    return float(high) - float(low) <= MAX_SPAN  # False for NaN and infinities


def dense_batch(chain: LinearChainPotentials) -> tuple[ChainBatch, Tensor, Tensor]:
    """Return the batch, the numbers of tokens and the mask of invalid lengths, `[N]`."""
    emissions, transitions, start, end, lengths = chain
    T, N, C = emissions.shape
    tokens, invalid = lengths_of(lengths, 1, T, N)
    first = emissions[0].detach().double()
    initial = first if start is None else first + start.detach()
    # Without memory of [T - 1, N, C, C]. Constant transitions are converted once.
    steps = transitions.detach()
    if steps.ndim == 2:
        steps = steps.double()
    elif steps.ndim == 3:
        steps = steps.unsqueeze(1)
    no_edges, no_starts = np.empty(0, np.uint32), np.empty(0, np.int32)
    sources = np.arange(C * C, dtype=np.int32) // max(C, 1)
    batch = ChainBatch(
        (tokens - 1).numpy(),
        Edges(C, True, sources, no_edges, no_starts, 0),
        as_steps(steps.expand(T - 1, N, C, C)),
        as_steps(emissions),
        as_array(initial),
        np.zeros((N, C)) if end is None else as_array(end),
    )
    return batch, tokens, invalid


def linear_chain_logz(chain: LinearChainPotentials, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and the states for its gradient."""
    T, N, C = chain.emissions.shape
    tokens, invalid = lengths_of(chain.lengths, 1, T, N)
    if is_linear(chain.transitions):
        saved = empty_batch((T if save else 0, N, C))
        result = _join_halves(dense_arrays(chain, tokens), saved)
    else:
        batch = dense_batch(chain)[0]
        saved = empty_batch((T if save else 2, N, C))
        result = torch.empty(N, **FP64)
        run(chain_forward_kernel, batch, saved.numpy(), result.numpy())
    result.masked_fill_(invalid, torch.nan)
    rounded = result.to(acc_dtype(chain.emissions.dtype), copy=True)
    return result, rounded, saved if save else saved.new_empty(0)


def _by_sequence(saved: Tensor) -> Any:
    """Return the memory of states `[T, N, C]` as `[N, T, C]`, which scans read in its order."""
    T, N, C = saved.shape
    return saved.numpy().reshape(N if T else 0, T, C)


def _scan_halves(chain: Any, saved: Tensor) -> tuple[Any, Any]:
    """Scan alpha and beta up to the middle, and return their states there and the log scales."""
    N, C = chain.start.shape
    meeting, log_scale = np.empty((2 * N, chain.weights.shape[2])), np.empty(2 * N)
    halves = chain.lengths.repeat(2) // 2
    run_over_sequences(
        forward_kernel, halves, C * C, chain, _by_sequence(saved), meeting, log_scale
    )
    return meeting, log_scale


def _join_halves(chain: Any, saved: Tensor) -> Tensor:
    """Return log Z of each sequence, `[N]`, and save the states."""
    N, C = chain.start.shape
    logz, ones = np.empty(N), np.ones(N, np.int64)
    run_over_sequences(join_kernel, ones, C * C, chain, *_scan_halves(chain, saved), logz)
    return torch.from_numpy(logz)


def _sum_of_products(counts: Tensor, chain: Any) -> Tensor:
    """Return the gradients in the transitions, `[..., C, C]`, of what `gradient_kernel` counts."""
    C = chain.start.shape[1]
    alpha, beta = counts[..., :C, :C]
    return (alpha + beta.mT) * torch.from_numpy(chain.weights[0, :C, :C])


def _empty_counts(transitions: Tensor, T: int, N: int, C: int, per_sequence: bool) -> Tensor:
    """Return zeros `[S, G, C, C]` for the sums of the gradients in transitions.

    S is the number of steps in which transitions differ, and G that of sums over sequences. Partial
    sums take no more memory than the emissions.
    """
    if not is_constant(transitions, T):
        return torch.zeros((T - 1, N if transitions.ndim == 4 else 1, C, C), **FP64)
    groups = N if per_sequence else min(N, MAX_GROUPS, T * N // max(C, 1))
    return torch.zeros((1, max(groups, 1), C, C), **FP64)


def _sum_of_counts(
    counts: Tensor, transitions: Tensor, failed: Tensor, steps: Tensor, per_sequence: bool
) -> Tensor:
    """Return the gradient in the transitions in fp64; NaN where a sequence failed."""
    if per_sequence:
        counts = counts.masked_fill(failed[:, None, None], torch.nan)
        return counts[0] if transitions.ndim == 2 else counts
    if transitions.ndim > 2:
        fill_nan(counts.expand(-1, len(failed), -1, -1), failed, steps - 1)
        return counts.reshape(transitions.shape)
    return counts[0].sum(0).masked_fill(failed.any(), torch.nan)


def linear_chain_gradient(
    grad_output: Tensor,
    chain: LinearChainPotentials,
    logz: Tensor,
    saved: Tensor,
    need_transitions: bool,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of sum(grad_output * log Z) in the dtypes of the arguments."""
    emissions, transitions, start, end, lengths = chain
    T, N, C = emissions.shape
    tokens, invalid = lengths_of(lengths, 1, T, N)
    failed, linear = logz.isnan(), is_linear(transitions)
    upstream = grad_output.detach().double().masked_fill(failed, torch.nan)
    upstream = upstream.masked_fill(logz == -torch.inf, 0.0).contiguous()
    constant = is_constant(transitions, T)
    per_sequence = constant and (per_sequence or transitions.ndim == 4)
    counts = _empty_counts(transitions, T, N, C, per_sequence)
    groups = counts.shape[1]
    # The reference, which serves empty batches, saves nothing.
    states = saved.detach() if saved.numel() else saved.new_empty(emissions.shape)
    dtype = torch.promote_types(emissions.dtype, torch.float32)
    d_ends = torch.empty((2, N, C), **FP64)
    if linear:
        arrays = dense_arrays(chain, tokens)
        d_emissions, width = empty_batch(emissions.shape, dtype), arrays.weights.shape[2]
        products = torch.zeros((2, groups if need_transitions else 0, width, width), **FP64)
        written = (x.numpy() for x in (d_emissions, d_ends, products))
        others = (upstream.numpy(), _by_sequence(states), *written, np.empty((0, 0, 0, 0)))
        work = lengths_of_groups(arrays.lengths, groups) if need_transitions else arrays.lengths
        run_over_sequences(gradient_kernel, work.repeat(2) // 2, C * C, arrays, *others)
        if need_transitions:
            counts[0] = _sum_of_products(products, arrays)
    else:
        batch = dense_batch(chain)[0]
        d_emissions = empty_batch(emissions.shape)
        written = counts.flatten(2).numpy() if need_transitions else NO_ROWS
        gradients = Gradients(d_emissions.numpy(), written)
        args = (upstream.numpy(), states.numpy(), logz.contiguous().numpy())
        no_rows = no_emissions(emissions)
        run(chain_backward_kernel, batch, *args, no_rows, gradients, counts=written)
        d_ends = _end_gradients(d_emissions, tokens)
    steps = tokens.masked_fill(invalid, T)
    fill_nan(d_emissions, failed, steps)
    d_ends[:, failed] = torch.nan
    d_transitions = transitions.new_empty(0)
    if need_transitions:
        d_transitions = _sum_of_counts(counts, transitions, failed, steps, per_sequence)
        is_kept = transitions.ndim > 2 or not per_sequence
        dtype = transitions.dtype if is_kept else acc_dtype(transitions.dtype)
        d_transitions = d_transitions.to(dtype)
    # An op may not return one tensor as two results.
    d_start = emissions.new_empty(0) if start is None else d_ends[0].to(start.dtype, copy=True)
    d_end = emissions.new_empty(0) if end is None else d_ends[1].to(end.dtype, copy=True)
    return d_emissions.to(emissions.dtype), d_transitions, d_start, d_end


def expectation_of_symbols(
    table: Tensor, symbols: Tensor, transitions: Tensor, start: Tensor, lengths: Tensor | None
) -> tuple[Tensor, ...] | None:
    """Return log Z `[N]` and the gradients of its sum for emissions that are rows of a table.

    The scans look the rows up and add the posteriors by symbol, so neither is in memory for each
    token. The arguments and results are those of `autograd.expectation_of_symbols`.
    """
    (N, T), (K, C) = symbols.shape, table.shape
    if not is_linear(transitions):
        return None
    tokens, no_rows = lengths_of(lengths, 1, T, N)[0], table.new_empty(0, N, C)
    arrays = dense_arrays(LinearChainPotentials(no_rows, transitions, start, None, None), tokens)
    maxima, width = table.amax(1), arrays.weights.shape[2]
    rows = torch.zeros((K, width), **FP64)
    rows[:, :C] = (table - maxima.masked_fill(maxima == -torch.inf, 0.0)[:, None]).exp()
    arrays = arrays._replace(
        symbols=symbols.numpy(),
        table=rows.numpy(),
        maxima=maxima.numpy(),
        start=start.exp().numpy(),
    )
    saved = empty_batch((T, N, C))
    logz = _join_halves(arrays, saved)
    groups = max(1, min(N, MAX_GROUPS, T * N // (4 * max(C, K))))
    counts = torch.zeros((2, groups, width, width), **FP64)
    d_table = torch.zeros((2, groups, K, width), **FP64)
    d_ends = torch.zeros((2, N, C), **FP64)
    upstream = (logz > -torch.inf).double()
    written = (x.numpy() for x in (no_rows, d_ends, counts, d_table))
    work = lengths_of_groups(arrays.lengths, groups).repeat(2) // 2
    args = (arrays, upstream.numpy(), _by_sequence(saved), *written)
    run_over_sequences(gradient_kernel, work, C * C, *args)
    return logz, d_table.sum((0, 1))[:, :C], _sum_of_products(counts.sum(1), arrays), d_ends[0]


def _end_gradients(d_emissions: Tensor, tokens: Tensor) -> Tensor:
    """Return the gradients of the first and the last emissions of each sequence, `[2, N, C]`."""
    last = d_emissions[tokens - 1, torch.arange(len(tokens))]
    return torch.stack([d_emissions[0], last])


def linear_chain_viterbi(chain: LinearChainPotentials) -> tuple[Tensor, Tensor]:
    """Return the best score `[N]` and the states of the best path `[T, N]`."""
    score, states = linear_chain_nbest(chain, 1)
    return score[0].to(acc_dtype(chain.emissions.dtype), copy=True), states[0]


def linear_chain_nbest(chain: LinearChainPotentials, k: int) -> tuple[Tensor, Tensor]:
    """Return the scores `[k, N]` fp64 of the k best paths, and their states `[k, T, N]`."""
    batch, _, invalid = dense_batch(chain)
    score, states, _ = best_paths(batch, len(chain.emissions) - 1, k, True)
    return score.masked_fill_(invalid, torch.nan), states.masked_fill_(invalid, -1)


def linear_chain_sample(chain: LinearChainPotentials, uniforms: Tensor) -> Tensor:
    """Return the states `[k, T, N]` of k paths from the posterior."""
    T, N, C = chain.emissions.shape
    batch, tokens, invalid = dense_batch(chain)
    alpha, logz, k = empty_batch((T, N, C)), np.empty(N), uniforms.shape[1]
    if is_linear(chain.transitions):
        arrays = dense_arrays(chain, tokens)
        # Alpha has the last token's end here. The scale of a token's states changes no draw.
        _scan_halves(arrays._replace(middle=arrays.lengths), alpha)
        batch = batch._replace(final=np.zeros((N, C)))
        alpha = alpha.view(N, T, C).transpose(0, 1).log()
        logz = alpha[tokens - 1, torch.arange(N)].amax(1).numpy()
    else:
        run(chain_forward_kernel, batch, alpha.numpy(), logz)
    states, edges = (torch.full((k, T - i, N), -1, device="cpu") for i in (0, 1))
    numbers = uniforms.contiguous().numpy()
    run(chain_sample_kernel, batch, alpha.numpy(), logz, numbers, states.numpy(), edges.numpy())
    return states.masked_fill_(invalid, -1)


def linear_chain_tangent(
    grad_output: Tensor, chain: LinearChainPotentials, values: LinearChainValues
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean of the values `[N]`, and its gradients weighted by grad_output, in fp64."""
    transitions = chain.transitions
    T, N, C = chain.emissions.shape
    batch, tokens, invalid = dense_batch(chain)
    if values.transition_values.ndim == 3 and transitions.ndim == 2:  # the same for all steps
        values = values._replace(transition_values=values.transition_values[None])
    of_values = dense_batch(LinearChainPotentials(*values, chain.lengths))[0]
    found = np.empty(N), np.empty(N), np.empty((2, T, N, C))
    run(chain_expectation_forward_kernel, batch, of_values, *found)
    counts, d_emissions = _empty_counts(transitions, T, N, C, False), empty_batch((T, N, C))
    gradients = Gradients(d_emissions.numpy(), counts.flatten(2).numpy())
    run(
        *(chain_expectation_backward_kernel, batch, of_values, *found, as_array(grad_output)),
        *(NO_ROWS, gradients),
        counts=gradients.counts,
    )
    mean = torch.from_numpy(found[0]).masked_fill_(invalid, torch.nan)
    failed, steps = mean.isnan(), tokens.masked_fill(invalid, T)
    fill_nan(d_emissions, failed, steps)
    d_ends = _end_gradients(d_emissions, tokens)
    d_ends[:, failed] = torch.nan
    return (
        mean,
        d_emissions,
        _sum_of_counts(counts, transitions, failed, steps, False).reshape(transitions.shape),
        d_emissions.new_empty(0) if chain.start is None else d_ends[0].clone(),
        d_emissions.new_empty(0) if chain.end is None else d_ends[1].clone(),
    )
