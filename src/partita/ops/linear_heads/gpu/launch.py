"""Chunks of logits between matrix products: what is known of their rows, and their gradient in their place.

Rows of a buffer start on 16 bytes and are padded to a multiple of them, so that whole vectors are loaded and stored; other rows are, where they can be.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import LN2, LOG2E, apply_softcap, finite_shift, log_exact, reciprocal
from ....primitives.gpu.reduce import by_lane, lane_sum, online_softmax
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype
from ...cross_entropy.gpu.one_pass import one_pass_of_chunk
from ...cross_entropy.gpu.reduction import SUM_WORDS, mean_denominators
from ...cross_entropy.gpu.token_stats import accumulate_stats
from .. import reference
from ..common import GradientCoefficients, RowState, RowStatistics
from ..plan import padded_width


@triton.jit
def loaded(
    start,
    v,
    classes,
    softcap,
    ALL: tl.constexpr,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    VEC: tl.constexpr,
):
    """Logits of some classes, [1, BLOCK], or of ALL of them; -inf beyond the last."""
    if ALL:
        return apply_softcap(tl.load(start + v).to(WIDE), softcap, CAP)
    else:
        x = tl.load(start + v, mask=v // VEC * VEC < classes, other=0.0).to(WIDE)
        return tl.where(v < classes, apply_softcap(x, softcap, CAP), -float("inf"))


@triton.jit
def absorbed(
    start,
    weight_ptr,
    begin,
    classes,
    origin,
    softcap,
    slope,
    maximum,
    total,
    surprise,
    spread,
    best,
    ALL: tl.constexpr,
    ENTROPY: tl.constexpr,
    SPREAD: tl.constexpr,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the lanes carry, after the classes from `begin` on too. Without an entropy the temperature is 1."""
    VECTOR: tl.constexpr = 1 if LANES == 1 else VEC
    v = (begin + tl.arange(0, BLOCK))[None, :]
    x = loaded(start, v, classes, softcap, ALL, CAP, WIDE, VEC)
    if ENTROPY:
        maximum, total, surprise, best = accumulate_stats(
            maximum, total, surprise, best, x, begin, slope, LANES, VECTOR
        )
    else:
        maximum, total = online_softmax(maximum, total, by_lane(x, LANES, VECTOR), False)
    if SPREAD:
        weight = tl.full([1, BLOCK], 1.0, WIDE)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + v, mask=v < classes, other=0.0).to(WIDE)
        terms = tl.where((v < classes) & (weight != 0.0), weight * (origin - x), 0.0)
        spread += lane_sum(by_lane(terms, LANES, VECTOR), False)
    return maximum, total, surprise, spread, best


@triton.jit(do_not_specialize=["classes", "first"])
def linear_absorb_kernel(
    logits_ptr,  # [rows, classes], of the classes from `first` on
    target_ptr,  # [rows]
    weight_ptr,  # [classes] or None
    maximum_ptr,  # [rows]
    sumexp_ptr,  # [rows]
    label_ptr,  # [rows]
    origin_ptr,  # [rows] or None
    spread_ptr,  # [rows] or None
    surprise_ptr,  # [rows] or None
    argmax_ptr,  # [rows] int64 or None
    classes,
    first,
    stride,
    temperature: tl.float64,
    softcap: tl.float64,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The state of a row, carried over further classes. Without an entropy the temperature is 1."""
    softcap, slope = (
        tl.full([], softcap, WIDE),
        tl.full([], LOG2E, WIDE) / tl.full([], temperature, WIDE),
    )
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * stride
    label = tl.load(target_ptr + row).to(tl.int64) - first
    old, old_total = tl.load(maximum_ptr + row), tl.load(sumexp_ptr + row).to(tl.float64)
    old, old_total = tl.where(first == 0, -float("inf"), old), tl.where(first == 0, 0.0, old_total)
    here = (label >= 0) & (label < classes)
    label_x = apply_softcap(tl.load(start + label, mask=here, other=0.0).to(WIDE), softcap, CAP)
    maximum, best = tl.full([1, LANES], -float("inf"), WIDE), tl.zeros([1, LANES], tl.int32)
    total, surprise, spread = (
        tl.zeros([1, LANES], tl.float64),
        tl.zeros([1, LANES], tl.float64),
        tl.zeros([1, LANES], tl.float64),
    )
    origin = tl.full([], 0.0, WIDE)
    if spread_ptr is not None:
        origin = finite_shift(apply_softcap(tl.load(start).to(WIDE), softcap, CAP))
        origin = tl.where(first == 0, origin, tl.load(origin_ptr + row))
    whole = classes // BLOCK_V * BLOCK_V
    TAIL: tl.constexpr = BLOCK_V if LANES == 1 else LANES * VEC
    for begin in range(0, whole, BLOCK_V):
        maximum, total, surprise, spread, best = absorbed(
            start,
            weight_ptr,
            begin,
            classes,
            origin,
            softcap,
            slope,
            maximum,
            total,
            surprise,
            spread,
            best,
            True,
            surprise_ptr is not None,
            spread_ptr is not None,
            CAP,
            WIDE,
            VEC,
            LANES,
            BLOCK_V,
        )
    for begin in range(whole, classes, TAIL):
        maximum, total, surprise, spread, best = absorbed(
            start,
            weight_ptr,
            begin,
            classes,
            origin,
            softcap,
            slope,
            maximum,
            total,
            surprise,
            spread,
            best,
            False,
            surprise_ptr is not None,
            spread_ptr is not None,
            CAP,
            WIDE,
            VEC,
            LANES,
            TAIL,
        )
    most = tl.max(maximum)
    higher = tl.maximum(old, most)
    shift = finite_shift(higher)
    scale, old_scale = (
        tl.exp2((maximum - shift) * slope).to(tl.float64),
        tl.exp2((old - shift) * slope).to(tl.float64),
    )
    if surprise_ptr is not None:
        old_surprise, old_best = (
            tl.where(first == 0, 0.0, tl.load(surprise_ptr + row).to(tl.float64)),
            tl.load(argmax_ptr + row),
        )
        surprise = tl.sum(
            scale
            * (surprise - total * ((shift - finite_shift(maximum)) * slope).to(tl.float64))
            * LN2
        )
        surprise += old_scale * (
            old_surprise - old_total * ((shift - finite_shift(old)) * slope).to(tl.float64) * LN2
        )
        begin = tl.min(
            tl.where(maximum == most, best, 0x3FFFFFFF)
        )  # of the first block that has the maximum, read again
        v = (begin + tl.arange(0, BLOCK_V))[None, :]
        place = tl.min(
            tl.where(
                loaded(start, v, classes, softcap, False, CAP, WIDE, VEC) == most, v, 0x7FFFFFFF
            )
        )
        tl.store(surprise_ptr + row, surprise.to(WIDE))
        tl.store(
            argmax_ptr + row,
            tl.where(
                (first == 0) | (most > old),
                first + tl.minimum(place, classes - 1).to(tl.int64),
                old_best,
            ),
        )
    if spread_ptr is not None:
        before = tl.where(first == 0, 0.0, tl.load(spread_ptr + row).to(tl.float64))
        tl.store(spread_ptr + row, (before + tl.sum(spread)).to(WIDE))
        tl.store(origin_ptr + row, origin)
    tl.store(maximum_ptr + row, higher)
    tl.store(sumexp_ptr + row, (old_total * old_scale + tl.sum(total * scale)).to(WIDE))
    tl.store(label_ptr + row, tl.where(here, label_x, -float("inf")), mask=here | (first == 0))


@triton.jit(do_not_specialize=["rows", "classes", "ignore_index"])
def linear_fields_kernel(
    maximum_ptr,  # [rows]
    sumexp_ptr,  # [rows]
    label_ptr,  # [rows]
    origin_ptr,  # [rows] or None
    spread_ptr,  # [rows] or None
    surprise_ptr,  # [rows] or None
    target_ptr,  # [rows]
    all_weight_ptr,  # [] sum of the class weights, or None for their number
    nll_ptr,  # [rows]
    logsumexp_ptr,  # [rows]
    spreads_ptr,  # [rows] or None
    entropy_ptr,  # [rows] or None
    rows,
    classes,
    ignore_index,
    temperature: tl.float64,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics of rows from their state after all classes."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, temperature = row < rows, tl.full([], temperature, WIDE)
    label = tl.load(target_ptr + row, mask=inside, other=0).to(tl.int64)
    kept = label != ignore_index
    spoilt = tl.where(kept & ((label < 0) | (label >= classes)), float("nan"), 0.0).to(WIDE)
    shift, total = (
        finite_shift(tl.load(maximum_ptr + row, mask=inside, other=0.0)),
        tl.load(sumexp_ptr + row, mask=inside, other=1.0),
    )
    log_total = log_exact(total)
    nll = log_total + (shift - tl.load(label_ptr + row, mask=inside, other=0.0)) / temperature
    tl.store(nll_ptr + row, tl.where(kept, nll, 0.0) + spoilt, mask=inside)
    tl.store(logsumexp_ptr + row, shift / temperature + log_total + spoilt, mask=inside)
    if spread_ptr is not None:
        weight = classes.to(WIDE)
        if all_weight_ptr is not None:
            weight = tl.load(all_weight_ptr).to(WIDE)
        origin, spread = (
            tl.load(origin_ptr + row, mask=inside, other=0.0),
            tl.load(spread_ptr + row, mask=inside, other=0.0),
        )
        tl.store(
            spreads_ptr + row,
            weight * (log_total + (shift - origin)) + spread + spoilt,
            mask=inside,
        )
    if surprise_ptr is not None:
        tl.store(
            entropy_ptr + row,
            log_total - tl.load(surprise_ptr + row, mask=inside, other=0.0) / total + spoilt,
            mask=inside,
        )


@triton.jit(do_not_specialize=["classes", "first"])
def linear_descend_kernel(
    logits_ptr,  # [rows, classes], of the classes from `first` on
    target_ptr,  # [rows]
    weight_ptr,  # [classes] or None
    pull_ptr,  # [rows]
    at_label_ptr,  # [rows]
    log_pull_ptr,  # [rows] or None
    by_class_ptr,  # [rows] or None
    maximum_ptr,  # [rows]
    sumexp_ptr,  # [rows]
    result_ptr,  # [rows, classes], which may be the logits
    classes,
    first,
    stride,
    result_stride,
    temperature: tl.float64,
    softcap: tl.float64,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The gradient of a part of a row."""
    softcap, slope = (
        tl.full([], softcap, WIDE),
        tl.full([], LOG2E, WIDE) / tl.full([], temperature, WIDE),
    )
    blocks = tl.cdiv(classes, BLOCK_V)
    row, v = (
        (tl.program_id(0) // blocks).to(tl.int64),
        tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V),
    )
    inside = v // VEC * VEC < classes
    x = apply_softcap(
        tl.load(logits_ptr + row * stride + v, mask=inside, other=0.0).to(WIDE), softcap, CAP
    )
    label = tl.load(target_ptr + row).to(tl.int64) - first
    pull, at_label, total = (
        tl.load(pull_ptr + row),
        tl.load(at_label_ptr + row),
        tl.load(sumexp_ptr + row),
    )
    exponent = (x - finite_shift(tl.load(maximum_ptr + row))) * slope
    p = tl.exp2(exponent) * reciprocal(total)
    grad, active = pull * p, tl.abs(pull) + tl.abs(at_label)
    if log_pull_ptr is not None:
        log_pull = tl.load(log_pull_ptr + row)
        grad += (
            log_pull * p * (LN2 * tl.maximum(exponent, -10000.0) - log_exact(total))
        )  # where p is 0, so is the product
        active += tl.abs(log_pull)
    if by_class_ptr is not None:
        by_class = tl.load(by_class_ptr + row)
        if weight_ptr is not None:
            grad += by_class * tl.load(weight_ptr + v, mask=v < classes, other=0.0).to(WIDE)
        else:
            grad += by_class
        active += tl.abs(by_class)
    grad += tl.where(v == label, at_label, 0.0)
    if CAP:
        grad *= 1.0 - (x / softcap) * (x / softcap)
    tl.store(
        result_ptr + row * result_stride + v,
        tl.where(active == 0.0, 0.0, grad).to(result_ptr.dtype.element_ty),
        mask=inside,
    )


def options_for(
    logits: Tensor, softcap: float, block: int, warps: int, *others: Tensor
) -> dict[str, Any]:
    """Whole vectors where rows are those of a buffer, or as good."""
    block, vector = min(next_power_of_2(logits.shape[1]), block), 16 // logits.element_size()
    for tensor in (logits, *others):
        padded = tensor.stride(0) == padded_width(logits.shape[1]) or logits.shape[1] % vector == 0
        if not padded or tensor.stride(0) % vector or tensor.data_ptr() % 16:
            vector = 1
    return {
        "CAP": softcap != 0,
        "WIDE": tl_acc_dtype(logits.dtype),
        "VEC": vector,
        "BLOCK_V": block,
        "num_warps": warps if block > 1024 else 1,
    }


def accumulate_logits(
    logits: Tensor,
    first: int,
    target: Tensor,
    class_weight: Tensor | None,
    state: RowState,
    temperature: float,
    softcap: float,
) -> None:
    sizes, options = (
        (logits.shape[1], first, logits.stride(0)),
        options_for(logits, softcap, 2048, 2),
    )
    lanes = 32 * options["num_warps"]
    options["LANES"] = lanes if options["BLOCK_V"] >= lanes * options["VEC"] else 1
    launch(
        linear_absorb_kernel,
        len(logits),
        logits,
        target,
        class_weight,
        *state,
        *sizes,
        temperature,
        softcap,
        **options,
    )


def first_state(logits: Tensor, spread: bool, entropy: bool) -> RowState:
    """Memory for it: the first chunk does not look at what is there."""
    rows, wide = len(logits), acc_dtype(logits.dtype)
    maximum, sumexp, label, origin, summed, surprise = (
        logits.new_empty(rows, dtype=wide) for _ in range(6)
    )
    argmax = logits.new_empty(rows, dtype=torch.int64) if entropy else None
    return RowState(
        maximum,
        sumexp,
        label,
        origin if spread else None,
        summed if spread else None,
        surprise if entropy else None,
        argmax,
    )


def row_statistics(
    state: RowState,
    target: Tensor,
    class_weight: Tensor | None,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> RowStatistics:
    x, rows = state.maximum, len(target)
    weight = None if class_weight is None else class_weight.sum(dtype=x.dtype)
    results = [
        x.new_empty(rows) if wanted is not None else None
        for wanted in (x, x, state.smoothing_loss, state.sum_x_exp)
    ]
    sizes = (rows, classes, ignore_index, temperature)
    launch(
        linear_fields_kernel,
        cdiv(rows, 256),
        *state[:6],
        target,
        weight,
        *results,
        *sizes,
        WIDE=tl_acc_dtype(x.dtype),
        BLOCK=256,
        num_warps=4,
    )
    nll, logsumexp, spread, entropy = (
        x.new_empty(0) if result is None else result for result in results
    )
    argmax = target.new_empty(0, dtype=torch.int64) if state.argmax is None else state.argmax
    return RowStatistics(nll, logsumexp, spread, entropy, argmax, x, state.sumexp)


def logits_gradient(
    logits: Tensor,
    first: int,
    target: Tensor,
    class_weight: Tensor | None,
    c: GradientCoefficients,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
    result: Tensor,
) -> None:
    tensors = (
        logits,
        target,
        class_weight,
        c.dlogits_coef,
        c.label_coef,
        c.log_coef,
        c.smoothing_coef,
        maximum,
        sumexp,
        result,
    )
    sizes, options = (
        (logits.shape[1], first, logits.stride(0), result.stride(0)),
        options_for(logits, softcap, 4096, 4, result),
    )
    launch(
        linear_descend_kernel,
        len(logits) * cdiv(logits.shape[1], options["BLOCK_V"]),
        *tensors,
        *sizes,
        temperature,
        softcap,
        **options,
    )


def mean_shares(
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    classes: int,
    mean: bool,
    wide: torch.dtype,
) -> Tensor | None:
    """Shares of what the mean divides by; None for a sum."""
    if not mean:
        return None
    return mean_denominators(
        target,
        class_weight,
        ignore_index,
        classes,
        torch.empty(SUM_WORDS, dtype=torch.int64, device=target.device),
    )


accumulate_hidden = functools.partial(
    reference.accumulate_hidden, accumulate_logits=accumulate_logits, first_state=first_state
)
linear_rows = functools.partial(
    reference.linear_rows, accumulate_hidden=accumulate_hidden, row_statistics=row_statistics
)
linear_rows_backward = functools.partial(
    reference.linear_rows_backward, logits_gradient=logits_gradient
)
linear_one_pass = functools.partial(
    reference.linear_one_pass, one_pass=one_pass_of_chunk, mean_shares=mean_shares
)
