"""Join the base calls of the overlapping chunks of one long read."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from .basecalls import Basecalls


def stitch(calls: Basecalls, overlap: int, *, length: int | None = None) -> Basecalls:
    """Return the called bases of one long read, given those of its overlapping chunks.

    Between two chunks the read goes on from the first to the second at a step of their overlap at
    which both are in the same k-mer and moved into it at the same step, the nearest such step to
    the middle. Where there is none, it is the nearest step at which both are in the same k-mer, and
    then the middle.

    Args:
        calls: what `ctc_crf_decode` returned for the N chunks of one read, in their order along the
            batch. All chunks have T steps, but the last one may have fewer (`input_lengths`).
        overlap: the number of steps, from 0 to T / 2, that a chunk shares with the next one. Chunk
            n begins at step n * (T - overlap) of the read.
        length: the number of steps of the read, where the last chunk has fewer than T; all steps of
            all chunks if None.

    Returns:
        `Basecalls` of one read: N is 1, S = `length` + k, and the steps count from the start of the
        read. The first k bases are those of the first chunk. Each base has the log-probability in
        nats that its chunk gave it. A chunk without a path leaves the read without bases. The
        computation stays on the device.

    Raises:
        TypeError, ValueError: wrong types, shapes or numbers.

    Source: Oxford Nanopore's bonito, 2020, whose `stitch` goes on in the middle of each overlap.

    Example:
        >>> import torch, partita
        >>> scores = torch.randn(80, 1, 4, 5, generator=torch.Generator().manual_seed(0)) * 9
        >>> chunks = torch.cat([scores[:50], scores[30:]], 1)  # [50, 2, 4, 5], 20 steps in both
        >>> calls = partita.ctc_crf_decode(chunks, state_len=1, alphabet_size=5)
        >>> whole = partita.ctc_crf_decode(scores, state_len=1, alphabet_size=5)
        >>> partita.stitch(calls, 20).to_string() == whole.to_string()
        True
    """
    N, T, k = _check_calls(calls)
    stride = T - _check_overlap(overlap, T)
    total = _check_length(length, N, T, stride)
    position = k - 1 + calls.moves.cumsum(1)  # [N, T], the base of each step
    cut = _cuts(calls, position, overlap)  # [N - 1]
    step = torch.arange(T, device=cut.device)
    begin, end = cut.new_zeros(N), cut.new_full((N,), T)
    begin[1:], end[:-1] = cut, stride + cut
    own = (step >= begin[:, None]) & (step < end[:, None])  # the steps that each chunk gives
    read_step = step + stride * torch.arange(N, device=cut.device)[:, None]
    moves = own & calls.moves & (read_step < total)
    # Moves go to the bases of the read, and the other steps to a base that is dropped.
    index = torch.where(moves, k - 1 + moves.flatten().cumsum(0).view(N, T), total + k).flatten()

    def joined(first: Tensor, of_moves: Tensor) -> Tensor:
        bases = first.new_zeros(total + k + 1).scatter_(0, index, of_moves.flatten())
        bases[:k] = first
        return bases[None, :-1]

    number = torch.where((calls.lengths > 0).all(), k + moves.sum(), 0)[None]
    valid = torch.arange(total + k, device=cut.device) < number[:, None]
    labels = joined(calls.labels[0, :k], calls.labels.gather(1, position))
    log_probs = joined(calls.log_probs[0, :k], calls.log_probs.gather(1, position))
    steps = joined(calls.steps[0, :k], read_step)
    read_moves = moves.new_zeros(total + 1)
    read_moves.scatter_(0, torch.where(moves, read_step, total).flatten(), True)
    return Basecalls(
        torch.where(valid, labels, 0),
        number,
        torch.where(valid, log_probs, 0.0),
        torch.where(valid, steps, -1),
        (read_moves[:-1] & (number > 0))[None],
    )


def _check_calls(calls: Basecalls) -> tuple[int, int, int]:
    """Return N, T and k."""
    if not isinstance(calls, Basecalls):
        raise TypeError(f"calls: expected Basecalls, got {type(calls).__name__}")
    N, T = calls.moves.shape
    S = calls.labels.shape[1]
    if N < 1 or S <= T:
        raise ValueError(
            "calls: expected moves [N, T] and labels [N, T + k] of at least one chunk,"
            f" got {[N, T]} and {list(calls.labels.shape)}"
        )
    return N, T, S - T


def _check_overlap(overlap: int, T: int) -> int:
    checks.python_int("overlap", overlap)
    if not 0 <= overlap <= T // 2:
        raise ValueError(
            f"overlap: expected steps from 0 to {T // 2}, half of a chunk of {T}, got {overlap}"
        )
    return overlap


def _check_length(length: int | None, N: int, T: int, stride: int) -> int:
    """Return the number of steps of the read."""
    longest = (N - 1) * stride + T
    if length is None:
        return longest
    checks.python_int("length", length)
    # The last chunk goes at least as far as the one before it.
    shortest = longest - stride if N > 1 else 0
    if not shortest <= length <= longest:
        raise ValueError(
            f"length: expected steps from {shortest} to {longest} for {N} chunks of {T},"
            f" got {length}"
        )
    return length


def _cuts(calls: Basecalls, position: Tensor, overlap: int) -> Tensor:
    """Return the step of each later chunk with which it follows on the chunk before, `[N - 1]`.

    `position` is the base of each step, `[N, T]`. The step `overlap` stands for the first step
    after the overlap.
    """
    N, T = position.shape
    stride, k = T - overlap, calls.labels.shape[1] - T
    step = torch.arange(overlap + 1, device=position.device)
    if not T:
        return step.expand(N - 1, 1)[:, 0]
    # The base before each step; before the first step it is the last of the first k.
    base = torch.nn.functional.pad(position, (1, 0), value=k - 1)
    before, after = base[:-1, stride:], base[1:, : overlap + 1]  # [N - 1, overlap + 1]
    same = torch.ones_like(before, dtype=torch.bool)
    for i in range(k):
        same &= calls.labels[:-1].gather(1, before - i) == calls.labels[1:].gather(1, after - i)
    moved = calls.steps[1:].gather(1, after)
    together = (moved >= 0) & (calls.steps[:-1].gather(1, before) == moved + stride)
    # The rank of a step: the distance from the middle, above that of all steps that agree more.
    distance = (2 * step - overlap).abs()
    rank = distance + (overlap + 1) * (2 - same.long() - (same & together).long())
    return rank.argmin(1)
