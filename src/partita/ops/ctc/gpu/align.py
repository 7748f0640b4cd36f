"""CTC's best alignment: a Viterbi scan in fp64, its backtrace, and the labels on the path.

The Viterbi scan goes forward through all steps, with one chunk of 32 target positions per program.
Each chunk hands the score of its last label to the next chunk. For each blank and label, a pointer
says how many states back the best path comes from: 0, 1 or 2. The backtrace follows these pointers
from the last step to the first. The last kernel reads each step's class, token and log-probability,
and sums the log-probabilities.
"""

import triton
import triton.language as tl
from triton.experimental import gluon

from ....primitives.gpu.math import log_exact
from .lanes import LaneKernel, lane_index
from .lattice import (
    INVALID,
    SIZES,
    boundary_states,
    load_chunk,
    load_lengths,
    program_index,
)
from .scores import load_priors, optional, priors_of, row_scores
from .state import pack_state, shift_lanes
from .steps import (
    CarryLinks,
    EmissionRows,
    Emissions,
    await_carries,
    carry_at,
    chunk_source,
    half_steps,
    prefetch_carries,
    prefetch_emissions,
)


@triton.jit
def keep_better(score, step_back, other, other_step_back):
    """Return the greater of two scores and the pointer that belongs to it; of equals the first."""
    is_better = other > score
    return tl.where(is_better, other, score), tl.where(is_better, other_step_back, step_back)


@triton.jit
def star_scores(loaded, lane):
    """Return the log-sum-exps of a block of steps, given the loaded ones; 0 without them."""
    if len(loaded) == 0:
        return lane.to(tl.float64) * 0.0
    else:
        return loaded[0].to(tl.float64) + log_exact(loaded[1]).to(tl.float64)


@triton.jit
def decode_scores(loaded, source, priors, p, padding, lane, BLOCK_T: tl.constexpr):
    """Return the scores of a block of steps in fp64, given the loaded rows.

    They are relative to the log-sum-exp, which is the score of the star. `priors` are those of
    label and blank, or empty.
    """
    blanks = tl.where(p + lane % BLOCK_T >= padding, loaded.blank, 0.0).to(tl.float64)
    if len(priors) > 0:
        blanks = tl.where(p + lane % BLOCK_T >= padding, blanks - priors[1], 0.0)
    labels = ()
    for u in tl.static_range(BLOCK_T):
        valid = source.has_label & (p + u >= padding)
        score = loaded.label[u].to(tl.float64)
        if len(priors) > 0:
            score -= priors[0]
        if len(source.is_star) > 0:
            star = tl.gather(star_scores(loaded.star, lane), lane * 0 + u, 0)
            score = tl.where(source.is_star[0], star, score)
        labels = labels + (tl.where(valid, score, -float("inf")),)
    return Emissions(labels, blanks, ())


@triton.jit
def load_label_priors(priors, lattice, blank, C):
    """Return the priors of each lane's label and of the blank, or an empty tuple without priors."""
    if len(priors) == 0:
        return ()
    else:
        # A star has none; any other class serves for it.
        label = tl.minimum(lattice.label, C - 1)
        return (load_priors(priors, label), load_priors(priors, blank))


@triton.jit
def viterbi_step(blank_score, label_score, carry, emissions, u, can_skip, lane):
    """Return the scores after step u of a block, and the pointers of blank and label, 4 bits."""
    before = shift_lanes((label_score,), carry, lane, -1, True)[0]
    into_blank, blank_pointer = keep_better(blank_score, lane * 0, before, 1)
    into_label, pointer = keep_better(label_score, lane * 0, blank_score, 1)
    skipping = tl.where(can_skip, before, -float("inf"))
    into_label, pointer = keep_better(into_label, pointer, skipping, 2)
    into_blank += tl.gather(emissions.blank, lane * 0 + u, 0)
    return into_blank, into_label + emissions.label[u], blank_pointer | (pointer << 2)


@triton.jit
def store_end_scores(ends_ptr, blank_score, label_score, position, target_len, lane):
    """Store the scores of the last blank and of the last label, if this chunk has them."""
    tl.store(ends_ptr + lane * 0, blank_score, mask=position == target_len)
    is_last_label = (position == target_len - 1) & (target_len > 0)
    tl.store(ends_ptr + 1 + lane * 0, label_score, mask=is_last_label)


@triton.jit(do_not_specialize=SIZES)
def ctc_viterbi_kernel(
    logits_ptr,  # [T, N, C]
    labels_ptr,  # [M]
    offsets_ptr,  # [N]
    input_lengths_ptr,  # [N]
    target_lengths_ptr,  # [N]
    pointers_ptr,  # [N, num_chunks, num_blocks, 32] int32: 8 steps, 2 bits each for blank, label
    ends_ptr,  # [N, 2] fp64
    carries_ptr,  # [num_chunks, N, num_blocks * 8] int64, zero
    flags_ptr,  # [N] int64, zero
    tile_counter_ptr,  # [1] int64, zero, or None
    priors_ptr,  # [C] or None
    maxima_ptr,  # [T, N], or None without a star and for log-probabilities
    sums_ptr,  # [T, N], or None likewise
    T,
    N,
    C,
    M,
    max_target_len,
    num_chunks,
    num_blocks,
    carry_steps,
    blank,
    stride_t,
    stride_n,
    stride_c,
    prior_scale,  # the bits of an fp64 number, or None without priors
    star,  # the label that is the star, or None
    BLOCK_T: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Scan a chunk of a target, and store the pointers of each step and the scores at the end."""
    index = program_index(tile_counter_ptr)
    chunk, n, lane = index // N, (index % N).to(tl.int64), lane_index(LAYOUT)
    length, target_len, offset, invalid = load_lengths(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, T, max_target_len, M
    )
    labels_ptr, star = labels_ptr + offset, optional(star)
    lattice, invalid_label = load_chunk(labels_ptr, chunk * 32, target_len, C, star, lane)
    if invalid | (tl.max(invalid_label.to(tl.int32), axis=0) > 0):
        tl.atomic_or(flags_ptr + n, INVALID, sem="relaxed")
    last, half = target_len // 32, half_steps(length * 0, length, stride_t, True, BLOCK_T)
    num_steps, chunk_stride = tl.where(chunk > last, 0, length), N.to(tl.int64) * carry_steps
    sent_ptr = carries_ptr + (chunk * N.to(tl.int64) + n) * carry_steps
    is_boundary_lane, has_previous = (lane == 31) & (chunk < last), (chunk > 0) & (num_steps > 0)
    links = CarryLinks(sent_ptr, sent_ptr - chunk_stride, chunk < last, has_previous)
    pointers_ptr += (n * num_chunks + chunk) * num_blocks * 32 + lane
    priors, normalizers = row_scores(priors_ptr, prior_scale, maxima_ptr, sums_ptr, n, N)
    rows = EmissionRows(logits_ptr + n * stride_n, stride_t, stride_c, (), normalizers)
    source = chunk_source(rows, lattice, blank, 0.0, True, 0)
    priors = load_label_priors(priors, lattice, blank, C)
    position = chunk * 32 + lane
    start = boundary_states(position, 0, lane, True)
    blank_score, label_score = start.blank[0], start.label[0]
    loaded = prefetch_emissions(source, half, 0, lane, True, BLOCK_T, 0)
    words = prefetch_carries(links.received_ptr, 0, has_previous, lane, BLOCK_T, True)
    padded_steps = num_steps + half.padding
    for p in range(0, tl.where(num_steps > 0, padded_steps, 0), BLOCK_T):
        words = await_carries(words, links, p, lane, BLOCK_T, True)
        emissions = decode_scores(loaded, source, priors, p, half.padding, lane, BLOCK_T)
        carries, pointers = words, lane * 0
        loaded = prefetch_emissions(source, half, p + BLOCK_T, lane, True, BLOCK_T, 0)
        has_carries = has_previous & (p + BLOCK_T < padded_steps)
        words = prefetch_carries(links.received_ptr, p + BLOCK_T, has_carries, lane, BLOCK_T, True)
        for u in tl.static_range(BLOCK_T):
            word = pack_state((label_score,), True)
            tl.store(sent_ptr + p + u + lane * 0, word, mask=is_boundary_lane)
            carry = carry_at(carries, lane * 0 + u, True)
            blank_score, label_score, step_pointers = viterbi_step(
                blank_score, label_score, carry, emissions, u, lattice.can_skip, lane
            )
            pointers = pointers | (step_pointers << (4 * u))
        tl.store(pointers_ptr + p // BLOCK_T * 32, pointers)
    # A state that is NaN stays so to the end, and maxima of its neighbours may skip it.
    has_nan = (blank_score != blank_score) | (label_score != label_score)
    flag = (lane * 0 + INVALID).to(tl.int64)
    tl.atomic_or(flags_ptr + n + lane * 0, flag, mask=has_nan, sem="relaxed")
    store_end_scores(ends_ptr + n * 2, blank_score, label_score, position, target_len, lane)


@triton.jit
def load_pointers(pointers_ptr, block, position, chunk_stride, lane):
    """Load the pointers of a block of steps for a position and the 31 before it, one per lane."""
    i = position - lane
    return tl.load(
        pointers_ptr + (i // 32).to(tl.int64) * chunk_stride + block * 32 + i % 32,
        mask=(i >= 0) & (block >= 0),
        other=0,
    )


BACKTRACE_SIZES = ["T", "N", "M", "max_target_len", "num_chunks", "num_blocks"]


@triton.jit(do_not_specialize=BACKTRACE_SIZES)
def ctc_backtrace_kernel(
    offsets_ptr,  # [N]
    input_lengths_ptr,  # [N]
    target_lengths_ptr,  # [N]
    pointers_ptr,  # [N, num_chunks, num_blocks, 32] int32
    ends_ptr,  # [N, 2] fp64
    flags_ptr,  # [N] int64
    states_ptr,  # [N, T] int32
    T,
    N,
    M,
    max_target_len,
    num_chunks,
    num_blocks,
    LAYOUT: tl.constexpr,
):
    """Write the state of each step: 2 · position, plus 1 on the label; -1 where there is no path.

    The pointers of 32 steps are loaded together, for the 32 positions that the path can visit.
    """
    n, lane = tl.program_id(0).to(tl.int64), lane_index(LAYOUT)
    length, target_len = load_lengths(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, T, max_target_len, M
    )[:2]
    blank_score, label_score = (
        tl.load(ends_ptr + 2 * n),
        tl.where(target_len > 0, tl.load(ends_ptr + 2 * n + 1), -float("inf")),
    )
    has_path = tl.where(
        tl.load(flags_ptr + n) == 0,
        tl.where(blank_score > -float("inf"), 1, tl.where(label_score > -float("inf"), 1, 0)),
        0,
    )
    chunk_stride, padding = num_blocks.to(tl.int64) * 32, (8 - length % 8) % 8
    pointers_ptr += n * num_chunks * chunk_stride
    states_ptr += n * T
    for t in range(0, tl.where(has_path > 0, 0, length), 32):
        tl.store(states_ptr + t + lane, lane * 0 - 1, mask=t + lane < length)
    for t in range(length, T, 32):
        tl.store(states_ptr + t + lane, lane * 0 - 1, mask=t + lane < T)
    position, on_label = (
        tl.where(label_score >= blank_score, target_len - 1, target_len) + lane * 0,
        tl.where(label_score >= blank_score, 1, 0) + lane * 0,
    )
    last = tl.where(has_path > 0, (length + padding) // 8, 0) - 1
    for block in range(last, -1, -4):
        base, states, words = position, lane * 0, ()
        for b in tl.static_range(4):
            words = words + (load_pointers(pointers_ptr, block - b, position, chunk_stride, lane),)
        for v in tl.static_range(32):
            states = tl.where(lane == v, 2 * position + on_label, states)
            word = tl.gather(words[v // 8], base - position, 0) >> (4 * (7 - v % 8))
            step_back = tl.where(on_label == 1, word >> 2, word) & 3
            position -= tl.where(step_back == 2 - (on_label == 0).to(tl.int32), 1, 0)
            on_label = tl.where(step_back == 1, 1 - on_label, on_label)
        step = block * 8 + 7 - lane - padding
        tl.store(states_ptr + step, states, mask=step >= 0)


@triton.jit
def path_score(
    n, ends_ptr, target_lengths_ptr, sums_ptr, num_blocks, invalid, BLOCK_T: tl.constexpr
):
    """Return the score of a sequence's best path, from the sums of its blocks of steps.

    It is -inf where there is no path.
    """
    blank_score, label_score = (
        tl.load(ends_ptr + 2 * n),
        tl.load(
            ends_ptr + 2 * n + 1, mask=tl.load(target_lengths_ptr + n) > 0, other=-float("inf")
        ),
    )
    total = tl.zeros([BLOCK_T], tl.float64)
    for first in range(0, num_blocks, BLOCK_T):
        i = first + tl.arange(0, BLOCK_T)
        total += tl.load(sums_ptr + i, mask=i < num_blocks, other=0.0, volatile=True)
    score, end = tl.sum(total, axis=0), tl.maximum(blank_score, label_score)
    return tl.where((end == -float("inf")) & (invalid == 0), end, score)


@triton.jit
def score_on_path(logits_ptr, stride_c, label, has_class, maxima_ptr, sums_ptr, t, n, N, priors):
    """Return the scores of the labels of steps in fp64; they are 0 where the label is no class."""
    score = tl.load(logits_ptr + label * stride_c, mask=has_class, other=0.0).to(tl.float64)
    if maxima_ptr is not None:
        maximum, sum_exp = (
            tl.load(maxima_ptr + t * N + n, mask=has_class, other=0.0),
            tl.load(sums_ptr + t * N + n, mask=has_class, other=1.0),
        )
        score = (score - maximum.to(tl.float64)) - log_exact(sum_exp).to(tl.float64)
    if len(priors) > 0:
        prior = load_priors(priors, tl.where(has_class, label, 0))
        score -= tl.where(has_class, prior, 0.0)
    return score


@triton.jit(do_not_specialize=["T", "N", "blank", "stride_t", "stride_n", "prior_scale", "star"])
def ctc_alignment_kernel(
    logits_ptr,  # [T, N, C]
    labels_ptr,  # [M]
    offsets_ptr,  # [N]
    target_lengths_ptr,  # [N]
    priors_ptr,  # [C] or None
    maxima_ptr,  # [T, N] or None
    sums_ptr,  # [T, N] or None
    flags_ptr,  # [N] int64
    ends_ptr,  # [N, 2] fp64
    states_ptr,  # [N, T] int32
    finished_ptr,  # [N] int64, zero
    block_sums_ptr,  # [N, blocks of T] fp64
    classes_ptr,  # [N, T] int64
    tokens_ptr,  # [N, T] int64
    scores_ptr,  # [N, T]
    score_ptr,  # [N]
    T,
    N,
    blank,
    stride_t,
    stride_n,
    stride_c,
    prior_scale,  # the bits of an fp64 number, or None without priors
    star,  # the label that is the star, or None
    BLOCK_T: tl.constexpr,
):
    """Write the class of each step, its index in the target, and its log-probability.

    The program that finishes a sequence last sums the log-probabilities in a fixed order.
    """
    n, block = (tl.program_id(0) % N).to(tl.int64), (tl.program_id(0) // N).to(tl.int64)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = t < T
    state = tl.load(states_ptr + n * T + t, mask=mask, other=-1)
    on_path, token = state >= 0, tl.where(state % 2 == 1, state // 2, -1)
    label = tl.load(
        labels_ptr + tl.load(offsets_ptr + n) + token, mask=on_path & (token >= 0), other=blank
    ).to(tl.int64)
    has_class = on_path
    if star is not None:
        has_class = on_path & (label != star)
    score = score_on_path(
        logits_ptr + t * stride_t + n * stride_n,
        stride_c,
        label,
        has_class,
        maxima_ptr,
        sums_ptr,
        t,
        n,
        N,
        priors_of(priors_ptr, prior_scale),
    )
    invalid = tl.load(flags_ptr + n)
    score = tl.where(on_path, score, 0.0) + tl.where(invalid >= 2, float("nan"), 0.0).to(tl.float64)
    tl.store(classes_ptr + n * T + t, tl.where(on_path, label, -1), mask=mask)
    tl.store(tokens_ptr + n * T + t, tl.where(on_path, token, -1).to(tl.int64), mask=mask)
    tl.store(scores_ptr + n * T + t, score.to(scores_ptr.dtype.element_ty), mask=mask)
    num_blocks = tl.cdiv(T, BLOCK_T)
    block_sums_ptr += n * num_blocks
    tl.store(block_sums_ptr + block, tl.sum(score, axis=0))
    tl.debug_barrier()
    if tl.atomic_add(finished_ptr + n, 1, sem="acq_rel") == num_blocks - 1:
        total = path_score(
            n, ends_ptr, target_lengths_ptr, block_sums_ptr, num_blocks, invalid, BLOCK_T
        )
        tl.store(score_ptr + n, total.to(score_ptr.dtype.element_ty))


ctc_viterbi_gluon_kernel = gluon.jit(ctc_viterbi_kernel.fn, do_not_specialize=SIZES)
VITERBI = LaneKernel(ctc_viterbi_kernel, ctc_viterbi_gluon_kernel)
ctc_backtrace_gluon_kernel = gluon.jit(ctc_backtrace_kernel.fn, do_not_specialize=BACKTRACE_SIZES)
BACKTRACE = LaneKernel(ctc_backtrace_kernel, ctc_backtrace_gluon_kernel)
