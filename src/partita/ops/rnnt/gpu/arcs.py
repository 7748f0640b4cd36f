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

from .arc_rows import HAS_NAN, num_kinds
from .arc_words import IMPOSSIBLE_ARC, arc_word, duration_probabilities, exp2_parts, log2_of_parts
from .lattice import MARGIN, SIZES, lattice_sizes, load_sequence


@triton.jit
def arcs_exist(t, u, k, sequence, CODE: tl.constexpr, LABEL: tl.constexpr):
    """Return which arcs of the durations k leave nodes and stay in the lattice, `[N, WIDTH]`.

    An arc leads to a node, or as a blank from the last label to the end of the path. There are no
    blanks of duration 0.
    """
    K: tl.constexpr = num_kinds(CODE) // 2
    duration, u = k * 0, u[:, None]
    for i in tl.static_range(K):
        duration = tl.where(k == i, (CODE >> (8 * (i + LABEL * K))) & 127, duration)
    after = t[:, None] + duration
    if LABEL:
        return (k < K) & (after < sequence.length) & (u < sequence.target_len)
    else:
        is_end = (after == sequence.length) & (u == sequence.target_len)
        return (k < K) & (duration > 0) & ((after < sequence.length) | is_end)


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
    DTYPE: tl.constexpr = tl.float64 if PRECISE else tl.float32
    K: tl.constexpr = num_kinds(CODE) // 2
    WIDTH: tl.constexpr = triton.next_power_of_2(K)
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
    k = tl.arange(0, WIDTH)[None, :]  # the durations, of which each has a column
    is_kind = in_array[:, None] & (k < K)
    duration = tl.full([BLOCK, WIDTH], 1.0, tl.float64), tl.zeros([BLOCK, WIDTH], tl.int32)
    if not AWAITED:
        if durations.ptr is not None:
            node = (b.to(tl.int64) * T + t) * U1 + u
            ptr, read = durations.ptr + node[:, None] * K + k, mask[:, None] & (k < K)
            logits = tl.load(ptr, mask=read, other=-float("inf"))
            duration = duration_probabilities(durations, logits, node, mask, DTYPE)
        blank = tl.load(arcs_ptr + offset, mask=mask, other=0.0)
        label = tl.load(arcs_ptr + K * sizes.nodes + offset, mask=mask, other=0.0)
        tl.debug_barrier()  # Arcs replace these scores, and other threads may store them.
    has_nan = is_kind & (k < 0)
    for LABEL in tl.static_range(2):
        valid = mask[:, None] & arcs_exist(t, u, k, sequence, CODE, LABEL)
        if AWAITED:
            arc = tl.where(valid, 0, IMPOSSIBLE_ARC)
        elif WORDS:
            factor, exponent = exp2_parts(label if LABEL else blank)
            token = (factor[:, None], exponent[:, None])
            word, is_nan = arc_word(token, duration, valid, PRECISE)
            arc, has_nan = word.to(tl.float64, bitcast=True), has_nan | is_nan
        else:
            score = (label if LABEL else blank)[:, None] + log2_of_parts(*duration)
            arc = tl.where(valid, score, -float("inf"))
        kinds_ptr = arcs_ptr + (LABEL * K + k).to(tl.int64) * sizes.nodes
        tl.store(kinds_ptr + offset[:, None], arc, mask=is_kind)
        if LABEL == 0:  # The margin before the first kind is like the one after it.
            in_margin = offset - (sizes.nodes - MARGIN)
            is_before = is_margin & in_array & (in_margin < MARGIN)
            before_ptr = arcs_ptr - MARGIN + in_margin[:, None] + k
            tl.store(before_ptr, arc, mask=is_before[:, None] & (k == 0))
    if WORDS:
        lanes = index[:, None] * 0 + k * 0
        tl.atomic_or(flags_ptr + b + lanes, lanes + HAS_NAN, mask=has_nan, sem="relaxed")
