"""What decoding of CTC-CRF returns, and how it becomes text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.checks import first_index

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
        if (index := first_index(self.log_probs.isnan().any(1))) is not None:
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
