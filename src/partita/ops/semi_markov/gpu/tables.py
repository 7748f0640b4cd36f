"""Tables of transitions and durations in fp64, in the order in which the scans read them."""

import triton
import triton.language as tl


@triton.jit
def semi_markov_tables_kernel(
    transitions_ptr,  # [C, C]
    durations_ptr,  # [D, C]
    tables_ptr,  # fp64: [C, C] to and from, [C, C] from and to, [C, 2 * slots] durations
    C,
    D,
    slots,  # a power of 2, at least D
    trans_k,
    trans_c,
    dur_d,
    dur_c,
    BLOCK: tl.constexpr,
):
    """Copy the scores of transitions and durations to the tables.

    Entry j of a state's durations is that of the age -j mod slots, minus 1, and -inf past D. A step
    of a scan reads consecutive entries for the slots of its ring, wherever its newest slot is.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pairs = tl.full([], C, tl.int64) * C
    row, column = i % pairs // C, i % C
    is_alpha = i < pairs
    source, target = tl.where(is_alpha, column, row), tl.where(is_alpha, row, column)
    at = source * trans_k + target * trans_c
    is_pair = i < 2 * pairs
    score = tl.load(transitions_ptr + at, mask=is_pair, other=0.0).to(tl.float64)
    c, d = (i - 2 * pairs) // (2 * slots), (2 * slots - (i - 2 * pairs) % (2 * slots)) % slots
    is_duration = (i >= 2 * pairs) & (c < C)
    at = d * dur_d + c * dur_c
    duration = tl.load(durations_ptr + at, mask=is_duration & (d < D), other=-float("inf"))
    score = tl.where(is_pair, score, duration.to(tl.float64))
    tl.store(tables_ptr + i, score, mask=is_pair | is_duration)
