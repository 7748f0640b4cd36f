"""Batches of transducers as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ....primitives.cpu.batch import as_integers
from ....primitives.cpu.jit import jit


class Batch(NamedTuple):
    """The targets and the lengths of a batch.

    Fields:
        targets: `[B, U]`.
        steps, labels: the lengths, `[B]`; 0 for an invalid sequence.
        invalid: whether a label or a length is out of range, `[B]`.
        blank: the class of the blank.
        T, V: the steps of the nodes, and their classes.
    """

    targets: Any
    steps: Any
    labels: Any
    invalid: Any
    blank: int
    T: int
    V: int


class Arcs(NamedTuple):
    """The kinds of arcs.

    Fields:
        steps: the steps by which each advances, `[A]`.
        labels: the labels by which each advances, `[A]`.
    """

    steps: Any
    labels: Any


def arcs_of(durations: Sequence[int]) -> Arcs:
    """Return the blanks and then the labels of all durations, or without these those of RNN-T."""
    if not durations:
        return Arcs(np.array([1, 0]), np.array([0, 1]))
    K = len(durations)
    return Arcs(np.array([*durations] * 2), np.array([0] * K + [1] * K))


@jit
def find_invalid(
    targets: Any, logit_lengths: Any, target_lengths: Any, T: int, V: int, blank: int
) -> Any:
    """Return whether each sequence has a label or a length that is out of range."""
    invalid = np.empty(len(targets), np.bool_)
    for b in range(len(invalid)):
        length = target_lengths[b]
        valid = 0 <= logit_lengths[b] <= T and 0 <= length <= targets.shape[1]
        if valid:
            for u in range(length):
                label = targets[b, u]
                valid = valid and 0 <= label < V and label != blank
        invalid[b] = not valid
    return invalid


def as_batch(
    shape: Sequence[int],
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
) -> Batch:
    """Return the arguments of an op as arrays, given the shape of the logits, `[B, T, U1, V]`."""
    _, T, _, V = shape
    labels, *lengths = map(as_integers, (targets, logit_lengths, target_lengths))
    invalid = find_invalid(labels, *lengths, T, V, blank)
    steps, sizes = (np.where(invalid, 0, x) for x in lengths)
    return Batch(labels, steps, sizes, invalid, blank, T, V)
