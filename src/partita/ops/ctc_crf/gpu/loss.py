"""The kernel that computes the losses from log Z and reduces them."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])
def crf_loss_kernel(
    logz_den_ptr,  # [N] fp64, of all paths
    logz_num_ptr,  # [N] fp64, of the paths that spell the target
    target_lengths_ptr,  # [N] int64
    losses_ptr,  # [N] fp64
    value_ptr,  # [N], or [] where REDUCE
    N,
    REDUCE: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the loss of each sequence, and their sum or their mean over target lengths."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        mask = n < N
        logz_den = tl.load(logz_den_ptr + n, mask=mask, other=0.0)
        logz_num = tl.load(logz_num_ptr + n, mask=mask, other=0.0)
        loss = tl.where(logz_num == -float("inf"), float("inf"), logz_den - logz_num)
        tl.store(losses_ptr + n, loss, mask=mask)
        if not REDUCE:
            tl.store(value_ptr + n, loss.to(value_ptr.dtype.element_ty), mask=mask)
        elif MEAN:
            length = tl.load(target_lengths_ptr + n, mask=mask, other=1)
            total += loss / tl.maximum(length, 1).to(tl.float64)
        else:
            total += loss
    if REDUCE:
        value = tl.sum(total, axis=0)
        if MEAN:
            value /= tl.cast(N, tl.float64)
        tl.store(value_ptr, value.to(value_ptr.dtype.element_ty))
