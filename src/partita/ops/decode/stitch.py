"""Joining the called bases of chunks that overlap, for a batch of reads at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime import checks
from ...runtime.lengths import on_device
from .basecalls import Basecalls


def stitch(
    calls: Basecalls | Sequence[Basecalls],
    overlap: int,
    *,
    length: int | Sequence[int] | None = None,
    chunks: Sequence[int] | None = None,
) -> Basecalls:
    """Return the called bases of long reads, given those of their overlapping chunks.

    Between two chunks a read goes on from the first to the second at a step of their overlap at
    which both are in the same k-mer and moved into it at the same step, the nearest such step to
    the middle. Where there is none, it is the nearest step at which both are in the same k-mer, and
    then the middle.

    Args:
        calls: what `ctc_crf_decode` returned for the chunks of one read, in their order along the
            batch, or a list of these for several reads. All chunks have T steps, but the last one
            of a read may have fewer (`input_lengths`).
        overlap: the number of steps, from 0 to T / 2, that a chunk shares with the next one. Chunk
            n of a read begins at its step n * (T - overlap).
        length: the number of steps of the read or of each read, where the last chunk has fewer
            than T; all steps of all chunks if None.
        chunks: the number of chunks of each read, where one batch has the chunks of several reads,
            one read after another. A list of `calls` then has the batches in their order.

    Returns:
        `Basecalls` of the R reads: N is R, S = the greatest `length` + k, and the steps count from
        the start of each read. Its first k bases are those of its first chunk. Each base has the
        log-probability in nats that its chunk gave it. A chunk without a path leaves its read
        without bases. The computation stays on the device, and the host does not wait.

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
        >>> partita.stitch(calls, 20, chunks=[1, 1]).lengths.equal(calls.lengths)  # two reads
        True
    """
    calls, counts, totals = _reads(calls, overlap, length, chunks)
    N, T = calls.moves.shape
    R, longest = len(counts), max(totals, default=0)
    stride, k = T - overlap, calls.labels.shape[1] - T
    device = calls.labels.device
    of_reads = torch.tensor([counts, totals], dtype=torch.int64, device="cpu")
    number, total = on_device(device, *of_reads)  # [R]
    last = number.cumsum(0)  # the chunk after the last one of each read
    first = last - number
    read = torch.arange(R, device=device).repeat_interleave(number, output_size=N)
    place = torch.arange(N, device=device) - first[read]  # [N], of each chunk in its read

    def of_read(x: Tensor) -> Tensor:
        """Return the sum over the chunks of each read, `[R]`."""
        before = F.pad(x.cumsum(0), (1, 0))
        return before[last] - before[first]

    position = k - 1 + calls.moves.cumsum(1)  # [N, T], the base of each step
    cut = _cuts(calls, position, overlap)  # [N - 1]
    begin = torch.where(place == 0, 0, F.pad(cut, (1, 0))[:N])
    end = torch.where(place == number[read] - 1, T, stride + F.pad(cut, (0, 1))[:N])
    step = torch.arange(T, device=device)
    own = (step >= begin[:, None]) & (step < end[:, None])  # the steps that each chunk gives
    read_step = step + stride * place[:, None]
    moves = own & calls.moves & (read_step < total[read, None])
    moved = moves.sum(1)  # [N]
    # Moves go to the bases of the read, and the other steps to a column that is dropped.
    earlier = moved.cumsum(0) - moved
    base = k - 1 + moves.cumsum(1) + (earlier - earlier[first[read]])[:, None]

    def scattered(start: Tensor, column: Tensor, values: Tensor) -> Tensor:
        """Return the values of moves in their columns `[N, T]`, after the first ones `[R, i]`."""
        i, width = start.shape[1], longest + start.shape[1] + 1
        index = read[:, None] * width + torch.where(moves, column, width - 1)
        rows = start.new_zeros(R * width).scatter_(0, index.flatten(), values.flatten())
        rows = rows.view(R, width)[:, :-1]
        rows[:, :i] = start
        return rows

    has_path = of_read((calls.lengths <= 0).long()) == 0
    lengths = torch.where(has_path, k + of_read(moved), 0)
    valid = torch.arange(longest + k, device=device) < lengths[:, None]
    labels = scattered(calls.labels[first, :k], base, calls.labels.gather(1, position))
    log_probs = scattered(calls.log_probs[first, :k], base, calls.log_probs.gather(1, position))
    steps = scattered(calls.steps[first, :k], base, read_step)
    unknown = of_read(calls.log_probs.isnan().any(1).long()) > 0
    return Basecalls(
        torch.where(valid, labels, 0),
        lengths,
        torch.where(valid, log_probs, 0.0).masked_fill(unknown[:, None], torch.nan),
        torch.where(valid, steps, -1),
        scattered(moves.new_empty(R, 0), read_step, moves) & has_path[:, None],
    )


def _reads(
    calls: Basecalls | Sequence[Basecalls],
    overlap: int,
    length: int | Sequence[int] | None,
    chunks: Sequence[int] | None,
) -> tuple[Basecalls, list[int], list[int]]:
    """Return the chunks of all reads as one batch, and how many chunks and steps each read has."""
    parts = [calls] if isinstance(calls, Basecalls) else calls
    if not isinstance(parts, (list, tuple)) or not all(isinstance(x, Basecalls) for x in parts):
        raise TypeError(f"calls: expected Basecalls or a list of them, got {type(calls).__name__}")
    if not parts:
        raise ValueError("calls: expected at least one Basecalls, got an empty list")
    shapes = sorted({(part.moves.shape[1], part.labels.shape[1]) for part in parts})
    T, S = shapes[0]
    if S <= T or len(shapes) > 1:
        raise ValueError(
            "calls: expected moves [N, T] and labels [N, T + k], with one T and one k for all"
            f" chunks, got {' and '.join(f'[N, {t}] and [N, {s}]' for t, s in shapes)}"
        )
    for part in parts:
        checks.device("calls", part.labels, parts[0].labels, "the first of them")
    checks.python_int("overlap", overlap)
    if not 0 <= overlap <= T // 2:
        raise ValueError(
            f"overlap: expected steps from 0 to {T // 2}, half of a chunk of {T}, got {overlap}"
        )
    sizes = [len(part.moves) for part in parts]
    counts = sizes if chunks is None else _integers("chunks", chunks)
    if sum(counts) != sum(sizes) or min(counts, default=1) < 1:
        raise ValueError(
            f"{'calls' if chunks is None else 'chunks'}: expected at least one chunk of each read,"
            f" and {sum(sizes)} in all, got {counts}"
        )
    batch = parts[0] if len(parts) == 1 else Basecalls(*map(torch.cat, zip(*parts, strict=True)))
    longest = [count * (T - overlap) + overlap for count in counts]
    if length is None:
        return batch, counts, longest
    totals = _integers("length", length)
    if len(totals) != len(counts):
        raise ValueError(f"length: expected {len(counts)} of them, one a read, got {len(totals)}")
    for total, most, count in zip(totals, longest, counts, strict=True):
        # The last chunk goes at least as far as the one before it.
        least = most - (T - overlap) if count > 1 else 0
        if not least <= total <= most:
            raise ValueError(
                f"length: expected steps from {least} to {most} for {count} chunks of {T},"
                f" got {total}"
            )
    return batch, counts, totals


def _integers(name: str, value: int | Sequence[int]) -> list[int]:
    """Return a number or several ones, also of a tensor, as a list, or raise `TypeError`."""
    several = isinstance(value, (list, tuple, Tensor))
    return [*checks.python_ints(name, value if several else [value])]


def _cuts(calls: Basecalls, position: Tensor, overlap: int) -> Tensor:
    """Return the step of each later chunk with which it follows on the chunk before, `[N - 1]`.

    `position` is the base of each step, `[N, T]`. The step `overlap` stands for the first step
    after the overlap.
    """
    N, T = position.shape
    stride, k = T - overlap, calls.labels.shape[1] - T
    step = torch.arange(overlap + 1, device=position.device)
    if not T:
        return step.expand(max(N - 1, 0), 1)[:, 0]
    # The base before each step; before the first step it is the last of the first k.
    base = F.pad(position, (1, 0), value=k - 1)
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
