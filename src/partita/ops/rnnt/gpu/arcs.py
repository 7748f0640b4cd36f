"""The arcs of the nodes, as the scans read them.

The scores of blank and label at each node (see `nodes.py`) become the arcs of all kinds: those of
the blank with each of K durations, and then those of the label. In RNN-T both have one duration
without a probability. The scan of the loss reads probabilities as words (see `arc_words.py`), and
the scan of the best path reads scores.

A scan reads some rows before and after its chunk. Those before it must have the probability 0,
because NaN would reach the states. In the same kind they have it, as arcs that leave the lattice
do. So each kind ends with a margin of probability 0, and the first one follows one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .arc_rows import HAS_NAN, num_kinds
from .arc_words import IMPOSSIBLE_ARC, arc_word, exp2_parts, exp_parts, log2_of_parts, sum_of_terms
from .lattice import MARGIN, SIZES, lattice_sizes, load_sequence, log_sum


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
            score = tokens[i // K] + log2_of_parts(*factors[i % K])
            arc = tl.where(valid, score, -float("inf"))
        tl.store(arcs_ptr + i * sizes.nodes + offset, arc, mask=is_read)
        if i == 0:  # The margin before this kind is like the one after it.
            in_margin = offset - (sizes.nodes - MARGIN)
            is_before = is_margin & in_array & (in_margin < MARGIN)
            tl.store(arcs_ptr - MARGIN + in_margin, arc, mask=is_before)
    if WORDS:
        flag = index * 0 + HAS_NAN
        tl.atomic_or(flags_ptr + b + index * 0, flag, mask=has_nan, sem="relaxed")
