"""Token-and-duration transducers: the arcs, and the gradient in the logits of the durations.

The arcs of a node are those of the blank with each of K durations, and then those of the label.
Blanks of duration 0 have no arc. `DURATIONS` has the duration k in byte k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E, finite_shift
from .arc_words import IMPOSSIBLE_ARC, arc_word, exp2_parts, exp_parts, sum_of_terms
from .lattice import SIZES, load_sequence, log_sum
from .plan import MARGIN as MARGIN_ELEMENTS
from .scan import HAS_NAN

MARGIN = tl.constexpr(MARGIN_ELEMENTS)


@triton.jit
def score_durations(logits, K: tl.constexpr, DTYPE: tl.constexpr):
    """Return the durations' log-probabilities for some nodes, and their log-sum-exps."""
    values, log_probs = (), ()
    for k in tl.static_range(K):
        values = values + (logits[k].to(tl.float64),)
    maximum = values[0]  # type: ignore[misc]
    for k in tl.static_range(1, K):
        maximum = tl.where(values[k] > maximum, values[k], maximum)
    maximum = tl.where(maximum == -float("inf"), 0.0, maximum)
    total = tl.exp(values[0] - maximum)  # type: ignore[misc]
    for k in tl.static_range(1, K):
        total += tl.exp(values[k] - maximum)
    log_total = log_sum(total, DTYPE)
    for k in tl.static_range(K):
        log_probs = log_probs + (values[k] - maximum - log_total,)
    return log_probs, maximum + log_total


@triton.jit
def duration_probabilities(logits, K: tl.constexpr, DTYPE: tl.constexpr):
    """Return the durations' probabilities for some nodes as a tuple, and their log-sum-exps.

    A probability is a factor and an exponent of 2; see `arc_words.probability_block`.
    """
    maximum = logits[0].to(tl.float64)
    for k in tl.static_range(1, K):
        maximum = tl.maximum(maximum, logits[k].to(tl.float64))
    maximum = finite_shift(maximum)
    parts, probabilities, total = (), (), (maximum * 0.0).to(tl.int64)
    for k in tl.static_range(K):
        factor, exponent, term = exp_parts(logits[k].to(tl.float64) - maximum)
        parts, total = parts + ((factor, exponent),), total + term
    total = sum_of_terms(total)
    inverse = 1.0 / total
    for k in tl.static_range(K):
        probabilities = probabilities + ((parts[k][0] * inverse, parts[k][1]),)
    return probabilities, maximum + log_sum(total, DTYPE)


@triton.jit
def arc_of(token, duration, valid, WORDS: tl.constexpr, PRECISE: tl.constexpr):
    """Return an arc as a scan reads it, and whether it is valid and NaN.

    It is a word or a score, and that of the probability 0 where it is not valid.
    """
    if WORDS:
        return arc_word(token, duration, valid, PRECISE)
    else:
        score = token + duration * LOG2E
        return tl.where(valid, score, -float("inf")), valid & (score != score)


@triton.jit
def stays(t, u, duration, sequence, LABEL: tl.constexpr):
    """Return whether arcs from nodes stay in the lattice, or lead to the end of the path."""
    after = t + duration
    if LABEL:
        return (after < sequence.length) & (u < sequence.target_len)
    else:
        is_end = (after == sequence.length) & (u == sequence.target_len)
        return (after < sequence.length) | is_end


@triton.jit
def chunk_nodes(program, B, num_chunks, rows, BLOCK: tl.constexpr):
    """Return BLOCK elements of an array over the nodes, `[B, num_chunks, rows, 32]`.

    These are the sequence, steps and values of u, indices in the chunk, the offset of the chunk and
    whether they are the margin after the last chunk, which the programs after its own have.
    """
    blocks = tl.cdiv(rows * 32, BLOCK)
    chunk, block = program // blocks, program % blocks
    index = block * BLOCK + tl.arange(0, BLOCK)
    t, u = index // 32 - index % 32, chunk % num_chunks * 32 + index % 32
    is_margin = index * 0 + chunk >= B * num_chunks
    b = tl.minimum(chunk // num_chunks, B - 1)
    return b, t, u, index, chunk.to(tl.int64) * rows * 32, is_margin


@triton.jit(do_not_specialize=SIZES)
def tdt_arcs_kernel(
    durations,  # Logits of the durations, [B, T, U1, K]
    lengths,  # Lengths
    tokens_ptr,  # [2, B, num_chunks, rows, 32] fp64: scores of blank and label
    arcs_ptr,  # [2, K, B, num_chunks, rows, 32], words in int64 or scores in fp64
    flags_ptr,  # [B] int64, zero; or None for scores
    T,
    B,
    U1,
    num_chunks,
    rows,
    nodes: tl.int64,  # elements of an array over all nodes
    stride_b,
    stride_t,
    stride_u,
    DURATIONS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes of a program, which are some rows of a chunk
):
    """Compute the arcs of some nodes.

    Arcs that leave the lattice have the probability 0, also those of nodes beyond the lengths, and
    so have the margins, which the programs after those of the last sequence write. Words flag a
    sequence in which an arc is NaN.
    """
    WORDS: tl.constexpr = arcs_ptr.dtype.element_ty == tl.int64
    DTYPE: tl.constexpr = durations.ptr.dtype.element_ty
    b, t, u, index, chunk_offset, is_margin = chunk_nodes(
        tl.program_id(0), B, num_chunks, rows, BLOCK
    )
    sequence = load_sequence(b, lengths, T, U1)
    mask = (t >= 0) & (t < sequence.length) & (u <= sequence.target_len) & (is_margin == 0)
    offset, in_array = chunk_offset + index, index < rows * 32
    start = b.to(tl.int64) * stride_b + t.to(tl.int64) * stride_t + u.to(tl.int64) * stride_u
    logits = ()
    for k in tl.static_range(K):
        ptr = durations.ptr + start + k * tl.cast(durations.stride_v, tl.int64)
        logits = logits + (tl.load(ptr, mask=mask, other=0.0),)
    blank = tl.load(tokens_ptr + offset, mask=mask, other=0.0)
    label = tl.load(tokens_ptr + nodes + offset, mask=mask, other=0.0)
    if WORDS:
        factors, lse = duration_probabilities(logits, K, DTYPE)
        blank, label = exp2_parts(blank), exp2_parts(label)
    else:
        factors, lse = score_durations(logits, K, DTYPE)
    if durations.lse_ptr is not None:
        node = (b.to(tl.int64) * T + t) * U1 + u
        tl.store(durations.lse_ptr + node, lse.to(durations.lse_ptr.dtype.element_ty), mask=mask)
    has_nan = mask & (is_margin > 0)
    for k in tl.static_range(K):
        d = (DURATIONS >> (8 * k)) & 255
        # No scan reads blanks of duration 0, but the margin after them.
        valid = mask & stays(t, u, d, sequence, False) & (d > 0)
        arc, is_nan = arc_of(blank, factors[k], valid, WORDS, DTYPE == tl.float64)
        is_read = in_array if (DURATIONS >> (8 * k)) & 255 else is_margin
        tl.store(arcs_ptr + k * nodes + offset, arc, mask=is_read)
        if k == 0:  # The margin before this kind is like the one after it.
            in_margin = offset - (nodes - MARGIN)
            is_before = is_margin & in_array & (in_margin < MARGIN)
            tl.store(arcs_ptr - MARGIN + in_margin, arc, mask=is_before)
        has_nan = has_nan | is_nan
        valid = mask & stays(t, u, d, sequence, True)
        arc, is_nan = arc_of(label, factors[k], valid, WORDS, DTYPE == tl.float64)
        tl.store(arcs_ptr + (K + k) * nodes + offset, arc, mask=in_array)
        has_nan = has_nan | is_nan
    if WORDS:
        flag = index * 0 + HAS_NAN
        tl.atomic_or(flags_ptr + b + index * 0, flag, mask=has_nan, sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def tdt_words_kernel(
    words_ptr,  # int64: `zeros` words, a margin, and [2, K, B, num_chunks, rows, 32]
    lengths,  # Lengths
    zeros: tl.int64,
    T,
    B,
    U1,
    num_chunks,
    rows,
    nodes: tl.int64,  # elements of an array over all nodes
    DURATIONS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes of a program, which are some rows of a chunk
):
    """Prepare the words of a scan that waits for its arcs.

    The words of arcs that the kernel with the scan writes become 0. Those of arcs that leave the
    lattice and of all margins get the probability 0. The words before the first margin become 0.
    """
    programs = B * num_chunks * tl.cdiv(rows * 32, BLOCK) + MARGIN // BLOCK
    first = tl.program_id(0).to(tl.int64) - programs
    if first >= 0:
        word_index = first * BLOCK + tl.arange(0, BLOCK)
        word = tl.where(word_index < zeros, 0, IMPOSSIBLE_ARC)
        tl.store(words_ptr + word_index, word, mask=word_index < zeros + MARGIN)
    else:
        arcs_ptr = words_ptr + zeros + MARGIN
        b, t, u, index, chunk_offset, is_margin = chunk_nodes(
            tl.program_id(0), B, num_chunks, rows, BLOCK
        )
        sequence = load_sequence(b, lengths, T, U1)
        mask = (t >= 0) & (t < sequence.length) & (u <= sequence.target_len) & (is_margin == 0)
        offset, in_array = chunk_offset + index, index < rows * 32
        for k in tl.static_range(K):
            d = (DURATIONS >> (8 * k)) & 255
            is_written = in_array if (DURATIONS >> (8 * k)) & 255 else is_margin
            word = tl.where(mask & stays(t, u, d, sequence, False), 0, IMPOSSIBLE_ARC)
            tl.store(arcs_ptr + k * nodes + offset, word, mask=is_written)
            word = tl.where(mask & stays(t, u, d, sequence, True), 0, IMPOSSIBLE_ARC)
            tl.store(arcs_ptr + (K + k) * nodes + offset, word, mask=in_array)


@triton.jit
def store_duration_gradients(
    program,
    grad,
    durations,
    strides,
    posteriors_ptr,
    ddurations_ptr,
    sizes,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient in the logits of the durations of BLOCK nodes.

    `strides` are those of the logits over B, T and U1, and `sizes` are T, B and U1.
    """
    T, B, U1 = sizes
    dtype: tl.constexpr = posteriors_ptr.dtype.element_ty
    blocks = tl.cdiv(T * U1, BLOCK)
    b, block = (program // blocks).to(tl.int64), program % blocks
    index = block * BLOCK + tl.arange(0, BLOCK)
    t, u, mask = (index // U1).to(tl.int64), (index % U1).to(tl.int64), index < T * U1
    node, size = b * T * U1 + index, B.to(tl.int64) * T * U1
    scale = tl.load(grad.ptr + (b + index * 0) * grad.stride).to(dtype)
    read = mask & (scale != 0.0)
    arcs, total = (), tl.zeros([BLOCK], dtype)
    for k in tl.static_range(K):
        arc = tl.load(posteriors_ptr + (2 + k) * size + node, mask=read, other=0.0)
        arcs = arcs + (arc,)
        total += arc
    active = read & (total != 0.0)
    lse = tl.load(durations.lse_ptr + node, mask=active, other=0.0).to(tl.float64)
    start = b * strides[0] + t * strides[1] + u * strides[2]
    for k in tl.static_range(K):
        ptr = durations.ptr + start + k * tl.cast(durations.stride_v, tl.int64)
        x = tl.load(ptr, mask=active, other=0.0).to(tl.float64)
        softmax = tl.exp(x - lse) if dtype == tl.float64 else tl.exp((x - lse).to(tl.float32))
        d = tl.where(active, (total * softmax - arcs[k]) * scale, 0.0)
        tl.store(ddurations_ptr + node * K + k, d.to(ddurations_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def tdt_duration_gradient_kernel(
    grad,  # Upstream
    durations,  # Logits of the durations, [B, T, U1, K]
    posteriors_ptr,  # [2 + K, B, T, U1]
    ddurations_ptr,  # [B, T, U1, K]
    T,
    B,
    U1,
    stride_b,
    stride_t,
    stride_u,
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # nodes of a program
):
    """Write the gradient in the logits of the durations of some nodes."""
    strides, results = (stride_b, stride_t, stride_u), (posteriors_ptr, ddurations_ptr)
    store_duration_gradients(
        tl.program_id(0), grad, durations, strides, *results, (T, B, U1), K, BLOCK
    )
