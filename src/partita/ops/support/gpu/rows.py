"""The kernel of statistics over recorded supports, and its launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import (
    LN2,
    LOG2E,
    finite_shift,
    log_exact,
    reciprocal,
    through_softcap,
)
from ....primitives.gpu.reduce import add_block, empty_state, load_capped, merge_lanes
from ....runtime.launch import launch, tl_acc_dtype
from ...cross_entropy.common import NOT_READ
from ..common import IGNORED, INVALID, WRONG, Support, SupportRows, empty_rows

IGNORED_CLASS, WRONG_OFFSET = tl.constexpr(IGNORED), tl.constexpr(WRONG)
INVALID_LABEL, NOT_READ_LABEL = tl.constexpr(INVALID), tl.constexpr(NOT_READ)
BLOCK = 32  # entries of a row that its program reads together; the usual row has nine


@triton.jit
def load_entries(logits_ptr, support, row, start, number, M, C, softcap, BLOCK: tl.constexpr):
    """Load a block of the `number` entries of a row, of which the target is the first.

    Returned are their places in the list of entries, their logits, which of them count, which are
    an id that is the target, and which are no class.
    """
    place = start + tl.arange(0, BLOCK)
    entry = tl.where(place == 0, row, M + tl.load(support.offsets + row) + place - 1)
    is_id = (place > 0) & (place < number)
    label = tl.load(support.classes + row)
    id = tl.load(support.classes + entry, mask=place < number, other=0)
    before = tl.load(support.classes + entry - 1, mask=is_id & (place > 1), other=-1)
    is_class, is_recorded = (id >= 0) & (id < C), is_id & (id == label)
    counts = (place < number) & is_class & (is_recorded == 0) & (id != before)
    x = load_capped(logits_ptr + entry, counts, softcap, logits_ptr.dtype.element_ty)
    return entry, x, counts, is_recorded, (place < number) & (is_class == 0)


@triton.jit(do_not_specialize=["M"])
def support_rows_kernel(
    logits_ptr,  # [E]
    support,  # Support
    results,  # SupportRows
    M,
    C,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the statistics of one row with ids, and then the derivatives in its entries."""
    temperature = tl.full([], temperature, ACC_DTYPE)
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    slope = tl.full([], LOG2E, ACC_DTYPE) / temperature
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(support.offsets + row), tl.load(support.offsets + row + 1)
    label = tl.load(support.classes + row)
    is_ignored = (label == IGNORED_CLASS) & (begin != WRONG_OFFSET)
    has_all = (begin == end) & (is_ignored == 0)
    number = end - begin + 1
    state = empty_state(1, BLOCK, ACC_DTYPE, tl.float64)
    has_target = tl.zeros([BLOCK], tl.int32)
    has_no_class = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.where(is_ignored, 0, number), BLOCK):
        _, x, _, is_recorded, is_no_class = load_entries(
            logits_ptr, support, row, start, number, M, C, softcap, BLOCK
        )
        state = add_block(state, x[None, None, None, :], 0, None, slope, True)
        has_target |= is_recorded.to(tl.int32)
        has_no_class |= is_no_class.to(tl.int32)
    found = merge_lanes(state, slope)
    total = tl.sum(found.total, axis=0).to(ACC_DTYPE)
    shift, log_total = finite_shift(tl.sum(found.maximum, axis=0)), log_exact(total)
    is_invalid = (begin == WRONG_OFFSET) | (tl.max(has_no_class, axis=0) > 0)
    counts = (is_ignored | is_invalid | has_all) == 0
    nan_or_zero = tl.where(is_invalid, float("nan"), 0.0).to(ACC_DTYPE)
    label_x = load_capped(logits_ptr + row, counts, softcap, ACC_DTYPE)
    logprob = (label_x - shift) / temperature - log_total
    entropy = log_total - LN2 * tl.sum(found.sum_x_exp, axis=0).to(ACC_DTYPE) / total
    in_set = (counts & (tl.max(has_target, axis=0) > 0)) | (has_all & (is_invalid == 0))
    of_others = tl.where(is_invalid, INVALID_LABEL, NOT_READ_LABEL).to(tl.int64)
    label = tl.where(has_all, tl.where(is_invalid, C, label), of_others)
    tl.store(results.logprob + row, tl.where(counts, logprob, nan_or_zero))
    tl.store(results.entropy + row, tl.where(counts, entropy, nan_or_zero))
    tl.store(results.in_set + row, in_set)
    tl.store(results.labels + row, label)
    inverse = reciprocal(total)
    for start in range(0, number, BLOCK):
        entry, x, is_member, _, _ = load_entries(
            logits_ptr, support, row, start, number, M, C, softcap, BLOCK
        )
        exponent = (x - shift) * slope
        p = tl.exp2(exponent) * inverse
        # This is log p + entropy, which stays finite where p is 0.
        surprise = LN2 * tl.maximum(exponent, -10000.0) + (entropy - log_total)
        dlogprob = through_softcap((tl.where(entry == row, 1.0, 0.0) - p) / temperature, x, softcap)
        dentropy = through_softcap(-p * surprise / temperature, x, softcap)
        mask, is_member = start + tl.arange(0, BLOCK) < number, is_member & counts
        tl.store(results.dlogprob + entry, tl.where(is_member, dlogprob, nan_or_zero), mask=mask)
        tl.store(results.dentropy + entry, tl.where(is_member, dentropy, nan_or_zero), mask=mask)


def support_stats(
    logits: Tensor, support: Support, num_classes: int, temperature: float, softcap: float
) -> SupportRows:
    """Compute the statistics of each row over its support; see the reference."""
    results = empty_rows(logits, support.offsets)
    launch(
        support_rows_kernel,
        len(results.logprob),
        logits_ptr=logits,
        support=support,
        results=results,
        M=len(results.logprob),
        C=num_classes,
        temperature=temperature,
        softcap=softcap,
        HAS_SOFTCAP=softcap != 0,
        ACC_DTYPE=tl_acc_dtype(logits.dtype),
        BLOCK=BLOCK,
        num_warps=1,
    )
    return results
