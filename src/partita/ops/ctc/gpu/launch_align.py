"""CTC's alignment on a GPU: a Viterbi scan and its backtrace (`align.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime import launch as runtime_launch
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv
from .align import BACKTRACE, VITERBI, BestPaths, ctc_alignment_kernel
from .call import launch_normalize, score_arguments
from .lanes import launch_lanes
from .lattice import TargetTensors
from .plan import CHUNK, SAVE_EVERY
from .scores import ScoreTensors

ALIGNMENT_STEPS = 256  # steps of a program of the alignment kernel


def ctc_align(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    max_target_len: int,
    blank: int,
    from_logits: bool,
    label_priors: Tensor | None = None,
    prior_scale: float = 1.0,
    star: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return label, token and score of each step on the best path, and the score of the path.

    The carries are 0 before they are sent, so the flags and counters are zeroed together with them.
    """
    (T, N, C), device = logits.shape, logits.device
    options = score_arguments(label_priors, prior_scale, star)
    targets = TargetTensors(labels.contiguous(), offsets, input_lengths, target_lengths)
    num_chunks, num_blocks = max_target_len // CHUNK + 1, cdiv(T, SAVE_EVERY)
    carry_steps = num_blocks * SAVE_EVERY
    words = N + N % 2  # Each part of the zeros starts on 16 bytes.
    carry_words = num_chunks * N * carry_steps if num_chunks > 1 else 0
    zeros = torch.zeros(2 + 2 * words + carry_words, dtype=torch.int64, device=device)
    tile_counter, flags, finished, carries = zeros.split([2, words, words, carry_words])
    pointers = torch.empty((N, num_chunks, num_blocks, 32), dtype=torch.int32, device=device)
    block_sums = torch.empty((N, cdiv(T, ALIGNMENT_STEPS)), dtype=torch.float64, device=device)
    ends = torch.empty((N, 2), dtype=torch.float64, device=device)
    states = torch.empty((N, T), dtype=torch.int32, device=device)
    classes, tokens = (torch.empty((N, T), dtype=torch.int64, device=device) for _ in range(2))
    scores = torch.empty((N, T), dtype=acc_dtype(logits.dtype), device=device)
    score = torch.empty(N, dtype=scores.dtype, device=device)
    maxima = sums = None
    if from_logits:
        maxima, sums = (torch.empty((T, N), dtype=scores.dtype, device=device) for _ in range(2))
        launch_normalize(logits, input_lengths, maxima, sums, options, flags=flags)
    paths = BestPaths(pointers, ends, flags)
    tensors = ScoreTensors(logits, None, options.priors, maxima, sums, None)
    sizes = {
        "T": T,
        "N": N,
        "M": labels.numel(),
        "max_target_len": max_target_len,
        "num_chunks": num_chunks,
        "num_blocks": num_blocks,
    }
    rows: dict[str, int | None] = dict(
        zip(("stride_t", "stride_n", "stride_c"), logits.stride(), strict=True)
    )
    rows |= {"blank": blank, "prior_scale": options.scale, "star": star}
    launch_lanes(
        VITERBI,
        N * num_chunks,
        logits.device,
        scores=tensors._replace(maxima=None, sums=None) if star is None else tensors,
        targets=targets,
        paths=paths,
        carries_ptr=carries,
        tile_counter_ptr=tile_counter if num_chunks > 1 else None,
        C=C,
        carry_steps=carry_steps,
        **sizes,
        **rows,
    )
    launch_lanes(
        BACKTRACE,
        N,
        logits.device,
        targets=targets._replace(labels=None),
        paths=paths,
        states_ptr=states,
        **sizes,
    )
    runtime_launch.launch(
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
        T=T,
        N=N,
        **rows,
        BLOCK_T=ALIGNMENT_STEPS,
        num_warps=4,
    )
    return classes, tokens, scores, score
