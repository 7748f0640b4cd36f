"""The lattices of CTC for the kernels on the CPU.

A star in the targets is one more class, C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ....primitives.cpu.batch import LOWEST, as_array, as_integers, as_steps, run_over_sequences
from ....primitives.cpu.jit import jit
from ....primitives.cpu.logits import Logits
from ..common import ScoreOptions

IMPOSSIBLE = LOWEST / 2  # a smaller value is the sum of LOWEST and log-probabilities


class CTCBatch(NamedTuple):
    """The targets and the lengths of a batch as the user gave them; see `Lattice`.

    Fields:
        labels: all labels, `[num_labels]`.
        offsets: index of each sequence's first label, `[N]`.
        lengths: number of steps, `[N]`.
        target_lengths: number of labels, `[N]`.
        max_target_len: an upper bound of all target lengths.
        blank: the class of the blank.
        star: the label that stands for any class, or a class where there is none.
        priors: what is subtracted from the log-probability of each class, `[C]`; empty for nothing.
    """

    labels: Any
    offsets: Any
    lengths: Any
    target_lengths: Any
    max_target_len: int
    blank: int
    star: int
    priors: Any


class Lattice(NamedTuple):
    """The lattice of a sequence. The M states are blank, label, blank, ..., blank.

    Fields:
        length, target_len: the numbers of steps and labels.
        is_valid: whether lengths and labels are in range. Otherwise the lengths are 0, so that no
            index that is computed from them is out of bounds.
        classes: the class of each state, `[M]`.
        skips: the score of the edge that skips a blank into a state, `[M]`: 0 between two different
            labels and LOWEST otherwise.
        has_star: whether a label is the star.
    """

    length: int
    target_len: int
    is_valid: bool
    classes: Any
    skips: Any
    has_star: bool


def as_batch(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    max_target_len: int,
    blank: int,
    from_logits: bool,
    options: ScoreOptions,
) -> tuple[CTCBatch, Logits]:
    """Return the arguments of an op as arrays."""
    priors = np.empty(0)
    if options.label_priors is not None:
        priors = options.prior_scale * as_array(options.label_priors)
    T, _, C = logits.shape
    batch = CTCBatch(
        labels=as_integers(labels.reshape(-1)),
        offsets=as_integers(offsets),
        lengths=as_integers(input_lengths),
        target_lengths=as_integers(target_lengths),
        max_target_len=max_target_len,
        blank=blank,
        star=blank if options.star is None else options.star,
        priors=priors,
    )
    return batch, Logits(as_steps(logits), T, C, from_logits)


def run_over_lattices(
    kernel: Callable[..., Any], batch: CTCBatch, logits: Logits, *args: Any
) -> None:
    """Run `kernel(sequences, batch, logits, *args)` for all sequences."""
    work = 3 * (2 * batch.max_target_len + 1) + logits.C  # the edges and the classes of a step
    run_over_sequences(kernel, batch.lengths, work, batch, logits, *args)


@jit
def lattice_of(batch: Any, logits: Any, n: int) -> Lattice:
    """Return the lattice of a sequence."""
    length, target_len, first = batch.lengths[n], batch.target_lengths[n], batch.offsets[n]
    is_valid = 0 <= length <= logits.T and 0 <= target_len <= batch.max_target_len
    is_valid = is_valid and 0 <= first <= len(batch.labels) - target_len
    if is_valid:
        for i in range(first, first + target_len):
            label = batch.labels[i]
            is_valid = is_valid and (0 <= label < logits.C or label == batch.star)
    if not is_valid:
        length, target_len = 0, 0
    states, has_star = 2 * target_len + 1, False
    classes, skips = np.empty(states, np.int64), np.empty(states)
    for c in range(states):
        label = batch.labels[first + c // 2] if c % 2 else batch.blank
        classes[c] = min(label, logits.C)  # the one label beyond the classes is the star
        has_star = has_star or classes[c] == logits.C
        skips[c] = 0.0 if c > 1 and classes[c] != classes[c - 2] else LOWEST
    return Lattice(length, target_len, is_valid, classes, skips, has_star)


@jit
def fill_emitted(batch: Any, lattice: Any, row: Any, lse: float, emitted: Any) -> None:
    """Fill in the score of each state's class at a step; that of the star is 0."""
    classes, C = lattice.classes, len(row)
    if lattice.has_star:
        for c in range(len(classes)):
            emitted[c] = row[classes[c]] - lse if classes[c] < C else 0.0
    else:
        for c in range(len(classes)):
            emitted[c] = row[classes[c]] - lse
    if len(batch.priors):
        for c in range(len(classes)):
            emitted[c] -= batch.priors[classes[c]] if classes[c] < C else 0.0


@jit
def has_nan(alpha: Any) -> bool:
    """Return whether a state is NaN, which it is from the first step on at which its label is."""
    found = False
    for c in range(len(alpha)):
        found = found | (alpha[c] != alpha[c])
    return found
