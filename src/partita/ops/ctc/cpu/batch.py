"""The targets of a CTC batch for the kernels on the CPU, and the scores of a step.

A star in the targets is one more class, C.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ....primitives.cpu.batch import LOWEST, as_array
from ....primitives.cpu.jit import jit
from ....runtime.register import resolved
from ..common import ScoreOptions

IMPOSSIBLE = LOWEST / 2  # a smaller value is the sum of LOWEST and log-probabilities


class CTCBatch(NamedTuple):
    """The targets and the lengths of a batch as the user gave them; see `sequence_lengths`.

    Fields:
        labels: all labels, `[num_labels]`.
        offsets: index of each sequence's first label, `[N]`.
        lengths: number of steps, `[N]`.
        target_lengths: number of labels, `[N]`.
        blank: the class of the blank.
        star: the label that stands for any class, or a class where there is none.
        priors: what is subtracted from the log-probability of each class, `[C]`; empty for nothing.
        max_target_len: an upper bound of all target lengths.
        T: number of steps of the logits.
        C: number of classes.
    """

    labels: Any
    offsets: Any
    lengths: Any
    target_lengths: Any
    blank: int
    star: int
    priors: Any
    max_target_len: int
    T: int
    C: int

    @property
    def sources(self) -> range:
        """The edges and the classes of a step. Their number measures the work of a step."""
        return range(3 * (2 * self.max_target_len + 1) + self.C)


def as_batch(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    max_target_len: int,
    blank: int,
    options: ScoreOptions,
) -> CTCBatch:
    """Return the arguments of an op as arrays."""
    priors = np.empty(0)
    if options.label_priors is not None:
        priors = options.prior_scale * as_array(options.label_priors)
    return CTCBatch(
        labels=resolved(labels).long().reshape(-1).numpy(),
        offsets=resolved(offsets).contiguous().numpy(),
        lengths=resolved(input_lengths).contiguous().numpy(),
        target_lengths=resolved(target_lengths).contiguous().numpy(),
        blank=blank,
        star=blank if options.star is None else options.star,
        priors=priors,
        max_target_len=max_target_len,
        T=logits.shape[0],
        C=logits.shape[2],
    )


@jit
def sequence_lengths(batch: Any, n: int) -> tuple[int, int, bool]:
    """Return the number of steps and of labels of a sequence, and whether it is valid.

    A sequence is invalid if one of its labels or lengths is out of range. Its lengths are 0, so no
    index that is computed from them is out of bounds.
    """
    length, target_len, first = batch.lengths[n], batch.target_lengths[n], batch.offsets[n]
    valid = 0 <= length <= batch.T and 0 <= target_len <= batch.max_target_len
    valid = valid and 0 <= first <= len(batch.labels) - target_len
    if valid:
        for i in range(first, first + target_len):
            label = batch.labels[i]
            valid = valid and (0 <= label < batch.C or label == batch.star)
    return (length, target_len, True) if valid else (0, 0, False)


@jit
def fill_states(batch: Any, n: int, target_len: int, labels: Any, skips: Any) -> int:
    """Fill in the class of each state and the score of the edge that skips a blank into it.

    That score is 0 between two different labels and LOWEST otherwise. Return the number of states.
    """
    states = 2 * target_len + 1
    for c in range(states):
        label = batch.labels[batch.offsets[n] + c // 2] if c % 2 else batch.blank
        labels[c] = min(label, batch.C)  # the one label beyond the classes is the star
        skips[c] = 0.0 if c > 1 and labels[c] != labels[c - 2] else LOWEST
    return states


@jit
def fill_emitted(
    batch: Any, row: Any, lse: float, labels: Any, states: int, has_star: bool, emitted: Any
) -> None:
    """Fill in the score of each state's label at a step; that of the star is 0."""
    if has_star:
        for c in range(states):
            emitted[c] = row[labels[c]] - lse if labels[c] < batch.C else 0.0
    else:
        for c in range(states):
            emitted[c] = row[labels[c]] - lse
    if len(batch.priors):
        for c in range(states):
            emitted[c] -= batch.priors[labels[c]] if labels[c] < batch.C else 0.0


@jit
def init_alpha(alpha: Any, states: int) -> None:
    """Set alpha before the first step: only the first blank, from which the first label follows."""
    for c in range(states + 2):
        alpha[c] = LOWEST
    alpha[2] = 0.0


@jit
def has_nan(alpha: Any) -> bool:
    """Return whether a state is NaN, which it is from the first step on at which its label is."""
    found = False
    for c in range(len(alpha)):
        found = found | (alpha[c] != alpha[c])
    return found
