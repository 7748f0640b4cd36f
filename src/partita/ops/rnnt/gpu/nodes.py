"""From logits to the arcs of the nodes: log-sum-exps, the scores of blank and label, and all kinds.

The scores of blank and label at each node become the arcs of all kinds: those of the blank with
each of K durations, and then those of the label. In RNN-T both have one duration without a
probability. The scan of the loss reads probabilities as words (see `arc_words.py`), and the scan of
the best path reads scores.

A scan reads some rows before and after its chunk. Those before it must have the probability 0,
because NaN would reach the states. In the same kind they have it, as arcs that leave the lattice
do. So each kind ends with a margin of probability 0, and the first one follows one.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, finite_shift
from .arc_rows import HAS_NAN, num_kinds
from .arc_words import IMPOSSIBLE, IMPOSSIBLE_ARC, arc_word, exp2_parts, exp_parts, sum_of_terms
from .lattice import (
    LN2_FP32,
    MARGIN,
    SIZES,
    lattice_sizes,
    load_sequence,
    log2_units,
    log_sum,
    node_offset,
)
from .rows import ROWS, is_huge, program_nodes, row_normalizer, step_offset


class NodeSource(NamedTuple):
    """The tensors and numbers from which the arcs of the nodes of a step are computed.

    Fields:
        logits: the logits.
        origin, stride_u: the offset of the step in these, and their stride over u.
        labels_ptr, target_stride: the labels, `[B, U]`.
        blank: the class of the blank.
        sigma, delay_penalty: see `launch.LatticeCall`.
    """

    logits: tl.tensor
    origin: tl.tensor
    stride_u: tl.tensor
    labels_ptr: tl.tensor
    target_stride: tl.tensor
    blank: tl.tensor
    sigma: tl.tensor
    delay_penalty: tl.tensor


@triton.jit
def log_sigmoid(x):
    """Return log(1 / (1 + e**-x)) in fp64."""
    term = tl.exp(-tl.abs(x))
    total = 1.0 + term
    # The last term is what the sum has lost by rounding.
    return tl.where(x < 0.0, x, 0.0) - (tl.log(total) + (term - (total - 1.0)) / total)


@triton.jit
def score_arcs(
    source,
    node,
    sequence,
    V,
    FUSED: tl.constexpr,
    HAT: tl.constexpr,
    TILE: tl.constexpr,  # RowTile
    DTYPE: tl.constexpr,
):
    """Return the scores of blank and label for some nodes, and store their log-sum-exps.

    Nodes outside of the lengths are not read, and have any scores.
    """
    logits_ptr, stride_v, lse_ptr = source.logits
    origin, stride_u = source.origin, source.stride_u
    length, target_len = sequence.length, sequence.target_len
    lane = tl.arange(0, ROWS)
    u = node.first_u + lane
    mask = u <= target_len
    has_label = u < target_len
    label_ptr = source.labels_ptr + node.b.to(tl.int64) * source.target_stride + u
    label = tl.load(label_ptr, mask=has_label, other=0)
    label = tl.where((label >= 0) & (label < V), label, 0).to(tl.int64)
    start = origin + u.to(tl.int64) * stride_u
    at_blank = start + tl.cast(source.blank, tl.int64) * stride_v
    blank_x = tl.load(logits_ptr + at_blank, mask=mask, other=0.0).to(tl.float64)
    label_x = tl.load(logits_ptr + start + label * stride_v, mask=mask, other=0.0).to(tl.float64)
    blank_score, label_score = log2_units(blank_x, DTYPE), log2_units(label_x, DTYPE)
    if FUSED:
        maxima, totals = tl.zeros([ROWS], DTYPE), tl.zeros([ROWS], tl.float64)
        for r in range(0, tl.minimum(ROWS, target_len + 1 - node.first_u)):
            row_start = origin + (node.first_u + r).to(tl.int64) * stride_u
            maximum, total = row_normalizer(
                logits_ptr, row_start, stride_v, V, source.blank, HAT, TILE, DTYPE
            )
            is_row = lane == r
            maxima, totals = tl.where(is_row, maximum, maxima), tl.where(is_row, total, totals)
        # What exponents are relative to is subtracted first, because it is near the scores.
        shifts = (finite_shift(maxima) * LOG2E).to(tl.float64)
        if DTYPE != tl.float64:  # See `rows.row_factor` for huge rows.
            shifts = tl.where(is_huge(maxima), log2_units(maxima.to(tl.float64), DTYPE), shifts)
        log2_totals = log_sum(totals, DTYPE) * LOG2E
        if lse_ptr is not None:
            # The inverse of `log2_units`.
            lse = (shifts + log2_totals) * (LN2 if DTYPE == tl.float64 else LN2_FP32)
            lse_dtype: tl.constexpr = lse_ptr.dtype.element_ty
            tl.store(lse_ptr + node.index + lane, lse.to(lse_dtype), mask=mask)
        label_score = (label_score - shifts) - log2_totals
        if HAT:
            label_score += log_sigmoid(-blank_x) * LOG2E
            # Without a possible label the total is 0.
            label_score = tl.where(totals == 0.0, -float("inf"), label_score)
            blank_score = log_sigmoid(blank_x) * LOG2E
        else:
            blank_score = (blank_score - shifts) - log2_totals
    delay = 0.5 * (length - 1).to(tl.float64) - node.t.to(tl.float64)
    label_score += delay * source.delay_penalty * LOG2E
    return blank_score - source.sigma * LOG2E, label_score - source.sigma * LOG2E


@triton.jit(do_not_specialize=SIZES)
def rnnt_nodes_kernel(
    logits,  # Logits, all of them or those of some steps
    targets,  # Targets
    blanks_ptr,  # [B, num_chunks, rows, 32] fp64: log2 of the probability of the blank
    labels_ptr,  # the same of the label
    first_step,  # the first step in `logits`, counted over all sequences
    T,
    B,
    U1,
    V,
    num_chunks,
    blank,
    sigma: tl.float64,  # subtracted from both arcs
    delay_penalty: tl.float64,
    target_stride,
    stride_b,
    stride_t,
    stride_u,
    FUSED: tl.constexpr,  # whether to normalize the logits
    HAT: tl.constexpr,
    TILE: tl.constexpr,  # RowTile
    DTYPE: tl.constexpr,
):
    """Compute the log-sum-exps and the scores of the arcs of some nodes.

    Nodes beyond the lengths are neither read nor written.
    """
    node = program_nodes(first_step, T, U1)
    sequence = load_sequence(node.b, targets.lengths, T, U1)
    if (node.t >= sequence.length) | (node.first_u > sequence.target_len):
        return
    origin = step_offset(node, first_step, stride_b, stride_t)
    options = (targets.labels, target_stride, blank, sigma, delay_penalty)
    source = NodeSource(logits, origin, stride_u, *options)
    blank_score, label_score = score_arcs(source, node, sequence, V, FUSED, HAT, TILE, DTYPE)
    u = node.first_u + tl.arange(0, ROWS)
    mask = u <= sequence.target_len
    offset = node_offset(node.b, node.t, u, lattice_sizes(T, B, U1, num_chunks))
    tl.store(blanks_ptr + offset, blank_score, mask=mask)
    tl.store(labels_ptr + offset, label_score, mask=mask)


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
def duration_probabilities(durations, node, mask, K: tl.constexpr, DTYPE: tl.constexpr):
    """Return the durations' probabilities for some nodes as a tuple, and store log-sum-exps.

    A probability is a factor and an exponent of 2; see `arc_words.probability_block`.
    """
    logits = ()
    for k in tl.static_range(K):
        logits = logits + (tl.load(durations.ptr + node * K + k, mask=mask, other=0.0),)
    maximum = logits[0].to(tl.float64)  # type: ignore[misc]
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
    if durations.lse_ptr is not None:
        lse = (maximum + log_sum(total, DTYPE)).to(durations.lse_ptr.dtype.element_ty)
        tl.store(durations.lse_ptr + node, lse, mask=mask)
    return probabilities


@triton.jit(do_not_specialize=SIZES)
def rnnt_arcs_kernel(
    arcs_ptr,  # [kinds, B, num_chunks, rows, 32] fp64, or int64 if awaited; a margin is before it
    durations,  # Durations
    lengths,  # Lengths
    flags_ptr,  # [B] int64, zero; or None for scores and awaited arcs
    T,
    B,
    U1,
    num_chunks,
    CODE: tl.constexpr,  # the kinds of arcs; see `arc_rows.py`
    PRECISE: tl.constexpr,  # see `arc_words.py`
    BLOCK: tl.constexpr,  # nodes of a program, which are some rows of a chunk
):
    """Compute the arcs of some nodes, in the memory that has the scores of blank and label.

    These are in the first kind of blanks and the first of labels. Arcs that leave the lattice have
    the probability 0, also those of nodes beyond the lengths, and so have the margins, which the
    programs after those of the last sequence write. Words flag a sequence in which an arc is NaN.
    The words of arcs that other programs write while a scan awaits them become 0.
    """
    AWAITED: tl.constexpr = arcs_ptr.dtype.element_ty == tl.int64
    WORDS: tl.constexpr = flags_ptr is not None
    K: tl.constexpr = num_kinds(CODE) // 2
    sizes = lattice_sizes(T, B, U1, num_chunks)
    program, blocks = tl.program_id(0), tl.cdiv(sizes.rows * 32, BLOCK)
    chunk, block = program // blocks, program % blocks
    index = block * BLOCK + tl.arange(0, BLOCK)
    t, u = index // 32 - index % 32, chunk % num_chunks * 32 + index % 32
    # The programs after those of the last chunk have the margin after it.
    is_margin = index * 0 + chunk >= B * num_chunks
    b, chunk_offset = tl.minimum(chunk // num_chunks, B - 1), chunk.to(tl.int64) * sizes.rows * 32
    sequence = load_sequence(b, lengths, T, U1)
    mask = (t >= 0) & (t < sequence.length) & (u <= sequence.target_len) & (is_margin == 0)
    offset, in_array = chunk_offset + index, index < sizes.rows * 32
    if not AWAITED:
        factors = ((t * 0.0 + 1.0, t * 0),)
        if durations.ptr is not None:
            DTYPE: tl.constexpr = tl.float64 if PRECISE else tl.float32
            node = (b.to(tl.int64) * T + t) * U1 + u
            factors = duration_probabilities(durations, node, mask, K, DTYPE)
        blank = tl.load(arcs_ptr + offset, mask=mask, other=0.0)
        label = tl.load(arcs_ptr + K * sizes.nodes + offset, mask=mask, other=0.0)
        tokens = (exp2_parts(blank), exp2_parts(label)) if WORDS else (blank, label)
    has_nan = mask & is_margin
    for i in tl.static_range(2 * K):
        valid = mask & stays(t, u, (CODE >> (8 * i)) & 127, sequence, i >= K)
        # No scan reads blanks of duration 0, but the margin after them.
        is_read = in_array if (CODE >> (8 * i)) & 255 else is_margin
        if AWAITED:
            arc = tl.where(valid, 0, IMPOSSIBLE_ARC)
        elif WORDS:
            word, is_nan = arc_word(tokens[i // K], factors[i % K], valid & is_read, PRECISE)
            arc, has_nan = word.to(tl.float64, bitcast=True), has_nan | is_nan
        else:
            factor, exponent = factors[i % K]
            score = tl.log2(factor) + exponent.to(tl.float64)
            score = tokens[i // K] + tl.where(exponent == IMPOSSIBLE, -float("inf"), score)
            arc = tl.where(valid, score, -float("inf"))
        tl.store(arcs_ptr + i * sizes.nodes + offset, arc, mask=is_read)
        if i == 0:  # The margin before this kind is like the one after it.
            in_margin = offset - (sizes.nodes - MARGIN)
            is_before = is_margin & in_array & (in_margin < MARGIN)
            tl.store(arcs_ptr - MARGIN + in_margin, arc, mask=is_before)
    if WORDS:
        flag = index * 0 + HAS_NAN
        tl.atomic_or(flags_ptr + b + index * 0, flag, mask=has_nan, sem="relaxed")
