"""Batches of transducers as arrays: lengths, and rows of logits at any strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.half import load_row, memory_of, store_row
from ....primitives.cpu.jit import jit
from ....runtime.register import resolved


class Batch(NamedTuple):
    """The targets and the lengths of a batch.

    Fields:
        targets: `[B, U]` int64.
        steps, labels: the lengths, `[B]` int64; 0 for an invalid sequence.
        invalid: whether a label or a length is out of range, `[B]`.
        blank: the class of the blank.
        T: the steps of the nodes.
    """

    targets: Any
    steps: Any
    labels: Any
    invalid: Any
    blank: int
    T: int


class Rows(NamedTuple):
    """The entries of all nodes, at any strides in memory.

    Fields:
        numbers, words, is_bf16: the memory, as from `memory_of`.
        strides: the strides of sequences, steps, positions and classes, `[4]`.
        size: the number of classes.
    """

    numbers: Any
    words: Any
    is_bf16: bool
    strides: Any
    size: int


@jit
def find_invalid(
    targets: Any, logit_lengths: Any, target_lengths: Any, T: int, V: int, blank: int, invalid: Any
) -> None:
    """Write whether each sequence has a label or a length that is out of range."""
    for b in range(len(invalid)):
        length = target_lengths[b]
        valid = 0 <= logit_lengths[b] <= T and 0 <= length <= targets.shape[1]
        if valid:
            for u in range(length):
                label = targets[b, u]
                valid = valid and 0 <= label < V and label != blank
        invalid[b] = not valid


def as_batch(
    targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, T: int, V: int, blank: int
) -> Batch:
    """Return the arguments of an op as arrays."""
    labels = resolved(targets).long().contiguous().numpy()
    lengths = [resolved(each).contiguous().numpy() for each in (logit_lengths, target_lengths)]
    invalid = np.empty(len(labels), np.bool_)
    find_invalid(labels, *lengths, T, V, blank, invalid)
    steps, sizes = (np.where(invalid, 0, each) for each in lengths)
    return Batch(labels, steps, sizes, invalid, blank, T)


def as_rows(tensor: Tensor) -> Rows:
    """Return `[B, T, U1, X]` of any dtype and strides in its own memory."""
    return Rows(*memory_of(tensor), tensor.shape[3])


@jit
def start_of_node(rows: Any, b: int, t: int, u: int) -> int:
    """Return the index in memory of the first entry of a node."""
    return b * rows.strides[0] + t * rows.strides[1] + u * rows.strides[2]


@jit
def node_row(rows: Any, b: int, t: int, u: int, buffer: Any) -> Any:
    """Return the entries of a node, contiguous: a view, or a copy in the buffer."""
    first, stride = start_of_node(rows, b, t, u), rows.strides[3]
    if stride == 1 and not len(rows.words):
        return rows.numbers[first : first + rows.size]
    load_row(rows, first, stride, buffer)
    return buffer


@jit
def store_node(rows: Any, b: int, t: int, u: int, values: Any) -> None:
    """Write the entries of a node."""
    store_row(rows, start_of_node(rows, b, t, u), rows.strides[3], values)


def nodes_of_steps(batch: Batch) -> Any:
    """Return the nodes within the lengths of each step of each sequence, `[B * T]`."""
    inside = np.arange(batch.T) < batch.steps[:, None]
    return np.where(inside, batch.labels[:, None] + 1, 0).reshape(-1)


def empty_nodes(shape: torch.Size, kinds: int) -> Any:
    """Return fp64 memory for numbers of the nodes, `[kinds, B, T, U1]`."""
    return np.empty((kinds, *shape[:3]))
