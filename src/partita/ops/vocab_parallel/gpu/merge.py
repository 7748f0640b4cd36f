"""What a rank does with its share of the classes, and the merging of what all ranks know: a launch each."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import LOG2E, finite_shift, log_exact
from ....runtime.launch import cdiv, launch, tl_acc_dtype
from ...linear_heads.gpu.launch import accumulate_logits, logits_gradient
from .. import reference


@triton.jit(do_not_specialize=["rows", "world", "classes", "first", "rank", "ignore_index"])
def parallel_fields_kernel(
    found_ptr,  # [world, 4 + 3 * SPREAD + 2 * ENTROPY, rows]: maximum, sum, label, size; origin, spread, weights; surprise, argmax
    target_ptr,  # [rows]
    nll_ptr,  # [rows]
    logsumexp_ptr,  # [rows]
    spread_ptr,  # [rows] or None
    entropy_ptr,  # [rows] or None
    argmax_ptr,  # [rows] int64 or None
    maximum_ptr,  # [rows]
    sumexp_ptr,  # [rows]
    rows,
    world,
    classes,
    first,
    rank,
    ignore_index,
    temperature: tl.float64,
    SPREAD: tl.constexpr,
    ENTROPY: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics of rows from what each rank knows of them, in rank order."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, temperature = row < rows, tl.full([], temperature, WIDE)
    slope, pitch = tl.full([], LOG2E, WIDE) / temperature, tl.cast(rows, tl.int64)
    WORDS: tl.constexpr = 4 + 3 * SPREAD + 2 * ENTROPY
    maximum = tl.full([BLOCK], -float("inf"), WIDE)
    for r in range(world):
        maximum = tl.maximum(
            maximum, tl.load(found_ptr + r * WORDS * pitch + row, mask=inside, other=0.0)
        )
    shift, total, label = (
        finite_shift(maximum),
        tl.zeros([BLOCK], WIDE),
        tl.full([BLOCK], -float("inf"), WIDE),
    )
    before, everywhere = tl.zeros([BLOCK], WIDE), tl.zeros([BLOCK], WIDE)
    spread, weights, surprise, best = (
        tl.zeros([BLOCK], WIDE),
        tl.zeros([BLOCK], WIDE),
        tl.zeros([BLOCK], WIDE),
        tl.zeros([BLOCK], tl.int64) + classes,
    )
    for r in range(world):
        at = found_ptr + r * WORDS * pitch + row
        own, part, size = (
            tl.load(at, mask=inside, other=0.0),
            tl.load(at + pitch, mask=inside, other=0.0),
            tl.load(at + 3 * pitch, mask=inside, other=0.0),
        )
        scale = tl.exp2((own - shift) * slope)
        total += part * scale
        label = tl.maximum(label, tl.load(at + 2 * pitch, mask=inside, other=0.0))
        before += tl.where(r < rank, size, 0.0)
        everywhere += size
        if SPREAD:
            weight = tl.load(at + 6 * pitch, mask=inside, other=0.0)
            origins = tl.load(found_ptr + 4 * pitch + row, mask=inside, other=0.0) - tl.load(
                at + 4 * pitch, mask=inside, other=0.0
            )
            spread += tl.load(at + 5 * pitch, mask=inside, other=0.0) + weight * origins
            weights += weight
        if ENTROPY:
            moved = part * (shift - finite_shift(own)) / temperature
            surprise += scale * (tl.load(at + (WORDS - 2) * pitch, mask=inside, other=0.0) - moved)
            place = (
                tl.load(at + (WORDS - 1) * pitch, mask=inside, other=0.0)
                .to(tl.int64 if WIDE == tl.float64 else tl.int32, bitcast=True)
                .to(tl.int64)
            )
            best = tl.minimum(best, tl.where(own == maximum, place, classes))
    target = tl.load(target_ptr + row, mask=inside, other=0).to(tl.int64)
    kept = target != ignore_index
    wrong = (
        (kept & ((target < 0) | (target >= classes))) | (before != first) | (everywhere != classes)
    )
    spoilt, log_total = tl.where(wrong, float("nan"), 0.0).to(WIDE), log_exact(total)
    tl.store(
        nll_ptr + row,
        tl.where(kept, log_total + (shift - label) / temperature, 0.0) + spoilt,
        mask=inside,
    )
    tl.store(logsumexp_ptr + row, shift / temperature + log_total + spoilt, mask=inside)
    tl.store(maximum_ptr + row, maximum, mask=inside)
    tl.store(sumexp_ptr + row, total, mask=inside)
    if SPREAD:
        origin = tl.load(found_ptr + 4 * pitch + row, mask=inside, other=0.0)
        tl.store(
            spread_ptr + row,
            weights * (log_total + (shift - origin)) + spread + spoilt,
            mask=inside,
        )
    if ENTROPY:
        tl.store(entropy_ptr + row, log_total - surprise / total + spoilt, mask=inside)
        tl.store(argmax_ptr + row, tl.minimum(best, classes - 1), mask=inside)  # NaN is nowhere


@triton.jit(do_not_specialize=["rows", "classes", "ignore_index"])
def parallel_coefficients_kernel(
    target_ptr,  # [rows]
    nll_ptr,  # [rows], gradients of the fields, each or None
    logsumexp_ptr,
    spread_ptr,
    entropy_grad_ptr,
    entropy_ptr,  # [rows] or None
    all_weight_ptr,  # [] sum of the class weights, or None for their number
    pull_ptr,  # [rows]
    at_label_ptr,  # [rows]
    log_pull_ptr,  # [rows] or None
    by_class_ptr,  # [rows] or None
    rows,
    classes,
    ignore_index,
    temperature: tl.float64,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From the gradients of the fields, the coefficients of the rows' gradient."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, temperature = row < rows, tl.full([], temperature, WIDE)
    target = tl.load(target_ptr + row, mask=inside, other=0).to(tl.int64)
    kept = target != ignore_index
    pull, at_label = (
        tl.where(kept & ((target < 0) | (target >= classes)), float("nan"), 0.0).to(WIDE),
        tl.zeros([BLOCK], WIDE),
    )
    if nll_ptr is not None:
        at_label = -tl.where(kept, tl.load(nll_ptr + row, mask=inside, other=0.0), 0.0)
        pull -= at_label
    if logsumexp_ptr is not None:
        pull += tl.load(logsumexp_ptr + row, mask=inside, other=0.0)
    if by_class_ptr is not None:
        spread, weight = tl.load(spread_ptr + row, mask=inside, other=0.0), classes.to(WIDE)
        if all_weight_ptr is not None:
            weight = tl.load(all_weight_ptr).to(WIDE)
        pull += spread * weight
        tl.store(by_class_ptr + row, -spread / temperature, mask=inside)
    if log_pull_ptr is not None:
        grad = tl.load(entropy_grad_ptr + row, mask=inside, other=0.0)
        pull -= grad * tl.load(entropy_ptr + row, mask=inside, other=0.0)
        tl.store(log_pull_ptr + row, -grad / temperature, mask=inside)
    tl.store(pull_ptr + row, pull / temperature, mask=inside)
    tl.store(at_label_ptr + row, at_label / temperature, mask=inside)


def parallel_fields(
    found: Tensor,
    target: Tensor,
    classes: int,
    first: int,
    rank: int,
    temperature: float,
    ignore_index: int,
    spread: bool,
    entropy: bool,
) -> tuple[Tensor, ...]:
    world, _, rows = found.shape
    nll, logsumexp, maximum, sumexp = (found.new_empty(rows) for _ in range(4))
    spreads, entropies = (found.new_empty(rows if wanted else 0) for wanted in (spread, entropy))
    argmax = target.new_empty(rows if entropy else 0, dtype=torch.int64)
    outputs = (
        nll,
        logsumexp,
        spreads if spread else None,
        entropies if entropy else None,
        argmax if entropy else None,
        maximum,
        sumexp,
    )
    sizes = (rows, world, classes, first, rank, ignore_index, temperature)
    options = {
        "SPREAD": spread,
        "ENTROPY": entropy,
        "WIDE": tl_acc_dtype(found.dtype),
        "BLOCK": 128,
    }
    launch(
        parallel_fields_kernel,
        cdiv(rows, 128),
        found.contiguous(),
        target.contiguous(),
        *outputs,
        *sizes,
        **options,
        num_warps=4,
    )
    return nll, logsumexp, spreads, entropies, argmax, maximum, sumexp


def parallel_coefficients(
    target: Tensor,
    nll: Tensor | None,
    logsumexp: Tensor | None,
    spread: Tensor | None,
    entropy: Tensor | None,
    class_weight: Tensor | None,
    entropies: Tensor,
    spreads: bool,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> tuple[Tensor, ...]:
    rows, like = (
        len(target),
        next(grad for grad in (nll, logsumexp, spread, entropy) if grad is not None),
    )
    spread, entropy = spread if spreads else None, entropy if entropies.numel() else None
    weight = None if class_weight is None or spread is None else class_weight.sum(dtype=like.dtype)
    pull, at_label = like.new_empty(rows), like.new_empty(rows)
    log_pull, by_class = (
        like.new_empty(rows if grad is not None else 0) for grad in (entropy, spread)
    )
    grads = [
        None if grad is None else grad.contiguous() for grad in (nll, logsumexp, spread, entropy)
    ]
    results = (
        pull,
        at_label,
        None if entropy is None else log_pull,
        None if spread is None else by_class,
    )
    sizes, options = (
        (rows, classes, ignore_index, temperature),
        {"WIDE": tl_acc_dtype(like.dtype), "BLOCK": 128, "num_warps": 4},
    )
    known = (None if entropy is None else entropies, weight)
    launch(
        parallel_coefficients_kernel,
        cdiv(rows, 128),
        target.contiguous(),
        *grads,
        *known,
        *results,
        *sizes,
        **options,
    )
    return pull, at_label, log_pull, by_class


parallel_logits = functools.partial(
    reference.parallel_logits, accumulate_logits=accumulate_logits, begun=True
)
parallel_linear = functools.partial(
    reference.parallel_linear, accumulate_logits=accumulate_logits, begun=True
)
parallel_gradient = functools.partial(reference.parallel_gradient, logits_gradient=logits_gradient)
parallel_gradient_ = functools.partial(
    reference.parallel_gradient_, logits_gradient=logits_gradient
)
