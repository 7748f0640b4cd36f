"""The gradient of token-and-duration transducers in the logits of tokens and durations."""

from __future__ import annotations

import triton
import triton.language as tl

from .durations import store_duration_gradients
from .gradient import GradientSource, store_gradients_of_nodes
from .lattice import SIZES
from .rows import ROWS


@triton.jit(do_not_specialize=SIZES)
def tdt_gradient_kernel(
    grad,  # Upstream
    tokens,  # Logits of the tokens, [B, T, U1, V]
    durations,  # Logits of the durations, [B, T, U1, K]
    posteriors_ptr,  # [2 + K, B, T, U1]
    labels_ptr,  # [B, U]
    dtokens,  # StridedLogits
    ddurations_ptr,  # [B, T, U1, K]
    T,
    B,
    U1,
    V,
    blank,
    target_stride,
    stride_b,
    stride_t,
    stride_u,
    duration_stride_b,
    duration_stride_t,
    duration_stride_u,
    K: tl.constexpr,  # durations
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes of a program that writes the durations' gradient
):
    """Write the gradient of the rows of some nodes, or of the durations of others.

    The programs of the durations come last and are short, so they run beside the last rows.
    """
    programs = B * T * tl.cdiv(U1, ROWS)
    if tl.program_id(0) < programs:
        options = (blank, 0.0, 1.0)
        source = GradientSource(grad, posteriors_ptr, labels_ptr, target_stride, *options)
        strides, sizes = (stride_b, stride_t, stride_u), (T, B, U1, V)
        nodes = (source, tokens, strides, dtokens, 0, sizes)
        store_gradients_of_nodes(*nodes, False, False, VEC, EDGES, PIECES, BLOCK_V)
    else:
        program, results = tl.program_id(0) - programs, (posteriors_ptr, ddurations_ptr)
        strides = (duration_stride_b, duration_stride_t, duration_stride_u)
        store_duration_gradients(program, grad, durations, strides, *results, (T, B, U1), K, BLOCK)
