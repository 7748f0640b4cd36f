"""What decoding of CTC-CRF returns, how it becomes text, and how chunks of a read are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks

ALPHABET = "NACGT"
BEST_PHRED, FIRST_PHRED = 50, 33  # the greatest quality, and the character of quality 0


class Basecalls(NamedTuple):
    """The called bases of a batch: k bases of the first k-mer, then one for each move, S = T + k.

    Fields:
        labels: `[N, S]` int64 from 1, as in the targets of `ctc_crf_loss`; 0 past the length.
        lengths: `[N]` int64, the number of bases; 0 where there is no path.
        log_probs: `[N, S]`, the log-probability in nats of each base; 0 past the length, and NaN
            everywhere in a sequence whose scores have NaN or +inf.
        steps: `[N, S]` int64, the step of each base's move; -1 for the first k and past the length.
        moves: `[N, T]` bool, whether a step moves into another k-mer.
    """

    labels: Tensor
    lengths: Tensor
    log_probs: Tensor
    steps: Tensor
    moves: Tensor

    def to_string(self, alphabet: str = ALPHABET) -> list[str]:
        """Return the bases of each sequence as text. The host waits for the device.

        Args:
            alphabet: the character of each label; that of 0 is not used.

        Returns:
            A list of N strings.

        Raises:
            IndexError: the alphabet has no character for a label.

        Example:
            >>> import torch, partita
            >>> scores = torch.zeros(3, 1, 4, 5)  # single bases
            >>> scores[1, 0, 2, 1 + 0] = 9.0  # the second step moves from the first to the third
            >>> scores[0, 0, 0, 0] = scores[2, 0, 2, 0] = 5.0
            >>> partita.ctc_crf_decode(scores, state_len=1, alphabet_size=5).to_string()
            ['AG']
        """
        greatest = int(self.labels.max()) if self.labels.numel() else 0
        if greatest >= len(alphabet):
            raise IndexError(
                f"alphabet: expected a character for label {greatest}, got {alphabet!r}"
            )
        rows = zip(self.labels.tolist(), self.lengths.tolist(), strict=True)
        return ["".join(alphabet[label] for label in row[:length]) for row, length in rows]

    def to_fastq(self, names: Sequence[str] | None = None, alphabet: str = ALPHABET) -> str:
        """Return the bases and their Phred qualities as FASTQ. The host waits for the device.

        Args:
            names: the name of each sequence; its number by default.
            alphabet: as in `to_string`.

        Returns:
            Four lines for each sequence. A quality is -10 log10 of the probability that the base is
            another one, at most 50.

        Raises:
            ValueError: another number of names than of sequences; NaN among the log-probabilities.

        Example:
            >>> import torch, partita
            >>> scores = torch.zeros(1, 1, 4, 5)
            >>> scores[0, 0, 3, 0] = 9.0  # stay in the last base
            >>> calls = partita.ctc_crf_decode(scores, state_len=1, alphabet_size=5)
            >>> calls.to_fastq(["read"])
            '@read\\nT\\n+\\n<\\n'
        """
        if names is not None and len(names) != len(self.labels):
            raise ValueError(f"names: expected {len(self.labels)} names, got {len(names)}")
        if (index := checks.first_index(self.log_probs.isnan().any(1))) is not None:
            raise ValueError(
                f"log_probs: expected numbers, got NaN in sequence {index[0]}, whose scores had NaN"
            )
        error = -torch.expm1(self.log_probs.double())
        phred = (-10 * error.log10()).clamp(0, BEST_PHRED).round().long() + FIRST_PHRED
        texts = []
        for n, (text, row) in enumerate(zip(self.to_string(alphabet), phred.tolist(), strict=True)):
            quality = "".join(map(chr, row[: len(text)]))
            texts.append(f"@{n if names is None else names[n]}\n{text}\n+\n{quality}\n")
        return "".join(texts)


def empty_basecalls(by_base: Tensor, state_len: int, dtype: torch.dtype) -> Basecalls:
    """Return uninitialized basecalls for posteriors `[T, N, bases]`, with qualities in `dtype`."""
    T, N = by_base.shape[:2]
    return Basecalls(
        labels=by_base.new_empty((N, T + state_len), dtype=torch.int64),
        lengths=by_base.new_empty((N,), dtype=torch.int64),
        log_probs=by_base.new_empty((N, T + state_len), dtype=dtype),
        steps=by_base.new_empty((N, T + state_len), dtype=torch.int64),
        moves=by_base.new_empty((N, T), dtype=torch.bool),
    )


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
    total = _check(calls, overlap, length)
    N, T = calls.moves.shape
    stride, k = T - overlap, calls.labels.shape[1] - T
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


def _check(calls: Basecalls, overlap: int, length: int | None) -> int:
    """Return the number of steps of the read."""
    if not isinstance(calls, Basecalls):
        raise TypeError(f"calls: expected Basecalls, got {type(calls).__name__}")
    N, T = calls.moves.shape
    if N < 1 or calls.labels.shape[1] <= T:
        raise ValueError(
            "calls: expected moves [N, T] and labels [N, T + k] of at least one chunk,"
            f" got {[N, T]} and {list(calls.labels.shape)}"
        )
    checks.python_int("overlap", overlap)
    if not 0 <= overlap <= T // 2:
        raise ValueError(
            f"overlap: expected steps from 0 to {T // 2}, half of a chunk of {T}, got {overlap}"
        )
    stride = T - overlap
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
