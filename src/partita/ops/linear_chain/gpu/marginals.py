"""Posteriors of states, which are the gradient in the emissions, and the scales of transitions.

With alpha with its emission and beta without, the posterior of a state is alpha * beta over their
sum Z over the states of the token, whatever the scales of both are. The posterior of a transition
from k to c into the token t is

    alpha[t - 1, k] * exp(transitions[k, c] + e[t, c]) * beta[t, c] * 2**-scale[t] / Z[t],

because 2**-scale[t] was a factor of alpha[t]. This kernel stores its last two factors. In the log
domain it stores the logarithm of their inverse.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .scores import transition_range


@triton.jit
def store_end_gradient(ptr, d_emission, n, c, C, mask):
    """Store the gradient in start or end, which is that in the emission of their token."""
    if ptr is not None:
        at = n[:, None] * C + c
        tl.store(ptr + at, d_emission.to(ptr.dtype.element_ty), mask=mask[:, None] & (c < C))


@triton.jit
def state_posteriors(alpha, beta, is_linear):
    """Return the posteriors `[ROWS, BLOCK_C]`, and Z as a sum and the logarithm of its factor.

    Without a path all posteriors are 0.
    """
    if is_linear:
        shift = tl.zeros([alpha.shape[0]], tl.float64)
        weights = alpha * beta
    else:
        terms = alpha + beta
        shift = finite_shift(tl.max(terms, axis=1))
        weights = tl.exp(terms - shift[:, None])
    total = tl.sum(weights, axis=1)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    return weights * inverse[:, None], total, shift


@triton.jit
def gradient_of_rows(
    grad_ptr,  # [N]
    grad_n,
    lengths_ptr,  # [N] or None
    saved,  # Saved
    row,  # [ROWS] of [T * N]
    T,
    N,
    C,
    is_linear,
    BLOCK_C: tl.constexpr,
):
    """Return the gradient in the emissions of tokens, and the factors of their transitions.

    Returns:
        The gradient `[ROWS, BLOCK_C]`, the factors `[ROWS]`, the tokens, and the gradient of log Z
        of each. The tokens are the time, the sequence, its length or 0 if that is invalid, which
        tokens there are, and which of them count. The results of an invalid length are NaN.
    """
    rows = tl.full([], T, tl.int64) * N
    t, n, inside = row // N, row % N, row < rows
    if lengths_ptr is None:
        tokens, invalid = tl.zeros_like(row) + T, tl.zeros_like(row).to(tl.float64)
    else:
        tokens = tl.load(lengths_ptr + n, mask=inside, other=0).to(tl.int64)
        valid = (tokens >= 1) & (tokens <= T)
        tokens, invalid = tl.where(valid, tokens, 0), tl.where(valid, 0.0, float("nan"))
    active = inside & (t < tokens)
    c = tl.arange(0, BLOCK_C)[None, :]
    at, mask = row[:, None] * C + c, active[:, None] & (c < C)
    other = tl.where(is_linear, 0.0, -float("inf"))
    alpha = tl.load(saved.states + at, mask=mask, other=other)
    beta = tl.load(saved.states + rows * C + at, mask=mask, other=other)
    grad = tl.load(grad_ptr + n * grad_n, mask=inside, other=0.0).to(tl.float64)
    posterior, total, shift = state_posteriors(alpha, beta, is_linear)
    scale = tl.load(saved.scales + row, mask=active & (t > 0), other=0.0)
    if is_linear:
        factor = tl.where(total == 0.0, 0.0, grad * tl.exp2(-scale) / total)
    else:
        factor = tl.where(total == 0.0, float("inf"), tl.log(total) + shift + scale)
    token = (t, n, tokens, inside, active)
    return posterior * grad[:, None] + invalid[:, None], factor + invalid, token, grad


@triton.jit
def store_gradients(
    gradients,  # Gradients
    d_emission,  # [ROWS, BLOCK_C]
    row,  # [ROWS] of [T * N]
    token,  # of each row, see `gradient_of_rows`
    C,
    is_stored,
    BLOCK_C: tl.constexpr,
):
    """Store the gradients in the emissions, start and end of tokens, if `is_stored`."""
    t, n, tokens, inside, _ = token
    c, mask = tl.arange(0, BLOCK_C)[None, :], inside & is_stored
    value = d_emission.to(gradients.emissions.dtype.element_ty)
    tl.store(gradients.emissions + row[:, None] * C + c, value, mask=mask[:, None] & (c < C))
    store_end_gradient(gradients.start, d_emission, n, c, C, mask & (t == 0))
    is_last = t == tl.maximum(tokens - 1, 0)
    store_end_gradient(gradients.end, d_emission, n, c, C, mask & is_last)


@triton.jit
def linear_chain_marginals_kernel(
    grad_ptr,  # [N]
    grad_n,
    lengths_ptr,  # [N] or None
    saved,  # Saved, without maxima
    factors_ptr,  # [T, N] fp64: factors of transitions, or logarithms of their inverses
    gradients,  # Gradients
    T,
    N,
    C,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Compute the gradients in the emissions, start and end of ROWS tokens."""
    is_linear, _ = transition_range(saved.span, BLOCK_PARTS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d_emission, factor, token, _ = gradient_of_rows(
        grad_ptr, grad_n, lengths_ptr, saved, row, T, N, C, is_linear, BLOCK_C
    )
    store_gradients(gradients, d_emission, row, token, C, True, BLOCK_C)
    tl.store(factors_ptr + row, factor, mask=token[3])
