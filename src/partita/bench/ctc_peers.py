"""CTC by others: PyTorch, seqdist, torchaudio, and the recipe of basecallers with koi's kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .chain_peers import beyond_fp32_kernels, loop_logz

MAX_STATES = 1024  # a block has one thread for each state
# koi has this number too. The gradient of logaddexp is NaN where both arguments are infinite.
UNREACHED = -1e30


class CTCInputs(NamedTuple):
    """A batch of inputs and their targets, all of full length.

    Fields:
        logits: `[T, N, C]`; log-probabilities for an alignment.
        targets: `[N, S]` int64, padded with labels.
        input_lengths, target_lengths: `[N]` int64, on the CPU.
    """

    logits: Tensor
    targets: Tensor
    input_lengths: Tensor
    target_lengths: Tensor


class CRFInputs(NamedTuple):
    """Scores of the edges between k-mers, and the target bases.

    Fields:
        scores: `[T, N, C, 5]`, of staying and of entering from each of four k-mers.
        source: `[C, 5]`, the table of these k-mers.
        targets: `[N, S]` int64 from 1 to 4, and 0 past the length of a target.
        target_lengths: `[N]` int64, on the device.
        state_len: the number of bases of a k-mer.
    """

    scores: Tensor
    source: Tensor
    targets: Tensor
    target_lengths: Tensor
    state_len: int


def native_loss(
    logits: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
) -> Tensor:
    """Compute the summed loss by PyTorch's own kernels.

    cuDNN's kernels take 256 labels at most, and other arguments.
    """
    log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    with torch.backends.cudnn.flags(enabled=False):
        return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, reduction="sum")


def seqdist_loss() -> Callable[..., Tensor]:
    """Return the summed loss of seqdist, whose own function has the mean alone."""
    library: Any = importlib.import_module("seqdist.ctc")

    def function(logits: Tensor, targets: Tensor, *lengths: Tensor) -> Tensor:
        lengths_on_device = [length.to(logits.device, non_blocking=True) for length in lengths]
        states = library.prepare_inputs(logits.log_softmax(-1), targets, *lengths_on_device)
        return -library._Logz.apply(*states, library._fwd_bwd_cupy, library.Log).sum()

    return function


def torchaudio_align() -> Callable[..., Tensor]:
    """Return the function that finds the class of each step, `[N, T]`."""
    library: Any = importlib.import_module("torchaudio.functional")
    align = library.forced_align

    def function(log_probs: Tensor, targets: Tensor, *lengths: Tensor) -> Tensor:
        return align(
            log_probs.transpose(0, 1), targets, *(length.to(log_probs.device) for length in lengths)
        )[0]

    return function


class TargetIndex(NamedTuple):
    """The indices of the scores of a target's alignments among the scores of a step.

    Fields:
        stay: `[N, S - k + 1]`, for staying in each k-mer of the target.
        move: `[N, S - k]`, for entering each k-mer from the one before it.
    """

    stay: Tensor
    move: Tensor


def target_index(targets: Tensor, state_len: int, bases: int) -> TargetIndex:
    """Return the indices of the edges, by the k-mer that is entered and the base that leaves."""
    labels = (targets - 1).clamp(min=0)
    weights = bases ** torch.arange(state_len - 1, -1, -1, device=targets.device)
    stay = (labels.unfold(1, state_len, 1) * weights).sum(-1) * (bases + 1)
    return TargetIndex(stay, stay[:, 1:] + 1 + labels[:, : stay.shape[1] - 1])


def _recipe(
    inputs: CRFInputs, full_logz: Callable[..., Tensor], aligned_logz: Callable[..., Tensor]
) -> Tensor:
    """Compute the mean loss as basecallers write it.

    A share of log Z is subtracted from the scores of each step. Then log Z of the target's
    alignments is minus the loss.
    """
    scores, source, targets, lengths, state_len = inputs
    T, N, C, K = scores.shape
    ends = torch.zeros(
        N, C, dtype=torch.promote_types(scores.dtype, torch.float32), device=scores.device
    )
    normal = scores.flatten(2) - full_logz(scores, source, ends, ends)[:, None] / T
    stay, move = (
        normal.gather(2, index.expand(T, -1, -1))
        for index in target_index(targets, state_len, K - 1)
    )
    return -(aligned_logz(stay, move, lengths + 1 - state_len) / lengths).mean()


def _loop_aligned(stay: Tensor, move: Tensor, lengths: Tensor) -> Tensor:
    """Compute log Z of the alignments of each target, `[N]`."""
    alpha = torch.full_like(stay[0], UNREACHED)
    alpha[:, 0] = 0.0
    for staying, moving in zip(stay, move, strict=True):
        alpha = torch.logaddexp(
            staying + alpha, F.pad(moving + alpha[:, :-1], (1, 0), value=UNREACHED)
        )
    return alpha.gather(1, lengths[:, None] - 1).squeeze(1)


def loop_crf_loss(*inputs: Any) -> Tensor:
    return _recipe(CRFInputs(*inputs), loop_logz, _loop_aligned)


def koi_crf_loss() -> Callable[..., Tensor]:
    library: Any = importlib.import_module("koi.ctc")

    def full_logz(*inputs: Tensor) -> Tensor:
        return library.logZ_cu_sparse(*inputs, library.Log, 1)

    return lambda *inputs: _recipe(CRFInputs(*inputs), full_logz, library.logZ_cu)


def beyond_seqdist_or_koi(inputs: Any) -> str | None:
    """Return why the kernels of koi and seqdist cannot take the inputs of a case, or None."""
    if isinstance(inputs, CRFInputs):
        return beyond_fp32_kernels((inputs.scores, inputs.source))
    if not isinstance(inputs, CTCInputs):
        return beyond_fp32_kernels(inputs)
    if inputs.logits.device.type != "cuda":
        return "needs a GPU"
    if inputs.logits.dtype not in (torch.float32, torch.float64):
        return "takes fp32 and fp64 logits only"
    if 2 * inputs.targets.shape[1] + 1 > MAX_STATES:
        return f"takes at most {(MAX_STATES - 1) // 2} labels"
    return None


def beyond_torchaudio(inputs: CTCInputs) -> str | None:
    return None if len(inputs.targets) == 1 else "takes one sequence only"
