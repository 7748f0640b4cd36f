"""A round of greedy search of a transducer, apart from the user's predictor and joint network."""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, finite_shift, log_exact


@triton.jit
def best_class(rows_ptr, classes, K: tl.constexpr, BLOCK: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Return the greatest class of K rows and its log-probability in fp64, both `[K]`.

    Of equal ones it is the first, and NaN is greater than all others, as in `Tensor.argmax`.
    """
    lane = tl.arange(0, BLOCK)[None, :]
    best = tl.full([K, BLOCK], -float("inf"), ACC_DTYPE)
    index = tl.zeros([K, BLOCK], tl.int32) + lane
    total = tl.zeros([K, BLOCK], ACC_DTYPE)
    for first in range(0, classes, BLOCK):
        v = first + lane
        x = tl.load(rows_ptr + v, mask=v < classes, other=-float("inf")).to(ACC_DTYPE)
        previous, is_better = best, (x > best) | ((x != x) & (best == best))
        best, index = tl.where(is_better, x, best), tl.where(is_better, v, index)
        shift = finite_shift(best)
        total = total * exp(previous - shift) + exp(x - shift)
    has_nan = tl.max((best != best).to(tl.int32), axis=1) > 0
    maximum = tl.max(tl.where(best == best, best, -float("inf")), axis=1)
    is_best = tl.where(has_nan[:, None], best != best, best == maximum[:, None])
    chosen = tl.min(tl.where(is_best, index, classes - 1), axis=1)
    score = -log_exact(tl.sum(total * exp(best - finite_shift(maximum)[:, None]), axis=1))
    score = tl.where(has_nan | (maximum == -float("inf")), float("nan"), score)
    return chosen, score.to(tl.float64)


@triton.jit(
    do_not_specialize=["T", "D", "V", "S", "blank", "max_symbols", "stride_b", "stride_t"],
    do_not_specialize_on_alignment=["stride_d"],
)
def transducer_greedy_kernel(
    logits_ptr,  # [B, K, V + number of durations]
    encoder_ptr,  # [B, T, D]
    lengths_ptr,  # [B] int64
    durations_ptr,  # [number of durations] int64
    walk,  # Walk
    written,  # Written
    best_ptr,  # [B, 4, K] fp64: token, frames to move on, score of the token, of the duration
    T,
    D,
    V,
    S,
    blank,
    max_symbols,
    stride_b,
    stride_t,
    stride_d,
    NUM_DURATIONS: tl.constexpr,  # 0 for RNN-T
    BLOCK_DURATIONS: tl.constexpr,
    K: tl.constexpr,  # frames that the joint network sees
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Move a sequence on past its next label, write the label, and copy the frames that follow.

    A blank moves on, up to the first label, the end of the K frames or of the sequence.
    """
    b = tl.program_id(0).to(tl.int64)
    t_ptr, count_ptr, symbols_ptr, total_ptr, open_ptr, emits_ptr, token_ptr, frames_ptr = walk
    tokens_ptr, steps_ptr, moves_ptr, scores_ptr = written
    if tl.load(open_ptr + b):
        k = tl.arange(0, K)
        rows_ptr = logits_ptr + ((b * K + k) * (V + NUM_DURATIONS))[:, None]
        tokens, scores = best_class(rows_ptr, V, K, BLOCK_V, ACC_DTYPE)
        moves, duration_scores = tl.zeros([K], tl.int64), tl.zeros([K], tl.float64)
        if NUM_DURATIONS > 0:
            chosen, duration_scores = best_class(
                rows_ptr + V, NUM_DURATIONS, K, BLOCK_DURATIONS, ACC_DTYPE
            )
            moves = tl.load(durations_ptr + chosen)
        moves = tl.where((tokens == blank) & (moves == 0), 1, moves)
        best_ptr += b * 4 * K
        tl.store(best_ptr + k, tokens.to(tl.float64))
        tl.store(best_ptr + K + k, moves.to(tl.float64))
        tl.store(best_ptr + 2 * K + k, scores)
        tl.store(best_ptr + 3 * K + k, duration_scores)
        tl.debug_barrier()  # each thread reads all of them

        t, length = tl.load(t_ptr + b), tl.load(lengths_ptr + b)
        count, symbols = tl.load(count_ptr + b), tl.load(symbols_ptr + b)
        total, at = tl.load(total_ptr + b), t * 0
        emits, token, move, score = at > 0, at + blank, at, total * 0.0
        for i in tl.static_range(K):
            here = (at == i) & (t + i < length)
            token_here = tl.load(best_ptr + i).to(tl.int64)
            move_here = tl.load(best_ptr + K + i).to(tl.int64)
            score_here = tl.load(best_ptr + 2 * K + i) + tl.load(best_ptr + 3 * K + i)
            found, passes = here & (token_here != blank), here & (token_here == blank)
            total = tl.where(here, total + score_here, total)
            token, move = tl.where(found, token_here, token), tl.where(found, move_here, move)
            score, emits = tl.where(found, score_here, score), emits | found
            at = tl.where(passes, at + move_here, at)

        symbols, t = tl.where(at > 0, 0, symbols), t + at
        row = b * (S + 1) + count
        tl.store(tokens_ptr + row, token, mask=emits)
        tl.store(steps_ptr + row, t, mask=emits)
        tl.store(moves_ptr + row, move, mask=emits)
        tl.store(scores_ptr + row, score, mask=emits)
        count, symbols = count + emits.to(tl.int64), symbols + emits.to(tl.int64)
        move = tl.where((move == 0) & (symbols >= max_symbols), 1, move)
        t = tl.where(emits, t + move, t)
        symbols = tl.where(emits & (move > 0), 0, symbols)
        t = tl.where(count >= S, tl.maximum(t, length), t)
        tl.store(t_ptr + b, t)
        tl.store(count_ptr + b, count)
        tl.store(symbols_ptr + b, symbols)
        tl.store(total_ptr + b, total)
        tl.store(open_ptr + b, t < length)
        tl.store(emits_ptr + b, emits)
        tl.store(token_ptr + b, token)

        shown = tl.maximum(tl.minimum(t + k, length - 1), 0)[:, None]
        for first in range(0, D, BLOCK_D):
            d = (first + tl.arange(0, BLOCK_D))[None, :]
            source_ptr = encoder_ptr + b * stride_b + shown * stride_t + d.to(tl.int64) * stride_d
            frame = tl.load(source_ptr, mask=d < D)
            tl.store(frames_ptr + (b * K + k)[:, None] * D + d, frame, mask=d < D)
    else:
        tl.store(emits_ptr + b, tl.zeros([], tl.int1))
        tl.store(token_ptr + b, tl.zeros([], tl.int64) + blank)


@triton.jit
def copy_row(
    source,
    target,
    source_row,
    row,
    inners,
    sizes,
    R,
    chunk,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy one row of each tensor."""
    for i in tl.static_range(len(source)):
        for first in range(chunk * BLOCK, sizes[i], CHUNKS * BLOCK):
            e = first + tl.arange(0, BLOCK)
            outer, inner = (e // inners[i]).to(tl.int64) * R, e % inners[i]
            value = tl.load(source[i] + (outer + source_row) * inners[i] + inner, mask=e < sizes[i])
            tl.store(target[i] + (outer + row) * inners[i] + inner, value, mask=e < sizes[i])


@triton.jit(do_not_specialize=["R"])
def transducer_rows_kernel(
    mask_ptr,  # [R] bool, or None for all rows
    rows_ptr,  # [R] int64, which of the new rows; None for the same ones
    new,  # tensors of [outer, R, inner] each
    old,  # the same, or None
    target,  # the same
    inners,  # their `inner`
    sizes,  # outer times inner of each
    R,
    CHUNKS: tl.constexpr,  # programs that share a row
    BLOCK: tl.constexpr,
):
    """Write a row of the new tensors, or of the old ones where the mask does not say so."""
    r, chunk = (tl.program_id(0) // CHUNKS).to(tl.int64), tl.program_id(0) % CHUNKS
    if mask_ptr is None:
        row = tl.load(rows_ptr + r)
        copy_row(new, target, row, r, inners, sizes, R, chunk, CHUNKS, BLOCK)
    elif tl.load(mask_ptr + r):
        copy_row(new, target, r, r, inners, sizes, R, chunk, CHUNKS, BLOCK)
    elif old is not None:
        copy_row(old, target, r, r, inners, sizes, R, chunk, CHUNKS, BLOCK)
