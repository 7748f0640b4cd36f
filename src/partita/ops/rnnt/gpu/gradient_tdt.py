"""The gradient of token-and-duration transducers in the logits of tokens and durations."""

from __future__ import annotations

import triton
import triton.language as tl

from .durations import store_duration_gradients
from .gradient import GradientSource, store_gradients_of_nodes
from .lattice import SIZES


@triton.jit(do_not_specialize=SIZES)
def tdt_gradient_kernel(
    grad_ptr,  # [B]
    logits_ptr,  # [B, T, U1, V]
    durations_ptr,  # [B, T, U1, K] logits
    lse_ptr,  # [B, T, U1]
    duration_lse_ptr,  # [B, T, U1]
    posteriors_ptr,  # [2 + K, B, T, U1]
    targets_ptr,  # [B, U]
    dlogits_ptr,  # as logits
    ddurations_ptr,  # [B, T, U1, K]
    T,
    B,
    U1,
    V,
    blank,
    grad_stride,
    target_stride,
    stride_b,
    stride_t,
    stride_u,
    stride_v,
    duration_stride_b,
    duration_stride_t,
    duration_stride_u,
    duration_stride_k,
    d_stride_b,
    d_stride_t,
    d_stride_u,
    d_stride_v,
    K: tl.constexpr,  # durations
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,  # nodes of a program that writes rows
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes of a program that writes the durations' gradient
):
    """Write the gradient of the rows of some nodes, or of the durations of others.

    The programs of the durations come last and are short, so they run beside the last rows.
    """
    programs = B * T * tl.cdiv(U1, ROWS)
    if tl.program_id(0) < programs:
        saved = (lse_ptr, posteriors_ptr, targets_ptr, target_stride)
        source = GradientSource(grad_ptr, grad_stride, *saved, blank, 0.0, 1.0)
        logits = (logits_ptr, (stride_b, stride_t, stride_u, stride_v))
        dlogits = (dlogits_ptr, (d_stride_b, d_stride_t, d_stride_u, d_stride_v))
        rows = (source, logits, dlogits, 0, (T, B, U1, V))
        store_gradients_of_nodes(*rows, False, False, VEC, EDGES, PIECES, ROWS, BLOCK_V, DTYPE)
    else:
        strides = (duration_stride_b, duration_stride_t, duration_stride_u, duration_stride_k)
        store_duration_gradients(
            tl.program_id(0) - programs,
            (grad_ptr, grad_stride),
            (durations_ptr, strides),
            (duration_lse_ptr, posteriors_ptr),
            ddurations_ptr,
            (T, B, U1),
            K,
            DTYPE == tl.float64,
            BLOCK,
        )
