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
from .scores import token_of_rows, transition_range


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
    """Compute the gradients in the emissions, start and end of ROWS tokens.

    Those of a sequence whose length is invalid are NaN.
    """
    is_linear, _ = transition_range(saved.span, BLOCK_PARTS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = tl.full([], T, tl.int64) * N
    t, n, tokens, inside = token_of_rows(lengths_ptr, row, row < rows, T, N)
    is_valid = (tokens >= 1) & (tokens <= T)
    active = inside & is_valid & (t < tokens)
    c = tl.arange(0, BLOCK_C)[None, :]
    at, mask = row[:, None] * C + c, active[:, None] & (c < C)
    other = tl.where(is_linear, 0.0, -float("inf"))
    alpha = tl.load(saved.states + at, mask=mask, other=other)
    beta = tl.load(saved.states + rows * C + at, mask=mask, other=other)
    posterior, total, shift = state_posteriors(alpha, beta, is_linear)
    scale = tl.load(saved.scales + row, mask=active & (t > 0), other=0.0)
    grad = tl.load(grad_ptr + n * grad_n, mask=row < rows, other=0.0).to(tl.float64)
    if is_linear:
        factor = tl.where(total == 0.0, 0.0, grad * tl.exp2(-scale) / total)
    else:
        factor = tl.where(total == 0.0, float("inf"), tl.log(total) + shift + scale)
    tl.store(factors_ptr + row, tl.where(is_valid, factor, float("nan")), mask=row < rows)
    d_emission = tl.where(is_valid[:, None], posterior * grad[:, None], float("nan"))
    value = d_emission.to(gradients.emissions.dtype.element_ty)
    tl.store(gradients.emissions + at, value, mask=(row < rows)[:, None] & (c < C))
    store_end_gradient(gradients.start, d_emission, n, c, C, (row < rows) & (t == 0))
    is_last = t == tl.where(is_valid, tokens - 1, 0)
    store_end_gradient(gradients.end, d_emission, n, c, C, (row < rows) & is_last)
