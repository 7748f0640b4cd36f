"""The Viterbi scan over small tables, with register-resident states and backpointers.

Under Max, alpha runs up and beta runs down at the same time. Both store backpointers that lead
outward from the meeting point, and `resident_path.py` follows them.

Ties have a promised order: the lowest best final state, then the lowest edge into each state on
the way back. Beta breaks ties in another order. So a backpointer also says whether its edge has
an equal. A chain whose best path has a tie is marked and runs again FORWARD_ONLY: alpha takes all
steps, and the first of equal edges is the promised one.

A backpointer is an int16: the lane of the state at the other end of the best edge (bits 0 to 9),
the index of the edge among the edges of its lane (bits 10 to 13), and the tie flag (bit 14).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .resident_steps import (
    StepRows,
    gather_neighbors,
    gather_scores,
    load_boundary,
    load_edge_table,
    load_lanes,
    load_rows,
    log_step,
    pack_compensated,
    rows_from,
    skip_rows,
    split_blocks,
    split_fp64,
    store_row,
)
from .steps import load_length

LANE_MASK = tl.constexpr(1023)
EDGE_SHIFT = tl.constexpr(10)
TIE_FLAG = tl.constexpr(1 << 14)


@gluon.jit
def max_step(value, scores, neighbors, shape):
    """Compute the states after a step under Max, fp64, and their backpointers."""
    DEGREE: gl.constexpr = shape.DEGREE
    neighbor_values, neighbor_lanes = gather_neighbors(value, neighbors, shape)
    values, pointers = (), ()
    for k in gl.static_range(DEGREE):
        term = neighbor_values[k] + scores[k].to(gl.float64)
        values = values + (
            term if shape.REGULAR else gl.where(neighbor_lanes[k] >= 0, term, -float("inf")),
        )
        pointers = pointers + (neighbor_lanes[k] | (k << EDGE_SHIFT),)
    return first_argmax(values, pointers, DEGREE)


@gluon.jit
def first_argmax(values, pointers, TERMS: gl.constexpr):
    """Return the first of the greatest values and its backpointer.

    The backpointer has the tie flag if several values are the greatest.
    """
    if TERMS == 1:
        return values[0], pointers[0]
    else:
        half: gl.constexpr = TERMS // 2
        a, first = first_argmax(values[:half], pointers[:half], half)
        b, second = first_argmax(values[half:], pointers[half:], TERMS - half)
        return gl.where(b > a, b, a), gl.where(
            b > a, second, gl.where(a == b, first | TIE_FLAG, first)
        )


@triton.jit
def num_direction_steps(length, direction, FORWARD_ONLY: tl.constexpr):
    """Return how many steps a direction takes up to, or down to, the meeting point.

    With FORWARD_ONLY, alpha takes all steps.
    """
    middle = tl.maximum(length - 1, 0) // 2
    if FORWARD_ONLY:
        return length
    else:
        return tl.where(direction == 0, middle, tl.maximum(length - 1 - middle, 0))


@gluon.jit
def chain_resident_viterbi_kernel(
    chains,  # Chains with ResidentEdges
    has_tie_ptr,  # [N] int32: with FORWARD_ONLY, the chains that run
    middle_ptr,  # [2, N, BLOCK_C] fp64
    backpointers_ptr,  # [T, N, BLOCK_C] int16
    saved_ptr,  # [T + 1, N, C] int64 for alpha and beta under Log too, or None
    TRACE: gl.constexpr,
    FORWARD_ONLY: gl.constexpr,
    shape: gl.constexpr,  # ResidentShape
):
    """Scan alpha or beta to the meeting point under Max and store backpointers.

    With FORWARD_ONLY, scan alpha to the end, in marked chains. With `saved_ptr`, the same steps
    also do the work of `chain_resident_halves_kernel`, which would read the scores once more.
    """
    scores, table, initial, final, lengths_ptr, T, N = chains
    PREFETCH: gl.constexpr = shape.PREFETCH
    BLOCK_C: gl.constexpr = shape.BLOCK_C
    C = table.C
    if FORWARD_ONLY:
        n, direction = gl.program_id(0).to(gl.int64), gl.program_id(0) * 0
    else:
        n, direction = (gl.program_id(0) // 2).to(gl.int64), gl.program_id(0) % 2
    length, invalid = load_length(lengths_ptr, n, T)
    num_steps = num_direction_steps(length, direction, FORWARD_ONLY)
    if FORWARD_ONLY:
        num_steps = gl.where(gl.load(has_tie_ptr + n) != 0, num_steps, 0)
    sign, start = (1 - 2 * direction).to(gl.int64), gl.where(direction == 0, 0, length).to(gl.int64)
    backpointers_ptr += ((start - direction) * N + n) * BLOCK_C
    lane = gl.arange(0, BLOCK_C, shape.STATE)
    c, rows = load_lanes(scores, table, n, shape)
    rows = rows_from(rows, start - direction, sign)
    neighbors, edges = load_edge_table(table, direction, shape)
    value = load_boundary(initial.ptr + n * initial.n, c, initial.c, invalid)
    if not FORWARD_ONLY:
        if direction == 1:
            value = load_boundary(final.ptr + n * final.n, c, final.c, 0.0)
    backpointers = StepRows(backpointers_ptr, sign * N * BLOCK_C, lane, c >= 0)
    LOG: gl.constexpr = saved_ptr is not None
    state, saved = value, rows
    if LOG:
        saved = StepRows(saved_ptr + (start * N + n) * C, sign * N * C, c, c >= 0)
        state = pack_compensated(*split_fp64(value))
        saved = store_row(saved, state, (direction == 0) | (length > 0))
    prefetched, has_nan = load_rows(rows, num_steps, PREFETCH), (value != value).to(gl.int32)
    for i in range(0, num_steps, PREFETCH):
        edge_scores = gather_scores(prefetched, edges, shape)
        rows = skip_rows(rows, PREFETCH)
        prefetched = load_rows(rows, num_steps - i - PREFETCH, PREFETCH)
        for u in gl.static_range(PREFETCH):
            # Maxima skip NaN, and this test takes no part in the chain of dependent steps.
            lanes = split_blocks(neighbors, BLOCK_C, shape.PADDED_DEGREE, shape.STATE)
            for k in gl.static_range(shape.DEGREE):
                score = edge_scores[u][k].to(gl.float32)
                is_nan = score != score
                if not shape.REGULAR:
                    is_nan = is_nan & (lanes[k] >= 0)
                has_nan = has_nan | is_nan.to(gl.int32)
            next_value, backpointer = max_step(value, edge_scores[u], neighbors, shape)
            value = gl.where(i + u < num_steps, next_value, value)
            if TRACE:
                backpointers = store_row(backpointers, backpointer, i + u < num_steps)
            if LOG:
                next_state = log_step(state, edge_scores[u], neighbors, shape)[0]
                state = gl.where(i + u < num_steps, next_state, state)
                saved = store_row(saved, state, i + u < num_steps)
    value = gl.where(has_nan > 0, float("nan"), value)
    gl.store(middle_ptr + (direction * N + n) * BLOCK_C + lane, value)
