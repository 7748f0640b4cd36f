"""The results of decoding CTC-CRF, and their conversion to text with qualities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks

ALPHABET = "NACGT"
# The least and the greatest quality, and the character of quality 0, as dorado has them.
WORST_PHRED, BEST_PHRED, FIRST_PHRED = 1, 50, 33
# Before a calibration a quality is at most 60, as posteriors are exact to about 1e-6.
LEAST_ERROR = 1e-6
BINS = 100  # of a unit of quality, in which the bases of a calibration are counted


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

    def qstring(self, offset: float = 0.0, scale: float = 1.0) -> list[str]:
        """Return the Phred qualities of each sequence as FASTQ writes them. The host waits.

        The quality of a base is q = -10 log10 of the probability that the base is another one. The
        text has `scale` * q + `offset`, rounded and from 1 to 50, each as the character of 33 more.

        Args:
            offset, scale: a calibration, as `calibrate` finds it.

        Returns:
            A list of N strings, as long as those of `to_string`.

        Raises:
            TypeError, ValueError: no finite number; NaN among the log-probabilities.

        Source: Oxford Nanopore's dorado, 2023, for the range and for the calibration.

        Example:
            >>> import torch, partita
            >>> scores = torch.zeros(1, 1, 4, 5)
            >>> scores[0, 0, 3, 0] = 9.0  # stay in the last base
            >>> calls = partita.ctc_crf_decode(scores, state_len=1, alphabet_size=5)
            >>> calls.qstring(), calls.qstring(offset=-2.0, scale=0.5)
            (['<'], ['-'])
        """
        if (index := checks.first_index(self.log_probs.isnan().any(1))) is not None:
            raise ValueError(
                f"log_probs: expected numbers, got NaN in sequence {index[0]}, whose scores had NaN"
            )
        letters = (self._phred(offset, scale).long() + FIRST_PHRED).tolist()
        rows = zip(letters, self.lengths.tolist(), strict=True)
        return ["".join(map(chr, row[:length])) for row, length in rows]

    def mean_q(self, skip: int = 60, *, offset: float = 0.0, scale: float = 1.0) -> Tensor:
        """Return the quality of each sequence: that of the mean probability of an error.

        Args:
            skip: the number of first bases that do not count, because a read begins with worse
                ones. A sequence that has no more bases than these counts as a whole.
            offset, scale: as in `qstring`, whose rounded qualities are averaged.

        Returns:
            `[N]`, on the device. A sequence without bases has 0, and one with NaN has NaN.

        Raises:
            TypeError, ValueError: no finite number; a negative `skip`.

        Source: Oxford Nanopore's dorado, 2023, which skips 60 bases too.

        Example:
            >>> import torch, partita
            >>> scores = torch.zeros(1, 2, 4, 5)
            >>> scores[0, 0, 3, 0] = 9.0
            >>> partita.ctc_crf_decode(scores, state_len=1, alphabet_size=5).mean_q()
            tensor([27.,  1.])
        """
        checks.python_int("skip", skip)
        if skip < 0:
            raise ValueError(f"skip: expected a number of bases of at least 0, got {skip}")
        base = torch.arange(self.labels.shape[1], device=self.labels.device)
        length = self.lengths[:, None]
        counts = (base < length) & ((base >= skip) | (length <= skip))
        error = torch.where(counts, 10 ** (-self._phred(offset, scale) / 10), 0.0).sum(1)
        quality = -10 * (error / counts.sum(1)).log10()
        unknown = self.log_probs.isnan().any(1)
        quality = torch.where(self.lengths > 0, quality, 0.0).masked_fill(unknown, torch.nan)
        return quality.to(self.log_probs.dtype)

    def calibrate(self, correct: Tensor) -> tuple[float, float]:
        """Return the `offset` and `scale` with which qualities are those of errors that were seen.

        They have the greatest likelihood of the right and wrong bases, where a base of quality q
        is wrong with probability 10 ** -((scale * q + offset) / 10), as `qstring` writes it before
        rounding. The host waits for the device.

        Args:
            correct: `[N, S]` bool, whether each base is right, by an alignment with a sequence that
                is known. What stands past the length is ignored.

        Returns:
            `(offset, scale)`, for `qstring`, `to_fastq` and `mean_q`.

        Raises:
            TypeError, ValueError: another dtype, shape or device; not both right and wrong bases.

        Example:
            >>> import torch, partita
            >>> scores = torch.zeros(400, 1, 4, 5)
            >>> scores[..., 0] = -5.0  # a move at each step
            >>> calls = partita.ctc_crf_decode(scores, state_len=1, alphabet_size=5)
            >>> correct = torch.arange(401)[None] % 100 < 99  # one base of a hundred is wrong
            >>> offset, scale = calls.calibrate(correct)
            >>> set(calls.qstring(offset, scale)[0])
            {'5'}
        """
        checks.tensor("correct", correct)
        if correct.dtype != torch.bool:
            raise TypeError(f"correct: expected bool, got {correct.dtype}")
        checks.shape("correct", correct, self.labels.shape, "[N, S]")
        checks.device("correct", correct, self.labels, "labels")
        size = round(-10 * math.log10(LEAST_ERROR)) * BINS + 1
        counts = torch.arange(correct.shape[1], device=correct.device) < self.lengths[:, None]
        place = (self._raw_phred() * BINS).round().long() + size * correct
        wrong, right = torch.bincount(place[counts], minlength=2 * size).view(2, size).cpu()
        if not wrong.any() or not right.any():
            raise ValueError(
                "correct: expected both right and wrong bases,"
                f" got {int(right.sum())} right and {int(wrong.sum())} wrong ones"
            )
        return _calibration(wrong.double(), right.double())

    def to_fastq(
        self,
        names: Sequence[str] | None = None,
        alphabet: str = ALPHABET,
        *,
        offset: float = 0.0,
        scale: float = 1.0,
    ) -> str:
        """Return the bases and their Phred qualities as FASTQ. The host waits for the device.

        Args:
            names: the name of each sequence; its number by default.
            alphabet: as in `to_string`.
            offset, scale: as in `qstring`.

        Returns:
            Four lines for each sequence: its name, its bases, a plus, and its `qstring`.

        Raises:
            TypeError, ValueError: another number of names than of sequences; a name with a line
                break; as in `qstring`.

        Example:
            >>> import torch, partita
            >>> scores = torch.zeros(1, 1, 4, 5)
            >>> scores[0, 0, 3, 0] = 9.0  # stay in the last base
            >>> calls = partita.ctc_crf_decode(scores, state_len=1, alphabet_size=5)
            >>> calls.to_fastq(["read"])
            '@read\\nT\\n+\\n<\\n'
        """
        found: Sequence[Any] = range(len(self.labels)) if names is None else names
        if len(found) != len(self.labels):
            raise ValueError(f"names: expected {len(self.labels)} names, got {len(found)}")
        for name in found:
            if str(name).splitlines() != [str(name)]:
                raise ValueError(f"names: expected names of one line, got {name!r}")
        rows = zip(found, self.to_string(alphabet), self.qstring(offset, scale), strict=True)
        return "".join(f"@{name}\n{text}\n+\n{quality}\n" for name, text, quality in rows)

    def _raw_phred(self) -> Tensor:
        """Return the quality of each base without calibration, `[N, S]` fp64."""
        return -10 * (-torch.expm1(self.log_probs.double())).clamp(min=LEAST_ERROR).log10()

    def _phred(self, offset: float, scale: float) -> Tensor:
        """Return the rounded quality of each base, `[N, S]` fp64; NaN where it is not known."""
        for name, value in (("offset", offset), ("scale", scale)):
            checks.number(name, value, low=-math.inf, open_low=True)
        return (self._raw_phred() * scale + offset).clamp(WORST_PHRED, BEST_PHRED).round()


def _calibration(wrong: Tensor, right: Tensor) -> tuple[float, float]:
    """Return the offset and scale of a binomial regression with a logarithmic link.

    `wrong` and `right` are the numbers of bases of each quality, in steps of 1 / BINS from 0. The
    method is Fisher's scoring, with steps that are halved where they would lower the likelihood.
    """
    quality = torch.arange(len(wrong), dtype=torch.float64, device="cpu") / BINS
    x = torch.stack([torch.ones_like(quality), quality])  # [2, qualities]
    nats = -math.log(10) / 10  # the logarithm of an error, per unit of quality

    def error_and_loss(found: Tensor) -> tuple[Tensor, float]:
        error = (nats * (found @ x).clamp(WORST_PHRED, BEST_PHRED)).exp()
        return error, -float(wrong @ error.log() + right @ torch.log1p(-error))

    # It starts with one quality for all bases, which is within the range, so the loss has a slope.
    rate = float(wrong.sum() / (wrong + right).sum())
    found = x.new_tensor([math.log(rate) / nats, 0.0])
    error, loss = error_and_loss(found)
    for _ in range(100):
        phred, odds = found @ x, error / (1 - error)
        inside = (phred >= WORST_PHRED) & (phred <= BEST_PHRED)
        slope = x @ (inside * (wrong - right * odds))
        information = (x * inside * (wrong + right) * odds) @ x.T
        # The inverse is a pseudo-inverse because all bases may have the same quality.
        step = torch.linalg.pinv(information, hermitian=True) @ slope / nats
        previous, (error, loss) = loss, error_and_loss(found + step)
        while not loss <= previous:
            step /= 2
            error, loss = error_and_loss(found + step)
        found += step
        if previous - loss <= 1e-12 * previous:
            break
    offset, scale = found.tolist()
    return offset, scale


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
