"""CTC's best alignment on a GPU: a Viterbi scan in fp64, its backtrace, and the labels on the path.

The Viterbi scan goes forward through all steps, with one chunk of 32 target positions per program.
Each chunk hands the score of its last label to the next chunk. For each blank and label, a pointer
says how many states back the best path comes from: 0, 1 or 2. The backtrace follows these pointers
from the last step to the first. The last kernel reads each step's class, token and log-probability,
and sums the log-probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon

from ....primitives.gpu.math import log_exact
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, zeroed_words
from ..common import CTCInputs
from .lanes import LaneKernel, lane_index, launch_lanes
from .lattice import (
    INVALID,
    SIZES,
    TargetScan,
    boundary_states,
    load_chunk,
    load_lengths,
    program_index,
)
from .launch import contiguous, launch_normalize, numbers_of, target_tensors
from .plan import CHUNK, SAVE_EVERY
from .scores import EmissionRows, Priors, ScoreTensors, load_priors, sequence_rows
from .state import pack_state, shift_lanes, unpack_state
from .steps import (
    CarryLinks,
    await_carries,
    chunk_source,
    half_steps,
    prefetch_carries,
    prefetch_emissions,
)

ALIGNMENT_STEPS = 256  # steps of a program of the alignment kernel


class BestPaths(NamedTuple):
    """The results of the Viterbi scan.

    Fields:
        pointers: `[N, num_chunks, num_blocks, 32]` int32, by position: two bits for the blank and
            two for the label at each of 8 steps.
        ends: `[N, 2]` fp64, the scores of the last blank and the last label after all steps.
        flags: `[N]` int64, see `INVALID`.
    """

    pointers: tl.tensor
    ends: tl.tensor
    flags: tl.tensor


@triton.jit
def keep_better(score, step_back, other, other_step_back):
    """Return the greater of two scores and the pointer that belongs to it; of equals the first."""
    is_better = other > score
    return tl.where(is_better, other, score), tl.where(is_better, other_step_back, step_back)


@triton.jit(do_not_specialize=SIZES)
def ctc_viterbi_kernel(
    scores,  # ScoreTensors; the normalizers are those of a star
    targets,  # TargetTensors
    paths,  # BestPaths; the flags are zero
    carries_ptr,  # [num_chunks, N, num_blocks * 8] int64, zero
    tile_counter_ptr,  # [1] int64, zero, or None
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
    LAYOUT: tl.constexpr,
):
    """Scan a chunk of a target, and store the pointers of each step and the scores at the end.

    Scores of classes are relative to the log-sum-exp, which is the score of the star.
    """
    BLOCK_T: tl.constexpr = 8
    index = program_index(tile_counter_ptr)
    chunk, n, lane = index // N, (index % N).to(tl.int64), lane_index(LAYOUT)
    length, target_len, offset, invalid = load_lengths(targets, n, T, max_target_len, M)
    target = TargetScan(targets.labels + offset, length, target_len, C, blank, 0.0, star)
    lattice, invalid_label = load_chunk(target, chunk, lane)
    if invalid | (tl.max(invalid_label.to(tl.int32), axis=0) > 0):
        tl.atomic_or(paths.flags + n, INVALID, sem="relaxed")
    last, half = target_len // 32, half_steps(length * 0, length, stride_t, True, BLOCK_T)
    num_steps, chunk_stride = tl.where(chunk > last, 0, length), N.to(tl.int64) * carry_steps
    sent_ptr = carries_ptr + (chunk * N.to(tl.int64) + n) * carry_steps
    is_boundary_lane, has_previous = (lane == 31) & (chunk < last), (chunk > 0) & (num_steps > 0)
    links = CarryLinks(sent_ptr, sent_ptr - chunk_stride, chunk < last, has_previous)
    pointers_ptr = paths.pointers + ((n * num_chunks + chunk) * num_blocks * 32 + lane)
    rows = sequence_rows(scores, stride_t, stride_n, stride_c, prior_scale, n, N)
    without_priors = EmissionRows(rows.ptr, stride_t, stride_c, (), rows.normalizers)
    source = chunk_source(without_priors, lattice, target, True, 0)
    if len(rows.priors) > 0:
        # A star has no prior; that of any class serves for it.
        label_prior = load_priors(rows.priors, tl.minimum(lattice.label, C - 1))
        blank_prior = load_priors(rows.priors, blank)
    position = chunk * 32 + lane
    start = boundary_states(position, 0, lane, True)
    blank_score, label_score = start.blank[0], start.label[0]
    loaded = prefetch_emissions(source, half, 0, lane, True, BLOCK_T, 0)
    words = prefetch_carries(links.received_ptr, 0, has_previous, lane, BLOCK_T, True)
    padded_steps = num_steps + half.padding
    for p in range(0, tl.where(num_steps > 0, padded_steps, 0), BLOCK_T):
        words = await_carries(words, links, p, lane, BLOCK_T, True)
        is_step = p + lane % BLOCK_T >= half.padding
        blanks, labels = tl.where(is_step, loaded.blank, 0.0).to(tl.float64), ()
        if len(rows.priors) > 0:
            blanks = tl.where(is_step, blanks - blank_prior, 0.0)
        for u in tl.static_range(BLOCK_T):
            valid = lattice.has_label & (p + u >= half.padding)
            score = loaded.label[u].to(tl.float64)
            if len(rows.priors) > 0:
                score -= label_prior
            if len(lattice.is_star) > 0:
                star_score = lane.to(tl.float64) * 0.0
                if len(loaded.star) > 0:
                    star_score = loaded.star[0].to(tl.float64)
                    star_score += log_exact(loaded.star[1]).to(tl.float64)
                star_score = tl.gather(star_score, lane * 0 + u, 0)
                score = tl.where(lattice.is_star[0], star_score, score)
            labels = labels + (tl.where(valid, score, -float("inf")),)
        carries, pointers = words, lane * 0
        loaded = prefetch_emissions(source, half, p + BLOCK_T, lane, True, BLOCK_T, 0)
        has_carries = has_previous & (p + BLOCK_T < padded_steps)
        words = prefetch_carries(links.received_ptr, p + BLOCK_T, has_carries, lane, BLOCK_T, True)
        for u in tl.static_range(BLOCK_T):
            word = pack_state((label_score,), True)
            tl.store(sent_ptr + p + u + lane * 0, word, mask=is_boundary_lane)
            carry = unpack_state(tl.gather(carries, lane * 0 + u, 0), True)
            before = shift_lanes((label_score,), carry, lane, -1, True)[0]
            into_blank, blank_pointer = keep_better(blank_score, lane * 0, before, 1)
            into_label, pointer = keep_better(label_score, lane * 0, blank_score, 1)
            skipping = tl.where(lattice.can_skip, before, -float("inf"))
            into_label, pointer = keep_better(into_label, pointer, skipping, 2)
            blank_score = into_blank + tl.gather(blanks, lane * 0 + u, 0)
            label_score = into_label + labels[u]
            pointers = pointers | ((blank_pointer | (pointer << 2)) << (4 * u))
        tl.store(pointers_ptr + p // BLOCK_T * 32, pointers)
    # A state that is NaN stays so to the end, and maxima of its neighbours may skip it.
    has_nan = (blank_score != blank_score) | (label_score != label_score)
    flag = (lane * 0 + INVALID).to(tl.int64)
    tl.atomic_or(paths.flags + n + lane * 0, flag, mask=has_nan, sem="relaxed")
    ends_ptr = paths.ends + n * 2
    tl.store(ends_ptr + lane * 0, blank_score, mask=position == target_len)
    is_last_label = (position == target_len - 1) & (target_len > 0)
    tl.store(ends_ptr + 1 + lane * 0, label_score, mask=is_last_label)


BACKTRACE_SIZES = ["T", "N", "M", "max_target_len", "num_chunks", "num_blocks"]


@triton.jit(do_not_specialize=BACKTRACE_SIZES)
def ctc_backtrace_kernel(
    targets,  # TargetTensors without labels
    paths,  # BestPaths
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
    length, target_len = load_lengths(targets, n, T, max_target_len, M)[:2]
    blank_score, label_score = (
        tl.load(paths.ends + 2 * n),
        tl.where(target_len > 0, tl.load(paths.ends + 2 * n + 1), -float("inf")),
    )
    has_path = tl.where(
        tl.load(paths.flags + n) == 0,
        tl.where(blank_score > -float("inf"), 1, tl.where(label_score > -float("inf"), 1, 0)),
        0,
    )
    chunk_stride, padding = num_blocks.to(tl.int64) * 32, (8 - length % 8) % 8
    pointers_ptr = paths.pointers + n * num_chunks * chunk_stride
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
            i, step_block = base - lane, block - b
            mask = (i >= 0) & (step_block >= 0)
            ptrs = pointers_ptr + (i // 32).to(tl.int64) * chunk_stride + step_block * 32 + i % 32
            words = words + (tl.load(ptrs, mask=mask, other=0),)
        for v in tl.static_range(32):
            states = tl.where(lane == v, 2 * position + on_label, states)
            word = tl.gather(words[v // 8], base - position, 0) >> (4 * (7 - v % 8))
            step_back = tl.where(on_label == 1, word >> 2, word) & 3
            position -= tl.where(step_back == 2 - (on_label == 0).to(tl.int32), 1, 0)
            on_label = tl.where(step_back == 1, 1 - on_label, on_label)
        step = block * 8 + 7 - lane - padding
        tl.store(states_ptr + step, states, mask=step >= 0)


ALIGNMENT_SIZES = ["T", "N", "blank", "stride_t", "stride_n", "prior_scale", "star"]


@triton.jit(do_not_specialize=ALIGNMENT_SIZES)
def ctc_alignment_kernel(
    scores,  # ScoreTensors
    targets,  # TargetTensors without input lengths
    paths,  # BestPaths without pointers
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

    The program that finishes a sequence last sums the log-probabilities in a fixed order. The sum
    is -inf where there is no path.
    """
    n, block = (tl.program_id(0) % N).to(tl.int64), (tl.program_id(0) // N).to(tl.int64)
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = t < T
    state = tl.load(states_ptr + n * T + t, mask=mask, other=-1)
    on_path, token = state >= 0, tl.where(state % 2 == 1, state // 2, -1)
    has_token = on_path & (token >= 0)
    label_ptrs = targets.labels + tl.load(targets.offsets + n) + token
    label = tl.load(label_ptrs, mask=has_token, other=blank).to(tl.int64)
    has_class = on_path
    if star is not None:
        has_class = on_path & (label != star)
    ptrs = scores.rows + t * stride_t + n * stride_n + label * stride_c
    score = tl.load(ptrs, mask=has_class, other=0.0).to(tl.float64)
    if scores.maxima is not None:
        maximum = tl.load(scores.maxima + t * N + n, mask=has_class, other=0.0)
        sum_exp = tl.load(scores.sums + t * N + n, mask=has_class, other=1.0)
        score = (score - maximum.to(tl.float64)) - log_exact(sum_exp).to(tl.float64)
    if scores.priors is not None:
        prior = load_priors(Priors(scores.priors, prior_scale), tl.where(has_class, label, 0))
        score -= tl.where(has_class, prior, 0.0)
    invalid = tl.load(paths.flags + n)
    score = tl.where(on_path, score, 0.0) + tl.where(invalid >= 2, float("nan"), 0.0).to(tl.float64)
    tl.store(classes_ptr + n * T + t, tl.where(on_path, label, -1), mask=mask)
    tl.store(tokens_ptr + n * T + t, tl.where(on_path, token, -1).to(tl.int64), mask=mask)
    tl.store(scores_ptr + n * T + t, score.to(scores_ptr.dtype.element_ty), mask=mask)
    num_blocks = tl.cdiv(T, BLOCK_T)
    block_sums_ptr += n * num_blocks
    tl.store(block_sums_ptr + block, tl.sum(score, axis=0))
    tl.debug_barrier()
    if tl.atomic_add(finished_ptr + n, 1, sem="acq_rel") == num_blocks - 1:
        blank_end, has_label = tl.load(paths.ends + 2 * n), tl.load(targets.target_lengths + n) > 0
        label_end = tl.load(paths.ends + 2 * n + 1, mask=has_label, other=-float("inf"))
        sums = tl.zeros([BLOCK_T], tl.float64)
        for first in range(0, num_blocks, BLOCK_T):
            i = first + tl.arange(0, BLOCK_T)
            sums += tl.load(block_sums_ptr + i, mask=i < num_blocks, other=0.0, volatile=True)
        total, end = tl.sum(sums, axis=0), tl.maximum(blank_end, label_end)
        total = tl.where((end == -float("inf")) & (invalid == 0), end, total)
        tl.store(score_ptr + n, total.to(score_ptr.dtype.element_ty))


ctc_viterbi_gluon_kernel = gluon.jit(ctc_viterbi_kernel.fn, do_not_specialize=SIZES)
VITERBI = LaneKernel(ctc_viterbi_kernel, ctc_viterbi_gluon_kernel)
ctc_backtrace_gluon_kernel = gluon.jit(ctc_backtrace_kernel.fn, do_not_specialize=BACKTRACE_SIZES)
BACKTRACE = LaneKernel(ctc_backtrace_kernel, ctc_backtrace_gluon_kernel)


def ctc_align(x: CTCInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return label, token and score of each step on the best path, and the score of the path.

    The carries are 0 before they are sent, so the flags and counters are zeroed together with them.
    """
    x = contiguous(x)
    logits, (T, N, _), device = x.logits, x.logits.shape, x.logits.device
    num_chunks, num_blocks = x.max_target_len // CHUNK + 1, cdiv(T, SAVE_EVERY)
    carry_steps = num_blocks * SAVE_EVERY
    has_carries = num_chunks > 1
    tile_counter, flags, finished, carries = zeroed_words(
        device, int(has_carries), N, N, num_chunks * N * carry_steps if has_carries else 1
    )
    pointers = torch.empty((N, num_chunks, num_blocks, 32), dtype=torch.int32, device=device)
    block_sums = torch.empty((N, cdiv(T, ALIGNMENT_STEPS)), dtype=torch.float64, device=device)
    ends = torch.empty((N, 2), dtype=torch.float64, device=device)
    states = torch.empty((N, T), dtype=torch.int32, device=device)
    classes, tokens = (torch.empty((N, T), dtype=torch.int64, device=device) for _ in range(2))
    scores = torch.empty((N, T), dtype=acc_dtype(logits.dtype), device=device)
    score = torch.empty(N, dtype=scores.dtype, device=device)
    maxima = sums = None
    if x.from_logits:
        maxima, sums = (torch.empty((T, N), dtype=scores.dtype, device=device) for _ in range(2))
        launch_normalize(x, maxima, sums, flags=flags)
    paths, targets = BestPaths(pointers, ends, flags), target_tensors(x)
    tensors = ScoreTensors(logits, x.label_priors, maxima, sums, None)
    numbers = numbers_of(x, num_chunks, num_blocks, carry_steps)
    launch_lanes(
        VITERBI,
        N * num_chunks,
        logits.device,
        scores=tensors._replace(maxima=None, sums=None) if x.star is None else tensors,
        targets=targets,
        paths=paths,
        carries_ptr=carries,
        tile_counter_ptr=tile_counter,
        **numbers,
    )
    launch_lanes(
        BACKTRACE,
        N,
        logits.device,
        targets=targets._replace(labels=None),
        paths=paths,
        states_ptr=states,
        **{name: numbers[name] for name in BACKTRACE_SIZES},
    )
    launch(
        ctc_alignment_kernel,
        N * block_sums.shape[1],
        scores=tensors,
        targets=targets._replace(input_lengths=None),
        paths=paths._replace(pointers=None),
        states_ptr=states,
        finished_ptr=finished,
        block_sums_ptr=block_sums,
        classes_ptr=classes,
        tokens_ptr=tokens,
        scores_ptr=scores,
        score_ptr=score,
        stride_c=numbers["stride_c"],
        **{name: numbers[name] for name in ALIGNMENT_SIZES},
        BLOCK_T=ALIGNMENT_STEPS,
        num_warps=4,
    )
    return classes, tokens, scores, score
